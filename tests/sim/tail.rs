//! Somebody who watches rows go by: an ephemeral subscription, which holds nothing back and is given each row at most once. What
//! it sees must be rows that trainers get too.

use std::rc::Rc;
use std::sync::Arc;

use hedgerow::ids::ConsumerGroupId;
use hedgerow::queue::ConsumerId;
use hedgerow::rollout::run_settings::{ConsumerGroupSettings, StartPosition};
use hedgerow::store::sequencer::{Command, Subscription, ToConsumer};
use tokio::sync::{mpsc, oneshot};

use crate::applied;
use crate::check::some_rows;
use crate::executor::Owner;
use crate::expected::Accepted;
use crate::life::Life;
use crate::plan;
use crate::service::Row;
use crate::world::World;

/// How long it watches, and how long it is away.
const WATCHES_MS: usize = 3000;
/// Messages on their way to it.
const LINE: usize = 40;

/// Begins to watch, now and then, until all is calm.
pub(crate) fn begin(world: &Rc<World>, life: &Rc<Life>) {
    let (world, life) = (Rc::clone(world), Rc::clone(life));
    world.clone().spawner.spawn(Owner::Operator, async move {
        while !world.calm.get() && !life.draining.get() {
            watch(&world, &life).await;
            world.wait(world.below(WATCHES_MS) as u64).await;
        }
    });
}

async fn watch(world: &Rc<World>, life: &Rc<Life>) {
    let store = Arc::clone(&life.store);
    let consumer = ConsumerId(store.next_id());
    let (sender, mut line) = mpsc::channel(LINE);
    let start = if world.one_in(2) { StartPosition::Earliest } else { StartPosition::Latest };
    let subscription = Subscription {
        shard: None,
        step_index: None,
        run: plan::run(),
        consumer_group: ConsumerGroupId::parse(&format!("ephemeral/{}", consumer.0)).expect("an id"),
        consumer_name: String::new(),
        consumer,
        settings: Some(ConsumerGroupSettings { start, ..ConsumerGroupSettings::default() }),
        ephemeral: true,
        credit_tokens: u64::MAX,
        policy_version: None,
        held: Vec::new(),
        sender,
    };
    let (reply, answer) = oneshot::channel();
    store.command(Command::Subscribe(Box::new(subscription), reply)).await;
    if let Ok(Err(refusal)) = answer.await
        && !life.draining.get()
    {
        world.fail(format!("a tail is refused: {refusal}"));
    }
    let ends = world.wait(world.below(WATCHES_MS) as u64);
    tokio::pin!(ends);
    loop {
        let news = tokio::select! {
            biased;
            () = &mut ends => break,
            news = line.recv() => news,
        };
        let Some(news) = news else { break };
        match news {
            ToConsumer::Unit(delivery) => match applied::gather(&store, *delivery).await {
                Ok(None) => world.count("rows missed by tails", 1),
                Ok(Some(unit)) => {
                    world.say("tail", format_args!("sees {}", unit.unit_id));
                    world.count("rows seen by tails", unit.rows.len());
                    world.seen.borrow_mut().extend(unit.rows);
                }
                Err(fault) => world.check_readable(format_args!("tail: {fault}")),
            },
            ToConsumer::Skipped { units } => world.count("units skipped", usize::try_from(units).unwrap_or(0)),
            ToConsumer::Ended(refusal) => world.fail(format!("a tail is ended: {refusal}")),
            ToConsumer::Acks(_)
            | ToConsumer::Dropped { .. }
            | ToConsumer::LeaseEnded { .. }
            | ToConsumer::LeftOut { .. } => {}
        }
        if world.one_in(4) {
            world.wait(world.below(200) as u64).await;
        }
    }
    store.command(Command::Leave(consumer)).await;
}

/// The rows that were seen of a rollout are those of the model.
pub(crate) fn rows(world: &World, rollout: usize, attempt: u32, accepted: &Accepted) -> Result<(), String> {
    let planned = &world.plan.rollouts[rollout];
    let seen = world.seen.borrow();
    let mut found: Vec<Row> = seen.iter().filter(|row| row.header.rollout_id == planned.id).cloned().collect();
    if let Some(other) = found.iter().find(|row| row.header.attempt != attempt) {
        return Err(format!("{} was seen, and attempt {attempt} is finalised", other.row_id));
    }
    for row in &mut found {
        crate::credit::check(&planned.case, row)?;
        row.header.incomplete = false;
        row.row_id = row.row_id.replacen(&format!("/{attempt}/"), "/0/", 1);
    }
    let answer = accepted.answer(&ConsumerGroupSettings::default()).map_err(|refusal| format!("{refusal:?}"))?;
    some_rows(&answer.rows, found, planned.reward, true)
}
