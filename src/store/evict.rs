//! Memory as a cache over the log: the tokens of rollouts leave when room is short, and come back when they are needed.
//!
//! Above a part of the budget ([`super::Eviction`]), whoever has brought memory there lets go of the tokens of those rollouts that
//! were used least recently ([`Store::make_room`]), after its own rollout's lock: so memory is given back as fast as it is taken,
//! and nobody waits for a task to do it. Above one mark only idle rollouts are let go of, so that what cannot leave does not have
//! all that is in use come and go; above the next all but the one in hand. What stays of a rollout is a skeleton
//! ([`crate::rollout`], `evict`). Nothing leaves whose last record is not durable, and nothing at all where the log does not keep
//! its records.
//!
//! What needs tokens that are not there has them brought back ([`Store::restore`]) by a thread that reads the log, makes the rollout
//! anew from its records, and puts its tokens in their place; meanwhile other events of the same stream wait, and no others.

use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::oneshot;

use crate::error::{Reason, Refusal};
use crate::ids::GroupId;
use crate::limits;
use crate::log::segments::ReadError;
use crate::log::{Log, LogError, Position};
use crate::rollout::settings::RolloutSettings;
use crate::rollout::{FinalisedRollout, Rollout};
use crate::telemetry::Held;

use super::carry::{Reading, happened_to};
use super::recency::{Listed, Place};
use super::{Entry, Live, RolloutKey, Slot, Store};

/// A finalised rollout, for all who hold it: whole, or as what is left of it without its tokens.
#[derive(Debug)]
pub struct Finalised(Mutex<Option<Arc<FinalisedRollout>>>);

impl Finalised {
    pub(super) fn new(rollout: Arc<FinalisedRollout>) -> Arc<Self> {
        Arc::new(Self(Mutex::new(Some(rollout))))
    }

    /// It as it is now. Its tokens do not leave it while this is held.
    #[must_use]
    pub fn now(&self) -> Arc<FinalisedRollout> {
        match &*self.0.lock() {
            Some(rollout) => Arc::clone(rollout),
            None => unreachable!("it is away only under this lock"),
        }
    }
}

/// Where a rollout's tokens are.
pub(crate) enum Tokens {
    /// In memory, with the rollout's place among those that may leave it, if they are worth it.
    Here(Option<Listed>),
    /// In the log only, and counted as that.
    Away { _counted: Held },
}

impl Tokens {
    fn are_listed_at(&self, place: Place) -> bool {
        matches!(self, Self::Here(Some(listed)) if listed.is_at(place))
    }
}

/// What became of an attempt to let go of a rollout's tokens.
#[derive(PartialEq)]
enum Evicted {
    /// They are gone.
    Done,
    /// It is listed again: it was used since, or cannot be let go of now.
    Listed,
    /// It is listed again, for it was used so lately that it, and all that were used after it, stay.
    Stays,
    /// It has ended.
    Ended,
}

/// What became of an attempt to read tokens back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Restored {
    /// They are there, or the rollout has ended.
    Now,
    /// Not all of the rollout's records are durable: it can be read when they are.
    Later,
}

/// What a rollout's tokens are made from.
struct Source {
    attempt: u32,
    opened: Position,
    positions: Vec<Position>,
    settings: Arc<RolloutSettings>,
    group: Option<GroupId>,
}

impl Live {
    /// Notes that it was used, and lists it if its tokens are worth letting go of, and could be read again.
    pub(super) fn used(&mut self, store: &Store, entry: &Arc<Entry>) {
        (self.used_ms, self.is_awaited) = (store.clock.now_ms(), false);
        let holds_enough = self.rollout.has_tokens() && self.rollout.token_bytes() >= store.eviction.token_bytes_min;
        if matches!(self.tokens, Tokens::Here(None)) && holds_enough && store.keeps_records() {
            self.tokens = Tokens::Here(Some(store.recency.list(self.used_ms, entry)));
        }
    }

    /// Lets go of its tokens, if nobody makes rows of them.
    fn evict(&mut self) -> bool {
        let before = self.rollout.resident_bytes();
        let evicted = match &self.finalised {
            Some(finalised) => {
                let mut held = finalised.shared.0.lock();
                *held = None;
                let evicted = self.rollout.evict();
                *held = self.rollout.finalised().cloned();
                evicted
            }
            None => self.rollout.evict(),
        };
        self.share.leave(before.saturating_sub(self.rollout.resident_bytes()));
        evicted
    }

    /// Takes its tokens from the rollout that was made again; false, and nothing is changed, if that is another.
    fn restore(&mut self, again: Rollout) -> bool {
        let before = self.rollout.resident_bytes();
        if !self.rollout.restore(again) {
            return false;
        }
        if let Some(finalised) = &self.finalised {
            *finalised.shared.0.lock() = self.rollout.finalised().cloned();
        }
        self.share.come_back(self.rollout.resident_bytes().saturating_sub(before));
        true
    }

    /// What its tokens are made from, if they are not there.
    fn source(&self) -> Option<Source> {
        let facts = self.rollout.facts();
        (!self.rollout.has_tokens()).then(|| Source {
            attempt: self.attempt,
            opened: self.share.opened(),
            positions: self.positions.clone(),
            settings: Arc::clone(&facts.settings),
            group: facts.group.clone(),
        })
    }
}

