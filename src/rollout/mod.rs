//! The life of one rollout (RULES section 4). Pure: time is an argument, effects are values.
//!
//! A [`Rollout`] takes events in two steps. [`Rollout::judge`] reads only: it refuses, knows the event already, or gives the
//! record to log. [`Rollout::apply`] takes the record, cannot fail, and is all that replay calls. A rollout is *finalised* by
//! the record that completes it; from then on it never changes and is shared as [`FinalisedRollout`], from which rows are made.
//!
//! Owns: the forest, the agents' facts, seal and reward, what is still awaited. Never does: look at a clock, know of other
//! rollouts, of groups, or of who reads its rows.
//!
//! Invariants (RULES 3.6), checked where rows are planned and again where they are gathered: 1 and 2 in `forest`; 3 follows
//! from everything here resting on sets of records; 4 in [`status`].

pub mod agents;
mod apply;
pub mod awaited;
pub mod credits;
pub mod drift;
pub mod event;
mod evict;
pub mod findings;
mod judge;
pub mod run_settings;
pub mod settings;
mod size;
pub mod status;
pub mod view;
mod wait;

use std::collections::BTreeMap;
use std::sync::{Arc, OnceLock};

use crate::forest::Forest;
use crate::forest::call::CallIndex;
use crate::forest::link::{CallSet, Links, Verdict};
use crate::forest::plan::{PlanInput, PolicyPlan};
use crate::ids::{CallId, GroupId, Name};
use crate::limits;

use agents::AgentBook;
use awaited::Awaited;
use credits::CreditBook;
use event::{Decision, Reward, Seal};
use findings::Findings;
use settings::RolloutSettings;
use wait::Wait;

pub use apply::Applied;
pub use judge::Judgement;

/// All that is known of a rollout, finalised or not.
pub struct Facts {
    /// The settings of its opening.
    pub settings: Arc<RolloutSettings>,
    /// Its calls.
    pub forest: Forest,
    /// Its agents' starts, ends and lists.
    pub agents: AgentBook,
    /// Its group, if it is in one.
    pub group: Option<GroupId>,
    /// Its group's size, if said.
    pub group_size: Option<u32>,
    /// Its tags.
    pub tags: BTreeMap<Name, String>,
    /// The seal, if it has come.
    pub seal: Option<Seal>,
    /// The reward, if it has come.
    pub reward: Option<Reward>,
    /// Credits of calls and agents, if any have come.
    credits: Option<Box<CreditBook>>,
    /// The first call that came twice with different content. It may still be found when all else stands.
    conflict: OnceLock<CallId>,
    /// Named parents that have not come count as broken.
    pub parents_given_up: bool,
    /// It is finalised without the kept calls that have not come.
    pub without_missing: bool,
    /// Calls that had drift when they came, or when their ids were known.
    pub answered_drifts: u64,
    /// Bytes that it takes besides the forest: see [`size`].
    other_bytes: usize,
}

impl Facts {
    /// Whether an agent's kept lists, or the seal's, say which calls are kept.
    #[must_use]
    pub fn some_list_given(&self) -> bool {
        self.agents.some_list_given() || self.seal.as_ref().is_some_and(|seal| seal.kept.is_some())
    }

    /// Whether a call that stands is kept, as far as the lists go (RULES 3.1).
    #[must_use]
    pub fn is_kept(&self, call: CallIndex) -> bool {
        if !self.some_list_given() {
            return true;
        }
        let stored = self.forest.call(call);
        self.agents.keeps(stored.id())
            || (self.settings.agents_without_list == settings::AgentsWithoutListRule::Keep
                && !self.agents.has_list(stored.agent()))
    }

    /// The first call that came twice with different content, if one did.
    #[must_use]
    pub fn conflict(&self) -> Option<&CallId> {
        self.conflict.get()
    }

    fn mark_conflict(&self, call: CallId) {
        // The first mark stands.
        let _ = self.conflict.set(call);
    }

    /// The kept calls that generated something and have their ids.
    #[must_use]
    pub fn kept(&self) -> CallSet {
        let mut kept = CallSet::new();
        for (call, stored) in self.forest.calls() {
            if stored.is_placed() && !stored.is_empty() && self.is_kept(call) {
                kept.insert(call);
            }
        }
        kept
    }
}

