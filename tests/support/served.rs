//! The service as a process of its own, on free ports, ended with its test.

use std::io::{BufRead as _, BufReader, Lines};
use std::process::{Child, ChildStderr, Command, Stdio};

/// How a process is served whose log this reads.
pub(crate) const SERVE: [&str; 7] =
    ["serve", "--listen", "127.0.0.1:0", "--http-listen", "127.0.0.1:0", "--log-format", "json"];

/// A served process.
pub(crate) struct Served {
    process: Child,
    /// Where gRPC listens.
    pub(crate) address: String,
    /// Where HTTP listens.
    pub(crate) http: String,
    /// What it says from then on.
    pub(crate) log: Lines<BufReader<ChildStderr>>,
}

impl Served {
    /// One with these arguments besides [`SERVE`].
    pub(crate) fn start(arguments: &[&str]) -> Self {
        Self::spawn(Command::new(env!("CARGO_BIN_EXE_hedgerow")).args(SERVE).args(arguments))
    }

    /// One that this command starts; waits until it listens.
    pub(crate) fn spawn(command: &mut Command) -> Self {
        let mut process = command.stderr(Stdio::piped()).spawn().expect("the service starts");
        let mut log = BufReader::new(process.stderr.take().expect("it was asked for")).lines();
        let (address, http) = log.find_map(|line| listens(&line.expect("text"))).expect("it says where it listens");
        Self { process, address, http, log }
    }

    /// Bytes that it has in memory now.
    pub(crate) fn resident_bytes(&self) -> u64 {
        self.status("VmRSS:")
    }

    /// The most bytes that it has had in memory so far.
    pub(crate) fn resident_bytes_most(&self) -> u64 {
        self.status("VmHWM:")
    }

    fn status(&self, name: &str) -> u64 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.process.id())).expect("it runs");
        let line = status.lines().find_map(|line| line.strip_prefix(name)).expect("it is said");
        line.trim().trim_end_matches(" kB").parse::<u64>().expect("a number") << 10
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// Where gRPC and HTTP listen, if this line of the log says so.
fn listens(line: &str) -> Option<(String, String)> {
    let line: serde_json::Value = serde_json::from_str(line).expect("one object a line");
    Some((line["grpc"].as_str()?.to_owned(), line["http"].as_str()?.to_owned()))
}
