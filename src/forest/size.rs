//! How much memory a forest takes, kept as it grows: asking costs nothing, however many calls there are.
//!
//! An estimate from above. What a call takes whatever it holds is a constant; arrays and ids are counted.

use crate::ids::{AgentId, CallId, Name};

use super::Forest;
use super::accept::CallRecord;
use super::call::{Call, CallFacts, CallTokens, Link, Pending, RecordedPrompt, VersionSpan};
use super::digest::BLOCK_TOKENS;
use super::tokens::TokenStore;

/// An id besides its text: the counts before it, and what the allocator rounds up.
pub(crate) const ID_BYTES: usize = 24;
/// A call without its arrays: itself with room for the next ones, its places in the tables (by id, by end, of its agent, of who
/// made blocks), in the links and in a plan; and once in a kept list, with an id of its own there.
pub(crate) const CALL_BYTES: usize = size_of::<Call>() * 3 / 2 + 2 * ID_BYTES + 136 + 64;
/// An agent, or a name, without its text.
pub(crate) const AGENT_BYTES: usize = 128 + ID_BYTES;

/// Bytes of what a call holds by itself besides its ids' storage.
pub(super) fn of_facts(facts: &CallFacts) -> usize {
    2 * facts.call_id.as_str().len()
        + of_link(&facts.link)
        + facts.versions.len() * size_of::<VersionSpan>()
        + facts.logprobs.as_ref().map_or(0, |values| values.len() * size_of::<f32>())
}

/// Bytes of what a call holds by itself that has lost its ids.
pub(super) fn of_skeleton(call: &Call) -> usize {
    let pending = match &call.tokens {
        CallTokens::Placed { .. } => 0,
        CallTokens::Waiting(pending) | CallTokens::Unresolved(pending) => of_pending(pending),
    };
    2 * call.id.as_str().len() + of_link(&call.link) + size_of_val(&*call.versions) + pending
}

fn of_link(link: &Link) -> usize {
    match link {
        Link::Parent(parent) => ID_BYTES + parent.as_str().len(),
        Link::Infer | Link::Root => 0,
    }
}

/// Bytes of a delta whose base is missing, and its place among those that wait.
pub(super) fn of_pending(pending: &Pending) -> usize {
    let ids = pending.delta.suffix.len() + pending.generation.len();
    size_of::<Pending>() + ids * size_of::<u32>() + 2 * (ID_BYTES + pending.delta.base.as_str().len()) + 64
}

impl Forest {
    /// Bytes of memory that ids take which fill blocks.
    #[must_use]
    pub fn token_bytes(&self) -> usize {
        (self.tokens.block_count() - 1) * TokenStore::BLOCK_BYTES
    }

    /// Bytes of memory that it takes.
    #[must_use]
    pub fn resident_bytes(&self) -> usize {
        self.token_bytes()
            + self.calls.len() * CALL_BYTES
            + self.array_bytes
            + (self.agents.list.len() + self.names.list.len()) * AGENT_BYTES
            + self.agents.id_bytes
            + self.names.text_bytes
    }
}

impl CallRecord {
    /// Bytes that applying it takes at most.
    #[must_use]
    pub fn resident_bytes(&self) -> usize {
        let ids_bytes = |ids: usize| ids.div_ceil(BLOCK_TOKENS) * TokenStore::BLOCK_BYTES;
        let prompt_ids = |prompt: &RecordedPrompt| match prompt {
            RecordedPrompt::Known { suffix, .. } => suffix.len(),
            RecordedPrompt::Waiting(delta) => delta.suffix.len(),
        };
        match self {
            Self::New(new) => {
                let (facts, prompt) = &**new;
                let agents = [Some(&facts.agent_id), facts.parent_agent_id.as_ref()];
                let agents = agents.into_iter().flatten().map(AgentId::as_str);
                let names =
                    [Some(&facts.kind), Some(&facts.policy), facts.model.as_ref(), facts.finish_reason.as_ref()];
                let names = names.into_iter().flatten().map(Name::as_str);
                let texts: usize = agents.chain(names).map(|text| AGENT_BYTES + text.len()).sum();
                let base = match prompt {
                    RecordedPrompt::Known { .. } => 0,
                    RecordedPrompt::Waiting(delta) => size_of::<Pending>() + 2 * id_bytes(&delta.base) + 64,
                };
                CALL_BYTES + of_facts(facts) + ids_bytes(prompt_ids(prompt) + facts.generation.len()) + texts + base
            }
            Self::Prompt(_, prompt) => ids_bytes(prompt_ids(prompt)),
        }
    }
}

fn id_bytes(id: &CallId) -> usize {
    ID_BYTES + id.as_str().len()
}
