//! What the engine costs beside a bare writer of the same bytes. Run it alone, in a release build:
//! `cargo test --release --lib log::segments::tests::bench -- --ignored --nocapture`.

use std::fs;
use std::os::unix::fs::FileExt;
use std::sync::mpsc;
use std::time::Instant;

use super::super::storage::{Directory, File};
use super::files::Scratch;
use super::*;

const TOTAL_BYTES: usize = 768 << 20;
const PACED_BYTES_PER_MS: usize = 20_000;

fn options() -> Options {
    Options::new(1)
}

/// A directory that notes how long each sync of a file takes, so that a latency can be held against the disk of that very time.
struct Timed {
    directory: Directory,
    syncs: Arc<Mutex<Vec<Duration>>>,
}

struct TimedFile {
    file: Arc<dyn File>,
    syncs: Arc<Mutex<Vec<Duration>>>,
}

impl Storage for Timed {
    fn place(&self) -> String {
        self.directory.place()
    }

    fn lock(&self) -> io::Result<Box<dyn Any + Send + Sync>> {
        self.directory.lock()
    }

    fn list(&self) -> io::Result<Vec<String>> {
        self.directory.list()
    }

    fn create(&self, name: &str, bytes: u64) -> io::Result<Arc<dyn File>> {
        let file = self.directory.create(name, bytes)?;
        Ok(Arc::new(TimedFile { file, syncs: Arc::clone(&self.syncs) }))
    }

