//! The record of a frozen step, and how steps are made as it stands in settings and definitions.

use prost::Message;

use crate::ids::{ConsumerGroupId, RunId};
use crate::log::Record;
use crate::queue::{FrozenStep, StepDefinition, UnitId};
use crate::rollout::run_settings::StepSettings;

use super::Fault;
use super::codes::{Coded, coded};
use super::fields::identifier;

#[derive(Message)]
pub(super) struct StepFrozenMessage {
    #[prost(string, tag = "1")]
    run: String,
    #[prost(string, tag = "2")]
    consumer_group: String,
    #[prost(uint64, tag = "3")]
    index: u64,
    #[prost(uint32, tag = "4")]
    cut_version: u32,
    #[prost(string, repeated, tag = "5")]
    members: Vec<String>,
    #[prost(uint32, repeated, tag = "6")]
    acknowledged_shards: Vec<u32>,
}

/// How steps are made of units. Where this is there, what a unit is stands in `stepped_unit` alone: a build that does not know steps
/// must not give units out one by one.
#[derive(Message)]
pub(super) struct StepMessage {
    #[prost(uint32, tag = "1")]
    units: u32,
    #[prost(uint32, tag = "2")]
    shards: u32,
    #[prost(uint64, tag = "3")]
    microbatch_tokens: u64,
    #[prost(uint32, tag = "4")]
    pub(super) stepped_unit: u32,
}

impl StepFrozenMessage {
    pub(super) fn of(run: &RunId, group: &ConsumerGroupId, step: &FrozenStep) -> Self {
        let FrozenStep { index, version, members, acknowledged_shards } = step;
        Self {
            run: run.to_string(),
            consumer_group: group.to_string(),
            index: *index,
            cut_version: version.code(),
            members: members.iter().map(UnitId::to_string).collect(),
            acknowledged_shards: acknowledged_shards.clone(),
        }
    }

    pub(super) fn into_record(self) -> Result<Record, Fault> {
        let step = FrozenStep {
            index: self.index,
            version: coded("cut_version", self.cut_version)?,
            members: self.members.into_iter().map(UnitId::new).collect(),
            acknowledged_shards: self.acknowledged_shards,
        };
        Ok(Record::StepFrozen {
            run: identifier("run", &self.run, RunId::parse)?,
            consumer_group: identifier("consumer_group", &self.consumer_group, ConsumerGroupId::parse)?,
            step: Box::new(step),
        })
    }
}

impl StepMessage {
    pub(super) fn of_definition(step: StepDefinition, stepped_unit: u32) -> Self {
        let StepDefinition { units, shards, microbatch_tokens } = step;
        Self { units, shards, microbatch_tokens, stepped_unit }
    }

    pub(super) fn of_settings(step: StepSettings, stepped_unit: u32) -> Self {
        let StepSettings { units, shards, microbatch_tokens } = step;
        Self { units, shards, microbatch_tokens, stepped_unit }
    }

    pub(super) fn definition(&self) -> StepDefinition {
        let Self { units, shards, microbatch_tokens, .. } = *self;
        StepDefinition { units, shards, microbatch_tokens }
    }

    pub(super) fn settings(&self) -> StepSettings {
        let Self { units, shards, microbatch_tokens, .. } = *self;
        StepSettings { units, shards, microbatch_tokens }
    }
}
