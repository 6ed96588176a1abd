//! The workloads of the benchmarks: rollouts made from fixed seeds, the same on every machine.
//!
//! A rollout is a few *lines* of ids that only grow, and calls, each of which is the beginning of a line: the prompt, then what
//! was generated. So a rollout of a thousand calls takes its new ids, not its sent ones; prompts are slices.

use std::cell::OnceCell;

use hedgerow::cli::shuffle::SplitMix64;
use hedgerow::forest::digest::{BLOCK_TOKENS, Digest};

/// Ids are drawn below this: the size of a large vocabulary.
const VOCABULARY: usize = 150_000;
/// Ids that all lines of a rollout begin with: a system prompt.
const SYSTEM_TOKENS: usize = 600;
/// Ids that a compaction leaves of what went before it.
const SUMMARY_TOKENS: usize = 1000;

/// What kind of rollouts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// One conversation that only grows.
    Linear,
    /// A compaction every 40 calls.
    Compacting,
    /// A binary fork every 10 calls.
    Forks,
    /// 8 agents, in turn.
    Subagents,
    /// Drawn from what 600 real sessions look like.
    Population,
    /// All of the others, each in random order.
    Shuffled,
}

impl Kind {
    /// All, in the order in which they are printed.
    pub(crate) const ALL: [Self; 6] =
        [Self::Linear, Self::Compacting, Self::Forks, Self::Subagents, Self::Population, Self::Shuffled];
    /// Those whose size is free.
    pub(crate) const SIZED: [Self; 4] = [Self::Linear, Self::Compacting, Self::Forks, Self::Subagents];

    /// Its name in tables and on the command line.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Linear => "linear",
            Self::Compacting => "compacting",
            Self::Forks => "forks",
            Self::Subagents => "subagents",
            Self::Population => "population",
            Self::Shuffled => "shuffled",
        }
    }

    /// Its rollouts; of the population so many.
    pub(crate) fn rollouts(self, population: usize) -> Vec<Rollout> {
        let size = Size { calls: 200, prompt: 500, generation: 100 };
        match self {
            Self::Linear | Self::Compacting | Self::Forks | Self::Subagents => vec![self.sized(size)],
            Self::Population => (0..population as u64).map(population_rollout).collect(),
            Self::Shuffled => {
                let others = Self::ALL.into_iter().filter(|kind| *kind != Self::Shuffled);
                let mut rollouts: Vec<Rollout> = others.flat_map(|kind| kind.rollouts(population)).collect();
                rollouts.iter_mut().zip(0..).for_each(|(rollout, seed)| rollout.shuffle(seed));
                rollouts
            }
        }
    }

    /// One rollout of this size; [`Kind::Population`] and [`Kind::Shuffled`] have sizes of their own and give a linear one.
    pub(crate) fn sized(self, size: Size) -> Rollout {
        let mut maker = Maker::new(0xC0FFEE ^ self as u64);
        match self {
            Self::Linear | Self::Population | Self::Shuffled => {
                let line = maker.new_line(SYSTEM_TOKENS);
                (0..size.calls).for_each(|_| maker.turn(line, 0, size));
            }
            Self::Compacting => {
                let mut line = maker.new_line(SYSTEM_TOKENS);
                for call in 0..size.calls {
                    if call > 0 && call % 40 == 0 {
                        line = maker.new_line(SYSTEM_TOKENS);
                        maker.grow(line, SUMMARY_TOKENS);
                    }
                    maker.turn(line, 0, size);
                }
            }
            Self::Forks => maker.forks(size),
            Self::Subagents => {
                let lines: Vec<usize> = (0..8).map(|_| maker.new_line(SYSTEM_TOKENS)).collect();
                (0..size.calls).for_each(|call| maker.turn(lines[call % 8], call % 8, size));
            }
        }
        maker.finish()
    }
}

/// How large a rollout is.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Size {
    /// Calls.
    pub(crate) calls: usize,
    /// New ids in each prompt.
    pub(crate) prompt: usize,
    /// Generated ids of each call.
    pub(crate) generation: usize,
}

/// One call: the beginning of a line.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Call {
    /// Its line.
    pub(crate) line: usize,
    /// Its agent; 0 is the leader, the parent of all others.
    pub(crate) agent: usize,
    /// Its place in the harness's ledger.
    pub(crate) sequence: u64,
    /// Ids of its prompt.
    pub(crate) prompt: usize,
    /// Ids that it generated.
    pub(crate) generation: usize,
    /// The call whose text its prompt goes on from, and how many ids of it.
    pub(crate) base: Option<(u64, usize)>,
}

