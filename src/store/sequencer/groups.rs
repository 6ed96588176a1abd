//! The groups of one run: how many of them something may still come of, which are to be released and when, and which finalised
//! rollouts of each are there.
//!
//! When a group was opened is not part of the [`Group`], which a replay must give again: for people it is a time of the calendar, and
//! its time limit counts afresh when the service starts.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Bound;
use std::sync::Arc;

use crate::error::{Reason, Refusal};
use crate::group::{Group, GroupRules, Release};
use crate::ids::{GroupId, Name, RolloutId};
use crate::limits;
use crate::log::Position;

use super::super::memory::Holding;

/// Families of rollouts without a group have this bit; groups do not count so far.
const ALONE: u64 = 1 << 63;

/// Rows of a policy in a group, and what they train.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GroupSums {
    /// Rows.
    pub rows: u64,
    /// Trained tokens in them.
    pub trained_tokens: u64,
}

/// The sums of a group, by policy.
pub type SumsByPolicy = Arc<BTreeMap<Name, GroupSums>>;

/// The groups of a run, by id.
pub(in crate::store) struct RunGroups {
    by_id: BTreeMap<GroupId, KeptGroup>,
    counts: Counts,
    next_family: u64,
    /// What they hold in memory.
    held: Holding,
}

/// What follows from groups, kept with each change of one.
#[derive(Default)]
struct Counts {
    /// Those that are not over.
    open: u64,
    /// The families of those that have an open member, or are not released though that is awaited.
    ahead: BTreeSet<u64>,
    /// When the time of those is over that are to be released.
    deadlines: BTreeSet<(u64, GroupId)>,
    /// Those that have changed and may be released by now.
    touched: BTreeSet<GroupId>,
    /// Finalised rollouts that await their group's release.
    held_rollouts: u64,
}

/// A group, and what is known of it besides.
pub(super) struct KeptGroup {
    pub(super) group: Group,
    /// When its first rollout was opened, milliseconds since the Unix epoch.
    pub(super) opened_unix_ms: u64,
    /// The same on the store's clock.
    opened_at_ms: u64,
    /// What its units have in common in queues.
    pub(super) family: u64,
    /// The record of its release is on its way.
    pub(super) is_deciding: bool,
    /// Where the record of its release stood first.
    pub(super) released_at: Position,
    /// The numbers of its finalised rollouts that are there, if its release matters.
    pub(super) retained: BTreeMap<RolloutId, u64>,
    /// Those of them that some consumer group has not settled.
    pub(super) held: BTreeSet<u64>,
    /// Rows and trained tokens, by the longest row that a consumer group takes. Worked out when they are asked for.
    pub(super) sums: BTreeMap<Option<u32>, SumsByPolicy>,
}

impl KeptGroup {
    /// When its time is over, if it is to be released and that is not being decided.
    pub(super) fn deadline_ms(&self) -> Option<u64> {
        let awaits = self.group.awaits_release() && !self.is_deciding;
        awaits.then(|| self.opened_at_ms.saturating_add(self.group.rules().timeout_ms))
    }
}

impl RunGroups {
    /// None yet, with what they will hold.
    pub(super) fn new(held: Holding) -> Self {
        Self { by_id: BTreeMap::new(), counts: Counts::default(), next_family: 0, held }
    }

    /// How many there are.
    pub(super) fn len(&self) -> usize {
        self.by_id.len()
    }

    /// An attempt at a member of a group was opened; the group is made now if it is not there, with these rules.
    pub(super) fn member_opened(
        &mut self,
        id: &GroupId,
        now: (u64, u64),
        (rollout, attempt): (&RolloutId, u32),
        rules: GroupRules,
    ) {
        self.make(id, now, rules);
        let opened = |group: &mut Group| {
            // A log that begins in the middle may have said its size first.
            if rules.are_released() {
                group.has_rules(rules);
            }
            group.opened(rollout, attempt)
        };
        if self.change(id, opened) == Some(true) {
            self.held.add(member_bytes(rollout));
        }
    }

    pub(super) fn get(&self, id: &GroupId) -> Option<&Group> {
        self.by_id.get(id).map(|kept| &kept.group)
    }

    pub(super) fn kept(&self, id: &GroupId) -> Option<&KeptGroup> {
        self.by_id.get(id)
    }

    /// A group, of which nothing may be changed that is counted.
    pub(super) fn kept_mut(&mut self, id: &GroupId) -> Option<&mut KeptGroup> {
        self.by_id.get_mut(id)
    }

    /// Whether a group still takes attempts at rollouts that are not open in it.
    ///
    /// # Errors
    /// If it was released, or that is on its way to the disk.
    pub(super) fn judge_released(&self, id: &GroupId) -> Result<(), Refusal> {
        let Some(kept) = self.by_id.get(id) else { return Ok(()) };
        if kept.is_deciding {
            let message = format!("group {id:?} is being released, and takes no rollout any more");
            return Err(Refusal::new(Reason::GroupReleased, message).field("rollout.group_id"));
        }
        kept.group.judge_released(id)
    }

    /// Groups of which something may still come.
    pub(super) fn open_count(&self) -> u64 {
        self.counts.open
    }

    /// The families of the groups that have an open member, or await their release.
    pub(super) fn ahead(&self) -> &BTreeSet<u64> {
        &self.counts.ahead
    }

