//! What is on its way to trainers: bounded in bytes, for each of them, so that many small messages may be ahead of its reader, or
//! few large ones; and for all of them together.
//!
//! A small part of it each has for itself. Whatever is beyond, and a unit before it is put together, waits while all of them have
//! as much as they may, and meanwhile who has not read for [`limits::TRAINER_UNREAD_MS_MAX`] is let go, one after another, until
//! there is room again. Where nobody waits, nobody is let go for being slow.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::task::{Context, Poll};

use futures_util::Stream;
use parking_lot::Mutex;
use prost::Message;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc, watch};
use tonic::Status;

use crate::limits;
use crate::proto::v1;
use crate::store::clock::Clock;

use super::connection::Cut;

type Response = Result<v1::SubscribeResponse, Status>;

/// What may be on its way to all trainers.
#[derive(Clone)]
pub struct TrainersRoom {
    bytes: Arc<Semaphore>,
    most_bytes: usize,
    /// Messages that wait for it.
    waiting: watch::Sender<usize>,
    /// Whoever is let go has this until its room is free.
    letting_go: Arc<Semaphore>,
    clock: Clock,
}

impl TrainersRoom {
    /// Room for so many bytes.
    #[must_use]
    pub fn new(most_bytes: usize, clock: Clock) -> Self {
        let (bytes, letting_go) = (Arc::new(Semaphore::new(most_bytes)), Arc::new(Semaphore::new(1)));
        Self { bytes, most_bytes, waiting: watch::Sender::new(0), letting_go, clock }
    }

    /// Whether somebody waits for room that has not come: all there is goes to who waits first.
    fn is_short(&self) -> bool {
        *self.waiting.borrow() > 0 && self.bytes.available_permits() == 0
    }
}

/// A message that waits for room.
struct Waiting<'a>(&'a watch::Sender<usize>);

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.0.send_modify(|waiting| *waiting -= 1);
    }
}

/// A message and its room.
type Sent = (v1::SubscribeResponse, Room);

/// What both ends of a stream share.
struct Line {
    all: TrainersRoom,
    messages: Mutex<mpsc::Receiver<Sent>>,
    /// How it ends, once all messages have been taken.
    end: Mutex<Option<Status>>,
    room: Arc<Semaphore>,
    free: Arc<Semaphore>,
    /// What it has of the room of all.
    shared_bytes: Arc<AtomicUsize>,
    /// When it last took a message, or began to have such room.
    moved_at_ms: AtomicU64,
}

/// Room of a message that is on its way: what it takes itself, and what it comes from.
struct Room {
    _own: OwnedSemaphorePermit,
    _from: Source,
}

/// Where the room for a message, or for all messages of a unit, comes from.
#[expect(dead_code, reason = "it gives the room back when it is dropped")]
enum Source {
    Free(OwnedSemaphorePermit),
    All(Arc<SharedRoom>),
}

/// Room of all, which one stream has.
pub(super) struct SharedRoom {
    permit: OwnedSemaphorePermit,
    /// What the stream has in all.
    shared_bytes: Arc<AtomicUsize>,
}

impl Drop for SharedRoom {
    fn drop(&mut self) {
        self.shared_bytes.fetch_sub(self.permit.num_permits(), Ordering::Relaxed);
    }
}

/// Where a subscription puts what is to be sent.
#[derive(Clone)]
pub(super) struct Outgoing {
    sender: mpsc::Sender<Sent>,
    line: Arc<Line>,
}

/// Lets go of a stream that does not read.
pub(super) struct Guard {
    line: Arc<Line>,
    /// Closed when the transport has let go of it.
    here: watch::Sender<()>,
}

/// What the transport takes, as fast as it is read.
pub(super) struct Responses {
    line: Arc<Line>,
    /// The room of what it took last: it has that until it asks for more.
    taken: Option<Room>,
    _here: watch::Receiver<()>,
}

/// Both ends of a stream to a trainer, and who watches it.
pub(super) fn stream(all: &TrainersRoom) -> (Outgoing, Guard, Responses) {
    let (sender, messages) = mpsc::channel(limits::TRAINER_MESSAGES_OUTSTANDING_MAX);
    let line = Arc::new(Line {
        all: all.clone(),
        messages: Mutex::new(messages),
        end: Mutex::default(),
        room: Arc::new(Semaphore::new(limits::TRAINER_BYTES_OUTSTANDING_MAX)),
        free: Arc::new(Semaphore::new(limits::TRAINER_BYTES_FREE)),
        shared_bytes: Arc::default(),
        moved_at_ms: AtomicU64::new(0),
    });
    let (watched, here) = watch::channel(());
    let guard = Guard { line: Arc::clone(&line), here: watched };
    (Outgoing { sender, line: Arc::clone(&line) }, guard, Responses { line, taken: None, _here: here })
}

impl Line {
    /// Says how it ends when all messages have been taken. The first that is said holds.
    fn end(&self, status: Status) {
        self.end.lock().get_or_insert(status);
    }

    /// Takes nothing more, and lets go of what waits.
    fn close(&self) {
        self.room.close();
        let mut messages = self.messages.lock();
        messages.close();
        while messages.try_recv().is_ok() {}
    }

    fn moved(&self) {
        self.moved_at_ms.store(self.all.clock.now_ms(), Ordering::Relaxed);
    }

    /// When it has had room of all for too long without reading; none: it has none.
    fn too_long_at_ms(&self) -> Option<u64> {
        let has = self.shared_bytes.load(Ordering::Relaxed) > 0;
        has.then(|| self.moved_at_ms.load(Ordering::Relaxed).saturating_add(limits::TRAINER_UNREAD_MS_MAX))
    }

