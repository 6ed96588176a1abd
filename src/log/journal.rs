//! The one order of records and of what they cause.
//!
//! [`Journal::append`] gives a record its position and keeps the effects of applying it, in one step, so that effects are
//! handed out in the order of positions; [`Journal::next`] gives them to the sequencing task once they are durable. An answer
//! waits for the position that it was judged from with [`Journal::durable`].
//!
//! Lock order: a rollout's lock may be held when this one is taken; nothing is taken under this one but the log's own.

use std::collections::VecDeque;
use std::sync::{Arc, OnceLock};

use parking_lot::Mutex;
use tokio::sync::{Notify, watch};

use crate::limits;

use super::{Frame, Log, Position, Record};

/// The log with the effects of its records. Effects are bounded by what makes them: each rollout has a few, and each stream has
/// a bounded number of requests whose answers are to come.
pub struct Journal<E> {
    opened: OnceLock<Opened>,
    state: Mutex<State<E>>,
    appended: Notify,
}

/// The log, once all that it holds is replayed.
struct Opened {
    log: Arc<dyn Log>,
    room_changes: Option<watch::Receiver<u64>>,
    durable: watch::Receiver<Position>,
}

struct State<E> {
    last: Position,
    pending: VecDeque<(Position, E)>,
}

impl<E> Default for Journal<E> {
    fn default() -> Self {
        let state = Mutex::new(State { last: Position::default(), pending: VecDeque::new() });
        Self { opened: OnceLock::new(), state, appended: Notify::new() }
    }
}

impl<E> Journal<E> {
    /// From now on records go to this log, whose last position is `last`. Must be called once, before anything is appended or
    /// waited for.
    pub fn open(&self, log: Arc<dyn Log>, last: Position) {
        let (durable, room_changes) = (log.durable_through(), log.room_changes());
        self.state.lock().last = last;
        let first = self.opened.set(Opened { log, room_changes, durable }).is_ok();
        debug_assert!(first, "a journal is opened once");
    }

    fn opened(&self) -> &Opened {
        match self.opened.get() {
            Some(opened) => opened,
            None => unreachable!("nothing is reported before the log is open"),
        }
    }

    /// Whether it is open.
    #[must_use]
    pub fn is_open(&self) -> bool {
        self.opened.get().is_some()
    }

    /// The log.
    #[must_use]
    pub fn log(&self) -> &Arc<dyn Log> {
        &self.opened().log
    }

    /// What [`Journal::append`] needs of a record; called before the record is applied.
    #[must_use]
    pub fn frame(&self, record: &Record, unix_ms: u64) -> Frame {
        self.opened().log.frame(record, unix_ms)
    }

    /// Gives a record its place, with the effects of applying it.
    pub fn append(&self, frame: Frame, effects: impl IntoIterator<Item = E>) -> Position {
        let mut state = self.state.lock();
        let position = self.opened().log.append(frame);
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
        let mut durable = self.opened().durable.clone();
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
                    biased;
                    changed = durable.changed() => if changed.is_err() { std::future::pending::<()>().await },
                    () = self.appended.notified() => {}
                }
            } else {
                self.appended.notified().await;
            }
        }
    }

    /// Waits while more is on its way to the log than should be, and while room is being made for it.
    pub async fn until_queue_is_short(&self) {
        let Opened { log, room_changes, durable } = self.opened();
        if !log.has_room()
            && let Some(mut changes) = room_changes.clone()
        {
            changes.mark_unchanged();
            while !log.has_room() && !log.is_full() && changes.changed().await.is_ok() {}
        }
        if log.queued_bytes() <= limits::LOG_QUEUED_BYTES_MAX {
            return;
        }
        let mut durable = durable.clone();
        while log.queued_bytes() > limits::LOG_QUEUED_BYTES_MAX {
            if durable.changed().await.is_err() {
                return;
            }
        }
    }

    /// Waits until this position is durable. If the log is gone, it never is.
    pub async fn durable(&self, position: Position) {
        let mut durable = self.opened().durable.clone();
        if durable.wait_for(|through| *through >= position).await.is_err() {
            std::future::pending::<()>().await;
        }
    }

    /// Whether this position is durable now.
    #[must_use]
    pub fn is_durable(&self, position: Position) -> bool {
        *self.opened().durable.borrow() >= position
    }
}
