//! The binary: parses the command line, runs it, and gives its exit code.

use std::process::ExitCode;

use clap::Parser as _;

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> ExitCode {
    hedgerow::cli::run(hedgerow::cli::Cli::parse())
}
