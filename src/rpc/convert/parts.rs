//! A unit as the messages that it is sent in, one at a time, each within a bound of encoded bytes.
//!
//! At most one row is gathered at any time, so that a huge unit is never in memory as a whole. The rollout is lent for each message,
//! and needs its tokens only where a row begins: they may leave memory while a slow reader takes what went before. Of a unit with
//! several rollouts each message holds rows of one.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;

use prost::Message;

use crate::forest::plan::PolicyPlan;
use crate::limits;
use crate::proto::v1;
use crate::queue::UnitKind;
use crate::rollout::FinalisedRollout;
use crate::store::sequencer::{GroupOfUnit, Planned, ShardOfStep, ShardPiece, UnitDelivery, UnitRows as SequencedRows};

use super::groups::figures;
use super::rows::{RowIdentity, RowParts, RowSource, padding};

/// Bytes that a `SubscribeResponse` puts around a part.
const ENVELOPE_BYTES: usize = 8;
/// Most bytes by which a part's index and `last` can make it longer than the head that room is reckoned with.
const INDEX_BYTES: usize = 8;

/// What every message of a delivery says of its unit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnitHead {
    /// The unit's stable id.
    pub unit_id: String,
    /// What it is.
    pub unit: v1::Unit,
    /// How often it has been given out, this time counted.
    pub delivery_count: u32,
    /// Tokens of all its rows, as credit counts them.
    pub unit_tokens: u64,
    /// How often its consumer group was sought back.
    pub seek_count: u64,
}

/// Some rows of one rollout of a unit, before they are gathered.
#[derive(Clone, Debug)]
pub struct UnitRows {
    /// Which of the unit's rollouts it is.
    pub rollout: usize,
    /// Which attempt they are of.
    pub identity: RowIdentity,
    /// When the rollout was finalised.
    pub finalised_unix_ms: u64,
    /// Rows of each policy: of a plan those with these indices.
    pub planned: Vec<(Arc<PolicyPlan>, Range<usize>)>,
    /// Their group, if they have waited for that.
    pub group: Option<Arc<GroupOfUnit>>,
    /// In which microbatch they stand, if the unit is a shard of a step.
    pub microbatch: Option<u32>,
}

/// What a unit is made of.
#[derive(Clone, Debug)]
pub enum Piece {
    /// Rows.
    Rows(UnitRows),
    /// A row that fills up a microbatch.
    Padding(Box<v1::RowPart>),
}

/// The messages of one delivery of a unit, made as they are asked for.
pub struct UnitParts {
    head: v1::UnitPart,
    /// Which shard of which step it is, until that was said.
    step: Option<v1::StepShard>,
    /// What is being sent, and what comes.
    pieces: VecDeque<Piece>,
    /// What of it has not been begun: plans, and in each the rows from here on.
    waiting: VecDeque<(Arc<PolicyPlan>, Range<usize>)>,
    /// The row that is being sent, with its plan and index.
    current: Option<(Arc<PolicyPlan>, usize, RowParts)>,
    room_bytes: usize,
    whole: bool,
}

impl UnitParts {
    /// A unit that goes out, in messages of the size that goes to trainers.
    #[must_use]
    pub fn of(delivery: UnitDelivery) -> Self {
        let UnitDelivery { unit, kind, rows, shard, tokens, delivery_number, seek_count } = delivery;
        let head = UnitHead {
            unit_id: unit.as_str().to_owned(),
            unit: match kind {
                _ if shard.is_some() => v1::Unit::Step,
                UnitKind::Row => v1::Unit::Row,
                UnitKind::Rollout => v1::Unit::Rollout,
                UnitKind::Group => v1::Unit::Group,
            },
            delivery_count: delivery_number,
            unit_tokens: tokens,
            seek_count,
        };
        match shard {
            None => {
                let piece = |(rollout, rows): (usize, &SequencedRows)| {
                    Piece::Rows(UnitRows::of(rollout, rows, (rows.planned(), None)))
                };
                Self::new(&head, rows.iter().enumerate().map(piece).collect())
            }
            Some(shard) => {
                let step = step_shard(&shard);
                let ShardOfStep { run, policy, pieces, .. } = *shard;
                let piece = |ShardPiece { microbatch, rows: of }: ShardPiece| match of {
                    Some((rollout, planned)) => {
                        let rows = rows.get(rollout)?;
                        Some(Piece::Rows(UnitRows::of(rollout, rows, (planned, Some(microbatch)))))
                    }
                    None => {
                        let row = padding(&head.unit_id, (&run, policy.as_deref()), microbatch);
                        Some(Piece::Padding(Box::new(row)))
                    }
                };
                Self { step: Some(step), ..Self::new(&head, pieces.into_iter().filter_map(piece).collect()) }
            }
        }
    }

