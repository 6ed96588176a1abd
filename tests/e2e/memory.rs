//! Memory is short: what is refused and what is not, and that the fleet never waits for itself.

use hedgerow::proto::v1::report_request::Event;
use hedgerow::proto::v1::{self, AckOutcome, AnswerOutcome, DiscardDisposition};

use crate::drain::get;
use crate::life::{Life, attempt, discard, finish, finish_with, heartbeat, in_group, seconds, tags};
use crate::queue_taker::{Taker, row, unit_ids};
use crate::service::{TestService, Worker, about, call, reward, seal, subscription};

const BUDGET_BYTES: u64 = 1 << 20;
/// About 10 kB of memory with its log-probabilities.
const LARGE_TOKENS: u32 = 1000;

fn large(id: &str, sequence: u64) -> Event {
    // No two prompts share a block.
    let prompt: Vec<u32> = (0..LARGE_TOKENS).map(|at| at * 1000 + u32::try_from(sequence).unwrap()).collect();
    Event::Call(call(id, "main", sequence, &prompt, &prompt))
}

fn used(service: &TestService) -> u64 {
    service.running.store.memory().used_bytes()
}

/// Whether it was accepted; if not, it was for want of memory, and the answer says when to try again.
#[track_caller]
fn taken(answer: &v1::Answer) -> bool {
    if answer.outcome() == AnswerOutcome::Accepted {
        return true;
    }
    let refusal = answer.refusal.as_ref().expect("a refusal");
    let delay = refusal.retry_after.unwrap_or_else(|| panic!("no delay: {refusal:?}"));
    assert_eq!((refusal.reason.as_str(), refusal.code, delay.seconds), ("memory_full", 8, 1), "{answer:?}");
    false
}

/// Reports large calls of a rollout until one is refused; how many were taken.
async fn fill(worker: &mut Worker, rollout: &v1::RolloutRef) -> u64 {
    let mut sequence = 1;
    while taken(&worker.report(rollout, large(&format!("large-{sequence}"), sequence)).await) {
        sequence += 1;
    }
    sequence - 1
}

#[tokio::test]
async fn new_groups_are_refused_first_then_calls_and_never_what_ends_a_rollout() {
    let service = TestService::start_with_memory(BUDGET_BYTES).await;
    let mut worker = service.worker().await;
    assert!(taken(&worker.report(&in_group("one", "known"), heartbeat()).await));
    // So many older ones that the last are not among those that are favoured.
    for number in 0..64 {
        assert!(taken(&worker.report(&about("run", &format!("older-{number}")), heartbeat()).await));
    }
    let opened = ["grows", "sealed", "rewarded", "finished", "discarded"].map(|rollout| about("run", rollout));
    for rollout in &opened {
        assert!(taken(&worker.report(rollout, Event::Call(call("c", "main", 1, &[1, 2], &[3]))).await));
    }
    let [grows, sealed, rewarded, finished, discarded] = opened;
    let mut sequence = 1;
    while used(&service) <= BUDGET_BYTES / 5 * 4 {
        sequence += 1;
        assert!(taken(&worker.report(&grows, large(&format!("{sequence}"), sequence)).await), "no call is refused yet");
    }
    assert!(!taken(&worker.report(&about("run", "alone"), heartbeat()).await), "a rollout without a group");
    assert!(!taken(&worker.report(&in_group("third", "new"), large("c", 2)).await), "a new group");
    assert!(taken(&worker.report(&in_group("two", "known"), large("c", 3)).await), "a member of a known group");
    assert!(fill(&mut worker, &grows).await > 1);
    assert!(used(&service) <= BUDGET_BYTES);
    let keys: Vec<String> = (0..64).map(|key| format!("{key}")).collect();
    let value = "x".repeat(250);
    let many: Vec<(&str, &str)> = keys.iter().map(|key| (key.as_str(), value.as_str())).collect();
    assert!(!taken(&worker.report(&finished, tags(&many)).await), "tags take room too");

    assert!(taken(&worker.report(&sealed, Event::Seal(seal(&[("main", &["c", "late"])]))).await));
    assert!(taken(&worker.report(&sealed, large("late", 2)).await), "what a sealed rollout still waits for");
    assert!(used(&service) > BUDGET_BYTES, "it is taken from the reserve");
    assert!(taken(&worker.report(&about("run", "older-0"), large("c", 4)).await), "one of the oldest");
    assert!(!taken(&worker.report(&grows, large("c-2", 5)).await));
    let again = worker.report(&grows, Event::Call(call("c", "main", 1, &[1, 2], &[3]))).await;
    assert_eq!(again.outcome(), AnswerOutcome::Duplicate, "what is known takes no room");
    assert!(taken(&worker.report(&rewarded, Event::Reward(reward(1.0))).await));
    assert!(taken(&worker.report(&finished, finish(1.0)).await));
    assert!(taken(&worker.report(&discarded, discard("enough", DiscardDisposition::Final)).await));
    let before = used(&service);
    assert!(taken(&worker.report(&grows, discard("too large", DiscardDisposition::Final)).await));
    assert!(used(&service) < before / 2, "its memory comes back at once");
    assert!(taken(&worker.report(&about("run", "alone"), heartbeat()).await));
}

