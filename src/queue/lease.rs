//! The consumers' side of a group: joining and leaving, credit, leases, and who is given what. All of it is memory only.

use super::consumers::UnitNumber;
use super::effect::{Decision, Delivery, JoinRefused, Joined, LostReason, Nacked, Ticked};
use super::group::ConsumerGroup;
use super::shards::of_lease;
use super::steps::ShardPlace;
use super::unit::{ConsumerId, DropReason, ParkedFor, Place, UnitId};

impl<K: Ord + Clone, P: Clone> ConsumerGroup<K, P> {
    /// A consumer joins, and says which units it still holds from an earlier stream. Those that wait are leased to it
    /// without being sent again, and this counts as no delivery. So are those leased to a stream of the same (not
    /// empty) name: that is the consumer itself, whose old stream has not been seen to end yet. Held units are its own
    /// even beyond its credit.
    ///
    /// # Errors
    /// When the group is full or the stream has joined already; then nothing has changed.
    pub fn join(
        &mut self,
        consumer: ConsumerId,
        name: &str,
        credit_tokens: u64,
        held: &[UnitId],
        now_ms: u64,
    ) -> Result<Joined, JoinRefused> {
        self.join_for(consumer, (name, None), credit_tokens, held, now_ms)
    }

    /// The same for a consumer that takes this shard of each step; open steps of which it holds a shard must be cut.
    ///
    /// # Errors
    /// As with [`Self::join`].
    pub fn join_for(
        &mut self,
        consumer: ConsumerId,
        (name, shard): (&str, Option<u32>),
        credit_tokens: u64,
        held: &[UnitId],
        now_ms: u64,
    ) -> Result<Joined, JoinRefused> {
        if self.consumers.get(consumer).is_some() {
            return Err(JoinRefused::AlreadyJoined);
        }
        let max_consumers = self.bounds.max_consumers;
        if self.consumers.len() >= max_consumers {
            return Err(JoinRefused::TooManyConsumers { max_consumers });
        }
        self.consumers.insert(consumer, (name, shard), credit_tokens, now_ms);
        self.idle_since_ms = None;
        let mut joined = Joined::default();
        for id in held {
            match self.hold(consumer, name, id, now_ms) {
                Ok(true) => joined.held.push(id.clone()),
                Ok(false) => {}
                Err(reason) => joined.lost.push((id.clone(), reason)),
            }
        }
        self.verify();
        Ok(joined)
    }

    /// Leases one held unit; `false` if the same request named it before.
    fn hold(&mut self, consumer: ConsumerId, name: &str, id: &UnitId, now_ms: u64) -> Result<bool, LostReason> {
        if self.definition.ephemeral {
            return Err(LostReason::Unknown);
        }
        if self.takes_steps() {
            return self.hold_shard(consumer, name, id, now_ms);
        }
        let (number, place) = self.ledger.place_of(id).ok_or(LostReason::Unknown)?;
        match place {
            Place::Waiting | Place::Delayed { .. } => {}
            Place::Leased { consumer: holder, .. } if holder == consumer => return Ok(false),
            Place::Leased { consumer: holder, .. } => {
                let same = !name.is_empty() && self.consumers.get(holder).is_some_and(|holder| holder.name == name);
                if !same {
                    return Err(LostReason::LeasedToOther { consumer: holder });
                }
            }
            Place::Parked(ParkedFor::Drop(reason)) => return Err(LostReason::Dropped(reason)),
            Place::Parked(ParkedFor::Acknowledgement) | Place::Acknowledged => {
                return Err(LostReason::Acknowledged);
            }
            Place::Frozen { .. } | Place::Parked(ParkedFor::Step) => return Err(LostReason::Unknown),
            Place::Dropped(reason) => return Err(LostReason::Dropped(reason)),
        }
        self.relocate(number, Place::Leased { consumer, since_ms: now_ms });
        Ok(true)
    }

