//! 100,000 open rollouts: what an idle one takes, and whether the timers of all of them stall ingest.

use std::sync::Arc;
use std::time::{Duration, Instant};

use hedgerow::cli::client;
use hedgerow::ids::{RolloutId, RolloutRef, RunId};
use hedgerow::proto::v1;
use hedgerow::proto::v1::report_request::Event as Sent;
use hedgerow::rollout::event::{Event, Open};
use hedgerow::store::Store;
use hedgerow::store::clock::Clock;
use hedgerow::store::report::Reply;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;

use crate::kit::{Asked, Line, Report, Spread, Target, amount, in_a_process_of_its_own, resident_bytes};
use crate::linking::new_call;
use crate::message::{Form, call, request};
use crate::wire::{Machine, connect};
use crate::workload::{Size, conversation};

const RUN: &str = "bench";
/// Half of the idle timeout.
const HALF_IDLE: Duration = Duration::from_secs(3 * 60 * 60);
/// How long the quiet before the timers is looked at.
const QUIET: Duration = Duration::from_millis(500);

/// Bytes of an idle open rollout, and the longest stall while the deadlines of all come at once.
pub(crate) fn open_rollouts(asked: &Asked, report: &mut Report) {
    let count = asked.size(10_000, 100_000).to_string();
    let runs: Vec<Vec<f64>> = (0..asked.size(1, 3)).map(|_| in_a_process_of_its_own(&["open", &count])).collect();
    let column = |at: usize| runs.iter().map(|run| run[at]).collect::<Vec<f64>>();
    let over = |values: &[f64], limit: f64| Spread::of(&values.iter().map(|value| value / limit).collect::<Vec<_>>());
    for (at, what) in [(0, "without a call"), (1, "with one call of 20 ids")] {
        report.add(Line {
            what: format!("{count} open rollouts, idle one {what}"),
            ours: amount(Spread::of(&column(at)).median, "B"),
            limit: amount(2000.0, "B"),
            ratio: over(&column(at), 2000.0),
            target: Target::AtMost(1.0),
        });
    }
    let (quiet, stalled, lasted) = (column(2), column(3), column(4));
    report.add(Line {
        what: format!(
            "longest gap between answers while {} of them time out (in {}; without: {})",
            count,
            amount(Spread::of(&lasted).median, "s"),
            amount(Spread::of(&quiet).median, "s")
        ),
        ours: amount(Spread::of(&stalled).median, "s"),
        limit: amount(0.010, "s"),
        ratio: over(&stalled, 0.010),
        target: Target::AtMost(1.0),
    });
}

/// In a process of its own: bytes of a rollout without and with a call, and the longest gaps in seconds.
pub(crate) fn child(count: &str) {
    let count: usize = count.parse().expect("a number of rollouts");
    let (machine, clock) = (Machine::new(), Clock::manual());
    let service = machine.service(clock.clone());
    let store = Arc::clone(&service.store);
    let size = Size { calls: 1, prompt: 15, generation: 4 };
    let rollout = conversation(1, 1, size);
    let one_call = || {
        let call = Box::new(new_call(&rollout, &rollout.calls[0], Form::Full));
        Event::Call { call, names_policy: true }
    };
    let open = |name: &'static str, count: usize, event: &dyn Fn() -> Event| {
        let before = resident_bytes();
        machine.client.block_on(async {
            for at in 0..count {
                take(&store, &format!("{name}-{at}"), event()).await;
            }
        });
        resident_bytes().saturating_sub(before) as f64 / count as f64
    };
    open("warm", 1000, &one_call);
    let without = open("empty", count, &|| Event::Open(Open::default()));
    let with = open("call", count, &one_call);
    clock.advance(HALF_IDLE);
    let address = service.grpc_address.to_string();
    let gaps = machine.client.block_on(gaps(&address, &store, &clock));
    println!("{without} {with} {} {} {}", gaps[0], gaps[1], gaps[2]);
    machine.server.block_on(service.stop());
}

async fn take(store: &Store, name: &str, event: Event) {
    let run = RunId::parse(RUN).expect("an id");
    let reference = RolloutRef { run, group: None, rollout: RolloutId::parse(name).expect("an id"), attempt: 0 };
    let answer = store.report(None, &reference, event, |_, _| ()).await;
    assert!(matches!(answer.reply, Reply::Accepted((), _)), "{name}: {:?}", answer.reply);
}

/// Reports calls one after another over gRPC. The longest gap between two answers while nothing else goes on, that while all
/// other rollouts time out, and how long that takes, in seconds.
async fn gaps(address: &str, store: &Store, clock: &Clock) -> [f64; 3] {
    let (requests, line) = mpsc::channel(1);
    let mut harness = client::harness(connect(address).await);
    let responses = harness.report(ReceiverStream::new(line)).await.expect("a stream of reports");
    let mut responses = responses.into_inner();
    let rollout = conversation(2, 1, Size { calls: 20_000, prompt: 48, generation: 16 });
    let calls: Vec<v1::Call> = rollout.calls.iter().map(|one| call(&rollout, one, Form::Delta)).collect();
    let mut next = 0;
    let mut gap = async || {
        let (number, at) = (next / calls.len(), next % calls.len());
        next += 1;
        let event = Sent::Call(calls[at].clone());
        let sent = Instant::now();
        requests.send(request(RUN, &format!("busy-{number}"), next as u64, event)).await.expect("an open stream");
        responses.message().await.expect("no error").expect("the stream goes on");
        sent.elapsed()
    };
    let (mut quiet, begin) = (Duration::ZERO, Instant::now());
    while begin.elapsed() < QUIET {
        quiet = quiet.max(gap().await);
    }
    let open = || {
        let run = store.run(&RunId::parse(RUN).expect("an id")).expect("the run is there");
        run.counts.open.load(std::sync::atomic::Ordering::Relaxed)
    };
    clock.advance(HALF_IDLE + Duration::from_secs(1));
    let (mut stalled, begin) = (Duration::ZERO, Instant::now());
    while open() > 2 {
        stalled = stalled.max(gap().await);
    }
    [quiet, stalled, begin.elapsed()].map(|duration| duration.as_secs_f64())
}
