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

#[cfg(test)]
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
    }
}
