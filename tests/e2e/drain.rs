//! A service that is told to stop: what was answered is delivered, streams end with a delay, nothing new is begun.

use std::sync::Arc;
use std::time::{Duration, Instant};

use hedgerow::log::memory::MemoryLog;
use hedgerow::proto::v1::harness_service_client::HarnessServiceClient;
use hedgerow::proto::v1::report_request::Event;
use hedgerow::proto::v1::subscribe_request::Request;
use hedgerow::proto::v1::trainer_service_client::TrainerServiceClient;
use hedgerow::proto::v1::{self, AckOutcome, AnswerOutcome};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_check_response::ServingStatus;
use tonic_health::pb::health_client::HealthClient;
use tonic_types::StatusExt;

use crate::queue_taker::{Taker, finish, reason, row, rows};
use crate::service::{TestService, about, call, subscription};

const SOON: Duration = Duration::from_secs(5);

/// A stream that the drain has ended: unavailable, for this reason, and when to come back.
fn is_drained(status: &tonic::Status) {
    assert_eq!((status.code(), reason(status).as_str()), (tonic::Code::Unavailable, "draining"));
    let delay = status.get_details_retry_info().and_then(|info| info.retry_delay);
    assert!(delay.is_some_and(|delay| !delay.is_zero()), "{status:?}");
}

/// The answer to a request over HTTP.
pub(crate) async fn get(service: &TestService, path: &str) -> String {
    let address = service.running.http_address.unwrap();
    let mut stream = tokio::net::TcpStream::connect(address).await.unwrap();
    stream.write_all(format!("GET {path} HTTP/1.1\r\nhost: test\r\n\r\n").as_bytes()).await.unwrap();
    let mut response = String::new();
    stream.read_to_string(&mut response).await.unwrap();
    response
}

#[tokio::test]
async fn streams_end_with_a_delay_after_the_answers_before_it() {
    let service = TestService::start().await;
    let mut worker = service.worker().await;
    let mut taker = Taker::join(&service, subscription("run", "trainers")).await;
    let made = rows(&mut worker, "run", 0, 3, 5).await;
    taker.take_units(3).await;
    let mut sent = Vec::new();
    for sequence in 0..50 {
        let event = Event::Call(call(&sequence.to_string(), "main", sequence, &[1], &[2]));
        sent.push(worker.send(&about("run", "open"), event).await);
    }
    let last = worker.answer(*sent.last().unwrap()).await;
    assert_eq!(last.outcome(), AnswerOutcome::Accepted);
    assert_eq!(taker.ack(&made[..1]).await, [AckOutcome::Acknowledged]);
    let started = Instant::now();
    let stopped = tokio::spawn(service.running.stop());
    for request in &sent[..sent.len() - 1] {
        assert_eq!(worker.answer(*request).await.outcome(), AnswerOutcome::Accepted, "answered before the end");
    }
    is_drained(&worker.end().await.unwrap_err());
    is_drained(&taker.end().await.unwrap());
    stopped.await.unwrap();
    assert!(started.elapsed() < SOON, "{:?}", started.elapsed());
}

#[tokio::test]
async fn an_ack_that_was_read_is_answered_before_the_end() {
    let log = Arc::new(MemoryLog::held());
    let service = TestService::start_on(log.clone()).await;
    let pump = {
        let log = log.clone();
        tokio::spawn(async move {
            loop {
                log.make_durable();
                tokio::task::yield_now().await;
            }
        })
    };
    let mut worker = service.worker().await;
    let mut taker = Taker::join(&service, subscription("run", "trainers")).await;
    let made = row(&mut worker, "run", "x", 5).await;
    taker.unit().await;
    pump.abort();
    let _ = pump.await;
    let before = service.running.store.last_position();
    taker.trainer.send(Request::Ack(v1::Ack { unit_ids: vec![made], seek_count: 0 })).await;
    while service.running.store.last_position() == before {
        tokio::task::yield_now().await;
    }
    let stopped = tokio::spawn(service.running.stop());
    // The log lets go only when the stop has come to the streams.
    is_drained(&worker.end().await.unwrap_err());
    for _ in 0..100 {
        tokio::task::yield_now().await;
    }
    log.make_durable();
    let mut results = 0;
    let end = loop {
        match taker.trainer.next().await {
            Ok(Some(v1::subscribe_response::Response::AckResult(result))) => {
                assert_eq!(result.entries[0].outcome(), AckOutcome::Acknowledged);
                results += 1;
            }
            Ok(Some(_)) => {}
            Ok(None) => panic!("it ends without a word"),
            Err(status) => break status,
        }
    };
    is_drained(&end);
    assert_eq!(results, 1, "the answer comes before the end");
    stopped.await.unwrap();
}

