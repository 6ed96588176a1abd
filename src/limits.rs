//! Every bound of the service, with its unit in its name, and the relations between them.
//!
//! A bound that a user may move is a setting whose default stands here. What depends on one of these, the memory budget, is in
//! [`edge`].

pub mod edge;

pub use edge::EdgeBytes;

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
/// Most calls and agents of a rollout that have credits.
pub const ROLLOUT_CREDITS_MAX: usize = ROLLOUT_CALLS_MAX + ROLLOUT_AGENTS_MAX;
/// Largest process reward, and largest factor, up to its sign: products and sums of several stay finite.
pub const CREDIT_VALUE_MAX: f64 = 1e30;
/// Largest advantage of a rollout in its group, up to its sign: beyond, its group is dropped. With credits it stays finite.
pub const ADVANTAGE_MAX: f64 = 1e200;
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
/// Most kinds of calls that a run lists as not trained.
pub const RUN_UNTRAINED_KINDS_MAX: usize = 64;
/// Longest time that a setting may name.
pub const DURATION_MS_MAX: u64 = 10 * 365 * 24 * 60 * 60 * 1000;
/// Calls and agents that one answer to a seal lists of each kind; it counts them all.
pub const SEAL_LISTED_MAX: usize = 256;
/// Bytes of the ids in each of these lists.
pub const SEAL_LISTED_BYTES_MAX: usize = 16 << 10;
/// Calls and entries of kept lists above which what a seal found is kept until something changes: the rollout itself takes more.
pub const SEAL_FINDINGS_CALLS: usize = 1024;
/// Bytes of the answers to one batch after which answers to seals list nothing more; they count all the same.
pub const BATCH_LISTS_BYTES_MAX: usize = 1 << 20;
/// Bytes of what is shown above which it counts while it is on its way.
pub const SHOWN_LARGE_BYTES: usize = 16 << 10;
/// Rollouts that are put together to be shown at once.
pub const SHOWN_AT_ONCE_MAX: usize = 4;
/// When to try again if too much is on its way.
pub const SHOWN_RETRY_AFTER_MS: u64 = 500;
/// Calls on all walks together that are listed when a rollout is shown; beyond, rows are shown without their walks.
pub const SHOWN_WALK_CALLS_MAX: usize = 2_000_000;

