//! Steps under random operations: what is given out is the same each time, and records alone give the same state again, from the
//! beginning of a log and from a snapshot in its middle.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use proptest::prelude::*;
use proptest::sample::select;
use proptest::test_runner::FileFailurePersistence;

use super::*;

const SHARDS: u32 = 3;
const CONSUMERS: u64 = 5;

#[derive(Debug, Clone)]
enum Op {
    Push {
        units: Vec<Vec<u64>>,
    },
    Join {
        consumer: u64,
        shard: u32,
        credit_tokens: u64,
        held: Vec<usize>,
        step_index: Option<u64>,
    },
    Leave {
        consumer: u64,
    },
    Dispatch,
    Ack {
        shards: Vec<usize>,
        park: bool,
    },
    Nack {
        consumer: u64,
        shards: Vec<usize>,
        delay_ms: Option<u64>,
    },
    Sign {
        consumer: u64,
    },
    Tick {
        passes_ms: u64,
    },
    Durable {
        records: usize,
    },
    Release {
        for_good: bool,
    },
    Forget {
        source: u64,
    },
    Checkpoint,
    Seek {
        checkpoint: usize,
    },
    /// A segment of the log begins.
    Snapshot,
    /// What lives is written forward, as far as it can be.
    Copy {
        every: u64,
    },
}

