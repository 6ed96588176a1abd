//! What is recorded of one run: its calls, links, rollouts and rows.

use std::collections::HashMap;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use metrics::{Counter, Gauge, Histogram, SharedString};
use parking_lot::RwLock;

use super::consumer_group::ConsumerGroupMetrics;
use super::labels::{DriftLabel, EndReason, LinkLabel, OTHER, RolloutEnd};
use super::ledger::CallLedgerMetrics;
use super::names;
use super::registry::{Candidate, Registry, Share, number};
use crate::ids::{ConsumerGroupId, Name, RunId};

/// One row that was made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RowMade {
    /// Calls that it trains.
    pub trained_calls: u64,
    /// Tokens that it trains.
    pub trained_tokens: u64,
    /// Its other tokens.
    pub context_tokens: u64,
}

/// The shape of a rollout when it is finalised.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RolloutShape {
    /// Kept calls without a parent.
    pub roots: u64,
    /// Rows that it gives, over all policies.
    pub leaves: u64,
    /// Calls on its longest walk.
    pub depth: u64,
    /// Its agents.
    pub agents: u64,
    /// Of these, the ones for which no list of kept calls came.
    pub agents_without_list: u64,
}

/// The metrics of one run. Get it once from [`super::Telemetry::run`] and keep it beside the run.
pub struct RunMetrics {
    registry: Arc<Registry>,
    run: SharedString,
    policies: RwLock<HashMap<Name, Arc<PolicyMetrics>>>,
    other_policy: OnceLock<Arc<PolicyMetrics>>,
    duplicates: Counter,
    links: Vec<Counter>,
    drifts: Vec<Counter>,
    waiting_deltas: Gauge,
    unresolved_deltas: Gauge,
    rollouts_opened: Counter,
    open_rollouts: Gauge,
    oldest_open_rollout: Candidate,
    open_groups: Share,
    rollouts_awaiting_release: Share,
    roots: Histogram,
    leaves: Histogram,
    depth: Histogram,
    agents: Histogram,
    agents_without_list: Counter,
    reward_to_row: Histogram,
}

impl RunMetrics {
    pub(super) fn new(registry: &Arc<Registry>, run: &RunId) -> Self {
        let run = registry.labels.runs.value(run.as_str());
        let of_run = std::slice::from_ref(&run);
        let words = |metric, words: &[&'static str]| {
            let counter = |word: &&'static str| registry.counter(metric, &[run.clone(), SharedString::const_str(word)]);
            words.iter().map(counter).collect::<Vec<_>>()
        };
        let links: Vec<_> = LinkLabel::ALL.iter().map(|kind| kind.as_str()).collect();
        let drifts: Vec<_> = DriftLabel::ALL.iter().map(|kind| kind.as_str()).collect();
        Self {
            registry: Arc::clone(registry),
            policies: RwLock::default(),
            other_policy: OnceLock::new(),
            duplicates: registry.counter(&names::DUPLICATES, of_run),
            links: words(&names::LINKS, &links),
            drifts: words(&names::DRIFTS, &drifts),
            waiting_deltas: registry.gauge(&names::WAITING_DELTAS, of_run),
            unresolved_deltas: registry.gauge(&names::UNRESOLVED_DELTAS, of_run),
            rollouts_opened: registry.counter(&names::ROLLOUTS_OPENED, of_run),
            open_rollouts: registry.gauge(&names::OPEN_ROLLOUTS, of_run),
            oldest_open_rollout: registry.candidate(&names::OLDEST_OPEN_ROLLOUT_SECONDS, of_run),
            open_groups: registry.share(&names::OPEN_GROUPS, of_run),
            rollouts_awaiting_release: registry.share(&names::ROLLOUTS_AWAITING_RELEASE, of_run),
            roots: registry.histogram(&names::ROLLOUT_ROOTS, of_run),
            leaves: registry.histogram(&names::ROLLOUT_LEAVES, of_run),
            depth: registry.histogram(&names::ROLLOUT_DEPTH, of_run),
            agents: registry.histogram(&names::ROLLOUT_AGENTS, of_run),
            agents_without_list: registry.counter(&names::AGENTS_WITHOUT_LIST, of_run),
            reward_to_row: registry.histogram(&names::REWARD_TO_ROW_SECONDS, of_run),
            run,
        }
    }

    /// The metrics of one policy of this run.
    #[must_use]
    pub fn policy(&self, policy: &Name) -> Arc<PolicyMetrics> {
        if let Some(known) = self.policies.read().get(policy) {
            return Arc::clone(known);
        }
        let new = |label| Arc::new(PolicyMetrics::new(&self.registry, &self.run, label));
        match self.registry.labels.policies.named(policy.as_str()) {
            Some(label) => Arc::clone(self.policies.write().entry(policy.clone()).or_insert_with(|| new(label))),
            None => Arc::clone(self.other_policy.get_or_init(|| new(SharedString::const_str(OTHER)))),
        }
    }

