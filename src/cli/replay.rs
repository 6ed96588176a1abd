//! `hedgerow replay`: reports recorded calls to a service, as a fleet of workers would.
//!
//! The files are read and checked as a whole first; then the rollouts are spread over some streams, each pipelined with
//! a bounded window. What is refused for a moment is sent again after the delay that the service asks for, what is to be
//! sent in full is, and a cut stream is opened again and told again what had no answer.

use std::io::IsTerminal as _;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use clap::Args;
use indicatif::{ProgressBar, ProgressStyle};
use tokio::task::JoinSet;

use self::plan::{Order, Plan};
use self::reporter::{Counts, Reporter};
use super::recording::Recording;
use super::{Failure, ServiceAddress, counted, print, remark};

pub mod plan;
pub mod reporter;

/// Refusals that are printed; the rest is counted.
const REFUSALS_SHOWN_MAX: usize = 20;
/// Most streams.
const STREAMS_MAX: i64 = 256;

/// What `replay` takes.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  hedgerow replay calls.jsonl.gz
  hedgerow replay calls.jsonl --run r1 --reward 1 --streams 4
  hedgerow replay calls.jsonl --shuffle 7 --full-prompts     any order, every prompt in full
  hedgerow replay calls.jsonl --repeat 100 --streams 8       a hundred times: ID, ID#2, ID#3 …

A line is a call:
  {\"rollout\": \"r\", \"agent\": \"main\", \"parent_agent\": null, \"call\": \"c1\", \"seq\": 1, \"prompt_token_ids\": [1, 2],
   \"generation_token_ids\": [3], \"generation_log_probs\": [-0.5]}
    its prompt may instead begin with ids of an earlier line's call:
      \"prefix_of\": \"c1\", \"prefix_len\": 3, \"prompt_suffix_token_ids\": [4]
    may be left out: group, reward, model, policy, policy_version, kind, finish_reason, train and kept (true or false),
      link (\"infer\", \"root\" or {\"parent\": \"c1\"})
or a rollout's end, with lists of the kept calls or null, which keeps all:
  {\"rollout\": \"r\", \"reward\": 1.0, \"kept\": {\"main\": [\"c1\"]}}

A bad line is an error with its number, and nothing is sent.")]
pub struct ReplayArguments {
    /// Recorded calls: JSON Lines, gzip or not
    #[arg(required = true, value_name = "FILE")]
    pub files: Vec<PathBuf>,
    /// Where the service is
    #[command(flatten)]
    pub service: ServiceAddress,
    /// The run to report to
    #[arg(long, value_name = "NAME", default_value = "default")]
    pub run: String,
    /// The reward of rollouts whose recording has none
    #[arg(long, value_name = "REWARD", default_value_t = 0.0, allow_negative_numbers = true)]
    pub reward: f64,
    /// Send every prompt in full, instead of what is new in it
    #[arg(long)]
    pub full_prompts: bool,
    /// Report each rollout as often as this, under the ids ID, ID#2, ID#3 … (and groups alike)
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..))]
    pub repeat: u32,
    /// Spread the rollouts over as many streams
    #[arg(long, value_name = "K", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=STREAMS_MAX))]
    pub streams: u32,
    /// Shuffle the events of each rollout, its finish among them
    #[arg(long, value_name = "SEED")]
    pub shuffle: Option<u64>,
    /// With --shuffle: keep the finish last
    #[arg(long, requires = "shuffle")]
    pub seal_last: bool,
    /// Say that each group has as many rollouts as the recording has of it
    #[arg(long)]
    pub group_sizes: bool,
    /// Print the summary as JSON
    #[arg(long)]
    pub json: bool,
}

