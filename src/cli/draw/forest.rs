//! The forest: each tree from its root, chains flat, only forks indent.
//!
//! At a fork the line of the node's own agent goes on in the same column, and the others stand beside it, before it. So
//! a chain is as wide as its first call, and two hundred calls with a fork at each stay readable.

use std::collections::HashMap;

use crate::proto::v1::{
    BrokenLinkReason, CallFate, CallSummary, Drift, DriftKind, GetRolloutResponse, LinkKind, MissingCallState, Verdict,
};

use super::{Drawing, Paint, cut, cut_middle, length, padded, right};

/// Plain calls in a row from which on a chain is folded, and how many of them stay at its start and its end.
const FOLD_MIN: usize = 10;
const FOLD_HEAD: usize = 3;
const FOLD_TAIL: usize = 2;
/// Ids shown from each side of a first difference, so that both sides fit into a line.
const IDS_SHOWN: usize = 4;
/// Columns of branches that are kept.
const BRANCHES_KEPT_MAX: usize = 200;

/// Who continues whom, by index into the calls.
struct Forest<'response> {
    calls: &'response [CallSummary],
    children: Vec<Vec<usize>>,
    roots: Vec<usize>,
    /// For each trained call, the number of its row in the table of rows.
    rows: HashMap<&'response str, usize>,
    agents: HashMap<&'response str, usize>,
}

/// A line of the drawing, before its columns are known.
struct Line {
    /// The branches before the call.
    branches: String,
    /// The branches before what is said below the call.
    branches_below: String,
    call: usize,
    /// Nothing but a call that continues the one above.
    plain: bool,
}

/// One column of the drawing: a chain, and the branches that wait to be drawn beside it.
struct Column {
    prefix: String,
    side: std::vec::IntoIter<usize>,
    next: Option<usize>,
}

/// Columns of a line, and their widths.
struct Widths {
    id: usize,
    agent: usize,
    kind: usize,
    prompt: usize,
    generated: usize,
}

/// The whole forest.
pub(super) fn draw(response: &GetRolloutResponse, drawing: Drawing) -> String {
    let forest = Forest::new(response);
    let mut visited = vec![false; forest.calls.len()];
    let trees: Vec<Vec<Line>> = forest.roots.iter().map(|&root| forest.tree(root, &mut visited)).collect();
    // Waiting, empty, not kept. If parents ever went in a circle, the drawing would still show every call.
    let loose: Vec<Line> = (0..visited.len()).filter(|&call| !visited[call]).map(Line::loose).collect();
    let widths = forest.widths(trees.iter().flatten().chain(&loose), drawing.width);
    let mut out = String::new();
    for (index, tree) in trees.iter().enumerate() {
        if index > 0 && (tree.len() > 1 || trees[index - 1].len() > 1) {
            out.push('\n');
        }
        forest.write(&mut out, tree, &widths, drawing);
    }
    if !loose.is_empty() {
        out.push_str(if trees.is_empty() { "" } else { "\n" });
        out.push_str(&drawing.paint(Paint::Bold, "in no tree"));
        out.push('\n');
        forest.write(&mut out, &loose, &widths, drawing);
    }
    out
}

impl Line {
    fn loose(call: usize) -> Self {
        Self { branches: "  ".to_owned(), branches_below: "  ".to_owned(), call, plain: false }
    }
}

impl<'response> Forest<'response> {
    fn new(response: &'response GetRolloutResponse) -> Self {
        let calls = response.calls.as_slice();
        let indices: HashMap<&str, usize> =
            calls.iter().enumerate().map(|(index, call)| (call.call_id.as_str(), index)).collect();
        let mut children = vec![Vec::new(); calls.len()];
        let mut candidates = Vec::new();
        for (index, call) in calls.iter().enumerate() {
            let verdict = call.verdict.as_ref();
            let parent = verdict.and_then(|verdict| indices.get(verdict.parent_call_id.as_str()));
            let kind = verdict.map_or(LinkKind::Unspecified, Verdict::kind);
            let in_a_tree = call.kept && !matches!(kind, LinkKind::Waiting | LinkKind::Empty);
            match parent {
                Some(&parent) => children[parent].push(index),
                None => candidates.push((index, in_a_tree)),
            }
        }
        let is_root = |&(index, in_a_tree): &(usize, bool)| in_a_tree || !children[index].is_empty();
        let roots = candidates.into_iter().filter(is_root).map(|(index, _)| index).collect();
        let trained = |(number, row): (usize, &'response crate::proto::v1::RowSummary)| {
            row.trained_call_ids.iter().map(move |call| (call.as_str(), number + 1))
        };
        let agents = response.agents.iter().map(|agent| agent.agent_id.as_str());
        let agents = agents.chain(calls.iter().map(|call| call.agent_id.as_str()));
        let mut numbers = HashMap::new();
        for agent in agents {
            let next = numbers.len();
            numbers.entry(agent).or_insert(next);
        }
        let rows = response.rows.iter().enumerate().flat_map(trained).collect();
        Self { calls, children, roots, rows, agents: numbers }
    }

