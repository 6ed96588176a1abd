//! A trainer's process: one member of a consumer group, which applies each row id once, durably, before it acknowledges it.

use std::collections::{BTreeSet, VecDeque};
use std::path::Path;
use std::time::Duration;

use futures_util::FutureExt as _;
use hedgerow::cli::shuffle::SplitMix64;
use hedgerow::limits;
use hedgerow::proto::v1::subscribe_request::Request;
use hedgerow::proto::v1::subscribe_response::Response;
use hedgerow::proto::v1::trainer_service_client::TrainerServiceClient;
use hedgerow::proto::v1::{self, AckOutcome};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::Streaming;
use tonic::transport::Channel;

use crate::plan::RUN;
use crate::rows::{Applied, Print};
use crate::service::Unit;

/// The most tokens that are out at one member, so that both get some.
const CREDIT_TOKENS: u64 = 4000;
/// Units that are acknowledged together, at most.
const ACK_UNITS_MAX: usize = 4;
/// A trainer tries to subscribe this often at most.
const TRY_MS: u64 = 10;

/// A consumer group whose members are processes.
#[derive(Clone, Copy)]
pub(crate) struct Group {
    pub(crate) name: &'static str,
    pub(crate) unit: v1::Unit,
    pub(crate) members: usize,
}

/// The first shares its rows between two trainers, the second takes whole rollouts.
pub(crate) const GROUPS: [Group; 2] = [
    Group { name: "trainers", unit: v1::Unit::Row, members: 2 },
    Group { name: "archive", unit: v1::Unit::Rollout, members: 1 },
];

impl Group {
    pub(crate) fn settings(self) -> v1::ConsumerGroupSettings {
        v1::ConsumerGroupSettings { unit: self.unit.into(), ..v1::ConsumerGroupSettings::default() }
    }
}

/// A member at work.
struct Member {
    applied: Applied,
    /// Applied, and not answered as acknowledged.
    unacknowledged: BTreeSet<String>,
    chance: SplitMix64,
}

/// Takes rows until it is killed.
pub(crate) async fn run(address: String, group: Group, member: usize, path: &Path) -> Result<(), String> {
    let applied = Applied::open(path).map_err(|error| error.to_string())?;
    let chance = SplitMix64::new(u64::from(std::process::id()));
    let mut this = Member { applied, unacknowledged: BTreeSet::new(), chance };
    let mut every = tokio::time::interval(Duration::from_millis(TRY_MS));
    loop {
        every.tick().await;
        this.applied.refresh().map_err(|error| error.to_string())?;
        let before = this.applied.acknowledged().clone();
        let Ok((requests, responses)) = subscribe(&address, group, member).await else { continue };
        println!("subscribed {} {member}", group.name);
        // Ends with the stream; what was not acknowledged is, on the next, before it comes again.
        this.serve(&requests, responses, &before).await?;
    }
}

type Subscribed = (mpsc::Sender<v1::SubscribeRequest>, Streaming<v1::SubscribeResponse>);

async fn subscribe(address: &str, group: Group, member: usize) -> Result<Subscribed, String> {
    let endpoint = Channel::from_shared(address.to_owned()).map_err(|error| error.to_string())?;
    let channel = endpoint.connect().await.map_err(|error| error.to_string())?;
    let (requests, line) = mpsc::channel(64);
    let subscription = v1::Subscription {
        run_id: RUN.to_owned(),
        consumer_group: group.name.to_owned(),
        consumer: format!("{}-{member}", group.name),
        settings: Some(group.settings()),
        credit_tokens: CREDIT_TOKENS,
        ..v1::Subscription::default()
    };
    let first = v1::SubscribeRequest { request: Some(Request::Subscription(subscription)) };
    requests.send(first).await.map_err(|error| error.to_string())?;
    let mut client = TrainerServiceClient::new(channel).max_decoding_message_size(limits::REQUEST_MESSAGE_BYTES_MAX);
    let responses = client.subscribe(ReceiverStream::new(line)).await.map_err(|status| status.to_string())?;
    Ok((requests, responses.into_inner()))
}

