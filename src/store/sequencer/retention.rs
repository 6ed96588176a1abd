//! How long finalised rollouts are kept, and consumer groups that nobody subscribes to.
//!
//! A finalised rollout is *held* while a consumer group has not settled its units, *settled* when all that were given it have, and
//! *unclaimed* when none was. What is settled retires at once if its run keeps nothing longer: that follows from the record that
//! settles it. Whatever a clock or a want of room decides is a record of its own first, and comes to nothing if the rollout is held
//! again by then. A member of a group that is not released is held; of one that was given out it ends with the others, by such a
//! record. Times are those of the clock and start afresh with the process: what passes while the service is down ends nothing.

use std::collections::BTreeSet;
use std::sync::Arc;

use crate::ids::{ConsumerGroupId, GroupId, RolloutId, RunId};
use crate::limits;
use crate::log::{Record, RetiredFor};
use crate::queue::Queue;
use crate::rollout::run_settings::RunSettings;
use crate::telemetry::RolloutEnd;

use super::super::effect::{Ended, Outcome, Sequenced};
use super::super::{RolloutKey, Slot};
use super::release::Gift;
use super::{Retained, RunState, Sequencer, Tombstone, UnitRows};

/// Where a finalised rollout stands with those who might want it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Standing {
    /// A consumer group has not settled it.
    #[default]
    Held,
    /// All that were given it have, since then.
    Settled {
        /// Milliseconds of the clock.
        since_ms: u64,
    },
    /// No consumer group was given it, since then.
    Unclaimed {
        /// Milliseconds of the clock.
        since_ms: u64,
        /// What it takes.
        bytes: u64,
    },
    /// A record that ends it is on its way.
    Retiring,
}

/// The finalised rollouts of a run that wait for their end, by number.
#[derive(Default)]
pub(in crate::store) struct Retention {
    /// How long settled ones stay, as the records say that are applied.
    pub(super) retention_ms: u64,
    settled: BTreeSet<(u64, u64)>,
    unclaimed: BTreeSet<(u64, u64)>,
    unclaimed_bytes: u64,
    /// Consumer groups of which it was said that they will expire soon.
    warned: BTreeSet<ConsumerGroupId>,
    /// When it was said last that rollouts end which nobody wanted, and how many have since then.
    said_unclaimed_ms: Option<u64>,
    unclaimed_unsaid: usize,
}

/// How often that is said.
const UNCLAIMED_SAID_EVERY_MS: u64 = 60_000;

/// The last part of the time that a consumer group may be without a subscription, in which it is said that it will expire: a tenth.
const WARNED_PART: u64 = 10;

impl Retention {
    /// Somebody has subscribed to a consumer group.
    pub(super) fn is_not_idle(&mut self, consumer_group: &ConsumerGroupId) {
        self.warned.remove(consumer_group);
    }

    fn put(&mut self, number: u64, standing: &mut Standing, now: Standing) {
        match *standing {
            Standing::Settled { since_ms } => drop(self.settled.remove(&(since_ms, number))),
            Standing::Unclaimed { since_ms, bytes } => {
                self.unclaimed.remove(&(since_ms, number));
                self.unclaimed_bytes -= bytes;
            }
            Standing::Held | Standing::Retiring => {}
        }
        match now {
            Standing::Settled { since_ms } => drop(self.settled.insert((since_ms, number))),
            Standing::Unclaimed { since_ms, bytes } => {
                self.unclaimed.insert((since_ms, number));
                self.unclaimed_bytes += bytes;
            }
            Standing::Held | Standing::Retiring => {}
        }
        *standing = now;
    }

    /// When the first of them ends.
    fn next_deadline_ms(&self, settings: &RunSettings) -> Option<u64> {
        let first = |of: &BTreeSet<(u64, u64)>, lasts_ms: u64| {
            of.first().map(|(since_ms, _)| since_ms.saturating_add(lasts_ms))
        };
        let too_many = self.has_too_much(settings).then_some(0);
        let settled = first(&self.settled, self.retention_ms);
        settled.into_iter().chain(first(&self.unclaimed, settings.unclaimed_retention_ms)).chain(too_many).min()
    }

    /// Says that rollouts end that nobody wanted, now and then.
    fn warn_of_unclaimed(&mut self, run: &RunId, rollouts: usize, now_ms: u64) {
        self.unclaimed_unsaid += rollouts;
        if self.said_unclaimed_ms.is_none_or(|said_ms| now_ms.saturating_sub(said_ms) >= UNCLAIMED_SAID_EVERY_MS) {
            tracing::warn!(%run, rollouts = self.unclaimed_unsaid, "rollouts end that no consumer group was given");
            (self.said_unclaimed_ms, self.unclaimed_unsaid) = (Some(now_ms), 0);
        }
    }

