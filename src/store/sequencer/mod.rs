//! The sequencing task: the one owner of runs, groups and queues.
//!
//! It takes the effects of records in the order of their positions, once durable, and commands from the edge in the order in
//! which they come. What it decides is a record before it has effects. It admits rollouts ([`admit`]), takes finalised ones and
//! retires them ([`finished`]), serves consumers ([`consumers`]), and keeps runs ([`runs`]).
//!
//! Each step is a plain synchronous function; the loop only picks the next one.

mod admit;
mod carry;
mod consumers;
mod deadlines;
mod dispatch;
mod figures;
mod finished;
mod groups;
mod joining;
mod look;
mod news;
mod reclaim;
mod release;
mod retention;
mod runs;
mod seek;
mod steps;
mod totals;
mod units;

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::sync::Arc;

use tokio::sync::{mpsc, oneshot, watch};

use crate::error::Refusal;
use crate::ids::{ConsumerGroupId, GroupId, Name, RolloutId, RolloutRef, RunId};
use crate::limits;
use crate::log::totals::RunTotals;
use crate::log::{Position, Record};
use crate::queue::{ConsumerId, Decision, DropReason, Queue, UnitId};
use crate::rollout::run_settings::RunSettings;

use crate::telemetry::EndReason;

use deadlines::Deadlines;
use figures::FIGURES_EVERY_MS;
use groups::RunGroups;
use reclaim::{Needed, TombstonePlace};
use retention::Retention;

use super::carry::Gathered;
use super::effect::Sequenced;
use super::memory::Holding;
use super::replay::Reading;
use super::{RolloutKey, Run, Store};

pub use consumers::{AckOutcome, Subscribed, Subscription, ToConsumer, UnitDelivery};
pub use groups::{GroupSums, SumsByPolicy};
pub use look::{
    ConsumerFigures, ConsumerGroupLook, ConsumerGroupPage, GroupLook, GroupPage, Look, RolloutsNow, RowsOf, RunLook,
    Waiting,
};
pub use news::{About, LeftOut};
pub use release::{GroupOfUnit, group_not_found};
pub use runs::{DeletedRun, RunFacts};
pub use seek::{CheckpointFacts, SeekReady, SeekReply, Sought};
pub use steps::{Planned, ShardOfStep, ShardPiece};
pub use units::{Retained, UnitRows};

/// Asks whether a rollout, its group, or its group's size may be.
#[derive(Clone, Debug)]
pub struct Admission {
    /// The rollout.
    pub reference: RolloutRef,
    /// Its group's size, if it was said.
    pub group_size: Option<u32>,
}

/// What an admission came to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Admitted {
    /// All of it was so already, or the rollout has ended.
    Known,
    /// It opened the rollout, or a newer attempt at it.
    Opened,
    /// It had the rollout join its group.
    Joined,
}

/// Where the answer to a subscription goes.
pub type SubscribeReply = oneshot::Sender<Result<Subscribed, Refusal>>;

