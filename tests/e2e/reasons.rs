//! Every refusal has a stable reason, whoever refuses: also where the transport would refuse by itself.

use bytes::Bytes;
use hedgerow::proto::v1;
use hedgerow::proto::v1::AnswerOutcome;
use hedgerow::proto::v1::report_request::Event;
use prost::Message as _;
use tokio::net::TcpStream;
use tonic::codegen::http;

use crate::hostile::{framed, request};
use crate::life::{Life, heartbeat};
use crate::service::{TestService, about, call};

const BATCH: &str = "hedgerow.v1.HarnessService/ReportBatch";
const REPORT: &str = "hedgerow.v1.HarnessService/Report";

/// Code and reason with which a request of these bytes ends, and what came before.
async fn ask(service: &TestService, method: &str, encoding: Option<&str>, bytes: Vec<u8>) -> (String, String, Vec<u8>) {
    let stream = TcpStream::connect(service.running.grpc_address).await.unwrap();
    let (client, connection) = h2::client::handshake(stream).await.unwrap();
    tokio::spawn(connection);
    let uri = format!("http://{}/{method}", service.running.grpc_address);
    let mut request = http::Request::post(uri).header("content-type", "application/grpc").header("te", "trailers");
    if let Some(encoding) = encoding {
        request = request.header("grpc-encoding", encoding);
    }
    let mut client = client.ready().await.unwrap();
    let (response, mut sender) = client.send_request(request.body(()).unwrap(), false).unwrap();
    sender.send_data(Bytes::from(bytes), true).unwrap();
    let response = response.await.unwrap();
    let (head, mut body) = response.into_parts();
    let mut came = Vec::new();
    while let Some(data) = body.data().await {
        let data = data.unwrap();
        body.flow_control().release_capacity(data.len()).unwrap();
        came.extend(data);
    }
    let trailers = body.trailers().await.unwrap().unwrap_or(head.headers);
    let status = tonic::Status::from_header_map(&trailers).expect("a status");
    let info = tonic_types::StatusExt::get_details_error_info(&status);
    let reason = info.filter(|info| info.domain == "hedgerow").map(|info| info.reason);
    (format!("{:?}", status.code()), reason.unwrap_or_default(), came)
}

fn refused(service: &TestService, reason: &str) -> String {
    let metrics = service.running.store.telemetry().render();
    let name = format!("hedgerow_requests_refused_total{{reason=\"{reason}\"}} ");
    metrics.lines().find_map(|line| line.strip_prefix(&name)).unwrap_or("0").to_owned()
}

#[tokio::test]
async fn what_the_transport_refuses_has_a_reason_and_is_counted_once() {
    let service = TestService::start().await;
    let garbage = framed(2, &[0x0a, 0xff]);
    let compressed = [&[1, 0, 0, 0, 0][..]].concat();
    let good = framed(0, &[]);
    let invalid = ("InvalidArgument", "invalid_value");
    let not_here = ("Unimplemented", "not_in_this_release");
    let cases = [
        (BATCH, None, garbage.clone(), invalid),
        ("hedgerow.v1.AdminService/CreateRun", None, garbage.clone(), invalid),
        ("hedgerow.v1.InspectService/ListRuns", None, garbage, invalid),
        (BATCH, None, Vec::new(), invalid),
        (BATCH, None, [good.clone(), good.clone()].concat(), invalid),
        (BATCH, None, vec![9; 5], invalid),
        (BATCH, None, compressed.clone(), not_here),
        (REPORT, None, compressed, not_here),
        (BATCH, Some("gzip"), good.clone(), not_here),
        (REPORT, Some("zstd"), good.clone(), not_here),
        ("hedgerow.v1.HarnessService/Repart", None, good.clone(), not_here),
        ("hedgerow.v2.HarnessService/Report", None, good.clone(), not_here),
        ("", None, good, not_here),
    ];
    let mut counts = std::collections::BTreeMap::new();
    for (method, encoding, bytes, expected) in cases {
        let (code, reason, _) = ask(&service, method, encoding, bytes.clone()).await;
        assert_eq!((code.as_str(), reason.as_str()), expected, "{method} {encoding:?} {bytes:?}");
        *counts.entry(reason).or_insert(0) += 1;
        for (reason, count) in &counts {
            assert_eq!(refused(&service, reason), count.to_string(), "{method} {encoding:?} {bytes:?}");
        }
    }
}

