//! What a run has counted so far, as the log keeps it: what can be counted again from the rest of the log is in it too.

use crate::ids::{ConsumerGroupId, Name};
use crate::queue::{DropReason, SettledSum};

/// What became of a run's rollouts and their calls.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RunTotals {
    /// Calls of finalised rollouts.
    pub calls: CallTotals,
    /// Rollouts that ended without rows, by reason.
    pub gone: Vec<GoneTotals>,
    /// Rollouts whose rows were acknowledged.
    pub retired_rollouts: u64,
    /// What its consumer groups were given.
    pub consumer_groups: Vec<ConsumerGroupTotals>,
}

/// What became of the calls of finalised rollouts.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CallTotals {
    /// Those that generated nothing.
    pub empty: u64,
    /// Those that were not kept.
    pub not_kept: u64,
    /// Those that were.
    pub kept: u64,
    /// By policy.
    pub policies: Vec<PolicyTotals>,
}

/// What became of kept calls in the rows of one policy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PolicyTotals {
    /// The policy.
    pub policy: Name,
    /// Those that are trained.
    pub trained: u64,
    /// Those that are context.
    pub context: u64,
    /// Those that are too long.
    pub too_long: u64,
}

/// Rollouts that ended without rows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GoneTotals {
    /// Why.
    pub reason: String,
    /// How many.
    pub rollouts: u64,
    /// Their calls.
    pub calls: u64,
}

/// What a consumer group was given.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConsumerGroupTotals {
    /// Its name.
    pub consumer_group: ConsumerGroupId,
    /// Calls of the rollouts that it was given.
    pub calls: CallTotals,
    /// Acknowledged units of rollouts that have retired.
    pub acknowledged: SettledSum,
    /// Dropped ones, by reason.
    pub dropped: Vec<(DropReason, SettledSum)>,
    /// The last position at which something changed of units that are not remembered any more.
    pub forgotten_through: u64,
    /// The last position at which it acknowledged something or was sought.
    pub changed_at: u64,
    /// Positions, from this one until just before that one, at which it is not known any more what was acknowledged.
    pub blurred: Option<(u64, u64)>,
}
