//! The crash test: workers and trainers as processes of their own against a service on disk, all of which are killed with
//! SIGKILL at random moments and started again. Whatever was answered is there, every row arrives, each trained call is
//! trained once, and the rows are those of an undisturbed run and of the slow model.
//!
//! `cargo test` does a short run; `tests/crash.sh --rounds N --seed S` a long one. A round is a kill.

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

mod check;
mod driver;
mod plan;
mod processes;
mod ranks;
mod rows;
mod trainer;
mod undisturbed;
mod worker;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use plan::Plan;
use trainer::GROUPS;

/// What the command line says.
struct Arguments(Vec<String>);

impl Arguments {
    fn text(&self, name: &str) -> Option<&str> {
        let at = self.0.iter().position(|argument| argument == name)?;
        self.0.get(at + 1).map(String::as_str)
    }

    fn number(&self, name: &str) -> Option<u64> {
        let text = self.text(name)?;
        Some(text.parse().unwrap_or_else(|_| panic!("{name} takes a number, not {text:?}")))
    }

    fn place(&self, name: &str) -> usize {
        self.number(name).and_then(|number| usize::try_from(number).ok()).unwrap_or_default()
    }

    /// The plan that this process has a part in.
    fn plan(&self) -> Plan {
        let number = |name| self.number(name).unwrap_or_default();
        Plan::new(number("--seed"), number("--batch"), self.place("--rollouts"))
    }
}

fn main() -> ExitCode {
    let arguments = Arguments(std::env::args().skip(1).collect());
    let first = arguments.0.first().map(String::as_str).unwrap_or_default();
    // A question after the names of tests, or a filter for those of other targets.
    let is_asked = first.starts_with("--") || ["worker", "trainer", "rank"].contains(&first) || "crash".contains(first);
    if !is_asked || arguments.0.iter().any(|argument| argument == "--list") {
        return ExitCode::SUCCESS;
    }
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
    let runtime = runtime.expect("a runtime");
    let address = || arguments.text("--address").unwrap_or_default().to_owned();
    let file = PathBuf::from(arguments.text("--file").unwrap_or_default());
    let path: &Path = &file;
    let done = match first {
        "worker" => {
            processes::end_with_parent();
            runtime.block_on(worker::run(address(), arguments.place("--member"), arguments.plan(), path))
        }
        "trainer" => {
            processes::end_with_parent();
            let group = GROUPS[arguments.place("--group") % GROUPS.len()];
            runtime.block_on(trainer::run(address(), group, arguments.place("--member"), path))
        }
        "rank" => {
            processes::end_with_parent();
            let shard = u32::try_from(arguments.place("--member")).unwrap_or_default();
            runtime.block_on(ranks::run(address(), shard))
        }
        _ => {
            match ranks::check(&runtime, arguments.number("--seed").unwrap_or(1)) {
                Ok(found) => println!("{found}"),
                Err(fault) => {
                    println!("ranks: {fault}");
                    println!("0 passed, 1 failed");
                    return ExitCode::FAILURE;
                }
            }
            return driver::run(&runtime, arguments.number("--rounds"), arguments.number("--seed"));
        }
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(fault) => {
            println!("fault {first}: {fault}");
            ExitCode::FAILURE
        }
    }
}
