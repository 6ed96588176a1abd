//! Consumers: they join a consumer group, get units as far as their credit goes, and acknowledge them.

use tokio::sync::mpsc;

use crate::error::{Reason, Refusal};
use crate::ids::{ConsumerGroupId, Name, RolloutRef, RunId};
use crate::limits;
use crate::log::Record;
use crate::queue::{
    AckResult, ConsumerGroup, ConsumerId, Decision, DropReason, GroupDefinition, Joined, ReleaseResult, StepDefinition,
    UnitId, UnitKind,
};
use crate::rollout::run_settings::{ConsumerGroupSettings, StepSettings, Unit};

use super::super::effect::Sequenced;
use super::news::{About, LeftOut, Owed};
use super::runs::run_not_found;
use super::{Planned, Sequencer, ShardOfStep, UnitRows};

/// A consumer that wants units.
pub struct Subscription {
    /// The run.
    pub run: RunId,
    /// The consumer group; for an ephemeral one a name that nobody else has.
    pub consumer_group: ConsumerGroupId,
    /// The consumer's name.
    pub consumer_name: String,
    /// Its stream.
    pub consumer: ConsumerId,
    /// What the group is, or shall be; none: as it is.
    pub settings: Option<ConsumerGroupSettings>,
    /// Whether the group holds nothing back, needs no acknowledgements, and goes with the consumer.
    pub ephemeral: bool,
    /// The most tokens that may be out and unacknowledged at it.
    pub credit_tokens: u64,
    /// The version of the weights that it is on, if it says so.
    pub policy_version: Option<u64>,
    /// Which shard of each step it takes, if units go out in steps.
    pub shard: Option<u32>,
    /// The step whose shard it is sent once more.
    pub step_index: Option<u64>,
    /// Units that it still holds.
    pub held: Vec<UnitId>,
    /// Where units and news go.
    pub sender: mpsc::Sender<ToConsumer>,
}

/// What a subscription came to.
#[derive(Debug)]
pub struct Subscribed {
    /// What the group is.
    pub definition: GroupDefinition,
    /// Whether it was made just now.
    pub created: bool,
    /// What became of the units that the consumer holds.
    pub joined: Joined,
    /// How long a lease lasts without a sign of life.
    pub lease_ms: u64,
    /// How often the group was sought back.
    pub seek_count: u64,
    /// How long the group may be without a subscription; none: it does not expire.
    pub idle_expiry_ms: Option<u64>,
}

/// A unit on its way to a consumer.
pub struct UnitDelivery {
    /// The unit.
    pub unit: UnitId,
    /// What a unit is here.
    pub kind: UnitKind,
    /// Its rows, not gathered yet: of each rollout that has some, in the order of their ids.
    pub rows: Vec<UnitRows>,
    /// Where it is a shard of a step: which, and which rows in which order.
    pub shard: Option<Box<ShardOfStep>>,
    /// Tokens of its rows.
    pub tokens: u64,
    /// 1 for the first time that it is given out.
    pub delivery_number: u32,
    /// How often the group had been sought back when it was given out.
    pub seek_count: u64,
}

impl UnitDelivery {
    /// Its rows, as places in their plans.
    #[must_use]
    pub fn planned(&self) -> Planned {
        match &self.shard {
            None => self.rows.iter().flat_map(UnitRows::planned).collect(),
            Some(shard) => {
                let rows = shard.pieces.iter().filter_map(|piece| piece.rows.as_ref());
                rows.flat_map(|(_, planned)| planned.iter().cloned()).collect()
            }
        }
    }
}

