//! One row of a finalised rollout as a sequence of messages, each as large as the room it is given.
//!
//! A row is gathered once, when its first part is taken, and freed with its last; its arrays are shared by its parts, not copied.
//! Spans come before tokens. Every part makes progress, so a room too small for even one span or token is overstepped rather
//! than waited for; the limits of names, tags and version spans keep that from happening with messages of the real size.

use bytes::Bytes;
use prost::Message;

use crate::forest::plan::{PolicyPlan, RowPlan};
use crate::forest::rows::{Row, RowSpan};
use crate::ids::{CallId, RolloutId, RunId, row_id};
use crate::limits;
use crate::proto::v1;
use crate::queue::PADDING_ROW_TOKENS;
use crate::rollout::FinalisedRollout;
use crate::rollout::settings::RowWeight;
use crate::store::sequencer::GroupOfUnit;

use super::answer::text;
use super::fields::timestamp;

/// Bytes that one token takes in a part: its id, its mask, its log-probability.
pub const TOKEN_BYTES: usize = 9;
/// Most bytes of a field's tag and length.
const FIELD_BYTES_MAX: usize = 6;
/// Most bytes of what each part of a row has besides its id, header, spans and tokens: its own tag and length in the unit, those
/// of its three arrays, `token_offset` and `last`.
const PART_BYTES_MAX: usize = 4 * FIELD_BYTES_MAX + 11 + 2;

// A header, and a span, fit into a message of their own, whatever names and tags they have. A varint takes at most 10 bytes.
const _: () = {
    let text = limits::IDENTIFIER_BYTES_MAX + FIELD_BYTES_MAX;
    let tag = text + limits::TEXT_BYTES_MAX + 2 * FIELD_BYTES_MAX;
    let id = 4 * (3 * text) + text;
    let header = 8 * text + limits::TAGS_MAX * (tag + text + 16) + 32 * 16;
    let span = 8 * text + limits::CALL_VERSION_SPANS_MAX * 32 + 16 * 16;
    assert!(id + PART_BYTES_MAX + header + span < limits::UNIT_MESSAGE_BYTES_MAX / 2);
};

/// Which attempt a row is of.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RowIdentity {
    /// The run.
    pub run: RunId,
    /// The rollout.
    pub rollout: RolloutId,
    /// Its attempt.
    pub attempt: u32,
}

/// Where a row comes from.
#[derive(Clone, Copy, Debug)]
pub struct RowSource<'a> {
    /// Its rollout.
    pub rollout: &'a FinalisedRollout,
    /// The rows of its policy.
    pub plan: &'a PolicyPlan,
    /// Which of them; one beyond the last gives an empty row.
    pub row_index: usize,
    /// Which attempt it is of.
    pub identity: &'a RowIdentity,
    /// When the rollout was finalised.
    pub finalised_unix_ms: u64,
    /// Its group, if it has waited for that.
    pub group: Option<&'a GroupOfUnit>,
    /// In which microbatch of its shard it stands, if it is one of a step.
    pub microbatch: Option<u32>,
}

