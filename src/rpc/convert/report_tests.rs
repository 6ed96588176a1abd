//! Each kind of bad input: its reason, field and index. And what good input becomes.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use super::*;
use crate::error::Code;
use crate::forest::call::{Link, NewCall, Prompt, VersionSpan};
use crate::proto::v1::report_request::Event as Message;
use crate::rpc::convert::examples::{self, about, bytes, report, request};
use crate::rpc::convert::fields::timestamp;

fn refused(event: Message) -> Refusal {
    *report(request(event)).unwrap_err()
}

/// Refused for this reason, with this field and index.
#[track_caller]
fn refuses(event: Message, reason: Reason, field: &str, index: Option<u64>) {
    let refusal = refused(event);
    assert_eq!((refusal.reason, refusal.field.as_deref(), refusal.index), (reason, Some(field), index), "{refusal}");
}

fn good_call() -> v1::Call {
    examples::call("c", "a", 7, &[1, 2], &[3, 4, 5])
}

#[track_caller]
fn refuses_call(change: impl FnOnce(&mut v1::Call), reason: Reason, field: &str, index: Option<u64>) {
    let mut call = good_call();
    change(&mut call);
    let refusal = refused(Message::Call(call));
    assert_eq!((refusal.reason, refusal.field.as_deref(), refusal.index), (reason, Some(field), index), "{refusal}");
    assert_eq!(refusal.call_id.is_some(), field != "call.call_id");
    assert_eq!(refusal.agent_id.is_some(), !["call.call_id", "call.agent_id"].contains(&field));
}

fn accepted_call(message: v1::Call) -> (NewCall, bool) {
    let (_, event) = report(request(Message::Call(message))).unwrap();
    let Event::Call { call, names_policy } = event else { panic!("{event:?}") };
    (*call, names_policy)
}

#[test]
fn a_rollout_is_named_in_full() {
    let (rollout, event) = report(request(Message::Heartbeat(v1::Heartbeat {}))).unwrap();
    assert_eq!((&rollout, event), (&about(), Event::Heartbeat));
    assert_eq!(request(Message::Heartbeat(v1::Heartbeat {})).rollout.as_ref(), Some(&rollout_ref_message(&rollout)));

    type Change = fn(&mut v1::RolloutRef);
    let changes: [(Change, &str); 3] = [
        (|rollout| rollout.run_id.clear(), "rollout.run_id"),
        (|rollout| rollout.group_id = "g\n".to_owned(), "rollout.group_id"),
        (|rollout| rollout.rollout_id = "r".repeat(257), "rollout.rollout_id"),
    ];
    for (change, field) in changes {
        let mut request = request(Message::Heartbeat(v1::Heartbeat {}));
        change(request.rollout.as_mut().unwrap());
        let refusal = report(request).unwrap_err();
        assert_eq!((refusal.reason, refusal.field.as_deref()), (Reason::InvalidIdentifier, Some(field)));
        assert_eq!(refusal.reason.code(), Code::InvalidArgument);
    }
    for (rollout, field) in [(None, "rollout"), (request(Message::Heartbeat(v1::Heartbeat {})).rollout, "event")] {
        let refusal = report(v1::ReportRequest { request_seq: 1, rollout, event: None }).unwrap_err();
        assert_eq!((refusal.reason, refusal.field.as_deref()), (Reason::MissingField, Some(field)));
    }
}

#[test]
fn a_call_is_taken_over_with_its_defaults() {
    let (call, names_policy) = accepted_call(good_call());
    let facts = call.facts;
    assert_eq!((facts.call_id.as_str(), facts.agent_id.as_str(), facts.sequence), ("c", "a", 7));
    assert_eq!((facts.kind.as_str(), names_policy, facts.train), ("turn", false, true));
    assert_eq!((facts.parent_agent_id, facts.model, facts.finish_reason), (None, None, None));
    assert_eq!((facts.link, facts.times_unix_ms), (Link::Infer, (None, None)));
    assert_eq!((facts.generation, facts.logprobs), (vec![3, 4, 5], Some(vec![-0.5; 3])));
    assert_eq!(call.prompt, Prompt::Full(vec![1, 2]));

    let base = v1::Base { call_id: "b".to_owned(), length_tokens: 9, digest: vec![7; 16].into() };
    let (call, names_policy) = accepted_call(v1::Call {
        policy: "p".to_owned(),
        train: Some(false),
        link: examples::parent("b"),
        prompt: examples::delta(base, &[8]),
        policy_versions: vec![span(0, 1, 4), span(1, 3, 5)],
        start_time: Some(timestamp(1500)),
        ..good_call()
    });
    assert_eq!((call.facts.policy.as_str(), names_policy, call.facts.train), ("p", true, false));
    assert_eq!(call.facts.link, Link::Parent(CallId::parse("b").unwrap()));
    assert_eq!(call.facts.versions[1], VersionSpan { start: 1, end: 3, version: 5 });
    assert_eq!(call.facts.times_unix_ms, (Some(1500), None));
    let Prompt::Delta(delta) = call.prompt else { panic!("no delta") };
    assert_eq!((delta.base.as_str(), delta.base_length, delta.digest.0, delta.suffix), ("b", 9, [7; 16], vec![8]));
}

