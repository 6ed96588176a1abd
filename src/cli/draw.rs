//! A rollout as text: its forest, agents, rows, what is missing, its ledger. Pure: a response in, a text out.
//!
//! The forest is drawn by `forest`, the tables by `tables`. Everything is iterative: a chain may have ten thousand
//! calls. Nothing is wider than asked for.

use crate::proto::v1::{GetRolloutResponse, RolloutState, RolloutSummary, RunSummary};

use super::counted;
use super::show_json::word;

mod forest;
mod runs;
mod tables;
#[cfg(test)]
mod tests;

/// How to draw.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Drawing {
    /// Columns.
    pub width: usize,
    /// With escape sequences for colours.
    pub colour: bool,
    /// Every call of long chains.
    pub all: bool,
}

/// Shades of text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Paint {
    /// A title.
    Bold,
    /// What matters less.
    Faint,
    /// What needs attention.
    Alarm,
    /// Advice.
    Advice,
    /// One of several things, told apart by its number.
    Nth(usize),
}

impl Drawing {
    /// A text in a shade.
    #[must_use]
    pub fn paint(&self, paint: Paint, text: &str) -> String {
        /// Colours that can be read on dark and on light ground.
        const COLOURS: [u8; 6] = [36, 33, 35, 32, 34, 31];
        let code = match paint {
            Paint::Bold => "1".to_owned(),
            Paint::Faint => "2".to_owned(),
            Paint::Alarm => "1;31".to_owned(),
            Paint::Advice => "33".to_owned(),
            Paint::Nth(number) => COLOURS[number % COLOURS.len()].to_string(),
        };
        if self.colour && !text.is_empty() { format!("\x1b[{code}m{text}\x1b[0m") } else { text.to_owned() }
    }
}

/// Everything about a rollout.
#[must_use]
pub fn draw(rollout: &GetRolloutResponse, drawing: Drawing) -> String {
    let mut out = heading(rollout.summary.as_ref(), drawing);
    if !rollout.calls.is_empty() {
        out.push('\n');
        out.push_str(&draw_forest(rollout, drawing));
    }
    for table in [tables::agents(rollout, drawing), tables::rows(rollout, drawing), tables::missing(rollout, drawing)] {
        if !table.is_empty() {
            out.push('\n');
            out.push_str(&table);
        }
    }
    let (ledger, drift) = (tables::ledger(&rollout.ledgers, drawing), tables::drifts(&rollout.drifts, drawing));
    if !(ledger.is_empty() && drift.is_empty()) {
        out.push('\n');
        out.push_str(&ledger);
        out.push_str(&drift);
    }
    out
}

/// Runs as a table, with what became of their calls and rows below.
#[must_use]
pub fn draw_runs(runs: &[RunSummary], drawing: Drawing) -> String {
    runs::draw(runs, drawing)
}

/// The forest alone.
#[must_use]
pub fn draw_forest(rollout: &GetRolloutResponse, drawing: Drawing) -> String {
    forest::draw(rollout, drawing)
}

fn heading(summary: Option<&RolloutSummary>, drawing: Drawing) -> String {
    let Some(summary) = summary else { return String::new() };
    let reference = summary.rollout.clone().unwrap_or_default();
    let name = cut(&format!("{}/{}", reference.run_id, reference.rollout_id), drawing.width.saturating_sub(8));
    let mut facts = vec![word(summary.state().as_str_name(), "ROLLOUT_STATE_")];
    if let (RolloutState::Ended, Some(ended)) = (summary.state(), &summary.ended) {
        let outcome = word(ended.outcome().as_str_name(), "ROLLOUT_OUTCOME_");
        facts = vec![if ended.reason.is_empty() { outcome } else { format!("{outcome}: {}", ended.reason) }];
    }
    if reference.attempt > 0 {
        facts.push(format!("attempt {}", reference.attempt));
    }
    match (&summary.reward, summary.state()) {
        (Some(reward), _) => facts.push(format!("reward {}", reward.value)),
        (None, RolloutState::Ended) => {}
        (None, _) => facts.push("no reward yet".to_owned()),
    }
    match summary.totals {
        Some(totals) => facts.extend([
            counted(totals.calls, "call"),
            counted(totals.agents, "agent"),
            counted(totals.generated_tokens, "generated token"),
        ]),
        None => facts.push("its calls are no longer held".to_owned()),
    }
    if !reference.group_id.is_empty() {
        facts.push(format!("group {}", reference.group_id));
    }
    if let Some(deadline) = &summary.next_deadline {
        facts.push(format!("a time limit in {} s", deadline.seconds));
    }
    let mut out = format!("rollout {}\n{}\n", drawing.paint(Paint::Bold, &name), flowing(&facts, drawing.width));
    for (is_so, what) in [
        (summary.incomplete, "finalised without some of its kept calls".to_owned()),
        (summary.conflicted, "an event with other content than an accepted one came; the first stands".to_owned()),
        (summary.refused_requests > 0, format!("{} refused", counted(summary.refused_requests, "request"))),
    ] {
        if is_so {
            out.push_str(&drawing.paint(Paint::Alarm, &cut(&format!("! {what}"), drawing.width)));
            out.push('\n');
        }
    }
    out
}

/// Facts one after another, in as many lines as it takes.
fn flowing(facts: &[String], width: usize) -> String {
    let mut lines: Vec<String> = Vec::new();
    for fact in facts {
        match lines.last_mut() {
            Some(line) if length(line) + 3 + length(fact) <= width => {
                line.push_str(" · ");
                line.push_str(fact);
            }
            _ => lines.push(cut(fact, width)),
        }
    }
    lines.join("\n")
}

/// Columns that a text takes; characters are taken to be one column wide.
fn length(text: &str) -> usize {
    text.chars().count()
}

/// A text in at most `width` columns.
fn cut(text: &str, width: usize) -> String {
    if length(text) <= width {
        return text.to_owned();
    }
    let mut kept: String = text.chars().take(width.saturating_sub(1)).collect();
    kept.push('…');
    kept
}

/// An identifier in at most `width` columns, its start and its end kept: ids differ most at their ends.
fn cut_middle(text: &str, width: usize) -> String {
    let whole = length(text);
    if whole <= width || width < 3 {
        return cut(text, width);
    }
    let (head, tail) = (width / 2, width - width / 2 - 1);
    let start: String = text.chars().take(head).collect();
    let end: String = text.chars().skip(whole - tail).collect();
    format!("{start}…{end}")
}

/// A text padded on the right to `width` columns.
fn padded(text: &str, width: usize) -> String {
    format!("{text}{}", " ".repeat(width.saturating_sub(length(text))))
}

/// A text padded on the left to `width` columns.
fn right(text: &str, width: usize) -> String {
    format!("{}{text}", " ".repeat(width.saturating_sub(length(text))))
}
