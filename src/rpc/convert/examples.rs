//! Requests and rollouts for the tests of this module, as short as can be.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::sync::Arc;

use bytes::Bytes;

use super::report::{event, rollout_ref};
use crate::error::Refusal;
use crate::ids::{GroupId, RolloutId, RolloutRef, RunId};
use crate::proto::v1;
use crate::proto::v1::report_request::Event;
use crate::rollout::run_settings::RunSettings;
use crate::rollout::settings::RolloutSettings;
use crate::rollout::{FinalisedRollout, Judgement, Rollout};

/// These ids as the wire has them.
pub(super) fn bytes(ids: &[u32]) -> Bytes {
    ids.iter().flat_map(|id| id.to_le_bytes()).collect()
}

pub(super) fn prompt(ids: &[u32]) -> Option<v1::Prompt> {
    Some(v1::Prompt { prompt: Some(v1::prompt::Prompt::TokenIds(bytes(ids))) })
}

pub(super) fn delta(base: v1::Base, suffix: &[u32]) -> Option<v1::Prompt> {
    let delta = v1::Delta { base: Some(base), suffix_token_ids: bytes(suffix) };
    Some(v1::Prompt { prompt: Some(v1::prompt::Prompt::Delta(delta)) })
}

pub(super) fn parent(call: &str) -> Option<v1::Link> {
    Some(v1::Link { link: Some(v1::link::Link::ParentCallId(call.to_owned())) })
}

/// A call with a log-probability of -0.5 for each generated id.
pub(super) fn call(id: &str, agent: &str, sequence: u64, prompt_ids: &[u32], generation: &[u32]) -> v1::Call {
    v1::Call {
        call_id: id.to_owned(),
        agent_id: agent.to_owned(),
        sequence,
        prompt: prompt(prompt_ids),
        generation_token_ids: bytes(generation),
        generation_logprobs: Some(generation.iter().flat_map(|_| (-0.5_f32).to_le_bytes()).collect()),
        ..v1::Call::default()
    }
}

/// A list of kept calls of one agent.
pub(super) fn kept(agent: &str, calls: &[&str]) -> v1::Seal {
    let list = v1::CallList { call_ids: calls.iter().map(ToString::to_string).collect() };
    v1::Seal { kept: Some(v1::KeptCalls { agents: [(agent.to_owned(), list)].into() }), expected_calls: None }
}

pub(super) fn request(event: Event) -> v1::ReportRequest {
    let rollout = v1::RolloutRef {
        run_id: "run".to_owned(),
        group_id: "group".to_owned(),
        rollout_id: "rollout".to_owned(),
        attempt: 2,
    };
    v1::ReportRequest { request_seq: 1, rollout: Some(rollout), event: Some(event) }
}

/// What a request says of which rollout.
pub(super) fn report(request: v1::ReportRequest) -> Result<(RolloutRef, crate::rollout::event::Event), Box<Refusal>> {
    let about = rollout_ref(request.rollout.as_ref())?;
    let event = event(request.event, about.group.is_some())?;
    Ok((about, event))
}

/// What [`request`] is about.
pub(super) fn about() -> RolloutRef {
    RolloutRef {
        run: RunId::parse("run").unwrap(),
        group: Some(GroupId::parse("group").unwrap()),
        rollout: RolloutId::parse("rollout").unwrap(),
        attempt: 2,
    }
}

/// A rollout to which these events were reported, all of them accepted.
pub(super) fn rollout(settings: RolloutSettings, events: Vec<Event>) -> Rollout {
    let mut rollout = Rollout::new(Arc::new(settings), about().group, 0);
    for event in events {
        let (_, event) = report(request(event)).unwrap();
        match rollout.judge(event) {
            Judgement::Record(record) => drop(rollout.apply(record, 0)),
            judgement @ (Judgement::Duplicate(_) | Judgement::Heard | Judgement::Refused(..)) => {
                panic!("not accepted: {judgement:?}")
            }
        }
    }
    rollout
}

pub(super) fn settings() -> RolloutSettings {
    (*RunSettings::with_defaults().rollout).clone()
}

/// Seal and reward.
pub(super) fn finish(seal: v1::Seal) -> Event {
    let components = [("style".to_owned(), 0.25)].into();
    let reward = v1::Reward { value: 1.5, components, credits: Vec::new() };
    Event::Finish(v1::Finish { seal: Some(seal), reward: Some(reward) })
}

pub(super) fn finalised(settings: RolloutSettings, events: Vec<Event>) -> Arc<FinalisedRollout> {
    Arc::clone(rollout(settings, events).finalised().unwrap())
}
