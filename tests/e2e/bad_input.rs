//! Every kind of bad input: refused with a code, a reason, the field and the index; nothing is stored, the stream goes on,
//! and nobody else is harmed.

use std::collections::BTreeSet;

use hedgerow::error::{Code, Reason};
use hedgerow::limits;
use hedgerow::proto::v1;
use hedgerow::proto::v1::report_request::Event;

use crate::life::{Life, agent_end, agent_start, discard, finish, heartbeat, in_group, naming, on_base, tags, walks};
use crate::service::{about, call, floats, ids, reward, seal};

/// An event that is refused: why, which field is to blame, and which place in it.
type Bad = (Event, Reason, &'static str, Option<u64>);

fn long(bytes: usize) -> String {
    "x".repeat(bytes)
}

/// A call that is all right, changed.
fn changed(change: impl FnOnce(&mut v1::Call)) -> Event {
    let mut call = call("bad", "main", 5, &[1, 2], &[3, 4, 5]);
    change(&mut call);
    Event::Call(call)
}

fn with_logprobs(values: &[f32]) -> Event {
    changed(|call| call.generation_logprobs = Some(floats(values)))
}

fn with_spans(spans: &[(u32, u32)]) -> Event {
    let span = |(start, end): &(u32, u32)| v1::PolicyVersionSpan { start: *start, end: *end, version: 1 };
    changed(|call| call.policy_versions = spans.iter().map(span).collect())
}

fn with_start_time(seconds: i64, nanos: i32) -> Event {
    changed(|call| call.start_time = Some(prost_types::Timestamp { seconds, nanos }))
}

fn with_delta(change: impl FnOnce(&mut v1::Delta)) -> Event {
    let base = v1::Base { call_id: "good".to_owned(), length_tokens: 1, digest: vec![0; 16].into() };
    let mut delta = v1::Delta { base: Some(base), suffix_token_ids: ids(&[1]) };
    change(&mut delta);
    changed(|call| call.prompt = Some(v1::Prompt { prompt: Some(v1::prompt::Prompt::Delta(delta)) }))
}

fn with_base(change: impl FnOnce(&mut v1::Base)) -> Event {
    with_delta(|delta| change(delta.base.as_mut().expect("it was made with a base")))
}

/// Calls whose arrays are wrong.
fn bad_arrays() -> Vec<Bad> {
    let prompt = |bytes: &'static [u8]| {
        Some(v1::Prompt { prompt: Some(v1::prompt::Prompt::TokenIds(bytes::Bytes::from_static(bytes))) })
    };
    let logprobs = "call.generation_logprobs";
    let base = "call.prompt.delta.base";
    vec![
        (with_logprobs(&[-0.5; 2]), Reason::LogprobsLength, logprobs, Some(2)),
        (with_logprobs(&[-0.5; 4]), Reason::LogprobsLength, logprobs, Some(3)),
        (with_logprobs(&[]), Reason::LogprobsLength, logprobs, Some(0)),
        (with_logprobs(&[-0.5, f32::NAN, -0.5]), Reason::LogprobNotFinite, logprobs, Some(1)),
        (with_logprobs(&[-0.5, -0.5, f32::NEG_INFINITY]), Reason::LogprobNotFinite, logprobs, Some(2)),
        (with_logprobs(&[f32::INFINITY, -0.5, -0.5]), Reason::LogprobNotFinite, logprobs, Some(0)),
        (changed(|call| call.generation_logprobs = None), Reason::LogprobsMissing, logprobs, None),
        (
            changed(|call| call.generation_logprobs = Some(bytes::Bytes::from_static(&[0; 11]))),
            Reason::InvalidArrayLength,
            logprobs,
            Some(2),
        ),
        (
            changed(|call| call.generation_token_ids = bytes::Bytes::from_static(&[0; 13])),
            Reason::InvalidArrayLength,
            "call.generation_token_ids",
            Some(3),
        ),
        (changed(|call| call.prompt = prompt(&[0; 9])), Reason::InvalidArrayLength, "call.prompt.token_ids", Some(2)),
        (
            with_delta(|delta| delta.suffix_token_ids = bytes::Bytes::from_static(&[0; 5])),
            Reason::InvalidArrayLength,
            "call.prompt.delta.suffix_token_ids",
            Some(1),
        ),
        (changed(|call| call.prompt = None), Reason::MissingField, "call.prompt", None),
        (changed(|call| call.prompt = Some(v1::Prompt::default())), Reason::MissingField, "call.prompt", None),
        (with_delta(|delta| delta.base = None), Reason::MissingField, base, None),
        (with_base(|base| base.call_id.clear()), Reason::InvalidIdentifier, "call.prompt.delta.base.call_id", None),
        (
            with_base(|base| base.digest = vec![0; 15].into()),
            Reason::InvalidValue,
            "call.prompt.delta.base.digest",
            None,
        ),
        (
            with_base(|base| base.length_tokens = limits::CALL_TOKENS_MAX as u64 + 1),
            Reason::OverLimit,
            "call.prompt.delta.base.length_tokens",
            None,
        ),
        (with_base(|base| base.length_tokens = limits::CALL_TOKENS_MAX as u64), Reason::OverLimit, "call.prompt", None),
        (with_base(|base| base.length_tokens = 3), Reason::ResendFullPrompt, base, None),
        (with_base(|base| base.length_tokens = 1), Reason::ResendFullPrompt, base, None),
        (changed(|call| *call = on_base("bad", &[1], &[2], call.clone())), Reason::ResendFullPrompt, base, None),
    ]
}

