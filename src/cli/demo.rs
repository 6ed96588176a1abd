//! `hedgerow demo`: the whole way of a rollout in a second, over real gRPC, with nothing set up.
//!
//! Four workers report the twelve calls of `demo::example`, shuffled, some twice, some as deltas, the seal and the
//! reward somewhere among them; a trainer takes the rows and acknowledges them. The demo checks the rows itself.

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use clap::Args;
use indicatif::ProgressBar;
use tokio::task::JoinSet;
use tokio::time::{Instant, interval};
use tonic::Code;
use tonic::transport::Channel;

use self::trainer::Trainer;
use super::assemble::WholeRow;
use super::draw::{Drawing, Paint, draw};
use super::replay::plan::{Event, EventKind, Order, Plan};
use super::replay::reporter::{Counts, Reporter};
use super::row_json::row_json;
use super::show::colour;
use super::shuffle::SplitMix64;
use super::{Failure, client, counted, print};
use crate::proto::v1::{CreateRunRequest, GetRolloutRequest, GetRolloutResponse, RolloutState, RunSettings};
use crate::service::{self, RunningService, ServiceOptions};

mod example;
mod trainer;

/// The run, and the rollout in it.
const RUN: &str = "demo";
const ROLLOUT: &str = "twelve-calls";
/// Workers, each with a connection of its own.
const WORKERS: usize = 4;
/// Calls that are reported twice.
const REPEATS: usize = 5;
/// Columns of the output.
const WIDTH: usize = 80;
/// How long anything may take.
const PATIENCE: Duration = Duration::from_secs(10);
/// How often to look whether the rollout is where it should be.
const LOOK_INTERVAL: Duration = Duration::from_millis(10);

/// What `demo` takes.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  hedgerow demo
  hedgerow demo --seed 42                another order of events, the same rows
  hedgerow demo --json | jq .trains")]
pub struct DemoArguments {
    /// What the order of events rests on
    #[arg(long, value_name = "SEED", default_value_t = 7)]
    pub seed: u64,
    /// Print the rows as JSON lines, and nothing else
    #[arg(long)]
    pub json: bool,
}

/// Runs the demo.
///
/// # Errors
/// [`Failure::Failed`] if anything does not go as it should, the rows among it.
pub async fn run(arguments: DemoArguments) -> Result<(), Failure> {
    let free_port = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
    let options = ServiceOptions { grpc: free_port, http: Some(free_port), ..ServiceOptions::default() };
    let running = service::start(options).await.map_err(|error| Failure::Failed(error.to_string()))?;
    let outcome = Box::pin(show_all(&running, &arguments)).await;
    running.stop().await;
    outcome
}

async fn show_all(running: &RunningService, arguments: &DemoArguments) -> Result<(), Failure> {
    let drawing = Drawing { width: WIDTH, colour: colour() && !arguments.json, all: true };
    let say = |text: String| if arguments.json { Ok(()) } else { print(&text) };
    let address = format!("http://{}", running.grpc_address);
    let channel = client::connect(&address).await?;
    let settings = RunSettings::default();
    let create = CreateRunRequest { run_id: RUN.to_owned(), settings: Some(settings) };
    let created = client::admin(channel.clone()).create_run(create).await;
    created.map_err(|status| client::refused("creating the run", &status))?;

    let title = drawing.paint(Paint::Bold, "Twelve model calls of four agents become five rows.");
    say(format!("{title}\n\n"))?;
    let mut trainer = Trainer::subscribe(channel.clone(), RUN).await?;
    let counts = report(&address, arguments.seed).await?;
    say(reported(&counts, arguments.seed, running))?;
    if counts.refused > 0 {
        return Err(Failure::Failed(format!("refused: {}", counts.refusals.join("; "))));
    }
    let rollout = wait_for(&channel, |state| state == RolloutState::Finalised).await?;
    say(format!("{}\n", rollout.as_ref().map_or_else(String::new, |rollout| draw(rollout, drawing))))?;
    let units = trainer.take(example::ROWS.len(), PATIENCE).await?;
    let mut rows: Vec<&WholeRow> = units.iter().flat_map(|unit| &unit.rows).collect();
    rows.sort_by_key(|row| row.header.row_index);
    for row in rows.iter().filter(|_| arguments.json) {
        print(&format!("{}\n", row_json(row).map_err(|error| Failure::Failed(error.to_string()))?))?;
    }
    say(rows_drawn(&rows, drawing))?;
    example::check(&rows).map_err(Failure::Failed)?;
    trainer.acknowledge(&units, PATIENCE).await?;
    wait_for(&channel, |state| state == RolloutState::Ended).await?;
    say(format!(
        "\nThe trainer acknowledged {}, and the rollout is retired.\n\
         Checked: each sampled token is trained once, after exactly the tokens\n\
         it was sampled after, whatever the order of events (try --seed).\n",
        counted(rows.len() as u64, "row")
    ))
}

