//! Runs as a table, and below it the ledgers of each.

use crate::proto::v1::{RowLedger, RunSummary};

use super::tables::{self, Column, table};
use super::{Drawing, Paint, cut, cut_middle, length};

/// The runs, one a line; then what became of the calls and rows of each.
pub(super) fn draw(runs: &[RunSummary], drawing: Drawing) -> String {
    const COLUMNS: [Column; 7] = [
        Column("run", false, 32),
        Column("open", true, 9),
        Column("groups", true, 9),
        Column("finalised", true, 9),
        Column("retired", true, 9),
        Column("gone", true, 9),
        Column("refused", true, 9),
    ];
    let cells = |run: &RunSummary| {
        [
            run.run_id.clone(),
            run.open_rollouts.to_string(),
            run.open_groups.to_string(),
            run.finalised_rollouts.to_string(),
            run.retired_rollouts.to_string(),
            run.gone_rollouts.values().sum::<u64>().to_string(),
            run.refused_requests.to_string(),
        ]
    };
    let mut out = table(&COLUMNS, &runs.iter().map(cells).collect::<Vec<_>>(), drawing);
    for run in runs {
        let ledgers = tables::ledger(&run.ledgers, drawing) + &rows(&run.rows, drawing);
        let drifts = tables::drifts(&run.drifts, drawing);
        out.push_str(&format!("\n{}\n{ledgers}{drifts}", drawing.paint(Paint::Bold, &cut(&run.run_id, drawing.width))));
    }
    out
}

/// What became of the rows, by consumer group; only what is not nought.
fn rows(ledgers: &[RowLedger], drawing: Drawing) -> String {
    let line = |ledger: &RowLedger| {
        let dropped: u64 = ledger.dropped.values().sum();
        let parts = [
            (ledger.acknowledged, "acknowledged"),
            (ledger.waiting, "waiting"),
            (ledger.leased, "leased"),
            (dropped, "dropped"),
        ];
        let parts: Vec<String> =
            parts.into_iter().filter(|(count, _)| *count > 0).map(|(count, what)| format!("{count} {what}")).collect();
        let sum = if parts.is_empty() { "0".to_owned() } else { parts.join(" + ") };
        let title = format!("rows for {}", cut_middle(&ledger.consumer_group, 16));
        let room = drawing.width.saturating_sub(length(&title) + 2);
        let line = cut(&format!("{} made = {sum}", ledger.made), room);
        format!("{}  {line}\n", drawing.paint(Paint::Bold, &title))
    };
    ledgers.iter().map(line).collect()
}
