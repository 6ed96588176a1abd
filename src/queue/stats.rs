//! What people and heartbeats are told of a consumer group.

use std::collections::{BTreeMap, BTreeSet};

use super::consumers::Consumer;
use super::group::ConsumerGroup;
use super::ledger::{RowStates, Tally};
use super::unit::{ConsumerId, DropReason, UnitId};

/// One group in numbers. `pushed = waiting + leased + parked + acknowledged + dropped`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GroupStats {
    /// Consumers that are there.
    pub consumers: usize,
    /// Everything ever pushed.
    pub pushed: Tally,
    /// In the line, also those put off for a while.
    pub waiting: Tally,
    /// Of the waiting ones, how many units are put off.
    pub delayed_units: u64,
    /// Out at consumers.
    pub leased: Tally,
    /// A record about them is on its way to the log.
    pub parked: Tally,
    /// Acknowledged (in an ephemeral group: given out).
    pub acknowledged: Tally,
    /// Dropped, by reason; a reason that never came up is not there.
    pub dropped: BTreeMap<DropReason, Tally>,
    /// Times that a unit was given out.
    pub deliveries: u64,
    /// Of these, how many were not the unit's first.
    pub redeliveries: u64,
    /// How long the oldest unit in the line has been there since it was pushed.
    pub oldest_waiting_ms: Option<u64>,
    /// How long ago the oldest unit that nobody has acknowledged was pushed.
    pub oldest_unsettled_ms: Option<u64>,
    /// What became of their rows.
    pub rows: RowStates,
}

/// One consumer in numbers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ConsumerFacts {
    /// Its stream.
    pub consumer: ConsumerId,
    /// What it calls itself.
    pub name: String,
    /// The most tokens that may be out at it.
    pub credit_tokens: u64,
    /// Which shard of each step it takes.
    pub shard: Option<u32>,
    /// What is out at it.
    pub in_flight: Tally,
    /// What it was given since it joined.
    pub delivered: Tally,
    /// When it last said something.
    pub last_sign_ms: u64,
    /// A lease of it ran out, and it has said nothing since.
    pub silent: bool,
    /// The highest version of its weights that it said it is on.
    pub policy_version: Option<u64>,
}

/// Why a consumer is given nothing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WaitReason {
    /// The group has no unsettled unit at all: rollouts have to finish first.
    NothingQueued,
    /// Fewer units wait than make a step.
    StepNotFull,
    /// The record of the next step is on its way to the log.
    Freezing,
    /// As many steps are open as may be at once: others have to acknowledge their shards.
    StepsOpen,
    /// Another consumer takes this one's shard.
    StandsBy,
    /// Every unsettled unit is out, at this consumer or others, or parked.
    AllOut,
    /// What waits was put off until then.
    Delayed {
        /// When the first comes back.
        until_ms: u64,
    },
    /// The service has started anew, and until then what waits is only for those who say that they hold it.
    HeldBack {
        /// When it is for all.
        until_ms: u64,
    },
    /// It gave no credit.
    NoCredit,
    /// The oldest unit does not fit what is left of its credit.
    CreditShort {
        /// The oldest unit's tokens.
        head_tokens: u64,
        /// What is left.
        left_tokens: u64,
    },
    /// It has as many units as it may, whatever their tokens.
    TooManyUnitsInFlight {
        /// The bound.
        max_units_in_flight: usize,
    },
    /// It has room; the oldest unit goes out with the next dispatch, to it or to one with fewer tokens out.
    NotWaiting,
}

/// What a consumer's heartbeat says it waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WaitingFor {
    /// The reason in one word.
    pub reason: WaitReason,
    /// What waits in the group.
    pub waiting: Tally,
    /// What is out at this consumer.
    pub in_flight: Tally,
    /// What is out at all consumers; where units go out in steps, units of steps of which something is out.
    pub leased: Tally,
    /// What is out at the others; shards, where units go out in steps.
    pub leased_to_others: Tally,
}

impl Consumer {
    pub(super) fn in_flight(&self) -> Tally {
        Tally { units: self.leases.len() as u64, tokens: self.in_flight_tokens }
    }
}

impl<K: Ord + Clone, P: Clone> ConsumerGroup<K, P> {
    /// The group in numbers.
    #[must_use]
    pub fn stats(&self, now_ms: u64) -> GroupStats {
        let counts = &self.ledger.counts;
        let numbers = self.consumers.iter().flat_map(|(_, consumer)| consumer.leases.iter().map(|(_, number)| *number));
        let leased: Vec<_> = if self.takes_steps() { self.in_open_steps() } else { numbers.collect() };
        let oldest = self.ledger.oldest_pushed_at_ms(leased.into_iter());
        GroupStats {
            consumers: self.consumers.len(),
            pushed: counts.pushed.tally,
            waiting: counts.waiting.tally,
            delayed_units: self.ledger.delayed.len() as u64,
            leased: counts.leased.tally,
            parked: counts.parked.tally,
            acknowledged: counts.acknowledged.tally,
            dropped: counts.dropped.iter().map(|(reason, sum)| (*reason, sum.tally)).collect(),
            deliveries: counts.deliveries,
            redeliveries: counts.redeliveries,
            oldest_waiting_ms: self.ledger.head().map(|(_, head)| now_ms.saturating_sub(head.pushed_at_ms)),
            oldest_unsettled_ms: oldest.map(|pushed_at_ms| now_ms.saturating_sub(pushed_at_ms)),
            rows: counts.row_states(),
        }
    }