    /// Room for a message of this unit, or of none; waits for it. None if nobody takes it any more.
    async fn room(&self, bytes: usize, unit: Option<&Arc<SharedRoom>>) -> Option<Room> {
        let bytes = bytes.clamp(1, limits::TRAINER_BYTES_OUTSTANDING_MAX);
        let count = u32::try_from(bytes).unwrap_or(u32::MAX);
        let own = Arc::clone(&self.room).acquire_many_owned(count).await.ok()?;
        let from = if let Some(unit) = unit {
            Source::All(Arc::clone(unit))
        } else if let Ok(free) = Arc::clone(&self.free).try_acquire_many_owned(count) {
            Source::Free(free)
        } else {
            Source::All(self.shared_room(bytes).await?)
        };
        Some(Room { _own: own, _from: from })
    }

    /// Room of all; waits for it.
    async fn shared_room(&self, bytes: usize) -> Option<Arc<SharedRoom>> {
        let count = u32::try_from(bytes).unwrap_or(u32::MAX);
        let permit = match Arc::clone(&self.all.bytes).try_acquire_many_owned(count) {
            Ok(permit) => permit,
            Err(_) => {
                self.all.waiting.send_modify(|waiting| *waiting += 1);
                let _waiting = Waiting(&self.all.waiting);
                Arc::clone(&self.all.bytes).acquire_many_owned(count).await.ok()?
            }
        };
        if self.shared_bytes.fetch_add(bytes, Ordering::Relaxed) == 0 {
            self.moved();
        }
        Some(Arc::new(SharedRoom { permit, shared_bytes: Arc::clone(&self.shared_bytes) }))
    }
}

impl Outgoing {
    /// Sends a message of a unit that has room, or of none; waits for room. False if nobody takes it any more.
    pub(super) async fn send(&self, response: v1::SubscribeResponse, unit: Option<&Arc<SharedRoom>>) -> bool {
        let room = tokio::select! {
            room = self.line.room(response.encoded_len(), unit) => room,
            () = self.closed() => None,
        };
        let Some(room) = room else { return false };
        self.sender.send((response, room)).await.is_ok()
    }

    /// Waits for room for a unit that is put together to be sent, whose longest row takes so much: for that row and another, whose
    /// last messages may not have left, and for a message as the transport has it. Its messages need none besides. None if
    /// nobody takes it any more.
    pub(super) async fn unit_room(&self, row_bytes: usize) -> Option<Arc<SharedRoom>> {
        let bytes = 2 * (row_bytes + limits::UNIT_MESSAGE_BYTES_MAX);
        tokio::select! {
            room = self.line.shared_room(bytes.min(self.line.all.most_bytes)) => room,
            () = self.closed() => None,
        }
    }

    /// Says how the stream ends when all messages have been taken, if somebody is there to hear it.
    pub(super) fn end(&self, status: Status) {
        self.line.end(status);
    }

    /// Ends the stream so at once: what has not left will not.
    pub(super) fn cut(&self, status: Status) {
        self.line.end(status);
        self.line.close();
    }

    /// Waits until nobody takes anything any more.
    pub(super) async fn closed(&self) {
        self.sender.closed().await;
    }
}

impl Guard {
    /// Ends the stream with this if it reads nothing for too long while it has room that others wait for; and its connection, if
    /// the transport cannot let go of what it has taken. Done when the stream is.
    pub(super) async fn watch(self, too_slow: Status, connection: Option<Arc<Cut>>) {
        let turn = tokio::select! {
            turn = self.unread_too_long() => turn,
            () = self.here.closed() => return,
        };
        self.line.end(too_slow);
        self.line.close();
        drop(turn);
        let clock = &self.line.all.clock;
        tokio::select! {
            () = self.here.closed() => {}
            () = clock.wait_until(Some(clock.now_ms().saturating_add(limits::TRAINER_UNREAD_MS_MAX))) => {
                connection.iter().for_each(|connection| connection.cut());
            }
        }
    }

    /// Waits until nothing was read for too long, with room that others wait for. Others that have done the same wait until what
    /// comes out of this is dropped, and go on only if there is still too little room.
    async fn unread_too_long(&self) -> Option<OwnedSemaphorePermit> {
        let (line, all) = (&self.line, &self.line.all);
        let mut waiting = all.waiting.subscribe();
        loop {
            // The sender is here, too.
            let _ = waiting.wait_for(|waiting| *waiting > 0).await;
            let is_over = || line.too_long_at_ms().is_some_and(|at_ms| at_ms <= all.clock.now_ms());
            if is_over() {
                let turn = Arc::clone(&all.letting_go).acquire_owned().await.ok();
                if is_over() && all.is_short() {
                    return turn;
                }
            }
            let now_ms = all.clock.now_ms();
            let again_ms = line.too_long_at_ms().filter(|at_ms| *at_ms > now_ms);
            let again_ms = again_ms.unwrap_or(now_ms.saturating_add(limits::TRAINER_UNREAD_MS_MAX));
            tokio::select! {
                () = all.clock.wait_until(Some(again_ms)) => {}
                _ = waiting.wait_for(|waiting| *waiting == 0) => {}
            }
        }
    }
}

impl Stream for Responses {
    type Item = Response;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Response>> {
        self.taken = None;
        let next = self.line.messages.lock().poll_recv(context);
        next.map(|next| match next {
            Some((response, room)) => {
                self.line.moved();
                self.taken = Some(room);
                Some(Ok(response))
            }
            None => self.line.end.lock().take().map(Err),
        })
    }
}

impl Drop for Responses {
    fn drop(&mut self) {
        self.line.close();
    }
}

#[cfg(test)]
#[path = "outgoing_tests.rs"]
mod tests;
