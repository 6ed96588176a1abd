//! Opening a log: everything between finding its files and the first frame that may be written.
//!
//! In this order, so that a crash at any step leaves a log that opens to the same: read and judge ([`super::scan`]);
//! blank what is behind the end, in every file, and sync that; write again what was read and is not known to be
//! durable, and sync that; write a header of a new epoch, durably, which also says again from which segment on the log
//! is wanted; let the keeper remove the others. Only then is a position given anew that a cut has made free: nothing
//! old is left that could be taken for it.

use std::collections::VecDeque;
use std::io;
use std::sync::Arc;

use crate::limits;
use crate::log::Position;

use super::error::{Corruption, OpenError, SegmentError};
use super::format::{self, SEGMENT_HEADER_BYTES, SegmentHeader};
use super::keeper::{make_segment, sync_directory};
use super::look_ahead::{Ahead, is_blank};
use super::scan::{Cursor, Found, Scan, Unproven};
use super::shared::{Beginning, Shared, Spare, Table};
use super::storage::{File, Storage, write_zeros};
use super::window::Window;
use super::writer::Writer;
use super::{Cut, Dropped, MAKING_SUFFIX, NUMBER_DIGITS, Options, Progress, Recovered, segment_name};

/// A segment that stands for one that is missing in a salvage: room for its header and for a gap.
const STAND_IN_BYTES: u64 = 2 * SEGMENT_HEADER_BYTES;

/// A log that can be written.
pub(super) struct Opened {
    pub(super) shared: Arc<Shared>,
    pub(super) writer: Writer,
    pub(super) recovered: Recovered,
}

/// Reads the log, mends its end, and makes it ready to be written.
pub(super) fn open<E>(
    storage: Arc<dyn Storage>,
    options: Options,
    progress: &Progress,
    visit: &mut impl FnMut(Position, u8, &[u8]) -> Result<(), E>,
    keeps: impl FnOnce() -> Option<Position>,
) -> Result<Opened, OpenError<E>> {
    remove_unfinished(&*storage)?;
    let mut files = find(&*storage)?;
    if files.is_empty() {
        files.push(begin(&*storage, &options)?);
    }
    let filled = if options.salvage { fill_holes(&*storage, &mut files, &options)? } else { Vec::new() };
    let (unwanted, files) = last_run(files);
    progress.begin(files.iter().map(|file| file.bytes).sum());
    let log_id = check_headers(&*storage, &files, options.salvage)?;
    let mut scan = Scan::new(&*storage, files, log_id, options.salvage, progress);
    let scanned = scan.run(visit);
    let Scan { cursor, files, mut segments, mut dropped, unproven, .. } = scan;
    let nothing_is_there = matches!(scanned, Err(OpenError::Log(SegmentError::Corrupt(_))));
    if let (None, true, Some(before)) = (cursor.position, nothing_is_there, unwanted.last()) {
        // Behind the hole there is nothing to read: what is missing is the newest segment. A disk that fails is no such thing.
        return Err(missing(before.number + 1, &files).into());
    }
    let ahead = scanned?;
    check_beginning(&files, unwanted.last(), &cursor, options.salvage, &mut dropped)?;
    let end = files.get(cursor.index).map_or(0, |file| file.number);
    dropped.extend(filled.into_iter().filter(|number| *number > end).map(|number| Dropped {
        file: segment_name(number),
        offset_bytes: 0,
        from: cursor.position.map(Position),
        to_exclusive: None,
    }));
    let cut = blank_behind(&*storage, &files, &cursor, &ahead)?;
    rewrite(&*storage, unproven)?;
    let next_position = cursor.position.unwrap_or(1);
    let wanted = segments.iter().find(|segment| segment.number >= cursor.oldest_segment);
    let first_position = Position(wanted.map_or(next_position, |segment| segment.first_position));
    let oldest = keeps().and_then(|from| segments.iter().rfind(|segment| segment.first_position <= from.0));
    let oldest = oldest.map_or(cursor.oldest_segment, |kept| kept.number.min(cursor.oldest_segment));
    let leaving = unwanted.iter().chain(&files).filter(|file| file.number < oldest);
    let leaving = leaving.map(|file| (file.number, file.bytes)).collect();
    segments.retain(|segment| segment.number >= oldest);

    let mut ready = VecDeque::new();
    for found in files.iter().skip(cursor.index) {
        let name = segment_name(found.number);
        let file = storage.open(&name).map_err(SegmentError::io(format!("opening {name}")))?;
        ready.push_back(Spare { number: found.number, file, bytes: found.bytes });
    }
    let active = ready.pop_front().ok_or(SegmentError::Full { bytes: options.segment_bytes })?;
    let table = Table { segments, spares: ready, leaving };
    let epoch = ahead.epoch.saturating_add(1);
    let recovered = Recovered { first_position, next_position: Position(next_position), epoch, cut, dropped };
    let beginning = Beginning { table, log_id, epoch, next_position };
    let shared = Arc::new(Shared::new(storage, options, beginning));
    let mut writer = Writer::new(Arc::clone(&shared), active, cursor.offset, next_position);
    writer.mark()?;
    Ok(Opened { shared, writer, recovered })
}

