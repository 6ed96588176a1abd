//! Rows of the pure forest: how fast calls are linked, whole prompts and deltas.

use std::hint::black_box;

use hedgerow::forest::call::{CallFacts, Delta, Link, NewCall, Prompt};
use hedgerow::forest::digest::Digest;
use hedgerow::forest::{Forest, JudgedCall};
use hedgerow::ids::{AgentId, CallId, Name};

use crate::kit::{Asked, Line, Report, Spread, Target, amount, instructions, interleaved, rates, seconds};
use crate::message::Form;
use crate::workload::{Call, Kind, Rollout, Size, Totals};

/// A call as the forest takes it.
pub(crate) fn new_call(rollout: &Rollout, call: &Call, form: Form) -> NewCall {
    let id = |sequence: u64| CallId::parse(&format!("call-{sequence}")).expect("an id");
    let agent = |agent: usize| AgentId::parse(&format!("agent-{agent}")).expect("an id");
    let name = |name: &str| Name::parse(name).expect("a name");
    let prompt = rollout.prompt(call);
    let prompt = match call.base.filter(|_| form == Form::Delta) {
        Some((base, length)) => Prompt::Delta(Delta {
            base: id(base),
            base_length: u32::try_from(length).expect("a short text"),
            digest: rollout.digest(call, length),
            suffix: prompt[length..].to_vec(),
        }),
        None => Prompt::Full(prompt.to_vec()),
    };
    let generation = rollout.generation(call).to_vec();
    let facts = CallFacts {
        call_id: id(call.sequence),
        agent_id: agent(call.agent),
        parent_agent_id: (call.agent > 0).then(|| agent(0)),
        sequence: call.sequence,
        link: Link::Infer,
        kind: name("turn"),
        policy: name("main"),
        versions: Vec::new(),
        model: None,
        logprobs: Some(vec![-0.5; generation.len()]),
        generation,
        train: true,
        finish_reason: None,
        times_unix_ms: (None, None),
    };
    NewCall { facts, prompt }
}

pub(crate) fn new_calls(rollout: &Rollout, form: Form) -> Vec<NewCall> {
    rollout.calls.iter().map(|call| new_call(rollout, call, form)).collect()
}

/// Judges a call and stores it.
pub(crate) fn take(forest: &mut Forest, call: NewCall) {
    match forest.judge_call(call) {
        Ok(JudgedCall::Record(record)) => drop(black_box(forest.apply_call(record))),
        other => panic!("a call is new, and was judged {other:?}"),
    }
}

/// The forest of these calls.
pub(crate) fn fed(calls: impl IntoIterator<Item = NewCall>) -> Forest {
    let mut forest = Forest::default();
    calls.into_iter().for_each(|call| take(&mut forest, call));
    forest
}

/// Linking whole prompts on one thread, against the chained hash of the same ids.
pub(crate) fn full_prompts(asked: &Asked, report: &mut Report) {
    for kind in Kind::ALL {
        let rollouts = kind.rollouts(asked.size(2, 12));
        let mut totals = Totals::default();
        rollouts.iter().for_each(|rollout| totals += rollout.totals());
        let calls: Vec<Vec<NewCall>> = rollouts.iter().map(|rollout| new_calls(rollout, Form::Full)).collect();
        let rate = |took: f64| totals.sent as f64 / took;
        let ours = || {
            let (mut forests, calls) = (Vec::with_capacity(calls.len()), calls.clone());
            let took = seconds(|| forests.extend(calls.into_iter().map(fed)));
            drop(black_box(forests));
            rate(took)
        };
        let hash = || {
            rate(seconds(|| {
                for call in calls.iter().flatten() {
                    let Prompt::Full(ids) = &call.prompt else { continue };
                    black_box((Digest::of(ids), Digest::of(&call.facts.generation)));
                }
            }))
        };
        let runs = interleaved(asked.rounds, ours, hash);
        let what = format!("linking, full prompts, {} ({} calls)", kind.name(), totals.calls);
        report.add(rates(what, "tokens/s", &runs, Target::AtLeast(0.5)));
    }
}

/// Calls in one batch of deltas that is looked at.
const DELTA_BATCH: usize = 50;
/// Calls before it.
const NEAR: usize = 20;
/// Calls before it, far down. No table of a rollout doubles in the batch that follows, as some do at call 2048; what doubling costs
/// for each call is in the growth rows.
const FAR: usize = 1990;

/// Linking a delta far down, against one near the root: instructions where there is valgrind, else time.
pub(crate) fn deltas(asked: &Asked, report: &mut Report) {
    for new in [64, 600] {
        let counted = |depth: usize| instructions(&["deltas", &new.to_string(), &depth.to_string()]);
        let batch = |depth: usize| Some((counted(depth + DELTA_BATCH)? - counted(depth)?) / DELTA_BATCH as f64);
        if let (Some(near), Some(far)) = (batch(NEAR), batch(FAR)) {
            report.add(Line {
                what: format!("linking, deltas of {new}, depth {FAR} : depth {NEAR}"),
                ours: amount(far, "instructions/call"),
                limit: amount(near, "instructions/call"),
                ratio: Spread::of(&[far / near]),
                target: Target::AtMost(1.2),
            });
        }
        timed_deltas(asked, report, new);
    }
}

/// The same by time, the least of nine, which caches and the growth of tables take part in.
fn timed_deltas(asked: &Asked, report: &mut Report, new: usize) {
    let forests = asked.size(4, 20);
    let [near, far] = [NEAR, FAR].map(|depth| {
        let mut before = delta_calls(new, depth + DELTA_BATCH);
        let batch = before.split_off(depth);
        // One forest at a time, so that both depths find theirs in the caches.
        move || {
            let batch = || {
                let (mut forest, batch) = (fed(before.clone()), batch.clone());
                seconds(|| batch.into_iter().for_each(|call| take(&mut forest, call)))
            };
            (0..forests).map(|_| batch()).sum::<f64>()
        }
    });
    let pairs: Vec<(f64, f64)> = (0..9).map(|_| (near(), far())).collect();
    let least = |values: &mut dyn Iterator<Item = f64>| values.fold(f64::INFINITY, f64::min);
    let (near, far) = (least(&mut pairs.iter().map(|pair| pair.0)), least(&mut pairs.iter().map(|pair| pair.1)));
    let each = |took: f64| amount(took / (forests * DELTA_BATCH) as f64, "s/call");
    let all = Spread::of(&pairs.iter().map(|(near, far)| far / near).collect::<Vec<_>>());
    report.add(Line {
        what: format!("linking, deltas of {new}, depth {FAR} : depth {NEAR}, time"),
        ours: each(far),
        limit: each(near),
        ratio: Spread { median: far / near, ..all },
        target: Target::Known,
    });
}

fn delta_calls(new: usize, count: usize) -> Vec<NewCall> {
    let size = Size { calls: count, prompt: new - new / 4, generation: new / 4 };
    new_calls(&Kind::Linear.sized(size), Form::Delta)
}

/// In a process of its own: makes as many calls as are ever taken, and takes so many.
pub(crate) fn deltas_child(new: &str, depth: &str) {
    let (new, depth): (usize, usize) = (new.parse().expect("ids"), depth.parse().expect("calls"));
    let mut calls = delta_calls(new, FAR + DELTA_BATCH);
    let rest = calls.split_off(depth);
    black_box((fed(calls), rest));
}
