//! What the workers of a batch report: random forests, cut into requests, made again from a seed by whoever needs them.
//!
//! Whatever the order of arrival, the same rows come of it: a rollout is complete when its last distinct call has come, all
//! that could come too late for that is on the stream of its seal, and before it.

use hedgerow::cli::shuffle::SplitMix64;
use hedgerow::proto::v1::report_request::Event;
use hedgerow::proto::v1::{self, AgentStatus, DiscardDisposition};

use crate::case::{Case, Link, Settings};
use crate::feed::{Form, Mention};
use crate::stories::{interleave, stories, stretch};
use crate::{credit, service, wire};

/// Workers of a batch.
pub(crate) const WORKERS: usize = 3;
/// The run that everything belongs to.
pub(crate) const RUN: &str = "crash";
/// Rollouts that are under way at once.
const OPEN_ROLLOUTS: usize = 10;
/// Rollouts of one group.
const GROUP_ROLLOUTS: usize = 4;

/// One batch of rollouts.
pub(crate) struct Plan {
    pub(crate) rollouts: Vec<Rollout>,
    /// In the order in which they are sent, each by its worker.
    pub(crate) requests: Vec<Request>,
}

/// A rollout, and what it is to give.
pub(crate) struct Rollout {
    pub(crate) id: String,
    pub(crate) case: Case,
    /// Of the attempt that ends it.
    pub(crate) attempt: u32,
    pub(crate) reward: f64,
    /// It gives no rows, however much of it has come.
    pub(crate) discarded: bool,
}

/// One request.
pub(crate) struct Request {
    pub(crate) worker: usize,
    pub(crate) about: v1::RolloutRef,
    pub(crate) event: Event,
    /// A newer attempt follows, so that it may be refused for that.
    pub(crate) superseded: bool,
}

impl Plan {
    /// The plan of a batch.
    pub(crate) fn new(seed: u64, batch: u64, rollouts: usize) -> Self {
        let mut chance = SplitMix64::new(seed ^ batch.wrapping_mul(0x9E6C_63D0_876A_68DD));
        let cases = cases(&mut chance, rollouts);
        let mut plan = Self { rollouts: Vec::new(), requests: Vec::new() };
        let mut waiting = Vec::new();
        for (place, (case, mentions)) in cases.into_iter().enumerate() {
            let rollout = Rollout {
                id: format!("b{batch}-r{place}"),
                case,
                attempt: u32::from(chance.below(8) == 0),
                reward: chance.below(64) as f64 / 16.0 - 1.0,
                discarded: chance.below(12) == 0,
            };
            let group = format!("b{batch}-g{}", place / GROUP_ROLLOUTS);
            waiting.push(requests(&rollout, &group, &mentions, &mut chance));
            plan.rollouts.push(rollout);
        }
        plan.requests = interleave(waiting, OPEN_ROLLOUTS, &mut chance);
        plan
    }
}

/// Cases in which everything comes, and how their calls are mentioned.
fn cases(chance: &mut SplitMix64, count: usize) -> Vec<(Case, Vec<Mention>)> {
    let mut cases = Vec::with_capacity(count);
    for story in stories(chance.next_u64(), count) {
        let (mut case, [mut mentions, _]) = (story.case, story.tellings);
        case.settings = Settings::default();
        let ids: Vec<String> = case.calls.iter().map(|call| call.id.clone()).collect();
        for call in &mut case.calls {
            if matches!(&call.link, Link::Parent(named) if !ids.contains(named)) {
                call.link = Link::Infer;
            }
        }
        settle(&case, &mut mentions);
        // Most are as small as they come; some are long enough to fill many blocks.
        let times = [1, 1, 5, 24][chance.below(4)];
        stretch(&mut case, &mut mentions, times);
        cases.push((case, mentions));
    }
    cases
}

/// Deltas only on what is the same text, on earlier calls, and one form of a delta for each call; the others in full.
fn settle(case: &Case, mentions: &mut [Mention]) {
    let mut told: Vec<Option<Form>> = vec![None; case.calls.len()];
    for mention in mentions {
        let call = &case.calls[mention.call];
        let Form::Delta { base, length } = &mention.form else { continue };
        let earlier = case.calls[..mention.call].iter().find(|call| call.id == *base);
        let fits = earlier.is_some_and(|base| base.full().starts_with(&call.prompt[..*length]));
        let form = told[mention.call].get_or_insert_with(|| mention.form.clone());
        if !fits || *form != mention.form {
            mention.form = Form::Full;
        }
    }
}

