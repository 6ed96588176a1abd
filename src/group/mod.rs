//! The rollouts of one prompt. Pure.
//!
//! A [`Group`] knows its size, if somebody said it, and its members: which are open, finalised, or out. It judges whether
//! one more may join. In this release groups give no credit and hold no rows back.
//!
//! Never does: forget a member while another is remembered. A discarded member keeps its place: for good, or for its next attempt.

use std::collections::BTreeMap;
use std::ops::Bound;

use crate::error::{Reason, Refusal};
use crate::ids::{GroupId, RolloutId};

/// Where a member stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Member {
    /// It takes events.
    Open,
    /// Its rows are made.
    Finalised,
    /// It was discarded for good.
    Out,
    /// It was discarded, and its next attempt will come.
    WillRetry,
}

impl Member {
    /// Whether something of it is still to come.
    fn is_unfinished(self) -> bool {
        match self {
            Self::Open | Self::WillRetry => true,
            Self::Finalised | Self::Out => false,
        }
    }
}

/// The rollouts of one prompt.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Group {
    size: Option<u32>,
    members: BTreeMap<RolloutId, Standing>,
    /// Members that are open, or whose next attempt will come.
    unfinished: usize,
    /// Members that are open.
    open: usize,
    /// Members of which at least a tombstone is there.
    remembered: usize,
}

/// A member, at its latest attempt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Standing {
    attempt: u32,
    member: Member,
    remembered: bool,
}

impl Group {
    /// How many members it has when it is whole, if somebody said so.
    #[must_use]
    pub fn size(&self) -> Option<u32> {
        self.size
    }

    /// Its members by id, with the latest attempt of each and where that stands.
    pub fn members(&self) -> impl Iterator<Item = (&RolloutId, u32, Member)> {
        self.members.iter().map(|(rollout, standing)| (rollout, standing.attempt, standing.member))
    }

    /// Its members after this one, by id.
    pub fn members_after(&self, after: Option<&RolloutId>) -> impl Iterator<Item = &RolloutId> {
        let start = after.map_or(Bound::Unbounded, Bound::Excluded);
        self.members.range::<RolloutId, _>((start, Bound::Unbounded)).map(|(rollout, _)| rollout)
    }

    /// Where a rollout stands in it, at its latest attempt.
    #[must_use]
    pub fn member(&self, rollout: &RolloutId) -> Option<Member> {
        self.members.get(rollout).map(|standing| standing.member)
    }

    /// How many members it has.
    #[must_use]
    pub fn member_count(&self) -> usize {
        self.members.len()
    }

    /// Whether this rollout may be a member, and the group have this size.
    ///
    /// # Errors
    /// If the group has another size, or no place.
    pub fn judge(&self, id: &GroupId, rollout: &RolloutId, size: Option<u32>) -> Result<(), Refusal> {
        let members = self.members.len() + usize::from(!self.members.contains_key(rollout));
        if let (Some(known), Some(said)) = (self.size, size)
            && known != said
        {
            let message = format!("group {id:?} has {known} rollouts, not {said}; the first value stands");
            return Err(Refusal::new(Reason::GroupSizeConflict, message).field("open.group_size"));
        }
        match self.size.or(size) {
            Some(size) if members > size as usize => {
                let message = format!("group {id:?} has its {size} rollouts; open this one in another group");
                Err(Refusal::new(Reason::GroupFull, message).field("rollout.group_id"))
            }
            Some(_) | None => Ok(()),
        }
    }

    /// An attempt at a member was opened; true for its first.
    pub fn opened(&mut self, rollout: &RolloutId, attempt: u32) -> bool {
        let standing = Standing { attempt, member: Member::Open, remembered: true };
        let before = self.members.insert(rollout.clone(), standing);
        self.unfinished += usize::from(!before.is_some_and(|before| before.member.is_unfinished()));
        self.open += usize::from(!before.is_some_and(|before| before.member == Member::Open));
        self.remembered += usize::from(!before.is_some_and(|before| before.remembered));
        before.is_none()
    }

