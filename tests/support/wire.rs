//! A case as messages, and messages in the tests' own words.

use std::collections::BTreeMap;

use hedgerow::forest::digest::Digest;
use hedgerow::proto::v1;

use crate::case::{AgentsWithoutList, BrokenLink, Call, Case, Link, OnBrokenLink, Row, Settings, SharedCallOwner};
use crate::feed::Form;
use crate::service::{self, Unit, floats, ids};

/// What a run must be for a case.
pub(crate) fn run_settings(settings: &Settings) -> v1::RunSettings {
    let owner = match settings.shared_call_owner {
        SharedCallOwner::RootAgent => v1::SharedCallOwner::RootAgent,
        SharedCallOwner::FirstLeaf => v1::SharedCallOwner::FirstLeaf,
    };
    let broken = match settings.on_broken_link {
        OnBrokenLink::Infer => v1::BrokenLinkRule::Infer,
        OnBrokenLink::Discard => v1::BrokenLinkRule::Discard,
    };
    let without = match settings.agents_without_list {
        AgentsWithoutList::Drop => v1::AgentsWithoutListRule::Drop,
        AgentsWithoutList::Keep => v1::AgentsWithoutListRule::Keep,
    };
    v1::RunSettings {
        shared_call_owner: owner.into(),
        broken_link: broken.into(),
        agents_without_list: without.into(),
        ..v1::RunSettings::default()
    }
}

/// What a consumer group must be for a case.
pub(crate) fn group_settings(settings: &Settings) -> v1::ConsumerGroupSettings {
    v1::ConsumerGroupSettings {
        policy: settings.policy.clone().unwrap_or_default(),
        unit: v1::Unit::Rollout.into(),
        max_row_tokens: settings.max_row_tokens.map_or(0, |limit| limit as u64),
        ..v1::ConsumerGroupSettings::default()
    }
}

/// A call with its prompt in this form.
pub(crate) fn call(call: &Call, form: &Form) -> v1::Call {
    use v1::link::Link as Said;
    use v1::prompt::Prompt;
    let prompt = match form {
        Form::Full => Prompt::TokenIds(ids(&call.prompt)),
        Form::Delta { base, length } => {
            let (known, suffix) = call.prompt.split_at(*length);
            let digest = bytes::Bytes::copy_from_slice(&Digest::of(known).0);
            let base = v1::Base { call_id: base.clone(), length_tokens: *length as u64, digest };
            Prompt::Delta(v1::Delta { base: Some(base), suffix_token_ids: ids(suffix) })
        }
    };
    let link = match &call.link {
        Link::Infer => None,
        Link::Root => Some(Said::Root(v1::RootLink {})),
        Link::Parent(named) => Some(Said::ParentCallId(named.clone())),
    };
    v1::Call {
        call_id: call.id.clone(),
        agent_id: call.agent.clone(),
        parent_agent_id: call.parent_agent.clone().unwrap_or_default(),
        sequence: call.sequence,
        link: link.map(|link| v1::Link { link: Some(link) }),
        policy: call.policy.clone(),
        prompt: Some(v1::Prompt { prompt: Some(prompt) }),
        generation_token_ids: ids(&call.generation),
        generation_logprobs: Some(floats(&call.logprobs)),
        train: (!call.train).then_some(false),
        ..v1::Call::default()
    }
}

/// A case's kept lists.
pub(crate) fn kept(case: &Case) -> Option<v1::KeptCalls> {
    let list = |(agent, calls): (&String, &Vec<String>)| (agent.clone(), v1::CallList { call_ids: calls.clone() });
    case.kept.as_ref().map(|lists| v1::KeptCalls { agents: lists.iter().map(list).collect() })
}

/// The rows of a unit, whose headers and spans must say what its tokens say.
pub(crate) fn rows(unit: &Unit, reward: f64) -> Result<Vec<Row>, String> {
    let mut rows = Vec::with_capacity(unit.rows.len());
    for row in &unit.rows {
        check_header(row, reward).map_err(|fault| format!("{}: {fault}", row.row_id))?;
        rows.push(Row {
            policy: row.header.policy.clone(),
            leaf: row.header.leaf_call_id.clone(),
            agent: row.header.agent_id.clone(),
            root: row.header.root_call_id.clone(),
            walk: row.walk().into_iter().map(str::to_owned).collect(),
            trains: row.trains().into_iter().map(str::to_owned).collect(),
            token_ids: row.token_ids.clone(),
            loss_mask: row.loss_mask.clone(),
            logprobs: row.logprobs.clone(),
        });
    }
    for policy in unit.rows.chunk_by(|one, other| one.header.policy == other.header.policy) {
        let places: Vec<(u32, u32)> = policy.iter().map(|row| (row.header.row_index, row.header.row_count)).collect();
        let count = u32::try_from(policy.len()).unwrap_or(u32::MAX);
        if !places.iter().copied().eq((0..count).map(|place| (place, count))) {
            return Err(format!("rows are numbered {places:?}"));
        }
    }
    Ok(rows)
}

