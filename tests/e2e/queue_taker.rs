//! A trainer that keeps whatever comes, and rollouts that become rows of a given length.

use std::collections::VecDeque;
use std::time::Duration;

use hedgerow::proto::v1::report_request::Event;
use hedgerow::proto::v1::subscribe_request::Request;
use hedgerow::proto::v1::subscribe_response::Response;
use hedgerow::proto::v1::{self, AckOutcome, AnswerOutcome, WaitingFor};

use crate::service::{TestService, Trainer, Unit, Worker, about, call, reward};

/// After so long without a message that is waited for, a test has failed.
const PATIENCE: Duration = Duration::from_secs(30);

/// A trainer, and all that has come to it.
pub(crate) struct Taker {
    pub(crate) trainer: Trainer,
    part: Unit,
    pub(crate) units: VecDeque<Unit>,
    pub(crate) notices: VecDeque<v1::UnitNotice>,
    acks: VecDeque<v1::AckResult>,
    heartbeats: VecDeque<v1::SubscriptionHeartbeat>,
    fences: u64,
}

impl Taker {
    pub(crate) async fn join(service: &TestService, subscription: v1::Subscription) -> Self {
        Self::of(service.trainer(subscription).await)
    }

    pub(crate) fn of(trainer: Trainer) -> Self {
        Self {
            trainer,
            part: Unit::default(),
            units: VecDeque::new(),
            notices: VecDeque::new(),
            acks: VecDeque::new(),
            heartbeats: VecDeque::new(),
            fences: 0,
        }
    }

    /// Waits for one message and keeps it. Safe to drop while waiting.
    pub(crate) async fn take(&mut self) -> Result<(), Option<tonic::Status>> {
        let next = tokio::time::timeout(PATIENCE, self.trainer.next()).await.expect("something comes");
        match next.map_err(Some)?.ok_or(None)? {
            Response::UnitPart(part) => {
                let last = part.last;
                self.part.take(part);
                if last {
                    self.units.push_back(std::mem::take(&mut self.part));
                }
            }
            Response::AckResult(result) => self.acks.push_back(result),
            Response::UnitNotice(notice) => self.notices.push_back(notice),
            Response::Heartbeat(heartbeat) => self.heartbeats.push_back(heartbeat),
            Response::Subscribed(_) => panic!("subscribed twice"),
        }
        Ok(())
    }

    /// The next unit.
    pub(crate) async fn unit(&mut self) -> Unit {
        loop {
            if let Some(unit) = self.units.pop_front() {
                return unit;
            }
            self.take().await.expect("the stream goes on");
        }
    }

    /// So many units.
    pub(crate) async fn take_units(&mut self, count: usize) -> Vec<Unit> {
        let mut units = Vec::new();
        while units.len() < count {
            units.push(self.unit().await);
        }
        units
    }

    /// The next notice.
    pub(crate) async fn notice(&mut self) -> v1::UnitNotice {
        loop {
            if let Some(notice) = self.notices.pop_front() {
                return notice;
            }
            self.take().await.expect("the stream goes on");
        }
    }

    async fn ack_result(&mut self, request: Request) -> Vec<v1::AckResultEntry> {
        self.try_ack(request).await.expect("the stream goes on")
    }

    /// The answer to an ack or a nack, unless the stream ends.
    pub(crate) async fn try_ack(&mut self, request: Request) -> Option<Vec<v1::AckResultEntry>> {
        self.trainer.requests.send(v1::SubscribeRequest { request: Some(request) }).await.ok()?;
        loop {
            if let Some(result) = self.acks.pop_front() {
                return Some(result.entries);
            }
            self.take().await.ok()?;
        }
    }

    /// Acknowledges units; what became of each.
    pub(crate) async fn ack<T: AsRef<str>>(&mut self, units: &[T]) -> Vec<AckOutcome> {
        let unit_ids: Vec<String> = units.iter().map(|unit| unit.as_ref().to_owned()).collect();
        let seek_count = self.trainer.subscribed.seek_count;
        let entries = self.ack_result(Request::Ack(v1::Ack { unit_ids: unit_ids.clone(), seek_count })).await;
        assert_eq!(entries.iter().map(|entry| entry.unit_id.clone()).collect::<Vec<_>>(), unit_ids);
        entries.iter().map(v1::AckResultEntry::outcome).collect()
    }

