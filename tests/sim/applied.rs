//! What a consumer group has applied and kept in its checkpoint: rows by their ids, each once, and which units were acknowledged.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use hedgerow::queue::UnitId;
use hedgerow::rpc::convert::parts::UnitParts;
use hedgerow::store::Store;
use hedgerow::store::sequencer::{AckOutcome, UnitDelivery};

use crate::service::{Row, Unit};

/// What survives the death of the group's members.
#[derive(Default)]
pub(crate) struct Applied {
    pub(crate) rows: BTreeMap<String, Row>,
    /// Units whose rows are all in the checkpoint, with the member that has each.
    pub(crate) units: BTreeMap<String, usize>,
    /// Units of which it was answered that they are acknowledged, or dropped by hand: how many were before.
    settled: BTreeMap<String, usize>,
    /// How many were settled, ever.
    settled_count: usize,
    /// Units that were acknowledged and are not any more, for the group was sought: how often each was asked to be acknowledged since.
    undone: BTreeMap<String, usize>,
    /// Whether that seek has come to pass for sure.
    is_undone: bool,
    /// Units of which it was asked that they are acknowledged, ever.
    asked: BTreeSet<String>,
    /// How often the group was sought, or may have been.
    pub(crate) seeks: usize,
    /// Units that somebody asked to drop by hand.
    pub(crate) drop_asked: BTreeSet<String>,
}

/// What was asked of units, each with whether it was known to be settled.
#[derive(Debug)]
pub(crate) struct Ask {
    gives_back: bool,
    /// It says that the units were given out before the last seek.
    is_old: bool,
    units: Vec<(String, bool)>,
}

/// The rows of a unit, from the messages that a trainer would be sent; none if its rollout has ended.
pub(crate) async fn gather(store: &Store, delivery: UnitDelivery) -> Result<Option<Unit>, String> {
    let mut unit = Unit::default();
    let mut whole = false;
    let members: Vec<_> = delivery.rows.iter().map(|rows| (rows.about.key(), Arc::clone(&rows.finalised))).collect();
    let mut parts = UnitParts::of(delivery);
    while !parts.are_over() {
        if let Some(part) = parts.next_padding() {
            whole = part.last;
            unit.take(part);
            continue;
        }
        let Some((key, finalised)) = parts.rollout().and_then(|rollout| members.get(rollout)) else { break };
        let rollout = store.with_tokens(key, finalised).await.map_err(|refusal| refusal.to_string())?;
        let Some(rollout) = rollout else { return Ok(None) };
        let Some(part) = parts.next_part(&rollout) else { break };
        whole = part.last;
        unit.take(part);
    }
    if whole { Ok(Some(unit)) } else { Err("it has no last part".to_owned()) }
}

impl Applied {
    /// How many units are settled.
    pub(crate) fn settled_count(&self) -> usize {
        self.settled_count
    }

    /// Those that are known to be settled.
    pub(crate) fn settled(&self) -> &BTreeMap<String, usize> {
        &self.settled
    }

    /// Units of which it was asked that they are acknowledged.
    pub(crate) fn asked(&self) -> BTreeSet<String> {
        self.asked.clone()
    }

    /// The group is about to be sought to a checkpoint, before which only these had been asked to be acknowledged: then all others
    /// are not.
    pub(crate) fn undo_all_but(&mut self, asked: &BTreeSet<String>) {
        self.is_undone = false;
        self.undone = self.units.keys().filter(|unit| !asked.contains(*unit)).map(|unit| (unit.clone(), 0)).collect();
    }

    /// It has been sought so.
    pub(crate) fn is_undone(&mut self) {
        self.is_undone = true;
    }

    /// The group was sought, or may have been: only these are known to be settled still.
    pub(crate) fn sought(&mut self, stays: impl Fn(&str) -> bool) {
        self.seeks += 1;
        self.settled.retain(|unit, _| stays(unit));
    }

