//! Ingest into a rollout that grows to 5,000 calls, with and without somebody who watches it and looks at it.
//!
//! Each watched round has one `Watch` of the run and one of the rollout that grows, and `GetRollout` of that rollout once a
//! second, as a page that shows it would do. The second row has nothing but looks, one after another.

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
use crate::message::{Form, call, request};
use crate::wire::{Machine, connect, report_all};
use crate::workload::{Size, conversation};

const RUN: &str = "bench";
/// The pause between two looks of who looks now and then.
const LOOK_PAUSE: Duration = Duration::from_secs(1);
/// The pause between two looks of who looks all the time.
const HURRIED_PAUSE: Duration = Duration::from_millis(20);

/// Who is there while calls come.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Lookers {
    Nobody,
    /// Two watches, and a look every second.
    Watches,
    /// A look after another.
    Hurried,
}

/// What the lookers have seen.
#[derive(Default)]
struct Seen {
    looks: AtomicUsize,
    changes: AtomicUsize,
}

/// What each round sends.
struct Load {
    address: String,
    calls: Arc<Vec<v1::Call>>,
    rollouts: usize,
    round: AtomicUsize,
    seen: Arc<Seen>,
}

/// Calls a second into rollouts that grow, one after another.
pub(crate) fn watched(asked: &Asked, report: &mut Report) {
    let machine = Machine::new();
    let service = machine.service(Clock::machine());
    let (count, rollouts) = asked.size((1000, 4), (5000, 60));
    let rollout = conversation(1, 1, Size { calls: count, prompt: 48, generation: 16 });
    let load = Load {
        address: service.grpc_address.to_string(),
        calls: Arc::new(rollout.calls.iter().map(|one| call(&rollout, one, Form::Delta)).collect()),
        rollouts,
        round: AtomicUsize::new(0),
        seen: Arc::default(),
    };
    let rate = |lookers: Lookers| (rollouts * count) as f64 / machine.client.block_on(load.ingest(lookers));
    for (lookers, target) in [(Lookers::Watches, Target::AtLeast(0.9)), (Lookers::Hurried, Target::Known)] {
        let before = (load.seen.looks.load(Ordering::Relaxed), load.seen.changes.load(Ordering::Relaxed));
        let runs = interleaved(asked.rounds, || rate(lookers), || rate(Lookers::Nobody));
        let each = |now: &AtomicUsize, before: usize| (now.load(Ordering::Relaxed) - before) / (asked.rounds + 1);
        let (looks, changes) = (each(&load.seen.looks, before.0), each(&load.seen.changes, before.1));
        let how = match lookers {
            Lookers::Watches => format!("watched ({changes} changes told) and looked at {looks} times"),
            Lookers::Hurried | Lookers::Nobody => format!("looked at {looks} times without a pause"),
        };
        let what = format!("ingest of {rollouts} × {count} small deltas, {how}, against alone");
        report.add(rates(what, "calls/s", &runs, target));
    }
    machine.server.block_on(service.stop());
}

impl Load {
    /// The seconds until all is answered.
    async fn ingest(&self, lookers: Lookers) -> f64 {
        let round = self.round.fetch_add(1, Ordering::Relaxed);
        let current = Arc::new(AtomicUsize::new(0));
        let channel = connect(&self.address).await;
        // The run is there before somebody watches it.
        report_all(
            channel.clone(),
            stream::iter([request(RUN, &format!("first-{round}"), 1, Event::Open(v1::Open::default()))]),
        )
        .await;
        let mut tasks = Vec::new();
        if lookers != Lookers::Nobody {
            let pause = if lookers == Lookers::Watches { LOOK_PAUSE } else { HURRIED_PAUSE };
            tasks.push(tokio::spawn(look(
                self.address.clone(),
                pause,
                round,
                Arc::clone(&current),
                Arc::clone(&self.seen),
            )));
        }
        if lookers == Lookers::Watches {
            tasks.push(tokio::spawn(watch(self.address.clone(), String::new(), Arc::clone(&self.seen))));
        }
        let start = Instant::now();
        for rollout in 0..self.rollouts {
            current.store(rollout, Ordering::Relaxed);
            let watching = (lookers == Lookers::Watches)
                .then(|| tokio::spawn(watch(self.address.clone(), name(round, rollout), Arc::clone(&self.seen))));
            let calls = Arc::clone(&self.calls);
            let requests = (0..calls.len())
                .map(move |at| request(RUN, &name(round, rollout), at as u64 + 1, Event::Call(calls[at].clone())));
            report_all(channel.clone(), stream::iter(requests)).await;
            tasks.extend(watching);
            // Who shows one rollout lets go of the one before.
            if tasks.len() > 3 {
                tasks.remove(2).abort();
            }
        }
        let took = start.elapsed().as_secs_f64();
        tasks.into_iter().for_each(|task| task.abort());
        let discard = v1::Discard { reason: "measured".to_owned(), ..v1::Discard::default() };
        let discards = (0..self.rollouts)
            .map(move |rollout| request(RUN, &name(round, rollout), rollout as u64, Event::Discard(discard.clone())));
        report_all(channel, stream::iter(discards)).await;
        took
    }
}

fn name(round: usize, rollout: usize) -> String {
    format!("rollout-{round}-{rollout}")
}

/// Gets the rollout that grows, again and again.
async fn look(address: String, pause: Duration, round: usize, current: Arc<AtomicUsize>, seen: Arc<Seen>) {
    let mut inspect = client::inspect(connect(&address).await);
    let mut every = interval(pause);
    every.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        every.tick().await;
        let asked = v1::GetRolloutRequest {
            run_id: RUN.to_owned(),
            rollout_id: name(round, current.load(Ordering::Relaxed)),
            ..v1::GetRolloutRequest::default()
        };
        if inspect.get_rollout(asked).await.is_ok() {
            seen.looks.fetch_add(1, Ordering::Relaxed);
        }
    }
}

/// Takes what changes, of the run or of one rollout, as it is told.
async fn watch(address: String, rollout_id: String, seen: Arc<Seen>) {
    let mut inspect = client::inspect(connect(&address).await);
    let asked = v1::WatchRequest { run_id: RUN.to_owned(), rollout_id, ..v1::WatchRequest::default() };
    let Ok(changes) = inspect.watch(asked).await else { return };
    let mut changes = changes.into_inner();
    while let Ok(Some(_)) = changes.message().await {
        seen.changes.fetch_add(1, Ordering::Relaxed);
    }
}
