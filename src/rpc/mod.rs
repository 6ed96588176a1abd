//! The gRPC edge: one file for each service, conversion between wire and domain, and the one map from refusals to gRPC's
//! status.
//!
//! Wire types stop here. A service checks and converts, asks the store, waits until the answer is durable, and sends it.
//! Never does: hold a lock over an `.await`, or decide anything that `rollout`, `queue` or `store` should.

mod admin;
mod batch;
mod connection;
pub mod convert;
mod encoded;
mod frames;
mod gate;
mod harness;
mod headers;
mod inspect;
mod outgoing;
mod receive;
mod refusals;
mod requests;
pub mod status;
mod trainer;
mod turns;
mod unread;
mod watching;

use std::sync::Arc;
use std::time::Duration;

use tokio::net::TcpListener;
use tokio::sync::{Semaphore, oneshot, watch};
use tonic::server::NamedService;
use tonic::transport::Server;
use tonic_health::server::HealthReporter;

use crate::error::{Reason, Refusal};
use crate::ids::RunId;
use crate::limits;
use crate::proto::v1::admin_service_server::AdminServiceServer;
use crate::proto::v1::harness_service_server::HarnessServiceServer;
use crate::proto::v1::inspect_service_server::InspectServiceServer;
use crate::proto::v1::trainer_service_server::TrainerServiceServer;
use crate::proto::{FILE_DESCRIPTOR_SET, v1};
use crate::store::Store;
use crate::store::sequencer::Command;
use crate::telemetry::{Readiness, Ready};

pub use outgoing::TrainersRoom;
pub use turns::Lanes;

/// What all services share.
#[derive(Clone)]
pub struct Shared {
    /// The rollouts.
    pub store: Arc<Store>,
    /// True once the service is about to stop.
    pub draining: watch::Receiver<bool>,
    /// Set by whoever asks the service to stop.
    pub drain: Arc<watch::Sender<bool>>,
    /// Streams of reports, subscriptions and watches that are open.
    pub streams: OpenStreams,
    /// Room for bytes of answers that have not left, beyond what each stream may have.
    pub answers: Arc<Semaphore>,
    /// Room for what is on its way to trainers.
    pub trainers: TrainersRoom,
    /// Whether the service takes work.
    pub readiness: Arc<Readiness>,
    /// Where streams that have much to do wait for each other.
    pub lanes: Lanes,
    /// Long messages that may be read at once.
    pub long_messages: Arc<Semaphore>,
    /// Long batches that may wait for room for their answers at once, and then be read.
    pub long_batches: Arc<Semaphore>,
}

/// Counts streams, so that a drain can wait for their end.
#[derive(Clone, Debug, Default)]
pub struct OpenStreams(watch::Sender<u64>);

/// A stream that is open until this is dropped.
#[derive(Debug)]
pub(crate) struct OpenStream(watch::Sender<u64>);

impl OpenStreams {
    fn enter(&self) -> OpenStream {
        self.0.send_modify(|streams| *streams += 1);
        OpenStream(self.0.clone())
    }

    fn count(&self) -> u64 {
        *self.0.borrow()
    }

    /// Waits until none is open.
    async fn none(&self) {
        // This is a sender, so there always is one.
        let _ = self.0.subscribe().wait_for(|streams| *streams == 0).await;
    }
}

impl Drop for OpenStream {
    fn drop(&mut self) {
        self.0.send_modify(|streams| *streams -= 1);
    }
}

impl Shared {
    /// What all services share before a store; `drain` is set when the service is to stop.
    #[must_use]
    pub fn new(store: Arc<Store>, drain: Arc<watch::Sender<bool>>, readiness: Arc<Readiness>) -> Self {
        let answers = Arc::new(Semaphore::new(store.edge().answers));
        let trainers = TrainersRoom::new(store.edge().trainers, store.clock().clone());
        Self {
            store,
            trainers,
            draining: drain.subscribe(),
            drain,
            streams: OpenStreams::default(),
            answers,
            readiness,
            lanes: Lanes::new(),
            long_messages: Arc::new(Semaphore::new(at_once(limits::LONG_MESSAGES_AT_ONCE_MAX))),
            long_batches: Arc::new(Semaphore::new(at_once(limits::LONG_MESSAGES_AT_ONCE_MAX))),
        }
    }

