//! Reports over gRPC, with the log off and durably, against a bare sink of the same messages and a bare writer of the log's bytes.

use std::cell::Cell;
use std::sync::Arc;
use std::time::Instant;

use futures_util::future::join_all;
use futures_util::{Stream, stream};
use hedgerow::limits;
use hedgerow::log::segments::Options;
use hedgerow::proto::v1;
use hedgerow::proto::v1::report_request::Event;
use hedgerow::store::clock::Clock;

use crate::disk::{Scratch, bare_write_seconds};
use crate::kit::{Asked, Report, Target, interleaved, rates};
use crate::message::{Form, call, request};
use crate::wire::{Machine, connect, report_all};
use crate::workload::{Size, conversation};

/// Rollouts whose calls come in turn on one stream.
const ROLLOUTS_AT_ONCE: usize = 64;
/// Rollouts whose calls are made, and from which all others are copied.
const TEMPLATES: u64 = 16;
/// What the log may take: room for a few rounds.
const LOG_BUDGET_BYTES: u64 = 4 << 30;
/// The run that everything is reported to.
const RUN: &str = "bench";

/// Calls to be reported for many rollouts, which differ in their names.
#[derive(Clone)]
struct Load {
    /// Calls of a few rollouts, from which all others are copied.
    templates: Arc<Vec<Vec<v1::Call>>>,
    /// Rollouts of each stream, a multiple of those that come in turn.
    rollouts: usize,
    streams: usize,
    /// Whether rollouts end as they go, so that memory is used again; else all stay until the end of a round.
    steady: bool,
}

impl Load {
    fn new(form: Form, opening: usize, size: Size, rollouts: usize, streams: usize, steady: bool) -> Self {
        let template = |seed| {
            let rollout = conversation(seed, opening, size);
            rollout.calls.iter().map(|one| call(&rollout, one, form)).collect()
        };
        let rollouts = (rollouts / streams).next_multiple_of(ROLLOUTS_AT_ONCE);
        Self { templates: Arc::new((0..TEMPLATES).map(template).collect()), rollouts, streams, steady }
    }

    fn calls(&self) -> usize {
        self.streams * self.rollouts * self.templates[0].len()
    }

    /// Bytes of all requests' calls.
    fn bytes(&self) -> usize {
        let of_templates: usize = self.templates.iter().flatten().map(prost::Message::encoded_len).sum();
        of_templates * self.streams * self.rollouts / self.templates.len()
    }

    /// The requests of one stream: the calls of a few rollouts in turn, then of the next few.
    fn requests(&self, round: usize, stream: usize) -> impl Stream<Item = v1::ReportRequest> + Send + 'static {
        let (load, calls) = (self.clone(), self.templates[0].len());
        // Where rollouts end as they go, each has one event more.
        let events = calls + usize::from(self.steady);
        stream::iter((0..self.rollouts * events).map(move |at| {
            let (batch, within) = (at / (ROLLOUTS_AT_ONCE * events), at % (ROLLOUTS_AT_ONCE * events));
            let rollout = batch * ROLLOUTS_AT_ONCE + within % ROLLOUTS_AT_ONCE;
            let event = match load.templates[rollout % load.templates.len()].get(within / ROLLOUTS_AT_ONCE) {
                Some(call) => Event::Call(call.clone()),
                None => discard(),
            };
            request(RUN, &name(round, stream, rollout), at as u64 + 1, event)
        }))
    }

    /// Ends what a round has opened, so that it takes no memory.
    fn discards(&self, round: usize, stream: usize) -> impl Stream<Item = v1::ReportRequest> + Send + 'static {
        stream::iter(
            (0..self.rollouts)
                .map(move |rollout| request(RUN, &name(round, stream, rollout), rollout as u64 + 1, discard())),
        )
    }

    /// The seconds until all is answered.
    async fn send(&self, address: &str, round: usize) -> f64 {
        let channel = connect(address).await;
        let start = Instant::now();
        let streams = (0..self.streams).map(|stream| {
            let requests = self.requests(round, stream);
            tokio::spawn(report_all(channel.clone(), requests))
        });
        let answers: u64 = join_all(streams).await.into_iter().map(|answers| answers.expect("no panic")).sum();
        let took = start.elapsed().as_secs_f64();
        let ends = if self.steady { self.streams * self.rollouts } else { 0 };
        assert_eq!(answers, (self.calls() + ends) as u64);
        for stream in (0..self.streams).filter(|_| !self.steady) {
            report_all(channel.clone(), self.discards(round, stream)).await;
        }
        took
    }
}

fn discard() -> Event {
    Event::Discard(v1::Discard { reason: "measured".to_owned(), ..v1::Discard::default() })
}

fn name(round: usize, stream: usize, rollout: usize) -> String {
    format!("rollout-{round}-{stream}-{rollout}")
}

