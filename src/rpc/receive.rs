//! Messages that have come in part: what they may hold, and how long they may take.
//!
//! The transport gathers a message until it is whole, and only then does a service see it. This layer follows the framing of
//! gRPC (five bytes with the length, then the message) and takes room for what has *arrived* of a message that is not whole,
//! never for what it claims: from a budget of the connection, and from one of all. Each stream has a little for free, so that
//! small messages pass whatever others do. The bytes that make a message whole pass without asking.
//!
//! Streams that all wait for room would wait for each other. So a message has only so long to become whole, and longer the more
//! of it has come; a stream whose message takes longer ends with a reason and a delay, and gives its room back. Time in which
//! nobody reads from the stream does not count.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use bytes::Bytes;
use http_body::{Body as _, Frame, SizeHint};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tonic::Status;
use tonic::body::Body;
use tonic::codegen::http::Request;
use tower::{Layer, Service};

use crate::error::{Reason, Refusal};
use crate::limits;
use crate::store::clock::Clock;

use super::connection::{ConnectionShare, Timer, timer};
use super::refused;

/// Puts request bodies under the budget.
#[derive(Clone)]
pub(super) struct ReceiveLayer {
    all: Arc<Semaphore>,
    clock: Clock,
}

/// A service whose request bodies are under the budget.
#[derive(Clone)]
pub(super) struct Receive<S> {
    inner: S,
    layer: ReceiveLayer,
}

impl ReceiveLayer {
    pub(super) fn new(clock: Clock) -> Self {
        Self { all: Arc::new(Semaphore::new(limits::RECEIVE_BYTES_MAX)), clock }
    }
}

impl<S> Layer<S> for ReceiveLayer {
    type Service = Receive<S>;

    fn layer(&self, inner: S) -> Receive<S> {
        Receive { inner, layer: self.clone() }
    }
}

impl<S: Service<Request<Body>>> Service<Request<Body>> for Receive<S> {
    type Response = S::Response;
    type Error = S::Error;
    type Future = S::Future;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(context)
    }

    fn call(&mut self, request: Request<Body>) -> S::Future {
        let of_connection = request.extensions().get::<ConnectionShare>().map(|share| Arc::clone(&share.receive));
        let budgets = of_connection.into_iter().chain([Arc::clone(&self.layer.all)]).collect();
        let clock = self.layer.clock.clone();
        self.inner.call(request.map(|body| Body::new(ReceivedBody::new(body, budgets, clock))))
    }
}

/// Where in the framing of gRPC a stream of bytes stands.
#[derive(Debug, Default)]
struct Framing {
    header: [u8; 5],
    header_bytes: usize,
    /// Bytes of the message that are still to come, once its header is there.
    left: usize,
    /// Bytes that have come of a message that is not whole.
    partial: usize,
}

impl Framing {
    /// Takes what has come; true if that made a message whole.
    fn take(&mut self, mut bytes: &[u8]) -> bool {
        let mut some_whole = false;
        while !bytes.is_empty() {
            let taken = if self.header_bytes < self.header.len() {
                let taken = bytes.len().min(self.header.len() - self.header_bytes);
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
            if self.header_bytes == self.header.len() && self.left == 0 {
                *self = Self::default();
                some_whole = true;
            }
        }
        some_whole
    }
}

type Permits = Vec<OwnedSemaphorePermit>;
type Acquire = Pin<Box<dyn Future<Output = Permits> + Send>>;

/// A request's body whose partial messages are under the budget.
struct ReceivedBody {
    body: Body,
    budgets: Vec<Arc<Semaphore>>,
    clock: Clock,
    framing: Framing,
    /// Room that is held, in each of the budgets.
    held: Permits,
    held_bytes: usize,
    /// A frame that waits for room.
    waiting: Option<(Frame<Bytes>, usize, Acquire)>,
    /// How long the message that is not whole has been waited for before now.
    waited_ms: u64,
    /// Since when this wait lasts, and what wakes when that is too long.
    wait: Option<(u64, Timer)>,
}

impl ReceivedBody {
    fn new(body: Body, budgets: Vec<Arc<Semaphore>>, clock: Clock) -> Self {
        Self {
            body,
            budgets,
            clock,
            framing: Framing::default(),
            held: Permits::new(),
            held_bytes: 0,
            waiting: None,
            waited_ms: 0,
            wait: None,
        }
    }

    /// Whoever reads the body has taken all whole messages out of what came before.
    fn give_back(&mut self) {
        let needed = self.framing.partial.saturating_sub(limits::RECEIVE_STREAM_FREE_BYTES);
        let surplus = self.held_bytes.saturating_sub(needed);
        if surplus == self.held_bytes {
            self.held.clear();
        } else if surplus > 0 {
            self.held.iter_mut().for_each(|permit| drop(permit.split(surplus)));
        }
        self.held_bytes -= surplus;
    }