/// One rollout, its calls in the order in which they arrive.
pub(crate) struct Rollout {
    lines: Vec<Vec<u32>>,
    /// For each line, the digest chain's state after each of its whole blocks; made when a digest is first asked for.
    states: OnceCell<Vec<Vec<Digest>>>,
    /// Its calls.
    pub(crate) calls: Vec<Call>,
}

/// What a rollout comes to.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Totals {
    /// Calls.
    pub(crate) calls: u64,
    /// Ids of all prompts and generations, each as often as it was sent.
    pub(crate) sent: u64,
    /// Ids in blocks of 64 that are new to the rollout, known by their chained hash.
    pub(crate) unique: u64,
    /// Generated ids.
    pub(crate) generated: u64,
}

impl std::ops::AddAssign for Totals {
    fn add_assign(&mut self, other: Self) {
        self.calls += other.calls;
        self.sent += other.sent;
        self.unique += other.unique;
        self.generated += other.generated;
    }
}

impl Rollout {
    /// A call's prompt.
    pub(crate) fn prompt(&self, call: &Call) -> &[u32] {
        &self.lines[call.line][..call.prompt]
    }

    /// What a call generated.
    pub(crate) fn generation(&self, call: &Call) -> &[u32] {
        &self.lines[call.line][call.prompt..call.prompt + call.generation]
    }

    /// The digest of the first ids of a call's prompt.
    pub(crate) fn digest(&self, call: &Call, length: usize) -> Digest {
        let chain = |line: &Vec<u32>| {
            let mut state = Digest::default();
            let blocks = line.as_chunks::<BLOCK_TOKENS>().0.iter();
            std::iter::once(state)
                .chain(blocks.map(|block| {
                    state = state.then(block);
                    state
                }))
                .collect()
        };
        let states = self.states.get_or_init(|| self.lines.iter().map(chain).collect());
        let whole = length / BLOCK_TOKENS;
        states[call.line][whole].then(&self.lines[call.line][whole * BLOCK_TOKENS..length])
    }

    /// Puts the calls in a random order.
    pub(crate) fn shuffle(&mut self, seed: u64) {
        SplitMix64::new(seed).shuffle(&mut self.calls);
    }

    /// What it comes to. Every call is the beginning of a line, so the blocks of the lines are those of the calls.
    pub(crate) fn totals(&self) -> Totals {
        let mut known = std::collections::HashSet::new();
        let ends = |line: usize| self.calls.iter().filter(move |call| call.line == line);
        for (at, line) in self.lines.iter().enumerate() {
            let end = ends(at).map(|call| call.prompt + call.generation).max().unwrap_or(0);
            let mut state = Digest::default();
            for block in line[..end].as_chunks::<BLOCK_TOKENS>().0 {
                state = state.then(block);
                known.insert(state);
            }
        }
        Totals {
            calls: self.calls.len() as u64,
            sent: self.calls.iter().map(|call| (call.prompt + call.generation) as u64).sum(),
            unique: (known.len() * BLOCK_TOKENS) as u64,
            generated: self.calls.iter().map(|call| call.generation as u64).sum(),
        }
    }
}

/// Makes one rollout.
struct Maker {
    random: SplitMix64,
    lines: Vec<Vec<u32>>,
    /// For each line, the call that it goes on from and how many ids that call has.
    ends: Vec<Option<(u64, usize)>>,
    calls: Vec<Call>,
}

impl Maker {
    fn new(seed: u64) -> Self {
        Self { random: SplitMix64::new(seed), lines: Vec::new(), ends: Vec::new(), calls: Vec::new() }
    }

    fn finish(self) -> Rollout {
        Rollout { lines: self.lines, states: OnceCell::new(), calls: self.calls }
    }

    fn grow(&mut self, line: usize, tokens: usize) {
        let random = &mut self.random;
        self.lines[line].extend((0..tokens).map(|_| random.below(VOCABULARY) as u32));
    }

    /// A line that begins with so many ids of the first line, which is made if there is none.
    fn new_line(&mut self, shared: usize) -> usize {
        let line = self.lines.len();
        if line == 0 {
            self.lines.push(Vec::new());
            self.grow(0, shared);
            self.ends.push(None);
        } else {
            self.lines.push(self.lines[0][..shared].to_vec());
            let first = self.calls.first().map(|call| (call.sequence, shared));
            self.ends.push(first);
        }
        line
    }

    /// A call that goes on from the end of a line.
    fn turn(&mut self, line: usize, agent: usize, size: Size) {
        let base = self.ends[line];
        self.grow(line, size.prompt);
        let prompt = self.lines[line].len();
        self.grow(line, size.generation);
        let sequence = self.calls.len() as u64;
        self.calls.push(Call { line, agent, sequence, prompt, generation: size.generation, base });
        self.ends[line] = Some((sequence, prompt + size.generation));
    }

