//! The disk as the log sees it, with what it was asked to write and how long that took; and the bare writer and reader beside it.

use std::any::Any;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use hedgerow::limits;
use hedgerow::log::segments::storage::{Directory, File, Storage};

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
    pub(crate) fn storage(&self) -> Arc<Measured> {
        let directory = Directory::new(&self.0).expect("the folder is there");
        Arc::new(Measured { directory, written: Arc::default() })
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// A directory whose writes and syncs are noted.
pub(crate) struct Measured {
    directory: Directory,
    written: Arc<Written>,
}

/// What was written.
#[derive(Default)]
struct Written {
    bytes: AtomicU64,
    /// Bytes since the last sync.
    unsynced_bytes: AtomicU64,
    syncs: Mutex<Vec<Sync>>,
}

/// One `fdatasync`: of how many bytes, and how long it took.
#[derive(Clone, Copy)]
pub(crate) struct Sync {
    pub(crate) bytes: u64,
    pub(crate) took: Duration,
}

struct MeasuredFile {
    file: Arc<dyn File>,
    written: Arc<Written>,
}

impl Measured {
    /// Bytes written so far.
    pub(crate) fn written_bytes(&self) -> u64 {
        self.written.bytes.load(Ordering::Relaxed)
    }

    /// The syncs since this was asked last.
    pub(crate) fn take_syncs(&self) -> Vec<Sync> {
        std::mem::take(&mut *self.written.syncs.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn file(&self, file: Arc<dyn File>) -> Arc<dyn File> {
        Arc::new(MeasuredFile { file, written: Arc::clone(&self.written) })
    }
}

impl Storage for Measured {
    fn place(&self) -> String {
        self.directory.place()
    }

    fn lock(&self) -> io::Result<Box<dyn Any + Send + std::marker::Sync>> {
        self.directory.lock()
    }

    fn list(&self) -> io::Result<Vec<String>> {
        self.directory.list()
    }

    fn create(&self, name: &str, bytes: u64) -> io::Result<Arc<dyn File>> {
        Ok(self.file(self.directory.create(name, bytes)?))
    }

    fn open(&self, name: &str) -> io::Result<Arc<dyn File>> {
        Ok(self.file(self.directory.open(name)?))
    }

    fn rename(&self, from: &str, to: &str) -> io::Result<()> {
        self.directory.rename(from, to)
    }

    fn remove(&self, name: &str) -> io::Result<()> {
        self.directory.remove(name)
    }

    fn sync_directory(&self) -> io::Result<()> {
        self.directory.sync_directory()
    }
}

impl File for MeasuredFile {
    fn len(&self) -> io::Result<u64> {
        self.file.len()
    }

    fn read_at(&self, into: &mut [u8], offset: u64) -> io::Result<usize> {
        self.file.read_at(into, offset)
    }

    fn write_at(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
        self.written.bytes.fetch_add(bytes.len() as u64, Ordering::Relaxed);
        self.written.unsynced_bytes.fetch_add(bytes.len() as u64, Ordering::Relaxed);
        self.file.write_at(bytes, offset)
    }

    fn grow(&self, bytes: u64) -> io::Result<()> {
        self.file.grow(bytes)
    }

    fn sync(&self) -> io::Result<()> {
        let bytes = self.written.unsynced_bytes.swap(0, Ordering::Relaxed);
        let begun = Instant::now();
        let done = self.file.sync();
        let sync = Sync { bytes, took: begun.elapsed() };
        // Spares are synced too; they take no part in an answer.
        if bytes > 0 {
            self.written.syncs.lock().unwrap_or_else(PoisonError::into_inner).push(sync);
        }
        done
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
