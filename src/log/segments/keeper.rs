//! Segments come and go: spares are made ahead, what is not wanted any more is removed, both off the writer's way.
//!
//! A segment gets its name only when all of it is durable, and the next number only when the name is: there is never a
//! hole among the numbers, whatever a crash undoes. A disk that is full, or a budget that is used up, is no failure:
//! there is a spare fewer.

use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use crate::limits;

use super::error::SegmentError;
use super::format::{self, SegmentHeader};
use super::shared::{Shared, Spare};
use super::storage::{File, Storage};
use super::{making_name, segment_name};

pub(super) struct Keeper {
    pub(super) shared: Arc<Shared>,
}

impl Keeper {
    /// Does what there is to do, until it is told to end or the log has failed.
    pub(super) fn run(&self) {
        let retry = Duration::from_millis(limits::LOG_SPARE_RETRY_MS);
        loop {
            if let Err(error) = self.turn() {
                self.shared.fail(&error);
                return;
            }
            let wait = self.shared.lacks_spare().then_some(retry);
            if !self.shared.wait_for_errands(wait) || self.shared.has_failed() {
                return;
            }
        }
    }

    /// Does once what there is to do.
    pub(super) fn turn(&self) -> Result<(), SegmentError> {
        let errands = self.shared.take_errands();
        for (file, last_position) in errands.sync {
            file.sync().map_err(SegmentError::io("making a full segment durable"))?;
            self.shared.synced_through.fetch_max(last_position, Ordering::Release);
        }
        self.remove_before(errands.remove_before)?;
        while !errands.closing && self.shared.lacks_spare() && make_spare(&self.shared, Budget::Kept)? {}
        self.shared.set_full(self.shared.lacks_spare());
        self.shared.measure();
        Ok(())
    }

    /// Removes the files of segments that are not wanted any more, the oldest first. What a crash leaves of them is
    /// removed when the log is opened.
    fn remove_before(&self, number: u64) -> Result<(), SegmentError> {
        let leaving = |shared: &Shared| shared.table.lock().leaving.front().copied();
        let mut removed = false;
        while let Some((oldest, _)) = leaving(&self.shared).filter(|(oldest, _)| *oldest < number) {
            let name = segment_name(oldest);
            self.shared.storage.remove(&name).map_err(SegmentError::io(format!("removing {name}")))?;
            self.shared.table.lock().leaving.pop_front();
            removed = true;
        }
        if removed { sync_directory(&*self.shared.storage) } else { Ok(()) }
    }
}

/// Whether a spare may take more of the disk than the log should.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Budget {
    Kept,
    /// What was applied must be written.
    Exceeded,
}

/// Makes one spare, unless there are enough; false if there is no room for it.
pub(super) fn make_spare(shared: &Shared, budget: Budget) -> Result<bool, SegmentError> {
    let mut next_number = shared.maker.lock();
    let bytes = shared.options.segment_bytes;
    {
        let table = shared.table.lock();
        if table.spares.len() >= limits::LOG_SPARE_SEGMENTS {
            return Ok(true);
        }
        // Room comes back only when another segment has begun: one that alone has used up the budget must not be the last.
        let is_alone = table.segments.len() <= 1;
        if budget == Budget::Kept && !is_alone && table.bytes_on_disk() + bytes > shared.options.budget_bytes {
            return Ok(false);
        }
    }
    let Some(file) = make_segment(&*shared.storage, shared.log_id, *next_number, bytes)? else { return Ok(false) };
    shared.table.lock().spares.push_back(Spare { number: *next_number, file, bytes });
    *next_number += 1;
    drop(next_number);
    shared.measure();
    Ok(true)
}

/// Gives up the last spare, so that its room can be used otherwise; false if there is none.
pub(super) fn release_spare(shared: &Shared) -> Result<bool, SegmentError> {
    let mut next_number = shared.maker.lock();
    let Some(spare) = shared.table.lock().spares.pop_back() else { return Ok(false) };
    let name = segment_name(spare.number);
    shared.storage.remove(&name).map_err(SegmentError::io(format!("removing {name}")))?;
    sync_directory(&*shared.storage)?;
    *next_number = spare.number;
    drop(next_number);
    Ok(true)
}

/// Makes a segment without frames, durably; `None` if there is no room for it.
pub(super) fn make_segment(
    storage: &dyn Storage,
    log_id: u64,
    number: u64,
    bytes: u64,
) -> Result<Option<Arc<dyn File>>, SegmentError> {
    let (making, name) = (making_name(number), segment_name(number));
    match write_segment(storage, &making, &SegmentHeader { version: format::VERSION, log_id, number }, bytes) {
        Ok(file) => {
            storage.rename(&making, &name).map_err(SegmentError::io(format!("naming {name}")))?;
            sync_directory(storage)?;
            Ok(Some(file))
        }
        Err(error) if is_want_of_room(&error) => match storage.remove(&making) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                Err(SegmentError::io(format!("removing {making}"))(error))
            }
            _ => Ok(None),
        },
        Err(error) => Err(SegmentError::io(format!("making {name}"))(error)),
    }
}

fn write_segment(storage: &dyn Storage, name: &str, header: &SegmentHeader, bytes: u64) -> io::Result<Arc<dyn File>> {
    let file = storage.create(name, bytes)?;
    file.write_at(&header.encode(), 0)?;
    file.sync()?;
    Ok(file)
}

pub(super) fn sync_directory(storage: &dyn Storage) -> Result<(), SegmentError> {
    storage.sync_directory().map_err(SegmentError::io(format!("making names in {} durable", storage.place())))
}

/// Whether this says that there is no room, and nothing else.
pub(super) fn is_want_of_room(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded | io::ErrorKind::FileTooLarge)
}
