//! `InspectService`: people and tools look. Nothing here changes anything.
//!
//! What is shown waits until all that it may rest on is durable: who asks after an answer sees what was answered.

use std::sync::Arc;

use prost::Message;
use tokio::sync::{Semaphore, oneshot};
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status};

use crate::error::{Reason, Refusal};
use crate::ids::{ConsumerGroupId, GroupId, RolloutId, RolloutRef, RunId};
use crate::limits;
use crate::proto::v1;
use crate::rollout::status::AwaitedSearch;
use crate::rollout::view::RolloutView;
use crate::store::effect::Ended;
use crate::store::sequencer::{Command, Look};
use crate::store::watch::Wanted;
use crate::store::{RolloutKey, Store};

use super::convert::inspect::calls::Shower;
use super::convert::inspect::lists::{self, RolloutFilter, ServiceLedger};
use super::convert::inspect::pages::{self, Page};
use super::convert::inspect::{Outline, Shown};
use super::encoded::Encoded;
use super::refusals::UntilSent;
use super::{Shared, at_once, convert, draining, ended_message, not_in_this_release, refused, run_id};

/// The service.
pub(super) struct Inspect {
    shared: Shared,
    /// Rollouts that may be put together at once.
    shown: Arc<Semaphore>,
    /// Room for large ones that are on their way.
    large: LargeRoom,
}

/// Calls shown, or looked at, under a rollout's lock at once.
const CALLS_AT_ONCE: usize = 256;
/// How often a rollout is looked at anew when another attempt has come meanwhile, or its tokens have left memory.
const TRIES_MAX: usize = 8;
/// Runs asked of the sequencing task at once.
const RUNS_AT_ONCE: usize = 64;
/// Ids of rollouts asked of the sequencing task at once.
const IDS_AT_ONCE: usize = 256;
const KIB: usize = 1 << 10;

impl Inspect {
    pub(super) fn new(shared: Shared) -> Self {
        let at_once = at_once(limits::SHOWN_AT_ONCE_MAX);
        let large = LargeRoom::new(shared.store.edge().shown);
        Self { shared, shown: Arc::new(Semaphore::new(at_once)), large }
    }

    /// A rollout as it is shown, or how it ended. It is put together, and encoded, by a thread that may take long for it.
    async fn shown(&self, key: &RolloutKey, shown: &Shown) -> Result<Option<Result<Encoded, Ended>>, Status> {
        for _ in 0..TRIES_MAX {
            let (store, about, shown) = (Arc::clone(&self.shared.store), key.clone(), shown.clone());
            // It goes on though whoever asked is gone, and others wait for its end all the same. The semaphore is never closed.
            let turn = Arc::clone(&self.shown).acquire_owned().await.ok();
            let draw = move || (drawn(&store, &about, &shown), turn).0;
            let drawn = tokio::task::spawn_blocking(draw).await;
            match drawn.map_err(|_| refused(Refusal::new(Reason::Internal, "the rollout cannot be drawn")))? {
                Drawn::Whole(encoded) => return Ok(Some(Ok(encoded))),
                Drawn::Ended(ended) => return Ok(Some(Err(ended))),
                Drawn::NotThere => return Ok(None),
                // Nobody but who draws takes its lock, which another drawing may hold for long.
                Drawn::Changed => self.shared.store.restore(key).await.map_err(refused)?,
                Drawn::TooLarge => {
                    let message = "the rollout is too large to be shown as a whole";
                    return Err(refused(Refusal::new(Reason::ServiceFull, message)));
                }
            }
        }
        let message = "the rollout changes hands, or leaves memory, faster than it can be shown; ask again";
        Err(refused(Refusal::new(Reason::ServiceFull, message).retry_after_ms(limits::SHOWN_RETRY_AFTER_MS)))
    }

    /// Some runs behind this one, and behind which the next page begins; from the start also the ledger of all of them. The
    /// sequencing task is asked for some at a time.
    async fn runs(
        &self,
        mut after: Option<RunId>,
        mut page: Page<v1::RunSummary>,
    ) -> Result<(Page<v1::RunSummary>, Option<RunId>, Option<v1::ServiceLedger>), Status> {
        let mut ledger = after.is_none().then(ServiceLedger::default);
        let (mut last, mut next) = (None, None);
        loop {
            // One more than there is room for says whether there is a next page.
            let most = if ledger.is_some() { RUNS_AT_ONCE } else { RUNS_AT_ONCE.min(page.room() + 1) };
            let behind = after.clone();
            let runs = self.shared.ask(|reply| Look::Runs(behind, most, reply)).await?;
            for run in &runs {
                if let Some(ledger) = &mut ledger {
                    ledger.add(run);
                }
                if page.room() > 0 {
                    page.push(lists::run(run));
                    last = Some(run.run.clone());
                } else {
                    next.clone_from(&last);
                }
            }
            if runs.len() < most || (ledger.is_none() && next.is_some()) {
                return Ok((page, next, ledger.map(ServiceLedger::message)));
            }
            after = runs.last().map(|run| run.run.clone());
        }
    }

