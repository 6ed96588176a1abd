//! Why a log cannot be opened, written or read, in sentences for whoever has to mend it.

use std::io;

use crate::log::Position;

/// Why a log cannot be opened or written.
#[derive(Debug, thiserror::Error)]
pub enum SegmentError {
    /// Another process has it.
    #[error("another process holds the log in {place}; end it, or use another directory")]
    Locked {
        /// The directory.
        place: String,
    },
    /// A newer build wrote it.
    #[error(
        "{file} is of format {version}, and this build reads up to {newest}: start the build that wrote it, or a newer one"
    )]
    Newer {
        /// The segment.
        file: String,
        /// Its format.
        version: u32,
        /// The newest that can be read.
        newest: u32,
    },
    /// Something that was durable is damaged.
    #[error("{0}")]
    Corrupt(Box<Corruption>),
    /// Segments that should be there are not.
    #[error("the log lacks {first} to {last}, which were not let go of: bring them back, or salvage what is left")]
    Missing {
        /// The first missing segment.
        first: String,
        /// The last missing segment.
        last: String,
    },
    /// There is no room for what must be written.
    #[error("no room on disk for a segment of {bytes} bytes of the log")]
    Full {
        /// What was asked for.
        bytes: u64,
    },
    /// The disk failed. Nothing is tried again: what the disk holds is not known any more.
    #[error("{doing}: {source}")]
    Io {
        /// What was being done.
        doing: String,
        /// What the system said.
        source: io::Error,
    },
}

impl SegmentError {
    /// Names what failed.
    pub(super) fn io(doing: impl Into<String>) -> impl FnOnce(io::Error) -> Self {
        let doing = doing.into();
        move |source| Self::Io { doing, source }
    }
}

/// What is damaged, and how that is known.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Corruption {
    /// The segment.
    pub file: String,
    /// Where what cannot be read begins in it.
    pub offset_bytes: u64,
    /// The first position that is lost, if it is known.
    pub position: Option<Position>,
    /// What says that it was durable.
    pub proof: String,
}

impl std::fmt::Display for Corruption {
    fn fmt(&self, to: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(to, "the log is damaged: {} cannot be read from byte {} on", self.file, self.offset_bytes)?;
        if let Some(position) = self.position {
            write!(to, " (position {})", position.0)?;
        }
        write!(to, ", and {}: bring the file back, or salvage what is left", self.proof)
    }
}

/// Why [`super::SegmentLog::open`] failed.
#[derive(Debug, thiserror::Error)]
pub enum OpenError<E> {
    /// The log.
    #[error(transparent)]
    Log(#[from] SegmentError),
    /// Whoever was shown a frame did not take it.
    #[error("position {}: {error}", position.0)]
    Visit {
        /// The frame.
        position: Position,
        /// What they said.
        error: E,
    },
}

/// Why a frame cannot be read back.
#[derive(Debug, thiserror::Error)]
pub enum ReadError {
    /// It was let go of, or given up in a salvage.
    #[error("the log does not hold position {}", .0.0)]
    NotKept(Position),
    /// It is not durable, so nobody may act on it.
    #[error("position {} is not durable yet", .0.0)]
    NotDurable(Position),
    /// It is damaged.
    #[error("the log is damaged: position {} cannot be read at byte {offset_bytes} of {file}", position.0)]
    Corrupt {
        /// The frame.
        position: Position,
        /// The segment.
        file: String,
        /// Where it should be.
        offset_bytes: u64,
    },
    /// The disk failed.
    #[error("reading {file}: {source}")]
    Io {
        /// The segment.
        file: String,
        /// What the system said.
        source: io::Error,
    },
}
