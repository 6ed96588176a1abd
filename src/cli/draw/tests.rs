//! Forests as they are drawn.

use super::*;
use crate::proto::v1::{
    BrokenLinkReason, CallFate, CallSummary, Drift, DriftCount, DriftKind, Link, LinkKind, PolicyLedger, RowLedger,
    RowSummary, Verdict, link,
};

const PLAIN: Drawing = Drawing { width: 80, colour: false, all: false };

fn call(id: &str, agent: &str, parent: &str, prompt: u64) -> CallSummary {
    let kind = if parent.is_empty() { LinkKind::Root } else { LinkKind::Child };
    CallSummary {
        call_id: id.to_owned(),
        agent_id: agent.to_owned(),
        prompt_tokens: Some(prompt),
        generated_tokens: 2,
        kept: true,
        verdict: Some(Verdict { kind: kind.into(), parent_call_id: parent.to_owned(), ..Verdict::default() }),
        fate: CallFate::Trained.into(),
        ..CallSummary::default()
    }
}

fn twelve_calls() -> GetRolloutResponse {
    let row = |leaf: &str, trains: &[&str]| RowSummary {
        leaf_call_id: leaf.to_owned(),
        trained_call_ids: trains.iter().map(ToString::to_string).collect(),
        ..RowSummary::default()
    };
    GetRolloutResponse {
        calls: vec![
            call("C1", "L", "", 3),
            call("C2", "B", "", 3),
            call("C3", "L", "C1", 8),
            call("C4", "B", "C2", 8),
            call("C7", "L", "C3", 13),
            call("C8", "F", "C7", 18),
            call("C9", "F", "C8", 23),
            call("C10", "L", "C7", 18),
            call("C11", "L", "", 3),
        ],
        rows: vec![row("C4", &["C2", "C4"]), row("C9", &["C8", "C9"]), row("C10", &["C1", "C3", "C7", "C10"])],
        ..GetRolloutResponse::default()
    }
}

#[test]
fn the_own_agents_line_goes_on_and_the_others_stand_beside_it() {
    let drawn = draw_forest(&twelve_calls(), PLAIN);
    let expected = "\
┬ C1    L   3→2  trained, row 3
├ C3    L   8→2  trained, row 3
├ C7    L  13→2  trained, row 3
├─┬ C8  F  18→2  trained, row 2
│ └ C9  F  23→2  trained, row 2
└ C10   L  18→2  trained, row 3

┬ C2    B   3→2  trained, row 1
└ C4    B   8→2  trained, row 1

╶ C11   L   3→2  trained
";
    assert_eq!(drawn, expected);
}

#[test]
fn colours_change_nothing_but_colours() {
    let coloured = draw_forest(&twelve_calls(), Drawing { colour: true, ..PLAIN });
    assert!(coloured.contains("\x1b[36m"));
    let mut plain = String::new();
    let mut rest = coloured.as_str();
    while let Some((before, after)) = rest.split_once('\x1b') {
        plain.push_str(before);
        rest = after.split_once('m').map_or("", |(_, rest)| rest);
    }
    plain.push_str(rest);
    assert_eq!(plain, draw_forest(&twelve_calls(), PLAIN));
}

#[test]
fn what_is_wrong_stands_below_its_call() {
    let mut rollout = twelve_calls();
    rollout.calls.truncate(3);
    let drift = Drift {
        compared_call_id: "C1".to_owned(),
        matched_length_tokens: 4,
        kind: DriftKind::Differs.into(),
        expected_ids: vec![104, 7],
        found_ids: vec![9],
    };
    let broken = &mut rollout.calls[2];
    broken.link = Some(Link { link: Some(link::Link::ParentCallId("C1".to_owned())) });
    broken.verdict = Some(Verdict {
        kind: LinkKind::Broken.into(),
        broken: BrokenLinkReason::DoesNotFit.into(),
        drift: Some(drift.clone()),
        ..Verdict::default()
    });
    let drawn = draw_forest(&rollout, PLAIN);
    assert!(drawn.contains("\n    ! broken link: C1 does not fit; at 4 expected 104 7, found 9\n"), "{drawn}");
    rollout.calls[2].verdict = Some(Verdict {
        kind: LinkKind::Child.into(),
        parent_call_id: "C1".to_owned(),
        drift: Some(drift),
        ..Verdict::default()
    });
    assert!(draw_forest(&rollout, PLAIN).contains("\n    ~ drift from C1: at 4 expected"), "{drawn}");
}

