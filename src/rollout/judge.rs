//! Whether a rollout takes an event: RULES section 4, line by line. Reads only.

use crate::error::{Reason, Refusal};
use crate::forest::call::{CallIndex, NewCall, TokensState};
use crate::forest::{CallRefusal, JudgedCall};
use crate::ids::{CallId, Name};
use crate::limits;

use super::agents::{Merged, check_parent, same_calls};
use super::event::{Event, Open, Reward, RolloutRecord, Seal};
use super::settings::NonfiniteLogprobsRule;
use super::{Facts, Rollout};

/// What an event is to a rollout.
#[derive(Debug)]
pub enum Judgement {
    /// Log and apply this.
    Record(RolloutRecord),
    /// Known already, or nothing to log; for a call, which one.
    Duplicate(Option<CallIndex>),
    /// A sign of life, accepted without a record.
    Heard,
    /// Refused. If the record is there, it marks the rollout and is logged and applied all the same.
    Refused(Refusal, Option<RolloutRecord>),
}

impl Rollout {
    /// What this event is to the rollout, at this moment.
    #[must_use]
    pub fn judge(&self, event: Event) -> Judgement {
        let facts = self.facts();
        let judged = match event {
            Event::Call { call, names_policy } => return self.judge_call(*call, names_policy),
            Event::Heartbeat => return Judgement::Heard,
            Event::Open(open) => facts.judge_open(&open).map(|merged| merged_to(merged, RolloutRecord::Open)),
            Event::AgentStart(start) => facts
                .judge_new_agents(std::iter::once(&start.agent_id).chain(&start.parent_agent_id))
                .and_then(|()| facts.agents.judge_start(&facts.forest, &start))
                .map(|merged| merged_to(merged, RolloutRecord::AgentStart)),
            Event::AgentEnd(end) => facts
                .judge_new_agents(std::iter::once(&end.agent_id))
                .and_then(|()| facts.agents.judge_end(&facts.forest, &end))
                .map(|merged| merged_to(merged, RolloutRecord::AgentEnd)),
            Event::Seal(seal) => facts.judge_finish(Some(&seal), None),
            Event::Reward(reward) => facts.judge_finish(None, Some(&reward)),
            Event::Finish(seal, reward) => facts.judge_finish(Some(&seal), Some(&reward)),
            Event::Discard { reason, disposition } => Ok(Some(RolloutRecord::Discard { reason, disposition })),
        };
        match judged {
            Ok(Some(_)) if self.finalised().is_some() => Judgement::Refused(already_finalised(), None),
            Ok(Some(record)) => Judgement::Record(record),
            Ok(None) => Judgement::Duplicate(None),
            Err(refusal) => Judgement::Refused(refusal, None),
        }
    }

    fn judge_call(&self, mut call: NewCall, names_policy: bool) -> Judgement {
        let facts = self.facts();
        let id = call.facts.call_id.clone();
        if let Err(refusal) = facts.complete_call(&mut call, names_policy) {
            return Judgement::Refused(refusal.call(&id), None);
        }
        let judged = match facts.forest.judge_call(&call) {
            Ok(judged) => judged,
            Err(CallRefusal::Conflict(field)) => {
                let message =
                    format!("call {id:?} has come with another {field}; the first stands, and the rollout is marked");
                let refusal = Refusal::new(Reason::CallConflict, message).field(format!("call.{field}")).call(&id);
                let mark = facts.conflict.is_none() && self.finalised().is_none();
                return Judgement::Refused(refusal, mark.then_some(RolloutRecord::Conflict(id)));
            }
            Err(CallRefusal::ResendFullPrompt(why)) => {
                return Judgement::Refused(resend_full_prompt(&id, &why), None);
            }
        };
        match judged {
            JudgedCall::Duplicate(known) if facts.forest.call(known).tokens_state() == TokensState::Unresolved => {
                let why = "its delta's base turned out to be another call's text";
                Judgement::Refused(resend_full_prompt(&id, why), None)
            }
            JudgedCall::Duplicate(known) => Judgement::Duplicate(Some(known)),
            JudgedCall::Record(record) => match self.judge_moment(&id).and_then(|()| facts.judge_room(&call)) {
                Ok(()) => Judgement::Record(RolloutRecord::Call(record)),
                Err(refusal) => Judgement::Refused(refusal.call(&id), None),
            },
        }
    }

