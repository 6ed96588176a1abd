//! Data-parallel ranks: four processes, each of which takes its shard of every step, and a service on disk; all of them are killed
//! with SIGKILL on the way. Every rank sees the same number of microbatches in each step, a shard that comes again is the same
//! bytes, padding is said, each row is in exactly one step, and no step is lost.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::path::PathBuf;
use std::process::Command;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

use hedgerow::cli::shuffle::SplitMix64;
use hedgerow::limits;
use hedgerow::proto::v1::harness_service_client::HarnessServiceClient;
use hedgerow::proto::v1::inspect_service_client::InspectServiceClient;
use hedgerow::proto::v1::report_request::Event;
use hedgerow::proto::v1::subscribe_request::Request;
use hedgerow::proto::v1::subscribe_response::Response;
use hedgerow::proto::v1::trainer_service_client::TrainerServiceClient;
use hedgerow::proto::v1::{self, AckOutcome, AnswerOutcome};
use tokio::runtime::Runtime;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::Channel;

use crate::processes::{self, News, Process};
use crate::service::{Unit, about, call, reward};

const RUN: &str = "ranks";
const SHARDS: u32 = 4;
/// Rollouts of a step.
const UNITS: u32 = 3;
/// Steps of a short run.
const STEPS: u64 = 400;
const MICROBATCH_TOKENS: u64 = 96;
/// About so many acknowledged shards come between two kills, and of so many kills one is of the service.
const KILL_EVERY: usize = 24;
const SERVICE_IN: usize = 3;
/// Rollouts that are reported together.
const BATCH: u64 = 8;
/// How long nothing may be heard; only a failing test waits so long.
const SILENCE_SECONDS_MAX: u64 = 60;
/// How often somebody tries to reach the service at most.
const TRY_MS: u64 = 10;

fn settings() -> v1::ConsumerGroupSettings {
    let (units, shards, microbatch_tokens) = (UNITS, SHARDS, MICROBATCH_TOKENS);
    let step = v1::StepSettings { units, shards, microbatch_tokens, ..v1::StepSettings::default() };
    v1::ConsumerGroupSettings { unit: v1::Unit::Step.into(), step: Some(step), ..v1::ConsumerGroupSettings::default() }
}

/// The lengths of the rows of a rollout: from one to five, from a few tokens to more than fit into a microbatch.
fn lengths(rollout: u64) -> Vec<u32> {
    let mut chance = SplitMix64::new(rollout ^ 0x5eed);
    let rows = 1 + chance.below(2) * chance.below(5);
    let mut length = |_| {
        let longest = if chance.below(16) == 0 { 140 } else { 50 };
        2 + chance.below(longest) as u32
    };
    (0..rows).map(&mut length).collect()
}

/// A rank's process: takes shards and acknowledges them until it is killed. What it says is heard, though it dies after.
pub(crate) async fn run(address: String, shard: u32) -> Result<(), String> {
    let mut every = tokio::time::interval(Duration::from_millis(TRY_MS));
    loop {
        every.tick().await;
        let Ok(channel) = connect(&address).await else { continue };
        serve(channel, shard).await;
    }
}

async fn connect(address: &str) -> Result<Channel, String> {
    let endpoint = Channel::from_shared(address.to_owned()).map_err(|error| error.to_string())?;
    endpoint.connect().await.map_err(|error| error.to_string())
}

