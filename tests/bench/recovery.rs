//! What the log takes of the disk for what was reported, and how fast it is read again.

use std::cell::Cell;
use std::convert::Infallible;
use std::hint::black_box;
use std::sync::Arc;
use std::time::Instant;

use futures_util::stream;
use hedgerow::log::segments::{Options, Progress, SegmentLog};
use hedgerow::proto::v1::report_request::Event;
use hedgerow::store::clock::Clock;
use hedgerow::store::recovery::{Recovery, read};
use hedgerow::store::sequencer::Sequencer;
use hedgerow::store::{Eviction, Store, StoreOptions};
use hedgerow::telemetry::Telemetry;
use prost::Message as _;

use crate::disk::{Measured, Scratch};
use crate::kit::{Asked, Line, Report, Spread, Target, amount, interleaved, rates, resident_bytes, seconds};
use crate::message::{Form, call, finish, request};
use crate::wire::{Machine, connect, report_all};
use crate::workload::{Totals, population_rollout};

/// The run that everything is reported to.
const RUN: &str = "bench";
/// One rollout in so many stays open.
const OPEN: u64 = 4;

/// Log bytes and wire bytes of the population, and reading that log again beside a bare scan of its frames.
pub(crate) fn recovery(asked: &Asked, report: &mut Report) {
    let scratch = Scratch::new();
    let storage = scratch.storage();
    let reported = report_population(asked, &storage);
    let Reported { totals, wire_bytes, rollouts } = reported;
    let limit = (totals.unique + totals.generated) as f64 * 4.0;
    println!("  {rollouts} rollouts, {} calls, {} new", totals.calls, amount(totals.unique as f64, "tokens"));
    let alone = |bytes: u64| {
        let ratio = bytes as f64 / limit;
        Spread { median: ratio, least: ratio, most: ratio }
    };
    for (what, bytes) in [("bytes in the log", storage.durable_bytes()), ("bytes on the wire, deltas", wire_bytes)] {
        report.add(Line {
            what: format!("{what}, population; against new and generated ids × 4 B"),
            ours: amount(bytes as f64, "B"),
            limit: amount(limit, "B"),
            ratio: alone(bytes),
            target: Target::AtMost(1.15),
        });
    }
    let bytes = storage.durable_bytes() as f64;
    let scan = || {
        let begun = Instant::now();
        let opened = SegmentLog::open(scratch.storage().storage, Options::new(1), &Progress::default(), |_, _, _| {
            Ok::<_, Infallible>(())
        });
        let took = begun.elapsed().as_secs_f64();
        drop(opened.map_err(|_| "it does not open").expect("the log opens"));
        bytes / took
    };
    let held_bytes = Cell::new(0);
    let ours = || {
        let (took, held) = recover(&scratch);
        // Later rounds find memory that the first one has left.
        held_bytes.set(held.max(held_bytes.get()));
        bytes / took
    };
    let (ours, scans) = interleaved(asked.rounds, ours, scan);
    let touched: Vec<f64> = scans.iter().map(|scan| bytes / (bytes / scan + touch_seconds(held_bytes.get()))).collect();
    let what = "recovery, population, to where work is taken; against a scan of frames and checksums";
    let runs = (ours, scans);
    report.add(rates(what, "B/s", &runs, Target::AtLeast(0.5)));
    let held = amount(held_bytes.get() as f64, "B");
    let what = format!("the same; against the scan, and touching as much fresh memory as it takes ({held})");
    report.add(rates(what, "B/s", &(runs.0, touched), Target::Known));
}

/// The seconds in which the system gives so many bytes of memory that the process has not had.
fn touch_seconds(bytes: u64) -> f64 {
    let mut memory = vec![0_u8; usize::try_from(bytes).unwrap_or(0)];
    seconds(|| memory.iter_mut().step_by(4096).for_each(|byte| *byte = black_box(1)))
}

/// The seconds until the state is there again, and the bytes that it takes.
fn recover(scratch: &Scratch) -> (f64, u64) {
    let options = StoreOptions {
        clock: Clock::machine(),
        telemetry: Telemetry::new(),
        memory_budget_bytes: hedgerow::limits::MEMORY_BUDGET_BYTES,
        restart_grace_ms: 0,
        eviction: Eviction::default(),
    };
    let (store, _commands) = Store::new(options);
    let (begun, before) = (Instant::now(), resident_bytes());
    let recovery =
        read(scratch.storage().storage, Options::new(1), &Progress::default(), Sequencer::new(Arc::clone(&store)));
    let took = begun.elapsed().as_secs_f64();
    let Recovery { last, .. } = recovery.expect("the log is read");
    assert!(last.0 > 0 && store.memory().used_bytes() > 0, "there was something in it");
    (took, resident_bytes().saturating_sub(before))
}

struct Reported {
    totals: Totals,
    wire_bytes: u64,
    rollouts: u64,
}

/// Reports rollouts of the population in deltas until the log has so many bytes. Most are finished, and wait for a trainer.
fn report_population(asked: &Asked, storage: &Measured) -> Reported {
    let log_bytes = asked.size(60_000_000, 600_000_000);
    let machine = Machine::new();
    let service =
        machine.service_with(storage.log(Options::new(1)), Clock::machine(), hedgerow::limits::MEMORY_BUDGET_BYTES);
    let address = service.grpc_address.to_string();
    let mut reported = Reported { totals: Totals::default(), wire_bytes: 0, rollouts: 0 };
    while storage.durable_bytes() < log_bytes {
        let number = reported.rollouts;
        let rollout = population_rollout(number);
        let calls = rollout.calls.iter().map(|one| Event::Call(call(&rollout, one, Form::Delta)));
        let finish = (!number.is_multiple_of(OPEN)).then(finish);
        let name = format!("rollout-{number}");
        let requests: Vec<_> =
            (1..).zip(calls.chain(finish)).map(|(at, event)| request(RUN, &name, at, event)).collect();
        reported.wire_bytes += requests.iter().map(|request| request.encoded_len() as u64).sum::<u64>();
        reported.totals += rollout.totals();
        reported.rollouts += 1;
        machine.client.block_on(async { report_all(connect(&address).await, stream::iter(requests)).await });
    }
    machine.server.block_on(service.stop());
    reported
}
