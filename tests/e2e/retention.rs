//! How long rows are kept: those that are acknowledged, those that nobody claims, and those of groups that nobody subscribes to;
//! and what waits for whom after a restart.

use std::sync::Arc;
use std::time::Duration;

use hedgerow::log::Log;
use hedgerow::log::memory::MemoryLog;
use hedgerow::proto::v1::{self, AckOutcome, RolloutOutcome, UnitNoticeKind, WaitingFor};
use hedgerow::service::{LogSource, ServiceOptions};

use crate::life::{Life, seconds, state};
use crate::queue_taker::{Taker, row, rows, unit_ids};
use crate::service::{TestService, about, subscription};

const HOUR: u64 = 3600;
const DAY: u64 = 24 * HOUR;

fn retention(seconds_kept: i64) -> v1::RunSettings {
    v1::RunSettings { retention: seconds(seconds_kept), ..v1::RunSettings::default() }
}

fn advance(life: &Life, seconds: u64) {
    life.service.clock.advance(Duration::from_secs(seconds));
}

async fn groups(service: &TestService) -> Vec<v1::ConsumerGroupSummary> {
    let request = v1::ListConsumersRequest { run_id: "run".to_owned(), ..v1::ListConsumersRequest::default() };
    service.inspect().await.list_consumers(request).await.unwrap().into_inner().consumer_groups
}

#[tokio::test]
async fn what_is_acknowledged_stays_as_long_as_its_run_says() {
    let mut life = Life::start_with(retention(3600)).await;
    let unit = row(&mut life.worker, "run", "one", 4).await;
    let mut taker = Taker::join(&life.service, subscription("run", "trainers")).await;
    taker.take_units(1).await;
    taker.ack(&[&unit]).await;
    advance(&life, HOUR - 1);
    assert_eq!(state(&life.settle(&about("run", "one")).await), v1::RolloutState::Finalised);
    // A group that is made by then takes it.
    let mut late = Taker::join(&life.service, subscription("run", "late")).await;
    assert_eq!(unit_ids(&late.quiet().await), [&unit]);
    advance(&life, 2);
    assert_eq!(state(&life.settle(&about("run", "one")).await), v1::RolloutState::Finalised, "it is held again");
    assert_eq!(late.ack(&[&unit]).await, [AckOutcome::Acknowledged]);
    advance(&life, HOUR - 1);
    assert_eq!(state(&life.settle(&about("run", "one")).await), v1::RolloutState::Finalised);
    advance(&life, 1);
    let end = life.until_ended(&about("run", "one")).await;
    assert_eq!((end.outcome(), end.reason.as_str()), (RolloutOutcome::Retired, "acknowledged"));
    assert_eq!(taker.ack(&[&unit]).await, [AckOutcome::AlreadyAcknowledged]);
}

#[tokio::test]
async fn a_shorter_retention_holds_for_what_is_there() {
    let mut life = Life::start_with(retention(3600)).await;
    let unit = row(&mut life.worker, "run", "one", 4).await;
    let mut taker = Taker::join(&life.service, subscription("run", "trainers")).await;
    taker.take_units(1).await;
    taker.ack(&[&unit]).await;
    assert_eq!(state(&life.settle(&about("run", "one")).await), v1::RolloutState::Finalised);
    let update = v1::UpdateRunSettingsRequest {
        run_id: "run".to_owned(),
        settings: Some(retention(0)),
        expected_settings_version: 1,
    };
    life.service.admin().await.update_run_settings(update).await.unwrap();
    assert_eq!(life.until_ended(&about("run", "one")).await.outcome(), RolloutOutcome::Retired);
}

