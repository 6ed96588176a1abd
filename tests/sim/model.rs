//! What the service has accepted, as the one who sees everything knows it: each answer is looked at when it is given, before it is
//! durable, with the position that it waits for. When the service comes back without the last positions, what they accepted is
//! taken back here too. So it is known exactly what must be known, and what must not.

use std::collections::{BTreeMap, BTreeSet};

use hedgerow::error::Reason;
use hedgerow::store::effect::{Ended, Outcome};
use hedgerow::store::report::Reply;

use crate::case::{Call, Case};
use crate::feed::Form;
use crate::plan::{Plan, Request, Seal, What, content};

/// What a request was answered.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Said {
    Accepted,
    Duplicate,
    AlreadyEnded { attempt: u32, retired: bool },
    Refused(Reason),
}

impl Said {
    pub(crate) fn of(reply: &Reply<()>) -> Self {
        match reply {
            Reply::Accepted((), _) => Self::Accepted,
            Reply::Duplicate(()) => Self::Duplicate,
            Reply::AlreadyEnded(Ended { attempt, outcome, .. }) => {
                Self::AlreadyEnded { attempt: *attempt, retired: *outcome == Outcome::Retired }
            }
            Reply::Refused(refusal) => Self::Refused(refusal.reason),
        }
    }

    /// Whether it is to be sent again, for nothing was decided.
    pub(crate) fn is_for_later(&self) -> bool {
        // With no memory at all for tokens, others may have them leave each time before the event is tried again.
        let thrashes = matches!(self, Self::Refused(Reason::ServiceFull));
        thrashes
            || matches!(
                self,
                Self::Refused(Reason::LogFull | Reason::MemoryFull | Reason::LogUnreadable | Reason::Draining)
            )
    }
}

/// An answer, as it is given.
pub(crate) struct Answer<'a> {
    pub(crate) position: u64,
    pub(crate) request: usize,
    pub(crate) said: &'a Said,
}

/// All that was accepted, in order.
#[derive(Default)]
pub(crate) struct Model {
    /// Position and request.
    accepted: Vec<(u64, usize)>,
    known: BTreeMap<(usize, u32), Known>,
    /// The newest attempt at each rollout of which something was sent.
    sent: BTreeMap<usize, u32>,
}

/// What is known of one attempt.
#[derive(Clone, Debug, Default)]
pub(crate) struct Known {
    pub(crate) opened: bool,
    /// For each call how it came, and whether with other content than the case has.
    pub(crate) calls: BTreeMap<usize, (bool, Vec<Form>)>,
    pub(crate) starts: BTreeSet<String>,
    pub(crate) ends: BTreeMap<String, Option<Vec<String>>>,
    pub(crate) seal: Option<Seal>,
    pub(crate) reward: bool,
    /// Discarded by its harness, perhaps for good.
    pub(crate) discarded: Option<bool>,
}

impl Model {
    /// A request is on its way.
    pub(crate) fn sends(&mut self, request: &Request) {
        let newest = self.sent.entry(request.rollout).or_default();
        *newest = request.attempt.max(*newest);
    }

    /// Everything beyond this position is lost.
    pub(crate) fn lose_after(&mut self, last: u64, plan: &Plan) {
        self.accepted.retain(|(position, _)| *position <= last);
        self.known.clear();
        for (_, request) in std::mem::take(&mut self.accepted) {
            self.take(0, request, plan);
        }
    }

    /// What is known of an attempt.
    pub(crate) fn known(&self, rollout: usize, attempt: u32) -> Known {
        self.known.get(&(rollout, attempt)).cloned().unwrap_or_default()
    }

    /// The attempts at a rollout of which something was accepted.
    pub(crate) fn attempts(&self, rollout: usize) -> Vec<u32> {
        self.known.range((rollout, 0)..=(rollout, u32::MAX)).map(|((_, attempt), _)| *attempt).collect()
    }

    /// Whether this attempt at a rollout may have been opened, by a request of which nothing else is kept.
    pub(crate) fn may_be_open(&self, rollout: usize, attempt: u32) -> bool {
        let newer = self.attempts(rollout).last().is_none_or(|newest| *newest < attempt);
        newer && self.sent.get(&rollout).is_some_and(|sent| *sent >= attempt)
    }

    /// Looks at an answer, and says what is wrong with it.
    pub(crate) fn answered(&mut self, answer: Answer<'_>, plan: &Plan) -> Result<(), String> {
        let Answer { position, request, said } = answer;
        let asked = &plan.requests[request];
        let known = self.known(asked.rollout, asked.attempt);
        let case = &plan.rollouts[asked.rollout].case;
        let newer = self.attempts(asked.rollout).into_iter().find(|attempt| *attempt > asked.attempt);
        match said {
            Said::Accepted | Said::Duplicate if newer.is_some() => {
                return Err(format!("though attempt {newer:?} was accepted"));
            }
            Said::Accepted if known.may_accept(&asked.what, case) => self.take(position, request, plan),
            Said::Accepted => return Err("though it is known".to_owned()),
            Said::Duplicate if !known.has(&asked.what) => return Err("though it was never accepted".to_owned()),
            Said::Duplicate => {}
            Said::AlreadyEnded { attempt, retired } => self.judge_end(asked, *attempt, *retired)?,
            Said::Refused(reason) => self.judge_refusal(asked, &known, *reason, plan)?,
        }
        Ok(())
    }

    fn take(&mut self, position: u64, request: usize, plan: &Plan) {
        let asked = &plan.requests[request];
        self.accepted.push((position, request));
        self.known.entry((asked.rollout, asked.attempt)).or_default().take(&asked.what);
    }

