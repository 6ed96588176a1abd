//! What a consumer group had acknowledged at a moment, as a token of a few bytes that trainers keep.
//!
//! A token names the group, by the run's and its own beginning, and a position in the log. It is for this service only, whose log
//! says what was acknowledged there; its layout is nobody else's.

use xxhash_rust::xxh3::Xxh3Default;

use crate::ids::{ConsumerGroupId, RunId};
use crate::log::Position;

/// What a token says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Checkpoint {
    /// When the run was made, milliseconds since the Unix epoch: another run of the name is another one.
    pub run_created_unix_ms: u64,
    /// Where the consumer group was made.
    pub made_at: Position,
    /// What was acknowledged there.
    pub at: Position,
}

/// Why a token is of no use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BadToken {
    /// It is no token, or was changed.
    NoToken,
    /// It is one of another run or consumer group.
    OfAnother,
}

const VERSION: u8 = 1;
const LENGTH: usize = 1 + 8 * 5;

impl Checkpoint {
    /// The token.
    #[must_use]
    pub fn to_token(self, run: &RunId, consumer_group: &ConsumerGroupId) -> Vec<u8> {
        let mut token = Vec::with_capacity(LENGTH);
        token.push(VERSION);
        for number in [name_digest(run, consumer_group), self.run_created_unix_ms, self.made_at.0, self.at.0] {
            token.extend(number.to_le_bytes());
        }
        token.extend(xxhash_rust::xxh3::xxh3_64(&token).to_le_bytes());
        token
    }

    /// What a token of this consumer group says.
    ///
    /// # Errors
    /// If it is none.
    pub fn of_token(token: &[u8], run: &RunId, consumer_group: &ConsumerGroupId) -> Result<Self, BadToken> {
        let (said, digest) = token.split_at_checked(LENGTH - 8).ok_or(BadToken::NoToken)?;
        let is_whole = said[0] == VERSION && digest == xxhash_rust::xxh3::xxh3_64(said).to_le_bytes();
        if !is_whole {
            return Err(BadToken::NoToken);
        }
        let numbers: Vec<u64> =
            said[1..].chunks_exact(8).filter_map(|bytes| Some(u64::from_le_bytes(bytes.try_into().ok()?))).collect();
        match numbers[..] {
            [names, run_created_unix_ms, made_at, at] if names == name_digest(run, consumer_group) => {
                Ok(Self { run_created_unix_ms, made_at: Position(made_at), at: Position(at) })
            }
            [..] => Err(BadToken::OfAnother),
        }
    }
}

fn name_digest(run: &RunId, consumer_group: &ConsumerGroupId) -> u64 {
    let mut digest = Xxh3Default::new();
    digest.update(run.as_str().as_bytes());
    // Stands in no identifier.
    digest.update(&[0]);
    digest.update(consumer_group.as_str().as_bytes());
    digest.digest()
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

    use super::*;

    #[test]
    fn a_token_is_taken_whole_and_for_its_own_group_only() {
        let run = |text| RunId::parse(text).unwrap();
        let group = |text| ConsumerGroupId::parse(text).unwrap();
        let checkpoint =
            Checkpoint { run_created_unix_ms: 1_790_000_000_000, made_at: Position(3), at: Position(4711) };
        let token = checkpoint.to_token(&run("r"), &group("train"));
        assert_eq!(Checkpoint::of_token(&token, &run("r"), &group("train")), Ok(checkpoint));
        assert_eq!(Checkpoint::of_token(&token, &run("r"), &group("other")), Err(BadToken::OfAnother));
        assert_eq!(Checkpoint::of_token(&token, &run("rt"), &group("rain")), Err(BadToken::OfAnother));
        for at in 0..token.len() {
            let mut changed = token.clone();
            changed[at] ^= 1;
            assert_eq!(Checkpoint::of_token(&changed, &run("r"), &group("train")), Err(BadToken::NoToken), "byte {at}");
            assert_eq!(Checkpoint::of_token(&token[..at], &run("r"), &group("train")), Err(BadToken::NoToken));
        }
        assert_eq!(
            Checkpoint::of_token(&[&token[..], &[0]].concat(), &run("r"), &group("train")),
            Err(BadToken::NoToken)
        );
    }
}
