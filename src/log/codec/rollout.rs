//! The records of what happens to a rollout.

use prost::{Message, Oneof};

use crate::ids::{AgentId, CallId, GroupId, Name, RolloutId, RunId};
use crate::rollout::credits::{Credit, CreditTarget, CreditValues};
use crate::rollout::event::{AgentEnd, AgentOrigin, AgentStart, Open, Reward, RolloutRecord, Seal};

use super::Fault;
use super::call::CallMessage;
use super::codes::{Coded, OriginForm, coded};
use super::fields::{identifier, identifiers, map, optional_identifier, present, texts};

#[derive(Message)]
pub(super) struct RolloutMessage<'a> {
    #[prost(string, tag = "1")]
    run: String,
    #[prost(string, tag = "2")]
    rollout: String,
    #[prost(uint32, tag = "3")]
    attempt: u32,
    #[prost(oneof = "Happening", tags = "4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15")]
    record: Option<Happening<'a>>,
}

/// What happened. A new one is listed in `RolloutMessage` too.
#[derive(Oneof)]
enum Happening<'a> {
    #[prost(message, tag = "4")]
    Open(OpenMessage),
    #[prost(string, tag = "5")]
    Group(String),
    #[prost(message, tag = "6")]
    Call(CallMessage<'a>),
    #[prost(message, tag = "7")]
    ParentAgent(ParentAgentMessage<'a>),
    #[prost(message, tag = "8")]
    AgentStart(Box<AgentStartMessage>),
    #[prost(message, tag = "9")]
    AgentEnd(AgentEndMessage),
    #[prost(message, tag = "10")]
    Finish(FinishMessage),
    #[prost(message, tag = "11")]
    Discard(DiscardMessage),
    #[prost(string, tag = "12")]
    Conflict(String),
    #[prost(uint32, tag = "13")]
    Decision(u32),
    #[prost(message, tag = "14")]
    Credit(CreditMessage),
    /// As [`Happening::Finish`], with credits: a build that does not know these must not pass over them.
    #[prost(message, tag = "15")]
    FinishWithCredits(FinishMessage),
}

#[derive(Message)]
struct OpenMessage {
    #[prost(uint32, optional, tag = "1")]
    group_size: Option<u32>,
    #[prost(message, repeated, tag = "2")]
    tags: Vec<TagMessage>,
}

#[derive(Message)]
struct TagMessage {
    #[prost(string, tag = "1")]
    key: String,
    #[prost(string, tag = "2")]
    value: String,
}

#[derive(Message)]
struct ParentAgentMessage<'a> {
    #[prost(string, tag = "1")]
    call: String,
    #[prost(string, tag = "2")]
    parent_agent_id: String,
    #[prost(message, optional, tag = "3")]
    prompt: Option<CallMessage<'a>>,
}

#[derive(Message)]
struct AgentStartMessage {
    #[prost(string, tag = "1")]
    agent_id: String,
    #[prost(uint32, tag = "2")]
    resumption: u32,
    #[prost(string, optional, tag = "3")]
    parent_agent_id: Option<String>,
    #[prost(string, optional, tag = "4")]
    spawning_call_id: Option<String>,
    #[prost(uint32, optional, tag = "5")]
    origin: Option<u32>,
    #[prost(string, optional, tag = "6")]
    fork_of: Option<String>,
    #[prost(string, optional, tag = "7")]
    profile: Option<String>,
    #[prost(string, optional, tag = "8")]
    model: Option<String>,
}

#[derive(Message)]
struct AgentEndMessage {
    #[prost(string, tag = "1")]
    agent_id: String,
    #[prost(uint32, tag = "2")]
    resumption: u32,
    #[prost(uint32, tag = "3")]
    status: u32,
    #[prost(message, optional, tag = "4")]
    kept: Option<CallsMessage>,
    #[prost(string, repeated, tag = "5")]
    answers_read: Vec<String>,
}

#[derive(Message)]
struct CallsMessage {
    #[prost(string, repeated, tag = "1")]
    calls: Vec<String>,
}

#[derive(Message)]
struct FinishMessage {
    #[prost(message, optional, tag = "1")]
    seal: Option<SealMessage>,
    #[prost(message, optional, tag = "2")]
    reward: Option<RewardMessage>,
    #[prost(message, repeated, tag = "3")]
    credits: Vec<CreditMessage>,
}

