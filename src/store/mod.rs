//! The live rollouts of the service, and the way of an event through them.
//!
//! The [`Store`] holds every rollout in a sharded map, each behind a lock of its own. [`Store::report`] finds the rollout, and
//! under that one lock judges the event, gives its record to the journal together with its effects, and applies it. What needs
//! more than one rollout to judge, or concerns groups, consumers and runs, is asked of the one *sequencing task*
//! ([`sequencer`]), which owns them and takes the effects of records in the order of their positions, once durable.
//!
//! What all of it holds in memory is counted in [`memory`], which says what is refused when that is short.
//!
//! Lock order: a rollout's lock, then the journal's or a watcher's; never two rollouts. No lock is held over an `.await`, and a
//! guard of the map is dropped in the statement that takes it.

pub mod carry;
pub mod checkpoint;
pub mod clock;
pub mod effect;
pub mod evict;
mod figures;
pub mod image;
mod look;
pub mod memory;
mod recency;
pub mod recovery;
pub mod replay;
pub mod report;
pub mod sequencer;
mod timers;
pub mod watch;

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use dashmap::DashMap;
use parking_lot::Mutex;
use tokio::sync::{Semaphore, mpsc};

use crate::forest::call::CallIndex;
use crate::ids::{RolloutId, RolloutRef, RunId};
use crate::limits::{self, EdgeBytes};
use crate::log::journal::Journal;
use crate::log::{Log, Position};
use crate::rollout::Rollout;
use crate::rollout::run_settings::RunSettings;
use crate::telemetry::{RunMetrics, Telemetry};

use carry::Reading;
use clock::Clock;
use effect::{Ended, Notice, Sequenced};
use evict::{Finalised, Tokens};
use memory::{Memory, Share};
use recency::Recency;
use sequencer::Command;
use timers::Timers;

/// Which rollout, over all its attempts.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RolloutKey {
    /// Its run.
    pub run: RunId,
    /// Its id.
    pub rollout: RolloutId,
}

impl RolloutRef {
    /// The rollout, over all its attempts.
    #[must_use]
    pub fn key(&self) -> RolloutKey {
        RolloutKey { run: self.run.clone(), rollout: self.rollout.clone() }
    }
}

/// A rollout's place in the map. A removed one is marked, so that who found it looks up again.
pub(crate) struct Entry {
    pub(crate) slot: Mutex<Slot>,
    /// The earliest deadline that a timer is set for, or [`u64::MAX`].
    pub(crate) timer_at_ms: AtomicU64,
}

/// What stands at a rollout's place.
pub(crate) enum Slot {
    /// An attempt that is open or finalised.
    Live(Box<Live>),
    /// A tombstone, and the record that it comes from.
    Ended(Ended, Position),
    /// Removed from the map.
    Removed,
}

/// An attempt that is open or finalised.
pub(crate) struct Live {
    pub(crate) attempt: u32,
    pub(crate) run: Arc<Run>,
    pub(crate) rollout: Rollout,
    pub(crate) settings_version: u64,
    /// Where its records stand in the log, besides its opening; nothing if that does not keep them.
    pub(crate) positions: Vec<Position>,
    pub(crate) opened_unix_ms: u64,
    pub(crate) heard_unix_ms: u64,
    /// What is known besides, if it is finalised.
    pub(crate) finalised: Option<Box<FinalisedFacts>>,
    /// When its tokens were used last, on the store's clock.
    pub(crate) used_ms: u64,
    pub(crate) tokens: Tokens,
    /// Its tokens were brought back, and who asked for them has not used them yet.
    pub(crate) is_awaited: bool,
    pub(crate) refused_requests: u64,
    /// The last record that it was judged from.
    pub(crate) last_position: Position,
    /// Who reported the calls that wait for their base.
    pub(crate) reporters: BTreeMap<CallIndex, ReporterId>,
    /// What it holds in memory.
    pub(crate) share: Arc<Share>,
    /// Of this, the texts of its ids.
    pub(crate) texts_bytes: u64,
}

// There may be a hundred thousand that wait: it fits a size of the allocator, and what few have is behind a pointer.
const _: () = assert!(size_of::<Live>() <= 192);

