//! One consumer group: what is pushed to it, and how units settle. Its consumers' side is in `lease`.

use std::collections::{BTreeMap, BTreeSet};

use super::consumers::{Consumers, UnitNumber};
use super::definition::{GroupDefinition, QueueBounds};
use super::effect::{AckResult, QueueEffect, ReleaseResult};
use super::ledger::{Ledger, SettledSum, Source};
use super::staleness::TrainerVersions;
use super::steps::{ShardPlace, Steps};
use super::unit::{DropReason, NewUnit, ParkedFor, Place, UnitId, UnitKind};

/// One consumer group. `K` identifies a rollout, `P` is the handle to a unit's rows.
#[derive(Debug, Clone)]
pub struct ConsumerGroup<K, P> {
    pub(super) definition: GroupDefinition,
    pub(super) bounds: QueueBounds,
    pub(super) ledger: Ledger<K, P>,
    pub(super) consumers: Consumers,
    pub(super) steps: Steps,
    pub(super) trainer_versions: TrainerVersions,
    /// Since when it has had no consumer.
    pub(super) idle_since_ms: Option<u64>,
    pub(super) made_at: u64,
    /// The last acknowledgement or seek.
    pub(super) changed_at: u64,
    pub(super) seek_count: u64,
    /// In replay: what was acknowledged, at which moment, whose unit is not known.
    pub(super) unknown_acks: BTreeMap<UnitId, u64>,
    /// Until when units of before a restart are only for those who say that they hold them.
    pub(super) grace_until_ms: u64,
}

impl<K: Ord + Clone, P: Clone> ConsumerGroup<K, P> {
    /// A group without units and consumers, made at this moment.
    #[must_use]
    pub fn new(definition: GroupDefinition, bounds: QueueBounds, made_at: u64, now_ms: u64) -> Self {
        Self {
            definition,
            bounds,
            ledger: Ledger::new(),
            consumers: Consumers::new(bounds.max_units_in_flight),
            steps: Steps::default(),
            trainer_versions: TrainerVersions::default(),
            idle_since_ms: Some(now_ms),
            made_at,
            changed_at: made_at,
            seek_count: 0,
            unknown_acks: BTreeMap::new(),
            grace_until_ms: 0,
        }
    }

    /// What it was made as.
    #[must_use]
    pub fn definition(&self) -> &GroupDefinition {
        &self.definition
    }

    /// Since when it has had no consumer; `None` while it has one.
    #[must_use]
    pub fn idle_since_ms(&self) -> Option<u64> {
        self.idle_since_ms
    }

    /// Takes the units of a finalised rollout, all at once and in order; there may be none, and then it is settled at
    /// once. A rollout that is known changes nothing; a unit whose id is known is not taken twice, but where units are groups: then
    /// it is the unit of the rollout's group, which has its rows too from now on, wherever it stands. In an ephemeral group
    /// every rollout is settled at once, and the oldest units make room for the newest.
    pub fn push(&mut self, source: K, units: Vec<NewUnit<P>>, now_ms: u64) -> Vec<QueueEffect<K>> {
        if self.ledger.sources.contains_key(&source) {
            return Vec::new();
        }
        let grows = self.definition.unit == UnitKind::Group;
        // Not collected: that would keep the room of the units themselves.
        let mut added: Vec<UnitNumber> = Vec::with_capacity(units.len());
        for unit in units {
            let grown = if grows { self.ledger.grow(&source, &unit) } else { None };
            let new = if grown.is_none() { self.ledger.add(&source, unit, now_ms) } else { None };
            added.extend(grown.or(new));
            new.into_iter().for_each(|number| self.is_known_now(number));
        }
        let is_settled =
            |number: &UnitNumber| self.ledger.units.get(number).is_some_and(|unit| unit.place.is_settled());
        let unsettled = added.iter().filter(|number| !is_settled(number)).count();
        let mut effects = Vec::new();
        if self.definition.ephemeral || unsettled == 0 {
            effects.push(QueueEffect::SourceSettled { source: source.clone() });
        }
        if self.definition.ephemeral {
            effects.extend(self.drop_overflow());
        } else {
            self.ledger.sources.insert(source, Source { units: added, unsettled });
        }
        self.verify();
        effects
    }

