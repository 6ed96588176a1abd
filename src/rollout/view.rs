//! One rollout as it is shown to people: what its keeper knows of it besides the rollout itself.
//!
//! Whoever keeps rollouts fills this in under the rollout's lock and hands it to whoever shows it. Looking changes nothing that
//! anybody could see; the rollout is borrowed mutably only because looking up links remembers what it found.

use crate::ids::RolloutRef;

use super::Rollout;

/// One live rollout, for showing.
pub struct RolloutView<'a> {
    /// Which rollout and attempt.
    pub about: RolloutRef,
    /// The rollout.
    pub rollout: &'a mut Rollout,
    /// When its first event came.
    pub opened_unix_ms: u64,
    /// When its last event came.
    pub heard_unix_ms: u64,
    /// When its rows were made, if they are.
    pub finalised_unix_ms: Option<u64>,
    /// The version of the run's settings that it has.
    pub settings_version: u64,
    /// How many requests for it were refused.
    pub refused_requests: u64,
    /// Bytes of memory it takes.
    pub resident_bytes: u64,
    /// How long until a clock next has something to decide, if it has.
    pub next_deadline_in_ms: Option<u64>,
}
