//! Groups with an estimator: nobody is given anything of a member before the release, and then every row has its advantage.

use std::sync::Arc;

use hedgerow::log::memory::MemoryLog;
use hedgerow::proto::v1;
use hedgerow::proto::v1::credit::Target;
use hedgerow::proto::v1::report_request::Event;

use crate::life::{Life, in_group, seconds};
use crate::queue_taker::Taker;
use crate::service::{Row, TestService, Unit, about, call, reward, subscription};

/// Runs of these tests keep what is acknowledged, so that it can be taken again.
pub(crate) fn settings(estimator: v1::Estimator) -> v1::RunSettings {
    v1::RunSettings { estimator: estimator.into(), retention: seconds(3600), ..v1::RunSettings::default() }
}

pub(crate) fn sized(size: u32) -> Event {
    Event::Open(v1::Open { group_size: Some(size), ..v1::Open::default() })
}

pub(crate) fn finish(value: f64) -> Event {
    Event::Finish(v1::Finish { seal: Some(v1::Seal::default()), reward: Some(reward(value)) })
}

impl Life {
    /// A member of group `g` with so many rows of three tokens each, one of them trained, that is not finished.
    pub(crate) async fn member(&mut self, rollout: &str, size: u32, rows: u32) -> v1::RolloutRef {
        let member = in_group(rollout, "g");
        self.accepts(&member, sized(size)).await;
        self.calls(&member, rows).await;
        member
    }

    pub(crate) async fn calls(&mut self, member: &v1::RolloutRef, rows: u32) {
        for row in 0..rows {
            let id = format!("c{row}");
            self.accepts(member, Event::Call(call(&id, "main", u64::from(row), &[1, 10 + row], &[2]))).await;
        }
    }

    /// Such a member, finalised with this reward.
    pub(crate) async fn finalised(&mut self, rollout: &str, size: u32, rows: u32, reward: f64) {
        let member = self.member(rollout, size, rows).await;
        self.accepts(&member, finish(reward)).await;
    }

    pub(crate) async fn group(&self, group: &str) -> v1::GroupSummary {
        let request = v1::ListGroupsRequest { run_id: "run".to_owned(), ..v1::ListGroupsRequest::default() };
        let groups = self.service.inspect().await.list_groups(request).await.unwrap().into_inner().groups;
        let is_it = |found: &v1::GroupSummary| found.figures.as_ref().unwrap().group_id == group;
        groups.into_iter().find(is_it).expect("the group is listed")
    }
}

/// Each row's rollout, advantage, and rows of the rollout and of the group.
fn facts(rows: &[Row]) -> Vec<(&str, Option<f64>, u64, Option<u64>)> {
    let fact = |row: &Row| (row.header.advantage, row.header.rollout_rows, row.header.group_rows);
    let facts = rows.iter().map(|row| (row.header.rollout_id.as_str(), fact(row)));
    facts.map(|(rollout, (advantage, rows, of_group))| (rollout, advantage, rows, of_group)).collect()
}

pub(crate) fn rows_of(units: Vec<Unit>) -> Vec<Row> {
    units.into_iter().flat_map(|unit| unit.rows).collect()
}

