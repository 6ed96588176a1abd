//! Recorded rollouts of real agents, where this checkout has them, over gRPC: as the deltas of their files, with full prompts,
//! and shuffled. Their rows are known by their digests.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Instant;

use hedgerow::cli::recording::{RecordedCall, RecordedLink, RecordedRollout, Recording};
use hedgerow::cli::shuffle::SplitMix64;
use hedgerow::proto::v1::RolloutState;
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use crate::bench::{Bench, Job, Lists, Order, Seal, Telling};
use crate::case::{Call, Case, Link, Row, Settings};
use crate::feed::{Form, Mention};
use crate::service::{about, floats, ids};
use crate::taker::Taker;
use crate::{case_file, wire};

const STREAMS: usize = 3;
const RUN: &str = "real";
/// The reward of rollouts whose recording says none.
const REWARD: f64 = 0.5;

#[tokio::test(flavor = "multi_thread")]
async fn the_service_gives_the_rows_of_recorded_rollouts() {
    let files = files();
    if files.is_empty() {
        println!("skipped: no recorded rollouts here (HEDGEROW_CASES names the folder that `real` stands in)");
        return;
    }
    let start = Instant::now();
    let mut bench = Bench::start(STREAMS).await;
    bench.service.create_run(RUN, wire::run_settings(&Settings::default())).await;
    let settings = wire::group_settings(&Settings::default());
    let taker = Taker::subscribe(&bench.service, RUN, "trainers", settings).await;
    let mut rollouts = 0;
    for (number, path) in files.iter().enumerate() {
        let expected = expected(path);
        let recording = Recording::read(&[path]).unwrap();
        for recorded in &recording.rollouts {
            let case = case(recorded);
            let jobs = jobs(recorded, &case, number);
            rollouts += jobs.len();
            let told = bench.report(&jobs).await;
            for (job, told) in jobs.iter().zip(told) {
                let told = told.unwrap_or_else(|fault| panic!("{}: {fault}", job.about.rollout_id));
                let unit = taker.take(&job.about.rollout_id).await.unwrap();
                let (parents, broken) = wire::links(&told.shown).unwrap();
                let broken = broken.iter().map(|(call, link)| {
                    (call, json!({"parent": link.named, "first_difference": link.first_difference}))
                });
                let broken: BTreeMap<&String, Value> = broken.collect();
                let rows = wire::rows(&unit, job.reward).unwrap();
                let wanted = &expected[&recorded.id];
                let rows: Vec<Value> = rows.iter().map(|row| digests(row, recorded.reward)).collect();
                assert_eq!(Value::from(rows), wanted["rows"], "{}", job.about.rollout_id);
                assert_eq!(json!(parents), wanted["parents"], "{}", job.about.rollout_id);
                assert_eq!(json!(broken), wanted["broken_links"], "{}", job.about.rollout_id);
                let finalised = told.shown.summary.unwrap().state() == RolloutState::Finalised;
                assert!(finalised, "{} is not retired before its rows are acknowledged", job.about.rollout_id);
                taker.ack(vec![unit.unit_id]).await;
            }
        }
    }
    let seconds = start.elapsed().as_secs_f64();
    println!("{} recordings, told in {rollouts} rollouts over gRPC, in {seconds:.1} s", files.len());
}

fn files() -> Vec<PathBuf> {
    let Some(folder) = case_file::folder() else { return Vec::new() };
    let entries = std::fs::read_dir(folder.join("real")).into_iter().flatten();
    let paths = entries.filter_map(|entry| entry.ok().map(|entry| entry.path()));
    let mut files: Vec<PathBuf> = paths.filter(|path| path.to_string_lossy().ends_with(".jsonl.gz")).collect();
    files.sort();
    files
}

/// What stands in the file of rows beside a recording, by rollout.
fn expected(recording: &Path) -> BTreeMap<String, Value> {
    let path = recording.to_string_lossy().replace(".jsonl.gz", ".rows.jsonl");
    let text = std::fs::read_to_string(&path).unwrap();
    let line = |line: &str| {
        let value: Value = serde_json::from_str(line).unwrap();
        (value["rollout"].as_str().unwrap().to_owned(), value)
    };
    text.lines().map(line).collect()
}

/// A row as the files of rows show it.
fn digests(row: &Row, reward: Option<f64>) -> Value {
    let sha = |bytes: &[u8]| Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect::<String>();
    json!({
        "leaf": row.leaf, "agent": row.agent, "policy": row.policy, "root": row.root,
        "walk": row.walk, "trains": row.trains, "reward": reward,
        "token_ids": sha(&ids(&row.token_ids)), "loss_mask": sha(&row.loss_mask), "logprobs": sha(&floats(&row.logprobs)),
        "tokens": row.token_ids.len(),
        "trained_tokens": row.loss_mask.iter().map(|mask| u64::from(*mask)).sum::<u64>(),
    })
}

fn case(recorded: &RecordedRollout) -> Case {
    let calls = (0..recorded.calls.len()).map(|place| call(recorded, place, &recorded.calls[place])).collect();
    Case { calls, kept: Some(recorded.kept.clone()), settings: Settings::default() }
}

fn call(rollout: &RecordedRollout, place: usize, call: &RecordedCall) -> Call {
    let words = |bytes: &[u8]| bytes.as_chunks::<4>().0.to_vec();
    let ids = |bytes: &[u8]| words(bytes).into_iter().map(u32::from_le_bytes).collect();
    let logprobs = call.logprobs.as_deref().unwrap_or_default();
    Call {
        id: call.id.clone(),
        agent: call.agent.clone(),
        parent_agent: (!call.parent_agent.is_empty()).then(|| call.parent_agent.clone()),
        sequence: call.sequence,
        prompt: ids(&rollout.full_prompt(place)),
        generation: ids(&call.generation),
        logprobs: words(logprobs).into_iter().map(f32::from_le_bytes).collect(),
        link: match &call.link {
            RecordedLink::Infer => Link::Infer,
            RecordedLink::Root => Link::Root,
            RecordedLink::Parent(named) => Link::Parent(named.clone()),
        },
        train: call.train.unwrap_or(true),
        policy: if call.policy.is_empty() { "main".to_owned() } else { call.policy.clone() },
    }
}

/// As recorded, with full prompts, and shuffled over all streams.
fn jobs<'a>(recorded: &RecordedRollout, case: &'a Case, number: usize) -> Vec<Job<'a>> {
    let as_recorded = |call: usize| {
        let delta = recorded.base(call).map(|(base, length, _)| Form::Delta { base: base.to_owned(), length });
        Mention { call, form: delta.unwrap_or(Form::Full) }
    };
    let deltas: Vec<Mention> = (0..case.calls.len()).map(as_recorded).collect();
    let full = (0..case.calls.len()).map(|call| Mention { call, form: Form::Full }).collect();
    let mut shuffled = deltas.clone();
    SplitMix64::new(number as u64).shuffle(&mut shuffled);
    let ways = [
        ("deltas", deltas, Order::AsTold),
        ("full", full, Order::AsTold),
        ("shuffled", shuffled, Order::OverAllStreams),
    ];
    let job = |(way, mentions, order)| {
        let telling = Telling { mentions, order, lists: Lists::BySeal, seal: Seal::Last, seed: number as u64 };
        let about = about(RUN, &format!("{number}: {}, {way}", recorded.id));
        Job { about, case, telling, reward: recorded.reward.unwrap_or(REWARD) }
    };
    ways.into_iter().map(job).collect()
}
