//! What a consumer group is, fixed by whoever made it, and the bounds that every group of a run shares.

use crate::limits;

use super::unit::UnitKind;

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
            lease_ms: limits::LEASE_MS,
            max_nack_delay_ms: limits::NACK_DELAY_MS_MAX,
            max_units_in_flight: limits::CONSUMER_UNITS_IN_FLIGHT_MAX,
            max_ephemeral_waiting_units: limits::EPHEMERAL_WAITING_UNITS_MAX,
            max_consumers: limits::CONSUMER_GROUP_MEMBERS_MAX,
            max_consumer_groups: limits::RUN_CONSUMER_GROUPS_MAX,
        }
    }
}

/// How steps are made of units, for data-parallel ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StepDefinition {
    /// How many units make a step.
    pub units: u32,
    /// Into how many shards its rows are split.
    pub shards: u32,
    /// The most tokens in one microbatch; a row that is longer is alone in one.
    pub microbatch_tokens: u64,
}

/// What the units of a consumer group are. Fixed when it is made, so that a unit is the same whoever takes it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GroupDefinition {
    /// The policy whose rows it takes; `None` for every trained policy of the run.
    pub policy: Option<String>,
    /// What one unit is made of; where units go out in steps, what a step counts.
    pub unit: UnitKind,
    /// How steps are made of units, if they go out in steps.
    pub step: Option<StepDefinition>,
    /// Calls longer than this are not trained in its rows.
    pub max_row_tokens: Option<u32>,
    /// How many versions the oldest trained token of a unit may be behind what the trainer is on; `None` for no bound.
    pub max_staleness_versions: Option<u64>,
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
