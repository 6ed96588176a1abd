//! What is to be reported, in which order, and how each event looks on the wire.

use std::sync::Arc;

use bytes::Bytes;

use crate::cli::recording::{RecordedCall, RecordedLink, RecordedRollout, Recording};
use crate::cli::shuffle::SplitMix64;
use crate::proto::v1::report_request::Event as WireEvent;
use crate::proto::v1::{
    Base, Call, CallList, Delta, Finish, KeptCalls, Link, Open, PolicyVersionSpan, Prompt, ReportRequest, Reward,
    RolloutRef, RootLink, Seal, link, prompt,
};

/// Everything that is to be reported.
#[derive(Debug)]
pub struct Plan {
    /// What was recorded.
    pub recording: Recording,
    /// The run to report to.
    pub run: String,
    /// The reward of rollouts that have none.
    pub default_reward: f64,
    /// Send every prompt in full.
    pub full_prompts: bool,
    /// How often each rollout is reported, under an id of its own each time.
    pub repeat: u32,
    /// Say how many rollouts each group has.
    pub group_sizes: bool,
    /// In which order.
    pub order: Order,
}

/// The order of a rollout's events.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// Its calls as in the file, then its finish.
    AsRecorded,
    /// Shuffled, its finish among them or last.
    Shuffled {
        /// What the shuffle rests on.
        seed: u64,
        /// The finish comes last.
        seal_last: bool,
    },
}

/// One event of one repetition of one rollout.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Event {
    /// Which rollout of the recording.
    pub rollout: usize,
    /// Which repetition, from 0.
    pub repetition: u32,
    /// What happens.
    pub kind: EventKind,
}

/// What an event is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum EventKind {
    /// The rollout begins.
    Open,
    /// A call of the rollout.
    Call {
        /// Which one.
        index: usize,
        /// Its prompt in full.
        full: bool,
    },
    /// The rollout is sealed and rewarded.
    Finish,
}

impl Plan {
    /// How many rollouts there are, repetitions counted.
    #[must_use]
    pub fn rollouts(&self) -> usize {
        self.recording.rollouts.len() * self.repeat as usize
    }

    /// How many calls there are, repetitions counted.
    #[must_use]
    pub fn calls(&self) -> u64 {
        self.recording.calls() as u64 * u64::from(self.repeat)
    }

    /// The events of those rollouts that one of several streams reports, rollout after rollout.
    pub fn events_of_stream(plan: Arc<Self>, stream: u32, streams: u32) -> impl Iterator<Item = Event> + Send {
        let count = plan.rollouts();
        let recorded = plan.recording.rollouts.len().max(1);
        (stream as usize..count).step_by(streams.max(1) as usize).flat_map(move |index| {
            let repetition = u32::try_from(index / recorded).unwrap_or(u32::MAX);
            plan.events_of_rollout(index % recorded, repetition)
        })
    }

    /// The events of one rollout, in order.
    #[must_use]
    pub fn events_of_rollout(&self, rollout: usize, repetition: u32) -> Vec<Event> {
        let Some(recorded) = self.recording.rollouts.get(rollout) else { return Vec::new() };
        let event = |kind| Event { rollout, repetition, kind };
        let mut events = Vec::with_capacity(recorded.calls.len() + 2);
        if self.group_sizes && recorded.group.is_some() {
            events.push(event(EventKind::Open));
        }
        let full = self.full_prompts;
        events.extend((0..recorded.calls.len()).map(|index| event(EventKind::Call { index, full })));
        events.push(event(EventKind::Finish));
        if let Order::Shuffled { seed, seal_last } = self.order {
            let length = events.len() - usize::from(seal_last);
            let own = (rollout as u64) << 32 | u64::from(repetition);
            if let Some(shuffled) = events.get_mut(..length) {
                SplitMix64::new(seed ^ own.wrapping_mul(0x9E37_79B9_7F4A_7C15)).shuffle(shuffled);
            }
        }
        events
    }

    /// The recorded call that an event is about.
    #[must_use]
    pub fn call(&self, event: Event) -> Option<&RecordedCall> {
        match event.kind {
            EventKind::Call { index, .. } => self.recording.rollouts.get(event.rollout)?.calls.get(index),
            EventKind::Open | EventKind::Finish => None,
        }
    }

