//! `cargo bench`: how fast the service is, each figure against a limit that is measured beside it in the same run.
//!
//! `cargo bench -- FILTER…` runs the rows whose name holds one of the filters, `--quick` takes little data, `--rounds N` sets how
//! often each pair is run in turn (7), and `--list` names the rows. The table at the end says what was reached. Without the
//! `--bench` that cargo gives, as under `cargo test`, a run is quick.

#![expect(clippy::expect_used, reason = "a benchmark that cannot go on ends")]
#![expect(clippy::print_stdout, reason = "figures are what it is for")]

mod attacked;
mod disk;
mod growth;
mod ingest;
mod kit;
mod latency;
mod linking;
mod memory;
mod message;
mod open;
mod recovery;
mod rows_out;
mod steps;
mod watching;
mod wire;
mod workload;

use kit::{Asked, Report};

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// Interleaved runs of a pair, unless the command line says otherwise.
const ROUNDS: usize = 7;
/// The least that a median is made of.
const ROUNDS_MIN: usize = 5;

type Row = (&'static str, fn(&Asked, &mut Report));

/// All rows, in the order of the table.
const ROWS: [Row; 16] = [
    ("linking-full", linking::full_prompts),
    ("linking-deltas", linking::deltas),
    ("ingest-full", ingest::full_prompts),
    ("ingest-deltas", ingest::deltas),
    ("rows-out", rows_out::rows_out),
    ("steps", steps::population),
    ("groups-released", steps::groups_released),
    ("memory", memory::population),
    ("growth", growth::growth),
    ("durable-ingest", ingest::durable),
    ("durable-answer", latency::durable_answer),
    ("reward-to-row", latency::reward_to_row),
    ("recovery", recovery::recovery),
    ("open-rollouts", open::open_rollouts),
    ("watched", watching::watched),
    ("attacked", attacked::attacked),
];

fn main() {
    // As the service does.
    hedgerow::service::take_small_pages().expect("a system with pages");
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match words[..] {
        ["--child", "memory", unique_bytes] => memory::child(unique_bytes),
        ["--child", "deltas", new, depth] => linking::deltas_child(new, depth),
        ["--child", "growth", shape, count] => growth::resident_child(shape, count),
        ["--child", "growth-work", shape, count, does] => growth::work_child(shape, count, does),
        ["--child", "open", count] => open::child(count),
        _ => run(&words),
    }
}

fn run(words: &[&str]) {
    let mut asked = Asked { filters: Vec::new(), quick: !words.contains(&"--bench"), rounds: ROUNDS };
    let mut words = words.iter();
    while let Some(word) = words.next() {
        match *word {
            "--bench" => {}
            "--quick" => asked.quick = true,
            "--list" => return ROWS.iter().for_each(|(name, _)| println!("{name}")),
            "--rounds" => {
                let rounds = words.next().and_then(|rounds| rounds.parse().ok());
                asked.rounds = rounds.expect("--rounds needs a number");
            }
            filter => asked.filters.push(filter.to_owned()),
        }
    }
    asked.rounds = if asked.quick { ROUNDS_MIN } else { asked.rounds.max(ROUNDS_MIN) };
    let mut report = Report::default();
    for (name, row) in ROWS.iter().filter(|(name, _)| asked.wants(name)) {
        println!("{name}");
        row(&asked, &mut report);
    }
    report.print();
}
