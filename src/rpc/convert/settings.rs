//! A run's settings and a consumer group's. What is absent, empty or unspecified becomes the default; a setting that this
//! release does not have is refused unless it has its default's value, so that settings that were read can be written back.

use std::collections::HashSet;
use std::fmt::Display;
use std::sync::Arc;

use crate::error::{Reason, Refusal};
use crate::forest::plan::SharedCallOwner;
use crate::group::{Estimator, GroupRules};
use crate::ids::{ConsumerGroupId, Name, RunId};
use crate::limits;
use crate::proto::v1;
use crate::rollout::run_settings::{
    ConsumerGroupSettings, GROUP_TIMEOUT_MS, RunSettings, StartPosition, StepSettings, Unit,
};
use crate::rollout::settings::{
    AgentsWithoutListRule, BrokenLinkRule, MissingCallRule, NonfiniteLogprobsRule, RolloutSettings, RowWeight,
    UnreadAnswersRule,
};

use super::answer::text;
use super::fields::{
    at_most, duration, duration_ms, identifier, invalid, known, missing, not_in_this_release, optional_identifier,
    timestamp,
};

/// The settings that a request gives a run; absent: the defaults.
///
/// # Errors
/// If a value is none, or asks for what this release does not have. Fields are named `settings.…`.
pub fn run_settings(message: Option<v1::RunSettings>) -> Result<RunSettings, Box<Refusal>> {
    let defaults = RunSettings::with_defaults();
    let Some(message) = message else { return Ok(defaults) };
    check_release(&message)?;
    let rollout = rollout_settings(&message, &defaults.rollout)?;
    let lease_ms = duration_ms(message.lease.as_ref(), "settings.lease")?.unwrap_or(defaults.lease_ms);
    if lease_ms == 0 {
        return Err(invalid("settings.lease", "is 0: every unit would go to another at once").into());
    }
    let ms = |value: Option<&prost_types::Duration>, field: &str, default_ms: u64| {
        duration_ms(value, field).map(|value| value.unwrap_or(default_ms))
    };
    let expiry = message.consumer_group_idle_expiry.as_ref();
    let expiry_ms = ms(expiry, "settings.consumer_group_idle_expiry", defaults.consumer_group_idle_expiry_ms)?;
    if expiry_ms == 0 {
        return Err(invalid("settings.consumer_group_idle_expiry", "is 0: every group would be gone at once").into());
    }
    let consumer_groups = consumer_groups(&message.consumer_groups)?;
    let required_consumer_groups = required_consumer_groups(&message.required_consumer_groups, &consumer_groups)?;
    let unclaimed = message.unclaimed_retention.as_ref();
    judge_lead(message.max_lead_groups, &required_consumer_groups)?;
    let groups = group_rules(&message, &consumer_groups)?;
    Ok(RunSettings {
        rollout: Arc::new(rollout),
        max_deliveries: message.max_deliveries.filter(|most| *most > 0).unwrap_or(defaults.max_deliveries),
        lease_ms,
        tombstone_retention_ms: ms(
            message.tombstone_retention.as_ref(),
            "settings.tombstone_retention",
            defaults.tombstone_retention_ms,
        )?,
        consumer_groups,
        required_consumer_groups,
        retention_ms: ms(message.retention.as_ref(), "settings.retention", defaults.retention_ms)?,
        unclaimed_retention_ms: ms(unclaimed, "settings.unclaimed_retention", defaults.unclaimed_retention_ms)?,
        unclaimed_retention_bytes: message.unclaimed_retention_bytes,
        max_lead_groups: message.max_lead_groups,
        consumer_group_idle_expiry_ms: expiry_ms,
        estimator: groups.estimator,
        drop_zero_variance: groups.drop_zero_variance,
        group_quorum: groups.quorum,
        group_timeout_ms: groups.timeout_ms,
    })
}