/// Calls whose other fields are wrong.
fn bad_calls() -> Vec<Bad> {
    let name = Reason::InvalidIdentifier;
    let spans = "call.policy_versions";
    let many: Vec<(u32, u32)> = vec![(0, 1); limits::CALL_VERSION_SPANS_MAX + 1];
    let mut bad: Vec<Bad> = vec![
        (changed(|call| call.call_id.clear()), name, "call.call_id", None),
        (changed(|call| call.call_id = "a\u{7}".to_owned()), name, "call.call_id", None),
        (changed(|call| call.agent_id = long(257)), name, "call.agent_id", None),
        (changed(|call| call.agent_id.clear()), name, "call.agent_id", None),
        (changed(|call| call.parent_agent_id = "\n".to_owned()), name, "call.parent_agent_id", None),
        (changed(|call| call.kind = long(257)), name, "call.kind", None),
        (changed(|call| call.policy = "a\tb".to_owned()), name, "call.policy", None),
        (changed(|call| call.model = long(257)), name, "call.model", None),
        (changed(|call| call.finish_reason = long(257)), name, "call.finish_reason", None),
        (changed(|call| *call = naming("", call.clone())), name, "call.link.parent_call_id", None),
        (with_spans(&[(0, 1), (1, 1)]), Reason::InvalidValue, spans, Some(1)),
        (with_spans(&[(0, 2), (1, 3)]), Reason::InvalidValue, spans, Some(1)),
        (with_spans(&[(0, 4)]), Reason::InvalidValue, spans, Some(0)),
        (with_spans(&many), Reason::OverLimit, spans, None),
    ];
    let times = [(-1, 0), (0, -1), (0, 1_000_000_000), (253_402_300_800, 0)];
    bad.extend(
        times.map(|(seconds, nanos)| (with_start_time(seconds, nanos), Reason::InvalidValue, "call.start_time", None)),
    );
    bad
}

fn sized(size: u32) -> Event {
    Event::Open(v1::Open { group_size: Some(size), ..v1::Open::default() })
}

fn started(change: impl FnOnce(&mut v1::AgentStart)) -> Event {
    let mut start = agent_start("sub", 0);
    change(&mut start);
    Event::AgentStart(start)
}

fn stopped(change: impl FnOnce(&mut v1::AgentEnd)) -> Event {
    let mut end = agent_end("sub", 0, None);
    change(&mut end);
    Event::AgentEnd(end)
}