    /// Messages of the size that goes to trainers.
    #[must_use]
    pub fn new(head: &UnitHead, pieces: Vec<Piece>) -> Self {
        Self::with_bound(head, pieces, limits::UNIT_MESSAGE_BYTES_MAX)
    }

    /// Messages of at most this many encoded bytes, what wraps them counted. A bound that a row's header does not fit into is
    /// overstepped by that header.
    #[must_use]
    pub fn with_bound(head: &UnitHead, pieces: Vec<Piece>, message_bytes_max: usize) -> Self {
        let row_count: usize = pieces.iter().map(Piece::row_count).sum();
        let head = v1::UnitPart {
            unit_id: head.unit_id.clone(),
            unit: head.unit.into(),
            delivery_count: head.delivery_count,
            unit_tokens: head.unit_tokens,
            unit_rows: u32::try_from(row_count).unwrap_or(u32::MAX),
            seek_count: head.seek_count,
            ..v1::UnitPart::default()
        };
        let room_bytes = message_bytes_max.saturating_sub(ENVELOPE_BYTES + INDEX_BYTES + head.encoded_len());
        let (pieces, waiting) = (VecDeque::from(pieces), VecDeque::new());
        let mut parts = Self { head, step: None, pieces, waiting, current: None, room_bytes, whole: false };
        parts.begin_piece();
        parts
    }

    /// Whether the last message has been made.
    #[must_use]
    pub fn are_over(&self) -> bool {
        self.whole
    }

    /// Whether the first message has been made.
    #[must_use]
    pub fn have_begun(&self) -> bool {
        self.head.part_index > 0
    }

    /// Whether the next message goes on with a row, and needs no tokens of its rollout.
    #[must_use]
    pub fn are_amid_a_row(&self) -> bool {
        self.current.is_some()
    }

    /// Of which of its rollouts the next message holds rows; none if it holds padding, or there is none.
    #[must_use]
    pub fn rollout(&self) -> Option<usize> {
        match self.pieces.front() {
            Some(Piece::Rows(rows)) => Some(rows.rollout),
            Some(Piece::Padding(_)) | None => None,
        }
    }

    fn rows(&self) -> Option<&UnitRows> {
        match self.pieces.front() {
            Some(Piece::Rows(rows)) => Some(rows),
            Some(Piece::Padding(_)) | None => None,
        }
    }

    /// Begins what comes first.
    fn begin_piece(&mut self) {
        if let Some(Piece::Rows(next)) = self.pieces.front_mut() {
            self.waiting = std::mem::take(&mut next.planned).into();
        }
    }

    /// Goes on to what comes after that of which all was sent, if that is of the same rollout or none; false if it is not.
    fn next_piece(&mut self) {
        self.pieces.pop_front();
        self.begin_piece();
    }

    /// Gathers the next row if none is being sent; false if there is none, or it cannot be gathered now.
    fn begin_row(&mut self, rollout: &FinalisedRollout) -> bool {
        while self.current.is_none() {
            let Some(Piece::Rows(rows)) = self.pieces.front() else { return false };
            let Some((plan, range)) = self.waiting.front_mut() else { return false };
            match range.clone().next() {
                None => {
                    self.waiting.pop_front();
                }
                Some(_) if !rollout.has_tokens() => return false,
                Some(row_index) => {
                    range.start += 1;
                    let plan = Arc::clone(plan);
                    let parts = RowParts::new(source(rollout, rows, &plan, row_index));
                    self.current = Some((plan, row_index, parts));
                }
            }
        }
        true
    }

    fn has_waiting(&self) -> bool {
        self.waiting.iter().any(|(_, range)| !range.is_empty())
    }
}

fn source<'a>(
    rollout: &'a FinalisedRollout,
    rows: &'a UnitRows,
    plan: &'a PolicyPlan,
    row_index: usize,
) -> RowSource<'a> {
    let UnitRows { identity, finalised_unix_ms, group, microbatch, .. } = rows;
    let (finalised_unix_ms, microbatch) = (*finalised_unix_ms, *microbatch);
    RowSource { rollout, plan, row_index, identity, finalised_unix_ms, group: group.as_deref(), microbatch }
}

