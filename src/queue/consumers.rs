//! The consumers of one group: their credit, their leases, and which of them is next.
//!
//! Owns who is there and what is out at whom. Every change goes through [`Consumers::change`], which keeps the order of
//! those that have room, so that the next one is found without asking all of them.

use std::collections::{BTreeMap, BTreeSet};

use super::unit::ConsumerId;

/// A unit's place in the order of pushes: what "oldest" means.
pub(super) type UnitNumber = u64;

/// One consumer: a stream that takes units.
#[derive(Debug, Clone)]
pub(super) struct Consumer {
    pub(super) name: String,
    /// Which shard of each step it takes, where its group takes steps.
    pub(super) shard: Option<u32>,
    pub(super) credit_tokens: u64,
    pub(super) in_flight_tokens: u64,
    /// What it has been given since it joined.
    pub(super) delivered_tokens: u64,
    pub(super) delivered_units: u64,
    pub(super) last_sign_ms: u64,
    /// A lease of it ran out, and it has said nothing since: others are served first.
    pub(super) silent: bool,
    /// The highest version that it said it is on.
    pub(super) policy_version: Option<u64>,
    /// (since when, which unit), so that the first to expire comes first.
    pub(super) leases: BTreeSet<(u64, UnitNumber)>,
}

impl Consumer {
    pub(super) fn has_room(&self, max_units_in_flight: usize) -> bool {
        self.leases.len() < max_units_in_flight && self.in_flight_tokens < self.credit_tokens
    }

    /// Whether a unit may go out: it fits what is left of the credit, or nothing else is out.
    pub(super) fn takes(&self, tokens: u64, max_units_in_flight: usize) -> bool {
        self.has_room(max_units_in_flight)
            && (self.leases.is_empty() || self.in_flight_tokens.saturating_add(tokens) <= self.credit_tokens)
    }

    fn turn(&self, id: ConsumerId) -> Turn {
        (self.silent, self.in_flight_tokens, self.delivered_tokens, id)
    }

    /// From when on its first lease lasts, if it gives no further sign of life.
    fn lasts_from_ms(&self) -> Option<u64> {
        self.leases.first().map(|&(since_ms, _)| since_ms.max(self.last_sign_ms))
    }
}

/// The order in which consumers are served: those that are not silent, then fewest tokens out, then fewest taken since they
/// joined, then lowest id.
type Turn = (bool, u64, u64, ConsumerId);

/// All consumers of one group.
#[derive(Debug, Clone)]
pub(super) struct Consumers {
    by_id: BTreeMap<ConsumerId, Consumer>,
    /// Those that have room, in the order in which they are served.
    ready: BTreeSet<Turn>,
    /// Those that hold leases, by the moment from which the first of these lasts.
    lasting: BTreeSet<(u64, ConsumerId)>,
    max_units_in_flight: usize,
}

impl Consumers {
    pub(super) fn new(max_units_in_flight: usize) -> Self {
        Self { by_id: BTreeMap::new(), ready: BTreeSet::new(), lasting: BTreeSet::new(), max_units_in_flight }
    }

    pub(super) fn len(&self) -> usize {
        self.by_id.len()
    }

