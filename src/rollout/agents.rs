//! What is known of a rollout's agents besides their calls: starts, ends, and the lists of calls that they kept.
//!
//! An agent may be resumed, so facts are kept for each (agent, resumption). A second, other value of a fact is refused;
//! a value that was left out may still come. The kept calls are the union of all lists, of ends and of the seal.

use std::collections::{BTreeMap, HashSet};
use std::hash::Hash;

use crate::error::{Reason, Refusal};
use crate::forest::Forest;
use crate::forest::call::AgentIndex;
use crate::ids::{AgentId, CallId};

use super::event::{AgentEnd, AgentStart};

/// Starts, ends and kept lists of all agents of a rollout.
#[derive(Clone, Debug, Default)]
pub struct AgentBook {
    starts: BTreeMap<(AgentIndex, u32), AgentStart>,
    ends: BTreeMap<(AgentIndex, u32), AgentEnd>,
    /// Agents that gave a list, at an end or in the seal.
    with_list: HashSet<AgentIndex>,
    /// The union of all lists, in the order in which they were given.
    kept: Vec<CallId>,
    kept_set: HashSet<CallId>,
}

/// Whether a fact is new.
#[derive(Debug, PartialEq)]
pub(crate) enum Merged<T> {
    /// Nothing new.
    Same,
    /// All that is known now.
    New(T),
}

impl AgentBook {
    /// All starts, by agent and resumption.
    pub fn starts(&self, agent: AgentIndex) -> impl Iterator<Item = &AgentStart> {
        self.starts.range((agent, 0)..=(agent, u32::MAX)).map(|(_, start)| start)
    }

    /// All ends, by agent and resumption.
    pub fn ends(&self, agent: AgentIndex) -> impl Iterator<Item = &AgentEnd> {
        self.ends.range((agent, 0)..=(agent, u32::MAX)).map(|(_, end)| end)
    }

    /// How many starts and ends it holds.
    #[must_use]
    pub fn fact_count(&self) -> usize {
        self.starts.len() + self.ends.len()
    }

    /// Agents whose latest start has its end.
    #[must_use]
    pub fn finished(&self, agent: AgentIndex) -> bool {
        let last_start = self.starts(agent).last().map(|start| start.resumption);
        let last_end = self.ends(agent).last().map(|end| end.resumption);
        last_end.is_some() && last_end >= last_start
    }

    /// Whether some list was given.
    #[must_use]
    pub fn some_list_given(&self) -> bool {
        !self.with_list.is_empty()
    }

    /// Whether this agent gave a list.
    #[must_use]
    pub fn has_list(&self, agent: AgentIndex) -> bool {
        self.with_list.contains(&agent)
    }

    /// The calls on some list.
    #[must_use]
    pub fn kept(&self) -> &[CallId] {
        &self.kept
    }

    /// Whether the call is on some list.
    #[must_use]
    pub fn keeps(&self, call: &CallId) -> bool {
        self.kept_set.contains(call)
    }

    pub(crate) fn judge_start(&self, forest: &Forest, new: &AgentStart) -> Result<Merged<AgentStart>, Refusal> {
        check_parent(forest, &new.agent_id, new.parent_agent_id.as_ref(), "agent_start.parent_agent_id")?;
        let known = forest.find_agent(&new.agent_id).and_then(|agent| self.starts.get(&(agent, new.resumption)));
        let Some(known) = known else { return Ok(Merged::New(new.clone())) };
        let conflict = |field: &str| {
            let message = format!(
                "agent {:?} (resumption {}) was started with another {field}; the first value stands",
                new.agent_id, new.resumption
            );
            Refusal::new(Reason::AgentStartConflict, message).field(format!("agent_start.{field}")).agent(&new.agent_id)
        };
        let merged = AgentStart {
            agent_id: known.agent_id.clone(),
            resumption: known.resumption,
            parent_agent_id: known.parent_agent_id.clone().or_else(|| new.parent_agent_id.clone()),
            spawning_call_id: merge(known.spawning_call_id.as_ref(), new.spawning_call_id.as_ref())
                .map_err(|()| conflict("spawning_call_id"))?,
            origin: merge(known.origin.as_ref(), new.origin.as_ref()).map_err(|()| conflict("origin"))?,
            profile: merge(known.profile.as_ref(), new.profile.as_ref()).map_err(|()| conflict("profile"))?,
            model: merge(known.model.as_ref(), new.model.as_ref()).map_err(|()| conflict("model"))?,
        };
        Ok(if merged == *known { Merged::Same } else { Merged::New(merged) })
    }

