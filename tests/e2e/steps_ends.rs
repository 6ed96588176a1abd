//! How steps end: seeks, drops, staleness, groups, and the log.

use std::sync::Arc;
use std::time::Duration;

use hedgerow::log::memory::MemoryLog;
use hedgerow::proto::v1::report_request::Event;
use hedgerow::proto::v1::subscribe_request::Request;
use hedgerow::proto::v1::trainer_service_client::TrainerServiceClient;
use hedgerow::proto::v1::{self, AckOutcome, UnitNoticeKind};

use crate::groups::settings as of_run;
use crate::life::{Life, seconds};
use crate::queue_taker::{Taker, reason, rows};
use crate::service::{TestService, Trainer, about};
use crate::staleness::sampled;
use crate::steps::{again, bytes, rank, settings, shard_id};

async fn checkpoint(service: &TestService) -> v1::CheckpointResponse {
    let mut trainer = TrainerServiceClient::new(service.channel().await);
    let request = v1::CheckpointRequest { run_id: "run".to_owned(), consumer_group: "ranks".to_owned() };
    trainer.checkpoint(request).await.unwrap().into_inner()
}

async fn seek(service: &TestService, to: &v1::CheckpointResponse) -> u64 {
    let mut trainer = TrainerServiceClient::new(service.channel().await);
    let (run_id, consumer_group) = ("run".to_owned(), "ranks".to_owned());
    let request = v1::SeekRequest { run_id, consumer_group, checkpoint: to.checkpoint.clone() };
    trainer.seek(request).await.unwrap().into_inner().restored_units
}

#[tokio::test]
async fn a_seek_gives_the_same_steps_again_and_undoes_parts() {
    let log = Arc::new(MemoryLog::keeping());
    let service = TestService::start_on(Arc::clone(&log) as Arc<_>).await;
    service.create_run("run", v1::RunSettings { retention: seconds(3600), ..v1::RunSettings::default() }).await;
    let of_group = settings(2, 2, 100);
    let mut one = Taker::join(&service, rank(0, of_group.clone())).await;
    let mut other = Taker::join(&service, rank(1, of_group)).await;
    let nothing = checkpoint(&service).await;
    rows(&mut service.worker().await, "run", 0, 6, 5).await;
    let (first, second) = (one.take_units(3).await, other.take_units(3).await);
    one.ack(&[&first[0].unit_id, &first[1].unit_id]).await;
    let parts = checkpoint(&service).await;
    assert_eq!(parts.acknowledged_units, 0, "no step is whole");
    assert_eq!(other.ack(&[&second[0].unit_id]).await, [AckOutcome::Acknowledged]);
    let whole = checkpoint(&service).await;
    assert_eq!(whole.acknowledged_units, 2);
    for (to, restored, step) in [(&whole, 0, 1), (&nothing, 2, 0), (&whole, 0, 1), (&parts, 2, 0)] {
        assert_eq!(seek(&service, to).await, restored);
        let mut one = Taker::join(&service, again(0)).await;
        let mut other = Taker::join(&service, again(1)).await;
        let (ones, others) = (one.take_units(3 - step).await, other.take_units(3 - step).await);
        assert_eq!(ones.iter().map(bytes).collect::<Vec<_>>(), first[step..].iter().map(bytes).collect::<Vec<_>>());
        assert_eq!(others.iter().map(bytes).collect::<Vec<_>>(), second[step..].iter().map(bytes).collect::<Vec<_>>());
        // What was given out before changes nothing.
        let late = Request::Ack(v1::Ack { unit_ids: vec![ones[0].unit_id.clone()], seek_count: 0 });
        let outcomes: Vec<_> = one.try_ack(late).await.unwrap().iter().map(v1::AckResultEntry::outcome).collect();
        assert_eq!(outcomes, [AckOutcome::BeforeSeek]);
    }
    service.running.stop().await;
    let service = TestService::start_on(log).await;
    let mut one = Taker::join(&service, again(0)).await;
    assert_eq!(bytes(&one.unit().await), bytes(&first[0]), "and after a restart");
}