impl Store {
    /// From now on tokens may leave memory, for this log gives them back: before it is open, while it is replayed, already.
    pub(super) fn read_from(&self, log: Arc<dyn Log>) {
        if log.keeps_records() {
            // It is the same each time.
            let _ = self.source.set(log);
        }
    }

    /// Whether records are worth finding again. While they are replayed it is not known.
    pub(super) fn keeps_records(&self) -> bool {
        self.is_replaying() || self.source.get().is_some()
    }

    /// Whether tokens should leave memory.
    pub(super) fn lacks_room(&self) -> bool {
        self.memory.is_above(self.eviction.idle_above_percent)
    }

    /// Lets go of the tokens of rollouts that were used least recently while memory is above its marks, but for those of `own`, which
    /// was just used. No lock may be held.
    pub(super) fn make_room(&self, own: Option<&RolloutKey>) {
        if !self.lacks_room() || self.source.get().is_none() {
            return;
        }
        let own = own.and_then(|key| self.entry(key));
        for _ in 0..limits::EVICTED_AT_ONCE {
            let Some((place, entry)) = self.recency.pop() else { return };
            let Some(entry) = entry.upgrade() else { continue };
            let is_own = own.as_ref().is_some_and(|own| Arc::ptr_eq(own, &entry));
            let evicted = self.evict(&entry, place, is_own);
            if evicted == Evicted::Stays || !self.lacks_room() {
                return;
            }
        }
    }

    /// Waits until more can be let go of, if memory is well above the mark: what is not durable yet cannot be.
    pub(super) async fn until_room_is_made(&self) {
        if self.memory.is_above(limits::MEMORY_EVICT_WAIT_PERCENT) && !self.recency.is_empty() {
            self.durable(self.journal.last()).await;
            self.make_room(None);
        }
    }

    /// Lets go of a rollout's tokens, unless it was used since it was listed; then, or if it may not be let go of now, it is listed
    /// again.
    fn evict(&self, entry: &Arc<Entry>, place: Place, is_own: bool) -> Evicted {
        let mut slot = entry.slot.lock();
        let live = match &mut *slot {
            Slot::Live(live) if live.tokens.are_listed_at(place) => live,
            Slot::Live(_) | Slot::Ended(..) | Slot::Removed => return Evicted::Ended,
        };
        let now_ms = self.clock.now_ms();
        let is_old = live.used_ms <= place.0;
        let is_idle = now_ms.saturating_sub(live.used_ms) >= limits::EVICTED_IDLE_MS;
        let may_leave = is_idle || self.memory.is_above(self.eviction.above_percent);
        // What was read from a log that is not open yet is durable.
        let is_durable = !self.journal.is_open() || self.journal.is_durable(live.last_position);
        let is_wanted = is_own || (live.is_awaited && !is_idle);
        if is_old && !is_wanted && may_leave && is_durable && live.evict() {
            live.tokens = Tokens::Away { _counted: self.telemetry.evicted() };
            return Evicted::Done;
        }
        // What may leave and cannot yet is looked at again after all others, and its idle time goes on.
        let listed_ms = if is_old && may_leave { now_ms } else { live.used_ms };
        live.tokens = Tokens::Here(Some(self.recency.list(listed_ms, entry)));
        // Whoever is listed behind it was used later.
        if is_old && !may_leave { Evicted::Stays } else { Evicted::Listed }
    }

    /// A finalised rollout with its tokens, which do not leave while this is held; none if it is not there any more, and they have
    /// left.
    ///
    /// # Errors
    /// If the log does not give them back.
    pub async fn with_tokens(
        &self,
        key: &RolloutKey,
        finalised: &Arc<Finalised>,
    ) -> Result<Option<Arc<FinalisedRollout>>, Refusal> {
        for _ in 0..limits::RESTORE_TRIES_MAX {
            let now = finalised.now();
            if now.has_tokens() {
                self.uses(key);
                return Ok(Some(now));
            }
            drop(now);
            if !self.holds(key, finalised) {
                return Ok(None);
            }
            self.restore(key).await?;
        }
        Err(thrashing("its tokens leave memory again before they can be used"))
    }

    /// Notes that a rollout is used.
    fn uses(&self, key: &RolloutKey) {
        if let Some(entry) = self.entry(key)
            && let Slot::Live(live) = &mut *entry.slot.lock()
        {
            live.used(self, &entry);
        }
    }

    /// Whether a rollout is this finalised one.
    #[must_use]
    pub fn holds(&self, key: &RolloutKey, finalised: &Arc<Finalised>) -> bool {
        let Some(entry) = self.entry(key) else { return false };
        match &*entry.slot.lock() {
            Slot::Live(live) => live.finalised.as_ref().is_some_and(|held| Arc::ptr_eq(&held.shared, finalised)),
            Slot::Ended(..) | Slot::Removed => false,
        }
    }