/// Most runs.
pub const RUNS_MAX: usize = 1024;
/// Most groups of a run, with those that are over and remembered.
pub const RUN_GROUPS_MAX: usize = 1_000_000;
/// Most consumer groups of a run.
pub const RUN_CONSUMER_GROUPS_MAX: usize = 64;
/// Most rollouts of the service: open, finalised and not retired, and tombstones.
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
/// Consumers and their groups that the sequencing task goes through for one page.
pub const PAGE_CONSUMERS_LOOKED_AT_MAX: usize = 4096;
/// Members of groups that the sequencing task goes through for one page.
pub const PAGE_MEMBERS_LOOKED_AT_MAX: usize = 100_000;
/// Ids of members of a group, and of undeliverable units, that are listed of each kind; they are counted all.
pub const LISTED_IDS_MAX: usize = 256;
/// What rollouts, groups and tombstones may hold in memory, unless the configuration says otherwise.
pub const MEMORY_BUDGET_BYTES: u64 = 4 << 30;
/// The smallest budget that may be set.
pub const MEMORY_BUDGET_BYTES_MIN: u64 = 256 << 10;
/// The part of the budget above which rollouts of new groups are not opened.
pub const MEMORY_OPENS_PERCENT: u64 = 80;
/// The part of the budget above which the tokens of idle rollouts leave memory, where the log keeps them.
pub const MEMORY_EVICT_IDLE_PERCENT: u64 = 70;
/// The part above which those of all others leave too: below that from which on nothing new is opened, so that only what cannot leave
/// has anything refused.
pub const MEMORY_EVICT_PERCENT: u64 = 75;
/// The part above which whoever brings more waits until what is on its way to the disk is durable, and can leave.
pub const MEMORY_EVICT_WAIT_PERCENT: u64 = 78;
/// Percent of the memory budget above which what is acknowledged is not retained any longer: before openings are refused, and only
/// where tokens that leave memory do not suffice.
pub const MEMORY_RETIRE_PERCENT: u64 = 76;
/// A rollout is idle that was not used for so long.
pub const EVICTED_IDLE_MS: u64 = 1000;
/// What a rollout's tokens must take to be worth letting go of: about what stays of it.
pub const EVICTED_TOKEN_BYTES_MIN: u64 = 4 << 10;
/// Rollouts looked at, at once, for tokens to let go of.
pub const EVICTED_AT_ONCE: usize = 64;
/// Requests to read rollouts back from the log that wait.
pub const READINGS_OUTSTANDING_MAX: usize = 64;
/// Threads that read rollouts back from the log.
pub const READING_THREADS: usize = 2;
/// How often a rollout's tokens are asked back that have left memory again before they were used.
pub const RESTORE_TRIES_MAX: usize = 8;
/// When it may be worth trying again what needs tokens that the log did not give back.
pub const RESTORE_RETRY_AFTER_MS: u64 = 1000;
/// The reserve above the budget, in three equal parts: for the calls of the sealed and of the oldest rollouts, for the oldest one of
/// those that ask, and for the oldest one of all. So the last part is whole whenever another becomes the oldest and what the one
/// before it held is given back.
pub const MEMORY_RESERVE_PERCENT: u64 = 24;
/// The part of the budget above which members of known groups, and new attempts at open rollouts, are not opened: they leave most
/// of the reserve to what is there.
pub const MEMORY_AWAITED_OPENS_PERCENT: u64 = 106;
/// Lists, in what ends a rollout, of calls and agents that have not come are always taken if they take no more than this.
pub const MEMORY_END_BYTES: u64 = 4096;
/// The part of the budget that tombstones may hold, as its divisor.
pub const MEMORY_TOMBSTONES_DIVISOR: u64 = 8;
/// The oldest open rollouts, whose calls are taken from the reserve.
pub const MEMORY_FAVOURED_ROLLOUTS: usize = 64;
/// How long a rollout has not asked for memory until it is not one of the oldest any more, for the reserve: a few times as long as it
/// takes to try again what was refused.
pub const MEMORY_QUIET_MS: u64 = 5_000;
/// When it may be worth trying again what was refused for want of memory.
pub const MEMORY_RETRY_AFTER_MS: u64 = 1000;
/// Estimated bytes of a group, and of one of its members, without their ids' texts.
pub const GROUP_BYTES: u64 = 512;
/// See [`GROUP_BYTES`].
pub const GROUP_MEMBER_BYTES: u64 = 168;
/// Bytes that a group's release takes besides, without those whom it counts.
pub const GROUP_RELEASE_BYTES: u64 = 192;
/// Bytes of each rollout that a group's release counts.
pub const GROUP_COUNTED_BYTES: u64 = 48;
/// Estimated bytes of a tombstone with its place in the map and its ids' texts of usual length.
pub const TOMBSTONE_BYTES: u64 = 704;
/// Estimated bytes of a unit in a consumer group's line, without its id's text.
pub const UNIT_BYTES: u64 = 640;

