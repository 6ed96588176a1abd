//! Where the frames of HTTP/2 begin and end in what a connection has sent: what of it counts as unread, and which requests begin.

use crate::limits;

use super::unread::ConnectionUnread;

/// The first bytes of a connection, before its frames.
pub(super) const PREFACE_BYTES: usize = 24;
/// Bytes before each frame's payload: its length (three), its type, flags, and its stream.
pub(super) const FRAME_HEADER_BYTES: usize = 9;
/// The types of frames of DATA and of HEADERS.
pub(super) const DATA: u8 = 0;
/// See [`DATA`].
pub(super) const HEADERS: u8 = 1;
/// The flag of a frame whose payload begins with a byte that says how many bytes at its end mean nothing.
pub(super) const PADDED: u8 = 8;

/// Where in the framing of HTTP/2 a connection stands.
pub(super) struct Frames {
    preface_left: usize,
    header: [u8; FRAME_HEADER_BYTES],
    header_bytes: usize,
    payload_left: usize,
    /// How much of the payload left is padding, and whether that is still to be said.
    padding: usize,
    padding_comes: bool,
    /// What counts of a frame that is not whole.
    partial: usize,
    /// The last request that has begun.
    last_stream: u32,
}

impl Frames {
    pub(super) fn new() -> Self {
        Self {
            preface_left: PREFACE_BYTES,
            header: [0; FRAME_HEADER_BYTES],
            header_bytes: 0,
            payload_left: 0,
            padding: 0,
            padding_comes: false,
            partial: 0,
            last_stream: 0,
        }
    }

    /// What counts of a frame that is not whole.
    pub(super) fn partial(&self) -> usize {
        self.partial
    }

    /// Takes what has come into account.
    pub(super) fn follow(&mut self, mut bytes: &[u8], unread: &ConnectionUnread) {
        let skipped = bytes.len().min(self.preface_left);
        self.preface_left -= skipped;
        bytes = &bytes[skipped..];
        // Whole frames that are not DATA come and are gone.
        let (mut came, mut gone) = (0, 0);
        while !bytes.is_empty() {
            let taken = if self.header_bytes < FRAME_HEADER_BYTES {
                let taken = bytes.len().min(FRAME_HEADER_BYTES - self.header_bytes);
                self.header[self.header_bytes..][..taken].copy_from_slice(&bytes[..taken]);
                self.header_bytes += taken;
                if self.header_bytes == FRAME_HEADER_BYTES {
                    self.begin(unread);
                }
                taken
            } else if self.padding_comes {
                (self.padding, self.padding_comes) = (usize::from(bytes[0]), false);
                self.payload_left -= 1;
                1
            } else {
                let taken = bytes.len().min(self.payload_left);
                let counts = taken.min(self.payload_left.saturating_sub(self.padding));
                self.payload_left -= taken;
                self.partial += counts;
                came += counts;
                taken
            };
            bytes = &bytes[taken..];
            if self.header_bytes == FRAME_HEADER_BYTES && self.payload_left == 0 {
                let [_, _, _, kind, ..] = self.header;
                gone += if kind == DATA { 0 } else { self.partial };
                (self.header_bytes, self.partial) = (0, 0);
            }
        }
        unread.came(came);
        if gone > 0 {
            unread.taken(gone);
        }
    }

    /// A frame's header has come.
    fn begin(&mut self, unread: &ConnectionUnread) {
        let [high, middle, low, kind, flags, stream @ ..] = self.header;
        self.payload_left = u32::from_be_bytes([0, high, middle, low]) as usize;
        self.padding = 0;
        self.padding_comes = kind == DATA && flags & PADDED != 0 && self.payload_left > 0;
        let stream = u32::from_be_bytes(stream) & (u32::MAX >> 1);
        // Those at a body's end are of a stream that has begun before.
        if kind == DATA {
            self.partial = limits::HTTP2_DATA_FRAME_BYTES;
            unread.came(self.partial);
        }
        if kind == HEADERS && stream > self.last_stream {
            self.last_stream = stream;
            unread.begun();
        }
    }
}
