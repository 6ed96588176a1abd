//! What a seal finds: the calls that are missing, the agents without a list, the shape of the trees.
//!
//! Linear in the rollout's calls, so that what was found in a large rollout is kept until something changes: a seal that comes
//! again and again costs no more than any other event. What is listed is bounded in number and bytes; the counts are whole.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use crate::forest::link::Links;
use crate::ids::{AgentId, CallId};
use crate::limits;

use super::awaited::Cause;
use super::status::{self, Missing, Shape};
use super::{Facts, Rollout};

/// What a seal finds.
#[derive(Debug)]
pub struct Findings {
    /// The shape of the trees.
    pub shape: Shape,
    /// The first calls that are waited for, each with its agent: its own if something of it has come, else whoever kept it.
    pub missing: Vec<(Missing, Option<AgentId>)>,
    /// How many are waited for.
    pub missing_count: u64,
    /// The first agents that made calls and gave no list.
    pub without_list: Vec<AgentId>,
    /// How many such there are.
    pub without_list_count: u64,
}

impl Findings {
    /// What there is to find now, with the rollout's links as of now.
    #[must_use]
    pub fn new(rollout: &Rollout, links: &Links) -> Self {
        let facts = rollout.facts();
        let (missing, without_list) = (status::missing(rollout), status::agents_without_list(facts));
        let (missing_count, without_list_count) = (missing.len() as u64, without_list.len() as u64);
        let without_list = within_bounds(without_list, |agent| agent.as_str().len());
        let missing = with_agents(facts, missing);
        Self { shape: rollout.shape(links), missing, missing_count, without_list, without_list_count }
    }
}

impl Rollout {
    /// What a seal finds now.
    pub fn findings(&mut self) -> Arc<Findings> {
        let kept = match self {
            Self::Open(open) => open.findings.as_ref(),
            Self::Finalised(finalised) => finalised.findings.get(),
        };
        if let Some(kept) = kept {
            return Arc::clone(kept);
        }
        let links = self.links_now();
        let found = Arc::new(Findings::new(self, &links));
        if self.facts().forest.call_count() + self.facts().agents.kept().len() > limits::SEAL_FINDINGS_CALLS {
            match self {
                Self::Open(open) => open.findings = Some(Arc::clone(&found)),
                Self::Finalised(finalised) => drop(finalised.findings.set(Arc::clone(&found))),
            }
        }
        found
    }
}

/// The first of the missing calls with their agents.
fn with_agents(facts: &Facts, missing: Vec<Missing>) -> Vec<(Missing, Option<AgentId>)> {
    let listed: Vec<_> = missing.into_iter().take(limits::SEAL_LISTED_MAX).collect();
    let keepers = keepers(facts, &listed);
    let agent = |missing: &Missing| {
        let own = facts.forest.find(&missing.call).map(|call| facts.forest.call(call).agent());
        let own = own.map(|agent| facts.forest.agent(agent).id());
        own.or_else(|| keepers.get(&missing.call).copied()).cloned()
    };
    let agents: Vec<_> = listed.iter().map(agent).collect();
    within_bounds(listed.into_iter().zip(agents).collect(), |(missing, agent)| {
        let named_by = match &missing.cause {
            Cause::Kept => 0,
            Cause::NamedParent(by) | Cause::NamedBase(by) => by.as_str().len(),
        };
        missing.call.as_str().len() + agent.as_ref().map_or(0, |agent| agent.as_str().len()) + named_by
    })
}

/// Which agent's list names each of these calls.
fn keepers<'a>(facts: &'a Facts, missing: &[Missing]) -> HashMap<CallId, &'a AgentId> {
    let wanted: HashSet<&CallId> = missing.iter().map(|missing| &missing.call).collect();
    if wanted.is_empty() {
        return HashMap::new();
    }
    let sealed = facts.seal.iter().filter_map(|seal| seal.kept.as_ref()).flatten();
    let ends = facts.forest.agents().flat_map(|(agent, _)| facts.agents.ends(agent));
    let ended = ends.filter_map(|end| Some((&end.agent_id, end.kept.as_ref()?)));
    let named = sealed.chain(ended).flat_map(|(agent, calls)| calls.iter().map(move |call| (call, agent)));
    named.filter(|(call, _)| wanted.contains(call)).map(|(call, agent)| (call.clone(), agent)).collect()
}

/// The first of a list, as many as one answer has room for.
fn within_bounds<T>(list: Vec<T>, text_bytes: impl Fn(&T) -> usize) -> Vec<T> {
    let mut left = limits::SEAL_LISTED_BYTES_MAX;
    let fits = |item: &T| {
        let rest = left.checked_sub(text_bytes(item));
        left = rest.unwrap_or(0);
        rest.is_some()
    };
    list.into_iter().take(limits::SEAL_LISTED_MAX).take_while(fits).collect()
}
