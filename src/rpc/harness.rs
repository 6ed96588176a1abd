//! `HarnessService`: workers report.
//!
//! A stream takes requests and sends answers in one task, which keeps the answers that are not durable yet: so whatever has come
//! is taken at once, and all of its answers leave together. A client that does not read its answers is not read from, nor is one
//! with [`limits::STREAM_ANSWERS_OUTSTANDING_MAX`] of them to come. A bad event is answered, and so is what is no event at all; only
//! what has no number ends a stream.

use std::collections::VecDeque;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures_util::Stream;
use futures_util::stream::unfold;
use prost::Message;
use tokio::sync::{OwnedSemaphorePermit, mpsc};
use tonic::{Request, Response, Status, Streaming};

use crate::error::{Reason, Refusal};
use crate::forest::Placement;
use crate::forest::call::CallIndex;
use crate::forest::link::Verdict;
use crate::ids::RolloutRef;
use crate::limits;
use crate::log::Position;
use crate::proto::v1::{self, report_request, report_response};
use crate::rollout::Rollout;
use crate::rollout::event::Event;
use crate::store::effect::Notice;
use crate::store::report::{Answer, Reply};
use crate::store::{ReporterId, RolloutKey};
use crate::telemetry::Held;

use super::receive::{Messages, Received, Told, is_long, messages, received, whole};
use super::turns::Turn;
use super::{OpenStream, Shared, convert, draining, ended_message, refused};

/// The service.
pub(super) struct Harness {
    shared: Shared,
}

/// What the answer says of a rollout.
struct Described {
    verdict: Option<v1::Verdict>,
    totals: v1::Totals,
    seal: Option<v1::SealStatus>,
}

/// A request that was checked.
pub(super) struct Checked {
    request_seq: u64,
    /// Whether the answer says what is missing.
    is_seal: bool,
    said: Said,
}

/// What it says of which rollout, as far as that is told.
type Said = Result<(RolloutRef, Result<Event, Box<Refusal>>), Box<Refusal>>;

/// A request of a stream that was read.
enum Taken {
    /// One to be answered, with its room.
    Request(Checked, Option<InFlight>),
    /// One that cannot be taken, as far as it could be read, and why.
    Refused(Told, Refusal),
}

/// A response that may leave when its position is durable.
struct Outgoing {
    response: v1::ReportResponse,
    position: Position,
    /// When the request came, in the clock's microseconds; none: nobody asked.
    arrived_us: Option<u64>,
    /// What it holds.
    bytes: usize,
    room: AnswerRoom,
}

/// Room for what an answer holds: of the service's, if the stream has used up its own.
#[derive(Default)]
struct AnswerRoom(Option<OwnedSemaphorePermit>);

/// One stream of reports.
struct ReportStream {
    shared: Shared,
    reporter: ReporterId,
    requests: Messages<v1::ReportRequest>,
    notices: mpsc::Receiver<Notice>,
    /// In the order of their requests.
    outgoing: VecDeque<Outgoing>,
    /// What they hold.
    outgoing_bytes: usize,
    /// No more requests are taken; the stream ends so when all answers have left.
    end: Option<Result<(), Status>>,
    turn: Turn,
    _open: OpenStream,
    _counted: Held,
}

/// Bytes of a request between its arrival and its place in the log.
pub(super) struct InFlight {
    _permit: OwnedSemaphorePermit,
    _held: Held,
}

type Responses = Pin<Box<dyn Stream<Item = Result<v1::ReportResponse, Status>> + Send>>;

#[tonic::async_trait]
impl v1::harness_service_server::HarnessService for Harness {
    type ReportStream = Responses;

    async fn report(&self, request: Request<Streaming<v1::ReportRequest>>) -> Result<Response<Responses>, Status> {
        let stream = ReportStream::new(self.shared.clone(), messages(request)?);
        let responses = unfold(stream, |mut stream| async move {
            let response = stream.next().await?;
            Some((response, stream))
        });
        Ok(Response::new(Box::pin(responses)))
    }

    async fn report_batch(
        &self,
        request: Request<v1::ReportBatchRequest>,
    ) -> Result<Response<v1::ReportBatchResponse>, Status> {
        let request = whole(request).await?;
        Ok(Response::new(self.shared.answer_batch(request).await?))
    }
}

impl Harness {
    pub(super) fn new(shared: Shared) -> Self {
        Self { shared }
    }
}

