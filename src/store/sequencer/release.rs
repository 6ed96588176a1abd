//! Groups that are released: who decides when, and what members and consumer groups come to by it.
//!
//! A member of a group with an estimator is given to nobody until the group is released; where only some consumer groups take whole
//! groups, these alone wait. The sequencing task looks at a group when something of it has changed, or its time is over, and logs the
//! release with all who are counted. What that means is applied when it is durable, live and in replay alike: the counted members are
//! given out in the order of their ids; all others that are finalised, and those of a dropped group, are counted as dropped.
//!
//! **What a log that begins in the middle knows of a group**: behind the home of each rollout that is remembered, and before
//! whatever needs it, stands what is known of its group. So a rollout's opening says by which rules its group is released, and the
//! rules or the release are written once more before a copy, before tombstones, and when a rollout joins. In such a log some members
//! of a released group may be missing; then all of the group have ended by the end of the log, for they retire by one record.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::error::{Reason, Refusal};
use crate::group::{Decided, GroupRules, Release, ReleasedFor};
use crate::ids::{GroupId, Name, RolloutId, RunId};
use crate::log::{Position, Record};
use crate::queue::{DropReason, GroupDefinition, UnitKind};

use super::super::effect::Sequenced;
use super::groups::{GroupSums, KeptGroup, RunGroups, SumsByPolicy};
use super::news::About;
use super::runs::run_not_found;
use super::{LeftOut, Retained, Sequencer, UnitRows};

/// What a consumer group is given of a finalised rollout.
pub(super) enum Gift {
    /// Nothing before its group is released.
    Later,
    /// Its units, since then: from the beginning, if no release was awaited.
    Units(Position),
    /// Nothing, for this reason, since then.
    Never(DropReason, Position),
}

impl Gift {
    /// What is given of an attempt at a rollout of this group, if it is in one.
    pub(super) fn of(kept: Option<&KeptGroup>, (rollout, attempt): (&RolloutId, u32), unit: UnitKind) -> Self {
        let Some(kept) = kept else { return Self::Units(Position::default()) };
        let (rules, takes_groups) = (kept.group.rules(), unit == UnitKind::Group);
        if !rules.are_released() && takes_groups {
            // Nobody assembled it, and no half of it is given out.
            return Self::Never(DropReason::GroupDropped, Position::default());
        }
        if !rules.hold_all() && !takes_groups {
            return Self::Units(Position::default());
        }
        match kept.group.release() {
            None => Self::Later,
            Some(release) if !release.counts(rollout, attempt) => Self::Never(DropReason::Late, kept.released_at),
            Some(release) if release.dropped().is_some() => Self::Never(DropReason::GroupDropped, kept.released_at),
            Some(_) => Self::Units(kept.released_at),
        }
    }
}

/// The group of a unit that goes out, as it was released.
#[derive(Debug)]
pub struct GroupOfUnit {
    /// The group.
    pub group: GroupId,
    /// Its release.
    pub release: Arc<Release>,
    /// Its rows and trained tokens as the consumer group takes them, by policy.
    pub sums: SumsByPolicy,
}

/// All that a unit holds which is given out with these rows: those of each member if it is a group; each with its group, if it has waited
/// for that.
pub(super) fn whole_unit(
    groups: &mut RunGroups,
    retained: &BTreeMap<u64, Retained>,
    definition: &GroupDefinition,
    rows: UnitRows,
) -> Vec<UnitRows> {
    let takes_groups = definition.unit == UnitKind::Group;
    let about = &rows.about;
    let released = about.group.as_ref().and_then(|id| {
        let kept = groups.kept_mut(id)?;
        let release = Arc::clone(kept.group.release()?);
        let waited = kept.group.rules().hold_all() || takes_groups;
        (waited && release.counts(&about.rollout, about.attempt)).then_some((id.clone(), kept, release))
    });
    let Some((group, kept, release)) = released else { return vec![rows] };
    let counted = |(rollout, number): (&RolloutId, &u64)| {
        let member = retained.get(number).filter(|member| release.counts(rollout, member.attempt))?;
        Some((member.key.clone()?, member))
    };
    let members = || kept.retained.iter().filter_map(counted);
    let sums = match kept.sums.get(&definition.max_row_tokens) {
        Some(sums) => Arc::clone(sums),
        None => Arc::new(sums_of(members().map(|(_, member)| member), definition)),
    };
    let mut all = match takes_groups {
        false => vec![rows],
        true => {
            let all = members().map(|(key, member)| member.rows_for(&key, definition));
            all.filter(|rows| rows.plans.iter().any(|plan| !plan.rows.is_empty())).collect()
        }
    };
    kept.sums.insert(definition.max_row_tokens, Arc::clone(&sums));
    let of_unit = Arc::new(GroupOfUnit { group, release: Arc::clone(&release), sums });
    all.iter_mut().for_each(|rows| rows.group = Some(Arc::clone(&of_unit)));
    all
}

