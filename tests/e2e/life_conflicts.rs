//! A second, other value of something: refused at any time, and the first stands. What is left out is no value.

use hedgerow::error::Reason;
use hedgerow::proto::v1;
use hedgerow::proto::v1::report_request::Event;

use crate::life::{
    Life, agent_end, agent_start, finish, finish_with, heartbeat, in_group, kept, naming, on_base, one_of_each, state,
    tags, walks,
};
use crate::service::{about, call, floats, ids, reward, seal};

type Change = fn(&mut v1::Call);

fn time(seconds: i64) -> Option<prost_types::Timestamp> {
    Some(prost_types::Timestamp { seconds, nanos: 0 })
}

fn prompt(prompt: &[u32]) -> Option<v1::Prompt> {
    call("", "", 0, prompt, &[]).prompt
}

/// A call that says everything that a call can say.
fn full_call() -> v1::Call {
    v1::Call {
        kind: "summary".to_owned(),
        policy: "actor".to_owned(),
        policy_versions: vec![v1::PolicyVersionSpan { start: 0, end: 2, version: 7 }],
        model: "m-1".to_owned(),
        train: Some(true),
        finish_reason: "stop".to_owned(),
        start_time: time(100),
        end_time: time(101),
        parent_agent_id: "leader".to_owned(),
        ..call("a", "sub", 1, &[1, 2], &[3, 4])
    }
}

/// Each field of a call, with another value.
const OTHER_CONTENT: [(&str, Change); 15] = [
    ("agent_id", |call| call.agent_id = "other".to_owned()),
    ("sequence", |call| call.sequence = 2),
    ("link", |call| *call = naming("z", call.clone())),
    ("kind", |call| call.kind = "probe".to_owned()),
    ("policy", |call| call.policy = "main".to_owned()),
    ("policy_versions", |call| call.policy_versions[0].version = 8),
    ("model", |call| call.model = "m-2".to_owned()),
    ("prompt", |call| call.prompt = prompt(&[1, 9])),
    ("prompt", |call| call.prompt = prompt(&[1])),
    ("generation_token_ids", |call| call.generation_token_ids = ids(&[3, 5])),
    ("generation_logprobs", |call| call.generation_logprobs = Some(floats(&[-0.5, -0.25]))),
    ("train", |call| call.train = Some(false)),
    ("finish_reason", |call| call.finish_reason = "length".to_owned()),
    ("start_time", |call| call.start_time = time(99)),
    ("end_time", |call| call.end_time = time(102)),
];

#[tokio::test]
async fn a_call_with_other_content_is_refused_and_the_rollout_marked() {
    let mut life = Life::start().await;
    for (at, (field, change)) in OTHER_CONTENT.into_iter().enumerate() {
        for finalised in [false, true] {
            let rollout = about("run", &format!("{at} {finalised}"));
            life.accepts(&rollout, Event::Call(full_call())).await;
            if finalised {
                life.accepts(&rollout, finish(1.0)).await;
            }
            assert!(!life.summary(&rollout).await.conflicted);
            let mut other = full_call();
            change(&mut other);
            let field = format!("call.{field}");
            for _ in 0..2 {
                let other = Event::Call(other.clone());
                let refusal = life.refuses(&rollout, other, Reason::CallConflict, &field).await;
                assert_eq!((refusal.run_id.as_str(), refusal.call_id.as_str()), ("run", "a"));
                assert_eq!(refusal.rollout_id, rollout.rollout_id);
            }
            let summary = life.summary(&rollout).await;
            assert!(summary.conflicted, "{field}");
            assert_eq!(summary.refused_requests, 2);
            life.repeats(&rollout, Event::Call(full_call())).await;
        }
    }
    life.others_go_on("conflicts").await;
}

