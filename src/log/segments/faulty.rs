//! A disk in memory that fails and forgets as disks do, from a seed.
//!
//! What is not synced is at the mercy of [`FaultyStorage::crash`]: of each page of 4 KiB that was written since the
//! last sync, any version may be what is left, in any combination with other pages, and of creations, renamings and
//! removals, any may be undone. A sync of a file that fails forgets: what it should have made durable can be read, and
//! is no longer waiting to be written, so that one who tries again is told that all is well and loses it. It is
//! compiled always because the simulator outside this crate runs the very engine on it; nothing in the service calls
//! it.

use std::any::Any;
use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use parking_lot::{Mutex, MutexGuard};

use super::storage::{File, Storage};

const PAGE_BYTES: usize = 4096;

/// What goes wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// The operation fails, and has done nothing, or half.
    Error,
    /// There is no room; the operation has done nothing.
    Full,
    /// The machine stops while it is under way, and all that comes after fails until [`FaultyStorage::crash`].
    Crash,
}

/// A disk in memory, as one life of a process sees it. Clones are the same disk in the same life; those that were not
/// told of the end of that life can do nothing after it.
pub struct FaultyStorage {
    disk: Arc<Mutex<Disk>>,
    life: AtomicU64,
}

impl Clone for FaultyStorage {
    fn clone(&self) -> Self {
        Self { disk: Arc::clone(&self.disk), life: AtomicU64::new(self.life()) }
    }
}

struct Disk {
    files: BTreeMap<u64, Pages>,
    names: BTreeMap<String, u64>,
    durable_names: BTreeMap<String, u64>,
    pending_names: Vec<NameChange>,
    next_file: u64,
    random: u64,
    operations: u64,
    reads: u64,
    fault: Option<(u64, Fault)>,
    read_error_at: Option<u64>,
    stopped: bool,
    capacity_bytes: u64,
    /// Goes up with each end of a process.
    life: u64,
    lock: Arc<AtomicBool>,
}

#[derive(Default)]
struct Pages {
    live: Vec<u8>,
    durable: Vec<u8>,
    /// What was written to each page since the last sync.
    dirty: BTreeMap<usize, Vec<Vec<u8>>>,
}

#[derive(Clone)]
enum NameChange {
    Set(String, u64),
    Renamed(String, String),
    Removed(String),
}

