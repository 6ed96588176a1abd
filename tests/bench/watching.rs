//! Ingest into a rollout that grows to 5,000 calls, with and without somebody who looks at it all the time.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use futures_util::stream;
use hedgerow::cli::client;
use hedgerow::proto::v1;
use hedgerow::proto::v1::report_request::Event;
use hedgerow::store::clock::Clock;
use tokio::time::{MissedTickBehavior, interval};

use crate::kit::{Asked, Report, Target, interleaved, rates};
use crate::linking::Form;
use crate::wire::{Machine, call, connect, report_all, request};
use crate::workload::{Size, conversation};

const RUN: &str = "bench";
/// The pause between two looks.
const LOOK_PAUSE: Duration = Duration::from_millis(20);

/// Calls a second into rollouts that grow, one after another.
pub(crate) fn watched(asked: &Asked, report: &mut Report) {
    let machine = Machine::new();
    let service = machine.service(Clock::machine());
    let address = service.grpc_address.to_string();
    let (count, rollouts) = asked.size((1000, 4), (5000, 10));
    let rollout = conversation(1, 1, Size { calls: count, prompt: 48, generation: 16 });
    let calls: Arc<Vec<v1::Call>> =
        Arc::new(rollout.calls.iter().map(|one| call(&rollout, one, Form::Delta)).collect());
    let looks = AtomicUsize::new(0);
    let round = AtomicUsize::new(0);
    let ingest = |looked_at: bool| {
        let round = round.fetch_add(1, Ordering::Relaxed);
        let (took, looked) = machine.client.block_on(ingest(&address, &calls, round, rollouts, looked_at));
        looks.fetch_add(looked, Ordering::Relaxed);
        (rollouts * count) as f64 / took
    };
    let runs = interleaved(asked.rounds, || ingest(true), || ingest(false));
    let each = looks.load(Ordering::Relaxed) / (asked.rounds + 1);
    let what = format!("ingest of {rollouts} × {count} small deltas, looked at {each} times, against not at all");
    report.add(rates(what, "calls/s", &runs, Target::Known));
    machine.server.block_on(service.stop());
}

/// The seconds until all is answered, and how often somebody looked.
async fn ingest(
    address: &str,
    calls: &Arc<Vec<v1::Call>>,
    round: usize,
    rollouts: usize,
    looked_at: bool,
) -> (f64, usize) {
    let current = Arc::new(AtomicUsize::new(0));
    let looks = Arc::new(AtomicUsize::new(0));
    let looker =
        looked_at.then(|| tokio::spawn(look(address.to_owned(), round, Arc::clone(&current), Arc::clone(&looks))));
    let channel = connect(address).await;
    let start = Instant::now();
    for rollout in 0..rollouts {
        current.store(rollout, Ordering::Relaxed);
        let calls = Arc::clone(calls);
        let requests = (0..calls.len())
            .map(move |at| request(RUN, &name(round, rollout), at as u64 + 1, Event::Call(calls[at].clone())));
        report_all(channel.clone(), stream::iter(requests)).await;
    }
    let took = start.elapsed().as_secs_f64();
    if let Some(looker) = looker {
        looker.abort();
    }
    let discard = v1::Discard { reason: "measured".to_owned(), ..v1::Discard::default() };
    let discards = (0..rollouts)
        .map(move |rollout| request(RUN, &name(round, rollout), rollout as u64, Event::Discard(discard.clone())));
    report_all(channel, stream::iter(discards)).await;
    (took, looks.load(Ordering::Relaxed))
}

fn name(round: usize, rollout: usize) -> String {
    format!("rollout-{round}-{rollout}")
}

/// Gets the rollout that grows, again and again.
async fn look(address: String, round: usize, current: Arc<AtomicUsize>, looks: Arc<AtomicUsize>) {
    let mut inspect = client::inspect(connect(&address).await);
    let mut every = interval(LOOK_PAUSE);
    every.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        every.tick().await;
        let asked = v1::GetRolloutRequest {
            run_id: RUN.to_owned(),
            rollout_id: name(round, current.load(Ordering::Relaxed)),
            ..v1::GetRolloutRequest::default()
        };
        if inspect.get_rollout(asked).await.is_ok() {
            looks.fetch_add(1, Ordering::Relaxed);
        }
    }
}