    /// Lines of ten calls, each of which ends in two.
    fn forks(&mut self, size: Size) {
        let mut open = std::collections::VecDeque::from([self.new_line(SYSTEM_TOKENS)]);
        while self.calls.len() < size.calls {
            let Some(line) = open.pop_front() else { return };
            for _ in 0..10.min(size.calls - self.calls.len()) {
                self.turn(line, 0, size);
            }
            let copy = self.lines.len();
            self.lines.push(self.lines[line].clone());
            self.ends.push(self.ends[line]);
            open.extend([line, copy]);
        }
    }
}

/// Percentiles of 600 real sessions (shared/cases/README.md): 10, 50, 90, 99, max.
const PERCENTILES: [f64; 5] = [0.10, 0.50, 0.90, 0.99, 1.0];
const CALLS: [f64; 5] = [14.0, 36.0, 131.0, 255.0, 322.0];
const AGENTS: [f64; 5] = [1.0, 1.0, 3.0, 8.0, 13.0];
const SENT: [f64; 5] = [90e3, 0.99e6, 8.2e6, 15.8e6, 19.3e6];
const ROW_TOKENS: [f64; 5] = [9e3, 44e3, 177e3, 412e3, 583e3];
const GENERATED: [f64; 5] = [2e3, 7.5e3, 36e3, 82e3, 103e3];

/// The value at a quantile: between two percentiles its logarithm is linear; below the first it is the first.
fn at_quantile(values: &[f64; 5], quantile: f64) -> f64 {
    let above = PERCENTILES.iter().position(|percentile| quantile <= *percentile).unwrap_or(4);
    let Some(below) = above.checked_sub(1) else { return values[0] };
    let share = (quantile - PERCENTILES[below]) / (PERCENTILES[above] - PERCENTILES[below]);
    (values[below].ln() * (1.0 - share) + values[above].ln() * share).exp()
}

/// One rollout of the population. One quantile decides all its sizes: long sessions are long in every way.
///
/// Its row tokens stand on a few lines, as many as there are agents, or as make the mean prompt what was sent for each call; the
/// lines of one agent are its contexts between compactions. A line opens with what brings the mean prompt up to that.
pub(crate) fn population_rollout(seed: u64) -> Rollout {
    let mut maker = Maker::new(seed.wrapping_mul(0x5851_F42D_4C95_7F2D) ^ 0x9E37);
    let quantile = (maker.random.next_u64() >> 11) as f64 / (1_u64 << 53) as f64;
    let [calls, agents, sent, row_tokens, generated] =
        [&CALLS, &AGENTS, &SENT, &ROW_TOKENS, &GENERATED].map(|values| at_quantile(values, quantile));
    let agents = agents.round().max(1.0) as usize;
    let contexts = (row_tokens * calls / (2.0 * sent)).round().max(1.0) as usize;
    let lines = contexts.max(agents);
    // Lines beyond the contexts are those of short-lived subagents.
    let weight = |line: usize| if line < contexts { 1.0 } else { 0.15 };
    let weights: f64 = (0..lines).map(weight).sum();
    let opening = (2.0 * (sent / calls) / (row_tokens / weights) - 1.0).clamp(0.05, 0.9);
    let plans: Vec<(usize, Size, usize)> = (0..lines)
        .map(|line| {
            let share = weight(line) / weights;
            let calls = (calls * share).round().max(1.0);
            let tokens = row_tokens * share;
            let generation = (generated * share / calls).round().max(1.0);
            let prompt = ((tokens * (1.0 - opening)) / calls - generation).max(1.0);
            let size = Size { calls: calls as usize, prompt: prompt as usize, generation: generation as usize };
            (line % agents, size, (tokens * opening) as usize)
        })
        .collect();
    let shared = plans.iter().map(|(_, _, opening)| *opening).min().unwrap_or(0).min(2 * SYSTEM_TOKENS);
    let mut queues: Vec<std::collections::VecDeque<(usize, Size)>> = vec![std::collections::VecDeque::new(); agents];
    for (agent, size, opening) in plans {
        let line = maker.new_line(shared);
        maker.grow(line, opening - shared);
        queues[agent].push_back((line, size));
    }
    while queues.iter().any(|queue| !queue.is_empty()) {
        for (agent, queue) in queues.iter_mut().enumerate() {
            let Some((line, size)) = queue.front_mut() else { continue };
            maker.turn(*line, agent, *size);
            size.calls -= 1;
            if size.calls == 0 {
                queue.pop_front();
            }
        }
    }
    maker.finish()
}

/// One conversation that opens with so many ids.
pub(crate) fn conversation(seed: u64, opening: usize, size: Size) -> Rollout {
    let mut maker = Maker::new(seed);
    let line = maker.new_line(opening);
    (0..size.calls).for_each(|_| maker.turn(line, 0, size));
    maker.finish()
}
