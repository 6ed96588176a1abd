//! Every metric: its name, kind, unit, labels and help, as one list to read.
//!
//! Names begin with `hedgerow_`, end in their unit where they have one, and counters end in `_total`. No id is a label but
//! the run, the policy and the consumer group, and these are bounded (see [`super::labels`]).

use metrics::Unit;

/// What a metric does with its values.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Kind {
    /// It only grows.
    Counter,
    /// It goes up and down.
    Gauge,
    /// It counts values up to each of these bounds.
    Histogram(&'static [f64]),
}

/// One metric.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Metric {
    /// Its name.
    pub name: &'static str,
    /// What it does with its values.
    pub kind: Kind,
    /// What it counts in.
    pub unit: Unit,
    /// The names of its labels, in order.
    pub labels: &'static [&'static str],
    /// What it says, for people.
    pub help: &'static str,
}

/// Bounds of durations in seconds: 0.5 ms to 10 min.
pub const SECONDS: &[f64] = &[
    0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0,
    600.0,
];
/// Bounds of the calls that one row trains.
pub const RATIO: &[f64] =
    &[1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0, 24.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0];
/// Bounds of counts in one rollout.
pub const COUNT: &[f64] =
    &[0.0, 1.0, 2.0, 3.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1000.0, 2000.0, 5000.0, 10_000.0, 100_000.0];

const COUNTER: Kind = Kind::Counter;
const GAUGE: Kind = Kind::Gauge;
const IN_SECONDS: Kind = Kind::Histogram(SECONDS);
const IN_RATIO: Kind = Kind::Histogram(RATIO);
const IN_COUNT: Kind = Kind::Histogram(COUNT);

macro_rules! metrics {
    ($($constant:ident: $kind:ident $name:literal in $unit:ident by [$($label:literal)*] $help:literal;)*) => {
        $(
            #[doc = $help]
            pub const $constant: Metric =
                Metric { name: $name, kind: $kind, unit: Unit::$unit, labels: &[$($label),*], help: $help };
        )*

        /// All metrics.
        pub const ALL: &[Metric] = &[$($constant),*];
    };
}

