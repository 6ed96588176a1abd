//! What the edge of the service may hold: parts of the memory budget, beside the part that rollouts have.
//!
//! Whatever clients do, all of it together is three eighths of a budget of 4 GiB or more. Rollouts level off below three fifths of
//! it: their part is [`rollouts_bytes`], and the tokens of those that are not in use leave memory before it is full. Under a small
//! budget the least that each bound may be counts for more: the largest message has to have room.

use super::{
    ANSWER_BYTES_MAX, BATCH_ANSWER_BYTES, BATCH_DECODED_BYTES_MAX, BATCH_LISTS_BYTES_MAX, BATCH_REQUESTS_MAX,
    CALL_TOKENS_MAX, GRPC_CONNECTION_BYTES, GRPC_CONNECTIONS_MAX, HTTP2_CONNECTION_WINDOW_BYTES,
    RECEIVE_CONNECTION_BYTES_MAX, RECEIVE_CONNECTION_OWN_BYTES_MAX, REQUEST_BYTES, REQUEST_MESSAGE_BYTES_MAX,
    REQUESTS_CONNECTION_OWN, SHOWN_LARGE_BYTES, TRAINER_BYTES_OUTSTANDING_MAX, UNIT_MESSAGE_BYTES_MAX,
    UNREAD_CONNECTION_FREE_BYTES_MIN,
};

/// The part of the memory budget that rollouts, groups and tombstones have: three quarters.
#[must_use]
pub const fn rollouts_bytes(memory_budget_bytes: u64) -> u64 {
    memory_budget_bytes - memory_budget_bytes / 4
}

/// A bound that is a part of the memory budget.
struct Part {
    divisor: u64,
    least_bytes: usize,
    most_bytes: usize,
}

const IN_FLIGHT: Part = part(16, 64 << 20, 512 << 20);
const RECEIVE: Part = part(32, 128 << 20, 512 << 20);
const RECEIVE_OWN: Part = part(32, 64 << 20, 512 << 20);
const UNREAD: Part = part(32, 72 << 20, 512 << 20);
const ANSWERS: Part = part(32, 32 << 20, 256 << 20);
const TRAINERS: Part = part(16, 32 << 20, 512 << 20);
const SHOWN: Part = part(32, 32 << 20, 128 << 20);

const REQUESTS: Part = part(32, 40 << 20, 512 << 20);
const CONNECTIONS: Part = part(32, 52 << 20, (GRPC_CONNECTIONS_MAX * CONNECTION_BYTES) as _);

/// What a connection holds, with the requests that it has for itself.
const CONNECTION_BYTES: usize = GRPC_CONNECTION_BYTES + REQUESTS_CONNECTION_OWN * REQUEST_BYTES;

const fn part(divisor: u64, least_bytes: usize, most_bytes: usize) -> Part {
    Part { divisor, least_bytes, most_bytes }
}

impl Part {
    fn of(&self, budget_bytes: u64) -> usize {
        usize::try_from(budget_bytes / self.divisor).unwrap_or(usize::MAX).clamp(self.least_bytes, self.most_bytes)
    }
}

/// The bounds of what the edge holds, in bytes, over all connections.
#[derive(Clone, Copy, Debug)]
pub struct EdgeBytes {
    /// Messages between their arrival and the place of their records in the log.
    pub in_flight: usize,
    /// What has come of messages which are not whole, beyond what each connection has for itself.
    pub receive: usize,
    /// The parts of such messages that connections have for themselves, all together.
    pub receive_own: usize,
    /// What connections have sent and nobody has read, before those with much of it are not read from.
    pub unread: usize,
    /// Answers that have not left, over all streams and batches, besides what each stream has for itself.
    pub answers: usize,
    /// What is on its way to all trainers together, besides what each has for itself.
    pub trainers: usize,
    /// What is shown, on its way to who asked; what is larger than all of it goes out alone.
    pub shown: usize,
    /// What requests hold that are open, besides their messages and those that each connection has for itself.
    pub requests: usize,
    /// Connections, with the requests that each has for itself.
    pub connections: usize,
}

