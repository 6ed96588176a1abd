//! Random operations against what a slow reader of the contract keeps: who has what, what was acknowledged, what was
//! settled; and a replay of the records alone.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use proptest::prelude::*;
use proptest::sample::select;

use super::*;

#[derive(Debug, Clone)]
enum Op {
    Push {
        units: Vec<u64>,
    },
    Join {
        consumer: u64,
        name: u8,
        credit_tokens: u64,
        held: Vec<usize>,
    },
    Leave {
        consumer: u64,
    },
    Credit {
        consumer: u64,
        credit_tokens: u64,
    },
    Dispatch {
        max_units: usize,
    },
    Ack {
        units: Vec<usize>,
        park: bool,
    },
    Nack {
        consumer: u64,
        units: Vec<usize>,
        delay_ms: Option<u64>,
    },
    Sign {
        consumer: u64,
    },
    /// A trainer is on this version, of a policy or of any.
    Version {
        policy: Option<&'static str>,
        version: u64,
    },
    Tick {
        passes_ms: u64,
    },
    /// The log catches up with so many records.
    Durable {
        records: usize,
    },
    Stale {
        unit: usize,
    },
    Release {
        unit: usize,
    },
    Forget {
        source: u64,
    },
    /// Keeps what is acknowledged now.
    Checkpoint,
    /// Goes back, or forward, to what was kept.
    Seek {
        checkpoint: usize,
    },
}

/// What is a record in the log: replay sees these and nothing else.
#[derive(Debug, Clone)]
enum Record {
    Push(u64, Vec<NewUnit<&'static str>>),
    Ack(UnitId),
    Drop(UnitId, DropReason),
    Release(UnitId),
    Forget(u64),
    Seek(u64),
}

fn ops() -> impl Strategy<Value = Op> {
    let consumer = || 0u64..4;
    let some_units = || prop::collection::vec(0usize..40, 0..4);
    prop_oneof![
        4 => prop::collection::vec(1u64..12, 0..5).prop_map(|units| Op::Push { units }),
        3 => (consumer(), 0u8..3, 0u64..30, some_units())
            .prop_map(|(consumer, name, credit_tokens, held)| Op::Join { consumer, name, credit_tokens, held }),
        2 => consumer().prop_map(|consumer| Op::Leave { consumer }),
        2 => (consumer(), 0u64..30).prop_map(|(consumer, credit_tokens)| Op::Credit { consumer, credit_tokens }),
        6 => (1usize..6).prop_map(|max_units| Op::Dispatch { max_units }),
        5 => (some_units(), any::<bool>()).prop_map(|(units, park)| Op::Ack { units, park }),
        3 => (consumer(), some_units(), prop::option::of(0u64..900))
            .prop_map(|(consumer, units, delay_ms)| Op::Nack { consumer, units, delay_ms }),
        2 => consumer().prop_map(|consumer| Op::Sign { consumer }),
        1 => (select(&[None, Some("a"), Some("b"), Some("c")]), 0u64..14)
            .prop_map(|(policy, version)| Op::Version { policy, version }),
        3 => (0u64..800).prop_map(|passes_ms| Op::Tick { passes_ms }),
        5 => (1usize..6).prop_map(|records| Op::Durable { records }),
        1 => (0usize..40).prop_map(|unit| Op::Stale { unit }),
        1 => (0usize..40).prop_map(|unit| Op::Release { unit }),
        1 => (0u64..12).prop_map(|source| Op::Forget { source }),
        2 => Just(Op::Checkpoint),
        2 => (0usize..6).prop_map(|checkpoint| Op::Seek { checkpoint }),
    ]
}

const MAX_STALENESS: u64 = 2;

fn new_group(ephemeral: bool) -> Group {
    let bounds = QueueBounds { max_units_in_flight: 4, max_ephemeral_waiting_units: 8, ..bounds() };
    let max_staleness_versions = (!ephemeral).then_some(MAX_STALENESS);
    ConsumerGroup::new(GroupDefinition { ephemeral, max_staleness_versions, ..definition() }, bounds, 0, 0)
}

struct Run {
    group: Group,
    now_ms: u64,
    next_source: u64,
    names: Vec<UnitId>,
    /// Who a slow reader thinks has each unit.
    holders: BTreeMap<UnitId, ConsumerId>,
    /// What is in the log and not durable.
    log: Vec<Record>,
    durable: Vec<Record>,
    effects: Vec<QueueEffect<u64>>,
    acknowledged: BTreeSet<UnitId>,
    /// What trainers said that they are on, each time.
    versions: Vec<(Option<&'static str>, u64)>,
    /// Moments, and what was acknowledged then.
    checkpoints: Vec<(u64, BTreeSet<UnitId>)>,
}

/// Applies a record, before which these were applied.
fn apply(group: &mut Group, before: &[Record], record: Record) -> Vec<QueueEffect<u64>> {
    let at = before.len() as u64 + 1;
    match record {
        Record::Push(source, units) => group.push(source, units, 0),
        Record::Ack(unit) => group.apply_ack(&unit, at),
        Record::Drop(unit, reason) => group.apply_drop(&unit, reason),
        Record::Release(unit) => group.apply_release(&unit),
        Record::Forget(source) => {
            group.forget_source(&source);
            vec![]
        }
        Record::Seek(to) => {
            let units_of = |source: &u64| {
                let pushed = before.iter().find_map(|record| {
                    let Record::Push(of, units) = record else { return None };
                    (of == source).then(|| units.clone())
                });
                pushed.unwrap_or_default()
            };
            group.apply_seek(to, at, units_of, 0).1
        }
    }
}

impl Run {
    fn new(ephemeral: bool) -> Self {
        Self {
            group: new_group(ephemeral),
            now_ms: 0,
            next_source: 0,
            names: vec![],
            holders: BTreeMap::new(),
            log: vec![],
            durable: vec![],
            effects: vec![],
            acknowledged: BTreeSet::new(),
            versions: vec![],
            checkpoints: vec![],
        }
    }

