//! What callers, the writer and the keeper share: the queue, the table of segments, and the news.
//!
//! Lock order: the keeper's `maker`, then the table; the queue, the table and the errands are never held together.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use bytes::Bytes;
use parking_lot::{Condvar, Mutex};
use tokio::sync::watch;

use crate::limits;
use crate::log::Position;

use super::error::SegmentError;
use super::format::{FRAME_HEADER_BYTES, SEGMENT_HEADER_BYTES};
use super::index::Segment;
use super::storage::{File, Storage};
use super::{Durability, Failure, Options};

pub(super) struct Shared {
    pub(super) storage: Arc<dyn Storage>,
    pub(super) options: Options,
    pub(super) log_id: u64,
    pub(super) epoch: u32,
    queue: Mutex<Queue>,
    wake_writer: Condvar,
    pub(super) table: Mutex<Table>,
    /// The number that the next segment is made under; held while it is made.
    pub(super) maker: Mutex<u64>,
    errands: Mutex<Errands>,
    wake_keeper: Condvar,
    /// Frames that are not durable yet, with their headers.
    queued_bytes: AtomicU64,
    /// What of the active segment and the spares is not written.
    free_bytes: AtomicU64,
    /// There is no room on the disk, or in the budget, for another spare.
    full: AtomicBool,
    /// Goes up whenever there may be more room, or none to wait for.
    pub(super) room_changes: watch::Sender<u64>,
    /// What no power loss can take back; the same as what is durable where every batch is synced.
    pub(super) synced_through: AtomicU64,
    pub(super) durable: watch::Sender<Position>,
    pub(super) failed: watch::Sender<Option<Failure>>,
    pub(super) begun: watch::Sender<u64>,
}

/// Frames on their way to the writer.
struct Queue {
    frames: VecDeque<Queued>,
    next_position: u64,
    closing: bool,
    failed: bool,
    /// Something other than frames is to be done.
    nudged: bool,
    writer_waits: bool,
}

pub(super) struct Queued {
    pub(super) kind: u8,
    pub(super) payload: Bytes,
}

/// The segments: the last is the active one, the spares follow it.
pub(super) struct Table {
    pub(super) segments: VecDeque<Segment>,
    pub(super) spares: VecDeque<Spare>,
    /// Segments that are not wanted any more, and whose files are still there.
    pub(super) leaving: VecDeque<(u64, u64)>,
}

/// A segment without frames, ready to be written.
pub(super) struct Spare {
    pub(super) number: u64,
    pub(super) file: Arc<dyn File>,
    pub(super) bytes: u64,
}

impl Table {
    pub(super) fn bytes_on_disk(&self) -> u64 {
        let segments: u64 = self.segments.iter().map(|segment| segment.bytes).sum();
        let spares: u64 = self.spares.iter().map(|spare| spare.bytes).sum();
        segments + spares + self.leaving.iter().map(|(_, bytes)| bytes).sum::<u64>()
    }

    pub(super) fn oldest(&self) -> u64 {
        self.segments.front().map_or(1, |segment| segment.number)
    }
}

/// What the keeper is to do.
#[derive(Default)]
pub(super) struct Errands {
    /// Segments that are full and not synced, with their last positions.
    pub(super) sync: VecDeque<(Arc<dyn File>, u64)>,
    /// Segments before this number are not wanted any more, and that is on disk.
    pub(super) remove_before: u64,
    pub(super) closing: bool,
    nudged: bool,
}

