//! A worker's process: reports its share of a plan over one stream after another, until everything is answered.
//!
//! Each answer goes into its journal before anything else. What stands there is never lost by the service: told again, it is
//! a duplicate or has ended.

use std::collections::BTreeSet;
use std::fs::{File, OpenOptions};
use std::io::Write as _;
use std::path::Path;
use std::time::Duration;

use hedgerow::cli::shuffle::SplitMix64;
use hedgerow::limits;
use hedgerow::proto::v1::harness_service_client::HarnessServiceClient;
use hedgerow::proto::v1::report_response::Response;
use hedgerow::proto::v1::{self, AnswerOutcome};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::Streaming;
use tonic::transport::Channel;

use crate::plan::{Plan, Request};

/// Requests that may be out and unanswered.
const WINDOW_REQUESTS: usize = 24;
/// Answered requests that are told again on each new stream.
const CHECKED_REQUESTS: usize = 12;
/// A worker tries to connect this often at most.
const TRY_MS: u64 = 10;
/// What is added to the number of a request that was answered before.
const AGAIN: u64 = 1 << 32;

/// The answers of a worker, in a file.
pub(crate) struct Journal {
    file: File,
    pub(crate) answered: BTreeSet<usize>,
    /// Those that were answered as accepted.
    pub(crate) accepted: Vec<usize>,
}

impl Journal {
    pub(crate) fn open(path: &Path) -> std::io::Result<Self> {
        let text = std::fs::read_to_string(path).unwrap_or_default();
        let whole = text.rfind('\n').map_or(0, |end| end + 1);
        let file = OpenOptions::new().append(true).create(true).open(path)?;
        file.set_len(whole as u64)?;
        let mut journal = Self { file, answered: BTreeSet::new(), accepted: Vec::new() };
        for line in text[..whole].lines() {
            let (place, outcome) = line.split_once(' ').unwrap_or((line, ""));
            let place = place.parse().map_err(std::io::Error::other)?;
            journal.answered.insert(place);
            journal.accepted.extend((outcome == "accepted").then_some(place));
        }
        Ok(journal)
    }

    /// The process may be killed, the machine stays up: what is written is there.
    fn take(&mut self, place: usize, outcome: AnswerOutcome) -> std::io::Result<()> {
        let word = if outcome == AnswerOutcome::Accepted { "accepted" } else { "known" };
        self.answered.insert(place);
        self.file.write_all(format!("{place} {word}\n").as_bytes())?;
        println!("answered {place} {word}");
        Ok(())
    }
}

/// What is wrong with an answer, if anything.
pub(crate) fn fault(request: &Request, answer: &v1::Answer, again: bool) -> Option<String> {
    let reason = answer.refusal.as_ref().map(|refusal| refusal.reason.as_str());
    let fine = match (answer.outcome(), reason) {
        (AnswerOutcome::Accepted, _) => !again,
        (AnswerOutcome::Duplicate | AnswerOutcome::AlreadyEnded, _) => true,
        (AnswerOutcome::Refused, Some("attempt_superseded")) => request.superseded,
        _ => false,
    };
    let told = if again { "told again after it was answered" } else { "told" };
    (!fine).then(|| format!("{told}, {:?} of {:?} is answered {answer:?}", request.event, request.about))
}

/// Runs a worker to the end of its share.
pub(crate) async fn run(address: String, worker: usize, plan: Plan, path: &Path) -> Result<(), String> {
    let mut journal = Journal::open(path).map_err(|error| error.to_string())?;
    let share: Vec<usize> = (0..plan.requests.len()).filter(|place| plan.requests[*place].worker == worker).collect();
    let mut every = tokio::time::interval(Duration::from_millis(TRY_MS));
    let mut chance = SplitMix64::new(u64::from(std::process::id()));
    loop {
        every.tick().await;
        let left: Vec<usize> = share.iter().copied().filter(|place| !journal.answered.contains(place)).collect();
        if left.is_empty() {
            return Ok(());
        }
        let Ok(mut stream) = Stream::open(&address).await else { continue };
        let known: Vec<usize> = journal.answered.iter().copied().collect();
        let checked = (0..CHECKED_REQUESTS.min(known.len())).map(|_| known[chance.below(known.len())]);
        let again: BTreeSet<usize> = checked.chain(known.last().copied()).collect();
        let mut sends =
            again.into_iter().map(|place| (place, true)).chain(left.into_iter().map(|place| (place, false)));
        // Ends with the stream; what was not answered comes again on the next.
        while let Some((place, again)) = stream.turn(&plan, &mut sends).await {
            let (answer, request) = (again, &plan.requests[place]);
            let (again, answer) = answer;
            if let Some(fault) = fault(request, &answer, again) {
                println!("fault worker {worker}: {fault}");
            }
            if !again {
                journal.take(place, answer.outcome()).map_err(|error| error.to_string())?;
            }
        }
    }
}

struct Stream {
    requests: mpsc::Sender<v1::ReportRequest>,
    responses: Streaming<v1::ReportResponse>,
    out: usize,
}

impl Stream {
    async fn open(address: &str) -> Result<Self, String> {
        let endpoint = Channel::from_shared(address.to_owned()).map_err(|error| error.to_string())?;
        let channel = endpoint.connect().await.map_err(|error| error.to_string())?;
        let (requests, line) = mpsc::channel(WINDOW_REQUESTS);
        let mut client =
            HarnessServiceClient::new(channel).max_encoding_message_size(limits::REQUEST_MESSAGE_BYTES_MAX);
        let responses = client.report(ReceiverStream::new(line)).await.map_err(|status| status.to_string())?;
        Ok(Self { requests, responses: responses.into_inner(), out: 0 })
    }

    /// Sends what the window has room for, and takes one answer: whose, whether it was told again, and what it says.
    async fn turn(
        &mut self,
        plan: &Plan,
        sends: &mut impl Iterator<Item = (usize, bool)>,
    ) -> Option<(usize, (bool, v1::Answer))> {
        while self.out < WINDOW_REQUESTS {
            let Some((place, again)) = sends.next() else { break };
            let request = &plan.requests[place];
            let request_seq = place as u64 + if again { AGAIN } else { 0 };
            let (about, event) = (request.about.clone(), request.event.clone());
            let request = v1::ReportRequest { request_seq, rollout: Some(about), event: Some(event) };
            self.requests.send(request).await.ok()?;
            self.out += 1;
        }
        if self.out == 0 {
            return None;
        }
        loop {
            let response = self.responses.message().await.ok()??.response?;
            if let Response::Answer(answer) = response {
                self.out -= 1;
                let again = answer.request_seq >= AGAIN;
                let place = usize::try_from(answer.request_seq % AGAIN).ok()?;
                return Some((place, (again, answer)));
            }
        }
    }
}
