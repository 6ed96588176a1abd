//! The seal: what it names as missing, which calls may come after it, and which are kept.

use hedgerow::error::Reason;
use hedgerow::proto::v1;
use hedgerow::proto::v1::report_request::Event;
use hedgerow::proto::v1::{AgentsWithoutListRule, LinkKind, MissingCallCause, MissingCallState};

use crate::life::{Life, agent_end, agent_start, expecting, finish, kept, naming, on_base, state, walks};
use crate::service::{about, call, reward, seal};

/// What is missing, a line each: the call, its state, its cause, its agent, and who names it.
fn missing(status: &v1::SealStatus) -> Vec<String> {
    assert_eq!(status.missing.len() as u64, status.missing_count);
    let line = |missing: &v1::MissingCall| {
        let state = match missing.state() {
            MissingCallState::Unspecified => "unspecified",
            MissingCallState::NeverCame => "never came",
            MissingCallState::WaitingForBase => "waiting",
            MissingCallState::Unresolved => "unresolved",
            MissingCallState::RefusedAwaitingResend => "refused",
        };
        let cause = match missing.cause() {
            MissingCallCause::Unspecified => "unspecified".to_owned(),
            MissingCallCause::Kept => format!("kept by {}", missing.agent_id),
            MissingCallCause::NamedParent => format!("parent of {}", missing.named_by_call_id),
            MissingCallCause::NamedBase => format!("base of {}", missing.named_by_call_id),
        };
        format!("{}: {state}, {cause}", missing.call_id)
    };
    let mut lines: Vec<String> = status.missing.iter().map(line).collect();
    lines.sort();
    lines
}

#[tokio::test]
async fn after_a_seal_with_lists_a_late_call_is_kept_if_its_list_names_it() {
    let mut life = Life::start().await;
    let rollout = about("run", "one");
    life.accepts(&rollout, Event::Call(call("a", "main", 1, &[1], &[2]))).await;
    let answer = life.accepts(&rollout, Event::Seal(seal(&[("main", &["a", "b"])]))).await;
    assert_eq!(missing(&answer.seal.unwrap()), ["b: never came, kept by main"]);
    life.accepts(&rollout, Event::Reward(reward(1.0))).await;
    // A retry that nobody kept, and an agent that gave no list.
    life.accepts(&rollout, Event::Call(call("retry", "main", 2, &[1, 2], &[9]))).await;
    life.accepts(&rollout, Event::Call(call("probe", "judge", 3, &[7], &[8]))).await;
    let shown = life.shown(&rollout).await;
    assert_eq!((state(&shown), kept(&shown)), (v1::RolloutState::Incomplete, vec!["a"]));
    life.accepts(&rollout, Event::Call(call("b", "main", 4, &[1, 2], &[3]))).await;
    let shown = life.shown(&rollout).await;
    assert_eq!((state(&shown), kept(&shown)), (v1::RolloutState::Finalised, vec!["a", "b"]));
    assert_eq!(walks(&shown), ["a b"]);
    assert_eq!((shown.ledgers[0].accepted, shown.ledgers[0].not_kept, shown.ledgers[0].trained), (4, 2, 2));
}

#[tokio::test]
async fn after_a_seal_with_a_count_calls_come_until_there_are_as_many() {
    let mut life = Life::start().await;
    let rollout = about("run", "one");
    life.accepts(&rollout, Event::Call(call("a", "main", 1, &[1], &[2]))).await;
    let seal = Event::Finish(v1::Finish { seal: Some(expecting(3)), reward: Some(reward(1.0)) });
    let answer = life.accepts(&rollout, seal.clone()).await;
    let status = answer.seal.unwrap();
    assert_eq!((status.missing_expected_calls, status.missing_count, status.complete), (2, 0, false));
    life.accepts(&rollout, Event::Call(call("b", "main", 2, &[1, 2], &[3]))).await;
    life.repeats(&rollout, Event::Call(call("b", "main", 2, &[1, 2], &[3]))).await;
    assert_eq!(life.shown(&rollout).await.status.unwrap().missing_expected_calls, 1);
    life.accepts(&rollout, Event::Call(call("c", "main", 3, &[1], &[4]))).await;
    let shown = life.shown(&rollout).await;
    assert_eq!((state(&shown), walks(&shown)), (v1::RolloutState::Finalised, vec!["a b".to_owned(), "c".to_owned()]));
    assert!(life.repeats(&rollout, seal).await.seal.unwrap().complete);
}

