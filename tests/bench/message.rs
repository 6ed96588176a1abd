//! The messages with which a workload's rollouts are reported.

use hedgerow::proto::v1;
use hedgerow::proto::v1::report_request::Event;

use crate::workload::{Call, Rollout};

/// How a call's prompt is given to the forest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Form {
    /// All its ids.
    Full,
    /// What follows the call before it.
    Delta,
}

/// Ids as they go over the wire.
pub(crate) fn ids(ids: &[u32]) -> bytes::Bytes {
    bytes::Bytes::copy_from_slice(bytemuck::cast_slice(ids))
}

/// A call as it goes over the wire.
pub(crate) fn call(rollout: &Rollout, call: &Call, form: Form) -> v1::Call {
    use v1::prompt::Prompt;
    let id = |sequence: u64| format!("call-{sequence}");
    let tokens = rollout.prompt(call);
    let prompt = match call.base.filter(|_| form == Form::Delta) {
        Some((base, length)) => {
            let digest = bytes::Bytes::copy_from_slice(&rollout.digest(call, length).0);
            let base = v1::Base { call_id: id(base), length_tokens: length as u64, digest };
            Prompt::Delta(v1::Delta { base: Some(base), suffix_token_ids: ids(&tokens[length..]) })
        }
        None => Prompt::TokenIds(ids(tokens)),
    };
    let generation = rollout.generation(call);
    let logprobs = vec![-0.5_f32; generation.len()];
    v1::Call {
        call_id: id(call.sequence),
        agent_id: format!("agent-{}", call.agent),
        sequence: call.sequence,
        policy: "main".to_owned(),
        prompt: Some(v1::Prompt { prompt: Some(prompt) }),
        generation_token_ids: ids(generation),
        generation_logprobs: Some(bytes::Bytes::copy_from_slice(bytemuck::cast_slice(&logprobs))),
        ..v1::Call::default()
    }
}

/// A request about a rollout.
pub(crate) fn request(run: &str, rollout: &str, request_seq: u64, event: Event) -> v1::ReportRequest {
    let reference =
        v1::RolloutRef { run_id: run.to_owned(), group_id: String::new(), rollout_id: rollout.to_owned(), attempt: 0 };
    v1::ReportRequest { request_seq, rollout: Some(reference), event: Some(event) }
}

/// A finish without lists, with a reward of 1.
pub(crate) fn finish() -> Event {
    let seal = v1::Seal { kept: None, expected_calls: None };
    Event::Finish(v1::Finish { seal: Some(seal), reward: Some(v1::Reward { value: 1.0, ..v1::Reward::default() }) })
}
