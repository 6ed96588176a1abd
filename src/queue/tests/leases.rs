//! Consumers: credit, order, leases, what ends them, and what a joiner still holds.

use super::*;

#[test]
fn the_oldest_unit_goes_to_the_consumer_with_fewest_tokens_out() {
    let mut group = group_with(&[("a", 5), ("b", 3), ("c", 1), ("d", 1), ("e", 1)]);
    join(&mut group, A, 100);
    join(&mut group, B, 100);
    let expected = [went(A, "a", 1), went(B, "b", 1), went(B, "c", 1), went(B, "d", 1), went(A, "e", 1)];
    assert_eq!(dispatch(&mut group, 0), expected, "a tie of 5 and 5 goes to the lower id");
}

#[test]
fn a_tie_goes_to_the_one_that_was_given_fewest() {
    let mut group = group_with(&[("a", 5), ("b", 3)]);
    join(&mut group, A, 100);
    join(&mut group, B, 100);
    dispatch(&mut group, 0);
    group.apply_ack(&id("a"), 1);
    group.apply_ack(&id("b"), 1);
    group.push(8, units(&[("c", 1)]), 0);
    assert_eq!(dispatch(&mut group, 0), [went(B, "c", 1)]);
}

#[test]
fn credit_is_a_window_that_an_ack_opens_again() {
    let mut group = group_with(&[("a", 4), ("b", 6), ("c", 1)]);
    join(&mut group, A, 10);
    assert_eq!(dispatch(&mut group, 0), [went(A, "a", 1), went(A, "b", 1)]);
    assert!(dispatch(&mut group, 0).is_empty());
    group.apply_ack(&id("a"), 1);
    assert_eq!(dispatch(&mut group, 0), [went(A, "c", 1)]);
}

#[test]
fn a_unit_larger_than_all_credit_goes_out_alone() {
    let mut group = group_with(&[("a", 4), ("big", 50), ("c", 1)]);
    join(&mut group, A, 10);
    assert_eq!(dispatch(&mut group, 0), [went(A, "a", 1)], "nothing overtakes the head");
    group.apply_ack(&id("a"), 1);
    assert_eq!(dispatch(&mut group, 0), [went(A, "big", 1)]);
    group.apply_ack(&id("big"), 1);
    assert_eq!(dispatch(&mut group, 0), [went(A, "c", 1)]);
}

#[test]
fn credit_of_nothing_gives_nothing_and_can_be_set() {
    let mut group = group_with(&[("a", 4)]);
    join(&mut group, A, 0);
    assert!(dispatch(&mut group, 0).is_empty());
    group.set_credit(A, 1);
    assert_eq!(dispatch(&mut group, 0), [went(A, "a", 1)]);
}

#[test]
fn the_head_that_fits_only_one_consumer_goes_there() {
    let mut group = group_with(&[("x", 2), ("y", 6), ("a", 9)]);
    join(&mut group, A, 10);
    join(&mut group, B, 100);
    dispatch(&mut group, 0);
    assert_eq!(group.place(&id("a")), Some(Place::Leased { consumer: B, since_ms: 0 }));
}

#[test]
fn units_out_are_bounded_too_and_a_dispatch_can_be() {
    let bounds = QueueBounds { max_units_in_flight: 2, ..bounds() };
    let mut group: Group = ConsumerGroup::new(definition(), bounds, 0, 0);
    group.push(7, units(&[("a", 1), ("b", 1), ("c", 1)]), 0);
    join(&mut group, A, 100);
    assert_eq!(group.dispatch(0, 1).len(), 1);
    assert_eq!(group.dispatch(0, 9).len(), 1);
    let reason = group.waiting_for(A).map(|waiting| waiting.reason);
    assert_eq!(reason, Some(WaitReason::TooManyUnitsInFlight { max_units_in_flight: 2 }));
}

#[test]
fn a_consumers_end_puts_its_units_back_at_their_places() {
    let mut group = group_with(&[("a", 1), ("b", 1), ("c", 1)]);
    join(&mut group, A, 2);
    dispatch(&mut group, 0);
    assert!(group.leave(A, 0).is_empty());
    join(&mut group, B, 9);
    assert_eq!(dispatch(&mut group, 0), [went(B, "a", 2), went(B, "b", 2), went(B, "c", 1)]);
    assert!(group.leave(A, 0).is_empty(), "who is not there can leave");
}

#[test]
fn a_lease_ends_without_a_sign_of_life() {
    let mut group = group_with(&[("a", 1), ("b", 1)]);
    join(&mut group, A, 1);
    dispatch(&mut group, 100);
    assert_eq!(group.next_deadline_ms(), Some(1100));
    group.sign_of_life(A, 600);
    assert_eq!(group.next_deadline_ms(), Some(1600));
    group.tick(1599);
    assert_eq!(group.stats(0).leased.units, 1);
    group.tick(1600);
    assert_eq!(group.stats(0).leased.units, 0);
    assert_eq!(dispatch(&mut group, 1600), [went(A, "a", 2)], "a live stream may be given it again");
}

