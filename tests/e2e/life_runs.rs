//! Runs: made, changed by version, deleted. A rollout keeps the settings of its opening.

use hedgerow::error::Reason;
use hedgerow::proto::v1;
use hedgerow::proto::v1::admin_service_client::AdminServiceClient;
use hedgerow::proto::v1::report_request::Event;
use tonic::transport::Channel;
use tonic_types::StatusExt;

use crate::life::{Life, finish, finish_with, heartbeat, kept, seconds, state, walks};
use crate::service::{about, call, seal, subscription};

/// The code and the stable reason of a status.
fn why(status: &tonic::Status) -> (tonic::Code, String) {
    let details = status.get_error_details();
    let info = details.error_info().expect("every refusal says its reason");
    assert_eq!(info.domain, "hedgerow");
    (status.code(), info.reason.clone())
}

async fn get_run(admin: &mut AdminServiceClient<Channel>, run: &str) -> Result<v1::Run, tonic::Status> {
    let request = v1::GetRunRequest { run_id: run.to_owned() };
    admin.get_run(request).await.map(|response| response.into_inner().run.expect("a run"))
}

async fn update(
    admin: &mut AdminServiceClient<Channel>,
    settings: v1::RunSettings,
    expected_settings_version: u64,
) -> Result<v1::Run, tonic::Status> {
    let (run_id, settings) = ("run".to_owned(), Some(settings));
    let request = v1::UpdateRunSettingsRequest { run_id, settings, expected_settings_version };
    admin.update_run_settings(request).await.map(|response| response.into_inner().run.expect("a run"))
}

async fn delete(admin: &mut AdminServiceClient<Channel>, force: bool) -> Result<v1::DeleteRunResponse, tonic::Status> {
    let request = v1::DeleteRunRequest { run_id: "run".to_owned(), force };
    admin.delete_run(request).await.map(tonic::Response::into_inner)
}

#[tokio::test]
async fn a_run_is_made_once_and_again_with_the_same_settings() {
    let life = Life::start_with(v1::RunSettings { vocabulary_limit: Some(100), ..v1::RunSettings::default() }).await;
    let mut admin = life.service.admin().await;
    let run = get_run(&mut admin, "run").await.unwrap();
    let settings = run.settings.clone().unwrap();
    assert_eq!((run.settings_version, settings.vocabulary_limit), (1, Some(100)));
    assert_eq!((settings.default_policy.as_str(), settings.idle_timeout), ("main", seconds(6 * 3600)));
    // What was read can be written back.
    let again = v1::CreateRunRequest { run_id: "run".to_owned(), settings: Some(settings) };
    assert_eq!(admin.create_run(again).await.unwrap().into_inner().run, Some(run));
    let other = v1::CreateRunRequest { run_id: "run".to_owned(), settings: None };
    let status = admin.create_run(other).await.unwrap_err();
    assert_eq!(why(&status), (tonic::Code::AlreadyExists, "run_exists".to_owned()));
    for unknown in ["", "other"] {
        let status = get_run(&mut admin, unknown).await.unwrap_err();
        let code = if unknown.is_empty() { tonic::Code::InvalidArgument } else { tonic::Code::NotFound };
        assert_eq!(status.code(), code);
    }
}