#[tokio::test]
async fn after_a_seal_with_neither_no_new_call_is_taken() {
    let mut life = Life::start().await;
    let rollout = about("run", "one");
    let a = Event::Call(call("a", "main", 1, &[1], &[2]));
    life.accepts(&rollout, a.clone()).await;
    life.accepts(&rollout, Event::Seal(v1::Seal::default())).await;
    let b = Event::Call(call("b", "main", 2, &[1, 2], &[3]));
    let refusal = life.refuses(&rollout, b.clone(), Reason::RolloutSealed, "").await;
    assert_eq!(refusal.call_id, "b");
    life.repeats(&rollout, a).await;
    life.accepts(&rollout, Event::AgentEnd(agent_end("main", 0, None))).await;
    life.accepts(&rollout, Event::Reward(reward(1.0))).await;
    life.refuses(&rollout, b, Reason::RolloutFinalised, "").await;
    assert_eq!(walks(&life.shown(&rollout).await), ["a"]);
    life.others_go_on("the sealed one").await;
}

#[tokio::test]
async fn the_seals_answer_and_the_window_say_what_is_missing_and_why() {
    let mut life = Life::start().await;
    let rollout = about("run", "one");
    let mut lame = call("lame", "main", 1, &[1], &[2, 3]);
    lame.generation_logprobs = None;
    life.refuses(&rollout, Event::Call(lame.clone()), Reason::LogprobsMissing, "call.generation_logprobs").await;
    life.accepts(&rollout, Event::Call(naming("named", call("a", "main", 2, &[1, 2, 3], &[4])))).await;
    life.accepts(&rollout, Event::Call(on_base("base", &[5, 6], &[7], call("w", "sub", 3, &[], &[8])))).await;
    life.accepts(&rollout, Event::Call(on_base("x", &[1, 9], &[7], call("u", "sub", 4, &[], &[8])))).await;
    life.accepts(&rollout, Event::Call(call("x", "sub", 5, &[1, 2], &[3]))).await;
    life.refuses(&rollout, Event::Call(lame.clone()), Reason::LogprobsMissing, "call.generation_logprobs").await;
    let lists = seal(&[("main", &["lame", "a", "gone"]), ("sub", &["w", "u", "x"])]);
    let wanted = [
        "base: never came, base of w",
        "gone: never came, kept by main",
        "lame: refused, kept by main",
        "named: never came, parent of a",
        "u: unresolved, kept by sub",
        "w: waiting, kept by sub",
    ];
    let answer = life.accepts(&rollout, Event::Seal(lists)).await;
    assert_eq!(missing(&answer.seal.unwrap()), wanted);
    assert_eq!(missing(&life.shown(&rollout).await.status.unwrap()), wanted);
    life.accepts(&rollout, Event::Reward(reward(1.0))).await;
    lame.generation_logprobs = call("", "", 0, &[], &[2, 3]).generation_logprobs;
    let rest = [
        lame,
        call("gone", "main", 6, &[30], &[31]),
        call("named", "main", 7, &[1, 2], &[3]),
        call("u", "sub", 4, &[1, 9, 7], &[8]),
        call("base", "sub", 8, &[5], &[6]),
    ];
    for call in rest {
        assert_eq!(state(&life.shown(&rollout).await), v1::RolloutState::Incomplete);
        life.accepts(&rollout, Event::Call(call)).await;
    }
    let shown = life.shown(&rollout).await;
    assert_eq!(state(&shown), v1::RolloutState::Finalised);
    assert_eq!(missing(&shown.status.unwrap()), [""; 0]);
}

#[tokio::test]
async fn a_delta_waits_for_its_base_and_is_resolved_when_that_comes_last() {
    let mut life = Life::start().await;
    let rollout = about("run", "one");
    let c = on_base("b", &[1, 2, 3, 4], &[5], call("c", "main", 3, &[], &[6]));
    let b = on_base("a", &[1, 2], &[3], call("b", "main", 2, &[], &[4]));
    for (call, waits_for) in [(c.clone(), "b"), (b, "a")] {
        let verdict = life.accepts(&rollout, Event::Call(call)).await.verdict.unwrap();
        assert_eq!((verdict.kind(), verdict.waiting_for_call_id.as_str()), (LinkKind::Waiting, waits_for));
    }
    life.repeats(&rollout, Event::Call(c.clone())).await;
    let answer = life.accepts(&rollout, finish(1.0)).await;
    assert_eq!(answer.seal.unwrap().missing_count, 3);
    assert!(life.worker.notices.is_empty());
    // The barrier lets pass what was there: the base is new, and comes too late. What waits is sent again in full.
    let a = Event::Call(call("a", "main", 1, &[1], &[2]));
    life.refuses(&rollout, a, Reason::RolloutSealed, "").await;
    life.accepts(&rollout, Event::Call(call("b", "main", 2, &[1, 2, 3], &[4]))).await;
    let shown = life.shown(&rollout).await;
    assert_eq!((state(&shown), walks(&shown)), (v1::RolloutState::Finalised, vec!["b c".to_owned()]));
    while life.worker.notices.is_empty() {
        life.worker.receive().await;
    }
    let notice = life.worker.notices.remove(0);
    assert_eq!(notice.rollout, Some(rollout.clone()));
    let Some(v1::notice::Notice::ResolvedCall(resolved)) = notice.notice else { panic!("{notice:?}") };
    assert_eq!(resolved.call_id, "c");
    assert_eq!(resolved.verdict.unwrap().parent_call_id, "b");
    life.repeats(&rollout, Event::Call(c)).await;
}

