//! Pages of lists: how large one is, where it begins, and when it ends.
//!
//! A page token names the last entry that was shown, so that the next page begins behind it whatever happened meanwhile. It
//! names the list, too: a token of another list, or of another run's, is refused.

use prost::Message;

use crate::error::Refusal;
use crate::ids::{IdentifierError, percent_decoded, percent_encoded};
use crate::limits;

use super::super::fields::invalid;

/// A page that is being filled.
#[derive(Debug)]
pub struct Page<T> {
    /// What it holds.
    pub entries: Vec<T>,
    entries_max: usize,
    bytes: usize,
}

impl<T: Message> Page<T> {
    /// An empty one; 0 asks for the default, and more than there may be for as many as there may be.
    #[must_use]
    pub fn new(page_size: u32) -> Self {
        let asked = usize::try_from(page_size).unwrap_or(usize::MAX);
        let entries_max = if asked == 0 { limits::PAGE_ENTRIES_DEFAULT } else { asked.min(limits::PAGE_ENTRIES_MAX) };
        Self { entries: Vec::new(), entries_max, bytes: 0 }
    }

    /// How many entries it has room for.
    #[must_use]
    pub fn room(&self) -> usize {
        if self.bytes >= limits::PAGE_BYTES_MAX { 0 } else { self.entries_max - self.entries.len() }
    }

    /// Adds an entry.
    pub fn push(&mut self, entry: T) {
        self.bytes += entry.encoded_len();
        self.entries.push(entry);
    }
}

/// The token of the page that begins behind this entry of a list.
#[must_use]
pub fn token(list: &[&str], last: &str) -> String {
    let parts: Vec<String> = list.iter().chain(&[last]).map(|part| percent_encoded(part)).collect();
    parts.join("/")
}

/// Behind which entry of a list the page of this token begins; none for an empty token.
///
/// # Errors
/// If it is no token of this list.
pub fn after<T>(
    list: &[&str],
    page_token: &str,
    parse: impl Fn(&str) -> Result<T, IdentifierError>,
) -> Result<Option<T>, Refusal> {
    if page_token.is_empty() {
        return Ok(None);
    }
    let refused = || invalid("page_token", "is no token of this list; leave it out to begin at the start");
    let parts: Option<Vec<String>> = page_token.split('/').map(percent_decoded).collect();
    match parts.as_deref() {
        Some([of @ .., last]) if of == list => parse(last).map(Some).map_err(|_| refused()),
        Some(_) | None => Err(refused()),
    }
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

    use super::*;
    use crate::error::Reason;
    use crate::ids::RunId;
    use crate::proto::v1;

    #[test]
    fn a_token_begins_behind_an_entry_of_its_own_list() {
        let list = ["rollouts", "run/1"];
        let of_list = token(&list, "a/é");
        assert_eq!(after(&list, &of_list, RunId::parse), Ok(RunId::parse("a/é").ok()));
        assert_eq!(after(&list, "", RunId::parse), Ok(None));
        let wrong = ["x", "rollouts/run%2F1", "rollouts/run%2F1/", "rollouts/run%2F1/%", "rollouts/run%2F1/a/b"];
        for token in wrong.into_iter().chain([token(&["rollouts", "run/2"], "a").as_str()]) {
            let refusal = after(&list, token, RunId::parse).unwrap_err();
            assert_eq!((refusal.reason, refusal.field.as_deref()), (Reason::InvalidValue, Some("page_token")));
        }
    }

    #[test]
    fn a_page_ends_after_entries_or_bytes() {
        let room = |size| Page::<v1::RunSummary>::new(size).room();
        assert_eq!([room(0), room(7), room(1000), room(u32::MAX)], [100, 7, 1000, 1000]);
        let mut page = Page::new(3);
        let large = v1::RunSummary { run_id: "x".repeat(limits::PAGE_BYTES_MAX), ..v1::RunSummary::default() };
        page.push(v1::RunSummary::default());
        assert_eq!(page.room(), 2);
        page.push(large);
        assert_eq!((page.room(), page.entries.len()), (0, 2));
    }
}
