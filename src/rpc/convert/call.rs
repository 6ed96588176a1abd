//! A model call, as it is reported: its identifiers, arrays, spans and times are checked, its ids copied once.

use crate::error::{Reason, Refusal};
use crate::forest::call::{CallFacts, Delta, Link, NewCall, Prompt, VersionSpan};
use crate::forest::digest::Digest;
use crate::ids::{AgentId, CallId, Name};
use crate::limits;
use crate::proto::v1;
use crate::rollout::event::Event;

use super::fields::{
    at_most, element_count, identifier, ids, invalid, logprobs, missing, not_in_this_release, optional_identifier,
    unix_ms,
};

/// The kind of a call that says none.
const KIND: &str = "turn";
/// Stands where the run's default policy will, until the rollout's settings are known.
const POLICY: &str = "main";

/// The event that a call is.
///
/// # Errors
/// If it is bad input, or asks for what this release does not have; with the call and the agent once they are known.
pub fn call(message: v1::Call) -> Result<Event, Box<Refusal>> {
    let call_id = identifier(&message.call_id, "call.call_id", CallId::parse)?;
    let agent_id = identifier(&message.agent_id, "call.agent_id", AgentId::parse).map_err(|r| r.call(&call_id))?;
    let named = |refusal: Refusal| refusal.call(&call_id).agent(&agent_id);
    let names_policy = !message.policy.is_empty();
    let call = new_call(&message, &call_id, &agent_id).map_err(named)?;
    Ok(Event::Call { call: Box::new(call), names_policy })
}

fn new_call(message: &v1::Call, call_id: &CallId, agent_id: &AgentId) -> Result<NewCall, Refusal> {
    if !message.columns.is_empty() {
        return Err(not_in_this_release("call.columns", "columns that come for each token"));
    }
    let generated = element_count(&message.generation_token_ids, "call.generation_token_ids")?;
    check_logprobs(message, generated)?;
    let prompt = prompt(message.prompt.as_ref(), generated)?;
    let name = |text: &str, field: &str| optional_identifier(text, field, Name::parse);
    let facts = CallFacts {
        call_id: call_id.clone(),
        agent_id: agent_id.clone(),
        parent_agent_id: optional_identifier(&message.parent_agent_id, "call.parent_agent_id", AgentId::parse)?,
        sequence: message.sequence,
        link: link(message.link.as_ref())?,
        kind: name(&message.kind, "call.kind")?.unwrap_or_else(|| Name::literal(KIND)),
        policy: name(&message.policy, "call.policy")?.unwrap_or_else(|| Name::literal(POLICY)),
        versions: version_spans(&message.policy_versions, generated)?,
        model: name(&message.model, "call.model")?,
        generation: ids(&message.generation_token_ids),
        logprobs: message.generation_logprobs.as_deref().map(logprobs),
        train: message.train.unwrap_or(true),
        finish_reason: name(&message.finish_reason, "call.finish_reason")?,
        times_unix_ms: (
            unix_ms(message.start_time.as_ref(), "call.start_time")?,
            unix_ms(message.end_time.as_ref(), "call.end_time")?,
        ),
    };
    Ok(NewCall { facts, prompt })
}

fn check_logprobs(message: &v1::Call, generated: usize) -> Result<(), Refusal> {
    let field = "call.generation_logprobs";
    let Some(bytes) = &message.generation_logprobs else { return Ok(()) };
    let count = element_count(bytes, field)?;
    if count == generated {
        return Ok(());
    }
    let text = format!("{count} log-probabilities for {generated} generated ids");
    Err(Refusal::new(Reason::LogprobsLength, text).field(field).index(count.min(generated)))
}

/// The prompt; its length is checked before anything is copied.
fn prompt(message: Option<&v1::Prompt>, generated: usize) -> Result<Prompt, Refusal> {
    use v1::prompt::Prompt as Form;
    match message.and_then(|message| message.prompt.as_ref()) {
        None => Err(missing("call.prompt")),
        Some(Form::TokenIds(bytes)) => {
            let count = element_count(bytes, "call.prompt.token_ids")?;
            check_length(count, generated)?;
            Ok(Prompt::Full(ids(bytes)))
        }
        Some(Form::Delta(delta)) => {
            let base = delta.base.as_ref().ok_or_else(|| missing("call.prompt.delta.base"))?;
            let field = "call.prompt.delta.base.length_tokens";
            let length = usize::try_from(base.length_tokens).unwrap_or(usize::MAX);
            at_most(length, limits::CALL_TOKENS_MAX, "tokens", field)?;
            let count = element_count(&delta.suffix_token_ids, "call.prompt.delta.suffix_token_ids")?;
            check_length(length + count, generated)?;
            let digest = <[u8; 16]>::try_from(&base.digest[..]).map_err(|_| {
                let why = format_args!("has {} bytes; a digest has 16", base.digest.len());
                invalid("call.prompt.delta.base.digest", why)
            })?;
            Ok(Prompt::Delta(Delta {
                base: identifier(&base.call_id, "call.prompt.delta.base.call_id", CallId::parse)?,
                base_length: u32::try_from(length).map_err(|_| invalid(field, "is too long"))?,
                digest: Digest(digest),
                suffix: ids(&delta.suffix_token_ids),
            }))
        }
    }
}

fn check_length(prompt: usize, generated: usize) -> Result<(), Refusal> {
    let tokens = prompt + generated;
    if tokens <= limits::CALL_TOKENS_MAX {
        return Ok(());
    }
    let text = format!(
        "the call has {tokens} tokens ({prompt} in its prompt, {generated} generated), more than {}",
        limits::CALL_TOKENS_MAX
    );
    Err(Refusal::new(Reason::OverLimit, text).field("call.prompt"))
}

fn link(message: Option<&v1::Link>) -> Result<Link, Refusal> {
    use v1::link::Link as Said;
    match message.and_then(|message| message.link.as_ref()) {
        None | Some(Said::Infer(_)) => Ok(Link::Infer),
        Some(Said::Root(_)) => Ok(Link::Root),
        Some(Said::ParentCallId(parent)) => {
            identifier(parent, "call.link.parent_call_id", CallId::parse).map(Link::Parent)
        }
    }
}

/// Spans are not empty, in order, apart, and within the generation.
fn version_spans(spans: &[v1::PolicyVersionSpan], generated: usize) -> Result<Vec<VersionSpan>, Refusal> {
    let field = "call.policy_versions";
    at_most(spans.len(), limits::CALL_VERSION_SPANS_MAX, "spans", field)?;
    let mut previous_end = 0;
    for (at, span) in spans.iter().enumerate() {
        let v1::PolicyVersionSpan { start, end, .. } = *span;
        let why = if start >= end {
            format!("has no tokens: its start is {start}, its end {end}")
        } else if start < previous_end {
            format!("starts at {start}, before the end of the span before it, {previous_end}")
        } else if end as usize > generated {
            format!("ends at {end}, beyond the {generated} generated ids")
        } else {
            previous_end = end;
            continue;
        };
        return Err(Refusal::new(Reason::InvalidValue, format!("span {at} {why}")).field(field).index(at));
    }
    let span = |span: &v1::PolicyVersionSpan| VersionSpan { start: span.start, end: span.end, version: span.version };
    Ok(spans.iter().map(span).collect())
}
