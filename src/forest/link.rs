//! Links: which call a call continues (RULES section 3.2), and where one that should continue another does not (drift).
//!
//! A link is never guessed by text, by likeness or by position: only a call whose prompt + generation is exactly a prefix
//! of the prompt can be a parent.

use std::collections::{HashMap, HashSet};

use crate::ids::CallId;
use crate::limits::DRIFT_IDS_SHOWN;

use super::call::{AgentIndex, Call, CallIndex, Link};
use super::index::{EndIndex, Twins};
use super::tokens::TokenStore;
use super::{Agents, Forest};

/// A set of calls of one rollout.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CallSet(Vec<bool>);

impl CallSet {
    /// An empty set.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a call.
    pub fn insert(&mut self, call: CallIndex) {
        if self.0.len() <= call.index() {
            self.0.resize(call.index() + 1, false);
        }
        self.0[call.index()] = true;
    }

    /// Whether the call is in it.
    #[must_use]
    pub fn contains(&self, call: CallIndex) -> bool {
        self.0.get(call.index()).copied().unwrap_or(false)
    }

    /// Its calls, in the order of arrival.
    pub fn iter(&self) -> impl Iterator<Item = CallIndex> {
        self.0.iter().zip(0..).filter(|(is_in, _)| **is_in).map(|(_, index)| CallIndex(index))
    }
}

/// A named parent that cannot be it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BrokenLink {
    /// The call that was named.
    pub named: CallId,
    /// The first position at which the prompt differs from that call's text, if that call is there and another.
    pub first_difference: Option<u32>,
}

/// How a prompt differs from the call that it was meant to continue.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum DriftKind {
    /// Some id is another one.
    Differs,
    /// The prompt stops inside the other call's text: a retry, another sample of one prompt, a rewind.
    Rewind,
}

/// Where a prompt stops following the call that it was meant to continue.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Drift {
    /// That call: the named one, else the one before it of the same agent.
    pub compared: CallIndex,
    /// How it differs.
    pub kind: DriftKind,
    /// Length of the common prefix, which is the first differing position.
    pub matched_length: u32,
    /// A few ids of the compared call from there on.
    pub expected: Vec<u32>,
    /// A few ids of the prompt from there on.
    pub found: Vec<u32>,
}

/// What is known of a call's link at this moment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LinkVerdict {
    /// No parent, or none that has come yet.
    Root,
    /// It continues this call.
    Child(CallIndex),
    /// The call that it names, or its delta's base, has not come.
    Waiting(CallId),
    /// The named parent does not fit; treated as inferred, which gives this parent.
    Broken(BrokenLink, Option<CallIndex>),
}

/// A call's link, and its drift as advice.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Verdict {
    /// The link.
    pub link: LinkVerdict,
    /// Where it leaves the call that it was meant to continue.
    pub drift: Option<Drift>,
}

/// The links of a set of kept calls.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Links {
    /// For each call of the rollout (by arrival): its parent, if it is kept and has one.
    pub parents: Vec<Option<CallIndex>>,
    /// The kept calls with a broken link, in order of arrival.
    pub broken: Vec<(CallIndex, BrokenLink)>,
}

impl Links {
    /// A call's parent.
    #[must_use]
    pub fn parent(&self, call: CallIndex) -> Option<CallIndex> {
        self.parents.get(call.index()).copied().flatten()
    }

    /// A call's broken link.
    #[must_use]
    pub fn broken_link(&self, call: CallIndex) -> Option<&BrokenLink> {
        let found = self.broken.binary_search_by_key(&call, |(index, _)| *index).ok()?;
        self.broken.get(found).map(|(_, link)| link)
    }

    /// The path from the root down to this call.
    #[must_use]
    pub fn walk(&self, leaf: CallIndex) -> Vec<CallIndex> {
        let mut walk: Vec<CallIndex> = std::iter::successors(Some(leaf), |call| self.parent(*call)).collect();
        walk.reverse();
        walk
    }
}

/// What the climb from a named parent found.
#[derive(Clone, Copy)]
enum Climb {
    Parent(Option<CallIndex>),
    Circle,
}

/// What links are looked for among.
struct Among<'a> {
    kept: &'a CallSet,
    /// Where the kept calls end, and no others.
    ends: EndIndex,
    /// What was found from calls that are not kept: many kept calls may climb over the same ones.
    climbed: HashMap<CallIndex, Climb>,
}

impl Forest {
    /// The links of the kept calls. Calls that generated nothing, or have no ids, must not be among them.
    pub fn links(&mut self, kept: &CallSet) -> Links {
        self.needs_tokens();
        let mut links = Links { parents: vec![None; self.call_count()], broken: Vec::new() };
        let are_all =
            self.calls().all(|(call, stored)| kept.contains(call) || stored.is_empty() || !stored.is_placed());
        let ends = if are_all { std::mem::take(&mut self.ends) } else { self.ends_of(kept) };
        let mut among = Among { kept, ends, climbed: HashMap::new() };
        for call in kept.iter() {
            let (parent, broken) = self.kept_link(call, &mut among);
            links.parents[call.index()] = parent;
            links.broken.extend(broken.map(|broken| (call, broken)));
        }
        if are_all {
            self.ends = among.ends;
        }
        links
    }

