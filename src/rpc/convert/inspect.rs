//! One rollout as it is shown to people: its calls with their links, its agents, its rows, and what became of each call.
//!
//! An open rollout is shown as of now: its rows are those that it would have if it were finalised with what has come, while all
//! its calls are pending. A finalised one's ledgers add up: per policy, `accepted` is the sum of all others.

use std::collections::HashMap;

use crate::error::Refusal;
use crate::forest::call::{Call, CallIndex, Link, TokensState};
use crate::forest::link::{BrokenLink, CallSet, LinkVerdict, Links, Verdict};
use crate::forest::plan::{PlanInput, PolicyPlan};
use crate::ids::{CallId, Name, RolloutId, RolloutRef, RunId, row_id};
use crate::limits;
use crate::proto::v1;
use crate::rollout::view::RolloutView;
use crate::rollout::{Facts, Rollout, drift};

use super::answer::{self, seal_status, text, totals};
use super::fields::{duration, identifier, timestamp};
use super::report::rollout_ref_message;
use super::rows::version_spans;
use super::settings::max_row_tokens;

mod agents;
pub mod lists;
pub mod pages;

/// Which rows and ledgers of a rollout are shown.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Shown {
    /// Those of this policy; none: of each.
    pub policy: Option<Name>,
    /// As with this limit.
    pub max_row_tokens: Option<u32>,
}

/// Which rollout a request asks for, and what of it.
///
/// # Errors
/// If an identifier is none.
pub fn get_rollout(request: &v1::GetRolloutRequest) -> Result<(RunId, RolloutId, Shown), Refusal> {
    let run = identifier(&request.run_id, "run_id", RunId::parse)?;
    let rollout = identifier(&request.rollout_id, "rollout_id", RolloutId::parse)?;
    let policy = request.policy.as_ref().map(|policy| identifier(policy, "policy", Name::parse)).transpose()?;
    let max_row_tokens = max_row_tokens(request.max_row_tokens, "max_row_tokens")?;
    Ok((run, rollout, Shown { policy, max_row_tokens }))
}

/// A rollout that is open or finalised. Linear in its calls and its walks.
#[must_use]
pub fn rollout(view: RolloutView<'_>, shown: &Shown) -> v1::GetRolloutResponse {
    let summary = summary(&view);
    let RolloutView { about, rollout, .. } = view;
    let status = seal_status(rollout);
    let links = rollout.links_now();
    let is_final = rollout.finalised().is_some();
    let kept = rollout.finalised().map_or_else(|| rollout.facts().kept(), |finalised| finalised.kept().clone());
    let facts = rollout.facts();
    let forest = Forest { facts, kept, links, is_final };
    let plans = forest.plans(shown);
    let drifts = drift::counts(facts, &forest.kept, &forest.links, plans.iter());
    v1::GetRolloutResponse {
        summary: Some(summary),
        calls: forest.calls(&plans),
        agents: agents::agents(facts),
        status: Some(status),
        rows: forest.rows(&about, &plans, limits::SHOWN_WALK_CALLS_MAX),
        ledgers: plans.iter().map(|plan| forest.ledger(plan)).collect(),
        drifts: drifts.iter().map(|((agent, kind), count)| lists::drift_count(Some(agent), *kind, *count)).collect(),
    }
}

/// A rollout of which only a tombstone is left.
#[must_use]
pub fn ended_rollout(about: &RolloutRef, ended: v1::Ended) -> v1::GetRolloutResponse {
    v1::GetRolloutResponse { summary: Some(ended_summary(about, ended)), ..v1::GetRolloutResponse::default() }
}

/// What is left of an ended rollout, in a few figures.
#[must_use]
pub fn ended_summary(about: &RolloutRef, ended: v1::Ended) -> v1::RolloutSummary {
    v1::RolloutSummary {
        rollout: Some(rollout_ref_message(about)),
        state: v1::RolloutState::Ended.into(),
        ended: Some(ended),
        ..v1::RolloutSummary::default()
    }
}

/// A rollout in a few figures.
#[must_use]
pub fn summary(view: &RolloutView<'_>) -> v1::RolloutSummary {
    let facts = view.rollout.facts();
    let components = |reward: &crate::rollout::event::Reward| {
        reward.components.iter().map(|(name, value)| (name.to_string(), *value)).collect()
    };
    let reward = facts.reward.as_ref();
    v1::RolloutSummary {
        rollout: Some(rollout_ref_message(&view.about)),
        state: state(view.rollout).into(),
        ended: None,
        reward: reward.map(|reward| v1::Reward {
            value: reward.value,
            components: components(reward),
            credits: Vec::new(),
        }),
        tags: facts.tags.iter().map(|(key, value)| (key.to_string(), value.clone())).collect(),
        group_size: facts.group_size,
        totals: Some(totals(&facts.forest)),
        open_time: Some(timestamp(view.opened_unix_ms)),
        last_event_time: Some(timestamp(view.heard_unix_ms)),
        finalise_time: view.finalised_unix_ms.map(timestamp),
        settings_version: view.settings_version,
        incomplete: view.rollout.finalised().is_some_and(|finalised| finalised.incomplete()),
        conflicted: facts.conflict().is_some(),
        refused_requests: view.refused_requests,
        resident_bytes: view.resident_bytes,
        next_deadline: view.next_deadline_in_ms.map(duration),
        drifted_calls: facts.answered_drifts,
    }
}

