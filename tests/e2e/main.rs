//! The whole service over real gRPC on loopback, with a clock that only the tests move.

#![expect(clippy::unwrap_used, clippy::expect_used, reason = "a test fails by panicking")]

#[path = "../support/service.rs"]
mod service;

mod smoke;
