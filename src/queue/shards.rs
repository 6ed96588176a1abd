//! Shards of steps at consumers: who takes which, leases, and what comes back. All of it is memory only.
//!
//! A consumer takes one shard of every step, in their order. Of several that take the same shard, one does, the one that came first
//! and is heard of; the others stand by for it. So ranks are given the same steps in the same order, and each may be ahead of the
//! others as far as its credit goes, but not by more steps than may be open at once.

use std::collections::{BTreeMap, BTreeSet};

use crate::limits;

use super::consumers::UnitNumber;
use super::effect::{Decision, LostReason, Nacked};
use super::group::ConsumerGroup;
use super::ledger::Tally;
use super::stats::{WaitReason, WaitingFor};
use super::steps::{Shard, ShardPlace, Step, shard_id};
use super::unit::{ConsumerId, DropReason, ParkedFor, Place, UnitId};

/// Shards that a step may have, as bits: a lease of a shard is kept under its step's index and its own.
const SHARD_BITS: u32 = 16;
const _: () = assert!(limits::STEP_SHARDS_MAX as u64 <= 1 << SHARD_BITS);

/// A shard that goes out.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ShardDelivery {
    /// To whom.
    pub consumer: ConsumerId,
    /// Its id.
    pub unit: UnitId,
    /// Of which step.
    pub index: u64,
    /// Which shard.
    pub shard: u32,
    /// Its tokens.
    pub tokens: u64,
    /// 1 the first time, then counting.
    pub delivery_number: u32,
}

/// Why a shard cannot be fetched once more.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RefetchRefused {
    /// There is no such step yet.
    NotFrozen {
        /// How many there are.
        steps: u64,
    },
    /// It is acknowledged or dropped, and not all of it is kept.
    NotRetained,
    /// It was dropped.
    Dropped(DropReason),
}

/// An open step, for people.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OpenStep {
    /// Which.
    pub index: u64,
    /// Its units.
    pub units: u64,
    /// Shards that nobody has acknowledged.
    pub missing_shards: Vec<u32>,
    /// How many of these are with consumers.
    pub leased_shards: u64,
}

/// Under what the lease of a shard is kept.
pub(super) fn lease_number((index, shard): (u64, u32)) -> UnitNumber {
    index << SHARD_BITS | u64::from(shard)
}

/// Which shard's lease this is.
pub(super) fn of_lease(number: UnitNumber) -> (u64, u32) {
    let shard = number & ((1 << SHARD_BITS) - 1);
    (number >> SHARD_BITS, u32::try_from(shard).unwrap_or(u32::MAX))
}

impl<K: Ord + Clone, P: Clone> ConsumerGroup<K, P> {
    /// Who takes each shard.
    fn takers(&self) -> BTreeMap<u32, ConsumerId> {
        let mut takers: BTreeMap<u32, (bool, ConsumerId)> = BTreeMap::new();
        for (id, consumer) in self.consumers.iter() {
            let Some(shard) = consumer.shard else { continue };
            let candidate = (consumer.silent, id);
            let taker = takers.entry(shard).or_insert(candidate);
            *taker = candidate.min(*taker);
        }
        takers.into_iter().map(|(shard, (_, id))| (shard, id)).collect()
    }

    /// The first step of which this shard is not out and not acknowledged, and where it stands there.
    fn next_step_of(&self, shard: u32) -> Option<(u64, ShardPlace)> {
        let of_step = |index: &u64| Some((*index, self.steps.shard((*index, shard))?.place));
        let is_free = |place: ShardPlace| matches!(place, ShardPlace::Waiting | ShardPlace::Delayed { .. });
        self.steps.open.iter().filter_map(of_step).find(|(_, place)| is_free(*place))
    }

