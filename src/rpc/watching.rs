//! `InspectService.Watch`: what changes in a run, as it changes.
//!
//! A watcher looks at most every [`LOOK_INTERVAL_MS`], and not while its reader has not taken what it found: what changes twice
//! meanwhile is told once, as it is then. Nothing is told before it is durable. Calls are told to who watches one rollout: each
//! when it has come, a few at each look, and again whenever something of it has become another; so that watching costs those
//! who report little, however fast they are, and in the end everything has been told as it stands.

use std::collections::{BTreeMap, BTreeSet};

use prost::Message;
use tokio::sync::mpsc;
use tonic::Status;
use xxhash_rust::xxh3::xxh3_64;

use crate::error::{Reason, Refusal};
use crate::ids::{GroupId, RolloutId, RolloutRef, RunId};
use crate::limits;
use crate::log::Position;
use crate::proto::v1::{self, watch_response::Change};
use crate::rollout::view::RolloutView;
use crate::store::RolloutKey;
use crate::store::effect::Ended;
use crate::store::sequencer::{ConsumerGroupLook, Look};
use crate::store::watch::{Dirty, Wanted, Watching};

use super::convert::inspect::calls::{Shower, open_calls};
use super::convert::inspect::{self, Outline, Shown, lists};
use super::{Shared, draining, ended_message, refused};

/// Changes on their way to one reader.
const CHANGES_OUTSTANDING: usize = 4;
/// The least time between two looks.
const LOOK_INTERVAL_MS: u64 = 100;
/// New calls told at one look, and known calls looked at again.
const CALLS_AT_ONCE: usize = 256;
/// Rollouts and groups read before they are sent.
const READ_AT_ONCE: usize = 256;

/// A line of changes to one reader.
pub(super) type Changes = mpsc::Receiver<Result<v1::WatchResponse, Status>>;

/// Nobody listens any more, or why the watch ends.
struct Over(Option<Status>);

/// One who watches a run.
struct Watch {
    shared: Shared,
    run: RunId,
    watching: Watching,
    outgoing: mpsc::Sender<Result<v1::WatchResponse, Status>>,
    calls: CallsTold,
    /// What was told last of the run and of its consumer groups.
    run_told: Option<v1::RunSummary>,
    consumer_groups_told: BTreeMap<String, v1::ConsumerGroupSummary>,
}

/// What was told of the calls of one rollout.
#[derive(Default)]
struct CallsTold {
    attempt: u32,
    /// What each call was when it was told, in the order of arrival.
    fingerprints: Vec<u64>,
    /// Calls that are to be looked at again, and which is next.
    left: usize,
    next: usize,
    /// Calls that have come and were not told.
    untold: bool,
    /// The rollout as calls are told that are not told as of now: finalised, or with kept lists.
    drawn: Option<Drawn>,
}

/// A rollout as it was at some moment. To draw it takes as long as the rollout has calls, under its lock; so an open one is
/// drawn anew only after all its calls were looked at as they were then.
struct Drawn {
    outline: Outline,
    /// Calls that were not looked at since.
    left: usize,
    /// Something has changed since.
    is_stale: bool,
}

impl Shared {
    /// Begins to tell what changes.
    pub(super) fn watch(&self, run: RunId, wanted: Wanted) -> Result<Changes, Status> {
        let not_found = Refusal::new(Reason::RunNotFound, format!("there is no run {run:?}")).field("run_id");
        let watched = self.store.run(&run).ok_or_else(|| refused(not_found))?;
        let watching = watched.watch(wanted).ok_or_else(|| {
            let message = format!("run {run:?} has {} watchers, as many as it may", limits::RUN_WATCHERS_MAX);
            refused(Refusal::new(Reason::ServiceFull, message).field("run_id").retry_after_ms(10_000))
        })?;
        let (outgoing, changes) = mpsc::channel(CHANGES_OUTSTANDING);
        let watch = Watch {
            shared: self.clone(),
            run,
            watching,
            outgoing,
            calls: CallsTold::default(),
            run_told: None,
            consumer_groups_told: BTreeMap::new(),
        };
        tokio::spawn(watch.serve());
        Ok(changes)
    }
}

impl Watch {
    async fn serve(mut self) {
        let _open = self.shared.streams.enter();
        let (shared, outgoing) = (self.shared.clone(), self.outgoing.clone());
        let over = tokio::select! {
            over = self.tell() => over,
            () = outgoing.closed() => Over(None),
            () = shared.drained() => Over(Some(draining("watch again after the delay"))),
        };
        if let Over(Some(status)) = over {
            // Who is gone does not want the reason.
            let _ = outgoing.send(Err(status)).await;
        }
    }

