//! Steps for data-parallel ranks: numbers that are reckoned by hand, the same bytes again, restarts, and what is refused.

use std::sync::Arc;
use std::time::Duration;

use hedgerow::log::memory::MemoryLog;
use hedgerow::proto::v1::{self, AckOutcome, WaitingFor};
use tonic::Code;

use crate::life::seconds;
use crate::queue_taker::{Taker, reason, row, rows};
use crate::service::{TestService, Trainer, Unit, subscription};

/// Steps of this many rollouts, in this many shards, with microbatches of at most so many tokens.
pub(crate) fn settings(units: u32, shards: u32, microbatch_tokens: u64) -> v1::ConsumerGroupSettings {
    v1::ConsumerGroupSettings {
        unit: v1::Unit::Step.into(),
        step: Some(v1::StepSettings { units, shards, microbatch_tokens, ..v1::StepSettings::default() }),
        ..v1::ConsumerGroupSettings::default()
    }
}

/// A rank that takes this shard.
pub(crate) fn rank(shard: u32, settings: v1::ConsumerGroupSettings) -> v1::Subscription {
    let consumer = format!("rank-{shard}");
    v1::Subscription { shard: Some(shard), settings: Some(settings), consumer, ..subscription("run", "ranks") }
}

/// The same rank as its group is.
pub(crate) fn again(shard: u32) -> v1::Subscription {
    v1::Subscription { settings: None, ..rank(shard, settings(1, 1, 1)) }
}

/// Tokens of the rows in each microbatch; padding is 0.
fn microbatches(unit: &Unit) -> Vec<Vec<u64>> {
    let step = unit.step.expect("it says which shard it is");
    let mut tokens = vec![Vec::new(); step.microbatches as usize];
    for row in &unit.rows {
        let microbatch = row.header.microbatch_index.expect("a row says where it stands") as usize;
        tokens[microbatch].push(if row.header.padding { 0 } else { row.header.tokens });
    }
    tokens
}

/// All that must not change between two deliveries.
pub(crate) fn bytes(unit: &Unit) -> (&str, u64, Option<v1::StepShard>, &[crate::service::Row]) {
    (&unit.unit_id, unit.tokens, unit.step, &unit.rows)
}

pub(crate) fn shard_id(unit: &Unit) -> (u64, u32) {
    let step = unit.step.expect("it says which shard it is");
    (step.step_index, step.shard)
}

async fn join_both(service: &TestService, settings: &v1::ConsumerGroupSettings) -> [Taker; 2] {
    let one = Taker::join(service, rank(0, settings.clone())).await;
    [one, Taker::join(service, rank(1, settings.clone())).await]
}

#[tokio::test]
async fn a_step_is_cut_evenly_and_says_what_it_is() {
    let service = TestService::start().await;
    let [mut one, mut other] = join_both(&service, &settings(6, 2, 10)).await;
    let mut worker = service.worker().await;
    for (rollout, tokens) in [5, 4, 3, 3, 3].into_iter().enumerate() {
        row(&mut worker, "run", &format!("r{rollout}"), tokens).await;
    }
    assert!(one.quiet().await.is_empty());
    assert_eq!(one.waits(&service).await, [WaitingFor::Step, WaitingFor::NoOpenRollouts]);
    row(&mut worker, "run", "r5", 2).await;
    let (first, second) = (one.unit().await, other.unit().await);
    // 20 tokens are one microbatch of 10 for each.
    assert_eq!(microbatches(&first), [[5, 3, 2]]);
    assert_eq!(microbatches(&second), [[4, 3, 3]]);
    let said = |shard| v1::StepShard {
        step_index: 0,
        shard,
        shards: 2,
        microbatches: 1,
        step_rollouts: 6,
        step_rows: 6,
        step_trained_tokens: 6,
    };
    assert_eq!((first.step, second.step), (Some(said(0)), Some(said(1))));
    assert_eq!((first.tokens, second.tokens, first.delivery_count), (10, 10, 1));
    assert!(first.unit_id.starts_with("run///ranks/") && first.unit_id.ends_with("/0/0"), "{}", first.unit_id);
    let of_first: Vec<_> = first.rows.iter().map(|row| row.row_id.as_str()).collect();
    assert_eq!(of_first, ["run/r0/0/main/c", "run/r3/0/main/c", "run/r5/0/main/c"]);
    assert_eq!(one.ack(&[&first.unit_id]).await, [AckOutcome::ShardAcknowledged]);
    assert_eq!(one.ack(&[&first.unit_id]).await, [AckOutcome::AlreadyAcknowledged]);
    assert_eq!(other.ack(&[&second.unit_id]).await, [AckOutcome::Acknowledged]);
    assert_eq!(other.ack(&[&first.unit_id]).await, [AckOutcome::AlreadyAcknowledged], "all of it has retired");
}

