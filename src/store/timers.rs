//! Deadlines of rollouts: which to look at next.
//!
//! Each rollout that a clock may decide of has one entry, and a rollout that has ended has none: most end long before their
//! deadline. One that moved later is found to be early when it comes up, and is set again. [`Store::run_timers`] waits for
//! them and has each decide.

use std::collections::BTreeSet;
use std::sync::atomic::Ordering;

use parking_lot::Mutex;
use tokio::sync::Notify;

use crate::limits;
use crate::rollout::event::RolloutRecord;

use super::{Entry, Live, RolloutKey, Slot, Store};

/// Deadlines in order.
#[derive(Default)]
pub(crate) struct Timers {
    deadlines: Mutex<BTreeSet<(u64, RolloutKey)>>,
    earlier: Notify,
}

impl Timers {
    /// Has this rollout looked at when the clock shows `deadline_ms`, and no longer when it shows `instead_of_ms`.
    pub(crate) fn set(&self, deadline_ms: u64, instead_of_ms: u64, key: &RolloutKey) {
        let mut deadlines = self.deadlines.lock();
        let is_first = deadlines.first().is_none_or(|(first, _)| deadline_ms < *first);
        let entry = deadlines.take(&(instead_of_ms, key.clone()));
        let key = entry.map_or_else(|| key.clone(), |(_, key)| key);
        deadlines.insert((deadline_ms, key));
        drop(deadlines);
        if is_first {
            self.earlier.notify_one();
        }
    }

    /// Has this rollout not looked at when the clock shows `deadline_ms`.
    pub(crate) fn clear(&self, deadline_ms: u64, key: &RolloutKey) {
        self.deadlines.lock().remove(&(deadline_ms, key.clone()));
    }

    /// How many rollouts are to be looked at.
    pub(crate) fn count(&self) -> usize {
        self.deadlines.lock().len()
    }

    /// The earliest deadline.
    pub(crate) fn first_ms(&self) -> Option<u64> {
        self.deadlines.lock().first().map(|(deadline, _)| *deadline)
    }

    /// Takes at most `count` rollouts whose deadline has come.
    pub(crate) fn due(&self, now_ms: u64, count: usize) -> Vec<RolloutKey> {
        let mut deadlines = self.deadlines.lock();
        let mut due = Vec::new();
        while due.len() < count
            && let Some((deadline, _)) = deadlines.first()
            && *deadline <= now_ms
            && let Some((_, key)) = deadlines.pop_first()
        {
            due.push(key);
        }
        due
    }

    /// Waits until an earlier deadline was set.
    pub(crate) async fn earlier(&self) {
        self.earlier.notified().await;
    }
}

/// What came of a deadline.
#[derive(PartialEq)]
enum Came {
    /// Something was decided, or nothing is to be decided now.
    Done,
    /// What is to be decided needs the rollout's tokens in memory first.
    NeedsTokens,
}

impl Store {
    /// Has a clock look at the rollout when it may next have something to decide.
    pub(crate) fn set_timer(&self, key: &RolloutKey, entry: &Entry, live: &Live) {
        let Some(deadline) = live.rollout.next_deadline_ms() else { return self.clear_timer(key, entry) };
        let set = entry.timer_at_ms.load(Ordering::Relaxed);
        if deadline < set {
            entry.timer_at_ms.store(deadline, Ordering::Relaxed);
            self.timers.set(deadline, set, key);
        }
    }

    /// No clock has anything to decide of the rollout any more.
    pub(crate) fn clear_timer(&self, key: &RolloutKey, entry: &Entry) {
        let set = entry.timer_at_ms.swap(u64::MAX, Ordering::Relaxed);
        if set != u64::MAX {
            self.timers.clear(set, key);
        }
    }

    /// Looks at rollouts whose deadline has come, for ever.
    pub async fn run_timers(&self) {
        loop {
            tokio::select! {
                // In this order, not by chance: a simulation that repeats does the same.
                biased;
                () = self.timers.earlier() => continue,
                () = self.clock.wait_until(self.timers.first_ms()) => {}
            }
            for key in self.timers.due(self.clock.now_ms(), limits::TIMERS_AT_ONCE) {
                self.look_at_deadline(&key).await;
            }
            tokio::task::yield_now().await;
        }
    }

    /// Has a clock decide of a rollout; brings its tokens back if need be.
    async fn look_at_deadline(&self, key: &RolloutKey) {
        if self.deadline_came(key) == Came::Done {
            return;
        }
        let restored = self.restore(key).await.is_ok();
        if (!restored || self.deadline_came(key) == Came::NeedsTokens)
            && let Some(entry) = self.entry(key)
        {
            self.clear_timer(key, &entry);
            let later_ms = self.clock.now_ms().saturating_add(limits::RESTORE_RETRY_AFTER_MS);
            entry.timer_at_ms.store(later_ms, Ordering::Relaxed);
            self.timers.set(later_ms, u64::MAX, key);
        }
    }

    fn deadline_came(&self, key: &RolloutKey) -> Came {
        let Some(entry) = self.entry(key) else { return Came::Done };
        let now_ms = self.clock.now_ms();
        let mut slot = entry.slot.lock();
        self.clear_timer(key, &entry);
        let Slot::Live(live) = &mut *slot else { return Came::Done };
        while let Some(decision) = live.rollout.due(now_ms) {
            if decision.may_finalise() && !live.rollout.has_tokens() {
                return Came::NeedsTokens;
            }
            tracing::info!(run = %key.run, rollout = %key.rollout, ?decision, "a deadline decided");
            let (_, ended) = self.apply_record(key, live, RolloutRecord::Decision(decision), None);
            if let Some(ended) = ended {
                let position = live.last_position;
                *slot = Slot::Ended(ended, position);
                return Came::Done;
            }
        }
        if live.rollout.next_deadline_ms().is_some_and(|deadline| deadline <= now_ms) {
            live.rollout.deadline_passed(now_ms);
        }
        self.set_timer(key, &entry, live);
        Came::Done
    }
}
