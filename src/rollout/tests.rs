//! What a clock decides and when, and what is awaited: the same in whatever order it was told.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use proptest::prelude::*;

use super::event::{AgentEnd, AgentStatus, Effect, Event};
use super::settings::MissingCallRule;
use super::*;
use crate::forest::call::{CallFacts, Delta, Link, NewCall, Prompt};
use crate::forest::digest::Digest;
use crate::ids::AgentId;

const IDLE_MS: u64 = 1000;
const CALLS_MS: u64 = 100;
const PARENTS_MS: u64 = 300;

fn settings(missing_call: MissingCallRule) -> Arc<RolloutSettings> {
    Arc::new(RolloutSettings {
        idle_timeout_ms: IDLE_MS,
        missing_call_timeout_ms: CALLS_MS,
        missing_parent_timeout_ms: PARENTS_MS,
        missing_call,
        ..RolloutSettings::with_default_policy(Name::literal("main"))
    })
}

fn rollout(missing_call: MissingCallRule) -> Rollout {
    Rollout::new(settings(missing_call), None, 0)
}

fn call_id(id: impl ToString) -> CallId {
    CallId::parse(&id.to_string()).unwrap()
}

fn agent_id(id: impl ToString) -> AgentId {
    AgentId::parse(&id.to_string()).unwrap()
}

/// A call with one id in its prompt and one sampled.
fn call(id: impl ToString, link: Link, prompt: Prompt) -> Event {
    let facts = CallFacts {
        call_id: call_id(id),
        agent_id: agent_id("a"),
        parent_agent_id: None,
        sequence: 0,
        link,
        kind: Name::literal("turn"),
        policy: Name::literal("main"),
        versions: Vec::new(),
        model: None,
        generation: vec![9],
        logprobs: Some(vec![-0.5]),
        train: true,
        finish_reason: None,
        times_unix_ms: (None, None),
    };
    Event::Call { call: Box::new(NewCall { facts, prompt }), names_policy: false }
}

fn plain(id: &str) -> Event {
    call(id, Link::Infer, Prompt::Full(vec![1]))
}

fn naming(id: &str, parent: &str) -> Event {
    call(id, Link::Parent(call_id(parent)), Prompt::Full(vec![1]))
}

/// A delta that takes nothing of its base, and waits for it all the same.
fn on_base(base: impl ToString) -> Prompt {
    let digest = Digest::of(&[]);
    Prompt::Delta(Delta { base: call_id(base), base_length: 0, digest, suffix: vec![1] })
}

fn seal(kept: Option<&[&str]>, expected_calls: Option<u64>) -> Event {
    let list = |calls: &[&str]| BTreeMap::from([(agent_id("a"), calls.iter().map(call_id).collect())]);
    Event::Seal(Seal { kept: kept.map(list), expected_calls })
}

fn agent_end(kept: &[&str]) -> Event {
    let kept = Some(kept.iter().map(call_id).collect());
    let status = AgentStatus::Settled;
    Event::AgentEnd(AgentEnd { agent_id: agent_id("a"), resumption: 0, status, kept, answers_read: Vec::new() })
}

fn reward() -> Event {
    Event::Reward(Reward { value: 1.0, components: BTreeMap::new() }, Vec::new())
}

/// What a seal finds in a large rollout is kept until something changes, and then found anew.
#[test]
fn what_a_seal_finds_is_kept_until_something_changes() {
    let mut rollout = rollout(MissingCallRule::Discard);
    let kept: Vec<String> = (0..=limits::SEAL_FINDINGS_CALLS).map(|call| call.to_string()).collect();
    let kept: Vec<&str> = kept.iter().map(String::as_str).collect();
    assert!(take(&mut rollout, seal(Some(&kept), None), 0));
    let missing = |rollout: &mut Rollout| {
        let (found, again) = (rollout.findings(), rollout.findings());
        assert!(Arc::ptr_eq(&found, &again), "found once");
        let links = rollout.links_now();
        let fresh = findings::Findings::new(rollout, &links);
        assert_eq!(format!("{fresh:?}"), format!("{found:?}"));
        (found.missing_count as usize, found.missing[0].0.state)
    };
    assert_eq!(missing(&mut rollout), (kept.len(), status::MissingState::NeverCame));
    rollout.note_refusal(Some(&call_id("0")), "logprobs_length");
    assert_eq!(missing(&mut rollout), (kept.len(), status::MissingState::Refused("logprobs_length")));
    assert!(take(&mut rollout, plain("0"), 0));
    assert_eq!(missing(&mut rollout), (kept.len() - 1, status::MissingState::NeverCame));
    for call in kept {
        take(&mut rollout, plain(call), 0);
    }
    assert!(take(&mut rollout, reward(), 0) && rollout.finalised().is_some());
    assert_eq!(rollout.findings().missing_count, 0);
    assert!(Arc::ptr_eq(&rollout.findings(), &rollout.findings()));
}