    /// Some rollouts behind this one, and behind which the next page begins.
    async fn rollouts(
        &self,
        filter: &RolloutFilter,
        mut after: Option<RolloutId>,
        mut page: Page<v1::RolloutSummary>,
    ) -> Result<(Page<v1::RolloutSummary>, Option<RolloutId>), Status> {
        let mut looked_at = 0;
        loop {
            let (run, group) = (filter.run.clone(), filter.group.clone());
            let behind = after.clone();
            let ids = self.shared.ask(|reply| Look::Rollouts(run, group, behind, IDS_AT_ONCE, reply)).await?;
            let ids = ids.map_err(refused)?;
            let is_last = ids.len() < IDS_AT_ONCE;
            let count = ids.len();
            for (at, id) in ids.into_iter().enumerate() {
                after = Some(id.clone());
                looked_at += 1;
                if let Some(summary) = self.summary(filter, id).await {
                    page.push(summary);
                }
                if page.room() == 0 {
                    return Ok((page, after.filter(|_| !is_last || at + 1 < count)));
                }
            }
            if is_last || looked_at >= limits::PAGE_ROLLOUTS_LOOKED_AT_MAX {
                return Ok((page, after.filter(|_| !is_last)));
            }
            tokio::task::yield_now().await;
        }
    }

    /// A rollout in a few figures, if it is there and the filter shows it.
    async fn summary(&self, filter: &RolloutFilter, rollout: RolloutId) -> Option<v1::RolloutSummary> {
        let store = &self.shared.store;
        let unix_ms = store.clock().unix_ms();
        let key = RolloutKey { run: filter.run.clone(), rollout };
        let found = store.show(&key, |view| filter.shows(&view, unix_ms).then(|| convert::inspect::summary(&view)));
        match found? {
            Ok(Some(summary)) if filter.wants_missing_calls() => self.awaits_calls(&key).await.then_some(summary),
            Ok(summary) => summary,
            Err(ended) => filter.shows_ended().then(|| {
                let (run, rollout) = (key.run, key.rollout);
                let about = RolloutRef { run, group: ended.group.clone(), rollout, attempt: ended.attempt };
                convert::inspect::ended_summary(&about, ended_message(&ended))
            }),
        }
    }
}

impl Inspect {
    /// Whether a rollout waits for calls. Its lock is taken for a few calls at a time.
    async fn awaits_calls(&self, key: &RolloutKey) -> bool {
        let mut search = (0, AwaitedSearch::default());
        loop {
            let look = |view: RolloutView<'_>| {
                // Another attempt is looked at from its start.
                if search.0 != view.about.attempt {
                    search = (view.about.attempt, AwaitedSearch::default());
                }
                search.1.look(view.rollout, CALLS_AT_ONCE)
            };
            match self.shared.store.show(key, look) {
                Some(Ok(None)) => tokio::task::yield_now().await,
                Some(Ok(Some(awaits))) => return awaits,
                Some(Err(_)) | None => return false,
            }
        }
    }
}

/// What came of drawing a rollout.
enum Drawn {
    Whole(Encoded),
    Ended(Ended),
    NotThere,
    /// It has ended, a newer attempt has come, or its tokens have left memory, since the drawing began.
    Changed,
    TooLarge,
}

/// Draws a rollout. Its lock is taken for a few calls at a time.
fn drawn(store: &Store, key: &RolloutKey, shown: &Shown) -> Drawn {
    let draw = |view: RolloutView<'_>| view.rollout.has_tokens().then(|| Outline::new(view, shown));
    let outline = match store.show(key, draw) {
        Some(Ok(Some(outline))) => outline,
        Some(Ok(None)) => return Drawn::Changed,
        Some(Err(ended)) => return Drawn::Ended(ended),
        None => return Drawn::NotThere,
    };
    let shower = Shower::new(&outline);
    let mut calls = Vec::with_capacity(outline.call_count);
    while calls.len() < outline.call_count {
        let range = calls.len()..calls.len() + CALLS_AT_ONCE;
        match store.look_at(key, outline.attempt(), |rollout| shower.calls(rollout.facts(), range)) {
            Some(more) => calls.extend(more),
            None => return Drawn::Changed,
        }
    }
    drop(shower);
    Encoded::of(&convert::inspect::assembled(outline, calls)).map_or(Drawn::TooLarge, Drawn::Whole)
}

impl Shared {
    /// Waits until all records so far are durable and applied.
    pub(super) async fn caught_up(&self) -> Result<(), Status> {
        let (reply, reached) = oneshot::channel();
        let is_there = self.store.command(Command::Barrier(reply)).await;
        if is_there && reached.await.is_ok() { Ok(()) } else { Err(stopping()) }
    }

