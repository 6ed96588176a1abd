//! What the house keeps besides the lints: imports go one way, files and functions stay small, modules say what they are
//! for, and no unfinished work is left lying. Prints every offence as `file:line: what`.

use std::fs;
use std::path::{Path, PathBuf};

const FILE_LINES_MAX: usize = 500;
const FUNCTION_LINES_MAX: usize = 70;

/// For each module of `src`, the others that it may know (src/ARCHITECTURE.md, "The map"). `main` and `lib` join all.
const MAY_IMPORT: [(&str, &[&str]); 16] = [
    ("limits", &[]),
    ("ids", &["limits"]),
    ("error", &["ids", "limits"]),
    ("config", &["error", "ids", "limits"]),
    ("telemetry", &["error", "ids", "limits"]),
    ("forest", &["ids", "limits"]),
    ("rollout", &["forest", "group", "error", "ids", "limits"]),
    ("group", &["error", "ids", "limits"]),
    ("queue", &["error", "ids", "limits"]),
    ("log", &["queue", "group", "rollout", "forest", "telemetry", "config", "error", "ids", "limits"]),
    ("store", &["log", "queue", "group", "rollout", "forest", "telemetry", "config", "error", "ids", "limits"]),
    ("proto", &[]),
    (
        "rpc",
        &[
            "proto",
            "store",
            "log",
            "queue",
            "group",
            "rollout",
            "forest",
            "telemetry",
            "config",
            "error",
            "ids",
            "limits",
        ],
    ),
    ("http", &["store", "log", "queue", "group", "rollout", "forest", "telemetry", "config", "error", "ids", "limits"]),
    (
        "service",
        &[
            "rpc",
            "http",
            "store",
            "log",
            "queue",
            "group",
            "rollout",
            "forest",
            "telemetry",
            "config",
            "error",
            "ids",
            "limits",
        ],
    ),
    (
        "cli",
        &[
            "service",
            "rpc",
            "http",
            "proto",
            "store",
            "log",
            "queue",
            "group",
            "rollout",
            "forest",
            "telemetry",
            "config",
            "error",
            "ids",
            "limits",
        ],
    ),
];

const PURE_MODULES: [&str; 4] = ["forest", "rollout", "group", "queue"];

/// What a pure module does not know: tasks, files, clocks, randomness, metrics, locks, the wire.
const IMPURE: [&str; 14] = [
    "tokio",
    "std::fs",
    "fs::File",
    "std::net",
    "Instant",
    "SystemTime",
    "rand",
    "metrics",
    "tracing",
    "parking_lot",
    "dashmap",
    "tonic",
    "prost",
    "std::thread",
];

/// Signs of unfinished work, in code and in comments. Written in two parts, for this file is read too.
const UNFINISHED: [&str; 6] = [
    concat!("to", "do!"),
    concat!("unimple", "mented!"),
    concat!("FIX", "ME"),
    concat!("XX", "X"),
    concat!("for ", "now"),
    concat!("db", "g!"),
];

/// A file that may wait by the clock, and why. A timer is a `select!` arm on a deadline; a test waits for an event.
const MAY_SLEEP: [(&str, &str); 2] = [
    ("tests/soak/service.rs", "it looks at what a process uses, now and then, for as long as it is told"),
    ("tests/soak/worker.rs", "what is refused is tried again after the delay that the service says"),
];

#[test]
fn the_house_is_tidy() {
    let mut offences = Vec::new();
    let mut slept = Vec::new();
    for source in sources() {
        check_size(&source, &mut offences);
        check_functions(&source, &mut offences);
        check_unfinished(&source, &mut offences);
        check_sleep(&source, &mut slept, &mut offences);
        if source.path.starts_with("src/") {
            check_opening(&source, &mut offences);
            check_imports(&source, &mut offences);
            check_purity(&source, &mut offences);
        }
    }
    let idle = MAY_SLEEP.iter().filter(|(path, _)| !slept.iter().any(|slept| slept == path));
    offences.extend(idle.map(|(path, _)| format!("{path}:1: is allowed to sleep and does not")));
    assert!(offences.is_empty(), "{} offences\n{}", offences.len(), offences.join("\n"));
}

/// A file of this crate.
struct Source {
    /// From the crate's folder, with `/`.
    path: String,
    text: String,
    /// The text with comments and literals blanked out, byte for byte.
    code: String,
}

impl Source {
    fn new(path: &str, text: &str) -> Self {
        Self { path: path.to_owned(), text: text.to_owned(), code: blank_literals(text) }
    }

    /// The module of `src` that it belongs to.
    fn module(&self) -> &str {
        let inside = self.path.trim_start_matches("src/");
        inside.split('/').next().unwrap_or(inside).trim_end_matches(".rs")
    }

    fn at(&self, offset: usize, what: &str) -> String {
        let line = 1 + self.text.as_bytes()[..offset].iter().filter(|byte| **byte == b'\n').count();
        format!("{}:{line}: {what}", self.path)
    }
}

