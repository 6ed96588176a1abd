//! Figures of a rollout for its harness and for people: what is missing, which agents gave no list, depth and steps.
//!
//! Computed when asked; linear in the rollout's calls.

use std::collections::HashMap;

use crate::forest::Agent;
use crate::forest::call::{AgentIndex, CallIndex, Link, TokensState};
use crate::forest::link::{CallSet, Links};
use crate::ids::{AgentId, CallId};

use super::awaited::{Awaited, Cause};
use super::{Facts, Rollout};

/// Why a call that is waited for is not there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MissingState {
    /// Nothing of it has come.
    NeverCame,
    /// Its delta waits for the base.
    WaitingForBase,
    /// It must come in full.
    Unresolved,
    /// It was refused, for this reason, and must be sent again.
    Refused(&'static str),
}

/// A call that is waited for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Missing {
    /// The call.
    pub call: CallId,
    /// Why it is not there.
    pub state: MissingState,
    /// Why it is waited for.
    pub cause: Cause,
}

/// All calls that are waited for, as of now; none once it is finalised.
#[must_use]
pub fn missing(rollout: &Rollout) -> Vec<Missing> {
    let Rollout::Open(open) = rollout else { return Vec::new() };
    let facts = &open.facts;
    let state = |call: &CallId| match facts.forest.find(call).map(|call| facts.forest.call(call).tokens_state()) {
        Some(TokensState::WaitingForBase) => MissingState::WaitingForBase,
        Some(TokensState::Unresolved) => MissingState::Unresolved,
        Some(TokensState::Placed) | None => match open.refused.get(call) {
            Some(reason) => MissingState::Refused(reason),
            None => MissingState::NeverCame,
        },
    };
    let awaited = Awaited::new(facts).missing(facts);
    awaited.into_iter().map(|(call, cause)| Missing { state: state(&call), call, cause }).collect()
}

/// Looks for a call that is waited for, a few calls at a time: for who may not keep a rollout from others. What comes meanwhile is
/// looked at, too.
#[derive(Debug, Default)]
pub struct AwaitedSearch {
    /// How many of the listed calls, and then of all calls, were looked at.
    listed: usize,
    arrived: usize,
    /// The parent that the last one named.
    named: Option<CallId>,
    /// Those that are there, and whose parents were looked at.
    passed: CallSet,
}

impl AwaitedSearch {
    /// Looks at so many more; whether some call is waited for, or none if that is not known yet.
    pub fn look(&mut self, rollout: &Rollout, calls_max: usize) -> Option<bool> {
        let Rollout::Open(open) = rollout else { return Some(false) };
        let facts = &open.facts;
        if missing_expected_calls(facts) > 0 {
            return Some(true);
        }
        for _ in 0..calls_max {
            let call = match self.named.take() {
                Some(named) => facts.forest.find_placed(&named),
                None => match self.next(facts) {
                    Some(Ok(listed)) => facts.forest.find_placed(listed),
                    Some(Err(arrived)) if facts.is_kept(arrived) => {
                        facts.forest.find_placed(facts.forest.call(arrived).id())
                    }
                    Some(Err(_)) => continue,
                    None => return Some(false),
                },
            };
            let Some(call) = call else { return Some(true) };
            if !self.passed.contains(call) {
                self.passed.insert(call);
                if let Link::Parent(parent) = facts.forest.call(call).link() {
                    self.named = Some(parent.clone());
                }
            }
        }
        None
    }

    /// The next call that is listed, or has come.
    fn next<'a>(&mut self, facts: &'a Facts) -> Option<Result<&'a CallId, CallIndex>> {
        if let Some(listed) = facts.agents.kept().get(self.listed) {
            self.listed += 1;
            return Some(Ok(listed));
        }
        let arrived = facts.forest.call_indices(self.arrived..self.arrived + 1).next()?;
        self.arrived += 1;
        Some(Err(arrived))
    }
}

/// How many distinct calls are missing to `expected_calls`; 0 if it was not given.
#[must_use]
pub fn missing_expected_calls(facts: &Facts) -> u64 {
    let expected = facts.seal.as_ref().and_then(|seal| seal.expected_calls).unwrap_or(0);
    expected.saturating_sub(facts.forest.call_count() as u64)
}

/// Agents that made calls and gave no list, though some list was given.
#[must_use]
pub fn agents_without_list(facts: &Facts) -> Vec<AgentId> {
    if !facts.some_list_given() {
        return Vec::new();
    }
    let agents = facts.forest.agents();
    let without = agents.filter(|(index, agent)| !agent.calls().is_empty() && !facts.agents.has_list(*index));
    without.map(|(_, agent)| agent.id().clone()).collect()
}

