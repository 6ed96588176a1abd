//! The log on real files, with its threads.

use std::fs;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, Ordering};

use super::super::storage::Directory;
use super::*;

/// A directory that is gone after the test.
pub(super) struct Scratch(pub(super) PathBuf);

impl Scratch {
    pub(super) fn new() -> Self {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let name = format!("hedgerow-log-{}-{}", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed));
        let path = std::env::temp_dir().join(name);
        drop(fs::remove_dir_all(&path));
        Self(path)
    }

    pub(super) fn storage(&self) -> Arc<dyn Storage> {
        Arc::new(Directory::new(&self.0).unwrap())
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        drop(fs::remove_dir_all(&self.0));
    }
}

fn options() -> Options {
    Options { drive: Drive::Threads, ..super::options() }
}

/// Waits until this position is durable, or the log has failed.
fn wait(log: &SegmentLog, position: u64) {
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    let mut durable = log.durable_through();
    runtime.block_on(durable.wait_for(|through| through.0 >= position)).unwrap();
}

#[test]
fn frames_of_many_threads_are_durable_and_come_back() {
    for durability in [Durability::Fsync, Durability::Os] {
        let scratch = Scratch::new();
        let (log, ..) = open_any(scratch.storage(), Options { durability, ..options() }).unwrap();
        let texts: Vec<_> = std::thread::scope(|scope| {
            let log = &log;
            let one = move |thread: usize, count: usize| {
                let text = format!("{count} of thread {thread}").repeat(1 + count % 70);
                (log.append(7, Bytes::from(text.clone())).0, text)
            };
            let all = |thread| move || (0..250).map(|count| one(thread, count)).collect::<Vec<_>>();
            let threads: Vec<_> = (0..4).map(|thread| scope.spawn(all(thread))).collect();
            threads.into_iter().flat_map(|thread| thread.join().unwrap()).collect()
        });
        wait(&log, 1000);
        for (position, text) in &texts {
            assert_eq!(log.look_up().frame_at(Position(*position)).unwrap().payload, text.as_bytes());
        }
        let middle = log.segments()[5].first_position;
        log.truncate_before(middle);
        log.close().unwrap();
        drop(log);
        let (log, recovered, shown) = open_any(scratch.storage(), options()).unwrap();
        assert_eq!((recovered.next_position, recovered.cut), (Position(1001), None));
        assert_eq!(shown.last().map(|frame| frame.position), Some(1000));
        let by_position: std::collections::BTreeMap<_, _> = texts.into_iter().collect();
        assert!(shown.iter().all(|frame| frame.payload == by_position[&frame.position].as_bytes()));
        log.append(7, Bytes::from_static(b"one more"));
        wait(&log, 1001);
    }
}

#[test]
fn a_directory_that_another_process_holds_is_refused() {
    let scratch = Scratch::new();
    let (log, ..) = open_any(scratch.storage(), options()).unwrap();
    let error = refusal(open_any(scratch.storage(), options()));
    assert!(matches!(&error, SegmentError::Locked { place } if *place == scratch.0.display().to_string()), "{error}");
    drop(log);
    open_any(scratch.storage(), options()).unwrap();
}

#[test]
fn spares_are_allocated_and_segments_go_with_their_files() {
    let scratch = Scratch::new();
    let (log, ..) = open_any(scratch.storage(), options()).unwrap();
    for position in 1..=60 {
        append(&log, position, 0, 1000);
        wait(&log, position);
    }
    let last = log.segments().len() as u64;
    log.truncate_before(Position(61));
    append(&log, 61, 0, 10);
    log.close().unwrap();
    drop(log);
    let (_, recovered, _) = open_any(scratch.storage(), options()).unwrap();
    assert_eq!(recovered.next_position, Position(62));
    let mut names: Vec<_> =
        fs::read_dir(&scratch.0).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    let kept = [last, last + 1, last + 2].map(segment_name);
    assert_eq!(names, [kept.as_slice(), &["lock".to_owned()]].concat());
}

#[test]
fn a_failure_in_a_thread_is_told() {
    let storage = FaultyStorage::new(1);
    let (log, ..) = open(&storage, options()).unwrap();
    let mut failed = log.failed();
    storage.fail_in(1, super::super::faulty::Fault::Error);
    append(&log, 1, 0, 10);
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    let failure = runtime.block_on(failed.wait_for(Option::is_some)).unwrap().clone();
    let text = failure.unwrap().to_string();
    assert_eq!(text, "making 00000000000000000001.segment durable: input/output error");
    assert_eq!(durable(&log), 0);
    assert!(log.close().is_err());
}