#[tokio::test]
async fn a_generation_of_another_length_is_other_content() {
    let mut life = Life::start().await;
    let rollout = about("run", "one");
    life.accepts(&rollout, Event::Call(call("a", "main", 1, &[1], &[2, 3]))).await;
    let longer = Event::Call(call("a", "main", 1, &[1], &[2, 3, 4]));
    life.refuses(&rollout, longer, Reason::CallConflict, "call.generation_token_ids").await;
    let answer = life.accepts(&rollout, finish(1.0)).await;
    assert_eq!(answer.totals.unwrap().generated_tokens, 2, "the first stands");
    assert_eq!(life.shown(&rollout).await.rows[0].tokens, 3);
}

#[tokio::test]
async fn the_same_content_in_another_form_is_no_conflict() {
    let mut life = Life::start().await;
    let rollout = about("run", "one");
    let a: Vec<u32> = (0..100).collect();
    life.accepts(&rollout, Event::Call(call("a", "main", 1, &a[..90], &a[90..]))).await;
    let b = call("b", "main", 2, &[&a[..], &[200]].concat(), &[201]);
    let as_delta = on_base("a", &a, &[200], b.clone());
    life.accepts(&rollout, Event::Call(as_delta.clone())).await;
    let said = |change: Change| {
        let mut call = b.clone();
        change(&mut call);
        Event::Call(call)
    };
    life.repeats(&rollout, Event::Call(as_delta)).await;
    life.repeats(&rollout, Event::Call(on_base("a", &a[..70], &[&a[70..], &[200]].concat(), b.clone()))).await;
    life.repeats(&rollout, said(|_| ())).await;
    life.repeats(&rollout, said(|call| call.kind = "turn".to_owned())).await;
    life.repeats(&rollout, said(|call| call.policy = "main".to_owned())).await;
    life.repeats(&rollout, said(|call| call.train = Some(true))).await;
    let infer = |call: &mut v1::Call| {
        call.link = Some(v1::Link { link: Some(v1::link::Link::Infer(v1::InferredLink {})) });
    };
    life.repeats(&rollout, said(infer)).await;
    assert!(!life.summary(&rollout).await.conflicted);
}

/// Facts of [`one_of_each`] with another value, and how each is refused. Calls have a test of their own.
fn other_facts() -> Vec<(Event, Reason, &'static str)> {
    let start = |change: fn(&mut v1::AgentStart)| {
        let mut start = agent_start("sub", 0);
        change(&mut start);
        Event::AgentStart(start)
    };
    let end = |change: fn(&mut v1::AgentEnd)| {
        let mut end = agent_end("sub", 0, None);
        change(&mut end);
        Event::AgentEnd(end)
    };
    let mut by_call = on_base("a", &[1, 2, 3, 4], &[5], call("b", "sub", 2, &[], &[6]));
    by_call.parent_agent_id = "other".to_owned();
    let mut new_call = call("new", "sub", 9, &[1], &[2]);
    new_call.parent_agent_id = "other".to_owned();
    vec![
        (tags(&[("task", "t2")]), Reason::TagsConflict, "open.tags[\"task\"]"),
        (Event::Call(by_call), Reason::AgentParentConflict, "call.parent_agent_id"),
        (Event::Call(new_call), Reason::AgentParentConflict, "call.parent_agent_id"),
        (
            start(|start| start.parent_agent_id = "other".to_owned()),
            Reason::AgentParentConflict,
            "agent_start.parent_agent_id",
        ),
        (
            start(|start| start.spawning_call_id = "b".to_owned()),
            Reason::AgentStartConflict,
            "agent_start.spawning_call_id",
        ),
        (
            start(|start| start.origin = Some(v1::agent_start::Origin::Fresh(v1::FreshOrigin {}))),
            Reason::AgentStartConflict,
            "agent_start.origin",
        ),
        (start(|start| start.profile = "other".to_owned()), Reason::AgentStartConflict, "agent_start.profile"),
        (start(|start| start.model = "m-2".to_owned()), Reason::AgentStartConflict, "agent_start.model"),
        (end(|end| end.status = v1::AgentStatus::Failed.into()), Reason::AgentEndConflict, "agent_end.status"),
        (end(|end| end.kept = Some(v1::CallList::default())), Reason::AgentEndConflict, "agent_end.kept"),
        (
            end(|end| end.answers_read_agent_ids = vec!["sub".to_owned()]),
            Reason::AgentEndConflict,
            "agent_end.answers_read_agent_ids",
        ),
    ]
}

