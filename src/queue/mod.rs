//! Consumer groups, and the units of finished rows that each of them takes. PURE.
//!
//! **For**: one run's way from finished rollouts to acknowledged rows. Each consumer group sees every unit that is pushed
//! to it; inside a group each unit is with one consumer at most. A unit goes out again until somebody acknowledges it, or
//! is dropped for a reason that can be read.
//!
//! **Owns**: units, the line they wait in, leases, consumers, counts. The sequencing task owns the [`Queue`].
//!
//! **Never**: reads a clock (`now_ms` is an argument, in milliseconds of any monotonic clock), sends, logs, or
//! looks into a payload. It does not decide which units a group takes: whoever pushes looks at the group's definition.
//!
//! **Records and memory.** What must survive is applied from records that are durable, in the order of their positions:
//! [`Queue::apply_group`], [`ConsumerGroup::push`], [`ConsumerGroup::apply_ack`], [`ConsumerGroup::apply_drop`],
//! [`ConsumerGroup::apply_release`], [`ConsumerGroup::apply_frozen`], [`ConsumerGroup::apply_seek`], [`ConsumerGroup::forget_source`]. The same sequence of these
//! gives the same settled units, counts and effects, whatever consumers did in between. Consumers, leases, delays, delivery numbers,
//! the versions that trainers are on and the parking place are memory only: after a restart every unsettled unit waits at its place,
//! and a consumer that comes back says what it holds. What asks (`judge_*`) records nothing; what a clock, a trainer's version or a
//! consumer's end decides comes back as a [`Decision`].
//! Ephemeral groups are in no record.
//!
//! **Cost**: a delivery is logarithmic in units, plus the consumers with room that are served before the one that takes
//! it; finding that nothing can go out asks each consumer with room once. A sign of life is logarithmic in consumers.
//!
//! **Limits**: [`QueueBounds`]. Units that wait are bounded by what the run retains, not here, except in ephemeral groups.
//!
//! **Invariants**, checked by [`ConsumerGroup::check_invariants`], in tests and in debug builds after each change:
//! 1. pushed = waiting + leased + parked + acknowledged + dropped, in units, in tokens and in rows.
//! 2. Each count is what the units say; those not remembered any more were acknowledged or dropped.
//! 3. The line holds the waiting units and no others; the delayed and the undeliverable ones likewise.
//! 4. Leases are disjoint: a leased unit is with its one consumer, and consumers have no others; tokens in flight add up.
//! 5. Each remembered unit is found under its id.
//! 6. A rollout is settled exactly when all its units are.
//! 7. The order in which consumers are served holds exactly those with room, and the order in which leases end those with leases.
//! 8. A payload is kept exactly as long as it may be wanted.
//! 9. An ephemeral group has no leases, remembers nothing settled, and keeps its bound.
//! 10. Waiting units, and no others, are found by the versions that sampled them.
//! 11. Of each family the units are counted that wait or are put off.
//! 12. A unit is frozen exactly while it stands in a step that is not over; steps know where their units and shards stand.

mod consumers;
mod cut;
mod definition;
mod effect;
mod group;
mod invariants;
mod lease;
mod ledger;
mod seek;
mod settle;
mod shards;
mod staleness;
mod stats;
mod steps;
#[cfg(test)]
mod tests;
mod unit;

use std::collections::BTreeMap;
use std::ops::Bound;

pub use cut::{Cut, CutVersion, PADDING_ROW_TOKENS, RowPlace, RowSize, ShardCut, cut};
pub use definition::{ConsumerGroupMismatch, GroupDefinition, QueueBounds, StepDefinition};
pub use effect::{
    AckResult, Decision, Delivery, JoinRefused, Joined, LostReason, Nacked, QueueEffect, ReleaseResult, Ticked,
};
pub use group::ConsumerGroup;
pub use ledger::{RowStates, SettledSum, Tally};
pub use seek::{History, SeekRefused};
pub use shards::{OpenStep, RefetchRefused, ShardDelivery};
pub use staleness::OldestVersions;
pub use stats::{ConsumerFacts, GroupStats, WaitReason, WaitingFor};
pub use steps::FrozenStep;
pub use unit::{ConsumerId, DropReason, NewUnit, ParkedFor, Place, UnitId, UnitKind};

/// Whether a consumer group is there already.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GroupVerdict {
    /// It is, with this definition.
    Exists,
    /// It is not, and may be made: log it (unless it is ephemeral), then call [`Queue::apply_group`].
    New,
}

