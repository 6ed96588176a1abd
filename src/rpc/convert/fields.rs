//! The checks of single fields, each of which refuses with the field's path; and times, which are milliseconds within.
//!
//! Paths are given as [`Display`], so that those with an index or a key cost nothing where all is well.

use std::fmt::Display;

use bytes::Bytes;
use prost_types::{Duration, Timestamp};

use crate::error::{Reason, Refusal};
use crate::ids::IdentifierError;
use crate::limits;

/// Nothing after the year 9999 is a time (as for `google.protobuf.Timestamp`).
const TIMESTAMP_SECONDS_MAX: u64 = 253_402_300_799;
/// Characters shown of a text from outside that stands in a path.
const KEY_CHARACTERS_SHOWN: usize = 64;

/// The identifier that this text is.
///
/// # Errors
/// If it breaks a rule for identifiers.
pub fn identifier<T>(
    text: &str,
    field: impl Display,
    parse: impl Fn(&str) -> Result<T, IdentifierError>,
) -> Result<T, Refusal> {
    parse(text).map_err(|error| {
        let field = field.to_string();
        Refusal::new(Reason::InvalidIdentifier, format!("{field} {error}")).field(field)
    })
}

/// The identifier that this text is, or none if it is empty.
///
/// # Errors
/// If it breaks another rule for identifiers.
pub fn optional_identifier<T>(
    text: &str,
    field: impl Display,
    parse: impl Fn(&str) -> Result<T, IdentifierError>,
) -> Result<Option<T>, Refusal> {
    if text.is_empty() { Ok(None) } else { identifier(text, field, parse).map(Some) }
}

/// Refuses more than `most` of something.
///
/// # Errors
/// If there are more.
pub fn at_most(count: usize, most: usize, what: &str, field: impl Display) -> Result<(), Refusal> {
    if count <= most {
        return Ok(());
    }
    let field = field.to_string();
    Err(Refusal::new(Reason::OverLimit, format!("{field} has {count} {what}, more than {most}")).field(field))
}

/// That a field which must be there is not.
#[must_use]
pub fn missing(field: &str) -> Refusal {
    Refusal::new(Reason::MissingField, format!("{field} must be there")).field(field)
}

/// That a field has a value that it cannot have.
#[must_use]
pub fn invalid(field: impl Display, why: impl Display) -> Refusal {
    let field = field.to_string();
    Refusal::new(Reason::InvalidValue, format!("{field} {why}")).field(field)
}

/// That this release does not have what a field asks for.
#[must_use]
pub fn not_in_this_release(field: impl Display, what: impl Display) -> Refusal {
    let field = field.to_string();
    Refusal::new(Reason::NotInThisRelease, format!("{what}: this release does not have that yet; leave {field} out"))
        .field(field)
}

/// The value of an enum's number.
///
/// # Errors
/// If the number is none of the enum's.
pub fn known<T: TryFrom<i32>>(number: i32, field: impl Display) -> Result<T, Refusal> {
    T::try_from(number).map_err(|_| invalid(field, format_args!("is {number}, which this release does not know")))
}

/// A text from outside as it stands in a path: quoted, and cut where it is long.
#[must_use]
pub fn shown(key: &str) -> String {
    match key.char_indices().nth(KEY_CHARACTERS_SHOWN) {
        None => format!("{key:?}"),
        Some((end, _)) => format!("{:?}…", &key[..end]),
    }
}

/// How many ids or log-probabilities these bytes are.
///
/// # Errors
/// If they are not whole ones.
pub fn element_count(bytes: &Bytes, field: &str) -> Result<usize, Refusal> {
    if bytes.len().is_multiple_of(4) {
        return Ok(bytes.len() / 4);
    }
    let message = format!("{field} has {} bytes; each element takes 4", bytes.len());
    Err(Refusal::new(Reason::InvalidArrayLength, message).field(field).index(bytes.len() / 4))
}

/// The ids in these bytes, in one copy. Bytes beyond the last whole id are not looked at.
#[must_use]
pub fn ids(bytes: &[u8]) -> Vec<u32> {
    match bytemuck::try_cast_slice(bytes) {
        Ok(aligned) => aligned.to_vec(),
        Err(_) => bytes.as_chunks().0.iter().map(|id| u32::from_le_bytes(*id)).collect(),
    }
}

/// The log-probabilities in these bytes, in one copy. Bytes beyond the last whole one are not looked at.
#[must_use]
pub fn logprobs(bytes: &[u8]) -> Vec<f32> {
    match bytemuck::try_cast_slice(bytes) {
        Ok(aligned) => aligned.to_vec(),
        Err(_) => bytes.as_chunks().0.iter().map(|value| f32::from_le_bytes(*value)).collect(),
    }
}

