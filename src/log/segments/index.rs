//! Where frames stand: for each segment its range of positions, and one place for every 64 KiB.

use std::collections::VecDeque;

use crate::limits;

/// A segment that holds, or may hold, frames.
#[derive(Debug)]
pub(super) struct Segment {
    pub(super) number: u64,
    /// The position of its first frame, or of the first that it may hold.
    pub(super) first_position: u64,
    /// One less than the first where it holds none.
    pub(super) last_position: u64,
    /// The length of its file.
    pub(super) bytes: u64,
    /// How far batches reach that may be read.
    pub(super) used_bytes: u64,
    places: Vec<Place>,
}

/// Where a frame begins, and its batch ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Place {
    pub(super) position: u64,
    pub(super) offset: u32,
    pub(super) batch_end: u32,
}

impl Segment {
    pub(super) fn new(number: u64, first_position: u64, bytes: u64, used_bytes: u64) -> Self {
        let last_position = first_position.saturating_sub(1);
        Self { number, first_position, last_position, bytes, used_bytes, places: Vec::new() }
    }

    /// Takes up places; they come in order.
    pub(super) fn extend(&mut self, places: impl IntoIterator<Item = Place>) {
        self.places.extend(places);
    }

    /// Where the last known place is.
    pub(super) fn last_place_offset(&self) -> Option<u32> {
        self.places.last().map(|place| place.offset)
    }

    /// The nearest known place at this position or before it, else the first after it: a gap may be between.
    fn near(&self, position: u64) -> Option<Place> {
        let after = self.places.partition_point(|place| place.position <= position);
        self.places.get(after.saturating_sub(1)).copied()
    }
}

/// Chooses the places that are kept of a run of frames.
pub(super) struct Places {
    last_offset: Option<u32>,
    pub(super) kept: Vec<Place>,
}

impl Places {
    /// For frames that follow the last place of their segment.
    pub(super) fn after(last_offset: Option<u32>) -> Self {
        Self { last_offset, kept: Vec::new() }
    }

    pub(super) fn last_offset(&self) -> Option<u32> {
        self.last_offset
    }

    /// A frame, of a batch that ends there.
    pub(super) fn note(&mut self, position: u64, offset: u64, batch_end: u64) {
        // Segments are smaller than 4 GiB (`limits`); a place that does not fit is only one that is not known.
        let (Ok(offset), Ok(batch_end)) = (u32::try_from(offset), u32::try_from(batch_end)) else { return };
        if self.last_offset.is_none_or(|last| offset - last >= limits::LOG_INDEX_STRIDE_BYTES) {
            self.last_offset = Some(offset);
            self.kept.push(Place { position, offset, batch_end });
        }
    }
}

/// The segment that a position may be in, by number, and a place in it to look from.
pub(super) fn locate(segments: &VecDeque<Segment>, position: u64) -> Option<(u64, Place)> {
    let after = segments.partition_point(|segment| segment.first_position <= position);
    // One without frames begins at the same position as the next.
    let candidates = segments.iter().take(after).rev().chain(segments.iter().skip(after));
    candidates.filter_map(|segment| Some((segment.number, segment.near(position)?))).next()
}
