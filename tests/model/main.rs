//! The forest, and the running service, against a slow model of the rules: any order, any repeats and any form of the same
//! calls gives the model's links and rows. `PROPTEST_CASES` sets how many forests are tried. Failures of the forest are kept
//! in `tests/model/regressions.txt`; those of the service are repeated by the seed that they print.

#![expect(clippy::unwrap_used, clippy::expect_used, reason = "a test fails by panicking")]

#[path = "../support/bench.rs"]
mod bench;
#[path = "../support/case.rs"]
mod case;
#[path = "../support/reporter.rs"]
mod reporter;
#[expect(dead_code, reason = "other tests use more of it")]
#[path = "../support/service.rs"]
mod service;
#[path = "../support/taker.rs"]
mod taker;
#[path = "../support/wire.rs"]
mod wire;

mod by_hand;
mod corners;
mod feed;
mod generator;
mod invariants;
mod over_grpc;
mod reference;
mod verdict;

use proptest::prelude::*;
use proptest::test_runner::FileFailurePersistence;

use generator::Story;

/// How many forests are tried.
fn forests() -> u32 {
    std::env::var("PROPTEST_CASES").ok().and_then(|cases| cases.parse().ok()).unwrap_or(10_000)
}

fn config() -> ProptestConfig {
    let cases = forests();
    let kept = FileFailurePersistence::Direct("tests/model/regressions.txt");
    ProptestConfig { cases, failure_persistence: Some(Box::new(kept)), ..ProptestConfig::default() }
}

proptest! {
    #![proptest_config(config())]

    #[test]
    fn a_forest_told_in_any_way_gives_the_rows_of_the_rules(story in generator::stories()) {
        check(&story).map_err(TestCaseError::fail)?;
    }
}

fn check(story: &Story) -> Result<(), String> {
    let case = &story.case;
    let expected = reference::answer(case).map_err(|refusal| format!("the model refuses: {refusal:?}"))?;
    for telling in &story.tellings {
        let mut told = feed::tell(case, telling)?;
        let heard = feed::hear(&mut told.forest, case, &expected);
        same("told", &expected, &heard.answer)?;
        invariants::check(case, &heard.answer, &invariants::ledgers(&heard.plans))?;
        let replayed = feed::hear(&mut feed::replay(&told.records), case, &expected);
        same("replayed", &heard.answer, &replayed.answer)?;
    }
    Ok(())
}

/// Says the first thing that differs, not all of both.
fn same(what: &str, expected: &case::Answer, found: &case::Answer) -> Result<(), String> {
    if expected.parents != found.parents {
        return Err(format!("{what}: parents are {:?}, not {:?}", found.parents, expected.parents));
    }
    if expected.broken_links != found.broken_links {
        return Err(format!("{what}: broken links are {:?}, not {:?}", found.broken_links, expected.broken_links));
    }
    match expected.rows.iter().zip(&found.rows).find(|(one, other)| one != other) {
        Some((expected, found)) => Err(format!("{what}: a row is\n  {found:?}, not\n  {expected:?}")),
        None if expected.rows.len() == found.rows.len() => Ok(()),
        None => Err(format!("{what}: {} rows, not {}", found.rows.len(), expected.rows.len())),
    }
}
