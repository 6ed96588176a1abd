//! A worker's stream that is never waited for: each event's answer comes on a line of its own.

use std::collections::HashMap;
use std::sync::Arc;

use hedgerow::limits;
use hedgerow::proto::v1::harness_service_client::HarnessServiceClient;
use hedgerow::proto::v1::report_request::Event;
use hedgerow::proto::v1::{self, report_response};
use parking_lot::Mutex;
use tokio::sync::{mpsc, oneshot};
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::Channel;

type Awaited = Mutex<HashMap<u64, oneshot::Sender<v1::Answer>>>;

/// A stream of reports whose answers are read as they come.
pub(crate) struct Reporter {
    requests: mpsc::Sender<v1::ReportRequest>,
    awaited: Arc<Awaited>,
    next_seq: u64,
}

impl Reporter {
    pub(crate) async fn open(channel: Channel) -> Self {
        let (requests, line) = mpsc::channel(256);
        let mut client =
            HarnessServiceClient::new(channel).max_encoding_message_size(limits::REQUEST_MESSAGE_BYTES_MAX);
        let mut responses = client.report(ReceiverStream::new(line)).await.expect("a stream of reports").into_inner();
        let awaited = Arc::new(Awaited::default());
        let reading = Arc::clone(&awaited);
        tokio::spawn(async move {
            while let Ok(Some(message)) = responses.message().await {
                if let Some(report_response::Response::Answer(answer)) = message.response
                    && let Some(line) = reading.lock().remove(&answer.request_seq)
                {
                    drop(line.send(answer));
                }
            }
            // Whoever still waits learns that nothing comes any more.
            reading.lock().clear();
        });
        Self { requests, awaited, next_seq: 1 }
    }

    /// Sends an event; its answer comes on the line.
    pub(crate) async fn send(&mut self, about: &v1::RolloutRef, event: Event) -> oneshot::Receiver<v1::Answer> {
        let (answered, line) = oneshot::channel();
        let request_seq = self.next_seq;
        self.next_seq += 1;
        self.awaited.lock().insert(request_seq, answered);
        let request = v1::ReportRequest { request_seq, rollout: Some(about.clone()), event: Some(event) };
        self.requests.send(request).await.expect("the stream is open");
        line
    }
}