    /// Has a rollout's tokens in memory, if it is there.
    ///
    /// # Errors
    /// If the log does not give them back.
    pub async fn restore(&self, key: &RolloutKey) -> Result<(), Refusal> {
        for _ in 0..limits::RESTORE_TRIES_MAX {
            let Some(entry) = self.entry(key) else { return Ok(()) };
            let last = match &*entry.slot.lock() {
                Slot::Live(live) if !live.rollout.has_tokens() => live.last_position,
                Slot::Live(_) | Slot::Ended(..) | Slot::Removed => return Ok(()),
            };
            self.durable(last).await;
            if self.read_by_another(key).await? == Restored::Now {
                return Ok(());
            }
        }
        Err(thrashing("it is written anew faster than it can be read"))
    }

    /// Has a thread that may wait for the disk read them back.
    async fn read_by_another(&self, key: &RolloutKey) -> Result<Restored, Refusal> {
        let (reply, restored) = oneshot::channel();
        let Some(readings) = self.readings.get() else { return Err(stopping()) };
        if readings.send(Reading::Restore(key.clone(), reply)).await.is_err() {
            return Err(stopping());
        }
        restored.await.unwrap_or_else(|_| Err(stopping()))
    }

    /// Has them read back on this thread, which waits for the disk, if they are not there.
    pub(super) fn restore_now(&self, key: &RolloutKey) -> Result<Restored, Refusal> {
        let began_ms = self.clock.now_ms();
        for last_try in [false, false, true] {
            let Some(entry) = self.entry(key) else { return Ok(Restored::Now) };
            let Some(source) = source(&entry) else { return Ok(Restored::Now) };
            let Some(log) = self.source.get() else { return Err(not_read_back("it does not keep its records")) };
            let again = match again(&**log, key, &source) {
                Ok(again) => again,
                // Written forward meanwhile, it is somewhere else, and perhaps not on disk yet.
                Err(LogError::Read(ReadError::NotDurable(_))) => return Ok(Restored::Later),
                Err(LogError::NotKept(_) | LogError::Read(ReadError::NotKept(_))) if !last_try => continue,
                Err(error) => {
                    tracing::error!(run = %key.run, rollout = %key.rollout, %error, "records cannot be read back");
                    return Err(not_read_back(&error.to_string()));
                }
            };
            let Some(again) = again else { return Err(not_read_back("other records stand where its own should")) };
            match self.put_back(&entry, &source, again) {
                Some(true) => {
                    let took_ms = self.clock.now_ms().saturating_sub(began_ms);
                    self.telemetry.restored(Duration::from_millis(took_ms));
                    self.make_room(Some(key));
                    return Ok(Restored::Now);
                }
                Some(false) => return Err(not_read_back("its records make another rollout")),
                None => {}
            }
        }
        Err(not_read_back("it changes faster than it can be read"))
    }

    /// Gives a rollout its tokens again, unless it is another by now; whether it took them.
    fn put_back(&self, entry: &Arc<Entry>, source: &Source, again: Rollout) -> Option<bool> {
        let mut slot = entry.slot.lock();
        let live = match &mut *slot {
            Slot::Live(live) if live.share.opened() == source.opened => live,
            Slot::Live(_) | Slot::Ended(..) | Slot::Removed => return Some(true),
        };
        if live.rollout.has_tokens() {
            return Some(true);
        }
        if live.positions != source.positions {
            return None;
        }
        let restored = live.restore(again);
        if restored {
            live.tokens = Tokens::Here(None);
            live.used(self, entry);
            live.is_awaited = true;
        }
        Some(restored)
    }
}

fn source(entry: &Entry) -> Option<Source> {
    match &*entry.slot.lock() {
        Slot::Live(live) => live.source(),
        Slot::Ended(..) | Slot::Removed => None,
    }
}

/// The rollout, made from its records; none if other records stand there.
fn again(log: &dyn Log, key: &RolloutKey, source: &Source) -> Result<Option<Rollout>, LogError> {
    let mut rollout = Rollout::new(Arc::clone(&source.settings), source.group.clone(), 0);
    let mut are_its = true;
    log.read_at(&source.positions, &mut |_, dated| match happened_to(key, source.attempt, dated.record) {
        // When a clock decided something is not needed: that it did is a record.
        Some(record) => drop(rollout.apply(record, 0)),
        None => are_its = false,
    })?;
    Ok(are_its.then_some(rollout))
}

/// More is in use at once than memory holds.
fn thrashing(why: &str) -> Refusal {
    let message = format!("the rollout cannot be used now: {why}");
    Refusal::new(Reason::MemoryFull, message).retry_after_ms(limits::RESTORE_RETRY_AFTER_MS)
}

fn stopping() -> Refusal {
    let message = "the service is about to stop, and reads nothing back any more; ask again after the delay";
    Refusal::new(Reason::Draining, message).retry_after_ms(limits::RESTORE_RETRY_AFTER_MS)
}

fn not_read_back(why: &str) -> Refusal {
    let message = format!("the rollout's tokens are not in memory, and the log does not give them back: {why}");
    Refusal::new(Reason::LogUnreadable, message).retry_after_ms(limits::RESTORE_RETRY_AFTER_MS)
}
