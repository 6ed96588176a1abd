//! The records of consumer groups and their units.

use prost::Message;

use crate::ids::{ConsumerGroupId, RolloutId, RunId};
use crate::log::{Position, Record, RetiredFor};
use crate::queue::{DropReason, GroupDefinition, UnitId};

use super::Fault;
use super::codes::{Coded, coded};
use super::fields::{identifier, present};
use super::run::by_bound;
use super::step::StepMessage;

#[derive(Message)]
pub(super) struct ConsumerGroupMessage {
    #[prost(string, tag = "1")]
    run: String,
    #[prost(string, tag = "2")]
    consumer_group: String,
    #[prost(message, optional, tag = "3")]
    definition: Option<GroupDefinitionMessage>,
    #[prost(bool, tag = "4")]
    from_earliest: bool,
}

#[derive(Message)]
pub(super) struct GroupDefinitionMessage {
    #[prost(string, optional, tag = "1")]
    policy: Option<String>,
    #[prost(uint32, tag = "2")]
    unit: u32,
    #[prost(uint32, optional, tag = "3")]
    max_row_tokens: Option<u32>,
    #[prost(bool, tag = "4")]
    ephemeral: bool,
    #[prost(uint32, tag = "5")]
    max_deliveries: u32,
    /// Instead of `unit`, where there is a bound of staleness: a build that does not know it must not pass over it.
    #[prost(uint32, tag = "6")]
    bounded_unit: u32,
    #[prost(uint64, optional, tag = "7")]
    max_staleness_versions: Option<u64>,
    /// Instead of both units, where units go out in steps.
    #[prost(message, optional, tag = "8")]
    step: Option<StepMessage>,
}

#[derive(Message)]
pub(super) struct AcknowledgedMessage {
    #[prost(string, tag = "1")]
    run: String,
    #[prost(string, tag = "2")]
    consumer_group: String,
    #[prost(string, repeated, tag = "3")]
    units: Vec<String>,
}

#[derive(Message)]
pub(super) struct UnitDroppedMessage {
    #[prost(string, tag = "1")]
    run: String,
    #[prost(string, tag = "2")]
    consumer_group: String,
    #[prost(string, tag = "3")]
    unit: String,
    #[prost(uint32, tag = "4")]
    reason: u32,
}

#[derive(Message)]
pub(super) struct UnitReleasedMessage {
    #[prost(string, tag = "1")]
    run: String,
    #[prost(string, tag = "2")]
    consumer_group: String,
    #[prost(string, tag = "3")]
    unit: String,
}

#[derive(Message)]
pub(super) struct RolloutsRetiredMessage {
    #[prost(string, tag = "1")]
    run: String,
    #[prost(message, repeated, tag = "2")]
    rollouts: Vec<RetiredRolloutMessage>,
    #[prost(uint32, tag = "3")]
    reason: u32,
}

#[derive(Message)]
struct RetiredRolloutMessage {
    #[prost(string, tag = "1")]
    rollout: String,
    #[prost(uint32, tag = "2")]
    attempt: u32,
}

#[derive(Message)]
pub(super) struct ConsumerGroupExpiredMessage {
    #[prost(string, tag = "1")]
    run: String,
    #[prost(string, tag = "2")]
    consumer_group: String,
}

#[derive(Message)]
pub(super) struct SoughtMessage {
    #[prost(string, tag = "1")]
    run: String,
    #[prost(string, tag = "2")]
    consumer_group: String,
    #[prost(uint64, tag = "3")]
    to: u64,
}

impl RolloutsRetiredMessage {
    pub(super) fn of(run: &RunId, rollouts: &[(RolloutId, u32)], reason: RetiredFor) -> Self {
        let message = |(rollout, attempt): &(RolloutId, u32)| RetiredRolloutMessage {
            rollout: rollout.to_string(),
            attempt: *attempt,
        };
        Self { run: run.to_string(), rollouts: rollouts.iter().map(message).collect(), reason: reason.code() }
    }

    pub(super) fn into_record(self) -> Result<Record, Fault> {
        let rollout = |RetiredRolloutMessage { rollout, attempt }| -> Result<_, Fault> {
            Ok((identifier("rollouts.rollout", &rollout, RolloutId::parse)?, attempt))
        };
        Ok(Record::RolloutsRetired {
            run: identifier("run", &self.run, RunId::parse)?,
            rollouts: self.rollouts.into_iter().map(rollout).collect::<Result<_, _>>()?,
            reason: coded("reason", self.reason)?,
        })
    }
}

impl ConsumerGroupExpiredMessage {
    pub(super) fn of(run: &RunId, group: &ConsumerGroupId) -> Self {
        Self { run: run.to_string(), consumer_group: group.to_string() }
    }

