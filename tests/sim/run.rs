//! Many seeds at once, each in one thread, and what came of them.

use std::collections::BTreeSet;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use hedgerow::telemetry::Telemetry;
use parking_lot::Mutex;

use crate::drive::{self, Outcome};
use crate::world::Counts;

/// Seeds of a run that is told no number.
const SEEDS: u64 = 500;
/// Threads, each with seeds of its own.
const THREADS: usize = 2;
/// How long no seed may come to its end; only a failing one takes so long.
const SILENCE_MAX: Duration = Duration::from_secs(60);
/// One in so many seeds is run twice, if not all are, and must leave the same trace.
const TWICE: u64 = 25;
/// So many seeds reach everything that is counted.
const SEEDS_REACH_ALL: usize = 500;
/// Lines of a trace that are shown of a failure.
const LINES_SHOWN: usize = 25;

/// Those that failed once, one on a line.
const KEPT: &str = include_str!("seeds.txt");

/// What must have happened among some hundreds of seeds: a simulation that reaches none of it proves little.
const REACHED: [&str; 56] = [
    "advantages compared",
    "groups by quorum",
    "groups by timeout",
    "groups dropped",
    "groups whole",
    "late members",
    "accepted",
    "acknowledged",
    "acknowledged before",
    "acknowledged from before a seek",
    "already ended",
    "broken streams",
    "checkpoints kept",
    "discarded",
    "discarded for broken links",
    "discarded for missing calls",
    "dropped by hand",
    "duplicates",
    "ends at rest",
    "finalised",
    "gone idle",
    "kills",
    "leases ended",
    "lives with a disk that fails",
    "logs failed",
    "machines stopped",
    "members let go",
    "not held",
    "notices",
    "open",
    "openings failed",
    "openings struck",
    "records lost unanswered",
    "refused",
    "released by hand",
    "retired",
    "retired without calls",
    "returned",
    "rollouts read to be written forward",
    "rows compared",
    "rows seen by tails",
    "runs deleted",
    "seeks",
    "seeks refused",
    "settings changed",
    "stops",
    "told of drops",
    "log_full",
    "memory_full",
    "torn ends",
    "trainers died",
    "units given again",
    "units held again",
    "units read back",
    "units restored by seeks",
    "workers died",
];

/// Shows one seed.
pub(crate) fn one(seed: u64) -> ExitCode {
    let outcome = attempt(seed, &Telemetry::new(), true);
    outcome.lines.iter().for_each(|line| println!("{line}"));
    println!("{:?}", outcome.counts);
    println!("trace {:032x}", outcome.digest);
    let failed = u32::from(outcome.fault.is_some());
    if let Some(fault) = &outcome.fault {
        println!("FAILED {fault}");
    }
    println!("{} passed, {failed} failed", 1 - failed);
    if failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// Runs so many seeds from this one on, after those that failed once; each of them twice, or some.
pub(crate) fn many(seeds: Option<u64>, first: Option<u64>, twice: bool) -> ExitCode {
    let (seeds, first) = (seeds.unwrap_or(SEEDS), first.unwrap_or(1));
    println!("tests/sim.sh --seeds {seeds} --first-seed {first}");
    let kept = KEPT.lines().filter_map(|line| line.split('#').next()?.trim().parse().ok());
    let all: Vec<u64> = kept.chain(first..first.saturating_add(seeds)).collect();
    let begun = Instant::now();
    let (mut counts, mut passed, mut failures) = (Counts::new(), 0, 0);
    let (results, underway) = begin(all.clone(), if twice { 1 } else { TWICE });
    for _ in 0..all.len() {
        match results.recv_timeout(SILENCE_MAX) {
            Ok((_, Ok(counted))) => {
                counted.into_iter().for_each(|(what, many)| *counts.entry(what).or_default() += many);
                passed += 1;
            }
            Ok((seed, Err(fault))) => {
                println!("FAILED seed {seed}: {fault}");
                println!("repeat it with tests/sim.sh --seed {seed}, and keep it in tests/sim/seeds.txt");
                failures += 1;
            }
            Err(_) => {
                println!("FAILED: one of the seeds {:?} does not come to an end", underway.lock());
                failures += 1;
                break;
            }
        }
    }
    counts.iter().for_each(|(what, many)| println!("{many:>9} {what}"));
    let missed: Vec<_> = REACHED.iter().filter(|what| !counts.contains_key(*what)).collect();
    if all.len() >= SEEDS_REACH_ALL && !missed.is_empty() {
        println!("FAILED: never happened: {missed:?}");
        failures += 1;
    }
    println!("{} seeds in {:.1} s", all.len(), begun.elapsed().as_secs_f64());
    println!("{passed} passed, {failures} failed");
    if failures == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// What came of a seed.
type Done = (u64, Result<Counts, String>);

/// Has threads run all seeds, one in so many twice; gives what comes of them, and which are under way.
fn begin(all: Vec<u64>, twice: u64) -> (Receiver<Done>, Arc<Mutex<BTreeSet<u64>>>) {
    let (done, results) = channel();
    let (all, next, underway) = (Arc::new(all), Arc::new(AtomicUsize::new(0)), Arc::new(Mutex::default()));
    for _ in 0..THREADS {
        let (all, next, done) = (Arc::clone(&all), Arc::clone(&next), done.clone());
        let under: Arc<Mutex<BTreeSet<u64>>> = Arc::clone(&underway);
        std::thread::spawn(move || {
            let telemetry = Telemetry::new();
            while let Some(seed) = all.get(next.fetch_add(1, Ordering::Relaxed)) {
                under.lock().insert(*seed);
                let result = check(*seed, twice, &telemetry);
                under.lock().remove(seed);
                telemetry.upkeep();
                if done.send((*seed, result)).is_err() {
                    return;
                }
            }
        });
    }
    (results, underway)
}

/// Runs a seed, one in so many twice.
fn check(seed: u64, twice: u64, telemetry: &Arc<Telemetry>) -> Result<Counts, String> {
    let outcome = attempt(seed, telemetry, false);
    if seed.is_multiple_of(twice) && attempt(seed, telemetry, false).digest != outcome.digest {
        let [one, other] = [attempt(seed, telemetry, true), attempt(seed, telemetry, true)].map(|run| run.lines);
        let differ = one.iter().zip(&other).find(|(one, other)| one != other);
        return Err(format!("it leaves another trace each time; the first difference, if it is one: {differ:#?}"));
    }
    match outcome.fault {
        None => Ok(outcome.counts),
        Some(fault) => {
            let lines = attempt(seed, telemetry, true).lines;
            let shown = lines.len().saturating_sub(LINES_SHOWN);
            Err(format!("{fault}\n{}", lines[shown..].join("\n")))
        }
    }
}

/// A panic of the service is a fault of the seed.
fn attempt(seed: u64, telemetry: &Arc<Telemetry>, keeps_lines: bool) -> Outcome {
    let run = catch_unwind(AssertUnwindSafe(|| drive::run(seed, telemetry, keeps_lines)));
    run.unwrap_or_else(|panic| {
        let said = panic.downcast_ref::<String>().cloned();
        let said = said.or_else(|| panic.downcast_ref::<&str>().map(|said| (*said).to_owned()));
        let fault = Some(format!("it panicked: {}", said.unwrap_or_default()));
        Outcome { digest: 0, fault, lines: Vec::new(), counts: Counts::new() }
    })
}
