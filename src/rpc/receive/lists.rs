//! The lists in requests: where they stand in a message, and how much of each is too much to decode.
//!
//! An element takes as little as two bytes of a message, and dozens once it is decoded. The bounds are those of conversion, which
//! comes too late for them. `proto/hedgerow/v1` says what stands where; a test holds this table against its descriptors.

use crate::limits;
use crate::proto::v1;

/// A message, as far as there are lists in it.
pub(in crate::rpc) struct Shape(pub(super) &'static [Field]);

/// A field that is a list, or in whose messages there are lists.
pub(super) struct Field {
    pub(super) tag: u32,
    /// Its name in paths; empty where the path ends before it.
    pub(super) name: &'static str,
    /// What to count; none: there is one message at most.
    pub(super) list: Option<List>,
    pub(super) inside: &'static Shape,
}

/// How a list is counted.
pub(super) struct List {
    pub(super) counter: Counter,
    /// The plural of its elements.
    pub(super) elements: &'static str,
    pub(super) most: usize,
    /// What one takes decoded, besides the bytes that it took in the message.
    pub(super) element_bytes: usize,
    /// Many may stand together, one varint after another.
    pub(super) is_packed: bool,
}

/// What is counted together, over a whole request.
#[derive(Clone, Copy)]
pub(super) enum Counter {
    Requests,
    Tags,
    VersionSpans,
    Columns,
    AnswersRead,
    KeptAgents,
    KeptCalls,
    Components,
    Credits,
    Acks,
    Policies,
    ConsumerGroups,
    Required,
    Kinds,
    States,
    Rollouts,
}

/// How many there are of [`Counter`].
pub(super) const COUNTERS: usize = Counter::Rollouts as usize + 1;

/// A message of a stream that is counted before it is decoded.
pub(in crate::rpc) trait Listed {
    /// Its lists.
    const SHAPE: &'static Shape;
}

impl Listed for v1::ReportRequest {
    const SHAPE: &'static Shape = &REPORT;
}

impl Listed for v1::SubscribeRequest {
    const SHAPE: &'static Shape = &SUBSCRIBE;
}

/// The lists in the one message of a request to this method.
pub(super) fn of_method(path: &str) -> &'static Shape {
    match path {
        "/hedgerow.v1.HarnessService/ReportBatch" => &BATCH,
        "/hedgerow.v1.AdminService/CreateRun" | "/hedgerow.v1.AdminService/UpdateRunSettings" => &RUN,
        "/hedgerow.v1.InspectService/ListRollouts" => &LIST_ROLLOUTS,
        "/hedgerow.v1.InspectService/ExportTrace" => &EXPORT_TRACE,
        _ => &NOTHING,
    }
}

/// What a block on the heap takes besides what is in it.
const BLOCK_BYTES: usize = 16;
/// An id or another text.
const TEXT_BYTES: usize = size_of::<String>() + BLOCK_BYTES;

/// An entry of a map, whose nodes may be half empty.
const fn entry_bytes<V>() -> usize {
    2 * (size_of::<String>() + size_of::<V>()) + BLOCK_BYTES
}

const fn one(tag: u32, name: &'static str, inside: &'static Shape) -> Field {
    Field { tag, name, list: None, inside }
}

const fn list(
    tag: u32,
    name: &'static str,
    (counter, elements): (Counter, &'static str),
    (most, element_bytes): (usize, usize),
    inside: &'static Shape,
) -> Field {
    Field { tag, name, list: Some(List { counter, elements, most, element_bytes, is_packed: false }), inside }
}

const fn numbers(tag: u32, name: &'static str, (counter, elements): (Counter, &'static str), most: usize) -> Field {
    let list = List { counter, elements, most, element_bytes: size_of::<i32>(), is_packed: true };
    Field { tag, name, list: Some(list), inside: &NOTHING }
}

static NOTHING: Shape = Shape(&[]);

static CALL_LIST: Shape =
    Shape(&[list(1, "", (Counter::KeptCalls, "calls"), (limits::KEPT_CALLS_MAX, TEXT_BYTES), &NOTHING)]);

static KEPT_AGENT: Shape = Shape(&[one(2, "", &CALL_LIST)]);

static KEPT: Shape = Shape(&[list(
    1,
    "agents",
    (Counter::KeptAgents, "agents"),
    (limits::ROLLOUT_AGENTS_MAX, entry_bytes::<v1::CallList>()),
    &KEPT_AGENT,
)]);