impl FaultyStorage {
    /// An empty disk without faults.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        let disk = Disk {
            files: BTreeMap::new(),
            names: BTreeMap::new(),
            durable_names: BTreeMap::new(),
            pending_names: Vec::new(),
            next_file: 1,
            random: seed,
            operations: 0,
            reads: 0,
            fault: None,
            read_error_at: None,
            stopped: false,
            capacity_bytes: u64::MAX,
            life: 0,
            lock: Arc::default(),
        };
        Self { disk: Arc::new(Mutex::new(disk)), life: AtomicU64::new(0) }
    }

    /// Has one operation from now fail: 0 is the next that writes, syncs or changes names.
    pub fn fail_in(&self, operations: u64, fault: Fault) {
        let mut disk = self.disk.lock();
        disk.fault = Some((disk.operations + operations, fault));
    }

    /// Has one read from now fail: 0 is the next.
    pub fn fail_read_in(&self, reads: u64) {
        let mut disk = self.disk.lock();
        disk.read_error_at = Some(disk.reads + reads);
    }

    /// Takes back what was to fail; whether it was still to come.
    pub fn heal(&self) -> bool {
        let mut disk = self.disk.lock();
        disk.read_error_at = None;
        disk.fault.take().is_some()
    }

    /// What all files take.
    #[must_use]
    pub fn used_bytes(&self) -> u64 {
        let disk = self.disk.lock();
        disk.names.values().filter_map(|file| disk.files.get(file)).map(|pages| pages.live.len() as u64).sum()
    }

    /// How many operations there were that write, sync or change names.
    #[must_use]
    pub fn operations(&self) -> u64 {
        self.disk.lock().operations
    }

    /// Room for files, all together. What is there stays.
    pub fn set_capacity_bytes(&self, bytes: u64) {
        self.disk.lock().capacity_bytes = bytes;
    }

    /// The process ends, and the machine goes on: all that was written is there, durable or not. What held this disk
    /// before, other than this handle, holds it no more.
    pub fn kill(&self) {
        let mut disk = self.disk.lock();
        disk.end_life();
        self.life.store(disk.life, Ordering::Relaxed);
    }

    /// The machine stops and starts again: what was not durable is there, or partly, or not. What held this disk
    /// before, other than this handle, holds it no more.
    pub fn crash(&self) {
        let mut disk = self.disk.lock();
        let disk = &mut *disk;
        for change in std::mem::take(&mut disk.pending_names) {
            if below(&mut disk.random, 2) == 0 {
                change.apply(&mut disk.durable_names);
            }
        }
        disk.names = disk.durable_names.clone();
        let names = &disk.names;
        disk.files.retain(|file, _| names.values().any(|named| named == file));
        for pages in disk.files.values_mut() {
            pages.crash(&mut disk.random);
        }
        disk.end_life();
        self.life.store(disk.life, Ordering::Relaxed);
    }

    fn life(&self) -> u64 {
        self.life.load(Ordering::Relaxed)
    }

    /// The disk, if this life of the process goes on.
    fn alive(&self) -> io::Result<MutexGuard<'_, Disk>> {
        let disk = self.disk.lock();
        if disk.stopped || disk.life != self.life() { Err(stopped()) } else { Ok(disk) }
    }

    /// The bytes of a file, for a test that looks at them.
    #[must_use]
    pub fn bytes(&self, name: &str) -> Option<Vec<u8>> {
        let disk = self.disk.lock();
        Some(disk.files.get(disk.names.get(name)?)?.live.clone())
    }

    /// Makes a file of these bytes, durably, behind the engine's back.
    pub fn put(&self, name: &str, bytes: &[u8]) {
        let mut disk = self.disk.lock();
        let file = disk.next_file;
        disk.next_file += 1;
        disk.files.insert(file, Pages { live: bytes.to_vec(), durable: bytes.to_vec(), dirty: BTreeMap::new() });
        disk.names.insert(name.to_owned(), file);
        disk.durable_names.insert(name.to_owned(), file);
    }

    /// Removes a file, durably, behind the engine's back.
    pub fn take(&self, name: &str) {
        let mut disk = self.disk.lock();
        disk.names.remove(name);
        disk.durable_names.remove(name);
    }
}

impl Disk {
    fn end_life(&mut self) {
        self.stopped = false;
        self.fault = None;
        self.read_error_at = None;
        self.life += 1;
        self.lock = Arc::default();
    }

    /// Counts an operation; the fault that strikes it, if one does.
    fn begin(&mut self, life: u64) -> io::Result<Option<Fault>> {
        if self.stopped || life != self.life {
            return Err(stopped());
        }
        let number = self.operations;
        self.operations += 1;
        let fault = self.fault.take_if(|(at, _)| *at == number).map(|(_, fault)| fault);
        self.stopped |= fault == Some(Fault::Crash);
        Ok(fault)
    }

    /// Changes names, or not, as the fault has it.
    fn change(&mut self, change: NameChange) -> io::Result<()> {
        let fault = self.begin(self.life)?;
        if matches!(fault, None | Some(Fault::Crash)) {
            change.apply(&mut self.names);
            self.pending_names.push(change);
        }
        fault.map_or(Ok(()), |fault| Err(fault.error()))
    }

    fn allocated_bytes(&self) -> u64 {
        let named = |file: &u64| self.names.values().any(|named| named == file);
        self.files.iter().filter(|(file, _)| named(file)).map(|(_, pages)| pages.live.len() as u64).sum()
    }
}

impl Storage for FaultyStorage {
    fn place(&self) -> String {
        "memory".to_owned()
    }

