//! `Watch`: what changes is told as it is now, merged for slow readers, and in the end everything has been told as it stands.

use std::collections::BTreeMap;
use std::time::Duration;

use futures_util::FutureExt;
use hedgerow::proto::v1::report_request::Event;
use hedgerow::proto::v1::watch_response::Change;
use hedgerow::proto::v1::{self, DiscardDisposition, RolloutState};
use tonic::Streaming;

use crate::inspect::{Window, of_run, rollouts_with, the_run};
use crate::life::{Life, discard};
use crate::queue_credit::Dice;
use crate::queue_taker::{Taker, finish, reason};
use crate::service::{TestService, about, call, reward, seal, subscription};

/// Who watches, and all that was told last of each thing.
struct Watcher {
    changes: Streaming<v1::WatchResponse>,
    window: Window,
    told: u64,
    rollouts: BTreeMap<String, v1::RolloutSummary>,
    calls: BTreeMap<String, v1::CallSummary>,
    groups: BTreeMap<String, v1::GroupSummary>,
    consumer_groups: BTreeMap<String, v1::ConsumerGroupSummary>,
    run: Option<v1::RunSummary>,
}

fn of(run: &str) -> v1::WatchRequest {
    v1::WatchRequest { run_id: run.to_owned(), ..v1::WatchRequest::default() }
}

impl Watcher {
    async fn begin(window: &mut Window, request: v1::WatchRequest) -> Self {
        let changes = window.watch(request).await.unwrap().into_inner();
        Self {
            changes,
            window: window.clone(),
            told: 0,
            rollouts: BTreeMap::new(),
            calls: BTreeMap::new(),
            groups: BTreeMap::new(),
            consumer_groups: BTreeMap::new(),
            run: None,
        }
    }

    /// Takes what is told until that is so, while time goes by. Each turn without news is a round trip, in which every task has
    /// its turn.
    async fn until(&mut self, service: &TestService, is_so: impl Fn(&Self) -> bool) {
        while !is_so(self) {
            let next = self.changes.message().now_or_never();
            if let Some(next) = next {
                self.take(next);
                continue;
            }
            service.clock.advance(Duration::from_millis(100));
            let request = v1::GetRolloutRequest { run_id: "r".into(), rollout_id: "none".into(), ..Default::default() };
            self.window.get_rollout(request).await.unwrap_err();
        }
    }

    fn take(&mut self, next: Result<Option<v1::WatchResponse>, tonic::Status>) {
        self.told += 1;
        match next.unwrap().expect("the watch goes on").change.unwrap() {
            Change::Rollout(rollout) => {
                self.rollouts.insert(rollout.rollout.as_ref().unwrap().rollout_id.clone(), rollout);
            }
            Change::Call(change) => {
                let call = change.call.unwrap();
                self.calls.insert(call.call_id.clone(), call);
            }
            Change::Group(group) => {
                self.groups.insert(group.figures.as_ref().unwrap().group_id.clone(), group);
            }
            Change::ConsumerGroup(group) => {
                self.consumer_groups.insert(group.consumer_group.clone(), group);
            }
            Change::Run(run) => self.run = Some(run),
        }
    }

    fn state(&self, rollout: &str) -> Option<RolloutState> {
        self.rollouts.get(rollout).map(v1::RolloutSummary::state)
    }
}

#[tokio::test]
async fn a_watch_of_a_run_begins_with_it_and_tells_what_changes() {
    let mut life = Life::start().await;
    let mut window = life.service.inspect().await;
    life.accepts(&about("run", "before"), Event::Open(v1::Open::default())).await;
    let mut watcher = Watcher::begin(&mut window, of("run")).await;
    watcher.until(&life.service, |watcher| watcher.run.is_some()).await;
    assert!(watcher.rollouts.is_empty(), "rollouts are told as they change");
    let member = v1::RolloutRef { group_id: "g".to_owned(), ..about("run", "x") };
    life.accepts(&member, Event::Call(call("a", "main", 1, &[1], &[2]))).await;
    life.accepts(&about("elsewhere", "y"), Event::Call(call("a", "main", 1, &[1], &[2]))).await;
    watcher.until(&life.service, |watcher| watcher.state("x") == Some(RolloutState::Open)).await;
    watcher.until(&life.service, |watcher| watcher.groups.contains_key("g")).await;
    let _taker = Taker::join(&life.service, subscription("run", "trainers")).await;
    watcher.until(&life.service, |watcher| watcher.consumer_groups.contains_key("trainers")).await;
    life.accepts(&member, finish(1.0)).await;
    watcher.until(&life.service, |watcher| watcher.state("x") == Some(RolloutState::Finalised)).await;
    let whole = |group: &v1::GroupSummary| group.figures.as_ref().unwrap().release() == v1::GroupRelease::Whole;
    watcher.until(&life.service, |watcher| whole(&watcher.groups["g"])).await;
    watcher.until(&life.service, |watcher| watcher.consumer_groups["trainers"].leased_units == 1).await;
    watcher.until(&life.service, |watcher| watcher.run.as_ref().unwrap().finalised_rollouts == 1).await;
    assert_eq!(watcher.run, Some(the_run(&mut window, "run").await));
    assert_eq!(watcher.rollouts.keys().collect::<Vec<_>>(), ["x"], "of this run only, and only what has changed");
    assert!(watcher.calls.is_empty(), "calls are told to who watches one rollout");
}