    fn has_too_much(&self, settings: &RunSettings) -> bool {
        settings.unclaimed_retention_bytes.is_some_and(|bytes| self.unclaimed_bytes > bytes)
    }

    /// Those that end by now, a bounded number at a time.
    fn due(&self, settings: &RunSettings, now_ms: u64) -> [(RetiredFor, Vec<u64>); 2] {
        let first = |of: &BTreeSet<(u64, u64)>, lasts_ms: u64| -> Vec<u64> {
            let due = of.iter().take_while(|(since_ms, _)| since_ms.saturating_add(lasts_ms) <= now_ms);
            due.take(limits::RETIRED_AT_ONCE).map(|(_, number)| *number).collect()
        };
        let mut unclaimed = first(&self.unclaimed, settings.unclaimed_retention_ms);
        if unclaimed.is_empty() && self.has_too_much(settings) {
            // One at a time: each gives back as much as it takes.
            unclaimed.extend(self.unclaimed.first().map(|(_, number)| *number));
        }
        [(RetiredFor::Retention, first(&self.settled, self.retention_ms)), (RetiredFor::Unclaimed, unclaimed)]
    }
}

/// Whether a consumer group that lasts holds a rollout back, and whether one was given it.
fn held_and_known(queue: &Queue<u64, UnitRows>, number: u64) -> (bool, bool) {
    let lasting = || queue.groups().map(|(_, group)| group).filter(|group| !group.definition().ephemeral);
    let is_held = lasting().any(|group| group.holds(&number) || group.has_undeliverable(&number));
    (is_held, lasting().any(|group| group.knows(&number)))
}

/// Whether a finalised rollout ends with others of its group only.
fn stays_together(run: &RunState, member: &Retained) -> bool {
    let kept = member.group.as_ref().filter(|_| member.is_grouped).and_then(|group| run.groups.kept(group));
    let of = |key: &RolloutKey| kept.is_some_and(|kept| kept.stays_together(&key.rollout, member.attempt));
    member.key.as_ref().is_some_and(of)
}

/// Whether some consumer group that lasts will never be given a finalised rollout, for its group's sake.
fn is_kept_from_somebody(run: &RunState, retained: &Retained) -> bool {
    let kept = retained.group.as_ref().and_then(|group| run.groups.kept(group));
    let Some(key) = retained.key.as_ref().filter(|_| kept.is_some()) else { return false };
    let mut lasting =
        run.queue.groups().map(|(_, group)| group.definition()).filter(|definition| !definition.ephemeral);
    lasting.any(|of| matches!(Gift::of(kept, (&key.rollout, retained.attempt), of.unit), Gift::Never(..)))
}

/// Whether a finalised rollout stays since another of its group does.
fn is_held_by_others(run: &RunState, member: &Retained) -> bool {
    let kept = member.group.as_ref().and_then(|group| run.groups.kept(group));
    kept.is_some_and(|kept| !kept.held.is_empty()) && stays_together(run, member)
}

/// These finalised rollouts, and those that end with them.
fn with_their_groups(run: &RunState, numbers: &[u64]) -> Vec<u64> {
    let (mut all, mut groups) = (Vec::with_capacity(numbers.len()), BTreeSet::new());
    for number in numbers {
        let Some(retained) = run.retained.get(number) else { continue };
        let group = retained.group.as_ref().filter(|_| stays_together(run, retained));
        let Some(kept) = group.and_then(|group| run.groups.kept(group)) else {
            all.push(*number);
            continue;
        };
        if groups.insert(kept.family) {
            let member = |number: &&u64| run.retained.get(number).is_some_and(|member| stays_together(run, member));
            all.extend(kept.retained.values().filter(member));
        }
    }
    all
}

impl Retained {
    /// Whether its rows are to be acknowledged still.
    pub(super) fn is_due(&self) -> bool {
        match self.standing {
            Standing::Held | Standing::Unclaimed { .. } => true,
            Standing::Settled { .. } | Standing::Retiring => false,
        }
    }
}

impl RunState {
    /// When there is something to do for it, if nothing stirs it.
    pub(super) fn next_deadline_ms(&self) -> Option<u64> {
        let (queues, settings) = (self.queue.next_deadline_ms(), self.settings_now());
        let warning_ms = settings.consumer_group_idle_expiry_ms / WARNED_PART;
        let next_ms = |(expires_ms, name): (u64, ConsumerGroupId)| {
            if self.retention.warned.contains(&name) { expires_ms } else { expires_ms.saturating_sub(warning_ms) }
        };
        let expiry = self.expiries().map(next_ms).min();
        let groups = self.groups.next_deadline_ms();
        queues.into_iter().chain(self.retention.next_deadline_ms(settings)).chain(expiry).chain(groups).min()
    }

