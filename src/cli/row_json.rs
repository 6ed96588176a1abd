//! A row as one line of JSON, with the keys that CONTRACT.md's "Rows" lists. Floats are written with as many digits as
//! it takes to read the same value back.

use std::collections::BTreeMap;

use serde::{Serialize, Serializer};

use super::assemble::WholeRow;
use crate::proto::v1::Span;

#[derive(Serialize)]
struct RowJson<'row> {
    row_id: &'row str,
    run: &'row str,
    group: Option<&'row str>,
    rollout: &'row str,
    attempt: u32,
    policy: &'row str,
    row_index: u32,
    row_count: u32,
    agent: &'row str,
    leaf: &'row str,
    root: &'row str,
    #[serde(serialize_with = "call_ids")]
    walk: Vec<&'row Span>,
    #[serde(serialize_with = "call_ids")]
    trains: Vec<&'row Span>,
    token_ids: &'row [u32],
    loss_mask: &'row [u8],
    logprobs: &'row [f32],
    reward: f64,
    advantage: Option<f64>,
    weight: f64,
    policy_version_min: Option<u64>,
    policy_version_max: Option<u64>,
    reward_components: &'row BTreeMap<String, f64>,
    tags: &'row BTreeMap<String, String>,
    incomplete: bool,
    tokens: u64,
    trained_tokens: u64,
    rollout_trained_tokens: u64,
    spans: Vec<SpanJson<'row>>,
}

#[derive(Serialize)]
struct SpanJson<'row> {
    start: u64,
    end: u64,
    call: &'row str,
    agent: &'row str,
    kind: &'row str,
    policy: &'row str,
    policy_versions: Vec<[u64; 3]>,
    finish_reason: &'row str,
    model: &'row str,
    trained: bool,
    has_logprobs: bool,
    advantage: Option<f64>,
    process_reward: Option<f64>,
    advantage_scale: Option<f64>,
}

/// The row as JSON, without a line's end. The versions of a span are triples of start, end and version.
///
/// # Errors
/// Never, as it looks: the writer of JSON has an error type, and nothing here that it refuses.
pub fn row_json(row: &WholeRow) -> serde_json::Result<String> {
    let header = &row.header;
    serde_json::to_string(&RowJson {
        row_id: &row.row_id,
        run: &header.run_id,
        group: Some(header.group_id.as_str()).filter(|group| !group.is_empty()),
        rollout: &header.rollout_id,
        attempt: header.attempt,
        policy: &header.policy,
        row_index: header.row_index,
        row_count: header.row_count,
        agent: &header.agent_id,
        leaf: &header.leaf_call_id,
        root: &header.root_call_id,
        walk: row.spans.iter().collect(),
        trains: row.spans.iter().filter(|span| span.trained).collect(),
        token_ids: &row.token_ids,
        loss_mask: &row.loss_mask,
        logprobs: &row.logprobs,
        reward: header.reward,
        advantage: header.advantage,
        weight: header.weight,
        policy_version_min: header.policy_version_min,
        policy_version_max: header.policy_version_max,
        reward_components: &header.reward_components,
        tags: &header.tags,
        incomplete: header.incomplete,
        tokens: header.tokens,
        trained_tokens: header.trained_tokens,
        rollout_trained_tokens: header.rollout_trained_tokens,
        spans: row.spans.iter().map(span_json).collect(),
    })
}

fn span_json(span: &Span) -> SpanJson<'_> {
    let version = |span: &crate::proto::v1::PolicyVersionSpan| [span.start.into(), span.end.into(), span.version];
    SpanJson {
        start: span.start,
        end: span.end,
        call: &span.call_id,
        agent: &span.agent_id,
        kind: &span.kind,
        policy: &span.policy,
        policy_versions: span.policy_versions.iter().map(version).collect(),
        finish_reason: &span.finish_reason,
        model: &span.model,
        trained: span.trained,
        has_logprobs: span.has_logprobs,
        advantage: span.advantage,
        process_reward: span.process_reward,
        advantage_scale: span.advantage_scale,
    }
}

fn call_ids<S: Serializer>(spans: &[&Span], serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_seq(spans.iter().map(|span| span.call_id.as_str()))
}

#[cfg(test)]
mod tests {
    #![expect(clippy::expect_used, reason = "a test fails by panicking")]

    use super::*;
    use crate::proto::v1::RowHeader;

    #[test]
    fn a_row_has_the_keys_of_the_contract_and_its_exact_numbers() {
        let logprobs = vec![0.0, -0.1_f32, -1.175_494_4e-38, -123_456.79, f32::MIN_POSITIVE];
        let row = WholeRow {
            row_id: "r/o/0/main/c".to_owned(),
            header: RowHeader { run_id: "r".to_owned(), reward: 0.1 + 0.2, ..RowHeader::default() },
            spans: vec![
                Span { call_id: "b".to_owned(), ..Span::default() },
                Span { call_id: "c".to_owned(), trained: true, ..Span::default() },
            ],
            token_ids: vec![0, 1, 2, 3, u32::MAX],
            loss_mask: vec![0, 1, 1, 1, 1],
            logprobs: logprobs.clone(),
        };
        let json: serde_json::Value = serde_json::from_str(&row_json(&row).expect("writes")).expect("JSON");
        assert_eq!(json["group"], serde_json::Value::Null);
        assert_eq!(json["advantage"], serde_json::Value::Null);
        assert_eq!(json["walk"], serde_json::json!(["b", "c"]));
        assert_eq!(json["trains"], serde_json::json!(["c"]));
        assert_eq!(json["token_ids"], serde_json::json!([0, 1, 2, 3, u32::MAX]));
        assert_eq!(json["reward"].as_f64(), Some(0.1 + 0.2));
        let read: Vec<f32> = serde_json::from_value(json["logprobs"].clone()).expect("numbers");
        assert_eq!(read, logprobs);
    }
}