    /// Whether a consumer has room for a shard of a step that is not frozen yet.
    pub(super) fn wants_step(&self) -> bool {
        let may = self.takes_steps()
            && self.steps.freezing.is_none()
            && self.steps.open.len() < limits::STEPS_OPEN_MAX
            && self.consumers.len() > 0;
        let wants = |(shard, id): (u32, ConsumerId)| {
            let has_room =
                self.consumers.get(id).is_some_and(|consumer| consumer.has_room(self.bounds.max_units_in_flight));
            has_room && self.next_step_of(shard).is_none()
        };
        may && self.takers().into_iter().any(wants)
    }

    /// A step that must be cut before a shard of it can go out.
    #[must_use]
    pub fn step_to_cut(&self) -> Option<u64> {
        if self.steps.open.is_empty() {
            return None;
        }
        let uncut = |index: &u64| self.steps.by_index.get(index).is_some_and(|step| step.cut.is_none());
        let next = |shard| self.next_step_of(shard).map(|(index, _)| index);
        self.takers().into_keys().filter_map(next).find(uncut)
    }

    /// The open step of which this is a shard, if it must be cut before that can be held.
    #[must_use]
    pub fn step_to_cut_for(&self, id: &UnitId) -> Option<u64> {
        let (index, _) = self.shard_of(id)?;
        self.steps.by_index.get(&index).filter(|step| step.is_open() && step.cut.is_none()).map(|_| index)
    }

    /// Gives out shards, at most so many; if as many come back, there may be more. Each goes to who takes that shard, if it has room
    /// for it; nothing overtakes an earlier step.
    pub fn dispatch_shards(&mut self, now_ms: u64, most: usize) -> Vec<ShardDelivery> {
        self.end_shard_delays(now_ms);
        let mut deliveries = Vec::new();
        if self.steps.open.is_empty() {
            return deliveries;
        }
        for (shard, consumer) in self.takers() {
            while deliveries.len() < most
                && let Some((index, ShardPlace::Waiting)) = self.next_step_of(shard)
            {
                let Some(step) = self.steps.by_index.get(&index).filter(|step| step.cut.is_some()) else { break };
                let (tokens, max_units) = (step.tokens(shard), self.bounds.max_units_in_flight);
                if !self.consumers.get(consumer).is_some_and(|consumer| consumer.takes(tokens, max_units)) {
                    break;
                }
                deliveries.extend(self.give_shard((index, shard), consumer, now_ms));
            }
        }
        self.verify();
        deliveries
    }

    fn give_shard(&mut self, at: (u64, u32), consumer: ConsumerId, now_ms: u64) -> Option<ShardDelivery> {
        let deliveries = self.steps.shard(at)?.deliveries.saturating_add(1);
        let (index, shard) = at;
        let (unit, tokens) =
            self.steps.by_index.get(&index).map(|step| (shard_id(&step.id, shard), step.tokens(shard)))?;
        self.set_shard_deliveries(at, deliveries);
        self.ledger.counts.deliveries += 1;
        if deliveries > 1 {
            self.ledger.counts.redeliveries += 1;
        }
        self.consumers.count_delivery(consumer, tokens);
        self.move_shard(at, ShardPlace::Leased { consumer, since_ms: now_ms });
        Some(ShardDelivery { consumer, unit, index, shard, tokens, delivery_number: deliveries })
    }

    /// Whether a shard of this step can be fetched once more; changes nothing.
    ///
    /// # Errors
    /// Why not.
    pub fn judge_refetch(&self, index: u64) -> Result<(), RefetchRefused> {
        let steps = self.steps.by_index.get(&index);
        let Some(step) = steps else {
            let (steps, is_on_its_way) = (self.next_step_index(), self.steps.freezing == Some(index));
            let not_frozen = index >= steps || is_on_its_way;
            return Err(if not_frozen { RefetchRefused::NotFrozen { steps } } else { RefetchRefused::NotRetained });
        };
        if step.is_open() || step.is_acknowledged() {
            return Ok(());
        }
        let places = step.members.iter().filter_map(|id| self.ledger.place_of(id));
        let dropped = places.map(|(_, place)| place).find_map(|place| match place {
            Place::Dropped(reason) | Place::Parked(ParkedFor::Drop(reason)) => Some(reason),
            Place::Waiting
            | Place::Frozen { .. }
            | Place::Delayed { .. }
            | Place::Leased { .. }
            | Place::Parked(_)
            | Place::Acknowledged => None,
        });
        Err(dropped.map_or(RefetchRefused::NotRetained, RefetchRefused::Dropped))
    }

