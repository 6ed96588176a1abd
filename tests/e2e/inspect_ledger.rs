//! The ledger of RULES 3.6.4, live: of each rollout, of the run, of its consumer groups, of the service.

use std::collections::BTreeMap;
use std::time::Duration;

use hedgerow::proto::v1::report_request::Event;
use hedgerow::proto::v1::{self, AnswerOutcome, CallFate, DiscardDisposition, RolloutState, UnitNoticeKind};

use crate::inspect::{Window, of_run, rollouts_with, the_run};
use crate::life::{discard, finish_with, list};
use crate::queue_credit::Dice;
use crate::queue_taker::{Taker, finish};
use crate::service::{TestService, Worker, about, call, reward, seal, subscription};

/// Fates by name, with the reason of what is gone.
type Fates = BTreeMap<String, u64>;

fn of_ledger(ledger: &v1::PolicyLedger) -> Fates {
    let fates = [
        ("pending", ledger.pending),
        ("trained", ledger.trained),
        ("context", ledger.context),
        ("no_row", ledger.no_row),
        ("empty", ledger.empty),
        ("not_kept", ledger.not_kept),
        ("too_long", ledger.too_long),
    ];
    let fates = fates.into_iter().map(|(fate, calls)| (fate.to_owned(), calls));
    let gone = ledger.gone.iter().map(|(reason, calls)| (format!("gone: {reason}"), *calls));
    let fates: Fates = fates.chain(gone).filter(|(_, calls)| *calls > 0).collect();
    assert_eq!(fates.values().sum::<u64>(), ledger.accepted, "it adds up: {ledger:?}");
    fates
}

fn fate_name(fate: CallFate) -> &'static str {
    match fate {
        CallFate::Pending => "pending",
        CallFate::Trained => "trained",
        CallFate::Context => "context",
        CallFate::NoRow => "no_row",
        CallFate::Empty => "empty",
        CallFate::NotKept => "not_kept",
        CallFate::TooLong => "too_long",
        CallFate::Gone | CallFate::Unspecified => panic!("a call that is shown is not gone"),
    }
}

/// One attempt, as who reports it knows it.
#[derive(Clone, Default)]
struct Attempt {
    calls: Vec<String>,
    /// Why it ended without rows, if it did.
    gone: Option<String>,
}

/// A run reported at random, and what its reporter knows of it.
struct Random {
    service: TestService,
    worker: Worker,
    window: Window,
    dice: Dice,
    attempts: BTreeMap<(u64, u32), Attempt>,
    newest: BTreeMap<u64, u32>,
    refused: u64,
}

const ROLLOUTS: u64 = 5;

impl Random {
    async fn start(seed: u64) -> Self {
        let service = TestService::start().await;
        let mut dice = Dice::new(seed);
        let trained = ["actor", "critic"].into_iter().take(usize::try_from(dice.below(3)).unwrap());
        let broken = [v1::BrokenLinkRule::Infer, v1::BrokenLinkRule::Discard][usize::from(dice.below(4) == 0)];
        let settings = v1::RunSettings {
            trained_policies: trained.map(str::to_owned).collect(),
            broken_link: broken.into(),
            ..v1::RunSettings::default()
        };
        service.create_run("run", settings).await;
        let (worker, window) = (service.worker().await, service.inspect().await);
        let (attempts, newest) = (BTreeMap::new(), BTreeMap::new());
        Self { service, worker, window, dice, attempts, newest, refused: 0 }
    }

    fn some_ids(&mut self, most: u64) -> Vec<u32> {
        (0..self.dice.below(most)).map(|_| u32::try_from(self.dice.below(3)).unwrap()).collect()
    }

    fn event(&mut self) -> Event {
        let id = |dice: &mut Dice| format!("c{}", dice.below(8));
        match self.dice.below(20) {
            0..=12 => {
                let (agent, sequence) = (["main", "sub"][usize::from(self.dice.below(3) == 0)], self.dice.below(8));
                let (prompt, generation) = (self.some_ids(6), self.some_ids(4));
                let link = (self.dice.below(6) == 0)
                    .then(|| v1::Link { link: Some(v1::link::Link::ParentCallId(id(&mut self.dice))) });
                let train = (self.dice.below(6) == 0).then_some(false);
                let policy = ["", "actor", "critic"][usize::try_from(self.dice.below(3)).unwrap()].to_owned();
                let call_id = id(&mut self.dice);
                Event::Call(v1::Call { link, train, policy, ..call(&call_id, agent, sequence, &prompt, &generation) })
            }
            13 => Event::Reward(reward(1.0)),
            14 => finish(1.0),
            15 | 16 => {
                let kept: Vec<String> = (0..self.dice.below(4)).map(|_| id(&mut self.dice)).collect();
                let kept: Vec<&str> = kept.iter().map(String::as_str).collect();
                finish_with(seal(&[("main", &kept)]), 1.0)
            }
            17 => Event::AgentEnd(v1::AgentEnd {
                agent_id: "sub".to_owned(),
                status: v1::AgentStatus::Settled.into(),
                kept: Some(list(&["c1"])),
                ..v1::AgentEnd::default()
            }),
            18 => discard("its own words", DiscardDisposition::Final),
            _ => Event::Heartbeat(v1::Heartbeat {}),
        }
    }

