//! The files of shared cases: one rollout each as JSON, with its right answer under `expect`. What is left out has its
//! default; an unknown value is a fault of the file, said with the file's name by the caller.

use std::collections::BTreeMap;
use std::path::PathBuf;

use serde_json::Value;

use crate::case::{
    AgentsWithoutList, Answer, BrokenLink, Call, Case, Link, OnBrokenLink, Refusal, Row, Settings, SharedCallOwner,
};

/// A case and what is expected of it.
pub(crate) struct CaseFile {
    pub(crate) name: String,
    pub(crate) case: Case,
    /// What the rollout is rewarded with, if the file says it.
    pub(crate) reward: Option<f64>,
    pub(crate) expected: Result<Answer, Refusal>,
}

/// The folder of shared cases, where this checkout has one: `HEDGEROW_CASES`, else beside the checkout.
pub(crate) fn folder() -> Option<PathBuf> {
    let beside = || PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../shared/cases");
    let folder = std::env::var_os("HEDGEROW_CASES").map_or_else(beside, PathBuf::from);
    folder.is_dir().then_some(folder)
}

/// All cases of a folder, by name.
pub(crate) fn read_all(folder: &PathBuf) -> Result<Vec<CaseFile>, String> {
    let mut files: Vec<PathBuf> = std::fs::read_dir(folder)
        .map_err(|error| format!("{}: {error}", folder.display()))?
        .filter_map(|entry| entry.ok().map(|entry| entry.path()))
        .filter(|path| path.extension().is_some_and(|extension| extension == "json"))
        .collect();
    files.sort();
    let read = |path: &PathBuf| {
        let name = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        let text = std::fs::read_to_string(path).map_err(|error| format!("{name}: {error}"))?;
        parse(&name, &text).map_err(|fault| format!("{name}: {fault}"))
    };
    files.iter().map(read).collect()
}

/// One case from its JSON text.
pub(crate) fn parse(name: &str, text: &str) -> Result<CaseFile, String> {
    let file: Value = serde_json::from_str(text).map_err(|error| error.to_string())?;
    let calls: Vec<Call> = list(&file["calls"])?.iter().map(call).collect::<Result<_, _>>()?;
    let kept = optional(&file["kept"], |lists| each(lists, texts))?;
    let expect = &file["expect"];
    let expected = match optional(&expect["refused"], text_of)?.as_deref() {
        None => Ok(answer(expect)?),
        Some("missing_call") => Err(Refusal::MissingCall),
        Some("broken_link") => Err(Refusal::BrokenLink),
        Some(other) => return Err(format!("refused: {other}")),
    };
    let case = Case { calls, kept, settings: settings(&file["settings"])? };
    let reward = file["reward"].as_f64();
    let other = expect["rows"].as_array().into_iter().flatten().find(|row| row["reward"].as_f64() != reward);
    if let Some(row) = other {
        return Err(format!("a row's reward is {}, not {reward:?}", row["reward"]));
    }
    Ok(CaseFile { name: name.to_owned(), case, reward, expected })
}

fn settings(value: &Value) -> Result<Settings, String> {
    let choice = |key: &str| optional(&value[key], text_of);
    Ok(Settings {
        shared_call_owner: match choice("shared_call_owner")?.as_deref() {
            None | Some("root_agent") => SharedCallOwner::RootAgent,
            Some("first_leaf") => SharedCallOwner::FirstLeaf,
            Some(other) => return Err(format!("shared_call_owner: {other}")),
        },
        on_broken_link: match choice("broken_link")?.as_deref() {
            None | Some("infer") => OnBrokenLink::Infer,
            Some("discard") => OnBrokenLink::Discard,
            Some(other) => return Err(format!("broken_link: {other}")),
        },
        agents_without_list: match choice("agents_without_list")?.as_deref() {
            None | Some("drop") => AgentsWithoutList::Drop,
            Some("keep") => AgentsWithoutList::Keep,
            Some(other) => return Err(format!("agents_without_list: {other}")),
        },
        policy: choice("policy")?,
        max_row_tokens: optional(&value["max_row_tokens"], number)?,
    })
}