#[test]
fn what_a_silent_consumer_had_goes_to_another() {
    let mut group = group_with(&[("a", 5), ("b", 5)]);
    join(&mut group, A, 9);
    join(&mut group, B, 9);
    assert_eq!(dispatch(&mut group, 0), [went(A, "a", 1), went(B, "b", 1)]);
    group.apply_ack(&id("b"), 1);
    group.sign_of_life(B, 999);
    assert_eq!(group.tick(1000), Ticked { decisions: vec![], ended: vec![(A, id("a"))] });
    assert_eq!(dispatch(&mut group, 1000), [went(B, "a", 2)], "not to A, though it is first in a tie");
    group.push(8, units(&[("c", 1)]), 1000);
    assert_eq!(dispatch(&mut group, 1000), [went(B, "c", 1)], "not to A, though it has fewer tokens out");
    group.sign_of_life(A, 1001);
    group.push(9, units(&[("d", 1)]), 1001);
    assert_eq!(dispatch(&mut group, 1001), [went(A, "d", 1)]);
}

#[test]
fn a_lease_taken_after_the_last_sign_lasts_its_whole_length() {
    let mut group = group_with(&[("a", 1), ("b", 1)]);
    join(&mut group, A, 9);
    assert_eq!(group.dispatch(0, 1).len(), 1);
    assert_eq!(group.dispatch(500, 1).len(), 1);
    group.tick(1000);
    assert_eq!(group.place(&id("a")), Some(Place::Waiting));
    assert_eq!(group.next_deadline_ms(), Some(1500));
}

#[test]
fn a_nack_puts_a_unit_back_after_its_delay() {
    let mut group = group_with(&[("a", 1), ("b", 1)]);
    join(&mut group, A, 1);
    dispatch(&mut group, 0);
    let nacked = group.nack(A, &ids(&["a", "b", "no"]), Some(100), 10);
    assert_eq!((nacked.returned, nacked.ignored), (ids(&["a"]), ids(&["b", "no"])));
    assert_eq!(group.next_deadline_ms(), Some(110));
    assert_eq!(dispatch(&mut group, 109), [went(A, "b", 1)], "only what is put off is overtaken");
    group.set_credit(A, 9);
    assert_eq!(dispatch(&mut group, 110), [went(A, "a", 2)]);
    group.nack(A, &ids(&["a"]), Some(u64::MAX), 110);
    assert_eq!(group.place(&id("a")), Some(Place::Delayed { until_ms: 610 }), "the delay is bounded");
    group.tick(610);
    assert_eq!(group.place(&id("a")), Some(Place::Waiting));
}

#[test]
fn a_late_nack_does_not_take_anothers_unit_away() {
    let mut group = group_with(&[("a", 1)]);
    join(&mut group, A, 1);
    dispatch(&mut group, 0);
    group.tick(1000);
    group.set_credit(A, 0);
    join(&mut group, B, 1);
    assert_eq!(dispatch(&mut group, 1000), [went(B, "a", 2)]);
    assert_eq!(group.nack(A, &ids(&["a"]), None, 1000).ignored, ids(&["a"]));
    assert_eq!(group.place(&id("a")), Some(Place::Leased { consumer: B, since_ms: 1000 }));
}

#[test]
fn held_units_are_leased_again_without_being_sent() {
    let mut group = group_with(&[("a", 1), ("b", 1), ("c", 1), ("d", 1), ("e", 1)]);
    join(&mut group, A, 4);
    dispatch(&mut group, 0);
    group.apply_ack(&id("b"), 1);
    group.apply_drop(&id("c"), DropReason::Stale);
    group.nack(A, &ids(&["d"]), Some(100), 0);
    group.leave(A, 0);
    let held = ids(&["d", "a", "a", "b", "c", "never"]);
    let joined = group.join(B, "", 1, &held, 0);
    let lost = vec![
        (id("b"), LostReason::Acknowledged),
        (id("c"), LostReason::Dropped(DropReason::Stale)),
        (id("never"), LostReason::Unknown),
    ];
    assert_eq!(joined, Ok(Joined { held: ids(&["d", "a"]), lost }));
    assert!(dispatch(&mut group, 0).is_empty(), "what is held counts against credit");
    group.leave(B, 0);
    join(&mut group, C, 9);
    let expected = [went(C, "a", 2), went(C, "d", 2), went(C, "e", 1)];
    assert_eq!(dispatch(&mut group, 0), expected, "holding is no delivery, and ends a delay");
}

#[test]
fn a_unit_with_a_live_consumer_is_lost_to_the_joiner_unless_it_is_itself() {
    let mut group = group_with(&[("a", 1), ("b", 1)]);
    assert!(group.join(A, "rank-0", 9, &[], 0).is_ok());
    dispatch(&mut group, 0);
    let joined = group.join(B, "rank-1", 9, &ids(&["a"]), 0);
    let lost = vec![(id("a"), LostReason::LeasedToOther { consumer: A })];
    assert_eq!(joined, Ok(Joined { held: vec![], lost }));
    let joined = group.join(C, "rank-0", 9, &ids(&["a"]), 5);
    assert_eq!(joined, Ok(Joined { held: ids(&["a"]), lost: vec![] }));
    assert_eq!(group.place(&id("a")), Some(Place::Leased { consumer: C, since_ms: 5 }));
    assert_eq!(group.place(&id("b")), Some(Place::Leased { consumer: A, since_ms: 0 }));
    group.leave(A, 5);
    assert_eq!(group.place(&id("a")), Some(Place::Leased { consumer: C, since_ms: 5 }));
}

