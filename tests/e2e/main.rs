//! The whole service over real gRPC on loopback, with a clock that only the tests move.

#![expect(clippy::unwrap_used, clippy::expect_used, reason = "a test fails by panicking")]

#[expect(dead_code, reason = "other tests use more of it")]
#[path = "../support/served.rs"]
mod served;
#[path = "../support/service.rs"]
mod service;

mod bad_input;
mod credit;
mod crowds;
mod disk;
mod drain;
mod durability;
mod evict;
mod figures;
mod fleet;
mod gradient;
mod groups;
mod groups_ends;
mod groups_units;
mod hostile;
mod hostile_memory;
mod hostile_resets;
mod hostile_sizes;
mod inspect;
mod inspect_ledger;
mod inspect_metrics;
mod inspect_watch;
mod life;
mod life_clock;
mod life_conflicts;
mod life_ends;
mod life_runs;
mod life_seal;
mod memory;
mod not_yet;
mod pace;
mod queue;
mod queue_acks;
mod queue_credit;
mod queue_groups;
mod queue_heartbeats;
mod queue_large;
mod queue_taker;
mod reasons;
mod replay;
mod replay_drive;
mod replay_late;
mod retention;
mod seek;
mod smoke;
mod staleness;
mod steps;
mod steps_ends;
