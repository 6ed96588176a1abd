//! Both sides of a connection: our service and a bare sink with the same windows and frames, on a runtime of their own in this
//! process, and the one client code that speaks to either.

use std::pin::Pin;
use std::sync::Arc;

use futures_util::{Stream, StreamExt as _};
use hedgerow::cli::client;
use hedgerow::limits;
use hedgerow::log::memory::MemoryLog;
use hedgerow::proto::v1::harness_service_server::{HarnessService, HarnessServiceServer};
use hedgerow::proto::v1::report_response::Response as Reported;
use hedgerow::proto::v1::trainer_service_server::{TrainerService, TrainerServiceServer};
use hedgerow::proto::v1::{self, AnswerOutcome};
use hedgerow::service::{self, LogSource, RunningService, ServiceOptions};
use hedgerow::store::clock::Clock;
use hedgerow::telemetry::Telemetry;
use tokio::net::TcpListener;
use tokio::runtime::Runtime;
use tonic::transport::server::TcpIncoming;
use tonic::transport::{Channel, Server};
use tonic::{Request, Response, Status, Streaming};

/// A runtime for each side, as the service has its own, in one process on the same cores. Their threads are named, so that a profile tells them apart.
pub(crate) struct Machine {
    /// Where our service runs.
    pub(crate) server: Runtime,
    /// Where the bare server runs, or others that are not measured.
    pub(crate) bare: Runtime,
    /// Where clients run.
    pub(crate) client: Runtime,
}

impl Machine {
    pub(crate) fn new() -> Self {
        let runtime = |name| service::runtime().thread_name(name).build().expect("threads can be made");
        Self { server: runtime("server"), bare: runtime("bare"), client: runtime("client") }
    }

    /// Our service, whose log forgets.
    pub(crate) fn service(&self, clock: Clock) -> RunningService {
        self.service_with_memory(clock, limits::MEMORY_BUDGET_BYTES)
    }

    /// The same, whose rollouts may hold so much in memory.
    pub(crate) fn service_with_memory(&self, clock: Clock, memory_budget_bytes: u64) -> RunningService {
        self.service_with(LogSource::Given(Arc::new(MemoryLog::forgetting())), clock, memory_budget_bytes)
    }

    /// Our service, with this log.
    pub(crate) fn service_with(&self, log: LogSource, clock: Clock, memory_budget_bytes: u64) -> RunningService {
        let options = ServiceOptions {
            log,
            telemetry: Telemetry::new(),
            clock,
            memory_budget_bytes,
            ..ServiceOptions::default()
        };
        self.server.block_on(service::start(options)).expect("the service starts")
    }

    /// A bare server, which answers every report at once and streams these messages to every subscriber. Gives its address.
    pub(crate) fn bare(&self, messages: Vec<v1::SubscribeResponse>) -> String {
        let bare = Bare { messages: Arc::new(messages) };
        self.bare.block_on(async {
            let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
            let address = listener.local_addr().expect("an address").to_string();
            let served = Server::builder()
                .initial_stream_window_size(limits::HTTP2_STREAM_WINDOW_BYTES)
                .initial_connection_window_size(limits::HTTP2_CONNECTION_WINDOW_BYTES)
                .max_concurrent_streams(limits::HTTP2_CONNECTION_STREAMS_MAX)
                .max_frame_size(limits::HTTP2_FRAME_BYTES)
                .add_service(
                    HarnessServiceServer::new(bare.clone())
                        .max_decoding_message_size(limits::REQUEST_MESSAGE_BYTES_MAX),
                )
                .add_service(TrainerServiceServer::new(bare))
                .serve_with_incoming(TcpIncoming::from(listener).with_nodelay(Some(true)));
            tokio::spawn(served);
            address
        })
    }
}

/// A connection of its own.
pub(crate) async fn connect(address: &str) -> Channel {
    match client::connect(address).await {
        Ok(channel) => channel,
        Err(_) => panic!("nobody answers at {address}"),
    }
}

/// What a service of these messages costs at least: they are decoded, and answered at once.
#[derive(Clone)]
struct Bare {
    messages: Arc<Vec<v1::SubscribeResponse>>,
}

type Out<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

fn accepted(request: &v1::ReportRequest) -> v1::Answer {
    v1::Answer { request_seq: request.request_seq, outcome: AnswerOutcome::Accepted.into(), ..v1::Answer::default() }
}

#[tonic::async_trait]
impl HarnessService for Bare {
    type ReportStream = Out<v1::ReportResponse>;

    async fn report(
        &self,
        request: Request<Streaming<v1::ReportRequest>>,
    ) -> Result<Response<Self::ReportStream>, Status> {
        let answered = request.into_inner().map(|request| {
            request.map(|request| v1::ReportResponse { response: Some(Reported::Answer(accepted(&request))) })
        });
        Ok(Response::new(Box::pin(answered)))
    }

    async fn report_batch(
        &self,
        request: Request<v1::ReportBatchRequest>,
    ) -> Result<Response<v1::ReportBatchResponse>, Status> {
        let answers = request.into_inner().requests.iter().map(accepted).collect();
        Ok(Response::new(v1::ReportBatchResponse { answers }))
    }
}

#[tonic::async_trait]
impl TrainerService for Bare {
    type SubscribeStream = Out<v1::SubscribeResponse>;

    async fn subscribe(
        &self,
        _request: Request<Streaming<v1::SubscribeRequest>>,
    ) -> Result<Response<Self::SubscribeStream>, Status> {
        let messages = Arc::clone(&self.messages);
        let all = (0..messages.len()).map(move |at| Ok(messages[at].clone()));
        Ok(Response::new(Box::pin(futures_util::stream::iter(all))))
    }

    async fn checkpoint(
        &self,
        _request: Request<v1::CheckpointRequest>,
    ) -> Result<Response<v1::CheckpointResponse>, Status> {
        Err(Status::unimplemented("a bare server has none"))
    }

    async fn seek(&self, _request: Request<v1::SeekRequest>) -> Result<Response<v1::SeekResponse>, Status> {
        Err(Status::unimplemented("a bare server has none"))
    }
}

/// Sends requests over one stream as fast as it takes them, and waits until each is answered and accepted.
pub(crate) async fn report_all(
    channel: Channel,
    requests: impl Stream<Item = v1::ReportRequest> + Send + 'static,
) -> u64 {
    let responses = client::harness(channel).report(requests).await.expect("a stream of reports");
    let mut responses = responses.into_inner();
    let mut answers = 0;
    while let Some(response) = responses.message().await.expect("the stream goes on") {
        let Some(Reported::Answer(answer)) = response.response else { continue };
        assert_eq!(answer.outcome(), AnswerOutcome::Accepted, "{answer:?}");
        answers += 1;
    }
    answers
}
