//! Tasks of one thread, of which whoever drives them says which goes on next: nothing here runs by itself, and what is woken
//! stands in the order of its number, whatever order it was woken in.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker};

use parking_lot::Mutex;

/// Whose task it is: all that one of them has ends together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Owner {
    /// The sequencing task, and the timers.
    Service,
    /// A worker, and its streams.
    Worker(usize),
    /// A member of a consumer group, by group and place.
    Trainer(usize, usize),
    /// Who makes the run and decides by hand.
    Operator,
}

type Work = Pin<Box<dyn Future<Output = ()>>>;

/// Where tasks are begun.
#[derive(Clone, Default)]
pub(crate) struct Spawner(Rc<RefCell<Vec<(Owner, Work)>>>);

impl Spawner {
    /// Begins a task.
    pub(crate) fn spawn(&self, owner: Owner, work: impl Future<Output = ()> + 'static) {
        self.0.borrow_mut().push((owner, Box::pin(work)));
    }
}

/// All tasks.
#[derive(Default)]
pub(crate) struct Executor {
    tasks: BTreeMap<u64, Task>,
    woken: Arc<Mutex<BTreeSet<u64>>>,
    next_number: u64,
    spawner: Spawner,
}

struct Task {
    owner: Owner,
    work: Work,
    waker: Waker,
}

struct Woken {
    number: u64,
    woken: Arc<Mutex<BTreeSet<u64>>>,
}

impl Wake for Woken {
    fn wake(self: Arc<Self>) {
        self.woken.lock().insert(self.number);
    }
}

impl Executor {
    pub(crate) fn spawner(&self) -> Spawner {
        self.spawner.clone()
    }

    /// The tasks that can go on, by number, with their owners.
    pub(crate) fn ready(&mut self) -> Vec<(u64, Owner)> {
        self.begin_spawned();
        let mut woken = self.woken.lock();
        woken.retain(|number| self.tasks.contains_key(number));
        woken.iter().map(|number| (*number, self.tasks[number].owner)).collect()
    }

    /// Has one task go on as far as it can.
    pub(crate) fn poll(&mut self, number: u64) {
        self.woken.lock().remove(&number);
        let Some(task) = self.tasks.get_mut(&number) else { return };
        let waker = task.waker.clone();
        if let Poll::Ready(()) = task.work.as_mut().poll(&mut Context::from_waker(&waker)) {
            self.tasks.remove(&number);
        }
        self.begin_spawned();
    }

    /// Ends tasks where they stand.
    pub(crate) fn end(&mut self, ends: impl Fn(Owner) -> bool) {
        self.begin_spawned();
        let ending: Vec<u64> =
            self.tasks.iter().filter(|(_, task)| ends(task.owner)).map(|(number, _)| *number).collect();
        for number in ending {
            drop(self.tasks.remove(&number));
        }
    }

    /// Whether somebody has tasks that have not come to their end.
    pub(crate) fn has(&mut self, is: impl Fn(Owner) -> bool) -> bool {
        self.begin_spawned();
        self.tasks.values().any(|task| is(task.owner))
    }

    fn begin_spawned(&mut self) {
        for (owner, work) in self.spawner.0.take() {
            let number = self.next_number;
            self.next_number += 1;
            let waker = Waker::from(Arc::new(Woken { number, woken: Arc::clone(&self.woken) }));
            self.tasks.insert(number, Task { owner, work, waker });
            self.woken.lock().insert(number);
        }
    }
}