/// Serves one subscription until it ends.
async fn serve(channel: Channel, shard: u32) {
    let (requests, line) = mpsc::channel(64);
    let subscription = v1::Subscription {
        run_id: RUN.to_owned(),
        consumer_group: "ranks".to_owned(),
        consumer: format!("rank-{shard}"),
        settings: Some(settings()),
        // Some ranks are ahead of others.
        credit_tokens: 60 + 400 * u64::from(shard),
        shard: Some(shard),
        ..v1::Subscription::default()
    };
    let send = |request| v1::SubscribeRequest { request: Some(request) };
    if requests.send(send(Request::Subscription(subscription))).await.is_err() {
        return;
    }
    let mut client = TrainerServiceClient::new(channel).max_decoding_message_size(limits::REQUEST_MESSAGE_BYTES_MAX);
    let Ok(responses) = client.subscribe(ReceiverStream::new(line)).await else { return };
    let (mut responses, mut unit) = (responses.into_inner(), Unit::default());
    let (mut last, mut sent) = (None, VecDeque::new());
    while let Ok(Some(message)) = responses.message().await {
        match message.response {
            Some(Response::UnitPart(part)) => {
                let is_whole = part.last;
                unit.take(part);
                if !is_whole {
                    continue;
                }
                let unit = std::mem::take(&mut unit);
                let step = unit.step.unwrap_or_default().step_index;
                if last.is_some_and(|last| last >= step) {
                    println!("fault rank {shard}: step {step} comes after {last:?} on one stream");
                }
                last = Some(step);
                println!("took {}", in_words(&unit));
                sent.push_back(step);
                let ack = v1::Ack { unit_ids: vec![unit.unit_id], seek_count: 0 };
                if requests.send(send(Request::Ack(ack))).await.is_err() {
                    return;
                }
            }
            Some(Response::AckResult(result)) => {
                let outcome = result.entries.first().map(v1::AckResultEntry::outcome);
                let step: Option<u64> = sent.pop_front();
                let fine = matches!(
                    outcome,
                    Some(AckOutcome::Acknowledged | AckOutcome::ShardAcknowledged | AckOutcome::AlreadyAcknowledged)
                );
                if !fine || !result.durable {
                    println!("fault rank {shard}: the ack of step {step:?} is answered {result:?}");
                }
                let whole = outcome == Some(AckOutcome::Acknowledged);
                println!("acknowledged {} {shard} {whole}", step.unwrap_or(u64::MAX));
            }
            Some(Response::UnitNotice(notice)) => println!("fault rank {shard}: {notice:?}"),
            Some(Response::Subscribed(_) | Response::Heartbeat(_)) | None => {}
        }
    }
}

/// All of a shard in one line: its step and number, how many microbatches it has, a digest of all its bytes, and its rows.
fn in_words(unit: &Unit) -> String {
    let step = unit.step.unwrap_or_default();
    let mut filled = BTreeSet::new();
    let mut rows = Vec::new();
    for row in &unit.rows {
        filled.extend(row.header.microbatch_index);
        let is_empty = row.loss_mask.iter().all(|mask| *mask == 0) && row.header.weight == 0.0;
        if row.header.padding != is_empty {
            println!("fault rank {}: {} has padding {}", step.shard, row.row_id, row.header.padding);
        }
        if !row.header.padding {
            rows.push(row.row_id.clone());
        }
    }
    if !filled.iter().copied().eq(0..step.microbatches) {
        println!("fault rank {}: step {} has rows in microbatches {filled:?}", step.shard, step.step_index);
    }
    let all = format!("{:?} {:?} {} {:?}", unit.unit_id, step, unit.tokens, unit.rows);
    let digest = xxhash_rust::xxh3::xxh3_64(all.as_bytes());
    let padding = unit.rows.len() - rows.len();
    format!("{} {} {} {digest:016x} {padding} {}", step.step_index, step.shard, step.microbatches, rows.join(","))
}

/// Reports all rollouts, each until it is answered, however often the service dies meanwhile.
async fn report(address: String, rollouts: u64) {
    let mut every = tokio::time::interval(Duration::from_millis(TRY_MS));
    let mut next = 0;
    while next < rollouts {
        every.tick().await;
        let Ok(channel) = connect(&address).await else { continue };
        let mut client = HarnessServiceClient::new(channel);
        while next < rollouts {
            let end = (next + BATCH).min(rollouts);
            let requests: Vec<_> = (next..end).flat_map(requests_of).collect();
            let Ok(answers) = client.report_batch(v1::ReportBatchRequest { requests }).await else { break };
            let is_taken = |answer: &v1::Answer| {
                let taken = [AnswerOutcome::Accepted, AnswerOutcome::Duplicate, AnswerOutcome::AlreadyEnded];
                taken.contains(&answer.outcome())
            };
            if !answers.into_inner().answers.iter().all(is_taken) {
                break;
            }
            next = end;
        }
    }
}

