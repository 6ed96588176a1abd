//! Identifiers as types, and the one check that every identifier from outside passes.
//!
//! An identifier is 1 to [`limits::IDENTIFIER_BYTES_MAX`] bytes of UTF-8 without control characters. Each kind has its
//! own type, so that a rollout's id cannot stand where a call's is meant. Clones share the text.

use std::fmt;
use std::sync::Arc;

use crate::limits;

/// Why a text is not an identifier.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IdentifierError {
    /// It has no characters.
    Empty,
    /// It is longer than [`limits::IDENTIFIER_BYTES_MAX`]; holds its length in bytes.
    TooLong(usize),
    /// It has a control character at this byte offset.
    ControlCharacter(usize),
}

impl fmt::Display for IdentifierError {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Empty => write!(formatter, "is empty"),
            Self::TooLong(bytes) => {
                write!(formatter, "has {bytes} bytes, more than {}", limits::IDENTIFIER_BYTES_MAX)
            }
            Self::ControlCharacter(offset) => write!(formatter, "has a control character at byte {offset}"),
        }
    }
}

/// Checks a text against the rules for identifiers.
///
/// # Errors
/// Says which rule it breaks.
pub fn check_identifier(text: &str) -> Result<(), IdentifierError> {
    if text.is_empty() {
        return Err(IdentifierError::Empty);
    }
    if text.len() > limits::IDENTIFIER_BYTES_MAX {
        return Err(IdentifierError::TooLong(text.len()));
    }
    match text.char_indices().find(|(_, character)| character.is_control()) {
        Some((offset, _)) => Err(IdentifierError::ControlCharacter(offset)),
        None => Ok(()),
    }
}

