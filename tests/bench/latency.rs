//! How long answers and rows take under a paced load: a durable answer beside `fdatasync`s of the same sizes, and a reward until the
//! first row of its rollout at a subscribed trainer beside the round trip under the same load.

use std::sync::Arc;
use std::time::{Duration, Instant};

use hedgerow::cli::client;
use hedgerow::limits;
use hedgerow::log::memory::MemoryLog;
use hedgerow::log::segments::Options;
use hedgerow::proto::v1;
use hedgerow::proto::v1::report_request::Event;
use hedgerow::proto::v1::report_response::Response as Reported;
use hedgerow::proto::v1::subscribe_request::Request;
use hedgerow::proto::v1::subscribe_response::Response;
use hedgerow::service::LogSource;
use hedgerow::store::clock::Clock;
use tokio::sync::{mpsc, oneshot};
use tokio::time::{MissedTickBehavior, interval};
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::Channel;

use crate::disk::{Scratch, bare_writes};
use crate::kit::{Asked, Line, Report, Spread, Target, amount, percentile, ratios};
use crate::message::{Form, call, finish, request};
use crate::wire::{Machine, connect};
use crate::workload::{Size, conversation};

/// Bytes a second of calls beside what is measured.
const LOAD_BYTES_PER_SECOND: usize = 20_000_000;
/// How often a batch of them goes.
const LOAD_TICK: Duration = Duration::from_millis(5);
/// How often a rollout is finished.
const PROBE_TICK: Duration = Duration::from_millis(4);

/// What one round saw.
#[derive(Default)]
struct Seen {
    reward_to_row: Vec<Duration>,
    answer: Vec<Duration>,
    round_trip: Vec<Duration>,
}

/// Calls of a load whose answers are timed, in a quick run and in a full one: some 3 s.
const TIMED_CALLS: [usize; 2] = [2000, 13_000];
/// What an answer may wait for others to be synced with it.
const LINGER: Duration = Duration::from_millis(2);
/// Syncs of the disk that an answer may wait for: the one before its own, its own, and a bad one.
const SYNCS: f64 = 3.0;

/// Answers to calls, each of which is durable, p99.
pub(crate) fn durable_answer(asked: &Asked, report: &mut Report) {
    let (machine, scratch) = (Machine::new(), Scratch::new());
    let storage = scratch.storage();
    let service = machine.service_with(storage.log(Options::new(1)), Clock::machine(), limits::MEMORY_BUDGET_BYTES);
    let address = service.grpc_address.to_string();
    let load = |round| {
        storage.take_syncs();
        let (_goes_on, stopped) = oneshot::channel::<()>();
        let calls_max = asked.size(TIMED_CALLS[0], TIMED_CALLS[1]);
        let load = paced_load(address.clone(), format!("run-{round}"), calls_max, stopped);
        let mut answers = machine.client.block_on(load);
        let syncs = storage.take_syncs();
        let mut own: Vec<Duration> = syncs.iter().map(|sync| sync.took).collect();
        let mut bare = bare_writes(syncs.iter().map(|sync| sync.bytes));
        [&mut answers, &mut own, &mut bare].map(|times| percentile(times, 0.99).as_secs_f64())
    };
    load(0);
    let rounds: Vec<[f64; 3]> = (1..=asked.rounds).map(load).collect();
    let of = |which: usize| -> Vec<f64> { rounds.iter().map(|round| round[which]).collect() };
    let limit = |syncs: &[f64]| -> Vec<f64> { syncs.iter().map(|sync| LINGER.as_secs_f64() + SYNCS * sync).collect() };
    let median = |values: &[f64]| amount(Spread::of(values).median, "s");
    let (answers, own, bare) = (of(0), of(1), of(2));
    for (beside, syncs, target) in
        [("fdatasyncs of the same sizes", &bare, Target::AtMost(1.0)), ("its own fdatasyncs", &own, Target::Known)]
    {
        let limit = limit(syncs);
        report.add(Line {
            what: format!("durable answer, p99, at 20 MB/s; against 2 ms + 3 × p99 of {beside} ({})", median(syncs)),
            ours: median(&answers),
            limit: median(&limit),
            ratio: ratios(&answers, &limit),
            target,
        });
    }
    machine.server.block_on(service.stop());
}

