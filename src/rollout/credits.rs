//! What calls and agents deserve beside the rollout's reward (RULES section 5): whether they train, process rewards, factors.
//!
//! A credit is a fact about a call or an agent, which may come before that does. Each of its values stands once it was said; a
//! value that was left out may still come, another one is refused. A credit for a call or an agent that never comes is *unused*.
//!
//! What they come to for one call is in [`Facts::may_train`] and [`Facts::credit_of`].

use std::collections::{BTreeMap, HashMap, HashSet};
use std::fmt;

use crate::error::{Reason, Refusal};
use crate::forest::Forest;
use crate::forest::call::{AgentIndex, Call, CallFacts, CallIndex};
use crate::forest::link::CallSet;
use crate::ids::{AgentId, CallId};
use crate::limits;

use super::Facts;
use super::settings::UnreadAnswersRule;

/// For what a credit is.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum CreditTarget {
    /// This call.
    Call(CallId),
    /// Every call of this agent.
    Agent(AgentId),
}

/// What is said of a call or an agent; what is left out says nothing.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct CreditValues {
    /// Whether to train on it.
    pub train: Option<bool>,
    /// A process reward, finite.
    pub reward: Option<f64>,
    /// A factor on the advantage, finite.
    pub advantage_scale: Option<f64>,
}

/// What a call or an agent deserves.
#[derive(Clone, Debug, PartialEq)]
pub struct Credit {
    /// For what.
    pub target: CreditTarget,
    /// What is said of it.
    pub values: CreditValues,
}

/// All credits of a rollout.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct CreditBook {
    calls: BTreeMap<CallId, CreditValues>,
    agents: BTreeMap<AgentId, CreditValues>,
    /// Whether one of them has a process reward.
    has_reward: bool,
}

/// The credits that count for one call: its own, and its agent's.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct CallCredit {
    call: CreditValues,
    agent: CreditValues,
    /// Whether some call or agent of the rollout has a process reward.
    has_reward: bool,
}

impl CreditValues {
    /// These values, and where they say nothing, the others.
    fn or(self, other: Self) -> Self {
        Self {
            train: self.train.or(other.train),
            reward: self.reward.or(other.reward),
            advantage_scale: self.advantage_scale.or(other.advantage_scale),
        }
    }

    /// What is new of these values where others are known, or which of them is another one.
    fn beside(self, known: Self) -> Result<Self, &'static str> {
        Ok(Self {
            train: fresh(known.train, self.train).map_err(|()| "train")?,
            reward: fresh(known.reward, self.reward).map_err(|()| "reward")?,
            advantage_scale: fresh(known.advantage_scale, self.advantage_scale).map_err(|()| "advantage_scale")?,
        })
    }
}

fn fresh<T: Copy + PartialEq>(known: Option<T>, new: Option<T>) -> Result<Option<T>, ()> {
    match (known, new) {
        (Some(known), Some(new)) if known != new => Err(()),
        (Some(_), _) => Ok(None),
        (None, new) => Ok(new),
    }
}

impl CreditBook {
    /// How many calls and agents have credits.
    fn count(&self) -> usize {
        self.calls.len() + self.agents.len()
    }

    /// What is said of a call or an agent.
    fn of(&self, target: &CreditTarget) -> Option<CreditValues> {
        match target {
            CreditTarget::Call(call) => self.calls.get(call).copied(),
            CreditTarget::Agent(agent) => self.agents.get(agent).copied(),
        }
    }

    fn of_call(&self, call: &CallId, agent: &AgentId) -> CallCredit {
        let of_call = self.calls.get(call).copied().unwrap_or_default();
        let of_agent = self.agents.get(agent).copied().unwrap_or_default();
        CallCredit { call: of_call, agent: of_agent, has_reward: self.has_reward }
    }

    /// Credits for calls and agents that have not come.
    fn unused(&self, forest: &Forest) -> usize {
        let calls = self.calls.keys().filter(|call| forest.find(call).is_none());
        let agents = self.agents.keys().filter(|agent| forest.find_agent(agent).is_none());
        calls.count() + agents.count()
    }

    fn apply(&mut self, credit: Credit) {
        self.has_reward |= credit.values.reward.is_some();
        let values = match credit.target {
            CreditTarget::Call(call) => self.calls.entry(call).or_default(),
            CreditTarget::Agent(agent) => self.agents.entry(agent).or_default(),
        };
        *values = values.or(credit.values);
    }
}

