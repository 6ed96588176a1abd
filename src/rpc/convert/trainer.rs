//! What a subscription is told: how it was joined, acknowledgements, news, and what it waits for.

use crate::group::DroppedFor;
use crate::ids::{ConsumerGroupId, RolloutRef, RunId};
use crate::proto::v1::{self, subscribe_response::Response};
use crate::queue::{DropReason, GroupDefinition, StepDefinition, UnitId, UnitKind, WaitReason, WaitingFor};
use crate::store::sequencer::{About, AckOutcome, LeftOut, RolloutsNow, Subscribed, Waiting};

use super::answer::text;
use super::fields::{duration, timestamp};

/// How a subscription was joined.
#[must_use]
pub fn subscribed(
    run: &RunId,
    consumer_group: &ConsumerGroupId,
    consumer: &str,
    subscribed: &Subscribed,
) -> v1::Subscribed {
    v1::Subscribed {
        run_id: run.to_string(),
        consumer_group: consumer_group.to_string(),
        consumer: consumer.to_owned(),
        settings: Some(group_settings(&subscribed.definition)),
        created: subscribed.created,
        held_unit_ids: subscribed.joined.held.iter().map(|unit| unit.as_str().to_owned()).collect(),
        lost_unit_ids: subscribed.joined.lost.iter().map(|(unit, _)| unit.as_str().to_owned()).collect(),
        seek_count: subscribed.seek_count,
        lease: Some(duration(subscribed.lease_ms)),
        idle_expiry: subscribed.idle_expiry_ms.map(duration),
    }
}

/// What a consumer group takes, with every default filled in.
#[must_use]
pub fn group_settings(definition: &GroupDefinition) -> v1::ConsumerGroupSettings {
    let counted_unit = match definition.unit {
        UnitKind::Row => v1::Unit::Row,
        UnitKind::Rollout => v1::Unit::Rollout,
        UnitKind::Group => v1::Unit::Group,
    };
    let step = definition.step.map(|StepDefinition { units, shards, microbatch_tokens }| v1::StepSettings {
        units,
        counted_unit: counted_unit.into(),
        shards,
        microbatch_tokens,
    });
    let unit = if step.is_some() { v1::Unit::Step } else { counted_unit };
    v1::ConsumerGroupSettings {
        step,
        policy: definition.policy.clone().unwrap_or_default(),
        unit: unit.into(),
        shape: v1::Shape::Leaf.into(),
        max_row_tokens: definition.max_row_tokens.map_or(0, u64::from),
        max_staleness_versions: definition.max_staleness_versions,
        ..v1::ConsumerGroupSettings::default()
    }
}

/// What became of acknowledgements. They are durable when this is sent, unless nothing of the subscription lasts.
#[must_use]
pub fn ack_result(results: &[(UnitId, AckOutcome)], ephemeral: bool) -> Response {
    let entry = |(unit, outcome): &(UnitId, AckOutcome)| {
        let outcome = match outcome {
            AckOutcome::Acknowledged => v1::AckOutcome::Acknowledged,
            AckOutcome::ShardAcknowledged => v1::AckOutcome::ShardAcknowledged,
            AckOutcome::Already => v1::AckOutcome::AlreadyAcknowledged,
            AckOutcome::Unknown => v1::AckOutcome::Unknown,
            AckOutcome::Dropped => v1::AckOutcome::Dropped,
            AckOutcome::BeforeSeek => v1::AckOutcome::BeforeSeek,
            AckOutcome::Returned => v1::AckOutcome::Returned,
            AckOutcome::NotHeld => v1::AckOutcome::NotHeld,
        };
        v1::AckResultEntry { unit_id: unit.as_str().to_owned(), outcome: outcome.into() }
    };
    Response::AckResult(v1::AckResult { entries: results.iter().map(entry).collect(), durable: !ephemeral })
}

/// A unit was dropped.
#[must_use]
pub fn dropped(unit: &UnitId, reason: DropReason, about: Option<&RolloutRef>, unix_ms: u64) -> Response {
    let kind = match reason {
        DropReason::Undeliverable => v1::UnitNoticeKind::Undeliverable,
        DropReason::Stale => v1::UnitNoticeKind::Stale,
        DropReason::Overflow => v1::UnitNoticeKind::Skipped,
        DropReason::Operator | DropReason::Forgotten => v1::UnitNoticeKind::Operator,
        DropReason::Late => v1::UnitNoticeKind::Late,
        DropReason::GroupDropped => v1::UnitNoticeKind::GroupDropped,
    };
    Response::UnitNotice(v1::UnitNotice {
        unit_id: unit.as_str().to_owned(),
        ..notice(kind, reason.as_str(), about, unix_ms)
    })
}

/// A lease of this consumer ran out.
#[must_use]
pub fn lease_ended(unit: &UnitId, about: Option<&RolloutRef>, unix_ms: u64) -> Response {
    let reason = "nothing was heard of this consumer for the length of a lease";
    let notice = notice(v1::UnitNoticeKind::LeaseEnded, reason, about, unix_ms);
    Response::UnitNotice(v1::UnitNotice { unit_id: unit.as_str().to_owned(), ..notice })
}