/// A time in milliseconds since the Unix epoch; what is finer is cut off.
///
/// # Errors
/// If it is before the epoch, after the year 9999, or has no right nanoseconds.
pub fn unix_ms(time: Option<&Timestamp>, field: &str) -> Result<Option<u64>, Refusal> {
    let Some(time) = time else { return Ok(None) };
    let parts = (u64::try_from(time.seconds), u64::try_from(time.nanos));
    match parts {
        (Ok(seconds), Ok(nanos)) if seconds <= TIMESTAMP_SECONDS_MAX && nanos < 1_000_000_000 => {
            Ok(Some(seconds * 1000 + nanos / 1_000_000))
        }
        (Ok(_) | Err(_), _) => {
            let why = format_args!("is {} s and {} ns, no time from 1970 to 9999", time.seconds, time.nanos);
            Err(invalid(field, why))
        }
    }
}

/// The time at these milliseconds since the Unix epoch.
#[must_use]
pub fn timestamp(unix_ms: u64) -> Timestamp {
    let seconds = (unix_ms / 1000).min(TIMESTAMP_SECONDS_MAX);
    Timestamp { seconds: seconds.cast_signed(), nanos: (unix_ms % 1000).try_into().unwrap_or(0) * 1_000_000 }
}

/// A length of time in milliseconds, rounded up.
///
/// # Errors
/// If it is negative, longer than [`limits::DURATION_MS_MAX`], or has no right nanoseconds.
pub fn duration_ms(duration: Option<&Duration>, field: impl Display) -> Result<Option<u64>, Refusal> {
    let Some(duration) = duration else { return Ok(None) };
    let parts = (u64::try_from(duration.seconds), u64::try_from(duration.nanos));
    let length = match parts {
        (Ok(seconds), Ok(nanos)) if nanos < 1_000_000_000 => {
            Some(seconds.saturating_mul(1000).saturating_add(nanos.div_ceil(1_000_000)))
        }
        (Ok(_) | Err(_), _) => None,
    };
    match length.filter(|length| *length <= limits::DURATION_MS_MAX) {
        Some(length) => Ok(Some(length)),
        None => {
            let (seconds, nanos) = (duration.seconds, duration.nanos);
            Err(invalid(field, format_args!("is {seconds} s and {nanos} ns, no length of time from 0 to 10 years")))
        }
    }
}

/// The length of time of these milliseconds.
#[must_use]
pub fn duration(ms: u64) -> Duration {
    Duration { seconds: (ms / 1000).cast_signed(), nanos: (ms % 1000).try_into().unwrap_or(0) * 1_000_000 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_and_logprobs_come_out_at_any_alignment() {
        let wanted: Vec<u32> = vec![0, 1, 0x0403_0201, u32::MAX];
        for offset in 0..4 {
            let mut bytes = vec![0; offset];
            wanted.iter().for_each(|id| bytes.extend(id.to_le_bytes()));
            assert_eq!(ids(&bytes[offset..]), wanted);
            let mut bytes = vec![0; offset];
            [-0.5_f32, 0.25].iter().for_each(|value| bytes.extend(value.to_le_bytes()));
            assert_eq!(logprobs(&bytes[offset..]), [-0.5, 0.25]);
        }
        assert_eq!(ids(&[]), Vec::<u32>::new());
    }

    #[test]
    fn times_are_milliseconds_within() {
        let time = |seconds, nanos| unix_ms(Some(&Timestamp { seconds, nanos }), "t");
        assert_eq!(time(2, 3_999_999), Ok(Some(2003)));
        assert_eq!(unix_ms(Some(&timestamp(2003)), "t"), Ok(Some(2003)));
        for (seconds, nanos) in [(-1, 0), (0, -1), (0, 1_000_000_000), (253_402_300_800, 0)] {
            let refusal = time(seconds, nanos).err().map(|refusal| (refusal.reason, refusal.field));
            assert_eq!(refusal, Some((Reason::InvalidValue, Some("t".to_owned()))));
        }
        let length = |seconds, nanos| duration_ms(Some(&Duration { seconds, nanos }), "d");
        assert_eq!(length(0, 0), Ok(Some(0)));
        assert_eq!(length(1, 1), Ok(Some(1001)), "no timeout is shorter than it was asked for");
        assert_eq!(duration_ms(Some(&duration(1001)), "d"), Ok(Some(1001)));
        for (seconds, nanos) in [(-1, 0), (0, -1), (i64::MAX, 0), (10 * 365 * 86_400, 1)] {
            assert_eq!(length(seconds, nanos).err().map(|refusal| refusal.reason), Some(Reason::InvalidValue));
        }
    }

    #[test]
    fn long_keys_are_cut_in_paths() {
        assert_eq!(shown("a\nb"), "\"a\\nb\"");
        assert_eq!(shown(&"é".repeat(1000)).chars().count(), 64 + 3);
    }
}
