//! What hostile clients can make a real process hold in memory, as the machine sees it.

use bytes::Bytes;
use h2::client::ResponseFuture;
use h2::{RecvStream, SendStream};
use hedgerow::limits;
use hedgerow::proto::v1::report_request::Event;
use hedgerow::proto::v1::{self, AnswerOutcome};
use prost::Message as _;
use tokio::net::TcpStream;
use tonic::codegen::http;
use tonic::transport::Channel;

use crate::hostile::{framed, request};
use crate::life::heartbeat;
use crate::served::Served;
use crate::service::{Worker, about};

const MEMORY_BUDGET_BYTES: u64 = 64 << 20;

/// A service with little memory, which keeps nothing.
fn served() -> Served {
    Served::start(&["--durability", "memory", "--memory-budget-bytes", &MEMORY_BUDGET_BYTES.to_string()])
}

impl Served {
    async fn worker(&self) -> Worker {
        Worker::open(Channel::from_shared(format!("http://{}", self.address)).unwrap().connect().await.unwrap()).await
    }

    /// A worker that behaves is served, as often as this.
    async fn others_go_on(&self, rollout: &str, times: usize) {
        let mut worker = self.worker().await;
        for _ in 0..times {
            assert_eq!(worker.report(&about("run", rollout), heartbeat()).await.outcome(), AnswerOutcome::Accepted);
        }
    }
}

/// A connection whose streams are written byte by byte, and never read unless asked.
struct Connection {
    client: h2::client::SendRequest<Bytes>,
    address: String,
    pings: h2::PingPong,
}

impl Connection {
    async fn open(served: &Served) -> Self {
        let stream = TcpStream::connect(&served.address).await.unwrap();
        let (client, mut connection) = h2::client::handshake(stream).await.unwrap();
        let pings = connection.ping_pong().unwrap();
        tokio::spawn(connection);
        Self { client, address: served.address.clone(), pings }
    }

    async fn report(&mut self) -> (SendStream<Bytes>, ResponseFuture) {
        self.ask("Report").await
    }

    async fn ask(&mut self, method: &str) -> (SendStream<Bytes>, ResponseFuture) {
        self.ask_with("HarnessService", method, "").await
    }

    /// A request with this header besides.
    async fn ask_with(&mut self, service: &str, method: &str, header: &str) -> (SendStream<Bytes>, ResponseFuture) {
        let uri = format!("http://{}/hedgerow.v1.{service}/{method}", self.address);
        let request = http::Request::post(uri).header("content-type", "application/grpc").header("te", "trailers");
        let request = request.header("x-long", header);
        self.client = self.client.clone().ready().await.unwrap();
        let (response, sender) = self.client.send_request(request.body(()).unwrap(), false).unwrap();
        (sender, response)
    }

    /// Waits until the service has taken all frames before this.
    async fn taken(&mut self) {
        self.pings.ping(h2::Ping::opaque()).await.unwrap();
    }
}

#[tokio::test]
async fn claims_do_not_hold_what_they_claim() {
    const CONNECTIONS: usize = 40;
    let served = served();
    served.others_go_on("before", 1).await;
    let before = served.resident_bytes();
    let most = u32::try_from(limits::REQUEST_MESSAGE_BYTES_MAX).unwrap();
    let begun: Bytes = framed(most, &[7; 100]).into();
    let mut held = Vec::new();
    for _ in 0..CONNECTIONS {
        let mut connection = Connection::open(&served).await;
        for _ in 0..limits::HTTP2_CONNECTION_STREAMS_MAX {
            let (mut sender, response) = connection.report().await;
            sender.send_data(begun.clone(), false).unwrap();
            held.push((sender, response));
        }
        connection.taken().await;
    }
    served.others_go_on("beside", 100).await;
    let each = (served.resident_bytes_most() - before) / held.len() as u64;
    assert!(each < 128 << 10, "{} streams take {each} bytes each", held.len());
}

