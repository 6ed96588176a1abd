//! Units in messages of any bound: each within it, and together the rows exactly.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use super::*;
use crate::ids::Name;
use crate::proto::v1::report_request::Event;
use crate::proto::v1::subscribe_response::Response;
use crate::rollout::Rollout;
use crate::rpc::convert::examples::{about, bytes, call, finalised, finish, settings};
use crate::rpc::convert::fields::timestamp;

/// A unit of all rows of a rollout of two policies: one line of eight calls, and twelve other leaves.
fn unit() -> (UnitHead, Piece, Arc<FinalisedRollout>) {
    let mut events =
        vec![Event::Open(v1::Open { group_size: Some(4), tags: [("task".to_owned(), "t".repeat(40))].into() })];
    let mut context: Vec<u32> = vec![1; 100];
    for turn in 0..8_u32 {
        let mut turn_call = call(&format!("a{turn}"), "lead", u64::from(turn), &context, &[turn; 30]);
        let versions = |start| v1::PolicyVersionSpan { start, end: start + 1, version: 10 + u64::from(turn) };
        turn_call.policy_versions = (0..turn).map(versions).collect();
        turn_call.model = "model".to_owned();
        events.push(Event::Call(turn_call));
        context.extend([turn; 30]);
        context.extend([100 + turn; 7]);
    }
    for leaf in 0..12_u32 {
        let mut leaf_call = call(&format!("b{leaf:02}"), "sub", u64::from(leaf), &[1000 + leaf; 50], &[leaf; 5]);
        leaf_call.policy = "other".to_owned();
        events.push(Event::Call(leaf_call));
    }
    events.push(finish(v1::Seal::default()));
    let rollout = finalised(settings(), events);
    let plan = |policy: &str| Arc::new(rollout.plan(&Name::parse(policy).unwrap(), None));
    let planned = [plan("main"), plan("other")].map(|plan| (Arc::clone(&plan), 0..plan.rows.len()));
    let tokens = planned.iter().flat_map(|(plan, _)| &plan.rows).map(|row| u64::from(row.tokens)).sum();
    let about = about();
    let identity = RowIdentity { run: about.run, rollout: about.rollout, attempt: about.attempt };
    let (finalised_unix_ms, planned) = (1500, planned.into());
    let rows = UnitRows { rollout: 0, identity, finalised_unix_ms, planned, group: None, microbatch: None };
    let head = UnitHead {
        unit_id: "run/rollout/2".to_owned(),
        unit: v1::Unit::Rollout,
        delivery_count: 3,
        unit_tokens: tokens,
        seek_count: 1,
    };
    (head, Piece::Rows(rows), rollout)
}

/// All messages.
fn all(mut parts: UnitParts, rollout: &FinalisedRollout) -> Vec<v1::UnitPart> {
    std::iter::from_fn(|| parts.next_part(rollout)).collect()
}

/// Joins a unit's messages, and checks what must hold of their sequence.
fn joined(parts: &[v1::UnitPart]) -> Vec<v1::RowPart> {
    let mut rows: Vec<v1::RowPart> = Vec::new();
    let mut open = false;
    for (index, part) in parts.iter().enumerate() {
        assert_eq!((part.part_index as usize, part.last), (index, index + 1 == parts.len()));
        assert_eq!((part.unit_id.as_str(), part.unit(), part.unit_rows), ("run/rollout/2", v1::Unit::Rollout, 13));
        assert_eq!((part.delivery_count, part.seek_count), (3, 1));
        assert!(!part.rows.is_empty(), "every message brings something");
        for row in &part.rows {
            assert_eq!(open, row.header.is_none(), "the header is on the first part only");
            if open {
                let whole = rows.last_mut().unwrap();
                assert_eq!(whole.row_id, row.row_id);
                assert_eq!(row.token_offset, (whole.token_ids.len() / 4) as u64);
                whole.spans.extend(row.spans.iter().cloned());
                let join = |one: &bytes::Bytes, other: &bytes::Bytes| [&one[..], &other[..]].concat().into();
                whole.token_ids = join(&whole.token_ids, &row.token_ids);
                whole.loss_mask = join(&whole.loss_mask, &row.loss_mask);
                whole.logprobs = join(&whole.logprobs, &row.logprobs);
                whole.last = row.last;
            } else {
                assert_eq!(row.token_offset, 0);
                rows.push(row.clone());
            }
            open = !row.last;
        }
    }
    assert!(!open, "the last row is whole");
    rows
}

#[test]
fn messages_of_any_bound_hold_the_same_rows() {
    let (head, rows, rollout) = unit();
    let whole = all(UnitParts::new(&head, vec![rows.clone()]), &rollout);
    assert_eq!(whole.len(), 1);
    let wanted = joined(&whole);
    let header = wanted.iter().filter_map(|row| row.header.as_ref()).map(Message::encoded_len).max().unwrap();
    for bound in (header + 200..header + 1200).step_by(7).chain([4096, 1 << 16]) {
        let parts = all(UnitParts::with_bound(&head, vec![rows.clone()], bound), &rollout);
        assert_eq!(joined(&parts), wanted);
        for part in parts {
            let message = v1::SubscribeResponse { response: Some(Response::UnitPart(part)) };
            assert!(message.encoded_len() <= bound, "{} bytes, more than {bound}", message.encoded_len());
        }
    }
}