impl EdgeBytes {
    /// The bounds beside a memory budget of so many bytes.
    #[must_use]
    pub fn beside(memory_budget_bytes: u64) -> Self {
        let of = |part: &Part| part.of(memory_budget_bytes);
        Self {
            in_flight: of(&IN_FLIGHT),
            receive: of(&RECEIVE),
            receive_own: of(&RECEIVE_OWN),
            unread: of(&UNREAD),
            answers: of(&ANSWERS),
            trainers: of(&TRAINERS),
            shown: of(&SHOWN),
            requests: of(&REQUESTS),
            connections: of(&CONNECTIONS),
        }
    }

    /// How many requests may be open over all connections, besides those that each has for itself.
    #[must_use]
    pub fn requests_max(&self) -> usize {
        self.requests / REQUEST_BYTES
    }

    /// How many connections there may be.
    #[must_use]
    pub fn connections_max(&self) -> usize {
        self.connections / CONNECTION_BYTES
    }
}

// A message fits into what may be in flight.
const _: () = assert!(REQUEST_MESSAGE_BYTES_MAX <= IN_FLIGHT.least_bytes);
// Any message, or batch with what it takes decoded, has room on an idle connection, and an idle connection beside others.
const _: () = assert!(REQUEST_MESSAGE_BYTES_MAX + BATCH_DECODED_BYTES_MAX <= RECEIVE_CONNECTION_BYTES_MAX);
const _: () = assert!(RECEIVE_CONNECTION_BYTES_MAX <= RECEIVE.least_bytes && RECEIVE.most_bytes < u32::MAX as usize);
// However many connections there are, short calls pass whatever others do.
const _: () = assert!(RECEIVE_OWN.least_bytes / GRPC_CONNECTIONS_MAX >= 8 << 10);
const _: () = assert!(RECEIVE_CONNECTION_OWN_BYTES_MAX <= RECEIVE_OWN.least_bytes);
// One connection alone is always read from, whatever its windows hold.
const _: () = assert!((HTTP2_CONNECTION_WINDOW_BYTES as usize) < UNREAD.least_bytes);
// What connections may have sent besides is no more than what they may have sent together.
const _: () = assert!(GRPC_CONNECTIONS_MAX * UNREAD_CONNECTION_FREE_BYTES_MIN <= UNREAD.least_bytes);
// Many answers, and several batches, are under way at once.
const _: () = assert!(128 * ANSWER_BYTES_MAX < ANSWERS.least_bytes);
const _: () = assert!(
    BATCH_REQUESTS_MAX * BATCH_ANSWER_BYTES + BATCH_LISTS_BYTES_MAX + ANSWER_BYTES_MAX < ANSWERS.least_bytes / 4
);
// A message always fits into what trainers may have; where calls may be longest, so does a unit with the longest row.
const _: () = assert!(TRAINER_BYTES_OUTSTANDING_MAX <= TRAINERS.least_bytes);
const _: () = assert!(2 * (9 * CALL_TOKENS_MAX + UNIT_MESSAGE_BYTES_MAX) <= TRAINERS.most_bytes);
// Several large rollouts are shown at once.
const _: () = assert!(4 * SHOWN_LARGE_BYTES <= SHOWN.least_bytes);

#[cfg(test)]
mod tests {
    use crate::limits;

    use super::*;

    fn sum(edge: EdgeBytes) -> u64 {
        let EdgeBytes { in_flight, receive, receive_own, unread, answers, trainers, shown, requests, connections } =
            edge;
        // What connections have sent is counted a second time by half: see `rpc::unread`.
        let messages = in_flight + receive + receive_own + unread + unread / 2 + answers + trainers + shown;
        (messages + requests + connections) as u64
    }

    #[test]
    fn all_together_is_a_part_of_the_budget_and_has_a_least_and_a_most() {
        for budget_bytes in [2 << 30, 4 << 30, 8 << 30, 1 << 40] {
            let tokens = rollouts_bytes(budget_bytes) / 100 * limits::MEMORY_EVICT_WAIT_PERCENT;
            assert!(tokens + sum(EdgeBytes::beside(budget_bytes)) < budget_bytes, "{budget_bytes}");
        }
        assert!(sum(EdgeBytes::beside(1 << 30)) < 600 << 20);
        assert_eq!(sum(EdgeBytes::beside(0)), sum(EdgeBytes::beside(256 << 20)));
        assert_eq!(sum(EdgeBytes::beside(64 << 30)), sum(EdgeBytes::beside(u64::MAX)));
    }
}
