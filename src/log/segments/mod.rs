//! The log on disk: segment files of frames that nobody here understands, one writer, and recovery that tells a torn
//! end from damage.
//!
//! [`SegmentLog`] gives frames consecutive positions from 1, writes them in batches, and says through which position
//! they are durable. Owns: the files of one directory, which it holds for itself. Never does: know what a frame means,
//! try a failed sync again, or say that something is durable before it is.
//!
//! **What is kept.** With [`Durability::Fsync`] a position is durable when an `fdatasync` behind its batch has
//! returned. A batch is whole or gone: its frames are durable together, and a torn one is cut as one. With
//! [`Durability::Os`] a position is called durable once it is handed to the system: the end of the process takes
//! nothing, the end of the machine may take what was written since the segment before the last.
//!
//! **A torn end and damage.** Each batch's header says what was durable when it was written ([`format`]). When
//! something cannot be read, everything behind it is looked through; if a header there says that its position was
//! durable, it is damage, and the log does not open but says where. Else it was never answered, and is cut. A header
//! without frames is written when the writer has nothing else to do, so that the last answered batch is proven too; it
//! is synced only with what follows, or by [`SegmentLog::close`]. So these cannot be told apart, and are cut as torn:
//! damage to the last answered batch when the machine stopped before the header behind it came to the disk, or that
//! header is damaged as well; and, with [`Durability::Os`], damage in what was written since the last sync. That the
//! newest segments are gone altogether, with all spares, cannot be noticed either; any others are missed. On purpose,
//! with [`Options::salvage`], whole batches that are damaged are given up for good, and it is told which.
//!
//! **What never comes back.** Everything behind a cut is overwritten with zeros, durably, before a position is given
//! anew, and each opening raises the epoch, which no batch may fall behind. Segments are never used twice.
//!
//! **Room.** A segment is allocated before it is needed, and spares are kept, so that what was taken can be written
//! when the disk is full. [`SegmentLog::room`] says when ordinary frames have to be refused to leave the rest to the
//! essential ones.
//!
//! **The small state.** [`SegmentLog::segment_begun`] tells when a segment has begun; the owner appends a snapshot
//! then, as ordinary frames. They are not the first of the segment: those before it are shown in a replay that begins
//! with this segment, without what they rest on, and the owner passes them over up to the snapshot that covers them. So
//! a segment may be let go of only when a later one holds a snapshot, and [`SegmentLog::truncate_before`] is best given
//! the position of the oldest snapshot that is needed.

mod error;
pub mod faulty;
mod format;
mod index;
mod keeper;
mod look_ahead;
mod open;
mod options;
mod read;
mod report;
mod scan;
mod shared;
pub mod storage;
#[cfg(test)]
mod tests;
pub mod watched;
mod window;
mod writer;

use std::any::Any;
use std::io;
use std::sync::Arc;
use std::thread::{self, JoinHandle};

use bytes::Bytes;
use parking_lot::Mutex;
use tokio::sync::watch;

use crate::limits;
use crate::log::Position;

pub use error::{Corruption, OpenError, ReadError, SegmentError};
use keeper::Keeper;
pub use options::{Drive, Durability, Options, Progress};
pub use read::{Reader, StoredFrame};
pub use report::{Cut, Dropped, Failure, Figures, Recovered, Room, SegmentInfo};
use shared::Shared;
use storage::Storage;
use writer::Writer;

/// The log on disk.
pub struct SegmentLog {
    shared: Arc<Shared>,
    workers: Mutex<Workers>,
    /// Let go of last, when nothing is written any more.
    _lock: Box<dyn Any + Send + Sync>,
}

enum Workers {
    Threads { writer: JoinHandle<Writer>, keeper: JoinHandle<()> },
    ByHand { writer: Box<Writer>, keeper: Keeper },
    Closed,
}

impl SegmentLog {
    /// Takes the directory, reads the log and shows every frame, in order, then makes it ready to be written.
    ///
    /// # Errors
    /// If another process has it, it is damaged or of a newer format, the disk fails, or a frame is not taken.
    pub fn open<E>(
        storage: Arc<dyn Storage>,
        options: Options,
        progress: &Progress,
        visit: impl FnMut(Position, u8, &[u8]) -> Result<(), E>,
    ) -> Result<(Self, Recovered), OpenError<E>> {
        Self::open_and_keep(storage, options, progress, visit, || None)
    }

