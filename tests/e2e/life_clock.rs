//! What a clock decides of a rollout. Only the tests move it.

use std::sync::Arc;
use std::time::Duration;

use hedgerow::log::memory::MemoryLog;
use hedgerow::proto::v1;
use hedgerow::proto::v1::report_request::Event;
use hedgerow::proto::v1::{LinkKind, MissingCallRule, RolloutOutcome};

use crate::life::{
    Life, expecting, finish, finish_with, heartbeat, kept, naming, on_base, seconds, state, tags, walks,
};
use crate::service::{TestService, about, call, reward, seal, subscription};

const MINUTE: u64 = 60;
const HOUR: u64 = 60 * MINUTE;

impl Life {
    fn advance(&self, seconds: u64) {
        self.service.clock.advance(Duration::from_secs(seconds));
    }
}

fn whole_seconds(duration: Option<prost_types::Duration>) -> Option<i64> {
    duration.map(|duration| duration.seconds)
}

#[tokio::test]
async fn a_rollout_of_which_nothing_is_heard_is_discarded() {
    let unclaimed = v1::RunSettings { unclaimed_retention: seconds(1_000_000), ..v1::RunSettings::default() };
    let mut life = Life::start_with(unclaimed).await;
    let (silent, alive) = (about("run", "silent"), about("run", "alive"));
    for rollout in [&silent, &alive] {
        life.accepts(rollout, Event::Call(call("a", "main", 1, &[1], &[2]))).await;
    }
    assert_eq!(whole_seconds(life.summary(&silent).await.next_deadline), Some(6 * 3600), "the default");
    // A tool call may take hours; a sign of life, and anything that is taken, even twice, has the time begin again.
    for event in [heartbeat(), tags(&[("a", "b")]), Event::Call(call("a", "main", 1, &[1], &[2])), heartbeat()] {
        life.advance(HOUR + HOUR / 2 - 1);
        life.worker.report(&alive, event).await;
    }
    assert_eq!(state(&life.settle(&silent).await), v1::RolloutState::Open);
    life.advance(4);
    let end = life.until_ended(&silent).await;
    assert_eq!((end.outcome(), end.reason.as_str()), (RolloutOutcome::Discarded, "idle_timeout"));
    assert_eq!(life.has_ended(&silent, heartbeat()).await, end);
    assert_eq!(state(&life.settle(&alive).await), v1::RolloutState::Open);
    life.advance(6 * HOUR - 5);
    assert_eq!(state(&life.settle(&alive).await), v1::RolloutState::Open);
    life.accepts(&alive, finish(1.0)).await;
    life.advance(100 * HOUR);
    assert_eq!(state(&life.settle(&alive).await), v1::RolloutState::Finalised);
}

#[tokio::test]
async fn one_that_was_sealed_waits_for_its_reward_no_longer_than_one_that_was_not() {
    let settings = v1::RunSettings { idle_timeout: seconds(60), ..v1::RunSettings::default() };
    let mut life = Life::start_with(settings).await;
    let (unrewarded, missing) = (about("run", "unrewarded"), about("run", "missing"));
    life.accepts(&unrewarded, Event::Seal(v1::Seal::default())).await;
    life.accepts(&missing, finish_with(expecting(1), 1.0)).await;
    life.advance(60);
    assert_eq!(life.until_ended(&unrewarded).await.reason, "idle_timeout");
    // What awaits only calls has a time limit of its own.
    assert_eq!(state(&life.settle(&missing).await), v1::RolloutState::Incomplete);
    life.advance(540);
    assert_eq!(life.until_ended(&missing).await.reason, "missing_call");
}

