//! What is durable: records in one order, by which the whole state can be built again.
//!
//! A [`Log`] takes records and says through which [`Position`] they are durable. [`journal::Journal`] stands before it: it
//! gives positions, and hands the effects of records to the sequencing task in the order of those positions, once durable.
//! [`disk::DiskLog`] keeps them in files; with [`memory::MemoryLog`] what is answered is lost with the process.
//!
//! Owns: the order of records. Never does: know what a record means.

mod ahead;
pub mod codec;
pub mod disk;
pub mod journal;
pub mod memory;
pub mod segments;
pub mod totals;

use std::ops::ControlFlow;
use std::sync::Arc;

use bytes::Bytes;
use tokio::sync::watch;

use crate::group::{Decided, GroupRules, Member};
use crate::ids::{ConsumerGroupId, GroupId, RolloutId, RolloutRef, RunId};
use crate::queue::{DropReason, FrozenStep, GroupDefinition, UnitId};
use crate::rollout::event::RolloutRecord;
use crate::rollout::run_settings::RunSettings;
use crate::rollout::settings::RolloutSettings;

use totals::RunTotals;

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
        /// The group's size, if it was known by then: what said it may not be in the log any more.
        group_size: Option<u32>,
        /// What is decided about the group, if it is to be released: by the settings when its first rollout was opened.
        group_rules: Option<GroupRules>,
    },
    /// What is decided about a group that is to be released, once more: what said it may not be in the log any more. Stands before
    /// a rollout of the group, or a tombstone.
    GroupRules {
        /// Its run.
        run: RunId,
        /// The group.
        group: GroupId,
        /// The rules.
        rules: GroupRules,
    },
    /// A group was released, or dropped: that follows from who is counted. Stands again before what is written anew of its
    /// rollouts.
    GroupReleased {
        /// Its run.
        run: RunId,
        /// The group.
        group: GroupId,
        /// What was decided.
        decided: Box<Decided>,
        /// Where the first record of the release stood, if this is another: what runs had counted after that counts it.
        first: Option<Position>,
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
    /// Finalised rollouts are not kept any longer, though no acknowledgement comes just then.
    RolloutsRetired {
        /// Their run.
        run: RunId,
        /// Which, each with its attempt. One that a consumer group holds by then stays.
        rollouts: Vec<(RolloutId, u32)>,
        /// Why.
        reason: RetiredFor,
    },
    /// A consumer group is not there any more, for nobody has subscribed for so long.
    ConsumerGroupExpired {
        /// Its run.
        run: RunId,
        /// Its name.
        consumer_group: ConsumerGroupId,
    },
    /// Units of a consumer group were frozen as a step. Stands again before what is written anew of their rollouts.
    StepFrozen {
        /// Their run.
        run: RunId,
        /// The consumer group.
        consumer_group: ConsumerGroupId,
        /// The step.
        step: Box<FrozenStep>,
    },
    /// A consumer group went back: what it had acknowledged at a position is acknowledged, and nothing else.
    Sought {
        /// Its run.
        run: RunId,
        /// Its name.
        consumer_group: ConsumerGroupId,
        /// The position.
        to: Position,
    },
    /// From here on the log can be read without what stands before: so many [`Record::RunSnapshot`] follow, with nothing else of
    /// the sequencing task between them.
    SnapshotBegins {
        /// How many runs there are.
        runs: u32,
    },
    /// A run as it is.
    RunSnapshot {
        /// The run.
        run: RunId,
        /// Which settings these are, from 1.
        settings_version: u64,
        /// The settings.
        settings: Arc<RunSettings>,
        /// When it was made, milliseconds since the Unix epoch.
        created_unix_ms: u64,
        /// Its consumer groups.
        consumer_groups: Vec<GroupSnapshot>,
    },
    /// What a run had counted at the end of the last snapshot.
    RunTotals {
        /// The run.
        run: RunId,
        /// What it had counted.
        totals: RunTotals,
    },
    /// A copy of a rollout begins, with all that is known of its opening: so many [`Record::RolloutCopied`] follow, with nothing
    /// else of the rollout between them. What the log held of it before is not needed any more when the last has come.
    RolloutCopyBegins(Box<CopyBegins>),
    /// Something that happened to a rollout, once more.
    RolloutCopied {
        /// Its run.
        run: RunId,
        /// The rollout.
        rollout: RolloutId,
        /// The attempt.
        attempt: u32,
        /// What happened.
        record: RolloutRecord,
    },
    /// Rollouts that have ended, written again because what said so is let go of.
    Tombstones {
        /// Their run.
        run: RunId,
        /// Each with its latest attempt.
        rollouts: Vec<EndedRollout>,
    },
}