    pub(super) fn into_record(self) -> Result<Record, Fault> {
        Ok(Record::ConsumerGroupExpired {
            run: identifier("run", &self.run, RunId::parse)?,
            consumer_group: identifier("consumer_group", &self.consumer_group, ConsumerGroupId::parse)?,
        })
    }
}

impl SoughtMessage {
    pub(super) fn of(run: &RunId, group: &ConsumerGroupId, to: Position) -> Self {
        Self { run: run.to_string(), consumer_group: group.to_string(), to: to.0 }
    }

    pub(super) fn into_record(self) -> Result<Record, Fault> {
        Ok(Record::Sought {
            run: identifier("run", &self.run, RunId::parse)?,
            consumer_group: identifier("consumer_group", &self.consumer_group, ConsumerGroupId::parse)?,
            to: Position(self.to),
        })
    }
}

impl ConsumerGroupMessage {
    pub(super) fn of(run: &RunId, group: &ConsumerGroupId, definition: &GroupDefinition, from_earliest: bool) -> Self {
        Self {
            run: run.to_string(),
            consumer_group: group.to_string(),
            definition: Some(GroupDefinitionMessage::of(definition)),
            from_earliest,
        }
    }

    pub(super) fn into_record(self) -> Result<Record, Fault> {
        Ok(Record::ConsumerGroup {
            run: identifier("run", &self.run, RunId::parse)?,
            consumer_group: identifier("consumer_group", &self.consumer_group, ConsumerGroupId::parse)?,
            definition: present("definition", self.definition)?.into_definition()?,
            from_earliest: self.from_earliest,
        })
    }
}

impl GroupDefinitionMessage {
    pub(super) fn of(definition: &GroupDefinition) -> Self {
        let GroupDefinition { policy, unit, step, max_row_tokens, max_staleness_versions, ephemeral, max_deliveries } =
            definition;
        let step = step.map(|step| StepMessage::of_definition(step, unit.code()));
        let (unit, bounded_unit) = if step.is_some() { (0, 0) } else { by_bound(unit.code(), *max_staleness_versions) };
        Self {
            policy: policy.clone(),
            unit,
            bounded_unit,
            step,
            max_row_tokens: *max_row_tokens,
            max_staleness_versions: *max_staleness_versions,
            ephemeral: *ephemeral,
            max_deliveries: *max_deliveries,
        }
    }

    pub(super) fn into_definition(self) -> Result<GroupDefinition, Fault> {
        let stepped_unit = self.step.as_ref().map_or(0, |step| step.stepped_unit);
        Ok(GroupDefinition {
            policy: self.policy,
            unit: coded("definition.unit", self.unit.max(self.bounded_unit).max(stepped_unit))?,
            step: self.step.map(|step| step.definition()),
            max_row_tokens: self.max_row_tokens,
            max_staleness_versions: self.max_staleness_versions,
            ephemeral: self.ephemeral,
            max_deliveries: self.max_deliveries,
        })
    }
}

impl AcknowledgedMessage {
    pub(super) fn of(run: &RunId, group: &ConsumerGroupId, units: &[UnitId]) -> Self {
        let units = units.iter().map(UnitId::to_string).collect();
        Self { run: run.to_string(), consumer_group: group.to_string(), units }
    }

    pub(super) fn into_record(self) -> Result<Record, Fault> {
        Ok(Record::Acknowledged {
            run: identifier("run", &self.run, RunId::parse)?,
            consumer_group: identifier("consumer_group", &self.consumer_group, ConsumerGroupId::parse)?,
            units: self.units.into_iter().map(UnitId::new).collect(),
        })
    }
}

impl UnitDroppedMessage {
    pub(super) fn of(run: &RunId, group: &ConsumerGroupId, unit: &UnitId, reason: DropReason) -> Self {
        Self { run: run.to_string(), consumer_group: group.to_string(), unit: unit.to_string(), reason: reason.code() }
    }

    pub(super) fn into_record(self) -> Result<Record, Fault> {
        Ok(Record::UnitDropped {
            run: identifier("run", &self.run, RunId::parse)?,
            consumer_group: identifier("consumer_group", &self.consumer_group, ConsumerGroupId::parse)?,
            unit: UnitId::new(self.unit),
            reason: coded("reason", self.reason)?,
        })
    }
}

impl UnitReleasedMessage {
    pub(super) fn of(run: &RunId, group: &ConsumerGroupId, unit: &UnitId) -> Self {
        Self { run: run.to_string(), consumer_group: group.to_string(), unit: unit.to_string() }
    }

    pub(super) fn into_record(self) -> Result<Record, Fault> {
        Ok(Record::UnitReleased {
            run: identifier("run", &self.run, RunId::parse)?,
            consumer_group: identifier("consumer_group", &self.consumer_group, ConsumerGroupId::parse)?,
            unit: UnitId::new(self.unit),
        })
    }
}
