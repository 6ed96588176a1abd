//! Workers and a trainer that is slower than they are: with a bound on the lead the fleet waits and nothing is thrown away; with a
//! bound on staleness what is too old is dropped, with notices, and everything adds up.

use std::collections::{BTreeMap, BTreeSet};

use hedgerow::error::Reason;
use hedgerow::proto::v1::report_request::Event;
use hedgerow::proto::v1::subscribe_request::Request;
use hedgerow::proto::v1::{self, AckOutcome, AnswerOutcome, DiscardDisposition, UnitNoticeKind};
use tokio::task::JoinSet;

use crate::groups::{finish, settings, sized, taker_rows};
use crate::life::{Life, attempt, discard, in_group};
use crate::queue_taker::Taker;
use crate::service::{Unit, Worker, call, subscription};

const MEMBERS: u32 = 3;

fn one_call(version: u64) -> Event {
    let policy_versions = vec![v1::PolicyVersionSpan { start: 0, end: 1, version }];
    Event::Call(v1::Call { policy_versions, ..call("c", "main", 1, &[1], &[2]) })
}

/// A slow trainer's: one unit at a time.
fn one_at_a_time() -> v1::Subscription {
    v1::Subscription { credit_tokens: 1, ..subscription("run", "trainers") }
}

async fn takes(worker: &mut Worker, member: &v1::RolloutRef, event: Event) {
    let answer = worker.report(member, event).await;
    assert_eq!(answer.outcome(), AnswerOutcome::Accepted, "a member of an admitted group: {answer:?}");
}

/// Reports one group after another, each once it is admitted; says how often that was refused. One member of each fails and comes
/// again, and the last of every third fails for good.
async fn work(mut worker: Worker, groups: impl Iterator<Item = u32>) -> u64 {
    let mut refused = 0;
    for group in groups {
        let name = format!("g{group}");
        let members: Vec<_> = (0..MEMBERS).map(|member| in_group(&format!("{name}/{member}"), &name)).collect();
        while let Some(refusal) = worker.report(&members[0], sized(MEMBERS)).await.refusal {
            assert_eq!(refusal.reason, Reason::LeadFull.as_str(), "{refusal:?}");
            assert!(refusal.retry_after.is_some());
            refused += 1;
            tokio::task::yield_now().await;
        }
        for (number, member) in (0..).zip(&members) {
            takes(&mut worker, member, one_call(0)).await;
            match number {
                1 => {
                    takes(&mut worker, member, discard("again", DiscardDisposition::WillRetry)).await;
                    let again = attempt(member, 1);
                    takes(&mut worker, &again, one_call(0)).await;
                    takes(&mut worker, &again, finish(f64::from(number))).await;
                }
                2 if group % 3 == 0 => takes(&mut worker, member, discard("it died", DiscardDisposition::Final)).await,
                _ => takes(&mut worker, member, finish(f64::from(number))).await,
            }
        }
    }
    refused
}