    /// Tells what stands now, then what changes.
    async fn tell(&mut self) -> Over {
        let clock = self.shared.store.clock().clone();
        let mut dirty = Dirty::first(self.watching.wanted());
        let (mut since, mut through) = (Position::default(), self.shared.store.last_position());
        loop {
            if let Err(over) = self.look(dirty, since).await {
                return over;
            }
            since = through;
            clock.wait_until(Some(clock.now_ms().saturating_add(LOOK_INTERVAL_MS))).await;
            if self.calls.are_told() {
                self.watching.stirred().await;
            }
            // What is marked after this was taken has a position that is not before it.
            through = self.shared.store.last_position();
            dirty = self.watching.take();
        }
    }

    async fn look(&mut self, dirty: Dirty, since: Position) -> Result<(), Over> {
        if dirty.is_over {
            // That it is gone may rest on what is not durable yet.
            self.shared.store.durable(self.shared.store.last_position()).await;
            let refusal = Refusal::new(Reason::RunNotFound, format!("run {:?} was deleted", self.run)).field("run_id");
            return Err(Over(Some(refused(refusal))));
        }
        let is_of_run = *self.watching.wanted() == Wanted::default();
        self.rollouts(dirty.rollouts).await?;
        if dirty.all_rollouts {
            self.all_rollouts(since).await?;
        }
        self.rollout_calls().await?;
        self.groups(dirty.groups).await?;
        if dirty.all_groups {
            self.all_groups().await?;
        }
        if is_of_run && dirty.run {
            self.run_and_consumer_groups().await?;
        }
        Ok(())
    }

    /// Sends changes, once all that they may rest on is durable. Waits for a slow reader.
    async fn send(&self, changes: Vec<Change>) -> Result<(), Over> {
        if changes.is_empty() {
            return Ok(());
        }
        self.shared.store.durable(self.shared.store.last_position()).await;
        for change in changes {
            let response = v1::WatchResponse { change: Some(change) };
            self.outgoing.send(Ok(response)).await.map_err(|_| Over(None))?;
        }
        Ok(())
    }

    async fn rollouts(&mut self, rollouts: BTreeSet<RolloutId>) -> Result<(), Over> {
        let mut rollouts = rollouts.into_iter().peekable();
        while rollouts.peek().is_some() {
            let some: Vec<RolloutId> = rollouts.by_ref().take(READ_AT_ONCE).collect();
            let changes = some.into_iter().filter_map(|rollout| self.rollout(rollout)).collect();
            self.send(changes).await?;
        }
        Ok(())
    }

    /// All rollouts of the run, or of the group, that may have changed since this record.
    async fn all_rollouts(&mut self, since: Position) -> Result<(), Over> {
        let mut after: Option<RolloutId> = None;
        loop {
            let (run, group, behind) = (self.run.clone(), self.watching.wanted().group.clone(), after);
            let ids = self.shared.ask(|reply| Look::Rollouts(run, group, behind, READ_AT_ONCE, reply)).await;
            let ids = ids.and_then(|ids| ids.map_err(refused)).map_err(|status| Over(Some(status)))?;
            let (is_last, last) = (ids.len() < READ_AT_ONCE, ids.last().cloned());
            let changed = |rollout: &RolloutId| self.shared.store.changed_since(&self.key(rollout.clone()), since);
            let changed: Vec<RolloutId> = ids.into_iter().filter(changed).collect();
            let changes = changed.into_iter().filter_map(|rollout| self.rollout(rollout)).collect();
            self.send(changes).await?;
            if is_last {
                return Ok(());
            }
            after = last;
            tokio::task::yield_now().await;
        }
    }

    fn key(&self, rollout: RolloutId) -> RolloutKey {
        RolloutKey { run: self.run.clone(), rollout }
    }

    /// A rollout as it is now. Of the watched one, its calls are to be told, too.
    fn rollout(&mut self, rollout: RolloutId) -> Option<Change> {
        if self.watching.wanted().rollout.is_some() {
            self.calls.changed();
        }
        let key = self.key(rollout);
        match self.shared.store.show(&key, |view| inspect::summary(&view)) {
            Some(Ok(summary)) => Some(Change::Rollout(summary)),
            gone => {
                self.calls = CallsTold::default();
                let ended = gone?.err()?;
                Some(Change::Rollout(ended_summary(key, &ended)))
            }
        }
    }

