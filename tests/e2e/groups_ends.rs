//! Groups in any order, with members that fail, expire, come again or never come: none is given out half unless the run said so, and
//! then it says who is missing.

use std::sync::Arc;
use std::time::Duration;

use hedgerow::error::Reason;
use hedgerow::log::memory::MemoryLog;
use hedgerow::proto::v1;
use hedgerow::proto::v1::report_request::Event;
use hedgerow::proto::v1::{DiscardDisposition, RolloutOutcome, UnitNoticeKind};

use crate::groups::{finish, rows_of, settings, sized, taker_rows};
use crate::life::{Life, attempt, discard, in_group, seconds};
use crate::queue_taker::{Taker, reason, unit_ids};
use crate::service::{TestService, Unit, about, call, subscription};

fn mean() -> v1::RunSettings {
    settings(v1::Estimator::Mean)
}

fn by_quorum(quorum: u32) -> v1::RunSettings {
    let group_release = v1::GroupReleaseRule::Quorum.into();
    v1::RunSettings { group_release, group_quorum: Some(quorum), ..mean() }
}

/// Rollouts with their attempts and advantages, in the order of units.
fn advantages(units: &[Unit]) -> Vec<(&str, u32, Option<f64>)> {
    let rows = units.iter().flat_map(|unit| &unit.rows);
    rows.map(|row| (row.header.rollout_id.as_str(), row.header.attempt, row.header.advantage)).collect()
}

fn absences(figures: Option<&v1::GroupFigures>) -> Vec<(&str, u32, &str)> {
    let absences = figures.unwrap().absences.iter();
    absences.map(|absence| (absence.rollout_id.as_str(), absence.attempt, absence.reason.as_str())).collect()
}

async fn trainers(life: &Life) -> Taker {
    Taker::join(&life.service, subscription("run", "trainers")).await
}

#[tokio::test]
async fn members_that_fail_or_expire_are_missing_and_the_others_are_compared() {
    let mut life = Life::start_with(v1::RunSettings { idle_timeout: seconds(60), ..mean() }).await;
    let mut taker = trainers(&life).await;
    life.finalised("d", 4, 1, 3.0).await;
    let failed = life.member("c", 4, 1).await;
    life.accepts(&failed, discard("the sandbox died", DiscardDisposition::Final)).await;
    life.member("b", 4, 1).await;
    life.finalised("a", 4, 1, 1.0).await;
    assert!(taker.quiet().await.is_empty(), "one is open");
    life.service.clock.advance(Duration::from_secs(61));
    let units = taker.take_units(2).await;
    assert_eq!(advantages(&units), [("a", 0, Some(-1.0)), ("d", 0, Some(1.0))]);
    let figures = units[0].group.as_ref();
    assert_eq!(absences(figures), [("b", 0, "idle_timeout"), ("c", 0, "the sandbox died")]);
    assert_eq!(figures.unwrap().release(), v1::GroupRelease::Whole, "they are out for good");
    assert!(taker.quiet().await.is_empty());
}

#[tokio::test]
async fn a_place_stays_open_for_the_next_attempt_which_counts_alone() {
    let mut life = Life::start_with(mean()).await;
    let mut taker = trainers(&life).await;
    life.finalised("a", 3, 1, 2.0).await;
    let retried = life.member("b", 3, 1).await;
    life.accepts(&retried, discard("again", DiscardDisposition::WillRetry)).await;
    // One is superseded while it is open.
    life.member("c", 3, 1).await;
    let newer = attempt(&in_group("c", "g"), 1);
    life.calls(&newer, 1).await;
    life.accepts(&newer, finish(4.0)).await;
    assert!(taker.quiet().await.is_empty(), "another attempt is to come");
    let again = attempt(&retried, 1);
    life.calls(&again, 1).await;
    life.accepts(&again, finish(6.0)).await;
    let units = taker.take_units(3).await;
    assert_eq!(advantages(&units), [("a", 0, Some(-2.0)), ("b", 1, Some(2.0)), ("c", 1, Some(0.0))]);
    assert!(absences(units[0].group.as_ref()).is_empty());
}

#[tokio::test]
async fn an_attempt_that_comes_after_delivery_is_refused() {
    let mut life = Life::start_with(mean()).await;
    let mut taker = trainers(&life).await;
    let gone = life.member("c", 3, 1).await;
    life.accepts(&gone, discard("lost", DiscardDisposition::Unspecified)).await;
    for (rollout, reward) in [("a", 0.0), ("b", 2.0)] {
        life.finalised(rollout, 3, 1, reward).await;
    }
    let units = taker.take_units(2).await;
    assert_eq!(absences(units[0].group.as_ref()), [("c", 0, "lost")]);
    life.refuses(&attempt(&gone, 1), sized(3), Reason::GroupReleased, "rollout.group_id").await;
    life.refuses(&attempt(&in_group("a", "g"), 1), finish(1.0), Reason::RolloutFinalised, "rollout.attempt").await;
    assert!(taker.quiet().await.is_empty());
}

