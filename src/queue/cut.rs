//! How a frozen step is cut: which row stands in which microbatch of which shard. PURE.
//!
//! **For**: data-parallel ranks, which take one shard each and must do the same number of microbatches, or they wait for each other
//! for ever. A cut follows from the rows of the step's members, in their order, and from the consumer group's settings, and from
//! nothing else: it is worked out again after a restart, or when a shard is fetched once more, and comes out the same. So the rule of a
//! version never changes; a better one is another [`CutVersion`], which the record of each step names.
//!
//! **Never**: splits or shortens a row, leaves one out, or looks into it: only its length counts.
//!
//! **Invariants**, which tests hold:
//! 1. Each row stands in exactly one microbatch of one shard.
//! 2. Every shard has the same number of microbatches.
//! 3. The rows of a microbatch have no more tokens than it may; only a longer row stands in one alone.
//! 4. No microbatch is without a row: where there are fewer rows than microbatches, one of padding stands in each that is left.

use std::collections::BTreeSet;

use super::definition::StepDefinition;

/// Tokens of a row of padding.
pub const PADDING_ROW_TOKENS: u64 = 1;

/// Which rule a step is cut by.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum CutVersion {
    /// As few microbatches as the best fit of the longest rows first comes to, or one less; then as even as they can be.
    #[default]
    First,
}

/// What counts of a row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RowSize {
    /// Its tokens.
    pub tokens: u64,
    /// Those that it trains.
    pub trained_tokens: u64,
}

/// Where a row of a step is found.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct RowPlace {
    /// Which member of the step it is of.
    pub member: u32,
    /// Which of the member's rows.
    pub row: u32,
}

/// One shard of a step.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ShardCut {
    /// The rows of each microbatch, in the order of the step's rows. One without rows holds a row of padding.
    pub microbatches: Vec<Vec<RowPlace>>,
    /// Tokens, with those of padding.
    pub tokens: u64,
    /// Rows, with those of padding.
    pub rows: u64,
}

/// A step, cut into shards.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Cut {
    /// The shards.
    pub shards: Vec<ShardCut>,
    /// How many microbatches each shard has.
    pub microbatches: u32,
    /// Rows in the whole step, without padding.
    pub rows: u64,
    /// Trained tokens in the whole step.
    pub trained_tokens: u64,
}

/// Some rows, by their places in the order of the step, and their tokens.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
struct Bin {
    tokens: u64,
    rows: Vec<usize>,
}

impl Bin {
    fn add(&mut self, row: usize, tokens: u64) {
        self.tokens += tokens;
        self.rows.push(row);
    }
}

/// Cuts a step whose members have these rows, in order.
#[must_use]
pub fn cut(version: CutVersion, members: &[Vec<RowSize>], definition: &StepDefinition) -> Cut {
    match version {
        CutVersion::First => cut_first(members, definition),
    }
}

fn cut_first(members: &[Vec<RowSize>], definition: &StepDefinition) -> Cut {
    let mut places = Vec::new();
    let mut tokens: Vec<u64> = Vec::new();
    for (member, rows) in members.iter().enumerate() {
        for (row, size) in rows.iter().enumerate() {
            let count = |number: usize| u32::try_from(number).unwrap_or(u32::MAX);
            places.push(RowPlace { member: count(member), row: count(row) });
            tokens.push(size.tokens);
        }
    }
    let mut longest_first: Vec<usize> = (0..tokens.len()).collect();
    longest_first.sort_by_key(|row| (std::cmp::Reverse(tokens[*row]), *row));
    let (shards, most_tokens) = (definition.shards.max(1) as usize, definition.microbatch_tokens);
    let fitted = best_fit(&longest_first, &tokens, most_tokens);
    let microbatches = fitted.len().div_ceil(shards).max(1);
    let even = |microbatches: usize| level(&longest_first, &tokens, (microbatches * shards, most_tokens));
    // What the best fit packs badly may come out even in one less.
    let (microbatches, bins) = match even(microbatches - 1).map(|bins| (microbatches - 1, bins)) {
        Some(fewer) => fewer,
        None => (microbatches, even(microbatches).unwrap_or_else(|| spread(fitted, &tokens, microbatches * shards))),
    };
    let shard = |bins: Vec<Bin>| {
        let mut of_shard = ShardCut::default();
        for mut bin in bins {
            bin.rows.sort_unstable();
            of_shard.tokens += if bin.rows.is_empty() { PADDING_ROW_TOKENS } else { bin.tokens };
            of_shard.rows += bin.rows.len().max(1) as u64;
            of_shard.microbatches.push(bin.rows.iter().map(|row| places[*row]).collect());
        }
        of_shard
    };
    Cut {
        shards: deal(bins, shards, microbatches).into_iter().map(shard).collect(),
        microbatches: u32::try_from(microbatches).unwrap_or(u32::MAX),
        rows: tokens.len() as u64,
        trained_tokens: members.iter().flatten().map(|size| size.trained_tokens).sum(),
    }
}