    fn drop_overflow(&mut self) -> Option<QueueEffect<K>> {
        let before = self.ledger.counts.waiting.tally;
        while self.ledger.waiting.len() > self.bounds.max_ephemeral_waiting_units {
            let Some(&oldest) = self.ledger.waiting.first() else {
                break;
            };
            self.relocate(oldest, Place::Dropped(DropReason::Overflow));
            self.ledger.forget(oldest);
        }
        let after = self.ledger.counts.waiting.tally;
        (before != after).then(|| QueueEffect::LineOverflowed {
            units: before.units - after.units,
            tokens: before.tokens - after.tokens,
        })
    }

    /// What acknowledgements of these units are worth, in the order asked; changes nothing. Who asks does not matter, nor
    /// whether the unit is out, waiting again, or with another consumer.
    #[must_use]
    pub fn judge_acks(&self, ids: &[UnitId]) -> Vec<(UnitId, AckResult)> {
        if self.takes_steps() {
            return self.judge_shard_acks(ids);
        }
        let mut seen = BTreeSet::new();
        let judge = |id: &UnitId| {
            let repeated = !seen.insert(id.clone());
            let result = self.judge_ack(id);
            let counted = repeated && result == AckResult::Acknowledged;
            (id.clone(), if counted { AckResult::Already } else { result })
        };
        ids.iter().map(judge).collect()
    }

    fn judge_ack(&self, id: &UnitId) -> AckResult {
        if self.definition.ephemeral {
            return AckResult::Unknown;
        }
        let Some((_, place)) = self.ledger.place_of(id) else {
            return AckResult::Unknown;
        };
        match place {
            Place::Acknowledged => AckResult::Already,
            // It was given out many times: that one of them was trained after all is the truth, and it counts.
            Place::Dropped(DropReason::Undeliverable) => AckResult::Acknowledged,
            Place::Dropped(reason) => AckResult::Dropped(reason),
            Place::Waiting | Place::Delayed { .. } | Place::Leased { .. } | Place::Frozen { .. } | Place::Parked(_) => {
                AckResult::Acknowledged
            }
        }
    }

    /// Parks units whose acknowledgement was judged good and is on its way to the log, so that nobody else is given them
    /// in the meantime. Gives their credit back. Optional: [`Self::apply_ack`] does not need it. The record must come.
    pub fn begin_acks(&mut self, ids: &[UnitId]) {
        if self.definition.ephemeral {
            return;
        }
        for id in ids {
            if self.takes_steps() {
                let at = self.shard_of(id);
                at.into_iter().for_each(|at| self.move_shard(at, ShardPlace::Acknowledging));
                continue;
            }
            match self.ledger.place_of(id) {
                Some((number, Place::Waiting | Place::Delayed { .. } | Place::Leased { .. })) => {
                    self.relocate(number, Place::Parked(ParkedFor::Acknowledgement));
                }
                Some((_, Place::Frozen { .. } | Place::Parked(_) | Place::Acknowledged | Place::Dropped(_))) | None => {
                }
            }
        }
        self.verify();
    }

    /// An acknowledgement is durable. Ends the unit's lease, whoever has it. Does nothing if the unit is not known, is
    /// acknowledged, or was dropped for another reason than being undeliverable.
    pub fn apply_ack(&mut self, id: &UnitId, at: u64) -> Vec<QueueEffect<K>> {
        self.changed_at = self.changed_at.max(at);
        let effects = match self.ledger.find(id).map(|(number, _)| number) {
            _ if self.takes_steps() => self.apply_shard_ack(id, at),
            Some(number) => self.ack_unit(number, at),
            None => Vec::new(),
        };
        self.verify();
        effects
    }

