//! Ids that leave memory, and what stays: the *skeleton* of a forest.
//!
//! A skeleton knows of every call all but its ids and log-probabilities: who made it, how long it is, what it names. So it can be
//! counted, listed and planned ([`super::plan`]). What must look at ids (judging and applying a call, links, drift, rows) is not to
//! be asked of it, and stops the process if it is: whoever holds a skeleton puts the forest in its place again first, made anew from
//! the same records in the same order. Every index is the same there.

use super::Forest;
use super::call::{CallTokens, Pending};
use super::index::EndIndex;
use super::size;
use super::tokens::{BlockId, TokenStore};

impl Forest {
    /// Whether it has the ids of its calls.
    #[must_use]
    pub fn has_tokens(&self) -> bool {
        !self.is_skeleton
    }

    /// Lets go of all ids and log-probabilities, and of what is known only to find them.
    pub fn evict(&mut self) {
        self.is_skeleton = true;
        self.tokens = TokenStore::default();
        self.ends = EndIndex::default();
        self.makers = Vec::new();
        for call in &mut self.calls {
            // That there were some is known still.
            call.logprobs = call.logprobs.take().map(|_| Box::default());
            match &mut call.tokens {
                CallTokens::Placed { block, tail } => (*block, *tail) = (BlockId::ROOT, Box::default()),
                CallTokens::Waiting(pending) | CallTokens::Unresolved(pending) => {
                    let Pending { delta, generation } = &mut **pending;
                    (delta.suffix, *generation) = (Vec::new(), Box::default());
                }
            }
        }
        self.array_bytes = self.calls.iter().map(size::of_skeleton).sum();
    }

    /// What must look at ids needs them.
    pub(super) fn needs_tokens(&self) {
        assert!(self.has_tokens(), "a skeleton is asked for what only ids can tell");
    }
}
