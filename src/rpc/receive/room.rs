//! Room for bytes of messages that are not whole.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::limits;

/// What the streams of one connection may hold.
pub(in crate::rpc) struct ConnectionRoom {
    /// Beyond its own part: from here, and from the budget of all.
    budget: Arc<Semaphore>,
    own_used: AtomicUsize,
    /// What connections have for themselves, all together.
    all_own_bytes: usize,
    /// How many connections there are.
    connections: Arc<AtomicUsize>,
}

impl ConnectionRoom {
    pub(in crate::rpc) fn new(all_own_bytes: usize, connections: Arc<AtomicUsize>) -> Self {
        connections.fetch_add(1, Ordering::Relaxed);
        let budget = Arc::new(Semaphore::new(limits::RECEIVE_CONNECTION_BYTES_MAX));
        Self { budget, own_used: AtomicUsize::new(0), all_own_bytes, connections }
    }

    /// What this connection has for itself: the fewer there are, the more.
    fn own_bytes(&self) -> usize {
        let connections = self.connections.load(Ordering::Relaxed).max(1);
        (self.all_own_bytes / connections).min(limits::RECEIVE_CONNECTION_OWN_BYTES_MAX)
    }

    /// Takes as much of so many bytes as there is.
    fn take_own(&self, bytes: usize) -> usize {
        let most = self.own_bytes();
        let taken = |used: usize| bytes.min(most.saturating_sub(used));
        let before = self.own_used.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |used| Some(used + taken(used)));
        before.map_or(0, taken)
    }

    fn give_own(&self, bytes: usize) {
        self.own_used.fetch_sub(bytes, Ordering::Relaxed);
    }
}

impl Drop for ConnectionRoom {
    fn drop(&mut self) {
        self.connections.fetch_sub(1, Ordering::Relaxed);
    }
}

type Permits = Vec<OwnedSemaphorePermit>;

/// Room that is waited for.
pub(super) struct Wanted {
    bytes: usize,
    permits: Pin<Box<dyn Future<Output = Permits> + Send>>,
}

/// The room of one stream.
pub(super) struct Room {
    connection: Option<Arc<ConnectionRoom>>,
    budgets: Vec<Arc<Semaphore>>,
    /// Of the connection's own part.
    own_bytes: usize,
    /// In each of the budgets.
    held: Permits,
    held_bytes: usize,
}

impl Room {
    pub(super) fn new(all: Arc<Semaphore>, connection: Option<Arc<ConnectionRoom>>) -> Self {
        // That of the connection first: who waits there holds nothing that others wait for.
        let budgets = connection.iter().map(|share| Arc::clone(&share.budget)).chain([all]).collect();
        Self { connection, budgets, own_bytes: 0, held: Permits::new(), held_bytes: 0 }
    }

    fn bytes(&self) -> usize {
        self.own_bytes + self.held_bytes
    }

    /// Holds room for `needed` bytes, or says what has to be waited for.
    pub(super) fn grow(&mut self, needed: usize) -> Option<Wanted> {
        if let Some(connection) = &self.connection {
            self.own_bytes += connection.take_own(needed.saturating_sub(self.own_bytes + self.held_bytes));
        }
        let bytes = needed.saturating_sub(self.bytes());
        if bytes == 0 {
            return None;
        }
        let count = u32::try_from(bytes).unwrap_or(u32::MAX);
        let at_once: Permits =
            self.budgets.iter().map_while(|budget| Arc::clone(budget).try_acquire_many_owned(count).ok()).collect();
        if at_once.len() == self.budgets.len() {
            self.hold(at_once, bytes);
            return None;
        }
        drop(at_once);
        let budgets = self.budgets.clone();
        let permits = Box::pin(async move {
            let mut permits = Permits::new();
            for budget in budgets {
                // Budgets are never closed.
                permits.extend(budget.acquire_many_owned(count).await.ok());
            }
            permits
        });
        Some(Wanted { bytes, permits })
    }

    /// Waits for room. True once it is held.
    pub(super) fn poll_wanted(&mut self, wanted: &mut Wanted, context: &mut std::task::Context<'_>) -> bool {
        let std::task::Poll::Ready(permits) = wanted.permits.as_mut().poll(context) else { return false };
        self.hold(permits, wanted.bytes);
        true
    }

    fn hold(&mut self, permits: Permits, bytes: usize) {
        if self.held.is_empty() {
            self.held = permits;
        } else {
            self.held.iter_mut().zip(permits).for_each(|(held, more)| held.merge(more));
        }
        self.held_bytes += bytes;
    }

    /// Gives back what is not needed, shared room first.
    pub(super) fn shrink(&mut self, needed: usize) {
        let surplus = self.bytes().saturating_sub(needed);
        let shared = surplus.min(self.held_bytes);
        if shared == self.held_bytes {
            self.held.clear();
        } else if shared > 0 {
            self.held.iter_mut().for_each(|permit| drop(permit.split(shared)));
        }
        self.held_bytes -= shared;
        let own = surplus - shared;
        if let Some(connection) = &self.connection {
            connection.give_own(own);
        }
        self.own_bytes -= own;
    }
}

impl Drop for Room {
    fn drop(&mut self) {
        self.shrink(0);
    }
}