/// What the sequencing task is asked.
pub enum Command {
    /// May this rollout be opened, or join its group? The answer says whether it has: it may stand so already.
    Admit(Admission, oneshot::Sender<Result<Admitted, Refusal>>),
    /// Make a run.
    CreateRun(RunId, Arc<RunSettings>, oneshot::Sender<Result<RunFacts, Refusal>>),
    /// Give a run new settings, if it has this version (0: any).
    UpdateRun(RunId, Arc<RunSettings>, u64, oneshot::Sender<Result<RunFacts, Refusal>>),
    /// Delete a run with all that is in it, if it is empty or by force.
    DeleteRun(RunId, bool, oneshot::Sender<Result<DeletedRun, Refusal>>),
    /// A consumer wants units.
    Subscribe(Box<Subscription>, SubscribeReply),
    /// A consumer is gone.
    Leave(ConsumerId),
    /// A consumer acknowledges units, which it was given when its group had been sought so often.
    Ack(ConsumerId, Vec<UnitId>, u64),
    /// A consumer gives units back, to be given out again after a delay in milliseconds.
    Nack(ConsumerId, Vec<UnitId>, Option<u64>),
    /// The rows of a unit that a consumer was given cannot be read.
    Unreadable(ConsumerId, UnitId),
    /// A consumer's window of tokens.
    Credit(ConsumerId, u64),
    /// A consumer is on this version of a policy's weights; of whatever its group takes, if that is not said.
    PolicyVersion(ConsumerId, Option<Name>, u64),
    /// A consumer is alive.
    SignOfLife(ConsumerId),
    /// A consumer's line has room again.
    Room(ConsumerId),
    /// What does a consumer wait for?
    Waiting(ConsumerId, oneshot::Sender<Option<Waiting>>),
    /// Release an undeliverable unit by hand, or drop it for good.
    ReleaseUnit {
        /// Its run.
        run: RunId,
        /// The consumer group.
        consumer_group: ConsumerGroupId,
        /// The unit.
        unit: UnitId,
        /// Whether it is done with, instead of being given out again.
        drop: bool,
        /// The answer.
        reply: oneshot::Sender<Result<(), Refusal>>,
    },
    /// Release a group by hand with those of its members that are finalised.
    ReleaseGroup(RunId, GroupId, oneshot::Sender<Result<(), Refusal>>),
    /// What has a consumer group acknowledged?
    Checkpoint {
        /// Its run.
        run: RunId,
        /// The consumer group.
        consumer_group: ConsumerGroupId,
        /// The answer.
        reply: oneshot::Sender<Result<CheckpointFacts, Refusal>>,
    },
    /// Have a consumer group go back to a checkpoint.
    Seek {
        /// Its run.
        run: RunId,
        /// The consumer group.
        consumer_group: ConsumerGroupId,
        /// The checkpoint.
        token: Vec<u8>,
        /// The answer.
        reply: SeekReply,
    },
    /// Write rollouts forward whose records were read back.
    Carry(Vec<Gathered>),
    /// Wait until all records so far are applied.
    Barrier(oneshot::Sender<()>),
    /// Show something; changes nothing.
    Look(Look),
}

/// A run, as the sequencing task has it.
pub(super) struct RunState {
    pub(super) shared: Arc<Run>,
    /// The record that made it. What was logged before is about an older run of the name, which was deleted.
    pub(super) since: Position,
    /// Its settings now, and their version, from 1. A rollout keeps those of its opening.
    pub(super) settings: (u64, Arc<RunSettings>),
    /// All of its rollouts that stand in the store's map, tombstones too, in the order in which pages list them. Only this task
    /// opens and forgets rollouts, and changes both.
    pub(super) rollouts: BTreeSet<RolloutId>,
    pub(super) groups: RunGroups,
    pub(super) queue: Queue<u64, UnitRows>,
    /// Finalised rollouts that are not retired, in the order in which they were finalised.
    pub(super) retained: BTreeMap<u64, Retained>,
    /// Which of them wait for their end.
    pub(super) retention: Retention,
    /// Decisions by hand about units whose records are on their way.
    pub(super) by_hand_underway: u32,
    /// How many have ended that no consumer group was given, and nobody was told of.
    pub(super) unclaimed_ended: u64,
    pub(super) finalised_count: u64,
    pub(super) ledger: figures::RunLedger,
    /// Consumer groups that are about to be made or to expire: a record of that is on its way.
    pub(super) making: BTreeSet<ConsumerGroupId>,
}

/// An attempt that is remembered for a while after it ended; a later one has a tombstone of its own.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Tombstone {
    key: RolloutKey,
    attempt: u32,
    /// From where on the log says that it ended: its opening, or the record that says it again.
    home: Position,
}

