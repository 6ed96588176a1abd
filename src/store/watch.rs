//! Who watches a run, and what has changed for them.
//!
//! Whoever changes something marks it, under the lock that it changes it under; a watcher takes the marks and reads the state
//! itself, at its own pace. So reporting costs one relaxed load where nobody watches, and a short lock where somebody does. Marks
//! are a set: what changes twice between two looks is one mark. The set is bounded: one that would grow beyond says "all".
//!
//! A mark comes before the change is visible, never after: a watcher that has taken it waits for the lock and sees the change.
//! One that was told "all" goes by positions: it notes the last one before it takes marks, and what changes after that has a
//! position that is not before it.
//!
//! Lock order: a rollout's lock may be held when a watcher's is taken; nothing is taken under a watcher's.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use parking_lot::{Mutex, RwLock};
use tokio::sync::Notify;

use crate::ids::{GroupId, RolloutId};
use crate::limits;

/// The watchers of one run.
#[derive(Default)]
pub struct Watchers {
    count: AtomicUsize,
    list: RwLock<Vec<Arc<Watcher>>>,
}

/// What a watcher wants to know of.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Wanted {
    /// Only of this rollout.
    pub rollout: Option<RolloutId>,
    /// Only of this group.
    pub group: Option<GroupId>,
}

/// What has changed since it was last taken.
#[derive(Debug, Default)]
pub struct Dirty {
    /// Rollouts.
    pub rollouts: BTreeSet<RolloutId>,
    /// More rollouts than are remembered one by one.
    pub all_rollouts: bool,
    /// Groups.
    pub groups: BTreeSet<GroupId>,
    /// More groups than are remembered one by one.
    pub all_groups: bool,
    /// The run, or its consumer groups.
    pub run: bool,
    /// The run was deleted.
    pub is_over: bool,
    /// Something was marked, and the watcher was told so.
    marked: bool,
}

struct Watcher {
    wanted: Wanted,
    dirty: Mutex<Dirty>,
    stirred: Notify,
}

/// A watcher's end. Nothing is marked for it any more when this is dropped.
pub struct Watching {
    watchers: Arc<super::Run>,
    watcher: Arc<Watcher>,
}

impl Watchers {
    /// A rollout changes, which is in this group.
    pub(super) fn rollout_changes(&self, rollout: &RolloutId, group: Option<&GroupId>) {
        self.each(|watcher| {
            let wanted = &watcher.wanted;
            let of_rollout = wanted.rollout.as_ref().is_none_or(|wanted| wanted == rollout);
            if of_rollout && wanted.group.as_ref().is_none_or(|wanted| group == Some(wanted)) {
                watcher.mark(|dirty| dirty.rollout(rollout));
            }
        });
    }

    /// A group changes.
    pub(super) fn group_changes(&self, group: &GroupId) {
        self.each(|watcher| {
            let wanted = &watcher.wanted;
            if wanted.rollout.is_none() && wanted.group.as_ref().is_none_or(|wanted| wanted == group) {
                watcher.mark(|dirty| dirty.group(group));
            }
        });
    }

    /// The run changes, or one of its consumer groups.
    pub(super) fn run_changes(&self) {
        self.each(|watcher| {
            if watcher.wanted == Wanted::default() {
                watcher.mark(|dirty| dirty.run = true);
            }
        });
    }

    /// The run is deleted.
    pub(super) fn run_is_over(&self) {
        self.each(|watcher| watcher.mark(|dirty| dirty.is_over = true));
    }

    fn each(&self, mark: impl Fn(&Watcher)) {
        if self.count.load(Ordering::Relaxed) > 0 {
            self.list.read().iter().for_each(|watcher| mark(watcher));
        }
    }
}

impl super::Run {
    /// Begins to watch; none if the run has as many watchers as it may.
    #[must_use]
    pub fn watch(self: &Arc<Self>, wanted: Wanted) -> Option<Watching> {
        let mut list = self.watchers.list.write();
        if list.len() >= limits::RUN_WATCHERS_MAX {
            return None;
        }
        let watcher = Arc::new(Watcher { wanted, dirty: Mutex::default(), stirred: Notify::new() });
        list.push(Arc::clone(&watcher));
        self.watchers.count.store(list.len(), Ordering::Relaxed);
        drop(list);
        Some(Watching { watchers: Arc::clone(self), watcher })
    }
}

impl Watcher {
    fn mark(&self, mark: impl FnOnce(&mut Dirty)) {
        let mut dirty = self.dirty.lock();
        mark(&mut dirty);
        // Whoever takes the marks takes this one, too.
        if !std::mem::replace(&mut dirty.marked, true) {
            drop(dirty);
            self.stirred.notify_one();
        }
    }
}

impl Dirty {
    /// What a watch begins with: the rollout, or the group with its rollouts, or the run.
    #[must_use]
    pub fn first(wanted: &Wanted) -> Self {
        let of_group = wanted.group.as_ref().filter(|_| wanted.rollout.is_none());
        Self {
            rollouts: wanted.rollout.iter().cloned().collect(),
            all_rollouts: of_group.is_some(),
            groups: of_group.into_iter().cloned().collect(),
            run: true,
            ..Self::default()
        }
    }

    fn rollout(&mut self, rollout: &RolloutId) {
        self.run = true;
        if self.all_rollouts || self.rollouts.contains(rollout) {
            return;
        }
        if self.rollouts.len() >= limits::WATCH_DIRTY_ROLLOUTS_MAX {
            self.rollouts.clear();
            self.all_rollouts = true;
        } else {
            self.rollouts.insert(rollout.clone());
        }
    }

    fn group(&mut self, group: &GroupId) {
        self.run = true;
        if self.all_groups || self.groups.contains(group) {
            return;
        }
        if self.groups.len() >= limits::WATCH_DIRTY_GROUPS_MAX {
            self.groups.clear();
            self.all_groups = true;
        } else {
            self.groups.insert(group.clone());
        }
    }
}

impl Watching {
    /// What this watcher wants to know of.
    #[must_use]
    pub fn wanted(&self) -> &Wanted {
        &self.watcher.wanted
    }

    /// Waits until something was marked since this last was done. Safe to drop while waiting.
    pub async fn stirred(&self) {
        self.watcher.stirred.notified().await;
    }

    /// Takes what was marked.
    #[must_use]
    pub fn take(&self) -> Dirty {
        std::mem::take(&mut self.watcher.dirty.lock())
    }
}

impl Drop for Watching {
    fn drop(&mut self) {
        let watchers = &self.watchers.watchers;
        let mut list = watchers.list.write();
        list.retain(|watcher| !Arc::ptr_eq(watcher, &self.watcher));
        watchers.count.store(list.len(), Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

    use super::*;

    fn rollout(number: usize) -> RolloutId {
        RolloutId::parse(&format!("r{number}")).unwrap()
    }

    #[test]
    fn marks_are_a_set_with_a_bound() {
        let mut dirty = Dirty::default();
        for _ in 0..2 {
            (0..limits::WATCH_DIRTY_ROLLOUTS_MAX).for_each(|number| dirty.rollout(&rollout(number)));
        }
        assert!(!dirty.all_rollouts && dirty.rollouts.len() == limits::WATCH_DIRTY_ROLLOUTS_MAX);
        dirty.rollout(&rollout(limits::WATCH_DIRTY_ROLLOUTS_MAX));
        dirty.rollout(&rollout(0));
        assert!(dirty.all_rollouts && dirty.rollouts.is_empty() && dirty.run);
    }
}
