//! The ledger of a run and of its consumer groups (RULES 3.6.4), and the gauges that are set from it now and then.
//!
//! What is counted is counted in the order of records, live and in replay alike. A run's ledger is as without a limit on rows; a
//! consumer group's is with its own, so only there a call may be too long.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use crate::forest::link::DriftKind;
use crate::forest::plan::PolicyPlan;
use crate::ids::{AgentId, ConsumerGroupId, Name, RunId};
use crate::limits;
use crate::log::Position;
use crate::queue::{DropReason, GroupStats, RowStates};
use crate::rollout::FinalisedRollout;
use crate::rollout::drift::DriftCount;
use crate::rollout::run_settings::RunSettings;
use crate::telemetry::{
    CallCounts, CallLedgerMetrics, ConsumerGroupFigures, ConsumerGroupMetrics, EndReason, RowCounts, RunMetrics,
    WaitingOn,
};

use super::{RunState, Sequencer};

/// How often gauges are set.
pub(super) const FIGURES_EVERY_MS: u64 = 1000;

/// What became of a run's calls and rollouts that are not open any more, and the gauges that say so.
#[derive(Default)]
pub(in crate::store) struct RunLedger {
    pub(super) finalised: FinalisedCalls,
    pub(super) gone: BTreeMap<EndReason, Gone>,
    pub(super) retired_rollouts: u64,
    /// By agent (none for those after the first few) and kind.
    drifts: BTreeMap<(Option<AgentId>, DriftKind), DriftCount>,
    drifting_agents: BTreeSet<AgentId>,
    gauges: BTreeMap<Name, CallLedgerMetrics>,
    pub(super) consumer_groups: BTreeMap<String, GroupLedger>,
}

/// Rollouts that ended without rows, and their calls.
#[derive(Clone, Copy, Default)]
pub(super) struct Gone {
    pub(super) rollouts: u64,
    pub(super) calls: u64,
}

/// What became of the calls of finalised rollouts.
#[derive(Default)]
pub(super) struct FinalisedCalls {
    pub(super) empty: u64,
    pub(super) not_kept: u64,
    pub(super) kept: u64,
    pub(super) policies: BTreeMap<Name, InRows>,
}

#[derive(Clone, Copy, Default)]
pub(super) struct InRows {
    pub(super) trained: u64,
    pub(super) context: u64,
    pub(super) too_long: u64,
}

/// What a consumer group was given, and the gauges that say so.
#[derive(Default)]
pub(super) struct GroupLedger {
    pub(super) calls: FinalisedCalls,
    gauges: Option<ConsumerGroupMetrics>,
    redeliveries: u64,
}

impl FinalisedCalls {
    fn add<'a>(&mut self, rollout: &FinalisedRollout, plans: impl Iterator<Item = &'a PolicyPlan>) {
        let kept = rollout.kept().iter().count() as u64;
        let empty = rollout.facts().forest.totals().empty_calls;
        self.kept += kept;
        self.empty += empty;
        self.not_kept += rollout.facts().forest.call_count() as u64 - kept - empty;
        for plan in plans {
            // Policies that come after so many have no ledger.
            if self.policies.len() < limits::RUN_LEDGER_POLICIES_MAX || self.policies.contains_key(&plan.policy) {
                let of_policy = self.policies.entry(plan.policy.clone()).or_default();
                of_policy.trained += plan.ledger.trained;
                of_policy.context += plan.ledger.context;
                of_policy.too_long += plan.ledger.too_long;
            }
        }
    }

    fn all(&self) -> u64 {
        self.kept + self.empty + self.not_kept
    }

    /// The ledger of one policy over these calls and so many that are pending or gone.
    fn counts(&self, policy: &Name, pending: u64, gone: Vec<(EndReason, u64)>) -> CallCounts {
        let InRows { trained, context, too_long } = self.policies.get(policy).copied().unwrap_or_default();
        let all_gone: u64 = gone.iter().map(|(_, calls)| calls).sum();
        CallCounts {
            accepted: self.all() + pending + all_gone,
            pending,
            trained,
            context,
            in_no_row: self.kept - trained - context - too_long,
            empty: self.empty,
            not_kept: self.not_kept,
            too_long,
            gone,
        }
    }

    fn too_long(&self) -> u64 {
        self.policies.values().map(|in_rows| in_rows.too_long).sum()
    }
}

