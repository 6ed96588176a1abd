//! The invariants of RULES 3.6, read from the case and the rows alone, without the model's links.

use std::collections::BTreeMap;

use hedgerow::forest::plan::{CallLedger, PolicyPlan};

use crate::case::{Answer, Call, Case, Row};

/// What is wrong with the rows and with the ledgers of these policies, if anything.
pub(crate) fn check(case: &Case, answer: &Answer, ledgers: &[(&str, CallLedger)]) -> Result<(), String> {
    for (policy, ledger) in ledgers {
        check_rows(case, answer, policy)?;
        let counted = count(case, answer, policy);
        if *ledger != counted || counted.sum() != case.calls.len() as u64 {
            return Err(format!("invariant 4: for {policy} {ledger:?}, counted {counted:?}"));
        }
    }
    Ok(())
}

/// The ledgers of these plans, as they are checked.
pub(crate) fn ledgers(plans: &[PolicyPlan]) -> Vec<(&str, CallLedger)> {
    plans.iter().map(|plan| (plan.policy.as_str(), plan.ledger)).collect()
}

/// What is wrong with the rows of a policy, if anything.
pub(crate) fn check_rows(case: &Case, answer: &Answer, policy: &str) -> Result<(), String> {
    let calls: BTreeMap<&str, &Call> = case.calls.iter().map(|call| (call.id.as_str(), call)).collect();
    for call in &case.calls {
        let times = rows_of(answer, policy).flat_map(|row| &row.trains).filter(|id| **id == call.id).count();
        let wanted = usize::from(fate(case, answer, call, policy) == Fate::Trains);
        if times != wanted {
            return Err(format!("invariant 1: {} is trained {times} times for {policy}", call.id));
        }
    }
    rows_of(answer, policy).try_for_each(|row| masks_what_it_trains(row, &calls))
}

fn rows_of<'a>(answer: &'a Answer, policy: &'a str) -> impl Iterator<Item = &'a Row> {
    answer.rows.iter().filter(move |row| row.policy == policy)
}

/// Invariants 1 (no other token) and 2, token by token.
fn masks_what_it_trains(row: &Row, calls: &BTreeMap<&str, &Call>) -> Result<(), String> {
    let mut wanted = vec![(0_u8, 0.0_f32); row.token_ids.len()];
    for id in &row.trains {
        let call = calls[id.as_str()];
        let full = call.full();
        for (place, logprob) in call.logprobs.iter().enumerate() {
            let position = call.prompt.len() + place;
            if row.token_ids[..=position] != full[..=position] {
                return Err(format!("invariant 2: token {place} of {id} stands after other tokens in {}", row.leaf));
            }
            if wanted[position].0 == 1 {
                return Err(format!("invariant 1: position {position} of {} is trained for two calls", row.leaf));
            }
            wanted[position] = (1, *logprob);
        }
    }
    let found: Vec<(u8, f32)> = row.loss_mask.iter().copied().zip(row.logprobs.iter().copied()).collect();
    if found == wanted { Ok(()) } else { Err(format!("invariant 1: mask of {} is {found:?}", row.leaf)) }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Fate {
    Empty,
    NotKept,
    TooLong,
    Trains,
    Rides,
}

fn fate(case: &Case, answer: &Answer, call: &Call, policy: &str) -> Fate {
    let candidate = call.train && call.policy == policy;
    let too_long = case.settings.max_row_tokens.is_some_and(|limit| call.full().len() > limit);
    match (call.generation.is_empty(), answer.parents.contains_key(&call.id)) {
        (true, _) => Fate::Empty,
        (false, false) => Fate::NotKept,
        (false, true) if candidate && too_long => Fate::TooLong,
        (false, true) if candidate => Fate::Trains,
        (false, true) => Fate::Rides,
    }
}

/// What became of each call, for one policy.
pub(crate) fn count(case: &Case, answer: &Answer, policy: &str) -> CallLedger {
    let mut ledger = CallLedger::default();
    for call in &case.calls {
        let on_walk = rows_of(answer, policy).any(|row| row.walk.contains(&call.id));
        *match fate(case, answer, call, policy) {
            Fate::Empty => &mut ledger.empty,
            Fate::NotKept => &mut ledger.not_kept,
            Fate::TooLong => &mut ledger.too_long,
            Fate::Trains => &mut ledger.trained,
            Fate::Rides if on_walk => &mut ledger.context,
            Fate::Rides => &mut ledger.in_no_row,
        } += 1;
    }
    ledger
}
