//! The run's queue, ephemeral groups, and what people are told.

use super::*;

#[test]
fn a_group_is_fixed_by_whoever_made_it() {
    let mut queue: Queue<u64, &str> = Queue::new(bounds());
    assert_eq!(queue.judge_group("train", &definition()), Ok(GroupVerdict::New));
    queue.apply_group("train", definition(), 0, 0);
    assert_eq!(queue.judge_group("train", &definition()), Ok(GroupVerdict::Exists));
    let requested = GroupDefinition { unit: UnitKind::Rollout, ..definition() };
    let mismatch = ConsumerGroupMismatch { name: "train".into(), declared: definition(), requested: requested.clone() };
    assert_eq!(queue.judge_group("train", &requested), Err(GroupRefused::Mismatch(Box::new(mismatch))));
    assert_eq!(queue.apply_group("train", requested, 0, 0).definition(), &definition(), "the first stands");
    assert_eq!(queue.groups().map(|(name, _)| name).collect::<Vec<_>>(), ["train"]);
    assert!(queue.remove_group("train").is_some());
    assert_eq!(queue.judge_group("train", &definition()), Ok(GroupVerdict::New));
}

#[test]
fn a_run_has_a_bounded_number_of_groups() {
    let mut queue: Queue<u64, &str> = Queue::new(QueueBounds { max_consumer_groups: 1, ..bounds() });
    queue.apply_group("a", definition(), 0, 0);
    let refused = GroupRefused::TooManyGroups { max_consumer_groups: 1 };
    assert_eq!(queue.judge_group("b", &definition()), Err(refused));
    assert_eq!(queue.judge_group("a", &definition()), Ok(GroupVerdict::Exists));
}

#[test]
fn groups_are_independent_and_share_deadlines() {
    let mut queue: Queue<u64, &str> = Queue::new(bounds());
    queue.apply_group("a", definition(), 0, 0).push(7, units(&[("u", 1)]), 0);
    queue.apply_group("b", definition(), 0, 0).push(7, units(&[("u", 1)]), 0);
    assert_eq!(queue.next_deadline_ms(), None);
    for (_, group) in queue.groups_mut() {
        join(group, A, 10);
        assert_eq!(dispatch(group, 5), [went(A, "u", 1)]);
    }
    assert_eq!(queue.next_deadline_ms(), Some(1005));
    let settled_in_a = queue.group_mut("a").map(|group| group.apply_ack(&id("u"), 1));
    assert_eq!(settled_in_a, Some(settled(7)));
    assert!(queue.group("b").is_some_and(|group| group.holds(&7)));
    queue.forget_source(&7);
    assert!(queue.groups().all(|(_, group)| group.place(&id("u")).is_none()));
}

#[test]
fn an_ephemeral_group_settles_what_it_gives_out_and_holds_nothing_back() {
    let mut tail = tail();
    assert_eq!(tail.push(7, units(&[("a", 5), ("b", 5)]), 0), settled(7));
    assert!(!tail.holds(&7));
    join(&mut tail, A, 1);
    assert_eq!(dispatch(&mut tail, 0), [went(A, "a", 1), went(A, "b", 1)]);
    assert_eq!(tail.stats(0).acknowledged, Tally { units: 2, tokens: 10 });
    assert_eq!(tail.judge_acks(&ids(&["a"])), [(id("a"), AckResult::Unknown)]);
    assert!(tail.leave(A, 0).is_empty());
    assert_eq!(tail.forget_source(&7), 0);
    assert_eq!(tail.stats(0).waiting, Tally::default());
}

#[test]
fn an_ephemeral_group_stops_without_credit_and_balances_by_tokens_given() {
    let mut tail = tail();
    join(&mut tail, A, 0);
    join(&mut tail, B, 1);
    join(&mut tail, C, 1);
    tail.push(7, units(&[("a", 9), ("b", 2), ("c", 2)]), 0);
    assert_eq!(dispatch(&mut tail, 0), [went(B, "a", 1), went(C, "b", 1), went(C, "c", 1)]);
}

#[test]
fn an_ephemeral_line_drops_its_oldest_with_a_notice() {
    let mut tail = tail();
    tail.push(7, units(&[("a", 1), ("b", 2), ("c", 3)]), 0);
    let mut expected = settled(8);
    expected.push(QueueEffect::LineOverflowed { units: 2, tokens: 3 });
    assert_eq!(tail.push(8, units(&[("d", 4), ("e", 5)]), 0), expected);
    assert_eq!(tail.stats(0).dropped.get(&DropReason::Overflow), Some(&Tally { units: 2, tokens: 3 }));
    join(&mut tail, A, 1);
    assert_eq!(dispatch(&mut tail, 0), [went(A, "c", 1), went(A, "d", 1), went(A, "e", 1)]);
}

