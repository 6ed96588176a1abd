//! Lines become rollouts: what the keys of a line mean to each other, and to the lines before.

use std::collections::{BTreeMap, HashMap, HashSet};

use super::line::{Ids, Kept, Line};
use super::{Digest, ID_BYTES, Place, RecordedBase, RecordedCall, RecordedRollout, Recording, first_ids};
use crate::cli::counted;
use crate::ids::check_identifier;
use crate::limits;

/// What is read so far.
#[derive(Default)]
pub(super) struct Builder {
    rollouts: Vec<Building>,
    rollout_indices: HashMap<String, usize>,
    unknown_keys: BTreeMap<String, u64>,
}

/// A rollout whose lines are being read.
#[derive(Default)]
struct Building {
    rollout: RecordedRollout,
    call_indices: HashMap<String, usize>,
    call_places: Vec<Place>,
    /// For each call, whether its line says that it was kept.
    kept: Vec<bool>,
    /// What reward lines say of kept calls.
    lists: Option<BTreeMap<String, Vec<String>>>,
    group_place: Option<Place>,
    reward_place: Option<Place>,
}

impl Builder {
    /// Takes one more line.
    pub(super) fn take(&mut self, mut line: Line, at: &Place) -> Result<(), String> {
        for key in line.unknown_keys.drain(..) {
            *self.unknown_keys.entry(key).or_default() += 1;
        }
        let id = identifier("rollout", line.rollout.take())?;
        let index = *self.rollout_indices.entry(id.clone()).or_insert_with(|| {
            let rollout = RecordedRollout { id, ..RecordedRollout::default() };
            self.rollouts.push(Building { rollout, ..Building::default() });
            self.rollouts.len() - 1
        });
        let Some(building) = self.rollouts.get_mut(index) else { return Err("lost its rollout".to_owned()) };
        building.take_group(line.group.take(), at)?;
        building.take_reward(line.reward, at)?;
        if line.call.is_some() { building.take_call(line, at) } else { building.take_end(line) }
    }

    /// All of it.
    pub(super) fn finish(self) -> Recording {
        let mut remarks = Vec::new();
        for (key, lines) in self.unknown_keys {
            remarks.push(format!("the key {key:?} is unknown and was passed over, on {}", counted(lines, "line")));
        }
        let mut rollouts = Vec::with_capacity(self.rollouts.len());
        for building in self.rollouts {
            building.remark_on_lists(&mut remarks);
            rollouts.push(building.finish());
        }
        Recording { rollouts, remarks }
    }
}

impl Building {
    fn take_group(&mut self, group: Option<String>, at: &Place) -> Result<(), String> {
        let Some(group) = group else { return Ok(()) };
        check_identifier(&group).map_err(|error| format!("group: {error}"))?;
        match (&self.rollout.group, &self.group_place) {
            (Some(known), Some(place)) if *known != group => {
                Err(format!("group: {group:?} is another group than {known:?} at {place}"))
            }
            (Some(_), _) => Ok(()),
            (None, _) => {
                self.rollout.group = Some(group);
                self.group_place = Some(at.clone());
                Ok(())
            }
        }
    }

    fn take_reward(&mut self, reward: Option<f64>, at: &Place) -> Result<(), String> {
        let Some(reward) = reward else { return Ok(()) };
        if !reward.is_finite() {
            return Err("reward: is not finite".to_owned());
        }
        match (self.rollout.reward, &self.reward_place) {
            (Some(known), Some(place)) if known.to_bits() != reward.to_bits() => {
                Err(format!("reward: {reward} is another reward than {known} at {place}"))
            }
            (Some(_), _) => Ok(()),
            (None, _) => {
                self.rollout.reward = Some(reward);
                self.reward_place = Some(at.clone());
                Ok(())
            }
        }
    }

    /// A line without a call: the rollout's reward and kept lists.
    fn take_end(&mut self, line: Line) -> Result<(), String> {
        if line.agent.is_some() || line.sequence.is_some() || line.generation.is_some() || line.prompt.is_some() {
            return Err("call: is missing".to_owned());
        }
        if !line.has_reward_key && !line.has_kept_key {
            return Err("has neither a call nor a reward".to_owned());
        }
        match line.kept {
            None => Ok(()),
            Some(Kept::Call(_)) => Err("kept: on a reward's line, lists of calls by agent are expected".to_owned()),
            Some(Kept::Lists(lists)) => {
                let all = self.lists.get_or_insert_default();
                for (agent, calls) in lists {
                    for id in std::iter::once(&agent).chain(&calls) {
                        check_identifier(id).map_err(|error| format!("kept: {id:?} {error}"))?;
                    }
                    all.entry(agent).or_default().extend(calls);
                }
                Ok(())
            }
        }
    }

    fn take_call(&mut self, line: Line, at: &Place) -> Result<(), String> {
        let id = identifier("call", line.call.clone())?;
        if let Some(place) = self.call_indices.get(&id).and_then(|&index| self.call_places.get(index)) {
            return Err(format!("call: {id:?} stands already at {place}; a recording holds each call once"));
        }
        if self.rollout.calls.len() >= limits::ROLLOUT_CALLS_MAX {
            return Err(format!("the rollout has more than {} calls", limits::ROLLOUT_CALLS_MAX));
        }
        let kept = match &line.kept {
            None => true,
            Some(Kept::Call(kept)) => *kept,
            Some(Kept::Lists(_)) => return Err("kept: on a call's line, true or false is expected".to_owned()),
        };
        let call = self.call(id, line)?;
        self.call_indices.insert(call.id.clone(), self.rollout.calls.len());
        self.call_places.push(at.clone());
        self.kept.push(kept);
        self.rollout.calls.push(call);
        Ok(())
    }

