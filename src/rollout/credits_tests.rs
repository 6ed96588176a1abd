//! Credits, with numbers worked out by hand, and the same in whatever order they were told.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::sync::Arc;

use proptest::prelude::*;

use super::*;
use crate::forest::call::{CallFacts, Link, NewCall, Prompt};
use crate::ids::Name;
use crate::rollout::event::{AgentEnd, AgentStart, AgentStatus, Event, Reward, Seal};
use crate::rollout::settings::RolloutSettings;
use crate::rollout::{FinalisedRollout, Judgement, Rollout};

fn rollout(change: impl FnOnce(&mut RolloutSettings)) -> Rollout {
    let mut settings = RolloutSettings::with_default_policy(Name::literal("main"));
    change(&mut settings);
    Rollout::new(Arc::new(settings), None, 0)
}

fn call_id(id: &str) -> CallId {
    CallId::parse(id).unwrap()
}

fn agent_id(id: &str) -> AgentId {
    AgentId::parse(id).unwrap()
}

fn facts(id: &str, agent: &str, kind: &'static str) -> CallFacts {
    CallFacts {
        call_id: call_id(id),
        agent_id: agent_id(agent),
        parent_agent_id: None,
        sequence: 0,
        link: Link::Root,
        kind: Name::literal(kind),
        policy: Name::literal("main"),
        versions: Vec::new(),
        model: None,
        generation: vec![9],
        logprobs: Some(vec![-0.5]),
        train: true,
        finish_reason: None,
        times_unix_ms: (None, None),
    }
}

fn reported(facts: CallFacts) -> Event {
    Event::Call { call: Box::new(NewCall { facts, prompt: Prompt::Full(vec![1]) }), names_policy: false }
}

fn call(id: &str, agent: &str) -> Event {
    reported(facts(id, agent, "turn"))
}

const NOTHING: CreditValues = CreditValues { train: None, reward: None, advantage_scale: None };

fn of_call(id: &str, values: CreditValues) -> Credit {
    Credit { target: CreditTarget::Call(call_id(id)), values }
}

fn of_agent(id: &str, values: CreditValues) -> Credit {
    Credit { target: CreditTarget::Agent(agent_id(id)), values }
}

fn train(train: bool) -> CreditValues {
    CreditValues { train: Some(train), ..NOTHING }
}

fn reward(reward: f64) -> CreditValues {
    CreditValues { reward: Some(reward), ..NOTHING }
}

fn scale(scale: f64) -> CreditValues {
    CreditValues { advantage_scale: Some(scale), ..NOTHING }
}

fn finish(credits: Vec<Credit>) -> Event {
    Event::Finish(Seal::default(), Reward { value: 1.0, components: Default::default() }, credits)
}

/// Takes an event; false if it was known already.
fn take(rollout: &mut Rollout, event: Event) -> bool {
    match rollout.judge(event) {
        Judgement::Record(record) => {
            rollout.apply(record, 0);
            true
        }
        Judgement::Duplicate(_) | Judgement::Heard => false,
        Judgement::Refused(refusal, _) => panic!("{refusal:?}"),
    }
}

fn refused(rollout: &Rollout, event: Event) -> (Reason, String) {
    let Judgement::Refused(refusal, None) = rollout.judge(event) else { panic!("it was taken") };
    (refusal.reason, refusal.field.unwrap_or_default())
}

fn finalised(rollout: &Rollout) -> &FinalisedRollout {
    rollout.finalised().unwrap()
}

/// The ids of the calls that may train.
fn training(rollout: &FinalisedRollout) -> Vec<&str> {
    rollout.may_train().iter().map(|call| rollout.facts().forest.call(call).id().as_str()).collect()
}

/// A call's advantage where its rollout has this one.
fn advantage(rollout: &FinalisedRollout, call: &str, of_rollout: Option<f64>) -> Option<f64> {
    let facts = rollout.facts();
    facts.credit_of(facts.forest.find(&call_id(call)).unwrap()).advantage(of_rollout)
}

#[test]
fn an_advantage_is_scaled_after_process_rewards_are_added() {
    let mut rollout = rollout(|_| ());
    for (id, agent) in [("a", "main"), ("b", "sub"), ("c", "sub"), ("d", "other")] {
        take(&mut rollout, call(id, agent));
    }
    take(&mut rollout, Event::Credit(of_agent("sub", reward(0.5))));
    take(&mut rollout, Event::Credit(of_agent("sub", scale(2.0))));
    take(&mut rollout, Event::Credit(of_call("b", CreditValues { reward: Some(-0.25), ..scale(0.5) })));
    take(&mut rollout, finish(vec![of_call("d", scale(-1.0))]));
    let rollout = finalised(&rollout);
    // a: 1; b: 0.5 × 2 × (1 − 0.25 + 0.5); c: 2 × (1 + 0.5); d: −1 × 1.
    let of_one: Vec<_> = ["a", "b", "c", "d"].map(|call| advantage(rollout, call, Some(1.0)).unwrap()).into();
    assert_eq!(of_one, [1.0, 1.25, 3.0, -1.0]);
    // Without an advantage of the rollout, 0 stands for it, since some have process rewards.
    let of_none: Vec<_> = ["a", "b", "c", "d"].map(|call| advantage(rollout, call, None).unwrap()).into();
    assert_eq!(of_none, [0.0, 0.25, 1.0, 0.0]);
    let credit = rollout.facts().credit_of(rollout.facts().forest.find(&call_id("b")).unwrap());
    assert_eq!((credit.reward(), credit.advantage_scale()), (Some(0.25), Some(1.0)));
}