impl UnitParts {
    /// The next message; none after the last. The rollout is the one that [`Self::rollout`] says, and must have its tokens unless
    /// [`Self::are_amid_a_row`].
    pub fn next_part(&mut self, rollout: &FinalisedRollout) -> Option<v1::UnitPart> {
        let (mut message, mut room_bytes) = self.begin_message()?;
        let of = self.rollout();
        loop {
            while self.begin_row(rollout) {
                let Some((plan, row_index, parts)) = &mut self.current else { break };
                let Some(Piece::Rows(rows)) = self.pieces.front() else { break };
                let source = source(rollout, rows, plan, *row_index);
                let Some(part) = parts.take(source, room_bytes, message.rows.is_empty()) else { break };
                room_bytes = room_bytes.saturating_sub(part_bytes(&part));
                let whole_row = part.last;
                message.rows.push(part);
                if !whole_row {
                    break;
                }
                self.current = None;
            }
            if self.current.is_some() || self.has_waiting() {
                break;
            }
            self.next_piece();
            // What else there is of the same rollout goes into the same message.
            if self.rollout() != of || self.pieces.is_empty() {
                break;
            }
        }
        self.whole = self.pieces.is_empty();
        message.last = self.whole;
        Some(message)
    }

    /// The next message, where that holds padding; else none.
    pub fn next_padding(&mut self) -> Option<v1::UnitPart> {
        if !matches!(self.pieces.front(), Some(Piece::Padding(_))) {
            return None;
        }
        let (mut message, mut room_bytes) = self.begin_message()?;
        while let Some(Piece::Padding(row)) = self.pieces.front() {
            let bytes = part_bytes(row);
            if bytes > room_bytes && !message.rows.is_empty() {
                break;
            }
            room_bytes = room_bytes.saturating_sub(bytes);
            message.rows.push((**row).clone());
            self.next_piece();
        }
        self.whole = self.pieces.is_empty();
        message.last = self.whole;
        Some(message)
    }

    /// A message that says what the unit is, and the room that is left in it; none after the last.
    fn begin_message(&mut self) -> Option<(v1::UnitPart, usize)> {
        if self.whole {
            return None;
        }
        let mut message = self.head.clone();
        self.head.part_index += 1;
        let mut room_bytes = self.room_bytes;
        if let Some(step) = self.step.take() {
            room_bytes = room_bytes.saturating_sub(ENVELOPE_BYTES + step.encoded_len());
            message.step = Some(step);
        } else if message.part_index == 0
            && let Some(rows) = self.rows().filter(|rows| rows.microbatch.is_none())
            && let Some(group) = &rows.group
        {
            let figures = figures(&group.group, &group.release);
            room_bytes = room_bytes.saturating_sub(ENVELOPE_BYTES + figures.encoded_len());
            message.group = Some(figures);
        }
        Some((message, room_bytes))
    }
}

impl UnitRows {
    fn of(rollout: usize, rows: &SequencedRows, (planned, microbatch): (Planned, Option<u32>)) -> Self {
        let about = &rows.about;
        let identity = RowIdentity { run: about.run.clone(), rollout: about.rollout.clone(), attempt: about.attempt };
        let (finalised_unix_ms, group) = (rows.finalised_unix_ms, rows.group.clone());
        Self { rollout, identity, finalised_unix_ms, planned, group, microbatch }
    }
}

impl Piece {
    fn row_count(&self) -> usize {
        match self {
            Self::Rows(rows) => rows.planned.iter().map(|(_, range)| range.len()).sum(),
            Self::Padding(_) => 1,
        }
    }
}

/// Which shard of which step goes out.
fn step_shard(shard: &ShardOfStep) -> v1::StepShard {
    v1::StepShard {
        step_index: shard.index,
        shard: shard.shard,
        shards: shard.shards,
        microbatches: shard.microbatches,
        step_rollouts: shard.step_rollouts,
        step_rows: shard.step_rows,
        step_trained_tokens: shard.step_trained_tokens,
    }
}

/// Bytes that a row's part takes in its unit's message.
fn part_bytes(part: &v1::RowPart) -> usize {
    let bytes = part.encoded_len();
    1 + prost::length_delimiter_len(bytes) + bytes
}

#[cfg(test)]
#[path = "parts_tests.rs"]
mod tests;
