//! Tests of the log on disk. Those that crash use [`FaultyStorage`] and drive the log by hand, so that a seed replays.
//!
//! `HEDGEROW_LOG_SEEDS` is how many seeds the seeded ones run; each failure names its seed.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod basics;
mod crashes;
mod damage;
mod files;
mod model;
mod versions;

use std::convert::Infallible;
use std::time::Duration;

use bytes::Bytes;

use super::faulty::FaultyStorage;
use super::*;

type Opening = Result<(SegmentLog, Recovered, Vec<Shown>), OpenError<Infallible>>;

/// A frame that was shown when the log was opened.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Shown {
    position: u64,
    kind: u8,
    payload: Vec<u8>,
}

/// Small segments, driven by hand.
fn options() -> Options {
    Options {
        segment_bytes: 16 << 10,
        budget_bytes: 1 << 30,
        linger: Duration::ZERO,
        drive: Drive::ByHand,
        ..Options::new(0x5eed_1d00_5eed_1d00)
    }
}

fn open(storage: &FaultyStorage, options: Options) -> Opening {
    open_any(Arc::new(storage.clone()), options)
}

fn open_any(storage: Arc<dyn Storage>, options: Options) -> Opening {
    let mut shown = Vec::new();
    let (log, recovered) = SegmentLog::open(storage, options, &Progress::default(), |position, kind, payload| {
        shown.push(Shown { position: position.0, kind, payload: payload.to_vec() });
        Ok(())
    })?;
    Ok((log, recovered, shown))
}

/// What is wrong with the log, of one that must not open.
fn refusal(opening: Opening) -> SegmentError {
    match opening {
        Err(OpenError::Log(error)) => error,
        Ok((_, recovered, _)) => panic!("the log opened: {recovered:?}"),
    }
}

/// The payload of the frame at this position, of some life of the log: no two are alike.
fn payload(position: u64, life: u64, bytes: usize) -> Vec<u8> {
    let mut payload = format!("{position} in life {life} ").into_bytes();
    payload.resize(payload.len().max(bytes), b'.');
    payload
}

fn kind(position: u64) -> u8 {
    (position % 251) as u8
}

/// Appends one frame.
fn append(log: &SegmentLog, position: u64, life: u64, bytes: usize) {
    let given = log.append(kind(position), Bytes::from(payload(position, life, bytes)));
    assert_eq!(given, Position(position));
}

fn turn_all(log: &SegmentLog) {
    while log.turn() {}
}

fn durable(log: &SegmentLog) -> u64 {
    log.durable_through().borrow().0
}

fn positions(shown: &[Shown]) -> Vec<u64> {
    shown.iter().map(|frame| frame.position).collect()
}

/// How many seeds the seeded tests run.
fn seeds(usual: u64) -> u64 {
    std::env::var("HEDGEROW_LOG_SEEDS").ok().and_then(|seeds| seeds.parse().ok()).unwrap_or(usual)
}
