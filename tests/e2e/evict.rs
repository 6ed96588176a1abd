//! Tokens that leave memory and come back: nobody sees a difference, and memory stays within its budget.

use std::sync::Arc;

use hedgerow::log::segments::faulty::FaultyStorage;
use hedgerow::log::segments::{Durability, Options};
use hedgerow::proto::v1::report_request::Event;
use hedgerow::proto::v1::{self, AckOutcome, AnswerOutcome, RolloutState};
use hedgerow::service::{LogSource, ServiceOptions};

use crate::life::{Life, finish, heartbeat, seconds};
use crate::queue_taker::Taker;
use crate::service::{TestService, Unit, Worker, about, call, key, reward, seal, subscription};

const BUDGET_BYTES: u64 = 1 << 20;
/// Ids that each call adds.
const STEP: u32 = 1500;

async fn on(disk: &FaultyStorage, memory_budget_bytes: u64) -> TestService {
    let options = Options { durability: Durability::Os, segment_bytes: 1 << 20, ..Options::new(7) };
    let log = LogSource::Disk { storage: Arc::new(disk.clone()), options };
    let options = ServiceOptions { log, memory_budget_bytes, ..ServiceOptions::default() };
    TestService::try_start(options).await.expect("the service starts")
}

fn rollout(number: u32) -> v1::RolloutRef {
    about("run", &format!("{number}"))
}

/// The nth call of a rollout, which goes on from the one before it. No two rollouts share a block.
fn nth(rollout: u32, n: u32) -> Event {
    let at = |place: u32| if place % STEP == STEP - 1 { 7 } else { 100_000 * rollout + place };
    let prompt: Vec<u32> = (0..n * STEP + STEP - 1).map(at).collect();
    Event::Call(call(&format!("c{n}"), "main", u64::from(n), &prompt, &[7]))
}

async fn accepted(worker: &mut Worker, about: &v1::RolloutRef, event: Event) {
    let answer = worker.report(about, event).await;
    assert_eq!(answer.outcome(), AnswerOutcome::Accepted, "{answer:?}");
}

fn has_tokens(service: &TestService, about: &v1::RolloutRef) -> bool {
    service.running.store.show(&key(about), |view| view.rollout.has_tokens()).expect("it is there").expect("it is live")
}

fn used(service: &TestService) -> u64 {
    service.running.store.memory().used_bytes()
}

/// The row of a rollout of so many calls, each of which goes on from the one before.
fn check_row(unit: &Unit, rollout: u32, calls: u32) {
    let [row] = &unit.rows[..] else { panic!("{} rows", unit.rows.len()) };
    let at = |place: u32| if place % STEP == STEP - 1 { 7 } else { 100_000 * rollout + place };
    assert_eq!(row.token_ids, (0..calls * STEP).map(at).collect::<Vec<_>>());
    let trained = (0..calls * STEP).filter(|place| place % STEP == STEP - 1);
    let mask = (0..calls * STEP).zip(&row.loss_mask).filter(|(_, mask)| **mask == 1).map(|(place, _)| place);
    assert!(mask.eq(trained), "each call trains what it generated");
}

/// Rollouts that together take many times the memory go on in turn, each worker waiting for its answer before it goes on; then their
/// rows wait, all of them, for a trainer that comes late.
#[tokio::test]
async fn a_fleet_that_does_not_fit_into_memory_is_never_refused() {
    const ROLLOUTS: u32 = 24;
    const CALLS: u32 = 12;
    let service = on(&FaultyStorage::new(1), BUDGET_BYTES).await;
    service.create_run("run", v1::RunSettings::default()).await;
    let mut worker = service.worker().await;
    let mut most = 0;
    for n in 0..CALLS {
        for number in 0..ROLLOUTS {
            accepted(&mut worker, &rollout(number), nth(number, n)).await;
            most = most.max(used(&service));
        }
    }
    assert!((0..ROLLOUTS).any(|number| !has_tokens(&service, &rollout(number))));
    let mut life = Life::on(service).await;
    for number in 0..ROLLOUTS {
        let shown = life.shown(&rollout(number)).await;
        assert_eq!(shown.calls.len(), CALLS as usize);
        most = most.max(used(&life.service));
    }
    let service = life.service;
    for number in 0..ROLLOUTS {
        accepted(&mut worker, &rollout(number), finish(1.0)).await;
        most = most.max(used(&service));
    }
    assert!(most <= BUDGET_BYTES, "{most} bytes were held");
    let mut trainer = Taker::join(&service, subscription("run", "trainers")).await;
    for number in 0..ROLLOUTS {
        let unit = trainer.unit().await;
        assert_eq!(unit.rows[0].header.rollout_id, format!("{number}"), "in the order in which they were finalised");
        check_row(&unit, number, CALLS);
        assert_eq!(trainer.ack(&[unit.unit_id.as_str()]).await, [AckOutcome::Acknowledged]);
    }
    let again = worker.report(&rollout(0), nth(0, 0)).await;
    assert_eq!(again.outcome(), AnswerOutcome::AlreadyEnded);
}