/// Reward → first row, p50 and p99, with the log off and durably.
pub(crate) fn reward_to_row(asked: &Asked, report: &mut Report) {
    let scratch = Scratch::new();
    rewards_to_rows(asked, report, "log off", LogSource::Given(Arc::new(MemoryLog::forgetting())));
    rewards_to_rows(asked, report, "durable", scratch.storage().log(Options::new(1)));
}

fn rewards_to_rows(asked: &Asked, report: &mut Report, how: &str, log: LogSource) {
    let machine = Machine::new();
    let service = machine.service_with(log, Clock::machine(), limits::MEMORY_BUDGET_BYTES);
    let address = service.grpc_address.to_string();
    let probes = asked.size(150, 1000);
    let rounds: Vec<Seen> =
        (0..=asked.rounds).map(|round| machine.client.block_on(measure(&address, round, probes))).skip(1).collect();
    for (share, name) in [(0.5, "p50"), (0.99, "p99")] {
        let of = |which: fn(&Seen) -> &Vec<Duration>| -> Vec<f64> {
            rounds.iter().map(|seen| percentile(&mut which(seen).clone(), share).as_secs_f64()).collect()
        };
        let (row, answer, trip) =
            (of(|seen| &seen.reward_to_row), of(|seen| &seen.answer), of(|seen| &seen.round_trip));
        let limit: Vec<f64> = answer.iter().zip(&trip).map(|(answer, trip)| answer + 5.0 * trip).collect();
        let median = |values: &[f64]| amount(Spread::of(values).median, "s");
        report.add(Line {
            what: format!(
                "reward → first row, {how}, {name}, 20 MB/s beside; against answer ({}) + 5 × round trip ({})",
                median(&answer),
                median(&trip)
            ),
            ours: median(&row),
            limit: median(&limit),
            ratio: ratios(&row, &limit),
            target: if share > 0.9 { Target::AtMost(1.0) } else { Target::Known },
        });
    }
    machine.server.block_on(service.stop());
}

/// One round: a load that goes on until all probes are through.
async fn measure(address: &str, round: usize, probes: usize) -> Seen {
    let run = format!("run-{round}");
    let (stop, stopped) = oneshot::channel::<()>();
    let load = tokio::spawn(paced_load(address.to_owned(), run.clone(), usize::MAX, stopped));
    let seen = probe(address, &run, probes).await;
    drop(stop);
    load.await.expect("the load is answered");
    seen
}

/// Deltas of 1 k ids at a fixed pace, until there were so many or it is stopped; how long each waited for its answer.
async fn paced_load(
    address: String,
    run: String,
    calls_max: usize,
    mut stopped: oneshot::Receiver<()>,
) -> Vec<Duration> {
    let size = Size { calls: 200, prompt: 900, generation: 100 };
    let rollout = conversation(1, 1000, size);
    let calls: Vec<v1::Call> = rollout.calls.iter().map(|one| call(&rollout, one, Form::Delta)).collect();
    let bytes = prost::Message::encoded_len(&calls[calls.len() - 1]);
    let at_once = (LOAD_BYTES_PER_SECOND as f64 * LOAD_TICK.as_secs_f64() / bytes as f64).round() as usize;
    let (sender, line) = mpsc::channel(64 * at_once);
    let (times, sent) = mpsc::unbounded_channel();
    let answered = tokio::spawn(answers(connect(&address).await, ReceiverStream::new(line), sent));
    let mut every = interval(LOAD_TICK);
    every.set_missed_tick_behavior(MissedTickBehavior::Burst);
    let mut next = 0;
    while next < calls_max {
        tokio::select! {
            _ = every.tick() => {}
            _ = &mut stopped => break,
        }
        for _ in 0..at_once {
            let (number, at) = (next / calls.len(), next % calls.len());
            next += 1;
            let event = Event::Call(calls[at].clone());
            times.send(Instant::now()).expect("answers are awaited");
            let request = request(&run, &format!("load-{number}"), next as u64, event);
            sender.send(request).await.expect("the stream goes on");
        }
    }
    drop(sender);
    answered.await.expect("the load is answered")
}

