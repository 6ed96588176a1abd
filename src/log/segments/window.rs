//! Reading a file from front to back, in large pieces of which each byte is read once.

use std::io;
use std::sync::Arc;

use super::storage::File;

/// A piece of a file in memory, which moves forward as it is asked for what follows.
pub(super) struct Window {
    file: Arc<dyn File>,
    /// Nothing is read from there on.
    limit: u64,
    start: u64,
    filled: usize,
    bytes: Vec<u8>,
    piece_bytes: usize,
}

impl Window {
    /// Of this file up to `limit`, in pieces of this size, or as large as what is asked for.
    pub(super) fn new(file: Arc<dyn File>, limit: u64, piece_bytes: usize) -> Self {
        Self { file, limit, start: 0, filled: 0, bytes: Vec::new(), piece_bytes }
    }

    /// Lets it read on up to there.
    pub(super) fn extend(&mut self, limit: u64) {
        self.limit = limit;
    }

    /// Where it ends.
    pub(super) fn limit(&self) -> u64 {
        self.limit
    }

    /// So many bytes from this offset on; `None` if the file, or the limit, ends before them.
    pub(super) fn get(&mut self, offset: u64, length: usize) -> io::Result<Option<&[u8]>> {
        let left = usize::try_from(self.limit.saturating_sub(offset)).unwrap_or(usize::MAX);
        if length > left {
            return Ok(None);
        }
        let mut skip =
            offset.checked_sub(self.start).map_or(usize::MAX, |skip| usize::try_from(skip).unwrap_or(usize::MAX));
        if skip.saturating_add(length) > self.filled {
            self.refill(offset, skip, length.max(self.piece_bytes).min(left))?;
            skip = 0;
        }
        Ok(self.bytes.get(skip..skip + length).filter(|_| skip + length <= self.filled))
    }

    /// Begins at this offset, with what is there of it.
    fn refill(&mut self, offset: u64, skip: usize, wanted: usize) -> io::Result<()> {
        let kept = self.filled.saturating_sub(skip);
        if kept > 0 {
            self.bytes.copy_within(skip..self.filled, 0);
        }
        (self.start, self.filled) = (offset, kept);
        if self.bytes.len() < wanted {
            self.bytes.resize(wanted, 0);
        }
        while let Some(free) = self.bytes.get_mut(self.filled..wanted).filter(|free| !free.is_empty()) {
            match self.file.read_at(free, self.start + self.filled as u64)? {
                0 => break,
                read => self.filled += read,
            }
        }
        Ok(())
    }
}
