//! Steps of a consumer group, for data-parallel ranks: units that were frozen together, and are acknowledged together.
//!
//! A group that takes steps has units like any other, which wait for their step. That some of them are frozen as the next step is a
//! record before anything of it goes out; from then on they stand in that step for ever, through restarts and seeks, and settle
//! together: when each shard of the step was acknowledged, or when it is dropped whole. How it is cut follows from its rows (`cut`), and
//! is worked out when it is needed. Whether a step is open is what its units say; only whose turn each shard is, is kept here.
//!
//! A log that begins in the middle may say of a step before its units are known, or when some are gone. Such a step waits for them,
//! and is given out only whole.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use crate::limits;

use super::consumers::UnitNumber;
use super::cut::{Cut, CutVersion};
use super::group::ConsumerGroup;
use super::unit::{ConsumerId, DropReason, ParkedFor, Place, UnitId};

/// A step that was frozen, as its record says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FrozenStep {
    /// Counts the steps of its consumer group, from 0.
    pub index: u64,
    /// By which rule it is cut.
    pub version: CutVersion,
    /// Its units, in order.
    pub members: Vec<UnitId>,
    /// Shards that were acknowledged by then; none but where it is said once more.
    pub acknowledged_shards: Vec<u32>,
}

/// Where a shard of an open step stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ShardPlace {
    /// To be given out.
    Waiting,
    /// Handed back for a while.
    Delayed {
        /// Until then.
        until_ms: u64,
    },
    /// With a consumer.
    Leased {
        /// Who has it.
        consumer: ConsumerId,
        /// Since when.
        since_ms: u64,
    },
    /// The record of its acknowledgement is on its way to the log.
    Acknowledging,
    /// Acknowledged; the step is when all are.
    Acknowledged,
}

impl ShardPlace {
    pub(super) fn is_acknowledged(self) -> bool {
        match self {
            Self::Acknowledging | Self::Acknowledged => true,
            Self::Waiting | Self::Delayed { .. } | Self::Leased { .. } => false,
        }
    }
}

#[derive(Debug, Clone, Copy)]
pub(super) struct Shard {
    pub(super) place: ShardPlace,
    /// How often it was given out since its step was frozen, released or sought back.
    pub(super) deliveries: u32,
}

const UNTOUCHED: Shard = Shard { place: ShardPlace::Waiting, deliveries: 0 };

/// How many of a step's units stand where; all others are not known, or on their way somewhere.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Standing {
    pub(super) known: usize,
    pub(super) frozen: usize,
    pub(super) acknowledged: usize,
    pub(super) undeliverable: usize,
}

impl Standing {
    fn count(&mut self, place: Place) -> Option<&mut usize> {
        match place {
            Place::Frozen { .. } => Some(&mut self.frozen),
            Place::Acknowledged => Some(&mut self.acknowledged),
            Place::Dropped(DropReason::Undeliverable) => Some(&mut self.undeliverable),
            Place::Waiting | Place::Delayed { .. } | Place::Leased { .. } | Place::Parked(_) | Place::Dropped(_) => {
                None
            }
        }
    }

    pub(super) fn enter(&mut self, place: Place) {
        self.count(place).into_iter().for_each(|count| *count += 1);
    }

    fn leave(&mut self, place: Place) {
        self.count(place).into_iter().for_each(|count| *count -= 1);
    }
}

#[derive(Debug, Clone)]
pub(super) struct Step {
    pub(super) id: UnitId,
    pub(super) version: CutVersion,
    pub(super) members: Vec<UnitId>,
    pub(super) standing: Standing,
    /// None any more, once it was acknowledged.
    pub(super) shards: Vec<Shard>,
    /// How many of its shards are with consumers.
    pub(super) leased: usize,
    /// Kept while it is open, once it was worked out.
    pub(super) cut: Option<Arc<Cut>>,
    /// Where it was said last what it is.
    said_at: u64,
}