#[tokio::test]
async fn a_watch_of_a_rollout_tells_its_calls_and_what_changes_of_them() {
    let mut life = Life::start().await;
    let mut window = life.service.inspect().await;
    let rollout = about("run", "x");
    let request = v1::WatchRequest { rollout_id: "x".to_owned(), ..of("run") };
    let mut watcher = Watcher::begin(&mut window, request).await;
    life.accepts(&rollout, Event::Call(call("b", "main", 2, &[1, 2, 3], &[4]))).await;
    life.accepts(&about("run", "other"), Event::Call(call("o", "main", 1, &[1], &[2]))).await;
    watcher.until(&life.service, |watcher| watcher.calls.contains_key("b")).await;
    assert_eq!(watcher.calls["b"].verdict.as_ref().unwrap().kind(), v1::LinkKind::Root);
    life.accepts(&rollout, Event::Call(call("a", "main", 1, &[1, 2], &[3]))).await;
    let kind = |watcher: &Watcher| watcher.calls["b"].verdict.as_ref().map(v1::Verdict::kind);
    watcher.until(&life.service, |watcher| kind(watcher) == Some(v1::LinkKind::Child)).await;
    life.accepts(&rollout, Event::Seal(seal(&[("main", &["a"])]))).await;
    watcher.until(&life.service, |watcher| !watcher.calls["b"].kept).await;
    life.accepts(&rollout, Event::Reward(reward(1.0))).await;
    let fates = |watcher: &Watcher| (watcher.calls["a"].fate(), watcher.calls["b"].fate());
    let expected = (v1::CallFate::Trained, v1::CallFate::NotKept);
    watcher.until(&life.service, |watcher| fates(watcher) == expected).await;
    assert_eq!(watcher.rollouts.keys().collect::<Vec<_>>(), ["x"]);
    assert_eq!(watcher.calls.into_values().collect::<Vec<_>>(), life.shown(&rollout).await.calls);
    life.accepts(&about("run", "other"), Event::Reward(reward(1.0))).await;
}

#[tokio::test]
async fn a_large_rollout_with_lists_that_goes_on_is_told_as_it_stands_in_the_end() {
    const CALLS: u32 = 700;
    let mut life = Life::start().await;
    let mut window = life.service.inspect().await;
    let rollout = about("run", "x");
    let id = |number: u32| format!("c{number:04}");
    let one = |number: u32| Event::Call(call(&id(number), "main", u64::from(number), &[1, number], &[2]));
    for number in 0..CALLS {
        life.accepts(&rollout, one(number)).await;
    }
    let (kept, late) = (id(CALLS - 1), id(2 * CALLS));
    life.accepts(&rollout, Event::Seal(seal(&[("main", &[&kept, &late])]))).await;
    let request = v1::WatchRequest { rollout_id: "x".to_owned(), ..of("run") };
    let mut watcher = Watcher::begin(&mut window, request).await;
    // It changes again and again while its calls are told.
    for number in CALLS..CALLS + 8 {
        let told = watcher.told;
        watcher.until(&life.service, |watcher| watcher.told > told).await;
        life.accepts(&rollout, one(number)).await;
    }
    let expected = life.shown(&rollout).await.calls;
    assert_eq!(expected.iter().filter(|call| call.kept).count(), 1);
    watcher.until(&life.service, |watcher| watcher.calls.values().eq(&expected)).await;
}