#[tokio::test]
async fn statistics_count_rollouts_and_never_rows() {
    let mut life = Life::start_with(settings(v1::Estimator::Mean)).await;
    let mut taker = Taker::join(&life.service, subscription("run", "trainers")).await;
    life.finalised("b", 2, 3, 0.0).await;
    assert!(taker.quiet().await.is_empty(), "the group is not whole");
    assert!(taker.waits(&life.service).await.contains(&v1::WaitingFor::GroupRelease));
    life.finalised("a", 2, 1, 2.0).await;
    let units = taker.take_units(4).await;
    let figures = units[0].group.clone().unwrap();
    let rows = rows_of(units);
    // Rewards 0 and 2 with three rows and one: the mean is 1. In the order of ids, though `b` was the first to be finalised.
    let expected = [
        ("a", Some(1.0), 1, Some(4)),
        ("b", Some(-1.0), 3, Some(4)),
        ("b", Some(-1.0), 3, Some(4)),
        ("b", Some(-1.0), 3, Some(4)),
    ];
    assert_eq!(facts(&rows), expected);
    for row in &rows {
        assert_eq!((row.header.group_trained_tokens, row.header.degenerate), (Some(4), false));
        assert!(row.spans.iter().all(|span| span.advantage == row.header.advantage), "{row:?}");
    }
    let numbers = (figures.reward_mean, figures.reward_standard_deviation, figures.counted_rollouts);
    assert_eq!(numbers, (1.0, 2.0_f64.sqrt(), 2));
    assert_eq!((figures.release(), figures.group_size, figures.absences.len()), (v1::GroupRelease::Whole, Some(2), 0));
    let listed = life.group("g").await;
    assert_eq!((listed.figures.unwrap(), listed.drop_reason.as_str()), (figures, ""));
    assert_eq!(listed.timeout_after, None);
}

#[tokio::test]
async fn the_baseline_of_three_successes_and_a_failure_is_three_quarters() {
    let mut life = Life::start_with(settings(v1::Estimator::Mean)).await;
    life.finalised("a", 4, 3, 1.0).await;
    for (rollout, reward) in [("b", 1.0), ("c", 1.0), ("d", 0.0)] {
        life.finalised(rollout, 4, 1, reward).await;
    }
    let mut taker = Taker::join(&life.service, subscription("run", "trainers")).await;
    let rows = rows_of(taker.take_units(6).await);
    let advantages: Vec<f64> = rows.iter().map(|row| row.header.advantage.unwrap()).collect();
    assert_eq!(advantages, [0.25, 0.25, 0.25, 0.25, 0.25, -0.75]);
}

#[tokio::test]
async fn leaving_one_out_of_two_gives_one_and_minus_one() {
    let mut life = Life::start_with(settings(v1::Estimator::Rloo)).await;
    life.finalised("a", 2, 1, 0.0).await;
    life.finalised("b", 2, 1, 1.0).await;
    let mut taker = Taker::join(&life.service, subscription("run", "trainers")).await;
    let rows = rows_of(taker.take_units(2).await);
    assert_eq!(facts(&rows), [("a", Some(-1.0), 1, Some(2)), ("b", Some(1.0), 1, Some(2))]);
}

#[tokio::test]
async fn a_group_of_one_has_an_advantage_of_nothing_and_says_so() {
    let mut life = Life::start_with(settings(v1::Estimator::Grpo)).await;
    life.finalised("a", 1, 1, 5.0).await;
    let mut taker = Taker::join(&life.service, subscription("run", "trainers")).await;
    let unit = taker.unit().await;
    assert_eq!((unit.rows[0].header.advantage, unit.rows[0].header.degenerate), (Some(0.0), true));
    assert!(unit.group.unwrap().degenerate);
}

#[tokio::test]
async fn a_rollout_without_a_group_waits_for_nobody_and_has_no_advantage() {
    let mut life = Life::start_with(settings(v1::Estimator::Grpo)).await;
    let alone = about("run", "alone");
    life.calls(&alone, 1).await;
    life.accepts(&alone, finish(1.0)).await;
    let mut taker = Taker::join(&life.service, subscription("run", "trainers")).await;
    let unit = taker.unit().await;
    assert_eq!((unit.group, facts(&unit.rows)), (None, vec![("alone", None, 1, None)]));
    assert_eq!(unit.rows[0].spans[0].advantage, None);
}