    /// Which child goes on in its parent's column: one in the forest, of the parent's agent, the last of several.
    fn going_on(&self, call: usize) -> Option<usize> {
        let agent = &self.calls[call].agent_id;
        let rank = |child: usize| {
            let call = &self.calls[child];
            (call.kept && call.generated_tokens > 0, call.agent_id == *agent, child)
        };
        self.children[call].iter().copied().max_by_key(|&child| rank(child))
    }

    fn tree(&self, root: usize, visited: &mut [bool]) -> Vec<Line> {
        let mut lines = Vec::new();
        let mut columns = vec![self.visit(root, "", "", visited, &mut lines)];
        while let Some(column) = columns.last_mut() {
            if let Some(side) = column.side.next() {
                let (lead, prefix) = (format!("{}├─", column.prefix), deeper(&column.prefix));
                columns.push(self.visit(side, &lead, &prefix, visited, &mut lines));
            } else if let Some(next) = column.next.take() {
                let prefix = std::mem::take(&mut column.prefix);
                let first = lines.len();
                *column = self.visit(next, &prefix, &prefix, visited, &mut lines);
                let glyph = if column.next.is_some() { "├ " } else { "└ " };
                if let Some(line) = lines.get_mut(first) {
                    line.branches = format!("{prefix}{glyph}");
                    line.plain = self.children[line.call].len() <= 1 && self.is_plain(line.call);
                }
            } else {
                columns.pop();
            }
        }
        lines
    }

    /// Draws a call as the first of its column, and gives the column as it is below it.
    fn visit(&self, call: usize, lead: &str, prefix: &str, visited: &mut [bool], lines: &mut Vec<Line>) -> Column {
        visited[call] = true;
        let next = self.going_on(call).filter(|&next| !visited[next]);
        let side: Vec<usize> =
            self.children[call].iter().copied().filter(|&child| Some(child) != next && !visited[child]).collect();
        let glyph = match (next, lead.is_empty()) {
            (Some(_), _) => "┬ ",
            (None, true) => "╶ ",
            (None, false) => "─ ",
        };
        let below = if next.is_some() { "│ " } else { "  " };
        lines.push(Line {
            branches: format!("{lead}{glyph}"),
            branches_below: format!("{prefix}{below}"),
            call,
            plain: false,
        });
        Column { prefix: prefix.to_owned(), side: side.into_iter(), next }
    }

    /// Nothing about the call needs a look.
    fn is_plain(&self, call: usize) -> bool {
        let call = &self.calls[call];
        let linked =
            call.verdict.as_ref().is_some_and(|verdict| verdict.kind() == LinkKind::Child && verdict.drift.is_none());
        linked && call.kept && matches!(call.kind.as_str(), "" | "turn")
    }

