//! One rollout's calls → forest → rows (RULES section 3). Pure: no clock, no files, no randomness.
//!
//! A [`Forest`] owns the calls of one rollout, their ids in shared storage ([`tokens`]), and the index by which the longest
//! prefix is found ([`index`]). A call comes in two steps: [`Forest::judge_call`] reads only and says whether it is new, known
//! already, or cannot be; [`Forest::apply_call`] stores what was judged and cannot fail. The second also takes what a log gives
//! back, and then gives the same forest.
//!
//! Links and rows depend on the set of the calls and on what is kept, never on the order in which they came:
//! [`Forest::links`] finds parents, [`plan`] leaves and owners, [`rows`] the rows.
//!
//! Its ids may leave memory ([`evict`]); then it is made again before anything is asked of it that needs them.
//!
//! Limits are the caller's: the forest takes any number of calls below 2^32 and texts below 2^32 ids.

mod accept;
pub mod call;
pub mod digest;
mod evict;
mod index;
pub mod link;
pub mod plan;
pub mod rows;
pub(crate) mod size;
pub mod tokens;

use hashbrown::HashMap;

use crate::ids::{AgentId, CallId, Name};

pub use accept::{Accepted, CallRecord, CallRefusal, JudgedCall, Placement};
use call::{AgentIndex, Call, CallIndex, CallTokens, NameIndex};
use index::EndIndex;
use tokens::{BlockId, TokenStore, View};

/// One agent, as far as links need it.
#[derive(Clone, Debug)]
pub struct Agent {
    id: AgentId,
    parent: Option<AgentIndex>,
    /// In the order (sequence, call id).
    calls: Vec<CallIndex>,
    /// Of these, those that have their ids and generated some, in the same order.
    texts: Vec<CallIndex>,
}

impl Agent {
    /// Its id.
    #[must_use]
    pub fn id(&self) -> &AgentId {
        &self.id
    }

    /// Its parent agent, if one was said.
    #[must_use]
    pub fn parent(&self) -> Option<AgentIndex> {
        self.parent
    }

    /// Its calls in order.
    #[must_use]
    pub fn calls(&self) -> &[CallIndex] {
        &self.calls
    }
}

/// The agents of a rollout, in the order in which it heard of them.
#[derive(Clone, Debug, Default)]
pub(crate) struct Agents {
    list: Vec<Agent>,
    id_bytes: usize,
    by_id: HashMap<AgentId, AgentIndex>,
}

impl Agents {
    pub(crate) fn get(&self, agent: AgentIndex) -> &Agent {
        &self.list[agent.index()]
    }

    fn intern(&mut self, id: &AgentId) -> AgentIndex {
        if let Some(known) = self.by_id.get(id) {
            return *known;
        }
        let agent = AgentIndex(u32::try_from(self.list.len()).unwrap_or(u32::MAX));
        self.list.push(Agent { id: id.clone(), parent: None, calls: Vec::new(), texts: Vec::new() });
        self.id_bytes += id.as_str().len();
        self.by_id.insert(id.clone(), agent);
        agent
    }
}

/// The small names of a rollout: policies, models, kinds, finish reasons.
#[derive(Clone, Debug, Default)]
struct Names {
    list: Vec<Name>,
    text_bytes: usize,
    by_name: HashMap<Name, NameIndex>,
}

impl Names {
    fn intern(&mut self, name: &Name) -> NameIndex {
        if let Some(known) = self.by_name.get(name) {
            return *known;
        }
        let index = NameIndex(u32::try_from(self.list.len()).unwrap_or(u32::MAX));
        self.list.push(name.clone());
        self.text_bytes += name.as_str().len();
        self.by_name.insert(name.clone(), index);
        index
    }
}

/// The calls of one rollout and what links them.
#[derive(Default)]
pub struct Forest {
    tokens: TokenStore,
    calls: Vec<Call>,
    by_id: HashMap<CallId, CallIndex>,
    agents: Agents,
    names: Names,
    ends: EndIndex,
    /// Calls that wait for this base.
    waiting: HashMap<CallId, Vec<CallIndex>>,
    /// For a call that waits: a call further up the line of bases that it waits for.
    lines: HashMap<CallIndex, CallId>,
    /// The first block that a call made, for each call that made some; blocks of one call are consecutive.
    makers: Vec<(BlockId, CallIndex)>,
    totals: Totals,
    /// Bytes of what calls hold by themselves: see [`size`].
    array_bytes: usize,
    /// Its ids were let go of.
    is_skeleton: bool,
}

/// Counts over all accepted calls of a rollout.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Totals {
    /// Tokens of all prompts, each counted as often as it was sent.
    pub prompt_tokens: u64,
    /// Generated tokens.
    pub generated_tokens: u64,
    /// Calls that generated nothing.
    pub empty_calls: u64,
    /// Calls whose delta waits for its base.
    pub waiting_calls: u64,
    /// Calls whose delta's base turned out to be another.
    pub unresolved_calls: u64,
}

impl Forest {
    /// How many calls it holds.
    #[must_use]
    pub fn call_count(&self) -> usize {
        self.calls.len()
    }

    /// How many agents it has heard of.
    #[must_use]
    pub fn agent_count(&self) -> usize {
        self.agents.list.len()
    }

