//! How long a worker waits for its answers beside clients that are hostile, buggy or very slow, against how long it waits alone.
//!
//! The worker reports a call of 250 new ids every few milliseconds, and waits for each answer. All clients share the machine's
//! cores with the service, so those that never rest take theirs.

use std::time::{Duration, Instant};

use bytes::Bytes;
use futures_util::stream;
use h2::SendStream;
use h2::client::{ResponseFuture, SendRequest};
use hedgerow::cli::client;
use hedgerow::limits;
use hedgerow::proto::v1;
use hedgerow::proto::v1::report_request::Event;
use hedgerow::proto::v1::report_response::Response as Reported;
use hedgerow::store::clock::Clock;
use prost::Message as _;
use tokio::net::TcpStream;
use tokio::runtime::Handle;
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio::time::{MissedTickBehavior, interval};
use tokio_stream::wrappers::ReceiverStream;
use tonic::codegen::http;

use crate::kit::{Asked, Line, Report, Spread, Target, amount, percentile, ratios};
use crate::message::{Form, call, request};
use crate::wire::{Machine, connect};
use crate::workload::{Call, Rollout, Size, conversation};

const RUN: &str = "bench";
/// What the service may hold: little, so that those who fill it do so at once.
const MEMORY_BUDGET_BYTES: u64 = 256 << 20;
/// How often the worker reports.
const PROBE_TICK: Duration = Duration::from_millis(2);
/// How often a drip drips.
const DRIP_TICK: Duration = Duration::from_millis(20);
/// How many ticks pass before each round.
const SETTLE_TICKS: usize = 500;
/// Calls of a rollout that is looked at, and after how long it is asked for anew.
const LOOKED_AT_CALLS: u64 = 10_000;
const LOOK_TICK: Duration = Duration::from_millis(500);
/// Connections of an attack.
const CONNECTIONS: usize = 8;

/// What is done beside the worker.
#[derive(Clone, Copy, Debug)]
enum Attack {
    /// Streams with half a message each, as large as there is room for.
    Halves,
    /// Messages that come a byte at a time.
    Drips,
    /// Streams that never read their answers, and go on sending.
    Unread,
    /// Tiny rollouts without end, each of a group of its own.
    Openings,
    /// Events that are refused, without end.
    Refusals,
    /// One rollout of very many siblings of one prompt.
    Siblings,
    /// A large rollout that is looked at in full, again and again, by those who never read what they are shown.
    Looks,
}

const ATTACKS: [(Attack, &str); 7] = [
    (Attack::Halves, "256 half messages"),
    (Attack::Drips, "256 drips of a byte in 20 ms"),
    (Attack::Unread, "256 streams that never read"),
    (Attack::Openings, "tiny rollouts without end"),
    (Attack::Refusals, "refused events without end"),
    (Attack::Siblings, "siblings of one prompt without end"),
    (Attack::Looks, "256 unread looks at 10,000 calls without end"),
];

/// p50 and p99 of a worker's answers, beside each attack.
pub(crate) fn attacked(asked: &Asked, report: &mut Report) {
    let machine = Machine::new();
    let probes = asked.size(100, 500);
    let calls = probes * 2 * (asked.rounds + 1);
    let rollout = conversation(1, 1, Size { calls, prompt: 200, generation: 50 });
    for (attack, name) in ATTACKS {
        let service = machine.service_with_memory(Clock::machine(), MEMORY_BUDGET_BYTES);
        let address = service.grpc_address.to_string();
        let attackers = machine.bare.handle();
        let measured = |round: usize, attack: Option<Attack>| {
            let attack = attack.map(|attack| (attackers, attack));
            let calls = &rollout.calls[round * probes..][..probes];
            machine.client.block_on(measure(&address, (&rollout, calls), round, attack))
        };
        let both = |round: usize| (measured(2 * round, Some(attack)), measured(2 * round + 1, None));
        let rounds: Vec<_> = (0..=asked.rounds).map(both).skip(1).collect();
        for (share, which) in [(0.5, "p50"), (0.99, "p99")] {
            let of = |took: &[Duration]| percentile(&mut took.to_vec(), share).as_secs_f64();
            let (beside, alone): (Vec<_>, Vec<_>) =
                rounds.iter().map(|(beside, alone)| (of(beside), of(alone))).unzip();
            report.add(Line {
                what: format!("answer to a call of 250 ids, {which}, beside {name}, against alone"),
                ours: amount(Spread::of(&beside).median, "s"),
                limit: amount(Spread::of(&alone).median, "s"),
                ratio: ratios(&beside, &alone),
                target: Target::AtMost(2.0),
            });
        }
        machine.server.block_on(service.stop());
    }
}