#[tokio::test]
async fn a_delta_whose_base_turns_out_to_be_another_is_to_be_sent_in_full() {
    let mut life = Life::start().await;
    let rollout = about("run", "one");
    let mut neighbour = life.service.worker().await;
    let delta = Event::Call(on_base("a", &[1, 2, 3], &[4], call("b", "main", 2, &[], &[5])));
    life.accepts(&rollout, delta.clone()).await;
    neighbour.report(&rollout, Event::Call(call("a", "main", 1, &[1, 2], &[9]))).await;
    while life.worker.notices.is_empty() {
        life.worker.receive().await;
    }
    let notice = life.worker.notices.remove(0);
    let Some(v1::notice::Notice::UnresolvedCall(unresolved)) = notice.notice else { panic!("{notice:?}") };
    let refusal = unresolved.refusal.unwrap();
    assert_eq!((unresolved.call_id.as_str(), refusal.call_id.as_str()), ("b", "b"));
    assert_eq!((refusal.code, refusal.reason.as_str()), (9, "resend_full_prompt"));
    assert!(neighbour.notices.is_empty(), "only who sent it is told");

    life.refuses(&rollout, delta, Reason::ResendFullPrompt, "call.prompt.delta.base").await;
    let answer = life.accepts(&rollout, Event::Seal(seal(&[("main", &["a", "b"])]))).await;
    assert_eq!(missing(&answer.seal.unwrap()), ["b: unresolved, kept by main"]);
    life.accepts(&rollout, Event::Reward(reward(1.0))).await;
    let verdict = life.accepts(&rollout, Event::Call(call("b", "main", 2, &[1, 2, 9], &[5]))).await.verdict.unwrap();
    assert_eq!((verdict.kind(), verdict.parent_call_id.as_str()), (LinkKind::Child, "a"));
    assert_eq!(walks(&life.shown(&rollout).await), ["a b"]);
}

#[tokio::test]
async fn a_delta_that_cannot_be_taken_is_refused_at_once() {
    let mut life = Life::start().await;
    let rollout = about("run", "one");
    let field = "call.prompt.delta.base";
    let b = || call("b", "main", 2, &[], &[5]);
    let itself = Event::Call(on_base("b", &[1], &[2], b()));
    life.refuses(&rollout, itself, Reason::ResendFullPrompt, field).await;
    life.accepts(&rollout, Event::Call(call("a", "main", 1, &[1, 2], &[3]))).await;
    let too_long = on_base("a", &[1, 2, 3, 4], &[5], b());
    let another = on_base("a", &[1, 7], &[5], b());
    for delta in [too_long, another] {
        let refusal = life.refuses(&rollout, Event::Call(delta), Reason::ResendFullPrompt, field).await;
        assert_eq!((refusal.call_id.as_str(), refusal.index), ("b", None));
    }
    // A circle of bases, which nothing could ever resolve.
    life.accepts(&rollout, Event::Call(on_base("c2", &[1], &[], call("c1", "main", 3, &[], &[5])))).await;
    life.accepts(&rollout, Event::Call(on_base("c3", &[1], &[], call("c2", "main", 4, &[], &[5])))).await;
    let circle = Event::Call(on_base("c1", &[1], &[], call("c3", "main", 5, &[], &[5])));
    life.refuses(&rollout, circle, Reason::ResendFullPrompt, field).await;
    life.accepts(&rollout, Event::Call(call("c3", "main", 5, &[1], &[5]))).await;
    let answer = life.accepts(&rollout, finish(1.0)).await;
    assert!(answer.seal.unwrap().finalised);
    life.others_go_on("deltas").await;
}

