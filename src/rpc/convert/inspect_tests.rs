//! What is shown of open and finalised rollouts, and that ledgers add up.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use super::*;
use crate::proto::v1::report_request::Event;
use crate::rollout::settings::MissingCallRule;
use crate::rpc::convert::answer;
use crate::rpc::convert::examples::{self, about, call, delta, kept, parent, settings};

fn view(rollout: &mut Rollout) -> RolloutView<'_> {
    let finalised_unix_ms = rollout.finalised().map(|_| 3000);
    RolloutView {
        about: about(),
        rollout,
        opened_unix_ms: 1000,
        heard_unix_ms: 2000,
        finalised_unix_ms,
        settings_version: 4,
        refused_requests: 5,
        resident_bytes: 6,
        next_deadline_in_ms: Some(7000),
    }
}

fn shown(rollout: &mut Rollout, what: &Shown) -> v1::GetRolloutResponse {
    let outline = Outline::new(view(rollout), what);
    let shower = calls::Shower::new(&outline);
    let calls = shower.calls(rollout.facts(), 0..usize::MAX);
    assembled(outline, calls)
}

fn found<'a>(response: &'a v1::GetRolloutResponse, id: &str) -> &'a v1::CallSummary {
    response.calls.iter().find(|call| call.call_id == id).unwrap()
}

/// A line of two calls, a subagent of another policy below the first, a frozen call, an unkept one, an empty one.
fn events() -> Vec<Event> {
    let sub =
        v1::Call { policy: "other".to_owned(), parent_agent_id: "x".to_owned(), ..call("s", "y", 3, &[1, 2, 3], &[9]) };
    let frozen = v1::Call { train: Some(false), ..call("f", "x", 4, &[7], &[7]) };
    let broken = v1::Call { link: parent("a"), ..call("d", "x", 6, &[1, 2, 8], &[8, 8]) };
    let calls = vec![
        call("b", "x", 2, &[1, 2, 3, 4], &[5, 6]),
        call("a", "x", 1, &[1, 2], &[3]),
        sub,
        frozen,
        call("n", "x", 5, &[1, 2], &[4]),
        call("e", "x", 7, &[1], &[]),
        broken,
    ];
    calls.into_iter().map(Event::Call).collect()
}

fn sealed() -> Rollout {
    let mut events = events();
    let mut seal = kept("x", &["a", "b", "f", "d", "e"]);
    seal.kept.as_mut().unwrap().agents.extend(kept("y", &["s"]).kept.unwrap().agents);
    events.push(examples::finish(seal));
    examples::rollout(settings(), events)
}

/// Each policy's ledger adds up, and says the same as the fates of the calls shown for it alone.
fn check_ledgers(rollout: &mut Rollout, max_row_tokens: Option<u32>) {
    let all = shown(rollout, &Shown { policy: None, max_row_tokens });
    assert!(!all.ledgers.is_empty());
    check_drifts(&all);
    for ledger in &all.ledgers {
        let sum = ledger.pending
            + ledger.trained
            + ledger.context
            + ledger.no_row
            + ledger.empty
            + ledger.not_kept
            + ledger.too_long;
        assert_eq!(ledger.accepted, sum + ledger.gone.values().sum::<u64>());
        assert_eq!(ledger.accepted, all.calls.len() as u64);
        let alone = Shown { policy: Some(Name::parse(&ledger.policy).unwrap()), max_row_tokens };
        let alone = shown(rollout, &alone);
        assert_eq!(alone.ledgers, std::slice::from_ref(ledger));
        let count = |fate| alone.calls.iter().filter(|call| call.fate() == fate).count() as u64;
        use v1::CallFate::{Context, Empty, NoRow, NotKept, Pending, TooLong, Trained};
        assert_eq!([count(Pending), count(Trained), count(Context)], [ledger.pending, ledger.trained, ledger.context]);
        assert_eq!([count(NoRow), count(Empty)], [ledger.no_row, ledger.empty]);
        assert_eq!([count(NotKept), count(TooLong)], [ledger.not_kept, ledger.too_long]);
    }
}