fn call(value: &Value) -> Result<Call, String> {
    let generation: Vec<u32> = numbers(&value["generation"])?;
    let logprobs = optional(&value["logprobs"], floats)?.unwrap_or_else(|| vec![0.0; generation.len()]);
    if logprobs.len() != generation.len() {
        return Err(format!("{} log-probabilities for {} ids", logprobs.len(), generation.len()));
    }
    Ok(Call {
        id: text_of(&value["call_id"])?,
        agent: optional(&value["agent_id"], text_of)?.unwrap_or_else(|| "main".to_owned()),
        parent_agent: optional(&value["parent_agent_id"], text_of)?,
        sequence: optional(&value["sequence"], number)?.unwrap_or(0),
        prompt: numbers(&value["prompt"])?,
        generation,
        logprobs,
        link: match value["link"].as_str() {
            Some("infer") => Link::Infer,
            Some("root") => Link::Root,
            Some(other) => return Err(format!("link: {other}")),
            None => optional(&value["link"]["parent"], text_of)?.map_or(Link::Infer, Link::Parent),
        },
        train: value["train"].as_bool().unwrap_or(true),
        policy: optional(&value["policy"], text_of)?.unwrap_or_else(|| "main".to_owned()),
    })
}

fn answer(value: &Value) -> Result<Answer, String> {
    let broken = |value: &Value| {
        let first_difference = optional(&value["first_difference"], number)?;
        Ok(BrokenLink { named: text_of(&value["parent"])?, first_difference })
    };
    Ok(Answer {
        parents: each(&value["parents"], |parent| optional(parent, text_of))?,
        broken_links: each(&value["broken_links"], broken)?,
        rows: list(&value["rows"])?.iter().map(row).collect::<Result<_, _>>()?,
    })
}

fn row(value: &Value) -> Result<Row, String> {
    Ok(Row {
        policy: text_of(&value["policy"])?,
        leaf: text_of(&value["leaf"])?,
        agent: text_of(&value["agent"])?,
        root: text_of(&value["root"])?,
        walk: texts(&value["walk"])?,
        trains: texts(&value["trains"])?,
        token_ids: numbers(&value["token_ids"])?,
        loss_mask: numbers(&value["loss_mask"])?,
        logprobs: floats(&value["logprobs"])?,
    })
}

fn optional<T>(value: &Value, read: impl Fn(&Value) -> Result<T, String>) -> Result<Option<T>, String> {
    if value.is_null() { Ok(None) } else { read(value).map(Some) }
}

fn each<T>(value: &Value, read: impl Fn(&Value) -> Result<T, String>) -> Result<BTreeMap<String, T>, String> {
    let entries = value.as_object().ok_or_else(|| format!("{value} is no object"))?;
    entries.iter().map(|(key, value)| Ok((key.clone(), read(value)?))).collect()
}

fn list(value: &Value) -> Result<&Vec<Value>, String> {
    value.as_array().ok_or_else(|| format!("{value} is no list"))
}

fn texts(value: &Value) -> Result<Vec<String>, String> {
    list(value)?.iter().map(text_of).collect()
}

fn text_of(value: &Value) -> Result<String, String> {
    value.as_str().map(str::to_owned).ok_or_else(|| format!("{value} is no text"))
}

fn numbers<T: TryFrom<u64>>(value: &Value) -> Result<Vec<T>, String> {
    list(value)?.iter().map(number).collect()
}

fn number<T: TryFrom<u64>>(value: &Value) -> Result<T, String> {
    value.as_u64().and_then(|number| T::try_from(number).ok()).ok_or_else(|| format!("{value} is no such number"))
}

fn floats(value: &Value) -> Result<Vec<f32>, String> {
    #[expect(clippy::cast_possible_truncation, reason = "the files write single-precision values")]
    let narrow = |value: f64| value as f32;
    let float = |value: &Value| value.as_f64().map(narrow).ok_or_else(|| format!("{value} is no number"));
    list(value)?.iter().map(float).collect()
}
