//! One test for each sentence of the contract. The random ones are in `model`.

mod cut;
mod groups;
mod leases;
mod model;
mod steps;
mod units;
mod whole;

use super::*;

pub(super) type Group = ConsumerGroup<u64, &'static str>;

pub(super) const A: ConsumerId = ConsumerId(1);
pub(super) const B: ConsumerId = ConsumerId(2);
pub(super) const C: ConsumerId = ConsumerId(3);

pub(super) fn definition() -> GroupDefinition {
    GroupDefinition {
        policy: Some("actor".into()),
        unit: UnitKind::Row,
        step: None,
        max_row_tokens: Some(4096),
        max_staleness_versions: None,
        ephemeral: false,
        max_deliveries: 3,
    }
}

pub(super) fn bounds() -> QueueBounds {
    QueueBounds { lease_ms: 1000, max_nack_delay_ms: 500, max_ephemeral_waiting_units: 3, ..QueueBounds::default() }
}

pub(super) fn group() -> Group {
    ConsumerGroup::new(definition(), bounds(), 0, 0)
}

pub(super) fn tail() -> Group {
    ConsumerGroup::new(GroupDefinition { ephemeral: true, ..definition() }, bounds(), 0, 0)
}

pub(super) fn id(name: &str) -> UnitId {
    UnitId::from(name)
}

pub(super) fn ids(names: &[&str]) -> Vec<UnitId> {
    names.iter().map(|name| id(name)).collect()
}

pub(super) fn units(units: &[(&str, u64)]) -> Vec<NewUnit<&'static str>> {
    units
        .iter()
        .map(|&(name, tokens)| NewUnit {
            id: id(name),
            tokens,
            rows: 1,
            family: 0,
            oldest_versions: Box::default(),
            payload: "rows",
        })
        .collect()
}

/// A group with one rollout of these units.
pub(super) fn group_with(new: &[(&str, u64)]) -> Group {
    let mut group = group();
    assert!(new.is_empty() || group.push(7, units(new), 0).is_empty());
    group
}

pub(super) fn join(group: &mut Group, consumer: ConsumerId, credit_tokens: u64) {
    let joined = group.join(consumer, "", credit_tokens, &[], 0);
    assert_eq!(joined, Ok(Joined::default()));
}

/// Who gets what, as (consumer, unit, delivery number).
pub(super) fn dispatch(group: &mut Group, now_ms: u64) -> Vec<(ConsumerId, String, u32)> {
    let out = group.dispatch(now_ms, usize::MAX);
    out.into_iter().map(|d| (d.consumer, d.unit.as_str().to_owned(), d.delivery_number)).collect()
}

pub(super) fn went(consumer: ConsumerId, unit: &str, delivery_number: u32) -> (ConsumerId, String, u32) {
    (consumer, unit.to_owned(), delivery_number)
}

pub(super) fn drop_of(unit: &str) -> Decision {
    Decision::DropUndeliverable { unit: id(unit) }
}

pub(super) fn settled(source: u64) -> Vec<QueueEffect<u64>> {
    vec![QueueEffect::SourceSettled { source }]
}
