//! How a call enters the forest: judged without changing anything, then applied without failing.
//!
//! A prompt comes whole, or as a delta on a prefix of any call of the rollout. A delta whose base has not come waits; when
//! the base comes, the digest is checked, and a delta that meant another base is *unresolved* until its call comes in full.
//! The record of a call holds only ids that the rollout has not seen: what went before is named by a call and a length.

use std::collections::VecDeque;

use crate::ids::CallId;

use super::call::{Call, CallFacts, CallIndex, CallTokens, Delta, NewCall, Pending, Prompt, RecordedPrompt};
use super::digest::BLOCK_TOKENS;
use super::link::Verdict;
use super::tokens::{BlockId, View};
use super::{Forest, full_view, prompt_view, size};

/// What stands in the log for a call: enough to apply it again.
#[derive(Clone, Debug, PartialEq)]
pub enum CallRecord {
    /// A call that is new.
    New(Box<(CallFacts, RecordedPrompt)>),
    /// The prompt of a call that had come as a delta whose base was missing or another.
    Prompt(CallId, RecordedPrompt),
}

/// What a reported call is to the forest.
#[derive(Clone, Debug, PartialEq)]
pub enum JudgedCall {
    /// Something to store.
    Record(CallRecord),
    /// Known already, with the same content.
    Duplicate(CallIndex),
}

/// Why the forest cannot take a call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CallRefusal {
    /// The id is known with other content; names the field that differs.
    Conflict(&'static str),
    /// The delta cannot be taken; says why. The call must be sent with all ids of its prompt.
    ResendFullPrompt(String),
}

/// What applying a call did.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Accepted {
    /// The call.
    pub call: CallIndex,
    /// What is known of its link now.
    pub verdict: Verdict,
    /// Calls whose deltas had waited, with what became of each.
    pub settled: Vec<(CallIndex, Placement)>,
}

/// What became of a waiting delta when its base came.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Placement {
    /// Its ids are known now.
    Placed,
    /// The base turned out to be another; the call must come in full.
    Unresolved,
}

/// The ids of a prompt that is not stored yet: a prefix of something stored, then more.
struct Candidate<'a> {
    base: View<'a>,
    more: &'a [u32],
}

impl Forest {
    /// What this call would be. Reads only.
    ///
    /// # Errors
    /// If the call is known with other content, or its delta cannot be taken.
    pub fn judge_call(&self, call: NewCall) -> Result<JudgedCall, CallRefusal> {
        self.needs_tokens();
        let NewCall { facts, prompt } = call;
        match self.find(&facts.call_id) {
            Some(known) => self.judge_known(known, &facts, prompt),
            None => {
                let prompt = match prompt {
                    Prompt::Full(ids) => self.record_full(&ids),
                    Prompt::Delta(delta) => self.record_delta(&facts.call_id, delta)?,
                };
                Ok(JudgedCall::Record(CallRecord::New(Box::new((facts, prompt)))))
            }
        }
    }

    /// Stores what was judged. Replay calls only this.
    pub fn apply_call(&mut self, record: CallRecord) -> Accepted {
        let (call, placed) = match record {
            CallRecord::New(new) => {
                let (facts, prompt) = *new;
                let (call, generation) = self.add(facts, prompt_length(&prompt));
                (call, self.placing(call, prompt, generation))
            }
            CallRecord::Prompt(id, prompt) => {
                let call = self.find(&id).unwrap_or(CallIndex(u32::MAX));
                assert!(call.index() < self.calls.len(), "a prompt is recorded only for a call that stands");
                let generation = self.forget_pending(call);
                // An unresolved delta may have claimed another length.
                let length = prompt_length(&prompt);
                let before = std::mem::replace(&mut self.calls[call.index()].prompt_length, length);
                self.totals.prompt_tokens = self.totals.prompt_tokens - u64::from(before) + u64::from(length);
                (call, self.placing(call, prompt, generation))
            }
        };
        let settled = if placed { self.settle_dependents(call) } else { Vec::new() };
        Accepted { call, verdict: self.verdict(call), settled }
    }