impl Step {
    /// All of its units are there and frozen: its shards can be given out.
    pub(super) fn is_open(&self) -> bool {
        self.standing.frozen == self.members.len()
    }

    /// All of its units are there and acknowledged.
    pub(super) fn is_acknowledged(&self) -> bool {
        self.standing.acknowledged == self.members.len()
    }

    /// Those of its units that are there are acknowledged.
    pub(super) fn has_settled(&self) -> bool {
        self.standing.known > 0 && self.standing.acknowledged == self.standing.known
    }

    pub(super) fn all_shards_acknowledged(&self) -> bool {
        self.shards.iter().all(|shard| shard.place == ShardPlace::Acknowledged)
    }

    /// Tokens of a shard; 0 until it is cut.
    pub(super) fn tokens(&self, shard: u32) -> u64 {
        let cut = self.cut.as_ref().and_then(|cut| cut.shards.get(shard as usize));
        cut.map_or(0, |shard| shard.tokens)
    }
}

/// All steps of one group that are remembered.
#[derive(Debug, Clone, Default)]
pub(super) struct Steps {
    pub(super) by_index: BTreeMap<u64, Step>,
    pub(super) by_id: BTreeMap<UnitId, u64>,
    /// Those whose shards can be given out.
    pub(super) open: BTreeSet<u64>,
    /// (until when, which step, which shard)
    pub(super) delayed: BTreeSet<(u64, u64, u32)>,
    /// In replay: units of steps that are not known yet.
    awaited: BTreeMap<UnitId, u64>,
    next_index: u64,
    /// The record of this step is on its way to the log.
    pub(super) freezing: Option<u64>,
}

impl Steps {
    /// A unit of a step has changed its place.
    pub(super) fn member_moved(&mut self, index: u64, from: Place, to: Place) {
        if let Some(step) = self.by_index.get_mut(&index) {
            step.standing.leave(from);
            step.standing.enter(to);
        }
        self.note_open(index);
    }

    /// A settled unit of a step is not remembered any more, and with the last one the step is not.
    pub(super) fn member_forgotten(&mut self, index: u64, place: Place) {
        let Some(step) = self.by_index.get_mut(&index) else { return };
        step.standing.leave(place);
        step.standing.known -= 1;
        if step.standing.known == 0 && !step.members.iter().any(|member| self.awaited.contains_key(member)) {
            self.remove(index);
        }
    }

    fn remove(&mut self, index: u64) {
        if let Some(step) = self.by_index.remove(&index) {
            self.by_id.remove(&step.id);
        }
        self.open.remove(&index);
        self.delayed.retain(|(_, step, _)| *step != index);
    }

    fn note_open(&mut self, index: u64) {
        match self.by_index.get(&index).is_some_and(Step::is_open) {
            true => drop(self.open.insert(index)),
            false => drop(self.open.remove(&index)),
        }
    }

    /// Those of which some units are there, and not all.
    pub(super) fn in_part(&self) -> impl Iterator<Item = &Step> {
        self.by_index.values().filter(|step| step.standing.known > 0 && step.standing.known < step.members.len())
    }

    /// Which shard of which remembered step has this id.
    pub(super) fn shard_of(&self, id: &UnitId, shards: u32) -> Option<(u64, u32)> {
        let (step, shard) = id.as_str().rsplit_once('/')?;
        let index = *self.by_id.get(&UnitId::from(step))?;
        let shard: u32 = shard.parse().ok()?;
        // One text for each number.
        let is_plain = id.as_str().len() == step.len() + 1 + shard.to_string().len();
        (is_plain && shard < shards).then_some((index, shard))
    }

    pub(super) fn shard(&self, (index, shard): (u64, u32)) -> Option<Shard> {
        let step = self.by_index.get(&index)?;
        let acknowledged = Shard { place: ShardPlace::Acknowledged, deliveries: 0 };
        if step.shards.is_empty() { Some(acknowledged) } else { step.shards.get(shard as usize).copied() }
    }
}

