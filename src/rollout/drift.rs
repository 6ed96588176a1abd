//! Drift, counted: how many calls do not continue what they were meant to continue, by agent and kind, and the row tokens that
//! this costs.
//!
//! A call that drifts stands in a row of its own, which begins with the same ids once more as a row with the call that it was
//! meant to continue. That repeated context is the cost: the matched length, for each policy in whose rows both calls stand.
//! They never stand in one row, since neither continues the other. A call counts once, however many rows go on from it: those
//! would repeat the same ids without drift, too.

use std::collections::BTreeMap;

use crate::forest::link::{CallSet, DriftKind, Links};
use crate::forest::plan::PolicyPlan;
use crate::ids::AgentId;

use super::Facts;

/// Drift of one agent and of one kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DriftCount {
    /// Calls that drift.
    pub calls: u64,
    /// Row tokens that stand once more because of it.
    pub repeated_row_tokens: u64,
}

/// Drift by agent and kind.
pub type DriftCounts = BTreeMap<(AgentId, DriftKind), DriftCount>;

impl DriftCount {
    /// Both together.
    pub fn add(&mut self, other: Self) {
        self.calls += other.calls;
        self.repeated_row_tokens += other.repeated_row_tokens;
    }
}

/// The drift of the kept calls with these links and rows.
#[must_use]
pub fn counts<'a>(
    facts: &Facts,
    kept: &CallSet,
    links: &Links,
    plans: impl Iterator<Item = &'a PolicyPlan>,
) -> DriftCounts {
    let forest = &facts.forest;
    let drifts = forest.kept_drifts(kept, links);
    let mut counts = DriftCounts::new();
    if drifts.is_empty() {
        return counts;
    }
    let in_rows: Vec<CallSet> = plans.map(|plan| plan.calls_in_rows(links)).collect();
    for (call, drift) in drifts {
        let agent = forest.agent(forest.call(call).agent()).id().clone();
        let repeats = in_rows.iter().filter(|rows| rows.contains(call) && rows.contains(drift.compared)).count() as u64;
        let repeated_row_tokens = repeats * u64::from(drift.matched_length);
        counts.entry((agent, drift.kind)).or_default().add(DriftCount { calls: 1, repeated_row_tokens });
    }
    counts
}

impl super::FinalisedRollout {
    /// The drift of its kept calls, with these rows of it.
    #[must_use]
    pub fn drifts<'a>(&self, plans: impl Iterator<Item = &'a PolicyPlan>) -> DriftCounts {
        counts(&self.facts, &self.kept, &self.links, plans)
    }
}