/// Takes an event as a service would; false if it was refused.
fn take(rollout: &mut Rollout, event: Event, now_ms: u64) -> bool {
    match rollout.judge(event) {
        Judgement::Record(record) => drop(rollout.apply(record, now_ms)),
        Judgement::Heard | Judgement::Duplicate(_) => rollout.heard(now_ms),
        Judgement::Refused(..) => return false,
    }
    true
}

/// Lets a clock look at this moment; gives what it decided, and how the rollout ended if it did.
fn look(rollout: &mut Rollout, now_ms: u64) -> (Vec<Decision>, Option<String>) {
    let (mut decisions, mut end) = (Vec::new(), None);
    while let Some(decision) = rollout.due(now_ms).filter(|_| end.is_none()) {
        decisions.push(decision);
        let applied = rollout.apply(event::RolloutRecord::Decision(decision), now_ms);
        end = applied.effects.iter().find_map(|effect| match effect {
            Effect::Discarded(discarded) => Some(discarded.reason.clone()),
            Effect::Finalised(_) | Effect::CallResolved(..) | Effect::CallUnresolved(_) => None,
        });
    }
    rollout.deadline_passed(now_ms);
    (decisions, end)
}

#[test]
fn anything_that_is_heard_restarts_the_idle_timeout() {
    let mut rollout = rollout(MissingCallRule::Discard);
    assert_eq!(rollout.next_deadline_ms(), Some(IDLE_MS));
    let heard = [plain("a"), plain("a"), Event::Heartbeat, reward()];
    for (event, now_ms) in heard.into_iter().zip([200, 300, 400, 500]) {
        assert!(take(&mut rollout, event, now_ms));
        assert_eq!(rollout.next_deadline_ms(), Some(now_ms + IDLE_MS));
    }
    let other = call("a", Link::Root, Prompt::Full(vec![1]));
    assert!(matches!(rollout.judge(other), Judgement::Refused(_, Some(_))));
    assert_eq!(look(&mut rollout, 500 + IDLE_MS - 1).0, []);
    let idle = (vec![Decision::IdleTimeout], Some("idle_timeout".to_owned()));
    assert_eq!(look(&mut rollout, 500 + IDLE_MS), idle);
}

#[test]
fn what_is_sealed_and_rewarded_awaits_only_calls() {
    let mut rollout = rollout(MissingCallRule::Discard);
    take(&mut rollout, seal(None, Some(1)), 0);
    assert_eq!(rollout.next_deadline_ms(), Some(CALLS_MS));
    assert_eq!(look(&mut rollout, CALLS_MS - 1).0, []);
    take(&mut rollout, reward(), CALLS_MS - 1);
    assert_eq!(look(&mut rollout, CALLS_MS), (vec![Decision::MissingCallsDiscard], Some("missing_call".to_owned())));
}

