//! The soak test: a population of rollouts against a real service process with budgets for memory and log, once with a trainer
//! that keeps up, and once with one that stops half-way and returns. Memory and log level off under their budgets, every refusal
//! carries a delay, and everything arrives in the end, each trained token once.
//!
//! `cargo test` does a short run with small budgets; `tests/soak.sh --minutes N` a long one.

#![expect(clippy::expect_used, reason = "a test fails by panicking")]

#[expect(dead_code, reason = "other tests use more of it")]
#[path = "../bench/workload.rs"]
mod workload;

mod service;
mod trainer;
mod worker;

use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use service::{Budgets, Served, Usage};
use trainer::Taken;
use worker::Reported;

const WORKERS: u64 = 4;
/// The budgets of a long run, and of a short one, in which a few of the largest rollouts still have room at once: with less, open
/// rollouts that have used up the reserve wait for each other.
const LONG: Budgets = Budgets { memory_bytes: 2_000_000_000, log_bytes: 4_000_000_000, segment_bytes: 64 << 20 };
const SHORT: Budgets = Budgets { memory_bytes: 24 << 20, log_bytes: 48 << 20, segment_bytes: 1 << 20 };
/// Rollouts of a short run, in each of its two halves.
const SHORT_ROLLOUTS: u64 = 60;

/// How much is done in one part of the test.
#[derive(Clone, Copy)]
enum Extent {
    For(Duration),
    Rollouts(u64),
}

/// What all parts of the test share.
struct Shared {
    address: String,
    /// Rollouts that workers have begun.
    begun: AtomicU64,
    /// Workers begin no more.
    is_over: AtomicBool,
    reported: parking_lot::Mutex<Reported>,
    taken: parking_lot::Mutex<Taken>,
}

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let value = |name| arguments.iter().position(|argument| argument == name).and_then(|at| arguments.get(at + 1));
    let minutes: Option<u64> = value("--minutes").map(|text| text.parse().expect("--minutes takes a number"));
    // A filter for tests of other targets.
    let first = arguments.first().map(String::as_str).unwrap_or_default();
    if !(first.starts_with("--") || "soak".contains(first)) || arguments.iter().any(|argument| argument == "--list") {
        return ExitCode::SUCCESS;
    }
    let (budgets, extent) = match minutes {
        Some(minutes) => (LONG, Extent::For(Duration::from_secs(minutes * 30))),
        None => (SHORT, Extent::Rollouts(SHORT_ROLLOUTS)),
    };
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
    let runtime = runtime.expect("a runtime");
    let keeps_up = runtime.block_on(soak("a trainer that keeps up", budgets, extent, false));
    let returns = runtime.block_on(soak("a trainer that stops half-way and returns", budgets, extent, true));
    let (mut passed, mut failed) = (0, 0);
    for (name, check) in keeps_up.into_iter().chain(returns) {
        match check {
            Ok(said) => {
                passed += 1;
                println!("ok      {name}: {said}");
            }
            Err(said) => {
                failed += 1;
                println!("FAILED  {name}: {said}");
            }
        }
    }
    println!("{passed} passed, {failed} failed");
    if failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

type Checks = Vec<(String, Result<String, String>)>;

/// One half of the test.
async fn soak(what: &str, budgets: Budgets, extent: Extent, stops: bool) -> Checks {
    println!("== {what}");
    let served = Served::start(budgets);
    let shared = Arc::new(Shared {
        address: served.address.clone(),
        begun: AtomicU64::new(0),
        is_over: AtomicBool::new(false),
        reported: parking_lot::Mutex::default(),
        taken: parking_lot::Mutex::default(),
    });
    let mut trainer = Some(tokio::spawn(trainer::take(Arc::clone(&shared))));
    let workers: Vec<_> = (0..WORKERS).map(|_| tokio::spawn(worker::work(Arc::clone(&shared)))).collect();
    let begun = Instant::now();
    let mut usage = Usage::default();
    loop {
        usage.look(&served).await;
        let done = match extent {
            Extent::For(time) => begun.elapsed().as_secs_f64() / time.as_secs_f64(),
            Extent::Rollouts(rollouts) => shared.begun.load(Ordering::Relaxed) as f64 / rollouts as f64,
        };
        // Where workers are held up for want of a trainer, no more rollouts begin.
        let held_up = matches!(extent, Extent::Rollouts(_))
            && trainer.is_none()
            && shared.reported.lock().refusals.values().sum::<u64>() > 50;
        if stops && (0.5..0.75).contains(&done) && !held_up {
            if let Some(trainer) = trainer.take() {
                println!("the trainer stops; {usage}");
                trainer.abort();
            }
        } else if trainer.is_none() {
            println!("the trainer returns; {usage}");
            trainer = Some(tokio::spawn(trainer::take(Arc::clone(&shared))));
        }
        if done >= 1.0 {
            break;
        }
    }
    shared.is_over.store(true, Ordering::Relaxed);
    println!("no more rollouts begin; {usage}");
    for worker in workers {
        usage.look_until(&served, worker).await.expect("a worker ends well");
    }
    // What is reported arrives, or the test waits for ever and says for what.
    while shared.taken.lock().rollouts.len() < shared.reported.lock().rollouts.len() {
        usage.look(&served).await;
    }
    println!("all has arrived; {usage}");
    checks(what, budgets, &shared, &usage)
}

fn checks(what: &str, budgets: Budgets, shared: &Shared, usage: &Usage) -> Checks {
    let (reported, taken) = (shared.reported.lock(), shared.taken.lock());
    let check =
        |name: &str, holds: bool, said: String| (format!("{what}: {name}"), if holds { Ok(said) } else { Err(said) });
    let (memory, log) = (usage.counted_bytes_max, usage.log_bytes_max);
    let reserve = budgets.memory_bytes / 100 * hedgerow::limits::MEMORY_RESERVE_PERCENT;
    vec![
        check(
            "memory levels off under its budget and the reserve",
            memory <= budgets.memory_bytes + reserve,
            format!("{memory} bytes counted, {} resident, budget {}", usage.resident_bytes_max, budgets.memory_bytes),
        ),
        check(
            "the log levels off under its budget",
            log <= budgets.log_bytes,
            format!("{log} bytes, budget {}; {} were reported", budgets.log_bytes, reported.new_bytes),
        ),
        check(
            "refusals carry delays",
            reported.refusals_without_delay.is_empty(),
            format!("{:?}, without one {:?}", reported.refusals, reported.refusals_without_delay),
        ),
        check(
            "everything arrives",
            taken.rollouts == reported.rollouts,
            format!("{} rollouts, {} rows", taken.rollouts.len(), taken.rows.len()),
        ),
        check(
            "each token is trained once",
            taken.trained_tokens == reported.generated_tokens,
            format!("{} generated, {} trained", reported.generated_tokens, taken.trained_tokens),
        ),
    ]
}