/// What is sent to a consumer.
pub enum ToConsumer {
    /// A unit.
    Unit(Box<UnitDelivery>),
    /// What became of acknowledgements or of units given back; durable.
    Acks(Vec<(UnitId, AckOutcome)>),
    /// A unit of its group was dropped.
    Dropped {
        /// The unit.
        unit: UnitId,
        /// Why.
        reason: DropReason,
        /// The rollout that it is of.
        about: Option<RolloutRef>,
    },
    /// Its lease of a unit ran out; the unit goes to another.
    LeaseEnded {
        /// The unit.
        unit: UnitId,
        /// The rollout that it is of.
        about: Option<RolloutRef>,
    },
    /// Its group is not given something.
    LeftOut {
        /// What, and how much.
        what: LeftOut,
        /// The rollout, or the group, if it is one.
        about: Option<About>,
    },
    /// It reads too slowly, and so many units were passed over.
    Skipped {
        /// How many.
        units: u64,
    },
    /// The subscription is over.
    Ended(Refusal),
}

/// What became of one acknowledgement, or of a unit given back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AckOutcome {
    /// Acknowledged now.
    Acknowledged,
    /// The shard is, and its step will be with the others.
    ShardAcknowledged,
    /// Acknowledged before.
    Already,
    /// No such unit.
    Unknown,
    /// It had been dropped.
    Dropped,
    /// The unit was given out before the group was sought back.
    BeforeSeek,
    /// It was given back.
    Returned,
    /// It was not this consumer's to give back.
    NotHeld,
}

/// A consumer, as the sequencing task has it.
pub(super) struct Consumer {
    pub(super) run: RunId,
    pub(super) consumer_group: ConsumerGroupId,
    pub(super) ephemeral: bool,
    /// What was left out and it was not told yet.
    pub(super) owed: Owed,
    pub(super) sender: mpsc::Sender<ToConsumer>,
}

/// The definition of a consumer group with these settings.
pub(super) fn definition(settings: &ConsumerGroupSettings, max_deliveries: u32, ephemeral: bool) -> GroupDefinition {
    GroupDefinition {
        policy: settings.policy.as_ref().map(|policy| policy.as_str().to_owned()),
        unit: match settings.unit {
            Unit::Row => UnitKind::Row,
            Unit::Rollout => UnitKind::Rollout,
            Unit::Group => UnitKind::Group,
        },
        step: settings.step.map(|StepSettings { units, shards, microbatch_tokens }| StepDefinition {
            units,
            shards,
            microbatch_tokens,
        }),
        max_row_tokens: settings.max_row_tokens,
        max_staleness_versions: settings.max_staleness_versions,
        ephemeral,
        max_deliveries,
    }
}

impl Sequencer {
    pub(super) fn leave(&mut self, id: ConsumerId) {
        let Some(consumer) = self.consumers.remove(&id) else { return };
        self.stirred.insert(consumer.run.clone());
        let now_ms = self.store.clock.now_ms();
        let Some(run) = self.runs.get_mut(&consumer.run) else { return };
        let name = consumer.consumer_group.as_str();
        if consumer.ephemeral {
            run.queue.remove_group(name);
            return;
        }
        let decisions = run.queue.group_mut(name).map(|group| group.leave(id, now_ms)).unwrap_or_default();
        self.decide(&consumer.run, &consumer.consumer_group, decisions);
    }