/// All finish once a trainer takes rows: memory full of open rollouts that each need one more call, a subscription without
/// credit, a full queue.
#[tokio::test]
async fn the_fleet_never_waits_for_itself() {
    let service = TestService::start_with_memory(BUDGET_BYTES).await;
    let mut worker = service.worker().await;
    let without_credit = v1::Subscription { credit_tokens: 0, ..subscription("run", "trainers") };
    let mut taker = Taker::join(&service, without_credit).await;
    for number in 0..20 {
        row(&mut worker, "run", &format!("queued-{number}"), 2 * LARGE_TOKENS).await;
    }
    let mut open = Vec::new();
    loop {
        let rollout = about("run", &format!("open-{}", open.len()));
        if !taken(&worker.report(&rollout, heartbeat()).await) {
            break;
        }
        open.push(rollout);
    }
    assert!(open.len() > 100, "{} rollouts are open, more than are favoured", open.len());
    let all = open.len();
    // Those that are not the oldest fill the memory.
    let youngest = open[all - 1].clone();
    fill(&mut worker, &youngest).await;
    let (mut acknowledged, mut rounds_without, mut refused) = (0, 0, 0);
    while !open.is_empty() || acknowledged < 20 + all {
        let before = (open.len(), acknowledged);
        let mut still_open = Vec::new();
        for rollout in open {
            if taken(&worker.report(&rollout, large("last", 7777)).await) {
                assert!(taken(&worker.report(&rollout, finish(1.0)).await), "what ends it is never refused");
            } else {
                refused += 1;
                still_open.push(rollout);
            }
        }
        open = still_open;
        if rounds_without == 0 {
            assert!(!open.is_empty() && taker.quiet().await.is_empty(), "memory is short, and nothing is taken");
            taker.credit(1 << 30).await;
        }
        let units = taker.quiet().await;
        let ids = unit_ids(&units);
        if !ids.is_empty() {
            assert_eq!(taker.ack(&ids).await, vec![AckOutcome::Acknowledged; ids.len()]);
        }
        acknowledged += ids.len();
        rounds_without += 1;
        assert!(rounds_without < 3 || before != (open.len(), acknowledged), "everybody waits for everybody");
    }
    assert!(refused > 0);
    assert!(used(&service) < BUDGET_BYTES / 2, "{} bytes are still held", used(&service));
}

/// A rollout that waits for a long tool call, and says so, is the oldest: the others share the reserve meanwhile.
#[tokio::test]
async fn who_only_says_that_it_is_there_keeps_nothing_from_the_others() {
    // All of them do not fit, but what one still needs then is less than a part of the reserve.
    const CALLS: u64 = 5;
    let service = TestService::start_with_memory(BUDGET_BYTES).await;
    let mut worker = service.worker().await;
    let with_credit = v1::Subscription { credit_tokens: 1 << 30, ..subscription("run", "trainers") };
    let mut taker = Taker::join(&service, with_credit).await;
    let oldest = about("run", "oldest");
    assert!(taken(&worker.report(&oldest, heartbeat()).await));
    let mut open: Vec<_> = (0..30).map(|number| (about("run", &format!("open-{number}")), 0)).collect();
    for (rollout, _) in &open {
        assert!(taken(&worker.report(rollout, heartbeat()).await));
    }
    let mut refused = 0;
    for _pass in 0..400 {
        let mut still_open = Vec::new();
        for (rollout, calls) in open {
            let calls = calls + 1;
            if !taken(&worker.report(&rollout, large(&format!("call-{calls}"), calls)).await) {
                refused += 1;
                still_open.push((rollout, calls - 1));
            } else if calls < CALLS {
                still_open.push((rollout, calls));
            } else {
                assert!(taken(&worker.report(&rollout, finish(1.0)).await), "what ends it is never refused");
            }
        }
        open = still_open;
        let units = taker.quiet().await;
        if !units.is_empty() {
            taker.ack(&unit_ids(&units)).await;
        }
        if open.is_empty() {
            assert!(refused > 0, "memory was short");
            return;
        }
        assert!(taken(&worker.report(&oldest, heartbeat()).await));
        service.clock.advance(std::time::Duration::from_secs(1));
    }
    panic!("{} rollouts wait for ever", open.len());
}

#[tokio::test]
async fn tombstones_are_forgotten_before_they_have_openings_refused() {
    let service = TestService::start_with_memory(BUDGET_BYTES).await;
    let mut worker = service.worker().await;
    for number in 0..3000 {
        let rollout = about("run", &format!("{number}"));
        assert!(taken(&worker.report(&rollout, discard(&"why ".repeat(100), DiscardDisposition::Final)).await));
    }
    assert!(used(&service) <= BUDGET_BYTES / 8 + 10_000, "{} bytes", used(&service));
    let last = worker.report(&about("run", "2999"), heartbeat()).await;
    assert_eq!(last.outcome(), AnswerOutcome::AlreadyEnded, "the latest are remembered");
}

