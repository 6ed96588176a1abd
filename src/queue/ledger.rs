//! The units of one consumer group, the line they wait in, and the counts that must add up.
//!
//! A unit changes its place in one function, [`Ledger::move_to`], which keeps line, counts and sources with it.

use std::collections::{BTreeMap, BTreeSet};

use super::consumers::UnitNumber;
use super::effect::QueueEffect;
use super::seek::History;
use super::staleness::{self, ByVersion};
use super::unit::{DropReason, NewUnit, Place, Unit, UnitId};

/// So many units, with so many tokens in all.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Tally {
    /// Units.
    pub units: u64,
    /// Tokens in them.
    pub tokens: u64,
}

/// So many units, and what is in them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Sum {
    pub(super) tally: Tally,
    pub(super) rows: u64,
}

impl Sum {
    pub(super) fn add(&mut self, tokens: u64, rows: u64) {
        self.tally.units += 1;
        self.tally.tokens += tokens;
        self.rows += rows;
    }

    /// A unit that is counted has so much more in it.
    fn grow(&mut self, tokens: u64, rows: u64) {
        self.tally.tokens += tokens;
        self.rows += rows;
    }

    fn remove(&mut self, tokens: u64, rows: u64) {
        self.tally.units -= 1;
        self.tally.tokens -= tokens;
        self.rows -= rows;
    }
}

/// Units that are settled and not remembered any more, with what is in them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct SettledSum {
    /// Units.
    pub units: u64,
    /// Tokens in them.
    pub tokens: u64,
    /// Rows in them.
    pub rows: u64,
}

impl SettledSum {
    /// What it has more than another.
    #[must_use]
    pub fn beyond(self, other: Self) -> Self {
        Self {
            units: self.units.saturating_sub(other.units),
            tokens: self.tokens.saturating_sub(other.tokens),
            rows: self.rows.saturating_sub(other.rows),
        }
    }

    fn add(&mut self, more: Self) {
        self.units += more.units;
        self.tokens += more.tokens;
        self.rows += more.rows;
    }
}

impl Sum {
    fn add_all(&mut self, sum: SettledSum) {
        self.tally.units += sum.units;
        self.tally.tokens += sum.tokens;
        self.rows += sum.rows;
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

/// What became of everything pushed: `pushed = waiting + leased + parked + acknowledged + dropped`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Counts {
    pub(super) pushed: Sum,
    /// In the line, and put off.
    pub(super) waiting: Sum,
    pub(super) leased: Sum,
    pub(super) parked: Sum,
    /// Ever, also of rollouts that are forgotten.
    pub(super) acknowledged: Sum,
    /// Ever, also of rollouts that are forgotten.
    pub(super) dropped: BTreeMap<DropReason, Sum>,
    /// Units no longer remembered; all of them acknowledged or dropped.
    pub(super) forgotten: Sum,
    /// Of these, the acknowledged.
    pub(super) forgotten_acknowledged: SettledSum,
    /// Of these, the dropped, by reason.
    pub(super) forgotten_dropped: BTreeMap<DropReason, SettledSum>,
    /// Times that a unit was given out.
    pub(super) deliveries: u64,
    /// Of these, how many were not a unit's first.
    pub(super) redeliveries: u64,
}

impl Counts {
    /// What became of the rows.
    pub(super) fn row_states(&self) -> RowStates {
        RowStates {
            made: self.pushed.rows,
            waiting: self.waiting.rows,
            leased: self.leased.rows,
            parked: self.parked.rows,
            acknowledged: self.acknowledged.rows,
            dropped: self.dropped.iter().map(|(reason, sum)| (*reason, sum.rows)).collect(),
        }
    }