#[test]
fn calls_in_no_tree_and_in_circles_are_shown() {
    let mut rollout = twelve_calls();
    rollout.calls.truncate(4);
    rollout.calls[0].kept = false;
    rollout.calls[0].fate = CallFate::NotKept.into();
    rollout.calls[2].verdict =
        Some(Verdict { kind: LinkKind::Waiting.into(), waiting_for_call_id: "X".to_owned(), ..Verdict::default() });
    // C2 and C4 name each other.
    rollout.calls[1].verdict =
        Some(Verdict { kind: LinkKind::Child.into(), parent_call_id: "C4".to_owned(), ..Verdict::default() });
    let drawn = draw_forest(&rollout, PLAIN);
    assert_eq!(drawn.lines().count(), 5, "{drawn}");
    assert!(drawn.contains("waits for X") && drawn.contains("not kept"));
}

#[test]
fn long_chains_stay_flat_are_folded_and_need_no_recursion() {
    let count = 10_000;
    let calls: Vec<CallSummary> = (0..count)
        .map(|index| {
            let parent = if index == 0 { String::new() } else { format!("call-{}", index - 1) };
            call(&format!("call-{index}"), "main", &parent, index)
        })
        .collect();
    let rollout = GetRolloutResponse { calls, ..GetRolloutResponse::default() };
    let folded = draw_forest(&rollout, PLAIN);
    assert_eq!(folded.lines().count(), 8, "{folded}");
    assert!(folded.contains("┆ … 9993 calls …"), "{folded}");
    let all = draw_forest(&rollout, Drawing { all: true, ..PLAIN });
    assert_eq!(all.lines().count(), 10_000);
    assert!(all.lines().all(|line| line.chars().count() <= 80));
}

#[test]
fn deep_forks_and_long_ids_fit_the_width() {
    // Each call has a child of another agent and a child of its own; the other's line forks again.
    let mut calls = vec![call("root", "agent-0", "", 1)];
    for index in 1..3_000_u64 {
        let parent = calls.last().map(|last| last.call_id.clone()).unwrap_or_default();
        let own = calls.last().map(|last| last.agent_id.clone()).unwrap_or_default();
        calls.push(call(&format!("going-on-{index}-{}", "x".repeat(60)), &own, &parent, index));
        calls.push(call(&format!("fork-{index}"), &format!("agent-{index}"), &parent, index));
    }
    let rollout = GetRolloutResponse { calls, ..GetRolloutResponse::default() };
    for width in [40, 80] {
        let drawn = draw(&rollout, Drawing { width, colour: false, all: true });
        assert_eq!(drawn.lines().filter(|line| line.contains('→')).count(), 5_999);
        assert!(drawn.lines().all(|line| line.chars().count() <= width), "{width}");
    }
}

#[test]
fn ids_are_cut_in_the_middle() {
    assert_eq!(cut_middle("abcdefghij", 5), "ab…ij");
    assert_eq!(cut_middle("abc", 3), "abc");
    assert_eq!(cut("äöüß", 3), "äö…");
}

#[test]
fn runs_are_a_table_with_their_ledgers_below() {
    let ledger = PolicyLedger { policy: "main".into(), accepted: 3, trained: 2, pending: 1, ..PolicyLedger::default() };
    let rows =
        RowLedger { consumer_group: "gpus".into(), made: 2, acknowledged: 1, waiting: 1, ..RowLedger::default() };
    let drift =
        DriftCount { agent_id: "lead".into(), kind: DriftKind::Differs.into(), calls: 1, repeated_row_tokens: 40 };
    let run = RunSummary {
        run_id: "one".into(),
        open_rollouts: 12,
        ledgers: vec![ledger],
        rows: vec![rows],
        drifts: vec![drift],
        ..RunSummary::default()
    };
    let expected = "\
run  open  groups  finalised  retired  gone  refused
one    12       0          0        0     0        0

one
ledger main  3 accepted = 1 pending + 2 trained
rows for gpus  2 made = 1 acknowledged + 1 waiting
drift lead  1 call parted, 40 row tokens repeated
";
    assert_eq!(draw_runs(&[run], PLAIN), expected);
}