impl ReportStream {
    fn new(shared: Shared, requests: Messages<v1::ReportRequest>) -> Self {
        let (reporter, notices) = shared.store.reporter();
        let (open, counted) = (shared.streams.enter(), shared.store.telemetry().report_stream());
        let outgoing = VecDeque::new();
        Self {
            shared,
            reporter,
            requests,
            notices,
            outgoing,
            outgoing_bytes: 0,
            end: None,
            turn: Turn::default(),
            _open: open,
            _counted: counted,
        }
    }

    /// The next answer or notice that may leave. Takes what comes meanwhile, until the client ends the stream or the service is
    /// about to stop.
    async fn next(&mut self) -> Option<Result<v1::ReportResponse, Status>> {
        loop {
            if self.end.is_none() && *self.shared.draining.borrow() {
                self.end = Some(Err(draining("connect again after the delay and send again what was not answered")));
            }
            let first = self.outgoing.front().map(|first| first.position);
            if first.is_some_and(|position| self.shared.store.is_durable(position)) {
                let first = self.outgoing.pop_front()?;
                self.outgoing_bytes -= first.bytes;
                if let Some(arrived_us) = first.arrived_us {
                    self.shared.answered_durably(arrived_us);
                }
                return Some(Ok(first.response));
            }
            if first.is_none()
                && let Some(end) = self.end.take()
            {
                self.end = Some(Ok(()));
                return end.err().map(Err);
            }
            if !self.requests.is_at_hand() {
                self.turn.pause();
            }
            // Without room there are answers to come, whose leaving is waited for below.
            let room = self.room();
            let takes = self.end.is_none() && room.is_some();
            tokio::select! {
                biased;
                Some(notice) = self.notices.recv(), if takes => {
                    // It says what is known now, which may be more than the record that it comes from.
                    let position = self.shared.store.last_position();
                    if let Some(response) = noticed(&self.shared, &notice) {
                        self.put(Outgoing::new(response, position, None), room);
                    }
                }
                request = self.requests.request(), if takes => match request {
                    Ok(Some(request)) => match self.answered(request).await {
                        Ok(answer) => self.put(answer, room),
                        // What is no message cannot be answered with a sequence number.
                        Err(broken) => self.end = Some(Err(broken)),
                    },
                    Ok(None) => self.end = Some(Ok(())),
                    Err(broken) => self.end = Some(Err(broken)),
                },
                () = self.shared.store.durable(first.unwrap_or_default()), if first.is_some() => {}
                // Seen above.
                () = self.shared.drained(), if self.end.is_none() => {}
            }
        }
    }
}

impl ReportStream {
    /// The answer to a request; an error if it is no message.
    async fn answered(&mut self, request: Bytes) -> Result<Outgoing, Status> {
        let Self { shared, reporter, turn, .. } = self;
        let clock = shared.store.clock();
        let arrived_us = clock.now_us();
        turn.give_way(&shared.lanes, arrived_us).await;
        let taken = if is_long(&request) { shared.take_apart(request).await? } else { shared.take(request).await? };
        let (answer, position) = match taken {
            Taken::Request(checked, _in_flight) => shared.answer(Some(*reporter), checked).await,
            Taken::Refused(told, refusal) => {
                let about = convert::report::rollout_ref(told.rollout.as_ref()).ok();
                if let Some(about) = &about {
                    shared.store.note_refusal(about, refusal.call_id.as_ref(), refusal.reason);
                }
                let answer = shared.answer_message(told.request_seq, Reply::Refused(refusal), about.as_ref());
                (answer, Position::default())
            }
        };
        turn.worked(arrived_us, clock.now_us());
        let response = v1::ReportResponse { response: Some(report_response::Response::Answer(answer)) };
        Ok(Outgoing::new(response, position, Some(arrived_us)))
    }

    /// Room for one more answer, however much it will hold: some are free for each stream, the others of the service's.
    fn room(&self) -> Option<AnswerRoom> {
        let (answers, bytes) = (self.outgoing.len(), self.outgoing_bytes);
        if answers < limits::STREAM_ANSWERS_FREE && bytes < limits::STREAM_ANSWERS_FREE_BYTES {
            return Some(AnswerRoom::default());
        }
        let most = u32::try_from(limits::ANSWER_BYTES_MAX).unwrap_or(u32::MAX);
        let has_place = answers < limits::STREAM_ANSWERS_OUTSTANDING_MAX;
        let room = has_place.then(|| Arc::clone(&self.shared.answers).try_acquire_many_owned(most).ok()).flatten();
        room.map(|room| AnswerRoom(Some(room)))
    }

