//! Random forests reported to a running service over gRPC, each rollout's events split over three streams and mixed with
//! those of many others: its rows, links and ledgers are those of the slow model, of what was accepted.

use std::time::Instant;

use hedgerow::forest::plan::CallLedger;
use hedgerow::proto::v1;
use proptest::strategy::{Strategy, ValueTree};
use proptest::test_runner::{Config, RngAlgorithm, TestCaseError, TestError, TestRng, TestRunner};
use tokio::runtime::Runtime;

use crate::bench::{Bench, Job, Lists, Order, Seal, Telling, Told};
use crate::case::{AgentsWithoutList, Answer, Case, Settings, SharedCallOwner};
use crate::generator::{Story, stories};
use crate::service::about;
use crate::taker::Taker;
use crate::{invariants, reference, wire};

/// Forests that are under way at once.
const BATCH: usize = 96;
const STREAMS: usize = 3;
/// How often a failing forest is told in each way while it shrinks: what fails may rest on the order of arrival.
const SHRINK_REPEATS: usize = 8;

/// A service with a run for each way to own and to keep, and two consumer groups in each.
struct Field {
    runtime: Runtime,
    bench: Bench,
    runs: Vec<Run>,
    rollouts: u64,
}

struct Run {
    name: &'static str,
    settings: Settings,
    takers: Vec<(Settings, Taker)>,
}

impl Field {
    fn new() -> Self {
        let runtime = Runtime::new().unwrap();
        let (bench, runs) = runtime.block_on(async {
            let bench = Bench::start(STREAMS).await;
            let mut runs = Vec::new();
            for (name, shared_call_owner, agents_without_list) in [
                ("root-drop", SharedCallOwner::RootAgent, AgentsWithoutList::Drop),
                ("root-keep", SharedCallOwner::RootAgent, AgentsWithoutList::Keep),
                ("first-drop", SharedCallOwner::FirstLeaf, AgentsWithoutList::Drop),
                ("first-keep", SharedCallOwner::FirstLeaf, AgentsWithoutList::Keep),
            ] {
                let settings = Settings { shared_call_owner, agents_without_list, ..Settings::default() };
                bench.service.create_run(name, wire::run_settings(&settings)).await;
                let policy = (agents_without_list == AgentsWithoutList::Keep).then(|| "small".to_owned());
                let narrow = Settings { policy, max_row_tokens: Some(7), ..settings.clone() };
                let mut takers = Vec::new();
                for (group, settings) in [("all", &settings), ("narrow", &narrow)] {
                    let taker = Taker::subscribe(&bench.service, name, group, wire::group_settings(settings)).await;
                    takers.push((settings.clone(), taker));
                }
                runs.push(Run { name, settings, takers });
            }
            (bench, runs)
        });
        Self { runtime, bench, runs, rollouts: 0 }
    }

