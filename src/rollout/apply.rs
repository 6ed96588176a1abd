//! What a record does to a rollout. Cannot fail; replay calls only this.

use std::sync::{Arc, OnceLock};

use crate::forest::call::CallIndex;
use crate::forest::link::Verdict;
use crate::forest::{CallRecord, Placement};
use crate::ids::{AgentId, CallId};

use super::awaited::Awaited;
use super::event::{Decision, Discarded, DiscardedBy, Disposition, Effect, RolloutRecord};
use super::settings::{AgentsWithoutListRule, BrokenLinkRule};
use super::status;
use super::wait::Wait;
use super::{FinalisedRollout, OpenRollout, Rollout};

/// What applying a record did.
#[derive(Debug, Default)]
pub struct Applied {
    /// For a call: which, and what is known of its link.
    pub call: Option<(CallIndex, Verdict)>,
    /// What it caused, in order.
    pub effects: Vec<Effect>,
}

impl Rollout {
    /// Applies a record, and finalises the rollout if that completes it.
    pub fn apply(&mut self, record: RolloutRecord, now_ms: u64) -> Applied {
        let open = match self {
            Self::Open(open) => open,
            Self::Finalised(finalised) => {
                if let RolloutRecord::Conflict(call) = record {
                    finalised.mark_conflict(call);
                }
                return Applied::default();
            }
        };
        open.findings = None;
        // What a clock decides is no sign of life.
        if !matches!(record, RolloutRecord::Decision(_)) {
            open.heard_at_ms = now_ms;
            open.missing_calls.look_again(now_ms);
            open.missing_parents.look_again(now_ms);
        }
        let mut applied = Applied::default();
        if let Some(discarded) = open.apply(record, now_ms, &mut applied) {
            applied.effects.push(Effect::Discarded(discarded));
        } else if open.is_complete() {
            match open.finalise() {
                Ok(finalised) => {
                    let finalised = Arc::new(finalised);
                    applied.effects.push(Effect::Finalised(Arc::clone(&finalised)));
                    *self = Self::Finalised(finalised);
                }
                Err(discarded) => applied.effects.push(Effect::Discarded(discarded)),
            }
        }
        applied
    }
}

impl OpenRollout {
    /// Applies a record; gives back how the rollout ended, if it did.
    fn apply(&mut self, record: RolloutRecord, now_ms: u64, applied: &mut Applied) -> Option<Discarded> {
        self.facts.other_bytes += self.facts.other_bytes_of(&record);
        let facts = &mut self.facts;
        match record {
            RolloutRecord::Open(open) => {
                facts.group_size = facts.group_size.or(open.group_size);
                facts.tags.extend(open.tags);
            }
            RolloutRecord::Group(group) => facts.group = Some(group),
            RolloutRecord::Call(record) => self.apply_call(record, applied),
            RolloutRecord::ParentAgent { call, parent_agent_id, prompt } => {
                self.apply_parent_agent(&call, &parent_agent_id, prompt, applied);
            }
            RolloutRecord::AgentStart(start) => facts.agents.apply_start(&mut facts.forest, start),
            RolloutRecord::AgentEnd(end) => {
                // Where nothing is kept but what lists name, one more list only adds to it.
                let only_adds =
                    facts.some_list_given() && facts.settings.agents_without_list == AgentsWithoutListRule::Drop;
                if let Some(list) = &end.kept {
                    self.list_came(list, only_adds, now_ms);
                }
                self.facts.agents.apply_end(&mut self.facts.forest, end);
            }
            RolloutRecord::Finish(seal, reward, credits) => {
                if let Some(lists) = seal.as_ref().and_then(|seal| seal.kept.as_ref()) {
                    facts.agents.apply_lists(&mut facts.forest, lists);
                }
                facts.apply_credits(credits);
                let sealed = seal.is_some();
                facts.seal = seal.or_else(|| facts.seal.take());
                facts.reward = reward.or_else(|| facts.reward.take());
                if sealed {
                    self.begin_waits(now_ms);
                }
                self.awaited = None;
            }
            RolloutRecord::Credit(credit) => facts.apply_credits(vec![credit]),
            RolloutRecord::Discard { reason, disposition, by } => return Some(Discarded { reason, disposition, by }),
            RolloutRecord::Conflict(call) => facts.mark_conflict(call),
            RolloutRecord::Decision(Decision::IdleTimeout) => return Some(by_rule("idle_timeout")),
            RolloutRecord::Decision(Decision::MissingCallsDiscard) => return Some(by_rule("missing_call")),
            RolloutRecord::Decision(Decision::MissingCallsFinalise) => facts.without_missing = true,
            RolloutRecord::Decision(Decision::MissingParentsGivenUp) => facts.parents_given_up = true,
        }
        None
    }

