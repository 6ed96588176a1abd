//! Finalised rollouts: units for every consumer group; and what is left of those that have ended, a tombstone. How long they are kept
//! between is in [`super::retention`].

use std::ops::Range;
use std::sync::Arc;

use crate::forest::plan::{PolicyPlan, RowPlan};
use crate::group::Member;
use crate::ids::{ConsumerGroupId, GroupId, Name, RolloutRef, RunId, rollout_unit_id, row_id};
use crate::limits;
use crate::log::{Position, RetiredFor};
use crate::queue::{ConsumerGroup, GroupDefinition, NewUnit, QueueEffect, UnitId, UnitKind};
use crate::rollout::FinalisedRollout;
use crate::rollout::event::{Discarded, DiscardedBy, Disposition};
use crate::rollout::run_settings::{RunSettings, StartPosition};
use crate::telemetry::{EndReason, RolloutEnd};

use super::super::effect::{Ended, FinalisedNow, Outcome};
use super::super::evict::Finalised;
use super::super::memory::Share;
use super::super::{RolloutKey, Slot, figures};
use super::retention::Standing;
use super::{LeftOut, Sequencer, ToConsumer, Tombstone};

/// A finalised rollout that is not retired.
#[derive(Clone)]
pub struct Retained {
    pub(super) key: Option<RolloutKey>,
    pub(super) attempt: u32,
    finalised: Arc<Finalised>,
    pub(super) group: Option<GroupId>,
    /// What its units have in common with those of its group.
    family: u64,
    unix_ms: u64,
    at_ms: u64,
    plans: Vec<Arc<PolicyPlan>>,
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
    fn new(attempt: u32, now: &FinalisedNow) -> Self {
        let FinalisedNow { rollout, finalised, unix_ms, at_ms, share } = now;
        let plans: Vec<_> = rollout.policies().iter().map(|policy| Arc::new(rollout.plan(policy, None))).collect();
        share.add(plans.iter().map(|plan| plan_bytes(plan)).sum());
        Self {
            key: None,
            attempt,
            finalised: Arc::clone(finalised),
            group: rollout.facts().group.clone(),
            family: 0,
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
    fn plans_for(&self, definition: &GroupDefinition, rollout: &FinalisedRollout) -> Vec<Arc<PolicyPlan>> {
        let takes = |policy: &Name| definition.policy.as_ref().is_none_or(|taken| taken == policy.as_str());
        if definition.policy.is_none() && definition.max_row_tokens.is_none() {
            self.plans.clone()
        } else {
            let policies = self.plans.iter().map(|plan| &plan.policy).filter(|policy| takes(policy));
            policies.map(|policy| Arc::new(rollout.plan(policy, definition.max_row_tokens))).collect()
        }
    }

    /// Which rollout and attempt it is.
    fn about(&self, key: &RolloutKey) -> RolloutRef {
        RolloutRef {
            run: key.run.clone(),
            group: self.group.clone(),
            rollout: key.rollout.clone(),
            attempt: self.attempt,
        }
    }

    /// The units of these plans of it that a consumer group gets. What they hold in memory is counted, where the group is not
    /// bounded anyway.
    fn units(
        &self,
        key: &RolloutKey,
        definition: &GroupDefinition,
        (rollout, plans): (&FinalisedRollout, &[Arc<PolicyPlan>]),
    ) -> Vec<NewUnit<UnitRows>> {
        let units = self.new_units(key, definition, (rollout, plans));
        if !definition.ephemeral {
            self.share.add(self.bytes_of(&units, plans));
        }
        units
    }

    /// What these units take, with their plans as far as they are not shared.
    fn bytes_of(&self, units: &[NewUnit<UnitRows>], plans: &[Arc<PolicyPlan>]) -> u64 {
        let of_unit = |unit: &NewUnit<UnitRows>| limits::UNIT_BYTES + unit.id.as_str().len() as u64;
        let own = plans.iter().filter(|plan| !self.plans.iter().any(|shared| Arc::ptr_eq(shared, plan)));
        own.map(|plan| plan_bytes(plan)).sum::<u64>() + units.iter().map(of_unit).sum::<u64>()
    }

    /// A consumer group that had its units is gone.
    pub(super) fn give_units_back(&self, definition: &GroupDefinition) {
        let Some(key) = &self.key else { return };
        let rollout = self.finalised.now();
        let plans = self.plans_for(definition, &rollout);
        self.share.subtract(self.bytes_of(&self.new_units(key, definition, (&rollout, &plans)), &plans));
    }

    /// Its units once more, for a consumer group that has let go of their rows. They are counted already.
    pub(super) fn units_again(&self, definition: &GroupDefinition) -> Vec<NewUnit<UnitRows>> {
        let Some(key) = &self.key else { return Vec::new() };
        let rollout = self.finalised.now();
        self.new_units(key, definition, (&rollout, &self.plans_for(definition, &rollout)))
    }

    fn new_units(
        &self,
        key: &RolloutKey,
        definition: &GroupDefinition,
        (rollout, plans): (&FinalisedRollout, &[Arc<PolicyPlan>]),
    ) -> Vec<NewUnit<UnitRows>> {
        let about = self.about(key);
        let unit = |only| UnitRows {
            about: about.clone(),
            finalised: Arc::clone(&self.finalised),
            finalised_unix_ms: self.unix_ms,
            finalised_at_ms: self.at_ms,
            plans: plans.to_vec(),
            only,
            share: Arc::clone(&self.share),
        };
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
            UnitKind::Rollout => {
                let tokens: u64 = plans.iter().flat_map(|plan| &plan.rows).map(|row| u64::from(row.tokens)).sum();
                let rows = plans.iter().map(|plan| plan.rows.len() as u64).sum();
                if rows == 0 {
                    return Vec::new();
                }
                let policy = definition.policy.as_deref().and_then(|policy| Name::parse(policy).ok());
                let id = rollout_unit_id(&key.run, &key.rollout, self.attempt, policy.as_ref());
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
fn left_out(plans: &[Arc<PolicyPlan>]) -> impl Iterator<Item = LeftOut> {
    let too_long: u64 = plans.iter().map(|plan| plan.ledger.too_long).sum();
    let no_rows = plans.iter().all(|plan| plan.rows.is_empty());
    let too_long = (too_long > 0).then_some(LeftOut::TooLong(too_long));
    too_long.into_iter().chain(no_rows.then_some(LeftOut::NoRows(1)))
}

/// Bytes of a plan.
fn plan_bytes(plan: &PolicyPlan) -> u64 {
    (size_of::<PolicyPlan>() + size_of_val(&*plan.rows) + size_of_val(&*plan.owners)) as u64
}

impl Sequencer {
    /// Queues the rows of a rollout that was finalised.
    pub(super) fn finalised(&mut self, key: RolloutKey, attempt: u32, now: &FinalisedNow) {
        let (rollout, mut retained) = (&now.rollout, Retained::new(attempt, now));
        // Its run may have been deleted meanwhile.
        if !self.store.holds(&key, &now.finalised) {
            return;
        }
        let is_counted = self.is_counted();
        let Some(run) = self.runs.get_mut(&key.run) else { return };
        if let Some(group) = &retained.group {
            run.shared.watchers.group_changes(group);
            run.groups.change(group, |group| group.closed(&key.rollout, attempt, Member::Finalised));
        }
        figures::finalised(&run.shared.metrics, rollout, retained.plans.iter().map(Arc::as_ref));
        if !is_counted {
            run.ledger.finalised(rollout, &retained.plans);
        }
        retained.key = Some(key.clone());
        let number = run.finalised_count;
        run.finalised_count += 1;
        retained.family = run.groups.family(retained.group.as_ref(), number);
        if let Some(entry) = self.store.entry(&key)
            && let Slot::Live(live) = &mut *entry.slot.lock()
            && let Some(facts) = &mut live.finalised
        {
            facts.number = Some(number);
        }
        let now_ms = self.store.clock.now_ms();
        let mut effects = Vec::new();
        let mut news = Vec::new();
        let gives_to = |name: &str| self.gives_only_to.as_ref().is_none_or(|only| only.contains(name));
        for (name, group) in run.queue.groups_mut().filter(|(name, _)| gives_to(name)) {
            let plans = retained.plans_for(group.definition(), rollout);
            let units = retained.units(&key, group.definition(), (rollout, &plans));
            let name = name.to_owned();
            if !group.definition().ephemeral && !is_counted {
                run.ledger.given(&name, rollout, &plans);
            }
            news.extend(left_out(&plans).map(|what| (name.clone(), what)));
            effects.extend(group.push(number, units, now_ms).into_iter().map(|effect| (name.clone(), effect)));
        }
        let (has_rows, about) = (retained.row_count() > 0, retained.about(&key));
        run.retained.insert(number, retained);
        self.stirred.insert(key.run.clone());
        for (consumer_group, effect) in effects {
            self.queue_effect(&key.run, &consumer_group, effect);
        }
        for (consumer_group, what) in news {
            self.tell_left_out(&key.run, &consumer_group, &about, what);
        }
        self.reconsider(&key.run, number, !has_rows);
    }

    pub(super) fn discarded(
        &mut self,
        tombstone: Tombstone,
        group: Option<&GroupId>,
        discarded: &Discarded,
        calls: u64,
    ) {
        let Tombstone { key, attempt, .. } = &tombstone;
        let reason = match discarded.by {
            DiscardedBy::Harness => EndReason::Harness,
            DiscardedBy::Operator => EndReason::Operator,
            DiscardedBy::Rule => EndReason::from_text(&discarded.reason),
        };
        self.rollout_gone(&key.run, reason, calls);
        let now = match discarded.disposition {
            Disposition::Final | Disposition::Unsaid => Member::Out,
            Disposition::WillRetry => Member::WillRetry,
        };
        let run = self.runs.get_mut(&key.run);
        if let Some(run) = &run {
            run.shared.metrics.rollout_ended(RolloutEnd::Discarded(reason));
            run.shared.watchers.run_changes();
            group.into_iter().for_each(|group| run.shared.watchers.group_changes(group));
        }
        run.and_then(|run| run.groups.change(group?, |group| group.closed(&key.rollout, *attempt, now)));
        self.bury(tombstone);
    }

    /// Makes a consumer group, and gives it what was finalised before it if it wants that. Live and in replay.
    pub(in crate::store) fn make_consumer_group(
        &mut self,
        run_id: &RunId,
        name: &ConsumerGroupId,
        definition: GroupDefinition,
        from_earliest: bool,
        made_at: Position,
    ) {
        let now_ms = self.store.clock.now_ms();
        let Some(run) = self.runs.get_mut(run_id) else { return };
        run.making.remove(name);
        if run.queue.group(name.as_str()).is_some() {
            return;
        }
        let group = run.queue.apply_group(name.as_str(), definition.clone(), made_at.0, now_ms);
        let mut effects = Vec::new();
        if from_earliest {
            for (number, retained) in &run.retained {
                if let Some(key) = &retained.key {
                    // What is left of it without its tokens does for this.
                    let rollout = retained.finalised.now();
                    let plans = retained.plans_for(&definition, &rollout);
                    effects.extend(group.push(*number, retained.units(key, &definition, (&rollout, &plans)), now_ms));
                    if !definition.ephemeral {
                        run.ledger.given(name.as_str(), &rollout, &plans);
                    }
                }
            }
        }
        // An ephemeral one holds nothing back.
        let claims = from_earliest && !definition.ephemeral;
        let taken: Vec<u64> = if claims { run.retained.keys().copied().collect() } else { Vec::new() };
        self.stirred.insert(run_id.clone());
        for effect in effects {
            self.queue_effect(run_id, name.as_str(), effect);
        }
        for number in taken {
            self.reconsider(run_id, number, false);
        }
    }

    /// Makes the consumer groups that a run's settings declare, but for those that are there. Live and in replay.
    pub(super) fn make_declared(&mut self, run: &RunId, settings: &RunSettings, position: Position) {
        if let Some(state) = self.runs.get_mut(run) {
            state.retention.retention_ms = settings.retention_ms;
            self.stirred.insert(run.clone());
        }
        for (name, declared) in &settings.consumer_groups {
            let definition = super::consumers::definition(declared, settings.max_deliveries, false);
            self.make_consumer_group(run, name, definition, declared.start == StartPosition::Earliest, position);
            self.resume_subscriptions(run, name, false);
        }
    }

    /// Does something to units of a consumer group, and takes what comes of it.
    pub(super) fn settle(
        &mut self,
        run_id: &RunId,
        name: &ConsumerGroupId,
        units: &[UnitId],
        settle: impl Fn(&mut ConsumerGroup<u64, UnitRows>, &UnitId) -> Vec<QueueEffect<u64>>,
    ) {
        let Some(group) = self.runs.get_mut(run_id).and_then(|run| run.queue.group_mut(name.as_str())) else { return };
        let effects: Vec<_> = units.iter().flat_map(|unit| settle(group, unit)).collect();
        self.stirred.insert(run_id.clone());
        for effect in effects {
            self.queue_effect(run_id, name.as_str(), effect);
        }
    }

    pub(super) fn queue_effect(&mut self, run: &RunId, consumer_group: &str, effect: QueueEffect<u64>) {
        match effect {
            QueueEffect::SourceSettled { source } | QueueEffect::SourceReopened { source } => {
                self.reconsider(run, source, false);
            }
            QueueEffect::LineOverflowed { units, tokens } => {
                tracing::warn!(%run, consumer_group, units, tokens, "a slow reader of rows was passed over");
                if let Ok(name) = ConsumerGroupId::parse(consumer_group) {
                    self.tell_members(run, &name, |_| ToConsumer::Skipped { units });
                }
            }
        }
    }

    /// Remembers what ended, for as long as its run says and as many as there may be.
    pub(super) fn bury(&mut self, tombstone: Tombstone) {
        let retention_ms = self.runs.get(&tombstone.key.run).map_or(0, |run| run.settings_now().tombstone_retention_ms);
        let expires_ms = self.store.clock.now_ms().saturating_add(retention_ms);
        let bytes = self.bytes_of(&tombstone);
        self.tombstones_held.add(bytes);
        let place = (expires_ms, self.tombstone_count);
        self.needed.buried(tombstone.home, place);
        self.tombstones.insert(place, (tombstone, bytes));
        self.tombstone_count += 1;
        let bytes_max = self.store.memory().tombstones_bytes_max();
        while (self.tombstones.len() > limits::TOMBSTONES_MAX || self.tombstones_held.bytes() > bytes_max)
            && let Some((place, (oldest, bytes))) = self.tombstones.pop_first()
        {
            self.tombstones_held.subtract(bytes);
            self.needed.unburied(oldest.home, place);
            self.forget(oldest);
        }
    }

    /// Bytes that a rollout holds that has ended. Its group is counted as a group still.
    fn bytes_of(&self, Tombstone { key, .. }: &Tombstone) -> u64 {
        let reason = self.store.entry(key).map_or(0, |entry| match &*entry.slot.lock() {
            Slot::Ended(ended, _) => ended.reason.len(),
            Slot::Live(_) | Slot::Removed => 0,
        });
        limits::TOMBSTONE_BYTES + (key.run.as_str().len() + key.rollout.as_str().len() + reason) as u64
    }

    pub(super) fn expire_tombstones(&mut self, now_ms: u64) {
        while let Some(first) = self.tombstones.first_entry() {
            if first.key().0 > now_ms {
                return;
            }
            let (place, (expired, bytes)) = first.remove_entry();
            self.tombstones_held.subtract(bytes);
            self.needed.unburied(expired.home, place);
            self.forget(expired);
        }
    }

    fn forget(&mut self, Tombstone { key, attempt, .. }: Tombstone) {
        let Some(entry) = self.store.entry(&key) else { return };
        let mut slot = entry.slot.lock();
        let group = match &*slot {
            Slot::Ended(ended, _) if ended.attempt == attempt => ended.group.clone(),
            Slot::Ended(..) | Slot::Live(_) | Slot::Removed => return,
        };
        *slot = Slot::Removed;
        drop(slot);
        self.store.rollouts.remove(&key);
        let Some(run) = self.runs.get_mut(&key.run) else { return };
        run.rollouts.remove(&key.rollout);
        if let Some(id) = group
            && run.groups.change(&id, |group| group.forgotten(&key.rollout, attempt)) == Some(true)
        {
            run.groups.remove(&id);
        }
    }

    /// Whether this unit is one of a rollout that was retired: all groups acknowledged it.
    pub(super) fn was_retired(&self, run: &RunId, unit: &UnitId) -> bool {
        let Some((of_run, rollout, attempt)) = crate::ids::unit_source(unit.as_str()) else { return false };
        if of_run != *run {
            return false;
        }
        let Some(entry) = self.store.entry(&RolloutKey { run: of_run, rollout }) else { return false };
        let slot = entry.slot.lock();
        let is_it = |ended: &Ended| ended.outcome == Outcome::Retired && ended.attempt == attempt;
        // What nobody claimed was acknowledged by nobody.
        let was_claimed = |ended: &Ended| ended.reason != RetiredFor::Unclaimed.as_str();
        matches!(&*slot, Slot::Ended(ended, _) if is_it(ended) && was_claimed(ended))
    }
}
