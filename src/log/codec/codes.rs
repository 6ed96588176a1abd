//! Enums as numbers. A code means one thing for ever; 0 is nobody's, so that what is absent is not taken for something.

use crate::forest::plan::SharedCallOwner;
use crate::group::{Estimator, Member, ReleasedFor};
use crate::log::RetiredFor;
use crate::queue::{CutVersion, DropReason, UnitKind};
use crate::rollout::event::{AgentStatus, Decision, DiscardedBy, Disposition};
use crate::rollout::run_settings::{StartPosition, Unit};
use crate::rollout::settings::{
    AgentsWithoutListRule, BrokenLinkRule, MissingCallRule, NonfiniteLogprobsRule, RowWeight, UnreadAnswersRule,
};

use super::Fault;

/// Something that stands in a record as a number.
pub(super) trait Coded: Sized {
    /// Its number, from 1.
    fn code(self) -> u32;

    /// What has this number.
    fn of_code(code: u32) -> Option<Self>;
}

/// What stands in this field.
pub(super) fn coded<T: Coded>(field: &'static str, code: u32) -> Result<T, Fault> {
    match code {
        0 => Err(Fault::Missing(field)),
        code => T::of_code(code).ok_or(Fault::UnknownCode { field, code }),
    }
}

/// Which form of a call's link stands in the record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum LinkForm {
    Infer,
    Root,
    Parent,
}

/// Which form of an agent's origin stands in the record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum OriginForm {
    Fresh,
    ForkOf,
}

macro_rules! codes {
    ($($type:ty { $($code:literal = $variant:ident),+ $(,)? })+) => {$(
        impl Coded for $type {
            fn code(self) -> u32 {
                match self {
                    $(Self::$variant => $code,)+
                }
            }

            fn of_code(code: u32) -> Option<Self> {
                match code {
                    $($code => Some(Self::$variant),)+
                    _ => None,
                }
            }
        }
    )+};
}

codes! {
    LinkForm { 1 = Infer, 2 = Root, 3 = Parent }
    OriginForm { 1 = Fresh, 2 = ForkOf }
    AgentStatus { 1 = Settled, 2 = Failed, 3 = Interrupted, 4 = BudgetExhausted, 5 = Closed }
    Disposition { 1 = Unsaid, 2 = Final, 3 = WillRetry }
    DiscardedBy { 1 = Harness, 2 = Operator, 3 = Rule }
    Decision { 1 = IdleTimeout, 2 = MissingCallsDiscard, 3 = MissingCallsFinalise, 4 = MissingParentsGivenUp }
    SharedCallOwner { 1 = RootAgent, 2 = FirstLeaf }
    BrokenLinkRule { 1 = Infer, 2 = Discard }
    AgentsWithoutListRule { 1 = Drop, 2 = Keep }
    MissingCallRule { 1 = Discard, 2 = Finalise }
    NonfiniteLogprobsRule { 1 = Refuse, 2 = Context }
    UnreadAnswersRule { 1 = Train, 2 = Context }
    RowWeight { 1 = One, 2 = RolloutRows, 3 = RolloutTokens }
    Unit { 1 = Row, 2 = Rollout, 3 = Group }
    StartPosition { 1 = Earliest, 2 = Latest }
    UnitKind { 1 = Row, 2 = Rollout, 3 = Group }
    CutVersion { 1 = First }
    Member { 1 = Open, 2 = Finalised, 3 = Out, 4 = WillRetry }
    Estimator { 1 = None, 2 = Mean, 3 = Grpo, 4 = Rloo }
    ReleasedFor { 1 = Whole, 2 = Quorum, 3 = Timeout, 4 = Operator }
    RetiredFor { 1 = Retention, 2 = Room, 3 = Unclaimed, 4 = Late, 5 = GroupDropped }
    DropReason {
        1 = Undeliverable, 2 = Stale, 3 = Overflow, 4 = Operator, 5 = Forgotten, 6 = Late, 7 = GroupDropped
    }
}
