//! All that a run decides: what its rollouts need, its queue's bounds, and the consumer groups that are there from the start.
//!
//! Values here are right: whoever makes them from a request or a file has checked them.

use std::sync::Arc;

use crate::group::{Estimator, GroupRules};
use crate::ids::{ConsumerGroupId, Name};
use crate::limits;

use super::settings::RolloutSettings;

pub use crate::group::release::GROUP_TIMEOUT_MS;

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
    /// All rows of one group at its release, for one policy or for all.
    Group,
}

/// How steps are made of units, for data-parallel ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StepSettings {
    /// How many units make a step.
    pub units: u32,
    /// Into how many shards its rows are split.
    pub shards: u32,
    /// The most tokens in one microbatch; a longer row is alone in one.
    pub microbatch_tokens: u64,
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
    /// What a unit is; where units go out in steps, what a step counts.
    pub unit: Unit,
    /// How steps are made of units, if they go out in steps.
    pub step: Option<StepSettings>,
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
    /// How the rewards of a group become advantages.
    pub estimator: Estimator,
    /// Whether groups are dropped whose rewards are all equal.
    pub drop_zero_variance: bool,
    /// How many finalised members release a group, if it need not be whole.
    pub group_quorum: Option<u32>,
    /// How long after its first opening a group is released with what it has.
    pub group_timeout_ms: u64,
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
            estimator: Estimator::None,
            drop_zero_variance: false,
            group_quorum: None,
            group_timeout_ms: GROUP_TIMEOUT_MS,
        }
    }

    /// What it decides about groups that begin now.
    #[must_use]
    pub fn group_rules(&self) -> GroupRules {
        GroupRules {
            estimator: self.estimator,
            drop_zero_variance: self.drop_zero_variance,
            quorum: self.group_quorum,
            timeout_ms: self.group_timeout_ms,
            has_group_units: self.consumer_groups.iter().any(|(_, settings)| settings.unit == Unit::Group),
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
