//! Finalised rollouts: units for every consumer group; and what is left of those that have ended, a tombstone. What waits for its
//! group's release is in [`super::release`], and how long they are kept between in [`super::retention`].

use std::sync::Arc;

use crate::group::Member;
use crate::ids::{ConsumerGroupId, GroupId, RolloutId, RunId};
use crate::limits;
use crate::log::{Position, RetiredFor};
use crate::queue::{ConsumerGroup, DropReason, GroupDefinition, QueueEffect, UnitId};
use crate::rollout::event::{Discarded, DiscardedBy, Disposition};
use crate::rollout::run_settings::{RunSettings, StartPosition};
use crate::telemetry::{EndReason, RolloutEnd};

use super::super::effect::{Ended, FinalisedNow, Outcome};
use super::super::{RolloutKey, Slot, figures};
use super::news::About;
use super::release::Gift;
use super::units::left_out;
use super::{LeftOut, Retained, Sequencer, ToConsumer, Tombstone, UnitRows};

impl Sequencer {
    /// Queues the rows of a rollout that was finalised, unless they wait for its group's release.
    pub(super) fn finalised(&mut self, key: RolloutKey, attempt: u32, now: &FinalisedNow) {
        let (rollout, mut retained) = (&now.rollout, Retained::new(attempt, now));
        let group = retained.group.clone();
        // Its run may have been deleted meanwhile.
        if !self.store.holds(&key, &now.finalised) {
            return;
        }
        let is_counted = self.is_counted();
        let Some(run) = self.runs.get_mut(&key.run) else { return };
        let number = run.finalised_count;
        run.finalised_count += 1;
        if let Some(group) = &retained.group {
            run.shared.watchers.group_changes(group);
            let reward = rollout.facts().reward.as_ref().map_or(0.0, |reward| reward.value);
            run.groups.change(group, |group| group.finalised(&key.rollout, attempt, reward));
            retained.is_grouped = run.groups.get(group).is_some_and(|group| group.rules().are_released());
            if retained.is_grouped {
                run.groups.retains(group, &key.rollout, Some(number));
            }
        }
        figures::finalised(&run.shared.metrics, rollout, retained.plans.iter().map(Arc::as_ref));
        if !is_counted {
            run.ledger.finalised(rollout, &retained.plans);
        }
        retained.key = Some(key.clone());
        retained.family = run.groups.family(retained.group.as_ref(), number);
        run.retained.insert(number, retained);
        self.has_number(&key, number);
        group.iter().for_each(|group| self.is_held_at_first(&key.run, group, number));
        let gives_to = self.gives_only_to.clone();
        let gives_to = |name: &str| gives_to.as_ref().is_none_or(|only| only.contains(name));
        self.give(&key.run, &[number], |name, _| gives_to(name));
        self.stirred.insert(key.run.clone());
        self.reconsider(&key.run, number);
    }

    /// A finalised rollout is known by this number from now on.
    pub(super) fn has_number(&self, key: &RolloutKey, number: u64) {
        if let Some(entry) = self.store.entry(key)
            && let Slot::Live(live) = &mut *entry.slot.lock()
            && let Some(facts) = &mut live.finalised
        {
            facts.number = Some(number);
        }
    }

