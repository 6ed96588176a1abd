//! Every bound of the service, with its unit in its name, and the relations between them.
//!
//! A bound that a user may move is a setting whose default stands here.

/// Longest identifier (of a run, group, rollout, agent, call, policy, model, kind …).
pub const IDENTIFIER_BYTES_MAX: usize = 256;
/// Longest message of a reason or a tag's value.
pub const TEXT_BYTES_MAX: usize = 4096;
/// Most tags of a rollout, and most named components of a reward.
pub const TAGS_MAX: usize = 64;

/// Most tokens of one call, prompt and generation together.
pub const CALL_TOKENS_MAX: usize = 4 << 20;
/// Most calls of a rollout.
pub const ROLLOUT_CALLS_MAX: usize = 100_000;
/// Most agents of a rollout.
pub const ROLLOUT_AGENTS_MAX: usize = 10_000;
/// Most starts and ends of the agents of a rollout.
pub const ROLLOUT_AGENT_FACTS_MAX: usize = 4 * ROLLOUT_AGENTS_MAX;
/// Most distinct small names (policies, models, kinds, finish reasons) in a rollout.
pub const ROLLOUT_NAMES_MAX: usize = 10_000;
/// Most spans of policy versions in a call.
pub const CALL_VERSION_SPANS_MAX: usize = 1024;
/// Most call ids in the kept lists of one event.
pub const KEPT_CALLS_MAX: usize = ROLLOUT_CALLS_MAX;
/// Most rollouts of a group.
pub const GROUP_SIZE_MAX: u32 = 65_536;
/// Refused calls that a rollout remembers, to say "refused, awaiting resend".
pub const ROLLOUT_REFUSED_CALLS_MAX: usize = 64;

/// Most policies that a run lists as trained.
pub const RUN_TRAINED_POLICIES_MAX: usize = 1024;
/// Longest time that a setting may name.
pub const DURATION_MS_MAX: u64 = 10 * 365 * 24 * 60 * 60 * 1000;
/// Calls and agents that one answer to a seal lists of each kind; it counts them all.
pub const SEAL_LISTED_MAX: usize = 256;
/// Calls on all walks together that are listed when a rollout is shown; beyond, rows are shown without their walks.
pub const SHOWN_WALK_CALLS_MAX: usize = 2_000_000;

/// Most runs.
pub const RUNS_MAX: usize = 1024;
/// Most consumer groups of a run.
pub const RUN_CONSUMER_GROUPS_MAX: usize = 64;
/// Most live rollouts (open, or finalised and not retired) of the service.
pub const ROLLOUTS_MAX: usize = 4_000_000;
/// Watchers of a run.
pub const RUN_WATCHERS_MAX: usize = 64;
/// Changed rollouts that a watcher remembers one by one; beyond, it goes through all.
pub const WATCH_DIRTY_ROLLOUTS_MAX: usize = 4096;
/// Changed groups that a watcher remembers one by one; beyond, it goes through all.
pub const WATCH_DIRTY_GROUPS_MAX: usize = 1024;
/// Policies that the ledger of a run, or of a consumer group, has; those after them have none.
pub const RUN_LEDGER_POLICIES_MAX: usize = 1024;
/// Agents by whose name the drift of a run is counted; those after them count together.
pub const RUN_DRIFTING_AGENTS_MAX: usize = 64;
/// Most tombstones; the oldest go first.
pub const TOMBSTONES_MAX: usize = 1_000_000;
/// Members of one consumer group, connected at once.
pub const CONSUMER_GROUP_MEMBERS_MAX: usize = 1024;

/// Most entries of a page of a list.
pub const PAGE_ENTRIES_MAX: usize = 1000;
/// Entries of a page where the request says nothing.
pub const PAGE_ENTRIES_DEFAULT: usize = 100;
/// Bytes of entries after which a page ends.
pub const PAGE_BYTES_MAX: usize = 1 << 20;
/// Rollouts that one request for a page looks at, whatever its filters leave out.
pub const PAGE_ROLLOUTS_LOOKED_AT_MAX: usize = 50_000;
/// Members of groups that the sequencing task goes through for one page.
pub const PAGE_MEMBERS_LOOKED_AT_MAX: usize = 100_000;
/// Ids of members of a group, and of undeliverable units, that are listed of each kind; they are counted all.
pub const LISTED_IDS_MAX: usize = 256;