#[tokio::test]
async fn padding_is_said_and_rows_too_long_are_alone() {
    let service = TestService::start().await;
    let [mut one, mut other] = join_both(&service, &settings(3, 2, 10)).await;
    let mut worker = service.worker().await;
    for (rollout, tokens) in [25, 9, 8].into_iter().enumerate() {
        row(&mut worker, "run", &format!("r{rollout}"), tokens).await;
    }
    let (first, second) = (one.unit().await, other.unit().await);
    // Three microbatches are needed, and each of two shards has as many.
    assert_eq!((microbatches(&first), microbatches(&second)), (vec![vec![25], vec![0]], vec![vec![9], vec![8]]));
    let padding = &first.rows[1];
    assert_eq!(padding.row_id, format!("{}/padding/1", first.unit_id));
    assert_eq!(
        (&padding.token_ids[..], &padding.loss_mask[..], &padding.logprobs[..]),
        (&[0][..], &[0][..], &[0.0][..])
    );
    assert_eq!((padding.header.weight, padding.header.trained_tokens, padding.header.tokens), (0.0, 0, 1));
    assert_eq!((first.step.unwrap().step_rows, first.tokens, second.tokens), (3, 26, 17));
}

#[tokio::test]
async fn a_shard_is_the_same_bytes_for_whoever_takes_it_and_after_a_restart() {
    let log = Arc::new(MemoryLog::keeping());
    let service = TestService::start_on(Arc::clone(&log) as Arc<_>).await;
    service.create_run("run", v1::RunSettings { retention: seconds(3600), ..v1::RunSettings::default() }).await;
    let of_group = settings(4, 2, 12);
    let [mut one, mut other] = join_both(&service, &of_group).await;
    rows(&mut service.worker().await, "run", 0, 9, 5).await;
    let (first, second) = (one.take_units(2).await, other.take_units(2).await);
    assert_eq!(first.iter().map(shard_id).collect::<Vec<_>>(), [(0, 0), (1, 0)]);
    one.nack(&[&first[0].unit_id], None).await;
    let returned = one.unit().await;
    assert_eq!((bytes(&returned), returned.delivery_count), (bytes(&first[0]), 2));
    assert_eq!(other.ack(&[&second[0].unit_id]).await, [AckOutcome::ShardAcknowledged]);
    // A new stream of the same rank, which asks for what it had.
    let mut refetched = Taker::join(&service, v1::Subscription { step_index: Some(1), ..again(0) }).await;
    assert_eq!(bytes(&refetched.unit().await), bytes(&first[1]));
    assert_eq!(bytes(&refetched.unit().await), bytes(&first[0]), "it had let go of that");
    drop((one, other, refetched));
    service.running.stop().await;

    let service = TestService::start_on(log).await;
    let held = v1::Subscription { held_unit_ids: vec![first[0].unit_id.clone()], ..again(0) };
    let mut one = Taker::join(&service, held).await;
    assert_eq!(one.trainer.subscribed.held_unit_ids, [first[0].unit_id.clone()]);
    assert_eq!(bytes(&one.unit().await), bytes(&first[1]));
    let mut other = Taker::join(&service, again(1)).await;
    assert_eq!(bytes(&other.unit().await), bytes(&second[1]), "its part of the first step was acknowledged");
    assert_eq!(other.ack(&[&second[0].unit_id]).await, [AckOutcome::AlreadyAcknowledged], "said again");
    assert_eq!(one.ack(&[&first[0].unit_id]).await, [AckOutcome::Acknowledged], "the other's outlived the process");
    // It is acknowledged, and kept.
    let mut refetched = Taker::join(&service, v1::Subscription { step_index: Some(0), ..again(1) }).await;
    let kept = refetched.unit().await;
    assert_eq!(bytes(&kept), bytes(&second[0]));
    assert_eq!(refetched.ack(&[&kept.unit_id]).await, [AckOutcome::AlreadyAcknowledged]);
    // The ninth waits for its step.
    assert_eq!(one.waits(&service).await, [WaitingFor::Step, WaitingFor::NoOpenRollouts]);
}

