//! What rollouts may hold in memory, and who still gets some when it is short.
//!
//! Each live attempt has a [`Share`], which says how many bytes it holds and gives them back when the last who needs its tokens
//! lets go: the rollout, or a unit on its way to a trainer. Groups and tombstones have a [`Holding`]. Watermarks, in
//! [`limits`]: above the first, new rollouts that belong to no group that is known are refused; above the budget, calls and what
//! else makes a rollout grow. What ends a rollout is always taken, but for long lists of calls that have not come, which are taken
//! like the calls themselves: inventions must not use up the reserve.
//!
//! The fleet must never wait for itself, so that above the budget there is a reserve: one part for the calls of sealed rollouts
//! and of the [`limits::MEMORY_FAVOURED_ROLLOUTS`] oldest open ones, the other for the oldest one alone. So somebody can always
//! finish, until trainers have something to take, which gives memory back. Rollouts of which nothing was heard for
//! [`limits::MEMORY_QUIET_MS`] give up their place among the oldest until they are heard again: a worker that is gone must not
//! hold up those that are there.
//!
//! Lock order: a rollout's lock may be held; nothing is taken under the lock here.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;

use crate::error::{Reason, Refusal};
use crate::ids::RunId;
use crate::limits;
use crate::log::Position;

/// The memory of all rollouts.
pub struct Memory {
    budget_bytes: u64,
    used_bytes: AtomicU64,
    /// All that was ever held and is not any more.
    given_back_bytes: AtomicU64,
    open: Mutex<OpenAttempts>,
}

/// Attempts that take events, by the position of their opening.
#[derive(Default)]
struct OpenAttempts {
    /// When each was last heard; without those in `quiet`.
    heard: BTreeMap<Position, Arc<AtomicU64>>,
    /// Those that were found to be quiet. They come back when they ask for memory.
    quiet: BTreeSet<Position>,
    /// When each was opened, by run.
    by_run: HashMap<RunId, BTreeMap<Position, u64>>,
}

/// Bytes that are counted for as long as this is there.
#[derive(Debug)]
pub struct Holding {
    memory: Arc<Memory>,
    bytes: AtomicU64,
}

/// What one attempt holds.
pub struct Share {
    holding: Holding,
    run: RunId,
    opened: Position,
    /// Where in the log its records begin.
    home: AtomicU64,
    heard_ms: Arc<AtomicU64>,
}

/// What an event that takes memory is to its rollout.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Growth {
    /// It has the rollout go on.
    GoesOn,
    /// The same, of a rollout that is sealed.
    GoesOnSealed,
    /// It ends the rollout, or will.
    Ends,
}

/// The place of an attempt that has some of the reserve.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Rank {
    /// The oldest of all.
    First,
    /// The oldest of those that were heard lately.
    FirstHeard,
    /// One of the oldest of these.
    Favoured,
}

impl Memory {
    /// With this budget.
    #[must_use]
    pub fn new(budget_bytes: u64) -> Arc<Self> {
        Arc::new(Self {
            budget_bytes,
            used_bytes: AtomicU64::new(0),
            given_back_bytes: AtomicU64::new(0),
            open: Mutex::default(),
        })
    }

    /// Bytes that rollouts, groups and tombstones hold, as far as they are counted.
    #[must_use]
    pub fn used_bytes(&self) -> u64 {
        self.used_bytes.load(Ordering::Relaxed)
    }

    /// Bytes that were given back since the service started.
    #[must_use]
    pub fn given_back_bytes(&self) -> u64 {
        self.given_back_bytes.load(Ordering::Relaxed)
    }

    /// What they may hold.
    #[must_use]
    pub fn budget_bytes(&self) -> u64 {
        self.budget_bytes
    }

    /// Whether calls are refused.
    #[must_use]
    pub fn is_short(&self) -> bool {
        self.used_bytes() > self.budget_bytes
    }

    /// Most bytes that tombstones may hold: the oldest are forgotten first.
    #[must_use]
    pub fn tombstones_bytes_max(&self) -> u64 {
        self.budget_bytes / limits::MEMORY_TOMBSTONES_DIVISOR
    }

    /// Something that holds memory for as long as it is there; nothing yet.
    #[must_use]
    pub fn holding(self: &Arc<Self>) -> Holding {
        Holding { memory: Arc::clone(self), bytes: AtomicU64::new(0) }
    }

    /// The share of an attempt that is opened.
    #[must_use]
    pub fn share(self: &Arc<Self>, run: &RunId, opened: Position, now_ms: u64) -> Arc<Share> {
        let heard_ms = Arc::new(AtomicU64::new(now_ms));
        let mut open = self.open.lock();
        open.heard.insert(opened, Arc::clone(&heard_ms));
        open.by_run.entry(run.clone()).or_default().insert(opened, now_ms);
        drop(open);
        let home = AtomicU64::new(opened.0);
        Arc::new(Share { holding: self.holding(), run: run.clone(), opened, home, heard_ms })
    }

