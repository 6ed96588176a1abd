//! Gauges that are set now and then from what the sequencing task holds, and the ledger of a run (RULES 3.6.4).

use std::collections::BTreeMap;
use std::sync::atomic::Ordering;
use std::time::Duration;

use crate::forest::plan::PolicyPlan;
use crate::ids::{ConsumerGroupId, Name, RunId};
use crate::queue::{DropReason, GroupStats, UnitKind};
use crate::rollout::FinalisedRollout;
use crate::telemetry::{
    CallCounts, CallLedgerMetrics, ConsumerGroupFigures, ConsumerGroupMetrics, EndReason, RowCounts, RunMetrics,
};

use super::Sequencer;

/// What became of a run's calls that are not pending any more, and the gauges that say so.
#[derive(Default)]
pub(in crate::store) struct RunLedger {
    empty: u64,
    not_kept: u64,
    kept: u64,
    gone: BTreeMap<&'static str, (EndReason, u64)>,
    policies: BTreeMap<Name, PolicyLedger>,
    consumer_groups: BTreeMap<String, ConsumerGroupMetrics>,
    redeliveries: BTreeMap<String, u64>,
}

#[derive(Default)]
struct PolicyLedger {
    trained: u64,
    context: u64,
    too_long: u64,
    gauges: Option<CallLedgerMetrics>,
}

impl RunLedger {
    /// A rollout was finalised, with these plans of its trained policies.
    pub(super) fn finalised<'a>(&mut self, rollout: &FinalisedRollout, plans: impl Iterator<Item = &'a PolicyPlan>) {
        let kept = rollout.kept().iter().count() as u64;
        let empty = rollout.facts().forest.totals().empty_calls;
        self.kept += kept;
        self.empty += empty;
        self.not_kept += rollout.facts().forest.call_count() as u64 - kept - empty;
        for plan in plans {
            let of_policy = self.policies.entry(plan.policy.clone()).or_default();
            of_policy.trained += plan.ledger.trained;
            of_policy.context += plan.ledger.context;
            of_policy.too_long += plan.ledger.too_long;
        }
    }

    fn counts(&self, accepted: u64, of_policy: &PolicyLedger) -> CallCounts {
        let gone: Vec<_> = self.gone.values().copied().collect();
        let all_gone: u64 = gone.iter().map(|(_, calls)| calls).sum();
        CallCounts {
            accepted,
            pending: accepted.saturating_sub(self.kept + self.empty + self.not_kept + all_gone),
            trained: of_policy.trained,
            context: of_policy.context,
            in_no_row: self.kept - of_policy.trained - of_policy.context - of_policy.too_long,
            empty: self.empty,
            not_kept: self.not_kept,
            too_long: of_policy.too_long,
            gone,
        }
    }

    fn record(&mut self, metrics: &RunMetrics, accepted: u64) {
        let counts: Vec<_> = self.policies.values().map(|of_policy| self.counts(accepted, of_policy)).collect();
        for ((policy, of_policy), counts) in self.policies.iter_mut().zip(counts) {
            of_policy.gauges.get_or_insert_with(|| metrics.call_ledger(policy)).set(&counts);
        }
    }

    fn record_consumer_group(&mut self, metrics: &RunMetrics, name: &str, kind: UnitKind, stats: &GroupStats) {
        let Ok(id) = ConsumerGroupId::parse(name) else { return };
        let gauges = self.consumer_groups.entry(name.to_owned()).or_insert_with(|| metrics.consumer_group(&id));
        let unsettled =
            |of: fn(&crate::queue::Tally) -> u64| of(&stats.waiting) + of(&stats.leased) + of(&stats.parked);
        let dropped = |reason: DropReason| stats.dropped.get(&reason).map_or(0, |tally| tally.units);
        // A unit that is a rollout has many rows; the ledger of rows speaks of units that are rows.
        let rows = match kind {
            UnitKind::Row => RowCounts {
                made: stats.pushed.units,
                acknowledged: stats.acknowledged.units,
                waiting: stats.waiting.units,
                leased: stats.leased.units + stats.parked.units,
                dropped: DropReason::ALL.iter().map(|reason| (reason.as_str(), dropped(*reason))).collect(),
            },
            UnitKind::Rollout => RowCounts::default(),
        };
        gauges.set(&ConsumerGroupFigures {
            consumers: stats.consumers as u64,
            queued_units: stats.waiting.units,
            leased_units: stats.leased.units,
            undeliverable_units: dropped(DropReason::Undeliverable),
            lag_units: unsettled(|tally| tally.units),
            lag_tokens: unsettled(|tally| tally.tokens),
            lag: Duration::from_millis(stats.oldest_waiting_ms.unwrap_or(0)),
            rows,
        });
        let seen = self.redeliveries.entry(name.to_owned()).or_default();
        gauges.redelivered(stats.redeliveries.saturating_sub(*seen));
        *seen = stats.redeliveries;
    }
}

impl Sequencer {
    /// Calls of an open rollout that are gone with it.
    pub(super) fn calls_gone(&mut self, run: &RunId, reason: EndReason, calls: u64) {
        if let Some(run) = self.runs.get_mut(run) {
            run.ledger.gone.entry(reason.as_str()).or_insert((reason, 0)).1 += calls;
        }
    }

    /// Sets the gauges of runs and consumer groups.
    pub(super) fn record_figures(&mut self) {
        let now_ms = self.store.clock.now_ms();
        for run in self.runs.values_mut() {
            let metrics = &run.shared.metrics;
            run.ledger.record(metrics, run.shared.counts.calls.load(Ordering::Relaxed));
            for (name, group) in run.queue.groups().filter(|(_, group)| !group.definition().ephemeral) {
                run.ledger.record_consumer_group(metrics, name, group.definition().unit, &group.stats(now_ms));
            }
        }
    }
}