#[test]
fn an_ephemeral_group_knows_no_held_units_and_can_drop_the_stale() {
    let mut tail = tail();
    tail.push(7, units(&[("a", 1), ("b", 1)]), 0);
    let joined = tail.join(A, "", 1, &ids(&["a"]), 0);
    assert_eq!(joined.map(|joined| joined.lost), Ok(vec![(id("a"), LostReason::Unknown)]));
    assert!(tail.apply_drop(&id("a"), DropReason::Stale).is_empty());
    assert_eq!(dispatch(&mut tail, 0), [went(A, "b", 1)]);
}

#[test]
fn stats_add_up() {
    let mut group = group_with(&[("a", 1), ("b", 2), ("c", 4), ("d", 8), ("e", 16)]);
    join(&mut group, A, 15);
    dispatch(&mut group, 0);
    group.apply_ack(&id("a"), 1);
    group.apply_drop(&id("b"), DropReason::Stale);
    group.nack(A, &ids(&["c"]), Some(100), 0);
    let stats = group.stats(40);
    assert_eq!(stats.pushed, Tally { units: 5, tokens: 31 });
    assert_eq!(stats.waiting, Tally { units: 2, tokens: 20 });
    assert_eq!(stats.delayed_units, 1);
    assert_eq!(stats.leased, Tally { units: 1, tokens: 8 });
    assert_eq!(stats.acknowledged, Tally { units: 1, tokens: 1 });
    assert_eq!(stats.dropped.get(&DropReason::Stale), Some(&Tally { units: 1, tokens: 2 }));
    assert_eq!((stats.deliveries, stats.redeliveries, stats.consumers), (4, 0, 1));
    assert_eq!((stats.oldest_waiting_ms, stats.oldest_unsettled_ms), (Some(40), Some(40)));
    let dropped = std::collections::BTreeMap::from([(DropReason::Stale, 1)]);
    let rows = RowStates { made: 5, waiting: 2, leased: 1, acknowledged: 1, dropped, ..RowStates::default() };
    assert_eq!(stats.rows, rows);
    group.leave(A, 0);
    join(&mut group, B, 100);
    assert_eq!(dispatch(&mut group, 100), [went(B, "c", 2), went(B, "d", 2), went(B, "e", 1)]);
    assert_eq!(group.stats(0).redeliveries, 2);
    let facts: Vec<_> = group.consumers().map(|facts| (facts.consumer, facts.in_flight, facts.delivered)).collect();
    let tally = Tally { units: 3, tokens: 28 };
    assert_eq!(facts, [(B, tally, tally)]);
}

#[test]
fn a_heartbeat_says_what_is_waited_for() {
    let reason = |group: &Group, consumer| group.waiting_for(consumer).map(|waiting| waiting.reason);
    let mut group = group_with(&[]);
    join(&mut group, A, 10);
    join(&mut group, B, 0);
    assert_eq!(reason(&group, C), None);
    assert_eq!(reason(&group, A), Some(WaitReason::NothingQueued));
    group.push(1, units(&[("a", 8)]), 0);
    assert_eq!(reason(&group, A), Some(WaitReason::NotWaiting));
    assert_eq!(reason(&group, B), Some(WaitReason::NoCredit));
    dispatch(&mut group, 0);
    assert_eq!(reason(&group, B), Some(WaitReason::AllOut));
    let at_others = group.waiting_for(B).map(|waiting| (waiting.in_flight.units, waiting.leased_to_others));
    assert_eq!(at_others, Some((0, Tally { units: 1, tokens: 8 })));
    group.push(2, units(&[("b", 3)]), 0);
    assert_eq!(reason(&group, A), Some(WaitReason::CreditShort { head_tokens: 3, left_tokens: 2 }));
    group.apply_ack(&id("a"), 1);
    dispatch(&mut group, 0);
    group.nack(A, &ids(&["b"]), Some(100), 5);
    assert_eq!(reason(&group, A), Some(WaitReason::Delayed { until_ms: 105 }));
}

#[test]
fn idleness_is_counted_from_the_last_consumers_end() {
    let mut group = ConsumerGroup::<u64, &str>::new(definition(), bounds(), 0, 3);
    assert_eq!(group.idle_since_ms(), Some(3));
    join(&mut group, A, 1);
    join(&mut group, B, 1);
    group.leave(A, 8);
    assert_eq!(group.idle_since_ms(), None);
    group.leave(B, 9);
    assert_eq!(group.idle_since_ms(), Some(9));
}