metrics! {
    // What comes in.
    CALLS_ACCEPTED: COUNTER "hedgerow_calls_accepted_total" in Count by ["run" "policy"]
        "Distinct calls accepted.";
    DUPLICATES: COUNTER "hedgerow_duplicates_total" in Count by ["run"]
        "Events that were known already and changed nothing.";
    REFUSED: COUNTER "hedgerow_requests_refused_total" in Count by ["reason"]
        "Requests refused, by stable reason: in an answer, or as the end of a request or stream.";
    LINKS: COUNTER "hedgerow_links_total" in Count by ["run" "kind"]
        "Calls by what their link was when they were answered: root, child, broken, or waiting for the call it names.";
    DRIFTS: COUNTER "hedgerow_drifts_total" in Count by ["run" "kind"]
        "Calls whose prompt leaves the call it was meant to continue: some id differs, or it is a rewind.";
    WAITING_DELTAS: GAUGE "hedgerow_waiting_deltas" in Count by ["run"]
        "Calls sent as deltas whose base has not come.";
    UNRESOLVED_DELTAS: GAUGE "hedgerow_unresolved_deltas" in Count by ["run"]
        "Calls sent as deltas that must be sent again in full.";
    IN_FLIGHT_BYTES: GAUGE "hedgerow_in_flight_bytes" in Bytes by []
        "Bytes of messages between their arrival and the place of their records in the log.";
    RESIDENT_BYTES: GAUGE "hedgerow_resident_bytes" in Bytes by []
        "Bytes that rollouts, groups and tombstones hold in memory.";
    MEMORY_BUDGET_BYTES: GAUGE "hedgerow_memory_budget_bytes" in Bytes by []
        "What these may be before new groups (80 %) and calls (100 %) are refused: three quarters of memory_budget_bytes.";
    EVICTED_ROLLOUTS: GAUGE "hedgerow_evicted_rollouts" in Count by []
        "Rollouts whose tokens are in the log only.";
    EVICTIONS: COUNTER "hedgerow_evictions_total" in Count by []
        "Times that a rollout's tokens left memory.";
    RESTORE_SECONDS: IN_SECONDS "hedgerow_restore_seconds" in Seconds by []
        "How long it took to read a rollout's tokens back from the log, each time.";
    LOG_BYTES: GAUGE "hedgerow_log_bytes" in Bytes by []
        "Bytes of the log's files on disk, with spares.";
    LOG_BUDGET_BYTES: GAUGE "hedgerow_log_budget_bytes" in Bytes by []
        "What these may be before calls and new rollouts are refused.";
    LOG_QUEUED_BYTES: GAUGE "hedgerow_log_queued_bytes" in Bytes by []
        "Bytes of records that are not durable yet.";
    REPLAY_SECONDS: GAUGE "hedgerow_replay_seconds" in Seconds by []
        "How long the log has been read for, or was, when the service started.";
    REPLAY_LEFT_BYTES: GAUGE "hedgerow_replay_left_bytes" in Bytes by []
        "Bytes of the log that are still to be read before the service takes work.";
    REPORT_STREAMS: GAUGE "hedgerow_report_streams" in Count by []
        "Open streams of reports.";
    LOG_SYNC_SECONDS: IN_SECONDS "hedgerow_log_sync_seconds" in Seconds by []
        "How long the disk took to make what was written to the log durable, each time.";
    DURABLE_ANSWER_SECONDS: IN_SECONDS "hedgerow_durable_answer_seconds" in Seconds by []
        "From the arrival of a message to its durable answer.";

    // Rollouts.
    ROLLOUTS_OPENED: COUNTER "hedgerow_rollouts_opened_total" in Count by ["run"]
        "Rollouts opened; each attempt counts.";
    ROLLOUTS_ENDED: COUNTER "hedgerow_rollouts_ended_total" in Count by ["run" "outcome" "reason"]
        "Rollouts finalised, retired, discarded or superseded, and why.";
    OPEN_ROLLOUTS: GAUGE "hedgerow_open_rollouts" in Count by ["run"]
        "Rollouts that are open.";
    OLDEST_OPEN_ROLLOUT_SECONDS: GAUGE "hedgerow_oldest_open_rollout_seconds" in Seconds by ["run"]
        "Age of the oldest open rollout.";
    ROLLOUT_ROOTS: IN_COUNT "hedgerow_rollout_roots" in Count by ["run"]
        "Roots of a finalised rollout.";
    ROLLOUT_LEAVES: IN_COUNT "hedgerow_rollout_leaves" in Count by ["run"]
        "Leaves of a finalised rollout.";
    ROLLOUT_DEPTH: IN_COUNT "hedgerow_rollout_depth" in Count by ["run"]
        "Calls on the longest walk of a finalised rollout.";
    ROLLOUT_AGENTS: IN_COUNT "hedgerow_rollout_agents" in Count by ["run"]
        "Agents of a finalised rollout.";
    AGENTS_WITHOUT_LIST: COUNTER "hedgerow_agents_without_list_total" in Count by ["run"]
        "Agents of finalised rollouts that made calls and gave no list of kept calls, though some list was given: unless the run says otherwise, they keep nothing.";

    // Groups.
    OPEN_GROUPS: GAUGE "hedgerow_open_groups" in Count by ["run"]
        "Groups that await their release; where no release is awaited, those of which something may still come.";
    GROUPS_RELEASED: COUNTER "hedgerow_groups_released_total" in Count by ["run" "reason"]
        "Groups released to trainers: whole, by quorum, by timeout, or by an operator.";
    GROUPS_DROPPED: COUNTER "hedgerow_groups_dropped_total" in Count by ["run" "reason"]
        "Groups that nobody is given, when they came to be released: too_few_members, zero_variance, or advantage_not_finite.";
    ROLLOUTS_AWAITING_RELEASE: GAUGE "hedgerow_rollouts_awaiting_release" in Count by ["run"]
        "Finalised rollouts that await their group's release.";

    // Rows.
    ROWS_MADE: COUNTER "hedgerow_rows_made_total" in Count by ["run" "policy"]
        "Rows made.";
    TRAINED_TOKENS: COUNTER "hedgerow_trained_tokens_total" in Count by ["run" "policy"]
        "Tokens in rows that train.";
    CONTEXT_TOKENS: COUNTER "hedgerow_context_tokens_total" in Count by ["run" "policy"]
        "Tokens in rows that are context.";
    CALLS_PER_ROW: IN_RATIO "hedgerow_calls_per_row" in Count by ["run"]
        "Calls that one row trains: what the forest saves against one row for each call.";
    REWARD_TO_ROW_SECONDS: IN_SECONDS "hedgerow_reward_to_row_seconds" in Seconds by ["run"]
        "From the event that completed a rollout to a unit of its rows being sent, once for each unit and consumer.";

    // Trainers.
    QUEUED_UNITS: GAUGE "hedgerow_queued_units" in Count by ["run" "consumer_group"]
        "Units that wait to be given out.";
    LEASED_UNITS: GAUGE "hedgerow_leased_units" in Count by ["run" "consumer_group"]
        "Units out at consumers.";
    UNDELIVERABLE_UNITS: GAUGE "hedgerow_undeliverable_units" in Count by ["run" "consumer_group"]
        "Units given out as often as they may be and never acknowledged; can be released by hand.";
    REDELIVERED_UNITS: COUNTER "hedgerow_redelivered_units_total" in Count by ["run" "consumer_group"]
        "Times that a unit was given out again.";
    CONSUMERS: GAUGE "hedgerow_consumers" in Count by ["run" "consumer_group"]
        "Consumers connected.";
    CONSUMER_LAG_UNITS: GAUGE "hedgerow_consumer_lag_units" in Count by ["run" "consumer_group"]
        "Units made and not yet acknowledged or dropped.";
    CONSUMER_LAG_TOKENS: GAUGE "hedgerow_consumer_lag_tokens" in Count by ["run" "consumer_group"]
        "Tokens in these units.";
    CONSUMER_LAG_SECONDS: GAUGE "hedgerow_consumer_lag_seconds" in Seconds by ["run" "consumer_group"]
        "Age of the oldest of these units.";

    // The ledger: what became of everything.
    LEDGER_CALLS_ACCEPTED: GAUGE "hedgerow_ledger_accepted_calls" in Count by ["run" "policy"]
        "Distinct calls accepted, as the ledger knows them: the sum of hedgerow_ledger_calls over fate and reason.";
    LEDGER_CALLS: GAUGE "hedgerow_ledger_calls" in Count by ["run" "policy" "fate" "reason"]
        "Calls by fate, as without a limit on rows: pending, trained, context, no_row, empty, not_kept, or gone with their rollout.";
    TOO_LONG_CALLS: GAUGE "hedgerow_too_long_calls" in Count by ["run" "consumer_group"]
        "Calls that a consumer group was given and does not train, because they are longer than its max_row_tokens.";
    LEDGER_ROWS_MADE: GAUGE "hedgerow_ledger_made_rows" in Count by ["run" "consumer_group"]
        "Rows made, as the ledger knows them: the sum of hedgerow_ledger_rows over state and reason.";
    LEDGER_ROWS: GAUGE "hedgerow_ledger_rows" in Count by ["run" "consumer_group" "state" "reason"]
        "Rows by state: acknowledged, waiting, leased, or dropped.";
    WAITING_ON: GAUGE "hedgerow_waiting_on" in Count by ["who"]
        "1 at one of: harness_bound (trainers wait for rollouts), trainer_bound (rows wait for trainers), log_bound, idle.";
}