#[tokio::test]
async fn a_stream_does_not_keep_what_its_largest_message_took() {
    const STREAMS: usize = 24;
    const LARGE_BYTES: usize = 32 << 20;
    let served = served();
    let large = vec![7; LARGE_BYTES / 4];
    let call = crate::service::call("large", "main", 1, &large, &[1]);
    // More than the rollout may hold, so that it is refused, and nothing of it stays.
    let rollout = about("run", "large");
    let large: Bytes = request(1, &rollout, Event::Call(call)).into();
    let mut held = Vec::new();
    for _ in 0..STREAMS {
        let mut connection = Connection::open(&served).await;
        let (mut sender, response) = connection.report().await;
        sender.send_data(large.clone(), false).unwrap();
        let mut body = response.await.unwrap().into_body();
        let answer = answer(&mut body).await;
        assert!(answer.request_seq == 1, "{answer:?}");
        held.push((sender, body));
    }
    // The allocator gives back what is free a little later.
    let most = (STREAMS * LARGE_BYTES / 4) as u64;
    let mut now = u64::MAX;
    for _ in 0..100 {
        served.others_go_on("beside", 1).await;
        now = served.resident_bytes();
        if now < most {
            break;
        }
    }
    assert!(now < most, "{STREAMS} silent streams, and {now} bytes");
}

#[tokio::test]
async fn very_many_requests_of_nothing_are_refused_before_they_are_decoded() {
    const BATCH_BYTES: usize = 32 << 20;
    let served = served();
    served.others_go_on("before", 1).await;
    let before = served.resident_bytes();
    let batch: Vec<u8> = [0x0a, 0].repeat(BATCH_BYTES / 2);
    let mut connection = Connection::open(&served).await;
    let (mut sender, response) = connection.ask("ReportBatch").await;
    sender.send_data(framed(u32::try_from(BATCH_BYTES).unwrap(), &batch).into(), true).unwrap();
    let response = response.await.unwrap();
    let status = tonic::Status::from_header_map(response.headers()).expect("a status");
    let reason = tonic_types::StatusExt::get_details_error_info(&status).map(|info| info.reason);
    assert_eq!((status.code(), reason.as_deref()), (tonic::Code::InvalidArgument, Some("over_limit")));
    let more = served.resident_bytes_most() - before;
    assert!(more < 4 * BATCH_BYTES as u64, "{more} bytes");
}

/// A message with this one in this field.
fn within(tag: u8, message: &[u8]) -> Vec<u8> {
    let mut bytes = vec![tag << 3 | 2];
    prost::encoding::encode_varint(message.len() as u64, &mut bytes);
    bytes.extend(message);
    bytes
}

/// The event of a request, with this list of calls in it: bytes are as they are sent.
fn kept_by_one(request_seq: u8, list: &[u8]) -> Vec<u8> {
    let rollout = about("run", "listed").encode_to_vec();
    let seal = within(1, &within(1, &within(2, list)));
    [vec![0x08, request_seq], within(2, &rollout), within(7, &seal)].concat()
}

#[tokio::test]
async fn lists_of_nothing_are_refused_before_they_are_decoded() {
    const STREAMS: usize = 4;
    const LIST_BYTES: usize = 32 << 20;
    let served = served();
    served.others_go_on("before", 1).await;
    let before = served.resident_bytes();
    let listed = kept_by_one(1, &[0x0a, 0].repeat(LIST_BYTES / 2));
    let sent: Bytes = framed(u32::try_from(listed.len()).unwrap(), &listed).into();
    let mut held = Vec::new();
    for _ in 0..STREAMS {
        let mut connection = Connection::open(&served).await;
        let (mut sender, response) = connection.report().await;
        sender.send_data(sent.clone(), false).unwrap();
        held.push((sender, response));
    }
    for (mut sender, response) in held {
        let mut body = response.await.unwrap().into_body();
        let refused = answer(&mut body).await;
        assert_eq!((refused.request_seq, refused.outcome()), (1, AnswerOutcome::Refused));
        let refusal = refused.refusal.unwrap();
        assert_eq!((refusal.reason.as_str(), refusal.field.as_str()), ("over_limit", "seal.kept.agents"));
        sender.send_data(request(2, &about("run", "listed"), heartbeat()).into(), false).unwrap();
        assert_eq!(answer(&mut body).await.outcome(), AnswerOutcome::Accepted, "the stream goes on");
    }
    // A batch of some that are each not too long.
    let some = within(1, &kept_by_one(1, &[0x0a, 0].repeat(limits::KEPT_CALLS_MAX)));
    let batch = some.repeat(LIST_BYTES / some.len());
    let mut connection = Connection::open(&served).await;
    let (mut sender, response) = connection.ask("ReportBatch").await;
    sender.send_data(framed(u32::try_from(batch.len()).unwrap(), &batch).into(), true).unwrap();
    let response = response.await.unwrap();
    let status = tonic::Status::from_header_map(response.headers()).expect("a status");
    assert_eq!(status.code(), tonic::Code::InvalidArgument);
    let more = served.resident_bytes_most() - before;
    assert!(more < ((STREAMS + 1) * LIST_BYTES * 2) as u64, "{more} bytes");
}

