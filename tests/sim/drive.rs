//! One seed from its beginning to its end: one life of the service after another, each with its troubles and its end, then a calm
//! one in which everything comes to rest, and what must be true then.

use std::cell::RefCell;
use std::ops::ControlFlow;
use std::rc::Rc;
use std::sync::Arc;

use hedgerow::log::segments::faulty::{Fault, FaultyStorage};
use hedgerow::log::segments::{ReadError, SegmentError};
use hedgerow::log::{Log, LogError, Position, Record, RetiredFor};
use hedgerow::store::image::Image;
use hedgerow::store::sequencer::Command;
use hedgerow::telemetry::Telemetry;
use tokio::sync::oneshot;

use crate::character::{By, Ending, IDLE_MS, LEASE_MS, MINUTE_MS, MISSING_MS, OpeningFault};
use crate::executor::{Executor, Owner};
use crate::life::{self, Life, Opened};
use crate::world::{Counts, World};
use crate::{check, differ, operator, plan, trainer, worker};

/// Steps in which everything must come to rest when nothing goes wrong.
const STEPS_MAX: usize = 300_000;
/// How often time goes on when all is at rest and something has not ended.
const WAITS_MAX: usize = 40;
/// Steps after the log has failed, before the process ends.
const AFTERMATH: usize = 30;
/// Steps that streams have to end in when the service stops.
const DRAIN_STEPS: usize = 200;

/// What a seed came to.
pub(crate) struct Outcome {
    pub(crate) digest: u128,
    pub(crate) fault: Option<String>,
    pub(crate) lines: Vec<String>,
    pub(crate) counts: Counts,
}

/// Runs a seed.
pub(crate) fn run(seed: u64, telemetry: &Arc<Telemetry>, keeps_lines: bool) -> Outcome {
    let executor = Executor::default();
    let world = World::new(seed, keeps_lines, executor.spawner());
    let disk = FaultyStorage::new(seed ^ 0x5EED);
    let mut field =
        Field { world, executor, disk, telemetry: Arc::clone(telemetry), life: None, before: Before::default() };
    field.run();
    field.executor.end(|_| true);
    field.life = None;
    let world = &field.world;
    Outcome { digest: world.digest(), fault: world.fault(), lines: world.lines(), counts: world.counts() }
}

fn is_client(owner: Owner) -> bool {
    owner != Owner::Service
}

pub(crate) struct Field {
    pub(crate) world: Rc<World>,
    executor: Executor,
    disk: FaultyStorage,
    telemetry: Arc<Telemetry>,
    life: Option<Rc<Life>>,
    before: Before,
}

/// What the life before has left.
#[derive(Default)]
struct Before {
    answered_through: u64,
    last: u64,
    /// The state, if it was asked to stop.
    image: Option<Image>,
}

impl Field {
    fn run(&mut self) {
        self.world.say("seed", format_args!("{:?}", self.world.character));
        let endings = self.world.character.endings.clone();
        let mut opening = None;
        for ending in endings {
            if !self.open(opening) {
                return;
            }
            self.live(ending);
            self.end(ending.by);
            opening = ending.opening_fails;
            if self.world.fault().is_some() {
                return;
            }
        }
        if self.open(opening) {
            self.come_to_rest();
        }
    }

    pub(crate) fn life(&self) -> Rc<Life> {
        Rc::clone(self.life.as_ref().expect("a life has begun"))
    }