fn judge_lead(most: Option<u32>, required: &[ConsumerGroupId]) -> Result<(), Refusal> {
    let field = "settings.max_lead_groups";
    match most {
        Some(0) => Err(invalid(field, "is 0: no group could ever be opened")),
        Some(_) if required.is_empty() => Err(invalid(
            field,
            "is given, and nobody is required; name whom to wait for in settings.required_consumer_groups",
        )),
        Some(_) | None => Ok(()),
    }
}

/// Refuses what this release does not have.
fn check_release(message: &v1::RunSettings) -> Result<(), Refusal> {
    match known(message.durability, "settings.durability")? {
        v1::Durability::Unspecified | v1::Durability::Memory => Ok(()),
        v1::Durability::Fsync | v1::Durability::Os => {
            Err(not_in_this_release("settings.durability", "a durability of a run's own"))
        }
    }
}

/// What a run decides about its groups. What would change nothing is refused: whoever says it expects something.
fn group_rules(
    message: &v1::RunSettings,
    consumer_groups: &[(ConsumerGroupId, ConsumerGroupSettings)],
) -> Result<GroupRules, Refusal> {
    let estimator = match known(message.estimator, "settings.estimator")? {
        v1::Estimator::Unspecified | v1::Estimator::None => Estimator::None,
        v1::Estimator::Mean => Estimator::Mean,
        v1::Estimator::Grpo => Estimator::Grpo,
        v1::Estimator::Rloo => Estimator::Rloo,
    };
    let has_group_units = consumer_groups.iter().any(|(_, settings)| settings.unit == Unit::Group);
    let are_released = estimator != Estimator::None || has_group_units;
    let useless =
        "is given, and no group is released; set settings.estimator, or declare a consumer group of unit group";
    if message.drop_zero_variance && estimator == Estimator::None {
        return Err(invalid("settings.drop_zero_variance", "is given without an estimator; set settings.estimator"));
    }
    let by_quorum = match known(message.group_release, "settings.group_release")? {
        v1::GroupReleaseRule::Unspecified | v1::GroupReleaseRule::Whole => false,
        v1::GroupReleaseRule::Quorum if !are_released => return Err(invalid("settings.group_release", useless)),
        v1::GroupReleaseRule::Quorum => true,
    };
    let quorum = match (message.group_quorum, by_quorum) {
        (None, true) => return Err(missing("settings.group_quorum")),
        (Some(_), false) => {
            let message = "is given, and groups are not released by quorum; set settings.group_release to quorum";
            return Err(invalid("settings.group_quorum", message));
        }
        (Some(few @ (0 | 1)), true) => {
            let message = format_args!("is {few}; a group that is released with fewer than 2 rollouts is dropped");
            return Err(invalid("settings.group_quorum", message));
        }
        (Some(many), true) if many > limits::GROUP_SIZE_MAX => {
            let message = format_args!("is {many}, more than any group has ({})", limits::GROUP_SIZE_MAX);
            return Err(invalid("settings.group_quorum", message));
        }
        (quorum, _) => quorum,
    };
    let timeout_ms = duration_ms(message.group_timeout.as_ref(), "settings.group_timeout")?;
    match timeout_ms {
        Some(0) => return Err(invalid("settings.group_timeout", "is 0: every group would be over at once")),
        Some(timeout_ms) if timeout_ms != GROUP_TIMEOUT_MS && !are_released => {
            return Err(invalid("settings.group_timeout", useless));
        }
        Some(_) | None => {}
    }
    let timeout_ms = timeout_ms.unwrap_or(GROUP_TIMEOUT_MS);
    Ok(GroupRules { estimator, drop_zero_variance: message.drop_zero_variance, quorum, timeout_ms, has_group_units })
}