    fn widths<'line>(&self, lines: impl Iterator<Item = &'line Line>, width: usize) -> Widths {
        let mut widths = Widths { id: 0, agent: 0, kind: 0, prompt: 0, generated: 0 };
        for line in lines {
            let call = &self.calls[line.call];
            widths.id = widths.id.max(length(&line.branches) + length(&call.call_id));
            widths.agent = widths.agent.max(length(&call.agent_id));
            widths.kind = widths.kind.max(length(kind(call)));
            widths.prompt = widths.prompt.max(prompt_tokens(call).len());
            widths.generated = widths.generated.max(call.generated_tokens.to_string().len());
        }
        widths.id = widths.id.min(width * 3 / 8);
        widths.agent = widths.agent.min(width / 7);
        widths.kind = widths.kind.min(width / 9);
        widths
    }

    fn write(&self, out: &mut String, lines: &[Line], widths: &Widths, drawing: Drawing) {
        let mut at = 0;
        while at < lines.len() {
            let run = self.foldable(&lines[at..]);
            if drawing.all || run < FOLD_MIN {
                for line in &lines[at..at + run.max(1)] {
                    self.write_line(out, line, widths, drawing);
                }
            } else {
                let (head, rest) = lines[at..at + run].split_at(FOLD_HEAD);
                let (folded, tail) = rest.split_at(rest.len() - FOLD_TAIL);
                head.iter().for_each(|line| self.write_line(out, line, widths, drawing));
                let prefix = folded[0].branches.strip_suffix("├ ").unwrap_or_default();
                let fold = format!("{prefix}┆ … {} calls …", folded.len());
                out.push_str(&drawing.paint(Paint::Faint, &cut(&fold, drawing.width)));
                out.push('\n');
                tail.iter().for_each(|line| self.write_line(out, line, widths, drawing));
            }
            at += run.max(1);
        }
    }

    /// How many lines from the first on are plain calls of one agent with one fate in one column.
    fn foldable(&self, lines: &[Line]) -> usize {
        let Some(first) = lines.first() else { return 0 };
        let same = |line: &&Line| {
            line.plain
                && line.branches == first.branches
                && self.calls[line.call].agent_id == self.calls[first.call].agent_id
                && self.fate(&self.calls[line.call]) == self.fate(&self.calls[first.call])
        };
        lines.iter().take_while(same).count()
    }

    fn write_line(&self, out: &mut String, line: &Line, widths: &Widths, drawing: Drawing) {
        let call = &self.calls[line.call];
        let branches = shallow(&line.branches, widths.id);
        let id = cut_middle(&call.call_id, widths.id.saturating_sub(length(&branches)).max(4));
        let gap = " ".repeat((widths.id + 2).saturating_sub(length(&branches) + length(&id)));
        let agent = padded(&cut_middle(&call.agent_id, widths.agent), widths.agent);
        let mut figures = format!(
            "  {}→{}  ",
            right(&prompt_tokens(call), widths.prompt),
            padded(&call.generated_tokens.to_string(), widths.generated)
        );
        if widths.kind > 0 {
            figures.push_str(&padded(&cut(kind(call), widths.kind), widths.kind + 2));
        }
        let taken = [&branches, &id, &gap, &agent, &figures].into_iter().map(|text| length(text)).sum();
        let fate = cut(&self.fate(call), drawing.width.saturating_sub(taken));
        let goes_on = matches!(call.fate(), CallFate::Trained | CallFate::Pending);
        let fate = if goes_on { fate } else { drawing.paint(Paint::Faint, &fate) };
        let number = self.agents.get(call.agent_id.as_str()).copied().unwrap_or(0);
        let (branches, agent) = (drawing.paint(Paint::Faint, &branches), drawing.paint(Paint::Nth(number), &agent));
        out.push_str(format!("{branches}{id}{gap}{agent}{figures}{fate}").trim_end_matches(' '));
        out.push('\n');
        for (paint, marker) in markers(call) {
            let below = format!("{}  {marker}", shallow(&line.branches_below, widths.id));
            out.push_str(&drawing.paint(paint, &cut(&below, drawing.width)));
            out.push('\n');
        }
    }

    /// What becomes of a call, in words.
    fn fate(&self, call: &CallSummary) -> String {
        let row = self.rows.get(call.call_id.as_str());
        let verdict = call.verdict.as_ref();
        if let Some(verdict) = verdict.filter(|verdict| verdict.kind() == LinkKind::Waiting) {
            return format!("waits for {}", verdict.waiting_for_call_id);
        }
        match (call.fate(), row) {
            (CallFate::Trained, Some(row)) => format!("trained, row {row}"),
            (CallFate::Pending, Some(row)) => format!("pending, row {row}"),
            (CallFate::Trained, None) => "trained".to_owned(),
            (CallFate::Pending, None) if !call.kept => "pending, not kept".to_owned(),
            (CallFate::Pending, None) => "pending".to_owned(),
            (CallFate::Context, _) => "context".to_owned(),
            (CallFate::NoRow, _) => "in no row".to_owned(),
            (CallFate::Empty, _) => "generated nothing".to_owned(),
            (CallFate::NotKept, _) => "not kept".to_owned(),
            (CallFate::TooLong, _) => "too long".to_owned(),
            (CallFate::Gone, _) => "gone".to_owned(),
            (CallFate::Unspecified, _) => String::new(),
        }
    }
}