#[tokio::test]
async fn a_step_is_frozen_when_somebody_takes_it_and_is_frozen_for_ever() {
    let service = TestService::start().await;
    let mut worker = service.worker().await;
    let first = Taker::join(&service, rank(0, settings(2, 2, 10))).await;
    drop(first);
    rows(&mut worker, "run", 0, 4, 5).await;
    let listed = || async {
        let request = v1::ListConsumersRequest { run_id: "run".to_owned(), ..v1::ListConsumersRequest::default() };
        let mut groups = service.inspect().await.list_consumers(request).await.unwrap().into_inner().consumer_groups;
        groups.remove(0)
    };
    let group = listed().await;
    assert_eq!((group.next_step_index, group.queued_units, group.leased_units), (0, 4, 0));
    assert_eq!(
        group.settings.as_ref().map(|settings| (settings.unit(), settings.step.is_some())),
        Some((v1::Unit::Step, true))
    );
    // Credit for one shard at a time.
    let mut one = Taker::join(&service, v1::Subscription { credit_tokens: 5, ..again(0) }).await;
    let shard = one.unit().await;
    assert!(one.quiet().await.is_empty());
    assert_eq!(one.waits(&service).await, [WaitingFor::Credit]);
    let group = listed().await;
    assert_eq!((group.next_step_index, group.queued_units, group.leased_units), (1, 2, 2));
    let open = v1::OpenStep {
        step_index: 0,
        units: 2,
        missing_shards: vec![0, 1],
        missing_shard_count: 2,
        leased_shard_count: 1,
    };
    assert_eq!((group.open_steps, group.consumers[0].shard), (vec![open], Some(0)));
    assert_eq!(one.ack(&[&shard.unit_id]).await, [AckOutcome::ShardAcknowledged]);
    let next = one.unit().await;
    assert_eq!(shard_id(&next), (1, 0), "it is ahead of the other rank");
    let ledger = listed().await.rows.unwrap();
    assert_eq!((ledger.made, ledger.waiting, ledger.leased, ledger.acknowledged), (4, 2, 2, 0));
    let mut other = Taker::join(&service, again(1)).await;
    let both = other.take_units(2).await;
    let ids: Vec<_> = both.iter().map(|unit| unit.unit_id.clone()).collect();
    assert_eq!(other.ack(&ids).await, [AckOutcome::Acknowledged, AckOutcome::ShardAcknowledged]);
    let ledger = listed().await.rows.unwrap();
    assert_eq!((ledger.made, ledger.waiting, ledger.leased, ledger.acknowledged), (4, 0, 2, 2));
}

