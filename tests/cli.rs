//! The command line as a user meets it: the real binary, real processes, exit codes, and what it prints.

#![expect(clippy::unwrap_used, clippy::expect_used, reason = "a test fails by panicking")]

#[expect(dead_code, reason = "other tests use more of it")]
#[path = "support/served.rs"]
mod served;

use std::io::{BufRead as _, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use served::{SERVE, Served};

const BINARY: &str = env!("CARGO_BIN_EXE_hedgerow");

fn hedgerow(arguments: &[&str]) -> Output {
    Command::new(BINARY).args(arguments).env_remove("HEDGEROW_ADDRESS").output().unwrap()
}

fn text(bytes: &[u8]) -> &str {
    std::str::from_utf8(bytes).unwrap()
}

/// One whose log survives nothing.
fn forgetful() -> Served {
    Served::start(&["--durability", "memory"])
}

/// One whose log is on disk, in this folder.
fn durable(directory: &Path) -> Served {
    Served::start(&["--data-directory", directory.to_str().unwrap()])
}

impl Served {
    fn client(&self, arguments: &[&str]) -> Output {
        hedgerow(&[arguments, &["--address", &self.address]].concat())
    }
}

/// A file for one test, in the folder that cargo keeps for tests.
fn file(name: &str, lines: &[&str]) -> PathBuf {
    let path = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(name);
    std::fs::write(&path, lines.join("\n")).unwrap();
    path
}

const FORK: [&str; 4] = [
    r#"{"rollout":"r/1","group":"g","agent":"lead","parent_agent":null,"call":"a","seq":1,"prompt_token_ids":[1,2],"generation_token_ids":[3],"generation_log_probs":[-0.5]}"#,
    r#"{"rollout":"r/1","agent":"sub","parent_agent":"lead","call":"b","seq":2,"prefix_of":"a","prefix_len":3,"prompt_suffix_token_ids":[4],"generation_token_ids":[5],"generation_log_probs":[-0.25]}"#,
    r#"{"rollout":"r/1","agent":"lead","parent_agent":null,"call":"c","seq":3,"prompt_token_ids":[1,2,3,6],"generation_token_ids":[7,8],"generation_log_probs":[-1.5,0.0]}"#,
    r#"{"rollout":"r/1","reward":0.25,"kept":null}"#,
];

#[test]
fn the_demo_shows_five_rows_and_exits_well() {
    let output = hedgerow(&["demo", "--json", "--seed", "3"]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    let rows: Vec<serde_json::Value> =
        text(&output.stdout).lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let trains: Vec<String> = rows.iter().map(|row| format!("{}: {}", row["leaf"], row["trains"])).collect();
    let expected = [
        r#""C4": ["C2","C4"]"#,
        r#""C6": ["C5","C6"]"#,
        r#""C9": ["C8","C9"]"#,
        r#""C10": ["C1","C3","C7","C10"]"#,
        r#""C12": ["C11","C12"]"#,
    ];
    assert_eq!(trains, expected);
    let drawn = hedgerow(&["demo"]);
    assert!(drawn.status.success());
    assert!(text(&drawn.stdout).contains("├─┬ C8"), "{}", text(&drawn.stdout));
}

#[test]
fn a_recording_is_replayed_tailed_and_shown() {
    let served = forgetful();
    let path = file("fork.jsonl", &FORK);
    let replayed = served.client(&["replay", path.to_str().unwrap(), "--run", "one"]);
    assert!(replayed.status.success(), "{}", text(&replayed.stderr));
    let again = served.client(&["replay", path.to_str().unwrap(), "--run", "one", "--full-prompts", "--shuffle", "5"]);
    assert!(again.status.success(), "a resend is success: {}", text(&again.stderr));

    let tailed = served.client(&["tail", "--run", "one", "--no-follow"]);
    let rows: Vec<serde_json::Value> =
        text(&tailed.stdout).lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(rows.len(), 2);
    assert_eq!(rows[0]["row_id"], "one/r%2F1/0/main/b");
    assert_eq!(rows[0]["loss_mask"], serde_json::json!([0, 0, 0, 0, 1]));
    assert_eq!(rows[1]["trains"], serde_json::json!(["a", "c"]));
    assert_eq!(rows[1]["logprobs"], serde_json::json!([0.0, 0.0, -0.5, 0.0, -1.5, 0.0]));
    assert_eq!(rows[1]["reward"], 0.25);

    let shown = served.client(&["show", "r/1", "--run", "one"]);
    assert!(text(&shown.stdout).contains("row 2"), "{}", text(&shown.stdout));
    let missing = served.client(&["show", "r/2", "--run", "one"]);
    assert_eq!(missing.status.code(), Some(1));
}

#[test]
fn what_was_answered_outlives_a_killed_process() {
    let directory = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("durable");
    // One that an earlier run has left.
    let _ = std::fs::remove_dir_all(&directory);
    let served = durable(&directory);
    let path = file("durable.jsonl", &FORK);
    assert!(served.client(&["replay", path.to_str().unwrap(), "--run", "one"]).status.success());
    let before = served.client(&["tail", "--run", "one", "--no-follow"]).stdout;
    assert_eq!(text(&before).lines().count(), 2);

    let second = hedgerow(&[&SERVE[..], &["--data-directory", directory.to_str().unwrap()]].concat());
    assert_eq!(second.status.code(), Some(1));
    assert!(text(&second.stderr).contains("another process holds the log"), "{}", text(&second.stderr));

    // Killed, without a word.
    drop(served);
    let served = durable(&directory);
    assert_eq!(text(&served.client(&["tail", "--run", "one", "--no-follow"]).stdout), text(&before), "the same bytes");
    let again = served.client(&["replay", path.to_str().unwrap(), "--run", "one"]);
    assert!(again.status.success(), "a resend is success: {}", text(&again.stderr));
    assert_eq!(text(&served.client(&["tail", "--run", "one", "--no-follow"]).stdout), text(&before));
}

/// Who reports and who reads rows go on by themselves when the service is killed and comes back at the same place: nothing is lost,
/// and nothing printed twice.
#[test]
fn replay_and_tail_go_on_where_they_were_when_the_service_comes_back() {
    const REPEAT: usize = 2000;
    let directory = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("resumed");
    // One that an earlier run has left.
    let _ = std::fs::remove_dir_all(&directory);
    let served = durable(&directory);
    let address = served.address.clone();
    let begin = |arguments: &[&str]| {
        let mut command = Command::new(BINARY);
        command.args(arguments).args(["--address", &address, "--run", "one"]).stdout(Stdio::piped()).spawn().unwrap()
    };
    let path = file("resumed.jsonl", &FORK);
    let mut tail = begin(&["tail", "--count", &format!("{}", 2 * REPEAT)]);
    let replay = begin(&["replay", path.to_str().unwrap(), "--repeat", &format!("{REPEAT}")]);
    let mut rows = BufReader::new(tail.stdout.take().unwrap()).lines().map(|line| line.unwrap());
    let mut printed: Vec<String> = rows.by_ref().take(10).collect();
    // Killed, without a word.
    drop(served);
    let arguments = ["--http-listen", "127.0.0.1:0", "--log-format", "json"];
    let _served = Served::spawn(
        Command::new(BINARY)
            .args(["serve", "--listen", &address, "--data-directory", directory.to_str().unwrap()])
            .args(arguments),
    );
    let replayed = replay.wait_with_output().unwrap();
    assert!(replayed.status.success(), "{}", text(&replayed.stdout));
    printed.extend(rows);
    assert!(tail.wait().unwrap().success());
    let id = |row: &String| serde_json::from_str::<serde_json::Value>(row).unwrap()["row_id"].to_string();
    let distinct: std::collections::BTreeSet<String> = printed.iter().map(id).collect();
    assert_eq!((printed.len(), distinct.len()), (2 * REPEAT, 2 * REPEAT));
}

#[test]
fn runs_are_listed_and_a_misspelt_one_is_not_made() {
    let served = forgetful();
    let none = served.client(&["runs"]);
    assert!(none.status.success() && none.stdout.is_empty(), "{}", text(&none.stdout));
    let path = file("runs.jsonl", &FORK);
    assert!(served.client(&["replay", path.to_str().unwrap(), "--run", "one"]).status.success());
    let listed = served.client(&["runs", "--json"]);
    let runs: serde_json::Value = serde_json::from_slice(&listed.stdout).unwrap();
    assert_eq!((&runs[0]["run"], &runs[0]["finalised_rollouts"]), (&"one".into(), &1.into()));
    assert_eq!(runs[0]["ledgers"][0]["trained"], 3);
    let table = served.client(&["runs"]);
    assert!(text(&table.stdout).contains("3 accepted = 3 trained"), "{}", text(&table.stdout));
    let misspelt = served.client(&["tail", "--run", "oen", "--no-follow"]);
    assert_eq!(misspelt.status.code(), Some(1));
    assert!(text(&misspelt.stderr).contains("there is no run \"oen\""), "{}", text(&misspelt.stderr));
    assert_eq!(served.client(&["runs", "--json"]).stdout, listed.stdout, "it was not made");
}

#[test]
fn a_bad_line_is_named_and_nothing_is_sent() {
    let served = forgetful();
    let bad = r#"{"rollout":"r/1","agent":"lead","call":"d","seq":4,"prompt_token_ids":[1],"generation_token_ids":[2],"generation_log_probs":[]}"#;
    let path = file("bad.jsonl", &[FORK[0], bad]);
    let replayed = served.client(&["replay", path.to_str().unwrap(), "--run", "two"]);
    assert_eq!(replayed.status.code(), Some(1));
    assert!(text(&replayed.stderr).contains("bad.jsonl:2"), "{}", text(&replayed.stderr));
    assert_eq!(served.client(&["show", "r/1", "--run", "two"]).status.code(), Some(1));
}

#[test]
fn wrong_usage_and_a_wrong_configuration_exit_with_two() {
    assert_eq!(hedgerow(&["replay"]).status.code(), Some(2));
    assert_eq!(hedgerow(&["check-config"]).status.code(), Some(0));
    let path = file("bad.toml", &["listn = \"127.0.0.1:1\""]);
    let checked = hedgerow(&["--config", path.to_str().unwrap(), "check-config"]);
    assert_eq!(checked.status.code(), Some(2));
    assert!(text(&checked.stderr).contains("listn"), "{}", text(&checked.stderr));
    let public = hedgerow(&["serve", "--listen", "0.0.0.0:0"]);
    assert_eq!(public.status.code(), Some(2), "{}", text(&public.stderr));
}

#[test]
fn a_service_out_of_descriptors_says_so_and_goes_on_when_there_are_some_again() {
    let limited = ["-c", "ulimit -n 48 && exec \"$0\" \"$@\"", BINARY];
    let mut served = Served::spawn(Command::new("sh").args(limited).args(SERVE));
    let connections: Vec<_> = (0..64).map(|_| std::net::TcpStream::connect(&served.address).unwrap()).collect();
    served.log.find(|line| line.as_ref().unwrap().contains("no connection can be taken")).unwrap().unwrap();
    drop(connections);
    let missing = served.client(&["show", "r/1", "--run", "one"]);
    assert_eq!(missing.status.code(), Some(1));
    assert!(text(&missing.stderr).contains("has no rollout"), "{}", text(&missing.stderr));
}
