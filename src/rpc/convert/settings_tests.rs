//! Settings: defaults, the way there and back, and what is refused.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use super::*;
use crate::error::Reason;

const HOUR_MS: u64 = 60 * 60 * 1000;

fn parsed(message: v1::RunSettings) -> RunSettings {
    run_settings(Some(message)).unwrap()
}

#[track_caller]
fn refuses(change: impl FnOnce(&mut v1::RunSettings), reason: Reason, field: &str) {
    let mut message = v1::RunSettings::default();
    change(&mut message);
    let refusal = run_settings(Some(message)).unwrap_err();
    assert_eq!((refusal.reason, refusal.field.as_deref()), (reason, Some(field)), "{refusal}");
}

fn declared(name: &str, settings: v1::ConsumerGroupSettings) -> v1::ConsumerGroupDeclaration {
    v1::ConsumerGroupDeclaration { consumer_group: name.to_owned(), settings: Some(settings) }
}

#[test]
fn what_is_left_out_has_its_default_and_is_said_in_full() {
    let defaults = RunSettings::with_defaults();
    assert_eq!(run_settings(None).unwrap(), defaults);
    assert_eq!(parsed(v1::RunSettings::default()), defaults);
    let message = run_settings_message(&defaults);
    assert_eq!((message.default_policy.as_str(), message.max_deliveries), ("main", Some(5)));
    assert_eq!((message.lease, message.idle_timeout), (Some(duration(HOUR_MS)), Some(duration(6 * HOUR_MS))));
    assert_eq!(message.tombstone_retention, Some(duration(72 * HOUR_MS)));
    assert_eq!(message.shared_call_owner(), v1::SharedCallOwner::RootAgent);
    assert_eq!((message.estimator(), message.group_timeout), (v1::Estimator::None, Some(duration(24 * HOUR_MS))));
    assert_eq!(parsed(message), defaults, "what was read can be written back");
}

#[test]
fn every_setting_of_this_release_goes_there_and_back() {
    let group = v1::ConsumerGroupSettings {
        policy: "actor".to_owned(),
        unit: v1::Unit::Rollout.into(),
        max_row_tokens: 4096,
        start: v1::StartPosition::Latest.into(),
        ..v1::ConsumerGroupSettings::default()
    };
    let message = v1::RunSettings {
        trained_policies: vec!["actor".to_owned(), "critic".to_owned()],
        default_policy: "actor".to_owned(),
        shared_call_owner: v1::SharedCallOwner::FirstLeaf.into(),
        broken_link: v1::BrokenLinkRule::Discard.into(),
        agents_without_list: v1::AgentsWithoutListRule::Keep.into(),
        missing_call: v1::MissingCallRule::Finalise.into(),
        require_logprobs: Some(false),
        nonfinite_logprobs: v1::NonfiniteLogprobsRule::Context.into(),
        vocabulary_limit: Some(151_936),
        idle_timeout: Some(duration(1)),
        missing_call_timeout: Some(duration(0)),
        missing_parent_timeout: Some(duration(2_500)),
        tombstone_retention: Some(duration(0)),
        max_deliveries: Some(2),
        lease: Some(duration(90_000)),
        consumer_groups: vec![declared("g", group), declared("h", v1::ConsumerGroupSettings::default())],
        durability: v1::Durability::Unspecified.into(),
        required_consumer_groups: vec!["h".to_owned()],
        retention: Some(duration(60_000)),
        unclaimed_retention: Some(duration(0)),
        unclaimed_retention_bytes: Some(1 << 30),
        consumer_group_idle_expiry: Some(duration(3_600_000)),
        ..v1::RunSettings::default()
    };
    let settings = parsed(message.clone());
    let retained = (settings.retention_ms, settings.unclaimed_retention_ms, settings.unclaimed_retention_bytes);
    assert_eq!(retained, (60_000, 0, Some(1 << 30)));
    assert_eq!((settings.consumer_group_idle_expiry_ms, settings.required_consumer_groups.len()), (3_600_000, 1));
    assert_eq!((settings.max_deliveries, settings.lease_ms, settings.tombstone_retention_ms), (2, 90_000, 0));
    assert_eq!(settings.rollout.missing_parent_timeout_ms, 2_500);
    assert_eq!(settings.consumer_groups[0].1.max_row_tokens, Some(4096));
    assert_eq!(settings.consumer_groups[1].1, ConsumerGroupSettings::default());
    let back = run_settings_message(&settings);
    assert_eq!(back.trained_policies, message.trained_policies);
    assert_eq!(back.consumer_groups[1].settings.as_ref().unwrap().shape(), v1::Shape::Leaf);
    assert_eq!(parsed(back), settings);
    let run_message = run(&RunId::parse("r").unwrap(), &settings, 3, 1500);
    assert_eq!((run_message.settings_version, run_message.create_time), (3, Some(timestamp(1500))));
}

