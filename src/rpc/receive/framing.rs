//! Where messages begin and end in a stream of bytes: the framing of gRPC is five bytes with the length, then the message.

/// Bytes before each message: whether it is compressed, and its length.
pub(super) const HEADER_BYTES: usize = 5;

/// Where in the framing a stream stands.
#[derive(Debug, Default)]
pub(super) struct Framing {
    header: [u8; HEADER_BYTES],
    header_bytes: usize,
    /// Bytes of the message that are still to come, once its header is there.
    left: usize,
    /// Bytes that have come of a message that is not whole, with its header.
    partial: usize,
}

/// Where whole messages end in some bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Ends {
    /// The first of them, which may have begun before.
    pub(super) first: usize,
    /// The last of them.
    pub(super) last: usize,
}

/// What comes is not taken, and nothing after it means anything.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Broken {
    /// A message is compressed.
    Compressed,
    /// A message claims so many bytes, which is too many.
    TooLarge(usize),
    /// What should say whether a message is compressed says neither.
    NoMessage(u8),
}

impl Framing {
    /// Takes what has come, and says which messages it makes whole.
    ///
    /// # Errors
    /// If a message claims more than `most_bytes`, is compressed, or what comes is none.
    pub(super) fn take(&mut self, all: &[u8], most_bytes: usize) -> Result<Option<Ends>, Broken> {
        let mut ends: Option<Ends> = None;
        let mut bytes = all;
        while !bytes.is_empty() {
            let taken = if self.header_bytes < HEADER_BYTES {
                let taken = bytes.len().min(HEADER_BYTES - self.header_bytes);
                self.header[self.header_bytes..][..taken].copy_from_slice(&bytes[..taken]);
                self.header_bytes += taken;
                let [_, length @ ..] = self.header;
                self.left = u32::from_be_bytes(length) as usize;
                taken
            } else {
                let taken = bytes.len().min(self.left);
                self.left -= taken;
                taken
            };
            self.partial += taken;
            bytes = &bytes[taken..];
            if self.header_bytes == HEADER_BYTES {
                let [compressed, ..] = self.header;
                match compressed {
                    0 => {}
                    1 => return Err(Broken::Compressed),
                    other => return Err(Broken::NoMessage(other)),
                }
                if self.left > most_bytes {
                    return Err(Broken::TooLarge(self.left));
                }
                if self.left == 0 {
                    *self = Self::default();
                    let last = all.len() - bytes.len();
                    ends = Some(Ends { first: ends.map_or(last, |ends| ends.first), last });
                }
            }
        }
        Ok(ends)
    }

    /// Bytes that have come of a message that is not whole.
    pub(super) fn partial(&self) -> usize {
        self.partial
    }
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

    use super::*;
    use crate::rpc::receive::tests::message;

    const MOST: usize = 100_000;

    #[test]
    fn the_framing_is_followed_however_bytes_are_cut() {
        let mut bytes = message(3, 3);
        bytes.extend(message(0, 0));
        bytes.extend(message(70_000, 70_000));
        let whole = bytes.len();
        bytes.extend(message(9, 4));
        for size in [1, 2, 4, 5, 6, 7, 1000, bytes.len()] {
            let mut framing = Framing::default();
            let mut last = 0;
            for (number, chunk) in bytes.chunks(size).enumerate() {
                if let Some(ends) = framing.take(chunk, MOST).unwrap() {
                    assert!(ends.first <= ends.last && ends.last <= chunk.len());
                    last = number * size + ends.last;
                }
            }
            assert_eq!((last, framing.partial(), framing.left), (whole, 9, 5));
        }
        let mut framing = Framing::default();
        assert_eq!(framing.take(&bytes, MOST), Ok(Some(Ends { first: 8, last: whole })));
    }

    #[test]
    fn a_length_that_is_too_large_is_seen_with_its_header() {
        let mut framing = Framing::default();
        assert_eq!(framing.take(&message(9, 9), 9), Ok(Some(Ends { first: 14, last: 14 })));
        assert_eq!(framing.take(&[0, 255, 255], 9), Ok(None));
        assert_eq!(framing.take(&[255, 255], 9), Err(Broken::TooLarge(u32::MAX as usize)));
        assert_eq!(Framing::default().take(&[2; 9], MOST), Err(Broken::NoMessage(2)));
        assert_eq!(Framing::default().take(&[1, 0, 0, 0, 0], MOST), Err(Broken::Compressed));
    }
}
