//! What the engine asks of a disk: files in one directory, and when what was done to them is durable.
//!
//! [`Storage`] has two implementations: [`Directory`], real files, and [`super::faulty::FaultyStorage`], which fails
//! and forgets as a disk may. A file's bytes are durable once [`File::sync`] has returned, its name once
//! [`Storage::sync_directory`] has. Nothing here tries anything twice.

use std::any::Any;
use std::fs;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::Arc;

/// Name of the file on which the exclusive lock is held.
const LOCK_NAME: &str = "lock";

/// A directory of files.
pub trait Storage: Send + Sync + 'static {
    /// Where it is, for messages.
    fn place(&self) -> String;

    /// Takes the directory for this process alone, until the answer is dropped.
    ///
    /// # Errors
    /// [`io::ErrorKind::WouldBlock`] if another process has it.
    fn lock(&self) -> io::Result<Box<dyn Any + Send + Sync>>;

    /// The names of its files, in any order.
    ///
    /// # Errors
    /// If it cannot be read.
    fn list(&self) -> io::Result<Vec<String>>;

    /// A new file of this length that reads as zeros and whose room on disk is allocated. One of this name is replaced.
    ///
    /// # Errors
    /// [`io::ErrorKind::StorageFull`] if there is no room; what was made of it may be left.
    fn create(&self, name: &str, bytes: u64) -> io::Result<Arc<dyn File>>;

    /// A file that is there.
    ///
    /// # Errors
    /// [`io::ErrorKind::NotFound`] if it is not.
    fn open(&self, name: &str) -> io::Result<Arc<dyn File>>;

    /// Gives a file another name.
    ///
    /// # Errors
    /// If it cannot be done.
    fn rename(&self, from: &str, to: &str) -> io::Result<()>;

    /// Removes a file; those that hold it open can read on.
    ///
    /// # Errors
    /// If it cannot be done.
    fn remove(&self, name: &str) -> io::Result<()>;

    /// Makes all creations, renamings and removals so far durable.
    ///
    /// # Errors
    /// If it is not known whether they are. This is final.
    fn sync_directory(&self) -> io::Result<()>;
}

/// A file of a [`Storage`].
#[expect(clippy::len_without_is_empty, reason = "no file of the log is empty")]
pub trait File: Send + Sync {
    /// Its length.
    ///
    /// # Errors
    /// If it cannot be asked.
    fn len(&self) -> io::Result<u64>;

    /// Reads from this offset; how much came, 0 at the end.
    ///
    /// # Errors
    /// If it cannot be read.
    fn read_at(&self, into: &mut [u8], offset: u64) -> io::Result<usize>;

    /// Writes at this offset, inside what is allocated.
    ///
    /// # Errors
    /// If not all was written.
    fn write_at(&self, bytes: &[u8], offset: u64) -> io::Result<()>;

    /// Makes it this long, with zeros and with room on disk.
    ///
    /// # Errors
    /// [`io::ErrorKind::StorageFull`] if there is no room.
    fn grow(&self, bytes: u64) -> io::Result<()>;

    /// Makes its bytes and its length durable.
    ///
    /// # Errors
    /// If it is not known whether they are. This is final: the next attempt may succeed without having written
    /// anything.
    fn sync(&self) -> io::Result<()>;
}

/// Real files.
pub struct Directory {
    path: PathBuf,
}

impl Directory {
    /// This directory, which is made if it is not there.
    ///
    /// # Errors
    /// If it cannot be made.
    pub fn new(path: impl Into<PathBuf>) -> io::Result<Self> {
        let path = path.into();
        if !path.is_dir() {
            fs::create_dir_all(&path)?;
            if let Some(parent) = path.parent().filter(|parent| !parent.as_os_str().is_empty()) {
                fs::File::open(parent)?.sync_all()?;
            }
        }
        Ok(Self { path })
    }
}

impl Storage for Directory {
    fn place(&self) -> String {
        self.path.display().to_string()
    }

    fn lock(&self) -> io::Result<Box<dyn Any + Send + Sync>> {
        let file = fs::File::options().write(true).create(true).truncate(false).open(self.path.join(LOCK_NAME))?;
        file.try_lock()?;
        Ok(Box::new(file))
    }

    fn list(&self) -> io::Result<Vec<String>> {
        let mut names = Vec::new();
        for entry in fs::read_dir(&self.path)? {
            // A name that is no text is none of ours.
            names.extend(entry?.file_name().into_string().ok());
        }
        Ok(names)
    }

    fn create(&self, name: &str, bytes: u64) -> io::Result<Arc<dyn File>> {
        let options = fs::File::options().read(true).write(true).create(true).truncate(true).clone();
        let file = OnDisk(options.open(self.path.join(name))?);
        file.grow(bytes)?;
        Ok(Arc::new(file))
    }

    fn open(&self, name: &str) -> io::Result<Arc<dyn File>> {
        Ok(Arc::new(OnDisk(fs::File::options().read(true).write(true).open(self.path.join(name))?)))
    }

    fn rename(&self, from: &str, to: &str) -> io::Result<()> {
        fs::rename(self.path.join(from), self.path.join(to))
    }

    fn remove(&self, name: &str) -> io::Result<()> {
        fs::remove_file(self.path.join(name))
    }

    fn sync_directory(&self) -> io::Result<()> {
        fs::File::open(&self.path)?.sync_all()
    }
}

/// A real file.
struct OnDisk(fs::File);

impl File for OnDisk {
    fn len(&self) -> io::Result<u64> {
        Ok(self.0.metadata()?.len())
    }

    fn read_at(&self, into: &mut [u8], offset: u64) -> io::Result<usize> {
        loop {
            match self.0.read_at(into, offset) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                done => return done,
            }
        }
    }

    fn write_at(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
        self.0.write_all_at(bytes, offset)
    }

    fn grow(&self, bytes: u64) -> io::Result<()> {
        let before = self.len()?;
        if before >= bytes {
            return Ok(());
        }
        match rustix::fs::fallocate(&self.0, rustix::fs::FallocateFlags::empty(), before, bytes - before) {
            // Not every file system can allocate without writing; then zeros are written, so that the room is there.
            Err(rustix::io::Errno::OPNOTSUPP | rustix::io::Errno::NOSYS) => write_zeros(self, before, bytes),
            done => Ok(done?),
        }
    }

    fn sync(&self) -> io::Result<()> {
        self.0.sync_data()
    }
}

/// Writes zeros from one offset up to another.
pub(super) fn write_zeros(file: &dyn File, from: u64, to: u64) -> io::Result<()> {
    const ZEROS: &[u8] = &[0; 64 << 10];
    let mut offset = from;
    while offset < to {
        let length = (to - offset).min(ZEROS.len() as u64);
        file.write_at(&ZEROS[..usize::try_from(length).unwrap_or(0)], offset)?;
        offset += length;
    }
    Ok(())
}
