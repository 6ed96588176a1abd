//! The one owner of what is written: takes frames from the queue, writes them as batches, and says when they are
//! durable.
//!
//! Plain steps: [`Writer::turn`] does the next thing and returns; a thread, or a test, calls it. A failure is final:
//! whoever gets one from here never calls again.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::Durability;
use super::error::SegmentError;
use super::format::{
    BATCH_ALIGNMENT_BYTES, BATCH_HEADER_BYTES, BatchHeader, FRAME_HEADER_BYTES, FrameView, SEGMENT_HEADER_BYTES,
};
use super::index::{Place, Places, Segment};
use super::keeper::{Budget, is_want_of_room, make_spare, release_spare};
use super::segment_name;
use super::shared::{Queued, Shared, Spare};

pub(super) struct Writer {
    shared: Arc<Shared>,
    active: Spare,
    /// Where the next batch begins.
    offset: u64,
    next_position: u64,
    last_place: Option<u32>,
    /// The newest header says that everything up to there is durable.
    stated_durable: u64,
    /// There was a header that says so, or no room for one.
    hinted_durable: u64,
    /// The same of the newest header that is durable itself.
    stated_durably: u64,
    /// The newest durable header says that nothing before this segment is wanted.
    stated_oldest: u64,
    buffer: Vec<u8>,
}

/// What a batch has to be published with.
struct Written {
    places: Vec<Place>,
    oldest: u64,
}

impl Writer {
    /// Goes on at this offset of the active segment, the last of the table.
    pub(super) fn new(shared: Arc<Shared>, active: Spare, offset: u64, next_position: u64) -> Self {
        let last_place = shared.table.lock().segments.back().and_then(Segment::last_place_offset);
        Self {
            shared,
            active,
            offset,
            next_position,
            last_place,
            stated_durable: 0,
            hinted_durable: 0,
            stated_durably: 0,
            stated_oldest: 0,
            buffer: Vec::new(),
        }
    }

    /// Writes until it is told to close, then closes; or until something fails.
    pub(super) fn run(&mut self) {
        loop {
            let next = match self.turn() {
                Ok(false) if !self.shared.wait_for_work() => return,
                next => next,
            };
            if let Err(error) = next {
                return self.shared.fail(&error);
            }
            if self.shared.has_failed() {
                return;
            }
        }
    }

    /// Does the next thing: a batch if there are frames, else a header alone if it has news; false if there was nothing
    /// to do.
    pub(super) fn turn(&mut self) -> Result<bool, SegmentError> {
        let frames = self.shared.take_batch();
        if !frames.is_empty() {
            let written = self.write(&frames)?;
            // Where batches are not synced, one that lets go of segments is: their files go only when that is on disk.
            if self.shared.durability() == Durability::Fsync || written.oldest != self.stated_oldest {
                self.sync()?;
                self.state_oldest(written.oldest);
            }
            self.publish(written, &frames);
        } else if self.shared.table.lock().oldest() != self.stated_oldest {
            self.mark()?;
        } else if self.hinted_durable < self.synced_through() {
            self.hint()?;
        } else {
            return Ok(false);
        }
        Ok(true)
    }

    /// The last words, when nothing is queued and the keeper has ended: everything is synced, and a durable header says
    /// so.
    pub(super) fn finish(&mut self) -> Result<(), SegmentError> {
        for (file, _) in self.shared.take_errands().sync {
            file.sync().map_err(SegmentError::io("making a full segment durable"))?;
        }
        if self.stated_durably < self.last_position() {
            self.sync()?;
            self.shared.synced_through.store(self.last_position(), Ordering::Release);
        }
        if self.stated_durably < self.last_position() {
            self.mark()?;
        }
        Ok(())
    }

    /// Writes a header without frames, durably: it carries the epoch, what is durable, and from which segment on the
    /// log is wanted.
    pub(super) fn mark(&mut self) -> Result<(), SegmentError> {
        let written = self.write(&[])?;
        self.sync()?;
        self.state_oldest(written.oldest);
        self.publish(written, &[]);
        Ok(())
    }

    /// It is on disk that nothing before this segment is wanted.
    fn state_oldest(&mut self, oldest: u64) {
        if self.stated_oldest != oldest {
            self.stated_oldest = oldest;
            self.shared.ask_keeper(|errands| errands.remove_before = errands.remove_before.max(oldest));
        }
    }

    /// Writes a header without frames for whoever finds what is before it damaged. It is not synced: most often it gets
    /// to the disk, and where it does not nothing is lost.
    fn hint(&mut self) -> Result<(), SegmentError> {
        if self.offset + BATCH_HEADER_BYTES as u64 > self.active.bytes {
            self.hinted_durable = self.synced_through();
            return Ok(());
        }
        self.write(&[]).map(drop)
    }

