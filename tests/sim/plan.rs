//! What workers report: random forests, cut into requests, in an order and with repeats that the seed decides.
//!
//! Anything may come before anything: a rollout may be finalised before all of its calls were sent, or never be whole. What must
//! come of it follows from what was accepted ([`crate::model`]), not from this plan.

use std::collections::BTreeMap;

use hedgerow::cli::shuffle::SplitMix64;
use hedgerow::ids::{RolloutRef, RunId};
use hedgerow::proto::v1::report_request::Event as Message;
use hedgerow::proto::v1::{self, AgentStatus, DiscardDisposition};
use hedgerow::rollout::event::Event;
use hedgerow::rpc::convert;

use crate::case::{Call, Case};
use crate::character::Character;
use crate::feed::{Form, Mention};
use crate::generator::NEVER_COMES;
use crate::stories::{interleave, stories, stretch};
use crate::wire;

/// The run that everything belongs to.
pub(crate) const RUN: &str = "sim";
/// What a harness says when it discards a rollout.
pub(crate) const DISCARDED: &str = "planned";

pub(crate) struct Plan {
    pub(crate) rollouts: Vec<Rollout>,
    /// In the order in which workers begin to send them.
    pub(crate) requests: Vec<Request>,
    /// How many members each group is said to have.
    pub(crate) group_sizes: BTreeMap<String, u32>,
}

pub(crate) struct Rollout {
    pub(crate) id: String,
    pub(crate) group: Option<String>,
    pub(crate) case: Case,
    pub(crate) reward: f64,
}

pub(crate) struct Request {
    pub(crate) worker: usize,
    pub(crate) rollout: usize,
    pub(crate) attempt: u32,
    pub(crate) what: What,
    pub(crate) about: RolloutRef,
    pub(crate) event: Event,
    /// Bytes that it is reckoned with.
    pub(crate) weight: usize,
}

/// What a request says, in the words of the model.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum What {
    Open,
    Call {
        call: usize,
        form: Form,
        /// With other content than the case has.
        other: bool,
    },
    Start(String),
    End {
        agent: String,
        kept: Option<Vec<String>>,
    },
    /// A seal, a reward, or both.
    Finish {
        seal: Option<Seal>,
        reward: bool,
    },
    Heartbeat,
    Discard {
        is_final: bool,
    },
}

/// The one seal of an attempt.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Seal {
    pub(crate) kept: Option<BTreeMap<String, Vec<String>>>,
    pub(crate) expected_calls: Option<u64>,
}

impl Plan {
    pub(crate) fn new(character: &Character, chance: &mut SplitMix64) -> Self {
        let mut plan = Self { rollouts: Vec::new(), requests: Vec::new(), group_sizes: BTreeMap::new() };
        let group_rollouts = 1 + chance.below(4);
        let grouped = chance.below(4) > 0;
        let mut waiting = Vec::new();
        for (place, story) in stories(chance.next_u64(), character.rollouts).into_iter().enumerate() {
            let (mut case, [mut mentions, _]) = (story.case, story.tellings);
            case.settings = character.model.clone();
            stretch(&mut case, &mut mentions, [1, 1, 3, 20][chance.below(4)]);
            let group = grouped.then(|| format!("g{}", place / group_rollouts));
            if let Some(group) = &group {
                // Now and then there is no place for all.
                let size = group_rollouts - usize::from(chance.below(12) == 0 && group_rollouts > 1);
                plan.group_sizes.entry(group.clone()).or_insert(size as u32);
            }
            let reward = chance.below(64) as f64 / 16.0 - 1.0;
            let reward = if character.coarse_rewards { reward.round() } else { reward };
            let rollout = Rollout { id: format!("r{place}"), group, case, reward };
            let mut sketch = Sketch { plan: &plan, rollout: &rollout, place, chance, workers: character.workers };
            waiting.push(sketch.requests(&mentions));
            plan.rollouts.push(rollout);
        }
        plan.requests = interleave(waiting, 1 + chance.below(5), chance);
        plan
    }
}

