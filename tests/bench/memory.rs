//! Resident memory on `population`, in a process of its own that holds nothing but forests.

use std::hint::black_box;

use hedgerow::forest::Forest;

use crate::kit::{Asked, Line, Report, Spread, Target, amount, in_a_process_of_its_own, resident_bytes};
use crate::linking::{new_call, take};
use crate::message::Form;
use crate::workload::{Rollout, Totals, population_rollout};

/// Bytes that each call may take on top of its ids and log-probabilities.
const CALL_BYTES: f64 = 300.0;

/// Resident bytes against unique ids and log-probabilities, four bytes each.
pub(crate) fn population(asked: &Asked, report: &mut Report) {
    let unique_bytes = asked.size(300_000_000_u64, 1_000_000_000).to_string();
    let child = in_a_process_of_its_own(&["memory", &unique_bytes]);
    let [resident, unique, generated, calls, sent, rollouts] = child[..] else {
        panic!("{child:?} are not six numbers")
    };
    let limit = unique * 4.0 + generated * 4.0;
    let alone = |ratio: f64| Spread { median: ratio, least: ratio, most: ratio };
    println!(
        "  {rollouts} rollouts, {calls} calls, {} sent, {} unique, {} generated",
        amount(sent, "tokens"),
        amount(unique, "tokens"),
        amount(generated, "tokens")
    );
    report.add(Line {
        what: "resident memory, population, without 300 B a call".to_owned(),
        ours: amount(resident - calls * CALL_BYTES, "B"),
        limit: amount(limit, "B"),
        ratio: alone((resident - calls * CALL_BYTES) / limit),
        target: Target::AtMost(1.3),
    });
    report.add(Line {
        what: "resident memory, population, all of it".to_owned(),
        ours: amount(resident, "B"),
        limit: amount(limit, "B"),
        ratio: alone(resident / limit),
        target: Target::Known,
    });
    report.add(Line {
        what: "resident memory, population, a call beyond 1.0 × its ids".to_owned(),
        ours: amount((resident - limit) / calls, "B/call"),
        limit: amount(CALL_BYTES, "B/call"),
        ratio: alone((resident - limit) / calls / CALL_BYTES),
        target: Target::Known,
    });
}

fn fed(rollout: &Rollout) -> Forest {
    let mut forest = Forest::default();
    rollout.calls.iter().for_each(|call| take(&mut forest, new_call(rollout, call, Form::Full)));
    forest
}

/// In a process of its own: takes rollouts until their unique ids take so many bytes.
pub(crate) fn child(unique_bytes: &str) {
    let unique_bytes: u64 = unique_bytes.parse().expect("a number of bytes");
    // What making and taking a rollout leaves with the allocator is not the forests'.
    (0..8).for_each(|seed| drop(black_box(fed(&population_rollout(seed)))));
    let idle = resident_bytes();
    let (mut totals, mut forests) = (Totals::default(), Vec::new());
    while totals.unique * 4 < unique_bytes {
        let rollout = population_rollout(forests.len() as u64);
        totals += rollout.totals();
        forests.push(fed(&rollout));
    }
    let resident = resident_bytes().saturating_sub(idle);
    let Totals { calls, sent, unique, generated } = totals;
    println!("{resident} {unique} {generated} {calls} {sent} {}", forests.len());
    drop(black_box(forests));
}
