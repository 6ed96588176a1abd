//! The twelve calls and the five rows that they must become.
//!
//! A leader `L` starts a background agent `B`, a fresh subagent `A` and a fork of itself `F`, goes on after the fork, and
//! at last compacts its history. Call n adds three ids to the prompt that it continues, and generates two.

use std::collections::BTreeMap;

use bytes::Bytes;

use crate::cli::assemble::WholeRow;
use crate::cli::recording::{RecordedBase, RecordedCall, RecordedLink, RecordedRollout, Recording};
use crate::forest::digest::Digest;

/// The agent of each call, and which call it continues, counted from 1; 0: none.
const CALLS: [(&str, usize); 12] = [
    ("L", 0),
    ("B", 0),
    ("L", 1),
    ("B", 2),
    ("A", 0),
    ("A", 5),
    ("L", 3),
    ("F", 7),
    ("F", 8),
    ("L", 7),
    ("L", 0),
    ("L", 11),
];

/// The leader, parent of the other agents.
const LEADER: &str = "L";
const REWARD: f64 = 1.0;

/// A row: its agent, its walk, and how many calls at the end of its walk it trains; the others are context.
pub(super) struct ExpectedRow(&'static str, &'static [usize], usize);

/// The rows, in order.
pub(super) const ROWS: [ExpectedRow; 5] = [
    ExpectedRow("B", &[2, 4], 2),
    ExpectedRow("A", &[5, 6], 2),
    ExpectedRow("F", &[1, 3, 7, 8, 9], 2),
    ExpectedRow("L", &[1, 3, 7, 10], 4),
    ExpectedRow("L", &[11, 12], 2),
];

/// The ids that call n adds to what it continues, and those that it generates.
fn new_ids(call: usize) -> ([u32; 3], [u32; 2]) {
    let first = 95 + 5 * u32::try_from(call).unwrap_or(0);
    ([first, first + 1, first + 2], [first + 3, first + 4])
}

/// The log-probabilities of the ids that call n generates.
fn logprobs(call: usize) -> [f32; 2] {
    let step = (1 + 7 * u16::try_from(call).unwrap_or(0)) % 31;
    [-f32::from(step) / 32.0, -f32::from(step + 1) / 32.0]
}

/// Prompt and generation of call n.
fn full(call: usize) -> Vec<u32> {
    let mut walk = Vec::new();
    let mut at = call;
    while let Some((_, base)) = at.checked_sub(1).and_then(|index| CALLS.get(index)) {
        walk.push(at);
        at = *base;
    }
    walk.into_iter()
        .rev()
        .flat_map(|call| {
            let (prompt, generation) = new_ids(call);
            prompt.into_iter().chain(generation)
        })
        .collect()
}

fn is_delta(call: usize) -> bool {
    !call.is_multiple_of(3) && CALLS.get(call - 1).is_some_and(|(_, base)| *base > 0)
}

/// How many calls are reported as deltas.
pub(super) fn deltas() -> usize {
    (1..=CALLS.len()).filter(|&call| is_delta(call)).count()
}

fn ids(ids: &[u32]) -> Bytes {
    ids.iter().flat_map(|id| id.to_le_bytes()).collect()
}