    /// Reports stories, and says which of them is told wrongly, and how.
    fn check(&mut self, stories: &[Story]) -> Result<(), (usize, String)> {
        let Self { runtime, bench, runs, rollouts } = self;
        let mut jobs = Vec::new();
        for story in stories {
            let settings = &story.case.settings;
            let of_run = |run: &&Run| {
                run.settings.shared_call_owner == settings.shared_call_owner
                    && run.settings.agents_without_list == settings.agents_without_list
            };
            let run = runs.iter().find(of_run).unwrap();
            for (mentions, seal) in story.tellings.iter().zip([Seal::Last, Seal::Among]) {
                *rollouts += 1;
                let seed = *rollouts;
                let lists = if seed.is_multiple_of(4) { Lists::BySeal } else { Lists::ByAgents };
                let order = if seed.is_multiple_of(7) { Order::AsTold } else { Order::OverAllStreams };
                let telling = Telling { mentions: mentions.clone(), order, lists, seal, seed };
                let about = about(run.name, &format!("rollout {rollouts}"));
                jobs.push((run, Job { about, case: &story.case, telling, reward: 0.25 }));
            }
        }
        runtime.block_on(async {
            let (runs, jobs): (Vec<&Run>, Vec<Job<'_>>) = jobs.into_iter().unzip();
            let told = bench.report(&jobs).await;
            let mut first = Ok(());
            for (place, (run, (job, told))) in runs.iter().zip(jobs.iter().zip(told)).enumerate() {
                let checked = match told {
                    Ok(told) => verify(run, job, &told).await,
                    Err(fault) => Err(fault),
                };
                let said = |fault| (place / 2, format!("told as {:?}: {fault}", job.telling));
                first = first.and(checked.map_err(said));
            }
            first
        })
    }
}

/// Takes a rollout's units, and compares all that the service says of it with the model.
async fn verify(run: &Run, job: &Job<'_>, told: &Told) -> Result<(), String> {
    let mut case = job.case.clone();
    let mut accepted = (0..).map(|place| told.accepted.contains(&place));
    case.calls.retain(|_| accepted.next().unwrap_or(false));
    let mut checked = Ok(());
    for (settings, taker) in &run.takers {
        case.settings = settings.clone();
        let expected = reference::answer(&case).map_err(|refusal| format!("the model refuses: {refusal:?}"))?;
        checked = checked.and(take(taker, job, &case, &expected).await);
    }
    checked?;
    case.settings = job.case.settings.clone();
    let expected = reference::answer(&case).map_err(|refusal| format!("the model refuses: {refusal:?}"))?;
    let summary = told.shown.summary.as_ref().ok_or("no summary")?;
    if summary.state() != v1::RolloutState::Ended {
        return shown(&case, &expected, told);
    }
    // Without a row for anybody it is retired at once, and little is left to look at.
    case.settings = run.settings.clone();
    let rows = reference::answer(&case).map_or(0, |answer| answer.rows.len());
    let outcome = summary.ended.as_ref().map(v1::Ended::outcome);
    if (rows, outcome) == (0, Some(v1::RolloutOutcome::Retired)) { Ok(()) } else { Err(format!("it is {summary:?}")) }
}

/// One consumer group's unit: its rows are the model's, and keep the invariants by themselves.
async fn take(taker: &Taker, job: &Job<'_>, case: &Case, expected: &Answer) -> Result<(), String> {
    let rollout = &job.about.rollout_id;
    if expected.rows.is_empty() {
        return if taker.holds(rollout) { Err("it has a unit, and should have no rows".to_owned()) } else { Ok(()) };
    }
    let unit = taker.take(rollout).await?;
    let rows = wire::rows(&unit, job.reward);
    taker.ack(vec![unit.unit_id]).await;
    let rows = rows?;
    wire::same_rows(&expected.rows, &rows)?;
    let received = Answer { rows, ..expected.clone() };
    let policies: std::collections::BTreeSet<&str> = match &case.settings.policy {
        Some(policy) => [policy.as_str()].into(),
        None => case.calls.iter().map(|call| call.policy.as_str()).collect(),
    };
    policies.into_iter().try_for_each(|policy| invariants::check_rows(case, &received, policy))
}

/// What is shown of a finalised rollout: links, rows without their tokens, ledgers.
fn shown(case: &Case, expected: &Answer, told: &Told) -> Result<(), String> {
    let (parents, broken_links) = wire::links(&told.shown)?;
    let found = Answer { parents, broken_links, rows: expected.rows.clone() };
    crate::same("shown", expected, &found)?;
    wire::shows_rows(&told.shown, &expected.rows)?;
    let ledgers = told.shown.ledgers.iter().map(|ledger| {
        let counted = CallLedger {
            trained: ledger.trained,
            context: ledger.context,
            in_no_row: ledger.no_row,
            empty: ledger.empty,
            not_kept: ledger.not_kept,
            too_long: ledger.too_long,
        };
        let adds_up = ledger.accepted == counted.sum() && ledger.pending == 0 && ledger.gone.is_empty();
        if adds_up { Ok((ledger.policy.as_str(), counted)) } else { Err(format!("invariant 4: {ledger:?}")) }
    });
    invariants::check(case, expected, &ledgers.collect::<Result<Vec<_>, _>>()?)
}

/// The seed that chooses the forests: `HEDGEROW_SEED`, else the time.
fn seed() -> u64 {
    let time = || std::time::UNIX_EPOCH.elapsed().map_or(0, |since| since.as_nanos() as u64);
    std::env::var("HEDGEROW_SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or_else(time)
}

#[test]
fn a_service_told_in_any_way_gives_the_rows_of_the_rules() {
    let (seed, start) = (seed(), Instant::now());
    let mut bytes = [0; 32];
    bytes[..8].copy_from_slice(&seed.to_le_bytes());
    let rng = TestRng::from_seed(RngAlgorithm::ChaCha, &bytes);
    let config = Config { max_shrink_iters: 2000, failure_persistence: None, ..Config::default() };
    let mut runner = TestRunner::new_with_rng(config, rng);
    let mut field = Field::new();
    let strategy = stories();
    let mut left = crate::forests() as usize;
    while left > 0 {
        let count = left.min(BATCH);
        left -= count;
        let mut trees: Vec<_> = (0..count).map(|_| strategy.new_tree(&mut runner).unwrap()).collect();
        let batch: Vec<Story> = trees.iter().map(ValueTree::current).collect();
        if let Err((place, fault)) = field.check(&batch) {
            let smaller = shrink(&mut runner, &mut field, trees.swap_remove(place));
            let story = &batch[place];
            let found = smaller.unwrap_or_else(|| format!("not told so again by itself: {fault}\n{story:?}"));
            panic!("HEDGEROW_SEED={seed}: {found}");
        }
    }
    let (forests, rollouts) = (crate::forests(), field.rollouts);
    println!("{forests} forests in {rollouts} rollouts over gRPC in {:.1} s", start.elapsed().as_secs_f64());
}

/// A small story that fails too, with how.
fn shrink(runner: &mut TestRunner, field: &mut Field, tree: impl ValueTree<Value = Story>) -> Option<String> {
    let field = std::cell::RefCell::new(field);
    let tried = runner.run_one(tree, |story| {
        let copies = vec![story; SHRINK_REPEATS];
        field.borrow_mut().check(&copies).map_err(|(_, fault)| TestCaseError::fail(fault))
    });
    match tried {
        Ok(_) => None,
        Err(TestError::Fail(reason, story)) => Some(format!("{reason}\n{story:?}")),
        Err(TestError::Abort(reason)) => Some(format!("{reason}")),
    }
}
