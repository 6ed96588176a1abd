//! A log against what it must keep: appends, turns, truncations, kills, crashes and faults, in an order that a seed
//! gives.
//!
//! Checked at each opening: positions are consecutive; every answered frame that was not let go of is there; each frame
//! is the one that was appended last at its position, so nothing cut has come back.

use super::super::faulty::{Fault, below};
use super::*;

/// What the log must be, and the disk it is on.
pub(super) struct World {
    pub(super) storage: FaultyStorage,
    pub(super) options: Options,
    pub(super) random: u64,
    /// Raised at each opening, so that a frame that comes back from an earlier one is known.
    life: u64,
    /// Life and size of the frame at each position, from 1.
    frames: Vec<(u64, usize)>,
    answered: u64,
    /// Everything from there on is wanted.
    wanted_from: u64,
}

impl World {
    pub(super) fn new(seed: u64, options: Options) -> Self {
        let storage = FaultyStorage::new(seed ^ 0xabcd);
        Self { storage, options, random: seed, life: 0, frames: Vec::new(), answered: 0, wanted_from: 1 }
    }

    pub(super) fn below(&mut self, bound: u64) -> u64 {
        below(&mut self.random, bound)
    }

    /// Opens the log, as often as it takes, and checks what it shows.
    pub(super) fn open(&mut self) -> SegmentLog {
        for _ in 0..10 {
            match open(&self.storage, self.options.clone()) {
                Ok((log, recovered, shown)) => {
                    self.check(&recovered, &shown);
                    return log;
                }
                Err(OpenError::Log(SegmentError::Io { .. } | SegmentError::Full { .. })) => self.end_life(),
                Err(error) => panic!("{error}"),
            }
            self.storage.set_capacity_bytes(u64::MAX);
        }
        panic!("a disk without faults does not open");
    }

    /// The process is killed, or the machine stops.
    pub(super) fn end_life(&mut self) {
        if self.below(2) == 0 {
            self.storage.kill();
        } else {
            self.storage.crash();
            if self.options.durability == Durability::Os {
                self.answered = 0;
            }
        }
    }

    fn check(&mut self, recovered: &Recovered, shown: &[Shown]) {
        let last = recovered.next_position.0 - 1;
        let first = shown.first().map_or(last + 1, |frame| frame.position);
        assert!(
            first <= self.wanted_from.max(1),
            "from {} on frames are wanted, {first} is the first",
            self.wanted_from
        );
        assert!(last >= self.answered, "{} was answered, {last} is the last", self.answered);
        assert!(last <= self.frames.len() as u64, "{last} was never appended");
        assert_eq!(positions(shown), (first..=last).collect::<Vec<_>>());
        for frame in shown {
            let (life, bytes) = self.frames[frame.position as usize - 1];
            assert!(frame.payload == payload(frame.position, life, bytes), "position {}", frame.position);
            assert_eq!(frame.kind, kind(frame.position));
        }
        self.frames.truncate(last as usize);
        self.answered = last;
        self.life += 1;
    }

    /// Appends frames, most of them small.
    pub(super) fn append(&mut self, log: &SegmentLog, count: u64) {
        for _ in 0..count {
            let bytes = match self.below(20) {
                0 => 20_000 + self.below(20_000),
                1..4 => 3000,
                _ => self.below(600),
            };
            let bytes = usize::try_from(bytes).unwrap();
            self.frames.push((self.life, bytes));
            append(log, self.frames.len() as u64, self.life, bytes);
        }
    }

    /// One turn; false if the log has failed, and then nothing more becomes durable.
    pub(super) fn turn(&mut self, log: &SegmentLog) -> bool {
        log.turn();
        let failed = log.failed().borrow().is_some();
        let now = durable(log);
        assert!(now >= self.answered && now <= self.frames.len() as u64);
        self.answered = now;
        if failed {
            self.append(log, 1);
            turn_all(log);
            assert_eq!(durable(log), now, "nothing becomes durable after a failure");
        }
        !failed
    }

    pub(super) fn truncate(&mut self, log: &SegmentLog) {
        let position = self.below(self.answered + 1);
        self.wanted_from = self.wanted_from.max(position);
        log.truncate_before(Position(position));
    }

    fn read_some(&mut self, log: &SegmentLog) {
        let position = 1 + self.below(self.answered.max(1));
        match log.look_up().frame_at(Position(position)) {
            Ok(frame) => {
                let (life, bytes) = self.frames[position as usize - 1];
                assert_eq!(frame.payload, payload(position, life, bytes));
            }
            Err(ReadError::NotKept(_)) => assert!(position < self.wanted_from),
            Err(ReadError::NotDurable(_)) => assert!(position > self.answered),
            Err(error) => panic!("{error}"),
        }
    }

    /// Something that may happen; false if the log has failed.
    fn step(&mut self, log: &SegmentLog) -> bool {
        match self.below(12) {
            0..5 => {
                let count = 1 + self.below(4);
                if log.room() == Room::Ample || self.below(8) == 0 {
                    self.append(log, count);
                }
            }
            5..9 => return self.turn(log),
            9 => self.truncate(log),
            _ => self.read_some(log),
        }
        true
    }
}

fn run(seed: u64, durability: Durability) {
    let mut world = World::new(seed, Options { durability, ..options() });
    for _ in 0..6 {
        if world.below(3) == 0 {
            let fault = [Fault::Error, Fault::Full, Fault::Crash][world.below(3) as usize];
            let operations = world.below(40);
            world.storage.fail_in(operations, fault);
        }
        let mut log = world.open();
        if world.below(3) == 0 {
            let bytes = (3 + world.below(6)) * (16 << 10) + world.below(16 << 10);
            world.storage.set_capacity_bytes(bytes);
        }
        for _ in 0..10 + world.below(80) {
            if !world.step(&log) {
                break;
            }
            if world.below(200) == 0 {
                if log.close().is_err() {
                    break;
                }
                world.answered = world.frames.len() as u64;
                drop(log);
                log = world.open();
            }
        }
        world.storage.set_capacity_bytes(u64::MAX);
        world.end_life();
        drop(log);
    }
    drop(world.open());
}

/// Says which seed it was when it fails.
pub(super) struct Named(pub(super) String);

impl Drop for Named {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("failed in {}", self.0);
        }
    }
}

#[test]
fn a_log_keeps_what_it_must_whatever_happens() {
    for seed in 0..seeds(1200) {
        let _named = Named(format!("seed {seed}"));
        run(seed, Durability::Fsync);
    }
}

#[test]
fn a_log_without_sync_keeps_what_it_must_when_its_process_ends() {
    for seed in 0..seeds(500) {
        let _named = Named(format!("seed {seed}"));
        run(seed, Durability::Os);
    }
}