/// How one rollout is told.
struct Sketch<'a> {
    plan: &'a Plan,
    rollout: &'a Rollout,
    place: usize,
    chance: &'a mut SplitMix64,
    workers: usize,
}

impl Sketch<'_> {
    fn requests(&mut self, mentions: &[Mention]) -> Vec<Request> {
        let home = self.chance.below(self.workers);
        let attempts = [1, 1, 1, 1, 1, 2, 3][self.chance.below(7)];
        let mut requests = Vec::new();
        for attempt in 0..attempts {
            let last = attempt + 1 == attempts;
            let mut told = self.attempt(mentions, last);
            if !last && self.chance.below(2) == 0 {
                told.truncate(1 + self.chance.below(told.len()));
            }
            for what in told {
                let worker = if self.chance.below(3) == 0 { self.chance.below(self.workers) } else { home };
                requests.push(self.request(worker, attempt, what));
            }
        }
        requests
    }

    /// Everything that is said of one attempt, in order.
    fn attempt(&mut self, mentions: &[Mention], last: bool) -> Vec<What> {
        let mut told: Vec<What> = mentions
            .iter()
            .map(|Mention { call, form }| What::Call { call: *call, form: form.clone(), other: false })
            .collect();
        let by_agents = self.chance.below(2) == 0;
        self.agents(by_agents, &mut told);
        if self.chance.below(8) == 0 {
            let call = self.chance.below(self.rollout.case.calls.len());
            self.scatter(What::Call { call, form: Form::Full, other: true }, 0, &mut told);
        }
        // What came as a delta comes in full in the end, so that every call can be whole.
        let deltas = |call: &usize| mentions.iter().any(|mention| mention.call == *call && mention.form != Form::Full);
        let full = (0..self.rollout.case.calls.len()).filter(deltas);
        told.extend(full.map(|call| What::Call { call, form: Form::Full, other: false }));
        self.ends(by_agents, last, &mut told);
        for _ in 0..self.chance.below(3) {
            self.scatter(What::Heartbeat, 0, &mut told);
        }
        let open = if self.chance.below(4) > 0 { 0 } else { self.chance.below(told.len() + 1) };
        told.insert(open, What::Open);
        told
    }

    /// Agents' starts, and their ends with the lists of what they kept.
    fn agents(&mut self, by_agents: bool, told: &mut Vec<What>) {
        let case = &self.rollout.case;
        let mut agents: Vec<String> = case.calls.iter().map(|call| call.agent.clone()).collect();
        agents.extend(case.kept.iter().flat_map(BTreeMap::keys).cloned());
        agents.sort_unstable();
        agents.dedup();
        for agent in agents {
            if self.chance.below(2) == 0 {
                self.scatter(What::Start(agent.clone()), 0, told);
            }
            let mut kept =
                self.rollout.case.kept.as_ref().filter(|_| by_agents).and_then(|kept| kept.get(&agent)).cloned();
            if let Some(kept) = kept.as_mut().filter(|_| self.chance.below(16) == 0) {
                kept.push(NEVER_COMES.to_owned());
            }
            if kept.is_some() || self.chance.below(2) == 0 {
                self.scatter(What::End { agent, kept }, 0, told);
            }
        }
    }

    /// A seal and a reward, or a discard.
    fn ends(&mut self, by_agents: bool, last: bool, told: &mut Vec<What>) {
        let is_final = last && self.chance.below(2) == 0;
        // Most of the time when all else is told, else anywhere.
        let from = if self.chance.below(2) == 0 { told.len() } else { 0 };
        if self.chance.below(10) == 0 {
            self.scatter(What::Discard { is_final }, from, told);
        }
        let calls = self.rollout.case.calls.len() as u64;
        let expected_calls = match self.chance.below(12) {
            0 => Some(calls + 1),
            1..6 => Some(calls),
            _ => None,
        };
        let kept = self.rollout.case.kept.clone().filter(|_| !by_agents);
        let seal = Some(Seal { kept, expected_calls });
        match self.chance.below(4) {
            0 => {
                self.scatter(What::Finish { seal: seal.clone(), reward: false }, from, told);
                self.scatter(What::Finish { seal: None, reward: true }, from, told);
            }
            1 => {
                self.scatter(What::Finish { seal: None, reward: true }, 0, told);
                self.scatter(What::Finish { seal, reward: true }, from, told);
            }
            _ => self.scatter(What::Finish { seal, reward: true }, from, told),
        }
    }

    /// Puts something in anywhere from this place on.
    fn scatter(&mut self, what: What, from: usize, told: &mut Vec<What>) {
        let place = from.min(told.len()) + self.chance.below(told.len() + 1 - from.min(told.len()));
        told.insert(place, what);
    }

    fn request(&self, worker: usize, attempt: u32, what: What) -> Request {
        let message = message(self.plan, self.rollout, &what);
        let about = v1::RolloutRef {
            run_id: RUN.to_owned(),
            group_id: self.rollout.group.clone().unwrap_or_default(),
            rollout_id: self.rollout.id.clone(),
            attempt,
        };
        let request = v1::ReportRequest { request_seq: 0, rollout: Some(about), event: Some(message) };
        let weight = prost::Message::encoded_len(&request);
        let about = convert::report::rollout_ref(request.rollout.as_ref()).expect("a good reference");
        let event = convert::report::event(request.event, about.group.is_some()).expect("a good event");
        Request { worker, rollout: self.place, attempt, what, about, event, weight }
    }
}