impl Shared {
    pub(super) fn new(storage: Arc<dyn Storage>, options: Options, log: Beginning) -> Self {
        let last = Position(log.next_position.saturating_sub(1));
        let number = log.table.segments.back().map_or(0, |segment| segment.number);
        let spare = log.table.spares.back().map_or(number, |spare| spare.number);
        let queue = Queue {
            frames: VecDeque::new(),
            next_position: log.next_position,
            closing: false,
            failed: false,
            nudged: false,
            writer_waits: false,
        };
        let shared = Self {
            storage,
            options,
            log_id: log.log_id,
            epoch: log.epoch,
            queue: Mutex::new(queue),
            wake_writer: Condvar::new(),
            table: Mutex::new(log.table),
            maker: Mutex::new(spare + 1),
            errands: Mutex::default(),
            wake_keeper: Condvar::new(),
            queued_bytes: AtomicU64::new(0),
            free_bytes: AtomicU64::new(0),
            full: AtomicBool::new(false),
            room_changes: watch::Sender::new(0),
            synced_through: AtomicU64::new(last.0),
            durable: watch::Sender::new(last),
            failed: watch::Sender::new(None),
            begun: watch::Sender::new(number),
        };
        shared.measure();
        shared
    }

    /// Gives the frame its position and a place in the queue.
    pub(super) fn append(&self, kind: u8, payload: Bytes) -> Position {
        let bytes = (FRAME_HEADER_BYTES + payload.len()) as u64;
        let mut queue = self.queue.lock();
        let position = Position(queue.next_position);
        queue.next_position += 1;
        // After a failure nothing is ever written: frames keep their order for the callers, and take no memory.
        if !queue.failed {
            queue.frames.push_back(Queued { kind, payload });
            self.queued_bytes.fetch_add(bytes, Ordering::Relaxed);
        }
        let wake = std::mem::take(&mut queue.writer_waits);
        drop(queue);
        if wake {
            self.wake_writer.notify_one();
        }
        position
    }

    /// The frames of the next batch: as many as fit, and one in any case.
    pub(super) fn take_batch(&self) -> Vec<Queued> {
        let mut queue = self.queue.lock();
        let (mut count, mut bytes) = (0, 0);
        for frame in &queue.frames {
            bytes += FRAME_HEADER_BYTES + frame.payload.len();
            if count > 0 && bytes > self.options.batch_bytes {
                break;
            }
            count += 1;
        }
        queue.frames.drain(..count).collect()
    }

    /// Waits until the writer has something to do; false when it is to close and nothing is left.
    pub(super) fn wait_for_work(&self) -> bool {
        let mut queue = self.queue.lock();
        loop {
            if std::mem::take(&mut queue.nudged) || !queue.frames.is_empty() {
                break;
            }
            if queue.closing {
                return false;
            }
            queue.writer_waits = true;
            self.wake_writer.wait(&mut queue);
            queue.writer_waits = false;
        }
        let deadline = Instant::now() + self.options.linger;
        while !queue.closing && self.queued_bytes() < self.options.batch_bytes as u64 && Instant::now() < deadline {
            queue.writer_waits = true;
            self.wake_writer.wait_until(&mut queue, deadline);
            queue.writer_waits = false;
        }
        true
    }

    /// Has the writer look for what is to be done besides frames.
    pub(super) fn nudge_writer(&self) {
        self.queue.lock().nudged = true;
        self.wake_writer.notify_one();
    }

    /// Has the writer end when all is written.
    pub(super) fn close_writer(&self) {
        self.queue.lock().closing = true;
        self.wake_writer.notify_one();
    }

    /// Frames up to there are durable, and these bytes of them do not wait any more.
    pub(super) fn became_durable(&self, position: u64, bytes: u64) {
        self.queued_bytes.fetch_sub(bytes, Ordering::Relaxed);
        if !self.has_failed() {
            self.durable.send_replace(Position(position));
        }
    }

    /// Nothing more becomes durable. The first reason stands.
    pub(super) fn fail(&self, error: &SegmentError) {
        let failure = Failure(Arc::from(error.to_string()));
        self.failed.send_if_modified(|failed| {
            let first = failed.is_none();
            failed.get_or_insert(failure);
            first
        });
        let mut queue = self.queue.lock();
        queue.failed = true;
        queue.closing = true;
        queue.frames.clear();
        drop(queue);
        self.wake_writer.notify_one();
        self.room_changes.send_modify(|changes| *changes += 1);
        self.ask_keeper(|errands| errands.closing = true);
    }

