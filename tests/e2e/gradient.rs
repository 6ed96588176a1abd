//! Training on rows is training on calls: a small causal model has the same loss and gradient from the rows of a rollout as from each
//! trained call alone on its own context, with the same advantages, whoever owns the calls that several rows hold.

use hedgerow::cli::shuffle::SplitMix64;
use hedgerow::proto::v1;
use hedgerow::proto::v1::credit::Target;
use hedgerow::proto::v1::report_request::Event;

use crate::life::Life;
use crate::service::{about, call, reward, subscription};

const VOCABULARY: usize = 12;
const WIDTH: usize = 5;
/// How much of what was read a step later is left.
const FADES: f64 = 0.7;

/// A causal model: what it has read is a fading sum of embeddings, from which the next id's logits are a linear function.
struct Model {
    embedding: Vec<[f64; WIDTH]>,
    output: Vec<[f64; WIDTH]>,
}

/// Loss, and its gradient in each weight.
#[derive(Clone, Debug)]
struct Outcome {
    loss: f64,
    embedding: Vec<[f64; WIDTH]>,
    output: Vec<[f64; WIDTH]>,
}

impl Model {
    fn new(chance: &mut SplitMix64) -> Self {
        let mut weights = || -> Vec<[f64; WIDTH]> {
            let mut weight = || chance.below(2001) as f64 / 1000.0 - 1.0;
            (0..VOCABULARY).map(|_| std::array::from_fn(|_| weight())).collect()
        };
        Self { embedding: weights(), output: weights() }
    }

    /// Adds the policy gradient of these ids: at each place that has a weight, minus weight × log p(id | all before it).
    fn learn(&self, ids: &[u32], weights: &[f64], outcome: &mut Outcome) {
        let mut read = [0.0; WIDTH];
        for (place, (id, weight)) in ids.iter().zip(weights).enumerate() {
            let id = *id as usize;
            if *weight != 0.0 {
                let dot = |row: &[f64; WIDTH]| row.iter().zip(&read).map(|(one, other)| one * other).sum::<f64>();
                let logits: Vec<f64> = self.output.iter().map(dot).collect();
                let all: f64 = logits.iter().map(|logit| logit.exp()).sum();
                outcome.loss -= weight * (logits[id] - all.ln());
                let mut back = [0.0; WIDTH];
                for (token, logit) in logits.iter().enumerate() {
                    let slope = weight * (logit.exp() / all - f64::from(u8::from(token == id)));
                    add(&mut outcome.output[token], slope, &read);
                    add(&mut back, slope, &self.output[token]);
                }
                let mut left = 1.0;
                for before in ids[..place].iter().rev() {
                    add(&mut outcome.embedding[*before as usize], left, &back);
                    left *= FADES;
                }
            }
            read = read.map(|number| FADES * number);
            add(&mut read, 1.0, &self.embedding[id]);
        }
    }
}

/// Adds so many times these numbers.
fn add(to: &mut [f64; WIDTH], times: f64, what: &[f64; WIDTH]) {
    to.iter_mut().zip(what).for_each(|(number, more)| *number += times * more);
}

impl Outcome {
    fn nothing() -> Self {
        let zero = vec![[0.0; WIDTH]; VOCABULARY];
        Self { loss: 0.0, embedding: zero.clone(), output: zero }
    }

    fn numbers(&self) -> impl Iterator<Item = f64> {
        let weights = self.embedding.iter().chain(&self.output).flatten().copied();
        std::iter::once(self.loss).chain(weights)
    }
}

/// A call, and what it deserves.
struct Told {
    id: String,
    agent: &'static str,
    prompt: Vec<u32>,
    generation: Vec<u32>,
    train: bool,
    reward: f64,
    scale: f64,
}

impl Told {
    fn full(&self) -> Vec<u32> {
        [&self.prompt[..], &self.generation].concat()
    }
}