impl CallCredit {
    /// Whether a credit says if the call trains: its own before its agent's.
    #[must_use]
    pub fn train(&self) -> Option<bool> {
        self.call.train.or(self.agent.train)
    }

    /// The process rewards of the call and of its agent together; none: neither has one.
    #[must_use]
    pub fn reward(&self) -> Option<f64> {
        match (self.call.reward, self.agent.reward) {
            (Some(call), Some(agent)) => Some(call + agent),
            (one, other) => one.or(other),
        }
    }

    /// The factors of the call and of its agent, multiplied; none: neither has one.
    #[must_use]
    pub fn advantage_scale(&self) -> Option<f64> {
        match (self.call.advantage_scale, self.agent.advantage_scale) {
            (Some(call), Some(agent)) => Some(call * agent),
            (one, other) => one.or(other),
        }
    }

    /// The call's advantage, from that of its rollout in its group: scale(call) × scale(agent) × (advantage(rollout) +
    /// reward(call) + reward(agent)). Where the rollout has none, it counts as 0 if some call or agent of it has a process reward,
    /// and else the call has none either.
    #[must_use]
    pub fn advantage(&self, of_rollout: Option<f64>) -> Option<f64> {
        let base = of_rollout.or(self.has_reward.then_some(0.0))?;
        let sum = base + self.call.reward.unwrap_or(0.0) + self.agent.reward.unwrap_or(0.0);
        let scale = |values: CreditValues| values.advantage_scale.unwrap_or(1.0);
        Some(scale(self.call) * scale(self.agent) * sum)
    }
}

impl Facts {
    /// The credits that count for a call.
    #[must_use]
    pub fn credit_of(&self, call: CallIndex) -> CallCredit {
        let Some(book) = self.credits.as_deref() else { return CallCredit::default() };
        let stored = self.forest.call(call);
        book.of_call(stored.id(), self.forest.agent(stored.agent()).id())
    }

    /// Whether a call that comes may train, as far as is known now: what a credit says, or else the call and the run's rules. That
    /// nobody read its agent's answer is known at the end only.
    pub(super) fn would_train(&self, call: &CallFacts) -> bool {
        let credited = self.credits.as_deref().and_then(|book| book.of_call(&call.call_id, &call.agent_id).train());
        credited.unwrap_or(call.train && !self.settings.untrained_kinds.contains(&call.kind))
    }

    /// The calls that may train, whatever their policy: what a credit of the call says, else of its agent, else the call itself,
    /// if neither its kind nor an answer that nobody read has it be context.
    #[must_use]
    pub fn may_train(&self) -> CallSet {
        let unread = self.agents_with_unread_answers();
        let mut may_train = CallSet::new();
        for (index, call) in self.forest.calls() {
            let by_rules = || {
                let kind = self.forest.kind(index);
                call.may_train() && !self.settings.untrained_kinds.contains(kind) && !unread.contains(&call.agent())
            };
            if self.credit_of(index).train().unwrap_or_else(by_rules) {
                may_train.insert(index);
            }
        }
        may_train
    }

    /// Agents with a parent whose answer no agent has read, where the run has their calls not train.
    fn agents_with_unread_answers(&self) -> HashSet<AgentIndex> {
        if self.settings.unread_answers == UnreadAnswersRule::Train {
            return HashSet::new();
        }
        let agents = || self.forest.agents().map(|(agent, _)| agent);
        let ends = agents().flat_map(|agent| self.agents.ends(agent));
        let read: HashSet<&AgentId> = ends.flat_map(|end| &end.answers_read).collect();
        let is_unread = |agent: &AgentIndex| {
            let known = self.forest.agent(*agent);
            known.parent().is_some() && !read.contains(known.id())
        };
        agents().filter(is_unread).collect()
    }

