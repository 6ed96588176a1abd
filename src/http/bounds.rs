//! Bounds of one connection and of all, below HTTP: `axum::serve` gives no way to set those of its own parser.
//!
//! A connection lives for one request and its answer, for so many seconds, and may send so many bytes; each path answers
//! with `connection: close`. So neither slow nor large requests, nor slow readers, hold a place for long.

use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use axum::serve::Listener;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::{Instant, Sleep, sleep_until};

/// What one connection may do, and how many there may be.
#[derive(Clone, Copy, Debug)]
pub(super) struct Bounds {
    pub(super) connections: usize,
    pub(super) request_bytes: usize,
    pub(super) connection_life: Duration,
}

/// A listener that takes the next connection only when there is a place for it.
pub(super) struct BoundedListener {
    listener: TcpListener,
    bounds: Bounds,
    places: Arc<Semaphore>,
}

impl BoundedListener {
    pub(super) fn new(listener: TcpListener, bounds: Bounds) -> Self {
        Self { listener, bounds, places: Arc::new(Semaphore::new(bounds.connections)) }
    }
}

impl Listener for BoundedListener {
    type Io = BoundedStream;
    type Addr = SocketAddr;

    async fn accept(&mut self) -> (Self::Io, Self::Addr) {
        // Never closed, so there is always a place in the end.
        let place = Arc::clone(&self.places).acquire_owned().await.ok();
        let (stream, address) = Listener::accept(&mut self.listener).await;
        let deadline = Box::pin(sleep_until(Instant::now() + self.bounds.connection_life));
        (BoundedStream { stream, deadline, bytes_left: self.bounds.request_bytes, _place: place }, address)
    }

    fn local_addr(&self) -> io::Result<Self::Addr> {
        self.listener.local_addr()
    }
}

/// A connection with a deadline and a bound on what it may send.
pub(super) struct BoundedStream {
    stream: TcpStream,
    deadline: Pin<Box<Sleep>>,
    bytes_left: usize,
    _place: Option<OwnedSemaphorePermit>,
}

impl BoundedStream {
    /// What is not done by the deadline is an error.
    fn or_late<T>(&mut self, done: Poll<io::Result<T>>, context: &mut Context<'_>) -> Poll<io::Result<T>> {
        match done {
            Poll::Ready(done) => Poll::Ready(done),
            Poll::Pending => {
                ready!(self.deadline.as_mut().poll(context));
                Poll::Ready(Err(io::Error::new(io::ErrorKind::TimedOut, "the connection's time is over")))
            }
        }
    }
}

impl AsyncRead for BoundedStream {
    fn poll_read(self: Pin<&mut Self>, context: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        let before = buffer.filled().len();
        let done = Pin::new(&mut this.stream).poll_read(context, buffer);
        ready!(this.or_late(done, context))?;
        match this.bytes_left.checked_sub(buffer.filled().len() - before) {
            Some(left) => {
                this.bytes_left = left;
                Poll::Ready(Ok(()))
            }
            None => Poll::Ready(Err(io::Error::new(io::ErrorKind::InvalidData, "the request is too large"))),
        }
    }
}

impl AsyncWrite for BoundedStream {
    fn poll_write(self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        let done = Pin::new(&mut this.stream).poll_write(context, bytes);
        this.or_late(done, context)
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        let done = Pin::new(&mut this.stream).poll_write_vectored(context, slices);
        this.or_late(done, context)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().stream).poll_flush(context)
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().stream).poll_shutdown(context)
    }
}
