//! Deadlines of rollouts: which to look at next.
//!
//! Each rollout that a clock may decide of has one entry, and a rollout that has ended has none: most end long before their
//! deadline. One that moved later is found to be early when it comes up, and is set again. The task that waits for them stands in
//! [`super::report`].

use std::collections::BTreeSet;

use parking_lot::Mutex;
use tokio::sync::Notify;

use super::RolloutKey;

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