/// How long each answer took.
async fn measure(
    address: &str,
    (rollout, calls): (&Rollout, &[Call]),
    round: usize,
    attack: Option<(&Handle, Attack)>,
) -> Vec<Duration> {
    let (requests, line) = mpsc::channel(1);
    let mut harness = client::harness(connect(address).await);
    let responses = harness.report(ReceiverStream::new(line)).await.expect("a stream of reports");
    let mut responses = responses.into_inner();
    let mut ask = async |request_seq: u64, event: Event| {
        let sent = Instant::now();
        let request = request(RUN, "probe", request_seq, event);
        requests.send(request).await.expect("the stream is open");
        let answer = responses.message().await.expect("the stream goes on").expect("an answer");
        let took = sent.elapsed();
        assert!(matches!(&answer.response, Some(Reported::Answer(answer)) if answer.refusal.is_none()), "{answer:?}");
        took
    };
    // The oldest rollout of all: it is taken when memory is full.
    ask(0, heartbeat()).await;
    let attackers = match attack {
        // On threads of their own: what they do to themselves is not what they do to others.
        Some((threads, attack)) => {
            let address = address.to_owned();
            let attackers = threads.spawn(async move { begin(attack, &address, round).await }).await;
            attackers.expect("it begins")
        }
        None => JoinSet::new(),
    };
    let mut every = interval(PROBE_TICK);
    every.set_missed_tick_behavior(MissedTickBehavior::Delay);
    // Those who are there are measured, not their coming; and not what the attackers of the round before had sent.
    for _ in 0..SETTLE_TICKS {
        every.tick().await;
        ask(0, heartbeat()).await;
    }
    let mut took = Vec::new();
    for one in calls {
        every.tick().await;
        took.push(ask(one.sequence, Event::Call(call(rollout, one, Form::Delta))).await);
    }
    drop(attackers);
    took
}

/// Begins an attack, which lasts until what is given back is dropped.
async fn begin(attack: Attack, address: &str, round: usize) -> JoinSet<()> {
    let mut attackers = JoinSet::new();
    let looked_at = format!("looked-at-{round}");
    if matches!(attack, Attack::Looks) {
        large(address, &looked_at).await;
    }
    for number in 0..CONNECTIONS {
        let address = address.to_owned();
        match attack {
            Attack::Halves => raw(&mut attackers, &address, half(8 << 20), None).await,
            Attack::Drips => raw(&mut attackers, &address, half(0), Some(Bytes::from_static(&[7]))).await,
            Attack::Unread => raw(&mut attackers, &address, heartbeats(round), None).await,
            Attack::Openings => drop(attackers.spawn(flood(address, move |at| {
                let mut opening = request(RUN, &format!("{round}-{number}-{at}"), at, heartbeat());
                opening.rollout.as_mut().expect("it has one").group_id = format!("{round}-{number}-{at}");
                opening
            }))),
            Attack::Refusals => drop(attackers.spawn(flood(address, move |at| {
                request(
                    RUN,
                    &format!("refused-{number}"),
                    at,
                    Event::Reward(v1::Reward { value: f64::NAN, ..v1::Reward::default() }),
                )
            }))),
            Attack::Siblings => drop(attackers.spawn(flood(address, move |at| {
                request(RUN, &format!("siblings-{round}-{number}"), at, Event::Call(sibling(at)))
            }))),
            Attack::Looks => drop(attackers.spawn(looks(address, looked_at.clone()))),
        }
    }
    attackers
}

/// One of many samples of one prompt.
fn sibling(at: u64) -> v1::Call {
    let prompt = v1::prompt::Prompt::TokenIds(Bytes::from_static(&[7; 400]));
    v1::Call {
        call_id: at.to_string(),
        agent_id: "main".to_owned(),
        sequence: at,
        prompt: Some(v1::Prompt { prompt: Some(prompt) }),
        generation_token_ids: Bytes::copy_from_slice(&u32::try_from(at).unwrap_or(0).to_le_bytes()),
        generation_logprobs: Some(Bytes::from_static(&[0; 4])),
        ..v1::Call::default()
    }
}