    /// Gives these finalised rollouts, in this order, to consumer groups, as far as they are to be given it now; counts what they will never be
    /// given.
    pub(super) fn give(&mut self, run_id: &RunId, numbers: &[u64], to: impl Fn(&str, &GroupDefinition) -> bool) {
        let now_ms = self.store.clock.now_ms();
        let (copied, noted_through) = (self.copied_finalised, self.noted_through);
        let Some(run) = self.runs.get_mut(run_id) else { return };
        let (mut effects, mut news) = (Vec::new(), Vec::new());
        for number in numbers {
            let Some(retained) = run.retained.get(number) else { continue };
            let Some(key) = &retained.key else { continue };
            // What is left of it without its tokens does for this.
            let rollout = retained.finalised.now();
            let kept = retained.group.as_ref().and_then(|group| run.groups.kept(group));
            for (name, group) in run.queue.groups_mut().filter(|(name, group)| to(name, group.definition())) {
                let definition = group.definition();
                let gift = Gift::of(kept, (&key.rollout, retained.attempt), definition.unit);
                let (reason, given_at) = match gift {
                    Gift::Later => continue,
                    Gift::Units(given_at) => (None, given_at),
                    Gift::Never(reason, given_at) => (Some(reason), given_at),
                };
                let plans = retained.plans_for(definition, &rollout);
                // What is read from its copy may have been counted by the last snapshot.
                let is_counted = copied.is_some_and(|finalised| finalised.max(given_at) <= noted_through);
                if !definition.ephemeral && !is_counted {
                    run.ledger.given(name, &rollout, &plans);
                }
                if let Some(reason) = reason {
                    let units = retained.new_units(key, definition, (&rollout, &plans));
                    if reason == DropReason::Late {
                        news.push((name.to_owned(), About::of(&retained.about(key)), LeftOut::Late(1)));
                    }
                    group.count_dropped(&units, reason);
                    continue;
                }
                let units = retained.units(key, definition, (&rollout, &plans));
                let about = || About::of(&retained.about(key));
                news.extend(left_out(&plans).map(|what| (name.to_owned(), about(), what)));
                let pushed = group.push(*number, units, now_ms);
                effects.extend(pushed.into_iter().map(|effect| (name.to_owned(), effect)));
            }
        }
        for (consumer_group, effect) in effects {
            self.queue_effect(run_id, &consumer_group, effect);
        }
        for (consumer_group, about, what) in news {
            self.tell_left_out(run_id, &consumer_group, &about, what);
        }
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
        if let (Some(run), Some(group)) = (run, group) {
            run.groups.change(group, |group| group.closed(&key.rollout, *attempt, now));
            // It may be whole without this one.
            self.stirred.insert(key.run.clone());
        }
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
        run.queue.apply_group(name.as_str(), definition.clone(), made_at.0, now_ms);
        self.stirred.insert(run_id.clone());
        if !from_earliest {
            return;
        }
        let all: Vec<u64> = run.retained.keys().copied().collect();
        self.give(run_id, &all, |to, _| to == name.as_str());
        // An ephemeral one holds nothing back.
        if !definition.ephemeral {
            all.into_iter().for_each(|number| self.reconsider(run_id, number));
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
                self.reconsider(run, source);
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

    /// Whether this unit is one of a rollout or a group that was retired: all consumer groups acknowledged it.
    pub(super) fn was_retired(&self, run: &RunId, unit: &UnitId) -> bool {
        let Some((of_run, rollout, attempt)) = crate::ids::unit_source(unit.as_str()) else {
            return self.group_was_retired(run, unit) || self.step_was_forgotten(run, unit);
        };
        if of_run != *run {
            return false;
        }
        let Some(entry) = self.store.entry(&RolloutKey { run: of_run, rollout }) else { return false };
        let slot = entry.slot.lock();
        let is_it = |ended: &Ended| ended.outcome == Outcome::Retired && ended.attempt == attempt;
        // What nobody claimed was acknowledged by nobody.
        let never = [RetiredFor::Unclaimed, RetiredFor::Late, RetiredFor::GroupDropped];
        let was_claimed = |ended: &Ended| never.iter().all(|reason| ended.reason != reason.as_str());
        matches!(&*slot, Slot::Ended(ended, _) if is_it(ended) && was_claimed(ended))
    }

    fn group_was_retired(&self, run_id: &RunId, unit: &UnitId) -> bool {
        let Some((of_run, group)) = crate::ids::unit_group(unit.as_str()) else { return false };
        let Some(run) = self.runs.get(run_id).filter(|_| of_run == *run_id) else { return false };
        let Some(kept) = run.groups.kept(&group) else { return false };
        let was_given_out = kept.group.release().is_some_and(|release| release.dropped().is_none());
        // A late member was never in it, and may end after it.
        let is_in_it = |(rollout, number): (&RolloutId, &u64)| {
            run.retained.get(number).is_some_and(|retained| kept.stays_together(rollout, retained.attempt))
        };
        was_given_out && !kept.retained.iter().any(is_in_it)
    }
}
