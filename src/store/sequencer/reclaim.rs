//! Giving back the room of records that are not needed any more.
//!
//! A log goes on without its beginning from a *snapshot*: the runs with their settings and consumer groups, written anew when a
//! segment begins. A record is needed while it stands behind the *home* of a rollout: its opening, or the beginning of a copy of it,
//! while it is live or remembered to have ended; of one that has ended also the record that says so once more. So the log is let
//! go of before the newest snapshot that no live rollout's home stands before. Tombstones whose home does are written again first,
//! behind everything, and the log is cut only when that is durable.
//!
//! Reading begins at the first whole snapshot: what stands before it in the same segment is passed over, and so is what is said
//! there and later of rollouts whose opening is gone, because they have ended. A snapshot of what is known already changes nothing.
//!
//! What runs have counted is written behind each snapshot ([`super::totals`]), and the log is let go of only then: what is counted
//! there is what the homes say. Not kept beyond that: the drift of rollouts that have retired, and places in a group whose rollout
//! is forgotten while others of the group are not.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;

use crate::group::{GroupRules, Member};
use crate::ids::{ConsumerGroupId, RunId};
use crate::limits;
use crate::log::{EndedMember, EndedRollout, GroupSnapshot, Position, Record};

use super::super::effect::{Ended, Outcome, Sequenced};
use super::super::{Entry, RolloutKey, Slot};
use super::{RunState, Sequencer, Tombstone};

/// When a tombstone expires, and its number among those that expire then.
pub(super) type TombstonePlace = (u64, u64);

/// Which records are needed.
#[derive(Default)]
pub(in crate::store) struct Needed {
    /// Where the records of live rollouts begin.
    homes: BTreeMap<Position, RolloutKey>,
    /// From where on it is said that rollouts ended.
    tombstones: BTreeSet<(Position, TombstonePlace)>,
    /// Whole and durable snapshots, oldest first.
    snapshots: VecDeque<Position>,
    /// Where the newest snapshot begins, whole or not: the log may be let go of up to there.
    last_begun: Position,
    /// A segment has begun that has no snapshot yet.
    snapshot_is_due: bool,
    /// A snapshot is on its way to the log, and what was counted until then is not behind it yet.
    is_snapshotting: bool,
    /// Tombstones are on their way to the log; it is cut when they are there.
    is_cutting: bool,
}

impl Needed {
    /// The records of a live rollout begin there.
    pub(super) fn opened(&mut self, home: Position, key: &RolloutKey) {
        self.homes.insert(home, key.clone());
    }

    /// No records of a live rollout begin there any more, which is durable or comes before whatever is logged now.
    pub(super) fn ended(&mut self, home: Position) {
        self.homes.remove(&home);
    }

    /// Where the newest snapshot begins, whether it is whole or not.
    pub(super) fn last_begun(&self) -> Position {
        self.last_begun
    }

    /// From there on it is said that this rollout ended.
    pub(super) fn buried(&mut self, home: Position, place: TombstonePlace) {
        self.tombstones.insert((home, place));
    }

    /// That is not needed any more.
    pub(super) fn unburied(&mut self, home: Position, place: TombstonePlace) {
        self.tombstones.remove(&(home, place));
    }

    /// Whether a snapshot, and what was counted by then, is on its way to the log.
    pub(super) fn is_snapshotting(&self) -> bool {
        self.is_snapshotting
    }

    /// A snapshot begins there that is whole and durable.
    pub(in crate::store) fn snapshot(&mut self, begins: Position) {
        self.last_begun = self.last_begun.max(begins);
        self.snapshots.push_back(begins);
    }

    /// The newest snapshot from which all live rollouts can be read; forgets older ones.
    fn beginning(&mut self) -> Option<Position> {
        let first_home = self.homes.first_key_value().map(|(home, _)| *home);
        let serves = |snapshot: &Position| first_home.is_none_or(|home| *snapshot <= home);
        while self.snapshots.get(1).is_some_and(serves) {
            self.snapshots.pop_front();
        }
        self.snapshots.front().copied().filter(serves)
    }

    /// The homes that keep the log from being let go of up to the next snapshot that would give room back, some at a time, and
    /// where that is.
    pub(super) fn in_the_way(
        &self,
        gives_room: impl Fn(Position) -> bool,
    ) -> Option<(Position, Vec<(Position, RolloutKey)>)> {
        let (first_home, _) = self.homes.first_key_value()?;
        // One segment may hold several snapshots, of which the first ones give none.
        let next = self.snapshots.partition_point(|snapshot| snapshot <= first_home || !gives_room(*snapshot));
        let next = self.snapshots.get(next)?;
        let before = self.homes.range(..next).take(limits::LOG_CARRIED_ROLLOUTS);
        Some((*next, before.map(|(home, key)| (*home, key.clone())).collect()))
    }

