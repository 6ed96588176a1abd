//! Reading durable frames back, beside the writer.
//!
//! A reader opens files by name and holds no lock while it reads. It never looks behind what was durable when it last
//! asked, so it sees each byte only once that is final. Every checksum is verified again.

use std::io;
use std::sync::Arc;

use bytes::Bytes;

use crate::limits;
use crate::log::Position;

use super::error::ReadError;
use super::format::{
    BATCH_ALIGNMENT_BYTES, BATCH_HEADER_BYTES, BatchHeader, FRAME_HEADER_BYTES, FrameView, SEGMENT_HEADER_BYTES,
};
use super::index::locate;
use super::segment_name;
use super::shared::Shared;
use super::window::Window;

/// A frame that was read back.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoredFrame {
    /// Its position.
    pub position: Position,
    /// Its kind.
    pub kind: u8,
    /// Its payload.
    pub payload: Bytes,
}

/// Durable frames, in order ([`super::SegmentLog::read`]) or here and there ([`super::SegmentLog::look_up`]).
pub struct Reader {
    shared: Arc<Shared>,
    next: u64,
    durable_through: u64,
    at: Option<Place>,
    piece_bytes: usize,
}

/// Where a reader is.
struct Place {
    number: u64,
    window: Window,
    offset: u64,
    /// Where the batch ends that it is in.
    batch_end: u64,
}

impl Reader {
    pub(super) fn new(shared: Arc<Shared>, from: Position) -> Result<Self, ReadError> {
        let reader = Self { shared, next: from.0, durable_through: 0, at: None, piece_bytes: limits::LOG_BATCH_BYTES };
        reader.check_kept()?;
        Ok(reader)
    }

    /// For frames here and there, which are read in small pieces.
    pub(super) fn here_and_there(shared: Arc<Shared>) -> Self {
        let piece_bytes = limits::LOG_INDEX_STRIDE_BYTES as usize;
        Self { shared, next: 0, durable_through: 0, at: None, piece_bytes }
    }

    /// The frame at this position. Those that are asked for in order cost no more than to read what is between, and what lies far
    /// between is passed over.
    ///
    /// # Errors
    /// If it is not durable, not kept any more, or cannot be read.
    pub fn frame_at(&mut self, position: Position) -> Result<StoredFrame, ReadError> {
        if position > *self.shared.durable.borrow() {
            return Err(ReadError::NotDurable(position));
        }
        self.pass_on_to(position);
        match self.next_frame()? {
            Some(frame) if frame.position == position => Ok(frame),
            Some(_) | None => Err(ReadError::NotKept(position)),
        }
    }

    /// Reads on from this position.
    fn pass_on_to(&mut self, position: Position) {
        let is_behind = self.next > position.0;
        self.next = position.0;
        let Some(mut place) = self.at.take().filter(|_| !is_behind) else { return };
        match locate(&self.shared.table.lock().segments, position.0) {
            Some((number, known)) if number == place.number => {
                if u64::from(known.offset) > place.offset {
                    (place.offset, place.batch_end) = (u64::from(known.offset), u64::from(known.batch_end));
                }
                self.at = Some(place);
            }
            Some(_) | None => {}
        }
    }

    /// Whether the next frame was not let go of.
    fn check_kept(&self) -> Result<(), ReadError> {
        let first = self.shared.table.lock().segments.front().map_or(1, |segment| segment.first_position);
        if self.next < first { Err(ReadError::NotKept(Position(self.next))) } else { Ok(()) }
    }

    /// The next frame, if it is durable by now; one that is not may be when it is asked for again. Positions that a
    /// salvage gave up are passed over.
    ///
    /// # Errors
    /// If it is not kept any more, or cannot be read.
    pub fn next_frame(&mut self) -> Result<Option<StoredFrame>, ReadError> {
        if self.next > self.durable_through {
            self.durable_through = self.shared.durable.borrow().0;
            if self.next > self.durable_through {
                return Ok(None);
            }
        }
        let mut place = match self.at.take() {
            Some(place) => place,
            None => self.find()?,
        };
        loop {
            if place.offset >= place.batch_end && !self.enter_batch(&mut place)? {
                // Nothing follows: what was next was let go of meanwhile, or was given up in a salvage.
                return self.check_kept().map(|()| None);
            }
            if place.offset < place.batch_end {
                let frame = self.read_frame(&mut place)?;
                if frame.position.0 >= self.next {
                    self.next = frame.position.0 + 1;
                    self.at = Some(place);
                    return Ok(Some(frame));
                }
            }
        }
    }

