//! Whether a rollout takes an event: RULES section 4, line by line. Reads only.

use std::collections::HashSet;

use crate::error::{Reason, Refusal};
use crate::forest::call::{CallIndex, NewCall, TokensState};
use crate::forest::{CallRecord, CallRefusal, JudgedCall};
use crate::ids::{AgentId, CallId, Name};
use crate::limits;

use super::agents::{Merged, check_parent, same_set};
use super::credits::Credit;
use super::event::{AgentEnd, AgentStart, Event, Open, Reward, RolloutRecord, Seal};
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
            Event::AgentStart(start) => {
                facts.judge_start(&start).map(|merged| merged_to(merged, RolloutRecord::AgentStart))
            }
            Event::AgentEnd(end) => facts.judge_end(&end).map(|merged| merged_to(merged, RolloutRecord::AgentEnd)),
            Event::Seal(seal) => facts.judge_finish(Some(&seal), None, &[], ""),
            Event::Reward(reward, credits) => facts.judge_finish(None, Some(&reward), &credits, ""),
            Event::Finish(seal, reward, credits) => facts.judge_finish(Some(&seal), Some(&reward), &credits, "finish."),
            Event::Credit(credit) => facts
                .judge_credits(std::slice::from_ref(&credit), |_| "credit".to_owned())
                .map(|mut new| new.pop().map(RolloutRecord::Credit)),
            Event::Discard { reason, disposition, by } => Ok(Some(RolloutRecord::Discard { reason, disposition, by })),
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
        let (new_parent, room) = (facts.new_parent_agent(&call), facts.judge_room(&call));
        let judged = match facts.forest.judge_call(call) {
            Ok(judged) => judged,
            Err(CallRefusal::Conflict(field)) => {
                let message =
                    format!("call {id:?} has come with another {field}; the first stands, and the rollout is marked");
                let refusal = Refusal::new(Reason::CallConflict, message).field(format!("call.{field}")).call(&id);
                let mark = facts.conflict().is_none();
                return Judgement::Refused(refusal, mark.then_some(RolloutRecord::Conflict(id)));
            }
            Err(CallRefusal::ResendFullPrompt(why)) => {
                return Judgement::Refused(resend_full_prompt(&id, &why), None);
            }
        };
        let new_parent = match new_parent {
            Ok(new_parent) => new_parent,
            Err(refusal) => return Judgement::Refused(refusal.call(&id), None),
        };
        let record = match (judged, new_parent) {
            (JudgedCall::Duplicate(known), _) if facts.forest.call(known).tokens_state() == TokensState::Unresolved => {
                let why = "its delta's base turned out to be another call's text";
                return Judgement::Refused(resend_full_prompt(&id, why), None);
            }
            (JudgedCall::Duplicate(known), None) => return Judgement::Duplicate(Some(known)),
            (JudgedCall::Duplicate(_), Some(parent_agent_id)) => {
                RolloutRecord::ParentAgent { call: id.clone(), parent_agent_id, prompt: None }
            }
            (JudgedCall::Record(prompt @ CallRecord::Prompt(..)), Some(parent_agent_id)) => {
                RolloutRecord::ParentAgent { call: id.clone(), parent_agent_id, prompt: Some(prompt) }
            }
            (JudgedCall::Record(record), _) => RolloutRecord::Call(record),
        };
        match self.judge_moment(&id).and(room) {
            Ok(()) => Judgement::Record(record),
            Err(refusal) => Judgement::Refused(refusal.call(&id), None),
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
                let trains =
                    self.would_train(facts) && self.settings.trains(&facts.policy) && !facts.generation.is_empty();
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

    /// The parent of a call's agent, if the call says it and it was not known.
    fn new_parent_agent(&self, call: &NewCall) -> Result<Option<AgentId>, Refusal> {
        let facts = &call.facts;
        check_parent(&self.forest, &facts.agent_id, facts.parent_agent_id.as_ref(), "call.parent_agent_id")?;
        let known = self.forest.find_agent(&facts.agent_id).and_then(|agent| self.forest.agent(agent).parent());
        Ok(facts.parent_agent_id.clone().filter(|_| known.is_none()))
    }

    /// Whether what is new of a call has room.
    fn judge_room(&self, call: &NewCall) -> Result<(), Refusal> {
        let facts = &call.facts;
        self.judge_new_agents(std::iter::once(&facts.agent_id).chain(&facts.parent_agent_id))?;
        let tokens = call.prompt.length() + facts.generation.len();
        if tokens > limits::CALL_TOKENS_MAX {
            let message = format!("the call has {tokens} tokens, more than {}", limits::CALL_TOKENS_MAX);
            return Err(Refusal::new(Reason::OverLimit, message).field("call.prompt"));
        }
        let is_new = self.forest.find(&facts.call_id).is_none();
        let full = self.forest.call_count() >= limits::ROLLOUT_CALLS_MAX
            || self.forest.name_count() >= limits::ROLLOUT_NAMES_MAX;
        if is_new && full {
            let message = format!(
                "a rollout has at most {} calls and {} names of policies, models, kinds and finish reasons",
                limits::ROLLOUT_CALLS_MAX,
                limits::ROLLOUT_NAMES_MAX
            );
            return Err(Refusal::new(Reason::RolloutFull, message));
        }
        Ok(())
    }

    fn judge_new_agents<'a>(&self, ids: impl Iterator<Item = &'a AgentId> + Clone) -> Result<(), Refusal> {
        // There is room even if all of them were new.
        if self.forest.agent_count() + ids.clone().count() <= limits::ROLLOUT_AGENTS_MAX {
            return Ok(());
        }
        let new: HashSet<&AgentId> = ids.filter(|id| self.forest.find_agent(id).is_none()).collect();
        if self.forest.agent_count() + new.len() <= limits::ROLLOUT_AGENTS_MAX {
            return Ok(());
        }
        let message = format!("a rollout has at most {} agents", limits::ROLLOUT_AGENTS_MAX);
        Err(Refusal::new(Reason::RolloutFull, message))
    }

    /// Whether one more start or end of an agent has room.
    fn judge_agent_fact<'a>(&self, agents: impl Iterator<Item = &'a AgentId> + Clone) -> Result<(), Refusal> {
        if self.agents.fact_count() >= limits::ROLLOUT_AGENT_FACTS_MAX {
            let message =
                format!("a rollout has at most {} starts and ends of agents", limits::ROLLOUT_AGENT_FACTS_MAX);
            return Err(Refusal::new(Reason::RolloutFull, message));
        }
        self.judge_new_agents(agents)
    }

    fn judge_start(&self, start: &AgentStart) -> Result<Merged<AgentStart>, Refusal> {
        let merged = self.agents.judge_start(&self.forest, start)?;
        if merged != Merged::Same {
            let agents = std::iter::once(&start.agent_id).chain(&start.parent_agent_id);
            self.judge_agent_fact(agents).map_err(|refusal| refusal.agent(&start.agent_id))?;
        }
        Ok(merged)
    }

    fn judge_end(&self, end: &AgentEnd) -> Result<Merged<AgentEnd>, Refusal> {
        let merged = self.agents.judge_end(&self.forest, end)?;
        if merged != Merged::Same {
            self.judge_agent_fact(std::iter::once(&end.agent_id)).map_err(|refusal| refusal.agent(&end.agent_id))?;
        }
        Ok(merged)
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

    /// A seal, a reward with its credits, or both: the record of what is new, or none. `path` stands before the fields' names.
    fn judge_finish(
        &self,
        seal: Option<&Seal>,
        reward: Option<&Reward>,
        credits: &[Credit],
        path: &str,
    ) -> Result<Option<RolloutRecord>, Refusal> {
        let seal = seal.map(|seal| self.judge_seal(seal, path)).transpose()?.flatten();
        let reward = reward.map(|reward| self.judge_reward(reward, path)).transpose()?.flatten();
        let credits = self.judge_credits(credits, |at| format!("{path}reward.credits[{at}]"))?;
        let is_new = seal.is_some() || reward.is_some() || !credits.is_empty();
        Ok(is_new.then_some(RolloutRecord::Finish(seal, reward, credits)))
    }

    fn judge_seal(&self, new: &Seal, path: &str) -> Result<Option<Seal>, Refusal> {
        let conflict = |field: &str| {
            let message = format!("the rollout was sealed with another {field}; the first value stands");
            Refusal::new(Reason::SealConflict, message).field(format!("{path}seal.{field}"))
        };
        let known = self.seal.as_ref();
        let kept = match (known.and_then(|known| known.kept.as_ref()), &new.kept) {
            (Some(one), Some(other)) => {
                let same =
                    one.len() == other.len() && one.iter().zip(other).all(|(a, b)| a.0 == b.0 && same_set(a.1, b.1));
                if !same {
                    return Err(conflict("kept"));
                }
                Some(one)
            }
            (known, new) => known.or(new.as_ref()),
        };
        let expected_calls = match (known.and_then(|known| known.expected_calls), new.expected_calls) {
            (Some(one), Some(other)) if one != other => return Err(conflict("expected_calls")),
            (known, new) => known.or(new),
        };
        let merged = Seal { kept: kept.cloned(), expected_calls };
        if known == Some(&merged) {
            return Ok(None);
        }
        self.judge_new_agents(merged.kept.iter().flat_map(std::collections::BTreeMap::keys))?;
        Ok(Some(merged))
    }

    fn judge_reward(&self, new: &Reward, path: &str) -> Result<Option<Reward>, Refusal> {
        let Some(known) = &self.reward else { return Ok(Some(new.clone())) };
        let conflict = |field: &str| {
            let message = format!("the rollout has another {field}; the first value stands");
            Refusal::new(Reason::RewardConflict, message).field(format!("{path}reward.{field}"))
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