fn rollout_settings(message: &v1::RunSettings, defaults: &RolloutSettings) -> Result<RolloutSettings, Refusal> {
    let ms = |value: Option<&prost_types::Duration>, field: &str, default_ms: u64| {
        duration_ms(value, field).map(|value| value.unwrap_or(default_ms))
    };
    let default_policy = optional_identifier(&message.default_policy, "settings.default_policy", Name::parse)?;
    let missing_parent = message.missing_parent_timeout.as_ref();
    Ok(RolloutSettings {
        trained_policies: trained_policies(&message.trained_policies)?,
        default_policy: default_policy.unwrap_or_else(|| defaults.default_policy.clone()),
        shared_call_owner: match known(message.shared_call_owner, "settings.shared_call_owner")? {
            v1::SharedCallOwner::Unspecified | v1::SharedCallOwner::RootAgent => SharedCallOwner::RootAgent,
            v1::SharedCallOwner::FirstLeaf => SharedCallOwner::FirstLeaf,
        },
        broken_link: match known(message.broken_link, "settings.broken_link")? {
            v1::BrokenLinkRule::Unspecified | v1::BrokenLinkRule::Infer => BrokenLinkRule::Infer,
            v1::BrokenLinkRule::Discard => BrokenLinkRule::Discard,
        },
        agents_without_list: match known(message.agents_without_list, "settings.agents_without_list")? {
            v1::AgentsWithoutListRule::Unspecified | v1::AgentsWithoutListRule::Drop => AgentsWithoutListRule::Drop,
            v1::AgentsWithoutListRule::Keep => AgentsWithoutListRule::Keep,
        },
        missing_call: match known(message.missing_call, "settings.missing_call")? {
            v1::MissingCallRule::Unspecified | v1::MissingCallRule::Discard => MissingCallRule::Discard,
            v1::MissingCallRule::Finalise => MissingCallRule::Finalise,
        },
        require_logprobs: message.require_logprobs.unwrap_or(defaults.require_logprobs),
        nonfinite_logprobs: match known(message.nonfinite_logprobs, "settings.nonfinite_logprobs")? {
            v1::NonfiniteLogprobsRule::Unspecified | v1::NonfiniteLogprobsRule::Refuse => NonfiniteLogprobsRule::Refuse,
            v1::NonfiniteLogprobsRule::Context => NonfiniteLogprobsRule::Context,
        },
        untrained_kinds: untrained_kinds(&message.untrained_kinds)?,
        unread_answers: match known(message.unread_answers, "settings.unread_answers")? {
            v1::UnreadAnswersRule::Unspecified | v1::UnreadAnswersRule::Train => UnreadAnswersRule::Train,
            v1::UnreadAnswersRule::Context => UnreadAnswersRule::Context,
        },
        row_weight: match known(message.row_weight, "settings.row_weight")? {
            v1::RowWeight::Unspecified | v1::RowWeight::One => RowWeight::One,
            v1::RowWeight::RolloutRows => RowWeight::RolloutRows,
            v1::RowWeight::RolloutTokens => RowWeight::RolloutTokens,
        },
        vocabulary_limit: message.vocabulary_limit.filter(|limit| *limit > 0),
        idle_timeout_ms: ms(message.idle_timeout.as_ref(), "settings.idle_timeout", defaults.idle_timeout_ms)?,
        missing_call_timeout_ms: ms(
            message.missing_call_timeout.as_ref(),
            "settings.missing_call_timeout",
            defaults.missing_call_timeout_ms,
        )?,
        missing_parent_timeout_ms: ms(
            missing_parent,
            "settings.missing_parent_timeout",
            defaults.missing_parent_timeout_ms,
        )?,
    })
}

fn required_consumer_groups(
    required: &[String],
    declared: &[(ConsumerGroupId, ConsumerGroupSettings)],
) -> Result<Vec<ConsumerGroupId>, Refusal> {
    let field = "settings.required_consumer_groups";
    at_most(required.len(), limits::RUN_CONSUMER_GROUPS_MAX, "consumer groups", field)?;
    let parse = |(at, name): (usize, &String)| {
        let name = identifier(name, field, ConsumerGroupId::parse).map_err(|refusal| refusal.index(at))?;
        if declared.iter().any(|(declared, _)| *declared == name) {
            return Ok(name);
        }
        Err(invalid(field, format_args!("{name:?} is not among settings.consumer_groups; declare it")).index(at))
    };
    required.iter().enumerate().map(parse).collect()
}