    /// The nearest known place before the next frame.
    fn find(&self) -> Result<Place, ReadError> {
        self.check_kept()?;
        let found = locate(&self.shared.table.lock().segments, self.next);
        let (number, known) = found.ok_or(ReadError::NotKept(Position(self.next)))?;
        let mut place = self.open(number)?;
        (place.offset, place.batch_end) = (u64::from(known.offset), u64::from(known.batch_end));
        Ok(place)
    }

    /// The beginning of this segment.
    fn open(&self, number: u64) -> Result<Place, ReadError> {
        let kept = self.used_bytes(number).ok_or(ReadError::NotKept(Position(self.next)))?;
        let file = self.shared.storage.open(&segment_name(number)).map_err(|source| {
            if source.kind() == io::ErrorKind::NotFound {
                // Let go of between the two look-ups.
                ReadError::NotKept(Position(self.next))
            } else {
                ReadError::Io { file: segment_name(number), source }
            }
        })?;
        let window = Window::new(file, kept, self.piece_bytes);
        Ok(Place { number, window, offset: SEGMENT_HEADER_BYTES, batch_end: SEGMENT_HEADER_BYTES })
    }

    /// How far this segment may be read.
    fn used_bytes(&self, number: u64) -> Option<u64> {
        let table = self.shared.table.lock();
        let first = table.segments.front()?.number;
        Some(table.segments.get(usize::try_from(number.checked_sub(first)?).ok()?)?.used_bytes)
    }

    /// Goes on to the next batch, in this segment or in the next; false if there is none that is durable.
    fn enter_batch(&self, place: &mut Place) -> Result<bool, ReadError> {
        let offset = place.batch_end.next_multiple_of(BATCH_ALIGNMENT_BYTES);
        if offset >= place.window.limit() {
            let used = self.used_bytes(place.number).ok_or(ReadError::NotKept(Position(self.next)))?;
            place.window.extend(used);
        }
        if offset >= place.window.limit() {
            if self.used_bytes(place.number + 1).is_none() {
                return Ok(false);
            }
            *place = self.open(place.number + 1)?;
            return Ok(true);
        }
        let header = self.get(place, offset, BATCH_HEADER_BYTES)?.and_then(BatchHeader::parse);
        let header = header.filter(|header| header.segment == place.number);
        let header = header.ok_or_else(|| self.corrupt(place.number, offset))?;
        place.offset = offset + BATCH_HEADER_BYTES as u64;
        place.batch_end = place.offset + u64::from(header.body_bytes);
        if header.is_gap {
            place.offset = place.batch_end;
        }
        Ok(true)
    }

    fn read_frame(&self, place: &mut Place) -> Result<StoredFrame, ReadError> {
        let (number, offset) = (place.number, place.offset);
        let bytes = self.get(place, offset, FRAME_HEADER_BYTES)?.and_then(FrameView::payload_bytes);
        let length = FRAME_HEADER_BYTES + bytes.ok_or_else(|| self.corrupt(number, offset))?;
        if length as u64 > place.batch_end.saturating_sub(offset) {
            return Err(self.corrupt(number, offset));
        }
        let frame = self.get(place, offset, length)?.and_then(FrameView::parse);
        let (frame, _) = frame.ok_or_else(|| self.corrupt(number, offset))?;
        let position = Position(frame.position);
        let frame = StoredFrame { position, kind: frame.kind, payload: Bytes::copy_from_slice(frame.payload) };
        place.offset += length as u64;
        Ok(frame)
    }

    fn get<'p>(&self, place: &'p mut Place, offset: u64, length: usize) -> Result<Option<&'p [u8]>, ReadError> {
        let number = place.number;
        let got = place.window.get(offset, length);
        got.map_err(|source| ReadError::Io { file: segment_name(number), source })
    }

    fn corrupt(&self, number: u64, offset_bytes: u64) -> ReadError {
        ReadError::Corrupt { position: Position(self.next), file: segment_name(number), offset_bytes }
    }
}