/// The word of a call's kind, where it is worth one.
fn kind(call: &CallSummary) -> &str {
    if call.kind == "turn" { "" } else { &call.kind }
}

fn prompt_tokens(call: &CallSummary) -> String {
    call.prompt_tokens.map_or("?".to_owned(), |tokens| tokens.to_string())
}

/// Branches that leave room for an id: of deep nesting only its end.
fn shallow(branches: &str, width: usize) -> String {
    let (room, whole) = ((width * 2 / 3).max(4), length(branches));
    if whole <= room {
        return branches.to_owned();
    }
    let end: String = branches.chars().skip(whole - room + 1).collect();
    format!("…{end}")
}

/// The branches of a column beside this one. Nested too deeply to be shown, they keep their end.
fn deeper(prefix: &str) -> String {
    let whole = length(prefix);
    let kept: String = prefix.chars().skip(whole.saturating_sub(BRANCHES_KEPT_MAX)).collect();
    format!("{kept}│ ")
}

/// What is said below a call: a broken link, drift, tokens that are not known.
fn markers(call: &CallSummary) -> Vec<(Paint, String)> {
    let mut markers = Vec::new();
    let missing = match call.missing_state() {
        MissingCallState::WaitingForBase => Some("its delta's base has not come"),
        MissingCallState::Unresolved => Some("its delta's base was another: to be sent again in full"),
        MissingCallState::RefusedAwaitingResend => Some("it was refused, and is to be sent again"),
        MissingCallState::NeverCame => Some("it never came"),
        MissingCallState::Unspecified => None,
    };
    markers.extend(missing.map(|what| (Paint::Alarm, format!("! {what}"))));
    let Some(verdict) = &call.verdict else { return markers };
    let drift = verdict.drift.as_ref();
    if verdict.kind() == LinkKind::Broken {
        let named = match call.link.as_ref().and_then(|link| link.link.as_ref()) {
            Some(crate::proto::v1::link::Link::ParentCallId(parent)) => parent.as_str(),
            _ => "its parent",
        };
        let why = match verdict.broken() {
            BrokenLinkReason::DoesNotFit => "does not fit",
            BrokenLinkReason::NeverCame => "never came",
            BrokenLinkReason::NamesItself => "is the call itself",
            BrokenLinkReason::Circle => "leads back to itself",
            BrokenLinkReason::Unspecified => "is no parent",
        };
        let at = drift.map_or_else(String::new, |drift| format!("; {}", parting(drift)));
        markers.push((Paint::Alarm, format!("! broken link: {named} {why}{at}")));
    } else if let Some(drift) = drift {
        let (sign, paint) = if verdict.named { ("!", Paint::Alarm) } else { ("~", Paint::Advice) };
        markers.push((
            paint,
            format!("{sign} drift from {}: {}", cut_middle(&drift.compared_call_id, 20), parting(drift)),
        ));
    }
    markers
}

/// Where two sequences part, and how.
fn parting(drift: &Drift) -> String {
    let ids = |ids: &[u32]| {
        let shown: Vec<String> = ids.iter().take(IDS_SHOWN).map(u32::to_string).collect();
        let more = if ids.len() > IDS_SHOWN { " …" } else { "" };
        format!("{}{more}", shown.join(" "))
    };
    let at = drift.matched_length_tokens;
    match drift.kind() {
        DriftKind::Rewind => format!("went back to {at}, leaving {}", ids(&drift.expected_ids)),
        DriftKind::Differs | DriftKind::Unspecified => {
            format!("at {at} expected {}, found {}", ids(&drift.expected_ids), ids(&drift.found_ids))
        }
    }
}
