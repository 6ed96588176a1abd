//! The record of a run, with all its settings.

use std::sync::Arc;

use prost::Message;

use crate::group::GroupRules;
use crate::ids::{ConsumerGroupId, Name, RunId};
use crate::log::Record;
use crate::rollout::run_settings::{
    CONSUMER_GROUP_IDLE_EXPIRY_MS, ConsumerGroupSettings, GROUP_TIMEOUT_MS, RunSettings, UNCLAIMED_RETENTION_MS,
};
use crate::rollout::settings::{RolloutSettings, RowWeight, UnreadAnswersRule};

use super::Fault;
use super::codes::{Coded, coded};
use super::fields::{identifier, identifiers, optional_identifier, present, texts};
use super::step::StepMessage;

#[derive(Message)]
pub(super) struct RunMessage {
    #[prost(string, tag = "1")]
    run: String,
    #[prost(uint64, tag = "2")]
    settings_version: u64,
    #[prost(message, optional, tag = "3")]
    settings: Option<RunSettingsMessage>,
    /// Instead of the above, where they say what a build that does not know it must not pass over.
    #[prost(message, optional, tag = "4")]
    later_settings: Option<RunSettingsMessage>,
    /// Instead of both, where they say of groups what builds that know the above alone must not pass over.
    #[prost(message, optional, tag = "5")]
    group_settings: Option<RunSettingsMessage>,
}

#[derive(Message)]
struct RunSettingsMessage {
    #[prost(message, optional, tag = "1")]
    rollout: Option<RolloutSettingsMessage>,
    #[prost(uint32, tag = "2")]
    max_deliveries: u32,
    #[prost(uint64, tag = "3")]
    lease_ms: u64,
    #[prost(uint64, tag = "4")]
    tombstone_retention_ms: u64,
    #[prost(message, repeated, tag = "5")]
    consumer_groups: Vec<ConsumerGroupSettingsMessage>,
    #[prost(string, repeated, tag = "6")]
    required_consumer_groups: Vec<String>,
    #[prost(uint64, tag = "7")]
    retention_ms: u64,
    // Absent: the default of the build that first could say something else. Older builds read such runs.
    #[prost(uint64, optional, tag = "8")]
    unclaimed_retention_ms: Option<u64>,
    #[prost(uint64, optional, tag = "9")]
    unclaimed_retention_bytes: Option<u64>,
    // As above.
    #[prost(uint64, optional, tag = "10")]
    consumer_group_idle_expiry_ms: Option<u64>,
    // Builds that do not know it let a run be ahead as far as it likes.
    #[prost(uint32, optional, tag = "11")]
    max_lead_groups: Option<u32>,
    // These four are absent where they have their defaults.
    #[prost(uint32, optional, tag = "12")]
    estimator: Option<u32>,
    #[prost(bool, tag = "13")]
    drop_zero_variance: bool,
    #[prost(uint32, optional, tag = "14")]
    group_quorum: Option<u32>,
    #[prost(uint64, optional, tag = "15")]
    group_timeout_ms: Option<u64>,
}

#[derive(Message)]
struct ConsumerGroupSettingsMessage {
    #[prost(string, tag = "1")]
    name: String,
    #[prost(string, optional, tag = "2")]
    policy: Option<String>,
    #[prost(uint32, tag = "3")]
    unit: u32,
    #[prost(uint32, optional, tag = "4")]
    max_row_tokens: Option<u32>,
    #[prost(uint32, tag = "5")]
    start: u32,
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
pub(super) struct RolloutSettingsMessage {
    #[prost(string, repeated, tag = "1")]
    trained_policies: Vec<String>,
    #[prost(string, tag = "2")]
    default_policy: String,
    #[prost(uint32, tag = "3")]
    shared_call_owner: u32,
    #[prost(uint32, tag = "4")]
    broken_link: u32,
    #[prost(uint32, tag = "5")]
    agents_without_list: u32,
    #[prost(uint32, tag = "6")]
    missing_call: u32,
    #[prost(bool, tag = "7")]
    require_logprobs: bool,
    #[prost(uint32, tag = "8")]
    nonfinite_logprobs: u32,
    #[prost(uint32, optional, tag = "9")]
    vocabulary_limit: Option<u32>,
    #[prost(uint64, tag = "10")]
    idle_timeout_ms: u64,
    #[prost(uint64, tag = "11")]
    missing_call_timeout_ms: u64,
    #[prost(uint64, tag = "12")]
    missing_parent_timeout_ms: u64,
    #[prost(string, repeated, tag = "13")]
    untrained_kinds: Vec<String>,
    // Absent: the default.
    #[prost(uint32, optional, tag = "14")]
    unread_answers: Option<u32>,
    #[prost(uint32, optional, tag = "15")]
    row_weight: Option<u32>,
}

impl RunMessage {
    pub(super) fn of(run: &RunId, settings_version: u64, settings: &RunSettings) -> Self {
        let (run, message) = (run.to_string(), Some(RunSettingsMessage::of(settings)));
        let new = Self { run, settings_version, settings: None, later_settings: None, group_settings: None };
        if settings.group_rules() != GroupRules::default() {
            Self { group_settings: message, ..new }
        } else if says_more_than_version_1(&settings.rollout) {
            Self { later_settings: message, ..new }
        } else {
            Self { settings: message, ..new }
        }
    }

