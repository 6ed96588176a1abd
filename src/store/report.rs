//! The way of an event: find the rollout, judge, log, apply.

use std::sync::Arc;

use tokio::sync::oneshot;

use crate::error::{Reason, Refusal};
use crate::forest::Placement;
use crate::forest::call::CallIndex;
use crate::forest::link::Verdict;
use crate::ids::{CallId, RolloutRef};
use crate::limits;
use crate::log::{Position, Record};
use crate::rollout::event::{Disposition, Effect, Event, RolloutRecord};
use crate::rollout::{Facts, Judgement, Rollout};

use super::effect::{Ended, FinalisedNow, Notice, Outcome, Sequenced};
use super::evict::Finalised;
use super::memory::Growth;
use super::sequencer::{Admission, Admitted, Command};
use super::{FinalisedFacts, Live, OpenFacts, ReporterId, RolloutKey, Slot, Store, figures};

/// What an event was answered, and from which record it was judged: the answer leaves when that is durable.
#[derive(Debug)]
pub struct Answer<T> {
    /// The answer.
    pub reply: Reply<T>,
    /// The last record that it was judged from.
    pub position: Position,
}

/// The answer to an event. `T` is what the caller made of the rollout under its lock.
#[derive(Debug)]
pub enum Reply<T> {
    /// Stored; if that ended the rollout without rows, how.
    Accepted(T, Option<Ended>),
    /// Known already; nothing changed.
    Duplicate(T),
    /// The rollout has ended.
    AlreadyEnded(Ended),
    /// Refused; nothing is stored.
    Refused(Refusal),
}

/// What an event came to without asking the sequencing task.
enum Tried<T> {
    Answered(Answer<T>),
    /// The sequencing task must admit the rollout first.
    NeedsOpening(Event),
    /// The sequencing task must admit the rollout's group, or its group's size, first.
    NeedsGroup(Event),
    /// The rollout's tokens must come back into memory first.
    NeedsTokens(Event),
}

/// What the first event of a rollout says.
#[derive(Clone, Copy, PartialEq, Eq)]
enum OpeningSays {
    /// That the rollout is there.
    NoMore,
    /// Something that is a record of its own.
    More,
}

/// An event on its way, with who sent it.
struct Reported<'a> {
    reference: &'a RolloutRef,
    key: &'a RolloutKey,
    reporter: Option<ReporterId>,
    /// Whether the sequencing task has admitted it just now.
    admitted: bool,
    /// Whether that stored something which nobody else had said: then the event was not known, whatever it says beside.
    stored: bool,
}

impl Store {
    /// Takes one event. `describe` makes of the rollout, under its lock, what the answer says about it; it gets the call and
    /// its verdict if the event is a call.
    pub async fn report<T>(
        &self,
        reporter: Option<ReporterId>,
        reference: &RolloutRef,
        event: Event,
        describe: impl Fn(&mut Rollout, Option<(CallIndex, Verdict)>) -> T,
    ) -> Answer<T> {
        self.until_room_is_made().await;
        let answer = self.answer(reporter, reference, event, describe).await;
        if let Reply::Refused(_) = &answer.reply {
            self.count_refusal(reference);
        }
        if self.lacks_room() {
            self.make_room(Some(&reference.key()));
        }
        answer
    }