#[test]
fn nonfinite_logprobs_are_left_to_the_settings_and_nothing_generated_is_taken() {
    let values: Vec<u8> = [f32::NAN, f32::INFINITY, 0.0].iter().flat_map(|value| value.to_le_bytes()).collect();
    let (call, _) = accepted_call(v1::Call { generation_logprobs: Some(values.into()), ..good_call() });
    assert!(call.facts.logprobs.unwrap()[0].is_nan());
    let (call, _) = accepted_call(examples::call("c", "a", 0, &[], &[]));
    assert_eq!((call.facts.generation, call.prompt), (Vec::new(), Prompt::Full(Vec::new())));
}

fn span(start: u32, end: u32, version: u64) -> v1::PolicyVersionSpan {
    v1::PolicyVersionSpan { start, end, version }
}

#[test]
fn bad_identifiers_of_a_call_are_refused() {
    type Change = fn(&mut v1::Call);
    let changes: [(Change, &str); 9] = [
        (|call| call.call_id.clear(), "call.call_id"),
        (|call| call.agent_id.clear(), "call.agent_id"),
        (|call| call.parent_agent_id = "\u{7f}".to_owned(), "call.parent_agent_id"),
        (|call| call.kind = "k".repeat(257), "call.kind"),
        (|call| call.policy = "\0".to_owned(), "call.policy"),
        (|call| call.model = "\t".to_owned(), "call.model"),
        (|call| call.finish_reason = "\r".to_owned(), "call.finish_reason"),
        (|call| call.link = examples::parent(""), "call.link.parent_call_id"),
        (|call| call.prompt = examples::delta(base(""), &[]), "call.prompt.delta.base.call_id"),
    ];
    for (change, field) in changes {
        refuses_call(change, Reason::InvalidIdentifier, field, None);
    }
}

fn base(call: &str) -> v1::Base {
    v1::Base { call_id: call.to_owned(), length_tokens: 1, digest: vec![0; 16].into() }
}

#[test]
fn bad_arrays_of_a_call_are_refused() {
    let odd = || bytes::Bytes::from_static(&[0; 10]);
    let generation = "call.generation_token_ids";
    refuses_call(|call| call.generation_token_ids = odd(), Reason::InvalidArrayLength, generation, Some(2));
    let logprobs = "call.generation_logprobs";
    refuses_call(|call| call.generation_logprobs = Some(odd()), Reason::InvalidArrayLength, logprobs, Some(2));
    let two = || Some(bytes(&[0, 0]));
    refuses_call(|call| call.generation_logprobs = two(), Reason::LogprobsLength, logprobs, Some(2));
    refuses_call(|call| call.generation_token_ids = bytes(&[1]), Reason::LogprobsLength, logprobs, Some(1));
    let full = |bytes| Some(v1::Prompt { prompt: Some(v1::prompt::Prompt::TokenIds(bytes)) });
    refuses_call(|call| call.prompt = full(odd()), Reason::InvalidArrayLength, "call.prompt.token_ids", Some(2));
    let delta = v1::Delta { base: Some(base("b")), suffix_token_ids: odd() };
    let delta = Some(v1::Prompt { prompt: Some(v1::prompt::Prompt::Delta(delta)) });
    let suffix = "call.prompt.delta.suffix_token_ids";
    refuses_call(|call| call.prompt = delta, Reason::InvalidArrayLength, suffix, Some(2));
}