    pub(super) fn into_record(self) -> Result<Record, Fault> {
        let (run, settings_version, settings) = self.into_parts()?;
        Ok(Record::Run { run, settings_version, settings })
    }

    /// The run, which settings these are, and the settings.
    pub(super) fn into_parts(self) -> Result<(RunId, u64, Arc<RunSettings>), Fault> {
        let run = identifier("run", &self.run, RunId::parse)?;
        let settings = self.settings.or(self.later_settings).or(self.group_settings);
        Ok((run, self.settings_version, Arc::new(present("settings", settings)?.into_settings()?)))
    }
}

impl RunSettingsMessage {
    fn of(settings: &RunSettings) -> Self {
        let RunSettings {
            rollout,
            max_deliveries,
            lease_ms,
            tombstone_retention_ms,
            consumer_groups,
            required_consumer_groups,
            retention_ms,
            unclaimed_retention_ms,
            unclaimed_retention_bytes,
            consumer_group_idle_expiry_ms,
            max_lead_groups,
            estimator,
            drop_zero_variance,
            group_quorum,
            group_timeout_ms,
        } = settings;
        Self {
            rollout: Some(RolloutSettingsMessage::of(rollout)),
            max_deliveries: *max_deliveries,
            lease_ms: *lease_ms,
            tombstone_retention_ms: *tombstone_retention_ms,
            consumer_groups: consumer_groups
                .iter()
                .map(|(name, settings)| ConsumerGroupSettingsMessage::of(name, settings))
                .collect(),
            required_consumer_groups: texts(required_consumer_groups),
            retention_ms: *retention_ms,
            unclaimed_retention_ms: other_than(*unclaimed_retention_ms, UNCLAIMED_RETENTION_MS),
            unclaimed_retention_bytes: *unclaimed_retention_bytes,
            consumer_group_idle_expiry_ms: other_than(*consumer_group_idle_expiry_ms, CONSUMER_GROUP_IDLE_EXPIRY_MS),
            max_lead_groups: *max_lead_groups,
            estimator: code_unless_default(*estimator),
            drop_zero_variance: *drop_zero_variance,
            group_quorum: *group_quorum,
            group_timeout_ms: other_than(*group_timeout_ms, GROUP_TIMEOUT_MS),
        }
    }

    fn into_settings(self) -> Result<RunSettings, Fault> {
        Ok(RunSettings {
            rollout: Arc::new(present("settings.rollout", self.rollout)?.into_settings()?),
            max_deliveries: self.max_deliveries,
            lease_ms: self.lease_ms,
            tombstone_retention_ms: self.tombstone_retention_ms,
            consumer_groups: self
                .consumer_groups
                .into_iter()
                .map(ConsumerGroupSettingsMessage::into_settings)
                .collect::<Result<_, _>>()?,
            required_consumer_groups: identifiers(
                "settings.required_consumer_groups",
                &self.required_consumer_groups,
                ConsumerGroupId::parse,
            )?,
            retention_ms: self.retention_ms,
            unclaimed_retention_ms: self.unclaimed_retention_ms.unwrap_or(UNCLAIMED_RETENTION_MS),
            unclaimed_retention_bytes: self.unclaimed_retention_bytes,
            consumer_group_idle_expiry_ms: self.consumer_group_idle_expiry_ms.unwrap_or(CONSUMER_GROUP_IDLE_EXPIRY_MS),
            max_lead_groups: self.max_lead_groups,
            estimator: coded_or_default("settings.estimator", self.estimator)?,
            drop_zero_variance: self.drop_zero_variance,
            group_quorum: self.group_quorum,
            group_timeout_ms: self.group_timeout_ms.unwrap_or(GROUP_TIMEOUT_MS),
        })
    }
}

/// Whether builds that know version 1 alone would do something else with such settings.
fn says_more_than_version_1(settings: &RolloutSettings) -> bool {
    let RolloutSettings { untrained_kinds, unread_answers, row_weight, .. } = settings;
    let defaults = (UnreadAnswersRule::default(), RowWeight::default());
    !untrained_kinds.is_empty() || (*unread_answers, *row_weight) != defaults
}

fn code_unless_default<T: Coded + Copy + Default + PartialEq>(value: T) -> Option<u32> {
    (value != T::default()).then(|| value.code())
}

fn coded_or_default<T: Coded + Default>(field: &'static str, code: Option<u32>) -> Result<T, Fault> {
    code.map_or_else(|| Ok(T::default()), |code| coded(field, code))
}

/// A unit's code as builds without bounds of staleness read it, and as others do: one of them is 0.
pub(super) fn by_bound(unit: u32, max_staleness_versions: Option<u64>) -> (u32, u32) {
    if max_staleness_versions.is_some() { (0, unit) } else { (unit, 0) }
}

fn other_than(value: u64, default: u64) -> Option<u64> {
    (value != default).then_some(value)
}

impl ConsumerGroupSettingsMessage {
    fn of(name: &ConsumerGroupId, settings: &ConsumerGroupSettings) -> Self {
        let ConsumerGroupSettings { policy, unit, step, max_row_tokens, max_staleness_versions, start } = settings;
        let step = step.map(|step| StepMessage::of_settings(step, unit.code()));
        let (unit, bounded_unit) = if step.is_some() { (0, 0) } else { by_bound(unit.code(), *max_staleness_versions) };
        Self {
            name: name.to_string(),
            policy: policy.as_ref().map(Name::to_string),
            unit,
            bounded_unit,
            step,
            max_row_tokens: *max_row_tokens,
            max_staleness_versions: *max_staleness_versions,
            start: start.code(),
        }
    }

