//! Members of consumer groups: they take units, apply the rows that they have not applied, keep a checkpoint now and then, and
//! acknowledge what is in it, late, out of order and twice. They give units back, leave, and come back with what they hold.
//! One that dies comes back from the checkpoint.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::future::poll_fn;
use std::rc::Rc;
use std::sync::Arc;

use hedgerow::queue::{ConsumerId, UnitId};
use hedgerow::store::sequencer::{AckOutcome, Command, Subscription, ToConsumer, UnitDelivery};
use tokio::sync::{mpsc, oneshot};

use crate::applied::{self, Applied, Ask};
use crate::executor::Owner;
use crate::life::Life;
use crate::plan;
use crate::service::Unit;
use crate::world::World;

/// Messages on their way to one member: as many as in the service, or so few that it may be let go.
const LINE: [usize; 4] = [512, 512, 24, 4];
/// How long a member thinks, now and then.
const THINKS_MS: [usize; 4] = [20, 500, 20_000, 400_000];
/// How long it is away when it has left.
const AWAY_MS: usize = 30_000;

/// The service's side of a subscription, and the line between.
pub(crate) struct Connection {
    pub(crate) consumer: ConsumerId,
    line: RefCell<mpsc::Receiver<ToConsumer>>,
}

impl Connection {
    async fn next(&self) -> Option<ToConsumer> {
        poll_fn(|context| self.line.borrow_mut().poll_recv(context)).await
    }
}

/// Begins a member, or begins it anew.
pub(crate) fn begin(world: &Rc<World>, life: &Rc<Life>, group: usize, member: usize) {
    let (world, life) = (Rc::clone(world), Rc::clone(life));
    world.clone().spawner.spawn(Owner::Trainer(group, member), async move {
        let name = format!("trainer {group}.{member}");
        let mut this = Member {
            world,
            life,
            group,
            member,
            name,
            seek_count: 0,
            seeks: 0,
            fresh: Vec::new(),
            asks: VecDeque::new(),
            settled_count: 0,
        };
        this.run().await;
    });
}

/// A member's process has died. The service notices at once, later, or never.
pub(crate) fn dies(world: &Rc<World>, life: &Rc<Life>, group: usize, member: usize) {
    let Some(connection) = life.connections.borrow_mut().remove(&(group, member)) else { return };
    let consumer = connection.consumer;
    let notices = world.below(3);
    world.say(format_args!("trainer {group}.{member}"), format_args!("dies, and that is noticed as {notices}"));
    if notices == 0 {
        life.half_open.borrow_mut().push(connection);
        return;
    }
    let store = Arc::clone(&life.store);
    let world = Rc::clone(world);
    world.clone().spawner.spawn(Owner::Service, async move {
        if notices == 1 {
            world.wait(world.below(60_000) as u64).await;
        }
        store.command(Command::Leave(consumer)).await;
    });
}

/// A member at work. What is not in the checkpoint dies with it.
struct Member {
    world: Rc<World>,
    life: Rc<Life>,
    group: usize,
    member: usize,
    name: String,
    /// How often the group had been sought, as the service says and as is known here, when it subscribed.
    seek_count: u64,
    seeks: usize,
    /// Applied, and not in the checkpoint.
    fresh: Vec<Unit>,
    /// Acknowledgements, and units given back, that are not answered.
    asks: VecDeque<Ask>,
    /// How many units were settled when nothing was in the line: none of them is in it.
    settled_count: usize,
}

/// How a subscription came to its end.
#[derive(PartialEq)]
enum End {
    /// The service stops.
    Draining,
    /// It is to be opened anew.
    Again,
}

impl Member {
    async fn run(&mut self) {
        while !self.life.draining.get() {
            let Some(connection) = self.subscribe().await else { return };
            if self.serve(&connection).await == End::Draining {
                return;
            }
            if !self.world.calm.get() && self.world.one_in(2) {
                self.world.wait(self.world.below(AWAY_MS) as u64).await;
            }
        }
    }

    fn applied(&self) -> &RefCell<Applied> {
        &self.world.applied[self.group]
    }

    async fn command(&self, command: Command) {
        self.life.store.command(command).await;
    }

