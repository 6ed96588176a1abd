//! The end of a rollout: finalised, discarded, retired, superseded; what is answered then, and what its group makes of it.

use hedgerow::error::Reason;
use hedgerow::proto::v1;
use hedgerow::proto::v1::report_request::Event;
use hedgerow::proto::v1::{DiscardDisposition, RolloutOutcome};

use crate::life::{
    Life, agent_end, agent_start, attempt, discard, ended, expecting, finish, finish_with, heartbeat, in_group, naming,
    one_of_each, seconds, state, tags, walks,
};
use crate::service::{about, call, reward, seal, subscription};

/// One event of every kind, those that end a rollout too.
fn every_kind() -> Vec<Event> {
    let mut events = one_of_each();
    events.extend([heartbeat(), finish(0.5), discard("again", DiscardDisposition::Final)]);
    events
}

#[tokio::test]
async fn nothing_new_is_taken_after_finalising() {
    let mut life = Life::start().await;
    let rollout = about("run", "one");
    life.accepts(&rollout, Event::Call(call("a", "main", 1, &[1], &[2]))).await;
    life.accepts(&rollout, finish(0.5)).await;
    let mut components = reward(0.5);
    components.components.insert("tests".to_owned(), 1.0);
    let mut parent = call("a", "main", 1, &[1], &[2]);
    parent.parent_agent_id = "leader".to_owned();
    let news = [
        (tags(&[("late", "tag")]), ""),
        (Event::Call(call("b", "main", 2, &[1, 2], &[3])), ""),
        (Event::Call(parent), ""),
        (Event::AgentStart(agent_start("main", 0)), ""),
        (Event::AgentEnd(agent_end("main", 0, Some(&["a"]))), ""),
        (Event::Seal(seal(&[("main", &["a"])])), ""),
        (Event::Seal(expecting(1)), ""),
        (Event::Reward(components), ""),
        (discard("too late", DiscardDisposition::Final), ""),
    ];
    for (event, field) in news {
        life.refuses(&rollout, event, Reason::RolloutFinalised, field).await;
    }
    life.refuses(&in_group("one", "g"), heartbeat(), Reason::RolloutFinalised, "rollout.group_id").await;
    for event in every_kind() {
        let newer = attempt(&rollout, 1);
        life.refuses(&newer, event, Reason::RolloutFinalised, "rollout.attempt").await;
    }
    life.accepts(&rollout, heartbeat()).await;
    assert_eq!(state(&life.shown(&rollout).await), v1::RolloutState::Finalised);
    life.others_go_on("the finalised one").await;
}

#[tokio::test]
async fn a_newer_attempt_supersedes_an_older_one_that_is_not_finalised() {
    let mut life = Life::start().await;
    let older = in_group("one", "g");
    for event in &one_of_each()[..5] {
        life.accepts(&older, event.clone()).await;
    }
    // One that a new rollout would refuse supersedes nothing.
    let newer = attempt(&older, 2);
    let bad = Event::Call(v1::Call { generation_logprobs: None, ..call("a", "main", 1, &[1], &[2]) });
    life.refuses(&newer, bad, Reason::LogprobsMissing, "call.generation_logprobs").await;
    life.refuses(&attempt(&in_group("one", "h"), 2), heartbeat(), Reason::GroupConflict, "rollout.group_id").await;
    assert_eq!(life.summary(&older).await.rollout, Some(older.clone()));

    // It is in the older one's group even if it does not say so.
    let answer = life.accepts(&attempt(&about("run", "one"), 2), Event::Call(call("a", "main", 1, &[7], &[8]))).await;
    assert_eq!(answer.totals, Some(v1::Totals { calls: 1, agents: 1, generated_tokens: 1 }));
    assert_eq!(life.summary(&newer).await.rollout, Some(newer.clone()));
    for old in [older.clone(), attempt(&older, 1)] {
        for event in every_kind() {
            life.refuses(&old, event, Reason::AttemptSuperseded, "rollout.attempt").await;
        }
    }
    life.accepts(&newer, finish(1.0)).await;
    assert_eq!(life.shown(&newer).await.rows[0].row_id, "run/one/2/main/a");
    for event in every_kind() {
        life.refuses(&older, event, Reason::AttemptSuperseded, "rollout.attempt").await;
    }
    life.others_go_on("superseded ones").await;
}

