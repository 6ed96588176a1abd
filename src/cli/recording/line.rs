//! One line of a recording, as it stands there: which keys it has and of which types. What the keys mean to each other
//! is the builder's.

use std::collections::BTreeMap;
use std::fmt;
use std::marker::PhantomData;

use bytes::Bytes;
use serde::Deserialize;
use serde::de::{Deserializer, Error as _, IgnoredAny, MapAccess, SeqAccess, Visitor};

use super::RecordedLink;

/// The keys of a line. The outer `None` is a key that is not there, or null.
#[derive(Debug, Default)]
pub(super) struct Line {
    pub(super) rollout: Option<String>,
    pub(super) group: Option<String>,
    pub(super) agent: Option<String>,
    pub(super) parent_agent: Option<String>,
    pub(super) call: Option<String>,
    pub(super) sequence: Option<u64>,
    pub(super) prompt: Option<Ids>,
    pub(super) prefix_of: Option<String>,
    pub(super) prefix_length: Option<u64>,
    pub(super) suffix: Option<Ids>,
    pub(super) generation: Option<Ids>,
    pub(super) has_logprobs_key: bool,
    pub(super) logprobs: Option<Logprobs>,
    pub(super) model: Option<String>,
    pub(super) policy: Option<String>,
    pub(super) policy_version: Option<u64>,
    pub(super) kind: Option<String>,
    pub(super) link: Option<LinkValue>,
    pub(super) train: Option<bool>,
    pub(super) finish_reason: Option<String>,
    pub(super) has_reward_key: bool,
    pub(super) reward: Option<f64>,
    pub(super) has_kept_key: bool,
    pub(super) kept: Option<Kept>,
    pub(super) unknown_keys: Vec<String>,
}

/// What `kept` says.
#[derive(Debug, Deserialize)]
#[serde(untagged, expecting = "expected true or false on a call's line, or lists of calls by agent on a reward's")]
pub(super) enum Kept {
    /// On a call's line.
    Call(bool),
    /// On a reward's line.
    Lists(BTreeMap<String, Vec<String>>),
}

/// What `link` says.
#[derive(Debug, Deserialize)]
#[serde(untagged, expecting = "expected \"infer\", \"root\" or {\"parent\": CALL}")]
pub(super) enum LinkValue {
    /// A word.
    Word(LinkWord),
    /// A named parent.
    Named(NamedLink),
}

/// A named parent.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct NamedLink {
    parent: String,
}

/// The words that `link` may be.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum LinkWord {
    /// It is to be inferred.
    Infer,
    /// No parent.
    Root,
}

impl From<LinkValue> for RecordedLink {
    fn from(value: LinkValue) -> Self {
        match value {
            LinkValue::Word(LinkWord::Infer) => Self::Infer,
            LinkValue::Word(LinkWord::Root) => Self::Root,
            LinkValue::Named(NamedLink { parent }) => Self::Parent(parent),
        }
    }
}

/// Token ids, little-endian.
#[derive(Debug, Default)]
pub(super) struct Ids(pub(super) Bytes);

/// Log-probabilities, little-endian; all finite.
#[derive(Debug)]
pub(super) struct Logprobs(pub(super) Bytes);

/// The line that these bytes are.
pub(super) fn parse(bytes: &[u8]) -> Result<Line, String> {
    serde_json::from_slice(bytes).map_err(|error| {
        let what = if error.is_data() { "" } else { "is no JSON: " };
        format!("{what}{} (column {})", without_places(&error.to_string()), error.column())
    })
}

/// The parser's messages without its own line numbers, which count from each line anew.
fn without_places(message: &str) -> String {
    let mut parts = message.split(" at line ");
    let mut kept = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        let rest = part.trim_start_matches(|character: char| character.is_ascii_digit());
        let rest = rest.strip_prefix(" column ").unwrap_or(rest);
        kept.push_str(rest.trim_start_matches(|character: char| character.is_ascii_digit()));
    }
    kept
}

impl<'de> Deserialize<'de> for Line {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(LineVisitor)
    }
}

struct LineVisitor;

impl<'de> Visitor<'de> for LineVisitor {
    type Value = Line;

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("a JSON object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Line, A::Error> {
        let mut line = Line::default();
        while let Some(key) = map.next_key::<String>()? {
            take_key(&mut line, &key, &mut map).map_err(|error| A::Error::custom(format!("{key}: {error}")))?;
        }
        Ok(line)
    }
}

fn take_key<'de, A: MapAccess<'de>>(line: &mut Line, key: &str, map: &mut A) -> Result<(), A::Error> {
    match key {
        "rollout" => line.rollout = map.next_value()?,
        "group" => line.group = map.next_value()?,
        "agent" => line.agent = map.next_value()?,
        "parent_agent" => line.parent_agent = map.next_value()?,
        "call" => line.call = map.next_value()?,
        "seq" => line.sequence = map.next_value()?,
        "prompt_token_ids" => line.prompt = map.next_value()?,
        "prefix_of" => line.prefix_of = map.next_value()?,
        "prefix_len" => line.prefix_length = map.next_value()?,
        "prompt_suffix_token_ids" => line.suffix = map.next_value()?,
        "generation_token_ids" => line.generation = map.next_value()?,
        "generation_log_probs" => {
            line.has_logprobs_key = true;
            line.logprobs = map.next_value()?;
        }
        "model" => line.model = map.next_value()?,
        "policy" => line.policy = map.next_value()?,
        "policy_version" => line.policy_version = map.next_value()?,
        "kind" => line.kind = map.next_value()?,
        "link" => line.link = map.next_value()?,
        "train" => line.train = map.next_value()?,
        "finish_reason" => line.finish_reason = map.next_value()?,
        "reward" => {
            line.has_reward_key = true;
            line.reward = map.next_value()?;
        }
        "kept" => {
            line.has_kept_key = true;
            line.kept = map.next_value()?;
        }
        _ => {
            map.next_value::<IgnoredAny>()?;
            line.unknown_keys.push(key.to_owned());
        }
    }
    Ok(())
}

impl<'de> Deserialize<'de> for Ids {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_seq(Packed(|id: u32| Ok(id.to_le_bytes()), PhantomData)).map(Self)
    }
}

impl<'de> Deserialize<'de> for Logprobs {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let pack = |logprob: f32| match logprob.is_finite() {
            true => Ok(logprob.to_le_bytes()),
            false => Err("is not finite as a 32-bit float"),
        };
        deserializer.deserialize_seq(Packed(pack, PhantomData)).map(Self)
    }
}

/// Packs the elements of an array into four bytes each; an error names the element.
struct Packed<T, F>(F, PhantomData<T>);

impl<'de, T, F> Visitor<'de> for Packed<T, F>
where
    T: Deserialize<'de>,
    F: Fn(T) -> Result<[u8; 4], &'static str>,
{
    type Value = Bytes;

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("an array of numbers")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut elements: A) -> Result<Bytes, A::Error> {
        let mut packed = Vec::new();
        loop {
            let index = packed.len() / 4;
            let at = |error: &dyn fmt::Display| A::Error::custom(format!("element {index}: {error}"));
            match elements.next_element::<T>() {
                Ok(Some(element)) => {
                    let bytes = (self.0)(element).map_err(|problem| at(&problem))?;
                    packed.extend_from_slice(&bytes);
                }
                Ok(None) => return Ok(packed.into()),
                Err(error) => return Err(at(&error)),
            }
        }
    }
}