/// Why a finalised rollout is not kept any longer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RetiredFor {
    /// Its rows were acknowledged so long ago as its run keeps them.
    Retention,
    /// Its rows were acknowledged, and what they take was needed.
    Room,
    /// No consumer group was given its rows for as long, or as much, as its run keeps them.
    Unclaimed,
    /// Its group was released before it was finalised. Never in a record of its own.
    Late,
    /// Its group was dropped. Never in a record of its own.
    GroupDropped,
}

impl RetiredFor {
    /// The reason in a word.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Retention | Self::Room => "acknowledged",
            Self::Unclaimed => "unclaimed",
            Self::Late => "late",
            Self::GroupDropped => "group_dropped",
        }
    }
}

/// A consumer group as it is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GroupSnapshot {
    /// Its name.
    pub consumer_group: ConsumerGroupId,
    /// What its units are.
    pub definition: GroupDefinition,
    /// Where it was made.
    pub made_at: Position,
    /// How often it was sought.
    pub seek_count: u64,
    /// How many steps of it were frozen.
    pub next_step_index: u64,
}

/// What is known of a rollout's opening where a copy of it begins.
#[derive(Clone, Debug, PartialEq)]
pub struct CopyBegins {
    /// The rollout and its attempt, with the group that it was opened in, if it was.
    pub reference: RolloutRef,
    /// Which settings it keeps.
    pub settings_version: u64,
    /// What of them is a rollout's.
    pub settings: Arc<RolloutSettings>,
    /// When it was opened, milliseconds since the Unix epoch.
    pub opened_unix_ms: u64,
    /// How many records follow.
    pub records: u32,
    /// The consumer groups that have it, if it is finalised.
    pub given_to: Vec<CopiedUnits>,
    /// Where the record that finalised it stood first, if it is: what runs had counted after that counts it.
    pub finalised: Option<Position>,
}

/// What a consumer group has settled of a rollout.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CopiedUnits {
    /// Its name.
    pub consumer_group: ConsumerGroupId,
    /// Units that are acknowledged.
    pub acknowledged: Vec<UnitId>,
    /// Units that were dropped, and why.
    pub dropped: Vec<(UnitId, DropReason)>,
    /// When units were acknowledged that ever were: at which positions that began and ended, in turn.
    pub histories: Vec<(UnitId, Vec<u64>)>,
}

/// A rollout that has ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EndedRollout {
    /// The rollout.
    pub rollout: RolloutId,
    /// Its last attempt.
    pub attempt: u32,
    /// Whether its rows were acknowledged; else it was discarded.
    pub retired: bool,
    /// Why it ended.
    pub reason: String,
    /// No other attempt is taken.
    pub is_final: bool,
    /// Its place in its group, if it was in one.
    pub group: Option<EndedMember>,
}

/// The place in its group of a rollout that has ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EndedMember {
    /// The group.
    pub group: GroupId,
    /// The group's size, if it is known.
    pub size: Option<u32>,
    /// Where the rollout stands in it.
    pub member: Member,
}

/// A record with the calendar's time at which it was applied: what is made of it carries that time, after a restart too.
#[derive(Clone, Debug, PartialEq)]
pub struct Dated {
    /// Milliseconds since the Unix epoch.
    pub unix_ms: u64,
    /// The record.
    pub record: Record,
}

/// A record on its way to the log.
#[derive(Debug)]
pub enum Frame {
    /// The record, for a log that keeps it in memory.
    Record(Box<Dated>),
    /// Its bytes, for a log on disk.
    Bytes {
        /// What kind of record it is.
        kind: u8,
        /// The record.
        payload: Bytes,
    },
    /// Only its place counts.
    PlaceOnly,
}