    /// Logs the acknowledgements that are good, and answers all of them once durable.
    pub(super) fn ack(&mut self, id: ConsumerId, units: Vec<UnitId>, seek_count: u64) {
        let Some((run, consumer_group)) = self.group_of(id) else { return };
        self.sign_of_life(id);
        let Some(group) = self.group_mut(&run, &consumer_group) else { return };
        if !group.definition().ephemeral && group.seek_count() != seek_count {
            let results = units.into_iter().map(|unit| (unit, AckOutcome::BeforeSeek)).collect();
            return self.store.journal.after_last(Sequenced::Acks { consumer: id, results });
        }
        let judged = group.judge_acks(&units);
        let is_good = |result| matches!(result, AckResult::Acknowledged | AckResult::ShardAcknowledged);
        let good = judged.iter().filter(|(_, result)| is_good(*result)).map(|(unit, _)| unit.clone());
        let good: Vec<UnitId> = good.collect();
        if !good.is_empty() {
            let record =
                Record::Acknowledged { run: run.clone(), consumer_group: consumer_group.clone(), units: good.clone() };
            let effect = Sequenced::Acknowledged {
                run: run.clone(),
                consumer_group: consumer_group.clone(),
                units: good.clone(),
            };
            self.log(&record, Some(effect));
            if let Some(group) = self.group_mut(&run, &consumer_group) {
                group.begin_acks(&good);
            }
        }
        let results = judged.into_iter().map(|(unit, result)| {
            let outcome = match result {
                AckResult::Acknowledged => AckOutcome::Acknowledged,
                AckResult::ShardAcknowledged => AckOutcome::ShardAcknowledged,
                AckResult::Already => AckOutcome::Already,
                AckResult::Unknown if self.was_retired(&run, &unit) => AckOutcome::Already,
                AckResult::Unknown => AckOutcome::Unknown,
                AckResult::Dropped(_) => AckOutcome::Dropped,
            };
            (unit, outcome)
        });
        let results = results.collect();
        self.store.journal.after_last(Sequenced::Acks { consumer: id, results });
    }

    pub(super) fn nack(&mut self, id: ConsumerId, units: &[UnitId], delay_ms: Option<u64>) {
        let Some((run, consumer_group)) = self.group_of(id) else { return };
        self.sign_of_life(id);
        let now_ms = self.store.clock.now_ms();
        let Some(group) = self.group_mut(&run, &consumer_group) else { return };
        let nacked = group.nack(id, units, delay_ms, now_ms);
        let mut returned = nacked.returned.into_iter().peekable();
        let outcome = |unit: &UnitId| match returned.next_if_eq(unit) {
            Some(unit) => (unit, AckOutcome::Returned),
            None => (unit.clone(), AckOutcome::NotHeld),
        };
        let results = units.iter().map(outcome).collect();
        self.decide(&run, &consumer_group, nacked.decisions);
        self.store.journal.after_last(Sequenced::Acks { consumer: id, results });
        self.stirred.insert(run);
    }

    /// Rows that cannot be read are nobody's: the unit is undeliverable at once, and the others go on.
    pub(super) fn unreadable(&mut self, id: ConsumerId, unit: &UnitId) {
        let Some((run, consumer_group)) = self.group_of(id) else { return };
        let Some(group) = self.group_mut(&run, &consumer_group) else { return };
        let decisions = group.cannot_be_given(id, unit).into_iter().collect();
        self.decide(&run, &consumer_group, decisions);
        self.stirred.insert(run);
    }

    pub(super) fn credit(&mut self, id: ConsumerId, tokens: u64) {
        let Some((run, consumer_group)) = self.group_of(id) else { return };
        self.sign_of_life(id);
        if let Some(group) = self.group_mut(&run, &consumer_group) {
            group.set_credit(id, tokens);
        }
        self.stirred.insert(run);
    }

    /// A consumer is on this version of a policy, or of what its group takes. What that makes too old is dropped.
    pub(super) fn policy_version(&mut self, id: ConsumerId, policy: Option<&Name>, version: u64) {
        let Some((run, consumer_group)) = self.group_of(id) else { return };
        self.sign_of_life(id);
        let Some(group) = self.group_mut(&run, &consumer_group) else { return };
        match judge_version(group, policy) {
            Ok(()) => group.trainer_is_on(id, policy.map(Name::as_str), version),
            Err(refusal) => {
                // A full line ends with its channel all the same.
                if let Some(consumer) = self.consumers.get(&id) {
                    let _ = consumer.sender.try_send(ToConsumer::Ended(refusal));
                }
                self.leave(id);
            }
        }
        self.stirred.insert(run);
    }

