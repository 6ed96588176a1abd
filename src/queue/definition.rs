//! What a consumer group is, fixed by whoever made it, and the bounds that every group of a run shares.

use super::unit::UnitKind;

/// How long a lease lasts without a sign of life of its consumer.
pub const LEASE_MS: u64 = 60 * 60 * 1000;
/// How long a nack may put a unit off.
pub const MAX_NACK_DELAY_MS: u64 = 60 * 60 * 1000;
/// How many units may be out at one consumer, whatever its credit.
pub const MAX_UNITS_IN_FLIGHT: usize = 1024;
/// How many units may wait in an ephemeral consumer group.
pub const MAX_EPHEMERAL_WAITING_UNITS: usize = 4096;
/// How many consumers may be in one consumer group at once.
pub const MAX_CONSUMERS: usize = 1024;
/// How many consumer groups one run may have.
pub const MAX_CONSUMER_GROUPS: usize = 64;

/// The bounds of a run's queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct QueueBounds {
    /// How long a lease lasts without a sign of life.
    pub lease_ms: u64,
    /// How long a nack may put a unit off; longer delays are cut to this.
    pub max_nack_delay_ms: u64,
    /// How many units may be out at one consumer. What it says it holds when it joins may exceed it; then it is given
    /// no more.
    pub max_units_in_flight: usize,
    /// How many units may wait in an ephemeral group; beyond, the oldest are dropped.
    pub max_ephemeral_waiting_units: usize,
    /// How many consumers one group may have at once.
    pub max_consumers: usize,
    /// How many consumer groups the run may have.
    pub max_consumer_groups: usize,
}

impl Default for QueueBounds {
    fn default() -> Self {
        Self {
            lease_ms: LEASE_MS,
            max_nack_delay_ms: MAX_NACK_DELAY_MS,
            max_units_in_flight: MAX_UNITS_IN_FLIGHT,
            max_ephemeral_waiting_units: MAX_EPHEMERAL_WAITING_UNITS,
            max_consumers: MAX_CONSUMERS,
            max_consumer_groups: MAX_CONSUMER_GROUPS,
        }
    }
}

/// What the units of a consumer group are. Fixed when it is made, so that a unit is the same whoever takes it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GroupDefinition {
    /// The policy whose rows it takes; `None` for every trained policy of the run.
    pub policy: Option<String>,
    /// What one unit is made of.
    pub unit: UnitKind,
    /// Calls longer than this are not trained in its rows.
    pub max_row_tokens: Option<u32>,
    /// Whether it holds nothing back: a unit is settled the moment it is given out, and the line is bounded.
    pub ephemeral: bool,
    /// How often a unit is given out without an acknowledgement before it is undeliverable; 0 counts as 1.
    pub max_deliveries: u32,
}

/// A consumer group of that name exists, and is another one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ConsumerGroupMismatch {
    /// The group's name.
    pub name: String,
    /// What it is.
    pub declared: GroupDefinition,
    /// What was asked for.
    pub requested: GroupDefinition,
}