impl RunLedger {
    /// A rollout was finalised, with these plans of its trained policies.
    pub(super) fn finalised(&mut self, rollout: &FinalisedRollout, plans: &[Arc<PolicyPlan>]) {
        let plans = || plans.iter().map(Arc::as_ref);
        self.finalised.add(rollout, plans());
        for ((agent, kind), count) in rollout.drifts(plans()) {
            let room = self.drifting_agents.len() < limits::RUN_DRIFTING_AGENTS_MAX;
            let named = self.drifting_agents.contains(&agent) || (room && self.drifting_agents.insert(agent.clone()));
            self.drifts.entry((named.then_some(agent), kind)).or_default().add(count);
        }
    }

    /// A consumer group was given a finalised rollout, with these plans.
    pub(super) fn given(&mut self, consumer_group: &str, rollout: &FinalisedRollout, plans: &[Arc<PolicyPlan>]) {
        let ledger = self.consumer_groups.entry(consumer_group.to_owned()).or_default();
        ledger.calls.add(rollout, plans.iter().map(Arc::as_ref));
    }

    /// A rollout ended without rows.
    pub(super) fn gone(&mut self, reason: EndReason, calls: u64) {
        let gone = self.gone.entry(reason).or_default();
        gone.rollouts += 1;
        gone.calls += calls;
    }

    /// Calls of all rollouts that are not open any more.
    pub(super) fn calls_ended(&self) -> u64 {
        self.finalised.all() + self.gone.values().map(|gone| gone.calls).sum::<u64>()
    }

    /// Rollouts that ended without rows, by reason.
    pub(super) fn gone_rollouts(&self) -> Vec<(EndReason, u64)> {
        self.gone.iter().map(|(reason, gone)| (*reason, gone.rollouts)).collect()
    }

    /// The drift of finalised rollouts.
    pub(super) fn drifts(&self) -> Vec<(Option<AgentId>, DriftKind, DriftCount)> {
        self.drifts.iter().map(|((agent, kind), count)| (agent.clone(), *kind, *count)).collect()
    }

    /// What became of so many accepted calls, by policy: those that the settings train, and those that made rows.
    pub(super) fn calls(&self, settings: &RunSettings, accepted: u64) -> Vec<(Name, CallCounts)> {
        let gone: Vec<_> = self.gone.iter().map(|(reason, gone)| (*reason, gone.calls)).collect();
        let all_gone: u64 = gone.iter().map(|(_, calls)| calls).sum();
        // What was accepted is counted when it comes, what became of it once that is durable.
        let pending = accepted.saturating_sub(self.finalised.all() + all_gone);
        let trained = &settings.rollout.trained_policies;
        let mut policies: BTreeSet<&Name> = self.finalised.policies.keys().chain(trained).collect();
        if policies.is_empty() {
            policies.insert(&settings.rollout.default_policy);
        }
        policies
            .into_iter()
            .map(|policy| (policy.clone(), self.finalised.counts(policy, pending, gone.clone())))
            .collect()
    }

    /// What became of the calls that a consumer group was given, by policy.
    pub(super) fn calls_given(&self, consumer_group: &str) -> Vec<(Name, CallCounts)> {
        let calls = self.consumer_groups.get(consumer_group).map(|ledger| &ledger.calls);
        let of_policies = calls.into_iter().flat_map(|calls| calls.policies.keys().map(move |policy| (calls, policy)));
        of_policies.map(|(calls, policy)| (policy.clone(), calls.counts(policy, 0, Vec::new()))).collect()
    }

    fn record(&mut self, metrics: &RunMetrics, settings: &RunSettings, accepted: u64) {
        for (policy, counts) in self.calls(settings, accepted) {
            self.gauges.entry(policy.clone()).or_insert_with(|| metrics.call_ledger(&policy)).set(&counts);
        }
    }