macro_rules! identifier {
    ($(#[$documentation:meta])* $name:ident) => {
        $(#[$documentation])*
        #[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub struct $name(Arc<str>);

        impl $name {
            /// The identifier that this text is.
            ///
            /// # Errors
            /// If the text breaks a rule for identifiers.
            pub fn parse(text: &str) -> Result<Self, IdentifierError> {
                check_identifier(text).map(|()| Self(Arc::from(text)))
            }

            /// Its text.
            #[must_use]
            pub fn as_str(&self) -> &str {
                &self.0
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                formatter.write_str(&self.0)
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                fmt::Debug::fmt(&self.0, formatter)
            }
        }

        impl std::borrow::Borrow<str> for $name {
            fn borrow(&self) -> &str {
                &self.0
            }
        }
    };
}

identifier! {
    /// One training run. Everything is inside a run.
    RunId
}
identifier! {
    /// The rollouts of one prompt.
    GroupId
}
identifier! {
    /// One episode; unique in its run, over all its attempts.
    RolloutId
}
identifier! {
    /// One actor in a rollout; unique in its rollout.
    AgentId
}
identifier! {
    /// One model call; unique in its rollout.
    CallId
}
identifier! {
    /// A short name from outside: a policy, a model, a kind of call, a finish reason, a tag's key.
    Name
}
identifier! {
    /// A consumer group of a run.
    ConsumerGroupId
}
identifier! {
    /// A member of a consumer group.
    ConsumerId
}

impl Name {
    /// A name that stands in the code.
    pub(crate) fn literal(text: &'static str) -> Self {
        debug_assert!(check_identifier(text).is_ok(), "{text:?} is no identifier");
        Self(Arc::from(text))
    }
}

/// One attempt at a rollout, with the group that the rollout is in.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct RolloutRef {
    /// Its run.
    pub run: RunId,
    /// Its group; none: the rollout stands alone.
    pub group: Option<GroupId>,
    /// The rollout.
    pub rollout: RolloutId,
    /// Which attempt at it, 0 for the first.
    pub attempt: u32,
}

/// The stable id of a row: `run/rollout/attempt/policy/leaf`, each part percent-encoded.
#[must_use]
pub fn row_id(run: &RunId, rollout: &RolloutId, attempt: u32, policy: &Name, leaf: &CallId) -> String {
    let mut id = rollout_unit_id(run, rollout, attempt, Some(policy));
    id.push('/');
    id.push_str(&percent_encoded(leaf.as_str()));
    id
}

/// The stable id of a unit of all rows of one attempt: `run/rollout/attempt`, and `/policy` if it holds those of one policy.
#[must_use]
pub fn rollout_unit_id(run: &RunId, rollout: &RolloutId, attempt: u32, policy: Option<&Name>) -> String {
    let mut id = format!("{}/{}/{attempt}", percent_encoded(run.as_str()), percent_encoded(rollout.as_str()));
    if let Some(policy) = policy {
        id.push('/');
        id.push_str(&percent_encoded(policy.as_str()));
    }
    id
}

/// The stable id of a unit of all rows of a group: `run//group`, and `/policy` if it holds those of one policy. No rollout's unit has
/// an empty second part.
#[must_use]
pub fn group_unit_id(run: &RunId, group: &GroupId, policy: Option<&Name>) -> String {
    let mut id = format!("{}//{}", percent_encoded(run.as_str()), percent_encoded(group.as_str()));
    if let Some(policy) = policy {
        id.push('/');
        id.push_str(&percent_encoded(policy.as_str()));
    }
    id
}

/// The stable id of a step of a consumer group that was made there: `run///group/made/step`. Its shards' ids add `/shard`. No other unit
/// has two empty parts, and a group that is made anew has other steps.
#[must_use]
pub fn step_id(run: &RunId, consumer_group: &ConsumerGroupId, made_at: u64, index: u64) -> String {
    let (run, consumer_group) = (percent_encoded(run.as_str()), percent_encoded(consumer_group.as_str()));
    format!("{run}///{consumer_group}/{made_at}/{index}")
}

/// The run and the consumer group that a step, or a shard of one, of this id is of, where the group was made, and which step it is; none if
/// it is no step's.
#[must_use]
pub fn unit_step(unit_id: &str) -> Option<(RunId, ConsumerGroupId, u64, u64)> {
    let (run, rest) = unit_id.split_once("///")?;
    let mut parts = rest.split('/');
    let consumer_group = ConsumerGroupId::parse(&percent_decoded(parts.next()?)?).ok()?;
    let (made_at, index) = (parts.next()?.parse().ok()?, parts.next()?.parse().ok()?);
    Some((RunId::parse(&percent_decoded(run)?).ok()?, consumer_group, made_at, index))
}

/// The run and the group that a unit of this id is of; none if it is no group's.
#[must_use]
pub fn unit_group(unit_id: &str) -> Option<(RunId, GroupId)> {
    let mut parts = unit_id.split('/');
    let run = RunId::parse(&percent_decoded(parts.next()?)?).ok()?;
    parts.next().filter(|part| part.is_empty())?;
    Some((run, GroupId::parse(&percent_decoded(parts.next()?)?).ok()?))
}

/// The run, rollout and attempt that a unit of this id is of; none if it is no rollout's.
#[must_use]
pub fn unit_source(unit_id: &str) -> Option<(RunId, RolloutId, u32)> {
    let mut parts = unit_id.split('/');
    let run = RunId::parse(&percent_decoded(parts.next()?)?).ok()?;
    let rollout = RolloutId::parse(&percent_decoded(parts.next()?)?).ok()?;
    Some((run, rollout, parts.next()?.parse().ok()?))
}

/// Percent-encodes a part of a row id: everything but letters, digits, `-`, `_`, `.` and `~`.
#[must_use]
pub fn percent_encoded(part: &str) -> String {
    let mut encoded = String::with_capacity(part.len());
    for byte in part.bytes() {
        if byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'.' | b'~') {
            encoded.push(char::from(byte));
        } else {
            encoded.push_str(&format!("%{byte:02X}"));
        }
    }
    encoded
}

