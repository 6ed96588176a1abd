//! What a harness is told at once of a call's link and drift, worked out from the calls that have come so far.

use std::collections::BTreeSet;

use hedgerow::forest::Forest;
use hedgerow::forest::link::{DriftKind, LinkVerdict, Verdict};

use crate::case::{Call, Case, Link};
use crate::reference;

/// Ids shown from each side of a difference.
const IDS_SHOWN: usize = 8;

/// A verdict in the tests' own words.
#[derive(Debug, PartialEq)]
struct Told {
    link: String,
    drift: Option<Drift>,
}

#[derive(Debug, PartialEq)]
struct Drift {
    compared: String,
    /// Whether the prompt stops inside the compared call.
    is_rewind: bool,
    matched: usize,
    expected: Vec<u32>,
    found: Vec<u32>,
}

/// What is wrong with the verdict on a call that has just come, if anything.
pub(crate) fn check(case: &Case, forest: &Forest, call: &Call, verdict: &Verdict) -> Result<(), String> {
    let mut come = Case::default();
    let mut placed = BTreeSet::new();
    for (_, known) in forest.calls() {
        let id = known.id().as_str();
        come.calls.extend(case.calls.iter().find(|call| call.id == id).cloned());
        placed.extend(known.is_placed().then_some(id));
    }
    let expected = match placed.contains(call.id.as_str()) {
        true => expected(&come, &placed, call),
        false => {
            let known = forest.calls().find(|(_, known)| known.id().as_str() == call.id);
            let base = known.and_then(|(_, known)| known.pending_base());
            Told { link: format!("waits for {}", base.map_or("nothing", |base| base.as_str())), drift: None }
        }
    };
    let found = told(forest, verdict);
    if found == expected { Ok(()) } else { Err(format!("verdict on {} is {found:?}, not {expected:?}", call.id)) }
}

fn expected(come: &Case, placed: &BTreeSet<&str>, call: &Call) -> Told {
    let parent = reference::inferred(come, placed, call);
    let inferred = parent.map_or("root".to_owned(), |parent| format!("continues {}", parent.id));
    let known = || come.calls.iter().filter(|other| placed.contains(other.id.as_str()));
    let named = match &call.link {
        Link::Root => return Told { link: "root".to_owned(), drift: None },
        Link::Infer => {
            let of_agent = known().filter(|other| other.agent == call.agent && !other.generation.is_empty());
            let previous = of_agent.filter(|other| other.order() < call.order()).max_by_key(|other| other.order());
            let drifted = previous.filter(|previous| !call.prompt.starts_with(&previous.full()));
            return Told { link: inferred, drift: drifted.map(|previous| drift(previous, call)) };
        }
        Link::Parent(named) => named,
    };
    match known().find(|other| other.id == *named) {
        None => Told { link: format!("waits for {named}"), drift: None },
        Some(parent) if parent.id == call.id => Told { link: format!("breaks with {named}, {inferred}"), drift: None },
        Some(parent) if call.prompt.starts_with(&parent.full()) => {
            Told { link: format!("continues {named}"), drift: None }
        }
        Some(parent) => Told { link: format!("breaks with {named}, {inferred}"), drift: Some(drift(parent, call)) },
    }
}

fn drift(compared: &Call, call: &Call) -> Drift {
    let full = compared.full();
    let matched = full.iter().zip(&call.prompt).take_while(|(one, other)| one == other).count();
    let shown = |ids: &[u32]| ids[matched..].iter().copied().take(IDS_SHOWN).collect();
    Drift {
        compared: compared.id.clone(),
        is_rewind: matched == call.prompt.len(),
        matched,
        expected: shown(&full),
        found: shown(&call.prompt),
    }
}

fn told(forest: &Forest, verdict: &Verdict) -> Told {
    let id = |call| forest.call(call).id();
    let continues = |parent: Option<_>| parent.map_or("root".to_owned(), |parent| format!("continues {}", id(parent)));
    let drift = verdict.drift.as_ref().map(|drift| Drift {
        compared: id(drift.compared).to_string(),
        is_rewind: drift.kind == DriftKind::Rewind,
        matched: drift.matched_length as usize,
        expected: drift.expected.clone(),
        found: drift.found.clone(),
    });
    let link = match &verdict.link {
        LinkVerdict::Root => "root".to_owned(),
        LinkVerdict::Child(parent) => continues(Some(*parent)),
        LinkVerdict::Waiting(named) => format!("waits for {named}"),
        LinkVerdict::Broken(broken, parent) => format!("breaks with {}, {}", broken.named, continues(*parent)),
    };
    Told { link, drift }
}