    /// Finalised rollouts that await their group's release.
    pub(super) fn held_rollouts(&self) -> u64 {
        self.counts.held_rollouts
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

    /// Makes a group with these rules, if it is not there. Now is that of the store's clock, and milliseconds since the Unix epoch.
    pub(super) fn make(&mut self, id: &GroupId, (opened_at_ms, opened_unix_ms): (u64, u64), rules: GroupRules) {
        if self.by_id.contains_key(id) {
            return;
        }
        self.held.add(group_bytes(id));
        self.next_family += 1;
        let kept = KeptGroup {
            group: Group::new(rules),
            opened_unix_ms,
            opened_at_ms,
            family: self.next_family,
            is_deciding: false,
            released_at: Position::default(),
            retained: BTreeMap::new(),
            held: BTreeSet::new(),
            sums: BTreeMap::new(),
        };
        self.counts.add(id, &kept);
        self.by_id.insert(id.clone(), kept);
    }

    /// Changes a group, if it is there.
    pub(super) fn change<T>(&mut self, id: &GroupId, change: impl FnOnce(&mut Group) -> T) -> Option<T> {
        self.change_kept(id, |kept| change(&mut kept.group))
    }

    /// The one way to change what is counted of a group: it keeps the counts with it.
    fn change_kept<T>(&mut self, id: &GroupId, change: impl FnOnce(&mut KeptGroup) -> T) -> Option<T> {
        let kept = self.by_id.get_mut(id)?;
        self.counts.subtract(id, kept);
        let changed = change(kept);
        self.counts.add(id, kept);
        Some(changed)
    }

    /// The record of a group's release is on its way.
    pub(super) fn begin_deciding(&mut self, id: &GroupId) {
        self.change_kept(id, |kept| kept.is_deciding = true);
    }

    /// A group was released there; true if that was not known.
    pub(super) fn released(&mut self, id: &GroupId, release: &Arc<Release>, at: Position) -> bool {
        let is_first = self.change_kept(id, |kept| {
            let is_first = kept.group.released(release);
            if is_first {
                (kept.is_deciding, kept.released_at) = (false, at);
            }
            is_first
        });
        let is_first = is_first == Some(true);
        if is_first {
            self.held.add(release.bytes());
        }
        is_first
    }

    /// A finalised rollout of a group is there, under this number; or is not any more.
    pub(super) fn retains(&mut self, id: &GroupId, rollout: &RolloutId, number: Option<u64>) {
        self.change_kept(id, |kept| {
            let before = match number {
                Some(number) => kept.retained.insert(rollout.clone(), number),
                None => kept.retained.remove(rollout),
            };
            if let Some(before) = before {
                kept.held.remove(&before);
            }
        });
    }

    /// The groups that may be released by now, to be looked at.
    pub(super) fn take_due(&mut self, now_ms: u64) -> BTreeSet<GroupId> {
        let mut due = std::mem::take(&mut self.counts.touched);
        due.extend(self.counts.deadlines.iter().take_while(|(at_ms, _)| *at_ms <= now_ms).map(|(_, id)| id.clone()));
        due
    }

    /// Whether some group has changed and may be released.
    pub(super) fn may_have_due(&self) -> bool {
        !self.counts.touched.is_empty()
    }

    /// When the time of a group is over next.
    pub(super) fn next_deadline_ms(&self) -> Option<u64> {
        self.counts.deadlines.first().map(|(at_ms, _)| *at_ms)
    }

    pub(super) fn remove(&mut self, id: &GroupId) {
        if let Some(removed) = self.by_id.remove(id) {
            self.counts.subtract(id, &removed);
            self.counts.touched.remove(id);
            let members: u64 = removed.group.members().map(|(rollout, _, _)| member_bytes(rollout)).sum();
            let release = removed.group.release().map_or(0, |release| release.bytes());
            self.held.subtract(group_bytes(id) + members + release);
        }
    }

    /// Removes the groups that have no member: what was to come of them was cut.
    pub(super) fn remove_empty(&mut self) {
        let empty: Vec<GroupId> =
            self.iter().filter(|(_, group)| group.member_count() == 0).map(|(id, _)| id.clone()).collect();
        empty.iter().for_each(|id| self.remove(id));
    }
}

impl Counts {
    fn add(&mut self, id: &GroupId, kept: &KeptGroup) {
        self.open += u64::from(!kept.group.is_over());
        if kept.group.has_open_member() || kept.group.awaits_release() {
            self.ahead.insert(kept.family);
        }
        if kept.group.awaits_release() {
            self.held_rollouts += kept.retained.len() as u64;
        }
        if let Some(deadline_ms) = kept.deadline_ms() {
            self.deadlines.insert((deadline_ms, id.clone()));
            self.touched.insert(id.clone());
        }
    }

    fn subtract(&mut self, id: &GroupId, kept: &KeptGroup) {
        self.open -= u64::from(!kept.group.is_over());
        self.ahead.remove(&kept.family);
        if kept.group.awaits_release() {
            self.held_rollouts -= kept.retained.len() as u64;
        }
        if let Some(deadline_ms) = kept.deadline_ms() {
            self.deadlines.remove(&(deadline_ms, id.clone()));
        }
    }
}

fn group_bytes(id: &GroupId) -> u64 {
    limits::GROUP_BYTES + id.as_str().len() as u64
}

fn member_bytes(rollout: &RolloutId) -> u64 {
    limits::GROUP_MEMBER_BYTES + rollout.as_str().len() as u64
}
