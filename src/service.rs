//! The service as a whole: store, sequencing task, timers, gRPC and HTTP, started and stopped together.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tokio::net::TcpListener;
use tokio::sync::{oneshot, watch};
use tokio::task::JoinHandle;

use crate::http::{self, HttpState};
use crate::limits;
use crate::log::disk::DiskLog;
use crate::log::memory::MemoryLog;
use crate::log::segments::storage::Storage;
use crate::log::segments::watched::Watched;
use crate::log::segments::{Failure, Options, Progress, Recovered};
use crate::log::{Log, LogError, Position};
use crate::rpc::{self, Shared};
use crate::store::carry;
use crate::store::clock::Clock;
use crate::store::recovery::{Recovery, recover};
use crate::store::sequencer::Sequencer;
use crate::store::{Eviction, Store, StoreOptions};
use crate::telemetry::{Readiness, Telemetry};

/// What a service is started with.
pub struct ServiceOptions {
    /// Where gRPC listens; port 0 takes a free one.
    pub grpc: SocketAddr,
    /// Where HTTP listens, if it does; port 0 takes a free one.
    pub http: Option<SocketAddr>,
    /// Where records go, and come back from.
    pub log: LogSource,
    /// Where time comes from.
    pub clock: Clock,
    /// Where figures go.
    pub telemetry: Arc<Telemetry>,
    /// What the process may hold in memory; see [`limits::edge`].
    pub memory_budget_bytes: u64,
    /// How long units from before a restart are kept for the trainers that hold them.
    pub restart_grace_ms: u64,
}

/// Where a service's records go, and come back from.
pub enum LogSource {
    /// A log that is there.
    Given(Arc<dyn Log>),
    /// Files.
    Disk {
        /// The directory.
        storage: Arc<dyn Storage>,
        /// How it is opened.
        options: Options,
    },
}

