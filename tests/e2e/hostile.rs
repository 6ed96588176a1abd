//! Clients that do not speak as they should, on the wire: it costs others nothing, and each is told why.

use std::time::Duration;

use bytes::Bytes;
use h2::client::ResponseFuture;
use h2::{RecvStream, SendStream};
use hedgerow::limits;
use hedgerow::proto::v1::report_request::Event;
use hedgerow::proto::v1::subscribe_request::Request;
use hedgerow::proto::v1::subscribe_response::Response;
use hedgerow::proto::v1::{self, AckOutcome, AnswerOutcome};
use prost::Message;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tonic::codegen::http;

use crate::life::{Life, finish, heartbeat};
use crate::queue_taker::{Taker, row};
use crate::service::{TestService, about, call, subscription};

/// A stream of reports of which the test sends each byte.
struct Raw {
    sender: SendStream<Bytes>,
    response: ResponseFuture,
}

impl Raw {
    async fn open(service: &TestService) -> Self {
        let stream = TcpStream::connect(service.running.grpc_address).await.unwrap();
        let (client, connection) = h2::client::handshake(stream).await.unwrap();
        tokio::spawn(connection);
        let uri = format!("http://{}/hedgerow.v1.HarnessService/Report", service.running.grpc_address);
        let request = http::Request::post(uri).header("content-type", "application/grpc").header("te", "trailers");
        let (response, sender) = client.ready().await.unwrap().send_request(request.body(()).unwrap(), false).unwrap();
        Self { sender, response }
    }

    fn send(&mut self, bytes: impl Into<Bytes>) {
        self.sender.send_data(bytes.into(), false).unwrap();
    }

    /// The code and the stable reason with which it ends.
    async fn end(self) -> (String, String) {
        let response = self.response.await.unwrap();
        let mut body: RecvStream = response.into_body();
        while let Some(data) = body.data().await {
            body.flow_control().release_capacity(data.unwrap().len()).unwrap();
        }
        let trailers = body.trailers().await.unwrap().expect("trailers");
        let status = tonic::Status::from_header_map(&trailers).expect("a status");
        let reason = tonic_types::StatusExt::get_details_error_info(&status).map(|info| info.reason);
        (format!("{:?}", status.code()), reason.unwrap_or_default())
    }
}

/// A message with this length before it, whatever its own is.
pub(crate) fn framed(claimed: u32, message: &[u8]) -> Vec<u8> {
    let mut bytes = vec![0];
    bytes.extend(claimed.to_be_bytes());
    bytes.extend(message);
    bytes
}

pub(crate) fn request(request_seq: u64, rollout: &v1::RolloutRef, event: Event) -> Vec<u8> {
    let request = v1::ReportRequest { request_seq, rollout: Some(rollout.clone()), event: Some(event) };
    let message = request.encode_to_vec();
    framed(u32::try_from(message.len()).unwrap(), &message)
}

#[tokio::test]
async fn a_claim_of_four_gigabytes_is_refused_at_once() {
    let mut life = Life::start().await;
    let mut raw = Raw::open(&life.service).await;
    raw.send(framed(u32::MAX, b"x"));
    assert_eq!(raw.end().await.0, "ResourceExhausted");
    life.others_go_on("after a claim").await;
}

#[tokio::test]
async fn messages_that_never_become_whole_end_their_streams_and_hold_up_nobody() {
    let mut life = Life::start().await;
    let claimed = u32::try_from(limits::REQUEST_MESSAGE_BYTES_MAX).unwrap();
    let mut streams = Vec::new();
    for number in 0..20 {
        let mut raw = Raw::open(&life.service).await;
        match number % 3 {
            0 => raw.send(framed(claimed, &vec![0; 100_000])),
            1 => raw.send(framed(claimed, b"")),
            _ => (0..52).for_each(|_| raw.send(vec![0])),
        }
        streams.push(raw);
    }
    life.others_go_on("beside halves of messages").await;
    for raw in streams {
        let ended = tokio::spawn(raw.end());
        while !ended.is_finished() {
            life.service.clock.advance(Duration::from_secs(1));
            tokio::task::yield_now().await;
        }
        // A drip of zeros is a line of empty messages, and half a header.
        let expected = ("ResourceExhausted".to_owned(), "message_too_slow".to_owned());
        assert_eq!(ended.await.unwrap(), expected);
    }
    life.others_go_on("after them").await;
}

#[tokio::test]
async fn what_is_no_message_ends_its_stream_only() {
    let mut life = Life::start().await;
    // A field that goes on beyond the end, a group that never ends, nothing that means anything.
    let broken = [framed(2, &[0x12, 0xff]), framed(1, &[0x0b]), vec![9; 64]];
    for (number, bytes) in broken.into_iter().enumerate() {
        let mut raw = Raw::open(&life.service).await;
        raw.send(bytes);
        assert_eq!(raw.end().await, ("InvalidArgument".to_owned(), "invalid_value".to_owned()));
        life.others_go_on(&format!("after what is no message, {number}")).await;
    }
}