/// The state of the sequencing task.
pub struct Sequencer {
    store: Arc<Store>,
    runs: BTreeMap<RunId, RunState>,
    consumers: HashMap<ConsumerId, consumers::Consumer>,
    /// Subscriptions that wait for their consumer group to be made.
    waiting_subscriptions: Vec<(Box<Subscription>, SubscribeReply)>,
    /// In the order in which they expire: (milliseconds of the clock, number).
    tombstones: BTreeMap<TombstonePlace, (Tombstone, u64)>,
    tombstone_count: u64,
    /// What they hold in memory; each says its part.
    tombstones_held: Holding,
    /// Which records of the log are needed.
    pub(in crate::store) needed: Needed,
    /// How far what lives was written forward.
    carrying: carry::Carrying,
    /// In replay: copies of rollouts that have begun.
    pub(in crate::store) copying: HashMap<RolloutKey, carry::Copying>,
    /// In replay: the consumer groups that had the rollout whose copy is read.
    gives_only_to: Option<BTreeSet<String>>,
    /// In replay: where the record stood first that finalised the rollout whose copy is read.
    copied_finalised: Option<Position>,
    /// In replay: what runs had counted at the end of the last snapshot, as far as that was read.
    noted_totals: BTreeMap<RunId, RunTotals>,
    /// Where that snapshot ended.
    noted_through: Position,
    /// Where in a log that is read one stands.
    pub(in crate::store) reading: Reading,
    /// Runs of which nothing is settled, for a seek is on its way.
    seeking: BTreeSet<RunId>,
    /// What waits for that.
    deferred: Vec<Command>,
    /// What the ends of leases decided meanwhile.
    deferred_decisions: Vec<(RunId, ConsumerGroupId, Decision)>,
    /// Runs in which something may go out.
    stirred: BTreeSet<RunId>,
    /// When runs are to be looked at next that nothing stirs.
    deadlines: Deadlines,
    figures_at_ms: u64,
    /// The last position when gauges were last set.
    last_at_figures: Position,
}

impl Sequencer {
    /// The owner of a store's runs, groups and queues; there are none yet.
    #[must_use]
    pub fn new(store: Arc<Store>) -> Self {
        Self {
            tombstones_held: store.memory().holding(),
            store,
            runs: BTreeMap::new(),
            consumers: HashMap::new(),
            waiting_subscriptions: Vec::new(),
            tombstones: BTreeMap::new(),
            tombstone_count: 0,
            needed: Needed::default(),
            carrying: carry::Carrying::default(),
            copying: HashMap::new(),
            gives_only_to: None,
            copied_finalised: None,
            noted_totals: BTreeMap::new(),
            noted_through: Position::default(),
            reading: Reading::default(),
            seeking: BTreeSet::new(),
            deferred: Vec::new(),
            deferred_decisions: Vec::new(),
            stirred: BTreeSet::new(),
            deadlines: Deadlines::default(),
            figures_at_ms: 0,
            last_at_figures: Position::default(),
        }
    }

    pub(in crate::store) fn store(&self) -> &Arc<Store> {
        &self.store
    }

    /// All was read: units of before the restart wait for those who hold them, for as long as the service gives them for that.
    pub(in crate::store) fn hold_back(&mut self) {
        let grace_ms = self.store.restart_grace_ms;
        let until_ms = self.store.clock.now_ms().saturating_add(grace_ms);
        for (id, run) in &mut self.runs {
            // That was told before, if somebody was there to hear it.
            run.unclaimed_ended = 0;
            if grace_ms == 0 {
                continue;
            }
            run.queue.groups_mut().for_each(|(_, group)| group.hold_back(until_ms));
            self.stirred.insert(id.clone());
        }
    }

    /// Works until nobody can give it commands any more, or `stop` is done.
    pub async fn run(mut self, mut commands: mpsc::Receiver<Command>, stop: impl Future<Output = ()>) -> Self {
        tokio::pin!(stop);
        let store = Arc::clone(&self.store);
        let mut segments = store.journal.log().segment_begun();
        loop {
            let deadline = self.next_deadline_ms();
            tokio::select! {
                biased;
                effects = store.journal.next() => {
                    effects.into_iter().for_each(|(position, effect)| self.apply(position, effect));
                }
                command = commands.recv() => {
                    let Some(command) = command else { return self };
                    self.command(command);
                    let more = std::iter::from_fn(|| commands.try_recv().ok());
                    let more: VecDeque<Command> = more.take(limits::COMMANDS_AT_ONCE).collect();
                    more.into_iter().for_each(|command| self.command(command));
                }
                () = store.clock.wait_until(Some(deadline)) => self.tick(),
                () = changed(&mut segments) => self.segment_began(),
                () = &mut stop => return self,
            }
            while !self.stirred.is_empty() {
                self.dispatch();
            }
            self.snapshot_if_due();
            self.verify();
        }
    }

