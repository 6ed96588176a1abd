//! Tokens that leave memory and come back: what a rollout is without them, and how it takes them again.
//!
//! Of a rollout without tokens everything is known but what its calls' ids say ([`crate::forest`], `evict`). It hears signs of life, is
//! looked at in a few figures, may end without rows; for all else its tokens come back first: the rollout is made again from its
//! records and gives them to the one that was left.

use std::sync::Arc;

use super::{FinalisedRollout, Rollout};

impl FinalisedRollout {
    /// Whether its tokens are in memory.
    #[must_use]
    pub fn has_tokens(&self) -> bool {
        self.facts.forest.has_tokens()
    }
}

impl Rollout {
    /// Whether its tokens are in memory.
    #[must_use]
    pub fn has_tokens(&self) -> bool {
        self.facts().forest.has_tokens()
    }

    /// Bytes of memory that its ids take, as far as they fill blocks.
    #[must_use]
    pub fn token_bytes(&self) -> u64 {
        self.facts().forest.token_bytes() as u64
    }

    /// Lets go of its tokens. False if somebody else holds the finalised rollout, to make rows of it.
    pub fn evict(&mut self) -> bool {
        let facts = match self {
            Self::Open(open) => &mut open.facts,
            Self::Finalised(finalised) => match Arc::get_mut(finalised) {
                Some(finalised) => &mut finalised.facts,
                None => return false,
            },
        };
        facts.forest.evict();
        true
    }

    /// Takes its tokens from `again`, which the same records have made. False, and nothing is changed, if they cannot have been
    /// the same.
    pub fn restore(&mut self, again: Self) -> bool {
        let (before, now) = (&self.facts().forest, &again.facts().forest);
        let same_calls = (before.call_count(), before.totals()) == (now.call_count(), now.totals());
        if !same_calls || before.agent_count() != now.agent_count() {
            return false;
        }
        match (self, again) {
            (Self::Open(open), Self::Open(again)) => open.facts.forest = again.facts.forest,
            (this @ Self::Finalised(_), again @ Self::Finalised(_)) => *this = again,
            (Self::Open(_), Self::Finalised(_)) | (Self::Finalised(_), Self::Open(_)) => return false,
        }
        true
    }
}
