//! Rows of the pure forest: how fast calls are linked, whole prompts and deltas, and how that grows with a rollout.

use std::hint::black_box;

use hedgerow::forest::call::{CallFacts, Delta, Link, NewCall, Prompt};
use hedgerow::forest::digest::Digest;
use hedgerow::forest::link::CallSet;
use hedgerow::forest::plan::{PlanInput, SharedCallOwner};
use hedgerow::forest::{Forest, JudgedCall};
use hedgerow::ids::{AgentId, CallId, Name};

use crate::kit::{
    Asked, Line, Report, Spread, Target, amount, in_a_process_of_its_own, interleaved, least_of_nine, rates,
    resident_bytes, seconds,
};
use crate::workload::{Call, Kind, Rollout, Size, Totals};

/// How a call's prompt is given to the forest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Form {
    /// All its ids.
    Full,
    /// What follows the call before it.
    Delta,
}

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
            digest: Digest::of(&prompt[..length]),
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

fn new_calls(rollout: &Rollout, form: Form) -> Vec<NewCall> {
    rollout.calls.iter().map(|call| new_call(rollout, call, form)).collect()
}

/// Judges a call and stores it.
pub(crate) fn take(forest: &mut Forest, call: &NewCall) {
    match forest.judge_call(call) {
        Ok(JudgedCall::Record(record)) => drop(black_box(forest.apply_call(record))),
        other => panic!("{:?} is new, and was judged {other:?}", call.facts.call_id),
    }
}

