//! The service under test, a process of its own, and what it uses.

use std::fmt;
use std::io::{BufRead as _, BufReader};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::task::{JoinError, JoinHandle};

/// How often it is looked at.
const LOOK_MS: u64 = 200;

/// What the service may use.
#[derive(Clone, Copy)]
pub(crate) struct Budgets {
    pub(crate) memory_bytes: u64,
    pub(crate) log_bytes: u64,
    pub(crate) segment_bytes: u64,
}

/// A served process, ended with its folder when the test has ended.
pub(crate) struct Served {
    process: Child,
    pub(crate) address: String,
    http: String,
    directory: PathBuf,
}

impl Served {
    pub(crate) fn start(budgets: Budgets) -> Self {
        let directory = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(format!("soak-{}", std::process::id()));
        // What an earlier run may have left.
        let _ = std::fs::remove_dir_all(&directory);
        let mut command = Command::new(env!("CARGO_BIN_EXE_hedgerow"));
        command.args(["serve", "--listen", "127.0.0.1:0", "--http-listen", "127.0.0.1:0", "--log-format", "json"]);
        command.arg("--data-directory").arg(&directory);
        for (flag, bytes) in [
            ("--memory-budget-bytes", budgets.memory_bytes),
            ("--log-budget-bytes", budgets.log_bytes),
            ("--log-segment-bytes", budgets.segment_bytes),
        ] {
            command.arg(flag).arg(bytes.to_string());
        }
        let mut process = command.stderr(Stdio::piped()).spawn().expect("the service starts");
        let mut log = BufReader::new(process.stderr.take().expect("it was asked for")).lines();
        let (address, http) = loop {
            let line = log.next().expect("it says where it listens").expect("text");
            let line: serde_json::Value = serde_json::from_str(&line).expect("one object a line");
            if let (Some(grpc), Some(http)) = (line["grpc"].as_str(), line["http"].as_str()) {
                break (format!("http://{grpc}"), http.to_owned());
            }
        };
        std::thread::spawn(move || log.map_while(Result::ok).for_each(drop));
        Self { process, address, http, directory }
    }

    /// Bytes that the process holds.
    fn resident_bytes(&self) -> u64 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.process.id())).unwrap_or_default();
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
        let kib: u64 = line.and_then(|line| line.trim().trim_end_matches(" kB").parse().ok()).unwrap_or(0);
        kib << 10
    }

    /// Bytes of its files.
    fn log_bytes(&self) -> u64 {
        let files = std::fs::read_dir(&self.directory).into_iter().flatten().flatten();
        files.filter_map(|file| file.metadata().ok()).map(|data| data.len()).sum()
    }

    /// What its metrics say of this gauge.
    async fn gauge(&self, name: &str) -> f64 {
        let mut text = String::new();
        let asked = async {
            let mut connection = TcpStream::connect(&self.http).await?;
            connection.write_all(b"GET /metrics HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n").await?;
            connection.read_to_string(&mut text).await
        };
        asked.await.expect("metrics are answered");
        let value = text.lines().find_map(|line| line.strip_prefix(name)?.trim().parse().ok());
        value.expect("the gauge is there")
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
        let _ = std::fs::remove_dir_all(&self.directory);
    }
}

/// The most that was used.
#[derive(Default)]
pub(crate) struct Usage {
    pub(crate) counted_bytes_max: u64,
    pub(crate) resident_bytes_max: u64,
    pub(crate) log_bytes_max: u64,
    now: (u64, u64, u64),
}

impl Usage {
    /// Looks once, a moment from now.
    pub(crate) async fn look(&mut self, served: &Served) {
        tokio::time::sleep(Duration::from_millis(LOOK_MS)).await;
        let counted = served.gauge("hedgerow_resident_bytes").await as u64;
        self.now = (counted, served.resident_bytes(), served.log_bytes());
        self.counted_bytes_max = self.counted_bytes_max.max(self.now.0);
        self.resident_bytes_max = self.resident_bytes_max.max(self.now.1);
        self.log_bytes_max = self.log_bytes_max.max(self.now.2);
    }

    /// Looks until this has ended.
    pub(crate) async fn look_until<T>(&mut self, served: &Served, task: JoinHandle<T>) -> Result<T, JoinError> {
        while !task.is_finished() {
            self.look(served).await;
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