    /// Gives units back; what became of each.
    pub(crate) async fn nack<T: AsRef<str>>(&mut self, units: &[T], delay: Option<Duration>) -> Vec<AckOutcome> {
        let unit_ids: Vec<String> = units.iter().map(|unit| unit.as_ref().to_owned()).collect();
        let delay = delay.map(|delay| prost_types::Duration::try_from(delay).expect("a delay"));
        let nack = v1::Nack { unit_ids: unit_ids.clone(), reason: "test".to_owned(), delay };
        let entries = self.ack_result(Request::Nack(nack)).await;
        assert_eq!(entries.iter().map(|entry| entry.unit_id.clone()).collect::<Vec<_>>(), unit_ids);
        entries.iter().map(v1::AckResultEntry::outcome).collect()
    }

    /// All units that have come when everything that was on its way has come. A sign of life.
    pub(crate) async fn quiet(&mut self) -> Vec<Unit> {
        // What is given out together with the answer to the first comes before the answer to the second.
        for _ in 0..2 {
            self.fences += 1;
            let fence = format!("fence/{}", self.fences);
            assert_eq!(self.ack(&[fence]).await, [AckOutcome::Unknown]);
        }
        self.units.drain(..).collect()
    }

    pub(crate) async fn credit(&mut self, credit_tokens: u64) {
        self.trainer.send(Request::Credits(v1::Credits { credit_tokens })).await;
    }

    /// A heartbeat of a moment to which the clock is moved.
    pub(crate) async fn heartbeat(&mut self, service: &TestService) -> v1::SubscriptionHeartbeat {
        service.clock.advance(Duration::from_secs(10));
        let now_ms = service.clock.unix_ms();
        loop {
            if let Some(heartbeat) = self.heartbeats.pop_front() {
                let time = heartbeat.time.expect("a heartbeat has a time");
                if time.seconds.unsigned_abs() * 1000 >= now_ms {
                    return heartbeat;
                }
                continue;
            }
            self.take().await.expect("the stream goes on");
        }
    }

    /// What it waits for at this moment.
    pub(crate) async fn waits(&mut self, service: &TestService) -> Vec<WaitingFor> {
        self.heartbeat(service).await.waiting_for().collect()
    }

    /// How the stream ends.
    pub(crate) async fn end(&mut self) -> Option<tonic::Status> {
        loop {
            if let Err(end) = self.take().await {
                return end;
            }
        }
    }
}

/// The ids of units, in order.
pub(crate) fn unit_ids(units: &[Unit]) -> Vec<&str> {
    units.iter().map(|unit| unit.unit_id.as_str()).collect()
}

/// The stable reason in a status.
pub(crate) fn reason(status: &tonic::Status) -> String {
    use tonic_types::StatusExt;
    status.get_details_error_info().expect("a status has its reason").reason
}

/// A finish without lists.
pub(crate) fn finish(value: f64) -> Event {
    Event::Finish(v1::Finish { seal: Some(v1::Seal::default()), reward: Some(reward(value)) })
}

/// The only row's unit id of a rollout that [`row`] has made.
pub(crate) fn row_id(run: &str, rollout: &str) -> String {
    format!("{run}/{rollout}/0/main/c")
}

/// Reports a rollout that becomes one row of so many tokens, the last of them trained.
pub(crate) async fn row(worker: &mut Worker, run: &str, rollout: &str, tokens: u32) -> String {
    let reference = about(run, rollout);
    let prompt: Vec<u32> = (1..tokens).collect();
    let answer = worker.report(&reference, Event::Call(call("c", "main", 1, &prompt, &[7]))).await;
    assert_eq!(answer.outcome(), AnswerOutcome::Accepted, "{answer:?}");
    let answer = worker.report(&reference, finish(1.0)).await;
    assert_eq!(answer.outcome(), AnswerOutcome::Accepted, "{answer:?}");
    row_id(run, rollout)
}

/// Reports so many rollouts of one row each, named by number from `first`.
pub(crate) async fn rows(worker: &mut Worker, run: &str, first: u32, count: u32, tokens: u32) -> Vec<String> {
    let mut units = Vec::new();
    for rollout in first..first + count {
        units.push(row(worker, run, &rollout.to_string(), tokens).await);
    }
    units
}
