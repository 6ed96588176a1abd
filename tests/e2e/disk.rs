//! The whole service on a disk that fails and forgets: what was answered is there after each crash, and nothing is answered once
//! the log has failed.

use std::sync::Arc;

use hedgerow::log::segments::faulty::{Fault, FaultyStorage};
use hedgerow::log::segments::{Durability, Options};
use hedgerow::proto::v1::report_request::Event;
use hedgerow::proto::v1::{self, AckOutcome, AnswerOutcome};
use hedgerow::service::{LogSource, ServiceOptions};

use crate::life::finish;
use crate::queue_taker::{Taker, unit_ids};
use crate::service::{TestService, Worker, about, call, subscription};

/// Small segments, so that there are many of them.
const SEGMENT_BYTES: u64 = 16 << 10;
const ROLLOUTS: usize = 4;
const CALLS: u64 = 6;

async fn on(disk: &FaultyStorage, durability: Durability) -> Option<TestService> {
    on_as(disk, Options { durability, ..Options::new(7) }).await
}

async fn on_as(disk: &FaultyStorage, options: Options) -> Option<TestService> {
    let options = Options { segment_bytes: SEGMENT_BYTES, ..options };
    let log = LogSource::Disk { storage: Arc::new(disk.clone()), options };
    TestService::try_start(ServiceOptions { log, ..ServiceOptions::default() }).await.ok()
}

/// All events, with the rollouts that they are about: calls of 300 ids, each after the one before, then a finish.
fn events() -> Vec<(v1::RolloutRef, Event)> {
    let of = |rollout: usize| {
        let about = about("run", &format!("{rollout}"));
        let at = |place: u32| if place % 300 == 299 { 9 } else { place };
        let prompt = move |id: u64| -> Vec<u32> { (0..u32::try_from(300 * id - 1).unwrap()).map(at).collect() };
        let calls = (1..=CALLS).map(move |id| Event::Call(call(&format!("{id}"), "main", id, &prompt(id), &[9])));
        calls.chain([finish(0.5)]).map(move |event| (about.clone(), event))
    };
    (0..ROLLOUTS).flat_map(of).collect()
}

/// Reports events from this one on until the log fails; how many were answered.
async fn report(service: &TestService, from: usize) -> usize {
    let mut worker = service.worker().await;
    for (at, (about, event)) in events().into_iter().enumerate().skip(from) {
        let answer = tokio::select! {
            answer = until_there_is_room(&mut worker, &about, &event) => answer,
            failure = service.running.log_failed() => {
                assert!(!failure.is_empty());
                return at;
            }
        };
        // The first may have come to the disk in the life before, unanswered.
        let known = at == from && answer.outcome() == AnswerOutcome::Duplicate;
        assert!(known || answer.outcome() == AnswerOutcome::Accepted, "event {at}: {answer:?}");
    }
    events().len()
}

/// The answer to an event, once a segment is ready for it: they are so small here that they may be made too late.
async fn until_there_is_room(worker: &mut Worker, about: &v1::RolloutRef, event: &Event) -> v1::Answer {
    loop {
        let answer = worker.report(about, event.clone()).await;
        if answer.refusal.as_ref().is_none_or(|refusal| refusal.reason != "log_full") {
            return answer;
        }
        tokio::task::yield_now().await;
    }
}

/// What was answered is known; the first event after it may be known too, for it may have come to the disk unanswered.
async fn check(service: &TestService, answered: usize) -> usize {
    let mut worker = service.worker().await;
    for (at, (about, event)) in events().into_iter().take(answered + 1).enumerate() {
        let outcome = until_there_is_room(&mut worker, &about, &event).await.outcome();
        let accepted = outcome == AnswerOutcome::Accepted && at == answered;
        assert!(outcome == AnswerOutcome::Duplicate || accepted, "event {at} of {answered}: {outcome:?}");
    }
    (answered + 1).min(events().len())
}

