//! Puts the parts of messages together.

use std::collections::VecDeque;
use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::{Bytes, BytesMut};
use http_body::{Body as _, Frame};
use tonic::Status;
use tonic::body::Body;

use crate::error::{Reason, Refusal};
use crate::limits;
use crate::rpc::connection::{Timer, timer};
use crate::rpc::refused;
use crate::rpc::unread::Reader;
use crate::store::clock::Clock;

use super::framing::{Broken, Ends, Framing, HEADER_BYTES};
use super::lists::Shape;
use super::room::{Room, Wanted};

/// Pieces shorter than this are copied: each would pin the buffer that it came in.
const PIECE_BYTES_MIN: usize = 4096;

/// What becomes of messages that are whole.
#[derive(Clone, Copy)]
pub(super) enum Whole {
    /// They are read at once, and their room is free.
    HandedOn,
    /// They are held until the request has ended, with their room, if they are good for it.
    Held {
        /// The lists in it.
        lists: &'static Shape,
        /// What they take decoded, besides the message's own bytes; an error if it must not be decoded.
        count: fn(&Shape, &[u8]) -> Result<usize, Refusal>,
    },
}

/// A request's body, of which whole messages come out.
pub(super) struct Gather {
    body: Body,
    most_bytes: usize,
    becomes: Whole,
    /// Bytes of whole messages that are held, and of their lists once they are decoded.
    kept: usize,
    room: Room,
    unread: Option<Reader>,
    /// Bytes that were handed on and may be in use still.
    in_use: usize,
    /// Bytes that have come and have no room yet: until then they count as unread.
    without_room: usize,
    clock: Clock,
    framing: Framing,
    /// Whole messages, one or several in each.
    whole: VecDeque<Bytes>,
    part: Part,
    /// The end of what has come, which waits for room.
    waiting: Option<(Bytes, Wanted)>,
    patience: Patience,
}

impl Gather {
    pub(super) fn new(
        body: Body,
        most_bytes: usize,
        becomes: Whole,
        (room, unread): (Room, Option<Reader>),
        clock: Clock,
    ) -> Self {
        Self {
            body,
            most_bytes,
            becomes,
            kept: 0,
            room,
            unread,
            in_use: 0,
            without_room: 0,
            clock,
            framing: Framing::default(),
            whole: VecDeque::new(),
            part: Part::default(),
            waiting: None,
            patience: Patience::default(),
        }
    }

    /// Whether whole messages have come that nobody has taken.
    pub(super) fn is_at_hand(&self) -> bool {
        !self.whole.is_empty()
    }

    /// The next whole messages with their headers, one after another without a gap; none at the stream's end.
    pub(super) fn poll_whole(&mut self, context: &mut Context<'_>) -> Poll<Option<Result<Bytes, Status>>> {
        loop {
            // What is held has to have its room first.
            let has_room = self.waiting.is_none() || matches!(self.becomes, Whole::HandedOn);
            if has_room && let Some(whole) = self.whole.pop_front() {
                self.patience.pause(&self.clock);
                return Poll::Ready(Some(Ok(whole)));
            }
            // Whoever reads has done with all whole messages from before.
            self.taken(0);
            if let Some((rest, mut wanted)) = self.waiting.take() {
                if !self.room.poll_wanted(&mut wanted, context) {
                    self.waiting = Some((rest, wanted));
                    break;
                }
                self.has_room(rest);
                continue;
            }
            self.room.shrink(self.outstanding());
            let frame = match &self.unread {
                Some(unread) => unread.poll_frame(&mut self.body, context),
                None => Pin::new(&mut self.body).poll_frame(context),
            };
            match frame {
                Poll::Ready(Some(Ok(frame))) => {
                    if let Ok(data) = frame.into_data()
                        && let Err(refusal) = self.arrived(data)
                    {
                        return Poll::Ready(Some(Err(self.end(refusal))));
                    }
                }
                Poll::Ready(Some(Err(broken))) => return Poll::Ready(Some(Err(broken))),
                Poll::Ready(None) if self.framing.partial() > 0 => {
                    let message = "the stream ended in the middle of a message";
                    return Poll::Ready(Some(Err(self.end(Refusal::new(Reason::InvalidValue, message)))));
                }
                Poll::Ready(None) => return Poll::Ready(None),
                Poll::Pending => break,
            }
        }
        self.patience.poll_over(&self.clock, self.outstanding(), context).map(|refusal| Some(Err(self.end(refusal))))
    }

    /// Bytes that need room: of a message that is not whole, and of those that are held.
    fn outstanding(&self) -> usize {
        self.framing.partial() + self.kept
    }

    /// Takes what has come. If what it leaves of a message has no room, that waits.
    fn arrived(&mut self, mut data: Bytes) -> Result<(), Refusal> {
        let came = data.len();
        let ends = match self.framing.take(&data, self.most_bytes) {
            Ok(ends) => ends,
            Err(broken) => {
                self.taken(came);
                return Err(refusal(&broken, self.most_bytes));
            }
        };
        // Whole messages count as unread while they are in use; what has room of its own does not.
        let in_use = ends.filter(|_| matches!(self.becomes, Whole::HandedOn)).map_or(0, |ends| ends.last);
        self.in_use = in_use;
        self.without_room = came - in_use;
        if let Some(Ends { first, last }) = ends {
            let before = self.whole.len();
            self.patience = Patience::default();
            if !self.part.is_empty() {
                self.whole.push_back(self.part.finish(&data.split_to(first)));
                let more = data.split_to(last - first);
                self.whole.extend((!more.is_empty()).then_some(more));
            } else {
                self.whole.push_back(data.split_to(last));
            }
            if let Whole::Held { lists, count } = self.becomes {
                for whole in self.whole.iter().skip(before) {
                    self.kept += whole.len() + count(lists, whole.get(HEADER_BYTES..).unwrap_or_default())?;
                }
            }
        }
        if data.is_empty() && matches!(self.becomes, Whole::HandedOn) {
            return Ok(());
        }
        match self.room.grow(self.outstanding()) {
            None => self.has_room(data),
            Some(wanted) => self.waiting = Some((data, wanted)),
        }
        Ok(())
    }

