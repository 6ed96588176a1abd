//! Runs that may only be so far ahead of their trainers: opening one more group waits, and nothing else does.

use std::sync::Arc;

use hedgerow::error::Reason;
use hedgerow::log::memory::MemoryLog;
use hedgerow::proto::v1::report_request::Event;
use hedgerow::proto::v1::{self, DiscardDisposition};

use crate::life::{Life, attempt, discard, finish, heartbeat, in_group};
use crate::queue_taker::Taker;
use crate::service::{TestService, about, call, subscription};

const LEAD: u32 = 2;

/// A run that may be two groups ahead of these trainers.
fn paced(required: &[&str]) -> v1::RunSettings {
    let declared = |name: &&str| v1::ConsumerGroupDeclaration { consumer_group: (*name).to_owned(), settings: None };
    v1::RunSettings {
        max_lead_groups: Some(LEAD),
        consumer_groups: required.iter().map(declared).collect(),
        required_consumer_groups: required.iter().map(|name| (*name).to_owned()).collect(),
        ..v1::RunSettings::default()
    }
}

fn one_call() -> Event {
    Event::Call(call("c", "main", 1, &[1], &[2]))
}

/// It would be one group too many, until trainers have taken some.
async fn is_too_far(life: &mut Life, rollout: &v1::RolloutRef) {
    let refusal = life.refuses(rollout, one_call(), Reason::LeadFull, "").await;
    assert!(refusal.retry_after.is_some(), "{refusal:?}");
}

#[tokio::test]
async fn one_more_group_waits_for_the_slowest_trainers_and_members_never_do() {
    let mut life = Life::start_with(paced(&["fast", "slow"])).await;
    let members = |group: &str| [in_group(&format!("{group}/0"), group), in_group(&format!("{group}/1"), group)];
    let (one, two, three) = (members("one"), members("two"), members("three"));
    life.accepts(&one[0], one_call()).await;
    life.accepts(&two[0], one_call()).await;
    is_too_far(&mut life, &three[0]).await;
    is_too_far(&mut life, &about("run", "alone")).await;
    // What is admitted goes on: events, members, new attempts.
    life.accepts(&one[1], one_call()).await;
    life.accepts(&two[0], discard("again", DiscardDisposition::WillRetry)).await;
    life.accepts(&attempt(&two[0], 1), one_call()).await;
    for member in &one {
        life.accepts(member, finish(1.0)).await;
    }
    // It waits for trainers now, and for both.
    is_too_far(&mut life, &three[0]).await;
    let mut fast = Taker::join(&life.service, subscription("run", "fast")).await;
    fast.take_units(2).await;
    is_too_far(&mut life, &three[0]).await;
    let mut slow = Taker::join(&life.service, subscription("run", "slow")).await;
    let taken = slow.take_units(2).await;
    life.accepts(&three[0], one_call()).await;
    is_too_far(&mut life, &in_group("four/0", "four")).await;
    // What is handed back waits again.
    slow.nack(&[&taken[0].unit_id], None).await;
    slow.take_units(1).await;
    life.accepts(&three[0], discard("enough", DiscardDisposition::Final)).await;
    life.settle(&three[0]).await;
    life.accepts(&in_group("four/0", "four"), one_call()).await;
    is_too_far(&mut life, &in_group("five/0", "five")).await;
}

#[tokio::test]
async fn rollouts_without_a_group_count_and_so_does_what_was_there_before_a_restart() {
    let log = Arc::new(MemoryLog::keeping());
    let service = TestService::start_on(Arc::clone(&log) as Arc<_>).await;
    service.create_run("run", paced(&["trainers"])).await;
    let mut life = Life::on(service).await;
    for rollout in ["a", "b"] {
        life.accepts(&about("run", rollout), heartbeat()).await;
    }
    is_too_far(&mut life, &about("run", "c")).await;
    life.accepts(&about("run", "a"), one_call()).await;
    life.accepts(&about("run", "a"), finish(1.0)).await;
    drop(life);

    let mut life = Life::on(TestService::start_on(log).await).await;
    is_too_far(&mut life, &about("run", "c")).await;
    // One that joins a group is still one.
    life.accepts(&in_group("b", "late"), one_call()).await;
    is_too_far(&mut life, &about("run", "c")).await;
    let mut taker = Taker::join(&life.service, subscription("run", "trainers")).await;
    life.service.clock.advance(std::time::Duration::from_secs(20));
    taker.take_units(1).await;
    life.accepts(&about("run", "c"), heartbeat()).await;
    is_too_far(&mut life, &about("run", "d")).await;
    // A run's bound may be changed, and counts at once.
    let wider = v1::RunSettings { max_lead_groups: Some(LEAD + 1), ..paced(&["trainers"]) };
    let update = v1::UpdateRunSettingsRequest { run_id: "run".to_owned(), settings: Some(wider), ..Default::default() };
    life.service.admin().await.update_run_settings(update).await.unwrap();
    life.accepts(&about("run", "d"), heartbeat()).await;
}

/// However slow the trainer is, nothing is thrown away, and the fleet is never far ahead.
#[tokio::test]
async fn a_slow_trainer_holds_the_fleet_back_and_gets_everything() {
    const GROUPS: usize = 12;
    let mut life = Life::start_with(paced(&["trainers"])).await;
    let mut subscription = subscription("run", "trainers");
    subscription.credit_tokens = 2;
    let mut taker = Taker::join(&life.service, subscription).await;
    let (mut told, mut refused, mut trained) = (0, 0, Vec::new());
    while trained.len() < 2 * GROUPS {
        let mut was_refused = told == GROUPS;
        while !was_refused {
            let (group, first) = (format!("g{told}"), in_group(&format!("g{told}/0"), &format!("g{told}")));
            let answer = life.worker.report(&first, one_call()).await;
            was_refused = answer.outcome() == v1::AnswerOutcome::Refused;
            if was_refused {
                assert_eq!(answer.refusal.unwrap().reason, Reason::LeadFull.as_str());
                refused += 1;
                break;
            }
            let second = in_group(&format!("g{told}/1"), &group);
            life.accepts(&second, one_call()).await;
            life.accepts(&first, finish(1.0)).await;
            life.accepts(&second, finish(1.0)).await;
            told += 1;
            was_refused = told == GROUPS;
        }
        // Whatever waits, with what is out at the trainer, is never more than the lead and one.
        assert!(told * 2 - trained.len() <= 2 * (LEAD as usize + 1), "{told} groups, {} rows taken", trained.len());
        let unit = taker.unit().await;
        taker.ack(&[&unit.unit_id]).await;
        trained.push(unit.unit_id);
    }
    assert!(refused > 0);
    trained.sort_unstable();
    trained.dedup();
    assert_eq!(trained.len(), 2 * GROUPS);
}