/// The calls as a recording.
pub(super) fn recording(rollout: &str) -> Recording {
    let mut kept: BTreeMap<String, Vec<String>> = BTreeMap::new();
    let mut calls = Vec::new();
    for (call, (agent, base)) in (1..).zip(CALLS) {
        kept.entry(agent.to_owned()).or_default().push(format!("C{call}"));
        let (prompt, generation) = new_ids(call);
        let before = if base == 0 { Vec::new() } else { full(base) };
        let delta = is_delta(call);
        let suffix = if delta { prompt.to_vec() } else { [before.as_slice(), &prompt].concat() };
        calls.push(RecordedCall {
            id: format!("C{call}"),
            agent: agent.to_owned(),
            parent_agent: if agent == LEADER { String::new() } else { LEADER.to_owned() },
            sequence: call as u64,
            link: RecordedLink::Infer,
            kind: String::new(),
            policy: String::new(),
            policy_version: None,
            model: String::new(),
            finish_reason: String::new(),
            train: None,
            base: delta.then(|| RecordedBase {
                call: base - 1,
                length_tokens: before.len(),
                digest: Digest::of(&before),
            }),
            suffix: ids(&suffix),
            generation: ids(&generation),
            logprobs: Some(logprobs(call).into_iter().flat_map(f32::to_le_bytes).collect()),
        });
    }
    let rollout = RecordedRollout { id: rollout.to_owned(), group: None, reward: Some(REWARD), kept, calls };
    Recording { rollouts: vec![rollout], remarks: Vec::new() }
}

/// Whether these are the five rows, to the last bit.
pub(super) fn check(rows: &[&WholeRow]) -> Result<(), String> {
    if rows.len() != ROWS.len() {
        return Err(format!("{} rows came, {} were to come", rows.len(), ROWS.len()));
    }
    for (row, ExpectedRow(agent, walk, trained)) in rows.iter().zip(ROWS) {
        let wrong = |what: &str| Err(format!("row {}: {what} not as expected: {row:?}", row.row_id));
        let context = walk.len() - trained;
        let mut mask = Vec::new();
        let mut expected_logprobs = Vec::new();
        for (index, &call) in walk.iter().enumerate() {
            let is_trained = index >= context;
            mask.extend([0, 0, 0].into_iter().chain([u8::from(is_trained); 2]));
            expected_logprobs.extend([0.0; 3].into_iter().chain(if is_trained { logprobs(call) } else { [0.0; 2] }));
        }
        let leaf = walk.last().copied().unwrap_or(0);
        let spans = row.spans.iter().map(|span| (span.call_id.clone(), span.trained));
        if !spans.eq(walk.iter().enumerate().map(|(index, call)| (format!("C{call}"), index >= context))) {
            return wrong("its walk is");
        }
        if row.header.agent_id != agent || row.header.leaf_call_id != format!("C{leaf}") {
            return wrong("its leaf is");
        }
        if row.token_ids != full(leaf) || row.loss_mask != mask {
            return wrong("its ids or its mask are");
        }
        if row
            .logprobs
            .iter()
            .map(|logprob| logprob.to_bits())
            .ne(expected_logprobs.iter().map(|logprob| logprob.to_bits()))
        {
            return wrong("its log-probabilities are");
        }
        if row.header.reward.to_bits() != REWARD.to_bits() {
            return wrong("its reward is");
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The calls, written down once more by hand.
    #[test]
    fn the_builder_gives_the_example() {
        let recording = recording("r");
        let rollout = &recording.rollouts[0];
        let ids = |bytes: &[u8]| -> Vec<u32> { bytes.as_chunks().0.iter().map(|&id| u32::from_le_bytes(id)).collect() };
        assert_eq!(ids(&rollout.full_prompt(0)), [100, 101, 102]);
        assert_eq!(ids(&rollout.calls[0].generation), [103, 104]);
        let ten = [100, 101, 102, 103, 104, 110, 111, 112, 113, 114, 130, 131, 132, 133, 134, 145, 146, 147];
        assert_eq!(ids(&rollout.full_prompt(9)), ten);
        assert_eq!(ids(&rollout.calls[8].generation), [143, 144]);
        assert_eq!(rollout.full_prompt(8).len() / 4, 23);
        assert_eq!([logprobs(1), logprobs(2), logprobs(9)], [[-0.25, -0.28125], [-0.46875, -0.5], [-0.0625, -0.09375]]);
        assert_eq!(logprobs(12), [-0.71875, -0.75]);
        assert_eq!(deltas(), 4);
        assert_eq!(rollout.kept["F"], ["C8", "C9"]);
        assert!(check(&[]).is_err());
    }
}
