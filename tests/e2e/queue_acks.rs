//! Acknowledgements, units given back, leases, and units that nobody acknowledges.

use std::time::Duration;

use hedgerow::proto::v1::subscribe_request::Request;
use hedgerow::proto::v1::{self, AckOutcome, AnswerOutcome, RolloutOutcome, UnitNoticeKind};

use crate::queue_taker::{Taker, finish, reason, row, rows, unit_ids};
use crate::service::{TestService, about, subscription};

const MINUTE: Duration = Duration::from_secs(60);

#[tokio::test]
async fn acks_count_in_any_order_from_any_member_however_late() {
    let service = TestService::start().await;
    let mut worker = service.worker().await;
    let mut holder = Taker::join(&service, subscription("run", "trainers")).await;
    let made = rows(&mut worker, "run", 0, 6, 5).await;
    holder.take_units(6).await;
    let mut other =
        Taker::join(&service, v1::Subscription { credit_tokens: 0, ..subscription("run", "trainers") }).await;
    let backwards = [made[5].as_str(), &made[3]];
    assert_eq!(holder.ack(&backwards).await, [AckOutcome::Acknowledged; 2]);
    let by_another = [made[4].as_str(), "run/never/0/main/c", &made[5], &made[4]];
    let expected = [
        AckOutcome::Acknowledged,
        AckOutcome::Unknown,
        AckOutcome::AlreadyAcknowledged,
        AckOutcome::AlreadyAcknowledged,
    ];
    assert_eq!(other.ack(&by_another).await, expected);
    assert_eq!(holder.ack(&made[4..5]).await, [AckOutcome::AlreadyAcknowledged]);
    drop(holder);
    // It is gone when what it held can be had.
    other.credit(u64::MAX).await;
    assert_eq!(unit_ids(&other.take_units(3).await), made[..3]);
    let mut late =
        Taker::join(&service, v1::Subscription { credit_tokens: 0, ..subscription("run", "trainers") }).await;
    assert_eq!(late.ack(&made[..1]).await, [AckOutcome::Acknowledged], "for the one that died, while another has it");
    assert_eq!(
        other.ack(&made[..3]).await,
        [AckOutcome::AlreadyAcknowledged, AckOutcome::Acknowledged, AckOutcome::Acknowledged]
    );
    for unit in 0..6 {
        let answer = worker.report(&about("run", &unit.to_string()), finish(1.0)).await;
        assert_eq!(answer.outcome(), AnswerOutcome::AlreadyEnded, "rollout {unit}");
        assert_eq!(answer.ended.unwrap().outcome(), RolloutOutcome::Retired);
    }
    assert_eq!(late.ack(&made).await, [AckOutcome::AlreadyAcknowledged; 6], "after retirement");
    service.clock.advance(Duration::from_secs(73 * 60 * 60));
    let mut later = Taker::join(&service, subscription("run", "trainers")).await;
    assert!(later.quiet().await.is_empty());
    assert_eq!(later.ack(&made[..1]).await, [AckOutcome::Unknown], "forgotten long ago");
}

#[tokio::test]
async fn a_unit_given_back_comes_again_after_its_delay() {
    let service = TestService::start().await;
    let mut worker = service.worker().await;
    let mut taker = Taker::join(&service, subscription("run", "trainers")).await;
    let made = rows(&mut worker, "run", 0, 3, 5).await;
    taker.take_units(3).await;
    assert_eq!(taker.nack(&made[..1], None).await, [AckOutcome::Returned]);
    let again = taker.unit().await;
    assert_eq!((again.unit_id.as_str(), again.delivery_count), (made[0].as_str(), 2));
    let mixed = ["run/never/0/main/c", &made[1], &made[1], &made[2]];
    let expected = [AckOutcome::NotHeld, AckOutcome::Returned, AckOutcome::NotHeld, AckOutcome::Returned];
    assert_eq!(taker.nack(&mixed, Some(MINUTE)).await, expected, "in the order of the request");
    assert!(taker.quiet().await.is_empty());
    service.clock.advance(MINUTE - Duration::from_millis(1));
    assert!(taker.quiet().await.is_empty());
    service.clock.advance(Duration::from_millis(1));
    assert_eq!(unit_ids(&taker.take_units(2).await), made[1..]);
    let mut other = Taker::join(&service, subscription("run", "trainers")).await;
    assert_eq!(other.nack(&made, None).await, [AckOutcome::NotHeld; 3], "they are with another");
    assert!(taker.quiet().await.is_empty());
    assert_eq!(taker.nack(&made[..1], Some(MINUTE)).await, [AckOutcome::Returned]);
    assert_eq!(other.ack(&made[..1]).await, [AckOutcome::Acknowledged], "put off, and acknowledged all the same");
    service.clock.advance(2 * MINUTE);
    assert!(taker.quiet().await.is_empty() && other.quiet().await.is_empty());
}