#[tokio::test]
async fn a_fleet_that_is_held_back_at_admission_loses_nothing() {
    const WORKERS: u32 = 4;
    const GROUPS: u32 = 36;
    const LEAD: u32 = 2;
    let declared = v1::ConsumerGroupDeclaration { consumer_group: "trainers".to_owned(), settings: None };
    let life = Life::start_with(v1::RunSettings {
        max_lead_groups: Some(LEAD),
        consumer_groups: vec![declared],
        required_consumer_groups: vec!["trainers".to_owned()],
        ..settings(v1::Estimator::Mean)
    })
    .await;
    let mut fleet = JoinSet::new();
    for number in 0..WORKERS {
        let groups = (number..GROUPS).step_by(WORKERS as usize);
        fleet.spawn(work(life.service.worker().await, groups));
    }
    let mut taker = Taker::join(&life.service, one_at_a_time()).await;
    let count = GROUPS * MEMBERS - GROUPS.div_ceil(3);
    let mut sums: BTreeMap<String, (u32, f64)> = BTreeMap::new();
    let mut rows = BTreeSet::new();
    for _ in 0..count {
        let unit = taker.unit().await;
        assert_eq!(taker.ack(&[&unit.unit_id]).await, [AckOutcome::Acknowledged]);
        for row in &unit.rows {
            let id = (row.header.rollout_id.clone(), row.header.attempt, row.header.leaf_call_id.clone());
            assert!(rows.insert(id.clone()), "{id:?} came twice");
            let sum = sums.entry(row.header.group_id.clone()).or_default();
            *sum = (sum.0 + 1, sum.1 + row.header.advantage.expect("its group was compared"));
        }
    }
    let refused: u64 = fleet.join_all().await.into_iter().sum();
    assert!(refused > 0, "the trainer was never waited for");
    assert!(taker.quiet().await.is_empty() && taker.notices.is_empty(), "nothing is left, and nothing was dropped");
    for group in 0..GROUPS {
        let (members, sum) = sums[&format!("g{group}")];
        assert_eq!((members, sum), (if group % 3 == 0 { 2 } else { 3 }, 0.0), "group {group}");
    }
    let ledger = taker_rows(&life).await;
    assert_eq!((ledger.made, ledger.acknowledged), (u64::from(count), u64::from(count)), "{ledger:?}");
    assert!(ledger.dropped.is_empty(), "{ledger:?}");
}

#[tokio::test]
async fn what_a_slow_trainer_is_given_too_late_is_dropped_and_everything_adds_up() {
    const GROUPS: u64 = 8;
    const TRAINED: u64 = 5;
    let mut life = Life::start_with(settings(v1::Estimator::Mean)).await;
    let bound = v1::ConsumerGroupSettings { max_staleness_versions: Some(1), ..Default::default() };
    let mut taker = Taker::join(&life.service, v1::Subscription { settings: Some(bound), ..one_at_a_time() }).await;
    for version in 0..GROUPS {
        for (member, reward) in [("a", 0.0), ("b", 2.0)] {
            let member = in_group(&format!("{version}/{member}"), &format!("g{version}"));
            life.accepts(&member, sized(2)).await;
            life.accepts(&member, one_call(version)).await;
            life.accepts(&member, finish(reward)).await;
        }
    }
    // One is out, and in training, while the weights go on.
    let first = taker.unit().await;
    let version = v1::TrainerPolicyVersion { policy: String::new(), version: TRAINED };
    taker.trainer.send(Request::PolicyVersion(version)).await;
    let too_old = 2 * (TRAINED - 1) - 1;
    let mut dropped = BTreeSet::new();
    for _ in 0..too_old {
        let notice = taker.notice().await;
        assert_eq!(notice.kind(), UnitNoticeKind::Stale);
        dropped.insert(notice.unit_id);
    }
    assert_eq!(taker.ack(&[&first.unit_id]).await, [AckOutcome::Acknowledged]);
    let mut taken = vec![first];
    for _ in 0..2 * (GROUPS - TRAINED + 1) {
        let unit = taker.unit().await;
        assert_eq!(taker.ack(&[&unit.unit_id]).await, [AckOutcome::Acknowledged]);
        taken.push(unit);
    }
    assert!(taker.quiet().await.is_empty() && taker.notices.is_empty());
    let given: BTreeSet<_> = taken.iter().map(|unit| unit.unit_id.clone()).collect();
    assert!(given.is_disjoint(&dropped), "{given:?} {dropped:?}");
    assert_eq!((given.len() + dropped.len()) as u64, 2 * GROUPS);
    let oldest = |unit: &Unit| unit.rows[0].header.policy_version_min.expect("the call said it");
    assert!(taken[1..].iter().all(|unit| TRAINED.saturating_sub(oldest(unit)) <= 1));
    let rows = taker_rows(&life).await;
    let acknowledged = given.len() as u64;
    assert_eq!((rows.made, rows.acknowledged, rows.dropped.get("stale")), (2 * GROUPS, acknowledged, Some(&too_old)));
}
