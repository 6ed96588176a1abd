//! Nothing leaves before what it was judged from is durable. The log holds its records back until a test lets them go; that
//! nothing has come is shown by what is durable already and goes on being answered on other streams.

use std::pin::pin;
use std::sync::Arc;

use futures_util::FutureExt;
use hedgerow::log::memory::MemoryLog;
use hedgerow::proto::v1::harness_service_client::HarnessServiceClient;
use hedgerow::proto::v1::report_request::Event;
use hedgerow::proto::v1::subscribe_request::Request;
use hedgerow::proto::v1::subscribe_response::Response;
use hedgerow::proto::v1::{self, AckOutcome, AnswerOutcome};

use crate::queue_taker::{Taker, finish, reason, row_id};
use crate::replay_drive::durably;
use crate::service::{TestService, Trainer, Worker, about, call, subscription};

/// A service whose log is held back, and a rollout in it that is durable.
struct Held {
    service: TestService,
    log: Arc<MemoryLog>,
    probe: Worker,
}

fn probed() -> (v1::RolloutRef, Event) {
    (about("probe", "x"), Event::Call(call("c", "main", 1, &[1], &[2])))
}

impl Held {
    async fn start() -> Self {
        let log = Arc::new(MemoryLog::held());
        let service = TestService::start_on(log.clone()).await;
        let probe = service.worker().await;
        let mut held = Self { service, log, probe };
        let (about, event) = probed();
        let mut worker = held.service.worker().await;
        let answer = held.durably(worker.report(&about, event)).await;
        assert_eq!(answer.outcome(), AnswerOutcome::Accepted);
        held.pass(1).await;
        held
    }

    /// Lets so many durable answers pass.
    async fn pass(&mut self, count: usize) {
        for _ in 0..count {
            let (about, event) = probed();
            assert_eq!(self.probe.report(&about, event).await.outcome(), AnswerOutcome::Duplicate);
        }
    }

    /// What something comes to while the log lets everything go.
    async fn durably<F: Future>(&self, future: F) -> F::Output {
        durably(&self.log, future).await
    }

    /// Shows that something does not come while the log holds its records, though others are answered; then what it comes to.
    async fn only_when_durable<F: Future>(&mut self, future: F) -> F::Output {
        let mut future = pin!(future);
        for _ in 0..30 {
            assert!(future.as_mut().now_or_never().is_none(), "it came before it was durable");
            self.pass(1).await;
        }
        self.durably(future).await
    }

    /// Waits until so many records more are in the log than there were.
    async fn logged(&mut self, before: hedgerow::log::Position, records: u64) {
        while self.service.running.store.last_position().0 < before.0 + records {
            self.pass(1).await;
        }
    }

    fn last(&self) -> hedgerow::log::Position {
        self.service.running.store.last_position()
    }

    /// Sends an event, and waits until its record is in the log.
    async fn send(&mut self, worker: &mut Worker, about: &v1::RolloutRef, event: Event) -> u64 {
        let before = self.last();
        let request_seq = worker.send(about, event).await;
        self.logged(before, 1).await;
        request_seq
    }

    /// A trainer of a group that is there.
    async fn trainer(&self, subscription: v1::Subscription) -> Trainer {
        self.durably(self.service.trainer(subscription)).await
    }

    /// A rollout of one row, durable.
    async fn row(&self, worker: &mut Worker, rollout: &str) -> String {
        let reference = about("run", rollout);
        self.durably(worker.report(&reference, Event::Call(call("c", "main", 1, &[1], &[2])))).await;
        self.durably(worker.report(&reference, finish(1.0))).await;
        row_id("run", rollout)
    }
}

/// The next message that is no heartbeat.
async fn news(trainer: &mut Trainer) -> Response {
    loop {
        let news = trainer.next().await.unwrap().unwrap();
        if !matches!(news, Response::Heartbeat(_)) {
            return news;
        }
    }
}

#[tokio::test]
async fn an_accepted_event_its_duplicate_and_its_conflict_wait() {
    let mut held = Held::start().await;
    let (mut one, mut two, mut three) =
        (held.service.worker().await, held.service.worker().await, held.service.worker().await);
    let reference = about("run", "x");
    let event = || Event::Call(call("c", "main", 1, &[1], &[2]));
    let accepted = held.send(&mut one, &reference, event()).await;
    let duplicate = two.send(&reference, event()).await;
    let conflict = three.send(&reference, Event::Call(call("c", "main", 1, &[1], &[3]))).await;
    for _ in 0..30 {
        assert!(one.receive().now_or_never().is_none(), "accepted");
        assert!(two.receive().now_or_never().is_none(), "duplicate");
        assert!(three.receive().now_or_never().is_none(), "conflict");
        held.pass(1).await;
    }
    assert_eq!(held.durably(one.answer(accepted)).await.outcome(), AnswerOutcome::Accepted);
    assert_eq!(held.durably(two.answer(duplicate)).await.outcome(), AnswerOutcome::Duplicate);
    assert_eq!(held.durably(three.answer(conflict)).await.refusal.unwrap().reason, "call_conflict");
}