    /// Writes a batch.
    fn write(&mut self, frames: &[Queued]) -> Result<Written, SegmentError> {
        let body_bytes = encoded_bytes(frames);
        self.make_room(BATCH_HEADER_BYTES as u64 + body_bytes)?;
        let header = BatchHeader {
            is_gap: false,
            body_bytes: u32::try_from(body_bytes).unwrap_or(u32::MAX),
            log_id: self.shared.log_id,
            segment: self.active.number,
            first_position: self.next_position,
            durable_through: self.synced_through(),
            oldest_segment: self.shared.table.lock().oldest(),
            epoch: self.shared.epoch,
            frames: u32::try_from(frames.len()).unwrap_or(u32::MAX),
        };
        let mut places = Places::after(self.last_place);
        self.buffer.clear();
        self.buffer.extend_from_slice(&header.encode());
        for (frame, position) in frames.iter().zip(self.next_position..) {
            places.note(
                position,
                self.offset + self.buffer.len() as u64,
                self.offset + BATCH_HEADER_BYTES as u64 + body_bytes,
            );
            let view = FrameView { position, epoch: header.epoch, kind: frame.kind, payload: &frame.payload };
            view.encode(&mut self.buffer);
        }
        let written = self.active.file.write_at(&self.buffer, self.offset);
        written.map_err(SegmentError::io(format!("writing {}", segment_name(self.active.number))))?;
        self.buffer.shrink_to(2 * self.shared.options.batch_bytes);
        self.offset = header.end(self.offset);
        self.next_position = header.next_position();
        self.stated_durable = header.durable_through;
        self.hinted_durable = header.durable_through;
        self.last_place = places.last_offset();
        Ok(Written { places: places.kept, oldest: header.oldest_segment })
    }

    /// Makes what was written to the active segment durable.
    fn sync(&mut self) -> Result<(), SegmentError> {
        let synced = self.active.file.sync();
        synced.map_err(SegmentError::io(format!("making {} durable", segment_name(self.active.number))))?;
        self.stated_durably = self.stated_durable;
        if self.shared.durability() == Durability::Fsync {
            // Each segment before this one was synced with its last batch.
            self.shared.synced_through.store(self.last_position(), Ordering::Release);
        }
        Ok(())
    }

    /// Lets readers and waiters know of a batch.
    fn publish(&mut self, written: Written, frames: &[Queued]) {
        if let Some(segment) = self.shared.table.lock().segments.back_mut() {
            segment.extend(written.places);
            segment.last_position = self.last_position();
            segment.used_bytes = self.offset;
        }
        self.shared.measure();
        self.shared.became_durable(self.last_position(), encoded_bytes(frames));
    }

    /// Goes on to the next segment if so many bytes do not fit in this one.
    fn make_room(&mut self, bytes: u64) -> Result<(), SegmentError> {
        if self.offset + bytes <= self.active.bytes {
            return Ok(());
        }
        let mut next = self.take_spare()?;
        let needed = (SEGMENT_HEADER_BYTES + bytes).next_multiple_of(BATCH_ALIGNMENT_BYTES);
        if needed > next.bytes {
            self.grow(&next, needed)?;
            next.bytes = needed;
        }
        let full = std::mem::replace(&mut self.active, next);
        let last_position = self.last_position();
        let segment = Segment::new(self.active.number, self.next_position, self.active.bytes, SEGMENT_HEADER_BYTES);
        self.shared.table.lock().segments.push_back(segment);
        self.shared.ask_keeper(|errands| {
            if self.shared.durability() == Durability::Os {
                errands.sync.push_back((full.file, last_position));
            }
        });
        (self.offset, self.last_place) = (SEGMENT_HEADER_BYTES, None);
        self.shared.begun.send_replace(self.active.number);
        Ok(())
    }

    /// The next segment. Where there is no spare one is made beyond the budget: what was applied must be written.
    fn take_spare(&self) -> Result<Spare, SegmentError> {
        loop {
            let spare = self.shared.table.lock().spares.pop_front();
            if let Some(spare) = spare {
                return Ok(spare);
            }
            if !make_spare(&self.shared, Budget::Exceeded)? {
                return Err(SegmentError::Full { bytes: self.shared.options.segment_bytes });
            }
        }
    }

    /// Makes a spare large enough for one batch, at the expense of the other spares if it must be.
    fn grow(&self, spare: &Spare, bytes: u64) -> Result<(), SegmentError> {
        loop {
            match spare.file.grow(bytes) {
                Ok(()) => return Ok(()),
                Err(error) if is_want_of_room(&error) => {
                    if !release_spare(&self.shared)? {
                        return Err(SegmentError::Full { bytes });
                    }
                }
                Err(error) => return Err(SegmentError::io(format!("growing {}", segment_name(spare.number)))(error)),
            }
        }
    }

    fn synced_through(&self) -> u64 {
        self.shared.synced_through.load(Ordering::Acquire)
    }

    fn last_position(&self) -> u64 {
        self.next_position.saturating_sub(1)
    }
}

fn encoded_bytes(frames: &[Queued]) -> u64 {
    frames.iter().map(|frame| (FRAME_HEADER_BYTES + frame.payload.len()) as u64).sum()
}
