//! Steps: units that are frozen together, cut into shards for data-parallel ranks, and given out one shard to each.
//!
//! When somebody would take a shard of the next step, and enough units wait, which ones is logged; when that is durable they are the
//! step. How it is cut follows from their rows (`queue::cut`), and is worked out when a shard is to go out. Rows come from
//! where those of any unit come from, also of a step that is acknowledged and kept: so a shard is the same whenever it is sent.
//!
//! **What a log that begins in the middle knows of a step**: its record may stand before the beginning, when all of its rollouts that
//! live have been written forward. So before a copy of a rollout it is said once more in which steps its units stand, unless that
//! was said since the newest snapshot began.

use std::ops::Range;
use std::sync::Arc;

use crate::error::{Reason, Refusal};
use crate::forest::plan::PolicyPlan;
use crate::ids::{ConsumerGroupId, RunId, step_id, unit_step};
use crate::limits::DISPATCH_UNITS_AT_ONCE;
use crate::log::{Position, Record};
use crate::queue::{ConsumerId, Cut, FrozenStep, RefetchRefused, RowSize, ShardDelivery, UnitId, cut};

use super::super::effect::Sequenced;
use super::consumers::{Subscription, ToConsumer, UnitDelivery};
use super::release::whole_unit;
use super::{RunState, Sequencer, UnitRows};

/// A shard on its way to a consumer.
#[derive(Debug)]
pub struct ShardOfStep {
    /// Its run.
    pub run: RunId,
    /// The policy that its consumer group takes, if it takes one.
    pub policy: Option<String>,
    /// Which step.
    pub index: u64,
    /// Which shard.
    pub shard: u32,
    /// How many the step has.
    pub shards: u32,
    /// How many microbatches each of them has.
    pub microbatches: u32,
    /// Rollouts in the whole step that have rows.
    pub step_rollouts: u64,
    /// Rows in the whole step.
    pub step_rows: u64,
    /// Trained tokens in the whole step.
    pub step_trained_tokens: u64,
    /// Rows of the shard, with those of padding.
    pub rows: u64,
    /// What it is made of, in order.
    pub pieces: Vec<ShardPiece>,
}

/// Some rows of one rollout in one microbatch; or a row of padding.
#[derive(Debug)]
pub struct ShardPiece {
    /// Which microbatch.
    pub microbatch: u32,
    /// Which of the delivery's rollouts, and which of its rows; none: padding.
    pub rows: Option<(usize, Planned)>,
}

/// Rows, as places in their plans.
pub type Planned = Vec<(Arc<PolicyPlan>, Range<usize>)>;

impl Sequencer {
    /// Gives out what can go out of a consumer group's steps, and freezes the next one if somebody would take it. Says who is lost.
    pub(super) fn dispatch_steps(&mut self, run_id: &RunId, name: &ConsumerGroupId, now_ms: u64) -> Vec<ConsumerId> {
        let mut lost = Vec::new();
        let Some(run) = self.runs.get_mut(run_id) else { return lost };
        loop {
            while let Some(index) = run.queue.group(name.as_str()).and_then(|group| group.step_to_cut()) {
                if !run.cut_step(name, index) {
                    break;
                }
            }
            let Some(group) = run.queue.group_mut(name.as_str()) else { return lost };
            let deliveries = group.dispatch_shards(now_ms, DISPATCH_UNITS_AT_ONCE);
            let count = deliveries.len();
            for delivery in deliveries {
                let consumer = self.consumers.get(&delivery.consumer);
                let unit = run.shard(run_id, name, &delivery);
                let sent =
                    unit.zip(consumer).is_some_and(|(unit, to)| to.sender.try_send(ToConsumer::Unit(unit)).is_ok());
                if !sent {
                    lost.push(delivery.consumer);
                }
            }
            if count < DISPATCH_UNITS_AT_ONCE {
                break;
            }
        }
        self.freeze_if_wanted(run_id, name);
        lost
    }

