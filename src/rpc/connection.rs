//! Connections: how many there are, and what one of them may hold.
//!
//! A connection beyond those that there may be ([`EdgeBytes`], [`limits::GRPC_CONNECTIONS_MAX`] at most) waits to be taken until another has ended. One that does not begin to
//! speak HTTP/2 in time ends; later the transport's own pings find out who is gone. What connections send ahead of those who read
//! is bounded by [`super::unread`].

use std::io::{Error, ErrorKind, Result};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::task::{Context, Poll, ready};

use futures_util::Stream;
use futures_util::stream::unfold;
use futures_util::task::AtomicWaker;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::task::coop::poll_proceed;
use tonic::transport::server::Connected;

use crate::limits::{self, EdgeBytes};
use crate::store::clock::Clock;

use super::frames::Frames;
use super::receive::ConnectionRoom;
use super::requests::OwnRequests;
use super::unread::{ConnectionUnread, Unread};

/// How long until the next try when no connection can be taken.
const ACCEPT_INTERVAL_MS: u64 = 1000;

/// What the streams of one connection share.
#[derive(Clone)]
pub(super) struct ConnectionShare {
    /// Room for messages that have come in part.
    pub(super) receive: Arc<ConnectionRoom>,
    /// What has come and is not read.
    pub(super) unread: Arc<ConnectionUnread>,
    /// Requests that it has for itself.
    pub(super) requests: Arc<OwnRequests>,
    /// Whether it is to end.
    pub(super) cut: Arc<Cut>,
}

/// Ends a connection whose client leaves unread what others need the room for.
#[derive(Default)]
pub(super) struct Cut {
    is_cut: AtomicBool,
    task: AtomicWaker,
}

impl Cut {
    pub(super) fn cut(&self) {
        self.is_cut.store(true, Ordering::Release);
        self.task.wake();
    }

    pub(super) fn check(&self, context: &Context<'_>) -> Result<()> {
        self.task.register(context.waker());
        if self.is_cut.load(Ordering::Acquire) {
            return Err(Error::new(ErrorKind::TimedOut, "the client does not read what it is sent"));
        }
        Ok(())
    }
}

/// What all connections share.
struct All {
    unread: Arc<Unread>,
    /// What they have for themselves of messages that have come in part, all together.
    receive_own_bytes: usize,
    connections: Arc<AtomicUsize>,
}

/// A connection that is counted.
pub(super) struct Connection {
    stream: TcpStream,
    share: ConnectionShare,
    /// While it has not begun to speak: when that is too late, and how many bytes it still takes.
    silence: Option<(Timer, usize)>,
    frames: Frames,
    /// While it is not read from: when that has lasted too long.
    paused: Option<Timer>,
    clock: Clock,
    _counted: Option<OwnedSemaphorePermit>,
}

/// Waits for a moment.
pub(super) type Timer = Pin<Box<dyn Future<Output = ()> + Send>>;

/// Done when the clock shows so much.
pub(super) fn timer(clock: &Clock, deadline_ms: u64) -> Timer {
    let clock = clock.clone();
    Box::pin(async move { clock.wait_until(Some(deadline_ms)).await })
}

/// Connections as they come, no more than there may be.
pub(super) fn connections(
    listener: TcpListener,
    clock: Clock,
    edge: EdgeBytes,
) -> impl Stream<Item = Result<Connection>> {
    let connections = Arc::<AtomicUsize>::default();
    let unread = Arc::new(Unread::new(edge.unread, Arc::clone(&connections)));
    let all = All { unread, receive_own_bytes: edge.receive_own, connections };
    let room = Arc::new(Semaphore::new(edge.connections_max()));
    unfold((listener, clock, room, all), |(listener, clock, room, all)| async {
        let counted = Arc::clone(&room).acquire_owned().await.ok();
        let stream = next_connection(&listener, &clock).await;
        let connection = stream.set_nodelay(true).map(|()| Connection::new(stream, &clock, &all, counted));
        Some((connection, (listener, clock, room, all)))
    })
}

