//! Units and rollouts: pushing, acknowledging, dropping, releasing, forgetting.

use super::*;

#[test]
fn a_rollout_without_units_is_settled_at_once() {
    assert_eq!(group().push(7, vec![], 0), settled(7));
}

#[test]
fn a_rollout_is_settled_by_its_last_unit() {
    let mut group = group_with(&[("a", 1), ("b", 1)]);
    assert!(group.apply_ack(&id("b"), 1).is_empty());
    assert!(group.holds(&7));
    assert_eq!(group.apply_drop(&id("a"), DropReason::Stale), settled(7));
    assert!(!group.holds(&7));
}

#[test]
fn pushing_again_changes_nothing() {
    let mut group = group_with(&[("a", 1)]);
    assert!(group.push(7, units(&[("b", 1)]), 0).is_empty());
    assert_eq!(group.place(&id("b")), None);
    assert_eq!(group.push(8, units(&[("a", 1)]), 0), settled(8), "its one unit is another's");
    assert_eq!(group.stats(0).pushed.units, 1);
}

#[test]
fn an_ack_counts_whoever_has_the_unit_and_judging_changes_nothing() {
    let mut group = group_with(&[("waiting", 1), ("anothers", 1), ("gone", 1)]);
    join(&mut group, A, 9);
    dispatch(&mut group, 0);
    group.leave(A, 0);
    join(&mut group, B, 2);
    dispatch(&mut group, 0);
    let asked = ids(&["gone", "anothers", "waiting", "gone", "never"]);
    let expected = [
        (id("gone"), AckResult::Acknowledged),
        (id("anothers"), AckResult::Acknowledged),
        (id("waiting"), AckResult::Acknowledged),
        (id("gone"), AckResult::Already),
        (id("never"), AckResult::Unknown),
    ];
    assert_eq!(group.judge_acks(&asked), expected);
    assert_eq!(group.judge_acks(&asked), expected);
    for unit in &asked[..2] {
        assert!(group.apply_ack(unit, 1).is_empty());
    }
    assert_eq!(group.apply_ack(&id("waiting"), 1), settled(7));
    assert!(group.apply_ack(&id("waiting"), 1).is_empty());
    assert!(group.apply_ack(&id("never"), 1).is_empty());
    assert_eq!(group.judge_acks(&ids(&["waiting"])), [(id("waiting"), AckResult::Already)]);
    assert_eq!(group.stats(0).leased, Tally::default());
}

#[test]
fn a_unit_whose_ack_is_on_its_way_is_given_to_nobody() {
    let mut group = group_with(&[("a", 1), ("b", 1)]);
    join(&mut group, A, 1);
    dispatch(&mut group, 0);
    group.begin_acks(&ids(&["a", "never"]));
    assert_eq!(dispatch(&mut group, 0), [went(A, "b", 1)], "its credit is back");
    assert!(group.leave(A, 0).is_empty());
    let joined = group.join(B, "", 9, &ids(&["a"]), 0).map(|joined| joined.lost);
    assert_eq!(joined, Ok(vec![(id("a"), LostReason::Acknowledged)]));
    assert_eq!(dispatch(&mut group, 0), [went(B, "b", 2)]);
    assert_eq!(group.judge_acks(&ids(&["a"])), [(id("a"), AckResult::Acknowledged)]);
    group.apply_ack(&id("a"), 1);
    assert_eq!(group.place(&id("a")), Some(Place::Acknowledged));
}

#[test]
fn an_ack_that_comes_before_the_drop_stands() {
    let mut group = group_with(&[("a", 1)]);
    assert_eq!(group.apply_ack(&id("a"), 1), settled(7));
    assert!(group.apply_drop(&id("a"), DropReason::Undeliverable).is_empty());
    assert_eq!(group.place(&id("a")), Some(Place::Acknowledged));
}

#[test]
fn a_late_ack_of_an_undeliverable_unit_counts_and_says_that_it_can_be_released_no_more() {
    let mut group = group_with(&[("a", 3)]);
    assert_eq!(group.apply_drop(&id("a"), DropReason::Undeliverable), settled(7));
    assert_eq!(group.judge_acks(&ids(&["a"])), [(id("a"), AckResult::Acknowledged)]);
    assert_eq!(group.apply_ack(&id("a"), 1), settled(7));
    let stats = group.stats(0);
    assert_eq!(stats.acknowledged, Tally { units: 1, tokens: 3 });
    assert_eq!(stats.dropped.get(&DropReason::Undeliverable), Some(&Tally::default()));
    assert_eq!(group.judge_release(&id("a")), ReleaseResult::NotUndeliverable);
}

#[test]
fn a_late_ack_of_a_unit_dropped_for_another_reason_does_not_count() {
    let mut group = group_with(&[("a", 3)]);
    group.apply_drop(&id("a"), DropReason::Stale);
    assert_eq!(group.judge_acks(&ids(&["a"])), [(id("a"), AckResult::Dropped(DropReason::Stale))]);
    assert!(group.apply_ack(&id("a"), 1).is_empty());
    assert_eq!(group.place(&id("a")), Some(Place::Dropped(DropReason::Stale)));
}