    /// Reads the log, as often as it takes, and begins to serve; false if it does not open, or not as it should.
    fn open(&mut self, opening: Option<OpeningFault>) -> bool {
        if let Some(opening) = opening {
            self.world.count("openings struck", 1);
            match opening {
                OpeningFault::Read { in_reads } => self.disk.fail_read_in(in_reads),
                OpeningFault::Operation { fault, in_operations } => self.disk.fail_in(in_operations, fault),
            }
        }
        let machine_may_stop = !matches!(opening, Some(OpeningFault::Read { .. }))
            && self.world.character.log.durability == hedgerow::log::segments::Durability::Fsync;
        for attempt in 0..3 {
            match life::open(&self.world, &self.disk, &self.telemetry) {
                Ok(opened) => {
                    self.disk.heal();
                    self.begin(opened);
                    return self.world.fault().is_none();
                }
                Err(error) => {
                    self.world.say("service", format_args!("does not open: {error}"));
                    self.world.count("openings failed", 1);
                    let is_told = matches!(
                        error,
                        LogError::Segments(SegmentError::Io { .. } | SegmentError::Full { .. })
                            | LogError::Read(ReadError::Io { .. })
                            | LogError::NotRestored(_)
                    );
                    if !is_told || (attempt > 0 && opening.is_some()) || attempt > 1 {
                        self.world.fail(format!("the log does not open: {error}"));
                        return false;
                    }
                }
            }
            if machine_may_stop {
                self.disk.crash()
            } else {
                self.disk.kill()
            }
            self.disk.set_capacity_bytes(u64::MAX);
        }
        self.world.fail("a disk without faults does not open");
        false
    }

    fn begin(&mut self, opened: Opened) {
        let (recovery, before) = (&opened.recovery, std::mem::take(&mut self.before));
        let last = recovery.last.0;
        let cut = recovery.recovered.cut.as_ref().map(|cut| (cut.position.0, cut.whole_frames));
        self.world.say("service", format_args!("opens at {last}, cut {cut:?}"));
        self.world.count("openings", 1);
        self.world.count("torn ends", usize::from(cut.is_some()));
        if last < before.answered_through || last > before.last {
            let fault = format!("the log ends at {last}: {} answered, {} given", before.answered_through, before.last);
            self.world.fail(fault);
        }
        if !recovery.recovered.dropped.is_empty() {
            self.world.fail(format!("given up: {:?}", recovery.recovered.dropped));
        }
        self.world.count("records lost unanswered", usize::try_from(before.last.saturating_sub(last)).unwrap_or(0));
        self.world.model.borrow_mut().lose_after(last, &self.world.plan);
        if let Some(image) = before.image {
            if last != before.last {
                self.world.fail(format!("it stopped at {}, and begins at {last}", before.last));
            }
            self.world.check("after a stop", differ::images(&image, &recovery.sequencer.image()));
        }
        let life = Life::begin(&self.world, opened);
        self.life = Some(Rc::clone(&life));
        self.rest(false);
        self.made_unasked(&life, last);
        operator::begin(&self.world, &life);
    }

    /// Before anybody asks, only what is needed to let go of the log may be written, and what follows by itself of what is there.
    fn made_unasked(&self, life: &Life, last: u64) {
        if life.store.last_position().0 == last {
            return;
        }
        self.world.count("snapshots before anybody asked", 1);
        let log = life.store.log();
        let read = log.read(Position(last + 1).max(log.first_position()), &mut |_, dated| {
            let is_upkeep = matches!(
                dated.record,
                Record::SnapshotBegins { .. }
                    | Record::RunSnapshot { .. }
                    | Record::RunTotals { .. }
                    | Record::RolloutsRetired { reason: RetiredFor::Room | RetiredFor::Retention, .. }
                    | Record::GroupRules { .. }
                    | Record::GroupReleased { .. }
                    | Record::Tombstones { .. }
                    | Record::RolloutCopyBegins(_)
                    | Record::RolloutCopied { .. }
                    | Record::GroupSize { .. }
            );
            if !is_upkeep {
                self.world.fail(format!("made before anybody asks: {:?}", dated.record));
            }
            ControlFlow::Continue(())
        });
        if let Err(error) = read {
            self.world.fail(format!("what was made before anybody asks cannot be read: {error}"));
        }
    }

    /// One life, until something ends it.
    fn live(&mut self, ending: Ending) {
        if let By::Disk { fault, in_operations, .. } = ending.by {
            self.disk.fail_in(in_operations, fault);
            self.world.disk_may_fail.set(true);
        }
        let mut left = ending.steps;
        let mut has_failed = false;
        while left > 0 && self.world.fault().is_none() {
            left -= 1;
            if self.life().has_failed() && !has_failed {
                has_failed = true;
                self.world.count("logs failed", 1);
                let failure = self.life().log.failed().borrow().clone();
                self.world.say("service", format_args!("the log fails: {failure:?}"));
                left = left.min(self.world.below(AFTERMATH));
            }
            self.trouble();
            if !self.step() {
                self.world.say("service", "rests");
                break;
            }
        }
    }

