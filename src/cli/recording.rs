//! Recorded calls: JSON Lines, gzip or not, as `replay` and `demo` report them.
//!
//! A recording is read and checked as a whole before anything of it is sent: a bad line is an error with its file, its
//! number and what is wrong. Ids stay as the bytes that go over the wire, and a prompt that a line gives as a prefix of
//! an earlier call stays that prefix and its suffix; [`RecordedRollout::full_prompt`] resolves it when it is asked for.

use std::collections::BTreeMap;
use std::fmt;
use std::fs::File;
use std::io::{BufRead, BufReader};
use std::path::Path;

use bytes::Bytes;
use flate2::bufread::MultiGzDecoder;

use self::builder::Builder;
use crate::forest::digest::Digest;

mod builder;
mod line;
#[cfg(test)]
mod tests;

/// Bytes of one id on the wire.
const ID_BYTES: usize = 4;
/// What a gzip file begins with.
const GZIP_MAGIC: [u8; 2] = [0x1f, 0x8b];

/// What some files of recorded calls hold.
#[derive(Debug, Default)]
pub struct Recording {
    /// The rollouts, in the order of their first lines.
    pub rollouts: Vec<RecordedRollout>,
    /// What is odd but no error, in sentences.
    pub remarks: Vec<String>,
}

/// One rollout.
#[derive(Debug, Default, PartialEq)]
pub struct RecordedRollout {
    /// Its id.
    pub id: String,
    /// Its group, if it has one.
    pub group: Option<String>,
    /// Its reward, if the recording says it.
    pub reward: Option<f64>,
    /// The kept calls by agent.
    pub kept: BTreeMap<String, Vec<String>>,
    /// Its calls, in the order of their lines.
    pub calls: Vec<RecordedCall>,
}

/// One call.
#[derive(Debug, PartialEq)]
pub struct RecordedCall {
    /// Its id.
    pub id: String,
    /// Its agent.
    pub agent: String,
    /// Its agent's parent; empty: none.
    pub parent_agent: String,
    /// Its number.
    pub sequence: u64,
    /// What the line says of its link.
    pub link: RecordedLink,
    /// What it was for; empty: not said.
    pub kind: String,
    /// Which policy sampled it; empty: the run's default.
    pub policy: String,
    /// At which weights.
    pub policy_version: Option<u64>,
    /// The model's name; may be empty.
    pub model: String,
    /// Why its generation ended; may be empty.
    pub finish_reason: String,
    /// Whether to train on it.
    pub train: Option<bool>,
    /// What its prompt begins with, where the line says it so.
    pub base: Option<RecordedBase>,
    /// The ids of its prompt after the base, little-endian.
    pub suffix: Bytes,
    /// The ids that it generated, little-endian.
    pub generation: Bytes,
    /// Their log-probabilities, little-endian.
    pub logprobs: Option<Bytes>,
}

/// The first ids of an earlier call of the same rollout.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RecordedBase {
    /// Which call, as an index into the rollout's calls.
    pub call: usize,
    /// How many of its ids; at least 1.
    pub length_tokens: usize,
    /// Their digest.
    pub digest: Digest,
}

/// What a line says of a call's link.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum RecordedLink {
    /// It is to be inferred.
    #[default]
    Infer,
    /// The call has no parent.
    Root,
    /// This call is the parent.
    Parent(String),
}

/// A line that is not as it should be, or a file that cannot be read.
#[derive(Debug, thiserror::Error)]
#[error("{at}: {problem}")]
pub struct RecordingError {
    at: Place,
    problem: String,
}

/// Where a line stands; line 0 is the file as a whole.
#[derive(Clone, Debug)]
struct Place {
    file: std::sync::Arc<str>,
    line: u64,
}

impl fmt::Display for Place {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.line {
            0 => formatter.write_str(&self.file),
            line => write!(formatter, "{}:{line}", self.file),
        }
    }
}