fn sources() -> Vec<Source> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut files = Vec::new();
    for folder in ["src", "tests"] {
        gather(&root.join(folder), &mut files);
    }
    files.sort();
    assert!(files.len() > 10, "the source tree is not where it was");
    let read = |file: &PathBuf| {
        let path = file.strip_prefix(root).unwrap_or(file).to_string_lossy().replace('\\', "/");
        Source::new(&path, &fs::read_to_string(file).unwrap_or_default())
    };
    files.iter().map(read).collect()
}

fn gather(folder: &Path, files: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        let path = entry.path();
        if path.is_dir() {
            gather(&path, files);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            files.push(path);
        }
    }
}

fn check_size(source: &Source, offences: &mut Vec<String>) {
    let lines = source.text.lines().count();
    if lines > FILE_LINES_MAX {
        offences.push(format!("{}:{lines}: the file has {lines} lines, more than {FILE_LINES_MAX}", source.path));
    }
}

fn check_opening(source: &Source, offences: &mut Vec<String>) {
    if !source.text.starts_with("//!") {
        offences.push(source.at(0, "the file does not open with //! and what it is for"));
    }
}

fn check_unfinished(source: &Source, offences: &mut Vec<String>) {
    for word in UNFINISHED {
        for offset in words(&source.text, word) {
            offences.push(source.at(offset, &format!("{word:?} is unfinished work")));
        }
    }
}

fn check_sleep(source: &Source, slept: &mut Vec<String>, offences: &mut Vec<String>) {
    for offset in words(&source.code, "sleep(") {
        if MAY_SLEEP.iter().any(|(path, _)| *path == source.path) {
            slept.push(source.path.clone());
        } else {
            offences.push(source.at(offset, "sleeps; wait for an event or a deadline, or say why in MAY_SLEEP"));
        }
    }
}

fn check_functions(source: &Source, offences: &mut Vec<String>) {
    for (offset, name, lines) in functions(&source.code) {
        if lines > FUNCTION_LINES_MAX {
            let what = format!("fn {name} has {lines} lines, more than {FUNCTION_LINES_MAX}");
            offences.push(source.at(offset, &what));
        }
    }
}

fn check_imports(source: &Source, offences: &mut Vec<String>) {
    let module = source.module();
    if ["main", "lib"].contains(&module) {
        return;
    }
    let Some((_, allowed)) = MAY_IMPORT.iter().find(|(known, _)| *known == module) else {
        offences.push(source.at(0, &format!("module {module} has no place in MAY_IMPORT and src/ARCHITECTURE.md")));
        return;
    };
    for (offset, imported) in imports(&source.code) {
        let known = MAY_IMPORT.iter().any(|(module, _)| *module == imported);
        if known && imported != module && !allowed.contains(&imported.as_str()) {
            offences.push(source.at(offset, &format!("{module} must not import {imported}")));
        }
    }
}

fn check_purity(source: &Source, offences: &mut Vec<String>) {
    let module = source.module();
    if PURE_MODULES.contains(&module) {
        for word in IMPURE {
            for offset in words(&source.code, word) {
                offences.push(source.at(offset, &format!("{module} is pure and must not know {word}")));
            }
        }
    }
}

/// The modules named right after `crate::`, also inside one level of braces, with their offsets.
fn imports(code: &str) -> Vec<(usize, String)> {
    let mut found = Vec::new();
    for offset in words(code, "crate") {
        let Some(rest) = code[offset + "crate".len()..].trim_start().strip_prefix("::") else { continue };
        let rest = rest.trim_start();
        match rest.strip_prefix('{') {
            None => found.push((offset, identifier(rest).to_owned())),
            Some(list) => {
                let mut depth = 1;
                let mut expects_name = true;
                for (place, character) in list.char_indices() {
                    match character {
                        '{' => depth += 1,
                        '}' => depth -= 1,
                        ',' if depth == 1 => expects_name = true,
                        _ if expects_name && is_word(character) => {
                            found.push((code.len() - list.len() + place, identifier(&list[place..]).to_owned()));
                            expects_name = false;
                        }
                        _ => {}
                    }
                    if depth == 0 {
                        break;
                    }
                }
            }
        }
    }
    // A list's length is counted from the end of the code, so offsets stay those of the code.
    found
}

/// Each function's offset, name and lines, from its `fn` to its closing brace.
fn functions(code: &str) -> Vec<(usize, &str, usize)> {
    let mut found = Vec::new();
    for offset in words(code, "fn") {
        let name = identifier(code[offset + 2..].trim_start());
        if name.is_empty() {
            continue;
        }
        let (mut round, mut braces) = (0_i32, 0_i32);
        let end = code[offset..].char_indices().find(|(_, character)| {
            match character {
                '(' | '[' => round += 1,
                ')' | ']' => round -= 1,
                '{' => braces += 1,
                '}' => braces -= 1,
                _ => {}
            }
            (round == 0 && braces == 0) && matches!(character, ';' | '}')
        });
        let end = end.map_or(code.len(), |(length, _)| offset + length);
        found.push((offset, name, 1 + code[offset..end].matches('\n').count()));
    }
    found
}

