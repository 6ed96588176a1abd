//! Which rollouts hold tokens, by when they were last used, as far as was looked.
//!
//! Most are listed once and end before anybody asks who was used least: so a use is only noted on the rollout, and who finds it
//! listed too early lists it anew.

use std::collections::BTreeMap;
use std::sync::{Arc, Weak};

use parking_lot::Mutex;

use super::Entry;

/// A rollout's place: when the clock showed its last use, in milliseconds, and the how manieth it is that was listed.
pub(super) type Place = (u64, u64);

/// Rollouts that hold tokens.
#[derive(Default)]
pub(super) struct Recency {
    list: Mutex<List>,
}

#[derive(Default)]
struct List {
    by_use: BTreeMap<Place, Weak<Entry>>,
    count: u64,
}

/// A rollout's place in the list, for as long as this is there.
pub(crate) struct Listed {
    recency: Arc<Recency>,
    place: Place,
}

impl Recency {
    /// Lists a rollout, behind all others that were used as late.
    pub(super) fn list(self: &Arc<Self>, used_ms: u64, entry: &Arc<Entry>) -> Listed {
        let mut list = self.list.lock();
        list.count += 1;
        let place = (used_ms, list.count);
        list.by_use.insert(place, Arc::downgrade(entry));
        Listed { recency: Arc::clone(self), place }
    }

    /// Takes the one that was used least recently out of the list.
    pub(super) fn pop(&self) -> Option<(Place, Weak<Entry>)> {
        self.list.lock().by_use.pop_first()
    }

    /// Whether there is none.
    pub(super) fn is_empty(&self) -> bool {
        self.list.lock().by_use.is_empty()
    }
}

impl Listed {
    /// Whether it is this place.
    pub(super) fn is_at(&self, place: Place) -> bool {
        self.place == place
    }
}

impl Drop for Listed {
    fn drop(&mut self) {
        self.recency.list.lock().by_use.remove(&self.place);
    }
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

    use super::super::Slot;
    use super::*;

    #[test]
    fn the_least_recently_used_comes_first_and_who_has_ended_is_not_listed() {
        let recency = Arc::new(Recency::default());
        let entries: Vec<_> = (0..3).map(|_| Entry::new(Slot::Removed)).collect();
        let mut listed: Vec<Listed> =
            [7, 5, 5].iter().zip(&entries).map(|(used_ms, entry)| recency.list(*used_ms, entry)).collect();
        drop(listed.remove(1));
        let (place, entry) = recency.pop().unwrap();
        assert!(listed[1].is_at(place) && place.0 == 5);
        assert!(Arc::ptr_eq(&entry.upgrade().unwrap(), &entries[2]));
        let again = recency.list(7, &entries[2]);
        listed.remove(1);
        assert!(listed[0].is_at(recency.pop().unwrap().0));
        assert!(again.is_at(recency.pop().unwrap().0), "its former place is given up, not this one");
        drop(again);
        assert!(recency.is_empty() && recency.pop().is_none());
    }
}
