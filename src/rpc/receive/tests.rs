//! Messages that come in parts, against budgets that are short.

//! Messages that come in pieces: whole ones come out however they were cut, and what is not whole holds no more than it may.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::collections::VecDeque;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use futures_util::FutureExt;
use futures_util::future::poll_fn;
use http_body::Frame;
use parking_lot::Mutex;
use tokio::sync::Semaphore;
use tonic::Status;
use tonic::body::Body;

use crate::error::{Reason, Refusal};
use crate::limits;
use crate::store::clock::Clock;

use super::gather::{Gather, Whole};
use super::lists::Shape;
use super::room::{ConnectionRoom, Room};

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
    gather: Gather,
}

/// A connection of its own, besides as many others.
fn connection(others: usize) -> Arc<ConnectionRoom> {
    Arc::new(ConnectionRoom::new(ALL_OWN, Arc::new(AtomicUsize::new(others))))
}

impl Stream {
    fn new(budget: &Arc<Semaphore>, connection: &Arc<ConnectionRoom>, clock: &Clock) -> Self {
        Self::of(Whole::HandedOn, budget, connection, clock)
    }

    fn of(becomes: Whole, budget: &Arc<Semaphore>, connection: &Arc<ConnectionRoom>, clock: &Clock) -> Self {
        let frames = Frames::default();
        let room = Room::new(Arc::clone(budget), Some(Arc::clone(connection)));
        let gather = Gather::new(
            Body::new(frames.clone()),
            limits::REQUEST_MESSAGE_BYTES_MAX,
            becomes,
            (room, None),
            clock.clone(),
        );
        Self { frames, gather }
    }

    /// Whole messages that come next, or why the stream ends; none: nothing yet.
    fn next(&mut self) -> Option<Result<Bytes, Status>> {
        poll_fn(|context| self.gather.poll_whole(context)).now_or_never().flatten()
    }

    fn send(&mut self, bytes: Vec<u8>) -> Option<Result<Bytes, Status>> {
        self.frames.0.lock().push_back(bytes.into());
        self.next()
    }
}

/// The beginning of a message that claims a length, with so much of it.
pub(super) fn message(claimed: u32, sent: usize) -> Vec<u8> {
    let mut bytes = vec![0];
    bytes.extend(claimed.to_be_bytes());
    bytes.extend((0..sent).map(|at| u8::try_from(at % 251).unwrap()));
    bytes
}

const NONE: &Shape = &Shape(&[]);

const OWN: usize = limits::RECEIVE_CONNECTION_OWN_BYTES_MAX;
const ALL_OWN: usize = 64 << 20;

#[test]
fn whole_messages_come_out_however_they_were_cut() {
    let (budget, clock) = (Arc::new(Semaphore::new(0)), Clock::manual());
    let messages: Vec<Vec<u8>> = [0, 7, 300_000, 1, 20_000].map(|size| message(size, size as usize)).into();
    let all = messages.concat();
    for size in [1, 5, 4095, 4096, 10_000, 299_999, all.len()] {
        let connection = connection(0);
        let mut stream = Stream::new(&budget, &connection, &clock);
        let mut out = Vec::new();
        for chunk in all.chunks(size) {
            stream.frames.0.lock().push_back(chunk.to_vec().into());
        }
        while let Some(whole) = stream.next() {
            out.extend(whole.unwrap());
        }
        assert!(out == all, "in pieces of {size}");
    }
}

#[test]
fn room_is_taken_for_what_has_come_and_not_for_what_is_claimed() {
    let (budget, clock, connection) = (Arc::new(Semaphore::new(1000)), Clock::manual(), connection(0));
    let mut stream = Stream::new(&budget, &connection, &clock);
    let claimed = u32::try_from(limits::REQUEST_MESSAGE_BYTES_MAX).unwrap();
    assert!(stream.send(message(claimed, 0)).is_none());
    assert!(stream.send(vec![7; OWN - 5]).is_none());
    assert_eq!(budget.available_permits(), 1000, "it is the connection's own");
    assert!(stream.send(vec![7; 5]).is_none());
    assert_eq!(budget.available_permits(), 1000 - 5);
    let mut other = Stream::new(&budget, &connection, &clock);
    assert!(other.send(message(claimed, 15)).is_none());
    assert_eq!(budget.available_permits(), 1000 - 25, "its streams share what is its own");
    drop((stream, other));
    assert_eq!(budget.available_permits(), 1000);
    assert!(stream_fits(&connection, &budget, &clock), "and what was its own came back");
}

fn stream_fits(connection: &Arc<ConnectionRoom>, budget: &Arc<Semaphore>, clock: &Clock) -> bool {
    let before = budget.available_permits();
    let mut stream = Stream::new(budget, connection, clock);
    stream.send(message(u32::try_from(OWN).unwrap(), OWN - 5)).is_none() && budget.available_permits() == before
}

#[test]
fn the_more_connections_there_are_the_less_each_has_for_itself() {
    let (budget, clock) = (Arc::new(Semaphore::new(1 << 20)), Clock::manual());
    let connection = connection(limits::GRPC_CONNECTIONS_MAX - 1);
    let own = ALL_OWN / limits::GRPC_CONNECTIONS_MAX;
    let mut stream = Stream::new(&budget, &connection, &clock);
    assert!(stream.send(message(10_000_000, own)).is_none());
    assert_eq!(budget.available_permits(), (1 << 20) - 5);
}

