//! When a group is released, and what its release says. Pure.
//!
//! A release is decided once, from what is durable, and is a record before it has effects: it says who is counted, with which
//! reward, and who is missing, and why. All that follows from it (statistics, advantages, whether the group is dropped) is worked
//! out here, the same whenever it is read again.

use std::sync::Arc;

use crate::ids::RolloutId;
use crate::limits;

use super::estimate::{Estimator, Statistics};

/// How long after its first opening a group is released with what it has, unless the run says otherwise.
pub const GROUP_TIMEOUT_MS: u64 = 24 * 60 * 60 * 1000;

/// What a run decides about a group: by the settings under which its first rollout was opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GroupRules {
    /// How rewards become advantages.
    pub estimator: Estimator,
    /// Whether groups are dropped whose rewards are all equal.
    pub drop_zero_variance: bool,
    /// How many finalised members release it, if it need not be whole.
    pub quorum: Option<u32>,
    /// How long after its first opening it is released with what it has.
    pub timeout_ms: u64,
    /// Whether some consumer group of the run takes whole groups.
    pub has_group_units: bool,
}

impl Default for GroupRules {
    fn default() -> Self {
        Self {
            estimator: Estimator::default(),
            drop_zero_variance: false,
            quorum: None,
            timeout_ms: GROUP_TIMEOUT_MS,
            has_group_units: false,
        }
    }
}

impl GroupRules {
    /// Whether its release is of use to anybody.
    #[must_use]
    pub fn are_released(&self) -> bool {
        self.hold_all() || self.has_group_units
    }

    /// Whether nobody is given anything of a member before the release: all rows carry what comes of it.
    #[must_use]
    pub fn hold_all(&self) -> bool {
        self.estimator != Estimator::None
    }
}

/// Why a group was released.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReleasedFor {
    /// Every member is finalised or out for good.
    Whole,
    /// As many members are finalised as the run asks for.
    Quorum,
    /// Its time was over.
    Timeout,
    /// By hand.
    Operator,
}

impl ReleasedFor {
    /// All of them, in the order of the metrics.
    pub const ALL: [Self; 4] = [Self::Whole, Self::Quorum, Self::Timeout, Self::Operator];

    /// In a word.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Whole => "whole",
            Self::Quorum => "quorum",
            Self::Timeout => "timeout",
            Self::Operator => "operator",
        }
    }
}

/// Why nobody is given a group that was released.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DroppedFor {
    /// Of several places fewer than two are taken by finalised rollouts; or its one place is not.
    TooFewMembers,
    /// All rewards are equal, and the run does not want such groups.
    ZeroVariance,
    /// Rewards are so large that some advantage would not be finite.
    AdvantageNotFinite,
}

impl DroppedFor {
    /// All of them, in the order of the metrics.
    pub const ALL: [Self; 3] = [Self::TooFewMembers, Self::ZeroVariance, Self::AdvantageNotFinite];

    /// In a word.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::TooFewMembers => "too_few_members",
            Self::ZeroVariance => "zero_variance",
            Self::AdvantageNotFinite => "advantage_not_finite",
        }
    }
}

/// A finalised rollout that a group's statistics count.
#[derive(Clone, Debug, PartialEq)]
pub struct Counted {
    /// The rollout.
    pub rollout: RolloutId,
    /// Its attempt.
    pub attempt: u32,
    /// Its reward.
    pub reward: f64,
}

/// Who is missing from a group.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Absence {
    /// The rollout and its attempt; none: a place that nobody took.
    pub member: Option<(RolloutId, u32)>,
    /// Why, in a few words.
    pub reason: String,
}

/// A place that nobody took.
pub const NEVER_CAME: &str = "never_came";
/// A member that was open when its group was released.
pub const NOT_FINALISED: &str = "not_finalised";

/// What a group's release says, as it is logged.
#[derive(Clone, Debug, PartialEq)]
pub struct Decided {
    /// By which rules.
    pub rules: GroupRules,
    /// Why.
    pub released_for: ReleasedFor,
    /// How many rollouts the group was to have, if that was said.
    pub size: Option<u32>,
    /// Who is counted, by id.
    pub counted: Vec<Counted>,
    /// Who is missing, by id, the first few; then places that nobody took.
    pub absences: Vec<Absence>,
    /// How many are missing.
    pub absent: u32,
}

/// A group's release, and what follows from it.
#[derive(Clone, Debug, PartialEq)]
pub struct Release {
    decided: Decided,
    statistics: Statistics,
    /// Of the counted, in their order; none without an estimator.
    advantages: Option<Vec<f64>>,
    dropped: Option<DroppedFor>,
}

impl Release {
    /// What follows from a decision.
    #[must_use]
    pub fn of(decided: Decided) -> Arc<Self> {
        let rewards: Vec<f64> = decided.counted.iter().map(|counted| counted.reward).collect();
        let statistics = Statistics::of(&rewards);
        let advantages = decided.rules.estimator.advantages(&rewards);
        let least = if decided.size == Some(1) { 1 } else { 2 };
        let is_finite = |advantage: &f64| advantage.abs() <= limits::ADVANTAGE_MAX;
        let all_equal = rewards.len() > 1 && rewards.windows(2).all(|two| two[0] == two[1]);
        let dropped = if rewards.len() < least {
            Some(DroppedFor::TooFewMembers)
        } else if decided.rules.drop_zero_variance && all_equal {
            Some(DroppedFor::ZeroVariance)
        } else if advantages.as_ref().is_some_and(|advantages| !advantages.iter().all(is_finite)) {
            Some(DroppedFor::AdvantageNotFinite)
        } else {
            None
        };
        Arc::new(Self { decided, statistics, advantages, dropped })
    }

    /// What was decided.
    #[must_use]
    pub fn decided(&self) -> &Decided {
        &self.decided
    }

    /// The rewards in two numbers.
    #[must_use]
    pub fn statistics(&self) -> Statistics {
        self.statistics
    }

    /// Why nobody is given the group, if that is so.
    #[must_use]
    pub fn dropped(&self) -> Option<DroppedFor> {
        self.dropped
    }

    /// Whether the group has one place, so that its advantage says nothing.
    #[must_use]
    pub fn is_degenerate(&self) -> bool {
        self.decided.size == Some(1)
    }

    /// Whether this attempt is counted.
    #[must_use]
    pub fn counts(&self, rollout: &RolloutId, attempt: u32) -> bool {
        self.place(rollout).is_some_and(|place| self.decided.counted[place].attempt == attempt)
    }

    /// The advantage of a counted rollout; none if there is no estimator, or it is not counted.
    #[must_use]
    pub fn advantage(&self, rollout: &RolloutId) -> Option<f64> {
        self.advantages.as_ref()?.get(self.place(rollout)?).copied()
    }

    fn place(&self, rollout: &RolloutId) -> Option<usize> {
        self.decided.counted.binary_search_by(|counted| counted.rollout.cmp(rollout)).ok()
    }

    /// What it takes in memory, beside the group and its members.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        let texts = |absence: &Absence| (size_of::<Absence>() + absence.reason.len()) as u64;
        let absences: u64 = self.decided.absences.iter().map(texts).sum();
        limits::GROUP_RELEASE_BYTES + absences + self.decided.counted.len() as u64 * limits::GROUP_COUNTED_BYTES
    }
}
