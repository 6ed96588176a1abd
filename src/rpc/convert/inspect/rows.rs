//! The rows of a rollout as they are shown, and its ledger: from its outline and the ids of its calls, without the rollout.

use std::collections::HashMap;

use crate::forest::call::CallIndex;
use crate::forest::plan::{PolicyPlan, RowPlan};
use crate::ids::{CallId, Name, RolloutRef, row_id};
use crate::proto::v1;

use super::Outline;

/// The rows of all plans; without walks once those listed hold `walk_calls_max` calls. `calls` are in the order of arrival.
pub(super) fn rows(
    about: &RolloutRef,
    outline: &Outline,
    calls: &[v1::CallSummary],
    walk_calls_max: usize,
) -> Vec<v1::RowSummary> {
    let mut room = walk_calls_max;
    let id = |call: &CallIndex| calls[call.index()].call_id.clone();
    let mut rows = Vec::new();
    for plan in &outline.plans {
        let trained = trained_by_leaf(plan, calls);
        for (row, row_index) in plan.rows.iter().zip(0..) {
            let row: &RowPlan = row;
            let leaf = &calls[row.leaf.index()];
            let walk = outline.links.walk(row.leaf);
            let listed = if walk.len() <= room { &walk[..] } else { &[] };
            room -= listed.len();
            rows.push(v1::RowSummary {
                row_id: id_of_row(about, &plan.policy, &leaf.call_id),
                policy: plan.policy.to_string(),
                row_index,
                leaf_call_id: leaf.call_id.clone(),
                agent_id: leaf.agent_id.clone(),
                walk_call_ids: listed.iter().map(id).collect(),
                trained_call_ids: trained.get(&row.leaf).into_iter().flatten().map(id).collect(),
                tokens: u64::from(row.tokens),
                trained_tokens: u64::from(row.trained_tokens),
            });
        }
    }
    rows
}

fn id_of_row(about: &RolloutRef, policy: &Name, leaf: &str) -> String {
    let leaf = CallId::parse(leaf).ok();
    leaf.map(|leaf| row_id(&about.run, &about.rollout, about.attempt, policy, &leaf)).unwrap_or_default()
}

/// The calls that each leaf's row trains, in the order of its walk: texts only grow along a walk.
fn trained_by_leaf(plan: &PolicyPlan, calls: &[v1::CallSummary]) -> HashMap<CallIndex, Vec<CallIndex>> {
    let mut trained: HashMap<CallIndex, Vec<CallIndex>> = HashMap::new();
    for (owner, index) in plan.owners.iter().zip(0..) {
        if let Some(leaf) = owner {
            trained.entry(*leaf).or_default().push(CallIndex(index));
        }
    }
    let length = |call: &CallIndex| {
        let call = &calls[call.index()];
        call.prompt_tokens.unwrap_or(0) + call.generated_tokens
    };
    trained.values_mut().for_each(|calls| calls.sort_by_key(length));
    trained
}

/// What became of the calls, for one policy.
pub(super) fn ledger(outline: &Outline, plan: &PolicyPlan) -> v1::PolicyLedger {
    let policy = plan.policy.to_string();
    let accepted = outline.call_count as u64;
    if !outline.is_final {
        return v1::PolicyLedger { policy, accepted, pending: accepted, ..v1::PolicyLedger::default() };
    }
    v1::PolicyLedger {
        policy,
        accepted,
        trained: plan.ledger.trained,
        context: plan.ledger.context,
        no_row: plan.ledger.in_no_row,
        empty: plan.ledger.empty,
        not_kept: plan.ledger.not_kept,
        too_long: plan.ledger.too_long,
        ..v1::PolicyLedger::default()
    }
}