    /// Takes a frame into account. If what it leaves of a message has no room, the frame waits.
    fn account(&mut self, frame: Frame<Bytes>) -> Option<Frame<Bytes>> {
        if self.framing.take(frame.data_ref().map_or(&[][..], |data| data)) {
            self.waited_ms = 0;
        }
        let needed = self.framing.partial.saturating_sub(limits::RECEIVE_STREAM_FREE_BYTES);
        let more = needed.saturating_sub(self.held_bytes);
        if more == 0 {
            return Some(frame);
        }
        let count = u32::try_from(more).unwrap_or(u32::MAX);
        let at_once: Permits =
            self.budgets.iter().map_while(|budget| Arc::clone(budget).try_acquire_many_owned(count).ok()).collect();
        if at_once.len() == self.budgets.len() {
            self.hold(at_once, more);
            return Some(frame);
        }
        drop(at_once);
        let budgets = self.budgets.clone();
        let acquire = Box::pin(async move {
            let mut permits = Permits::new();
            for budget in budgets {
                // Budgets are never closed.
                permits.extend(budget.acquire_many_owned(count).await.ok());
            }
            permits
        });
        self.waiting = Some((frame, more, acquire));
        None
    }

    fn hold(&mut self, permits: Permits, bytes: usize) {
        if self.held.is_empty() {
            self.held = permits;
        } else {
            self.held.iter_mut().zip(permits).for_each(|(held, more)| held.merge(more));
        }
        self.held_bytes += bytes;
    }

    /// Whether a message that is not whole has been waited for too long.
    fn poll_too_slow(&mut self, context: &mut Context<'_>) -> Poll<Status> {
        if self.framing.partial == 0 {
            self.wait = None;
            return Poll::Pending;
        }
        let now_ms = self.clock.now_ms();
        let patience_ms =
            limits::RECEIVE_MESSAGE_MS_MIN + self.framing.partial as u64 / limits::RECEIVE_BYTES_PER_MS_MIN;
        let left_ms = patience_ms.saturating_sub(self.waited_ms);
        let clock = &self.clock;
        let (_, timer) = self.wait.get_or_insert_with(|| (now_ms, timer(clock, now_ms.saturating_add(left_ms))));
        if timer.as_mut().poll(context).is_pending() {
            return Poll::Pending;
        }
        let message = "a message has been on its way for too long; send it again over a connection that carries it";
        let refusal = Refusal::new(Reason::MessageTooSlow, message).retry_after_ms(limits::RECEIVE_RETRY_AFTER_MS);
        Poll::Ready(refused(refusal))
    }

    /// Something has come, or will be asked for later.
    fn stop_waiting(&mut self) {
        if let Some((since_ms, _)) = self.wait.take() {
            self.waited_ms += self.clock.now_ms().saturating_sub(since_ms);
        }
    }

    fn poll_next(&mut self, context: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        if self.waiting.is_none() {
            self.give_back();
            match Pin::new(&mut self.body).poll_frame(context) {
                Poll::Ready(Some(Ok(frame))) => {
                    if let Some(frame) = self.account(frame) {
                        return Poll::Ready(Some(Ok(frame)));
                    }
                }
                Poll::Ready(other) => return Poll::Ready(other),
                Poll::Pending => return Poll::Pending,
            }
        }
        let Some((frame, more, mut acquire)) = self.waiting.take() else { return Poll::Pending };
        match acquire.as_mut().poll(context) {
            Poll::Ready(permits) => {
                self.hold(permits, more);
                Poll::Ready(Some(Ok(frame)))
            }
            Poll::Pending => {
                self.waiting = Some((frame, more, acquire));
                Poll::Pending
            }
        }
    }
}

impl http_body::Body for ReceivedBody {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        match self.poll_next(context) {
            Poll::Ready(next) => {
                self.stop_waiting();
                Poll::Ready(next)
            }
            Poll::Pending => self.poll_too_slow(context).map(|status| {
                // What it held must not wait for its reader to let go.
                (self.held, self.held_bytes, self.waiting) = (Permits::new(), 0, None);
                Some(Err(status))
            }),
        }
    }

