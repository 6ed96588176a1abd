//! One history, struck by each fault at each of its operations.

use super::super::faulty::Fault;
use super::model::{Named, World};
use super::*;

/// Appends, rolls, truncates, reopens; ends early when the log fails. True if the fault struck, or is still to come.
fn history(world: &mut World, strike: Option<(u64, Fault)>) -> bool {
    if let Some((operation, fault)) = strike {
        world.storage.fail_in(operation, fault);
    }
    for _ in 0..2 {
        let log = world.open();
        for step in 0..14 {
            world.append(&log, 1 + step % 3);
            if !world.turn(&log) {
                return true;
            }
            if step % 5 == 4 {
                world.truncate(&log);
            }
        }
        if log.close().is_err() {
            return true;
        }
    }
    world.storage.heal()
}

#[test]
fn nothing_answered_is_lost_wherever_a_fault_strikes() {
    for seed in 0..seeds(12) {
        let mut whole = World::new(seed, options());
        history(&mut whole, None);
        let operations = whole.storage.operations();
        assert!(operations > 60, "{operations}");
        for fault in [Fault::Error, Fault::Full, Fault::Crash] {
            for operation in 0..operations {
                let _named = Named(format!("seed {seed}, {fault:?} at operation {operation}"));
                let mut world = World::new(seed, options());
                history(&mut world, Some((operation, fault)));
                world.end_life();
                // A second fault strikes while the log is being mended.
                let second = world.below(30);
                world.storage.fail_in(second, fault);
                let log = world.open();
                world.append(&log, 3);
                turn_all(&log);
                world.end_life();
                drop(log);
                drop(world.open());
            }
        }
    }
}

#[test]
fn a_disk_that_runs_full_at_any_size_loses_nothing() {
    for capacity in (0..200_000_u64).step_by(1111) {
        let _named = Named(format!("capacity {capacity}"));
        let mut world = World::new(capacity, options());
        world.storage.set_capacity_bytes(capacity);
        history(&mut world, None);
        world.storage.set_capacity_bytes(u64::MAX);
        world.end_life();
        drop(world.open());
    }
}