    pub(super) fn sign_of_life(&mut self, id: ConsumerId) {
        let now_ms = self.store.clock.now_ms();
        if let Some((run, consumer_group)) = self.group_of(id)
            && let Some(group) = self.group_mut(&run, &consumer_group)
        {
            group.sign_of_life(id, now_ms);
        }
    }

    pub(super) fn room(&mut self, id: ConsumerId) {
        if let Some(consumer) = self.consumers.get(&id) {
            self.stirred.insert(consumer.run.clone());
        }
    }

    pub(super) fn release_unit(
        &mut self,
        run: &RunId,
        consumer_group: &ConsumerGroupId,
        unit: &UnitId,
        for_good: bool,
    ) -> Result<(), Refusal> {
        if !self.runs.contains_key(run) {
            return Err(run_not_found(run));
        }
        let group = self.group_mut(run, consumer_group).ok_or_else(|| unit_not_found(consumer_group, None))?;
        match group.judge_release(unit) {
            ReleaseResult::Released => {}
            ReleaseResult::Unknown => return Err(unit_not_found(consumer_group, Some(unit))),
            ReleaseResult::NotUndeliverable => {
                let message = format!("unit {:?} is not undeliverable; there is nothing to decide", unit.as_str());
                return Err(Refusal::new(Reason::UnitNotUndeliverable, message).field("unit_id"));
            }
        }
        if let Some(state) = self.runs.get_mut(run) {
            state.by_hand_underway += 1;
        }
        if for_good {
            self.drop_unit(run, consumer_group, unit.clone(), DropReason::Operator);
        } else {
            let (run, consumer_group, unit) = (run.clone(), consumer_group.clone(), unit.clone());
            let record =
                Record::UnitReleased { run: run.clone(), consumer_group: consumer_group.clone(), unit: unit.clone() };
            self.log(&record, Some(Sequenced::UnitReleased { run, consumer_group, unit }));
        }
        Ok(())
    }

    /// A decision by hand is durable. In replay none was counted.
    pub(super) fn by_hand_is_over(&mut self, run: &RunId, by_hand: bool) {
        if let Some(state) = self.runs.get_mut(run).filter(|_| by_hand) {
            state.by_hand_underway = state.by_hand_underway.saturating_sub(1);
        }
    }

    /// Ends leases whose time has come.
    pub(super) fn tick_queues(&mut self, now_ms: u64) {
        let (mut decisions, mut ended) = (Vec::new(), Vec::new());
        for id in self.deadlines.due(now_ms) {
            let Some(run) = self.runs.get_mut(&id) else { continue };
            if self.seeking.contains(&id) {
                self.deadlines.put(&id, None);
                continue;
            }
            let next_ms = run.next_deadline_ms();
            if next_ms.is_none_or(|deadline| deadline > now_ms) {
                // It was put off meanwhile.
                self.deadlines.put(&id, next_ms);
                continue;
            }
            self.stirred.insert(id.clone());
            for (name, group) in run.queue.groups_mut() {
                let name = name.to_owned();
                let ticked = group.tick(now_ms);
                decisions.extend(ticked.decisions.into_iter().map(|decision| (id.clone(), name.clone(), decision)));
                ended.extend(ticked.ended);
            }
            self.tick_retention(&id, now_ms);
        }
        for (consumer, unit) in ended {
            let about = self.rollout_of(&unit);
            self.tell(consumer, ToConsumer::LeaseEnded { unit, about });
        }
        for (run, name, decision) in decisions {
            if let Ok(consumer_group) = ConsumerGroupId::parse(&name) {
                self.decide(&run, &consumer_group, vec![decision]);
            }
        }
    }

