//! A service driven at random: late, double, conflicting and broken reports, attempts, deadlines, trainers that come and go.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt;
use hedgerow::forest::digest::Digest;
use hedgerow::log::Log;
use hedgerow::log::memory::MemoryLog;
use hedgerow::proto::v1::report_request::Event;
use hedgerow::proto::v1::subscribe_request::Request;
use hedgerow::proto::v1::{self, prompt};
use hedgerow::store::image::Image;

use crate::queue_credit::Dice;
use crate::queue_taker::{Taker, finish};
use crate::service::{TestService, Trainer, Worker, call, ids, reward, subscription};

const ROLLOUTS: u64 = 6;

/// What the harness knows of one rollout: the ids of each call, and what it sent of it.
#[derive(Default)]
struct Told {
    attempt: u32,
    texts: BTreeMap<String, (Vec<u32>, v1::Call)>,
    /// Calls that others may rest on already, and that are sent later.
    late: Vec<v1::Call>,
}

type Asked = tokio::task::JoinHandle<()>;

/// A service, and who uses it.
pub(crate) struct Drive {
    service: TestService,
    log: Arc<MemoryLog>,
    admin: v1::admin_service_client::AdminServiceClient<tonic::transport::Channel>,
    dice: Dice,
    workers: Vec<Worker>,
    unanswered: Vec<(usize, u64)>,
    /// What operators asked and was not answered.
    asked: Vec<Asked>,
    takers: Vec<Option<(Taker, Vec<String>)>>,
    told: BTreeMap<(u64, u64), Told>,
    /// Units that some trainer has had.
    seen: Vec<String>,
    /// Units that some trainer was told are undeliverable.
    undeliverable: Vec<String>,
}

impl Drive {
    pub(crate) async fn start(log: Arc<MemoryLog>, dice: Dice) -> Self {
        let service = TestService::start_on(log.clone()).await;
        let workers = vec![service.worker().await, service.worker().await];
        let admin = service.admin().await;
        let takers = vec![None, None, None, None];
        let (unanswered, asked, told) = (Vec::new(), Vec::new(), BTreeMap::new());
        let (seen, undeliverable) = (Vec::new(), Vec::new());
        Self { service, log, admin, dice, workers, unanswered, asked, takers, told, seen, undeliverable }
    }

    fn one_in(&mut self, bound: u64) -> bool {
        self.dice.below(bound) == 0
    }

    fn some_ids(&mut self, most: u64) -> Vec<u32> {
        (0..self.dice.below(most)).map(|_| u32::try_from(self.dice.below(4)).unwrap()).collect()
    }

    /// Does so many things, then waits until all that was asked is answered.
    pub(crate) async fn steps(&mut self, count: usize) {
        for _ in 0..count {
            self.step().await;
        }
        self.answers().await;
    }

    async fn step(&mut self) {
        match self.dice.below(100) {
            0..=59 => self.report().await,
            60..=62 => self.service.clock.advance(Duration::from_secs(10 + self.dice.below(60))),
            63..=92 => self.trainer().await,
            93..=96 => self.release(),
            97..=98 => self.settings(),
            _ => self.run_ends(),
        }
        if self.one_in(6) {
            self.answers().await;
        }
    }

    async fn answers(&mut self) {
        let (workers, log) = (&mut self.workers, &self.log);
        for (worker, request) in std::mem::take(&mut self.unanswered) {
            durably(log, workers[worker].answer(request)).await;
        }
        for asked in std::mem::take(&mut self.asked) {
            durably(log, asked).await.expect("a request has an answer");
        }
    }

