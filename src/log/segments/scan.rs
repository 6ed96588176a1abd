//! Reading a log from its beginning: what is whole, where it ends, and whether it ends as a crash ends it or is
//! damaged.
//!
//! Batches are taken as long as each is what must come next: of this log and segment, its first position the next one,
//! its epoch no older, all its frames whole. Where that ends, the next segment goes on if its first batch begins at the
//! next position. Else everything behind is looked through for headers. Each says what was durable when it was written,
//! and that stays true whatever was cut since: if one says so of the next position, what should be here was durable and
//! is damaged. If none does, nothing behind was ever answered: a torn tail.
//!
//! Writes nothing, but in a salvage: there it puts a gap over what is damaged, so that the log is whole again, without
//! it.

use std::collections::VecDeque;
use std::io;
use std::sync::Arc;

use crate::log::Position;

use super::error::{Corruption, OpenError, SegmentError};
use super::format::{BATCH_HEADER_BYTES, BatchHeader, FrameView, SEGMENT_HEADER_BYTES, is_body};
use super::index::{Places, Segment};
use super::look_ahead::{Ahead, look_ahead};
use super::storage::{File, Storage};
use super::window::Window;
use super::{Dropped, Progress, segment_name};

/// How much is read at once.
const PIECE_BYTES: usize = 4 << 20;

/// A segment's file.
#[derive(Clone, Copy, Debug)]
pub(super) struct Found {
    pub(super) number: u64,
    pub(super) bytes: u64,
}

/// How far the log was read.
#[derive(Clone, Copy, Debug)]
pub(super) struct Cursor {
    /// Which of the files.
    pub(super) index: usize,
    pub(super) offset: u64,
    /// The position that must come next; unknown before the first batch of a log whose beginning is gone.
    pub(super) position: Option<u64>,
    pub(super) epoch: u32,
    pub(super) durable_through: u64,
    pub(super) oldest_segment: u64,
}

pub(super) struct Scan<'a> {
    pub(super) storage: &'a dyn Storage,
    pub(super) files: Vec<Found>,
    pub(super) log_id: u64,
    pub(super) salvage: bool,
    pub(super) progress: &'a Progress,
    pub(super) cursor: Cursor,
    pub(super) segments: VecDeque<Segment>,
    pub(super) dropped: Vec<Dropped>,
    /// Batches that nothing behind them says to be durable.
    pub(super) unproven: VecDeque<Unproven>,
}

/// A batch that may be in the system's memory only.
#[derive(Clone, Copy, Debug)]
pub(super) struct Unproven {
    pub(super) segment: u64,
    pub(super) offset: u64,
    pub(super) end: u64,
    /// It is on disk if this position is durable.
    proven_by: u64,
}

impl<'a> Scan<'a> {
    /// Of these files, which are all there is from the first to the last.
    pub(super) fn new(
        storage: &'a dyn Storage,
        files: Vec<Found>,
        log_id: u64,
        salvage: bool,
        progress: &'a Progress,
    ) -> Self {
        // The very first segment begins with the first position; what another one begins with is known when it is read.
        let position = files.first().filter(|file| file.number == 1).map(|_| 1);
        let cursor = Cursor {
            index: 0,
            offset: SEGMENT_HEADER_BYTES,
            position,
            epoch: 0,
            durable_through: 0,
            oldest_segment: 1,
        };
        let (segments, dropped, unproven) = (VecDeque::new(), Vec::new(), VecDeque::new());
        Self { storage, files, log_id, salvage, progress, cursor, segments, dropped, unproven }
    }

    /// Shows every frame, in order; what is behind the end of the log.
    pub(super) fn run<E>(
        &mut self,
        visit: &mut impl FnMut(Position, u8, &[u8]) -> Result<(), E>,
    ) -> Result<Ahead, OpenError<E>> {
        self.begin_segment();
        loop {
            self.read_segment(visit)?;
            if self.goes_on()? {
                self.cursor.index += 1;
                self.cursor.offset = SEGMENT_HEADER_BYTES;
                self.begin_segment();
                continue;
            }
            let ahead = look_ahead(self.storage, &self.files, self.log_id, &self.cursor)?;
            let damaged = ahead.proof.is_some() || self.cursor.position.is_none();
            match ahead.next {
                _ if !damaged => return Ok(ahead),
                Some(next) if self.salvage => {
                    let (number, offset_bytes) = self.damaged_at(&ahead);
                    let from = self.cursor.position.map(Position);
                    let to_exclusive = Some(Position(next.first_position));
                    self.dropped.push(Dropped { file: segment_name(number), offset_bytes, from, to_exclusive });
                    self.put_gap(next)?;
                }
                _ => return Err(self.corruption(&ahead).into()),
            }
        }
    }

