//! The groups of one run, and how many of them something may still come of.
//!
//! When a group was opened is for people only: it is not part of the [`Group`], which a replay must give again.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Bound;

use crate::group::Group;
use crate::ids::{GroupId, RolloutId};
use crate::limits;

use super::super::memory::Holding;

/// Families of rollouts without a group have this bit; groups do not count so far.
const ALONE: u64 = 1 << 63;

/// The groups of a run, by id.
pub(in crate::store) struct RunGroups {
    by_id: BTreeMap<GroupId, KeptGroup>,
    open_count: u64,
    /// The families of those that have an open member.
    with_open_members: BTreeSet<u64>,
    next_family: u64,
    /// What they hold in memory.
    held: Holding,
}

/// A group, and when its first rollout was opened, milliseconds since the Unix epoch.
pub(super) struct KeptGroup {
    pub(super) group: Group,
    pub(super) opened_unix_ms: u64,
    /// What its units have in common in queues.
    pub(super) family: u64,
}

impl RunGroups {
    /// None yet, with what they will hold.
    pub(super) fn new(held: Holding) -> Self {
        Self { by_id: BTreeMap::new(), open_count: 0, with_open_members: BTreeSet::new(), next_family: 0, held }
    }

    /// How many there are.
    pub(super) fn len(&self) -> usize {
        self.by_id.len()
    }

    /// An attempt at a member of a group was opened; the group is made now if it is not there.
    pub(super) fn member_opened(&mut self, id: &GroupId, unix_ms: u64, rollout: &RolloutId, attempt: u32) {
        if self.change_or_new(id, unix_ms, |group| group.opened(rollout, attempt)) {
            self.held.add(member_bytes(rollout));
        }
    }

    pub(super) fn get(&self, id: &GroupId) -> Option<&Group> {
        self.by_id.get(id).map(|kept| &kept.group)
    }

    pub(super) fn kept(&self, id: &GroupId) -> Option<&KeptGroup> {
        self.by_id.get(id)
    }

    /// Groups of which something may still come.
    pub(super) fn open_count(&self) -> u64 {
        self.open_count
    }

    /// The families of the groups that have an open member.
    pub(super) fn with_open_members(&self) -> &BTreeSet<u64> {
        &self.with_open_members
    }

    /// What the units of a group, or of a rollout without one, have in common in queues.
    pub(super) fn family(&self, group: Option<&GroupId>, alone: u64) -> u64 {
        let family = group.and_then(|group| self.by_id.get(group)).map(|kept| kept.family);
        family.unwrap_or(ALONE | alone)
    }

    /// All groups, by id.
    pub(super) fn iter(&self) -> impl Iterator<Item = (&GroupId, &Group)> {
        self.by_id.iter().map(|(id, kept)| (id, &kept.group))
    }

    /// The groups after this one, by id.
    pub(super) fn after(&self, after: Option<&GroupId>) -> impl Iterator<Item = (&GroupId, &KeptGroup)> {
        let start = after.map_or(Bound::Unbounded, Bound::Excluded);
        self.by_id.range::<GroupId, _>((start, Bound::Unbounded))
    }

    /// Changes a group, which is made now if it is not there.
    pub(super) fn change_or_new<T>(&mut self, id: &GroupId, unix_ms: u64, change: impl FnOnce(&mut Group) -> T) -> T {
        let kept = self.by_id.entry(id.clone()).or_insert_with(|| {
            self.open_count += u64::from(!Group::default().is_over());
            self.held.add(group_bytes(id));
            self.next_family += 1;
            KeptGroup { group: Group::default(), opened_unix_ms: unix_ms, family: self.next_family }
        });
        counting(&mut self.open_count, &mut self.with_open_members, kept, change)
    }

    /// Changes a group, if it is there.
    pub(super) fn change<T>(&mut self, id: &GroupId, change: impl FnOnce(&mut Group) -> T) -> Option<T> {
        let kept = self.by_id.get_mut(id)?;
        Some(counting(&mut self.open_count, &mut self.with_open_members, kept, change))
    }

    pub(super) fn remove(&mut self, id: &GroupId) {
        if let Some(removed) = self.by_id.remove(id) {
            self.open_count -= u64::from(!removed.group.is_over());
            self.with_open_members.remove(&removed.family);
            let members: u64 = removed.group.members().map(|(rollout, _, _)| member_bytes(rollout)).sum();
            self.held.subtract(group_bytes(id) + members);
        }
    }
}

/// The one way to change a group: it keeps the counts with it.
fn counting<T>(
    open_count: &mut u64,
    with_open_members: &mut BTreeSet<u64>,
    KeptGroup { group, family, .. }: &mut KeptGroup,
    change: impl FnOnce(&mut Group) -> T,
) -> T {
    *open_count -= u64::from(!group.is_over());
    let changed = change(group);
    *open_count += u64::from(!group.is_over());
    if group.has_open_member() {
        with_open_members.insert(*family);
    } else {
        with_open_members.remove(family);
    }
    changed
}

fn group_bytes(id: &GroupId) -> u64 {
    limits::GROUP_BYTES + id.as_str().len() as u64
}

fn member_bytes(rollout: &RolloutId) -> u64 {
    limits::GROUP_MEMBER_BYTES + rollout.as_str().len() as u64
}