    /// Some calls of the watched rollout that are new, or not what they were.
    async fn rollout_calls(&mut self) -> Result<(), Over> {
        let Some(rollout) = self.watching.wanted().rollout.clone() else { return Ok(()) };
        if self.calls.are_told() {
            return Ok(());
        }
        let key = self.key(rollout);
        if let Err(refusal) = self.shared.store.restore(&key).await {
            return Err(Over(Some(refused(refusal))));
        }
        let calls = &mut self.calls;
        let read = self.shared.store.show(&key, |view| {
            let about = view.about.clone();
            calls.begin(about.attempt);
            if !view.rollout.has_tokens() {
                // They have left again already; what is to be told is told at the next look.
                return None;
            }
            Some(if view.rollout.finalised().is_some() || view.rollout.facts().some_list_given() {
                let is_final = view.rollout.finalised().is_some();
                (about, Err(calls.take_drawn(is_final).unwrap_or_else(|| Drawn::new(view))))
            } else {
                let count = view.rollout.facts().forest.call_count();
                let (new, again) = calls.ranges(count);
                let mut shown: Vec<_> = again.clone().zip(open_calls(view.rollout, again)).collect();
                shown.extend(new.clone().zip(open_calls(view.rollout, new)));
                (about, Ok((shown, count)))
            })
        });
        let (about, read) = match read {
            Some(Ok(Some(read))) => read,
            Some(Ok(None)) => return Ok(()),
            Some(Err(_)) | None => {
                // That it is gone is told when its mark is taken.
                self.calls = CallsTold::default();
                return Ok(());
            }
        };
        let (shown, count) = match read {
            Ok(read) => read,
            Err(drawn) => self.drawn_calls(&key, drawn),
        };
        let told = self.calls.told(shown, count);
        let reference = super::convert::report::rollout_ref_message(&about);
        let change = |call| Change::Call(v1::CallChange { rollout: Some(reference.clone()), call: Some(call) });
        self.send(told.into_iter().map(change).collect()).await
    }

    /// Calls of a rollout of which lists are given, or which is finalised: from its outline.
    fn drawn_calls(&mut self, key: &RolloutKey, mut drawn: Drawn) -> (Vec<(usize, v1::CallSummary)>, usize) {
        let outline = &drawn.outline;
        let count = outline.call_count;
        let (new, again) = self.calls.ranges(count);
        let shower = Shower::new(outline);
        let read = |range: std::ops::Range<usize>| {
            let show = |rollout: &mut crate::rollout::Rollout| shower.calls(rollout.facts(), range.clone());
            range.clone().zip(self.shared.store.look_at(key, outline.attempt(), show).unwrap_or_default())
        };
        let shown: Vec<_> = read(again).chain(read(new)).collect();
        drop(shower);
        drawn.left = drawn.left.saturating_sub(shown.len());
        self.calls.drawn = Some(drawn);
        (shown, count)
    }

    async fn groups(&self, groups: BTreeSet<GroupId>) -> Result<(), Over> {
        let mut groups = groups.into_iter().peekable();
        while groups.peek().is_some() {
            let some: Vec<GroupId> = groups.by_ref().take(READ_AT_ONCE).collect();
            let looks = self.shared.ask(|reply| Look::TheseGroups(self.run.clone(), some, reply)).await;
            let looks = looks.and_then(|looks| looks.map_err(refused)).map_err(|status| Over(Some(status)))?;
            self.send(looks.iter().map(|look| Change::Group(lists::group(look))).collect()).await?;
        }
        Ok(())
    }

    async fn all_groups(&self) -> Result<(), Over> {
        let mut after = None;
        loop {
            let (run, behind) = (self.run.clone(), after);
            let page = self.shared.ask(|reply| Look::Groups(run, behind, READ_AT_ONCE, false, reply)).await;
            let (looks, next) = page.and_then(|page| page.map_err(refused)).map_err(|status| Over(Some(status)))?;
            self.send(looks.iter().map(|look| Change::Group(lists::group(look))).collect()).await?;
            match next {
                Some(next) => after = Some(next),
                None => return Ok(()),
            }
        }
    }

    /// The run and its consumer groups, as far as they are not what they were.
    async fn run_and_consumer_groups(&mut self) -> Result<(), Over> {
        let ended = |status| Over(Some(status));
        let run = self.shared.ask(|reply| Look::Run(self.run.clone(), reply)).await;
        let run = lists::run(&run.and_then(|run| run.map_err(refused)).map_err(ended)?);
        let groups = self.consumer_groups().await.map_err(ended)?;
        let clock = self.shared.store.clock();
        let now = (clock.now_ms(), clock.unix_ms());
        let mut changes = Vec::new();
        if self.run_told.as_ref() != Some(&run) {
            self.run_told = Some(run.clone());
            changes.push(Change::Run(run));
        }
        self.consumer_groups_told.retain(|name, _| groups.iter().any(|group| group.name.as_str() == name));
        for group in &groups {
            let summary = lists::consumer_group(&self.run, group, now);
            // That time goes by is no change.
            let timeless = v1::ConsumerGroupSummary { oldest_age: None, ..summary.clone() };
            if self.consumer_groups_told.get(group.name.as_str()) != Some(&timeless) {
                self.consumer_groups_told.insert(group.name.to_string(), timeless);
                changes.push(Change::ConsumerGroup(summary));
            }
        }
        self.send(changes).await
    }

