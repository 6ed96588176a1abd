//! Batches that wait for room, and answers that wait to leave.

use std::pin::pin;

use futures_util::FutureExt;
use tokio::sync::watch;

use super::*;
use crate::log::memory::MemoryLog;
use crate::rpc::receive::WholeRequest;
use crate::store::clock::Clock;
use crate::store::sequencer::Command;
use crate::store::{Eviction, Store, StoreOptions};
use crate::telemetry::{Readiness, Telemetry};

/// What services share, and what they ask of the sequencing task, which is not there.
fn shared() -> (Shared, mpsc::Receiver<Command>) {
    let log = Arc::new(MemoryLog::forgetting());
    let options = StoreOptions {
        clock: Clock::manual(),
        telemetry: Telemetry::new(),
        memory_budget_bytes: 1 << 20,
        restart_grace_ms: 0,
        eviction: Eviction::default(),
    };
    let (store, commands) = Store::new(options);
    store.open_log(log, Position::default());
    let readiness = Arc::new(Readiness::starting("a test"));
    (Shared::new(store, Arc::new(watch::Sender::new(false)), readiness), commands)
}

/// The longest answer to a seal.
fn long_answer() -> Outgoing {
    let missing = v1::MissingCall { call_id: "x".repeat(50), ..v1::MissingCall::default() };
    let missing = vec![missing; limits::SEAL_LISTED_MAX];
    let agents_without_list = vec!["y".repeat(50); limits::SEAL_LISTED_MAX];
    let seal = v1::SealStatus { missing, agents_without_list, ..v1::SealStatus::default() };
    let answer = v1::Answer { seal: Some(seal), ..v1::Answer::default() };
    let response = v1::ReportResponse { response: Some(report_response::Response::Answer(answer)) };
    Outgoing::new(response, Position::default(), None)
}

/// As many as there are places for would be gigabytes.
#[tokio::test]
async fn answers_that_wait_are_bounded_by_what_they_hold() {
    let (shared, _commands) = shared();
    let full = shared.answers.available_permits();
    let stream = || ReportStream::new(shared.clone(), Messages::none(shared.store.clock().clone()));
    let mut streams: Vec<_> = (0..8).map(|_| stream()).collect();
    let one_bytes = long_answer().bytes;
    let (mut of_all, mut free) = (0, 0);
    for stream in &mut streams {
        while let Some(room) = stream.room() {
            assert!(stream.outgoing.len() < limits::STREAM_ANSWERS_OUTSTANDING_MAX);
            (of_all, free) = if room.0.is_some() { (of_all + 1, free) } else { (of_all, free + 1) };
            stream.put(long_answer(), Some(room));
        }
        assert!(!stream.outgoing.is_empty(), "whatever others hold, one may always be under way");
    }
    assert_eq!(shared.answers.available_permits(), full - of_all * one_bytes);
    assert!(of_all * one_bytes > full - limits::ANSWER_BYTES_MAX);
    assert!(free * one_bytes < streams.len() * (limits::STREAM_ANSWERS_FREE_BYTES + limits::ANSWER_BYTES_MAX));
    drop(streams);
    assert_eq!(shared.answers.available_permits(), full);
}

/// Batches that each held room for some of their requests and waited for more would wait for each other for ever.
#[tokio::test]
async fn a_batch_begins_when_there_is_room_for_all_of_it() {
    // Nobody answers the commands, so that a batch stops where it asks for its first rollout.
    let (shared, mut commands) = shared();
    let store = Arc::clone(&shared.store);
    let request = || v1::ReportRequest {
        rollout: Some(v1::RolloutRef { run_id: "run".into(), rollout_id: "x".into(), ..v1::RolloutRef::default() }),
        event: Some(report_request::Event::Heartbeat(v1::Heartbeat {})),
        ..v1::ReportRequest::default()
    };
    let batch = || WholeRequest::new(v1::ReportBatchRequest { requests: vec![request(), request()] }.encode_to_vec());
    let _taken = store.permit(store.edge().in_flight - 3 * weight(&request())).await;
    let (mut one, mut two) = (pin!(shared.answer_batch(batch())), pin!(shared.answer_batch(batch())));
    assert!(one.as_mut().now_or_never().is_none() && two.as_mut().now_or_never().is_none());
    assert!(commands.try_recv().is_ok(), "the first has room");
    assert!(commands.try_recv().is_err(), "the second has room for one request, not for both");
}
