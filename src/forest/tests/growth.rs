//! Finding the longest prefix: right in every order of arrival, and in steps that grow with the calls, whatever they look like.

use proptest::prelude::*;

use super::*;

/// How a rollout grows in which each call costs something to link.
#[derive(Clone, Copy, Debug)]
enum Shape {
    /// One long text, then calls that go back to somewhere in it and leave it inside a block.
    Rewinds,
    /// The same, but each generates what the text goes on with: its end is on the way of all that are deeper.
    Repeats,
    /// The same, but each leaves it with blocks of its own.
    Forks,
    /// Each call continues the one before it, but for the last few ids.
    Drifts,
    /// All leave one text at one place, for several blocks; the second half takes up where the first ended.
    Siblings,
}

#[derive(Clone, Copy, Debug)]
enum Order {
    DeepestFirst,
    ShallowFirst,
    Mixed,
}

impl Order {
    /// The numbers below `count` in this order.
    fn of(self, count: usize) -> Vec<usize> {
        match self {
            Self::DeepestFirst => (0..count).rev().collect(),
            Self::ShallowFirst => (0..count).collect(),
            // A prime, so that every number comes up once.
            Self::Mixed => (0..count).map(|number| number * 7919 % count).collect(),
        }
    }
}

fn fresh_ids(number: usize, count: usize) -> Vec<u32> {
    let first = u32::try_from(1_000_000 + number * 1000).unwrap();
    (first..).take(count).collect()
}

/// A call that continues the first `length` ids of one that stands.
fn on(forest: &mut Forest, (id, base): (&str, &str), length: usize, suffix: &[u32], generation: &[u32]) {
    let found = forest.find(&call_id(base)).unwrap();
    let text = forest.full_ids(found).unwrap();
    let sequence = forest.call_count() as u64;
    accept(forest, &new_call(id, "a", sequence, delta(base, &text[..length], suffix), generation));
}

/// Steps that so many calls cost, and those of finding their links among all but one of them.
fn steps(shape: Shape, order: Order, count: usize) -> usize {
    let text: Vec<u32> = (0..u32::try_from(count * 64 + 70).unwrap()).collect();
    let mut forest = Forest::default();
    accept(&mut forest, &full("text", "a", 0, &text[..1], &text[1..]));
    let order = order.of(count);
    for (number, place) in order.iter().copied().enumerate() {
        let (id, length) = (format!("c{place}"), place * 64 + 10);
        match shape {
            Shape::Rewinds => on(&mut forest, (&id, "text"), length, &[], &fresh_ids(place, 3)),
            Shape::Repeats => on(&mut forest, (&id, "text"), length, &[], &text[length..length + 3]),
            Shape::Forks => on(&mut forest, (&id, "text"), length, &fresh_ids(place, 130), &[7]),
            Shape::Drifts => {
                let before = number.checked_sub(1).map_or("text".to_owned(), |before| format!("c{}", order[before]));
                let whole = if number == 0 { 10 } else { number * 64 + 10 };
                on(&mut forest, (&id, &before), whole, &fresh_ids(place, 60), &fresh_ids(place + count, 20));
            }
            Shape::Siblings if number < count / 2 => {
                on(&mut forest, (&id, "text"), 10, &fresh_ids(place, 200), &[7, 8]);
            }
            Shape::Siblings => {
                let before = format!("c{}", order[number - count / 2]);
                on(&mut forest, (&id, &before), 212 - place % 180, &[], &fresh_ids(place, 30));
            }
        }
    }
    let taken = forest.ends.steps();
    let mut kept = everything(&forest);
    forest.links(&kept);
    let linked = forest.ends.steps() - taken;
    kept = CallSet::new();
    forest.calls().skip(1).for_each(|(call, _)| kept.insert(call));
    let mut ends = forest.ends_of(&kept);
    for call in kept.iter() {
        let prompt = prompt_view(&forest.tokens, forest.call(call)).unwrap();
        ends.longest_prefix(&forest.tokens, &forest.calls, prompt, |_| ());
    }
    taken + linked + ends.steps()
}

#[test]
fn twice_the_calls_cost_twice_the_steps_in_every_shape_and_order() {
    use {Order::*, Shape::*};
    for shape in [Rewinds, Repeats, Forks, Drifts, Siblings] {
        // Where everything forks, a step up is one of as many as the logarithm of the forks.
        let times = if matches!(shape, Rewinds | Repeats) { 2.1 } else { 2.1 * 800_f64.ln() / 400_f64.ln() };
        for order in [DeepestFirst, ShallowFirst, Mixed] {
            let [half, whole] = [400, 800].map(|count| steps(shape, order, count));
            let what = format!("{shape:?}, {order:?}: {half} steps for 400 calls, {whole} for 800");
            assert!(whole as f64 <= half as f64 * times && whole <= 800 * 100, "{what}");
        }
    }
}

/// Texts over few ids, each of which continues a prefix of an earlier one, cut into prompt and generation.
fn texts() -> impl Strategy<Value = Vec<(Vec<u32>, usize)>> {
    let step = (any::<prop::sample::Index>(), any::<prop::sample::Index>(), 0..200_usize, 0..3_u32, 1..150_usize);
    prop::collection::vec(step, 1..24).prop_map(|steps| {
        let mut all: Vec<(Vec<u32>, usize)> = Vec::new();
        for (which, cut, more, seed, generated) in steps {
            let mut next = match all.get(which.index(all.len() + 1)) {
                Some((base, _)) => base[..cut.index(base.len() + 1)].to_vec(),
                None => Vec::new(),
            };
            next.extend((0..more + 1).map(|step| u32::try_from(step / 50).unwrap() + seed));
            let generated = generated.min(next.len());
            all.push((next, generated));
        }
        all
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]
    #[test]
    fn the_longest_prefix_is_found_in_any_order((texts, order) in texts().prop_flat_map(|texts| {
        let order = Just((0..texts.len()).collect::<Vec<_>>()).prop_shuffle();
        (Just(texts), order)
    })) {
        let longest = |among: &[usize], prompt: &[u32]| {
            among.iter().filter(|at| prompt.starts_with(&texts[**at].0)).map(|at| texts[*at].0.len()).max()
        };
        let mut forest = Forest::default();
        for (arrived, at) in order.iter().copied().enumerate() {
            let (text, generated) = &texts[at];
            let (prompt, generation) = text.split_at(text.len() - generated);
            let new = full(&format!("c{at}"), "a", at as u64, prompt, generation);
            let found = match accept(&mut forest, &new).verdict.link {
                LinkVerdict::Child(parent) => Some(forest.call(parent).full_length()),
                LinkVerdict::Root | LinkVerdict::Waiting(_) | LinkVerdict::Broken(..) => None,
            };
            prop_assert_eq!(found, longest(&order[..arrived], prompt));
        }
        let kept = everything(&forest);
        let links = forest.links(&kept);
        for (call, at) in order.iter().enumerate() {
            let (text, generated) = &texts[*at];
            let parent = links.parents[call].map(|parent| forest.call(parent).full_length());
            prop_assert_eq!(parent, longest(&order, &text[..text.len() - generated]));
        }
    }
}
