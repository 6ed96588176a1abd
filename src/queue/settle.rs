//! How steps end: each shard is acknowledged by itself, the step whole; and it is dropped, released and sought whole.

use std::collections::BTreeSet;

use super::consumers::UnitNumber;
use super::effect::{AckResult, QueueEffect, ReleaseResult};
use super::group::ConsumerGroup;
use super::steps::{Shard, ShardPlace};
use super::unit::{DropReason, Place, UnitId};

impl<K: Ord + Clone, P: Clone> ConsumerGroup<K, P> {
    /// What acknowledgements of shards are worth, in the order asked. The last one of a step acknowledges it.
    pub(super) fn judge_shard_acks(&self, ids: &[UnitId]) -> Vec<(UnitId, AckResult)> {
        let mut taken: BTreeSet<(u64, u32)> = BTreeSet::new();
        let mut judged = Vec::with_capacity(ids.len());
        for id in ids {
            let Some(at) = self.shard_of(id) else {
                judged.push((id.clone(), AckResult::Unknown));
                continue;
            };
            let result = self.judge_shard_ack(at);
            let result = match result {
                AckResult::Acknowledged if !taken.insert(at) => AckResult::Already,
                AckResult::Acknowledged => {
                    let left = self.steps.by_index.get(&at.0).is_some_and(|step| {
                        let is_left = |shard: &Shard| !shard.place.is_acknowledged();
                        let left = step.shards.iter().filter(|shard| is_left(shard)).count();
                        left > taken.range((at.0, 0)..=(at.0, u32::MAX)).count()
                    });
                    if left { AckResult::ShardAcknowledged } else { AckResult::Acknowledged }
                }
                AckResult::ShardAcknowledged | AckResult::Already | AckResult::Unknown | AckResult::Dropped(_) => {
                    result
                }
            };
            judged.push((id.clone(), result));
        }
        judged
    }

    fn judge_shard_ack(&self, at: (u64, u32)) -> AckResult {
        let Some(step) = self.steps.by_index.get(&at.0) else { return AckResult::Unknown };
        let acknowledged = self.steps.shard(at).is_some_and(|shard| shard.place.is_acknowledged());
        if step.has_settled() || acknowledged {
            return AckResult::Already;
        }
        let place = step.members.iter().find_map(|id| self.ledger.place_of(id)).map(|(_, place)| place);
        match place {
            Some(Place::Dropped(reason)) if reason != DropReason::Undeliverable => AckResult::Dropped(reason),
            Some(_) => AckResult::Acknowledged,
            None => AckResult::Unknown,
        }
    }

    /// A shard's acknowledgement is durable; the last one of a step settles all of its units.
    pub(super) fn apply_shard_ack(&mut self, id: &UnitId, at: u64) -> Vec<QueueEffect<K>> {
        let Some((index, shard)) = self.shard_of(id) else { return Vec::new() };
        self.move_shard((index, shard), ShardPlace::Acknowledged);
        let Some(step) = self.steps.by_index.get(&index) else { return Vec::new() };
        if !step.all_shards_acknowledged() || step.has_settled() {
            return Vec::new();
        }
        let mut effects = Vec::new();
        for number in self.member_numbers(index) {
            effects.extend(self.ack_unit(number, at));
        }
        if let Some(step) = self.steps.by_index.get_mut(&index) {
            (step.cut, step.shards) = (None, Vec::new());
        }
        effects
    }

    /// The units of a step that are there.
    pub(super) fn member_numbers(&self, index: u64) -> Vec<UnitNumber> {
        let members = self.steps.by_index.get(&index).into_iter().flat_map(|step| &step.members);
        members.filter_map(|id| self.ledger.numbers.get(id).copied()).collect()
    }

    /// A step is dropped whole, which is durable. Does nothing if it is acknowledged, or dropped for good.
    pub(super) fn drop_step(&mut self, index: u64, reason: DropReason) -> Vec<QueueEffect<K>> {
        self.end_step_leases(index);
        let mut effects = Vec::new();
        for number in self.member_numbers(index) {
            let Some(place) = self.ledger.units.get(&number).map(|unit| unit.place) else { continue };
            let for_good = reason == DropReason::Operator && place == Place::Dropped(DropReason::Undeliverable);
            if !place.is_settled() || for_good {
                effects.extend(self.relocate(number, Place::Dropped(reason)));
            }
        }
        if let Some(step) = self.steps.by_index.get_mut(&index) {
            step.cut = None;
        }
        effects
    }

    pub(super) fn judge_step_release(&self, id: &UnitId) -> ReleaseResult {
        let step = self.steps.by_id.get(id).and_then(|index| self.steps.by_index.get(index));
        match step {
            None => ReleaseResult::Unknown,
            Some(step) if step.standing.undeliverable > 0 => ReleaseResult::Released,
            Some(_) => ReleaseResult::NotUndeliverable,
        }
    }

    /// A step that was undeliverable is to be given out again, which is durable. Shards that were acknowledged stay so.
    pub(super) fn release_step(&mut self, id: &UnitId) -> Vec<QueueEffect<K>> {
        let Some(index) = self.steps.by_id.get(id).copied() else { return Vec::new() };
        let mut effects = Vec::new();
        for number in self.member_numbers(index) {
            effects.extend(self.relocate(number, Place::Frozen { is_out: false }));
        }
        let shards = self.steps.by_index.get(&index).map_or(0, |step| step.shards.len());
        for shard in 0..u32::try_from(shards).unwrap_or(u32::MAX) {
            let is_free = |shard: Shard| !shard.place.is_acknowledged();
            if self.steps.shard((index, shard)).is_some_and(is_free) {
                self.move_shard((index, shard), ShardPlace::Waiting);
                self.set_shard_deliveries((index, shard), 0);
            }
        }
        effects
    }

    /// The group went back, or forward: acknowledgements of steps that are not whole are gone, with all leases.
    pub(super) fn steps_are_sought(&mut self) {
        self.steps.delayed.clear();
        let untouched = self.untouched_shards();
        for step in self.steps.by_index.values_mut() {
            step.shards = if step.has_settled() { Vec::new() } else { untouched.clone() };
            step.cut = step.cut.take().filter(|_| step.is_open());
        }
    }

    /// Steps that are undeliverable and can be released by hand, in order.
    pub fn undeliverable_steps(&self) -> impl Iterator<Item = &UnitId> {
        self.steps.by_index.values().filter(|step| step.standing.undeliverable > 0).map(|step| &step.id)
    }
}
