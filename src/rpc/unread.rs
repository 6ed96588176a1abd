//! What connections have sent and nobody has read yet.
//!
//! HTTP/2 lets a client send ahead of its reader by the windows that it was given: at our sizes 64 MiB a connection, which over
//! thousands of connections is more than any machine has. So what the transport has taken and nobody has read is counted, and
//! while it is more than [`limits::UNREAD_BYTES_MAX`] over all, a connection with more than
//! [`limits::UNREAD_CONNECTION_FREE_BYTES`] of it is not read from. One that stays so for [`limits::UNREAD_MS_MAX`] ends.
//!
//! The count follows the frames of HTTP/2: payload counts from its arrival, that of DATA until a request's reader takes it, of
//! any other frame until it is whole. Padding, and what was sent to streams that ended early, is forgotten when the connection has
//! no request left; until then it counts.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Weak};
use std::task::Context;

use futures_util::task::AtomicWaker;
use parking_lot::Mutex;

use crate::limits;

/// What all connections have sent that is not read.
#[derive(Default)]
pub(super) struct Unread {
    bytes: AtomicUsize,
    /// Connections that are not read from until there is less, each once.
    waiting: Mutex<Vec<Weak<ConnectionUnread>>>,
}

/// What one connection has sent that is not read.
pub(super) struct ConnectionUnread {
    all: Arc<Unread>,
    bytes: AtomicUsize,
    readers: AtomicUsize,
    waiting: AtomicWaker,
    /// Whether it stands among those that wait.
    is_listed: AtomicBool,
}

/// Who reads one request's body.
pub(super) struct Reader(Arc<ConnectionUnread>);

impl ConnectionUnread {
    pub(super) fn new(all: Arc<Unread>) -> Arc<Self> {
        let (bytes, readers, is_listed) = (AtomicUsize::new(0), AtomicUsize::new(0), AtomicBool::new(false));
        Arc::new(Self { all, bytes, readers, waiting: AtomicWaker::new(), is_listed })
    }

    /// So much has come.
    pub(super) fn came(&self, bytes: usize) {
        self.bytes.fetch_add(bytes, Ordering::Relaxed);
        self.all.bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    /// So much of it is read, or of no interest.
    pub(super) fn taken(&self, bytes: usize) {
        let taken = |count: usize| bytes.min(count);
        let before = self.bytes.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |count| Some(count - taken(count)));
        let taken = before.map_or(0, taken);
        let all_before = self.all.bytes.fetch_sub(taken, Ordering::Relaxed);
        self.waiting.wake();
        if all_before > limits::UNREAD_BYTES_MAX && all_before - taken <= limits::UNREAD_BYTES_MAX {
            let waiting = std::mem::take(&mut *self.all.waiting.lock());
            for connection in waiting.iter().filter_map(Weak::upgrade) {
                connection.is_listed.store(false, Ordering::Release);
                connection.waiting.wake();
            }
        }
    }

    /// A request's body is read from now on.
    pub(super) fn reader(self: &Arc<Self>) -> Reader {
        self.readers.fetch_add(1, Ordering::Relaxed);
        Reader(Arc::clone(self))
    }

    /// Whether the connection may be read from. If not, the task is woken when that may have changed.
    pub(super) fn may_read(self: &Arc<Self>, context: &Context<'_>) -> bool {
        let may = || {
            self.all.bytes.load(Ordering::Relaxed) <= limits::UNREAD_BYTES_MAX
                || self.bytes.load(Ordering::Relaxed) <= limits::UNREAD_CONNECTION_FREE_BYTES
        };
        if may() {
            return true;
        }
        self.waiting.register(context.waker());
        if !self.is_listed.swap(true, Ordering::AcqRel) {
            self.all.waiting.lock().push(Arc::downgrade(self));
        }
        // It may have changed before anybody knew whom to wake.
        may()
    }
}

impl Drop for ConnectionUnread {
    fn drop(&mut self) {
        self.taken(usize::MAX);
    }
}

impl Reader {
    /// So much was read.
    pub(super) fn taken(&self, bytes: usize) {
        self.0.taken(bytes);
    }
}

impl Drop for Reader {
    fn drop(&mut self) {
        if self.0.readers.fetch_sub(1, Ordering::Relaxed) == 1 {
            self.0.taken(usize::MAX);
        }
    }
}

