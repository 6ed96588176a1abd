//! Tells a forest of a case's calls, and reads back what it makes of them in the tests' own words.

use std::collections::BTreeMap;
use std::fmt;

use hedgerow::forest::call::{CallFacts, CallIndex, Delta, Link, NewCall, Prompt, TokensState};
use hedgerow::forest::digest::Digest;
use hedgerow::forest::link::{CallSet, Links};
use hedgerow::forest::plan::{PlanInput, PolicyPlan, SharedCallOwner};
use hedgerow::forest::{CallRecord, CallRefusal, Forest, JudgedCall};
use hedgerow::ids::{AgentId, CallId, Name};

use crate::case::{self, Answer, BrokenLink, Call, Case, Row};
use crate::verdict;

/// How a prompt is sent.
#[derive(Clone, PartialEq, Eq)]
pub(crate) enum Form {
    Full,
    /// As what follows `length` ids of this call's text, with the digest of the prompt's own first ids.
    Delta {
        base: String,
        length: usize,
    },
}

/// One report of one call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Mention {
    /// Its place in the case.
    pub(crate) call: usize,
    pub(crate) form: Form,
}

/// A forest, and the records that made it.
pub(crate) struct Told {
    pub(crate) forest: Forest,
    pub(crate) records: Vec<CallRecord>,
}

/// What a forest says of the kept calls: the answer, and the plan of each policy.
pub(crate) struct Heard {
    pub(crate) answer: Answer,
    pub(crate) plans: Vec<PolicyPlan>,
}

/// Tells a forest of every mention in turn, and then of what still waits, in full.
pub(crate) fn tell(case: &Case, mentions: &[Mention]) -> Result<Told, String> {
    let mut told = Told { forest: Forest::default(), records: Vec::new() };
    for mention in mentions {
        told.report(case, &case.calls[mention.call], &mention.form)?;
    }
    check_pending(case, mentions, &told.forest)?;
    for call in &case.calls {
        if told.forest.find_placed(&call_id(&call.id)).is_none() {
            told.report(case, call, &Form::Full)?;
        }
    }
    let totals = told.forest.totals();
    if (totals.waiting_calls, totals.unresolved_calls) != (0, 0) {
        return Err(format!("every call has come in full, and {totals:?}"));
    }
    Ok(told)
}

/// A call waits only for what has not come, and is unresolved only if its delta was on another text.
fn check_pending(case: &Case, mentions: &[Mention], forest: &Forest) -> Result<(), String> {
    let is_drifted = |mention: &Mention| match &mention.form {
        Form::Full => false,
        Form::Delta { base, length } => {
            let begins = &case.calls[mention.call].prompt[..*length];
            case.calls.iter().any(|call| call.id == *base && !call.full().starts_with(begins))
        }
    };
    for (_, call) in forest.calls() {
        let drifted =
            || mentions.iter().filter(|mention| case.calls[mention.call].id == call.id().as_str()).any(is_drifted);
        let is_right = match call.tokens_state() {
            TokensState::Placed => true,
            TokensState::WaitingForBase => call.pending_base().is_some_and(|base| forest.find_placed(base).is_none()),
            TokensState::Unresolved => drifted(),
        };
        if !is_right {
            return Err(format!("{} is {:?} on {:?}", call.id(), call.tokens_state(), call.pending_base()));
        }
    }
    Ok(())
}

/// The forest that a log of these records gives back.
pub(crate) fn replay(records: &[CallRecord]) -> Forest {
    let mut forest = Forest::default();
    for record in records {
        forest.apply_call(record.clone());
    }
    forest
}

impl Told {
    fn report(&mut self, case: &Case, call: &Call, form: &Form) -> Result<(), String> {
        match self.forest.judge_call(new_call(call, form)) {
            Ok(JudgedCall::Duplicate(known)) if self.forest.call(known).id().as_str() == call.id => Ok(()),
            Ok(JudgedCall::Duplicate(known)) => Err(format!("{} was taken for {known:?}", call.id)),
            Ok(JudgedCall::Record(record)) => {
                self.records.push(record.clone());
                let accepted = self.forest.apply_call(record);
                verdict::check(case, &self.forest, call, &accepted.verdict)
            }
            Err(CallRefusal::ResendFullPrompt(_)) if *form != Form::Full => self.report(case, call, &Form::Full),
            Err(refusal) => Err(format!("{} as {form:?} was refused: {refusal:?}", call.id)),
        }
    }
}