/// The consumer group is not given something of a rollout, or of several.
#[must_use]
pub fn left_out(what: LeftOut, about: Option<&About>, unix_ms: u64) -> Response {
    let (kind, reason, units) = match what {
        LeftOut::NoRows(rollouts) => (v1::UnitNoticeKind::NoRows, "finalised without a row for this group", rollouts),
        LeftOut::NotRetained(rollouts) => {
            (v1::UnitNoticeKind::Retention, "not kept any longer before a consumer group was given them", rollouts)
        }
        LeftOut::TooLong(calls) => (v1::UnitNoticeKind::TooLong, "calls are longer than max_row_tokens", calls),
        LeftOut::Late(rollouts) => (v1::UnitNoticeKind::Late, "finalised after the group had been released", rollouts),
        LeftOut::GroupsDropped(groups, why) => {
            (v1::UnitNoticeKind::GroupDropped, why.map_or("ListGroups says why each", DroppedFor::as_str), groups)
        }
    };
    let member = about.and_then(|about| about.member.as_ref());
    Response::UnitNotice(v1::UnitNotice {
        units,
        group_id: text(about.and_then(|about| about.group.as_ref())),
        rollout_id: text(member.map(|(rollout, _)| rollout)),
        attempt: member.map_or(0, |(_, attempt)| *attempt),
        ..notice(kind, reason, None, unix_ms)
    })
}

fn notice(kind: v1::UnitNoticeKind, reason: &str, about: Option<&RolloutRef>, unix_ms: u64) -> v1::UnitNotice {
    v1::UnitNotice {
        unit_id: String::new(),
        kind: kind.into(),
        reason: reason.to_owned(),
        group_id: text(about.and_then(|about| about.group.as_ref())),
        rollout_id: text(about.map(|about| &about.rollout)),
        attempt: about.map_or(0, |about| about.attempt),
        units: 1,
        time: Some(timestamp(unix_ms)),
    }
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
    let (queue, rollouts) = (&waiting.queue, &waiting.rollouts);
    Response::Heartbeat(v1::SubscriptionHeartbeat {
        waiting_for: waiting_for(queue, rollouts).into_iter().map(i32::from).collect(),
        // The counts are read one after another while rollouts move.
        open_rollouts: rollouts.open.saturating_sub(rollouts.sealed),
        sealed_rollouts: rollouts.sealed.saturating_sub(rollouts.incomplete),
        rewarded_rollouts: rollouts.rewarded.saturating_sub(rollouts.incomplete),
        incomplete_rollouts: rollouts.incomplete,
        open_groups: rollouts.open_groups,
        queued_units: queue.waiting.units,
        queued_tokens: queue.waiting.tokens,
        leased_units: queue.leased.units,
        leased_tokens: queue.leased.tokens,
        consumer_leased_tokens: queue.in_flight.tokens,
        time: Some(timestamp(unix_ms)),
    })
}

/// Everything that keeps a consumer's next unit from going out.
#[must_use]
pub fn waiting_for(queue: &WaitingFor, rollouts: &RolloutsNow) -> Vec<v1::WaitingFor> {
    let mut reasons = Vec::new();
    match queue.reason {
        WaitReason::NothingQueued => reasons.extend(rollouts_awaited(rollouts)),
        WaitReason::AllOut => {
            if queue.leased_to_others.units > 0 {
                reasons.push(v1::WaitingFor::AcksOfOthers);
            }
            reasons.extend(rollouts_awaited(rollouts));
        }
        WaitReason::StepNotFull => {
            reasons.push(v1::WaitingFor::Step);
            reasons.extend(rollouts_awaited(rollouts));
        }
        WaitReason::Freezing => reasons.push(v1::WaitingFor::Log),
        WaitReason::StepsOpen | WaitReason::StandsBy => reasons.push(v1::WaitingFor::AcksOfOthers),
        WaitReason::Delayed { .. } => reasons.push(v1::WaitingFor::NackDelay),
        WaitReason::HeldBack { .. } => reasons.push(v1::WaitingFor::RestartGrace),
        WaitReason::NoCredit | WaitReason::CreditShort { .. } | WaitReason::TooManyUnitsInFlight { .. } => {
            reasons.push(v1::WaitingFor::Credit);
        }
        WaitReason::NotWaiting => {}
    }
    reasons
}

/// What the rollouts of the run wait for, when nothing of them is queued.
#[must_use]
pub fn rollouts_awaited(rollouts: &RolloutsNow) -> Vec<v1::WaitingFor> {
    let mut reasons = Vec::new();
    if rollouts.await_release > 0 {
        reasons.push(v1::WaitingFor::GroupRelease);
    }
    if rollouts.open == 0 {
        reasons.push(v1::WaitingFor::NoOpenRollouts);
        return reasons;
    }
    if rollouts.incomplete > 0 {
        reasons.push(v1::WaitingFor::MissingCalls);
    }
    if rollouts.sealed > rollouts.incomplete {
        reasons.push(v1::WaitingFor::Rewards);
    }
    if rollouts.open > rollouts.sealed {
        reasons.push(v1::WaitingFor::OpenRollouts);
    }
    reasons
}
