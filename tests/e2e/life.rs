//! A rollout's life (RULES section 4), line by line: what these tests share, and the events that come again.

use hedgerow::error::{Code, Reason};
use hedgerow::proto::v1::inspect_service_client::InspectServiceClient;
use hedgerow::proto::v1::report_request::Event;
use hedgerow::proto::v1::{self, AnswerOutcome};
use tonic::transport::Channel;

use crate::service::{TestService, Worker, about, call, reward, seal};

/// Looks at a rollout before a wait for it is given up. Each is a round trip, in which every task has its turn.
const LOOKS_MAX: usize = 2000;

/// A service, a worker whose one stream all reports of a test go through, and a window on rollouts.
pub(crate) struct Life {
    pub(crate) service: TestService,
    pub(crate) worker: Worker,
    inspect: InspectServiceClient<Channel>,
}

impl Life {
    /// With the run `run` at its defaults.
    pub(crate) async fn start() -> Self {
        Self::start_with(v1::RunSettings::default()).await
    }

    /// With the run `run` at these settings.
    pub(crate) async fn start_with(settings: v1::RunSettings) -> Self {
        let service = TestService::start().await;
        service.create_run("run", settings).await;
        Self::on(service).await
    }

    pub(crate) async fn on(service: TestService) -> Self {
        let (worker, inspect) = (service.worker().await, service.inspect().await);
        Self { service, worker, inspect }
    }

    /// The rollout as `GetRollout` shows it.
    pub(crate) async fn look(&mut self, about: &v1::RolloutRef) -> Result<v1::GetRolloutResponse, tonic::Status> {
        let request = v1::GetRolloutRequest {
            run_id: about.run_id.clone(),
            rollout_id: about.rollout_id.clone(),
            ..v1::GetRolloutRequest::default()
        };
        self.inspect.get_rollout(request).await.map(tonic::Response::into_inner)
    }

    pub(crate) async fn shown(&mut self, about: &v1::RolloutRef) -> v1::GetRolloutResponse {
        self.look(about).await.expect("the rollout is there")
    }

    pub(crate) async fn summary(&mut self, about: &v1::RolloutRef) -> v1::RolloutSummary {
        self.shown(about).await.summary.expect("a summary")
    }

    pub(crate) async fn is_unknown(&mut self, about: &v1::RolloutRef) -> bool {
        self.look(about).await.is_err_and(|status| status.code() == tonic::Code::NotFound)
    }

    /// Looks again and again until the rollout is so; a clock's work is done by another task.
    pub(crate) async fn until(
        &mut self,
        about: &v1::RolloutRef,
        is_so: impl Fn(&v1::GetRolloutResponse) -> bool,
    ) -> v1::GetRolloutResponse {
        for _ in 0..LOOKS_MAX {
            let shown = self.shown(about).await;
            if is_so(&shown) {
                return shown;
            }
            tokio::task::yield_now().await;
        }
        panic!("it never came so: {:#?}", self.shown(about).await);
    }

    pub(crate) async fn until_ended(&mut self, about: &v1::RolloutRef) -> v1::Ended {
        let shown = self.until(about, |shown| ended(shown).is_some()).await;
        ended(&shown).expect("it has ended")
    }

    pub(crate) async fn until_finalised(&mut self, about: &v1::RolloutRef) -> v1::GetRolloutResponse {
        self.until(about, |shown| state(shown) == v1::RolloutState::Finalised).await
    }

    /// Gives every task its turn some times, for what must not happen.
    pub(crate) async fn settle(&mut self, about: &v1::RolloutRef) -> v1::GetRolloutResponse {
        for _ in 0..20 {
            self.shown(about).await;
            tokio::task::yield_now().await;
        }
        self.shown(about).await
    }

    /// The event is taken.
    pub(crate) async fn accepts(&mut self, about: &v1::RolloutRef, event: Event) -> v1::Answer {
        let answer = self.worker.report(about, event.clone()).await;
        assert_eq!(answer.outcome(), AnswerOutcome::Accepted, "{answer:#?}\n{event:#?}");
        answer
    }

