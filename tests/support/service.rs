//! A service in this process on free loopback ports, and small clients that speak real gRPC to it.
//!
//! Time stands still unless a test moves it. Nothing here waits by the clock: whoever waits, waits for a message.

use std::collections::BTreeMap;
use std::sync::Arc;

use hedgerow::ids::{RolloutId, RolloutRef, RunId};
use hedgerow::limits;
use hedgerow::log::Log;
use hedgerow::log::memory::MemoryLog;
use hedgerow::proto::v1::admin_service_client::AdminServiceClient;
use hedgerow::proto::v1::harness_service_client::HarnessServiceClient;
use hedgerow::proto::v1::inspect_service_client::InspectServiceClient;
use hedgerow::proto::v1::report_request::Event;
use hedgerow::proto::v1::subscribe_request::Request;
use hedgerow::proto::v1::subscribe_response::Response;
use hedgerow::proto::v1::trainer_service_client::TrainerServiceClient;
use hedgerow::proto::v1::{self, report_response};
use hedgerow::service::{self, LogSource, RunningService, ServiceError, ServiceOptions};
use hedgerow::store::clock::Clock;
use hedgerow::telemetry::Telemetry;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::Streaming;
use tonic::transport::Channel;

/// A service whose clock the test moves.
pub(crate) struct TestService {
    pub(crate) running: RunningService,
    pub(crate) clock: Clock,
}

impl TestService {
    /// A service with a log that forgets.
    pub(crate) async fn start() -> Self {
        Self::start_on(Arc::new(MemoryLog::forgetting())).await
    }

    /// A service with a log that forgets, whose rollouts may hold so much in memory.
    pub(crate) async fn start_with_memory(rollouts_bytes: u64) -> Self {
        let memory_budget_bytes = rollouts_bytes + rollouts_bytes / 3;
        Self::start_as(ServiceOptions { memory_budget_bytes, ..ServiceOptions::default() }).await
    }

    /// A service on this log, which is replayed first.
    pub(crate) async fn start_on(log: Arc<dyn Log>) -> Self {
        Self::start_as(ServiceOptions { log: LogSource::Given(log), ..ServiceOptions::default() }).await
    }

    async fn start_as(options: ServiceOptions) -> Self {
        Self::try_start(options).await.expect("the service starts")
    }

    /// A service that may not start.
    pub(crate) async fn try_start(options: ServiceOptions) -> Result<Self, ServiceError> {
        let clock = Clock::manual();
        let options = ServiceOptions { clock: clock.clone(), telemetry: Telemetry::new(), ..options };
        let running = service::start(options).await?;
        Ok(Self { running, clock })
    }

    /// A connection of its own.
    pub(crate) async fn channel(&self) -> Channel {
        let address = format!("http://{}", self.running.grpc_address);
        Channel::from_shared(address).expect("an address").connect().await.expect("the service listens")
    }

    pub(crate) async fn admin(&self) -> AdminServiceClient<Channel> {
        AdminServiceClient::new(self.channel().await)
    }

    pub(crate) async fn inspect(&self) -> InspectServiceClient<Channel> {
        InspectServiceClient::new(self.channel().await).max_decoding_message_size(limits::REQUEST_MESSAGE_BYTES_MAX)
    }

    /// A worker with a stream of its own.
    pub(crate) async fn worker(&self) -> Worker {
        Worker::open(self.channel().await).await
    }

    /// A trainer, subscribed.
    pub(crate) async fn trainer(&self, subscription: v1::Subscription) -> Trainer {
        Trainer::subscribe(self.channel().await, subscription).await.expect("the subscription is joined")
    }

    /// Makes a run with these settings.
    pub(crate) async fn create_run(&self, run: &str, settings: v1::RunSettings) {
        let request = v1::CreateRunRequest { run_id: run.to_owned(), settings: Some(settings) };
        self.admin().await.create_run(request).await.expect("the run is made");
    }
}

/// A rollout's reference.
pub(crate) fn about(run: &str, rollout: &str) -> v1::RolloutRef {
    v1::RolloutRef { run_id: run.to_owned(), group_id: String::new(), rollout_id: rollout.to_owned(), attempt: 0 }
}

/// The store's key of a reference.
pub(crate) fn key(about: &v1::RolloutRef) -> hedgerow::store::RolloutKey {
    let run = RunId::parse(&about.run_id).expect("a run id");
    let rollout = RolloutId::parse(&about.rollout_id).expect("a rollout id");
    RolloutRef { run, group: None, rollout, attempt: about.attempt }.key()
}

