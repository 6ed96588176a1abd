//! `hedgerow serve`: runs the service until it is told to stop.
//!
//! The first SIGINT or SIGTERM drains: streams end with a delay after which to come back, acks are taken to the end. The
//! second one stops at once.

use std::hash::{BuildHasher as _, Hasher as _, RandomState};
use std::io::IsTerminal as _;
use std::path::Path;
use std::sync::Arc;

use clap::Args;
use tokio::signal::unix::{SignalKind, signal};

use super::{Failure, block_on};
use crate::config::{self, Config, ConfigFlags, LogFormat};
use crate::log::memory::MemoryLog;
use crate::log::segments::storage::Directory;
use crate::log::segments::{Durability, Options};
use crate::service::{self, LogSource, ServiceOptions};

/// What `serve` takes.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  hedgerow serve
  hedgerow serve --listen 127.0.0.1:6000 --log-format json
  hedgerow serve --data-directory /var/lib/hedgerow
  hedgerow serve --durability memory
  HEDGEROW_LOG_FILTER=hedgerow=debug hedgerow serve --config hedgerow.toml

Flags beat the environment (HEDGEROW_LISTEN and so on), which beats the file, which beats the defaults.")]
pub struct ServeArguments {
    /// What flags say of the configuration
    #[command(flatten)]
    pub flags: ConfigFlags,
    /// Give up what is damaged in the log, and start with the rest: answered records are lost, and it is said which
    #[arg(long)]
    pub salvage: bool,
}

/// Runs the service.
///
/// # Errors
/// [`Failure::Usage`] for a bad configuration, [`Failure::Failed`] if it cannot listen.
pub fn run(file: Option<&Path>, arguments: &ServeArguments) -> Result<(), Failure> {
    let config = Config::load(file, &arguments.flags).map_err(|error| Failure::Usage(error.to_string()))?;
    start_logging(&config)?;
    if let Err(error) = service::take_small_pages() {
        tracing::warn!(%error, "memory is taken in pages of any size, so that an answer may wait for a large one");
    }
    block_on(serve(config, arguments.salvage))
}

async fn serve(config: Config, salvage: bool) -> Result<(), Failure> {
    let mut interrupt = signal(SignalKind::interrupt())?;
    let mut terminate = signal(SignalKind::terminate())?;
    let durability = config.durability.as_str();
    let options = ServiceOptions {
        log: log(&config, salvage)?,
        grpc: config.listen,
        http: Some(config.http_listen),
        memory_budget_bytes: config.memory_budget_bytes,
        restart_grace_ms: config.restart_grace_ms,
        ..ServiceOptions::default()
    };
    let started = tokio::select! {
        started = service::start(options) => started,
        // Nobody was answered anything yet.
        _ = interrupt.recv() => return Ok(()),
        _ = terminate.recv() => return Ok(()),
    };
    let running = started.map_err(|error| Failure::Failed(error.to_string()))?;
    match running.http_address {
        Some(http) => tracing::info!(grpc = %running.grpc_address, %http, durability, "listening"),
        None => tracing::info!(grpc = %running.grpc_address, durability, "listening"),
    }
    tokio::select! {
        _ = interrupt.recv() => {}
        _ = terminate.recv() => {}
        failure = running.log_failed() => {
            tracing::error!(failure, "the log has failed, so that nothing can be answered any more");
            return Err(Failure::Failed(format!("the log has failed: {failure}")));
        }
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

/// Where records go.
fn log(config: &Config, salvage: bool) -> Result<LogSource, Failure> {
    let durability = match config.durability {
        config::Durability::Memory if salvage => {
            return Err(Failure::Usage("--salvage: a log in memory has nothing to salvage".to_owned()));
        }
        config::Durability::Memory => return Ok(LogSource::Given(Arc::new(MemoryLog::forgetting()))),
        config::Durability::Os => Durability::Os,
        config::Durability::Fsync => Durability::Fsync,
    };
    let directory = &config.data_directory;
    let storage = Directory::new(directory.clone())
        .map_err(|error| Failure::Failed(format!("data_directory: {}: {error}", directory.display())))?;
    // Distinguishes this log from any other; a hasher's keys are random.
    let new_log_id = RandomState::new().build_hasher().finish();
    let options = Options {
        durability,
        salvage,
        budget_bytes: config.log_budget_bytes,
        segment_bytes: config.log_segment_bytes,
        ..Options::new(new_log_id)
    };
    Ok(LogSource::Disk { storage: Arc::new(storage), options })
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
