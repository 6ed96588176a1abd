//! What a sealed rollout still waits for: kept calls with their ids, and the calls that their links name (RULES 4, "Complete").
//!
//! The calls to wait for are one growing list, gone through by a cursor that only moves forward: a call behind the cursor is
//! there. So the wait costs constant time for each call in all, however many come after the seal. The list is made anew when a
//! new kept list has something not be kept any more, and for each look once a clock has given something up: what comes after that may still
//! name a call to wait for.

use std::collections::HashSet;

use crate::forest::call::{CallIndex, Link};
use crate::ids::CallId;

use super::Facts;

/// Why a call is waited for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Cause {
    /// It is kept.
    Kept,
    /// This call names it as its parent.
    NamedParent(CallId),
    /// The delta of this call, which is waited for itself, begins with it.
    NamedBase(CallId),
}

impl Cause {
    /// Whether the wait for it ends with `missing_call_timeout`.
    #[must_use]
    pub fn is_kept(&self) -> bool {
        matches!(self, Self::Kept)
    }

    /// Whether the wait for it ends with `missing_parent_timeout`.
    #[must_use]
    pub fn is_parent(&self) -> bool {
        matches!(self, Self::NamedParent(_))
    }
}

/// The calls that a rollout waits for.
#[derive(Debug, Default)]
pub struct Awaited {
    required: Vec<(CallId, Cause)>,
    seen: HashSet<CallId>,
    cursor: usize,
}

impl Awaited {
    /// All calls that have to be there, as of now.
    #[must_use]
    pub fn new(facts: &Facts) -> Self {
        let mut awaited = Self::default();
        facts.agents.kept().iter().for_each(|call| awaited.require(call, Cause::Kept));
        for (index, call) in facts.forest.calls() {
            if facts.is_kept(index) {
                awaited.require(call.id(), Cause::Kept);
            }
        }
        awaited
    }

    /// A new call is there; it may be kept itself.
    pub fn call_came(&mut self, facts: &Facts, call: CallIndex) {
        if facts.is_kept(call) {
            self.require(facts.forest.call(call).id(), Cause::Kept);
        }
    }

    /// These calls are kept too.
    pub fn list_came(&mut self, list: &[CallId]) {
        list.iter().for_each(|call| self.require(call, Cause::Kept));
    }

    /// Whether all are there. Moves the cursor past those that are.
    pub fn all_there(&mut self, facts: &Facts) -> bool {
        while let Some((id, _)) = self.required.get(self.cursor) {
            let Some(call) = facts.forest.find_placed(id) else { return false };
            self.cursor += 1;
            self.require_parent(facts, call);
        }
        true
    }

    /// Whether all are there but those that a clock has given up.
    #[must_use]
    pub fn all_but_given_up(self, facts: &Facts) -> bool {
        self.missing(facts).iter().all(|(_, cause)| match cause {
            Cause::Kept => facts.without_missing,
            Cause::NamedParent(_) => facts.parents_given_up,
            // The call that needs it for its ids is missing itself.
            Cause::NamedBase(_) => true,
        })
    }

    /// All that are not there, wherever the cursor is.
    #[must_use]
    pub fn missing(mut self, facts: &Facts) -> Vec<(CallId, Cause)> {
        let mut missing = Vec::new();
        while let Some((id, cause)) = self.required.get(self.cursor).cloned() {
            self.cursor += 1;
            match facts.forest.find_placed(&id) {
                Some(call) => self.require_parent(facts, call),
                None => missing.push((id, cause)),
            }
        }
        // Bases come last: one that is kept or named as a parent stands there for that.
        let mut at = 0;
        while let Some((id, _)) = missing.get(at).cloned() {
            at += 1;
            let base = facts.forest.find(&id).and_then(|call| facts.forest.call(call).pending_base());
            if let Some(base) = base.filter(|base| facts.forest.find_placed(base).is_none())
                && self.seen.insert(base.clone())
            {
                missing.push((base.clone(), Cause::NamedBase(id)));
            }
        }
        missing
    }

    /// The parent that a call names has to be there too, up to a kept one (which is required anyway).
    fn require_parent(&mut self, facts: &Facts, call: CallIndex) {
        let stored = facts.forest.call(call);
        if let Link::Parent(parent) = stored.link() {
            self.require(parent, Cause::NamedParent(stored.id().clone()));
        }
    }

    fn require(&mut self, call: &CallId, cause: Cause) {
        if self.seen.insert(call.clone()) {
            self.required.push((call.clone(), cause));
        }
    }
}