/// Calls that begin anew, go on from an earlier one, fork from it, or sample its prompt once more.
fn forest(chance: &mut SplitMix64) -> Vec<Told> {
    let mut calls: Vec<Told> = Vec::new();
    for number in 0..12 + chance.below(12) {
        let mut ids = |most: usize| -> Vec<u32> {
            (0..=chance.below(most)).map(|_| u32::try_from(chance.below(VOCABULARY)).unwrap()).collect()
        };
        let (more, generation, anew) = (ids(4), ids(5), ids(6));
        let prompt = match (calls.is_empty(), chance.below(8)) {
            (true, _) | (false, 0) => anew,
            (false, 1) => calls[chance.below(calls.len())].prompt.clone(),
            (false, _) => [calls[chance.below(calls.len())].full(), more].concat(),
        };
        let number_of = |chance: &mut SplitMix64| chance.below(401) as f64 / 100.0 - 2.0;
        let (reward, scale) = (number_of(chance), number_of(chance));
        let agent = ["main", "sub", "other"][chance.below(3)];
        calls.push(Told {
            id: format!("c{number}"),
            agent,
            prompt,
            generation,
            train: chance.below(4) > 0,
            reward,
            scale,
        });
    }
    calls
}

/// What the rows of a run with this owner of shared calls teach the model, and how many trained tokens they have.
async fn from_rows(model: &Model, calls: &[Told], owner: v1::SharedCallOwner) -> (Outcome, usize) {
    let settings = v1::RunSettings { shared_call_owner: owner.into(), ..v1::RunSettings::default() };
    let mut life = Life::start_with(settings).await;
    let rollout = about("run", "tree");
    for (told, sequence) in calls.iter().zip(1..) {
        let call = call(&told.id, told.agent, sequence, &told.prompt, &told.generation);
        life.accepts(&rollout, Event::Call(call)).await;
    }
    let credit = |told: &Told| v1::Credit {
        target: Some(Target::CallId(told.id.clone())),
        train: Some(told.train),
        reward: Some(told.reward),
        advantage_scale: Some(told.scale),
    };
    let reward = v1::Reward { credits: calls.iter().map(credit).collect(), ..reward(1.0) };
    life.accepts(&rollout, Event::Finish(v1::Finish { seal: None, reward: Some(reward) })).await;
    let mut subscription = subscription("run", "trainers");
    subscription.settings = Some(v1::ConsumerGroupSettings { unit: v1::Unit::Rollout.into(), ..Default::default() });
    let mut trainer = life.service.trainer(subscription).await;
    let (mut outcome, mut trained) = (Outcome::nothing(), 0);
    for row in trainer.unit().await.rows {
        let mut weights = vec![0.0; row.token_ids.len()];
        for span in row.spans.iter().filter(|span| span.trained) {
            let places = usize::try_from(span.start).unwrap()..usize::try_from(span.end).unwrap();
            trained += places.len();
            weights[places].fill(span.advantage.expect("process rewards give an advantage"));
        }
        let masked = |(weight, mask): (&f64, &u8)| *weight == 0.0 || *mask == 1;
        assert!(weights.iter().zip(&row.loss_mask).all(masked), "only what the mask trains has a weight");
        model.learn(&row.token_ids, &weights, &mut outcome);
    }
    (outcome, trained)
}

/// What each trained call alone teaches it.
fn from_calls(model: &Model, calls: &[Told]) -> (Outcome, usize) {
    let (mut outcome, mut trained) = (Outcome::nothing(), 0);
    for told in calls.iter().filter(|told| told.train) {
        let mut weights = vec![0.0; told.prompt.len()];
        weights.resize(told.full().len(), told.scale * told.reward);
        trained += told.generation.len();
        model.learn(&told.full(), &weights, &mut outcome);
    }
    (outcome, trained)
}

#[tokio::test]
async fn rows_teach_what_their_calls_teach_under_both_owners() {
    for seed in 0..24 {
        let mut chance = SplitMix64::new(seed);
        let (model, calls) = (Model::new(&mut chance), forest(&mut chance));
        let (expected, tokens) = from_calls(&model, &calls);
        if tokens == 0 {
            continue;
        }
        for owner in [v1::SharedCallOwner::RootAgent, v1::SharedCallOwner::FirstLeaf] {
            let (found, trained) = from_rows(&model, &calls, owner).await;
            assert_eq!(trained, tokens, "seed {seed}, {owner:?}: each generated token trains once");
            for (found, expected) in found.numbers().zip(expected.numbers()) {
                let within = 1e-6 * expected.abs().max(1.0);
                assert!((found - expected).abs() <= within, "seed {seed}, {owner:?}: {found} and not {expected}");
            }
            assert!(expected.numbers().any(|number| number.abs() > 1e-3), "it teaches something");
        }
    }
}