#[tokio::test]
async fn settings_change_by_version_and_a_rollout_keeps_those_of_its_opening() {
    let mut life = Life::start().await;
    let mut admin = life.service.admin().await;
    let (old, new) = (about("run", "old"), about("run", "new"));
    life.accepts(&old, Event::Call(call("a", "main", 1, &[1], &[200]))).await;
    let strict = v1::RunSettings {
        vocabulary_limit: Some(100),
        agents_without_list: v1::AgentsWithoutListRule::Keep.into(),
        ..v1::RunSettings::default()
    };
    let status = update(&mut admin, strict.clone(), 7).await.unwrap_err();
    assert_eq!(why(&status), (tonic::Code::Aborted, "settings_version_conflict".to_owned()));
    assert_eq!(get_run(&mut admin, "run").await.unwrap().settings_version, 1);
    let changed = update(&mut admin, strict, 1).await.unwrap();
    assert_eq!((changed.settings_version, get_run(&mut admin, "run").await.unwrap()), (2, changed.clone()));
    assert_eq!(changed.settings.unwrap().vocabulary_limit, Some(100));

    let b = Event::Call(call("b", "sub", 2, &[1, 200], &[201]));
    life.refuses(&new, b.clone(), Reason::TokenIdOverLimit, "call.prompt.token_ids").await;
    // The old one's rules hold for it even when it joins a group only now.
    let grouped = v1::RolloutRef { group_id: "g".to_owned(), ..old.clone() };
    life.accepts(&grouped, b).await;
    life.accepts(&new, Event::Call(call("a", "main", 1, &[1], &[2]))).await;
    life.accepts(&new, Event::Call(call("b", "sub", 2, &[1], &[3]))).await;
    for (rollout, version, wanted) in [(&old, 1, vec!["a"]), (&new, 2, vec!["a", "b"])] {
        life.accepts(rollout, finish_with(seal(&[("main", &["a"])]), 1.0)).await;
        let shown = life.shown(rollout).await;
        assert_eq!((state(&shown), kept(&shown)), (v1::RolloutState::Finalised, wanted));
        assert_eq!(shown.summary.unwrap().settings_version, version);
    }
    let any = update(&mut admin, v1::RunSettings::default(), 0).await.unwrap();
    assert_eq!(any.settings_version, 3);
    let unknown = v1::UpdateRunSettingsRequest { run_id: "no".to_owned(), ..v1::UpdateRunSettingsRequest::default() };
    assert_eq!(admin.update_run_settings(unknown).await.unwrap_err().code(), tonic::Code::NotFound);
}

#[tokio::test]
async fn a_run_is_deleted_when_it_is_empty_or_by_force() {
    let mut life = Life::start().await;
    let mut admin = life.service.admin().await;
    let (open, done, other) = (about("run", "open"), about("run", "done"), about("other", "open"));
    for rollout in [&open, &done, &other] {
        life.accepts(rollout, Event::Call(call("a", "main", 1, &[1], &[2]))).await;
    }
    life.accepts(&done, finish(1.0)).await;
    let status = delete(&mut admin, false).await.unwrap_err();
    assert_eq!(why(&status), (tonic::Code::FailedPrecondition, "run_not_empty".to_owned()));
    assert_eq!(walks(&life.shown(&done).await), ["a"]);
    let deleted = delete(&mut admin, true).await.unwrap();
    assert_eq!(deleted, v1::DeleteRunResponse { open_rollouts: 1, unacknowledged_rows: 1 });
    for rollout in [&open, &done] {
        assert!(life.is_unknown(rollout).await);
    }
    assert_eq!(get_run(&mut admin, "run").await.unwrap_err().code(), tonic::Code::NotFound);
    assert_eq!(delete(&mut admin, true).await.unwrap_err().code(), tonic::Code::NotFound);
    assert_eq!(life.summary(&other).await.totals.unwrap().calls, 1, "another run is not touched");
    // The name is free for a new run, which begins with its first event.
    life.accepts(&open, heartbeat()).await;
    assert_eq!(life.summary(&open).await.totals.unwrap().calls, 0);
    assert_eq!(get_run(&mut admin, "run").await.unwrap().settings_version, 1);
}

#[tokio::test]
async fn a_run_whose_rows_are_acknowledged_is_deleted_without_force() {
    let mut life = Life::start().await;
    let mut admin = life.service.admin().await;
    let rollout = about("run", "one");
    life.accepts(&rollout, Event::Call(call("a", "main", 1, &[1], &[2]))).await;
    life.accepts(&rollout, finish(1.0)).await;
    let mut trainer = life.service.trainer(subscription("run", "trainers")).await;
    let unit = trainer.unit().await;
    trainer.ack(&[unit.unit_id]).await;
    life.until_ended(&rollout).await;
    assert_eq!(delete(&mut admin, false).await.unwrap(), v1::DeleteRunResponse::default());
    let end = loop {
        match trainer.next().await {
            Ok(Some(_)) => {}
            Ok(None) => panic!("a subscription ends with a reason"),
            Err(status) => break status,
        }
    };
    assert_eq!(end.code(), tonic::Code::NotFound);
}