    /// Takes what a durable record means.
    pub(super) fn apply(&mut self, position: Position, effect: Sequenced) {
        if let Sequenced::Discarded { opened: home, .. } | Sequenced::Superseded { home, .. } = &effect {
            self.needed.ended(*home);
        }
        let is_of_a_deleted_run = |run| self.runs.get(run).is_none_or(|state| position < state.since);
        if effect.run().is_some_and(is_of_a_deleted_run) {
            return;
        }
        match effect {
            Sequenced::Finalised { key, attempt, finalised } => self.finalised(key, attempt, &finalised),
            Sequenced::Discarded { key, attempt, group, discarded, calls, opened } => {
                self.discarded(Tombstone { key, attempt, home: opened }, group.as_ref(), &discarded, calls);
            }
            Sequenced::ConsumerGroup { run, consumer_group, definition, from_earliest } => {
                self.make_consumer_group(&run, &consumer_group, definition, from_earliest, position);
                self.resume_subscriptions(&run, &consumer_group, true);
            }
            Sequenced::Declared { run, settings } => self.make_declared(&run, &settings, position),
            Sequenced::Acknowledged { run, consumer_group, units } => {
                let is_read_again = self.store.is_replaying();
                self.settle(&run, &consumer_group, &units, |group, unit| match is_read_again {
                    true => group.replay_ack(unit, position.0),
                    false => group.apply_ack(unit, position.0),
                });
            }
            Sequenced::UnitDropped { run, consumer_group, unit, reason } => {
                self.by_hand_is_over(&run, reason == DropReason::Operator);
                self.settle(&run, &consumer_group, std::slice::from_ref(&unit), |group, unit| {
                    group.apply_drop(unit, reason)
                });
                let about = self.rollout_of(&unit);
                let news = |_| ToConsumer::Dropped { unit: unit.clone(), reason, about: about.clone() };
                self.tell_members(&run, &consumer_group, news);
            }
            Sequenced::UnitReleased { run, consumer_group, unit } => {
                self.by_hand_is_over(&run, true);
                self.settle(&run, &consumer_group, std::slice::from_ref(&unit), |group, unit| {
                    group.apply_release(unit)
                });
            }
            Sequenced::StepFrozen { run, consumer_group, step } => {
                self.step_frozen(&run, &consumer_group, *step, position);
            }
            Sequenced::GroupReleased { run, group, decided, at } => {
                self.group_released(&run, &group, *decided, at.unwrap_or(position));
            }
            Sequenced::RolloutsRetired { run, rollouts, reason } => self.rollouts_retired(&run, rollouts, reason),
            Sequenced::ConsumerGroupExpired { run, consumer_group } => {
                self.consumer_group_expired(&run, &consumer_group);
            }
            Sequenced::SeekReady(ready) => self.seek_is_ready(*ready),
            Sequenced::Sought { run, consumer_group, to, reply } => {
                self.sought(&run, &consumer_group, (to, position), reply);
            }
            Sequenced::Acks { consumer, results } => self.tell(consumer, ToConsumer::Acks(results)),
            Sequenced::Superseded { run, home: _, calls } => self.rollout_gone(&run, EndReason::Superseded, calls),
            Sequenced::Snapshot { begins } => self.snapshot_is_durable(begins),
            Sequenced::Reclaim { before } => self.cut(before),
            Sequenced::Reached(reply) => drop(reply.send(())),
        }
    }