#[tokio::test]
async fn nothing_is_opened_any_more_and_what_is_open_goes_on() {
    let service = TestService::start().await;
    let mut worker = service.worker().await;
    let taker = Taker::join(&service, subscription("run", "trainers")).await;
    worker.report(&about("run", "open"), Event::Call(call("c", "main", 1, &[1], &[2]))).await;
    assert!(get(&service, "/readyz").await.starts_with("HTTP/1.1 200"));
    let drained = service.admin().await.drain(v1::DrainRequest::default()).await.unwrap().into_inner();
    assert_eq!(drained.ended_streams, 2);
    is_drained(&worker.end().await.unwrap_err());
    drop(taker);
    let request = |request_seq, rollout, event| v1::ReportRequest {
        request_seq,
        rollout: Some(about("run", rollout)),
        event: Some(event),
    };
    let requests = vec![
        request(1, "new", Event::Call(call("c", "main", 1, &[1], &[2]))),
        request(2, "open", Event::Call(call("d", "main", 2, &[1, 2], &[3]))),
        request(3, "open", finish(1.0)),
    ];
    let mut client = HarnessServiceClient::new(service.channel().await);
    let answers = client.report_batch(v1::ReportBatchRequest { requests }).await.unwrap().into_inner().answers;
    let refusal = answers[0].refusal.as_ref().unwrap();
    assert_eq!((refusal.reason.as_str(), refusal.code), ("draining", 14));
    assert!(refusal.retry_after.is_some());
    assert!(answers[1..].iter().all(|answer| answer.outcome() == AnswerOutcome::Accepted), "{answers:?}");
    let readiness = get(&service, "/readyz").await;
    assert!(readiness.starts_with("HTTP/1.1 503") && readiness.contains("draining"), "{readiness}");
    assert!(get(&service, "/healthz").await.starts_with("HTTP/1.1 200"), "it works still");
    let mut health = HealthClient::new(service.channel().await);
    for name in ["", "hedgerow.v1.HarnessService", "hedgerow.v1.TrainerService"] {
        let check = health.check(HealthCheckRequest { service: name.to_owned() }).await.unwrap().into_inner();
        assert_eq!(check.status(), ServingStatus::NotServing, "{name:?}");
    }
    service.running.stop().await;
}

#[tokio::test]
async fn who_watches_the_health_sees_it_and_does_not_hold_up_the_stop() {
    let service = TestService::start().await;
    let mut health = HealthClient::new(service.channel().await);
    let mut watch = health.watch(HealthCheckRequest::default()).await.unwrap().into_inner();
    assert_eq!(watch.message().await.unwrap().unwrap().status(), ServingStatus::Serving);
    let started = Instant::now();
    let stopped = tokio::spawn(service.running.stop());
    assert_eq!(watch.message().await.unwrap().unwrap().status(), ServingStatus::NotServing);
    while let Ok(Some(_)) = watch.message().await {}
    stopped.await.unwrap();
    assert!(started.elapsed() < SOON, "{:?}", started.elapsed());
}

#[tokio::test]
async fn who_has_not_subscribed_yet_does_not_hold_up_the_stop() {
    let service = TestService::start().await;
    let mut client = TrainerServiceClient::new(service.channel().await);
    let (_requests, line) = mpsc::channel(1);
    let mut responses = client.subscribe(ReceiverStream::new(line)).await.unwrap().into_inner();
    let started = Instant::now();
    let stopped = tokio::spawn(service.running.stop());
    is_drained(&responses.message().await.unwrap_err());
    stopped.await.unwrap();
    assert!(started.elapsed() < SOON, "{:?}", started.elapsed());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn who_does_not_read_does_not_hold_up_the_stop_for_long() {
    let service = TestService::start().await;
    let mut worker = service.worker().await;
    let unread = service.trainer(subscription("run", "trainers")).await;
    // More than fits into the windows on the way.
    let prompt: Vec<u32> = (0..1_000_000).collect();
    for rollout in ["x", "y", "z"] {
        worker.report(&about("run", rollout), Event::Call(call("c", "main", 1, &prompt, &[1]))).await;
        worker.report(&about("run", rollout), finish(1.0)).await;
    }
    let started = Instant::now();
    service.running.stop().await;
    assert!(started.elapsed() < Duration::from_secs(10), "{:?}", started.elapsed());
    drop(unread);
}