    async fn step(&mut self) {
        let rollout = self.dice.below(ROLLOUTS);
        let newest = self.newest.get(&rollout).copied();
        let attempt = newest.unwrap_or(0) + u32::from(self.dice.below(25) == 0);
        let event = self.event();
        let reference = v1::RolloutRef { attempt, ..about("run", &rollout.to_string()) };
        let answer = self.worker.report(&reference, event.clone()).await;
        match answer.outcome() {
            AnswerOutcome::Refused => self.refused += 1,
            AnswerOutcome::Accepted | AnswerOutcome::Duplicate => {
                if let Some(older) = newest.filter(|newest| *newest < attempt) {
                    let older = self.attempts.entry((rollout, older)).or_default();
                    older.gone.get_or_insert_with(|| "superseded".to_owned());
                }
                self.newest.insert(rollout, attempt);
                let known = self.attempts.entry((rollout, attempt)).or_default();
                if let Event::Call(call) = event
                    && !known.calls.contains(&call.call_id)
                {
                    known.calls.push(call.call_id);
                }
                if let Some(ended) = answer.ended {
                    known.gone = Some(ended.reason);
                }
            }
            AnswerOutcome::AlreadyEnded | AnswerOutcome::Unspecified => {}
        }
    }

    /// Rollouts whose wait for calls, or whose idle time, is over are seen to be so.
    async fn wait(&mut self) {
        self.service.clock.advance(Duration::from_secs(7 * 60 * 60));
        // A clock's decisions are taken by another task, and each is one look more that finds nothing open.
        for summary in self.until_nothing_is_open().await {
            let reference = summary.rollout.unwrap();
            let place = (reference.rollout_id.parse().unwrap(), reference.attempt);
            if let Some(ended) = summary.ended.filter(|ended| ended.outcome() == v1::RolloutOutcome::Discarded) {
                self.attempts.entry(place).or_default().gone.get_or_insert(ended.reason);
            }
        }
    }

    async fn until_nothing_is_open(&mut self) -> Vec<v1::RolloutSummary> {
        loop {
            let all = rollouts_with(&mut self.window, of_run("run"), async || ()).await;
            let over =
                |summary: &v1::RolloutSummary| matches!(summary.state(), RolloutState::Finalised | RolloutState::Ended);
            if all.iter().all(over) {
                return all;
            }
            tokio::task::yield_now().await;
        }
    }

    /// The ledger of one policy as the rollouts themselves give it, and calls whose rollouts retired.
    async fn summed_over_rollouts(&mut self, policy: &str) -> (Fates, u64) {
        let (mut fates, mut retired) = (Fates::new(), 0);
        for ((rollout, attempt), known) in self.attempts.clone() {
            if let Some(reason) = &known.gone {
                let reason = if reason == "its own words" { "harness" } else { reason };
                *fates.entry(format!("gone: {reason}")).or_default() += known.calls.len() as u64;
                continue;
            }
            let request = v1::GetRolloutRequest {
                run_id: "run".to_owned(),
                rollout_id: rollout.to_string(),
                policy: Some(policy.to_owned()),
                max_row_tokens: 0,
            };
            let shown = self.window.get_rollout(request).await.unwrap().into_inner();
            let summary = shown.summary.unwrap();
            assert_eq!(summary.rollout.as_ref().unwrap().attempt, attempt);
            if let Some(ended) = &summary.ended {
                assert_eq!(ended.outcome(), v1::RolloutOutcome::Retired, "{ended:?}");
                retired += known.calls.len() as u64;
                continue;
            }
            assert_eq!(shown.calls.len(), known.calls.len());
            for call in &shown.calls {
                *fates.entry(fate_name(call.fate()).to_owned()).or_default() += 1;
            }
        }
        fates.retain(|_, calls| *calls > 0);
        (fates, retired)
    }