impl Default for ServiceOptions {
    /// Free loopback ports, a log in memory that survives nothing, the machine's clock; what is read waits for nobody.
    fn default() -> Self {
        let free = SocketAddr::from(([127, 0, 0, 1], 0));
        Self {
            grpc: free,
            http: Some(free),
            log: LogSource::Given(Arc::new(MemoryLog::forgetting())),
            clock: Clock::machine(),
            telemetry: Telemetry::install(),
            memory_budget_bytes: limits::MEMORY_BUDGET_BYTES,
            restart_grace_ms: 0,
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
    /// The log cannot be opened.
    #[error("cannot open the log: {0}")]
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
    log_failed: Option<watch::Receiver<Option<Failure>>>,
}

/// How long streams may take to end in a drain.
const DRAIN_SECONDS_MAX: u64 = 8;
/// How often it is said how far the reading of the log has come.
const PROGRESS_MS: u64 = 200;
/// How often histograms are tidied.
const UPKEEP_SECONDS: u64 = 5;

/// Has the system give memory to this process in small pages only. A large page is cleared at once when it is touched first, and
/// whoever is served at that moment waits for it: where memory comes from a hypervisor, for up to 10 ms. In small pages the same
/// bytes take no longer, a little at a time.
///
/// # Errors
/// If the system does not know of it.
pub fn take_small_pages() -> std::io::Result<()> {
    Ok(rustix::thread::disable_transparent_huge_pages(true)?)
}

/// After how many turns of its tasks a thread looks for what has come.
const EVENT_INTERVAL_TURNS: u32 = 8;

/// The threads on which a service serves: whoever has come is looked for between a few turns of those that are busy, not after dozens.
#[must_use]
pub fn runtime() -> tokio::runtime::Builder {
    let mut runtime = tokio::runtime::Builder::new_multi_thread();
    runtime.enable_all().event_interval(EVENT_INTERVAL_TURNS).global_queue_interval(EVENT_INTERVAL_TURNS);
    runtime
}

/// Starts a service: listens, reads its log, and takes work.
///
/// # Errors
/// If the log cannot be read, or an address not be listened on.
pub async fn start(options: ServiceOptions) -> Result<RunningService, ServiceError> {
    let ServiceOptions { grpc, http, log, clock, telemetry, memory_budget_bytes, restart_grace_ms } = options;
    let readiness = Arc::new(Readiness::starting("the log is about to be read"));
    let eviction = Eviction::default();
    let store_options =
        StoreOptions { clock, telemetry: Arc::clone(&telemetry), memory_budget_bytes, eviction, restart_grace_ms };
    let (store, commands) = Store::new(store_options);
    let listener = listen(grpc).await?;
    let grpc_address = listener.local_addr().map_err(|source| ServiceError::Listen { address: grpc, source })?;
    let http_state = HttpState { telemetry: Arc::clone(&telemetry), readiness: Arc::clone(&readiness) };
    let (http_address, http) = start_http(http, http_state).await?;
    let (drain, draining) = watch::channel(false);
    let shared = Shared::new(Arc::clone(&store), Arc::new(drain), Arc::clone(&readiness));
    let (stop, stops) = oneshot::channel::<()>();
    let grpc = tokio::spawn(serve_grpc(listener, shared, stops));

    let opened = open_log(log, Sequencer::new(Arc::clone(&store)), &telemetry, &readiness).await;
    let Opened { sequencer, log, last, disk } = opened.inspect_err(|_| grpc.abort())?;
    store.open_log(log, last);
    let (stop_sequencer, sequencer_stops) = oneshot::channel::<()>();
    let sequencer = tokio::spawn(sequencer.run(commands, ended(sequencer_stops)));
    let timers = {
        let store = Arc::clone(&store);
        tokio::spawn(async move { store.run_timers().await })
    };
    read_back(&store);
    let log_failed = disk.as_ref().map(|disk| disk.failed());
    let upkeep = tokio::spawn(upkeep(telemetry, disk));
    let readiness_follows = tokio::spawn(follow_drain(draining, Arc::clone(&readiness)));
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
        log_failed,
    })
}

/// Reads rollouts back from the log when that is asked for, on threads that end with the store.
fn read_back(store: &Arc<Store>) {
    let requests = Arc::new(Mutex::new(store.readings()));
    for _ in 0..limits::READING_THREADS {
        let (requests, store) = (Arc::clone(&requests), Arc::downgrade(store));
        std::thread::spawn(move || carry::read_on_request(&requests, || store.upgrade()));
    }
}

async fn serve_grpc(listener: TcpListener, shared: Shared, stops: oneshot::Receiver<()>) {
    let readiness = Arc::clone(&shared.readiness);
    if let Err(error) = rpc::serve(listener, shared, ended(stops)).await {
        tracing::error!(%error, "gRPC has failed");
        readiness.failed(format!("gRPC has failed: {error}"));
    }
}

/// A log whose records are all applied.
struct Opened {
    sequencer: Sequencer,
    log: Arc<dyn Log>,
    last: Position,
    disk: Option<Arc<DiskLog>>,
}

async fn open_log(
    source: LogSource,
    mut sequencer: Sequencer,
    telemetry: &Arc<Telemetry>,
    readiness: &Arc<Readiness>,
) -> Result<Opened, LogError> {
    match source {
        LogSource::Given(log) => {
            let last = *log.durable_through().borrow();
            if last.0 > 0 {
                sequencer.replay(&log)?;
            }
            Ok(Opened { sequencer, log, last, disk: None })
        }
        LogSource::Disk { storage, options } => {
            let progress = Arc::new(Progress::default());
            let begun = Instant::now();
            let says =
                tokio::spawn(say_progress(Arc::clone(&progress), begun, Arc::clone(telemetry), Arc::clone(readiness)));
            let of_syncs = Arc::clone(telemetry);
            let storage = Arc::new(Watched::new(storage, move |synced| of_syncs.log_sync(synced.took)));
            let recovery = recover(storage, options, progress, sequencer).await;
            says.abort();
            let Recovery { sequencer, log, last, recovered } = recovery?;
            telemetry.set_replay(begun.elapsed(), 0);
            say_recovered(&recovered, begun.elapsed());
            Ok(Opened { sequencer, log: Arc::clone(&log) as Arc<dyn Log>, last, disk: Some(log) })
        }
    }
}

