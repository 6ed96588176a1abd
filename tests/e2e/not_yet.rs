//! What this release does not have: UNIMPLEMENTED with a sentence, and nothing changes by it.

use hedgerow::error::Reason;
use hedgerow::proto::v1;
use hedgerow::proto::v1::report_request::Event;

use crate::life::{Life, finish, seconds};
use crate::service::{Trainer, about, call, subscription};

#[track_caller]
fn not_yet<T: std::fmt::Debug>(answer: Result<T, tonic::Status>, what: &str) {
    let status = answer.expect_err(what);
    assert_eq!(status.code(), tonic::Code::Unimplemented, "{what}: {status:?}");
    assert!(status.message().contains("this release does not have"), "{what}: {status:?}");
}

#[tokio::test]
async fn events_that_ask_for_what_is_not_there_are_refused() {
    let mut life = Life::start().await;
    let rollout = about("run", "one");
    let column = v1::Call { columns: vec![v1::Column::default()], ..call("a", "main", 1, &[1], &[2]) };
    for opened in [false, true] {
        let asked = Event::Call(column.clone());
        let refusal = life.refuses(&rollout, asked, Reason::NotInThisRelease, "call.columns").await;
        assert!(refusal.message.contains("this release does not have"), "{refusal:?}");
        if !opened {
            life.accepts(&rollout, Event::Call(call("a", "main", 1, &[1], &[2]))).await;
        }
    }
    life.accepts(&rollout, finish(1.0)).await;
    life.others_go_on("the one before its time").await;
}

#[tokio::test]
async fn methods_that_are_not_there_say_so() {
    let life = Life::start().await;
    let mut inspect = life.service.inspect().await;
    not_yet(inspect.export_trace(v1::ExportTraceRequest::default()).await.map(|_| ()), "ExportTrace");
    let delay = v1::DrainRequest { retry_after: seconds(9) };
    not_yet(life.service.admin().await.drain(delay).await, "a delay of the operator's own");
}

#[tokio::test]
async fn run_settings_that_are_not_there_make_no_run() {
    let mut life = Life::start().await;
    let mut admin = life.service.admin().await;
    type Change = fn(&mut v1::RunSettings);
    let changes: [(&str, Change); 2] = [
        ("fsync", |settings| settings.durability = v1::Durability::Fsync.into()),
        ("os", |settings| settings.durability = v1::Durability::Os.into()),
    ];
    for (what, change) in changes {
        let mut settings = v1::RunSettings::default();
        change(&mut settings);
        let create = v1::CreateRunRequest { run_id: "new".to_owned(), settings: Some(settings.clone()) };
        not_yet(admin.create_run(create).await, what);
        let run_id = "run".to_owned();
        let update = v1::UpdateRunSettingsRequest { run_id, settings: Some(settings), expected_settings_version: 0 };
        not_yet(admin.update_run_settings(update).await, what);
    }
    assert!(admin.get_run(v1::GetRunRequest { run_id: "new".to_owned() }).await.is_err());
    let run = admin.get_run(v1::GetRunRequest { run_id: "run".to_owned() }).await.unwrap().into_inner().run.unwrap();
    assert_eq!(run.settings_version, 1);
    life.others_go_on("settings").await;
}

#[tokio::test]
async fn subscriptions_that_are_not_there_take_nothing() {
    let mut life = Life::start().await;
    let rollout = about("run", "one");
    life.accepts(&rollout, Event::Call(call("a", "main", 1, &[1], &[2]))).await;
    life.accepts(&rollout, finish(1.0)).await;
    let of = |change: fn(&mut v1::ConsumerGroupSettings)| {
        let mut settings = v1::ConsumerGroupSettings::default();
        change(&mut settings);
        v1::Subscription { settings: Some(settings), ..subscription("run", "trainers") }
    };
    let asked = [
        ("tree", of(|settings| settings.shape = v1::Shape::Tree.into())),
        ("packed", of(|settings| settings.shape = v1::Shape::Packed.into())),
    ];
    for (what, subscription) in asked {
        let answer = Trainer::subscribe(life.service.channel().await, subscription).await;
        not_yet(answer.map(|_| ()), what);
    }
    let mut trainer = life.service.trainer(subscription("run", "trainers")).await;
    assert!(trainer.subscribed.created, "none of those made the group");
    assert_eq!(trainer.unit().await.rows[0].row_id, "run/one/0/main/a");
}