/// A rollout of four calls, of which the last drifts; its tokens have left since others have come, of these numbers on.
async fn left(life: &mut Life, about: &v1::RolloutRef, others: u32) -> v1::GetRolloutResponse {
    for n in 0..3 {
        accepted(&mut life.worker, about, nth(99, n)).await;
    }
    let drifted: Vec<u32> = (0..STEP).collect();
    accepted(&mut life.worker, about, Event::Call(call("drifts", "main", 9, &drifted, &[7]))).await;
    let before = life.shown(about).await;
    leaves(life, about, others).await;
    before
}

/// Others come until this one's tokens have left.
async fn leaves(life: &mut Life, about: &v1::RolloutRef, others: u32) {
    // Who goes on later was used later.
    life.service.clock.advance(std::time::Duration::from_millis(5));
    let mut number = others;
    while has_tokens(&life.service, about) {
        number += 1;
        for n in 0..8 {
            accepted(&mut life.worker, &rollout(number), nth(number, n)).await;
        }
    }
}

/// What is shown, but for what it takes in memory.
fn timeless(mut shown: v1::GetRolloutResponse) -> v1::GetRolloutResponse {
    if let Some(summary) = &mut shown.summary {
        (summary.resident_bytes, summary.next_deadline) = (0, None);
    }
    shown
}

#[tokio::test]
async fn what_is_shown_and_answered_of_a_rollout_is_the_same_when_its_tokens_come_back() {
    let mut life = Life::on(on(&FaultyStorage::new(2), BUDGET_BYTES).await).await;
    let old = about("run", "old");
    let before = left(&mut life, &old, 0).await;
    assert_eq!(life.worker.report(&old, heartbeat()).await.outcome(), AnswerOutcome::Accepted);
    assert!(!has_tokens(&life.service, &old), "a sign of life needs none");
    let shown = life.shown(&old).await;
    assert!(has_tokens(&life.service, &old));
    let with_time = |mut shown: v1::GetRolloutResponse| {
        shown.summary.as_mut().expect("a summary").last_event_time = None;
        timeless(shown)
    };
    assert_eq!(with_time(shown), with_time(before));

    let other = about("run", "other");
    left(&mut life, &other, 1000).await;
    assert_eq!(life.worker.report(&other, nth(99, 1)).await.outcome(), AnswerOutcome::Duplicate);
    let conflict = life.worker.report(&other, Event::Call(call("c1", "main", 1, &[1], &[2]))).await;
    assert_eq!(conflict.refusal.expect("it is refused").reason, "call_conflict");
    accepted(&mut life.worker, &other, Event::Call(call("goes-on", "main", 10, &[1, 2], &[3]))).await;
}

#[tokio::test]
async fn a_deadline_makes_rows_of_a_rollout_whose_tokens_have_left() {
    let service = on(&FaultyStorage::new(3), BUDGET_BYTES).await;
    let settings = v1::RunSettings {
        missing_call: v1::MissingCallRule::Finalise.into(),
        missing_call_timeout: seconds(60),
        ..v1::RunSettings::default()
    };
    service.create_run("run", settings).await;
    let mut life = Life::on(service).await;
    let waits = about("run", "waits");
    for n in 0..3 {
        accepted(&mut life.worker, &waits, nth(98, n)).await;
    }
    accepted(&mut life.worker, &waits, Event::Seal(seal(&[("main", &["c0", "c1", "c2", "late"])]))).await;
    accepted(&mut life.worker, &waits, Event::Reward(reward(1.0))).await;
    leaves(&mut life, &waits, 0).await;
    life.service.clock.advance(std::time::Duration::from_secs(61));
    let shown = life.until(&waits, |shown| shown.summary.as_ref().is_some_and(|of| of.finalise_time.is_some())).await;
    let summary = shown.summary.expect("a summary");
    assert_eq!((summary.state(), summary.incomplete), (RolloutState::Finalised, true));
    let mut trainer = Taker::join(&life.service, subscription("run", "trainers")).await;
    check_row(&trainer.unit().await, 98, 3);
}

