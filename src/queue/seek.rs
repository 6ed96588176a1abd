//! Going back to what a consumer group had acknowledged at an earlier moment.
//!
//! A *moment* is a number that only grows: the position of the record that is applied. Each remembered unit keeps the spans of
//! moments in which it was acknowledged, so that every moment since the last forgotten acknowledgement or seek can be sought, also
//! one that lies between two earlier seeks.

use super::consumers::UnitNumber;
use super::effect::QueueEffect;
use super::group::ConsumerGroup;
use super::shards::of_lease;
use super::steps::ShardPlace;
use super::unit::{NewUnit, Place, UnitId};

/// The spans of moments in which a unit was acknowledged, in order: from each one's beginning until just before its end.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct History(Vec<(u64, u64)>);

/// Spans that are kept of each unit.
const SPANS_MAX: usize = 16;
/// The end of a span that lasts.
const LASTS: u64 = u64::MAX;

impl History {
    /// The spans that begin and end at these moments in turn; the last one may last.
    #[must_use]
    pub fn of_moments(moments: &[u64]) -> Self {
        Self(moments.chunks(2).map(|span| (span[0], span.get(1).copied().unwrap_or(LASTS))).collect())
    }

    /// Where its spans begin and end, in turn.
    #[must_use]
    pub fn moments(&self) -> Vec<u64> {
        self.0.iter().flat_map(|&(begins, ends)| [begins, ends]).filter(|moment| *moment != LASTS).collect()
    }

    /// Whether the unit is acknowledged now.
    fn lasts(&self) -> bool {
        self.0.last().is_some_and(|&(_, ends)| ends == LASTS)
    }

    /// Whether the unit was acknowledged then.
    fn covers(&self, moment: u64) -> bool {
        self.0.iter().any(|&(begins, ends)| begins <= moment && moment < ends)
    }

    /// It is acknowledged from then on. Of many spans the second is given up, and returned: the first is that of the checkpoint to
    /// which a trainer goes back again and again.
    #[must_use]
    pub(super) fn begin(&mut self, at: u64) -> Option<(u64, u64)> {
        self.0.push((at, LASTS));
        (self.0.len() > SPANS_MAX).then(|| self.0.remove(1))
    }

    fn end(&mut self, at: u64) {
        if let Some((_, ends)) = self.0.last_mut() {
            *ends = at;
        }
    }

    /// The last moment at which something changed; 0 if the unit was never acknowledged.
    pub(super) fn last_change(&self) -> u64 {
        self.0.last().map_or(0, |&(begins, ends)| if ends == LASTS { begins } else { ends })
    }
}

/// Why a moment cannot be sought.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SeekRefused {
    /// Units that were acknowledged later are not remembered any more.
    NotRetained,
    /// The group has not come so far.
    NotReached,
}

impl<K: Ord + Clone, P: Clone> ConsumerGroup<K, P> {
    /// When it was made.
    #[must_use]
    pub fn made_at(&self) -> u64 {
        self.made_at
    }

    /// The moment that stands for what is acknowledged now: that of the last acknowledgement or seek.
    #[must_use]
    pub fn changed_at(&self) -> u64 {
        self.changed_at
    }

    /// How often it was sought.
    #[must_use]
    pub fn seek_count(&self) -> u64 {
        self.seek_count
    }

    /// The last moment at which a unit changed that is not remembered any more; what lies before cannot be sought.
    #[must_use]
    pub fn forgotten_through(&self) -> u64 {
        self.ledger.forgotten_through
    }

    /// How many units it has acknowledged, ever.
    #[must_use]
    pub fn acknowledged_units(&self) -> u64 {
        self.ledger.counts.acknowledged.tally.units
    }

    /// The moments, from this one until just before that one, of which it is not known any more what was acknowledged, since a unit
    /// was acknowledged and undone too often.
    #[must_use]
    pub fn blurred(&self) -> Option<(u64, u64)> {
        self.ledger.blurred
    }

    /// The history of a unit.
    #[must_use]
    pub fn history(&self, id: &UnitId) -> Option<&History> {
        self.ledger.find(id).map(|(_, unit)| &unit.history)
    }

