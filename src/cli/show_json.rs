//! One rollout as JSON, for scripts: the fields of `GetRolloutResponse` under their own names.

use serde_json::{Value, json};

use crate::proto::v1::{
    AgentSummary, CallSummary, Drift, DriftCount, Ended, GetRolloutResponse, Link, LinkKind, MissingCall, PolicyLedger,
    RolloutSummary, RowSummary, SealStatus, Verdict, link,
};

/// All that is known of a rollout.
#[must_use]
pub fn rollout_json(rollout: &GetRolloutResponse) -> Value {
    json!({
        "summary": rollout.summary.as_ref().map(summary),
        "calls": rollout.calls.iter().map(call).collect::<Vec<_>>(),
        "agents": rollout.agents.iter().map(agent).collect::<Vec<_>>(),
        "status": rollout.status.as_ref().map(status),
        "rows": rollout.rows.iter().map(row).collect::<Vec<_>>(),
        "ledgers": rollout.ledgers.iter().map(ledger).collect::<Vec<_>>(),
        "drifts": rollout.drifts.iter().map(drift_count).collect::<Vec<_>>(),
    })
}

/// The word of an enum's value: its name without the prefix, in small letters.
#[must_use]
pub fn word(name: &str, prefix: &str) -> String {
    name.strip_prefix(prefix).unwrap_or(name).to_ascii_lowercase()
}

fn summary(summary: &RolloutSummary) -> Value {
    let reference = summary.rollout.clone().unwrap_or_default();
    let totals = summary.totals.unwrap_or_default();
    json!({
        "run": reference.run_id, "group": optional(&reference.group_id), "rollout": reference.rollout_id,
        "attempt": reference.attempt,
        "state": word(summary.state().as_str_name(), "ROLLOUT_STATE_"),
        "ended": summary.ended.as_ref().map(ended),
        "reward": summary.reward.as_ref().map(|reward| reward.value),
        "reward_components": summary.reward.as_ref().map(|reward| &reward.components),
        "tags": summary.tags, "group_size": summary.group_size,
        "calls": totals.calls, "agents": totals.agents, "generated_tokens": totals.generated_tokens,
        "settings_version": summary.settings_version, "incomplete": summary.incomplete,
        "conflicted": summary.conflicted, "refused_requests": summary.refused_requests,
        "resident_bytes": summary.resident_bytes, "drifted_calls": summary.drifted_calls,
        "credits": summary.credits, "unused_credits": summary.unused_credits,
        "next_deadline_seconds": summary.next_deadline.map(|deadline| deadline.seconds),
    })
}

fn ended(ended: &Ended) -> Value {
    let outcome = word(ended.outcome().as_str_name(), "ROLLOUT_OUTCOME_");
    json!({"outcome": outcome, "reason": ended.reason, "attempt": ended.attempt})
}

fn call(call: &CallSummary) -> Value {
    let versions: Vec<_> =
        call.policy_versions.iter().map(|span| json!([span.start, span.end, span.version])).collect();
    json!({
        "call": call.call_id, "agent": call.agent_id, "sequence": call.sequence, "kind": call.kind,
        "policy": call.policy, "policy_versions": versions, "model": call.model,
        "prompt_tokens": call.prompt_tokens, "generated_tokens": call.generated_tokens, "kept": call.kept,
        "verdict": call.verdict.as_ref().map(verdict), "link": declared(call.link.as_ref()),
        "base": call.base.as_ref().map(|base| json!({"call": base.call_id, "length_tokens": base.length_tokens})),
        "train": call.train, "has_logprobs": call.has_logprobs, "finish_reason": call.finish_reason,
        "fate": word(call.fate().as_str_name(), "CALL_FATE_"), "owner_leaf": optional(&call.owner_leaf_call_id),
        "credited_train": call.credited_train, "process_reward": call.process_reward,
        "advantage_scale": call.advantage_scale,
        "missing_state": (call.missing_state != 0)
            .then(|| word(call.missing_state().as_str_name(), "MISSING_CALL_STATE_")),
    })
}

