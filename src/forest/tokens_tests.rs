//! The store against plain vectors: random sequences over few ids, so that prefixes collide.

use proptest::prelude::*;

use super::*;

/// Sequences that share prefixes of many lengths: each continues a prefix of an earlier one.
fn sequences() -> impl Strategy<Value = Vec<Vec<u32>>> {
    prop::collection::vec((any::<prop::sample::Index>(), any::<prop::sample::Index>(), 0..400_usize, 0..3_u32), 1..12)
        .prop_map(|steps| {
            let mut all: Vec<Vec<u32>> = vec![Vec::new()];
            for (which, cut, more, seed) in steps {
                let base = which.get(&all).clone();
                let mut next = base[..cut.index(base.len() + 1)].to_vec();
                next.extend((0..more).map(|step| u32::try_from(step / 50).unwrap_or(0) + seed));
                all.push(next);
            }
            all
        })
}

fn store_all(all: &[Vec<u32>]) -> (TokenStore, Vec<BlockId>) {
    let mut store = TokenStore::default();
    let blocks = all.iter().map(|ids| store.intern(BlockId::ROOT, ids)).collect();
    (store, blocks)
}

fn view<'a>(ids: &'a [u32], block: BlockId) -> View<'a> {
    View { block, tail: ids.as_chunks::<BLOCK_TOKENS>().1 }
}

proptest! {
    #[test]
    fn views_are_the_sequences(all in sequences()) {
        let (store, blocks) = store_all(&all);
        for (ids, block) in all.iter().zip(&blocks) {
            let whole = view(ids, *block);
            prop_assert_eq!(&store.to_vec(whole), ids);
            prop_assert_eq!(store.length(whole), ids.len());
            prop_assert_eq!(store.digest(whole), Digest::of(ids));
            prop_assert_eq!(store.descend(BlockId::ROOT, ids), (*block, ids.len() / BLOCK_TOKENS * BLOCK_TOKENS));
            for length in [0, ids.len() / 3, ids.len() / 2, ids.len().saturating_sub(1), ids.len()] {
                prop_assert_eq!(store.to_vec(store.prefix(whole, length)), &ids[..length]);
                prop_assert_eq!(store.ids_from(whole, length, 70), ids[length..].iter().copied().take(70).collect::<Vec<_>>());
            }
        }
    }

    #[test]
    fn common_lengths_are_exact(all in sequences()) {
        let (store, blocks) = store_all(&all);
        for (one, first) in all.iter().zip(&blocks) {
            for (other, second) in all.iter().zip(&blocks) {
                let (left, right) = (view(one, *first), view(other, *second));
                let common = one.iter().zip(other).take_while(|(a, b)| a == b).count();
                prop_assert_eq!(store.common_length(left, right), common);
                prop_assert_eq!(store.is_prefix(left, right), other.starts_with(one));
            }
        }
    }
}

#[test]
fn equal_prefixes_are_stored_once() {
    let ids: Vec<u32> = (0..6400).collect();
    let mut store = TokenStore::default();
    let first = store.intern(BlockId::ROOT, &ids);
    assert_eq!(store.block_count(), 101);
    assert_eq!(store.intern(BlockId::ROOT, &ids), first);
    assert_eq!(store.block_count(), 101);
    let mut fork = ids[..640].to_vec();
    fork.extend([9; 64]);
    store.intern(BlockId::ROOT, &fork);
    assert_eq!(store.block_count(), 102);
}
