//! `hedgerow runs`: the runs of a service, how their rollouts stand, and what became of their calls and rows.

use clap::Args;
use serde_json::{Value, json};

use super::draw::draw_runs;
use super::show::drawing;
use super::show_json::{drift_count, ledger};
use super::{Failure, ServiceAddress, client, print, remark};
use crate::proto::v1::{ListRunsRequest, RowLedger, RunSummary};

/// What `runs` takes.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  hedgerow runs                                         a table, and the ledgers of each run
  hedgerow runs --json | jq '.[] | {run, open_rollouts}'")]
pub struct RunsArguments {
    /// Where the service is
    #[command(flatten)]
    pub service: ServiceAddress,
    /// Print everything as JSON
    #[arg(long)]
    pub json: bool,
}

/// Lists the runs.
///
/// # Errors
/// [`Failure::Failed`] if the service is not there.
pub async fn run(arguments: RunsArguments) -> Result<(), Failure> {
    let mut inspect = client::inspect(client::connect(&arguments.service.address).await?);
    let mut runs = Vec::new();
    let mut request = ListRunsRequest::default();
    loop {
        let page = inspect.list_runs(request.clone()).await;
        let page = page.map_err(|status| client::refused("the list of runs", &status))?.into_inner();
        runs.extend(page.runs);
        if page.next_page_token.is_empty() {
            break;
        }
        request.page_token = page.next_page_token;
    }
    if arguments.json {
        let runs: Vec<Value> = runs.iter().map(run_json).collect();
        return print(&format!("{}\n", Value::from(runs)));
    }
    if runs.is_empty() {
        remark("hedgerow: there are no runs yet; each is made when it is first heard of");
        return Ok(());
    }
    print(&draw_runs(&runs, drawing(None, true)))
}

fn run_json(run: &RunSummary) -> Value {
    json!({
        "run": run.run_id, "create_time_seconds": run.create_time.map(|time| time.seconds),
        "settings_version": run.settings_version, "open_rollouts": run.open_rollouts, "open_groups": run.open_groups,
        "finalised_rollouts": run.finalised_rollouts, "retired_rollouts": run.retired_rollouts,
        "gone_rollouts": run.gone_rollouts, "refused_requests": run.refused_requests,
        "ledgers": run.ledgers.iter().map(ledger).collect::<Vec<_>>(),
        "rows": run.rows.iter().map(row_ledger).collect::<Vec<_>>(),
        "drifts": run.drifts.iter().map(drift_count).collect::<Vec<_>>(),
    })
}

fn row_ledger(rows: &RowLedger) -> Value {
    json!({
        "consumer_group": rows.consumer_group, "policy": Some(&rows.policy).filter(|policy| !policy.is_empty()),
        "made": rows.made, "acknowledged": rows.acknowledged, "waiting": rows.waiting, "leased": rows.leased,
        "dropped": rows.dropped,
    })
}