fn fed(calls: &[NewCall]) -> Forest {
    let mut forest = Forest::default();
    calls.iter().for_each(|call| take(&mut forest, call));
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
            let mut forests = Vec::with_capacity(calls.len());
            let took = seconds(|| forests.extend(calls.iter().map(|calls| fed(calls))));
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

/// Calls in one timed batch of deltas, and forests that take such a batch.
const DELTA_BATCH: usize = 50;

/// Linking a delta far down, against one near the root.
pub(crate) fn deltas(asked: &Asked, report: &mut Report) {
    let forests = asked.size(4, 20);
    for new in [64, 600] {
        let size = |calls| Size { calls, prompt: new - new / 4, generation: new / 4 };
        let [near, far] = [20, 2000].map(|depth| {
            let mut before = new_calls(&Kind::Linear.sized(size(depth + DELTA_BATCH)), Form::Delta);
            let batch = before.split_off(depth);
            // One forest at a time, so that both depths find theirs in the caches: what counts is instructions.
            move || {
                let batch = || {
                    let mut forest = fed(&before);
                    seconds(|| batch.iter().for_each(|call| take(&mut forest, call)))
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
            what: format!("linking, deltas of {new}, depth 2000 : depth 20, least of nine"),
            ours: each(far),
            limit: each(near),
            ratio: Spread { median: far / near, ..all },
            target: Target::AtMost(1.2),
        });
    }
}

/// What a rollout of the growth row looks like, besides the kinds of workload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Shape {
    Kind(Kind, bool),
    /// All calls have one prompt, and short generations that differ.
    Siblings,
    /// All calls have one prompt and one generation.
    Twins,
}

impl Shape {
    fn all() -> Vec<Self> {
        let kinds = |shuffled| Kind::SIZED.into_iter().map(move |kind| Self::Kind(kind, shuffled));
        kinds(false).chain(kinds(true)).chain([Self::Siblings, Self::Twins]).collect()
    }

    fn name(self) -> String {
        match self {
            Self::Kind(kind, false) => kind.name().to_owned(),
            Self::Kind(kind, true) => format!("{}-shuffled", kind.name()),
            Self::Siblings => "siblings".to_owned(),
            Self::Twins => "twins".to_owned(),
        }
    }

    fn calls(self, count: usize) -> Vec<NewCall> {
        let size = Size { calls: count, prompt: 72, generation: 24 };
        match self {
            Self::Kind(kind, shuffled) => {
                let mut rollout = kind.sized(size);
                if shuffled {
                    rollout.shuffle(1);
                }
                new_calls(&rollout, Form::Delta)
            }
            Self::Siblings | Self::Twins => {
                let line = Kind::Linear.sized(Size { calls: 1, ..size });
                let first = new_call(&line, &line.calls[0], Form::Full);
                let sibling = |number: usize| {
                    let mut call = first.clone();
                    call.facts.call_id = CallId::parse(&format!("call-{number}")).expect("an id");
                    call.facts.sequence = number as u64;
                    if self == Self::Siblings {
                        call.facts.generation[0] = u32::try_from(number).expect("a small number");
                    }
                    call
                };
                (0..count).map(sibling).collect()
            }
        }
    }
}

/// Takes all calls of a rollout, and finds its links and rows as finalising does.
fn through(calls: &[NewCall]) -> Forest {
    let mut forest = fed(calls);
    let mut kept = CallSet::new();
    forest.calls().for_each(|(call, _)| kept.insert(call));
    let links = forest.links(&kept);
    let input = PlanInput { kept: &kept, links: &links, owner: SharedCallOwner::RootAgent, max_row_tokens: None };
    let policies = forest.policies(&kept);
    policies.iter().for_each(|policy| drop(black_box(forest.plan(policy, input))));
    forest
}

/// Twice the calls in a rollout: time and stored ids for each doubling, and resident bytes for the largest.
pub(crate) fn growth(asked: &Asked, report: &mut Report) {
    let sizes: &[usize] = asked.size(&[250, 500, 1000], &[250, 500, 1000, 2000, 4000, 8000]);
    for shape in Shape::all() {
        let measured: Vec<(f64, f64)> = sizes
            .iter()
            .map(|count| {
                let calls = shape.calls(*count);
                let repeats = (8000 / count).max(1);
                let once = || seconds(|| (0..repeats).for_each(|_| drop(black_box(through(&calls))))) / repeats as f64;
                (least_of_nine(once), fed(&calls).stored_tokens() as f64 * 4.0)
            })
            .collect();
        let doublings = |of: fn(&(f64, f64)) -> f64| {
            Spread::of(&measured.windows(2).map(|pair| of(&pair[1]) / of(&pair[0])).collect::<Vec<_>>())
        };
        let (first, last) = (measured[0], measured[measured.len() - 1]);
        let span = format!("{}–{} calls", sizes[0], sizes[sizes.len() - 1]);
        let time = doublings(|measured| measured.0);
        report.add(Line {
            what: format!("growth, time, {} ({span}; worst doubling)", shape.name()),
            ours: amount(last.0, "s"),
            limit: amount(first.0, "s"),
            // The target is for every doubling.
            ratio: Spread { median: time.most, ..time },
            target: Target::AtMost(2.1),
        });
        let stored = doublings(|measured| measured.1);
        report.add(Line {
            what: format!("growth, stored ids, {} (worst doubling)", shape.name()),
            ours: amount(last.1, "B"),
            limit: amount(first.1, "B"),
            ratio: Spread { median: stored.most, ..stored },
            target: Target::AtMost(2.1),
        });
        let resident = |count: usize| {
            in_a_process_of_its_own(&["growth", &shape.name(), &count.to_string()]).first().copied().unwrap_or(f64::NAN)
        };
        let resident: Vec<f64> = sizes.iter().rev().take(3).rev().map(|count| resident(*count)).collect();
        let doubled = Spread::of(&resident.windows(2).map(|pair| pair[1] / pair[0]).collect::<Vec<_>>());
        report.add(Line {
            what: format!("growth, resident, {} (worst of the last two doublings)", shape.name()),
            ours: amount(resident[2], "B"),
            limit: amount(resident[0], "B"),
            ratio: Spread { median: doubled.most, ..doubled },
            target: Target::AtMost(2.1),
        });
    }
}

/// In a process of its own: resident bytes of one rollout of this shape and size, over many of them.
pub(crate) fn growth_child(shape: &str, count: &str) {
    let shape = Shape::all().into_iter().find(|known| known.name() == shape).expect("a known shape");
    let count: usize = count.parse().expect("a number of calls");
    let calls = shape.calls(count);
    drop(black_box(fed(&calls)));
    let before = resident_bytes();
    let rollouts = (160_000 / count).max(1);
    let forests: Vec<Forest> = (0..rollouts).map(|_| fed(&calls)).collect();
    let bytes = resident_bytes().saturating_sub(before);
    println!("{}", bytes as f64 / rollouts as f64);
    drop(black_box(forests));
}
