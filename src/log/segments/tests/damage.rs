//! Logs that were cut short, flipped, or robbed of files.

use super::*;

/// The files of a log of several segments.
struct Sample {
    files: Vec<(String, Vec<u8>)>,
    frames: u64,
}

const BYTES: usize = 900;

/// Frames in batches of one to three, closed or not.
fn sample(frames: u64, closed: bool) -> Sample {
    let storage = FaultyStorage::new(frames);
    let (log, ..) = open(&storage, options()).unwrap();
    for position in 1..=frames {
        append(&log, position, 0, BYTES);
        if position % 6 == 0 || position % 6 == 1 || position % 6 == 3 {
            turn_all(&log);
        }
    }
    turn_all(&log);
    if closed {
        log.close().unwrap();
    }
    let files = files(&storage);
    Sample { files, frames }
}

fn files(storage: &FaultyStorage) -> Vec<(String, Vec<u8>)> {
    let names = storage.list().unwrap();
    names.into_iter().map(|name| (name.clone(), storage.bytes(&name).unwrap())).collect()
}

impl Sample {
    fn storage(&self) -> FaultyStorage {
        let storage = FaultyStorage::new(0);
        self.files.iter().for_each(|(name, bytes)| storage.put(name, bytes));
        storage
    }

    /// The file with this index, changed.
    fn changed(&self, file: usize, change: impl FnOnce(&mut Vec<u8>)) -> FaultyStorage {
        let storage = self.storage();
        let (name, bytes) = &self.files[file];
        let mut bytes = bytes.clone();
        change(&mut bytes);
        storage.put(name, &bytes);
        storage
    }

    /// How many of the files hold frames, and where the last of them ends.
    fn written(&self) -> (usize, usize) {
        let end = |bytes: &[u8]| bytes.iter().rposition(|byte| *byte != 0).unwrap_or(0) + 1;
        let written = self.files.iter().take_while(|(_, bytes)| end(bytes) > 4096).count();
        (written, end(&self.files[written - 1].1))
    }
}

/// What was shown is the sample's frames from the first on; how many there were.
fn check_prefix(shown: &[Shown]) -> u64 {
    for (frame, position) in shown.iter().zip(1..) {
        assert_eq!((frame.position, frame.kind), (position, kind(position)));
        assert_eq!(frame.payload, payload(position, 0, BYTES));
    }
    shown.len() as u64
}

/// After it was opened the log takes frames, and they come back with what was kept.
fn check_goes_on(storage: &FaultyStorage, log: SegmentLog, kept: u64) {
    append(&log, kept + 1, 1, 50);
    turn_all(&log);
    drop(log);
    storage.crash();
    let (_, _, shown) = open(storage, options()).unwrap();
    assert_eq!(positions(&shown), (1..=kept + 1).collect::<Vec<_>>());
    assert_eq!(shown.last().unwrap().payload, payload(kept + 1, 1, 50), "nothing cut has come back");
}

#[test]
fn a_log_cut_at_any_byte_opens_to_what_is_before() {
    for closed in [false, true] {
        let sample = sample(40, closed);
        let (written, end) = sample.written();
        let mut kept_before = 0;
        for length in 4096..=end {
            let storage = sample.changed(written - 1, |bytes| bytes.truncate(length));
            let (log, _, shown) = open(&storage, options()).unwrap();
            let kept = check_prefix(&shown);
            assert!(kept >= kept_before, "less is kept of more");
            kept_before = kept;
            if length % 97 == 0 || length + 70 > end {
                check_goes_on(&storage, log, kept);
            }
        }
        assert_eq!(kept_before, sample.frames);
    }
}

#[test]
fn a_log_whose_end_was_never_written_opens_to_what_is_before() {
    let sample = sample(40, false);
    let (written, end) = sample.written();
    for zeros_from in (4096..end).step_by(3) {
        let storage = sample.changed(written - 1, |bytes| bytes[zeros_from..].fill(0));
        let (log, _, shown) = open(&storage, options()).unwrap();
        check_goes_on(&storage, log, check_prefix(&shown));
    }
}