    fn pick(&self, units: &[usize]) -> Vec<UnitId> {
        units.iter().map(|unit| self.names.get(*unit).cloned().unwrap_or_else(|| id("never"))).collect()
    }

    fn decide(&mut self, decisions: Vec<Decision>) {
        for decision in decisions {
            let (unit, reason) = match decision {
                Decision::DropUndeliverable { unit } => (unit, DropReason::Undeliverable),
                Decision::DropStale { unit } => (unit, DropReason::Stale),
            };
            assert_eq!(self.group.place(&unit), Some(Place::Parked(ParkedFor::Drop(reason))));
            self.log.push(Record::Drop(unit, reason));
        }
    }

    fn make_durable(&mut self, records: usize) {
        let records = records.min(self.log.len());
        for record in self.log.drain(..records).collect::<Vec<_>>() {
            if let Record::Ack(unit) = &record {
                let counts = self.group.judge_acks(std::slice::from_ref(unit))[0].1 == AckResult::Acknowledged;
                let anew = counts && self.acknowledged.insert(unit.clone());
                assert_eq!(anew, counts, "acknowledged once");
            }
            self.apply(record);
        }
        self.forget_ended_leases();
    }

    fn apply(&mut self, record: Record) {
        self.effects.extend(apply(&mut self.group, &self.durable, record.clone()));
        self.durable.push(record);
    }

    /// Seeks, if that is possible, once all that was logged is durable and nobody is there any more.
    fn seek(&mut self, checkpoint: usize) {
        let Some((to, acknowledged)) = self.checkpoints.get(checkpoint).cloned() else { return };
        self.make_durable(usize::MAX);
        self.group.release_all(self.now_ms);
        self.forget_ended_leases();
        let forgotten = |unit: &&UnitId| self.group.place(unit).is_none();
        let lost = self.acknowledged.symmetric_difference(&acknowledged).find(forgotten);
        match self.group.judge_seek(to) {
            Err(refused) => assert_eq!(refused, SeekRefused::NotRetained),
            Ok(()) => {
                assert_eq!(lost, None, "what is forgotten was as it is");
                self.apply(Record::Seek(to));
                self.acknowledged = acknowledged;
                for unit in self.names.iter().filter(|unit| self.group.place(unit).is_some()) {
                    let is = self.group.place(unit) == Some(Place::Acknowledged);
                    assert_eq!(is, self.acknowledged.contains(unit), "{unit}");
                }
            }
        }
    }

    /// A slow reader's leases: what the group no longer has out at the same consumer is nobody's.
    fn forget_ended_leases(&mut self) {
        let group = &self.group;
        self.holders.retain(
            |unit, holder| matches!(group.place(unit), Some(Place::Leased { consumer, .. }) if consumer == *holder),
        );
    }