#[tokio::test]
async fn equal_rewards_are_dropped_if_the_run_says_so_and_everybody_is_told() {
    let drops = v1::RunSettings { drop_zero_variance: true, ..settings(v1::Estimator::Grpo) };
    let mut life = Life::start_with(drops).await;
    let mut taker = Taker::join(&life.service, subscription("run", "trainers")).await;
    life.finalised("a", 2, 2, 0.5).await;
    life.finalised("b", 2, 1, 0.5).await;
    let notice = taker.notice().await;
    assert_eq!((notice.kind(), notice.reason.as_str()), (v1::UnitNoticeKind::GroupDropped, "zero_variance"));
    assert_eq!((notice.group_id.as_str(), notice.rollout_id.as_str(), notice.units), ("g", "", 1));
    assert!(taker.quiet().await.is_empty());
    assert_eq!(life.group("g").await.drop_reason, "zero_variance");
    for member in ["a", "b"] {
        let ended = life.until_ended(&in_group(member, "g")).await;
        assert_eq!((ended.outcome(), ended.reason.as_str()), (v1::RolloutOutcome::Retired, "group_dropped"));
    }
    let ledger = taker_rows(&life).await;
    assert_eq!((ledger.made, ledger.dropped.get("group_dropped")), (3, Some(&3)), "{ledger:?}");
    let late = Taker::join(&life.service, subscription("run", "later")).await.quiet().await;
    assert!(late.is_empty(), "nobody who comes later is given it either");
}

/// The ledger of the rows of the consumer group `trainers`.
pub(crate) async fn taker_rows(life: &Life) -> v1::RowLedger {
    let request = v1::ListConsumersRequest { run_id: "run".to_owned(), ..v1::ListConsumersRequest::default() };
    let groups = life.service.inspect().await.list_consumers(request).await.unwrap().into_inner().consumer_groups;
    groups.into_iter().find(|group| group.consumer_group == "trainers").unwrap().rows.unwrap()
}

fn credit(id: &str, reward: Option<f64>, advantage_scale: Option<f64>) -> v1::Credit {
    v1::Credit { target: Some(Target::CallId(id.to_owned())), reward, advantage_scale, ..v1::Credit::default() }
}

#[tokio::test]
async fn process_rewards_and_factors_go_on_top_on_a_fork_tree_and_all_is_the_same_after_a_restart() {
    let log = Arc::new(MemoryLog::keeping());
    let service = TestService::start_on(Arc::clone(&log) as Arc<_>).await;
    service.create_run("run", settings(v1::Estimator::Grpo)).await;
    let mut life = Life::on(service).await;
    life.finalised("a", 3, 1, 0.3).await;
    life.finalised("b", 3, 1, 0.1).await;
    let tree = life.member("c", 3, 0).await;
    for event in [
        call("root", "main", 1, &[1], &[2]),
        call("next", "main", 2, &[1, 2, 3], &[4]),
        call("fork", "sub", 3, &[1, 2, 5], &[6]),
    ] {
        life.accepts(&tree, Event::Call(event)).await;
    }
    let credits = vec![credit("next", Some(-0.5), Some(2.0)), credit("fork", None, Some(-3.0))];
    let reward = v1::Reward { credits, ..reward(0.9) };
    life.accepts(&tree, Event::Finish(v1::Finish { seal: Some(v1::Seal::default()), reward: Some(reward) })).await;
    let mut taker = Taker::join(&life.service, subscription("run", "trainers")).await;
    let before = rows_of(taker.take_units(4).await);

    let rewards = [0.3, 0.1, 0.9];
    let mean = rewards.iter().sum::<f64>() / 3.0;
    let squares: f64 = rewards.iter().map(|reward| (reward - mean) * (reward - mean)).sum();
    let of_c = (0.9 - mean) / ((squares / 2.0).sqrt() + 1e-6);
    let spans: Vec<(&str, Option<f64>)> = before[2..]
        .iter()
        .flat_map(|row| row.spans.iter().map(|span| (span.call_id.as_str(), span.advantage)))
        .collect();
    let (root, next, fork) = (Some(of_c), Some(2.0 * (of_c - 0.5)), Some(-3.0 * of_c));
    assert_eq!(spans, [("root", root), ("next", next), ("root", root), ("fork", fork)]);

    drop((taker, life));
    let service = TestService::start_on(log).await;
    let mut again = Taker::join(&service, subscription("run", "trainers")).await;
    service.clock.advance(std::time::Duration::from_secs(60));
    let after = rows_of(again.take_units(4).await);
    assert_eq!(after, before, "bit for bit");
}