/// One life after another on one disk, each with a fault at another operation, until all is reported. Says how many lives.
async fn lives(seed: u64, fault: Fault, apart: u64) -> usize {
    let disk = FaultyStorage::new(seed);
    let (mut answered, mut lives) = (0, 0);
    while answered < events().len() {
        lives += 1;
        // It grows, so that it comes to an end.
        disk.fail_in(apart + lives as u64 * 3, fault);
        if let Some(service) = on(&disk, Durability::Fsync).await {
            if answered > 0 {
                disk.heal();
                answered = check(&service, answered).await;
                disk.fail_in(apart + lives as u64 * 3, fault);
            }
            answered = report(&service, answered).await;
            service.running.stop().await;
        }
        disk.crash();
    }
    let service = on(&disk, Durability::Fsync).await.expect("the disk is sound again");
    assert_eq!(check(&service, answered).await, answered);
    let mut taker = Taker::join(&service, subscription("run", "trainers")).await;
    let units = taker.take_units(ROLLOUTS).await;
    let rows: Vec<_> = units.iter().map(|unit| (unit.rows[0].trains().len(), unit.rows[0].token_ids.len())).collect();
    assert_eq!(rows, [(CALLS as usize, 300 * CALLS as usize); ROLLOUTS]);
    let ids = unit_ids(&units).into_iter().map(str::to_owned).collect::<Vec<_>>();
    assert_eq!(taker.ack(&ids).await, [AckOutcome::Acknowledged; ROLLOUTS]);
    drop(taker);
    service.running.stop().await;
    disk.crash();
    let service = on(&disk, Durability::Fsync).await.expect("the disk is sound");
    let mut worker = service.worker().await;
    for (about, event) in events() {
        assert_eq!(worker.report(&about, event).await.outcome(), AnswerOutcome::AlreadyEnded);
    }
    lives as usize
}

#[tokio::test]
async fn what_was_answered_is_there_however_the_disk_fails() {
    let mut all = 0;
    for (seed, fault) in [(1, Fault::Crash), (2, Fault::Error), (3, Fault::Full)] {
        for apart in [0, 11, 17] {
            all += lives(seed, fault, apart).await;
        }
    }
    // Nine disks, each with several lives.
    assert!(all >= 27, "{all} lives: the faults come too late to matter");
}

/// A log of a few segments is enough for any number of rollouts, if trainers take what is made; and each is known to have ended,
/// though nothing is left of it, after any crash.
#[tokio::test]
async fn room_comes_back_and_what_has_ended_is_known_all_the_same() {
    const BUDGET_BYTES: u64 = 24 * SEGMENT_BYTES;
    const LIVES: usize = 3;
    const ROLLOUTS_EACH: usize = 120;
    let disk = FaultyStorage::new(11);
    let open = async || on_as(&disk, Options { budget_bytes: BUDGET_BYTES, ..Options::new(7) }).await.unwrap();
    let call = |rollout: usize| {
        let member = v1::RolloutRef { group_id: format!("g{}", rollout / 4), ..about("run", &format!("{rollout}")) };
        (member, Event::Call(call("c", "main", 1, &[7; 700], &[9])))
    };
    for life in 0..LIVES {
        let service = open().await;
        let mut worker = service.worker().await;
        let mut taker = Taker::join(&service, subscription("run", "trainers")).await;
        for rollout in life * ROLLOUTS_EACH..(life + 1) * ROLLOUTS_EACH {
            let (member, event) = call(rollout);
            let size = Event::Open(v1::Open { group_size: Some(4), ..v1::Open::default() });
            for event in [size, event, finish(0.5)] {
                let answer = until_there_is_room(&mut worker, &member, &event).await;
                assert_eq!(answer.outcome(), AnswerOutcome::Accepted, "{answer:?}");
            }
            let unit = taker.unit().await.unit_id;
            assert_eq!(taker.ack(&[unit]).await, [AckOutcome::Acknowledged]);
        }
        // Each call has 2.8 kB: all of them have some three times what there is room for.
        assert!(disk.used_bytes() <= BUDGET_BYTES, "{} bytes", disk.used_bytes());
        drop((worker, taker));
        disk.crash();
        let service = open().await;
        let mut worker = service.worker().await;
        for rollout in 0..(life + 1) * ROLLOUTS_EACH {
            let (member, event) = call(rollout);
            assert_eq!(worker.report(&member, event).await.outcome(), AnswerOutcome::AlreadyEnded, "{rollout}");
        }
        // Places in groups are taken still.
        let fifth = v1::RolloutRef { group_id: "g0".to_owned(), ..about("run", "fifth") };
        let refusal = worker.report(&fifth, Event::Heartbeat(v1::Heartbeat {})).await.refusal.unwrap();
        assert_eq!(refusal.reason, "group_full");
        let mut taker = Taker::join(&service, subscription("run", "trainers")).await;
        assert_eq!(taker.heartbeat(&service).await.queued_units, 0);
        drop((worker, taker));
        disk.crash();
    }
}

