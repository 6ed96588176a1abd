//! The codec, tested: records come back as they were, bytes of older versions are read, and no bytes make it panic.

mod damage;
mod fields;
mod frozen;
mod round_trip;
mod samples;
mod speed;
mod strategies;

use crate::forest::CallRecord;
use crate::log::Record;
use crate::rollout::event::RolloutRecord;

/// The record without its floating point numbers, and their bits: what `==` is for records whose numbers may be NaN.
fn in_bits(record: &Record) -> (Record, Vec<u64>) {
    let (mut record, mut bits) = (record.clone(), Vec::new());
    if let Record::Rollout { record, .. } | Record::RolloutCopied { record, .. } = &mut record {
        match record {
            RolloutRecord::Call(call) | RolloutRecord::ParentAgent { prompt: Some(call), .. } => {
                if let CallRecord::New(new) = call {
                    for value in new.0.logprobs.iter_mut().flatten() {
                        bits.push(u64::from(std::mem::take(value).to_bits()));
                    }
                }
            }
            RolloutRecord::Finish(_, Some(reward)) => {
                for value in std::iter::once(&mut reward.value).chain(reward.components.values_mut()) {
                    bits.push(std::mem::take(value).to_bits());
                }
            }
            RolloutRecord::Open(_)
            | RolloutRecord::Group(_)
            | RolloutRecord::ParentAgent { prompt: None, .. }
            | RolloutRecord::AgentStart(_)
            | RolloutRecord::AgentEnd(_)
            | RolloutRecord::Finish(_, None)
            | RolloutRecord::Discard { .. }
            | RolloutRecord::Conflict(_)
            | RolloutRecord::Decision(_) => {}
        }
    }
    (record, bits)
}
