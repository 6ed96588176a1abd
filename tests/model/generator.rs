//! Random forests over very few ids, so that prefixes collide, and the ways in which a service may hear of them.
//!
//! A case is made from recipes: one for each call, whose text goes on from an earlier recipe's, and which says how the
//! call is mentioned. Leaving out a recipe leaves a valid case, so that failures shrink.

use std::collections::BTreeMap;
use std::fmt;

use proptest::array::uniform4;
use proptest::collection::vec;
use proptest::option;
use proptest::prelude::*;
use proptest::sample::Index;

use crate::case::{AgentsWithoutList, Call, Case, Link, OnBrokenLink, Settings, SharedCallOwner};
use crate::feed::{Form, Mention};

const AGENTS: [&str; 4] = ["lead", "left", "right", "deep"];
const POLICIES: [&str; 3] = ["main", "small", "judge"];
/// What no call is called.
pub(crate) const NEVER_COMES: &str = "gone";

/// A case, and two ways to tell of it.
#[derive(Clone)]
pub(crate) struct Story {
    pub(crate) case: Case,
    pub(crate) tellings: [Vec<Mention>; 2],
}

/// What a call's prompt begins with.
#[derive(Clone, Debug)]
enum Start {
    Fresh,
    /// The whole text of an earlier recipe's call.
    Continues(Index),
    /// The prompt of one: a retry or another sample.
    Repeats(Index),
    /// A part of the text of one: a rewind or a drift.
    Leaves(Index, Index),
}

#[derive(Clone, Debug)]
enum LinkRecipe {
    Infer,
    Root,
    /// The call that its text begins with.
    Right,
    Any(Index),
    NeverComes,
}

#[derive(Clone, Debug)]
enum FormRecipe {
    Full,
    /// On a prefix that the two calls share.
    Shared(Index, Index),
    /// On as much of another call as one likes, which may not be the same text.
    Drifted(Index, Index),
    NeverComes(Index),
}

#[derive(Clone, Debug)]
struct Recipe {
    agent: usize,
    sequence: u64,
    start: Start,
    more: Vec<(u32, usize)>,
    generation: Vec<u32>,
    link: LinkRecipe,
    train: bool,
    policy: usize,
    kept_by: usize,
    /// For each telling, when and how.
    mentions: Vec<[(u8, FormRecipe); 2]>,
}

#[derive(Clone, Debug)]
struct Frame {
    agent_parents: [Option<usize>; 4],
    /// Which agents give a kept list, if any does.
    lists: Option<[bool; 4]>,
    agents_without_list: AgentsWithoutList,
    owner: SharedCallOwner,
    policies: usize,
    policy: Option<usize>,
    max_row_tokens: Option<usize>,
    /// Equal ids before every fresh text, so that what differs stands near the edge of a block.
    preamble: usize,
}

/// Cases with two tellings each.
pub(crate) fn stories() -> impl Strategy<Value = Story> {
    (frame(), vec(recipe(), 1..14)).prop_map(|(frame, recipes)| story(&frame, &recipes))
}

fn frame() -> impl Strategy<Value = Frame> {
    let without = prop_oneof![Just(AgentsWithoutList::Drop), Just(AgentsWithoutList::Keep)];
    let owner = prop_oneof![3 => Just(SharedCallOwner::RootAgent), 1 => Just(SharedCallOwner::FirstLeaf)];
    let preamble = prop_oneof![6 => Just(0_usize), 2 => 58..67_usize, 1 => 122..132_usize];
    (
        uniform4(option::of(0..4_usize)),
        option::weighted(0.4, uniform4(proptest::bool::weighted(0.7))),
        without,
        owner,
        1..4_usize,
        option::weighted(0.3, 0..3_usize),
        option::weighted(0.2, 2..12_usize),
        preamble,
    )
        .prop_map(
            |(agent_parents, lists, agents_without_list, owner, policies, policy, max_row_tokens, preamble)| Frame {
                agent_parents,
                lists,
                agents_without_list,
                owner,
                policies,
                policy,
                max_row_tokens,
                preamble,
            },
        )
}