#[tokio::test]
async fn missing_kept_calls_discard_by_default() {
    let mut life = Life::start().await;
    let names = ["listed", "expected", "waiting", "come"];
    for name in names {
        let rollout = about("run", name);
        life.accepts(&rollout, Event::Call(call("a", "main", 1, &[1], &[2]))).await;
        let seal = match name {
            "expected" => expecting(2),
            "waiting" => {
                life.accepts(&rollout, Event::Call(on_base("z", &[1], &[], call("b", "main", 2, &[], &[3])))).await;
                v1::Seal::default()
            }
            _ => seal(&[("main", &["a", "b"])]),
        };
        life.accepts(&rollout, finish_with(seal, 1.0)).await;
        assert_eq!(whole_seconds(life.summary(&rollout).await.next_deadline), Some(600));
    }
    life.advance(10 * MINUTE - 1);
    life.settle(&about("run", "listed")).await;
    life.accepts(&about("run", "come"), Event::Call(call("b", "main", 2, &[1, 2], &[3]))).await;
    life.advance(1);
    for name in &names[..3] {
        let end = life.until_ended(&about("run", name)).await;
        assert_eq!((end.outcome(), end.reason.as_str()), (RolloutOutcome::Discarded, "missing_call"));
        let late = Event::Call(call("b", "main", 2, &[1, 2], &[3]));
        assert_eq!(life.has_ended(&about("run", name), late).await, end);
    }
    assert_eq!(walks(&life.shown(&about("run", "come")).await), ["a b"]);
}

#[tokio::test]
async fn missing_kept_calls_are_left_out_where_the_run_says_so() {
    let settings = v1::RunSettings { missing_call: MissingCallRule::Finalise.into(), ..v1::RunSettings::default() };
    let mut life = Life::start_with(settings).await;
    let mut trainer = life.service.trainer(subscription("run", "trainers")).await;
    let (whole, lame, late) = (about("run", "whole"), about("run", "lame"), about("run", "late"));
    for rollout in [&whole, &lame, &late] {
        life.accepts(rollout, Event::Call(call("a", "main", 1, &[1], &[2]))).await;
    }
    life.accepts(&whole, finish_with(seal(&[("main", &["a"])]), 1.0)).await;
    life.accepts(&lame, finish_with(seal(&[("main", &["a", "gone"])]), 1.0)).await;
    // Without a reward the decision stands, and the rollout waits on.
    life.accepts(&late, Event::Seal(seal(&[("main", &["a", "b", "gone"])]))).await;
    life.advance(10 * MINUTE);
    let shown = life.until_finalised(&lame).await;
    assert!(shown.summary.unwrap().incomplete);
    assert_eq!(walks(&life.shown(&lame).await), ["a"]);
    assert_eq!(state(&life.settle(&late).await), v1::RolloutState::Sealed);
    life.accepts(&late, Event::Call(call("b", "main", 2, &[1, 2], &[3]))).await;
    life.accepts(&late, Event::Reward(reward(1.0))).await;
    assert_eq!(walks(&life.shown(&late).await), ["a b"], "what comes before the reward counts");
    assert!(!life.summary(&whole).await.incomplete);
    for (rollout, incomplete) in [("whole", false), ("lame", true), ("late", true)] {
        let unit = trainer.unit().await;
        let header = &unit.rows[0].header;
        assert_eq!((header.rollout_id.as_str(), header.incomplete), (rollout, incomplete));
    }
    life.others_go_on("incomplete ones").await;
}

#[tokio::test]
async fn a_named_parent_that_never_comes_breaks_its_link() {
    let settings = v1::RunSettings { missing_parent_timeout: seconds(60), ..v1::RunSettings::default() };
    let mut life = Life::start_with(settings).await;
    let rollout = about("run", "one");
    life.accepts(&rollout, Event::Call(call("a", "main", 1, &[1], &[2]))).await;
    let c = Event::Call(naming("gone", call("c", "main", 3, &[1, 2, 3], &[4])));
    let verdict = life.accepts(&rollout, c.clone()).await.verdict.unwrap();
    assert_eq!((verdict.kind(), verdict.waiting_for_call_id.as_str()), (LinkKind::Waiting, "gone"));
    let lists = seal(&[("main", &["a", "c"])]);
    let answer = life.accepts(&rollout, finish_with(lists, 1.0)).await;
    assert_eq!(answer.seal.unwrap().missing[0].cause(), v1::MissingCallCause::NamedParent);
    life.advance(59);
    assert_eq!(state(&life.settle(&rollout).await), v1::RolloutState::Incomplete);
    life.advance(1);
    let shown = life.until_finalised(&rollout).await;
    assert_eq!(walks(&shown), ["a c"], "it is inferred");
    assert!(!shown.summary.unwrap().incomplete, "no kept call is missing");
    let verdict = life.repeats(&rollout, c).await.verdict.unwrap();
    assert_eq!((verdict.kind(), verdict.broken()), (LinkKind::Broken, v1::BrokenLinkReason::NeverCame));
}