/// Waits until the consumer group has acknowledged all steps.
async fn until_acknowledged(address: String) -> Result<(), String> {
    let mut every = tokio::time::interval(Duration::from_millis(TRY_MS));
    let mut seen = None;
    for _ in 0..SILENCE_SECONDS_MAX * 1000 / TRY_MS {
        every.tick().await;
        let Ok(channel) = connect(&address).await else { continue };
        let request = v1::ListConsumersRequest { run_id: RUN.to_owned(), ..v1::ListConsumersRequest::default() };
        let Ok(listed) = InspectServiceClient::new(channel).list_consumers(request).await else { continue };
        seen =
            listed.into_inner().consumer_groups.first().map(|group| (group.next_step_index, group.open_steps.clone()));
        if seen.as_ref().is_some_and(|(steps, open)| *steps == STEPS && open.is_empty()) {
            return Ok(());
        }
    }
    Err(format!("in the end there are these steps: {seen:?}"))
}

fn requests_of(rollout: u64) -> Vec<v1::ReportRequest> {
    let reference = about(RUN, &format!("r{rollout}"));
    let calls = lengths(rollout).into_iter().enumerate().map(|(row, tokens)| {
        let prompt: Vec<u32> = (0..tokens - 1).map(|token| token + 1000 * row as u32).collect();
        let call = call(&format!("c{row}"), "main", row as u64, &prompt, &[7]);
        let root = v1::link::Link::Root(v1::RootLink {});
        Event::Call(v1::Call { link: Some(v1::Link { link: Some(root) }), ..call })
    });
    let finish = v1::Finish { seal: Some(v1::Seal::default()), reward: Some(reward(1.0)) };
    let events = calls.chain([Event::Finish(finish)]);
    let request =
        |(seq, event)| v1::ReportRequest { request_seq: seq, rollout: Some(reference.clone()), event: Some(event) };
    (1..).zip(events).map(request).collect()
}

/// A shard as it was taken: microbatches, a digest of its bytes, rows of padding, and its rows.
type Taken = (u32, String, usize, Vec<String>);

/// What the ranks have said.
#[derive(Default)]
struct Heard {
    /// By step and shard.
    shards: BTreeMap<(u64, u32), Taken>,
    /// Answers to acks that were heard; those of ranks that died before it came were not.
    acknowledged: u64,
    again: u64,
    faults: Vec<String>,
}

impl Heard {
    /// Takes a line; says whether it is a shard that was not taken before.
    fn line(&mut self, name: &str, line: &str) -> bool {
        let words: Vec<&str> = line.split(' ').collect();
        match words[..] {
            ["took", step, shard, microbatches, digest, padding, rows] => {
                let (Ok(step), Ok(shard)) = (step.parse(), shard.parse()) else { return false };
                let rows = rows.split(',').filter(|row| !row.is_empty()).map(str::to_owned).collect();
                let padding = padding.parse().unwrap_or_default();
                let now = (microbatches.parse().unwrap_or_default(), digest.to_owned(), padding, rows);
                match self.shards.insert((step, shard), now.clone()) {
                    Some(before) if before != now => {
                        self.faults.push(format!("shard {shard} of step {step} was {before:?} and is {now:?}"));
                    }
                    Some(_) => self.again += 1,
                    None => return true,
                }
                false
            }
            ["acknowledged", ..] => {
                self.acknowledged += 1;
                false
            }
            _ => {
                self.faults.push(format!("{name} says {line}"));
                false
            }
        }
    }

    /// What the contract says of all steps together.
    fn check(&self, steps: u64) -> Result<String, String> {
        if let Some(fault) = self.faults.first() {
            return Err(fault.clone());
        }
        let (mut rows, mut padding) = (BTreeMap::new(), 0);
        for step in 0..steps {
            let shards: Vec<_> = (0..SHARDS).filter_map(|shard| self.shards.get(&(step, shard))).collect();
            let microbatches: BTreeSet<u32> = shards.iter().map(|(microbatches, ..)| *microbatches).collect();
            if shards.len() != SHARDS as usize || microbatches.len() != 1 {
                return Err(format!("step {step} has {} shards of {microbatches:?} microbatches", shards.len()));
            }
            padding += shards.iter().map(|(_, _, padding, _)| padding).sum::<usize>();
            for row in shards.iter().flat_map(|(.., rows)| rows) {
                if let Some(other) = rows.insert(row.clone(), step) {
                    return Err(format!("{row} is in step {other} and in step {step}"));
                }
            }
        }
        let expected: BTreeSet<String> = (0..steps * u64::from(UNITS))
            .flat_map(|rollout| (0..lengths(rollout).len()).map(move |row| format!("{RUN}/r{rollout}/0/main/c{row}")))
            .collect();
        if !expected.iter().eq(rows.keys()) {
            return Err(format!("{} rows came, of {}", rows.len(), expected.len()));
        }
        let again = self.again;
        let acks = self.acknowledged;
        let count = rows.len();
        Ok(format!("{count} rows and {padding} of padding in {steps} steps, {acks} acks, {again} shards taken again"))
    }
}

