//! The soak test: a population of rollouts against a real service process with budgets for memory and log, once with a trainer
//! that keeps up, and once with one that stops half-way and returns. Memory and log level off under their budgets, what does not fit
//! into memory leaves it and comes back, every refusal carries a delay, and everything arrives in the end, each trained token once.
//!
//! `cargo test` does a short run with small budgets; `tests/soak.sh --minutes N` a long one.

#![expect(clippy::expect_used, reason = "a test fails by panicking")]

#[expect(dead_code, reason = "other tests use more of it")]
#[path = "../bench/message.rs"]
mod message;
#[expect(dead_code, reason = "other tests use more of it")]
#[path = "../support/served.rs"]
mod served;
#[expect(dead_code, reason = "other tests use more of it")]
#[path = "../bench/workload.rs"]
mod workload;

mod service;
mod trainer;
mod worker;

use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::{Duration, Instant};

use service::{Budgets, Soaked, Usage};
use tokio::sync::watch;
use trainer::Taken;
use worker::Reported;

/// The run.
const RUN: &str = "soak";
const WORKERS: u64 = 4;
/// The budgets of a long run, and of a short one, in which a few of the largest rollouts still have room at once: with less, open
/// rollouts that have used up the reserve wait for each other.
const LONG: Budgets = Budgets { memory_bytes: 2_000_000_000, log_bytes: 4_000_000_000, segment_bytes: 64 << 20 };
/// See [`LONG`].
const SHORT: Budgets = Budgets { memory_bytes: 16 << 20, log_bytes: 48 << 20, segment_bytes: 1 << 20 };
/// Rollouts of a short run, in each of its two halves. Half of them are more than its memory holds.
const SHORT_ROLLOUTS: u64 = 160;
/// Times that a rollout's tokens have left memory after which a trainer returns to a short run.
const SHORT_EVICTIONS: u64 = 20;

/// How much is done in one half of the test.
#[derive(Clone, Copy)]
enum Extent {
    For(Duration),
    Rollouts(u64),
}

/// What all parts of the test share.
struct Shared {
    address: String,
    /// Rollouts that workers have begun, or are about to.
    begun: AtomicU64,
    /// Rollouts that may begin so far; none: no more will.
    may_begin: watch::Sender<Option<u64>>,
    reported: parking_lot::Mutex<Reported>,
    taken: parking_lot::Mutex<Taken>,
}

impl Shared {
    /// Whether of each rollout something has come, and as many tokens as all have generated.
    fn all_has_arrived(&self) -> bool {
        let (reported, taken) = (self.reported.lock(), self.taken.lock());
        taken.rollouts.len() >= reported.rollouts.len() && taken.trained_tokens >= reported.generated_tokens
    }
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
    let soaked = Soaked::start(budgets);
    let shared = Arc::new(Shared {
        address: soaked.served.address.clone(),
        begun: AtomicU64::new(0),
        may_begin: watch::Sender::new(Some(0)),
        reported: parking_lot::Mutex::default(),
        taken: parking_lot::Mutex::default(),
    });
    let trainer = tokio::spawn(trainer::take(Arc::clone(&shared)));
    let workers: Vec<_> = (0..WORKERS).map(|_| tokio::spawn(worker::work(Arc::clone(&shared)))).collect();
    let mut half = Half { shared, soaked, extent, begun: Instant::now(), usage: Usage::default() };
    half.reach(0.5, true).await;
    if stops {
        trainer.abort();
        println!("the trainer stops; {}", half.usage);
        half.reach(0.75, false).await;
        println!("the trainer returns; {}", half.usage);
        tokio::spawn(trainer::take(Arc::clone(&half.shared)));
    }
    half.reach(1.0, true).await;
    half.shared.may_begin.send_replace(None);
    println!("no more rollouts begin; {}", half.usage);
    for worker in workers {
        half.usage.look_until(&half.soaked, worker).await.expect("a worker ends well");
    }
    // What is reported arrives, or the test waits for ever and says for what.
    while !half.shared.all_has_arrived() {
        half.usage.look(&half.soaked).await;
    }
    println!("all has arrived; {}", half.usage);
    checks(what, budgets, &half.shared, &half.usage, stops)
}

/// One half of the test, under way.
struct Half {
    shared: Arc<Shared>,
    soaked: Soaked,
    extent: Extent,
    begun: Instant,
    usage: Usage,
}

impl Half {
    /// Has workers go on until so much of the extent is done; in a short run, where no trainer takes anything, until much has
    /// left memory.
    async fn reach(&mut self, share: f64, is_taken: bool) {
        let most = match self.extent {
            Extent::For(_) => u64::MAX,
            Extent::Rollouts(rollouts) => (rollouts as f64 * share) as u64,
        };
        self.shared.may_begin.send_replace(Some(most));
        loop {
            self.usage.look(&self.soaked).await;
            let is_there = match self.extent {
                Extent::For(time) => self.begun.elapsed() >= time.mul_f64(share),
                Extent::Rollouts(_) => {
                    let has_left = self.usage.evictions >= SHORT_EVICTIONS;
                    self.shared.reported.lock().rollouts.len() as u64 >= most || (!is_taken && has_left)
                }
            };
            if is_there {
                return;
            }
        }
    }
}

fn checks(what: &str, budgets: Budgets, shared: &Shared, usage: &Usage, stops: bool) -> Checks {
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
            // A trainer that keeps up may be behind for a moment.
            if stops { "what did not fit left memory" } else { "memory was hardly ever short" },
            if stops { usage.evictions > 0 } else { usage.evictions < SHORT_EVICTIONS },
            format!("tokens of rollouts left memory {} times", usage.evictions),
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
