//! What harnesses report: a request becomes a rollout's reference and an event, or a refusal.
//!
//! Checks all of RULES section 4, "Bad input", that needs neither the run's settings nor the rollout. Whether
//! log-probabilities are finite is the run's to say, and is not checked here.

use std::collections::BTreeMap;
use std::fmt::{self, Display};

use crate::error::{Reason, Refusal};
use crate::ids::{AgentId, CallId, GroupId, Name, RolloutId, RolloutRef, RunId};
use crate::limits;
use crate::proto::v1;
use crate::rollout::credits::{Credit, CreditTarget, CreditValues};
use crate::rollout::event::{
    AgentEnd, AgentOrigin, AgentStart, AgentStatus, DiscardedBy, Disposition, Event, Open, Reward, Seal,
};

use super::call::call;
use super::fields::{at_most, identifier, invalid, known, missing, optional_identifier, shown};

/// The reason of a discard that gives none.
const DISCARDED: &str = "discarded";

/// Which rollout a request is about.
///
/// # Errors
/// If it does not say so, or an identifier is none.
pub fn rollout_ref(message: Option<&v1::RolloutRef>) -> Result<RolloutRef, Box<Refusal>> {
    let message = message.ok_or_else(|| missing("rollout"))?;
    Ok(RolloutRef {
        run: identifier(&message.run_id, "rollout.run_id", RunId::parse)?,
        group: optional_identifier(&message.group_id, "rollout.group_id", GroupId::parse)?,
        rollout: identifier(&message.rollout_id, "rollout.rollout_id", RolloutId::parse)?,
        attempt: message.attempt,
    })
}

/// The message that names this rollout.
#[must_use]
pub fn rollout_ref_message(rollout: &RolloutRef) -> v1::RolloutRef {
    v1::RolloutRef {
        run_id: rollout.run.to_string(),
        group_id: rollout.group.as_ref().map(GroupId::to_string).unwrap_or_default(),
        rollout_id: rollout.rollout.to_string(),
        attempt: rollout.attempt,
    }
}

/// What happened to a rollout that is in a group or is not.
///
/// # Errors
/// If it is bad input, or asks for what this release does not have.
pub fn event(message: Option<v1::report_request::Event>, in_group: bool) -> Result<Event, Box<Refusal>> {
    use v1::report_request::Event as Message;
    let event = match message.ok_or_else(|| missing("event"))? {
        Message::Open(message) => Event::Open(open(message, in_group)?),
        Message::Call(message) => call(message)?,
        Message::AgentStart(message) => Event::AgentStart(agent_start(&message)?),
        Message::AgentEnd(message) => Event::AgentEnd(agent_end(&message)?),
        Message::Seal(message) => Event::Seal(seal(&message, "seal")?),
        Message::Reward(message) => {
            let (reward, credits) = reward(&message, "reward")?;
            Event::Reward(reward, credits)
        }
        Message::Finish(message) => {
            let seal = message.seal.map(|message| seal(&message, "finish.seal")).transpose()?.unwrap_or_default();
            let message = message.reward.ok_or_else(|| missing("finish.reward"))?;
            let (reward, credits) = reward(&message, "finish.reward")?;
            Event::Finish(seal, reward, credits)
        }
        Message::Credit(message) => Event::Credit(credit(&message, format_args!("credit"))?),
        Message::Heartbeat(_) => Event::Heartbeat,
        Message::Discard(message) => {
            let disposition = disposition(message.disposition, "discard.disposition")?;
            let reason = discard_reason(message.reason, "discard.reason")?;
            Event::Discard { reason, disposition, by: DiscardedBy::Harness }
        }
    };
    Ok(event)
}

fn open(message: v1::Open, in_group: bool) -> Result<Open, Refusal> {
    let field = "open.group_size";
    match message.group_size {
        Some(0) => return Err(invalid(field, "is 0; a group has at least 1 rollout")),
        Some(size) if size > limits::GROUP_SIZE_MAX => {
            let text = format!("a group has at most {} rollouts, not {size}", limits::GROUP_SIZE_MAX);
            return Err(Refusal::new(Reason::OverLimit, text).field(field));
        }
        Some(_) if !in_group => return Err(invalid(field, "is given, but rollout.group_id is empty")),
        Some(_) | None => {}
    }
    at_most(message.tags.len(), limits::TAGS_MAX, "tags", "open.tags")?;
    let mut tags = BTreeMap::new();
    for (key, value) in message.tags {
        let field = format!("open.tags[{}]", shown(&key));
        let name = identifier(&key, &field, Name::parse)?;
        at_most(value.len(), limits::TEXT_BYTES_MAX, "bytes", &field)?;
        tags.insert(name, value);
    }
    Ok(Open { group_size: message.group_size, tags })
}

