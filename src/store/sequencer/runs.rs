//! Runs: made when first heard of or by hand, changed by version, deleted with all that is in them.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use parking_lot::Mutex;

use crate::error::{Reason, Refusal};
use crate::ids::RunId;
use crate::limits;
use crate::log::{Position, Record};
use crate::queue::{Queue, QueueBounds};
use crate::rollout::run_settings::RunSettings;
use crate::telemetry::{EndReason, RolloutEnd};

use super::super::effect::Sequenced;
use super::super::watch::Watchers;
use super::super::{Entry, RolloutKey, Run, RunCounts, Slot, figures};
use super::figures::RunLedger;
use super::groups::RunGroups;
use super::retention::Retention;
use super::{Retained, RunState, Sequencer, ToConsumer};

/// A run, for who asks.
#[derive(Clone, Debug)]
pub struct RunFacts {
    /// Its settings now.
    pub settings: Arc<RunSettings>,
    /// Their version, from 1.
    pub settings_version: u64,
    /// When it was made, milliseconds since the Unix epoch.
    pub created_unix_ms: u64,
}

/// What was in a run when it was deleted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DeletedRun {
    /// Rollouts that took events.
    pub open_rollouts: u64,
    /// Rows that not every consumer group had acknowledged.
    pub unacknowledged_rows: u64,
}

impl RunState {
    pub(super) fn settings_now(&self) -> &Arc<RunSettings> {
        &self.settings.1
    }

    /// The version of the settings now, from 1.
    pub(super) fn settings_version(&self) -> u64 {
        self.settings.0
    }

    fn facts(&self) -> RunFacts {
        RunFacts {
            settings: Arc::clone(self.settings_now()),
            settings_version: self.settings_version(),
            created_unix_ms: self.shared.created_unix_ms,
        }
    }
}

impl Sequencer {
    /// A run, made with the defaults if it is not there.
    pub(super) fn run_or_new(&mut self, run: &RunId) -> Result<&mut RunState, Refusal> {
        if !self.runs.contains_key(run) {
            self.add_run(run, Arc::new(RunSettings::with_defaults()))?;
        }
        self.runs.get_mut(run).ok_or_else(|| Refusal::new(Reason::Internal, "a run that was just made is gone"))
    }

    pub(super) fn create_run(&mut self, run: &RunId, settings: Arc<RunSettings>) -> Result<RunFacts, Refusal> {
        if let Some(known) = self.runs.get(run) {
            if *known.settings_now() == settings {
                return Ok(known.facts());
            }
            let message = format!("run {run:?} is there with other settings; change it with UpdateRunSettings");
            return Err(Refusal::new(Reason::RunExists, message).field("run_id"));
        }
        self.add_run(run, settings)?;
        self.run_or_new(run).map(|run| run.facts())
    }

    pub(super) fn update_run(
        &mut self,
        run: &RunId,
        settings: Arc<RunSettings>,
        version: u64,
    ) -> Result<RunFacts, Refusal> {
        let Some(state) = self.runs.get(run) else { return Err(run_not_found(run)) };
        let now = state.settings_version();
        if version != 0 && version != now {
            let message = format!("the settings of run {run:?} are at version {now}, not {version}; read them again");
            return Err(Refusal::new(Reason::SettingsVersionConflict, message).field("expected_settings_version"));
        }
        self.log_settings(run, now + 1, settings);
        self.run_or_new(run).map(|run| run.facts())
    }

    fn add_run(&mut self, run: &RunId, settings: Arc<RunSettings>) -> Result<(), Refusal> {
        self.judge_draining()?;
        if self.runs.len() >= limits::RUNS_MAX {
            let message = format!("the service has {} runs, as many as it may; delete one", limits::RUNS_MAX);
            return Err(Refusal::new(Reason::ServiceFull, message).field("run_id"));
        }
        self.log_settings(run, 1, settings);
        Ok(())
    }

    fn log_settings(&mut self, run: &RunId, settings_version: u64, settings: Arc<RunSettings>) {
        let record = Record::Run { run: run.clone(), settings_version, settings: Arc::clone(&settings) };
        let declared = Sequenced::Declared { run: run.clone(), settings: Arc::clone(&settings) };
        // One look at the clock: a replay has no other.
        let unix_ms = self.store.unix_ms();
        let position = self.store.journal.append(self.store.journal.frame(&record, unix_ms), Some(declared));
        self.apply_run(run, (settings_version, settings), (position, unix_ms));
    }

