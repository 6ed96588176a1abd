//! Rows that were sampled by weights too old for the trainer: dropped with a notice, counted, and never given out.

use std::sync::Arc;

use hedgerow::log::memory::MemoryLog;
use hedgerow::proto::v1;
use hedgerow::proto::v1::report_request::Event;
use hedgerow::proto::v1::subscribe_request::Request;

use crate::life::seconds;
use crate::queue_taker::{Taker, finish, reason, row_id, unit_ids};
use crate::service::{TestService, Worker, about, call, subscription};

/// A subscription of a group whose units may be so many versions behind, by a trainer that is on this one.
fn bounded(max_staleness: u64, version: Option<u64>) -> v1::Subscription {
    let settings = v1::ConsumerGroupSettings { max_staleness_versions: Some(max_staleness), ..Default::default() };
    v1::Subscription { settings: Some(settings), policy_version: version, ..subscription("run", "trainers") }
}

/// A rollout of one row, whose generated tokens these versions have sampled, one each.
pub(crate) async fn sampled(worker: &mut Worker, rollout: &str, versions: &[u64]) -> String {
    let generation: Vec<u32> = (0..versions.len().max(1)).map(|token| token as u32).collect();
    let spans = versions.iter().zip(0..).map(|(version, at)| v1::PolicyVersionSpan {
        start: at,
        end: at + 1,
        version: *version,
    });
    let call = v1::Call { policy_versions: spans.collect(), ..call("c", "main", 1, &[1, 2], &generation) };
    worker.report(&about("run", rollout), Event::Call(call)).await;
    worker.report(&about("run", rollout), finish(1.0)).await;
    row_id("run", rollout)
}

fn is_on(policy: &str, version: u64) -> Request {
    Request::PolicyVersion(v1::TrainerPolicyVersion { policy: policy.to_owned(), version })
}

async fn group(service: &TestService) -> v1::ConsumerGroupSummary {
    let request = v1::ListConsumersRequest { run_id: "run".to_owned(), ..v1::ListConsumersRequest::default() };
    let listed = service.inspect().await.list_consumers(request).await.unwrap().into_inner();
    listed.consumer_groups.into_iter().find(|group| group.consumer_group == "trainers").unwrap()
}

#[tokio::test]
async fn what_is_too_old_is_dropped_with_a_notice_and_the_ledger_adds_up() {
    let log = Arc::new(MemoryLog::keeping());
    let service = TestService::start_on(Arc::clone(&log) as Arc<_>).await;
    let retention = seconds(3600);
    service.create_run("run", v1::RunSettings { retention, ..v1::RunSettings::default() }).await;
    let mut worker = service.worker().await;
    // The oldest token counts: 4 and 9 make 4. What says no version is new.
    let old = sampled(&mut worker, "old", &[4, 9]).await;
    let just = sampled(&mut worker, "just", &[5]).await;
    let unknown = sampled(&mut worker, "unknown", &[]).await;
    let mut taker = Taker::join(&service, bounded(2, Some(7))).await;
    assert_eq!(unit_ids(&taker.take_units(2).await), [&just, &unknown]);
    let notice = taker.notice().await;
    assert_eq!((notice.kind(), &notice.unit_id, notice.rollout_id.as_str()), (v1::UnitNoticeKind::Stale, &old, "old"));

    // A lower version than before changes nothing; a higher one drops what waits, and not what is out.
    taker.trainer.send(Request::Credits(v1::Credits { credit_tokens: 0 })).await;
    let waits = sampled(&mut worker, "waits", &[6]).await;
    taker.trainer.send(is_on("", 3)).await;
    taker.trainer.send(is_on("main", 9)).await;
    let notice = taker.notice().await;
    assert_eq!((notice.kind(), &notice.unit_id), (v1::UnitNoticeKind::Stale, &waits));
    assert_eq!(taker.ack(&[&just, &unknown]).await, [v1::AckOutcome::Acknowledged; 2]);
    assert_eq!(taker.ack(&[&waits]).await, [v1::AckOutcome::Dropped]);
    let summary = group(&service).await;
    assert_eq!(summary.settings.unwrap().max_staleness_versions, Some(2));
    assert_eq!(summary.consumers[0].policy_version, Some(9));
    let rows = summary.rows.unwrap();
    assert_eq!((rows.made, rows.acknowledged, rows.dropped.get("stale")), (4, 2, Some(&2)));

    // It stays so after a restart, in which the trainer has not said a version.
    drop((taker, worker, service));
    let service = TestService::start_on(log).await;
    let mut worker = service.worker().await;
    let mut taker = Taker::join(&service, bounded(2, None)).await;
    let later = sampled(&mut worker, "later", &[1]).await;
    assert_eq!(unit_ids(&taker.take_units(1).await), [&later]);
    let rows = group(&service).await.rows.unwrap();
    assert_eq!((rows.made, rows.leased, rows.acknowledged, rows.dropped.get("stale")), (5, 1, 2, Some(&2)));
}