    fn call(&self, id: String, line: Line) -> Result<RecordedCall, String> {
        let generation = line.generation.ok_or("generation_token_ids: is missing")?.0;
        if !line.has_logprobs_key {
            return Err("generation_log_probs: is missing; null says that there are none".to_owned());
        }
        let logprobs = line.logprobs.map(|logprobs| logprobs.0);
        if let Some(logprobs) = logprobs.as_ref().filter(|logprobs| logprobs.len() != generation.len()) {
            let (given, generated) = (logprobs.len() / ID_BYTES, generation.len() / ID_BYTES);
            return Err(format!("generation_log_probs: has {given} for {generated} generated ids"));
        }
        let (base, suffix) = self.prompt(line.prompt, line.prefix_of, line.prefix_length, line.suffix)?;
        let link = line.link.map(Into::into).unwrap_or_default();
        if let super::RecordedLink::Parent(parent) = &link {
            check_identifier(parent).map_err(|error| format!("link: the parent {error}"))?;
        }
        let call = RecordedCall {
            id,
            agent: identifier("agent", line.agent)?,
            parent_agent: optional_identifier("parent_agent", line.parent_agent)?,
            sequence: line.sequence.ok_or("seq: is missing")?,
            link,
            kind: optional_identifier("kind", line.kind)?,
            policy: optional_identifier("policy", line.policy)?,
            policy_version: line.policy_version,
            model: optional_identifier("model", line.model)?,
            finish_reason: optional_identifier("finish_reason", line.finish_reason)?,
            train: line.train,
            base,
            suffix,
            generation,
            logprobs,
        };
        let tokens = call.prompt_tokens() + call.generated_tokens();
        if tokens > limits::CALL_TOKENS_MAX {
            return Err(format!("the call has {tokens} ids, more than {}", limits::CALL_TOKENS_MAX));
        }
        Ok(call)
    }

    /// What the prompt begins with, and what follows.
    fn prompt(
        &self,
        full: Option<Ids>,
        prefix_of: Option<String>,
        prefix_length: Option<u64>,
        suffix: Option<Ids>,
    ) -> Result<(Option<RecordedBase>, bytes::Bytes), String> {
        if let Some(Ids(full)) = full {
            if prefix_of.is_some() || prefix_length.is_some() || suffix.is_some() {
                return Err("prompt_token_ids: is there together with a prefix or a suffix".to_owned());
            }
            return Ok((None, full));
        }
        let suffix = suffix.ok_or("prompt_token_ids: is missing, and so is prompt_suffix_token_ids")?.0;
        let length = usize::try_from(prefix_length.unwrap_or(0)).unwrap_or(usize::MAX);
        let Some(base) = prefix_of else {
            if length > 0 {
                return Err(format!("prefix_len: {length} ids of no call; prefix_of is null"));
            }
            return Ok((None, suffix));
        };
        let index = self.call_indices.get(&base).copied();
        let earlier = index.and_then(|index| Some((index, self.rollout.calls.get(index)?)));
        let Some((call, recorded)) = earlier else {
            return Err(format!("prefix_of: {base:?} stands on no earlier line of this rollout"));
        };
        let available = recorded.prompt_tokens() + recorded.generated_tokens();
        if prefix_length.is_none() {
            return Err("prefix_len: is missing".to_owned());
        }
        if length > available {
            return Err(format!("prefix_len: {length}, but {base:?} has {available} ids"));
        }
        if length == 0 {
            return Ok((None, suffix));
        }
        let digest = Digest::of(&words(&first_ids(&self.rollout.calls, call, length)));
        Ok((Some(RecordedBase { call, length_tokens: length, digest }), suffix))
    }

    /// Kept lists may name calls that the recording does not hold; the service will wait for them.
    fn remark_on_lists(&self, remarks: &mut Vec<String>) {
        let listed = self.lists.iter().flatten().flat_map(|(_, calls)| calls);
        let mut strange = listed.filter(|call| !self.call_indices.contains_key(*call));
        if let Some(first) = strange.next() {
            let count = 1 + strange.count();
            let rollout = &self.rollout.id;
            remarks.push(format!("{rollout}: {count} kept calls are not in the recording, {first:?} for one"));
        }
    }

    fn finish(self) -> RecordedRollout {
        let Self { mut rollout, kept, lists, .. } = self;
        rollout.kept = lists.unwrap_or_else(|| {
            let mut lists: BTreeMap<String, Vec<String>> = BTreeMap::new();
            for (call, _) in rollout.calls.iter().zip(kept).filter(|(_, kept)| *kept) {
                lists.entry(call.agent.clone()).or_default().push(call.id.clone());
            }
            // No list at all would keep every call; an empty one keeps none.
            if let (true, Some(call)) = (lists.is_empty(), rollout.calls.first()) {
                lists.insert(call.agent.clone(), Vec::new());
            }
            lists
        });
        for calls in rollout.kept.values_mut() {
            let mut seen = HashSet::new();
            calls.retain(|call| seen.insert(call.clone()));
        }
        rollout
    }
}

/// Little-endian bytes as ids.
fn words(bytes: &[u8]) -> Vec<u32> {
    bytes.as_chunks::<ID_BYTES>().0.iter().map(|&word| u32::from_le_bytes(word)).collect()
}

fn identifier(key: &str, value: Option<String>) -> Result<String, String> {
    let value = value.ok_or_else(|| format!("{key}: is missing"))?;
    check_identifier(&value).map_err(|error| format!("{key}: {error}"))?;
    Ok(value)
}

/// Absent, null and empty are the same.
fn optional_identifier(key: &str, value: Option<String>) -> Result<String, String> {
    match value {
        Some(value) if !value.is_empty() => identifier(key, Some(value)),
        _ => Ok(String::new()),
    }
}