#[tokio::test]
async fn another_attempt_is_told_anew_and_the_end_is_told() {
    let mut life = Life::start().await;
    let mut window = life.service.inspect().await;
    let request = v1::WatchRequest { rollout_id: "x".to_owned(), ..of("run") };
    let mut watcher = Watcher::begin(&mut window, request).await;
    life.accepts(&about("run", "x"), Event::Call(call("a", "main", 1, &[1], &[2]))).await;
    watcher.until(&life.service, |watcher| watcher.calls.contains_key("a")).await;
    watcher.calls.clear();
    let second = v1::RolloutRef { attempt: 1, ..about("run", "x") };
    life.accepts(&second, Event::Call(call("a", "main", 1, &[1], &[2]))).await;
    watcher.until(&life.service, |watcher| watcher.calls.contains_key("a")).await;
    assert_eq!(watcher.rollouts["x"].rollout.as_ref().unwrap().attempt, 1);
    life.accepts(&second, discard("test", DiscardDisposition::Final)).await;
    watcher.until(&life.service, |watcher| watcher.state("x") == Some(RolloutState::Ended)).await;
    assert_eq!(watcher.rollouts["x"].ended.as_ref().unwrap().reason, "test");
}

#[tokio::test]
async fn a_watch_of_a_group_tells_of_its_rollouts_only() {
    let mut life = Life::start().await;
    let mut window = life.service.inspect().await;
    let of_group = |group: &str, rollout: &str| v1::RolloutRef { group_id: group.into(), ..about("run", rollout) };
    life.accepts(&of_group("g", "g0"), Event::Open(v1::Open::default())).await;
    life.accepts(&of_group("h", "h0"), Event::Open(v1::Open::default())).await;
    let request = v1::WatchRequest { group_id: "g".to_owned(), ..of("run") };
    let mut watcher = Watcher::begin(&mut window, request).await;
    watcher.until(&life.service, |watcher| watcher.state("g0").is_some() && watcher.groups.contains_key("g")).await;
    life.accepts(&of_group("h", "h1"), Event::Open(v1::Open::default())).await;
    life.accepts(&of_group("g", "g1"), Event::Open(v1::Open::default())).await;
    watcher.until(&life.service, |watcher| watcher.groups["g"].open_rollouts == 2).await;
    watcher.until(&life.service, |watcher| watcher.state("g1").is_some()).await;
    assert_eq!(watcher.rollouts.len(), 2, "{:?}", watcher.rollouts.keys());
    assert!(watcher.run.is_none() && watcher.groups.len() == 1);
}

/// More calls than are told at one look, from a reader that does not read until all have come.
#[tokio::test]
async fn a_slow_reader_comes_to_the_state_in_the_end() {
    let service = TestService::start().await;
    let (mut worker, mut window) = (service.worker().await, service.inspect().await);
    let rollout = about("run", "x");
    worker.report(&rollout, Event::Open(v1::Open::default())).await;
    let request = v1::WatchRequest { rollout_id: "x".to_owned(), ..of("run") };
    let mut one = Watcher::begin(&mut window, request).await;
    let mut all = Watcher::begin(&mut window, of("run")).await;
    let mut text = vec![1];
    let mut last = 0;
    for number in 0..1500_u32 {
        let generation = [number % 7];
        let event = Event::Call(call(&format!("c{number:04}"), "main", number.into(), &text, &generation));
        text.extend(generation);
        last = worker.send(&rollout, event).await;
        if number % 100 == 0 {
            worker.answer(last).await;
            service.clock.advance(Duration::from_millis(100));
        }
    }
    worker.answer(last).await;
    for other in 0..5000 {
        let reference = about("run", &format!("o{other:04}"));
        let sent = worker.send(&reference, Event::Open(v1::Open::default())).await;
        if other % 50 == 0 {
            worker.answer(sent).await;
        }
        last = sent;
    }
    worker.answer(last).await;
    worker.report(&rollout, finish(1.0)).await;
    one.until(&service, |one| one.calls.len() == 1500 && one.state("x") == Some(RolloutState::Finalised)).await;
    let trained = |one: &Watcher| one.calls.values().all(|call| call.fate() == v1::CallFate::Trained);
    one.until(&service, trained).await;
    let request =
        v1::GetRolloutRequest { run_id: "run".into(), rollout_id: "x".into(), ..v1::GetRolloutRequest::default() };
    let shown = window.get_rollout(request).await.unwrap().into_inner();
    assert!(one.calls.into_values().eq(shown.calls), "the calls are as they are shown");
    assert!(one.told < 3 * 1500 + 500, "each call is told a few times, not at each look: {}", one.told);
    all.until(&service, |all| all.rollouts.len() == 5001 && all.state("x") == Some(RolloutState::Finalised)).await;
    let listed = rollouts_with(&mut window, of_run("run"), async || ()).await;
    let timeless = |summary: &v1::RolloutSummary| v1::RolloutSummary { next_deadline: None, ..summary.clone() };
    assert!(all.rollouts.values().map(timeless).eq(listed.iter().map(timeless)));
}