    /// What may go wrong at any time.
    fn trouble(&mut self) {
        let (world, life) = (Rc::clone(&self.world), self.life());
        let character = &world.character;
        if !life.begun.get() {
            return;
        }
        if world.one_in(character.worker_dies) {
            let number = world.below(character.workers);
            world.say(format_args!("worker {number}"), "dies");
            world.count("workers died", 1);
            self.executor.end(|owner| owner == Owner::Worker(number));
            worker::begin(&world, &life, number);
        }
        if world.one_in(character.trainer_dies) {
            let group = world.below(character.consumer_groups.len());
            let member = world.below(character.consumer_groups[group].members);
            world.count("trainers died", 1);
            self.executor.end(|owner| owner == Owner::Trainer(group, member));
            trainer::dies(&world, &life, group, member);
            trainer::begin(&world, &life, group, member);
        }
        if world.one_in(character.time_jumps) {
            let jumps = [1000, MINUTE_MS, LEASE_MS + MINUTE_MS, MISSING_MS + MINUTE_MS, IDLE_MS + MINUTE_MS];
            let by = jumps[world.below(jumps.len())];
            world.say("time", format_args!("goes on by {by}"));
            world.advance(by);
        }
        if world.one_in(character.disk_fills) {
            let room =
                if world.one_in(2) { u64::MAX } else { (3 + world.below(9)) as u64 * character.log.segment_bytes };
            world.say("disk", format_args!("has room for {room}"));
            self.disk.set_capacity_bytes(room);
        }
    }

    /// The next thing that happens; false if nothing can.
    fn step(&mut self) -> bool {
        let life = self.life();
        let (ready, disk) = (self.executor.ready(), life.disk_is_busy());
        if ready.is_empty() && !disk {
            let Some(ms) = self.world.first_waiter_ms() else { return false };
            self.world.advance(ms);
            return true;
        }
        if self.world.one_in(40) {
            self.world.advance(1 + self.world.below(20) as u64);
        }
        let paces = self.world.character.paces;
        let pace = |owner: Owner| match owner {
            Owner::Service => paces.service,
            Owner::Worker(_) => paces.workers,
            Owner::Trainer(..) | Owner::Operator => paces.trainers,
        };
        let all: usize = ready.iter().map(|(_, owner)| pace(*owner)).sum();
        let mut place = self.world.below(all + if disk { paces.disk } else { 0 });
        for (number, owner) in ready {
            match place.checked_sub(pace(owner)) {
                Some(rest) => place = rest,
                None => {
                    self.executor.poll(number);
                    return true;
                }
            }
        }
        life.turn_disk();
        let durable = life.log_position();
        self.world.say("disk", format_args!("durable through {durable}"));
        true
    }

    /// Goes on until nothing can happen without time going on, or with it if `in_time`.
    fn rest(&mut self, in_time: bool) {
        for _ in 0..STEPS_MAX {
            let busy = in_time || !self.executor.ready().is_empty() || self.life().disk_is_busy();
            if self.world.fault().is_some() || !busy || !self.step() {
                return;
            }
        }
        self.world.fail(format!("it does not come to rest: {:?}", self.life().log.figures()));
    }

