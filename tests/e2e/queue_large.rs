//! Units that are larger than one message, readers that are slow, and readers that do not read at all.

use std::time::Duration;

use hedgerow::forest::digest::Digest;
use hedgerow::limits::UNIT_MESSAGE_BYTES_MAX;
use hedgerow::proto::v1::report_request::Event;
use hedgerow::proto::v1::subscribe_request::Request;
use hedgerow::proto::v1::subscribe_response::Response;
use hedgerow::proto::v1::{self, AckOutcome, AnswerOutcome, UnitNoticeKind};
use prost::Message;

use crate::queue_taker::{Taker, finish, reason, row_id, rows, unit_ids};
use crate::service::{TestService, Unit, about, call, floats, ids, subscription};

fn tail() -> v1::Subscription {
    v1::Subscription { ephemeral: true, ..subscription("run", "") }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_unit_of_a_million_tokens_comes_in_parts_and_is_whole() {
    let service = TestService::start().await;
    let mut worker = service.worker().await;
    let reference = about("run", "x");
    let mut row: Vec<u32> = (0..500_000).map(|at| at * 7 + 1).collect();
    let (mut mask, mut logprobs) = (vec![0_u8; row.len()], vec![0_f32; row.len()]);
    for turn in 0..5_u32 {
        let known = row.len();
        if turn > 0 {
            row.extend((0..100_000).map(|at| at * 13 + turn));
        }
        let generation: Vec<u32> = (0..100_003).map(|at| at * 17 + turn).collect();
        let values: Vec<f32> = (0..100_003).map(|at| -f32::from(u16::try_from(at % 60_000).unwrap()) / 1e5).collect();
        let prompt = if turn == 0 {
            v1::prompt::Prompt::TokenIds(ids(&row))
        } else {
            let base = v1::Base {
                call_id: (turn - 1).to_string(),
                length_tokens: known as u64,
                digest: bytes::Bytes::copy_from_slice(&Digest::of(&row[..known]).0),
            };
            v1::prompt::Prompt::Delta(v1::Delta { base: Some(base), suffix_token_ids: ids(&row[known..]) })
        };
        let call = v1::Call {
            prompt: Some(v1::Prompt { prompt: Some(prompt) }),
            generation_logprobs: Some(floats(&values)),
            ..call(&turn.to_string(), "main", u64::from(turn), &[], &generation)
        };
        let answer = worker.report(&reference, Event::Call(call)).await;
        assert_eq!(answer.outcome(), AnswerOutcome::Accepted, "{answer:?}");
        mask.resize(row.len(), 0);
        logprobs.resize(row.len(), 0.0);
        row.extend(generation);
        mask.resize(row.len(), 1);
        logprobs.extend(values);
    }
    worker.report(&reference, finish(1.0)).await;
    let mut trainer = service.trainer(subscription("run", "trainers")).await;
    let (mut unit, mut parts) = (Unit::default(), 0);
    loop {
        let response = trainer.next().await.unwrap().unwrap();
        let bytes = v1::SubscribeResponse { response: Some(response.clone()) }.encoded_len();
        assert!(bytes <= UNIT_MESSAGE_BYTES_MAX, "a message of {bytes} bytes");
        let Response::UnitPart(part) = response else { continue };
        assert_eq!((part.part_index, part.unit_tokens, part.unit_rows), (parts, row.len() as u64, 1));
        parts += 1;
        let last = part.last;
        unit.take(part);
        if last {
            break;
        }
    }
    assert!(parts >= 6, "{parts} parts");
    let got = &unit.rows[0];
    assert_eq!(got.token_ids.len(), row.len());
    assert!(got.token_ids == row && got.loss_mask == mask && got.logprobs == logprobs, "to the last token");
    assert_eq!(got.walk(), ["0", "1", "2", "3", "4"]);
}

#[tokio::test]
async fn an_ephemeral_subscription_takes_without_acks_and_holds_nothing_back() {
    let service = TestService::start().await;
    let mut worker = service.worker().await;
    let before = rows(&mut worker, "run", 0, 2, 5).await;
    let mut tail = Taker::join(&service, v1::Subscription { credit_tokens: 1, ..tail() }).await;
    let mut lasting = Taker::join(&service, subscription("run", "trainers")).await;
    assert_eq!(unit_ids(&tail.take_units(2).await), before);
    let after = rows(&mut worker, "run", 2, 300, 5).await;
    assert_eq!(unit_ids(&tail.take_units(300).await), after, "more than may be out at a consumer that acknowledges");
    assert_eq!(tail.ack(&after[..1]).await, [AckOutcome::Unknown]);
    let first = lasting.take_units(2).await;
    lasting.ack(&unit_ids(&first)).await;
    let answer = worker.report(&about("run", "0"), finish(1.0)).await;
    assert_eq!(answer.outcome(), AnswerOutcome::AlreadyEnded, "the tail does not hold it");
    tail.credit(0).await;
    assert!(tail.quiet().await.is_empty());
    rows(&mut worker, "run", 302, 1, 5).await;
    assert!(tail.quiet().await.is_empty(), "a window of nothing stops a tail too");
    tail.credit(1).await;
    assert_eq!(tail.unit().await.unit_id, row_id("run", "302"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_slow_reader_is_passed_over_with_a_notice() {
    const ROLLOUTS: u32 = 60;
    const ROWS: u32 = 100;
    let service = TestService::start().await;
    let mut worker = service.worker().await;
    let mut tail = Taker::join(&service, tail()).await;
    for rollout in 0..ROLLOUTS {
        let reference = about("run", &rollout.to_string());
        // Tags stand in each row's header, so a message has eight thousand bytes.
        let tags = [("a".to_owned(), "x".repeat(4000)), ("b".to_owned(), "y".repeat(4000))].into();
        let mut last = worker.send(&reference, Event::Open(v1::Open { group_size: None, tags })).await;
        for row in 0..ROWS {
            let call = call(&row.to_string(), "main", u64::from(row), &[1], &[row + 2]);
            worker.answer(last).await;
            last = worker.send(&reference, Event::Call(call)).await;
        }
        let finished = worker.report(&reference, finish(1.0)).await;
        assert_eq!(finished.outcome(), AnswerOutcome::Accepted);
    }
    let (mut taken, mut skipped) = (0_u64, 0);
    while taken + skipped < u64::from(ROLLOUTS * ROWS) {
        tail.take().await.unwrap();
        taken += tail.units.drain(..).count() as u64;
        for notice in tail.notices.drain(..) {
            assert_eq!(notice.kind(), UnitNoticeKind::Skipped);
            skipped += notice.units;
        }
    }
    assert_eq!(taken + skipped, u64::from(ROLLOUTS * ROWS), "each row came or was counted");
    assert!(skipped > 0 && taken > 4096, "{taken} taken, {skipped} passed over");
}

#[tokio::test]
async fn a_consumer_that_never_reads_does_not_stop_the_others() {
    let service = TestService::start().await;
    let mut worker = service.worker().await;
    let unread = service.trainer(subscription("run", "trainers")).await;
    let made = rows(&mut worker, "run", 0, 300, 5).await;
    let mut other = Taker::join(&service, subscription("run", "trainers")).await;
    let units = other.take_units(44).await;
    assert_eq!(unit_ids(&units), made[256..], "so many may be out at one consumer");
    assert!(other.quiet().await.is_empty());
    drop(unread);
    let units = other.take_units(212).await;
    assert_eq!(unit_ids(&units), made[..212], "256 less those that it holds");
    other.ack(&made[..212]).await;
    assert_eq!(unit_ids(&other.take_units(44).await), made[212..256]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_consumer_that_asks_and_never_reads_is_let_go() {
    let service = TestService::start().await;
    let mut worker = service.worker().await;
    let mut unread = Taker::join(&service, subscription("run", "trainers")).await;
    let made = rows(&mut worker, "run", 0, 2, 5).await;
    let mut other = Taker::join(&service, subscription("run", "trainers")).await;
    assert!(other.quiet().await.is_empty());
    let unit_ids: Vec<String> = (0..100).map(|unit| format!("{unit:0>250}")).collect();
    let requests = unread.trainer.requests.clone();
    let asking = tokio::spawn(async move {
        loop {
            let ack = Request::Ack(v1::Ack { unit_ids: unit_ids.clone(), seek_count: 0 });
            if requests.send(v1::SubscribeRequest { request: Some(ack) }).await.is_err() {
                return;
            }
        }
    });
    let mut units = Vec::new();
    while units.len() < 2 {
        // It is not read from while it does not read, and that for so long only.
        service.clock.advance(Duration::from_secs(5));
        units.extend(other.quiet().await);
    }
    assert_eq!(crate::queue_taker::unit_ids(&units), made, "its units go to another though its stream is there");
    let end = unread.end().await.unwrap();
    assert_eq!((end.code(), reason(&end).as_str()), (tonic::Code::ResourceExhausted, "consumer_too_slow"));
    drop(unread);
    asking.await.unwrap();
}