fn declared(link: Option<&Link>) -> Value {
    match link.and_then(|link| link.link.as_ref()) {
        None | Some(link::Link::Infer(_)) => json!("infer"),
        Some(link::Link::Root(_)) => json!("root"),
        Some(link::Link::ParentCallId(parent)) => json!({ "parent": parent }),
    }
}

fn verdict(verdict: &Verdict) -> Value {
    let broken =
        (verdict.kind() == LinkKind::Broken).then(|| word(verdict.broken().as_str_name(), "BROKEN_LINK_REASON_"));
    json!({
        "kind": word(verdict.kind().as_str_name(), "LINK_KIND_"), "parent": optional(&verdict.parent_call_id),
        "named": verdict.named, "broken": broken, "waiting_for": optional(&verdict.waiting_for_call_id),
        "drift": verdict.drift.as_ref().map(drift),
    })
}

fn drift(drift: &Drift) -> Value {
    json!({
        "compared_call": drift.compared_call_id, "matched_length_tokens": drift.matched_length_tokens,
        "kind": word(drift.kind().as_str_name(), "DRIFT_KIND_"),
        "expected_ids": drift.expected_ids, "found_ids": drift.found_ids,
    })
}

fn agent(agent: &AgentSummary) -> Value {
    let ends = agent.ends.iter().map(|end| word(end.status().as_str_name(), "AGENT_STATUS_"));
    json!({
        "agent": agent.agent_id, "parent_agent": optional(&agent.parent_agent_id), "calls": agent.calls,
        "kept_calls": agent.kept_calls, "generated_tokens": agent.generated_tokens, "has_list": agent.has_list,
        "starts": agent.starts.len(), "ends": ends.collect::<Vec<_>>(),
    })
}

fn status(status: &SealStatus) -> Value {
    json!({
        "missing": status.missing.iter().map(missing).collect::<Vec<_>>(), "missing_count": status.missing_count,
        "missing_expected_calls": status.missing_expected_calls,
        "agents_without_list": status.agents_without_list,
        "agents_without_list_count": status.agents_without_list_count,
        "agents_started": status.agents_started, "agents_finished": status.agents_finished,
        "agent_depth": status.agent_depth, "call_depth": status.call_depth,
        "critical_steps": status.critical_steps, "generated_tokens": status.generated_tokens,
        "prompt_tokens": status.prompt_tokens, "calls": status.calls, "complete": status.complete,
        "finalised": status.finalised,
    })
}

fn missing(missing: &MissingCall) -> Value {
    json!({
        "call": missing.call_id, "agent": optional(&missing.agent_id),
        "state": word(missing.state().as_str_name(), "MISSING_CALL_STATE_"),
        "cause": word(missing.cause().as_str_name(), "MISSING_CALL_CAUSE_"),
        "named_by": optional(&missing.named_by_call_id),
    })
}

fn row(row: &RowSummary) -> Value {
    json!({
        "row_id": row.row_id, "policy": row.policy, "row_index": row.row_index, "leaf": row.leaf_call_id,
        "agent": row.agent_id, "walk": row.walk_call_ids, "trains": row.trained_call_ids, "tokens": row.tokens,
        "trained_tokens": row.trained_tokens,
    })
}

/// What became of the calls, for one policy.
#[must_use]
pub fn ledger(ledger: &PolicyLedger) -> Value {
    json!({
        "policy": ledger.policy, "accepted": ledger.accepted, "pending": ledger.pending, "trained": ledger.trained,
        "context": ledger.context, "no_row": ledger.no_row, "empty": ledger.empty, "not_kept": ledger.not_kept,
        "too_long": ledger.too_long, "gone": ledger.gone,
    })
}

/// Drift of one agent and of one kind.
#[must_use]
pub fn drift_count(count: &DriftCount) -> Value {
    json!({
        "agent": optional(&count.agent_id), "kind": word(count.kind().as_str_name(), "DRIFT_KIND_"),
        "calls": count.calls, "repeated_row_tokens": count.repeated_row_tokens,
    })
}

fn optional(text: &str) -> Option<&str> {
    Some(text).filter(|text| !text.is_empty())
}