impl RowSource<'_> {
    fn row(&self) -> Option<&RowPlan> {
        self.plan.rows.get(self.row_index)
    }

    /// The row's stable id.
    #[must_use]
    pub fn row_id(&self) -> String {
        let leaf = self.row().map(|row| self.rollout.facts().forest.call(row.leaf).id());
        let id = |leaf: &CallId| {
            row_id(&self.identity.run, &self.identity.rollout, self.identity.attempt, &self.plan.policy, leaf)
        };
        leaf.map(id).unwrap_or_default()
    }

    /// What the row is.
    fn header(&self, row: &Row) -> v1::RowHeader {
        let facts = self.rollout.facts();
        let forest = &facts.forest;
        let plan = self.row();
        let leaf = plan.map(|plan| forest.call(plan.leaf));
        let count = |count: usize| u32::try_from(count).unwrap_or(u32::MAX);
        let reward = facts.reward.as_ref();
        let sums = self.group.map(|group| group.sums.get(&self.plan.policy).copied().unwrap_or_default());
        let components = reward.into_iter().flat_map(|reward| &reward.components);
        v1::RowHeader {
            run_id: self.identity.run.to_string(),
            group_id: text(facts.group.as_ref()),
            rollout_id: self.identity.rollout.to_string(),
            attempt: self.identity.attempt,
            policy: self.plan.policy.to_string(),
            row_index: count(self.row_index),
            row_count: count(self.plan.rows.len()),
            agent_id: text(leaf.map(|leaf| forest.agent(leaf.agent()).id())),
            leaf_call_id: text(leaf.map(|leaf| leaf.id())),
            root_call_id: text(plan.map(|plan| forest.call(plan.root).id())),
            reward: reward.map_or(0.0, |reward| reward.value),
            reward_components: components.map(|(name, value)| (name.to_string(), *value)).collect(),
            tags: facts.tags.iter().map(|(key, value)| (key.to_string(), value.clone())).collect(),
            advantage: self.advantage(),
            weight: self.weight(),
            policy_version_min: row.policy_versions.map(|(lowest, _)| lowest),
            policy_version_max: row.policy_versions.map(|(_, highest)| highest),
            tokens: row.token_ids.len() as u64,
            trained_tokens: plan.map_or(0, |plan| u64::from(plan.trained_tokens)),
            rollout_rows: self.plan.rows.len() as u64,
            rollout_trained_tokens: self.rollout_trained_tokens(),
            group_rows: sums.map(|sums| sums.rows),
            group_trained_tokens: sums.map(|sums| sums.trained_tokens),
            incomplete: self.rollout.incomplete(),
            degenerate: self.advantage().is_some() && self.group.is_some_and(|group| group.release.is_degenerate()),
            padding: false,
            microbatch_index: self.microbatch,
            span_count: count(row.spans.len()),
            finalise_time: Some(timestamp(self.finalised_unix_ms)),
        }
    }

    /// The rollout's advantage in its group.
    fn advantage(&self) -> Option<f64> {
        self.group?.release.advantage(&self.identity.rollout)
    }

    fn rollout_trained_tokens(&self) -> u64 {
        self.plan.rows.iter().map(|row| u64::from(row.trained_tokens)).sum()
    }

    /// What the row's loss is to be multiplied with (RULES section 5). A rollout whose rows train no token has no shares.
    fn weight(&self) -> f64 {
        match self.rollout.facts().settings.row_weight {
            RowWeight::One => 1.0,
            RowWeight::RolloutRows => 1.0 / self.plan.rows.len().max(1) as f64,
            RowWeight::RolloutTokens => {
                let of_row = self.row().map_or(0, |row| row.trained_tokens);
                f64::from(of_row) / self.rollout_trained_tokens().max(1) as f64
            }
        }
    }

    fn span(&self, span: &RowSpan) -> v1::Span {
        let facts = self.rollout.facts();
        let forest = &facts.forest;
        let credit = facts.credit_of(span.call);
        let call = forest.call(span.call);
        v1::Span {
            start: u64::from(span.start),
            end: u64::from(span.end),
            call_id: call.id().to_string(),
            agent_id: forest.agent(call.agent()).id().to_string(),
            kind: forest.kind(span.call).to_string(),
            policy: forest.policy(span.call).to_string(),
            policy_versions: version_spans(call),
            finish_reason: text(forest.finish_reason(span.call)),
            trained: span.trained,
            has_logprobs: call.has_logprobs(),
            advantage: credit.advantage(self.advantage()),
            process_reward: credit.reward(),
            advantage_scale: credit.advantage_scale(),
            model: text(forest.model(span.call)),
        }
    }
}

/// A row that fills up a microbatch of a shard: a token that trains nothing.
#[must_use]
pub fn padding(unit_id: &str, (run, policy): (&RunId, Option<&str>), microbatch: u32) -> v1::RowPart {
    v1::RowPart {
        row_id: format!("{unit_id}/padding/{microbatch}"),
        header: Some(v1::RowHeader {
            run_id: run.to_string(),
            policy: policy.unwrap_or_default().to_owned(),
            tokens: PADDING_ROW_TOKENS,
            padding: true,
            microbatch_index: Some(microbatch),
            ..v1::RowHeader::default()
        }),
        token_ids: Bytes::from_static(&[0; 4]),
        loss_mask: Bytes::from_static(&[0]),
        logprobs: Bytes::from_static(&[0; 4]),
        last: true,
        ..v1::RowPart::default()
    }
}

