//! Hedgerow turns the forest of model calls of an agent's rollout into training rows, live, over gRPC.
//!
//! Harness workers report each model call as it happens, late, twice and out of order. The service grows each
//! rollout's forest, and streams finished rows to trainers, in which every sampled token is trained exactly once,
//! under exactly the context it was sampled in. `src/ARCHITECTURE.md` is the map of this crate.

pub mod cli;
pub mod config;
pub mod error;
pub mod forest;
pub mod group;
pub mod http;
pub mod ids;
pub mod limits;
pub mod log;
pub mod proto;
pub mod queue;
pub mod rollout;
pub mod rpc;
pub mod service;
pub mod store;
pub mod telemetry;