    fn into_settings(self) -> Result<(ConsumerGroupId, ConsumerGroupSettings), Fault> {
        let name = identifier("settings.consumer_groups.name", &self.name, ConsumerGroupId::parse)?;
        let policy = optional_identifier("settings.consumer_groups.policy", self.policy.as_deref(), Name::parse)?;
        let stepped_unit = self.step.as_ref().map_or(0, |step| step.stepped_unit);
        let settings = ConsumerGroupSettings {
            policy,
            unit: coded("settings.consumer_groups.unit", self.unit.max(self.bounded_unit).max(stepped_unit))?,
            step: self.step.map(|step| step.settings()),
            max_row_tokens: self.max_row_tokens,
            max_staleness_versions: self.max_staleness_versions,
            start: coded("settings.consumer_groups.start", self.start)?,
        };
        Ok((name, settings))
    }
}

impl RolloutSettingsMessage {
    /// The message, as the first where builds of version 1 may read it, and else as the second.
    pub(super) fn by_age(settings: &RolloutSettings) -> (Option<Self>, Option<Self>) {
        let message = Some(Self::of(settings));
        if says_more_than_version_1(settings) { (None, message) } else { (message, None) }
    }

    fn of(settings: &RolloutSettings) -> Self {
        let RolloutSettings {
            trained_policies,
            default_policy,
            shared_call_owner,
            broken_link,
            agents_without_list,
            missing_call,
            require_logprobs,
            nonfinite_logprobs,
            vocabulary_limit,
            idle_timeout_ms,
            missing_call_timeout_ms,
            missing_parent_timeout_ms,
            untrained_kinds,
            unread_answers,
            row_weight,
        } = settings;
        Self {
            trained_policies: texts(trained_policies),
            default_policy: default_policy.to_string(),
            shared_call_owner: shared_call_owner.code(),
            broken_link: broken_link.code(),
            agents_without_list: agents_without_list.code(),
            missing_call: missing_call.code(),
            require_logprobs: *require_logprobs,
            nonfinite_logprobs: nonfinite_logprobs.code(),
            vocabulary_limit: *vocabulary_limit,
            idle_timeout_ms: *idle_timeout_ms,
            missing_call_timeout_ms: *missing_call_timeout_ms,
            missing_parent_timeout_ms: *missing_parent_timeout_ms,
            untrained_kinds: texts(untrained_kinds),
            unread_answers: code_unless_default(*unread_answers),
            row_weight: code_unless_default(*row_weight),
        }
    }

    pub(super) fn into_settings(self) -> Result<RolloutSettings, Fault> {
        Ok(RolloutSettings {
            trained_policies: identifiers("settings.rollout.trained_policies", &self.trained_policies, Name::parse)?,
            default_policy: identifier("settings.rollout.default_policy", &self.default_policy, Name::parse)?,
            shared_call_owner: coded("settings.rollout.shared_call_owner", self.shared_call_owner)?,
            broken_link: coded("settings.rollout.broken_link", self.broken_link)?,
            agents_without_list: coded("settings.rollout.agents_without_list", self.agents_without_list)?,
            missing_call: coded("settings.rollout.missing_call", self.missing_call)?,
            require_logprobs: self.require_logprobs,
            nonfinite_logprobs: coded("settings.rollout.nonfinite_logprobs", self.nonfinite_logprobs)?,
            vocabulary_limit: self.vocabulary_limit,
            idle_timeout_ms: self.idle_timeout_ms,
            missing_call_timeout_ms: self.missing_call_timeout_ms,
            missing_parent_timeout_ms: self.missing_parent_timeout_ms,
            untrained_kinds: identifiers("settings.rollout.untrained_kinds", &self.untrained_kinds, Name::parse)?,
            unread_answers: coded_or_default("settings.rollout.unread_answers", self.unread_answers)?,
            row_weight: coded_or_default("settings.rollout.row_weight", self.row_weight)?,
        })
    }
}
