//! What is durable: records in one order, by which the whole state can be built again.
//!
//! A [`Log`] takes records and says through which [`Position`] they are durable. [`journal::Journal`] stands before it: it
//! gives positions, and hands the effects of records to the sequencing task in the order of those positions, once durable.
//! In this release the one implementation is [`memory::MemoryLog`]: what is answered is lost with the process.
//!
//! Owns: the order of records. Never does: know what a record means.

pub mod codec;
pub mod journal;
pub mod memory;
pub mod segments;

use std::sync::Arc;

use tokio::sync::watch;

use crate::ids::{ConsumerGroupId, GroupId, RolloutId, RunId};
use crate::queue::{DropReason, GroupDefinition, UnitId};
use crate::rollout::event::RolloutRecord;
use crate::rollout::run_settings::RunSettings;

/// The place of a record in the log; the first is 1.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Position(pub u64);

/// What is logged.
#[derive(Clone, Debug, PartialEq)]
pub enum Record {
    /// A run was made, or has new settings.
    Run {
        /// The run.
        run: RunId,
        /// 1 for the settings that it was made with.
        settings_version: u64,
        /// The settings.
        settings: Arc<RunSettings>,
    },
    /// A run was deleted with all that is in it.
    RunDeleted {
        /// The run.
        run: RunId,
    },
    /// A group's size was said.
    GroupSize {
        /// Its run.
        run: RunId,
        /// The group.
        group: GroupId,
        /// How many rollouts it has.
        size: u32,
    },
    /// A rollout, or a newer attempt of it, was opened.
    RolloutOpened {
        /// Its run.
        run: RunId,
        /// The rollout.
        rollout: RolloutId,
        /// The attempt.
        attempt: u32,
        /// Its group, if it is in one.
        group: Option<GroupId>,
        /// The settings that it keeps.
        settings_version: u64,
    },
    /// Something happened to a rollout.
    Rollout {
        /// Its run.
        run: RunId,
        /// The rollout.
        rollout: RolloutId,
        /// The attempt.
        attempt: u32,
        /// What happened.
        record: RolloutRecord,
    },
    /// A consumer group was made.
    ConsumerGroup {
        /// Its run.
        run: RunId,
        /// Its name.
        consumer_group: ConsumerGroupId,
        /// What its units are.
        definition: GroupDefinition,
        /// Whether it takes what was finalised before it.
        from_earliest: bool,
    },
    /// Units were acknowledged.
    Acknowledged {
        /// Their run.
        run: RunId,
        /// The consumer group.
        consumer_group: ConsumerGroupId,
        /// The units.
        units: Vec<UnitId>,
    },
    /// A unit was dropped.
    UnitDropped {
        /// Its run.
        run: RunId,
        /// The consumer group.
        consumer_group: ConsumerGroupId,
        /// The unit.
        unit: UnitId,
        /// Why.
        reason: DropReason,
    },
    /// An undeliverable unit was released by hand.
    UnitReleased {
        /// Its run.
        run: RunId,
        /// The consumer group.
        consumer_group: ConsumerGroupId,
        /// The unit.
        unit: UnitId,
    },
}

/// A record on its way to the log.
#[derive(Debug)]
pub enum Frame {
    /// The record, for a log that keeps it.
    Record(Box<Record>),
    /// Only its place counts.
    PlaceOnly,
}

/// Why a log cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum LogError {
    /// The records from there on are not kept.
    #[error("the log does not hold the records from position {} on", .0.0)]
    NotKept(Position),
}

/// Records in one order.
pub trait Log: Send + Sync {
    /// What [`Log::append`] needs of a record. Called before the record is applied.
    fn frame(&self, record: &Record) -> Frame;

    /// Takes a record. Never waits and never fails; room was given before.
    fn append(&self, frame: Frame) -> Position;

    /// The last position that is durable, and all that come.
    fn durable_through(&self) -> watch::Receiver<Position>;

    /// The records from this position on, in order.
    ///
    /// # Errors
    /// If they are not kept.
    fn read(&self, from: Position) -> Result<Vec<(Position, Record)>, LogError>;

    /// Forgets the records before this position.
    fn truncate_before(&self, position: Position);
}
