//! Records of steps, by hand.

use std::sync::Arc;

use super::samples::{run, samples, trainer};
use crate::log::Record;
use crate::queue::{CutVersion, FrozenStep, GroupDefinition, StepDefinition, UnitId};
use crate::rollout::run_settings::{RunSettings, StepSettings};

pub(super) fn step() -> StepDefinition {
    StepDefinition { units: 512, shards: 8, microbatch_tokens: 32_768 }
}

/// What is written since units go out in steps.
pub(super) fn step_samples(settings: &RunSettings) -> Vec<(&'static str, Record)> {
    let StepDefinition { units, shards, microbatch_tokens } = step();
    let mut stepped = settings.clone();
    stepped.consumer_groups[0].1.step = Some(StepSettings { units, shards, microbatch_tokens });
    let frozen = |acknowledged_shards| Record::StepFrozen {
        run: run(),
        consumer_group: trainer(),
        step: Box::new(FrozenStep {
            index: 300,
            version: CutVersion::First,
            members: vec![UnitId::from("run-1/g7-r3/2/main"), UnitId::from("run-1/g7-r4/0/main")],
            acknowledged_shards,
        }),
    };
    let grouped = samples().into_iter().find(|(name, _)| *name == "consumer_group");
    let Some((_, Record::ConsumerGroup { run: of, consumer_group, definition, from_earliest })) = grouped else {
        panic!("there is such a sample");
    };
    let definition = GroupDefinition { step: Some(step()), ..definition };
    let grouped = Record::ConsumerGroup { run: of, consumer_group, definition, from_earliest };
    vec![
        ("consumer_group_that_takes_steps", grouped),
        ("run_with_steps", Record::Run { run: run(), settings_version: 3, settings: Arc::new(stepped) }),
        ("step_frozen", frozen(Vec::new())),
        ("step_frozen_once_more", frozen(vec![0, 7])),
    ]
}

/// A snapshot of a run whose first consumer group has had steps.
pub(super) fn after_steps(mut snapshot: Record) -> Record {
    if let Record::RunSnapshot { consumer_groups, .. } = &mut snapshot {
        consumer_groups[0].next_step_index = 301;
        consumer_groups[0].definition.step = Some(step());
    }
    snapshot
}
