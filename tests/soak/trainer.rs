//! The trainer: takes rows, applies each row id once, and acknowledges it.

use std::collections::BTreeSet;
use std::sync::Arc;

use hedgerow::cli::client;
use hedgerow::proto::v1;
use hedgerow::proto::v1::subscribe_request::Request;
use hedgerow::proto::v1::subscribe_response::Response;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;

use crate::{RUN, Shared};

/// The most tokens that are out at it.
const CREDIT_TOKENS: u64 = 4_000_000;

/// What has arrived.
#[derive(Default)]
pub(crate) struct Taken {
    pub(crate) rows: BTreeSet<String>,
    pub(crate) rollouts: BTreeSet<String>,
    pub(crate) trained_tokens: u64,
}

/// Takes rows until it is stopped.
pub(crate) async fn take(shared: Arc<Shared>) {
    let channel = client::connect(&shared.address).await.unwrap_or_else(|_| panic!("nobody answers"));
    let (requests, line) = mpsc::channel(1024);
    let subscription = v1::Subscription {
        run_id: RUN.to_owned(),
        consumer_group: "trainers".to_owned(),
        credit_tokens: CREDIT_TOKENS,
        ..v1::Subscription::default()
    };
    let first = v1::SubscribeRequest { request: Some(Request::Subscription(subscription)) };
    requests.send(first).await.expect("a new line has room");
    let responses = client::trainer(channel).subscribe(ReceiverStream::new(line)).await;
    let mut responses = responses.expect("the subscription is joined").into_inner();
    // Of each row its part so far: a row's last part has its unit's end.
    let mut trained = 0;
    // It ends with the service.
    while let Ok(Some(message)) = responses.message().await {
        let Some(Response::UnitPart(part)) = message.response else { continue };
        let ones: usize = part.rows.iter().map(|row| row.loss_mask.iter().filter(|mask| **mask == 1).count()).sum();
        trained += ones as u64;
        if part.last {
            shared.taken.lock().apply(&part.unit_id, std::mem::take(&mut trained));
            let ack = v1::Ack { unit_ids: vec![part.unit_id], seek_count: 0 };
            let _ = requests.send(v1::SubscribeRequest { request: Some(Request::Ack(ack)) }).await;
        }
    }
}

impl Taken {
    /// Applies a row, unless it was.
    fn apply(&mut self, row: &str, trained: u64) {
        if self.rows.insert(row.to_owned()) {
            let rollout = row.split('/').nth(1).expect("a row id names its rollout");
            self.rollouts.insert(rollout.to_owned());
            self.trained_tokens += trained;
        }
    }
}