    /// What became of its rows.
    #[must_use]
    pub fn row_states(&self) -> RowStates {
        self.ledger.counts.row_states()
    }

    /// Whether some unit is ready, or put off for a while, and at no consumer. Fewer units than make a step are not ready.
    #[must_use]
    pub fn has_waiting(&self) -> bool {
        match self.in_steps_alone() {
            Some(families) => !families.is_empty(),
            None => self.ledger.counts.waiting.tally.units > 0,
        }
    }

    /// The families of which some unit is ready, or put off for a while, and at no consumer. Fewer units than make a step are not ready:
    /// they wait for others, which must not wait for them.
    pub fn waiting_families(&self) -> impl Iterator<Item = u64> {
        let in_steps_alone = self.in_steps_alone();
        let is_ready = move |family: &u64| in_steps_alone.as_ref().is_none_or(|ready| ready.contains(family));
        self.ledger.families.keys().copied().filter(is_ready)
    }

    /// Where fewer units wait than make a step: the families of the units in steps that nobody has anything of. None: all is ready.
    fn in_steps_alone(&self) -> Option<BTreeSet<u64>> {
        let units = self.definition.step?.units as usize;
        (self.ledger.waiting.len() < units).then(|| self.families_in_steps())
    }

    /// The units that are undeliverable and can be released by hand, in the order in which they were made.
    pub fn undeliverable(&self) -> impl ExactSizeIterator<Item = &UnitId> {
        self.ledger.undeliverable.iter().map(|number| &self.ledger.units[number].id)
    }

    /// The streams of its consumers.
    pub fn consumer_ids(&self) -> impl Iterator<Item = ConsumerId> {
        self.consumers.iter().map(|(id, _)| id)
    }

    /// Its consumers, by stream.
    pub fn consumers(&self) -> impl Iterator<Item = ConsumerFacts> {
        self.consumers.iter().map(|(id, consumer)| ConsumerFacts {
            consumer: id,
            name: consumer.name.clone(),
            credit_tokens: consumer.credit_tokens,
            shard: consumer.shard,
            in_flight: consumer.in_flight(),
            delivered: Tally { units: consumer.delivered_units, tokens: consumer.delivered_tokens },
            last_sign_ms: consumer.last_sign_ms,
            silent: consumer.silent,
            policy_version: consumer.policy_version,
        })
    }

    /// Why a consumer is given nothing; `None` if it is not there.
    #[must_use]
    pub fn waiting_for(&self, consumer: ConsumerId) -> Option<WaitingFor> {
        if self.takes_steps() {
            return self.waits_for_shard(consumer);
        }
        let consumer = self.consumers.get(consumer)?;
        let leased = self.ledger.counts.leased.tally;
        let in_flight = consumer.in_flight();
        Some(WaitingFor {
            reason: self.wait_reason(consumer),
            waiting: self.ledger.counts.waiting.tally,
            in_flight,
            leased,
            leased_to_others: Tally { units: leased.units - in_flight.units, tokens: leased.tokens - in_flight.tokens },
        })
    }

    fn wait_reason(&self, consumer: &Consumer) -> WaitReason {
        let Some((_, head)) = self.ledger.head() else {
            let counts = &self.ledger.counts;
            return match self.ledger.delayed.first() {
                Some(&(until_ms, _)) if until_ms == self.grace_until_ms => WaitReason::HeldBack { until_ms },
                Some(&(until_ms, _)) => WaitReason::Delayed { until_ms },
                None if counts.leased.tally.units + counts.parked.tally.units > 0 => WaitReason::AllOut,
                None => WaitReason::NothingQueued,
            };
        };
        let max_units_in_flight = self.bounds.max_units_in_flight;
        if consumer.credit_tokens == 0 {
            WaitReason::NoCredit
        } else if consumer.takes(head.tokens, max_units_in_flight) {
            WaitReason::NotWaiting
        } else if consumer.leases.len() >= max_units_in_flight {
            WaitReason::TooManyUnitsInFlight { max_units_in_flight }
        } else {
            WaitReason::CreditShort {
                head_tokens: head.tokens,
                left_tokens: consumer.credit_tokens.saturating_sub(consumer.in_flight_tokens),
            }
        }
    }
}