/// Largest message taken from a client.
pub const REQUEST_MESSAGE_BYTES_MAX: usize = 64 << 20;
/// Largest message taken by all services but that of harnesses.
pub const OTHER_MESSAGE_BYTES_MAX: usize = 4 << 20;
/// Largest message sent to a trainer. A unit larger than this is sent in parts.
pub const UNIT_MESSAGE_BYTES_MAX: usize = 2 << 20;
/// Answers outstanding on one stream of reports; a client that does not read its answers is not read from.
pub const STREAM_ANSWERS_OUTSTANDING_MAX: usize = 1024;
/// What one answer may hold: room for so much is taken before it is made.
pub const ANSWER_BYTES_MAX: usize = 128 << 10;
/// Answers outstanding for which a stream needs no such room, if they hold no more than this together.
pub const STREAM_ANSWERS_FREE: usize = 16;
/// See [`STREAM_ANSWERS_FREE`].
pub const STREAM_ANSWERS_FREE_BYTES: usize = 32 << 10;
/// What an answer in a batch holds, without what answers to seals list.
pub const BATCH_ANSWER_BYTES: usize = 1 << 10;
/// Requests in one `ReportBatch`.
pub const BATCH_REQUESTS_MAX: usize = 4096;
/// What the requests of a batch, and the elements of their lists, take decoded besides the bytes that were sent.
pub const BATCH_DECODED_BYTES_MAX: usize = 64 << 20;
/// Elements of a list that is refused anyway, because this release does not have what it asks for.
pub const NOT_YET_LISTED_MAX: usize = 64;
/// States that a filter names.
pub const FILTER_STATES_MAX: usize = 64;
/// Fields of a message above which it is read by a thread that may take long.
pub const LONG_MESSAGE_FIELDS: usize = 4096;
/// Such messages that are read at once, at most.
pub const LONG_MESSAGES_AT_ONCE_MAX: usize = 4;
/// Messages of a stream below this are not counted before they are decoded.
pub const COUNTED_MESSAGE_BYTES_MIN: usize = 512;
/// Requests to the sequencing task on their way.
pub const COMMANDS_OUTSTANDING_MAX: usize = 4096;
/// Requests that the sequencing task takes in one turn before what became of them goes out.
pub const COMMANDS_AT_ONCE: usize = 256;
/// Units given out to one consumer group before others have their turn.
pub const DISPATCH_UNITS_AT_ONCE: usize = 64;
/// When it may be worth opening a group again that would be too far ahead of the trainers.
pub const LEAD_RETRY_AFTER_MS: u64 = 1000;
/// Units of one consumer group that are found to be too old before others have their turn.
pub const DISPATCH_STALE_AT_ONCE: usize = 1024;
/// Rollouts whose deadline has come that are looked at before others have their turn.
pub const TIMERS_AT_ONCE: usize = 64;
/// How often an event is tried again when its rollout was removed or superseded, or its tokens left memory, between two steps.
pub const REPORT_TRIES_MAX: usize = 8;
/// Notices on their way to one stream; more are not sent, since the seal's answer says the same.
pub const STREAM_NOTICES_OUTSTANDING_MAX: usize = 1024;
/// How long a lease lasts without a sign of life of its consumer, unless the run says otherwise.
pub const LEASE_MS: u64 = 60 * 60 * 1000;
/// How long a nack may put a unit off.
pub const NACK_DELAY_MS_MAX: u64 = 60 * 60 * 1000;
/// Units that may wait in an ephemeral consumer group; the oldest go first.
pub const EPHEMERAL_WAITING_UNITS_MAX: usize = 4096;
/// Messages on their way to one trainer, and their bytes.
pub const TRAINER_MESSAGES_OUTSTANDING_MAX: usize = 256;
/// See [`TRAINER_MESSAGES_OUTSTANDING_MAX`].
pub const TRAINER_BYTES_OUTSTANDING_MAX: usize = 4 * UNIT_MESSAGE_BYTES_MAX;
/// Of these, what each may have whatever the others do.
pub const TRAINER_BYTES_FREE: usize = 256 << 10;
/// News for one consumer that may wait besides its units.
pub const CONSUMER_NEWS_OUTSTANDING_MAX: usize = 256;
/// Room in an ephemeral consumer's line that is kept for news.
pub const EPHEMERAL_NEWS_ROOM: usize = 16;
/// How long a trainer may leave so many answers unread that no more of its acknowledgements are taken, and how long it may read
/// nothing while it has room that others wait for.
pub const TRAINER_UNREAD_MS_MAX: u64 = 30_000;
/// Units on their way to one consumer's stream.
pub const CONSUMER_UNITS_IN_FLIGHT_MAX: usize = 256;
/// Unit ids in one acknowledgement, and in all of one subscription that are not answered yet.
pub const ACK_UNITS_MAX: usize = 65_536;
/// Acknowledgements of one subscription that are not answered yet; a trainer that does not read its answers is not read from.
pub const ACK_ANSWERS_OUTSTANDING_MAX: usize = 128;

