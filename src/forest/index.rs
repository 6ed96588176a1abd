//! Which calls end where: the longest prefix of a prompt that is some call's prompt + generation.
//!
//! A call ends at a *point*: a block and a tail of fewer than 64 ids. All calls whose text is a prefix of a prompt end on
//! the path of the prompt's blocks. To find the longest, go up that path from block to block at which some call ends,
//! and at each try the tail lengths in use there, longest first. A memo for each block holds the nearest such block at or
//! above it; it is good as long as no point was added at a block that had others below it (`epoch`), which happens only
//! where calls arrive out of order or fork inside a block.
//!
//! Cost: constant for a prompt that goes on from a call's end; at worst one step for each block of the path. Calls with
//! equal text (twins) share a point, in two orders, so that none of them is looked at in vain.

use hashbrown::{HashMap, HashTable};
use xxhash_rust::xxh3::xxh3_64_with_seed;

use super::call::{Call, CallIndex, CallTokens};
use super::tokens::{BlockId, TokenStore, View};

/// Where calls end.
#[derive(Default)]
pub(crate) struct EndIndex {
    points: HashTable<Point>,
    /// For a block at which some call ends: a bit for each tail length in use.
    tail_lengths: HashMap<BlockId, u64>,
    memo: Vec<Memo>,
    epoch: u32,
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

/// One for each block, so its eight bytes count.
#[derive(Clone, Copy)]
struct Memo {
    /// Good while it equals the index's epoch plus one; 0 means never computed.
    valid_in: u32,
    /// A block that there never is says that there is none.
    nearest: BlockId,
}

impl Memo {
    fn new(valid_in: u32, nearest: Option<BlockId>) -> Self {
        Self { valid_in, nearest: nearest.unwrap_or(BlockId::at(usize::MAX)) }
    }

    fn nearest(self) -> Option<BlockId> {
        Some(self.nearest).filter(|block| *block != BlockId::at(usize::MAX))
    }
}

impl EndIndex {
    /// Adds a call, which has its ids and generated some.
    pub(crate) fn insert(&mut self, store: &TokenStore, calls: &[Call], new: CallIndex) {
        let CallTokens::Placed { block, tail } = &calls[new.index()].tokens else { return };
        let lengths = self.tail_lengths.entry(*block).or_insert(0);
        if *lengths == 0 && store.has_children(*block) {
            self.epoch += 1;
        }
        *lengths |= 1 << tail.len();
        let hash = hash_of(*block, tail);
        let same = |point: &Point| point.block == *block && tail_of(calls, point) == &**tail;
        match self.points.find_mut(hash, same) {
            Some(point) => point.twins.insert(calls, new),
            None => {
                let point = Point { block: *block, twins: Twins::One(new) };
                self.points.insert_unique(hash, point, |point| hash_of(point.block, tail_of(calls, point)));
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
        let mut from = prompt.block;
        while let Some(block) = self.nearest(store, from) {
            let next = store.next(prompt, store.depth(block));
            let mut lengths = self.tail_lengths.get(&block).copied().unwrap_or(0);
            if next.len() < 63 {
                lengths &= (1 << (next.len() + 1)) - 1;
            }
            while lengths != 0 {
                let length = 63 - lengths.leading_zeros() as usize;
                lengths &= !(1 << length);
                let tail = &next[..length];
                let same = |point: &Point| point.block == block && tail_of(calls, point) == tail;
                if let Some(point) = self.points.find(hash_of(block, tail), same) {
                    return Some(choose(&point.twins));
                }
            }
            if block == BlockId::ROOT {
                return None;
            }
            from = store.parent(block);
        }
        None
    }

    /// The nearest block at or above at which some call ends.
    fn nearest(&mut self, store: &TokenStore, from: BlockId) -> Option<BlockId> {
        if self.memo.len() < store.block_count() {
            self.memo.reserve_exact(store.block_count() - self.memo.len() + store.block_count() / 8);
            self.memo.resize(store.block_count(), Memo::new(0, None));
        }
        let valid = self.epoch + 1;
        let mut at = from;
        let found = loop {
            if self.tail_lengths.contains_key(&at) {
                break Some(at);
            }
            let memo = self.memo[at.index()];
            if memo.valid_in == valid {
                break memo.nearest();
            }
            if at == BlockId::ROOT {
                break None;
            }
            at = store.parent(at);
        };
        let top = at;
        at = from;
        while at != top {
            self.memo[at.index()] = Memo::new(valid, found);
            at = store.parent(at);
        }
        if found.is_none() {
            self.memo[top.index()] = Memo::new(valid, None);
        }
        found
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