fn state(rollout: &Rollout) -> v1::RolloutState {
    let facts = rollout.facts();
    match (rollout.finalised(), &facts.seal, &facts.reward) {
        (Some(_), _, _) => v1::RolloutState::Finalised,
        (None, None, None) => v1::RolloutState::Open,
        (None, Some(_), None) => v1::RolloutState::Sealed,
        (None, None, Some(_)) => v1::RolloutState::Rewarded,
        (None, Some(_), Some(_)) => v1::RolloutState::Incomplete,
    }
}

/// A rollout's forest, as of now.
struct Forest<'a> {
    facts: &'a Facts,
    kept: CallSet,
    links: Links,
    is_final: bool,
}

/// What became of calls for one policy, besides what its plan says.
struct Fates<'a> {
    plan: &'a PolicyPlan,
    in_some_row: CallSet,
}

impl Forest<'_> {
    /// The rows of each trained policy that is shown.
    fn plans(&self, shown: &Shown) -> Vec<PolicyPlan> {
        let forest = &self.facts.forest;
        let owner = self.facts.settings.shared_call_owner;
        let max_row_tokens = shown.max_row_tokens;
        let input = PlanInput { kept: &self.kept, links: &self.links, owner, max_row_tokens };
        let is_shown = |policy: &&Name| {
            self.facts.settings.trains(policy) && shown.policy.as_ref().is_none_or(|wanted| wanted == *policy)
        };
        forest.policies(&self.kept).iter().filter(is_shown).map(|policy| forest.plan(policy, input)).collect()
    }

    /// All calls in order.
    fn calls(&self, plans: &[PolicyPlan]) -> Vec<v1::CallSummary> {
        let fates: Vec<Fates<'_>> = plans.iter().map(|plan| self.fates(plan)).collect();
        let mut calls: Vec<(CallIndex, &Call)> = self.facts.forest.calls().collect();
        calls.sort_by(|one, other| one.1.order().cmp(&other.1.order()));
        calls.into_iter().map(|(index, call)| self.call(index, call, &fates)).collect()
    }

    fn call(&self, index: CallIndex, call: &Call, fates: &[Fates<'_>]) -> v1::CallSummary {
        let forest = &self.facts.forest;
        let owner = fates.iter().find_map(|fates| fates.plan.owners.get(index.index()).copied().flatten());
        let (start_time, end_time) = call.times_unix_ms();
        let missing_state = match call.tokens_state() {
            TokensState::Placed => v1::MissingCallState::Unspecified,
            TokensState::WaitingForBase => v1::MissingCallState::WaitingForBase,
            TokensState::Unresolved => v1::MissingCallState::Unresolved,
        };
        v1::CallSummary {
            call_id: call.id().to_string(),
            agent_id: forest.agent(call.agent()).id().to_string(),
            sequence: call.order().0,
            kind: forest.kind(index).to_string(),
            policy: forest.policy(index).to_string(),
            policy_versions: version_spans(call),
            model: text(forest.model(index)),
            prompt_tokens: call.is_placed().then(|| call.prompt_length() as u64),
            generated_tokens: call.generation_length() as u64,
            kept: self.facts.is_kept(index),
            verdict: self.verdict(index, call).map(|verdict| answer::verdict(forest, index, &verdict)),
            link: link(call.link()),
            base: base(call),
            train: (!call.may_train()).then_some(false),
            has_logprobs: call.has_logprobs(),
            finish_reason: text(forest.finish_reason(index)),
            start_time: start_time.map(timestamp),
            end_time: end_time.map(timestamp),
            fate: self.fate(index, call, fates).into(),
            owner_leaf_call_id: text(owner.map(|leaf| forest.call(leaf).id())),
            missing_state: missing_state.into(),
        }
    }

    /// A call's link in the kept forest; none if the call is not in it.
    fn verdict(&self, index: CallIndex, call: &Call) -> Option<Verdict> {
        let forest = &self.facts.forest;
        let alone = |link| Some(Verdict { link, drift: None });
        if let Some(base) = call.pending_base() {
            return alone(LinkVerdict::Waiting(base.clone()));
        }
        if call.is_empty() {
            return alone(LinkVerdict::Root);
        }
        if !self.kept.contains(index) {
            return None;
        }
        match self.links.broken_link(index).filter(|broken| self.may_come(broken)) {
            Some(broken) => alone(LinkVerdict::Waiting(broken.named.clone())),
            None => Some(forest.kept_verdict(index, &self.links)),
        }
    }

    /// Whether a named parent is not there and still waited for.
    fn may_come(&self, broken: &BrokenLink) -> bool {
        let there = self.facts.forest.find_placed(&broken.named).is_some();
        !there && !self.is_final && !self.facts.parents_given_up
    }

    fn fates<'a>(&self, plan: &'a PolicyPlan) -> Fates<'a> {
        Fates { plan, in_some_row: plan.calls_in_rows(&self.links) }
    }

    /// What became of a call. Of several policies, the one counts in which most became of it: trained, then context.
    fn fate(&self, index: CallIndex, call: &Call, fates: &[Fates<'_>]) -> v1::CallFate {
        if !self.is_final {
            v1::CallFate::Pending
        } else if call.is_empty() {
            v1::CallFate::Empty
        } else if !self.kept.contains(index) {
            v1::CallFate::NotKept
        } else if fates.iter().any(|fates| fates.plan.owners[index.index()].is_some()) {
            v1::CallFate::Trained
        } else if fates.iter().any(|fates| fates.in_some_row.contains(index)) {
            v1::CallFate::Context
        } else {
            // What may train, by the policy of the plan, and is in none of its rows was too long for one.
            let policy = self.facts.forest.policy(index);
            let too_long = call.may_train() && fates.iter().any(|fates| fates.plan.policy == *policy);
            if too_long { v1::CallFate::TooLong } else { v1::CallFate::NoRow }
        }
    }

    fn ledger(&self, plan: &PolicyPlan) -> v1::PolicyLedger {
        let policy = plan.policy.to_string();
        let accepted = self.facts.forest.call_count() as u64;
        if !self.is_final {
            return v1::PolicyLedger { policy, accepted, pending: accepted, ..v1::PolicyLedger::default() };
        }
        v1::PolicyLedger {
            policy,
            accepted,
            trained: plan.ledger.trained,
            context: plan.ledger.context,
            no_row: plan.ledger.in_no_row,
            empty: plan.ledger.empty,
            not_kept: plan.ledger.not_kept,
            too_long: plan.ledger.too_long,
            ..v1::PolicyLedger::default()
        }
    }

    /// The rows of all plans; without walks once those listed hold `walk_calls_max` calls.
    fn rows(&self, about: &RolloutRef, plans: &[PolicyPlan], walk_calls_max: usize) -> Vec<v1::RowSummary> {
        let mut room = walk_calls_max;
        let rows = plans.iter().flat_map(|plan| {
            let trained = self.trained_by_leaf(plan);
            plan.rows
                .iter()
                .zip(0..)
                .map(move |(row, row_index)| (plan, row, row_index, trained.get(&row.leaf).cloned()))
        });
        let id = |call: &CallIndex| self.facts.forest.call(*call).id().to_string();
        let summary = |(plan, row, row_index, trained): (&PolicyPlan, _, u32, Option<Vec<CallIndex>>)| {
            let row: &crate::forest::plan::RowPlan = row;
            let leaf = self.facts.forest.call(row.leaf);
            let walk = self.links.walk(row.leaf);
            let listed = if walk.len() <= room { &walk[..] } else { &[] };
            room -= listed.len();
            v1::RowSummary {
                row_id: row_id(&about.run, &about.rollout, about.attempt, &plan.policy, leaf.id()),
                policy: plan.policy.to_string(),
                row_index,
                leaf_call_id: leaf.id().to_string(),
                agent_id: self.facts.forest.agent(leaf.agent()).id().to_string(),
                walk_call_ids: listed.iter().map(id).collect(),
                trained_call_ids: trained.unwrap_or_default().iter().map(id).collect(),
                tokens: u64::from(row.tokens),
                trained_tokens: u64::from(row.trained_tokens),
            }
        };
        rows.map(summary).collect()
    }

    /// The calls that each leaf's row trains, in the order of its walk: texts only grow along a walk.
    fn trained_by_leaf(&self, plan: &PolicyPlan) -> HashMap<CallIndex, Vec<CallIndex>> {
        let mut trained: HashMap<CallIndex, Vec<CallIndex>> = HashMap::new();
        for ((call, _), owner) in self.facts.forest.calls().zip(&plan.owners) {
            if let Some(leaf) = owner {
                trained.entry(*leaf).or_default().push(call);
            }
        }
        let length = |call: &CallIndex| self.facts.forest.call(*call).full_length();
        trained.values_mut().for_each(|calls| calls.sort_by_key(length));
        trained
    }
}

fn link(link: &Link) -> Option<v1::Link> {
    use v1::link::Link as Said;
    let said = match link {
        Link::Infer => return None,
        Link::Root => Said::Root(v1::RootLink {}),
        Link::Parent(parent) => Said::ParentCallId(CallId::to_string(parent)),
    };
    Some(v1::Link { link: Some(said) })
}

/// The base of a delta that is not resolved.
fn base(call: &Call) -> Option<v1::Base> {
    let delta = call.pending_delta()?;
    Some(v1::Base {
        call_id: delta.base.to_string(),
        length_tokens: u64::from(delta.base_length),
        digest: bytes::Bytes::copy_from_slice(&delta.digest.0),
    })
}

#[cfg(test)]
#[path = "inspect_tests.rs"]
mod tests;
