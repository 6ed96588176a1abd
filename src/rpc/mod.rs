//! The gRPC edge: conversion between wire and domain, and the one map from refusals to gRPC's status.

pub mod convert;
pub mod status;