#[tokio::test]
async fn a_step_that_kills_a_rank_is_undeliverable_whole_and_can_be_released() {
    let service = TestService::start().await;
    service.create_run("run", v1::RunSettings { max_deliveries: Some(2), ..v1::RunSettings::default() }).await;
    let of_group = settings(2, 2, 100);
    let mut one = Taker::join(&service, rank(0, of_group.clone())).await;
    let mut other = Taker::join(&service, rank(1, of_group)).await;
    rows(&mut service.worker().await, "run", 0, 4, 5).await;
    let (first, second) = (one.take_units(2).await, other.take_units(2).await);
    assert_eq!(other.ack(&[&second[0].unit_id]).await, [AckOutcome::ShardAcknowledged]);
    one.nack(&[&first[0].unit_id], None).await;
    assert_eq!(bytes(&one.unit().await), bytes(&first[0]));
    one.nack(&[&first[0].unit_id], None).await;
    let step = first[0].unit_id.strip_suffix("/0").unwrap();
    let notice = other.notice().await;
    assert_eq!((notice.kind(), notice.unit_id.as_str()), (UnitNoticeKind::Undeliverable, step));
    assert!(one.quiet().await.is_empty(), "the next one is out still");
    let fetch = v1::Subscription { step_index: Some(0), consumer: String::new(), ..again(0) };
    let status = Trainer::subscribe(service.channel().await, fetch).await.map(|_| ()).unwrap_err();
    assert_eq!(reason(&status), "not_retained");
    let release = |unit_id: &str, drop| v1::ReleaseUnitRequest {
        run_id: "run".to_owned(),
        consumer_group: "ranks".to_owned(),
        unit_id: unit_id.to_owned(),
        drop,
    };
    let mut admin = service.admin().await;
    let status = admin.release_unit(release("run/0/0", false)).await.unwrap_err();
    assert_eq!(reason(&status), "unit_not_found", "a rollout is not released out of its step");
    admin.release_unit(release(step, false)).await.unwrap();
    let released = one.unit().await;
    assert_eq!((bytes(&released), released.delivery_count), (bytes(&first[0]), 1));
    assert_eq!(one.ack(&[&released.unit_id]).await, [AckOutcome::Acknowledged], "the other's part was kept");
    // The next one is dropped for good.
    for _ in 0..2 {
        other.nack(&[&second[1].unit_id], None).await;
        other.quiet().await;
    }
    let step = first[1].unit_id.strip_suffix("/0").unwrap();
    admin.release_unit(release(step, true)).await.unwrap();
    assert_eq!(one.ack(&[&first[1].unit_id]).await, [AckOutcome::AlreadyAcknowledged], "it is forgotten");
}

#[tokio::test]
async fn what_is_too_old_is_dropped_before_it_is_frozen_and_never_after() {
    let service = TestService::start().await;
    let bounded = v1::ConsumerGroupSettings { max_staleness_versions: Some(1), ..settings(2, 1, 100) };
    // Credit for one step: the next is frozen when there is room for it.
    let subscription = v1::Subscription { credit_tokens: 6, ..rank(0, bounded) };
    let mut one = Taker::join(&service, subscription).await;
    let mut worker = service.worker().await;
    for (rollout, version) in [("a", 1), ("b", 1), ("c", 1), ("d", 5), ("e", 5)] {
        sampled(&mut worker, rollout, &[version]).await;
    }
    let first = one.unit().await;
    assert_eq!(shard_id(&first), (0, 0));
    let version = v1::TrainerPolicyVersion { policy: String::new(), version: 6 };
    one.trainer.send(Request::PolicyVersion(version)).await;
    let notice = one.notice().await;
    assert_eq!((notice.kind(), notice.rollout_id.as_str()), (UnitNoticeKind::Stale, "c"));
    one.nack(&[&first.unit_id], None).await;
    assert_eq!(bytes(&one.unit().await), bytes(&first), "what is frozen stays");
    assert_eq!(one.ack(&[&first.unit_id]).await, [AckOutcome::Acknowledged]);
    let next = one.unit().await;
    let rollouts: Vec<_> = next.rows.iter().map(|row| row.header.rollout_id.as_str()).collect();
    assert_eq!((shard_id(&next), rollouts), ((1, 0), vec!["d", "e"]));
}