/// What the forest makes of the calls that this answer has kept.
pub(crate) fn hear(forest: &mut Forest, case: &Case, kept_ids: &Answer) -> Heard {
    let mut kept = CallSet::new();
    kept_ids.parents.keys().filter_map(|id| forest.find(&call_id(id))).for_each(|call| kept.insert(call));
    let links = forest.links(&kept);
    let policies = match &case.settings.policy {
        Some(policy) => vec![name(policy)],
        None => forest.policies(&kept),
    };
    let owner = match case.settings.shared_call_owner {
        case::SharedCallOwner::RootAgent => SharedCallOwner::RootAgent,
        case::SharedCallOwner::FirstLeaf => SharedCallOwner::FirstLeaf,
    };
    let max_row_tokens = case.settings.max_row_tokens.map(narrow);
    let mut may_train = CallSet::new();
    forest.calls().filter(|(_, call)| call.may_train()).for_each(|(call, _)| may_train.insert(call));
    let input = PlanInput { kept: &kept, may_train: &may_train, links: &links, owner, max_row_tokens };
    let plans: Vec<PolicyPlan> = policies.iter().map(|policy| forest.plan(policy, input)).collect();
    let rows = plans.iter().flat_map(|plan| rows_of(forest, plan, &links)).collect();
    let id = |call: CallIndex| id_of(forest, call);
    let parents: BTreeMap<_, _> = kept.iter().map(|call| (id(call), links.parent(call).map(id))).collect();
    let broken = links.broken.iter().map(|(call, broken)| {
        let first_difference = broken.first_difference.map(|position| position as usize);
        (id(*call), BrokenLink { named: broken.named.to_string(), first_difference })
    });
    Heard { answer: Answer { broken_links: broken.collect(), parents, rows }, plans }
}

fn rows_of(forest: &Forest, plan: &PolicyPlan, links: &Links) -> Vec<Row> {
    let told = |planned| {
        let row = forest.row(plan, planned, links);
        let ids = |trained_only: bool| {
            let spans = row.spans.iter().filter(|span| span.trained || !trained_only);
            spans.map(|span| id_of(forest, span.call)).collect()
        };
        Row {
            policy: plan.policy.to_string(),
            leaf: id_of(forest, planned.leaf),
            agent: forest.agent(forest.call(planned.leaf).agent()).id().to_string(),
            root: id_of(forest, planned.root),
            walk: ids(false),
            trains: ids(true),
            token_ids: row.token_ids,
            loss_mask: row.loss_mask,
            logprobs: row.logprobs,
        }
    };
    plan.rows.iter().map(told).collect()
}

fn new_call(call: &Call, form: &Form) -> NewCall {
    let prompt = match form {
        Form::Full => Prompt::Full(call.prompt.clone()),
        Form::Delta { base, length } => Prompt::Delta(Delta {
            base: call_id(base),
            base_length: narrow(*length),
            digest: Digest::of(&call.prompt[..*length]),
            suffix: call.prompt[*length..].to_vec(),
        }),
    };
    let facts = CallFacts {
        call_id: call_id(&call.id),
        agent_id: agent_id(&call.agent),
        parent_agent_id: call.parent_agent.as_deref().map(agent_id),
        sequence: call.sequence,
        link: match &call.link {
            case::Link::Infer => Link::Infer,
            case::Link::Root => Link::Root,
            case::Link::Parent(named) => Link::Parent(call_id(named)),
        },
        kind: name("turn"),
        policy: name(&call.policy),
        versions: Vec::new(),
        model: None,
        generation: call.generation.clone(),
        logprobs: Some(call.logprobs.clone()),
        train: call.train,
        finish_reason: None,
        times_unix_ms: (None, None),
    };
    NewCall { facts, prompt }
}

fn id_of(forest: &Forest, call: CallIndex) -> String {
    forest.call(call).id().to_string()
}

fn call_id(id: &str) -> CallId {
    CallId::parse(id).unwrap()
}

fn agent_id(id: &str) -> AgentId {
    AgentId::parse(id).unwrap()
}

fn name(text: &str) -> Name {
    Name::parse(text).unwrap()
}

fn narrow(length: usize) -> u32 {
    u32::try_from(length).unwrap()
}

impl fmt::Debug for Form {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Full => write!(formatter, "full"),
            Self::Delta { base, length } => write!(formatter, "{length} of {base}"),
        }
    }
}
