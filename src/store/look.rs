//! Looking at rollouts: nothing here changes what is logged.

use std::sync::atomic::Ordering;

use crate::error::Reason;
use crate::ids::{CallId, RolloutRef};
use crate::log::Position;
use crate::rollout::Rollout;
use crate::rollout::view::RolloutView;

use super::effect::Ended;
use super::{Live, RolloutKey, Slot, Store};

impl Store {
    /// Reads a rollout, if it is at this attempt and its tokens are in memory ([`Store::restore`]).
    pub fn look_at<T>(&self, key: &RolloutKey, attempt: u32, read: impl FnOnce(&mut Rollout) -> T) -> Option<T> {
        match &mut *self.entry(key)?.slot.lock() {
            Slot::Live(live) if live.attempt == attempt && live.rollout.has_tokens() => {
                live.is_awaited = false;
                Some(read(&mut live.rollout))
            }
            Slot::Live(_) | Slot::Ended(..) | Slot::Removed => None,
        }
    }

    /// Whether a rollout, or how it ended, may have changed since this was the last record: that it retires is none.
    #[must_use]
    pub fn changed_since(&self, key: &RolloutKey, since: Position) -> bool {
        let Some(entry) = self.entry(key) else { return false };
        match &*entry.slot.lock() {
            Slot::Live(live) => live.last_position >= since,
            Slot::Ended(_, position) => *position >= since,
            Slot::Removed => false,
        }
    }

    /// Reads a rollout with what its place knows of it, or how it ended. Its tokens need not be in memory.
    pub fn show<T>(&self, key: &RolloutKey, read: impl FnOnce(RolloutView<'_>) -> T) -> Option<Result<T, Ended>> {
        let entry = self.entry(key)?;
        let mut slot = entry.slot.lock();
        let live = match &mut *slot {
            Slot::Live(live) => live,
            Slot::Ended(ended, _) => return Some(Err(ended.clone())),
            Slot::Removed => return None,
        };
        // If somebody has waited for its tokens, they are used now.
        live.is_awaited = false;
        let facts = live.rollout.facts();
        let about = RolloutRef {
            run: key.run.clone(),
            group: facts.group.clone(),
            rollout: key.rollout.clone(),
            attempt: live.attempt,
        };
        let next_deadline = live.rollout.next_deadline_ms();
        Some(Ok(read(RolloutView {
            about,
            opened_unix_ms: live.opened_unix_ms,
            heard_unix_ms: live.heard_unix_ms,
            finalised_unix_ms: live.finalised.as_ref().map(|finalised| finalised.unix_ms),
            settings_version: live.settings_version,
            refused_requests: live.refused_requests,
            resident_bytes: live.rollout.resident_bytes(),
            next_deadline_in_ms: next_deadline.map(|deadline| deadline.saturating_sub(self.clock.now_ms())),
            rollout: &mut live.rollout,
        })))
    }

    /// Remembers that a request about a rollout was refused before it came to the store.
    pub fn note_refusal(&self, about: &RolloutRef, call: Option<&CallId>, reason: Reason) {
        self.count_refusal(about);
        self.mark_refused(about, call, reason);
    }

    /// Counts a refused request in its run.
    pub(super) fn count_refusal(&self, about: &RolloutRef) {
        if let Some(run) = self.run(&about.run) {
            run.counts.refused.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Remembers on a rollout that a request about it was refused.
    pub(super) fn mark_refused(&self, about: &RolloutRef, call: Option<&CallId>, reason: Reason) {
        let Some(entry) = self.entry(&about.key()) else { return };
        if let Slot::Live(live) = &mut *entry.slot.lock()
            && live.attempt == about.attempt
        {
            self.refused(live, call, reason);
        }
    }

    /// A request about a rollout was refused. What calls those were is not remembered while memory is short.
    pub(super) fn refused(&self, live: &mut Live, call: Option<&CallId>, reason: Reason) {
        live.refused_requests += 1;
        if !self.memory.is_short() {
            live.rollout.note_refusal(call, reason.as_str());
            live.measure();
        }
    }

    /// The attempt that a rollout is at, or ended at.
    #[must_use]
    pub fn attempt(&self, key: &RolloutKey) -> Option<u32> {
        match &*self.entry(key)?.slot.lock() {
            Slot::Live(live) => Some(live.attempt),
            Slot::Ended(ended, _) => Some(ended.attempt),
            Slot::Removed => None,
        }
    }
}
