//! Random stories of the generator, made again from a seed by whoever needs them.

use hedgerow::cli::shuffle::SplitMix64;
use proptest::strategy::{Strategy, ValueTree};
use proptest::test_runner::{Config, RngAlgorithm, TestRng, TestRunner};

use crate::case::Case;
use crate::feed::{Form, Mention};
use crate::generator::{self, Story};

/// So many stories.
pub(crate) fn stories(seed: u64, count: usize) -> Vec<Story> {
    let mut bytes = [0; 32];
    bytes[..8].copy_from_slice(&seed.to_le_bytes());
    let config = Config { failure_persistence: None, ..Config::default() };
    let mut runner = TestRunner::new_with_rng(config, TestRng::from_seed(RngAlgorithm::ChaCha, &bytes));
    let strategy = generator::stories();
    (0..count).map(|_| strategy.new_tree(&mut runner).expect("any story will do").current()).collect()
}

/// Each id so many times, which leaves every prefix a prefix.
pub(crate) fn stretch(case: &mut Case, mentions: &mut [Mention], times: usize) {
    let ids = |ids: &[u32]| ids.iter().flat_map(|id| vec![*id; times]).collect::<Vec<u32>>();
    for call in &mut case.calls {
        (call.prompt, call.generation) = (ids(&call.prompt), ids(&call.generation));
        call.logprobs = call.logprobs.iter().flat_map(|value| vec![*value; times]).collect();
    }
    for mention in mentions {
        if let Form::Delta { length, .. } = &mut mention.form {
            *length *= times;
        }
    }
}

/// Mixes what is told of rollouts, some of which are under way at once, each in its own order.
pub(crate) fn interleave<T>(rollouts: Vec<Vec<T>>, at_once: usize, chance: &mut SplitMix64) -> Vec<T> {
    let mut rollouts = rollouts.into_iter().map(Vec::into_iter);
    let mut open: Vec<std::vec::IntoIter<T>> = rollouts.by_ref().take(at_once).collect();
    let mut mixed = Vec::new();
    while !open.is_empty() {
        let which = chance.below(open.len());
        match open[which].next() {
            Some(told) => mixed.push(told),
            None => match rollouts.next() {
                Some(next) => open[which] = next,
                None => drop(open.swap_remove(which)),
            },
        }
    }
    mixed
}
