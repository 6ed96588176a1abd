//! Messages as they were sent: what is read of them before they are decoded, or if they cannot be.

use bytes::Buf as _;
use prost::Message as _;
use prost::encoding::{DecodeContext, WireType, decode_key, decode_varint, skip_field};

use crate::error::{Reason, Refusal};
use crate::ids::{AgentId, CallId};
use crate::limits;
use crate::proto::v1;

use super::lists::{COUNTERS, List, Shape};

/// The tags of fields of `ReportRequest`: its number, its rollout, and the events whose refusal names a call or an agent.
const REQUEST_SEQ: u32 = 1;
const ROLLOUT: u32 = 2;
const CALL: u32 = 4;
const AGENT_END: u32 = 6;
/// The tags of what they name.
const CALL_ID: u32 = 1;
const AGENT_OF_CALL: u32 = 2;
const AGENT_OF_END: u32 = 1;

/// What a request that is not decoded says of itself.
#[derive(Debug, Default)]
pub(in crate::rpc) struct Told {
    /// Its number.
    pub(in crate::rpc) request_seq: u64,
    /// Its rollout, as far as that can be told.
    pub(in crate::rpc) rollout: Option<v1::RolloutRef>,
    pub(super) call: Option<CallId>,
    pub(super) agent: Option<AgentId>,
}

/// The fields of a message, one after another, up to where it makes no sense any more.
struct Fields<'a> {
    rest: &'a [u8],
    is_broken: bool,
}

/// The value of a field, as far as it is of interest.
enum Value<'a> {
    Number(u64),
    /// A text or a message; none if it goes on beyond the end.
    Bytes(Option<&'a [u8]>),
    Other,
}

impl<'a> Fields<'a> {
    fn of(message: &'a [u8]) -> Self {
        Self { rest: message, is_broken: false }
    }

    fn read(&mut self) -> Option<(u32, Value<'a>)> {
        let (tag, wire_type) = decode_key(&mut self.rest).ok()?;
        let value = match wire_type {
            WireType::Varint => Value::Number(decode_varint(&mut self.rest).ok()?),
            WireType::LengthDelimited => {
                let length = usize::try_from(decode_varint(&mut self.rest).ok()?).ok()?;
                let bytes = self.rest.get(..length);
                if bytes.is_some() {
                    self.rest.advance(length);
                } else {
                    self.is_broken = true;
                }
                Value::Bytes(bytes)
            }
            WireType::SixtyFourBit | WireType::ThirtyTwoBit | WireType::StartGroup | WireType::EndGroup => {
                skip_field(wire_type, tag, &mut self.rest, DecodeContext::default()).ok()?;
                Value::Other
            }
        };
        Some((tag, value))
    }
}

impl<'a> Iterator for Fields<'a> {
    type Item = (u32, Value<'a>);

    fn next(&mut self) -> Option<Self::Item> {
        if self.is_broken || self.rest.is_empty() {
            return None;
        }
        let field = self.read();
        self.is_broken |= field.is_none();
        field
    }
}

/// What a request says of itself, though it is not decoded; none if its number cannot be told.
pub(super) fn told(message: &[u8]) -> Option<Told> {
    let mut fields = Fields::of(message);
    let (mut request_seq, mut told) = (None, Told::default());
    for (tag, value) in &mut fields {
        match (tag, value) {
            (REQUEST_SEQ, Value::Number(number)) => request_seq = Some(number),
            (ROLLOUT, Value::Bytes(Some(bytes))) => told.rollout = v1::RolloutRef::decode(bytes).ok(),
            (CALL, Value::Bytes(Some(bytes))) => {
                told.call = text(bytes, CALL_ID).and_then(|id| CallId::parse(id).ok());
                told.agent = text(bytes, AGENT_OF_CALL).and_then(|id| AgentId::parse(id).ok());
            }
            (AGENT_END, Value::Bytes(Some(bytes))) => {
                told.agent = text(bytes, AGENT_OF_END).and_then(|id| AgentId::parse(id).ok());
            }
            (_, Value::Number(_) | Value::Bytes(_) | Value::Other) => {}
        }
    }
    // Left out, it is 0.
    told.request_seq = request_seq.or((!fields.is_broken).then_some(0))?;
    Some(told)
}

/// The text in a field of a message.
fn text(message: &[u8], wanted: u32) -> Option<&str> {
    let mut texts = Fields::of(message).filter_map(|(tag, value)| match value {
        Value::Bytes(Some(bytes)) if tag == wanted => std::str::from_utf8(bytes).ok(),
        Value::Bytes(_) | Value::Number(_) | Value::Other => None,
    });
    texts.next()
}

/// Where in a message something stands.
struct Path<'a> {
    before: Option<&'a Path<'a>>,
    name: &'static str,
}

