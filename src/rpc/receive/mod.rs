//! Messages that have come in part: what they may hold, and how long they may take.
//!
//! The transport would make room for a message by the length that it claims, and keep the room for the stream's life. So this
//! layer gathers messages itself ([`gather`]) and hands on whole ones only, whether to the transport's reader (requests of one
//! message) or to ours ([`messages`], for streams, which keep nothing of a message once it is read).
//!
//! Room is taken for what has *arrived* of a message that is not whole, never for what it claims: a part that each connection has
//! for itself, so that calls of usual size pass whatever others do; beyond that from a budget of the connection, and from one of
//! all. The bytes that make a message of a stream whole pass without asking; the one message of a request keeps its room until the
//! request has ended, for until then nobody takes it; and that of a batch longer, until its requests have their place in flight.
//! What its lists take once they are decoded counts there, too, but for those so long that they are decoded apart, a few at once.
//!
//! Nothing is decoded whose lists are longer than is taken ([`lists`], [`scan`]): an element may take two bytes of a message, and
//! dozens once it is decoded.
//!
//! Streams that all wait for room would wait for each other. So a message has only so long to become whole, and longer the more
//! of it has come; a stream whose message takes longer ends with a reason and a delay, and gives its room back. Time in which
//! nobody reads from the stream does not count.

mod framing;
mod gather;
mod lists;
mod messages;
mod room;
mod scan;
#[cfg(test)]
mod tests;

use std::sync::Arc;
use std::task::{Context, Poll};

use tokio::sync::Semaphore;
use tonic::body::Body;
use tonic::codegen::http::Request;
use tonic::server::NamedService;
use tower::{Layer, Service};

use crate::limits;
use crate::proto::v1::harness_service_server::HarnessServiceServer;
use crate::store::clock::Clock;

use super::connection::ConnectionShare;
use super::harness::Harness;

use gather::{Gather, Whole};
use room::Room;

pub(super) use messages::{
    Messages, Received, WholeRequest, is_long, is_long_batch, long_batch, messages, received, short_batch, whole,
};
pub(super) use room::ConnectionRoom;
pub(super) use scan::Told;

/// Methods whose requests are a stream that is read by [`Messages`].
const STREAMS: [&str; 2] = ["/hedgerow.v1.HarnessService/Report", "/hedgerow.v1.TrainerService/Subscribe"];

/// The method whose one message may hold very many requests; it is read by [`whole`].
const BATCH: &str = "/hedgerow.v1.HarnessService/ReportBatch";

/// Puts request bodies under the budget.
#[derive(Clone)]
pub(super) struct ReceiveLayer {
    all: Arc<Semaphore>,
    clock: Clock,
}

/// A service whose request bodies are under the budget.
#[derive(Clone)]
pub(super) struct Receive<S> {
    inner: S,
    layer: ReceiveLayer,
}

impl ReceiveLayer {
    /// With room for so much, over all connections.
    pub(super) fn new(bytes: usize, clock: Clock) -> Self {
        Self { all: Arc::new(Semaphore::new(bytes)), clock }
    }

    fn gather(&self, request: &Request<Body>, body: Body) -> Gather {
        let share = request.extensions().get::<ConnectionShare>();
        let room = Room::new(Arc::clone(&self.all), share.map(|share| Arc::clone(&share.receive)));
        let unread = share.map(|share| share.unread.reader());
        let path = request.uri().path();
        let whole = match path {
            path if STREAMS.contains(&path) => Whole::HandedOn,
            BATCH => Whole::Held { lists: lists::of_method(BATCH), count: scan::short_batch },
            path => Whole::Held { lists: lists::of_method(path), count: scan::request },
        };
        Gather::new(body, most_bytes(path), whole, (room, unread), self.clock.clone())
    }
}

/// The longest message that a method takes.
fn most_bytes(path: &str) -> usize {
    let service = path.trim_start_matches('/').split('/').next();
    if service == Some(<HarnessServiceServer<Harness> as NamedService>::NAME) {
        limits::REQUEST_MESSAGE_BYTES_MAX
    } else {
        limits::OTHER_MESSAGE_BYTES_MAX
    }
}

impl<S> Layer<S> for ReceiveLayer {
    type Service = Receive<S>;

    fn layer(&self, inner: S) -> Receive<S> {
        Receive { inner, layer: self.clone() }
    }
}

impl<S: Service<Request<Body>>> Service<Request<Body>> for Receive<S> {
    type Response = S::Response;
    type Error = S::Error;
    type Future = S::Future;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(context)
    }

    fn call(&mut self, mut request: Request<Body>) -> S::Future {
        let body = std::mem::replace(request.body_mut(), Body::empty());
        let gather = self.layer.gather(&request, body);
        if STREAMS.contains(&request.uri().path()) {
            messages::hand_over(&mut request, gather);
        } else if request.uri().path() == BATCH {
            // The transport waits for one message: an empty one.
            *request.body_mut() = Body::new(String::from("\0\0\0\0\0"));
            messages::hand_over(&mut request, gather);
        } else {
            *request.body_mut() = Body::new(gather);
        }
        self.inner.call(request)
    }
}
