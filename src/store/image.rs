//! The whole state as a value that can be compared: what a replay must give again, to the last row.
//!
//! For tests and checks; it gathers every row.

use std::collections::BTreeMap;

use crate::group::Group;
use crate::queue::{DropReason, History, OpenStep, Place};

use super::sequencer::Sequencer;
use super::{RolloutKey, Slot};

/// Where a unit stands, as far as records go: leases and delays are in no record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum UnitImage {
    /// Somebody has to acknowledge it.
    Due,
    /// It is acknowledged.
    Acknowledged,
    /// It is dropped.
    Dropped(DropReason),
}

/// A rollout, as records have made it.
#[derive(Clone, Debug, PartialEq)]
pub enum RolloutImage {
    /// It takes events: a text of all that is known.
    Open(String),
    /// Its rows: ids, masks and log-probabilities of each, by policy.
    Finalised(String),
    /// A tombstone.
    Ended(String),
}

/// The whole state.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Image {
    /// Rollouts.
    pub rollouts: BTreeMap<RolloutKey, RolloutImage>,
    /// Groups, by run and id.
    pub groups: BTreeMap<(String, String), Group>,
    /// Units of consumer groups, by run, consumer group and unit, with the positions at which each was acknowledged and was not any
    /// more, in turn.
    pub units: BTreeMap<(String, String, String), (UnitImage, Vec<u64>)>,
    /// Consumer groups, by run and name: where each was made and last changed, how often it was sought, up to where what it
    /// knew is forgotten, and where it is blurred.
    pub consumer_groups: BTreeMap<(String, String), [u64; 6]>,
    /// How many steps consumer groups have frozen, and those that are not acknowledged, by run and name.
    pub steps: BTreeMap<(String, String), (u64, Vec<StepImage>)>,
}

/// A step that is not acknowledged.
#[derive(Clone, Debug, PartialEq)]
pub struct StepImage {
    /// Which.
    pub index: u64,
    /// Its units, in order.
    pub members: Vec<String>,
    /// Its shards that are not acknowledged.
    pub missing_shards: Vec<u32>,
}

impl Sequencer {
    /// The state now. Nothing may be on its way.
    #[must_use]
    pub fn image(&self) -> Image {
        let mut image = Image::default();
        // Tokens are read back for it, and others leave for them: in the same order each time.
        let entries: BTreeMap<_, _> =
            self.store().rollouts.iter().map(|entry| (entry.key().clone(), entry.value().clone())).collect();
        for (key, entry) in entries {
            let restored = self.store().restore_now(&key);
            debug_assert!(restored.is_ok(), "{restored:?}");
            let slot = entry.slot.lock();
            let rollout = match &*slot {
                Slot::Live(live) => match live.rollout.finalised() {
                    Some(rollout) => {
                        let plans: Vec<_> =
                            rollout.policies().iter().map(|policy| rollout.plan(policy, None)).collect();
                        let forest = &rollout.facts().forest;
                        let rows = plans.iter().flat_map(|plan| plan.rows.iter().map(move |row| (plan, row)));
                        let rows: Vec<_> = rows.map(|(plan, row)| forest.row(plan, row, rollout.links())).collect();
                        RolloutImage::Finalised(format!("attempt {} {rows:?}", live.attempt))
                    }
                    None => RolloutImage::Open(format!("attempt {} {}", live.attempt, live.rollout.facts().in_full())),
                },
                Slot::Ended(ended, _) => RolloutImage::Ended(format!("{ended:?}")),
                Slot::Removed => continue,
            };
            image.rollouts.insert(key, rollout);
        }
        for (run, group, state) in self.all_groups() {
            image.groups.insert((run.to_string(), group.to_string()), state.clone());
        }
        for (run, name, group) in self.all_consumer_groups() {
            let (from, until) = group.blurred().unwrap_or_default();
            let facts =
                [group.made_at(), group.changed_at(), group.seek_count(), group.forgotten_through(), from, until];
            let of_step = |step: OpenStep| {
                let members = group.step_members(step.index).unwrap_or_default();
                let members = members.iter().map(|(id, ..)| id.as_str().to_owned()).collect();
                StepImage { index: step.index, members, missing_shards: step.missing_shards }
            };
            let steps = group.open_steps().into_iter().map(of_step).collect();
            image.steps.insert((run.to_string(), name.to_owned()), (group.next_step_index(), steps));
            image.consumer_groups.insert((run.to_string(), name.to_owned()), facts);
            for (unit, place) in group.units() {
                let place = match place {
                    Place::Acknowledged => UnitImage::Acknowledged,
                    Place::Dropped(reason) => UnitImage::Dropped(reason),
                    Place::Waiting
                    | Place::Delayed { .. }
                    | Place::Leased { .. }
                    | Place::Frozen { .. }
                    | Place::Parked(_) => UnitImage::Due,
                };
                let moments = group.history(unit).map(History::moments).unwrap_or_default();
                image.units.insert((run.to_string(), name.to_owned(), unit.as_str().to_owned()), (place, moments));
            }
        }
        image
    }
}