/// Most units that make a step: their ids stand in one record.
pub const STEP_UNITS_MAX: u32 = 16_384;
/// Most shards of a step: each has a consumer of its own.
pub const STEP_SHARDS_MAX: u32 = 1024;
/// Rows of a step, beyond which it is frozen with fewer units, but for one that has more alone: cutting it takes some milliseconds.
pub const STEP_ROWS_MAX: u64 = 1 << 18;
/// Steps of a consumer group that are frozen and not acknowledged, at which no other is frozen: what waits for a step can be dropped
/// for its age, what is frozen cannot.
pub const STEPS_OPEN_MAX: usize = 8;
/// Open steps that are listed of a consumer group; after a seek there may be many.
pub const OPEN_STEPS_LISTED_MAX: usize = 64;
/// Estimated bytes of a row in a step that is cut.
pub const STEP_ROW_BYTES: u64 = 16;
/// Estimated bytes of a unit in a step.
pub const STEP_MEMBER_BYTES: u64 = 64;

/// Connections of gRPC, if memory allows; the next ones wait to be taken.
pub const GRPC_CONNECTIONS_MAX: usize = 8192;
/// What a connection holds in the transport, besides what it has sent.
pub const GRPC_CONNECTION_BYTES: usize = 16 << 10;
/// What an open request or stream holds in the transport and in its task, besides its messages.
pub const REQUEST_BYTES: usize = 18 << 10;
/// Requests that each connection may have open, whatever the others do.
pub const REQUESTS_CONNECTION_OWN: usize = 2;
/// When to try again if too many requests are open.
pub const REQUESTS_RETRY_AFTER_MS: u64 = 500;
/// The first bytes of a connection: the preface of HTTP/2, and the head of the frame that follows it.
pub const GRPC_GREETING_BYTES: usize = 24 + 9;
/// How long they may take.
pub const GRPC_GREETING_MS_MAX: u64 = 20_000;
/// Bytes that have come of messages which are not whole, over the streams of one connection, besides what it has for itself.
pub const RECEIVE_CONNECTION_BYTES_MAX: usize = 128 << 20;
/// Of messages that are not whole, what each connection may hold without asking for room; less if there are many.
pub const RECEIVE_CONNECTION_OWN_BYTES_MAX: usize = 4 << 20;
/// What each connection may have sent that nobody has read, whatever the others do: between these, the less the more there are.
pub const UNREAD_CONNECTION_FREE_BYTES_MAX: usize = 4 << 20;
/// See [`UNREAD_CONNECTION_FREE_BYTES_MAX`].
pub const UNREAD_CONNECTION_FREE_BYTES_MIN: usize = 8 << 10;
/// How long a connection that is not read from waits until it ends.
pub const UNREAD_MS_MAX: u64 = 30_000;
/// How long a message may take to become whole, besides what its bytes take.
pub const RECEIVE_MESSAGE_MS_MIN: u64 = 30_000;
/// The slowest that a message may come.
pub const RECEIVE_BYTES_PER_MS_MIN: u64 = 1024;
/// When to try again while the log is read.
pub const NOT_READY_RETRY_AFTER_MS: u64 = 1000;
/// When to try again after a message that took too long.
pub const RECEIVE_RETRY_AFTER_MS: u64 = 1000;
/// Bytes of all ids of units that a trainer says it still holds, so that the answer to them is one message.
pub const HELD_UNITS_BYTES_MAX: usize = 1 << 20;

/// How long a stream works without a pause until others have their turn.
pub const TURN_US: u64 = 400;
/// What counts as a pause.
pub const TURN_PAUSE_US: u64 = 50;
/// Bytes that a connection reads for each unit of the budget of 128 after which its task gives way.
pub const CONNECTION_READ_UNIT_BYTES: usize = 8 << 10;

/// What the transport holds of each frame of DATA that is not read, besides its payload.
pub const HTTP2_DATA_FRAME_BYTES: usize = 512;
/// HTTP/2 window of one stream.
pub const HTTP2_STREAM_WINDOW_BYTES: u32 = 2 << 20;
/// HTTP/2 window of one connection.
pub const HTTP2_CONNECTION_WINDOW_BYTES: u32 = 64 << 20;
/// Streams of one connection.
pub const HTTP2_CONNECTION_STREAMS_MAX: u32 = 32;
/// Headers of one request.
pub const HTTP2_HEADER_LIST_BYTES_MAX: u32 = 16 << 10;
/// Of a header's value, what goes on with its request.
pub const HEADER_VALUE_BYTES_MAX: usize = 64;
/// The longest path of a method.
pub const METHOD_PATH_BYTES_MAX: usize = 256;
/// HTTP/2 frame.
pub const HTTP2_FRAME_BYTES: u32 = 1 << 20;

