//! Building the whole state again from records: the same functions as live, without answers, notices and timers' effects.

use std::ops::ControlFlow;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use crate::error::Refusal;
use crate::ids::RolloutRef;
use crate::log::{Dated, Log, LogError, Position, Record};
use crate::rollout::event::RolloutRecord;

use super::effect::Sequenced;
use super::sequencer::Sequencer;
use super::{OpenFacts, RolloutKey, Slot};

/// Where one stands in a log that is read: it may begin in the middle, and then counts from its first whole snapshot on.
#[derive(Debug, Default)]
pub(super) struct Reading {
    first: Option<Position>,
    /// Whether what comes is about a time of which nothing is known.
    passes_over: bool,
    snapshot: Option<SnapshotPart>,
    /// Why tokens that had left memory did not come back: what was to be done with them was not.
    not_restored: Option<Refusal>,
}

/// What has come of a snapshot.
#[derive(Debug)]
struct SnapshotPart {
    begins: Position,
    runs: u32,
    come: Vec<(Position, Dated)>,
}

impl Reading {
    /// Takes the next record; gives it back if it is to be applied now.
    fn read(&mut self, position: Position, dated: Dated) -> Option<Dated> {
        if self.first.is_none() {
            self.first = Some(position);
            self.passes_over = position > Position(1);
        }
        match &dated.record {
            Record::SnapshotBegins { runs } => {
                // One that was not brought to its end comes to nothing.
                self.snapshot = Some(SnapshotPart { begins: position, runs: *runs, come: Vec::new() });
                None
            }
            Record::RunSnapshot { .. } => {
                self.snapshot.as_mut()?.come.push((position, dated));
                None
            }
            Record::Run { .. }
            | Record::RunDeleted { .. }
            | Record::GroupSize { .. }
            | Record::GroupRules { .. }
            | Record::GroupReleased { .. }
            | Record::RolloutOpened { .. }
            | Record::Rollout { .. }
            | Record::ConsumerGroup { .. }
            | Record::Acknowledged { .. }
            | Record::UnitDropped { .. }
            | Record::UnitReleased { .. }
            | Record::StepFrozen { .. }
            | Record::RolloutCopyBegins(_)
            | Record::RolloutCopied { .. }
            | Record::RunTotals { .. }
            | Record::RolloutsRetired { .. }
            | Record::ConsumerGroupExpired { .. }
            | Record::Sought { .. }
            | Record::Tombstones { .. } => (!self.passes_over).then_some(dated),
        }
    }

    /// The snapshot that has just come to its end, and the runs in it.
    fn whole_snapshot(&mut self) -> Option<(Position, Vec<(Position, Dated)>)> {
        let whole = self.snapshot.take_if(|snapshot| snapshot.come.len() >= snapshot.runs as usize)?;
        self.passes_over = false;
        Some((whole.begins, whole.come))
    }
}

impl Sequencer {
    /// Applies all records of a log from its beginning, in order; says the last position.
    ///
    /// # Errors
    /// If the log does not hold them all.
    pub fn replay(&mut self, log: &Arc<dyn Log>) -> Result<Position, LogError> {
        let mut last = Position::default();
        self.store().read_from(Arc::clone(log));
        log.read(log.first_position(), &mut |position, record| {
            self.replay_record(position, record);
            self.store().make_room(None);
            last = position;
            ControlFlow::Continue(())
        })?;
        self.replay_ends()?;
        Ok(last)
    }

    /// All records were applied: time is now again.
    ///
    /// # Errors
    /// If they begin in the middle, and hold no snapshot; or what had left memory did not come back.
    pub fn replay_ends(&mut self) -> Result<(), LogError> {
        self.store().replaying(None);
        // What did not come to its end comes to nothing.
        self.copying.clear();
        self.groups_are_read();
        self.units_are_read();
        self.count_calls();
        self.hold_back();
        if let Some(refusal) = self.reading.not_restored.take() {
            return Err(LogError::NotRestored(refusal));
        }
        match self.reading.first {
            Some(first) if self.reading.passes_over => Err(LogError::NoSnapshot(first)),
            Some(_) | None => Ok(()),
        }
    }

    /// Applies the next record of a log. [`Sequencer::replay_ends`] must be called after the last; it says why none is applied any
    /// more, if that is so.
    pub fn replay_record(&mut self, position: Position, dated: Dated) {
        if self.reading.not_restored.is_some() {
            return;
        }
        if let Some(dated) = self.reading.read(position, dated) {
            self.apply_dated(position, dated);
        }
        if let Some((begins, runs)) = self.reading.whole_snapshot() {
            runs.into_iter().for_each(|(position, run)| self.apply_dated(position, run));
            self.needed.snapshot(begins);
            self.note_totals(position);
        }
    }

