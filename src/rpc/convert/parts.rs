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
use crate::rollout::run_settings::Unit;
use crate::store::sequencer::{GroupOfUnit, UnitDelivery, UnitRows as SequencedRows};

use super::groups::figures;
use super::rows::{RowIdentity, RowParts, RowSource};
use super::settings::unit_message;

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
    pub unit: Unit,
    /// How often it has been given out, this time counted.
    pub delivery_count: u32,
    /// Tokens of all its rows, as credit counts them.
    pub unit_tokens: u64,
    /// How often its consumer group was sought back.
    pub seek_count: u64,
}

/// The rows of a unit, before they are gathered.
#[derive(Clone, Debug)]
pub struct UnitRows {
    /// Which attempt they are of.
    pub identity: RowIdentity,
    /// When the rollout was finalised.
    pub finalised_unix_ms: u64,
    /// Rows of each policy: of a plan those with these indices.
    pub planned: Vec<(Arc<PolicyPlan>, Range<usize>)>,
    /// Their group, if they have waited for that.
    pub group: Option<Arc<GroupOfUnit>>,
}

/// The messages of one delivery of a unit, made as they are asked for.
pub struct UnitParts {
    head: v1::UnitPart,
    /// Of the rollout that is being sent, and of those that come.
    members: VecDeque<UnitRows>,
    /// Which rollout that is.
    member: usize,
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
        let UnitDelivery { unit, kind, rows, group, tokens, delivery_number, seek_count } = delivery;
        let head = UnitHead {
            unit_id: unit.as_str().to_owned(),
            unit: match kind {
                UnitKind::Row => Unit::Row,
                UnitKind::Rollout => Unit::Rollout,
                UnitKind::Group => Unit::Group,
            },
            delivery_count: delivery_number,
            unit_tokens: tokens,
            seek_count,
        };
        let of_member = |rows: SequencedRows| {
            let (planned, about) = (rows.planned(), rows.about);
            let identity = RowIdentity { run: about.run, rollout: about.rollout, attempt: about.attempt };
            UnitRows { identity, finalised_unix_ms: rows.finalised_unix_ms, planned, group: group.clone() }
        };
        Self::new(&head, rows.into_iter().map(of_member).collect())
    }

    /// Messages of the size that goes to trainers.
    #[must_use]
    pub fn new(head: &UnitHead, members: Vec<UnitRows>) -> Self {
        Self::with_bound(head, members, limits::UNIT_MESSAGE_BYTES_MAX)
    }

    /// Messages of at most this many encoded bytes, what wraps them counted. A bound that a row's header does not fit into is
    /// overstepped by that header.
    #[must_use]
    pub fn with_bound(head: &UnitHead, members: Vec<UnitRows>, message_bytes_max: usize) -> Self {
        let row_count: usize = members.iter().flat_map(|rows| &rows.planned).map(|(_, range)| range.len()).sum();
        let head = v1::UnitPart {
            unit_id: head.unit_id.clone(),
            unit: unit_message(head.unit).into(),
            delivery_count: head.delivery_count,
            unit_tokens: head.unit_tokens,
            unit_rows: u32::try_from(row_count).unwrap_or(u32::MAX),
            seek_count: head.seek_count,
            ..v1::UnitPart::default()
        };
        let room_bytes = message_bytes_max.saturating_sub(ENVELOPE_BYTES + INDEX_BYTES + head.encoded_len());
        let mut members = VecDeque::from(members);
        let waiting = members.front_mut().map(|rows| std::mem::take(&mut rows.planned)).unwrap_or_default().into();
        Self { head, members, member: 0, waiting, current: None, room_bytes, whole: false }
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

    /// Of which of its rollouts the next message holds rows.
    #[must_use]
    pub fn member(&self) -> usize {
        self.member
    }

    /// Goes on to the rollout after one of which all was sent; false if there is none.
    fn next_member(&mut self) -> bool {
        self.members.pop_front();
        let Some(next) = self.members.front_mut() else { return false };
        self.member += 1;
        self.waiting = std::mem::take(&mut next.planned).into();
        true
    }

    /// Gathers the next row if none is being sent; false if there is none, or it cannot be gathered now.
    fn begin_row(&mut self, rollout: &FinalisedRollout) -> bool {
        while self.current.is_none() {
            let Some(rows) = self.members.front() else { return false };
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
    let UnitRows { identity, finalised_unix_ms, group, planned: _ } = rows;
    RowSource { rollout, plan, row_index, identity, finalised_unix_ms: *finalised_unix_ms, group: group.as_deref() }
}

impl UnitParts {
    /// The next message; none after the last. The rollout is the one that [`Self::member`] says, and must have its
    /// tokens unless [`Self::are_amid_a_row`].
    pub fn next_part(&mut self, rollout: &FinalisedRollout) -> Option<v1::UnitPart> {
        if self.whole {
            return None;
        }
        let mut message = self.head.clone();
        self.head.part_index += 1;
        let mut room_bytes = self.room_bytes;
        if message.part_index == 0
            && let Some(group) = self.members.front().and_then(|rows| rows.group.as_ref())
        {
            let figures = figures(&group.group, &group.release);
            room_bytes = room_bytes.saturating_sub(ENVELOPE_BYTES + figures.encoded_len());
            message.group = Some(figures);
        }
        while self.begin_row(rollout) {
            let Some((plan, row_index, parts)) = &mut self.current else { break };
            let Some(rows) = self.members.front() else { break };
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
        let member_is_over = self.current.is_none() && !self.has_waiting();
        self.whole = member_is_over && !self.next_member();
        message.last = self.whole;
        Some(message)
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
