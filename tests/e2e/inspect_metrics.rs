//! Metrics that say who waits for whom.

use std::time::Duration;

use hedgerow::log::memory::MemoryLog;
use hedgerow::proto::v1;
use hedgerow::proto::v1::report_request::Event;
use std::sync::Arc;

use crate::queue_taker::{Taker, row};
use crate::service::{TestService, about, subscription};

/// Waits until the gauges are set again, and say that this is who waits.
async fn waits(service: &TestService, who: &str) {
    let mut window = service.inspect().await;
    let line = format!("hedgerow_waiting_on{{who=\"{who}\"}} 1");
    while !service.running.store.telemetry().render().contains(&line) {
        service.clock.advance(Duration::from_secs(1));
        // A round trip, in which every task has its turn.
        let request =
            v1::GetRolloutRequest { run_id: "r".into(), rollout_id: "none".into(), ..v1::GetRolloutRequest::default() };
        let _ = window.get_rollout(request).await;
    }
}

#[tokio::test]
async fn one_gauge_says_who_waits_for_whom() {
    let service = TestService::start().await;
    waits(&service, "idle").await;
    let mut worker = service.worker().await;
    let mut taker = Taker::join(&service, subscription("run", "trainers")).await;
    waits(&service, "harness_bound").await;
    let unit = row(&mut worker, "run", "a", 5).await;
    taker.unit().await;
    waits(&service, "idle").await;
    taker.ack(&[&unit]).await;
    taker.credit(0).await;
    row(&mut worker, "run", "b", 5).await;
    waits(&service, "trainer_bound").await;
}

#[tokio::test]
async fn a_log_that_does_not_come_after_is_waited_for() {
    let log = Arc::new(MemoryLog::held());
    let service = TestService::start_on(log.clone()).await;
    let mut worker = service.worker().await;
    let request = worker.send(&about("run", "a"), Event::Open(v1::Open::default())).await;
    // Nothing is answered until it is durable, so the gauge is all that says why.
    let line = "hedgerow_waiting_on{who=\"log_bound\"} 1";
    while !service.running.store.telemetry().render().contains(line) {
        service.clock.advance(Duration::from_secs(1));
        let _ = service.channel().await;
    }
    log.make_durable();
    worker.answer(request).await;
}
