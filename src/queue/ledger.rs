//! The units of one consumer group, the line they wait in, and the counts that must add up.
//!
//! A unit changes its place in one function, [`Ledger::move_to`], which keeps line, counts and sources with it.

use std::collections::{BTreeMap, BTreeSet};

use super::consumers::UnitNumber;
use super::effect::QueueEffect;
use super::unit::{DropReason, NewUnit, Place, Unit, UnitId};

/// So many units, with so many tokens in all.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Tally {
    /// Units.
    pub units: u64,
    /// Tokens in them.
    pub tokens: u64,
}

impl Tally {
    pub(super) fn add(&mut self, tokens: u64) {
        self.units += 1;
        self.tokens += tokens;
    }

    pub(super) fn remove(&mut self, tokens: u64) {
        self.units -= 1;
        self.tokens -= tokens;
    }
}

/// What became of the rows of everything pushed: `made = waiting + leased + parked + acknowledged + dropped` (RULES 3.6.4).
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct RowStates {
    /// Everything ever pushed.
    pub made: u64,
    /// In the line, and put off.
    pub waiting: u64,
    /// Out at consumers.
    pub leased: u64,
    /// A record about their unit is on its way to the log.
    pub parked: u64,
    /// Acknowledged.
    pub acknowledged: u64,
    /// Dropped, by reason.
    pub dropped: BTreeMap<DropReason, u64>,
}

impl RowStates {
    fn of(&mut self, place: Place) -> &mut u64 {
        match place {
            Place::Waiting | Place::Delayed { .. } => &mut self.waiting,
            Place::Leased { .. } => &mut self.leased,
            Place::Parked(_) => &mut self.parked,
            Place::Acknowledged => &mut self.acknowledged,
            Place::Dropped(reason) => self.dropped.entry(reason).or_default(),
        }
    }

    /// Rows that came to stand at this place.
    pub(super) fn add(&mut self, place: Place, rows: u64) {
        *self.of(place) += rows;
    }

    /// Rows of a unit that is made.
    fn make(&mut self, rows: u64) {
        self.made += rows;
        self.waiting += rows;
    }

    fn moved(&mut self, from: Place, to: Place, rows: u64) {
        *self.of(from) -= rows;
        self.add(to, rows);
    }

    /// Whether every row made is in one state.
    #[must_use]
    pub fn adds_up(&self) -> bool {
        let dropped: u64 = self.dropped.values().sum();
        self.made == self.waiting + self.leased + self.parked + self.acknowledged + dropped
    }
}

/// What became of everything pushed: `pushed = waiting + leased + parked + acknowledged + dropped`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Counts {
    pub(super) pushed: Tally,
    /// In the line, and put off.
    pub(super) waiting: Tally,
    pub(super) leased: Tally,
    pub(super) parked: Tally,
    /// Ever, also of rollouts that are forgotten.
    pub(super) acknowledged: Tally,
    /// Ever, also of rollouts that are forgotten.
    pub(super) dropped: BTreeMap<DropReason, Tally>,
    /// Units no longer remembered; all of them acknowledged or dropped.
    pub(super) forgotten: Tally,
    /// Times that a unit was given out.
    pub(super) deliveries: u64,
    /// Of these, how many were not a unit's first.
    pub(super) redeliveries: u64,
    pub(super) rows: RowStates,
}

impl Counts {
    fn of(&mut self, place: Place) -> &mut Tally {
        match place {
            Place::Waiting | Place::Delayed { .. } => &mut self.waiting,
            Place::Leased { .. } => &mut self.leased,
            Place::Parked(_) => &mut self.parked,
            Place::Acknowledged => &mut self.acknowledged,
            Place::Dropped(reason) => self.dropped.entry(reason).or_default(),
        }
    }
}

/// The units of one rollout.
#[derive(Debug, Clone, Default)]
pub(super) struct Source {
    pub(super) units: Vec<UnitNumber>,
    pub(super) unsettled: usize,
}

/// What a move did.
pub(super) struct Moved<K> {
    pub(super) from: Place,
    pub(super) tokens: u64,
    pub(super) effect: Option<QueueEffect<K>>,
}

#[derive(Debug, Clone)]
pub(super) struct Ledger<K, P> {
    pub(super) units: BTreeMap<UnitNumber, Unit<K, P>>,
    pub(super) numbers: BTreeMap<UnitId, UnitNumber>,
    pub(super) sources: BTreeMap<K, Source>,
    pub(super) waiting: BTreeSet<UnitNumber>,
    /// (until when, which unit)
    pub(super) delayed: BTreeSet<(u64, UnitNumber)>,
    /// Those that can be released by hand.
    pub(super) undeliverable: BTreeSet<UnitNumber>,
    pub(super) counts: Counts,
    next_number: UnitNumber,
}

impl<K: Ord + Clone, P: Clone> Ledger<K, P> {
    pub(super) fn new() -> Self {
        Self {
            units: BTreeMap::new(),
            numbers: BTreeMap::new(),
            sources: BTreeMap::new(),
            waiting: BTreeSet::new(),
            delayed: BTreeSet::new(),
            undeliverable: BTreeSet::new(),
            counts: Counts::default(),
            next_number: 0,
        }
    }