    /// All consumer groups of the run.
    async fn consumer_groups(&self) -> Result<Vec<ConsumerGroupLook>, Status> {
        let (mut groups, mut after) = (Vec::new(), None);
        loop {
            let look = |reply| Look::ConsumerGroups(self.run.clone(), after, READ_AT_ONCE, reply);
            let (more, next) = self.shared.ask(look).await?.map_err(refused)?;
            groups.extend(more);
            match next {
                Some(next) => after = Some(next),
                None => return Ok(groups),
            }
        }
    }
}

fn ended_summary(key: RolloutKey, ended: &Ended) -> v1::RolloutSummary {
    let about = RolloutRef { run: key.run, group: ended.group.clone(), rollout: key.rollout, attempt: ended.attempt };
    inspect::ended_summary(&about, ended_message(ended))
}

impl Drawn {
    fn new(view: RolloutView<'_>) -> Self {
        let outline = Outline::new(view, &Shown::default());
        Self { left: outline.call_count, outline, is_stale: false }
    }
}

impl CallsTold {
    /// Something of the rollout has changed: any call may be another now.
    fn changed(&mut self) {
        self.left = self.fingerprints.len();
        self.untold = true;
        if let Some(drawn) = &mut self.drawn {
            drawn.is_stale = true;
        }
    }

    /// The rollout as it was drawn before, if that is to be used still.
    fn take_drawn(&mut self, is_final: bool) -> Option<Drawn> {
        // What is finalised stays so.
        self.drawn
            .take()
            .filter(|drawn| if is_final { drawn.outline.is_final() } else { !drawn.is_stale || drawn.left > 0 })
    }

    /// Whether there is nothing more to tell until something changes.
    fn are_told(&self) -> bool {
        !self.untold && self.left == 0
    }

    /// Another attempt has other calls.
    fn begin(&mut self, attempt: u32) {
        if self.attempt != attempt {
            *self = Self { attempt, untold: true, ..Self::default() };
        }
    }

    /// Which new calls are to be told now, and which are to be looked at again once there are no new ones.
    fn ranges(&self, count: usize) -> (std::ops::Range<usize>, std::ops::Range<usize>) {
        let known = self.fingerprints.len();
        let new = known..count.min(known + CALLS_AT_ONCE);
        let next = if self.next < known { self.next } else { 0 };
        let again = if new.is_empty() { CALLS_AT_ONCE.min(self.left).min(known - next) } else { 0 };
        (new, next..next + again)
    }

    /// Takes account of calls that were read, of so many; gives those that are to be told.
    fn told(&mut self, shown: Vec<(usize, v1::CallSummary)>, count: usize) -> Vec<v1::CallSummary> {
        let mut told = Vec::new();
        for (place, call) in shown {
            let fingerprint = xxh3_64(&call.encode_to_vec());
            match self.fingerprints.get_mut(place) {
                Some(known) => {
                    self.left -= 1;
                    self.next = place + 1;
                    if *known == fingerprint {
                        continue;
                    }
                    *known = fingerprint;
                }
                None => {
                    self.fingerprints.push(fingerprint);
                    // Those that are to be looked at again are so many in a circle, which is one longer now.
                    self.left += usize::from(self.left > 0);
                }
            }
            told.push(call);
        }
        self.untold = self.fingerprints.len() < count;
        if self.drawn.as_ref().is_some_and(|drawn| drawn.left == 0 && drawn.is_stale && !drawn.outline.is_final()) {
            // It is drawn anew, and all of it looked at again.
            self.drawn = None;
            self.changed();
        }
        told
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Reads what is to be read next, of so many calls; says which.
    fn look(told: &mut CallsTold, count: usize) -> Vec<usize> {
        let (new, again) = told.ranges(count);
        let read: Vec<usize> = again.chain(new).collect();
        let call = |place: usize| v1::CallSummary { sequence: place as u64, ..v1::CallSummary::default() };
        told.told(read.iter().map(|place| (*place, call(*place))).collect(), count);
        read
    }

    #[test]
    fn every_call_is_looked_at_again_though_others_come_meanwhile() {
        for before in 0..3 {
            let mut told = CallsTold::default();
            told.begin(1);
            assert_eq!(look(&mut told, 3), [0, 1, 2]);
            told.changed();
            assert_eq!(look(&mut told, 3), [0, 1, 2]);
            told.changed();
            (told.next, told.left) = (3 - before, 3);
            assert_eq!(look(&mut told, 4), [3], "a new one comes first");
            let mut again = Vec::new();
            while !told.are_told() {
                again.extend(look(&mut told, 4));
            }
            again.sort_unstable();
            assert_eq!(again, [0, 1, 2, 3]);
        }
    }
}
