//! `hedgerow show`: one rollout as a person wants to see it: its forest, its agents, its rows, what it waits for.

use std::io::IsTerminal as _;

use clap::Args;

use super::draw::{Drawing, draw};
use super::show_json::rollout_json;
use super::{Failure, ServiceAddress, client, print};
use crate::proto::v1::{GetRolloutRequest, GetRolloutResponse};

/// Columns of a drawing when nothing says how wide the terminal is.
const WIDTH_DEFAULT: usize = 100;
/// Columns below which a drawing makes no sense.
const WIDTH_MIN: u16 = 40;

/// What `show` takes.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  hedgerow show my-rollout --run r1
  hedgerow show my-rollout --run r1 --all | less        every call, long chains too
  hedgerow show my-rollout --run r1 --json | jq .rows")]
pub struct ShowArguments {
    /// The rollout
    #[arg(value_name = "ROLLOUT")]
    pub rollout: String,
    /// Where the service is
    #[command(flatten)]
    pub service: ServiceAddress,
    /// The run
    #[arg(long, value_name = "NAME", default_value = "default")]
    pub run: String,
    /// Only rows and ledger of this policy
    #[arg(long, value_name = "POLICY")]
    pub policy: Option<String>,
    /// Show the rows as they are with this limit on their length
    #[arg(long, value_name = "TOKENS", default_value_t = 0, hide_default_value = true)]
    pub max_row_tokens: u64,
    /// Columns to draw in [default: the terminal's]
    #[arg(long, value_name = "COLUMNS", value_parser = clap::value_parser!(u16).range(i64::from(WIDTH_MIN)..))]
    pub width: Option<u16>,
    /// Draw every call of long chains
    #[arg(long)]
    pub all: bool,
    /// Print everything as JSON
    #[arg(long)]
    pub json: bool,
}

/// Draws the rollout.
///
/// # Errors
/// [`Failure::Failed`] if the service is not there, or has no such rollout.
pub async fn run(arguments: ShowArguments) -> Result<(), Failure> {
    let channel = client::connect(&arguments.service.address).await?;
    let request = GetRolloutRequest {
        run_id: arguments.run,
        rollout_id: arguments.rollout.clone(),
        policy: arguments.policy,
        max_row_tokens: arguments.max_row_tokens,
    };
    let answer = client::inspect(channel).get_rollout(request).await;
    let rollout = answer.map_err(|status| client::refused(&arguments.rollout, &status))?.into_inner();
    if arguments.json {
        return print(&format!("{}\n", rollout_json(&rollout)));
    }
    print(&drawn(&rollout, arguments.width, arguments.all))
}

/// The drawing for this terminal.
pub(super) fn drawn(rollout: &GetRolloutResponse, width: Option<u16>, all: bool) -> String {
    draw(rollout, drawing(width, all))
}

/// How to draw on this terminal.
pub(super) fn drawing(width: Option<u16>, all: bool) -> Drawing {
    let width = width.map_or_else(terminal_width, usize::from);
    Drawing { width, colour: colour(), all }
}

/// Whether stdout shows colours and wants them.
pub(super) fn colour() -> bool {
    std::io::stdout().is_terminal() && std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty())
}

fn terminal_width() -> usize {
    let told = std::env::var("COLUMNS").ok().and_then(|columns| columns.parse().ok());
    told.filter(|&columns| columns >= usize::from(WIDTH_MIN)).unwrap_or(WIDTH_DEFAULT)
}
