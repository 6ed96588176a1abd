//! Records as bytes: what stands in the frames of a durable log.
//!
//! A payload is one protobuf message with one field, whose tag is the frame's kind, and in it the record. The messages are
//! private to this module and written as Rust structs; nobody but this service reads or writes them. All of them are
//! enclosed in that one field with its length, so that a payload which is cut anywhere is an error, between two fields too.
//!
//! How it grows: a new field gets a tag that its message never had, and its absence must mean what records meant before there
//! was such a field; a build that does not know it passes over it. A tag, a code of an enum and a kind are never used again for
//! anything else, and a field's type never changes. What an older build must not pass over gets a new kind, a new form of a
//! `oneof` or a new code: those it refuses, and says that a newer version wrote them. Codes begin at 1, so that an absent one
//! is an error and not the first. `tests/frozen.rs` holds bytes of version 1; they are read for ever.
//!
//! Tokens and log-probabilities are little-endian arrays, bit for bit ([`numbers`]), copied once in each direction. Floating
//! point numbers of all kinds keep their bits.
//!
//! Never does: know what a record means, check a limit of today (but an identifier's, which its type promises), or panic
//! whatever the bytes are. Bytes that have been changed are for the frame's checksum to find.

mod call;
mod codes;
mod copy;
mod fields;
mod group;
mod numbers;
mod queue;
mod rollout;
mod run;
mod snapshot;
mod step;
#[cfg(test)]
#[expect(clippy::unwrap_used, reason = "a test fails by panicking")]
mod tests;
mod totals;

use std::ops::RangeInclusive;

use prost::{Message, Oneof};

use crate::ids::{GroupId, IdentifierError, RolloutId, RunId};

use super::Record;
use fields::{identifier, optional_identifier, present};

/// The kinds of frames that are records, today's and those to come. The log may use all others for frames of its own.
pub const RECORD_KINDS: RangeInclusive<u8> = 1..=63;

/// Why a payload is not a record.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a record of kind {kind} cannot be read: {fault}")]
pub struct CodecError {
    /// The frame's kind.
    pub kind: u8,
    /// What is wrong with it.
    pub fault: Fault,
}