static SEAL: Shape = Shape(&[one(1, "kept", &KEPT)]);

static REWARD: Shape = Shape(&[
    list(2, "components", (Counter::Components, "components"), (limits::TAGS_MAX, entry_bytes::<f64>()), &NOTHING),
    list(3, "credits", (Counter::Credits, "credits"), (limits::ROLLOUT_CREDITS_MAX, size_of::<v1::Credit>()), &NOTHING),
]);

static FINISH: Shape = Shape(&[one(1, "seal", &SEAL), one(2, "reward", &REWARD)]);

static AGENT_END: Shape = Shape(&[
    one(4, "kept", &CALL_LIST),
    list(
        5,
        "answers_read_agent_ids",
        (Counter::AnswersRead, "agents"),
        (limits::ROLLOUT_AGENTS_MAX, TEXT_BYTES),
        &NOTHING,
    ),
]);

static CALL: Shape = Shape(&[
    list(
        8,
        "policy_versions",
        (Counter::VersionSpans, "spans"),
        (limits::CALL_VERSION_SPANS_MAX, size_of::<v1::PolicyVersionSpan>()),
        &NOTHING,
    ),
    list(17, "columns", (Counter::Columns, "columns"), (limits::NOT_YET_LISTED_MAX, size_of::<v1::Column>()), &NOTHING),
]);

static OPEN: Shape =
    Shape(&[list(2, "tags", (Counter::Tags, "tags"), (limits::TAGS_MAX, entry_bytes::<String>()), &NOTHING)]);

static REPORT: Shape = Shape(&[
    one(3, "open", &OPEN),
    one(4, "call", &CALL),
    one(6, "agent_end", &AGENT_END),
    one(7, "seal", &SEAL),
    one(8, "reward", &REWARD),
    one(9, "finish", &FINISH),
]);

static BATCH: Shape = Shape(&[list(
    1,
    "requests",
    (Counter::Requests, "requests"),
    (limits::BATCH_REQUESTS_MAX, size_of::<v1::ReportRequest>()),
    &REPORT,
)]);

const ACK_UNITS: ((Counter, &str), (usize, usize)) = ((Counter::Acks, "units"), (limits::ACK_UNITS_MAX, TEXT_BYTES));

static SUBSCRIPTION: Shape = Shape(&[list(6, "held_unit_ids", ACK_UNITS.0, ACK_UNITS.1, &NOTHING)]);

static ACK: Shape = Shape(&[list(1, "unit_ids", ACK_UNITS.0, ACK_UNITS.1, &NOTHING)]);

static SUBSCRIBE: Shape = Shape(&[one(1, "subscription", &SUBSCRIPTION), one(2, "ack", &ACK), one(3, "nack", &ACK)]);

static RUN_SETTINGS: Shape = Shape(&[
    list(
        1,
        "trained_policies",
        (Counter::Policies, "policies"),
        (limits::RUN_TRAINED_POLICIES_MAX, TEXT_BYTES),
        &NOTHING,
    ),
    list(
        15,
        "consumer_groups",
        (Counter::ConsumerGroups, "consumer groups"),
        (limits::RUN_CONSUMER_GROUPS_MAX, size_of::<v1::ConsumerGroupDeclaration>()),
        &NOTHING,
    ),
    list(
        16,
        "required_consumer_groups",
        (Counter::Required, "consumer groups"),
        (limits::RUN_CONSUMER_GROUPS_MAX, TEXT_BYTES),
        &NOTHING,
    ),
    list(30, "untrained_kinds", (Counter::Kinds, "kinds"), (limits::RUN_UNTRAINED_KINDS_MAX, TEXT_BYTES), &NOTHING),
]);

/// Requests that make or change a run.
static RUN: Shape = Shape(&[one(2, "settings", &RUN_SETTINGS)]);

static LIST_ROLLOUTS: Shape = Shape(&[
    numbers(3, "states", (Counter::States, "states"), limits::FILTER_STATES_MAX),
    list(4, "tags", (Counter::Tags, "tags"), (limits::TAGS_MAX, entry_bytes::<String>()), &NOTHING),
]);

static EXPORT_TRACE: Shape = Shape(&[list(
    2,
    "rollout_ids",
    (Counter::Rollouts, "rollouts"),
    (limits::NOT_YET_LISTED_MAX, TEXT_BYTES),
    &NOTHING,
)]);
