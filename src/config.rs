//! The service's configuration: flags over environment (`HEDGEROW_…`) over a TOML file over defaults.
//!
//! Every key is checked here, before anything starts: an unknown key, a value of the wrong type or one that this
//! release cannot honour is an error that names the key. Nothing else reads the environment. What a user may move of
//! `limits` becomes a key here.

use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};

use figment::error::Kind;
use figment::providers::{Env, Format as _, Serialized, Toml};
use figment::{Figment, Source};
use serde::{Deserialize, Serialize};

use crate::limits;

/// What variables of the environment begin with.
const ENVIRONMENT_PREFIX: &str = "HEDGEROW_";
/// Variables with the prefix that belong to the command line's clients, not to the service.
const CLIENT_VARIABLES: [&str; 2] = ["config", "address"];

/// The effective configuration of the service.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Config {
    /// Where gRPC listens; port 0 takes a free one.
    pub listen: SocketAddr,
    /// Where HTTP (metrics, health) listens; port 0 takes a free one.
    pub http_listen: SocketAddr,
    /// Listen on other addresses than loopback, although nothing is encrypted and nobody is asked who they are.
    pub allow_insecure_public_listen: bool,
    /// Where the service keeps its log, unless it is in memory.
    pub data_directory: PathBuf,
    /// What an answer waits for.
    pub durability: Durability,
    /// What the log may take on disk, in bytes.
    pub log_budget_bytes: u64,
    /// Size of the files of the log, in bytes.
    pub log_segment_bytes: u64,
    /// What the process may hold in memory, in bytes: three quarters of it are for rollouts, groups and tombstones, the rest is for
    /// what clients send and are sent.
    pub memory_budget_bytes: u64,
    /// How long units from before a restart are kept for the trainers that hold them, in milliseconds; 0: not at all.
    pub restart_grace_ms: u64,
    /// How log lines look.
    pub log_format: LogFormat,
    /// Which log lines are written, as `tracing` filters say it: `info`, `hedgerow=debug`.
    pub log_filter: String,
}

/// What an answer waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Durability {
    /// For nothing: what is answered is lost in a crash.
    Memory,
    /// For the operating system: what is answered outlives the process, not the machine.
    Os,
    /// For the disk: what is answered outlives the machine's end.
    Fsync,
}

impl Durability {
    /// As a configuration says it.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Memory => "memory",
            Self::Os => "os",
            Self::Fsync => "fsync",
        }
    }
}

/// How log lines look.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum LogFormat {
    /// For people.
    Human,
    /// One JSON object a line.
    Json,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            listen: SocketAddr::from((Ipv4Addr::LOCALHOST, 50051)),
            http_listen: SocketAddr::from((Ipv4Addr::LOCALHOST, 9464)),
            allow_insecure_public_listen: false,
            data_directory: PathBuf::from("./hedgerow-data"),
            durability: Durability::Fsync,
            log_budget_bytes: limits::LOG_BUDGET_BYTES,
            log_segment_bytes: limits::LOG_SEGMENT_BYTES,
            memory_budget_bytes: limits::MEMORY_BUDGET_BYTES,
            restart_grace_ms: limits::RESTART_GRACE_MS,
            log_format: LogFormat::Human,
            log_filter: "info".to_owned(),
        }
    }
}

/// What flags say; what they leave out comes from elsewhere.
#[derive(Clone, Debug, Default, Serialize, clap::Args)]
pub struct ConfigFlags {
    /// Where gRPC listens [default: 127.0.0.1:50051]
    #[arg(long, value_name = "ADDRESS:PORT")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub listen: Option<SocketAddr>,
    /// Where metrics and health listen [default: 127.0.0.1:9464]
    #[arg(long, value_name = "ADDRESS:PORT")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub http_listen: Option<SocketAddr>,
    /// Listen on other addresses than loopback, unencrypted and open to everybody
    #[arg(long, num_args = 0, default_missing_value = "true")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub allow_insecure_public_listen: Option<bool>,
    /// Where to keep the log, unless it is in memory [default: ./hedgerow-data]
    #[arg(long, value_name = "DIRECTORY")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub data_directory: Option<PathBuf>,
    /// What an answer outlives: "memory" nothing, "os" the process, "fsync" the machine's end [default: fsync]
    #[arg(long, value_name = "WHAT")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub durability: Option<String>,
    /// Bytes that the log may take on disk [default: 68719476736]
    #[arg(long, value_name = "BYTES")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub log_budget_bytes: Option<u64>,
    /// Bytes of each file of the log [default: 67108864]
    #[arg(long, value_name = "BYTES")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub log_segment_bytes: Option<u64>,
    /// Bytes that the process may hold in memory, three quarters of them for rollouts [default: 4294967296]
    #[arg(long, value_name = "BYTES")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memory_budget_bytes: Option<u64>,
    /// Milliseconds for which units from before a restart are kept for the trainers that hold them [default: 10000]
    #[arg(long, value_name = "MILLISECONDS")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub restart_grace_ms: Option<u64>,
    /// How log lines look [default: human]
    #[arg(long, value_name = "FORMAT")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub log_format: Option<LogFormat>,
    /// Which log lines to write, such as "info" or "hedgerow=debug" [default: info]
    #[arg(long, value_name = "FILTER")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub log_filter: Option<String>,
}