    /// Asks the sequencing task to show something, and waits until what that rests on is durable.
    pub(super) async fn ask<T>(&self, look: impl FnOnce(oneshot::Sender<T>) -> Look) -> Result<T, Status> {
        let (reply, answer) = oneshot::channel();
        if !self.store.command(Command::Look(look(reply))).await {
            return Err(stopping());
        }
        let answer = answer.await.map_err(|_| stopping())?;
        self.store.durable(self.store.last_position()).await;
        Ok(answer)
    }
}

fn stopping() -> Status {
    draining("ask again after the delay")
}

/// Room for answers that are on their way, but for short ones.
struct LargeRoom {
    kib: Arc<Semaphore>,
    most_bytes: usize,
}

impl LargeRoom {
    fn new(most_bytes: usize) -> Self {
        Self { kib: Arc::new(Semaphore::new(most_bytes / KIB)), most_bytes }
    }

    /// A list, encoded at once if it is not short: as a message it takes several times as much.
    fn answer<T: Message + Default>(&self, list: T) -> Result<Response<T>, Status> {
        let Some(room) = self.until_sent(list.encoded_len())? else { return Ok(Response::new(list)) };
        let mut response = Response::new(T::default());
        let too_long = || refused(Refusal::new(Reason::Internal, "a page is too long for a message"));
        response.extensions_mut().insert(Encoded::of(&list).ok_or_else(too_long)?);
        response.extensions_mut().insert(room);
        Ok(response)
    }

    /// An answer that is not short takes room until it has been sent: whoever asked may never read it.
    fn until_sent(&self, bytes: usize) -> Result<Option<UntilSent>, Status> {
        if bytes <= limits::SHOWN_LARGE_BYTES {
            return Ok(None);
        }
        let kib = u32::try_from(bytes.min(self.most_bytes) / KIB).unwrap_or(u32::MAX);
        let taken = Arc::clone(&self.kib).try_acquire_many_owned(kib);
        taken.map(|taken| Some(UntilSent::new(taken))).map_err(|_| {
            let message = format!(
                "it has {bytes} bytes, and with those that are on their way it would be more than {} at once",
                self.most_bytes
            );
            refused(Refusal::new(Reason::ServiceFull, message).retry_after_ms(limits::SHOWN_RETRY_AFTER_MS))
        })
    }
}

#[tonic::async_trait]
impl v1::inspect_service_server::InspectService for Inspect {
    type WatchStream = ReceiverStream<Result<v1::WatchResponse, Status>>;
    type ExportTraceStream = ReceiverStream<Result<v1::ExportTraceResponse, Status>>;

    async fn get_rollout(
        &self,
        request: Request<v1::GetRolloutRequest>,
    ) -> Result<Response<v1::GetRolloutResponse>, Status> {
        let request = request.into_inner();
        let (run, rollout, shown) = convert::inspect::get_rollout(&request).map_err(refused)?;
        let key = RolloutKey { run, rollout };
        let found = self.shown(&key, &shown).await?;
        let bytes = found.iter().flatten().map(Encoded::message_bytes).sum();
        let room = self.large.until_sent(bytes)?;
        // What is shown, and also that there is nothing, may rest on what is not durable yet.
        self.shared.store.durable(self.shared.store.last_position()).await;
        match found {
            Some(Ok(encoded)) => {
                let mut response = Response::new(v1::GetRolloutResponse::default());
                response.extensions_mut().insert(encoded);
                room.and_then(|room| response.extensions_mut().insert(room));
                Ok(response)
            }
            Some(Err(ended)) => {
                let about = RolloutRef {
                    run: key.run,
                    group: ended.group.clone(),
                    rollout: key.rollout,
                    attempt: ended.attempt,
                };
                Ok(Response::new(convert::inspect::ended_rollout(&about, ended_message(&ended))))
            }
            None => {
                let message = format!("run {:?} has no rollout {:?}, or it ended too long ago", key.run, key.rollout);
                Err(refused(Refusal::new(Reason::RolloutNotFound, message).field("rollout_id")))
            }
        }
    }

    async fn list_runs(&self, request: Request<v1::ListRunsRequest>) -> Result<Response<v1::ListRunsResponse>, Status> {
        const LIST: [&str; 1] = ["runs"];
        let request = request.into_inner();
        let after = pages::after(&LIST, &request.page_token, RunId::parse).map_err(refused)?;
        self.shared.caught_up().await?;
        let (page, next, service) = self.runs(after, Page::new(request.page_size)).await?;
        let next_page_token = next.map(|last| pages::token(&LIST, last.as_str())).unwrap_or_default();
        self.large.answer(v1::ListRunsResponse { runs: page.entries, next_page_token, service })
    }