    fn is_end_stream(&self) -> bool {
        self.waiting.is_none() && self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

    use std::collections::VecDeque;
    use std::time::Duration;

    use futures_util::FutureExt;
    use futures_util::future::poll_fn;
    use parking_lot::Mutex;

    use super::*;

    /// A body whose frames the test puts in.
    #[derive(Clone, Default)]
    struct Frames(Arc<Mutex<VecDeque<Bytes>>>);

    impl http_body::Body for Frames {
        type Data = Bytes;
        type Error = Status;

        fn poll_frame(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
            self.0.lock().pop_front().map_or(Poll::Pending, |data| Poll::Ready(Some(Ok(Frame::data(data)))))
        }
    }

    struct Stream {
        frames: Frames,
        body: ReceivedBody,
    }

    impl Stream {
        fn new(budget: &Arc<Semaphore>, clock: &Clock) -> Self {
            let frames = Frames::default();
            let body = ReceivedBody::new(Body::new(frames.clone()), vec![Arc::clone(budget)], clock.clone());
            Self { frames, body }
        }

        /// How many bytes come next, or why the stream ends; none: nothing yet.
        fn next(&mut self) -> Option<Result<usize, Status>> {
            let next = poll_fn(|context| Pin::new(&mut self.body).poll_frame(context)).now_or_never()?.unwrap();
            Some(next.map(|frame| frame.into_data().unwrap().len()))
        }

        fn send(&mut self, bytes: Vec<u8>) -> Option<Result<usize, Status>> {
            self.frames.0.lock().push_back(bytes.into());
            self.next()
        }
    }

    /// The beginning of a message that claims a length, with so much of it.
    fn message(claimed: u32, sent: usize) -> Vec<u8> {
        let mut bytes = vec![0];
        bytes.extend(claimed.to_be_bytes());
        bytes.resize(5 + sent, 7);
        bytes
    }

    const FREE: usize = limits::RECEIVE_STREAM_FREE_BYTES;

    #[test]
    fn the_framing_is_followed_however_bytes_are_cut() {
        let mut bytes = message(3, 3);
        bytes.extend(message(0, 0));
        bytes.extend(message(70_000, 70_000));
        bytes.extend(message(9, 4));
        for size in [1, 2, 4, 5, 6, 7, 1000, bytes.len()] {
            let mut framing = Framing::default();
            let whole = bytes.chunks(size).filter(|chunk| framing.take(chunk)).count();
            assert!(whole >= 1 && framing.partial == 9 && framing.left == 5, "{framing:?}");
        }
    }

    #[test]
    fn room_is_taken_for_what_has_come_and_not_for_what_is_claimed() {
        let (budget, clock) = (Arc::new(Semaphore::new(1000)), Clock::manual());
        let mut stream = Stream::new(&budget, &clock);
        assert_eq!(stream.send(message(u32::MAX, 0)).unwrap().unwrap(), 5);
        assert_eq!(budget.available_permits(), 1000);
        assert_eq!(stream.send(vec![7; FREE]).unwrap().unwrap(), FREE);
        assert_eq!(budget.available_permits(), 1000 - 5);
        drop(stream);
        assert_eq!(budget.available_permits(), 1000);
    }

    #[test]
    fn a_frame_waits_for_room_and_what_makes_a_message_whole_does_not() {
        let (budget, clock) = (Arc::new(Semaphore::new(1000)), Clock::manual());
        let (mut one, mut two) = (Stream::new(&budget, &clock), Stream::new(&budget, &clock));
        let whole = FREE + 80_000;
        let claimed = u32::try_from(whole).unwrap();
        assert!(one.send(message(claimed, FREE + 600)).is_some());
        assert!(two.send(message(claimed, FREE + 300)).is_some());
        assert!(two.send(vec![7; 300]).is_none(), "there is no room");
        let rest = whole - FREE - 600;
        assert!(one.send(vec![7; rest]).is_some(), "it is whole");
        assert!(two.next().is_none(), "who reads may hold it still");
        assert!(one.next().is_none());
        assert_eq!(two.next().unwrap().unwrap(), 300, "it has been read, and its room came back");
        assert_eq!(budget.available_permits(), 1000 - 605);
    }

    #[test]
    fn a_message_that_is_never_whole_ends_its_stream() {
        let (budget, clock) = (Arc::new(Semaphore::new(1_000_000)), Clock::manual());
        let mut stream = Stream::new(&budget, &clock);
        assert!(stream.next().is_none());
        clock.advance(Duration::from_secs(100_000));
        assert!(stream.next().is_none(), "between messages it may be silent");
        assert!(stream.send(message(1_000_000, 500_000)).is_some());
        clock.advance(Duration::from_secs(100_000));
        assert!(stream.next().is_none(), "nobody has waited for it until now");
        let patience_ms = limits::RECEIVE_MESSAGE_MS_MIN + 500_005 / limits::RECEIVE_BYTES_PER_MS_MIN;
        clock.advance(Duration::from_millis(patience_ms - 1));
        assert!(stream.next().is_none());
        assert!(stream.send(vec![7]).is_some(), "slow drips count for what they bring");
        assert!(stream.next().is_none());
        clock.advance(Duration::from_millis(1));
        let status = stream.next().unwrap().unwrap_err();
        assert_eq!(status.code(), tonic::Code::ResourceExhausted);
        assert_eq!(budget.available_permits(), 1_000_000);
    }
}