    /// Whether new content of a call may still come.
    fn judge_moment(&self, call: &CallId) -> Result<(), Refusal> {
        let facts = self.facts();
        if self.finalised().is_some() {
            return Err(already_finalised());
        }
        let known = facts.forest.find(call).is_some();
        let Some(seal) = facts.seal.as_ref().filter(|_| !known) else { return Ok(()) };
        if facts.some_list_given() || seal.expected_calls.is_some() {
            return Ok(());
        }
        let message = "the rollout was sealed without kept lists and without expected_calls, so it takes no more calls; seal with \
                       one of them if calls may come after the seal";
        Err(Refusal::new(Reason::RolloutSealed, message))
    }
}

impl Facts {
    /// Fills in what the settings say of a call, and checks it against them.
    fn complete_call(&self, call: &mut NewCall, names_policy: bool) -> Result<(), Refusal> {
        let facts = &mut call.facts;
        if !names_policy {
            facts.policy = self.settings.default_policy.clone();
        }
        if facts.generation.is_empty() && facts.logprobs.as_ref().is_some_and(Vec::is_empty) {
            facts.logprobs = None;
        }
        match &mut facts.logprobs {
            Some(values) if values.len() != facts.generation.len() => {
                let message =
                    format!("{} log-probabilities for {} generated ids", values.len(), facts.generation.len());
                return Err(Refusal::new(Reason::LogprobsLength, message).field("call.generation_logprobs"));
            }
            Some(values) => {
                if let Some(index) = values.iter().position(|value| !value.is_finite()) {
                    if self.settings.nonfinite_logprobs == NonfiniteLogprobsRule::Refuse {
                        let message = format!("log-probability {index} is {}", values[index]);
                        let refusal = Refusal::new(Reason::LogprobNotFinite, message);
                        return Err(refusal.field("call.generation_logprobs").index(index));
                    }
                    values.iter_mut().filter(|value| !value.is_finite()).for_each(|value| *value = f32::NAN);
                }
            }
            None => {
                let trains = facts.train && self.settings.trains(&facts.policy) && !facts.generation.is_empty();
                if trains && self.settings.require_logprobs {
                    let message =
                        "a call that trains must have log-probabilities (or the run's require_logprobs = false)";
                    return Err(Refusal::new(Reason::LogprobsMissing, message).field("call.generation_logprobs"));
                }
            }
        }
        let Some(limit) = self.settings.vocabulary_limit else { return Ok(()) };
        let (field, prompt) = match &call.prompt {
            crate::forest::call::Prompt::Full(ids) => ("call.prompt.token_ids", ids),
            crate::forest::call::Prompt::Delta(delta) => ("call.prompt.delta.suffix_token_ids", &delta.suffix),
        };
        for (field, ids) in [(field, prompt), ("call.generation_token_ids", &call.facts.generation)] {
            if let Some(index) = ids.iter().position(|id| *id >= limit) {
                let message = format!("id {} is not below the run's vocabulary_limit of {limit}", ids[index]);
                return Err(Refusal::new(Reason::TokenIdOverLimit, message).field(field).index(index));
            }
        }
        Ok(())
    }

    /// Whether a new call goes with what is known, and has room.
    fn judge_room(&self, call: &NewCall) -> Result<(), Refusal> {
        let facts = &call.facts;
        check_parent(&self.forest, &facts.agent_id, facts.parent_agent_id.as_ref(), "call.parent_agent_id")?;
        self.judge_new_agents(std::iter::once(&facts.agent_id).chain(&facts.parent_agent_id))?;
        let tokens = call.prompt.length() + facts.generation.len();
        if tokens > limits::CALL_TOKENS_MAX {
            let message = format!("the call has {tokens} tokens, more than {}", limits::CALL_TOKENS_MAX);
            return Err(Refusal::new(Reason::OverLimit, message).field("call.prompt"));
        }
        if self.forest.call_count() >= limits::ROLLOUT_CALLS_MAX
            || self.forest.name_count() >= limits::ROLLOUT_NAMES_MAX
        {
            let message = format!(
                "a rollout has at most {} calls and {} names of policies, models, kinds and finish reasons",
                limits::ROLLOUT_CALLS_MAX,
                limits::ROLLOUT_NAMES_MAX
            );
            return Err(Refusal::new(Reason::RolloutFull, message));
        }
        Ok(())
    }