#[test]
fn what_comes_later_is_refused_with_its_field() {
    type Change = fn(&mut v1::RunSettings);
    let later: [(Change, &str); 2] = [
        (|settings| settings.durability = v1::Durability::Fsync.into(), "settings.durability"),
        (|settings| settings.durability = v1::Durability::Os.into(), "settings.durability"),
    ];
    for (change, field) in later {
        refuses(change, Reason::NotInThisRelease, field);
    }
}

#[test]
fn what_a_run_decides_about_groups_goes_there_and_back() {
    let by_quorum = |settings: &mut v1::RunSettings, quorum| {
        settings.group_release = v1::GroupReleaseRule::Quorum.into();
        settings.group_quorum = quorum;
    };
    let mut message = v1::RunSettings {
        estimator: v1::Estimator::Rloo.into(),
        drop_zero_variance: true,
        group_timeout: Some(duration(60_000)),
        ..v1::RunSettings::default()
    };
    by_quorum(&mut message, Some(2));
    let settings = parsed(message.clone());
    let rules = GroupRules {
        estimator: Estimator::Rloo,
        drop_zero_variance: true,
        quorum: Some(2),
        timeout_ms: 60_000,
        has_group_units: false,
    };
    assert_eq!(settings.group_rules(), rules);
    assert_eq!(parsed(run_settings_message(&settings)), settings);
    let groups = v1::ConsumerGroupSettings { unit: v1::Unit::Group.into(), ..v1::ConsumerGroupSettings::default() };
    message.consumer_groups = vec![declared("whole", groups)];
    (message.estimator, message.drop_zero_variance) = (v1::Estimator::None.into(), false);
    let rules = GroupRules { estimator: Estimator::None, drop_zero_variance: false, has_group_units: true, ..rules };
    assert_eq!(parsed(message).group_rules(), rules);

    let mean = |settings: &mut v1::RunSettings| settings.estimator = v1::Estimator::Mean.into();
    let invalid = |change: &dyn Fn(&mut v1::RunSettings), field| refuses(change, Reason::InvalidValue, field);
    invalid(&|settings| settings.drop_zero_variance = true, "settings.drop_zero_variance");
    invalid(&|settings| by_quorum(settings, Some(2)), "settings.group_release");
    invalid(&|settings| settings.group_timeout = Some(duration(60_000)), "settings.group_timeout");
    invalid(&|settings| settings.group_timeout = Some(duration(0)), "settings.group_timeout");
    for quorum in [0, 1, limits::GROUP_SIZE_MAX + 1] {
        let change = |settings: &mut v1::RunSettings| {
            mean(settings);
            by_quorum(settings, Some(quorum));
        };
        invalid(&change, "settings.group_quorum");
    }
    let without_rule = |settings: &mut v1::RunSettings| {
        mean(settings);
        settings.group_quorum = Some(2);
    };
    invalid(&without_rule, "settings.group_quorum");
    let without_number = |settings: &mut v1::RunSettings| {
        mean(settings);
        by_quorum(settings, None);
    };
    refuses(without_number, Reason::MissingField, "settings.group_quorum");
    let default_said = v1::RunSettings { group_timeout: Some(duration(24 * HOUR_MS)), ..v1::RunSettings::default() };
    assert_eq!(parsed(default_said), RunSettings::with_defaults());
}