#[tokio::test]
async fn a_heartbeat_and_a_refusal_wait_for_the_opening_that_they_were_judged_from() {
    let mut held = Held::start().await;
    let mut worker = held.service.worker().await;
    let reference = about("run", "x");
    let heartbeat = held.send(&mut worker, &reference, Event::Heartbeat(v1::Heartbeat {})).await;
    let answer = held.only_when_durable(worker.answer(heartbeat)).await;
    assert_eq!(answer.outcome(), AnswerOutcome::Accepted);
    held.send(&mut worker, &reference, finish(1.0)).await;
    let mut other = held.service.worker().await;
    let late = other.send(&reference, Event::Call(call("late", "main", 9, &[1], &[2]))).await;
    let answer = held.only_when_durable(other.answer(late)).await;
    assert_eq!(answer.refusal.map(|refusal| refusal.reason).as_deref().unwrap_or("already ended"), "rollout_finalised");
}

#[tokio::test]
async fn already_ended_waits_for_the_end() {
    let mut held = Held::start().await;
    let (mut one, mut two) = (held.service.worker().await, held.service.worker().await);
    let reference = about("run", "x");
    held.durably(one.report(&reference, Event::Call(call("c", "main", 1, &[1], &[2])))).await;
    let discard = Event::Discard(v1::Discard { reason: "test".to_owned(), disposition: 0 });
    held.send(&mut one, &reference, discard).await;
    let ended = two.send(&reference, Event::Call(call("d", "main", 2, &[1], &[2]))).await;
    let answer = held.only_when_durable(two.answer(ended)).await;
    assert_eq!(answer.outcome(), AnswerOutcome::AlreadyEnded);
    let newer = v1::RolloutRef { attempt: 1, ..reference.clone() };
    held.send(&mut one, &newer, Event::Heartbeat(v1::Heartbeat {})).await;
    let superseded = two.send(&reference, Event::Heartbeat(v1::Heartbeat {})).await;
    let answer = held.only_when_durable(two.answer(superseded)).await;
    assert_eq!(answer.refusal.unwrap().reason, "attempt_superseded");
}

#[tokio::test]
async fn a_batch_waits_for_its_last_record() {
    let mut held = Held::start().await;
    let mut client = HarnessServiceClient::new(held.service.channel().await);
    let request = |rollout| v1::ReportRequest {
        request_seq: 1,
        rollout: Some(about("run", rollout)),
        event: Some(Event::Call(call("c", "main", 1, &[1], &[2]))),
    };
    let requests = vec![request("x"), request("y"), request("x")];
    let batch = client.report_batch(v1::ReportBatchRequest { requests });
    let answers = held.only_when_durable(batch).await.unwrap().into_inner().answers;
    let outcomes: Vec<_> = answers.iter().map(v1::Answer::outcome).collect();
    assert_eq!(outcomes, [AnswerOutcome::Accepted, AnswerOutcome::Accepted, AnswerOutcome::Duplicate]);
}

#[tokio::test]
async fn notices_to_a_worker_wait() {
    let mut held = Held::start().await;
    let (mut one, mut two) = (held.service.worker().await, held.service.worker().await);
    let reference = about("run", "x");
    let digest = hedgerow::forest::digest::Digest::of(&[1, 2]).0;
    let base =
        v1::Base { call_id: "base".to_owned(), length_tokens: 2, digest: bytes::Bytes::copy_from_slice(&digest) };
    let delta = v1::Delta { base: Some(base), suffix_token_ids: crate::service::ids(&[5]) };
    let prompt = Some(v1::Prompt { prompt: Some(v1::prompt::Prompt::Delta(delta)) });
    let waiting = v1::Call { prompt, ..call("c", "main", 2, &[], &[9]) };
    held.durably(one.report(&reference, Event::Call(waiting))).await;
    held.send(&mut two, &reference, Event::Call(call("base", "main", 1, &[1], &[2]))).await;
    held.only_when_durable(one.receive()).await;
    assert_eq!(one.notices.len(), 1);
}

