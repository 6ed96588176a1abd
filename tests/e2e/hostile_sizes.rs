//! Very many of one thing: rollouts, groups, agents, runs, calls, deltas that wait. Bounds hold, work stays linear, and every
//! refusal says why and, where it may pass, when to try again.
//!
//! A million of each by hand, with figures: `cargo test --release --test e2e a_million -- --ignored --nocapture`.

use hedgerow::limits;
use hedgerow::proto::v1::harness_service_client::HarnessServiceClient;
use hedgerow::proto::v1::report_request::Event;
use hedgerow::proto::v1::{self, AnswerOutcome, DiscardDisposition};

use crate::life::{Life, in_group};
use crate::life::{agent_start, discard, expecting, finish, finish_with, heartbeat, on_base, walks};
use crate::service::{TestService, Worker, about, call, seal};

/// How many events are sent before their answers are looked at; fewer than are answered without being read.
const AT_ONCE: usize = 500;

/// Reports events one after another without waiting for each answer; how many were accepted, and the refusals.
async fn report_all(
    worker: &mut Worker,
    events: impl Iterator<Item = (v1::RolloutRef, Event)>,
) -> (usize, Vec<v1::Refusal>) {
    let (mut accepted, mut refusals) = (0, Vec::new());
    let mut events = events.peekable();
    while events.peek().is_some() {
        let mut sent = Vec::new();
        for (rollout, event) in events.by_ref().take(AT_ONCE) {
            sent.push(worker.send(&rollout, event).await);
        }
        for request_seq in sent {
            let answer = worker.answer(request_seq).await;
            accepted += usize::from(answer.outcome() == AnswerOutcome::Accepted);
            refusals.extend(answer.refusal);
        }
    }
    (accepted, refusals)
}

/// All that there is of refusals: reason, and whether it may pass.
fn kinds(refusals: &[v1::Refusal]) -> Vec<(String, bool)> {
    let mut kinds: Vec<_> =
        refusals.iter().map(|refusal| (refusal.reason.clone(), refusal.retry_after.is_some())).collect();
    kinds.sort();
    kinds.dedup();
    kinds
}

fn in_order(id: u64, prompt: &[u32]) -> v1::Call {
    call(&format!("{id}"), "main", id, prompt, &[u32::try_from(id % 1000).unwrap()])
}

#[tokio::test]
async fn tiny_rollouts_groups_and_agents_without_end_stay_under_the_budget() {
    const BUDGET_BYTES: u64 = 2 << 20;
    let service = TestService::start_with_memory(BUDGET_BYTES).await;
    let mut worker = service.worker().await;
    let memory = service.running.store.memory();
    let rollouts = (0..5000).map(|number| (about("run", &format!("alone-{number}")), heartbeat()));
    let (opened, refusals) = report_all(&mut worker, rollouts).await;
    assert!(opened > 500 && opened + refusals.len() == 5000);
    assert_eq!(kinds(&refusals), [("memory_full".to_owned(), true)]);
    let agents = (0..20_000).map(|number| {
        let start = agent_start(&format!("agent-{number}"), 0);
        (about("run", "alone-100"), Event::AgentStart(start))
    });
    let (_, refusals) = report_all(&mut worker, agents).await;
    assert_eq!(kinds(&refusals), [("memory_full".to_owned(), true)]);
    // What is refused is remembered, in a few bytes that are not judged before.
    assert!(memory.used_bytes() <= BUDGET_BYTES + 1024, "{memory:?}");
    let discarded = (0..opened)
        .map(|number| (about("run", &format!("alone-{number}")), discard("enough", DiscardDisposition::Final)));
    assert_eq!(report_all(&mut worker, discarded).await.0, opened);
    assert!(memory.used_bytes() <= BUDGET_BYTES / 4, "{memory:?}");
    let groups = (0..5000).map(|number| (in_group(&format!("{number}"), &format!("group-{number}")), heartbeat()));
    let (grouped, refusals) = report_all(&mut worker, groups).await;
    assert!(grouped > 500 && grouped < 5000);
    assert_eq!(kinds(&refusals), [("memory_full".to_owned(), true)]);
    assert!(memory.used_bytes() <= BUDGET_BYTES, "{memory:?}");
}

/// They are read apart, whichever way they come.
#[tokio::test]
async fn long_lists_are_taken_from_streams_and_in_batches() {
    const CALLS: usize = 20_000;
    let mut life = Life::start().await;
    let ids: Vec<String> = (0..CALLS).map(|call| call.to_string()).collect();
    let ids: Vec<&str> = ids.iter().map(String::as_str).collect();
    let answer = life.worker.report(&about("run", "stream"), Event::Seal(seal(&[("main", &ids)]))).await;
    let missing = |answer: &v1::Answer| answer.seal.as_ref().map(|seal| seal.missing_count);
    assert_eq!((answer.outcome(), missing(&answer)), (AnswerOutcome::Accepted, Some(CALLS as u64)), "{answer:?}");
    let request = |rollout: &str, ids: &[&str]| v1::ReportRequest {
        rollout: Some(about("run", rollout)),
        event: Some(Event::Seal(seal(&[("main", ids)]))),
        ..v1::ReportRequest::default()
    };
    let requests = vec![request("batch", &ids), request("refused", &[""; CALLS]), request("short", &["a"])];
    let mut client = HarnessServiceClient::new(life.service.channel().await);
    let answers = client.report_batch(v1::ReportBatchRequest { requests }).await.unwrap().into_inner().answers;
    let outcomes: Vec<_> = answers.iter().map(|answer| (answer.outcome(), missing(answer))).collect();
    let accepted = |calls| (AnswerOutcome::Accepted, Some(calls));
    assert_eq!(outcomes, [accepted(CALLS as u64), (AnswerOutcome::Refused, None), accepted(1)]);
    assert_eq!(answers[1].refusal.as_ref().unwrap().reason, "invalid_identifier");
}

