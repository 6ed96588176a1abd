//! What harnesses are told: a call's link, a rollout's totals, what a seal found, why something was refused.

use crate::error::Refusal;
use crate::forest::Forest;
use crate::forest::call::{Call, CallIndex, Link};
use crate::forest::link::{BrokenLink, Drift, DriftKind, LinkVerdict, Verdict};
use crate::ids::{AgentId, RolloutRef};
use crate::proto::v1;
use crate::rollout::Rollout;
use crate::rollout::awaited::Cause;
use crate::rollout::findings::Findings;
use crate::rollout::status::{self, Missing, MissingState};
use crate::rpc::status::code;

use super::fields::duration;

/// A refusal, as it is said in an answer.
#[must_use]
pub fn refusal(refusal: &Refusal, rollout: Option<&RolloutRef>) -> v1::Refusal {
    let group = rollout.and_then(|rollout| rollout.group.as_ref());
    v1::Refusal {
        code: code(refusal.reason.code()).into(),
        reason: refusal.reason.as_str().to_owned(),
        message: refusal.message.clone(),
        field: refusal.field.clone().unwrap_or_default(),
        index: refusal.index,
        retry_after: refusal.retry_after_ms.map(duration),
        run_id: rollout.map(|rollout| rollout.run.to_string()).unwrap_or_default(),
        group_id: text(group),
        rollout_id: rollout.map(|rollout| rollout.rollout.to_string()).unwrap_or_default(),
        agent_id: text(refusal.agent_id.as_ref()),
        call_id: text(refusal.call_id.as_ref()),
    }
}

/// An identifier's text, empty if there is none.
pub(super) fn text(id: Option<&impl ToString>) -> String {
    id.map(ToString::to_string).unwrap_or_default()
}

/// What is known of a call's link. A call that generated nothing is said to be so, with what would be its parent.
#[must_use]
pub fn verdict(forest: &Forest, call: CallIndex, verdict: &Verdict) -> v1::Verdict {
    let stored = forest.call(call);
    let mut message = v1::Verdict {
        drift: verdict.drift.as_ref().map(|found| drift(forest, found)),
        named: match stored.link() {
            Link::Infer => false,
            Link::Root | Link::Parent(_) => true,
        },
        ..v1::Verdict::default()
    };
    let parent = |parent: CallIndex| forest.call(parent).id().to_string();
    let kind = match &verdict.link {
        LinkVerdict::Waiting(awaited) => {
            message.waiting_for_call_id = awaited.to_string();
            v1::LinkKind::Waiting
        }
        LinkVerdict::Root => v1::LinkKind::Root,
        LinkVerdict::Child(found) => {
            message.parent_call_id = parent(*found);
            v1::LinkKind::Child
        }
        LinkVerdict::Broken(broken, inferred) => {
            message.parent_call_id = inferred.map(parent).unwrap_or_default();
            message.set_broken(broken_link_reason(forest, stored, broken));
            v1::LinkKind::Broken
        }
    };
    let left_out = stored.is_empty() && kind != v1::LinkKind::Waiting;
    message.set_kind(if left_out { v1::LinkKind::Empty } else { kind });
    message
}

fn broken_link_reason(forest: &Forest, call: &Call, broken: &BrokenLink) -> v1::BrokenLinkReason {
    if broken.named == *call.id() {
        v1::BrokenLinkReason::NamesItself
    } else if forest.find_placed(&broken.named).is_none() {
        v1::BrokenLinkReason::NeverCame
    } else if broken.first_difference.is_some() {
        v1::BrokenLinkReason::DoesNotFit
    } else {
        v1::BrokenLinkReason::Circle
    }
}

fn drift(forest: &Forest, drift: &Drift) -> v1::Drift {
    let kind = match drift.kind {
        DriftKind::Differs => v1::DriftKind::Differs,
        DriftKind::Rewind => v1::DriftKind::Rewind,
    };
    v1::Drift {
        compared_call_id: forest.call(drift.compared).id().to_string(),
        matched_length_tokens: drift.matched_length,
        kind: kind.into(),
        expected_ids: drift.expected.clone(),
        found_ids: drift.found.clone(),
    }
}

/// The totals of a rollout, over all its agents.
#[must_use]
pub fn totals(forest: &Forest) -> v1::Totals {
    v1::Totals {
        calls: forest.call_count() as u64,
        agents: forest.agent_count() as u64,
        generated_tokens: forest.totals().generated_tokens,
    }
}

/// What a seal finds now.
#[must_use]
pub fn seal_status(rollout: &mut Rollout) -> v1::SealStatus {
    let findings = rollout.findings();
    seal_status_with(rollout, &findings)
}

/// What a seal finds now, with what was found.
#[must_use]
pub fn seal_status_with(rollout: &Rollout, findings: &Findings) -> v1::SealStatus {
    let Findings { shape, .. } = findings;
    let finalised = rollout.finalised().is_some();
    let facts = rollout.facts();
    let totals = facts.forest.totals();
    v1::SealStatus {
        missing: findings.missing.iter().map(missing_call).collect(),
        missing_count: findings.missing_count,
        missing_expected_calls: status::missing_expected_calls(facts),
        agents_without_list: findings.without_list.iter().map(AgentId::to_string).collect(),
        agents_without_list_count: findings.without_list_count,
        agents_started: shape.agents_started,
        agents_finished: shape.agents_finished,
        agent_depth: shape.agent_depth,
        call_depth: shape.call_depth,
        critical_steps: shape.critical_steps,
        generated_tokens: totals.generated_tokens,
        prompt_tokens: totals.prompt_tokens,
        calls: facts.forest.call_count() as u64,
        // What completes a rollout finalises it in the same step.
        complete: finalised,
        finalised,
    }
}

fn missing_call((missing, agent): &(Missing, Option<AgentId>)) -> v1::MissingCall {
    let (cause, named_by) = match &missing.cause {
        Cause::Kept => (v1::MissingCallCause::Kept, None),
        Cause::NamedParent(by) => (v1::MissingCallCause::NamedParent, Some(by)),
        Cause::NamedBase(by) => (v1::MissingCallCause::NamedBase, Some(by)),
    };
    let state = match missing.state {
        MissingState::NeverCame => v1::MissingCallState::NeverCame,
        MissingState::WaitingForBase => v1::MissingCallState::WaitingForBase,
        MissingState::Unresolved => v1::MissingCallState::Unresolved,
        MissingState::Refused(_) => v1::MissingCallState::RefusedAwaitingResend,
    };
    v1::MissingCall {
        call_id: missing.call.to_string(),
        agent_id: text(agent.as_ref()),
        state: state.into(),
        cause: cause.into(),
        named_by_call_id: text(named_by),
    }
}

/// How an attempt ended.
#[must_use]
pub fn ended(outcome: v1::RolloutOutcome, reason: &str, attempt: u32) -> v1::Ended {
    v1::Ended { outcome: outcome.into(), reason: reason.to_owned(), attempt }
}

#[cfg(test)]
#[path = "answer_tests.rs"]
mod tests;
