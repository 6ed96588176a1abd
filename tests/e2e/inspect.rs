//! Looking inside: lists of runs, rollouts, groups and consumers, in pages that stand still while things change.

use std::collections::BTreeSet;
use std::time::Duration;

use hedgerow::proto::v1::inspect_service_client::InspectServiceClient;
use hedgerow::proto::v1::report_request::Event;
use hedgerow::proto::v1::{self, DiscardDisposition, RolloutState, WaitingFor};
use tonic::transport::Channel;

use crate::life::{Life, discard, expecting, seconds};
use crate::queue_taker::{Taker, finish, reason, row, rows};
use crate::service::{TestService, about, call, reward, subscription};

pub(crate) type Window = InspectServiceClient<Channel>;

/// All rollouts that a list shows, page by page, with what is done between two pages.
pub(crate) async fn rollouts_with(
    window: &mut Window,
    mut request: v1::ListRolloutsRequest,
    mut between: impl AsyncFnMut(),
) -> Vec<v1::RolloutSummary> {
    let mut all = Vec::new();
    loop {
        let page = window.list_rollouts(request.clone()).await.unwrap().into_inner();
        let most = if request.page_size == 0 { 100 } else { request.page_size as usize };
        assert!(page.rollouts.len() <= most, "{} of {most}", page.rollouts.len());
        all.extend(page.rollouts);
        if page.next_page_token.is_empty() {
            return all;
        }
        request.page_token = page.next_page_token;
        between().await;
    }
}

pub(crate) async fn rollouts(window: &mut Window, request: v1::ListRolloutsRequest) -> Vec<String> {
    ids(&rollouts_with(window, request, async || ()).await)
}

pub(crate) fn of_run(run: &str) -> v1::ListRolloutsRequest {
    v1::ListRolloutsRequest { run_id: run.to_owned(), ..v1::ListRolloutsRequest::default() }
}

/// A call whose prompt is the first ids of a call that has not come.
fn delta_on(base: &str, length_tokens: u64, id: &str, agent: &str, sequence: u64) -> v1::Call {
    let base = v1::Base { call_id: base.to_owned(), length_tokens, digest: vec![7; 16].into() };
    let delta = v1::prompt::Prompt::Delta(v1::Delta { base: Some(base), ..v1::Delta::default() });
    v1::Call { prompt: Some(v1::Prompt { prompt: Some(delta) }), ..call(id, agent, sequence, &[], &[9]) }
}

fn ids(summaries: &[v1::RolloutSummary]) -> Vec<String> {
    summaries.iter().map(|summary| summary.rollout.as_ref().unwrap().rollout_id.clone()).collect()
}

pub(crate) async fn the_run(window: &mut Window, run: &str) -> v1::RunSummary {
    let runs = window.list_runs(v1::ListRunsRequest::default()).await.unwrap().into_inner().runs;
    runs.into_iter().find(|summary| summary.run_id == run).expect("the run is listed")
}

#[tokio::test]
async fn pages_show_each_rollout_once_whatever_comes_and_goes_between_them() {
    let mut life = Life::start().await;
    let mut window = life.service.inspect().await;
    let open = v1::Open::default();
    for number in 0..40 {
        life.accepts(&about("run", &format!("r{number:02}")), Event::Open(open.clone())).await;
    }
    life.accepts(&about("elsewhere", "r07"), Event::Open(open.clone())).await;
    let request = v1::ListRolloutsRequest { page_size: 7, ..of_run("run") };
    let mut turn = 0;
    let listed = rollouts_with(&mut window, request, async || {
        // Some come before, some behind the page; some end, which leaves a tombstone, and change.
        life.accepts(&about("run", &format!("r{turn:02}/before")), Event::Open(open.clone())).await;
        life.accepts(&about("run", &format!("s{turn:02}")), Event::Open(open.clone())).await;
        let end = discard("test", DiscardDisposition::Final);
        life.accepts(&about("run", &format!("r{:02}", 39 - turn)), end).await;
        life.accepts(&about("run", &format!("r{turn:02}")), Event::Reward(reward(1.0))).await;
        turn += 1;
    })
    .await;
    let listed = ids(&listed);
    assert!(listed.is_sorted(), "{listed:?}");
    assert_eq!(listed.iter().collect::<BTreeSet<_>>().len(), listed.len(), "none twice: {listed:?}");
    let there_all_the_time = (0..40).map(|number| format!("r{number:02}"));
    assert!(there_all_the_time.into_iter().all(|rollout| listed.contains(&rollout)), "{listed:?}");
    assert!(turn >= 5, "there were pages");
}