    fn file(&self, index: usize) -> Result<(Found, Arc<dyn File>), SegmentError> {
        let found = self.files.get(index).copied().unwrap_or(Found { number: 0, bytes: 0 });
        let name = segment_name(found.number);
        let file = self.storage.open(&name).map_err(SegmentError::io(format!("opening {name}")))?;
        Ok((found, file))
    }

    fn begin_segment(&mut self) {
        let first = self.cursor.position.unwrap_or(1);
        if let Some(found) = self.files.get(self.cursor.index) {
            self.segments.push_back(Segment::new(found.number, first, found.bytes, SEGMENT_HEADER_BYTES));
        }
    }

    /// Takes batches from the cursor on, as long as each is what must come next.
    fn read_segment<E>(
        &mut self,
        visit: &mut impl FnMut(Position, u8, &[u8]) -> Result<(), E>,
    ) -> Result<(), OpenError<E>> {
        let (found, file) = self.file(self.cursor.index)?;
        let reading = || format!("reading {}", segment_name(found.number));
        let before: u64 = self.files.iter().take(self.cursor.index).map(|file| file.bytes).sum();
        let mut window = Window::new(file, found.bytes, PIECE_BYTES);
        loop {
            self.progress.reached(before + self.cursor.offset);
            let offset = self.cursor.offset;
            let bytes = window.get(offset, BATCH_HEADER_BYTES).map_err(SegmentError::io(reading()))?;
            let Some(header) =
                bytes.and_then(BatchHeader::parse).filter(|header| self.comes_next(header, found.number))
            else {
                break;
            };
            if !header.is_gap {
                let body = window.get(offset + BATCH_HEADER_BYTES as u64, header.body_bytes as usize);
                let body = body.map_err(SegmentError::io(reading()))?.filter(|body| is_body(&header, body));
                let Some(body) = body else { break };
                self.take(offset, body, visit)?;
            }
            self.pass(&header, offset);
        }
        self.progress.reached(before + found.bytes);
        Ok(())
    }

    /// Whether a batch of this segment with this header may stand where the cursor is.
    fn comes_next(&self, header: &BatchHeader, segment: u64) -> bool {
        let in_order = match self.cursor.position {
            None => true,
            Some(position) if header.is_gap => header.first_position >= position,
            Some(position) => header.first_position == position,
        };
        in_order && header.log_id == self.log_id && header.segment == segment && header.epoch >= self.cursor.epoch
    }

    fn take<E>(
        &mut self,
        offset: u64,
        body: &[u8],
        visit: &mut impl FnMut(Position, u8, &[u8]) -> Result<(), E>,
    ) -> Result<(), OpenError<E>> {
        let Some(segment) = self.segments.back_mut() else { return Ok(()) };
        let begin = offset + BATCH_HEADER_BYTES as u64;
        let mut places = Places::after(segment.last_place_offset());
        let mut rest = body;
        while let Some((frame, after)) = FrameView::parse_unchecked(rest) {
            places.note(frame.position, begin + (body.len() - rest.len()) as u64, begin + body.len() as u64);
            let position = Position(frame.position);
            visit(position, frame.kind, frame.payload).map_err(|error| OpenError::Visit { position, error })?;
            rest = after;
        }
        segment.extend(places.kept);
        Ok(())
    }

