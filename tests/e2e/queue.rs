//! Trainers that die, members of one group, several groups, nobody yet: no row is lost, and none is with two at once.

use std::collections::BTreeSet;
use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};

use hedgerow::proto::v1::report_request::Event;
use hedgerow::proto::v1::{self, AckOutcome, AnswerOutcome};
use tonic::transport::Channel;

use crate::queue_taker::{Taker, finish, row, rows, unit_ids};
use crate::service::{TestService, Trainer, about, call, subscription};

#[tokio::test]
async fn rows_wait_until_a_trainer_comes() {
    let service = TestService::start().await;
    let mut worker = service.worker().await;
    let made = rows(&mut worker, "run", 0, 20, 5).await;
    let mut taker = Taker::join(&service, subscription("run", "trainers")).await;
    assert!(taker.trainer.subscribed.created);
    let units = taker.take_units(20).await;
    assert_eq!(unit_ids(&units), made, "in the order in which they were finalised");
    assert!(units.iter().all(|unit| unit.delivery_count == 1 && unit.tokens == 5));
}

#[tokio::test]
async fn members_of_a_group_get_disjoint_units_and_all_of_them() {
    let service = TestService::start().await;
    let mut worker = service.worker().await;
    let mut a = Taker::join(&service, subscription("run", "trainers")).await;
    let mut b = Taker::join(&service, subscription("run", "trainers")).await;
    let made: BTreeSet<String> = rows(&mut worker, "run", 0, 30, 5).await.into_iter().collect();
    let (of_a, of_b) = (a.quiet().await, b.quiet().await);
    let ids = |units: &[crate::service::Unit]| units.iter().map(|unit| unit.unit_id.clone()).collect::<BTreeSet<_>>();
    assert_eq!((of_a.len(), of_b.len()), (15, 15));
    assert!(ids(&of_a).is_disjoint(&ids(&of_b)));
    assert_eq!(&ids(&of_a) | &ids(&of_b), made);
}

#[tokio::test]
async fn each_of_several_groups_gets_everything() {
    let service = TestService::start().await;
    let mut worker = service.worker().await;
    let mut first = Taker::join(&service, subscription("run", "first")).await;
    let made = rows(&mut worker, "run", 0, 5, 5).await;
    let mut second = Taker::join(&service, subscription("run", "second")).await;
    assert_eq!(unit_ids(&first.take_units(5).await), made);
    assert_eq!(unit_ids(&second.take_units(5).await), made);
    assert_eq!(first.ack(&made).await, [AckOutcome::Acknowledged; 5]);
    let reference = about("run", "0");
    let answer = worker.report(&reference, finish(1.0)).await;
    assert_eq!(answer.outcome(), AnswerOutcome::Duplicate, "the other group holds it");
    assert_eq!(second.ack(&made[..1]).await, [AckOutcome::Acknowledged]);
    let answer = worker.report(&reference, finish(1.0)).await;
    assert_eq!(answer.outcome(), AnswerOutcome::AlreadyEnded);
    let held = service.running.store.show(&crate::service::key(&about("run", "1")), |_| ());
    assert!(held.is_some_and(|held| held.is_ok()), "what is not settled everywhere is no tombstone");
}

