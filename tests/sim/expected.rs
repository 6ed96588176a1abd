//! What must come of a rollout, by the slow model of the rules, from what was accepted of it.

use std::collections::BTreeMap;

use hedgerow::rollout::run_settings::ConsumerGroupSettings;

use crate::case::{AgentsWithoutList, Answer, Call, Case, Link, Refusal};
use crate::model::Known;
use crate::reference;

/// An attempt, as far as it was accepted.
pub(crate) struct Accepted {
    /// The calls whose ids are known, with the kept lists as far as they name such calls.
    pub(crate) case: Case,
    /// Distinct calls, with their ids or without.
    pub(crate) calls: usize,
    /// Of those without, how many generated nothing.
    pub(crate) empty_without_ids: usize,
    /// Kept calls that have not come, or not with their ids; or fewer calls than were expected.
    pub(crate) misses_calls: bool,
    pub(crate) sealed: bool,
    pub(crate) rewarded: bool,
}

impl Accepted {
    pub(crate) fn new(of: &Case, known: &Known) -> Self {
        let placed = known.placed(of);
        let is_placed = |id: &String| placed.iter().any(|call| of.calls[*call].id == *id);
        let mut lists: BTreeMap<String, Vec<String>> = BTreeMap::new();
        let of_seal = known.seal.iter().filter_map(|seal| seal.kept.as_ref()).flatten();
        let of_ends = known.ends.iter().filter_map(|(agent, kept)| Some((agent, kept.as_ref()?)));
        for (agent, kept) in of_seal.chain(of_ends) {
            lists.entry(agent.clone()).or_default().extend(kept.iter().cloned());
        }
        let some_list = !lists.is_empty() || known.seal.as_ref().is_some_and(|seal| seal.kept.is_some());
        let without_ids: Vec<usize> = known.calls.keys().copied().filter(|call| !placed.contains(call)).collect();
        let keeps_all = |call: &usize| {
            let unlisted = !lists.contains_key(&of.calls[*call].agent);
            !some_list || (unlisted && of.settings.agents_without_list == AgentsWithoutList::Keep)
        };
        let expected = known.seal.as_ref().and_then(|seal| seal.expected_calls).unwrap_or(0);
        let misses_calls = expected > known.calls.len() as u64
            || without_ids.iter().any(keeps_all)
            || !lists.values().flatten().all(is_placed);
        let empty = |call: &&usize| known.content(of, **call).generation.is_empty();
        let empty_without_ids = without_ids.iter().filter(empty).count();
        lists.values_mut().for_each(|list| list.retain(is_placed));
        let case = Case {
            calls: placed.iter().map(|call| known.content(of, *call)).collect(),
            kept: some_list.then_some(lists),
            settings: of.settings.clone(),
        };
        let (sealed, rewarded) = (known.seal.is_some(), known.reward);
        Self { case, calls: known.calls.len(), empty_without_ids, misses_calls, sealed, rewarded }
    }

    /// Nothing is missing that anything of it names: sealed and rewarded, it must be finalised.
    pub(crate) fn is_whole(&self) -> bool {
        let is_there = |id: &String| self.case.calls.iter().any(|call| call.id == *id);
        let names_nothing_else = |call: &Call| match &call.link {
            Link::Parent(named) => is_there(named),
            Link::Infer | Link::Root => true,
        };
        !self.misses_calls && self.case.calls.iter().all(names_nothing_else)
    }

    /// What a consumer group gets of it.
    pub(crate) fn answer(&self, group: &ConsumerGroupSettings) -> Result<Answer, Refusal> {
        let mut case = self.case.clone();
        case.settings.policy = group.policy.as_ref().map(|policy| policy.as_str().to_owned());
        case.settings.max_row_tokens = group.max_row_tokens.map(|tokens| tokens as usize);
        reference::answer(&case)
    }
}