/// The next connection. The transport's own listener would try again at once, and for ever, while none can be taken for want of
/// descriptors; this one says so, and waits between two tries.
async fn next_connection(listener: &TcpListener, clock: &Clock) -> TcpStream {
    loop {
        match listener.accept().await {
            Ok((stream, _)) => return stream,
            // That one was gone before it was taken.
            Err(error) if matches!(error.kind(), ErrorKind::ConnectionAborted | ErrorKind::ConnectionReset) => {}
            Err(error) => {
                tracing::warn!(%error, "no connection can be taken");
                clock.wait_until(Some(clock.now_ms().saturating_add(ACCEPT_INTERVAL_MS))).await;
            }
        }
    }
}

impl Connection {
    fn new(stream: TcpStream, clock: &Clock, all: &All, counted: Option<OwnedSemaphorePermit>) -> Self {
        let receive = Arc::new(ConnectionRoom::new(all.receive_own_bytes, Arc::clone(&all.connections)));
        let unread = ConnectionUnread::new(Arc::clone(&all.unread));
        let share = ConnectionShare { receive, unread, requests: Arc::default(), cut: Arc::default() };
        let deadline_ms = clock.now_ms().saturating_add(limits::GRPC_GREETING_MS_MAX);
        let silence = Some((timer(clock, deadline_ms), limits::GRPC_GREETING_BYTES));
        Self { stream, share, silence, frames: Frames::new(), paused: None, clock: clock.clone(), _counted: counted }
    }

    /// Whether it may be read from; an error once it has sent ahead of its reader for too long.
    fn poll_may_read(&mut self, context: &mut Context<'_>) -> Poll<Result<()>> {
        if self.share.unread.may_read(context) {
            self.paused = None;
            return Poll::Ready(Ok(()));
        }
        let clock = &self.clock;
        let paused =
            self.paused.get_or_insert_with(|| timer(clock, clock.now_ms().saturating_add(limits::UNREAD_MS_MAX)));
        let over = |()| Err(Error::new(ErrorKind::TimedOut, "the client sends much ahead of what is read of it"));
        paused.as_mut().poll(context).map(over)
    }
}

impl Connected for Connection {
    type ConnectInfo = ConnectionShare;

    fn connect_info(&self) -> ConnectionShare {
        self.share.clone()
    }
}

/// Uses up the task's budget by what was read, so that a connection that brings much gives way to others after about a mebibyte.
fn give_way(read_bytes: usize, context: &mut Context<'_>) {
    // The read itself has used one.
    for _ in 0..read_bytes / limits::CONNECTION_READ_UNIT_BYTES {
        match poll_proceed(context) {
            Poll::Ready(proceed) => proceed.made_progress(),
            Poll::Pending => return,
        }
    }
}

impl AsyncRead for Connection {
    fn poll_read(mut self: Pin<&mut Self>, context: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<Result<()>> {
        self.share.cut.check(context)?;
        if let Some((timer, _)) = &mut self.silence
            && timer.as_mut().poll(context).is_ready()
        {
            return Poll::Ready(Err(Error::new(ErrorKind::TimedOut, "the client does not begin to speak HTTP/2")));
        }
        // What has come whole before this is with its readers.
        self.share.unread.settle(self.frames.partial());
        ready!(self.poll_may_read(context))?;
        let before = buffer.filled().len();
        ready!(Pin::new(&mut self.stream).poll_read(context, buffer))?;
        let read = buffer.filled().len() - before;
        give_way(buffer.filled().len() - before, context);
        let Self { frames, share, .. } = &mut *self;
        frames.follow(&buffer.filled()[before..], &share.unread);
        self.silence = self.silence.take().filter(|(_, left)| *left > read).map(|(timer, left)| (timer, left - read));
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for Connection {
    fn poll_write(mut self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<Result<usize>> {
        self.share.cut.check(context)?;
        Pin::new(&mut self.stream).poll_write(context, bytes)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[std::io::IoSlice<'_>],
    ) -> Poll<Result<usize>> {
        self.share.cut.check(context)?;
        Pin::new(&mut self.stream).poll_write_vectored(context, slices)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}