#[tokio::test]
async fn a_lease_ends_an_hour_after_the_last_sign_of_life() {
    let service = TestService::start().await;
    let mut worker = service.worker().await;
    let mut silent = Taker::join(&service, subscription("run", "trainers")).await;
    let unit = row(&mut worker, "run", "x", 5).await;
    silent.unit().await;
    let mut other = Taker::join(&service, subscription("run", "trainers")).await;
    assert_eq!(silent.trainer.subscribed.lease.as_ref().unwrap().seconds, 3600);
    service.clock.advance(30 * MINUTE);
    silent.trainer.send(Request::Heartbeat(v1::ConsumerHeartbeat {})).await;
    // A heartbeat has no answer: it is read while others are answered many times.
    for _ in 0..50 {
        other.quiet().await;
    }
    service.clock.advance(60 * MINUTE - Duration::from_millis(1));
    assert!(other.quiet().await.is_empty(), "a heartbeat has renewed the lease");
    service.clock.advance(Duration::from_millis(1));
    let again = other.unit().await;
    assert_eq!((again.unit_id.as_str(), again.delivery_count), (unit.as_str(), 2), "to the one that is alive");
    let notice = silent.notice().await;
    assert_eq!((notice.kind(), notice.unit_id.as_str()), (UnitNoticeKind::LeaseEnded, unit.as_str()));
    assert_eq!(silent.ack(&[unit.as_str()]).await, [AckOutcome::Acknowledged], "late, and valid");
    assert_eq!(other.ack(&[unit]).await, [AckOutcome::AlreadyAcknowledged]);
}

#[tokio::test]
async fn every_request_renews_a_lease_and_the_runs_settings_say_how_long() {
    let service = TestService::start().await;
    let lease = |seconds| v1::RunSettings {
        lease: Some(prost_types::Duration { seconds, nanos: 0 }),
        ..v1::RunSettings::default()
    };
    service.create_run("run", lease(60)).await;
    let mut worker = service.worker().await;
    let mut taker = Taker::join(&service, subscription("run", "trainers")).await;
    row(&mut worker, "run", "x", 5).await;
    taker.unit().await;
    for _ in 0..5 {
        service.clock.advance(Duration::from_secs(59));
        assert!(taker.quiet().await.is_empty(), "acks renew the lease");
    }
    let update = v1::UpdateRunSettingsRequest {
        run_id: "run".to_owned(),
        settings: Some(lease(600)),
        expected_settings_version: 1,
    };
    service.admin().await.update_run_settings(update).await.unwrap();
    service.clock.advance(Duration::from_secs(599));
    assert!(taker.quiet().await.is_empty(), "leases last as long as the settings say now");
    service.clock.advance(Duration::from_secs(600));
    assert_eq!(taker.unit().await.delivery_count, 2, "there is nobody else");
}

fn release(unit_id: &str, drop: bool) -> v1::ReleaseUnitRequest {
    let consumer_group = "trainers".to_owned();
    v1::ReleaseUnitRequest { run_id: "run".to_owned(), consumer_group, unit_id: unit_id.to_owned(), drop }
}

