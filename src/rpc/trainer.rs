//! `TrainerService`: trainers take rows.
//!
//! A subscription has a reader task, which turns requests into commands, and a writer task, which gathers the rows of one unit at
//! a time and sends them in parts. A stream that ends, from either side, gives its units back to the consumer group.
//! Acknowledgements that have no answer yet are bounded for each stream, so that no trainer fills its own line or everybody's: it
//! is not read from while it does not read, and let go if it never does; nor does it keep room that others wait for.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tokio::sync::{Semaphore, mpsc, oneshot};
use tonic::{Request, Response, Status, Streaming};

use crate::error::{Reason, Refusal};
use crate::forest::plan::PolicyPlan;
use crate::ids::{ConsumerGroupId, RunId};
use crate::limits;
use crate::proto::v1::{self, subscribe_request, subscribe_response};
use crate::queue::{ConsumerId, UnitId};
use crate::store::sequencer::{AckOutcome, Command, ToConsumer, UnitDelivery, UnitRows};

use super::connection::ConnectionShare;
use super::convert::fields::{duration, identifier};
use super::convert::parts::UnitParts;
use super::convert::rows::TOKEN_BYTES;
use super::convert::subscription;
use super::convert::trainer as messages;
use super::outgoing::{self, Outgoing, Responses};
use super::receive::{self, Messages};
use super::{Shared, draining, refused};

/// The service.
pub(super) struct Trainer {
    shared: Shared,
}

/// What a subscriber does when the service is about to stop.
const SUBSCRIBE_AGAIN: &str = "subscribe again after the delay, and say which units you hold";
/// How long a subscriber that did not read should wait before it subscribes again.
const SLOW_RETRY_AFTER_MS: u64 = 1000;

#[tonic::async_trait]
impl v1::trainer_service_server::TrainerService for Trainer {
    type SubscribeStream = Responses;

    async fn subscribe(
        &self,
        request: Request<Streaming<v1::SubscribeRequest>>,
    ) -> Result<Response<Self::SubscribeStream>, Status> {
        let connection = request.extensions().get::<ConnectionShare>().map(|share| Arc::clone(&share.cut));
        let requests = receive::messages(request)?;
        let (outgoing, guard, responses) = outgoing::stream(&self.shared.trainers);
        tokio::spawn(guard.watch(too_slow(), connection));
        tokio::spawn(serve(self.shared.clone(), requests, outgoing));
        Ok(Response::new(responses))
    }

    async fn checkpoint(
        &self,
        request: Request<v1::CheckpointRequest>,
    ) -> Result<Response<v1::CheckpointResponse>, Status> {
        let request = request.into_inner();
        let (run, consumer_group) = group_of(&request.run_id, &request.consumer_group).map_err(refused)?;
        let facts = self.shared.decide(|reply| Command::Checkpoint { run, consumer_group, reply }).await?;
        Ok(Response::new(v1::CheckpointResponse {
            checkpoint: facts.token.into(),
            acknowledged_units: facts.acknowledged_units,
            retained: (facts.retention_ms > 0).then(|| duration(facts.retention_ms)),
        }))
    }

    async fn seek(&self, request: Request<v1::SeekRequest>) -> Result<Response<v1::SeekResponse>, Status> {
        let request = request.into_inner();
        let (run, consumer_group) = group_of(&request.run_id, &request.consumer_group).map_err(refused)?;
        let token = request.checkpoint.into();
        let sought = self.shared.decide(|reply| Command::Seek { run, consumer_group, token, reply }).await?;
        Ok(Response::new(v1::SeekResponse { seek_count: sought.seek_count, restored_units: sought.restored_units }))
    }
}

impl Trainer {
    pub(super) fn new(shared: Shared) -> Self {
        Self { shared }
    }
}

fn group_of(run: &str, consumer_group: &str) -> Result<(RunId, ConsumerGroupId), Refusal> {
    let run = identifier(run, "run_id", RunId::parse)?;
    Ok((run, identifier(consumer_group, "consumer_group", ConsumerGroupId::parse)?))
}

