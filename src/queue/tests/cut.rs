//! Steps are cut as the contract says: by hand, and against what is found out the slow way.

use proptest::collection::vec;
use proptest::prelude::*;

use super::*;

fn step(shards: u32, microbatch_tokens: u64) -> StepDefinition {
    StepDefinition { units: 1, shards, microbatch_tokens }
}

fn sizes(tokens: &[u64]) -> Vec<RowSize> {
    tokens.iter().map(|&tokens| RowSize { tokens, trained_tokens: tokens / 2 }).collect()
}

/// The tokens of the rows in each microbatch of each shard.
fn tokens_of(cut: &Cut, members: &[Vec<RowSize>]) -> Vec<Vec<Vec<u64>>> {
    let tokens = |place: &RowPlace| members[place.member as usize][place.row as usize].tokens;
    let of_shard = |shard: &ShardCut| shard.microbatches.iter().map(|rows| rows.iter().map(tokens).collect()).collect();
    cut.shards.iter().map(of_shard).collect()
}

fn cut_of(tokens: &[u64], definition: &StepDefinition) -> (Cut, Vec<Vec<Vec<u64>>>) {
    let members = [sizes(tokens)];
    let made = cut(CutVersion::First, &members, definition);
    let tokens = tokens_of(&made, &members);
    (made, tokens)
}

#[test]
fn rows_are_even_over_shards_and_microbatches() {
    let (made, tokens) = cut_of(&[5, 4, 3, 3, 3, 2], &step(2, 10));
    // 20 tokens fit into two microbatches of 10, one for each shard.
    assert_eq!(tokens, [[[5, 3, 2]], [[4, 3, 3]]]);
    assert_eq!((made.microbatches, made.rows, made.trained_tokens), (1, 6, 2 + 2 + 1 + 1 + 1 + 1));
    assert_eq!(made.shards.iter().map(|shard| (shard.tokens, shard.rows)).collect::<Vec<_>>(), [(10, 3), (10, 3)]);
}

#[test]
fn what_does_not_come_out_even_is_packed_all_the_same() {
    // Evenly they would be 6 + 4 and 5 + 5 or worse; only 6 + 4, 5 + 5 fill both.
    let (made, tokens) = cut_of(&[6, 4, 5, 5], &step(1, 10));
    assert_eq!((made.microbatches, tokens), (2, vec![vec![vec![6, 4], vec![5, 5]]]));
    // The emptiest bin has no room for the last one, but another has: 7 + 3 and 4 + 4, not 7 + 4.
    let (made, tokens) = cut_of(&[7, 4, 4, 3], &step(2, 10));
    assert_eq!((made.microbatches, tokens), (1, vec![vec![vec![7, 3]], vec![vec![4, 4]]]));
}

#[test]
fn a_shard_without_enough_rows_has_padding() {
    let (made, tokens) = cut_of(&[7], &step(3, 10));
    assert_eq!(tokens, [vec![vec![7]], vec![vec![]], vec![vec![]]]);
    let sums: Vec<_> = made.shards.iter().map(|shard| (shard.tokens, shard.rows)).collect();
    assert_eq!((sums, made.rows, made.microbatches), (vec![(7, 1), (1, 1), (1, 1)], 1, 1));
}

#[test]
fn a_row_that_is_longer_than_a_microbatch_is_alone_in_one() {
    let (made, tokens) = cut_of(&[25, 1, 1, 8], &step(2, 10));
    assert_eq!((made.microbatches, tokens), (1, vec![vec![vec![25]], vec![vec![1, 1, 8]]]));
}

#[test]
fn rows_take_empty_microbatches_before_padding_does() {
    // Three microbatches are needed, each shard has two, and there are four rows.
    let (made, tokens) = cut_of(&[8, 8, 5, 5], &step(2, 10));
    assert_eq!(made.microbatches, 2);
    assert_eq!(tokens, [[vec![8], vec![5]], [vec![8], vec![5]]]);
}

#[test]
fn equal_rows_stand_in_the_order_of_their_members() {
    let members = vec![sizes(&[4, 4]), sizes(&[4]), sizes(&[4])];
    let made = cut(CutVersion::First, &members, &step(2, 8));
    let place = |member, row| RowPlace { member, row };
    let rows: Vec<_> = made.shards.iter().flat_map(|shard| shard.microbatches.clone()).collect();
    assert_eq!(rows, [[place(0, 0), place(1, 0)], [place(0, 1), place(2, 0)]]);
}

