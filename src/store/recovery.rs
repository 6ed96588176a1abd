//! Opens the log on disk and builds the state again from all that it holds.
//!
//! The service reads on a thread of its own, so that health and progress are answered meanwhile.

use std::sync::Arc;

use tokio::sync::oneshot;

use crate::log::disk::DiskLog;
use crate::log::segments::storage::Storage;
use crate::log::segments::{Options, Progress, Recovered};
use crate::log::{LogError, Position};

use super::sequencer::Sequencer;

/// A log that is open, and the state that it gives.
pub struct Recovery {
    /// The state.
    pub sequencer: Sequencer,
    /// The log.
    pub log: DiskLog,
    /// The last position that it holds.
    pub last: Position,
    /// What was found.
    pub recovered: Recovered,
}

/// Opens the log and replays it.
///
/// # Errors
/// If another process has the log, it is damaged, or holds what this build cannot read.
pub async fn recover(
    storage: Arc<dyn Storage>,
    options: Options,
    progress: Arc<Progress>,
    sequencer: Sequencer,
) -> Result<Recovery, LogError> {
    let (done, result) = oneshot::channel();
    std::thread::spawn(move || {
        // Who waited may have given up; then the log is closed again.
        let _ = done.send(read(storage, options, &progress, sequencer));
    });
    result.await.unwrap_or(Err(LogError::GivenUp))
}

/// The same on this thread, which waits for the disk.
///
/// # Errors
/// As [`recover`].
pub fn read(
    storage: Arc<dyn Storage>,
    options: Options,
    progress: &Progress,
    mut sequencer: Sequencer,
) -> Result<Recovery, LogError> {
    let mut visit = |position, dated| sequencer.replay_record(position, dated);
    let opened = DiskLog::open(storage, options, progress, &mut visit);
    let ended = sequencer.replay_ends();
    let (log, recovered) = opened?;
    ended?;
    let last = Position(recovered.next_position.0.saturating_sub(1));
    Ok(Recovery { sequencer, log, last, recovered })
}
