//! The tokens of one rollout, each prefix stored once.
//!
//! A trie of blocks of 64 ids. A block is interned under its parent: two sequences that share whole blocks share them
//! by id, whatever their order of arrival. What remains after the last whole block of a sequence is its owner's to hold
//! (a [`View`] joins the two). A block knows its parent, its depth, the digest chain's state after it, and one *jump*
//! to an ancestor (the skew-binary scheme of Myers, "An applicative random-access stack", 1983), so that the ancestor
//! at any depth and the lowest common ancestor take logarithmic time.
//!
//! Never does: forget a block, or trust a digest without comparing the ids.

use hashbrown::HashTable;

use super::digest::{BLOCK_TOKENS, Block, Digest};

/// A block of the store; [`BlockId::ROOT`] is the empty sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BlockId(u32);

impl BlockId {
    /// The empty sequence, above all blocks.
    pub const ROOT: Self = Self(0);

    /// Its place among the blocks, from 0 (the root).
    #[must_use]
    pub fn index(self) -> usize {
        self.0 as usize
    }

    /// The block at this place.
    pub(crate) fn at(index: usize) -> Self {
        Self(u32::try_from(index).unwrap_or(u32::MAX))
    }
}

/// A token sequence in the store: the path of whole blocks down to `block`, then `tail` (fewer than 64 ids).
#[derive(Clone, Copy, Debug)]
pub struct View<'a> {
    /// The last whole block.
    pub block: BlockId,
    /// The ids after it.
    pub tail: &'a [u32],
}

#[derive(Clone, Copy)]
struct Links {
    parent: BlockId,
    jump: BlockId,
    depth: u32,
    /// The child made last: where a sequence that comes down here most likely goes on.
    likely_child: BlockId,
    state: Digest,
}

/// All blocks of one rollout.
pub struct TokenStore {
    links: Chunked<Links>,
    /// The ids of block `i + 1`; the root has none.
    blocks: Chunked<Block>,
    children: HashTable<BlockId>,
}

impl Default for TokenStore {
    fn default() -> Self {
        let root = BlockId::ROOT;
        let mut links = Chunked::default();
        links.push(Links { parent: root, jump: root, depth: 0, likely_child: root, state: Digest::default() });
        Self { links, blocks: Chunked::default(), children: HashTable::new() }
    }
}

impl TokenStore {
    /// Follows `tokens` down from `from` as far as whole blocks are known; returns the last one, and how many ids that
    /// took.
    #[must_use]
    pub fn descend(&self, from: BlockId, tokens: &[u32]) -> (BlockId, usize) {
        let (blocks, _) = tokens.as_chunks::<BLOCK_TOKENS>();
        let mut at = from;
        for (passed, block) in blocks.iter().enumerate() {
            match self.known_child(at, block) {
                Some(child) => at = child,
                None => return (at, passed * BLOCK_TOKENS),
            }
        }
        (at, blocks.len() * BLOCK_TOKENS)
    }

    /// Stores the whole blocks of `tokens` under `from`; returns the last one. What remains is the caller's to keep.
    pub fn intern(&mut self, from: BlockId, tokens: &[u32]) -> BlockId {
        let (blocks, _) = tokens.as_chunks::<BLOCK_TOKENS>();
        blocks.iter().fold(from, |at, block| self.child(at, block))
    }

    /// The ancestor of `block` at this depth (in blocks), which is at most its own.
    #[must_use]
    pub fn ancestor(&self, block: BlockId, depth: usize) -> BlockId {
        let mut at = block;
        while self.depth(at) > depth {
            let links = self.links.get(at.index());
            at = if self.depth(links.jump) >= depth { links.jump } else { links.parent };
        }
        at
    }