/// What the store knows of a finalised rollout.
pub(crate) struct FinalisedFacts {
    pub(crate) unix_ms: u64,
    /// Where the record that finalised it stood first, which may be before the copy that it was read from. It is not known before
    /// that record has a position.
    pub(crate) position: Option<Position>,
    /// How manieth of its run it is, once the sequencing task has it.
    pub(crate) number: Option<u64>,
    /// The rollout, for all others who hold it.
    pub(crate) shared: Arc<Finalised>,
}

/// A stream of reports, to which notices can be sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ReporterId(u64);

/// What is known of a run outside the sequencing task.
pub struct Run {
    /// Its settings now.
    pub settings: Mutex<(u64, Arc<RunSettings>)>,
    /// When it was made, milliseconds since the Unix epoch.
    pub created_unix_ms: u64,
    /// How many rollouts stand where.
    pub counts: RunCounts,
    /// Who watches it.
    pub(crate) watchers: watch::Watchers,
    /// Its figures.
    pub metrics: Arc<RunMetrics>,
}

/// How many rollouts of a run stand where.
#[derive(Debug, Default)]
pub struct RunCounts {
    /// Open: neither finalised nor ended.
    pub open: AtomicU64,
    /// Open and sealed.
    pub sealed: AtomicU64,
    /// Open and rewarded.
    pub rewarded: AtomicU64,
    /// Open, sealed and rewarded: calls are missing.
    pub incomplete: AtomicU64,
    /// Open, and in no group.
    pub alone: AtomicU64,
    /// Distinct calls accepted, ever.
    pub calls: AtomicU64,
    /// Requests about its rollouts that were refused since the service started.
    pub refused: AtomicU64,
}

/// What a store is made with.
pub struct StoreOptions {
    /// Where time comes from.
    pub clock: Clock,
    /// Where figures go.
    pub telemetry: Arc<Telemetry>,
    /// What the process may hold in memory: rollouts have a part of it ([`limits::edge::rollouts_bytes`]), the edge of the service the
    /// rest.
    pub memory_budget_bytes: u64,
    /// When their tokens leave it.
    pub eviction: Eviction,
    /// How long units of a log that was read are only for those who say that they hold them.
    pub restart_grace_ms: u64,
}

/// When tokens leave memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Eviction {
    /// The part of the budget above which those of idle rollouts do.
    pub idle_above_percent: u64,
    /// The part above which all others do, too.
    pub above_percent: u64,
    /// What a rollout's tokens must take to be worth it.
    pub token_bytes_min: u64,
}

impl Default for Eviction {
    fn default() -> Self {
        Self {
            idle_above_percent: limits::MEMORY_EVICT_IDLE_PERCENT,
            above_percent: limits::MEMORY_EVICT_PERCENT,
            token_bytes_min: limits::EVICTED_TOKEN_BYTES_MIN,
        }
    }
}

/// All live rollouts.
pub struct Store {
    pub(crate) rollouts: DashMap<RolloutKey, Arc<Entry>>,
    pub(crate) runs: DashMap<RunId, Arc<Run>>,
    pub(crate) journal: Journal<Sequenced>,
    /// In replay: when the record that is applied was applied first. [`u64::MAX`]: now.
    replayed_unix_ms: AtomicU64,
    pub(crate) clock: Clock,
    pub(crate) telemetry: Arc<Telemetry>,
    pub(crate) timers: Timers,
    commands: mpsc::Sender<Command>,
    /// Who reads rollouts back from the log, if there is somebody.
    readings: OnceLock<mpsc::Sender<Reading>>,
    /// What gives tokens back that have left memory.
    source: OnceLock<Arc<dyn Log>>,
    /// Rollouts whose tokens may leave memory.
    recency: Arc<Recency>,
    eviction: Eviction,
    restart_grace_ms: u64,
    reporters: DashMap<ReporterId, mpsc::Sender<Notice>>,
    next_id: AtomicU64,
    in_flight: Arc<Semaphore>,
    memory: Arc<Memory>,
    edge: EdgeBytes,
    draining: AtomicBool,
}