    /// How many distinct names of policies, models, kinds and finish reasons it holds.
    #[must_use]
    pub fn name_count(&self) -> usize {
        self.names.list.len()
    }

    /// A call of this forest.
    #[must_use]
    pub fn call(&self, call: CallIndex) -> &Call {
        &self.calls[call.index()]
    }

    /// All calls, in the order of arrival.
    pub fn calls(&self) -> impl ExactSizeIterator<Item = (CallIndex, &Call)> {
        self.calls.iter().enumerate().map(|(index, call)| (CallIndex(u32::try_from(index).unwrap_or(u32::MAX)), call))
    }

    /// The places of calls in the order of arrival, as far as there are calls.
    pub fn call_indices(&self, range: std::ops::Range<usize>) -> impl Iterator<Item = CallIndex> + use<> {
        let end = range.end.min(self.calls.len());
        (range.start..end).map(|index| CallIndex(u32::try_from(index).unwrap_or(u32::MAX)))
    }

    /// The call with this id.
    #[must_use]
    pub fn find(&self, id: &CallId) -> Option<CallIndex> {
        self.by_id.get(id).copied()
    }

    /// The call with this id, if its ids are known.
    #[must_use]
    pub fn find_placed(&self, id: &CallId) -> Option<CallIndex> {
        self.find(id).filter(|call| self.call(*call).is_placed())
    }

    /// An agent of this forest.
    #[must_use]
    pub fn agent(&self, agent: AgentIndex) -> &Agent {
        self.agents.get(agent)
    }

    /// All agents, in the order in which the rollout heard of them.
    pub fn agents(&self) -> impl ExactSizeIterator<Item = (AgentIndex, &Agent)> {
        let index = |index| AgentIndex(u32::try_from(index).unwrap_or(u32::MAX));
        self.agents.list.iter().enumerate().map(move |(place, agent)| (index(place), agent))
    }

    /// The agent with this id.
    #[must_use]
    pub fn find_agent(&self, id: &AgentId) -> Option<AgentIndex> {
        self.agents.by_id.get(id).copied()
    }

    /// The agent with this id, made if it was not there.
    pub fn intern_agent(&mut self, id: &AgentId) -> AgentIndex {
        self.agents.intern(id)
    }

    /// Sets an agent's parent. That a second, other value is refused is the caller's to see to.
    pub fn set_parent_agent(&mut self, agent: AgentIndex, parent: &AgentId) {
        let parent = self.agents.intern(parent);
        self.agents.list[agent.index()].parent = Some(parent);
    }

    /// The small name at this place.
    #[must_use]
    pub fn name(&self, name: NameIndex) -> &Name {
        &self.names.list[name.0 as usize]
    }

    /// The policy that sampled a call.
    #[must_use]
    pub fn policy(&self, call: CallIndex) -> &Name {
        self.name(self.call(call).policy)
    }

    /// What kind of call it is.
    #[must_use]
    pub fn kind(&self, call: CallIndex) -> &Name {
        self.name(self.call(call).kind)
    }

    /// Why its generation ended, if said.
    #[must_use]
    pub fn finish_reason(&self, call: CallIndex) -> Option<&Name> {
        self.call(call).finish_reason.map(|name| self.name(name))
    }

    /// The model's own name, if said.
    #[must_use]
    pub fn model(&self, call: CallIndex) -> Option<&Name> {
        self.call(call).model.map(|name| self.name(name))
    }

    /// All policies that sampled a kept call, in the order of their names.
    #[must_use]
    pub fn policies(&self, kept: &link::CallSet) -> Vec<Name> {
        let sampled: std::collections::BTreeSet<NameIndex> = kept.iter().map(|call| self.call(call).policy).collect();
        let mut names: Vec<Name> = sampled.into_iter().map(|name| self.name(name).clone()).collect();
        names.sort();
        names
    }

    /// Counts over all calls.
    #[must_use]
    pub fn totals(&self) -> Totals {
        self.totals
    }

    /// Tokens held in shared storage: whole blocks and tails, each prefix once.
    #[must_use]
    pub fn stored_tokens(&self) -> usize {
        let tails = self.calls.iter().map(|call| match &call.tokens {
            CallTokens::Placed { tail, .. } => tail.len(),
            CallTokens::Waiting(pending) | CallTokens::Unresolved(pending) => {
                pending.delta.suffix.len() + pending.generation.len()
            }
        });
        (self.tokens.block_count() - 1) * digest::BLOCK_TOKENS + tails.sum::<usize>()
    }

    /// The ids of a call's prompt + generation, if they are known.
    #[must_use]
    pub fn full_ids(&self, call: CallIndex) -> Option<Vec<u32>> {
        self.needs_tokens();
        full_view(self.call(call)).map(|view| self.tokens.to_vec(view))
    }
}

/// A call's prompt + generation.
fn full_view(call: &Call) -> Option<View<'_>> {
    match &call.tokens {
        CallTokens::Placed { block, tail } => Some(View { block: *block, tail }),
        CallTokens::Waiting(_) | CallTokens::Unresolved(_) => None,
    }
}

/// A call's prompt.
fn prompt_view<'a>(tokens: &'a TokenStore, call: &'a Call) -> Option<View<'a>> {
    full_view(call).map(|full| tokens.prefix(full, call.prompt_length()))
}

#[cfg(test)]
mod tests;