fn check_header(row: &service::Row, reward: f64) -> Result<(), String> {
    let header = &row.header;
    let trained: usize = row.loss_mask.iter().map(|mask| usize::from(*mask)).sum();
    let lengths = (row.loss_mask.len(), row.logprobs.len(), header.tokens, header.trained_tokens);
    let tokens = row.token_ids.len();
    if lengths != (tokens, tokens, tokens as u64, trained as u64) {
        return Err(format!("{tokens} tokens, {trained} of them trained, with {lengths:?}"));
    }
    let in_spans: u64 = row.spans.iter().filter(|span| span.trained).map(|span| span.end - span.start).sum();
    let ends = (row.spans.first(), row.spans.last());
    let on_walk = ends.0.is_some_and(|span| span.call_id == header.root_call_id)
        && ends.1.is_some_and(|span| span.call_id == header.leaf_call_id && span.end == tokens as u64);
    if in_spans != trained as u64 || !on_walk {
        return Err(format!("its spans are {:?}", row.spans));
    }
    if header.reward.to_bits() != reward.to_bits() || header.incomplete {
        return Err(format!("its reward is {}, not {reward}; incomplete: {}", header.reward, header.incomplete));
    }
    let id = [&header.run_id, &header.rollout_id, "0", &header.policy, &header.leaf_call_id].join("/");
    if row.row_id.contains('%') || row.row_id == id { Ok(()) } else { Err(format!("its id should be {id}")) }
}

/// The first row that differs, log-probabilities compared by their bits.
pub(crate) fn same_rows(expected: &[Row], found: &[Row]) -> Result<(), String> {
    let bits = |row: &Row| row.logprobs.iter().map(|value| value.to_bits()).collect::<Vec<_>>();
    match expected.iter().zip(found).find(|(one, other)| one != other || bits(one) != bits(other)) {
        Some((expected, found)) => Err(format!("a row is\n  {found:?}, not\n  {expected:?}")),
        None if expected.len() == found.len() => Ok(()),
        None => Err(format!("{} rows, not {}", found.len(), expected.len())),
    }
}

/// The links of a finalised rollout's kept calls.
pub(crate) type Links = (BTreeMap<String, Option<String>>, BTreeMap<String, BrokenLink>);

pub(crate) fn links(shown: &v1::GetRolloutResponse) -> Result<Links, String> {
    let mut links = Links::default();
    for call in shown.calls.iter().filter(|call| call.kept) {
        let verdict = call.verdict.as_ref().ok_or_else(|| format!("{} has no verdict", call.call_id))?;
        let parent = (!verdict.parent_call_id.is_empty()).then(|| verdict.parent_call_id.clone());
        match (verdict.kind(), &parent) {
            (v1::LinkKind::Empty, _) => continue,
            (v1::LinkKind::Root, None) | (v1::LinkKind::Child, Some(_)) => {}
            (v1::LinkKind::Broken, _) => {
                let named = match call.link.as_ref().and_then(|link| link.link.as_ref()) {
                    Some(v1::link::Link::ParentCallId(named)) => named.clone(),
                    other => return Err(format!("{} is broken, and names {other:?}", call.call_id)),
                };
                let first_difference = verdict.drift.as_ref().map(|drift| drift.matched_length_tokens as usize);
                let does_not_fit = verdict.broken() == v1::BrokenLinkReason::DoesNotFit;
                if does_not_fit != first_difference.is_some() {
                    return Err(format!(
                        "{} is broken as {:?} at {first_difference:?}",
                        call.call_id,
                        verdict.broken()
                    ));
                }
                links.1.insert(call.call_id.clone(), BrokenLink { named, first_difference });
            }
            other => return Err(format!("{} is linked as {other:?}", call.call_id)),
        }
        links.0.insert(call.call_id.clone(), parent);
    }
    Ok(links)
}

/// Whether the rows as they are shown are these.
pub(crate) fn shows_rows(shown: &v1::GetRolloutResponse, expected: &[Row]) -> Result<(), String> {
    type Told = (String, String, String, Vec<String>, Vec<String>, u64, u64);
    let expected = expected.iter().map(|row| -> Told {
        let trained = row.loss_mask.iter().map(|mask| u64::from(*mask)).sum();
        let Row { policy, leaf, agent, walk, trains, .. } = row.clone();
        (policy, leaf, agent, walk, trains, row.token_ids.len() as u64, trained)
    });
    let found = shown.rows.iter().map(|row| -> Told {
        let row = row.clone();
        let (walk, trains) = (row.walk_call_ids, row.trained_call_ids);
        (row.policy, row.leaf_call_id, row.agent_id, walk, trains, row.tokens, row.trained_tokens)
    });
    let (expected, found): (Vec<Told>, Vec<Told>) = (expected.collect(), found.collect());
    if expected == found { Ok(()) } else { Err(format!("shown rows are {found:?}, not {expected:?}")) }
}