/// A rollout whose one row takes three messages.
async fn large_row(worker: &mut crate::service::Worker, run: &str, rollout: &str) -> String {
    let prompt: Vec<u32> = (0..600_000).collect();
    let reference = about(run, rollout);
    let answer = worker.report(&reference, Event::Call(call("c", "main", 1, &prompt, &[7; 10]))).await;
    assert_eq!(answer.outcome(), AnswerOutcome::Accepted, "{answer:?}");
    worker.report(&reference, finish(1.0)).await;
    crate::queue_taker::row_id(run, rollout)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_trainer_that_is_cut_at_any_message_leaves_its_units_to_another() {
    let service = TestService::start().await;
    let mut worker = service.worker().await;
    // Two units of three messages each, and heartbeats between.
    for messages in 0..=7 {
        let run = format!("run-{messages}");
        let mut victim = service.trainer(subscription(&run, "trainers")).await;
        let made = [large_row(&mut worker, &run, "x").await, large_row(&mut worker, &run, "y").await];
        for _ in 0..messages {
            victim.next().await.unwrap();
        }
        let mut idle = Taker::join(&service, subscription(&run, "trainers")).await;
        drop(victim);
        let units = idle.take_units(2).await;
        assert_eq!(unit_ids(&units), made, "cut after {messages} messages");
        for unit in &units {
            assert_eq!(unit.rows[0].token_ids.len(), 600_010);
            assert!(unit.rows[0].token_ids[..600_000].iter().copied().eq(0..600_000));
        }
        assert_eq!(idle.ack(&made).await, [AckOutcome::Acknowledged; 2]);
    }
}

#[tokio::test]
async fn units_of_a_dead_trainer_go_to_one_that_waits_already() {
    let service = TestService::start().await;
    let mut worker = service.worker().await;
    let mut victim = Taker::join(&service, subscription("run", "trainers")).await;
    let made = rows(&mut worker, "run", 0, 4, 5).await;
    victim.take_units(4).await;
    assert_eq!(victim.ack(&made[1..2]).await, [AckOutcome::Acknowledged]);
    let mut idle = Taker::join(&service, subscription("run", "trainers")).await;
    assert!(idle.quiet().await.is_empty(), "what is leased is with one only");
    drop(victim);
    let units = idle.take_units(3).await;
    assert_eq!(unit_ids(&units), [made[0].as_str(), &made[2], &made[3]], "what was acknowledged is not sent again");
    assert!(units.iter().all(|unit| unit.delivery_count == 2));
}

const VICTIM_OF: &str = "HEDGEROW_TEST_VICTIM_OF";

/// Not a test by itself: the trainer that [`a_killed_process_leaves_its_units_to_another`] starts and kills.
#[tokio::test]
async fn victim() {
    let Ok(address) = std::env::var(VICTIM_OF) else { return };
    let channel = Channel::from_shared(address).unwrap().connect().await.unwrap();
    let mut trainer = Trainer::subscribe(channel, subscription("run", "trainers")).await.unwrap();
    let (first, second, third) = (trainer.unit().await, trainer.unit().await, trainer.unit().await);
    let acked = trainer.ack(&[first.unit_id]).await;
    assert_eq!(acked[0].outcome(), AckOutcome::Acknowledged);
    println!("holds {} {}", second.unit_id, third.unit_id);
    std::future::pending().await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_killed_process_leaves_its_units_to_another() {
    let service = TestService::start().await;
    let mut worker = service.worker().await;
    let made = rows(&mut worker, "run", 0, 3, 5).await;
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "queue::victim", "--nocapture"])
        .env(VICTIM_OF, format!("http://{}", service.running.grpc_address))
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let output = BufReader::new(child.stdout.take().unwrap());
    let says = tokio::task::spawn_blocking(move || {
        output.lines().map_while(Result::ok).find_map(|line| Some(line.split_once("holds ")?.1.to_owned()))
    });
    assert_eq!(says.await.unwrap().unwrap(), format!("{} {}", made[1], made[2]));
    let mut idle = Taker::join(&service, subscription("run", "trainers")).await;
    assert!(idle.quiet().await.is_empty());
    child.kill().unwrap();
    child.wait().unwrap();
    let units = idle.take_units(2).await;
    assert_eq!(unit_ids(&units), [made[1].as_str(), &made[2]]);
    assert!(units.iter().all(|unit| unit.delivery_count == 2));
    assert_eq!(
        idle.ack(&made).await,
        [AckOutcome::AlreadyAcknowledged, AckOutcome::Acknowledged, AckOutcome::Acknowledged]
    );
}

#[tokio::test]
async fn a_run_that_is_deleted_ends_its_subscriptions() {
    let service = TestService::start().await;
    let mut worker = service.worker().await;
    let mut taker = Taker::join(&service, subscription("run", "trainers")).await;
    row(&mut worker, "run", "x", 5).await;
    taker.unit().await;
    let delete = |force| v1::DeleteRunRequest { run_id: "run".to_owned(), force };
    let mut admin = service.admin().await;
    let refused = admin.delete_run(delete(false)).await.unwrap_err();
    assert_eq!(crate::queue_taker::reason(&refused), "run_not_empty");
    let deleted = admin.delete_run(delete(true)).await.unwrap().into_inner();
    assert_eq!((deleted.open_rollouts, deleted.unacknowledged_rows), (0, 1));
    let end = taker.end().await.unwrap();
    assert_eq!((end.code(), crate::queue_taker::reason(&end).as_str()), (tonic::Code::NotFound, "run_not_found"));
}