    /// What came last has room, and this is the end of it.
    fn has_room(&mut self, rest: Bytes) {
        self.part.push(rest);
        let bytes = std::mem::take(&mut self.without_room);
        if let Some(unread) = self.unread.as_ref().filter(|_| bytes > 0) {
            unread.taken(bytes);
        }
    }

    /// So much has come and need not be counted as unread any more, nor what was in use.
    fn taken(&mut self, bytes: usize) {
        let bytes = bytes + std::mem::take(&mut self.in_use);
        if let Some(unread) = self.unread.as_ref().filter(|_| bytes > 0) {
            unread.taken(bytes);
        }
    }

    /// Lets go of the body: what has come of it is read by nobody.
    fn let_go(&mut self) {
        let without_room = std::mem::take(&mut self.without_room);
        self.taken(without_room);
        if let Some(unread) = &self.unread {
            unread.drain(&mut self.body);
        }
        self.body = Body::empty();
        self.unread = None;
    }

    /// Gives everything back: it must not wait for the reader to let go.
    fn end(&mut self, refusal: Refusal) -> Status {
        (self.part, self.waiting, self.framing) = (Part::default(), None, Framing::default());
        self.kept = 0;
        self.whole.clear();
        self.room.shrink(0);
        self.let_go();
        refused(refusal)
    }
}

impl Drop for Gather {
    fn drop(&mut self) {
        self.let_go();
    }
}

/// The transport's reader takes whole messages, too.
impl http_body::Body for Gather {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        self.poll_whole(context).map(|whole| whole.map(|whole| whole.map(Frame::data)))
    }
}

fn refusal(broken: &Broken, most_bytes: usize) -> Refusal {
    match broken {
        Broken::TooLarge(claimed) => {
            let advice = "send long prompts as deltas, and many requests in parts";
            let message = format!("a message of {claimed} bytes; {most_bytes} is the most: {advice}");
            Refusal::new(Reason::MessageTooLarge, message)
        }
        Broken::Compressed => {
            Refusal::new(Reason::NotInThisRelease, "messages are taken as they are, not compressed").field("request")
        }
        Broken::NoMessage(first) => {
            let message = format!("what came is no message: it begins with {first}, not with 0 or 1");
            Refusal::new(Reason::InvalidValue, message)
        }
    }
}

/// What has come of a message that is not whole.
#[derive(Default)]
struct Part {
    pieces: Vec<Bytes>,
    /// Short pieces, one after another.
    tail: BytesMut,
}

impl Part {
    fn is_empty(&self) -> bool {
        self.pieces.is_empty() && self.tail.is_empty()
    }

    fn push(&mut self, piece: Bytes) {
        if piece.len() < PIECE_BYTES_MIN {
            self.tail.extend_from_slice(&piece);
        } else {
            if !self.tail.is_empty() {
                self.pieces.push(std::mem::take(&mut self.tail).freeze());
            }
            self.pieces.push(piece);
        }
    }

    /// The message, with what was missing.
    fn finish(&mut self, rest: &Bytes) -> Bytes {
        let Self { pieces, tail } = std::mem::take(self);
        let parts = || pieces.iter().map(|piece| &piece[..]).chain([&tail[..], &rest[..]]);
        let mut whole = BytesMut::with_capacity(parts().map(<[u8]>::len).sum());
        parts().for_each(|part| whole.extend_from_slice(part));
        whole.freeze()
    }
}

/// How long a message that is not whole has been waited for.
#[derive(Default)]
struct Patience {
    /// Before now.
    waited_ms: u64,
    /// Since when this wait lasts, and what wakes when that may be too long.
    wait: Option<(u64, Timer)>,
}

impl Patience {
    /// Something is handed on; what comes is asked for later.
    fn pause(&mut self, clock: &Clock) {
        if let Some((since_ms, _)) = self.wait.take() {
            self.waited_ms += clock.now_ms().saturating_sub(since_ms);
        }
    }

    /// Done when a message of which so much has come has been waited for too long.
    fn poll_over(&mut self, clock: &Clock, partial: usize, context: &mut Context<'_>) -> Poll<Refusal> {
        if partial == 0 {
            self.wait = None;
            return Poll::Pending;
        }
        let patience_ms = limits::RECEIVE_MESSAGE_MS_MIN + partial as u64 / limits::RECEIVE_BYTES_PER_MS_MIN;
        let left_ms = patience_ms.saturating_sub(self.waited_ms);
        let now_ms = clock.now_ms();
        let until = |since_ms: u64| since_ms.saturating_add(left_ms);
        let (since_ms, timer_to) = self.wait.get_or_insert_with(|| (now_ms, timer(clock, until(now_ms))));
        // More may have come since the timer was set, which gives more time.
        while timer_to.as_mut().poll(context).is_ready() {
            if now_ms >= until(*since_ms) {
                let message =
                    "a message has been on its way for too long; send it again over a connection that carries it";
                let refusal = Refusal::new(Reason::MessageTooSlow, message);
                return Poll::Ready(refusal.retry_after_ms(limits::RECEIVE_RETRY_AFTER_MS));
            }
            *timer_to = timer(clock, until(*since_ms));
        }
        Poll::Pending
    }
}