    /// A shard goes to a consumer once more, because it asks, however much is out at it. If it is nobody's, that is a delivery like
    /// any other; else nothing changes. The step must be cut.
    pub fn refetch(&mut self, at: (u64, u32), consumer: ConsumerId, now_ms: u64) -> Option<ShardDelivery> {
        let (index, shard) = at;
        let Shard { place, deliveries } = self.steps.shard(at)?;
        let step = self.steps.by_index.get(&index)?;
        let delivery = match place {
            ShardPlace::Waiting | ShardPlace::Delayed { .. } if step.is_open() => self.give_shard(at, consumer, now_ms),
            ShardPlace::Waiting
            | ShardPlace::Delayed { .. }
            | ShardPlace::Leased { .. }
            | ShardPlace::Acknowledging
            | ShardPlace::Acknowledged => Some(ShardDelivery {
                consumer,
                unit: shard_id(&step.id, shard),
                index,
                shard,
                tokens: step.tokens(shard),
                delivery_number: deliveries.max(1),
            }),
        };
        self.verify();
        delivery
    }

    /// A consumer holds this shard still; `false` if the same request named it before.
    pub(super) fn hold_shard(
        &mut self,
        consumer: ConsumerId,
        name: &str,
        id: &UnitId,
        now_ms: u64,
    ) -> Result<bool, LostReason> {
        let at = self.shard_of(id).ok_or(LostReason::Unknown)?;
        let Some(step) = self.steps.by_index.get(&at.0).filter(|step| step.is_open() && step.cut.is_some()) else {
            let refused = self.judge_refetch(at.0);
            return Err(match refused {
                Ok(()) => LostReason::Acknowledged,
                Err(RefetchRefused::Dropped(reason)) => LostReason::Dropped(reason),
                Err(RefetchRefused::NotFrozen { .. } | RefetchRefused::NotRetained) => LostReason::Unknown,
            });
        };
        debug_assert!(step.shards.len() > at.1 as usize, "it was found there");
        match self.steps.shard(at).map(|shard| shard.place) {
            Some(ShardPlace::Waiting | ShardPlace::Delayed { .. }) => {}
            Some(ShardPlace::Leased { consumer: holder, .. }) if holder == consumer => return Ok(false),
            Some(ShardPlace::Leased { consumer: holder, .. }) => {
                let same = !name.is_empty() && self.consumers.get(holder).is_some_and(|holder| holder.name == name);
                if !same {
                    return Err(LostReason::LeasedToOther { consumer: holder });
                }
            }
            Some(ShardPlace::Acknowledging | ShardPlace::Acknowledged) => return Err(LostReason::Acknowledged),
            None => return Err(LostReason::Unknown),
        }
        self.move_shard(at, ShardPlace::Leased { consumer, since_ms: now_ms });
        Ok(true)
    }

