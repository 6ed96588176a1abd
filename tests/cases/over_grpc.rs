//! Every case over gRPC against the running service: in the given order and backwards, shuffled with repeats, as full prompts
//! and as deltas, over one stream and over several, sealed at the end and in between.

use std::collections::BTreeMap;
use std::time::Instant;

use hedgerow::cli::shuffle::SplitMix64;
use hedgerow::proto::v1::{self, RolloutOutcome, RolloutState};

use crate::bench::{Bench, Job, Lists, Order, Seal, Telling, Told};
use crate::case::{Answer, Call, Case, Refusal, Settings};
use crate::case_file::CaseFile;
use crate::feed::{Form, Mention};
use crate::service::about;
use crate::taker::Taker;
use crate::{own_cases, reference, shared_cases, wire};

const STREAMS: usize = 3;
/// Rollouts that are under way at once.
const BATCH: usize = 128;
/// Shuffles of each case.
const SHUFFLES: u64 = 8;
/// The reward of cases that say none.
const REWARD: f64 = -0.125;

/// A run with the settings of some cases. Its second consumer group takes all rows, so that no rollout that has any is
/// retired before it was looked at.
struct Run {
    name: String,
    settings: Settings,
    own: Taker,
    all: Taker,
}

#[tokio::test(flavor = "multi_thread")]
async fn the_service_gives_every_answer_however_it_is_told() {
    let start = Instant::now();
    let files: Vec<CaseFile> = own_cases().into_iter().chain(shared_cases()).collect();
    let mut bench = Bench::start(STREAMS).await;
    let runs = runs(&bench, &files).await;
    let mut jobs = Vec::new();
    for (number, file) in files.iter().enumerate() {
        for (variant, telling) in tellings(&file.case, number as u64).into_iter().enumerate() {
            let run = &runs[&run_name(&file.case.settings)];
            let about = about(&run.name, &format!("{}.{number}.{variant}", file.name));
            let reward = file.reward.unwrap_or(REWARD);
            jobs.push((file, run, Job { about, case: &file.case, telling, reward }));
        }
    }
    let (count, mut without_all) = (jobs.len(), 0);
    while !jobs.is_empty() {
        let batch = jobs.split_off(jobs.len().saturating_sub(BATCH));
        let (about, batch): (Vec<_>, Vec<_>) = batch.into_iter().map(|(file, run, job)| ((file, run), job)).unzip();
        let told = bench.report(&batch).await;
        for ((file, run), (job, told)) in about.into_iter().zip(batch.iter().zip(told)) {
            let told = told.unwrap_or_else(|fault| panic!("{}, {:?}: {fault}", file.name, job.telling));
            without_all += usize::from(told.accepted.len() < file.case.calls.len());
            let checked = check(file, run, job, &told).await;
            checked.unwrap_or_else(|fault| panic!("{}, {:?}: {fault}\n{:?}", file.name, job.telling, file.case));
        }
    }
    let seconds = start.elapsed().as_secs_f64();
    println!(
        "{} cases in {count} rollouts over gRPC in {seconds:.1} s; {without_all} finalised before the last call",
        files.len()
    );
}

/// A run's name says its settings.
fn run_name(settings: &Settings) -> String {
    format!("{settings:?}")
}

async fn runs(bench: &Bench, files: &[CaseFile]) -> BTreeMap<String, Run> {
    let mut runs = BTreeMap::new();
    for settings in files.iter().map(|file| &file.case.settings) {
        let name = run_name(settings);
        if runs.contains_key(&name) {
            continue;
        }
        bench.service.create_run(&name, wire::run_settings(settings)).await;
        let all = wire::group_settings(&Settings { policy: None, max_row_tokens: None, ..settings.clone() });
        let all = Taker::subscribe(&bench.service, &name, "all", all).await;
        let own = Taker::subscribe(&bench.service, &name, "own", wire::group_settings(settings)).await;
        runs.insert(name.clone(), Run { name, settings: settings.clone(), own, all });
    }
    runs
}