/// A subscription that was joined.
struct Joined {
    consumer: ConsumerId,
    ephemeral: bool,
    heartbeat_ms: u64,
    line: mpsc::Receiver<ToConsumer>,
    acks: Arc<AcksOutstanding>,
    /// Set when the consumer leaves: units that are still in the line go to others.
    leaving: Arc<AtomicBool>,
}

/// Acknowledgements, and units given back, that the consumer has been sent no answer to.
struct AcksOutstanding(Semaphore);

impl AcksOutstanding {
    fn new() -> Self {
        Self(Semaphore::new(limits::ACK_UNITS_MAX))
    }

    /// So many units take this much of the room.
    fn weight(units: usize) -> usize {
        units.clamp(limits::ACK_UNITS_MAX / limits::ACK_ANSWERS_OUTSTANDING_MAX, limits::ACK_UNITS_MAX)
    }

    /// Waits for room for what a request will be answered.
    async fn begin(&self, command: &Command) {
        let (Command::Ack(_, units, _) | Command::Nack(_, units, _)) = command else { return };
        let weight = u32::try_from(Self::weight(units.len())).unwrap_or(u32::MAX);
        if let Ok(room) = self.0.acquire_many(weight).await {
            // It comes back with the answer.
            room.forget();
        }
    }

    /// What became of so many units has been sent.
    fn answered(&self, units: usize) {
        self.0.add_permits(Self::weight(units));
    }
}

/// How a subscription came to its end.
enum End {
    /// The subscriber is gone, what it sends is no message, or it asks and does not read.
    Broken(Option<Status>),
    /// It has said all it wanted, something that ends the subscription, or the service is about to stop.
    Over(Option<Status>),
    /// The sequencing task let go of the consumer, and its line has come to an end.
    LetGo(Wrote),
}

/// Why the writer of a subscription stopped.
#[derive(PartialEq)]
enum Wrote {
    /// The line has ended.
    All,
    /// Why the subscription is over has been said, or nobody listens.
    Over,
}

/// Serves one subscription from its first request to its end.
async fn serve(shared: Shared, mut requests: Messages<v1::SubscribeRequest>, outgoing: Outgoing) {
    let _open = shared.streams.enter();
    let joined = match join(&shared, &mut requests, &outgoing).await {
        Ok(joined) => joined,
        Err(status) => {
            // Who is gone does not want the reason.
            outgoing.end(status);
            return;
        }
    };
    let (consumer, ephemeral, leaving) = (joined.consumer, joined.ephemeral, Arc::clone(&joined.leaving));
    let acks = Arc::clone(&joined.acks);
    let mut writer = tokio::spawn(write(shared.clone(), joined, outgoing.clone()));
    let end = tokio::select! {
        end = read(&shared, (consumer, ephemeral), &acks, &mut requests) => end,
        wrote = &mut writer => End::LetGo(wrote.unwrap_or(Wrote::Over)),
        () = outgoing.closed() => End::Broken(None),
        () = shared.drained() => End::Over(Some(draining(SUBSCRIBE_AGAIN))),
    };
    if let End::Over(_) = &end {
        answered(&shared, &outgoing).await;
    }
    leaving.store(true, Ordering::Relaxed);
    shared.store.command(Command::Leave(consumer)).await;
    if let End::Broken(Some(status)) = &end {
        // It may not read what waits, and then nothing else would end.
        outgoing.cut(status.clone());
    }
    let status = match end {
        End::Broken(status) | End::Over(status) => {
            // The sequencing task has let go of the line, so the writer comes to its end.
            let _ = writer.await;
            status
        }
        End::LetGo(Wrote::Over) => None,
        End::LetGo(Wrote::All) => Some(too_slow()),
    };
    if let Some(status) = status {
        outgoing.end(status);
    }
}

/// How a subscription ends that does not read.
fn too_slow() -> Status {
    let message = "this subscription does not read what it is sent; subscribe again, and read";
    refused(Refusal::new(Reason::ConsumerTooSlow, message).retry_after_ms(SLOW_RETRY_AFTER_MS))
}

/// Waits until what was read is answered, as far as that goes to the consumer's line, or nobody listens.
async fn answered(shared: &Shared, outgoing: &Outgoing) {
    let (reply, reached) = oneshot::channel();
    if shared.store.command(Command::Barrier(reply)).await {
        tokio::select! {
            _ = reached => {}
            () = outgoing.closed() => {}
        }
    }
}

