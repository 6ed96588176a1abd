//! From links to a plan of rows: which calls train, which are leaves, and which leaf's row trains each (RULES 3.3, 3.4).
//!
//! Leaves are chosen first, owners second; masks follow in [`super::rows`]. A plan is made for one policy and one bound of
//! row length, holds no ids, and is linear in the calls and in the walks that have to be gone.

use crate::ids::Name;

use super::Forest;
use super::call::{AgentIndex, CallIndex};
use super::link::{CallSet, Links};

/// Which row trains a call that several rows hold.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum SharedCallOwner {
    /// The leaf of the root's own agent, else of the call's own agent; among several, and else, the last in order.
    #[default]
    RootAgent,
    /// The leaf that is first in order.
    FirstLeaf,
}

/// One row, before its ids are gathered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RowPlan {
    /// The leaf whose prompt + generation is the row.
    pub leaf: CallIndex,
    /// The root of its walk.
    pub root: CallIndex,
    /// Ids in the row.
    pub tokens: u32,
    /// Generated ids of the calls that it trains.
    pub trained_tokens: u32,
    /// Calls that it trains.
    pub trained_calls: u32,
    /// The oldest version that sampled one of these calls, if any is known. Spans count whole, however many of their tokens train.
    pub oldest_version: Option<u64>,
}

/// What became of each distinct accepted call, for one policy (RULES 3.6.4). The fields add up to all calls.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CallLedger {
    /// Trained in exactly one row.
    pub trained: u64,
    /// In some row, trained in none.
    pub context: u64,
    /// Kept, but in no row.
    pub in_no_row: u64,
    /// Generated nothing.
    pub empty: u64,
    /// Kept by no agent.
    pub not_kept: u64,
    /// Would train, but is longer than the rows may be.
    pub too_long: u64,
}

impl CallLedger {
    /// All calls that it counts.
    #[must_use]
    pub fn sum(&self) -> u64 {
        self.trained + self.context + self.in_no_row + self.empty + self.not_kept + self.too_long
    }
}

/// The rows of one policy of one rollout.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PolicyPlan {
    /// The policy that they train.
    pub policy: Name,
    /// In the order of their leaves.
    pub rows: Vec<RowPlan>,
    /// For each call of the rollout: the leaf whose row trains it, if one does.
    pub owners: Vec<Option<CallIndex>>,
    /// What became of each call.
    pub ledger: CallLedger,
}

/// What a plan rests on besides the forest.
#[derive(Clone, Copy, Debug)]
pub struct PlanInput<'a> {
    /// The kept calls that generated something and have their ids.
    pub kept: &'a CallSet,
    /// The calls that may train, if their policy does.
    pub may_train: &'a CallSet,
    /// Their links.
    pub links: &'a Links,
    /// Who owns shared calls.
    pub owner: SharedCallOwner,
    /// Longest row in tokens.
    pub max_row_tokens: Option<u32>,
}

impl Forest {
    /// The rows of one policy.
    #[must_use]
    pub fn plan(&self, policy: &Name, input: PlanInput<'_>) -> PolicyPlan {
        let too_long =
            |call: CallIndex| input.max_row_tokens.is_some_and(|limit| self.call(call).full_length() > limit as usize);
        let candidate = |call: &CallIndex| input.may_train.contains(*call) && self.policy(*call) == policy;
        let mut trained = CallSet::new();
        input.kept.iter().filter(candidate).filter(|call| !too_long(*call)).for_each(|call| trained.insert(call));

        let leaves = self.leaves(&trained, input.links);
        let owners = self.owners(&trained, &leaves, input);
        let mut ledger = CallLedger::default();
        let in_row = in_some_row(leaves.iter().copied(), input.links);
        for (call, stored) in self.calls() {
            let place = if stored.is_empty() {
                &mut ledger.empty
            } else if !input.kept.contains(call) {
                &mut ledger.not_kept
            } else if trained.contains(call) {
                &mut ledger.trained
            } else if in_row.contains(call) {
                &mut ledger.context
            } else if candidate(&call) {
                &mut ledger.too_long
            } else {
                &mut ledger.in_no_row
            };
            *place += 1;
        }
        let rows = self.row_plans(&leaves, &owners, input.links);
        let plan = PolicyPlan { policy: policy.clone(), rows, owners, ledger };
        debug_assert!(plan.trains_each_call_once(), "invariant 1: every trained call is trained exactly once");
        plan
    }

    /// Trained calls with no trained call below, in order.
    fn leaves(&self, trained: &CallSet, links: &Links) -> Vec<CallIndex> {
        let mut has_trained_below = CallSet::new();
        for call in trained.iter() {
            let above = std::iter::successors(links.parent(call), |at| links.parent(*at));
            for ancestor in above {
                if has_trained_below.contains(ancestor) {
                    break;
                }
                has_trained_below.insert(ancestor);
            }
        }
        let mut leaves: Vec<CallIndex> = trained.iter().filter(|call| !has_trained_below.contains(*call)).collect();
        leaves.sort_by(|one, other| self.call(*one).order().cmp(&self.call(*other).order()));
        leaves
    }

