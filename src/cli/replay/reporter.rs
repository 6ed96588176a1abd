//! One stream of reports, from its first event to its last answer.
//!
//! Select, then apply: [`Reporter::run`] waits for the next thing, and plain functions take it. At most
//! [`WINDOW_REQUESTS_MAX`] requests and [`WINDOW_BYTES_MAX`] bytes have no answer yet. A rollout stays on one stream.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap, HashSet, VecDeque};
use std::iter::Peekable;
use std::sync::Arc;
use std::time::Duration;

use indicatif::ProgressBar;
use prost::Message as _;
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep_until};
use tokio_stream::wrappers::ReceiverStream;
use tonic::Status;
use tonic::transport::Channel;

use super::plan::{Event, EventKind, Plan};
use crate::cli::again::{self, Cut, PATIENCE};
use crate::cli::{Failure, client};
use crate::proto::v1::{
    Answer, AnswerOutcome, MissingCallState, Notice, Refusal, ReportRequest, ReportResponse, notice, report_response,
};

/// Requests of one stream without an answer.
const WINDOW_REQUESTS_MAX: usize = 256;
/// Their bytes; a single larger request goes out alone.
const WINDOW_BYTES_MAX: usize = 64 << 20;
/// Refusals that are kept as text.
const REFUSALS_KEPT_MAX: usize = 20;
/// What has ended if the stream has.
const STREAM: &str = "the stream of reports was cut";
/// The reason of a refusal that a full prompt mends.
const RESEND_FULL_PROMPT: &str = "resend_full_prompt";

/// What became of what was reported.
#[derive(Clone, Debug, Default)]
pub struct Counts {
    /// Calls accepted.
    pub calls: u64,
    /// Requests of any kind that had been taken before.
    pub duplicates: u64,
    /// Requests whose rollout had ended.
    pub already_ended: u64,
    /// Requests refused for good.
    pub refused: u64,
    /// Calls sent again in full.
    pub resent_in_full: u64,
    /// Requests sent again after a delay.
    pub retried: u64,
    /// Ids in the prompts of taken calls.
    pub prompt_tokens: u64,
    /// Ids that taken calls generated.
    pub generated_tokens: u64,
    /// Finishes whose answer says that the rollout is finalised.
    pub finalised: u64,
    /// The first refusals, in words.
    pub refusals: Vec<String>,
}

impl Counts {
    /// Adds what became of another stream's requests.
    pub fn add(&mut self, other: Self) {
        self.calls += other.calls;
        self.duplicates += other.duplicates;
        self.already_ended += other.already_ended;
        self.refused += other.refused;
        self.resent_in_full += other.resent_in_full;
        self.retried += other.retried;
        self.prompt_tokens += other.prompt_tokens;
        self.generated_tokens += other.generated_tokens;
        self.finalised += other.finalised;
        self.refusals.extend(other.refusals);
    }
}

/// Reports some events over one stream, and over the next when that is cut.
pub struct Reporter<I: Iterator<Item = Event>> {
    plan: Arc<Plan>,
    address: String,
    events: Peekable<I>,
    /// To be sent again now, before what is new.
    again: VecDeque<Event>,
    /// To be sent again after a delay.
    later: BinaryHeap<Reverse<(Instant, u64)>>,
    later_events: HashMap<u64, Event>,
    unanswered: HashMap<u64, (Event, usize)>,
    unanswered_bytes: usize,
    next_seq: u64,
    /// Calls that were sent again in full, which happens once.
    resent: HashSet<(usize, u32, usize)>,
    last_progress: Instant,
    progress: ProgressBar,
    counts: Counts,
}

impl<I: Iterator<Item = Event>> Reporter<I> {
    /// A reporter of these events of a plan.
    pub fn new(plan: Arc<Plan>, address: String, events: I, progress: ProgressBar) -> Self {
        Self {
            plan,
            address,
            events: events.peekable(),
            again: VecDeque::new(),
            later: BinaryHeap::new(),
            later_events: HashMap::new(),
            unanswered: HashMap::new(),
            unanswered_bytes: 0,
            next_seq: 0,
            resent: HashSet::new(),
            last_progress: Instant::now(),
            progress,
            counts: Counts::default(),
        }
    }

