//! Streams that have much to do take turns.
//!
//! A stream whose client sends without a pause could keep a thread for as long as requests are at hand, and everybody else on
//! that thread waits. So after [`limits::TURN_US`] of work without a pause it gives way, and goes on only in one of a few lanes,
//! as many as there are cores, that all such streams share in order. A stream with a request now and then never waits in line: it
//! finds no more before it than one turn of each lane.

use std::sync::Arc;

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::limits;

/// The lanes.
#[derive(Clone)]
pub struct Lanes(Arc<Semaphore>);

impl Lanes {
    /// As many as there are cores.
    #[must_use]
    pub fn new() -> Self {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        Self(Arc::new(Semaphore::new(cores)))
    }

    async fn enter(&self) -> Option<OwnedSemaphorePermit> {
        // The lanes are never closed.
        Arc::clone(&self.0).acquire_owned().await.ok()
    }
}

impl Default for Lanes {
    fn default() -> Self {
        Self::new()
    }
}

/// How much a stream has worked without a pause.
#[derive(Default)]
pub(super) struct Turn {
    worked_us: u64,
    ended_us: u64,
    lane: Option<OwnedSemaphorePermit>,
}

impl Turn {
    /// There is nothing to do just now: others may have the lane.
    pub(super) fn pause(&mut self) {
        self.lane = None;
    }

    /// Gives way to others before more work, if it is time to.
    pub(super) async fn give_way(&mut self, lanes: &Lanes, now_us: u64) {
        if now_us.saturating_sub(self.ended_us) > limits::TURN_PAUSE_US {
            self.worked_us = 0;
        }
        if self.worked_us >= limits::TURN_US {
            self.lane = None;
            tokio::task::yield_now().await;
            self.lane = lanes.enter().await;
            self.worked_us = 0;
        }
    }

    /// Something took from one moment to another.
    pub(super) fn worked(&mut self, from_us: u64, to_us: u64) {
        self.worked_us += to_us.saturating_sub(from_us);
        self.ended_us = to_us;
    }
}

#[cfg(test)]
mod tests {
    use std::pin::pin;

    use futures_util::FutureExt as _;

    use super::*;

    fn one_lane() -> Lanes {
        Lanes(Arc::new(Semaphore::new(1)))
    }

    #[tokio::test]
    async fn who_works_without_a_pause_waits_in_line() {
        let lanes = one_lane();
        let (mut one, mut two) = (Turn::default(), Turn::default());
        for turn in [&mut one, &mut two] {
            assert!(turn.give_way(&lanes, 0).now_or_never().is_some(), "it has done nothing yet");
            turn.worked(0, limits::TURN_US);
        }
        one.give_way(&lanes, limits::TURN_US).await;
        let mut waits = pin!(two.give_way(&lanes, limits::TURN_US));
        for _ in 0..3 {
            assert!(waits.as_mut().now_or_never().is_none(), "the lane is taken");
        }
        one.pause();
        assert!(waits.now_or_never().is_some());
    }

    #[tokio::test]
    async fn who_comes_now_and_then_never_waits() {
        let lanes = one_lane();
        let _taken = Arc::clone(&lanes.0).acquire_owned().await;
        let mut turn = Turn::default();
        for request in 1..100 {
            let now_us = request * 10 * limits::TURN_US;
            assert!(turn.give_way(&lanes, now_us).now_or_never().is_some());
            turn.worked(now_us, now_us + limits::TURN_US);
        }
    }
}