    /// Logs what the end of a lease, or a trainer's version, decided; it has its effect when that is durable.
    pub(super) fn decide(&mut self, run: &RunId, consumer_group: &ConsumerGroupId, decisions: Vec<Decision>) {
        if self.seeking.contains(run) {
            let of_group = |decision| (run.clone(), consumer_group.clone(), decision);
            return self.deferred_decisions.extend(decisions.into_iter().map(of_group));
        }
        for decision in decisions {
            let (unit, reason) = match decision {
                Decision::DropUndeliverable { unit } => {
                    tracing::warn!(%run, %consumer_group, unit = unit.as_str(), "a unit is undeliverable");
                    (unit, DropReason::Undeliverable)
                }
                Decision::DropStale { unit } => (unit, DropReason::Stale),
            };
            self.drop_unit(run, consumer_group, unit, reason);
        }
    }

    fn drop_unit(&self, run: &RunId, consumer_group: &ConsumerGroupId, unit: UnitId, reason: DropReason) {
        let (run, consumer_group) = (run.clone(), consumer_group.clone());
        let record = Record::UnitDropped {
            run: run.clone(),
            consumer_group: consumer_group.clone(),
            unit: unit.clone(),
            reason,
        };
        self.log(&record, Some(Sequenced::UnitDropped { run, consumer_group, unit, reason }));
    }

    fn group_of(&self, id: ConsumerId) -> Option<(RunId, ConsumerGroupId)> {
        self.consumers.get(&id).map(|consumer| (consumer.run.clone(), consumer.consumer_group.clone()))
    }

    fn group_mut(&mut self, run: &RunId, group: &ConsumerGroupId) -> Option<&mut ConsumerGroup<u64, UnitRows>> {
        self.runs.get_mut(run)?.queue.group_mut(group.as_str())
    }
}

/// Whether a consumer of this group may say which version of this policy it is on.
fn judge_version(group: &ConsumerGroup<u64, UnitRows>, policy: Option<&Name>) -> Result<(), Refusal> {
    let field = "policy_version.policy";
    let Some(policy) = policy else { return Ok(()) };
    if let Some(taken) = group.definition().policy.as_ref().filter(|taken| *taken != policy.as_str()) {
        let message = format!("the consumer group takes policy {taken:?}, not {policy:?}");
        return Err(Refusal::new(Reason::InvalidValue, message).field(field));
    }
    if group.trainer_version_of(policy.as_str()).is_none()
        && group.named_trainer_versions() >= limits::RUN_TRAINED_POLICIES_MAX
    {
        let message = format!("versions of {} policies were said, as many as may be", limits::RUN_TRAINED_POLICIES_MAX);
        return Err(Refusal::new(Reason::OverLimit, message).field(field));
    }
    Ok(())
}

pub(super) fn unit_not_found(consumer_group: &ConsumerGroupId, unit: Option<&UnitId>) -> Refusal {
    let message = match unit {
        Some(unit) => format!("consumer group {consumer_group:?} has no undeliverable unit {:?}", unit.as_str()),
        None => format!("there is no consumer group {consumer_group:?}"),
    };
    Refusal::new(Reason::UnitNotFound, message).field(if unit.is_some() { "unit_id" } else { "consumer_group" })
}

pub(super) fn in_words(definition: &GroupDefinition) -> String {
    let policy =
        definition.policy.as_ref().map_or_else(|| "every policy".to_owned(), |policy| format!("policy {policy:?}"));
    let unit = match definition.unit {
        UnitKind::Row => "rows",
        UnitKind::Rollout => "rollouts",
        UnitKind::Group => "groups",
    };
    let steps = definition.step.map_or_else(String::new, |StepDefinition { units, shards, microbatch_tokens }| {
        format!("steps of {units} in {shards} shards and microbatches of at most {microbatch_tokens} tokens, of ")
    });
    let longest = definition.max_row_tokens.map_or_else(String::new, |tokens| format!(" of at most {tokens} tokens"));
    let stale = definition.max_staleness_versions;
    let stale = stale.map_or_else(String::new, |versions| format!(", at most {versions} versions behind"));
    let ephemeral = if definition.ephemeral { ", ephemeral" } else { "" };
    format!("{steps}{unit}{longest} of {policy}{stale}{ephemeral}")
}