/// Where `word` stands without being part of a longer one.
fn words<'a>(text: &'a str, word: &'a str) -> impl Iterator<Item = usize> {
    let stands_alone = move |offset: &usize| {
        let before = text[..*offset].chars().next_back().is_some_and(is_word);
        let after = text[*offset + word.len()..].chars().next().is_some_and(is_word);
        !(before || (after && word.ends_with(is_word)))
    };
    text.match_indices(word).map(|(offset, _)| offset).filter(stands_alone)
}

fn identifier(text: &str) -> &str {
    text.split(|character| !is_word(character)).next().unwrap_or("")
}

fn is_word(character: char) -> bool {
    character.is_alphanumeric() || character == '_'
}

/// Blanks comments, strings and characters, so that what remains is code at the same offsets and lines.
fn blank_literals(text: &str) -> String {
    let bytes = text.as_bytes();
    let mut code = bytes.to_vec();
    let mut at = 0;
    while at < bytes.len() {
        let length = literal_length(&text[at..], at.checked_sub(1).map(|before| bytes[before]));
        for byte in &mut code[at..at + length] {
            if *byte != b'\n' {
                *byte = b' ';
            }
        }
        at += length.max(1);
        while !text.is_char_boundary(at) {
            at += 1;
        }
    }
    String::from_utf8_lossy(&code).into_owned()
}

/// How many bytes the comment or literal takes that begins here; 0 if none does.
fn literal_length(rest: &str, before: Option<u8>) -> usize {
    let inside_word = before.is_some_and(|byte| is_word(char::from(byte)));
    let until = |end: &str, from: usize| rest[from..].find(end).map_or(rest.len(), |found| from + found + end.len());
    if rest.starts_with("//") {
        return rest.find('\n').unwrap_or(rest.len());
    }
    if rest.starts_with("/*") {
        return block_comment_length(rest);
    }
    let raw = rest.strip_prefix("br").or_else(|| rest.strip_prefix('r')).filter(|_| !inside_word);
    if let Some(raw) = raw {
        let hashes = raw.len() - raw.trim_start_matches('#').len();
        if raw[hashes..].starts_with('"') {
            return until(&format!("\"{}", "#".repeat(hashes)), rest.len() - raw.len() + hashes + 1);
        }
    }
    match rest.chars().next() {
        Some('"') => quoted_length(rest, '"').unwrap_or(rest.len()),
        // A quote with no closing one near is a lifetime.
        Some('\'') => match rest[1..].chars().next() {
            Some('\\') => quoted_length(rest, '\'').unwrap_or(0),
            Some(character) if rest[1 + character.len_utf8()..].starts_with('\'') => 2 + character.len_utf8(),
            _ => 0,
        },
        _ => 0,
    }
}

fn block_comment_length(rest: &str) -> usize {
    let (mut depth, mut at) = (0_usize, 0);
    while at < rest.len() {
        match &rest.as_bytes()[at..] {
            [b'/', b'*', ..] => (depth, at) = (depth + 1, at + 2),
            [b'*', b'/', ..] if depth == 1 => return at + 2,
            [b'*', b'/', ..] => (depth, at) = (depth - 1, at + 2),
            _ => at += 1,
        }
    }
    rest.len()
}

fn quoted_length(rest: &str, quote: char) -> Option<usize> {
    let mut escaped = false;
    for (offset, character) in rest.char_indices().skip(1) {
        match character {
            _ if escaped => escaped = false,
            '\\' => escaped = true,
            _ if character == quote => return Some(offset + 1),
            _ => {}
        }
    }
    None
}

#[test]
fn the_checks_find_what_they_look_for() {
    let text = r##"//! Opens.
use crate::{ids::A, store::{B, C},
    rpc};
use crate::queue::D;
fn short(quote: char) -> [u8; 4] { let brace = '{'; "}"; r#"{"#; // {
    [0; 4] }
pub(crate) fn long<'a>(f: fn(u8)) {
    /* { /* nested */ } */
    metrics::count("tokio::sleep(");
    sleep(1);
}
"##;
    let source = Source::new("src/forest/sample.rs", text);
    let found = imports(&source.code);
    let named = |name: &str| found.iter().find(|(_, module)| module == name).map(|(offset, _)| *offset);
    assert_eq!(found.iter().map(|(_, module)| module.as_str()).collect::<Vec<_>>(), ["ids", "store", "rpc", "queue"]);
    assert_eq!(named("rpc"), text.find("rpc"));
    let lengths: Vec<(&str, usize)> =
        functions(&source.code).into_iter().map(|(_, name, lines)| (name, lines)).collect();
    assert_eq!(lengths, [("short", 2), ("long", 5)]);
    let mut offences = Vec::new();
    check_imports(&source, &mut offences);
    check_purity(&source, &mut offences);
    check_sleep(&source, &mut Vec::new(), &mut offences);
    let lines: Vec<&str> = offences.iter().filter_map(|offence| offence.split(": ").next()).collect();
    let at = |line: usize| format!("src/forest/sample.rs:{line}");
    assert_eq!(lines, [at(2), at(3), at(4), at(9), at(10)]);
    assert_eq!(source.module(), "forest");
}
