//! Opening rollouts: what needs more than the rollout itself to judge.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use crate::error::{Reason, Refusal};
use crate::group::{Group, GroupRules};
use crate::ids::{ConsumerGroupId, GroupId, RolloutRef, RunId};
use crate::limits;
use crate::log::{Position, Record};
use crate::rollout::Rollout;
use crate::rollout::event::RolloutRecord;
use crate::rollout::settings::RolloutSettings;
use crate::telemetry::RolloutEnd;

use super::super::effect::{Outcome, Sequenced};
use super::super::evict::Tokens;
use super::super::memory::{Growth, Share};
use super::super::report::{attempt_superseded, newer_attempt_too_late};
use super::super::{Entry, Live, OpenFacts, RolloutKey, Run, Slot, figures};
use super::{Admission, Admitted, RunState, Sequencer};

impl Sequencer {
    /// Opens a rollout, or a newer attempt, or has one join its group; or says why not.
    pub(super) fn admit(&mut self, admission: &Admission) -> Result<Admitted, Refusal> {
        let reference = &admission.reference;
        let key = reference.key();
        self.judge_draining()?;
        let Some(entry) = self.store.entry(&key) else { return self.admit_new(&key, admission, None, false) };
        let mut slot = entry.slot.lock();
        let replaces_open = matches!(&*slot, Slot::Live(_));
        let old_group = match &mut *slot {
            Slot::Live(live) if live.attempt == reference.attempt => return self.join_group(&key, live, admission),
            Slot::Live(live) if live.attempt > reference.attempt => return Err(attempt_superseded(live.attempt)),
            Slot::Live(live) if live.rollout.finalised().is_some() => return Err(newer_attempt_too_late(live.attempt)),
            Slot::Live(live) => live.rollout.facts().group.clone(),
            Slot::Ended(ended, _) if ended.attempt >= reference.attempt => return Ok(Admitted::Known),
            Slot::Ended(ended, _) if ended.outcome == Outcome::Retired => {
                return Err(newer_attempt_too_late(ended.attempt));
            }
            Slot::Ended(ended, _) if ended.is_final => return Ok(Admitted::Known),
            Slot::Ended(ended, _) => ended.group.clone(),
            Slot::Removed => None,
        };
        drop(slot);
        self.admit_new(&key, admission, old_group, replaces_open)
    }

    /// Nothing begins in a service that is about to stop.
    pub(super) fn judge_draining(&self) -> Result<(), Refusal> {
        if !self.store.is_draining() {
            return Ok(());
        }
        let message = "the service is about to stop; connect again after the delay";
        Err(Refusal::new(Reason::Draining, message).retry_after_ms(1000))
    }

    /// Opens an attempt. It is in the group of the attempt before it, if that was in one.
    fn admit_new(
        &mut self,
        key: &RolloutKey,
        admission: &Admission,
        old_group: Option<GroupId>,
        replaces_open: bool,
    ) -> Result<Admitted, Refusal> {
        let mut admission = admission.clone();
        if let (Some(old), Some(new)) = (&old_group, &admission.reference.group)
            && old != new
        {
            let message = format!("the older attempt is in group {old:?}, not {new:?}; the first value stands");
            return Err(Refusal::new(Reason::GroupConflict, message).field("rollout.group_id"));
        }
        admission.reference.group = admission.reference.group.or(old_group);
        self.judge_opening(&admission, replaces_open)?;
        let rules = self.rules_of(&admission.reference);
        let position = self.log_opening(&admission.reference, rules);
        self.open(key, &admission.reference, position, rules)?;
        if let (Some(group), Some(size)) = (&admission.reference.group, admission.group_size) {
            self.say_group_size(&key.run, group, size);
        }
        Ok(Admitted::Opened)
    }

