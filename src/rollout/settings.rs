//! What a run decides of its rollouts. A rollout keeps the settings of its opening.

use crate::forest::plan::SharedCallOwner;
use crate::ids::Name;

/// What becomes of a named parent that does not fit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum BrokenLinkRule {
    /// The link is inferred instead.
    #[default]
    Infer,
    /// The rollout is discarded.
    Discard,
}

/// What an agent without a kept list keeps, once some list is given.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum AgentsWithoutListRule {
    /// Nothing.
    #[default]
    Drop,
    /// All its calls.
    Keep,
}

/// What becomes of a rollout whose kept calls do not come in time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum MissingCallRule {
    /// It is discarded.
    #[default]
    Discard,
    /// It is finalised without them; its rows are marked as incomplete.
    Finalise,
}

/// What becomes of a log-probability that is NaN or infinite.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum NonfiniteLogprobsRule {
    /// The call is refused.
    #[default]
    Refuse,
    /// Its token becomes context.
    Context,
}

/// Whether the calls of an agent train whose answer no other agent read, as far as is said.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum UnreadAnswersRule {
    /// They do.
    #[default]
    Train,
    /// They are context, unless a credit says otherwise.
    Context,
}

/// What a row's loss is to be multiplied with.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum RowWeight {
    /// 1.
    #[default]
    One,
    /// 1 / the rows of its rollout, for its policy.
    RolloutRows,
    /// The row's share of the trained tokens of its rollout, for its policy.
    RolloutTokens,
}

/// A run's settings, as far as one rollout needs them.
#[derive(Clone, Debug, PartialEq)]
pub struct RolloutSettings {
    /// The policies whose calls may train; empty: all.
    pub trained_policies: Vec<Name>,
    /// The policy of a call that names none.
    pub default_policy: Name,
    /// Who trains a call that several rows hold.
    pub shared_call_owner: SharedCallOwner,
    /// What becomes of a broken link.
    pub broken_link: BrokenLinkRule,
    /// What an agent without a list keeps.
    pub agents_without_list: AgentsWithoutListRule,
    /// What becomes of a rollout with missing calls.
    pub missing_call: MissingCallRule,
    /// Whether a trained call must have log-probabilities.
    pub require_logprobs: bool,
    /// What becomes of log-probabilities that are not finite.
    pub nonfinite_logprobs: NonfiniteLogprobsRule,
    /// Kinds of calls that do not train, unless a credit says so.
    pub untrained_kinds: Vec<Name>,
    /// Whether calls of agents train whose answer nobody read.
    pub unread_answers: UnreadAnswersRule,
    /// What a row's weight is.
    pub row_weight: RowWeight,
    /// Every id must be below this, if given.
    pub vocabulary_limit: Option<u32>,
    /// An open rollout of which nothing is heard for so long is discarded.
    pub idle_timeout_ms: u64,
    /// How long after the seal kept calls may still come.
    pub missing_call_timeout_ms: u64,
    /// How long after the seal calls that are named as parents may still come.
    pub missing_parent_timeout_ms: u64,
}

const MINUTE_MS: u64 = 60_000;

impl RolloutSettings {
    /// The defaults, with this policy for calls that name none.
    #[must_use]
    pub fn with_default_policy(default_policy: Name) -> Self {
        Self {
            trained_policies: Vec::new(),
            default_policy,
            shared_call_owner: SharedCallOwner::RootAgent,
            broken_link: BrokenLinkRule::Infer,
            agents_without_list: AgentsWithoutListRule::Drop,
            missing_call: MissingCallRule::Discard,
            require_logprobs: true,
            nonfinite_logprobs: NonfiniteLogprobsRule::Refuse,
            untrained_kinds: Vec::new(),
            unread_answers: UnreadAnswersRule::Train,
            row_weight: RowWeight::One,
            vocabulary_limit: None,
            idle_timeout_ms: 360 * MINUTE_MS,
            missing_call_timeout_ms: 10 * MINUTE_MS,
            missing_parent_timeout_ms: 10 * MINUTE_MS,
        }
    }

    /// Whether calls of this policy may train.
    #[must_use]
    pub fn trains(&self, policy: &Name) -> bool {
        self.trained_policies.is_empty() || self.trained_policies.contains(policy)
    }
}
