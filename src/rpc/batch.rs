//! `ReportBatch`: what simple clients report, answered when all of it is durable.
//!
//! The message is read here and not by the transport: one that lists very much is read by a thread that may take milliseconds for
//! it, which whoever is served by this one would wait for. Few are read so at once, and the next ones wait until these have their
//! room.

use std::sync::Arc;

use prost::Message as _;
use tokio::sync::OwnedSemaphorePermit;
use tonic::Status;

use crate::error::{Reason, Refusal};
use crate::limits;
use crate::log::Position;
use crate::proto::v1;

use super::harness::{Checked, checked, is_seal, weight};
use super::receive::{WholeRequest, is_long_batch, long_batch, short_batch};
use super::turns::Turn;
use super::{Shared, refused};

/// The requests of a batch.
struct Batch {
    requests: Vec<Read>,
    seals: usize,
    weight: usize,
}

/// A request that was decoded.
#[expect(clippy::large_enum_variant, reason = "a batch has one kind only")]
enum Read {
    /// It is checked when its turn comes.
    Decoded(v1::ReportRequest),
    Checked(Checked),
}

impl Read {
    fn checked(self) -> Checked {
        match self {
            Self::Decoded(request) => checked(request),
            Self::Checked(checked) => checked,
        }
    }
}

impl Batch {
    fn of(batch: v1::ReportBatchRequest, each: impl Fn(v1::ReportRequest) -> Read) -> Self {
        let requests = batch.requests;
        let seals = requests.iter().filter(|request| is_seal(request.event.as_ref())).count();
        let weight = requests.iter().map(weight).sum();
        Self { requests: requests.into_iter().map(each).collect(), seals, weight }
    }
}

impl Shared {
    /// The answers to a batch, once all are durable.
    ///
    /// # Errors
    /// If it is no batch, or lists more than is taken.
    pub(super) async fn answer_batch(&self, request: WholeRequest) -> Result<v1::ReportBatchResponse, Status> {
        let arrived_us = self.store.clock().now_us();
        let message = request.message.clone();
        // All at once: batches that each held some and waited for more would wait for each other.
        // Room for answers first, since clients may leave those unread: who waits for it holds nothing that others wait for.
        let (mut answers_room, mut turns) = (None, None);
        let batch = if is_long_batch(&message) {
            // The semaphores are never closed. Few long ones stand in line for room: each asks for the most that a batch may need.
            let among_batches = self.long_batches.acquire().await.ok();
            answers_room =
                self.answers_room(answers_bytes(limits::BATCH_REQUESTS_MAX, limits::BATCH_REQUESTS_MAX)).await;
            turns = Some((among_batches, self.long_messages.acquire().await.ok()));
            let each = |request| Read::Checked(checked(request));
            let read = move || long_batch(message).map(|batch| Batch::of(batch, each));
            let gone = |_| refused(Refusal::new(Reason::Internal, "the batch cannot be read"));
            tokio::task::spawn_blocking(read).await.map_err(gone)?
        } else {
            short_batch(message).map(|batch| Batch::of(batch, Read::Decoded))
        };
        let Batch { requests, seals, weight } = batch.map_err(refused)?;
        let answers_bytes = answers_bytes(requests.len(), seals);
        let _answers_room = match answers_room {
            Some(mut most) => most.split(answers_bytes),
            None => self.answers_room(answers_bytes).await,
        };
        let _in_flight = self.in_flight(weight).await;
        drop((request, turns));
        let (answers, last) = self.answer_all(requests).await;
        self.store.durable(last).await;
        self.answered_durably(arrived_us);
        Ok(v1::ReportBatchResponse { answers })
    }

    /// The answers, and the position that they wait for.
    async fn answer_all(&self, requests: Vec<Read>) -> (Vec<v1::Answer>, Position) {
        let mut answers = Vec::with_capacity(requests.len());
        let mut last = Position::default();
        let (clock, mut turn, mut answers_bytes) = (self.store.clock(), Turn::default(), 0);
        for request in requests {
            let begun_us = clock.now_us();
            turn.give_way(&self.lanes, begun_us).await;
            let (mut answer, position) = self.answer(None, request.checked()).await;
            turn.worked(begun_us, clock.now_us());
            if let Some(seal) = answer.seal.as_mut().filter(|_| answers_bytes > limits::BATCH_LISTS_BYTES_MAX) {
                (seal.missing, seal.agents_without_list) = (Vec::new(), Vec::new());
            }
            answers_bytes += answer.encoded_len();
            last = last.max(position);
            answers.push(answer);
        }
        (answers, last)
    }

    /// Room for the answers to a batch, until all are durable and leave together.
    async fn answers_room(&self, bytes: usize) -> Option<OwnedSemaphorePermit> {
        Arc::clone(&self.answers).acquire_many_owned(u32::try_from(bytes).unwrap_or(u32::MAX)).await.ok()
    }
}

/// What the answers to so many requests, of which so many are seals, take at most.
fn answers_bytes(requests: usize, seals: usize) -> usize {
    let lists = (seals * limits::ANSWER_BYTES_MAX).min(limits::BATCH_LISTS_BYTES_MAX + limits::ANSWER_BYTES_MAX);
    requests * limits::BATCH_ANSWER_BYTES + lists
}