    async fn answer<T>(
        &self,
        reporter: Option<ReporterId>,
        reference: &RolloutRef,
        mut event: Event,
        describe: impl Fn(&mut Rollout, Option<(CallIndex, Verdict)>) -> T,
    ) -> Answer<T> {
        let key = reference.key();
        let mut reported = Reported { reference, key: &key, reporter, admitted: false, stored: false };
        for _ in 0..limits::REPORT_TRIES_MAX {
            let judged;
            (event, judged) = match self.try_report(&reported, event, &describe) {
                Tried::Answered(answer) => return answer,
                Tried::NeedsOpening(event) => {
                    let judged = self.judge_first(reference, &event);
                    (event, judged)
                }
                Tried::NeedsGroup(event) => (event, Ok(OpeningSays::More)),
                Tried::NeedsTokens(again) => {
                    if let Err(refusal) = self.restore(&key).await {
                        let refusal = call_id(&again).iter().fold(refusal, Refusal::call);
                        return Answer { reply: Reply::Refused(refusal), position: self.journal.last() };
                    }
                    event = again;
                    continue;
                }
            };
            let admitted = match judged {
                Ok(says) => self.admit(reference, &event).await.map(|admitted| (says, admitted)),
                Err(refusal) => Err(refusal),
            };
            match admitted {
                Ok((says, admitted)) => {
                    reported.admitted = true;
                    reported.stored |= match admitted {
                        Admitted::Known => false,
                        // The rest of it may come from somebody else before it is judged.
                        Admitted::Opened => says == OpeningSays::NoMore,
                        Admitted::Joined => true,
                    };
                }
                Err(refusal) => {
                    self.mark_refused(reference, call_id(&event).as_ref(), refusal.reason);
                    return Answer { reply: Reply::Refused(refusal), position: self.journal.last() };
                }
            }
        }
        let message = "attempts of this rollout supersede each other, or its tokens leave memory, faster than this event \
                       can be taken; try again";
        let refusal = Refusal::new(Reason::ServiceFull, message).retry_after_ms(limits::MEMORY_RETRY_AFTER_MS);
        Answer { reply: Reply::Refused(refusal), position: self.journal.last() }
    }

    /// An event that a new rollout would refuse opens none.
    fn judge_first(&self, reference: &RolloutRef, event: &Event) -> Result<OpeningSays, Refusal> {
        let settings = match self.run(&reference.run) {
            Some(run) => Arc::clone(&run.settings.lock().1.rollout),
            None => Arc::clone(&crate::rollout::run_settings::RunSettings::with_defaults().rollout),
        };
        let fresh = Rollout::new(settings, reference.group.clone(), 0);
        let growth = growth(event, &fresh);
        match fresh.judge(event.clone()) {
            Judgement::Refused(refusal, _) => Err(refusal),
            Judgement::Record(record) => {
                let judged = self.memory.judge_first(growth, judged_bytes(fresh.facts(), growth, &record));
                judged.map(|()| OpeningSays::More).map_err(|refusal| call_id(event).iter().fold(refusal, Refusal::call))
            }
            Judgement::Duplicate(_) | Judgement::Heard => Ok(OpeningSays::NoMore),
        }
    }

    /// Asks the sequencing task to admit a rollout, or what an event says of its group.
    async fn admit(&self, reference: &RolloutRef, event: &Event) -> Result<Admitted, Refusal> {
        let group_size = if let Event::Open(open) = event { open.group_size } else { None };
        let (reply, answer) = oneshot::channel();
        let admission = Admission { reference: reference.clone(), group_size };
        let gone = || Refusal::new(Reason::Draining, "the service is about to stop").retry_after_ms(1000);
        if !self.command(Command::Admit(admission, reply)).await {
            return Err(gone());
        }
        answer.await.unwrap_or_else(|_| Err(gone()))
    }

    fn try_report<T>(
        &self,
        reported: &Reported<'_>,
        event: Event,
        describe: &impl Fn(&mut Rollout, Option<(CallIndex, Verdict)>) -> T,
    ) -> Tried<T> {
        let Some(entry) = self.entry(reported.key) else { return Tried::NeedsOpening(event) };
        let attempt = reported.reference.attempt;
        let mut slot = entry.slot.lock();
        let live = match &mut *slot {
            Slot::Removed => return Tried::NeedsOpening(event),
            Slot::Ended(ended, position) => {
                return match ended_reply(ended, attempt) {
                    Some(reply) => Tried::Answered(Answer { reply, position: *position }),
                    None => Tried::NeedsOpening(event),
                };
            }
            Slot::Live(live) => live,
        };
        let refused = |refusal, position| Tried::Answered(Answer { reply: Reply::Refused(refusal), position });
        if live.attempt > attempt {
            return refused(attempt_superseded(live.attempt), live.last_position);
        }
        if live.attempt < attempt {
            return match live.rollout.finalised() {
                Some(_) => refused(newer_attempt_too_late(live.attempt), live.last_position),
                None => Tried::NeedsOpening(event),
            };
        }
        // A sign of life needs none, and is all that many rollouts have for long. Nor does an end without rows, which is what is left
        // for a rollout whose tokens cannot be read any more.
        let needs_none = matches!(event, Event::Heartbeat | Event::Discard { .. });
        if !live.rollout.has_tokens() && !needs_none {
            return Tried::NeedsTokens(event);
        }
        match self.needs_admission(live, reported, &event) {
            Ok(false) => {}
            // What is refused says nothing of the group either.
            Ok(true) if matches!(live.rollout.judge(event.clone()), Judgement::Refused(..)) => {}
            Ok(true) => return Tried::NeedsGroup(event),
            Err(refusal) => {
                live.refused_requests += 1;
                return refused(refusal, live.last_position);
            }
        }
        let answer = self.take(reported, live, event, describe);
        if let Reply::Accepted(_, Some(ended)) = &answer.reply {
            *slot = Slot::Ended(ended.clone(), answer.position);
            self.clear_timer(reported.key, &entry);
        } else {
            self.set_timer(reported.key, &entry, live);
            live.used(self, &entry);
        }
        Tried::Answered(answer)
    }