/// A rollout that takes events.
pub struct OpenRollout {
    facts: Facts,
    /// What still has to come; there once it is sealed and rewarded. Most rollouts wait idly before that, and many at once.
    awaited: Option<Box<Awaited>>,
    heard_at_ms: u64,
    /// The wait for missing kept calls, from the seal or a later list on.
    missing_calls: Wait,
    /// The wait for calls that links name.
    missing_parents: Wait,
    /// Kept calls that were refused and must be sent again, with the reason.
    refused: BTreeMap<CallId, &'static str>,
    /// What a seal finds, until something changes.
    findings: Option<Arc<Findings>>,
}

/// A rollout whose rows can be made. It never changes.
pub struct FinalisedRollout {
    facts: Facts,
    kept: CallSet,
    /// The calls that may train, as credits, the calls themselves and the run's rules say.
    may_train: CallSet,
    links: Links,
    incomplete: bool,
    /// What a seal that comes again finds.
    findings: OnceLock<Arc<Findings>>,
}

/// One rollout, from its first event until it is retired.
pub enum Rollout {
    /// It takes events.
    Open(Box<OpenRollout>),
    /// Its rows can be made.
    Finalised(Arc<FinalisedRollout>),
}

impl Facts {
    /// All that is known, as a text that two equal states have in common.
    #[must_use]
    pub fn in_full(&self) -> String {
        let calls: Vec<_> = self.forest.calls().map(|(call, stored)| (stored, self.forest.full_ids(call))).collect();
        let agents: Vec<_> = self
            .forest
            .agents()
            .map(|(agent, known)| {
                let (starts, ends): (Vec<_>, Vec<_>) =
                    (self.agents.starts(agent).collect(), self.agents.ends(agent).collect());
                (known, starts, ends)
            })
            .collect();
        format!(
            "{calls:?} {agents:?} {:?} {:?} {:?} {:?} {:?} {:?} {:?} {} {}",
            self.group,
            self.group_size,
            self.tags,
            self.seal,
            self.reward,
            self.credits,
            self.conflict(),
            self.parents_given_up,
            self.without_missing
        )
    }
}

impl Rollout {
    /// A rollout of which nothing is known but its group.
    #[must_use]
    pub fn new(settings: Arc<RolloutSettings>, group: Option<GroupId>, now_ms: u64) -> Self {
        let facts = Facts {
            settings,
            forest: Forest::default(),
            agents: AgentBook::default(),
            group,
            group_size: None,
            tags: BTreeMap::new(),
            seal: None,
            reward: None,
            credits: None,
            conflict: OnceLock::new(),
            parents_given_up: false,
            without_missing: false,
            answered_drifts: 0,
            other_bytes: 0,
        };
        Self::Open(Box::new(OpenRollout {
            facts,
            awaited: None,
            heard_at_ms: now_ms,
            missing_calls: Wait::default(),
            missing_parents: Wait::default(),
            refused: BTreeMap::new(),
            findings: None,
        }))
    }

    /// All that is known of it.
    #[must_use]
    pub fn facts(&self) -> &Facts {
        match self {
            Self::Open(open) => &open.facts,
            Self::Finalised(finalised) => &finalised.facts,
        }
    }

    /// The finalised rollout, if it is that far.
    #[must_use]
    pub fn finalised(&self) -> Option<&Arc<FinalisedRollout>> {
        match self {
            Self::Open(_) => None,
            Self::Finalised(finalised) => Some(finalised),
        }
    }

    /// A sign of life: starts the idle timeout again. Not logged, since deadlines start afresh after a restart.
    pub fn heard(&mut self, now_ms: u64) {
        if let Self::Open(open) = self {
            open.heard_at_ms = now_ms;
        }
    }

    /// Remembers a call that was refused, so that a seal can say "refused, awaiting resend".
    pub fn note_refusal(&mut self, call: Option<&CallId>, reason: &'static str) {
        let Self::Open(open) = self else { return };
        if let Some(call) = call.filter(|call| open.facts.forest.find(call).is_none())
            && open.refused.len() < limits::ROLLOUT_REFUSED_CALLS_MAX
        {
            open.refused.insert(call.clone(), reason);
            open.findings = None;
        }
    }

    /// What is known of a call's link: as of now, or as it was finalised.
    pub fn verdict(&mut self, call: CallIndex) -> Verdict {
        match self {
            Self::Open(open) => open.facts.forest.verdict(call),
            Self::Finalised(finalised) => finalised.facts.forest.kept_verdict(call, &finalised.links),
        }
    }