/// Reports a rollout of very many calls.
async fn large(address: &str, rollout: &str) {
    let calls = (1..=LOOKED_AT_CALLS).map(|at| request(RUN, rollout, at, Event::Call(sibling(at))));
    let calls: Vec<_> = calls.collect();
    let mut harness = client::harness(connect(address).await);
    let mut responses = harness.report(stream::iter(calls)).await.expect("a stream of reports").into_inner();
    for _ in 0..LOOKED_AT_CALLS {
        responses.message().await.expect("the stream goes on").expect("an answer");
    }
}

/// On one connection after another, asks for all of a rollout as often at once as it may, reads nothing, and gives up.
async fn looks(address: String, rollout: String) {
    let message =
        v1::GetRolloutRequest { run_id: RUN.to_owned(), rollout_id: rollout, ..v1::GetRolloutRequest::default() };
    let mut framed = vec![0];
    framed.extend(u32::try_from(message.encoded_len()).expect("a length").to_be_bytes());
    framed.extend(message.encode_to_vec());
    let framed = Bytes::from(framed);
    let mut every = interval(LOOK_TICK);
    every.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        // Who resets as many streams on one connection is cut off.
        let stream = TcpStream::connect(&address).await.expect("the service listens");
        let (client, connection) = h2::client::handshake(stream).await.expect("it speaks HTTP/2");
        // It goes with this.
        let mut driven = JoinSet::new();
        driven.spawn(async move { drop(connection.await) });
        let mut asked = Vec::new();
        for _ in 0..limits::HTTP2_CONNECTION_STREAMS_MAX {
            let (mut sender, response) = begin_stream(&client, &address, "InspectService/GetRollout").await;
            sender.send_data(framed.clone(), true).expect("the stream is open");
            asked.push((sender, response));
        }
        every.tick().await;
    }
}

/// One more stream on a connection, to this method.
async fn begin_stream(client: &SendRequest<Bytes>, address: &str, method: &str) -> (SendStream<Bytes>, ResponseFuture) {
    let uri = format!("http://{address}/hedgerow.v1.{method}");
    let head = http::Request::post(uri).header("content-type", "application/grpc").header("te", "trailers");
    let mut client = client.clone().ready().await.expect("the connection lasts");
    let (response, sender) =
        client.send_request(head.body(()).expect("a request"), false).expect("there may be one more");
    (sender, response)
}

fn heartbeat() -> Event {
    Event::Heartbeat(v1::Heartbeat {})
}

/// Half a message, of which so much has come.
fn half(bytes: usize) -> Bytes {
    let mut half = vec![0];
    half.extend(u32::try_from(limits::REQUEST_MESSAGE_BYTES_MAX).expect("a length").to_be_bytes());
    half.resize(half.len() + bytes, 7);
    half.into()
}

/// More requests than may be unanswered.
fn heartbeats(round: usize) -> Bytes {
    let mut all = Vec::new();
    for at in 0..2 * limits::STREAM_ANSWERS_OUTSTANDING_MAX as u64 {
        let message = request(RUN, &format!("unread-{round}"), at, heartbeat()).encode_to_vec();
        all.push(0);
        all.extend(u32::try_from(message.len()).expect("a length").to_be_bytes());
        all.extend(message);
    }
    all.into()
}

/// A connection with all the streams that it may have, on each of which this is sent, and then one more drip after another.
async fn raw(attackers: &mut JoinSet<()>, address: &str, first: Bytes, drip: Option<Bytes>) {
    let stream = TcpStream::connect(address).await.expect("the service listens");
    let (client, connection) = h2::client::handshake(stream).await.expect("it speaks HTTP/2");
    attackers.spawn(async move { drop(connection.await) });
    let mut streams: Vec<(SendStream<Bytes>, ResponseFuture)> = Vec::new();
    for _ in 0..limits::HTTP2_CONNECTION_STREAMS_MAX {
        let (mut sender, response) = begin_stream(&client, address, "HarnessService/Report").await;
        sender.send_data(first.clone(), false).expect("the stream is open");
        streams.push((sender, response));
    }
    attackers.spawn(async move {
        let mut every = interval(DRIP_TICK);
        every.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            every.tick().await;
            for (sender, _) in &mut streams {
                // One that has ended drips no more.
                drop(drip.as_ref().map(|drip| sender.send_data(drip.clone(), false)));
            }
        }
    });
}

/// Sends one request after another as fast as they are taken, and reads the answers.
async fn flood(address: String, requests: impl Fn(u64) -> v1::ReportRequest + Send + 'static) {
    let all = stream::iter((1..).map(requests));
    let responses = client::harness(connect(&address).await).report(all).await.expect("a stream of reports");
    let mut responses = responses.into_inner();
    while let Ok(Some(_)) = responses.message().await {}
}
