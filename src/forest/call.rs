//! A model call: as it is reported, as it is recorded, as the forest holds it.

use crate::ids::{AgentId, CallId, Name};

use super::digest::Digest;
use super::tokens::BlockId;

/// A call's place in the order of arrival within its rollout.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct CallIndex(pub(crate) u32);

/// An agent's place in the order in which the rollout heard of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct AgentIndex(pub(crate) u32);

/// A small name's place in the rollout's table of names.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct NameIndex(pub(crate) u32);

impl CallIndex {
    /// Its place, from 0.
    #[must_use]
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

impl AgentIndex {
    /// Its place, from 0.
    #[must_use]
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

/// What the harness says of a call's parent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Link {
    /// Nothing: the longest call that fits.
    Infer,
    /// It has none.
    Root,
    /// This call.
    Parent(CallId),
}

/// The weights that sampled some of a call's generated tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VersionSpan {
    /// First generated token, from 0.
    pub start: u32,
    /// One past the last generated token.
    pub end: u32,
    /// Version of the policy's weights.
    pub version: u64,
}

/// All that a call says besides its prompt.
#[derive(Clone, Debug, PartialEq)]
pub struct CallFacts {
    /// Unique in the rollout.
    pub call_id: CallId,
    /// The agent that called.
    pub agent_id: AgentId,
    /// That agent's parent, if said.
    pub parent_agent_id: Option<AgentId>,
    /// The harness's number for it; with the id it orders the calls of a rollout.
    pub sequence: u64,
    /// What the harness says of its parent.
    pub link: Link,
    /// Turn, summary, probe, …
    pub kind: Name,
    /// Which model sampled it.
    pub policy: Name,
    /// At which weights, by spans of generated tokens in order.
    pub versions: Vec<VersionSpan>,
    /// The model's own name, if said.
    pub model: Option<Name>,
    /// The sampled ids.
    pub generation: Vec<u32>,
    /// One for each sampled id; NaN marks a token that the run turns into context.
    pub logprobs: Option<Vec<f32>>,
    /// Whether it may be trained.
    pub train: bool,
    /// Why the generation ended, if said.
    pub finish_reason: Option<Name>,
    /// When it started and ended, milliseconds since the Unix epoch, if said; for people only.
    pub times_unix_ms: (Option<u64>, Option<u64>),
}

impl CallFacts {
    /// Sampled ids whose log-probability is marked as missing.
    pub(crate) fn masked_tokens(&self) -> u32 {
        let masked = self.logprobs.iter().flatten().filter(|value| value.is_nan()).count();
        u32::try_from(masked).unwrap_or(u32::MAX)
    }
}

/// A prompt that is sent as what follows an earlier text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Delta {
    /// The call whose prompt + generation it begins with.
    pub base: CallId,
    /// How many ids of that.
    pub base_length: u32,
    /// The digest of those ids, as the engine got them.
    pub digest: Digest,
    /// The ids that follow.
    pub suffix: Vec<u32>,
}

impl Delta {
    /// The prompt's length in tokens.
    #[must_use]
    pub fn prompt_length(&self) -> usize {
        self.base_length as usize + self.suffix.len()
    }
}

/// A call's prompt, as it is reported.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Prompt {
    /// All its ids.
    Full(Vec<u32>),
    /// Ids that follow a prefix of an earlier call.
    Delta(Delta),
}

impl Prompt {
    /// Its length in tokens.
    #[must_use]
    pub fn length(&self) -> usize {
        match self {
            Self::Full(ids) => ids.len(),
            Self::Delta(delta) => delta.prompt_length(),
        }
    }
}

/// A call as it is reported.
#[derive(Clone, Debug, PartialEq)]
pub struct NewCall {
    /// All but the prompt.
    pub facts: CallFacts,
    /// The prompt.
    pub prompt: Prompt,
}

/// A call's prompt, as it is recorded: no id that the rollout has seen before, up to a block's remainder.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RecordedPrompt {
    /// The first ids of a call that stands in the rollout, and what follows.
    Known {
        /// That call and how many of its ids; none if the prompt begins with nothing known.
        base: Option<(CallId, u32)>,
        /// The ids that follow.
        suffix: Vec<u32>,
    },
    /// It waits for its base.
    Waiting(Delta),
}

/// A delta whose base has not come, or turned out to be another; with what the call generated.
#[derive(Clone, Debug)]
pub(crate) struct Pending {
    pub(crate) delta: Delta,
    pub(crate) generation: Box<[u32]>,
}