/// What is a record in the log: a replay sees these and nothing else.
#[derive(Debug, Clone)]
enum Record {
    Push(u64, Vec<NewUnit<&'static str>>),
    Frozen(FrozenStep),
    Ack(UnitId),
    Drop(UnitId, DropReason),
    Release(UnitId),
    Forget(u64),
    Seek(u64),
    /// How many steps there were, and how often it was sought.
    Snapshot(u64, u64),
    /// What was counted when the snapshot was durable.
    Totals(u64, u64, Option<(u64, u64)>),
    Copy(u64, Vec<(NewUnit<&'static str>, Place, Vec<u64>)>),
}

fn ops() -> impl Strategy<Value = Op> {
    let consumer = || 0..CONSUMERS;
    let some = || prop::collection::vec(0usize..24, 0..4);
    let units = prop::collection::vec(prop::collection::vec(1u64..12, 1..4), 0..3);
    prop_oneof![
        6 => units.prop_map(|units| Op::Push { units }),
        4 => (consumer(), 0..SHARDS, 1u64..60, some(), prop::option::of(0u64..6)).prop_map(
            |(consumer, shard, credit_tokens, held, step_index)| {
                Op::Join { consumer, shard, credit_tokens, held, step_index }
            }
        ),
        1 => consumer().prop_map(|consumer| Op::Leave { consumer }),
        8 => Just(Op::Dispatch),
        8 => (some(), any::<bool>()).prop_map(|(shards, park)| Op::Ack { shards, park }),
        2 => (consumer(), some(), prop::option::of(0u64..900))
            .prop_map(|(consumer, shards, delay_ms)| Op::Nack { consumer, shards, delay_ms }),
        2 => consumer().prop_map(|consumer| Op::Sign { consumer }),
        2 => (0u64..800).prop_map(|passes_ms| Op::Tick { passes_ms }),
        8 => (1usize..6).prop_map(|records| Op::Durable { records }),
        1 => any::<bool>().prop_map(|for_good| Op::Release { for_good }),
        2 => (0u64..12).prop_map(|source| Op::Forget { source }),
        2 => Just(Op::Checkpoint),
        1 => (0usize..6).prop_map(|checkpoint| Op::Seek { checkpoint }),
        2 => Just(Op::Snapshot),
        3 => select(&[1, 2, 3]).prop_map(|every| Op::Copy { every }),
    ]
}

fn new_group() -> Group {
    let step = StepDefinition { units: 2, shards: SHARDS, microbatch_tokens: 20 };
    let definition = GroupDefinition { unit: UnitKind::Rollout, step: Some(step), max_deliveries: 2, ..definition() };
    ConsumerGroup::new(definition, bounds(), 0, 0)
}

fn step_of(index: u64) -> UnitId {
    UnitId::new(format!("run///ranks/0/{index}"))
}

struct Run {
    group: Group,
    now_ms: u64,
    /// Of each unit its rows' tokens.
    rows: BTreeMap<UnitId, Vec<u64>>,
    sources: u64,
    /// Where the records of each remembered source begin.
    homes: BTreeMap<u64, u64>,
    /// What is on its way, and what is applied.
    underway: VecDeque<(u64, Record)>,
    log: Vec<(u64, Record)>,
    position: u64,
    begun: u64,
    checkpoints: Vec<u64>,
    /// How each shard went out first.
    given: BTreeMap<(u64, u32), (UnitId, u64, Arc<Cut>)>,
    members: BTreeMap<UnitId, u64>,
}

impl Run {
    fn new() -> Self {
        Self {
            group: new_group(),
            now_ms: 0,
            rows: BTreeMap::new(),
            sources: 0,
            homes: BTreeMap::new(),
            underway: VecDeque::new(),
            log: Vec::new(),
            position: 0,
            begun: 0,
            checkpoints: vec![0],
            given: BTreeMap::new(),
            members: BTreeMap::new(),
        }
    }

    fn append(&mut self, record: Record) -> u64 {
        self.position += 1;
        self.underway.push_back((self.position, record));
        self.position
    }

    fn durable(&mut self, records: usize) {
        for _ in 0..records {
            let Some((position, record)) = self.underway.pop_front() else { return };
            apply(&mut self.group, position, &record, false);
            if let Record::Snapshot(..) = record {
                let group = &self.group;
                let totals = Record::Totals(group.forgotten_through(), group.changed_at(), group.blurred());
                self.append(totals);
            }
            self.log.push((position, record));
        }
    }

    /// Every shard of every step that was given out, by a number.
    fn pick(&self, shards: &[usize]) -> Vec<UnitId> {
        let all: Vec<_> = self.given.values().map(|(unit, ..)| unit.clone()).collect();
        shards.iter().rev().filter_map(|at| all.iter().rev().nth(*at)).cloned().collect()
    }

    fn cut(&mut self, index: u64) {
        let Some(definition) = self.group.definition().step else { panic!("it takes steps") };
        let Some((version, _)) = self.group.step_cut(index) else { panic!("there is such a step") };
        let Some(members) = self.group.step_members(index) else { panic!("an open step is whole") };
        let size = |tokens: &u64| RowSize { tokens: *tokens, trained_tokens: 0 };
        let sizes: Vec<Vec<RowSize>> =
            members.iter().map(|(id, ..)| self.rows[*id].iter().map(size).collect()).collect();
        self.group.set_step_cut(index, Arc::new(cut(version, &sizes, &definition)));
    }

    fn went(&mut self, delivery: ShardDelivery) {
        let Some((_, Some(made))) = self.group.step_cut(delivery.index) else { return };
        let now = (delivery.unit.clone(), delivery.tokens, made);
        let first = self.given.entry((delivery.index, delivery.shard)).or_insert_with(|| now.clone());
        assert_eq!(*first, now, "the same each time");
    }

    fn dispatch(&mut self) {
        while let Some(index) = self.group.step_to_cut() {
            self.cut(index);
        }
        for delivery in self.group.dispatch_shards(self.now_ms, usize::MAX) {
            let (index, shard) = (delivery.index, delivery.shard);
            self.went(delivery);
            let mut earlier = self.group.open_steps().into_iter().filter(|open| open.index < index);
            let is_out = |open: OpenStep| self.given.contains_key(&(open.index, shard));
            assert!(earlier.all(is_out), "step {index} overtakes an earlier one at shard {shard}");
        }
        if let Some(step) = self.group.begin_freeze() {
            assert_eq!(step.members.len(), 2);
            for member in &step.members {
                assert_eq!(self.members.insert(member.clone(), step.index), None, "a unit is in one step");
            }
            self.append(Record::Frozen(step));
        }
    }

    fn decide(&mut self, decisions: Vec<Decision>) {
        for decision in decisions {
            let Decision::DropUndeliverable { unit } = decision else { panic!("nothing is stale") };
            self.append(Record::Drop(unit, DropReason::Undeliverable));
        }
    }

    fn push(&mut self, units: Vec<Vec<u64>>) {
        let source = self.sources;
        self.sources += 1;
        let new = units.into_iter().enumerate().map(|(at, rows)| {
            let id = UnitId::new(format!("run/{source}/{at}"));
            let (tokens, count) = (rows.iter().sum(), rows.len() as u64);
            self.rows.insert(id.clone(), rows);
            let (family, oldest_versions, payload) = (0, Box::default(), "rows");
            NewUnit { id, tokens, rows: count, family, oldest_versions, payload }
        });
        let new = new.collect();
        let home = self.append(Record::Push(source, new));
        self.homes.insert(source, home);
    }

    fn join(&mut self, consumer: u64, shard: u32, credit_tokens: u64, held: &[usize], step_index: Option<u64>) {
        let held = self.pick(held);
        for id in &held {
            self.group.step_to_cut_for(id).into_iter().for_each(|index| self.cut(index));
        }
        let id = ConsumerId(consumer);
        let name = format!("rank-{consumer}");
        if self.group.join_for(id, (&name, Some(shard)), credit_tokens, &held, self.now_ms).is_err() {
            return;
        }
        if let Some(index) = step_index.filter(|index| self.group.judge_refetch(*index).is_ok()) {
            self.cut(index);
            let delivery = self.group.refetch((index, shard), id, self.now_ms);
            assert!(delivery.is_some(), "it may be fetched");
            delivery.into_iter().for_each(|delivery| self.went(delivery));
        }
    }

    fn forget(&mut self, source: u64) {
        self.durable(usize::MAX);
        let is_over = self.group.knows(&source) && !self.group.holds(&source) && !self.group.has_undeliverable(&source);
        if is_over {
            self.homes.remove(&source);
            self.append(Record::Forget(source));
            self.durable(usize::MAX);
        }
    }

    fn copy(&mut self, every: u64) {
        let sources: Vec<u64> = self.homes.keys().copied().filter(|source| source % every == 0).collect();
        for source in sources {
            let Some(units) = self.group.units_of(&source) else { continue };
            let units: Vec<(UnitId, Place)> = units.map(|(id, place)| (id.clone(), place)).collect();
            let waits = |(id, place): &(UnitId, Place)| {
                matches!(place, Place::Parked(_))
                    || (matches!(place, Place::Frozen { .. }) && self.group.is_step_underway(id))
            };
            if units.iter().any(waits) {
                continue;
            }
            for (id, _) in &units {
                if let Some(step) = self.group.say_step_again(id, self.begun, self.position + 1) {
                    self.append(Record::Frozen(step));
                }
            }
            let copied = units.into_iter().map(|(id, place)| {
                let moments = self.group.history(&id).map(History::moments).unwrap_or_default();
                let (tokens, rows) = (self.rows[&id].iter().sum(), self.rows[&id].len() as u64);
                let (family, oldest_versions, payload) = (0, Box::default(), "rows");
                (NewUnit { id, tokens, rows, family, oldest_versions, payload }, place, moments)
            });
            let copied = copied.collect();
            let home = self.append(Record::Copy(source, copied));
            self.homes.insert(source, home);
        }
    }

    fn step(&mut self, op: Op) {
        match op {
            Op::Push { units } => self.push(units),
            Op::Join { consumer, shard, credit_tokens, held, step_index } => {
                self.join(consumer, shard, credit_tokens, &held, step_index);
            }
            Op::Leave { consumer } => {
                let decisions = self.group.leave(ConsumerId(consumer), self.now_ms);
                self.decide(decisions);
            }
            Op::Dispatch => self.dispatch(),
            Op::Ack { shards, park } => {
                let judged = self.group.judge_acks(&self.pick(&shards));
                let is_good = |result| matches!(result, AckResult::Acknowledged | AckResult::ShardAcknowledged);
                let good: Vec<UnitId> =
                    judged.into_iter().filter(|(_, result)| is_good(*result)).map(|(unit, _)| unit).collect();
                if park {
                    self.group.begin_acks(&good);
                }
                for unit in good {
                    self.append(Record::Ack(unit));
                }
                if !park {
                    // What is not said to be on its way must be there before anything else is decided.
                    self.durable(usize::MAX);
                }
            }
            Op::Nack { consumer, shards, delay_ms } => {
                let nacked = self.group.nack(ConsumerId(consumer), &self.pick(&shards), delay_ms, self.now_ms);
                self.decide(nacked.decisions);
            }
            Op::Sign { consumer } => self.group.sign_of_life(ConsumerId(consumer), self.now_ms),
            Op::Tick { passes_ms } => {
                self.now_ms += passes_ms;
                let ticked = self.group.tick(self.now_ms);
                self.decide(ticked.decisions);
            }
            Op::Durable { records } => self.durable(records),
            Op::Release { for_good } => {
                let step = self.group.undeliverable_steps().next().cloned();
                if let Some(step) = step.filter(|step| self.group.judge_release(step) == ReleaseResult::Released) {
                    let drop = Record::Drop(step.clone(), DropReason::Operator);
                    self.append(if for_good { drop } else { Record::Release(step) });
                    self.durable(usize::MAX);
                }
            }
            Op::Forget { source } => self.forget(source),
            Op::Checkpoint => self.checkpoints.push(self.group.changed_at()),
            Op::Seek { checkpoint } => {
                self.durable(usize::MAX);
                let to = self.checkpoints[checkpoint % self.checkpoints.len()];
                if self.group.judge_seek(to).is_ok() {
                    self.group.release_all(self.now_ms);
                    self.append(Record::Seek(to));
                    self.durable(usize::MAX);
                }
            }
            Op::Snapshot => {
                let snapshot = Record::Snapshot(self.group.next_step_index(), self.group.seek_count());
                self.begun = self.append(snapshot);
            }
            Op::Copy { every } => self.copy(every),
        }
        assert_eq!(self.group.check_invariants(), Ok(()));
    }
}

/// Applies a record, live or in replay.
fn apply(group: &mut Group, position: u64, record: &Record, is_replay: bool) {
    let again = |source: &u64, units: &BTreeMap<u64, Vec<NewUnit<&'static str>>>| units.get(source).cloned();
    match record {
        Record::Push(source, units) => drop(group.push(*source, units.clone(), 0)),
        Record::Frozen(step) => group.apply_frozen(step_of(step.index), step.clone(), position),
        Record::Ack(unit) if is_replay => drop(group.replay_ack(unit, position)),
        Record::Ack(unit) => drop(group.apply_ack(unit, position)),
        Record::Drop(unit, reason) => drop(group.apply_drop(unit, *reason)),
        Record::Release(unit) => drop(group.apply_release(unit)),
        Record::Forget(source) => drop(group.forget_source(source)),
        Record::Seek(to) => {
            let units = group.sources().copied().collect::<Vec<_>>().into_iter().map(|source| {
                let units = group.units_of(&source).into_iter().flatten();
                let new = units.map(|(id, _)| NewUnit {
                    id: id.clone(),
                    tokens: 0,
                    rows: 0,
                    family: 0,
                    oldest_versions: Box::default(),
                    payload: "rows",
                });
                (source, new.collect())
            });
            let units: BTreeMap<u64, Vec<_>> = units.collect();
            group.apply_seek(*to, position, |source| again(source, &units).unwrap_or_default(), 0);
        }
        Record::Snapshot(next_step_index, seek_count) if is_replay => {
            group.restore_seeks(*seek_count, 0, 0, None);
            group.restore_steps(*next_step_index);
        }
        Record::Totals(forgotten_through, changed_at, blurred) if is_replay => {
            group.restore_seeks(0, *forgotten_through, *changed_at, *blurred);
        }
        Record::Copy(source, units) if is_replay && !group.knows(source) => {
            group.push(*source, units.iter().map(|(unit, ..)| unit.clone()).collect(), 0);
            for (unit, place, moments) in units {
                group.restore_history(&unit.id, History::of_moments(moments));
                match place {
                    Place::Acknowledged => drop(group.restore_ack(&unit.id)),
                    Place::Dropped(reason) => drop(group.apply_drop(&unit.id, *reason)),
                    Place::Waiting
                    | Place::Delayed { .. }
                    | Place::Leased { .. }
                    | Place::Frozen { .. }
                    | Place::Parked(_) => {}
                }
            }
        }
        Record::Snapshot(..) | Record::Totals(..) | Record::Copy(..) => {}
    }
    assert_eq!(group.check_invariants(), Ok(()));
}

/// Where everything stands, as far as records go.
fn image(group: &Group) -> impl PartialEq + std::fmt::Debug {
    let place = |place| match place {
        Place::Acknowledged => "acknowledged".to_owned(),
        Place::Dropped(reason) => format!("{reason:?}"),
        Place::Waiting | Place::Delayed { .. } | Place::Leased { .. } | Place::Frozen { .. } | Place::Parked(_) => {
            "due".to_owned()
        }
    };
    let units: Vec<_> = group.units().map(|(id, at)| (id.clone(), place(at))).collect();
    let histories: Vec<_> = group.units().map(|(id, _)| group.history(id).map(History::moments)).collect();
    let open: Vec<_> = group.open_steps().into_iter().map(|step| (step.index, step.missing_shards)).collect();
    let undeliverable: Vec<_> = group.undeliverable_steps().cloned().collect();
    let fetched: Vec<_> = (0..group.next_step_index()).map(|index| group.judge_refetch(index)).collect();
    let moments = (group.changed_at(), group.forgotten_through(), group.seek_count());
    (units, histories, open, undeliverable, fetched, moments, group.next_step_index())
}

fn replayed<'a>(records: impl Iterator<Item = &'a (u64, Record)>) -> Group {
    let mut group = new_group();
    records.for_each(|(position, record)| apply(&mut group, *position, record, true));
    group.all_is_read();
    assert_eq!(group.check_invariants(), Ok(()));
    group
}

/// What failed once is kept.
fn config() -> ProptestConfig {
    let kept = FileFailurePersistence::Direct("src/queue/tests/regressions.txt");
    ProptestConfig { cases: 512, failure_persistence: Some(Box::new(kept)), ..ProptestConfig::default() }
}

proptest! {
    #![proptest_config(config())]

    #[test]
    fn steps_stand_through_anything(ops in prop::collection::vec(ops(), 1..140)) {
        let mut run = Run::new();
        for op in ops {
            run.step(op);
        }
        run.durable(usize::MAX);
        let all = image(&run.group);
        prop_assert_eq!(format!("{:?}", image(&replayed(run.log.iter()))), format!("{all:?}"), "from the beginning");
        // The log may begin with any snapshot before which nothing that lives stands.
        let first_home = run.homes.values().min().copied().unwrap_or(u64::MAX);
        let begins = run.log.iter().enumerate().filter(|(_, (position, record))| {
            matches!(record, Record::Snapshot(..)) && *position < first_home
        });
        for (at, _) in begins {
            let from_there = replayed(run.log[at..].iter());
            prop_assert_eq!(format!("{:?}", image(&from_there)), format!("{all:?}"), "from snapshot {}", at);
        }
    }
}