/// What is wrong with a configuration, in sentences that name the key.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct ConfigError(String);

impl Config {
    /// The effective configuration, checked.
    ///
    /// # Errors
    /// If the file cannot be read, a key is unknown, or a value is of the wrong type or cannot be honoured.
    pub fn load(file: Option<&Path>, flags: &ConfigFlags) -> Result<Self, ConfigError> {
        let mut layers = Figment::from(Serialized::defaults(Self::default()));
        if let Some(path) = file {
            if let Err(error) = std::fs::read(path) {
                return Err(ConfigError(format!("cannot read {}: {error}", path.display())));
            }
            layers = layers.merge(Toml::file_exact(path));
        }
        let config: Self = layers
            .merge(environment())
            .merge(Serialized::defaults(flags))
            .extract()
            .map_err(|errors| ConfigError(sentences(errors)))?;
        config.check()?;
        Ok(config)
    }

    fn check(&self) -> Result<(), ConfigError> {
        for (key, address) in [("listen", self.listen), ("http_listen", self.http_listen)] {
            if !address.ip().is_loopback() && !self.allow_insecure_public_listen {
                return Err(ConfigError(format!(
                    "{key}: {address} can be reached from other machines, and this release neither encrypts nor asks \
                     who connects; listen on 127.0.0.1, or set allow_insecure_public_listen = true behind a network \
                     that you trust"
                )));
            }
        }
        if self.listen == self.http_listen && self.listen.port() != 0 {
            return Err(ConfigError(format!("http_listen: {} is taken by listen", self.http_listen)));
        }
        self.check_log()?;
        if self.memory_budget_bytes < limits::MEMORY_BUDGET_BYTES_MIN {
            return Err(ConfigError(format!(
                "memory_budget_bytes: {} is less than {}, in which no service can work",
                self.memory_budget_bytes,
                limits::MEMORY_BUDGET_BYTES_MIN
            )));
        }
        if let Err(error) = tracing_subscriber::EnvFilter::try_new(&self.log_filter) {
            return Err(ConfigError(format!("log_filter: {:?} is no filter: {error}", self.log_filter)));
        }
        Ok(())
    }

    fn check_log(&self) -> Result<(), ConfigError> {
        let segments = limits::LOG_SEGMENT_BYTES_MIN_SET..=limits::LOG_SEGMENT_BYTES_MAX;
        if !segments.contains(&self.log_segment_bytes) {
            return Err(ConfigError(format!(
                "log_segment_bytes: {} is not between {} and {}",
                self.log_segment_bytes,
                segments.start(),
                segments.end()
            )));
        }
        let least = self.log_segment_bytes * limits::LOG_BUDGET_SEGMENTS_MIN;
        if self.log_budget_bytes < least {
            return Err(ConfigError(format!(
                "log_budget_bytes: {} is less than {least}, {} files of log_segment_bytes",
                self.log_budget_bytes,
                limits::LOG_BUDGET_SEGMENTS_MIN
            )));
        }
        Ok(())
    }

    /// The configuration as a TOML file would say it.
    #[must_use]
    pub fn to_toml(&self) -> String {
        let Self {
            listen,
            http_listen,
            allow_insecure_public_listen,
            data_directory,
            durability,
            log_budget_bytes,
            log_segment_bytes,
            memory_budget_bytes,
            restart_grace_ms,
            log_format,
            log_filter,
        } = self;
        let durability = durability.as_str();
        let log_format = match log_format {
            LogFormat::Human => "human",
            LogFormat::Json => "json",
        };
        format!(
            "listen = \"{listen}\"\nhttp_listen = \"{http_listen}\"\n\
             allow_insecure_public_listen = {allow_insecure_public_listen}\ndata_directory = {data_directory:?}\n\
             durability = \"{durability}\"\nlog_budget_bytes = {log_budget_bytes}\nlog_segment_bytes = {log_segment_bytes}\n\
             memory_budget_bytes = {memory_budget_bytes}\nrestart_grace_ms = {restart_grace_ms}\n\
             log_format = \"{log_format}\"\nlog_filter = {log_filter:?}\n"
        )
    }
}

