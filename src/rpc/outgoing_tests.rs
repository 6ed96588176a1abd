//! Trainers that read, and trainers that do not.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::pin::pin;
use std::time::Duration;

use futures_util::{FutureExt as _, StreamExt as _};
use v1::subscribe_response::Response as Message;

use super::*;

const LARGE_BYTES: usize = limits::UNIT_MESSAGE_BYTES_MAX;

fn message(bytes: usize) -> v1::SubscribeResponse {
    let part = v1::UnitPart { unit_id: "x".repeat(bytes - 20), ..v1::UnitPart::default() };
    v1::SubscribeResponse { response: Some(Message::UnitPart(part)) }
}

/// Whether a message is on its way at once.
fn sends(outgoing: &Outgoing, bytes: usize) -> bool {
    outgoing.send(message(bytes), None).now_or_never() == Some(true)
}

fn too_slow() -> Status {
    Status::resource_exhausted("too slow")
}

#[tokio::test]
async fn small_messages_always_pass_and_large_ones_wait_for_what_all_may_have() {
    let all = TrainersRoom::new(3 * LARGE_BYTES, Clock::manual());
    let ((one, _one, mut reads), (two, _two, _unread)) = (stream(&all), stream(&all));
    assert!(sends(&two, LARGE_BYTES) && sends(&two, LARGE_BYTES) && sends(&one, LARGE_BYTES));
    let mut waits = Box::pin(one.send(message(LARGE_BYTES), None));
    assert!(waits.as_mut().now_or_never().is_none());
    assert_eq!(*all.waiting.borrow(), 1);
    assert!(sends(&two, limits::TRAINER_BYTES_FREE / 2) && !sends(&two, LARGE_BYTES));
    assert!(reads.next().await.unwrap().is_ok());
    assert!(waits.as_mut().now_or_never().is_none(), "the transport has it until it asks for more");
    assert!(reads.next().now_or_never().is_none());
    assert_eq!(waits.now_or_never(), Some(true));
    assert_eq!(*all.waiting.borrow(), 0);
    drop((one, two, reads));
    assert!((LARGE_BYTES..2 * LARGE_BYTES).contains(&all.bytes.available_permits()));
    drop(_unread);
    assert_eq!(all.bytes.available_permits(), 3 * LARGE_BYTES);
}

#[tokio::test]
async fn a_unit_has_its_room_before_it_is_put_together_and_until_its_last_message_has_left() {
    let all = TrainersRoom::new(10 * LARGE_BYTES, Clock::manual());
    let ((one, _one, mut reads), (two, _two, _unread)) = (stream(&all), stream(&all));
    let unit = one.unit_room(3 * LARGE_BYTES).await.unwrap();
    assert_eq!(all.bytes.available_permits(), 2 * LARGE_BYTES);
    let mut waits = Box::pin(two.unit_room(LARGE_BYTES));
    assert!(waits.as_mut().now_or_never().is_none());
    for _ in 0..3 {
        assert_eq!(one.send(message(LARGE_BYTES), Some(&unit)).now_or_never(), Some(true), "who has room goes on");
    }
    drop(unit);
    for _ in 0..3 {
        assert!(reads.next().await.unwrap().is_ok() && waits.as_mut().now_or_never().is_none());
    }
    assert!(reads.next().now_or_never().is_none());
    assert!(waits.await.is_some());
}

#[tokio::test]
async fn who_reads_nothing_is_let_go_once_others_wait_and_no_more_of_them_than_need_be() {
    let clock = Clock::manual();
    let all = TrainersRoom::new(4 * LARGE_BYTES, clock.clone());
    let (first, guards_first, mut first_responses) = stream(&all);
    let (second, guards_second, mut second_responses) = stream(&all);
    let (other, guards_other, mut reads) = stream(&all);
    for unread in [&first, &second] {
        assert!(sends(unread, LARGE_BYTES) && sends(unread, LARGE_BYTES));
    }
    let connection = Arc::new(Cut::default());
    let mut guards_first = pin!(guards_first.watch(too_slow(), Some(Arc::clone(&connection))));
    let mut guards_second = pin!(guards_second.watch(too_slow(), None));
    let mut guards_other = pin!(guards_other.watch(too_slow(), None));
    let patience = Duration::from_millis(limits::TRAINER_UNREAD_MS_MAX);
    clock.advance(2 * patience);
    let mut turn = || {
        assert!(guards_first.as_mut().now_or_never().is_none() && guards_second.as_mut().now_or_never().is_none());
        assert!(guards_other.as_mut().now_or_never().is_none());
    };
    turn();
    assert!(first_responses.next().await.unwrap().is_ok(), "nobody waits, so all may be slow");
    let mut waits = pin!(other.send(message(LARGE_BYTES), None));
    assert!(waits.as_mut().now_or_never().is_none());
    turn();
    turn();
    assert_eq!(waits.now_or_never(), Some(true), "the second has read nothing all the while");
    let end = second_responses.next().await.unwrap().unwrap_err();
    assert_eq!(end.message(), "too slow");
    assert!(second_responses.next().await.is_none() && !sends(&second, 100));
    assert!(sends(&other, LARGE_BYTES) && !sends(&other, LARGE_BYTES));
    let mut waits = pin!(other.send(message(LARGE_BYTES), None));
    assert!(waits.as_mut().now_or_never().is_none());
    clock.advance(patience / 2);
    assert!(reads.next().await.unwrap().is_ok());
    clock.advance(patience / 2);
    assert!(guards_first.as_mut().now_or_never().is_none() && guards_other.as_mut().now_or_never().is_none());
    assert_eq!(waits.now_or_never(), Some(true), "the first has not read for so long, the other has");
    assert!(connection.check(&Context::from_waker(std::task::Waker::noop())).is_ok());
    // The transport has what it took, and nobody else can take that from it.
    clock.advance(patience);
    assert!(guards_first.now_or_never().is_some());
    assert!(connection.check(&Context::from_waker(std::task::Waker::noop())).is_err());
    drop(first);
}
