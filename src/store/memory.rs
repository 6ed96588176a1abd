//! What rollouts may hold in memory, and who still gets some when it is short.
//!
//! Each live attempt has a [`Share`], which says how many bytes it holds and gives them back when the last who needs its tokens
//! lets go: the rollout, or a unit on its way to a trainer. Groups and tombstones have a [`Holding`]. Watermarks, in
//! [`limits`]: above the first, new rollouts that belong to no group that is known are refused; above the budget, calls and what
//! else makes a rollout grow. What ends a rollout is always taken, but for long lists of calls that have not come, which are taken
//! like the calls themselves: inventions must not use up the reserve.
//!
//! The fleet must never wait for itself, so that above the budget there is a reserve in three parts: for the calls of sealed
//! rollouts and of the [`limits::MEMORY_FAVOURED_ROLLOUTS`] oldest open ones; for the oldest one alone of those that ask for
//! memory; and for the very oldest. So somebody can always finish, until trainers have something to take, which gives memory back.
//! Rollouts that have not asked for memory for [`limits::MEMORY_QUIET_MS`] give up their place among the oldest until they ask
//! again: who is gone, or waits for a long tool call, must not hold up those that would go on. The last part is nobody's but the
//! very oldest one's, quiet or not, so that those who were the oldest for a while cannot use it up.
//!
//! Where the log keeps its records, tokens leave before any of that ([`super::evict`]), and what is counted here is what cannot.
//! Where it does not, one thing is not mended: rollouts that each need more than a part of the reserve while others hold all the
//! rest and need more too; workers that wait for one refused call before they go on to others come to that sooner.
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
    /// All that was ever held and is not any more, but for what has left memory to come back.
    given_back_bytes: AtomicU64,
    open: Mutex<OpenAttempts>,
}

/// Attempts that take events, by the position of their opening.
#[derive(Default)]
struct OpenAttempts {
    /// When each asked for memory last; without those in `quiet`.
    asking: BTreeMap<Position, Arc<AtomicU64>>,
    /// Those that have not asked for a while. They come back when they ask.
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
    /// What it held that has left memory and would come back.
    away_bytes: AtomicU64,
    asked_ms: Arc<AtomicU64>,
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
    /// The oldest of those that ask.
    FirstAsking,
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

    /// Bytes of what has ended since the service started.
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
        self.is_above(100)
    }

    /// Whether more than this part of the budget is held.
    #[must_use]
    pub fn is_above(&self, percent: u64) -> bool {
        self.used_bytes() > self.percent(percent)
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
        let asked_ms = Arc::new(AtomicU64::new(now_ms));
        let mut open = self.open.lock();
        open.asking.insert(opened, Arc::clone(&asked_ms));
        open.by_run.entry(run.clone()).or_default().insert(opened, now_ms);
        drop(open);
        let home = AtomicU64::new(opened.0);
        let away_bytes = AtomicU64::new(0);
        Arc::new(Share { holding: self.holding(), run: run.clone(), opened, home, away_bytes, asked_ms })
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
        let most = match (open.asking.len(), open.quiet.is_empty()) {
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
        share.asked_ms.store(now_ms, Ordering::Relaxed);
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
            (Some(Rank::FirstAsking), _) => 2,
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
            open.asking.insert(share.opened, Arc::clone(&share.asked_ms));
        }
        let mut rank = 0;
        let mut quiet = Vec::new();
        let mut found = None;
        for (position, asked_ms) in &open.asking {
            if *position == share.opened {
                found = Some(rank);
                break;
            }
            if now_ms.saturating_sub(asked_ms.load(Ordering::Relaxed)) >= limits::MEMORY_QUIET_MS {
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
            open.asking.remove(&position);
            open.quiet.insert(position);
        }
        let is_first = open.quiet.first().is_none_or(|quiet| share.opened < *quiet);
        found.map(|rank| match rank {
            0 if is_first => Rank::First,
            0 => Rank::FirstAsking,
            _ => Rank::Favoured,
        })
    }

    /// The budget, with so many of the three parts of the reserve.
    fn with_reserve(&self, parts: u64) -> u64 {
        self.percent(100 + limits::MEMORY_RESERVE_PERCENT * parts / 3)
    }

    /// So much of the budget.
    pub(super) fn percent(&self, percent: u64) -> u64 {
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

    /// So many fewer, of which nothing has ended.
    fn leave(&self, bytes: u64) {
        let bytes = bytes.min(self.bytes());
        self.bytes.fetch_sub(bytes, Ordering::Relaxed);
        self.memory.used_bytes.fetch_sub(bytes, Ordering::Relaxed);
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

    /// Where it was opened: what tells it from all others.
    #[must_use]
    pub fn opened(&self) -> Position {
        self.opened
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

    /// So many less: something that was made of it is gone.
    pub fn subtract(&self, bytes: u64) {
        self.holding.subtract(bytes);
    }

    /// So many bytes leave memory, to come back when they are needed: nothing has ended with them.
    pub fn leave(&self, bytes: u64) {
        self.away_bytes.fetch_add(bytes, Ordering::Relaxed);
        self.holding.leave(bytes);
    }

    /// What had left is back, and takes so many bytes.
    pub fn come_back(&self, bytes: u64) {
        self.away_bytes.store(0, Ordering::Relaxed);
        self.holding.add(bytes);
    }

    /// How many bytes it holds with all that has left.
    #[must_use]
    pub fn whole_bytes(&self) -> u64 {
        self.bytes() + self.away_bytes.load(Ordering::Relaxed)
    }

    /// The attempt takes no more events.
    pub fn closed(&self) {
        let mut open = self.memory().open.lock();
        open.asking.remove(&self.opened);
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
        let away_bytes = self.away_bytes.load(Ordering::Relaxed);
        self.memory().given_back_bytes.fetch_add(away_bytes, Ordering::Relaxed);
    }
}

#[cfg(test)]
#[path = "memory_tests.rs"]
mod tests;
