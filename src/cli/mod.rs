//! The command line: one file for each subcommand, and what several of them share.
//!
//! Everything but `serve` and `demo` is a plain gRPC client. Results go to stdout, everything else to stderr.
//! Exit codes: 0 done, 1 failed, 2 wrong usage (which a bad configuration is, too).

use std::fmt;
use std::io::{self, Write as _};
use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Parser, Subcommand};

pub mod again;
pub mod assemble;
pub mod check_config;
pub mod client;
pub mod demo;
pub mod draw;
pub mod recording;
pub mod replay;
pub mod row_json;
pub mod runs;
pub mod serve;
pub mod show;
pub mod show_json;
pub mod shuffle;
pub mod tail;

/// Turns the forest of model calls of an agent's rollout into training rows, live, over gRPC.
#[derive(Debug, Parser)]
#[command(name = "hedgerow", version, propagate_version = true, after_help = EXAMPLES)]
pub struct Cli {
    /// The service's configuration, a TOML file
    #[arg(long, global = true, value_name = "FILE", env = "HEDGEROW_CONFIG")]
    pub config: Option<PathBuf>,
    /// What to do
    #[command(subcommand)]
    pub command: Command,
}

const EXAMPLES: &str = "\
Examples:
  hedgerow demo                              see it work, in seconds, with nothing set up
  hedgerow serve                             listen on 127.0.0.1:50051
  hedgerow replay calls.jsonl.gz --run r1    report recorded calls to it
  hedgerow runs                              what is there, and what became of it
  hedgerow show my-rollout --run r1          draw a rollout's forest
  hedgerow tail --run r1 | jq .row_id        take its rows as JSON lines

Exit codes: 0 done, 1 failed, 2 wrong usage.";

/// The subcommands.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Run the service
    Serve(serve::ServeArguments),
    /// Start a service, report twelve calls of four agents to it, and show the five rows they become
    Demo(demo::DemoArguments),
    /// Report recorded calls to a service
    Replay(replay::ReplayArguments),
    /// Print a run's rows as JSON lines, holding nothing back
    Tail(tail::TailArguments),
    /// List the runs, and what became of their calls and rows
    Runs(runs::RunsArguments),
    /// Draw a rollout: its forest, agents, rows, and what it waits for
    Show(show::ShowArguments),
    /// Check the configuration and print what is in effect
    CheckConfig(check_config::CheckConfigArguments),
}

/// Why a command did not do what it was asked to.
#[derive(Debug)]
pub enum Failure {
    /// It was asked wrongly; exit code 2.
    Usage(String),
    /// It tried and failed; exit code 1.
    Failed(String),
    /// Nobody reads its output any more, which is no failure.
    OutputClosed,
}

impl fmt::Display for Failure {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Usage(message) | Self::Failed(message) => formatter.write_str(message),
            Self::OutputClosed => formatter.write_str("nobody reads the output"),
        }
    }
}

impl From<io::Error> for Failure {
    fn from(error: io::Error) -> Self {
        if error.kind() == io::ErrorKind::BrokenPipe { Self::OutputClosed } else { Self::Failed(error.to_string()) }
    }
}

/// Where a client finds the service.
#[derive(Clone, Debug, clap::Args)]
pub struct ServiceAddress {
    /// Where the service listens
    #[arg(long, value_name = "URL", env = "HEDGEROW_ADDRESS", default_value = "http://127.0.0.1:50051")]
    pub address: String,
}

/// Runs a command and gives its exit code.
#[must_use]
pub fn run(cli: Cli) -> ExitCode {
    let Cli { config, command } = cli;
    let outcome = match command {
        Command::CheckConfig(arguments) => check_config::run(config.as_deref(), &arguments),
        Command::Serve(arguments) => serve::run(config.as_deref(), &arguments),
        Command::Demo(arguments) => block_on(demo::run(arguments)),
        Command::Replay(arguments) => block_on(replay::run(arguments)),
        Command::Tail(arguments) => block_on(tail::run(arguments)),
        Command::Show(arguments) => block_on(show::run(arguments)),
        Command::Runs(arguments) => block_on(runs::run(arguments)),
    };
    match outcome {
        Ok(()) | Err(Failure::OutputClosed) => ExitCode::SUCCESS,
        Err(failure) => {
            // If even stderr is closed, the exit code still says it.
            let _ = writeln!(io::stderr(), "hedgerow: {failure}");
            ExitCode::from(if matches!(failure, Failure::Usage(_)) { 2 } else { 1 })
        }
    }
}

fn block_on(command: impl Future<Output = Result<(), Failure>>) -> Result<(), Failure> {
    crate::service::runtime().build()?.block_on(command)
}

/// Writes a whole text to stdout.
fn print(text: &str) -> Result<(), Failure> {
    let mut out = io::stdout().lock();
    out.write_all(text.as_bytes())?;
    out.flush()?;
    Ok(())
}

/// Writes a line to stderr; if that is closed, nobody wants it.
fn remark(line: &str) {
    let _ = writeln!(io::stderr(), "{line}");
}

/// `1 call`, `2 calls`.
fn counted(count: u64, one: &str) -> String {
    let plural = if count == 1 { "" } else { "s" };
    format!("{count} {one}{plural}")
}