impl Member {
    /// Serves one subscription until it ends. What was acknowledged before it began must not come on it.
    async fn serve(
        &mut self,
        requests: &mpsc::Sender<v1::SubscribeRequest>,
        mut responses: Streaming<v1::SubscribeResponse>,
        before: &BTreeSet<String>,
    ) -> Result<(), String> {
        let mut held: Vec<String> = self.unacknowledged.iter().cloned().collect();
        let mut sent: VecDeque<Vec<String>> = VecDeque::new();
        let mut unit = Unit::default();
        loop {
            let next = match responses.message().now_or_never() {
                Some(next) => next,
                None => {
                    // Nothing else is on its way, so nothing is held back any longer.
                    if !acknowledge(requests, &mut held, &mut sent).await {
                        return Ok(());
                    }
                    responses.message().await
                }
            };
            match next.ok().flatten().and_then(|message| message.response) {
                None => return Ok(()),
                Some(Response::UnitPart(part)) => {
                    let last = part.last;
                    unit.take(part);
                    if last {
                        self.apply(&unit, before)?;
                        held.push(std::mem::take(&mut unit).unit_id);
                    }
                }
                Some(Response::AckResult(result)) => {
                    let units = sent.pop_front().unwrap_or_default();
                    self.acknowledged(&units, &result)?;
                }
                Some(Response::UnitNotice(notice)) if notice.kind() == v1::UnitNoticeKind::Undeliverable => {
                    println!("fault trainer: {notice:?}");
                }
                Some(Response::Subscribed(_) | Response::Heartbeat(_) | Response::UnitNotice(_)) => {}
            }
            let many = 1 + self.chance.below(ACK_UNITS_MAX);
            if held.len() >= many && !acknowledge(requests, &mut held, &mut sent).await {
                return Ok(());
            }
        }
    }

    fn apply(&mut self, unit: &Unit, before: &BTreeSet<String>) -> Result<(), String> {
        if before.contains(&unit.unit_id) {
            println!("fault trainer: {} comes again after it was acknowledged", unit.unit_id);
        }
        let prints: Vec<Print> = unit.rows.iter().map(Print::of).collect();
        if prints.iter().any(|print| self.applied.rows().contains_key(&print.row_id)) {
            println!("again {}", unit.unit_id);
        }
        for fault in self.applied.apply(prints).map_err(|error| error.to_string())? {
            println!("fault trainer: {fault}");
        }
        self.unacknowledged.insert(unit.unit_id.clone());
        println!("applied {}", unit.unit_id);
        Ok(())
    }

    fn acknowledged(&mut self, units: &[String], result: &v1::AckResult) -> Result<(), String> {
        for entry in &result.entries {
            // One whose rollout has been retired meanwhile is not known any more.
            let fine = matches!(
                entry.outcome(),
                AckOutcome::Acknowledged | AckOutcome::AlreadyAcknowledged | AckOutcome::Unknown
            );
            if !fine || !result.durable {
                println!("fault trainer: an ack is answered {entry:?}");
            }
            self.unacknowledged.remove(&entry.unit_id);
        }
        if result.entries.iter().map(|entry| &entry.unit_id).ne(units) {
            println!("fault trainer: an ack of {units:?} is answered {result:?}");
        }
        self.applied.acknowledge(units).map_err(|error| error.to_string())?;
        println!("acknowledged {}", units.len());
        Ok(())
    }
}

/// Sends an ack of what is held back, the last one first; not, if the stream has ended.
async fn acknowledge(
    requests: &mpsc::Sender<v1::SubscribeRequest>,
    held: &mut Vec<String>,
    sent: &mut VecDeque<Vec<String>>,
) -> bool {
    if held.is_empty() {
        return true;
    }
    let unit_ids: Vec<String> = held.drain(..).rev().collect();
    sent.push_back(unit_ids.clone());
    let request = Request::Ack(v1::Ack { unit_ids, seek_count: 0 });
    requests.send(v1::SubscribeRequest { request: Some(request) }).await.is_ok()
}