    /// Makes a run, or gives it new settings. The consumer groups that they declare are made in the order of records, with
    /// what was finalised before or after. A new run was made at that position and time. Live and in replay.
    pub(in crate::store) fn apply_run(
        &mut self,
        run: &RunId,
        (version, settings): (u64, Arc<RunSettings>),
        (position, created_unix_ms): (Position, u64),
    ) {
        let lease_ms = settings.lease_ms;
        let memory = Arc::clone(self.store.memory());
        let state = self.runs.entry(run.clone()).or_insert_with(|| {
            let metrics = self.store.telemetry.run(run);
            let settings_now = (0, Arc::clone(&settings));
            let shared = Run {
                settings: Mutex::new(settings_now.clone()),
                created_unix_ms,
                counts: RunCounts::default(),
                watchers: Watchers::default(),
                metrics,
            };
            let bounds = QueueBounds { lease_ms, ..QueueBounds::default() };
            RunState {
                shared: Arc::new(shared),
                since: position,
                settings: settings_now,
                rollouts: BTreeSet::new(),
                groups: RunGroups::new(memory.holding()),
                queue: Queue::new(bounds),
                retained: BTreeMap::new(),
                retention: Retention::default(),
                by_hand_underway: 0,
                unclaimed_ended: 0,
                finalised_count: 0,
                ledger: RunLedger::default(),
                making: BTreeSet::new(),
            }
        });
        state.settings = (version, Arc::clone(&settings));
        *state.shared.settings.lock() = state.settings.clone();
        self.store.runs.insert(run.clone(), Arc::clone(&state.shared));
        state.queue.set_lease_ms(lease_ms);
        self.stirred.insert(run.clone());
        state.shared.watchers.run_changes();
        let declared = settings.consumer_groups.iter().map(|(name, _)| name);
        let new: Vec<_> = declared.filter(|name| state.queue.group(name.as_str()).is_none()).cloned().collect();
        state.making.extend(new);
    }

    pub(super) fn delete_run(&mut self, run: &RunId, force: bool) -> Result<DeletedRun, Refusal> {
        let Some(state) = self.runs.get(run) else { return Err(run_not_found(run)) };
        let is_due = |retained: &&Retained| retained.is_due();
        let rows = state.retained.values().filter(is_due).map(Retained::row_count).sum();
        // What is finalised is open still while that is not durable.
        let live =
            self.rollouts_of(run).iter().filter(|(_, entry)| matches!(&*entry.slot.lock(), Slot::Live(_))).count();
        let open = live.saturating_sub(state.retained.len()) as u64;
        if !force && (open > 0 || rows > 0) {
            let message = format!(
                "run {run:?} has {open} open rollouts and {rows} rows that are not acknowledged; finish them, or force"
            );
            return Err(Refusal::new(Reason::RunNotEmpty, message).field("force"));
        }
        // Nobody may log anything of its rollouts after the record that deletes them.
        self.rollouts_of(run).into_iter().for_each(|(_, entry)| self.remove_with_run(&entry));
        self.log(&Record::RunDeleted { run: run.clone() }, None);
        self.apply_run_deleted(run);
        Ok(DeletedRun { open_rollouts: open, unacknowledged_rows: rows })
    }

    /// Removes a run and all that is in it. Live and in replay.
    pub(in crate::store) fn apply_run_deleted(&mut self, run: &RunId) {
        let mut members = Vec::new();
        if let Some(state) = self.runs.remove(run) {
            state.shared.watchers.run_is_over();
            members.extend(state.queue.groups().flat_map(|(_, group)| group.consumer_ids()));
        }
        self.store.runs.remove(run);
        self.stirred.remove(run);
        self.deadlines.put(run, None);
        self.store.telemetry.forget_run(run);
        let (held, needed) = (&self.tombstones_held, &mut self.needed);
        self.tombstones.retain(|place, (tombstone, bytes)| {
            let stays = tombstone.key.run != *run;
            if !stays {
                held.subtract(*bytes);
                needed.unburied(tombstone.home, *place);
            }
            stays
        });
        let of_run = self.no_longer_waiting(|waiting| waiting.run == *run);
        of_run.into_iter().for_each(|(_, reply)| drop(reply.send(Err(run_not_found(run)))));
        for id in members {
            if let Some(member) = self.consumers.remove(&id) {
                // A full line ends with its channel all the same.
                let _ = member.sender.try_send(ToConsumer::Ended(run_not_found(run)));
            }
        }
        for (key, entry) in self.rollouts_of(run) {
            self.remove_with_run(&entry);
            self.store.clear_timer(&key, &entry);
            self.store.rollouts.remove(&key);
        }
    }

    fn rollouts_of(&self, run: &RunId) -> Vec<(RolloutKey, Arc<Entry>)> {
        let of_run = self.store.rollouts.iter().filter(|entry| entry.key().run == *run);
        of_run.map(|entry| (entry.key().clone(), Arc::clone(entry.value()))).collect()
    }

    /// Takes a rollout out of its place, whose run is deleted.
    fn remove_with_run(&mut self, entry: &Entry) {
        let mut slot = entry.slot.lock();
        if let Slot::Live(live) = &*slot {
            self.needed.ended(live.share.home());
            if live.rollout.finalised().is_none() {
                live.run.metrics.rollout_ended(RolloutEnd::Discarded(EndReason::RunDeleted));
                figures::deltas_changed(&live.run.metrics, figures::deltas_of(live), (0, 0));
            }
        }
        *slot = Slot::Removed;
    }
}

pub(super) fn run_not_found(run: &RunId) -> Refusal {
    Refusal::new(Reason::RunNotFound, format!("there is no run {run:?}")).field("run_id")
}