fn trained_policies(policies: &[String]) -> Result<Vec<Name>, Refusal> {
    let field = "settings.trained_policies";
    at_most(policies.len(), limits::RUN_TRAINED_POLICIES_MAX, "policies", field)?;
    names(policies, field)
}

fn untrained_kinds(kinds: &[String]) -> Result<Vec<Name>, Refusal> {
    let field = "settings.untrained_kinds";
    at_most(kinds.len(), limits::RUN_UNTRAINED_KINDS_MAX, "kinds", field)?;
    names(kinds, field)
}

fn names(names: &[String], field: &str) -> Result<Vec<Name>, Refusal> {
    let parsed = names.iter().enumerate();
    parsed.map(|(at, name)| identifier(name, field, Name::parse).map_err(|refusal| refusal.index(at))).collect()
}

fn consumer_groups(
    declared: &[v1::ConsumerGroupDeclaration],
) -> Result<Vec<(ConsumerGroupId, ConsumerGroupSettings)>, Refusal> {
    at_most(declared.len(), limits::RUN_CONSUMER_GROUPS_MAX, "consumer groups", "settings.consumer_groups")?;
    let mut names = HashSet::new();
    let mut groups = Vec::with_capacity(declared.len());
    for (at, group) in declared.iter().enumerate() {
        let path = format!("settings.consumer_groups[{at}]");
        let field = format!("{path}.consumer_group");
        let of_group = |refusal: Refusal| refusal.index(at);
        let name = identifier(&group.consumer_group, &field, ConsumerGroupId::parse).map_err(of_group)?;
        if !names.insert(name.clone()) {
            return Err(of_group(invalid(field, format_args!("{name:?} is declared twice"))));
        }
        let settings = group.settings.clone().unwrap_or_default();
        let settings = consumer_group_settings(&settings, &format!("{path}.settings")).map_err(of_group)?;
        groups.push((name, settings));
    }
    Ok(groups)
}

/// What a consumer group takes. `path` is where the message stands in its request.
///
/// # Errors
/// If a value is none, or asks for what this release does not have.
pub fn consumer_group_settings(
    message: &v1::ConsumerGroupSettings,
    path: &str,
) -> Result<ConsumerGroupSettings, Refusal> {
    let field = |name: &str| format!("{path}.{name}");
    let (unit, step) = match (unit(message.unit, field("unit"))?, &message.step) {
        (Some(unit), None) => (unit, None),
        (None, Some(step)) => {
            let (unit, step) = steps(step, &field("step"))?;
            (unit, Some(step))
        }
        (None, None) => return Err(missing(&field("step"))),
        (Some(_), Some(_)) => {
            return Err(invalid(
                field("step"),
                "is given, and the unit is another; set unit to step, or leave step out",
            ));
        }
    };
    match known(message.shape, field("shape"))? {
        v1::Shape::Unspecified | v1::Shape::Leaf => {}
        v1::Shape::Tree | v1::Shape::Packed => {
            return Err(not_in_this_release(field("shape"), "a shape other than leaf"));
        }
    }
    let start = match known(message.start, field("start"))? {
        v1::StartPosition::Unspecified | v1::StartPosition::Earliest => StartPosition::Earliest,
        v1::StartPosition::Latest => StartPosition::Latest,
    };
    let policy = optional_identifier(&message.policy, field("policy"), Name::parse)?;
    Ok(ConsumerGroupSettings {
        policy,
        unit,
        step,
        max_row_tokens: max_row_tokens(message.max_row_tokens, field("max_row_tokens"))?,
        max_staleness_versions: message.max_staleness_versions,
        start,
    })
}

/// What a unit is; none: a shard of a step.
fn unit(number: i32, field: String) -> Result<Option<Unit>, Refusal> {
    Ok(match known(number, field)? {
        v1::Unit::Unspecified | v1::Unit::Row => Some(Unit::Row),
        v1::Unit::Rollout => Some(Unit::Rollout),
        v1::Unit::Group => Some(Unit::Group),
        v1::Unit::Step => None,
    })
}