#[test]
fn a_factor_alone_gives_no_advantage() {
    let mut rollout = rollout(|_| ());
    take(&mut rollout, call("a", "main"));
    take(&mut rollout, finish(vec![of_call("a", scale(0.5))]));
    assert_eq!(advantage(finalised(&rollout), "a", None), None);
    assert_eq!(advantage(finalised(&rollout), "a", Some(-3.0)), Some(-1.5));
}

#[test]
fn a_calls_credit_beats_its_agents_which_beats_the_call_and_the_rules() {
    let mut rollout = rollout(|settings| settings.untrained_kinds = vec![Name::literal("summary")]);
    let silent = |id: &str, agent: &str| CallFacts { train: false, ..facts(id, agent, "turn") };
    take(&mut rollout, reported(silent("own", "plain")));
    take(&mut rollout, call("plain", "plain"));
    take(&mut rollout, reported(facts("summary", "plain", "summary")));
    take(&mut rollout, reported(silent("by-agent", "on")));
    take(&mut rollout, reported(facts("summary-by-agent", "on", "summary")));
    take(&mut rollout, call("off-by-call", "on"));
    take(&mut rollout, call("off-by-agent", "off"));
    take(&mut rollout, reported(silent("on-by-call", "off")));
    let credits = vec![
        of_agent("on", train(true)),
        of_call("off-by-call", train(false)),
        of_agent("off", train(false)),
        of_call("on-by-call", train(true)),
    ];
    take(&mut rollout, finish(credits));
    assert_eq!(training(finalised(&rollout)), ["plain", "by-agent", "summary-by-agent", "on-by-call"]);
}

#[test]
fn an_answer_that_nobody_read_has_its_agent_be_context() {
    for (rule, expected) in [
        (UnreadAnswersRule::Context, vec!["a", "r", "credited"]),
        (UnreadAnswersRule::Train, vec!["a", "r", "u", "credited"]),
    ] {
        let mut rollout = rollout(|settings| settings.unread_answers = rule);
        for (id, agent) in [("a", "main"), ("r", "read"), ("u", "unread"), ("credited", "background")] {
            if agent != "main" {
                let start = AgentStart {
                    agent_id: agent_id(agent),
                    resumption: 0,
                    parent_agent_id: Some(agent_id("main")),
                    spawning_call_id: None,
                    origin: None,
                    profile: None,
                    model: None,
                };
                take(&mut rollout, Event::AgentStart(start));
            }
            take(&mut rollout, call(id, agent));
        }
        let end = AgentEnd {
            agent_id: agent_id("main"),
            resumption: 0,
            status: AgentStatus::Settled,
            kept: None,
            answers_read: vec![agent_id("read")],
        };
        take(&mut rollout, Event::AgentEnd(end));
        take(&mut rollout, finish(vec![of_agent("background", train(true))]));
        assert_eq!(training(finalised(&rollout)), expected);
    }
}

#[test]
fn a_value_stands_once_it_was_said() {
    let mut rollout = rollout(|_| ());
    take(&mut rollout, call("a", "main"));
    assert!(take(&mut rollout, Event::Credit(of_call("a", reward(0.5)))));
    assert!(!take(&mut rollout, Event::Credit(of_call("a", reward(0.5)))), "again");
    assert!(take(&mut rollout, Event::Credit(of_call("a", CreditValues { train: Some(true), ..reward(0.5) }))));
    let conflict = |field: &str| (Reason::CreditConflict, field.to_owned());
    assert_eq!(refused(&rollout, Event::Credit(of_call("a", reward(0.25)))), conflict("credit.reward"));
    assert_eq!(refused(&rollout, Event::Credit(of_call("a", train(false)))), conflict("credit.train"));
    // Two that contradict each other in one request, and what comes with them: nothing of it is taken.
    let twice = vec![of_call("b", scale(1.0)), of_agent("main", scale(3.0)), of_call("b", scale(2.0))];
    assert_eq!(refused(&rollout, finish(twice)), conflict("finish.reward.credits[2].advantage_scale"));
    assert!(rollout.facts().reward.is_none() && rollout.facts().credit_count() == 1);
    assert!(take(&mut rollout, finish(vec![of_call("never", scale(2.0)), of_agent("main", scale(3.0))])));
    assert_eq!((rollout.facts().credit_count(), rollout.facts().unused_credits()), (3, 1));
    // What was said already is a duplicate after the end too, and what is new is too late.
    assert!(!take(&mut rollout, Event::Credit(of_call("a", reward(0.5)))));
    assert!(!take(&mut rollout, finish(vec![of_agent("main", scale(3.0))])));
    assert_eq!(refused(&rollout, Event::Credit(of_call("a", scale(1.0)))).0, Reason::RolloutFinalised);
}

