//! What happens to a rollout: events as they are reported, records as they are logged, effects of applying them.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::forest::CallRecord;
use crate::forest::call::{CallIndex, NewCall};
use crate::forest::link::Verdict;
use crate::ids::{AgentId, CallId, GroupId, Name};

use super::FinalisedRollout;
use super::credits::Credit;

/// Facts about the whole rollout, given when it is opened or later.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Open {
    /// How many rollouts its group has.
    pub group_size: Option<u32>,
    /// Free tags, carried on its rows.
    pub tags: BTreeMap<Name, String>,
}

/// Whether a started agent begins empty or from a copy of another call's text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AgentOrigin {
    /// With a context of its own.
    Fresh,
    /// With the text of this call.
    ForkOf(CallId),
}

/// An agent was started, or resumed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AgentStart {
    /// The agent.
    pub agent_id: AgentId,
    /// 0 for its first start, n for the nth time that it was resumed.
    pub resumption: u32,
    /// Its parent agent, if said.
    pub parent_agent_id: Option<AgentId>,
    /// The call that spawned it, if said.
    pub spawning_call_id: Option<CallId>,
    /// How it begins, if said.
    pub origin: Option<AgentOrigin>,
    /// Its profile, if said.
    pub profile: Option<Name>,
    /// Its model, if said.
    pub model: Option<Name>,
}

/// How an agent ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AgentStatus {
    /// It did what it was asked.
    Settled,
    /// It failed.
    Failed,
    /// It was interrupted.
    Interrupted,
    /// Its budget was used up.
    BudgetExhausted,
    /// It was closed.
    Closed,
}

/// An agent ended (it may be resumed).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AgentEnd {
    /// The agent.
    pub agent_id: AgentId,
    /// Which of its starts this ends.
    pub resumption: u32,
    /// How it ended.
    pub status: AgentStatus,
    /// The calls that it kept in its transcript, if said.
    pub kept: Option<Vec<CallId>>,
    /// The agents whose answers it read.
    pub answers_read: Vec<AgentId>,
}

/// No more calls, but those still awaited.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Seal {
    /// The calls that each agent kept, if said.
    pub kept: Option<BTreeMap<AgentId, Vec<CallId>>>,
    /// How many distinct calls the rollout has, if said.
    pub expected_calls: Option<u64>,
}

/// What the episode was worth.
#[derive(Clone, Debug, PartialEq)]
pub struct Reward {
    /// The reward.
    pub value: f64,
    /// Named parts of it.
    pub components: BTreeMap<Name, f64>,
}

/// Whether another attempt at a discarded rollout is to come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Disposition {
    /// Nobody said: its group does not wait for one, and one that comes all the same is taken.
    Unsaid,
    /// None: it is out for good.
    Final,
    /// One will come: its group keeps the place open.
    WillRetry,
}

/// Who has a rollout end without rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DiscardedBy {
    /// Its harness, in its own words.
    Harness,
    /// Somebody by hand, in their own words.
    Operator,
    /// A clock or a rule of the run; the reason says which.
    Rule,
}

/// What a harness reports of a rollout.
#[derive(Clone, Debug, PartialEq)]
pub enum Event {
    /// Facts about the rollout.
    Open(Open),
    /// A model call; `names_policy` is false where the run's default policy is meant.
    Call {
        /// The call.
        call: Box<NewCall>,
        /// Whether its policy was said.
        names_policy: bool,
    },
    /// An agent was started.
    AgentStart(AgentStart),
    /// An agent ended.
    AgentEnd(AgentEnd),
    /// No more calls.
    Seal(Seal),
    /// The reward, and credits that come with it.
    Reward(Reward, Vec<Credit>),
    /// Seal and reward at once, and credits that come with them.
    Finish(Seal, Reward, Vec<Credit>),
    /// What a call or an agent deserves.
    Credit(Credit),
    /// It is alive.
    Heartbeat,
    /// It is to be thrown away.
    Discard {
        /// Why.
        reason: String,
        /// Whether a next attempt will come.
        disposition: Disposition,
        /// Who.
        by: DiscardedBy,
    },
}

/// What a clock decided.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Decision {
    /// Nothing was heard of it for `idle_timeout`: discarded.
    IdleTimeout,
    /// Kept calls did not come in time: discarded.
    MissingCallsDiscard,
    /// Kept calls did not come in time: finalised without them.
    MissingCallsFinalise,
    /// Named parents did not come in time: their links count as broken.
    MissingParentsGivenUp,
}

impl Decision {
    /// Whether rows may be made because of it; else it ends the rollout without any.
    #[must_use]
    pub fn may_finalise(self) -> bool {
        match self {
            Self::MissingCallsFinalise | Self::MissingParentsGivenUp => true,
            Self::IdleTimeout | Self::MissingCallsDiscard => false,
        }
    }
}

/// What is logged of a rollout, and applied again in replay.
#[derive(Clone, Debug, PartialEq)]
pub enum RolloutRecord {
    /// Facts about the rollout; only what is new.
    Open(Open),
    /// The group that it is in.
    Group(GroupId),
    /// A call.
    Call(CallRecord),
    /// A call that stands came again and said its agent's parent, which was not known; perhaps with its prompt in another form.
    ParentAgent {
        /// The call.
        call: CallId,
        /// The parent of its agent.
        parent_agent_id: AgentId,
        /// Its prompt, if that is new.
        prompt: Option<CallRecord>,
    },
    /// An agent's start.
    AgentStart(AgentStart),
    /// An agent's end.
    AgentEnd(AgentEnd),
    /// A seal, a reward, or both, with the credits that came with the reward.
    Finish(Option<Seal>, Option<Reward>, Vec<Credit>),
    /// What a call or an agent deserves; only what is new.
    Credit(Credit),
    /// It was discarded by its harness or by hand.
    Discard {
        /// Why.
        reason: String,
        /// Whether a next attempt will come.
        disposition: Disposition,
        /// Who.
        by: DiscardedBy,
    },
    /// A call came twice with different content; the first stands.
    Conflict(CallId),
    /// A clock decided.
    Decision(Decision),
}

/// How a rollout ended without rows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Discarded {
    /// Why, in a few words.
    pub reason: String,
    /// Whether a next attempt will come.
    pub disposition: Disposition,
    /// Who.
    pub by: DiscardedBy,
}

/// What applying a record has caused.
#[derive(Clone, Debug)]
pub enum Effect {
    /// Its rows can be made.
    Finalised(Arc<FinalisedRollout>),
    /// It ended without rows.
    Discarded(Discarded),
    /// A call that waited has its ids now.
    CallResolved(CallIndex, Verdict),
    /// A call that waited must come in full.
    CallUnresolved(CallIndex),
}