    fn command(&mut self, command: Command) {
        let Some(command) = self.defer(command) else { return };
        // Who asked may be gone by now; then nobody wants the answer.
        match command {
            Command::Admit(admission, reply) => drop(reply.send(self.admit(&admission))),
            Command::CreateRun(run, settings, reply) => drop(reply.send(self.create_run(&run, settings))),
            Command::UpdateRun(run, settings, version, reply) => {
                drop(reply.send(self.update_run(&run, settings, version)));
            }
            Command::DeleteRun(run, force, reply) => drop(reply.send(self.delete_run(&run, force))),
            Command::Subscribe(subscription, reply) => self.subscribe(subscription, reply),
            Command::Leave(consumer) => self.leave(consumer),
            Command::Ack(consumer, units, seek_count) => self.ack(consumer, units, seek_count),
            Command::Nack(consumer, units, delay_ms) => self.nack(consumer, &units, delay_ms),
            Command::Unreadable(consumer, unit) => self.unreadable(consumer, &unit),
            Command::Credit(consumer, tokens) => self.credit(consumer, tokens),
            Command::PolicyVersion(consumer, policy, version) => {
                self.policy_version(consumer, policy.as_ref(), version);
            }
            Command::SignOfLife(consumer) => self.sign_of_life(consumer),
            Command::Room(consumer) => self.room(consumer),
            Command::Waiting(consumer, reply) => drop(reply.send(self.waiting(consumer))),
            Command::ReleaseUnit { run, consumer_group, unit, drop: for_good, reply } => {
                drop(reply.send(self.release_unit(&run, &consumer_group, &unit, for_good)));
            }
            Command::ReleaseGroup(run, group, reply) => drop(reply.send(self.release_by_hand(&run, group))),
            Command::Checkpoint { run, consumer_group, reply } => {
                drop(reply.send(self.checkpoint(&run, &consumer_group)));
            }
            Command::Seek { run, consumer_group, token, reply } => self.seek(&run, &consumer_group, &token, reply),
            Command::Look(look) => self.look(look),
            Command::Carry(gathered) => self.carry(gathered),
            Command::Barrier(reply) => self.store.journal.after_last(Sequenced::Reached(reply)),
        }
    }

    /// Logs what was decided here, with its effect.
    fn log(&self, record: &Record, effect: Option<Sequenced>) -> Position {
        self.store.journal.append(self.store.journal.frame(record, self.store.unix_ms()), effect)
    }

    fn next_deadline_ms(&self) -> u64 {
        let queues = self.deadlines.first_ms();
        let tombstones = self.tombstones.keys().next().map(|(expires_ms, _)| *expires_ms);
        queues.into_iter().chain(tombstones).min().unwrap_or(u64::MAX).min(self.figures_at_ms)
    }

    fn tick(&mut self) {
        let now_ms = self.store.clock.now_ms();
        self.tick_queues(now_ms);
        self.expire_tombstones(now_ms);
        if self.figures_at_ms <= now_ms {
            self.figures_at_ms = now_ms.saturating_add(FIGURES_EVERY_MS);
            self.record_figures();
            self.ask_for_snapshot_if_useful();
            self.retire_if_memory_is_short();
            self.carry_if_needed();
            // What was read back to be looked at leaves again, though nothing comes.
            self.store.make_room(None);
        }
    }
}

/// Done when another segment of the log has begun; never, where there are none.
async fn changed(segments: &mut Option<watch::Receiver<u64>>) {
    let has_changed = match segments {
        Some(begun) => begun.changed().await.is_ok(),
        None => false,
    };
    if !has_changed {
        std::future::pending().await
    }
}

/// Beyond so many runs, debug builds leave the check of every run to tests.
const RUNS_CHECKED_EACH_TIME_MAX: usize = 128;

impl Sequencer {
    /// Checks after each turn, in debug builds: every run is looked at in time, and consumers are exactly the members of groups.
    fn verify(&self) {
        if cfg!(debug_assertions) && self.runs.len() <= RUNS_CHECKED_EACH_TIME_MAX {
            self.check();
        }
    }

    fn check(&self) {
        let mut members = 0;
        for (id, run) in &self.runs {
            let deadline_ms = run.next_deadline_ms();
            debug_assert!(
                self.seeking.contains(id) || self.deadlines.keeps(id, deadline_ms),
                "run {id:?} is looked at too late for {deadline_ms:?}"
            );
            for (name, group) in run.queue.groups() {
                for consumer in group.consumer_ids() {
                    let known = self.consumers.get(&consumer);
                    let is_it = known.is_some_and(|known| known.run == *id && known.consumer_group.as_str() == name);
                    debug_assert!(is_it, "{consumer:?} is a member of {name:?} and is not known as such");
                    members += 1;
                }
            }
        }
        debug_assert_eq!(members, self.consumers.len(), "a consumer is known and is a member of no group");
    }
}

#[cfg(test)]
mod tests;
