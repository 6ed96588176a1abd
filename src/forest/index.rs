//! Which calls end where: the longest prefix of a prompt that is some call's prompt + generation.
//!
//! A call ends at a *point*: a block and a tail of fewer than 64 ids. All calls whose text is a prefix of a prompt end on
//! the path of the prompt's blocks, or in what follows the last of them. A block is *marked* when some call ends with it or
//! inside of it: at its last id, or at the block above with a tail that this block begins with. So the longest prefix is in
//! the prompt's tail, or else in the nearest marked block at or above its last one ([`Marks`]), and there by tail length.
//!
//! A new block is compared with the tails that stand at the block above; a new tail with the blocks below that are not
//! marked, each of which it marks once.
//!
//! Cost: logarithmic for a prompt and for an end, whatever the order in which they come, and however many ends there are on
//! the path; at most 63 tails are tried. Calls with equal text (twins) share a point, in two orders, so that none of them is
//! looked at in vain.

use hashbrown::{HashMap, HashTable};
use xxhash_rust::xxh3::xxh3_64_with_seed;

use super::call::{Call, CallIndex, CallTokens};
use super::marks::Marks;
use super::tokens::{BlockId, TokenStore, View};

/// Where calls end.
#[derive(Default)]
pub(crate) struct EndIndex {
    points: HashTable<Point>,
    /// For a block at which some call ends: a bit for each tail length in use.
    tail_lengths: HashMap<BlockId, u64>,
    marks: Marks,
    /// How many of the store's blocks were taken note of.
    known_blocks: usize,
    /// The blocks below a block that are not marked, but for the one with the next number, in the order of their ids.
    unmarked_below: HashMap<BlockId, Vec<BlockId>>,
    /// Tails tried and blocks marked.
    #[cfg(test)]
    steps: std::sync::atomic::AtomicUsize,
}

struct Point {
    block: BlockId,
    twins: Twins,
}

/// Calls with equal text.
pub(crate) enum Twins {
    One(CallIndex),
    Many(Box<ManyTwins>),
}

/// Two calls or more.
pub(crate) struct ManyTwins {
    /// In the order (agent, sequence, call id).
    pub(crate) by_agent: Vec<CallIndex>,
    /// In the order (sequence, call id).
    pub(crate) by_order: Vec<CallIndex>,
}

impl Twins {
    fn any(&self) -> Option<CallIndex> {
        match self {
            Self::One(call) => Some(*call),
            Self::Many(many) => many.by_agent.first().copied(),
        }
    }

    fn insert(&mut self, calls: &[Call], new: CallIndex) {
        let order = |call: CallIndex| calls[call.index()].order();
        let by_agent = |call: CallIndex| (calls[call.index()].agent(), order(call));
        if let Self::One(one) = *self {
            *self = Self::Many(Box::new(ManyTwins { by_agent: vec![one], by_order: vec![one] }));
        }
        if let Self::Many(many) = self {
            let place = many.by_agent.partition_point(|twin| by_agent(*twin) < by_agent(new));
            many.by_agent.insert(place, new);
            let place = many.by_order.partition_point(|twin| order(*twin) < order(new));
            many.by_order.insert(place, new);
        }
    }
}

impl EndIndex {
    /// Bytes that one more call takes at most, besides a place at its point.
    pub(crate) const CALL_BYTES: usize = Marks::FORK_BYTES + 2 * size_of::<(BlockId, Vec<BlockId>)>();

    /// Bytes that it takes besides each call's place at its point.
    pub(crate) fn resident_bytes(&self) -> usize {
        self.marks.resident_bytes() + self.unmarked_below.len() * 2 * size_of::<(BlockId, Vec<BlockId>)>()
    }

    /// Adds a call, which has its ids and generated some.
    pub(crate) fn insert(&mut self, store: &TokenStore, calls: &[Call], new: CallIndex) {
        self.take_note(store, calls);
        let CallTokens::Placed { block, tail } = &calls[new.index()].tokens else { return };
        *self.tail_lengths.entry(*block).or_insert(0) |= 1 << tail.len();
        let hash = hash_of(*block, tail);
        let same = |point: &Point| point.block == *block && tail_of(calls, point) == &**tail;
        match self.points.find_mut(hash, same) {
            Some(point) => point.twins.insert(calls, new),
            None => {
                let point = Point { block: *block, twins: Twins::One(new) };
                self.points.insert_unique(hash, point, |point| hash_of(point.block, tail_of(calls, point)));
                self.mark_ended(store, *block, tail);
            }
        }
    }

