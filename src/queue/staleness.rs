//! Staleness: units whose trained tokens were sampled by weights too far behind those that the trainer is on (RULES section 7).
//!
//! Trainers say which version they are on; that is memory only, and they say it again when they come back. A unit that waits and is
//! beyond the group's bound is parked, until the decision to drop it is durable. One that is out is in training: it is not asked.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use super::consumers::UnitNumber;
use super::effect::Decision;
use super::group::ConsumerGroup;
use super::unit::{ConsumerId, DropReason, ParkedFor, Place};

/// The oldest version that sampled a trained token of a unit, for each policy of which it is known.
pub type OldestVersions = Box<[(Arc<str>, u64)]>;

/// The older of both for each policy.
pub(super) fn oldest_of(one: &OldestVersions, other: &OldestVersions) -> OldestVersions {
    let mut oldest: BTreeMap<Arc<str>, u64> = BTreeMap::new();
    for (policy, version) in one.iter().chain(other) {
        let known = oldest.entry(Arc::clone(policy)).or_insert(*version);
        *known = (*known).min(*version);
    }
    oldest.into_iter().collect()
}

/// The versions that the trainers of a group are on: the highest that each was said to be.
#[derive(Debug, Clone, Default)]
pub(super) struct TrainerVersions {
    /// Of whatever policy.
    every: Option<u64>,
    by_policy: BTreeMap<Arc<str>, u64>,
}

impl TrainerVersions {
    fn of(&self, policy: &str) -> Option<u64> {
        self.every.max(self.by_policy.get(policy).copied())
    }
}

/// Waiting units by policy, the oldest version first.
#[derive(Debug, Clone, Default)]
pub(super) struct ByVersion(BTreeMap<Arc<str>, BTreeSet<(u64, UnitNumber)>>);

impl ByVersion {
    pub(super) fn insert(&mut self, number: UnitNumber, versions: &OldestVersions) {
        for (policy, version) in versions {
            self.0.entry(Arc::clone(policy)).or_default().insert((*version, number));
        }
    }

    pub(super) fn remove(&mut self, number: UnitNumber, versions: &OldestVersions) {
        for (policy, version) in versions {
            if let Some(units) = self.0.get_mut(policy) {
                units.remove(&(*version, number));
                if units.is_empty() {
                    self.0.remove(policy);
                }
            }
        }
    }

    /// Every unit in it, once for each of its policies.
    pub(super) fn iter(&self) -> impl Iterator<Item = (&str, u64, UnitNumber)> {
        self.0.iter().flat_map(|(policy, units)| units.iter().map(|(version, number)| (&**policy, *version, *number)))
    }
}

impl<K: Ord + Clone, P: Clone> ConsumerGroup<K, P> {
    /// A consumer's trainer is on this version of a policy, or of whatever policy it takes. A lower one than before is ignored.
    pub fn trainer_is_on(&mut self, consumer: ConsumerId, policy: Option<&str>, version: u64) {
        self.consumers.is_on(consumer, version);
        let TrainerVersions { every, by_policy } = &mut self.trainer_versions;
        match policy {
            None => *every = Some(version).max(*every),
            Some(policy) => {
                let known = by_policy.entry(policy.into()).or_default();
                *known = version.max(*known);
            }
        }
    }

    /// Policies whose version was said by name.
    #[must_use]
    pub fn named_trainer_versions(&self) -> usize {
        self.trainer_versions.by_policy.len()
    }

    /// The version of this policy that was said by its name.
    #[must_use]
    pub fn trainer_version_of(&self, policy: &str) -> Option<u64> {
        self.trainer_versions.by_policy.get(policy).copied()
    }

    /// Parks waiting units that are too old, at most so many, and decides to drop them; if as many come back, there may be more.
    pub fn judge_stale(&mut self, now_ms: u64, most: usize) -> Vec<Decision> {
        let Some(max_staleness) = self.definition.max_staleness_versions else { return Vec::new() };
        self.ledger.end_delays(now_ms);
        let mut stale = BTreeSet::new();
        for (policy, units) in &self.ledger.by_version.0 {
            let Some(version) = self.trainer_versions.of(policy) else { continue };
            let too_old = units.iter().take_while(|(oldest, _)| version.saturating_sub(*oldest) > max_staleness);
            stale.extend(too_old.map(|(_, number)| *number).take(most));
        }
        let mut decisions = Vec::new();
        for number in stale.into_iter().take(most) {
            let Some(unit) = self.ledger.units.get(&number) else { continue };
            decisions.push(Decision::DropStale { unit: unit.id.clone() });
            self.relocate(number, Place::Parked(ParkedFor::Drop(DropReason::Stale)));
        }
        self.verify();
        decisions
    }
}
