//! How work, stored ids and resident memory of one rollout grow with its calls: each doubling, for each kind of rollout.

use std::hint::black_box;

use hedgerow::forest::Forest;
use hedgerow::forest::call::NewCall;
use hedgerow::forest::link::CallSet;
use hedgerow::forest::plan::{PlanInput, SharedCallOwner};
use hedgerow::ids::CallId;

use crate::kit::{
    Asked, Line, Report, Spread, Target, amount, in_a_process_of_its_own, instructions, least_of_nine, resident_bytes,
    seconds,
};
use crate::linking::{fed, new_call, new_calls};
use crate::message::Form;
use crate::workload::{Kind, Size};

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

    fn parse(name: &str) -> Self {
        Self::all().into_iter().find(|shape| shape.name() == name).expect("a known shape")
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
    let mut forest = fed(calls.iter().cloned());
    let mut kept = CallSet::new();
    forest.calls().for_each(|(call, _)| kept.insert(call));
    let links = forest.links(&kept);
    let input = PlanInput {
        kept: &kept,
        may_train: &kept,
        links: &links,
        owner: SharedCallOwner::RootAgent,
        max_row_tokens: None,
    };
    let policies = forest.policies(&kept);
    policies.iter().for_each(|policy| drop(black_box(forest.plan(policy, input))));
    forest
}

/// Twice the calls in a rollout: instructions (time where there is no valgrind), stored ids and resident bytes.
pub(crate) fn growth(asked: &Asked, report: &mut Report) {
    let sizes: &[usize] = asked.size(&[250, 500, 1000], &[250, 500, 1000, 2000, 4000, 8000]);
    for shape in Shape::all() {
        let measured: Vec<(f64, f64)> = sizes.iter().map(|count| measure(shape, *count)).collect();
        let unit = if instructions(&["growth-work", "twins", "1", "no"]).is_some() { "instructions" } else { "s" };
        let name = shape.name();
        let work: Vec<f64> = measured.iter().map(|measured| measured.0).collect();
        report.add(doublings(format!("growth, work, {name}"), sizes, &work, unit));
        let stored: Vec<f64> = measured.iter().map(|measured| measured.1).collect();
        report.add(doublings(format!("growth, stored ids, {name}"), sizes, &stored, "B"));
        let resident = |count: &usize| {
            in_a_process_of_its_own(&["growth", &name, &count.to_string()]).first().copied().unwrap_or(f64::NAN)
        };
        let last = &sizes[sizes.len() - 3..];
        let resident: Vec<f64> = last.iter().map(resident).collect();
        report.add(doublings(format!("growth, resident, {name}"), last, &resident, "B"));
    }
}

/// The worst doubling of one rollout's figures.
fn doublings(what: String, sizes: &[usize], values: &[f64], unit: &str) -> Line {
    let ratios = Spread::of(&values.windows(2).map(|pair| pair[1] / pair[0]).collect::<Vec<_>>());
    let (first, last) = (sizes[0], sizes[sizes.len() - 1]);
    Line {
        what: format!("{what}, {first}–{last} calls, worst doubling"),
        ours: amount(values[values.len() - 1], unit),
        limit: amount(values[0], unit),
        // The target is for every doubling.
        ratio: Spread { median: ratios.most, ..ratios },
        target: Target::AtMost(2.1),
    }
}

/// The work of taking a rollout's calls and finding its links and rows, and the bytes of its stored ids.
fn measure(shape: Shape, count: usize) -> (f64, f64) {
    let calls = shape.calls(count);
    let (name, number) = (shape.name(), count.to_string());
    let counted = |does: &str| instructions(&["growth-work", &name, &number, does]);
    let work = match (counted("yes"), counted("no")) {
        (Some(all), Some(made)) => all - made,
        (_, _) => {
            let repeats = (8000 / count).max(1);
            least_of_nine(|| seconds(|| (0..repeats).for_each(|_| drop(black_box(through(&calls)))))) / repeats as f64
        }
    };
    (work, fed(calls.iter().cloned()).stored_tokens() as f64 * 4.0)
}

/// In a process of its own: makes a rollout's calls, and takes them or not.
pub(crate) fn work_child(shape: &str, count: &str, does: &str) {
    let calls = Shape::parse(shape).calls(count.parse().expect("a number of calls"));
    if does == "yes" {
        black_box(through(&calls));
    }
}

/// In a process of its own: resident bytes of one rollout of this shape and size, over many of them.
pub(crate) fn resident_child(shape: &str, count: &str) {
    let count: usize = count.parse().expect("a number of calls");
    let calls = Shape::parse(shape).calls(count);
    drop(black_box(fed(calls.iter().cloned())));
    let before = resident_bytes();
    let rollouts = (160_000 / count).max(1);
    let forests: Vec<Forest> = (0..rollouts).map(|_| fed(calls.iter().cloned())).collect();
    let bytes = resident_bytes().saturating_sub(before);
    println!("{}", bytes as f64 / rollouts as f64);
    drop(black_box(forests));
}