/// What steps count, and how they are made.
fn steps(message: &v1::StepSettings, path: &str) -> Result<(Unit, StepSettings), Refusal> {
    let field = |name: &str| format!("{path}.{name}");
    let counted = match known(message.counted_unit, field("counted_unit"))? {
        v1::Unit::Unspecified | v1::Unit::Rollout => Unit::Rollout,
        v1::Unit::Group => Unit::Group,
        v1::Unit::Row | v1::Unit::Step => {
            return Err(invalid(field("counted_unit"), "is neither rollout nor group: steps are made of these"));
        }
    };
    let within = |value: u32, most: u32, name: &str| match value {
        0 => Err(missing(&field(name))),
        value if value > most => {
            Err(Refusal::new(Reason::OverLimit, format!("{} is {value}, more than {most}", field(name)))
                .field(field(name)))
        }
        value => Ok(value),
    };
    if message.microbatch_tokens == 0 {
        return Err(missing(&field("microbatch_tokens")));
    }
    let step = StepSettings {
        units: within(message.units, limits::STEP_UNITS_MAX, "units")?,
        shards: within(message.shards, limits::STEP_SHARDS_MAX, "shards")?,
        microbatch_tokens: message.microbatch_tokens,
    };
    Ok((counted, step))
}

/// The longest row; 0 means no limit.
///
/// # Errors
/// If it is more than any row could have.
pub fn max_row_tokens(most: u64, field: impl Display) -> Result<Option<u32>, Refusal> {
    match u32::try_from(most) {
        Ok(0) => Ok(None),
        Ok(most) => Ok(Some(most)),
        Err(_) => Err(invalid(field, format_args!("is {most}, more than {}; 0 means no limit", u32::MAX))),
    }
}

/// What a consumer group takes, with every default filled in.
#[must_use]
pub fn consumer_group_settings_message(settings: &ConsumerGroupSettings) -> v1::ConsumerGroupSettings {
    let start = match settings.start {
        StartPosition::Earliest => v1::StartPosition::Earliest,
        StartPosition::Latest => v1::StartPosition::Latest,
    };
    v1::ConsumerGroupSettings {
        policy: text(settings.policy.as_ref()),
        unit: if settings.step.is_some() { v1::Unit::Step } else { unit_message(settings.unit) }.into(),
        step: settings.step.map(|StepSettings { units, shards, microbatch_tokens }| v1::StepSettings {
            units,
            counted_unit: unit_message(settings.unit).into(),
            shards,
            microbatch_tokens,
        }),
        shape: v1::Shape::Leaf.into(),
        max_row_tokens: settings.max_row_tokens.map_or(0, u64::from),
        max_staleness_versions: settings.max_staleness_versions,
        start: start.into(),
    }
}

/// What a unit is.
#[must_use]
pub fn unit_message(unit: Unit) -> v1::Unit {
    match unit {
        Unit::Row => v1::Unit::Row,
        Unit::Rollout => v1::Unit::Rollout,
        Unit::Group => v1::Unit::Group,
    }
}

