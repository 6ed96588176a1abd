//! What a log says of itself.

use std::sync::Arc;

use crate::log::Position;

/// What was found when a log was opened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Recovered {
    /// The oldest position that is wanted.
    pub first_position: Position,
    /// The position that the next frame gets.
    pub next_position: Position,
    /// How often it was opened, and which epoch its frames are of.
    pub epoch: u32,
    /// The torn end that was cut.
    pub cut: Option<Cut>,
    /// What a salvage gave up.
    pub dropped: Vec<Dropped>,
}

/// A torn end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cut {
    /// The segment.
    pub file: String,
    /// Where it was cut.
    pub offset_bytes: u64,
    /// The first position that was cut.
    pub position: Position,
    /// What was overwritten, in pieces of 64 KiB.
    pub bytes: u64,
    /// Frames behind the first unreadable byte whose headers could be read. With [`super::Durability::Fsync`] there are
    /// at most those of the batch that was under way.
    pub whole_frames: u64,
}

/// What a salvage gave up.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Dropped {
    /// The segment where it begins.
    pub file: String,
    /// Where in it.
    pub offset_bytes: u64,
    /// The first position that is lost, if it is known.
    pub from: Option<Position>,
    /// The position that follows, if it is known.
    pub to_exclusive: Option<Position>,
}

/// A segment, for whoever decides what to let go of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SegmentInfo {
    /// Its number; they are consecutive.
    pub number: u64,
    /// The position of its first frame, or of the next to come.
    pub first_position: Position,
    /// The position of its last durable frame; one less than the first if it has none.
    pub last_position_inclusive: Position,
    /// The length of its file.
    pub bytes: u64,
    /// What of it is written.
    pub used_bytes: u64,
}

/// Whether ordinary frames may be appended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Room {
    /// They may.
    Ample,
    /// They may not: what is left is for essential ones.
    Short,
}

/// What the log takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Figures {
    /// All its files.
    pub disk_bytes: u64,
    /// What they may take.
    pub budget_bytes: u64,
    /// Segments, without spares.
    pub segments: usize,
    /// Spares.
    pub spares: usize,
    /// What can be written without another segment.
    pub free_bytes: u64,
    /// Frames that are not durable yet.
    pub queued_bytes: u64,
}

/// Why the log has failed. Nothing becomes durable after it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct Failure(pub(super) Arc<str>);