    /// Makes the run if need be, and asks its group.
    fn judge_opening(&mut self, admission: &Admission, replaces_open: bool) -> Result<(), Refusal> {
        let reference = &admission.reference;
        if self.store.rollouts.len() >= limits::ROLLOUTS_MAX {
            let message = format!(
                "the service holds {} rollouts; it takes more when trainers have taken some",
                limits::ROLLOUTS_MAX
            );
            return Err(Refusal::new(Reason::ServiceFull, message).retry_after_ms(1000));
        }
        if admission.group_size.is_some() && reference.group.is_none() {
            let message = "a group_size needs a group: set rollout.group_id";
            return Err(Refusal::new(Reason::InvalidValue, message).field("open.group_size"));
        }
        let is_awaited = replaces_open || self.knows_group(reference);
        self.store.memory().judge_opening(is_awaited)?;
        self.store.judge_log_room(Growth::GoesOn)?;
        let run = self.run_or_new(&reference.run)?;
        if let Some(id) = &reference.group {
            run.groups.judge_released(id)?;
            judge_group(run, id, reference, admission.group_size)?;
        }
        let is_first = !replaces_open && !run.rollouts.contains(&reference.rollout);
        if is_first && reference.group.as_ref().is_none_or(|group| run.groups.get(group).is_none()) {
            run.judge_lead()?;
        }
        Ok(())
    }

    /// Whether others wait for what is opened in this group.
    fn knows_group(&self, reference: &RolloutRef) -> bool {
        let group = |run: &RunState| reference.group.as_ref().is_some_and(|group| run.groups.get(group).is_some());
        self.runs.get(&reference.run).is_some_and(group)
    }

    /// What is decided about the group of a rollout that is opened: as it is, or by the run's settings now if it begins with it.
    fn rules_of(&self, reference: &RolloutRef) -> GroupRules {
        let (Some(run), Some(group)) = (self.runs.get(&reference.run), &reference.group) else {
            return GroupRules::default();
        };
        run.groups.get(group).map_or_else(|| run.settings_now().group_rules(), |group| *group.rules())
    }

    fn log_opening(&self, reference: &RolloutRef, rules: GroupRules) -> Position {
        let run = self.runs.get(&reference.run);
        let settings_version = run.map_or(1, RunState::settings_version);
        let group = reference.group.as_ref().and_then(|group| run?.groups.get(group));
        let record = Record::RolloutOpened {
            run: reference.run.clone(),
            rollout: reference.rollout.clone(),
            attempt: reference.attempt,
            group: reference.group.clone(),
            settings_version,
            group_size: group.and_then(Group::size),
            group_rules: rules.are_released().then_some(rules),
        };
        self.log(&record, None)
    }

    /// Puts a new attempt into the store; an older one is superseded. Live and in replay.
    pub(in crate::store) fn open(
        &mut self,
        key: &RolloutKey,
        reference: &RolloutRef,
        position: Position,
        rules: GroupRules,
    ) -> Result<(), Refusal> {
        self.open_with(key, reference, position, (None, rules))
    }

    /// The same, with these settings of this version instead of the run's. The rules are those of its group, if it begins now.
    pub(super) fn open_with(
        &mut self,
        key: &RolloutKey,
        reference: &RolloutRef,
        position: Position,
        (settings, rules): (Option<(u64, Arc<RolloutSettings>)>, GroupRules),
    ) -> Result<(), Refusal> {
        let (now_ms, unix_ms) = (self.store.clock.now_ms(), self.store.unix_ms());
        let share = self.store.memory().share(&key.run, position, now_ms);
        let run = self.run_or_new(&key.run)?;
        let of_run = || (run.settings_version(), Arc::clone(&run.settings_now().rollout));
        let settings = settings.unwrap_or_else(of_run);
        let mut live = Live::opened(reference, &run.shared, settings, share, (now_ms, unix_ms));
        live.measure();
        run.rollouts.insert(key.rollout.clone());
        if let Some(group) = &reference.group {
            run.shared.watchers.group_changes(group);
            run.groups.member_opened(group, (now_ms, unix_ms), (&key.rollout, reference.attempt), rules);
        }
        let shared = Arc::clone(&run.shared);
        if run.groups.may_have_due() {
            // The time of its group counts from now on.
            self.stirred.insert(key.run.clone());
        }
        self.needed.opened(position, key);
        let entry = self.store.rollouts.entry(key.clone()).or_insert_with(|| Entry::new(Slot::Removed)).clone();
        let mut slot = entry.slot.lock();
        shared.watchers.rollout_changes(&key.rollout, reference.group.as_ref());
        // Who watches compares positions: this change comes after the records that were there before it.
        live.last_position = live.last_position.max(self.store.journal.last());
        let before = match &*slot {
            Slot::Live(old) => OpenFacts::of(&old.rollout),
            Slot::Ended(..) | Slot::Removed => None,
        };
        let mut superseded = None;
        if let Slot::Live(old) = &*slot {
            let (run, home) = (key.run.clone(), old.share.home());
            let calls = old.rollout.facts().forest.call_count() as u64;
            superseded = Some(Sequenced::Superseded { run, home, calls });
            shared.metrics.rollout_ended(RolloutEnd::Superseded);
            figures::deltas_changed(&shared.metrics, figures::deltas_of(old), (0, 0));
        }
        shared.counts.moved(before, OpenFacts::of(&live.rollout));
        self.store.set_timer(key, &entry, &live);
        *slot = Slot::Live(Box::new(live));
        drop(slot);
        shared.metrics.rollout_opened();
        match superseded {
            Some(effect) if self.store.is_replaying() => self.apply(position, effect),
            // It counts when the opening is durable, like all other ends.
            Some(effect) => self.store.journal.after_last(effect),
            None => {}
        }
        Ok(())
    }

