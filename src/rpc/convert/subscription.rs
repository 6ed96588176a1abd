//! What a consumer asks for: its subscription, and the requests that follow.

use std::time::Duration;

use tokio::sync::mpsc;

use crate::error::{Reason, Refusal};
use crate::ids::{ConsumerGroupId, Name, RunId};
use crate::limits;
use crate::proto::v1::{self, subscribe_request};
use crate::queue::{ConsumerId, UnitId};
use crate::store::sequencer::{Command, Subscription, ToConsumer};

use super::fields::{at_most, duration_ms, identifier, invalid, missing, optional_identifier};
use super::settings::consumer_group_settings;

/// How often a silent subscription says what it waits for.
const HEARTBEAT_INTERVAL: Duration = Duration::from_secs(10);
/// The shortest interval that a subscriber may ask for.
const HEARTBEAT_INTERVAL_MS_MIN: u64 = 1000;

/// How often it is to be said what the subscription waits for.
///
/// # Errors
/// If that is no duration.
pub fn heartbeat_ms(message: &v1::Subscription) -> Result<u64, Refusal> {
    let asked = duration_ms(message.heartbeat_interval.as_ref(), "subscription.heartbeat_interval")?;
    let default = u64::try_from(HEARTBEAT_INTERVAL.as_millis()).unwrap_or(u64::MAX);
    Ok(asked.unwrap_or(default).max(HEARTBEAT_INTERVAL_MS_MIN))
}

/// What a consumer wants.
///
/// # Errors
/// If a field is not there, no value of its kind, or asks for what this release does not have.
pub fn subscription(
    consumer: ConsumerId,
    message: &v1::Subscription,
    sender: mpsc::Sender<ToConsumer>,
) -> Result<Subscription, Refusal> {
    let run = identifier(&message.run_id, "subscription.run_id", RunId::parse)?;
    let named = optional_identifier(&message.consumer_group, "subscription.consumer_group", ConsumerGroupId::parse)?;
    let consumer_group = match (named, message.ephemeral) {
        // An ephemeral group has one member; its name is nobody else's.
        (_, true) => {
            identifier(&format!("ephemeral/{}", consumer.0), "subscription.consumer_group", ConsumerGroupId::parse)?
        }
        (Some(named), false) => named,
        (None, false) => return Err(missing("subscription.consumer_group")),
    };
    optional_identifier(&message.consumer, "subscription.consumer", crate::ids::ConsumerId::parse)?;
    at_most(message.held_unit_ids.len(), limits::ACK_UNITS_MAX, "units", "subscription.held_unit_ids")?;
    let held_bytes: usize = message.held_unit_ids.iter().map(String::len).sum();
    at_most(held_bytes, limits::HELD_UNITS_BYTES_MAX, "bytes of unit ids", "subscription.held_unit_ids")?;
    let settings = message.settings.as_ref();
    if message.ephemeral && settings.is_some_and(|settings| settings.max_staleness_versions.is_some()) {
        let field = "subscription.settings.max_staleness_versions";
        return Err(invalid(field, "is given, but an ephemeral subscription takes whatever is finalised"));
    }
    let settings = settings.map(|settings| consumer_group_settings(settings, "subscription.settings"));
    Ok(Subscription {
        run,
        consumer_group,
        consumer_name: message.consumer.clone(),
        consumer,
        settings: settings.transpose()?,
        ephemeral: message.ephemeral,
        credit_tokens: message.credit_tokens,
        policy_version: message.policy_version,
        shard: message.shard,
        step_index: message.step_index,
        held: message.held_unit_ids.iter().map(|id| UnitId::new(id.as_str())).collect(),
        sender,
    })
}

/// What a later request of a consumer asks of the sequencing task.
///
/// # Errors
/// As with [`subscription`]; or if it is a second subscription.
pub fn command(consumer: ConsumerId, request: v1::SubscribeRequest) -> Result<Command, Refusal> {
    let units = |ids: Vec<String>, field: &str| {
        at_most(ids.len(), limits::ACK_UNITS_MAX, "units", field)?;
        Ok(ids.into_iter().map(UnitId::new).collect::<Vec<_>>())
    };
    match request.request {
        Some(subscribe_request::Request::Ack(ack)) => {
            Ok(Command::Ack(consumer, units(ack.unit_ids, "ack.unit_ids")?, ack.seek_count))
        }
        Some(subscribe_request::Request::Nack(nack)) => {
            let delay_ms = duration_ms(nack.delay.as_ref(), "nack.delay")?;
            Ok(Command::Nack(consumer, units(nack.unit_ids, "nack.unit_ids")?, delay_ms))
        }
        Some(subscribe_request::Request::Credits(credits)) => Ok(Command::Credit(consumer, credits.credit_tokens)),
        Some(subscribe_request::Request::Heartbeat(_)) => Ok(Command::SignOfLife(consumer)),
        Some(subscribe_request::Request::PolicyVersion(said)) => {
            let policy = optional_identifier(&said.policy, "policy_version.policy", Name::parse)?;
            Ok(Command::PolicyVersion(consumer, policy, said.version))
        }
        Some(subscribe_request::Request::Subscription(_)) => {
            let message = "a stream has one subscription, at its beginning";
            Err(Refusal::new(Reason::SubscriptionOrder, message).field("subscription"))
        }
        None => Err(missing("request")),
    }
}
