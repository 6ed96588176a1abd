//! Writing rollouts forward that would hold the log: a copy of all their records behind everything, after which what stands
//! before is not needed.
//!
//! A copy is written in one step under the rollout's lock, so that nothing of the rollout stands between its parts. Reading
//! takes a copy only when it has come to its end: one that a crash has cut comes to nothing. Where the rollout is known already,
//! the copy only says that it has a new home.
//!
//! What lives is written forward in *passes*: one is over when all stands behind where the log ended when it began. The next begins
//! only when so much has ended since that it is worth another one, else a log that is full of what lives would be written anew
//! for ever.
//!
//! A finalised rollout is copied with what its consumer groups have settled. Units of such a rollout stand behind those of
//! rollouts finalised later if the service is started again.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use crate::group::GroupRules;
use crate::ids::{ConsumerGroupId, RolloutRef, RunId};
use crate::limits;
use crate::log::{CopiedUnits, CopyBegins, Dated, Log, Position, Record};
use crate::queue::{ConsumerGroup, History, Place, UnitId};
use crate::rollout::event::RolloutRecord;

use super::super::carry::{Gathered, Reading, Wanted};
use super::super::{Live, RolloutKey, Slot};
use super::retention::Standing;
use super::{RunState, Sequencer};

/// A copy that is being read.
pub(in crate::store) struct Copying {
    begins: Position,
    copy: CopyBegins,
    /// Where its records stand that have come.
    positions: Vec<Position>,
    /// None if the rollout is known anyway.
    records: Option<Vec<(u64, RolloutRecord)>>,
}

/// How far what lives was written forward.
#[derive(Default)]
pub(super) struct Carrying {
    /// Rollouts are being read.
    is_reading: bool,
    /// Where the log ended when the last pass began, and what memory had given back by then. None: there was no pass yet.
    pass: Option<(Position, u64)>,
}

impl Carrying {
    /// Whether what lives there first may be written forward now; begins a pass if it is worth one.
    fn goes_on(&mut self, first_home: Position, last: Position, given_back_bytes: u64, worth_bytes: u64) -> bool {
        match self.pass {
            Some((ends, _)) if first_home <= ends => true,
            Some((_, before)) if given_back_bytes - before < worth_bytes => false,
            Some(_) | None => {
                self.pass = Some((last, given_back_bytes));
                true
            }
        }
    }
}

impl Sequencer {
    /// Has the oldest rollouts read that keep the log from being let go of, if it is filling up.
    pub(super) fn carry_if_needed(&mut self) {
        if self.carrying.is_reading || !self.store.journal.log().is_filling() {
            return;
        }
        let log = Arc::clone(self.store.journal.log());
        let in_the_way = self.needed.in_the_way(|snapshot| log.holds_room_before(snapshot));
        let Some((next, homes)) = in_the_way else { return };
        // What was acknowledged and is kept all the same is not worth writing anew.
        let homes = self.retire_for_room(homes);
        let Some((first_home, _)) = homes.first() else { return };
        let given_back_bytes = self.store.memory().given_back_bytes();
        if !self.carrying.goes_on(*first_home, self.store.journal.last(), given_back_bytes, log.worth_carrying_bytes())
        {
            return;
        }
        let wanted = self.wanted(&*log, homes);
        if !wanted.is_empty() {
            tracing::debug!(
                before = next.0,
                rollouts = wanted.len(),
                "rollouts are in the way of letting go of the log"
            );
            self.carrying.is_reading = self.store.read_back(Reading::Carry(wanted));
        }
    }

    /// What to look for of the rollouts that live there, as far as there may be room for their copies.
    fn wanted(&self, log: &dyn Log, homes: Vec<(Position, RolloutKey)>) -> Vec<Wanted> {
        let mut bytes = 0;
        let mut wanted = Vec::new();
        for (home, key) in homes {
            let Some(entry) = self.store.entry(&key) else { continue };
            let Slot::Live(live) = &*entry.slot.lock() else { continue };
            bytes += live.share.whole_bytes();
            let too_many = !wanted.is_empty() && bytes > limits::LOG_CARRIED_BYTES;
            // Records take more than half of what is made of them, but for short calls; the copy itself is measured.
            if too_many || !log.has_room_for(bytes / 2) {
                break;
            }
            wanted.push(Wanted { key, attempt: live.attempt, home, positions: live.positions.clone() });
        }
        wanted
    }

    /// Writes rollouts forward that were read, unless they have gone on since then.
    pub(super) fn carry(&mut self, gathered: Vec<Gathered>) {
        self.carrying.is_reading = false;
        let mut carried = 0_usize;
        for rollout in gathered {
            carried += usize::from(self.carry_one(rollout));
        }
        tracing::info!(carried, "rollouts were written forward in the log");
        self.ask_for_snapshot_if_useful();
    }