    /// A consumer's stream has ended, and with it its leases: the units go back to their places in the line.
    pub fn leave(&mut self, consumer: ConsumerId, now_ms: u64) -> Vec<Decision> {
        let Some(leaving) = self.consumers.get(consumer) else {
            return Vec::new();
        };
        let mut numbers: Vec<UnitNumber> = leaving.leases.iter().map(|&(_, number)| number).collect();
        numbers.sort_unstable();
        let decisions = self.end_leases(&numbers);
        self.consumers.remove(consumer);
        if self.consumers.len() == 0 {
            self.idle_since_ms = Some(now_ms);
        }
        self.verify();
        decisions
    }

    /// Sets a consumer's window: the most tokens that may be out at it. 0 stops it. In an ephemeral group, where nothing
    /// stays out, any other value lets units through.
    pub fn set_credit(&mut self, consumer: ConsumerId, credit_tokens: u64) {
        self.consumers.set_credit(consumer, credit_tokens);
        self.verify();
    }

    /// A consumer has said something, whatever it was: its leases last anew, also one that ran out but that no
    /// [`Self::tick`] has ended yet.
    pub fn sign_of_life(&mut self, consumer: ConsumerId, now_ms: u64) {
        self.consumers.sign_of_life(consumer, now_ms);
    }

    /// A consumer gives units back, which counts as a delivery even if they were only held. They wait again at their old
    /// places, after the delay where one is given. Units that are not with this consumer are left alone: a late nack must
    /// not take another's unit away.
    pub fn nack(&mut self, consumer: ConsumerId, ids: &[UnitId], delay_ms: Option<u64>, now_ms: u64) -> Nacked {
        let delay_ms = delay_ms.unwrap_or(0).min(self.bounds.max_nack_delay_ms);
        let to = match delay_ms {
            0 => Place::Waiting,
            delay_ms => Place::Delayed { until_ms: now_ms.saturating_add(delay_ms) },
        };
        if self.takes_steps() {
            let until_ms = now_ms.saturating_add(delay_ms);
            let to = if delay_ms == 0 { ShardPlace::Waiting } else { ShardPlace::Delayed { until_ms } };
            return self.nack_shards(consumer, ids, to);
        }
        let mut nacked = Nacked::default();
        for id in ids {
            match self.ledger.place_of(id) {
                Some((number, Place::Leased { consumer: holder, .. })) if holder == consumer => {
                    if let Some(unit) = self.ledger.units.get_mut(&number) {
                        unit.deliveries = unit.deliveries.max(1);
                    }
                    nacked.decisions.extend(self.end_lease(number, to));
                    nacked.returned.push(id.clone());
                }
                Some(_) | None => nacked.ignored.push(id.clone()),
            }
        }
        self.verify();
        nacked
    }

    /// A unit that a consumer was given cannot be given to anybody: it is parked, and dropped as undeliverable. Does nothing if
    /// that consumer does not have it any more.
    pub fn cannot_be_given(&mut self, consumer: ConsumerId, id: &UnitId) -> Option<Decision> {
        if self.takes_steps() {
            let (index, shard) = self.shard_of(id)?;
            let place = self.steps.shard((index, shard))?.place;
            let is_its_own = matches!(place, ShardPlace::Leased { consumer: holder, .. } if holder == consumer);
            return if is_its_own { self.park_step(index) } else { None };
        }
        let (number, place) = self.ledger.place_of(id)?;
        if !matches!(place, Place::Leased { consumer: holder, .. } if holder == consumer) {
            return None;
        }
        self.relocate(number, Place::Parked(ParkedFor::Drop(DropReason::Undeliverable)));
        self.verify();
        Some(Decision::DropUndeliverable { unit: id.clone() })
    }