#[tokio::test]
async fn the_metrics_say_what_is_held_and_how_old_the_oldest_rollout_is() {
    let service = TestService::start_with_memory(BUDGET_BYTES).await;
    let mut worker = service.worker().await;
    assert!(taken(&worker.report(&about("run", "a"), large("c", 1)).await));
    let held = format!("hedgerow_resident_bytes {}\n", used(&service));
    let oldest = "hedgerow_oldest_open_rollout_seconds{run=\"run\"} 2\n";
    for expected in [&held, "hedgerow_memory_budget_bytes 1048576\n", oldest] {
        // The clock is moved to where the gauges are set, and not further than the age that is looked for.
        while !get(&service, "/metrics").await.contains(expected) {
            let now_ms = service.clock.now_ms();
            assert!(now_ms <= 2000, "{expected} does not come");
            service.clock.advance(std::time::Duration::from_millis(u64::from(now_ms < 2000) * 1000));
        }
    }
}

/// A call that is refused is not half stored: no rollout, no place in a group, no older attempt superseded.
#[tokio::test]
async fn a_call_that_has_no_room_opens_nothing() {
    let service = TestService::start_with_memory(BUDGET_BYTES).await;
    let mut worker = service.worker().await;
    let huge = |sequence: u32| {
        let prompt: Vec<u32> = (0..400_000).map(|at| at * 7 + sequence).collect();
        Event::Call(call("huge", "main", 1, &prompt, &[1]))
    };
    let first = about("run", "retried");
    assert!(taken(&worker.report(&first, Event::Call(call("c", "main", 1, &[1, 2], &[3]))).await));
    for refused in [in_group("alone", "g"), attempt(&first, 1)] {
        let answer = worker.report(&refused, huge(1)).await;
        let refusal = answer.refusal.expect("it is larger than all memory");
        assert_eq!((refusal.reason.as_str(), refusal.call_id.as_str()), ("memory_full", "huge"));
        assert_eq!(refusal.retry_after, None, "it never has room");
    }
    let again = worker.report(&first, Event::Call(call("c", "main", 1, &[1, 2], &[3]))).await;
    assert_eq!(again.outcome(), AnswerOutcome::Duplicate, "the older attempt stands");
    let whole = Event::Open(v1::Open { group_size: Some(1), ..v1::Open::default() });
    assert!(taken(&worker.report(&in_group("other", "g"), whole).await), "its place in the group is free");
}

/// Seals that list calls which never come do not use up what others finish from.
#[tokio::test]
async fn inventions_leave_the_reserve_alone() {
    let service = TestService::start_with_memory(BUDGET_BYTES).await;
    let mut worker = service.worker().await;
    let (oldest, grows) = (about("run", "oldest"), about("run", "grows"));
    assert!(taken(&worker.report(&oldest, large("c", 1)).await));
    let hostile: Vec<_> = (0..100).map(|number| in_group(&format!("hostile-{number}"), "g")).collect();
    for rollout in &hostile {
        assert!(taken(&worker.report(rollout, heartbeat()).await));
    }
    fill(&mut worker, &grows).await;
    let invented: Vec<String> = (0..2000).map(|number| format!("never-{number}")).collect();
    let listed: Vec<&str> = invented.iter().map(String::as_str).collect();
    for rollout in &hostile {
        taken(&worker.report(rollout, Event::Seal(seal(&[("main", &listed)]))).await);
    }
    assert!(taken(&worker.report(&oldest, large("last", 2)).await), "the oldest goes on");
    let known = ["c", "last"];
    let many =
        v1::Reward { components: (0..64).map(|number| (format!("{number:0>200}"), 1.0)).collect(), ..reward(1.0) };
    assert!(taken(&worker.report(&oldest, finish_with(seal(&[("main", &known)]), 1.0)).await));
    assert!(taken(&worker.report(&grows, Event::Reward(many)).await), "a reward is taken always");
}

/// A group is forgotten with the last of its members, whether it was ever whole or not.
#[tokio::test]
async fn groups_that_never_become_whole_are_forgotten() {
    let settings = v1::RunSettings { tombstone_retention: seconds(60), ..v1::RunSettings::default() };
    let mut life = Life::start_with(settings).await;
    let two = Event::Open(v1::Open { group_size: Some(2), ..v1::Open::default() });
    for (group, end) in [("half", DiscardDisposition::Final), ("retried", DiscardDisposition::WillRetry)] {
        let rollout = in_group(group, group);
        life.accepts(&rollout, two.clone()).await;
        life.accepts(&rollout, discard("enough", end)).await;
    }
    life.settle(&in_group("half", "half")).await;
    let mut inspect = life.service.inspect().await;
    for _ in 0..2000 {
        let request = v1::ListGroupsRequest { run_id: "run".to_owned(), ..v1::ListGroupsRequest::default() };
        if inspect.list_groups(request).await.unwrap().into_inner().groups.is_empty() {
            return;
        }
        life.service.clock.advance(std::time::Duration::from_secs(30));
        tokio::task::yield_now().await;
    }
    panic!("the groups are still there");
}