    /// Reports everything, and says what became of it.
    ///
    /// # Errors
    /// If the service is not there, goes away for long, or answers what was not asked.
    pub async fn run(mut self) -> Result<Counts, Failure> {
        let mut channel = client::connect(&self.address).await?;
        self.last_progress = Instant::now();
        loop {
            let (delay, status) = match Box::pin(self.stream(channel)).await {
                Ok(()) => return Ok(self.counts),
                Err(Cut::Final(failure)) => return Err(failure),
                Err(Cut::Retry(delay, status)) => (delay, status),
            };
            self.take_back_unanswered();
            channel = again::connect(&self.address, delay, self.last_progress).await?;
            if self.last_progress.elapsed() > PATIENCE {
                return Err(client::refused(STREAM, &status));
            }
        }
    }

    /// One stream, until everything is answered or it is cut.
    async fn stream(&mut self, channel: Channel) -> Result<(), Cut> {
        let (outgoing, requests) = mpsc::channel(16);
        let opened = client::harness(channel).report(ReceiverStream::new(requests)).await;
        let mut answers = opened.map_err(|status| Cut::by(STREAM, status))?.into_inner();
        loop {
            self.take_due(Instant::now());
            if self.is_done() {
                return Ok(());
            }
            let due = self.later.peek().map(|Reverse((due, _))| *due);
            let may_send = self.may_send();
            tokio::select! {
                response = answers.message() => match response.map_err(|status| Cut::by(STREAM, status))? {
                    Some(response) => self.take(response).map_err(Cut::Final)?,
                    None => return Err(Cut::by(STREAM, Status::unavailable("the service ended the stream"))),
                },
                permit = outgoing.reserve(), if may_send => match permit {
                    Ok(permit) => if let Some(request) = self.next_request() { permit.send(request) },
                    Err(_) => return Err(Cut::by(STREAM, Status::unavailable("the connection is closed"))),
                },
                () = sleep_until(due.unwrap_or_else(Instant::now)), if due.is_some() => {}
            }
        }
    }

    fn is_done(&mut self) -> bool {
        self.unanswered.is_empty() && self.again.is_empty() && self.later.is_empty() && self.events.peek().is_none()
    }

    /// Whether there is something to send, and room for it in the window.
    fn may_send(&mut self) -> bool {
        if self.unanswered.len() >= WINDOW_REQUESTS_MAX || self.unanswered_bytes >= WINDOW_BYTES_MAX {
            return false;
        }
        let waiting = self.unanswered.len() + self.later.len();
        !self.again.is_empty() || (waiting < WINDOW_REQUESTS_MAX && self.events.peek().is_some())
    }

    fn next_request(&mut self) -> Option<ReportRequest> {
        let event = self.again.pop_front().or_else(|| self.events.next())?;
        self.next_seq += 1;
        let request = self.plan.request(event, self.next_seq);
        let bytes = request.encoded_len();
        self.unanswered.insert(self.next_seq, (event, bytes));
        self.unanswered_bytes += bytes;
        Some(request)
    }

    /// What waited long enough is sent again.
    fn take_due(&mut self, now: Instant) {
        while let Some(Reverse((due, seq))) = self.later.peek().copied() {
            if due > now {
                return;
            }
            self.later.pop();
            self.again.extend(self.later_events.remove(&seq));
        }
    }

    /// What a cut stream did not answer is sent again: repeats are harmless.
    fn take_back_unanswered(&mut self) {
        let mut events: Vec<(u64, Event)> = self.unanswered.drain().map(|(seq, (event, _))| (seq, event)).collect();
        events.sort_unstable_by_key(|(seq, _)| *seq);
        self.again.extend(events.into_iter().map(|(_, event)| event));
        self.unanswered_bytes = 0;
    }

    fn take(&mut self, response: ReportResponse) -> Result<(), Failure> {
        match response.response {
            Some(report_response::Response::Answer(answer)) => self.take_answer(answer),
            Some(report_response::Response::Notice(notice)) => {
                self.take_notice(&notice);
                Ok(())
            }
            None => Ok(()),
        }
    }