    fn judge_known(&self, known: CallIndex, facts: &CallFacts, prompt: Prompt) -> Result<JudgedCall, CallRefusal> {
        let stored = self.call(known);
        self.same_facts(known, facts)?;
        match &stored.tokens {
            CallTokens::Placed { .. } => {
                self.same_prompt(stored, &prompt)?;
                Ok(JudgedCall::Duplicate(known))
            }
            CallTokens::Waiting(pending) | CallTokens::Unresolved(pending) => {
                if pending.generation[..] != facts.generation[..] {
                    return Err(CallRefusal::Conflict("generation_token_ids"));
                }
                if matches!(&prompt, Prompt::Delta(delta) if *delta == pending.delta) {
                    return Ok(JudgedCall::Duplicate(known));
                }
                let unresolved = matches!(stored.tokens, CallTokens::Unresolved(_));
                let prompt = self.judge_pending_prompt(&pending.delta, &prompt, unresolved)?;
                Ok(JudgedCall::Record(CallRecord::Prompt(facts.call_id.clone(), prompt)))
            }
        }
    }

    /// A second form of the prompt of a call whose delta waits or is unresolved.
    fn judge_pending_prompt(
        &self,
        pending: &Delta,
        prompt: &Prompt,
        unresolved: bool,
    ) -> Result<RecordedPrompt, CallRefusal> {
        let (candidate, record) = match prompt {
            Prompt::Full(ids) => {
                (Candidate { base: View { block: BlockId::ROOT, tail: &[] }, more: ids }, self.record_full(ids))
            }
            Prompt::Delta(delta) => {
                let Some(base) = self.find_placed(&delta.base) else {
                    return Err(CallRefusal::ResendFullPrompt(format!(
                        "the call has come as a delta on {:?}, which is not resolved, and neither is {:?}",
                        pending.base, delta.base
                    )));
                };
                let base = self.base_prefix(base, delta)?;
                let record = RecordedPrompt::Known {
                    base: Some((delta.base.clone(), delta.base_length)),
                    suffix: delta.suffix.clone(),
                };
                (Candidate { base, more: &delta.suffix }, record)
            }
        };
        // An unresolved delta said nothing that holds about its prompt; a waiting one did.
        if !unresolved && !self.agrees(pending, &candidate) {
            return Err(CallRefusal::Conflict("prompt"));
        }
        Ok(record)
    }

    fn record_full(&self, ids: &[u32]) -> RecordedPrompt {
        let (block, known) = self.tokens.descend(BlockId::ROOT, ids);
        let base =
            self.maker(block).map(|maker| (self.call(maker).id.clone(), u32::try_from(known).unwrap_or(u32::MAX)));
        RecordedPrompt::Known { base, suffix: ids[known..].to_vec() }
    }

    fn record_delta(&self, own_id: &CallId, delta: Delta) -> Result<RecordedPrompt, CallRefusal> {
        if delta.base == *own_id {
            return Err(CallRefusal::ResendFullPrompt("a delta's base cannot be the call itself".to_owned()));
        }
        match self.find_placed(&delta.base) {
            None if self.waits_for(&delta.base, own_id) => {
                let why =
                    format!("call {:?} waits for {own_id:?} itself, so that neither could ever be known", delta.base);
                Err(CallRefusal::ResendFullPrompt(why))
            }
            None => Ok(RecordedPrompt::Waiting(delta)),
            Some(base) => {
                self.base_prefix(base, &delta)?;
                Ok(RecordedPrompt::Known { base: Some((delta.base, delta.base_length)), suffix: delta.suffix })
            }
        }
    }

    /// Whether a call waits for another one, directly or over others. Nothing waits for a call that nobody named as a base.
    fn waits_for(&self, call: &CallId, base: &CallId) -> bool {
        if self.waiting_for(base).is_empty() {
            return false;
        }
        self.last_missing(call) == base
    }

