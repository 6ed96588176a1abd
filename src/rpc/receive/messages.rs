//! The messages of a stream of requests, read without the transport's buffer, which would keep room for the longest of them.

use std::future::poll_fn;
use std::marker::PhantomData;
use std::sync::Arc;

use bytes::{Buf as _, Bytes};
use parking_lot::Mutex;
use prost::Message;
use tonic::codegen::http;
use tonic::{Request, Status, Streaming};

use crate::error::{Reason, Refusal};
use crate::limits;
use crate::proto::v1;
use crate::rpc::refused;

use super::BATCH;
use super::framing::HEADER_BYTES;
use super::gather::Gather;
use super::lists::{self, Listed};
use super::scan::{self, Told};

/// Messages as they come. What was read of a message is not lost if waiting for the next one is given up.
pub(in crate::rpc) struct Messages<M> {
    gather: Gather,
    /// Whole messages that are not read yet.
    whole: Bytes,
    message: PhantomData<fn() -> M>,
}

/// A request's body on its way past the transport's reader.
#[derive(Clone)]
struct HandedOver(Arc<Mutex<Option<Gather>>>);

/// Puts the body where [`messages`] finds it.
pub(super) fn hand_over<B>(request: &mut http::Request<B>, gather: Gather) {
    request.extensions_mut().insert(HandedOver(Arc::new(Mutex::new(Some(gather)))));
}

/// The messages of a request that came through this layer.
///
/// # Errors
/// If it did not.
pub(in crate::rpc) fn messages<M: Message + Default>(
    mut request: Request<Streaming<M>>,
) -> Result<Messages<M>, Status> {
    Ok(Messages { gather: handed_over(&mut request)?, whole: Bytes::new(), message: PhantomData })
}

fn handed_over<B>(request: &mut Request<B>) -> Result<Gather, Status> {
    let gather = request.extensions_mut().remove::<HandedOver>().and_then(|handed| handed.0.lock().take());
    gather.ok_or_else(|| refused(Refusal::new(Reason::Internal, "the request's body was not handed over")))
}

/// The one message of a request, as it was sent. It holds its room.
pub(in crate::rpc) struct WholeRequest {
    pub(in crate::rpc) message: Bytes,
    _room: Option<Gather>,
}

/// The one message of a request that came through this layer, once the request has ended.
///
/// # Errors
/// If it did not, or what comes is not one message.
pub(in crate::rpc) async fn whole<B>(mut request: Request<B>) -> Result<WholeRequest, Status> {
    let mut messages = Messages::<()> { gather: handed_over(&mut request)?, whole: Bytes::new(), message: PhantomData };
    let not_one = |message| refused(Refusal::new(Reason::InvalidValue, message).field("request"));
    let message = messages.next().await?.ok_or_else(|| not_one("the request has no message"))?;
    if messages.next().await?.is_some() {
        return Err(not_one("the request has more than one message"));
    }
    Ok(WholeRequest { message, _room: Some(messages.gather) })
}

/// Whether a batch lists so much that to read it takes milliseconds.
pub(in crate::rpc) fn is_long_batch(message: &Bytes) -> bool {
    scan::is_long(lists::of_method(BATCH), message)
}

/// A long batch that was sent, decoded. Whoever gathered it has not counted it.
///
/// # Errors
/// If it is none, or lists too much.
pub(in crate::rpc) fn long_batch(message: Bytes) -> Result<v1::ReportBatchRequest, Refusal> {
    scan::batch(lists::of_method(BATCH), &message)?;
    decoded(message)
}

/// A batch that is not long, decoded.
///
/// # Errors
/// If it is none.
pub(in crate::rpc) fn short_batch(message: Bytes) -> Result<v1::ReportBatchRequest, Refusal> {
    decoded(message)
}

#[cfg(test)]
impl WholeRequest {
    /// One that holds no room.
    pub(in crate::rpc) fn new(message: Vec<u8>) -> Self {
        Self { message: message.into(), _room: None }
    }
}