    /// When a clock may next have something to decide, in the clock's milliseconds.
    #[must_use]
    pub fn next_deadline_ms(&self) -> Option<u64> {
        let Self::Open(open) = self else { return None };
        let facts = &open.facts;
        let missing_calls = open.missing_calls.deadline_ms(facts.settings.missing_call_timeout_ms);
        let missing_parents = open.missing_parents.deadline_ms(facts.settings.missing_parent_timeout_ms);
        let deadlines = [
            open.idle_deadline_ms(),
            missing_calls.filter(|_| !facts.without_missing),
            missing_parents.filter(|_| !facts.parents_given_up),
        ];
        deadlines.into_iter().flatten().min()
    }

    /// What a clock decides now, if anything. The decision is logged before it is applied.
    #[must_use]
    pub fn due(&self, now_ms: u64) -> Option<Decision> {
        let Self::Open(open) = self else { return None };
        let (facts, settings) = (&open.facts, &open.facts.settings);
        if open.idle_deadline_ms().is_some_and(|deadline| deadline <= now_ms) {
            return Some(Decision::IdleTimeout);
        }
        let calls_due = !facts.without_missing && open.missing_calls.is_over(settings.missing_call_timeout_ms, now_ms);
        let parents_due =
            !facts.parents_given_up && open.missing_parents.is_over(settings.missing_parent_timeout_ms, now_ms);
        if !calls_due && !parents_due {
            return None;
        }
        let missing = Awaited::new(facts).missing(facts);
        let calls = status::missing_expected_calls(facts) > 0 || missing.iter().any(|(_, cause)| cause.is_kept());
        if calls_due && calls {
            return Some(match settings.missing_call {
                settings::MissingCallRule::Discard => Decision::MissingCallsDiscard,
                settings::MissingCallRule::Finalise => Decision::MissingCallsFinalise,
            });
        }
        let parents = missing.iter().any(|(_, cause)| cause.is_parent());
        (parents_due && parents).then_some(Decision::MissingParentsGivenUp)
    }

    /// After [`Rollout::due`] found nothing to decide at a deadline: no longer waits for that one.
    pub fn deadline_passed(&mut self, now_ms: u64) {
        if let Self::Open(open) = self {
            let settings = &open.facts.settings;
            open.missing_calls.looked(settings.missing_call_timeout_ms, now_ms);
            open.missing_parents.looked(settings.missing_parent_timeout_ms, now_ms);
        }
    }
}

impl OpenRollout {
    /// When it is discarded if nothing is heard of it. One that is sealed and rewarded awaits only calls, which have limits of
    /// their own.
    fn idle_deadline_ms(&self) -> Option<u64> {
        let harness_is_done = self.facts.seal.is_some() && self.facts.reward.is_some();
        (!harness_is_done).then(|| self.heard_at_ms.saturating_add(self.facts.settings.idle_timeout_ms))
    }
}

impl FinalisedRollout {
    fn mark_conflict(&self, call: CallId) {
        self.facts.mark_conflict(call);
    }

    /// All that is known of it.
    #[must_use]
    pub fn facts(&self) -> &Facts {
        &self.facts
    }

    /// The kept calls that generated something and have their ids.
    #[must_use]
    pub fn kept(&self) -> &CallSet {
        &self.kept
    }

    /// The calls that may train, if their policy does: see [`credits`].
    #[must_use]
    pub fn may_train(&self) -> &CallSet {
        &self.may_train
    }

    /// Their links.
    #[must_use]
    pub fn links(&self) -> &Links {
        &self.links
    }

    /// Whether kept calls never came and it was finalised without them.
    #[must_use]
    pub fn incomplete(&self) -> bool {
        self.incomplete
    }

    /// The trained policies that sampled a kept call, by name.
    #[must_use]
    pub fn policies(&self) -> Vec<Name> {
        let mut policies = self.facts.forest.policies(&self.kept);
        policies.retain(|policy| self.facts.settings.trains(policy));
        policies
    }

    /// The rows of one policy; none if the run does not train it.
    #[must_use]
    pub fn plan(&self, policy: &Name, max_row_tokens: Option<u32>) -> PolicyPlan {
        let owner = self.facts.settings.shared_call_owner;
        let input =
            PlanInput { kept: &self.kept, may_train: &self.may_train, links: &self.links, owner, max_row_tokens };
        self.facts.forest.plan(policy, input)
    }
}

impl std::fmt::Debug for FinalisedRollout {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter
            .debug_struct("FinalisedRollout")
            .field("calls", &self.facts.forest.call_count())
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests;
