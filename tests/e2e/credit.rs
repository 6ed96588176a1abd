//! Credits of calls and agents, and the weights of rows, as trainers see them.

use std::sync::Arc;

use hedgerow::error::Reason;
use hedgerow::log::memory::MemoryLog;
use hedgerow::proto::v1;
use hedgerow::proto::v1::credit::Target;
use hedgerow::proto::v1::report_request::Event;

use crate::life::{Life, agent_end, agent_start, finish, seconds};
use crate::service::{Row, TestService, about, call, reward, subscription};

fn of_call(id: &str) -> v1::Credit {
    v1::Credit { target: Some(Target::CallId(id.to_owned())), ..v1::Credit::default() }
}

fn of_agent(id: &str) -> v1::Credit {
    v1::Credit { target: Some(Target::AgentId(id.to_owned())), ..v1::Credit::default() }
}

/// A turn, the next one of the same agent, and a fork of the first: two rows, of which the first trains two calls.
fn tree() -> [Event; 3] {
    [
        Event::Call(call("a", "main", 1, &[1], &[2])),
        Event::Call(call("b", "main", 2, &[1, 2, 3], &[4])),
        Event::Call(call("c", "sub", 3, &[1, 2, 5], &[6])),
    ]
}

fn finish_crediting(credits: Vec<v1::Credit>) -> Event {
    let reward = v1::Reward { credits, ..reward(1.0) };
    Event::Finish(v1::Finish { seal: None, reward: Some(reward) })
}

/// The rows of so many units that the run's trainers are given.
async fn rows(service: &TestService, units: usize) -> Vec<Row> {
    let mut trainer = service.trainer(subscription("run", "trainers")).await;
    let mut rows = Vec::new();
    for _ in 0..units {
        rows.extend(trainer.unit().await.rows);
    }
    rows
}

/// A span's call, whether it is trained, its advantage, process reward and factor.
type Credited<'a> = (&'a str, bool, Option<f64>, Option<f64>, Option<f64>);

fn spans(row: &Row) -> Vec<Credited<'_>> {
    let spans = row.spans.iter();
    spans
        .map(|span| (span.call_id.as_str(), span.trained, span.advantage, span.process_reward, span.advantage_scale))
        .collect()
}

#[tokio::test]
async fn process_rewards_and_factors_stand_on_the_spans_of_a_fork_tree_and_come_back_after_a_restart() {
    let log = Arc::new(MemoryLog::keeping());
    let service = TestService::start_on(Arc::clone(&log) as Arc<_>).await;
    let mut life = Life::on(service).await;
    let rollout = about("run", "tree");
    // One comes before its call, one with the reward, and one never has a call.
    life.accepts(&rollout, Event::Credit(v1::Credit { reward: Some(0.1), ..of_call("c") })).await;
    for event in tree() {
        life.accepts(&rollout, event).await;
    }
    life.accepts(&rollout, Event::Credit(v1::Credit { reward: Some(0.2), ..of_agent("sub") })).await;
    life.repeats(&rollout, Event::Credit(v1::Credit { reward: Some(0.2), ..of_agent("sub") })).await;
    let scaled = v1::Credit { advantage_scale: Some(-3.0), ..of_agent("sub") };
    let penalty = v1::Credit { reward: Some(-0.5), advantage_scale: Some(2.0), ..of_call("b") };
    let unused = v1::Credit { train: Some(true), ..of_call("never") };
    life.accepts(&rollout, finish_crediting(vec![scaled, penalty, unused])).await;

    let shown = life.shown(&rollout).await;
    let summary = shown.summary.unwrap();
    assert_eq!((summary.credits, summary.unused_credits), (4, 1));
    let c = shown.calls.iter().find(|call| call.call_id == "c").unwrap();
    assert_eq!((c.process_reward, c.advantage_scale, c.credited_train), (Some(0.1 + 0.2), Some(-3.0), None));

    let before = rows(&life.service, 2).await;
    assert_eq!(before.iter().map(Row::walk).collect::<Vec<_>>(), [vec!["a", "b"], vec!["a", "c"]]);
    let a = |trained| ("a", trained, Some(0.0), None, None);
    assert_eq!(spans(&before[0]), [a(true), ("b", true, Some(2.0 * -0.5), Some(-0.5), Some(2.0))]);
    let of_c = -3.0 * (0.1 + 0.2);
    assert_eq!(spans(&before[1]), [a(false), ("c", true, Some(of_c), Some(0.1 + 0.2), Some(-3.0))]);
    assert_eq!(
        before.iter().map(|row| (row.header.advantage, row.header.weight)).collect::<Vec<_>>(),
        [(None, 1.0); 2]
    );

    drop(life);
    let service = TestService::start_on(log).await;
    let after = rows(&service, 2).await;
    for (before, after) in before.iter().zip(&after) {
        assert_eq!((&before.row_id, &before.header, &before.spans), (&after.row_id, &after.header, &after.spans));
    }
}

