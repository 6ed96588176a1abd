//! When a clock has something to do in which run.
//!
//! A run stands here once at most, with a moment that is not after the first one at which its queue has something to do: whatever
//! may bring that forward stirs the run, and what was stirred is put down anew when it was served. What puts it off (a sign of life,
//! an acknowledgement) need not say so: then the clock finds nothing to do, and asks again.

use std::collections::{BTreeMap, BTreeSet};

use crate::ids::RunId;

/// The next deadline of each run that has one.
#[derive(Default)]
pub(super) struct Deadlines {
    by_time: BTreeSet<(u64, RunId)>,
    /// The same by run.
    of_run: BTreeMap<RunId, u64>,
    /// How often one was put down.
    #[cfg(test)]
    pub(super) put_count: usize,
}

impl Deadlines {
    /// Puts down when a run is to be looked at next, in place of what stood there before.
    pub(super) fn put(&mut self, run: &RunId, at_ms: Option<u64>) {
        #[cfg(test)]
        {
            self.put_count += 1;
        }
        if let Some(before_ms) = self.of_run.remove(run) {
            self.by_time.remove(&(before_ms, run.clone()));
        }
        if let Some(at_ms) = at_ms {
            self.of_run.insert(run.clone(), at_ms);
            self.by_time.insert((at_ms, run.clone()));
        }
    }

    /// The first of all.
    pub(super) fn first_ms(&self) -> Option<u64> {
        self.by_time.first().map(|(at_ms, _)| *at_ms)
    }

    /// The runs that are to be looked at by now.
    pub(super) fn due(&self, now_ms: u64) -> Vec<RunId> {
        self.by_time.iter().take_while(|(at_ms, _)| *at_ms <= now_ms).map(|(_, run)| run.clone()).collect()
    }

    /// Whether both orders say the same, and a run with this deadline is looked at in time.
    pub(super) fn keeps(&self, run: &RunId, deadline_ms: Option<u64>) -> bool {
        let at_ms = self.of_run.get(run);
        let is_in_time = deadline_ms.is_none_or(|deadline_ms| at_ms.is_some_and(|at_ms| *at_ms <= deadline_ms));
        let agrees = at_ms.is_none_or(|at_ms| self.by_time.contains(&(*at_ms, run.clone())));
        is_in_time && agrees && self.by_time.len() == self.of_run.len()
    }
}
