//! What a finalised rollout gives to consumer groups: units, as plans that share its storage.

use std::ops::Range;
use std::sync::Arc;

use crate::forest::plan::{PolicyPlan, RowPlan};
use crate::ids::{GroupId, Name, RolloutRef, group_unit_id, rollout_unit_id, row_id};
use crate::limits;
use crate::queue::{GroupDefinition, NewUnit, UnitId, UnitKind};
use crate::rollout::FinalisedRollout;

use super::super::RolloutKey;
use super::super::effect::FinalisedNow;
use super::super::evict::Finalised;
use super::super::memory::Share;
use super::retention::Standing;
use super::{GroupOfUnit, LeftOut};

/// A finalised rollout that is not retired.
#[derive(Clone)]
pub struct Retained {
    pub(super) key: Option<RolloutKey>,
    pub(super) attempt: u32,
    pub(super) finalised: Arc<Finalised>,
    pub(super) group: Option<GroupId>,
    /// What its units have in common with those of its group.
    pub(super) family: u64,
    /// Whether its group is one that is released: then it is a member of that, and else alone.
    pub(super) is_grouped: bool,
    unix_ms: u64,
    at_ms: u64,
    pub(super) plans: Vec<Arc<PolicyPlan>>,
    pub(super) share: Arc<Share>,
    pub(super) standing: Standing,
}

/// The rows of one unit, not gathered yet.
#[derive(Clone)]
pub struct UnitRows {
    /// The rollout and attempt that they are of.
    pub about: RolloutRef,
    /// The rollout.
    pub finalised: Arc<Finalised>,
    /// When it was finalised, milliseconds since the Unix epoch.
    pub finalised_unix_ms: u64,
    /// When it was finalised, on the store's clock.
    pub finalised_at_ms: u64,
    /// The plans of the policies that the consumer group takes, by name.
    pub plans: Vec<Arc<PolicyPlan>>,
    /// Of one row only: its plan and its place there.
    pub only: Option<(usize, usize)>,
    /// What the rollout holds in memory, until its rows are sent.
    pub share: Arc<Share>,
    /// Its group as it was released, if it has waited for that: known when it goes out.
    pub group: Option<Arc<GroupOfUnit>>,
}

impl UnitRows {
    /// The rows, as places in their plans.
    #[must_use]
    pub fn planned(&self) -> Vec<(Arc<PolicyPlan>, Range<usize>)> {
        match self.only {
            Some((plan, row)) => self.plans.get(plan).map(|plan| (plan.clone(), row..row + 1)).into_iter().collect(),
            None => self.plans.iter().map(|plan| (plan.clone(), 0..plan.rows.len())).collect(),
        }
    }
}

impl Retained {
    /// A rollout that was just finalised.
    pub(super) fn new(attempt: u32, now: &FinalisedNow) -> Self {
        let FinalisedNow { rollout, finalised, unix_ms, at_ms, share } = now;
        let plans: Vec<_> = rollout.policies().iter().map(|policy| Arc::new(rollout.plan(policy, None))).collect();
        share.add(plans.iter().map(|plan| plan_bytes(plan)).sum());
        Self {
            key: None,
            attempt,
            finalised: Arc::clone(finalised),
            group: rollout.facts().group.clone(),
            family: 0,
            is_grouped: false,
            unix_ms: *unix_ms,
            at_ms: *at_ms,
            plans,
            share: Arc::clone(share),
            standing: Standing::default(),
        }
    }

    /// Rows of all policies, whatever their length.
    pub(super) fn row_count(&self) -> u64 {
        self.plans.iter().map(|plan| plan.rows.len() as u64).sum()
    }

    /// The plans that a consumer group takes of it, by policy.
    pub(super) fn plans_for(&self, definition: &GroupDefinition, rollout: &FinalisedRollout) -> Vec<Arc<PolicyPlan>> {
        let takes = |policy: &Name| definition.policy.as_ref().is_none_or(|taken| taken == policy.as_str());
        if definition.policy.is_none() && definition.max_row_tokens.is_none() {
            self.plans.clone()
        } else {
            let policies = self.plans.iter().map(|plan| &plan.policy).filter(|policy| takes(policy));
            policies.map(|policy| Arc::new(rollout.plan(policy, definition.max_row_tokens))).collect()
        }
    }

    /// Which rollout and attempt it is.
    pub(super) fn about(&self, key: &RolloutKey) -> RolloutRef {
        RolloutRef {
            run: key.run.clone(),
            group: self.group.clone(),
            rollout: key.rollout.clone(),
            attempt: self.attempt,
        }
    }

    /// The units of these plans of it that a consumer group gets. What they hold in memory is counted, where the group is not
    /// bounded anyway.
    pub(super) fn units(
        &self,
        key: &RolloutKey,
        definition: &GroupDefinition,
        (rollout, plans): (&FinalisedRollout, &[Arc<PolicyPlan>]),
    ) -> Vec<NewUnit<UnitRows>> {
        let units = self.new_units(key, definition, (rollout, plans));
        if !definition.ephemeral {
            self.share.add(self.bytes_of(&units, plans, definition));
        }
        units
    }