    /// Applies a record.
    pub(super) fn apply_dated(&mut self, position: Position, dated: Dated) {
        self.store().replaying(Some(dated.unix_ms));
        match dated.record {
            Record::Run { run, settings_version, settings } => {
                self.apply_run(&run, (settings_version, Arc::clone(&settings)), (position, dated.unix_ms));
                self.apply(position, Sequenced::Declared { run, settings });
            }
            Record::RunDeleted { run } => self.apply_run_deleted(&run),
            Record::GroupSize { run, group, size } => self.apply_group_size(&run, &group, size),
            Record::GroupRules { run, group, rules } => self.replay_group_rules(&run, &group, rules),
            Record::GroupReleased { run, group, decided, first } => {
                let at = first.unwrap_or(position);
                self.apply(position, Sequenced::GroupReleased { run, group, decided, at: Some(at) });
            }
            Record::RolloutOpened { run, rollout, attempt, group, settings_version: _, group_size, group_rules } => {
                let key = RolloutKey { run: run.clone(), rollout: rollout.clone() };
                let reference = RolloutRef { run, group, rollout, attempt };
                // What was opened once is opened again, whatever the limits are now.
                let opened = self.open(&key, &reference, position, group_rules.unwrap_or_default());
                debug_assert!(opened.is_ok(), "opening checks nothing but that the run is there");
                if let Some((group, size)) = reference.group.as_ref().zip(group_size) {
                    self.apply_group_size(&reference.run, group, size);
                }
            }
            Record::Rollout { run, rollout, attempt, record } => {
                self.replay_rollout(position, &RolloutKey { run, rollout }, attempt, record);
            }
            Record::ConsumerGroup { run, consumer_group, definition, from_earliest } => {
                self.apply(position, Sequenced::ConsumerGroup { run, consumer_group, definition, from_earliest });
            }
            Record::Acknowledged { run, consumer_group, units } => {
                self.apply(position, Sequenced::Acknowledged { run, consumer_group, units });
            }
            Record::UnitDropped { run, consumer_group, unit, reason } => {
                self.apply(position, Sequenced::UnitDropped { run, consumer_group, unit, reason });
            }
            Record::UnitReleased { run, consumer_group, unit } => {
                self.apply(position, Sequenced::UnitReleased { run, consumer_group, unit });
            }
            Record::StepFrozen { run, consumer_group, step } => {
                self.apply(position, Sequenced::StepFrozen { run, consumer_group, step });
            }
            Record::RolloutsRetired { run, rollouts, reason } => {
                self.apply(position, Sequenced::RolloutsRetired { run, rollouts, reason });
            }
            Record::ConsumerGroupExpired { run, consumer_group } => {
                self.apply(position, Sequenced::ConsumerGroupExpired { run, consumer_group });
            }
            Record::Sought { run, consumer_group, to } => {
                self.apply(position, Sequenced::Sought { run, consumer_group, to, reply: None });
            }
            Record::SnapshotBegins { .. } => {}
            Record::RunSnapshot { run, settings_version, settings, created_unix_ms, consumer_groups } => {
                self.store().replaying(Some(created_unix_ms));
                self.replay_run(&run, (settings_version, settings), consumer_groups, position);
            }
            Record::RolloutCopyBegins(begins) => self.replay_copy_begins(*begins, position),
            Record::RunTotals { run, totals } => self.replay_totals(&run, &totals),
            Record::RolloutCopied { run, rollout, attempt: _, record } => {
                self.replay_copied(&RolloutKey { run, rollout }, position, (dated.unix_ms, record));
            }
            Record::Tombstones { run, rollouts } => {
                rollouts.into_iter().for_each(|ended| self.replay_tombstone(&run, ended, position));
            }
        }
    }

    fn replay_rollout(&mut self, position: Position, key: &RolloutKey, attempt: u32, record: RolloutRecord) {
        let store = Arc::clone(self.store());
        let Some(entry) = store.entry(key) else { return };
        let mut slot = entry.slot.lock();
        if matches!(&*slot, Slot::Live(live) if !live.rollout.has_tokens()) {
            drop(slot);
            if let Err(refusal) = store.restore_now(key) {
                self.reading.not_restored.get_or_insert(refusal);
                return;
            }
            slot = entry.slot.lock();
        }
        let Slot::Live(live) = &mut *slot else { return };
        if live.attempt != attempt {
            return;
        }
        if let RolloutRecord::Group(group) = &record {
            self.replay_joined(key, attempt, group);
        }
        let (before, calls_before) = (OpenFacts::of(&live.rollout), live.rollout.facts().forest.call_count());
        let applied = live.rollout.apply(record, store.clock.now_ms());
        live.positions.push(position);
        live.last_position = position;
        live.measure();
        let (sequenced, ended) = store.sequenced(key, live, &applied.effects, store.unix_ms());
        if matches!(sequenced, Some(Sequenced::Finalised { .. })) {
            live.finalised_at(self.copied_finalised().unwrap_or(position));
        }
        let now = OpenFacts::of(&live.rollout).filter(|_| ended.is_none());
        live.run.counts.moved(before, now);
        let calls = (live.rollout.facts().forest.call_count() - calls_before) as u64;
        live.run.counts.calls.fetch_add(calls, Ordering::Relaxed);
        match ended {
            Some(ended) => {
                *slot = Slot::Ended(ended, position);
                store.clear_timer(key, &entry);
            }
            None => {
                store.set_timer(key, &entry, live);
                live.used(&store, &entry);
            }
        }
        drop(slot);
        if let Some(sequenced) = sequenced {
            self.apply(position, sequenced);
        }
    }
}
