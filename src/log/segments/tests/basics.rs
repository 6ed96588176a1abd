//! What a log does when nothing goes wrong.

use super::*;

#[test]
fn frames_are_durable_in_order_and_come_back() {
    let storage = FaultyStorage::new(1);
    let (log, recovered, shown) = open(&storage, options()).unwrap();
    assert!(shown.is_empty());
    assert_eq!((recovered.next_position, recovered.epoch), (Position(1), 1));
    for position in 1..=100 {
        append(&log, position, 0, 700);
        assert_eq!(durable(&log), position - 1);
        turn_all(&log);
        assert_eq!((durable(&log), log.queued_bytes()), (position, 0));
    }
    log.close().unwrap();
    drop(log);
    let (log, recovered, shown) = open(&storage, options()).unwrap();
    assert_eq!(positions(&shown), (1..=100).collect::<Vec<_>>());
    assert!(shown.iter().all(|frame| frame.payload == payload(frame.position, 0, 700)));
    assert!(shown.iter().all(|frame| frame.kind == kind(frame.position)));
    assert_eq!((recovered.next_position, recovered.epoch, recovered.cut), (Position(101), 2, None));
    assert!(log.segments().len() > 4);
}

#[test]
fn every_opening_raises_the_epoch_and_takes_little() {
    let storage = FaultyStorage::new(2);
    for epoch in 1..=40 {
        let (log, recovered, shown) = open(&storage, options()).unwrap();
        assert_eq!(recovered.epoch, epoch);
        assert_eq!(shown.len() as u64, u64::from(epoch) - 1);
        append(&log, u64::from(epoch), 0, 10);
        turn_all(&log);
        if epoch % 2 == 0 {
            log.close().unwrap();
        }
    }
    let (log, ..) = open(&storage, options()).unwrap();
    assert_eq!(log.segments().len(), 1);
}

#[test]
fn frames_are_read_back_one_by_one_and_in_a_row() {
    let storage = FaultyStorage::new(3);
    let (log, ..) = open(&storage, options()).unwrap();
    for position in 1..=300 {
        append(&log, position, 0, 100 + 13 * (position as usize % 90));
        if position % 7 == 0 {
            turn_all(&log);
        }
    }
    let durable = durable(&log);
    assert_eq!(durable, 294);
    for position in 1..=durable {
        let frame = log.look_up().frame_at(Position(position)).unwrap();
        assert_eq!(frame.payload, payload(position, 0, 100 + 13 * (position as usize % 90)));
        assert_eq!((frame.position, frame.kind), (Position(position), kind(position)));
    }
    assert!(matches!(log.look_up().frame_at(Position(295)), Err(ReadError::NotDurable(_))));
    for from in [1, 2, 150, 294, 295] {
        let mut reader = log.read(Position(from)).unwrap();
        let mut next = from;
        while let Some(frame) = reader.next_frame().unwrap() {
            assert_eq!(frame.position, Position(next));
            next += 1;
        }
        assert_eq!(next, 295);
    }
    let mut reader = log.read(Position(290)).unwrap();
    while reader.next_frame().unwrap().is_some() {}
    turn_all(&log);
    let later = reader.next_frame().unwrap().unwrap();
    assert_eq!(later.position, Position(295));
    assert_eq!(later.payload, payload(295, 0, 100 + 13 * (295 % 90)));
}

#[test]
fn a_reopened_log_is_read_back_from_its_index() {
    let storage = FaultyStorage::new(4);
    let (log, ..) = open(&storage, Options { segment_bytes: 1 << 20, ..options() }).unwrap();
    (1..=2000).for_each(|position| append(&log, position, 0, 900));
    turn_all(&log);
    drop(log);
    let (log, ..) = open(&storage, options()).unwrap();
    let mut reader = log.look_up();
    for position in [1, 2, 1999, 2000, 777, 778, 1500, 3] {
        assert_eq!(log.look_up().frame_at(Position(position)).unwrap().payload, payload(position, 0, 900));
        assert_eq!(reader.frame_at(Position(position)).unwrap().payload, payload(position, 0, 900), "in any order");
    }
}