    /// Ends a life.
    fn end(&mut self, by: By) {
        if self.life.is_none() || self.world.fault().is_some() {
            return;
        }
        let by = if self.life().has_failed() && by == By::Stop { By::Kill } else { by };
        if matches!(by, By::Kill | By::MachineStops) && !self.life().has_failed() && self.world.one_in(3) {
            self.world.count("ends at rest", 1);
            self.keep_image();
        }
        self.world.say("service", format_args!("ends by {by:?}"));
        let machine_stops = match by {
            By::Kill => false,
            By::MachineStops => true,
            By::Disk { machine_stops, fault, .. } => machine_stops || fault == Fault::Crash,
            By::Stop => {
                self.stop();
                // What it has written is safe, whatever comes.
                self.world.character.log.durability == hedgerow::log::segments::Durability::Fsync
                    && self.world.one_in(2)
            }
        };
        self.world.count(
            match by {
                By::Kill => "kills",
                By::MachineStops => "machines stopped",
                By::Disk { .. } => "lives with a disk that fails",
                By::Stop => "stops",
            },
            1,
        );
        let life = self.life();
        self.before.answered_through = life.answered_through.get();
        self.before.last = life.store.last_position().0;
        // The disk first: what is dropped writes no more.
        if machine_stops {
            self.disk.crash()
        } else {
            self.disk.kill()
        }
        self.disk.set_capacity_bytes(u64::MAX);
        self.executor.end(|_| true);
        self.life = None;
        self.world.disk_may_fail.set(false);
        // Time while nobody serves expires nothing.
        let away_ms = [0, 1000, 2 * IDLE_MS][self.world.below(3)];
        self.world.advance(away_ms);
    }

    /// Has the service stop as it is asked to.
    fn stop(&mut self) {
        self.disk.set_capacity_bytes(u64::MAX);
        let life = self.life();
        life.start_draining();
        for _ in 0..DRAIN_STEPS {
            if !self.executor.has(is_client) || !self.step() {
                break;
            }
        }
        self.keep_image();
        if let (None, Err(failure)) = (self.world.fault(), life.log.close()) {
            self.world.fail(format!("the log does not close: {failure}"));
        }
    }

    /// Has everybody who asks end, and keeps the state in which the service comes to rest, to which it must come back.
    fn keep_image(&mut self) {
        self.disk.set_capacity_bytes(u64::MAX);
        self.executor.end(is_client);
        self.rest(false);
        if self.life().begun.get() {
            check::all(self);
        }
        self.life().stop();
        self.rest(false);
        match self.life().stopped() {
            Some(sequencer) => self.before.image = Some(sequencer.image()),
            None if self.world.fault().is_none() => self.world.fail("the sequencing task does not end"),
            None => {}
        }
    }

    /// Asks the sequencing task, and waits for the answer.
    pub(crate) fn ask<T: 'static>(&mut self, command: impl FnOnce(oneshot::Sender<T>) -> Command) -> Option<T> {
        let (reply, answer) = oneshot::channel();
        let (command, life, slot) = (command(reply), self.life(), Rc::new(RefCell::new(None)));
        let kept = Rc::clone(&slot);
        self.world.spawner.spawn(Owner::Operator, async move {
            life.store.command(command).await;
            kept.replace(answer.await.ok());
        });
        self.rest(false);
        slot.take()
    }

    /// Everything comes to its end, and then it is looked whether all is well.
    fn come_to_rest(&mut self) {
        self.world.calm.set(true);
        self.disk.set_capacity_bytes(u64::MAX);
        for _ in 0..WAITS_MAX {
            self.rest(true);
            let is_over = check::all_has_ended(&self.world, &self.life()).is_ok();
            let life = self.life();
            if self.world.fault().is_some() || (is_over && life.store.run(&plan::other_run()).is_none()) {
                break;
            }
            let world = Rc::clone(&self.world);
            self.world.spawner.spawn(Owner::Operator, async move {
                operator::release(&world, &life).await;
                operator::delete_other_run(&world, &life).await;
            });
            self.rest(true);
            self.world.advance(MISSING_MS + MINUTE_MS);
        }
        if self.world.fault().is_some() {
            return;
        }
        let ended = check::all_has_ended(&self.world, &self.life());
        self.world.check("at the end", ended);
        check::all(self);
        self.end(By::Stop);
        if self.world.fault().is_some() {
            return;
        }
        if !self.open(None) {
            return;
        }
        self.rest(true);
        check::memory(self);
        check::all(self);
        // Everything is told once more.
        let life = self.life();
        for (number, request) in self.world.plan.requests.iter().enumerate() {
            life.lines[request.worker].push(number);
        }
        self.rest(true);
        let ended = check::all_has_ended(&self.world, &self.life());
        self.world.check("told once more", ended);
    }
}
