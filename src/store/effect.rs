//! What records mean beyond one rollout, and what goes out: values, so that replay can drop what must not happen twice.

use std::sync::Arc;

use tokio::sync::oneshot;

use crate::forest::Placement;
use crate::group::Decided;
use crate::ids::{CallId, ConsumerGroupId, GroupId, RolloutId, RunId};
use crate::log::{Position, RetiredFor};
use crate::queue::{ConsumerId, DropReason, FrozenStep, GroupDefinition, UnitId};
use crate::rollout::FinalisedRollout;
use crate::rollout::event::Discarded;
use crate::rollout::run_settings::RunSettings;

use super::RolloutKey;
use super::evict::Finalised;
use super::memory::Share;
use super::sequencer::{AckOutcome, SeekReady, SeekReply};

/// How a rollout's attempt ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ended {
    /// Which attempt.
    pub attempt: u32,
    /// How.
    pub outcome: Outcome,
    /// Why, in a few words.
    pub reason: String,
    /// No other attempt is taken.
    pub is_final: bool,
    /// The group that it was in: its next attempt is in no other.
    pub group: Option<GroupId>,
}

/// How an attempt ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// Its rows were acknowledged, or unclaimed for too long; the reason says which.
    Retired,
    /// It was thrown away.
    Discarded,
}

/// A rollout that was just finalised. While this is there, its tokens do not leave memory.
#[derive(Debug)]
pub struct FinalisedNow {
    /// The rollout.
    pub rollout: Arc<FinalisedRollout>,
    /// It, for all who hold it.
    pub finalised: Arc<Finalised>,
    /// When, milliseconds since the Unix epoch.
    pub unix_ms: u64,
    /// When, on the store's clock.
    pub at_ms: u64,
    /// What it holds in memory.
    pub share: Arc<Share>,
}

/// What the sequencing task takes from durable records, in their order.
#[derive(Debug)]
pub enum Sequenced {
    /// A rollout's rows can be made.
    Finalised {
        /// Which.
        key: RolloutKey,
        /// Its attempt.
        attempt: u32,
        /// The rollout.
        finalised: Box<FinalisedNow>,
    },
    /// A rollout ended without rows.
    Discarded {
        /// Which.
        key: RolloutKey,
        /// Its attempt.
        attempt: u32,
        /// Its group.
        group: Option<GroupId>,
        /// Why.
        discarded: Discarded,
        /// Calls that it had.
        calls: u64,
        /// Where it was opened.
        opened: Position,
    },
    /// A run's settings declare consumer groups.
    Declared {
        /// The run.
        run: RunId,
        /// The settings.
        settings: Arc<RunSettings>,
    },
    /// A consumer group was made.
    ConsumerGroup {
        /// Its run.
        run: RunId,
        /// Its name.
        consumer_group: ConsumerGroupId,
        /// What its units are.
        definition: GroupDefinition,
        /// Whether it takes what was finalised before it.
        from_earliest: bool,
    },
    /// Units were acknowledged.
    Acknowledged {
        /// Their run.
        run: RunId,
        /// The consumer group.
        consumer_group: ConsumerGroupId,
        /// The units.
        units: Vec<UnitId>,
    },
    /// A unit was dropped.
    UnitDropped {
        /// Its run.
        run: RunId,
        /// The consumer group.
        consumer_group: ConsumerGroupId,
        /// The unit.
        unit: UnitId,
        /// Why.
        reason: DropReason,
    },
    /// An undeliverable unit was released by hand.
    UnitReleased {
        /// Its run.
        run: RunId,
        /// The consumer group.
        consumer_group: ConsumerGroupId,
        /// The unit.
        unit: UnitId,
    },
    /// Units were frozen as a step.
    StepFrozen {
        /// Their run.
        run: RunId,
        /// The consumer group.
        consumer_group: ConsumerGroupId,
        /// The step.
        step: Box<FrozenStep>,
    },
    /// A group was released, or dropped.
    GroupReleased {
        /// Its run.
        run: RunId,
        /// The group.
        group: GroupId,
        /// What was decided.
        decided: Box<Decided>,
        /// Where the record of it stood first; none: here.
        at: Option<Position>,
    },
    /// Finalised rollouts are not kept any longer, but for those that are held by then.
    RolloutsRetired {
        /// Their run.
        run: RunId,
        /// Which, each with its attempt.
        rollouts: Vec<(RolloutId, u32)>,
        /// Why.
        reason: RetiredFor,
    },
    /// Nobody has subscribed to a consumer group for long.
    ConsumerGroupExpired {
        /// Its run.
        run: RunId,
        /// Its name.
        consumer_group: ConsumerGroupId,
    },
    /// All that was logged before a seek was judged is applied. Not in replay.
    SeekReady(Box<SeekReady>),
    /// A consumer group went back.
    Sought {
        /// Its run.
        run: RunId,
        /// Its name.
        consumer_group: ConsumerGroupId,
        /// What was acknowledged there is acknowledged.
        to: Position,
        /// Who asked; none in replay.
        reply: Option<SeekReply>,
    },
    /// A consumer is told what became of its acknowledgements. Not in replay.
    Acks {
        /// The consumer.
        consumer: ConsumerId,
        /// For each unit.
        results: Vec<(UnitId, AckOutcome)>,
    },
    /// An open attempt was superseded by a newer one. Not in replay.
    Superseded {
        /// Its run.
        run: RunId,
        /// Where its records begin.
        home: Position,
        /// Calls that it had.
        calls: u64,
    },
    /// A snapshot of the small state is whole and durable. Not in replay.
    Snapshot {
        /// Where it begins.
        begins: Position,
    },
    /// What is needed of the log before this position stands behind it, durably. Not in replay.
    Reclaim {
        /// The position.
        before: Position,
    },
    /// Somebody waits until all before this is applied.
    Reached(oneshot::Sender<()>),
}

impl Sequenced {
    /// The run that it is about.
    pub(super) fn run(&self) -> Option<&RunId> {
        match self {
            Self::Finalised { key, .. } | Self::Discarded { key, .. } => Some(&key.run),
            Self::Declared { run, .. }
            | Self::Superseded { run, .. }
            | Self::ConsumerGroup { run, .. }
            | Self::Acknowledged { run, .. }
            | Self::UnitDropped { run, .. }
            | Self::UnitReleased { run, .. }
            | Self::StepFrozen { run, .. }
            | Self::GroupReleased { run, .. }
            | Self::RolloutsRetired { run, .. }
            | Self::ConsumerGroupExpired { run, .. }
            | Self::Sought { run, .. } => Some(run),
            Self::Acks { .. }
            | Self::Reached(_)
            | Self::SeekReady(_)
            | Self::Snapshot { .. }
            | Self::Reclaim { .. } => None,
        }
    }
}

/// Something that a stream of reports is told unasked, once this position is durable.
#[derive(Clone, Debug)]
pub struct Notice {
    /// The record that it comes from.
    pub position: Position,
    /// Which rollout.
    pub key: RolloutKey,
    /// Its attempt.
    pub attempt: u32,
    /// The call.
    pub call: CallId,
    /// What became of it.
    pub placement: Placement,
}