#[tokio::test]
async fn an_unkept_parent_without_its_base_holds_its_child_no_longer_than_a_missing_one() {
    let settings = v1::RunSettings {
        missing_call_timeout: seconds(60),
        missing_parent_timeout: seconds(120),
        ..v1::RunSettings::default()
    };
    let mut life = Life::start_with(settings).await;
    let rollout = about("run", "one");
    life.accepts(&rollout, Event::Call(on_base("gone", &[1], &[2], call("p", "main", 1, &[], &[3])))).await;
    life.accepts(&rollout, Event::Call(naming("p", call("c", "main", 2, &[1, 2, 3], &[4])))).await;
    life.accepts(&rollout, finish_with(seal(&[("main", &["c"])]), 1.0)).await;
    life.advance(60);
    assert_eq!(state(&life.settle(&rollout).await), v1::RolloutState::Incomplete, "every kept call is there");
    life.advance(60);
    let shown = life.until_finalised(&rollout).await;
    assert_eq!((walks(&shown), kept(&shown)), (vec!["c".to_owned()], vec!["c"]));
    assert!(!shown.summary.unwrap().incomplete);
}

#[tokio::test]
async fn a_named_parent_has_its_own_time_where_kept_calls_are_left_out_sooner() {
    let settings = v1::RunSettings {
        missing_call: MissingCallRule::Finalise.into(),
        missing_call_timeout: seconds(60),
        missing_parent_timeout: seconds(120),
        ..v1::RunSettings::default()
    };
    let mut life = Life::start_with(settings).await;
    let rollout = about("run", "one");
    life.accepts(&rollout, Event::Call(call("a", "main", 1, &[1], &[2]))).await;
    life.accepts(&rollout, Event::Call(naming("retry", call("c", "main", 3, &[1, 2, 3, 4], &[5])))).await;
    life.accepts(&rollout, finish_with(seal(&[("main", &["a", "gone", "c"])]), 1.0)).await;
    life.advance(60);
    assert_eq!(state(&life.settle(&rollout).await), v1::RolloutState::Incomplete);
    life.accepts(&rollout, Event::Call(naming("a", call("retry", "main", 2, &[1, 2, 3], &[4])))).await;
    let shown = life.shown(&rollout).await;
    assert_eq!((state(&shown), walks(&shown)), (v1::RolloutState::Finalised, vec!["a c".to_owned()]));
    assert!(shown.summary.unwrap().incomplete);
}

#[tokio::test]
async fn time_while_the_service_was_down_expires_nothing() {
    let log = Arc::new(MemoryLog::keeping());
    let mut life = Life::on(TestService::start_on(log.clone()).await).await;
    let (open, sealed) = (about("run", "open"), about("run", "sealed"));
    for rollout in [&open, &sealed] {
        life.accepts(rollout, Event::Call(call("a", "main", 1, &[1], &[2]))).await;
    }
    life.accepts(&sealed, finish_with(expecting(2), 1.0)).await;
    life.advance(9 * MINUTE);
    life.settle(&open).await;
    let Life { service, worker, .. } = life;
    drop(worker);
    service.running.stop().await;

    let mut life = Life::on(TestService::start_on(log).await).await;
    assert_eq!(whole_seconds(life.summary(&open).await.next_deadline), Some(6 * 3600));
    assert_eq!(whole_seconds(life.summary(&sealed).await.next_deadline), Some(600));
    life.advance(10 * MINUTE);
    assert_eq!(life.until_ended(&sealed).await.reason, "missing_call");
    life.advance(6 * HOUR);
    assert_eq!(life.until_ended(&open).await.reason, "idle_timeout");
}
