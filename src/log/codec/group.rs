//! The records of groups: what is decided about them, and their release.

use prost::Message;

use crate::group::{Absence, Counted, Decided, GroupRules};
use crate::ids::{GroupId, RolloutId, RunId};
use crate::log::{Position, Record};

use super::Fault;
use super::codes::{Coded, coded};
use super::fields::{identifier, optional_identifier, present};

#[derive(Clone, Message)]
pub(super) struct RulesMessage {
    #[prost(uint32, tag = "1")]
    estimator: u32,
    #[prost(bool, tag = "2")]
    drop_zero_variance: bool,
    #[prost(uint32, optional, tag = "3")]
    quorum: Option<u32>,
    #[prost(uint64, tag = "4")]
    timeout_ms: u64,
    #[prost(bool, tag = "5")]
    has_group_units: bool,
}

#[derive(Message)]
pub(super) struct GroupRulesMessage {
    #[prost(string, tag = "1")]
    run: String,
    #[prost(string, tag = "2")]
    group: String,
    #[prost(message, optional, tag = "3")]
    rules: Option<RulesMessage>,
}

#[derive(Message)]
pub(super) struct GroupReleasedMessage {
    #[prost(string, tag = "1")]
    run: String,
    #[prost(string, tag = "2")]
    group: String,
    #[prost(message, optional, tag = "3")]
    rules: Option<RulesMessage>,
    #[prost(uint32, tag = "4")]
    released_for: u32,
    #[prost(uint32, optional, tag = "5")]
    size: Option<u32>,
    #[prost(message, repeated, tag = "6")]
    counted: Vec<CountedMessage>,
    #[prost(message, repeated, tag = "7")]
    absences: Vec<AbsenceMessage>,
    #[prost(uint32, tag = "8")]
    absent: u32,
    #[prost(uint64, optional, tag = "9")]
    first: Option<u64>,
}

#[derive(Message)]
struct CountedMessage {
    #[prost(string, tag = "1")]
    rollout: String,
    #[prost(uint32, tag = "2")]
    attempt: u32,
    /// All of its bits: a field of another kind would lose the sign of 0.
    #[prost(fixed64, tag = "3")]
    reward_bits: u64,
}

#[derive(Message)]
struct AbsenceMessage {
    #[prost(string, optional, tag = "1")]
    rollout: Option<String>,
    #[prost(uint32, tag = "2")]
    attempt: u32,
    #[prost(string, tag = "3")]
    reason: String,
}

impl RulesMessage {
    pub(super) fn of(rules: &GroupRules) -> Self {
        let GroupRules { estimator, drop_zero_variance, quorum, timeout_ms, has_group_units } = *rules;
        Self { estimator: estimator.code(), drop_zero_variance, quorum, timeout_ms, has_group_units }
    }

    pub(super) fn into_rules(self) -> Result<GroupRules, Fault> {
        let Self { estimator, drop_zero_variance, quorum, timeout_ms, has_group_units } = self;
        let estimator = coded("rules.estimator", estimator)?;
        Ok(GroupRules { estimator, drop_zero_variance, quorum, timeout_ms, has_group_units })
    }
}

impl GroupRulesMessage {
    pub(super) fn of(run: &RunId, group: &GroupId, rules: &GroupRules) -> Self {
        Self { run: run.to_string(), group: group.to_string(), rules: Some(RulesMessage::of(rules)) }
    }

    pub(super) fn into_record(self) -> Result<Record, Fault> {
        Ok(Record::GroupRules {
            run: identifier("run", &self.run, RunId::parse)?,
            group: identifier("group", &self.group, GroupId::parse)?,
            rules: present("rules", self.rules)?.into_rules()?,
        })
    }
}

impl GroupReleasedMessage {
    pub(super) fn of(run: &RunId, group: &GroupId, decided: &Decided, first: Option<Position>) -> Self {
        let Decided { rules, released_for, size, counted, absences, absent } = decided;
        let counted = counted.iter().map(|Counted { rollout, attempt, reward }| CountedMessage {
            rollout: rollout.to_string(),
            attempt: *attempt,
            reward_bits: reward.to_bits(),
        });
        let absences = absences.iter().map(|Absence { member, reason }| AbsenceMessage {
            rollout: member.as_ref().map(|(rollout, _)| rollout.to_string()),
            attempt: member.as_ref().map_or(0, |(_, attempt)| *attempt),
            reason: reason.clone(),
        });
        Self {
            run: run.to_string(),
            group: group.to_string(),
            rules: Some(RulesMessage::of(rules)),
            released_for: released_for.code(),
            size: *size,
            counted: counted.collect(),
            absences: absences.collect(),
            absent: *absent,
            first: first.map(|first| first.0),
        }
    }

    pub(super) fn into_record(self) -> Result<Record, Fault> {
        let counted = |CountedMessage { rollout, attempt, reward_bits }| -> Result<_, Fault> {
            let rollout = identifier("counted.rollout", &rollout, RolloutId::parse)?;
            Ok(Counted { rollout, attempt, reward: f64::from_bits(reward_bits) })
        };
        let absence = |AbsenceMessage { rollout, attempt, reason }| -> Result<_, Fault> {
            let rollout = optional_identifier("absences.rollout", rollout.as_deref(), RolloutId::parse)?;
            Ok(Absence { member: rollout.map(|rollout| (rollout, attempt)), reason })
        };
        let decided = Decided {
            rules: present("rules", self.rules)?.into_rules()?,
            released_for: coded("released_for", self.released_for)?,
            size: self.size,
            counted: self.counted.into_iter().map(counted).collect::<Result<_, _>>()?,
            absences: self.absences.into_iter().map(absence).collect::<Result<_, _>>()?,
            absent: self.absent,
        };
        Ok(Record::GroupReleased {
            run: identifier("run", &self.run, RunId::parse)?,
            group: identifier("group", &self.group, GroupId::parse)?,
            decided: Box::new(decided),
            first: self.first.map(Position),
        })
    }
}