    /// Somebody said its size; the first value stands.
    pub fn said_size(&mut self, size: u32) {
        self.size = self.size.or(Some(size));
    }

    /// An attempt at a member is not open any more. Says nothing of the member if a newer attempt was opened meanwhile.
    pub fn closed(&mut self, rollout: &RolloutId, attempt: u32, now: Member) {
        if let Some(standing) = self.members.get_mut(rollout)
            && standing.attempt == attempt
        {
            self.unfinished -= usize::from(standing.member.is_unfinished());
            self.unfinished += usize::from(now.is_unfinished());
            self.open -= usize::from(standing.member == Member::Open);
            self.open += usize::from(now == Member::Open);
            standing.member = now;
        }
    }

    /// The tombstone of an attempt at a member is gone. True if no member is remembered any more: then the group is to be
    /// forgotten too, whether it is whole or not.
    pub fn forgotten(&mut self, rollout: &RolloutId, attempt: u32) -> bool {
        if let Some(standing) = self.members.get_mut(rollout)
            && standing.attempt == attempt
            && standing.remembered
        {
            standing.remembered = false;
            self.remembered -= 1;
        }
        self.remembered == 0
    }

    /// Whether some member is open.
    #[must_use]
    pub fn has_open_member(&self) -> bool {
        self.open > 0
    }

    /// Whether nothing more can come of it: it is whole, or its size was never said, and no member is open or to come.
    #[must_use]
    pub fn is_over(&self) -> bool {
        let whole = self.size.is_none_or(|size| self.members.len() >= size as usize);
        whole && self.unfinished == 0
    }
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

    use super::*;

    fn rollout(text: &str) -> RolloutId {
        RolloutId::parse(text).unwrap()
    }

    #[test]
    fn a_group_has_one_size_and_no_more_members_than_that() {
        let id = GroupId::parse("g").unwrap();
        let mut group = Group::default();
        group.opened(&rollout("a"), 0);
        group.opened(&rollout("b"), 0);
        group.said_size(2);
        assert_eq!(group.judge(&id, &rollout("a"), Some(2)), Ok(()));
        assert_eq!(group.judge(&id, &rollout("a"), Some(3)).unwrap_err().reason, Reason::GroupSizeConflict);
        assert_eq!(group.judge(&id, &rollout("c"), None).unwrap_err().reason, Reason::GroupFull);
        group.closed(&rollout("a"), 0, Member::WillRetry);
        group.closed(&rollout("b"), 0, Member::Finalised);
        assert!(!group.is_over());
        assert_eq!(group.judge(&id, &rollout("a"), None), Ok(()));
        group.opened(&rollout("a"), 1);
        group.opened(&rollout("a"), 1);
        assert!(!group.is_over(), "opened twice is opened once");
        assert_eq!(group.members_after(Some(&rollout("a"))).collect::<Vec<_>>(), [&rollout("b")]);
        group.closed(&rollout("a"), 0, Member::Out);
        assert!(!group.is_over(), "the end of an older attempt may be known late");
        group.closed(&rollout("a"), 1, Member::Out);
        assert!(group.is_over());
        assert!(!group.forgotten(&rollout("a"), 0), "an older attempt's tombstone says nothing");
        assert!(!group.forgotten(&rollout("a"), 1) && !group.forgotten(&rollout("a"), 1));
        group.opened(&rollout("a"), 0);
        assert!(!group.forgotten(&rollout("b"), 0), "one was opened again");
        assert!(group.forgotten(&rollout("a"), 0));
    }

    #[test]
    fn a_size_that_its_members_exceed_already_is_refused() {
        let id = GroupId::parse("g").unwrap();
        let mut group = Group::default();
        group.opened(&rollout("a"), 0);
        group.opened(&rollout("b"), 0);
        assert_eq!(group.judge(&id, &rollout("a"), Some(1)).unwrap_err().reason, Reason::GroupFull);
    }
}