    fn carry_one(&mut self, gathered: Gathered) -> bool {
        // What ends rollouts must find room, whatever else there is: then it is tried again when some have ended.
        if !self.store.journal.log().has_room_for(gathered.bytes()) {
            return false;
        }
        let Gathered { wanted: Wanted { key, attempt, home, positions }, group, opened_unix_ms, frames } = gathered;
        let Some(entry) = self.store.entry(&key) else { return false };
        let mut slot = entry.slot.lock();
        let Slot::Live(live) = &mut *slot else { return false };
        if live.attempt != attempt || live.share.home() != home || live.positions != positions {
            return false;
        }
        let Some(run) = self.runs.get(&key.run) else { return false };
        // What would stand behind a seek that is on its way is what was before it.
        if self.seeking.contains(&key.run) {
            return false;
        }
        let Some(given_to) = given_to(run, live) else { return false };
        let facts = live.rollout.facts();
        let size = facts.group.as_ref().and_then(|group| Some((group.clone(), run.groups.get(group)?.size()?)));
        let begins = CopyBegins {
            reference: RolloutRef { run: key.run.clone(), group, rollout: key.rollout.clone(), attempt },
            settings_version: live.settings_version,
            settings: Arc::clone(&facts.settings),
            opened_unix_ms,
            records: u32::try_from(positions.len()).unwrap_or(u32::MAX),
            given_to,
            finalised: live.finalised.as_ref().and_then(|finalised| finalised.position),
        };
        let begins = Record::RolloutCopyBegins(Box::new(begins));
        // Before the rollout is finalised again it must be known whether its group waits.
        facts.group.iter().for_each(|group| self.repeat_release(&key.run, group));
        if let Some(number) = live.finalised.as_ref().and_then(|finalised| finalised.number) {
            self.repeat_steps(&key.run, number);
        }
        let new_home = self.log(&begins, None);
        // Not collected: that would keep the room of the frames.
        live.positions = Vec::with_capacity(frames.len());
        live.positions.extend(frames.into_iter().map(|frame| self.store.journal.append(frame, None)));
        live.last_position = live.positions.last().copied().unwrap_or(new_home);
        live.share.move_home(new_home);
        self.needed.ended(home);
        self.needed.opened(new_home, &key);
        if let Some((group, size)) = size {
            self.log(&Record::GroupSize { run: key.run.clone(), group, size }, None);
        }
        true
    }
}

/// What consumer groups have of a rollout; none if that is not settled: it was finalised just now, or what ends it or some of its units, or
/// releases one, is on its way to the disk. The copy would stand behind that, and have a rollout come back that has retired.
fn given_to(run: &RunState, live: &Live) -> Option<Vec<CopiedUnits>> {
    let Some(finalised) = &live.finalised else { return Some(Vec::new()) };
    let number = &finalised.number?;
    let retained = run.retained.get(number)?;
    let is_retiring = retained.standing == Standing::Retiring;
    // What its group's release gives to whom is to stand behind the copy, or before it.
    if retained.group.as_ref().and_then(|group| run.groups.kept(group)).is_some_and(|kept| kept.is_deciding) {
        return None;
    }
    // A group that is about to be made will have it, one that expires will not.
    if is_retiring || run.by_hand_underway > 0 || !run.making.is_empty() {
        return None;
    }
    let mut all = Vec::new();
    for (name, group) in run.queue.groups().filter(|(_, group)| !group.definition().ephemeral) {
        let (Ok(consumer_group), Some(units)) = (ConsumerGroupId::parse(name), group.units_of(number)) else {
            continue;
        };
        let mut copied =
            CopiedUnits { consumer_group, acknowledged: Vec::new(), dropped: Vec::new(), histories: Vec::new() };
        for (unit, place) in units {
            let moments = group.history(unit).map(History::moments).unwrap_or_default();
            if !moments.is_empty() {
                copied.histories.push((unit.clone(), moments));
            }
            match place {
                Place::Acknowledged => copied.acknowledged.push(unit.clone()),
                Place::Dropped(reason) => copied.dropped.push((unit.clone(), reason)),
                Place::Parked(_) => return None,
                Place::Frozen { .. } if group.is_step_underway(unit) => return None,
                Place::Waiting | Place::Delayed { .. } | Place::Leased { .. } | Place::Frozen { .. } => {}
            }
        }
        all.push(copied);
    }
    Some(all)
}

