//! One rollout as it is shown to people: its calls with their links, its agents, its rows, and what became of each call.
//!
//! An open rollout is shown as of now: its rows are those that it would have if it were finalised with what has come, while all
//! its calls are pending. A finalised one's ledgers add up: per policy, `accepted` is the sum of all others.
//!
//! What has to be read in one moment is an [`Outline`]; the calls, which are most of it, are shown a few at a time
//! ([`calls`]), and all else is put together without the rollout ([`assembled`]). So nobody who reports waits long for who looks.

use crate::error::Refusal;
use crate::forest::link::{CallSet, Links};
use crate::forest::plan::{PlanInput, PolicyPlan};
use crate::ids::{Name, RolloutId, RolloutRef, RunId};
use crate::limits;
use crate::proto::v1;
use crate::rollout::drift::{self, DriftCounts};
use crate::rollout::findings::Findings;
use crate::rollout::view::RolloutView;
use crate::rollout::{Facts, Rollout};

use super::answer::{seal_status_with, totals};
use super::fields::{duration, identifier, timestamp};
use super::report::rollout_ref_message;
use super::settings::max_row_tokens;

mod agents;
pub mod calls;
pub mod lists;
pub mod pages;
mod rows;

/// Which rows and ledgers of a rollout are shown.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Shown {
    /// Those of this policy; none: of each.
    pub policy: Option<Name>,
    /// As with this limit.
    pub max_row_tokens: Option<u32>,
}

/// A rollout in one moment, without its calls.
pub struct Outline {
    about: RolloutRef,
    summary: v1::RolloutSummary,
    status: v1::SealStatus,
    agents: Vec<v1::AgentSummary>,
    /// How many calls it had.
    pub call_count: usize,
    kept: CallSet,
    may_train: CallSet,
    links: Links,
    plans: Vec<PolicyPlan>,
    drifts: DriftCounts,
    is_final: bool,
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

impl Outline {
    /// That of a rollout that is open or finalised. Linear in its calls.
    #[must_use]
    pub fn new(view: RolloutView<'_>, shown: &Shown) -> Self {
        let summary = summary(&view);
        let RolloutView { about, rollout, .. } = view;
        let links = rollout.links_now();
        let status = seal_status_with(rollout, &Findings::new(rollout, &links));
        let is_final = rollout.finalised().is_some();
        let kept = rollout.finalised().map_or_else(|| rollout.facts().kept(), |finalised| finalised.kept().clone());
        let facts = rollout.facts();
        let may_train =
            rollout.finalised().map_or_else(|| facts.may_train(), |finalised| finalised.may_train().clone());
        let plans = plans(facts, (&kept, &may_train), &links, shown);
        Self {
            about,
            summary,
            status,
            agents: agents::agents(facts),
            call_count: facts.forest.call_count(),
            drifts: drift::counts(facts, &kept, &links, plans.iter()),
            kept,
            may_train,
            links,
            plans,
            is_final,
        }
    }

    /// Whether it was finalised: then it does not change any more.
    #[must_use]
    pub fn is_final(&self) -> bool {
        self.is_final
    }

    /// Which attempt it is.
    #[must_use]
    pub fn attempt(&self) -> u32 {
        self.about.attempt
    }
}

/// The rows of each trained policy that is shown.
fn plans(facts: &Facts, (kept, may_train): (&CallSet, &CallSet), links: &Links, shown: &Shown) -> Vec<PolicyPlan> {
    let forest = &facts.forest;
    let owner = facts.settings.shared_call_owner;
    let input = PlanInput { kept, may_train, links, owner, max_row_tokens: shown.max_row_tokens };
    let is_shown =
        |policy: &&Name| facts.settings.trains(policy) && shown.policy.as_ref().is_none_or(|wanted| wanted == *policy);
    forest.policies(kept).iter().filter(is_shown).map(|policy| forest.plan(policy, input)).collect()
}

/// A rollout as it is shown: its outline with all of its calls, which are in the order of arrival.
#[must_use]
pub fn assembled(outline: Outline, mut calls: Vec<v1::CallSummary>) -> v1::GetRolloutResponse {
    let rows = rows::rows(&outline.about, &outline, &calls, limits::SHOWN_WALK_CALLS_MAX);
    calls.sort_by(|one, other| (one.sequence, &one.call_id).cmp(&(other.sequence, &other.call_id)));
    let drift = |((agent, kind), count): (&(_, _), &_)| lists::drift_count(Some(agent), *kind, *count);
    v1::GetRolloutResponse {
        calls,
        rows,
        ledgers: outline.plans.iter().map(|plan| rows::ledger(&outline, plan)).collect(),
        drifts: outline.drifts.iter().map(drift).collect(),
        summary: Some(outline.summary),
        agents: outline.agents,
        status: Some(outline.status),
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
        credits: facts.credit_count() as u64,
        unused_credits: facts.unused_credits() as u64,
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

#[cfg(test)]
#[path = "inspect_tests.rs"]
mod tests;