    /// The event is known, and changes nothing.
    pub(crate) async fn repeats(&mut self, about: &v1::RolloutRef, event: Event) -> v1::Answer {
        let before = self.shown(about).await;
        let answer = self.worker.report(about, event.clone()).await;
        assert_eq!(answer.outcome(), AnswerOutcome::Duplicate, "{answer:#?}\n{event:#?}");
        assert_eq!(still(&self.shown(about).await), still(&before), "{event:#?}");
        assert_eq!(answer.totals, before.summary.and_then(|summary| summary.totals));
        answer
    }

    /// The event is refused for this reason, and nothing else has changed than that this is counted.
    pub(crate) async fn refuses(
        &mut self,
        about: &v1::RolloutRef,
        event: Event,
        reason: Reason,
        field: &str,
    ) -> v1::Refusal {
        let before = self.look(about).await;
        let answer = self.worker.report(about, event.clone()).await;
        assert_eq!(answer.outcome(), AnswerOutcome::Refused, "{answer:#?}\n{event:#?}");
        assert_eq!((&answer.ended, &answer.verdict, &answer.totals, &answer.seal), (&None, &None, &None, &None));
        let refusal = answer.refusal.expect("a refusal says why");
        assert_eq!((refusal.reason.as_str(), refusal.field.as_str()), (reason.as_str(), field), "{refusal:#?}");
        assert_eq!(refusal.code, number(reason.code()), "{refusal:#?}");
        assert!(refusal.message.contains(' '), "a sentence for people: {refusal:?}");
        match before {
            Err(status) => {
                assert_eq!(status.code(), tonic::Code::NotFound);
                assert!(self.is_unknown(about).await, "it opened a rollout: {event:#?}");
            }
            Ok(before) => {
                let after = self.shown(about).await;
                assert_eq!(still(&after), still(&before), "{event:#?}");
            }
        }
        refusal
    }

    /// The rollout has ended, as the answer says.
    pub(crate) async fn has_ended(&mut self, about: &v1::RolloutRef, event: Event) -> v1::Ended {
        let answer = self.worker.report(about, event.clone()).await;
        assert_eq!(answer.outcome(), AnswerOutcome::AlreadyEnded, "{answer:#?}\n{event:#?}");
        assert_eq!((&answer.refusal, &answer.verdict, &answer.seal), (&None, &None, &None));
        answer.ended.expect("it says how")
    }

    /// A rollout of its own goes from its first call to its row on the same stream.
    pub(crate) async fn others_go_on(&mut self, name: &str) {
        let other = about("run", &format!("other than {name}"));
        self.accepts(&other, Event::Call(call("a", "main", 1, &[1, 2], &[3]))).await;
        let answer = self.accepts(&other, finish(1.0)).await;
        assert!(answer.seal.expect("a seal's answer").finalised);
        assert_eq!(self.shown(&other).await.rows.len(), 1);
    }
}

/// The number that a code has on the wire, written out for once.
fn number(code: Code) -> i32 {
    match code {
        Code::InvalidArgument => 3,
        Code::NotFound => 5,
        Code::AlreadyExists => 6,
        Code::Aborted => 10,
        Code::ResourceExhausted => 8,
        Code::FailedPrecondition => 9,
        Code::Unimplemented => 12,
        Code::Internal => 13,
        Code::Unavailable => 14,
    }
}

/// What neither a refusal nor a repeat may change of a rollout.
fn still(shown: &v1::GetRolloutResponse) -> v1::GetRolloutResponse {
    let mut shown = shown.clone();
    let summary = shown.summary.as_mut().expect("a summary");
    summary.last_event_time = None;
    summary.next_deadline = None;
    summary.refused_requests = 0;
    summary.conflicted = false;
    // What nobody has taken is known of all the same: that it came.
    for missing in shown.status.iter_mut().flat_map(|status| &mut status.missing) {
        if missing.state() == v1::MissingCallState::RefusedAwaitingResend {
            missing.set_state(v1::MissingCallState::NeverCame);
        }
    }
    shown
}

pub(crate) fn ended(shown: &v1::GetRolloutResponse) -> Option<v1::Ended> {
    shown.summary.as_ref().and_then(|summary| summary.ended.clone())
}