impl Store {
    /// A store without rollouts, and what its sequencing task takes commands from. Its log is opened when all that it holds was
    /// replayed.
    #[must_use]
    pub fn new(options: StoreOptions) -> (Arc<Self>, mpsc::Receiver<Command>) {
        let (commands, receiver) = mpsc::channel(limits::COMMANDS_OUTSTANDING_MAX);
        let edge = EdgeBytes::beside(options.memory_budget_bytes);
        let store = Self {
            rollouts: DashMap::new(),
            runs: DashMap::new(),
            journal: Journal::default(),
            replayed_unix_ms: AtomicU64::new(u64::MAX),
            clock: options.clock,
            telemetry: options.telemetry,
            timers: Timers::default(),
            commands,
            readings: OnceLock::new(),
            source: OnceLock::new(),
            recency: Arc::default(),
            eviction: options.eviction,
            restart_grace_ms: options.restart_grace_ms,
            reporters: DashMap::new(),
            next_id: AtomicU64::new(1),
            in_flight: Arc::new(Semaphore::new(edge.in_flight)),
            edge,
            memory: Memory::new(limits::edge::rollouts_bytes(options.memory_budget_bytes)),
            draining: AtomicBool::new(false),
        };
        (Arc::new(store), receiver)
    }

    /// From now on records go to this log, whose last position is `last`.
    pub fn open_log(&self, log: Arc<dyn Log>, last: Position) {
        self.read_from(Arc::clone(&log));
        self.journal.open(log, last);
        self.make_room(None);
    }

    /// The log, once it is open.
    #[must_use]
    pub fn log(&self) -> &Arc<dyn Log> {
        self.journal.log()
    }

    /// Milliseconds since the Unix epoch, now, or when a record that is replayed was applied first.
    pub(crate) fn unix_ms(&self) -> u64 {
        match self.replayed_unix_ms.load(Ordering::Relaxed) {
            u64::MAX => self.clock.unix_ms(),
            replayed => replayed,
        }
    }

    /// Whether records are being replayed.
    pub(crate) fn is_replaying(&self) -> bool {
        self.replayed_unix_ms.load(Ordering::Relaxed) != u64::MAX
    }

    /// In replay: when the record that comes next was applied first; `None` at its end.
    pub(crate) fn replaying(&self, unix_ms: Option<u64>) {
        self.replayed_unix_ms.store(unix_ms.unwrap_or(u64::MAX), Ordering::Relaxed);
    }

    /// The clock that everything here goes by.
    #[must_use]
    pub fn clock(&self) -> &Clock {
        &self.clock
    }

    /// Where figures go.
    #[must_use]
    pub fn telemetry(&self) -> &Arc<Telemetry> {
        &self.telemetry
    }

    /// What rollouts hold in memory.
    #[must_use]
    pub fn memory(&self) -> &Arc<Memory> {
        &self.memory
    }

    /// What the edge may hold beside that.
    #[must_use]
    pub fn edge(&self) -> &EdgeBytes {
        &self.edge
    }

    /// Waits until what was judged from this position may be answered.
    pub async fn durable(&self, position: Position) {
        if !self.journal.is_durable(position) {
            self.journal.durable(position).await;
        }
    }

    /// Whether what was judged from this position may be answered now.
    #[must_use]
    pub fn is_durable(&self, position: Position) -> bool {
        self.journal.is_durable(position)
    }

    /// The last position given.
    #[must_use]
    pub fn last_position(&self) -> Position {
        self.journal.last()
    }

    /// Waits for room for a message of so many bytes, which is given back when the permit is dropped.
    pub async fn permit(&self, message_bytes: usize) -> Option<tokio::sync::OwnedSemaphorePermit> {
        self.journal.until_queue_is_short().await;
        let bytes = u32::try_from(message_bytes.clamp(1, self.edge.in_flight)).unwrap_or(u32::MAX);
        Arc::clone(&self.in_flight).acquire_many_owned(bytes).await.ok()
    }

    /// A new stream of reports, and the notices for it.
    pub fn reporter(&self) -> (ReporterId, mpsc::Receiver<Notice>) {
        let id = ReporterId(self.next_id());
        let (sender, receiver) = mpsc::channel(limits::STREAM_NOTICES_OUTSTANDING_MAX);
        self.reporters.insert(id, sender);
        (id, receiver)
    }

    /// A stream of reports is gone.
    pub fn forget_reporter(&self, id: ReporterId) {
        self.reporters.remove(&id);
    }

