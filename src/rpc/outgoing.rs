//! What is on its way to one trainer: bounded in bytes, so that many small messages may be ahead of its reader, or few large ones.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use futures_util::Stream;
use prost::Message;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};
use tonic::Status;

use crate::limits;
use crate::proto::v1;

type Response = Result<v1::SubscribeResponse, Status>;

/// Where a subscription puts what is to be sent.
#[derive(Clone)]
pub(super) struct Outgoing {
    line: mpsc::Sender<(Response, Option<OwnedSemaphorePermit>)>,
    room_bytes: Arc<Semaphore>,
}

/// What the transport takes, as fast as it is read.
pub(super) struct Responses {
    line: mpsc::Receiver<(Response, Option<OwnedSemaphorePermit>)>,
    room_bytes: Arc<Semaphore>,
}

/// Both ends of a stream to a trainer.
pub(super) fn stream() -> (Outgoing, Responses) {
    let (sender, line) = mpsc::channel(limits::TRAINER_MESSAGES_OUTSTANDING_MAX);
    let room_bytes = Arc::new(Semaphore::new(limits::TRAINER_BYTES_OUTSTANDING_MAX));
    (Outgoing { line: sender, room_bytes: Arc::clone(&room_bytes) }, Responses { line, room_bytes })
}

impl Outgoing {
    /// Sends a message; waits for room. False if nobody takes it any more.
    pub(super) async fn send(&self, response: v1::SubscribeResponse) -> bool {
        let bytes = response.encoded_len().clamp(1, limits::TRAINER_BYTES_OUTSTANDING_MAX);
        let room = Arc::clone(&self.room_bytes).acquire_many_owned(u32::try_from(bytes).unwrap_or(u32::MAX));
        let Ok(room) = room.await else { return false };
        self.line.send((Ok(response), Some(room))).await.is_ok()
    }

    /// Says how the stream ends, if somebody is there to hear it.
    pub(super) async fn end(&self, status: Status) {
        let _ = self.line.send((Err(status), None)).await;
    }

    /// Waits until nobody takes anything any more.
    pub(super) async fn closed(&self) {
        self.line.closed().await;
    }
}

impl Stream for Responses {
    type Item = Response;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Response>> {
        self.line.poll_recv(context).map(|next| next.map(|(response, _room)| response))
    }
}

impl Drop for Responses {
    fn drop(&mut self) {
        self.room_bytes.close();
    }
}