    /// Whether the event says something of the group that only the sequencing task can judge.
    fn needs_admission(&self, live: &Live, reported: &Reported<'_>, event: &Event) -> Result<bool, Refusal> {
        let facts = live.rollout.facts();
        match (&facts.group, &reported.reference.group) {
            (Some(known), Some(said)) if known != said => {
                let message = format!("the rollout is in group {known:?}, not {said:?}; the first value stands");
                return Err(Refusal::new(Reason::GroupConflict, message).field("rollout.group_id"));
            }
            (None, Some(_)) if live.rollout.finalised().is_some() => {
                let message = "the rollout was finalised without a group";
                return Err(Refusal::new(Reason::RolloutFinalised, message).field("rollout.group_id"));
            }
            (None, Some(_)) => return Ok(true),
            (Some(_) | None, _) => {}
        }
        let says_size = matches!(event, Event::Open(open) if open.group_size.is_some());
        Ok(says_size && facts.group_size.is_none() && live.rollout.finalised().is_none() && !reported.admitted)
    }

    /// Judges an event and does what follows, under the rollout's lock.
    fn take<T>(
        &self,
        reported: &Reported<'_>,
        live: &mut Live,
        event: Event,
        describe: &impl Fn(&mut Rollout, Option<(CallIndex, Verdict)>) -> T,
    ) -> Answer<T> {
        live.heard_unix_ms = self.clock.unix_ms();
        let call_id = call_id(&event);
        let growth = growth(&event, &live.rollout);
        let reply = match self.judge_growth(live, growth, call_id.as_ref(), live.rollout.judge(event)) {
            Judgement::Heard => {
                live.rollout.heard(self.clock.now_ms());
                Reply::Accepted(describe(&mut live.rollout, None), None)
            }
            Judgement::Duplicate(call) => {
                live.rollout.heard(self.clock.now_ms());
                if !reported.stored {
                    live.run.metrics.duplicate();
                }
                let call = call.map(|call| (call, live.rollout.verdict(call)));
                let described = describe(&mut live.rollout, call);
                if reported.stored { Reply::Accepted(described, None) } else { Reply::Duplicate(described) }
            }
            Judgement::Refused(refusal, mark) => {
                self.refused(live, call_id.as_ref(), refusal.reason);
                if let Some(mark) = mark {
                    self.apply_record(reported.key, live, mark, None);
                }
                Reply::Refused(refusal)
            }
            Judgement::Record(record) => {
                let (call, ended) = self.apply_record(reported.key, live, record, reported.reporter);
                Reply::Accepted(describe(&mut live.rollout, call), ended)
            }
        };
        Answer { reply, position: live.last_position }
    }

    /// What was judged good may still have no room in memory.
    fn judge_growth(&self, live: &Live, growth: Growth, call: Option<&CallId>, judged: Judgement) -> Judgement {
        let Judgement::Record(record) = &judged else { return judged };
        let bytes = judged_bytes(live.rollout.facts(), growth, record);
        let in_log = self.judge_log_room(growth);
        match in_log.and_then(|()| self.memory.judge_growth(&live.share, growth, bytes, self.clock.now_ms())) {
            Ok(()) => judged,
            Err(refusal) => Judgement::Refused(call.into_iter().fold(refusal, Refusal::call), None),
        }
    }

