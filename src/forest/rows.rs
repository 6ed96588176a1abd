//! Rows: token ids with a loss mask, and what each part of them is (RULES section 3.5).
//!
//! A row is the text of its leaf. The mask is 1 on the generated ids of each call that the row owns, and 0 elsewhere;
//! log-probabilities stand where the mask is 1 and are 0 elsewhere.

use super::Forest;
use super::call::{CallIndex, VersionSpan};
use super::link::Links;
use super::plan::{PolicyPlan, RowPlan};

/// One call's generated ids in a row.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RowSpan {
    /// The call.
    pub call: CallIndex,
    /// First position of its generated ids in the row.
    pub start: u32,
    /// One past the last.
    pub end: u32,
    /// Whether this row trains it.
    pub trained: bool,
}

/// One training sequence.
#[derive(Clone, Debug, PartialEq)]
pub struct Row {
    /// All ids of the leaf.
    pub token_ids: Vec<u32>,
    /// 1 where an id is trained.
    pub loss_mask: Vec<u8>,
    /// Log-probabilities where the mask is 1, else 0.
    pub logprobs: Vec<f32>,
    /// The calls of the walk, from the root on.
    pub spans: Vec<RowSpan>,
    /// Lowest and highest policy version over the ids that it trains, if they carry any.
    pub policy_versions: Option<(u64, u64)>,
}

impl Forest {
    /// Gathers one row of a plan.
    #[must_use]
    pub fn row(&self, plan: &PolicyPlan, row: &RowPlan, links: &Links) -> Row {
        let token_ids = self.full_ids(row.leaf).unwrap_or_default();
        let mut loss_mask = vec![0; token_ids.len()];
        let mut logprobs = vec![0.0; token_ids.len()];
        let mut spans = Vec::new();
        let mut policy_versions = None;
        for index in links.walk(row.leaf) {
            let call = self.call(index);
            let (start, end) = (call.prompt_length(), call.full_length());
            let trained = plan.owners[index.index()] == Some(row.leaf);
            debug_assert!(end <= token_ids.len() && loss_mask[start..end].iter().all(|mask| *mask == 0));
            if trained {
                loss_mask[start..end].fill(1);
                if let Some(values) = &call.logprobs {
                    for ((mask, place), value) in
                        loss_mask[start..end].iter_mut().zip(&mut logprobs[start..end]).zip(values)
                    {
                        (*mask, *place) = if value.is_nan() { (0, 0.0) } else { (1, *value) };
                    }
                }
                policy_versions = widened(policy_versions, call.versions(), &loss_mask[start..end]);
            }
            spans.push(RowSpan {
                call: index,
                start: call.prompt_length,
                end: call.prompt_length + call.generation_length,
                trained,
            });
        }
        debug_assert_eq!(
            loss_mask.iter().map(|mask| u32::from(*mask)).sum::<u32>(),
            row.trained_tokens,
            "invariant 1: no other token is trained"
        );
        Row { token_ids, loss_mask, logprobs, spans, policy_versions }
    }
}

/// The range, widened by the versions of those generated tokens that train.
fn widened(range: Option<(u64, u64)>, spans: &[VersionSpan], mask: &[u8]) -> Option<(u64, u64)> {
    let trains = |span: &&VersionSpan| {
        let of_span = mask.get(span.start as usize..span.end as usize);
        of_span.is_some_and(|of_span| of_span.contains(&1))
    };
    spans.iter().filter(trains).fold(range, |range, span| match range {
        Some((lowest, highest)) => Some((lowest.min(span.version), highest.max(span.version))),
        None => Some((span.version, span.version)),
    })
}