    /// The call that has its ids, or has not come, at which the line of bases from this one up ends.
    fn last_missing<'a>(&'a self, call: &'a CallId) -> &'a CallId {
        let up = |id: &&'a CallId| {
            let call = self.find(id)?;
            self.lines.get(&call).or_else(|| self.call(call).pending_base())
        };
        std::iter::successors(Some(call), up).last().unwrap_or(call)
    }

    /// Shortens the line of bases from this call up, so that nobody goes it twice.
    fn shorten_line(&mut self, call: CallIndex, base: &CallId) {
        let last = self.last_missing(base).clone();
        self.lines.insert(call, last.clone());
        let mut at = base.clone();
        while at != last
            && let Some(call) = self.find(&at)
            && let Some(base) = self.call(call).pending_base().cloned()
        {
            at = self.lines.insert(call, last.clone()).unwrap_or(base);
        }
    }

    /// The part of the base that a delta begins with, checked against its digest.
    fn base_prefix(&self, base: CallIndex, delta: &Delta) -> Result<View<'_>, CallRefusal> {
        let call = self.call(base);
        let wanted = delta.base_length as usize;
        let Some(full) = full_view(call).filter(|_| wanted <= call.full_length()) else {
            return Err(CallRefusal::ResendFullPrompt(format!(
                "base.length_tokens is {wanted}, but call {:?} has {} ids",
                delta.base,
                call.full_length()
            )));
        };
        let prefix = self.tokens.prefix(full, wanted);
        if self.tokens.digest(prefix) == delta.digest {
            return Ok(prefix);
        }
        Err(CallRefusal::ResendFullPrompt(format!(
            "base.digest is not that of the first {wanted} ids of call {:?}",
            delta.base
        )))
    }

    fn same_facts(&self, known: CallIndex, facts: &CallFacts) -> Result<(), CallRefusal> {
        let call = self.call(known);
        let name = |index| self.name(index);
        let same_logprobs = match (&call.logprobs, &facts.logprobs) {
            (Some(stored), Some(new)) => {
                stored.iter().map(|value| value.to_bits()).eq(new.iter().map(|value| value.to_bits()))
            }
            (None, None) => true,
            (Some(_), None) | (None, Some(_)) => false,
        };
        let checks = [
            ("agent_id", *self.agent(call.agent).id() == facts.agent_id),
            ("sequence", call.sequence == facts.sequence),
            ("link", call.link == facts.link),
            ("kind", *name(call.kind) == facts.kind),
            ("policy", *name(call.policy) == facts.policy),
            ("policy_versions", call.versions[..] == facts.versions[..]),
            ("model", call.model.map(name) == facts.model.as_ref()),
            ("finish_reason", call.finish_reason.map(name) == facts.finish_reason.as_ref()),
            ("train", call.train == facts.train),
            ("generation_token_ids", call.generation_length() == facts.generation.len()),
            ("generation_logprobs", same_logprobs),
            ("start_time", call.times_unix_ms.0 == facts.times_unix_ms.0),
            ("end_time", call.times_unix_ms.1 == facts.times_unix_ms.1),
        ];
        match checks.iter().find(|(_, same)| !same) {
            Some((field, _)) => Err(CallRefusal::Conflict(field)),
            None => self.same_generation(call, facts),
        }
    }

    fn same_generation(&self, call: &Call, facts: &CallFacts) -> Result<(), CallRefusal> {
        let Some(full) = full_view(call) else { return Ok(()) };
        let same = self.tokens.ids_from(full, call.prompt_length(), facts.generation.len()) == facts.generation;
        if same { Ok(()) } else { Err(CallRefusal::Conflict("generation_token_ids")) }
    }

    fn same_prompt(&self, stored: &Call, prompt: &Prompt) -> Result<(), CallRefusal> {
        let Some(view) = prompt_view(&self.tokens, stored) else { return Ok(()) };
        let same = stored.prompt_length() == prompt.length()
            && match prompt {
                Prompt::Full(ids) => {
                    let (block, known) = self.tokens.descend(BlockId::ROOT, ids);
                    block == view.block && ids[known..] == *view.tail
                }
                Prompt::Delta(delta) => {
                    let base_length = delta.base_length as usize;
                    self.tokens.digest(self.tokens.prefix(view, base_length)) == delta.digest
                        && self.tokens.ids_from(view, base_length, delta.suffix.len()) == delta.suffix
                }
            };
        if same {
            return Ok(());
        }
        // A delta that does not go with its own base says nothing of the prompt; one that does says another prompt.
        if let Prompt::Delta(delta) = prompt
            && let Some(base) = self.find_placed(&delta.base)
        {
            self.base_prefix(base, delta)?;
        }
        Err(CallRefusal::Conflict("prompt"))
    }

    /// Whether a prompt that is known now is the one that a waiting delta spoke of.
    fn agrees(&self, pending: &Delta, candidate: &Candidate<'_>) -> bool {
        let base_length = self.tokens.length(candidate.base);
        let wanted = pending.base_length as usize;
        if pending.prompt_length() != base_length + candidate.more.len() {
            return false;
        }
        let mut from_wanted = self.tokens.ids_from(candidate.base, wanted, base_length.saturating_sub(wanted));
        from_wanted.extend(&candidate.more[wanted.saturating_sub(base_length).min(candidate.more.len())..]);
        let digest = if wanted <= base_length {
            self.tokens.digest(self.tokens.prefix(candidate.base, wanted))
        } else {
            let mut ids = candidate.base.tail.to_vec();
            ids.extend(&candidate.more[..wanted - base_length]);
            let (blocks, tail) = ids.as_chunks::<BLOCK_TOKENS>();
            let state = self.tokens.state(candidate.base.block);
            blocks.iter().fold(state, |state, block| state.then(block)).then(tail)
        };
        digest == pending.digest && from_wanted == pending.suffix
    }

    /// The call that made this block.
    fn maker(&self, block: BlockId) -> Option<CallIndex> {
        if block == BlockId::ROOT {
            return None;
        }
        let place = self.makers.partition_point(|(first, _)| *first <= block);
        self.makers[..place].last().map(|(_, call)| *call)
    }

    /// Adds a call without its ids; gives back what it generated.
    fn add(&mut self, facts: CallFacts, prompt_length: u32) -> (CallIndex, Vec<u32>) {
        let call = CallIndex(u32::try_from(self.calls.len()).unwrap_or(u32::MAX));
        let agent = self.agents.intern(&facts.agent_id);
        if let Some(parent) = &facts.parent_agent_id {
            self.set_parent_agent(agent, parent);
        }
        let (generation_length, masked_tokens) = (length(&facts.generation), facts.masked_tokens());
        self.totals.prompt_tokens += u64::from(prompt_length);
        self.totals.generated_tokens += u64::from(generation_length);
        self.totals.empty_calls += u64::from(generation_length == 0);
        self.by_id.insert(facts.call_id.clone(), call);
        self.array_bytes += size::of_facts(&facts);
        let stored = Call {
            id: facts.call_id,
            agent,
            sequence: facts.sequence,
            link: facts.link,
            kind: self.names.intern(&facts.kind),
            policy: self.names.intern(&facts.policy),
            model: facts.model.map(|name| self.names.intern(&name)),
            finish_reason: facts.finish_reason.map(|name| self.names.intern(&name)),
            masked_tokens,
            versions: facts.versions.into(),
            logprobs: facts.logprobs.map(Into::into),
            train: facts.train,
            prompt_length,
            generation_length,
            times_unix_ms: facts.times_unix_ms,
            tokens: CallTokens::Placed { block: BlockId::ROOT, tail: Box::default() },
        };
        self.calls.push(stored);
        let (calls, of_agent) = (&self.calls, &mut self.agents.list[agent.index()].calls);
        let order = calls[call.index()].order();
        let place = of_agent.partition_point(|other| calls[other.index()].order() < order);
        of_agent.insert(place, call);
        (call, facts.generation)
    }

    /// Gives a call its ids, or has it wait; says whether it has them now.
    fn placing(&mut self, call: CallIndex, prompt: RecordedPrompt, generation: Vec<u32>) -> bool {
        match prompt {
            RecordedPrompt::Known { base, suffix } => {
                let (block, mut ids) = match base.and_then(|(id, length)| Some((self.find_placed(&id)?, length))) {
                    Some((base, length)) => self.prefix_of(base, length),
                    None => (BlockId::ROOT, Vec::new()),
                };
                ids.extend(suffix);
                self.place(call, block, ids, &generation);
                true
            }
            RecordedPrompt::Waiting(delta) => {
                self.waiting.entry(delta.base.clone()).or_default().push(call);
                self.totals.waiting_calls += 1;
                self.shorten_line(call, &delta.base);
                let pending = Pending { delta, generation: generation.into() };
                self.array_bytes += size::of_pending(&pending);
                self.calls[call.index()].tokens = CallTokens::Waiting(Box::new(pending));
                false
            }
        }
    }

    /// The first ids of a call: their last whole block, and the ids after it.
    fn prefix_of(&self, base: CallIndex, length: u32) -> (BlockId, Vec<u32>) {
        match full_view(self.call(base)) {
            Some(full) => {
                let prefix = self.tokens.prefix(full, length as usize);
                (prefix.block, prefix.tail.to_vec())
            }
            None => (BlockId::ROOT, Vec::new()),
        }
    }

    fn place(&mut self, call: CallIndex, from: BlockId, mut ids: Vec<u32>, generation: &[u32]) {
        ids.extend_from_slice(generation);
        let blocks_before = self.tokens.block_count();
        let block = self.tokens.intern(from, &ids);
        if self.tokens.block_count() > blocks_before {
            self.makers.push((BlockId::at(blocks_before), call));
        }
        let tail: Box<[u32]> = ids.as_chunks::<BLOCK_TOKENS>().1.into();
        self.array_bytes += size_of_val(&*tail);
        self.calls[call.index()].tokens = CallTokens::Placed { block, tail };
        if !generation.is_empty() {
            self.ends.insert(&self.tokens, &self.calls, call);
            let agent = self.calls[call.index()].agent;
            let (calls, texts) = (&self.calls, &mut self.agents.list[agent.index()].texts);
            let order = calls[call.index()].order();
            let place = texts.partition_point(|other| calls[other.index()].order() < order);
            texts.insert(place, call);
        }
    }

    /// Takes a waiting or unresolved call out of what waits; gives back what it generated.
    fn forget_pending(&mut self, call: CallIndex) -> Vec<u32> {
        let placed = CallTokens::Placed { block: BlockId::ROOT, tail: Box::default() };
        self.lines.remove(&call);
        match std::mem::replace(&mut self.calls[call.index()].tokens, placed) {
            CallTokens::Placed { .. } => Vec::new(),
            CallTokens::Unresolved(pending) => {
                self.totals.unresolved_calls -= 1;
                self.array_bytes -= size::of_pending(&pending);
                pending.generation.into_vec()
            }
            CallTokens::Waiting(pending) => {
                self.totals.waiting_calls -= 1;
                self.array_bytes -= size::of_pending(&pending);
                // It stays among those that wait for its base, and is passed over when that comes: to look for it among
                // thousands, each time, would take longer the more there are.
                pending.generation.into_vec()
            }
        }
    }

    /// Places every call that waited for this one, and those that waited for them.
    fn settle_dependents(&mut self, placed: CallIndex) -> Vec<(CallIndex, Placement)> {
        let mut settled = Vec::new();
        let mut bases = VecDeque::from([placed]);
        while let Some(base) = bases.pop_front() {
            let base_id = self.call(base).id.clone();
            for call in self.waiting.remove(&base_id).unwrap_or_default() {
                self.lines.remove(&call);
                let CallTokens::Waiting(pending) = &self.calls[call.index()].tokens else { continue };
                let placement = match self.base_prefix(base, &pending.delta) {
                    Ok(prefix) => {
                        let (block, mut ids) = (prefix.block, prefix.tail.to_vec());
                        ids.extend_from_slice(&pending.delta.suffix);
                        let (generation, freed) = (pending.generation.clone(), size::of_pending(pending));
                        self.place(call, block, ids, &generation);
                        self.array_bytes -= freed;
                        bases.push_back(call);
                        Placement::Placed
                    }
                    Err(_) => {
                        let pending = pending.clone();
                        self.calls[call.index()].tokens = CallTokens::Unresolved(pending);
                        self.totals.unresolved_calls += 1;
                        Placement::Unresolved
                    }
                };
                self.totals.waiting_calls -= 1;
                settled.push((call, placement));
            }
        }
        settled
    }

    /// The calls that waited for this one, directly; some may have come in full meanwhile.
    fn waiting_for(&self, base: &CallId) -> &[CallIndex] {
        self.waiting.get(base).map_or(&[], Vec::as_slice)
    }
}

fn prompt_length(prompt: &RecordedPrompt) -> u32 {
    match prompt {
        RecordedPrompt::Known { base, suffix } => base.as_ref().map_or(0, |base| base.1) + length(suffix),
        RecordedPrompt::Waiting(delta) => delta.base_length + length(&delta.suffix),
    }
}

fn length(ids: &[u32]) -> u32 {
    u32::try_from(ids.len()).unwrap_or(u32::MAX)
}