    /// When consumer groups expire that nobody subscribes to.
    fn expiries(&self) -> impl Iterator<Item = (u64, ConsumerGroupId)> {
        // Asked at each turn of a run: a group with consumers costs nothing.
        let idle = self.queue.groups().filter(|(_, group)| group.idle_since_ms().is_some());
        idle.filter_map(|(name, _)| {
            let name = ConsumerGroupId::parse(name).ok()?;
            Some((self.expires_ms(&name)?, name))
        })
    }

    /// When a consumer group expires; none if it does not as it is, or is about to.
    pub(super) fn expires_ms(&self, name: &ConsumerGroupId) -> Option<u64> {
        let group = self.queue.group(name.as_str()).filter(|group| !group.definition().ephemeral)?;
        let settings = self.settings_now();
        let idle_since_ms =
            group.idle_since_ms().filter(|_| !settings.requires(name) && !self.making.contains(name))?;
        Some(idle_since_ms.saturating_add(settings.consumer_group_idle_expiry_ms))
    }
}

impl Sequencer {
    /// Looks at a finalised rollout anew: who holds it. One that nobody does retires, now or later; one without rows has nothing to
    /// wait for. Members of a released group end together.
    pub(super) fn reconsider(&mut self, run_id: &RunId, number: u64) {
        let Some(run) = self.runs.get_mut(run_id) else { return };
        let Some(retained) = run.retained.get(&number) else { return };
        let grouped = retained.group.clone().filter(|_| retained.is_grouped).zip(retained.key.as_ref());
        if let Some((group, key)) = grouped
            && let Some(kept) = run.groups.kept(&group)
        {
            let Some(release) = kept.group.release() else { return };
            if kept.stays_together(&key.rollout, retained.attempt) {
                return self.reconsider_group(run_id, &group, number);
            }
            if kept.group.rules().hold_all() {
                let is_late = !release.counts(&key.rollout, retained.attempt);
                return self.retire(run_id, number, if is_late { RetiredFor::Late } else { RetiredFor::GroupDropped });
            }
        }
        let (is_held, is_known) = held_and_known(&run.queue, number);
        // Whoever will never be given it has been told so.
        let is_known = is_known || is_kept_from_somebody(run, retained);
        let without_rows = retained.row_count() == 0;
        if !is_held && (without_rows || (is_known && run.retention.retention_ms == 0)) {
            return self.retire(run_id, number, RetiredFor::Retention);
        }
        self.stands(run_id, number, is_held, is_known);
    }

    /// The same for a member of a group that was given out: it is held while another is. That they end is a record of its own, by
    /// the clock, though their run keeps nothing longer: a log that begins in the middle may lack some of them, and what settles the
    /// last of those.
    fn reconsider_group(&mut self, run_id: &RunId, group: &GroupId, number: u64) {
        let Some(run) = self.runs.get_mut(run_id) else { return };
        let (is_held, is_known) = held_and_known(&run.queue, number);
        let Some(kept) = run.groups.kept_mut(group) else { return };
        let was_held = !kept.held.is_empty();
        if is_held {
            kept.held.insert(number);
        } else {
            kept.held.remove(&number);
        }
        let now_held = !kept.held.is_empty();
        if was_held && now_held {
            return self.stands(run_id, number, true, true);
        }
        let members: Vec<u64> = kept.retained.values().copied().collect();
        let members = || members.iter().filter_map(|number| Some((number, run.retained.get(number)?)));
        let has_rows = members().any(|(_, member)| member.row_count() > 0);
        let together: Vec<u64> = members().filter(|(_, member)| stays_together(run, member)).map(|(n, _)| *n).collect();
        for number in together {
            self.stands(run_id, number, now_held, is_known || !has_rows);
        }
    }

    /// A finalised rollout stands so from now on.
    fn stands(&mut self, run_id: &RunId, number: u64, is_held: bool, is_known: bool) {
        let now_ms = self.store.clock.now_ms();
        let Some(run) = self.runs.get_mut(run_id) else { return };
        let Some(retained) = run.retained.get_mut(&number) else { return };
        let standing = match (is_held, is_known, retained.standing) {
            (true, _, _) => Standing::Held,
            (false, true, Standing::Settled { since_ms }) => Standing::Settled { since_ms },
            (false, true, _) => Standing::Settled { since_ms: now_ms },
            (false, false, Standing::Unclaimed { since_ms, bytes }) => Standing::Unclaimed { since_ms, bytes },
            (false, false, _) => Standing::Unclaimed { since_ms: now_ms, bytes: retained.share.whole_bytes() },
        };
        run.retention.put(number, &mut retained.standing, standing);
        self.stirred.insert(run_id.clone());
    }

