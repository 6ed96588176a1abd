//! Recordings, good and bad.

#![expect(clippy::expect_used, reason = "a test fails by panicking")]

use std::io::Write as _;
use std::path::PathBuf;

use super::*;

/// A file that is there while this value lives.
struct Temporary(PathBuf);

impl Temporary {
    fn new(content: &[u8]) -> Self {
        static COUNT: std::sync::atomic::AtomicU64 = std::sync::atomic::AtomicU64::new(0);
        let count = COUNT.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        let path = std::env::temp_dir().join(format!("hedgerow-recording-{}-{count}", std::process::id()));
        std::fs::write(&path, content).expect("a temporary file");
        Self(path)
    }
}

impl Drop for Temporary {
    fn drop(&mut self) {
        std::fs::remove_file(&self.0).expect("the temporary file");
    }
}

fn read(text: &str) -> Result<Recording, RecordingError> {
    let file = Temporary::new(text.as_bytes());
    Recording::read(&[&file.0])
}

/// What is wrong, after the file's name.
fn problem(text: &str) -> String {
    let error = read(text).expect_err("an error");
    format!("{}: {}", error.at.line, error.problem)
}

fn ids(bytes: &[u8]) -> Vec<u32> {
    bytes.as_chunks::<4>().0.iter().map(|&word| u32::from_le_bytes(word)).collect()
}

const FIRST: &str = r#"{"rollout":"r","agent":"L","parent_agent":null,"call":"a","seq":1,"prompt_token_ids":[1,2],"generation_token_ids":[3,4],"generation_log_probs":[-0.5,-1e-3]}"#;
const SECOND: &str = r#"{"rollout":"r","agent":"L","call":"b","seq":2,"prefix_of":"a","prefix_len":3,"prompt_suffix_token_ids":[9],"generation_token_ids":[5],"generation_log_probs":[0],"policy_version":7,"link":{"parent":"a"},"train":false}"#;
const THIRD: &str = r#"{"rollout":"r","agent":"B","parent_agent":"L","call":"c","seq":3,"prefix_of":"b","prefix_len":4,"prompt_suffix_token_ids":[],"generation_token_ids":[],"generation_log_probs":null,"kept":false,"note":"x","link":"root","kind":"probe","group":"g","reward":0.1}"#;

#[test]
fn prompts_resolve_down_the_chain_of_prefixes() {
    let recording = read(&format!("{FIRST}\n\n{SECOND}\n{THIRD}")).expect("valid");
    let [rollout] = recording.rollouts.as_slice() else { panic!("one rollout") };
    assert_eq!(ids(&rollout.full_prompt(0)), [1, 2]);
    assert_eq!(ids(&rollout.full_prompt(1)), [1, 2, 3, 9]);
    assert_eq!(ids(&rollout.full_prompt(2)), [1, 2, 3, 9]);
    assert_eq!(rollout.calls[2].prompt_tokens(), 4);
    assert_eq!(rollout.base(0), None);
    assert_eq!(rollout.base(1), Some(("a", 3, Digest::of(&[1, 2, 3]))));
    assert_eq!(rollout.base(2), Some(("b", 4, Digest::of(&[1, 2, 3, 9]))));
    assert_eq!(rollout.calls[1].link, RecordedLink::Parent("a".to_owned()));
    assert_eq!((rollout.calls[1].policy_version, rollout.calls[1].train), (Some(7), Some(false)));
    assert_eq!((rollout.calls[2].kind.as_str(), rollout.calls[2].parent_agent.as_str()), ("probe", "L"));
    assert_eq!((rollout.group.as_deref(), rollout.reward), (Some("g"), Some(0.1)));
    // An agent whose calls are all not kept has no list.
    assert_eq!(rollout.kept, BTreeMap::from([("L".to_owned(), vec!["a".to_owned(), "b".to_owned()])]));
    assert_eq!(recording.remarks.len(), 1);
    assert!(recording.remarks[0].contains("\"note\""));
}

