//! What the store's figures make of calls and rollouts.

use std::sync::atomic::Ordering;

use crate::forest::call::CallIndex;
use crate::forest::link::{DriftKind, LinkVerdict, Verdict};
use crate::forest::plan::PolicyPlan;
use crate::rollout::{FinalisedRollout, status};
use crate::telemetry::{DriftLabel, LinkLabel, RolloutEnd, RolloutShape, RowMade, RunMetrics};

use super::Live;

/// A call was accepted that is new, or came a second time because its delta had no base.
pub(super) fn call_accepted(live: &Live, calls_before: usize, call: CallIndex, verdict: &Verdict) {
    let forest = &live.rollout.facts().forest;
    if forest.call_count() > calls_before {
        live.run.counts.calls.fetch_add(1, Ordering::Relaxed);
        live.run.metrics.call_accepted(forest.policy(call));
    }
    live.run.metrics.link(match verdict.link {
        LinkVerdict::Root => LinkLabel::Root,
        LinkVerdict::Child(_) => LinkLabel::Child,
        LinkVerdict::Waiting(_) => LinkLabel::Waiting,
        LinkVerdict::Broken(..) => LinkLabel::Broken,
    });
    if let Some(drift) = &verdict.drift {
        live.run.metrics.drift(match drift.kind {
            DriftKind::Differs => DriftLabel::Differs,
            DriftKind::Rewind => DriftLabel::Rewind,
        });
    }
}

/// Takes account of deltas that wait or are unresolved.
pub(super) fn deltas_changed(metrics: &RunMetrics, before: (u64, u64), now: (u64, u64)) {
    let change = |before: u64, now: u64| now.cast_signed() - before.cast_signed();
    if before.0 != now.0 {
        metrics.waiting_deltas_changed(change(before.0, now.0));
    }
    if before.1 != now.1 {
        metrics.unresolved_deltas_changed(change(before.1, now.1));
    }
}

/// Deltas that wait, and those that are unresolved.
pub(super) fn deltas_of(live: &Live) -> (u64, u64) {
    let totals = live.rollout.facts().forest.totals();
    (totals.waiting_calls, totals.unresolved_calls)
}

/// A rollout's rows were made, of these plans.
pub(super) fn finalised<'a>(
    metrics: &RunMetrics,
    rollout: &FinalisedRollout,
    plans: impl Iterator<Item = &'a PolicyPlan>,
) {
    let mut leaves = 0;
    for plan in plans {
        leaves += plan.rows.len();
        let of_policy = metrics.policy(&plan.policy);
        for row in &plan.rows {
            of_policy.row_made(RowMade {
                trained_calls: u64::from(row.trained_calls),
                trained_tokens: u64::from(row.trained_tokens),
                context_tokens: u64::from(row.tokens - row.trained_tokens),
            });
        }
    }
    let facts = rollout.facts();
    let roots = rollout.kept().iter().filter(|call| rollout.links().parent(*call).is_none()).count();
    metrics.rollout_shape(RolloutShape {
        roots: roots as u64,
        leaves: leaves as u64,
        depth: status::call_depth(facts, rollout.links()),
        agents: facts.forest.agent_count() as u64,
        agents_without_list: status::agents_without_list(facts).len() as u64,
    });
    metrics.rollout_ended(RolloutEnd::Finalised);
}