fn other_seals() -> Vec<(Event, Reason, &'static str)> {
    let count = v1::Seal { kept: None, expected_calls: Some(3) };
    vec![
        (Event::Seal(seal(&[("main", &["a", "b"])])), Reason::SealConflict, "seal.kept"),
        (Event::Seal(seal(&[("sub", &["a"])])), Reason::SealConflict, "seal.kept"),
        (Event::Seal(count.clone()), Reason::SealConflict, "seal.expected_calls"),
        (finish_with(count, 0.5), Reason::SealConflict, "finish.seal.expected_calls"),
    ]
}

fn other_rewards() -> Vec<(Event, Reason, &'static str)> {
    let mut components = reward(0.5);
    components.components.insert("tests".to_owned(), 0.0);
    vec![
        (Event::Reward(reward(0.25)), Reason::RewardConflict, "reward.value"),
        (Event::Reward(components), Reason::RewardConflict, "reward.components"),
        (finish(0.25), Reason::RewardConflict, "finish.reward.value"),
    ]
}

#[tokio::test]
async fn a_second_value_of_a_fact_is_refused_at_any_time() {
    let mut life = Life::start().await;
    let rollout = in_group("one", "g");
    let sized = |size| Event::Open(v1::Open { group_size: Some(size), ..v1::Open::default() });
    life.accepts(&rollout, sized(2)).await;
    let mut conflicts = other_facts();
    conflicts.push((sized(3), Reason::GroupSizeConflict, "open.group_size"));
    for (at, event) in one_of_each().into_iter().enumerate() {
        life.accepts(&rollout, event).await;
        conflicts.extend(match at {
            5 => other_seals(),
            6 => other_rewards(),
            _ => Vec::new(),
        });
        if at < 4 {
            continue;
        }
        for (event, reason, field) in conflicts.clone() {
            let refusal = life.refuses(&rollout, event, reason, field).await;
            assert_eq!((refusal.group_id.as_str(), refusal.rollout_id.as_str()), ("g", "one"));
            let of_agent = [Reason::AgentParentConflict, Reason::AgentStartConflict, Reason::AgentEndConflict];
            assert_eq!(refusal.agent_id == "sub", of_agent.contains(&reason), "{refusal:?}");
        }
        let elsewhere = in_group("one", "h");
        for event in [Event::Heartbeat(v1::Heartbeat {}), Event::Open(v1::Open::default())] {
            life.refuses(&elsewhere, event, Reason::GroupConflict, "rollout.group_id").await;
        }
    }
    let shown = life.shown(&rollout).await;
    assert_eq!(state(&shown), v1::RolloutState::Finalised);
    let summary = shown.summary.unwrap();
    assert_eq!((summary.reward.unwrap().value, summary.group_size), (0.5, Some(2)));
    assert_eq!(summary.tags["task"], "t1");
    assert!(!summary.conflicted, "only a call's content marks a rollout");
    life.others_go_on("facts").await;
}

#[tokio::test]
async fn members_of_a_group_say_one_size() {
    let mut life = Life::start().await;
    let sized = |size| Event::Open(v1::Open { group_size: Some(size), ..v1::Open::default() });
    life.accepts(&in_group("a", "g"), sized(3)).await;
    let refusal = life.refuses(&in_group("b", "g"), sized(2), Reason::GroupSizeConflict, "open.group_size").await;
    assert_eq!((refusal.group_id.as_str(), refusal.rollout_id.as_str()), ("g", "b"));
    life.accepts(&in_group("b", "g"), heartbeat()).await;
    life.refuses(&in_group("b", "g"), sized(2), Reason::GroupSizeConflict, "open.group_size").await;
    assert_eq!(life.summary(&in_group("b", "g")).await.refused_requests, 1);
    life.accepts(&in_group("b", "g"), sized(3)).await;
    life.repeats(&in_group("b", "g"), sized(3)).await;
}