    /// Chooses among the calls with the longest text that is a prefix of `prompt`, if there are any.
    pub(crate) fn longest_prefix<R>(
        &mut self,
        store: &TokenStore,
        calls: &[Call],
        prompt: View<'_>,
        choose: impl FnOnce(&Twins) -> R,
    ) -> Option<R> {
        self.take_note(store, calls);
        if let Some(twins) = self.longest_at(calls, prompt.block, prompt.tail, 0) {
            return Some(choose(twins));
        }
        let marked = self.marks.nearest(prompt.block)?;
        let at_its_end = self.longest_at(calls, marked, &[], 0);
        let twins = at_its_end.or_else(|| self.longest_at(calls, store.parent(marked), store.ids(marked), 1));
        debug_assert!(twins.is_some(), "a block is marked when some call ends with it or inside of it");
        twins.map(choose)
    }

    /// The calls that end at this block with the longest tail, of at least so many ids, that `next` begins with.
    fn longest_at(&self, calls: &[Call], block: BlockId, next: &[u32], tail_ids_min: u32) -> Option<&Twins> {
        let mut lengths = self.tail_lengths.get(&block)? & (u64::MAX << tail_ids_min);
        if next.len() < 63 {
            lengths &= (1 << (next.len() + 1)) - 1;
        }
        while lengths != 0 {
            self.step();
            let length = 63 - lengths.leading_zeros() as usize;
            lengths &= !(1 << length);
            let tail = &next[..length];
            let same = |point: &Point| point.block == block && tail_of(calls, point) == tail;
            if let Some(point) = self.points.find(hash_of(block, tail), same) {
                return Some(&point.twins);
            }
        }
        None
    }

    /// Takes note of the blocks that the store has made since.
    fn take_note(&mut self, store: &TokenStore, calls: &[Call]) {
        for index in self.known_blocks..store.block_count() {
            let block = BlockId::at(index);
            self.marks.grow(store, block);
            if block == BlockId::ROOT {
                continue;
            }
            let parent = store.parent(block);
            // That a call ends at the very end of the block above says nothing of this one.
            if self.longest_at(calls, parent, store.ids(block), 1).is_some() {
                self.marks.mark(block);
            } else if parent.index() + 1 != index {
                let below = self.unmarked_below.entry(parent).or_default();
                let place = below.partition_point(|other| store.ids(*other) < store.ids(block));
                below.insert(place, block);
            }
        }
        self.known_blocks = store.block_count();
    }

    /// Marks the blocks that a new end is in.
    fn mark_ended(&mut self, store: &TokenStore, block: BlockId, tail: &[u32]) {
        if tail.is_empty() {
            self.marks.mark(block);
            return;
        }
        let next = BlockId::at(block.index() + 1);
        let is_below = next.index() < store.block_count() && store.parent(next) == block;
        if is_below && !self.marks.is_marked(next) && store.ids(next).starts_with(tail) {
            self.step();
            self.marks.mark(next);
        }
        let Some(below) = self.unmarked_below.get_mut(&block) else { return };
        let begins = |other: &BlockId| &store.ids(*other)[..tail.len()];
        let start = below.partition_point(|other| begins(other) < tail);
        let end = below.partition_point(|other| begins(other) <= tail);
        let ended: Vec<BlockId> = below.drain(start..end).collect();
        if below.is_empty() {
            self.unmarked_below.remove(&block);
        }
        for block in ended {
            self.step();
            self.marks.mark(block);
        }
    }

    #[cfg_attr(not(test), expect(clippy::unused_self, reason = "counts in tests only"))]
    fn step(&self) {
        #[cfg(test)]
        self.steps.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
    }

    /// Steps that questions and ends have cost.
    #[cfg(test)]
    pub(crate) fn steps(&self) -> usize {
        self.steps.load(std::sync::atomic::Ordering::Relaxed) + self.marks.steps()
    }
}

fn hash_of(block: BlockId, tail: &[u32]) -> u64 {
    xxh3_64_with_seed(bytemuck::cast_slice(tail), block.index() as u64)
}

fn tail_of<'a>(calls: &'a [Call], point: &Point) -> &'a [u32] {
    match point.twins.any().map(|call| &calls[call.index()].tokens) {
        Some(CallTokens::Placed { tail, .. }) => tail,
        Some(CallTokens::Waiting(_) | CallTokens::Unresolved(_)) | None => &[],
    }
}