    /// Ends what has run out by now: delays, and leases of consumers that gave no sign of life. Until they give one, others
    /// are served before them.
    pub fn tick(&mut self, now_ms: u64) -> Ticked {
        self.ledger.end_delays(now_ms);
        self.end_shard_delays(now_ms);
        let mut ticked = Ticked::default();
        for (number, consumer) in self.consumers.expired(now_ms, self.bounds.lease_ms) {
            let id = match self.takes_steps() {
                true => self.shard_id_of_lease(number),
                false => self.ledger.units.get(&number).map(|unit| unit.id.clone()),
            };
            ticked.ended.extend(id.map(|id| (consumer, id)));
            ticked.decisions.extend(self.end_lease(number, Place::Waiting));
            self.consumers.fell_silent(consumer);
        }
        self.verify();
        ticked
    }

    /// When [`Self::tick`] has something to do next.
    #[must_use]
    pub fn next_deadline_ms(&self) -> Option<u64> {
        let delay = self.ledger.delayed.first().map(|&(until_ms, _)| until_ms);
        let of_shard = self.steps.delayed.first().map(|&(until_ms, ..)| until_ms);
        let lease = self.consumers.next_expiry_ms(self.bounds.lease_ms);
        delay.into_iter().chain(of_shard).chain(lease).min()
    }

    fn end_leases(&mut self, numbers: &[UnitNumber]) -> Vec<Decision> {
        numbers.iter().filter_map(|&number| self.end_lease(number, Place::Waiting)).collect()
    }

    /// Ends a lease without an acknowledgement. After its last delivery a unit is parked, until the decision to drop it
    /// is durable.
    fn end_lease(&mut self, number: UnitNumber, to: Place) -> Option<Decision> {
        if self.takes_steps() {
            return self.end_shard_lease(of_lease(number), ShardPlace::Waiting);
        }
        let unit = self.ledger.units.get(&number)?;
        if unit.deliveries < self.definition.max_deliveries.max(1) {
            self.relocate(number, to);
            return None;
        }
        let decision = Decision::DropUndeliverable { unit: unit.id.clone() };
        self.relocate(number, Place::Parked(ParkedFor::Drop(DropReason::Undeliverable)));
        Some(decision)
    }

    /// Gives out waiting units, at most so many; if as many come back, there may be more. The oldest unit goes first, to
    /// the consumer with room for it that has the fewest tokens out (then the fewest taken since it joined, then the
    /// lowest id); one whose lease ran out comes after all others. If nobody has room for the oldest, nothing overtakes it.
    pub fn dispatch(&mut self, now_ms: u64, max_units: usize) -> Vec<Delivery<P>> {
        debug_assert!(!self.takes_steps(), "units of steps go out as shards");
        self.ledger.end_delays(now_ms);
        let mut deliveries = Vec::new();
        while deliveries.len() < max_units {
            let Some((number, head)) = self.ledger.head() else {
                break;
            };
            let Some(consumer) = self.consumers.next_for(head.tokens) else {
                break;
            };
            let Some(delivery) = self.give(number, consumer, now_ms) else {
                break;
            };
            deliveries.push(delivery);
        }
        self.verify();
        deliveries
    }

    fn give(&mut self, number: UnitNumber, consumer: ConsumerId, now_ms: u64) -> Option<Delivery<P>> {
        let unit = self.ledger.units.get_mut(&number)?;
        let payload = unit.payload.clone()?;
        unit.deliveries = unit.deliveries.saturating_add(1);
        let delivery = Delivery {
            consumer,
            unit: unit.id.clone(),
            tokens: unit.tokens,
            payload,
            delivery_number: unit.deliveries,
        };
        self.ledger.counts.deliveries += 1;
        if delivery.delivery_number > 1 {
            self.ledger.counts.redeliveries += 1;
        }
        self.consumers.count_delivery(consumer, delivery.tokens);
        if self.definition.ephemeral {
            self.relocate(number, Place::Acknowledged);
            self.ledger.forget(number);
        } else {
            self.relocate(number, Place::Leased { consumer, since_ms: now_ms });
        }
        Some(delivery)
    }
}