#[tokio::test]
async fn what_comes_back_too_old_is_not_given_out_again() {
    let service = TestService::start().await;
    let mut worker = service.worker().await;
    let unit = sampled(&mut worker, "one", &[1]).await;
    let mut taker = Taker::join(&service, bounded(0, Some(1))).await;
    taker.take_units(1).await;
    taker.trainer.send(is_on("", 2)).await;
    taker.nack(&[&unit], None).await;
    assert_eq!(taker.notice().await.kind(), v1::UnitNoticeKind::Stale);
    assert!(taker.quiet().await.is_empty());
}

#[tokio::test]
async fn a_unit_of_several_policies_is_as_old_as_the_worst_of_them() {
    let service = TestService::start().await;
    let mut worker = service.worker().await;
    let rollout = about("run", "two");
    for (id, policy, version) in [("a", "main", 5), ("b", "judge", 1)] {
        let span = v1::PolicyVersionSpan { start: 0, end: 1, version };
        let (policy, policy_versions) = (policy.to_owned(), vec![span]);
        let call = v1::Call { policy, policy_versions, ..call(id, id, version, &[version as u32], &[9]) };
        worker.report(&rollout, Event::Call(call)).await;
    }
    worker.report(&rollout, finish(1.0)).await;
    let mut subscription = bounded(1, None);
    subscription.settings.as_mut().unwrap().unit = v1::Unit::Rollout.into();
    subscription.credit_tokens = 0;
    let mut taker = Taker::join(&service, subscription).await;
    for request in [is_on("main", 6), is_on("judge", 2), Request::Credits(v1::Credits { credit_tokens: 100 })] {
        taker.trainer.send(request).await;
    }
    let unit = taker.take_units(1).await.remove(0).unit_id;
    taker.trainer.send(is_on("judge", 3)).await;
    taker.nack(&[&unit], None).await;
    assert_eq!(taker.notice().await.kind(), v1::UnitNoticeKind::Stale);
}

#[tokio::test]
async fn a_version_of_a_policy_that_the_group_does_not_take_ends_the_subscription() {
    let service = TestService::start().await;
    let mut subscription = bounded(1, None);
    subscription.settings.as_mut().unwrap().policy = "main".to_owned();
    let mut taker = Taker::join(&service, subscription).await;
    taker.trainer.send(is_on("main", 2)).await;
    taker.trainer.send(is_on("judge", 2)).await;
    let end = taker.end().await.expect("it ends with a reason");
    assert_eq!((end.code(), reason(&end).as_str()), (tonic::Code::InvalidArgument, "invalid_value"));
    let mut ephemeral = bounded(1, None);
    ephemeral.ephemeral = true;
    let refused = crate::service::Trainer::subscribe(service.channel().await, ephemeral).await;
    assert_eq!(refused.err().map(|status| status.code()), Some(tonic::Code::InvalidArgument));
}