#[tokio::test]
async fn a_connection_that_is_cut_after_any_byte_leaves_whole_events_and_no_other() {
    let mut life = Life::start().await;
    let rollout = about("run", "cut");
    let events = [
        Event::Call(call("a", "main", 1, &[1, 2], &[3])),
        Event::Call(call("b", "main", 2, &[1, 2, 3, 4], &[5])),
        Event::Seal(v1::Seal { expected_calls: Some(2), ..v1::Seal::default() }),
        Event::Reward(crate::service::reward(1.0)),
    ];
    let mut bytes = Vec::new();
    for (number, event) in events.iter().enumerate() {
        bytes.extend(request(number as u64, &rollout, event.clone()));
        let ends = [bytes.len() - 1, bytes.len() - 7, bytes.len()];
        for end in ends {
            let mut raw = Raw::open(&life.service).await;
            raw.send(bytes[..end].to_vec());
            drop(raw);
        }
    }
    for event in events {
        let answer = life.worker.report(&rollout, event).await;
        assert_ne!(answer.outcome(), AnswerOutcome::Refused, "{answer:?}");
    }
    let shown = life.until_finalised(&rollout).await;
    assert_eq!(crate::life::walks(&shown), ["a b"]);
}

#[tokio::test]
async fn a_client_that_does_not_read_its_answers_holds_up_nobody() {
    let service = TestService::start().await;
    let mut raw = Raw::open(&service).await;
    // More answers than may be outstanding, and than fit its window.
    let rollout = about("run", "unread");
    let many: Vec<u8> = (0..2000).flat_map(|number| request(number, &rollout, heartbeat())).collect();
    raw.send(many);
    let mut worker = service.worker().await;
    let mut taker = Taker::join(&service, subscription("run", "trainers")).await;
    let unit = row(&mut worker, "run", "other", 5).await;
    assert_eq!(taker.unit().await.unit_id, unit);
    assert_eq!(taker.ack(&[unit]).await, [AckOutcome::Acknowledged]);
    // Whoever reads at last is answered all.
    raw.sender.send_data(Bytes::new(), true).unwrap();
    assert_eq!(raw.end().await.0, "Ok");
}

#[tokio::test]
async fn connections_that_say_nothing_end_and_others_are_served_meanwhile() {
    let mut life = Life::start().await;
    let silent = TcpStream::connect(life.service.running.grpc_address).await.unwrap();
    let mut halting = TcpStream::connect(life.service.running.grpc_address).await.unwrap();
    halting.write_all(b"PRI * HT").await.unwrap();
    life.others_go_on("beside silent connections").await;
    for mut stream in [silent, halting] {
        let ended = tokio::spawn(async move { stream.read_to_end(&mut Vec::new()).await });
        while !ended.is_finished() {
            life.service.clock.advance(Duration::from_secs(1));
            tokio::task::yield_now().await;
        }
    }
}

#[tokio::test]
async fn an_answer_to_very_many_long_ids_comes_in_messages_of_bounded_size() {
    let service = TestService::start().await;
    let trainer = service.trainer(subscription("run", "trainers")).await;
    let mut taker = Taker::of(trainer);
    let unit_ids: Vec<String> = (0..3000).map(|number| format!("{number:0>1300}")).collect();
    taker.trainer.send(Request::Ack(v1::Ack { unit_ids: unit_ids.clone(), seek_count: 0 })).await;
    let mut answered = Vec::new();
    while answered.len() < unit_ids.len() {
        if let Some(Response::AckResult(result)) = taker.trainer.next().await.unwrap() {
            assert!(result.encoded_len() <= limits::UNIT_MESSAGE_BYTES_MAX);
            answered.extend(result.entries.into_iter().map(|entry| entry.unit_id));
        }
    }
    assert_eq!(answered, unit_ids);
    let held = v1::Subscription { held_unit_ids: unit_ids, ..subscription("run", "trainers") };
    let refused = crate::service::Trainer::subscribe(service.channel().await, held).await;
    assert_eq!(crate::queue_taker::reason(&refused.err().expect("a refusal")), "over_limit");
}

#[tokio::test]
async fn ids_of_odd_bytes_are_taken_as_they_are_or_refused_by_name() {
    let mut life = Life::start().await;
    let longest = "é".repeat(limits::IDENTIFIER_BYTES_MAX / 2);
    for good in ["%2F/..//", "a\u{200d}\u{feff}b", "'; DROP TABLE", "{run=\"x\"}", longest.as_str()] {
        let rollout = v1::RolloutRef { group_id: good.to_owned(), ..about("run", good) };
        life.accepts(&rollout, Event::Call(call(good, good, 1, &[1], &[2]))).await;
        life.accepts(&rollout, finish(1.0)).await;
        assert_eq!(crate::life::walks(&life.until_finalised(&rollout).await), [good]);
    }
    for bad in ["a\u{0}", "\u{85}", "\n", "\u{1b}[31m", &format!("{longest}e")] {
        let event = Event::Call(call(bad, "main", 1, &[1], &[2]));
        let answer = life.worker.report(&about("run", "odd"), event).await;
        let refusal = answer.refusal.expect("a refusal");
        assert_eq!((refusal.reason.as_str(), refusal.field.as_str()), ("invalid_identifier", "call.call_id"));
    }
}
