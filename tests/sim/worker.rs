//! Workers: each reports its share over a few streams, until everything is answered. What was not answered when a stream, the
//! worker or the service ended, is sent again, and some of what was.
//!
//! A stream is the service's side of one, as `rpc` has it: it takes requests one after another, holds their answers until they are
//! durable, and lets them leave in order.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::rc::Rc;
use std::sync::Arc;

use hedgerow::error::Reason;
use hedgerow::log::Position;
use hedgerow::store::effect::Notice;
use hedgerow::store::{ReporterId, Store};
use tokio::sync::{Notify, mpsc};

use crate::executor::Owner;
use crate::life::Life;
use crate::model::{Answer, Said};
use crate::world::World;

/// Answered requests that are sent again when a worker begins.
const AGAIN: usize = 6;
/// A stream breaks instead of bringing one in so many answers.
const BREAKS: usize = 60;
/// One in so many requests is sent twice.
const REPEATS: usize = 10;
/// One in so many takes a while to come.
const DELAYS: usize = 6;
const DELAY_MS: usize = 50;
/// How long it is waited first when there was no room.
const RETRY_MS: u64 = 1000;
/// It is doubled so often.
const RETRY_DOUBLINGS: u32 = 8;

/// What a worker has to send.
#[derive(Default)]
pub(crate) struct Line {
    waiting: RefCell<VecDeque<Sending>>,
    pub(crate) more: Notify,
}

#[derive(Clone, Copy)]
struct Sending {
    request: usize,
    tries: u32,
}

impl Line {
    /// Has this sent too.
    pub(crate) fn push(&self, request: usize) {
        self.put(Sending { request, tries: 0 });
    }

    fn put(&self, sending: Sending) {
        self.waiting.borrow_mut().push_back(sending);
        self.more.notify_waiters();
    }

    /// The next to be sent, or one that overtakes it.
    fn take(&self, world: &World) -> Option<Sending> {
        let mut waiting = self.waiting.borrow_mut();
        let reach = waiting.len().min(world.character.reorder);
        let place = if reach > 1 { world.below(reach) } else { 0 };
        let sending = waiting.remove(place)?;
        if world.goes_wrong(REPEATS) {
            let place = world.below(waiting.len() + 1);
            waiting.insert(place, sending);
        }
        Some(sending)
    }
}

/// Begins a worker, or begins it anew.
pub(crate) fn begin(world: &Rc<World>, life: &Rc<Life>, worker: usize) {
    let line = &life.lines[worker];
    line.waiting.borrow_mut().clear();
    let answers = world.answers.borrow();
    let share = (0..answers.len()).filter(|request| world.plan.requests[*request].worker == worker);
    let (known, new): (Vec<usize>, Vec<usize>) = share.partition(|request| answers[*request].is_some());
    drop(answers);
    if !known.is_empty() {
        (0..AGAIN.min(known.len())).for_each(|_| line.push(known[world.below(known.len())]));
    }
    new.into_iter().for_each(|request| line.push(request));
    for stream in 0..world.character.streams {
        let (world, life, line) = (Rc::clone(world), Rc::clone(life), Rc::clone(line));
        let name = format!("worker {worker}.{stream}");
        world.clone().spawner.spawn(Owner::Worker(worker), async move {
            while !life.draining.get() {
                let mut stream = Stream::open(&world, &life, &line, &name);
                stream.serve().await;
            }
        });
    }
}

/// One stream of reports.
struct Stream<'a> {
    world: &'a Rc<World>,
    life: &'a Rc<Life>,
    line: &'a Line,
    name: &'a str,
    reporter: Reporter,
    notices: mpsc::Receiver<Notice>,
    /// In the order of their requests.
    outgoing: VecDeque<Outgoing>,
}

struct Outgoing {
    sending: Sending,
    said: Said,
    position: Position,
}

/// A stream's place in the store, until it ends.
struct Reporter {
    store: Arc<Store>,
    id: ReporterId,
}

impl Drop for Reporter {
    fn drop(&mut self) {
        self.store.forget_reporter(self.id);
    }
}

