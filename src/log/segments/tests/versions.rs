//! Logs that released builds wrote are read for ever.

use super::*;

/// A segment of version 1 up to where it is written, in hexadecimal: page of the header up to byte 64, then from byte
/// 4096 on. Frozen.
const SEGMENT_1: &str = include_str!("../../../../tests/fixtures/log/v1/00000000000000000001.segment.hex");

fn frozen() -> Vec<u8> {
    let digits: Vec<u8> = SEGMENT_1.bytes().filter(u8::is_ascii_hexdigit).collect();
    let text = String::from_utf8(digits).unwrap();
    let written: Vec<u8> =
        (0..text.len()).step_by(2).map(|at| u8::from_str_radix(&text[at..at + 2], 16).unwrap()).collect();
    let mut bytes = written[..64].to_vec();
    bytes.resize(4096, 0);
    bytes.extend_from_slice(&written[64..]);
    bytes.resize(8192, 0);
    bytes
}

/// What stands in the frozen segment: a batch of two frames and one of one.
fn write_frozen(log: &SegmentLog) {
    log.append(1, Bytes::from_static(b"the first frame"));
    log.append(255, Bytes::new());
    turn_all(log);
    log.append(7, Bytes::from((0..=255).collect::<Vec<u8>>()));
    log.close().unwrap();
}

#[test]
fn a_segment_of_version_1_is_read() {
    let storage = FaultyStorage::new(1);
    storage.put(&segment_name(1), &frozen());
    let (log, recovered, shown) = open(&storage, options()).unwrap();
    let shown: Vec<_> = shown.iter().map(|frame| (frame.position, frame.kind, frame.payload.as_slice())).collect();
    let all: Vec<u8> = (0..=255).collect();
    assert_eq!(shown, [(1, 1, b"the first frame".as_slice()), (2, 255, b""), (3, 7, &all)]);
    assert_eq!((recovered.epoch, recovered.cut), (2, None));
    append(&log, 4, 0, 10);
    turn_all(&log);
    drop(log);
    assert_eq!(open(&storage, options()).unwrap().2.len(), 4);
}

#[test]
fn this_build_writes_version_1() {
    let storage = FaultyStorage::new(1);
    let (log, ..) = open(&storage, Options { segment_bytes: 8192, ..options() }).unwrap();
    write_frozen(&log);
    assert_eq!(storage.bytes(&segment_name(1)).unwrap(), frozen());
}

#[test]
fn a_newer_version_is_refused_in_a_sentence() {
    let storage = FaultyStorage::new(1);
    let newer = format::SegmentHeader { version: 2, log_id: 1, number: 1 };
    let mut bytes = newer.encode();
    bytes.resize(8192, 0);
    storage.put(&segment_name(1), &bytes);
    let error = refusal(open(&storage, options()));
    let text = "00000000000000000001.segment is of format 2, and this build reads up to 1: \
                start the build that wrote it, or a newer one";
    assert_eq!(error.to_string(), text);
}