    fn judge_new_agents<'a>(&self, ids: impl Iterator<Item = &'a crate::ids::AgentId>) -> Result<(), Refusal> {
        let new = ids.filter(|id| self.forest.find_agent(id).is_none()).count();
        let facts = self.agents.fact_count() + new;
        if self.forest.agent_count().max(facts) + new > limits::ROLLOUT_AGENTS_MAX {
            let message = format!("a rollout has at most {} agents, starts and ends", limits::ROLLOUT_AGENTS_MAX);
            return Err(Refusal::new(Reason::RolloutFull, message));
        }
        Ok(())
    }

    fn judge_open(&self, new: &Open) -> Result<Merged<Open>, Refusal> {
        if let (Some(known), Some(size)) = (self.group_size, new.group_size)
            && known != size
        {
            let message = format!("the rollout's group has {known} rollouts, not {size}; the first value stands");
            return Err(Refusal::new(Reason::GroupSizeConflict, message).field("open.group_size"));
        }
        let other = |(key, value): &(&Name, &String)| self.tags.get(*key).is_some_and(|known| known != *value);
        if let Some((key, _)) = new.tags.iter().find(other) {
            let message = format!("tag {key:?} has another value; the first stands");
            return Err(Refusal::new(Reason::TagsConflict, message).field(format!("open.tags[{key:?}]")));
        }
        let merged = Open {
            group_size: new.group_size.filter(|_| self.group_size.is_none()),
            tags: new
                .tags
                .iter()
                .filter(|(key, _)| !self.tags.contains_key(*key))
                .map(|(k, v)| (k.clone(), v.clone()))
                .collect(),
        };
        if self.tags.len() + merged.tags.len() > limits::TAGS_MAX {
            let message = format!("a rollout has at most {} tags", limits::TAGS_MAX);
            return Err(Refusal::new(Reason::OverLimit, message).field("open.tags"));
        }
        Ok(if merged == Open::default() { Merged::Same } else { Merged::New(merged) })
    }

    /// A seal, a reward, or both: the record of what is new, or none.
    fn judge_finish(&self, seal: Option<&Seal>, reward: Option<&Reward>) -> Result<Option<RolloutRecord>, Refusal> {
        let seal = seal.map(|seal| self.judge_seal(seal)).transpose()?.flatten();
        let reward = reward.map(|reward| self.judge_reward(reward)).transpose()?.flatten();
        Ok((seal.is_some() || reward.is_some()).then_some(RolloutRecord::Finish(seal, reward)))
    }

    fn judge_seal(&self, new: &Seal) -> Result<Option<Seal>, Refusal> {
        if let Some(lists) = &new.kept {
            self.judge_new_agents(lists.keys())?;
        }
        let Some(known) = &self.seal else { return Ok(Some(new.clone())) };
        let conflict = |field: &str| {
            let message = format!("the rollout was sealed with another {field}; the first value stands");
            Refusal::new(Reason::SealConflict, message).field(format!("seal.{field}"))
        };
        let kept = match (&known.kept, &new.kept) {
            (Some(one), Some(other)) => {
                let same =
                    one.len() == other.len() && one.iter().zip(other).all(|(a, b)| a.0 == b.0 && same_calls(a.1, b.1));
                if !same {
                    return Err(conflict("kept"));
                }
                known.kept.clone()
            }
            (known, new) => known.clone().or_else(|| new.clone()),
        };
        let expected_calls = match (known.expected_calls, new.expected_calls) {
            (Some(one), Some(other)) if one != other => return Err(conflict("expected_calls")),
            (known, new) => known.or(new),
        };
        let merged = Seal { kept, expected_calls };
        Ok((merged != *known).then_some(merged))
    }

    fn judge_reward(&self, new: &Reward) -> Result<Option<Reward>, Refusal> {
        let Some(known) = &self.reward else { return Ok(Some(new.clone())) };
        let conflict = |field: &str| {
            let message = format!("the rollout has another {field}; the first value stands");
            Refusal::new(Reason::RewardConflict, message).field(format!("reward.{field}"))
        };
        if known.value != new.value {
            return Err(conflict("value"));
        }
        if new.components.is_empty() || known.components == new.components {
            return Ok(None);
        }
        if known.components.is_empty() { Ok(Some(new.clone())) } else { Err(conflict("components")) }
    }
}

fn merged_to<T>(merged: Merged<T>, record: impl FnOnce(T) -> RolloutRecord) -> Option<RolloutRecord> {
    match merged {
        Merged::Same => None,
        Merged::New(value) => Some(record(value)),
    }
}

fn already_finalised() -> Refusal {
    let message = "the rollout is finalised and its rows may be in training; report more under another rollout_id";
    Refusal::new(Reason::RolloutFinalised, message)
}

fn resend_full_prompt(call: &CallId, why: &str) -> Refusal {
    let message = format!("{why}; send call {call:?} again with all ids of its prompt (prompt.token_ids)");
    Refusal::new(Reason::ResendFullPrompt, message).field("call.prompt.delta.base").call(call)
}
