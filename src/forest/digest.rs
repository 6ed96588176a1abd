//! The chained digest of token ids: what names a prefix without sending it.
//!
//! `state` starts as 16 zero bytes; each whole block of 64 ids makes it XXH3-128(state ‖ block), ids as little-endian
//! u32, seed 0, written as canonical big-endian bytes. The digest is XXH3-128(state ‖ the ids that remain), always this
//! last step. Equal prefixes have equal digests; a digest alone is never taken as proof that two texts of our own are
//! equal (blocks are compared exactly).

use xxhash_rust::xxh3::xxh3_128;

/// Ids in one block.
pub const BLOCK_TOKENS: usize = 64;

/// One block of ids.
pub type Block = [u32; BLOCK_TOKENS];

/// The digest of a sequence of ids, or the chain's state after some whole blocks.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Digest(pub [u8; 16]);

impl std::fmt::Debug for Digest {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.iter().try_for_each(|byte| write!(formatter, "{byte:02x}"))
    }
}

impl Digest {
    /// The state after one more step of the chain.
    #[must_use]
    pub fn then(self, tokens: &[u32]) -> Self {
        let mut input = [0_u8; 16 + 4 * BLOCK_TOKENS];
        let bytes = bytemuck::cast_slice::<u32, u8>(tokens);
        let length = 16 + bytes.len();
        input[..16].copy_from_slice(&self.0);
        input[16..length].copy_from_slice(bytes);
        Self(xxh3_128(&input[..length]).to_be_bytes())
    }

    /// The digest of all these ids.
    #[must_use]
    pub fn of(tokens: &[u32]) -> Self {
        let (blocks, tail) = tokens.as_chunks::<BLOCK_TOKENS>();
        blocks.iter().fold(Self::default(), |state, block| state.then(block)).then(tail)
    }

    /// Eight of its bytes, for a hash table.
    pub(crate) fn table_hash(self) -> u64 {
        let [a, b, c, d, e, f, g, h, ..] = self.0;
        u64::from_le_bytes([a, b, c, d, e, f, g, h])
    }
}

#[cfg(target_endian = "big")]
compile_error!("ids are hashed and sent as little-endian bytes; a big-endian build would need to swap them");