#[test]
fn a_bad_prompt_is_refused() {
    refuses_call(|call| call.prompt = None, Reason::MissingField, "call.prompt", None);
    refuses_call(|call| call.prompt = Some(v1::Prompt { prompt: None }), Reason::MissingField, "call.prompt", None);
    let baseless = v1::Delta { base: None, suffix_token_ids: bytes(&[]) };
    let baseless = Some(v1::Prompt { prompt: Some(v1::prompt::Prompt::Delta(baseless)) });
    refuses_call(|call| call.prompt = baseless, Reason::MissingField, "call.prompt.delta.base", None);
    let digest = "call.prompt.delta.base.digest";
    for length in [0, 15, 17] {
        let base = v1::Base { digest: vec![0; length].into(), ..base("b") };
        refuses_call(|call| call.prompt = examples::delta(base, &[]), Reason::InvalidValue, digest, None);
    }
    let length = "call.prompt.delta.base.length_tokens";
    let most = limits::CALL_TOKENS_MAX as u64;
    for length_tokens in [most + 1, u64::from(u32::MAX) + 1, u64::MAX] {
        let base = v1::Base { length_tokens, ..base("b") };
        refuses_call(|call| call.prompt = examples::delta(base, &[]), Reason::OverLimit, length, None);
    }
    let base = v1::Base { length_tokens: most - 3, ..base("b") };
    assert_eq!(
        accepted_call(v1::Call { prompt: examples::delta(base.clone(), &[]), ..good_call() }).0.facts.sequence,
        7
    );
    refuses_call(|call| call.prompt = examples::delta(base, &[1]), Reason::OverLimit, "call.prompt", None);
}

#[test]
fn bad_version_spans_and_times_are_refused() {
    let field = "call.policy_versions";
    let bad = [
        (vec![span(1, 1, 0)], 0),
        (vec![span(0, 4, 0)], 0),
        (vec![span(0, 2, 0), span(1, 3, 0)], 1),
        (vec![span(2, 3, 0), span(0, 1, 0)], 1),
        (vec![span(0, 1, 0), span(3, 2, 0)], 1),
    ];
    for (spans, index) in bad {
        refuses_call(|call| call.policy_versions = spans, Reason::InvalidValue, field, Some(index));
    }
    let many = vec![span(0, 1, 0); limits::CALL_VERSION_SPANS_MAX + 1];
    refuses_call(|call| call.policy_versions = many, Reason::OverLimit, field, None);
    let before = Some(prost_types::Timestamp { seconds: -1, nanos: 0 });
    refuses_call(|call| call.start_time = before, Reason::InvalidValue, "call.start_time", None);
    refuses_call(|call| call.end_time = before, Reason::InvalidValue, "call.end_time", None);
}

#[test]
fn what_comes_later_is_refused_as_such() {
    refuses_call(|call| call.columns.push(v1::Column::default()), Reason::NotInThisRelease, "call.columns", None);
    let columns = v1::Call { columns: vec![v1::Column::default()], ..good_call() };
    assert_eq!(refused(Message::Call(columns)).reason.code(), Code::Unimplemented);
}

#[test]
fn a_credit_is_for_a_call_or_an_agent_and_its_numbers_are_bounded() {
    use v1::credit::Target;
    let of_call = |id: &str| v1::Credit { target: Some(Target::CallId(id.to_owned())), ..v1::Credit::default() };
    let of_agent = |id: &str| v1::Credit { target: Some(Target::AgentId(id.to_owned())), ..v1::Credit::default() };
    let event = |credit| report(request(Message::Credit(credit))).unwrap().1;
    let said = v1::Credit { train: Some(false), reward: Some(-0.5), advantage_scale: Some(2.0), ..of_call("c") };
    let values = CreditValues { train: Some(false), reward: Some(-0.5), advantage_scale: Some(2.0) };
    let target = CreditTarget::Call(CallId::parse("c").unwrap());
    assert_eq!(event(said), Event::Credit(Credit { target, values }));
    let said = v1::Credit { train: Some(true), ..of_agent("a") };
    let target = CreditTarget::Agent(AgentId::parse("a").unwrap());
    let values = CreditValues { train: Some(true), ..CreditValues::default() };
    assert_eq!(event(said), Event::Credit(Credit { target, values }));

    let infinite = v1::Credit { reward: Some(f64::INFINITY), ..of_call("c") };
    let no_number = v1::Credit { advantage_scale: Some(f64::NAN), ..of_call("c") };
    let bad = [
        (v1::Credit::default(), Reason::MissingField, "target"),
        (v1::Credit { reward: Some(-2e30), ..of_call("c") }, Reason::OverLimit, "reward"),
        (v1::Credit { train: Some(true), ..of_call("") }, Reason::InvalidIdentifier, "call_id"),
        (v1::Credit { train: Some(true), ..of_agent("\n") }, Reason::InvalidIdentifier, "agent_id"),
        (infinite, Reason::RewardNotFinite, "reward"),
        (no_number, Reason::RewardNotFinite, "advantage_scale"),
    ];
    for (credit, reason, field) in bad {
        let path = |place: &str| format!("{place}.{field}");
        refuses(Message::Credit(credit.clone()), reason, &path("credit"), None);
        let credits = vec![v1::Credit { train: Some(true), ..of_call("good") }, credit];
        let reward = v1::Reward { credits, ..v1::Reward::default() };
        refuses(Message::Reward(reward.clone()), reason, &path("reward.credits[1]"), None);
        let finish = v1::Finish { seal: None, reward: Some(reward) };
        refuses(Message::Finish(finish), reason, &path("finish.reward.credits[1]"), None);
    }
}

