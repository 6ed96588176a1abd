//! Conversion between the messages of `hedgerow.v1` and the types within. Pure: nothing here waits, locks or looks at a clock.
//!
//! Wire types stop here. What comes from outside is checked while it is converted: every rule of RULES section 4, "Bad input",
//! that needs no run's settings and no rollout. A refusal names the field as a path in the request, the offending index where
//! there is one, and the call and agent as far as they are known. What this release does not have is refused as such, never
//! ignored.
//!
//! - [`fields`]: the checks of single fields, and times
//! - [`report`], [`call`]: events of harnesses
//! - [`answer`]: verdicts, totals, what a seal found, refusals
//! - [`settings`]: a run's settings and a consumer group's
//! - [`rows`], [`parts`]: rows, and the messages that a unit is sent in
//! - [`subscription`]: what a consumer asks for; [`trainer`]: what it is told
//! - [`inspect`]: one rollout as it is shown

pub mod answer;
pub mod call;
#[cfg(test)]
mod examples;
pub mod fields;
pub mod groups;
pub mod inspect;
pub mod parts;
pub mod report;
pub mod rows;
pub mod settings;
pub mod subscription;
pub mod trainer;
