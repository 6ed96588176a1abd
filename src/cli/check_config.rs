//! `hedgerow check-config`: says whether the configuration is valid and what is in effect.

use std::path::Path;

use clap::Args;

use super::{Failure, print};
use crate::config::{Config, ConfigFlags};

/// What `check-config` takes.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  hedgerow check-config --config hedgerow.toml
  HEDGEROW_LOG_FILTER=debug hedgerow check-config --json

Exit codes: 0 valid, 2 not valid.")]
pub struct CheckConfigArguments {
    /// Flags of `serve`, to check them with the rest
    #[command(flatten)]
    pub flags: ConfigFlags,
    /// Print the effective configuration as JSON
    #[arg(long)]
    pub json: bool,
}

/// Checks and prints the configuration.
///
/// # Errors
/// [`Failure::Usage`] if the configuration is not valid.
pub fn run(file: Option<&Path>, arguments: &CheckConfigArguments) -> Result<(), Failure> {
    let config = Config::load(file, &arguments.flags).map_err(|error| Failure::Usage(error.to_string()))?;
    if arguments.json {
        let json = serde_json::to_string(&config).map_err(|error| Failure::Failed(error.to_string()))?;
        return print(&format!("{json}\n"));
    }
    print(&format!("configuration is valid\n\n{}", config.to_toml()))
}
