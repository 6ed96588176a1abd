//! Reading what the log holds of rollouts that keep it from being let go of, so that they can be written forward.
//!
//! A rollout that lives long, or whose rows nobody takes, would hold everything after its opening. So its records are read back,
//! and the sequencing task writes them again behind everything, as one copy ([`super::sequencer::carry`]). Reading is done by a
//! thread of its own; it ends as soon as all is found. Nothing is written unless all of a rollout's records were found, which its
//! count says.

use std::collections::HashMap;
use std::ops::ControlFlow;
use std::sync::Arc;

use tokio::sync::mpsc;

use crate::ids::GroupId;
use crate::log::{Dated, Frame, Log, LogError, Position, Record};
use crate::rollout::event::RolloutRecord;

use super::RolloutKey;

/// A rollout that is to be written forward.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Wanted {
    /// Which.
    pub key: RolloutKey,
    /// Its attempt.
    pub attempt: u32,
    /// Where its records begin.
    pub home: Position,
    /// How many there are after that.
    pub records: usize,
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

/// Rollouts to read, and where they go. Who asked may be gone.
pub struct Reading {
    /// The log.
    pub log: Arc<dyn Log>,
    /// What to look for.
    pub wanted: Vec<Wanted>,
}

/// Reads what it is asked for until nobody asks any more; `found` takes what was found. Blocks: for a thread of its own.
pub fn read_on_request(mut requests: mpsc::Receiver<Reading>, mut found: impl FnMut(Vec<Gathered>)) {
    while let Some(Reading { log, wanted }) = requests.blocking_recv() {
        let gathered = gather(log.as_ref(), wanted).unwrap_or_else(|error| {
            // It may have been let go of meanwhile; it is asked for again if it is still wanted.
            tracing::warn!(%error, "records could not be read back");
            Vec::new()
        });
        found(gathered);
    }
}

/// What has been found of a rollout.
struct Found {
    wanted: Wanted,
    begun: Option<(Option<GroupId>, u64)>,
    /// Whether the copy that is being read begins at its home.
    in_its_copy: bool,
    frames: Vec<Frame>,
}

/// All records of these rollouts; those of which not all were found are left out.
///
/// # Errors
/// If the log cannot be read.
pub fn gather(log: &dyn Log, wanted: Vec<Wanted>) -> Result<Vec<Gathered>, LogError> {
    let Some(from) = wanted.iter().map(|wanted| wanted.home).min() else { return Ok(Vec::new()) };
    let found = |wanted: Wanted| Found { wanted, begun: None, in_its_copy: false, frames: Vec::new() };
    let mut all: HashMap<RolloutKey, Found> =
        wanted.into_iter().map(|wanted| (wanted.key.clone(), found(wanted))).collect();
    let mut missing = all.len();
    log.read(from, &mut |position, dated| {
        let before = missing;
        missing -= usize::from(take(log, &mut all, position, dated));
        if missing == 0 && before > 0 { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    })?;
    let whole = all.into_values().filter(|found| found.frames.len() == found.wanted.records);
    Ok(whole
        .filter_map(|Found { wanted, begun, frames, .. }| {
            let (group, opened_unix_ms) = begun?;
            Some(Gathered { wanted, group, opened_unix_ms, frames })
        })
        .collect())
}

/// Takes a record of the log; true if a rollout is whole with it.
fn take(log: &dyn Log, all: &mut HashMap<RolloutKey, Found>, position: Position, dated: Dated) -> bool {
    let Dated { unix_ms, record } = dated;
    match record {
        Record::RolloutOpened { run, rollout, group, .. } => {
            let begins = |found: &mut Found| found.begin(position, (group, unix_ms));
            all.get_mut(&RolloutKey { run, rollout }).is_some_and(begins)
        }
        Record::RolloutCopyBegins(copy) => {
            let key = copy.reference.key();
            let begins = |found: &mut Found| found.begin(position, (copy.reference.group, copy.opened_unix_ms));
            all.get_mut(&key).is_some_and(begins)
        }
        Record::Rollout { run, rollout, attempt, record } => {
            let key = RolloutKey { run, rollout };
            all.get_mut(&key).is_some_and(|found| found.take(log, &key, attempt, (unix_ms, record)))
        }
        Record::RolloutCopied { run, rollout, attempt, record } => {
            let key = RolloutKey { run, rollout };
            let of_its_copy = all.get_mut(&key).filter(|found| found.in_its_copy);
            of_its_copy.is_some_and(|found| found.take(log, &key, attempt, (unix_ms, record)))
        }
        Record::Run { .. }
        | Record::RunDeleted { .. }
        | Record::GroupSize { .. }
        | Record::ConsumerGroup { .. }
        | Record::Acknowledged { .. }
        | Record::UnitDropped { .. }
        | Record::UnitReleased { .. }
        | Record::SnapshotBegins { .. }
        | Record::RunSnapshot { .. }
        | Record::RunTotals { .. }
        | Record::Tombstones { .. } => false,
    }
}

impl Found {
    /// The rollout, or a copy of it, begins here; true if there is nothing more of it.
    fn begin(&mut self, position: Position, opened: (Option<GroupId>, u64)) -> bool {
        self.in_its_copy = position == self.wanted.home;
        if self.in_its_copy {
            self.begun = Some(opened);
        }
        self.in_its_copy && self.wanted.records == 0
    }

    /// Something happened to it; true if that was the last.
    fn take(&mut self, log: &dyn Log, key: &RolloutKey, attempt: u32, (unix_ms, record): (u64, RolloutRecord)) -> bool {
        if self.begun.is_none() || attempt != self.wanted.attempt || self.frames.len() >= self.wanted.records {
            return false;
        }
        let RolloutKey { run, rollout } = key.clone();
        self.frames.push(log.frame(&Record::RolloutCopied { run, rollout, attempt, record }, unix_ms));
        self.frames.len() == self.wanted.records
    }
}