/// Replays some files.
///
/// # Errors
/// [`Failure::Usage`] for a bad option, [`Failure::Failed`] for a bad recording, or if the service is not there or refused something.
pub async fn run(arguments: ReplayArguments) -> Result<(), Failure> {
    if !arguments.reward.is_finite() {
        return Err(Failure::Usage("--reward: is not finite".to_owned()));
    }
    crate::ids::check_identifier(&arguments.run).map_err(|error| Failure::Usage(format!("--run: {error}")))?;
    let recording = Recording::read(&arguments.files).map_err(|error| Failure::Failed(error.to_string()))?;
    for line in &recording.remarks {
        remark(&format!("hedgerow: {line}"));
    }
    let json = arguments.json;
    let streams = arguments.streams;
    let address = arguments.service.address.clone();
    let plan = Arc::new(plan_of(arguments, recording));
    let progress = progress_bar(plan.calls());
    let begin = Instant::now();
    let counts = report(&plan, streams, &address, &progress).await;
    progress.finish_and_clear();
    let counts = counts?;
    let seconds = begin.elapsed().as_secs_f64();
    for line in &counts.refusals {
        remark(&format!("refused: {line}"));
    }
    let hidden = counts.refused.saturating_sub(counts.refusals.len() as u64);
    if hidden > 0 {
        remark(&format!("refused: … and {hidden} more"));
    }
    let rollouts = plan.rollouts() as u64;
    print(&if json { summary_json(&counts, rollouts, seconds) } else { summary(&counts, rollouts, seconds) })?;
    match counts.refused {
        0 => Ok(()),
        refused => Err(Failure::Failed(format!("{} refused", counted(refused, "request")))),
    }
}

fn plan_of(arguments: ReplayArguments, recording: Recording) -> Plan {
    Plan {
        recording,
        run: arguments.run,
        default_reward: arguments.reward,
        full_prompts: arguments.full_prompts,
        repeat: arguments.repeat,
        group_sizes: arguments.group_sizes,
        order: match arguments.shuffle {
            None => Order::AsRecorded,
            Some(seed) => Order::Shuffled { seed, seal_last: arguments.seal_last },
        },
    }
}

/// Reports everything over some streams, and adds up what became of it.
async fn report(plan: &Arc<Plan>, streams: u32, address: &str, progress: &ProgressBar) -> Result<Counts, Failure> {
    let mut reporters = JoinSet::new();
    for stream in 0..streams {
        let events = Plan::events_of_stream(Arc::clone(plan), stream, streams);
        let reporter = Reporter::new(Arc::clone(plan), address.to_owned(), events, progress.clone());
        reporters.spawn(reporter.run());
    }
    let mut all = Counts::default();
    while let Some(finished) = reporters.join_next().await {
        let counts = finished.map_err(|error| Failure::Failed(format!("a stream's task ended: {error}")))??;
        all.add(counts);
        all.refusals.truncate(REFUSALS_SHOWN_MAX);
    }
    Ok(all)
}

/// A bar over the calls; none when nobody looks.
fn progress_bar(calls: u64) -> ProgressBar {
    if !std::io::stderr().is_terminal() {
        return ProgressBar::hidden();
    }
    let style = ProgressStyle::with_template("{bar:36} {human_pos}/{human_len} calls  {per_sec}  {eta} left");
    ProgressBar::new(calls).with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()))
}

fn summary(counts: &Counts, rollouts: u64, seconds: f64) -> String {
    let mut parts = vec![counted(counts.calls, "call") + " accepted", counted(counts.duplicates, "duplicate")];
    for (count, what) in [
        (counts.already_ended, "already ended"),
        (counts.resent_in_full, "sent again in full"),
        (counts.retried, "tried again"),
    ] {
        if count > 0 {
            parts.push(format!("{count} {what}"));
        }
    }
    parts.push(format!("{} refused", counts.refused));
    format!(
        "{}; {}, {} prompt and {} generated tokens, {seconds:.2} s\n",
        parts.join(", "),
        counted(rollouts, "rollout"),
        counts.prompt_tokens,
        counts.generated_tokens,
    )
}

fn summary_json(counts: &Counts, rollouts: u64, seconds: f64) -> String {
    let Counts { calls, duplicates, already_ended, refused, resent_in_full, retried, .. } = counts;
    let json = serde_json::json!({
        "calls": calls, "duplicates": duplicates, "already_ended": already_ended, "refused": refused,
        "resent_in_full": resent_in_full, "retried": retried, "rollouts": rollouts,
        "prompt_tokens": counts.prompt_tokens, "generated_tokens": counts.generated_tokens,
        "finalised": counts.finalised, "seconds": seconds,
    });
    format!("{json}\n")
}