/// Sends requests over one stream; how long after these times each was answered.
async fn answers(
    channel: Channel,
    requests: ReceiverStream<v1::ReportRequest>,
    mut sent: mpsc::UnboundedReceiver<Instant>,
) -> Vec<Duration> {
    let responses = client::harness(channel).report(requests).await.expect("a stream of reports");
    let mut responses = responses.into_inner();
    let mut times = Vec::new();
    while let Some(response) = responses.message().await.expect("the stream goes on") {
        let Some(Reported::Answer(answer)) = response.response else { continue };
        assert_eq!(answer.outcome(), v1::AnswerOutcome::Accepted, "{answer:?}");
        times.push(sent.recv().await.expect("it was sent").elapsed());
    }
    times
}

/// Finishes rollouts one after another; between them, heartbeats on the same stream.
async fn probe(address: &str, run: &str, probes: usize) -> Seen {
    let mut units = subscribe(address, run).await;
    let (reports, line) = mpsc::channel(16);
    let mut harness = client::harness(connect(address).await);
    let responses = harness.report(ReceiverStream::new(line)).await.expect("a stream of reports");
    let mut responses = responses.into_inner();
    let (answers, mut answered) = mpsc::channel(16);
    tokio::spawn(async move {
        while let Ok(Some(response)) = responses.message().await {
            if let Some(Reported::Answer(_)) = response.response
                && answers.send(Instant::now()).await.is_err()
            {
                return;
            }
        }
    });
    let (mut seen, mut every) = (Seen::default(), interval(PROBE_TICK));
    every.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let size = Size { calls: 1, prompt: 900, generation: 100 };
    for probe in 0..probes {
        every.tick().await;
        let rollout = conversation(probe as u64, 1, size);
        let name = format!("probe-{probe}");
        let mut ask = async |rollout: &str, event: Event| {
            let sent = Instant::now();
            reports.send(request(run, rollout, 1, event)).await.expect("the stream is open");
            (sent, answered.recv().await.expect("it is answered") - sent)
        };
        ask(&name, Event::Call(call(&rollout, &rollout.calls[0], Form::Full))).await;
        let (sent, answer) = ask(&name, finish()).await;
        let row = units.recv().await.expect("a row comes") - sent;
        // A rollout that stays open, for a heartbeat of one that has ended is another thing.
        let (_, round_trip) = ask("open", Event::Heartbeat(v1::Heartbeat {})).await;
        if probe > 0 {
            seen.reward_to_row.push(row);
            seen.answer.push(answer);
            seen.round_trip.push(round_trip);
        }
    }
    seen
}

/// A trainer that acknowledges what it gets; says when the first part of each unit came.
async fn subscribe(address: &str, run: &str) -> mpsc::Receiver<Instant> {
    let (requests, line) = mpsc::channel(64);
    let send = |request| v1::SubscribeRequest { request: Some(request) };
    let subscription = v1::Subscription {
        run_id: run.to_owned(),
        consumer_group: "bench".to_owned(),
        credit_tokens: 1 << 40,
        ..v1::Subscription::default()
    };
    requests.send(send(Request::Subscription(subscription))).await.expect("a new line has room");
    let mut trainer = client::trainer(connect(address).await);
    let responses = trainer.subscribe(ReceiverStream::new(line)).await.expect("the subscription is joined");
    let mut responses = responses.into_inner();
    let (came, coming) = mpsc::channel(16);
    tokio::spawn(async move {
        while let Ok(Some(message)) = responses.message().await {
            let now = Instant::now();
            let Some(Response::UnitPart(part)) = message.response else { continue };
            let ack = v1::Ack { unit_ids: vec![part.unit_id], seek_count: 0 };
            if came.send(now).await.is_err() || requests.send(send(Request::Ack(ack))).await.is_err() {
                return;
            }
        }
    });
    coming
}