    /// Puts an answer where it waits until it may leave, with as much room as it needs.
    fn put(&mut self, mut answer: Outgoing, room: Option<AnswerRoom>) {
        answer.room = room.unwrap_or_default();
        answer.room.shrink(answer.bytes);
        self.outgoing_bytes += answer.bytes;
        self.outgoing.push_back(answer);
    }
}

impl AnswerRoom {
    /// Gives back what is not needed.
    fn shrink(&mut self, needed: usize) {
        if let Some(room) = &mut self.0 {
            drop(room.split(room.num_permits().saturating_sub(needed)));
        }
    }
}

impl Outgoing {
    fn new(response: v1::ReportResponse, position: Position, arrived_us: Option<u64>) -> Self {
        let lists = match &response.response {
            Some(report_response::Response::Answer(answer)) => answer.seal.as_ref().map_or(0, |seal| {
                seal.missing.len() * size_of::<v1::MissingCall>() + seal.agents_without_list.len() * size_of::<String>()
            }),
            Some(report_response::Response::Notice(_)) | None => 0,
        };
        let bytes = size_of::<Self>() + response.encoded_len() + lists;
        Self { response, position, arrived_us, bytes, room: AnswerRoom::default() }
    }
}

impl Drop for ReportStream {
    fn drop(&mut self) {
        self.shared.store.forget_reporter(self.reporter);
    }
}

impl Shared {
    /// Records how long a message waited for its durable answer.
    pub(super) fn answered_durably(&self, arrived_us: u64) {
        let took_us = self.store.clock().now_us().saturating_sub(arrived_us);
        self.store.telemetry().durable_answer(Duration::from_micros(took_us));
    }

    pub(super) async fn in_flight(&self, bytes: usize) -> Option<InFlight> {
        let permit = self.store.permit(bytes).await?;
        Some(InFlight { _permit: permit, _held: self.store.telemetry().in_flight(bytes) })
    }

    /// Takes a request that was sent, when there is room for it.
    async fn take(&self, request: Bytes) -> Result<Taken, Status> {
        Ok(match received(request)? {
            Received::Request(request) => {
                let in_flight = self.in_flight(weight(&request)).await;
                Taken::Request(checked(request), in_flight)
            }
            Received::Refused(told, refusal) => Taken::Refused(told, refusal),
        })
    }

    /// The same of one that lists very much: it is read by a thread that may take milliseconds for it, which whoever is served by
    /// this one would wait for. Few are read at once, and the next ones wait until these have their room.
    async fn take_apart(&self, request: Bytes) -> Result<Taken, Status> {
        // The semaphore is never closed.
        let _turn = self.long_messages.acquire().await.ok();
        let read = move || match received(request)? {
            Received::Request(request) => Ok::<_, Status>((weight(&request), Taken::Request(checked(request), None))),
            Received::Refused(told, refusal) => Ok((0, Taken::Refused(told, refusal))),
        };
        let gone = |_| refused(Refusal::new(Reason::Internal, "the request cannot be read"));
        let (weight, mut taken) = tokio::task::spawn_blocking(read).await.map_err(gone)??;
        if let Taken::Request(_, in_flight) = &mut taken {
            *in_flight = self.in_flight(weight).await;
        }
        Ok(taken)
    }

    /// The answer to one request, and the position that it waits for.
    pub(super) async fn answer(&self, reporter: Option<ReporterId>, request: Checked) -> (v1::Answer, Position) {
        let Checked { request_seq, is_seal, said } = request;
        let describe = |rollout: &mut Rollout, call: Option<(CallIndex, Verdict)>| {
            let seal = is_seal.then(|| convert::answer::seal_status(rollout));
            let forest = &rollout.facts().forest;
            let verdict = call.map(|(call, verdict)| convert::answer::verdict(forest, call, &verdict));
            Described { verdict, totals: convert::answer::totals(forest), seal }
        };
        let refused = |refusal| Answer { reply: Reply::Refused(refusal), position: Position::default() };
        let (about, answer) = match said {
            Ok((about, Ok(event))) => {
                let answer = self.store.report(reporter, &about, event, describe).await;
                (Some(about), answer)
            }
            Ok((about, Err(refusal))) => {
                self.store.note_refusal(&about, refusal.call_id.as_ref(), refusal.reason);
                (Some(about), refused(*refusal))
            }
            Err(refusal) => (None, refused(*refusal)),
        };
        (self.answer_message(request_seq, answer.reply, about.as_ref()), answer.position)
    }