/// Drift is counted as it stands on the calls.
fn check_drifts(shown: &v1::GetRolloutResponse) {
    let mut counted = std::collections::BTreeMap::new();
    for call in shown.calls.iter().filter(|call| call.kept) {
        if let Some(drift) = call.verdict.as_ref().and_then(|verdict| verdict.drift.as_ref()) {
            *counted.entry((call.agent_id.clone(), drift.kind())).or_insert(0) += 1;
        }
    }
    let said = shown.drifts.iter().map(|count| ((count.agent_id.clone(), count.kind()), count.calls));
    assert_eq!(said.collect::<std::collections::BTreeMap<_, _>>(), counted);
}

#[test]
fn drift_costs_the_context_that_stands_in_two_rows() {
    let frozen = v1::Call { train: Some(false), ..call("f", "x", 5, &[1, 7], &[7]) };
    let calls = [
        call("a", "x", 1, &[1, 2], &[3]),
        call("b", "x", 2, &[1, 2, 9], &[4]),
        call("c", "x", 3, &[1, 2, 9, 4, 6], &[8]),
        call("d", "x", 4, &[1, 2, 9], &[5]),
        frozen,
        call("s", "y", 6, &[1, 2, 3], &[4]),
    ];
    let mut events: Vec<Event> = calls.into_iter().map(Event::Call).collect();
    events.push(examples::finish(v1::Seal::default()));
    let shown = shown(&mut examples::rollout(settings(), events), &Shown::default());
    check_drifts(&shown);
    use v1::DriftKind::{Differs, Rewind};
    let said: Vec<_> = shown
        .drifts
        .iter()
        .map(|count| (count.agent_id.as_str(), count.kind(), count.calls, count.repeated_row_tokens))
        .collect();
    // `b` parts from `a` after 2 ids; `f` from `d` after 1, but is in no row; `d` goes back to 3 ids of `c`.
    assert_eq!(said, [("x", Differs, 2, 2), ("x", Rewind, 1, 3)]);
    assert_eq!(shown.summary.unwrap().drifted_calls, 3);
}

#[test]
fn a_finalised_rollout_shows_rows_fates_and_ledgers() {
    let mut rollout = sealed();
    let response = shown(&mut rollout, &Shown::default());
    let order: Vec<&str> = response.calls.iter().map(|call| call.call_id.as_str()).collect();
    assert_eq!(order, ["a", "b", "s", "f", "n", "d", "e"]);
    use v1::CallFate::{Empty, NoRow, NotKept, Trained};
    let fates: Vec<v1::CallFate> = response.calls.iter().map(v1::CallSummary::fate).collect();
    assert_eq!(fates, [Trained, Trained, Trained, NoRow, NotKept, Trained, Empty]);
    assert_eq!(found(&response, "a").owner_leaf_call_id, "b");
    assert_eq!((found(&response, "f").train, found(&response, "a").train), (Some(false), None));

    let rows: Vec<(&str, &str)> =
        response.rows.iter().map(|row| (row.policy.as_str(), row.leaf_call_id.as_str())).collect();
    assert_eq!(rows, [("main", "b"), ("main", "d"), ("other", "s")]);
    let row = &response.rows[0];
    assert_eq!((row.row_id.as_str(), row.row_index, row.tokens, row.trained_tokens), ("run/rollout/2/main/b", 0, 6, 3));
    assert_eq!(
        (&row.walk_call_ids[..], &row.trained_call_ids[..]),
        (&["a", "b"].map(String::from)[..], &["a", "b"].map(String::from)[..])
    );
    assert_eq!(response.rows[2].walk_call_ids, ["a", "s"]);
    assert_eq!(response.rows[2].trained_call_ids, ["s"]);
    check_ledgers(&mut rollout, None);
    check_ledgers(&mut rollout, Some(5));
    check_ledgers(&mut rollout, Some(1));
    let short = shown(&mut rollout, &Shown { policy: None, max_row_tokens: Some(5) });
    assert_eq!(found(&short, "b").fate(), v1::CallFate::TooLong);
}