    fn ends_of(&self, kept: &CallSet) -> EndIndex {
        let mut ends = EndIndex::default();
        kept.iter().for_each(|call| ends.insert(&self.tokens, &self.calls, call));
        ends
    }

    fn kept_link(&self, call: CallIndex, among: &mut Among<'_>) -> (Option<CallIndex>, Option<BrokenLink>) {
        let named = match &self.call(call).link {
            Link::Root => return (None, None),
            Link::Infer => return (self.infer(call, among), None),
            Link::Parent(named) => named.clone(),
        };
        let mut first_difference = None;
        if let Some(parent) = self.find_placed(&named).filter(|parent| *parent != call) {
            if self.fits(parent, call) {
                if let Climb::Parent(parent) = self.climb(parent, among) {
                    return (parent, None);
                }
            } else {
                first_difference = Some(self.matched_length(parent, call));
            }
        }
        (self.infer(call, among), Some(BrokenLink { named, first_difference }))
    }

    /// From a named parent up, by its own links, to the nearest kept call.
    fn climb(&self, from: CallIndex, among: &mut Among<'_>) -> Climb {
        let mut passed = Vec::new();
        let mut at = from;
        let found = loop {
            if among.kept.contains(at) {
                break Climb::Parent(Some(at));
            }
            if let Some(found) = among.climbed.get(&at) {
                break *found;
            }
            // Who comes back here on this climb goes in a circle.
            among.climbed.insert(at, Climb::Circle);
            passed.push(at);
            let named = match &self.call(at).link {
                Link::Root => break Climb::Parent(None),
                Link::Infer => None,
                Link::Parent(named) => self.find_placed(named),
            };
            match named {
                Some(parent) if self.fits(parent, at) => at = parent,
                Some(_) | None => break Climb::Parent(self.infer(at, among)),
            }
        };
        among.climbed.extend(passed.into_iter().map(|call| (call, found)));
        found
    }

    /// The kept call with the longest text that is a prefix of this call's prompt.
    fn infer(&self, call: CallIndex, among: &mut Among<'_>) -> Option<CallIndex> {
        longest_parent(&mut among.ends, &self.tokens, &self.calls, &self.agents, call)
    }

    /// What is known of a call's link now: against all calls that have come, kept or not.
    pub(crate) fn verdict(&mut self, call: CallIndex) -> Verdict {
        self.needs_tokens();
        if let Some(base) = self.call(call).pending_base() {
            return Verdict { link: LinkVerdict::Waiting(base.clone()), drift: None };
        }
        let inferred = |all: &mut Self| longest_parent(&mut all.ends, &all.tokens, &all.calls, &all.agents, call);
        let child_or_root = |parent: Option<CallIndex>| parent.map_or(LinkVerdict::Root, LinkVerdict::Child);
        match self.call(call).link.clone() {
            Link::Root => Verdict { link: LinkVerdict::Root, drift: None },
            Link::Infer => {
                let parent = inferred(self);
                Verdict { link: child_or_root(parent), drift: self.drift_from_previous(call, parent) }
            }
            Link::Parent(named) => match self.find_placed(&named) {
                None => Verdict { link: LinkVerdict::Waiting(named), drift: None },
                Some(parent) if parent != call && self.fits(parent, call) => {
                    Verdict { link: LinkVerdict::Child(parent), drift: None }
                }
                Some(parent) => {
                    let drift = (parent != call).then(|| self.drift(parent, call));
                    let first_difference = drift.as_ref().map(|drift| drift.matched_length);
                    let link = LinkVerdict::Broken(BrokenLink { named, first_difference }, inferred(self));
                    Verdict { link, drift }
                }
            },
        }
    }

    /// A call's link among those of the kept calls.
    #[must_use]
    pub fn kept_verdict(&self, call: CallIndex, links: &Links) -> Verdict {
        self.needs_tokens();
        let parent = links.parent(call);
        let child_or_root = parent.map_or(LinkVerdict::Root, LinkVerdict::Child);
        match (self.call(call).link(), links.broken_link(call)) {
            (Link::Infer, _) => Verdict { link: child_or_root, drift: self.drift_from_previous(call, parent) },
            (Link::Root | Link::Parent(_), None) => Verdict { link: child_or_root, drift: None },
            (Link::Root | Link::Parent(_), Some(broken)) => {
                let parts = broken.first_difference.and_then(|_| self.find_placed(&broken.named));
                let drift = parts.map(|compared| self.drift(compared, call));
                Verdict { link: LinkVerdict::Broken(broken.clone(), parent), drift }
            }
        }
    }

