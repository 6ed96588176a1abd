//! Reading ahead: records are decoded on one thread while what was decoded before is applied on another.
//!
//! Owns the line between the two, which holds a bounded number of batches. Keeps the order. Never does: look into a record.

use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::{self, ScopedJoinHandle};

use crate::limits;

use super::{Dated, Position, VisitAside};

/// Where who decodes puts what it has decoded.
pub(super) struct Ahead<'scope> {
    line: Option<SyncSender<Vec<(Position, Dated)>>>,
    visiting: Option<ScopedJoinHandle<'scope, ()>>,
    batch: Vec<(Position, Dated)>,
    batch_bytes: usize,
}

/// Has a thread show to `visit`, in order, what `feed` puts in, until that returns and all was shown.
pub(super) fn visit_aside<R>(visit: &mut VisitAside<'_>, feed: impl FnOnce(&mut Ahead<'_>) -> R) -> R {
    thread::scope(|scope| {
        let (line, batches) = sync_channel(limits::LOG_AHEAD_BATCHES_MAX);
        let visiting = scope.spawn(move || show(visit, &batches));
        let mut ahead = Ahead { line: Some(line), visiting: Some(visiting), batch: Vec::new(), batch_bytes: 0 };
        let result = feed(&mut ahead);
        ahead.finish();
        result
    })
}

fn show(visit: &mut VisitAside<'_>, batches: &Receiver<Vec<(Position, Dated)>>) {
    for batch in batches {
        batch.into_iter().for_each(|(position, dated)| visit(position, dated));
    }
}

impl Ahead<'_> {
    /// Puts in a record that so many bytes were decoded into. Waits while much is still to be shown.
    pub(super) fn put(&mut self, position: Position, dated: Dated, bytes: usize) {
        self.batch.push((position, dated));
        self.batch_bytes += bytes;
        if self.batch_bytes >= limits::LOG_BATCH_BYTES || self.batch.len() >= limits::LOG_AHEAD_BATCH_RECORDS {
            self.hand_over();
        }
    }

    fn hand_over(&mut self) {
        self.batch_bytes = 0;
        let batch = std::mem::take(&mut self.batch);
        if let Some(line) = &self.line {
            // Who does not take it has panicked, which goes on when it is waited for.
            let _ = line.send(batch);
        }
    }

    /// Waits until all was shown. Nothing may be put in any more.
    pub(super) fn finish(&mut self) {
        self.hand_over();
        self.line = None;
        if let Some(Err(panic)) = self.visiting.take().map(ScopedJoinHandle::join) {
            std::panic::resume_unwind(panic);
        }
    }
}