#[tokio::test]
async fn there_are_as_many_runs_as_there_may_be() {
    let mut life = Life::start().await;
    let runs = (0..2 * limits::RUNS_MAX).map(|number| (about(&format!("run-{number}"), "a"), heartbeat()));
    let (accepted, refusals) = report_all(&mut life.worker, runs).await;
    assert!(accepted < limits::RUNS_MAX + 1 && accepted + 8 > limits::RUNS_MAX, "{accepted}");
    assert!(refusals.iter().all(|refusal| refusal.reason == "service_full"), "{:?}", kinds(&refusals));
}

#[tokio::test]
async fn a_chain_of_ten_thousand_deltas_whose_base_comes_last_is_one_row() {
    const DEEP: u64 = 10_000;
    let mut life = Life::start().await;
    let rollout = about("run", "deep");
    // Each prompt is the text of the call before it, and nothing more: the text grows by one id a call.
    let text = |calls: u64| -> Vec<u32> { (0..=calls).map(|id| u32::try_from(id % 1000).unwrap()).collect() };
    let all = text(DEEP);
    let delta = |id: u64| {
        let base = &all[..usize::try_from(id).unwrap()];
        let base_id = format!("{}", id - 1);
        (rollout.clone(), Event::Call(on_base(&base_id, base, &[], in_order(id, &[]))))
    };
    // Those that nobody waits for yet, then each with one that waits for it: the line is long when it is asked for.
    let order = (1..=DEEP).filter(|id| id % 2 == 0).chain((1..=DEEP).filter(|id| id % 2 == 1));
    let (accepted, refusals) = report_all(&mut life.worker, order.map(delta)).await;
    assert_eq!((accepted, kinds(&refusals)), (usize::try_from(DEEP).unwrap(), Vec::new()));
    // One whose base is far down, which would close a circle.
    let circle = on_base(&format!("{DEEP}"), &all, &[], in_order(0, &[]));
    let answer = life.worker.report(&rollout, Event::Call(circle)).await;
    assert_eq!(answer.refusal.expect("a refusal").reason, "resend_full_prompt");
    life.accepts(&rollout, Event::Call(in_order(0, &[]))).await;
    life.accepts(&rollout, finish(1.0)).await;
    let shown = life.until_finalised(&rollout).await;
    assert_eq!((shown.rows.len(), shown.rows[0].trained_tokens), (1, DEEP + 1));
}

#[tokio::test]
async fn bases_that_never_come_hold_up_their_own_rollout_only() {
    let mut life = Life::start().await;
    let rollout = about("run", "never");
    let waiting = (1..=5000).map(|id| {
        let delta = on_base("never", &[1, 2], &[3], in_order(id, &[]));
        (rollout.clone(), Event::Call(delta))
    });
    assert_eq!(report_all(&mut life.worker, waiting).await.0, 5000);
    // Each comes in full after all.
    let full = (1..=4000).map(|id| (rollout.clone(), Event::Call(in_order(id, &[1, 2, 3]))));
    assert_eq!(report_all(&mut life.worker, full).await.0, 4000);
    life.accepts(&rollout, finish_with(expecting(5000), 1.0)).await;
    life.others_go_on("beside bases that never come").await;
    life.accepts(&rollout, discard("enough", DiscardDisposition::Final)).await;
}

#[tokio::test]
async fn one_rollout_of_twenty_thousand_calls_and_thousands_of_siblings() {
    let mut life = Life::start().await;
    let prompt: Vec<u32> = (0..100).collect();
    let siblings = about("run", "siblings");
    let calls = (0..20_000).map(|id| (siblings.clone(), Event::Call(in_order(id, &prompt))));
    assert_eq!(report_all(&mut life.worker, calls).await.0, 20_000);
    // Calls that generated nothing stand between an agent's calls.
    let empty = about("run", "empty");
    let calls = (0..20_000).map(|id| {
        let generation: &[u32] = if id == 0 { &[1] } else { &[] };
        (empty.clone(), Event::Call(call(&format!("{id}"), "main", id, &prompt, generation)))
    });
    assert_eq!(report_all(&mut life.worker, calls).await.0, 20_000);
    for rollout in [&siblings, &empty] {
        life.accepts(rollout, finish(1.0)).await;
    }
    assert_eq!(walks(&life.until_finalised(&empty).await), ["0"]);
}

/// Figures for a million of each: seconds, and bytes as counted. With the default budget.
#[tokio::test]
#[ignore = "takes minutes; see the top of the file"]
async fn a_million() {
    let service = TestService::start().await;
    let mut worker = service.worker().await;
    let memory = service.running.store.memory();
    for what in ["rollouts", "groups", "agents", "runs"] {
        let started = std::time::Instant::now();
        let events = (0..1_000_000_u32).map(|number| match what {
            "rollouts" => (about("run", &format!("{number}")), heartbeat()),
            "groups" => (in_group(&format!("in-group-{number}"), &format!("{number}")), heartbeat()),
            "agents" => (about("run", "agents"), Event::AgentStart(agent_start(&format!("{number}"), 0))),
            _ => (about(&format!("run-{number}"), "a"), heartbeat()),
        });
        let (accepted, refusals) = report_all(&mut worker, events).await;
        let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
        let resident = status.lines().find(|line| line.starts_with("VmRSS")).unwrap_or_default().to_owned();
        println!(
            "{what}: {accepted} accepted, refused {:?}; {:?}; {memory:?}; {resident}",
            kinds(&refusals),
            started.elapsed()
        );
    }
}
