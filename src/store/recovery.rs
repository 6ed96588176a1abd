//! Opens the log on disk and builds the state again from all that it holds.
//!
//! Where all that the log may make fits into memory, records are applied while the log is looked through. Else it is looked through
//! first, and then read once more from where it begins: from then on it gives tokens back, so that they may leave memory while it is
//! applied, as they do in a service that serves.
//!
//! The service reads on a thread of its own, so that health and progress are answered meanwhile.

use std::ops::ControlFlow;
use std::sync::Arc;

use tokio::sync::oneshot;

use crate::log::disk::DiskLog;
use crate::log::segments::storage::Storage;
use crate::log::segments::{Options, Progress, Recovered, SegmentLog};
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
    let fits = sequencer.store().has_room_for_log(SegmentLog::estimate_bytes(&*storage)?);
    let mut visit = |position, dated| {
        if fits {
            sequencer.replay_record(position, dated);
        }
    };
    let opened = DiskLog::open(storage, options, progress, &mut visit);
    let (log, recovered) = opened.inspect_err(|_| drop(sequencer.replay_ends()))?;
    let (log, last) = (Arc::new(log), Position(recovered.next_position.0.saturating_sub(1)));
    if !fits {
        read_again(&log, last, progress, &mut sequencer)?;
    }
    sequencer.replay_ends()?;
    Ok(Recovery { sequencer, log, last, recovered })
}

/// Applies all records of a log that was looked through, with tokens leaving memory and coming back.
fn read_again(
    log: &Arc<DiskLog>,
    last: Position,
    progress: &Progress,
    sequencer: &mut Sequencer,
) -> Result<(), LogError> {
    sequencer.store().read_from(Arc::clone(log) as Arc<dyn Log>);
    let (bytes, first) = (progress.total_bytes(), log.first_position());
    progress.begin(2 * bytes);
    let records = last.0.saturating_sub(first.0).max(1);
    log.read(first, &mut |position, dated| {
        sequencer.replay_record(position, dated);
        sequencer.store().make_room(None);
        let share = u128::from(position.0 - first.0) * u128::from(bytes) / u128::from(records);
        progress.reached(bytes + u64::try_from(share).unwrap_or(bytes));
        ControlFlow::Continue(())
    })
}