    /// When the oldest open rollout of a run was opened.
    #[must_use]
    pub fn oldest_open_ms(&self, run: &RunId) -> Option<u64> {
        self.open.lock().by_run.get(run)?.first_key_value().map(|(_, opened_ms)| *opened_ms)
    }

    /// Whether one more rollout may be opened; `is_awaited` if its group is known, or an older attempt of it is open.
    ///
    /// # Errors
    /// If memory is short.
    pub fn judge_opening(&self, is_awaited: bool) -> Result<(), Refusal> {
        let percent = if is_awaited { limits::MEMORY_AWAITED_OPENS_PERCENT } else { limits::MEMORY_OPENS_PERCENT };
        if self.used_bytes() <= self.percent(percent) {
            return Ok(());
        }
        Err(self.full("no new group is begun; members of groups that are known, and what is open, go on"))
    }

    /// Whether the first event of a rollout that is not there yet could be stored, for all that is known.
    ///
    /// # Errors
    /// If memory is short, and there are older rollouts enough to have the reserve.
    pub fn judge_first(&self, growth: Growth, bytes: u64) -> Result<(), Refusal> {
        let wanted = self.used_bytes().saturating_add(bytes);
        if wanted <= self.budget_bytes || (growth == Growth::Ends && bytes <= limits::MEMORY_END_BYTES) {
            return Ok(());
        }
        let open = self.open.lock();
        let most = match (open.heard.len(), open.quiet.is_empty()) {
            (0, true) => self.with_reserve(3),
            (0, false) => self.with_reserve(2),
            (1..limits::MEMORY_FAVOURED_ROLLOUTS, _) => self.with_reserve(1),
            _ => self.budget_bytes,
        };
        drop(open);
        if wanted <= most { Ok(()) } else { Err(self.no_room(growth, bytes)) }
    }

    /// Whether an event that takes so many bytes may be stored.
    ///
    /// # Errors
    /// If memory is short, and the event is not one that is taken all the same.
    pub fn judge_growth(&self, share: &Share, growth: Growth, bytes: u64, now_ms: u64) -> Result<(), Refusal> {
        let wanted = self.used_bytes().saturating_add(bytes);
        if wanted <= self.budget_bytes {
            return Ok(());
        }
        if growth == Growth::Ends && bytes <= limits::MEMORY_END_BYTES {
            return Ok(());
        }
        let rank = if wanted <= self.with_reserve(3) { self.rank(share, now_ms) } else { None };
        let parts = match (rank, growth) {
            (Some(Rank::First), _) => 3,
            (Some(Rank::FirstHeard), _) => 2,
            (Some(Rank::Favoured), _) | (None, Growth::GoesOnSealed) => 1,
            (None, Growth::GoesOn | Growth::Ends) => 0,
        };
        if wanted <= self.with_reserve(parts) { Ok(()) } else { Err(self.no_room(growth, bytes)) }
    }

    /// Why an event of so many bytes is not taken, and when to try again, if that is any use.
    fn no_room(&self, growth: Growth, bytes: u64) -> Refusal {
        if bytes > self.budget_bytes {
            let message = format!("it takes {bytes} bytes of memory, more than the budget of {}", self.budget_bytes);
            return Refusal::new(Reason::MemoryFull, message);
        }
        self.full(match growth {
            Growth::Ends => {
                "lists of many calls that have not come are taken again when trainers have acknowledged rows"
            }
            Growth::GoesOn | Growth::GoesOnSealed => "calls are taken again when trainers have acknowledged rows",
        })
    }

    /// The place of an attempt among the oldest that are there, if it is one of the favoured.
    fn rank(&self, share: &Share, now_ms: u64) -> Option<Rank> {
        let mut open = self.open.lock();
        if open.quiet.remove(&share.opened) {
            open.heard.insert(share.opened, Arc::clone(&share.heard_ms));
        }
        let mut rank = 0;
        let mut quiet = Vec::new();
        let mut found = None;
        for (position, heard_ms) in &open.heard {
            if *position == share.opened {
                found = Some(rank);
                break;
            }
            if now_ms.saturating_sub(heard_ms.load(Ordering::Relaxed)) >= limits::MEMORY_QUIET_MS {
                quiet.push(*position);
                continue;
            }
            rank += 1;
            if rank == limits::MEMORY_FAVOURED_ROLLOUTS {
                break;
            }
        }
        // Each is passed over once, until it asks again.
        for position in quiet {
            open.heard.remove(&position);
            open.quiet.insert(position);
        }
        let is_first = open.quiet.first().is_none_or(|quiet| share.opened < *quiet);
        found.map(|rank| match rank {
            0 if is_first => Rank::First,
            0 => Rank::FirstHeard,
            _ => Rank::Favoured,
        })
    }

