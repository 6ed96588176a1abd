//! Which calls end where: the longest prefix of a prompt that is some call's prompt + generation.
//!
//! A call ends at a *point*: a block and a tail of fewer than 64 ids. All calls whose text is a prefix of a prompt end on
//! the path of the prompt's blocks. To find the longest, go up that path from block to block at which some call ends,
//! and at each try the tail lengths in use there, longest first. A memo for each block holds the nearest such block at or
//! above it; it is good as long as no point was added at a block that had others below it (`epoch`), which happens only
//! where calls arrive out of order or fork inside a block.
//!
//! Cost: constant for a prompt that goes on from a call's end; at worst one step for each block of the path. Calls with
//! equal text (twins) share a point and are kept in the order (agent, sequence, call id).

use std::ops::ControlFlow;

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
    /// Calls with equal text, sorted by (agent, sequence, call id); never empty.
    twins: Twins,
}

enum Twins {
    One(CallIndex),
    Many(Vec<CallIndex>),
}

impl Twins {
    fn as_slice(&self) -> &[CallIndex] {
        match self {
            Self::One(call) => std::slice::from_ref(call),
            Self::Many(calls) => calls,
        }
    }
}

#[derive(Clone, Copy, Default)]
struct Memo {
    /// Good while it equals the index's epoch plus one; 0 means never computed.
    valid_in: u32,
    nearest: Option<BlockId>,
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
        let key = |call: CallIndex| (calls[call.index()].agent(), calls[call.index()].order());
        let hash = hash_of(*block, tail);
        let same = |point: &Point| point.block == *block && tail_of(calls, point) == &**tail;
        match self.points.find_mut(hash, same) {
            Some(point) => {
                let mut twins = match &mut point.twins {
                    Twins::One(one) => vec![*one],
                    Twins::Many(many) => std::mem::take(many),
                };
                let place = twins.partition_point(|twin| key(*twin) < key(new));
                twins.insert(place, new);
                point.twins = Twins::Many(twins);
            }
            None => {
                let point = Point { block: *block, twins: Twins::One(new) };
                self.points.insert_unique(hash, point, |point| hash_of(point.block, tail_of(calls, point)));
            }
        }
    }

    /// Visits the points whose text is a prefix of `prompt`, longest first, until the visitor breaks.
    pub(crate) fn visit_prefixes<R>(
        &mut self,
        store: &TokenStore,
        calls: &[Call],
        prompt: View<'_>,
        mut visit: impl FnMut(&[CallIndex]) -> ControlFlow<R>,
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
                if let Some(point) = self.points.find(hash_of(block, tail), same)
                    && let ControlFlow::Break(found) = visit(point.twins.as_slice())
                {
                    return Some(found);
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
            self.memo.resize(store.block_count(), Memo::default());
        }
        let valid = self.epoch + 1;
        let mut at = from;
        let found = loop {
            if self.tail_lengths.contains_key(&at) {
                break Some(at);
            }
            let memo = self.memo[at.index()];
            if memo.valid_in == valid {
                break memo.nearest;
            }
            if at == BlockId::ROOT {
                break None;
            }
            at = store.parent(at);
        };
        let top = at;
        at = from;
        while at != top {
            self.memo[at.index()] = Memo { valid_in: valid, nearest: found };
            at = store.parent(at);
        }
        if found.is_none() {
            self.memo[top.index()] = Memo { valid_in: valid, nearest: None };
        }
        found
    }
}

fn hash_of(block: BlockId, tail: &[u32]) -> u64 {
    xxh3_64_with_seed(bytemuck::cast_slice(tail), block.index() as u64)
}

fn tail_of<'a>(calls: &'a [Call], point: &Point) -> &'a [u32] {
    match point.twins.as_slice().first().map(|call| &calls[call.index()].tokens) {
        Some(CallTokens::Placed { tail, .. }) => tail,
        Some(CallTokens::Waiting(_) | CallTokens::Unresolved(_)) | None => &[],
    }
}
