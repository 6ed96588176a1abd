//! How a log is opened, and how far that has come.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::limits;

use super::format;

/// When a position is called durable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Durability {
    /// Once an `fdatasync` behind it has returned.
    Fsync,
    /// Once the system has it: it outlives the process, not the machine.
    Os,
}

/// Who does the writer's work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Drive {
    /// Two threads of the log's own.
    Threads,
    /// Whoever calls [`SegmentLog::turn`]: a simulator, whose seed must replay.
    ByHand,
}

/// How a log is opened.
#[derive(Clone, Debug)]
pub struct Options {
    /// Size of a segment. A frame that does not fit has one of its own size.
    pub segment_bytes: u64,
    /// What all its files may take. Essential frames may exceed it.
    pub budget_bytes: u64,
    /// A batch takes no more frames beyond this.
    pub batch_bytes: usize,
    /// How long the first frame of a batch waits for others, besides the time that the batch before it takes.
    pub linger: Duration,
    /// When a position is called durable.
    pub durability: Durability,
    /// Passes over what is damaged, and puts gaps there, instead of refusing to open.
    pub salvage: bool,
    /// Identifies the log, if it is made by this opening: random, and unknown to whoever makes payloads.
    pub new_log_id: u64,
    /// Who does the work.
    pub drive: Drive,
}

impl Options {
    /// The defaults, for a log that, if it is new, has this random id.
    #[must_use]
    pub fn new(new_log_id: u64) -> Self {
        Self {
            segment_bytes: limits::LOG_SEGMENT_BYTES,
            budget_bytes: limits::LOG_BUDGET_BYTES,
            batch_bytes: limits::LOG_BATCH_BYTES,
            linger: Duration::from_micros(limits::LOG_LINGER_US),
            durability: Durability::Fsync,
            salvage: false,
            new_log_id,
            drive: Drive::Threads,
        }
    }

    pub(super) fn within_limits(mut self) -> Self {
        let bytes = self.segment_bytes.clamp(limits::LOG_SEGMENT_BYTES_MIN, limits::LOG_SEGMENT_BYTES_MAX);
        self.segment_bytes = bytes - bytes % format::SEGMENT_HEADER_BYTES;
        // None stands for a log without an id that can be read.
        self.new_log_id = self.new_log_id.max(1);
        // Only a single frame may be too large for a segment, never a batch of several.
        let fits = self.segment_bytes - format::SEGMENT_HEADER_BYTES - format::BATCH_HEADER_BYTES as u64;
        self.batch_bytes =
            self.batch_bytes.min(limits::LOG_BATCH_BYTES).min(usize::try_from(fits).unwrap_or(usize::MAX));
        self
    }
}

/// How far opening a log has come, for whoever waits.
#[derive(Debug, Default)]
pub struct Progress {
    total_bytes: AtomicU64,
    read_bytes: AtomicU64,
}

impl Progress {
    /// What there is to read; 0 before it is known.
    #[must_use]
    pub fn total_bytes(&self) -> u64 {
        self.total_bytes.load(Ordering::Relaxed)
    }

    /// What of it was read.
    #[must_use]
    pub fn read_bytes(&self) -> u64 {
        self.read_bytes.load(Ordering::Relaxed)
    }

    /// There is so much to read.
    pub fn begin(&self, total_bytes: u64) {
        self.total_bytes.store(total_bytes, Ordering::Relaxed);
    }

    /// So much of it was read.
    pub fn reached(&self, bytes: u64) {
        self.read_bytes.store(bytes, Ordering::Relaxed);
    }
}
