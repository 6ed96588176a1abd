//! Opening rollouts: what needs more than the rollout itself to judge.

use std::collections::HashMap;
use std::sync::Arc;

use crate::error::{Reason, Refusal};
use crate::ids::{GroupId, RolloutRef, RunId};
use crate::limits;
use crate::log::{Position, Record};
use crate::rollout::Rollout;
use crate::rollout::event::RolloutRecord;
use crate::telemetry::{EndReason, RolloutEnd};

use super::super::effect::Outcome;
use super::super::report::{attempt_superseded, newer_attempt_too_late};
use super::super::{Entry, Live, OpenFacts, RolloutKey, Slot};
use super::{Admission, RunState, Sequencer};

impl Sequencer {
    /// Opens a rollout, or a newer attempt, or has one join its group; or says why not.
    pub(super) fn admit(&mut self, admission: &Admission) -> Result<(), Refusal> {
        let reference = &admission.reference;
        let key = reference.key();
        if self.store.is_draining() {
            let message = "the service is about to stop; connect again after the delay";
            return Err(Refusal::new(Reason::Draining, message).retry_after_ms(1000));
        }
        let entry = self.store.entry(&key);
        let Some(entry) = entry else {
            self.judge_opening(admission)?;
            let position = self.log_opening(reference);
            return self.open(&key, reference, position, admission.group_size);
        };
        let mut slot = entry.slot.lock();
        match &mut *slot {
            Slot::Live(live) if live.attempt == reference.attempt => self.join_group(&key, live, admission),
            Slot::Live(live) if live.attempt > reference.attempt => Err(attempt_superseded(live.attempt)),
            Slot::Live(live) if live.rollout.finalised().is_some() => Err(newer_attempt_too_late(live.attempt)),
            Slot::Live(live) => {
                let old_group = live.rollout.facts().group.clone();
                if let (Some(old), Some(new)) = (&old_group, &reference.group)
                    && old != new
                {
                    let message = format!("the older attempt is in group {old:?}, not {new:?}");
                    return Err(Refusal::new(Reason::GroupConflict, message).field("rollout.group_id"));
                }
                drop(slot);
                self.judge_opening(admission)?;
                let position = self.log_opening(reference);
                self.open(&key, reference, position, admission.group_size)
            }
            Slot::Ended(ended, _) if ended.attempt >= reference.attempt => Ok(()),
            Slot::Ended(ended, _) if ended.outcome == Outcome::Retired => Err(newer_attempt_too_late(ended.attempt)),
            Slot::Ended(..) | Slot::Removed => {
                drop(slot);
                self.judge_opening(admission)?;
                let position = self.log_opening(reference);
                self.open(&key, reference, position, admission.group_size)
            }
        }
    }

    /// Makes the run if need be, and asks its group.
    fn judge_opening(&mut self, admission: &Admission) -> Result<(), Refusal> {
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
        let run = self.run_or_new(&reference.run)?;
        match &reference.group {
            Some(id) => judge_group(run, id, reference, admission.group_size),
            None => Ok(()),
        }
    }

    fn log_opening(&self, reference: &RolloutRef) -> Position {
        let settings_version = self.runs.get(&reference.run).map_or(1, RunState::settings_version);
        let record = Record::RolloutOpened {
            run: reference.run.clone(),
            rollout: reference.rollout.clone(),
            attempt: reference.attempt,
            group: reference.group.clone(),
            settings_version,
        };
        self.log(&record, None)
    }

    /// Puts a new attempt into the store; an older one is superseded. Live and in replay.
    pub(in crate::store) fn open(
        &mut self,
        key: &RolloutKey,
        reference: &RolloutRef,
        position: Position,
        group_size: Option<u32>,
    ) -> Result<(), Refusal> {
        let (now_ms, unix_ms) = (self.store.clock.now_ms(), self.store.clock.unix_ms());
        let run = self.run_or_new(&key.run)?;
        let settings = Arc::clone(&run.settings_now().rollout);
        let live = Live {
            attempt: reference.attempt,
            run: Arc::clone(&run.shared),
            rollout: Rollout::new(settings, reference.group.clone(), now_ms),
            settings_version: run.settings_version(),
            opened_unix_ms: unix_ms,
            heard_unix_ms: unix_ms,
            finalised_unix_ms: None,
            refused_requests: 0,
            last_position: position,
            reporters: HashMap::new(),
        };
        if let Some(group) = &reference.group {
            run.groups.entry(group.clone()).or_default().opened(&key.rollout, group_size);
        }
        let shared = Arc::clone(&run.shared);
        let entry = self.store.rollouts.entry(key.clone()).or_insert_with(|| Entry::new(Slot::Removed)).clone();
        let mut slot = entry.slot.lock();
        let before = match &*slot {
            Slot::Live(old) => OpenFacts::of(&old.rollout),
            Slot::Ended(..) | Slot::Removed => None,
        };
        if let Slot::Live(old) = &*slot {
            shared.metrics.rollout_ended(RolloutEnd::Superseded);
            let gone = old.rollout.facts().forest.call_count() as u64;
            self.calls_gone(&key.run, EndReason::Superseded, gone);
        }
        shared.counts.moved(before, OpenFacts::of(&live.rollout));
        self.store.set_timer(key, &entry, &live);
        *slot = Slot::Live(Box::new(live));
        shared.metrics.rollout_opened();
        Ok(())
    }

    /// A live rollout is said to be in a group, or its group to have a size.
    fn join_group(&mut self, key: &RolloutKey, live: &mut Live, admission: &Admission) -> Result<(), Refusal> {
        let reference = &admission.reference;
        let group = match (&live.rollout.facts().group, &reference.group) {
            (Some(known), Some(said)) if known != said => return Ok(()),
            (Some(known), _) => known.clone(),
            (None, Some(said)) => said.clone(),
            (None, None) if admission.group_size.is_some() => {
                let message = "a group_size needs a group: set rollout.group_id";
                return Err(Refusal::new(Reason::InvalidValue, message).field("open.group_size"));
            }
            (None, None) => return Ok(()),
        };
        let run = self.run_or_new(&key.run)?;
        judge_group(run, &group, reference, admission.group_size)?;
        let joined = live.rollout.facts().group.is_none() && live.rollout.finalised().is_none();
        let of_group = run.groups.entry(group.clone()).or_default();
        if joined {
            of_group.opened(&key.rollout, admission.group_size);
            let record = RolloutRecord::Group(group);
            let logged = Record::Rollout {
                run: key.run.clone(),
                rollout: key.rollout.clone(),
                attempt: live.attempt,
                record: record.clone(),
            };
            live.last_position = self.log(&logged, None);
            live.rollout.apply(record, self.store.clock.now_ms());
        } else {
            of_group.said_size(admission.group_size);
        }
        Ok(())
    }

    /// In replay: what a rollout's record says of its group.
    pub(in crate::store) fn replay_group(
        &mut self,
        run: &RunId,
        group: &GroupId,
        key: &RolloutKey,
        size: Option<u32>,
        joins: bool,
    ) {
        if let Some(run) = self.runs.get_mut(run) {
            let group = run.groups.entry(group.clone()).or_default();
            if joins { group.opened(&key.rollout, size) } else { group.said_size(size) }
        }
    }
}

fn judge_group(run: &RunState, id: &GroupId, reference: &RolloutRef, size: Option<u32>) -> Result<(), Refusal> {
    match run.groups.get(id) {
        Some(group) => group.judge(id, &reference.rollout, size),
        None => Ok(()),
    }
}