#[test]
fn an_open_has_a_group_size_and_tags_within_bounds() {
    let open = |group_size, key: &str, value: &str| {
        let tags = [(key.to_owned(), value.to_owned())].into();
        Message::Open(v1::Open { group_size, tags })
    };
    let tags = [(Name::parse("k").unwrap(), String::new())].into();
    let (_, event) = report(request(open(Some(limits::GROUP_SIZE_MAX), "k", ""))).unwrap();
    assert_eq!(event, Event::Open(Open { group_size: Some(limits::GROUP_SIZE_MAX), tags }));
    refuses(open(Some(0), "k", ""), Reason::InvalidValue, "open.group_size", None);
    refuses(open(Some(limits::GROUP_SIZE_MAX + 1), "k", ""), Reason::OverLimit, "open.group_size", None);
    refuses(open(None, "", ""), Reason::InvalidIdentifier, "open.tags[\"\"]", None);
    refuses(open(None, "k", &"v".repeat(limits::TEXT_BYTES_MAX + 1)), Reason::OverLimit, "open.tags[\"k\"]", None);
    let many = (0..=limits::TAGS_MAX).map(|tag| (tag.to_string(), String::new())).collect();
    refuses(Message::Open(v1::Open { group_size: None, tags: many }), Reason::OverLimit, "open.tags", None);

    let mut alone = request(open(Some(1), "k", ""));
    alone.rollout.as_mut().unwrap().group_id.clear();
    let refusal = report(alone).unwrap_err();
    assert_eq!((refusal.reason, refusal.field.as_deref()), (Reason::InvalidValue, Some("open.group_size")));
}

#[test]
fn agents_start_and_end() {
    let start = |change: fn(&mut v1::AgentStart)| {
        let mut start = v1::AgentStart { agent_id: "a".to_owned(), ..v1::AgentStart::default() };
        change(&mut start);
        Message::AgentStart(start)
    };
    use v1::agent_start::Origin;
    let (_, event) = report(request(start(|start| start.origin = Some(Origin::ForkOfCallId("c".to_owned()))))).unwrap();
    let Event::AgentStart(started) = event else { panic!("{event:?}") };
    assert_eq!(started.origin, Some(AgentOrigin::ForkOf(CallId::parse("c").unwrap())));
    let identifier = Reason::InvalidIdentifier;
    refuses(start(|start| start.agent_id.clear()), identifier, "agent_start.agent_id", None);
    let fork = start(|start| start.origin = Some(Origin::ForkOfCallId(String::new())));
    assert_eq!(refused(fork.clone()).agent_id, AgentId::parse("a").ok());
    refuses(fork, identifier, "agent_start.fork_of_call_id", None);
    refuses(start(|start| start.profile = "\n".to_owned()), identifier, "agent_start.profile", None);

    let end = |status: i32, kept: &[&str], read: &[&str]| {
        let texts = |texts: &[&str]| texts.iter().map(ToString::to_string).collect();
        Message::AgentEnd(v1::AgentEnd {
            agent_id: "a".to_owned(),
            resumption: 1,
            status,
            kept: Some(v1::CallList { call_ids: texts(kept) }),
            answers_read_agent_ids: texts(read),
        })
    };
    let (_, event) = report(request(end(1, &["c", "c"], &["b"]))).unwrap();
    let Event::AgentEnd(ended) = event else { panic!("{event:?}") };
    assert_eq!((ended.status, ended.kept.unwrap().len(), ended.answers_read.len()), (AgentStatus::Settled, 2, 1));
    refuses(end(0, &[], &[]), Reason::InvalidValue, "agent_end.status", None);
    refuses(end(99, &[], &[]), Reason::InvalidValue, "agent_end.status", None);
    refuses(end(1, &["c", ""], &[]), identifier, "agent_end.kept.call_ids", Some(1));
    refuses(end(1, &[], &["b", "\n"]), identifier, "agent_end.answers_read_agent_ids", Some(1));
    let many = vec!["c"; limits::KEPT_CALLS_MAX + 1];
    refuses(end(1, &many, &[]), Reason::OverLimit, "agent_end.kept", None);
}