/// Takes the first request and joins the consumer group.
async fn join(
    shared: &Shared,
    requests: &mut Messages<v1::SubscribeRequest>,
    outgoing: &Outgoing,
) -> Result<Joined, Status> {
    let first = tokio::select! {
        first = requests.message() => first?,
        () = shared.drained() => return Err(draining(SUBSCRIBE_AGAIN)),
    };
    let message = match first.and_then(|request| request.request) {
        Some(subscribe_request::Request::Subscription(subscription)) => subscription,
        Some(_) | None => {
            let message = "a stream must begin with a subscription";
            return Err(refused(Refusal::new(Reason::SubscriptionOrder, message).field("subscription")));
        }
    };
    let (sender, line) = mpsc::channel(limits::CONSUMER_UNITS_IN_FLIGHT_MAX + limits::CONSUMER_NEWS_OUTSTANDING_MAX);
    let heartbeat_ms = subscription::heartbeat_ms(&message).map_err(refused)?;
    let consumer = ConsumerId(shared.store.next_id());
    let subscription = subscription::subscription(consumer, &message, sender).map_err(refused)?;
    let (consumer, ephemeral) = (subscription.consumer, subscription.ephemeral);
    let (run, consumer_group) = (subscription.run.clone(), subscription.consumer_group.clone());
    let (reply, answer) = oneshot::channel();
    if !shared.store.command(Command::Subscribe(Box::new(subscription), reply)).await {
        return Err(draining(SUBSCRIBE_AGAIN));
    }
    let answer = answer.await.map_err(|_| draining(SUBSCRIBE_AGAIN))?;
    // Joined or refused, by what may not be durable yet.
    shared.store.durable(shared.store.last_position()).await;
    let subscribed = answer.map_err(refused)?;
    let response = messages::subscribed(&run, &consumer_group, &message.consumer, &subscribed);
    let response = subscribe_response::Response::Subscribed(response);
    if !send(outgoing, response).await {
        shared.store.command(Command::Leave(consumer)).await;
        return Err(Status::cancelled("the subscriber is gone"));
    }
    let acks = Arc::new(AcksOutstanding::new());
    Ok(Joined { consumer, ephemeral, heartbeat_ms, line, acks, leaving: Arc::default() })
}

/// Turns requests into commands until the stream ends.
async fn read(
    shared: &Shared,
    (consumer, ephemeral): (ConsumerId, bool),
    acks: &AcksOutstanding,
    requests: &mut Messages<v1::SubscribeRequest>,
) -> End {
    loop {
        let request = match requests.message().await {
            Ok(Some(request)) => request,
            // Who takes rows without acknowledging them has nothing more to say.
            Ok(None) if ephemeral => std::future::pending().await,
            Ok(None) => return End::Over(None),
            Err(broken) => return End::Broken(Some(broken)),
        };
        match subscription::command(consumer, request) {
            Ok(command) => {
                let clock = shared.store.clock();
                tokio::select! {
                    () = acks.begin(&command) => {}
                    () = clock.wait_until(Some(clock.now_ms().saturating_add(limits::TRAINER_UNREAD_MS_MAX))) => {
                        return End::Broken(Some(too_slow()));
                    }
                }
                if !shared.store.command(command).await {
                    return End::Over(Some(draining(SUBSCRIBE_AGAIN)));
                }
            }
            Err(refusal) => return End::Over(Some(refused(refusal))),
        }
    }
}