    /// The gauges of a consumer group. The caller keeps them as long as the group is there.
    #[must_use]
    pub fn consumer_group(&self, group: &ConsumerGroupId) -> ConsumerGroupMetrics {
        ConsumerGroupMetrics::new(&self.registry, &self.run, group)
    }

    /// The ledger of calls for one policy. The caller keeps it as long as the run is there.
    #[must_use]
    pub fn call_ledger(&self, policy: &Name) -> CallLedgerMetrics {
        CallLedgerMetrics::new(&self.registry, &self.run, policy)
    }

    /// A distinct call was accepted.
    pub fn call_accepted(&self, policy: &Name) {
        self.policy(policy).call_accepted();
    }

    /// An event was known already.
    pub fn duplicate(&self) {
        self.duplicates.increment(1);
    }

    /// A call was answered with this link.
    pub fn link(&self, kind: LinkLabel) {
        self.links[kind as usize].increment(1);
    }

    /// A call was answered with this drift.
    pub fn drift(&self, kind: DriftLabel) {
        self.drifts[kind as usize].increment(1);
    }

    /// So many more, or fewer, deltas wait for their base.
    pub fn waiting_deltas_changed(&self, by: i64) {
        self.waiting_deltas.increment(by as f64);
    }

    /// So many more, or fewer, deltas must be sent again in full.
    pub fn unresolved_deltas_changed(&self, by: i64) {
        self.unresolved_deltas.increment(by as f64);
    }

    /// A rollout was opened.
    pub fn rollout_opened(&self) {
        self.rollouts_opened.increment(1);
        self.open_rollouts.increment(1.0);
    }

    /// A rollout ended.
    pub fn rollout_ended(&self, end: RolloutEnd) {
        let (outcome, reason) = end.words();
        let values = [self.run.clone(), SharedString::const_str(outcome), SharedString::const_str(reason)];
        self.registry.counter(&names::ROLLOUTS_ENDED, &values).increment(1);
        if end.was_open() {
            self.open_rollouts.decrement(1.0);
        }
    }

    /// A group was released for this reason; or was dropped then, for that one.
    pub fn group_released(&self, reason: &'static str, dropped: Option<&'static str>) {
        let metric = if dropped.is_some() { &names::GROUPS_DROPPED } else { &names::GROUPS_RELEASED };
        let values = [self.run.clone(), SharedString::const_str(dropped.unwrap_or(reason))];
        self.registry.counter(metric, &values).increment(1);
    }

    /// How many groups are not released, and how many finalised rollouts await that.
    pub fn set_groups(&self, open: u64, rollouts_awaiting_release: u64) {
        self.open_groups.set(open);
        self.rollouts_awaiting_release.set(rollouts_awaiting_release);
    }

    /// How old the oldest open rollout is; zero if none is open.
    pub fn set_oldest_open_rollout(&self, age: Duration) {
        self.oldest_open_rollout.set(age.as_secs_f64());
    }

    /// A rollout was finalised with this shape.
    pub fn rollout_shape(&self, shape: RolloutShape) {
        self.roots.record(number(shape.roots));
        self.leaves.record(number(shape.leaves));
        self.depth.record(number(shape.depth));
        self.agents.record(number(shape.agents));
        self.agents_without_list.increment(shape.agents_without_list);
    }

    /// From the event that completed a rollout to a unit of its rows being sent.
    pub fn reward_to_row(&self, took: Duration) {
        self.reward_to_row.record(took.as_secs_f64());
    }
}

/// The counters of one policy of one run.
pub struct PolicyMetrics {
    calls_accepted: Counter,
    rows_made: Counter,
    trained_tokens: Counter,
    context_tokens: Counter,
    calls_per_row: Histogram,
}

impl PolicyMetrics {
    fn new(registry: &Registry, run: &SharedString, policy: SharedString) -> Self {
        let of_policy = [run.clone(), policy];
        Self {
            calls_accepted: registry.counter(&names::CALLS_ACCEPTED, &of_policy),
            rows_made: registry.counter(&names::ROWS_MADE, &of_policy),
            trained_tokens: registry.counter(&names::TRAINED_TOKENS, &of_policy),
            context_tokens: registry.counter(&names::CONTEXT_TOKENS, &of_policy),
            calls_per_row: registry.histogram(&names::CALLS_PER_ROW, std::slice::from_ref(run)),
        }
    }

    /// A distinct call was accepted.
    pub fn call_accepted(&self) {
        self.calls_accepted.increment(1);
    }

    /// A row was made.
    pub fn row_made(&self, row: RowMade) {
        self.rows_made.increment(1);
        self.trained_tokens.increment(row.trained_tokens);
        self.context_tokens.increment(row.context_tokens);
        self.calls_per_row.record(number(row.trained_calls));
    }
}

// Counters by word stand in the order of the words.
const _: () = assert!(LinkLabel::Waiting as usize + 1 == LinkLabel::ALL.len());
const _: () = assert!(DriftLabel::Rewind as usize + 1 == DriftLabel::ALL.len());
const _: () = assert!(EndReason::Superseded as usize + 1 == EndReason::ALL.len());