#[tokio::test]
async fn a_request_that_means_nothing_is_refused_and_its_stream_goes_on() {
    let mut life = Life::start().await;
    let rollout = about("run", "odd");
    let mut odd = call("a?", "main", 1, &[1], &[2]);
    odd.call_id = "a\u{0}".to_owned();
    // The last byte of the id becomes one that no text has.
    let sound = request(7, &rollout, Event::Call(odd));
    let place = sound.windows(4).position(|bytes| bytes == [0x0a, 2, b'a', 0]).unwrap();
    let mut not_text = sound;
    not_text[place + 3] = 0xff;
    let wrong_type = framed(4, &[0x08, 8, 0x10, 1]);
    let no_number = framed(6, &[0x12, 4, 0x0a, 2, 0xff, 0xfe]);
    let many = [0x0a, 0].repeat(hedgerow::limits::KEPT_CALLS_MAX + 1);
    let end =
        v1::AgentEnd { agent_id: "main".to_owned(), status: v1::AgentStatus::Settled.into(), ..Default::default() };
    let mut end =
        v1::ReportRequest { request_seq: 9, rollout: Some(rollout.clone()), event: Some(Event::AgentEnd(end)) }
            .encode_to_vec();
    let kept = within(4, &many);
    end.extend(within(6, &kept));
    let end = framed(u32::try_from(end.len()).unwrap(), &end);
    let stream = [not_text, wrong_type, no_number, end, request(10, &rollout, heartbeat())].concat();
    let (code, _, came) = ask(&life.service, REPORT, None, stream).await;
    assert_eq!(code, "Ok");
    let answers = answers(&came);
    let told: Vec<_> = answers.iter().map(|answer| (answer.request_seq, answer.outcome(), reason_of(answer))).collect();
    let invalid = || ("invalid_value".to_owned(), "request".to_owned());
    let long = ("over_limit".to_owned(), "agent_end.kept".to_owned());
    assert_eq!(
        told,
        [
            (7, AnswerOutcome::Refused, invalid()),
            (8, AnswerOutcome::Refused, invalid()),
            (0, AnswerOutcome::Refused, invalid()),
            (9, AnswerOutcome::Refused, long),
            (10, AnswerOutcome::Accepted, Default::default()),
        ]
    );
    assert_eq!(
        (refused(&life.service, "invalid_value"), refused(&life.service, "over_limit")),
        ("3".into(), "1".into())
    );
    life.others_go_on("after requests that mean nothing").await;
}

/// A message with this one in this field.
fn within(tag: u8, message: &[u8]) -> Vec<u8> {
    let mut bytes = vec![tag << 3 | 2];
    prost::encoding::encode_varint(message.len() as u64, &mut bytes);
    bytes.extend(message);
    bytes
}

fn reason_of(answer: &v1::Answer) -> (String, String) {
    answer.refusal.clone().map(|refusal| (refusal.reason, refusal.field)).unwrap_or_default()
}

fn answers(mut bytes: &[u8]) -> Vec<v1::Answer> {
    let mut answers = Vec::new();
    while let Some((head, rest)) = bytes.split_first_chunk::<5>() {
        let [_, length @ ..] = *head;
        let (message, rest) = rest.split_at(u32::from_be_bytes(length) as usize);
        if let Some(v1::report_response::Response::Answer(answer)) =
            v1::ReportResponse::decode(message).unwrap().response
        {
            answers.push(answer);
        }
        bytes = rest;
    }
    answers
}
