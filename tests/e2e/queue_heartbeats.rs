//! A subscription's heartbeats say what keeps the next unit from going out.

use std::time::Duration;

use hedgerow::proto::v1::report_request::Event;
use hedgerow::proto::v1::{self, AckOutcome, WaitingFor};

use crate::queue_taker::{Taker, finish, row, rows};
use crate::service::{TestService, about, call, reward, seal, subscription};

#[tokio::test]
async fn a_heartbeat_comes_at_once_and_then_at_its_interval() {
    let service = TestService::start().await;
    let interval = |seconds| Some(prost_types::Duration { seconds, nanos: 0 });
    let subscription = v1::Subscription { heartbeat_interval: interval(30), ..subscription("run", "trainers") };
    let mut taker = Taker::join(&service, subscription).await;
    let first = async |taker: &mut Taker| {
        loop {
            if let Some(v1::subscribe_response::Response::Heartbeat(heartbeat)) = taker.trainer.next().await.unwrap() {
                return heartbeat.time.unwrap().seconds;
            }
        }
    };
    assert_eq!(first(&mut taker).await, 0);
    service.clock.advance(Duration::from_secs(29));
    assert!(taker.quiet().await.is_empty());
    service.clock.advance(Duration::from_secs(2));
    assert_eq!(first(&mut taker).await, 31, "not after 29 s");
}

#[tokio::test]
async fn heartbeats_say_what_rollouts_wait_for() {
    let service = TestService::start().await;
    let mut worker = service.worker().await;
    let mut taker = Taker::join(&service, subscription("run", "trainers")).await;
    assert_eq!(taker.waits(&service).await, [WaitingFor::NoOpenRollouts]);
    let reference = about("run", "x");
    worker.report(&reference, Event::Call(call("c", "main", 1, &[1], &[2]))).await;
    assert_eq!(taker.waits(&service).await, [WaitingFor::OpenRollouts]);
    worker.report(&reference, Event::Seal(seal(&[("main", &["c", "d"])]))).await;
    let heartbeat = taker.heartbeat(&service).await;
    assert_eq!(heartbeat.waiting_for().collect::<Vec<_>>(), [WaitingFor::Rewards]);
    assert_eq!((heartbeat.open_rollouts, heartbeat.sealed_rollouts), (0, 1), "what is sealed is not open");
    worker.report(&reference, Event::Reward(reward(1.0))).await;
    let heartbeat = taker.heartbeat(&service).await;
    assert_eq!(heartbeat.waiting_for().collect::<Vec<_>>(), [WaitingFor::MissingCalls]);
    assert_eq!(heartbeat.incomplete_rollouts, 1);
    worker.report(&about("run", "y"), Event::Seal(v1::Seal::default())).await;
    worker.report(&about("run", "z"), Event::Reward(reward(1.0))).await;
    let heartbeat = taker.heartbeat(&service).await;
    let all = [WaitingFor::MissingCalls, WaitingFor::Rewards, WaitingFor::OpenRollouts];
    assert_eq!(heartbeat.waiting_for().collect::<Vec<_>>(), all);
    let counts = [
        heartbeat.open_rollouts,
        heartbeat.sealed_rollouts,
        heartbeat.rewarded_rollouts,
        heartbeat.incomplete_rollouts,
    ];
    assert_eq!(counts, [1, 1, 1, 1], "each rollout stands where the contract says");
    worker.report(&reference, Event::Call(call("d", "main", 2, &[1, 2], &[3]))).await;
    taker.unit().await;
    for rollout in ["y", "z"] {
        let discard = v1::Discard { reason: "test".to_owned(), disposition: 0 };
        worker.report(&about("run", rollout), Event::Discard(discard)).await;
    }
    let heartbeat = taker.heartbeat(&service).await;
    assert_eq!(heartbeat.waiting_for().collect::<Vec<_>>(), [WaitingFor::NoOpenRollouts]);
    assert_eq!((heartbeat.leased_units, heartbeat.leased_tokens, heartbeat.consumer_leased_tokens), (1, 3, 3));
}

#[tokio::test]
async fn heartbeats_say_what_units_wait_for() {
    let service = TestService::start().await;
    let mut worker = service.worker().await;
    let mut a = Taker::join(&service, v1::Subscription { credit_tokens: 0, ..subscription("run", "trainers") }).await;
    let made = rows(&mut worker, "run", 0, 2, 10).await;
    let heartbeat = a.heartbeat(&service).await;
    assert_eq!(heartbeat.waiting_for().collect::<Vec<_>>(), [WaitingFor::Credit]);
    assert_eq!((heartbeat.queued_units, heartbeat.queued_tokens), (2, 20));
    a.credit(15).await;
    a.unit().await;
    assert_eq!(a.waits(&service).await, [WaitingFor::Credit], "what is left is too little");
    let mut b = Taker::join(&service, subscription("run", "trainers")).await;
    b.unit().await;
    let heartbeat = a.heartbeat(&service).await;
    let expected = [WaitingFor::AcksOfOthers, WaitingFor::NoOpenRollouts];
    assert_eq!(heartbeat.waiting_for().collect::<Vec<_>>(), expected);
    assert_eq!((heartbeat.leased_units, heartbeat.leased_tokens, heartbeat.consumer_leased_tokens), (2, 20, 10));
    assert_eq!(b.ack(&made[1..]).await, [AckOutcome::Acknowledged]);
    assert_eq!(a.waits(&service).await, [WaitingFor::NoOpenRollouts], "what is out is its own");
    assert_eq!(a.nack(&made[..1], Some(Duration::from_secs(100))).await, [AckOutcome::Returned]);
    assert_eq!(a.waits(&service).await, [WaitingFor::NackDelay]);
    assert_eq!(b.waits(&service).await, [WaitingFor::NackDelay]);
}

#[tokio::test]
async fn heartbeats_count_groups_that_are_not_over() {
    let service = TestService::start().await;
    let mut worker = service.worker().await;
    let mut taker = Taker::join(&service, subscription("run", "trainers")).await;
    let member = |rollout| v1::RolloutRef { group_id: "g".to_owned(), ..about("run", rollout) };
    let open = v1::Open { group_size: Some(2), ..v1::Open::default() };
    worker.report(&member("x"), Event::Open(open)).await;
    worker.report(&member("x"), finish(1.0)).await;
    assert_eq!(taker.heartbeat(&service).await.open_groups, 1, "a member is to come");
    worker.report(&member("y"), finish(1.0)).await;
    assert_eq!(taker.heartbeat(&service).await.open_groups, 0);
    row(&mut worker, "run", "alone", 5).await;
    assert_eq!(taker.heartbeat(&service).await.open_groups, 0);
}