/// A run's settings, with every default filled in.
#[must_use]
pub fn run_settings_message(settings: &RunSettings) -> v1::RunSettings {
    let rollout = &settings.rollout;
    let declaration = |(name, settings): &(ConsumerGroupId, ConsumerGroupSettings)| v1::ConsumerGroupDeclaration {
        consumer_group: name.to_string(),
        settings: Some(consumer_group_settings_message(settings)),
    };
    let mut message = v1::RunSettings {
        trained_policies: rollout.trained_policies.iter().map(Name::to_string).collect(),
        default_policy: rollout.default_policy.to_string(),
        require_logprobs: Some(rollout.require_logprobs),
        vocabulary_limit: rollout.vocabulary_limit,
        idle_timeout: Some(duration(rollout.idle_timeout_ms)),
        missing_call_timeout: Some(duration(rollout.missing_call_timeout_ms)),
        missing_parent_timeout: Some(duration(rollout.missing_parent_timeout_ms)),
        tombstone_retention: Some(duration(settings.tombstone_retention_ms)),
        max_deliveries: Some(settings.max_deliveries),
        consumer_groups: settings.consumer_groups.iter().map(declaration).collect(),
        untrained_kinds: rollout.untrained_kinds.iter().map(Name::to_string).collect(),
        drop_zero_variance: settings.drop_zero_variance,
        group_quorum: settings.group_quorum,
        group_timeout: Some(duration(settings.group_timeout_ms)),
        required_consumer_groups: settings.required_consumer_groups.iter().map(ConsumerGroupId::to_string).collect(),
        retention: Some(duration(settings.retention_ms)),
        unclaimed_retention: Some(duration(settings.unclaimed_retention_ms)),
        unclaimed_retention_bytes: settings.unclaimed_retention_bytes,
        max_lead_groups: settings.max_lead_groups,
        consumer_group_idle_expiry: Some(duration(settings.consumer_group_idle_expiry_ms)),
        lease: Some(duration(settings.lease_ms)),
        durability: v1::Durability::Unspecified.into(),
        ..v1::RunSettings::default()
    };
    message.set_estimator(match settings.estimator {
        Estimator::None => v1::Estimator::None,
        Estimator::Mean => v1::Estimator::Mean,
        Estimator::Grpo => v1::Estimator::Grpo,
        Estimator::Rloo => v1::Estimator::Rloo,
    });
    message.set_group_release(match settings.group_quorum {
        None => v1::GroupReleaseRule::Whole,
        Some(_) => v1::GroupReleaseRule::Quorum,
    });
    set_rules(&mut message, rollout);
    message
}

fn set_rules(message: &mut v1::RunSettings, rollout: &RolloutSettings) {
    message.set_unread_answers(match rollout.unread_answers {
        UnreadAnswersRule::Train => v1::UnreadAnswersRule::Train,
        UnreadAnswersRule::Context => v1::UnreadAnswersRule::Context,
    });
    message.set_row_weight(match rollout.row_weight {
        RowWeight::One => v1::RowWeight::One,
        RowWeight::RolloutRows => v1::RowWeight::RolloutRows,
        RowWeight::RolloutTokens => v1::RowWeight::RolloutTokens,
    });
    message.set_shared_call_owner(match rollout.shared_call_owner {
        SharedCallOwner::RootAgent => v1::SharedCallOwner::RootAgent,
        SharedCallOwner::FirstLeaf => v1::SharedCallOwner::FirstLeaf,
    });
    message.set_broken_link(match rollout.broken_link {
        BrokenLinkRule::Infer => v1::BrokenLinkRule::Infer,
        BrokenLinkRule::Discard => v1::BrokenLinkRule::Discard,
    });
    message.set_agents_without_list(match rollout.agents_without_list {
        AgentsWithoutListRule::Drop => v1::AgentsWithoutListRule::Drop,
        AgentsWithoutListRule::Keep => v1::AgentsWithoutListRule::Keep,
    });
    message.set_missing_call(match rollout.missing_call {
        MissingCallRule::Discard => v1::MissingCallRule::Discard,
        MissingCallRule::Finalise => v1::MissingCallRule::Finalise,
    });
    message.set_nonfinite_logprobs(match rollout.nonfinite_logprobs {
        NonfiniteLogprobsRule::Refuse => v1::NonfiniteLogprobsRule::Refuse,
        NonfiniteLogprobsRule::Context => v1::NonfiniteLogprobsRule::Context,
    });
}

/// A run.
#[must_use]
pub fn run(run: &RunId, settings: &RunSettings, settings_version: u64, created_unix_ms: u64) -> v1::Run {
    v1::Run {
        run_id: run.to_string(),
        settings: Some(run_settings_message(settings)),
        settings_version,
        create_time: Some(timestamp(created_unix_ms)),
    }
}

#[cfg(test)]
#[path = "settings_tests.rs"]
mod tests;
