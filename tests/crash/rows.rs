//! Rows as prints of their bytes, and the file in which the members of a consumer group say which they have applied.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{File, OpenOptions};
use std::io::{Read as _, Seek as _, SeekFrom, Write as _};
use std::path::Path;

use hedgerow::proto::v1::RowHeader;
use prost::Message as _;
use xxhash_rust::xxh3::xxh3_128;

use crate::service::Row;

/// A row as it is compared: digests of all its bytes, and what it trains.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Print {
    pub(crate) row_id: String,
    /// With the time at which it was finalised, which no crash may change.
    pub(crate) with_time: u128,
    /// Without that time, which is another in every run.
    pub(crate) without_time: u128,
    /// The calls that it trains, each with its rollout and attempt.
    pub(crate) trains: Vec<String>,
}

impl Print {
    pub(crate) fn of(row: &Row) -> Self {
        let digest = |header: &RowHeader| {
            let mut bytes = Vec::new();
            let mut field = |field: &[u8]| {
                bytes.extend((field.len() as u64).to_le_bytes());
                bytes.extend(field);
            };
            field(row.row_id.as_bytes());
            field(&header.encode_to_vec());
            row.spans.iter().for_each(|span| field(&span.encode_to_vec()));
            field(&row.loss_mask);
            field(&row.token_ids.iter().flat_map(|id| id.to_le_bytes()).collect::<Vec<u8>>());
            field(&row.logprobs.iter().flat_map(|value| value.to_le_bytes()).collect::<Vec<u8>>());
            xxh3_128(&bytes)
        };
        let header = &row.header;
        let timeless = RowHeader { finalise_time: None, ..header.clone() };
        let call = |call: &str| format!("{}/{}/{call}", header.rollout_id, header.attempt);
        Self {
            row_id: row.row_id.clone(),
            with_time: digest(header),
            without_time: digest(&timeless),
            trains: row.trains().into_iter().map(call).collect(),
        }
    }

    fn line(&self) -> String {
        format!("row {} {:x} {:x} {}\n", self.row_id, self.with_time, self.without_time, self.trains.join(","))
    }

    /// Nothing, if it is no such line.
    fn parse(rest: &str) -> Option<Self> {
        let mut words = rest.split(' ');
        let (row_id, with_time, without_time, trains) = (words.next()?, words.next()?, words.next()?, words.next()?);
        Some(Self {
            row_id: row_id.to_owned(),
            with_time: u128::from_str_radix(with_time, 16).ok()?,
            without_time: u128::from_str_radix(without_time, 16).ok()?,
            trains: trains.split(',').filter(|call| !call.is_empty()).map(str::to_owned).collect(),
        })
    }
}

/// What a consumer group has applied and has been told is acknowledged, in a file that its members share.
pub(crate) struct Applied {
    file: File,
    /// How much of the file is known.
    read_bytes: u64,
    rows: BTreeMap<String, Print>,
    acknowledged: BTreeSet<String>,
    /// Lines that say a row that an earlier one says: applied twice.
    pub(crate) repeats: Vec<String>,
}

impl Applied {
    pub(crate) fn open(path: &Path) -> std::io::Result<Self> {
        let file = OpenOptions::new().read(true).append(true).create(true).open(path)?;
        let mut applied =
            Self { file, read_bytes: 0, rows: BTreeMap::new(), acknowledged: BTreeSet::new(), repeats: Vec::new() };
        applied.locked(|_| Ok(()))?;
        Ok(applied)
    }

    pub(crate) fn rows(&self) -> &BTreeMap<String, Print> {
        &self.rows
    }

    pub(crate) fn acknowledged(&self) -> &BTreeSet<String> {
        &self.acknowledged
    }

    /// Applies rows that are not applied, durably; says which of the others had other bytes.
    pub(crate) fn apply(&mut self, prints: Vec<Print>) -> std::io::Result<Vec<String>> {
        self.locked(|applied| {
            let mut others = Vec::new();
            let mut lines = String::new();
            for print in prints {
                match applied.rows.get(&print.row_id) {
                    Some(known) if *known == print => {}
                    Some(known) => others.push(format!("{} came as {print:?}, then as {known:?}", print.row_id)),
                    None => lines += &print.line(),
                }
            }
            applied.append(&lines)?;
            Ok(others)
        })
    }

    /// Keeps that units were answered as acknowledged.
    pub(crate) fn acknowledge(&mut self, units: &[String]) -> std::io::Result<()> {
        let lines: String = units.iter().map(|unit| format!("ack {unit}\n")).collect();
        self.locked(|applied| applied.append(&lines))
    }

    /// Reads what others have written.
    pub(crate) fn refresh(&mut self) -> std::io::Result<()> {
        self.locked(|_| Ok(()))
    }

    /// Does something while nobody else writes, knowing all that is written. A killed member's lock is let go.
    fn locked<T>(&mut self, act: impl FnOnce(&mut Self) -> std::io::Result<T>) -> std::io::Result<T> {
        self.file.lock()?;
        let done = self.read().and_then(|()| act(self));
        self.file.unlock()?;
        done
    }

    fn append(&mut self, lines: &str) -> std::io::Result<()> {
        if lines.is_empty() {
            return Ok(());
        }
        self.file.write_all(lines.as_bytes())?;
        self.file.sync_data()?;
        self.read()
    }

    fn read(&mut self) -> std::io::Result<()> {
        let mut text = String::new();
        self.file.seek(SeekFrom::Start(self.read_bytes))?;
        self.file.read_to_string(&mut text)?;
        let whole = text.rfind('\n').map_or(0, |end| end + 1);
        // Half a line is of a member that was killed while it wrote.
        if whole < text.len() {
            self.file.set_len(self.read_bytes + whole as u64)?;
        }
        self.read_bytes += whole as u64;
        for line in text[..whole].lines() {
            if let Some(unit) = line.strip_prefix("ack ") {
                self.acknowledged.insert(unit.to_owned());
            } else if let Some(print) = line.strip_prefix("row ").and_then(Print::parse) {
                if let Some(repeated) = self.rows.insert(print.row_id.clone(), print) {
                    self.repeats.push(repeated.row_id);
                }
            } else {
                self.repeats.push(format!("{line:?} is no line of this file"));
            }
        }
        Ok(())
    }
}