impl std::fmt::Display for Path<'_> {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Some(before) = self.before else { return formatter.write_str(self.name) };
        before.fmt(formatter)?;
        let dot = if before.name.is_empty() || self.name.is_empty() { "" } else { "." };
        write!(formatter, "{dot}{}", self.name)
    }
}

/// What has been counted of a message.
#[derive(Default)]
struct Counted {
    counts: [usize; COUNTERS],
    decoded_bytes: usize,
    /// What stands within the elements of a list has no bounds of its own; only what it takes has.
    is_batch: bool,
}

/// Whether a message has so many fields that to read them takes long at once. Looks at no more of them than that.
pub(super) fn is_long(shape: &Shape, message: &[u8]) -> bool {
    let mut fields_left = limits::LONG_MESSAGE_FIELDS;
    use_up(shape, message, &mut fields_left);
    fields_left == 0
}

fn use_up(shape: &Shape, message: &[u8], fields_left: &mut usize) {
    for (tag, value) in Fields::of(message) {
        *fields_left = fields_left.saturating_sub(1);
        if *fields_left == 0 {
            return;
        }
        let Some(field) = shape.0.iter().find(|field| field.tag == tag) else { continue };
        let Value::Bytes(Some(bytes)) = value else { continue };
        if field.list.as_ref().is_some_and(|list| list.is_packed) {
            *fields_left = fields_left.saturating_sub(bytes.len());
        } else if !field.inside.0.is_empty() {
            use_up(field.inside, bytes, fields_left);
        }
    }
}

/// Counts what one request lists; what that takes decoded, besides the bytes that were sent.
///
/// # Errors
/// If it is more than is taken.
pub(super) fn request(shape: &Shape, message: &[u8]) -> Result<usize, Refusal> {
    let mut counted = Counted::default();
    counted.walk(shape, message, &Path { before: None, name: "" })?;
    Ok(counted.decoded_bytes)
}

/// The same of a message that holds many requests. A list of one of them that is too long is refused when that is its turn, and
/// keeps none of the others from being taken; only all of them together must not be too much.
///
/// # Errors
/// If there are more requests than are taken, or they take too much together.
pub(super) fn batch(shape: &Shape, message: &[u8]) -> Result<usize, Refusal> {
    let mut counted = Counted { is_batch: true, ..Counted::default() };
    counted.walk(shape, message, &Path { before: None, name: "" })?;
    Ok(counted.decoded_bytes)
}

/// The same of a batch that is not long; one that is long is counted by whoever decodes it.
///
/// # Errors
/// As above.
pub(super) fn short_batch(shape: &Shape, message: &[u8]) -> Result<usize, Refusal> {
    if is_long(shape, message) { Ok(0) } else { batch(shape, message) }
}

impl Counted {
    fn walk(&mut self, shape: &Shape, message: &[u8], path: &Path<'_>) -> Result<(), Refusal> {
        for (tag, value) in Fields::of(message) {
            let Some(field) = shape.0.iter().find(|field| field.tag == tag) else { continue };
            let path = Path { before: Some(path), name: field.name };
            if let Some(list) = &field.list {
                self.count(list, &value, &path)?;
            }
            if let Value::Bytes(Some(bytes)) = value
                && !field.inside.0.is_empty()
            {
                self.walk(field.inside, bytes, &path)?;
            }
        }
        Ok(())
    }

    fn count(&mut self, list: &List, value: &Value<'_>, path: &Path<'_>) -> Result<(), Refusal> {
        let elements = match value {
            // The last byte of each varint has no mark that it goes on.
            Value::Bytes(Some(packed)) if list.is_packed => packed.iter().filter(|byte| **byte < 0x80).count(),
            Value::Bytes(_) | Value::Number(_) | Value::Other => 1,
        };
        self.decoded_bytes += elements * list.element_bytes;
        let within_one_of_many = self.is_batch && path.before.is_some_and(|before| before.before.is_some());
        let count = &mut self.counts[list.counter as usize];
        *count += elements;
        if *count > list.most && !within_one_of_many {
            let message = format!("{path} has more than {} {}", list.most, list.elements);
            return Err(Refusal::new(Reason::OverLimit, message).field(path.to_string()));
        }
        if self.is_batch && self.decoded_bytes > limits::BATCH_DECODED_BYTES_MAX {
            let message = "the requests of a batch list too much together; send them in parts";
            return Err(Refusal::new(Reason::OverLimit, message).field("requests"));
        }
        Ok(())
    }
}

#[cfg(test)]
#[path = "scan_tests.rs"]
mod tests;