/// The id of a shard.
pub(super) fn shard_id(step: &UnitId, shard: u32) -> UnitId {
    UnitId::new(format!("{step}/{shard}"))
}

impl<K: Ord + Clone, P: Clone> ConsumerGroup<K, P> {
    /// Whether its units go out in steps.
    #[must_use]
    pub fn takes_steps(&self) -> bool {
        self.definition.step.is_some()
    }

    fn shard_count(&self) -> u32 {
        self.definition.step.map_or(0, |step| step.shards)
    }

    /// Which shard of which remembered step has this id.
    pub(super) fn shard_of(&self, id: &UnitId) -> Option<(u64, u32)> {
        self.steps.shard_of(id, self.shard_count())
    }

    pub(super) fn untouched_shards(&self) -> Vec<Shard> {
        vec![UNTOUCHED; self.shard_count() as usize]
    }

    /// The units of the next step, oldest first, if that is full: as many as the group counts, or as many as a step may have rows of.
    fn full_step(&self) -> Option<Vec<UnitNumber>> {
        let units = self.definition.step?.units as usize;
        let waiting = &self.ledger.waiting;
        if waiting.len() < units && self.ledger.counts.waiting.rows <= limits::STEP_ROWS_MAX {
            return None;
        }
        let (mut members, mut rows) = (Vec::new(), 0);
        for number in waiting {
            rows += self.ledger.units.get(number).map_or(0, |unit| unit.rows);
            if rows > limits::STEP_ROWS_MAX && !members.is_empty() {
                return Some(members);
            }
            members.push(*number);
            if members.len() == units {
                return Some(members);
            }
        }
        None
    }

    /// Parks the units of the next step, if somebody would take a shard of it now. The record must come.
    pub fn begin_freeze(&mut self) -> Option<FrozenStep> {
        if !self.wants_step() {
            return None;
        }
        let numbers = self.full_step()?;
        let index = self.steps.next_index;
        self.steps.next_index += 1;
        self.steps.freezing = Some(index);
        let mut members = Vec::with_capacity(numbers.len());
        for number in numbers {
            members.extend(self.ledger.units.get(&number).map(|unit| unit.id.clone()));
            self.relocate(number, Place::Parked(ParkedFor::Step));
        }
        self.verify();
        Some(FrozenStep { index, version: CutVersion::default(), members, acknowledged_shards: Vec::new() })
    }

    /// A step of this id was frozen at this moment, or that is said once more; what is known already stands.
    pub fn apply_frozen(&mut self, id: UnitId, frozen: FrozenStep, at: u64) {
        let FrozenStep { index, version, members, acknowledged_shards } = frozen;
        let mut shards = self.untouched_shards();
        let steps = &mut self.steps;
        steps.next_index = steps.next_index.max(index + 1);
        if steps.freezing == Some(index) {
            steps.freezing = None;
        }
        if let Some(known) = steps.by_index.get_mut(&index) {
            known.said_at = known.said_at.max(at);
            return;
        }
        for shard in acknowledged_shards {
            if let Some(shard) = shards.get_mut(shard as usize) {
                shard.place = ShardPlace::Acknowledged;
            }
        }
        let (standing, leased, cut) = (Standing::default(), 0, None);
        let step =
            Step { id: id.clone(), version, members: members.clone(), standing, shards, leased, cut, said_at: at };
        steps.by_index.insert(index, step);
        steps.by_id.insert(id, index);
        for member in members {
            match self.ledger.numbers.get(&member).copied() {
                Some(number) => self.stands_in(number, index),
                None => drop(self.steps.awaited.insert(member, index)),
            }
        }
        self.verify();
    }