/// Size of a segment of the log, unless the configuration says otherwise.
pub const LOG_SEGMENT_BYTES: u64 = 64 << 20;
/// The smallest segment that may be set.
pub const LOG_SEGMENT_BYTES_MIN: u64 = 8 << 10;
/// The largest segment that may be set. Offsets in a segment are kept as u32.
pub const LOG_SEGMENT_BYTES_MAX: u64 = 1 << 30;
/// Segments that are allocated before they are needed.
pub const LOG_SPARE_SEGMENTS: usize = 2;
/// What all files of the log may take, unless the configuration says otherwise.
pub const LOG_BUDGET_BYTES: u64 = 64 << 30;
/// How often it is tried to make a spare where there was no room for one.
pub const LOG_SPARE_RETRY_MS: u64 = 1000;
/// A batch of the log takes no more frames beyond this; a larger frame is a batch of its own.
pub const LOG_BATCH_BYTES: usize = 1 << 20;
/// Batches of records that are decoded before they are applied, when a log is read; each of about [`LOG_BATCH_BYTES`], and one frame
/// more at most.
pub const LOG_AHEAD_BATCHES_MAX: usize = 2;
/// Records in such a batch.
pub const LOG_AHEAD_BATCH_RECORDS: usize = 512;
/// How long the first frame of a batch waits for others while nothing is being written.
pub const LOG_LINGER_US: u64 = 0;
/// Largest payload of a frame of the log: a message, and what a record adds to it.
pub const LOG_FRAME_BYTES_MAX: usize = REQUEST_MESSAGE_BYTES_MAX + (1 << 20);
/// The smallest log that may be set, in segments: a few, and spares.
pub const LOG_BUDGET_SEGMENTS_MIN: u64 = 8;
/// The smallest segment that a configuration may set.
pub const LOG_SEGMENT_BYTES_MIN_SET: u64 = 64 << 10;
/// When it may be worth trying again what was refused because the log is full.
pub const LOG_FULL_RETRY_AFTER_MS: u64 = 5000;
/// Frames that are not durable yet; above it callers hold back.
pub const LOG_QUEUED_BYTES_MAX: u64 = 64 << 20;
/// Missing segments that a salvage stands in for.
pub const LOG_SALVAGED_HOLES_MAX: usize = 4096;
/// The part of what the log may take, in percent, above which what holds its oldest segment is written forward.
pub const LOG_FILLING_PERCENT: u64 = 70;
/// The part of what the log may take, as its divisor, of which rollouts must have ended until all others are written forward again.
pub const LOG_PASS_DIVISOR: u64 = 8;
/// Rollouts that are written forward at once, and the memory that they hold; one in any case.
pub const LOG_CARRIED_ROLLOUTS: usize = 256;
/// See [`LOG_CARRIED_ROLLOUTS`].
pub const LOG_CARRIED_BYTES: u64 = 128 << 20;
/// Finalised rollouts whose end is decided at once, for each run and reason.
pub const RETIRED_AT_ONCE: usize = 1024;
/// The most each second while memory is nearly short.
pub const RETIRED_FOR_MEMORY_AT_ONCE: usize = 16_384;
/// How long units from before a restart are kept for the trainers that hold them, unless the configuration says otherwise: time
/// for all of them to find out and come back.
pub const RESTART_GRACE_MS: u64 = 10_000;
/// Rollouts that have ended in one record.
pub const TOMBSTONES_RECORD_MAX: usize = 1024;
/// One place is known in memory for so many bytes of the log.
pub const LOG_INDEX_STRIDE_BYTES: u32 = 64 << 10;

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
// A call at its limit (ids and log-probabilities) fits into a message.
const _: () = assert!(CALL_TOKENS_MAX * 8 <= REQUEST_MESSAGE_BYTES_MAX);
// A page that asks for nothing is one that may be asked for, and with its last entry it stays below gRPC's usual 4 MiB: a
// rollout's tags are the largest part of an entry.
const _: () = assert!(PAGE_ENTRIES_DEFAULT <= PAGE_ENTRIES_MAX);
const _: () = assert!(PAGE_BYTES_MAX + TAGS_MAX * (IDENTIFIER_BYTES_MAX + TEXT_BYTES_MAX) < 2 << 20);
// Lengths of sequences are kept as u32.
const _: () = assert!(CALL_TOKENS_MAX < u32::MAX as usize);