pub(crate) fn state(shown: &v1::GetRolloutResponse) -> v1::RolloutState {
    shown.summary.as_ref().map(v1::RolloutSummary::state).unwrap_or_default()
}

/// The calls of its rows, walk by walk.
pub(crate) fn walks(shown: &v1::GetRolloutResponse) -> Vec<String> {
    shown.rows.iter().map(|row| row.walk_call_ids.join(" ")).collect()
}

pub(crate) fn kept(shown: &v1::GetRolloutResponse) -> Vec<&str> {
    shown.calls.iter().filter(|call| call.kept).map(|call| call.call_id.as_str()).collect()
}

pub(crate) fn seconds(seconds: i64) -> Option<prost_types::Duration> {
    Some(prost_types::Duration { seconds, nanos: 0 })
}

pub(crate) fn list(calls: &[&str]) -> v1::CallList {
    v1::CallList { call_ids: calls.iter().map(|call| (*call).to_owned()).collect() }
}

pub(crate) fn finish(value: f64) -> Event {
    Event::Finish(v1::Finish { seal: None, reward: Some(reward(value)) })
}

pub(crate) fn finish_with(seal: v1::Seal, value: f64) -> Event {
    Event::Finish(v1::Finish { seal: Some(seal), reward: Some(reward(value)) })
}

pub(crate) fn expecting(calls: u64) -> v1::Seal {
    v1::Seal { kept: None, expected_calls: Some(calls) }
}

pub(crate) fn discard(reason: &str, disposition: v1::DiscardDisposition) -> Event {
    Event::Discard(v1::Discard { reason: reason.to_owned(), disposition: disposition.into() })
}

pub(crate) fn heartbeat() -> Event {
    Event::Heartbeat(v1::Heartbeat {})
}

pub(crate) fn tags(pairs: &[(&str, &str)]) -> Event {
    let tags = pairs.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect();
    Event::Open(v1::Open { group_size: None, tags })
}

pub(crate) fn agent_start(agent: &str, resumption: u32) -> v1::AgentStart {
    v1::AgentStart { agent_id: agent.to_owned(), resumption, ..v1::AgentStart::default() }
}

pub(crate) fn agent_end(agent: &str, resumption: u32, kept: Option<&[&str]>) -> v1::AgentEnd {
    v1::AgentEnd {
        agent_id: agent.to_owned(),
        resumption,
        status: v1::AgentStatus::Settled.into(),
        kept: kept.map(list),
        answers_read_agent_ids: Vec::new(),
    }
}

pub(crate) fn in_group(rollout: &str, group: &str) -> v1::RolloutRef {
    v1::RolloutRef { group_id: group.to_owned(), ..about("run", rollout) }
}

pub(crate) fn attempt(about: &v1::RolloutRef, attempt: u32) -> v1::RolloutRef {
    v1::RolloutRef { attempt, ..about.clone() }
}

/// A call that says whom it continues.
pub(crate) fn naming(parent: &str, call: v1::Call) -> v1::Call {
    v1::Call { link: Some(v1::Link { link: Some(v1::link::Link::ParentCallId(parent.to_owned())) }), ..call }
}

/// A call whose prompt is all of `base`, a call with these ids, and then `suffix`.
pub(crate) fn on_base(base: &str, base_ids: &[u32], suffix: &[u32], call: v1::Call) -> v1::Call {
    let base = v1::Base {
        call_id: base.to_owned(),
        length_tokens: base_ids.len() as u64,
        digest: hedgerow::forest::digest::Digest::of(base_ids).0.to_vec().into(),
    };
    let delta = v1::Delta { base: Some(base), suffix_token_ids: crate::service::ids(suffix) };
    v1::Call { prompt: Some(v1::Prompt { prompt: Some(v1::prompt::Prompt::Delta(delta)) }), ..call }
}

