//! What a sealed rollout still waits for: kept calls with their ids, and the calls that their links name (RULES 4, "Complete").
//!
//! The calls to wait for are one growing list, gone through by a cursor that only moves forward: a call behind the cursor is
//! there, or a clock has given it up. One that was given up may come after all, and name a call to wait for. So the wait costs
//! constant time for each call in all, however many come after the seal. The list is made anew only when a new kept list has
//! something not be kept any more.

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

    /// Whether a clock has ended the wait for it.
    #[must_use]
    pub fn is_given_up(&self, facts: &Facts) -> bool {
        match self {
            Self::Kept => facts.without_missing,
            Self::NamedParent(_) => facts.parents_given_up,
            // The call that needs it for its ids is missing itself.
            Self::NamedBase(_) => true,
        }
    }
}

/// The calls that a rollout waits for.
#[derive(Debug, Default)]
pub struct Awaited {
    required: Vec<(CallId, Cause)>,
    /// Those that are required for being kept, or as a base.
    seen: HashSet<CallId>,
    /// Those that were named as parents and not kept then; one that is kept later is required again, for that.
    named: HashSet<CallId>,
    cursor: usize,
    /// Those that the cursor has passed and that are not there.
    given_up: HashSet<CallId>,
    /// How many of the list were gone through.
    #[cfg(test)]
    pub(super) steps: usize,
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
        self.ids_came(facts, call);
    }

    /// A call that had waited for its ids has them, or does not need to wait any longer.
    pub fn ids_came(&mut self, facts: &Facts, call: CallIndex) {
        let stored = facts.forest.call(call);
        if stored.is_placed() && self.given_up.remove(stored.id()) {
            self.require_parent(facts, call);
        }
    }

    /// These calls are kept too.
    pub fn list_came(&mut self, list: &[CallId]) {
        list.iter().for_each(|call| self.require(call, Cause::Kept));
    }

    /// Whether all are there but those that a clock has given up. Moves the cursor past those.
    pub fn all_there(&mut self, facts: &Facts) -> bool {
        while let Some((id, cause)) = self.required.get(self.cursor) {
            #[cfg(test)]
            {
                self.steps += 1;
            }
            match facts.forest.find_placed(id) {
                Some(call) => {
                    self.cursor += 1;
                    self.require_parent(facts, call);
                }
                // One that was named first and is kept by now stands once more behind the cursor, for that.
                None if cause.is_given_up(facts) || (cause.is_parent() && self.seen.contains(id)) => {
                    self.given_up.insert(id.clone());
                    self.cursor += 1;
                }
                None => return false,
            }
        }
        true
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
                && !self.named.contains(base)
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
        let is_new = match &cause {
            Cause::NamedParent(_) => !self.seen.contains(call) && self.named.insert(call.clone()),
            Cause::Kept | Cause::NamedBase(_) => self.seen.insert(call.clone()),
        };
        if is_new {
            self.required.push((call.clone(), cause));
        }
    }
}