    fn answer_message(&self, request_seq: u64, reply: Reply<Described>, about: Option<&RolloutRef>) -> v1::Answer {
        let with = |outcome: v1::AnswerOutcome, described: Described| v1::Answer {
            request_seq,
            outcome: outcome.into(),
            verdict: described.verdict,
            totals: Some(described.totals),
            seal: described.seal,
            ..v1::Answer::default()
        };
        match reply {
            Reply::Accepted(described, ended) => {
                v1::Answer { ended: ended.as_ref().map(ended_message), ..with(v1::AnswerOutcome::Accepted, described) }
            }
            Reply::Duplicate(described) => with(v1::AnswerOutcome::Duplicate, described),
            Reply::AlreadyEnded(ended) => v1::Answer {
                request_seq,
                outcome: v1::AnswerOutcome::AlreadyEnded.into(),
                ended: Some(ended_message(&ended)),
                ..v1::Answer::default()
            },
            Reply::Refused(refusal) => {
                self.store.telemetry().refused(refusal.reason);
                v1::Answer {
                    request_seq,
                    outcome: v1::AnswerOutcome::Refused.into(),
                    refusal: Some(convert::answer::refusal(&refusal, about)),
                    ..v1::Answer::default()
                }
            }
        }
    }
}

/// The message of a notice; none if the rollout has ended meanwhile, or its tokens have left memory: notices are a courtesy.
fn noticed(shared: &Shared, notice: &Notice) -> Option<v1::ReportResponse> {
    let key: &RolloutKey = &notice.key;
    let about = RolloutRef { run: key.run.clone(), group: None, rollout: key.rollout.clone(), attempt: notice.attempt };
    let news = match notice.placement {
        Placement::Unresolved => {
            let message =
                "the delta's base turned out to be another call's text; send the call again with all ids of its prompt";
            let refusal =
                Refusal::new(Reason::ResendFullPrompt, message).field("call.prompt.delta.base").call(&notice.call);
            let refusal = Some(convert::answer::refusal(&refusal, Some(&about)));
            v1::notice::Notice::UnresolvedCall(v1::UnresolvedCall { call_id: notice.call.to_string(), refusal })
        }
        Placement::Placed => {
            let verdict = shared.store.look_at(key, notice.attempt, |rollout| {
                let call = rollout.facts().forest.find(&notice.call)?;
                let verdict = rollout.verdict(call);
                Some(convert::answer::verdict(&rollout.facts().forest, call, &verdict))
            });
            let verdict = Some(verdict??);
            v1::notice::Notice::ResolvedCall(v1::ResolvedCall { call_id: notice.call.to_string(), verdict })
        }
    };
    let notice = v1::Notice { rollout: Some(convert::report::rollout_ref_message(&about)), notice: Some(news) };
    Some(v1::ReportResponse { response: Some(report_response::Response::Notice(notice)) })
}

/// Checks a request.
pub(super) fn checked(request: v1::ReportRequest) -> Checked {
    let (request_seq, is_seal) = (request.request_seq, is_seal(request.event.as_ref()));
    let said = convert::report::rollout_ref(request.rollout.as_ref()).map(|about| {
        let event = convert::report::event(request.event, about.group.is_some());
        (about, event)
    });
    Checked { request_seq, is_seal, said }
}

/// Whether the answer says what is missing.
pub(super) fn is_seal(event: Option<&report_request::Event>) -> bool {
    matches!(event, Some(report_request::Event::Seal(_) | report_request::Event::Finish(_)))
}

/// Bytes that a request is reckoned with: as it was sent, and what its parts take besides.
pub(super) fn weight(request: &v1::ReportRequest) -> usize {
    const REST_BYTES: usize = 512;
    // The shortest id takes more as a text of its own than in a message.
    let texts = |lists: &v1::KeptCalls| lists.agents.values().map(|list| list.call_ids.len()).sum();
    let of_seal = |seal: &v1::Seal| seal.kept.as_ref().map_or(0, texts);
    let texts: usize = match &request.event {
        Some(report_request::Event::Seal(seal)) => of_seal(seal),
        Some(report_request::Event::Finish(finish)) => finish.seal.as_ref().map_or(0, of_seal),
        Some(report_request::Event::AgentEnd(end)) => {
            end.answers_read_agent_ids.len() + end.kept.as_ref().map_or(0, |list| list.call_ids.len())
        }
        Some(
            report_request::Event::Call(_)
            | report_request::Event::Open(_)
            | report_request::Event::AgentStart(_)
            | report_request::Event::Reward(_)
            | report_request::Event::Credit(_)
            | report_request::Event::Heartbeat(_)
            | report_request::Event::Discard(_),
        )
        | None => 0,
    };
    request.encoded_len() + texts * size_of::<String>() + REST_BYTES
}

#[cfg(test)]
#[path = "harness_tests.rs"]
mod tests;