#[test]
fn consumers_are_bounded_and_join_once() {
    let mut group: Group = ConsumerGroup::new(definition(), QueueBounds { max_consumers: 1, ..bounds() }, 0, 0);
    join(&mut group, A, 1);
    assert_eq!(group.join(A, "", 1, &[], 0), Err(JoinRefused::AlreadyJoined));
    assert_eq!(group.join(B, "", 1, &[], 0), Err(JoinRefused::TooManyConsumers { max_consumers: 1 }));
}

/// Gives the one unit out and ends its lease, once for each way; the last way is told to give the decision.
#[test]
fn a_unit_given_out_too_often_is_parked_until_its_drop_is_durable() {
    let mut group = group_with(&[("a", 1)]);
    join(&mut group, A, 1);
    assert_eq!(dispatch(&mut group, 0), [went(A, "a", 1)]);
    assert!(group.tick(1000).decisions.is_empty());
    assert_eq!(dispatch(&mut group, 1000), [went(A, "a", 2)]);
    assert!(group.nack(A, &ids(&["a"]), None, 1000).decisions.is_empty());
    assert_eq!(dispatch(&mut group, 1000), [went(A, "a", 3)]);
    assert_eq!(group.leave(A, 1000), [drop_of("a")]);
    assert_eq!(group.place(&id("a")), Some(Place::Parked(ParkedFor::Drop(DropReason::Undeliverable))));
    let joined = group.join(B, "", 9, &ids(&["a"]), 1000).map(|joined| joined.lost);
    assert_eq!(joined, Ok(vec![(id("a"), LostReason::Dropped(DropReason::Undeliverable))]));
    assert!(dispatch(&mut group, 1000).is_empty());
    assert_eq!(group.apply_drop(&id("a"), DropReason::Undeliverable), settled(7));
    assert_eq!(group.place(&id("a")), Some(Place::Dropped(DropReason::Undeliverable)));
}

#[test]
fn the_last_nack_and_the_last_expiry_decide_too() {
    let definition = GroupDefinition { max_deliveries: 0, ..definition() };
    let mut group: Group = ConsumerGroup::new(definition, bounds(), 0, 0);
    group.push(7, units(&[("a", 1), ("b", 1), ("c", 1)]), 0);
    join(&mut group, A, 2);
    dispatch(&mut group, 0);
    assert_eq!(group.nack(A, &ids(&["b"]), Some(50), 0).decisions, [drop_of("b")], "0 counts as 1");
    assert_eq!(group.tick(1000), Ticked { decisions: vec![drop_of("a")], ended: vec![(A, id("a"))] });
    group.leave(A, 1000);
    let held = group.join(B, "", 0, &ids(&["c"]), 1000).map(|joined| joined.held);
    assert_eq!(held, Ok(ids(&["c"])));
    assert_eq!(group.nack(B, &ids(&["c"]), None, 1000).decisions, [drop_of("c")], "a nack counts as a delivery");
}

#[test]
fn decisions_come_in_the_order_of_units_not_of_leases() {
    let definition = GroupDefinition { max_deliveries: 2, ..definition() };
    let mut group: Group = ConsumerGroup::new(definition, bounds(), 0, 0);
    group.push(7, units(&[("a", 1), ("b", 1)]), 0);
    join(&mut group, A, 9);
    dispatch(&mut group, 0);
    group.nack(A, &ids(&["b"]), None, 1);
    dispatch(&mut group, 1);
    group.nack(A, &ids(&["a"]), None, 2);
    dispatch(&mut group, 2);
    assert_eq!(group.leave(A, 3), [drop_of("a"), drop_of("b")]);
}

#[test]
fn consumers_without_a_name_are_not_each_other() {
    let mut group = group_with(&[("a", 1)]);
    join(&mut group, A, 9);
    dispatch(&mut group, 0);
    let lost = group.join(B, "", 9, &ids(&["a"]), 0).map(|joined| joined.lost);
    assert_eq!(lost, Ok(vec![(id("a"), LostReason::LeasedToOther { consumer: A })]));
}

#[test]
fn a_consumer_without_room_is_not_asked_again() {
    let mut group = group_with(&[("a", 5), ("b", 5), ("c", 1)]);
    join(&mut group, A, 5);
    join(&mut group, B, 5);
    dispatch(&mut group, 0);
    assert_eq!(group.check_invariants(), Ok(()));
    group.leave(A, 0);
    assert!(dispatch(&mut group, 0).is_empty());
    group.set_credit(B, 11);
    assert_eq!(dispatch(&mut group, 0), [went(B, "a", 2), went(B, "c", 1)]);
}