#[tokio::test]
async fn what_no_group_was_given_ends_after_a_while_and_whoever_comes_is_told() {
    let mut life = Life::start().await;
    row(&mut life.worker, "run", "early", 4).await;
    advance(&life, DAY - 10);
    let late = row(&mut life.worker, "run", "late", 4).await;
    assert_eq!(state(&life.settle(&about("run", "early")).await), v1::RolloutState::Finalised);
    advance(&life, 10);
    let end = life.until_ended(&about("run", "early")).await;
    assert_eq!((end.outcome(), end.reason.as_str()), (RolloutOutcome::Retired, "unclaimed"));
    let mut taker = Taker::join(&life.service, subscription("run", "trainers")).await;
    assert_eq!(unit_ids(&taker.quiet().await), [&late]);
    assert_eq!(taker.heartbeat(&life.service).await.queued_units, 0);
    let notice = taker.notice().await;
    assert_eq!((notice.kind(), notice.units), (UnitNoticeKind::Retention, 1));
    // What is claimed waits for ever.
    advance(&life, 100 * HOUR);
    assert_eq!(state(&life.settle(&about("run", "late")).await), v1::RolloutState::Finalised);
}

#[tokio::test]
async fn what_no_group_was_given_takes_no_more_than_its_run_says() {
    let bytes = Some(64 << 10);
    let mut life = Life::start_with(v1::RunSettings { unclaimed_retention_bytes: bytes, ..retention(0) }).await;
    let units = rows(&mut life.worker, "run", 0, 40, 2000).await;
    let end = life.until_ended(&about("run", "0")).await;
    assert_eq!((end.outcome(), end.reason.as_str()), (RolloutOutcome::Retired, "unclaimed"));
    let mut taker = Taker::join(&life.service, subscription("run", "trainers")).await;
    let left = taker.quiet().await;
    assert_eq!(unit_ids(&left), &units[units.len() - left.len()..], "the newest stay");
    assert!((2..12).contains(&left.len()), "{} of 40", left.len());
}

#[tokio::test]
async fn a_group_that_nobody_subscribes_to_expires_unless_it_is_required() {
    let declared = |name: &str| v1::ConsumerGroupDeclaration { consumer_group: name.to_owned(), settings: None };
    let mut life = Life::start_with(v1::RunSettings {
        consumer_groups: vec![declared("declared"), declared("required")],
        required_consumer_groups: vec!["required".to_owned()],
        consumer_group_idle_expiry: seconds(i64::try_from(2 * DAY).unwrap()),
        ..retention(0)
    })
    .await;
    let unit = row(&mut life.worker, "run", "one", 4).await;
    let mut taker = Taker::join(&life.service, subscription("run", "there")).await;
    taker.take_units(1).await;
    taker.ack(&[&unit]).await;
    drop(Taker::join(&life.service, subscription("run", "gone")).await);
    let names = |groups: &[v1::ConsumerGroupSummary]| -> Vec<String> {
        groups.iter().map(|group| group.consumer_group.clone()).collect()
    };
    let mut shown = groups(&life.service).await;
    while shown.iter().any(|group| group.consumer_group == "gone" && !group.consumers.is_empty()) {
        shown = groups(&life.service).await;
    }
    assert_eq!(names(&shown), ["declared", "gone", "required", "there"]);
    assert_eq!(shown.iter().map(|group| group.required).collect::<Vec<_>>(), [false, false, true, false]);
    let expires: Vec<_> = shown.iter().map(|group| group.expires_after.is_some()).collect();
    assert_eq!(expires, [true, true, false, false]);
    let idle_expiry = |taker: &Taker| taker.trainer.subscribed.idle_expiry.is_some();
    assert!(idle_expiry(&taker));

    advance(&life, 2 * DAY);
    while groups(&life.service).await.len() > 2 {}
    assert_eq!(names(&groups(&life.service).await), ["required", "there"]);
    // The required one holds the rollout still; it is the last to.
    assert_eq!(state(&life.settle(&about("run", "one")).await), v1::RolloutState::Finalised);
    let mut required = Taker::join(&life.service, subscription("run", "required")).await;
    assert!(!idle_expiry(&required) && !required.trainer.subscribed.created);
    // One that has expired is made anew, of what is still there.
    let mut again = Taker::join(&life.service, subscription("run", "gone")).await;
    assert!(again.trainer.subscribed.created);
    for taker in [&mut required, &mut again] {
        assert_eq!(taker.unit().await.unit_id, unit);
        assert_eq!(taker.ack(&[&unit]).await, [AckOutcome::Acknowledged]);
    }
    assert_eq!(life.until_ended(&about("run", "one")).await.outcome(), RolloutOutcome::Retired);
}