#[test]
fn bad_values_are_refused_with_their_field() {
    type Change = fn(&mut v1::RunSettings);
    let bad: [(Change, Reason, &str); 16] = [
        (|settings| settings.max_lead_groups = Some(0), Reason::InvalidValue, "settings.max_lead_groups"),
        (|settings| settings.max_lead_groups = Some(1), Reason::InvalidValue, "settings.max_lead_groups"),
        (|settings| settings.row_weight = 4, Reason::InvalidValue, "settings.row_weight"),
        (|settings| settings.unread_answers = -1, Reason::InvalidValue, "settings.unread_answers"),
        (
            |settings| settings.untrained_kinds.push(String::new()),
            Reason::InvalidIdentifier,
            "settings.untrained_kinds",
        ),
        (
            |settings| settings.untrained_kinds = vec!["k".to_owned(); limits::RUN_UNTRAINED_KINDS_MAX + 1],
            Reason::OverLimit,
            "settings.untrained_kinds",
        ),
        (
            |settings| settings.required_consumer_groups.push("nobody".to_owned()),
            Reason::InvalidValue,
            "settings.required_consumer_groups",
        ),
        (
            |settings| settings.consumer_group_idle_expiry = Some(duration(0)),
            Reason::InvalidValue,
            "settings.consumer_group_idle_expiry",
        ),
        (|settings| settings.estimator = 99, Reason::InvalidValue, "settings.estimator"),
        (|settings| settings.missing_call = -1, Reason::InvalidValue, "settings.missing_call"),
        (|settings| settings.default_policy = "\n".to_owned(), Reason::InvalidIdentifier, "settings.default_policy"),
        (
            |settings| settings.trained_policies = vec![String::new()],
            Reason::InvalidIdentifier,
            "settings.trained_policies",
        ),
        (
            |settings| settings.idle_timeout = Some(prost_types::Duration { seconds: -1, nanos: 0 }),
            Reason::InvalidValue,
            "settings.idle_timeout",
        ),
        (
            |settings| settings.missing_call_timeout = Some(duration(limits::DURATION_MS_MAX + 1)),
            Reason::InvalidValue,
            "settings.missing_call_timeout",
        ),
        (|settings| settings.lease = Some(duration(0)), Reason::InvalidValue, "settings.lease"),
        (
            |settings| {
                let names = (0..=limits::RUN_CONSUMER_GROUPS_MAX).map(|name| name.to_string());
                settings.consumer_groups = names.map(|name| declared(&name, Default::default())).collect();
            },
            Reason::OverLimit,
            "settings.consumer_groups",
        ),
    ];
    for (change, reason, field) in bad {
        refuses(change, reason, field);
    }
}

fn in_steps() -> v1::StepSettings {
    v1::StepSettings { units: 4, counted_unit: v1::Unit::Group.into(), shards: 2, microbatch_tokens: 4096 }
}

/// Has a group take steps.
fn steps(group: &mut v1::ConsumerGroupSettings) -> &mut v1::StepSettings {
    group.set_unit(v1::Unit::Step);
    group.step.insert(in_steps())
}

#[test]
fn steps_are_what_is_shown_of_them() {
    let mut group = v1::ConsumerGroupSettings::default();
    steps(&mut group);
    let taken = consumer_group_settings(&group, "settings").unwrap();
    assert_eq!((taken.unit, taken.step.map(|step| (step.units, step.shards))), (Unit::Group, Some((4, 2))));
    let shown = consumer_group_settings_message(&taken);
    assert_eq!((shown.unit(), shown.step), (v1::Unit::Step, Some(in_steps())));
    steps(&mut group).counted_unit = v1::Unit::Unspecified.into();
    assert_eq!(consumer_group_settings(&group, "settings").unwrap().unit, Unit::Rollout);
}

#[test]
fn consumer_groups_are_checked_where_they_are_declared() {
    let path = "settings.consumer_groups[1]";
    let twice = |settings: &mut v1::RunSettings| {
        settings.consumer_groups = vec![declared("g", Default::default()), declared("g", Default::default())];
    };
    refuses(twice, Reason::InvalidValue, &format!("{path}.consumer_group"));
    type Change = fn(&mut v1::ConsumerGroupSettings);
    let bad: [(Change, Reason, &str); 12] = [
        (|group| group.unit = v1::Unit::Step.into(), Reason::MissingField, "step"),
        (|group| group.step = Some(in_steps()), Reason::InvalidValue, "step"),
        (|group| steps(group).units = 0, Reason::MissingField, "step.units"),
        (|group| steps(group).units = limits::STEP_UNITS_MAX + 1, Reason::OverLimit, "step.units"),
        (|group| steps(group).shards = limits::STEP_SHARDS_MAX + 1, Reason::OverLimit, "step.shards"),
        (|group| steps(group).microbatch_tokens = 0, Reason::MissingField, "step.microbatch_tokens"),
        (|group| steps(group).counted_unit = v1::Unit::Row.into(), Reason::InvalidValue, "step.counted_unit"),
        (|group| group.unit = 99, Reason::InvalidValue, "unit"),
        (|group| group.shape = v1::Shape::Tree.into(), Reason::NotInThisRelease, "shape"),
        (|group| group.shape = v1::Shape::Packed.into(), Reason::NotInThisRelease, "shape"),
        (|group| group.policy = "\n".to_owned(), Reason::InvalidIdentifier, "policy"),
        (|group| group.max_row_tokens = 1 << 32, Reason::InvalidValue, "max_row_tokens"),
    ];
    for (change, reason, field) in bad {
        let mut group = v1::ConsumerGroupSettings::default();
        change(&mut group);
        let refusal = consumer_group_settings(&group, "subscription.settings").unwrap_err();
        assert_eq!(refusal.field, Some(format!("subscription.settings.{field}")));
        let declare = |settings: &mut v1::RunSettings| {
            settings.consumer_groups = vec![declared("a", Default::default()), declared("b", group)];
        };
        refuses(declare, reason, &format!("{path}.settings.{field}"));
    }
}
