//! The rules of making rows (RULES section 3) written the slow, obvious way: every call against every other call, id by
//! id. It shares nothing with the service.

use std::collections::{BTreeMap, BTreeSet};

use crate::case::{
    AgentsWithoutList, Answer, BrokenLink, Call, Case, Link, OnBrokenLink, Refusal, Row, SharedCallOwner,
};

/// What the rules make of a case.
pub(crate) fn answer(case: &Case) -> Result<Answer, Refusal> {
    let model = Model { case, kept: kept_calls(case)? };
    let mut answer = Answer::default();
    let mut parents = BTreeMap::new();
    for call in &model.kept {
        let (parent, broken) = model.parent(call);
        answer.parents.insert(call.id.clone(), parent.map(|parent| parent.id.clone()));
        answer.broken_links.extend(broken.map(|broken| (call.id.clone(), broken)));
        parents.extend(parent.map(|parent| (call.id.as_str(), parent)));
    }
    if case.settings.on_broken_link == OnBrokenLink::Discard && !answer.broken_links.is_empty() {
        return Err(Refusal::BrokenLink);
    }
    let policies: BTreeSet<&str> = match &case.settings.policy {
        Some(policy) => BTreeSet::from([policy.as_str()]),
        None => model.kept.iter().map(|call| call.policy.as_str()).collect(),
    };
    answer.rows = policies.into_iter().flat_map(|policy| model.rows(policy, &parents)).collect();
    Ok(answer)
}

/// The parent that a call's text alone gives it, among these calls of all that have come.
pub(crate) fn inferred<'a>(come: &'a Case, among: &BTreeSet<&str>, call: &Call) -> Option<&'a Call> {
    let kept = come.calls.iter().filter(|other| among.contains(other.id.as_str()) && !other.generation.is_empty());
    let mut model = Model { case: come, kept: kept.collect() };
    model.kept.sort_by_key(|call| call.order());
    model.inferred(call)
}

/// 3.1: the calls that count, in order: kept, and something sampled.
fn kept_calls(case: &Case) -> Result<Vec<&Call>, Refusal> {
    let is_kept = |call: &Call| match &case.kept {
        None => true,
        Some(lists) => {
            let listed = lists.values().flatten().any(|id| *id == call.id);
            let unlisted_agent = !lists.contains_key(&call.agent);
            listed || (unlisted_agent && case.settings.agents_without_list == AgentsWithoutList::Keep)
        }
    };
    let mut named = case.kept.iter().flat_map(BTreeMap::values).flatten();
    if named.any(|id| case.calls.iter().all(|call| call.id != *id)) {
        return Err(Refusal::MissingCall);
    }
    let mut kept: Vec<&Call> =
        case.calls.iter().filter(|call| is_kept(call)).filter(|call| !call.generation.is_empty()).collect();
    kept.sort_by_key(|call| call.order());
    Ok(kept)
}

struct Model<'a> {
    case: &'a Case,
    /// In order.
    kept: Vec<&'a Call>,
}

/// The path from a root down to a leaf.
struct Walk<'a>(Vec<&'a Call>);

impl<'a> Walk<'a> {
    fn root(&self) -> &'a Call {
        self.0[0]
    }

    fn leaf(&self) -> &'a Call {
        self.0[self.0.len() - 1]
    }

    fn holds(&self, call: &Call) -> bool {
        self.0.iter().any(|passed| passed.id == call.id)
    }
}

impl<'a> Model<'a> {
    /// 3.2: the parent by the harness's word, where that holds; and the broken link, where it does not.
    fn parent(&self, call: &'a Call) -> (Option<&'a Call>, Option<BrokenLink>) {
        let named = match &call.link {
            Link::Root => return (None, None),
            Link::Infer => return (self.inferred(call), None),
            Link::Parent(named) => named,
        };
        let mut first_difference = None;
        if let Some(parent) = self.reported(named).filter(|parent| parent.id != call.id) {
            if !fits(parent, call) {
                first_difference = Some(common_length(&parent.full(), &call.prompt));
            } else if let Some(reached) = self.climb(parent) {
                return (reached, None);
            }
        }
        (self.inferred(call), Some(BrokenLink { named: named.clone(), first_difference }))
    }