    /// Gives a unit the history that it had before this group was made again.
    pub fn restore_history(&mut self, id: &UnitId, history: History) {
        self.changed_at = self.changed_at.max(history.last_change());
        if let Some(number) = self.ledger.find(id).map(|(number, _)| number)
            && let Some(unit) = self.ledger.units.get_mut(&number)
        {
            unit.history = history;
        }
    }

    /// A unit was acknowledged before this group was made again, as its history says, if it has one.
    pub fn restore_ack(&mut self, id: &UnitId) -> Vec<QueueEffect<K>> {
        let known = self.ledger.find(id).map(|(_, unit)| unit.history.clone()).filter(|history| history.lasts());
        let number = self.ledger.find(id).map(|(number, _)| number);
        let effects = number.map(|number| self.ack_unit(number, 0)).unwrap_or_default();
        if let Some(history) = known {
            self.restore_history(id, history);
        }
        effects
    }

    /// Takes up what is known of the time before it was made again.
    pub fn restore_seeks(
        &mut self,
        seek_count: u64,
        forgotten_through: u64,
        changed_at: u64,
        blurred: Option<(u64, u64)>,
    ) {
        self.seek_count = self.seek_count.max(seek_count);
        self.ledger.forgotten_through = self.ledger.forgotten_through.max(forgotten_through);
        self.changed_at = self.changed_at.max(forgotten_through).max(changed_at);
        self.ledger.blur(blurred);
    }

    /// An acknowledgement is read again. Where the log begins in the middle, what it is about may have been forgotten by the end of the
    /// log, or come later, as a copy.
    pub fn replay_ack(&mut self, id: &UnitId, at: u64) -> Vec<QueueEffect<K>> {
        let is_known = match self.shard_of(id) {
            Some((index, _)) => self.steps.by_index.get(&index).is_some_and(|step| step.standing.known > 0),
            None => self.ledger.find(id).is_some(),
        };
        if !is_known {
            self.unknown_acks.insert(id.clone(), at);
        }
        self.apply_ack(id, at)
    }

    /// A unit was pushed that may have been acknowledged, or frozen in a step, before.
    pub(super) fn is_known_now(&mut self, number: UnitNumber) {
        if let Some(unit) = self.ledger.units.get(&number) {
            self.unknown_acks.remove(&unit.id);
        }
        self.joins_its_step(number);
    }

    /// All was read: what has not come by now was forgotten, and never will.
    pub fn all_is_read(&mut self) {
        let forgotten = std::mem::take(&mut self.unknown_acks).into_values().max();
        let in_part = self.steps.in_part().flat_map(|step| &step.members).filter_map(|id| self.ledger.find(id));
        let forgotten = forgotten.into_iter().chain(in_part.map(|(_, unit)| unit.history.last_change())).max();
        self.ledger.forgotten_through = self.ledger.forgotten_through.max(forgotten.unwrap_or(0));
        self.steps_are_read();
    }

    /// Whether what was acknowledged at a moment can be restored; changes nothing.
    ///
    /// # Errors
    /// Why not.
    pub fn judge_seek(&self, to: u64) -> Result<(), SeekRefused> {
        if to > self.changed_at {
            return Err(SeekRefused::NotReached);
        }
        let is_blurred = self.ledger.blurred.is_some_and(|(from, until)| from <= to && to < until);
        if to < self.ledger.forgotten_through || is_blurred {
            return Err(SeekRefused::NotRetained);
        }
        Ok(())
    }

    /// Ends all leases without a decision, and lets go of all consumers, before a seek.
    pub fn release_all(&mut self, now_ms: u64) {
        let consumers: Vec<_> = self.consumer_ids().collect();
        for consumer in consumers {
            let leases = self.consumers.get(consumer).map(|consumer| consumer.leases.clone()).unwrap_or_default();
            for (_, number) in leases {
                if self.takes_steps() {
                    let at = of_lease(number);
                    let deliveries = self.steps.shard(at).map_or(0, |shard| shard.deliveries);
                    self.set_shard_deliveries(at, deliveries.saturating_sub(1));
                    self.move_shard(at, ShardPlace::Waiting);
                    continue;
                }
                if let Some(unit) = self.ledger.units.get_mut(&number) {
                    // It was not for its consumer to end it.
                    unit.deliveries = unit.deliveries.saturating_sub(1);
                }
                self.relocate(number, Place::Waiting);
            }
            self.consumers.remove(consumer);
        }
        // Nobody holds anything any more.
        let held_back = self.ledger.delayed.iter().filter(|(until_ms, _)| *until_ms == self.grace_until_ms);
        for number in held_back.map(|(_, number)| *number).collect::<Vec<_>>() {
            self.relocate(number, Place::Waiting);
        }
        self.idle_since_ms = self.idle_since_ms.or(Some(now_ms));
        self.verify();
    }