#[tokio::test]
async fn fewer_than_two_members_are_dropped_with_a_reason() {
    let mut life = Life::start_with(mean()).await;
    let mut taker = trainers(&life).await;
    life.finalised("a", 2, 2, 1.0).await;
    let failed = life.member("b", 2, 1).await;
    life.accepts(&failed, discard("lost", DiscardDisposition::Final)).await;
    let notice = taker.notice().await;
    assert_eq!((notice.kind(), notice.reason.as_str()), (UnitNoticeKind::GroupDropped, "too_few_members"));
    let group = life.group("g").await;
    assert_eq!((group.drop_reason.as_str(), group.finalised_rollouts, group.out_rollouts), ("too_few_members", 1, 1));
    assert_eq!(life.until_ended(&in_group("a", "g")).await.reason, "group_dropped");
    assert_eq!(taker_rows(&life).await.dropped.get("group_dropped"), Some(&2));
}

#[tokio::test]
async fn without_a_quorum_nothing_is_given_out_half_until_the_time_is_over() {
    let mut life = Life::start_with(v1::RunSettings { group_timeout: seconds(600), ..mean() }).await;
    let mut taker = trainers(&life).await;
    life.finalised("a", 4, 1, 0.0).await;
    life.service.clock.advance(Duration::from_secs(500));
    life.finalised("b", 4, 1, 1.0).await;
    life.member("c", 4, 1).await;
    assert_eq!(life.group("g").await.timeout_after, seconds(100));
    assert!(taker.quiet().await.is_empty());
    life.service.clock.advance(Duration::from_secs(101));
    let units = taker.take_units(2).await;
    assert_eq!(advantages(&units), [("a", 0, Some(-0.5)), ("b", 0, Some(0.5))]);
    let figures = units[1].group.as_ref();
    assert_eq!(figures.unwrap().release(), v1::GroupRelease::Timeout);
    assert_eq!(absences(figures), [("c", 0, "not_finalised"), ("", 0, "never_came")]);
}

#[tokio::test]
async fn a_quorum_releases_and_who_comes_late_is_told() {
    let mut life = Life::start_with(by_quorum(2)).await;
    let mut taker = trainers(&life).await;
    let late = life.member("c", 3, 2).await;
    life.finalised("b", 3, 1, 1.0).await;
    life.finalised("a", 3, 1, 0.0).await;
    let units = taker.take_units(2).await;
    assert_eq!(advantages(&units), [("a", 0, Some(-0.5)), ("b", 0, Some(0.5))]);
    assert_eq!(units[0].group.as_ref().unwrap().release(), v1::GroupRelease::Quorum);
    assert_eq!(absences(units[0].group.as_ref()), [("c", 0, "not_finalised")]);
    life.accepts(&late, finish(5.0)).await;
    let notice = taker.notice().await;
    assert_eq!((notice.kind(), notice.rollout_id.as_str(), notice.units), (UnitNoticeKind::Late, "c", 1));
    let ended = life.until_ended(&late).await;
    assert_eq!((ended.outcome(), ended.reason.as_str()), (RolloutOutcome::Retired, "late"));
    assert_eq!(taker_rows(&life).await.dropped.get("late"), Some(&2));
    assert!(taker.quiet().await.is_empty());
    // A place that nobody took is taken by nobody any more.
    life.refuses(&in_group("d", "g"), sized(3), Reason::GroupReleased, "rollout.group_id").await;
}

#[tokio::test]
async fn a_group_whose_size_nobody_said_waits_for_its_time() {
    let mut life = Life::start_with(v1::RunSettings { group_timeout: seconds(60), ..mean() }).await;
    let mut taker = trainers(&life).await;
    for (rollout, reward) in [("a", 0.0), ("b", 2.0)] {
        let member = in_group(rollout, "g");
        life.calls(&member, 1).await;
        life.accepts(&member, finish(reward)).await;
    }
    assert!(taker.quiet().await.is_empty(), "more may come");
    // Somebody says it in the end.
    let third = in_group("c", "g");
    life.accepts(&third, sized(3)).await;
    life.calls(&third, 1).await;
    life.accepts(&third, finish(4.0)).await;
    assert_eq!(advantages(&taker.take_units(3).await).len(), 3);
    let unsaid = v1::RolloutRef { group_id: "h".to_owned(), ..about("run", "x") };
    life.calls(&unsaid, 1).await;
    life.accepts(&unsaid, finish(1.0)).await;
    assert!(taker.quiet().await.is_empty());
    life.service.clock.advance(Duration::from_secs(61));
    assert_eq!(taker.notice().await.reason, "too_few_members");
}