/// The call of a case as it is told: its own content, or another one.
pub(crate) fn content(call: &Call, other: bool) -> Call {
    let mut call = call.clone();
    if other {
        call.generation.push(3);
        call.logprobs.push(-7.0);
    }
    call
}

fn message(plan: &Plan, rollout: &Rollout, what: &What) -> Message {
    let list = |calls: &Vec<String>| v1::CallList { call_ids: calls.clone() };
    match what {
        What::Open => {
            let tags = [("rollout".to_owned(), rollout.id.clone())].into_iter().collect();
            let group_size = rollout.group.as_ref().and_then(|group| plan.group_sizes.get(group)).copied();
            Message::Open(v1::Open { group_size, tags })
        }
        What::Call { call, form, other } => {
            Message::Call(wire::call(&content(&rollout.case.calls[*call], *other), form))
        }
        What::Start(agent_id) => {
            Message::AgentStart(v1::AgentStart { agent_id: agent_id.clone(), ..v1::AgentStart::default() })
        }
        What::End { agent, kept } => Message::AgentEnd(v1::AgentEnd {
            agent_id: agent.clone(),
            status: AgentStatus::Settled.into(),
            kept: kept.as_ref().map(list),
            ..v1::AgentEnd::default()
        }),
        What::Finish { seal, reward } => {
            let seal = seal.as_ref().map(|Seal { kept, expected_calls }| {
                let lists = |kept: &BTreeMap<String, Vec<String>>| v1::KeptCalls {
                    agents: kept.iter().map(|(agent, calls)| (agent.clone(), list(calls))).collect(),
                };
                v1::Seal { kept: kept.as_ref().map(lists), expected_calls: *expected_calls }
            });
            let credits = || crate::credit::credits(&rollout.case);
            let reward = reward.then(|| v1::Reward { credits: credits(), ..crate::service::reward(rollout.reward) });
            match (seal, reward) {
                (Some(seal), None) => Message::Seal(seal),
                (None, Some(reward)) => Message::Reward(reward),
                (seal, reward) => Message::Finish(v1::Finish { seal, reward }),
            }
        }
        What::Heartbeat => Message::Heartbeat(v1::Heartbeat {}),
        What::Discard { is_final } => {
            let disposition = if *is_final { DiscardDisposition::Final } else { DiscardDisposition::WillRetry };
            Message::Discard(v1::Discard { reason: DISCARDED.to_owned(), disposition: disposition.into() })
        }
    }
}

/// The run's id.
pub(crate) fn run() -> RunId {
    RunId::parse(RUN).expect("an id")
}

/// The id of a run that comes and goes.
pub(crate) fn other_run() -> RunId {
    RunId::parse("other").expect("an id")
}