#[tokio::test]
async fn a_discarded_rollout_answers_everything_with_its_end() {
    let mut life = Life::start().await;
    let rollout = about("run", "one");
    for event in &one_of_each()[..4] {
        life.accepts(&rollout, event.clone()).await;
    }
    let answer = life.accepts(&rollout, discard("the sandbox died", DiscardDisposition::Unspecified)).await;
    let wanted =
        v1::Ended { outcome: RolloutOutcome::Discarded.into(), reason: "the sandbox died".to_owned(), attempt: 0 };
    assert_eq!(answer.ended.as_ref(), Some(&wanted));
    for event in every_kind() {
        assert_eq!(life.has_ended(&rollout, event).await, wanted);
    }
    let shown = life.shown(&rollout).await;
    assert_eq!((state(&shown), ended(&shown)), (v1::RolloutState::Ended, Some(wanted)));
    assert!(shown.calls.is_empty() && shown.rows.is_empty());

    // A next attempt begins afresh, and what belongs to the discarded one is not wanted any more.
    let next = attempt(&rollout, 1);
    let answer = life.accepts(&next, Event::Call(call("a", "main", 1, &[1], &[2]))).await;
    assert_eq!(answer.totals.unwrap().calls, 1);
    life.refuses(&rollout, heartbeat(), Reason::AttemptSuperseded, "rollout.attempt").await;
    life.accepts(&next, finish(1.0)).await;
    assert_eq!(walks(&life.shown(&next).await), ["a"]);
}

#[tokio::test]
async fn a_rollout_that_is_discarded_for_good_takes_no_other_attempt() {
    let mut life = Life::start().await;
    let rollout = in_group("one", "g");
    life.accepts(&rollout, Event::Call(call("a", "main", 1, &[1], &[2]))).await;
    life.accepts(&rollout, discard("hopeless", DiscardDisposition::Final)).await;
    for reference in [rollout.clone(), attempt(&rollout, 1), attempt(&rollout, 7)] {
        for event in every_kind() {
            let end = life.has_ended(&reference, event).await;
            assert_eq!((end.outcome(), end.reason.as_str(), end.attempt), (RolloutOutcome::Discarded, "hopeless", 0));
        }
    }
    life.others_go_on("the hopeless one").await;
}

#[tokio::test]
async fn a_retired_rollout_answers_everything_with_its_end() {
    let mut life = Life::start().await;
    let rollout = about("run", "one");
    for event in one_of_each() {
        life.accepts(&rollout, event).await;
    }
    let mut trainer = life.service.trainer(subscription("run", "trainers")).await;
    let unit = trainer.unit().await;
    trainer.ack(&[unit.unit_id]).await;
    let end = life.until_ended(&rollout).await;
    assert_eq!((end.outcome(), end.attempt), (RolloutOutcome::Retired, 0));
    for event in every_kind() {
        assert_eq!(life.has_ended(&rollout, event.clone()).await, end);
        life.refuses(&attempt(&rollout, 1), event, Reason::RolloutFinalised, "rollout.attempt").await;
    }
    // One without any row has nothing to wait for.
    let empty = about("run", "empty");
    life.accepts(&empty, finish(1.0)).await;
    assert_eq!(life.until_ended(&empty).await.outcome(), RolloutOutcome::Retired);
    life.others_go_on("the retired one").await;
}