    /// The rollout that an event is about, as the service knows it.
    #[must_use]
    pub fn rollout_ref(&self, event: Event) -> RolloutRef {
        let recorded = self.recording.rollouts.get(event.rollout);
        let repeated = |id: &str| match event.repetition {
            0 => id.to_owned(),
            repetition => format!("{id}#{}", u64::from(repetition) + 1),
        };
        RolloutRef {
            run_id: self.run.clone(),
            group_id: recorded.and_then(|rollout| rollout.group.as_deref()).map_or_else(String::new, repeated),
            rollout_id: recorded.map_or_else(String::new, |rollout| repeated(&rollout.id)),
            attempt: 0,
        }
    }

    /// Which rollout of the recording, and which repetition of it, has this id at the service.
    #[must_use]
    pub fn find(&self, rollout_id: &str) -> Option<(usize, u32)> {
        self.recording.rollouts.iter().enumerate().find_map(|(index, recorded)| {
            let rest = rollout_id.strip_prefix(&recorded.id)?;
            if rest.is_empty() {
                return Some((index, 0));
            }
            let repetition = rest.strip_prefix('#')?.parse::<u32>().ok()?.checked_sub(1)?;
            (repetition < self.repeat).then_some((index, repetition))
        })
    }

    /// An event as a request.
    #[must_use]
    pub fn request(&self, event: Event, request_seq: u64) -> ReportRequest {
        let wire = self.recording.rollouts.get(event.rollout).and_then(|rollout| match event.kind {
            EventKind::Open => Some(WireEvent::Open(self.open(rollout))),
            EventKind::Call { index, full } => Some(WireEvent::Call(call(rollout, index, full)?)),
            EventKind::Finish => Some(WireEvent::Finish(self.finish(rollout))),
        });
        ReportRequest { request_seq, rollout: Some(self.rollout_ref(event)), event: wire }
    }

    fn open(&self, rollout: &RecordedRollout) -> Open {
        let members = self.recording.rollouts.iter().filter(|other| other.group == rollout.group).count();
        Open { group_size: u32::try_from(members).ok(), ..Open::default() }
    }

    fn finish(&self, rollout: &RecordedRollout) -> Finish {
        let lists = |(agent, calls): (&String, &Vec<String>)| (agent.clone(), CallList { call_ids: calls.clone() });
        Finish {
            seal: Some(Seal {
                kept: Some(KeptCalls { agents: rollout.kept.iter().map(lists).collect() }),
                // So that a call which nobody kept and which comes last is counted too, whatever the order.
                expected_calls: Some(rollout.calls.len() as u64),
            }),
            reward: Some(Reward { value: rollout.reward.unwrap_or(self.default_reward), ..Reward::default() }),
        }
    }
}

/// A call as it goes over the wire.
fn call(rollout: &RecordedRollout, index: usize, full: bool) -> Option<Call> {
    let recorded = rollout.calls.get(index)?;
    let generated = u32::try_from(recorded.generated_tokens()).unwrap_or(u32::MAX);
    let version = recorded.policy_version.filter(|_| generated > 0);
    Some(Call {
        call_id: recorded.id.clone(),
        agent_id: recorded.agent.clone(),
        parent_agent_id: recorded.parent_agent.clone(),
        sequence: recorded.sequence,
        link: wire_link(&recorded.link),
        kind: recorded.kind.clone(),
        policy: recorded.policy.clone(),
        policy_versions: version
            .map(|version| PolicyVersionSpan { start: 0, end: generated, version })
            .into_iter()
            .collect(),
        model: recorded.model.clone(),
        prompt: Some(wire_prompt(rollout, index, full)),
        generation_token_ids: recorded.generation.clone(),
        generation_logprobs: recorded.logprobs.clone(),
        train: recorded.train,
        finish_reason: recorded.finish_reason.clone(),
        ..Call::default()
    })
}

fn wire_link(link: &RecordedLink) -> Option<Link> {
    match link {
        RecordedLink::Infer => None,
        RecordedLink::Root => Some(Link { link: Some(link::Link::Root(RootLink {})) }),
        RecordedLink::Parent(parent) => Some(Link { link: Some(link::Link::ParentCallId(parent.clone())) }),
    }
}

fn wire_prompt(rollout: &RecordedRollout, index: usize, full: bool) -> Prompt {
    let delta = rollout.base(index).filter(|_| !full).map(|(base, length, digest)| Delta {
        base: Some(Base {
            call_id: base.to_owned(),
            length_tokens: length as u64,
            digest: Bytes::copy_from_slice(&digest.0),
        }),
        suffix_token_ids: rollout.calls.get(index).map(|call| call.suffix.clone()).unwrap_or_default(),
    });
    let prompt = match delta {
        Some(delta) => prompt::Prompt::Delta(delta),
        None => prompt::Prompt::TokenIds(rollout.full_prompt(index)),
    };
    Prompt { prompt: Some(prompt) }
}
