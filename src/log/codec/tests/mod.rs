//! The codec, tested: records come back as they were, bytes of older versions are read, and no bytes make it panic.

mod damage;
mod fields;
mod frozen;
mod groups;
mod round_trip;
mod samples;
mod speed;
mod steps;
mod strategies;

use crate::forest::CallRecord;
use crate::log::Record;
use crate::rollout::credits::Credit;
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
            RolloutRecord::Finish(_, reward, credits) => {
                let of_reward = reward.iter_mut();
                let of_reward = of_reward
                    .flat_map(|reward| std::iter::once(&mut reward.value).chain(reward.components.values_mut()));
                for value in of_reward.chain(credits.iter_mut().flat_map(numbers_of)) {
                    bits.push(std::mem::take(value).to_bits());
                }
            }
            RolloutRecord::Credit(credit) => {
                bits.extend(numbers_of(credit).map(|value| std::mem::take(value).to_bits()));
            }
            RolloutRecord::Open(_)
            | RolloutRecord::Group(_)
            | RolloutRecord::ParentAgent { prompt: None, .. }
            | RolloutRecord::AgentStart(_)
            | RolloutRecord::AgentEnd(_)
            | RolloutRecord::Discard { .. }
            | RolloutRecord::Conflict(_)
            | RolloutRecord::Decision(_) => {}
        }
    }
    if let Record::GroupReleased { decided, .. } = &mut record {
        bits.extend(decided.counted.iter_mut().map(|counted| std::mem::take(&mut counted.reward).to_bits()));
    }
    (record, bits)
}

fn numbers_of(credit: &mut Credit) -> impl Iterator<Item = &mut f64> {
    credit.values.reward.iter_mut().chain(&mut credit.values.advantage_scale)
}