/// For a call or an agent: the other one is empty.
#[derive(Message)]
struct CreditMessage {
    #[prost(string, optional, tag = "1")]
    call: Option<String>,
    #[prost(string, optional, tag = "2")]
    agent_id: Option<String>,
    #[prost(bool, optional, tag = "3")]
    train: Option<bool>,
    #[prost(fixed64, optional, tag = "4")]
    reward_bits: Option<u64>,
    #[prost(fixed64, optional, tag = "5")]
    advantage_scale_bits: Option<u64>,
}

#[derive(Message)]
struct SealMessage {
    #[prost(message, optional, tag = "1")]
    kept: Option<KeptMessage>,
    #[prost(uint64, optional, tag = "2")]
    expected_calls: Option<u64>,
}

#[derive(Message)]
struct KeptMessage {
    #[prost(message, repeated, tag = "1")]
    agents: Vec<AgentKeptMessage>,
}

#[derive(Message)]
struct AgentKeptMessage {
    #[prost(string, tag = "1")]
    agent_id: String,
    #[prost(string, repeated, tag = "2")]
    calls: Vec<String>,
}

/// Floating point numbers are written as their bits, since a `double` that is -0 would be left out like one that is 0.
#[derive(Message)]
struct RewardMessage {
    #[prost(fixed64, tag = "1")]
    value_bits: u64,
    #[prost(message, repeated, tag = "2")]
    components: Vec<ComponentMessage>,
}

#[derive(Message)]
struct ComponentMessage {
    #[prost(string, tag = "1")]
    name: String,
    #[prost(fixed64, tag = "2")]
    value_bits: u64,
}

#[derive(Message)]
struct DiscardMessage {
    #[prost(string, tag = "1")]
    reason: String,
    #[prost(uint32, tag = "2")]
    disposition: u32,
    #[prost(uint32, tag = "3")]
    by: u32,
}

impl<'a> RolloutMessage<'a> {
    pub(super) fn of(run: &RunId, rollout: &RolloutId, attempt: u32, record: &'a RolloutRecord) -> Self {
        let record = Some(Happening::of(record));
        Self { run: run.to_string(), rollout: rollout.to_string(), attempt, record }
    }

    /// The run, the rollout, its attempt, and what happened.
    pub(super) fn into_parts(self) -> Result<(RunId, RolloutId, u32, RolloutRecord), Fault> {
        let run = identifier("run", &self.run, RunId::parse)?;
        let rollout = identifier("rollout", &self.rollout, RolloutId::parse)?;
        let record = present("what happened to the rollout", self.record)?.into_record()?;
        Ok((run, rollout, self.attempt, record))
    }
}

impl<'a> Happening<'a> {
    fn of(record: &'a RolloutRecord) -> Self {
        match record {
            RolloutRecord::Open(open) => Self::Open(OpenMessage::of(open)),
            RolloutRecord::Group(group) => Self::Group(group.to_string()),
            RolloutRecord::Call(call) => Self::Call(CallMessage::of(call)),
            RolloutRecord::ParentAgent { call, parent_agent_id, prompt } => Self::ParentAgent(ParentAgentMessage {
                call: call.to_string(),
                parent_agent_id: parent_agent_id.to_string(),
                prompt: prompt.as_ref().map(CallMessage::of),
            }),
            RolloutRecord::AgentStart(start) => Self::AgentStart(Box::new(AgentStartMessage::of(start))),
            RolloutRecord::AgentEnd(end) => Self::AgentEnd(AgentEndMessage::of(end)),
            RolloutRecord::Finish(seal, reward, credits) => {
                let form = if credits.is_empty() { Self::Finish } else { Self::FinishWithCredits };
                form(FinishMessage {
                    seal: seal.as_ref().map(SealMessage::of),
                    reward: reward.as_ref().map(RewardMessage::of),
                    credits: credits.iter().map(CreditMessage::of).collect(),
                })
            }
            RolloutRecord::Credit(credit) => Self::Credit(CreditMessage::of(credit)),
            RolloutRecord::Discard { reason, disposition, by } => {
                Self::Discard(DiscardMessage { reason: reason.clone(), disposition: disposition.code(), by: by.code() })
            }
            RolloutRecord::Conflict(call) => Self::Conflict(call.to_string()),
            RolloutRecord::Decision(decision) => Self::Decision(decision.code()),
        }
    }