/// Whatever is reported, who watches has been told in the end what stands.
#[tokio::test]
async fn in_the_end_everything_has_been_told_as_it_stands() {
    for seed in 0..10 {
        let service = TestService::start().await;
        let (mut worker, mut window) = (service.worker().await, service.inspect().await);
        service.create_run("run", v1::RunSettings::default()).await;
        let mut watcher = Watcher::begin(&mut window, of("run")).await;
        let mut dice = Dice::new(seed);
        for step in 0..120 {
            let reference =
                v1::RolloutRef { group_id: format!("g{}", step % 2), ..about("run", &format!("r{}", dice.below(6))) };
            let event = match dice.below(12) {
                0 => finish(1.0),
                1 => Event::Reward(reward(1.0)),
                2 => discard("test", DiscardDisposition::Final),
                _ => Event::Call(call(&format!("c{step}"), "main", step, &[1], &[2])),
            };
            worker.report(&reference, event).await;
            if dice.below(5) == 0 {
                let so_far = watcher.told;
                service.clock.advance(Duration::from_millis(100));
                watcher.until(&service, |watcher| watcher.told > so_far).await;
            }
        }
        let listed = rollouts_with(&mut window, of_run("run"), async || ()).await;
        let run = the_run(&mut window, "run").await;
        let request = v1::ListGroupsRequest { run_id: "run".to_owned(), ..v1::ListGroupsRequest::default() };
        let groups = window.list_groups(request).await.unwrap().into_inner().groups;
        let timeless = |summary: &v1::RolloutSummary| v1::RolloutSummary {
            next_deadline: None,
            last_event_time: None,
            refused_requests: 0,
            ..summary.clone()
        };
        let run = |summary: &v1::RunSummary| v1::RunSummary { refused_requests: 0, ..summary.clone() } == run_of(&run);
        watcher
            .until(&service, |watcher| {
                watcher.rollouts.values().map(timeless).eq(listed.iter().map(timeless))
                    && watcher.groups.values().eq(&groups)
                    && watcher.run.as_ref().is_some_and(&run)
            })
            .await;
    }
}

fn run_of(run: &v1::RunSummary) -> v1::RunSummary {
    v1::RunSummary { refused_requests: 0, ..run.clone() }
}

#[tokio::test]
async fn a_watch_ends_with_its_run_and_needs_one() {
    let life = Life::start().await;
    let mut window = life.service.inspect().await;
    let status = window.watch(of("none")).await.unwrap_err();
    assert_eq!((status.code(), reason(&status).as_str()), (tonic::Code::NotFound, "run_not_found"));
    let mut watcher = Watcher::begin(&mut window, of("run")).await;
    watcher.until(&life.service, |watcher| watcher.run.is_some()).await;
    let delete = v1::DeleteRunRequest { run_id: "run".to_owned(), force: true };
    life.service.admin().await.delete_run(delete).await.unwrap();
    life.service.clock.advance(Duration::from_millis(100));
    let end = loop {
        match watcher.changes.message().await {
            Ok(message) => assert!(message.is_some(), "the stream ends with a reason"),
            Err(status) => break status,
        }
    };
    assert_eq!((end.code(), reason(&end).as_str()), (tonic::Code::NotFound, "run_not_found"));
}

#[tokio::test]
async fn watchers_are_bounded_and_those_that_go_make_room() {
    let life = Life::start().await;
    let mut window = life.service.inspect().await;
    let mut channels = Vec::new();
    let mut watchers = Vec::new();
    for _ in 0..hedgerow::limits::RUN_WATCHERS_MAX {
        if channels.len() * 16 <= watchers.len() {
            channels.push(life.service.inspect().await);
        }
        watchers.push(Watcher::begin(channels.last_mut().unwrap(), of("run")).await);
    }
    let status = window.watch(of("run")).await.unwrap_err();
    assert_eq!((status.code(), reason(&status).as_str()), (tonic::Code::ResourceExhausted, "service_full"));
    drop(watchers.pop());
    while window.watch(of("run")).await.is_err() {
        tokio::task::yield_now().await;
    }
}