#[tokio::test]
async fn what_an_operator_is_answered_waits() {
    let mut held = Held::start().await;
    let mut admin = held.service.admin().await;
    let mut other = held.service.admin().await;
    let create = v1::CreateRunRequest { run_id: "run".to_owned(), settings: None };
    let get = || v1::GetRunRequest { run_id: "run".to_owned() };
    let before = held.last();
    let created = tokio::spawn(async move { admin.create_run(create).await.map(|_| admin) });
    held.logged(before, 1).await;
    let run = held.only_when_durable(other.get_run(get())).await.unwrap().into_inner().run.unwrap();
    assert_eq!(run.settings_version, 1);
    let mut admin = held.durably(created).await.unwrap().unwrap();

    let update =
        v1::UpdateRunSettingsRequest { run_id: "run".to_owned(), settings: None, expected_settings_version: 1 };
    held.only_when_durable(admin.update_run_settings(update)).await.unwrap();
    let mut worker = held.service.worker().await;
    held.row(&mut worker, "retained").await;
    held.durably(worker.report(&about("run", "x"), Event::Heartbeat(v1::Heartbeat {}))).await;
    let discard =
        v1::DiscardRolloutRequest { rollout: Some(about("run", "x")), ..v1::DiscardRolloutRequest::default() };
    held.only_when_durable(admin.discard_rollout(discard)).await.unwrap();
    let delete = v1::DeleteRunRequest { run_id: "run".to_owned(), force: true };
    let mut trainer = held.trainer(subscription("run", "trainers")).await;
    held.durably(trainer.unit()).await;
    let before = held.last();
    let deleted = tokio::spawn(async move { admin.delete_run(delete).await });
    held.logged(before, 1).await;
    for _ in 0..30 {
        assert!(!deleted.is_finished(), "deleted");
        let end = trainer.next().now_or_never();
        assert!(matches!(end, None | Some(Ok(Some(Response::Heartbeat(_))))), "{end:?}");
        assert!(other.get_run(get()).now_or_never().is_none(), "whether it is there");
        held.pass(1).await;
    }
    held.durably(deleted).await.unwrap().unwrap();
    assert_eq!(held.durably(trainer.next()).await.unwrap_err().code(), tonic::Code::NotFound);
}

#[tokio::test]
async fn a_subscription_and_its_refusal_wait_for_the_group() {
    let mut held = Held::start().await;
    let channel = held.service.channel().await;
    let mut trainer =
        held.only_when_durable(Trainer::subscribe(channel.clone(), subscription("run", "trainers"))).await.unwrap();
    assert!(trainer.subscribed.created);
    let declared = v1::ConsumerGroupDeclaration { consumer_group: "declared".to_owned(), settings: None };
    let settings = Some(v1::RunSettings { consumer_groups: vec![declared], ..v1::RunSettings::default() });
    let mut admin = held.service.admin().await;
    let before = held.last();
    let create = v1::CreateRunRequest { run_id: "other".to_owned(), settings };
    let created = tokio::spawn(async move { admin.create_run(create).await });
    held.logged(before, 1).await;
    let rollouts = v1::ConsumerGroupSettings { unit: v1::Unit::Rollout.into(), ..v1::ConsumerGroupSettings::default() };
    let conflict = v1::Subscription { settings: Some(rollouts), ..subscription("other", "declared") };
    let refused = held.only_when_durable(Trainer::subscribe(channel, conflict)).await.err().unwrap();
    assert_eq!(reason(&refused), "consumer_group_conflict");
    held.durably(created).await.unwrap().unwrap();
    let update = v1::UpdateRunSettingsRequest {
        run_id: "other".to_owned(),
        settings: Some(v1::RunSettings { trained_policies: vec!["actor".to_owned()], ..v1::RunSettings::default() }),
        expected_settings_version: 1,
    };
    let mut admin = held.service.admin().await;
    let before = held.last();
    let updated = tokio::spawn(async move { admin.update_run_settings(update).await });
    held.logged(before, 1).await;
    let critic = v1::ConsumerGroupSettings { policy: "critic".to_owned(), ..v1::ConsumerGroupSettings::default() };
    let untrained = v1::Subscription { settings: Some(critic), ..subscription("other", "critic") };
    let channel = held.service.channel().await;
    let refused = held.only_when_durable(Trainer::subscribe(channel, untrained)).await.err().unwrap();
    assert_eq!(reason(&refused), "invalid_value");
    held.durably(updated).await.unwrap().unwrap();
    assert!(news(&mut trainer).now_or_never().is_none());
}

