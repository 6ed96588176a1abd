//! Starts everything, kills it, and counts what held.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::process::{Command, ExitCode};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

use hedgerow::cli::shuffle::SplitMix64;
use tokio::runtime::Runtime;

use crate::plan::{Plan, WORKERS};
use crate::processes::{self, News, Process};
use crate::rows::{Applied, Print};
use crate::trainer::GROUPS;
use crate::{check, undisturbed};

/// Kills of a run that is told no number.
const ROUNDS: u64 = 6;
/// The seed of a run that is told none.
const SEED: u64 = 1;
/// Kills of one batch, at most: the last one is of a service at rest.
const BATCH_KILLS: u64 = 10;
/// Rollouts of one batch.
const BATCH_ROLLOUTS: usize = 48;
/// How long nothing may be heard; only a failing test waits so long.
const SILENCE_SECONDS_MAX: u64 = 60;
/// A kill comes up to this long after the news that it waited for.
const LATE_MICROSECONDS_MAX: usize = 3_000;
/// A service that is started may be killed up to this long after.
const START_MICROSECONDS_MAX: usize = 60_000;
/// How often a service is started whose port somebody else has for a moment.
const BINDS_MAX: u32 = 200;

/// Runs so many rounds.
pub(crate) fn run(runtime: &Runtime, rounds: Option<u64>, seed: Option<u64>) -> ExitCode {
    let (rounds, seed) = (rounds.unwrap_or(ROUNDS), seed.unwrap_or(SEED));
    let repeats = format!("tests/crash.sh --rounds {rounds} --seed {seed}");
    println!("{repeats}");
    let begun = Instant::now();
    let mut field = Field::new(seed);
    while field.kills < rounds && field.failed == 0 {
        let kills = BATCH_KILLS.min(rounds - field.kills);
        if let Err(fault) = field.batch(runtime, kills) {
            field.fail(&fault);
        }
        field.batch += 1;
    }
    field.processes.clear();
    let Field { kills, batch, killed, passed, failed, .. } = &field;
    let by_name: Vec<String> = killed.iter().map(|(name, count)| format!("{count} of {name}")).collect();
    let seconds = begun.elapsed().as_secs_f64();
    println!("{kills} kills in {batch} batches in {seconds:.1} s: {}", by_name.join(", "));
    let figures = &field.figures;
    println!("{figures:?}");
    if *failed > 0 {
        println!("repeat it with {repeats}; what it left is in {}", field.directory.display());
    } else {
        let _ = std::fs::remove_dir_all(&field.directory);
    }
    println!("{passed} passed, {failed} failed");
    if *failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// What was seen, to know that it was worth something.
#[derive(Debug, Default)]
struct Figures {
    requests: u64,
    rows: u64,
    /// Requests whose answer was not heard, though the log had taken them; repeats by plan are among them.
    known_when_answered: u64,
    /// Units that a trainer was given though their rows were applied.
    given_again: u64,
    /// Ends of the log that were cut when it was read.
    torn_ends: u64,
    /// Services that were killed before they had read their log.
    killed_while_reading: u64,
}

struct Field {
    seed: u64,
    chance: SplitMix64,
    directory: PathBuf,
    port: u16,
    batch: u64,
    processes: Vec<Process>,
    started: u64,
    news: (Sender<News>, Receiver<News>),
    /// The service has read its log.
    up: bool,
    workers_left: usize,
    binds: u32,
    kills: u64,
    killed: BTreeMap<String, u64>,
    faults: Vec<String>,
    passed: u64,
    failed: u64,
    figures: Figures,
}

impl Field {
    fn new(seed: u64) -> Self {
        let directory = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(format!("crash-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&directory);
        std::fs::create_dir_all(&directory).expect("a folder of its own");
        Self {
            seed,
            chance: SplitMix64::new(seed),
            directory,
            port: processes::free_port(),
            batch: 0,
            processes: Vec::new(),
            started: 0,
            news: channel(),
            up: false,
            workers_left: 0,
            binds: 0,
            kills: 0,
            killed: BTreeMap::new(),
            faults: Vec::new(),
            passed: 0,
            failed: 0,
            figures: Figures::default(),
        }
    }

    fn address(&self) -> String {
        format!("http://127.0.0.1:{}", self.port)
    }

    fn fail(&mut self, fault: &str) {
        self.failed += 1;
        println!("FAILED in batch {}: {fault}", self.batch);
    }

    /// Counts one check.
    fn count(&mut self, what: &str, result: Result<(), String>) {
        match result {
            Ok(()) => self.passed += 1,
            Err(fault) => self.fail(&format!("{what}: {fault}")),
        }
    }

    /// Counts a round: nothing wrong was told in it.
    fn count_faults(&mut self) {
        let faults = std::mem::take(&mut self.faults);
        let result = faults.first().map_or(Ok(()), |first| Err(format!("{} faults; {first}", faults.len())));
        self.count("processes", result);
    }

    /// One batch of rollouts with so many kills or fewer, and what must be true after it.
    fn batch(&mut self, runtime: &Runtime, kills: u64) -> Result<(), String> {
        let plan = Plan::new(self.seed, self.batch, BATCH_ROLLOUTS);
        let expected = runtime.block_on(undisturbed::rows(&plan))?;
        if self.batch == 0 {
            self.start("service");
            self.until_up()?;
            runtime.block_on(check::create_run(&self.address()))?;
            for group in GROUPS {
                (0..group.members).for_each(|member| self.start(&format!("{} {member}", group.name)));
            }
        }
        self.workers_left = WORKERS;
        (0..WORKERS).for_each(|worker| self.start(&format!("worker {worker}")));
        // Each request is answered, and each row applied and acknowledged by both groups.
        let news = plan.requests.len() + 2 * expected.len() + expected.len() / 2;
        let mut left = kills;
        while left > 1 {
            let wait = self.chance.below(2 * news / kills as usize);
            if !self.hear(wait, &expected)? {
                break;
            }
            left -= self.kill_somebody(left);
            self.count_faults();
            if self.failed > 0 {
                return Ok(());
            }
        }
        self.hear(usize::MAX, &expected)?;
        let address = self.address();
        self.until_up()?;
        let left = runtime.block_on(check::no_unit_is_left(&address));
        self.count("before the last kill", left);
        self.kill("service");
        self.until_up()?;
        self.count_faults();
        self.finish(runtime, &plan, &expected);
        Ok(())
    }

    fn finish(&mut self, runtime: &Runtime, plan: &Plan, expected: &BTreeMap<String, Print>) {
        let address = self.address();
        let left = runtime.block_on(check::no_unit_is_left(&address));
        self.count("after the last kill", left);
        let ended = runtime.block_on(check::all_has_ended(&address, plan));
        self.count("told again", ended);
        if self.batch > 0 {
            let older = self.chance.below(self.batch as usize) as u64;
            let plan = Plan::new(self.seed, older, BATCH_ROLLOUTS);
            let ended = runtime.block_on(check::all_has_ended(&address, &plan));
            self.count("an older batch told again", ended);
        }
        let journals = check::journals(plan, |worker| self.journal(worker));
        self.count("journals", journals);
        let [one, other] = GROUPS.map(|group| check::rows(&self.applied(group.name), self.batch, expected));
        let same = match (&one, &other) {
            (Ok(one), Ok(other)) if one != other => Err("the groups were given other bytes".to_owned()),
            _ => Ok(()),
        };
        self.count("the same rows for both groups", same);
        self.count("rows of the trainers", one.map(|_| ()));
        self.count("rows of the archive", other.map(|_| ()));
        self.count_faults();
        self.figures.requests += plan.requests.len() as u64;
        self.figures.rows += expected.len() as u64;
        let (batch, rows) = (self.batch, expected.len());
        println!("batch {batch}: {} requests, {rows} rows, {} kills so far", plan.requests.len(), self.kills);
    }

    fn journal(&self, worker: usize) -> PathBuf {
        self.directory.join(format!("journal-{}-{worker}", self.batch))
    }

    fn applied(&self, group: &str) -> PathBuf {
        self.directory.join(format!("applied-{group}"))
    }

    fn command(&self, name: &str) -> Command {
        let itself = std::env::current_exe().expect("the test's own path");
        let (role, member) = name.split_once(' ').unwrap_or((name, "0"));
        let mut command = Command::new(itself);
        let group = GROUPS.iter().position(|group| group.name == role);
        let file = match (role, group) {
            ("service", _) => {
                let mut command = processes::service(self.port, &self.directory);
                // Less than a life lasts, for the most part.
                command.args(["--restart-grace-ms", "100"]);
                return command;
            }
            (_, Some(group)) => {
                command.args(["trainer", "--group", &group.to_string()]);
                self.applied(role)
            }
            (_, None) => {
                let number = |name: &str, number: u64| [name.to_owned(), number.to_string()];
                command.arg("worker").args(number("--seed", self.seed)).args(number("--batch", self.batch));
                command.args(number("--rollouts", BATCH_ROLLOUTS as u64));
                self.journal(member.parse().unwrap_or_default())
            }
        };
        command.args(["--member", member, "--address", &self.address(), "--file"]).arg(file);
        command
    }

    fn start(&mut self, name: &str) {
        self.started += 1;
        if name == "service" {
            self.up = false;
        }
        let process = Process::spawn(name, self.started, &mut self.command(name), &self.news.0);
        self.processes.push(process.expect("a process starts"));
    }

    /// Kills a process and starts it again.
    fn kill(&mut self, name: &str) {
        self.processes.retain(|process| process.name != name);
        self.figures.killed_while_reading += u64::from(name == "service" && !self.up);
        self.kills += 1;
        let role = name.split(' ').next().unwrap_or(name);
        *self.killed.entry(role.to_owned()).or_default() += 1;
        self.start(name);
    }

    /// Kills one or two processes, and says how many.
    fn kill_somebody(&mut self, most: u64) -> u64 {
        spin(self.chance.below(LATE_MICROSECONDS_MAX));
        let others: Vec<String> =
            self.processes.iter().map(|process| process.name.clone()).filter(|name| name != "service").collect();
        // Workers are gone in the end, and trainers are few: each kind has its half.
        let wanted = self.chance.below(2) == 0;
        let of_kind: Vec<&String> = others.iter().filter(|name| name.starts_with("worker") == wanted).collect();
        let among = if of_kind.is_empty() { others.iter().collect() } else { of_kind };
        let (other, service) = (among[self.chance.below(among.len())].clone(), "service");
        match self.chance.below(10) {
            0..4 => self.kill(service),
            // The next one while it still reads its log, most likely.
            4..6 if most > 2 => {
                self.kill(service);
                spin(self.chance.below(START_MICROSECONDS_MAX));
                self.kill(service);
                return 2;
            }
            // Somebody who was served, and the service.
            6 if most > 2 => {
                self.kill(&other);
                self.kill(service);
                return 2;
            }
            _ => self.kill(&other),
        }
        1
    }

    /// Waits until so much was answered, applied or acknowledged; false, if the batch is over first.
    fn hear(&mut self, mut progress: usize, expected: &BTreeMap<String, Print>) -> Result<bool, String> {
        while progress > 0 {
            if self.workers_left == 0 && self.all_applied(expected)? {
                return Ok(false);
            }
            progress -= usize::from(self.take_news()?);
        }
        Ok(true)
    }

    fn all_applied(&self, expected: &BTreeMap<String, Print>) -> Result<bool, String> {
        for group in GROUPS {
            let applied = Applied::open(&self.applied(group.name)).map_err(|error| error.to_string())?;
            if !expected.keys().all(|row_id| applied.rows().contains_key(row_id)) {
                return Ok(false);
            }
        }
        Ok(true)
    }

    fn until_up(&mut self) -> Result<(), String> {
        while !self.up {
            self.take_news()?;
        }
        Ok(())
    }

    /// Waits for one line; says whether it is progress.
    fn take_news(&mut self) -> Result<bool, String> {
        let news = self.news.1.recv_timeout(Duration::from_secs(SILENCE_SECONDS_MAX));
        let Ok(News { name, number, line }) = news else {
            let rest = self.faults.first().cloned().unwrap_or_default();
            return Err(format!(
                "nothing is heard for {SILENCE_SECONDS_MAX} s; the service is up: {}; {rest}",
                self.up
            ));
        };
        // The last words of those that were killed count too, but that they have ended does not.
        let living = self.processes.iter().position(|process| process.number == number);
        let Some(line) = line else {
            return living.map_or(Ok(()), |place| self.has_ended(place)).map(|()| false);
        };
        if name == "service" {
            self.up |= living.is_some() && line.contains("\"grpc\"");
            self.figures.torn_ends += u64::from(line.contains("was torn"));
            self.binds = if line.contains("\"grpc\"") { 0 } else { self.binds };
            if ["\"ERROR\"", "panicked"].iter().any(|word| line.contains(word)) {
                self.faults.push(format!("the service says {line}"));
            }
            return Ok(false);
        }
        self.figures.known_when_answered += u64::from(line.starts_with("answered ") && line.ends_with(" known"));
        self.figures.given_again += u64::from(line.starts_with("again "));
        let is_progress = ["answered ", "applied ", "acknowledged "].iter().any(|word| line.starts_with(word));
        if !is_progress && !["subscribed ", "again "].iter().any(|word| line.starts_with(word)) {
            self.faults.push(format!("{name} says {line}"));
        }
        Ok(is_progress)
    }

    /// Somebody has ended who was not killed.
    fn has_ended(&mut self, place: usize) -> Result<(), String> {
        let mut process = self.processes.swap_remove(place);
        let how = process.ended();
        if process.name.starts_with("worker") && how.is_empty() {
            self.workers_left -= 1;
            return Ok(());
        }
        let taken = std::net::TcpListener::bind(("127.0.0.1", self.port)).is_err();
        if process.name == "service" && taken && self.binds < BINDS_MAX {
            self.binds += 1;
            self.start("service");
            return Ok(());
        }
        Err(format!("{} has ended by itself: {how}; {:?}", process.name, self.faults))
    }
}

/// Lets a little time go by without giving the processor up.
fn spin(microseconds: usize) {
    let until = Instant::now() + Duration::from_micros(microseconds as u64);
    while Instant::now() < until {
        std::hint::spin_loop();
    }
}
