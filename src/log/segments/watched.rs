//! A storage whose syncs are told to somebody: how many bytes each made durable, and how long it took.

use std::any::Any;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use super::storage::{File, Storage};

/// What one sync of a file did. That a file was allocated, or that nothing was written since the last, is none.
#[derive(Clone, Copy, Debug)]
pub struct Synced {
    /// The bytes written to the file since its last sync.
    pub bytes: u64,
    /// How long it took.
    pub took: Duration,
}

type Tell = dyn Fn(Synced) + Send + Sync;

/// A storage that tells of its syncs.
pub struct Watched {
    storage: Arc<dyn Storage>,
    tell: Arc<Tell>,
}

struct WatchedFile {
    file: Arc<dyn File>,
    unsynced_bytes: AtomicU64,
    tell: Arc<Tell>,
}

impl Watched {
    /// This storage; `tell` is called after each sync that succeeded, by whoever synced.
    pub fn new(storage: Arc<dyn Storage>, tell: impl Fn(Synced) + Send + Sync + 'static) -> Self {
        Self { storage, tell: Arc::new(tell) }
    }

    fn file(&self, file: Arc<dyn File>) -> Arc<dyn File> {
        Arc::new(WatchedFile { file, unsynced_bytes: AtomicU64::new(0), tell: Arc::clone(&self.tell) })
    }
}

impl Storage for Watched {
    fn place(&self) -> String {
        self.storage.place()
    }

    fn lock(&self) -> io::Result<Box<dyn Any + Send + Sync>> {
        self.storage.lock()
    }

    fn list(&self) -> io::Result<Vec<String>> {
        self.storage.list()
    }

    fn create(&self, name: &str, bytes: u64) -> io::Result<Arc<dyn File>> {
        Ok(self.file(self.storage.create(name, bytes)?))
    }

    fn open(&self, name: &str) -> io::Result<Arc<dyn File>> {
        Ok(self.file(self.storage.open(name)?))
    }

    fn rename(&self, from: &str, to: &str) -> io::Result<()> {
        self.storage.rename(from, to)
    }

    fn remove(&self, name: &str) -> io::Result<()> {
        self.storage.remove(name)
    }

    fn sync_directory(&self) -> io::Result<()> {
        self.storage.sync_directory()
    }
}

impl File for WatchedFile {
    fn len(&self) -> io::Result<u64> {
        self.file.len()
    }

    fn read_at(&self, into: &mut [u8], offset: u64) -> io::Result<usize> {
        self.file.read_at(into, offset)
    }

    fn write_at(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
        self.unsynced_bytes.fetch_add(bytes.len() as u64, Ordering::Relaxed);
        self.file.write_at(bytes, offset)
    }

    fn grow(&self, bytes: u64) -> io::Result<()> {
        self.file.grow(bytes)
    }

    fn sync(&self) -> io::Result<()> {
        let bytes = self.unsynced_bytes.swap(0, Ordering::Relaxed);
        let begun = Instant::now();
        self.file.sync()?;
        if bytes > 0 {
            (self.tell)(Synced { bytes, took: begun.elapsed() });
        }
        Ok(())
    }
}