    /// It was answered that a unit is settled.
    pub(crate) fn settle(&mut self, unit: &str) {
        let before = self.settled_count;
        self.settled.entry(unit.to_owned()).or_insert(before);
        self.settled_count += 1;
    }

    /// What is wrong with a unit that was given out when at least so many units were settled, if anything.
    pub(crate) fn judge(&self, unit: &Unit, settled_count: usize) -> Result<(), String> {
        if self.settled.get(&unit.unit_id).is_some_and(|place| *place < settled_count) {
            return Err("it comes again after it was acknowledged, or dropped by hand".to_owned());
        }
        unit.rows.iter().try_for_each(|row| self.judge_row(row))
    }

    fn judge_row(&self, row: &Row) -> Result<(), String> {
        match self.rows.get(&row.row_id) {
            Some(known) if known != row => Err(format!("row {} is {row:?}, and was {known:?}", row.row_id)),
            Some(_) | None => Ok(()),
        }
    }

    /// Puts a unit and its rows into the checkpoint. Rows that are there are not applied again.
    pub(crate) fn keep(&mut self, member: usize, unit: Unit) -> Result<(), String> {
        unit.rows.iter().try_for_each(|row| self.judge_row(row))?;
        for row in unit.rows {
            self.rows.entry(row.row_id.clone()).or_insert(row);
        }
        self.units.insert(unit.unit_id, member);
        Ok(())
    }

    /// The units that a member may acknowledge.
    pub(crate) fn held_by(&self, member: usize) -> Vec<String> {
        let held = self.units.iter().filter(|(unit, holder)| **holder == member && !self.settled.contains_key(*unit));
        held.map(|(unit, _)| unit.clone()).collect()
    }

    /// What became of acknowledgements, of which some were known to be settled when they were sent.
    pub(crate) fn answered(&mut self, ask: &Ask, results: &[(UnitId, AckOutcome)], seeks: usize) -> Result<(), String> {
        if !ask.units.iter().map(|(unit, _)| unit.as_str()).eq(results.iter().map(|(unit, _)| unit.as_str())) {
            return Err(format!("{ask:?} is answered {results:?}"));
        }
        for ((unit, was_settled), (_, outcome)) in ask.units.iter().zip(results) {
            // What was answered before the group was sought says nothing of what is settled now.
            let is_late = seeks != self.seeks;
            let fine = match (outcome, ask.gives_back) {
                (AckOutcome::BeforeSeek, false) => ask.is_old,
                (AckOutcome::Returned, true) => !was_settled,
                (AckOutcome::NotHeld, true) => true,
                (AckOutcome::Acknowledged, false) => self.units.contains_key(unit) && !was_settled,
                // Who asks first after a seek is told that it is acknowledged now.
                (AckOutcome::Already, false) => {
                    // What was dropped by hand is dropped still, and its rollout may have retired.
                    let stays = self.drop_asked.contains(unit) || self.undone.get(unit).is_none_or(|asks| *asks > 1);
                    let may_be = is_late || !self.is_undone || stays;
                    self.units.contains_key(unit) && may_be
                }
                (AckOutcome::Dropped, false) => self.drop_asked.contains(unit),
                (AckOutcome::Unknown, false) => !self.units.contains_key(unit),
                _ => false,
            };
            if !fine {
                return Err(format!("{unit}, settled before: {was_settled}, is {outcome:?}"));
            }
            if !ask.gives_back && !is_late && !ask.is_old && self.units.contains_key(unit) {
                self.settle(unit);
            }
        }
        Ok(())
    }

    /// An acknowledgement of these units, or that they are given back.
    pub(crate) fn ask(&mut self, gives_back: bool, is_old: bool, units: &[String]) -> Ask {
        if !gives_back && !is_old {
            for unit in units {
                self.asked.insert(unit.clone());
                self.undone.get_mut(unit).into_iter().for_each(|asks| *asks += 1);
            }
        }
        let with = |unit: &String| (unit.clone(), self.settled.contains_key(unit));
        Ask { gives_back, is_old, units: units.iter().map(with).collect() }
    }
}
