//! Links: which call a call continues (RULES section 3.2), and where one that should continue another does not (drift).
//!
//! A link is never guessed by text, by likeness or by position: only a call whose prompt + generation is exactly a prefix
//! of the prompt can be a parent.

use std::ops::ControlFlow;

use crate::ids::CallId;
use crate::limits::DRIFT_IDS_SHOWN;

use super::Forest;
use super::call::{AgentIndex, Call, CallIndex, Link};

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
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
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
enum Climb {
    Parent(Option<CallIndex>),
    Circle,
}

impl Forest {
    /// The links of the kept calls. Calls that generated nothing, or have no ids, must not be among them.
    pub fn links(&mut self, kept: &CallSet) -> Links {
        let mut links = Links { parents: vec![None; self.call_count()], broken: Vec::new() };
        for call in kept.iter() {
            let (parent, broken) = self.kept_link(call, kept);
            links.parents[call.index()] = parent;
            links.broken.extend(broken.map(|broken| (call, broken)));
        }
        links
    }

    fn kept_link(&mut self, call: CallIndex, kept: &CallSet) -> (Option<CallIndex>, Option<BrokenLink>) {
        let named = match self.call(call).link.clone() {
            Link::Root => return (None, None),
            Link::Infer => return (self.infer(call, kept), None),
            Link::Parent(named) => named,
        };
        let mut first_difference = None;
        if let Some(parent) = self.find_placed(&named).filter(|parent| *parent != call) {
            if self.fits(parent, call) {
                if let Climb::Parent(parent) = self.climb(parent, kept) {
                    return (parent, None);
                }
            } else {
                first_difference = Some(self.matched_length(parent, call));
            }
        }
        (self.infer(call, kept), Some(BrokenLink { named, first_difference }))
    }

    /// From a named parent up, by its own links, to the nearest kept call.
    fn climb(&mut self, from: CallIndex, kept: &CallSet) -> Climb {
        let mut passed = std::collections::HashSet::new();
        let mut at = from;
        loop {
            if kept.contains(at) {
                return Climb::Parent(Some(at));
            }
            if !passed.insert(at) {
                return Climb::Circle;
            }
            let named = match &self.call(at).link {
                Link::Root => return Climb::Parent(None),
                Link::Infer => None,
                Link::Parent(named) => self.find_placed(named),
            };
            match named {
                Some(parent) if self.fits(parent, at) => at = parent,
                Some(_) | None => return Climb::Parent(self.infer(at, kept)),
            }
        }
    }

    /// The kept call with the longest text that is a prefix of this call's prompt.
    fn infer(&mut self, call: CallIndex, kept: &CallSet) -> Option<CallIndex> {
        self.longest_parent(call, |other| kept.contains(other))
    }

    fn longest_parent(&mut self, call: CallIndex, may_be: impl Fn(CallIndex) -> bool) -> Option<CallIndex> {
        let prompt = super::prompt_view(&self.tokens, &self.calls[call.index()])?;
        let (calls, agents) = (&self.calls, &self.agents);
        self.ends.visit_prefixes(&self.tokens, calls, prompt, |twins| {
            let parent_agent = |agent: AgentIndex| agents.get(agent).parent;
            match choose(call, twins, calls, parent_agent, |twin| twin != call && may_be(twin)) {
                Some(parent) => ControlFlow::Break(parent),
                None => ControlFlow::Continue(()),
            }
        })
    }

    /// What is known of a call's link now: against all calls that have come, kept or not.
    pub(crate) fn verdict(&mut self, call: CallIndex) -> Verdict {
        if let Some(base) = self.call(call).pending_base() {
            return Verdict { link: LinkVerdict::Waiting(base.clone()), drift: None };
        }
        let inferred = |forest: &mut Self| forest.longest_parent(call, |_| true);
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

    /// Advice for an inferred link: how it leaves its agent's previous call, if it does not continue it.
    pub(crate) fn drift_from_previous(&self, call: CallIndex, parent: Option<CallIndex>) -> Option<Drift> {
        let previous = self.previous_of_agent(call)?;
        if parent == Some(previous) || self.fits(previous, call) { None } else { Some(self.drift(previous, call)) }
    }

    /// Where a call's prompt leaves the text of another call.
    #[must_use]
    pub fn drift(&self, compared: CallIndex, call: CallIndex) -> Drift {
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
        let of_agent = &self.agents.get(self.call(call).agent).calls;
        let place = of_agent.partition_point(|other| self.call(*other).order() < self.call(call).order());
        of_agent[..place].iter().rev().copied().find(|other| {
            let other = self.call(*other);
            other.is_placed() && !other.is_empty()
        })
    }
}

/// Among calls with equal text: one of the call's own agent, else of its parent agent, and so on upwards; then the latest
/// that comes before it in order, else the earliest. `twins` are sorted by (agent, order).
fn choose(
    call: CallIndex,
    twins: &[CallIndex],
    calls: &[Call],
    parent_agent: impl Fn(AgentIndex) -> Option<AgentIndex>,
    may_be: impl Fn(CallIndex) -> bool,
) -> Option<CallIndex> {
    if let [only] = twins {
        return Some(*only).filter(|only| may_be(*only));
    }
    let order = calls[call.index()].order();
    let mut passed = std::collections::HashSet::new();
    let mut agent = Some(calls[call.index()].agent());
    while let Some(at) = agent.filter(|at| passed.insert(*at)) {
        let start = twins.partition_point(|twin| calls[twin.index()].agent() < at);
        let end = twins.partition_point(|twin| calls[twin.index()].agent() <= at);
        let own = &twins[start..end];
        let before = own.partition_point(|twin| calls[twin.index()].order() < order);
        let may_be = |twin: &CallIndex| may_be(*twin);
        let found = own[..before].iter().rev().copied().find(may_be);
        if let Some(found) = found.or_else(|| own[before..].iter().copied().find(may_be)) {
            return Some(found);
        }
        agent = parent_agent(at);
    }
    let order_of = |twin: &CallIndex| calls[twin.index()].order();
    let all = || twins.iter().copied().filter(|twin| may_be(*twin));
    all().filter(|twin| order_of(twin) < order).max_by_key(order_of).or_else(|| all().min_by_key(order_of))
}
