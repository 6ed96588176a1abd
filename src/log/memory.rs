//! A log in memory. It survives nothing; it keeps its records only where a test wants to read them back.

use std::collections::VecDeque;

use parking_lot::Mutex;
use tokio::sync::watch;

use super::{Dated, Frame, Log, LogError, Look, Position, Record, Visit};

/// Records in memory, durable at once or when told.
pub struct MemoryLog {
    state: Mutex<State>,
    durable: watch::Sender<Position>,
    keeps_records: bool,
    durable_at_once: bool,
    segments: Option<Segments>,
}

/// A log in memory that behaves as if it had segments.
struct Segments {
    records_each: u64,
    begun: watch::Sender<u64>,
}

#[derive(Default)]
struct State {
    last: Position,
    first_kept: Position,
    records: VecDeque<Dated>,
}

impl MemoryLog {
    /// A log that forgets its records at once.
    #[must_use]
    pub fn forgetting() -> Self {
        Self::new(false, true)
    }

    /// A log that keeps its records.
    #[must_use]
    pub fn keeping() -> Self {
        Self::new(true, true)
    }

    /// A log that keeps its records, and whose records are durable, and can be read, only when [`MemoryLog::make_durable`] says so.
    #[must_use]
    pub fn held() -> Self {
        Self::new(true, false)
    }

    /// The same, as if it had segments of so many records: it asks for snapshots, and lets go of whole segments only.
    #[must_use]
    pub fn with_segments_of(self, records_each: u64) -> Self {
        Self { segments: Some(Segments { records_each, begun: watch::Sender::new(0) }), ..self }
    }

    fn new(keeps_records: bool, durable_at_once: bool) -> Self {
        let state = State { first_kept: Position(1), ..State::default() };
        let durable = watch::Sender::new(Position(0));
        Self { state: Mutex::new(state), durable, keeps_records, durable_at_once, segments: None }
    }

    /// Makes all records so far durable.
    pub fn make_durable(&self) {
        let last = self.state.lock().last;
        self.durable.send_replace(last);
    }
}

impl Log for MemoryLog {
    fn frame(&self, record: &Record, unix_ms: u64) -> Frame {
        if self.keeps_records {
            Frame::Record(Box::new(Dated { unix_ms, record: record.clone() }))
        } else {
            Frame::PlaceOnly
        }
    }

    fn append(&self, frame: Frame) -> Position {
        let mut state = self.state.lock();
        state.last = Position(state.last.0 + 1);
        match frame {
            Frame::Record(record) => state.records.push_back(*record),
            Frame::Bytes { .. } | Frame::PlaceOnly => state.first_kept = Position(state.last.0 + 1),
        }
        if self.durable_at_once {
            self.durable.send_replace(state.last);
        }
        if let Some(segments) = &self.segments {
            let segment = state.last.0 / segments.records_each;
            segments.begun.send_if_modified(|begun| std::mem::replace(begun, segment) != segment);
        }
        state.last
    }

    fn first_position(&self) -> Position {
        self.state.lock().first_kept
    }

    fn segment_begun(&self) -> Option<watch::Receiver<u64>> {
        self.segments.as_ref().map(|segments| segments.begun.subscribe())
    }

    fn holds_room_before(&self, position: Position) -> bool {
        let first_kept = self.state.lock().first_kept;
        self.segments.as_ref().is_some_and(|segments| position.0 - position.0 % segments.records_each > first_kept.0)
    }

    fn durable_through(&self) -> watch::Receiver<Position> {
        self.durable.subscribe()
    }

    fn read(&self, from: Position, look: &mut Look<'_>) -> Result<(), LogError> {
        let state = self.state.lock();
        if from < state.first_kept {
            return Err(LogError::NotKept(from));
        }
        let through = *self.durable.borrow();
        let positions = (state.first_kept.0..).map(Position);
        let records = positions.zip(state.records.iter().cloned());
        let records: Vec<_> = records.filter(|(at, _)| *at >= from && *at <= through).collect();
        drop(state);
        // That it was enough is no failure.
        let _ = records.into_iter().try_for_each(|(at, record)| look(at, record));
        Ok(())
    }

    fn read_at(&self, positions: &[Position], visit: &mut Visit<'_>) -> Result<(), LogError> {
        for position in positions.iter().copied() {
            let found = {
                let state = self.state.lock();
                let place = position.0.checked_sub(state.first_kept.0).and_then(|place| usize::try_from(place).ok());
                place.and_then(|place| state.records.get(place).cloned())
            };
            let durable = position <= *self.durable.borrow();
            visit(position, found.filter(|_| durable).ok_or(LogError::NotKept(position))?);
        }
        Ok(())
    }

    fn keeps_records(&self) -> bool {
        self.keeps_records
    }

    fn is_filling(&self) -> bool {
        self.segments.is_some()
    }

    fn truncate_before(&self, position: Position) {
        let mut state = self.state.lock();
        let position = match &self.segments {
            Some(segments) => Position(position.0 - position.0 % segments.records_each),
            None => position,
        };
        while state.first_kept < position && state.records.pop_front().is_some() {
            state.first_kept = Position(state.first_kept.0 + 1);
        }
    }
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

    use std::ops::ControlFlow;

    use super::*;
    use crate::ids::RunId;

    fn append(log: &MemoryLog, run: &str) -> Position {
        let record = Record::RunDeleted { run: RunId::parse(run).unwrap() };
        log.append(log.frame(&record, 0))
    }

    #[test]
    fn records_come_back_in_order_until_they_are_truncated() {
        let log = MemoryLog::keeping();
        let positions: Vec<_> = ["a", "b", "c"].iter().map(|run| append(&log, run)).collect();
        assert_eq!(positions, [Position(1), Position(2), Position(3)]);
        assert_eq!(*log.durable_through().borrow(), Position(3));
        log.truncate_before(Position(3));
        let mut read = Vec::new();
        let mut push = |position, _| {
            read.push(position);
            ControlFlow::Continue(())
        };
        log.read(Position(3), &mut push).unwrap();
        assert_eq!(read, [Position(3)]);
        assert!(log.read(Position(2), &mut |_, _| ControlFlow::Continue(())).is_err());
    }

    #[test]
    fn a_held_log_is_durable_when_told() {
        let log = MemoryLog::held();
        append(&log, "a");
        assert_eq!(*log.durable_through().borrow(), Position(0));
        log.make_durable();
        assert_eq!(*log.durable_through().borrow(), Position(1));
    }
}