#[tokio::test]
async fn what_is_acknowledged_of_a_group_stays_until_all_of_it_is() {
    let log = Arc::new(MemoryLog::keeping());
    let service = TestService::start_on(Arc::clone(&log) as Arc<_>).await;
    service.create_run("run", v1::RunSettings { retention: None, ..mean() }).await;
    let mut life = Life::on(service).await;
    let mut taker = trainers(&life).await;
    for (rollout, reward) in [("a", 0.0), ("b", 2.0)] {
        life.finalised(rollout, 2, 1, reward).await;
    }
    let units = taker.take_units(2).await;
    taker.ack(&[&units[0].unit_id]).await;
    let mut later = Taker::join(&life.service, subscription("run", "later")).await;
    let given: Vec<Unit> = later.take_units(2).await;
    assert_eq!(rows_of(given), rows_of(units.clone()), "who comes later is given the whole group");
    later.ack(&unit_ids(&units)).await;
    assert!(life.look(&in_group("a", "g")).await.is_ok_and(|shown| crate::life::ended(&shown).is_none()));
    drop((taker, later, life));

    // The same after a restart, while half of it is acknowledged.
    let mut life = Life::on(TestService::start_on(log).await).await;
    let mut taker = trainers(&life).await;
    life.service.clock.advance(Duration::from_secs(60));
    let rest = taker.unit().await;
    assert_eq!((&rest.unit_id, &rest.rows), (&units[1].unit_id, &units[1].rows));
    taker.ack(&[&rest.unit_id]).await;
    for member in ["a", "b"] {
        let ended = life.until_ended(&in_group(member, "g")).await;
        assert_eq!((ended.outcome(), ended.reason.as_str()), (RolloutOutcome::Retired, "acknowledged"));
    }
    let figures = life.group("g").await.figures.unwrap();
    assert_eq!((figures.reward_mean, figures.counted_rollouts), (1.0, 2), "it is known still");
}

#[tokio::test]
async fn what_waits_for_its_group_waits_on_after_a_restart() {
    let log = Arc::new(MemoryLog::keeping());
    let service = TestService::start_on(Arc::clone(&log) as Arc<_>).await;
    service.create_run("run", mean()).await;
    let mut life = Life::on(service).await;
    life.finalised("a", 2, 1, 0.0).await;
    // Settings that come later are for groups that begin later.
    let update = v1::UpdateRunSettingsRequest {
        run_id: "run".to_owned(),
        settings: Some(settings(v1::Estimator::None)),
        expected_settings_version: 0,
    };
    life.service.admin().await.update_run_settings(update).await.unwrap();
    drop(life);
    let mut life = Life::on(TestService::start_on(log).await).await;
    let mut taker = trainers(&life).await;
    assert!(taker.quiet().await.is_empty());
    life.finalised("b", 2, 1, 2.0).await;
    let units = taker.take_units(2).await;
    assert_eq!(advantages(&units), [("a", 0, Some(-1.0)), ("b", 0, Some(1.0))]);
    let other = v1::RolloutRef { group_id: "h".to_owned(), ..about("run", "x") };
    life.accepts(&other, Event::Call(call("c0", "main", 1, &[1], &[2]))).await;
    life.accepts(&other, finish(1.0)).await;
    assert_eq!(advantages(&[taker.unit().await]), [("x", 0, None)], "it begins without an estimator");
}

async fn release_by_hand(life: &Life, group: &str) -> Result<v1::GroupSummary, (tonic::Code, String)> {
    let request = v1::ReleaseGroupRequest { run_id: "run".to_owned(), group_id: group.to_owned() };
    let answer = life.service.admin().await.release_group(request).await;
    answer.map(|answer| answer.into_inner().group.unwrap()).map_err(|status| (status.code(), reason(&status)))
}

#[tokio::test]
async fn a_group_can_be_released_by_hand_with_what_it_has() {
    let mut life = Life::start_with(mean()).await;
    let mut taker = trainers(&life).await;
    life.finalised("a", 4, 1, 1.0).await;
    life.finalised("b", 4, 1, 3.0).await;
    let open = life.member("c", 4, 1).await;
    assert!(taker.quiet().await.is_empty());
    let group = release_by_hand(&life, "g").await.unwrap();
    let figures = group.figures.as_ref();
    assert_eq!(figures.unwrap().release(), v1::GroupRelease::Operator);
    assert_eq!(absences(figures), [("c", 0, "not_finalised"), ("", 0, "never_came")]);
    let units = taker.take_units(2).await;
    assert_eq!(advantages(&units), [("a", 0, Some(-1.0)), ("b", 0, Some(1.0))]);
    assert_eq!(units[0].group.as_ref().unwrap().release(), v1::GroupRelease::Operator);
    // Once more: it is as it was released, and who comes late is told.
    life.accepts(&open, finish(5.0)).await;
    assert_eq!(release_by_hand(&life, "g").await.unwrap().figures.unwrap().reward_mean, 2.0);
    assert!(taker.quiet().await.is_empty(), "nothing of it goes out twice");

    assert_eq!(
        release_by_hand(&life, "other").await.unwrap_err(),
        (tonic::Code::NotFound, "group_not_found".to_owned())
    );
    let service = TestService::start().await;
    let mut life = Life::on(service).await;
    life.member("a", 2, 1).await;
    let not_awaited = (tonic::Code::FailedPrecondition, "group_not_awaited".to_owned());
    assert_eq!(release_by_hand(&life, "g").await.unwrap_err(), not_awaited);
}