    /// A unit is acknowledged from then on, if it can be.
    pub(super) fn ack_unit(&mut self, number: UnitNumber, at: u64) -> Vec<QueueEffect<K>> {
        let Some(unit) = self.ledger.units.get_mut(&number) else { return Vec::new() };
        let is_over = unit.place.is_settled() && unit.place != Place::Dropped(DropReason::Undeliverable);
        if is_over || self.definition.ephemeral {
            return Vec::new();
        }
        let given_up = unit.history.begin(at);
        self.ledger.blur(given_up);
        self.relocate(number, Place::Acknowledged)
    }

    /// A decision to drop a unit is durable. Does nothing if the unit is not known or is settled: an acknowledgement that
    /// came first stands. Only an operator drops what is undeliverable already, and then it cannot be released any more.
    pub fn apply_drop(&mut self, id: &UnitId, reason: DropReason) -> Vec<QueueEffect<K>> {
        if let Some(step) = self.steps.by_id.get(id).copied() {
            let effects = self.drop_step(step, reason);
            self.verify();
            return effects;
        }
        let Some((number, place)) = self.ledger.place_of(id) else {
            return Vec::new();
        };
        let for_good = reason == DropReason::Operator && place == Place::Dropped(DropReason::Undeliverable);
        if place.is_settled() && !for_good {
            return Vec::new();
        }
        let effects = self.relocate(number, Place::Dropped(reason));
        if self.definition.ephemeral {
            self.ledger.forget(number);
        }
        self.verify();
        effects
    }

    /// Counts units of a rollout that nobody will be given, as dropped for this reason. They are not remembered.
    pub fn count_dropped(&mut self, units: &[NewUnit<P>], reason: DropReason) {
        let sum = units.iter().fold(SettledSum::default(), |sum, unit| SettledSum {
            units: sum.units + 1,
            tokens: sum.tokens + unit.tokens,
            rows: sum.rows + unit.rows,
        });
        if sum.units > 0 && !self.definition.ephemeral {
            self.ledger.restore_forgotten(SettledSum::default(), std::iter::once((reason, sum)));
            self.verify();
        }
    }

    /// Whether an operator may release this unit; changes nothing.
    #[must_use]
    pub fn judge_release(&self, id: &UnitId) -> ReleaseResult {
        if self.takes_steps() {
            return self.judge_step_release(id);
        }
        match self.ledger.place_of(id) {
            None => ReleaseResult::Unknown,
            Some((_, Place::Dropped(DropReason::Undeliverable))) => ReleaseResult::Released,
            Some(_) => ReleaseResult::NotUndeliverable,
        }
    }

    /// A release is durable: the unit waits again at its old place, as if never given out. Does nothing unless it is
    /// dropped as undeliverable.
    pub fn apply_release(&mut self, id: &UnitId) -> Vec<QueueEffect<K>> {
        if self.judge_release(id) != ReleaseResult::Released {
            return Vec::new();
        }
        if self.takes_steps() {
            let effects = self.release_step(id);
            self.verify();
            return effects;
        }
        let Some((number, _)) = self.ledger.place_of(id) else {
            return Vec::new();
        };
        if let Some(unit) = self.ledger.units.get_mut(&number) {
            unit.deliveries = 0;
        }
        let effects = self.relocate(number, Place::Waiting);
        self.verify();
        effects
    }

    /// The rollout has retired: its unit ids are remembered no longer, and later acknowledgements of them are `Unknown`.
    /// What was not settled is dropped as `Forgotten`; how many that were is the answer (0 in the ordinary course).
    pub fn forget_source(&mut self, source: &K) -> usize {
        let Some(units) = self.ledger.sources.get(source).map(|source| source.units.clone()) else {
            return 0;
        };
        let mut dropped = 0;
        for number in units {
            if self.ledger.leave_to_others(number, source) {
                continue;
            }
            if self.ledger.units.get(&number).is_some_and(|unit| !unit.place.is_settled()) {
                dropped += 1;
                self.relocate(number, Place::Dropped(DropReason::Forgotten));
            }
            let of_step = self.ledger.units.get(&number).and_then(|unit| Some((unit.step?, unit.place)));
            self.ledger.forget(number);
            of_step.into_iter().for_each(|(step, place)| self.steps.member_forgotten(step, place));
        }
        self.ledger.sources.remove(source);
        self.verify();
        dropped
    }

