//! The rollouts of one prompt, compared with each other. Pure.
//!
//! A [`Group`] knows its size, if somebody said it, and its members: which are open, finalised with which reward, or out. It
//! judges whether one more may join, says when it can be released by its run's rules, and with whom ([`release`]); what rewards
//! come to is in [`estimate`].
//!
//! A group whose size was never said is never whole, for more may come: it waits for a quorum, or until its time is over.
//!
//! Never does: forget a member while another is remembered; release twice, or take back a release. A discarded member keeps its
//! place: for good, or for its next attempt. Only a member's newest attempt counts.

pub mod estimate;
pub mod release;

use std::collections::BTreeMap;
use std::ops::Bound;
use std::sync::Arc;

use crate::error::{Reason, Refusal};
use crate::ids::{GroupId, RolloutId};
use crate::limits;

pub use estimate::{Estimator, Statistics};
pub use release::{Absence, Counted, Decided, DroppedFor, GroupRules, Release, ReleasedFor};

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
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Group {
    rules: GroupRules,
    size: Option<u32>,
    release: Option<Arc<Release>>,
    members: BTreeMap<RolloutId, Standing>,
    /// Members that are open, or whose next attempt will come.
    unfinished: usize,
    /// Members that are open.
    open: usize,
    /// Members whose rows are made.
    finalised: usize,
    /// Members of which at least a tombstone is there.
    remembered: usize,
}

/// A member, at its latest attempt.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Standing {
    attempt: u32,
    member: Member,
    remembered: bool,
    /// Of a finalised one, until its group is released.
    reward: f64,
}

impl Group {
    /// A group without members, with these rules.
    #[must_use]
    pub fn new(rules: GroupRules) -> Self {
        Self { rules, ..Self::default() }
    }

    /// What its run decides about it.
    #[must_use]
    pub fn rules(&self) -> &GroupRules {
        &self.rules
    }

    /// Its release, if that has come.
    #[must_use]
    pub fn release(&self) -> Option<&Arc<Release>> {
        self.release.as_ref()
    }

    /// Whether its release is awaited.
    #[must_use]
    pub fn awaits_release(&self) -> bool {
        self.rules.are_released() && self.release.is_none()
    }

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

    /// Whether it still takes attempts at rollouts that are not open in it.
    ///
    /// # Errors
    /// If it was released: nobody would be given their rows.
    pub fn judge_released(&self, id: &GroupId) -> Result<(), Refusal> {
        let Some(release) = &self.release else { return Ok(()) };
        let (what, why) = match release.dropped() {
            Some(dropped) => ("dropped", dropped.as_str()),
            None => ("released", release.decided().released_for.as_str()),
        };
        let message = format!("group {id:?} was {what} ({why}), and takes no rollout any more");
        Err(Refusal::new(Reason::GroupReleased, message).field("rollout.group_id"))
    }

    /// An attempt at a member was opened; true for its first.
    pub fn opened(&mut self, rollout: &RolloutId, attempt: u32) -> bool {
        let standing = Standing { attempt, member: Member::Open, remembered: true, reward: 0.0 };
        let before = self.members.insert(rollout.clone(), standing);
        self.finalised -= usize::from(before.is_some_and(|before| before.member == Member::Finalised));
        self.unfinished += usize::from(!before.is_some_and(|before| before.member.is_unfinished()));
        self.open += usize::from(!before.is_some_and(|before| before.member == Member::Open));
        self.remembered += usize::from(!before.is_some_and(|before| before.remembered));
        before.is_none()
    }

    /// Somebody said its size; the first value stands.
    pub fn said_size(&mut self, size: u32) {
        self.size = self.size.or(Some(size));
    }