fn recipe() -> impl Strategy<Value = Recipe> {
    let id = || prop_oneof![5 => Just(1_u32), 3 => Just(2), 1 => Just(3)];
    let run = || prop_oneof![12 => 1..3_usize, 1 => 30..70_usize];
    let generation = prop_oneof![4 => vec(id(), 1..3), 2 => Just(Vec::new()), 1 => vec(id(), 60..70)];
    let start = prop_oneof![
        2 => Just(Start::Fresh),
        6 => any::<Index>().prop_map(Start::Continues),
        3 => any::<Index>().prop_map(Start::Repeats),
        2 => any::<(Index, Index)>().prop_map(|(which, cut)| Start::Leaves(which, cut)),
    ];
    let link = prop_oneof![
        8 => Just(LinkRecipe::Infer),
        1 => Just(LinkRecipe::Root),
        4 => Just(LinkRecipe::Right),
        4 => any::<Index>().prop_map(LinkRecipe::Any),
        1 => Just(LinkRecipe::NeverComes),
    ];
    let form = || {
        prop_oneof![
            3 => Just(FormRecipe::Full),
            6 => any::<(Index, Index)>().prop_map(|(base, cut)| FormRecipe::Shared(base, cut)),
            1 => any::<(Index, Index)>().prop_map(|(base, cut)| FormRecipe::Drifted(base, cut)),
            1 => any::<Index>().prop_map(FormRecipe::NeverComes),
        ]
    };
    let mention = (any::<u8>(), form(), any::<u8>(), form());
    let mentions = vec(mention.prop_map(|(at, how, at_2, how_2)| [(at, how), (at_2, how_2)]), 1..3);
    let more = prop_oneof![2 => Just(Vec::new()), 5 => vec((id(), run()), 1..3)];
    let whose = (0..4_usize, 0..9_u64, 0..3_usize, 0..5_usize);
    (whose, start, more, generation, link, proptest::bool::weighted(0.85), mentions).prop_map(
        |((agent, sequence, policy, kept_by), start, more, generation, link, train, mentions)| Recipe {
            agent,
            sequence,
            start,
            more,
            generation,
            link,
            train,
            policy,
            kept_by,
            mentions,
        },
    )
}

fn story(frame: &Frame, recipes: &[Recipe]) -> Story {
    let mut calls: Vec<Call> = Vec::new();
    for (place, recipe) in recipes.iter().enumerate() {
        calls.push(call(frame, recipe, place, recipes.len(), &calls));
    }
    let kept = frame.lists.map(|gives_list| {
        let list = |agent: usize| {
            let of_agent = recipes.iter().zip(&calls).filter(|(recipe, _)| recipe.kept_by == agent);
            of_agent.map(|(_, call)| call.id.clone()).collect()
        };
        let given = (0..AGENTS.len()).filter(|agent| gives_list[*agent]);
        given.map(|agent| (AGENTS[agent].to_owned(), list(agent))).collect::<BTreeMap<String, Vec<String>>>()
    });
    let settings = Settings {
        shared_call_owner: frame.owner,
        on_broken_link: OnBrokenLink::Infer,
        agents_without_list: frame.agents_without_list,
        policy: frame.policy.map(|policy| POLICIES[policy % frame.policies].to_owned()),
        max_row_tokens: frame.max_row_tokens.map(|limit| limit + frame.preamble),
    };
    let tellings = [0, 1].map(|telling| mentions(recipes, &calls, telling));
    Story { case: Case { calls, kept, settings }, tellings }
}

