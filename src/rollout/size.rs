//! How much memory a rollout takes, kept as it grows. An estimate from above, counted in bytes.
//!
//! The forest counts its calls; here is what else a rollout holds. What a call takes in a kept list is part of the call, so that
//! a seal over calls and agents that are there takes nothing: what ends a rollout must not need room.

use std::collections::BTreeMap;

use crate::forest::size::{AGENT_BYTES, ID_BYTES};
use crate::ids::{AgentId, CallId, Name};

use super::credits::{Credit, CreditTarget};
use super::event::{AgentEnd, AgentOrigin, AgentStart, Open, Reward, RolloutRecord, Seal};
use super::{Facts, Rollout};

/// An attempt of which nothing has come: itself, its place in the map, its deadline, its references' texts.
const ROLLOUT_BYTES: usize = 1900;
/// An entry of a small map or list, without texts.
const ENTRY_BYTES: usize = 96;

impl Rollout {
    /// Bytes of memory that it takes.
    #[must_use]
    pub fn resident_bytes(&self) -> u64 {
        let facts = self.facts();
        (ROLLOUT_BYTES + facts.forest.resident_bytes() + facts.other_bytes) as u64
    }

    /// Bytes that it takes besides to remember which calls were refused.
    #[must_use]
    pub fn refused_bytes(&self) -> u64 {
        let Self::Open(open) = self else { return 0 };
        open.refused.keys().map(|call| ENTRY_BYTES + id_bytes(call.as_str())).sum::<usize>() as u64
    }
}

impl Facts {
    /// Bytes that applying a record takes at most.
    #[must_use]
    pub fn bytes_of(&self, record: &RolloutRecord) -> usize {
        let call = match record {
            RolloutRecord::Call(call) | RolloutRecord::ParentAgent { prompt: Some(call), .. } => call.resident_bytes(),
            RolloutRecord::Open(_)
            | RolloutRecord::Group(_)
            | RolloutRecord::ParentAgent { prompt: None, .. }
            | RolloutRecord::AgentStart(_)
            | RolloutRecord::AgentEnd(_)
            | RolloutRecord::Finish(..)
            | RolloutRecord::Credit(_)
            | RolloutRecord::Discard { .. }
            | RolloutRecord::Conflict(_)
            | RolloutRecord::Decision(_) => 0,
        };
        call + self.other_bytes_of(record)
    }

    /// Of these, what lists in a seal and a reward take that name calls and agents which have not come.
    #[must_use]
    pub fn bytes_not_come(&self, record: &RolloutRecord) -> usize {
        let RolloutRecord::Finish(seal, _, credits) = record else { return 0 };
        let has_come = |credit: &&Credit| match &credit.target {
            CreditTarget::Call(call) => self.forest.find(call).is_some(),
            CreditTarget::Agent(agent) => self.forest.find_agent(agent).is_some(),
        };
        let credits = credits.iter().filter(|credit| !has_come(credit)).map(of_credit);
        seal.as_ref().map_or(0, |seal| self.of_seal(seal)) + credits.sum::<usize>()
    }

    /// Of these, what the forest does not count.
    pub(super) fn other_bytes_of(&self, record: &RolloutRecord) -> usize {
        match record {
            RolloutRecord::Open(Open { tags, .. }) => {
                tags.iter().map(|(key, value)| ENTRY_BYTES + id_bytes(key.as_str()) + value.len()).sum()
            }
            RolloutRecord::AgentStart(start) => of_start(start),
            RolloutRecord::AgentEnd(AgentEnd { agent_id, kept, answers_read, .. }) => {
                let answers: usize = answers_read.iter().map(|agent| id_bytes(agent.as_str()) + ID_BYTES).sum();
                of_agent(agent_id) + size_of::<AgentEnd>() + answers + self.of_list(kept.as_deref().unwrap_or_default())
            }
            RolloutRecord::Finish(seal, reward, credits) => {
                seal.as_ref().map_or(0, |seal| self.of_seal(seal))
                    + reward.as_ref().map_or(0, of_reward)
                    + credits.iter().map(of_credit).sum::<usize>()
            }
            RolloutRecord::Credit(credit) => of_credit(credit),
            // The mark of a conflict is one for each rollout.
            RolloutRecord::Conflict(_)
            | RolloutRecord::Group(_)
            | RolloutRecord::Call(_)
            | RolloutRecord::ParentAgent { .. }
            | RolloutRecord::Discard { .. }
            | RolloutRecord::Decision(_) => 0,
        }
    }

    fn of_seal(&self, Seal { kept, .. }: &Seal) -> usize {
        let agent = |agent: &AgentId| if self.forest.find_agent(agent).is_none() { of_agent(agent) } else { 0 };
        kept.iter().flatten().map(|(id, calls)| agent(id) + self.of_list(calls)).sum()
    }

    /// A list of calls, of which those that are there take nothing more.
    fn of_list(&self, calls: &[CallId]) -> usize {
        let unknown = calls.iter().filter(|call| self.forest.find(call).is_none());
        unknown.map(|call| ENTRY_BYTES + id_bytes(call.as_str())).sum()
    }
}

fn of_start(start: &AgentStart) -> usize {
    let origin = match &start.origin {
        Some(AgentOrigin::ForkOf(call)) => id_bytes(call.as_str()),
        Some(AgentOrigin::Fresh) | None => 0,
    };
    let names = [&start.profile, &start.model].into_iter().flatten().map(Name::as_str);
    let spawning = start.spawning_call_id.as_ref().map(CallId::as_str);
    let texts: usize = names.chain(spawning).map(id_bytes).sum();
    let parent = start.parent_agent_id.as_ref().map_or(0, of_agent);
    of_agent(&start.agent_id) + size_of::<AgentStart>() + parent + texts + origin
}

fn of_reward(Reward { components, .. }: &Reward) -> usize {
    let entries: &BTreeMap<Name, f64> = components;
    entries.keys().map(|name| ENTRY_BYTES + id_bytes(name.as_str())).sum()
}

fn of_credit(Credit { target, .. }: &Credit) -> usize {
    ENTRY_BYTES
        + match target {
            CreditTarget::Call(call) => id_bytes(call.as_str()),
            CreditTarget::Agent(agent) => id_bytes(agent.as_str()),
        }
}

/// An agent that the forest may hear of by this.
fn of_agent(agent: &AgentId) -> usize {
    AGENT_BYTES + agent.as_str().len()
}

fn id_bytes(text: &str) -> usize {
    ID_BYTES + text.len()
}