/// Each row into the fullest bin that it fits into, the longest rows first. A row that is longer than a bin may be is alone in one.
fn best_fit(longest_first: &[usize], tokens: &[u64], most_tokens: u64) -> Vec<Bin> {
    let mut bins: Vec<Bin> = Vec::new();
    // (what is left, which bin)
    let mut left: BTreeSet<(u64, usize)> = BTreeSet::new();
    for &row in longest_first {
        let own = tokens[row];
        let (rest, bin) = match left.range((own, 0)..).next().copied() {
            Some((room, bin)) => {
                left.remove(&(room, bin));
                (room - own, bin)
            }
            None => {
                bins.push(Bin::default());
                (most_tokens.saturating_sub(own), bins.len() - 1)
            }
        };
        bins[bin].add(row, own);
        if own <= most_tokens {
            left.insert((rest, bin));
        }
    }
    bins
}

/// Each row into the emptiest of so many bins, the longest rows first; none if one has no room. So they come out even.
fn level(longest_first: &[usize], tokens: &[u64], (count, most_tokens): (usize, u64)) -> Option<Vec<Bin>> {
    let mut bins = vec![Bin::default(); count];
    let mut emptiest: BTreeSet<(u64, usize)> = (0..count).map(|bin| (0, bin)).collect();
    for &row in longest_first {
        let (before, bin) = emptiest.pop_first()?;
        let is_empty = bins[bin].rows.is_empty();
        if !is_empty && before + tokens[row] > most_tokens {
            return None;
        }
        bins[bin].add(row, tokens[row]);
        emptiest.insert((bins[bin].tokens, bin));
    }
    Some(bins)
}

/// These bins, and more up to so many; a bin with several rows gives its shortest one to one that has none, the fullest bins first.
fn spread(mut bins: Vec<Bin>, tokens: &[u64], count: usize) -> Vec<Bin> {
    let mut fullest: BTreeSet<(u64, usize)> =
        bins.iter().enumerate().filter(|(_, bin)| bin.rows.len() > 1).map(|(at, bin)| (bin.tokens, at)).collect();
    while bins.len() < count {
        let mut new = Bin::default();
        if let Some((_, at)) = fullest.pop_last()
            && let Some(row) = bins[at].rows.pop()
        {
            // Its rows came the longest first.
            bins[at].tokens -= tokens[row];
            new.add(row, tokens[row]);
            if bins[at].rows.len() > 1 {
                fullest.insert((bins[at].tokens, at));
            }
        }
        bins.push(new);
    }
    bins
}

/// Deals bins to shards, so many to each: the fullest first, each to the shard that has the fewest tokens.
fn deal(mut bins: Vec<Bin>, shards: usize, each: usize) -> Vec<Vec<Bin>> {
    // Which rows are in it makes the order one order.
    bins.sort_by(|one, other| (other.tokens, &one.rows).cmp(&(one.tokens, &other.rows)));
    let mut dealt = vec![Vec::with_capacity(each); shards];
    let mut fewest: BTreeSet<(u64, usize)> = (0..shards).map(|shard| (0, shard)).collect();
    for bin in bins {
        let Some((tokens, shard)) = fewest.pop_first() else { break };
        let tokens = tokens + bin.tokens;
        dealt[shard].push(bin);
        if dealt[shard].len() < each {
            fewest.insert((tokens, shard));
        }
    }
    dealt
}