    fn into_record(self) -> Result<RolloutRecord, Fault> {
        Ok(match self {
            Self::Open(open) => RolloutRecord::Open(open.into_open()?),
            Self::Group(group) => RolloutRecord::Group(identifier("group", &group, GroupId::parse)?),
            Self::Call(call) => RolloutRecord::Call(call.into_call()?),
            Self::ParentAgent(message) => RolloutRecord::ParentAgent {
                call: identifier("call", &message.call, CallId::parse)?,
                parent_agent_id: identifier("parent_agent_id", &message.parent_agent_id, AgentId::parse)?,
                prompt: message.prompt.map(CallMessage::into_call).transpose()?,
            },
            Self::AgentStart(start) => RolloutRecord::AgentStart(start.into_start()?),
            Self::AgentEnd(end) => RolloutRecord::AgentEnd(end.into_end()?),
            Self::Finish(finish) | Self::FinishWithCredits(finish) => RolloutRecord::Finish(
                finish.seal.map(SealMessage::into_seal).transpose()?,
                finish.reward.map(RewardMessage::into_reward).transpose()?,
                finish.credits.into_iter().map(CreditMessage::into_credit).collect::<Result<_, _>>()?,
            ),
            Self::Credit(credit) => RolloutRecord::Credit(credit.into_credit()?),
            Self::Discard(discard) => RolloutRecord::Discard {
                reason: discard.reason,
                disposition: coded("disposition", discard.disposition)?,
                by: coded("by", discard.by)?,
            },
            Self::Conflict(call) => RolloutRecord::Conflict(identifier("conflict", &call, CallId::parse)?),
            Self::Decision(code) => RolloutRecord::Decision(coded("decision", code)?),
        })
    }
}

impl OpenMessage {
    fn of(open: &Open) -> Self {
        let Open { group_size, tags } = open;
        let tags = tags.iter().map(|(key, value)| TagMessage { key: key.to_string(), value: value.clone() });
        Self { group_size: *group_size, tags: tags.collect() }
    }

    fn into_open(self) -> Result<Open, Fault> {
        let tags = self.tags.into_iter().map(|tag| Ok((identifier("tags", &tag.key, Name::parse)?, tag.value)));
        Ok(Open { group_size: self.group_size, tags: map("tags", tags)? })
    }
}

impl AgentStartMessage {
    fn of(start: &AgentStart) -> Self {
        let AgentStart { agent_id, resumption, parent_agent_id, spawning_call_id, origin, profile, model } = start;
        let (origin, fork_of) = match origin {
            None => (None, None),
            Some(AgentOrigin::Fresh) => (Some(OriginForm::Fresh), None),
            Some(AgentOrigin::ForkOf(call)) => (Some(OriginForm::ForkOf), Some(call.to_string())),
        };
        Self {
            agent_id: agent_id.to_string(),
            resumption: *resumption,
            parent_agent_id: parent_agent_id.as_ref().map(AgentId::to_string),
            spawning_call_id: spawning_call_id.as_ref().map(CallId::to_string),
            origin: origin.map(OriginForm::code),
            fork_of,
            profile: profile.as_ref().map(Name::to_string),
            model: model.as_ref().map(Name::to_string),
        }
    }

    fn into_start(self) -> Result<AgentStart, Fault> {
        let fork_of = optional_identifier("fork_of", self.fork_of.as_deref(), CallId::parse)?;
        let origin = match (self.origin.map(|code| coded("origin", code)).transpose()?, fork_of) {
            (None, None) => None,
            (Some(OriginForm::Fresh), None) => Some(AgentOrigin::Fresh),
            (Some(OriginForm::ForkOf), Some(call)) => Some(AgentOrigin::ForkOf(call)),
            (Some(OriginForm::ForkOf), None) => return Err(Fault::Missing("fork_of")),
            (None | Some(OriginForm::Fresh), Some(_)) => return Err(Fault::Contradiction("fork_of")),
        };
        Ok(AgentStart {
            agent_id: identifier("agent_id", &self.agent_id, AgentId::parse)?,
            resumption: self.resumption,
            parent_agent_id: optional_identifier("parent_agent_id", self.parent_agent_id.as_deref(), AgentId::parse)?,
            spawning_call_id: optional_identifier("spawning_call_id", self.spawning_call_id.as_deref(), CallId::parse)?,
            origin,
            profile: optional_identifier("profile", self.profile.as_deref(), Name::parse)?,
            model: optional_identifier("model", self.model.as_deref(), Name::parse)?,
        })
    }
}