    /// A seek is durable: what was acknowledged at that moment is acknowledged, and nothing else; drops stand. `units_of` makes a
    /// rollout's units once more, for those that freed their rows.
    pub fn apply_seek(
        &mut self,
        to: u64,
        at: u64,
        units_of: impl Fn(&K) -> Vec<NewUnit<P>>,
        now_ms: u64,
    ) -> (u64, Vec<QueueEffect<K>>) {
        self.seek_count += 1;
        self.changed_at = at;
        self.unknown_acks.values_mut().filter(|moment| **moment > to).for_each(|moment| *moment = at);
        let (mut restored, mut effects) = (0, Vec::new());
        let sources: Vec<K> = self.ledger.sources.keys().cloned().collect();
        for source in sources {
            let numbers = self.ledger.sources.get(&source).map(|source| source.units.clone()).unwrap_or_default();
            let mut again = None;
            for number in numbers {
                let Some(unit) = self.ledger.units.get_mut(&number) else { continue };
                match (unit.place == Place::Acknowledged, unit.history.covers(to)) {
                    (true, false) => {
                        let again = again.get_or_insert_with(|| units_of(&source));
                        let payload = again.iter().find(|new| new.id == unit.id).map(|new| new.payload.clone());
                        debug_assert!(payload.is_some(), "whoever retains a rollout can make its units");
                        if payload.is_none() {
                            continue;
                        }
                        unit.history.end(at);
                        (unit.payload, unit.deliveries, unit.pushed_at_ms) = (payload, 0, now_ms);
                        restored += 1;
                        let is_in_step = unit.step.is_some();
                        let to = if is_in_step { Place::Frozen { is_out: false } } else { Place::Waiting };
                        effects.extend(self.relocate(number, to));
                    }
                    (false, true) => {
                        let given_up = unit.history.begin(at);
                        self.ledger.blur(given_up);
                        effects.extend(self.relocate(number, Place::Acknowledged));
                    }
                    (true, true) | (false, false) => {}
                }
            }
        }
        self.steps_are_sought();
        self.verify();
        (restored, effects)
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{bounds, definition};
    use super::*;

    /// A log that begins in the middle names what had been forgotten by its end: going back behind that would not be exact.
    #[test]
    fn what_was_acknowledged_and_is_gone_cannot_be_undone_after_a_replay() {
        let unit = |id: &str| NewUnit {
            id: UnitId::from(id),
            tokens: 1,
            rows: 1,
            family: 0,
            oldest_versions: Box::default(),
            payload: (),
        };
        let again = |comes: bool| {
            let mut group = ConsumerGroup::new(definition(), bounds(), 1, 0);
            group.restore_seeks(0, 5, 90, None);
            group.replay_ack(&UnitId::from("a"), 110);
            if comes {
                group.push(1_u64, vec![unit("a")], 0);
                group.restore_history(&UnitId::from("a"), History::of_moments(&[110]));
                group.restore_ack(&UnitId::from("a"));
            }
            group.all_is_read();
            group
        };
        let (gone, kept) = (again(false), again(true));
        assert_eq!((gone.forgotten_through(), gone.judge_seek(105)), (110, Err(SeekRefused::NotRetained)));
        assert_eq!((gone.judge_seek(110), gone.changed_at()), (Ok(()), 110));
        assert_eq!((kept.forgotten_through(), kept.judge_seek(105)), (5, Ok(())));
    }

    #[test]
    fn a_history_is_its_moments() {
        for moments in [&[][..], &[3], &[3, 7], &[0, 7, 9]] {
            assert_eq!(History::of_moments(moments).moments(), moments);
        }
        let history = History::of_moments(&[3, 7, 9]);
        let covered: Vec<u64> = (0..12).filter(|moment| history.covers(*moment)).collect();
        assert_eq!(covered, [3, 4, 5, 6, 9, 10, 11]);
        assert_eq!((history.last_change(), History::of_moments(&[3, 7]).last_change()), (9, 7));
    }
}