fn sums_of<'a>(members: impl Iterator<Item = &'a Retained>, definition: &GroupDefinition) -> BTreeMap<Name, GroupSums> {
    let of_every_policy = GroupDefinition { policy: None, ..definition.clone() };
    let mut sums: BTreeMap<_, GroupSums> = BTreeMap::new();
    for member in members {
        for plan in member.plans_for(&of_every_policy, &member.finalised.now()) {
            let of_policy = sums.entry(plan.policy.clone()).or_default();
            of_policy.rows += plan.rows.len() as u64;
            of_policy.trained_tokens += plan.rows.iter().map(|row| u64::from(row.trained_tokens)).sum::<u64>();
        }
    }
    sums
}

/// There is no such group.
#[must_use]
pub fn group_not_found(run: &RunId, group: &GroupId) -> Refusal {
    let message = format!("run {run:?} has no group {group:?}, or has forgotten it with its last rollout");
    Refusal::new(Reason::GroupNotFound, message).field("group_id")
}

impl Sequencer {
    /// Logs the release of what can be released by now in a run.
    pub(super) fn release_groups(&mut self, run_id: &RunId) {
        // What comes of a seek is to be about a time before.
        if self.seeking.contains(run_id) {
            return;
        }
        let now_ms = self.store.clock.now_ms();
        let Some(run) = self.runs.get_mut(run_id) else { return };
        for id in run.groups.take_due(now_ms) {
            self.release_if_due(run_id, id, now_ms);
        }
    }

    fn release_if_due(&mut self, run_id: &RunId, group: GroupId, now_ms: u64) {
        let Some(kept) = self.runs.get(run_id).and_then(|run| run.groups.kept(&group)) else { return };
        let its_time_is_over = kept.deadline_ms().is_some_and(|deadline_ms| deadline_ms <= now_ms);
        let Some(released_for) = kept.group.due(its_time_is_over) else { return };
        self.release(run_id, group, released_for);
    }

    /// Releases a group by hand with the members that are finalised. Nothing, if its release has come or is on its way.
    ///
    /// # Errors
    /// If it is not there, or nobody waits for its release.
    pub(super) fn release_by_hand(&mut self, run_id: &RunId, group: GroupId) -> Result<(), Refusal> {
        let run = self.runs.get(run_id).ok_or_else(|| run_not_found(run_id))?;
        let kept = run.groups.kept(&group).ok_or_else(|| group_not_found(run_id, &group))?;
        if !kept.group.rules().are_released() {
            let message = format!(
                "nobody waits for the release of group {group:?}: its run has neither an estimator nor a declared consumer \
                 group that takes whole groups"
            );
            return Err(Refusal::new(Reason::GroupNotAwaited, message).field("group_id"));
        }
        if kept.group.awaits_release() {
            self.release(run_id, group, ReleasedFor::Operator);
        }
        Ok(())
    }

    /// Logs the release of a group that awaits it, unless that is on its way.
    fn release(&mut self, run_id: &RunId, group: GroupId, released_for: ReleasedFor) {
        let Some(kept) = self.runs.get(run_id).and_then(|run| run.groups.kept(&group)) else { return };
        if kept.is_deciding {
            return;
        }
        let decided = kept.group.decide(released_for, |rollout, attempt| self.reason_of_end(run_id, rollout, attempt));
        if let Some(run) = self.runs.get_mut(run_id) {
            run.groups.begin_deciding(&group);
        }
        let (run, decided) = (run_id.clone(), Box::new(decided));
        let record =
            Record::GroupReleased { run: run.clone(), group: group.clone(), decided: decided.clone(), first: None };
        self.log(&record, Some(Sequenced::GroupReleased { run, group, decided, at: None }));
    }