/// How many streams, and whether rollouts end as they go.
const VARIANTS: [(usize, bool); 3] = [(1, true), (4, true), (1, false)];

/// Whole prompts of 32 k ids, in bytes, over one stream and over four; and into memory that the process has not had.
pub(crate) fn full_prompts(asked: &Asked, report: &mut Report) {
    for (streams, steady) in VARIANTS {
        let load = prompts(asked, streams, steady);
        let amount = (load.bytes(), "B/s");
        measure(asked, report, &load, "full prompts of 32 k", amount);
    }
}

/// Deltas of 1 k ids, in calls, over one stream and over four; and into memory that the process has not had.
pub(crate) fn deltas(asked: &Asked, report: &mut Report) {
    for (streams, steady) in VARIANTS {
        let load = turns(asked, streams, steady);
        let amount = (load.calls(), "calls/s");
        measure(asked, report, &load, "deltas of 1 k", amount);
    }
}

/// The same into a log on disk, each answer durable.
pub(crate) fn durable(asked: &Asked, report: &mut Report) {
    for streams in [1, 4] {
        let load = prompts(asked, streams, true);
        measure_durable(asked, report, &load, "full prompts of 32 k", (load.bytes(), "B/s"));
        let load = turns(asked, streams, true);
        measure_durable(asked, report, &load, "deltas of 1 k", (load.calls(), "calls/s"));
    }
}

/// Whole prompts of 32 k ids.
fn prompts(asked: &Asked, streams: usize, steady: bool) -> Load {
    let size = Size { calls: 40, prompt: 400, generation: 100 };
    Load::new(Form::Full, 22_000, size, asked.size(64, 256), streams, steady)
}

/// Deltas of 1 k ids.
fn turns(asked: &Asked, streams: usize, steady: bool) -> Load {
    let size = Size { calls: 100, prompt: 900, generation: 100 };
    Load::new(Form::Delta, 1000, size, asked.size(64, 768), streams, steady)
}

fn measure_durable(asked: &Asked, report: &mut Report, load: &Load, what: &str, (amount, unit): (usize, &str)) {
    let (machine, scratch) = (Machine::new(), Scratch::new());
    let storage = scratch.storage();
    let options = Options { budget_bytes: LOG_BUDGET_BYTES, ..Options::new(1) };
    let service = machine.service_with(storage.log(options), Clock::machine(), limits::MEMORY_BUDGET_BYTES);
    let (service_address, bare_address) = (service.grpc_address.to_string(), machine.bare(Vec::new()));
    let written = Cell::new(0);
    let mut round = 0;
    let ours = || {
        round += 1;
        let before = storage.durable_bytes();
        let took = machine.client.block_on(load.send(&service_address, round));
        written.set(storage.durable_bytes() - before);
        took
    };
    // Whichever of the two is slower.
    let limit = || machine.client.block_on(load.send(&bare_address, 0)).max(bare_write_seconds(written.get()));
    let (ours, limit) = interleaved(asked.rounds, ours, limit);
    let rate = |seconds: Vec<f64>| seconds.into_iter().map(|took| amount as f64 / took).collect::<Vec<_>>();
    let runs = (rate(ours), rate(limit));
    let streams = if load.streams == 1 { "1 stream".to_owned() } else { format!("{} streams", load.streams) };
    let calls = load.calls();
    let bytes = crate::kit::amount(written.get() as f64, "B");
    let what = format!("ingest, durable, {what}, {streams} ({calls} calls, {bytes} in the log)");
    report.add(rates(what, unit, &runs, Target::AtLeast(0.6)));
    machine.server.block_on(service.stop());
}

fn measure(asked: &Asked, report: &mut Report, load: &Load, what: &str, (amount, unit): (usize, &str)) {
    let machine = Machine::new();
    let service = machine.service(Clock::machine());
    let (service_address, bare_address) = (service.grpc_address.to_string(), machine.bare(Vec::new()));
    let mut round = 0;
    let ours = || {
        round += 1;
        machine.client.block_on(load.send(&service_address, round))
    };
    let sink = || machine.client.block_on(load.send(&bare_address, 0));
    let (ours, sink) = interleaved(asked.rounds, ours, sink);
    let rate = |seconds: Vec<f64>| seconds.into_iter().map(|took| amount as f64 / took).collect::<Vec<_>>();
    let runs = (rate(ours), rate(sink));
    let streams = if load.streams == 1 { "1 stream".to_owned() } else { format!("{} streams", load.streams) };
    let (memory, target) =
        if load.steady { ("", Target::AtLeast(0.8)) } else { (", into fresh memory", Target::Known) };
    let what = format!("ingest, log off, {what}, {streams}{memory} ({} calls)", load.calls());
    report.add(rates(what, unit, &runs, target));
    machine.server.block_on(service.stop());
}
