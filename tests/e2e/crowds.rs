//! Much at once, from one client: it costs others nothing, and leaves nothing behind.

use std::time::Duration;

use hedgerow::proto::v1::report_request::Event;
use hedgerow::proto::v1::subscribe_request::Request;
use hedgerow::proto::v1::subscribe_response::Response;
use hedgerow::proto::v1::{self, AckOutcome, DiscardDisposition};
use tonic::transport::Channel;

use crate::drain::get;
use crate::life::{attempt, discard, expecting, finish, finish_with, heartbeat, in_group, tags};
use crate::queue_taker::{Taker, rows};
use crate::service::{TestService, Trainer, about, call, subscription};

/// A connection into whose window little fits.
async fn narrow(service: &TestService) -> Channel {
    let address = format!("http://{}", service.running.grpc_address);
    let endpoint = Channel::from_shared(address).unwrap().initial_stream_window_size(65_535);
    endpoint.initial_connection_window_size(65_535).connect().await.unwrap()
}

#[tokio::test]
async fn any_number_of_acks_at_once_is_answered_however_late_the_answers_are_read() {
    let service = TestService::start().await;
    let mut trainer = Trainer::subscribe(narrow(&service).await, subscription("run", "trainers")).await.unwrap();
    let unit = |number: usize| format!("{number:0>1000}");
    const ACKS: usize = 1500;
    for number in 0..ACKS {
        let ids = vec![unit(number)];
        let request = match number % 2 {
            0 => Request::Ack(v1::Ack { unit_ids: ids, seek_count: 0 }),
            _ => Request::Nack(v1::Nack { unit_ids: ids, ..v1::Nack::default() }),
        };
        trainer.send(request).await;
    }
    let mut answered = 0;
    while answered < ACKS {
        if let Response::AckResult(result) = trainer.next().await.expect("the stream goes on").unwrap() {
            let expected = [AckOutcome::Unknown, AckOutcome::NotHeld][answered % 2];
            assert_eq!((result.entries[0].unit_id.clone(), result.entries[0].outcome()), (unit(answered), expected));
            answered += 1;
        }
    }
}

#[tokio::test]
async fn a_trainer_that_does_not_read_is_not_read_from_while_others_are_served() {
    let service = TestService::start().await;
    let mut worker = service.worker().await;
    let unread = Trainer::subscribe(narrow(&service).await, subscription("run", "unread")).await.unwrap();
    let requests = unread.requests.clone();
    // Each is as much as one acknowledgement may be, and there is no end of them.
    let unit_ids: Vec<String> = (0..hedgerow::limits::ACK_UNITS_MAX).map(|number| format!("{number:x}")).collect();
    let flood = tokio::spawn(async move {
        let ack = Request::Ack(v1::Ack { unit_ids, seek_count: 0 });
        while requests.send(v1::SubscribeRequest { request: Some(ack.clone()) }).await.is_ok() {}
    });
    let mut taker = Taker::join(&service, subscription("run", "trainers")).await;
    for round in 0..5 {
        let made = rows(&mut worker, "run", round * 5, 5, 5).await;
        taker.take_units(5).await;
        assert_eq!(taker.ack(&made).await, [AckOutcome::Acknowledged; 5]);
    }
    flood.abort();
}

#[tokio::test]
async fn what_has_ended_leaves_no_deadline_behind() {
    let service = TestService::start().await;
    let deadlines = || service.running.store.deadline_count();
    let mut worker = service.worker().await;
    let mut taker = Taker::join(&service, subscription("run", "trainers")).await;
    let made = rows(&mut worker, "run", 0, 3, 5).await;
    assert_eq!(deadlines(), 0, "no clock decides of what is finalised");
    taker.take_units(3).await;
    taker.ack(&made).await;
    let turns = [
        (about("run", "discarded"), discard("again", DiscardDisposition::Final), 0),
        (about("run", "open"), heartbeat(), 1),
        (about("run", "open"), Event::Call(call("a", "main", 1, &[1], &[2])), 1),
        (about("run", "open"), Event::Seal(expecting(2)), 1),
        (about("run", "open"), tags(&[("a", "b")]), 1),
        (in_group("open", "g"), heartbeat(), 1),
        (attempt(&in_group("open", "g"), 1), heartbeat(), 1),
        (attempt(&in_group("open", "g"), 1), finish(1.0), 0),
        (about("run", "waits"), finish_with(expecting(1), 1.0), 1),
        (about("gone", "one"), heartbeat(), 2),
        (about("gone", "two"), finish_with(expecting(1), 1.0), 3),
    ];
    for (step, (rollout, event, expected)) in turns.into_iter().enumerate() {
        worker.report(&rollout, event).await;
        assert_eq!(deadlines(), expected, "after step {step}");
    }
    let delete = v1::DeleteRunRequest { run_id: "gone".to_owned(), force: true };
    service.admin().await.delete_run(delete).await.unwrap();
    assert_eq!(deadlines(), 1);
    service.clock.advance(Duration::from_secs(600));
    while deadlines() > 0 {
        tokio::task::yield_now().await;
    }
}

#[tokio::test]
async fn the_metrics_say_how_many_consumers_are_connected() {
    let service = TestService::start().await;
    let series = |count| format!("hedgerow_consumers{{run=\"run\",consumer_group=\"trainers\"}} {count}\n");
    let mut takers = Vec::new();
    for count in [1, 2, 1, 0] {
        if count > takers.len() {
            takers.push(Taker::join(&service, subscription("run", "trainers")).await);
        } else {
            takers.pop();
        }
        while !get(&service, "/metrics").await.contains(&series(count)) {
            service.clock.advance(Duration::from_secs(1));
        }
    }
}