#[tokio::test]
async fn what_trains_is_for_credits_to_say_then_for_calls_and_the_runs_rules() {
    let settings = v1::RunSettings {
        untrained_kinds: vec!["summary".to_owned()],
        unread_answers: v1::UnreadAnswersRule::Context.into(),
        row_weight: v1::RowWeight::RolloutRows.into(),
        ..v1::RunSettings::default()
    };
    let mut life = Life::start_with(settings).await;
    let rollout = about("run", "rules");
    for agent in ["read", "unread", "credited"] {
        let start = v1::AgentStart { parent_agent_id: "main".to_owned(), ..agent_start(agent, 0) };
        life.accepts(&rollout, Event::AgentStart(start)).await;
    }
    let calls = [
        call("turn", "main", 1, &[1], &[2]),
        v1::Call { kind: "summary".to_owned(), ..call("summary", "main", 2, &[3], &[4]) },
        v1::Call { kind: "summary".to_owned(), ..call("trained summary", "main", 3, &[5], &[6]) },
        v1::Call { train: Some(false), ..call("said no", "main", 4, &[7], &[8]) },
        call("read", "read", 5, &[9], &[10]),
        call("unread", "unread", 6, &[11], &[12]),
        call("credited", "credited", 7, &[13], &[14]),
    ];
    for call in calls {
        life.accepts(&rollout, Event::Call(call)).await;
    }
    let read = v1::AgentEnd { answers_read_agent_ids: vec!["read".to_owned()], ..agent_end("main", 0, None) };
    life.accepts(&rollout, Event::AgentEnd(read)).await;
    let train = |credit: v1::Credit| v1::Credit { train: Some(true), ..credit };
    let credits = vec![train(of_call("trained summary")), train(of_agent("credited"))];
    life.accepts(&rollout, finish_crediting(credits)).await;
    let rows = rows(&life.service, 4).await;
    assert_eq!(
        rows.iter().map(Row::trains).collect::<Vec<_>>().concat(),
        ["turn", "trained summary", "read", "credited"]
    );
    assert!(rows.iter().all(|row| row.header.weight == 0.25 && row.spans.iter().all(|span| span.advantage.is_none())));
    let fates = life.shown(&rollout).await.calls.into_iter().map(|call| (call.call_id.clone(), call.fate()));
    let no_row = |id: &str| ["summary", "said no", "unread"].contains(&id);
    for (id, fate) in fates {
        assert_eq!(fate, if no_row(&id) { v1::CallFate::NoRow } else { v1::CallFate::Trained }, "{id}");
    }
}

#[tokio::test]
async fn a_row_weighs_its_share_of_the_trained_tokens() {
    let row_weight = v1::RowWeight::RolloutTokens.into();
    let mut life = Life::start_with(v1::RunSettings { row_weight, ..v1::RunSettings::default() }).await;
    let rollout = about("run", "tree");
    for event in tree() {
        life.accepts(&rollout, event).await;
    }
    life.accepts(&rollout, finish(1.0)).await;
    let rows = rows(&life.service, 2).await;
    assert_eq!(rows.iter().map(|row| row.header.weight).collect::<Vec<_>>(), [2.0 / 3.0, 1.0 / 3.0]);
}

#[tokio::test]
async fn a_credit_that_cannot_be_is_refused_and_nothing_is_half_taken() {
    let mut life = Life::start_with(v1::RunSettings { idle_timeout: seconds(60), ..v1::RunSettings::default() }).await;
    let rollout = about("run", "one");
    life.accepts(&rollout, Event::Call(call("a", "main", 1, &[1], &[2]))).await;
    let bare = v1::Call { generation_logprobs: None, train: Some(false), ..call("bare", "main", 2, &[3], &[4]) };
    life.accepts(&rollout, Event::Call(bare)).await;
    life.accepts(&rollout, Event::Credit(v1::Credit { reward: Some(1.0), ..of_call("a") })).await;
    let train = |credit: v1::Credit| v1::Credit { train: Some(true), ..credit };
    let other = v1::Credit { reward: Some(2.0), ..of_call("a") };
    let refused = [
        (Event::Credit(other.clone()), Reason::CreditConflict, "credit.reward"),
        (finish_crediting(vec![train(of_call("a")), other]), Reason::CreditConflict, "finish.reward.credits[1].reward"),
        (Event::Credit(train(of_agent("main"))), Reason::LogprobsMissing, "credit.train"),
        (Event::Credit(v1::Credit::default()), Reason::MissingField, "credit.target"),
    ];
    for (event, reason, field) in refused {
        life.refuses(&rollout, event, reason, field).await;
    }
    life.repeats(&rollout, Event::Credit(of_call("says nothing"))).await;
    let summary = life.summary(&rollout).await;
    assert_eq!((summary.credits, summary.reward), (1, None));
    life.accepts(&rollout, finish(0.5)).await;
    let late = Event::Credit(v1::Credit { advantage_scale: Some(2.0), ..of_call("a") });
    life.refuses(&rollout, late, Reason::RolloutFinalised, "").await;
    life.repeats(&rollout, Event::Credit(v1::Credit { reward: Some(1.0), ..of_call("a") })).await;
    life.others_go_on("credits that cannot be").await;
}