#[test]
fn links_are_those_of_the_kept_forest() {
    let response = shown(&mut sealed(), &Shown::default());
    let verdict = |id: &str| found(&response, id).verdict.clone().unwrap();
    assert_eq!((verdict("b").kind(), verdict("b").parent_call_id.as_str()), (v1::LinkKind::Child, "a"));
    assert_eq!((verdict("a").kind(), verdict("e").kind()), (v1::LinkKind::Root, v1::LinkKind::Empty));
    assert_eq!((verdict("d").kind(), verdict("d").broken()), (v1::LinkKind::Broken, v1::BrokenLinkReason::DoesNotFit));
    assert_eq!(verdict("d").drift.unwrap().matched_length_tokens, 2);
    assert_eq!(found(&response, "d").link, parent("a"));
    assert_eq!((&found(&response, "n").verdict, found(&response, "n").kept), (&None, false));
}

#[test]
fn a_summary_says_where_the_rollout_stands() {
    let summary = shown(&mut sealed(), &Shown::default()).summary.unwrap();
    assert_eq!(
        (summary.state(), summary.rollout.unwrap()),
        (v1::RolloutState::Finalised, rollout_ref_message(&about()))
    );
    assert_eq!((summary.settings_version, summary.refused_requests, summary.resident_bytes), (4, 5, 6));
    assert_eq!((summary.open_time, summary.last_event_time), (Some(timestamp(1000)), Some(timestamp(2000))));
    assert_eq!((summary.finalise_time, summary.next_deadline), (Some(timestamp(3000)), Some(duration(7000))));
    assert_eq!((summary.reward.unwrap().value, summary.totals.unwrap().calls), (1.5, 7));

    let reward = Event::Reward(v1::Reward { value: 1.0, ..v1::Reward::default() });
    let seal = Event::Seal(kept("x", &["later"]));
    let state = |events: Vec<Event>| {
        shown(&mut examples::rollout(settings(), events), &Shown::default()).summary.unwrap().state()
    };
    assert_eq!(state(vec![]), v1::RolloutState::Open);
    assert_eq!(state(vec![seal.clone()]), v1::RolloutState::Sealed);
    assert_eq!(state(vec![reward.clone()]), v1::RolloutState::Rewarded);
    assert_eq!(state(vec![seal, reward]), v1::RolloutState::Incomplete);
}

#[test]
fn all_calls_of_an_open_rollout_are_pending_and_its_rows_are_those_of_now() {
    let mut events = events();
    let base = v1::Base { call_id: "later".to_owned(), length_tokens: 3, digest: vec![1; 16].into() };
    events.push(Event::Call(v1::Call { prompt: delta(base.clone(), &[5]), ..call("w", "x", 8, &[], &[1]) }));
    events.push(Event::Call(v1::Call { link: parent("later"), ..call("p", "z", 9, &[1, 2, 3], &[2]) }));
    let mut rollout = examples::rollout(settings(), events);
    let response = shown(&mut rollout, &Shown::default());
    assert!(response.calls.iter().all(|call| call.fate() == v1::CallFate::Pending));
    assert!(response.ledgers.iter().all(|ledger| (ledger.accepted, ledger.pending) == (9, 9)));
    check_ledgers(&mut rollout, None);
    assert!(response.rows.iter().any(|row| row.leaf_call_id == "b"));
    let waiting = found(&response, "w");
    assert_eq!((waiting.prompt_tokens, &waiting.base), (None, &Some(base)));
    assert_eq!(waiting.missing_state(), v1::MissingCallState::WaitingForBase);
    for id in ["w", "p"] {
        let verdict = found(&response, id).verdict.clone().unwrap();
        assert_eq!((verdict.kind(), verdict.waiting_for_call_id.as_str()), (v1::LinkKind::Waiting, "later"));
    }
    assert_eq!(response.status.unwrap().missing_count, 2);
}