    /// Logs the next step, if somebody would take a shard of it.
    fn freeze_if_wanted(&mut self, run_id: &RunId, name: &ConsumerGroupId) {
        // What comes of a seek is to be about a time before.
        if self.seeking.contains(run_id) {
            return;
        }
        let group = self.runs.get_mut(run_id).and_then(|run| run.queue.group_mut(name.as_str()));
        let Some(step) = group.and_then(|group| group.begin_freeze()) else { return };
        let (run, consumer_group, step) = (run_id.clone(), name.clone(), Box::new(step));
        let record =
            Record::StepFrozen { run: run.clone(), consumer_group: consumer_group.clone(), step: step.clone() };
        self.log(&record, Some(Sequenced::StepFrozen { run, consumer_group, step }));
    }

    /// Units of a consumer group are a step, or that is said once more. Live and in replay.
    pub(super) fn step_frozen(&mut self, run_id: &RunId, name: &ConsumerGroupId, step: FrozenStep, at: Position) {
        let group = self.runs.get_mut(run_id).and_then(|run| run.queue.group_mut(name.as_str()));
        let Some(group) = group else { return };
        let id = UnitId::new(step_id(run_id, name, group.made_at(), step.index));
        group.apply_frozen(id, step, at.0);
        self.stirred.insert(run_id.clone());
    }

    /// All was read: units that have not come never will.
    pub(in crate::store) fn units_are_read(&mut self) {
        for run in self.runs.values_mut() {
            run.queue.groups_mut().for_each(|(_, group)| group.all_is_read());
        }
    }

    /// Says once more in which steps the units of a rollout stand, which is about to be copied.
    pub(super) fn repeat_steps(&mut self, run_id: &RunId, number: u64) {
        let since = self.needed.last_begun().0;
        let mut said = Vec::new();
        let Some(run) = self.runs.get_mut(run_id) else { return };
        // They are said at once, behind what was logged by now.
        let at = self.store.journal.last().0 + 1;
        for (name, group) in run.queue.groups_mut().filter(|(_, group)| group.takes_steps()) {
            let units: Vec<UnitId> =
                group.units_of(&number).into_iter().flatten().map(|(unit, _)| unit.clone()).collect();
            let steps = units.iter().filter_map(|unit| group.say_step_again(unit, since, at));
            said.extend(steps.filter_map(|step| Some((ConsumerGroupId::parse(name).ok()?, step))));
        }
        for (consumer_group, step) in said {
            let record = Record::StepFrozen { run: run_id.clone(), consumer_group, step: Box::new(step) };
            self.log(&record, None);
        }
    }

    /// Whether this is a step of the consumer group, or a shard of one, that is not remembered any more: it was settled.
    pub(super) fn step_was_forgotten(&self, run_id: &RunId, unit: &UnitId) -> bool {
        let Some((of_run, name, made_at, index)) = unit_step(unit.as_str()) else { return false };
        let group = self.runs.get(run_id).filter(|_| of_run == *run_id);
        let group = group.and_then(|run| run.queue.group(name.as_str())).filter(|group| group.made_at() == made_at);
        group.is_some_and(|group| group.judge_refetch(index) == Err(RefetchRefused::NotRetained))
    }

    /// Cuts the steps of which a consumer that joins holds shards.
    pub(super) fn cut_what_is_held(&mut self, subscription: &Subscription) {
        let Some(run) = self.runs.get_mut(&subscription.run) else { return };
        let name = &subscription.consumer_group;
        for unit in &subscription.held {
            if let Some(index) = run.queue.group(name.as_str()).and_then(|group| group.step_to_cut_for(unit)) {
                run.cut_step(name, index);
            }
        }
    }

    /// Which shard of which step a subscription is to be sent once more.
    pub(super) fn judge_refetch(&mut self, subscription: &Subscription) -> Result<Option<(u64, u32)>, Refusal> {
        let Some((index, shard)) = subscription.step_index.zip(subscription.shard) else { return Ok(None) };
        let run = self.runs.get_mut(&subscription.run);
        let Some(run) = run.filter(|run| run.queue.group(subscription.consumer_group.as_str()).is_some()) else {
            return Ok(None);
        };
        let judged = run.queue.group(subscription.consumer_group.as_str()).map(|group| group.judge_refetch(index));
        let (reason, why) = match judged {
            Some(Ok(())) if run.cut_step(&subscription.consumer_group, index) => return Ok(Some((index, shard))),
            Some(Err(RefetchRefused::NotFrozen { steps })) => {
                (Reason::StepNotFound, format!("is not frozen; the consumer group has {steps} steps, from 0"))
            }
            Some(Err(RefetchRefused::Dropped(reason))) => {
                (Reason::NotRetained, format!("was dropped: {}; an undeliverable one can be released", reason.as_str()))
            }
            Some(Ok(()) | Err(RefetchRefused::NotRetained)) | None => {
                let why = "is acknowledged, and not kept any more; a run's setting `retention` keeps steps longer";
                (Reason::NotRetained, why.to_owned())
            }
        };
        Err(Refusal::new(reason, format!("step {index} {why}")).field("subscription.step_index"))
    }

