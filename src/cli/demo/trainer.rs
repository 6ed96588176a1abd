//! A trainer as small as one can be: subscribes, takes units, acknowledges them.

use std::time::Duration;

use tokio::sync::mpsc;
use tokio::time::timeout;
use tokio_stream::wrappers::ReceiverStream;
use tonic::Streaming;
use tonic::transport::Channel;

use crate::cli::assemble::{RowAssembler, WholeUnit};
use crate::cli::{Failure, client};
use crate::proto::v1::{
    Ack, AckOutcome, AckResult, ConsumerGroupSettings, StartPosition, SubscribeRequest, SubscribeResponse,
    Subscription, Unit, subscribe_request, subscribe_response,
};

/// Tokens that may be out and unacknowledged.
const CREDIT_TOKENS: u64 = 1 << 20;

/// One consumer of a consumer group.
pub(super) struct Trainer {
    outgoing: mpsc::Sender<SubscribeRequest>,
    responses: Streaming<SubscribeResponse>,
    assembler: RowAssembler,
}

/// What a trainer is told that it waits for.
enum Told {
    Unit(WholeUnit),
    Acks(AckResult),
}

impl Trainer {
    /// Subscribes to the rows of a run.
    pub(super) async fn subscribe(channel: Channel, run: &str) -> Result<Self, Failure> {
        let (outgoing, requests) = mpsc::channel(4);
        let settings = ConsumerGroupSettings {
            unit: Unit::Row.into(),
            start: StartPosition::Earliest.into(),
            ..ConsumerGroupSettings::default()
        };
        let subscription = Subscription {
            run_id: run.to_owned(),
            consumer_group: "trainers".to_owned(),
            consumer: "trainer".to_owned(),
            settings: Some(settings),
            credit_tokens: CREDIT_TOKENS,
            ..Subscription::default()
        };
        send(&outgoing, subscribe_request::Request::Subscription(subscription)).await?;
        let opened = client::trainer(channel).subscribe(ReceiverStream::new(requests)).await;
        let responses = opened.map_err(|status| client::refused("subscribing", &status))?.into_inner();
        Ok(Self { outgoing, responses, assembler: RowAssembler::default() })
    }

    /// Takes units until they hold as many rows.
    pub(super) async fn take(&mut self, rows: usize, patience: Duration) -> Result<Vec<WholeUnit>, Failure> {
        let mut units: Vec<WholeUnit> = Vec::new();
        while units.iter().map(|unit| unit.rows.len()).sum::<usize>() < rows {
            let told = timeout(patience, self.next()).await;
            if let Told::Unit(unit) = told.map_err(|_| Failure::Failed("no row came in time".to_owned()))?? {
                units.push(unit);
            }
        }
        Ok(units)
    }

    /// Acknowledges units, and waits until that is durable.
    pub(super) async fn acknowledge(&mut self, units: &[WholeUnit], patience: Duration) -> Result<(), Failure> {
        let seek_count = units.first().map_or(0, |unit| unit.seek_count);
        let unit_ids = units.iter().map(|unit| unit.unit_id.clone()).collect();
        send(&self.outgoing, subscribe_request::Request::Ack(Ack { unit_ids, seek_count })).await?;
        let told = timeout(patience, self.next()).await;
        match told.map_err(|_| Failure::Failed("no answer to the ack came in time".to_owned()))?? {
            Told::Unit(unit) => Err(Failure::Failed(format!("unit {} came, one too many", unit.unit_id))),
            Told::Acks(acks) => {
                let taken = acks.entries.iter().filter(|entry| entry.outcome() == AckOutcome::Acknowledged).count();
                if acks.durable && taken == units.len() {
                    return Ok(());
                }
                Err(Failure::Failed(format!("{taken} of {} units were acknowledged", units.len())))
            }
        }
    }

    async fn next(&mut self) -> Result<Told, Failure> {
        loop {
            let response =
                self.responses.message().await.map_err(|status| client::refused("the subscription", &status))?;
            let response = response.ok_or_else(|| Failure::Failed("the subscription ended".to_owned()))?;
            match response.response {
                Some(subscribe_response::Response::UnitPart(part)) => {
                    let unit = self.assembler.take(part).map_err(|error| Failure::Failed(error.to_string()))?;
                    if let Some(unit) = unit {
                        return Ok(Told::Unit(unit));
                    }
                }
                Some(subscribe_response::Response::AckResult(acks)) => return Ok(Told::Acks(acks)),
                Some(
                    subscribe_response::Response::Subscribed(_)
                    | subscribe_response::Response::UnitNotice(_)
                    | subscribe_response::Response::Heartbeat(_),
                )
                | None => {}
            }
        }
    }
}

async fn send(outgoing: &mpsc::Sender<SubscribeRequest>, request: subscribe_request::Request) -> Result<(), Failure> {
    let sent = outgoing.send(SubscribeRequest { request: Some(request) }).await;
    sent.map_err(|_| Failure::Failed("the subscription is closed".to_owned()))
}