impl Recording {
    /// Reads and checks some files, which together are one recording.
    ///
    /// # Errors
    /// Says which line of which file is wrong, and how.
    pub fn read<P: AsRef<Path>>(files: &[P]) -> Result<Self, RecordingError> {
        let mut builder = Builder::default();
        for path in files {
            let path = path.as_ref();
            let place = Place { file: path.display().to_string().into(), line: 0 };
            let unreadable = |error: std::io::Error| RecordingError { at: place.clone(), problem: error.to_string() };
            let mut file = BufReader::with_capacity(1 << 18, File::open(path).map_err(unreadable)?);
            if file.fill_buf().map_err(unreadable)?.starts_with(&GZIP_MAGIC) {
                read_lines(BufReader::with_capacity(1 << 18, MultiGzDecoder::new(file)), place, &mut builder)?;
            } else {
                read_lines(file, place, &mut builder)?;
            }
        }
        Ok(builder.finish())
    }

    /// How many calls it has.
    #[must_use]
    pub fn calls(&self) -> usize {
        self.rollouts.iter().map(|rollout| rollout.calls.len()).sum()
    }
}

fn read_lines(mut lines: impl BufRead, file: Place, builder: &mut Builder) -> Result<(), RecordingError> {
    let mut at = file;
    let mut bytes = Vec::new();
    loop {
        at.line += 1;
        bytes.clear();
        let outcome = match lines.read_until(b'\n', &mut bytes) {
            Ok(0) => return Ok(()),
            Ok(_) if bytes.iter().all(u8::is_ascii_whitespace) => Ok(()),
            Ok(_) => line::parse(&bytes).and_then(|line| builder.take(line, &at)),
            Err(error) => Err(error.to_string()),
        };
        outcome.map_err(|problem| RecordingError { at: at.clone(), problem })?;
    }
}

impl RecordedCall {
    /// Ids in its prompt.
    #[must_use]
    pub fn prompt_tokens(&self) -> usize {
        self.base.map_or(0, |base| base.length_tokens) + self.suffix.len() / ID_BYTES
    }

    /// Ids that it generated.
    #[must_use]
    pub fn generated_tokens(&self) -> usize {
        self.generation.len() / ID_BYTES
    }
}

impl RecordedRollout {
    /// All ids of a call's prompt, little-endian; empty for a call that is not there.
    #[must_use]
    pub fn full_prompt(&self, call: usize) -> Bytes {
        match self.calls.get(call) {
            None => Bytes::new(),
            Some(recorded) if recorded.base.is_none() => recorded.suffix.clone(),
            Some(recorded) => first_ids(&self.calls, call, recorded.prompt_tokens()).into(),
        }
    }

    /// The base of a call's prompt: the base call's id, how many ids, and their digest.
    #[must_use]
    pub fn base(&self, call: usize) -> Option<(&str, usize, Digest)> {
        let base = self.calls.get(call)?.base?;
        Some((&self.calls.get(base.call)?.id, base.length_tokens, base.digest))
    }
}

/// The first `length_tokens` ids of a call's prompt + generation, little-endian; at most as many as it has. Filled from
/// the end, down the chain of bases, each of which stands on an earlier line.
fn first_ids(calls: &[RecordedCall], call: usize, length_tokens: usize) -> Vec<u8> {
    let mut ids = vec![0_u8; length_tokens * ID_BYTES];
    let mut end = ids.len();
    let mut at = calls.get(call);
    while let Some(recorded) = at {
        let suffix_start = recorded.base.map_or(0, |base| base.length_tokens * ID_BYTES);
        for (start, part) in
            [(suffix_start + recorded.suffix.len(), &recorded.generation), (suffix_start, &recorded.suffix)]
        {
            if let Some(part) = end.checked_sub(start).and_then(|length| part.get(..length)) {
                ids[start..end].copy_from_slice(part);
                end = start;
            }
        }
        at = recorded.base.and_then(|base| calls.get(base.call));
    }
    ids
}