#[tokio::test]
async fn a_tombstone_is_forgotten_after_its_time() {
    let settings = v1::RunSettings { tombstone_retention: seconds(3600), ..v1::RunSettings::default() };
    let mut life = Life::start_with(settings).await;
    let (first, second, third) = (about("run", "one"), about("run", "two"), about("run", "three"));
    for rollout in [&first, &third] {
        life.accepts(rollout, discard("no use", DiscardDisposition::WillRetry)).await;
    }
    life.service.clock.advance(std::time::Duration::from_secs(1800));
    let retry = attempt(&third, 1);
    for rollout in [&second, &retry] {
        life.accepts(rollout, discard("no use", DiscardDisposition::Final)).await;
    }
    life.service.clock.advance(std::time::Duration::from_secs(1799));
    life.settle(&first).await;
    life.has_ended(&first, heartbeat()).await;
    life.service.clock.advance(std::time::Duration::from_secs(1));
    for _ in 0..2000 {
        if life.is_unknown(&first).await {
            break;
        }
        tokio::task::yield_now().await;
    }
    assert!(life.is_unknown(&first).await);
    for rollout in [&second, &retry] {
        assert_eq!(life.has_ended(rollout, heartbeat()).await.attempt, rollout.attempt, "each end has its own time");
    }
    let answer = life.accepts(&first, Event::Call(call("a", "main", 1, &[1], &[2]))).await;
    assert_eq!(answer.totals.unwrap().calls, 1, "it is a rollout like any other");
}

#[tokio::test]
async fn an_operator_discards_by_hand() {
    let mut life = Life::start().await;
    let mut admin = life.service.admin().await;
    let by_hand = |about: &v1::RolloutRef, reason: &str| v1::DiscardRolloutRequest {
        rollout: Some(about.clone()),
        reason: reason.to_owned(),
        disposition: DiscardDisposition::Final.into(),
    };
    let (one, two) = (about("run", "one"), about("run", "two"));
    let status = admin.discard_rollout(by_hand(&one, "x")).await.unwrap_err();
    assert_eq!(status.code(), tonic::Code::NotFound);
    assert!(life.is_unknown(&one).await, "looking for it did not open it");
    for rollout in [&one, &two] {
        life.accepts(rollout, Event::Call(call("a", "main", 1, &[1], &[2]))).await;
    }
    let status = admin.discard_rollout(by_hand(&attempt(&one, 1), "x")).await.unwrap_err();
    assert_eq!(status.code(), tonic::Code::NotFound);
    assert_eq!(life.summary(&one).await.rollout, Some(one.clone()), "nor does a newer attempt supersede it");
    for _ in 0..2 {
        let end = admin.discard_rollout(by_hand(&one, "stuck")).await.unwrap().into_inner().ended.unwrap();
        assert_eq!((end.outcome(), end.reason.as_str()), (RolloutOutcome::Discarded, "stuck"));
    }
    assert_eq!(life.has_ended(&one, heartbeat()).await.reason, "stuck");
    life.accepts(&two, finish(1.0)).await;
    let status = admin.discard_rollout(by_hand(&two, "x")).await.unwrap_err();
    assert_eq!(status.code(), tonic::Code::FailedPrecondition);
    assert_eq!(walks(&life.shown(&two).await), ["a"]);
}

#[tokio::test]
async fn a_broken_link_discards_where_the_run_says_so() {
    let settings = v1::RunSettings { broken_link: v1::BrokenLinkRule::Discard.into(), ..v1::RunSettings::default() };
    let mut life = Life::start_with(settings).await;
    let rollout = about("run", "one");
    life.accepts(&rollout, Event::Call(call("a", "main", 1, &[1], &[2, 3]))).await;
    let verdict =
        life.accepts(&rollout, Event::Call(naming("a", call("b", "main", 2, &[1, 2, 9], &[4])))).await.verdict.unwrap();
    assert_eq!((verdict.kind(), verdict.broken()), (v1::LinkKind::Broken, v1::BrokenLinkReason::DoesNotFit));
    let drift = verdict.drift.unwrap();
    assert_eq!((drift.compared_call_id.as_str(), drift.matched_length_tokens), ("a", 2));
    assert_eq!((drift.expected_ids, drift.found_ids), (vec![3], vec![9]));
    // Not kept, it does no harm.
    let harmless = about("run", "two");
    life.accepts(&harmless, Event::Call(call("a", "main", 1, &[1], &[2, 3]))).await;
    life.accepts(&harmless, Event::Call(naming("a", call("b", "main", 2, &[1, 2, 9], &[4])))).await;
    life.accepts(&harmless, finish_with(seal(&[("main", &["a"])]), 1.0)).await;
    assert_eq!(walks(&life.shown(&harmless).await), ["a"]);
    let answer = life.accepts(&rollout, finish(1.0)).await;
    let end = answer.ended.unwrap();
    assert_eq!((end.outcome(), end.reason.as_str()), (RolloutOutcome::Discarded, "broken_link"));
    assert_eq!(life.has_ended(&rollout, finish(1.0)).await, end);
    life.others_go_on("the discarded one").await;
}