/// The batches and heads of a segment: offset, first position, frames.
fn batches(bytes: &[u8]) -> Vec<(usize, u64, u64)> {
    let mut found = Vec::new();
    let mut offset = 4096;
    while let Some(header) = bytes.get(offset..).and_then(format::BatchHeader::parse) {
        found.push((offset, header.first_position, u64::from(header.frames)));
        offset = header.end(offset as u64) as usize;
    }
    found
}

#[test]
fn a_flipped_byte_is_refused_or_takes_only_what_nothing_proves() {
    let sample = sample(28, false);
    let (written, end) = sample.written();
    let mut refused = 0;
    for file in 0..sample.files.len() {
        if sample.files[file].0 == "lock" {
            continue;
        }
        let last = if file + 1 == written { end + 64 } else { sample.files[file].1.len() };
        for offset in (0..last).filter(|offset| *offset < 64 || *offset >= 4096) {
            let storage = sample.changed(file, |bytes| bytes[offset] ^= 0x41);
            match open(&storage, options()) {
                // The head at the end proves every batch before it.
                Ok((_, _, shown)) => assert_eq!(check_prefix(&shown), sample.frames, "file {file} byte {offset}"),
                Err(OpenError::Log(SegmentError::Corrupt(corruption))) => {
                    refused += 1;
                    check_place(&sample, file, offset, &corruption);
                }
                Err(error) => panic!("file {file} byte {offset}: {error}"),
            }
        }
    }
    assert!(refused > 25_000, "{refused}");
}

/// The refusal names the batch in which the flipped byte is.
fn check_place(sample: &Sample, file: usize, offset: usize, corruption: &Corruption) {
    assert_eq!(corruption.file, sample.files[file].0, "byte {offset}");
    if offset < 4096 {
        assert_eq!(corruption.offset_bytes, 0);
        return;
    }
    let batches = batches(&sample.files[file].1);
    let (begin, first, _) = *batches.iter().rfind(|(begin, ..)| *begin <= offset).unwrap();
    assert_eq!((corruption.offset_bytes, corruption.position), (begin as u64, Some(Position(first))));
    let sentence = corruption.to_string();
    assert!(sentence.contains(&format!("(position {first})")) && sentence.contains("were durable"), "{sentence}");
}

#[test]
fn a_flip_in_the_last_batch_is_seen_thanks_to_the_head_behind_it() {
    let sample = sample(40, false);
    let (written, _) = sample.written();
    let bytes = &sample.files[written - 1].1;
    let batches = batches(bytes);
    let [.., (last, ..), (head, _, 0)] = *batches.as_slice() else { panic!("no head at the end: {batches:?}") };
    let flipped = sample.changed(written - 1, |bytes| bytes[last + 100] ^= 1);
    assert!(matches!(refusal(open(&flipped, options())), SegmentError::Corrupt(_)));
    // Without the head it is what a crash leaves.
    let torn = sample.changed(written - 1, |bytes| {
        bytes[last + 100] ^= 1;
        bytes[head..].fill(0);
    });
    let (_, recovered, shown) = open(&torn, options()).unwrap();
    let cut = recovered.cut.unwrap();
    assert_eq!((cut.offset_bytes, cut.position.0), (last as u64, check_prefix(&shown) + 1));
}

#[test]
fn a_closed_log_proves_its_last_batch_however_full_its_segment_is() {
    // The whole segment, without its head, the head of the epoch, and those of the batch and of its frame.
    let largest = (16 << 10) - 4096 - 64 - 64 - 24;
    for bytes in largest - 160..=largest {
        let storage = FaultyStorage::new(1);
        let (log, ..) = open(&storage, options()).unwrap();
        append(&log, 1, 0, bytes);
        turn_all(&log);
        log.close().unwrap();
        drop(log);
        assert_eq!(open(&storage, options()).unwrap().1.cut, None);
        let mut damaged = storage.bytes(&segment_name(1)).unwrap();
        damaged[5000] ^= 1;
        storage.put(&segment_name(1), &damaged);
        let error = refusal(open(&storage, options()));
        assert!(
            matches!(&error, SegmentError::Corrupt(corruption) if corruption.position == Some(Position(1))),
            "{error}"
        );
    }
}