impl AgentEndMessage {
    fn of(end: &AgentEnd) -> Self {
        let AgentEnd { agent_id, resumption, status, kept, answers_read } = end;
        Self {
            agent_id: agent_id.to_string(),
            resumption: *resumption,
            status: status.code(),
            kept: kept.as_ref().map(|calls| CallsMessage { calls: texts(calls) }),
            answers_read: texts(answers_read),
        }
    }

    fn into_end(self) -> Result<AgentEnd, Fault> {
        Ok(AgentEnd {
            agent_id: identifier("agent_id", &self.agent_id, AgentId::parse)?,
            resumption: self.resumption,
            status: coded("status", self.status)?,
            kept: self.kept.map(|kept| identifiers("kept", &kept.calls, CallId::parse)).transpose()?,
            answers_read: identifiers("answers_read", &self.answers_read, AgentId::parse)?,
        })
    }
}

impl SealMessage {
    fn of(seal: &Seal) -> Self {
        let Seal { kept, expected_calls } = seal;
        let kept = kept.as_ref().map(|kept| {
            let agents =
                kept.iter().map(|(agent, calls)| AgentKeptMessage { agent_id: agent.to_string(), calls: texts(calls) });
            KeptMessage { agents: agents.collect() }
        });
        Self { kept, expected_calls: *expected_calls }
    }

    fn into_seal(self) -> Result<Seal, Fault> {
        let of_agent = |agent: AgentKeptMessage| {
            let id = identifier("kept.agent_id", &agent.agent_id, AgentId::parse)?;
            Ok((id, identifiers("kept.calls", &agent.calls, CallId::parse)?))
        };
        let kept = self.kept.map(|kept| map("kept", kept.agents.into_iter().map(of_agent))).transpose()?;
        Ok(Seal { kept, expected_calls: self.expected_calls })
    }
}

impl CreditMessage {
    fn of(credit: &Credit) -> Self {
        let Credit { target, values: CreditValues { train, reward, advantage_scale } } = credit;
        let (call, agent_id) = match target {
            CreditTarget::Call(call) => (Some(call.to_string()), None),
            CreditTarget::Agent(agent) => (None, Some(agent.to_string())),
        };
        let bits = |value: &Option<f64>| value.map(f64::to_bits);
        let (reward_bits, advantage_scale_bits) = (bits(reward), bits(advantage_scale));
        Self { call, agent_id, train: *train, reward_bits, advantage_scale_bits }
    }

    fn into_credit(self) -> Result<Credit, Fault> {
        let target = match (&self.call, &self.agent_id) {
            (Some(call), None) => CreditTarget::Call(identifier("credit.call", call, CallId::parse)?),
            (None, Some(agent)) => CreditTarget::Agent(identifier("credit.agent_id", agent, AgentId::parse)?),
            (None, None) => return Err(Fault::Missing("credit.call")),
            (Some(_), Some(_)) => return Err(Fault::Contradiction("credit.agent_id")),
        };
        let values = CreditValues {
            train: self.train,
            reward: self.reward_bits.map(f64::from_bits),
            advantage_scale: self.advantage_scale_bits.map(f64::from_bits),
        };
        Ok(Credit { target, values })
    }
}

impl RewardMessage {
    fn of(reward: &Reward) -> Self {
        let Reward { value, components } = reward;
        let components = components
            .iter()
            .map(|(name, value)| ComponentMessage { name: name.to_string(), value_bits: value.to_bits() });
        Self { value_bits: value.to_bits(), components: components.collect() }
    }

    fn into_reward(self) -> Result<Reward, Fault> {
        let of_component = |component: ComponentMessage| {
            let name = identifier("reward.components", &component.name, Name::parse)?;
            Ok((name, f64::from_bits(component.value_bits)))
        };
        let components = map("reward.components", self.components.into_iter().map(of_component))?;
        Ok(Reward { value: f64::from_bits(self.value_bits), components })
    }
}
