//! What stands behind the place where a log cannot be read on: whether it proves that something durable is damaged.

use super::error::SegmentError;
use super::format::{BATCH_ALIGNMENT_BYTES, BATCH_HEADER_BYTES, BatchHeader, SEGMENT_HEADER_BYTES, may_be_batch};
use super::scan::{Cursor, Found, Next};
use super::segment_name;
use super::storage::Storage;
use super::window::Window;

const PIECE_BYTES: usize = 64 << 10;

/// What stands behind.
#[derive(Debug, Default)]
pub(super) struct Ahead {
    /// What says that the next position was durable.
    pub(super) proof: Option<String>,
    /// Where reading could go on.
    pub(super) next: Option<Next>,
    /// The newest epoch.
    pub(super) epoch: u32,
    /// Frames of headers that can be read.
    pub(super) frames: u64,
    /// Which of the files hold anything there.
    pub(super) dirty: Vec<usize>,
    /// Whether nothing but zeros follows in the same segment.
    pub(super) is_blank_to_end: bool,
}

/// Looks through everything behind the cursor, or until there is proof.
pub(super) fn look_ahead(
    storage: &dyn Storage,
    files: &[Found],
    log_id: u64,
    cursor: &Cursor,
) -> Result<Ahead, SegmentError> {
    let mut ahead = Ahead { epoch: cursor.epoch, is_blank_to_end: true, ..Ahead::default() };
    for (index, found) in files.iter().enumerate().skip(cursor.index) {
        let name = segment_name(found.number);
        let file = storage.open(&name).map_err(SegmentError::io(format!("opening {name}")))?;
        let mut window = Window::new(file, found.bytes, 16 * PIECE_BYTES);
        let mut offset = if index == cursor.index { cursor.offset } else { SEGMENT_HEADER_BYTES };
        let mut dirty = false;
        while offset < found.bytes {
            let length = usize::try_from(found.bytes - offset).unwrap_or(PIECE_BYTES).min(PIECE_BYTES);
            let piece = window.get(offset, length).map_err(SegmentError::io(format!("reading {name}")))?;
            let piece = piece.unwrap_or_default();
            let candidates = if is_blank(piece) { Vec::new() } else { candidates(piece) };
            dirty |= !is_blank(piece);
            ahead.is_blank_to_end &= index != cursor.index || !dirty;
            for candidate in candidates {
                let at = offset + candidate;
                let bytes = window.get(at, BATCH_HEADER_BYTES).map_err(SegmentError::io(format!("reading {name}")))?;
                let header = bytes.and_then(BatchHeader::parse);
                let ours = header.filter(|header| header.log_id == log_id && header.segment == found.number);
                if let Some(header) = ours.filter(|_| (index, at) != (cursor.index, cursor.offset)) {
                    ahead.weigh(
                        &header,
                        cursor,
                        Next { index, offset: at, first_position: header.first_position },
                        &name,
                    );
                }
            }
            if ahead.proof.is_some() && ahead.next.is_some() {
                return Ok(ahead);
            }
            offset += length as u64;
        }
        if dirty {
            ahead.dirty.push(index);
        }
    }
    Ok(ahead)
}

impl Ahead {
    fn weigh(&mut self, header: &BatchHeader, cursor: &Cursor, at: Next, name: &str) {
        let position = cursor.position.unwrap_or(1);
        self.epoch = self.epoch.max(header.epoch);
        if header.first_position >= position && header.epoch >= cursor.epoch {
            self.frames += u64::from(header.frames);
            // Where a salvage goes on there is room before it for the gap's own header.
            if at.index > cursor.index || at.offset >= cursor.offset + BATCH_HEADER_BYTES as u64 {
                self.next.get_or_insert(at);
            }
        }
        if header.durable_through >= position && self.proof.is_none() {
            let through = header.durable_through;
            self.proof = Some(format!("byte {} of {name} says that positions up to {through} were durable", at.offset));
        }
    }
}

/// Where batches may begin in a piece that begins at a multiple of their alignment.
fn candidates(piece: &[u8]) -> Vec<u64> {
    let starts = (0..).step_by(usize::try_from(BATCH_ALIGNMENT_BYTES).unwrap_or(8));
    let lines = piece.chunks(usize::try_from(BATCH_ALIGNMENT_BYTES).unwrap_or(8));
    lines.zip(starts).filter(|(line, _)| may_be_batch(line)).map(|(_, start)| start).collect()
}

/// Whether these are zeros, asked of many at a time.
pub(super) fn is_blank(bytes: &[u8]) -> bool {
    bytes.chunks(256).all(|chunk| chunk.iter().fold(0, |seen, byte| seen | byte) == 0)
}