    /// What waits and is too old is parked, and nothing else.
    fn drop_stale(&mut self) {
        self.group.dispatch(self.now_ms, 0);
        let waiting = |unit: &&UnitId| self.group.place(unit) == Some(Place::Waiting);
        let is_stale = |unit: &&UnitId| {
            versions_of(unit).iter().any(|(policy, oldest)| {
                let of_policy = |(said, _): &&(Option<&str>, u64)| said.is_none_or(|said| said == &**policy);
                let on = self.versions.iter().filter(of_policy).map(|(_, version)| *version).max();
                on.is_some_and(|on| on > oldest + MAX_STALENESS)
            })
        };
        let has_bound = !self.group.definition().ephemeral;
        let stale: BTreeSet<UnitId> =
            self.names.iter().filter(waiting).filter(|unit| has_bound && is_stale(unit)).cloned().collect();
        let decisions = self.group.judge_stale(self.now_ms, usize::MAX);
        let found = decisions.iter().map(|decision| match decision {
            Decision::DropStale { unit } => unit.clone(),
            Decision::DropUndeliverable { .. } => panic!("{decision:?}"),
        });
        assert_eq!(found.collect::<BTreeSet<_>>(), stale);
        self.decide(decisions);
    }

    /// Gives out one unit at a time, each compared with the slow choice.
    fn dispatch(&mut self, max_units: usize) {
        for _ in 0..max_units {
            self.group.dispatch(self.now_ms, 0);
            let waiting = |unit: &&UnitId| self.group.place(unit) == Some(Place::Waiting);
            let head = self.names.iter().find(waiting).cloned();
            let expected = head.and_then(|head| Some((self.slow_choice(tokens_of(&head))?, head)));
            let delivery = self.group.dispatch(self.now_ms, 1).pop();
            assert_eq!(delivery.as_ref().map(|d| (d.consumer, d.unit.clone())), expected);
            let Some(delivery) = delivery else { return };
            assert!(!self.acknowledged.contains(&delivery.unit), "what is acknowledged goes out no more");
            if !self.group.definition().ephemeral {
                assert!(delivery.delivery_number <= 3);
                assert_eq!(self.holders.insert(delivery.unit, delivery.consumer), None, "leases are disjoint");
            }
        }
    }

    fn slow_choice(&self, tokens: u64) -> Option<ConsumerId> {
        let room = |facts: &ConsumerFacts| {
            let fits = facts.in_flight.units == 0 || facts.in_flight.tokens + tokens <= facts.credit_tokens;
            facts.credit_tokens > 0 && facts.in_flight.units < 4 && fits
        };
        let order =
            |facts: &ConsumerFacts| (facts.silent, facts.in_flight.tokens, facts.delivered.tokens, facts.consumer);
        self.group.consumers().filter(room).min_by_key(order).map(|facts| facts.consumer)
    }

    fn step(&mut self, op: Op) {
        match op {
            Op::Push { units } => self.push(&units),
            Op::Join { consumer, name, credit_tokens, held } => {
                let (consumer, name) = (ConsumerId(consumer), ["", "x", "y"][usize::from(name)]);
                if let Ok(joined) = self.group.join(consumer, name, credit_tokens, &self.pick(&held), self.now_ms) {
                    self.holders.extend(joined.held.into_iter().map(|unit| (unit, consumer)));
                }
            }
            Op::Leave { consumer } => {
                let decisions = self.group.leave(ConsumerId(consumer), self.now_ms);
                self.decide(decisions);
            }
            Op::Credit { consumer, credit_tokens } => self.group.set_credit(ConsumerId(consumer), credit_tokens),
            Op::Dispatch { max_units } => {
                self.drop_stale();
                self.dispatch(max_units);
            }
            Op::Version { policy, version } => {
                self.versions.push((policy, version));
                self.group.trainer_is_on(ConsumerId(0), policy, version);
            }
            Op::Ack { units, park } => self.ack(&self.pick(&units), park),
            Op::Nack { consumer, units, delay_ms } => {
                let units = self.pick(&units);
                let nacked = self.group.nack(ConsumerId(consumer), &units, delay_ms, self.now_ms);
                self.decide(nacked.decisions);
            }
            Op::Sign { consumer } => self.group.sign_of_life(ConsumerId(consumer), self.now_ms),
            Op::Tick { passes_ms } => {
                self.now_ms += passes_ms;
                let ticked = self.group.tick(self.now_ms);
                self.decide(ticked.decisions);
                assert!(self.group.next_deadline_ms().is_none_or(|deadline| deadline > self.now_ms));
            }
            Op::Durable { records } => self.make_durable(records),
            Op::Stale { unit } => {
                self.log.extend(self.names.get(unit).map(|u| Record::Drop(u.clone(), DropReason::Stale)))
            }
            Op::Release { unit } => self.log.extend(self.names.get(unit).map(|u| Record::Release(u.clone()))),
            Op::Forget { source } if !self.group.holds(&source) => self.log.push(Record::Forget(source)),
            Op::Forget { .. } => {}
            Op::Checkpoint => self.checkpoints.push((self.group.changed_at(), self.acknowledged.clone())),
            Op::Seek { checkpoint } if !self.group.definition().ephemeral => self.seek(checkpoint),
            Op::Seek { .. } => {}
        }
        self.forget_ended_leases();
        assert_eq!(self.group.check_invariants(), Ok(()));
    }

