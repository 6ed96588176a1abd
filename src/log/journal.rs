//! The one order of records and of what they cause.
//!
//! [`Journal::append`] gives a record its position and keeps the effects of applying it, in one step, so that effects are
//! handed out in the order of positions; [`Journal::next`] gives them to the sequencing task once they are durable. An answer
//! waits for the position that it was judged from with [`Journal::durable`].
//!
//! Lock order: a rollout's lock may be held when this one is taken; nothing is taken under this one but the log's own.

use std::collections::VecDeque;
use std::sync::Arc;

use parking_lot::Mutex;
use tokio::sync::{Notify, watch};

use super::{Frame, Log, Position, Record};

/// The log with the effects of its records. Effects are bounded by what makes them: each rollout has a few, and each stream has
/// a bounded number of requests whose answers are to come.
pub struct Journal<E> {
    log: Arc<dyn Log>,
    state: Mutex<State<E>>,
    appended: Notify,
    durable: watch::Receiver<Position>,
}

struct State<E> {
    last: Position,
    pending: VecDeque<(Position, E)>,
}

impl<E> Journal<E> {
    /// A journal before this log, which holds `last` as its last position.
    #[must_use]
    pub fn new(log: Arc<dyn Log>, last: Position) -> Self {
        let durable = log.durable_through();
        Self { log, state: Mutex::new(State { last, pending: VecDeque::new() }), appended: Notify::new(), durable }
    }

    /// What [`Journal::append`] needs of a record; called before the record is applied.
    #[must_use]
    pub fn frame(&self, record: &Record) -> Frame {
        self.log.frame(record)
    }

    /// Gives a record its place, with the effects of applying it.
    pub fn append(&self, frame: Frame, effects: impl IntoIterator<Item = E>) -> Position {
        let mut state = self.state.lock();
        let position = self.log.append(frame);
        debug_assert!(position > state.last);
        state.last = position;
        let before = state.pending.len();
        state.pending.extend(effects.into_iter().map(|effect| (position, effect)));
        if state.pending.len() > before {
            self.appended.notify_one();
        }
        position
    }

    /// An effect that comes after all records so far, without one of its own.
    pub fn after_last(&self, effect: E) {
        let mut state = self.state.lock();
        let last = state.last;
        state.pending.push_back((last, effect));
        self.appended.notify_one();
    }

    /// The last position given.
    #[must_use]
    pub fn last(&self) -> Position {
        self.state.lock().last
    }

    /// The effects of records that are durable, in order; waits until there are some. Safe to drop while waiting.
    pub async fn next(&self) -> Vec<(Position, E)> {
        let mut durable = self.durable.clone();
        loop {
            let through = *durable.borrow_and_update();
            let waits = {
                let mut state = self.state.lock();
                let ready = state.pending.partition_point(|(position, _)| *position <= through);
                if ready > 0 {
                    return state.pending.drain(..ready).collect();
                }
                !state.pending.is_empty()
            };
            if waits {
                tokio::select! {
                    changed = durable.changed() => if changed.is_err() { std::future::pending::<()>().await },
                    () = self.appended.notified() => {}
                }
            } else {
                self.appended.notified().await;
            }
        }
    }

    /// Waits until this position is durable. If the log is gone, it never is.
    pub async fn durable(&self, position: Position) {
        let mut durable = self.durable.clone();
        if durable.wait_for(|through| *through >= position).await.is_err() {
            std::future::pending::<()>().await;
        }
    }

    /// Whether this position is durable now.
    #[must_use]
    pub fn is_durable(&self, position: Position) -> bool {
        *self.durable.borrow() >= position
    }
}
