//! What all actors of a seed share: time, chance, what was planned, accepted and applied, and the trace of what happened.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Display;
use std::rc::Rc;
use std::time::Duration;

use hedgerow::cli::shuffle::SplitMix64;
use hedgerow::store::clock::Clock;
use xxhash_rust::xxh3::Xxh3;

use crate::applied::Applied;
use crate::character::Character;
use crate::executor::Spawner;
use crate::model::{Model, Said};
use crate::operator::Runs;
use crate::plan::Plan;
use crate::seek::Kept;
use crate::service::Row;

/// How often something happened, to know that it was worth something.
pub(crate) type Counts = BTreeMap<&'static str, u64>;

pub(crate) struct World {
    pub(crate) character: Character,
    pub(crate) plan: Plan,
    pub(crate) clock: Clock,
    pub(crate) spawner: Spawner,
    pub(crate) model: RefCell<Model>,
    /// What each request was answered last, durably.
    pub(crate) answers: RefCell<Vec<Option<Said>>>,
    /// What each consumer group has applied.
    pub(crate) applied: Vec<RefCell<Applied>>,
    /// Checkpoints that the operator keeps.
    pub(crate) checkpoints: RefCell<Vec<Kept>>,
    /// Rows that went by.
    pub(crate) seen: RefCell<Vec<Row>>,
    /// Nothing goes wrong any more, and everybody comes to an end.
    pub(crate) calm: Cell<bool>,
    /// The disk may have failed, so that nothing can be read from it.
    pub(crate) disk_may_fail: Cell<bool>,
    pub(crate) runs: RefCell<Runs>,
    chance: RefCell<SplitMix64>,
    trace: RefCell<Trace>,
    counts: RefCell<Counts>,
    fault: RefCell<Option<String>>,
    waiters: RefCell<BTreeSet<(u64, u64)>>,
    next_waiter: Cell<u64>,
}

/// What happened, line by line.
struct Trace {
    digest: Xxh3,
    /// The lines themselves, if somebody wants to read them.
    lines: Option<Vec<String>>,
}

impl World {
    pub(crate) fn new(seed: u64, keeps_lines: bool, spawner: Spawner) -> Rc<Self> {
        let mut chance = SplitMix64::new(seed);
        let character = Character::new(&mut chance).with_groups(&mut SplitMix64::new(!seed));
        let plan = Plan::new(&character, &mut chance);
        let answers = vec![None; plan.requests.len()];
        let applied = character.consumer_groups.iter().map(|_| RefCell::default()).collect();
        Rc::new(Self {
            character,
            plan,
            clock: Clock::manual(),
            spawner,
            model: RefCell::default(),
            answers: RefCell::new(answers),
            applied,
            checkpoints: RefCell::default(),
            seen: RefCell::default(),
            calm: Cell::new(false),
            disk_may_fail: Cell::new(false),
            runs: RefCell::default(),
            chance: RefCell::new(chance),
            trace: RefCell::new(Trace { digest: Xxh3::new(), lines: keeps_lines.then(Vec::new) }),
            counts: RefCell::default(),
            fault: RefCell::default(),
            waiters: RefCell::default(),
            next_waiter: Cell::new(0),
        })
    }

    /// A number below this one.
    pub(crate) fn below(&self, end: usize) -> usize {
        self.chance.borrow_mut().below(end)
    }

    /// True once in so many times, by chance; never for 0.
    pub(crate) fn one_in(&self, times: usize) -> bool {
        times > 0 && self.below(times) == 0
    }

    /// The same while things may go wrong.
    pub(crate) fn goes_wrong(&self, times: usize) -> bool {
        !self.calm.get() && self.one_in(times)
    }

    /// Puts down what happened.
    pub(crate) fn say(&self, who: impl Display, what: impl Display) {
        let line = format!("{:>9} {who}: {what}", self.clock.now_ms());
        let mut trace = self.trace.borrow_mut();
        trace.digest.update(line.as_bytes());
        trace.digest.update(b"\n");
        if let Some(lines) = &mut trace.lines {
            lines.push(line);
        }
    }

    pub(crate) fn digest(&self) -> u128 {
        self.trace.borrow().digest.digest128()
    }

    pub(crate) fn lines(&self) -> Vec<String> {
        self.trace.borrow_mut().lines.take().unwrap_or_default()
    }

    pub(crate) fn count(&self, what: &'static str, many: usize) {
        *self.counts.borrow_mut().entry(what).or_default() += many as u64;
    }

    pub(crate) fn counts(&self) -> Counts {
        self.counts.borrow().clone()
    }

    /// Something is wrong. The first fault stands, and ends the seed.
    pub(crate) fn fail(&self, fault: impl Into<String>) {
        let fault = fault.into();
        self.say("FAULT", &fault);
        self.fault.borrow_mut().get_or_insert(fault);
    }

    pub(crate) fn check(&self, what: impl Display, result: Result<(), String>) {
        if let Err(fault) = result {
            self.fail(format!("{what}: {fault}"));
        }
    }

    /// The log does not give back what it holds: a fault, unless the disk has failed.
    pub(crate) fn check_readable(&self, what: impl Display) {
        self.count("not read back", 1);
        if !self.disk_may_fail.get() {
            self.fail(format!("{what}, and the disk has not failed"));
        }
    }

    pub(crate) fn fault(&self) -> Option<String> {
        self.fault.borrow().clone()
    }

    /// Waits for so long.
    pub(crate) async fn wait(self: &Rc<Self>, ms: u64) {
        let deadline_ms = self.clock.now_ms() + ms;
        let _waiter = Waiter::new(self, deadline_ms);
        self.clock.wait_until(Some(deadline_ms)).await;
    }

    /// Moves time.
    pub(crate) fn advance(&self, ms: u64) {
        self.clock.advance(Duration::from_millis(ms));
    }

    /// How long until the first who waits goes on, if somebody does.
    pub(crate) fn first_waiter_ms(&self) -> Option<u64> {
        let first = self.waiters.borrow().first().copied();
        first.map(|(deadline_ms, _)| deadline_ms.saturating_sub(self.clock.now_ms()))
    }
}

/// Somebody who waits; no longer when it is dropped.
struct Waiter {
    world: Rc<World>,
    entry: (u64, u64),
}

impl Waiter {
    fn new(world: &Rc<World>, deadline_ms: u64) -> Self {
        let number = world.next_waiter.get();
        world.next_waiter.set(number + 1);
        let entry = (deadline_ms, number);
        world.waiters.borrow_mut().insert(entry);
        Self { world: Rc::clone(world), entry }
    }
}

impl Drop for Waiter {
    fn drop(&mut self) {
        self.world.waiters.borrow_mut().remove(&self.entry);
    }
}