/// The shape of a rollout's trees.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Shape {
    /// Agents that were started, by an event or by their first call.
    pub agents_started: u64,
    /// Agents whose latest start has its end.
    pub agents_finished: u64,
    /// The most agents from a leader down to a subagent.
    pub agent_depth: u32,
    /// The most calls on one walk.
    pub call_depth: u64,
    /// The most calls that came one after another: along walks, and through the calls that spawned agents.
    pub critical_steps: u64,
}

impl Rollout {
    /// The links as of now: those of the finalised rollout, or of what is kept so far.
    #[must_use]
    pub fn links_now(&mut self) -> Links {
        match self {
            Self::Finalised(finalised) => finalised.links.clone(),
            Self::Open(open) => {
                let kept = open.facts.kept();
                open.facts.forest.links(&kept)
            }
        }
    }

    /// The shape of its trees with these links.
    #[must_use]
    pub fn shape(&self, links: &Links) -> Shape {
        let facts = self.facts();
        let agents: Vec<_> = facts.forest.agents().collect();
        let finished = agents.iter().filter(|(agent, _)| facts.agents.finished(*agent)).count();
        let started = |(index, agent): &&(AgentIndex, &Agent)| {
            !agent.calls().is_empty() || facts.agents.starts(*index).next().is_some()
        };
        let spawning: Vec<_> = agents.iter().map(|(agent, _)| spawning_call(facts, *agent)).collect();
        let spawning_call = |call: CallIndex| spawning.get(facts.forest.call(call).agent().index()).copied().flatten();
        Shape {
            agents_started: agents.iter().filter(started).count() as u64,
            agents_finished: finished as u64,
            agent_depth: agent_depth(facts),
            call_depth: call_depth(facts, links),
            critical_steps: longest_chain(facts.forest.call_count(), |call| {
                let parent = links.parent(call);
                vec![parent, if parent.is_none() { spawning_call(call) } else { None }]
            }),
        }
    }
}

/// The most calls on one walk.
#[must_use]
pub fn call_depth(facts: &Facts, links: &Links) -> u64 {
    longest_chain(facts.forest.call_count(), |call| vec![links.parent(call)])
}

/// The call that spawned an agent.
fn spawning_call(facts: &Facts, agent: AgentIndex) -> Option<CallIndex> {
    let spawning = facts.agents.starts(agent).find_map(|start| start.spawning_call_id.as_ref())?;
    facts.forest.find(spawning)
}

fn agent_depth(facts: &Facts) -> u32 {
    let mut depths: HashMap<usize, u32> = HashMap::new();
    let mut deepest = 0;
    for (agent, _) in facts.forest.agents() {
        let mut path = Vec::new();
        let mut at = Some(agent);
        // One that goes in a circle counts from where it was come to first.
        while let Some(agent) = at.filter(|at| !depths.contains_key(&at.index())) {
            depths.insert(agent.index(), 0);
            path.push(agent.index());
            at = facts.forest.agent(agent).parent();
        }
        let mut depth = at.and_then(|at| depths.get(&at.index()).copied()).unwrap_or(0);
        for agent in path.into_iter().rev() {
            depth += 1;
            depths.insert(agent, depth);
            deepest = deepest.max(depth);
        }
    }
    deepest
}

/// The most calls on a path along the calls that `before` gives; a circle counts once.
fn longest_chain(calls: usize, before: impl Fn(CallIndex) -> Vec<Option<CallIndex>>) -> u64 {
    let mut length = vec![0_u64; calls];
    let mut on_path = vec![false; calls];
    for start in 0..u32::try_from(calls).unwrap_or(u32::MAX) {
        let mut stack = vec![CallIndex(start)];
        while let Some(call) = stack.last().copied() {
            let earlier: Vec<CallIndex> = before(call).into_iter().flatten().collect();
            on_path[call.index()] = true;
            let open = |earlier: &&CallIndex| length[earlier.index()] == 0 && !on_path[earlier.index()];
            if length[call.index()] == 0
                && let Some(next) = earlier.iter().find(open)
            {
                stack.push(*next);
                continue;
            }
            let longest = earlier.iter().map(|earlier| length[earlier.index()]).max().unwrap_or(0);
            length[call.index()] = length[call.index()].max(longest + 1);
            on_path[call.index()] = false;
            stack.pop();
        }
    }
    length.into_iter().max().unwrap_or(0)
}