    /// Whether the log takes more than what ends rollouts.
    pub(super) fn judge_log_room(&self, growth: Growth) -> Result<(), Refusal> {
        if growth == Growth::Ends || self.journal.log().has_room() {
            return Ok(());
        }
        let message = "the disk, or what the log may take of it, is full: what ends rollouts is taken, all else is taken \
                       again when there is room";
        Err(Refusal::new(Reason::LogFull, message).retry_after_ms(limits::LOG_FULL_RETRY_AFTER_MS))
    }

    /// Logs and applies a record of a rollout, under its lock. Says how the rollout ended, if it did.
    pub(super) fn apply_record(
        &self,
        key: &RolloutKey,
        live: &mut Live,
        record: RolloutRecord,
        reporter: Option<ReporterId>,
    ) -> (Option<(CallIndex, Verdict)>, Option<Ended>) {
        let attempt = live.attempt;
        let logged = Record::Rollout { run: key.run.clone(), rollout: key.rollout.clone(), attempt, record };
        let unix_ms = self.unix_ms();
        let frame = self.journal.frame(&logged, unix_ms);
        let Record::Rollout { record, .. } = logged else { unreachable!("it was made so above") };
        let before = (OpenFacts::of(&live.rollout), figures::deltas_of(live), live.rollout.facts().forest.call_count());
        live.run.watchers.rollout_changes(&key.rollout, live.rollout.facts().group.as_ref());
        let applied = live.rollout.apply(record, self.clock.now_ms());
        live.measure();
        let (sequenced, ended) = self.sequenced(key, live, &applied.effects, unix_ms);
        let finalises = matches!(sequenced, Some(Sequenced::Finalised { .. }));
        live.last_position = self.journal.append(frame, sequenced);
        if self.keeps_records() {
            live.positions.push(live.last_position);
        }
        if finalises {
            live.finalised_at(live.last_position);
        }
        self.tell_reporters(key, live, &applied.effects);
        if let (Some((call, _)), Some(reporter)) = (&applied.call, reporter)
            && !live.rollout.facts().forest.call(*call).is_placed()
        {
            live.reporters.insert(*call, reporter);
        }
        let now = OpenFacts::of(&live.rollout).filter(|_| ended.is_none());
        live.run.counts.moved(before.0, now);
        if let Some((call, verdict)) = &applied.call {
            figures::call_accepted(live, before.2, *call, verdict);
        }
        let deltas = if now.is_some() { figures::deltas_of(live) } else { (0, 0) };
        figures::deltas_changed(&live.run.metrics, before.1, deltas);
        (applied.call, ended)
    }

    /// What effects mean beyond the rollout, and how it ended if it did.
    pub(crate) fn sequenced(
        &self,
        key: &RolloutKey,
        live: &mut Live,
        effects: &[Effect],
        unix_ms: u64,
    ) -> (Option<Sequenced>, Option<Ended>) {
        let (key, attempt) = (key.clone(), live.attempt);
        for effect in effects {
            match effect {
                Effect::Finalised(rollout) => {
                    let at_ms = self.clock.now_ms();
                    live.share.closed();
                    let finalised = Finalised::new(Arc::clone(rollout));
                    let facts =
                        FinalisedFacts { unix_ms, position: None, number: None, shared: Arc::clone(&finalised) };
                    live.finalised = Some(Box::new(facts));
                    let (rollout, share) = (Arc::clone(rollout), Arc::clone(&live.share));
                    let finalised = FinalisedNow { rollout, finalised, unix_ms, at_ms, share };
                    return (Some(Sequenced::Finalised { key, attempt, finalised: Box::new(finalised) }), None);
                }
                Effect::Discarded(discarded) => {
                    let facts = live.rollout.facts();
                    let (group, calls) = (facts.group.clone(), facts.forest.call_count() as u64);
                    let reason = discarded.reason.clone();
                    let is_final = discarded.disposition == Disposition::Final;
                    let ended = Ended { attempt, outcome: Outcome::Discarded, reason, is_final, group: group.clone() };
                    let (discarded, opened) = (discarded.clone(), live.share.home());
                    let sequenced = Sequenced::Discarded { key, attempt, group, discarded, calls, opened };
                    return (Some(sequenced), Some(ended));
                }
                Effect::CallResolved(..) | Effect::CallUnresolved(_) => {}
            }
        }
        (None, None)
    }