const _: () = assert!(PADDING_ROW_TOKENS == 1);

/// The weights that a call was sampled at.
pub(super) fn version_spans(call: &crate::forest::call::Call) -> Vec<v1::PolicyVersionSpan> {
    let spans = call.versions().iter();
    spans.map(|span| v1::PolicyVersionSpan { start: span.start, end: span.end, version: span.version }).collect()
}

/// Numbers of four bytes, seen as bytes.
struct Words<T>(Vec<T>);

impl<T: bytemuck::NoUninit> AsRef<[u8]> for Words<T> {
    fn as_ref(&self) -> &[u8] {
        bytemuck::cast_slice(&self.0)
    }
}

/// One row on its way out: what of it has not been taken yet.
pub struct RowParts {
    row_id: String,
    /// Until it has been taken.
    header: Option<Box<v1::RowHeader>>,
    spans: Vec<RowSpan>,
    next_span: usize,
    tokens: usize,
    next_token: usize,
    token_ids: Bytes,
    loss_mask: Bytes,
    logprobs: Bytes,
}

impl RowParts {
    /// Gathers a row.
    #[must_use]
    pub fn new(source: RowSource<'_>) -> Self {
        let gather = |plan| source.rollout.facts().forest.row(source.plan, plan, source.rollout.links());
        let row = source.row().map(gather).unwrap_or_else(|| Row {
            token_ids: Vec::new(),
            loss_mask: Vec::new(),
            logprobs: Vec::new(),
            spans: Vec::new(),
            policy_versions: None,
        });
        Self {
            row_id: source.row_id(),
            header: Some(Box::new(source.header(&row))),
            next_span: 0,
            tokens: row.token_ids.len(),
            next_token: 0,
            spans: row.spans,
            token_ids: Bytes::from_owner(Words(row.token_ids)),
            loss_mask: Bytes::from(row.loss_mask),
            logprobs: Bytes::from_owner(Words(row.logprobs)),
        }
    }

    /// The next part, which takes at most `room_bytes` in the unit's message, and whose last one says so; none if nothing of the
    /// row has room. With `must_go`, something goes even then. `source` is that of [`RowParts::new`].
    pub fn take(&mut self, source: RowSource<'_>, room_bytes: usize, must_go: bool) -> Option<v1::RowPart> {
        let own_bytes = PART_BYTES_MAX + FIELD_BYTES_MAX + self.row_id.len();
        let header_bytes = self.header.as_ref().map_or(0, |header| FIELD_BYTES_MAX + header.encoded_len());
        if own_bytes + header_bytes > room_bytes && !must_go {
            return None;
        }
        let mut room = room_bytes.saturating_sub(own_bytes + header_bytes);
        let mut part = v1::RowPart {
            row_id: self.row_id.clone(),
            header: self.header.take().map(|header| *header),
            token_offset: self.next_token as u64,
            ..v1::RowPart::default()
        };
        let must_progress = |part: &v1::RowPart| must_go && part.header.is_none() && part.spans.is_empty();
        while let Some(span) = self.spans.get(self.next_span) {
            let span = source.span(span);
            let bytes = FIELD_BYTES_MAX + span.encoded_len();
            if bytes > room && !must_progress(&part) {
                break;
            }
            room = room.saturating_sub(bytes);
            part.spans.push(span);
            self.next_span += 1;
        }
        if self.next_span == self.spans.len() {
            let fit = (room / TOKEN_BYTES).max(usize::from(must_progress(&part)));
            let end = self.tokens.min(self.next_token + fit);
            let (from, to) = (self.next_token, end);
            part.token_ids = self.token_ids.slice(4 * from..4 * to);
            part.loss_mask = self.loss_mask.slice(from..to);
            part.logprobs = self.logprobs.slice(4 * from..4 * to);
            self.next_token = end;
            part.last = self.next_token == self.tokens;
        }
        let empty = part.header.is_none() && part.spans.is_empty() && part.token_ids.is_empty() && !part.last;
        (!empty).then_some(part)
    }
}