    /// Opens a subscription, with what the checkpoint says that it holds.
    async fn subscribe(&mut self) -> Option<Rc<Connection>> {
        let store = Arc::clone(&self.life.store);
        let of_group = &self.world.character.consumer_groups[self.group];
        let consumer = ConsumerId(store.next_id());
        let capacity = if self.world.calm.get() { LINE[0] } else { LINE[self.world.below(LINE.len())] };
        let (sender, line) = mpsc::channel(capacity);
        let held = self.applied().borrow().held_by(self.member);
        let subscription = Subscription {
            shard: None,
            step_index: None,
            run: plan::run(),
            consumer_group: of_group.name.clone(),
            consumer_name: if of_group.named { self.name.clone() } else { String::new() },
            consumer,
            settings: (!of_group.declared || self.world.one_in(2)).then(|| of_group.settings.clone()),
            ephemeral: false,
            credit_tokens: of_group.credit_tokens,
            policy_version: None,
            held: held.iter().map(|unit| UnitId::new(unit.as_str())).collect(),
            sender,
        };
        self.asks.clear();
        self.nothing_is_in_line();
        let (reply, answer) = oneshot::channel();
        store.command(Command::Subscribe(Box::new(subscription), reply)).await;
        let connection = Rc::new(Connection { consumer, line: RefCell::new(line) });
        let before = self.life.connections.borrow_mut().insert((self.group, self.member), Rc::clone(&connection));
        drop(before);
        let answer = answer.await.ok()?;
        // Joined or refused, by what may not be durable yet.
        let position = store.last_position();
        store.durable(position).await;
        self.life.answered(position.0);
        match answer {
            Ok(subscribed) => {
                (self.seek_count, self.seeks) = (subscribed.seek_count, self.applied().borrow().seeks);
                let joined = &subscribed.joined;
                self.say(format_args!("joins: holds {:?}, lost {:?}", joined.held, joined.lost));
                self.world.count("subscriptions", 1);
                self.world.count("units held again", joined.held.len());
                Some(connection)
            }
            Err(refusal) => {
                if !self.life.draining.get() {
                    self.world.fail(format!("{} is refused: {refusal}", self.name));
                }
                None
            }
        }
    }

    fn nothing_is_in_line(&mut self) {
        let settled_count = self.applied().borrow().settled_count();
        self.settled_count = settled_count;
    }

    fn say(&self, what: impl std::fmt::Display) {
        self.world.say(&self.name, what);
    }

    async fn serve(&mut self, connection: &Connection) -> End {
        loop {
            if self.life.draining.get() {
                self.command(Command::Leave(connection.consumer)).await;
                return End::Draining;
            }
            let has_work = !self.fresh.is_empty() || !self.applied().borrow().held_by(self.member).is_empty();
            let at_hand = connection.line.borrow_mut().try_recv();
            if at_hand.as_ref().is_err() {
                self.nothing_is_in_line();
            }
            let news = match at_hand {
                Ok(news) => Some(news),
                Err(mpsc::error::TryRecvError::Disconnected) => None,
                Err(mpsc::error::TryRecvError::Empty) if has_work => {
                    if let Some(end) = self.act(connection.consumer).await {
                        return end;
                    }
                    continue;
                }
                Err(mpsc::error::TryRecvError::Empty) => {
                    tokio::select! {
                        biased;
                        () = self.life.drain.notified() => continue,
                        news = connection.next() => news,
                    }
                }
            };
            match news {
                Some(news) => {
                    if let Some(end) = self.take(news).await {
                        return end;
                    }
                }
                None => {
                    self.say("is let go");
                    self.world.count("members let go", 1);
                    return End::Again;
                }
            }
        }
    }

    /// Takes what it is sent.
    async fn take(&mut self, news: ToConsumer) -> Option<End> {
        match news {
            ToConsumer::Unit(delivery) => return self.unit(*delivery).await,
            ToConsumer::Acks(results) => {
                let judged = match self.asks.pop_front() {
                    Some(ask) => self.applied().borrow_mut().answered(&ask, &results, self.seeks),
                    None => Err(format!("nothing was asked, and it is told {results:?}")),
                };
                self.world.check(&self.name, judged);
                for (unit, outcome) in results {
                    self.say(format_args!("{unit} is {outcome:?}"));
                    self.world.count(
                        match outcome {
                            AckOutcome::Acknowledged => "acknowledged",
                            AckOutcome::ShardAcknowledged => "shards acknowledged",
                            AckOutcome::Already => "acknowledged before",
                            AckOutcome::Unknown => "unknown units",
                            AckOutcome::Dropped => "dropped units",
                            AckOutcome::BeforeSeek => "acknowledged from before a seek",
                            AckOutcome::Returned => "returned",
                            AckOutcome::NotHeld => "not held",
                        },
                        1,
                    );
                }
            }
            ToConsumer::Dropped { unit, reason, .. } => {
                self.say(format_args!("{unit} is dropped: {reason:?}"));
                self.world.count("told of drops", 1);
            }
            ToConsumer::LeaseEnded { unit, .. } => {
                self.say(format_args!("lease of {unit} has ended"));
                self.world.count("leases ended", 1);
            }
            ToConsumer::LeftOut { what, .. } => self.say(format_args!("left out: {what:?}")),
            ToConsumer::Skipped { units } => self.world.fail(format!("{}: {units} units are skipped", self.name)),
            ToConsumer::Ended(refusal) => {
                self.say(format_args!("ended: {}", refusal.reason.as_str()));
                return Some(End::Again);
            }
        }
        None
    }

