//! The simulation: the service's own store, sequencing task, timers and log on a disk that fails, with workers, trainers and an
//! operator, all in one thread and in a time of their own. A seed decides everything, so that whatever happens happens again.
//!
//! Each seed is a small world ([`character`], [`plan`]) that is struck until it is left in calm; what must be true then is in
//! [`check`], and what must be true of each answer in [`model`]. `cargo test` runs some hundreds and those that failed once
//! (`seeds.txt`); `tests/sim.sh --seeds N --first-seed S` runs many, `--seed S` shows one.

#![expect(clippy::expect_used, clippy::unwrap_used, reason = "a test fails by panicking")]

#[path = "../support/case.rs"]
mod case;
#[path = "../support/credit.rs"]
mod credit;
#[expect(dead_code, reason = "only how a call is mentioned is used")]
#[path = "../model/feed.rs"]
mod feed;
#[path = "../model/generator.rs"]
mod generator;
#[expect(dead_code, reason = "other tests use more of it")]
#[path = "../model/invariants.rs"]
mod invariants;
#[path = "../model/reference.rs"]
mod reference;
#[expect(dead_code, reason = "other tests use more of it")]
#[path = "../support/service.rs"]
mod service;
#[path = "../support/stories.rs"]
mod stories;
#[path = "../model/verdict.rs"]
mod verdict;
#[expect(dead_code, reason = "other tests use more of it")]
#[path = "../support/wire.rs"]
mod wire;

mod applied;
mod character;
mod check;
mod differ;
mod drive;
mod executor;
mod expected;
mod groups;
mod life;
mod model;
mod operator;
mod plan;
mod run;
mod seek;
mod tail;
mod trainer;
mod worker;
mod world;

use std::process::ExitCode;

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let first = arguments.first().map(String::as_str).unwrap_or_default();
    // A question after the names of tests, or a filter for those of other targets.
    let is_asked = first.starts_with("--") || "sim".contains(first);
    if !is_asked || arguments.iter().any(|argument| argument == "--list") {
        return ExitCode::SUCCESS;
    }
    let number = |name: &str| {
        let at = arguments.iter().position(|argument| argument == name)?;
        let text = arguments.get(at + 1).map(String::as_str).unwrap_or_default();
        Some(text.parse::<u64>().unwrap_or_else(|_| panic!("{name} takes a number, not {text:?}")))
    };
    match number("--seed") {
        Some(seed) => run::one(seed),
        None => {
            let twice = arguments.iter().any(|argument| argument == "--twice");
            run::many(number("--seeds"), number("--first-seed"), twice)
        }
    }
}