    fn apply_call(&mut self, record: CallRecord, applied: &mut Applied) {
        let accepted = self.facts.forest.apply_call(record);
        let id = self.facts.forest.call(accepted.call).id().clone();
        self.refused.remove(&id);
        if let Some(awaited) = &mut self.awaited {
            awaited.call_came(&self.facts, accepted.call);
            accepted.settled.iter().for_each(|(call, _)| awaited.ids_came(&self.facts, *call));
        }
        for (call, placement) in accepted.settled {
            applied.effects.push(match placement {
                Placement::Placed => {
                    let verdict = self.facts.forest.verdict(call);
                    self.facts.answered_drifts += u64::from(verdict.drift.is_some());
                    Effect::CallResolved(call, verdict)
                }
                Placement::Unresolved => Effect::CallUnresolved(call),
            });
        }
        self.facts.answered_drifts += u64::from(accepted.verdict.drift.is_some());
        applied.call = Some((accepted.call, accepted.verdict));
    }

    /// A call that stands said its agent's parent only now, and perhaps its prompt in another form.
    fn apply_parent_agent(
        &mut self,
        call: &CallId,
        parent: &AgentId,
        prompt: Option<CallRecord>,
        applied: &mut Applied,
    ) {
        let Some(known) = self.facts.forest.find(call) else { return };
        let agent = self.facts.forest.call(known).agent();
        self.facts.forest.set_parent_agent(agent, parent);
        match prompt {
            Some(record) => self.apply_call(record, applied),
            None => applied.call = Some((known, self.facts.forest.verdict(known))),
        }
    }

    /// A new list changes what is awaited, and starts the wait afresh.
    fn list_came(&mut self, list: &[CallId], only_adds: bool, now_ms: u64) {
        self.awaited = self.awaited.take().filter(|_| only_adds);
        if let Some(awaited) = &mut self.awaited {
            awaited.list_came(list);
        }
        if self.facts.seal.is_some() {
            self.begin_waits(now_ms);
        }
    }

    fn begin_waits(&mut self, now_ms: u64) {
        (self.missing_calls, self.missing_parents) = (Wait::since(now_ms), Wait::since(now_ms));
    }

    /// Sealed, rewarded, and nothing is awaited any more.
    fn is_complete(&mut self) -> bool {
        let facts = &self.facts;
        if facts.seal.is_none() || facts.reward.is_none() {
            return false;
        }
        if status::missing_expected_calls(facts) > 0 && !facts.without_missing {
            return false;
        }
        self.awaited.get_or_insert_with(|| Box::new(Awaited::new(facts))).all_there(facts)
    }

    /// Takes the rollout's facts and finds its links, or says why it is discarded.
    fn finalise(&mut self) -> Result<FinalisedRollout, Discarded> {
        let settings = Arc::clone(&self.facts.settings);
        let incomplete = self.facts.without_missing
            && (status::missing_expected_calls(&self.facts) > 0
                || Awaited::new(&self.facts).missing(&self.facts).iter().any(|(_, cause)| cause.is_kept()));
        let (kept, may_train) = (self.facts.kept(), self.facts.may_train());
        let links = self.facts.forest.links(&kept);
        if !links.broken.is_empty() && settings.broken_link == BrokenLinkRule::Discard {
            return Err(by_rule("broken_link"));
        }
        let group = self.facts.group.clone();
        let empty = Rollout::new(settings, group, 0);
        let Rollout::Open(empty) = empty else {
            return Err(by_rule("internal"));
        };
        let facts = std::mem::replace(&mut self.facts, empty.facts);
        Ok(FinalisedRollout { facts, kept, may_train, links, incomplete, findings: OnceLock::new() })
    }
}

/// How a rollout ends that a clock or a rule of the run discards.
fn by_rule(reason: &str) -> Discarded {
    Discarded { reason: reason.to_owned(), disposition: Disposition::Unsaid, by: DiscardedBy::Rule }
}