/// What is wrong about agents, tags and sizes.
fn bad_facts() -> Vec<Bad> {
    let name = Reason::InvalidIdentifier;
    let many_tags: Vec<String> = (0..=limits::TAGS_MAX).map(|tag| tag.to_string()).collect();
    let many_tags: Vec<(&str, &str)> = many_tags.iter().map(|tag| (tag.as_str(), "")).collect();
    let long_value = long(limits::TEXT_BYTES_MAX + 1);
    let many = |count: usize| v1::CallList { call_ids: vec!["a".to_owned(); count] };
    let read = "agent_end.answers_read_agent_ids";
    vec![
        (sized(0), Reason::InvalidValue, "open.group_size", None),
        (sized(1), Reason::InvalidValue, "open.group_size", None),
        (sized(limits::GROUP_SIZE_MAX + 1), Reason::OverLimit, "open.group_size", None),
        (tags(&many_tags), Reason::OverLimit, "open.tags", None),
        (tags(&[("", "")]), name, "open.tags[\"\"]", None),
        (tags(&[("a", &long_value)]), Reason::OverLimit, "open.tags[\"a\"]", None),
        (started(|start| start.agent_id.clear()), name, "agent_start.agent_id", None),
        (started(|start| start.parent_agent_id = long(257)), name, "agent_start.parent_agent_id", None),
        (started(|start| start.spawning_call_id = "\0".to_owned()), name, "agent_start.spawning_call_id", None),
        (
            started(|start| start.origin = Some(v1::agent_start::Origin::ForkOfCallId(String::new()))),
            name,
            "agent_start.fork_of_call_id",
            None,
        ),
        (started(|start| start.profile = long(257)), name, "agent_start.profile", None),
        (started(|start| start.model = long(257)), name, "agent_start.model", None),
        (stopped(|end| end.agent_id = "\r".to_owned()), name, "agent_end.agent_id", None),
        (stopped(|end| end.status = 0), Reason::InvalidValue, "agent_end.status", None),
        (stopped(|end| end.status = 99), Reason::InvalidValue, "agent_end.status", None),
        (stopped(|end| end.kept = Some(crate::life::list(&["a", "", "b"]))), name, "agent_end.kept.call_ids", Some(1)),
        (stopped(|end| end.kept = Some(many(limits::KEPT_CALLS_MAX + 1))), Reason::OverLimit, "agent_end.kept", None),
        (stopped(|end| end.answers_read_agent_ids = vec!["a".to_owned(), long(257)]), name, read, Some(1)),
        (
            stopped(|end| end.answers_read_agent_ids = vec!["a".to_owned(); limits::ROLLOUT_AGENTS_MAX + 1]),
            Reason::OverLimit,
            read,
            None,
        ),
    ]
}

/// What is wrong about seals, rewards and discards.
fn bad_ends() -> Vec<Bad> {
    let name = Reason::InvalidIdentifier;
    let rewarded = |value: f64, components: &[(&str, f64)]| {
        let components = components.iter().map(|(name, value)| ((*name).to_owned(), *value)).collect();
        v1::Reward { value, components, ..v1::Reward::default() }
    };
    let many: Vec<String> = (0..=limits::TAGS_MAX).map(|name| name.to_string()).collect();
    let many: Vec<(&str, f64)> = many.iter().map(|name| (name.as_str(), 0.0)).collect();
    let agents = (0..=limits::ROLLOUT_AGENTS_MAX).map(|agent| (agent.to_string(), v1::CallList::default())).collect();
    let agents = v1::Seal { kept: Some(v1::KeptCalls { agents }), expected_calls: None };
    let finished = |seal: Option<v1::Seal>, reward: Option<v1::Reward>| Event::Finish(v1::Finish { seal, reward });
    let not_finite = Reason::RewardNotFinite;
    vec![
        (Event::Seal(seal(&[("", &[])])), name, "seal.kept.agents[\"\"]", None),
        (Event::Seal(seal(&[("a", &["b", "c\n"])])), name, "seal.kept.agents[\"a\"].call_ids", Some(1)),
        (Event::Seal(agents), Reason::OverLimit, "seal.kept.agents", None),
        (Event::Reward(reward(f64::NAN)), not_finite, "reward.value", None),
        (Event::Reward(reward(f64::NEG_INFINITY)), not_finite, "reward.value", None),
        (Event::Reward(rewarded(1.0, &[("a", f64::INFINITY)])), not_finite, "reward.components[\"a\"]", None),
        (Event::Reward(rewarded(1.0, &[("", 1.0)])), name, "reward.components[\"\"]", None),
        (Event::Reward(rewarded(1.0, &many)), Reason::OverLimit, "reward.components", None),
        (finished(None, None), Reason::MissingField, "finish.reward", None),
        (finished(None, Some(reward(f64::NAN))), not_finite, "finish.reward.value", None),
        (finished(Some(seal(&[("", &[])])), Some(reward(1.0))), name, "finish.seal.kept.agents[\"\"]", None),
        (
            discard(&long(limits::TEXT_BYTES_MAX + 1), v1::DiscardDisposition::Final),
            Reason::OverLimit,
            "discard.reason",
            None,
        ),
        (
            Event::Discard(v1::Discard { reason: String::new(), disposition: 9 }),
            Reason::InvalidValue,
            "discard.disposition",
            None,
        ),
    ]
}

