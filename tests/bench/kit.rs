//! The measuring kit: what was asked for, interleaved runs, medians and spreads, and the table at the end.
//!
//! An absolute time says little on a noisy machine. Every figure is a ratio of ours to something beside it, taken in turn
//! (A B A B …) in one run; the median and the extremes of the ratio are printed.

use std::time::{Duration, Instant};

/// What was asked for on the command line.
#[derive(Clone, Debug)]
pub(crate) struct Asked {
    /// Only rows whose name holds one of these; none: all.
    pub(crate) filters: Vec<String>,
    /// A short run, on little data.
    pub(crate) quick: bool,
    /// Interleaved runs of each pair.
    pub(crate) rounds: usize,
}

impl Asked {
    /// One of two, by how long a run was asked for.
    pub(crate) fn size<T>(&self, quick: T, full: T) -> T {
        if self.quick { quick } else { full }
    }

    /// Whether this row was asked for.
    pub(crate) fn wants(&self, row: &str) -> bool {
        self.filters.is_empty() || self.filters.iter().any(|filter| row.contains(filter.as_str()))
    }
}

/// The middle of some values, with their extremes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Spread {
    /// The median.
    pub(crate) median: f64,
    /// The least.
    pub(crate) least: f64,
    /// The greatest.
    pub(crate) most: f64,
}

impl Spread {
    /// That of these values, which must not be none.
    pub(crate) fn of(values: &[f64]) -> Self {
        let mut sorted = values.to_vec();
        sorted.sort_by(f64::total_cmp);
        let at = |place: usize| sorted.get(place).copied().unwrap_or(f64::NAN);
        let half = sorted.len() / 2;
        let median = if sorted.len() % 2 == 1 { at(half) } else { f64::midpoint(at(half.saturating_sub(1)), at(half)) };
        Self { median, least: at(0), most: at(sorted.len().saturating_sub(1)) }
    }
}

/// What a ratio should be.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Target {
    /// Not less.
    AtLeast(f64),
    /// Not more.
    AtMost(f64),
    /// Nothing was set; the figure is to be known.
    Known,
}

impl Target {
    fn text(self) -> String {
        match self {
            Self::AtLeast(ratio) => format!("≥ {ratio}"),
            Self::AtMost(ratio) => format!("≤ {ratio}"),
            Self::Known => "–".to_owned(),
        }
    }

    fn verdict(self, ratio: f64) -> &'static str {
        let reached = match self {
            Self::AtLeast(least) => ratio >= least,
            Self::AtMost(most) => ratio <= most,
            Self::Known => return "–",
        };
        if reached { "yes" } else { "NO" }
    }
}

/// One line of the table.
pub(crate) struct Line {
    /// What was measured.
    pub(crate) what: String,
    /// Ours, with its unit.
    pub(crate) ours: String,
    /// What it is measured against, with its unit.
    pub(crate) limit: String,
    /// Ours ÷ limit.
    pub(crate) ratio: Spread,
    /// What that should be.
    pub(crate) target: Target,
}

/// All lines so far; each is printed as it comes, and all at the end.
#[derive(Default)]
pub(crate) struct Report {
    lines: Vec<Line>,
}

impl Report {
    /// Adds a line and prints it.
    pub(crate) fn add(&mut self, line: Line) {
        println!("  {}", cells(&line).join(" | "));
        self.lines.push(line);
    }

    /// Prints the table.
    pub(crate) fn print(&self) {
        let titles = ["what", "ours", "limit", "ratio (min–max)", "target", "reached"].map(str::to_owned);
        let rows: Vec<[String; 6]> = std::iter::once(titles).chain(self.lines.iter().map(cells)).collect();
        let width = |column: usize| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0);
        println!();
        for (at, row) in rows.iter().enumerate() {
            let padded = row.iter().enumerate().map(|(column, cell)| format!("{cell:<0$}", width(column)));
            println!("| {} |", padded.collect::<Vec<_>>().join(" | "));
            if at == 0 {
                let rules = (0..row.len()).map(|column| "-".repeat(width(column)));
                println!("| {} |", rules.collect::<Vec<_>>().join(" | "));
            }
        }
    }
}