    /// The budget, with so many of the three parts of the reserve.
    fn with_reserve(&self, parts: u64) -> u64 {
        self.percent(100 + limits::MEMORY_RESERVE_PERCENT * parts / 3)
    }

    fn percent(&self, percent: u64) -> u64 {
        u64::try_from(u128::from(self.budget_bytes) * u128::from(percent) / 100).unwrap_or(u64::MAX)
    }

    fn full(&self, what: &str) -> Refusal {
        let message = format!("memory holds {} of {} bytes: {what}", self.used_bytes(), self.budget_bytes);
        Refusal::new(Reason::MemoryFull, message).retry_after_ms(limits::MEMORY_RETRY_AFTER_MS)
    }
}

impl Holding {
    /// So many bytes are held now.
    pub fn set(&self, bytes: u64) {
        let before = self.bytes.swap(bytes, Ordering::Relaxed);
        if bytes >= before {
            self.memory.used_bytes.fetch_add(bytes - before, Ordering::Relaxed);
        } else {
            self.memory.used_bytes.fetch_sub(before - bytes, Ordering::Relaxed);
            self.memory.given_back_bytes.fetch_add(before - bytes, Ordering::Relaxed);
        }
    }

    /// So many more.
    pub fn add(&self, bytes: u64) {
        self.bytes.fetch_add(bytes, Ordering::Relaxed);
        self.memory.used_bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    /// So many fewer; never fewer than none.
    pub fn subtract(&self, bytes: u64) {
        self.set(self.bytes().saturating_sub(bytes));
    }

    /// How many.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.bytes.load(Ordering::Relaxed)
    }
}

impl Drop for Holding {
    fn drop(&mut self) {
        self.set(0);
    }
}

impl Share {
    /// The memory that it is a share of.
    #[must_use]
    pub fn memory(&self) -> &Memory {
        &self.holding.memory
    }

    /// Where in the log the attempt's records begin: at its opening, or at a copy of them.
    #[must_use]
    pub fn home(&self) -> Position {
        Position(self.home.load(Ordering::Relaxed))
    }

    /// They begin there now.
    pub fn move_home(&self, home: Position) {
        self.home.store(home.0, Ordering::Relaxed);
    }

    /// How many bytes it holds.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.holding.bytes()
    }

    /// The attempt holds so many bytes now.
    pub fn set(&self, bytes: u64) {
        self.holding.set(bytes);
    }

    /// So many more: what is made of it holds memory too.
    pub fn add(&self, bytes: u64) {
        self.holding.add(bytes);
    }

    /// An event of the attempt has come.
    pub fn heard(&self, now_ms: u64) {
        self.heard_ms.store(now_ms, Ordering::Relaxed);
    }

    /// The attempt takes no more events.
    pub fn closed(&self) {
        let mut open = self.memory().open.lock();
        open.heard.remove(&self.opened);
        open.quiet.remove(&self.opened);
        if let Some(of_run) = open.by_run.get_mut(&self.run) {
            of_run.remove(&self.opened);
            if of_run.is_empty() {
                open.by_run.remove(&self.run);
            }
        }
    }
}

impl std::fmt::Debug for Memory {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "{} of {} bytes", self.used_bytes(), self.budget_bytes)
    }
}