fn all_bad() -> Vec<Bad> {
    [bad_arrays(), bad_calls(), bad_facts(), bad_ends()].concat()
}

#[test]
fn every_reason_of_bad_input_is_among_these() {
    let mut covered: BTreeSet<Reason> = all_bad().iter().map(|bad| bad.1).collect();
    // The run's own limit has a test of its own.
    covered.insert(Reason::TokenIdOverLimit);
    let of_input = Reason::ALL.iter().filter(|reason| reason.code() == Code::InvalidArgument);
    let uncovered: Vec<_> = of_input.filter(|reason| !covered.contains(reason)).collect();
    assert!(uncovered.is_empty(), "{uncovered:?}");
}

#[tokio::test]
async fn bad_input_opens_nothing() {
    let mut life = Life::start().await;
    let rollout = about("run", "one");
    for (event, reason, field, index) in all_bad() {
        if reason == Reason::ResendFullPrompt && field == "call.prompt.delta.base" && !names_itself(&event) {
            // Without its base such a delta is not bad: it waits.
            continue;
        }
        let refusal = life.refuses(&rollout, event, reason, field).await;
        assert_eq!((refusal.index, refusal.retry_after), (index, None), "{reason:?} {field}");
        assert_eq!((refusal.run_id.as_str(), refusal.rollout_id.as_str()), ("run", "one"));
    }
    assert!(life.is_unknown(&rollout).await);
    let run = v1::GetRunRequest { run_id: "never".to_owned() };
    let bad = Event::Reward(reward(f64::NAN));
    life.refuses(&about("never", "one"), bad, Reason::RewardNotFinite, "reward.value").await;
    assert!(life.service.admin().await.get_run(run).await.is_err(), "nor a run");
    life.accepts(&rollout, Event::Call(call("a", "main", 1, &[], &[3]))).await;
    life.others_go_on("the bad one").await;
}

fn names_itself(event: &Event) -> bool {
    let Event::Call(call) = event else { return false };
    let Some(v1::prompt::Prompt::Delta(delta)) = call.prompt.as_ref().and_then(|prompt| prompt.prompt.as_ref()) else {
        return false;
    };
    delta.base.as_ref().is_some_and(|base| base.call_id == call.call_id)
}

#[tokio::test]
async fn bad_input_leaves_a_rollout_as_it_was() {
    let mut life = Life::start().await;
    let rollout = about("run", "one");
    life.accepts(&rollout, Event::Call(call("good", "main", 1, &[1], &[2]))).await;
    let totals = life.accepts(&rollout, heartbeat()).await.totals;
    for (at, (event, reason, field, index)) in (1..).zip(all_bad()) {
        let is_call = matches!(event, Event::Call(_));
        let refusal = life.refuses(&rollout, event, reason, field).await;
        assert_eq!(refusal.index, index, "{reason:?} {field}");
        assert_eq!(refusal.call_id == "bad", is_call && field != "call.call_id", "{refusal:?}");
        assert_eq!(life.summary(&rollout).await.refused_requests, at);
        assert_eq!(life.accepts(&rollout, heartbeat()).await.totals, totals);
    }
    // The same id, mended, is as good as new.
    life.accepts(&rollout, changed(|_| ())).await;
    life.accepts(&rollout, Event::Call(call("next", "main", 6, &[1, 2], &[3]))).await;
    life.accepts(&rollout, finish(1.0)).await;
    let shown = life.shown(&rollout).await;
    assert_eq!(
        (walks(&shown), shown.summary.unwrap().conflicted),
        (vec!["good bad".to_owned(), "good next".to_owned()], false)
    );
    life.others_go_on("the bad one").await;
}