#[tokio::test]
async fn steps_of_whole_groups_are_given_out_group_by_group() {
    let log = Arc::new(MemoryLog::keeping());
    let service = TestService::start_on(Arc::clone(&log) as Arc<_>).await;
    service.create_run("run", of_run(v1::Estimator::Mean)).await;
    let groups = v1::StepSettings { counted_unit: v1::Unit::Group.into(), ..settings(1, 2, 100).step.unwrap() };
    let groups = v1::ConsumerGroupSettings { step: Some(groups), ..settings(1, 2, 100) };
    let mut life = Life::on(service).await;
    let mut one = Taker::join(&life.service, rank(0, groups)).await;
    let mut other = Taker::join(&life.service, again(1)).await;
    life.finalised("b", 3, 3, 0.0).await;
    life.finalised("c", 3, 1, 4.0).await;
    assert!(one.quiet().await.is_empty());
    life.finalised("a", 3, 1, 2.0).await;
    let (first, second) = (one.unit().await, other.unit().await);
    let step = first.step.unwrap();
    assert_eq!((step.step_rollouts, step.step_rows, step.microbatches), (3, 5, 1));
    let mut rows: Vec<_> = first.rows.iter().chain(&second.rows).collect();
    rows.sort_by_key(|row| row.row_id.clone());
    let advantages: Vec<_> =
        rows.iter().map(|row| (row.header.rollout_id.as_str(), row.header.advantage, row.header.group_rows)).collect();
    let of_b = ("b", Some(-2.0), Some(5));
    assert_eq!(advantages, [("a", Some(0.0), Some(5)), of_b, of_b, of_b, ("c", Some(2.0), Some(5))]);
    drop((one, other, life));
    let service = TestService::start_on(log).await;
    let mut one = Taker::join(&service, again(0)).await;
    assert_eq!(bytes(&one.unit().await), bytes(&first));
    assert_eq!(
        one.ack(&[&first.unit_id, &second.unit_id]).await,
        [AckOutcome::ShardAcknowledged, AckOutcome::Acknowledged]
    );
    service.clock.advance(Duration::from_secs(1));
}

#[tokio::test]
async fn what_waits_for_a_step_does_not_keep_others_from_filling_it() {
    let service = TestService::start().await;
    let declared =
        v1::ConsumerGroupDeclaration { consumer_group: "ranks".to_owned(), settings: Some(settings(3, 1, 100)) };
    let paced = v1::RunSettings {
        consumer_groups: vec![declared],
        required_consumer_groups: vec!["ranks".to_owned()],
        max_lead_groups: Some(1),
        ..v1::RunSettings::default()
    };
    service.create_run("run", paced).await;
    let mut worker = service.worker().await;
    // One after another, each ahead of the ranks alone: three of them make a step, which waits.
    let units = rows(&mut worker, "run", 0, 3, 5).await;
    assert_eq!(units.len(), 3);
    let next = worker.report(&about("run", "r9"), Event::Open(v1::Open::default())).await;
    assert_eq!(next.refusal.unwrap().reason, "lead_full", "a full step waits for its rank");
    let mut one = Taker::join(&service, again(0)).await;
    assert_eq!(one.unit().await.rows.len(), 3);
    let next = worker.report(&about("run", "r9"), Event::Open(v1::Open::default())).await;
    assert_eq!(next.outcome(), v1::AnswerOutcome::Accepted, "it is out");
}