    /// The one way in which a shard changes its place: leases, delays, and whether the step's units are out, go with it.
    pub(super) fn move_shard(&mut self, at: (u64, u32), to: ShardPlace) {
        let (index, shard) = at;
        let Some(step) = self.steps.by_index.get_mut(&index) else { return };
        let (tokens, was_out) = (step.tokens(shard), step.leased > 0);
        let Some(place) = step.shards.get_mut(shard as usize).map(|shard| &mut shard.place) else { return };
        let from = std::mem::replace(place, to);
        match from {
            ShardPlace::Leased { consumer, since_ms } => {
                step.leased -= 1;
                self.consumers.end_lease(consumer, since_ms, lease_number(at), tokens);
            }
            ShardPlace::Delayed { until_ms } => drop(self.steps.delayed.remove(&(until_ms, index, shard))),
            ShardPlace::Waiting | ShardPlace::Acknowledging | ShardPlace::Acknowledged => {}
        }
        match to {
            ShardPlace::Leased { consumer, since_ms } => {
                step.leased += 1;
                self.consumers.begin_lease(consumer, since_ms, lease_number(at), tokens);
            }
            ShardPlace::Delayed { until_ms } => drop(self.steps.delayed.insert((until_ms, index, shard))),
            ShardPlace::Waiting | ShardPlace::Acknowledging | ShardPlace::Acknowledged => {}
        }
        let is_out = step.leased > 0;
        if was_out != is_out && step.is_open() {
            for number in self.member_numbers(index) {
                self.relocate(number, Place::Frozen { is_out });
            }
        }
    }

    pub(super) fn set_shard_deliveries(&mut self, (index, shard): (u64, u32), deliveries: u32) {
        let step = self.steps.by_index.get_mut(&index);
        if let Some(shard) = step.and_then(|step| step.shards.get_mut(shard as usize)) {
            shard.deliveries = deliveries;
        }
    }

    /// Ends the lease of a shard without an acknowledgement. After its last delivery the whole step is parked, until the decision to
    /// drop it is durable.
    pub(super) fn end_shard_lease(&mut self, at: (u64, u32), to: ShardPlace) -> Option<Decision> {
        let deliveries = self.steps.shard(at)?.deliveries;
        self.move_shard(at, to);
        let is_over = deliveries >= self.definition.max_deliveries.max(1);
        if is_over { self.park_step(at.0) } else { None }
    }

    /// Nobody can be given an open step any more; it is to be dropped as undeliverable.
    pub(super) fn park_step(&mut self, index: u64) -> Option<Decision> {
        let unit = self.steps.by_index.get(&index).filter(|step| step.is_open())?.id.clone();
        self.end_step_leases(index);
        for number in self.member_numbers(index) {
            self.relocate(number, Place::Parked(ParkedFor::Drop(DropReason::Undeliverable)));
        }
        Some(Decision::DropUndeliverable { unit })
    }

    /// Ends all leases of a step without a decision.
    pub(super) fn end_step_leases(&mut self, index: u64) {
        let shards = self.steps.by_index.get(&index).map_or(0, |step| step.shards.len());
        for shard in 0..u32::try_from(shards).unwrap_or(u32::MAX) {
            if let Some(ShardPlace::Leased { .. } | ShardPlace::Delayed { .. }) =
                self.steps.shard((index, shard)).map(|shard| shard.place)
            {
                self.move_shard((index, shard), ShardPlace::Waiting);
            }
        }
    }

    /// A consumer gives shards back.
    pub(super) fn nack_shards(&mut self, consumer: ConsumerId, ids: &[UnitId], to: ShardPlace) -> Nacked {
        let mut nacked = Nacked::default();
        for id in ids {
            let at = self.shard_of(id);
            let place = at.and_then(|at| self.steps.shard(at));
            match at.zip(place) {
                Some((at, Shard { place: ShardPlace::Leased { consumer: holder, .. }, deliveries }))
                    if holder == consumer =>
                {
                    self.set_shard_deliveries(at, deliveries.max(1));
                    nacked.decisions.extend(self.end_shard_lease(at, to));
                    nacked.returned.push(id.clone());
                }
                Some(_) | None => nacked.ignored.push(id.clone()),
            }
        }
        self.verify();
        nacked
    }

    /// Puts shards back whose delay is over.
    pub(super) fn end_shard_delays(&mut self, now_ms: u64) {
        while let Some(&(until_ms, index, shard)) = self.steps.delayed.first() {
            if until_ms > now_ms {
                break;
            }
            self.move_shard((index, shard), ShardPlace::Waiting);
        }
    }