    /// An attempt at a member was finalised with this reward.
    pub fn finalised(&mut self, rollout: &RolloutId, attempt: u32, reward: f64) {
        self.closed(rollout, attempt, Member::Finalised);
        let awaits_release = self.awaits_release();
        if let Some(standing) = self.members.get_mut(rollout)
            && standing.attempt == attempt
            && awaits_release
        {
            standing.reward = reward;
        }
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
            self.finalised -= usize::from(standing.member == Member::Finalised);
            self.finalised += usize::from(now == Member::Finalised);
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

    /// Whether it is released, where that is awaited; else whether nothing more can come of it: it is whole, or its size was
    /// never said, and no member is open or to come.
    #[must_use]
    pub fn is_over(&self) -> bool {
        if self.rules.are_released() {
            return self.release.is_some();
        }
        let whole = self.size.is_none_or(|size| self.members.len() >= size as usize);
        whole && self.unfinished == 0
    }

    /// Whether every member is finalised or out for good, and no other can come.
    #[must_use]
    pub fn is_whole(&self) -> bool {
        self.size.is_some_and(|size| self.members.len() >= size as usize) && self.unfinished == 0
    }

    /// Why it can be released now, if it can; its time may be over.
    #[must_use]
    pub fn due(&self, its_time_is_over: bool) -> Option<ReleasedFor> {
        let has_quorum = || self.rules.quorum.is_some_and(|quorum| self.finalised >= quorum as usize);
        match () {
            () if !self.awaits_release() => None,
            () if self.is_whole() => Some(ReleasedFor::Whole),
            () if has_quorum() => Some(ReleasedFor::Quorum),
            () if its_time_is_over => Some(ReleasedFor::Timeout),
            () => None,
        }
    }

    /// The rewards of its finalised members in two numbers, until it is released.
    #[must_use]
    pub fn statistics(&self) -> Statistics {
        if !self.awaits_release() {
            return self.release.as_ref().map(|release| release.statistics()).unwrap_or_default();
        }
        let finalised = self.members.values().filter(|standing| standing.member == Member::Finalised);
        Statistics::of(&finalised.map(|standing| standing.reward).collect::<Vec<_>>())
    }

    /// Its release as it would be now. `reason_of_end` says why an attempt at a member ended.
    #[must_use]
    pub fn decide(&self, released_for: ReleasedFor, reason_of_end: impl Fn(&RolloutId, u32) -> String) -> Decided {
        let (counted, absences, absent) = self.counted_and_absent(reason_of_end);
        Decided { rules: self.rules, released_for, size: self.size, counted, absences, absent }
    }

    /// Who would be counted now, and who is missing, the first few and how many.
    pub fn counted_and_absent(
        &self,
        reason_of_end: impl Fn(&RolloutId, u32) -> String,
    ) -> (Vec<Counted>, Vec<Absence>, u32) {
        let (mut counted, mut absences, mut absent) = (Vec::new(), Vec::new(), 0_u32);
        for (rollout, Standing { attempt, member, reward, .. }) in &self.members {
            let reason = match member {
                Member::Finalised => {
                    counted.push(Counted { rollout: rollout.clone(), attempt: *attempt, reward: *reward });
                    continue;
                }
                Member::Open => None,
                Member::Out | Member::WillRetry => Some(()),
            };
            absent += 1;
            if absences.len() < limits::LISTED_IDS_MAX {
                let member = Some((rollout.clone(), *attempt));
                let of_end = |()| reason_of_end(rollout, *attempt);
                absences.push(Absence { member, reason: reason.map_or(release::NOT_FINALISED.to_owned(), of_end) });
            }
        }
        let members = u32::try_from(self.members.len()).unwrap_or(u32::MAX);
        let never_came = self.size.map_or(0, |size| size.saturating_sub(members));
        let listed = limits::LISTED_IDS_MAX.saturating_sub(absences.len()).min(never_came as usize);
        absences.extend((0..listed).map(|_| Absence { member: None, reason: release::NEVER_CAME.to_owned() }));
        (counted, absences, absent.saturating_add(never_came))
    }

    /// It was released; the first release stands. True if it was this one.
    pub fn released(&mut self, release: &Arc<Release>) -> bool {
        let is_first = self.release.is_none();
        if is_first {
            self.rules = release.decided().rules;
            self.size = self.size.or(release.decided().size);
            self.release = Some(Arc::clone(release));
            // The release has them.
            self.members.values_mut().for_each(|standing| standing.reward = 0.0);
        }
        is_first
    }

    /// It has these rules, as the log says.
    pub fn has_rules(&mut self, rules: GroupRules) {
        if self.release.is_none() {
            self.rules = rules;
        }
    }
}

#[cfg(test)]
mod tests;