async fn answer(body: &mut RecvStream) -> v1::Answer {
    let data = body.data().await.unwrap().unwrap();
    body.flow_control().release_capacity(data.len()).unwrap();
    let response = v1::ReportResponse::decode(&data[5..]).unwrap();
    match response.response.unwrap() {
        v1::report_response::Response::Answer(answer) => answer,
        v1::report_response::Response::Notice(notice) => panic!("{notice:?}"),
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn what_is_sent_ahead_of_a_reader_is_bounded_over_all_connections() {
    const CONNECTIONS: usize = 24;
    // As much as the windows of a connection let through, twice.
    let stream_bytes = 2 * limits::HTTP2_STREAM_WINDOW_BYTES as usize;
    let served = served();
    let rollout = about("run", "unread");
    // Each stream first has more answers than it may have unread, then sends what nobody will read.
    let many = limits::STREAM_ANSWERS_OUTSTANDING_MAX as u64 + 200;
    let unread: Bytes = (0..many).flat_map(|number| request(number, &rollout, heartbeat())).collect::<Vec<u8>>().into();
    let more: Bytes = vec![0; stream_bytes].into();
    let mut held = Vec::new();
    for _ in 0..CONNECTIONS {
        let mut connection = Connection::open(&served).await;
        for _ in 0..limits::HTTP2_CONNECTION_STREAMS_MAX {
            let (mut sender, response) = connection.report().await;
            sender.send_data(unread.clone(), false).unwrap();
            sender.send_data(more.clone(), false).unwrap();
            held.push((sender, response));
        }
    }
    let bound = MEMORY_BUDGET_BYTES + 2 * limits::EdgeBytes::beside(MEMORY_BUDGET_BYTES).unread as u64;
    let sent = CONNECTIONS as u64 * u64::from(limits::HTTP2_CONNECTION_WINDOW_BYTES);
    assert!(sent > bound, "the windows alone would let through more");
    let mut most = 0;
    for round in 0..200 {
        served.others_go_on(&format!("beside-{round}"), 20).await;
        most = most.max(served.resident_bytes_most());
    }
    assert!(most < bound, "{most} bytes");
}

/// The transport holds some hundred bytes for each frame, whatever is in it.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn frames_of_a_byte_are_bounded_over_all_connections() {
    const CONNECTIONS: usize = 24;
    const FRAMES: usize = 40 * 1024 / limits::HTTP2_CONNECTION_STREAMS_MAX as usize;
    let served = served();
    let rollout = about("run", "unread");
    let many = limits::STREAM_ANSWERS_OUTSTANDING_MAX as u64 + 200;
    let unread: Bytes = (0..many).flat_map(|number| request(number, &rollout, heartbeat())).collect::<Vec<u8>>().into();
    served.others_go_on("before", 1).await;
    let mut held = Vec::new();
    for _ in 0..CONNECTIONS {
        let mut connection = Connection::open(&served).await;
        for _ in 0..limits::HTTP2_CONNECTION_STREAMS_MAX {
            let (mut sender, response) = connection.report().await;
            sender.send_data(unread.clone(), false).unwrap();
            for _ in 0..FRAMES {
                // One that was cut off has nothing more to send.
                if sender.send_data(Bytes::from_static(&[0]), false).is_err() {
                    break;
                }
            }
            held.push((sender, response));
        }
    }
    let before = MEMORY_BUDGET_BYTES;
    for round in 0..100 {
        served.others_go_on(&format!("beside-{round}"), 20).await;
    }
    let bound = before + 2 * limits::EdgeBytes::beside(MEMORY_BUDGET_BYTES).unread as u64;
    let sent =
        (CONNECTIONS * FRAMES * limits::HTTP2_CONNECTION_STREAMS_MAX as usize * limits::HTTP2_DATA_FRAME_BYTES) as u64;
    assert!(sent > 2 * bound, "without a bound it would be more");
    let most = served.resident_bytes_most();
    assert!(most < bound, "{most} bytes");
}

/// Each has come whole, and holds its room until it ends.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn requests_that_never_end_are_bounded_over_all_connections() {
    const CONNECTIONS: usize = 24;
    const MESSAGE_BYTES: usize = 1900 << 10;
    let served = served();
    served.others_go_on("before", 1).await;
    let before = served.resident_bytes();
    let edge = limits::EdgeBytes::beside(MEMORY_BUDGET_BYTES);
    let call = crate::service::call("large", "main", 1, &vec![7; MESSAGE_BYTES / 4], &[1]);
    let one = v1::ReportRequest::decode(&request(1, &about("run", "large"), Event::Call(call))[5..]).unwrap();
    let batch = v1::ReportBatchRequest { requests: vec![one] }.encode_to_vec();
    let message: Bytes = framed(u32::try_from(batch.len()).unwrap(), &batch).into();
    let mut held = Vec::new();
    for _ in 0..CONNECTIONS {
        let mut connection = Connection::open(&served).await;
        for _ in 0..limits::HTTP2_CONNECTION_STREAMS_MAX {
            let (mut sender, response) = connection.ask("ReportBatch").await;
            sender.send_data(message.clone(), false).unwrap();
            held.push((sender, response));
        }
    }
    for round in 0..100 {
        served.others_go_on(&format!("beside-{round}"), 20).await;
    }
    let bound = edge.receive + edge.receive_own + edge.unread * 3 / 2;
    assert!(held.len() * MESSAGE_BYTES > 2 * bound, "without a bound on all it would be more");
    // Each stream and connection takes something besides.
    let most = served.resident_bytes_most() - before;
    assert!(most < (bound + bound / 8) as u64, "{most} bytes for {} requests", held.len());
}