    /// The deepest block above or at both.
    #[must_use]
    pub fn common_ancestor(&self, first: BlockId, second: BlockId) -> BlockId {
        let depth = self.depth(first).min(self.depth(second));
        let (mut first, mut second) = (self.ancestor(first, depth), self.ancestor(second, depth));
        while first != second {
            let (one, other) = (self.links.get(first.index()), self.links.get(second.index()));
            // Equal depths have jumps of equal depth, so both sides stay level.
            (first, second) = if one.jump == other.jump { (one.parent, other.parent) } else { (one.jump, other.jump) };
        }
        first
    }

    /// Whole blocks from the root to this one, itself included.
    #[must_use]
    pub fn depth(&self, block: BlockId) -> usize {
        self.links.get(block.index()).depth as usize
    }

    /// The block above.
    #[must_use]
    pub fn parent(&self, block: BlockId) -> BlockId {
        self.links.get(block.index()).parent
    }

    /// Whether any block stands below this one.
    #[must_use]
    pub fn has_children(&self, block: BlockId) -> bool {
        self.links.get(block.index()).likely_child != BlockId::ROOT
    }

    /// Blocks stored, the root included.
    #[must_use]
    pub fn block_count(&self) -> usize {
        self.links.len()
    }

    /// Bytes that a block takes, its ids and its share of the tables.
    pub(crate) const BLOCK_BYTES: usize = size_of::<Block>() + size_of::<Links>() + 3 * size_of::<u64>();

    /// How many ids a view holds.
    #[must_use]
    pub fn length(&self, view: View<'_>) -> usize {
        self.depth(view.block) * BLOCK_TOKENS + view.tail.len()
    }

    /// The first `length` ids of a view, which has at least as many.
    #[must_use]
    pub fn prefix<'a>(&'a self, view: View<'a>, length: usize) -> View<'a> {
        let (depth, rest) = (length / BLOCK_TOKENS, length % BLOCK_TOKENS);
        let next = self.next(view, depth);
        View { block: self.ancestor(view.block, depth), tail: next.get(..rest).unwrap_or(next) }
    }

    /// The ids of a view that follow its first `depth` blocks, up to the end of the next block or of the view.
    #[must_use]
    pub fn next<'a>(&'a self, view: View<'a>, depth: usize) -> &'a [u32] {
        if depth >= self.depth(view.block) { view.tail } else { self.ids(self.ancestor(view.block, depth + 1)) }
    }

    /// The length of the longest common prefix of two views.
    #[must_use]
    pub fn common_length(&self, first: View<'_>, second: View<'_>) -> usize {
        let depth = self.depth(self.common_ancestor(first.block, second.block));
        let (one, other) = (self.next(first, depth), self.next(second, depth));
        depth * BLOCK_TOKENS + one.iter().zip(other).take_while(|(a, b)| a == b).count()
    }

    /// Whether all of `first` is a prefix of `second`.
    #[must_use]
    pub fn is_prefix(&self, first: View<'_>, second: View<'_>) -> bool {
        let depth = self.depth(first.block);
        depth <= self.depth(second.block)
            && self.ancestor(second.block, depth) == first.block
            && self.next(second, depth).starts_with(first.tail)
    }

    /// The digest of a view's ids.
    #[must_use]
    pub fn digest(&self, view: View<'_>) -> Digest {
        self.links.get(view.block.index()).state.then(view.tail)
    }

    /// The digest chain's state after a block.
    #[must_use]
    pub fn state(&self, block: BlockId) -> Digest {
        self.links.get(block.index()).state
    }

    /// At most `count` ids of a view from position `from` on.
    #[must_use]
    pub fn ids_from(&self, view: View<'_>, from: usize, count: usize) -> Vec<u32> {
        let mut found = Vec::with_capacity(count);
        let (mut depth, mut skip) = (from / BLOCK_TOKENS, from % BLOCK_TOKENS);
        while found.len() < count && depth <= self.depth(view.block) {
            found.extend(self.next(view, depth).iter().skip(skip).take(count - found.len()));
            (depth, skip) = (depth + 1, 0);
        }
        found
    }

