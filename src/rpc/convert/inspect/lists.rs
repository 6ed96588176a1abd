//! Runs, groups and consumer groups as they are shown, and which rollouts a list shows.

use std::collections::{BTreeMap, BTreeSet};

use crate::error::Refusal;
use crate::forest::link::DriftKind;
use crate::ids::{AgentId, GroupId, Name, RolloutId, RunId};
use crate::limits;
use crate::proto::v1;
use crate::queue::OpenStep;
use crate::rollout::drift::DriftCount;
use crate::rollout::view::RolloutView;
use crate::store::sequencer::{ConsumerFigures, ConsumerGroupLook, GroupLook, RowsOf, RunLook};
use crate::telemetry::{CallCounts, RowCounts};

use super::super::answer::text;
use super::super::fields::{duration, duration_ms, identifier, known, optional_identifier, timestamp};
use super::super::groups::figures;
use super::super::trainer;

/// Which rollouts a list shows.
#[derive(Clone, Debug)]
pub struct RolloutFilter {
    /// Those of this run.
    pub run: RunId,
    /// Those of this group, if one is said.
    pub group: Option<GroupId>,
    /// Those in these states; none: in all.
    states: Vec<v1::RolloutState>,
    tags: BTreeMap<String, String>,
    idle_for_ms: Option<u64>,
    with_drift: bool,
    with_missing_calls: bool,
}

impl RolloutFilter {
    /// What a request asks for.
    ///
    /// # Errors
    /// If a field is wrong.
    pub fn new(request: &v1::ListRolloutsRequest) -> Result<Self, Refusal> {
        let mut states = Vec::new();
        for (place, state) in request.states.iter().enumerate() {
            states.push(known(*state, format_args!("states[{place}]"))?);
        }
        if states.contains(&v1::RolloutState::Unspecified) {
            states.clear();
        }
        Ok(Self {
            run: identifier(&request.run_id, "run_id", RunId::parse)?,
            group: optional_identifier(&request.group_id, "group_id", GroupId::parse)?,
            states,
            tags: request.tags.clone(),
            idle_for_ms: duration_ms(request.idle_for.as_ref(), "idle_for")?,
            with_drift: request.with_drift,
            with_missing_calls: request.with_missing_calls,
        })
    }

    /// Whether it shows this rollout, as far as that can be said at once: see [`Self::wants_missing_calls`].
    #[must_use]
    pub fn shows(&self, view: &RolloutView<'_>, now_unix_ms: u64) -> bool {
        let facts = view.rollout.facts();
        let tagged = |key: &str, value: &String| {
            Name::parse(key).is_ok_and(|key| facts.tags.get(&key).is_some_and(|tag| tag == value))
        };
        let idle_ms = now_unix_ms.saturating_sub(view.heard_unix_ms);
        self.wants(super::state(view.rollout))
            && self.tags.iter().all(|(key, value)| tagged(key, value))
            && self.idle_for_ms.is_none_or(|least| idle_ms >= least)
            && (!self.with_drift || facts.answered_drifts > 0)
    }

    /// Whether it shows only rollouts that wait for calls.
    #[must_use]
    pub fn wants_missing_calls(&self) -> bool {
        self.with_missing_calls
    }

    /// Whether it shows rollouts that have ended.
    #[must_use]
    pub fn shows_ended(&self) -> bool {
        let open_only = self.idle_for_ms.is_some() || self.with_drift || self.with_missing_calls;
        self.wants(v1::RolloutState::Ended) && self.tags.is_empty() && !open_only
    }

    fn wants(&self, state: v1::RolloutState) -> bool {
        self.states.is_empty() || self.states.contains(&state)
    }
}

/// A run in a few figures.
#[must_use]
pub fn run(look: &RunLook) -> v1::RunSummary {
    v1::RunSummary {
        run_id: look.run.to_string(),
        create_time: Some(timestamp(look.created_unix_ms)),
        settings_version: look.settings_version,
        open_rollouts: look.open_rollouts,
        open_groups: look.open_groups,
        finalised_rollouts: look.finalised_rollouts,
        retired_rollouts: look.retired_rollouts,
        gone_rollouts: look.gone_rollouts.iter().map(|(why, count)| (why.as_str().to_owned(), *count)).collect(),
        ledgers: policy_ledgers(&look.calls),
        rows: look.rows.iter().map(row_ledger).collect(),
        drifts: look.drifts.iter().map(|(agent, kind, count)| drift_count(agent.as_ref(), *kind, *count)).collect(),
        refused_requests: look.refused_requests,
    }
}