#[tokio::test]
async fn a_request_says_which_rollout_and_what_happened() {
    let mut life = Life::start().await;
    let good = about("run", "one");
    let refs = [
        (v1::RolloutRef { run_id: String::new(), ..good.clone() }, "rollout.run_id"),
        (v1::RolloutRef { group_id: "g\u{1b}".to_owned(), ..good.clone() }, "rollout.group_id"),
        (v1::RolloutRef { rollout_id: String::new(), ..good.clone() }, "rollout.rollout_id"),
        (v1::RolloutRef { rollout_id: long(257), ..good.clone() }, "rollout.rollout_id"),
    ];
    for (bad, field) in refs {
        let answer = life.worker.report(&bad, heartbeat()).await;
        let refusal = answer.refusal.unwrap();
        let found = (refusal.code, refusal.reason.as_str(), refusal.field.as_str());
        assert_eq!(found, (3, "invalid_identifier", field));
    }
    let mut client =
        hedgerow::proto::v1::harness_service_client::HarnessServiceClient::new(life.service.channel().await);
    let requests = vec![
        v1::ReportRequest { request_seq: 1, rollout: None, event: Some(heartbeat()) },
        v1::ReportRequest { request_seq: 2, rollout: Some(good.clone()), event: None },
        v1::ReportRequest { request_seq: 3, rollout: Some(good.clone()), event: Some(heartbeat()) },
    ];
    let answers = client.report_batch(v1::ReportBatchRequest { requests }).await.unwrap().into_inner().answers;
    let found: Vec<_> = answers
        .iter()
        .map(|answer| (answer.request_seq, answer.refusal.as_ref().map(|r| (r.reason.as_str(), r.field.as_str()))))
        .collect();
    let wanted = [(1, Some(("missing_field", "rollout"))), (2, Some(("missing_field", "event"))), (3, None)];
    assert_eq!(found, wanted, "a refused request does not keep the others from being taken");
    assert_eq!(life.summary(&good).await.totals.unwrap().calls, 0);
    let requests = vec![v1::ReportRequest::default(); limits::BATCH_REQUESTS_MAX + 1];
    let status = client.report_batch(v1::ReportBatchRequest { requests }).await.unwrap_err();
    assert_eq!(status.code(), tonic::Code::InvalidArgument);
}

#[tokio::test]
async fn a_run_may_limit_ids_and_take_log_probabilities_as_they_are() {
    let settings = v1::RunSettings {
        vocabulary_limit: Some(100),
        require_logprobs: Some(false),
        nonfinite_logprobs: v1::NonfiniteLogprobsRule::Context.into(),
        trained_policies: vec!["main".to_owned()],
        ..v1::RunSettings::default()
    };
    let mut life = Life::start_with(settings).await;
    let rollout = about("run", "one");
    let a: Vec<u32> = vec![1, 2, 3];
    life.accepts(&rollout, Event::Call(call("a", "main", 1, &[1, 2], &[3]))).await;
    let over = [
        (call("b", "main", 2, &[1, 99, 100], &[4]), "call.prompt.token_ids", 2),
        (call("b", "main", 2, &[1], &[4, u32::MAX]), "call.generation_token_ids", 1),
        (on_base("a", &a, &[100], call("b", "main", 2, &[], &[4])), "call.prompt.delta.suffix_token_ids", 0),
    ];
    for (call, field, index) in over {
        let refusal = life.refuses(&rollout, Event::Call(call), Reason::TokenIdOverLimit, field).await;
        assert_eq!((refusal.index, refusal.call_id.as_str()), (Some(index), "b"));
    }
    let mut b = call("b", "main", 2, &[1, 2, 3], &[4, 5, 6]);
    b.generation_logprobs = Some(floats(&[-0.25, f32::NAN, f32::INFINITY]));
    let mut c = call("c", "main", 3, &[1, 2, 3, 4, 5, 6], &[7]);
    c.generation_logprobs = None;
    for call in [b, c] {
        life.accepts(&rollout, Event::Call(call.clone())).await;
        life.repeats(&rollout, Event::Call(call)).await;
    }
    life.accepts(&rollout, finish(1.0)).await;
    let mut trainer = life.service.trainer(crate::service::subscription("run", "trainers")).await;
    let row = &trainer.unit().await.rows[0];
    assert_eq!(row.loss_mask, [0, 0, 1, 1, 0, 0, 1]);
    assert_eq!(row.logprobs, [0.0, 0.0, -0.5, -0.25, 0.0, 0.0, 0.0]);
    let spans: Vec<_> = row.spans.iter().map(|span| (span.call_id.as_str(), span.has_logprobs)).collect();
    assert_eq!(spans, [("a", true), ("b", true), ("c", false)]);
}