/// Says how far the reading of the log has come, and how long it may take, until this is given up.
async fn say_progress(progress: Arc<Progress>, begun: Instant, telemetry: Arc<Telemetry>, readiness: Arc<Readiness>) {
    let mut every = tokio::time::interval(Duration::from_millis(PROGRESS_MS));
    loop {
        every.tick().await;
        let (total, read) = (progress.total_bytes(), progress.read_bytes());
        let left = total.saturating_sub(read);
        telemetry.set_replay(begun.elapsed(), left);
        let estimate = match begun.elapsed().as_millis() * u128::from(left) / u128::from(read.max(1)) {
            // The first bytes say little of how fast the rest goes.
            _ if read < total.div_ceil(100) => String::new(),
            left_ms => format!(", some {} s are left", left_ms.div_ceil(1000)),
        };
        let megabytes = |bytes: u64| bytes / 1_000_000;
        readiness.not_yet(format!("the log is being read: {} of {} MB{estimate}", megabytes(read), megabytes(total)));
    }
}

/// Says what was found in the log.
fn say_recovered(recovered: &Recovered, took: Duration) {
    let (first, next, epoch) = (recovered.first_position.0, recovered.next_position.0, recovered.epoch);
    tracing::info!(first, next, epoch, took_ms = took.as_millis(), "the log is read");
    if let Some(cut) = &recovered.cut {
        let (file, offset_bytes, position) = (&cut.file, cut.offset_bytes, cut.position.0);
        tracing::warn!(file, offset_bytes, position, "the end of the log was torn, and is cut: nobody was answered it");
    }
    for dropped in &recovered.dropped {
        let (file, offset_bytes) = (&dropped.file, dropped.offset_bytes);
        let (from, to_exclusive) = (dropped.from.map(|from| from.0), dropped.to_exclusive.map(|to| to.0));
        tracing::error!(
            file,
            offset_bytes,
            from,
            to_exclusive,
            "records that were answered are given up, as was asked"
        );
    }
}

impl RunningService {
    /// Drains and stops: streams end with a delay after which to come back. Over in ten seconds.
    pub async fn stop(self) {
        drop(self.stop_and_look().await);
    }

    /// Waits until the log fails, after which nothing is answered any more; says why. Never, if it does not.
    pub async fn log_failed(&self) -> String {
        let failed = async {
            let mut failed = self.log_failed.clone()?;
            let failure = failed.wait_for(Option::is_some).await.ok()?;
            failure.as_ref().map(ToString::to_string)
        };
        match failed.await {
            Some(failure) => {
                self.readiness.failed(format!("the log has failed: {failure}"));
                failure
            }
            None => std::future::pending().await,
        }
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
        let log = Arc::clone(self.store.log());
        let closed = tokio::task::spawn_blocking(move || log.close()).await;
        if let Ok(Err(failure)) = closed {
            tracing::error!(%failure, "the log has failed; what was answered is there, what was not may be lost");
        }
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

async fn upkeep(telemetry: Arc<Telemetry>, disk: Option<Arc<DiskLog>>) {
    let mut every = tokio::time::interval(Duration::from_secs(UPKEEP_SECONDS));
    loop {
        every.tick().await;
        telemetry.upkeep();
        if let Some(figures) = disk.as_ref().map(|disk| disk.figures()) {
            telemetry.set_log(figures.disk_bytes, figures.budget_bytes, figures.queued_bytes);
        }
    }
}
