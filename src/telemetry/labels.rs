//! The values of labels: fixed words, and the first few runs, policies and consumer groups; the rest are `other`.
//!
//! Which names are the first few is decided once for the life of the process, so a series never changes its meaning.

use std::collections::HashSet;
use std::sync::Arc;

use metrics::SharedString;
use parking_lot::RwLock;

use crate::limits::METRIC_LABEL_VALUES_MAX;

/// What stands for every name after the first few, and for every word that is on no list.
pub const OTHER: &str = "other";
/// The reason of what needs none.
pub const NO_REASON: &str = "none";

macro_rules! words {
    ($(#[$documentation:meta])* $name:ident { $($(#[$of_word:meta])* $word:ident = $text:literal,)* }) => {
        $(#[$documentation])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub enum $name {
            $($(#[$of_word])* $word,)*
        }

        impl $name {
            /// All of them.
            pub const ALL: &[Self] = &[$(Self::$word,)*];

            /// The label's value.
            #[must_use]
            pub fn as_str(self) -> &'static str {
                match self {
                    $(Self::$word => $text,)*
                }
            }
        }
    };
}

words! {
    /// What a call's link was when the call was answered.
    LinkLabel {
        /// No parent.
        Root = "root",
        /// It continues a call.
        Child = "child",
        /// The named parent does not fit.
        Broken = "broken",
        /// What it names has not come.
        Waiting = "waiting",
    }
}

words! {
    /// How a prompt leaves the call that it was meant to continue.
    DriftLabel {
        /// Some id is another one.
        Differs = "differs",
        /// It stops inside the other call's text.
        Rewind = "rewind",
    }
}

words! {
    /// Why a rollout ended without rows. What a harness says in its own words is `Harness`.
    EndReason {
        /// Nothing was heard of it.
        IdleTimeout = "idle_timeout",
        /// Kept calls did not come.
        MissingCall = "missing_call",
        /// A named parent did not fit, and the run says that this ends it.
        BrokenLink = "broken_link",
        /// Its harness discarded it.
        Harness = "harness",
        /// An operator discarded it.
        Operator = "operator",
        /// Its run was deleted.
        RunDeleted = "run_deleted",
        /// A newer attempt came.
        Superseded = "superseded",
    }
}

impl EndReason {
    /// The reason that these words of a rule are; others are [`Self::Harness`].
    #[must_use]
    pub fn from_text(text: &str) -> Self {
        Self::ALL.iter().copied().find(|reason| reason.as_str() == text).unwrap_or(Self::Harness)
    }
}

words! {
    /// Who waits for whom.
    WaitingOn {
        /// Trainers wait for rollouts.
        HarnessBound = "harness_bound",
        /// Rows wait for trainers.
        TrainerBound = "trainer_bound",
        /// All wait for the log.
        LogBound = "log_bound",
        /// Nobody waits.
        Idle = "idle",
    }
}

/// How a rollout ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RolloutEnd {
    /// Its rows can be made.
    Finalised,
    /// Its rows are settled and it is forgotten but for a tombstone.
    Retired,
    /// No consumer group was given its rows for as long as they are kept.
    Unclaimed,
    /// Its group was released before it was finalised.
    Late,
    /// Its group was dropped.
    GroupDropped,
    /// It ended without rows.
    Discarded(EndReason),
    /// A newer attempt came.
    Superseded,
}

impl RolloutEnd {
    /// The values of `outcome` and `reason`.
    #[must_use]
    pub fn words(self) -> (&'static str, &'static str) {
        match self {
            Self::Finalised => ("finalised", NO_REASON),
            Self::Retired => ("retired", NO_REASON),
            Self::Unclaimed => ("retired", "unclaimed"),
            Self::Late => ("retired", "late"),
            Self::GroupDropped => ("retired", "group_dropped"),
            Self::Discarded(reason) => ("discarded", reason.as_str()),
            Self::Superseded => ("superseded", EndReason::Superseded.as_str()),
        }
    }

    /// Whether the rollout was open until now. A retired one was finalised before.
    #[must_use]
    pub fn was_open(self) -> bool {
        match self {
            Self::Finalised | Self::Discarded(_) | Self::Superseded => true,
            Self::Retired | Self::Unclaimed | Self::Late | Self::GroupDropped => false,
        }
    }
}

/// The names that one label takes.
#[derive(Debug, Default)]
pub(super) struct FirstFew(RwLock<HashSet<Arc<str>>>);

impl FirstFew {
    /// This name as a label's value, if it is among the first few, or becomes one.
    pub(super) fn named(&self, name: &str) -> Option<SharedString> {
        if let Some(known) = self.0.read().get(name) {
            return Some(SharedString::from_shared(Arc::clone(known)));
        }
        let mut names = self.0.write();
        if names.len() >= METRIC_LABEL_VALUES_MAX && !names.contains(name) {
            return None;
        }
        let name: Arc<str> = Arc::from(name);
        names.insert(Arc::clone(&name));
        Some(SharedString::from_shared(name))
    }

    /// This name as a label's value, or `other`.
    pub(super) fn value(&self, name: &str) -> SharedString {
        self.named(name).unwrap_or(SharedString::const_str(OTHER))
    }
}

/// The three labels whose values come from outside.
#[derive(Debug, Default)]
pub(super) struct Labels {
    pub(super) runs: FirstFew,
    pub(super) policies: FirstFew,
    pub(super) consumer_groups: FirstFew,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_few_names_stand_and_the_rest_are_other() {
        let names = FirstFew::default();
        for number in 0..METRIC_LABEL_VALUES_MAX + 9 {
            let name = format!("run-{number}");
            let expected = if number < METRIC_LABEL_VALUES_MAX { name.as_str() } else { OTHER };
            assert_eq!(&*names.value(&name), expected);
        }
        assert_eq!(&*names.value("run-0"), "run-0", "what was named stays named");
    }

    #[test]
    fn a_harness_own_words_are_one_reason() {
        assert_eq!(EndReason::from_text("idle_timeout"), EndReason::IdleTimeout);
        assert_eq!(EndReason::from_text("the container 8f3a was lost"), EndReason::Harness);
    }
}