    /// An end is of this attempt or of one before which said that it was the last; who retired had a seal and a reward.
    fn judge_end(&self, asked: &Request, attempt: u32, retired: bool) -> Result<(), String> {
        let ended = self.known(asked.rollout, attempt);
        if attempt != asked.attempt && !(attempt < asked.attempt && ended.discarded == Some(true)) {
            return Err("which is an attempt that says nothing of this one".to_owned());
        }
        if retired && (ended.seal.is_none() || !ended.reward) {
            return Err("though it has no seal, or no reward".to_owned());
        }
        Ok(())
    }

    fn judge_refusal(&self, asked: &Request, known: &Known, reason: Reason, plan: &Plan) -> Result<(), String> {
        let case = &plan.rollouts[asked.rollout].case;
        let call = if let What::Call { call, form, other } = &asked.what { Some((*call, form, *other)) } else { None };
        let is = |one: Reason| reason == one;
        let is_superseded = self.sent.get(&asked.rollout).is_some_and(|sent| *sent > asked.attempt);
        let may_be_finalised = || {
            let whole = |attempt: u32| {
                let known = self.known(asked.rollout, attempt);
                known.seal.is_some() && known.reward
            };
            (0..=asked.attempt).any(whole) && (!known.has(&asked.what) || known.may_accept(&asked.what, case))
        };
        let is_new_call = call.is_some_and(|(call, ..)| !known.calls.contains_key(&call));
        let is_delta = call.is_some_and(|(_, form, _)| *form != Form::Full);
        let is_other_call =
            call.is_some_and(|(call, _, other)| known.calls.get(&call).is_some_and(|(known, _)| *known != other));
        let group_is_small = || {
            let group = plan.rollouts[asked.rollout].group.as_ref();
            let members = plan.rollouts.iter().filter(|other| other.group.as_ref() == group).count();
            group.and_then(|group| plan.group_sizes.get(group)).is_some_and(|size| members > *size as usize)
        };
        let fine = Said::Refused(reason).is_for_later()
            || (is(Reason::AttemptSuperseded) && is_superseded)
            || (is(Reason::RolloutFinalised) && may_be_finalised())
            || (is(Reason::RolloutSealed) && is_new_call && known.seal.is_some())
            || (is(Reason::ResendFullPrompt) && is_delta)
            || (is(Reason::CallConflict) && is_other_call)
            || (is(Reason::GroupFull) && group_is_small())
            || (is(Reason::GroupReleased) && plan.rollouts[asked.rollout].group.is_some());
        if fine { Ok(()) } else { Err(format!("where {known:?} is known")) }
    }
}

impl Known {
    /// Whether all of it is known.
    pub(crate) fn has(&self, what: &What) -> bool {
        match what {
            What::Open => self.opened,
            What::Call { call, other, .. } => self.calls.get(call).is_some_and(|(known, _)| known == other),
            What::Start(agent) => self.starts.contains(agent),
            What::End { agent, .. } => self.ends.contains_key(agent),
            What::Finish { seal, reward } => (seal.is_none() || self.seal == *seal) && (!*reward || self.reward),
            What::Heartbeat => false,
            What::Discard { .. } => self.discarded.is_some(),
        }
    }

    /// Whether it says something that is not known.
    fn may_accept(&self, what: &What, case: &Case) -> bool {
        if self.discarded.is_some() {
            return false;
        }
        match what {
            What::Call { call, form, other } => match self.calls.get(call) {
                None => true,
                Some((known, forms)) => known == other && !forms.contains(form) && !self.placed(case).contains(call),
            },
            What::Open
            | What::Start(_)
            | What::End { .. }
            | What::Finish { .. }
            | What::Heartbeat
            | What::Discard { .. } => !self.has(what),
        }
    }

    fn take(&mut self, what: &What) {
        match what {
            What::Open => self.opened = true,
            What::Call { call, form, other } => {
                let (_, forms) = self.calls.entry(*call).or_insert_with(|| (*other, Vec::new()));
                forms.push(form.clone());
            }
            What::Start(agent) => drop(self.starts.insert(agent.clone())),
            What::End { agent, kept } => drop(self.ends.insert(agent.clone(), kept.clone())),
            What::Finish { seal, reward } => {
                self.seal = seal.clone().or_else(|| self.seal.take());
                self.reward |= reward;
            }
            What::Heartbeat => {}
            What::Discard { is_final } => self.discarded = Some(*is_final),
        }
    }

    /// A call as it was accepted.
    pub(crate) fn content(&self, case: &Case, call: usize) -> Call {
        content(&case.calls[call], self.calls.get(&call).is_some_and(|(other, _)| *other))
    }

    /// The calls whose ids are known: they came in full, or as a delta on one whose ids are known, and which begins so.
    pub(crate) fn placed(&self, case: &Case) -> BTreeSet<usize> {
        let mut placed = BTreeSet::new();
        loop {
            let before = placed.len();
            for (call, (_, forms)) in &self.calls {
                let resolves = |form: &Form| match form {
                    Form::Full => true,
                    Form::Delta { base, length } => {
                        let base = case.calls.iter().position(|known| known.id == *base);
                        base.filter(|base| placed.contains(base)).is_some_and(|base| {
                            self.content(case, base).full().starts_with(&case.calls[*call].prompt[..*length])
                        })
                    }
                };
                if forms.iter().any(resolves) {
                    placed.insert(*call);
                }
            }
            if placed.len() == before {
                return placed;
            }
        }
    }
}
