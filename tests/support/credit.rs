//! Credits that follow from the ids of calls and agents alone, and what they must come to on rows.

use hedgerow::proto::v1;
use hedgerow::proto::v1::credit::Target;

use crate::case::Case;
use crate::service::Row;

/// Most calls of a rollout that have credits: what ends a rollout is always taken, if it invents little.
const CALLS_MAX: usize = 8;

/// What a credit says: a process reward and a factor. About half of all ids have none.
fn values(id: &str) -> Option<(f64, f64)> {
    let sum = id.bytes().fold(7_u32, |sum, byte| sum.wrapping_mul(31).wrapping_add(u32::from(byte)));
    (sum % 2 == 0).then(|| (f64::from(sum / 2 % 9) / 7.0 - 0.5, f64::from(sum / 18 % 5) - 1.5))
}

fn credited_calls(case: &Case) -> impl Iterator<Item = &str> {
    case.calls.iter().map(|call| call.id.as_str()).filter(|id| values(id).is_some()).take(CALLS_MAX)
}

fn credit(target: Target, id: &str) -> v1::Credit {
    let (reward, scale) = values(id).unzip();
    v1::Credit { target: Some(target), reward, advantage_scale: scale, train: None }
}

/// The credits of a rollout's calls and agents.
pub(crate) fn credits(case: &Case) -> Vec<v1::Credit> {
    let calls = credited_calls(case).map(|id| credit(Target::CallId(id.to_owned()), id));
    let mut agents: Vec<&str> = case.calls.iter().map(|call| call.agent.as_str()).collect();
    agents.sort_unstable();
    agents.dedup();
    let agents = agents.into_iter().filter(|id| values(id).is_some());
    calls.chain(agents.map(|id| credit(Target::AgentId(id.to_owned()), id))).collect()
}

/// Each span of a row has the credits of its call and its agent, on top of its rollout's advantage.
pub(crate) fn check(case: &Case, row: &Row) -> Result<(), String> {
    let some = row.header.advantage.is_some() || !credits(case).is_empty();
    let of_rollout = row.header.advantage.unwrap_or(0.0);
    for span in &row.spans {
        let of_call = credited_calls(case).find(|id| *id == span.call_id).and_then(values);
        let both: Vec<(f64, f64)> = of_call.into_iter().chain(values(&span.agent_id)).collect();
        let has_any = !both.is_empty();
        let reward: f64 = both.iter().map(|(reward, _)| reward).sum();
        let scale: f64 = both.iter().map(|(_, scale)| scale).product();
        let sum = both.iter().fold(of_rollout, |sum, (reward, _)| sum + reward);
        let expected = (has_any.then_some(reward), has_any.then_some(scale), some.then_some(scale * sum));
        let found = (span.process_reward, span.advantage_scale, span.advantage);
        if found != expected {
            return Err(format!("span {} has {found:?} and not {expected:?}", span.call_id));
        }
    }
    Ok(())
}