    fn lock(&self) -> io::Result<Box<dyn Any + Send + Sync>> {
        let held = Arc::clone(&self.alive()?.lock);
        if held.swap(true, Ordering::SeqCst) {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        Ok(Box::new(Held(held)))
    }

    fn list(&self) -> io::Result<Vec<String>> {
        Ok(self.alive()?.names.keys().cloned().collect())
    }

    fn create(&self, name: &str, bytes: u64) -> io::Result<Arc<dyn File>> {
        let file = {
            let mut disk = self.alive()?;
            let file = disk.next_file;
            disk.change(NameChange::Set(name.to_owned(), file))?;
            disk.next_file += 1;
            disk.files.insert(file, Pages::default());
            self.handle(file, disk.life)
        };
        file.grow(bytes)?;
        Ok(file)
    }

    fn open(&self, name: &str) -> io::Result<Arc<dyn File>> {
        let disk = self.alive()?;
        let file = *disk.names.get(name).ok_or(io::ErrorKind::NotFound)?;
        Ok(self.handle(file, disk.life))
    }

    fn rename(&self, from: &str, to: &str) -> io::Result<()> {
        self.alive()?.change(NameChange::Renamed(from.to_owned(), to.to_owned()))
    }

    fn remove(&self, name: &str) -> io::Result<()> {
        self.alive()?.change(NameChange::Removed(name.to_owned()))
    }

    fn sync_directory(&self) -> io::Result<()> {
        let mut disk = self.alive()?;
        let life = disk.life;
        let fault = disk.begin(life)?;
        if fault == Some(Fault::Crash) {
            return Err(stopped());
        }
        match fault {
            None => {
                let changes = std::mem::take(&mut disk.pending_names);
                changes.into_iter().for_each(|change| change.apply(&mut disk.durable_names));
                Ok(())
            }
            Some(fault) => Err(fault.error()),
        }
    }
}

impl FaultyStorage {
    fn handle(&self, file: u64, life: u64) -> Arc<dyn File> {
        Arc::new(FaultyFile { disk: Arc::clone(&self.disk), file, life })
    }
}

/// Lets go of the lock when the machine did not stop before.
struct Held(Arc<AtomicBool>);

impl Drop for Held {
    fn drop(&mut self) {
        self.0.store(false, Ordering::SeqCst);
    }
}

struct FaultyFile {
    disk: Arc<Mutex<Disk>>,
    file: u64,
    life: u64,
}

impl FaultyFile {
    /// Does it, unless a fault strikes; what a fault leaves of it is up to `half`.
    fn operate(&self, whole: impl FnOnce(&mut Pages), half: impl FnOnce(&mut Pages, Fault)) -> io::Result<()> {
        let mut disk = self.disk.lock();
        let fault = disk.begin(self.life)?;
        let pages = disk.files.get_mut(&self.file).ok_or(io::ErrorKind::NotFound)?;
        match fault {
            None => {
                whole(pages);
                Ok(())
            }
            Some(fault) => {
                half(pages, fault);
                Err(fault.error())
            }
        }
    }
}

impl File for FaultyFile {
    fn len(&self) -> io::Result<u64> {
        let disk = self.disk.lock();
        Ok(disk.files.get(&self.file).ok_or(io::ErrorKind::NotFound)?.live.len() as u64)
    }

    fn read_at(&self, into: &mut [u8], offset: u64) -> io::Result<usize> {
        let mut disk = self.disk.lock();
        let number = disk.reads;
        disk.reads += 1;
        if disk.stopped || disk.life != self.life || disk.read_error_at == Some(number) {
            return Err(io::Error::other("a read failed"));
        }
        let live = &disk.files.get(&self.file).ok_or(io::ErrorKind::NotFound)?.live;
        let from = live.get(usize::try_from(offset).unwrap_or(usize::MAX)..).unwrap_or_default();
        let length = from.len().min(into.len());
        into[..length].copy_from_slice(&from[..length]);
        Ok(length)
    }

