//! Records of groups, by hand and arbitrary.

use std::sync::Arc;

use proptest::collection::vec;
use proptest::option;
use proptest::prelude::*;
use proptest::sample::select;

use super::samples::{run, with_rules};
use super::strategies::id;
use crate::group::{Absence, Counted, Decided, Estimator, GroupRules, ReleasedFor};
use crate::ids::{GroupId, RolloutId, RunId};
use crate::log::{Position, Record};
use crate::rollout::run_settings::{RunSettings, Unit};

fn rules() -> GroupRules {
    GroupRules {
        estimator: Estimator::Grpo,
        drop_zero_variance: true,
        quorum: Some(6),
        timeout_ms: 3_600_000,
        has_group_units: true,
    }
}

/// What is written since groups are released.
pub(super) fn group_samples(settings: &RunSettings, opened: Record) -> Vec<(&'static str, Record)> {
    let (run, group) = (run(), GroupId::parse("g7").unwrap());
    let rollout = |text: &str| RolloutId::parse(text).unwrap();
    let counted = |text, attempt, reward| Counted { rollout: rollout(text), attempt, reward };
    let absence = |member, reason: &str| Absence { member, reason: reason.to_owned() };
    let decided = Decided {
        rules: rules(),
        released_for: ReleasedFor::Quorum,
        size: Some(8),
        counted: vec![counted("g7-r1", 0, -0.0), counted("g7-r3", 2, 0.5)],
        absences: vec![absence(Some((rollout("g7-r4"), 1)), "idle_timeout"), absence(None, "never_came")],
        absent: 6,
    };
    let released = |first| Record::GroupReleased {
        run: run.clone(),
        group: group.clone(),
        decided: Box::new(decided.clone()),
        first,
    };
    let mut grouped = RunSettings {
        estimator: Estimator::Rloo,
        drop_zero_variance: true,
        group_quorum: Some(6),
        group_timeout_ms: 60_000,
        ..settings.clone()
    };
    let of_run = |settings: &RunSettings| Record::Run {
        run: run.clone(),
        settings_version: 3,
        settings: Arc::new(settings.clone()),
    };
    let with_estimator = of_run(&grouped);
    (grouped.estimator, grouped.drop_zero_variance) = (Estimator::None, false);
    grouped.consumer_groups[0].1.unit = Unit::Group;
    vec![
        ("run_with_an_estimator", with_estimator),
        ("run_with_group_units", of_run(&grouped)),
        ("rollout_opened_in_a_group_with_rules", with_rules(opened, rules())),
        ("group_rules", Record::GroupRules { run: run.clone(), group: group.clone(), rules: rules() }),
        ("group_released", released(None)),
        ("group_released_once_more", released(Some(Position(4711)))),
    ]
}

pub(super) fn group_rules() -> BoxedStrategy<GroupRules> {
    let estimator = select(&[Estimator::None, Estimator::Mean, Estimator::Grpo, Estimator::Rloo]);
    (estimator, any::<(bool, Option<u32>, u64, bool)>())
        .prop_map(|(estimator, (drop_zero_variance, quorum, timeout_ms, has_group_units))| GroupRules {
            estimator,
            drop_zero_variance,
            quorum,
            timeout_ms,
            has_group_units,
        })
        .boxed()
}

pub(super) fn decided() -> BoxedStrategy<Decided> {
    let counted = (id(RolloutId::parse), any::<(u32, u64)>()).prop_map(|(rollout, (attempt, reward))| Counted {
        rollout,
        attempt,
        reward: f64::from_bits(reward),
    });
    let absence = (option::of((id(RolloutId::parse), any::<u32>())), "\\PC{0,12}")
        .prop_map(|(member, reason)| Absence { member, reason });
    let numbers = any::<(Option<u32>, u32)>();
    (group_rules(), select(&ReleasedFor::ALL), numbers, vec(counted, 0..4), vec(absence, 0..4))
        .prop_map(|(rules, released_for, (size, absent), counted, absences)| Decided {
            rules,
            released_for,
            size,
            counted,
            absences,
            absent,
        })
        .boxed()
}

pub(super) fn of_groups() -> BoxedStrategy<Record> {
    let group = || (id(RunId::parse), id(GroupId::parse));
    prop_oneof![
        (group(), any::<u32>()).prop_map(|((run, group), size)| Record::GroupSize { run, group, size }),
        (group(), group_rules()).prop_map(|((run, group), rules)| Record::GroupRules { run, group, rules }),
        (group(), decided(), any::<Option<u64>>()).prop_map(|((run, group), decided, first)| {
            Record::GroupReleased { run, group, decided: Box::new(decided), first: first.map(Position) }
        }),
    ]
    .boxed()
}

/// A release that was decided so.
pub(super) fn record_of(decided: Decided) -> Record {
    let group = GroupId::parse("group").unwrap();
    Record::GroupReleased { run: run(), group, decided: Box::new(decided), first: None }
}