    pub(super) fn has_failed(&self) -> bool {
        self.failed.borrow().is_some()
    }

    pub(super) fn queued_bytes(&self) -> u64 {
        self.queued_bytes.load(Ordering::Relaxed)
    }

    pub(super) fn free_bytes(&self) -> u64 {
        self.free_bytes.load(Ordering::Relaxed)
    }

    /// Counts again what may still be written, after the table has changed.
    pub(super) fn measure(&self) {
        let table = self.table.lock();
        let active = table.segments.back().map_or(0, |segment| segment.bytes.saturating_sub(segment.used_bytes));
        let spares: u64 = table.spares.iter().map(|spare| spare.bytes.saturating_sub(SEGMENT_HEADER_BYTES)).sum();
        drop(table);
        self.free_bytes.store(active + spares, Ordering::Relaxed);
        self.room_changes.send_modify(|changes| *changes += 1);
    }

    /// Whether what is queued, and a whole segment for what is essential, fit into what is allocated; and, once there will be no
    /// more, another one to write forward what holds the oldest: else whoever is faster than that would have it never happen.
    pub(super) fn has_ample_room(&self) -> bool {
        let kept_segments = if self.full.load(Ordering::Relaxed) { 2 } else { 1 };
        self.queued_bytes() + kept_segments * self.options.segment_bytes <= self.free_bytes() + SEGMENT_HEADER_BYTES
    }

    /// Whether what is queued, so many bytes more, and half a segment for what is essential, fit into what is allocated.
    pub(super) fn has_room_for(&self, bytes: u64) -> bool {
        self.queued_bytes().saturating_add(bytes) + self.options.segment_bytes / 2 <= self.free_bytes()
    }

    /// Whether there will be no more room before segments are let go of, or ever.
    pub(super) fn is_full(&self) -> bool {
        self.full.load(Ordering::Relaxed) || self.has_failed()
    }

    /// Whether another spare could not be made when it was tried.
    pub(super) fn set_full(&self, full: bool) {
        self.full.store(full, Ordering::Relaxed);
    }

    /// Gives the keeper something to do.
    pub(super) fn ask_keeper(&self, ask: impl FnOnce(&mut Errands)) {
        let mut errands = self.errands.lock();
        ask(&mut errands);
        errands.nudged = true;
        drop(errands);
        self.wake_keeper.notify_one();
    }

    /// Takes what the keeper is to do.
    pub(super) fn take_errands(&self) -> Errands {
        let mut errands = self.errands.lock();
        errands.nudged = false;
        Errands {
            sync: std::mem::take(&mut errands.sync),
            remove_before: std::mem::take(&mut errands.remove_before),
            closing: errands.closing,
            nudged: false,
        }
    }

    /// Waits until the keeper is asked for something, or for `at_most`; false when it is to end.
    pub(super) fn wait_for_errands(&self, at_most: Option<Duration>) -> bool {
        let mut errands = self.errands.lock();
        let deadline = at_most.map(|wait| Instant::now() + wait);
        while !errands.nudged && !errands.closing {
            match deadline {
                None => self.wake_keeper.wait(&mut errands),
                Some(deadline) if self.wake_keeper.wait_until(&mut errands, deadline).timed_out() => break,
                Some(_) => {}
            }
        }
        !errands.closing
    }

    pub(super) fn durability(&self) -> Durability {
        self.options.durability
    }

    /// Whether there is a spare fewer than there should be.
    pub(super) fn lacks_spare(&self) -> bool {
        self.table.lock().spares.len() < limits::LOG_SPARE_SEGMENTS
    }
}

/// What a log begins with when it was opened.
pub(super) struct Beginning {
    pub(super) table: Table,
    pub(super) log_id: u64,
    pub(super) epoch: u32,
    pub(super) next_position: u64,
}