    /// Sends a notice if its stream is there and has room.
    pub(crate) fn notify(&self, reporter: ReporterId, notice: Notice) {
        let sender = self.reporters.get(&reporter).map(|sender| sender.clone());
        if let Some(sender) = sender {
            // A full line is the client's choice: a notice is a courtesy, and the seal's answer says the same.
            let _ = sender.try_send(notice);
        }
    }

    /// Gives the sequencing task something to do; waits while its line is full. False if the task is gone.
    pub async fn command(&self, command: Command) -> bool {
        self.commands.send(command).await.is_ok()
    }

    /// Somebody reads rollouts back from now on.
    pub fn readings(&self) -> mpsc::Receiver<Reading> {
        let (requests, receiver) = mpsc::channel(limits::READINGS_OUTSTANDING_MAX);
        let first = self.readings.set(requests).is_ok();
        debug_assert!(first, "one reads");
        receiver
    }

    /// Gives the sequencing task something to do, on a thread that may wait while its line is full.
    fn command_now(&self, command: Command) {
        // Without the task nobody wants it.
        let _ = self.commands.blocking_send(command);
    }

    /// Has rollouts read back; false if nobody can now.
    pub(crate) fn read_back(&self, reading: Reading) -> bool {
        self.readings.get().is_some_and(|requests| requests.try_send(reading).is_ok())
    }

    /// A number that no stream or consumer has had.
    pub fn next_id(&self) -> u64 {
        self.next_id.fetch_add(1, Ordering::Relaxed)
    }

    /// From now on rollouts are neither opened nor finished here.
    pub fn start_draining(&self) {
        self.draining.store(true, Ordering::Relaxed);
    }

    /// Whether the service is about to stop.
    #[must_use]
    pub fn is_draining(&self) -> bool {
        self.draining.load(Ordering::Relaxed)
    }

    /// How many rollouts a clock will look at.
    #[must_use]
    pub fn deadline_count(&self) -> usize {
        self.timers.count()
    }

    pub(crate) fn entry(&self, key: &RolloutKey) -> Option<Arc<Entry>> {
        self.rollouts.get(key).map(|entry| Arc::clone(&entry))
    }

    /// What is known of a run.
    #[must_use]
    pub fn run(&self, run: &RunId) -> Option<Arc<Run>> {
        self.runs.get(run).map(|run| Arc::clone(&run))
    }
}

impl Entry {
    pub(crate) fn new(slot: Slot) -> Arc<Self> {
        Arc::new(Self { slot: Mutex::new(slot), timer_at_ms: AtomicU64::new(u64::MAX) })
    }
}

impl RunCounts {
    /// Takes account of an open rollout that was so and is so now; `None` is "not open".
    pub(crate) fn moved(&self, before: Option<OpenFacts>, now: Option<OpenFacts>) {
        let step = |count: &AtomicU64, was: bool, is: bool| match (was, is) {
            (false, true) => drop(count.fetch_add(1, Ordering::Relaxed)),
            (true, false) => drop(count.fetch_sub(1, Ordering::Relaxed)),
            (true, true) | (false, false) => {}
        };
        let of = |facts: Option<OpenFacts>| (facts.is_some(), facts.unwrap_or_default());
        let ((was_open, was), (is_open, is)) = (of(before), of(now));
        step(&self.open, was_open, is_open);
        step(&self.sealed, was.sealed, is.sealed);
        step(&self.rewarded, was.rewarded, is.rewarded);
        step(&self.alone, was.alone, is.alone);
        step(&self.incomplete, was.sealed && was.rewarded, is.sealed && is.rewarded);
    }
}

/// What the counts of a run need of an open rollout.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct OpenFacts {
    pub(crate) sealed: bool,
    pub(crate) rewarded: bool,
    pub(crate) alone: bool,
}

impl OpenFacts {
    /// Those of a rollout, if it is open.
    pub(crate) fn of(rollout: &Rollout) -> Option<Self> {
        let facts = rollout.facts();
        rollout.finalised().is_none().then(|| Self {
            sealed: facts.seal.is_some(),
            rewarded: facts.reward.is_some(),
            alone: facts.group.is_none(),
        })
    }
}