    /// From a named parent up, by own links, to a kept call or to a root; nothing if that goes round in a circle.
    fn climb(&self, named: &'a Call) -> Option<Option<&'a Call>> {
        let mut passed: Vec<&str> = Vec::new();
        let mut at = named;
        while !self.is_kept(at) {
            if passed.contains(&at.id.as_str()) {
                return None;
            }
            passed.push(&at.id);
            at = match &at.link {
                Link::Root => return Some(None),
                Link::Infer => return Some(self.inferred(at)),
                Link::Parent(above) => match self.reported(above).filter(|above| fits(above, at)) {
                    Some(above) => above,
                    None => return Some(self.inferred(at)),
                },
            };
        }
        Some(Some(at))
    }

    /// The kept call with the longest text that fits.
    fn inferred(&self, call: &Call) -> Option<&'a Call> {
        let fitting = || self.kept.iter().copied().filter(|other| other.id != call.id && fits(other, call));
        let longest = fitting().map(|other| other.full().len()).max()?;
        let twins: Vec<&Call> = fitting().filter(|other| other.full().len() == longest).collect();

        let mut agents: Vec<&str> = Vec::new();
        let mut agent = Some(call.agent.as_str());
        while let Some(at) = agent.filter(|at| !agents.contains(at)) {
            agents.push(at);
            agent =
                self.case.calls.iter().filter(|call| call.agent == at).find_map(|call| call.parent_agent.as_deref());
        }
        let of_agent = |agent: &&str| twins.iter().any(|twin| twin.agent == *agent);
        let nearest = agents.into_iter().find(of_agent);
        let mut preferred = twins.into_iter().filter(|twin| nearest.is_none_or(|agent| twin.agent == agent)).peekable();
        let earliest = preferred.peek().copied();
        preferred.rfind(|twin| twin.order() < call.order()).or(earliest)
    }

    /// 3.3 to 3.5.
    fn rows(&self, policy: &str, parents: &BTreeMap<&str, &'a Call>) -> Vec<Row> {
        let limit = self.case.settings.max_row_tokens.unwrap_or(usize::MAX);
        let trains = |call: &Call| call.policy == policy && call.train && call.full().len() <= limit;
        let walk_to = |call: &'a Call| {
            let mut walk = vec![call];
            while let Some(parent) = parents.get(walk[walk.len() - 1].id.as_str()) {
                walk.push(parent);
            }
            walk.reverse();
            Walk(walk)
        };
        let trained: Vec<Walk<'_>> = self.kept.iter().filter(|call| trains(call)).map(|call| walk_to(call)).collect();
        let is_leaf = |walk: &&Walk<'_>| {
            let below = |other: &Walk<'_>| other.leaf().id != walk.leaf().id && other.holds(walk.leaf());
            !trained.iter().any(below)
        };
        let leaves: Vec<&Walk<'_>> = trained.iter().filter(is_leaf).collect();
        let row = |walk: &&Walk<'_>| {
            let owns = |call: &&Call| trains(call) && self.owner(call, &leaves).id == walk.leaf().id;
            let owned: Vec<&Call> = walk.0.iter().copied().filter(owns).collect();
            masked(policy, walk, &owned)
        };
        leaves.iter().map(row).collect()
    }

    /// 3.4: the leaf whose row trains a call. Leaves are in order.
    fn owner(&self, call: &Call, leaves: &[&Walk<'a>]) -> &'a Call {
        let mut holding: Vec<&Walk<'a>> = leaves.iter().copied().filter(|walk| walk.holds(call)).collect();
        if self.case.settings.shared_call_owner == SharedCallOwner::FirstLeaf {
            return holding[0].leaf();
        }
        let is_of_root_agent = |walk: &&Walk<'_>| walk.leaf().agent == walk.root().agent;
        let is_of_own_agent = |walk: &&Walk<'_>| walk.leaf().agent == call.agent;
        if holding.iter().any(is_of_root_agent) {
            holding.retain(is_of_root_agent);
        } else if holding.iter().any(is_of_own_agent) {
            holding.retain(is_of_own_agent);
        }
        holding[holding.len() - 1].leaf()
    }

    fn reported(&self, id: &str) -> Option<&'a Call> {
        self.case.calls.iter().find(|call| call.id == id)
    }

    fn is_kept(&self, call: &Call) -> bool {
        self.kept.iter().any(|kept| kept.id == call.id)
    }
}

/// 3.5: the leaf's text, with the mask over what its row owns.
fn masked(policy: &str, walk: &Walk<'_>, owned: &[&Call]) -> Row {
    let ids = |calls: &[&Call]| calls.iter().map(|call| call.id.clone()).collect();
    let token_ids = walk.leaf().full();
    let mut loss_mask = vec![0; token_ids.len()];
    let mut logprobs = vec![0.0; token_ids.len()];
    for call in owned {
        for (place, logprob) in call.logprobs.iter().enumerate() {
            loss_mask[call.prompt.len() + place] = 1;
            logprobs[call.prompt.len() + place] = *logprob;
        }
    }
    Row {
        policy: policy.to_owned(),
        leaf: walk.leaf().id.clone(),
        agent: walk.leaf().agent.clone(),
        root: walk.root().id.clone(),
        walk: ids(&walk.0),
        trains: ids(owned),
        token_ids,
        loss_mask,
        logprobs,
    }
}

/// Whether the first call's whole text begins the second one's prompt.
fn fits(parent: &Call, call: &Call) -> bool {
    call.prompt.starts_with(&parent.full())
}

fn common_length(one: &[u32], other: &[u32]) -> usize {
    one.iter().zip(other).take_while(|(one, other)| one == other).count()
}