#[test]
fn a_policy_that_is_not_trained_has_no_rows() {
    let trained = crate::rollout::settings::RolloutSettings {
        trained_policies: vec![Name::parse("other").unwrap()],
        missing_call: MissingCallRule::Finalise,
        ..settings()
    };
    let mut events = events();
    events.push(examples::finish(v1::Seal::default()));
    let mut rollout = examples::rollout(trained, events);
    let response = shown(&mut rollout, &Shown::default());
    assert_eq!(response.ledgers.iter().map(|ledger| ledger.policy.as_str()).collect::<Vec<_>>(), ["other"]);
    assert_eq!(found(&response, "a").fate(), v1::CallFate::Context);
    let main = Shown { policy: Some(Name::parse("main").unwrap()), max_row_tokens: None };
    let main = shown(&mut rollout, &main);
    assert!(main.rows.is_empty() && main.ledgers.is_empty());
    assert_eq!(found(&main, "a").fate(), v1::CallFate::NoRow);
}

#[test]
fn walks_are_left_out_when_they_are_too_many() {
    let mut rollout = sealed();
    let view = view(&mut rollout);
    let outline = Outline::new(view, &Shown::default());
    let calls = calls::Shower::new(&outline).calls(rollout.facts(), 0..usize::MAX);
    let rows = |most| rows::rows(&about(), &outline, &calls, most);
    let walks = |most| -> Vec<usize> { rows(most).iter().map(|row| row.walk_call_ids.len()).collect() };
    assert_eq!(walks(100), [2, 1, 2]);
    assert_eq!(walks(3), [2, 1, 0]);
    assert_eq!(rows(0)[0].trained_call_ids, ["a", "b"]);
}

#[test]
fn agents_are_shown_with_starts_and_ends() {
    let start = v1::AgentStart { agent_id: "y".to_owned(), spawning_call_id: "a".to_owned(), ..Default::default() };
    let start = v1::AgentStart { origin: Some(v1::agent_start::Origin::ForkOfCallId("a".to_owned())), ..start };
    let end = v1::AgentEnd {
        agent_id: "y".to_owned(),
        status: v1::AgentStatus::Closed.into(),
        kept: Some(v1::CallList { call_ids: vec!["s".to_owned()] }),
        answers_read_agent_ids: vec!["x".to_owned()],
        ..v1::AgentEnd::default()
    };
    let mut events = events();
    events.extend([Event::AgentStart(start.clone()), Event::AgentEnd(end.clone())]);
    let response = shown(&mut examples::rollout(settings(), events), &Shown::default());
    let [x, y] = &response.agents[..] else { panic!("{:?}", response.agents) };
    assert_eq!((x.agent_id.as_str(), x.calls, x.kept_calls, x.has_list), ("x", 6, 0, false));
    assert_eq!((y.parent_agent_id.as_str(), y.calls, y.kept_calls, y.has_list), ("x", 1, 1, true));
    assert_eq!(y.starts, [start]);
    assert_eq!(y.ends, [v1::AgentEnd { kept: None, ..end }]);
}

#[test]
fn requests_and_tombstones() {
    let request = v1::GetRolloutRequest {
        run_id: "run".to_owned(),
        rollout_id: "r".to_owned(),
        policy: Some("p".to_owned()),
        max_row_tokens: 9,
    };
    let (_, _, what) = get_rollout(&request).unwrap();
    assert_eq!(what, Shown { policy: Name::parse("p").ok(), max_row_tokens: Some(9) });
    let refusal = get_rollout(&v1::GetRolloutRequest { policy: Some(String::new()), ..request }).unwrap_err();
    assert_eq!(refusal.field.as_deref(), Some("policy"));
    let ended = answer::ended(v1::RolloutOutcome::Discarded, "idle_timeout", 2);
    let summary = ended_rollout(&about(), ended).summary.unwrap();
    assert_eq!((summary.state(), summary.ended.unwrap().reason.as_str()), (v1::RolloutState::Ended, "idle_timeout"));
}
