//! One rollout as the tests speak of it, and the answer that the rules give: plain values, printed a call a line.

use std::collections::BTreeMap;
use std::fmt;

/// What a harness says of a call's parent.
#[derive(Clone, PartialEq, Eq)]
pub(crate) enum Link {
    Infer,
    Root,
    Parent(String),
}

#[derive(Clone)]
pub(crate) struct Call {
    pub(crate) id: String,
    pub(crate) agent: String,
    pub(crate) parent_agent: Option<String>,
    pub(crate) sequence: u64,
    pub(crate) prompt: Vec<u32>,
    pub(crate) generation: Vec<u32>,
    pub(crate) logprobs: Vec<f32>,
    pub(crate) link: Link,
    pub(crate) train: bool,
    pub(crate) policy: String,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum SharedCallOwner {
    #[default]
    RootAgent,
    FirstLeaf,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum OnBrokenLink {
    #[default]
    Infer,
    Discard,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum AgentsWithoutList {
    #[default]
    Drop,
    Keep,
}

#[derive(Clone, Debug, Default)]
pub(crate) struct Settings {
    pub(crate) shared_call_owner: SharedCallOwner,
    pub(crate) on_broken_link: OnBrokenLink,
    pub(crate) agents_without_list: AgentsWithoutList,
    /// The policy that trains; every policy by itself where none is said.
    pub(crate) policy: Option<String>,
    pub(crate) max_row_tokens: Option<usize>,
}

#[derive(Clone, Default)]
pub(crate) struct Case {
    pub(crate) calls: Vec<Call>,
    /// The kept lists by agent; every call is kept where there are none.
    pub(crate) kept: Option<BTreeMap<String, Vec<String>>>,
    pub(crate) settings: Settings,
}

/// Why a rollout gives no rows at all.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Refusal {
    MissingCall,
    BrokenLink,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct BrokenLink {
    pub(crate) named: String,
    pub(crate) first_difference: Option<usize>,
}

#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Row {
    pub(crate) policy: String,
    pub(crate) leaf: String,
    /// The leaf's agent.
    pub(crate) agent: String,
    pub(crate) root: String,
    pub(crate) walk: Vec<String>,
    pub(crate) trains: Vec<String>,
    pub(crate) token_ids: Vec<u32>,
    pub(crate) loss_mask: Vec<u8>,
    pub(crate) logprobs: Vec<f32>,
}

/// What the rules make of a case.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Answer {
    /// Of the kept calls that generated something.
    pub(crate) parents: BTreeMap<String, Option<String>>,
    pub(crate) broken_links: BTreeMap<String, BrokenLink>,
    /// By policy, then by leaf.
    pub(crate) rows: Vec<Row>,
}

impl Call {
    /// Prompt + generation.
    pub(crate) fn full(&self) -> Vec<u32> {
        [&self.prompt[..], &self.generation[..]].concat()
    }

    pub(crate) fn order(&self) -> (u64, &str) {
        (self.sequence, &self.id)
    }
}

impl fmt::Debug for Call {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (id, agent, sequence, policy) = (&self.id, &self.agent, self.sequence, &self.policy);
        write!(formatter, "{id} #{sequence} of {agent}")?;
        if let Some(parent) = &self.parent_agent {
            write!(formatter, "<{parent}")?;
        }
        match &self.link {
            Link::Infer => {}
            Link::Root => write!(formatter, ", root")?,
            Link::Parent(named) => write!(formatter, ", names {named}")?,
        }
        let frozen = if self.train { "" } else { ", frozen" };
        write!(formatter, ", {policy}{frozen}: {} -> {}", Runs(&self.prompt), Runs(&self.generation))
    }
}

impl fmt::Debug for Case {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(formatter, "{:?}", self.settings)?;
        match &self.kept {
            Some(lists) => writeln!(formatter, "  kept {lists:?}")?,
            None => writeln!(formatter, "  no kept lists")?,
        }
        self.calls.iter().try_for_each(|call| writeln!(formatter, "  {call:?}"))
    }
}

/// Ids in one line, a run of equal ids as `id*count`.
struct Runs<'a>(&'a [u32]);

impl fmt::Display for Runs<'_> {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let runs = self.0.chunk_by(|one, other| one == other).map(|run| match run {
            [id] => id.to_string(),
            [id, ..] => format!("{id}*{}", run.len()),
            [] => String::new(),
        });
        write!(formatter, "[{}]", runs.collect::<Vec<_>>().join(" "))
    }
}