#[tokio::test]
async fn units_and_acknowledgements_wait() {
    let mut held = Held::start().await;
    let mut worker = held.service.worker().await;
    let mut one = held.trainer(subscription("run", "trainers")).await;
    let mut two = held.trainer(v1::Subscription { credit_tokens: 0, ..subscription("run", "trainers") }).await;
    let reference = about("run", "x");
    held.durably(worker.report(&reference, Event::Call(call("c", "main", 1, &[1], &[2])))).await;
    let finished = held.send(&mut worker, &reference, finish(1.0)).await;
    let unit = row_id("run", "x");
    let Response::UnitPart(part) = held.only_when_durable(news(&mut one)).await else { panic!("no unit") };
    assert_eq!(part.unit_id, unit);
    held.durably(worker.answer(finished)).await;

    let ack = || Request::Ack(v1::Ack { unit_ids: vec![unit.clone(), "run/no/0/main/c".to_owned()], seek_count: 0 });
    let before = held.last();
    one.send(ack()).await;
    held.logged(before, 1).await;
    two.send(ack()).await;
    let late = worker.send(&reference, Event::Call(call("c", "main", 1, &[1], &[2]))).await;
    for _ in 0..30 {
        assert!(news(&mut one).now_or_never().is_none(), "acknowledged");
        assert!(news(&mut two).now_or_never().is_none(), "acknowledged by another");
        held.pass(1).await;
    }
    assert_eq!(worker.answer(late).await.outcome(), AnswerOutcome::Duplicate, "not retired while the ack may be lost");
    for trainer in [&mut one, &mut two] {
        let Response::AckResult(result) = held.durably(news(trainer)).await else { panic!("no result") };
        assert_eq!(result.entries[0].outcome(), AckOutcome::Acknowledged);
        assert_eq!(result.entries[1].outcome(), AckOutcome::Unknown);
        assert!(result.durable);
    }
}

#[tokio::test]
async fn the_end_of_a_unit_that_nobody_acknowledged_waits() {
    let mut held = Held::start().await;
    let mut admin = held.service.admin().await;
    let settings = Some(v1::RunSettings { max_deliveries: Some(1), ..v1::RunSettings::default() });
    held.durably(admin.create_run(v1::CreateRunRequest { run_id: "run".to_owned(), settings })).await.unwrap();
    let mut worker = held.service.worker().await;
    let mut trainer = held.trainer(subscription("run", "trainers")).await;
    let unit = held.row(&mut worker, "x").await;
    held.durably(trainer.unit()).await;
    let before = held.last();
    let nack = v1::Nack { unit_ids: vec![unit.clone()], ..v1::Nack::default() };
    trainer.send(Request::Nack(nack)).await;
    held.logged(before, 1).await;
    let first = held.only_when_durable(news(&mut trainer)).await;
    let second = held.durably(news(&mut trainer)).await;
    assert!(matches!(first, Response::UnitNotice(_)), "{first:?}");
    assert!(matches!(second, Response::AckResult(_)), "{second:?}");
    let release = v1::ReleaseUnitRequest {
        run_id: "run".to_owned(),
        consumer_group: "trainers".to_owned(),
        unit_id: unit,
        drop: false,
    };
    let before = held.last();
    let released = tokio::spawn(async move { admin.release_unit(release).await });
    held.logged(before, 1).await;
    let again = held.only_when_durable(news(&mut trainer)).await;
    assert!(matches!(again, Response::UnitPart(_)), "{again:?}");
    held.durably(released).await.unwrap().unwrap();
}

#[tokio::test]
async fn a_trainer_that_dies_is_let_go_though_the_log_stands_still() {
    let mut held = Held::start().await;
    let mut worker = held.service.worker().await;
    let mut victim = held.trainer(subscription("run", "trainers")).await;
    let unit = held.row(&mut worker, "x").await;
    held.durably(victim.unit()).await;
    let mut idle = Taker::of(held.trainer(subscription("run", "trainers")).await);
    worker.send(&about("run", "y"), Event::Heartbeat(v1::Heartbeat {})).await;
    victim.send(Request::Ack(v1::Ack { unit_ids: vec!["run/no/0/main/c".to_owned()], seek_count: 0 })).await;
    held.pass(1).await;
    drop(victim);
    assert_eq!(idle.unit().await.unit_id, unit);
}

#[tokio::test]
async fn what_is_shown_of_a_rollout_waits() {
    let mut held = Held::start().await;
    let mut worker = held.service.worker().await;
    let reference = about("run", "x");
    held.durably(worker.report(&reference, Event::Call(call("c", "main", 1, &[1], &[2])))).await;
    held.send(&mut worker, &reference, Event::Call(call("d", "main", 2, &[1, 2], &[3]))).await;
    let mut inspect = held.service.inspect().await;
    let request = v1::GetRolloutRequest {
        run_id: "run".to_owned(),
        rollout_id: "x".to_owned(),
        ..v1::GetRolloutRequest::default()
    };
    let shown = held.only_when_durable(inspect.get_rollout(request)).await.unwrap().into_inner();
    assert_eq!(shown.calls.len(), 2);
}
