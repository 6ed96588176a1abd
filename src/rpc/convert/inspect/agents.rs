//! The agents of a rollout as they are shown.

use crate::forest::Agent;
use crate::forest::call::AgentIndex;
use crate::ids::AgentId;
use crate::proto::v1;
use crate::rollout::Facts;
use crate::rollout::event::{AgentEnd, AgentOrigin, AgentStart, AgentStatus};

use super::super::answer::text;

/// All agents, by id.
pub(super) fn agents(facts: &Facts) -> Vec<v1::AgentSummary> {
    let mut agents: Vec<(AgentIndex, &Agent)> = facts.forest.agents().collect();
    agents.sort_by(|one, other| one.1.id().cmp(other.1.id()));
    agents.into_iter().map(|(index, agent)| summary(facts, index, agent)).collect()
}

fn summary(facts: &Facts, index: AgentIndex, agent: &Agent) -> v1::AgentSummary {
    let forest = &facts.forest;
    let generated = |call| forest.call(call).generation_length() as u64;
    v1::AgentSummary {
        agent_id: agent.id().to_string(),
        parent_agent_id: text(agent.parent().map(|parent| forest.agent(parent).id())),
        starts: facts.agents.starts(index).map(start).collect(),
        ends: facts.agents.ends(index).map(end).collect(),
        calls: agent.calls().len() as u64,
        kept_calls: agent.calls().iter().filter(|call| facts.is_kept(**call)).count() as u64,
        generated_tokens: agent.calls().iter().copied().map(generated).sum(),
        has_list: facts.agents.has_list(index),
    }
}

fn start(start: &AgentStart) -> v1::AgentStart {
    use v1::agent_start::Origin;
    let origin = |origin: &AgentOrigin| match origin {
        AgentOrigin::Fresh => Origin::Fresh(v1::FreshOrigin {}),
        AgentOrigin::ForkOf(call) => Origin::ForkOfCallId(call.to_string()),
    };
    v1::AgentStart {
        agent_id: start.agent_id.to_string(),
        resumption: start.resumption,
        parent_agent_id: text(start.parent_agent_id.as_ref()),
        spawning_call_id: text(start.spawning_call_id.as_ref()),
        origin: start.origin.as_ref().map(origin),
        profile: text(start.profile.as_ref()),
        model: text(start.model.as_ref()),
    }
}

/// An end, without its kept list.
fn end(end: &AgentEnd) -> v1::AgentEnd {
    let status = match end.status {
        AgentStatus::Settled => v1::AgentStatus::Settled,
        AgentStatus::Failed => v1::AgentStatus::Failed,
        AgentStatus::Interrupted => v1::AgentStatus::Interrupted,
        AgentStatus::BudgetExhausted => v1::AgentStatus::BudgetExhausted,
        AgentStatus::Closed => v1::AgentStatus::Closed,
    };
    v1::AgentEnd {
        agent_id: end.agent_id.to_string(),
        resumption: end.resumption,
        status: status.into(),
        kept: None,
        answers_read_agent_ids: end.answers_read.iter().map(AgentId::to_string).collect(),
    }
}
