//! The ledger as gauges that must add up (RULES 3.6.4): what became of each accepted call, for one policy of one run.

use metrics::SharedString;

use super::labels::{EndReason, NO_REASON};
use super::names;
use super::registry::{Registry, Share};
use crate::ids::Name;

/// What became of the distinct accepted calls, for one policy. The other fields add up to `accepted`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CallCounts {
    /// All of them, counted apart.
    pub accepted: u64,
    /// Of open rollouts.
    pub pending: u64,
    /// Trained in exactly one row.
    pub trained: u64,
    /// In some row, trained in none.
    pub context: u64,
    /// Kept, but in no row.
    pub in_no_row: u64,
    /// Generated nothing.
    pub empty: u64,
    /// Kept by no agent.
    pub not_kept: u64,
    /// Longer than rows may be; none where nobody's limit counts.
    pub too_long: u64,
    /// Gone with their rollout, by reason; a reason may stand more than once.
    pub gone: Vec<(EndReason, u64)>,
}

impl CallCounts {
    /// All fates but `gone`. That a call is too long depends on who takes the rows, and has a gauge of its own.
    fn fates(&self) -> [(&'static str, u64); 6] {
        [
            ("pending", self.pending),
            ("trained", self.trained),
            ("context", self.context),
            ("no_row", self.in_no_row),
            ("empty", self.empty),
            ("not_kept", self.not_kept),
        ]
    }

    /// Takes in another ledger.
    pub fn add(&mut self, other: &Self) {
        self.accepted += other.accepted;
        self.pending += other.pending;
        self.trained += other.trained;
        self.context += other.context;
        self.in_no_row += other.in_no_row;
        self.empty += other.empty;
        self.not_kept += other.not_kept;
        self.too_long += other.too_long;
        self.gone.extend(other.gone.iter().copied());
    }

    /// Whether every accepted call has one fate.
    #[must_use]
    pub fn adds_up(&self) -> bool {
        let fates: u64 = self.fates().iter().map(|(_, calls)| calls).sum();
        fates + self.too_long + self.gone.iter().map(|(_, calls)| calls).sum::<u64>() == self.accepted
    }
}

/// The gauges of the ledger of calls. What they say goes when this is dropped.
pub struct CallLedgerMetrics {
    accepted: Share,
    fates: [Share; 6],
    gone: Vec<Share>,
}

impl CallLedgerMetrics {
    pub(super) fn new(registry: &Registry, run: &SharedString, policy: &Name) -> Self {
        let of_policy = [run.clone(), registry.labels.policies.value(policy.as_str())];
        let share = |fate, reason| {
            let [run, policy] = of_policy.clone();
            let values = [run, policy, SharedString::const_str(fate), SharedString::const_str(reason)];
            registry.share(&names::LEDGER_CALLS, &values)
        };
        Self {
            accepted: registry.share(&names::LEDGER_CALLS_ACCEPTED, &of_policy),
            fates: CallCounts::default().fates().map(|(fate, _)| share(fate, NO_REASON)),
            gone: EndReason::ALL.iter().map(|reason| share("gone", reason.as_str())).collect(),
        }
    }

    /// What the ledger says now.
    pub fn set(&self, counts: &CallCounts) {
        self.accepted.set(counts.accepted);
        for (share, (_, calls)) in self.fates.iter().zip(counts.fates()) {
            share.set(calls);
        }
        for (share, reason) in self.gone.iter().zip(EndReason::ALL) {
            share.set(counts.gone.iter().filter(|(of, _)| of == reason).map(|(_, calls)| calls).sum());
        }
    }
}
