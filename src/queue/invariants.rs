//! The numbered invariants of a consumer group (see the module's contract), checked the slow way.

use std::collections::{BTreeMap, BTreeSet};

use super::consumers::UnitNumber;
use super::group::ConsumerGroup;
use super::ledger::{Counts, Sum, Tally};
use super::shards::lease_number;
use super::steps::{ShardPlace, Standing};
use super::unit::{ConsumerId, DropReason, Place, UnitId};

/// Beyond so many units, debug builds check the balance after each change and leave the rest to tests.
const MAX_UNITS_CHECKED_EACH_TIME: usize = 128;

/// What the units themselves say.
#[derive(Default)]
struct Recount {
    waiting: Sum,
    leased: Sum,
    parked: Sum,
    acknowledged: Sum,
    dropped: BTreeMap<DropReason, Sum>,
    line: BTreeSet<UnitNumber>,
    delayed: BTreeSet<(u64, UnitNumber)>,
    undeliverable: BTreeSet<UnitNumber>,
    families: BTreeMap<u64, usize>,
    steps: BTreeMap<u64, Standing>,
    leases: BTreeMap<ConsumerId, (BTreeSet<(u64, UnitNumber)>, u64)>,
}

impl Recount {
    fn add(&mut self, number: UnitNumber, place: Place, tokens: u64, rows: u64) {
        match place {
            Place::Waiting => {
                self.waiting.add(tokens, rows);
                self.line.insert(number);
            }
            Place::Delayed { until_ms } => {
                self.waiting.add(tokens, rows);
                self.delayed.insert((until_ms, number));
            }
            Place::Leased { consumer, since_ms } => {
                self.leased.add(tokens, rows);
                let (leases, in_flight_tokens) = self.leases.entry(consumer).or_default();
                leases.insert((since_ms, number));
                *in_flight_tokens += tokens;
            }
            Place::Frozen { is_out: false } => self.waiting.add(tokens, rows),
            Place::Frozen { is_out: true } => self.leased.add(tokens, rows),
            Place::Parked(_) => self.parked.add(tokens, rows),
            Place::Acknowledged => self.acknowledged.add(tokens, rows),
            Place::Dropped(reason) => {
                self.dropped.entry(reason).or_default().add(tokens, rows);
                if reason == DropReason::Undeliverable {
                    self.undeliverable.insert(number);
                }
            }
        }
    }
}

fn sum(sums: impl IntoIterator<Item = Sum>) -> Sum {
    sums.into_iter().fold(Sum::default(), |all, sum| Sum {
        tally: Tally { units: all.tally.units + sum.tally.units, tokens: all.tally.tokens + sum.tally.tokens },
        rows: all.rows + sum.rows,
    })
}

fn balance(counts: &Counts) -> Result<(), &'static str> {
    let parts = [counts.waiting, counts.leased, counts.parked, counts.acknowledged];
    let all = sum(parts.into_iter().chain(counts.dropped.values().copied()));
    if all == counts.pushed { Ok(()) } else { Err("1: pushed = waiting + leased + parked + acknowledged + dropped") }
}

