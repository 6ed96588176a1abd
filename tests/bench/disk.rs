//! The disk as the log sees it, with what it was asked to write and how long that took; and the bare writer and reader beside it.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use hedgerow::limits;
use hedgerow::log::segments::Options;
use hedgerow::log::segments::storage::{Directory, Storage as _};
use hedgerow::log::segments::watched::{Synced, Watched};
use hedgerow::service::LogSource;

/// A directory of its own, which goes with this.
pub(crate) struct Scratch(PathBuf);

impl Scratch {
    /// On the disk on which the project is built.
    pub(crate) fn new() -> Self {
        static COUNT: AtomicU64 = AtomicU64::new(0);
        let number = COUNT.fetch_add(1, Ordering::Relaxed);
        let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("bench-{}-{number}", std::process::id()));
        std::fs::create_dir_all(&path).expect("a folder of its own");
        Self(path)
    }

    /// It as the log's storage.
    pub(crate) fn storage(&self) -> Measured {
        let directory = Directory::new(&self.0).expect("the folder is there");
        let syncs = Arc::<Mutex<Syncs>>::default();
        let noted = Arc::clone(&syncs);
        let note = move |synced: Synced| {
            let mut syncs = noted.lock().unwrap_or_else(PoisonError::into_inner);
            syncs.bytes += synced.bytes;
            syncs.untaken.push(synced);
        };
        Measured { storage: Arc::new(Watched::new(Arc::new(directory), note)), syncs }
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// A log's storage whose syncs are noted.
pub(crate) struct Measured {
    pub(crate) storage: Arc<Watched>,
    syncs: Arc<Mutex<Syncs>>,
}

#[derive(Default)]
struct Syncs {
    /// All that was made durable.
    bytes: u64,
    untaken: Vec<Synced>,
}

impl Measured {
    /// A log there, with these options.
    pub(crate) fn log(&self, options: Options) -> LogSource {
        LogSource::Disk { storage: Arc::clone(&self.storage) as _, options }
    }

    /// Bytes made durable so far.
    pub(crate) fn durable_bytes(&self) -> u64 {
        self.syncs.lock().unwrap_or_else(PoisonError::into_inner).bytes
    }

    /// The syncs since this was asked last.
    pub(crate) fn take_syncs(&self) -> Vec<Synced> {
        std::mem::take(&mut self.syncs.lock().unwrap_or_else(PoisonError::into_inner).untaken)
    }
}

/// Writes and syncs pieces of these sizes into allocated files of a segment's size, as the least that any log does; how long each
/// took.
pub(crate) fn bare_writes(pieces: impl IntoIterator<Item = u64>) -> Vec<Duration> {
    let scratch = Scratch::new();
    let directory = Directory::new(&scratch.0).expect("the folder is there");
    let block = vec![7_u8; 1 << 20];
    let create = |number: usize| {
        directory.create(&format!("bare-{number}"), limits::LOG_SEGMENT_BYTES).expect("there is room on the disk")
    };
    let (mut file, mut files, mut offset) = (create(0), 1, 0);
    let mut times = Vec::new();
    for piece in pieces {
        if offset + piece > limits::LOG_SEGMENT_BYTES {
            (file, files, offset) = (create(files), files + 1, 0);
        }
        let begun = Instant::now();
        let end = offset + piece;
        while offset < end {
            let length = (end - offset).min(block.len() as u64);
            file.write_at(&block[..usize::try_from(length).unwrap_or(0)], offset).expect("it is written");
            offset += length;
        }
        file.sync().expect("it is synced");
        times.push(begun.elapsed());
    }
    times
}

/// The seconds in which a bare writer makes so many bytes durable, in pieces of 1 MiB.
pub(crate) fn bare_write_seconds(bytes: u64) -> f64 {
    let pieces = std::iter::repeat_n(1 << 20, usize::try_from(bytes >> 20).unwrap_or(0));
    bare_writes(pieces.chain(std::iter::once((bytes & ((1 << 20) - 1)).max(1)))).iter().sum::<Duration>().as_secs_f64()
}
