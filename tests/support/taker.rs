//! A trainer that takes units as they come, and hands them out by rollout.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use hedgerow::proto::v1;
use hedgerow::proto::v1::subscribe_request::Request;
use hedgerow::proto::v1::subscribe_response::Response;
use parking_lot::Mutex;
use tokio::sync::{mpsc, watch};

use crate::service::{TestService, Unit, subscription};

/// How long a unit that must come may take; only a failing test waits so long.
const UNIT_SECONDS_MAX: u64 = 30;

/// A subscription with rollouts as its units.
pub(crate) struct Taker {
    requests: mpsc::Sender<v1::SubscribeRequest>,
    units: Arc<Mutex<HashMap<String, Unit>>>,
    arrived: watch::Receiver<u64>,
}

impl Taker {
    pub(crate) async fn subscribe(
        service: &TestService,
        run: &str,
        consumer_group: &str,
        settings: v1::ConsumerGroupSettings,
    ) -> Self {
        let subscription = v1::Subscription { settings: Some(settings), ..subscription(run, consumer_group) };
        let mut trainer = service.trainer(subscription).await;
        let requests = trainer.requests.clone();
        let units = Arc::new(Mutex::new(HashMap::new()));
        let (arrives, arrived) = watch::channel(0);
        let taken = Arc::clone(&units);
        tokio::spawn(async move {
            let mut unit = Unit::default();
            while let Ok(Some(message)) = trainer.next().await {
                let Response::UnitPart(part) = message else { continue };
                let last = part.last;
                unit.take(part);
                if last {
                    let unit = std::mem::take(&mut unit);
                    let rollout = unit.rows.first().map(|row| row.header.rollout_id.clone()).unwrap_or_default();
                    taken.lock().insert(rollout, unit);
                    arrives.send_modify(|count| *count += 1);
                }
            }
        });
        Self { requests, units, arrived }
    }

    /// The unit of this rollout.
    pub(crate) async fn take(&self, rollout: &str) -> Result<Unit, String> {
        let mut arrived = self.arrived.clone();
        let coming = async {
            loop {
                arrived.mark_unchanged();
                if let Some(unit) = self.units.lock().remove(rollout) {
                    return Ok(unit);
                }
                if arrived.changed().await.is_err() {
                    return Err("the subscription has ended".to_owned());
                }
            }
        };
        let waited = tokio::time::timeout(Duration::from_secs(UNIT_SECONDS_MAX), coming).await;
        waited.unwrap_or_else(|_| Err("its unit does not come".to_owned()))
    }

    /// Whether a unit of this rollout has come and was not taken.
    pub(crate) fn holds(&self, rollout: &str) -> bool {
        self.units.lock().contains_key(rollout)
    }

    /// Acknowledges units.
    pub(crate) async fn ack(&self, unit_ids: Vec<String>) {
        let request = Request::Ack(v1::Ack { unit_ids, seek_count: 0 });
        self.requests.send(v1::SubscribeRequest { request: Some(request) }).await.expect("the stream is open");
    }
}