#[test]
fn no_credit_has_a_call_train_that_lacks_log_probabilities() {
    let bare = |id: &str| CallFacts { logprobs: None, train: false, ..facts(id, "main", "turn") };
    let mut rollout = rollout(|_| ());
    take(&mut rollout, reported(bare("a")));
    take(&mut rollout, reported(bare("b")));
    let missing = |field: &str| (Reason::LogprobsMissing, field.to_owned());
    assert_eq!(refused(&rollout, Event::Credit(of_call("a", train(true)))), missing("credit.train"));
    assert_eq!(refused(&rollout, Event::Credit(of_agent("main", train(true)))), missing("credit.train"));
    let but_one = vec![of_call("a", train(false)), of_agent("main", train(true))];
    assert_eq!(refused(&rollout, finish(but_one.clone())), missing("finish.reward.credits[1].train"));
    // In whatever order they stand in the request.
    let but_both = [vec![of_agent("main", train(true))], vec![of_call("b", train(false)), but_one[0].clone()]].concat();
    let reward = Reward { value: 0.0, components: Default::default() };
    assert!(take(&mut rollout, Event::Reward(reward, but_both)));
    // And a call that comes later is held to what was said before.
    let bare_later = reported(bare("later"));
    assert_eq!(refused(&rollout, bare_later), (Reason::LogprobsMissing, "call.generation_logprobs".to_owned()));
    let mut lenient = self::rollout(|settings| settings.require_logprobs = false);
    take(&mut lenient, reported(bare("a")));
    assert!(take(&mut lenient, Event::Credit(of_call("a", train(true)))));
}

#[test]
fn there_is_room_for_so_many_and_what_is_known_takes_none() {
    let mut rollout = rollout(|_| ());
    let many = |count: usize| (0..count).map(|id| of_call(&id.to_string(), scale(2.0))).collect::<Vec<_>>();
    let reward = || Reward { value: 0.0, components: Default::default() };
    let too_many = Event::Reward(reward(), many(limits::ROLLOUT_CREDITS_MAX + 1));
    assert_eq!(refused(&rollout, too_many).0, Reason::RolloutFull);
    assert!(take(&mut rollout, Event::Reward(reward(), many(limits::ROLLOUT_CREDITS_MAX))));
    assert!(!take(&mut rollout, Event::Credit(of_call("0", scale(2.0)))));
    assert!(take(&mut rollout, Event::Credit(of_call("0", train(true)))));
    assert_eq!(refused(&rollout, Event::Credit(of_call("one more", scale(2.0)))).0, Reason::RolloutFull);
}

/// Who may train, and advantages in bits, of each call.
type Outcome = Vec<(String, bool, Option<u64>)>;

fn outcome(events: &[Event]) -> Outcome {
    let mut rollout = rollout(|_| ());
    for event in events {
        take(&mut rollout, event.clone());
    }
    take(&mut rollout, finish(Vec::new()));
    let rollout = finalised(&rollout);
    let of_call = |(index, call): (CallIndex, &crate::forest::call::Call)| {
        let advantage = rollout.facts().credit_of(index).advantage(Some(0.1)).map(f64::to_bits);
        (call.id().to_string(), rollout.may_train().contains(index), advantage)
    };
    let mut outcome: Outcome = rollout.facts().forest.calls().map(of_call).collect();
    outcome.sort();
    outcome
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn the_order_in_which_credits_come_does_not_matter(
        order in Just((0..14).collect::<Vec<usize>>()).prop_shuffle(),
        numbers in proptest::collection::vec(-1.0f64..1.0, 14),
        trains in proptest::collection::vec(proptest::option::of(any::<bool>()), 14),
    ) {
        let mut events: Vec<Event> = (0..6).map(|at| call(&format!("c{at}"), ["x", "y"][at % 2])).collect();
        for at in 0..8 {
            // Each says a part, so that what is left out is said by none, one or two.
            let values = match at % 3 {
                0 => CreditValues { train: trains[at], ..reward(numbers[at]) },
                1 => CreditValues { train: trains[at], ..scale(numbers[at]) },
                _ => CreditValues { train: trains[at], reward: Some(numbers[at]), advantage_scale: Some(numbers[at]) },
            };
            let credit = if at < 6 { of_call(&format!("c{at}"), values) } else { of_agent(["x", "y"][at % 2], values) };
            events.push(Event::Credit(credit));
        }
        let shuffled: Vec<Event> = order.iter().map(|at| events[*at].clone()).collect();
        prop_assert_eq!(outcome(&events), outcome(&shuffled));
    }
}
