//! A run's counts across a log that is let go of: written with each snapshot, and taken up again in replay.
//!
//! The counts are those at the end of the snapshot, exactly: what came after it is counted when it is read. A replay that began
//! earlier has counted a part of them itself, so that only what it lacks is added. Counts never go down.

use std::collections::BTreeMap;
use std::sync::atomic::Ordering;

use crate::ids::{ConsumerGroupId, RunId};
use crate::limits;
use crate::log::totals::{CallTotals, ConsumerGroupTotals, GoneTotals, PolicyTotals, RunTotals};
use crate::log::{Position, Record};
use crate::queue::{DropReason, SettledSum};
use crate::telemetry::EndReason;

use super::super::Slot;
use super::figures::{FinalisedCalls, RunLedger};
use super::{RunState, Sequencer};

impl Sequencer {
    /// Writes what each run has counted by now.
    pub(super) fn write_totals(&self) {
        for (id, run) in &self.runs {
            self.log(&Record::RunTotals { run: id.clone(), totals: run.totals() }, None);
        }
    }

    /// A snapshot has come to its end there: what is counted now is what [`Record::RunTotals`] behind it are about. Only in replay.
    pub(in crate::store) fn note_totals(&mut self, position: Position) {
        self.noted_through = position;
        self.noted_totals = self.runs.iter().map(|(id, run)| (id.clone(), run.totals())).collect();
    }

    /// Whether a rollout that is read from its copy had been finalised when the last snapshot ended: then it is among what the run had
    /// counted.
    pub(super) fn is_counted(&self) -> bool {
        self.copied_finalised.is_some_and(|finalised| finalised <= self.noted_through)
    }

    /// What a run had counted at the end of the last snapshot. Only in replay.
    pub(in crate::store) fn replay_totals(&mut self, run: &RunId, totals: &RunTotals) {
        if let Some(counted) = self.noted_totals.remove(run)
            && let Some(state) = self.runs.get_mut(run)
        {
            state.add(totals, &counted);
        }
    }

    /// All was read: the calls of a run are those of its ledger and of its open rollouts.
    pub(in crate::store) fn count_calls(&mut self) {
        self.noted_totals.clear();
        for (id, run) in &self.runs {
            let of_run = self.store.rollouts.iter().filter(|entry| entry.key().run == *id);
            let open = of_run.map(|entry| match &*entry.slot.lock() {
                Slot::Live(live) if live.rollout.finalised().is_none() => {
                    live.rollout.facts().forest.call_count() as u64
                }
                Slot::Live(_) | Slot::Ended(..) | Slot::Removed => 0,
            });
            let calls = run.ledger.calls_ended() + open.sum::<u64>();
            run.shared.counts.calls.store(calls, Ordering::Relaxed);
        }
    }
}

impl RunState {
    fn totals(&self) -> RunTotals {
        let RunLedger { finalised, gone, retired_rollouts, consumer_groups, .. } = &self.ledger;
        let gone = gone.iter().map(|(reason, gone)| GoneTotals {
            reason: reason.as_str().to_owned(),
            rollouts: gone.rollouts,
            calls: gone.calls,
        });
        let groups = self.queue.groups().filter(|(_, group)| !group.definition().ephemeral);
        let groups = groups.filter_map(|(name, group)| {
            let calls = consumer_groups.get(name).map(|ledger| ledger.calls.totals()).unwrap_or_default();
            let (acknowledged, dropped) = group.forgotten();
            let dropped = dropped.iter().map(|(reason, sum)| (*reason, *sum)).collect();
            let consumer_group = ConsumerGroupId::parse(name).ok()?;
            let (forgotten_through, changed_at) = (group.forgotten_through(), group.changed_at());
            let blurred = group.blurred();
            Some(ConsumerGroupTotals {
                consumer_group,
                calls,
                acknowledged,
                dropped,
                forgotten_through,
                changed_at,
                blurred,
            })
        });
        RunTotals {
            calls: finalised.totals(),
            gone: gone.collect(),
            retired_rollouts: *retired_rollouts,
            consumer_groups: groups.collect(),
        }
    }

    /// Adds what these totals have more than what was counted.
    fn add(&mut self, totals: &RunTotals, counted: &RunTotals) {
        self.ledger.finalised.add_missing(&totals.calls, &counted.calls);
        self.ledger.retired_rollouts += totals.retired_rollouts.saturating_sub(counted.retired_rollouts);
        for GoneTotals { reason, rollouts, calls } in &totals.gone {
            let known = counted.gone.iter().find(|known| known.reason == *reason);
            let (known_rollouts, known_calls) = known.map_or((0, 0), |known| (known.rollouts, known.calls));
            let gone = self.ledger.gone.entry(EndReason::from_text(reason)).or_default();
            gone.rollouts += rollouts.saturating_sub(known_rollouts);
            gone.calls += calls.saturating_sub(known_calls);
        }
        for of_group in &totals.consumer_groups {
            let name = of_group.consumer_group.as_str();
            let known = counted.consumer_groups.iter().find(|known| known.consumer_group == of_group.consumer_group);
            let ledger = self.ledger.consumer_groups.entry(name.to_owned()).or_default();
            ledger.calls.add_missing(&of_group.calls, known.map_or(&CallTotals::default(), |known| &known.calls));
            if let Some(group) = self.queue.group_mut(name) {
                let known_acknowledged = known.map(|known| known.acknowledged).unwrap_or_default();
                let known_dropped: BTreeMap<DropReason, SettledSum> =
                    known.map(|known| known.dropped.iter().copied().collect()).unwrap_or_default();
                let dropped = of_group
                    .dropped
                    .iter()
                    .map(|(reason, sum)| (*reason, sum.beyond(known_dropped.get(reason).copied().unwrap_or_default())));
                group.restore_forgotten(of_group.acknowledged.beyond(known_acknowledged), dropped);
                group.restore_seeks(0, of_group.forgotten_through, of_group.changed_at, of_group.blurred);
            }
        }
    }
}

impl FinalisedCalls {
    fn totals(&self) -> CallTotals {
        let policies = self.policies.iter().map(|(policy, in_rows)| PolicyTotals {
            policy: policy.clone(),
            trained: in_rows.trained,
            context: in_rows.context,
            too_long: in_rows.too_long,
        });
        CallTotals { empty: self.empty, not_kept: self.not_kept, kept: self.kept, policies: policies.collect() }
    }

    fn add_missing(&mut self, totals: &CallTotals, counted: &CallTotals) {
        self.empty += totals.empty.saturating_sub(counted.empty);
        self.not_kept += totals.not_kept.saturating_sub(counted.not_kept);
        self.kept += totals.kept.saturating_sub(counted.kept);
        for of_policy in &totals.policies {
            let known = counted.policies.iter().find(|known| known.policy == of_policy.policy);
            let known = known.map_or((0, 0, 0), |known| (known.trained, known.context, known.too_long));
            let room = self.policies.len() < limits::RUN_LEDGER_POLICIES_MAX;
            if room || self.policies.contains_key(&of_policy.policy) {
                let in_rows = self.policies.entry(of_policy.policy.clone()).or_default();
                in_rows.trained += of_policy.trained.saturating_sub(known.0);
                in_rows.context += of_policy.context.saturating_sub(known.1);
                in_rows.too_long += of_policy.too_long.saturating_sub(known.2);
            }
        }
    }
}
