//! Figures of what has ended: they come back to nothing, whoever ended it, and words of a harness are never taken for a rule's.

use std::time::Duration;

use hedgerow::proto::v1::report_request::Event;
use hedgerow::proto::v1::trainer_service_client::TrainerServiceClient;
use hedgerow::proto::v1::{self, DiscardDisposition};

use crate::drain::get;
use crate::life::{attempt, discard, heartbeat, on_base};
use crate::queue_taker::reason;
use crate::service::{TestService, Trainer, about, call, subscription};

fn waits(id: &str) -> Event {
    Event::Call(on_base("never", &[1, 2], &[3], call(id, "main", 1, &[], &[4])))
}

/// Waits until the metrics say this.
async fn says(service: &TestService, series: &str) {
    for _ in 0..2000 {
        if get(service, "/metrics").await.contains(&format!("{series}\n")) {
            return;
        }
        service.clock.advance(Duration::from_secs(1));
        tokio::task::yield_now().await;
    }
    panic!("{series} does not come:\n{}", get(service, "/metrics").await);
}

#[tokio::test]
async fn gauges_come_back_when_an_attempt_is_superseded_or_a_run_deleted() {
    let service = TestService::start().await;
    let mut worker = service.worker().await;
    let rollout = about("run", "a");
    worker.report(&rollout, waits("c")).await;
    says(&service, "hedgerow_waiting_deltas{run=\"run\"} 1").await;
    worker.report(&attempt(&rollout, 1), heartbeat()).await;
    says(&service, "hedgerow_waiting_deltas{run=\"run\"} 0").await;
    worker.report(&about("run", "b"), waits("c")).await;
    says(&service, "hedgerow_waiting_deltas{run=\"run\"} 1").await;
    says(&service, "hedgerow_open_rollouts{run=\"run\"} 2").await;
    let delete = v1::DeleteRunRequest { run_id: "run".to_owned(), force: true };
    service.admin().await.delete_run(delete).await.unwrap();
    says(&service, "hedgerow_waiting_deltas{run=\"run\"} 0").await;
    says(&service, "hedgerow_open_rollouts{run=\"run\"} 0").await;
    says(&service, "hedgerow_rollouts_ended_total{run=\"run\",outcome=\"discarded\",reason=\"run_deleted\"} 2").await;
}

#[tokio::test]
async fn who_discarded_a_rollout_is_counted_and_not_what_was_said() {
    let service = TestService::start().await;
    let mut worker = service.worker().await;
    worker.report(&about("run", "a"), discard("idle_timeout", DiscardDisposition::Final)).await;
    worker.report(&about("run", "b"), heartbeat()).await;
    let by_hand = v1::DiscardRolloutRequest {
        rollout: Some(about("run", "b")),
        reason: "broken_link".to_owned(),
        ..v1::DiscardRolloutRequest::default()
    };
    service.admin().await.discard_rollout(by_hand).await.unwrap();
    for by in ["harness", "operator"] {
        let labels = format!("run=\"run\",outcome=\"discarded\",reason=\"{by}\"");
        says(&service, &format!("hedgerow_rollouts_ended_total{{{labels}}} 1")).await;
    }
}

#[tokio::test]
async fn a_refused_subscription_makes_no_run() {
    let service = TestService::start().await;
    let settings = v1::ConsumerGroupSettings { policy: "untrained".to_owned(), ..v1::ConsumerGroupSettings::default() };
    let mut admin = service.admin().await;
    let made = v1::CreateRunRequest {
        run_id: "only".to_owned(),
        settings: Some(v1::RunSettings { trained_policies: vec!["main".to_owned()], ..v1::RunSettings::default() }),
    };
    admin.create_run(made).await.unwrap();
    let asked = v1::Subscription { settings: Some(settings), ..subscription("only", "trainers") };
    let refused = Trainer::subscribe(service.channel().await, asked).await.err().unwrap();
    assert_eq!(reason(&refused), "invalid_value");
    let long = v1::Subscription { consumer: "x".repeat(1000), ..subscription("never", "trainers") };
    assert!(Trainer::subscribe(service.channel().await, long).await.is_err());
    let runs = service.inspect().await.list_runs(v1::ListRunsRequest::default()).await.unwrap().into_inner().runs;
    assert_eq!(runs.iter().map(|run| run.run_id.as_str()).collect::<Vec<_>>(), ["only"]);
}

#[tokio::test]
async fn requests_and_streams_that_end_with_a_refusal_are_counted_like_answers_that_refuse() {
    let service = TestService::start().await;
    let counted = async |reason: &str, count: u32| {
        says(&service, &format!("hedgerow_requests_refused_total{{reason=\"{reason}\"}} {count}")).await;
    };
    let (mut worker, mut window) = (service.worker().await, service.inspect().await);
    let none = v1::ListRolloutsRequest { run_id: "none".to_owned(), ..v1::ListRolloutsRequest::default() };
    window.list_rollouts(none).await.unwrap_err();
    counted("run_not_found", 1).await;
    let delete = v1::DeleteRunRequest { run_id: "none".to_owned(), force: true };
    service.admin().await.delete_run(delete).await.unwrap_err();
    counted("run_not_found", 2).await;
    // An answer that refuses counts once, in a stream that goes on.
    let refused = worker.report(&about("run", "\u{7}"), heartbeat()).await.refusal.unwrap();
    assert_eq!(refused.reason, "invalid_identifier");
    counted("invalid_identifier", 1).await;
    // A stream that ends with a refusal, which stands behind what was sent on it.
    let mut takers = TrainerServiceClient::new(service.channel().await);
    let unknown = v1::SubscribeRequest { request: None };
    let mut responses = takers.subscribe(tokio_stream::iter([unknown])).await.unwrap().into_inner();
    let status = responses.message().await.unwrap_err();
    assert_eq!(reason(&status), "subscription_order");
    counted("subscription_order", 1).await;
    let large = "x".repeat(hedgerow::limits::OTHER_MESSAGE_BYTES_MAX + 1);
    let status = window.list_runs(v1::ListRunsRequest { page_token: large, page_size: 1 }).await.unwrap_err();
    assert_eq!(reason(&status), "message_too_large");
    counted("message_too_large", 1).await;
}