    async fn unit(&mut self, delivery: UnitDelivery) -> Option<End> {
        let number = delivery.delivery_number;
        self.world.count(if number > 1 { "units given again" } else { "units given" }, 1);
        let read_back = delivery.rows.iter().any(|rows| !rows.finalised.now().has_tokens());
        self.world.count("units read back", usize::from(read_back));
        match applied::gather(&self.life.store, delivery).await {
            Ok(None) => self.world.count("units passed over", 1),
            Ok(Some(unit)) => {
                let digest = xxhash_rust::xxh3::xxh3_64(format!("{:?}", unit.rows).as_bytes());
                self.say(format_args!("takes {} #{number} {digest:016x}", unit.unit_id));
                let judged = self.applied().borrow().judge(&unit, self.settled_count);
                self.world.check(format_args!("{}, {}", self.name, unit.unit_id), judged);
                self.fresh.push(unit);
            }
            Err(fault) => {
                self.world.check_readable(format_args!("{}: {fault}", self.name));
                return Some(End::Again);
            }
        }
        None
    }

    /// Does something with what it has.
    async fn act(&mut self, consumer: ConsumerId) -> Option<End> {
        if self.world.calm.get() {
            self.checkpoint();
            self.acknowledge(consumer, usize::MAX).await;
            self.wait_for_answers().await;
            return None;
        }
        match self.world.below(16) {
            0..4 => self.checkpoint(),
            4..9 => self.acknowledge(consumer, 1 + self.world.below(3)).await,
            9 => self.give_back(consumer).await,
            10 => {
                self.command(Command::SignOfLife(consumer)).await;
                let tokens = self.world.character.consumer_groups[self.group].credit_tokens;
                self.command(Command::Credit(consumer, tokens + self.world.below(50) as u64)).await;
            }
            11 => {
                self.say("leaves");
                self.command(Command::Leave(consumer)).await;
                return Some(End::Again);
            }
            12 => self.ask_for_nothing(consumer).await,
            _ => self.world.wait(self.world.below(THINKS_MS[self.world.below(THINKS_MS.len())]) as u64).await,
        }
        None
    }

    /// Waits until what was sent is answered, for the answers stand in the line then.
    async fn wait_for_answers(&self) {
        let (reply, reached) = oneshot::channel();
        self.command(Command::Barrier(reply)).await;
        tokio::select! {
            biased;
            () = self.life.drain.notified() => {}
            _ = reached => {}
        }
    }

    fn checkpoint(&mut self) {
        if !self.fresh.is_empty() {
            self.say(format_args!("keeps {} units", self.fresh.len()));
        }
        for unit in self.fresh.drain(..) {
            let kept = self.world.applied[self.group].borrow_mut().keep(self.member, unit);
            self.world.check(&self.name, kept);
        }
    }

    /// Acknowledges some of what it holds, the last first, and now and then one that it does not hold, or twice.
    async fn acknowledge(&mut self, consumer: ConsumerId, most: usize) {
        let mut units = self.applied().borrow().held_by(self.member);
        let skipped = if most < units.len() { self.world.below(units.len() - most + 1) } else { 0 };
        units = units.into_iter().skip(skipped).take(most).collect();
        units.reverse();
        if self.world.goes_wrong(8) {
            let any = self.applied().borrow().units.keys().cloned().collect::<Vec<_>>();
            units.extend((!any.is_empty()).then(|| any[self.world.below(any.len())].clone()));
        }
        if units.is_empty() {
            return;
        }
        self.say(format_args!("acknowledges {units:?}"));
        // Now and then as if they were from before the last seek.
        let is_old = self.seek_count > 0 && self.world.goes_wrong(6);
        let seek_count = self.seek_count - u64::from(is_old);
        self.asks_for(false, is_old, &units);
        let units = units.iter().map(|unit| UnitId::new(unit.as_str())).collect();
        self.command(Command::Ack(consumer, units, seek_count)).await;
    }

    /// Gives units back that it has applied or not, at once or to be put off.
    async fn give_back(&mut self, consumer: ConsumerId) {
        let mut units: Vec<String> = self.fresh.drain(..).map(|unit| unit.unit_id).collect();
        units.extend(self.applied().borrow().held_by(self.member).into_iter().take(1));
        let delay_ms = self.world.one_in(2).then(|| self.world.below(100_000) as u64);
        self.say(format_args!("gives back {units:?} for {delay_ms:?}"));
        self.asks_for(true, false, &units);
        let units = units.iter().map(|unit| UnitId::new(unit.as_str())).collect();
        self.command(Command::Nack(consumer, units, delay_ms)).await;
    }

    /// Acknowledges what is not there.
    async fn ask_for_nothing(&mut self, consumer: ConsumerId) {
        let units = ["sim/nobody/0/main/a".to_owned()];
        self.asks_for(false, false, &units);
        let units = units.iter().map(|unit| UnitId::new(unit.as_str())).collect();
        self.command(Command::Ack(consumer, units, self.seek_count)).await;
    }

    fn asks_for(&mut self, gives_back: bool, is_old: bool, units: &[String]) {
        let ask = self.applied().borrow_mut().ask(gives_back, is_old, units);
        self.asks.push_back(ask);
    }
}