/// The processes, and what is heard of them.
struct Field {
    directory: PathBuf,
    port: u16,
    started: u64,
    processes: BTreeMap<String, Process>,
    news: (Sender<News>, Receiver<News>),
}

impl Field {
    fn start(&mut self, name: &str) -> Result<(), String> {
        let mut command = match name.strip_prefix("rank ") {
            None => processes::service(self.port, &self.directory),
            Some(shard) => {
                let mut command = Command::new(std::env::current_exe().map_err(|error| error.to_string())?);
                command.args(["rank", "--address", &format!("http://127.0.0.1:{}", self.port), "--member", shard]);
                command
            }
        };
        self.started += 1;
        let process =
            Process::spawn(name, self.started, &mut command, &self.news.0).map_err(|error| error.to_string())?;
        self.processes.insert(name.to_owned(), process);
        Ok(())
    }

    fn kill_and_start(&mut self, name: &str) -> Result<(), String> {
        self.processes.get_mut(name).into_iter().for_each(Process::kill);
        self.start(name)
    }
}

/// Runs a few hundred steps, with kills on the way; says what came of it.
pub(crate) fn check(runtime: &Runtime, seed: u64) -> Result<String, String> {
    let begun = Instant::now();
    let directory = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(format!("ranks-{}", std::process::id()));
    let _ = std::fs::remove_dir_all(&directory);
    std::fs::create_dir_all(&directory).map_err(|error| error.to_string())?;
    let port = processes::free_port();
    let mut field = Field { directory, port, started: 0, processes: BTreeMap::new(), news: channel() };
    let (mut chance, mut heard, mut killed) = (SplitMix64::new(seed), Heard::default(), BTreeMap::new());
    field.start("service")?;
    (0..SHARDS).try_for_each(|shard| field.start(&format!("rank {shard}")))?;
    let reporter = runtime.spawn(report(format!("http://127.0.0.1:{port}"), STEPS * u64::from(UNITS)));
    let mut until_kill = KILL_EVERY;
    while (heard.shards.len() as u64) < STEPS * u64::from(SHARDS) && heard.faults.is_empty() {
        let news = field.news.1.recv_timeout(Duration::from_secs(SILENCE_SECONDS_MAX));
        let Ok(News { name, line, number }) = news else {
            let count = heard.shards.len();
            return Err(format!("nothing is heard for {SILENCE_SECONDS_MAX} s, after {count} shards"));
        };
        let Some(line) = line else {
            if field.processes.get(&name).is_some_and(|process| process.number == number) {
                // Its port may be somebody's for a moment.
                field.kill_and_start(&name)?;
            }
            continue;
        };
        if name == "service" {
            let is_fault = ["\"ERROR\"", "panicked"].iter().any(|word| line.contains(word)) && !line.contains("in use");
            heard.faults.extend(is_fault.then(|| format!("the service says {line}")));
            continue;
        }
        if heard.line(&name, &line) {
            until_kill -= 1;
        }
        if until_kill == 0 {
            until_kill = 1 + chance.below(2 * KILL_EVERY);
            let name = match chance.below(SERVICE_IN) {
                0 => "service".to_owned(),
                _ => format!("rank {}", chance.below(SHARDS as usize)),
            };
            field.kill_and_start(&name)?;
            *killed.entry(name).or_insert(0) += 1;
        }
    }
    let found = heard.check(STEPS)?;
    runtime.block_on(until_acknowledged(format!("http://127.0.0.1:{port}")))?;
    reporter.abort();
    field.processes.clear();
    let _ = std::fs::remove_dir_all(&field.directory);
    Ok(format!("ranks: {found}; killed {killed:?}; {:.1} s", begun.elapsed().as_secs_f64()))
}