#[test]
fn a_clock_that_found_nothing_missing_looks_again_after_the_next_event() {
    let mut rollout = rollout(MissingCallRule::Discard);
    take(&mut rollout, plain("a"), 0);
    take(&mut rollout, seal(Some(&["a"]), None), 0);
    assert_eq!(look(&mut rollout, CALLS_MS).0, []);
    assert_eq!(rollout.next_deadline_ms(), Some(PARENTS_MS), "calls are all there");
    assert_eq!(look(&mut rollout, PARENTS_MS).0, []);
    assert_eq!(rollout.next_deadline_ms(), Some(IDLE_MS), "parents too; the reward is not");
    // A late end keeps one more call, which has the whole time.
    let end = AgentEnd {
        agent_id: agent_id("b"),
        resumption: 0,
        status: AgentStatus::Settled,
        kept: Some(vec![call_id("b")]),
        answers_read: Vec::new(),
    };
    take(&mut rollout, Event::AgentEnd(end), 500);
    assert_eq!(rollout.next_deadline_ms(), Some(500 + CALLS_MS));
    // And what that names has the whole time again.
    take(&mut rollout, naming("b", "p"), 550);
    assert_eq!(look(&mut rollout, 600).0, []);
    assert_eq!(look(&mut rollout, 500 + PARENTS_MS), (vec![Decision::MissingParentsGivenUp], None));
    take(&mut rollout, reward(), 900);
    assert!(!rollout.finalised().unwrap().incomplete());
    assert_eq!(rollout.next_deadline_ms(), None);
}

#[test]
fn events_that_name_nothing_do_not_put_off_what_is_missing() {
    let mut rollout = rollout(MissingCallRule::Discard);
    take(&mut rollout, naming("a", "p"), 0);
    take(&mut rollout, seal(Some(&["a"]), None), 0);
    for now_ms in (50..PARENTS_MS).step_by(50) {
        assert_eq!(look(&mut rollout, now_ms).0, []);
        take(&mut rollout, plain(&format!("probe {now_ms}")), now_ms);
    }
    assert_eq!(look(&mut rollout, PARENTS_MS).0, [Decision::MissingParentsGivenUp]);
}

#[test]
fn kept_calls_and_named_parents_are_given_up_each_in_their_time() {
    let mut rollout = rollout(MissingCallRule::Finalise);
    take(&mut rollout, naming("a", "p"), 0);
    take(&mut rollout, seal(Some(&["a", "gone"]), None), 0);
    take(&mut rollout, reward(), 0);
    assert_eq!(look(&mut rollout, CALLS_MS), (vec![Decision::MissingCallsFinalise], None));
    assert!(rollout.finalised().is_none(), "the parent has its own time");
    assert_eq!(look(&mut rollout, PARENTS_MS), (vec![Decision::MissingParentsGivenUp], None));
    assert!(rollout.finalised().unwrap().incomplete());
}

#[test]
fn a_kept_call_without_its_base_is_missing_however_it_was_first_named() {
    let mut rollout = rollout(MissingCallRule::Discard);
    take(&mut rollout, naming("a", "p"), 0);
    take(&mut rollout, seal(None, Some(2)), 0);
    take(&mut rollout, plain("b"), 10);
    take(&mut rollout, call("c", Link::Infer, Prompt::Full(vec![1])), 10);
    assert_eq!(look(&mut rollout, PARENTS_MS), (vec![Decision::MissingParentsGivenUp], None));
    // No list was given, so it is kept, though as a parent it had been given up.
    take(&mut rollout, call("p", Link::Infer, on_base("gone")), PARENTS_MS);
    take(&mut rollout, reward(), PARENTS_MS);
    assert!(rollout.finalised().is_none());
    take(&mut rollout, plain("gone"), PARENTS_MS);
    assert!(rollout.finalised().is_some());
}

#[test]
fn a_named_parent_that_a_later_list_keeps_is_given_up_as_a_kept_call() {
    let mut rollout = rollout(MissingCallRule::Finalise);
    take(&mut rollout, seal(Some(&["a"]), None), 0);
    take(&mut rollout, reward(), 0);
    take(&mut rollout, call("a", Link::Parent(call_id("p")), on_base("b")), 0);
    take(&mut rollout, plain("b"), 0);
    take(&mut rollout, agent_end(&["p"]), 10);
    assert_eq!(look(&mut rollout, 10 + CALLS_MS), (vec![Decision::MissingCallsFinalise], None));
    assert!(rollout.finalised().unwrap().incomplete());
}