    /// A live rollout is said to be in a group, or its group to have a size.
    fn join_group(&mut self, key: &RolloutKey, live: &mut Live, admission: &Admission) -> Result<Admitted, Refusal> {
        let reference = &admission.reference;
        let group = match (&live.rollout.facts().group, &reference.group) {
            (Some(known), Some(said)) if known != said => return Ok(Admitted::Known),
            (Some(known), _) => known.clone(),
            (None, Some(said)) => said.clone(),
            (None, None) if admission.group_size.is_some() => {
                let message = "a group_size needs a group: set rollout.group_id";
                return Err(Refusal::new(Reason::InvalidValue, message).field("open.group_size"));
            }
            (None, None) => return Ok(Admitted::Known),
        };
        let now = (self.store.clock.now_ms(), self.store.unix_ms());
        let run = self.run_or_new(&key.run)?;
        judge_group(run, &group, reference, admission.group_size)?;
        let joined = live.rollout.facts().group.is_none() && live.rollout.finalised().is_none();
        if joined {
            run.groups.judge_released(&group)?;
            let rules = run.groups.get(&group).map_or_else(|| run.settings_now().group_rules(), |known| *known.rules());
            run.shared.watchers.rollout_changes(&key.rollout, Some(&group));
            run.shared.watchers.group_changes(&group);
            run.groups.member_opened(&group, now, (&key.rollout, live.attempt), rules);
            if run.groups.may_have_due() {
                self.stirred.insert(key.run.clone());
            }
            let record = RolloutRecord::Group(group.clone());
            let logged = Record::Rollout {
                run: key.run.clone(),
                rollout: key.rollout.clone(),
                attempt: live.attempt,
                record: record.clone(),
            };
            live.last_position = self.log(&logged, None);
            let before = OpenFacts::of(&live.rollout);
            live.rollout.apply(record, self.store.clock.now_ms());
            live.run.counts.moved(before, OpenFacts::of(&live.rollout));
            if self.store.keeps_records() {
                live.positions.push(live.last_position);
            }
            self.repeat_group(&key.run, &group);
        }
        if let Some(size) = admission.group_size {
            self.say_group_size(&key.run, &group, size);
        }
        Ok(if joined { Admitted::Joined } else { Admitted::Known })
    }

    /// What is said first of a group's size is a record of its own: others are judged by it, whatever becomes of the event that
    /// said it.
    fn say_group_size(&mut self, run: &RunId, group: &GroupId, size: u32) {
        let known = self.runs.get(run).and_then(|run| run.groups.get(group)?.size());
        if known.is_none() {
            self.log(&Record::GroupSize { run: run.clone(), group: group.clone(), size }, None);
            self.apply_group_size(run, group, size);
        }
    }

    /// A rollout has joined a group whose size may have been said before the rollout was opened: once more, for a log that
    /// begins there.
    fn repeat_group(&self, run: &RunId, group: &GroupId) {
        if let Some(size) = self.runs.get(run).and_then(|run| run.groups.get(group)?.size()) {
            self.log(&Record::GroupSize { run: run.clone(), group: group.clone(), size }, None);
        }
        self.repeat_release(run, group);
    }

