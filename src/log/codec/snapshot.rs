//! The records with which a log goes on without its beginning: snapshots of runs, and tombstones.

use prost::Message;

use crate::group::Member;
use crate::ids::{ConsumerGroupId, GroupId, RolloutId, RunId};
use crate::log::{EndedMember, EndedRollout, GroupSnapshot, Position, Record};

use super::Fault;
use super::codes::{Coded, coded};
use super::fields::{identifier, present};
use super::queue::GroupDefinitionMessage;
use super::run::RunMessage;

#[derive(Message)]
pub(super) struct SnapshotBeginsMessage {
    #[prost(uint32, tag = "1")]
    pub(super) runs: u32,
}

#[derive(Message)]
pub(super) struct RunSnapshotMessage {
    #[prost(message, optional, tag = "1")]
    run: Option<RunMessage>,
    #[prost(uint64, tag = "2")]
    created_unix_ms: u64,
    #[prost(message, repeated, tag = "3")]
    consumer_groups: Vec<ConsumerGroupSnapshotMessage>,
}

#[derive(Message)]
struct ConsumerGroupSnapshotMessage {
    #[prost(string, tag = "1")]
    consumer_group: String,
    #[prost(message, optional, tag = "2")]
    definition: Option<GroupDefinitionMessage>,
    #[prost(uint64, tag = "3")]
    made_at: u64,
    #[prost(uint64, tag = "4")]
    seek_count: u64,
    // Builds that do not know it have refused the definition that it comes from.
    #[prost(uint64, tag = "5")]
    next_step_index: u64,
}

#[derive(Message)]
pub(super) struct TombstonesMessage {
    #[prost(string, tag = "1")]
    run: String,
    #[prost(message, repeated, tag = "2")]
    rollouts: Vec<EndedRolloutMessage>,
}

#[derive(Message)]
struct EndedRolloutMessage {
    #[prost(string, tag = "1")]
    rollout: String,
    #[prost(uint32, tag = "2")]
    attempt: u32,
    #[prost(bool, tag = "3")]
    retired: bool,
    #[prost(string, tag = "4")]
    reason: String,
    #[prost(bool, tag = "5")]
    is_final: bool,
    #[prost(message, optional, tag = "6")]
    group: Option<EndedMemberMessage>,
}

#[derive(Message)]
struct EndedMemberMessage {
    #[prost(string, tag = "1")]
    group: String,
    #[prost(uint32, optional, tag = "2")]
    size: Option<u32>,
    #[prost(uint32, tag = "3")]
    member: u32,
}

impl RunSnapshotMessage {
    pub(super) fn of(run: RunMessage, created_unix_ms: u64, consumer_groups: &[GroupSnapshot]) -> Self {
        let message = |group: &GroupSnapshot| ConsumerGroupSnapshotMessage {
            consumer_group: group.consumer_group.to_string(),
            definition: Some(GroupDefinitionMessage::of(&group.definition)),
            made_at: group.made_at.0,
            seek_count: group.seek_count,
            next_step_index: group.next_step_index,
        };
        Self { run: Some(run), created_unix_ms, consumer_groups: consumer_groups.iter().map(message).collect() }
    }

    pub(super) fn into_record(self) -> Result<Record, Fault> {
        let (run, settings_version, settings) = present("run", self.run)?.into_parts()?;
        let consumer_group = |message: ConsumerGroupSnapshotMessage| {
            Ok(GroupSnapshot {
                consumer_group: identifier("consumer_group", &message.consumer_group, ConsumerGroupId::parse)?,
                definition: present("definition", message.definition)?.into_definition()?,
                made_at: Position(message.made_at),
                seek_count: message.seek_count,
                next_step_index: message.next_step_index,
            })
        };
        let consumer_groups = self.consumer_groups.into_iter().map(consumer_group).collect::<Result<_, Fault>>()?;
        let created_unix_ms = self.created_unix_ms;
        Ok(Record::RunSnapshot { run, settings_version, settings, created_unix_ms, consumer_groups })
    }
}

impl TombstonesMessage {
    pub(super) fn of(run: &RunId, rollouts: &[EndedRollout]) -> Self {
        Self { run: run.to_string(), rollouts: rollouts.iter().map(EndedRolloutMessage::of).collect() }
    }

    pub(super) fn into_record(self) -> Result<Record, Fault> {
        Ok(Record::Tombstones {
            run: identifier("run", &self.run, RunId::parse)?,
            rollouts: self.rollouts.into_iter().map(EndedRolloutMessage::into_rollout).collect::<Result<_, _>>()?,
        })
    }
}

impl EndedRolloutMessage {
    fn of(ended: &EndedRollout) -> Self {
        let EndedRollout { rollout, attempt, retired, reason, is_final, group } = ended;
        Self {
            rollout: rollout.to_string(),
            attempt: *attempt,
            retired: *retired,
            reason: reason.clone(),
            is_final: *is_final,
            group: group.as_ref().map(|EndedMember { group, size, member }| EndedMemberMessage {
                group: group.to_string(),
                size: *size,
                member: member.code(),
            }),
        }
    }

    fn into_rollout(self) -> Result<EndedRollout, Fault> {
        let member = |message: EndedMemberMessage| -> Result<_, Fault> {
            Ok(EndedMember {
                group: identifier("group", &message.group, GroupId::parse)?,
                size: message.size,
                member: coded::<Member>("member", message.member)?,
            })
        };
        Ok(EndedRollout {
            rollout: identifier("rollout", &self.rollout, RolloutId::parse)?,
            attempt: self.attempt,
            retired: self.retired,
            reason: self.reason,
            is_final: self.is_final,
            group: self.group.map(member).transpose()?,
        })
    }
}
