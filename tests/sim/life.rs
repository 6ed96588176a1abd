//! One life of the service: the store, its sequencing task, timers and reader, on the log of the faulty disk.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::rc::Rc;
use std::sync::Arc;

use hedgerow::log::disk::DiskLog;
use hedgerow::log::segments::Progress;
use hedgerow::log::segments::faulty::FaultyStorage;
use hedgerow::log::{Log, LogError};
use hedgerow::store::carry::Reading;
use hedgerow::store::recovery::{self, Recovery};
use hedgerow::store::sequencer::Sequencer;
use hedgerow::store::{Store, StoreOptions};
use hedgerow::telemetry::Telemetry;
use tokio::sync::{Notify, oneshot};

use crate::executor::Owner;
use crate::trainer::Connection;
use crate::worker::Line;
use crate::world::World;

pub(crate) struct Life {
    pub(crate) store: Arc<Store>,
    pub(crate) log: Arc<DiskLog>,
    /// The last position of which anything was answered.
    pub(crate) answered_through: Cell<u64>,
    /// Workers and trainers have begun.
    pub(crate) begun: Cell<bool>,
    /// Streams are to end.
    pub(crate) draining: Cell<bool>,
    pub(crate) drain: Notify,
    /// What each worker has to send.
    pub(crate) lines: Vec<Rc<Line>>,
    /// The subscriptions that are open on the service's side, by group and member.
    pub(crate) connections: RefCell<BTreeMap<(usize, usize), Rc<Connection>>>,
    /// Those whose other side is gone, which the service has not noticed.
    pub(crate) half_open: RefCell<Vec<Rc<Connection>>>,
    /// How many segments there were when the log had nothing more to do.
    disk_rests: Cell<Option<usize>>,
    stop: RefCell<Option<oneshot::Sender<()>>>,
    stopped: Rc<RefCell<Option<Sequencer>>>,
}

/// A log that was read, and what serves on it.
pub(crate) struct Opened {
    pub(crate) recovery: Recovery,
    store: Arc<Store>,
    commands: tokio::sync::mpsc::Receiver<hedgerow::store::sequencer::Command>,
}

/// Reads the log.
pub(crate) fn open(world: &World, disk: &FaultyStorage, telemetry: &Arc<Telemetry>) -> Result<Opened, LogError> {
    let (store, commands) = Store::new(StoreOptions {
        clock: world.clock.clone(),
        telemetry: Arc::clone(telemetry),
        memory_budget_bytes: world.character.memory_budget_bytes,
        restart_grace_ms: world.character.restart_grace_ms,
        eviction: world.character.eviction,
    });
    let sequencer = Sequencer::new(Arc::clone(&store));
    let storage = Arc::new(disk.clone());
    let recovery = recovery::read(storage, world.character.log.clone(), &Progress::default(), sequencer)?;
    Ok(Opened { recovery, store, commands })
}

impl Life {
    /// Begins to serve.
    pub(crate) fn begin(world: &Rc<World>, opened: Opened) -> Rc<Self> {
        let Opened { recovery, store, commands } = opened;
        let log = recovery.log;
        store.open_log(Arc::clone(&log) as Arc<dyn Log>, recovery.last);
        let (stop, stops) = oneshot::channel::<()>();
        let stopped: Rc<RefCell<Option<Sequencer>>> = Rc::default();
        let (sequencer, keeps) = (recovery.sequencer, Rc::clone(&stopped));
        world.spawner.spawn(Owner::Service, async move {
            let ended = sequencer.run(commands, async move { drop(stops.await) }).await;
            keeps.replace(Some(ended));
        });
        let timed = Arc::clone(&store);
        world.spawner.spawn(Owner::Service, async move { timed.run_timers().await });
        let (reads, mut readings, counts) = (Arc::clone(&store), store.readings(), Rc::clone(world));
        world.spawner.spawn(Owner::Service, async move {
            while let Some(reading) = readings.recv().await {
                if let Reading::Carry(wanted) = &reading {
                    counts.count("rollouts read to be written forward", wanted.len());
                }
                if let Some(command) = reads.serve_reading(reading) {
                    reads.command(command).await;
                }
            }
        });
        Rc::new(Self {
            store,
            log,
            answered_through: Cell::new(0),
            begun: Cell::new(false),
            draining: Cell::new(false),
            drain: Notify::new(),
            lines: (0..world.character.workers).map(|_| Rc::default()).collect(),
            connections: RefCell::default(),
            half_open: RefCell::default(),
            disk_rests: Cell::new(None),
            stop: RefCell::new(Some(stop)),
            stopped,
        })
    }

    /// Has streams come to an end, and takes nothing new.
    pub(crate) fn start_draining(&self) {
        self.store.start_draining();
        self.draining.set(true);
        self.drain.notify_waiters();
        self.lines.iter().for_each(|line| line.more.notify_waiters());
    }

    /// Has the sequencing task end.
    pub(crate) fn stop(&self) {
        drop(self.stop.take());
    }

    /// The state of the sequencing task, once it has ended.
    pub(crate) fn stopped(&self) -> Option<Sequencer> {
        self.stopped.take()
    }

    /// Whether the log has something to do.
    pub(crate) fn disk_is_busy(&self) -> bool {
        let rests = self.disk_rests.get() == Some(self.log.figures().segments);
        !self.has_failed() && (self.log.queued_bytes() > 0 || !rests)
    }

    /// Has the log do the next thing.
    pub(crate) fn turn_disk(&self) {
        let rests = !self.log.turn();
        self.disk_rests.set(rests.then(|| self.log.figures().segments));
    }

    /// The last position that is durable.
    pub(crate) fn log_position(&self) -> u64 {
        self.log.durable_through().borrow().0
    }

    pub(crate) fn has_failed(&self) -> bool {
        self.log.failed().borrow().is_some()
    }

    /// Something that was judged from this position was answered.
    pub(crate) fn answered(&self, position: u64) {
        self.answered_through.set(position.max(self.answered_through.get()));
    }
}