/// Largest message taken from a client.
pub const REQUEST_MESSAGE_BYTES_MAX: usize = 64 << 20;
/// Largest message sent to a trainer. A unit larger than this is sent in parts.
pub const UNIT_MESSAGE_BYTES_MAX: usize = 2 << 20;
/// Answers outstanding on one stream of reports; a client that does not read its answers is not read from.
pub const STREAM_ANSWERS_OUTSTANDING_MAX: usize = 1024;
/// Requests in one `ReportBatch`.
pub const BATCH_REQUESTS_MAX: usize = 4096;
/// Bytes of messages between their arrival and the place of their records in the log, over all streams.
pub const IN_FLIGHT_BYTES_MAX: usize = 512 << 20;
/// Units on their way to one consumer's stream.
pub const CONSUMER_UNITS_IN_FLIGHT_MAX: usize = 256;
/// Unit ids in one acknowledgement, and in all of one subscription that are not answered yet.
pub const ACK_UNITS_MAX: usize = 65_536;
/// Acknowledgements of one subscription that are not answered yet; a trainer that does not read its answers is not read from.
pub const ACK_ANSWERS_OUTSTANDING_MAX: usize = 128;

/// HTTP/2 window of one stream.
pub const HTTP2_STREAM_WINDOW_BYTES: u32 = 2 << 20;
/// HTTP/2 window of one connection.
pub const HTTP2_CONNECTION_WINDOW_BYTES: u32 = 64 << 20;
/// Streams of one connection.
pub const HTTP2_CONNECTION_STREAMS_MAX: u32 = 32;
/// HTTP/2 frame.
pub const HTTP2_FRAME_BYTES: u32 = 1 << 20;

/// Distinct runs, policies and consumer groups that metrics name; those after them are `other`.
pub const METRIC_LABEL_VALUES_MAX: usize = 32;
/// HTTP connections served at once; the next ones wait to be taken.
pub const HTTP_CONNECTIONS_MAX: usize = 64;
/// Longest HTTP request with its headers. No path takes a body.
pub const HTTP_REQUEST_BYTES_MAX: usize = 16 << 10;
/// Life of one HTTP connection: one request and its answer.
pub const HTTP_CONNECTION_SECONDS_MAX: u64 = 10;

/// Ids shown from each side of a first difference.
pub const DRIFT_IDS_SHOWN: usize = 8;

// One unread stream must not stop its neighbours: all streams' windows fit in the connection's.
const _: () = assert!(
    HTTP2_STREAM_WINDOW_BYTES as u64 * HTTP2_CONNECTION_STREAMS_MAX as u64 <= HTTP2_CONNECTION_WINDOW_BYTES as u64
);
// A call at its limit (ids and log-probabilities) fits into a message, and a message into what may be in flight.
const _: () = assert!(CALL_TOKENS_MAX * 8 <= REQUEST_MESSAGE_BYTES_MAX);
const _: () = assert!(REQUEST_MESSAGE_BYTES_MAX <= IN_FLIGHT_BYTES_MAX);
// A page that asks for nothing is one that may be asked for, and with its last entry it stays below gRPC's usual 4 MiB: a
// rollout's tags are the largest part of an entry.
const _: () = assert!(PAGE_ENTRIES_DEFAULT <= PAGE_ENTRIES_MAX);
const _: () = assert!(PAGE_BYTES_MAX + TAGS_MAX * (IDENTIFIER_BYTES_MAX + TEXT_BYTES_MAX) < 2 << 20);
// Lengths of sequences are kept as u32.
const _: () = assert!(CALL_TOKENS_MAX < u32::MAX as usize);