    /// Goes behind a batch.
    fn pass(&mut self, header: &BatchHeader, offset: u64) {
        self.cursor.offset = header.end(offset);
        self.cursor.position = Some(header.next_position());
        self.cursor.epoch = header.epoch;
        self.cursor.durable_through = self.cursor.durable_through.max(header.durable_through);
        self.cursor.oldest_segment = self.cursor.oldest_segment.max(header.oldest_segment);
        if let Some(segment) = self.segments.back_mut() {
            if segment.last_position < segment.first_position {
                segment.first_position = header.first_position;
            }
            segment.last_position = header.next_position().saturating_sub(1);
            segment.used_bytes = self.cursor.offset;
        }
        // A header without frames was synced with the frames behind it, or not yet; where it is lost, they cannot be
        // reached.
        let proven_by = header.next_position().saturating_sub(u64::from(header.frames > 0));
        let end = self.cursor.offset;
        self.unproven.push_back(Unproven { segment: header.segment, offset, end, proven_by });
        let durable_through = self.cursor.durable_through;
        while self.unproven.front().is_some_and(|batch| batch.proven_by <= durable_through) {
            self.unproven.pop_front();
        }
    }

    /// Whether the next segment begins with what must come next.
    fn goes_on(&self) -> Result<bool, SegmentError> {
        if self.cursor.position.is_none() || self.cursor.index + 1 >= self.files.len() {
            return Ok(false);
        }
        let (found, file) = self.file(self.cursor.index + 1)?;
        let mut window = Window::new(file, found.bytes, BATCH_HEADER_BYTES);
        let bytes = window.get(SEGMENT_HEADER_BYTES, BATCH_HEADER_BYTES);
        let bytes = bytes.map_err(SegmentError::io(format!("reading {}", segment_name(found.number))))?;
        Ok(bytes.and_then(BatchHeader::parse).is_some_and(|header| self.comes_next(&header, found.number)))
    }

    /// The segment and the offset where it is damaged: here, or, if nothing was ever written here, at the beginning of
    /// the next segment.
    fn damaged_at(&self, ahead: &Ahead) -> (u64, u64) {
        match self.files.get(self.cursor.index + 1) {
            Some(next) if ahead.is_blank_to_end => (next.number, SEGMENT_HEADER_BYTES),
            _ => (self.files.get(self.cursor.index).map_or(0, |file| file.number), self.cursor.offset),
        }
    }

    fn corruption(&self, ahead: &Ahead) -> SegmentError {
        let (number, offset_bytes) = self.damaged_at(ahead);
        let proof = ahead.proof.clone().unwrap_or_else(|| "nothing can be read of where the log begins".to_owned());
        let file = segment_name(number);
        let position = self.cursor.position.map(Position);
        SegmentError::Corrupt(Box::new(Corruption { file, offset_bytes, position, proof }))
    }

    /// Gives a segment that was cut short room for a header.
    fn grow(&mut self, index: usize, file: &dyn File, bytes: u64) -> Result<(), SegmentError> {
        if let Some(found) = self.files.get_mut(index) {
            file.grow(bytes).map_err(SegmentError::io(format!("growing {}", segment_name(found.number))))?;
            found.bytes = bytes;
        }
        Ok(())
    }

    /// Puts gaps over everything between the cursor and the next header that can be read, and stays where it is.
    fn put_gap(&mut self, next: Next) -> Result<(), SegmentError> {
        for index in (self.cursor.index..=next.index).rev() {
            let (found, file) = self.file(index)?;
            let begin = if index == self.cursor.index { self.cursor.offset } else { SEGMENT_HEADER_BYTES };
            let end = if index == next.index { next.offset } else { found.bytes };
            let wanted = begin + BATCH_HEADER_BYTES as u64;
            if index < next.index && found.bytes < wanted {
                self.grow(index, &*file, wanted)?;
            }
            let body_bytes = end.saturating_sub(wanted);
            if index == next.index && end < wanted {
                continue;
            }
            let header = BatchHeader {
                is_gap: true,
                body_bytes: u32::try_from(body_bytes).unwrap_or(u32::MAX),
                log_id: self.log_id,
                segment: found.number,
                first_position: next.first_position,
                durable_through: self.cursor.durable_through,
                oldest_segment: self.cursor.oldest_segment,
                epoch: self.cursor.epoch,
                frames: 0,
            };
            let done: io::Result<()> = file.write_at(&header.encode(), begin).and_then(|()| file.sync());
            done.map_err(SegmentError::io(format!("putting a gap into {}", segment_name(found.number))))?;
        }
        Ok(())
    }
}

/// The next header that can be read behind something that cannot.
#[derive(Clone, Copy, Debug)]
pub(super) struct Next {
    pub(super) index: usize,
    pub(super) offset: u64,
    pub(super) first_position: u64,
}