/// A disk that does not give back what was written has this one rollout refused, and nothing else; and takes nothing.
#[tokio::test]
async fn tokens_that_cannot_be_read_back_are_asked_for_again() {
    let disk = FaultyStorage::new(4);
    let mut life = Life::on(on(&disk, BUDGET_BYTES).await).await;
    let old = about("run", "old");
    left(&mut life, &old, 0).await;
    disk.fail_read_in(0);
    let refused = life.worker.report(&old, nth(99, 3)).await;
    let refusal = refused.refusal.expect("it is refused");
    assert_eq!((refusal.reason.as_str(), refusal.code), ("log_unreadable", 14), "{refusal:?}");
    assert!(refusal.retry_after.is_some() && refusal.call_id == "c3");
    accepted(&mut life.worker, &about("run", "new"), nth(97, 0)).await;
    disk.heal();
    accepted(&mut life.worker, &old, nth(99, 3)).await;
}

/// What the disk does not give back can be discarded all the same.
#[tokio::test]
async fn a_rollout_that_cannot_be_read_can_be_discarded() {
    let disk = FaultyStorage::new(4);
    let mut life = Life::on(on(&disk, BUDGET_BYTES).await).await;
    for (name, by_hand) in [("by hand", true), ("by its harness", false)] {
        let old = about("run", name);
        left(&mut life, &old, if by_hand { 0 } else { 50 }).await;
        disk.fail_read_in(0);
        if by_hand {
            let request =
                v1::DiscardRolloutRequest { rollout: Some(old.clone()), ..v1::DiscardRolloutRequest::default() };
            life.service.admin().await.discard_rollout(request).await.expect("it is discarded");
        } else {
            let end = crate::life::discard("lost", v1::DiscardDisposition::Final);
            accepted(&mut life.worker, &old, end).await;
        }
        disk.heal();
        life.has_ended(&old, heartbeat()).await;
    }
}

/// Rows that the disk does not give back end no subscription: others go on, and these can be released once it does.
#[tokio::test]
async fn a_unit_that_cannot_be_read_is_undeliverable_and_the_others_go_on() {
    let disk = FaultyStorage::new(4);
    let mut life = Life::on(on(&disk, BUDGET_BYTES).await).await;
    let old = rollout(99);
    for n in 0..3 {
        accepted(&mut life.worker, &old, nth(99, n)).await;
    }
    accepted(&mut life.worker, &old, finish(1.0)).await;
    leaves(&mut life, &old, 0).await;
    accepted(&mut life.worker, &rollout(1), finish(1.0)).await;
    disk.fail_read_in(0);
    let mut taker = Taker::join(&life.service, subscription("run", "trainers")).await;
    let notice = taker.notice().await;
    assert_eq!((notice.kind(), notice.rollout_id.as_str()), (v1::UnitNoticeKind::Undeliverable, "99"));
    disk.heal();
    let unit = taker.unit().await;
    assert_eq!(unit.rows[0].header.rollout_id, "1");
    let release = v1::ReleaseUnitRequest {
        run_id: "run".to_owned(),
        consumer_group: "trainers".to_owned(),
        unit_id: notice.unit_id.clone(),
        drop: false,
    };
    life.service.admin().await.release_unit(release).await.expect("it is released");
    let unit = taker.unit().await;
    assert_eq!(unit.unit_id, notice.unit_id);
    check_row(&unit, 99, 3);
}

/// The log is many times what memory may hold, and comes back within it.
#[tokio::test]
async fn what_does_not_fit_into_memory_is_there_again_after_a_restart() {
    const ROLLOUTS: u32 = 20;
    let disk = FaultyStorage::new(5);
    let service = on(&disk, BUDGET_BYTES).await;
    let mut worker = service.worker().await;
    for number in 0..ROLLOUTS {
        for n in 0..8 {
            accepted(&mut worker, &rollout(number), nth(number, n)).await;
        }
        if number % 2 == 0 {
            accepted(&mut worker, &rollout(number), finish(1.0)).await;
        }
    }
    service.running.stop().await;
    let service = on(&disk, BUDGET_BYTES).await;
    assert!(used(&service) <= BUDGET_BYTES / 100 * 76, "{} bytes", used(&service));
    let mut worker = service.worker().await;
    for number in 0..ROLLOUTS {
        if number % 2 == 1 {
            accepted(&mut worker, &rollout(number), nth(number, 8)).await;
            accepted(&mut worker, &rollout(number), finish(1.0)).await;
        }
    }
    let mut trainer = Taker::join(&service, subscription("run", "trainers")).await;
    let order = (0..ROLLOUTS).step_by(2).chain((1..ROLLOUTS).step_by(2));
    for number in order {
        let unit = trainer.unit().await;
        assert_eq!(unit.rows[0].header.rollout_id, format!("{number}"));
        check_row(&unit, number, 8 + number % 2);
        assert_eq!(trainer.ack(&[unit.unit_id.as_str()]).await, [AckOutcome::Acknowledged]);
    }
}
