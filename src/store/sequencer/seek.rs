//! Checkpoints of consumer groups, and going back to them.
//!
//! A seek is one record: that what was acknowledged at a position is acknowledged, and nothing else. It must find the run as it was
//! judged, in a replay too. So while a seek is on its way, the consumers of its group are let go, and nothing of its run is settled,
//! released, ended by a clock or for room, or written forward, until the record is applied, some milliseconds later.

use tokio::sync::oneshot;

use crate::error::{Reason, Refusal};
use crate::ids::{ConsumerGroupId, RunId};
use crate::log::{Position, Record};
use crate::queue::{ConsumerGroup, SeekRefused};

use super::super::checkpoint::{BadToken, Checkpoint};
use super::super::effect::Sequenced;
use super::consumers::{ToConsumer, unit_not_found};
use super::runs::run_not_found;
use super::{Command, RunState, Sequencer, UnitRows};

/// A checkpoint, for who asks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CheckpointFacts {
    /// The token.
    pub token: Vec<u8>,
    /// How many units the group has acknowledged.
    pub acknowledged_units: u64,
    /// How long rollouts are kept that every group has acknowledged.
    pub retention_ms: u64,
}

/// What a seek did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sought {
    /// How often the group was sought.
    pub seek_count: u64,
    /// Units that will be given out though they had been acknowledged.
    pub restored_units: u64,
}

/// Where the answer to a seek goes.
pub type SeekReply = oneshot::Sender<Result<Sought, Refusal>>;

/// A seek that waits until all that was logged before is applied.
#[derive(Debug)]
pub struct SeekReady {
    /// The run.
    pub run: RunId,
    /// The consumer group.
    pub consumer_group: ConsumerGroupId,
    /// What was acknowledged there is to be restored.
    pub to: Position,
    /// Where the answer goes.
    pub reply: SeekReply,
}

impl Sequencer {
    pub(super) fn checkpoint(
        &self,
        run_id: &RunId,
        consumer_group: &ConsumerGroupId,
    ) -> Result<CheckpointFacts, Refusal> {
        let run = self.runs.get(run_id).ok_or_else(|| run_not_found(run_id))?;
        let group = lasting(run, consumer_group)?;
        let checkpoint = Checkpoint {
            run_created_unix_ms: run.shared.created_unix_ms,
            made_at: Position(group.made_at()),
            at: Position(group.changed_at()),
        };
        Ok(CheckpointFacts {
            token: checkpoint.to_token(run_id, consumer_group),
            acknowledged_units: group.acknowledged_units(),
            retention_ms: run.settings_now().retention_ms,
        })
    }

    /// Begins to go back, if that is possible.
    pub(super) fn seek(&mut self, run_id: &RunId, consumer_group: &ConsumerGroupId, token: &[u8], reply: SeekReply) {
        let to = match self.judge_seek(run_id, consumer_group, token) {
            Ok(to) => to,
            Err(refusal) => return drop(reply.send(Err(refusal))),
        };
        // Seeks without a pause must not keep the log from being let go of.
        self.snapshot_if_due();
        self.seeking.insert(run_id.clone());
        self.deadlines.put(run_id, None);
        let message = "the consumer group was sought to a checkpoint; let go of what you hold, and subscribe again";
        let refusal = Refusal::new(Reason::Sought, message).field("subscription.consumer_group");
        for id in self.members(run_id, consumer_group.as_str()) {
            if let Some(member) = self.consumers.remove(&id) {
                // A full line ends with its channel all the same.
                let _ = member.sender.try_send(ToConsumer::Ended(refusal.clone()));
            }
        }
        let now_ms = self.store.clock.now_ms();
        let group = self.runs.get_mut(run_id).and_then(|run| run.queue.group_mut(consumer_group.as_str()));
        group.into_iter().for_each(|group| group.release_all(now_ms));
        let (run, consumer_group) = (run_id.clone(), consumer_group.clone());
        let ready = SeekReady { run, consumer_group, to, reply };
        self.store.journal.after_last(Sequenced::SeekReady(Box::new(ready)));
    }

    /// Where the token says to go back to.
    fn judge_seek(&self, run_id: &RunId, consumer_group: &ConsumerGroupId, token: &[u8]) -> Result<Position, Refusal> {
        let run = self.runs.get(run_id).ok_or_else(|| run_not_found(run_id))?;
        let group = lasting(run, consumer_group)?;
        let invalid = |message: String| Refusal::new(Reason::InvalidValue, message).field("checkpoint");
        let checkpoint = Checkpoint::of_token(token, run_id, consumer_group).map_err(|bad| match bad {
            BadToken::NoToken => {
                invalid("this is no checkpoint, or not all of it; send what Checkpoint gave".to_owned())
            }
            BadToken::OfAnother => {
                invalid(format!("this is a checkpoint of another run or consumer group than {consumer_group:?}"))
            }
        })?;
        let is_this = checkpoint.run_created_unix_ms == run.shared.created_unix_ms
            && checkpoint.made_at == Position(group.made_at());
        if !is_this {
            return Err(not_retained("it is of a run or consumer group of this name that was deleted or has expired"));
        }
        group.judge_seek(checkpoint.at.0).map_err(in_words)?;
        Ok(checkpoint.at)
    }