    /// The same. `keeps` is asked when every frame was shown: from the position that it says on all can be read again, also what is not
    /// wanted any more ([`Recovered::first_position`]), until [`SegmentLog::truncate_before`] is called.
    ///
    /// # Errors
    /// As [`SegmentLog::open`].
    pub fn open_and_keep<E>(
        storage: Arc<dyn Storage>,
        options: Options,
        progress: &Progress,
        mut visit: impl FnMut(Position, u8, &[u8]) -> Result<(), E>,
        keeps: impl FnOnce() -> Option<Position>,
    ) -> Result<(Self, Recovered), OpenError<E>> {
        let options = options.within_limits();
        let lock = storage.lock().map_err(|error| {
            let place = storage.place();
            if error.kind() == io::ErrorKind::WouldBlock {
                SegmentError::Locked { place }
            } else {
                SegmentError::io(format!("locking {place}"))(error)
            }
        })?;
        let drive = options.drive;
        let open::Opened { shared, writer, recovered } = open::open(storage, options, progress, &mut visit, keeps)?;
        let keeper = Keeper { shared: Arc::clone(&shared) };
        keeper.turn()?;
        let workers = match drive {
            Drive::ByHand => Workers::ByHand { writer: Box::new(writer), keeper },
            Drive::Threads => spawn(&shared, writer, keeper).map_err(SegmentError::io("starting the log's threads"))?,
        };
        Ok((Self { shared, workers: Mutex::new(workers), _lock: lock }, recovered))
    }

    /// Gives a frame its position and has it written. Never waits and never fails; room was given before. After a
    /// failure it gives positions that never become durable.
    pub fn append(&self, kind: u8, payload: Bytes) -> Position {
        debug_assert!(payload.len() <= limits::LOG_FRAME_BYTES_MAX, "larger frames are refused before");
        self.shared.append(kind, payload)
    }

    /// Frames that are not durable yet, in bytes: above [`limits::LOG_QUEUED_BYTES_MAX`] callers hold back.
    #[must_use]
    pub fn queued_bytes(&self) -> u64 {
        self.shared.queued_bytes()
    }

    /// Whether ordinary frames may be appended. What is queued, and one whole segment for what is essential, must fit
    /// into what is allocated. Callers ask before each frame, so what passes at once may go beyond it by the frames of
    /// as many callers as run at once.
    #[must_use]
    pub fn room(&self) -> Room {
        if self.shared.has_ample_room() { Room::Ample } else { Room::Short }
    }

    /// Whether frames of so many bytes may be appended to give room back: half of what is kept for what is essential must be left.
    #[must_use]
    pub fn has_room_for(&self, bytes: u64) -> bool {
        self.shared.has_room_for(bytes)
    }

    /// Whether it is of no use to wait for room: there will be no more before segments are let go of.
    #[must_use]
    pub fn is_full(&self) -> bool {
        self.shared.is_full()
    }

    /// Changes whenever there may be more room, or none to wait for.
    #[must_use]
    pub fn room_changes(&self) -> watch::Receiver<u64> {
        self.shared.room_changes.subscribe()
    }

    /// The last position that is durable, and all that come.
    #[must_use]
    pub fn durable_through(&self) -> watch::Receiver<Position> {
        self.shared.durable.subscribe()
    }

    /// Why nothing becomes durable any more, once that is so.
    #[must_use]
    pub fn failed(&self) -> watch::Receiver<Option<Failure>> {
        self.shared.failed.subscribe()
    }

    /// The number of the newest segment with frames, and of each that begins.
    #[must_use]
    pub fn segment_begun(&self) -> watch::Receiver<u64> {
        self.shared.begun.subscribe()
    }

    /// The segments that are kept, oldest first; the last is the one that is written.
    #[must_use]
    pub fn segments(&self) -> Vec<SegmentInfo> {
        let info = |segment: &index::Segment| SegmentInfo {
            number: segment.number,
            first_position: Position(segment.first_position),
            last_position_inclusive: Position(segment.last_position),
            bytes: segment.bytes,
            used_bytes: segment.used_bytes,
        };
        self.shared.table.lock().segments.iter().map(info).collect()
    }

    /// What it takes.
    #[must_use]
    pub fn figures(&self) -> Figures {
        let table = self.shared.table.lock();
        Figures {
            disk_bytes: table.bytes_on_disk(),
            budget_bytes: self.shared.options.budget_bytes,
            segments: table.segments.len(),
            spares: table.spares.len(),
            free_bytes: self.shared.free_bytes(),
            queued_bytes: self.shared.queued_bytes(),
        }
    }