#[tokio::test]
async fn one_consumer_takes_a_shard_and_another_stands_by() {
    let service = TestService::start().await;
    let of_group = settings(1, 1, 10);
    let mut first = Taker::join(&service, v1::Subscription { consumer: "first".to_owned(), ..rank(0, of_group) }).await;
    let mut standby = Taker::join(&service, v1::Subscription { consumer: "second".to_owned(), ..again(0) }).await;
    rows(&mut service.worker().await, "run", 0, 3, 5).await;
    let taken = first.take_units(3).await;
    assert!(standby.quiet().await.is_empty());
    assert_eq!(standby.waits(&service).await, [WaitingFor::AcksOfOthers]);
    assert_eq!(first.ack(&[&taken[0].unit_id]).await, [AckOutcome::Acknowledged]);
    drop(first);
    let after = standby.take_units(2).await;
    assert_eq!([bytes(&after[0]), bytes(&after[1])], [bytes(&taken[1]), bytes(&taken[2])]);
}

#[tokio::test]
async fn what_does_not_go_with_steps_is_refused_and_says_why() {
    let service = TestService::start().await;
    let of_group = settings(2, 2, 10);
    let mut one = Taker::join(&service, rank(0, of_group.clone())).await;
    let refused = |subscription: v1::Subscription| {
        let service = &service;
        async move {
            let status = Trainer::subscribe(service.channel().await, subscription).await.map(|_| ()).unwrap_err();
            (status.code(), reason(&status), status.message().to_owned())
        }
    };
    let invalid = |reason: &str| (Code::InvalidArgument, reason.to_owned());
    for (subscription, wanted) in [
        (v1::Subscription { shard: None, ..again(0) }, invalid("missing_field")),
        (again(2), invalid("invalid_value")),
        (v1::Subscription { shard: Some(0), ..subscription("run", "rows") }, invalid("invalid_value")),
        (v1::Subscription { step_index: Some(0), ..subscription("run", "rows") }, invalid("invalid_value")),
        (
            v1::Subscription { ephemeral: true, consumer_group: String::new(), ..rank(0, of_group.clone()) },
            invalid("invalid_value"),
        ),
        (rank(0, settings(2, 3, 10)), (Code::FailedPrecondition, "consumer_group_conflict".to_owned())),
        (v1::Subscription { step_index: Some(0), ..again(1) }, (Code::NotFound, "step_not_found".to_owned())),
    ] {
        let (code, reason, message) = refused(subscription).await;
        assert_eq!((code, reason), wanted, "{message}");
    }
    let groups = v1::StepSettings { counted_unit: v1::Unit::Group.into(), ..of_group.step.unwrap() };
    let groups = v1::ConsumerGroupSettings { step: Some(groups), ..of_group };
    let (code, reason, message) =
        refused(v1::Subscription { consumer_group: "whole".to_owned(), ..rank(0, groups) }).await;
    assert_eq!((code, reason.as_str()), (Code::InvalidArgument, "invalid_value"), "{message}");
    // It all goes on, and what is acknowledged and not kept is not fetched.
    rows(&mut service.worker().await, "run", 0, 2, 5).await;
    let mut other = Taker::join(&service, again(1)).await;
    let ids = [one.unit().await.unit_id, other.unit().await.unit_id];
    let unknown = [ids[0].replace("/0/0", "/0/2"), ids[0].replace("/0/0", "/0/00"), ids[0].replace("/0/0", "/1/0")];
    assert_eq!(one.ack(&unknown).await, [AckOutcome::Unknown; 3]);
    assert_eq!(one.ack(&ids).await, [AckOutcome::ShardAcknowledged, AckOutcome::Acknowledged]);
    let (code, reason, message) = refused(v1::Subscription { step_index: Some(0), ..again(1) }).await;
    assert_eq!((code, reason.as_str()), (Code::FailedPrecondition, "not_retained"), "{message}");
    assert!(one.quiet().await.is_empty());
    service.clock.advance(Duration::from_secs(1));
}
