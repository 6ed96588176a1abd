//! In what two states of the service differ.

use std::collections::BTreeMap;
use std::fmt::Debug;

use hedgerow::store::image::Image;

/// The first thing that differs.
pub(crate) fn images(before: &Image, after: &Image) -> Result<(), String> {
    maps("rollout", &before.rollouts, &after.rollouts)?;
    maps("group", &before.groups, &after.groups)?;
    maps("unit", &before.units, &after.units)
}

fn maps<K: Ord + Debug, V: PartialEq + Debug>(
    what: &str,
    before: &BTreeMap<K, V>,
    after: &BTreeMap<K, V>,
) -> Result<(), String> {
    let keys = before.keys().chain(after.keys());
    let differs = |key: &&K| before.get(key) != after.get(key);
    match keys.filter(differs).min() {
        Some(key) => Err(format!("{what} {key:?} was {:?}, and is {:?}", before.get(key), after.get(key))),
        None => Ok(()),
    }
}