    /// A unit stands in a step from now on.
    fn stands_in(&mut self, number: UnitNumber, index: u64) {
        let Some(unit) = self.ledger.units.get_mut(&number) else { return };
        unit.step = Some(index);
        let place = unit.place;
        if let Some(step) = self.steps.by_index.get_mut(&index) {
            // What was acknowledged of it before is known from its units now.
            let shards = UnitId::new(format!("{}/", step.id.as_str()));
            let behind = self.unknown_acks.range(shards.clone()..).map(|(id, _)| id.clone());
            let known: Vec<_> = behind.take_while(|id| id.as_str().starts_with(shards.as_str())).collect();
            for id in known {
                self.unknown_acks.remove(&id);
            }
            step.standing.known += 1;
            step.standing.enter(place);
        }
        if !place.is_settled() {
            self.relocate(number, Place::Frozen { is_out: false });
        }
        self.steps.note_open(index);
    }

    /// A unit was pushed: a step may have waited for it.
    pub(super) fn joins_its_step(&mut self, number: UnitNumber) {
        let id = self.ledger.units.get(&number).map(|unit| &unit.id);
        if let Some(index) = id.and_then(|id| self.steps.awaited.remove(id)) {
            self.stands_in(number, index);
        }
    }

    /// All was read: units that have not come by now never will.
    pub(super) fn steps_are_read(&mut self) {
        self.steps.awaited.clear();
        let gone = self.steps.by_index.iter().filter(|(_, step)| step.standing.known == 0).map(|(index, _)| *index);
        gone.collect::<Vec<_>>().into_iter().for_each(|index| self.steps.remove(index));
        self.verify();
    }

    /// So many steps were frozen before it was made again, at least.
    pub fn restore_steps(&mut self, next_index: u64) {
        self.steps.next_index = self.steps.next_index.max(next_index);
    }

    /// How many steps were frozen, ever; one whose record is on its way counts.
    #[must_use]
    pub fn next_step_index(&self) -> u64 {
        self.steps.next_index
    }

    /// The step that a unit stands in, as it is to be said once more before a copy of the unit, if it was not said since then; notes
    /// that it is.
    pub fn say_step_again(&mut self, unit: &UnitId, since: u64, at: u64) -> Option<FrozenStep> {
        let index = self.ledger.find(unit)?.1.step?;
        let step = self.steps.by_index.get_mut(&index).filter(|step| step.said_at <= since)?;
        step.said_at = at;
        let acknowledged = step.shards.iter().enumerate().filter(|(_, shard)| shard.place == ShardPlace::Acknowledged);
        Some(FrozenStep {
            index,
            version: step.version,
            members: step.members.clone(),
            acknowledged_shards: acknowledged.filter_map(|(shard, _)| u32::try_from(shard).ok()).collect(),
        })
    }

    /// Whether a record about the step of this unit is on its way, after which it would not be what is said of it.
    #[must_use]
    pub fn is_step_underway(&self, unit: &UnitId) -> bool {
        let step = self.ledger.find(unit).and_then(|(_, unit)| self.steps.by_index.get(&unit.step?));
        step.is_some_and(|step| step.shards.iter().any(|shard| shard.place == ShardPlace::Acknowledging))
    }

    /// The units of a step, in order, each with the first of its rollouts and its rows, if those are kept; none if not all are there.
    #[must_use]
    pub fn step_members(&self, index: u64) -> Option<Vec<(&UnitId, &K, Option<&P>)>> {
        let step = self.steps.by_index.get(&index)?;
        let member = |id| self.ledger.find(id).map(|(_, unit)| (&unit.id, &unit.source, unit.payload.as_ref()));
        step.members.iter().map(member).collect()
    }

    /// By which rule a step is cut, and how it was, if that is kept.
    #[must_use]
    pub fn step_cut(&self, index: u64) -> Option<(CutVersion, Option<Arc<Cut>>)> {
        self.steps.by_index.get(&index).map(|step| (step.version, step.cut.clone()))
    }

    /// Keeps how an open step is cut.
    pub fn set_step_cut(&mut self, index: u64, cut: Arc<Cut>) {
        if let Some(step) = self.steps.by_index.get_mut(&index).filter(|step| step.is_open()) {
            step.cut.get_or_insert(cut);
        }
    }
}