fn call(frame: &Frame, recipe: &Recipe, place: usize, count: usize, earlier: &[Call]) -> Call {
    let continued = match &recipe.start {
        Start::Fresh => None,
        Start::Continues(which) | Start::Repeats(which) | Start::Leaves(which, _) => {
            (!earlier.is_empty()).then(|| which.get(earlier))
        }
    };
    let mut prompt = match (&recipe.start, continued) {
        (Start::Continues(_), Some(base)) => base.full(),
        (Start::Repeats(_), Some(base)) => base.prompt.clone(),
        (Start::Leaves(_, cut), Some(base)) => base.full()[..cut.index(base.full().len() + 1)].to_vec(),
        (Start::Fresh, _) | (_, None) => vec![1; frame.preamble],
    };
    if !matches!((&recipe.start, continued), (Start::Repeats(_), Some(_))) {
        prompt.extend(recipe.more.iter().flat_map(|(id, times)| vec![*id; *times]));
    }
    let link = match (&recipe.link, continued) {
        (LinkRecipe::Root, _) => Link::Root,
        (LinkRecipe::Right, Some(base)) => Link::Parent(base.id.clone()),
        (LinkRecipe::Any(which), _) => Link::Parent(call_name(which.index(count))),
        (LinkRecipe::NeverComes, _) => Link::Parent(NEVER_COMES.to_owned()),
        (LinkRecipe::Infer, _) | (LinkRecipe::Right, None) => Link::Infer,
    };
    let logprob = |token: usize| -0.25 - f32::from(u8::try_from(place * 8 + token % 8).unwrap_or(u8::MAX)) / 32.0;
    Call {
        id: call_name(place),
        agent: AGENTS[recipe.agent].to_owned(),
        parent_agent: frame.agent_parents[recipe.agent].map(|parent| AGENTS[parent].to_owned()),
        sequence: recipe.sequence,
        prompt,
        logprobs: (0..recipe.generation.len()).map(logprob).collect(),
        generation: recipe.generation.clone(),
        link,
        train: recipe.train,
        policy: POLICIES[recipe.policy % frame.policies].to_owned(),
    }
}

/// Ids whose order is not that of the recipes.
fn call_name(place: usize) -> String {
    char::from(b'a' + u8::try_from(place * 7 % 26).unwrap_or(0)).to_string()
}

fn mentions(recipes: &[Recipe], calls: &[Call], telling: usize) -> Vec<Mention> {
    let mut mentions: Vec<(u8, Mention)> = Vec::new();
    for (place, recipe) in recipes.iter().enumerate() {
        for mention in &recipe.mentions {
            let (at, form) = &mention[telling];
            mentions.push((*at, Mention { call: place, form: form_of(form, &calls[place].prompt, calls) }));
        }
    }
    mentions.sort_by_key(|(at, _)| *at);
    mentions.into_iter().map(|(_, mention)| mention).collect()
}

fn form_of(recipe: &FormRecipe, prompt: &[u32], calls: &[Call]) -> Form {
    match recipe {
        FormRecipe::Full => Form::Full,
        FormRecipe::Shared(base, cut) => {
            let base = base.get(calls);
            let shared = base.full().iter().zip(prompt).take_while(|(one, other)| one == other).count();
            Form::Delta { base: base.id.clone(), length: shared - cut.index(shared + 1) }
        }
        FormRecipe::Drifted(base, cut) => {
            Form::Delta { base: base.get(calls).id.clone(), length: cut.index(prompt.len() + 1) }
        }
        FormRecipe::NeverComes(cut) => {
            Form::Delta { base: NEVER_COMES.to_owned(), length: cut.index(prompt.len() + 1) }
        }
    }
}

impl fmt::Debug for Story {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{:?}", self.case)?;
        self.tellings.iter().try_for_each(|telling| {
            let mention = |mention: &Mention| format!("{} {:?}", self.case.calls[mention.call].id, mention.form);
            writeln!(formatter, "  told: {}", telling.iter().map(mention).collect::<Vec<_>>().join("; "))
        })
    }
}