    /// A group was released there, or that is said once more. Live and in replay.
    pub(super) fn group_released(&mut self, run_id: &RunId, id: &GroupId, decided: Decided, at: Position) {
        let now = (self.store.clock.now_ms(), self.store.unix_ms());
        let release = Release::of(decided);
        let (rules, dropped) = (release.decided().rules, release.dropped());
        let Some(run) = self.runs.get_mut(run_id) else { return };
        // It may be the first that is known of it.
        run.groups.make(id, now, rules);
        if !run.groups.released(id, &release, at) {
            return;
        }
        run.shared.watchers.group_changes(id);
        run.shared.metrics.group_released(release.decided().released_for.as_str(), dropped.map(|why| why.as_str()));
        let numbers = self.number_anew(run_id, id, rules.hold_all());
        let waits = |definition: &GroupDefinition| rules.hold_all() || definition.unit == UnitKind::Group;
        self.give(run_id, &numbers, |_, definition| waits(definition));
        for number in numbers {
            self.reconsider(run_id, number);
        }
        if let Some(why) = dropped {
            let Some(run) = self.runs.get(run_id) else { return };
            let concerned = run.queue.groups().filter(|(_, group)| waits(group.definition()));
            let concerned: Vec<String> = concerned.map(|(name, _)| name.to_owned()).collect();
            let about = About { group: Some(id.clone()), member: None };
            for name in concerned {
                self.tell_left_out(run_id, &name, &about, LeftOut::GroupsDropped(1, Some(why)));
            }
        }
        self.stirred.insert(run_id.clone());
    }

    /// The finalised members of a group that is released, in the order of their ids: where all have waited, with new numbers, so that
    /// who comes later is given them in the same order, one after another. Counted ones are held until it is found that they are not.
    fn number_anew(&mut self, run_id: &RunId, id: &GroupId, all_have_waited: bool) -> Vec<u64> {
        let Some(run) = self.runs.get_mut(run_id) else { return Vec::new() };
        let members = run.groups.kept(id).map(|kept| kept.retained.clone()).unwrap_or_default();
        let mut numbers = Vec::with_capacity(members.len());
        for (rollout, before) in members {
            let Some(run) = self.runs.get_mut(run_id) else { break };
            let number = if all_have_waited { run.finalised_count } else { before };
            if all_have_waited && let Some(retained) = run.retained.remove(&before) {
                run.finalised_count += 1;
                let key = retained.key.clone();
                run.retained.insert(number, retained);
                run.groups.retains(id, &rollout, Some(number));
                key.iter().for_each(|key| self.has_number(key, number));
            }
            self.is_held_at_first(run_id, id, number);
            numbers.push(number);
        }
        numbers
    }

    /// A counted member of a released group counts as held until its units have been looked at: the others must not end without it.
    pub(super) fn is_held_at_first(&mut self, run_id: &RunId, id: &GroupId, number: u64) {
        let Some(run) = self.runs.get_mut(run_id) else { return };
        let Some(retained) = run.retained.get(&number) else { return };
        let Some(key) = &retained.key else { return };
        let Some(kept) = run.groups.kept_mut(id) else { return };
        if kept.stays_together(&key.rollout, retained.attempt) {
            kept.held.insert(number);
        }
    }

    /// Writes once more what is known of a group that is to be released, or was.
    pub(super) fn repeat_release(&self, run_id: &RunId, id: &GroupId) {
        let Some(kept) = self.runs.get(run_id).and_then(|run| run.groups.kept(id)) else { return };
        let (run, group) = (run_id.clone(), id.clone());
        let record = match kept.group.release() {
            Some(release) => {
                let decided = Box::new(release.decided().clone());
                Record::GroupReleased { run, group, decided, first: Some(kept.released_at) }
            }
            None if kept.group.awaits_release() => Record::GroupRules { run, group, rules: *kept.group.rules() },
            None => return,
        };
        self.log(&record, None);
    }

    /// What is decided about a group. Only in replay.
    pub(in crate::store) fn replay_group_rules(&mut self, run: &RunId, id: &GroupId, rules: GroupRules) {
        let now = (self.store.clock.now_ms(), self.store.unix_ms());
        if let Some(run) = self.runs.get_mut(run) {
            run.groups.make(id, now, rules);
            run.groups.change(id, |group| group.has_rules(rules));
        }
    }

    /// All was read: groups without members come to nothing, and the others are looked at, whether they can be released.
    pub(in crate::store) fn groups_are_read(&mut self) {
        for (id, run) in &mut self.runs {
            run.groups.remove_empty();
            if run.groups.may_have_due() {
                self.stirred.insert(id.clone());
            }
        }
    }
}

impl KeptGroup {
    /// Whether this attempt ends with the others of its group, and not before: it was given out with them.
    pub(super) fn stays_together(&self, rollout: &RolloutId, attempt: u32) -> bool {
        let release = self.group.release().filter(|release| release.dropped().is_none());
        release.is_some_and(|release| release.counts(rollout, attempt))
    }
}
