//! Units of whole groups: each rollout is pushed by itself, and the unit holds the rows of all.

use super::*;

fn of_groups() -> Group {
    ConsumerGroup::new(GroupDefinition { unit: UnitKind::Group, ..definition() }, bounds(), 0, 0)
}

fn part(unit: &str, tokens: u64, oldest: u64) -> NewUnit<&'static str> {
    NewUnit { oldest_versions: Box::new([("actor".into(), oldest)]), ..units(&[(unit, tokens)]).remove(0) }
}

#[test]
fn a_unit_grows_by_each_rollout_and_settles_them_all() {
    let mut group = of_groups();
    assert!(group.push(1, vec![part("run//g", 10, 7)], 0).is_empty());
    assert!(group.push(2, vec![part("run//g", 5, 3)], 0).is_empty());
    assert!(group.push(2, vec![part("run//g", 5, 3)], 0).is_empty(), "a rollout is known once");
    assert_eq!(group.push(3, Vec::new(), 0), settled(3), "one without rows has nothing in it");
    assert_eq!((group.stats(0).waiting.units, group.stats(0).waiting.tokens), (1, 15));
    assert_eq!(group.row_states().made, 2);
    assert!(group.holds(&1) && group.holds(&2) && !group.holds(&3));
    join(&mut group, A, 100);
    assert_eq!(dispatch(&mut group, 0), [went(A, "run//g", 1)]);
    let both = [1, 2].map(|source| QueueEffect::SourceSettled { source });
    assert_eq!(group.apply_ack(&id("run//g"), 5), both);
    assert_eq!(group.check_invariants(), Ok(()));
    assert_eq!((group.forget_source(&1), group.forget_source(&2), group.forget_source(&3)), (0, 0, 0));
    assert_eq!((group.place(&id("run//g")), group.row_states().acknowledged), (None, 2));
    assert_eq!(group.check_invariants(), Ok(()));
}

#[test]
fn what_a_rollout_brings_late_stands_where_the_unit_stands() {
    // A replay may know first that the unit is acknowledged, and then read another copy of its rollouts.
    let mut group = of_groups();
    group.push(1, vec![part("run//g", 10, 7)], 0);
    assert_eq!(group.apply_ack(&id("run//g"), 5), settled(1));
    assert_eq!(group.push(2, vec![part("run//g", 5, 3)], 0), settled(2));
    assert_eq!(group.row_states().acknowledged, 2);
    let (restored, effects) = group.apply_seek(0, 9, |_| vec![part("run//g", 10, 7)], 0);
    assert_eq!((restored, effects.len()), (1, 2), "both are open again");
    assert!(group.holds(&1) && group.holds(&2));
    assert_eq!(group.check_invariants(), Ok(()));
}

#[test]
fn a_unit_is_as_old_as_the_oldest_of_its_rollouts() {
    let bounded = GroupDefinition { unit: UnitKind::Group, max_staleness_versions: Some(2), ..definition() };
    let mut group = ConsumerGroup::new(bounded, bounds(), 0, 0);
    group.push(1, vec![part("run//g", 10, 7)], 0);
    group.push(2, vec![part("run//g", 5, 3)], 0);
    join(&mut group, A, 0);
    group.trainer_is_on(A, None, 5);
    assert!(group.judge_stale(0, 10).is_empty());
    group.trainer_is_on(A, None, 6);
    assert_eq!(group.judge_stale(0, 10), [Decision::DropStale { unit: id("run//g") }]);
}

#[test]
fn what_nobody_will_be_given_is_counted_and_not_remembered() {
    let mut group = group_with(&[("a", 3)]);
    group.count_dropped(&units(&[("b", 4), ("c", 5)]), DropReason::Late);
    let rows = group.row_states();
    assert_eq!((rows.made, rows.waiting, rows.dropped.get(&DropReason::Late)), (3, 1, Some(&2)));
    assert_eq!((group.place(&id("b")), group.judge_seek(0)), (None, Ok(())));
    let mut tail = tail();
    tail.count_dropped(&units(&[("b", 4)]), DropReason::Late);
    assert_eq!(tail.row_states().made, 0);
}
