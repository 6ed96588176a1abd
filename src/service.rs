//! The service as a whole: store, sequencing task, timers, gRPC and HTTP, started and stopped together.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use tokio::net::TcpListener;
use tokio::sync::{oneshot, watch};
use tokio::task::JoinHandle;

use crate::http::{self, HttpState};
use crate::limits;
use crate::log::memory::MemoryLog;
use crate::log::{Log, LogError};
use crate::rpc::{self, Shared};
use crate::store::clock::Clock;
use crate::store::sequencer::Sequencer;
use crate::store::{Store, StoreOptions};
use crate::telemetry::{Readiness, Telemetry};

/// What a service is started with.
pub struct ServiceOptions {
    /// Where gRPC listens; port 0 takes a free one.
    pub grpc: SocketAddr,
    /// Where HTTP listens, if it does; port 0 takes a free one.
    pub http: Option<SocketAddr>,
    /// Where records go, and come back from.
    pub log: Arc<dyn Log>,
    /// Where time comes from.
    pub clock: Clock,
    /// Where figures go.
    pub telemetry: Arc<Telemetry>,
    /// What rollouts may hold in memory.
    pub memory_budget_bytes: u64,
}

impl Default for ServiceOptions {
    /// Free loopback ports, a log in memory that survives nothing, the machine's clock.
    fn default() -> Self {
        let free = SocketAddr::from(([127, 0, 0, 1], 0));
        Self {
            grpc: free,
            http: Some(free),
            log: Arc::new(MemoryLog::forgetting()),
            clock: Clock::machine(),
            telemetry: Telemetry::install(),
            memory_budget_bytes: limits::MEMORY_BUDGET_BYTES,
        }
    }
}

/// Why a service does not start.
#[derive(Debug, thiserror::Error)]
pub enum ServiceError {
    /// It cannot listen there.
    #[error("cannot listen on {address}: {source}")]
    Listen {
        /// Where.
        address: SocketAddr,
        /// Why not.
        source: std::io::Error,
    },
    /// The log cannot be read.
    #[error("cannot read the log: {0}")]
    Log(#[from] LogError),
}

/// A service that runs.
pub struct RunningService {
    /// Where gRPC listens.
    pub grpc_address: SocketAddr,
    /// Where HTTP listens, if it does.
    pub http_address: Option<SocketAddr>,
    /// Its rollouts, for tests that look inside.
    pub store: Arc<Store>,
    stop: oneshot::Sender<()>,
    grpc: JoinHandle<()>,
    http: Option<(oneshot::Sender<()>, JoinHandle<()>)>,
    sequencer: (oneshot::Sender<()>, JoinHandle<Sequencer>),
    background: Vec<JoinHandle<()>>,
    readiness: Arc<Readiness>,
}

/// How long streams may take to end in a drain.
const DRAIN_SECONDS_MAX: u64 = 8;
/// How often histograms are tidied.
const UPKEEP_SECONDS: u64 = 5;

/// Starts a service: reads its log, then listens.
///
/// # Errors
/// If the log cannot be read, or an address not be listened on.
pub async fn start(options: ServiceOptions) -> Result<RunningService, ServiceError> {
    let ServiceOptions { grpc, http, log, clock, telemetry, memory_budget_bytes } = options;
    let readiness = Arc::new(Readiness::starting("reading the log"));
    let last = *log.durable_through().borrow();
    let store_options =
        StoreOptions { log: Arc::clone(&log), clock, telemetry: Arc::clone(&telemetry), memory_budget_bytes };
    let (store, commands) = Store::new(store_options, last);
    let mut sequencer = Sequencer::new(Arc::clone(&store));
    if last.0 > 0 {
        sequencer.replay(log.as_ref())?;
    }
    let listener = listen(grpc).await?;
    let grpc_address = listener.local_addr().map_err(|source| ServiceError::Listen { address: grpc, source })?;
    let (stop_sequencer, sequencer_stops) = oneshot::channel::<()>();
    let sequencer = tokio::spawn(sequencer.run(commands, ended(sequencer_stops)));
    let timers = {
        let store = Arc::clone(&store);
        tokio::spawn(async move { store.run_timers().await })
    };
    let upkeep = tokio::spawn(upkeep(Arc::clone(&telemetry)));
    let (http_address, http) = start_http(http, HttpState { telemetry, readiness: Arc::clone(&readiness) }).await?;

    let (drain, draining) = watch::channel(false);
    let readiness_follows = tokio::spawn(follow_drain(draining, Arc::clone(&readiness)));
    let shared = Shared::new(Arc::clone(&store), Arc::new(drain));
    let (stop, stops) = oneshot::channel::<()>();
    let serving = {
        let readiness = Arc::clone(&readiness);
        async move {
            if let Err(error) = rpc::serve(listener, shared, ended(stops)).await {
                tracing::error!(%error, "gRPC has failed");
                readiness.failed(format!("gRPC has failed: {error}"));
            }
        }
    };
    let grpc = tokio::spawn(serving);
    readiness.ready();
    Ok(RunningService {
        grpc_address,
        http_address,
        store,
        stop,
        grpc,
        http,
        sequencer: (stop_sequencer, sequencer),
        background: vec![timers, upkeep, readiness_follows],
        readiness,
    })
}

impl RunningService {
    /// Drains and stops: streams end with a delay after which to come back. Over in ten seconds.
    pub async fn stop(self) {
        drop(self.stop_and_look().await);
    }

