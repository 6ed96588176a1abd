//! The record of what a run has counted so far.

use prost::Message;

use crate::ids::{ConsumerGroupId, Name, RunId};
use crate::log::Record;
use crate::log::totals::{CallTotals, ConsumerGroupTotals, GoneTotals, PolicyTotals, RunTotals};
use crate::queue::{DropReason, SettledSum};

use super::Fault;
use super::codes::{Coded, coded};
use super::fields::{identifier, present};

#[derive(Message)]
pub(super) struct RunTotalsMessage {
    #[prost(string, tag = "1")]
    run: String,
    #[prost(message, optional, tag = "2")]
    calls: Option<CallTotalsMessage>,
    #[prost(message, repeated, tag = "3")]
    gone: Vec<GoneTotalsMessage>,
    #[prost(uint64, tag = "4")]
    retired_rollouts: u64,
    #[prost(message, repeated, tag = "5")]
    consumer_groups: Vec<ConsumerGroupTotalsMessage>,
}

#[derive(Message)]
struct CallTotalsMessage {
    #[prost(uint64, tag = "1")]
    empty: u64,
    #[prost(uint64, tag = "2")]
    not_kept: u64,
    #[prost(uint64, tag = "3")]
    kept: u64,
    #[prost(message, repeated, tag = "4")]
    policies: Vec<PolicyTotalsMessage>,
}

#[derive(Message)]
struct PolicyTotalsMessage {
    #[prost(string, tag = "1")]
    policy: String,
    #[prost(uint64, tag = "2")]
    trained: u64,
    #[prost(uint64, tag = "3")]
    context: u64,
    #[prost(uint64, tag = "4")]
    too_long: u64,
}

#[derive(Message)]
struct GoneTotalsMessage {
    #[prost(string, tag = "1")]
    reason: String,
    #[prost(uint64, tag = "2")]
    rollouts: u64,
    #[prost(uint64, tag = "3")]
    calls: u64,
}

#[derive(Message)]
struct ConsumerGroupTotalsMessage {
    #[prost(string, tag = "1")]
    consumer_group: String,
    #[prost(message, optional, tag = "2")]
    calls: Option<CallTotalsMessage>,
    #[prost(message, optional, tag = "3")]
    acknowledged: Option<SettledSumMessage>,
    #[prost(message, repeated, tag = "4")]
    dropped: Vec<DroppedSumMessage>,
    #[prost(uint64, tag = "5")]
    forgotten_through: u64,
    #[prost(uint64, tag = "6")]
    changed_at: u64,
    #[prost(uint64, tag = "7")]
    blurred_from: u64,
    #[prost(uint64, optional, tag = "8")]
    blurred_until: Option<u64>,
}

#[derive(Message)]
struct SettledSumMessage {
    #[prost(uint64, tag = "1")]
    units: u64,
    #[prost(uint64, tag = "2")]
    tokens: u64,
    #[prost(uint64, tag = "3")]
    rows: u64,
}

#[derive(Message)]
struct DroppedSumMessage {
    #[prost(uint32, tag = "1")]
    reason: u32,
    #[prost(message, optional, tag = "2")]
    sum: Option<SettledSumMessage>,
}

impl RunTotalsMessage {
    pub(super) fn of(run: &RunId, totals: &RunTotals) -> Self {
        let RunTotals { calls, gone, retired_rollouts, consumer_groups } = totals;
        let gone = gone.iter().map(|GoneTotals { reason, rollouts, calls }| GoneTotalsMessage {
            reason: reason.clone(),
            rollouts: *rollouts,
            calls: *calls,
        });
        Self {
            run: run.to_string(),
            calls: Some(CallTotalsMessage::of(calls)),
            gone: gone.collect(),
            retired_rollouts: *retired_rollouts,
            consumer_groups: consumer_groups.iter().map(ConsumerGroupTotalsMessage::of).collect(),
        }
    }