/// Ids as they go over the wire.
pub(crate) fn ids(ids: &[u32]) -> bytes::Bytes {
    ids.iter().flat_map(|id| id.to_le_bytes()).collect::<Vec<u8>>().into()
}

/// Log-probabilities as they go over the wire.
pub(crate) fn floats(values: &[f32]) -> bytes::Bytes {
    values.iter().flat_map(|value| value.to_le_bytes()).collect::<Vec<u8>>().into()
}

/// A call with a full prompt, and a log-probability of −0.5 for each generated id.
pub(crate) fn call(id: &str, agent: &str, sequence: u64, prompt: &[u32], generation: &[u32]) -> v1::Call {
    v1::Call {
        call_id: id.to_owned(),
        agent_id: agent.to_owned(),
        sequence,
        prompt: Some(v1::Prompt { prompt: Some(v1::prompt::Prompt::TokenIds(ids(prompt))) }),
        generation_token_ids: ids(generation),
        generation_logprobs: Some(floats(&vec![-0.5; generation.len()])),
        ..v1::Call::default()
    }
}

/// A seal with these kept lists.
pub(crate) fn seal(kept: &[(&str, &[&str])]) -> v1::Seal {
    let list = |calls: &[&str]| v1::CallList { call_ids: calls.iter().map(|call| (*call).to_owned()).collect() };
    let agents: BTreeMap<String, v1::CallList> =
        kept.iter().map(|(agent, calls)| ((*agent).to_owned(), list(calls))).collect();
    v1::Seal { kept: Some(v1::KeptCalls { agents }), expected_calls: None }
}

/// A reward without components.
pub(crate) fn reward(value: f64) -> v1::Reward {
    v1::Reward { value, ..v1::Reward::default() }
}

/// A worker's stream of reports.
pub(crate) struct Worker {
    requests: mpsc::Sender<v1::ReportRequest>,
    responses: Streaming<v1::ReportResponse>,
    next_seq: u64,
    early: BTreeMap<u64, v1::Answer>,
    /// Notices that have come, in order.
    pub(crate) notices: Vec<v1::Notice>,
}

impl Worker {
    pub(crate) async fn open(channel: Channel) -> Self {
        let (requests, line) = mpsc::channel(64);
        let mut client =
            HarnessServiceClient::new(channel).max_encoding_message_size(limits::REQUEST_MESSAGE_BYTES_MAX);
        let responses = client.report(ReceiverStream::new(line)).await.expect("a stream of reports").into_inner();
        Self { requests, responses, next_seq: 1, early: BTreeMap::new(), notices: Vec::new() }
    }

    /// Sends an event without waiting for its answer.
    pub(crate) async fn send(&mut self, about: &v1::RolloutRef, event: Event) -> u64 {
        let request_seq = self.next_seq;
        self.next_seq += 1;
        let request = v1::ReportRequest { request_seq, rollout: Some(about.clone()), event: Some(event) };
        self.requests.send(request).await.expect("the stream is open");
        request_seq
    }

    /// Waits for the answer to one request.
    pub(crate) async fn answer(&mut self, request_seq: u64) -> v1::Answer {
        loop {
            if let Some(answer) = self.early.remove(&request_seq) {
                return answer;
            }
            self.receive().await;
        }
    }

    /// Waits for one message, an answer or a notice.
    pub(crate) async fn receive(&mut self) {
        let response = self.responses.message().await.expect("no error").expect("the stream goes on");
        match response.response.expect("a response") {
            report_response::Response::Answer(answer) => drop(self.early.insert(answer.request_seq, answer)),
            report_response::Response::Notice(notice) => self.notices.push(notice),
        }
    }

    /// Sends an event and waits for its answer.
    pub(crate) async fn report(&mut self, about: &v1::RolloutRef, event: Event) -> v1::Answer {
        let request_seq = self.send(about, event).await;
        self.answer(request_seq).await
    }

    /// How the stream ends.
    pub(crate) async fn end(mut self) -> Result<(), tonic::Status> {
        while self.responses.message().await?.is_some() {}
        Ok(())
    }
}

/// A trainer's subscription.
pub(crate) struct Trainer {
    pub(crate) requests: mpsc::Sender<v1::SubscribeRequest>,
    responses: Streaming<v1::SubscribeResponse>,
    pub(crate) subscribed: v1::Subscribed,
}

/// A subscription to the rows of a run, with much credit.
pub(crate) fn subscription(run: &str, consumer_group: &str) -> v1::Subscription {
    v1::Subscription {
        run_id: run.to_owned(),
        consumer_group: consumer_group.to_owned(),
        credit_tokens: u64::from(u32::MAX),
        ..v1::Subscription::default()
    }
}

