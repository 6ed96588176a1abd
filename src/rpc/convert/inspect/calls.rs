//! The calls of a rollout as they are shown, and what became of each.
//!
//! A call is shown from the rollout, which may go on meanwhile, and from an [`Outline`] of it: so that many calls can be shown
//! a few at a time, each time under the rollout's lock for a moment.

use std::ops::Range;

use crate::forest::call::{Call, CallIndex, Link, TokensState};
use crate::forest::link::{BrokenLink, CallSet, LinkVerdict, Verdict};
use crate::forest::plan::PolicyPlan;
use crate::ids::CallId;
use crate::proto::v1;
use crate::rollout::{Facts, Rollout};

use super::super::answer::{self, text};
use super::super::fields::timestamp;
use super::super::rows::version_spans;
use super::Outline;

/// What became of calls for one policy, besides what its plan says.
struct Fates<'a> {
    plan: &'a PolicyPlan,
    in_some_row: CallSet,
}

/// Shows calls of one rollout as its outline has them.
pub struct Shower<'a> {
    outline: &'a Outline,
    fates: Vec<Fates<'a>>,
}

impl<'a> Shower<'a> {
    /// One for this outline. Linear in its calls.
    #[must_use]
    pub fn new(outline: &'a Outline) -> Self {
        let fates = |plan: &'a PolicyPlan| Fates { plan, in_some_row: plan.calls_in_rows(&outline.links) };
        Self { outline, fates: outline.plans.iter().map(fates).collect() }
    }

    /// These calls, in the order of their arrival; those that the outline does not know are left out.
    #[must_use]
    pub fn calls(&self, facts: &Facts, range: Range<usize>) -> Vec<v1::CallSummary> {
        let known = range.start..range.end.min(self.outline.call_count);
        facts.forest.call_indices(known).map(|index| self.call(facts, index)).collect()
    }

    fn call(&self, facts: &Facts, index: CallIndex) -> v1::CallSummary {
        let call = facts.forest.call(index);
        let verdict = self.verdict(facts, index, call);
        let owner = self.fates.iter().find_map(|fates| fates.plan.owners.get(index.index()).copied().flatten());
        v1::CallSummary {
            fate: self.fate(facts, index, call).into(),
            owner_leaf_call_id: text(owner.map(|leaf| facts.forest.call(leaf).id())),
            ..summary(facts, index, verdict.as_ref())
        }
    }

    /// A call's link in the kept forest; none if the call is not in it.
    fn verdict(&self, facts: &Facts, index: CallIndex, call: &Call) -> Option<Verdict> {
        let alone = |link| Some(Verdict { link, drift: None });
        if let Some(base) = call.pending_base() {
            return alone(LinkVerdict::Waiting(base.clone()));
        }
        if call.is_empty() {
            return alone(LinkVerdict::Root);
        }
        if !self.outline.kept.contains(index) {
            return None;
        }
        match self.outline.links.broken_link(index).filter(|broken| self.may_come(facts, broken)) {
            Some(broken) => alone(LinkVerdict::Waiting(broken.named.clone())),
            None => Some(facts.forest.kept_verdict(index, &self.outline.links)),
        }
    }

    /// Whether a named parent is not there and still waited for.
    fn may_come(&self, facts: &Facts, broken: &BrokenLink) -> bool {
        let there = facts.forest.find_placed(&broken.named).is_some();
        !there && !self.outline.is_final && !facts.parents_given_up
    }

    /// What became of a call. Of several policies, the one counts in which most became of it: trained, then context.
    fn fate(&self, facts: &Facts, index: CallIndex, call: &Call) -> v1::CallFate {
        if !self.outline.is_final {
            v1::CallFate::Pending
        } else if call.is_empty() {
            v1::CallFate::Empty
        } else if !self.outline.kept.contains(index) {
            v1::CallFate::NotKept
        } else if self.fates.iter().any(|fates| fates.plan.owners[index.index()].is_some()) {
            v1::CallFate::Trained
        } else if self.fates.iter().any(|fates| fates.in_some_row.contains(index)) {
            v1::CallFate::Context
        } else {
            // What may train, by the policy of the plan, and is in none of its rows was too long for one.
            let policy = facts.forest.policy(index);
            let too_long =
                self.outline.may_train.contains(index) && self.fates.iter().any(|fates| fates.plan.policy == *policy);
            if too_long { v1::CallFate::TooLong } else { v1::CallFate::NoRow }
        }
    }
}

/// These calls of an open rollout in the order of their arrival, each with its link among all calls that have come: what its
/// answer would say now. For rollouts of which no kept lists have come this is the kept forest.
#[must_use]
pub fn open_calls(rollout: &mut Rollout, range: Range<usize>) -> Vec<v1::CallSummary> {
    let end = range.end.min(rollout.facts().forest.call_count());
    let indices = rollout.facts().forest.call_indices(range.start..end);
    let call = |index: CallIndex| {
        let verdict = rollout.verdict(index);
        v1::CallSummary { fate: v1::CallFate::Pending.into(), ..summary(rollout.facts(), index, Some(&verdict)) }
    };
    indices.map(call).collect()
}

/// What is known of a call but what becomes of it.
fn summary(facts: &Facts, index: CallIndex, verdict: Option<&Verdict>) -> v1::CallSummary {
    let forest = &facts.forest;
    let call = forest.call(index);
    let credit = facts.credit_of(index);
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
        kept: facts.is_kept(index),
        verdict: verdict.map(|verdict| answer::verdict(forest, index, verdict)),
        link: link(call.link()),
        base: base(call),
        train: (!call.may_train()).then_some(false),
        has_logprobs: call.has_logprobs(),
        finish_reason: text(forest.finish_reason(index)),
        start_time: start_time.map(timestamp),
        end_time: end_time.map(timestamp),
        fate: v1::CallFate::Unspecified.into(),
        owner_leaf_call_id: String::new(),
        missing_state: missing_state.into(),
        credited_train: credit.train(),
        process_reward: credit.reward(),
        advantage_scale: credit.advantage_scale(),
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