    async fn list_rollouts(
        &self,
        request: Request<v1::ListRolloutsRequest>,
    ) -> Result<Response<v1::ListRolloutsResponse>, Status> {
        let request = request.into_inner();
        let filter = RolloutFilter::new(&request).map_err(refused)?;
        let list = ["rollouts", filter.run.as_str()];
        let after = pages::after(&list, &request.page_token, RolloutId::parse).map_err(refused)?;
        self.shared.caught_up().await?;
        let (page, next) = self.rollouts(&filter, after, Page::new(request.page_size)).await?;
        self.shared.store.durable(self.shared.store.last_position()).await;
        let next_page_token = next.map(|last| pages::token(&list, last.as_str())).unwrap_or_default();
        self.large.answer(v1::ListRolloutsResponse { rollouts: page.entries, next_page_token })
    }

    async fn list_groups(
        &self,
        request: Request<v1::ListGroupsRequest>,
    ) -> Result<Response<v1::ListGroupsResponse>, Status> {
        let request = request.into_inner();
        let run = run_id(&request.run_id)?;
        let list = ["groups", run.as_str()];
        let after = pages::after(&list, &request.page_token, GroupId::parse).map_err(refused)?;
        self.shared.caught_up().await?;
        let mut page = Page::new(request.page_size);
        let look = |reply| Look::Groups(run.clone(), after, page.room(), request.open_only, reply);
        let (groups, mut next) = self.shared.ask(look).await?.map_err(refused)?;
        for group in &groups {
            if page.room() == 0 {
                // Large groups fill a page before it has its entries.
                next = page.entries.len().checked_sub(1).map(|last| groups[last].group.clone());
                break;
            }
            page.push(lists::group(group));
        }
        let next_page_token = next.map(|last| pages::token(&list, last.as_str())).unwrap_or_default();
        self.large.answer(v1::ListGroupsResponse { groups: page.entries, next_page_token })
    }

    async fn list_consumers(
        &self,
        request: Request<v1::ListConsumersRequest>,
    ) -> Result<Response<v1::ListConsumersResponse>, Status> {
        let request = request.into_inner();
        let run = run_id(&request.run_id)?;
        let list = ["consumers", run.as_str()];
        let after = pages::after(&list, &request.page_token, ConsumerGroupId::parse).map_err(refused)?;
        self.shared.caught_up().await?;
        let mut page = Page::new(request.page_size);
        let look = |reply| Look::ConsumerGroups(run.clone(), after, page.room(), reply);
        let (groups, mut next) = self.shared.ask(look).await?.map_err(refused)?;
        let clock = self.shared.store.clock();
        let now = (clock.now_ms(), clock.unix_ms());
        for group in &groups {
            if page.room() == 0 {
                // Groups with many consumers fill a page before it has its entries.
                next = page.entries.len().checked_sub(1).map(|last| groups[last].name.clone());
                break;
            }
            page.push(lists::consumer_group(&run, group, now));
        }
        let next_page_token = next.map(|last| pages::token(&list, last.as_str())).unwrap_or_default();
        self.large.answer(v1::ListConsumersResponse { consumer_groups: page.entries, next_page_token })
    }

    async fn watch(&self, request: Request<v1::WatchRequest>) -> Result<Response<Self::WatchStream>, Status> {
        let request = request.into_inner();
        let run = run_id(&request.run_id)?;
        let optional = convert::fields::optional_identifier::<RolloutId>;
        let rollout = optional(&request.rollout_id, "rollout_id", RolloutId::parse).map_err(refused)?;
        let group = convert::fields::optional_identifier(&request.group_id, "group_id", GroupId::parse);
        let wanted = Wanted { rollout, group: group.map_err(refused)? };
        // That there is no such run may rest on what is not durable yet.
        self.shared.caught_up().await?;
        Ok(Response::new(ReceiverStream::new(self.shared.watch(run, wanted)?)))
    }

    async fn export_trace(
        &self,
        _: Request<v1::ExportTraceRequest>,
    ) -> Result<Response<Self::ExportTraceStream>, Status> {
        Err(not_in_this_release("the export of traces"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn large_answers_have_room_together_and_the_largest_goes_out_alone() {
        const MOST: usize = 32 << 20;
        let room = LargeRoom::new(MOST);
        let taken = |bytes| room.until_sent(bytes);
        let small = taken(limits::SHOWN_LARGE_BYTES);
        assert!(small.is_ok_and(|small| small.is_none()));
        let half = taken(MOST / 2);
        assert!(half.is_ok() && taken(MOST / 2 + KIB).is_err());
        drop(half);
        let largest = taken(3 * MOST);
        assert!(largest.is_ok() && taken(limits::SHOWN_LARGE_BYTES + KIB).is_err());
        drop(largest);
        assert!(taken(MOST).is_ok());
    }
}