fn require(holds: bool, invariant: &'static str) -> Result<(), &'static str> {
    if holds { Ok(()) } else { Err(invariant) }
}

impl<K: Ord + Clone, P: Clone> ConsumerGroup<K, P> {
    /// Checks every numbered invariant of the module's contract, looking at every unit.
    ///
    /// # Errors
    /// The number and words of the first that does not hold: a bug of ours.
    pub fn check_invariants(&self) -> Result<(), &'static str> {
        balance(&self.ledger.counts)?;
        let mut recount = Recount::default();
        for (&number, unit) in &self.ledger.units {
            recount.add(number, unit.place, unit.tokens, unit.rows);
            if unit.place.is_in_line() {
                *recount.families.entry(unit.family).or_default() += 1;
            }
            if let Some(step) = unit.step {
                let standing = recount.steps.entry(step).or_default();
                standing.known += 1;
                standing.enter(unit.place);
            }
            let is_frozen = matches!(unit.place, Place::Frozen { .. });
            require(!is_frozen || unit.step.is_some(), "12: what is frozen stands in a step")?;
            require(self.ledger.numbers.get(&unit.id) == Some(&number), "5: each unit is found under its id")?;
            require(
                unit.payload.is_some() == unit.place.keeps_payload(),
                "8: a payload is kept exactly as long as it may be wanted",
            )?;
        }
        require(self.ledger.numbers.len() == self.ledger.units.len(), "5: no id without its unit")?;
        self.check_counts(&recount)?;
        require(recount.line == self.ledger.waiting, "3: the line holds the waiting units")?;
        require(recount.families == self.ledger.families, "11: families are counted by their waiting units")?;
        require(recount.delayed == self.ledger.delayed, "3: the delayed units are in their order")?;
        let undeliverable = recount.undeliverable == self.ledger.undeliverable;
        require(undeliverable, "3: the undeliverable units are those that were dropped as such")?;
        self.check_steps(&mut recount)?;
        self.check_leases(&recount)?;
        self.check_versions()?;
        self.check_sources()?;
        require(self.consumers.orders_are_right(), "7: the orders hold exactly those with room, and with leases")?;
        let tail = !self.definition.ephemeral
            || (recount.leased.tally.units == 0
                && self.ledger.units.len() == self.ledger.waiting.len()
                && self.ledger.waiting.len() <= self.bounds.max_ephemeral_waiting_units);
        require(tail, "9: an ephemeral group has no leases, remembers nothing settled, and keeps its bound")
    }

    fn check_counts(&self, recount: &Recount) -> Result<(), &'static str> {
        let counts = &self.ledger.counts;
        let live =
            recount.waiting == counts.waiting && recount.leased == counts.leased && recount.parked == counts.parked;
        require(live, "2: each count is what the units say")?;
        let remembered = recount.dropped.values().copied().chain([recount.acknowledged, counts.forgotten]);
        let settled = counts.dropped.values().copied().chain([counts.acknowledged]);
        require(sum(remembered) == sum(settled), "2: settled units are remembered or were forgotten")
    }

    fn check_versions(&self) -> Result<(), &'static str> {
        let mut waiting = BTreeSet::new();
        for number in &self.ledger.waiting {
            let versions = self.ledger.units.get(number).map_or(&[][..], |unit| &unit.oldest_versions);
            waiting.extend(versions.iter().map(|(policy, version)| (&**policy, *version, *number)));
        }
        let by_version: BTreeSet<_> = self.ledger.by_version.iter().collect();
        require(waiting == by_version, "10: waiting units are found by the versions that sampled them")
    }

    fn check_steps(&self, recount: &mut Recount) -> Result<(), &'static str> {
        let (mut delayed, mut open) = (BTreeSet::new(), BTreeSet::new());
        for (&index, step) in &self.steps.by_index {
            let standing = recount.steps.remove(&index).unwrap_or_default();
            require(standing == step.standing, "12: a step knows where its units stand")?;
            require(self.steps.by_id.get(&step.id) == Some(&index), "12: each step is found under its id")?;
            let mut leased = 0;
            for (shard, at) in step.shards.iter().enumerate() {
                let shard = u32::try_from(shard).unwrap_or(u32::MAX);
                match at.place {
                    ShardPlace::Leased { consumer, since_ms } => {
                        leased += 1;
                        let (leases, in_flight_tokens) = recount.leases.entry(consumer).or_default();
                        leases.insert((since_ms, lease_number((index, shard))));
                        *in_flight_tokens += step.tokens(shard);
                    }
                    ShardPlace::Delayed { until_ms } => drop(delayed.insert((until_ms, index, shard))),
                    ShardPlace::Waiting | ShardPlace::Acknowledging | ShardPlace::Acknowledged => {}
                }
            }
            require(leased == step.leased && (leased == 0 || step.is_open()), "12: what is out is of an open step")?;
            open.extend(step.is_open().then_some(index));
            let is_out = |id: &UnitId| match self.ledger.place_of(id) {
                Some((_, Place::Frozen { is_out })) => is_out == (leased > 0),
                Some(_) | None => true,
            };
            require(step.members.iter().all(is_out), "12: units are out exactly with a shard of their step")?;
        }
        require(recount.steps.is_empty(), "12: no unit stands in a step that is not there")?;
        require(open == self.steps.open && delayed == self.steps.delayed, "12: the orders of steps are theirs")
    }

    fn check_leases(&self, recount: &Recount) -> Result<(), &'static str> {
        let mut leases = recount.leases.clone();
        for (id, consumer) in self.consumers.iter() {
            let expected = leases.remove(&id).unwrap_or_default();
            require(expected == (consumer.leases.clone(), consumer.in_flight_tokens), "4: leases are the consumer's")?;
        }
        require(leases.is_empty(), "4: no lease without its consumer")
    }

    fn check_sources(&self) -> Result<(), &'static str> {
        let units = &self.ledger.units;
        for (key, source) in &self.ledger.sources {
            let own: Vec<_> = source.units.iter().filter_map(|number| units.get(number)).collect();
            let whole = own.len() == source.units.len() && own.iter().all(|unit| unit.is_of(key));
            require(whole, "6: a rollout remembers its units")?;
            let unsettled = own.iter().filter(|unit| !unit.place.is_settled()).count();
            require(unsettled == source.unsettled, "6: a rollout is settled exactly when all its units are")?;
        }
        let in_sources: usize = self.ledger.sources.values().map(|source| source.units.len()).sum();
        let with_sources: usize = units.values().map(|unit| 1 + unit.more_sources.len()).sum();
        require(self.definition.ephemeral || in_sources == with_sources, "6: every unit belongs to its rollouts")
    }

    /// The check at the end of each change, in debug builds.
    pub(super) fn verify(&self) {
        if cfg!(debug_assertions) {
            let small = self.ledger.units.len() <= MAX_UNITS_CHECKED_EACH_TIME;
            let result = if small { self.check_invariants() } else { balance(&self.ledger.counts) };
            debug_assert_eq!(result, Ok(()));
        }
    }
}
