//! Real requests over the loopback.

#![expect(clippy::expect_used, reason = "a test ends where its ground is not as it says")]

use std::net::SocketAddr;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::oneshot;

use super::*;
use crate::error::Reason;

struct Served {
    address: SocketAddr,
    state: HttpState,
    stop: oneshot::Sender<()>,
    task: tokio::task::JoinHandle<()>,
}

async fn start(bounds: Bounds) -> Served {
    let readiness = Arc::new(Readiness::starting("replaying the log"));
    let state = HttpState { telemetry: Telemetry::new(), readiness };
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let address = listener.local_addr().expect("an address");
    let (stop, stopped) = oneshot::channel();
    let task = tokio::spawn(serve_within(bounds, listener, state.clone(), async {
        stopped.await.ok();
    }));
    Served { address, state, stop, task }
}

async fn send(address: SocketAddr, request: &[u8]) -> String {
    let mut stream = TcpStream::connect(address).await.expect("a connection");
    stream.write_all(request).await.ok();
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).await.ok();
    String::from_utf8(answer).expect("text")
}

async fn get_path(address: SocketAddr, path: &str) -> (u16, String) {
    let answer = send(address, format!("GET {path} HTTP/1.1\r\nhost: test\r\n\r\n").as_bytes()).await;
    let (head, body) = answer.split_once("\r\n\r\n").expect("a head");
    assert!(head.contains("connection: close"), "{head}");
    (head.split(' ').nth(1).expect("a status").parse().expect("a number"), body.to_owned())
}

#[tokio::test]
async fn health_and_readiness_follow_the_service() {
    let served = start(BOUNDS).await;
    let at = served.address;
    let not_ready = |reason: &str| (503, format!("{{\"ready\":false,\"reason\":\"{reason}\"}}"));
    assert_eq!(get_path(at, "/healthz").await, (200, "ok".to_owned()));
    assert_eq!(get_path(at, "/readyz").await, not_ready("replaying the log"));
    served.state.readiness.ready();
    assert_eq!(get_path(at, "/readyz").await, (200, "{\"ready\":true}".to_owned()));
    served.state.readiness.draining();
    assert_eq!(get_path(at, "/readyz").await, not_ready("draining"));
    assert_eq!(get_path(at, "/healthz").await, (200, "ok".to_owned()));
    served.state.readiness.failed("the disk is gone");
    assert_eq!(get_path(at, "/healthz").await, (503, "the disk is gone".to_owned()));
    assert_eq!(get_path(at, "/readyz").await, not_ready("the disk is gone"));
    served.stop.send(()).expect("a server");
    served.task.await.expect("a clean end");
}

#[tokio::test]
async fn metrics_are_text_and_nothing_else_is_there() {
    let served = start(BOUNDS).await;
    served.state.telemetry.refused(Reason::RunNotFound);
    let (status, text) = get_path(served.address, "/metrics").await;
    assert_eq!(status, 200);
    assert!(text.contains("hedgerow_requests_refused_total{reason=\"run_not_found\"} 1\n"), "{text}");
    let (status, pointer) = get_path(served.address, "/").await;
    assert!(status == 200 && pointer.contains("/readyz") && pointer.contains("later release"), "{pointer}");
    assert_eq!(get_path(served.address, "/elsewhere").await.0, 404);
    let posted = send(served.address, b"POST /metrics HTTP/1.1\r\nhost: test\r\ncontent-length: 0\r\n\r\n").await;
    assert!(posted.starts_with("HTTP/1.1 405 "), "{posted}");
}

#[tokio::test]
async fn large_and_slow_requests_are_cut_off() {
    let served = start(Bounds { connection_life: Duration::from_millis(50), ..BOUNDS }).await;
    let slow = send(served.address, b"GET /healthz HTTP/1.1\r\nhost: te").await;
    assert!(!slow.contains("200 OK"), "{slow}");
    let served = start(Bounds { request_bytes: 1024, ..BOUNDS }).await;
    let large = format!("GET /healthz HTTP/1.1\r\nhost: test\r\nlarge: {}\r\n\r\n", "a".repeat(4096));
    let large = send(served.address, large.as_bytes()).await;
    assert!(!large.contains("200 OK"), "{large}");
    assert_eq!(get_path(served.address, "/healthz").await.0, 200, "others are served on");
}

#[tokio::test]
async fn connections_over_the_bound_wait_for_a_place() {
    let served = start(Bounds { connections: 1, ..BOUNDS }).await;
    let mut first = TcpStream::connect(served.address).await.expect("a connection");
    first.write_all(b"GET /healthz HTTP/1.1\r\n").await.expect("a write");
    let early = tokio::time::timeout(Duration::from_millis(50), get_path(served.address, "/healthz")).await;
    assert!(early.is_err(), "the one place is taken");
    let second = tokio::spawn(get_path(served.address, "/healthz"));
    first.write_all(b"host: test\r\n\r\n").await.expect("a write");
    let mut answer = String::new();
    first.read_to_string(&mut answer).await.expect("an answer");
    assert!(answer.starts_with("HTTP/1.1 200 "), "{answer}");
    assert_eq!(second.await.expect("an answer").0, 200);
}
