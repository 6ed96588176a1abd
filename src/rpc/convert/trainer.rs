//! What a subscription is told: how it was joined, acknowledgements, news, and what it waits for.

use crate::ids::{ConsumerGroupId, RunId};
use crate::proto::v1::{self, subscribe_response::Response};
use crate::queue::{DropReason, UnitId, UnitKind, WaitReason};
use crate::store::sequencer::{AckOutcome, Subscribed, Waiting};

use super::fields::{duration, timestamp};

/// How a subscription was joined.
#[must_use]
pub fn subscribed(
    run: &RunId,
    consumer_group: &ConsumerGroupId,
    consumer: &str,
    subscribed: &Subscribed,
) -> v1::Subscribed {
    let definition = &subscribed.definition;
    let unit = match definition.unit {
        UnitKind::Row => v1::Unit::Row,
        UnitKind::Rollout => v1::Unit::Rollout,
    };
    v1::Subscribed {
        run_id: run.to_string(),
        consumer_group: consumer_group.to_string(),
        consumer: consumer.to_owned(),
        settings: Some(v1::ConsumerGroupSettings {
            policy: definition.policy.clone().unwrap_or_default(),
            unit: unit.into(),
            shape: v1::Shape::Leaf.into(),
            max_row_tokens: definition.max_row_tokens.map_or(0, u64::from),
            ..v1::ConsumerGroupSettings::default()
        }),
        created: subscribed.created,
        held_unit_ids: subscribed.joined.held.iter().map(|unit| unit.as_str().to_owned()).collect(),
        lost_unit_ids: subscribed.joined.lost.iter().map(|(unit, _)| unit.as_str().to_owned()).collect(),
        seek_count: 0,
        lease: Some(duration(subscribed.lease_ms)),
        idle_expiry: None,
    }
}

/// What became of acknowledgements. They are durable when this is sent, unless nothing of the subscription lasts.
#[must_use]
pub fn ack_result(results: &[(UnitId, AckOutcome)], ephemeral: bool) -> Response {
    let entry = |(unit, outcome): &(UnitId, AckOutcome)| {
        let outcome = match outcome {
            AckOutcome::Acknowledged => v1::AckOutcome::Acknowledged,
            AckOutcome::Already => v1::AckOutcome::AlreadyAcknowledged,
            AckOutcome::Unknown => v1::AckOutcome::Unknown,
            AckOutcome::Dropped => v1::AckOutcome::Dropped,
            AckOutcome::Returned => v1::AckOutcome::Returned,
            AckOutcome::NotHeld => v1::AckOutcome::NotHeld,
        };
        v1::AckResultEntry { unit_id: unit.as_str().to_owned(), outcome: outcome.into() }
    };
    Response::AckResult(v1::AckResult { entries: results.iter().map(entry).collect(), durable: !ephemeral })
}

/// A unit was dropped.
#[must_use]
pub fn dropped(unit: &UnitId, reason: DropReason, unix_ms: u64) -> Response {
    let kind = match reason {
        DropReason::Undeliverable => v1::UnitNoticeKind::Undeliverable,
        DropReason::Stale => v1::UnitNoticeKind::Stale,
        DropReason::Overflow => v1::UnitNoticeKind::Skipped,
        DropReason::Operator | DropReason::Forgotten => v1::UnitNoticeKind::Operator,
    };
    notice(unit, kind, reason.as_str(), unix_ms)
}

/// A lease of this consumer ran out.
#[must_use]
pub fn lease_ended(unit: &UnitId, unix_ms: u64) -> Response {
    notice(
        unit,
        v1::UnitNoticeKind::LeaseEnded,
        "nothing was heard of this consumer for the length of a lease",
        unix_ms,
    )
}

fn notice(unit: &UnitId, kind: v1::UnitNoticeKind, reason: &str, unix_ms: u64) -> Response {
    Response::UnitNotice(v1::UnitNotice {
        unit_id: unit.as_str().to_owned(),
        kind: kind.into(),
        reason: reason.to_owned(),
        units: 1,
        time: Some(timestamp(unix_ms)),
        ..v1::UnitNotice::default()
    })
}

/// An ephemeral subscription reads too slowly, and units were passed over.
#[must_use]
pub fn skipped(units: u64, unix_ms: u64) -> Response {
    Response::UnitNotice(v1::UnitNotice {
        kind: v1::UnitNoticeKind::Skipped.into(),
        reason: "the subscription reads more slowly than rows are made".to_owned(),
        units,
        time: Some(timestamp(unix_ms)),
        ..v1::UnitNotice::default()
    })
}

/// What a subscription waits for.
#[must_use]
pub fn heartbeat(waiting: &Waiting, unix_ms: u64) -> Response {
    let queue = &waiting.queue;
    let mut reasons = Vec::new();
    match queue.reason {
        WaitReason::NothingQueued => reasons.extend(rollouts_awaited(waiting)),
        WaitReason::AllOut => {
            if queue.leased_to_others.units > 0 {
                reasons.push(v1::WaitingFor::AcksOfOthers);
            }
            reasons.extend(rollouts_awaited(waiting));
        }
        WaitReason::Delayed { .. } => reasons.push(v1::WaitingFor::NackDelay),
        WaitReason::NoCredit | WaitReason::CreditShort { .. } | WaitReason::TooManyUnitsInFlight { .. } => {
            reasons.push(v1::WaitingFor::Credit);
        }
        WaitReason::NotWaiting => {}
    }
    Response::Heartbeat(v1::SubscriptionHeartbeat {
        waiting_for: reasons.into_iter().map(i32::from).collect(),
        // The counts are read one after another while rollouts move.
        open_rollouts: waiting.open_rollouts.saturating_sub(waiting.sealed_rollouts),
        sealed_rollouts: waiting.sealed_rollouts.saturating_sub(waiting.incomplete_rollouts),
        rewarded_rollouts: waiting.rewarded_rollouts.saturating_sub(waiting.incomplete_rollouts),
        incomplete_rollouts: waiting.incomplete_rollouts,
        open_groups: waiting.open_groups,
        queued_units: queue.waiting.units,
        queued_tokens: queue.waiting.tokens,
        leased_units: queue.in_flight.units + queue.leased_to_others.units,
        leased_tokens: queue.in_flight.tokens + queue.leased_to_others.tokens,
        consumer_leased_tokens: queue.in_flight.tokens,
        time: Some(timestamp(unix_ms)),
    })
}

/// What the rollouts of the run wait for, when nothing of them is queued.
fn rollouts_awaited(waiting: &Waiting) -> Vec<v1::WaitingFor> {
    if waiting.open_rollouts == 0 {
        return vec![v1::WaitingFor::NoOpenRollouts];
    }
    let mut reasons = Vec::new();
    if waiting.incomplete_rollouts > 0 {
        reasons.push(v1::WaitingFor::MissingCalls);
    }
    if waiting.sealed_rollouts > waiting.incomplete_rollouts {
        reasons.push(v1::WaitingFor::Rewards);
    }
    if waiting.open_rollouts > waiting.sealed_rollouts {
        reasons.push(v1::WaitingFor::OpenRollouts);
    }
    reasons
}
