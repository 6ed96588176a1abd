//! What follows from records comes when they are durable, which may be after newer records: it must come to the same.

use std::sync::Arc;

use hedgerow::log::memory::MemoryLog;
use hedgerow::proto::v1;
use hedgerow::proto::v1::report_request::Event;

use crate::queue_taker::{Taker, finish, reason, row};
use crate::replay::{replayed, same};
use crate::replay_drive::durably;
use crate::service::{TestService, Trainer, about, call, subscription};

/// A service whose log is held back.
struct Late {
    service: TestService,
    log: Arc<MemoryLog>,
}

impl Late {
    async fn start() -> Self {
        let log = Arc::new(MemoryLog::held());
        Self { service: TestService::start_on(log.clone()).await, log }
    }

    /// Waits until something that was asked is in the log, which takes so many records, and not durable.
    async fn logged(&self, records: u64, asked: impl AsyncFnOnce()) {
        let store = &self.service.running.store;
        let before = store.last_position().0;
        asked().await;
        while store.last_position().0 < before + records {
            tokio::task::yield_now().await;
        }
    }

    /// Stops it; a replay gives what it had.
    async fn stop(self) {
        let (mut admin, log) = (self.service.admin().await, self.log);
        for _ in 0..20 {
            drop(durably(&log, admin.get_run(v1::GetRunRequest { run_id: "run".to_owned() })).await);
        }
        drop(admin);
        let image = durably(&log, self.service.running.stop_and_look()).await.unwrap().image();
        same(&image, &replayed(&log)).unwrap();
    }
}

fn member(attempt: u32) -> v1::RolloutRef {
    v1::RolloutRef { group_id: "g".to_owned(), attempt, ..about("run", "x") }
}

#[tokio::test]
async fn the_end_of_an_attempt_after_the_next_was_opened() {
    let late = Late::start().await;
    let mut worker = late.service.worker().await;
    durably(&late.log, worker.report(&member(0), Event::Call(call("c", "main", 1, &[1], &[2])))).await;
    let discard = v1::Discard { reason: "again".to_owned(), disposition: v1::DiscardDisposition::WillRetry.into() };
    late.logged(1, async || _ = worker.send(&member(0), Event::Discard(discard)).await).await;
    late.logged(1, async || _ = worker.send(&member(1), Event::Heartbeat(v1::Heartbeat {})).await).await;
    durably(&late.log, async {
        worker.receive().await;
        worker.receive().await;
    })
    .await;
    drop(worker);
    late.stop().await;
}

#[tokio::test]
async fn a_group_that_was_asked_for_before_its_run_was_deleted_and_made_again() {
    let late = Late::start().await;
    let mut worker = late.service.worker().await;
    durably(&late.log, row(&mut worker, "run", "x", 5)).await;
    let channel = late.service.channel().await;
    let mut subscribed = None;
    late.logged(1, async || {
        subscribed = Some(tokio::spawn(Trainer::subscribe(channel, subscription("run", "trainers"))));
    })
    .await;
    let mut admin = late.service.admin().await;
    let (mut deleted, mut created) = (None, None);
    late.logged(1, async || {
        let mut admin = admin.clone();
        let delete = v1::DeleteRunRequest { run_id: "run".to_owned(), force: true };
        deleted = Some(tokio::spawn(async move { admin.delete_run(delete).await }));
    })
    .await;
    late.logged(1, async || {
        let create = v1::CreateRunRequest { run_id: "run".to_owned(), settings: None };
        created = Some(tokio::spawn(async move { admin.create_run(create).await }));
    })
    .await;
    let refused = durably(&late.log, subscribed.unwrap()).await.unwrap().err().unwrap();
    assert_eq!(reason(&refused), "run_not_found");
    durably(&late.log, deleted.unwrap()).await.unwrap().unwrap();
    durably(&late.log, created.unwrap()).await.unwrap().unwrap();
    durably(&late.log, row(&mut worker, "run", "y", 5)).await;
    let trainer = durably(&late.log, late.service.trainer(subscription("run", "trainers"))).await;
    assert!(trainer.subscribed.created, "the group of the deleted run is not this run's");
    drop((worker, trainer));
    late.stop().await;
}

#[tokio::test]
async fn a_group_declared_to_take_what_comes_does_not_take_what_was_finalised_before() {
    let late = Late::start().await;
    let mut worker = late.service.worker().await;
    durably(&late.log, worker.report(&about("run", "x"), Event::Call(call("c", "main", 1, &[1], &[2])))).await;
    late.logged(1, async || _ = worker.send(&about("run", "x"), finish(1.0)).await).await;
    let latest = v1::ConsumerGroupSettings { start: v1::StartPosition::Latest.into(), ..Default::default() };
    let declared = v1::ConsumerGroupDeclaration { consumer_group: "latest".to_owned(), settings: Some(latest) };
    let settings = Some(v1::RunSettings { consumer_groups: vec![declared], ..v1::RunSettings::default() });
    let update = v1::UpdateRunSettingsRequest { run_id: "run".to_owned(), settings, expected_settings_version: 0 };
    let mut admin = late.service.admin().await;
    let mut updated = None;
    late.logged(1, async || updated = Some(tokio::spawn(async move { admin.update_run_settings(update).await }))).await;
    durably(&late.log, updated.unwrap()).await.unwrap().unwrap();
    let after = durably(&late.log, row(&mut worker, "run", "y", 5)).await;
    let mut taker = Taker::of(durably(&late.log, late.service.trainer(subscription("run", "latest"))).await);
    assert!(!taker.trainer.subscribed.created);
    let units = durably(&late.log, taker.quiet()).await;
    assert_eq!(crate::queue_taker::unit_ids(&units), [after]);
    drop((worker, taker));
    late.stop().await;
}

#[tokio::test]
async fn a_run_is_not_empty_while_the_end_of_a_rollout_is_not_durable() {
    let late = Late::start().await;
    let mut worker = late.service.worker().await;
    durably(&late.log, worker.report(&about("run", "x"), Event::Call(call("c", "main", 1, &[1], &[2])))).await;
    late.logged(1, async || _ = worker.send(&about("run", "x"), finish(1.0)).await).await;
    let mut admin = late.service.admin().await;
    let delete = v1::DeleteRunRequest { run_id: "run".to_owned(), force: false };
    let deleted = tokio::spawn(async move { admin.delete_run(delete).await });
    // It is judged while nothing is durable, and answered when it is.
    let mut other = late.service.admin().await;
    for _ in 0..20 {
        let unknown = v1::UpdateRunSettingsRequest::default();
        drop(other.update_run_settings(unknown).await);
    }
    let refused = durably(&late.log, deleted).await.unwrap().unwrap_err();
    assert_eq!(reason(&refused), "run_not_empty");
    durably(&late.log, worker.receive()).await;
    drop((worker, other));
    late.stop().await;
}