#[test]
fn a_salvage_passes_over_damage_once_and_for_all() {
    let sample = sample(60, true);
    for file in 0..sample.written().0 {
        for (begin, first, frames) in batches(&sample.files[file].1) {
            if frames == 0 || first + frames > sample.frames {
                continue;
            }
            for damage in [begin + 3, begin + 70] {
                let storage = sample.changed(file, |bytes| bytes[damage] ^= 0xff);
                assert!(matches!(refusal(open(&storage, options())), SegmentError::Corrupt(_)));
                let (log, recovered, shown) = open(&storage, Options { salvage: true, ..options() }).unwrap();
                let [dropped] = recovered.dropped.as_slice() else { panic!("{recovered:?}") };
                assert_eq!(dropped.offset_bytes, begin as u64);
                assert_eq!(
                    (dropped.from, dropped.to_exclusive),
                    (Some(Position(first)), Some(Position(first + frames)))
                );
                let left: Vec<u64> = (1..=60).filter(|at| !(first..first + frames).contains(at)).collect();
                assert_eq!(positions(&shown), left);
                assert!(matches!(log.look_up().frame_at(Position(first)), Err(ReadError::NotKept(_))));
                let mut reader = log.read(Position(first.saturating_sub(1).max(recovered.first_position.0))).unwrap();
                let read = std::iter::from_fn(|| reader.next_frame().unwrap()).map(|frame| frame.position.0);
                assert!(read.eq(left.iter().copied().filter(|at| *at + 1 >= first)));
                drop(log);
                let (_, recovered, shown) = open(&storage, options()).unwrap();
                assert_eq!((positions(&shown), recovered.dropped.len()), (left, 0));
            }
        }
    }
}

#[test]
fn a_missing_segment_is_missed() {
    let sample = sample(80, true);
    let (written, _) = sample.written();
    assert!(written > 4);
    for file in 0..written - 1 {
        let storage = sample.storage();
        storage.take(&sample.files[file].0);
        let error = refusal(open(&storage, options()));
        let name = &sample.files[file].0;
        assert!(matches!(&error, SegmentError::Missing { first, last } if first == name && last == name), "{error}");
        let (_, recovered, shown) = open(&storage, Options { salvage: true, ..options() }).unwrap();
        assert_eq!(recovered.dropped.len(), 1, "{recovered:?}");
        assert!(shown.len() < 80 && shown.last().unwrap().position == 80);
        let (_, recovered, again) = open(&storage, options()).unwrap();
        assert_eq!((again.len(), recovered.dropped.len()), (shown.len(), 0));
    }
}

#[test]
fn the_newest_segment_is_missed_thanks_to_the_spares_behind_it() {
    let sample = sample(80, true);
    let (written, _) = sample.written();
    let name = &sample.files[written - 1].0;
    let storage = sample.storage();
    storage.take(name);
    let error = refusal(open(&storage, options()));
    assert!(matches!(&error, SegmentError::Missing { first, last } if first == name && last == name), "{error}");
    let (_, recovered, shown) = open(&storage, Options { salvage: true, ..options() }).unwrap();
    let next = shown.len() as u64 + 1;
    let [dropped] = recovered.dropped.as_slice() else { panic!("{recovered:?}") };
    assert_eq!((&dropped.file, dropped.from, dropped.to_exclusive), (name, Some(Position(next)), None));
    assert_eq!(positions(&open(&storage, options()).unwrap().2), (1..next).collect::<Vec<_>>());
}