    /// Stops, and gives back the sequencing task's state for tests that look inside.
    pub async fn stop_and_look(self) -> Option<Sequencer> {
        self.readiness.draining();
        drop(self.stop);
        let mut grpc = self.grpc;
        if tokio::time::timeout(Duration::from_secs(DRAIN_SECONDS_MAX), &mut grpc).await.is_err() {
            tracing::warn!("streams did not end in {DRAIN_SECONDS_MAX} s; they are cut");
            grpc.abort();
        }
        self.background.iter().for_each(JoinHandle::abort);
        let (stop_sequencer, sequencer) = self.sequencer;
        drop(stop_sequencer);
        let sequencer = sequencer.await.ok();
        if let Some((stop_http, http)) = self.http {
            drop(stop_http);
            http.abort();
        }
        sequencer
    }
}

async fn listen(address: SocketAddr) -> Result<TcpListener, ServiceError> {
    TcpListener::bind(address).await.map_err(|source| ServiceError::Listen { address, source })
}

type RunningHttp = (oneshot::Sender<()>, JoinHandle<()>);

async fn start_http(
    address: Option<SocketAddr>,
    state: HttpState,
) -> Result<(Option<SocketAddr>, Option<RunningHttp>), ServiceError> {
    let Some(address) = address else { return Ok((None, None)) };
    let listener = listen(address).await?;
    let bound = listener.local_addr().map_err(|source| ServiceError::Listen { address, source })?;
    let (stop, stops) = oneshot::channel::<()>();
    let serving = tokio::spawn(http::serve(listener, state, ended(stops)));
    Ok((Some(bound), Some((stop, serving))))
}

/// Done when the other side says so or is gone.
async fn ended(stops: oneshot::Receiver<()>) {
    let _ = stops.await;
}

/// The service is not ready once it drains, whoever asked for it.
async fn follow_drain(mut draining: watch::Receiver<bool>, readiness: Arc<Readiness>) {
    if draining.wait_for(|draining| *draining).await.is_ok() {
        readiness.draining();
    }
}

async fn upkeep(telemetry: Arc<Telemetry>) {
    let mut every = tokio::time::interval(Duration::from_secs(UPKEEP_SECONDS));
    loop {
        every.tick().await;
        telemetry.upkeep();
    }
}