/// Reports everything: each worker has a connection, and a share of the events in an order of its own.
async fn report(address: &str, seed: u64) -> Result<Counts, Failure> {
    let plan = Arc::new(Plan {
        recording: example::recording(ROLLOUT),
        run: RUN.to_owned(),
        default_reward: 0.0,
        full_prompts: false,
        repeat: 1,
        group_sizes: false,
        order: Order::AsRecorded,
    });
    let mut events = plan.events_of_rollout(0, 0);
    let mut random = SplitMix64::new(seed);
    random.shuffle(&mut events);
    // Some calls come twice, the second time in full: a delta and its full form are the same call.
    let full = |event: &Event| match event.kind {
        EventKind::Call { index, .. } => Some(Event { kind: EventKind::Call { index, full: true }, ..*event }),
        EventKind::Open | EventKind::Finish => None,
    };
    let repeats: Vec<Event> = events.iter().filter_map(full).take(REPEATS).collect();
    events.extend(repeats);
    random.shuffle(&mut events);
    let mut workers = JoinSet::new();
    for worker in 0..WORKERS {
        let share: Vec<Event> = events.iter().copied().skip(worker).step_by(WORKERS).collect();
        let reporter = Reporter::new(Arc::clone(&plan), address.to_owned(), share.into_iter(), ProgressBar::hidden());
        workers.spawn(reporter.run());
    }
    let mut all = Counts::default();
    while let Some(finished) = workers.join_next().await {
        all.add(finished.map_err(|error| Failure::Failed(format!("a worker's task ended: {error}")))??);
    }
    Ok(all)
}

fn reported(counts: &Counts, seed: u64, running: &RunningService) -> String {
    let deltas = example::deltas();
    format!(
        "service   gRPC on {}, for as long as this runs\n\
         reported  by {WORKERS} workers, shuffled (seed {seed}), {deltas} calls as deltas, {REPEATS} calls twice\n\
         answers   {} accepted, {}, {} refused\n\n",
        running.grpc_address,
        counts.calls,
        counted(counts.duplicates, "duplicate"),
        counts.refused
    )
}

/// Waits until the rollout is in such a state; `None` if it is gone altogether, which only an ended one may be.
async fn wait_for(
    channel: &Channel,
    is_there: impl Fn(RolloutState) -> bool,
) -> Result<Option<GetRolloutResponse>, Failure> {
    let begin = Instant::now();
    let mut looks = interval(LOOK_INTERVAL);
    loop {
        looks.tick().await;
        let request = GetRolloutRequest {
            run_id: RUN.to_owned(),
            rollout_id: ROLLOUT.to_owned(),
            ..GetRolloutRequest::default()
        };
        let state = match client::inspect(channel.clone()).get_rollout(request).await {
            Ok(rollout) => {
                let rollout = rollout.into_inner();
                let state = rollout.summary.as_ref().map_or(RolloutState::Unspecified, |summary| summary.state());
                if is_there(state) {
                    return Ok(Some(rollout));
                }
                state
            }
            Err(status) if status.code() == Code::NotFound && is_there(RolloutState::Ended) => return Ok(None),
            Err(status) => return Err(client::refused("looking at the rollout", &status)),
        };
        if begin.elapsed() > PATIENCE {
            return Err(Failure::Failed(format!("after {PATIENCE:?} the rollout is still {}", state.as_str_name())));
        }
    }
}

/// The rows: a square for each token, and the calls of the walk.
fn rows_drawn(rows: &[&WholeRow], drawing: Drawing) -> String {
    let widest = rows.iter().map(|row| row.loss_mask.len()).max().unwrap_or(0);
    let legend = drawing.paint(Paint::Faint, "█ [C1] trained   ░ C1 context");
    let mut out = format!("{}   {legend}\n", drawing.paint(Paint::Bold, "rows as the trainer got them"));
    for row in rows {
        let squares: String = row.loss_mask.iter().map(|&trained| if trained == 1 { '█' } else { '░' }).collect();
        let padding = " ".repeat(widest - row.loss_mask.len());
        let calls: Vec<String> = row
            .spans
            .iter()
            .map(|span| if span.trained { format!("[{}]", span.call_id) } else { span.call_id.clone() })
            .collect();
        let (number, agent) = (row.header.row_index + 1, &row.header.agent_id);
        out.push_str(&format!("{number:>4}  {agent}  {squares}{padding}  {}\n", calls.join(" ")));
    }
    out
}
