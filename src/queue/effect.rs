//! What the operations of a consumer group give back: effects, decisions, deliveries and answers.

use super::unit::{ConsumerId, DropReason, UnitId};

/// An inner effect: part of replay, and the same each time for the same pushes and applied records.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum QueueEffect<K> {
    /// Every unit of the rollout is acknowledged or dropped in this consumer group. Comes again when one that was
    /// undeliverable is done with for good.
    SourceSettled {
        /// Which rollout.
        source: K,
    },
    /// A unit of a settled rollout was released by hand: the rollout must not retire yet.
    SourceReopened {
        /// Which rollout.
        source: K,
    },
    /// The line of an ephemeral group was full, and its oldest units were dropped.
    LineOverflowed {
        /// How many units.
        units: u64,
        /// How many tokens were in them.
        tokens: u64,
    },
}

/// What the group has decided, and must be a record in the log before it has effects.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Decision {
    /// Log it, then call `apply_drop(unit, DropReason::Undeliverable)`. Until then the unit is parked.
    DropUndeliverable {
        /// Which unit.
        unit: UnitId,
    },
    /// Log it, then call `apply_drop(unit, DropReason::Stale)`. Until then the unit is parked.
    DropStale {
        /// Which unit.
        unit: UnitId,
    },
}

/// A unit that goes out.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Delivery<P> {
    /// To whom.
    pub consumer: ConsumerId,
    /// Which unit.
    pub unit: UnitId,
    /// Its tokens.
    pub tokens: u64,
    /// The handle to its rows.
    pub payload: P,
    /// 1 the first time, then counting.
    pub delivery_number: u32,
}

/// What an acknowledgement is worth.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AckResult {
    /// It counts once it is durable; also for a unit that was dropped as undeliverable in the meantime.
    Acknowledged,
    /// It is of a shard whose step is acknowledged when the others are, and counts once it is durable.
    ShardAcknowledged,
    /// The unit was acknowledged before (or earlier in the same request).
    Already,
    /// No such unit, or its rollout has retired.
    Unknown,
    /// The unit was dropped for a reason that an acknowledgement does not undo.
    Dropped(DropReason),
}

/// Why a unit that a joining consumer says it holds is not its own.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum LostReason {
    /// It is acknowledged already.
    Acknowledged,
    /// It was dropped, or is about to be.
    Dropped(DropReason),
    /// Another live consumer has it.
    LeasedToOther {
        /// Who.
        consumer: ConsumerId,
    },
    /// No such unit, or its rollout has retired.
    Unknown,
}

/// What became of the units that a joining consumer says it holds, each list in the order asked.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Joined {
    /// Leased to it without being sent again.
    pub held: Vec<UnitId>,
    /// Not its own any more.
    pub lost: Vec<(UnitId, LostReason)>,
}

/// Why a consumer cannot join.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum JoinRefused {
    /// The group has as many consumers as it may.
    TooManyConsumers {
        /// The bound.
        max_consumers: usize,
    },
    /// This stream has joined already.
    AlreadyJoined,
}

/// What a nack did.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Nacked {
    /// Given back, and waiting again or about to be dropped.
    pub returned: Vec<UnitId>,
    /// Not with this consumer, so that there was nothing to give back.
    pub ignored: Vec<UnitId>,
    /// What must be logged and applied.
    pub decisions: Vec<Decision>,
}

/// What the passing of time did.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Ticked {
    /// What must be logged and applied.
    pub decisions: Vec<Decision>,
    /// Leases that ran out: whose, and of which unit.
    pub ended: Vec<(ConsumerId, UnitId)>,
}

/// Whether a unit can be released by hand.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReleaseResult {
    /// It can: log it, then call `apply_release`.
    Released,
    /// It is not dropped as undeliverable.
    NotUndeliverable,
    /// No such unit, or its rollout has retired.
    Unknown,
}
