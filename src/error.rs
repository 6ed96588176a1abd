//! The one error of the service: a refusal with a stable reason, the field, the ids, and the way out.
//!
//! A [`Reason`] is what programs match on; each has one [`Code`], and `rpc` maps codes to gRPC's. The message is for people.

use std::fmt;

use crate::ids::{AgentId, CallId};

/// What kind of refusal it is; one for each gRPC code that the service uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Code {
    /// The request itself is wrong and will stay so.
    InvalidArgument,
    /// The request is right, the moment is not.
    FailedPrecondition,
    /// It was changed meanwhile: read it again, and change that.
    Aborted,
    /// Another value stands already.
    AlreadyExists,
    /// What it names is not there.
    NotFound,
    /// A budget is used up.
    ResourceExhausted,
    /// The service is not ready, or about to stop.
    Unavailable,
    /// This release does not have it.
    Unimplemented,
    /// A defect of the service.
    Internal,
}

macro_rules! reasons {
    ($($(#[$documentation:meta])* $name:ident = $code:ident $text:literal,)*) => {
        /// Why something was refused. The text of a reason never changes.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub enum Reason {
            $($(#[$documentation])* $name,)*
        }

        impl Reason {
            /// All reasons.
            pub const ALL: &[Self] = &[$(Self::$name,)*];

            /// Its stable text.
            #[must_use]
            pub fn as_str(self) -> &'static str {
                match self {
                    $(Self::$name => $text,)*
                }
            }

            /// The reason with this text.
            #[must_use]
            pub fn named(text: &str) -> Option<Self> {
                Self::ALL.iter().copied().find(|reason| reason.as_str() == text)
            }

            /// Its code.
            #[must_use]
            pub fn code(self) -> Code {
                match self {
                    $(Self::$name => Code::$code,)*
                }
            }
        }
    };
}

reasons! {
    /// A field that must be there is not.
    MissingField = InvalidArgument "missing_field",
    /// An identifier is empty, too long, or has control characters.
    InvalidIdentifier = InvalidArgument "invalid_identifier",
    /// A field has a value that it cannot have.
    InvalidValue = InvalidArgument "invalid_value",
    /// Token or log-probability bytes are not whole numbers of four bytes.
    InvalidArrayLength = InvalidArgument "invalid_array_length",
    /// Log-probabilities are not as many as generated ids.
    LogprobsLength = InvalidArgument "logprobs_length",
    /// A log-probability is NaN or infinite.
    LogprobNotFinite = InvalidArgument "logprob_not_finite",
    /// A trained call has no log-probabilities.
    LogprobsMissing = InvalidArgument "logprobs_missing",
    /// An id is not below the run's vocabulary limit.
    TokenIdOverLimit = InvalidArgument "token_id_over_limit",
    /// A reward is not finite.
    RewardNotFinite = InvalidArgument "reward_not_finite",
    /// Something is over a limit of the service.
    OverLimit = InvalidArgument "over_limit",
    /// The delta cannot be taken: send the call with all ids of its prompt.
    ResendFullPrompt = FailedPrecondition "resend_full_prompt",
    /// This release does not have what was asked for.
    NotInThisRelease = Unimplemented "not_in_this_release",
    /// The call is known with other content.
    CallConflict = AlreadyExists "call_conflict",
    /// The rollout has another reward.
    RewardConflict = AlreadyExists "reward_conflict",
    /// The rollout was sealed with other lists or another count.
    SealConflict = AlreadyExists "seal_conflict",
    /// The rollout is in another group.
    GroupConflict = AlreadyExists "group_conflict",
    /// The group, or the rollout, has another group size.
    GroupSizeConflict = AlreadyExists "group_size_conflict",
    /// The rollout has another value for a tag.
    TagsConflict = AlreadyExists "tags_conflict",
    /// The agent has another parent.
    AgentParentConflict = AlreadyExists "agent_parent_conflict",
    /// The agent was started otherwise.
    AgentStartConflict = AlreadyExists "agent_start_conflict",
    /// The agent ended otherwise.
    AgentEndConflict = AlreadyExists "agent_end_conflict",
    /// A second, other value of a credit.
    CreditConflict = AlreadyExists "credit_conflict",
    /// The rollout takes no more calls.
    RolloutSealed = FailedPrecondition "rollout_sealed",
    /// The rollout's rows are made.
    RolloutFinalised = FailedPrecondition "rollout_finalised",
    /// A newer attempt of the rollout has come.
    AttemptSuperseded = FailedPrecondition "attempt_superseded",
    /// The group has as many members as it may have.
    GroupFull = ResourceExhausted "group_full",
    /// The group was released or dropped, and takes no rollout any more.
    GroupReleased = FailedPrecondition "group_released",
    /// The rollout has as many calls, agents or names as it may have.
    RolloutFull = ResourceExhausted "rollout_full",
    /// The disk, or what the log may take of it, is full.
    LogFull = ResourceExhausted "log_full",
    /// The log does not give back what has left memory.
    LogUnreadable = Unavailable "log_unreadable",
    /// Memory is short.
    MemoryFull = ResourceExhausted "memory_full",
    /// As many groups are ahead of the trainers as the run lets there be.
    LeadFull = ResourceExhausted "lead_full",
    /// The service holds as much as it may.
    ServiceFull = ResourceExhausted "service_full",
    /// No such run.
    RunNotFound = NotFound "run_not_found",
    /// The run is there already.
    RunExists = AlreadyExists "run_exists",
    /// The run's settings are at another version.
    SettingsVersionConflict = Aborted "settings_version_conflict",
    /// The run still has open rollouts or rows that nobody acknowledged.
    RunNotEmpty = FailedPrecondition "run_not_empty",
    /// No such rollout.
    RolloutNotFound = NotFound "rollout_not_found",
    /// No such group.
    GroupNotFound = NotFound "group_not_found",
    /// Nobody waits for the group's release: its run has neither an estimator nor whole groups as units.
    GroupNotAwaited = FailedPrecondition "group_not_awaited",
    /// No such consumer group, or no such unit in it.
    UnitNotFound = NotFound "unit_not_found",
    /// The consumer group has other settings.
    ConsumerGroupConflict = FailedPrecondition "consumer_group_conflict",
    /// No such step of the consumer group is frozen.
    StepNotFound = NotFound "step_not_found",
    /// The unit is not undeliverable, so there is nothing to decide about it.
    UnitNotUndeliverable = FailedPrecondition "unit_not_undeliverable",
    /// Another stream was opened under the consumer's name.
    ConsumerInUse = FailedPrecondition "consumer_in_use",
    /// The consumer group was sought back to a checkpoint.
    Sought = Aborted "sought",
    /// What a checkpoint says is not kept any more.
    NotRetained = FailedPrecondition "not_retained",
    /// The consumer does not read what it is sent.
    ConsumerTooSlow = ResourceExhausted "consumer_too_slow",
    /// A message is larger than any that is taken.
    MessageTooLarge = ResourceExhausted "message_too_large",
    /// A message was not whole in time.
    MessageTooSlow = ResourceExhausted "message_too_slow",
    /// A stream must open with a subscription, and have only one.
    SubscriptionOrder = FailedPrecondition "subscription_order",
    /// The service is about to stop.
    Draining = Unavailable "draining",
    /// The service is not ready yet.
    NotReady = Unavailable "not_ready",
    /// A defect of the service; its log says more.
    Internal = Internal "internal",
}

/// A request that was refused. Nothing of it is stored.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// The stable reason.
    pub reason: Reason,
    /// A sentence for people: what is wrong, and what to do.
    pub message: String,
    /// The field, as a path in the request.
    pub field: Option<String>,
    /// The offending index in that field.
    pub index: Option<u64>,
    /// The agent that it concerns.
    pub agent_id: Option<AgentId>,
    /// The call that it concerns.
    pub call_id: Option<CallId>,
    /// When it may be worth trying again, in milliseconds.
    pub retry_after_ms: Option<u64>,
}

impl Refusal {
    /// A refusal that names no field and no ids yet.
    #[must_use]
    pub fn new(reason: Reason, message: impl Into<String>) -> Self {
        Self {
            reason,
            message: message.into(),
            field: None,
            index: None,
            agent_id: None,
            call_id: None,
            retry_after_ms: None,
        }
    }

    /// With the field that it concerns.
    #[must_use]
    pub fn field(mut self, field: impl Into<String>) -> Self {
        self.field = Some(field.into());
        self
    }

    /// With the offending index in the field.
    #[must_use]
    pub fn index(mut self, index: usize) -> Self {
        self.index = Some(index as u64);
        self
    }

    /// With the call that it concerns.
    #[must_use]
    pub fn call(mut self, call: &CallId) -> Self {
        self.call_id = Some(call.clone());
        self
    }

    /// With the agent that it concerns.
    #[must_use]
    pub fn agent(mut self, agent: &AgentId) -> Self {
        self.agent_id = Some(agent.clone());
        self
    }

    /// With a delay after which to try again.
    #[must_use]
    pub fn retry_after_ms(mut self, delay_ms: u64) -> Self {
        self.retry_after_ms = Some(delay_ms);
        self
    }
}

impl fmt::Display for Refusal {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{}: {}", self.reason.as_str(), self.message)
    }
}

impl std::error::Error for Refusal {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reasons_have_distinct_stable_texts() {
        let texts: std::collections::BTreeSet<_> = Reason::ALL.iter().map(|reason| reason.as_str()).collect();
        assert_eq!(texts.len(), Reason::ALL.len());
        assert!(texts.iter().all(|text| text.chars().all(|letter| letter.is_ascii_lowercase() || letter == '_')));
    }

    #[test]
    fn the_contract_lists_every_reason() {
        let contract = include_str!("../proto/hedgerow/v1/common.proto");
        let missing: Vec<_> = Reason::ALL.iter().map(|reason| reason.as_str()).collect();
        let missing: Vec<_> = missing.into_iter().filter(|text| !contract.contains(&format!("`{text}`"))).collect();
        assert!(missing.is_empty(), "Refusal.reason does not list {missing:?}");
    }
}