#[test]
fn dropping_a_leased_unit_ends_its_lease() {
    let mut group = group_with(&[("a", 3)]);
    join(&mut group, A, 9);
    dispatch(&mut group, 0);
    assert_eq!(group.apply_drop(&id("a"), DropReason::Stale), settled(7));
    assert_eq!(group.stats(0).leased, Tally::default());
}

#[test]
fn an_undeliverable_unit_can_be_released_and_starts_afresh() {
    let mut group = group_with(&[("a", 1), ("b", 1)]);
    join(&mut group, A, 1);
    for _ in 0..3 {
        dispatch(&mut group, 0);
        group.nack(A, &ids(&["a"]), None, 0);
    }
    assert_eq!(group.judge_release(&id("a")), ReleaseResult::NotUndeliverable, "its drop is not durable yet");
    group.apply_drop(&id("a"), DropReason::Undeliverable);
    assert_eq!(group.apply_ack(&id("b"), 1), settled(7));
    assert_eq!(group.judge_release(&id("a")), ReleaseResult::Released);
    assert_eq!(group.apply_release(&id("a")), [QueueEffect::SourceReopened { source: 7 }]);
    assert!(group.apply_release(&id("a")).is_empty());
    assert_eq!(dispatch(&mut group, 0), [went(A, "a", 1)]);
    assert_eq!(group.apply_ack(&id("a"), 1), settled(7));
    assert_eq!(group.judge_release(&id("never")), ReleaseResult::Unknown);
}

#[test]
fn an_undeliverable_unit_can_be_dropped_for_good() {
    let mut group = group_with(&[("a", 1), ("b", 1)]);
    for unit in ["a", "b"] {
        group.apply_drop(&id(unit), DropReason::Undeliverable);
    }
    assert_eq!(group.apply_drop(&id("a"), DropReason::Operator), settled(7));
    assert_eq!(group.judge_release(&id("a")), ReleaseResult::NotUndeliverable);
    assert_eq!(group.judge_acks(&ids(&["a"])), [(id("a"), AckResult::Dropped(DropReason::Operator))]);
    assert_eq!(group.apply_release(&id("b")), [QueueEffect::SourceReopened { source: 7 }]);
    assert!(group.apply_drop(&id("a"), DropReason::Operator).is_empty(), "once");
    assert_eq!(group.check_invariants(), Ok(()));
}

#[test]
fn a_forgotten_rollout_leaves_only_its_counts() {
    let mut group = group_with(&[("a", 1), ("b", 2), ("c", 4)]);
    join(&mut group, A, 9);
    dispatch(&mut group, 0);
    group.apply_ack(&id("a"), 1);
    group.apply_drop(&id("b"), DropReason::Stale);
    assert_eq!(group.forget_source(&7), 1);
    assert_eq!(group.forget_source(&7), 0);
    assert_eq!(group.judge_acks(&ids(&["a"])), [(id("a"), AckResult::Unknown)]);
    let stats = group.stats(0);
    assert_eq!(stats.acknowledged, Tally { units: 1, tokens: 1 });
    assert_eq!(stats.dropped.get(&DropReason::Forgotten), Some(&Tally { units: 1, tokens: 4 }));
    assert_eq!(stats.leased, Tally::default());
    assert_eq!(group.check_invariants(), Ok(()));
}

#[test]
fn the_first_reason_to_drop_stands() {
    let mut group = group_with(&[("a", 1)]);
    group.apply_drop(&id("a"), DropReason::Undeliverable);
    assert!(group.apply_drop(&id("a"), DropReason::Stale).is_empty());
    assert_eq!(group.place(&id("a")), Some(Place::Dropped(DropReason::Undeliverable)));
}

#[test]
fn a_trainer_may_go_back_to_one_checkpoint_again_and_again() {
    let mut group = group();
    group.push(7, units(&[("a", 1), ("b", 1)]), 0);
    let again = |_: &u64| units(&[("a", 1), ("b", 1)]);
    group.apply_ack(&id("a"), 1);
    let before = group.changed_at();
    let mut at = 1;
    let mut between = 0;
    for round in 0..100 {
        group.apply_ack(&id("b"), at + 1);
        if round == 20 {
            between = group.changed_at();
            assert_eq!(group.judge_seek(between), Ok(()));
        }
        assert_eq!(group.judge_seek(before), Ok(()), "round {round}");
        assert_eq!(group.apply_seek(before, at + 2, again, 0).0, 1);
        at += 2;
        assert_eq!((group.place(&id("a")), group.place(&id("b"))), (Some(Place::Acknowledged), Some(Place::Waiting)));
        assert!(group.history(&id("b")).is_some_and(|history| history.moments().len() <= 32), "it is bounded");
    }
    // The first time and the last times are known, those between are not any more, and that is said.
    assert_eq!(group.judge_seek(between), Err(SeekRefused::NotRetained));
    assert_eq!((group.judge_seek(2), group.judge_seek(at - 1)), (Ok(()), Ok(())));
    assert_eq!(group.apply_seek(2, at + 1, again, 0).0, 0);
    assert_eq!(group.place(&id("b")), Some(Place::Acknowledged));
}