/// The text of a percent-encoded part; none if it is not one.
#[must_use]
pub fn percent_decoded(part: &str) -> Option<String> {
    let mut bytes = Vec::with_capacity(part.len());
    let mut rest = part.bytes();
    while let Some(byte) = rest.next() {
        if byte != b'%' {
            bytes.push(byte);
            continue;
        }
        let digit = |byte: Option<u8>| char::from(byte?).to_digit(16);
        let (high, low) = (digit(rest.next())?, digit(rest.next())?);
        bytes.push(u8::try_from(high * 16 + low).ok()?);
    }
    String::from_utf8(bytes).ok()
}

#[cfg(test)]
#[expect(clippy::unwrap_used, reason = "a test fails by panicking")]
mod tests {
    use super::*;

    #[test]
    fn an_identifier_has_characters_a_bound_and_no_controls() {
        assert_eq!(check_identifier(""), Err(IdentifierError::Empty));
        assert_eq!(check_identifier("a\u{0}"), Err(IdentifierError::ControlCharacter(1)));
        assert_eq!(check_identifier("a\u{85}b"), Err(IdentifierError::ControlCharacter(1)));
        let long = "é".repeat(limits::IDENTIFIER_BYTES_MAX);
        assert_eq!(check_identifier(&long), Err(IdentifierError::TooLong(long.len())));
        assert_eq!(check_identifier("a/b %ü"), Ok(()));
    }

    #[test]
    fn parts_of_a_row_id_are_percent_encoded() {
        assert_eq!(percent_encoded("g0/1 é%"), "g0%2F1%20%C3%A9%25");
        assert_eq!(percent_decoded("g0%2F1%20%C3%A9%25").as_deref(), Some("g0/1 é%"));
        assert_eq!(percent_decoded("%2"), None);
        let (run, rollout) = (RunId::parse("r/1").unwrap(), RolloutId::parse("g0 1").unwrap());
        let (policy, leaf) = (Name::literal("main"), CallId::parse("c/1").unwrap());
        assert_eq!(row_id(&run, &rollout, 2, &policy, &leaf), "r%2F1/g0%201/2/main/c%2F1");
        assert_eq!(rollout_unit_id(&run, &rollout, 2, Some(&policy)), "r%2F1/g0%201/2/main");
        assert_eq!(rollout_unit_id(&run, &rollout, 2, None), "r%2F1/g0%201/2");
        let group = GroupId::parse("g/0").unwrap();
        assert_eq!(group_unit_id(&run, &group, None), "r%2F1//g%2F0");
        assert_eq!(group_unit_id(&run, &group, Some(&policy)), "r%2F1//g%2F0/main");
        for id in ["r%2F1//g%2F0", "r%2F1//g%2F0/main"] {
            assert_eq!((unit_group(id), unit_source(id)), (Some((run.clone(), group.clone())), None));
        }
        assert_eq!(unit_group("r%2F1/g0%201/2"), None);
        let trainers = ConsumerGroupId::parse("t/1").unwrap();
        let step = step_id(&run, &trainers, 7, 12);
        assert_eq!(step, "r%2F1///t%2F1/7/12");
        for id in [step.clone(), format!("{step}/3")] {
            assert_eq!(unit_step(&id), Some((run.clone(), trainers.clone(), 7, 12)));
            assert_eq!((unit_group(&id), unit_source(&id)), (None, None));
        }
        assert_eq!((unit_step("r%2F1//g%2F0"), unit_step("r///t/x/1"), unit_step("r///t/1")), (None, None, None));
        for id in ["r%2F1/g0%201/2", "r%2F1/g0%201/2/main/c%2F1"] {
            assert_eq!(unit_source(id), Some((run.clone(), rollout.clone(), 2)));
        }
        for id in ["r%2F1/g0%201", "r/g/x", "//2", "r/%2/2"] {
            assert_eq!(unit_source(id), None);
        }
    }
}
