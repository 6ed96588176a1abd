//! Single fields of messages, read back: each is checked, and an error names it.

use std::collections::BTreeMap;

use crate::ids::IdentifierError;

use super::Fault;

/// What an identifier's type makes of a text.
type Parse<T> = fn(&str) -> Result<T, IdentifierError>;

/// The identifier that stands in this field.
pub(super) fn identifier<T>(field: &'static str, text: &str, parse: Parse<T>) -> Result<T, Fault> {
    parse(text).map_err(|why| Fault::Identifier { field, why })
}

/// The same, if one stands there.
pub(super) fn optional_identifier<T>(
    field: &'static str,
    text: Option<&str>,
    parse: Parse<T>,
) -> Result<Option<T>, Fault> {
    text.map(|text| identifier(field, text, parse)).transpose()
}

/// The same of a list.
pub(super) fn identifiers<T>(field: &'static str, texts: &[String], parse: Parse<T>) -> Result<Vec<T>, Fault> {
    texts.iter().map(|text| identifier(field, text, parse)).collect()
}

/// The texts of identifiers.
pub(super) fn texts<T: ToString>(identifiers: &[T]) -> Vec<String> {
    identifiers.iter().map(T::to_string).collect()
}

/// What must stand in a message.
pub(super) fn present<T>(field: &'static str, value: Option<T>) -> Result<T, Fault> {
    value.ok_or(Fault::Missing(field))
}

/// The map of these entries, each key once.
pub(super) fn map<K: Ord, V>(
    field: &'static str,
    entries: impl Iterator<Item = Result<(K, V), Fault>>,
) -> Result<BTreeMap<K, V>, Fault> {
    let mut map = BTreeMap::new();
    for entry in entries {
        let (key, value) = entry?;
        if map.insert(key, value).is_some() {
            return Err(Fault::Repeated(field));
        }
    }
    Ok(map)
}
