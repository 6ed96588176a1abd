//! A client that gives up very many requests in the middle of a message, on a connection that lives on.

use std::time::Duration;

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};

use crate::hostile::{framed, request};
use crate::life::{Life, heartbeat};
use crate::service::{TestService, about};

const DATA: u8 = 0;
const HEADERS: u8 = 1;
const RST_STREAM: u8 = 3;
const SETTINGS: u8 = 4;
const PING: u8 = 6;
const ACK: u8 = 1;
const END_HEADERS: u8 = 4;
const PADDED: u8 = 8;

/// A connection of which the test writes each frame.
struct Bare {
    write: OwnedWriteHalf,
    read: OwnedReadHalf,
    address: String,
}

impl Bare {
    async fn open(service: &TestService) -> Self {
        let stream = TcpStream::connect(service.running.grpc_address).await.unwrap();
        let (read, write) = stream.into_split();
        let mut bare = Self { write, read, address: service.running.grpc_address.to_string() };
        bare.write.write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n").await.unwrap();
        bare.send(SETTINGS, 0, 0, &[]).await;
        bare
    }

    async fn send(&mut self, kind: u8, flags: u8, stream: u32, payload: &[u8]) {
        let [_, length @ ..] = u32::try_from(payload.len()).unwrap().to_be_bytes();
        let mut frame = [&length[..], &[kind, flags], &stream.to_be_bytes()].concat();
        frame.extend(payload);
        self.write.write_all(&frame).await.unwrap();
    }

    /// Begins a request to this method.
    async fn begin(&mut self, stream: u32, method: &str) {
        let path = format!("/hedgerow.v1.HarnessService/{method}");
        // POST and http by their numbers, then path, authority and content type, as they are.
        let mut block = vec![0x83, 0x86];
        for (name, value) in [(4, path.as_str()), (1, self.address.as_str()), (0x0f, "application/grpc")] {
            block.push(name);
            if name == 0x0f {
                block.push(31 - 15);
            }
            block.push(u8::try_from(value.len()).unwrap());
            block.extend(value.as_bytes());
        }
        self.send(HEADERS, END_HEADERS, stream, &block).await;
    }

    /// Sends a ping, and reads until it is answered, or a frame of DATA has come if that is waited for.
    async fn until(&mut self, wanted: u8) -> std::io::Result<()> {
        if wanted == PING {
            self.send(PING, 0, 0, &[7; 8]).await;
        }
        loop {
            let mut header = [0; 9];
            self.read.read_exact(&mut header).await?;
            let [high, middle, low, kind, flags, ..] = header;
            let mut payload = vec![0; u32::from_be_bytes([0, high, middle, low]) as usize];
            self.read.read_exact(&mut payload).await?;
            if kind == wanted && (kind == DATA || flags & ACK != 0) {
                return Ok(());
            }
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn requests_that_are_given_up_do_not_count_while_another_lives() {
    // More than all connections may have unread together.
    const ROUNDS: u32 = 320;
    const PART_BYTES: usize = 950_000;
    let mut life = Life::start().await;
    let mut bare = Bare::open(&life.service).await;
    bare.begin(1, "Report").await;
    bare.send(DATA, 0, 1, &request(1, &about("run", "lives"), heartbeat())).await;
    bare.until(DATA).await.unwrap();
    let mut half = framed(1 << 26, &[]);
    half.resize(PART_BYTES, 7);
    let mut padded = vec![255];
    padded.resize(PART_BYTES, 7);
    for round in 0..ROUNDS {
        let stream = 3 + 2 * round;
        // One is read from and never whole, the other is answered at once, and what comes then is of no interest.
        bare.begin(stream, if round % 2 == 0 { "Report" } else { "Nothing" }).await;
        bare.send(DATA, 0, stream, &half).await;
        bare.send(DATA, PADDED, stream, &padded).await;
        bare.send(RST_STREAM, 0, stream, &[0, 0, 0, 8]).await;
        let answered = tokio::spawn(async move {
            let answered = bare.until(PING).await;
            (bare, answered)
        });
        // If it were not read from any more, it would end in time.
        while !answered.is_finished() {
            life.service.clock.advance(Duration::from_millis(100));
            tokio::task::yield_now().await;
        }
        let answered = answered.await.unwrap();
        bare = answered.0;
        answered.1.unwrap();
    }
    bare.send(DATA, 0, 1, &request(2, &about("run", "lives"), heartbeat())).await;
    bare.until(DATA).await.unwrap();
    life.others_go_on("beside requests that were given up").await;
}
