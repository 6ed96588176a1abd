//! What connections have sent and nobody has read yet.
//!
//! HTTP/2 lets a client send ahead of its reader by the windows that it was given: at our sizes 64 MiB a connection, which over
//! thousands of connections is more than any machine has. So what the transport has taken and nobody has read is counted, and
//! while it is more than [`limits::EdgeBytes::unread`] over all, a connection is not read from that has more of it than its even
//! part of half as much again. One that stays so for [`limits::UNREAD_MS_MAX`] ends.
//!
//! The count follows the frames of HTTP/2 ([`super::frames`]): payload without padding counts from its arrival, that of DATA until a request's reader
//! takes it and with what the transport holds for each frame, of any other frame until it is whole. A reader that lets go takes what has come for it, so what is sent to requests
//! that are given up does not count. What still comes for them afterwards is dropped by the transport, unseen; it is forgotten as
//! soon as each reader of the connection waits for more and none is woken, for then nothing is unread. (A request that the
//! transport refuses by itself never gets a reader, and then it is forgotten when no reader is left.)

use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicUsize, Ordering};
use std::sync::{Arc, Weak};
use std::task::{Context, Poll, Wake, Waker};

use bytes::Bytes;
use futures_util::task::AtomicWaker;
use http_body::{Body as _, Frame};
use parking_lot::Mutex;
use tonic::Status;
use tonic::body::Body;

use crate::limits;

/// What all connections have sent that is not read.
pub(super) struct Unread {
    bytes: AtomicUsize,
    /// Above it, connections with much of it are not read from.
    most_bytes: usize,
    /// How many there are.
    connections: Arc<AtomicUsize>,
    /// Connections that are not read from until there is less, each once.
    waiting: Mutex<Vec<Weak<ConnectionUnread>>>,
}

/// What one connection has sent that is not read.
pub(super) struct ConnectionUnread {
    all: Arc<Unread>,
    bytes: AtomicUsize,
    readers: AtomicUsize,
    /// Requests that have begun, less those whose reader waits for more, or is gone: for each of these there may be bytes.
    busy: AtomicUsize,
    waiting: AtomicWaker,
    /// Whether it stands among those that wait.
    is_listed: AtomicBool,
}

/// Who reads one request's body.
pub(super) struct Reader {
    state: Arc<ReaderState>,
    waker: Waker,
}

/// Whether there may be something to read.
struct ReaderState {
    connection: Arc<ConnectionUnread>,
    /// One of those below.
    now: AtomicU8,
    task: AtomicWaker,
}

/// It is about to read, or does something else.
const BUSY: u8 = 0;
/// It has read all there was, and waits for more.
const QUIET: u8 = 1;
/// It was woken.
const WOKEN: u8 = 2;
/// Nothing more comes, or it has let go; so it stays.
const GONE: u8 = 3;

/// A reader that lets go reads no more than this: what its stream's window lets through, and once more.
const DRAINED_BYTES_MAX: usize = 2 * limits::HTTP2_STREAM_WINDOW_BYTES as usize;

impl Unread {
    pub(super) fn new(most_bytes: usize, connections: Arc<AtomicUsize>) -> Self {
        Self { bytes: AtomicUsize::new(0), most_bytes, connections, waiting: Mutex::default() }
    }

    /// What each connection may have sent whatever the others do: the fewer there are, the more.
    fn free_bytes(&self) -> usize {
        let connections = self.connections.load(Ordering::Relaxed).max(1);
        (self.most_bytes / 2 / connections)
            .clamp(limits::UNREAD_CONNECTION_FREE_BYTES_MIN, limits::UNREAD_CONNECTION_FREE_BYTES_MAX)
    }
}

impl ConnectionUnread {
    pub(super) fn new(all: Arc<Unread>) -> Arc<Self> {
        let zero = || AtomicUsize::new(0);
        let (bytes, readers, busy) = (zero(), zero(), zero());
        Arc::new(Self { all, bytes, readers, busy, waiting: AtomicWaker::new(), is_listed: AtomicBool::new(false) })
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
        if all_before > self.all.most_bytes && all_before - taken <= self.all.most_bytes {
            let waiting = std::mem::take(&mut *self.all.waiting.lock());
            for connection in waiting.iter().filter_map(Weak::upgrade) {
                connection.is_listed.store(false, Ordering::Release);
                connection.waiting.wake();
            }
        }
    }