#[tokio::test]
async fn page_sizes_and_tokens() {
    let mut life = Life::start().await;
    let mut window = life.service.inspect().await;
    for number in 0..103 {
        life.accepts(&about("run", &format!("{number:03}")), Event::Open(v1::Open::default())).await;
    }
    for (page_size, most) in [(0, 100), (3, 3), (1000, 103), (u32::MAX, 103)] {
        let request = v1::ListRolloutsRequest { page_size, ..of_run("run") };
        let page = window.list_rollouts(request).await.unwrap().into_inner();
        assert_eq!((page.rollouts.len(), page.next_page_token.is_empty()), (most, most == 103), "{page_size}");
    }
    let wrong = ["nonsense", "rollouts/other/003", "groups/run/003", "rollouts/run/%0"];
    for page_token in wrong.map(str::to_owned) {
        let status = window.list_rollouts(v1::ListRolloutsRequest { page_token, ..of_run("run") }).await.unwrap_err();
        assert_eq!((status.code(), reason(&status).as_str()), (tonic::Code::InvalidArgument, "invalid_value"));
        assert!(status.message().contains("page_token"), "{status:?}");
    }
    let status = window.list_runs(v1::ListRunsRequest { page_token: "x".into(), page_size: 1 }).await.unwrap_err();
    assert_eq!(status.code(), tonic::Code::InvalidArgument);
    let none = "none".to_owned();
    for status in [
        window.list_rollouts(of_run("none")).await.unwrap_err(),
        window.list_groups(v1::ListGroupsRequest { run_id: none.clone(), ..Default::default() }).await.unwrap_err(),
        window.list_consumers(v1::ListConsumersRequest { run_id: none, ..Default::default() }).await.unwrap_err(),
    ] {
        assert_eq!((status.code(), reason(&status).as_str()), (tonic::Code::NotFound, "run_not_found"));
    }
}

/// One rollout in each state, some with tags, drift, missing calls, a group.
async fn many_kinds(life: &mut Life) {
    let one = |id: &str| Event::Call(call(id, "main", 1, &[1, 2], &[3]));
    let tagged = v1::Open { tags: [("task".to_owned(), "sum".to_owned())].into(), ..v1::Open::default() };
    life.accepts(&about("run", "open"), Event::Open(tagged)).await;
    let grouped = v1::RolloutRef { group_id: "g".to_owned(), ..about("run", "sealed") };
    life.accepts(&grouped, Event::Seal(expecting(2))).await;
    life.accepts(&about("run", "rewarded"), Event::Reward(reward(1.0))).await;
    life.accepts(&about("run", "incomplete"), Event::Seal(expecting(2))).await;
    life.accepts(&about("run", "incomplete"), Event::Reward(reward(1.0))).await;
    life.accepts(&about("run", "finalised"), one("a")).await;
    life.accepts(&about("run", "finalised"), finish(1.0)).await;
    life.accepts(&about("run", "ended"), discard("test", DiscardDisposition::Final)).await;
    life.accepts(&about("run", "drift"), one("a")).await;
    life.accepts(&about("run", "drift"), Event::Call(call("b", "main", 2, &[1, 2, 4], &[5]))).await;
    life.accepts(&about("run", "waiting"), Event::Call(delta_on("never", 3, "b", "main", 2))).await;
}