/// The ways to tell of a case.
fn tellings(case: &Case, number: u64) -> Vec<Telling> {
    let forwards: Vec<usize> = (0..case.calls.len()).collect();
    let backwards: Vec<usize> = forwards.iter().rev().copied().collect();
    let mut chance = SplitMix64::new(number);
    let mut tellings = Vec::new();
    for (order, delta_share) in [(&forwards, 0), (&forwards, 10), (&backwards, 0), (&backwards, 10)] {
        let mentions = order.iter().map(|call| mention(case, *call, delta_share, &mut chance)).collect();
        let seed = chance.next_u64();
        tellings.push(Telling { mentions, order: Order::AsTold, lists: Lists::BySeal, seal: Seal::Last, seed });
    }
    for shuffle in 0..SHUFFLES {
        let mut calls = forwards.clone();
        calls.extend(forwards.iter().filter(|_| chance.below(2) == 0));
        chance.shuffle(&mut calls);
        let delta_share = [0, 5, 10][chance.below(3)];
        let mentions = calls.iter().map(|call| mention(case, *call, delta_share, &mut chance)).collect();
        let order = if shuffle % 4 == 3 { Order::AsTold } else { Order::OverAllStreams };
        let lists = if shuffle % 4 < 2 { Lists::BySeal } else { Lists::ByAgents };
        let seal = if shuffle % 2 == 0 { Seal::Among } else { Seal::Last };
        tellings.push(Telling { mentions, order, lists, seal, seed: chance.next_u64() });
    }
    tellings
}

/// A call in full, or, so many times out of ten, on ids that it shares with a random other call.
fn mention(case: &Case, call: usize, delta_share: usize, chance: &mut SplitMix64) -> Mention {
    let base = &case.calls[chance.below(case.calls.len())];
    let shared = shared_length(base, &case.calls[call]);
    if base.id == case.calls[call].id || shared == 0 || chance.below(10) >= delta_share {
        return Mention { call, form: Form::Full };
    }
    let length = if chance.below(2) == 0 { shared } else { 1 + chance.below(shared) };
    Mention { call, form: Form::Delta { base: base.id.clone(), length } }
}

fn shared_length(base: &Call, call: &Call) -> usize {
    base.full().iter().zip(&call.prompt).take_while(|(one, other)| one == other).count()
}

async fn check(file: &CaseFile, run: &Run, job: &Job<'_>, told: &Told) -> Result<(), String> {
    let mut case = file.case.clone();
    let mut expected = file.expected.clone();
    if told.accepted.len() < case.calls.len() {
        let mut accepted = (0..).map(|place| told.accepted.contains(&place));
        case.calls.retain(|_| accepted.next().unwrap_or(false));
        expected = reference::answer(&case);
    }
    let summary = told.shown.summary.as_ref().ok_or("no summary")?;
    let ended = (summary.state() == RolloutState::Ended).then(|| summary.ended.clone().unwrap_or_default());
    let expected = match expected {
        Ok(expected) => expected,
        Err(refusal) => return discarded(refusal, ended),
    };
    take(&run.own, job, &expected).await?;
    case.settings = Settings { policy: None, max_row_tokens: None, ..run.settings.clone() };
    let of_all = reference::answer(&case).map_err(|refusal| format!("the model refuses: {refusal:?}"))?;
    take(&run.all, job, &of_all).await?;
    match ended {
        // Without a row for anybody it is retired at once, and little is left to look at.
        Some(ended) if ended.outcome() == RolloutOutcome::Retired && of_all.rows.is_empty() => Ok(()),
        Some(ended) => Err(format!("it is {ended:?}")),
        None => {
            let found = wire::links(&told.shown)?;
            let links = (expected.parents.clone(), expected.broken_links.clone());
            if found != links {
                return Err(format!("its links are {found:?}, not {links:?}"));
            }
            wire::shows_rows(&told.shown, &expected.rows)
        }
    }
}

fn discarded(refusal: Refusal, ended: Option<v1::Ended>) -> Result<(), String> {
    let reason = match refusal {
        Refusal::MissingCall => "missing_call",
        Refusal::BrokenLink => "broken_link",
    };
    match ended {
        Some(ended) if ended.outcome() == RolloutOutcome::Discarded && ended.reason == reason => Ok(()),
        other => Err(format!("it should be discarded for {reason}, and is {other:?}")),
    }
}

/// Takes a consumer group's unit, compares it and acknowledges it.
async fn take(taker: &Taker, job: &Job<'_>, expected: &Answer) -> Result<(), String> {
    let rollout = &job.about.rollout_id;
    if expected.rows.is_empty() {
        return if taker.holds(rollout) { Err("it has a unit, and should have no rows".to_owned()) } else { Ok(()) };
    }
    let unit = taker.take(rollout).await?;
    let rows = wire::rows(&unit, job.reward)?;
    taker.ack(vec![unit.unit_id]).await;
    wire::same_rows(&expected.rows, &rows)
}
