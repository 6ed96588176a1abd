//! Units: what a consumer group hands out, and where each of them stands.

use std::fmt;
use std::sync::Arc;

use super::seek::History;
use super::staleness::OldestVersions;

/// The stable id of a unit. For units of one row it is the row id, for whole rollouts `run/rollout/attempt`, for groups
/// `run//group`.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct UnitId(Arc<str>);

impl UnitId {
    /// Takes an id as it is; whoever makes units has checked it.
    pub fn new(id: impl Into<Arc<str>>) -> Self {
        Self(id.into())
    }

    /// The id as text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for UnitId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl From<&str> for UnitId {
    fn from(id: &str) -> Self {
        Self(id.into())
    }
}

/// What one unit is made of.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum UnitKind {
    /// One row.
    Row,
    /// All rows of one rollout, for one policy.
    Rollout,
    /// All rows of one group of rollouts. Each of them is pushed by itself, all before any is given out.
    Group,
}

/// A unit as it is pushed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NewUnit<P> {
    /// Its stable id, unique in the run.
    pub id: UnitId,
    /// How many tokens it holds, context and trained: what credit is counted in.
    pub tokens: u64,
    /// How many rows it holds: what the ledger of rows is counted in.
    pub rows: u64,
    /// Which units belong together for the pace of a run: those of a group.
    pub family: u64,
    /// Which versions sampled it, where its group has a bound of staleness; else empty.
    pub oldest_versions: OldestVersions,
    /// A handle to its rows, which the queue never looks into.
    pub payload: P,
}

/// Which stream a consumer is on. A consumer that comes back is a new one, with its old name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ConsumerId(pub u64);

/// Why a unit ended without an acknowledgement.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum DropReason {
    /// Given out `max_deliveries` times, and never acknowledged. Can be released by hand.
    Undeliverable,
    /// Sampled by weights too old for this consumer group.
    Stale,
    /// Pushed out of the bounded line of an ephemeral consumer group.
    Overflow,
    /// By hand, after it was undeliverable.
    Operator,
    /// Its rollout was forgotten while the unit was not settled.
    Forgotten,
    /// The group of its rollout was released before the rollout was finalised. Never given out.
    Late,
    /// The group of its rollout was dropped. Never given out.
    GroupDropped,
}

impl DropReason {
    /// Every reason, in the order of the metrics.
    pub const ALL: [Self; 7] = [
        Self::Undeliverable,
        Self::Stale,
        Self::Overflow,
        Self::Operator,
        Self::Forgotten,
        Self::Late,
        Self::GroupDropped,
    ];

    /// The reason as a word, for metrics and notices.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Undeliverable => "undeliverable",
            Self::Stale => "stale",
            Self::Overflow => "overflow",
            Self::Operator => "operator",
            Self::Forgotten => "forgotten",
            Self::Late => "late",
            Self::GroupDropped => "group_dropped",
        }
    }
}

/// Which record about a parked unit is on its way to the log.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum ParkedFor {
    /// The decision to drop it, for this reason.
    Drop(DropReason),
    /// An acknowledgement.
    Acknowledgement,
    /// The step that it is frozen in.
    Step,
}

/// Where a unit stands. `Acknowledged` and `Dropped` are settled; the others are not, and are memory only: a replay
/// finds every unsettled unit waiting.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Place {
    /// In the line, to be given out when its turn comes.
    Waiting,
    /// Refused by a consumer for a while; then back in the line at its original place.
    Delayed {
        /// When it may be given out again.
        until_ms: u64,
    },
    /// With a consumer.
    Leased {
        /// Who has it.
        consumer: ConsumerId,
        /// Since when; the lease ends one lease length after this or the consumer's last sign of life.
        since_ms: u64,
    },
    /// In a frozen step, whose shards are given out.
    Frozen {
        /// Whether some shard of the step is with a consumer.
        is_out: bool,
    },
    /// Neither waiting nor leased, because a record about it is on its way to the log.
    Parked(ParkedFor),
    /// Done with.
    Acknowledged,
    /// Ended without acknowledgement.
    Dropped(DropReason),
}

impl Place {
    /// Whether the unit holds its rollout back no longer.
    #[must_use]
    pub fn is_settled(self) -> bool {
        match self {
            Self::Acknowledged | Self::Dropped(_) => true,
            Self::Waiting | Self::Delayed { .. } | Self::Leased { .. } | Self::Frozen { .. } | Self::Parked(_) => false,
        }
    }

    /// Whether it is in the line, put off, or in a step that nobody has anything of: nobody has it.
    pub(super) fn is_in_line(self) -> bool {
        match self {
            Self::Waiting | Self::Delayed { .. } => true,
            Self::Frozen { is_out } => !is_out,
            Self::Leased { .. } | Self::Parked(_) | Self::Acknowledged | Self::Dropped(_) => false,
        }
    }

    /// Whether the payload may still be wanted: a settled unit frees it, unless it can be released.
    pub(super) fn keeps_payload(self) -> bool {
        match self {
            Self::Acknowledged => false,
            Self::Dropped(reason) => reason == DropReason::Undeliverable,
            Self::Waiting | Self::Delayed { .. } | Self::Leased { .. } | Self::Frozen { .. } | Self::Parked(_) => true,
        }
    }
}

/// A unit as the consumer group keeps it.
#[derive(Debug, Clone)]
pub(super) struct Unit<K, P> {
    pub(super) id: UnitId,
    pub(super) source: K,
    /// The other rollouts of its group, where a unit is a group.
    pub(super) more_sources: Vec<K>,
    pub(super) tokens: u64,
    pub(super) rows: u64,
    pub(super) pushed_at_ms: u64,
    /// How often it was given out since it was pushed or released.
    pub(super) deliveries: u32,
    pub(super) place: Place,
    /// The step that it stands in, once that was frozen.
    pub(super) step: Option<u64>,
    pub(super) history: History,
    pub(super) family: u64,
    pub(super) oldest_versions: OldestVersions,
    /// `None` once it was freed; see [`Place::keeps_payload`].
    pub(super) payload: Option<P>,
}

impl<K: PartialEq, P> Unit<K, P> {
    /// Whether it holds rows of this rollout.
    pub(super) fn is_of(&self, source: &K) -> bool {
        self.source == *source || self.more_sources.contains(source)
    }
}