#[tokio::test]
async fn filters_show_what_they_say() {
    let mut life = Life::start().await;
    let mut window = life.service.inspect().await;
    many_kinds(&mut life).await;
    life.service.clock.advance(Duration::from_secs(60));
    life.accepts(&about("run", "rewarded"), Event::Heartbeat(v1::Heartbeat {})).await;
    let in_state = |states: &[RolloutState]| v1::ListRolloutsRequest {
        states: states.iter().map(|state| (*state).into()).collect(),
        ..of_run("run")
    };
    let mut all = ["open", "sealed", "rewarded", "incomplete", "finalised", "ended", "drift", "waiting"];
    all.sort_unstable();
    assert_eq!(rollouts(&mut window, of_run("run")).await, all);
    assert_eq!(rollouts(&mut window, in_state(&[RolloutState::Unspecified, RolloutState::Ended])).await, all);
    let by_state = [
        (RolloutState::Open, &["drift", "open", "waiting"][..]),
        (RolloutState::Sealed, &["sealed"]),
        (RolloutState::Rewarded, &["rewarded"]),
        (RolloutState::Incomplete, &["incomplete"]),
        (RolloutState::Finalised, &["finalised"]),
        (RolloutState::Ended, &["ended"]),
    ];
    for (state, expected) in by_state {
        let request = in_state(&[state]);
        let listed = rollouts_with(&mut window, request, async || ()).await;
        assert_eq!(ids(&listed), expected, "{state:?}");
        assert!(listed.iter().all(|summary| summary.state() == state));
    }
    let two = in_state(&[RolloutState::Sealed, RolloutState::Incomplete]);
    assert_eq!(rollouts(&mut window, two).await, ["incomplete", "sealed"]);
    let tags =
        |value: &str| v1::ListRolloutsRequest { tags: [("task".to_owned(), value.to_owned())].into(), ..of_run("run") };
    assert_eq!(rollouts(&mut window, tags("sum")).await, ["open"]);
    assert!(rollouts(&mut window, tags("product")).await.is_empty());
    let group = |group: &str| v1::ListRolloutsRequest { group_id: group.to_owned(), ..of_run("run") };
    assert_eq!(rollouts(&mut window, group("g")).await, ["sealed"]);
    assert!(rollouts(&mut window, group("h")).await.is_empty());
    let idle = v1::ListRolloutsRequest { idle_for: seconds(60), ..of_run("run") };
    assert_eq!(rollouts(&mut window, idle).await, ["drift", "finalised", "incomplete", "open", "sealed", "waiting"]);
    let drift = v1::ListRolloutsRequest { with_drift: true, ..of_run("run") };
    assert_eq!(rollouts(&mut window, drift).await, ["drift"]);
    let missing = v1::ListRolloutsRequest { with_missing_calls: true, ..of_run("run") };
    assert_eq!(rollouts(&mut window, missing.clone()).await, ["incomplete", "sealed", "waiting"]);
    let both = v1::ListRolloutsRequest { group_id: "g".to_owned(), ..missing };
    assert_eq!(rollouts(&mut window, both).await, ["sealed"]);
    let wrong = v1::ListRolloutsRequest { states: vec![99], ..of_run("run") };
    assert!(window.list_rollouts(wrong).await.unwrap_err().message().contains("states[0]"));
}

#[tokio::test]
async fn a_list_shows_what_one_look_shows() {
    let mut life = Life::start().await;
    let mut window = life.service.inspect().await;
    many_kinds(&mut life).await;
    for listed in rollouts_with(&mut window, of_run("run"), async || ()).await {
        let reference = listed.rollout.clone().unwrap();
        assert_eq!(life.summary(&reference).await, listed);
    }
}

