//! Consumer groups that take whole groups, one unit for each.

use std::sync::Arc;
use std::time::Duration;

use hedgerow::log::memory::MemoryLog;
use hedgerow::proto::v1::trainer_service_client::TrainerServiceClient;
use hedgerow::proto::v1::{self, AckOutcome, UnitNoticeKind};

use crate::groups::{finish, settings};
use crate::life::{Life, in_group};
use crate::queue_taker::{Taker, reason, unit_ids};
use crate::service::{TestService, Trainer, Unit, about, subscription};

fn whole(policy: &str) -> v1::ConsumerGroupSettings {
    v1::ConsumerGroupSettings {
        unit: v1::Unit::Group.into(),
        policy: policy.to_owned(),
        ..v1::ConsumerGroupSettings::default()
    }
}

fn of_groups(consumer_group: &str, policy: &str) -> v1::Subscription {
    v1::Subscription { settings: Some(whole(policy)), ..subscription("run", consumer_group) }
}

/// Without an estimator, with a declared consumer group that takes whole groups.
fn without_estimator() -> v1::RunSettings {
    let declared = v1::ConsumerGroupDeclaration { consumer_group: "whole".to_owned(), settings: Some(whole("")) };
    v1::RunSettings { consumer_groups: vec![declared], ..settings(v1::Estimator::None) }
}

fn rollouts(unit: &Unit) -> Vec<(&str, Option<f64>)> {
    unit.rows.iter().map(|row| (row.header.rollout_id.as_str(), row.header.advantage)).collect()
}

#[tokio::test]
async fn a_unit_is_a_whole_group_and_is_acknowledged_whole() {
    let log = Arc::new(MemoryLog::keeping());
    let service = TestService::start_on(Arc::clone(&log) as Arc<_>).await;
    service.create_run("run", settings(v1::Estimator::Mean)).await;
    let mut life = Life::on(service).await;
    let mut taker = Taker::join(&life.service, of_groups("whole", "")).await;
    life.finalised("b", 3, 3, 0.0).await;
    life.finalised("c", 3, 0, 4.0).await;
    assert!(taker.quiet().await.is_empty());
    life.finalised("a", 3, 1, 2.0).await;
    let unit = taker.unit().await;
    assert_eq!((unit.unit_id.as_str(), unit.tokens, unit.delivery_count), ("run//g", 12, 1));
    // One of them has no rows, and counts.
    assert_eq!(rollouts(&unit), [("a", Some(0.0)), ("b", Some(-2.0)), ("b", Some(-2.0)), ("b", Some(-2.0))]);
    assert!(unit.rows.iter().all(|row| row.header.group_rows == Some(4)));
    let figures = unit.group.clone().unwrap();
    assert_eq!((figures.counted_rollouts, figures.reward_mean), (3, 2.0));
    taker.nack(&["run//g"], None).await;
    let again = taker.unit().await;
    assert_eq!((again.delivery_count, &again.rows), (2, &unit.rows));
    let mut one_policy = Taker::join(&life.service, of_groups("main", "main")).await;
    assert_eq!(one_policy.unit().await.unit_id, "run//g/main");
    drop((taker, one_policy, life));

    let mut life = Life::on(TestService::start_on(log).await).await;
    let mut taker = Taker::join(&life.service, subscription("run", "whole")).await;
    life.service.clock.advance(Duration::from_secs(60));
    let after = taker.unit().await;
    assert_eq!((&after.rows, &after.group), (&unit.rows, &unit.group));
    let mut trainer = TrainerServiceClient::new(life.service.channel().await);
    let of_group = v1::CheckpointRequest { run_id: "run".to_owned(), consumer_group: "whole".to_owned() };
    let before_ack = trainer.checkpoint(of_group).await.unwrap().into_inner();
    assert_eq!(taker.ack(&["run//g"]).await, [AckOutcome::Acknowledged]);
    let to_before = v1::SeekRequest {
        run_id: "run".to_owned(),
        consumer_group: "whole".to_owned(),
        checkpoint: before_ack.checkpoint,
    };
    assert_eq!(trainer.seek(to_before).await.unwrap().into_inner().restored_units, 1);
    let mut taker = Taker::join(&life.service, subscription("run", "whole")).await;
    assert_eq!(taker.unit().await.rows, unit.rows, "sought back, it is whole again");
    assert_eq!(taker.ack(&["run//g"]).await, [AckOutcome::Acknowledged]);
    let mut main = Taker::join(&life.service, subscription("run", "main")).await;
    assert_eq!(main.ack(&["run//g/main"]).await, [AckOutcome::Acknowledged]);
    life.service.clock.advance(Duration::from_secs(3601));
    life.until_ended(&in_group("b", "g")).await;
    assert_eq!(taker.ack(&["run//g"]).await, [AckOutcome::AlreadyAcknowledged], "though all of it has retired");
}

#[tokio::test]
async fn whole_groups_without_an_estimator_wait_while_rows_do_not() {
    let mut life = Life::start_with(without_estimator()).await;
    let mut rows = Taker::join(&life.service, subscription("run", "rows")).await;
    let mut groups = Taker::join(&life.service, subscription("run", "whole")).await;
    life.finalised("a", 2, 1, 1.0).await;
    let first = rows.unit().await;
    assert_eq!((rollouts(&first), first.group.is_some()), (vec![("a", None)], false));
    rows.ack(&[&first.unit_id]).await;
    assert!(groups.quiet().await.is_empty());
    life.finalised("b", 2, 1, 3.0).await;
    let unit = groups.unit().await;
    assert_eq!((unit.unit_id.as_str(), rollouts(&unit)), ("run//g", vec![("a", None), ("b", None)]));
    assert_eq!(unit.group.unwrap().reward_mean, 2.0);
    assert_eq!(unit.rows[0].header.group_rows, Some(2));
    // A rollout that is in no group is a unit of its own.
    let alone = about("run", "alone");
    life.calls(&alone, 1).await;
    life.accepts(&alone, finish(1.0)).await;
    assert_eq!(groups.unit().await.unit_id, "run/alone/0");
}

#[tokio::test]
async fn a_dropped_group_is_no_unit_and_its_rows_go_out_where_nobody_waited_for_it() {
    let mut life = Life::start_with(without_estimator()).await;
    let mut groups = Taker::join(&life.service, subscription("run", "whole")).await;
    let mut rows = Taker::join(&life.service, subscription("run", "rows")).await;
    life.finalised("a", 2, 1, 1.0).await;
    let out = life.member("b", 2, 1).await;
    life.accepts(&out, crate::life::discard("lost", v1::DiscardDisposition::Final)).await;
    let notice = groups.notice().await;
    assert_eq!((notice.kind(), notice.group_id.as_str()), (UnitNoticeKind::GroupDropped, "g"));
    assert_eq!(unit_ids(&rows.quiet().await), ["run/a/0/main/c0"]);
    assert!(groups.quiet().await.is_empty() && rows.notices.is_empty());
}

#[tokio::test]
async fn a_run_that_releases_no_groups_has_no_units_of_them() {
    let life = Life::start().await;
    let refused = Trainer::subscribe(life.service.channel().await, of_groups("whole", "")).await;
    let status = refused.map(|_| ()).unwrap_err();
    assert_eq!((status.code(), reason(&status).as_str()), (tonic::Code::InvalidArgument, "invalid_value"));
    assert!(status.message().contains("estimator"), "{status:?}");
}