    /// Tombstones whose home stands before this.
    fn tombstones_before(&self, position: Position) -> Vec<TombstonePlace> {
        self.tombstones.range(..(position, TombstonePlace::default())).map(|(_, place)| *place).collect()
    }
}

impl Sequencer {
    /// A segment of the log has begun.
    pub(super) fn segment_began(&mut self) {
        self.needed.snapshot_is_due = true;
    }

    /// Writes a snapshot if one is due, and nothing of the small state is on its way. Without runs there is nothing to let go of
    /// that matters, and it waits for one.
    pub(super) fn snapshot_if_due(&mut self) {
        if !self.needed.snapshot_is_due || self.needed.is_snapshotting || !self.seeking.is_empty() {
            return;
        }
        let Some((last, _)) = self.runs.last_key_value() else { return };
        if self.runs.values().any(|run| !run.making.is_empty()) {
            return;
        }
        (self.needed.snapshot_is_due, self.needed.is_snapshotting) = (false, true);
        let runs = u32::try_from(self.runs.len()).unwrap_or(u32::MAX);
        let begins = self.log(&Record::SnapshotBegins { runs }, None);
        self.needed.last_begun = begins;
        for (id, run) in &self.runs {
            let is_whole = (id == last).then_some(Sequenced::Snapshot { begins });
            self.log(&run.snapshot(id), is_whole);
        }
    }

    /// Has a snapshot written if the log could be let go of up to an older one: what runs have counted is written with it.
    pub(super) fn ask_for_snapshot_if_useful(&mut self) {
        let log = Arc::clone(self.store.journal.log());
        let useful = self.needed.beginning().is_some_and(|before| log.holds_room_before(before));
        self.needed.snapshot_is_due |= useful && !self.needed.is_cutting && !self.needed.is_snapshotting;
    }

    /// A snapshot is whole and durable.
    pub(super) fn snapshot_is_durable(&mut self, begins: Position) {
        self.needed.snapshot(begins);
        self.write_totals();
        self.needed.is_snapshotting = false;
        self.reclaim();
        self.carry_if_needed();
    }

    /// Has the log let go of what is not needed, once what is needed of it stands behind.
    fn reclaim(&mut self) {
        let Some(before) = self.needed.beginning().filter(|_| !self.needed.is_cutting) else { return };
        if !self.store.journal.log().holds_room_before(before) {
            return;
        }
        self.needed.is_cutting = true;
        self.write_tombstones(before);
        self.store.journal.after_last(Sequenced::Reclaim { before });
    }

    /// What was to stand behind is durable.
    pub(super) fn cut(&mut self, before: Position) {
        self.needed.is_cutting = false;
        self.store.journal.log().truncate_before(before);
        tracing::info!(before = before.0, "the log is let go of up to there");
    }

    /// Writes again how rollouts ended of which that stands before this.
    fn write_tombstones(&mut self, before: Position) {
        let mut by_run: BTreeMap<RunId, Vec<(TombstonePlace, EndedRollout)>> = BTreeMap::new();
        for place in self.needed.tombstones_before(before) {
            let Some((tombstone, _)) = self.tombstones.get(&place) else { continue };
            let (key, home) = (tombstone.key.clone(), tombstone.home);
            match self.ended_rollout(&key, tombstone.attempt) {
                Some(ended) => by_run.entry(key.run).or_default().push((place, ended)),
                // A newer attempt stands there, and will have a tombstone of its own.
                None => {
                    self.needed.unburied(home, place);
                    let (_, bytes) = self.tombstones.remove(&place).unzip();
                    self.tombstones_held.subtract(bytes.unwrap_or(0));
                }
            }
        }
        for (run, ended) in by_run {
            let groups = ended.iter().filter_map(|(_, ended)| ended.group.as_ref().map(|member| &member.group));
            groups.collect::<BTreeSet<_>>().into_iter().for_each(|group| self.repeat_release(&run, group));
            for some in ended.chunks(limits::TOMBSTONES_RECORD_MAX) {
                let rollouts = some.iter().map(|(_, ended)| ended.clone()).collect();
                let home = self.log(&Record::Tombstones { run: run.clone(), rollouts }, None);
                some.iter().for_each(|(place, _)| self.move_tombstone(*place, home));
            }
        }
    }