/// A run whose units are given out twice at most, and a trainer that has let one become undeliverable.
async fn undeliverable(service: &TestService) -> (Taker, String) {
    let settings = v1::RunSettings { max_deliveries: Some(2), ..v1::RunSettings::default() };
    service.create_run("run", settings).await;
    let mut worker = service.worker().await;
    let mut taker = Taker::join(service, subscription("run", "trainers")).await;
    let unit = row(&mut worker, "run", "x", 5).await;
    make_undeliverable(&mut taker, &unit).await;
    (taker, unit)
}

async fn make_undeliverable(taker: &mut Taker, unit: &str) {
    for delivery in 1..=2 {
        let given = taker.unit().await;
        assert_eq!((given.unit_id.as_str(), given.delivery_count), (unit, delivery));
        assert_eq!(taker.nack(&[unit], None).await, [AckOutcome::Returned]);
    }
    let notice = taker.notice().await;
    assert_eq!((notice.kind(), notice.unit_id.as_str()), (UnitNoticeKind::Undeliverable, unit));
    assert!(taker.quiet().await.is_empty(), "it goes out no more");
}

/// Whether the rollout is a tombstone.
fn is_retired(service: &TestService) -> bool {
    service.running.store.show(&crate::service::key(&about("run", "x")), |_| ()).is_some_and(|found| found.is_err())
}

#[tokio::test]
async fn a_unit_given_out_too_often_is_dropped_and_can_be_released_or_dropped_for_good() {
    let service = TestService::start().await;
    let (mut taker, unit) = undeliverable(&service).await;
    assert!(!is_retired(&service), "it can be released still");
    let mut admin = service.admin().await;
    admin.release_unit(release(&unit, false)).await.unwrap();
    let refused = admin.release_unit(release(&unit, false)).await.unwrap_err();
    assert_eq!(
        (refused.code(), reason(&refused).as_str()),
        (tonic::Code::FailedPrecondition, "unit_not_undeliverable")
    );
    make_undeliverable(&mut taker, &unit).await;
    admin.release_unit(release(&unit, true)).await.unwrap();
    let notice = taker.notice().await;
    assert_eq!((notice.kind(), notice.unit_id.as_str()), (UnitNoticeKind::Operator, unit.as_str()));
    assert!(is_retired(&service), "nothing holds it any more");
    for unit in [unit.as_str(), "run/never/0/main/c"] {
        let refused = admin.release_unit(release(unit, false)).await.unwrap_err();
        assert_eq!((refused.code(), reason(&refused).as_str()), (tonic::Code::NotFound, "unit_not_found"));
    }
    assert!(taker.quiet().await.is_empty());
}

#[tokio::test]
async fn a_late_ack_of_an_undeliverable_unit_counts_and_retires_its_rollout() {
    let service = TestService::start().await;
    let (mut taker, unit) = undeliverable(&service).await;
    assert_eq!(taker.ack(&[unit]).await, [AckOutcome::Acknowledged]);
    assert!(is_retired(&service));
}

#[tokio::test]
async fn streams_that_die_with_a_unit_make_it_undeliverable_too() {
    let service = TestService::start().await;
    let settings = v1::RunSettings { max_deliveries: Some(2), ..v1::RunSettings::default() };
    service.create_run("run", settings).await;
    let mut worker = service.worker().await;
    let mut watcher =
        Taker::join(&service, v1::Subscription { credit_tokens: 0, ..subscription("run", "trainers") }).await;
    let unit = row(&mut worker, "run", "x", 5).await;
    for delivery in 1..=2 {
        let mut victim = Taker::join(&service, subscription("run", "trainers")).await;
        assert_eq!(victim.unit().await.delivery_count, delivery);
    }
    let notice = watcher.notice().await;
    assert_eq!((notice.kind(), notice.unit_id.as_str()), (UnitNoticeKind::Undeliverable, unit.as_str()));
    let mut late = Taker::join(
        &service,
        v1::Subscription { held_unit_ids: vec![unit.clone()], ..subscription("run", "trainers") },
    )
    .await;
    assert_eq!(late.trainer.subscribed.lost_unit_ids, [unit]);
    assert!(late.quiet().await.is_empty());
}