    /// Lets go of a finalised rollout; what is left is a tombstone.
    fn retire(&mut self, run_id: &RunId, number: u64, reason: RetiredFor) {
        let Some(run) = self.runs.get_mut(run_id) else { return };
        let Some(mut retained) = run.retained.remove(&number) else { return };
        run.retention.put(number, &mut retained.standing, Standing::Held);
        let Retained { key: Some(key), attempt, group, share, .. } = retained else { return };
        let home = share.home();
        self.needed.ended(home);
        group.iter().for_each(|group| run.groups.retains(group, &key.rollout, None));
        run.queue.forget_source(&number);
        run.shared.metrics.rollout_ended(match reason {
            RetiredFor::Retention | RetiredFor::Room => RolloutEnd::Retired,
            RetiredFor::Unclaimed => RolloutEnd::Unclaimed,
            RetiredFor::Late => RolloutEnd::Late,
            RetiredFor::GroupDropped => RolloutEnd::GroupDropped,
        });
        run.ledger.retired_rollouts += 1;
        run.unclaimed_ended += u64::from(reason == RetiredFor::Unclaimed);
        if let Some(entry) = self.store.entry(&key) {
            let mut slot = entry.slot.lock();
            run.shared.watchers.rollout_changes(&key.rollout, group.as_ref());
            // Where retiring is no record of its own, it comes after all that were there before it.
            let position = self.store.journal.last();
            let reason = reason.as_str().to_owned();
            let ended = Ended { attempt, outcome: Outcome::Retired, reason, is_final: true, group: group.clone() };
            *slot = Slot::Ended(ended, position);
        }
        self.bury(Tombstone { key, attempt, home });
    }

    /// Ends what a clock ends in a run: rollouts that were kept long enough, consumer groups that nobody subscribes to.
    pub(super) fn tick_retention(&mut self, run_id: &RunId, now_ms: u64) {
        let Some(run) = self.runs.get_mut(run_id) else { return };
        let settings = Arc::clone(run.settings_now());
        let due = run.retention.due(&settings, now_ms);
        let warned_ms = now_ms.saturating_add(settings.consumer_group_idle_expiry_ms / WARNED_PART);
        let (expired, soon): (Vec<_>, Vec<_>) = run
            .expiries()
            .filter(|(expires_ms, _)| *expires_ms <= warned_ms)
            .partition(|(expires_ms, _)| *expires_ms <= now_ms);
        for (expires_ms, consumer_group) in soon {
            let seconds = (expires_ms - now_ms) / 1000;
            if run.retention.warned.insert(consumer_group.clone()) {
                tracing::warn!(run = %run_id, %consumer_group, "nobody subscribes to a consumer group; it expires in {seconds} s");
            }
        }
        for (reason, numbers) in due {
            self.begin_retiring(run_id, &numbers, reason);
        }
        for (_, consumer_group) in expired {
            tracing::warn!(run = %run_id, %consumer_group, "a consumer group expires: nobody has subscribed for long");
            let Some(run) = self.runs.get_mut(run_id) else { return };
            run.making.insert(consumer_group.clone());
            let (run, of_group) = (run_id.clone(), consumer_group.clone());
            let record = Record::ConsumerGroupExpired { run: run.clone(), consumer_group };
            self.log(&record, Some(Sequenced::ConsumerGroupExpired { run, consumer_group: of_group }));
        }
    }

    /// Logs that these are not kept any longer; they end when that is durable.
    fn begin_retiring(&mut self, run_id: &RunId, numbers: &[u64], reason: RetiredFor) {
        // A seek that is on its way was judged by what there was.
        if self.seeking.contains(run_id) {
            return;
        }
        let now_ms = self.store.clock.now_ms();
        let Some(run) = self.runs.get_mut(run_id) else { return };
        let mut rollouts: Vec<(RolloutId, u32)> = Vec::new();
        for number in with_their_groups(run, numbers) {
            let Some(retained) = run.retained.get_mut(&number) else { continue };
            if retained.standing == Standing::Retiring {
                continue;
            }
            run.retention.put(number, &mut retained.standing, Standing::Retiring);
            rollouts.extend(retained.key.as_ref().map(|key| (key.rollout.clone(), retained.attempt)));
        }
        if rollouts.is_empty() {
            return;
        }
        if reason == RetiredFor::Unclaimed {
            run.retention.warn_of_unclaimed(run_id, rollouts.len(), now_ms);
        }
        let record = Record::RolloutsRetired { run: run_id.clone(), rollouts: rollouts.clone(), reason };
        self.log(&record, Some(Sequenced::RolloutsRetired { run: run_id.clone(), rollouts, reason }));
    }