    pub(super) fn into_record(self) -> Result<Record, Fault> {
        let gone = self.gone.into_iter().map(|GoneTotalsMessage { reason, rollouts, calls }| GoneTotals {
            reason,
            rollouts,
            calls,
        });
        let groups = self.consumer_groups.into_iter().map(ConsumerGroupTotalsMessage::into_totals);
        Ok(Record::RunTotals {
            run: identifier("run", &self.run, RunId::parse)?,
            totals: RunTotals {
                calls: present("calls", self.calls)?.into_totals()?,
                gone: gone.collect(),
                retired_rollouts: self.retired_rollouts,
                consumer_groups: groups.collect::<Result<_, _>>()?,
            },
        })
    }
}

impl CallTotalsMessage {
    fn of(totals: &CallTotals) -> Self {
        let CallTotals { empty, not_kept, kept, policies } = totals;
        let policies = policies.iter().map(|PolicyTotals { policy, trained, context, too_long }| PolicyTotalsMessage {
            policy: policy.to_string(),
            trained: *trained,
            context: *context,
            too_long: *too_long,
        });
        Self { empty: *empty, not_kept: *not_kept, kept: *kept, policies: policies.collect() }
    }

    fn into_totals(self) -> Result<CallTotals, Fault> {
        let policy = |message: PolicyTotalsMessage| -> Result<_, Fault> {
            let policy = identifier("policies.policy", &message.policy, Name::parse)?;
            let PolicyTotalsMessage { policy: _, trained, context, too_long } = message;
            Ok(PolicyTotals { policy, trained, context, too_long })
        };
        let policies = self.policies.into_iter().map(policy).collect::<Result<_, _>>()?;
        Ok(CallTotals { empty: self.empty, not_kept: self.not_kept, kept: self.kept, policies })
    }
}

impl ConsumerGroupTotalsMessage {
    fn of(totals: &ConsumerGroupTotals) -> Self {
        let ConsumerGroupTotals {
            consumer_group,
            calls,
            acknowledged,
            dropped,
            forgotten_through,
            changed_at,
            blurred,
        } = totals;
        let dropped = dropped
            .iter()
            .map(|(reason, sum)| DroppedSumMessage { reason: reason.code(), sum: Some(SettledSumMessage::of(sum)) });
        Self {
            consumer_group: consumer_group.to_string(),
            calls: Some(CallTotalsMessage::of(calls)),
            acknowledged: Some(SettledSumMessage::of(acknowledged)),
            dropped: dropped.collect(),
            forgotten_through: *forgotten_through,
            changed_at: *changed_at,
            blurred_from: blurred.map_or(0, |(from, _)| from),
            blurred_until: blurred.map(|(_, until)| until),
        }
    }

    fn into_totals(self) -> Result<ConsumerGroupTotals, Fault> {
        let dropped = |message: DroppedSumMessage| -> Result<(DropReason, SettledSum), Fault> {
            Ok((coded("dropped.reason", message.reason)?, present("dropped.sum", message.sum)?.into_sum()))
        };
        Ok(ConsumerGroupTotals {
            consumer_group: identifier("consumer_group", &self.consumer_group, ConsumerGroupId::parse)?,
            calls: present("calls", self.calls)?.into_totals()?,
            acknowledged: present("acknowledged", self.acknowledged)?.into_sum(),
            dropped: self.dropped.into_iter().map(dropped).collect::<Result<_, _>>()?,
            forgotten_through: self.forgotten_through,
            changed_at: self.changed_at,
            blurred: self.blurred_until.map(|until| (self.blurred_from, until)),
        })
    }
}

impl SettledSumMessage {
    fn of(sum: &SettledSum) -> Self {
        let SettledSum { units, tokens, rows } = *sum;
        Self { units, tokens, rows }
    }

    fn into_sum(self) -> SettledSum {
        let Self { units, tokens, rows } = self;
        SettledSum { units, tokens, rows }
    }
}