/// One event of every kind that stays, in an order in which the rollout is open before the seal and finalised by the reward.
pub(crate) fn one_of_each() -> Vec<Event> {
    let mut start = agent_start("sub", 0);
    start.parent_agent_id = "main".to_owned();
    start.spawning_call_id = "a".to_owned();
    start.origin = Some(v1::agent_start::Origin::ForkOfCallId("a".to_owned()));
    start.profile = "searcher".to_owned();
    start.model = "m-1".to_owned();
    let mut end = agent_end("sub", 0, Some(&["b"]));
    end.answers_read_agent_ids = vec!["main".to_owned()];
    let mut b = on_base("a", &[1, 2, 3, 4], &[5], call("b", "sub", 2, &[], &[6]));
    b.parent_agent_id = "main".to_owned();
    let mut rewarded = reward(0.5);
    rewarded.components.insert("tests".to_owned(), 1.0);
    vec![
        tags(&[("task", "t1")]),
        Event::AgentStart(start),
        Event::Call(call("a", "main", 1, &[1, 2], &[3, 4])),
        Event::Call(b),
        Event::AgentEnd(end),
        Event::Seal(v1::Seal { expected_calls: Some(2), ..seal(&[("main", &["a"])]) }),
        Event::Reward(rewarded),
    ]
}

#[tokio::test]
async fn the_same_event_again_is_a_duplicate_at_any_time() {
    let mut life = Life::start().await;
    let rollout = about("run", "one");
    let events = one_of_each();
    for (sent, event) in events.iter().enumerate() {
        life.accepts(&rollout, event.clone()).await;
        for again in &events[..=sent] {
            let answer = life.repeats(&rollout, again.clone()).await;
            assert_eq!(answer.verdict.is_some(), matches!(again, Event::Call(_)));
            assert_eq!(answer.seal.is_some(), matches!(again, Event::Seal(_)));
        }
    }
    assert_eq!(state(&life.shown(&rollout).await), v1::RolloutState::Finalised);
    // Both at once are no news either, and a sign of life is always welcome.
    let (Event::Seal(seal), Event::Reward(reward)) = (events[5].clone(), events[6].clone()) else { unreachable!() };
    let answer = life.repeats(&rollout, Event::Finish(v1::Finish { seal: Some(seal), reward: Some(reward) })).await;
    assert!(answer.seal.unwrap().finalised);
    life.accepts(&rollout, heartbeat()).await;
    assert!(!life.summary(&rollout).await.conflicted);
    life.others_go_on("one").await;
}

#[tokio::test]
async fn seal_and_reward_come_in_either_order_or_at_once() {
    let mut life = Life::start().await;
    let orders: [(&str, Vec<Event>); 3] = [
        ("sealed first", vec![Event::Seal(v1::Seal::default()), Event::Reward(reward(1.0))]),
        ("rewarded first", vec![Event::Reward(reward(1.0)), Event::Seal(v1::Seal::default())]),
        ("at once", vec![finish(1.0)]),
    ];
    for (name, ends) in orders {
        let rollout = about("run", name);
        life.accepts(&rollout, Event::Call(call("a", "main", 1, &[1], &[2]))).await;
        for (at, event) in ends.iter().enumerate() {
            assert_eq!(state(&life.shown(&rollout).await) == v1::RolloutState::Open, at == 0);
            life.accepts(&rollout, event.clone()).await;
            life.repeats(&rollout, event.clone()).await;
        }
        assert_eq!(state(&life.shown(&rollout).await), v1::RolloutState::Finalised, "{name}");
        assert_eq!(walks(&life.shown(&rollout).await), ["a"]);
    }
}

#[tokio::test]
async fn any_event_opens_a_rollout_and_the_first_is_no_duplicate() {
    let mut life = Life::start().await;
    let mut events = one_of_each();
    events.extend([heartbeat(), finish(1.0), Event::Open(v1::Open::default())]);
    for (at, event) in events.into_iter().enumerate() {
        let rollout = about("a new run", &format!("{at}"));
        life.accepts(&rollout, event).await;
        assert_eq!(life.summary(&rollout).await.rollout, Some(rollout));
    }
    let rollout = about("a new run", "discarded");
    life.accepts(&rollout, discard("no use", v1::DiscardDisposition::Final)).await;
    assert_eq!(life.until_ended(&rollout).await.reason, "no use");
}