#[tokio::test]
async fn who_does_not_train_needs_no_log_probabilities() {
    let settings = v1::RunSettings { trained_policies: vec!["main".to_owned()], ..v1::RunSettings::default() };
    let mut life = Life::start_with(settings).await;
    let rollout = about("run", "one");
    let without = |change: fn(&mut v1::Call), id: &str| {
        let mut call = call(id, "main", 1, &[1], &[2]);
        call.generation_logprobs = None;
        change(&mut call);
        Event::Call(call)
    };
    life.accepts(&rollout, without(|call| call.train = Some(false), "frozen")).await;
    life.accepts(&rollout, without(|call| call.policy = "judge".to_owned(), "judge")).await;
    life.accepts(&rollout, without(|call| call.generation_token_ids = ids(&[]), "empty")).await;
    let trained = without(|call| call.train = Some(true), "trained");
    life.refuses(&rollout, trained, Reason::LogprobsMissing, "call.generation_logprobs").await;
}

#[tokio::test]
async fn a_rollout_has_as_many_agents_as_it_may() {
    let mut life = Life::start().await;
    let rollout = about("run", "one");
    let names: Vec<String> = (0..limits::ROLLOUT_AGENTS_MAX).map(|agent| agent.to_string()).collect();
    let agents = names.iter().map(|name| (name.clone(), v1::CallList::default())).collect();
    let full = Event::Seal(v1::Seal { kept: Some(v1::KeptCalls { agents }), expected_calls: None });
    life.accepts(&rollout, full.clone()).await;
    let mut parent = agent_start("0", 0);
    parent.parent_agent_id = "one more".to_owned();
    let more = [
        Event::AgentStart(agent_start("one more", 0)),
        Event::AgentStart(parent),
        Event::AgentEnd(agent_end("one more", 0, None)),
        Event::Call(call("a", "one more", 1, &[1], &[2])),
    ];
    for event in more {
        life.refuses(&rollout, event, Reason::RolloutFull, "").await;
    }
    life.accepts(&rollout, Event::AgentStart(agent_start("0", 0))).await;
    life.accepts(&rollout, Event::Call(call("a", "1", 1, &[1], &[2]))).await;
    life.repeats(&rollout, full).await;
    life.others_go_on("the full one").await;
}

#[tokio::test]
async fn tags_of_several_events_have_one_limit() {
    let mut life = Life::start().await;
    let rollout = in_group("one", "g");
    let names: Vec<String> = (0..=limits::TAGS_MAX).map(|tag| tag.to_string()).collect();
    let all: Vec<(&str, &str)> = names.iter().map(|name| (name.as_str(), "v")).collect();
    life.accepts(&rollout, tags(&all[..limits::TAGS_MAX])).await;
    life.refuses(&rollout, tags(&all[limits::TAGS_MAX..]), Reason::OverLimit, "open.tags").await;
    life.repeats(&rollout, tags(&all[..1])).await;
}

#[tokio::test]
async fn a_message_over_the_limit_ends_its_own_stream_only() {
    let mut life = Life::start().await;
    let rollout = about("run", "one");
    life.accepts(&rollout, Event::Call(call("a", "main", 1, &[1], &[2]))).await;
    let huge = Event::Discard(v1::Discard { reason: long(limits::REQUEST_MESSAGE_BYTES_MAX + 1), disposition: 0 });
    let request = v1::ReportRequest { request_seq: 1, rollout: Some(rollout.clone()), event: Some(huge) };
    let mut client =
        hedgerow::proto::v1::harness_service_client::HarnessServiceClient::new(life.service.channel().await)
            .max_encoding_message_size(2 * limits::REQUEST_MESSAGE_BYTES_MAX);
    let mut responses = client.report(tokio_stream::iter([request])).await.unwrap().into_inner();
    let status = responses.message().await.unwrap_err();
    assert_eq!(status.code(), tonic::Code::ResourceExhausted, "{status:?}");
    life.accepts(&rollout, finish(1.0)).await;
    assert_eq!(walks(&life.shown(&rollout).await), ["a"]);
}