    /// Whether some segment lies wholly before this position.
    #[must_use]
    pub fn holds_room_before(&self, position: Position) -> bool {
        let table = self.shared.table.lock();
        table.segments.len() > 1 && table.segments.front().is_some_and(|oldest| oldest.last_position < position.0)
    }

    /// Lets go of every segment that lies wholly before this position, oldest first. They cannot be read from now on;
    /// their files go once it is on disk that they are not wanted.
    pub fn truncate_before(&self, position: Position) {
        let mut table = self.shared.table.lock();
        let before = table.leaving.len();
        while table.segments.len() > 1
            && table.segments.front().is_some_and(|oldest| oldest.last_position < position.0)
            && let Some(oldest) = table.segments.pop_front()
        {
            table.leaving.push_back((oldest.number, oldest.bytes));
        }
        let any = table.leaving.len() > before;
        drop(table);
        if any {
            self.shared.nudge_writer();
        }
    }

    /// The durable frames from this position on.
    ///
    /// # Errors
    /// If they are not kept.
    pub fn read(&self, from: Position) -> Result<Reader, ReadError> {
        Reader::new(Arc::clone(&self.shared), from)
    }

    /// Reads durable frames here and there.
    #[must_use]
    pub fn look_up(&self) -> Reader {
        Reader::here_and_there(Arc::clone(&self.shared))
    }

    /// Does the next thing of the writer and of the keeper, for a log that is driven by hand; false if there was
    /// nothing to write, or it has failed.
    pub fn turn(&self) -> bool {
        let mut workers = self.workers.lock();
        let Workers::ByHand { writer, keeper } = &mut *workers else { return false };
        if self.shared.has_failed() {
            return false;
        }
        let done = writer.turn().and_then(|wrote| keeper.turn().map(|()| wrote));
        done.unwrap_or_else(|error| {
            self.shared.fail(&error);
            false
        })
    }

    /// Writes everything, syncs it, and leaves a durable header that says so; waits for the disk, as dropping the log
    /// does. Nothing that is appended after it is written.
    ///
    /// # Errors
    /// If the log has failed.
    pub fn close(&self) -> Result<(), Failure> {
        let writer = match std::mem::replace(&mut *self.workers.lock(), Workers::Closed) {
            Workers::Closed => None,
            Workers::ByHand { mut writer, keeper: _ } => {
                while !self.shared.has_failed() {
                    match writer.turn() {
                        Ok(true) => {}
                        Ok(false) => break,
                        Err(error) => self.shared.fail(&error),
                    }
                }
                Some(*writer)
            }
            Workers::Threads { writer, keeper } => {
                self.shared.close_writer();
                let writer = writer.join().ok();
                self.shared.ask_keeper(|errands| errands.closing = true);
                // A thread that panicked has said so (`Alarm`).
                drop(keeper.join());
                writer
            }
        };
        if let Some(mut writer) = writer.filter(|_| !self.shared.has_failed())
            && let Err(error) = writer.finish()
        {
            self.shared.fail(&error);
        }
        self.shared.failed.borrow().clone().map_or(Ok(()), Err)
    }
}

impl Drop for SegmentLog {
    fn drop(&mut self) {
        drop(self.close());
    }
}

fn spawn(shared: &Arc<Shared>, mut writer: Writer, keeper: Keeper) -> io::Result<Workers> {
    let alarm = Alarm(Arc::clone(shared));
    let keeper = thread::Builder::new().name("log-keeper".to_owned()).spawn(move || {
        let _alarm = alarm;
        keeper.run();
    })?;
    let alarm = Alarm(Arc::clone(shared));
    let writer = thread::Builder::new().name("log-writer".to_owned()).spawn(move || {
        let _alarm = alarm;
        writer.run();
        writer
    })?;
    Ok(Workers::Threads { writer, keeper })
}

/// Has the log fail when its thread panics, so that nobody waits for ever.
struct Alarm(Arc<Shared>);

impl Drop for Alarm {
    fn drop(&mut self) {
        if thread::panicking() {
            self.0.fail(&SegmentError::io("running the log's thread")(io::Error::other("it panicked")));
        }
    }
}

const SEGMENT_SUFFIX: &str = ".segment";
const MAKING_SUFFIX: &str = ".making";
const NUMBER_DIGITS: usize = 20;

fn segment_name(number: u64) -> String {
    format!("{number:0NUMBER_DIGITS$}{SEGMENT_SUFFIX}")
}

fn making_name(number: u64) -> String {
    format!("{number:0NUMBER_DIGITS$}{MAKING_SUFFIX}")
}