#[test]
fn a_conflict_marks_a_rollout_that_is_finalised_too() {
    let mut rollout = rollout(MissingCallRule::Discard);
    take(&mut rollout, plain("a"), 0);
    take(&mut rollout, seal(None, None), 0);
    take(&mut rollout, reward(), 0);
    let Judgement::Refused(_, Some(mark)) = rollout.judge(call("a", Link::Root, Prompt::Full(vec![1]))) else {
        panic!("a conflict")
    };
    rollout.apply(mark, 1);
    assert_eq!(rollout.facts().conflict(), Some(&call_id("a")));
    let again = rollout.judge(call("a", Link::Root, Prompt::Full(vec![1])));
    assert!(matches!(again, Judgement::Refused(_, None)), "it is marked once");
}

#[test]
fn a_declared_link_is_given_no_advice_before_and_after_it_is_finalised() {
    let mut rollout = rollout(MissingCallRule::Discard);
    assert!(take(&mut rollout, plain("c"), 0));
    assert!(take(&mut rollout, call("d", Link::Root, Prompt::Full(vec![1])), 0));
    let declared = rollout.facts().forest.find(&call_id("d")).unwrap();
    let open = rollout.verdict(declared);
    assert_eq!(open.drift, None);
    assert!(take(&mut rollout, seal(None, None), 0) && take(&mut rollout, reward(), 0));
    assert!(rollout.finalised().is_some());
    assert_eq!(rollout.verdict(declared), open);
}

/// Calls 0 to 5, some of which name or wait for others; a list of some of them, or a count; and an order in which to tell it.
fn told() -> impl Strategy<Value = (Vec<Event>, Vec<Event>)> {
    let calls = proptest::collection::vec((0_u8..3, 0_u8..7, 0_u8..3, 0_u8..7), 1..6);
    let kept = proptest::option::of(proptest::collection::vec(0_u8..7, 0..4));
    (calls, kept, any::<bool>()).prop_flat_map(|(calls, kept, counted)| {
        let mut events: Vec<Event> = calls.iter().zip(0..).map(|(call, id)| random_call(id, *call)).collect();
        let list = |calls: &Vec<u8>| BTreeMap::from([(agent_id("a"), calls.iter().map(call_id).collect())]);
        let expected_calls = (counted || kept.is_none()).then_some(calls.len() as u64);
        events.push(Event::Seal(Seal { kept: kept.as_ref().map(list), expected_calls }));
        (Just(events.clone()).prop_shuffle(), Just(events).prop_shuffle())
    })
}

fn random_call(id: u8, (link, parent, prompt, base): (u8, u8, u8, u8)) -> Event {
    let link = match link {
        0 => Link::Infer,
        1 => Link::Root,
        _ => Link::Parent(call_id(parent)),
    };
    // A circle of bases is refused, by whoever closes it.
    let prompt = if prompt == 0 && base > id { on_base(base) } else { Prompt::Full(vec![1]) };
    call(id, link, prompt)
}

/// What is awaited, without who named it first.
fn awaited(rollout: &Rollout) -> Vec<(CallId, bool, bool)> {
    let missing = Awaited::new(rollout.facts()).missing(rollout.facts());
    let mut missing: Vec<_> =
        missing.into_iter().map(|(call, cause)| (call, cause.is_kept(), cause.is_parent())).collect();
    missing.sort();
    missing
}

/// Applies what a clock decides.
fn decide(rollout: &mut Rollout, decision: Decision, now_ms: u64) {
    rollout.apply(event::RolloutRecord::Decision(decision), now_ms);
}

#[test]
fn what_comes_after_a_clock_gave_something_up_is_gone_through_once() {
    const CALLS: usize = 2000;
    let ids: Vec<String> = (0..CALLS).map(|number| number.to_string()).chain(["gone".to_owned()]).collect();
    let ids: Vec<&str> = ids.iter().map(String::as_str).collect();
    let mut rollout = rollout(MissingCallRule::Finalise);
    take(&mut rollout, naming("0", "p"), 0);
    take(&mut rollout, seal(Some(&ids), None), 0);
    take(&mut rollout, reward(), 0);
    decide(&mut rollout, Decision::MissingParentsGivenUp, 1);
    for id in ids.iter().skip(1).take(CALLS - 1) {
        take(&mut rollout, naming(id, &format!("p{id}")), 1);
    }
    let Rollout::Open(open) = &rollout else { panic!("one kept call has not come") };
    let steps = open.awaited.as_ref().unwrap().steps;
    assert!(steps <= 4 * CALLS, "{steps} steps");
    // What was given up and comes after all may itself name what is waited for; its parent is given up, too.
    take(&mut rollout, naming("p", "q"), 1);
    decide(&mut rollout, Decision::MissingCallsFinalise, 2);
    assert!(rollout.finalised().unwrap().incomplete());
}