impl<'a> Stream<'a> {
    fn open(world: &'a Rc<World>, life: &'a Rc<Life>, line: &'a Line, name: &'a str) -> Self {
        let (id, notices) = life.store.reporter();
        let reporter = Reporter { store: Arc::clone(&life.store), id };
        Self { world, life, line, name, reporter, notices, outgoing: VecDeque::new() }
    }

    /// Serves until the stream breaks, or the service is about to stop.
    async fn serve(&mut self) {
        loop {
            self.take_notices().await;
            while self.outgoing.front().is_some_and(|first| self.life.store.is_durable(first.position)) {
                if self.world.goes_wrong(BREAKS) {
                    return self.breaks();
                }
                self.leaves().await;
            }
            let draining = self.life.draining.get();
            let has_room = !draining && self.outgoing.len() < self.world.character.window;
            let next = if has_room { self.line.take(self.world) } else { None };
            match (next, self.outgoing.front()) {
                (Some(sending), _) => self.report(sending).await,
                (None, Some(first)) => self.life.store.durable(first.position).await,
                (None, None) if draining => return,
                (None, None) => self.line.more.notified().await,
            }
        }
    }

    /// Takes one request.
    async fn report(&mut self, sending: Sending) {
        let request = &self.world.plan.requests[sending.request];
        if self.world.one_in(DELAYS) {
            self.world.wait(self.world.below(DELAY_MS) as u64).await;
        }
        self.world.model.borrow_mut().sends(request);
        let _permit = self.life.store.permit(request.weight).await;
        let event = request.event.clone();
        let answer = self.life.store.report(Some(self.reporter.id), &request.about, event, |_, _| ()).await;
        let said = Said::of(&answer.reply);
        let what = self.describe(sending, &said);
        self.world.say(self.name, format_args!("{what} @{}", answer.position.0));
        let answered = Answer { position: answer.position.0, request: sending.request, said: &said };
        let judged = self.world.model.borrow_mut().answered(answered, &self.world.plan);
        self.world.check(format_args!("{what}, {:?}", answer.reply), judged);
        self.outgoing.push_back(Outgoing { sending, said, position: answer.position });
    }

    fn describe(&self, sending: Sending, said: &Said) -> String {
        let request = &self.world.plan.requests[sending.request];
        let known = self.world.answers.borrow()[sending.request].is_some();
        let again = if known { "again " } else { "" };
        format!("{again}{}/{} {:?} -> {said:?}", request.about.rollout, request.attempt, request.what)
    }

    /// The first answer goes to the worker.
    async fn leaves(&mut self) {
        let Some(Outgoing { sending, said, position }) = self.outgoing.pop_front() else { return };
        self.life.answered(position.0);
        if let Said::Refused(reason) = &said {
            self.world.count(reason.as_str(), 1);
            if *reason == Reason::LogUnreadable {
                self.world.check_readable(self.name);
            }
        }
        if said.is_for_later() {
            // While the service stops, it is sent to the next.
            if !self.life.draining.get() {
                self.world.wait(RETRY_MS << sending.tries.min(RETRY_DOUBLINGS)).await;
                self.line.put(Sending { tries: sending.tries + 1, ..sending });
            }
            return;
        }
        self.world.count(
            match said {
                Said::Accepted if self.world.calm.get() => "accepted in the end",
                Said::Accepted => "accepted",
                Said::Duplicate => "duplicates",
                Said::AlreadyEnded { .. } => "already ended",
                Said::Refused(_) => "refused",
            },
            1,
        );
        self.world.answers.borrow_mut()[sending.request] = Some(said);
    }

    /// What was not answered is sent again.
    fn breaks(&mut self) {
        self.world.say(self.name, "breaks");
        self.world.count("broken streams", 1);
        for Outgoing { sending, .. } in self.outgoing.drain(..) {
            self.line.put(sending);
        }
    }

    async fn take_notices(&mut self) {
        while let Ok(notice) = self.notices.try_recv() {
            // It says what is known now.
            let position = self.life.store.last_position();
            self.life.store.durable(position).await;
            self.life.answered(position.0);
            self.world.count("notices", 1);
            let (rollout, call) = (&notice.key.rollout, &notice.call);
            self.world.say(self.name, format_args!("notice of {rollout}: {call} {:?}", notice.placement));
        }
    }
}