    fn move_tombstone(&mut self, place: TombstonePlace, home: Position) {
        let Some((tombstone, _)) = self.tombstones.get_mut(&place) else { return };
        self.needed.unburied(tombstone.home, place);
        tombstone.home = home;
        self.needed.buried(home, place);
    }

    /// How this attempt ended, if that is still what is known of its rollout.
    fn ended_rollout(&self, key: &RolloutKey, attempt: u32) -> Option<EndedRollout> {
        let entry = self.store.entry(key)?;
        let Ended { attempt, outcome, reason, is_final, group } = match &*entry.slot.lock() {
            Slot::Ended(ended, _) if ended.attempt == attempt => ended.clone(),
            Slot::Ended(..) | Slot::Live(_) | Slot::Removed => return None,
        };
        let retired = outcome == Outcome::Retired;
        let groups = &self.runs.get(&key.run)?.groups;
        let group = group.map(|id| {
            let group = groups.get(&id);
            let member = group.and_then(|group| group.member(&key.rollout));
            let member = member.unwrap_or(if retired { Member::Finalised } else { Member::Out });
            EndedMember { size: group.and_then(crate::group::Group::size), group: id, member }
        });
        Some(EndedRollout { rollout: key.rollout.clone(), attempt, retired, reason, is_final, group })
    }

    /// A run as it was when the log was let go of. What is known already stands. Only in replay.
    pub(in crate::store) fn replay_run(
        &mut self,
        run: &RunId,
        settings: (u64, Arc<crate::rollout::run_settings::RunSettings>),
        consumer_groups: Vec<GroupSnapshot>,
        position: Position,
    ) {
        if self.runs.contains_key(run) {
            return;
        }
        self.apply_run(run, settings, (position, self.store.unix_ms()));
        if let Some(state) = self.runs.get_mut(run) {
            // Those that the settings declare are among these.
            state.making.clear();
            state.retention.retention_ms = state.settings_now().retention_ms;
        }
        for GroupSnapshot { consumer_group: name, definition, made_at, seek_count, next_step_index } in consumer_groups
        {
            self.make_consumer_group(run, &name, definition, false, made_at);
            let group = self.runs.get_mut(run).and_then(|run| run.queue.group_mut(name.as_str()));
            if let Some(group) = group {
                group.restore_seeks(seek_count, 0, 0, None);
                group.restore_steps(next_step_index);
            }
        }
    }

    /// A rollout ended, as is said again at this position. What is known already stands. Only in replay.
    pub(in crate::store) fn replay_tombstone(&mut self, run: &RunId, ended: EndedRollout, position: Position) {
        let EndedRollout { rollout, attempt, retired, reason, is_final, group } = ended;
        let key = RolloutKey { run: run.clone(), rollout };
        let (now_ms, unix_ms) = (self.store.clock.now_ms(), self.store.unix_ms());
        let Some(state) = self.runs.get_mut(run) else { return };
        let entry = self.store.rollouts.entry(key.clone()).or_insert_with(|| Entry::new(Slot::Removed)).clone();
        let mut slot = entry.slot.lock();
        if !matches!(&*slot, Slot::Removed) {
            return;
        }
        state.rollouts.insert(key.rollout.clone());
        if let Some(EndedMember { group, size, member }) = &group {
            let rules = GroupRules::default();
            state.groups.member_opened(group, (now_ms, unix_ms), (&key.rollout, attempt), rules);
            state.groups.change(group, |group| group.closed(&key.rollout, attempt, *member));
            if let Some(size) = size {
                state.groups.change(group, |group| group.said_size(*size));
            }
        }
        let outcome = if retired { Outcome::Retired } else { Outcome::Discarded };
        let group = group.map(|member| member.group);
        *slot = Slot::Ended(Ended { attempt, outcome, reason, is_final, group }, position);
        drop(slot);
        self.bury(Tombstone { key, attempt, home: position });
    }
}

impl RunState {
    /// It as it is, with the consumer groups that last.
    fn snapshot(&self, run: &RunId) -> Record {
        let lasting = self.queue.groups().filter(|(_, group)| !group.definition().ephemeral);
        let named = lasting.filter_map(|(name, group)| {
            let name = ConsumerGroupId::parse(name).ok()?;
            Some(GroupSnapshot {
                consumer_group: name,
                definition: group.definition().clone(),
                made_at: Position(group.made_at()),
                seek_count: group.seek_count(),
                next_step_index: group.next_step_index(),
            })
        });
        Record::RunSnapshot {
            run: run.clone(),
            settings_version: self.settings.0,
            settings: Arc::clone(&self.settings.1),
            created_unix_ms: self.shared.created_unix_ms,
            consumer_groups: named.collect(),
        }
    }
}