fn cells(line: &Line) -> [String; 6] {
    let Spread { median, least, most } = line.ratio;
    [
        line.what.clone(),
        line.ours.clone(),
        line.limit.clone(),
        format!("{median:.3} ({least:.3}–{most:.3})"),
        line.target.text(),
        line.target.verdict(median).to_owned(),
    ]
}

/// Runs both in turn, so often, after one run of each that does not count.
pub(crate) fn interleaved(
    rounds: usize,
    mut ours: impl FnMut() -> f64,
    mut limit: impl FnMut() -> f64,
) -> (Vec<f64>, Vec<f64>) {
    ours();
    limit();
    (0..rounds).map(|_| (ours(), limit())).unzip()
}

/// Each of the one divided by that of the other in the same round.
pub(crate) fn ratios(ours: &[f64], limit: &[f64]) -> Spread {
    Spread::of(&ours.iter().zip(limit).map(|(ours, limit)| ours / limit).collect::<Vec<_>>())
}

/// A line of two rates that were taken in turn.
pub(crate) fn rates(what: impl Into<String>, unit: &str, runs: &(Vec<f64>, Vec<f64>), target: Target) -> Line {
    let (ours, limit) = runs;
    Line {
        what: what.into(),
        ours: amount(Spread::of(ours).median, unit),
        limit: amount(Spread::of(limit).median, unit),
        ratio: ratios(ours, limit),
        target,
    }
}

/// The shortest of nine runs in seconds, each timed by the function itself.
pub(crate) fn least_of_nine(mut run: impl FnMut() -> f64) -> f64 {
    (0..9).map(|_| run()).fold(f64::INFINITY, f64::min)
}

/// The seconds that something takes.
pub(crate) fn seconds(run: impl FnOnce()) -> f64 {
    let start = Instant::now();
    run();
    start.elapsed().as_secs_f64()
}

/// An amount with a prefix to its unit: `2.46 GB/s`.
pub(crate) fn amount(value: f64, unit: &str) -> String {
    let scales = [(1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""), (1e-3, "m"), (1e-6, "µ"), (1e-9, "n")];
    let (scale, prefix) = scales.into_iter().find(|(scale, _)| value.abs() >= *scale).unwrap_or((1.0, ""));
    format!("{:.3} {prefix}{unit}", value / scale)
}

/// The value that this share of some durations does not exceed.
pub(crate) fn percentile(durations: &mut [Duration], share: f64) -> Duration {
    durations.sort_unstable();
    let place = ((durations.len() as f64 * share).ceil() as usize).clamp(1, durations.len().max(1)) - 1;
    durations.get(place).copied().unwrap_or_default()
}

/// Bytes of this process that are in memory now.
pub(crate) fn resident_bytes() -> u64 {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap_or_default();
    let pages: u64 = statm.split(' ').nth(1).and_then(|pages| pages.parse().ok()).unwrap_or(0);
    pages * 4096
}

/// The instructions that this program takes with these arguments, in a process of its own; none where there is no valgrind.
pub(crate) fn instructions(arguments: &[&str]) -> Option<f64> {
    let program = std::env::current_exe().ok()?;
    let output = std::process::Command::new("valgrind")
        .args(["--tool=cachegrind", "--cache-sim=no", "--cachegrind-out-file=/dev/null"])
        .arg(program)
        .arg("--child")
        .args(arguments)
        .output()
        .ok()?;
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    let count = said.lines().find(|line| line.contains("I") && line.contains("refs:"))?.rsplit(' ').next()?;
    count.replace(',', "").parse().ok()
}

/// Runs this program anew with these arguments, so that its memory holds nothing else; the numbers that it prints.
pub(crate) fn in_a_process_of_its_own(arguments: &[&str]) -> Vec<f64> {
    let program = std::env::current_exe().expect("this program has a path");
    let output = std::process::Command::new(program)
        .arg("--child")
        .args(arguments)
        .stderr(std::process::Stdio::inherit())
        .output()
        .expect("this program runs");
    assert!(output.status.success(), "the child {arguments:?} failed: {}", output.status);
    let text = String::from_utf8_lossy(&output.stdout);
    text.split_whitespace().filter_map(|number| number.parse().ok()).collect()
}