    /// What was settled of rollouts that it does not remember any more: acknowledged, and dropped by reason.
    #[must_use]
    pub fn forgotten(&self) -> (SettledSum, &BTreeMap<DropReason, SettledSum>) {
        (self.ledger.counts.forgotten_acknowledged, &self.ledger.counts.forgotten_dropped)
    }

    /// Counts what was settled before it was made again.
    pub fn restore_forgotten(
        &mut self,
        acknowledged: SettledSum,
        dropped: impl Iterator<Item = (DropReason, SettledSum)>,
    ) {
        self.ledger.restore_forgotten(acknowledged, dropped);
        self.verify();
    }

    /// The units of a rollout, and where they stand; none if it was not given to this group, or is forgotten.
    pub fn units_of(&self, source: &K) -> Option<impl Iterator<Item = (&UnitId, Place)>> {
        let units = &self.ledger.sources.get(source)?.units;
        Some(units.iter().filter_map(|number| self.ledger.units.get(number)).map(|unit| (&unit.id, unit.place)))
    }

    /// Whether the rollout was given to this group, and is not forgotten.
    #[must_use]
    pub fn knows(&self, source: &K) -> bool {
        self.ledger.sources.contains_key(source)
    }

    /// The rollouts that it was given and has not forgotten.
    pub fn sources(&self) -> impl Iterator<Item = &K> {
        self.ledger.sources.keys()
    }

    /// From a restart until then, units are only for those who say that they hold them: consumers come back at their own pace.
    pub fn hold_back(&mut self, until_ms: u64) {
        if self.takes_steps() {
            // A shard has one who takes it, and says what it holds.
            return;
        }
        self.grace_until_ms = until_ms;
        for number in self.ledger.waiting.clone() {
            self.relocate(number, Place::Delayed { until_ms });
        }
        self.verify();
    }

    /// Whether the rollout holds back its memory for this group: known, and not settled.
    #[must_use]
    pub fn holds(&self, source: &K) -> bool {
        self.ledger.sources.get(source).is_some_and(|source| source.unsettled > 0)
    }

    /// Whether some unit of the rollout was undeliverable, and can still be released by hand.
    #[must_use]
    pub fn has_undeliverable(&self, source: &K) -> bool {
        let units = self.ledger.sources.get(source).map_or(&[][..], |source| &source.units);
        let place = |number| self.ledger.units.get(number).map(|unit| unit.place);
        units.iter().any(|number| place(number) == Some(Place::Dropped(DropReason::Undeliverable)))
    }

    /// Where a unit stands; `None` if it is not known.
    #[must_use]
    pub fn place(&self, id: &UnitId) -> Option<Place> {
        self.ledger.place_of(id).map(|(_, place)| place)
    }

    /// Every unit that is remembered, in the order of its id, and where it stands.
    pub fn units(&self) -> impl Iterator<Item = (&UnitId, Place)> {
        self.ledger.numbers.iter().filter_map(|(id, number)| Some((id, self.ledger.units.get(number)?.place)))
    }

    /// Moves a unit, and its lease with it: the one way, so that unit and consumer cannot disagree.
    pub(super) fn relocate(&mut self, number: UnitNumber, to: Place) -> Vec<QueueEffect<K>> {
        let Some(moved) = self.ledger.move_to(number, to) else { return Vec::new() };
        if let Place::Leased { consumer, since_ms } = moved.from {
            self.consumers.end_lease(consumer, since_ms, number, moved.tokens);
        }
        if let Place::Leased { consumer, since_ms } = to {
            self.consumers.begin_lease(consumer, since_ms, number, moved.tokens);
        }
        if let Some(step) = moved.step {
            self.steps.member_moved(step, moved.from, to);
        }
        moved.effects
    }
}