    /// A request has begun, whose body somebody will read.
    pub(super) fn begun(&self) {
        self.busy.fetch_add(1, Ordering::AcqRel);
    }

    /// The body of a request that has begun is read from now on.
    pub(super) fn reader(self: &Arc<Self>) -> Reader {
        self.readers.fetch_add(1, Ordering::Relaxed);
        let state = ReaderState { connection: Arc::clone(self), now: AtomicU8::new(BUSY), task: AtomicWaker::new() };
        let state = Arc::new(state);
        Reader { waker: Waker::from(Arc::clone(&state)), state }
    }

    /// Forgets what nobody can read any more. To be called while all frames that have come whole are with their readers; of
    /// one that has not, so much has come.
    pub(super) fn settle(&self, partial: usize) {
        if self.busy.load(Ordering::Acquire) == 0 {
            let bytes = self.bytes.load(Ordering::Relaxed);
            if bytes > partial {
                self.taken(bytes - partial);
            }
        }
    }

    /// Whether the connection may be read from. If not, the task is woken when that may have changed.
    pub(super) fn may_read(self: &Arc<Self>, context: &Context<'_>) -> bool {
        let may = || {
            self.all.bytes.load(Ordering::Relaxed) <= self.all.most_bytes
                || self.bytes.load(Ordering::Relaxed) <= self.all.free_bytes()
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
    /// Reads from the body. What is read counts until it is said to be taken.
    pub(super) fn poll_frame(
        &self,
        body: &mut Body,
        context: &Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        self.state.task.register(context.waker());
        self.state.becomes(BUSY);
        let frame = Pin::new(body).poll_frame(&mut Context::from_waker(&self.waker));
        match &frame {
            Poll::Ready(Some(Ok(frame))) => {
                if frame.is_data() {
                    self.taken(limits::HTTP2_DATA_FRAME_BYTES);
                }
            }
            // Nothing more comes.
            Poll::Ready(Some(Err(_)) | None) => self.state.becomes(GONE),
            Poll::Pending => self.state.rests(),
        }
        frame
    }

    /// So much of what was read is done with.
    pub(super) fn taken(&self, bytes: usize) {
        self.state.connection.taken(bytes);
    }

    /// Reads what has come, for nobody.
    pub(super) fn drain(&self, body: &mut Body) {
        if self.state.now.load(Ordering::Acquire) == GONE {
            return;
        }
        let mut drained = 0;
        while drained < DRAINED_BYTES_MAX
            && let Poll::Ready(Some(Ok(frame))) = self.poll_frame(body, &Context::from_waker(Waker::noop()))
        {
            let bytes = frame.data_ref().map_or(0, Bytes::len);
            self.taken(bytes);
            drained += bytes;
        }
    }
}

impl Drop for Reader {
    fn drop(&mut self) {
        self.state.becomes(GONE);
        if self.state.connection.readers.fetch_sub(1, Ordering::Relaxed) == 1 {
            self.state.connection.taken(usize::MAX);
        }
    }
}

impl ReaderState {
    /// Between two steps it is counted too often rather than too seldom.
    fn becomes(&self, now: u8) {
        let busy = &self.connection.busy;
        busy.fetch_add(1, Ordering::AcqRel);
        // The transport may wake it when it has long gone.
        let was = self.now.fetch_update(Ordering::AcqRel, Ordering::Acquire, |was| (was != GONE).then_some(now));
        let surplus = match was {
            Ok(was) => usize::from(was != QUIET) + usize::from(now == GONE),
            Err(_) => 1,
        };
        busy.fetch_sub(surplus, Ordering::AcqRel);
    }

    /// It has read all there was, unless it was woken meanwhile.
    fn rests(&self) {
        if self.now.compare_exchange(BUSY, QUIET, Ordering::AcqRel, Ordering::Acquire).is_ok() {
            self.connection.busy.fetch_sub(1, Ordering::AcqRel);
        }
    }
}

impl Wake for ReaderState {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        self.becomes(WOKEN);
        self.task.wake();
    }
}

#[cfg(test)]
#[path = "unread_tests.rs"]
mod tests;