/// What is waited for as a named parent and turns out to be kept is given up with the kept ones: whoever names it comes first
/// or last.
#[test]
fn a_named_parent_that_is_kept_is_given_up_with_the_kept_ones() {
    let (naming, kept) = (|| naming("c", "p"), || call("p", Link::Root, on_base("never")));
    for [first, second] in [[naming(), kept()], [kept(), naming()]] {
        let mut rollout = rollout(MissingCallRule::Finalise);
        let sealed = take(&mut rollout, seal(None, Some(3)), 0) && take(&mut rollout, reward(), 0);
        assert!(sealed && take(&mut rollout, first, 1));
        decide(&mut rollout, Decision::MissingCallsFinalise, 2);
        take(&mut rollout, second, 3);
        assert!(rollout.finalised().is_some_and(|finalised| finalised.incomplete()));
    }
}

proptest! {
    #[test]
    fn a_clock_may_give_up_at_any_moment((events, _) in told(), places in proptest::collection::vec(0_usize..8, 4)) {
        let mut rollout = rollout(MissingCallRule::Finalise);
        let mut steps: Vec<Result<Event, Decision>> = events.into_iter().map(Ok).collect();
        let (calls, parents) = (Decision::MissingCallsFinalise, Decision::MissingParentsGivenUp);
        let more = [Ok(reward()), Ok(agent_end(&["0", "6"])), Err(calls), Err(parents)];
        for (step, place) in more.into_iter().zip(places) {
            // One that is behind the end never comes.
            if place <= steps.len() {
                steps.insert(place, step);
            }
        }
        for step in steps {
            match step {
                Ok(event) => drop(take(&mut rollout, event, 0)),
                Err(decision) => decide(&mut rollout, decision, 0),
            }
            let facts = rollout.facts();
            let missing = Awaited::new(facts).missing(facts);
            let given_up = missing.iter().all(|(_, cause)| cause.is_given_up(facts));
            let counted = status::missing_expected_calls(facts) == 0 || facts.without_missing;
            let complete = facts.seal.is_some() && facts.reward.is_some() && counted && given_up;
            prop_assert_eq!(rollout.finalised().is_some(), complete);
        }
    }

    #[test]
    fn what_is_awaited_does_not_depend_on_the_order_of_events((one, other) in told()) {
        let (mut first, mut second) = (rollout(MissingCallRule::Discard), rollout(MissingCallRule::Discard));
        for (rollout, events) in [(&mut first, one), (&mut second, other)] {
            for event in events {
                prop_assert!(take(rollout, event, 0));
            }
        }
        prop_assert_eq!(awaited(&first), awaited(&second));
        prop_assert_eq!(status::missing_expected_calls(first.facts()), 0);
        for rollout in [&mut first, &mut second] {
            take(rollout, reward(), 0);
        }
        prop_assert_eq!(first.finalised().is_some(), second.finalised().is_some());
    }

    #[test]
    fn a_rollout_is_finalised_by_the_event_after_which_nothing_is_awaited((events, _) in told(), reward_at in 0_usize..7) {
        let mut rollout = rollout(MissingCallRule::Discard);
        let mut events = events;
        events.insert(reward_at.min(events.len()), reward());
        for event in events {
            take(&mut rollout, event, 0);
            let facts = rollout.facts();
            let done = facts.seal.is_some() && facts.reward.is_some();
            let complete = done && status::missing_expected_calls(facts) == 0 && awaited(&rollout).is_empty();
            prop_assert_eq!(rollout.finalised().is_some(), complete);
            // Who looks a few calls at a time finds the same.
            let waits = !complete && (status::missing_expected_calls(facts) > 0 || !awaited(&rollout).is_empty());
            for calls_max in [1, 2, 100] {
                let mut search = status::AwaitedSearch::default();
                let found = std::iter::repeat_with(|| search.look(&rollout, calls_max)).flatten().next();
                prop_assert_eq!(found, Some(waits));
            }
        }
    }
}