#[test]
fn what_has_no_room_waits_and_what_makes_a_message_whole_does_not() {
    let (budget, clock) = (Arc::new(Semaphore::new(1000)), Clock::manual());
    let (mut one, mut two) =
        (Stream::new(&budget, &connection(0), &clock), Stream::new(&budget, &connection(0), &clock));
    let claimed = u32::try_from(OWN + 80_000).unwrap();
    assert!(one.send(message(claimed, OWN + 595)).is_none());
    assert!(two.send(message(claimed, OWN + 295)).is_none());
    assert_eq!(budget.available_permits(), 100);
    assert!(two.send(vec![7; 300]).is_none());
    assert_eq!(budget.available_permits(), 0, "it waits for more than there is");
    let rest = OWN + 80_000 - OWN - 595;
    assert_eq!(one.send(vec![7; rest]).unwrap().unwrap().len(), OWN + 80_005, "it is whole");
    assert!(two.next().is_none(), "who reads may hold it still");
    assert!(one.next().is_none());
    assert!(two.next().is_none(), "it has room now, and is not whole");
    assert_eq!(budget.available_permits(), 1000 - 600);
    let rest = OWN + 80_000 - OWN - 595;
    assert_eq!(two.send(vec![7; rest]).unwrap().unwrap().len(), OWN + 80_005);
}

#[test]
fn a_message_that_is_never_whole_ends_its_stream() {
    let (budget, clock, connection) = (Arc::new(Semaphore::new(1_000_000)), Clock::manual(), connection(0));
    let mut stream = Stream::new(&budget, &connection, &clock);
    assert!(stream.next().is_none());
    clock.advance(Duration::from_secs(100_000));
    assert!(stream.next().is_none(), "between messages it may be silent");
    assert!(stream.send(message(1_000_000, 500_000)).is_none());
    let patience_ms = limits::RECEIVE_MESSAGE_MS_MIN + 500_005 / limits::RECEIVE_BYTES_PER_MS_MIN;
    clock.advance(Duration::from_millis(patience_ms - 1));
    assert!(stream.send(vec![7; 2048]).is_none(), "what comes counts");
    clock.advance(Duration::from_millis(2));
    assert!(stream.next().is_none());
    clock.advance(Duration::from_millis(1));
    let status = stream.next().unwrap().unwrap_err();
    assert_eq!(status.code(), tonic::Code::ResourceExhausted);
    assert_eq!(budget.available_permits(), 1_000_000);
    assert!(stream_fits(&connection, &budget, &clock));
}

#[test]
fn a_message_that_is_too_large_ends_its_stream_with_its_header() {
    let (budget, clock, connection) = (Arc::new(Semaphore::new(0)), Clock::manual(), connection(0));
    let mut stream = Stream::new(&budget, &connection, &clock);
    let most = u32::try_from(limits::REQUEST_MESSAGE_BYTES_MAX).unwrap();
    assert!(stream.send(message(most, 0)).is_none());
    let mut stream = Stream::new(&budget, &connection, &clock);
    let status = stream.send(message(most + 1, 0)).unwrap().unwrap_err();
    let info = tonic_types::StatusExt::get_details_error_info(&status).unwrap();
    assert_eq!((status.code(), info.reason.as_str()), (tonic::Code::ResourceExhausted, "message_too_large"));
}

#[test]
fn a_whole_message_of_a_request_that_does_not_end_keeps_its_room_and_ends() {
    let (budget, clock, connection) = (Arc::new(Semaphore::new(1000)), Clock::manual(), connection(0));
    let becomes = Whole::Held { lists: NONE, count: |_, message| if message.len() < 7 { Ok(0) } else { Err(small()) } };
    let mut one = Stream::of(becomes, &budget, &connection, &clock);
    assert_eq!(one.send(message(6, 6)).unwrap().unwrap().len(), 11);
    assert!(one.next().is_none());
    clock.advance(Duration::from_millis(limits::RECEIVE_MESSAGE_MS_MIN + 1));
    assert!(one.next().unwrap().is_err(), "it waits for the end as it would for a message");

    let becomes = Whole::Held { lists: NONE, count: |_, _| Ok(1500) };
    let mut two = Stream::of(becomes, &budget, &connection, &clock);
    let size = u32::try_from(OWN + 500).unwrap();
    assert!(two.send(message(size, size as usize)).is_none(), "there is no room for it");
    budget.add_permits(2000);
    assert_eq!(two.next().unwrap().unwrap().len(), OWN + 505);
    assert!(two.next().is_none());
    assert_eq!(budget.available_permits(), 3000 - 2005, "it is held, with what it takes decoded");
    drop(two);
    assert_eq!(budget.available_permits(), 3000);
    assert!(stream_fits(&connection, &budget, &clock));

    let becomes = Whole::Held { lists: NONE, count: |_, _| Err(small()) };
    let mut three = Stream::of(becomes, &budget, &connection, &clock);
    assert!(three.send(message(6, 6)).unwrap().is_err(), "it is not decoded");
}

fn small() -> Refusal {
    Refusal::new(Reason::OverLimit, "it must be small")
}
