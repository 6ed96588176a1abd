//! The processes of the test: started, killed without a word, and heard line by line.

use std::io::{BufRead as _, BufReader, Read};
use std::net::TcpListener;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::Sender;

use hedgerow::cli::shuffle::SplitMix64;

/// Ports are taken from below those that the system gives to outgoing connections.
const PORTS: std::ops::Range<u16> = 20_000..30_000;

/// What a process said, or that it has no more to say.
pub(crate) struct News {
    pub(crate) name: String,
    /// Which of those with this name: a killed one's last words are not those of the next.
    pub(crate) number: u64,
    pub(crate) line: Option<String>,
}

/// A process that is killed with the test.
pub(crate) struct Process {
    pub(crate) name: String,
    pub(crate) number: u64,
    child: Child,
}

impl Process {
    /// Starts one, whose lines on standard output and error go to `news`.
    pub(crate) fn spawn(name: &str, number: u64, command: &mut Command, news: &Sender<News>) -> std::io::Result<Self> {
        // What it reads ends with the test, however the test ends.
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn()?;
        let sources: [Option<Box<dyn Read + Send>>; 2] =
            [child.stdout.take().map(|out| Box::new(out) as _), child.stderr.take().map(|error| Box::new(error) as _)];
        let news = news.clone();
        let own = name.to_owned();
        std::thread::spawn(move || {
            let readers = sources.into_iter().flatten().map(|source| {
                let (news, name) = (news.clone(), own.clone());
                std::thread::spawn(move || {
                    for line in BufReader::new(source).lines().map_while(Result::ok) {
                        let _ = news.send(News { name: name.clone(), number, line: Some(line) });
                    }
                })
            });
            for reader in readers.collect::<Vec<_>>() {
                let _ = reader.join();
            }
            let _ = news.send(News { name: own, number, line: None });
        });
        Ok(Self { name: name.to_owned(), number, child })
    }

    /// SIGKILL, and waits until it is gone.
    pub(crate) fn kill(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }

    /// How it ended, once it has no more to say.
    pub(crate) fn ended(&mut self) -> String {
        match self.child.wait() {
            Ok(status) if status.success() => String::new(),
            Ok(status) => format!("ended with {status}"),
            Err(error) => error.to_string(),
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.kill();
    }
}

/// A port that nobody has now, for a service that is started on it again and again.
pub(crate) fn free_port() -> u16 {
    // Not by the seed: two runs of one seed may go on side by side.
    let mut ports = SplitMix64::new(u64::from(std::process::id()));
    let any = || PORTS.start + ports.below(PORTS.len()) as u16;
    let free = |port: &u16| TcpListener::bind(("127.0.0.1", *port)).is_ok();
    std::iter::repeat_with(any).find(free).expect("a free port")
}

/// The service, with its log in this directory: so small that segments come and go under fire, and rollouts are written forward.
pub(crate) fn service(port: u16, directory: &Path) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_hedgerow"));
    command.args(["serve", "--http-listen", "127.0.0.1:0", "--durability", "fsync", "--log-format", "json"]);
    command.args(["--log-segment-bytes", "131072", "--log-budget-bytes", "4194304"]);
    command.arg("--listen").arg(format!("127.0.0.1:{port}"));
    command.arg("--data-directory").arg(directory.join("data"));
    command
}

/// Ends this process when whoever started it has gone.
pub(crate) fn end_with_parent() {
    std::thread::spawn(|| {
        let _ = std::io::stdin().read_to_end(&mut Vec::new());
        std::process::exit(1);
    });
}
