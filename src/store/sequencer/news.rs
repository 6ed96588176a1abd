//! What consumers are told besides units: what was dropped, and what their consumer group is not given.
//!
//! That a rollout has no rows, or too long calls, is told to who is subscribed when it is finalised. Nobody is let go for such
//! news: while a consumer's line is short of room they are only counted, and one notice says later how many there were.

use crate::group::DroppedFor;
use crate::ids::{GroupId, RolloutId, RolloutRef, RunId};
use crate::queue::{ConsumerId, UnitId};

use super::super::{RolloutKey, Slot};
use super::Sequencer;
use super::consumers::ToConsumer;

/// What a consumer group is not given of a finalised rollout.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LeftOut {
    /// So many rollouts have no row for it.
    NoRows(u64),
    /// So many calls are longer than its rows may be.
    TooLong(u64),
    /// So many rollouts ended before any consumer group was given them.
    NotRetained(u64),
    /// So many rollouts were finalised after their groups had been released.
    Late(u64),
    /// So many groups were dropped; why, if it is one.
    GroupsDropped(u64, Option<DroppedFor>),
}

/// What such news are about.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct About {
    /// The group, if there is one.
    pub group: Option<GroupId>,
    /// The rollout and its attempt; none: the whole group.
    pub member: Option<(RolloutId, u32)>,
}

impl About {
    /// A rollout.
    pub(super) fn of(rollout: &RolloutRef) -> Self {
        Self { group: rollout.group.clone(), member: Some((rollout.rollout.clone(), rollout.attempt)) }
    }
}

/// What was left out and not told yet.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Owed {
    no_rows: u64,
    too_long: u64,
    not_retained: u64,
    late: u64,
    groups_dropped: u64,
}

/// Room in a consumer's line that such news leave to units and to what must be told.
const ROOM_KEPT: usize = 192;

impl Owed {
    fn of(&mut self, what: LeftOut) -> &mut u64 {
        match what {
            LeftOut::NoRows(_) => &mut self.no_rows,
            LeftOut::TooLong(_) => &mut self.too_long,
            LeftOut::NotRetained(_) => &mut self.not_retained,
            LeftOut::Late(_) => &mut self.late,
            LeftOut::GroupsDropped(..) => &mut self.groups_dropped,
        }
    }

    fn take(&mut self) -> impl Iterator<Item = LeftOut> {
        let Self { no_rows, too_long, not_retained, late, groups_dropped } = std::mem::take(self);
        let all = [
            (no_rows, LeftOut::NoRows(no_rows)),
            (too_long, LeftOut::TooLong(too_long)),
            (not_retained, LeftOut::NotRetained(not_retained)),
            (late, LeftOut::Late(late)),
            (groups_dropped, LeftOut::GroupsDropped(groups_dropped, None)),
        ];
        all.into_iter().filter(|(count, _)| *count > 0).map(|(_, what)| what)
    }
}

impl Owed {
    /// What whoever makes a consumer group is told first.
    pub(super) fn to_the_first(not_retained: u64) -> Self {
        Self { not_retained, ..Self::default() }
    }
}

impl LeftOut {
    fn count(self) -> u64 {
        match self {
            Self::NoRows(rollouts) | Self::NotRetained(rollouts) | Self::Late(rollouts) => rollouts,
            Self::TooLong(calls) => calls,
            Self::GroupsDropped(groups, _) => groups,
        }
    }

    fn with(self, count: u64) -> Self {
        match self {
            Self::NoRows(_) => Self::NoRows(count),
            Self::TooLong(_) => Self::TooLong(count),
            Self::NotRetained(_) => Self::NotRetained(count),
            Self::Late(_) => Self::Late(count),
            Self::GroupsDropped(groups, why) => Self::GroupsDropped(count, why.filter(|_| groups == count)),
        }
    }
}

impl Sequencer {
    /// Tells the members of a consumer group what it is not given of a rollout.
    pub(super) fn tell_left_out(&mut self, run: &RunId, consumer_group: &str, about: &About, what: LeftOut) {
        for id in self.members(run, consumer_group) {
            let Some(member) = self.consumers.get_mut(&id) else { continue };
            let owed = member.owed.of(what);
            *owed += what.count();
            if member.sender.capacity() <= ROOM_KEPT {
                continue;
            }
            let (all, alone) = (*owed, *owed == what.count());
            *owed = 0;
            let news = ToConsumer::LeftOut { what: what.with(all), about: alone.then(|| about.clone()) };
            // There is room, so only a line that has ended does not take it.
            let _ = member.sender.try_send(news);
        }
    }

    /// Tells a consumer what it could not be told before.
    pub(super) fn tell_owed(&mut self, id: ConsumerId) {
        let Some(member) = self.consumers.get_mut(&id).filter(|member| member.sender.capacity() > ROOM_KEPT) else {
            return;
        };
        for what in member.owed.take() {
            let _ = member.sender.try_send(ToConsumer::LeftOut { what, about: None });
        }
    }

    /// The rollout and attempt that a unit is of.
    pub(super) fn rollout_of(&self, unit: &UnitId) -> Option<RolloutRef> {
        let (run, rollout, attempt) = crate::ids::unit_source(unit.as_str())?;
        let key = RolloutKey { run: run.clone(), rollout: rollout.clone() };
        let entry = self.store.entry(&key);
        let group = entry.and_then(|entry| match &*entry.slot.lock() {
            Slot::Live(live) if live.attempt == attempt => live.rollout.facts().group.clone(),
            Slot::Ended(ended, _) if ended.attempt == attempt => ended.group.clone(),
            Slot::Live(_) | Slot::Ended(..) | Slot::Removed => None,
        });
        Some(RolloutRef { run, group, rollout, attempt })
    }
}