#[test]
fn a_seal_holds_lists_within_bounds() {
    let (_, event) = report(request(Message::Seal(examples::kept("a", &["c", "d"])))).unwrap();
    let lists = [("a", vec!["c", "d"])].map(|(agent, calls)| {
        (AgentId::parse(agent).unwrap(), calls.into_iter().map(|call| CallId::parse(call).unwrap()).collect())
    });
    assert_eq!(event, Event::Seal(Seal { kept: Some(lists.into()), expected_calls: None }));
    let empty = v1::Seal { kept: Some(v1::KeptCalls::default()), expected_calls: Some(3) };
    let (_, event) = report(request(Message::Seal(empty))).unwrap();
    assert_eq!(event, Event::Seal(Seal { kept: Some(BTreeMap::new()), expected_calls: Some(3) }));

    let (reason, field) = (Reason::InvalidIdentifier, "seal.kept.agents[\"a\"].call_ids");
    refuses(Message::Seal(examples::kept("a", &["c", "\n"])), reason, field, Some(1));
    refuses(Message::Seal(examples::kept("", &[])), reason, "seal.kept.agents[\"\"]", None);
    let many = vec!["c"; limits::KEPT_CALLS_MAX + 1];
    refuses(Message::Seal(examples::kept("a", &many)), Reason::OverLimit, "seal.kept.agents", None);
    let finish = v1::Finish { seal: Some(examples::kept("a", &[""])), reward: None };
    refuses(Message::Finish(finish), reason, "finish.seal.kept.agents[\"a\"].call_ids", Some(0));
}

#[test]
fn a_reward_is_finite() {
    let reward = |value, component| {
        let components = [("x".to_owned(), component)].into();
        v1::Reward { value, components, credits: Vec::new() }
    };
    let finish = v1::Finish { seal: None, reward: Some(reward(-1.0, 0.5)) };
    let (_, event) = report(request(Message::Finish(finish))).unwrap();
    let components = [(Name::parse("x").unwrap(), 0.5)].into();
    assert_eq!(event, Event::Finish(Seal::default(), Reward { value: -1.0, components }, Vec::new()));
    for bad in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY] {
        refuses(Message::Reward(reward(bad, 0.0)), Reason::RewardNotFinite, "reward.value", None);
        refuses(Message::Reward(reward(0.0, bad)), Reason::RewardNotFinite, "reward.components[\"x\"]", None);
    }
    let many = (0..=limits::TAGS_MAX).map(|name| (name.to_string(), 0.0)).collect();
    let many = v1::Reward { components: many, ..v1::Reward::default() };
    refuses(Message::Reward(many), Reason::OverLimit, "reward.components", None);
    refuses(Message::Finish(v1::Finish::default()), Reason::MissingField, "finish.reward", None);
}

#[test]
fn a_discard_has_a_reason() {
    let discard = |reason: &str, disposition| Message::Discard(v1::Discard { reason: reason.to_owned(), disposition });
    let (_, event) = report(request(discard("", 0))).unwrap();
    assert_eq!(
        event,
        Event::Discard { reason: "discarded".to_owned(), disposition: Disposition::Unsaid, by: DiscardedBy::Harness }
    );
    let (_, event) = report(request(discard("tool broke", 2))).unwrap();
    assert_eq!(
        event,
        Event::Discard {
            reason: "tool broke".to_owned(),
            disposition: Disposition::WillRetry,
            by: DiscardedBy::Harness
        }
    );
    refuses(discard("", 3), Reason::InvalidValue, "discard.disposition", None);
    let long = "r".repeat(limits::TEXT_BYTES_MAX + 1);
    refuses(discard(&long, 0), Reason::OverLimit, "discard.reason", None);
}
