//! Reading back what the log holds of rollouts: to give them their tokens again, and to write them forward.
//!
//! A rollout that lives long, or whose rows nobody takes, would hold everything after its opening in the log. So its records are
//! read, and the sequencing task writes them again behind everything, as one copy ([`super::sequencer::carry`]). Tokens that have
//! left memory come back from the same records ([`super::evict`]). Threads of their own do the reading, one request at a time each.

use std::sync::Arc;

use parking_lot::Mutex;
use tokio::sync::{mpsc, oneshot};

use crate::error::Refusal;
use crate::ids::GroupId;
use crate::log::{Frame, Log, LogError, Position, Record};
use crate::rollout::event::RolloutRecord;

use super::evict::Restored;
use super::sequencer::Command;
use super::{RolloutKey, Store};

/// A rollout that is to be written forward.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Wanted {
    /// Which.
    pub key: RolloutKey,
    /// Its attempt.
    pub attempt: u32,
    /// Where its records begin.
    pub home: Position,
    /// Where they stand after that, in order.
    pub positions: Vec<Position>,
}

/// All records of a rollout, ready to be written again.
pub struct Gathered {
    /// The rollout.
    pub wanted: Wanted,
    /// The group that it was opened in.
    pub group: Option<GroupId>,
    /// When it was opened, milliseconds since the Unix epoch.
    pub opened_unix_ms: u64,
    /// Its records, as frames of a copy.
    pub frames: Vec<Frame>,
}

/// What is to be read.
pub enum Reading {
    /// Rollouts that are to be written forward.
    Carry(Vec<Wanted>),
    /// A rollout whose tokens are wanted, and who wants them. They may be gone.
    Restore(RolloutKey, oneshot::Sender<Result<Restored, Refusal>>),
}

/// Reads what it is asked for until nobody asks any more, beside others that do the same. Blocks: for a thread of its own.
pub fn read_on_request(requests: &Mutex<mpsc::Receiver<Reading>>, store: impl Fn() -> Option<Arc<Store>>) {
    loop {
        // Who waits for a request holds the lock; the others wait for the lock.
        let request = requests.lock().blocking_recv();
        let (Some(request), Some(store)) = (request, store()) else { return };
        if let Some(command) = store.serve_reading(request) {
            store.command_now(command);
        }
    }
}

impl Store {
    /// Reads what is asked for, and waits for the disk; what the sequencing task is to do with it, if it asked.
    #[must_use]
    pub fn serve_reading(&self, reading: Reading) -> Option<Command> {
        match reading {
            Reading::Carry(wanted) => {
                let log = self.log();
                Some(Command::Carry(wanted.into_iter().filter_map(|wanted| found(&**log, wanted)).collect()))
            }
            Reading::Restore(key, reply) => {
                // Who asked may be gone.
                let _ = reply.send(self.restore_now(&key));
                None
            }
        }
    }
}

/// What there is of a rollout; none if not all of it is there any more: it is asked for again if it is still wanted.
fn found(log: &dyn Log, wanted: Wanted) -> Option<Gathered> {
    let key = wanted.key.clone();
    gather(log, wanted)
        .inspect_err(
            |error| tracing::warn!(%error, run = %key.run, rollout = %key.rollout, "records could not be read back"),
        )
        .ok()?
}

/// All records of a rollout; none if others stand where they should.
///
/// # Errors
/// If the log cannot be read.
pub fn gather(log: &dyn Log, wanted: Wanted) -> Result<Option<Gathered>, LogError> {
    let mut opened = None;
    log.read_at(&[wanted.home], &mut |_, dated| {
        opened = match dated.record {
            Record::RolloutOpened { group, .. } => Some((group, dated.unix_ms)),
            Record::RolloutCopyBegins(copy) => Some((copy.reference.group, copy.opened_unix_ms)),
            Record::Run { .. }
            | Record::RunDeleted { .. }
            | Record::GroupSize { .. }
            | Record::GroupRules { .. }
            | Record::GroupReleased { .. }
            | Record::Rollout { .. }
            | Record::RolloutCopied { .. }
            | Record::ConsumerGroup { .. }
            | Record::Acknowledged { .. }
            | Record::UnitDropped { .. }
            | Record::UnitReleased { .. }
            | Record::StepFrozen { .. }
            | Record::SnapshotBegins { .. }
            | Record::RunSnapshot { .. }
            | Record::RunTotals { .. }
            | Record::RolloutsRetired { .. }
            | Record::ConsumerGroupExpired { .. }
            | Record::Sought { .. }
            | Record::Tombstones { .. } => None,
        };
    })?;
    let mut frames = Vec::with_capacity(wanted.positions.len());
    log.read_at(&wanted.positions, &mut |_, dated| {
        if let Some(record) = happened_to(&wanted.key, wanted.attempt, dated.record) {
            let RolloutKey { run, rollout } = wanted.key.clone();
            let copied = Record::RolloutCopied { run, rollout, attempt: wanted.attempt, record };
            frames.push(log.frame(&copied, dated.unix_ms));
        }
    })?;
    let is_whole = frames.len() == wanted.positions.len();
    Ok(opened.filter(|_| is_whole).map(|(group, opened_unix_ms)| Gathered { wanted, group, opened_unix_ms, frames }))
}

impl Gathered {
    /// Bytes that it takes in the log.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        let bytes = |frame: &Frame| match frame {
            Frame::Bytes { payload, .. } => payload.len() as u64,
            Frame::Record(_) | Frame::PlaceOnly => 0,
        };
        self.frames.iter().map(bytes).sum()
    }
}

/// What happened to this attempt, if the record is about that.
pub(super) fn happened_to(key: &RolloutKey, attempt: u32, record: Record) -> Option<RolloutRecord> {
    let (Record::Rollout { run, rollout, attempt: of, record }
    | Record::RolloutCopied { run, rollout, attempt: of, record }) = record
    else {
        return None;
    };
    (run == key.run && rollout == key.rollout && of == attempt).then_some(record)
}
