//! The service under test, with its budgets, and what it uses.

use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::task::{JoinError, JoinHandle};

use crate::served::Served;

/// How often it is looked at.
const LOOK_MS: u64 = 200;

/// What the service may use.
#[derive(Clone, Copy)]
pub(crate) struct Budgets {
    pub(crate) memory_bytes: u64,
    pub(crate) log_bytes: u64,
    pub(crate) segment_bytes: u64,
}

/// The service under test, ended with its folder.
pub(crate) struct Soaked {
    // Dropped in this order.
    pub(crate) served: Served,
    folder: Folder,
}

impl Soaked {
    pub(crate) fn start(budgets: Budgets) -> Self {
        let directory = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(format!("soak-{}", std::process::id()));
        // What an earlier run may have left.
        let _ = std::fs::remove_dir_all(&directory);
        let [memory, log, segment] =
            [budgets.memory_bytes, budgets.log_bytes, budgets.segment_bytes].map(|bytes| bytes.to_string());
        let arguments = [
            ["--data-directory", directory.to_str().expect("a path in letters")],
            ["--memory-budget-bytes", &memory],
            ["--log-budget-bytes", &log],
            ["--log-segment-bytes", &segment],
            // It is not read.
            ["--log-filter", "off,hedgerow::cli=info"],
        ];
        Self { served: Served::start(arguments.as_flattened()), folder: Folder(directory) }
    }

    /// Bytes of its files.
    fn log_bytes(&self) -> u64 {
        let files = std::fs::read_dir(&self.folder.0).into_iter().flatten().flatten();
        files.filter_map(|file| file.metadata().ok()).map(|data| data.len()).sum()
    }

    /// What its metrics say of this gauge or counter.
    async fn gauge(&self, name: &str) -> f64 {
        let mut text = String::new();
        let asked = async {
            let mut connection = TcpStream::connect(&self.served.http).await?;
            connection.write_all(b"GET /metrics HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n").await?;
            connection.read_to_string(&mut text).await
        };
        asked.await.expect("metrics are answered");
        let value = text.lines().find_map(|line| line.strip_prefix(name)?.trim().parse().ok());
        value.expect("the gauge is there")
    }
}

/// A folder that is removed when nobody writes to it any more.
struct Folder(PathBuf);

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// The most that was used.
#[derive(Default)]
pub(crate) struct Usage {
    pub(crate) counted_bytes_max: u64,
    pub(crate) resident_bytes_max: u64,
    pub(crate) log_bytes_max: u64,
    /// Times that a rollout's tokens have left memory.
    pub(crate) evictions: u64,
    now: (u64, u64, u64),
}

impl Usage {
    /// Looks once, a moment from now.
    pub(crate) async fn look(&mut self, soaked: &Soaked) {
        tokio::time::sleep(Duration::from_millis(LOOK_MS)).await;
        let counted = soaked.gauge("hedgerow_resident_bytes").await as u64;
        self.evictions = soaked.gauge("hedgerow_evictions_total").await as u64;
        self.now = (counted, soaked.served.resident_bytes(), soaked.log_bytes());
        self.counted_bytes_max = self.counted_bytes_max.max(self.now.0);
        self.resident_bytes_max = self.resident_bytes_max.max(self.now.1);
        self.log_bytes_max = self.log_bytes_max.max(self.now.2);
    }

    /// Looks until this has ended.
    pub(crate) async fn look_until<T>(&mut self, soaked: &Soaked, task: JoinHandle<T>) -> Result<T, JoinError> {
        while !task.is_finished() {
            self.look(soaked).await;
        }
        task.await
    }
}

impl fmt::Display for Usage {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let megabytes = |bytes: u64| bytes / 1_000_000;
        let (counted, resident, log) = self.now;
        write!(
            formatter,
            "{} MB counted (most {}), {} MB resident (most {}), log {} MB (most {})",
            megabytes(counted),
            megabytes(self.counted_bytes_max),
            megabytes(resident),
            megabytes(self.resident_bytes_max),
            megabytes(log),
            megabytes(self.log_bytes_max)
        )
    }
}