#[tokio::test]
async fn what_is_left_out_is_no_value() {
    let mut life = Life::start().await;
    let rollout = in_group("one", "g");
    let mut silent = vec![Event::Open(v1::Open::default()), Event::AgentStart(agent_start("sub", 0))];
    silent.push(Event::AgentEnd(agent_end("sub", 0, None)));
    silent.push(Event::Call(on_base("a", &[1, 2, 3, 4], &[5], call("b", "sub", 2, &[], &[6]))));
    silent.push(Event::Seal(v1::Seal::default()));
    silent.push(Event::Reward(reward(0.5)));
    silent.push(finish(0.5));
    for event in one_of_each() {
        life.accepts(&rollout, event).await;
    }
    for event in silent {
        life.repeats(&rollout, event.clone()).await;
        life.repeats(&about("run", "one"), event).await;
    }
    assert_eq!(life.summary(&rollout).await.rollout, Some(rollout));
}

#[tokio::test]
async fn what_was_left_out_may_still_be_said_until_the_rows_are_made() {
    let mut life = Life::start().await;
    let rollout = about("run", "one");
    let [_, start, a, b, end, seal, reward] = <[Event; 7]>::try_from(one_of_each()).unwrap();
    let without_parent = Event::Call(on_base("a", &[1, 2, 3, 4], &[5], call("b", "sub", 2, &[], &[6])));
    life.accepts(&rollout, Event::Open(v1::Open::default())).await;
    for event in [a, without_parent, Event::AgentEnd(agent_end("sub", 0, None)), Event::Seal(v1::Seal::default())] {
        life.accepts(&rollout, event).await;
    }
    assert_eq!(life.shown(&rollout).await.agents[1].parent_agent_id, "");
    let answer = life.accepts(&rollout, b.clone()).await;
    assert_eq!(answer.verdict.unwrap().parent_call_id, "a");
    life.repeats(&rollout, b).await;
    assert_eq!(life.shown(&rollout).await.agents[1].parent_agent_id, "main");
    for event in [tags(&[("task", "t1")]), start, end.clone()] {
        life.accepts(&rollout, event.clone()).await;
        life.repeats(&rollout, event).await;
    }
    assert_eq!(kept(&life.shown(&rollout).await), ["b"], "the lists decide once one is given");
    life.accepts(&in_group("one", "g"), heartbeat()).await;
    life.accepts(&rollout, seal).await;
    life.accepts(&rollout, reward).await;
    let shown = life.shown(&rollout).await;
    assert_eq!(walks(&shown), ["a b"]);
    assert_eq!(shown.summary.unwrap().rollout, Some(in_group("one", "g")));
}

#[tokio::test]
async fn a_refused_event_says_nothing_of_its_group_either() {
    let mut life = Life::start().await;
    let alone = about("run", "one");
    life.accepts(&alone, Event::Call(call("a", "main", 1, &[1], &[2]))).await;
    life.accepts(&alone, tags(&[("task", "t1")])).await;
    let joining = in_group("one", "g");
    let other = Event::Call(call("a", "main", 1, &[1], &[3]));
    life.refuses(&joining, other, Reason::CallConflict, "call.generation_token_ids").await;
    let mut sized = v1::Open { group_size: Some(1), ..v1::Open::default() };
    sized.tags.insert("task".to_owned(), "t2".to_owned());
    life.refuses(&joining, Event::Open(sized.clone()), Reason::TagsConflict, "open.tags[\"task\"]").await;
    assert_eq!(life.summary(&alone).await.rollout, Some(alone.clone()), "it stands alone still");
    assert_eq!(life.summary(&alone).await.refused_requests, 2);
    // The group has no size yet, and no member: another may have both.
    life.accepts(&in_group("two", "g"), tags(&[("task", "t1")])).await;
    life.refuses(&in_group("two", "g"), Event::Open(sized), Reason::TagsConflict, "open.tags[\"task\"]").await;
    life.accepts(&in_group("three", "g"), heartbeat()).await;
    life.accepts(&joining, heartbeat()).await;
    assert_eq!(life.summary(&alone).await.rollout, Some(joining));
}