#[test]
fn a_frame_larger_than_a_segment_has_one_of_its_own_size() {
    let storage = FaultyStorage::new(5);
    let (log, ..) = open(&storage, options()).unwrap();
    let sizes = [10, 40_000, 10, 16_384, 3_000_000, 1_500_000, 10];
    for (position, bytes) in (1..).zip(sizes) {
        append(&log, position, 0, bytes);
    }
    turn_all(&log);
    assert_eq!(durable(&log), 7);
    let largest = log.segments().into_iter().max_by_key(|segment| segment.bytes).unwrap();
    assert_eq!(
        (largest.first_position, largest.bytes),
        (Position(5), 3_000_000_u64.next_multiple_of(8) + 4096 + 64 + 24)
    );
    drop(log);
    let (log, _, shown) = open(&storage, options()).unwrap();
    assert!(shown.iter().zip(sizes).all(|(frame, bytes)| frame.payload == payload(frame.position, 0, bytes)));
    assert_eq!(shown.len(), 7);
    assert_eq!(log.look_up().frame_at(Position(5)).unwrap().payload.len(), 3_000_000);
}

#[test]
fn whole_segments_before_a_position_are_let_go_of() {
    let storage = FaultyStorage::new(6);
    let (log, ..) = open(&storage, options()).unwrap();
    let mut begun = log.segment_begun();
    (1..=100).for_each(|position| {
        append(&log, position, 0, 1000);
        turn_all(&log);
    });
    let segments = log.segments();
    assert_eq!(*begun.borrow_and_update(), segments.last().unwrap().number);
    let third = segments[2];
    let before = log.figures();
    log.truncate_before(third.first_position);
    assert!(matches!(log.look_up().frame_at(Position(third.first_position.0 - 1)), Err(ReadError::NotKept(_))));
    assert!(matches!(log.read(Position(1)), Err(ReadError::NotKept(_))));
    assert_eq!(log.look_up().frame_at(third.first_position).unwrap().position, third.first_position);
    turn_all(&log);
    let figures = log.figures();
    assert_eq!(figures.segments, before.segments - 2);
    assert_eq!(figures.disk_bytes, before.disk_bytes - 2 * (16 << 10));
    log.truncate_before(Position(1_000_000));
    turn_all(&log);
    assert_eq!(log.figures().segments, 1, "the active one stays");
    let first = log.segments()[0].first_position;
    drop(log);
    let (_, recovered, shown) = open(&storage, options()).unwrap();
    assert_eq!(recovered.first_position, first);
    assert_eq!(positions(&shown), (first.0..=100).collect::<Vec<_>>());
}

#[test]
fn what_is_not_wanted_is_kept_while_it_is_to_be_read_again() {
    let storage = FaultyStorage::new(7);
    let (log, ..) = open(&storage, options()).unwrap();
    (1..=100).for_each(|position| {
        append(&log, position, 0, 1000);
        turn_all(&log);
    });
    let (second, wanted) = (log.segments()[1], log.segments()[3]);
    let names: Vec<_> = (1..=3).map(segment_name).collect();
    let gone: Vec<_> = names.iter().map(|name| storage.bytes(name).unwrap()).collect();
    log.truncate_before(wanted.first_position);
    append(&log, 101, 0, 10);
    turn_all(&log);
    drop(log);
    assert!(names.iter().all(|name| storage.bytes(name).is_none()));
    // As a crash leaves it that comes between the word that they may go and their going.
    names.iter().zip(gone).for_each(|(name, bytes)| storage.put(name, &bytes));

    let from = second.first_position;
    let mut count = 0;
    let visit = |_, _, _: &[u8]| {
        count += 1;
        Ok::<_, Infallible>(())
    };
    let storage_again = Arc::new(storage.clone());
    let opened =
        SegmentLog::open_and_keep(storage_again, options(), &Progress::default(), visit, || Some(Position(from.0 + 1)));
    let (log, recovered) = opened.unwrap();
    assert_eq!((count, recovered.first_position), (101, wanted.first_position));
    turn_all(&log);
    assert_eq!(names.iter().filter(|name| storage.bytes(name).is_some()).count(), 2, "only what is before it went");
    let mut reader = log.read(from).unwrap();
    let read: Vec<_> = std::iter::from_fn(|| reader.next_frame().unwrap()).map(|frame| frame.position.0).collect();
    assert_eq!(read, (from.0..=101).collect::<Vec<_>>());
    log.truncate_before(recovered.first_position);
    turn_all(&log);
    assert!(names.iter().all(|name| storage.bytes(name).is_none()));
    drop(log);
    let (_, recovered, shown) = open(&storage, options()).unwrap();
    assert_eq!(
        (recovered.first_position, shown.len()),
        (wanted.first_position, 102 - wanted.first_position.0 as usize)
    );
}

