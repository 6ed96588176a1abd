//! Cases with their right answers, our own and, where this checkout has them, the shared ones: the slow model, the forest and
//! the running service must give them.

#![expect(clippy::unwrap_used, clippy::expect_used, reason = "a test fails by panicking")]

#[path = "../support/bench.rs"]
mod bench;
#[path = "../support/case.rs"]
mod case;
#[path = "../support/case_file.rs"]
mod case_file;
#[path = "../model/feed.rs"]
mod feed;
#[path = "../model/reference.rs"]
mod reference;
#[path = "../support/reporter.rs"]
mod reporter;
#[expect(dead_code, reason = "other tests use more of it")]
#[path = "../support/service.rs"]
mod service;
#[path = "../support/taker.rs"]
mod taker;
#[path = "../model/verdict.rs"]
mod verdict;
#[path = "../support/wire.rs"]
mod wire;

mod over_grpc;
mod real;

use case::{Answer, Call, Case};
use case_file::CaseFile;
use feed::{Form, Mention};

/// Our own cases.
fn own_cases() -> Vec<CaseFile> {
    let cases = case_file::read_all(&[env!("CARGO_MANIFEST_DIR"), "tests/cases/own"].iter().collect()).unwrap();
    println!("{} cases of our own", cases.len());
    cases
}

/// The cases, or none with a printed line.
fn shared_cases() -> Vec<CaseFile> {
    match case_file::folder() {
        Some(folder) => {
            let cases = case_file::read_all(&folder).unwrap();
            println!("{} shared cases in {}", cases.len(), folder.display());
            assert!(!cases.is_empty(), "{} has no cases", folder.display());
            cases
        }
        None => {
            println!("skipped: no shared cases here (HEDGEROW_CASES names their folder)");
            Vec::new()
        }
    }
}

#[test]
fn the_slow_model_gives_every_answer() {
    for file in own_cases().into_iter().chain(shared_cases()) {
        assert_eq!(reference::answer(&file.case), file.expected, "{}\n{:?}", file.name, file.case);
    }
}

#[test]
fn the_forest_gives_every_answer() {
    for file in own_cases().into_iter().chain(shared_cases()) {
        let Ok(expected) = &file.expected else { continue };
        for mentions in tellings(&file.case) {
            let mut told = feed::tell(&file.case, &mentions).unwrap();
            let replayed = feed::hear(&mut feed::replay(&told.records), &file.case, expected);
            let heard = feed::hear(&mut told.forest, &file.case, expected);
            assert_eq!(heard.answer, *expected, "{}, told {mentions:?}", file.name);
            assert_eq!(replayed.answer, *expected, "{}, replayed", file.name);
            assert_eq!(replayed.plans, heard.plans, "{}, replayed", file.name);
        }
    }
}

/// Forwards in full, and backwards as deltas on the call before, each twice.
fn tellings(case: &Case) -> [Vec<Mention>; 2] {
    let full = |call| Mention { call, form: Form::Full };
    let forwards = (0..case.calls.len()).flat_map(|call| [full(call), full(call)]).collect();
    let backwards = (0..case.calls.len()).rev().map(|call| match call.checked_sub(1) {
        Some(before) => Mention { call, form: on(&case.calls[before], &case.calls[call]) },
        None => full(call),
    });
    [forwards, backwards.flat_map(|mention| [mention.clone(), mention]).collect()]
}

fn on(base: &Call, call: &Call) -> Form {
    let shared = base.full().iter().zip(&call.prompt).take_while(|(one, other)| one == other).count();
    Form::Delta { base: base.id.clone(), length: shared }
}

#[test]
fn what_a_file_leaves_out_has_its_default() {
    let text = r#"{"calls": [{"call_id": "a", "prompt": [], "generation": [4], "link": {"parent": "z"}}],
        "expect": {"parents": {"a": null}, "broken_links": {"a": {"parent": "z", "first_difference": null}}, "rows": []}}"#;
    let file = case_file::parse("small", text).unwrap();
    let call = &file.case.calls[0];
    assert_eq!((call.agent.as_str(), call.policy.as_str(), call.sequence, call.train), ("main", "main", 0, true));
    assert_eq!((&call.logprobs[..], file.case.kept.is_none()), (&[0.0][..], true));
    let expected: Answer = file.expected.unwrap();
    assert_eq!((expected.parents["a"].clone(), expected.broken_links["a"].first_difference), (None, None));
}

#[test]
fn a_faulty_file_is_refused_with_what_is_wrong() {
    for (text, fault) in [
        (r#"{"calls": 7}"#, "7 is no list"),
        (
            r#"{"calls": [], "settings": {"broken_link": "mend"}, "expect": {"refused": "missing_call"}}"#,
            "broken_link: mend",
        ),
        (r#"{"calls": [], "expect": {"refused": "tired"}}"#, "refused: tired"),
        (r#"{"calls": [{"call_id": "a", "prompt": [-1], "generation": []}]}"#, "-1 is no such number"),
    ] {
        assert_eq!(case_file::parse("faulty", text).err().as_deref(), Some(fault));
    }
}