/// Removes segments that were being made.
fn remove_unfinished(storage: &dyn Storage) -> Result<(), SegmentError> {
    let names = storage.list().map_err(SegmentError::io(format!("listing {}", storage.place())))?;
    for name in names.iter().filter(|name| name.ends_with(MAKING_SUFFIX)) {
        storage.remove(name).map_err(SegmentError::io(format!("removing {name}")))?;
    }
    Ok(())
}

/// The segments that are there, in order.
fn find(storage: &dyn Storage) -> Result<Vec<Found>, SegmentError> {
    let mut found = Vec::new();
    for name in storage.list().map_err(SegmentError::io(format!("listing {}", storage.place())))? {
        let number = name.get(..NUMBER_DIGITS).and_then(|digits| digits.parse().ok());
        let Some(number) = number.filter(|number| segment_name(*number) == name) else { continue };
        let bytes = storage.open(&name).and_then(|file| file.len());
        found.push(Found { number, bytes: bytes.map_err(SegmentError::io(format!("opening {name}")))? });
    }
    found.sort_by_key(|found| found.number);
    Ok(found)
}

/// The first segment of a new log.
fn begin(storage: &dyn Storage, options: &Options) -> Result<Found, SegmentError> {
    let bytes = options.segment_bytes;
    make_segment(storage, options.new_log_id, 1, bytes)?.ok_or(SegmentError::Full { bytes })?;
    Ok(Found { number: 1, bytes })
}

/// The files before the last hole in their numbers, which a crash may have left of those that were removed, and those
/// after it.
fn last_run(mut files: Vec<Found>) -> (Vec<Found>, Vec<Found>) {
    let run = last_hole(&files).map_or(0, |before| before + 1);
    let after = files.split_off(run);
    (files, after)
}

/// Which file stands before the last hole.
fn last_hole(files: &[Found]) -> Option<usize> {
    files.windows(2).rposition(|pair| matches!(pair, [before, after] if before.number + 1 < after.number))
}

/// Makes segments without frames where there are holes; their numbers.
fn fill_holes(storage: &dyn Storage, files: &mut Vec<Found>, options: &Options) -> Result<Vec<u64>, SegmentError> {
    let mut filled = Vec::new();
    while let Some(before) = last_hole(files) {
        let number = files.get(before).map_or(0, |file| file.number) + 1;
        if filled.len() >= limits::LOG_SALVAGED_HOLES_MAX {
            return Err(missing(number, files.get(before + 1..).unwrap_or_default()));
        }
        let log_id = headers(storage, files)?.into_iter().flatten().map(|header| header.log_id).next();
        let made = make_segment(storage, log_id.unwrap_or(options.new_log_id), number, STAND_IN_BYTES)?;
        made.ok_or(SegmentError::Full { bytes: STAND_IN_BYTES })?;
        files.insert(before + 1, Found { number, bytes: STAND_IN_BYTES });
        filled.push(number);
    }
    Ok(filled)
}

/// The segments from this number up to the first of these files are not there.
fn missing(from: u64, files: &[Found]) -> SegmentError {
    let first = files.first().map_or(from, |file| file.number);
    SegmentError::Missing { first: segment_name(from), last: segment_name(first.saturating_sub(1)) }
}

fn headers(storage: &dyn Storage, files: &[Found]) -> Result<Vec<Option<SegmentHeader>>, SegmentError> {
    let read = |found: &Found| -> io::Result<Option<SegmentHeader>> {
        let file = storage.open(&segment_name(found.number))?;
        let mut window = Window::new(file, found.bytes, 0);
        Ok(window.get(0, format::SEGMENT_HEADER_USED_BYTES)?.and_then(SegmentHeader::parse))
    };
    let named =
        |found: &Found| read(found).map_err(SegmentError::io(format!("reading {}", segment_name(found.number))));
    files.iter().map(named).collect()
}

/// Checks the header of each segment; the log's id. A salvage writes those anew that cannot be read.
fn check_headers(storage: &dyn Storage, files: &[Found], salvage: bool) -> Result<u64, SegmentError> {
    let headers = headers(storage, files)?;
    let log_id = headers.iter().flatten().map(|header| header.log_id).next().unwrap_or(0);
    for (found, header) in files.iter().zip(headers) {
        let file = segment_name(found.number);
        let proof = match header {
            Some(header) if header.version > format::VERSION => {
                return Err(SegmentError::Newer { file, version: header.version, newest: format::VERSION });
            }
            Some(header) if header.log_id != log_id => "it is a segment of another log",
            Some(header) if header.number != found.number => "it was another segment's file",
            Some(_) => continue,
            None => "a segment gets its name only when its header is durable",
        };
        if !salvage || header.is_some() || log_id == 0 {
            let corruption = Corruption { file, offset_bytes: 0, position: None, proof: proof.to_owned() };
            return Err(SegmentError::Corrupt(Box::new(corruption)));
        }
        let header = SegmentHeader { version: format::VERSION, log_id, number: found.number };
        let opened = storage.open(&file);
        let mended = opened.and_then(|opened| opened.write_at(&header.encode(), 0).and_then(|()| opened.sync()));
        mended.map_err(SegmentError::io(format!("writing the header of {file}")))?;
    }
    Ok(log_id)
}