    /// The run's ledgers are the sums of its rollouts'.
    async fn check(&mut self, what: &str) -> v1::RunSummary {
        let run = the_run(&mut self.window, "run").await;
        assert!(!run.ledgers.is_empty());
        let accepted: usize = self.attempts.values().map(|known| known.calls.len()).sum();
        for ledger in &run.ledgers {
            let said = of_ledger(ledger);
            assert_eq!(ledger.accepted, accepted as u64, "{what}");
            let (mut summed, retired) = self.summed_over_rollouts(&ledger.policy).await;
            if retired == 0 {
                assert_eq!(said, summed, "{what}, policy {}", ledger.policy);
            } else {
                // Of those without rows nothing is kept: their calls are in no row, empty, or not kept.
                let mut left = said.clone();
                for fates in [&mut left, &mut summed] {
                    let rest = ["no_row", "empty", "not_kept"].map(|fate| fates.remove(fate).unwrap_or(0));
                    fates.insert("in no row of any kind".to_owned(), rest.into_iter().sum());
                }
                *summed.entry("in no row of any kind".to_owned()).or_default() += retired;
                assert_eq!(left, summed, "{what}, policy {}", ledger.policy);
            }
        }
        assert_eq!(run.refused_requests, self.refused, "{what}");
        run
    }
}

async fn a_run_at_random(seed: u64) {
    let mut random = Random::start(seed).await;
    for stage in 0..3 {
        for _ in 0..25 {
            random.step().await;
        }
        random.check(&format!("seed {seed}, stage {stage}")).await;
        if stage == 1 {
            random.wait().await;
            random.check(&format!("seed {seed}, after a wait")).await;
        }
    }
    let before = random.check("before").await;
    let settings = v1::ConsumerGroupSettings { unit: v1::Unit::Rollout.into(), ..Default::default() };
    let subscription = v1::Subscription { settings: Some(settings), ..subscription("run", "trainers") };
    let mut taker = Taker::join(&random.service, subscription).await;
    let units = taker.quiet().await;
    let rows: u64 = units.iter().map(|unit| unit.rows.len() as u64).sum();
    let leased = the_run(&mut random.window, "run").await.rows[0].clone();
    assert_eq!((leased.made, leased.leased, leased.acknowledged), (rows, rows, 0), "seed {seed}");
    let ids: Vec<_> = units.iter().map(|unit| unit.unit_id.clone()).collect();
    taker.ack(&ids).await;
    let after = the_run(&mut random.window, "run").await;
    assert_eq!((after.rows[0].made, after.rows[0].acknowledged), (rows, rows), "seed {seed}");
    assert_eq!(after.ledgers, before.ledgers, "seed {seed}: what became of calls does not change when rows are taken");
    assert_eq!(after.finalised_rollouts, 0, "seed {seed}");
    assert_eq!(after.retired_rollouts, before.retired_rollouts + before.finalised_rollouts, "seed {seed}");
}

#[test]
fn the_ledger_of_a_run_is_the_sum_of_its_rollouts() {
    for seed in 0..60 {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(a_run_at_random(seed));
    }
}

/// A line of two calls, the second of six ids, and one of another policy.
async fn a_line(worker: &mut Worker, rollout: &v1::RolloutRef) {
    let other = v1::Call { policy: "other".to_owned(), ..call("o", "sub", 3, &[9], &[9]) };
    for call in [call("a", "main", 1, &[1], &[2]), call("b", "main", 2, &[1, 2, 3], &[4, 5, 6]), other] {
        worker.report(rollout, Event::Call(call)).await;
    }
    worker.report(rollout, finish(1.0)).await;
}

#[tokio::test]
async fn too_long_calls_stand_in_the_ledger_of_the_consumer_group_and_are_told() {
    let service = TestService::start().await;
    let (mut worker, mut window) = (service.worker().await, service.inspect().await);
    let settings = v1::ConsumerGroupSettings { policy: "main".to_owned(), max_row_tokens: 5, ..Default::default() };
    let limited = v1::Subscription { settings: Some(settings), ..subscription("run", "short") };
    let mut taker = Taker::join(&service, limited).await;
    let rollout = v1::RolloutRef { group_id: "g".to_owned(), attempt: 3, ..about("run", "x") };
    a_line(&mut worker, &rollout).await;
    let notice = taker.notice().await;
    assert_eq!((notice.kind(), notice.units, notice.unit_id.as_str()), (UnitNoticeKind::TooLong, 1, ""));
    assert_eq!((notice.group_id.as_str(), notice.rollout_id.as_str(), notice.attempt), ("g", "x", 3));
    let request = v1::ListConsumersRequest { run_id: "run".to_owned(), ..Default::default() };
    let group = window.list_consumers(request).await.unwrap().into_inner().consumer_groups.remove(0);
    let [ledger] = &group.ledgers[..] else { panic!("{:?}", group.ledgers) };
    let expected = [("trained", 1), ("too_long", 1), ("no_row", 1)].map(|(fate, calls)| (fate.to_owned(), calls));
    assert_eq!((ledger.policy.as_str(), of_ledger(ledger)), ("main", expected.into()));
    let run = the_run(&mut window, "run").await;
    assert_eq!(of_ledger(&run.ledgers[0]).get("too_long"), None, "the run's ledger is as without a limit");
    assert_eq!(run.rows[0].made, 1);
    // The gauges say the same once they are set again.
    service.clock.advance(Duration::from_secs(2));
    let gauge = "hedgerow_too_long_calls{run=\"run\",consumer_group=\"short\"} 1";
    let metrics = || service.running.store.telemetry().render();
    while !metrics().contains(gauge) {
        the_run(&mut window, "run").await;
    }
    assert!(metrics().contains("hedgerow_waiting_on{who=\"idle\"} 1"), "all is out at a trainer that works on it");
    assert!(metrics().contains("hedgerow_durable_answer_seconds_count 4"), "each of four messages was answered");
}

