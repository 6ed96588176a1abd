//! The log on disk: records as frames of [`super::segments`], each with the time at which it was applied.
//!
//! Owns nothing but the bytes between the two: what a frame's payload is. Eight bytes of time, little-endian milliseconds since
//! the Unix epoch, then the record as [`super::codec`] writes it.

use std::cell::RefCell;
use std::sync::Arc;

use bytes::Bytes;
use tokio::sync::watch;

use super::ahead::visit_aside;
use super::codec::{self, CodecError, Encoding, Fault};
use super::segments::storage::Storage;
use super::segments::{Failure, Figures, OpenError, Options, Progress, Recovered, Room, SegmentLog};
use super::{Dated, Frame, Log, LogError, Look, Position, Record, Visit, VisitAside};
use crate::limits;

/// Records in segment files.
pub struct DiskLog {
    segments: SegmentLog,
}

impl DiskLog {
    /// Opens the log in a directory and shows every record, in order, on a thread beside this one, which waits for the disk. `keeps` is
    /// asked when all were shown: from the position that it says on, they can be read again until [`Log::truncate_before`] is called.
    ///
    /// # Errors
    /// If another process has it, it is damaged, or holds what this build cannot read; says where. By then all before that was shown.
    pub fn open(
        storage: Arc<dyn Storage>,
        options: Options,
        progress: &Progress,
        visit: &mut VisitAside<'_>,
        keeps: impl FnOnce() -> Option<Position>,
    ) -> Result<(Self, Recovered), LogError> {
        let opened = visit_aside(visit, |ahead| {
            let ahead = RefCell::new(ahead);
            let decode = |position, kind, payload: &[u8]| {
                ahead.borrow_mut().put(position, dated(kind, payload)?, payload.len());
                Ok::<_, CodecError>(())
            };
            SegmentLog::open_and_keep(storage, options, progress, decode, || {
                ahead.borrow_mut().finish();
                keeps()
            })
        });
        match opened {
            Ok((segments, recovered)) => Ok((Self { segments }, recovered)),
            Err(OpenError::Log(error)) => Err(LogError::Segments(error)),
            Err(OpenError::Visit { position, error }) => Err(LogError::Record { position, error }),
        }
    }

    /// Shows every record from this position on, in order, on a thread beside this one, which waits for the disk.
    ///
    /// # Errors
    /// If they are not kept, or the disk does not give them back. By then all before that was shown.
    pub fn read_aside(&self, from: Position, visit: &mut VisitAside<'_>) -> Result<(), LogError> {
        visit_aside(visit, |ahead| {
            let mut reader = self.segments.read(from)?;
            while let Some(frame) = reader.next_frame()? {
                let position = frame.position;
                let dated = dated(frame.kind, &frame.payload).map_err(|error| LogError::Record { position, error })?;
                ahead.put(position, dated, frame.payload.len());
            }
            Ok(())
        })
    }

    /// Why nothing becomes durable any more, once that is so.
    #[must_use]
    pub fn failed(&self) -> watch::Receiver<Option<Failure>> {
        self.segments.failed()
    }

    /// Does the next thing of a log that is driven by hand ([`super::segments::Drive`]); false if there was nothing to do.
    pub fn turn(&self) -> bool {
        self.segments.turn()
    }

    /// What it takes.
    #[must_use]
    pub fn figures(&self) -> Figures {
        self.segments.figures()
    }
}

const TIME_BYTES: usize = size_of::<u64>();

fn dated(kind: u8, payload: &[u8]) -> Result<Dated, CodecError> {
    let Some((time, record)) = payload.split_first_chunk::<TIME_BYTES>() else {
        return Err(CodecError { kind, fault: Fault::Missing("the time") });
    };
    Ok(Dated { unix_ms: u64::from_le_bytes(*time), record: codec::decode(kind, record)? })
}

impl Log for DiskLog {
    fn frame(&self, record: &Record, unix_ms: u64) -> Frame {
        let encoding = Encoding::of(record);
        let mut payload = Vec::with_capacity(TIME_BYTES + encoding.length_bytes());
        payload.extend_from_slice(&unix_ms.to_le_bytes());
        encoding.write_to(&mut payload);
        Frame::Bytes { kind: encoding.kind(), payload: Bytes::from(payload) }
    }

    fn append(&self, frame: Frame) -> Position {
        match frame {
            Frame::Bytes { kind, payload } => self.segments.append(kind, payload),
            Frame::Record(dated) => self.append(self.frame(&dated.record, dated.unix_ms)),
            Frame::PlaceOnly => unreachable!("this log's frames have bytes"),
        }
    }

    fn durable_through(&self) -> watch::Receiver<Position> {
        self.segments.durable_through()
    }

    fn read(&self, from: Position, look: &mut Look<'_>) -> Result<(), LogError> {
        let mut reader = self.segments.read(from)?;
        while let Some(frame) = reader.next_frame()? {
            let position = frame.position;
            let dated = dated(frame.kind, &frame.payload).map_err(|error| LogError::Record { position, error })?;
            if look(position, dated).is_break() {
                break;
            }
        }
        Ok(())
    }

    fn read_at(&self, positions: &[Position], visit: &mut Visit<'_>) -> Result<(), LogError> {
        let mut reader = self.segments.look_up();
        for position in positions.iter().copied() {
            let frame = reader.frame_at(position)?;
            visit(position, dated(frame.kind, &frame.payload).map_err(|error| LogError::Record { position, error })?);
        }
        Ok(())
    }

    fn keeps_records(&self) -> bool {
        true
    }

    fn first_position(&self) -> Position {
        self.segments.segments().first().map_or(Position(1), |oldest| oldest.first_position)
    }

    fn segment_begun(&self) -> Option<watch::Receiver<u64>> {
        Some(self.segments.segment_begun())
    }

    fn holds_room_before(&self, position: Position) -> bool {
        self.segments.holds_room_before(position)
    }

    fn is_filling(&self) -> bool {
        let figures = self.segments.figures();
        figures.disk_bytes >= figures.budget_bytes / 100 * limits::LOG_FILLING_PERCENT
    }

    fn worth_carrying_bytes(&self) -> u64 {
        self.segments.figures().budget_bytes / limits::LOG_PASS_DIVISOR
    }

    fn truncate_before(&self, position: Position) {
        self.segments.truncate_before(position);
    }

    fn queued_bytes(&self) -> u64 {
        self.segments.queued_bytes()
    }

    fn room_changes(&self) -> Option<watch::Receiver<u64>> {
        Some(self.segments.room_changes())
    }

    fn is_full(&self) -> bool {
        self.segments.is_full()
    }

    fn has_room(&self) -> bool {
        self.segments.room() == Room::Ample
    }

    fn has_room_for(&self, bytes: u64) -> bool {
        self.segments.has_room_for(bytes)
    }

    fn close(&self) -> Result<(), Failure> {
        self.segments.close()
    }
}
