//! Metrics: typed functions that record them, and the text that Prometheus reads. [`names`] lists them all.
//!
//! A [`Telemetry`] is passed around as an `Arc`. Hot paths use handles made once for each set of labels: [`RunMetrics`] and
//! [`PolicyMetrics`] are kept in it, and [`ConsumerGroupMetrics`] and [`CallLedgerMetrics`] by whoever sets their gauges.
//! Also here is [`Readiness`], for the parts of the service that tell it do not know HTTP.

mod consumer_group;
pub mod labels;
mod ledger;
pub mod names;
mod readiness;
mod registry;
mod run;
#[cfg(test)]
mod tests;

use std::collections::HashMap;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use metrics::{Counter, Gauge, Histogram, SharedString};
use parking_lot::RwLock;

pub use consumer_group::{ConsumerGroupFigures, ConsumerGroupMetrics, DROP_REASONS, RowCounts};
pub use labels::{DriftLabel, EndReason, LinkLabel, RolloutEnd, WaitingOn};
pub use ledger::{CallCounts, CallLedgerMetrics};
pub use readiness::{Readiness, Ready};
pub use registry::Held;
pub use run::{PolicyMetrics, RolloutShape, RowMade, RunMetrics};

use crate::error::Reason;
use crate::ids::RunId;
use registry::Registry;

/// Everything that is recorded.
pub struct Telemetry {
    registry: Arc<Registry>,
    runs: RwLock<HashMap<RunId, Arc<RunMetrics>>>,
    refused: Vec<Counter>,
    in_flight_bytes: Gauge,
    memory_bytes: [Gauge; 2],
    log_bytes: [Gauge; 3],
    evicted_rollouts: Gauge,
    evictions: Counter,
    restore: Histogram,
    replay: [Gauge; 2],
    report_streams: Gauge,
    durable_answer: Histogram,
    log_sync: Histogram,
    waiting_on: Vec<Gauge>,
}

static INSTALLED: OnceLock<Arc<Telemetry>> = OnceLock::new();

impl Telemetry {
    /// One that nobody else records in.
    #[must_use]
    pub fn new() -> Arc<Self> {
        let registry = Arc::new(Registry::new());
        let by_reason =
            |reason: &Reason| registry.counter(&names::REFUSED, &[SharedString::const_str(reason.as_str())]);
        let by_who = |who: &WaitingOn| registry.gauge(&names::WAITING_ON, &[SharedString::const_str(who.as_str())]);
        let telemetry = Self {
            refused: Reason::ALL.iter().map(by_reason).collect(),
            waiting_on: WaitingOn::ALL.iter().map(by_who).collect(),
            in_flight_bytes: registry.gauge(&names::IN_FLIGHT_BYTES, &[]),
            memory_bytes: [&names::RESIDENT_BYTES, &names::MEMORY_BUDGET_BYTES].map(|of| registry.gauge(of, &[])),
            log_bytes: [&names::LOG_BYTES, &names::LOG_BUDGET_BYTES, &names::LOG_QUEUED_BYTES]
                .map(|of| registry.gauge(of, &[])),
            evicted_rollouts: registry.gauge(&names::EVICTED_ROLLOUTS, &[]),
            evictions: registry.counter(&names::EVICTIONS, &[]),
            restore: registry.histogram(&names::RESTORE_SECONDS, &[]),
            replay: [&names::REPLAY_SECONDS, &names::REPLAY_LEFT_BYTES].map(|of| registry.gauge(of, &[])),
            report_streams: registry.gauge(&names::REPORT_STREAMS, &[]),
            durable_answer: registry.histogram(&names::DURABLE_ANSWER_SECONDS, &[]),
            log_sync: registry.histogram(&names::LOG_SYNC_SECONDS, &[]),
            runs: RwLock::default(),
            registry,
        };
        telemetry.set_waiting_on(WaitingOn::Idle);
        Arc::new(telemetry)
    }

    /// The one of this process, which also takes what other crates record. Services in one process share it.
    #[must_use]
    pub fn install() -> Arc<Self> {
        let install = || {
            let telemetry = Self::new();
            if metrics::set_global_recorder(Arc::clone(&telemetry.registry.recorder)).is_err() {
                tracing::warn!("another metrics recorder is installed; metrics of libraries go there");
            }
            telemetry
        };
        Arc::clone(INSTALLED.get_or_init(install))
    }

    /// All metrics as the text that Prometheus reads.
    #[must_use]
    pub fn render(&self) -> String {
        self.registry.handle.render()
    }

    /// Sorts the values that came since the last time into their buckets. To be called every few seconds, for until then
    /// each value is held by itself.
    pub fn upkeep(&self) {
        self.registry.handle.run_upkeep();
    }

    /// The metrics of a run. Keep them beside the run.
    #[must_use]
    pub fn run(&self, run: &RunId) -> Arc<RunMetrics> {
        if let Some(known) = self.runs.read().get(run) {
            return Arc::clone(known);
        }
        let new = || Arc::new(RunMetrics::new(&self.registry, run));
        Arc::clone(self.runs.write().entry(run.clone()).or_insert_with(new))
    }

    /// A run was deleted. Its counters stay as they are.
    pub fn forget_run(&self, run: &RunId) {
        self.runs.write().remove(run);
    }

    /// A request was refused.
    pub fn refused(&self, reason: Reason) {
        self.refused[reason as usize].increment(1);
    }

    /// So many bytes of messages are in hand, for as long as this is held.
    pub fn in_flight(&self, bytes: usize) -> Held {
        Held::new(&self.in_flight_bytes, bytes as u64)
    }

    /// Rollouts hold so many bytes of what they may hold.
    pub fn set_memory(&self, resident_bytes: u64, budget_bytes: u64) {
        let [resident, budget] = &self.memory_bytes;
        resident.set(registry::number(resident_bytes));
        budget.set(registry::number(budget_bytes));
    }

    /// A rollout's tokens have left memory; it counts among such rollouts for as long as this is held.
    pub fn evicted(&self) -> Held {
        self.evictions.increment(1);
        Held::new(&self.evicted_rollouts, 1)
    }

    /// A rollout's tokens were read back.
    pub fn restored(&self, took: Duration) {
        self.restore.record(took.as_secs_f64());
    }

    /// The log takes so many bytes on disk of what it may, and so many are not durable yet.
    pub fn set_log(&self, disk_bytes: u64, budget_bytes: u64, queued_bytes: u64) {
        for (gauge, bytes) in self.log_bytes.iter().zip([disk_bytes, budget_bytes, queued_bytes]) {
            gauge.set(registry::number(bytes));
        }
    }

    /// The log has been read for so long, and so much of it is left.
    pub fn set_replay(&self, took: Duration, left_bytes: u64) {
        let [seconds, left] = &self.replay;
        seconds.set(took.as_secs_f64());
        left.set(registry::number(left_bytes));
    }

    /// A stream of reports is open, for as long as this is held.
    pub fn report_stream(&self) -> Held {
        Held::new(&self.report_streams, 1)
    }

    /// From the arrival of a message to its durable answer.
    pub fn durable_answer(&self, took: Duration) {
        self.durable_answer.record(took.as_secs_f64());
    }

    /// The disk made what was written to the log durable.
    pub fn log_sync(&self, took: Duration) {
        self.log_sync.record(took.as_secs_f64());
    }

    /// Who waits for whom.
    pub fn set_waiting_on(&self, now: WaitingOn) {
        for (gauge, who) in self.waiting_on.iter().zip(WaitingOn::ALL) {
            gauge.set(if *who == now { 1.0 } else { 0.0 });
        }
    }
}
