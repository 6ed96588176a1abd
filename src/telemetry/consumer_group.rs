//! What is recorded of one consumer group: its units, its lag, its consumers, and its ledger of rows (RULES 3.6.4).

use std::time::Duration;

use metrics::{Counter, SharedString};

use super::labels::{NO_REASON, OTHER};
use super::names;
use super::registry::{Candidate, Registry, Share};
use crate::ids::ConsumerGroupId;

/// The reasons for which rows are dropped, as label values. A reason that is not among them counts as `other`.
pub const DROP_REASONS: [&str; 8] =
    ["undeliverable", "stale", "overflow", "operator", "forgotten", "late", "group_dropped", OTHER];

/// What became of the rows made for a consumer group. The other fields add up to `made`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RowCounts {
    /// All of them, counted apart.
    pub made: u64,
    /// Acknowledged.
    pub acknowledged: u64,
    /// Not out at a consumer, and not settled.
    pub waiting: u64,
    /// Out at consumers, or with a record about them on its way to the log.
    pub leased: u64,
    /// Dropped, by reason (see [`DROP_REASONS`]); a reason may stand more than once.
    pub dropped: Vec<(&'static str, u64)>,
}

impl RowCounts {
    fn states(&self) -> [(&'static str, u64); 3] {
        [("acknowledged", self.acknowledged), ("waiting", self.waiting), ("leased", self.leased)]
    }

    fn dropped_for(&self, listed: &str) -> u64 {
        let is_listed = |reason: &str| DROP_REASONS.contains(&reason);
        let counts = |reason: &str| reason == listed || (listed == OTHER && !is_listed(reason));
        self.dropped.iter().filter(|(reason, _)| counts(reason)).map(|(_, rows)| rows).sum()
    }

    /// Takes in another ledger.
    pub fn add(&mut self, other: &Self) {
        self.made += other.made;
        self.acknowledged += other.acknowledged;
        self.waiting += other.waiting;
        self.leased += other.leased;
        self.dropped.extend(other.dropped.iter().copied());
    }

    /// Whether every row made is in one state.
    #[must_use]
    pub fn adds_up(&self) -> bool {
        let states: u64 = self.states().iter().map(|(_, rows)| rows).sum();
        states + self.dropped.iter().map(|(_, rows)| rows).sum::<u64>() == self.made
    }
}

/// A consumer group in numbers.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ConsumerGroupFigures {
    /// Consumers that are connected.
    pub consumers: u64,
    /// Units that wait to be given out.
    pub queued_units: u64,
    /// Units out at consumers.
    pub leased_units: u64,
    /// Units given out as often as they may be.
    pub undeliverable_units: u64,
    /// Units not settled.
    pub lag_units: u64,
    /// Tokens in them.
    pub lag_tokens: u64,
    /// Age of the oldest of them.
    pub lag: Duration,
    /// Calls that it does not train because they are longer than its rows may be.
    pub too_long_calls: u64,
    /// Its ledger.
    pub rows: RowCounts,
}

/// The metrics of one consumer group. What its gauges say goes when this is dropped.
pub struct ConsumerGroupMetrics {
    queued_units: Share,
    leased_units: Share,
    undeliverable_units: Share,
    lag_units: Share,
    lag_tokens: Share,
    lag_seconds: Candidate,
    redelivered_units: Counter,
    consumers: Share,
    too_long_calls: Share,
    rows_made: Share,
    row_states: [Share; 3],
    rows_dropped: [Share; DROP_REASONS.len()],
}

impl ConsumerGroupMetrics {
    pub(super) fn new(registry: &Registry, run: &SharedString, group: &ConsumerGroupId) -> Self {
        let of_group = [run.clone(), registry.labels.consumer_groups.value(group.as_str())];
        let share = |metric| registry.share(metric, &of_group);
        let rows = |state, reason| {
            let [run, group] = of_group.clone();
            let values = [run, group, SharedString::const_str(state), SharedString::const_str(reason)];
            registry.share(&names::LEDGER_ROWS, &values)
        };
        Self {
            queued_units: share(&names::QUEUED_UNITS),
            leased_units: share(&names::LEASED_UNITS),
            undeliverable_units: share(&names::UNDELIVERABLE_UNITS),
            lag_units: share(&names::CONSUMER_LAG_UNITS),
            lag_tokens: share(&names::CONSUMER_LAG_TOKENS),
            lag_seconds: registry.candidate(&names::CONSUMER_LAG_SECONDS, &of_group),
            redelivered_units: registry.counter(&names::REDELIVERED_UNITS, &of_group),
            consumers: share(&names::CONSUMERS),
            too_long_calls: share(&names::TOO_LONG_CALLS),
            rows_made: share(&names::LEDGER_ROWS_MADE),
            row_states: RowCounts::default().states().map(|(state, _)| rows(state, NO_REASON)),
            rows_dropped: DROP_REASONS.map(|reason| rows("dropped", reason)),
        }
    }

    /// How the group stands now.
    pub fn set(&self, figures: &ConsumerGroupFigures) {
        self.consumers.set(figures.consumers);
        self.queued_units.set(figures.queued_units);
        self.leased_units.set(figures.leased_units);
        self.undeliverable_units.set(figures.undeliverable_units);
        self.lag_units.set(figures.lag_units);
        self.lag_tokens.set(figures.lag_tokens);
        self.lag_seconds.set(figures.lag.as_secs_f64());
        self.too_long_calls.set(figures.too_long_calls);
        self.rows_made.set(figures.rows.made);
        for (share, (_, rows)) in self.row_states.iter().zip(figures.rows.states()) {
            share.set(rows);
        }
        for (share, reason) in self.rows_dropped.iter().zip(DROP_REASONS) {
            share.set(figures.rows.dropped_for(reason));
        }
    }

    /// So many units were given out again.
    pub fn redelivered(&self, units: u64) {
        self.redelivered_units.increment(units);
    }
}