    /// What these units take, with their plans as far as they are not shared.
    fn bytes_of(&self, units: &[NewUnit<UnitRows>], plans: &[Arc<PolicyPlan>], definition: &GroupDefinition) -> u64 {
        let of_step = |unit: &NewUnit<UnitRows>| limits::STEP_MEMBER_BYTES + unit.rows * limits::STEP_ROW_BYTES;
        let of_unit = |unit: &NewUnit<UnitRows>| {
            limits::UNIT_BYTES + unit.id.as_str().len() as u64 + definition.step.map_or(0, |_| of_step(unit))
        };
        let own = plans.iter().filter(|plan| !self.plans.iter().any(|shared| Arc::ptr_eq(shared, plan)));
        own.map(|plan| plan_bytes(plan)).sum::<u64>() + units.iter().map(of_unit).sum::<u64>()
    }

    /// All its rows that a consumer group takes.
    pub(super) fn rows_for(&self, key: &RolloutKey, definition: &GroupDefinition) -> UnitRows {
        let plans = self.plans_for(definition, &self.finalised.now());
        self.rows_of(&self.about(key), plans, None)
    }

    fn rows_of(&self, about: &RolloutRef, plans: Vec<Arc<PolicyPlan>>, only: Option<(usize, usize)>) -> UnitRows {
        UnitRows {
            about: about.clone(),
            finalised: Arc::clone(&self.finalised),
            finalised_unix_ms: self.unix_ms,
            finalised_at_ms: self.at_ms,
            plans,
            only,
            share: Arc::clone(&self.share),
            group: None,
        }
    }

    /// A consumer group that had its units is gone.
    pub(super) fn give_units_back(&self, definition: &GroupDefinition) {
        let Some(key) = &self.key else { return };
        let rollout = self.finalised.now();
        let plans = self.plans_for(definition, &rollout);
        let units = self.new_units(key, definition, (&rollout, &plans));
        self.share.subtract(self.bytes_of(&units, &plans, definition));
    }

    /// Its units once more, for a consumer group that has let go of their rows. They are counted already.
    pub(super) fn units_again(&self, definition: &GroupDefinition) -> Vec<NewUnit<UnitRows>> {
        let Some(key) = &self.key else { return Vec::new() };
        let rollout = self.finalised.now();
        self.new_units(key, definition, (&rollout, &self.plans_for(definition, &rollout)))
    }

    pub(super) fn new_units(
        &self,
        key: &RolloutKey,
        definition: &GroupDefinition,
        (rollout, plans): (&FinalisedRollout, &[Arc<PolicyPlan>]),
    ) -> Vec<NewUnit<UnitRows>> {
        let about = self.about(key);
        let unit = |only| self.rows_of(&about, plans.to_vec(), only);
        let versions = |plan: &PolicyPlan, rows: &[RowPlan]| {
            let oldest = rows.iter().filter_map(|row| row.oldest_version).min();
            definition.max_staleness_versions.and(oldest).map(|oldest| (Arc::from(plan.policy.as_str()), oldest))
        };
        match definition.unit {
            UnitKind::Row => {
                let rows = plans
                    .iter()
                    .enumerate()
                    .flat_map(|(at, plan)| plan.rows.iter().enumerate().map(move |row| (at, plan, row)));
                let new = rows.map(|(at, plan, (place, row))| {
                    let leaf = rollout.facts().forest.call(row.leaf).id();
                    let id = row_id(&key.run, &key.rollout, self.attempt, &plan.policy, leaf);
                    let (tokens, payload) = (u64::from(row.tokens), unit(Some((at, place))));
                    let oldest_versions = versions(plan, std::slice::from_ref(row)).into_iter().collect();
                    NewUnit { id: UnitId::new(id), tokens, rows: 1, family: self.family, oldest_versions, payload }
                });
                new.collect()
            }
            UnitKind::Rollout | UnitKind::Group => {
                let tokens: u64 = plans.iter().flat_map(|plan| &plan.rows).map(|row| u64::from(row.tokens)).sum();
                let rows = plans.iter().map(|plan| plan.rows.len() as u64).sum();
                if rows == 0 {
                    return Vec::new();
                }
                let policy = definition.policy.as_deref().and_then(|policy| Name::parse(policy).ok());
                let id = match (&self.group, definition.unit) {
                    (Some(group), UnitKind::Group) if self.is_grouped => {
                        group_unit_id(&key.run, group, policy.as_ref())
                    }
                    // One without a group is a unit of its own.
                    _ => rollout_unit_id(&key.run, &key.rollout, self.attempt, policy.as_ref()),
                };
                let oldest_versions = plans.iter().filter_map(|plan| versions(plan, &plan.rows)).collect();
                vec![NewUnit {
                    id: UnitId::new(id),
                    tokens,
                    rows,
                    family: self.family,
                    oldest_versions,
                    payload: unit(None),
                }]
            }
        }
    }
}

/// What a consumer group does not get of a rollout with these plans, as far as its consumers would miss it.
pub(super) fn left_out(plans: &[Arc<PolicyPlan>]) -> impl Iterator<Item = LeftOut> {
    let too_long: u64 = plans.iter().map(|plan| plan.ledger.too_long).sum();
    let no_rows = plans.iter().all(|plan| plan.rows.is_empty());
    let too_long = (too_long > 0).then_some(LeftOut::TooLong(too_long));
    too_long.into_iter().chain(no_rows.then_some(LeftOut::NoRows(1)))
}

/// Bytes of a plan.
fn plan_bytes(plan: &PolicyPlan) -> u64 {
    (size_of::<PolicyPlan>() + size_of_val(&*plan.rows) + size_of_val(&*plan.owners)) as u64
}