    /// What is new of some credits of one request; `path` says where in it the one of this place stands.
    pub(super) fn judge_credits(
        &self,
        credits: &[Credit],
        path: impl Fn(usize) -> String,
    ) -> Result<Vec<Credit>, Refusal> {
        let known = self.credits.as_deref();
        let mut now: BTreeMap<&CreditTarget, CreditValues> = BTreeMap::new();
        let (mut new, mut added) = (Vec::new(), 0);
        for (at, Credit { target, values }) in credits.iter().enumerate() {
            let before = now.get(target).copied().or_else(|| known.and_then(|book| book.of(target)));
            let fresh = values.beside(before.unwrap_or_default()).map_err(|field| {
                let message = format!("{target} has another {field} by an earlier credit; the first value stands");
                about(Refusal::new(Reason::CreditConflict, message), target).field(format!("{}.{field}", path(at)))
            })?;
            if fresh != CreditValues::default() {
                added += usize::from(before.is_none());
                now.insert(target, fresh.or(before.unwrap_or_default()));
                new.push((at, Credit { target: target.clone(), values: fresh }));
            }
        }
        if added > 0 && known.map_or(0, CreditBook::count) + added > limits::ROLLOUT_CREDITS_MAX {
            let message = format!("a rollout has credits for at most {} calls and agents", limits::ROLLOUT_CREDITS_MAX);
            return Err(Refusal::new(Reason::RolloutFull, message));
        }
        let refused = |at: usize, refusal: Refusal| refusal.field(format!("{}.train", path(at)));
        if let Some((at, refusal)) = self.without_logprobs(&new, &now) {
            return Err(refused(at, refusal));
        }
        Ok(new.into_iter().map(|(_, credit)| credit).collect())
    }

    /// Which of these credits, by its place, would have a call train that came without log-probabilities, where the run requires
    /// them. One pass over the calls if agents are credited, however many.
    fn without_logprobs(
        &self,
        new: &[(usize, Credit)],
        now: &BTreeMap<&CreditTarget, CreditValues>,
    ) -> Option<(usize, Refusal)> {
        let trains = || new.iter().filter(|(_, credit)| credit.values.train == Some(true));
        if !self.settings.require_logprobs || trains().next().is_none() {
            return None;
        }
        let (mut calls, mut agents) = (HashMap::new(), HashMap::new());
        for (at, credit) in trains() {
            match &credit.target {
                CreditTarget::Call(call) => calls.extend(self.forest.find(call).map(|call| (call, *at))),
                CreditTarget::Agent(agent) => agents.extend(self.forest.find_agent(agent).map(|agent| (agent, *at))),
            }
        }
        let known = self.credits.as_deref();
        let stays_out = |call: &CallId| {
            let target = CreditTarget::Call(call.clone());
            let values = now.get(&target).copied().or_else(|| known.and_then(|book| book.of(&target)));
            values.and_then(|values| values.train) == Some(false)
        };
        let lacks = |index: CallIndex, call: &Call| {
            !call.has_logprobs() && !call.is_empty() && self.settings.trains(self.forest.policy(index))
        };
        let would_train = |index: CallIndex, call: &Call| {
            let own = calls.get(&index).copied();
            own.or_else(|| agents.get(&call.agent()).copied().filter(|_| !stays_out(call.id())))
        };
        let (at, call) = if agents.is_empty() {
            let named = calls.iter().map(|(index, at)| (*at, *index, self.forest.call(*index)));
            named
                .filter(|(_, index, call)| lacks(*index, call))
                .min_by_key(|(at, ..)| *at)
                .map(|(at, _, call)| (at, call))
        } else {
            let mut all = self.forest.calls().filter(|(index, call)| lacks(*index, call));
            all.find_map(|(index, call)| Some((would_train(index, call)?, call)))
        }?;
        let message = format!(
            "call {:?} would train, which came without log-probabilities (the run's require_logprobs = false allows that)",
            call.id()
        );
        Some((
            at,
            Refusal::new(Reason::LogprobsMissing, message).call(call.id()).agent(self.forest.agent(call.agent()).id()),
        ))
    }

    pub(super) fn apply_credits(&mut self, credits: Vec<Credit>) {
        if !credits.is_empty() {
            let book = self.credits.get_or_insert_default();
            credits.into_iter().for_each(|credit| book.apply(credit));
        }
    }

    /// How many calls and agents have credits.
    #[must_use]
    pub fn credit_count(&self) -> usize {
        self.credits.as_deref().map_or(0, CreditBook::count)
    }

    /// Credits for calls and agents that have not come.
    #[must_use]
    pub fn unused_credits(&self) -> usize {
        self.credits.as_deref().map_or(0, |book| book.unused(&self.forest))
    }
}

impl fmt::Display for CreditTarget {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Call(call) => write!(formatter, "call {:?}", call.as_str()),
            Self::Agent(agent) => write!(formatter, "agent {:?}", agent.as_str()),
        }
    }
}

fn about(refusal: Refusal, target: &CreditTarget) -> Refusal {
    match target {
        CreditTarget::Call(call) => refusal.call(call),
        CreditTarget::Agent(agent) => refusal.agent(agent),
    }
}

#[cfg(test)]
#[path = "credits_tests.rs"]
mod tests;