    /// Waits until the service is about to stop.
    async fn drained(&self) {
        let mut draining = self.draining.clone();
        // The sender lives as long as the service; without it there is nothing to wait for.
        let _ = draining.wait_for(|draining| *draining).await;
    }

    /// Has the sequencing task decide something, and waits until what it answered from is durable.
    async fn decide<T>(
        &self,
        command: impl FnOnce(oneshot::Sender<Result<T, Refusal>>) -> Command,
    ) -> Result<T, tonic::Status> {
        let gone = || draining("ask again after the delay");
        let (reply, answer) = oneshot::channel();
        if !self.store.command(command(reply)).await {
            return Err(gone());
        }
        let answer = answer.await.map_err(|_| gone())?;
        self.store.durable(self.store.last_position()).await;
        answer.map_err(refused)
    }
}

/// How many threads may take long at once: one core in four, so that nobody waits for them.
fn at_once(most: usize) -> usize {
    let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    (cores / 4).clamp(1, most)
}

/// How long a silent connection is left before it is asked for a sign of life.
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(30);
/// How long it may take to answer.
const KEEPALIVE_TIMEOUT: Duration = Duration::from_secs(20);
/// How long a client whose stream ended in a drain should wait before it connects again.
const DRAIN_RETRY_AFTER_MS: u64 = 2000;

/// The services whose health is said; the empty name is the whole.
const WATCHED: [&str; 3] = [
    "",
    <HarnessServiceServer<harness::Harness> as NamedService>::NAME,
    <TrainerServiceServer<trainer::Trainer> as NamedService>::NAME,
];

/// Serves gRPC on this listener until `stop` is done, and then until the streams have ended.
///
/// # Errors
/// If the transport fails.
pub async fn serve(
    listener: TcpListener,
    shared: Shared,
    stop: impl Future<Output = ()>,
) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
    let (health, health_service) = tonic_health::server::health_reporter();
    say_serving(&health, tonic_health::ServingStatus::NotServing).await;
    let becomes_ready = tokio::spawn(say_when_ready(shared.clone(), health.clone()));
    let reflection = described().build_v1()?;
    let older_reflection = described().build_v1alpha()?;
    let stopping = {
        let (shared, health) = (shared.clone(), health.clone());
        async move {
            stop.await;
            becomes_ready.abort();
            say_serving(&health, tonic_health::ServingStatus::NotServing).await;
            shared.store.start_draining();
            shared.drain.send_replace(true);
            tokio::spawn(end_watches(shared, health));
        }
    };
    let drains = tokio::spawn({
        let shared = shared.clone();
        async move {
            shared.drained().await;
            say_serving(&health, tonic_health::ServingStatus::NotServing).await;
        }
    });
    // Messages from clients may be large (a call with its whole prompt); what is sent to trainers comes in parts.
    let receive = limits::REQUEST_MESSAGE_BYTES_MAX;
    let (clock, edge) = (shared.store.clock().clone(), *shared.store.edge());
    let served = Server::builder()
        // One unread stream must not stop its neighbours: see the relation in `limits`.
        .initial_stream_window_size(limits::HTTP2_STREAM_WINDOW_BYTES)
        .initial_connection_window_size(limits::HTTP2_CONNECTION_WINDOW_BYTES)
        .max_concurrent_streams(limits::HTTP2_CONNECTION_STREAMS_MAX)
        // Large frames: 32k-token calls went from 1.5 to 2.5 GB/s with them.
        .max_frame_size(limits::HTTP2_FRAME_BYTES)
        .http2_max_header_list_size(limits::HTTP2_HEADER_LIST_BYTES_MAX)
        // A peer that is gone without a word is noticed, and its leases end.
        .http2_keepalive_interval(Some(KEEPALIVE_INTERVAL))
        .http2_keepalive_timeout(Some(KEEPALIVE_TIMEOUT))
        // Nothing waits with headers that nobody reads.
        .layer(headers::HeadersLayer)
        // Requests and streams that end with a refusal, by its reason.
        .layer(refusals::RefusalsLayer::new(Arc::clone(shared.store.telemetry())))
        // Requests that are open, whatever they say.
        .layer(requests::RequestsLayer::new(edge.requests_max()))
        // What has come of messages that are not whole, however long they say they are.
        .layer(receive::ReceiveLayer::new(edge.receive, clock.clone()))
        // While the log is read nobody is served.
        .layer(gate::GateLayer::new(Arc::clone(&shared.readiness)))
        .add_service(health_service)
        .add_service(reflection)
        .add_service(older_reflection)
        .add_service(
            HarnessServiceServer::new(harness::Harness::new(shared.clone())).max_decoding_message_size(receive),
        )
        .add_service(TrainerServiceServer::new(trainer::Trainer::new(shared.clone())))
        .add_service(InspectServiceServer::new(inspect::Inspect::new(shared.clone())))
        .add_service(AdminServiceServer::new(admin::Admin::new(shared)))
        .serve_with_incoming_shutdown(connection::connections(listener, clock, edge), stopping)
        .await;
    drains.abort();
    Ok(served?)
}