    pub(super) fn get(&self, id: ConsumerId) -> Option<&Consumer> {
        self.by_id.get(&id)
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (ConsumerId, &Consumer)> {
        self.by_id.iter().map(|(&id, consumer)| (id, consumer))
    }

    pub(super) fn insert(
        &mut self,
        id: ConsumerId,
        (name, shard): (&str, Option<u32>),
        credit_tokens: u64,
        now_ms: u64,
    ) {
        let consumer = Consumer {
            name: name.to_owned(),
            shard,
            credit_tokens,
            in_flight_tokens: 0,
            delivered_tokens: 0,
            delivered_units: 0,
            last_sign_ms: now_ms,
            silent: false,
            policy_version: None,
            leases: BTreeSet::new(),
        };
        self.by_id.insert(id, consumer);
        self.change(id, |_| {});
    }

    /// Takes a consumer out. Its leases must have been ended before.
    pub(super) fn remove(&mut self, id: ConsumerId) {
        if let Some(gone) = self.by_id.remove(&id) {
            debug_assert!(gone.leases.is_empty(), "a consumer leaves after its leases have ended");
            self.ready.remove(&gone.turn(id));
        }
    }

    /// The one way to change a consumer.
    fn change(&mut self, id: ConsumerId, change: impl FnOnce(&mut Consumer)) {
        let Some(consumer) = self.by_id.get_mut(&id) else {
            return;
        };
        self.ready.remove(&consumer.turn(id));
        if let Some(from_ms) = consumer.lasts_from_ms() {
            self.lasting.remove(&(from_ms, id));
        }
        change(consumer);
        if let Some(from_ms) = consumer.lasts_from_ms() {
            self.lasting.insert((from_ms, id));
        }
        if consumer.has_room(self.max_units_in_flight) {
            self.ready.insert(consumer.turn(id));
        }
    }

    pub(super) fn set_credit(&mut self, id: ConsumerId, credit_tokens: u64) {
        self.change(id, |consumer| consumer.credit_tokens = credit_tokens);
    }

    pub(super) fn sign_of_life(&mut self, id: ConsumerId, now_ms: u64) {
        self.change(id, |consumer| {
            consumer.last_sign_ms = consumer.last_sign_ms.max(now_ms);
            consumer.silent = false;
        });
    }

    pub(super) fn is_on(&mut self, id: ConsumerId, version: u64) {
        self.change(id, |consumer| consumer.policy_version = consumer.policy_version.max(Some(version)));
    }

    /// A lease of it ran out.
    pub(super) fn fell_silent(&mut self, id: ConsumerId) {
        self.change(id, |consumer| consumer.silent = true);
    }

    pub(super) fn begin_lease(&mut self, id: ConsumerId, since_ms: u64, number: UnitNumber, tokens: u64) {
        self.change(id, |consumer| {
            if consumer.leases.insert((since_ms, number)) {
                consumer.in_flight_tokens += tokens;
            }
        });
    }

    pub(super) fn end_lease(&mut self, id: ConsumerId, since_ms: u64, number: UnitNumber, tokens: u64) {
        self.change(id, |consumer| {
            if consumer.leases.remove(&(since_ms, number)) {
                consumer.in_flight_tokens -= tokens;
            }
        });
    }

    pub(super) fn count_delivery(&mut self, id: ConsumerId, tokens: u64) {
        self.change(id, |consumer| {
            consumer.delivered_tokens += tokens;
            consumer.delivered_units += 1;
        });
    }

    /// Who takes a unit of so many tokens next. Usually the first that is asked; never more than all that have room.
    pub(super) fn next_for(&self, tokens: u64) -> Option<ConsumerId> {
        self.ready.iter().map(|&(_, _, _, id)| id).find(|&id| self.takes(id, tokens))
    }

    fn takes(&self, id: ConsumerId, tokens: u64) -> bool {
        self.by_id.get(&id).is_some_and(|consumer| consumer.takes(tokens, self.max_units_in_flight))
    }

    /// The units whose leases have ended by now and who has them, oldest unit first.
    pub(super) fn expired(&self, now_ms: u64, lease_ms: u64) -> Vec<(UnitNumber, ConsumerId)> {
        let mut numbers = Vec::new();
        let over = self.lasting.iter().take_while(|(from_ms, _)| from_ms.saturating_add(lease_ms) <= now_ms);
        for (id, consumer) in over.filter_map(|&(_, id)| Some((id, self.by_id.get(&id)?))) {
            let ended = consumer.leases.iter().take_while(|(since_ms, _)| since_ms.saturating_add(lease_ms) <= now_ms);
            numbers.extend(ended.map(|&(_, number)| (number, id)));
        }
        numbers.sort_unstable();
        numbers
    }

    pub(super) fn next_expiry_ms(&self, lease_ms: u64) -> Option<u64> {
        self.lasting.first().map(|(from_ms, _)| from_ms.saturating_add(lease_ms))
    }

    /// Whether the order of those with room, and that of those with leases, are what the consumers say.
    pub(super) fn orders_are_right(&self) -> bool {
        let lasting: BTreeSet<(u64, ConsumerId)> =
            self.iter().filter_map(|(id, consumer)| Some((consumer.lasts_from_ms()?, id))).collect();
        let expected: BTreeSet<Turn> = self
            .iter()
            .filter(|(_, consumer)| consumer.has_room(self.max_units_in_flight))
            .map(|(id, consumer)| consumer.turn(id))
            .collect();
        expected == self.ready && lasting == self.lasting
    }
}