/// Tells a recorder what each metric means.
pub fn describe(recorder: &impl metrics::Recorder) {
    for metric in ALL {
        let (name, unit, help) = (metric.name.into(), Some(metric.unit), metric.help.into());
        match metric.kind {
            Kind::Counter => recorder.describe_counter(name, unit, help),
            Kind::Gauge => recorder.describe_gauge(name, unit, help),
            Kind::Histogram(_) => recorder.describe_histogram(name, unit, help),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_follow_the_rules() {
        let mut seen = std::collections::BTreeSet::new();
        for metric in ALL {
            assert!(seen.insert(metric.name), "{} is there twice", metric.name);
            assert!(metric.name.starts_with("hedgerow_"), "{}", metric.name);
            assert_eq!(metric.name.ends_with("_total"), metric.kind == Kind::Counter, "{}", metric.name);
            assert_eq!(metric.name.ends_with("_seconds"), metric.unit == Unit::Seconds, "{}", metric.name);
            assert_eq!(metric.name.ends_with("_bytes"), metric.unit == Unit::Bytes, "{}", metric.name);
            assert!(metric.help.ends_with('.'), "{}", metric.name);
            if let Kind::Histogram(bounds) = metric.kind {
                assert!(!bounds.is_empty() && bounds.is_sorted(), "{}", metric.name);
            }
        }
    }
}