#[test]
fn a_reader_that_is_overtaken_is_told() {
    let storage = FaultyStorage::new(13);
    let (log, ..) = open(&storage, options()).unwrap();
    (1..=100).for_each(|position| append(&log, position, 0, 1000));
    turn_all(&log);
    let (mut slow, mut quick) = (log.read(Position(1)).unwrap(), log.read(Position(1)).unwrap());
    assert!(slow.next_frame().unwrap().is_some());
    std::iter::from_fn(|| quick.next_frame().unwrap()).for_each(drop);
    log.truncate_before(Position(90));
    let read: Result<Vec<_>, _> = std::iter::from_fn(|| slow.next_frame().transpose()).collect();
    assert!(matches!(read, Err(ReadError::NotKept(_))));
    append(&log, 101, 0, 10);
    turn_all(&log);
    assert_eq!(quick.next_frame().unwrap().map(|frame| frame.position), Some(Position(101)));
}

#[test]
fn segments_go_while_the_writer_is_never_idle() {
    let storage = FaultyStorage::new(14);
    for durability in [Durability::Fsync, Durability::Os] {
        let (log, recovered, _) = open(&storage, Options { durability, ..options() }).unwrap();
        let first = recovered.next_position.0;
        append(&log, first, 0, 3000);
        for position in first + 1..first + 200 {
            // A turn takes what fits into a batch, and that is never all.
            (0..8).for_each(|ahead| append(&log, first + 1 + (position - first - 1) * 8 + ahead, 0, 3000));
            log.turn();
            assert!(log.queued_bytes() > 0);
            log.truncate_before(Position(durable(&log)));
        }
        assert!(log.figures().disk_bytes < 8 * (16 << 10), "{:?}", log.figures());
    }
}

#[test]
fn a_full_disk_leaves_room_for_what_is_essential() {
    let storage = FaultyStorage::new(7);
    let (log, ..) = open(&storage, options()).unwrap();
    assert_eq!(log.room(), Room::Ample);
    storage.set_capacity_bytes(3 * (16 << 10));
    let mut position = 0;
    while log.room() == Room::Ample {
        position += 1;
        append(&log, position, 0, 500);
        turn_all(&log);
    }
    assert!((17..22).contains(&position), "{position}");
    // What is left is more than a whole segment.
    for _ in 0..32 {
        position += 1;
        append(&log, position, 0, 500);
        turn_all(&log);
    }
    assert_eq!((durable(&log), log.room()), (position, Room::Short));
    storage.set_capacity_bytes(u64::MAX);
    turn_all(&log);
    assert_eq!(log.room(), Room::Ample, "the keeper has looked again");
    storage.set_capacity_bytes(0);
    while log.failed().borrow().is_none() {
        position += 1;
        append(&log, position, 0, 500);
        turn_all(&log);
    }
    let failure = log.failed().borrow().clone().unwrap();
    assert!(failure.to_string().contains("no room on disk"), "{failure}");
    let last = durable(&log);
    assert_eq!(last, position - 1);
    append(&log, position + 1, 0, 500);
    turn_all(&log);
    assert_eq!((durable(&log), log.close().is_err()), (last, true));
    drop(log);
    storage.set_capacity_bytes(u64::MAX);
    assert_eq!(open(&storage, options()).unwrap().2.len() as u64, last);
}