impl std::fmt::Debug for Share {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "{} bytes", self.holding.bytes())
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        self.closed();
    }
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

    use super::Growth::{Ends, GoesOn, GoesOnSealed};
    use super::*;

    fn run() -> RunId {
        RunId::parse("run").unwrap()
    }

    #[test]
    fn shares_are_given_back_when_the_last_holder_lets_go() {
        let memory = Memory::new(1000);
        let share = memory.share(&run(), Position(1), 7);
        share.set(300);
        share.set(100);
        let of_a_unit = Arc::clone(&share);
        share.closed();
        drop(share);
        assert_eq!((memory.used_bytes(), memory.oldest_open_ms(&run())), (100, None));
        drop(of_a_unit);
        let tombstones = memory.holding();
        tombstones.add(50);
        tombstones.subtract(20);
        assert_eq!(memory.used_bytes(), 30);
        drop(tombstones);
        assert_eq!(memory.used_bytes(), 0);
    }

    #[test]
    fn the_oldest_open_attempt_of_a_run_is_known() {
        let memory = Memory::new(1000);
        let shares: Vec<_> = (1..4).map(|at| memory.share(&run(), Position(at), at * 10)).collect();
        assert_eq!(memory.oldest_open_ms(&run()), Some(10));
        shares[0].closed();
        assert_eq!(memory.oldest_open_ms(&run()), Some(20));
        drop(shares);
        assert_eq!(memory.oldest_open_ms(&run()), None);
    }

    #[test]
    fn new_groups_are_refused_before_calls_are() {
        let memory = Memory::new(1000);
        let share = memory.share(&run(), Position(1), 0);
        share.set(800);
        assert_eq!(memory.judge_opening(false), Ok(()));
        share.set(801);
        let refusal = memory.judge_opening(false).unwrap_err();
        let expected = (Reason::MemoryFull, Some(limits::MEMORY_RETRY_AFTER_MS));
        assert_eq!((refusal.reason, refusal.retry_after_ms), expected);
        assert_eq!(memory.judge_growth(&share, GoesOn, 199, 0), Ok(()));
        share.set(1060);
        assert_eq!((memory.judge_opening(true), memory.is_short()), (Ok(()), true));
        share.set(1061);
        assert!(memory.judge_opening(true).is_err(), "a group without end");
    }

    #[test]
    fn above_the_budget_the_oldest_and_the_sealed_go_on_until_the_reserve_is_used() {
        let memory = Memory::new(1000);
        let shares: Vec<_> = (0..100).map(|position| memory.share(&run(), Position(position), 0)).collect();
        shares[99].set(1000);
        let taken = |share: usize, growth, bytes| memory.judge_growth(&shares[share], growth, bytes, 0).is_ok();
        assert!(taken(63, GoesOn, 80) && !taken(64, GoesOn, 1), "64 of them");
        assert!(taken(64, GoesOnSealed, 80) && !taken(64, GoesOnSealed, 81), "the sealed, from one part");
        let the_oldest = taken(0, GoesOn, 240) && !taken(0, GoesOn, 241) && !taken(1, GoesOn, 81);
        assert!(the_oldest, "the oldest, from all of it");
        shares[0].closed();
        assert!(taken(64, GoesOn, 1) && taken(1, GoesOn, 240), "others are the oldest then");
    }

    #[test]
    fn the_quiet_give_up_their_place_until_they_ask() {
        let memory = Memory::new(1000);
        let shares: Vec<_> = (0..3).map(|position| memory.share(&run(), Position(position), 0)).collect();
        shares[2].set(1081);
        let taken = |share: usize, now_ms| memory.judge_growth(&shares[share], GoesOn, 1, now_ms).is_ok();
        assert!(!taken(2, 0) && !taken(1, 0) && taken(0, 0));
        let later = limits::MEMORY_QUIET_MS;
        shares[2].heard(later);
        assert!(taken(2, later), "the others are quiet");
        shares[1].heard(later);
        assert!(taken(1, later) && !taken(2, later), "an older one is heard again");
    }

    /// Each was the oldest for a while, has used up what there is for that, and is heard again.
    #[test]
    fn the_very_oldest_has_what_nobody_else_can_use_up() {
        let memory = Memory::new(1000);
        let shares: Vec<_> = (0..4).map(|position| memory.share(&run(), Position(position), 0)).collect();
        shares[3].set(1000);
        let mut now_ms = 0;
        for share in &shares[1..] {
            now_ms += limits::MEMORY_QUIET_MS;
            share.heard(now_ms);
            while memory.judge_growth(share, GoesOn, 1, now_ms).is_ok() {
                share.add(1);
            }
        }
        assert_eq!(memory.used_bytes(), 1160);
        shares.iter().for_each(|share| share.heard(now_ms));
        let taken = |share: usize, bytes| memory.judge_growth(&shares[share], GoesOn, bytes, now_ms).is_ok();
        assert!(!taken(1, 1) && !taken(3, 1) && taken(0, 80) && !taken(0, 81));
        shares[0].closed();
        assert!(taken(1, 80) && !taken(2, 1), "the next one is the oldest");
    }

    #[test]
    fn what_ends_a_rollout_is_taken_unless_it_is_large_and_memory_short() {
        let memory = Memory::new(1000);
        let share = memory.share(&run(), Position(1), 0);
        share.set(1_000_000);
        assert_eq!(memory.judge_growth(&share, Ends, limits::MEMORY_END_BYTES, 0), Ok(()));
        assert!(memory.judge_growth(&share, Ends, limits::MEMORY_END_BYTES + 1, 0).is_err());
        share.set(1000);
        assert_eq!(memory.judge_growth(&share, Ends, 500, 0), Ok(()));
    }
}
