//! `hedgerow serve`: runs the service until it is told to stop.
//!
//! The first SIGINT or SIGTERM drains: streams end with a delay after which to come back, acks are taken to the end. The
//! second one stops at once.

use std::io::IsTerminal as _;
use std::path::Path;

use clap::Args;
use tokio::signal::unix::{SignalKind, signal};

use super::{Failure, block_on};
use crate::config::{Config, ConfigFlags, LogFormat};
use crate::service::{self, ServiceOptions};

/// What `serve` takes.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  hedgerow serve
  hedgerow serve --listen 127.0.0.1:6000 --log-format json
  HEDGEROW_LOG_FILTER=hedgerow=debug hedgerow serve --config hedgerow.toml

Flags beat the environment (HEDGEROW_LISTEN and so on), which beats the file, which beats the defaults.")]
pub struct ServeArguments {
    /// What flags say of the configuration
    #[command(flatten)]
    pub flags: ConfigFlags,
}

/// Runs the service.
///
/// # Errors
/// [`Failure::Usage`] for a bad configuration, [`Failure::Failed`] if it cannot listen.
pub fn run(file: Option<&Path>, arguments: &ServeArguments) -> Result<(), Failure> {
    let config = Config::load(file, &arguments.flags).map_err(|error| Failure::Usage(error.to_string()))?;
    start_logging(&config)?;
    block_on(serve(config))
}

async fn serve(config: Config) -> Result<(), Failure> {
    let mut interrupt = signal(SignalKind::interrupt())?;
    let mut terminate = signal(SignalKind::terminate())?;
    let options = ServiceOptions {
        grpc: config.listen,
        http: Some(config.http_listen),
        memory_budget_bytes: config.memory_budget_bytes,
        ..ServiceOptions::default()
    };
    let running = service::start(options).await.map_err(|error| Failure::Failed(error.to_string()))?;
    match running.http_address {
        Some(http) => tracing::info!(grpc = %running.grpc_address, %http, durability = "memory", "listening"),
        None => tracing::info!(grpc = %running.grpc_address, durability = "memory", "listening"),
    }
    tokio::select! {
        _ = interrupt.recv() => {}
        _ = terminate.recv() => {}
    }
    tracing::info!("draining; a second signal stops at once");
    tokio::select! {
        () = running.stop() => {
            tracing::info!("stopped");
            Ok(())
        }
        _ = interrupt.recv() => Err(Failure::Failed("stopped before everything was drained".to_owned())),
        _ = terminate.recv() => Err(Failure::Failed("stopped before everything was drained".to_owned())),
    }
}

fn start_logging(config: &Config) -> Result<(), Failure> {
    let filter = tracing_subscriber::EnvFilter::try_new(&config.log_filter)
        .map_err(|error| Failure::Usage(format!("log_filter: {error}")))?;
    let lines = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_ansi(std::io::stderr().is_terminal())
        .with_writer(std::io::stderr);
    let started = match config.log_format {
        LogFormat::Human => lines.try_init(),
        LogFormat::Json => lines.json().flatten_event(true).try_init(),
    };
    started.map_err(|error| Failure::Failed(format!("cannot start logging: {error}")))
}