#[tokio::test]
async fn when_its_last_group_expires_a_rollout_is_unclaimed_from_then_on() {
    let expiry = seconds(i64::try_from(DAY).unwrap());
    let mut life = Life::start_with(v1::RunSettings { consumer_group_idle_expiry: expiry, ..retention(0) }).await;
    let unit = row(&mut life.worker, "run", "one", 4).await;
    drop(Taker::join(&life.service, subscription("run", "gone")).await);
    while groups(&life.service).await.iter().any(|group| !group.consumers.is_empty()) {}
    advance(&life, DAY);
    while !groups(&life.service).await.is_empty() {}
    assert_eq!(state(&life.settle(&about("run", "one")).await), v1::RolloutState::Finalised);
    advance(&life, DAY - 1);
    assert_eq!(state(&life.settle(&about("run", "one")).await), v1::RolloutState::Finalised);
    let mut taker = Taker::join(&life.service, subscription("run", "new")).await;
    assert_eq!(taker.unit().await.unit_id, unit);
}

#[tokio::test]
async fn what_a_clock_has_ended_stays_ended_after_a_restart_and_nothing_ends_while_the_service_is_down() {
    let log = Arc::new(MemoryLog::keeping());
    let service = TestService::start_on(Arc::clone(&log) as Arc<_>).await;
    service.create_run("run", retention(3600)).await;
    let mut life = Life::on(service).await;
    let units = rows(&mut life.worker, "run", 0, 2, 4).await;
    let mut taker = Taker::join(&life.service, subscription("run", "trainers")).await;
    taker.take_units(2).await;
    taker.ack(&units[..1]).await;
    advance(&life, HOUR);
    life.until_ended(&about("run", "0")).await;
    taker.ack(&units[1..]).await;
    advance(&life, HOUR - 1);
    assert_eq!(state(&life.settle(&about("run", "1")).await), v1::RolloutState::Finalised);
    drop(taker);
    life.service.running.stop().await;

    let mut life = Life::on(TestService::start_on(log).await).await;
    assert_eq!(life.until_ended(&about("run", "0")).await.outcome(), RolloutOutcome::Retired);
    assert_eq!(state(&life.settle(&about("run", "1")).await), v1::RolloutState::Finalised);
    advance(&life, HOUR);
    assert_eq!(life.until_ended(&about("run", "1")).await.outcome(), RolloutOutcome::Retired);
}

#[tokio::test]
async fn after_a_restart_units_wait_a_moment_for_those_who_hold_them() {
    let log = Arc::new(MemoryLog::keeping());
    let start = async || {
        let log = LogSource::Given(Arc::clone(&log) as Arc<dyn Log>);
        let options = ServiceOptions { log, restart_grace_ms: 20_000, ..ServiceOptions::default() };
        TestService::try_start(options).await.unwrap()
    };
    let service = start().await;
    let units = rows(&mut service.worker().await, "run", 0, 3, 4).await;
    let mut holder = Taker::join(&service, subscription("run", "trainers")).await;
    assert_eq!(unit_ids(&holder.take_units(3).await), units);
    drop(holder);
    service.running.stop().await;

    let service = start().await;
    let mut other = Taker::join(&service, subscription("run", "trainers")).await;
    assert!(other.quiet().await.is_empty());
    assert_eq!(other.waits(&service).await, [WaitingFor::RestartGrace]);
    // What comes now waits for nobody.
    let new = row(&mut service.worker().await, "run", "new", 4).await;
    assert_eq!(other.unit().await.unit_id, new);
    let held_unit_ids = units[..2].to_vec();
    let held = v1::Subscription { held_unit_ids: held_unit_ids.clone(), ..subscription("run", "trainers") };
    let mut holder = Taker::join(&service, held).await;
    assert_eq!(holder.trainer.subscribed.held_unit_ids, held_unit_ids);
    assert!(other.quiet().await.is_empty());
    service.clock.advance(Duration::from_secs(10));
    assert_eq!(other.unit().await.unit_id, units[2], "nobody has come back for it");
    assert_eq!(holder.ack(&units[..2]).await, [AckOutcome::Acknowledged; 2]);
    assert!(holder.quiet().await.is_empty());
}
