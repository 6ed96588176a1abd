//! Opens the log on disk and builds the state again from all that it holds.
//!
//! Records are applied while the log is looked through, as long as what they make fits into memory. What does not is applied once the
//! log is open: from then on it gives tokens back, so that they may leave memory meanwhile, as they do in a service that serves.
//!
//! The service reads on threads of its own, so that health and progress are answered meanwhile: one reads and decodes, one applies.

use std::sync::{Arc, OnceLock};

use tokio::sync::oneshot;

use crate::log::disk::DiskLog;
use crate::log::segments::storage::Storage;
use crate::log::segments::{Options, Progress, Recovered};
use crate::log::{Log, LogError, Position};

use super::sequencer::Sequencer;

/// A log that is open, and the state that it gives.
pub struct Recovery {
    /// The state.
    pub sequencer: Sequencer,
    /// The log.
    pub log: Arc<DiskLog>,
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

/// The same on this thread, which waits for the disk, and one beside it.
///
/// # Errors
/// As [`recover`].
pub fn read(
    storage: Arc<dyn Storage>,
    options: Options,
    progress: &Progress,
    mut sequencer: Sequencer,
) -> Result<Recovery, LogError> {
    // Where what was applied ends, once it fills memory.
    let left_from = OnceLock::new();
    let mut visit = |position, dated| {
        if left_from.get().is_none() && sequencer.store().lacks_room() {
            left_from.get_or_init(|| position);
        }
        if left_from.get().is_none() {
            sequencer.replay_record(position, dated);
        }
    };
    let opened = DiskLog::open(storage, options, progress, &mut visit, || left_from.get().copied());
    let (log, recovered) = opened.inspect_err(|_| drop(sequencer.replay_ends()))?;
    let (log, last) = (Arc::new(log), Position(recovered.next_position.0.saturating_sub(1)));
    if let Some(from) = left_from.get().copied() {
        read_the_rest(&log, (from, last), progress, &mut sequencer)?;
        log.truncate_before(recovered.first_position);
    }
    sequencer.replay_ends()?;
    Ok(Recovery { sequencer, log, last, recovered })
}

/// Applies what is left of a log that was looked through, from the first of these positions to the second, with tokens leaving memory
/// and coming back.
fn read_the_rest(
    log: &Arc<DiskLog>,
    (from, last): (Position, Position),
    progress: &Progress,
    sequencer: &mut Sequencer,
) -> Result<(), LogError> {
    sequencer.store().read_from(Arc::clone(log) as Arc<dyn Log>);
    let bytes = progress.total_bytes();
    let records = last.0.saturating_sub(log.first_position().0).max(1);
    // By then each record is taken to have as many bytes as any other.
    let bytes_of = |records_read: u64| {
        u64::try_from(u128::from(records_read) * u128::from(bytes) / u128::from(records)).unwrap_or(bytes)
    };
    progress.begin(bytes + bytes_of(last.0.saturating_sub(from.0)));
    log.read_aside(from, &mut |position, dated| {
        sequencer.replay_record(position, dated);
        sequencer.store().make_room(None);
        progress.reached(bytes + bytes_of(position.0 - from.0));
    })
}
