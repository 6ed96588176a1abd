//! The record with which a copy of a rollout begins.

use std::sync::Arc;

use prost::Message;

use crate::ids::{ConsumerGroupId, GroupId, RolloutId, RolloutRef, RunId};
use crate::log::{CopiedUnits, CopyBegins, Position, Record};
use crate::queue::{DropReason, UnitId};

use super::Fault;
use super::codes::{Coded, coded};
use super::fields::{identifier, optional_identifier, present};
use super::run::RolloutSettingsMessage;

#[derive(Message)]
pub(super) struct CopyBeginsMessage {
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
    #[prost(message, optional, tag = "6")]
    settings: Option<RolloutSettingsMessage>,
    #[prost(uint64, tag = "7")]
    opened_unix_ms: u64,
    #[prost(uint32, tag = "8")]
    records: u32,
    #[prost(message, repeated, tag = "9")]
    given_to: Vec<CopiedUnitsMessage>,
    #[prost(uint64, optional, tag = "10")]
    finalised: Option<u64>,
    /// Instead of `settings`, where they say what a build that does not know it must not pass over.
    #[prost(message, optional, tag = "11")]
    later_settings: Option<RolloutSettingsMessage>,
}

#[derive(Message)]
struct CopiedUnitsMessage {
    #[prost(string, tag = "1")]
    consumer_group: String,
    #[prost(string, repeated, tag = "2")]
    acknowledged: Vec<String>,
    #[prost(message, repeated, tag = "3")]
    dropped: Vec<DroppedUnitMessage>,
    #[prost(message, repeated, tag = "4")]
    histories: Vec<UnitHistoryMessage>,
}

/// When a unit was acknowledged: where that began and ended, in turn.
#[derive(Message)]
struct UnitHistoryMessage {
    #[prost(string, tag = "1")]
    unit: String,
    #[prost(uint64, repeated, tag = "2")]
    moments: Vec<u64>,
}

#[derive(Message)]
struct DroppedUnitMessage {
    #[prost(string, tag = "1")]
    unit: String,
    #[prost(uint32, tag = "2")]
    reason: u32,
}

impl CopyBeginsMessage {
    pub(super) fn of(begins: &CopyBegins) -> Self {
        let CopyBegins { reference, settings_version, settings, opened_unix_ms, records, given_to, finalised } = begins;
        let (settings, later_settings) = RolloutSettingsMessage::by_age(settings);
        Self {
            run: reference.run.to_string(),
            rollout: reference.rollout.to_string(),
            attempt: reference.attempt,
            group: reference.group.as_ref().map(GroupId::to_string),
            settings_version: *settings_version,
            settings,
            later_settings,
            opened_unix_ms: *opened_unix_ms,
            records: *records,
            given_to: given_to.iter().map(CopiedUnitsMessage::of).collect(),
            finalised: finalised.map(|position| position.0),
        }
    }

    pub(super) fn into_record(self) -> Result<Record, Fault> {
        let reference = RolloutRef {
            run: identifier("run", &self.run, RunId::parse)?,
            rollout: identifier("rollout", &self.rollout, RolloutId::parse)?,
            attempt: self.attempt,
            group: optional_identifier("group", self.group.as_deref(), GroupId::parse)?,
        };
        Ok(Record::RolloutCopyBegins(Box::new(CopyBegins {
            reference,
            settings_version: self.settings_version,
            settings: Arc::new(present("settings", self.settings.or(self.later_settings))?.into_settings()?),
            opened_unix_ms: self.opened_unix_ms,
            records: self.records,
            given_to: self.given_to.into_iter().map(CopiedUnitsMessage::into_units).collect::<Result<_, _>>()?,
            finalised: self.finalised.map(Position),
        })))
    }
}

impl CopiedUnitsMessage {
    fn of(units: &CopiedUnits) -> Self {
        let dropped = |(unit, reason): &(UnitId, DropReason)| DroppedUnitMessage {
            unit: unit.to_string(),
            reason: reason.code(),
        };
        let history = |(unit, moments): &(UnitId, Vec<u64>)| UnitHistoryMessage {
            unit: unit.to_string(),
            moments: moments.clone(),
        };
        Self {
            consumer_group: units.consumer_group.to_string(),
            acknowledged: units.acknowledged.iter().map(UnitId::to_string).collect(),
            dropped: units.dropped.iter().map(dropped).collect(),
            histories: units.histories.iter().map(history).collect(),
        }
    }

    fn into_units(self) -> Result<CopiedUnits, Fault> {
        let dropped = |message: DroppedUnitMessage| -> Result<_, Fault> {
            Ok((UnitId::new(message.unit), coded("given_to.dropped.reason", message.reason)?))
        };
        let history = |message: UnitHistoryMessage| (UnitId::new(message.unit), message.moments);
        Ok(CopiedUnits {
            consumer_group: identifier("given_to.consumer_group", &self.consumer_group, ConsumerGroupId::parse)?,
            acknowledged: self.acknowledged.into_iter().map(UnitId::new).collect(),
            dropped: self.dropped.into_iter().map(dropped).collect::<Result<_, _>>()?,
            histories: self.histories.into_iter().map(history).collect(),
        })
    }
}