/// Steps that were frozen are cut again by later builds: these bytes stand in weights.
#[test]
fn the_first_version_cuts_for_ever_as_it_did() {
    let mut seed: u64 = 7;
    let mut next = || {
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        seed >> 33
    };
    let members: Vec<Vec<RowSize>> = (0..300)
        .map(|_| (0..1 + next() % 4).map(|_| RowSize { tokens: 1 + next() % 9000, trained_tokens: 1 }).collect())
        .collect();
    let made = cut(CutVersion::First, &members, &step(7, 16_384));
    let mut digest: u64 = 0xcbf2_9ce4_8422_2325;
    for (shard, rows) in made.shards.iter().enumerate() {
        for place in rows.microbatches.iter().flat_map(|rows| rows.iter().chain([&RowPlace { member: 0, row: 999 }])) {
            for part in [shard as u64, u64::from(place.member), u64::from(place.row)] {
                digest = (digest ^ part).wrapping_mul(0x0100_0000_01b3);
            }
        }
    }
    let sums: Vec<u64> = made.shards.iter().map(|shard| shard.tokens).collect();
    assert_eq!((made.microbatches, made.rows, digest), (30, 730, 10_720_506_364_244_824_890), "{sums:?}");
}

/// The fewest bins that these rows fit into, by trying all ways.
fn fewest_bins(tokens: &[u64], most_tokens: u64) -> usize {
    fn place(rest: &[u64], bins: &mut Vec<u64>, most_tokens: u64, best: &mut usize) {
        let Some((first, rest)) = rest.split_first() else {
            *best = bins.len().min(*best);
            return;
        };
        if bins.len() >= *best {
            return;
        }
        for at in 0..bins.len() {
            if bins[at] + first <= most_tokens {
                bins[at] += first;
                place(rest, bins, most_tokens, best);
                bins[at] -= first;
            }
        }
        bins.push(*first);
        place(rest, bins, most_tokens, best);
        bins.pop();
    }
    let mut best = tokens.len();
    place(tokens, &mut Vec::new(), most_tokens, &mut best);
    best
}

/// What the contract says of a cut, looked at row by row.
fn check(made: &Cut, members: &[Vec<RowSize>], definition: &StepDefinition) {
    let mut rows: Vec<RowPlace> = Vec::new();
    let (mut padding, mut largest) = (0, 0);
    assert_eq!(made.shards.len(), definition.shards as usize);
    for shard in &made.shards {
        assert_eq!(shard.microbatches.len(), made.microbatches as usize, "as many microbatches in each shard");
        let (mut tokens, mut count) = (0, 0);
        for microbatch in &shard.microbatches {
            let sum: u64 = microbatch.iter().map(|at| members[at.member as usize][at.row as usize].tokens).sum();
            assert!(sum <= definition.microbatch_tokens || microbatch.len() == 1, "{microbatch:?} has {sum} tokens");
            assert!(microbatch.is_sorted());
            (padding, largest) = (padding + usize::from(microbatch.is_empty()), sum.max(largest));
            (tokens, count) = (tokens + sum.max(1), count + microbatch.len().max(1));
            rows.extend(microbatch);
        }
        assert_eq!((shard.tokens, shard.rows), (tokens, count as u64));
    }
    rows.sort_unstable();
    let all = members
        .iter()
        .enumerate()
        .flat_map(|(member, rows)| (0..rows.len()).map(move |row| RowPlace { member: member as u32, row: row as u32 }));
    assert_eq!(rows, all.collect::<Vec<_>>(), "each row stands in it once");
    let slots = made.microbatches as usize * definition.shards as usize;
    assert_eq!(padding, slots.saturating_sub(rows.len()), "there is no padding where rows are left");
    let sums: Vec<u64> = made.shards.iter().map(|shard| shard.tokens).collect();
    let most = sums.iter().copied().fold(0, u64::max);
    let apart = most - sums.iter().copied().fold(most, u64::min);
    assert!(apart <= largest.max(u64::from(made.microbatches)), "shards {sums:?} are {apart} tokens apart");
    assert_eq!(made.rows, rows.len() as u64);
    assert_eq!(made.trained_tokens, members.iter().flatten().map(|row| row.trained_tokens).sum::<u64>());
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 512, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn a_cut_is_what_the_contract_says(
        members in vec(vec(1..3000_u64, 1..6), 1..60),
        shards in 1..9_u32,
        microbatch_tokens in 1..8000_u64,
    ) {
        let members: Vec<_> = members.iter().map(|rows| sizes(rows)).collect();
        let definition = step(shards, microbatch_tokens);
        let made = cut(CutVersion::First, &members, &definition);
        check(&made, &members, &definition);
        prop_assert_eq!(&made, &cut(CutVersion::First, &members, &definition));
    }

    #[test]
    fn microbatches_are_nearly_as_few_as_can_be(
        tokens in vec(1..100_u64, 1..9),
        shards in 1..4_u32,
        microbatch_tokens in 20..200_u64,
    ) {
        let (made, _) = cut_of(&tokens, &step(shards, microbatch_tokens));
        let (long, short): (Vec<u64>, Vec<u64>) = tokens.iter().partition(|tokens| **tokens > microbatch_tokens);
        let fewest = long.len() + fewest_bins(&short, microbatch_tokens);
        // The known bound of this rule: 11/9 of the fewest, and 6/9.
        let most = (11 * fewest + 6) / 9;
        let microbatches = made.microbatches as usize;
        prop_assert!(microbatches >= fewest.div_ceil(shards as usize));
        prop_assert!(microbatches <= most.div_ceil(shards as usize), "{} microbatches, {} bins at best", microbatches, fewest);
    }
}
