//! The forest on small rollouts written by hand. The random ones against a slow model stand in `tests/model`.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use super::call::*;
use super::digest::Digest;
use super::link::*;
use super::plan::*;
use super::*;

fn name(text: &str) -> Name {
    Name::parse(text).unwrap()
}

fn call_id(text: &str) -> CallId {
    CallId::parse(text).unwrap()
}

fn new_call(id: &str, agent: &str, sequence: u64, prompt: Prompt, generation: &[u32]) -> NewCall {
    let facts = CallFacts {
        call_id: call_id(id),
        agent_id: AgentId::parse(agent).unwrap(),
        parent_agent_id: None,
        sequence,
        link: Link::Infer,
        kind: name("turn"),
        policy: name("main"),
        versions: Vec::new(),
        model: None,
        generation: generation.to_vec(),
        logprobs: Some(vec![-0.5; generation.len()]),
        train: true,
        finish_reason: None,
        times_unix_ms: (None, None),
    };
    NewCall { facts, prompt }
}

fn full(id: &str, agent: &str, sequence: u64, prompt: &[u32], generation: &[u32]) -> NewCall {
    new_call(id, agent, sequence, Prompt::Full(prompt.to_vec()), generation)
}

fn accept(forest: &mut Forest, call: &NewCall) -> Accepted {
    match forest.judge_call(call.clone()).unwrap() {
        JudgedCall::Record(record) => forest.apply_call(record),
        JudgedCall::Duplicate(call) => panic!("{call:?} is a duplicate"),
    }
}

fn delta(base: &str, base_ids: &[u32], suffix: &[u32]) -> Prompt {
    let base_length = u32::try_from(base_ids.len()).unwrap();
    Prompt::Delta(Delta { base: call_id(base), base_length, digest: Digest::of(base_ids), suffix: suffix.to_vec() })
}

fn everything(forest: &Forest) -> CallSet {
    let mut kept = CallSet::new();
    forest.calls().filter(|(_, call)| call.is_placed() && !call.is_empty()).for_each(|(call, _)| kept.insert(call));
    kept
}

#[test]
fn a_base_may_come_last_and_a_chain_of_deltas_resolves_at_once() {
    let ids: Vec<u32> = (0..2000).collect();
    let mut forest = Forest::default();
    for step in (1..10_usize).rev() {
        let text = &ids[..step * 100 + 5];
        let base = format!("c{}", step - 1);
        let call = new_call(
            &format!("c{step}"),
            "a",
            step as u64,
            delta(&base, text, &ids[text.len()..text.len() + 95]),
            &ids[step * 100 + 100..step * 100 + 105],
        );
        assert!(matches!(accept(&mut forest, &call).verdict.link, LinkVerdict::Waiting(_)));
    }
    let accepted = accept(&mut forest, &full("c0", "a", 0, &ids[..100], &ids[100..105]));
    assert_eq!(accepted.settled.len(), 9);
    let kept = everything(&forest);
    let links = forest.links(&kept);
    let last = forest.find(&call_id("c9")).unwrap();
    assert_eq!(links.walk(last).len(), 10);
    assert_eq!(forest.full_ids(last).unwrap(), ids[..1005]);
}

#[test]
fn a_delta_whose_base_is_another_is_unresolved_until_it_comes_in_full() {
    let mut forest = Forest::default();
    let call = new_call("b", "a", 2, delta("a", &[1, 2, 9], &[4]), &[5]);
    accept(&mut forest, &call);
    let accepted = accept(&mut forest, &full("a", "a", 1, &[1, 2], &[3]));
    assert_eq!(accepted.settled, vec![(CallIndex(0), Placement::Unresolved)]);
    assert_eq!(forest.judge_call(call.clone()), Ok(JudgedCall::Duplicate(CallIndex(0))));
    accept(&mut forest, &full("b", "a", 2, &[1, 2, 3, 4, 6], &[5]));
    assert_eq!(forest.full_ids(CallIndex(0)).unwrap(), [1, 2, 3, 4, 6, 5]);
    assert_eq!(forest.totals().unresolved_calls, 0);
}