/// Checks that the log begins where it is said to begin.
fn check_beginning(
    files: &[Found],
    before: Option<&Found>,
    cursor: &Cursor,
    salvage: bool,
    dropped: &mut Vec<Dropped>,
) -> Result<(), SegmentError> {
    let first = files.first().map_or(1, |file| file.number);
    if first <= cursor.oldest_segment {
        return Ok(());
    }
    if !salvage {
        // What stands before the hole is there.
        let from = before.map_or(0, |before| before.number + 1).max(cursor.oldest_segment);
        return Err(missing(from, files));
    }
    let from = segment_name(cursor.oldest_segment);
    dropped.insert(0, Dropped { file: from, offset_bytes: 0, from: None, to_exclusive: None });
    Ok(())
}

/// Overwrites everything behind the end of the log with zeros, durably.
fn blank_behind(
    storage: &dyn Storage,
    files: &[Found],
    cursor: &Cursor,
    ahead: &Ahead,
) -> Result<Option<Cut>, SegmentError> {
    let mut bytes = 0;
    for index in &ahead.dirty {
        let Some(found) = files.get(*index) else { continue };
        let name = segment_name(found.number);
        let begin = if *index == cursor.index { cursor.offset } else { SEGMENT_HEADER_BYTES };
        let blanked = storage.open(&name).and_then(|file| blank(&file, begin, found.bytes));
        bytes += blanked.map_err(SegmentError::io(format!("blanking the end of {name}")))?;
    }
    let number = files.get(cursor.index).map_or(0, |file| file.number);
    let position = Position(cursor.position.unwrap_or(1));
    let (file, offset_bytes) = (segment_name(number), cursor.offset);
    Ok((bytes > 0).then_some(Cut { file, offset_bytes, position, bytes, whole_frames: ahead.frames }))
}

/// Overwrites what is not zeros; how much that was, from the first to the last of them.
fn blank(file: &Arc<dyn File>, begin: u64, end: u64) -> io::Result<u64> {
    const PIECE_BYTES: u64 = 64 << 10;
    let mut window = Window::new(Arc::clone(file), end, 1 << 20);
    let mut blanked = 0;
    let mut offset = begin;
    while offset < end {
        let length = (end - offset).min(PIECE_BYTES);
        let piece = window.get(offset, usize::try_from(length).unwrap_or(0))?;
        if !piece.is_some_and(is_blank) {
            write_zeros(&**file, offset, offset + length)?;
            blanked += length;
        }
        offset += length;
    }
    file.sync()?;
    Ok(blanked)
}

/// Writes again what was read and is not known to be durable, and makes it so. To sync it would not do: if a sync has
/// failed before, the system may believe that these pages are on disk.
fn rewrite(storage: &dyn Storage, unproven: VecDeque<Unproven>) -> Result<(), SegmentError> {
    const PIECE_BYTES: u64 = 1 << 20;
    let again = |batch: &Unproven, file: &Arc<dyn File>| -> io::Result<()> {
        // A file that was cut short may end before the padding of its last batch.
        let end = batch.end.min(file.len()?);
        let mut window = Window::new(Arc::clone(file), end, 0);
        let mut offset = batch.offset;
        while offset < end {
            let length = (end - offset).min(PIECE_BYTES);
            let Some(piece) = window.get(offset, usize::try_from(length).unwrap_or(0))? else { break };
            file.write_at(piece, offset)?;
            offset += length;
        }
        Ok(())
    };
    let mut open: Option<(u64, Arc<dyn File>)> = None;
    for batch in unproven {
        let name = segment_name(batch.segment);
        let failed = || SegmentError::io(format!("making {name} durable"));
        let file = match open.take_if(|(number, _)| *number == batch.segment) {
            Some((_, file)) => file,
            None => {
                if let Some((_, before)) = open.take() {
                    before.sync().map_err(failed())?;
                }
                storage.open(&name).map_err(failed())?
            }
        };
        again(&batch, &file).map_err(failed())?;
        open = Some((batch.segment, file));
    }
    if let Some((_, last)) = open {
        last.sync().map_err(SegmentError::io("making what was read durable"))?;
    }
    // Names that a crash may still undo, of files that were read already.
    sync_directory(storage)
}