/// What reflection tells of: in its version 1, and in the one before it, which many clients still speak.
fn described() -> tonic_reflection::server::Builder<'static> {
    tonic_reflection::server::Builder::configure()
        .register_encoded_file_descriptor_set(FILE_DESCRIPTOR_SET)
        .register_encoded_file_descriptor_set(tonic_health::pb::FILE_DESCRIPTOR_SET)
}

/// What health checks are answered.
async fn say_serving(health: &HealthReporter, status: tonic_health::ServingStatus) {
    for service in WATCHED {
        health.set_service_status(service, status).await;
    }
}

/// Health is good once the service takes work.
async fn say_when_ready(shared: Shared, health: HealthReporter) {
    let mut follow = shared.readiness.follow();
    if follow.wait_for(|ready| *ready == Ready::Yes).await.is_ok() && !*shared.draining.borrow() {
        say_serving(&health, tonic_health::ServingStatus::Serving).await;
    }
}

/// Once our own streams have ended, ends those of who watches the health, which would hold up the stop.
async fn end_watches(shared: Shared, mut health: HealthReporter) {
    shared.streams.none().await;
    for service in WATCHED {
        health.clear_service_status(service).await;
    }
}

/// What a call of a method is answered that this release does not have.
fn not_in_this_release(what: &str) -> tonic::Status {
    let message = format!("this release does not have {what} yet");
    refused(Refusal::new(Reason::NotInThisRelease, message))
}

/// A refusal that is about no one rollout.
fn refused(refusal: Refusal) -> tonic::Status {
    status::status(&refusal, None)
}

/// How a request or a stream ends when the service is about to stop, with what to do then.
fn draining(then: &str) -> tonic::Status {
    let message = format!("the service is about to stop; {then}");
    refused(Refusal::new(Reason::Draining, message).retry_after_ms(DRAIN_RETRY_AFTER_MS))
}

/// The run that a request names.
fn run_id(text: &str) -> Result<RunId, tonic::Status> {
    convert::fields::identifier(text, "run_id", RunId::parse).map_err(refused)
}

/// How an attempt ended, as a message.
fn ended_message(ended: &crate::store::effect::Ended) -> v1::Ended {
    use crate::store::effect::Outcome;
    let outcome = match ended.outcome {
        Outcome::Retired => v1::RolloutOutcome::Retired,
        Outcome::Discarded => v1::RolloutOutcome::Discarded,
    };
    convert::answer::ended(outcome, &ended.reason, ended.attempt)
}