#[tokio::test]
async fn an_agent_without_a_list_drops_or_keeps_its_calls_and_is_named() {
    for (rule, wanted) in
        [(AgentsWithoutListRule::Drop, vec!["a"]), (AgentsWithoutListRule::Keep, vec!["a", "s1", "s2"])]
    {
        let settings = v1::RunSettings { agents_without_list: rule.into(), ..v1::RunSettings::default() };
        let mut life = Life::start_with(settings).await;
        let rollout = about("run", "one");
        let calls = [("a", "main", 1), ("retry", "main", 2), ("s1", "sub", 3), ("s2", "sub", 4)];
        for (id, agent, sequence) in calls {
            let id_of = u32::try_from(sequence).unwrap();
            life.accepts(&rollout, Event::Call(call(id, agent, sequence, &[id_of], &[9]))).await;
        }
        let lists = seal(&[("main", &["a"]), ("idle", &[])]);
        let answer = life.accepts(&rollout, Event::Seal(lists.clone())).await;
        let status = answer.seal.unwrap();
        assert_eq!((&status.agents_without_list[..], status.agents_without_list_count), (&["sub".to_owned()][..], 1));
        life.accepts(&rollout, Event::Reward(reward(1.0))).await;
        let shown = life.shown(&rollout).await;
        assert_eq!((state(&shown), kept(&shown)), (v1::RolloutState::Finalised, wanted));
        assert_eq!(life.repeats(&rollout, Event::Seal(lists)).await.seal.unwrap().agents_without_list, ["sub"]);
    }
}

#[tokio::test]
async fn lists_of_all_ends_and_of_the_seal_are_united_and_an_agent_may_be_resumed() {
    let mut life = Life::start().await;
    let rollout = about("run", "one");
    for (id, sequence) in [("a", 1), ("b", 2), ("c", 3), ("d", 4)] {
        let id_of = u32::try_from(sequence).unwrap();
        life.accepts(&rollout, Event::Call(call(id, "sub", sequence, &[id_of], &[9]))).await;
    }
    let ends = [agent_end("sub", 0, Some(&["a"])), agent_end("sub", 1, Some(&["b", "b"]))];
    for (resumption, end) in ends.into_iter().enumerate().rev() {
        life.accepts(&rollout, Event::AgentEnd(end.clone())).await;
        life.accepts(&rollout, Event::AgentStart(agent_start("sub", u32::try_from(resumption).unwrap()))).await;
        life.repeats(&rollout, Event::AgentEnd(end)).await;
    }
    life.accepts(&rollout, Event::AgentStart(agent_start("sub", 2))).await;
    let shown = life.shown(&rollout).await;
    assert_eq!(shown.status.unwrap().agents_finished, 0, "it was resumed once more");
    assert_eq!((shown.agents[0].starts.len(), shown.agents[0].ends.len()), (3, 2));
    let answer = life.accepts(&rollout, Event::Seal(seal(&[("sub", &["c"])]))).await;
    assert_eq!(answer.seal.unwrap().agents_without_list_count, 0);
    life.accepts(&rollout, Event::AgentEnd(agent_end("sub", 2, None))).await;
    life.accepts(&rollout, Event::Reward(reward(1.0))).await;
    let shown = life.shown(&rollout).await;
    assert_eq!((state(&shown), kept(&shown)), (v1::RolloutState::Finalised, vec!["a", "b", "c"]));
    assert_eq!(shown.status.unwrap().agents_finished, 1);
}

#[tokio::test]
async fn every_answer_has_the_totals_and_the_seals_the_figures() {
    let mut life = Life::start().await;
    let rollout = about("run", "one");
    let mut start = agent_start("sub", 0);
    start.parent_agent_id = "main".to_owned();
    start.spawning_call_id = "b".to_owned();
    let mut deep = call("d", "deep", 5, &[50], &[51]);
    deep.parent_agent_id = "sub".to_owned();
    let events = [
        (Event::Call(call("a", "main", 1, &[1], &[2, 3])), (1, 1, 2)),
        (Event::Call(call("b", "main", 2, &[1, 2, 3], &[4])), (2, 1, 3)),
        (Event::AgentStart(start), (2, 2, 3)),
        (Event::Call(call("c", "sub", 3, &[40], &[41])), (3, 2, 4)),
        (Event::Call(call("c2", "sub", 4, &[40, 41], &[42])), (4, 2, 5)),
        (Event::Call(deep), (5, 3, 6)),
        (Event::Call(call("empty", "main", 6, &[1, 2, 3, 4], &[])), (6, 3, 6)),
        (Event::AgentEnd(agent_end("sub", 0, None)), (6, 3, 6)),
    ];
    for (event, (calls, agents, generated_tokens)) in events {
        let totals = Some(v1::Totals { calls, agents, generated_tokens });
        assert_eq!(life.accepts(&rollout, event.clone()).await.totals, totals);
        assert_eq!(life.repeats(&rollout, event).await.totals, totals);
    }
    let status = life.accepts(&rollout, finish(1.0)).await.seal.unwrap();
    assert_eq!((status.agents_started, status.agents_finished, status.agent_depth), (3, 1, 3));
    assert_eq!((status.call_depth, status.critical_steps), (2, 4), "a, b, then what b spawned: c, c2");
    assert_eq!((status.calls, status.generated_tokens, status.prompt_tokens), (6, 6, 1 + 3 + 1 + 2 + 1 + 4));
    assert!(status.complete && status.finalised);
}