    /// An operator asks for something. It may be refused.
    fn ask<F: Future<Output: Send> + Send + 'static>(&mut self, request: F) {
        self.asked.push(tokio::spawn(async move { drop(request.await) }));
    }

    async fn report(&mut self) {
        let place = (self.dice.below(2), self.dice.below(ROLLOUTS));
        if self.one_in(25) {
            let told = self.told.entry(place).or_default();
            *told = Told { attempt: told.attempt + 1, ..Told::default() };
        }
        let told = self.told.entry(place).or_default();
        let older = u32::from(self.dice.below(20) == 0);
        let about = v1::RolloutRef {
            run_id: format!("r{}", place.0),
            group_id: if place.1 < 4 && self.dice.below(4) > 0 { format!("g{}", place.1 % 2) } else { String::new() },
            rollout_id: format!("x{}", place.1),
            attempt: told.attempt.saturating_sub(older),
        };
        let event = match self.dice.below(100) {
            0..=54 => Event::Call(self.call(place)),
            55..=59 => Event::Open(self.open()),
            60..=69 => Event::Seal(self.seal(place)),
            70..=79 => Event::Reward(self.reward()),
            80..=86 => finish([0.0, 1.0][usize::from(self.one_in(2))]),
            87..=89 => {
                let disposition = i32::try_from(self.dice.below(3)).unwrap();
                Event::Discard(v1::Discard { reason: "dice".to_owned(), disposition })
            }
            90..=93 => Event::AgentEnd(self.agent_end(place)),
            94..=96 => Event::AgentStart(v1::AgentStart { agent_id: "sub".to_owned(), ..v1::AgentStart::default() }),
            _ => Event::Heartbeat(v1::Heartbeat {}),
        };
        let worker = usize::try_from(self.dice.below(2)).unwrap();
        let request = self.workers[worker].send(&about, event).await;
        self.unanswered.push((worker, request));
    }

    fn open(&mut self) -> v1::Open {
        let group_size = self.one_in(2).then(|| 2 + u32::from(self.one_in(8)));
        let value = ["one", "other"][usize::from(self.one_in(4))];
        v1::Open { group_size, tags: [("tag".to_owned(), value.to_owned())].into() }
    }

    fn reward(&mut self) -> v1::Reward {
        reward([1.0, 1.0, 0.0, f64::NAN][usize::try_from(self.dice.below(4)).unwrap()])
    }

    fn agent(&mut self) -> &'static str {
        if self.one_in(3) { "sub" } else { "main" }
    }

    /// A call again, another call under its id, one that was held back, or a new one.
    fn call(&mut self, place: (u64, u64)) -> v1::Call {
        let (again, late) = (self.one_in(5), self.one_in(3));
        let pick = usize::try_from(self.dice.below(8)).unwrap();
        let told = self.told.entry(place).or_default();
        if late && let Some(call) = told.late.pop() {
            return call;
        }
        if again && let Some((_, call)) = told.texts.values().nth(pick) {
            let mut call = call.clone();
            if self.one_in(4) {
                call.generation_token_ids = ids(&[3; 5]);
                call.generation_logprobs = Some(crate::service::floats(&[-0.25; 5]));
            }
            return call;
        }
        self.new_call(place)
    }

    fn new_call(&mut self, place: (u64, u64)) -> v1::Call {
        let (agent, generation, suffix) = (self.agent(), self.some_ids(5), self.some_ids(80));
        let (rest, is_delta, wrong) = (self.dice.below(8), self.one_in(2), self.one_in(12));
        let (cut, link) = (self.dice.below(100), self.dice.below(10));
        let told = self.told.entry(place).or_default();
        let id = format!("c{}", told.texts.len());
        let base = told.texts.iter().nth(usize::try_from(rest).unwrap());
        let base = base.map(|(id, (text, _))| (id.clone(), text.clone()));
        let mut whole = base.as_ref().map(|(_, text)| text.clone()).unwrap_or_default();
        if cut < 20 {
            whole.truncate(whole.len() / 2);
        }
        let known = whole.len();
        whole.extend(&suffix);
        let mut call = call(&id, agent, self.dice.below(50), &whole, &generation);
        if let Some((base, _)) = base.filter(|_| is_delta) {
            let mut digest = Digest::of(&whole[..known]).0.to_vec();
            digest[0] ^= u8::from(wrong);
            let base = v1::Base { call_id: base, length_tokens: known as u64, digest: digest.into() };
            let delta = v1::Delta { base: Some(base), suffix_token_ids: ids(&suffix) };
            call.prompt = Some(v1::Prompt { prompt: Some(prompt::Prompt::Delta(delta)) });
        }
        call.link = match link {
            0 => Some(v1::link::Link::Root(v1::RootLink {})),
            1 => Some(v1::link::Link::ParentCallId(format!("c{rest}"))),
            _ => None,
        }
        .map(|link| v1::Link { link: Some(link) });
        call.policy = if link == 2 { "critic".to_owned() } else { String::new() };
        whole.extend(&generation);
        let held_back = self.one_in(6);
        let told = self.told.entry(place).or_default();
        told.texts.insert(id, (whole, call.clone()));
        if held_back {
            told.late.push(call);
            return self.call_or_heartbeat(place);
        }
        call
    }

    /// Something else in the place of a call that is held back.
    fn call_or_heartbeat(&mut self, place: (u64, u64)) -> v1::Call {
        let pick = usize::try_from(self.dice.below(8)).unwrap();
        let told = self.told.entry(place).or_default();
        told.texts.values().nth(pick).map_or_else(|| call("none", "main", 0, &[1], &[]), |(_, call)| call.clone())
    }

    fn kept(&mut self, place: (u64, u64)) -> Vec<String> {
        let mut kept: Vec<String> = self.told.entry(place).or_default().texts.keys().cloned().collect();
        kept.retain(|_| self.dice.below(4) > 0);
        kept
    }

    fn seal(&mut self, place: (u64, u64)) -> v1::Seal {
        let list = v1::CallList { call_ids: self.kept(place) };
        let kept = self.one_in(2).then(|| v1::KeptCalls { agents: [("main".to_owned(), list)].into() });
        v1::Seal { kept, expected_calls: self.one_in(4).then(|| self.dice.below(8)) }
    }

    fn agent_end(&mut self, place: (u64, u64)) -> v1::AgentEnd {
        let kept = self.one_in(2).then(|| v1::CallList { call_ids: self.kept(place) });
        let status = v1::AgentStatus::Settled.into();
        v1::AgentEnd { agent_id: "sub".to_owned(), status, kept, ..v1::AgentEnd::default() }
    }

    /// A trainer comes, goes, acknowledges, gives back, or is only alive.
    async fn trainer(&mut self) {
        let at = usize::try_from(self.dice.below(4)).unwrap();
        let Some((mut taker, mut holds)) = self.takers[at].take() else { return self.subscribe(at).await };
        while let Some(taken) = taker.take().now_or_never() {
            if taken.is_err() {
                return;
            }
        }
        holds.extend(taker.units.drain(..).map(|unit| unit.unit_id));
        let gone = taker.notices.drain(..).filter(|notice| notice.kind() == v1::UnitNoticeKind::Undeliverable);
        self.undeliverable.extend(gone.map(|notice| notice.unit_id));
        self.seen.extend(holds.iter().cloned());
        let pick = usize::try_from(self.dice.below(3)).unwrap();
        let of_any = self.one_in(4);
        let from = if of_any { &mut self.seen } else { &mut holds };
        let units: Vec<String> = from.drain(..pick.min(from.len())).collect();
        let going_on = match self.dice.below(10) {
            0 => return,
            1..=2 => {
                let delay = self.one_in(2).then_some(prost_types::Duration { seconds: 20, nanos: 0 });
                let nack = v1::Nack { unit_ids: units, reason: "dice".to_owned(), delay };
                durably(&self.log, taker.try_ack(Request::Nack(nack))).await.is_some()
            }
            3 => taker.trainer.requests.try_send(v1::SubscribeRequest { request: None }).is_ok() && self.one_in(2),
            _ => {
                let ack = Request::Ack(v1::Ack { unit_ids: units, seek_count: 0 });
                durably(&self.log, taker.try_ack(ack)).await.is_some()
            }
        };
        self.takers[at] = going_on.then_some((taker, holds));
    }

    async fn subscribe(&mut self, at: usize) {
        let (run, group) = (self.dice.below(2), self.dice.below(3));
        let settings = v1::ConsumerGroupSettings {
            policy: ["", "main", "critic"][usize::try_from(self.dice.below(3)).unwrap()].to_owned(),
            unit: [v1::Unit::Row, v1::Unit::Rollout][usize::from(self.one_in(2))].into(),
            max_row_tokens: [0, 0, 100][usize::try_from(self.dice.below(3)).unwrap()],
            start: [v1::StartPosition::Earliest, v1::StartPosition::Latest][usize::from(self.one_in(3))].into(),
            ..v1::ConsumerGroupSettings::default()
        };
        let subscription = v1::Subscription {
            consumer: ["", "one"][usize::from(self.one_in(2))].to_owned(),
            settings: self.one_in(2).then_some(settings),
            credit_tokens: [50, 500, u64::MAX][usize::try_from(self.dice.below(3)).unwrap()],
            held_unit_ids: self.seen.iter().take(2).cloned().collect(),
            ephemeral: self.one_in(8),
            ..subscription(&format!("r{run}"), &format!("g{group}"))
        };
        let channel = self.service.channel().await;
        let trainer = durably(&self.log, Trainer::subscribe(channel, subscription)).await;
        self.takers[at] = trainer.ok().map(|trainer| (Taker::of(trainer), vec![]));
    }

    fn release(&mut self) {
        let (of_any, drop) = (self.one_in(4), self.one_in(2));
        let pick = usize::try_from(self.dice.below(4)).unwrap();
        let units = if of_any { &self.seen } else { &self.undeliverable };
        let Some(unit_id) = units.iter().rev().nth(pick % units.len().max(1)).cloned() else { return };
        let run_id = unit_id.split('/').next().unwrap_or_default().to_owned();
        for group in 0..3 {
            let (run_id, unit_id, consumer_group) = (run_id.clone(), unit_id.clone(), format!("g{group}"));
            let mut admin = self.admin.clone();
            let request = v1::ReleaseUnitRequest { run_id, consumer_group, unit_id, drop };
            self.ask(async move { admin.release_unit(request).await });
        }
    }

    /// Creates or changes a run; either may be refused.
    fn settings(&mut self) {
        let seconds = |seconds| Some(prost_types::Duration { seconds, nanos: 0 });
        let declared = v1::ConsumerGroupSettings {
            start: [v1::StartPosition::Earliest, v1::StartPosition::Latest][usize::from(self.one_in(2))].into(),
            ..v1::ConsumerGroupSettings::default()
        };
        let consumer_group = format!("g{}", self.dice.below(4));
        let declaration = v1::ConsumerGroupDeclaration { consumer_group, settings: Some(declared) };
        let settings = v1::RunSettings {
            missing_call: [v1::MissingCallRule::Discard, v1::MissingCallRule::Finalise][usize::from(self.one_in(2))]
                .into(),
            broken_link: [v1::BrokenLinkRule::Infer, v1::BrokenLinkRule::Discard][usize::from(self.one_in(2))].into(),
            agents_without_list: i32::try_from(self.dice.below(3)).unwrap(),
            max_deliveries: Some(2),
            idle_timeout: seconds(200),
            missing_call_timeout: seconds(60),
            missing_parent_timeout: seconds(90),
            lease: seconds(100),
            consumer_groups: if self.one_in(2) { vec![declaration] } else { vec![] },
            ..v1::RunSettings::default()
        };
        let (run_id, settings) = (format!("r{}", self.dice.below(2)), Some(settings));
        let created = v1::CreateRunRequest { run_id: run_id.clone(), settings: settings.clone() };
        let update = v1::UpdateRunSettingsRequest { run_id, settings, expected_settings_version: 0 };
        let mut admin = self.admin.clone();
        self.ask(async move {
            if admin.create_run(created).await.is_err() {
                drop(admin.update_run_settings(update).await);
            }
        });
    }

    /// Deletes a run, which may not be there or not be empty.
    fn run_ends(&mut self) {
        let (run_id, force) = (format!("r{}", self.dice.below(2)), self.one_in(3));
        let mut admin = self.admin.clone();
        self.ask(async move { admin.delete_run(v1::DeleteRunRequest { run_id, force }).await });
    }

    /// Makes runs with short deadlines.
    pub(crate) async fn prepare(&mut self) {
        for _ in 0..2 {
            self.settings();
        }
        self.answers().await;
    }

    /// Stops the service; its state at the end.
    pub(crate) async fn stop(self) -> (Image, Dice) {
        let Self { service, log, workers, takers, dice, mut admin, .. } = self;
        drop((workers, takers));
        // What the end of a stream decides is a record: let the streams come to their ends.
        for _ in 0..20 {
            drop(durably(&log, admin.get_run(v1::GetRunRequest { run_id: "r0".to_owned() })).await);
        }
        drop(admin);
        let stopped = durably(&log, service.running.stop_and_look()).await;
        let sequencer = stopped.expect("the sequencing task has not failed");
        (sequencer.image(), dice)
    }
}

/// What something comes to while the log lets everything go.
pub(crate) async fn durably<F: Future>(log: &MemoryLog, future: F) -> F::Output {
    let mut future = std::pin::pin!(future);
    loop {
        tokio::select! {
            biased;
            output = &mut future => return output,
            () = tokio::task::yield_now() => log.make_durable(),
        }
    }
}

/// How many records a log has.
pub(crate) fn length(log: &MemoryLog) -> u64 {
    log.durable_through().borrow().0
}