/// The ledger of many runs together.
#[derive(Default)]
pub struct ServiceLedger {
    calls: BTreeMap<Name, CallCounts>,
    /// By consumer group and policy.
    rows: BTreeMap<(String, Option<String>), RowCounts>,
    refused_requests: u64,
}

impl ServiceLedger {
    /// Takes in a run.
    pub fn add(&mut self, run: &RunLook) {
        for (policy, counts) in &run.calls {
            self.calls.entry(policy.clone()).or_default().add(counts);
        }
        for of in &run.rows {
            self.rows.entry((of.consumer_group.clone(), of.policy.clone())).or_default().add(&of.rows);
        }
        self.refused_requests += run.refused_requests;
    }

    /// It as a message.
    #[must_use]
    pub fn message(self) -> v1::ServiceLedger {
        let row = |((consumer_group, policy), rows)| row_ledger(&RowsOf { consumer_group, policy, rows });
        v1::ServiceLedger {
            ledgers: policy_ledgers(&self.calls.into_iter().collect::<Vec<_>>()),
            rows: self.rows.into_iter().map(row).collect(),
            refused_requests: self.refused_requests,
        }
    }
}

fn policy_ledgers(calls: &[(Name, CallCounts)]) -> Vec<v1::PolicyLedger> {
    calls.iter().map(|(policy, counts)| policy_ledger(policy, counts)).collect()
}

fn policy_ledger(policy: &Name, counts: &CallCounts) -> v1::PolicyLedger {
    debug_assert!(counts.adds_up(), "invariant 4: every accepted call has one fate: {counts:?}");
    let mut gone: BTreeMap<String, u64> = BTreeMap::new();
    for (reason, calls) in counts.gone.iter().filter(|(_, calls)| *calls > 0) {
        *gone.entry(reason.as_str().to_owned()).or_default() += calls;
    }
    v1::PolicyLedger {
        policy: policy.to_string(),
        accepted: counts.accepted,
        pending: counts.pending,
        trained: counts.trained,
        context: counts.context,
        no_row: counts.in_no_row,
        empty: counts.empty,
        not_kept: counts.not_kept,
        too_long: counts.too_long,
        gone,
    }
}

fn row_ledger(of: &RowsOf) -> v1::RowLedger {
    debug_assert!(of.rows.adds_up(), "invariant 4: every row made is in one state: {of:?}");
    let mut dropped: BTreeMap<String, u64> = BTreeMap::new();
    for (reason, rows) in of.rows.dropped.iter().filter(|(_, rows)| *rows > 0) {
        *dropped.entry((*reason).to_owned()).or_default() += rows;
    }
    v1::RowLedger {
        policy: of.policy.clone().unwrap_or_default(),
        consumer_group: of.consumer_group.clone(),
        made: of.rows.made,
        acknowledged: of.rows.acknowledged,
        waiting: of.rows.waiting,
        leased: of.rows.leased,
        dropped,
    }
}

/// Drift of one agent and of one kind; without an agent, of those after the first few.
#[must_use]
pub fn drift_count(agent: Option<&AgentId>, kind: DriftKind, count: DriftCount) -> v1::DriftCount {
    let kind = match kind {
        DriftKind::Differs => v1::DriftKind::Differs,
        DriftKind::Rewind => v1::DriftKind::Rewind,
    };
    v1::DriftCount {
        agent_id: text(agent),
        kind: kind.into(),
        calls: count.calls,
        repeated_row_tokens: count.repeated_row_tokens,
    }
}