impl Trainer {
    pub(crate) async fn subscribe(channel: Channel, subscription: v1::Subscription) -> Result<Self, tonic::Status> {
        let (requests, line) = mpsc::channel(64);
        let first = v1::SubscribeRequest { request: Some(Request::Subscription(subscription)) };
        requests.send(first).await.expect("a new line has room");
        let mut client =
            TrainerServiceClient::new(channel).max_decoding_message_size(limits::REQUEST_MESSAGE_BYTES_MAX);
        let mut responses = client.subscribe(ReceiverStream::new(line)).await?.into_inner();
        let subscribed = match responses.message().await?.and_then(|message| message.response) {
            Some(Response::Subscribed(subscribed)) => subscribed,
            other => panic!("{other:?} is no answer to a subscription"),
        };
        Ok(Self { requests, responses, subscribed })
    }

    pub(crate) async fn send(&self, request: Request) {
        self.requests.send(v1::SubscribeRequest { request: Some(request) }).await.expect("the stream is open");
    }

    /// The next message, whatever it is.
    pub(crate) async fn next(&mut self) -> Result<Option<Response>, tonic::Status> {
        Ok(self.responses.message().await?.and_then(|message| message.response))
    }

    /// The next unit with all its rows; other messages before it are dropped.
    pub(crate) async fn unit(&mut self) -> Unit {
        let mut unit = Unit::default();
        loop {
            let part = match self.next().await.expect("no error").expect("the stream goes on") {
                Response::UnitPart(part) => part,
                Response::Subscribed(_) | Response::AckResult(_) | Response::UnitNotice(_) | Response::Heartbeat(_) => {
                    continue;
                }
            };
            let last = part.last;
            unit.take(part);
            if last {
                return unit;
            }
        }
    }

    /// Acknowledges units and waits for the answer.
    pub(crate) async fn ack(&mut self, unit_ids: &[String]) -> Vec<v1::AckResultEntry> {
        let seek_count = self.subscribed.seek_count;
        self.send(Request::Ack(v1::Ack { unit_ids: unit_ids.to_vec(), seek_count })).await;
        loop {
            if let Some(Response::AckResult(result)) = self.next().await.expect("no error") {
                assert!(result.durable, "an acknowledgement is answered when it is durable");
                return result.entries;
            }
        }
    }
}

/// A unit whose parts have come.
#[derive(Clone, Debug, Default)]
pub(crate) struct Unit {
    pub(crate) unit_id: String,
    pub(crate) delivery_count: u32,
    pub(crate) tokens: u64,
    pub(crate) group: Option<v1::GroupFigures>,
    pub(crate) step: Option<v1::StepShard>,
    pub(crate) rows: Vec<Row>,
}

/// A row whose parts have come.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Row {
    pub(crate) row_id: String,
    pub(crate) header: v1::RowHeader,
    pub(crate) spans: Vec<v1::Span>,
    pub(crate) token_ids: Vec<u32>,
    pub(crate) loss_mask: Vec<u8>,
    pub(crate) logprobs: Vec<f32>,
}

impl Unit {
    pub(crate) fn take(&mut self, part: v1::UnitPart) {
        (self.unit_id, self.delivery_count, self.tokens) = (part.unit_id, part.delivery_count, part.unit_tokens);
        self.group = self.group.take().or(part.group);
        self.step = self.step.take().or(part.step);
        for part in part.rows {
            if self.rows.last().is_none_or(|row| row.row_id != part.row_id) {
                self.rows.push(Row {
                    row_id: part.row_id,
                    header: part.header.expect("a first part has a header"),
                    ..Row::default()
                });
            }
            let row = self.rows.last_mut().expect("it was pushed so above");
            assert_eq!(row.token_ids.len() as u64, part.token_offset, "parts come in order");
            row.spans.extend(part.spans);
            let words = |bytes: &bytes::Bytes| bytes.as_chunks::<4>().0.to_vec();
            row.token_ids.extend(words(&part.token_ids).into_iter().map(u32::from_le_bytes));
            row.logprobs.extend(words(&part.logprobs).into_iter().map(f32::from_le_bytes));
            row.loss_mask.extend_from_slice(&part.loss_mask);
        }
    }
}

impl Row {
    pub(crate) fn walk(&self) -> Vec<&str> {
        self.spans.iter().map(|span| span.call_id.as_str()).collect()
    }

    pub(crate) fn trains(&self) -> Vec<&str> {
        self.spans.iter().filter(|span| span.trained).map(|span| span.call_id.as_str()).collect()
    }
}
