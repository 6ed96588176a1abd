//! What a turn of the sequencing task costs, and what it leaves standing.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use proptest::prelude::*;

use super::*;
use crate::log::memory::MemoryLog;
use crate::store::clock::Clock;
use crate::store::{Eviction, StoreOptions};
use crate::telemetry::Telemetry;

fn run(number: usize) -> RunId {
    RunId::parse(&format!("run-{number}")).unwrap()
}

fn sequencer() -> Sequencer {
    let log = Arc::new(MemoryLog::forgetting());
    let options = StoreOptions {
        clock: Clock::manual(),
        telemetry: Telemetry::new(),
        memory_budget_bytes: 1 << 30,
        restart_grace_ms: 0,
        eviction: Eviction::default(),
    };
    let (store, _commands) = Store::new(options);
    store.open_log(log, Position::default());
    Sequencer::new(store)
}

/// A consumer with this number joins a group of its own in this run.
fn join(sequencer: &mut Sequencer, of: usize, number: u64) -> mpsc::Receiver<ToConsumer> {
    let (sender, receiver) = mpsc::channel(8);
    let (reply, mut answer) = oneshot::channel();
    let subscription = Subscription {
        run: run(of),
        consumer_group: ConsumerGroupId::parse(&format!("group-{number}")).unwrap(),
        consumer_name: String::new(),
        consumer: ConsumerId(number),
        settings: None,
        ephemeral: true,
        credit_tokens: 1,
        policy_version: None,
        shard: None,
        step_index: None,
        held: Vec::new(),
        sender,
    };
    sequencer.subscribe(Box::new(subscription), reply);
    answer.try_recv().unwrap().unwrap();
    receiver
}

/// What the loop does after each command; gives back in how many runs something was looked at.
fn turn(sequencer: &mut Sequencer) -> usize {
    let before = sequencer.deadlines.put_count;
    while !sequencer.stirred.is_empty() {
        sequencer.dispatch();
    }
    sequencer.check();
    sequencer.deadlines.put_count - before
}

#[test]
fn a_turn_looks_at_the_runs_that_it_is_about() {
    const RUNS: usize = 1000;
    let mut sequencer = sequencer();
    let mut receivers: Vec<_> = (0..RUNS).map(|number| join(&mut sequencer, number, number as u64)).collect();
    assert_eq!(turn(&mut sequencer), RUNS);
    sequencer.credit(ConsumerId(7), 100);
    assert_eq!(turn(&mut sequencer), 1);
    let name = ConsumerGroupId::parse("group-7").unwrap();
    assert_eq!(sequencer.members(&run(7), name.as_str()), [ConsumerId(7)]);
    sequencer.tell_members(&run(7), &name, |_| ToConsumer::Skipped { units: 1 });
    assert!(matches!(receivers[7].try_recv(), Ok(ToConsumer::Skipped { units: 1 })));
    sequencer.tick();
    assert_eq!(turn(&mut sequencer), 0, "no lease runs out");
    sequencer.delete_run(&run(7), true).unwrap();
    assert_eq!((turn(&mut sequencer), sequencer.consumers.len()), (0, RUNS - 1));
    assert!(matches!(receivers[7].try_recv(), Ok(ToConsumer::Ended(_))));
    assert!(receivers.iter_mut().all(|receiver| receiver.try_recv().is_err()), "nobody else was told anything");
}

proptest! {
    #[test]
    fn deadlines_come_up_in_their_order(puts in prop::collection::vec((0..5_usize, prop::option::of(0..9_u64)), 0..40)) {
        let mut deadlines = Deadlines::default();
        let mut model: BTreeMap<RunId, u64> = BTreeMap::new();
        for (number, at_ms) in puts {
            deadlines.put(&run(number), at_ms);
            model.remove(&run(number));
            model.extend(at_ms.map(|at_ms| (run(number), at_ms)));
            prop_assert_eq!(deadlines.first_ms(), model.values().min().copied());
            prop_assert!((0..5).all(|number| deadlines.keeps(&run(number), model.get(&run(number)).copied())));
            for now_ms in 0..9 {
                let mut due = deadlines.due(now_ms);
                due.sort();
                let expected: Vec<RunId> =
                    model.iter().filter(|(_, at_ms)| **at_ms <= now_ms).map(|(run, _)| run.clone()).collect();
                prop_assert_eq!(due, expected);
            }
        }
    }
}