    fn of(&mut self, place: Place) -> &mut Sum {
        match place {
            Place::Waiting | Place::Delayed { .. } => &mut self.waiting,
            Place::Frozen { is_out: false } => &mut self.waiting,
            Place::Leased { .. } | Place::Frozen { is_out: true } => &mut self.leased,
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
    /// The step that the unit stands in.
    pub(super) step: Option<u64>,
    pub(super) tokens: u64,
    pub(super) effects: Vec<QueueEffect<K>>,
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
    /// Those that wait, by what sampled them.
    pub(super) by_version: ByVersion,
    /// How many of each family wait, or are put off.
    pub(super) families: BTreeMap<u64, usize>,
    pub(super) counts: Counts,
    /// The last moment at which a unit changed that is not remembered any more.
    pub(super) forgotten_through: u64,
    /// Moments, from this one until just before that one, at which it is not known any more what was acknowledged.
    pub(super) blurred: Option<(u64, u64)>,
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
            by_version: ByVersion::default(),
            families: BTreeMap::new(),
            counts: Counts::default(),
            forgotten_through: 0,
            blurred: None,
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
        self.by_version.insert(number, &new.oldest_versions);
        *self.families.entry(new.family).or_default() += 1;
        self.counts.pushed.add(new.tokens, new.rows);
        self.counts.waiting.add(new.tokens, new.rows);
        let unit = Unit {
            id: new.id,
            source: source.clone(),
            more_sources: Vec::new(),
            tokens: new.tokens,
            rows: new.rows,
            pushed_at_ms: now_ms,
            deliveries: 0,
            place: Place::Waiting,
            step: None,
            history: History::default(),
            family: new.family,
            oldest_versions: new.oldest_versions,
            payload: Some(new.payload),
        };
        self.units.insert(number, unit);
        Some(number)
    }

    /// Puts the rows of another rollout of its group into a unit, wherever that stands. Gives its number, if it is known and does not
    /// have them.
    pub(super) fn grow(&mut self, source: &K, new: &NewUnit<P>) -> Option<UnitNumber> {
        let number = *self.numbers.get(&new.id)?;
        let unit = self.units.get_mut(&number).filter(|unit| !unit.is_of(source))?;
        debug_assert!(!matches!(unit.place, Place::Leased { .. }), "a group is whole before it is given out");
        unit.more_sources.push(source.clone());
        self.counts.pushed.grow(new.tokens, new.rows);
        self.counts.of(unit.place).grow(new.tokens, new.rows);
        let is_in_line = unit.place == Place::Waiting;
        if is_in_line {
            self.by_version.remove(number, &unit.oldest_versions);
        }
        unit.tokens += new.tokens;
        unit.rows += new.rows;
        unit.oldest_versions = staleness::oldest_of(&unit.oldest_versions, &new.oldest_versions);
        if is_in_line {
            self.by_version.insert(number, &unit.oldest_versions);
        }
        Some(number)
    }

    /// A rollout of a unit is not remembered any more; the unit stays with its other rollouts. False if it has none.
    pub(super) fn leave_to_others(&mut self, number: UnitNumber, source: &K) -> bool {
        let Some(unit) = self.units.get_mut(&number) else { return false };
        match unit.more_sources.iter().position(|other| other == source) {
            Some(place) => drop(unit.more_sources.swap_remove(place)),
            None => match unit.more_sources.pop() {
                Some(other) => unit.source = other,
                None => return false,
            },
        }
        true
    }

    /// The one way in which a unit changes its place. `None` if there is no such unit.
    pub(super) fn move_to(&mut self, number: UnitNumber, to: Place) -> Option<Moved<K>> {
        let unit = self.units.get_mut(&number)?;
        let from = std::mem::replace(&mut unit.place, to);
        let (tokens, rows, step) = (unit.tokens, unit.rows, unit.step);
        if !to.keeps_payload() {
            unit.payload = None;
        }
        let sources: Vec<K> = std::iter::once(&unit.source).chain(&unit.more_sources).cloned().collect();
        match (from.is_in_line(), to.is_in_line()) {
            (true, false) => leave(&mut self.families, unit.family),
            (false, true) => *self.families.entry(unit.family).or_default() += 1,
            (true, true) | (false, false) => {}
        }
        match (from, to) {
            (Place::Waiting, Place::Waiting) => {}
            (Place::Waiting, _) => self.by_version.remove(number, &unit.oldest_versions),
            (_, Place::Waiting) => self.by_version.insert(number, &unit.oldest_versions),
            _ => {}
        }
        match from {
            Place::Waiting => drop(self.waiting.remove(&number)),
            Place::Delayed { until_ms } => drop(self.delayed.remove(&(until_ms, number))),
            Place::Dropped(DropReason::Undeliverable) => drop(self.undeliverable.remove(&number)),
            Place::Leased { .. }
            | Place::Frozen { .. }
            | Place::Parked(_)
            | Place::Acknowledged
            | Place::Dropped(_) => {}
        }
        match to {
            Place::Waiting => drop(self.waiting.insert(number)),
            Place::Delayed { until_ms } => drop(self.delayed.insert((until_ms, number))),
            Place::Dropped(DropReason::Undeliverable) => drop(self.undeliverable.insert(number)),
            Place::Leased { .. }
            | Place::Frozen { .. }
            | Place::Parked(_)
            | Place::Acknowledged
            | Place::Dropped(_) => {}
        }
        self.counts.of(from).remove(tokens, rows);
        self.counts.of(to).add(tokens, rows);
        let effects = sources.into_iter().filter_map(|source| self.note_settling(source, from, to)).collect();
        Some(Moved { from, step, tokens, effects })
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

    /// From then until then it is not known any more what was acknowledged.
    pub(super) fn blur(&mut self, more: Option<(u64, u64)>) {
        let both = self.blurred.into_iter().chain(more);
        self.blurred = both.reduce(|one, other| (one.0.min(other.0), one.1.max(other.1)));
    }

    /// Removes a settled unit from memory; its counts stay.
    pub(super) fn forget(&mut self, number: UnitNumber) {
        let Some(unit) = self.units.remove(&number) else {
            return;
        };
        debug_assert!(unit.place.is_settled(), "only settled units are forgotten");
        self.numbers.remove(&unit.id);
        self.forgotten_through = self.forgotten_through.max(unit.history.last_change());
        self.undeliverable.remove(&number);
        self.counts.forgotten.add(unit.tokens, unit.rows);
        let sum = SettledSum { units: 1, tokens: unit.tokens, rows: unit.rows };
        match unit.place {
            Place::Acknowledged => self.counts.forgotten_acknowledged.add(sum),
            Place::Dropped(reason) => self.counts.forgotten_dropped.entry(reason).or_default().add(sum),
            Place::Waiting | Place::Delayed { .. } | Place::Leased { .. } | Place::Frozen { .. } | Place::Parked(_) => {
            }
        }
    }

    /// Counts units that were forgotten before this ledger was made.
    pub(super) fn restore_forgotten(
        &mut self,
        acknowledged: SettledSum,
        dropped: impl Iterator<Item = (DropReason, SettledSum)>,
    ) {
        let counts = &mut self.counts;
        counts.acknowledged.add_all(acknowledged);
        counts.forgotten_acknowledged.add(acknowledged);
        counts.pushed.add_all(acknowledged);
        counts.forgotten.add_all(acknowledged);
        for (reason, sum) in dropped {
            counts.dropped.entry(reason).or_default().add_all(sum);
            counts.forgotten_dropped.entry(reason).or_default().add(sum);
            counts.pushed.add_all(sum);
            counts.forgotten.add_all(sum);
        }
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

/// One unit of the family waits no more.
fn leave(families: &mut BTreeMap<u64, usize>, family: u64) {
    if let Some(count) = families.get_mut(&family) {
        *count -= 1;
        if *count == 0 {
            families.remove(&family);
        }
    }
}
