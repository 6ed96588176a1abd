//! What a record costs. Run by hand, in a release build: `cargo test --release --lib log::codec -- --ignored --nocapture`.

use std::hint::black_box;
use std::time::Instant;

use super::super::{Encoding, decode, encode};
use super::samples::call_of;

#[test]
#[ignore = "a measurement"]
fn what_a_call_costs() {
    for (new, generated, steps) in [(0, 0, 64), (700, 300, 64), (30_000, 2000, 4), (1 << 20, 0, 1)] {
        let record = call_of(new, generated);
        let (kind, payload) = encode(&record);
        let arrays = 4 * new as usize + 8 * generated;
        let mut buffer = Vec::with_capacity(payload.len());
        let times = [
            time(steps, || {
                buffer.clear();
                Encoding::of(black_box(&record)).write_to(&mut buffer);
            }),
            time(steps, || drop(black_box(encode(black_box(&record))))),
            time(steps, || drop(black_box(decode(kind, black_box(&payload))))),
        ];
        let ways = ["encode into a buffer", "encode", "decode"];
        println!("{new} + {generated} tokens: {} bytes, {} besides arrays", payload.len(), payload.len() - arrays);
        for (way, nanoseconds) in ways.into_iter().zip(times) {
            let token = nanoseconds / f64::from(new + generated as u32).max(1.0);
            let speed = payload.len() as f64 / nanoseconds;
            println!("  {way}: {nanoseconds:.0} ns a record, {token:.3} ns a token, {speed:.2} GB/s");
        }
    }
}

/// Nanoseconds of a step in the fastest batch. Batches are short, so that some are not interrupted on a busy machine.
fn time(steps: u32, mut step: impl FnMut()) -> f64 {
    let mut best = f64::INFINITY;
    for _ in 0..1000 {
        let begun = Instant::now();
        for _ in 0..steps {
            step();
        }
        best = best.min(begun.elapsed().as_secs_f64() * 1e9 / f64::from(steps));
    }
    best
}