#[tokio::test]
async fn a_broken_link_is_inferred_and_told_by_default() {
    let mut life = Life::start().await;
    let rollout = about("run", "one");
    life.accepts(&rollout, Event::Call(call("a", "main", 1, &[1], &[2]))).await;
    life.accepts(&rollout, Event::Call(call("z", "main", 2, &[5], &[6]))).await;
    let b = Event::Call(naming("z", call("b", "main", 3, &[1, 2, 9], &[4])));
    let told = life.accepts(&rollout, b.clone()).await.verdict;
    life.accepts(&rollout, finish(1.0)).await;
    assert_eq!(walks(&life.shown(&rollout).await), ["z", "a b"]);
    assert_eq!(life.repeats(&rollout, b).await.verdict, told, "the same is told after it is finalised");
    let told = told.unwrap();
    assert_eq!((told.kind(), told.parent_call_id.as_str(), told.named), (v1::LinkKind::Broken, "a", true));
}

#[tokio::test]
async fn a_group_takes_as_many_members_as_it_has_places() {
    let mut life = Life::start().await;
    let sized = Event::Open(v1::Open { group_size: Some(2), ..v1::Open::default() });
    life.accepts(&in_group("a", "g"), sized.clone()).await;
    life.accepts(&in_group("b", "g"), heartbeat()).await;
    for event in [sized.clone(), heartbeat(), finish(1.0)] {
        let refusal = life.refuses(&in_group("c", "g"), event, Reason::GroupFull, "rollout.group_id").await;
        assert_eq!((refusal.group_id.as_str(), refusal.rollout_id.as_str()), ("g", "c"));
    }
    // Nor may one join that stands alone as yet.
    life.accepts(&about("run", "c"), heartbeat()).await;
    life.refuses(&in_group("c", "g"), heartbeat(), Reason::GroupFull, "rollout.group_id").await;
    assert_eq!(life.summary(&about("run", "c")).await.refused_requests, 1);

    // A discarded member keeps its place: for its next attempt, or for good.
    life.accepts(&in_group("a", "g"), discard("crash", DiscardDisposition::WillRetry)).await;
    life.accepts(&in_group("b", "g"), discard("hopeless", DiscardDisposition::Unspecified)).await;
    life.refuses(&in_group("d", "g"), heartbeat(), Reason::GroupFull, "rollout.group_id").await;
    let elsewhere = attempt(&in_group("a", "h"), 1);
    life.refuses(&elsewhere, heartbeat(), Reason::GroupConflict, "rollout.group_id").await;
    for member in ["a", "b"] {
        let next = attempt(&in_group(member, "g"), 1);
        life.accepts(&next, Event::Call(call("a", "main", 1, &[1], &[2]))).await;
        life.accepts(&next, finish(1.0)).await;
        assert_eq!(life.summary(&next).await.rollout, Some(next));
    }
    life.refuses(&in_group("d", "g"), heartbeat(), Reason::GroupFull, "rollout.group_id").await;
    life.accepts(&in_group("d", "h"), sized).await;
    life.others_go_on("the full group").await;
}