    pub(crate) fn judge_end(&self, forest: &Forest, new: &AgentEnd) -> Result<Merged<AgentEnd>, Refusal> {
        let known = forest.find_agent(&new.agent_id).and_then(|agent| self.ends.get(&(agent, new.resumption)));
        let Some(known) = known else { return Ok(Merged::New(new.clone())) };
        let conflict = |field: &str| {
            let message = format!(
                "agent {:?} (resumption {}) ended with another {field}; the first value stands. An agent that goes on \
                 reports its next end under the next resumption",
                new.agent_id, new.resumption
            );
            Refusal::new(Reason::AgentEndConflict, message).field(format!("agent_end.{field}")).agent(&new.agent_id)
        };
        if known.status != new.status {
            return Err(conflict("status"));
        }
        let kept = match (&known.kept, &new.kept) {
            (Some(one), Some(other)) if !same_set(one, other) => return Err(conflict("kept")),
            (Some(list), _) | (None, Some(list)) => Some(list.clone()),
            (None, None) => None,
        };
        let answers_read = match (known.answers_read.is_empty(), new.answers_read.is_empty()) {
            (false, false) if !same_set(&known.answers_read, &new.answers_read) => {
                return Err(conflict("answers_read_agent_ids"));
            }
            (true, _) => new.answers_read.clone(),
            (false, _) => known.answers_read.clone(),
        };
        let merged = AgentEnd { kept, answers_read, ..known.clone() };
        Ok(if merged == *known { Merged::Same } else { Merged::New(merged) })
    }

    pub(crate) fn apply_start(&mut self, forest: &mut Forest, start: AgentStart) {
        let agent = forest.intern_agent(&start.agent_id);
        if let Some(parent) = &start.parent_agent_id {
            forest.set_parent_agent(agent, parent);
        }
        self.starts.insert((agent, start.resumption), start);
    }

    pub(crate) fn apply_end(&mut self, forest: &mut Forest, end: AgentEnd) {
        let agent = forest.intern_agent(&end.agent_id);
        if let Some(kept) = &end.kept {
            self.keep(agent, kept);
        }
        self.ends.insert((agent, end.resumption), end);
    }

    pub(crate) fn apply_lists(&mut self, forest: &mut Forest, lists: &BTreeMap<AgentId, Vec<CallId>>) {
        for (agent, kept) in lists {
            let agent = forest.intern_agent(agent);
            self.keep(agent, kept);
        }
    }

    fn keep(&mut self, agent: AgentIndex, calls: &[CallId]) {
        self.with_list.insert(agent);
        for call in calls {
            if self.kept_set.insert(call.clone()) {
                self.kept.push(call.clone());
            }
        }
    }
}

/// Refuses a second, other parent of an agent.
pub(crate) fn check_parent(
    forest: &Forest,
    agent_id: &AgentId,
    parent: Option<&AgentId>,
    field: &str,
) -> Result<(), Refusal> {
    let known = forest.find_agent(agent_id).and_then(|agent| forest.agent(agent).parent());
    match (known.map(|known| forest.agent(known).id()), parent) {
        (Some(known), Some(parent)) if known != parent => {
            let message =
                format!("the parent of agent {agent_id:?} is {known:?}, not {parent:?}; the first value stands");
            Err(Refusal::new(Reason::AgentParentConflict, message).field(field).agent(agent_id))
        }
        (Some(_) | None, _) => Ok(()),
    }
}

/// Whether two lists hold the same ids, in any order.
pub(crate) fn same_set<T: Eq + Hash>(one: &[T], other: &[T]) -> bool {
    one == other || one.iter().collect::<HashSet<_>>() == other.iter().collect::<HashSet<_>>()
}

/// The value of a fact that may be left out: a value stands, a second must be the same.
fn merge<T: Clone + PartialEq>(known: Option<&T>, new: Option<&T>) -> Result<Option<T>, ()> {
    match (known, new) {
        (Some(known), Some(new)) if known != new => Err(()),
        (Some(value), _) | (None, Some(value)) => Ok(Some(value.clone())),
        (None, None) => Ok(None),
    }
}