    fn record_consumer_group(&mut self, metrics: &RunMetrics, name: &str, stats: &GroupStats) {
        let Ok(id) = ConsumerGroupId::parse(name) else { return };
        let ledger = self.consumer_groups.entry(name.to_owned()).or_default();
        let gauges = ledger.gauges.get_or_insert_with(|| metrics.consumer_group(&id));
        let unsettled =
            |of: fn(&crate::queue::Tally) -> u64| of(&stats.waiting) + of(&stats.leased) + of(&stats.parked);
        gauges.set(&ConsumerGroupFigures {
            consumers: stats.consumers as u64,
            queued_units: stats.waiting.units,
            leased_units: stats.leased.units,
            undeliverable_units: stats.dropped.get(&DropReason::Undeliverable).map_or(0, |tally| tally.units),
            lag_units: unsettled(|tally| tally.units),
            lag_tokens: unsettled(|tally| tally.tokens),
            lag: Duration::from_millis(stats.oldest_unsettled_ms.unwrap_or(0)),
            too_long_calls: ledger.calls.too_long(),
            rows: row_counts(&stats.rows),
        });
        gauges.redelivered(stats.redeliveries.saturating_sub(ledger.redeliveries));
        ledger.redeliveries = stats.redeliveries;
    }
}

/// What became of the rows of a consumer group.
pub(super) fn row_counts(rows: &RowStates) -> RowCounts {
    let dropped = |reason: &DropReason| rows.dropped.get(reason).copied().unwrap_or(0);
    RowCounts {
        made: rows.made,
        acknowledged: rows.acknowledged,
        waiting: rows.waiting,
        leased: rows.leased + rows.parked,
        dropped: DropReason::ALL.iter().map(|reason| (reason.as_str(), dropped(reason))).collect(),
    }
}

impl RunState {
    /// What became of its calls, by policy.
    pub(super) fn calls(&self) -> Vec<(Name, CallCounts)> {
        self.ledger.calls(self.settings_now(), self.shared.counts.calls.load(Ordering::Relaxed))
    }

    /// Whether rows wait for trainers, and whether trainers wait for rows.
    fn waits(&self) -> (bool, bool) {
        let lasting = || self.queue.groups().filter(|(_, group)| !group.definition().ephemeral);
        let rows_wait = lasting().any(|(_, group)| group.has_waiting());
        let trainers_wait = lasting()
            .any(|(_, group)| !group.has_waiting() && group.consumers().any(|facts| facts.in_flight.units == 0));
        (rows_wait, trainers_wait)
    }
}

impl Sequencer {
    /// An open rollout ended without rows, and its calls are gone with it.
    pub(super) fn rollout_gone(&mut self, run: &RunId, reason: EndReason, calls: u64) {
        if let Some(run) = self.runs.get_mut(run) {
            run.ledger.gone(reason, calls);
        }
    }

    /// Sets the gauges of runs and consumer groups.
    pub(super) fn record_figures(&mut self) {
        let now_ms = self.store.clock.now_ms();
        self.store.telemetry.set_waiting_on(self.waiting_on());
        self.last_at_figures = self.store.journal.last();
        let memory = self.store.memory();
        self.store.telemetry.set_memory(memory.used_bytes(), memory.budget_bytes());
        for (id, run) in &mut self.runs {
            let metrics = &run.shared.metrics;
            let oldest_ms = memory.oldest_open_ms(id).map_or(0, |opened_ms| now_ms.saturating_sub(opened_ms));
            metrics.set_groups(run.groups.open_count(), run.groups.held_rollouts());
            metrics.set_oldest_open_rollout(Duration::from_millis(oldest_ms));
            let settings = Arc::clone(run.settings_now());
            run.ledger.record(metrics, &settings, run.shared.counts.calls.load(Ordering::Relaxed));
            for (name, group) in run.queue.groups().filter(|(_, group)| !group.definition().ephemeral) {
                run.ledger.record_consumer_group(metrics, name, &group.stats(now_ms));
            }
        }
    }

    /// Who waits for whom: the log, if what was logged when the gauges were last set is not durable yet; else trainers, while
    /// rows wait; else harnesses, while some trainer has nothing.
    fn waiting_on(&self) -> WaitingOn {
        let log_is_slow = self.last_at_figures > Position::default() && !self.store.is_durable(self.last_at_figures);
        let waits: Vec<_> = self.runs.values().map(RunState::waits).collect();
        if log_is_slow {
            WaitingOn::LogBound
        } else if waits.iter().any(|(rows, _)| *rows) {
            WaitingOn::TrainerBound
        } else if waits.iter().any(|(_, trainers)| *trainers) {
            WaitingOn::HarnessBound
        } else {
            WaitingOn::Idle
        }
    }
}