fn agent_start(message: &v1::AgentStart) -> Result<AgentStart, Refusal> {
    use v1::agent_start::Origin;
    let agent_id = identifier(&message.agent_id, "agent_start.agent_id", AgentId::parse)?;
    let of_agent = |refusal: Refusal| refusal.agent(&agent_id);
    let parent = optional_identifier(&message.parent_agent_id, "agent_start.parent_agent_id", AgentId::parse);
    let spawning = optional_identifier(&message.spawning_call_id, "agent_start.spawning_call_id", CallId::parse);
    let origin = match &message.origin {
        None => Ok(None),
        Some(Origin::Fresh(_)) => Ok(Some(AgentOrigin::Fresh)),
        Some(Origin::ForkOfCallId(fork)) => identifier(fork, "agent_start.fork_of_call_id", CallId::parse)
            .map(|call_id| Some(AgentOrigin::ForkOf(call_id))),
    };
    let profile = optional_identifier(&message.profile, "agent_start.profile", Name::parse);
    let model = optional_identifier(&message.model, "agent_start.model", Name::parse);
    Ok(AgentStart {
        resumption: message.resumption,
        parent_agent_id: parent.map_err(of_agent)?,
        spawning_call_id: spawning.map_err(of_agent)?,
        origin: origin.map_err(of_agent)?,
        profile: profile.map_err(of_agent)?,
        model: model.map_err(of_agent)?,
        agent_id,
    })
}

fn agent_end(message: &v1::AgentEnd) -> Result<AgentEnd, Refusal> {
    let agent_id = identifier(&message.agent_id, "agent_end.agent_id", AgentId::parse)?;
    let of_agent = |refusal: Refusal| refusal.agent(&agent_id);
    let kept = message.kept.as_ref().map(|list| {
        at_most(list.call_ids.len(), limits::KEPT_CALLS_MAX, "calls", "agent_end.kept")?;
        kept_calls(list, "agent_end.kept.call_ids")
    });
    Ok(AgentEnd {
        resumption: message.resumption,
        status: agent_status(message.status).map_err(of_agent)?,
        kept: kept.transpose().map_err(of_agent)?,
        answers_read: answers_read(&message.answers_read_agent_ids).map_err(of_agent)?,
        agent_id,
    })
}

fn agent_status(number: i32) -> Result<AgentStatus, Refusal> {
    let field = "agent_end.status";
    match known(number, field)? {
        v1::AgentStatus::Unspecified => Err(invalid(field, "is not said; an agent's end says how it ended")),
        v1::AgentStatus::Settled => Ok(AgentStatus::Settled),
        v1::AgentStatus::Failed => Ok(AgentStatus::Failed),
        v1::AgentStatus::Interrupted => Ok(AgentStatus::Interrupted),
        v1::AgentStatus::BudgetExhausted => Ok(AgentStatus::BudgetExhausted),
        v1::AgentStatus::Closed => Ok(AgentStatus::Closed),
    }
}

fn answers_read(agents: &[String]) -> Result<Vec<AgentId>, Refusal> {
    let field = "agent_end.answers_read_agent_ids";
    at_most(agents.len(), limits::ROLLOUT_AGENTS_MAX, "agents", field)?;
    let parsed = agents.iter().enumerate();
    parsed.map(|(at, text)| identifier(text, field, AgentId::parse).map_err(|refusal| refusal.index(at))).collect()
}

/// A list of kept calls; the same call twice counts once.
fn kept_calls(list: &v1::CallList, field: impl std::fmt::Display) -> Result<Vec<CallId>, Refusal> {
    let parsed = list.call_ids.iter().enumerate();
    parsed.map(|(at, text)| identifier(text, &field, CallId::parse).map_err(|refusal| refusal.index(at))).collect()
}

