//! All that a run decides: what its rollouts need, its queue's bounds, and the consumer groups that are there from the start.
//!
//! Values here are right: whoever makes them from a request or a file has checked them.

use std::sync::Arc;

use crate::ids::{ConsumerGroupId, Name};
use crate::limits;

use super::settings::RolloutSettings;

/// How often a unit is given out without an acknowledgement, unless the run says otherwise.
pub const MAX_DELIVERIES: u32 = 5;
/// How long an ended rollout is remembered, unless the run says otherwise.
pub const TOMBSTONE_RETENTION_MS: u64 = 72 * HOUR_MS;

/// How long rows are kept that every consumer group has acknowledged, unless the run says otherwise.
pub const RETENTION_MS: u64 = 0;
/// How long rows are kept that no consumer group was given, unless the run says otherwise.
pub const UNCLAIMED_RETENTION_MS: u64 = 24 * HOUR_MS;
/// How long a consumer group may be without a subscription, unless the run says otherwise.
pub const CONSUMER_GROUP_IDLE_EXPIRY_MS: u64 = 7 * 24 * HOUR_MS;

const HOUR_MS: u64 = 60 * 60 * 1000;

/// What a trainer gets at once, and acknowledges at once.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Unit {
    /// One row.
    #[default]
    Row,
    /// All rows of one rollout, for one policy or for all.
    Rollout,
}

/// Where a new consumer group begins.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum StartPosition {
    /// With everything that is still there.
    #[default]
    Earliest,
    /// With what is finalised from then on.
    Latest,
}

/// What a consumer group takes. Fixed by whoever made the group.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ConsumerGroupSettings {
    /// The policy whose rows it takes; none: every trained policy of the run.
    pub policy: Option<Name>,
    /// What a unit is.
    pub unit: Unit,
    /// Trained calls that are longer are left out.
    pub max_row_tokens: Option<u32>,
    /// How many versions the oldest trained token of a unit may be behind what the trainer is on; none: no bound.
    pub max_staleness_versions: Option<u64>,
    /// Where the group begins.
    pub start: StartPosition,
}

/// All that a run decides.
#[derive(Clone, Debug, PartialEq)]
pub struct RunSettings {
    /// What one rollout needs; it keeps those of its opening.
    pub rollout: Arc<RolloutSettings>,
    /// How often a unit is given out without an acknowledgement before it is undeliverable.
    pub max_deliveries: u32,
    /// How long a lease lasts without a sign of life of its consumer.
    pub lease_ms: u64,
    /// How long an ended rollout is remembered.
    pub tombstone_retention_ms: u64,
    /// Consumer groups that are there from the start, each name once.
    pub consumer_groups: Vec<(ConsumerGroupId, ConsumerGroupSettings)>,
    /// Those of them that do not expire.
    pub required_consumer_groups: Vec<ConsumerGroupId>,
    /// How long rows are kept that every consumer group has acknowledged, while there is room.
    pub retention_ms: u64,
    /// How long rows are kept that no consumer group was given.
    pub unclaimed_retention_ms: u64,
    /// How many groups may be open or wait ahead of the slowest required consumer group before no more are opened; none: any number.
    pub max_lead_groups: Option<u32>,
    /// How many bytes of memory and log such rows may take; none: no limit of their own.
    pub unclaimed_retention_bytes: Option<u64>,
    /// How long a consumer group may be without a subscription before it expires.
    pub consumer_group_idle_expiry_ms: u64,
}

impl RunSettings {
    /// The defaults.
    #[must_use]
    pub fn with_defaults() -> Self {
        Self {
            rollout: Arc::new(RolloutSettings::with_default_policy(Name::literal("main"))),
            max_deliveries: MAX_DELIVERIES,
            lease_ms: limits::LEASE_MS,
            tombstone_retention_ms: TOMBSTONE_RETENTION_MS,
            consumer_groups: Vec::new(),
            required_consumer_groups: Vec::new(),
            retention_ms: RETENTION_MS,
            unclaimed_retention_ms: UNCLAIMED_RETENTION_MS,
            max_lead_groups: None,
            unclaimed_retention_bytes: None,
            consumer_group_idle_expiry_ms: CONSUMER_GROUP_IDLE_EXPIRY_MS,
        }
    }

    /// Whether a consumer group never expires.
    #[must_use]
    pub fn requires(&self, consumer_group: &ConsumerGroupId) -> bool {
        self.required_consumer_groups.contains(consumer_group)
    }
}

impl Default for RunSettings {
    fn default() -> Self {
        Self::with_defaults()
    }
}