    fn push(&mut self, tokens: &[u64]) {
        let source = self.next_source;
        self.next_source += 1;
        let name = |(place, tokens): (usize, &u64)| id(&format!("{source}/{place}/{tokens}"));
        let new: Vec<UnitId> = tokens.iter().enumerate().map(name).collect();
        self.names.extend(new.iter().cloned());
        let unit = |id: UnitId| NewUnit {
            tokens: tokens_of(&id),
            rows: tokens_of(&id) % 3,
            family: tokens_of(&id) % 4,
            oldest_versions: versions_of(&id),
            id,
            payload: "rows",
        };
        let record = Record::Push(source, new.into_iter().map(unit).collect());
        self.apply(record);
    }

    fn ack(&mut self, units: &[UnitId], park: bool) {
        let judged = self.group.judge_acks(units);
        let good = judged.into_iter().filter(|(_, result)| *result == AckResult::Acknowledged);
        let good: Vec<UnitId> = good.map(|(unit, _)| unit).collect();
        if park {
            self.group.begin_acks(&good);
        }
        self.log.extend(good.into_iter().map(Record::Ack));
    }

    /// Everything still there goes out and is acknowledged; then nothing may be left.
    fn drain(&mut self) {
        self.make_durable(usize::MAX);
        let decisions = (0..4).flat_map(|c| self.group.leave(ConsumerId(c), self.now_ms)).collect();
        self.decide(decisions);
        self.make_durable(usize::MAX);
        self.now_ms += 10_000;
        assert!(self.group.join(ConsumerId(9), "last", u64::MAX, &[], self.now_ms).is_ok());
        loop {
            let out = self.group.dispatch(self.now_ms, 100);
            if out.is_empty() {
                break;
            }
            let units: Vec<UnitId> = out.into_iter().map(|delivery| delivery.unit).collect();
            self.ack(&units, true);
            self.make_durable(usize::MAX);
        }
        assert_eq!(self.group.check_invariants(), Ok(()));
    }
}

/// Which versions sampled it: of no policy, of one, or of two.
fn versions_of(unit: &UnitId) -> OldestVersions {
    let tokens = tokens_of(unit);
    let (a, b) = ((Arc::from("a"), tokens), (Arc::from("b"), tokens / 2));
    match tokens % 4 {
        0 => Box::default(),
        1 => Box::new([a]),
        2 => Box::new([b]),
        _ => Box::new([a, b]),
    }
}

/// The tokens stand in the name.
fn tokens_of(unit: &UnitId) -> u64 {
    unit.as_str().rsplit('/').next().and_then(|tokens| tokens.parse().ok()).unwrap_or(0)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 512, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn whatever_happens_units_are_with_one_consumer_and_end_once(
        ops in prop::collection::vec(ops(), 0..120), ephemeral in prop::bool::weighted(0.1),
    ) {
        let mut run = Run::new(ephemeral);
        for op in ops {
            run.step(op);
        }
        run.drain();
        let stats = run.group.stats(run.now_ms);
        let none = Tally::default();
        prop_assert_eq!((stats.waiting, stats.leased, stats.parked), (none, none, none), "nothing is left behind");
        let dropped: u64 = stats.dropped.values().map(|tally| tally.units).sum();
        prop_assert_eq!(stats.acknowledged.units + dropped, run.names.len() as u64, "each unit ended once");
        prop_assert!(run.group.units().all(|(_, place)| place.is_settled()));
        if !ephemeral {
            prop_assert_eq!(stats.acknowledged.units, run.acknowledged.len() as u64);
            let mut again = new_group(false);
            let replayed = run.durable.iter().enumerate();
            let effects: Vec<_> =
                replayed.flat_map(|(at, record)| apply(&mut again, &run.durable[..at], record.clone())).collect();
            prop_assert_eq!(effects, run.effects, "a replay has the same effects");
            let replayed = again.stats(0);
            prop_assert_eq!(replayed.pushed, stats.pushed);
            prop_assert_eq!(replayed.acknowledged, stats.acknowledged);
            prop_assert_eq!(replayed.dropped, stats.dropped);
            prop_assert_eq!(run.names.iter().map(|u| again.place(u)).collect::<Vec<_>>(),
                run.names.iter().map(|u| run.group.place(u)).collect::<Vec<_>>());
        }
    }
}
