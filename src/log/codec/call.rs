//! The records of calls: by far the most bytes of a log, so facts are short and arrays are raw.

use prost::{Message, Oneof};

use crate::forest::CallRecord;
use crate::forest::call::{CallFacts, Delta, Link, RecordedPrompt, VersionSpan};
use crate::forest::digest::Digest;
use crate::ids::{AgentId, CallId, Name};

use super::Fault;
use super::codes::{Coded, LinkForm, coded};
use super::fields::{identifier, optional_identifier, present};
use super::numbers::{Logprobs, Tokens};

#[derive(Message)]
pub(super) struct CallMessage<'a> {
    #[prost(oneof = "CallForm", tags = "1, 2")]
    form: Option<CallForm<'a>>,
}

#[derive(Oneof)]
enum CallForm<'a> {
    #[prost(message, tag = "1")]
    New(Box<NewCallMessage<'a>>),
    #[prost(message, tag = "2")]
    Prompt(LaterPromptMessage<'a>),
}

/// The facts of a call and its prompt in one message.
#[derive(Message)]
struct NewCallMessage<'a> {
    #[prost(string, tag = "1")]
    call_id: String,
    #[prost(string, tag = "2")]
    agent_id: String,
    #[prost(string, optional, tag = "3")]
    parent_agent_id: Option<String>,
    #[prost(uint64, tag = "4")]
    sequence: u64,
    #[prost(uint32, tag = "5")]
    link: u32,
    #[prost(string, optional, tag = "6")]
    link_parent: Option<String>,
    #[prost(string, tag = "7")]
    kind: String,
    #[prost(string, tag = "8")]
    policy: String,
    #[prost(message, repeated, tag = "9")]
    versions: Vec<VersionSpanMessage>,
    #[prost(string, optional, tag = "10")]
    model: Option<String>,
    #[prost(message, optional, tag = "11")]
    generation: Option<Tokens<'a>>,
    /// Whether there are any is a fact of its own, so an empty array is written too.
    #[prost(message, optional, tag = "12")]
    logprobs: Option<Logprobs<'a>>,
    #[prost(bool, tag = "13")]
    train: bool,
    #[prost(string, optional, tag = "14")]
    finish_reason: Option<String>,
    #[prost(message, optional, tag = "15")]
    prompt: Option<PromptMessage<'a>>,
    #[prost(uint64, optional, tag = "16")]
    start_unix_ms: Option<u64>,
    #[prost(uint64, optional, tag = "17")]
    end_unix_ms: Option<u64>,
}

#[derive(Message)]
struct VersionSpanMessage {
    #[prost(uint32, tag = "1")]
    start: u32,
    #[prost(uint32, tag = "2")]
    end: u32,
    #[prost(uint64, tag = "3")]
    version: u64,
}

#[derive(Message)]
struct LaterPromptMessage<'a> {
    #[prost(string, tag = "1")]
    call_id: String,
    #[prost(message, optional, tag = "2")]
    prompt: Option<PromptMessage<'a>>,
}

#[derive(Message)]
struct PromptMessage<'a> {
    #[prost(oneof = "PromptForm", tags = "1, 2")]
    form: Option<PromptForm<'a>>,
}

#[derive(Oneof)]
enum PromptForm<'a> {
    #[prost(message, tag = "1")]
    Known(KnownPromptMessage<'a>),
    #[prost(message, tag = "2")]
    Waiting(DeltaMessage<'a>),
}

#[derive(Message)]
struct KnownPromptMessage<'a> {
    #[prost(string, optional, tag = "1")]
    base: Option<String>,
    #[prost(uint32, tag = "2")]
    base_length: u32,
    #[prost(message, optional, tag = "3")]
    suffix: Option<Tokens<'a>>,
}

#[derive(Message)]
struct DeltaMessage<'a> {
    #[prost(string, tag = "1")]
    base: String,
    #[prost(uint32, tag = "2")]
    base_length: u32,
    #[prost(bytes = "vec", tag = "3")]
    digest: Vec<u8>,
    #[prost(message, optional, tag = "4")]
    suffix: Option<Tokens<'a>>,
}

impl<'a> CallMessage<'a> {
    pub(super) fn of(record: &'a CallRecord) -> Self {
        let form = match record {
            CallRecord::New(new) => CallForm::New(Box::new(NewCallMessage::of(&new.0, &new.1))),
            CallRecord::Prompt(call, prompt) => {
                let prompt = Some(PromptMessage::of(prompt));
                CallForm::Prompt(LaterPromptMessage { call_id: call.to_string(), prompt })
            }
        };
        Self { form: Some(form) }
    }

    pub(super) fn into_call(self) -> Result<CallRecord, Fault> {
        match present("call", self.form)? {
            CallForm::New(new) => Ok(CallRecord::New(Box::new(new.into_facts()?))),
            CallForm::Prompt(later) => {
                let call = identifier("call_id", &later.call_id, CallId::parse)?;
                Ok(CallRecord::Prompt(call, present("prompt", later.prompt)?.into_prompt()?))
            }
        }
    }
}