#[test]
fn a_bound_that_nothing_fits_into_still_ends() {
    let (head, rows, rollout) = unit();
    let wanted = joined(&all(UnitParts::new(&head, vec![rows.clone()]), &rollout));
    for bound in [0, 1, 40, 100, 200] {
        assert_eq!(joined(&all(UnitParts::with_bound(&head, vec![rows.clone()], bound), &rollout)), wanted);
    }
}

#[test]
fn tokens_are_needed_only_where_a_row_begins() {
    let (head, rows, rollout) = unit();
    let mut evicted = Rollout::Finalised(unit().2);
    assert!(evicted.evict());
    let evicted = Arc::clone(evicted.finalised().unwrap());
    let wanted = joined(&all(UnitParts::new(&head, vec![rows.clone()]), &rollout));
    for bound in (400..2000).step_by(13) {
        let mut parts = UnitParts::with_bound(&head, vec![rows.clone()], bound);
        let next = || {
            let lent = if parts.are_amid_a_row() { &evicted } else { &rollout };
            parts.next_part(lent)
        };
        assert_eq!(joined(&std::iter::from_fn(next).collect::<Vec<_>>()), wanted, "{bound}");
    }
}

#[test]
fn messages_are_filled() {
    let (head, rows, rollout) = unit();
    let bound = 2000;
    let parts = all(UnitParts::with_bound(&head, vec![rows], bound), &rollout);
    for part in &parts[..parts.len() - 1] {
        assert!(part.encoded_len() > bound / 2, "a message of {} bytes", part.encoded_len());
    }
}

#[test]
fn a_row_says_what_it_is() {
    let (head, rows, rollout) = unit();
    let part = UnitParts::new(&head, vec![rows]).next_part(&rollout).unwrap();
    let row = &part.rows[0];
    let header = row.header.as_ref().unwrap();
    assert_eq!((row.row_id.as_str(), row.last), ("run/rollout/2/main/a7", true));
    assert_eq!((header.run_id.as_str(), header.group_id.as_str(), header.attempt), ("run", "group", 2));
    assert_eq!((header.policy.as_str(), header.agent_id.as_str()), ("main", "lead"));
    assert_eq!((header.leaf_call_id.as_str(), header.root_call_id.as_str()), ("a7", "a0"));
    assert_eq!((header.row_index, header.row_count, header.rollout_rows), (0, 1, 1));
    assert_eq!((header.reward, header.weight, header.advantage), (1.5, 1.0, None));
    assert_eq!((header.reward_components.get("style"), header.tags.len()), (Some(&0.25), 1));
    assert_eq!((header.policy_version_min, header.policy_version_max), (Some(11), Some(17)));
    let tokens = 100 + 8 * 30 + 7 * 7;
    assert_eq!((header.tokens, header.trained_tokens, header.rollout_trained_tokens), (tokens, 240, 240));
    assert_eq!((header.span_count, header.finalise_time, header.incomplete), (8, Some(timestamp(1500)), false));
    assert_eq!(row.loss_mask.iter().map(|mask| u64::from(*mask)).sum::<u64>(), 240);
    assert_eq!(row.token_ids[..400], bytes(&[1; 100])[..]);
    assert_eq!(row.logprobs[400..404], (-0.5_f32).to_le_bytes());
    let span = &row.spans[1];
    assert_eq!((span.start, span.end, span.call_id.as_str()), (137, 167, "a1"));
    assert_eq!((span.policy_versions.len(), span.trained, span.has_logprobs), (1, true, true));
    assert_eq!((span.kind.as_str(), span.model.as_str(), span.finish_reason.as_str()), ("turn", "model", ""));
    let other = part.rows[1].header.as_ref().unwrap();
    assert_eq!((other.policy.as_str(), other.row_index, other.row_count), ("other", 0, 12));
    assert_eq!((other.trained_tokens, other.rollout_trained_tokens, other.policy_version_min), (5, 60, None));
}

#[test]
fn a_unit_of_one_row_is_that_row_and_one_without_rows_is_an_empty_message() {
    let (head, Piece::Rows(mut rows), rollout) = unit() else { panic!("it has rows") };
    let other = Arc::clone(&rows.planned[1].0);
    rows.planned = vec![(Arc::clone(&other), 5..6)];
    let parts = all(UnitParts::new(&head, vec![Piece::Rows(rows.clone())]), &rollout);
    assert_eq!((parts.len(), parts[0].rows.len(), parts[0].unit_rows), (1, 1, 1));
    assert_eq!(parts[0].rows[0].header.as_ref().unwrap().row_index, 5);
    rows.planned = vec![(other, 3..3)];
    let parts = all(UnitParts::new(&head, vec![Piece::Rows(rows)]), &rollout);
    assert_eq!((parts.len(), parts[0].rows.len(), parts[0].last), (1, 0, true));
}