    /// These are not kept any longer, but for those that are held again. Live and in replay.
    pub(super) fn rollouts_retired(&mut self, run_id: &RunId, rollouts: Vec<(RolloutId, u32)>, reason: RetiredFor) {
        for (rollout, attempt) in rollouts {
            let key = RolloutKey { run: run_id.clone(), rollout };
            let Some(number) = self.number_of(&key, attempt) else { continue };
            let Some(run) = self.runs.get_mut(run_id) else { return };
            let (is_held, is_known) = held_and_known(&run.queue, number);
            let is_held = is_held || run.retained.get(&number).is_some_and(|member| is_held_by_others(run, member));
            if is_held || (is_known && reason == RetiredFor::Unclaimed) {
                self.stands(run_id, number, is_held, is_known);
                self.reconsider(run_id, number);
            } else {
                self.retire(run_id, number, reason);
            }
        }
    }

    /// The number of a finalised rollout.
    pub(super) fn number_of(&self, key: &RolloutKey, attempt: u32) -> Option<u64> {
        let entry = self.store.entry(key)?;
        match &*entry.slot.lock() {
            Slot::Live(live) if live.attempt == attempt => live.finalised.as_ref()?.number,
            Slot::Live(_) | Slot::Ended(..) | Slot::Removed => None,
        }
    }

    /// A consumer group is not there any more; what only it held is held by nobody. Live and in replay.
    pub(super) fn consumer_group_expired(&mut self, run_id: &RunId, name: &ConsumerGroupId) {
        let Some(run) = self.runs.get_mut(run_id) else { return };
        run.making.remove(name);
        let Some(group) = run.queue.remove_group(name.as_str()) else { return };
        run.ledger.consumer_groups.remove(name.as_str());
        run.retention.warned.remove(name);
        let held: Vec<u64> = group.sources().copied().collect();
        for number in held {
            if let Some(retained) = self.runs.get(run_id).and_then(|run| run.retained.get(&number)) {
                retained.give_units_back(group.definition());
            }
            self.reconsider(run_id, number);
        }
        self.stirred.insert(run_id.clone());
        self.subscribe_again(run_id, name);
    }

    /// What of these rollouts is acknowledged and kept all the same ends, for its room is needed. Gives the others.
    pub(super) fn retire_for_room<T>(&mut self, rollouts: Vec<(T, RolloutKey)>) -> Vec<(T, RolloutKey)> {
        let mut others = Vec::new();
        for (about, key) in rollouts {
            let entry = self.store.entry(&key);
            let number = entry.and_then(|entry| match &*entry.slot.lock() {
                Slot::Live(live) => live.finalised.as_ref()?.number,
                Slot::Ended(..) | Slot::Removed => None,
            });
            let retained = |number| self.runs.get(&key.run)?.retained.get(&number);
            match number.and_then(|number| Some((number, retained(number)?.standing))) {
                Some((number, Standing::Settled { .. })) => {
                    self.begin_retiring(&key.run, &[number], RetiredFor::Room);
                }
                // Its end is on its way.
                Some((_, Standing::Retiring)) => {}
                Some((_, Standing::Held | Standing::Unclaimed { .. })) | None => others.push((about, key)),
            }
        }
        others
    }

    /// While memory is nearly short, lets go of what is acknowledged and kept all the same, the oldest of each run first.
    pub(super) fn retire_if_memory_is_short(&mut self) {
        if !self.store.memory().is_above(limits::MEMORY_RETIRE_PERCENT) {
            return;
        }
        let runs: Vec<RunId> = self.runs.keys().cloned().collect();
        for id in runs {
            let Some(run) = self.runs.get(&id) else { continue };
            // An eighth at a time.
            let most = run.retention.settled.len() / 8;
            let most = most.clamp(limits::RETIRED_AT_ONCE, limits::RETIRED_FOR_MEMORY_AT_ONCE);
            let oldest: Vec<u64> = run.retention.settled.iter().take(most).map(|(_, number)| *number).collect();
            self.begin_retiring(&id, &oldest, RetiredFor::Room);
        }
    }
}