    /// All ids of a view.
    #[must_use]
    pub fn to_vec(&self, view: View<'_>) -> Vec<u32> {
        let mut ids = vec![0; self.depth(view.block) * BLOCK_TOKENS];
        let mut at = view.block;
        for place in ids.rchunks_exact_mut(BLOCK_TOKENS) {
            place.copy_from_slice(self.ids(at));
            at = self.parent(at);
        }
        ids.extend_from_slice(view.tail);
        ids
    }

    fn ids(&self, block: BlockId) -> &[u32] {
        match block.index().checked_sub(1) {
            Some(index) => self.blocks.get(index),
            None => &[],
        }
    }

    fn known_child(&self, parent: BlockId, block: &Block) -> Option<BlockId> {
        let links = self.links.get(parent.index());
        let likely = links.likely_child;
        if likely != BlockId::ROOT && self.ids(likely) == block {
            return Some(likely);
        }
        // The root's likely child is some child; a block without children has none to look for.
        if likely == BlockId::ROOT { None } else { self.find_child(parent, block, links.state.then(block)) }
    }

    fn find_child(&self, parent: BlockId, block: &Block, state: Digest) -> Option<BlockId> {
        let is_it = |id: &BlockId| self.parent(*id) == parent && self.ids(*id) == block;
        self.children.find(state.table_hash(), is_it).copied()
    }

    fn child(&mut self, parent: BlockId, block: &Block) -> BlockId {
        if let Some(known) = self.known_child(parent, block) {
            return known;
        }
        let above = *self.links.get(parent.index());
        let state = above.state.then(block);
        let over = self.links.get(above.jump.index());
        let even = above.depth - over.depth == over.depth - self.links.get(over.jump.index()).depth;
        let jump = if even { over.jump } else { parent };
        let id = BlockId::at(self.links.len());
        assert!(id.0 != u32::MAX, "a rollout's limits of calls and tokens keep its blocks below 2^32");
        self.links.push(Links { parent, jump, depth: above.depth + 1, likely_child: BlockId::ROOT, state });
        self.blocks.push(*block);
        self.links.get_mut(parent.index()).likely_child = id;
        let links = &self.links;
        self.children.insert_unique(state.table_hash(), id, |id| links.get(id.index()).state.table_hash());
        id
    }
}

/// A vector that grows by fixed chunks, so that a large rollout never holds twice what it needs. The first chunk grows
/// by doubling, so that a small rollout stays small.
struct Chunked<T> {
    chunks: Vec<Vec<T>>,
}

/// 16 blocks take 4 KiB, of which sixteen fill one of the allocator's pages of 64 KiB. Larger powers of two leave up to a quarter of
/// a page unused (of 8 KiB it takes six): that was a fifth of a rollout's resident memory.
const CHUNK_ITEMS: usize = 16;

impl<T> Default for Chunked<T> {
    fn default() -> Self {
        Self { chunks: Vec::new() }
    }
}

impl<T> Chunked<T> {
    fn len(&self) -> usize {
        self.chunks.last().map_or(0, |last| (self.chunks.len() - 1) * CHUNK_ITEMS + last.len())
    }

    fn push(&mut self, item: T) {
        match self.chunks.last_mut() {
            Some(last) if last.len() < CHUNK_ITEMS => last.push(item),
            Some(_) => {
                let mut chunk = Vec::with_capacity(CHUNK_ITEMS);
                chunk.push(item);
                self.chunks.push(chunk);
            }
            None => self.chunks.push(vec![item]),
        }
    }

    fn get(&self, index: usize) -> &T {
        &self.chunks[index / CHUNK_ITEMS][index % CHUNK_ITEMS]
    }

    fn get_mut(&mut self, index: usize) -> &mut T {
        &mut self.chunks[index / CHUNK_ITEMS][index % CHUNK_ITEMS]
    }
}

#[cfg(test)]
#[path = "tokens_tests.rs"]
mod tests;