// Any frame has room in the largest segment, and its place in a segment of its own size is a u32.
const _: () =
    assert!((LOG_FRAME_BYTES_MAX as u64) < LOG_SEGMENT_BYTES_MAX && LOG_SEGMENT_BYTES_MAX < u32::MAX as u64 / 2);
const _: () = assert!(LOG_SEGMENT_BYTES_MIN <= LOG_SEGMENT_BYTES && LOG_SEGMENT_BYTES <= LOG_SEGMENT_BYTES_MAX);
// A full queue, and a reserve of one segment for what is essential, fit into the spares.
const _: () = assert!(LOG_QUEUED_BYTES_MAX + LOG_SEGMENT_BYTES <= LOG_SPARE_SEGMENTS as u64 * LOG_SEGMENT_BYTES);
// The active segment, the spares, and as much again, fit into the budget.
const _: () = assert!(2 * (1 + LOG_SPARE_SEGMENTS as u64) <= LOG_BUDGET_SEGMENTS_MIN);
const _: () = assert!(LOG_BUDGET_SEGMENTS_MIN * LOG_SEGMENT_BYTES <= LOG_BUDGET_BYTES);
const _: () = assert!(LOG_SEGMENT_BYTES_MIN <= LOG_SEGMENT_BYTES_MIN_SET);

// Tokens leave before anything is refused.
const _: () = assert!(MEMORY_EVICT_PERCENT < MEMORY_RETIRE_PERCENT && MEMORY_RETIRE_PERCENT < MEMORY_OPENS_PERCENT);
const _: () =
    assert!(MEMORY_EVICT_PERCENT < MEMORY_EVICT_WAIT_PERCENT && MEMORY_EVICT_WAIT_PERCENT < MEMORY_OPENS_PERCENT);
// New groups are refused before calls, and members of known ones before the first part of the reserve is used.
const _: () = assert!(MEMORY_OPENS_PERCENT < 100 && 100 < MEMORY_AWAITED_OPENS_PERCENT);
const _: () = assert!(MEMORY_AWAITED_OPENS_PERCENT < 100 + MEMORY_RESERVE_PERCENT / 3);
// Tombstones alone never have openings refused.
const _: () = assert!(100 / MEMORY_TOMBSTONES_DIVISOR < MEMORY_OPENS_PERCENT);
const _: () = assert!(MEMORY_BUDGET_BYTES_MIN <= MEMORY_BUDGET_BYTES);
const _: () = assert!(STREAM_ANSWERS_FREE < STREAM_ANSWERS_OUTSTANDING_MAX);
// The lists of an answer to a seal, with what their elements hold besides their texts, fit into an answer.
const _: () = assert!(2 * SEAL_LISTED_BYTES_MAX + SEAL_LISTED_MAX * 256 < ANSWER_BYTES_MAX);
// Answers to acknowledgements leave room for other news.
const _: () = assert!(ACK_ANSWERS_OUTSTANDING_MAX < CONSUMER_NEWS_OUTSTANDING_MAX);
// Each shard of a step has a consumer of its own; and the record of a step fits a frame, if each unit has three encoded names.
const _: () = assert!(STEP_SHARDS_MAX as usize <= CONSUMER_GROUP_MEMBERS_MAX);
const _: () = assert!(STEP_UNITS_MAX as usize * (9 * IDENTIFIER_BYTES_MAX + 32) < LOG_FRAME_BYTES_MAX);
// A message always fits into what one trainer may have.
const _: () = assert!(UNIT_MESSAGE_BYTES_MAX <= TRAINER_BYTES_OUTSTANDING_MAX);
const _: () = assert!(EPHEMERAL_NEWS_ROOM < CONSUMER_NEWS_OUTSTANDING_MAX);
// The answer to a subscription, which names units a second time, fits a message.
const _: () = assert!(2 * HELD_UNITS_BYTES_MAX <= UNIT_MESSAGE_BYTES_MAX);