/// Sends units, news and heartbeats until the line or the stream ends.
async fn write(shared: Shared, mut joined: Joined, outgoing: Outgoing) -> Wrote {
    let clock = shared.store.clock().clone();
    // The first heartbeat comes at once, so that a subscriber sees what it waits for.
    let mut heartbeat_at_ms = clock.now_ms();
    loop {
        let next = tokio::select! {
            biased;
            next = joined.line.recv() => next,
            () = clock.wait_until(Some(heartbeat_at_ms)) => {
                heartbeat_at_ms = clock.now_ms().saturating_add(joined.heartbeat_ms);
                if !send_heartbeat(&shared, joined.consumer, &outgoing).await {
                    return Wrote::Over;
                }
                continue;
            }
        };
        let sent = match next {
            None => return Wrote::All,
            Some(ToConsumer::Unit(_)) if joined.leaving.load(Ordering::Relaxed) => true,
            Some(ToConsumer::Unit(delivery)) => {
                send_unit(&shared, *delivery, (joined.consumer, joined.ephemeral), &outgoing).await
            }
            Some(ToConsumer::Acks(results)) => {
                let sent = send_results(&outgoing, &results, joined.ephemeral).await;
                joined.acks.answered(results.len());
                sent
            }
            Some(ToConsumer::Dropped { unit, reason, about }) => {
                send(&outgoing, messages::dropped(&unit, reason, about.as_ref(), clock.unix_ms())).await
            }
            Some(ToConsumer::LeaseEnded { unit, about }) => {
                send(&outgoing, messages::lease_ended(&unit, about.as_ref(), clock.unix_ms())).await
            }
            Some(ToConsumer::LeftOut { what, about }) => {
                send(&outgoing, messages::left_out(what, about.as_ref(), clock.unix_ms())).await
            }
            Some(ToConsumer::Skipped { units }) => send(&outgoing, messages::skipped(units, clock.unix_ms())).await,
            Some(ToConsumer::Ended(refusal)) => {
                // What it comes from may not be durable yet.
                shared.store.durable(shared.store.last_position()).await;
                outgoing.end(refused(refusal));
                false
            }
        };
        if !sent {
            return Wrote::Over;
        }
        if joined.ephemeral {
            shared.store.command(Command::Room(joined.consumer)).await;
        }
    }
}

async fn send(outgoing: &Outgoing, response: subscribe_response::Response) -> bool {
    outgoing.send(v1::SubscribeResponse { response: Some(response) }, None).await
}

/// Sends what became of units, in messages of bounded size.
async fn send_results(outgoing: &Outgoing, results: &[(UnitId, AckOutcome)], ephemeral: bool) -> bool {
    const ENTRY_BYTES: usize = 16;
    let mut rest = results;
    loop {
        let mut bytes = 0;
        let fits = |(unit, _): &&(UnitId, AckOutcome)| {
            bytes += unit.as_str().len() + ENTRY_BYTES;
            bytes <= limits::UNIT_MESSAGE_BYTES_MAX
        };
        // One always goes, however long its id.
        let count = rest.iter().take_while(fits).count().max(1).min(rest.len());
        let (now, later) = rest.split_at(count);
        if !send(outgoing, messages::ack_result(now, ephemeral)).await {
            return false;
        }
        if later.is_empty() {
            return true;
        }
        rest = later;
    }
}

async fn send_heartbeat(shared: &Shared, consumer: ConsumerId, outgoing: &Outgoing) -> bool {
    let (reply, answer) = oneshot::channel();
    if !shared.store.command(Command::Waiting(consumer, reply)).await {
        return false;
    }
    match answer.await {
        Ok(Some(waiting)) => send(outgoing, messages::heartbeat(&waiting, shared.store.clock().unix_ms())).await,
        // The consumer was let go; its line says why.
        Ok(None) => true,
        Err(_) => false,
    }
}