    /// The id under which a lease's unit is known.
    pub(super) fn shard_id_of_lease(&self, number: UnitNumber) -> Option<UnitId> {
        let (index, shard) = of_lease(number);
        self.steps.by_index.get(&index).map(|step| shard_id(&step.id, shard))
    }

    /// Why a consumer is given no shard.
    pub(super) fn waits_for_shard(&self, id: ConsumerId) -> Option<WaitingFor> {
        let consumer = self.consumers.get(id)?;
        let in_flight = consumer.in_flight();
        let shard = consumer.shard?;
        let max_units_in_flight = self.bounds.max_units_in_flight;
        let stands_by = self.takers().get(&shard).is_some_and(|taker| *taker != id);
        let reason = match self.next_step_of(shard) {
            _ if stands_by => WaitReason::StandsBy,
            Some((_, ShardPlace::Delayed { until_ms })) => WaitReason::Delayed { until_ms },
            _ if consumer.credit_tokens == 0 => WaitReason::NoCredit,
            _ if consumer.leases.len() >= max_units_in_flight => {
                WaitReason::TooManyUnitsInFlight { max_units_in_flight }
            }
            Some((index, _)) => {
                let head_tokens = self.steps.by_index.get(&index).map_or(0, |step| step.tokens(shard));
                let left_tokens = consumer.credit_tokens.saturating_sub(consumer.in_flight_tokens);
                match consumer.takes(head_tokens, max_units_in_flight) {
                    true => WaitReason::NotWaiting,
                    false => WaitReason::CreditShort { head_tokens, left_tokens },
                }
            }
            None if !consumer.has_room(max_units_in_flight) => {
                WaitReason::CreditShort { head_tokens: 0, left_tokens: 0 }
            }
            None if self.steps.freezing.is_some() => WaitReason::Freezing,
            None if self.steps.open.len() >= limits::STEPS_OPEN_MAX => WaitReason::StepsOpen,
            None => WaitReason::StepNotFull,
        };
        let leased_shards: usize = self.open_steps_now().map(|step| step.leased).sum();
        let others = (leased_shards as u64).saturating_sub(in_flight.units);
        Some(WaitingFor {
            reason,
            waiting: self.ledger.counts.waiting.tally,
            in_flight,
            leased: self.ledger.counts.leased.tally,
            leased_to_others: Tally { units: others, tokens: 0 },
        })
    }

    /// The families of the units in open steps of which nothing is out.
    pub(super) fn families_in_steps(&self) -> BTreeSet<u64> {
        let steps = self.open_steps_now().filter(|step| step.leased == 0);
        let units = steps.flat_map(|step| &step.members).filter_map(|id| self.ledger.find(id));
        units.map(|(_, unit)| unit.family).collect()
    }

    /// The oldest unit of each open step.
    pub(super) fn in_open_steps(&self) -> Vec<UnitNumber> {
        let first = |step: &Step| step.members.first().and_then(|id| self.ledger.numbers.get(id).copied());
        self.open_steps_now().filter_map(first).collect()
    }

    fn open_steps_now(&self) -> impl Iterator<Item = &Step> {
        self.steps.open.iter().filter_map(|index| self.steps.by_index.get(index))
    }

    /// The open steps, in order, each with what it waits for.
    #[must_use]
    pub fn open_steps(&self) -> Vec<OpenStep> {
        let of_step = |index: &u64| {
            let step = self.steps.by_index.get(index)?;
            let missing = step.shards.iter().enumerate().filter(|(_, shard)| !shard.place.is_acknowledged());
            Some(OpenStep {
                index: *index,
                units: step.members.len() as u64,
                missing_shards: missing.filter_map(|(shard, _)| u32::try_from(shard).ok()).collect(),
                leased_shards: step.leased as u64,
            })
        };
        self.steps.open.iter().filter_map(of_step).collect()
    }
}