    /// For each trained call the leaf that trains it. `leaves` are in order.
    fn owners(&self, trained: &CallSet, leaves: &[CallIndex], input: PlanInput<'_>) -> Vec<Option<CallIndex>> {
        let count = self.call_count();
        let mut owners: Vec<Option<CallIndex>> = vec![None; count];
        // Each pass offers leaves in order of preference; a call takes the first leaf offered to it.
        match input.owner {
            SharedCallOwner::FirstLeaf => claim(leaves.iter().copied(), input.links, &mut owners, |_| true),
            SharedCallOwner::RootAgent => {
                let roots = self.roots_of(leaves, input.links);
                let agent_of = |call: CallIndex| self.call(call).agent();
                let of_root_agent = leaves.iter().zip(&roots).rev();
                let of_root_agent = of_root_agent.filter(|(leaf, root)| agent_of(**leaf) == agent_of(**root));
                claim(of_root_agent.map(|(leaf, _)| *leaf), input.links, &mut owners, |_| true);
                let mut by_agent: std::collections::BTreeMap<AgentIndex, Vec<CallIndex>> = Default::default();
                leaves.iter().rev().for_each(|leaf| by_agent.entry(agent_of(*leaf)).or_default().push(*leaf));
                for (agent, own) in by_agent {
                    claim(own.into_iter(), input.links, &mut owners, |call| agent_of(call) == agent);
                }
                claim(leaves.iter().rev().copied(), input.links, &mut owners, |_| true);
            }
        }
        for (index, owner) in owners.iter_mut().enumerate() {
            if !trained.contains(CallIndex(u32::try_from(index).unwrap_or(u32::MAX))) {
                *owner = None;
            }
        }
        owners
    }

    /// The root of each leaf's walk.
    fn roots_of(&self, leaves: &[CallIndex], links: &Links) -> Vec<CallIndex> {
        let mut known: Vec<Option<CallIndex>> = vec![None; self.call_count()];
        let mut roots = Vec::with_capacity(leaves.len());
        for leaf in leaves {
            let mut at = *leaf;
            let root = loop {
                if let Some(root) = known[at.index()] {
                    break root;
                }
                match links.parent(at) {
                    Some(parent) => at = parent,
                    None => break at,
                }
            };
            let mut at = Some(*leaf);
            while let Some(call) = at.filter(|call| known[call.index()].is_none()) {
                known[call.index()] = Some(root);
                at = links.parent(call);
            }
            roots.push(root);
        }
        roots
    }

    fn row_plans(&self, leaves: &[CallIndex], owners: &[Option<CallIndex>], links: &Links) -> Vec<RowPlan> {
        let roots = self.roots_of(leaves, links);
        let mut place_of_leaf = vec![usize::MAX; self.call_count()];
        let mut rows = Vec::with_capacity(leaves.len());
        for (place, (leaf, root)) in leaves.iter().zip(roots).enumerate() {
            place_of_leaf[leaf.index()] = place;
            let tokens = u32::try_from(self.call(*leaf).full_length()).unwrap_or(u32::MAX);
            rows.push(RowPlan { leaf: *leaf, root, tokens, trained_tokens: 0, trained_calls: 0, oldest_version: None });
        }
        for (owner, (_, call)) in owners.iter().zip(self.calls()) {
            if let Some(row) = owner.and_then(|leaf| rows.get_mut(place_of_leaf[leaf.index()])) {
                row.trained_tokens += self.trainable_tokens(call);
                row.trained_calls += 1;
                let oldest = call.versions().iter().map(|span| span.version).min();
                row.oldest_version = row.oldest_version.into_iter().chain(oldest).min();
            }
        }
        rows
    }

    /// Generated tokens of a call that train: all but those whose log-probability is marked as missing.
    fn trainable_tokens(&self, call: &super::call::Call) -> u32 {
        call.generation_length - call.masked_tokens
    }
}

impl PolicyPlan {
    /// The calls on the walk of some row.
    #[must_use]
    pub fn calls_in_rows(&self, links: &Links) -> CallSet {
        in_some_row(self.rows.iter().map(|row| row.leaf), links)
    }

    /// Invariant 1 of RULES 3.6, from the other side: each trained call has one owner, and the rows count them all.
    #[must_use]
    pub fn trains_each_call_once(&self) -> bool {
        let owned = self.owners.iter().flatten().count() as u64;
        let in_rows: u64 = self.rows.iter().map(|row| u64::from(row.trained_calls)).sum();
        owned == self.ledger.trained && in_rows == self.ledger.trained && self.ledger.sum() == self.owners.len() as u64
    }
}

/// Each leaf offers itself to the calls on its walk for which `wants` holds; a call takes the first offer. A walk is left
/// where an earlier leaf of this pass has gone it, since that one has offered itself all the way up.
fn claim(
    leaves: impl Iterator<Item = CallIndex>,
    links: &Links,
    owners: &mut [Option<CallIndex>],
    wants: impl Fn(CallIndex) -> bool,
) {
    let mut passed = CallSet::new();
    for leaf in leaves {
        let mut at = Some(leaf);
        while let Some(call) = at.filter(|call| !passed.contains(*call)) {
            passed.insert(call);
            if wants(call) {
                owners[call.index()].get_or_insert(leaf);
            }
            at = links.parent(call);
        }
    }
}

/// The calls on the walk of some leaf.
fn in_some_row(leaves: impl Iterator<Item = CallIndex>, links: &Links) -> CallSet {
    let mut calls = CallSet::new();
    for leaf in leaves {
        let mut at = Some(leaf);
        while let Some(call) = at.filter(|call| !calls.contains(*call)) {
            calls.insert(call);
            at = links.parent(call);
        }
    }
    calls
}