    /// A group has a size. Live and in replay.
    pub(in crate::store) fn apply_group_size(&mut self, run_id: &RunId, group: &GroupId, size: u32) {
        if let Some(run) = self.runs.get_mut(run_id) {
            run.shared.watchers.group_changes(group);
            run.groups.make(group, (self.store.clock.now_ms(), self.store.unix_ms()), GroupRules::default());
            run.groups.change(group, |group| group.said_size(size));
            self.stirred.insert(run_id.clone());
        }
    }

    /// In replay: an attempt at a rollout joins a group.
    pub(in crate::store) fn replay_joined(&mut self, key: &RolloutKey, attempt: u32, group: &GroupId) {
        if let Some(run) = self.runs.get_mut(&key.run) {
            let now = (self.store.clock.now_ms(), self.store.unix_ms());
            // What is decided about it stands behind, if it is to be released.
            run.groups.member_opened(group, now, (&key.rollout, attempt), GroupRules::default());
        }
    }
}

impl Live {
    /// An attempt that is opened at this time: of the store's clock, and milliseconds since the Unix epoch.
    fn opened(
        reference: &RolloutRef,
        run: &Arc<Run>,
        (settings_version, settings): (u64, Arc<RolloutSettings>),
        share: Arc<Share>,
        (now_ms, unix_ms): (u64, u64),
    ) -> Self {
        Self {
            attempt: reference.attempt,
            run: Arc::clone(run),
            rollout: Rollout::new(settings, reference.group.clone(), now_ms),
            settings_version,
            positions: Vec::new(),
            opened_unix_ms: unix_ms,
            heard_unix_ms: unix_ms,
            finalised: None,
            used_ms: now_ms,
            tokens: Tokens::Here(None),
            is_awaited: false,
            refused_requests: 0,
            last_position: share.opened(),
            reporters: BTreeMap::new(),
            share,
            texts_bytes: texts_bytes(reference),
        }
    }
}

/// Bytes of the ids that a rollout is known by.
fn texts_bytes(reference: &RolloutRef) -> u64 {
    let group = reference.group.as_ref().map_or(0, |group| group.as_str().len());
    (reference.run.as_str().len() + reference.rollout.as_str().len() + group) as u64
}

impl RunState {
    /// How many groups, and rollouts without one, are open, await their release, or wait in the slowest of the consumer groups that
    /// are required; none, if the run has no bound for that. Those whose units are all out, acknowledged or dropped do not count.
    pub(super) fn lead_groups(&self) -> Option<u64> {
        let settings = self.settings_now();
        settings.max_lead_groups?;
        let open = self.groups.ahead();
        let waiting = |name: &ConsumerGroupId| {
            let group = self.queue.group(name.as_str());
            group.map_or(0, |group| group.waiting_families().filter(|family| !open.contains(family)).count() as u64)
        };
        let slowest = settings.required_consumer_groups.iter().map(waiting).max().unwrap_or(0);
        Some(open.len() as u64 + self.shared.counts.alone.load(Ordering::Relaxed) + slowest)
    }

    /// Whether one more group may be opened (RULES section 7).
    fn judge_lead(&self) -> Result<(), Refusal> {
        let (Some(most), Some(lead)) = (self.settings_now().max_lead_groups, self.lead_groups()) else { return Ok(()) };
        if lead < u64::from(most) {
            return Ok(());
        }
        let message = format!(
            "{lead} groups are open or wait for the slowest required consumer group, and max_lead_groups is {most}; members of \
             groups that are open are taken, and a new group when trainers have taken some"
        );
        Err(Refusal::new(Reason::LeadFull, message).retry_after_ms(limits::LEAD_RETRY_AFTER_MS))
    }
}

fn judge_group(run: &RunState, id: &GroupId, reference: &RolloutRef, size: Option<u32>) -> Result<(), Refusal> {
    match run.groups.get(id) {
        Some(group) => group.judge(id, &reference.rollout, size),
        None if run.groups.len() < limits::RUN_GROUPS_MAX => Ok(()),
        None => {
            let message = format!(
                "the run has {} groups, open or remembered, as many as it may; old ones are forgotten with time",
                limits::RUN_GROUPS_MAX
            );
            Err(Refusal::new(Reason::ServiceFull, message).field("rollout.group_id").retry_after_ms(60_000))
        }
    }
}