/// A group and what it waits for.
#[must_use]
pub fn group(look: &GroupLook) -> v1::GroupSummary {
    let ids = |(ids, _): &(Vec<RolloutId>, u32)| ids.iter().map(RolloutId::to_string).collect();
    let absence = |(rollout, attempt, reason): &(RolloutId, u32, String)| v1::GroupAbsence {
        rollout_id: rollout.to_string(),
        attempt: *attempt,
        reason: reason.clone(),
    };
    let as_of_now = || {
        let release = if look.is_over { v1::GroupRelease::Whole } else { v1::GroupRelease::Unspecified };
        v1::GroupFigures {
            group_id: look.group.to_string(),
            group_size: look.size,
            counted_rollouts: look.finalised.1,
            absences: look.out.0.iter().map(absence).collect(),
            release: release.into(),
            reward_mean: look.statistics.mean,
            reward_standard_deviation: look.statistics.standard_deviation,
            degenerate: look.size == Some(1),
        }
    };
    let released = look.release.as_ref().map(|release| figures(&look.group, release));
    let dropped = look.release.as_ref().and_then(|release| release.dropped());
    v1::GroupSummary {
        figures: Some(released.unwrap_or_else(as_of_now)),
        open_rollout_ids: ids(&look.open),
        finalised_rollout_ids: ids(&look.finalised),
        open_places: look.open_places,
        drop_reason: dropped.map_or_else(String::new, |why| why.as_str().to_owned()),
        open_time: Some(timestamp(look.opened_unix_ms)),
        timeout_after: look.timeout_after_ms.map(duration),
        open_rollouts: look.open.1,
        finalised_rollouts: look.finalised.1,
        out_rollouts: look.out.1,
    }
}

/// A consumer group and its lag, as of this moment on the store's clock and the calendar.
#[must_use]
pub fn consumer_group(
    run: &RunId,
    look: &ConsumerGroupLook,
    (now_ms, unix_ms): (u64, u64),
) -> v1::ConsumerGroupSummary {
    let stats = &look.stats;
    let consumer = |consumer: &ConsumerFigures| {
        let facts = &consumer.facts;
        let silent_ms = now_ms.saturating_sub(facts.last_sign_ms);
        v1::ConsumerSummary {
            consumer: facts.name.clone(),
            connected: true,
            credit_tokens: facts.credit_tokens,
            leased_tokens: facts.in_flight.tokens,
            leased_units: facts.in_flight.units,
            policy_version: facts.policy_version,
            last_request_time: Some(timestamp(unix_ms.saturating_sub(silent_ms))),
            shard: facts.shard,
        }
    };
    v1::ConsumerGroupSummary {
        run_id: run.to_string(),
        consumer_group: look.name.to_string(),
        settings: Some(trainer::group_settings(&look.definition)),
        required: look.required,
        consumers: look.consumers.iter().map(consumer).collect(),
        queued_units: stats.waiting.units,
        queued_tokens: stats.waiting.tokens,
        leased_units: stats.leased.units,
        leased_tokens: stats.leased.tokens,
        undeliverable_unit_ids: look.undeliverable.0.clone(),
        oldest_age: stats.oldest_unsettled_ms.map(duration),
        waiting_for: waiting_for(look).into_iter().map(i32::from).collect(),
        expires_after: look.expires_after_ms.map(duration),
        ephemeral: look.definition.ephemeral,
        ledgers: policy_ledgers(&look.calls),
        rows: Some(row_ledger(&look.rows)),
        undeliverable_units: look.undeliverable.1,
        seek_count: look.seek_count,
        next_step_index: look.steps.as_ref().map_or(0, |(next, _)| *next),
        open_steps: look.steps.iter().flat_map(|(_, open)| open).map(open_step).collect(),
    }
}

fn open_step(step: &OpenStep) -> v1::OpenStep {
    let count = |number: usize| u32::try_from(number).unwrap_or(u32::MAX);
    v1::OpenStep {
        step_index: step.index,
        units: step.units,
        missing_shards: step.missing_shards.iter().copied().take(limits::LISTED_IDS_MAX).collect(),
        missing_shard_count: count(step.missing_shards.len()),
        leased_shard_count: count(usize::try_from(step.leased_shards).unwrap_or(usize::MAX)),
    }
}

/// All that its consumers wait for; without any, what it waits for itself.
fn waiting_for(look: &ConsumerGroupLook) -> BTreeSet<v1::WaitingFor> {
    if look.consumers.is_empty() {
        return if look.stats.waiting.units > 0 {
            BTreeSet::from([v1::WaitingFor::Consumers])
        } else {
            trainer::rollouts_awaited(&look.rollouts).into_iter().collect()
        };
    }
    let queues = look.consumers.iter().filter_map(|consumer| consumer.waiting.as_ref());
    queues.flat_map(|queue| trainer::waiting_for(queue, &look.rollouts)).collect()
}