#[test]
fn the_budget_makes_short_and_never_fails() {
    let storage = FaultyStorage::new(8);
    let (log, ..) = open(&storage, Options { budget_bytes: 5 * (16 << 10), ..options() }).unwrap();
    let mut position = 0;
    let mut short_at = None;
    while position < 400 {
        position += 1;
        append(&log, position, 0, 500);
        turn_all(&log);
        if log.room() == Room::Short {
            short_at.get_or_insert(position);
        }
    }
    assert!((50..60).contains(&short_at.unwrap()), "{short_at:?}");
    assert_eq!(durable(&log), 400);
    log.truncate_before(Position(390));
    turn_all(&log);
    assert_eq!(log.room(), Room::Ample);
}

#[test]
fn a_second_opening_is_refused_while_the_first_lasts() {
    let storage = FaultyStorage::new(9);
    let (log, ..) = open(&storage, options()).unwrap();
    let error = refusal(open(&storage, options()));
    assert_eq!(error.to_string(), "another process holds the log in memory; end it, or use another directory");
    drop(log);
    assert!(open(&storage, options()).is_ok());
}

#[test]
fn a_frame_that_is_not_taken_ends_the_opening() {
    let storage = FaultyStorage::new(10);
    let (log, ..) = open(&storage, options()).unwrap();
    (1..=3).for_each(|position| append(&log, position, 0, 10));
    turn_all(&log);
    drop(log);
    let not_taken = SegmentLog::open(Arc::new(storage.clone()), options(), &Progress::default(), |position, _, _| {
        if position == Position(2) { Err("no") } else { Ok(()) }
    });
    assert_eq!(not_taken.map(drop).unwrap_err().to_string(), "position 2: no");
}

#[test]
fn without_sync_positions_are_durable_when_written() {
    let storage = FaultyStorage::new(11);
    let os = Options { durability: Durability::Os, ..options() };
    let (log, ..) = open(&storage, os.clone()).unwrap();
    (1..=100).for_each(|position| {
        append(&log, position, 0, 500);
        turn_all(&log);
    });
    assert_eq!(durable(&log), 100);
    let full: u64 = log.segments().iter().rev().nth(1).unwrap().last_position_inclusive.0;
    drop(log);
    let (log, ..) = open(&storage, os.clone()).unwrap();
    (101..=200).for_each(|position| {
        append(&log, position, 0, 500);
        turn_all(&log);
    });
    let full_later = log.segments().iter().rev().nth(1).unwrap().last_position_inclusive.0;
    assert!(full_later > 150 && full < 101);
    storage.crash();
    drop(log);
    let (_, _, shown) = open(&storage, os).unwrap();
    assert!(shown.len() as u64 >= full_later, "full segments were synced");
}

#[test]
fn progress_is_told() {
    let storage = FaultyStorage::new(12);
    let (log, ..) = open(&storage, options()).unwrap();
    (1..=100).for_each(|position| {
        append(&log, position, 0, 500);
        turn_all(&log);
    });
    drop(log);
    let progress = Progress::default();
    let (mut read, mut estimate) = (0, 0);
    SegmentLog::open(Arc::new(storage), options(), &progress, |_, _, _| {
        assert!(progress.total_bytes() > 0 && [0, progress.total_bytes()].contains(&estimate));
        estimate = progress.total_bytes();
        assert!(progress.read_bytes() >= read);
        read = progress.read_bytes();
        Ok::<_, Infallible>(())
    })
    .unwrap();
    assert!(read > estimate / 4);
}