#[tokio::test]
async fn groups_say_what_they_wait_for() {
    let mut life = Life::start().await;
    let mut window = life.service.inspect().await;
    let member = |group: &str, rollout: &str| v1::RolloutRef { group_id: group.to_owned(), ..about("run", rollout) };
    let sized = |size| Event::Open(v1::Open { group_size: Some(size), ..v1::Open::default() });
    life.service.clock.advance(Duration::from_secs(5));
    life.accepts(&member("a", "a0"), sized(5)).await;
    life.accepts(&member("a", "a1"), Event::Call(call("c", "main", 1, &[1], &[2]))).await;
    life.accepts(&member("a", "a1"), finish(1.0)).await;
    life.accepts(&member("a", "a2"), discard("lost", DiscardDisposition::Final)).await;
    life.accepts(&member("a", "a3"), discard("again", DiscardDisposition::WillRetry)).await;
    life.accepts(&member("b", "b0"), sized(1)).await;
    life.accepts(&member("b", "b0"), finish(1.0)).await;
    let request = v1::ListGroupsRequest { run_id: "run".to_owned(), ..v1::ListGroupsRequest::default() };
    let groups = window.list_groups(request.clone()).await.unwrap().into_inner().groups;
    let [a, b] = &groups[..] else { panic!("{groups:?}") };
    let figures = a.figures.as_ref().unwrap();
    assert_eq!((figures.group_id.as_str(), figures.group_size, figures.counted_rollouts), ("a", Some(5), 1));
    assert_eq!(figures.release(), v1::GroupRelease::Unspecified);
    let absence = |absence: &v1::GroupAbsence| (absence.rollout_id.clone(), absence.attempt, absence.reason.clone());
    assert_eq!(figures.absences.iter().map(absence).collect::<Vec<_>>(), [("a2".into(), 0, "lost".into())]);
    assert_eq!(a.out_rollouts, 1);
    assert_eq!((&a.open_rollout_ids[..], a.open_rollouts), (&["a0".to_owned()][..], 1));
    assert_eq!((&a.finalised_rollout_ids[..], a.finalised_rollouts), (&["a1".to_owned()][..], 1));
    assert_eq!((a.open_places, a.drop_reason.as_str()), (2, ""), "one nobody took, one waits for its next attempt");
    assert_eq!(a.open_time.unwrap().seconds, 5);
    let figures = b.figures.as_ref().unwrap();
    assert_eq!((figures.release(), figures.degenerate, b.open_places), (v1::GroupRelease::Whole, true, 0));
    let open = v1::ListGroupsRequest { open_only: true, ..request.clone() };
    let open = window.list_groups(open).await.unwrap().into_inner().groups;
    assert_eq!(open, groups[..1]);
    assert_eq!(the_run(&mut window, "run").await.open_groups, 1);
    let first = v1::ListGroupsRequest { page_size: 1, ..request };
    let page = window.list_groups(first.clone()).await.unwrap().into_inner();
    let second = v1::ListGroupsRequest { page_token: page.next_page_token, ..first };
    assert_eq!(page.groups, groups[..1]);
    assert_eq!(window.list_groups(second).await.unwrap().into_inner().groups, groups[1..]);
}

#[tokio::test]
async fn consumer_groups_say_their_lag_and_what_they_wait_for() {
    let service = TestService::start().await;
    let (mut worker, mut window) = (service.worker().await, service.inspect().await);
    let named =
        v1::Subscription { consumer: "rank-0".to_owned(), credit_tokens: 25, ..subscription("run", "trainers") };
    let mut taker = Taker::join(&service, named).await;
    let request = v1::ListConsumersRequest { run_id: "run".to_owned(), ..Default::default() };
    let list = async |window: &mut Window| {
        let groups = window.list_consumers(request.clone()).await.unwrap().into_inner().consumer_groups;
        groups.into_iter().next().expect("there is a consumer group")
    };
    let group = list(&mut window).await;
    assert_eq!(group.waiting_for().collect::<Vec<_>>(), [WaitingFor::NoOpenRollouts]);
    rows(&mut worker, "run", 0, 3, 10).await;
    let units = taker.take_units(2).await;
    service.clock.advance(Duration::from_secs(7));
    let group = list(&mut window).await;
    assert_eq!((group.consumer_group.as_str(), group.run_id.as_str()), ("trainers", "run"));
    assert_eq!((group.queued_units, group.queued_tokens), (1, 10));
    assert_eq!((group.leased_units, group.leased_tokens), (2, 20));
    assert_eq!(group.oldest_age, seconds(7));
    assert_eq!(group.waiting_for().collect::<Vec<_>>(), [WaitingFor::Credit]);
    assert_eq!(group.settings.unwrap().unit(), v1::Unit::Row);
    let [consumer] = &group.consumers[..] else { panic!("{:?}", group.consumers) };
    assert_eq!((consumer.consumer.as_str(), consumer.connected, consumer.credit_tokens), ("rank-0", true, 25));
    assert_eq!((consumer.leased_units, consumer.leased_tokens), (2, 20));
    assert_eq!(consumer.last_request_time.unwrap().seconds, 0, "it said nothing since it joined");
    taker.ack(&[&units[0].unit_id]).await;
    let group = list(&mut window).await;
    assert_eq!(group.consumers[0].last_request_time.unwrap().seconds, 7);
    let rows = group.rows.unwrap();
    assert_eq!((rows.made, rows.acknowledged, rows.leased, rows.waiting), (3, 1, 2, 0));
    drop(taker);
    let mut group = list(&mut window).await;
    while !group.consumers.is_empty() {
        tokio::task::yield_now().await;
        group = list(&mut window).await;
    }
    assert_eq!(group.waiting_for().collect::<Vec<_>>(), [WaitingFor::Consumers]);
}