/// Sends a unit in parts, of which only one is in memory at a time.
async fn send_unit(
    shared: &Shared,
    delivery: UnitDelivery,
    (consumer, ephemeral): (ConsumerId, bool),
    outgoing: &Outgoing,
) -> bool {
    count_wait(shared, &delivery);
    // What they hold in memory is counted until they are sent.
    let _shares: Vec<_> = delivery.rows.iter().map(|rows| Arc::clone(&rows.share)).collect();
    let room = match large_row_bytes(&delivery.planned()) {
        None => None,
        Some(bytes) => match outgoing.unit_room(bytes).await {
            None => return false,
            room => room,
        },
    };
    let of_member = |rows: &UnitRows| (rows.about.key(), Arc::clone(&rows.finalised));
    let members: Vec<_> = delivery.rows.iter().map(of_member).collect();
    let unit = delivery.unit.clone();
    let mut parts = UnitParts::of(delivery);
    while !parts.are_over() {
        if let Some(part) = parts.next_padding() {
            let response = Some(subscribe_response::Response::UnitPart(part));
            if !outgoing.send(v1::SubscribeResponse { response }, room.as_ref()).await {
                return false;
            }
            continue;
        }
        let Some((key, finalised)) = parts.rollout().and_then(|rollout| members.get(rollout)) else { break };
        // Its tokens may leave memory while the part before waits for a slow reader.
        let found = match parts.are_amid_a_row() {
            true => Ok(Some(finalised.now())),
            false => shared.store.with_tokens(key, finalised).await,
        };
        let rollout = match found {
            Ok(Some(rollout)) => rollout,
            Ok(None) if !parts.have_begun() => return passed_over(shared, &unit, ephemeral, outgoing).await,
            Ok(None) => return broken_off(outgoing, &unit),
            Err(refusal) if refusal.reason == Reason::LogUnreadable && !parts.have_begun() => {
                return unreadable(shared, (consumer, ephemeral), unit, outgoing).await;
            }
            Err(refusal) => {
                outgoing.end(refused(refusal));
                return false;
            }
        };
        let Some(part) = parts.next_part(&rollout) else { break };
        drop(rollout);
        let response = Some(subscribe_response::Response::UnitPart(part));
        if !outgoing.send(v1::SubscribeResponse { response }, room.as_ref()).await {
            return false;
        }
    }
    true
}

/// Counts how long a unit took from the event that completed the last of its rollouts, when it goes out first.
fn count_wait(shared: &Shared, delivery: &UnitDelivery) {
    let Some(last) = delivery.rows.iter().max_by_key(|rows| rows.finalised_at_ms) else { return };
    let waited_ms = shared.store.clock().now_ms().saturating_sub(last.finalised_at_ms);
    if let (1, Some(run)) = (delivery.delivery_number, shared.store.run(&last.about.run)) {
        run.metrics.reward_to_row(Duration::from_millis(waited_ms));
    }
}

/// The disk does not give back what a unit is made of. The others go on without it; a consumer group has it among the undeliverable
/// units, to be released by hand once the disk is mended.
async fn unreadable(shared: &Shared, consumer: (ConsumerId, bool), unit: UnitId, outgoing: &Outgoing) -> bool {
    let (consumer, ephemeral) = consumer;
    tracing::error!(unit = unit.as_str(), "a unit cannot be read, and is passed over");
    if ephemeral {
        return send(outgoing, messages::skipped(1, shared.store.clock().unix_ms())).await;
    }
    shared.store.command(Command::Unreadable(consumer, unit)).await
}

/// A unit cannot be sent to its end, since its rollout has ended meanwhile: nothing else may follow what was sent of it.
fn broken_off(outgoing: &Outgoing, unit: &UnitId) -> bool {
    let message = format!("unit {:?} was acknowledged by another while it was sent; subscribe again", unit.as_str());
    outgoing.end(refused(Refusal::new(Reason::ConsumerTooSlow, message).retry_after_ms(SLOW_RETRY_AFTER_MS)));
    false
}

/// A unit cannot be sent any more, since its rollout has ended: acknowledged by another, or gone with its run. Only who holds nothing
/// back misses it.
async fn passed_over(shared: &Shared, unit: &UnitId, ephemeral: bool, outgoing: &Outgoing) -> bool {
    tracing::debug!(unit = unit.as_str(), "a unit was passed over, since its rollout has ended");
    !ephemeral || send(outgoing, messages::skipped(1, shared.store.clock().unix_ms())).await
}

/// Bytes of the longest of these rows; none if all of them together fit into what each trainer may have for itself.
fn large_row_bytes(planned: &[(Arc<PolicyPlan>, Range<usize>)]) -> Option<usize> {
    let rows = || planned.iter().flat_map(|(plan, range)| plan.rows.get(range.clone()).unwrap_or_default());
    let bytes = |tokens: u32| tokens as usize * TOKEN_BYTES;
    let all: usize = rows().map(|row| bytes(row.tokens)).sum();
    (all > limits::TRAINER_BYTES_FREE).then(|| rows().map(|row| bytes(row.tokens)).max().unwrap_or(0))
}