/// What lives long, open or waiting for a trainer, is written forward and holds nobody up; and it is counted once, though what the
/// run has counted is written as well.
#[tokio::test]
async fn what_lives_long_is_written_forward_and_counted_once() {
    const BUDGET_BYTES: u64 = 24 * SEGMENT_BYTES;
    const WAITING: usize = 8;
    const ROLLOUTS_EACH: usize = 120;
    let disk = FaultyStorage::new(12);
    let open = async || on_as(&disk, Options { budget_bytes: BUDGET_BYTES, ..Options::new(7) }).await.unwrap();
    let events = |name: &str| {
        let member = about("run", name);
        [(member.clone(), Event::Call(call("c", "main", 1, &[7; 700], &[9]))), (member, finish(0.5))]
    };
    let service = open().await;
    let mut worker = service.worker().await;
    drop(Taker::join(&service, subscription("run", "trainers")).await);
    let open_rollout = about("run", "open");
    worker.report(&open_rollout, Event::Call(call("c", "main", 1, &[7; 700], &[9]))).await;
    for (member, event) in (0..WAITING).flat_map(|waiting| events(&format!("waiting-{waiting}"))) {
        assert_eq!(worker.report(&member, event).await.outcome(), AnswerOutcome::Accepted);
    }
    drop(worker);
    drop(service);
    disk.crash();
    for life in 0..2 {
        let service = open().await;
        let mut worker = service.worker().await;
        let mut taker = Taker::join(&service, subscription("run", "trainers")).await;
        taker.take_units(WAITING).await;
        for rollout in 0..ROLLOUTS_EACH {
            for (member, event) in events(&format!("{life}-{rollout}")) {
                let mut tries = 0;
                while worker.report(&member, event.clone()).await.outcome() != AnswerOutcome::Accepted {
                    tries += 1;
                    assert!(tries < 1000, "the log stays full");
                    service.clock.advance(std::time::Duration::from_secs(1));
                }
            }
            let unit = taker.unit().await.unit_id;
            assert_eq!(taker.ack(&[unit]).await, [AckOutcome::Acknowledged]);
        }
        drop((worker, taker, service));
        disk.crash();
        let service = open().await;
        let mut inspect = service.inspect().await;
        let run = inspect.list_runs(v1::ListRunsRequest::default()).await.unwrap().into_inner().runs.remove(0);
        let ended = (life + 1) * ROLLOUTS_EACH + WAITING;
        let ledger = &run.ledgers[0];
        assert_eq!((ledger.accepted, ledger.trained, ledger.pending), (ended as u64 + 1, ended as u64, 1));
        drop((inspect, service));
        disk.crash();
    }
}

/// What is acknowledged and kept all the same gives way to what comes; a consumer group that is made later gets the rest.
#[tokio::test]
async fn what_is_retained_holds_nobody_up() {
    const BUDGET_BYTES: u64 = 24 * SEGMENT_BYTES;
    const ROLLOUTS: usize = 300;
    let disk = FaultyStorage::new(13);
    let open = async || on_as(&disk, Options { budget_bytes: BUDGET_BYTES, ..Options::new(7) }).await.unwrap();
    let service = open().await;
    let retention = prost_types::Duration { seconds: 3600, nanos: 0 };
    service.create_run("run", v1::RunSettings { retention: Some(retention), ..v1::RunSettings::default() }).await;
    let mut worker = service.worker().await;
    let mut taker = Taker::join(&service, subscription("run", "trainers")).await;
    for rollout in 0..ROLLOUTS {
        let member = about("run", &format!("{rollout}"));
        for event in [Event::Call(call("c", "main", 1, &[7; 700], &[9])), finish(0.5)] {
            let answer = until_there_is_room(&mut worker, &member, &event).await;
            assert_eq!(answer.outcome(), AnswerOutcome::Accepted, "{answer:?}");
        }
        let unit = taker.unit().await.unit_id;
        assert_eq!(taker.ack(&[unit]).await, [AckOutcome::Acknowledged]);
    }
    assert!(disk.used_bytes() <= BUDGET_BYTES, "{} bytes", disk.used_bytes());
    drop((worker, taker, service));
    disk.crash();
    let service = open().await;
    let mut late = Taker::join(&service, subscription("run", "late")).await;
    let kept = late.quiet().await;
    let newest: Vec<_> = (ROLLOUTS - kept.len()..ROLLOUTS).map(|rollout| format!("run/{rollout}/0/main/c")).collect();
    assert!(kept.len() > 20 && kept.len() < ROLLOUTS / 2, "{} of {ROLLOUTS}", kept.len());
    assert_eq!(unit_ids(&kept), newest, "the newest stay");
}

#[tokio::test]
async fn what_the_system_had_outlives_the_process() {
    let disk = FaultyStorage::new(5);
    let service = on(&disk, Durability::Os).await.unwrap();
    let answered = report(&service, 0).await;
    assert_eq!(answered, events().len());
    disk.kill();
    let service = on(&disk, Durability::Os).await.unwrap();
    check(&service, answered).await;
}