    fn open(&self, name: &str) -> io::Result<Arc<dyn File>> {
        let file = self.directory.open(name)?;
        Ok(Arc::new(TimedFile { file, syncs: Arc::clone(&self.syncs) }))
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

impl File for TimedFile {
    fn len(&self) -> io::Result<u64> {
        self.file.len()
    }

    fn read_at(&self, into: &mut [u8], offset: u64) -> io::Result<usize> {
        self.file.read_at(into, offset)
    }

    fn write_at(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
        self.file.write_at(bytes, offset)
    }

    fn grow(&self, bytes: u64) -> io::Result<()> {
        self.file.grow(bytes)
    }

    fn sync(&self) -> io::Result<()> {
        let begun = Instant::now();
        let done = self.file.sync();
        self.syncs.lock().push(begun.elapsed());
        done
    }
}

/// Writes and syncs pieces of this size into allocated segments, as the least that any log does; the times of each.
fn bare(storage: &Directory, piece_bytes: usize, total_bytes: usize) -> Vec<Duration> {
    let piece = vec![7_u8; piece_bytes];
    let segment = limits::LOG_SEGMENT_BYTES as usize;
    let mut file: Option<Arc<dyn File>> = None;
    let mut times = Vec::new();
    for written in (0..total_bytes).step_by(piece_bytes) {
        if written % segment < piece_bytes {
            file = Some(storage.create(&format!("bare-{}", written / segment), segment as u64).unwrap());
        }
        let begun = Instant::now();
        let file = file.as_ref().unwrap();
        file.write_at(&piece, (written % segment).min(segment - piece_bytes) as u64).unwrap();
        file.sync().unwrap();
        times.push(begun.elapsed());
    }
    times
}

fn show(what: &str, mut times: Vec<Duration>) {
    times.sort();
    let at = |part: f64| times[((times.len() - 1) as f64 * part) as usize].as_secs_f64() * 1000.0;
    println!("{what}: p50 {:.2} ms, p99 {:.2} ms, worst {:.2} ms, of {}", at(0.5), at(0.99), at(1.0), times.len());
}

fn rate(what: &str, bytes: usize, time: Duration) {
    println!("{what}: {:.0} MB/s", bytes as f64 / 1e6 / time.as_secs_f64());
}

fn block<T>(future: impl Future<Output = T>) -> T {
    tokio::runtime::Builder::new_current_thread().build().unwrap().block_on(future)
}

/// As fast as it goes, with at most this much queued.
fn saturate(log: &SegmentLog, frame_bytes: usize, queued_bytes: u64) {
    let payload = Bytes::from(vec![7_u8; frame_bytes]);
    let begun = Instant::now();
    let mut durable = log.durable_through();
    let mut last = 0;
    block(async {
        for _ in 0..TOTAL_BYTES / frame_bytes {
            last = log.append(1, payload.clone()).0;
            while log.queued_bytes() > queued_bytes {
                durable.changed().await.unwrap();
            }
        }
        durable.wait_for(|through| through.0 >= last).await.unwrap();
    });
    rate(&format!("engine, frames of {frame_bytes} bytes, {queued_bytes} queued"), TOTAL_BYTES, begun.elapsed());
}

/// Frames at a pace; how long each takes to be durable.
fn paced(log: &SegmentLog, frame_bytes: usize, frames: usize) -> Vec<Duration> {
    let payload = Bytes::from(vec![7_u8; frame_bytes]);
    let (sender, appended) = mpsc::channel();
    std::thread::scope(|scope| {
        let waiter = scope.spawn(move || {
            let mut durable = log.durable_through();
            let mut times = Vec::new();
            let (mut at, mut begun) = appended.recv().unwrap();
            block(async {
                loop {
                    let through = *durable.wait_for(|through: &Position| through.0 >= at).await.unwrap();
                    let now = Instant::now();
                    while at <= through.0 {
                        times.push(now - begun);
                        let Ok(next) = appended.recv() else { return };
                        (at, begun) = next;
                    }
                }
            });
            times
        });
        let gap = Duration::from_nanos(1_000_000 * frame_bytes as u64 / PACED_BYTES_PER_MS as u64);
        let mut next = Instant::now();
        for _ in 0..frames {
            while Instant::now() < next {
                std::thread::park_timeout(next.saturating_duration_since(Instant::now()));
            }
            let begun = Instant::now();
            sender.send((log.append(1, payload.clone()).0, begun)).unwrap();
            next += gap;
        }
        drop(sender);
        waiter.join().unwrap()
    })
}

/// Reads the files and checks one sum over each MiB: the least that any recovery does.
fn bare_scan(scratch: &Scratch) -> (usize, Duration) {
    let begun = Instant::now();
    let mut buffer = vec![0; 1 << 20];
    let (mut bytes, mut sum) = (0, 0);
    for entry in fs::read_dir(&scratch.0).unwrap() {
        let file = fs::File::open(entry.unwrap().path()).unwrap();
        let mut offset = 0;
        while let Ok(read @ 1..) = file.read_at(&mut buffer, offset) {
            sum ^= crc32c::crc32c(&buffer[..read]);
            offset += read as u64;
            bytes += read;
        }
    }
    assert_ne!(sum, 1);
    (bytes, begun.elapsed())
}

#[test]
#[ignore = "a measurement"]
fn ingest_beside_a_bare_writer() {
    for _ in 0..2 {
        let scratch = Scratch::new();
        let begun = Instant::now();
        let times = bare(&Directory::new(&scratch.0).unwrap(), 1 << 20, TOTAL_BYTES);
        rate("bare, 1 MiB and fdatasync", TOTAL_BYTES, begun.elapsed());
        show("bare, 1 MiB and fdatasync", times);
        for (frame_bytes, queued_bytes) in [(4096, 4 << 20), (64 << 10, 4 << 20), (64 << 10, 32 << 20), (300, 4 << 20)]
        {
            let scratch = Scratch::new();
            let (log, _) = start(&scratch);
            saturate(&log, frame_bytes, queued_bytes);
        }
    }
}

fn start(scratch: &Scratch) -> (SegmentLog, Recovered) {
    let take = |_, _, _: &[u8]| Ok::<_, Infallible>(());
    SegmentLog::open(scratch.storage(), options(), &Progress::default(), take).unwrap()
}

#[test]
#[ignore = "a measurement"]
fn latency_at_a_pace() {
    for _ in 0..2 {
        let scratch = Scratch::new();
        show("bare, 4 KiB and fdatasync", bare(&Directory::new(&scratch.0).unwrap(), 4096, 20 << 20));
        for linger_us in [0, 200, 500, 1000, 2000] {
            let scratch = Scratch::new();
            let linger = Duration::from_micros(linger_us);
            let syncs = Arc::default();
            let timed = Timed { directory: Directory::new(&scratch.0).unwrap(), syncs: Arc::clone(&syncs) };
            let take = |_, _, _: &[u8]| Ok::<_, Infallible>(());
            let options = Options { linger, ..options() };
            let (log, _) = SegmentLog::open(Arc::new(timed), options, &Progress::default(), take).unwrap();
            show(&format!("engine, 4 KiB at 20 MB/s, {linger_us} us of linger"), paced(&log, 4096, 30_000));
            drop(log);
            show("    its syncs", std::mem::take(&mut *syncs.lock()));
        }
    }
}

#[test]
#[ignore = "a measurement"]
fn reading_beside_a_bare_reader() {
    for frame_bytes in [4096, 64 << 10, 300] {
        let scratch = Scratch::new();
        let (log, _) = start(&scratch);
        saturate(&log, frame_bytes, 4 << 20);
        let begun = Instant::now();
        let mut reader = log.read(Position(1)).unwrap();
        while reader.next_frame().unwrap().is_some() {}
        rate("reading on", TOTAL_BYTES, begun.elapsed());
        let last = durable(&log);
        let times = (1..=last).step_by(1 + last as usize / 20_000).map(|position| {
            let begun = Instant::now();
            log.read_one(Position(position)).unwrap();
            begun.elapsed()
        });
        show("reading one", times.collect());
        drop(log);
        for _ in 0..2 {
            let (bytes, time) = bare_scan(&scratch);
            rate("bare scan", bytes, time);
            let begun = Instant::now();
            let (_, recovered) = start(&scratch);
            rate(&format!("engine scan, frames of {frame_bytes} bytes"), TOTAL_BYTES, begun.elapsed());
            assert_eq!(recovered.next_position.0, last + 1);
        }
    }
    let scratch = Scratch::new();
    drop(start(&scratch));
    let begun = Instant::now();
    drop(start(&scratch));
    println!("opening an empty log: {:.1} ms", begun.elapsed().as_secs_f64() * 1000.0);
}