/// Whatever a crash has left of files that were let go of, and of one that is missing: a disk that cannot be read is told as that, for
/// nobody is to salvage what is whole.
#[test]
fn a_disk_that_cannot_be_read_is_not_taken_for_missing_segments() {
    let sample = sample(80, true);
    let (written, _) = sample.written();
    for missing in [1, written - 1] {
        let mut reads = 0;
        loop {
            let storage = sample.storage();
            storage.take(&sample.files[missing].0);
            storage.fail_read_in(reads);
            let error = refusal(open(&storage, options()));
            if matches!(&error, SegmentError::Missing { .. }) {
                break;
            }
            assert!(matches!(&error, SegmentError::Io { .. }), "read {reads}: {error}");
            reads += 1;
        }
        assert!(reads > 2, "{reads} reads failed");
    }
}

#[test]
fn a_segment_cut_short_in_the_middle_is_refused_and_salvaged() {
    let sample = sample(80, true);
    for file in 0..sample.written().0 - 1 {
        for length in [100, 4096, 4100, 4200, 8000, 12_000] {
            let storage = sample.changed(file, |bytes| bytes.truncate(length));
            let error = refusal(open(&storage, options()));
            assert!(matches!(&error, SegmentError::Corrupt(_)), "{error}");
            let (_, recovered, shown) = open(&storage, Options { salvage: true, ..options() }).unwrap();
            assert_eq!(recovered.dropped.len(), 1, "{recovered:?}");
            assert_eq!(shown.last().unwrap().position, 80);
            assert_eq!(open(&storage, options()).unwrap().2, shown);
        }
    }
}

#[test]
fn files_of_another_log_and_of_another_number_are_refused() {
    let sample = sample(40, true);
    let other = FaultyStorage::new(77);
    drop(open(&other, Options { new_log_id: 4711, ..options() }).unwrap());
    let foreign = files(&other);
    let storage = sample.changed(1, |bytes| *bytes = foreign[1].1.clone());
    let error = refusal(open(&storage, options())).to_string();
    assert!(error.contains("another log"), "{error}");
    let storage = sample.changed(1, |bytes| *bytes = sample.files[0].1.clone());
    let error = refusal(open(&storage, options())).to_string();
    assert!(error.contains("another segment"), "{error}");
}

#[test]
fn what_an_older_life_left_behind_the_end_is_never_read() {
    // A batch of the first life is put where the next one of the second life would begin.
    let sample = sample(40, false);
    let (written, _) = sample.written();
    let old = &sample.files[written - 1].1;
    let batches = batches(old);
    let whole = |(_, _, frames): &&(usize, u64, u64)| *frames > 0;
    let &(third, position, _) = batches.iter().filter(whole).nth(2).unwrap();
    let &(fourth, ..) = batches.iter().find(|(begin, ..)| *begin > third).unwrap();
    let storage = sample.changed(written - 1, |bytes| bytes[third..].fill(0));
    let (log, _, shown) = open(&storage, options()).unwrap();
    assert_eq!(shown.len() as u64, position - 1);
    drop(log);
    let name = &sample.files[written - 1].0;
    let mut bytes = storage.bytes(name).unwrap();
    let end = bytes.iter().rposition(|byte| *byte != 0).unwrap() + 1;
    assert!((third + 64 - 8..=third + 64).contains(&end), "only the new epoch's head follows");
    bytes[third + 64..fourth + 64].copy_from_slice(&old[third..fourth]);
    storage.put(name, &bytes);
    let (_, recovered, shown) = open(&storage, options()).unwrap();
    assert_eq!(shown.len() as u64, position - 1);
    assert!(recovered.cut.is_some());
}

#[test]
fn a_read_that_fails_says_where() {
    let sample = sample(40, true);
    let storage = sample.storage();
    for read in 0..20 {
        storage.fail_read_in(read);
        match open(&storage, options()) {
            Ok(_) => assert!(read > 10, "all was read before read {read}"),
            Err(error) => assert!(error.to_string().contains("a read failed"), "{error}"),
        }
        storage.heal();
    }
    assert_eq!(open(&storage, options()).unwrap().2.len(), 40);
}