#[tokio::test]
async fn requests_that_wait_do_not_hold_their_headers() {
    const CONNECTIONS: usize = 40;
    let served = served();
    let long = "x".repeat(limits::HTTP2_HEADER_LIST_BYTES_MAX as usize - 1024);
    let mut held = Vec::new();
    let mut each = [0; 2];
    for (round, header) in ["", long.as_str()].into_iter().enumerate() {
        served.others_go_on("before", 1).await;
        let before = served.resident_bytes();
        for _ in 0..CONNECTIONS {
            let mut connection = Connection::open(&served).await;
            for _ in 0..limits::HTTP2_CONNECTION_STREAMS_MAX {
                held.push(connection.ask_with("HarnessService", "ReportBatch", header).await);
            }
            connection.taken().await;
        }
        served.others_go_on("beside", 100).await;
        let requests = CONNECTIONS as u64 * u64::from(limits::HTTP2_CONNECTION_STREAMS_MAX);
        each[round] = served.resident_bytes().saturating_sub(before) / requests;
    }
    assert!(each[1] < each[0] + (10 << 10), "a request holds {} bytes without, and {} with headers", each[0], each[1]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn what_is_on_its_way_to_trainers_that_do_not_read_is_bounded_over_all() {
    const RUNS: usize = 3;
    let served = served();
    let mut worker = served.worker().await;
    let prompt = vec![7; 1_000_000];
    for run in 0..RUNS {
        let rollout = about(&format!("run-{run}"), "large");
        let call = crate::service::call("large", "main", 1, &prompt, &[1]);
        assert_eq!(worker.report(&rollout, Event::Call(call)).await.outcome(), AnswerOutcome::Accepted);
        assert_eq!(worker.report(&rollout, crate::life::finish(1.0)).await.outcome(), AnswerOutcome::Accepted);
    }
    let mut held = Vec::new();
    for run in 0..RUNS {
        let subscription =
            v1::Subscription { ephemeral: true, ..crate::service::subscription(&format!("run-{run}"), "") };
        let first = v1::subscribe_request::Request::Subscription(subscription);
        let first = v1::SubscribeRequest { request: Some(first) }.encode_to_vec();
        let first: Bytes = framed(u32::try_from(first.len()).unwrap(), &first).into();
        for _ in 0..limits::RUN_CONSUMER_GROUPS_MAX / limits::HTTP2_CONNECTION_STREAMS_MAX as usize {
            let mut connection = Connection::open(&served).await;
            for _ in 0..limits::HTTP2_CONNECTION_STREAMS_MAX {
                let (mut sender, response) = connection.ask_with("TrainerService", "Subscribe", "").await;
                sender.send_data(first.clone(), false).unwrap();
                held.push((sender, response));
            }
        }
    }
    for round in 0..100 {
        served.others_go_on(&format!("beside-{round}"), 20).await;
    }
    // What each has for itself besides is small, but let there be some for the transport.
    let bound = MEMORY_BUDGET_BYTES as usize
        + limits::EdgeBytes::beside(MEMORY_BUDGET_BYTES).trainers
        + held.len() * 2 * limits::UNIT_MESSAGE_BYTES_MAX;
    let most = served.resident_bytes_most();
    assert!(held.len() * limits::TRAINER_BYTES_OUTSTANDING_MAX > bound, "without a bound on all it would be more");
    assert!(most < bound as u64, "{most} bytes for {} trainers", held.len());
}

/// The reason that an answer before any body has, if it is a refusal.
fn refused_for(response: &http::Response<RecvStream>) -> Option<String> {
    let status = tonic::Status::from_header_map(response.headers())?;
    let details = tonic_types::StatusExt::get_error_details(&status);
    assert!(details.retry_info().is_some(), "{status:?}");
    details.error_info().map(|info| info.reason.clone())
}

/// Each takes some kilobytes, whatever it says.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn open_requests_are_bounded_over_all_connections_and_each_has_its_own() {
    let served = served();
    served.others_go_on("before", 1).await;
    let before = served.resident_bytes();
    let edge = limits::EdgeBytes::beside(MEMORY_BUDGET_BYTES);
    let each = limits::HTTP2_CONNECTION_STREAMS_MAX as usize - limits::REQUESTS_CONNECTION_OWN;
    let connections = edge.requests_max() / each + 2;
    let (mut held, mut refused) = (Vec::new(), 0);
    for _ in 0..connections {
        let mut connection = Connection::open(&served).await;
        for _ in 0..limits::HTTP2_CONNECTION_STREAMS_MAX {
            let (sender, response) = connection.report().await;
            let response = response.await.unwrap();
            if let Some(reason) = refused_for(&response) {
                assert_eq!(reason, "service_full");
                refused += 1;
            }
            held.push((sender, response));
        }
    }
    assert_eq!(refused, connections * each - edge.requests_max());
    served.others_go_on("beside", 10).await;
    let most = served.resident_bytes_most() - before;
    assert!(most < (edge.requests + edge.connections) as u64, "{most} bytes");
    drop(held);
    // Places come back as the connections end.
    let mut connection = Connection::open(&served).await;
    let mut fits = 0;
    while fits < 10 {
        let (_, response) = connection.report().await;
        fits = if refused_for(&response.await.unwrap()).is_none() { fits + 1 } else { 0 };
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn lists_that_nobody_reads_are_bounded_over_all_connections() {
    const CONNECTIONS: usize = 8;
    const ROLLOUTS: usize = 400;
    let served = served();
    let mut worker = served.worker().await;
    let keys: Vec<String> = (0..10).map(|key| format!("{key}")).collect();
    let value = "x".repeat(200);
    let many: Vec<(&str, &str)> = keys.iter().map(|key| (key.as_str(), value.as_str())).collect();
    for number in 0..ROLLOUTS {
        let answer = worker.report(&about("run", &format!("{number}")), crate::life::tags(&many)).await;
        assert_eq!(answer.outcome(), AnswerOutcome::Accepted);
    }
    let ask = v1::ListRolloutsRequest { run_id: "run".to_owned(), page_size: 1000, ..Default::default() };
    let ask = ask.encode_to_vec();
    let ask: Bytes = framed(u32::try_from(ask.len()).unwrap(), &ask).into();
    let before = served.resident_bytes();
    let (mut held, mut refused) = (Vec::new(), 0);
    for _ in 0..CONNECTIONS {
        let mut connection = Connection::open(&served).await;
        for _ in 0..limits::HTTP2_CONNECTION_STREAMS_MAX {
            let (mut sender, response) = connection.ask_with("InspectService", "ListRollouts", "").await;
            sender.send_data(ask.clone(), true).unwrap();
            let response = response.await.unwrap();
            if let Some(reason) = refused_for(&response) {
                assert_eq!(reason, "service_full");
                refused += 1;
            }
            held.push((sender, response));
        }
    }
    let shown = limits::EdgeBytes::beside(MEMORY_BUDGET_BYTES).shown;
    let page = ROLLOUTS * keys.len() * value.len();
    assert!(refused > held.len() / 2 && refused < held.len(), "{refused} of {}", held.len());
    let most = served.resident_bytes_most() - before;
    assert!(held.len() * page > 4 * shown && most < 2 * shown as u64, "{most} bytes");
    served.others_go_on("beside", 10).await;
}