    fn write_at(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
        let offset = usize::try_from(offset).unwrap_or(usize::MAX);
        self.operate(
            |pages| pages.write(bytes, offset),
            |pages, fault| match fault {
                Fault::Error => pages.write(&bytes[..bytes.len() / 2], offset),
                Fault::Crash => pages.write(bytes, offset),
                Fault::Full => {}
            },
        )
    }

    fn grow(&self, bytes: u64) -> io::Result<()> {
        {
            let disk = self.disk.lock();
            let before = disk.files.get(&self.file).map_or(0, |pages| pages.live.len() as u64);
            if disk.allocated_bytes() + bytes.saturating_sub(before) > disk.capacity_bytes {
                return Err(io::ErrorKind::StorageFull.into());
            }
        }
        let bytes = usize::try_from(bytes).unwrap_or(usize::MAX);
        let grow = |pages: &mut Pages| pages.live.resize(bytes.max(pages.live.len()), 0);
        self.operate(grow, |pages, fault| {
            if fault == Fault::Crash {
                grow(pages);
            }
        })
    }

    fn sync(&self) -> io::Result<()> {
        self.operate(Pages::sync, |pages, fault| {
            if fault != Fault::Crash {
                pages.dirty.clear();
            }
        })
    }
}

impl Pages {
    fn write(&mut self, bytes: &[u8], offset: usize) {
        let end = offset + bytes.len();
        if bytes.is_empty() {
            return;
        }
        self.live.resize(self.live.len().max(end), 0);
        self.live[offset..end].copy_from_slice(bytes);
        for page in offset / PAGE_BYTES..=(end - 1) / PAGE_BYTES {
            let version = self.live[page_range(page, self.live.len())].to_vec();
            self.dirty.entry(page).or_default().push(version);
        }
    }

    fn sync(&mut self) {
        self.durable.resize(self.live.len(), 0);
        for page in std::mem::take(&mut self.dirty).into_keys() {
            let range = page_range(page, self.live.len());
            self.durable[range.clone()].copy_from_slice(&self.live[range]);
        }
    }

    fn crash(&mut self, random: &mut u64) {
        if self.durable.len() < self.live.len() && below(random, 2) == 0 {
            self.durable.resize(self.live.len(), 0);
        }
        for (page, mut versions) in std::mem::take(&mut self.dirty) {
            let chosen = below(random, 1 + versions.len() as u64);
            let range = page_range(page, self.durable.len());
            if chosen > 0 && !range.is_empty() {
                let mut version = versions.swap_remove(usize::try_from(chosen - 1).unwrap_or(0));
                version.resize(range.len(), 0);
                self.durable[range].copy_from_slice(&version);
            }
        }
        self.live = self.durable.clone();
    }
}

impl NameChange {
    fn apply(&self, names: &mut BTreeMap<String, u64>) {
        match self {
            Self::Set(name, file) => drop(names.insert(name.clone(), *file)),
            Self::Removed(name) => drop(names.remove(name)),
            Self::Renamed(from, to) => {
                if let Some(file) = names.remove(from) {
                    names.insert(to.clone(), file);
                }
            }
        }
    }
}

impl Fault {
    fn error(self) -> io::Error {
        match self {
            Self::Error => io::Error::other("input/output error"),
            Self::Full => io::ErrorKind::StorageFull.into(),
            Self::Crash => stopped(),
        }
    }
}

fn stopped() -> io::Error {
    io::Error::other("the machine has stopped")
}

fn page_range(page: usize, length: usize) -> std::ops::Range<usize> {
    (page * PAGE_BYTES).min(length)..((page + 1) * PAGE_BYTES).min(length)
}

/// A number below this one, from the next state of SplitMix64.
pub(super) fn below(state: &mut u64, bound: u64) -> u64 {
    *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let mut mixed = *state;
    mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    (mixed ^ (mixed >> 31)) % bound.max(1)
}