/// The variables that are meant for the configuration. In Kubernetes a service named `hedgerow` puts
/// `HEDGEROW_SERVICE_HOST`, `HEDGEROW_PORT_…` and their like into every container: those are not ours.
fn environment() -> Env {
    Env::prefixed(ENVIRONMENT_PREFIX).filter(|name| {
        let name = name.as_str().to_ascii_lowercase();
        let of_kubernetes = name == "port" || name.starts_with("port_") || name.starts_with("service_");
        !of_kubernetes && !CLIENT_VARIABLES.contains(&name.as_str())
    })
}

/// One line for each error, with its key and where the value came from.
fn sentences(errors: figment::Error) -> String {
    let lines: Vec<String> = errors
        .into_iter()
        .map(|error| {
            let key = error.path.join(".");
            let from = match error.metadata.as_ref().map(|from| (&from.source, &from.name)) {
                None => String::new(),
                Some((Some(Source::Code(_)), _)) => " (on the command line)".to_owned(),
                Some((Some(Source::File(path)), _)) => format!(" (in {})", path.display()),
                Some(_) => format!(" (in the environment, {ENVIRONMENT_PREFIX}{})", key.to_ascii_uppercase()),
            };
            let separator = if key.is_empty() { "" } else { ": " };
            format!("{key}{separator}{}{from}", problem(&error.kind))
        })
        .collect();
    lines.join("\n")
}

/// What is wrong with a key or its value.
fn problem(kind: &Kind) -> String {
    if let Kind::UnknownField(_, known) = kind {
        format!("is no key; the keys are {}", known.join(", "))
    } else if let Kind::UnknownVariant(found, known) = kind {
        format!("{found:?} is none of {}", known.join(", "))
    } else {
        kind.to_string().trim_end().to_owned()
    }
}

#[cfg(test)]
mod tests {
    #![expect(clippy::expect_used, reason = "a test fails by panicking")]

    use super::*;

    fn load(toml: &str, flags: &ConfigFlags) -> Result<Config, ConfigError> {
        let path = std::env::temp_dir().join(format!("hedgerow-config-{}-{:p}.toml", std::process::id(), toml));
        std::fs::write(&path, toml).expect("a temporary file");
        let config = Config::load(Some(&path), flags);
        std::fs::remove_file(&path).expect("the temporary file");
        config
    }

    fn problem_of(toml: &str) -> String {
        load(toml, &ConfigFlags::default()).expect_err("an error").to_string()
    }

    #[test]
    fn flags_beat_the_file_which_beats_the_defaults() {
        let flags = ConfigFlags { log_filter: Some("debug".to_owned()), ..ConfigFlags::default() };
        let config = load("log_filter = \"warn\"\nlisten = \"127.0.0.1:7\"", &flags).expect("valid");
        assert_eq!(config.log_filter, "debug");
        assert_eq!(config.listen.port(), 7);
        assert_eq!(config.http_listen.port(), 9464);
        assert_eq!(load(&config.to_toml(), &ConfigFlags::default()).expect("valid"), config);
    }

    #[test]
    fn errors_name_the_key() {
        assert!(problem_of("liisten = 3").contains("liisten"), "{}", problem_of("liisten = 3"));
        assert!(problem_of("listen = 3").starts_with("listen: "), "{}", problem_of("listen = 3"));
        assert!(problem_of("durability = \"paper\"").starts_with("durability: "));
        assert!(problem_of("log_budget_bytes = 1000").starts_with("log_budget_bytes: 1000 is less"));
        assert!(problem_of("log_segment_bytes = 1000").starts_with("log_segment_bytes: 1000 is not between"));
        assert!(problem_of("memory_budget_bytes = 1000").starts_with("memory_budget_bytes: 1000 is less"));
        assert!(problem_of("listen = \"0.0.0.0:1\"").contains("allow_insecure_public_listen"));
        assert!(load("listen = \"0.0.0.0:1\"\nallow_insecure_public_listen = true", &ConfigFlags::default()).is_ok());
        let missing = Config::load(Some(Path::new("/no/such/file")), &ConfigFlags::default());
        assert!(missing.expect_err("an error").to_string().contains("/no/such/file"));
    }
}