/// A rollout's requests, in order.
fn requests(rollout: &Rollout, group: &str, mentions: &[Mention], chance: &mut SplitMix64) -> Vec<Request> {
    let home = chance.below(WORKERS);
    let about = |attempt| v1::RolloutRef { group_id: group.to_owned(), attempt, ..service::about(RUN, &rollout.id) };
    let event = |mention: &Mention| Event::Call(wire::call(&rollout.case.calls[mention.call], &mention.form));
    let mut requests = Vec::new();
    for attempt in 0..rollout.attempt {
        let begun = mentions.iter().filter(|mention| mention.form == Form::Full).take(3);
        let events = std::iter::once(open(&rollout.id)).chain(begun.map(event));
        let superseded = |event| Request { worker: home, about: about(attempt), event, superseded: true };
        requests.extend(events.map(superseded));
    }
    let own = |event, worker| Request { worker, about: about(rollout.attempt), event, superseded: false };
    // Nobody else may speak of an attempt before the older ones have been told.
    let worker = |chance: &mut SplitMix64| match (rollout.attempt, chance.below(3)) {
        (0, 0) => chance.below(WORKERS),
        _ => home,
    };
    requests.push(own(open(&rollout.id), home));
    let first = requests.len();
    requests.extend(mentions.iter().map(|mention| own(event(mention), worker(chance))));
    let mut at = first;
    for event in ends(rollout) {
        at += chance.below(requests.len() + 1 - at);
        requests.insert(at, own(event, home));
        at += 1;
    }
    // Some are told twice, at once or much later.
    for _ in 0..requests.len() / 8 {
        let which = first + chance.below(requests.len() - first);
        let again = own(requests[which].event.clone(), requests[which].worker);
        let place = which + 1 + chance.below(requests.len() - which);
        requests.insert(place, again);
    }
    requests
}

/// Agents, then the end: a reward and a seal, both in one, or a discard.
fn ends(rollout: &Rollout) -> Vec<Event> {
    let mut agents: Vec<&str> = rollout.case.calls.iter().map(|call| call.agent.as_str()).collect();
    agents.sort_unstable();
    agents.dedup();
    let mut ends = Vec::new();
    for agent_id in agents.iter().map(|agent| (*agent).to_owned()) {
        ends.push(Event::AgentStart(v1::AgentStart { agent_id: agent_id.clone(), ..v1::AgentStart::default() }));
        let status = AgentStatus::Settled.into();
        ends.push(Event::AgentEnd(v1::AgentEnd { agent_id, status, ..v1::AgentEnd::default() }));
    }
    if rollout.discarded {
        let disposition = DiscardDisposition::Final.into();
        ends.push(Event::Discard(v1::Discard { reason: "planned".to_owned(), disposition }));
        return ends;
    }
    let expected_calls = Some(rollout.case.calls.len() as u64);
    let seal = v1::Seal { kept: wire::kept(&rollout.case), expected_calls };
    // Some are told before the reward, the others with it.
    let mut credits = credit::credits(&rollout.case);
    let with_it = credits.split_off(credits.len() / 2);
    ends.extend(credits.into_iter().map(Event::Credit));
    let reward = v1::Reward { credits: with_it, ..service::reward(rollout.reward) };
    match rollout.case.calls.len() % 3 {
        0 => ends.push(Event::Finish(v1::Finish { seal: Some(seal), reward: Some(reward) })),
        1 => ends.extend([Event::Reward(reward), Event::Seal(seal)]),
        _ => ends.extend([Event::Seal(seal), Event::Reward(reward)]),
    }
    ends
}

fn open(rollout: &str) -> Event {
    let tags = [("rollout".to_owned(), rollout.to_owned()), ("suite".to_owned(), "crash".to_owned())];
    Event::Open(v1::Open { group_size: Some(GROUP_ROLLOUTS as u32), tags: tags.into_iter().collect() })
}
