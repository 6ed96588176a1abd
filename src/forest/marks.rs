//! Marked blocks of a store, and which of them is the nearest at or above a block.
//!
//! Blocks that were made one below the other, with nothing that forks off between them, are a *stretch*: their ids are
//! consecutive, so inside one the nearest mark is the next lower number. A block that forks off splits the stretch that it
//! hangs from. Above a stretch, [`Paths`] says which is the nearest with a mark. Only marks are ever added, and blocks at the leaves.
//!
//! Cost: logarithmic for each new fork, mark and question, amortised; constant for a new block that forks off nothing.

use std::collections::{BTreeMap, BTreeSet};

use super::paths::{NodeIndex, Paths};
use super::tokens::{BlockId, TokenStore};

/// Which blocks are marked.
#[derive(Default)]
pub(super) struct Marks {
    marked: BTreeSet<BlockId>,
    /// Each stretch by its first block.
    stretches: BTreeMap<BlockId, NodeIndex>,
    /// The last block of each stretch.
    lasts: Vec<BlockId>,
    paths: Paths,
}

impl Marks {
    /// Bytes for each stretch: itself, and its places in the lists, one of which is of blocks below another.
    const STRETCH_BYTES: usize = Paths::NODE_BYTES + 4 * size_of::<BlockId>() + 2 * size_of::<(BlockId, NodeIndex)>();

    /// The most stretches that one sequence of new blocks makes: what it forks off is split, and it is one itself.
    const STRETCHES_OF_FORK: usize = 2;

    /// Bytes that one more sequence of blocks takes at most.
    pub(super) const FORK_BYTES: usize = Self::STRETCHES_OF_FORK * Self::STRETCH_BYTES;

    /// Bytes that it takes besides a few for each marked block.
    pub(super) fn resident_bytes(&self) -> usize {
        self.paths.len() * Self::STRETCH_BYTES
    }

    /// Takes note of the next block, in the order in which the store made them; the root is the first.
    pub(super) fn grow(&mut self, store: &TokenStore, block: BlockId) {
        let newest = self.stretches.last_key_value().map(|(_, stretch)| *stretch);
        let Some(newest) = newest else {
            self.add(block, None);
            return;
        };
        let parent = store.parent(block);
        if self.lasts[newest.index()] == parent {
            self.lasts[newest.index()] = block;
        } else {
            let above = self.split_below(parent);
            self.add(block, Some(above));
        }
    }

    /// Marks a block that was taken note of.
    pub(super) fn mark(&mut self, block: BlockId) {
        if self.marked.insert(block)
            && let Some((_, stretch)) = self.stretch_of(block)
        {
            self.paths.set_marked(stretch, true);
        }
    }

    pub(super) fn is_marked(&self, block: BlockId) -> bool {
        self.marked.contains(&block)
    }

    /// The nearest marked block at or above this one.
    pub(super) fn nearest(&mut self, block: BlockId) -> Option<BlockId> {
        let (first, stretch) = self.stretch_of(block)?;
        let inside = self.marked.range(first..=block).next_back().copied();
        inside.or_else(|| {
            let above = self.paths.nearest_above(stretch)?;
            self.marked.range(..=self.lasts[above.index()]).next_back().copied()
        })
    }

    /// The stretch that ends with this block, which is made if the block is inside of one.
    fn split_below(&mut self, block: BlockId) -> NodeIndex {
        let Some((first, stretch)) = self.stretch_of(block) else { return self.add(block, None) };
        let last = self.lasts[stretch.index()];
        if last == block {
            return stretch;
        }
        // What hangs from the lower part goes on hanging from it; so it keeps its place, and the upper part is new.
        let next = BlockId::at(block.index() + 1);
        let upper = self.paths.add_above(stretch);
        self.stretches.insert(first, upper);
        self.stretches.insert(next, stretch);
        self.lasts.push(block);
        self.paths.set_marked(upper, self.marked.range(first..=block).next().is_some());
        self.paths.set_marked(stretch, self.marked.range(next..=last).next().is_some());
        upper
    }

    fn add(&mut self, block: BlockId, above: Option<NodeIndex>) -> NodeIndex {
        let new = self.paths.add_below(above);
        self.stretches.insert(block, new);
        self.lasts.push(block);
        new
    }

    fn stretch_of(&self, block: BlockId) -> Option<(BlockId, NodeIndex)> {
        self.stretches.range(..=block).next_back().map(|(first, stretch)| (*first, *stretch))
    }

    #[cfg(test)]
    pub(super) fn steps(&self) -> usize {
        self.paths.steps
    }
}