#[test]
fn a_second_form_of_a_waiting_prompt_must_say_the_same() {
    let mut forest = Forest::default();
    accept(&mut forest, &new_call("b", "a", 2, delta("a", &[1, 2, 3], &[4]), &[5]));
    let other = full("b", "a", 2, &[1, 2, 9, 4], &[5]);
    assert_eq!(forest.judge_call(other.clone()), Err(CallRefusal::Conflict("prompt")));
    let unknown_base = new_call("b", "a", 2, delta("z", &[1, 2], &[3, 4]), &[5]);
    assert!(matches!(forest.judge_call(unknown_base.clone()), Err(CallRefusal::ResendFullPrompt(_))));
    accept(&mut forest, &full("b", "a", 2, &[1, 2, 3, 4], &[5]));
    let again = new_call("b", "a", 2, delta("z", &[1, 2], &[3, 4]), &[5]);
    assert_eq!(forest.judge_call(again.clone()), Ok(JudgedCall::Duplicate(CallIndex(0))));
}

#[test]
fn a_delta_on_a_known_base_is_checked_at_once() {
    let mut forest = Forest::default();
    accept(&mut forest, &full("a", "a", 1, &[1, 2], &[3]));
    for (base, suffix) in [(vec![1, 2, 3, 4], vec![5]), (vec![1, 9], vec![5])] {
        let call = new_call("b", "a", 2, delta("a", &base, &suffix), &[5]);
        assert!(matches!(forest.judge_call(call.clone()), Err(CallRefusal::ResendFullPrompt(_))));
    }
    let own = new_call("b", "a", 2, delta("b", &[1], &[5]), &[5]);
    assert!(matches!(forest.judge_call(own.clone()), Err(CallRefusal::ResendFullPrompt(_))));
    assert_eq!(forest.call_count(), 1);
}

#[test]
fn drift_shows_ids_from_both_sides() {
    let mut forest = Forest::default();
    accept(&mut forest, &full("a", "a", 1, &[1, 2], &[3, 4]));
    let differs = accept(&mut forest, &full("b", "a", 2, &[1, 2, 3, 7, 8], &[9])).verdict.drift.unwrap();
    assert_eq!((differs.kind, differs.matched_length), (DriftKind::Differs, 3));
    assert_eq!((differs.expected, differs.found), (vec![4], vec![7, 8]));
    let rewind = accept(&mut forest, &full("c", "a", 3, &[1, 2], &[5])).verdict.drift.unwrap();
    assert_eq!((rewind.kind, rewind.matched_length), (DriftKind::Rewind, 2));
}

#[test]
fn thousands_of_samples_of_one_prompt_stay_linear() {
    let prompt: Vec<u32> = (0..1000).collect();
    let mut forest = Forest::default();
    for sample in 0..5000_u32 {
        accept(&mut forest, &full(&format!("s{sample}"), "a", u64::from(sample), &prompt, &[sample, 7]));
    }
    let tokens = forest.stored_tokens();
    assert!(tokens < 1000 + 5000 * 64, "{tokens} ids are stored");
    let kept = everything(&forest);
    assert!(forest.links(&kept).parents.iter().all(Option::is_none));
}

#[test]
fn a_token_without_a_log_probability_is_context() {
    let mut forest = Forest::default();
    let mut call = full("a", "a", 1, &[1], &[2, 3]);
    call.facts.logprobs = Some(vec![f32::NAN, -1.0]);
    call.facts.versions =
        vec![VersionSpan { start: 0, end: 1, version: 3 }, VersionSpan { start: 1, end: 2, version: 4 }];
    accept(&mut forest, &call);
    let kept = everything(&forest);
    let links = forest.links(&kept);
    let input = PlanInput {
        kept: &kept,
        may_train: &kept,
        links: &links,
        owner: SharedCallOwner::RootAgent,
        max_row_tokens: None,
    };
    let plan = forest.plan(&name("main"), input);
    let row = forest.row(&plan, &plan.rows[0], &links);
    assert_eq!((row.loss_mask, row.logprobs), (vec![0, 0, 1], vec![0.0, 0.0, -1.0]));
    assert_eq!(plan.rows[0].trained_tokens, 1);
    assert_eq!(row.policy_versions, Some((4, 4)), "what does not train has no say in the versions");
}

/// The links among the calls that are kept.
fn linked(forest: &mut Forest, keeps: impl Fn(&str) -> bool) -> Links {
    let mut kept = CallSet::new();
    forest.calls().filter(|(_, call)| keeps(call.id().as_str())).for_each(|(call, _)| kept.insert(call));
    forest.links(&kept)
}