    /// The drift of all kept calls, agent after agent. What [`Forest::kept_verdict`] says of each, in time linear in the calls.
    #[must_use]
    pub fn kept_drifts(&self, kept: &CallSet, links: &Links) -> Vec<(CallIndex, Drift)> {
        self.needs_tokens();
        let mut drifts = Vec::new();
        for (_, agent) in self.agents() {
            let mut previous = None;
            for call in agent.calls().iter().copied() {
                let stored = self.call(call);
                if kept.contains(call) {
                    let drift = match (stored.link(), previous) {
                        (Link::Infer, Some(previous)) => self.drift_from(previous, call, links.parent(call)),
                        (Link::Infer, None) => None,
                        (Link::Root | Link::Parent(_), _) => self.kept_verdict(call, links).drift,
                    };
                    drifts.extend(drift.map(|drift| (call, drift)));
                }
                if stored.is_placed() && !stored.is_empty() {
                    previous = Some(call);
                }
            }
        }
        drifts
    }

    /// Advice for an inferred link: how it leaves its agent's previous call, if it does not continue it.
    fn drift_from_previous(&self, call: CallIndex, parent: Option<CallIndex>) -> Option<Drift> {
        self.drift_from(self.previous_of_agent(call)?, call, parent)
    }

    fn drift_from(&self, previous: CallIndex, call: CallIndex, parent: Option<CallIndex>) -> Option<Drift> {
        if parent == Some(previous) || self.fits(previous, call) { None } else { Some(self.drift(previous, call)) }
    }

    /// Where a call's prompt leaves the text of another call.
    fn drift(&self, compared: CallIndex, call: CallIndex) -> Drift {
        let matched_length = self.matched_length(compared, call);
        let ids = |view| self.tokens.ids_from(view, matched_length as usize, DRIFT_IDS_SHOWN);
        let found = super::prompt_view(&self.tokens, self.call(call)).map(ids).unwrap_or_default();
        let expected = super::full_view(self.call(compared)).map(ids).unwrap_or_default();
        let kind = if found.is_empty() { DriftKind::Rewind } else { DriftKind::Differs };
        Drift { compared, kind, matched_length, expected, found }
    }

    /// Whether `parent`'s whole text is a prefix of `call`'s prompt.
    fn fits(&self, parent: CallIndex, call: CallIndex) -> bool {
        let prompt = super::prompt_view(&self.tokens, self.call(call));
        match (super::full_view(self.call(parent)), prompt) {
            (Some(full), Some(prompt)) => self.tokens.is_prefix(full, prompt),
            (None, _) | (_, None) => false,
        }
    }

    fn matched_length(&self, parent: CallIndex, call: CallIndex) -> u32 {
        let prompt = super::prompt_view(&self.tokens, self.call(call));
        match (super::full_view(self.call(parent)), prompt) {
            (Some(full), Some(prompt)) => u32::try_from(self.tokens.common_length(full, prompt)).unwrap_or(u32::MAX),
            (None, _) | (_, None) => 0,
        }
    }

    /// The latest call of the same agent that comes before this one in order and has its ids.
    fn previous_of_agent(&self, call: CallIndex) -> Option<CallIndex> {
        let texts = &self.agents.get(self.call(call).agent).texts;
        let place = texts.partition_point(|other| self.call(*other).order() < self.call(call).order());
        texts[..place].last().copied()
    }
}

/// The call with the longest text that is a prefix of this call's prompt, of those whose ends these are.
fn longest_parent(
    ends: &mut EndIndex,
    tokens: &TokenStore,
    calls: &[Call],
    agents: &Agents,
    call: CallIndex,
) -> Option<CallIndex> {
    let prompt = super::prompt_view(tokens, &calls[call.index()])?;
    let parent_agent = |agent| agents.get(agent).parent;
    ends.longest_prefix(tokens, calls, prompt, |twins| choose(call, twins, calls, parent_agent)).flatten()
}

/// Among calls with equal text: one of the call's own agent, else of its parent agent, and so on upwards; then the latest
/// that comes before it in order, else the earliest.
fn choose(
    call: CallIndex,
    twins: &Twins,
    calls: &[Call],
    parent_agent: impl Fn(AgentIndex) -> Option<AgentIndex>,
) -> Option<CallIndex> {
    let twins = match twins {
        Twins::One(only) => return Some(*only),
        Twins::Many(twins) => twins,
    };
    let order = calls[call.index()].order();
    let nearest = |in_order: &[CallIndex]| {
        let before = in_order.partition_point(|twin| calls[twin.index()].order() < order);
        in_order[..before].last().or(in_order.first()).copied()
    };
    let mut passed = HashSet::new();
    let mut agent = Some(calls[call.index()].agent());
    while let Some(at) = agent.filter(|at| passed.insert(*at)) {
        let start = twins.by_agent.partition_point(|twin| calls[twin.index()].agent() < at);
        let end = twins.by_agent.partition_point(|twin| calls[twin.index()].agent() <= at);
        if let Some(own) = nearest(&twins.by_agent[start..end]) {
            return Some(own);
        }
        agent = parent_agent(at);
    }
    nearest(&twins.by_order)
}