    pub(super) fn find(&self, id: &UnitId) -> Option<(UnitNumber, &Unit<K, P>)> {
        let number = *self.numbers.get(id)?;
        Some((number, self.units.get(&number)?))
    }

    pub(super) fn place_of(&self, id: &UnitId) -> Option<(UnitNumber, Place)> {
        self.find(id).map(|(number, unit)| (number, unit.place))
    }

    /// Puts a unit at the end of the line; a known id changes nothing and gives `None`.
    pub(super) fn add(&mut self, source: &K, new: NewUnit<P>, now_ms: u64) -> Option<UnitNumber> {
        if self.numbers.contains_key(&new.id) {
            return None;
        }
        let number = self.next_number;
        self.next_number += 1;
        self.numbers.insert(new.id.clone(), number);
        self.waiting.insert(number);
        self.counts.pushed.add(new.tokens);
        self.counts.waiting.add(new.tokens);
        self.counts.rows.make(new.rows);
        let unit = Unit {
            id: new.id,
            source: source.clone(),
            tokens: new.tokens,
            rows: new.rows,
            pushed_at_ms: now_ms,
            deliveries: 0,
            place: Place::Waiting,
            payload: Some(new.payload),
        };
        self.units.insert(number, unit);
        Some(number)
    }

    /// The one way in which a unit changes its place. `None` if there is no such unit.
    pub(super) fn move_to(&mut self, number: UnitNumber, to: Place) -> Option<Moved<K>> {
        let unit = self.units.get_mut(&number)?;
        let from = std::mem::replace(&mut unit.place, to);
        let (tokens, rows) = (unit.tokens, unit.rows);
        if !to.keeps_payload() {
            unit.payload = None;
        }
        let source = unit.source.clone();
        match from {
            Place::Waiting => drop(self.waiting.remove(&number)),
            Place::Delayed { until_ms } => drop(self.delayed.remove(&(until_ms, number))),
            Place::Dropped(DropReason::Undeliverable) => drop(self.undeliverable.remove(&number)),
            Place::Leased { .. } | Place::Parked(_) | Place::Acknowledged | Place::Dropped(_) => {}
        }
        match to {
            Place::Waiting => drop(self.waiting.insert(number)),
            Place::Delayed { until_ms } => drop(self.delayed.insert((until_ms, number))),
            Place::Dropped(DropReason::Undeliverable) => drop(self.undeliverable.insert(number)),
            Place::Leased { .. } | Place::Parked(_) | Place::Acknowledged | Place::Dropped(_) => {}
        }
        self.counts.of(from).remove(tokens);
        self.counts.of(to).add(tokens);
        self.counts.rows.moved(from, to, rows);
        let effect = self.note_settling(source, from, to);
        Some(Moved { from, tokens, effect })
    }

    fn note_settling(&mut self, key: K, from: Place, to: Place) -> Option<QueueEffect<K>> {
        let (was_settled, is_settled) = (from.is_settled(), to.is_settled());
        let source = self.sources.get_mut(&key)?;
        if was_settled && is_settled {
            // It could have been released by hand, and cannot any more.
            let freed = from.keeps_payload() && !to.keeps_payload() && source.unsettled == 0;
            return freed.then_some(QueueEffect::SourceSettled { source: key });
        }
        if was_settled == is_settled {
            return None;
        }
        if is_settled {
            source.unsettled -= 1;
            (source.unsettled == 0).then_some(QueueEffect::SourceSettled { source: key })
        } else {
            source.unsettled += 1;
            (source.unsettled == 1).then_some(QueueEffect::SourceReopened { source: key })
        }
    }

    /// Removes a settled unit from memory; its counts stay.
    pub(super) fn forget(&mut self, number: UnitNumber) {
        let Some(unit) = self.units.remove(&number) else {
            return;
        };
        debug_assert!(unit.place.is_settled(), "only settled units are forgotten");
        self.numbers.remove(&unit.id);
        self.undeliverable.remove(&number);
        self.counts.forgotten.add(unit.tokens);
    }

    /// Puts those whose delay is over back to their places in the line.
    pub(super) fn end_delays(&mut self, now_ms: u64) {
        while let Some(&(until_ms, number)) = self.delayed.first() {
            if until_ms > now_ms {
                break;
            }
            self.move_to(number, Place::Waiting);
        }
    }

    /// When the oldest unit that is not settled was pushed; one with a record about it on its way is not asked.
    pub(super) fn oldest_pushed_at_ms(&self, leased: impl Iterator<Item = UnitNumber>) -> Option<u64> {
        let delayed = self.delayed.iter().map(|(_, number)| *number);
        let oldest = self.waiting.first().copied().into_iter().chain(delayed).chain(leased).min()?;
        self.units.get(&oldest).map(|unit| unit.pushed_at_ms)
    }

    /// The oldest unit in the line.
    pub(super) fn head(&self) -> Option<(UnitNumber, &Unit<K, P>)> {
        let number = *self.waiting.first()?;
        Some((number, self.units.get(&number)?))
    }
}