    /// Sends a consumer that has joined this shard once more.
    pub(super) fn refetch(&mut self, id: ConsumerId, at: (u64, u32), now_ms: u64) {
        let Some(consumer) = self.consumers.get(&id) else { return };
        let Some(run) = self.runs.get_mut(&consumer.run) else { return };
        let group = run.queue.group_mut(consumer.consumer_group.as_str());
        let delivery = group.and_then(|group| group.refetch(at, id, now_ms));
        let unit = delivery.and_then(|delivery| run.shard(&consumer.run, &consumer.consumer_group, &delivery));
        if let Some(unit) = unit {
            // Its line is new; if it is gone all the same, it leaves.
            drop(consumer.sender.try_send(ToConsumer::Unit(unit)));
        }
    }
}

impl RunState {
    /// The rows of a step, of each of its units in order; none if not all are there.
    fn step_rows(&mut self, name: &ConsumerGroupId, index: u64) -> Option<Vec<Vec<UnitRows>>> {
        let Self { queue, groups, retained, .. } = self;
        let group = queue.group(name.as_str())?;
        let definition = group.definition();
        let mut rows = Vec::new();
        for (id, source, payload) in group.step_members(index)? {
            let again = || {
                let units = retained.get(source)?.units_again(definition);
                units.into_iter().find(|unit| unit.id == *id).map(|unit| unit.payload)
            };
            let payload = payload.cloned().or_else(again)?;
            rows.push(whole_unit(groups, retained, definition, payload));
        }
        Some(rows)
    }

    /// Works out how a step is cut, if that is not known; false if it cannot be.
    fn cut_step(&mut self, name: &ConsumerGroupId, index: u64) -> bool {
        let made = self.how_cut(name, index).map(|(made, _)| made);
        match made.zip(self.queue.group_mut(name.as_str())) {
            Some((made, group)) => {
                group.set_step_cut(index, made);
                true
            }
            None => false,
        }
    }

    /// How a step is cut, and its rows.
    fn how_cut(&mut self, name: &ConsumerGroupId, index: u64) -> Option<(Arc<Cut>, Vec<Vec<UnitRows>>)> {
        let rows = self.step_rows(name, index)?;
        let group = self.queue.group(name.as_str())?;
        let (version, known) = group.step_cut(index)?;
        let made = match known {
            Some(known) => known,
            None => {
                let sizes: Vec<Vec<RowSize>> = rows.iter().map(|rows| sizes_of(rows)).collect();
                Arc::new(cut(version, &sizes, &group.definition().step?))
            }
        };
        Some((made, rows))
    }

    /// A shard, as it goes out.
    fn shard(&mut self, run: &RunId, name: &ConsumerGroupId, delivery: &ShardDelivery) -> Option<Box<UnitDelivery>> {
        let (made, members) = self.how_cut(name, delivery.index)?;
        let of_shard = made.shards.get(delivery.shard as usize)?;
        let group = self.queue.group(name.as_str())?;
        let step_rollouts = members.iter().map(Vec::len).sum::<usize>() as u64;
        let (mut rollouts, mut pieces) = (Rollouts::new(members), Vec::new());
        for (microbatch, places) in of_shard.microbatches.iter().enumerate() {
            let microbatch = u32::try_from(microbatch).unwrap_or(u32::MAX);
            if places.is_empty() {
                pieces.push(ShardPiece { microbatch, rows: None });
            }
            for place in places {
                let (rollout, plan, row) = rollouts.find(place.member as usize, place.row as usize)?;
                put(&mut pieces, microbatch, rollout, (plan, row));
            }
        }
        let shard = ShardOfStep {
            run: run.clone(),
            policy: group.definition().policy.clone(),
            index: delivery.index,
            shard: delivery.shard,
            shards: u32::try_from(made.shards.len()).unwrap_or(u32::MAX),
            microbatches: made.microbatches,
            step_rollouts,
            step_rows: made.rows,
            step_trained_tokens: made.trained_tokens,
            rows: of_shard.rows,
            pieces,
        };
        Some(Box::new(UnitDelivery {
            unit: delivery.unit.clone(),
            kind: group.definition().unit,
            rows: rollouts.used,
            shard: Some(Box::new(shard)),
            tokens: of_shard.tokens,
            delivery_number: delivery.delivery_number,
            seek_count: group.seek_count(),
        }))
    }
}