#[test]
fn lists_on_a_reward_line_beat_the_calls_own() {
    let end = r#"{"rollout":"r","reward":null,"kept":{"L":["a"],"B":["c","c","zz"]}}"#;
    let recording = read(&format!("{FIRST}\n{SECOND}\n{THIRD}\n{end}\n")).expect("valid");
    let rollout = &recording.rollouts[0];
    assert_eq!(rollout.kept["L"], ["a"]);
    assert_eq!(rollout.kept["B"], ["c", "zz"]);
    assert!(recording.remarks.iter().any(|remark| remark.contains("\"zz\"")));
    let all = read(&format!("{FIRST}\n{{\"rollout\":\"r\",\"reward\":2,\"kept\":null}}\n")).expect("valid");
    assert_eq!((all.rollouts[0].reward, all.rollouts[0].kept["L"].len()), (Some(2.0), 1));
}

#[test]
fn gzip_is_known_by_its_first_bytes() {
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    encoder.write_all(FIRST.as_bytes()).expect("memory");
    let whole = encoder.finish().expect("memory");
    let file = Temporary::new(&whole);
    assert_eq!(Recording::read(&[&file.0]).expect("valid").rollouts[0].calls.len(), 1);
    let cut = Temporary::new(&whole[..whole.len() / 2]);
    assert!(Recording::read(&[&cut.0]).is_err());
    assert!(Recording::read(&[PathBuf::from("/no/such/file")]).is_err());
}

#[test]
fn a_bad_line_is_an_error_with_its_number() {
    let second = |from: &str, to: &str| {
        assert!(SECOND.contains(from), "{from}");
        problem(&format!("{FIRST}\n{}", SECOND.replace(from, to)))
    };
    assert_eq!(problem("[1]").split(' ').next(), Some("1:"));
    assert!(problem("{\"rollout\":\"r\"").starts_with("1: is no JSON: EOF while parsing an object"));
    assert!(second("\"seq\":2", "\"seq\":\"2\"").starts_with("2: seq: invalid type: string \"2\""));
    assert!(second("[9]", "[9,-1]").starts_with("2: prompt_suffix_token_ids: element 1: invalid value: integer `-1`"));
    assert!(second("[9]", "[4294967296]").starts_with("2: prompt_suffix_token_ids: element 0"));
    assert!(second("[0]", "[0,0]").contains("generation_log_probs: has 2 for 1 generated ids"));
    assert!(second("[0]", "[1e39]").contains("generation_log_probs: element 0: "));
    assert!(second("[0]", "[null]").contains("generation_log_probs: element 0: invalid type: null"));
    assert!(
        second("\"prefix_of\":\"a\"", "\"prefix_of\":\"b\"").contains("prefix_of: \"b\" stands on no earlier line")
    );
    assert!(second("\"prefix_of\":\"a\"", "\"prefix_of\":null").contains("prefix_len: 3 ids of no call"));
    assert!(second("\"prefix_len\":3", "\"prefix_len\":5").contains("prefix_len: 5, but \"a\" has 4 ids"));
    assert!(second("\"call\":\"b\"", "\"call\":\"a\"").contains("call: \"a\" stands already at"));
    assert!(second("\"call\":\"b\",", "").contains("call: is missing"));
    assert!(second("\"call\":\"b\"", "\"call\":\"\"").contains("call: is empty"));
    assert!(second("{\"parent\":\"a\"}", "\"up\"").contains("link: expected \"infer\", \"root\" or"));
    assert!(second("\"seq\":2,", "").contains("seq: is missing"));
    assert!(second("\"seq\":2", "\"seq\":2,\"reward\":1e999").starts_with("2: reward: number out of range"));
    assert!(second("\"train\":false", "\"kept\":{\"L\":[]}").contains("kept: on a call's line"));
    assert!(problem(r#"{"rollout":"r"}"#).contains("neither a call nor a reward"));
    let other_reward = "{\"rollout\":\"r\",\"reward\":1}\n{\"rollout\":\"r\",\"reward\":2}";
    assert!(problem(other_reward).starts_with("2: reward: 2 is another reward than 1 at"));
}

#[test]
fn numbers_are_read_exactly() {
    let line = FIRST.replace("[-0.5,-1e-3]", "[-0.30000001192092896,-0.0001220703125]");
    let line = line.replace("\"seq\":1", "\"seq\":1,\"reward\":0.30000000000000004");
    let recording = read(&line).expect("valid");
    let logprobs = recording.rollouts[0].calls[0].logprobs.clone().expect("logprobs");
    assert_eq!(logprobs[..4], (-0.3_f32).to_le_bytes());
    assert_eq!(recording.rollouts[0].reward.map(f64::to_bits), Some(0.300_000_000_000_000_04_f64.to_bits()));
}
