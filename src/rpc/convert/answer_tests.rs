//! Verdicts, refusals, and what a seal finds, on small rollouts.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use super::*;
use crate::error::Reason;
use crate::forest::call::CallIndex;
use crate::ids::CallId;
use crate::proto::v1::report_request::Event;
use crate::rpc::convert::examples::{about, call, delta, kept, parent, rollout, settings};

/// What a harness would be told of this call, now.
fn told(rollout: &mut Rollout, id: &str) -> v1::Verdict {
    let Rollout::Open(_) = rollout else { panic!("finalised") };
    let index = rollout.facts().forest.find(&CallId::parse(id).unwrap()).unwrap();
    let found = rollout.verdict(index);
    verdict(&rollout.facts().forest, index, &found)
}

fn calls(calls: Vec<v1::Call>) -> Rollout {
    rollout(settings(), calls.into_iter().map(Event::Call).collect())
}

#[test]
fn a_verdict_says_root_child_waiting_and_drift() {
    let base = v1::Base { call_id: "later".to_owned(), length_tokens: 1, digest: vec![0; 16].into() };
    let mut rollout = calls(vec![
        call("a", "x", 1, &[1, 2], &[3, 4]),
        call("b", "x", 2, &[1, 2, 3, 4, 5], &[6]),
        v1::Call { link: parent("a"), ..call("c", "x", 3, &[1, 2, 9, 9], &[7]) },
        v1::Call { prompt: delta(base, &[]), ..call("d", "y", 4, &[], &[1]) },
        v1::Call { link: parent("never"), ..call("e", "y", 5, &[50], &[2]) },
        call("f", "x", 6, &[1, 2], &[8]),
    ]);
    let a = told(&mut rollout, "a");
    assert_eq!((a.kind(), a.named, a.parent_call_id.as_str(), a.drift), (v1::LinkKind::Root, false, "", None));
    let b = told(&mut rollout, "b");
    assert_eq!((b.kind(), b.parent_call_id.as_str(), b.drift), (v1::LinkKind::Child, "a", None));
    let c = told(&mut rollout, "c");
    assert_eq!((c.kind(), c.broken(), c.named), (v1::LinkKind::Broken, v1::BrokenLinkReason::DoesNotFit, true));
    let drift = c.drift.unwrap();
    assert_eq!((drift.compared_call_id.as_str(), drift.matched_length_tokens), ("a", 2));
    assert_eq!((drift.kind(), drift.expected_ids, drift.found_ids), (v1::DriftKind::Differs, vec![3, 4], vec![9, 9]));
    let d = told(&mut rollout, "d");
    assert_eq!((d.kind(), d.waiting_for_call_id.as_str()), (v1::LinkKind::Waiting, "later"));
    let e = told(&mut rollout, "e");
    assert_eq!((e.kind(), e.waiting_for_call_id.as_str(), e.named), (v1::LinkKind::Waiting, "never", true));
    let f = told(&mut rollout, "f");
    assert_eq!(f.drift.as_ref().map(v1::Drift::kind), Some(v1::DriftKind::Rewind));
    assert_eq!((f.kind(), f.drift.unwrap().compared_call_id.as_str()), (v1::LinkKind::Root, "c"));
}

#[test]
fn a_call_that_generated_nothing_is_said_to_be_empty() {
    let mut rollout = calls(vec![call("a", "x", 1, &[1], &[2]), call("b", "x", 2, &[1, 2], &[])]);
    let b = told(&mut rollout, "b");
    assert_eq!((b.kind(), b.parent_call_id.as_str()), (v1::LinkKind::Empty, "a"));
    assert_eq!(totals(&rollout.facts().forest), v1::Totals { calls: 2, agents: 1, generated_tokens: 1 });
}

#[test]
fn a_broken_link_has_a_reason() {
    let rollout = calls(vec![call("a", "x", 1, &[1], &[2]), call("b", "x", 2, &[1, 2], &[3])]);
    let forest = &rollout.facts().forest;
    let reason = |named: &str, first_difference| {
        let broken = BrokenLink { named: CallId::parse(named).unwrap(), first_difference };
        broken_link_reason(forest, forest.call(CallIndex(1)), &broken)
    };
    assert_eq!(reason("b", None), v1::BrokenLinkReason::NamesItself);
    assert_eq!(reason("z", None), v1::BrokenLinkReason::NeverCame);
    assert_eq!(reason("a", Some(0)), v1::BrokenLinkReason::DoesNotFit);
    assert_eq!(reason("a", None), v1::BrokenLinkReason::Circle);
}

#[test]
fn a_seal_says_what_is_missing_and_who_keeps_it() {
    let names: Vec<String> = (0..300).map(|call| format!("m{call:03}")).collect();
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    let events = vec![
        Event::Call(v1::Call { parent_agent_id: "x".to_owned(), ..call("a", "y", 1, &[1], &[2, 3]) }),
        Event::Call(v1::Call { link: parent("p"), ..call("m000", "x", 2, &[1], &[2]) }),
        Event::Seal(kept("x", &names)),
    ];
    let mut rollout = rollout(settings(), events);
    rollout.note_refusal(Some(&CallId::parse("m001").unwrap()), "logprobs_length");
    let status = seal_status(&mut rollout);
    assert_eq!((status.missing.len(), status.missing_count, status.missing_expected_calls), (256, 300, 0));
    let first = &status.missing[0];
    assert_eq!((first.call_id.as_str(), first.agent_id.as_str()), ("m001", "x"));
    assert_eq!(
        (first.state(), first.cause()),
        (v1::MissingCallState::RefusedAwaitingResend, v1::MissingCallCause::Kept)
    );
    assert_eq!(status.missing[1].state(), v1::MissingCallState::NeverCame);
    assert_eq!((status.agents_without_list, status.agents_without_list_count), (vec!["y".to_owned()], 1));
    assert_eq!((status.agents_started, status.agent_depth, status.calls, status.generated_tokens), (2, 2, 2, 3));
    assert!(!status.complete && !status.finalised);
}

#[test]
fn a_finalised_rollout_is_complete() {
    let mut rollout = calls(vec![call("a", "x", 1, &[1], &[2])]);
    assert!(!seal_status(&mut rollout).complete);
    let mut rollout = super::super::examples::rollout(
        settings(),
        vec![Event::Call(call("a", "x", 1, &[1], &[2])), super::super::examples::finish(v1::Seal::default())],
    );
    let status = seal_status(&mut rollout);
    assert!(status.complete && status.finalised && status.missing_count == 0);
}

#[test]
fn a_refusal_carries_code_ids_and_delay() {
    let plain = refusal(&Refusal::new(Reason::Draining, "soon"), None);
    assert_eq!((plain.code, plain.reason.as_str(), plain.run_id.as_str(), plain.index), (14, "draining", "", None));
    let call = CallId::parse("c").unwrap();
    let full =
        Refusal::new(Reason::CallConflict, "other").field("call.prompt").index(3).call(&call).retry_after_ms(1250);
    let full = refusal(&full, Some(&about()));
    assert_eq!((full.code, full.field.as_str(), full.index, full.call_id.as_str()), (6, "call.prompt", Some(3), "c"));
    assert_eq!((full.run_id.as_str(), full.group_id.as_str(), full.rollout_id.as_str()), ("run", "group", "rollout"));
    assert_eq!(full.retry_after, Some(prost_types::Duration { seconds: 1, nanos: 250_000_000 }));
}
