//! The tables below the forest: agents, rows, what is missing, the ledger.

use crate::proto::v1::{
    AgentSummary, DriftCount, DriftKind, GetRolloutResponse, MissingCall, MissingCallCause, MissingCallState,
    PolicyLedger,
};

use super::super::counted;
use super::super::show_json::word;
use super::{Drawing, Paint, cut, cut_middle, length, padded, right};

/// Missing calls that are listed.
const MISSING_SHOWN_MAX: usize = 20;

/// A column of a table: its title, whether it is flush right, and the most of the width that it may take.
pub(super) struct Column(pub(super) &'static str, pub(super) bool, pub(super) usize);

/// The agents.
pub(super) fn agents(rollout: &GetRolloutResponse, drawing: Drawing) -> String {
    const COLUMNS: [Column; 6] = [
        Column("agents", false, 24),
        Column("parent", false, 16),
        Column("calls", true, 8),
        Column("kept", true, 8),
        Column("generated", true, 10),
        Column("ended", false, 24),
    ];
    let cells = |agent: &AgentSummary| {
        let ended = agent.ends.last().map(|end| word(end.status().as_str_name(), "AGENT_STATUS_"));
        [
            agent.agent_id.clone(),
            agent.parent_agent_id.clone(),
            agent.calls.to_string(),
            agent.kept_calls.to_string(),
            agent.generated_tokens.to_string(),
            ended.unwrap_or_default(),
        ]
    };
    table(&COLUMNS, &rollout.agents.iter().map(cells).collect::<Vec<_>>(), drawing)
}

/// The rows.
pub(super) fn rows(rollout: &GetRolloutResponse, drawing: Drawing) -> String {
    const COLUMNS: [Column; 8] = [
        Column("rows", true, 6),
        Column("leaf", false, 28),
        Column("agent", false, 14),
        Column("policy", false, 12),
        Column("walk", true, 6),
        Column("trains", true, 6),
        Column("tokens", true, 9),
        Column("trained", true, 9),
    ];
    let cells = |(number, row): (usize, &crate::proto::v1::RowSummary)| {
        [
            (number + 1).to_string(),
            row.leaf_call_id.clone(),
            row.agent_id.clone(),
            row.policy.clone(),
            row.walk_call_ids.len().to_string(),
            row.trained_call_ids.len().to_string(),
            row.tokens.to_string(),
            row.trained_tokens.to_string(),
        ]
    };
    table(&COLUMNS, &rollout.rows.iter().enumerate().map(cells).collect::<Vec<_>>(), drawing)
}

/// What the rollout waits for.
pub(super) fn missing(rollout: &GetRolloutResponse, drawing: Drawing) -> String {
    let Some(status) = &rollout.status else { return String::new() };
    let mut lines: Vec<String> = status.missing.iter().take(MISSING_SHOWN_MAX).map(missing_call).collect();
    let shown = lines.len() as u64;
    if status.missing_count > shown {
        lines.push(format!("… and {} more", status.missing_count - shown));
    }
    if status.missing_expected_calls > 0 {
        lines.push(format!("{} more of the expected calls", status.missing_expected_calls));
    }
    if status.agents_without_list_count > 0 {
        let agents = status.agents_without_list.join(", ");
        lines.push(format!("no kept list from {} agents: {agents}", status.agents_without_list_count));
    }
    if lines.is_empty() {
        return String::new();
    }
    let mut out = drawing.paint(Paint::Bold, "missing");
    out.push('\n');
    for line in lines {
        out.push_str(&drawing.paint(Paint::Alarm, &cut(&format!("  {line}"), drawing.width)));
        out.push('\n');
    }
    out
}

fn missing_call(missing: &MissingCall) -> String {
    let state = match missing.state() {
        MissingCallState::NeverCame => "never came",
        MissingCallState::WaitingForBase => "waits for its delta's base",
        MissingCallState::Unresolved => "is to be sent again in full",
        MissingCallState::RefusedAwaitingResend => "was refused, awaiting resend",
        MissingCallState::Unspecified => "is missing",
    };
    let cause = match missing.cause() {
        MissingCallCause::Kept if missing.agent_id.is_empty() => "kept".to_owned(),
        MissingCallCause::Kept => format!("kept by {}", missing.agent_id),
        MissingCallCause::NamedParent => format!("named as parent by {}", missing.named_by_call_id),
        MissingCallCause::NamedBase => format!("base of {}", missing.named_by_call_id),
        MissingCallCause::Unspecified => "awaited".to_owned(),
    };
    format!("{} {state} ({cause})", missing.call_id)
}

/// What became of the calls, by policy; only what is not nought.
pub(super) fn ledger(ledgers: &[PolicyLedger], drawing: Drawing) -> String {
    ledgers
        .iter()
        .map(|ledger| {
            let title = format!("ledger {}", cut_middle(&ledger.policy, 16));
            let room = drawing.width.saturating_sub(length(&title) + 2);
            format!("{}  {}\n", drawing.paint(Paint::Bold, &title), cut(&ledger_line(ledger), room))
        })
        .collect()
}

/// Drift by agent and kind, and what it costs.
pub(super) fn drifts(drifts: &[DriftCount], drawing: Drawing) -> String {
    let mut out = String::new();
    for count in drifts {
        let kind = match count.kind() {
            DriftKind::Rewind => "went back",
            DriftKind::Differs | DriftKind::Unspecified => "parted",
        };
        let agent = if count.agent_id.is_empty() { "other agents" } else { &count.agent_id };
        let what =
            format!("{} {kind}, {} row tokens repeated", counted(count.calls, "call"), count.repeated_row_tokens);
        let title = format!("drift {}", cut_middle(agent, 16));
        let room = drawing.width.saturating_sub(length(&title) + 2);
        out.push_str(&format!("{}  {}\n", drawing.paint(Paint::Bold, &title), cut(&what, room)));
    }
    out
}

fn ledger_line(ledger: &PolicyLedger) -> String {
    let gone: u64 = ledger.gone.values().sum();
    let parts = [
        (ledger.pending, "pending"),
        (ledger.trained, "trained"),
        (ledger.context, "context"),
        (ledger.no_row, "in no row"),
        (ledger.empty, "empty"),
        (ledger.not_kept, "not kept"),
        (ledger.too_long, "too long"),
        (gone, "gone"),
    ];
    let parts: Vec<String> =
        parts.into_iter().filter(|(count, _)| *count > 0).map(|(count, what)| format!("{count} {what}")).collect();
    let sum = if parts.is_empty() { "0".to_owned() } else { parts.join(" + ") };
    format!("{} accepted = {sum}", ledger.accepted)
}

/// Lines of cells under titles; columns without any text are left out.
pub(super) fn table<const N: usize>(columns: &[Column; N], lines: &[[String; N]], drawing: Drawing) -> String {
    if lines.is_empty() {
        return String::new();
    }
    let mut titles = String::new();
    let mut bodies = vec![String::new(); lines.len()];
    for (index, Column(title, flush_right, most)) in columns.iter().enumerate() {
        let widest = lines.iter().map(|cells| length(&cells[index])).max().unwrap_or(0);
        if widest == 0 {
            continue;
        }
        let width = widest.min(*most).max(length(title));
        let place = |text: &str| if *flush_right { right(text, width) } else { padded(text, width) };
        let gap = if titles.is_empty() { "" } else { "  " };
        titles.push_str(&format!("{gap}{}", place(title)));
        for (body, cells) in bodies.iter_mut().zip(lines) {
            body.push_str(&format!("{gap}{}", place(&cut_middle(&cells[index], width))));
        }
    }
    let mut out = drawing.paint(Paint::Bold, cut(&titles, drawing.width).trim_end());
    out.push('\n');
    for body in bodies {
        out.push_str(cut(body.trim_end(), drawing.width).as_str());
        out.push('\n');
    }
    out
}
