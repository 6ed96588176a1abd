//! Checkpoints of a consumer group, and going back to them.

use std::sync::Arc;

use hedgerow::log::memory::MemoryLog;
use hedgerow::proto::v1::subscribe_request::Request;
use hedgerow::proto::v1::trainer_service_client::TrainerServiceClient;
use hedgerow::proto::v1::{self, AckOutcome};
use tonic::{Code, Status};

use crate::life::seconds;
use crate::queue_taker::{Taker, reason, rows, unit_ids};
use crate::service::{TestService, subscription};

/// A service whose run keeps what is acknowledged for an hour.
async fn retaining(log: &Arc<MemoryLog>) -> TestService {
    let service = TestService::start_on(Arc::clone(log) as Arc<_>).await;
    service.create_run("run", v1::RunSettings { retention: seconds(3600), ..v1::RunSettings::default() }).await;
    service
}

async fn checkpoint(service: &TestService, consumer_group: &str) -> v1::CheckpointResponse {
    let mut trainer = TrainerServiceClient::new(service.channel().await);
    let request = v1::CheckpointRequest { run_id: "run".to_owned(), consumer_group: consumer_group.to_owned() };
    trainer.checkpoint(request).await.expect("a checkpoint").into_inner()
}

async fn seek(service: &TestService, consumer_group: &str, to: &[u8]) -> Result<v1::SeekResponse, Status> {
    let mut trainer = TrainerServiceClient::new(service.channel().await);
    let (run_id, consumer_group) = ("run".to_owned(), consumer_group.to_owned());
    let request = v1::SeekRequest { run_id, consumer_group, checkpoint: to.to_vec().into() };
    trainer.seek(request).await.map(tonic::Response::into_inner)
}

#[tokio::test]
async fn a_group_goes_back_to_exactly_what_it_had_acknowledged_whatever_the_order() {
    let service = retaining(&Arc::new(MemoryLog::keeping())).await;
    let units = rows(&mut service.worker().await, "run", 0, 5, 4).await;
    let mut taker = Taker::join(&service, subscription("run", "trainers")).await;
    taker.take_units(5).await;
    let nothing = checkpoint(&service, "trainers").await;
    assert_eq!((nothing.acknowledged_units, nothing.retained), (0, seconds(3600)));
    taker.ack(&[&units[3], &units[0]]).await;
    let two = checkpoint(&service, "trainers").await;
    assert_eq!(two.acknowledged_units, 2);
    taker.ack(&[&units[1], &units[4]]).await;

    let sought = seek(&service, "trainers", &two.checkpoint).await.unwrap();
    assert_eq!(sought, v1::SeekResponse { seek_count: 1, restored_units: 2 });
    let end = taker.end().await.expect("the subscription ends with a reason");
    assert_eq!((end.code(), reason(&end).as_str()), (Code::Aborted, "sought"));

    let mut taker = Taker::join(&service, subscription("run", "trainers")).await;
    assert_eq!(taker.trainer.subscribed.seek_count, 1);
    let again = taker.quiet().await;
    assert_eq!(unit_ids(&again), [&units[1], &units[2], &units[4]]);
    assert_eq!(again.iter().map(|unit| unit.delivery_count).collect::<Vec<_>>(), [1, 1, 1]);
    // What was given out before says so, and changes nothing.
    let late = Request::Ack(v1::Ack { unit_ids: vec![units[1].clone(), units[3].clone()], seek_count: 0 });
    let outcomes: Vec<_> = taker.try_ack(late).await.unwrap().iter().map(v1::AckResultEntry::outcome).collect();
    assert_eq!(outcomes, [AckOutcome::BeforeSeek; 2]);
    assert_eq!(taker.ack(&[&units[1], &units[3]]).await, [AckOutcome::Acknowledged, AckOutcome::AlreadyAcknowledged]);

    // On from there, back to the beginning, and forward to what was undone.
    let three = checkpoint(&service, "trainers").await;
    assert_eq!(three.acknowledged_units, 3);
    for (to, seek_count, restored_units, left) in [
        (&nothing, 2, 3, vec![&units[0], &units[1], &units[2], &units[3], &units[4]]),
        (&three, 3, 0, vec![&units[2], &units[4]]),
        (&two, 4, 1, vec![&units[1], &units[2], &units[4]]),
    ] {
        let sought = seek(&service, "trainers", &to.checkpoint).await.unwrap();
        assert_eq!(sought, v1::SeekResponse { seek_count, restored_units });
        let mut taker = Taker::join(&service, subscription("run", "trainers")).await;
        assert_eq!(unit_ids(&taker.quiet().await), left);
    }
}

