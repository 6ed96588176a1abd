//! Workers: one rollout of the population after another, as deltas; what is refused comes again after its delay.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use hedgerow::cli::client;
use hedgerow::proto::v1::report_request::Event;
use hedgerow::proto::v1::report_response::Response;
use hedgerow::proto::v1::{self, AnswerOutcome};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::Streaming;

use crate::message::{Form, call as call_message, request};
use crate::workload::population_rollout;
use crate::{RUN, Shared};

/// Requests that have no answer yet.
const WINDOW_REQUESTS: usize = 32;

/// What workers have reported.
#[derive(Default)]
pub(crate) struct Reported {
    pub(crate) rollouts: BTreeSet<String>,
    pub(crate) generated_tokens: u64,
    /// Bytes of new ids and log-probabilities.
    pub(crate) new_bytes: u64,
    /// By reason.
    pub(crate) refusals: BTreeMap<String, u64>,
    pub(crate) refusals_without_delay: Vec<String>,
}

/// A worker's stream.
struct Worker {
    shared: Arc<Shared>,
    requests: mpsc::Sender<v1::ReportRequest>,
    responses: Streaming<v1::ReportResponse>,
}

/// Reports rollouts until no more are to begin.
pub(crate) async fn work(shared: Arc<Shared>) {
    let channel = client::connect(&shared.address).await.unwrap_or_else(|_| panic!("nobody answers"));
    let (requests, line) = mpsc::channel(WINDOW_REQUESTS);
    let responses = client::harness(channel).report(ReceiverStream::new(line)).await.expect("a stream of reports");
    let mut worker = Worker { shared, requests, responses: responses.into_inner() };
    let mut may_begin = worker.shared.may_begin.subscribe();
    loop {
        let seed = worker.shared.begun.fetch_add(1, Ordering::Relaxed);
        let begins =
            may_begin.wait_for(|most| most.is_none_or(|most| seed < most)).await.expect("it is there").is_some();
        if !begins {
            return;
        }
        worker.rollout(seed).await;
    }
}

impl Worker {
    async fn rollout(&mut self, seed: u64) {
        let (id, rollout) = (format!("rollout-{seed}"), population_rollout(seed));
        let calls = rollout.calls.iter().map(|call| Event::Call(call_message(&rollout, call, Form::Delta))).collect();
        self.report(&id, calls).await;
        let seal = Some(v1::Seal { kept: None, expected_calls: Some(rollout.calls.len() as u64) });
        let reward = Some(v1::Reward { value: 1.0, ..v1::Reward::default() });
        self.report(&id, vec![Event::Finish(v1::Finish { seal, reward })]).await;
        let totals = rollout.totals();
        let mut reported = self.shared.reported.lock();
        reported.rollouts.insert(id);
        reported.generated_tokens += totals.generated;
        reported.new_bytes += 4 * (totals.unique + totals.generated);
    }

    /// Reports events until all are taken.
    async fn report(&mut self, rollout: &str, events: Vec<Event>) {
        let mut left: BTreeMap<u64, Event> = (0..).zip(events).collect();
        while !left.is_empty() {
            let mut sends = left.clone().into_iter();
            let (mut out, mut delay) = (0, Duration::ZERO);
            loop {
                while out < WINDOW_REQUESTS
                    && let Some((request_seq, event)) = sends.next()
                {
                    self.requests.send(request(RUN, rollout, request_seq, event)).await.expect("the stream is open");
                    out += 1;
                }
                if out == 0 {
                    break;
                }
                let response = self.responses.message().await.expect("no error").expect("the stream goes on");
                let Some(Response::Answer(answer)) = response.response else { continue };
                out -= 1;
                match answer.refusal {
                    None => {
                        let outcome = AnswerOutcome::try_from(answer.outcome);
                        assert!(
                            matches!(outcome, Ok(AnswerOutcome::Accepted | AnswerOutcome::Duplicate)),
                            "{answer:?}"
                        );
                        left.remove(&answer.request_seq);
                    }
                    Some(refusal) => delay = delay.max(self.refused(&refusal)),
                }
            }
            if !delay.is_zero() {
                tokio::time::sleep(delay).await;
            }
        }
    }

    /// Notes a refusal; after how long it is tried again.
    fn refused(&self, refusal: &v1::Refusal) -> Duration {
        let mut reported = self.shared.reported.lock();
        *reported.refusals.entry(refusal.reason.clone()).or_default() += 1;
        let delay = refusal.retry_after.as_ref().and_then(|delay| Duration::try_from(*delay).ok());
        if delay.is_none() {
            reported.refusals_without_delay.push(refusal.reason.clone());
        }
        delay.unwrap_or(Duration::from_secs(1))
    }
}