impl<'a> NewCallMessage<'a> {
    fn of(facts: &'a CallFacts, prompt: &'a RecordedPrompt) -> Self {
        let CallFacts {
            call_id,
            agent_id,
            parent_agent_id,
            sequence,
            link,
            kind,
            policy,
            versions,
            model,
            generation,
            logprobs,
            train,
            finish_reason,
            times_unix_ms: (start_unix_ms, end_unix_ms),
        } = facts;
        let (link, link_parent) = match link {
            Link::Infer => (LinkForm::Infer, None),
            Link::Root => (LinkForm::Root, None),
            Link::Parent(call) => (LinkForm::Parent, Some(call.to_string())),
        };
        Self {
            call_id: call_id.to_string(),
            agent_id: agent_id.to_string(),
            parent_agent_id: parent_agent_id.as_ref().map(AgentId::to_string),
            sequence: *sequence,
            link: link.code(),
            link_parent,
            kind: kind.to_string(),
            policy: policy.to_string(),
            versions: versions.iter().map(VersionSpanMessage::of).collect(),
            model: model.as_ref().map(Name::to_string),
            generation: Tokens::unless_empty(generation),
            logprobs: logprobs.as_deref().map(Logprobs::of),
            train: *train,
            finish_reason: finish_reason.as_ref().map(Name::to_string),
            prompt: Some(PromptMessage::of(prompt)),
            start_unix_ms: *start_unix_ms,
            end_unix_ms: *end_unix_ms,
        }
    }

    fn into_facts(self) -> Result<(CallFacts, RecordedPrompt), Fault> {
        let parent = optional_identifier("link_parent", self.link_parent.as_deref(), CallId::parse)?;
        let link = match (coded("link", self.link)?, parent) {
            (LinkForm::Infer, None) => Link::Infer,
            (LinkForm::Root, None) => Link::Root,
            (LinkForm::Parent, Some(call)) => Link::Parent(call),
            (LinkForm::Parent, None) => return Err(Fault::Missing("link_parent")),
            (LinkForm::Infer | LinkForm::Root, Some(_)) => return Err(Fault::Contradiction("link_parent")),
        };
        let facts = CallFacts {
            call_id: identifier("call_id", &self.call_id, CallId::parse)?,
            agent_id: identifier("agent_id", &self.agent_id, AgentId::parse)?,
            parent_agent_id: optional_identifier("parent_agent_id", self.parent_agent_id.as_deref(), AgentId::parse)?,
            sequence: self.sequence,
            link,
            kind: identifier("kind", &self.kind, Name::parse)?,
            policy: identifier("policy", &self.policy, Name::parse)?,
            versions: self.versions.into_iter().map(VersionSpanMessage::into_span).collect(),
            model: optional_identifier("model", self.model.as_deref(), Name::parse)?,
            generation: Tokens::or_empty(self.generation, "generation")?,
            logprobs: self.logprobs.map(|logprobs| logprobs.into_values("logprobs")).transpose()?,
            train: self.train,
            finish_reason: optional_identifier("finish_reason", self.finish_reason.as_deref(), Name::parse)?,
            times_unix_ms: (self.start_unix_ms, self.end_unix_ms),
        };
        Ok((facts, present("prompt", self.prompt)?.into_prompt()?))
    }
}

impl VersionSpanMessage {
    fn of(span: &VersionSpan) -> Self {
        let VersionSpan { start, end, version } = *span;
        Self { start, end, version }
    }

    fn into_span(self) -> VersionSpan {
        VersionSpan { start: self.start, end: self.end, version: self.version }
    }
}

impl<'a> PromptMessage<'a> {
    fn of(prompt: &'a RecordedPrompt) -> Self {
        let form = match prompt {
            RecordedPrompt::Known { base, suffix } => PromptForm::Known(KnownPromptMessage {
                base: base.as_ref().map(|(call, _)| call.to_string()),
                base_length: base.as_ref().map_or(0, |(_, length)| *length),
                suffix: Tokens::unless_empty(suffix),
            }),
            RecordedPrompt::Waiting(Delta { base, base_length, digest, suffix }) => PromptForm::Waiting(DeltaMessage {
                base: base.to_string(),
                base_length: *base_length,
                digest: digest.0.to_vec(),
                suffix: Tokens::unless_empty(suffix),
            }),
        };
        Self { form: Some(form) }
    }

    fn into_prompt(self) -> Result<RecordedPrompt, Fault> {
        match present("prompt", self.form)? {
            PromptForm::Known(known) => {
                let base = optional_identifier("prompt.base", known.base.as_deref(), CallId::parse)?;
                if base.is_none() && known.base_length > 0 {
                    return Err(Fault::Contradiction("prompt.base_length"));
                }
                let suffix = Tokens::or_empty(known.suffix, "prompt.suffix")?;
                Ok(RecordedPrompt::Known { base: base.map(|call| (call, known.base_length)), suffix })
            }
            PromptForm::Waiting(delta) => {
                let digest = <[u8; 16]>::try_from(delta.digest.as_slice())
                    .map_err(|_| Fault::Length { field: "prompt.digest", bytes: delta.digest.len() })?;
                Ok(RecordedPrompt::Waiting(Delta {
                    base: identifier("prompt.base", &delta.base, CallId::parse)?,
                    base_length: delta.base_length,
                    digest: Digest(digest),
                    suffix: Tokens::or_empty(delta.suffix, "prompt.suffix")?,
                }))
            }
        }
    }
}
