//! Answers that were encoded before they are sent.
//!
//! A large answer takes tens of milliseconds to encode, and whoever's turn it is on that thread waits meanwhile. So it is encoded on
//! a thread that may take long, and stands as an extension of an empty answer, whose place it takes on the way out.

use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::Bytes;
use http_body::Frame;
use prost::Message;
use tonic::Status;
use tonic::body::Body;
use tonic::codegen::http::{HeaderMap, HeaderValue};

/// A message with its length before it, as gRPC frames it.
#[derive(Clone)]
pub(super) struct Encoded(Bytes);

/// Compression, then the length.
const PREFIX_BYTES: usize = 5;

impl Encoded {
    /// Encodes a message; none if it is longer than gRPC can say.
    pub(super) fn of(message: &impl Message) -> Option<Self> {
        let length = u32::try_from(message.encoded_len()).ok()?;
        let mut framed = Vec::with_capacity(PREFIX_BYTES + message.encoded_len());
        framed.push(0);
        framed.extend(length.to_be_bytes());
        message.encode_raw(&mut framed);
        Some(Self(framed.into()))
    }

    /// Bytes of the message.
    pub(super) fn message_bytes(&self) -> usize {
        self.0.len() - PREFIX_BYTES
    }

    /// It as the body of an answer.
    pub(super) fn into_body(self) -> Body {
        Body::new(Whole { message: Some(self.0), is_over: false })
    }
}

/// One message, then that all is well.
struct Whole {
    message: Option<Bytes>,
    is_over: bool,
}

impl http_body::Body for Whole {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        if let Some(message) = self.message.take() {
            return Poll::Ready(Some(Ok(Frame::data(message))));
        }
        if std::mem::replace(&mut self.is_over, true) {
            return Poll::Ready(None);
        }
        let mut trailers = HeaderMap::new();
        trailers.insert(Status::GRPC_STATUS, HeaderValue::from_static("0"));
        Poll::Ready(Some(Ok(Frame::trailers(trailers))))
    }
}