#[cfg(test)]
impl<M> Messages<M> {
    /// A stream of which nothing comes.
    pub(in crate::rpc) fn none(clock: crate::store::clock::Clock) -> Self {
        use super::gather::Whole;
        let room = super::room::Room::new(Arc::new(tokio::sync::Semaphore::new(0)), None);
        let gather = Gather::new(tonic::body::Body::empty(), 0, Whole::HandedOn, (room, None), clock);
        Self { gather, whole: Bytes::new(), message: PhantomData }
    }
}

/// What has come of a stream of reports.
#[expect(clippy::large_enum_variant, reason = "there is one at a time, and each request would have to be put in a box")]
pub(in crate::rpc) enum Received {
    /// A request.
    Request(v1::ReportRequest),
    /// One that cannot be taken, as far as it could be read, and why: the stream goes on.
    Refused(Told, Refusal),
}

impl<M: Message + Default + Listed> Messages<M> {
    /// The next message; none when the client has ended the stream.
    ///
    /// # Errors
    /// How the stream ends if what comes is no message of this type, lists too much, is too large, too slow, or broken.
    pub(in crate::rpc) async fn message(&mut self) -> Result<Option<M>, Status> {
        let message = self.next().await?;
        message.map(|message| decode(message).map_err(refused)).transpose()
    }

    /// Whether there is a message that need not be waited for.
    pub(in crate::rpc) fn is_at_hand(&self) -> bool {
        !self.whole.is_empty() || self.gather.is_at_hand()
    }
}

impl<M> Messages<M> {
    /// The next message as it was sent.
    async fn next(&mut self) -> Result<Option<Bytes>, Status> {
        if self.whole.is_empty() {
            match poll_fn(|context| self.gather.poll_whole(context)).await {
                Some(whole) => self.whole = whole?,
                None => return Ok(None),
            }
        }
        let too_short = |_| refused(Refusal::new(Reason::Internal, "a message was handed on that is not whole"));
        // Whoever gathers it has seen that it is not compressed.
        self.whole.try_get_u8().map_err(too_short)?;
        let length = self.whole.try_get_u32().map_err(too_short)? as usize;
        debug_assert!(length <= self.whole.len(), "a header of {HEADER_BYTES} bytes, and its message");
        Ok(Some(self.whole.split_to(length.min(self.whole.len()))))
    }
}

impl Messages<v1::ReportRequest> {
    /// The next request as it was sent; none when the client has ended the stream. May be given up while it is waited for.
    ///
    /// # Errors
    /// How the stream ends if what comes is too large, too slow, or broken.
    pub(in crate::rpc) async fn request(&mut self) -> Result<Option<Bytes>, Status> {
        self.next().await
    }
}

/// Whether a request lists so much that to read it takes milliseconds.
pub(in crate::rpc) fn is_long(message: &Bytes) -> bool {
    message.len() > limits::LONG_MESSAGE_FIELDS && scan::is_long(v1::ReportRequest::SHAPE, message)
}

/// A request that was sent, decoded.
///
/// # Errors
/// How the stream ends if it is no message of which the number could be told.
pub(in crate::rpc) fn received(message: Bytes) -> Result<Received, Status> {
    match decode(message.clone()) {
        Ok(request) => Ok(Received::Request(request)),
        Err(refusal) => told(&message, refusal),
    }
}

/// A request that cannot be taken, as far as it can be read.
fn told(message: &Bytes, refusal: Refusal) -> Result<Received, Status> {
    match scan::told(message) {
        Some(mut told) => {
            let refusal = Refusal { call_id: told.call.take(), agent_id: told.agent.take(), ..refusal };
            Ok(Received::Refused(told, refusal))
        }
        None => Err(refused(refusal)),
    }
}

/// What was sent, unless it lists too much or means nothing.
fn decode<M: Message + Default + Listed>(message: Bytes) -> Result<M, Refusal> {
    if message.len() >= limits::COUNTED_MESSAGE_BYTES_MIN {
        scan::request(M::SHAPE, &message)?;
    }
    decoded(message)
}

fn decoded<M: Message + Default>(message: Bytes) -> Result<M, Refusal> {
    M::decode(message).map_err(|error| {
        let message = format!("what came is no message of this contract: {error}");
        Refusal::new(Reason::InvalidValue, message).field("request")
    })
}
