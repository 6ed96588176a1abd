//! Who is given memory when it is short.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use super::Growth::{Ends, GoesOn, GoesOnSealed};
use super::*;

fn run() -> RunId {
    RunId::parse("run").unwrap()
}

#[test]
fn shares_are_given_back_when_the_last_holder_lets_go() {
    let memory = Memory::new(1000);
    let share = memory.share(&run(), Position(1), 7);
    share.set(300);
    share.set(100);
    let of_a_unit = Arc::clone(&share);
    share.closed();
    drop(share);
    assert_eq!((memory.used_bytes(), memory.oldest_open_ms(&run())), (100, None));
    drop(of_a_unit);
    let tombstones = memory.holding();
    tombstones.add(50);
    tombstones.subtract(20);
    assert_eq!(memory.used_bytes(), 30);
    drop(tombstones);
    assert_eq!(memory.used_bytes(), 0);
}

#[test]
fn the_oldest_open_attempt_of_a_run_is_known() {
    let memory = Memory::new(1000);
    let shares: Vec<_> = (1..4).map(|at| memory.share(&run(), Position(at), at * 10)).collect();
    assert_eq!(memory.oldest_open_ms(&run()), Some(10));
    shares[0].closed();
    assert_eq!(memory.oldest_open_ms(&run()), Some(20));
    drop(shares);
    assert_eq!(memory.oldest_open_ms(&run()), None);
}

#[test]
fn new_groups_are_refused_before_calls_are() {
    let memory = Memory::new(1000);
    let share = memory.share(&run(), Position(1), 0);
    share.set(800);
    assert_eq!(memory.judge_opening(false), Ok(()));
    share.set(801);
    let refusal = memory.judge_opening(false).unwrap_err();
    let expected = (Reason::MemoryFull, Some(limits::MEMORY_RETRY_AFTER_MS));
    assert_eq!((refusal.reason, refusal.retry_after_ms), expected);
    assert_eq!(memory.judge_growth(&share, GoesOn, 199, 0), Ok(()));
    share.set(1060);
    assert_eq!((memory.judge_opening(true), memory.is_short()), (Ok(()), true));
    share.set(1061);
    assert!(memory.judge_opening(true).is_err(), "a group without end");
}

#[test]
fn above_the_budget_the_oldest_and_the_sealed_go_on_until_the_reserve_is_used() {
    let memory = Memory::new(1000);
    let shares: Vec<_> = (0..100).map(|position| memory.share(&run(), Position(position), 0)).collect();
    shares[99].set(1000);
    let taken = |share: usize, growth, bytes| memory.judge_growth(&shares[share], growth, bytes, 0).is_ok();
    assert!(taken(63, GoesOn, 80) && !taken(64, GoesOn, 1), "64 of them");
    assert!(taken(64, GoesOnSealed, 80) && !taken(64, GoesOnSealed, 81), "the sealed, from one part");
    let the_oldest = taken(0, GoesOn, 240) && !taken(0, GoesOn, 241) && !taken(1, GoesOn, 81);
    assert!(the_oldest, "the oldest, from all of it");
    shares[0].closed();
    assert!(taken(64, GoesOn, 1) && taken(1, GoesOn, 240), "others are the oldest then");
}

#[test]
fn the_quiet_give_up_their_place_until_they_ask() {
    let memory = Memory::new(1000);
    let shares: Vec<_> = (0..3).map(|position| memory.share(&run(), Position(position), 0)).collect();
    shares[2].set(1081);
    let taken = |share: usize, now_ms| memory.judge_growth(&shares[share], GoesOn, 1, now_ms).is_ok();
    assert!(!taken(2, 0) && !taken(1, 0) && taken(0, 0));
    let later = limits::MEMORY_QUIET_MS;
    assert!(taken(2, later), "the others are quiet");
    assert!(taken(1, later) && !taken(2, later), "an older one asks again");
}

/// Each was the oldest for a while, has used up what there is for that, and asks again.
#[test]
fn the_very_oldest_has_what_nobody_else_can_use_up() {
    let memory = Memory::new(1000);
    let shares: Vec<_> = (0..4).map(|position| memory.share(&run(), Position(position), 0)).collect();
    shares[3].set(1000);
    let mut now_ms = 0;
    for share in &shares[1..] {
        now_ms += limits::MEMORY_QUIET_MS;
        while memory.judge_growth(share, GoesOn, 1, now_ms).is_ok() {
            share.add(1);
        }
    }
    assert_eq!(memory.used_bytes(), 1160);
    let taken = |share: usize, bytes| memory.judge_growth(&shares[share], GoesOn, bytes, now_ms).is_ok();
    assert!(!taken(1, 1) && !taken(3, 1) && taken(0, 80) && !taken(0, 81));
    shares[0].closed();
    assert!(taken(1, 80) && !taken(2, 1), "the next one is the oldest");
}

#[test]
fn what_ends_a_rollout_is_taken_unless_it_is_large_and_memory_short() {
    let memory = Memory::new(1000);
    let share = memory.share(&run(), Position(1), 0);
    share.set(1_000_000);
    assert_eq!(memory.judge_growth(&share, Ends, limits::MEMORY_END_BYTES, 0), Ok(()));
    assert!(memory.judge_growth(&share, Ends, limits::MEMORY_END_BYTES + 1, 0).is_err());
    share.set(1000);
    assert_eq!(memory.judge_growth(&share, Ends, 500, 0), Ok(()));
}

#[test]
fn what_leaves_to_come_back_has_not_ended_until_its_rollout_has() {
    let memory = Memory::new(1000);
    let share = memory.share(&run(), Position(1), 0);
    share.set(900);
    share.leave(700);
    assert_eq!((memory.used_bytes(), memory.given_back_bytes(), share.whole_bytes()), (200, 0, 900));
    share.come_back(700);
    assert_eq!((memory.used_bytes(), memory.given_back_bytes(), share.whole_bytes()), (900, 0, 900));
    share.leave(700);
    drop(share);
    assert_eq!((memory.used_bytes(), memory.given_back_bytes()), (0, 900));
}