impl Sequencer {
    /// A copy of a rollout begins. Only in replay.
    pub(in crate::store) fn replay_copy_begins(&mut self, copy: CopyBegins, position: Position) {
        let key = copy.reference.key();
        let known = self.store.entry(&key).is_some_and(
            |entry| matches!(&*entry.slot.lock(), Slot::Live(live) if live.attempt == copy.reference.attempt),
        );
        let records = (!known).then(Vec::new);
        self.copying.insert(key.clone(), Copying { begins: position, copy, positions: Vec::new(), records });
        self.end_copy_if_whole(&key);
    }

    /// A record of a copy. Only in replay.
    pub(in crate::store) fn replay_copied(
        &mut self,
        key: &RolloutKey,
        position: Position,
        (unix_ms, record): (u64, RolloutRecord),
    ) {
        let Some(copying) = self.copying.get_mut(key) else { return };
        copying.positions.push(position);
        if let Some(records) = &mut copying.records {
            records.push((unix_ms, record));
        }
        self.end_copy_if_whole(key);
    }

    fn end_copy_if_whole(&mut self, key: &RolloutKey) {
        if self.copying.get(key).is_none_or(|copying| copying.positions.len() < copying.copy.records as usize) {
            return;
        }
        let Some(Copying { begins, copy, positions, records }) = self.copying.remove(key) else { return };
        let attempt = copy.reference.attempt;
        if let Some(records) = records {
            self.open_copy(key, begins, copy, records);
        }
        self.rehome(key, attempt, (begins, positions));
    }

    /// Where the record stood first that finalised the rollout whose copy is read, if that is said.
    pub(in crate::store) fn copied_finalised(&self) -> Option<Position> {
        self.copied_finalised
    }

    /// A known rollout's records begin there now.
    fn rehome(&mut self, key: &RolloutKey, attempt: u32, (home, positions): (Position, Vec<Position>)) {
        let Some(entry) = self.store.entry(key) else { return };
        let Slot::Live(live) = &mut *entry.slot.lock() else { return };
        if live.attempt == attempt {
            live.positions = positions;
            self.needed.ended(live.share.home());
            self.needed.opened(home, key);
            live.share.move_home(home);
        }
    }

    /// Opens a rollout from its copy, and gives it to those consumer groups only that had it.
    fn open_copy(&mut self, key: &RolloutKey, begins: Position, copy: CopyBegins, records: Vec<(u64, RolloutRecord)>) {
        let CopyBegins { reference, settings_version, settings, opened_unix_ms, given_to, finalised, .. } = copy;
        if !self.runs.contains_key(&key.run) {
            return;
        }
        self.store.replaying(Some(opened_unix_ms));
        let settings = Some((settings_version, settings));
        if self.open_with(key, &reference, begins, (settings, GroupRules::default())).is_err() {
            return;
        }
        let settled: BTreeMap<_, _> = given_to.into_iter().map(|units| (units.consumer_group.clone(), units)).collect();
        self.gives_only_to = Some(settled.keys().map(|name| name.as_str().to_owned()).collect::<BTreeSet<_>>());
        self.copied_finalised = finalised;
        for (unix_ms, record) in records {
            let RolloutKey { run, rollout } = key.clone();
            let record = Record::Rollout { run, rollout, attempt: reference.attempt, record };
            self.apply_dated(begins, Dated { unix_ms, record });
        }
        (self.gives_only_to, self.copied_finalised) = (None, None);
        for (name, CopiedUnits { acknowledged, dropped, histories, .. }) in settled {
            self.restore_histories(&key.run, &name, histories);
            self.settle(&key.run, &name, &acknowledged, ConsumerGroup::restore_ack);
            for (unit, reason) in dropped {
                self.settle(&key.run, &name, std::slice::from_ref(&unit), |group, unit| group.apply_drop(unit, reason));
            }
        }
    }
}

impl Sequencer {
    /// Gives units of a rollout that is read from its copy the histories that they had.
    fn restore_histories(&mut self, run: &RunId, consumer_group: &ConsumerGroupId, histories: Vec<(UnitId, Vec<u64>)>) {
        let group = self.runs.get_mut(run).and_then(|run| run.queue.group_mut(consumer_group.as_str()));
        let Some(group) = group else { return };
        for (unit, moments) in histories {
            group.restore_history(&unit, History::of_moments(&moments));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_lives_is_written_forward_once_until_enough_has_ended() {
        let mut carrying = Carrying::default();
        let mut goes_on =
            |first_home, last, given_back| carrying.goes_on(Position(first_home), Position(last), given_back, 100);
        assert!(goes_on(1, 50, 0) && goes_on(30, 60, 0) && goes_on(50, 70, 0), "one pass");
        assert!(!goes_on(51, 80, 0) && !goes_on(51, 80, 99), "all was written forward, and little has ended");
        assert!(goes_on(51, 80, 100) && goes_on(80, 90, 100), "another pass");
        assert!(!goes_on(81, 90, 199) && goes_on(81, 90, 200));
    }
}