#[tokio::test]
async fn undeliverable_units_are_listed_by_id() {
    let service = TestService::start().await;
    let settings = v1::RunSettings { max_deliveries: Some(1), ..v1::RunSettings::default() };
    service.create_run("run", settings).await;
    let (mut worker, mut window) = (service.worker().await, service.inspect().await);
    let mut taker = Taker::join(&service, subscription("run", "trainers")).await;
    let unit = row(&mut worker, "run", "x", 4).await;
    taker.unit().await;
    taker.nack(&[&unit], None).await;
    let notice = taker.notice().await;
    assert_eq!((notice.kind(), notice.rollout_id.as_str()), (v1::UnitNoticeKind::Undeliverable, "x"));
    let request = v1::ListConsumersRequest { run_id: "run".to_owned(), ..Default::default() };
    let groups = window.list_consumers(request).await.unwrap().into_inner().consumer_groups;
    assert_eq!((&groups[0].undeliverable_unit_ids, groups[0].undeliverable_units), (&vec![unit], 1));
    assert_eq!(groups[0].rows.as_ref().unwrap().dropped, [("undeliverable".to_owned(), 1)].into());
}

#[tokio::test]
async fn consumer_groups_and_runs_come_in_pages_that_miss_nothing() {
    const GROUPS: usize = 7;
    let service = TestService::start().await;
    let mut window = service.inspect().await;
    let mut takers = Vec::new();
    for number in 0..GROUPS {
        takers.push(Taker::join(&service, subscription("run", &format!("trainers-{number}"))).await);
        service.create_run(&format!("run-{number}"), v1::RunSettings::default()).await;
    }
    for page_size in [1, 3, 7, 8, 0] {
        let mut request = v1::ListConsumersRequest { run_id: "run".to_owned(), page_size, ..Default::default() };
        let mut names = Vec::new();
        loop {
            let page = window.list_consumers(request.clone()).await.unwrap().into_inner();
            let most = if page_size == 0 { 100 } else { page_size as usize };
            assert!(page.consumer_groups.len() <= most);
            names.extend(page.consumer_groups.into_iter().map(|group| group.consumer_group));
            request.page_token = page.next_page_token;
            if request.page_token.is_empty() {
                break;
            }
        }
        assert_eq!(names, (0..GROUPS).map(|number| format!("trainers-{number}")).collect::<Vec<_>>(), "{page_size}");
        let (mut request, mut ids) = (v1::ListRunsRequest { page_size, ..Default::default() }, Vec::new());
        loop {
            let page = window.list_runs(request.clone()).await.unwrap().into_inner();
            assert_eq!(
                page.service.is_some(),
                request.page_token.is_empty(),
                "the first page has the service's ledger"
            );
            ids.extend(page.runs.into_iter().map(|run| run.run_id));
            request.page_token = page.next_page_token;
            if request.page_token.is_empty() {
                break;
            }
        }
        let expected = std::iter::once("run".to_owned()).chain((0..GROUPS).map(|number| format!("run-{number}")));
        assert_eq!(ids, expected.collect::<Vec<_>>(), "{page_size}");
    }
    let page_token = "runs/run".to_owned();
    let wrong = v1::ListConsumersRequest { run_id: "run".to_owned(), page_token, ..Default::default() };
    assert_eq!(window.list_consumers(wrong).await.unwrap_err().code(), tonic::Code::InvalidArgument);
}

#[tokio::test]
async fn members_of_each_kind_are_counted_beyond_those_that_are_listed() {
    const MEMBERS: u32 = 260;
    let mut life = Life::start().await;
    let mut window = life.service.inspect().await;
    for number in 0..MEMBERS {
        for kind in ["open", "out"] {
            let of_group = about("run", &format!("{kind}-{number}"));
            let member = v1::RolloutRef { group_id: "g".to_owned(), ..of_group };
            life.accepts(&member, Event::Open(v1::Open::default())).await;
            if kind == "out" {
                life.accepts(&member, discard("lost", DiscardDisposition::Final)).await;
            }
        }
    }
    let request = v1::ListGroupsRequest { run_id: "run".to_owned(), ..v1::ListGroupsRequest::default() };
    let groups = window.list_groups(request).await.unwrap().into_inner().groups;
    let [group] = &groups[..] else { panic!("{groups:?}") };
    assert_eq!((group.open_rollout_ids.len(), group.open_rollouts), (256, MEMBERS));
    assert_eq!((group.figures.as_ref().unwrap().absences.len(), group.out_rollouts), (256, MEMBERS));
}