// Minutes, if each looked at all others.
#[test]
fn many_calls_climb_over_many_that_are_not_kept() {
    const MANY: usize = 8000;
    for named in [true, false] {
        let mut forest = Forest::default();
        let link = |parent: String| if named { Link::Parent(call_id(&parent)) } else { Link::Infer };
        let ids: Vec<u32> = vec![7; MANY + 1];
        for number in 0..MANY {
            let base = number.checked_sub(1).map(|before| format!("line-{before}"));
            let prompt = base.as_ref().map_or(Prompt::Full(vec![7]), |base| delta(base, &ids[..=number], &[]));
            let mut call = new_call(&format!("line-{number}"), "a", number as u64, prompt, &[7]);
            call.facts.link = base.map_or(Link::Infer, link);
            accept(&mut forest, &call);
        }
        let bottom = format!("line-{}", MANY - 1);
        for number in 0..MANY {
            let prompt = delta(&bottom, &ids, &[]);
            let mut call = new_call(&format!("leaf-{number}"), "b", (MANY + number) as u64, prompt, &[8]);
            call.facts.link = link(bottom.clone());
            accept(&mut forest, &call);
        }
        let links = linked(&mut forest, |id| id == "line-0" || id.starts_with("leaf"));
        let top = forest.find(&call_id("line-0"));
        assert!((MANY..2 * MANY).all(|leaf| links.parents[leaf] == top), "named: {named}");
    }
}

#[test]
fn many_calls_continue_one_of_many_twins_of_another_agent() {
    const MANY: usize = 8000;
    let mut forest = Forest::default();
    for number in 0..MANY {
        accept(&mut forest, &full(&format!("twin-{number}"), "a", 2 * number as u64, &[1], &[2]));
    }
    for number in 0..MANY {
        accept(&mut forest, &full(&format!("next-{number}"), "b", 2 * number as u64 + 1, &[1, 2], &[3]));
    }
    let links = linked(&mut forest, |id| id != "twin-5");
    let parent = |number: usize| forest.call(links.parents[MANY + number].unwrap()).id().to_string();
    let expected = |number: usize| format!("twin-{}", if number == 5 { 4 } else { number });
    assert!((0..MANY).all(|number| parent(number) == expected(number)), "the latest before it that is kept");
}

/// What is counted as it grows, counted anew.
fn recounted(forest: &Forest) -> usize {
    let of_tokens = |call: &Call| match &call.tokens {
        CallTokens::Placed { tail, .. } => size_of_val(&**tail),
        CallTokens::Waiting(pending) | CallTokens::Unresolved(pending) => size::of_pending(pending),
    };
    let of_call = |call: &Call| {
        let logprobs = call.logprobs.as_ref().map_or(0, |values| size_of_val(&**values));
        2 * call.id.as_str().len() + logprobs + of_tokens(call)
    };
    forest.calls().map(|(_, call)| of_call(call)).sum()
}

#[test]
fn what_it_takes_is_counted_as_it_grows() {
    let ids: Vec<u32> = (0..200).collect();
    let longer: Vec<u32> = (0..204).collect();
    let mut forest = Forest::default();
    let empty = forest.resident_bytes();
    let calls = [
        new_call("c", "a", 3, delta("b", &longer, &[9; 70]), &[1, 2]),
        new_call("other", "a", 4, delta("b", &[7; 9], &[9; 70]), &[1, 2]),
        new_call("b", "a", 2, delta("a", &ids, &[200, 201, 202]), &[203]),
        full("a", "a", 1, &ids[..199], &[199]),
        full("other", "a", 4, &[5; 300], &[1, 2]),
    ];
    for call in &calls {
        let before = forest.resident_bytes();
        let JudgedCall::Record(record) = forest.judge_call(call.clone()).unwrap() else { panic!("{call:?} is new") };
        let at_most = record.resident_bytes();
        forest.apply_call(record);
        assert_eq!(forest.array_bytes, recounted(&forest));
        // What waited was counted when it came, but for the blocks that it makes now.
        let blocks = if call.facts.call_id.as_str() == "a" { 10 * tokens::TokenStore::BLOCK_BYTES } else { 0 };
        assert!(forest.resident_bytes() <= before + at_most + blocks, "{call:?}");
    }
    assert!(forest.calls().all(|(_, call)| call.is_placed()));
    assert!(forest.resident_bytes() > empty + 5 * size::CALL_BYTES);
}