    fn take_answer(&mut self, answer: Answer) -> Result<(), Failure> {
        let Some((event, bytes)) = self.unanswered.remove(&answer.request_seq) else {
            let seq = answer.request_seq;
            return Err(Failure::Failed(format!("the service answered request {seq}, which awaits no answer")));
        };
        self.unanswered_bytes -= bytes;
        match answer.outcome() {
            outcome @ (AnswerOutcome::Accepted | AnswerOutcome::Duplicate | AnswerOutcome::AlreadyEnded) => {
                self.taken(event, outcome);
            }
            AnswerOutcome::Refused => {
                self.take_refusal(event, answer.request_seq, answer.refusal.unwrap_or_default());
                return Ok(());
            }
            AnswerOutcome::Unspecified => {
                return Err(Failure::Failed("the service gave an answer without an outcome".to_owned()));
            }
        }
        if let Some(seal) = answer.seal {
            self.counts.finalised += u64::from(seal.finalised);
            for missing in seal.missing.iter().filter(|call| call.state() == MissingCallState::Unresolved) {
                self.resend_in_full(event.rollout, event.repetition, &missing.call_id);
            }
        }
        Ok(())
    }

    /// Counts a request that needs no more. An accepted event that is no call is not worth a number.
    fn taken(&mut self, event: Event, outcome: AnswerOutcome) {
        self.last_progress = Instant::now();
        let call = self.plan.call(event);
        match outcome {
            AnswerOutcome::Duplicate => self.counts.duplicates += 1,
            AnswerOutcome::AlreadyEnded => self.counts.already_ended += 1,
            AnswerOutcome::Accepted | AnswerOutcome::Refused | AnswerOutcome::Unspecified => {
                self.counts.calls += u64::from(call.is_some());
            }
        }
        if let Some(call) = call {
            self.counts.prompt_tokens += call.prompt_tokens() as u64;
            self.counts.generated_tokens += call.generated_tokens() as u64;
            self.progress.inc(1);
        }
    }

    fn take_refusal(&mut self, event: Event, seq: u64, refusal: Refusal) {
        if refusal.reason == RESEND_FULL_PROMPT
            && let Some(call) = self.plan.call(event)
        {
            let id = call.id.clone();
            if self.resend_in_full(event.rollout, event.repetition, &id) {
                return;
            }
        }
        if let Some(delay) = refusal.retry_after.and_then(|delay| Duration::try_from(delay).ok())
            && self.last_progress.elapsed() <= PATIENCE
        {
            self.counts.retried += 1;
            self.later.push(Reverse((Instant::now() + delay, seq)));
            self.later_events.insert(seq, event);
            return;
        }
        self.counts.refused += 1;
        if matches!(event.kind, EventKind::Call { .. }) {
            self.progress.inc(1);
        }
        if self.counts.refusals.len() < REFUSALS_KEPT_MAX {
            let rollout = self.plan.rollout_ref(event).rollout_id;
            let what = self.plan.call(event).map_or_else(|| format!("{:?}", event.kind), |call| call.id.clone());
            let field = if refusal.field.is_empty() { String::new() } else { format!(" ({})", refusal.field) };
            self.counts.refusals.push(format!("{rollout} {what}: {}: {}{field}", refusal.reason, refusal.message));
        }
    }

    fn take_notice(&mut self, notice: &Notice) {
        let (Some(rollout), Some(notice::Notice::UnresolvedCall(unresolved))) = (&notice.rollout, &notice.notice)
        else {
            return;
        };
        let found = self.plan.find(&rollout.rollout_id);
        if let Some((index, repetition)) = found {
            self.resend_in_full(index, repetition, &unresolved.call_id);
        }
    }

    /// Has a call sent again with its whole prompt; says whether that is so.
    fn resend_in_full(&mut self, rollout: usize, repetition: u32, call_id: &str) -> bool {
        let calls = self.plan.recording.rollouts.get(rollout).map(|rollout| rollout.calls.as_slice());
        let Some(index) = calls.unwrap_or_default().iter().position(|call| call.id == call_id) else { return false };
        if !self.resent.insert((rollout, repetition, index)) {
            return false;
        }
        self.counts.resent_in_full += 1;
        self.again.push_back(Event { rollout, repetition, kind: EventKind::Call { index, full: true } });
        true
    }
}