/// Why a log cannot be opened or read.
#[derive(Debug, thiserror::Error)]
pub enum LogError {
    /// The records from there on are not kept.
    #[error("the log does not hold the records from position {} on", .0.0)]
    NotKept(Position),
    /// Its files.
    #[error(transparent)]
    Segments(#[from] segments::SegmentError),
    /// A frame cannot be read back.
    #[error(transparent)]
    Read(#[from] segments::ReadError),
    /// A frame holds no record that this build can read.
    #[error("position {}: {error}", position.0)]
    Record {
        /// The frame.
        position: Position,
        /// What is wrong with it.
        error: codec::CodecError,
    },
    /// It begins in the middle, and nothing in it says what there was before.
    #[error("the log begins at position {} and holds no snapshot from which it could be read", .0.0)]
    NoSnapshot(Position),
    /// While it was read, tokens had to leave memory, and did not come back.
    #[error("{}", .0.message)]
    NotRestored(crate::error::Refusal),
    /// The thread that read it is gone.
    #[error("reading the log was given up")]
    GivenUp,
}

/// Takes records in order, as they are read.
pub type Visit<'a> = dyn FnMut(Position, Dated) + 'a;

/// The same, on another thread than that which reads.
pub type VisitAside<'a> = dyn FnMut(Position, Dated) + Send + 'a;

/// The same, and says whether to go on.
pub type Look<'a> = dyn FnMut(Position, Dated) -> ControlFlow<()> + 'a;

/// Records in one order.
pub trait Log: Send + Sync {
    /// What [`Log::append`] needs of a record. Called before the record is applied.
    fn frame(&self, record: &Record, unix_ms: u64) -> Frame;

    /// Takes a record. Never waits and never fails; room was given before.
    fn append(&self, frame: Frame) -> Position;

    /// The last position that is durable, and all that come.
    fn durable_through(&self) -> watch::Receiver<Position>;

    /// The first record that is kept, or would be.
    fn first_position(&self) -> Position {
        Position(1)
    }

    /// Shows the durable records from this position on, in order, until no more are wanted.
    ///
    /// # Errors
    /// If they are not kept, or cannot be read.
    fn read(&self, from: Position, look: &mut Look<'_>) -> Result<(), LogError>;

    /// Shows the durable records at these positions, which are in order.
    ///
    /// # Errors
    /// If one is not kept, or cannot be read.
    fn read_at(&self, positions: &[Position], visit: &mut Visit<'_>) -> Result<(), LogError>;

    /// Whether what was appended can be read again.
    fn keeps_records(&self) -> bool;

    /// Forgets the records before this position.
    fn truncate_before(&self, position: Position);

    /// The number of the newest segment, and of each that begins: then a snapshot is due. None if records take no room.
    fn segment_begun(&self) -> Option<watch::Receiver<u64>> {
        None
    }

    /// Whether [`Log::truncate_before`] this position would give room back.
    fn holds_room_before(&self, _position: Position) -> bool {
        false
    }

    /// Whether so much of what the log may take is used that what holds it should be written forward.
    fn is_filling(&self) -> bool {
        false
    }

    /// How much of what memory held must have been given back until it is worth to write forward once more all that lives.
    fn worth_carrying_bytes(&self) -> u64 {
        0
    }

    /// Bytes of records that are not durable yet; above [`crate::limits::LOG_QUEUED_BYTES_MAX`] nothing new is taken in.
    fn queued_bytes(&self) -> u64 {
        0
    }

    /// Changes whenever there may be more room, or none to wait for. None: there is always room.
    fn room_changes(&self) -> Option<watch::Receiver<u64>> {
        None
    }

    /// Whether it is of no use to wait for room.
    fn is_full(&self) -> bool {
        false
    }

    /// Whether there is room for more than what ends rollouts.
    fn has_room(&self) -> bool {
        true
    }

    /// Whether so many bytes may be written to give room back, which leave enough for what ends rollouts.
    fn has_room_for(&self, _bytes: u64) -> bool {
        true
    }

    /// Makes everything durable and lets go of what the log is kept in; waits for the disk. Why it has failed, if it has.
    ///
    /// # Errors
    /// If not everything is durable, and never will be.
    fn close(&self) -> Result<(), segments::Failure> {
        Ok(())
    }
}