#[tokio::test]
async fn a_rollout_without_rows_is_told_to_who_is_subscribed() {
    let service = TestService::start().await;
    let mut worker = service.worker().await;
    let of = |policy: &str| v1::ConsumerGroupSettings { policy: policy.to_owned(), ..Default::default() };
    let other = v1::Subscription { settings: Some(of("third")), ..subscription("run", "thirds") };
    let mut other = Taker::join(&service, other).await;
    let mut all = Taker::join(&service, subscription("run", "all")).await;
    a_line(&mut worker, &about("run", "x")).await;
    let notice = other.notice().await;
    assert_eq!((notice.kind(), notice.rollout_id.as_str(), notice.units), (UnitNoticeKind::NoRows, "x", 1));
    assert_eq!(all.quiet().await.len(), 2);
    assert!(all.notices.is_empty(), "{:?}", all.notices);
    worker.report(&about("run", "empty"), finish(1.0)).await;
    let notice = all.notice().await;
    assert_eq!((notice.kind(), notice.rollout_id.as_str()), (UnitNoticeKind::NoRows, "empty"));
}

#[tokio::test]
async fn nobody_is_let_go_for_news_and_none_is_lost() {
    let service = TestService::start().await;
    let mut worker = service.worker().await;
    // Credit for nothing: only news come. Nothing is read until all are on their way.
    let subscription = v1::Subscription { credit_tokens: 0, ..subscription("run", "trainers") };
    let mut taker = Taker::join(&service, subscription).await;
    let count = 3000;
    for rollout in 0..count {
        worker.send(&about("run", &format!("r{rollout}")), finish(1.0)).await;
        worker.answer(rollout + 1).await;
    }
    let mut told = 0;
    while told < count {
        let heartbeats = service.clock.clone();
        heartbeats.advance(Duration::from_secs(10));
        let notice = taker.notice().await;
        assert_eq!(notice.kind(), UnitNoticeKind::NoRows);
        told += notice.units;
    }
    assert_eq!(told, count);
}

#[tokio::test]
async fn the_ledger_of_the_service_is_that_of_all_runs() {
    let service = TestService::start().await;
    let (mut worker, mut window) = (service.worker().await, service.inspect().await);
    for run in ["one", "two", "three"] {
        let _taker = Taker::join(&service, subscription(run, "trainers")).await;
        a_line(&mut worker, &about(run, "x")).await;
        worker.report(&about(run, "y"), Event::Call(call("a", "main", 1, &[1], &[2]))).await;
        worker.report(&about(run, "z"), Event::Call(call("a", "main", 1, &[1], &[2]))).await;
        worker.report(&about(run, "z"), discard("test", DiscardDisposition::Final)).await;
    }
    let first = v1::ListRunsRequest { page_size: 2, page_token: String::new() };
    let page = window.list_runs(first).await.unwrap().into_inner();
    let service_ledger = page.service.unwrap();
    let [main, other] = &service_ledger.ledgers[..] else { panic!("{service_ledger:?}") };
    let expected = [("trained", 6), ("no_row", 3), ("pending", 3), ("gone: harness", 3)];
    assert_eq!(of_ledger(main), expected.map(|(fate, calls)| (fate.to_owned(), calls)).into());
    assert_eq!((other.policy.as_str(), other.trained, other.accepted), ("other", 3, 15));
    let [rows] = &service_ledger.rows[..] else { panic!("{service_ledger:?}") };
    assert_eq!((rows.consumer_group.as_str(), rows.made), ("trainers", 6));
    let ids: Vec<&str> = page.runs.iter().map(|run| run.run_id.as_str()).collect();
    assert_eq!(ids, ["one", "three"]);
    assert_eq!(page.runs[0].gone_rollouts, [("harness".to_owned(), 1)].into());
    let next = v1::ListRunsRequest { page_size: 2, page_token: page.next_page_token };
    let page = window.list_runs(next).await.unwrap().into_inner();
    assert_eq!((page.runs[0].run_id.as_str(), page.next_page_token.as_str()), ("two", ""));
    assert_eq!(page.service, None, "the first page has it");
}
