//! The main job once through: a call, a finish, a row, an acknowledgement, a tombstone.

use hedgerow::proto::v1::report_request::Event;
use hedgerow::proto::v1::{self, AnswerOutcome};

use crate::service::{TestService, about, call, reward, subscription};

#[tokio::test]
async fn a_call_becomes_a_row_and_is_retired_when_it_is_acknowledged() {
    let service = TestService::start().await;
    let mut worker = service.worker().await;
    let rollout = about("run", "one");
    let answer = worker.report(&rollout, Event::Call(call("a", "main", 1, &[1, 2], &[3, 4]))).await;
    assert_eq!(answer.outcome(), AnswerOutcome::Accepted, "{answer:?}");
    let finish = v1::Finish { seal: Some(v1::Seal::default()), reward: Some(reward(0.5)) };
    let answer = worker.report(&rollout, Event::Finish(finish)).await;
    assert!(answer.seal.unwrap().finalised);

    let mut trainer = service.trainer(subscription("run", "trainers")).await;
    let unit = trainer.unit().await;
    assert_eq!(unit.rows[0].token_ids, [1, 2, 3, 4]);
    assert_eq!(unit.rows[0].loss_mask, [0, 0, 1, 1]);
    assert_eq!(unit.rows[0].logprobs, [0.0, 0.0, -0.5, -0.5]);
    assert_eq!(unit.rows[0].row_id, "run/one/0/main/a");
    let entries = trainer.ack(&[unit.unit_id]).await;
    assert_eq!(entries[0].outcome(), v1::AckOutcome::Acknowledged);
    let answer = worker.report(&rollout, Event::Call(call("a", "main", 1, &[1, 2], &[3, 4]))).await;
    assert_eq!(answer.outcome(), AnswerOutcome::AlreadyEnded);
    assert_eq!(answer.ended.unwrap().outcome(), v1::RolloutOutcome::Retired);
}