/// What counts of the rows of a unit, in order.
fn sizes_of(rows: &[UnitRows]) -> Vec<RowSize> {
    let planned = rows.iter().flat_map(UnitRows::planned);
    let size = |plan: &Arc<PolicyPlan>, range: Range<usize>| -> Vec<RowSize> {
        let rows = plan.rows.get(range).unwrap_or_default().iter();
        rows.map(|row| RowSize { tokens: u64::from(row.tokens), trained_tokens: u64::from(row.trained_tokens) })
            .collect()
    };
    planned.flat_map(|(plan, range)| size(&plan, range)).collect()
}

/// The rollouts of a step, and those of them that a shard has rows of.
struct Rollouts {
    members: Vec<Vec<UnitRows>>,
    /// Where rows of each member are, once that was asked.
    spans: Vec<Option<Vec<RowSpan>>>,
    /// Of each rollout of each member, its place among the used ones.
    places: Vec<Vec<Option<usize>>>,
    used: Vec<UnitRows>,
}

/// Some rows of a member that stand in one plan.
struct RowSpan {
    /// The first one, counted in the member.
    first: usize,
    rollout: usize,
    plan: Arc<PolicyPlan>,
    /// The first one, counted in the plan.
    start: usize,
}

impl Rollouts {
    fn new(members: Vec<Vec<UnitRows>>) -> Self {
        let places = members.iter().map(|rollouts| vec![None; rollouts.len()]).collect();
        let spans = members.iter().map(|_| None).collect();
        Self { members, spans, places, used: Vec::new() }
    }

    /// Where this row of this member stands: in which used rollout, in which plan, and which row of that it is.
    fn find(&mut self, member: usize, row: usize) -> Option<(usize, Arc<PolicyPlan>, usize)> {
        let rollouts = self.members.get(member)?;
        let spans = self.spans.get_mut(member)?.get_or_insert_with(|| spans_of(rollouts));
        let span = spans.get(spans.partition_point(|span| span.first <= row).checked_sub(1)?)?;
        let (plan, row) = (Arc::clone(&span.plan), span.start + row - span.first);
        let place = self.places.get_mut(member)?.get_mut(span.rollout)?;
        let (used, rollout) = (&mut self.used, rollouts.get(span.rollout)?);
        let place = *place.get_or_insert_with(|| {
            used.push(rollout.clone());
            used.len() - 1
        });
        Some((place, plan, row))
    }
}

fn spans_of(rollouts: &[UnitRows]) -> Vec<RowSpan> {
    let (mut spans, mut first) = (Vec::new(), 0);
    for (rollout, rows) in rollouts.iter().enumerate() {
        for (plan, range) in rows.planned().into_iter().filter(|(_, range)| !range.is_empty()) {
            spans.push(RowSpan { first, rollout, plan, start: range.start });
            first += range.len();
        }
    }
    spans
}

/// Puts a row behind those that a shard has, with its neighbours if they are of the same rollout and microbatch.
fn put(pieces: &mut Vec<ShardPiece>, microbatch: u32, rollout: usize, (plan, row): (Arc<PolicyPlan>, usize)) {
    let last = pieces.last_mut().filter(|piece| piece.microbatch == microbatch);
    if let Some((of, planned)) = last.and_then(|piece| piece.rows.as_mut())
        && *of == rollout
    {
        match planned.last_mut() {
            Some((known, range)) if Arc::ptr_eq(known, &plan) && range.end == row => range.end = row + 1,
            Some(_) | None => planned.push((plan, row..row + 1)),
        }
        return;
    }
    pieces.push(ShardPiece { microbatch, rows: Some((rollout, vec![(plan, row..row + 1)])) });
}