/// Why a consumer group cannot be used or made.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum GroupRefused {
    /// There is one of that name, and it is another one.
    Mismatch(Box<ConsumerGroupMismatch>),
    /// The run has as many as it may.
    TooManyGroups {
        /// The bound.
        max_consumer_groups: usize,
    },
}

/// The consumer groups of one run, by name.
#[derive(Debug, Clone)]
pub struct Queue<K, P> {
    groups: BTreeMap<String, ConsumerGroup<K, P>>,
    bounds: QueueBounds,
}

impl<K: Ord + Clone, P: Clone> Queue<K, P> {
    /// A run without consumer groups.
    #[must_use]
    pub fn new(bounds: QueueBounds) -> Self {
        Self { groups: BTreeMap::new(), bounds }
    }

    /// Whether a group of that name and definition exists or may be made. Ask again after [`Self::apply_group`] where
    /// another may have made it in between.
    ///
    /// # Errors
    /// When the name is another group's, or the run has too many groups.
    pub fn judge_group(&self, name: &str, requested: &GroupDefinition) -> Result<GroupVerdict, GroupRefused> {
        let Some(group) = self.groups.get(name) else {
            let max_consumer_groups = self.bounds.max_consumer_groups;
            if self.groups.len() >= max_consumer_groups {
                return Err(GroupRefused::TooManyGroups { max_consumer_groups });
            }
            return Ok(GroupVerdict::New);
        };
        if group.definition() == requested {
            return Ok(GroupVerdict::Exists);
        }
        Err(GroupRefused::Mismatch(Box::new(ConsumerGroupMismatch {
            name: name.to_owned(),
            declared: group.definition().clone(),
            requested: requested.clone(),
        })))
    }

    /// Makes the group, unless there is one of that name: the first definition stands.
    pub fn apply_group(
        &mut self,
        name: &str,
        definition: GroupDefinition,
        made_at: u64,
        now_ms: u64,
    ) -> &mut ConsumerGroup<K, P> {
        let bounds = self.bounds;
        self.groups.entry(name.to_owned()).or_insert_with(|| ConsumerGroup::new(definition, bounds, made_at, now_ms))
    }

    /// Takes a group out, with all that it had not settled.
    pub fn remove_group(&mut self, name: &str) -> Option<ConsumerGroup<K, P>> {
        self.groups.remove(name)
    }

    /// One group.
    #[must_use]
    pub fn group(&self, name: &str) -> Option<&ConsumerGroup<K, P>> {
        self.groups.get(name)
    }

    /// One group, to change it.
    pub fn group_mut(&mut self, name: &str) -> Option<&mut ConsumerGroup<K, P>> {
        self.groups.get_mut(name)
    }

    /// All groups, by name.
    pub fn groups(&self) -> impl Iterator<Item = (&str, &ConsumerGroup<K, P>)> {
        self.groups.iter().map(|(name, group)| (name.as_str(), group))
    }

    /// The groups after this one, by name.
    pub fn groups_after(&self, after: Option<&str>) -> impl Iterator<Item = (&str, &ConsumerGroup<K, P>)> {
        let start = after.map_or(Bound::Unbounded, Bound::Excluded);
        self.groups.range::<str, _>((start, Bound::Unbounded)).map(|(name, group)| (name.as_str(), group))
    }

    /// All groups, by name, to change them.
    pub fn groups_mut(&mut self) -> impl Iterator<Item = (&str, &mut ConsumerGroup<K, P>)> {
        self.groups.iter_mut().map(|(name, group)| (name.as_str(), group))
    }

    /// From now on leases last so long, in every group.
    pub fn set_lease_ms(&mut self, lease_ms: u64) {
        self.bounds.lease_ms = lease_ms;
        for group in self.groups.values_mut() {
            group.bounds.lease_ms = lease_ms;
        }
    }

    /// Forgets a retired rollout in every group.
    pub fn forget_source(&mut self, source: &K) {
        for group in self.groups.values_mut() {
            group.forget_source(source);
        }
    }

    /// The earliest moment at which [`ConsumerGroup::tick`] has something to do in any group.
    #[must_use]
    pub fn next_deadline_ms(&self) -> Option<u64> {
        self.groups.values().filter_map(ConsumerGroup::next_deadline_ms).min()
    }
}