/// The first bytes of a connection, before its frames.
const PREFACE_BYTES: usize = 24;
/// Bytes before each frame's payload: its length (three), its type, flags, and its stream.
const FRAME_HEADER_BYTES: usize = 9;
/// The type of a frame of DATA.
const DATA: u8 = 0;

/// Where in the framing of HTTP/2 a connection stands.
pub(super) struct Frames {
    preface_left: usize,
    header: [u8; FRAME_HEADER_BYTES],
    header_bytes: usize,
    payload_left: usize,
}

impl Frames {
    pub(super) fn new() -> Self {
        Self { preface_left: PREFACE_BYTES, header: [0; FRAME_HEADER_BYTES], header_bytes: 0, payload_left: 0 }
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
                self.payload_left = self.payload_bytes();
                taken
            } else {
                let taken = bytes.len().min(self.payload_left);
                self.payload_left -= taken;
                came += taken;
                taken
            };
            bytes = &bytes[taken..];
            if self.header_bytes == FRAME_HEADER_BYTES && self.payload_left == 0 {
                let [_, _, _, kind, ..] = self.header;
                gone += if kind == DATA { 0 } else { self.payload_bytes() };
                self.header_bytes = 0;
            }
        }
        unread.came(came);
        if gone > 0 {
            unread.taken(gone);
        }
    }

    fn payload_bytes(&self) -> usize {
        let [high, middle, low, ..] = self.header;
        u32::from_be_bytes([0, high, middle, low]) as usize
    }
}

#[cfg(test)]
mod tests {
    use std::task::Waker;

    use super::*;

    fn frame(kind: u8, payload: usize) -> Vec<u8> {
        let length = u32::try_from(payload).unwrap_or_default().to_be_bytes();
        let mut bytes = vec![length[1], length[2], length[3], kind, 0, 0, 0, 0, 1];
        bytes.resize(FRAME_HEADER_BYTES + payload, 7);
        bytes
    }

    fn of(connection: &ConnectionUnread) -> (usize, usize) {
        (connection.bytes.load(Ordering::Relaxed), connection.all.bytes.load(Ordering::Relaxed))
    }

    #[test]
    fn data_counts_until_it_is_read_and_other_frames_until_they_are_whole() {
        let mut bytes = vec![b'P'; PREFACE_BYTES];
        bytes.extend(frame(4, 30));
        bytes.extend(frame(DATA, 70_000));
        bytes.extend(frame(DATA, 0));
        bytes.extend(frame(8, 4));
        bytes.extend(&frame(1, 100)[..FRAME_HEADER_BYTES + 60]);
        for size in [1, 3, 8, 9, 10, 1000, bytes.len()] {
            let unread = ConnectionUnread::new(Arc::default());
            let mut frames = Frames::new();
            bytes.chunks(size).for_each(|chunk| frames.follow(chunk, &unread));
            assert_eq!(of(&unread), (70_060, 70_060), "in pieces of {size}");
            let (one, two) = (unread.reader(), unread.reader());
            one.taken(50_000);
            assert_eq!(of(&unread), (20_060, 20_060));
            drop(one);
            assert_eq!(of(&unread), (20_060, 20_060), "the other may still read it");
            drop(two);
            assert_eq!(of(&unread), (0, 0));
        }
    }

    #[test]
    fn only_who_has_sent_much_waits_and_is_woken_when_there_is_less() {
        let all = Arc::new(Unread::default());
        let (much, little) = (ConnectionUnread::new(Arc::clone(&all)), ConnectionUnread::new(Arc::clone(&all)));
        much.came(limits::UNREAD_BYTES_MAX + 1);
        little.came(limits::UNREAD_CONNECTION_FREE_BYTES);
        let woken = Arc::new(Woken::default());
        let waker = Waker::from(Arc::clone(&woken));
        let context = Context::from_waker(&waker);
        assert!(little.may_read(&context) && !much.may_read(&context) && !much.may_read(&context));
        assert_eq!(all.waiting.lock().len(), 1, "however often it asks");
        drop(little);
        assert_eq!(woken.0.load(Ordering::Relaxed), 0, "there is still too much");
        much.reader().taken(1);
        assert!(woken.0.load(Ordering::Relaxed) > 0 && much.may_read(&context));
        drop(much);
        assert_eq!(all.bytes.load(Ordering::Relaxed), 0);
    }

    #[derive(Default)]
    struct Woken(AtomicUsize);

    impl std::task::Wake for Woken {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }
}