    /// All that was logged before is applied, and nothing that settles anything is on its way.
    pub(super) fn seek_is_ready(&mut self, ready: SeekReady) {
        if self.needed.is_snapshotting() {
            // What is counted with the snapshot is to be about a time before the seek.
            return self.store.journal.after_last(Sequenced::SeekReady(Box::new(ready)));
        }
        let SeekReady { run: run_id, consumer_group, to, reply } = ready;
        let judged = match self.runs.get(&run_id).map(|run| lasting(run, &consumer_group)) {
            None => Err(run_not_found(&run_id)),
            Some(group) => group.and_then(|group| group.judge_seek(to.0).map_err(in_words)),
        };
        if let Err(refusal) = judged {
            drop(reply.send(Err(refusal)));
            return self.seek_is_over(&run_id);
        }
        let record = Record::Sought { run: run_id.clone(), consumer_group: consumer_group.clone(), to };
        self.log(&record, Some(Sequenced::Sought { run: run_id, consumer_group, to, reply: Some(reply) }));
    }

    /// A seek is durable. Live and in replay.
    pub(super) fn sought(
        &mut self,
        run_id: &RunId,
        consumer_group: &ConsumerGroupId,
        (to, at): (Position, Position),
        reply: Option<SeekReply>,
    ) {
        let sought = self.go_back(run_id, consumer_group, (to, at));
        if let Some(reply) = reply {
            tracing::info!(run = %run_id, %consumer_group, ?sought, "a consumer group was sought to a checkpoint");
            let gone = || unit_not_found(consumer_group, None);
            drop(reply.send(sought.ok_or_else(gone)));
            self.seek_is_over(run_id);
        }
    }

    /// What the group had acknowledged at `to` is acknowledged from `at` on; none if there is no such group.
    fn go_back(
        &mut self,
        run_id: &RunId,
        consumer_group: &ConsumerGroupId,
        (to, at): (Position, Position),
    ) -> Option<Sought> {
        let now_ms = self.store.clock.now_ms();
        let RunState { queue, retained, .. } = self.runs.get_mut(run_id)?;
        let group = queue.group_mut(consumer_group.as_str())?;
        let definition = group.definition().clone();
        let units_of = |number: &u64| retained.get(number).map(|one| one.units_again(&definition)).unwrap_or_default();
        let (restored_units, effects) = group.apply_seek(to.0, at.0, units_of, now_ms);
        let seek_count = group.seek_count();
        for effect in effects {
            self.queue_effect(run_id, consumer_group.as_str(), effect);
        }
        self.stirred.insert(run_id.clone());
        Some(Sought { seek_count, restored_units })
    }

    /// Deliveries go on, with what has waited.
    fn seek_is_over(&mut self, run_id: &RunId) {
        self.seeking.remove(run_id);
        self.stirred.insert(run_id.clone());
        for (run, consumer_group, decision) in std::mem::take(&mut self.deferred_decisions) {
            self.decide(&run, &consumer_group, vec![decision]);
        }
        for command in std::mem::take(&mut self.deferred) {
            self.command(command);
        }
    }

    /// Takes a command whose run does not stand still; keeps it else.
    pub(super) fn defer(&mut self, command: Command) -> Option<Command> {
        if self.seeking.is_empty() {
            return Some(command);
        }
        let of_consumer = |id| self.consumers.get(id).map(|consumer| &consumer.run);
        let run = match &command {
            Command::Leave(id)
            | Command::Ack(id, ..)
            | Command::Nack(id, ..)
            | Command::Unreadable(id, _)
            | Command::PolicyVersion(id, ..) => of_consumer(id),
            Command::Subscribe(subscription, _) => Some(&subscription.run),
            Command::UpdateRun(run, ..)
            | Command::DeleteRun(run, ..)
            | Command::ReleaseUnit { run, .. }
            | Command::ReleaseGroup(run, ..)
            | Command::Seek { run, .. } => Some(run),
            Command::Admit(..)
            | Command::CreateRun(..)
            | Command::Credit(..)
            | Command::SignOfLife(_)
            | Command::Room(_)
            | Command::Waiting(..)
            | Command::Checkpoint { .. }
            | Command::Carry(_)
            | Command::Look(_) => None,
            // What it waits for may be among what is kept.
            Command::Barrier(_) => self.seeking.first(),
        };
        if run.is_some_and(|run| self.seeking.contains(run)) {
            self.deferred.push(command);
            return None;
        }
        Some(command)
    }
}

/// A consumer group that is not somebody's passing look.
fn lasting<'a>(
    run: &'a RunState,
    consumer_group: &ConsumerGroupId,
) -> Result<&'a ConsumerGroup<u64, UnitRows>, Refusal> {
    let group = run.queue.group(consumer_group.as_str()).filter(|group| !group.definition().ephemeral);
    group.ok_or_else(|| unit_not_found(consumer_group, None))
}

fn in_words(refused: SeekRefused) -> Refusal {
    not_retained(match refused {
        SeekRefused::NotRetained => {
            "units that were acknowledged since are not kept any more; a run's setting `retention` keeps them longer"
        }
        SeekRefused::NotReached => "it is newer than all that this log holds of the consumer group",
    })
}

fn not_retained(why: &str) -> Refusal {
    let message = format!("the checkpoint cannot be restored: {why}");
    Refusal::new(Reason::NotRetained, message).field("checkpoint")
}