    fn tell_reporters(&self, key: &RolloutKey, live: &mut Live, effects: &[Effect]) {
        for effect in effects {
            let (call, placement) = match effect {
                Effect::CallResolved(call, _) => (*call, Placement::Placed),
                Effect::CallUnresolved(call) => (*call, Placement::Unresolved),
                Effect::Finalised(_) | Effect::Discarded(_) => continue,
            };
            let Some(reporter) = live.reporters.remove(&call) else { continue };
            let id = live.rollout.facts().forest.call(call).id().clone();
            let (key, attempt, position) = (key.clone(), live.attempt, live.last_position);
            self.notify(reporter, Notice { position, key, attempt, call: id, placement });
        }
    }
}

impl Live {
    /// Notes where the record stands that has finalised it.
    pub(super) fn finalised_at(&mut self, position: Position) {
        if let Some(finalised) = &mut self.finalised {
            finalised.position = Some(position);
        }
    }

    /// Counts what it holds. What is finalised holds what it held, and what is made of it is counted with that.
    pub(super) fn measure(&self) {
        if self.finalised.is_none() {
            let (held, refused) = (self.rollout.resident_bytes(), self.rollout.refused_bytes());
            let positions = self.positions.capacity() * size_of::<Position>();
            self.share.set(self.texts_bytes + held + refused + positions as u64);
        }
    }
}

/// What an event is to the memory of its rollout.
fn growth(event: &Event, rollout: &Rollout) -> Growth {
    match event {
        Event::Seal(_) | Event::Reward(..) | Event::Finish(..) | Event::Discard { .. } => Growth::Ends,
        Event::Open(_)
        | Event::Call { .. }
        | Event::AgentStart(_)
        | Event::AgentEnd(_)
        | Event::Credit(_)
        | Event::Heartbeat => {
            if rollout.facts().seal.is_some() {
                Growth::GoesOnSealed
            } else {
                Growth::GoesOn
            }
        }
    }
}

/// The bytes for which a record may be refused: what ends a rollout is taken whatever it says, but for what it invents.
fn judged_bytes(facts: &Facts, growth: Growth, record: &RolloutRecord) -> u64 {
    match growth {
        Growth::Ends => facts.bytes_not_come(record) as u64,
        Growth::GoesOn | Growth::GoesOnSealed => facts.bytes_of(record) as u64,
    }
}

fn call_id(event: &Event) -> Option<CallId> {
    if let Event::Call { call, .. } = event { Some(call.facts.call_id.clone()) } else { None }
}

/// What an event for this attempt is answered by a tombstone; nothing if the attempt may still be opened.
fn ended_reply<T>(ended: &Ended, attempt: u32) -> Option<Reply<T>> {
    if attempt == ended.attempt {
        return Some(Reply::AlreadyEnded(ended.clone()));
    }
    if attempt < ended.attempt {
        return Some(Reply::Refused(attempt_superseded(ended.attempt)));
    }
    match ended.outcome {
        Outcome::Retired => Some(Reply::Refused(newer_attempt_too_late(ended.attempt))),
        // It was said that no other attempt would come.
        Outcome::Discarded if ended.is_final => Some(Reply::AlreadyEnded(ended.clone())),
        Outcome::Discarded => None,
    }
}

pub(super) fn attempt_superseded(newer: u32) -> Refusal {
    let message =
        format!("attempt {newer} of this rollout has come; what belongs to an older one is not wanted any more");
    Refusal::new(Reason::AttemptSuperseded, message).field("rollout.attempt")
}

pub(super) fn newer_attempt_too_late(finalised: u32) -> Refusal {
    let message = format!(
        "attempt {finalised} is finalised and its rows may be in training; a rerun needs a rollout_id of its own"
    );
    Refusal::new(Reason::RolloutFinalised, message).field("rollout.attempt")
}