#[tokio::test]
async fn other_groups_notice_nothing_of_a_seek() {
    let service = retaining(&Arc::new(MemoryLog::keeping())).await;
    let units = rows(&mut service.worker().await, "run", 0, 2, 4).await;
    let mut one = Taker::join(&service, subscription("run", "one")).await;
    let mut other = Taker::join(&service, subscription("run", "other")).await;
    let nothing = checkpoint(&service, "one").await;
    for taker in [&mut one, &mut other] {
        taker.take_units(2).await;
        assert_eq!(taker.ack(&units).await, [AckOutcome::Acknowledged; 2]);
    }
    seek(&service, "one", &nothing.checkpoint).await.unwrap();
    assert!(other.quiet().await.is_empty());
    assert_eq!(other.ack(&units).await, [AckOutcome::AlreadyAcknowledged; 2]);
    let status = seek(&service, "other", &nothing.checkpoint).await.unwrap_err();
    assert_eq!((status.code(), reason(&status).as_str()), (Code::InvalidArgument, "invalid_value"));
}

#[tokio::test]
async fn checkpoints_and_seeks_outlive_the_process() {
    let log = Arc::new(MemoryLog::keeping());
    let service = retaining(&log).await;
    let units = rows(&mut service.worker().await, "run", 0, 4, 4).await;
    let mut taker = Taker::join(&service, subscription("run", "trainers")).await;
    taker.take_units(4).await;
    taker.ack(&units[..1]).await;
    let one = checkpoint(&service, "trainers").await;
    taker.ack(&units[1..3]).await;
    let three = checkpoint(&service, "trainers").await;
    seek(&service, "trainers", &one.checkpoint).await.unwrap();
    drop(taker);
    service.running.stop().await;

    let service = TestService::start_on(Arc::clone(&log) as Arc<_>).await;
    let mut taker = Taker::join(&service, subscription("run", "trainers")).await;
    assert_eq!(taker.trainer.subscribed.seek_count, 1);
    assert_eq!(unit_ids(&taker.quiet().await), &units[1..]);
    let sought = seek(&service, "trainers", &three.checkpoint).await.unwrap();
    assert_eq!(sought, v1::SeekResponse { seek_count: 2, restored_units: 0 });
    let mut taker = Taker::join(&service, subscription("run", "trainers")).await;
    assert_eq!(unit_ids(&taker.quiet().await), &units[3..]);
}

#[tokio::test]
async fn what_is_not_kept_any_more_cannot_be_sought_and_nothing_changes() {
    let service = TestService::start().await;
    let mut worker = service.worker().await;
    let units = rows(&mut worker, "run", 0, 3, 4).await;
    let mut taker = Taker::join(&service, subscription("run", "trainers")).await;
    taker.take_units(3).await;
    let nothing = checkpoint(&service, "trainers").await;
    assert_eq!(nothing.retained, None);
    // With the last of its units, a rollout goes.
    taker.ack(&units[..1]).await;
    let status = seek(&service, "trainers", &nothing.checkpoint).await.unwrap_err();
    assert_eq!((status.code(), reason(&status).as_str()), (Code::FailedPrecondition, "not_retained"));
    assert_eq!(taker.ack(&units[1..2]).await, [AckOutcome::Acknowledged], "its subscription goes on");
    let now = checkpoint(&service, "trainers").await;
    assert_eq!(seek(&service, "trainers", &now.checkpoint).await.unwrap().restored_units, 0);
    let mut taker = Taker::join(&service, subscription("run", "trainers")).await;
    assert_eq!(unit_ids(&taker.quiet().await), &units[2..]);
}

#[tokio::test]
async fn what_is_no_checkpoint_is_refused() {
    let service = retaining(&Arc::new(MemoryLog::keeping())).await;
    let units = rows(&mut service.worker().await, "run", 0, 1, 4).await;
    let mut taker = Taker::join(&service, subscription("run", "trainers")).await;
    taker.take_units(1).await;
    let good = checkpoint(&service, "trainers").await.checkpoint;
    let mut changed = good.to_vec();
    changed[20] ^= 1;
    for bad in [&b""[..], b"checkpoint", &good[1..], &changed] {
        let status = seek(&service, "trainers", bad).await.unwrap_err();
        assert_eq!((status.code(), reason(&status).as_str()), (Code::InvalidArgument, "invalid_value"), "{bad:?}");
    }
    let status = seek(&service, "nobody", &good).await.unwrap_err();
    assert_eq!((status.code(), reason(&status).as_str()), (Code::NotFound, "unit_not_found"));
    assert_eq!(taker.ack(&units).await, [AckOutcome::Acknowledged], "its subscription goes on");

    // A run of the same name is another one.
    let delete = v1::DeleteRunRequest { run_id: "run".to_owned(), force: true };
    service.admin().await.delete_run(delete).await.unwrap();
    let status = seek(&service, "trainers", &good).await.unwrap_err();
    assert_eq!((status.code(), reason(&status).as_str()), (Code::NotFound, "run_not_found"));
    service.clock.advance(std::time::Duration::from_secs(1));
    rows(&mut service.worker().await, "run", 0, 1, 4).await;
    drop(Taker::join(&service, subscription("run", "trainers")).await);
    let status = seek(&service, "trainers", &good).await.unwrap_err();
    assert_eq!((status.code(), reason(&status).as_str()), (Code::FailedPrecondition, "not_retained"));
}