/// Where a call's ids are.
#[derive(Clone, Debug)]
pub(crate) enum CallTokens {
    /// Prompt + generation in the store: whole blocks down to this one, then the tail.
    Placed { block: BlockId, tail: Box<[u32]> },
    /// A delta whose base has not come.
    Waiting(Box<Pending>),
    /// A delta whose base turned out to be another; the call must come in full.
    Unresolved(Box<Pending>),
}

/// A call as the forest holds it.
#[derive(Clone, Debug)]
pub struct Call {
    pub(crate) id: CallId,
    pub(crate) agent: AgentIndex,
    pub(crate) sequence: u64,
    pub(crate) link: Link,
    pub(crate) kind: NameIndex,
    pub(crate) policy: NameIndex,
    pub(crate) model: Option<NameIndex>,
    pub(crate) finish_reason: Option<NameIndex>,
    pub(crate) versions: Box<[VersionSpan]>,
    pub(crate) logprobs: Option<Box<[f32]>>,
    /// Generated tokens whose log-probability is marked as missing.
    pub(crate) masked_tokens: u32,
    pub(crate) train: bool,
    pub(crate) prompt_length: u32,
    pub(crate) generation_length: u32,
    pub(crate) times_unix_ms: (Option<u64>, Option<u64>),
    pub(crate) tokens: CallTokens,
}

/// Whether a call's ids are known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TokensState {
    /// They are.
    Placed,
    /// Its delta waits for the base.
    WaitingForBase,
    /// Its delta's base turned out to be another; it must come in full.
    Unresolved,
}

impl Call {
    /// Its id.
    #[must_use]
    pub fn id(&self) -> &CallId {
        &self.id
    }

    /// Its agent.
    #[must_use]
    pub fn agent(&self) -> AgentIndex {
        self.agent
    }

    /// What the order of calls rests on.
    #[must_use]
    pub fn order(&self) -> (u64, &CallId) {
        (self.sequence, &self.id)
    }

    /// What the harness says of its parent.
    #[must_use]
    pub fn link(&self) -> &Link {
        &self.link
    }

    /// Whether the harness lets it train.
    #[must_use]
    pub fn may_train(&self) -> bool {
        self.train
    }

    /// The weights it was sampled at.
    #[must_use]
    pub fn versions(&self) -> &[VersionSpan] {
        &self.versions
    }

    /// Whether its log-probabilities are known.
    #[must_use]
    pub fn has_logprobs(&self) -> bool {
        self.logprobs.is_some()
    }

    /// Length of its prompt in tokens.
    #[must_use]
    pub fn prompt_length(&self) -> usize {
        self.prompt_length as usize
    }

    /// Generated tokens.
    #[must_use]
    pub fn generation_length(&self) -> usize {
        self.generation_length as usize
    }

    /// Length of prompt + generation in tokens.
    #[must_use]
    pub fn full_length(&self) -> usize {
        self.prompt_length() + self.generation_length()
    }

    /// Whether it generated nothing: nobody's parent, no leaf.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.generation_length == 0
    }

    /// Whether its ids are known.
    #[must_use]
    pub fn tokens_state(&self) -> TokensState {
        match self.tokens {
            CallTokens::Placed { .. } => TokensState::Placed,
            CallTokens::Waiting(_) => TokensState::WaitingForBase,
            CallTokens::Unresolved(_) => TokensState::Unresolved,
        }
    }

    /// Whether its ids are known.
    #[must_use]
    pub fn is_placed(&self) -> bool {
        matches!(self.tokens, CallTokens::Placed { .. })
    }

    /// The call whose text its delta begins with, while that is not resolved.
    #[must_use]
    pub fn pending_base(&self) -> Option<&CallId> {
        match &self.tokens {
            CallTokens::Placed { .. } => None,
            CallTokens::Waiting(pending) | CallTokens::Unresolved(pending) => Some(&pending.delta.base),
        }
    }

    /// Its delta, while that is not resolved.
    #[must_use]
    pub fn pending_delta(&self) -> Option<&Delta> {
        match &self.tokens {
            CallTokens::Placed { .. } => None,
            CallTokens::Waiting(pending) | CallTokens::Unresolved(pending) => Some(&pending.delta),
        }
    }

    /// When it started and ended, milliseconds since the Unix epoch, if the harness said so.
    #[must_use]
    pub fn times_unix_ms(&self) -> (Option<u64>, Option<u64>) {
        self.times_unix_ms
    }
}