/// What is wrong with a payload.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Fault {
    /// No kind of this version.
    #[error("no record of this version has that kind; a newer version wrote it")]
    UnknownKind,
    /// It is not the message that its kind says. Names the field, where there is one.
    #[error(transparent)]
    Malformed(#[from] prost::DecodeError),
    /// An enum's code that this version does not know.
    #[error("{field} is {code}, which this version does not know; a newer version wrote it")]
    UnknownCode {
        /// The field.
        field: &'static str,
        /// Its code.
        code: u32,
    },
    /// A field is absent, or a form of it that this version does not know stands there.
    #[error("{0} is missing, or of a form that a newer version wrote")]
    Missing(&'static str),
    /// A text is no identifier.
    #[error("{field} {why}")]
    Identifier {
        /// The field.
        field: &'static str,
        /// Which rule it breaks.
        why: IdentifierError,
    },
    /// An array has a length that it cannot have.
    #[error("{field} has {bytes} bytes, which is not a whole number of its values")]
    Length {
        /// The field.
        field: &'static str,
        /// How long it is.
        bytes: usize,
    },
    /// A key stands twice in a map.
    #[error("{0} has the same key twice")]
    Repeated(&'static str),
    /// A field is there that does not go with the others.
    #[error("{0} does not go with the rest of the record")]
    Contradiction(&'static str),
}

/// A record that is ready to be written: its tokens are still those of the record, and its length is known.
#[derive(Debug)]
pub struct Encoding<'a> {
    kind: u8,
    length: usize,
    message: RecordMessage<'a>,
}

impl<'a> Encoding<'a> {
    /// How this record is written.
    #[must_use]
    pub fn of(record: &'a Record) -> Self {
        let (kind, form) = form_of(record);
        let message = RecordMessage { record: Some(form) };
        Self { kind, length: message.encoded_len(), message }
    }

    /// The frame's kind.
    #[must_use]
    pub fn kind(&self) -> u8 {
        self.kind
    }

    /// How many bytes the payload has.
    #[must_use]
    pub fn length_bytes(&self) -> usize {
        self.length
    }

    /// Appends the payload.
    pub fn write_to(&self, buffer: &mut Vec<u8>) {
        buffer.reserve(self.length);
        // A vector always has room.
        self.message.encode_raw(buffer);
    }
}

/// The kind and the payload of a record.
#[must_use]
pub fn encode(record: &Record) -> (u8, Vec<u8>) {
    let encoding = Encoding::of(record);
    let mut payload = Vec::new();
    encoding.write_to(&mut payload);
    (encoding.kind, payload)
}

/// The record that this payload of a frame of this kind is.
///
/// # Errors
/// If it is none; says why, and in which field.
pub fn decode(kind: u8, payload: &[u8]) -> Result<Record, CodecError> {
    record_of(kind, payload).map_err(|fault| CodecError { kind, fault })
}

/// The payload of every kind.
#[derive(Message)]
struct RecordMessage<'a> {
    #[prost(oneof = "Form", tags = "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21")]
    record: Option<Form<'a>>,
}

/// The kinds of records, by their tags. A new one is listed in `RecordMessage` too.
#[derive(Oneof)]
enum Form<'a> {
    #[prost(message, tag = "1")]
    Run(Box<run::RunMessage>),
    #[prost(message, tag = "2")]
    RunDeleted(RunDeletedMessage),
    #[prost(message, tag = "3")]
    GroupSize(GroupSizeMessage),
    #[prost(message, tag = "4")]
    RolloutOpened(RolloutOpenedMessage),
    #[prost(message, tag = "5")]
    Rollout(rollout::RolloutMessage<'a>),
    #[prost(message, tag = "6")]
    ConsumerGroup(queue::ConsumerGroupMessage),
    #[prost(message, tag = "7")]
    Acknowledged(queue::AcknowledgedMessage),
    #[prost(message, tag = "8")]
    UnitDropped(queue::UnitDroppedMessage),
    #[prost(message, tag = "9")]
    UnitReleased(queue::UnitReleasedMessage),
    #[prost(message, tag = "10")]
    SnapshotBegins(snapshot::SnapshotBeginsMessage),
    #[prost(message, tag = "11")]
    RunSnapshot(Box<snapshot::RunSnapshotMessage>),
    #[prost(message, tag = "12")]
    Tombstones(snapshot::TombstonesMessage),
    #[prost(message, tag = "13")]
    RolloutCopyBegins(Box<copy::CopyBeginsMessage>),
    #[prost(message, tag = "14")]
    RolloutCopied(rollout::RolloutMessage<'a>),
    #[prost(message, tag = "15")]
    RunTotals(totals::RunTotalsMessage),
    #[prost(message, tag = "16")]
    RolloutsRetired(queue::RolloutsRetiredMessage),
    #[prost(message, tag = "17")]
    ConsumerGroupExpired(queue::ConsumerGroupExpiredMessage),
    #[prost(message, tag = "18")]
    Sought(queue::SoughtMessage),
    #[prost(message, tag = "19")]
    GroupRules(group::GroupRulesMessage),
    #[prost(message, tag = "20")]
    GroupReleased(Box<group::GroupReleasedMessage>),
    #[prost(message, tag = "21")]
    StepFrozen(step::StepFrozenMessage),
}

impl Form<'_> {
    /// The kind of frame, which is the tag above.
    fn kind(&self) -> u8 {
        match self {
            Self::Run(_) => 1,
            Self::RunDeleted(_) => 2,
            Self::GroupSize(_) => 3,
            Self::RolloutOpened(_) => 4,
            Self::Rollout(_) => 5,
            Self::ConsumerGroup(_) => 6,
            Self::Acknowledged(_) => 7,
            Self::UnitDropped(_) => 8,
            Self::UnitReleased(_) => 9,
            Self::SnapshotBegins(_) => 10,
            Self::RunSnapshot(_) => 11,
            Self::Tombstones(_) => 12,
            Self::RolloutCopyBegins(_) => 13,
            Self::RolloutCopied(_) => 14,
            Self::RunTotals(_) => 15,
            Self::RolloutsRetired(_) => 16,
            Self::ConsumerGroupExpired(_) => 17,
            Self::Sought(_) => 18,
            Self::GroupRules(_) => 19,
            Self::GroupReleased(_) => 20,
            Self::StepFrozen(_) => 21,
        }
    }
}

const LAST_KIND: u8 = 21;

#[derive(Message)]
struct RunDeletedMessage {
    #[prost(string, tag = "1")]
    run: String,
}

#[derive(Message)]
struct GroupSizeMessage {
    #[prost(string, tag = "1")]
    run: String,
    #[prost(string, tag = "2")]
    group: String,
    #[prost(uint32, tag = "3")]
    size: u32,
}

#[derive(Message)]
struct RolloutOpenedMessage {
    #[prost(string, tag = "1")]
    run: String,
    #[prost(string, tag = "2")]
    rollout: String,
    #[prost(uint32, tag = "3")]
    attempt: u32,
    #[prost(string, optional, tag = "4")]
    group: Option<String>,
    #[prost(uint64, tag = "5")]
    settings_version: u64,
    #[prost(uint32, optional, tag = "6")]
    group_size: Option<u32>,
    // Builds that do not know it have refused the settings that it comes from.
    #[prost(message, optional, tag = "7")]
    group_rules: Option<group::RulesMessage>,
}

fn form_of(record: &Record) -> (u8, Form<'_>) {
    let form = match record {
        Record::Run { run, settings_version, settings } => {
            Form::Run(Box::new(run::RunMessage::of(run, *settings_version, settings)))
        }
        Record::RunDeleted { run } => Form::RunDeleted(RunDeletedMessage { run: run.to_string() }),
        Record::GroupSize { run, group, size } => {
            Form::GroupSize(GroupSizeMessage { run: run.to_string(), group: group.to_string(), size: *size })
        }
        Record::RolloutOpened { run, rollout, attempt, group, settings_version, group_size, group_rules } => {
            Form::RolloutOpened(RolloutOpenedMessage {
                run: run.to_string(),
                rollout: rollout.to_string(),
                attempt: *attempt,
                group: group.as_ref().map(GroupId::to_string),
                settings_version: *settings_version,
                group_size: *group_size,
                group_rules: group_rules.as_ref().map(group::RulesMessage::of),
            })
        }
        Record::GroupRules { run, group, rules } => Form::GroupRules(group::GroupRulesMessage::of(run, group, rules)),
        Record::GroupReleased { run, group, decided, first } => {
            Form::GroupReleased(Box::new(group::GroupReleasedMessage::of(run, group, decided, *first)))
        }
        Record::Rollout { run, rollout, attempt, record } => {
            Form::Rollout(rollout::RolloutMessage::of(run, rollout, *attempt, record))
        }
        Record::RunTotals { run, totals } => Form::RunTotals(totals::RunTotalsMessage::of(run, totals)),
        Record::RolloutCopied { run, rollout, attempt, record } => {
            Form::RolloutCopied(rollout::RolloutMessage::of(run, rollout, *attempt, record))
        }
        Record::RolloutCopyBegins(begins) => Form::RolloutCopyBegins(Box::new(copy::CopyBeginsMessage::of(begins))),
        Record::ConsumerGroup { run, consumer_group, definition, from_earliest } => {
            Form::ConsumerGroup(queue::ConsumerGroupMessage::of(run, consumer_group, definition, *from_earliest))
        }
        Record::Acknowledged { run, consumer_group, units } => {
            Form::Acknowledged(queue::AcknowledgedMessage::of(run, consumer_group, units))
        }
        Record::UnitDropped { run, consumer_group, unit, reason } => {
            Form::UnitDropped(queue::UnitDroppedMessage::of(run, consumer_group, unit, *reason))
        }
        Record::UnitReleased { run, consumer_group, unit } => {
            Form::UnitReleased(queue::UnitReleasedMessage::of(run, consumer_group, unit))
        }
        Record::RolloutsRetired { run, rollouts, reason } => {
            Form::RolloutsRetired(queue::RolloutsRetiredMessage::of(run, rollouts, *reason))
        }
        Record::ConsumerGroupExpired { run, consumer_group } => {
            Form::ConsumerGroupExpired(queue::ConsumerGroupExpiredMessage::of(run, consumer_group))
        }
        Record::Sought { run, consumer_group, to } => Form::Sought(queue::SoughtMessage::of(run, consumer_group, *to)),
        Record::StepFrozen { run, consumer_group, step } => {
            Form::StepFrozen(step::StepFrozenMessage::of(run, consumer_group, step))
        }
        Record::SnapshotBegins { runs } => Form::SnapshotBegins(snapshot::SnapshotBeginsMessage { runs: *runs }),
        Record::RunSnapshot { run, settings_version, settings, created_unix_ms, consumer_groups } => {
            let run = run::RunMessage::of(run, *settings_version, settings);
            Form::RunSnapshot(Box::new(snapshot::RunSnapshotMessage::of(run, *created_unix_ms, consumer_groups)))
        }
        Record::Tombstones { run, rollouts } => Form::Tombstones(snapshot::TombstonesMessage::of(run, rollouts)),
    };
    (form.kind(), form)
}

fn record_of(kind: u8, payload: &[u8]) -> Result<Record, Fault> {
    if !(1..=LAST_KIND).contains(&kind) {
        return Err(Fault::UnknownKind);
    }
    let form = present("record", RecordMessage::decode(payload)?.record)?;
    if form.kind() != kind {
        return Err(Fault::Contradiction("the frame's kind"));
    }
    match form {
        Form::Run(message) => message.into_record(),
        Form::RunDeleted(message) => Ok(Record::RunDeleted { run: identifier("run", &message.run, RunId::parse)? }),
        Form::GroupSize(message) => Ok(Record::GroupSize {
            run: identifier("run", &message.run, RunId::parse)?,
            group: identifier("group", &message.group, GroupId::parse)?,
            size: message.size,
        }),
        Form::RolloutOpened(message) => Ok(Record::RolloutOpened {
            run: identifier("run", &message.run, RunId::parse)?,
            rollout: identifier("rollout", &message.rollout, RolloutId::parse)?,
            attempt: message.attempt,
            group: optional_identifier("group", message.group.as_deref(), GroupId::parse)?,
            settings_version: message.settings_version,
            group_size: message.group_size,
            group_rules: message.group_rules.map(group::RulesMessage::into_rules).transpose()?,
        }),
        Form::GroupRules(message) => message.into_record(),
        Form::GroupReleased(message) => message.into_record(),
        Form::StepFrozen(message) => message.into_record(),
        Form::Rollout(message) => {
            let (run, rollout, attempt, record) = message.into_parts()?;
            Ok(Record::Rollout { run, rollout, attempt, record })
        }
        Form::RolloutCopied(message) => {
            let (run, rollout, attempt, record) = message.into_parts()?;
            Ok(Record::RolloutCopied { run, rollout, attempt, record })
        }
        Form::RolloutCopyBegins(message) => message.into_record(),
        Form::RunTotals(message) => message.into_record(),
        Form::ConsumerGroup(message) => message.into_record(),
        Form::Acknowledged(message) => message.into_record(),
        Form::UnitDropped(message) => message.into_record(),
        Form::UnitReleased(message) => message.into_record(),
        Form::RolloutsRetired(message) => message.into_record(),
        Form::ConsumerGroupExpired(message) => message.into_record(),
        Form::Sought(message) => message.into_record(),
        Form::SnapshotBegins(message) => Ok(Record::SnapshotBegins { runs: message.runs }),
        Form::RunSnapshot(message) => message.into_record(),
        Form::Tombstones(message) => message.into_record(),
    }
}