fn seal(message: &v1::Seal, path: &str) -> Result<Seal, Refusal> {
    let kept = message.kept.as_ref().map(|kept| {
        at_most(kept.agents.len(), limits::ROLLOUT_AGENTS_MAX, "agents", format_args!("{path}.kept.agents"))?;
        let calls = kept.agents.values().map(|list| list.call_ids.len()).sum();
        at_most(calls, limits::KEPT_CALLS_MAX, "calls", format_args!("{path}.kept.agents"))?;
        let lists = kept.agents.iter().map(|(agent, list)| {
            let field = format!("{path}.kept.agents[{}]", shown(agent));
            let agent = identifier(agent, &field, AgentId::parse)?;
            let calls = kept_calls(list, format_args!("{field}.call_ids")).map_err(|refusal| refusal.agent(&agent))?;
            Ok((agent, calls))
        });
        lists.collect::<Result<BTreeMap<_, _>, Refusal>>()
    });
    Ok(Seal { kept: kept.transpose()?, expected_calls: message.expected_calls })
}

fn finite(value: f64, field: impl Display) -> Result<f64, Refusal> {
    let refusal = || Refusal::new(Reason::RewardNotFinite, format!("{field} is {value}")).field(field.to_string());
    if value.is_finite() { Ok(value) } else { Err(refusal()) }
}

/// A number of a credit, of which products and sums stay finite. It has one zero.
fn bounded(value: f64, field: impl Display) -> Result<f64, Refusal> {
    let value = finite(value, &field)? + 0.0;
    if value.abs() > limits::CREDIT_VALUE_MAX {
        let message = format!("{field} is {value}, and beyond {:e}", limits::CREDIT_VALUE_MAX);
        return Err(Refusal::new(Reason::OverLimit, message).field(field.to_string()));
    }
    Ok(value)
}

fn credit(message: &v1::Credit, path: fmt::Arguments<'_>) -> Result<Credit, Refusal> {
    use v1::credit::Target;
    let target = match &message.target {
        None => return Err(missing(&format!("{path}.target"))),
        Some(Target::CallId(call)) => {
            CreditTarget::Call(identifier(call, format_args!("{path}.call_id"), CallId::parse)?)
        }
        Some(Target::AgentId(agent)) => {
            CreditTarget::Agent(identifier(agent, format_args!("{path}.agent_id"), AgentId::parse)?)
        }
    };
    let number =
        |value: Option<f64>, name: &str| value.map(|value| bounded(value, format_args!("{path}.{name}"))).transpose();
    let values = CreditValues {
        train: message.train,
        reward: number(message.reward, "reward")?,
        advantage_scale: number(message.advantage_scale, "advantage_scale")?,
    };
    Ok(Credit { target, values })
}

/// The reward, and the credits that come with it.
fn reward(message: &v1::Reward, path: &str) -> Result<(Reward, Vec<Credit>), Refusal> {
    at_most(message.credits.len(), limits::ROLLOUT_CREDITS_MAX, "credits", format_args!("{path}.credits"))?;
    let credits = message.credits.iter().enumerate();
    let credits = credits.map(|(at, message)| credit(message, format_args!("{path}.credits[{at}]")));
    let credits = credits.collect::<Result<Vec<_>, Refusal>>()?;
    at_most(message.components.len(), limits::TAGS_MAX, "components", format_args!("{path}.components"))?;
    let components = message.components.iter().map(|(key, value)| {
        let field = format!("{path}.components[{}]", shown(key));
        Ok((identifier(key, &field, Name::parse)?, finite(*value, &field)?))
    });
    let components = components.collect::<Result<BTreeMap<_, _>, Refusal>>()?;
    Ok((Reward { value: finite(message.value, format!("{path}.value"))?, components }, credits))
}

/// Whether another attempt at a discarded rollout is to come.
///
/// # Errors
/// If the number is none of the enum's.
pub fn disposition(number: i32, field: &str) -> Result<Disposition, Refusal> {
    match known(number, field)? {
        v1::DiscardDisposition::Unspecified => Ok(Disposition::Unsaid),
        v1::DiscardDisposition::Final => Ok(Disposition::Final),
        v1::DiscardDisposition::WillRetry => Ok(Disposition::WillRetry),
    }
}

/// Why a rollout is discarded, in a few words.
///
/// # Errors
/// If it is too long.
pub fn discard_reason(reason: String, field: &str) -> Result<String, Refusal> {
    at_most(reason.len(), limits::TEXT_BYTES_MAX, "bytes", field)?;
    Ok(if reason.is_empty() { DISCARDED.to_owned() } else { reason })
}

#[cfg(test)]
#[path = "report_tests.rs"]
mod tests;
