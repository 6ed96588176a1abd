//! How many requests a batch holds, counted before it is decoded: an empty one takes two bytes of a message, and hundreds decoded.

use bytes::Buf as _;
use prost::encoding::{WireType, decode_key, decode_varint};

use crate::error::{Reason, Refusal};
use crate::limits;

/// The tag of `ReportBatchRequest.requests`, its one field.
const REQUESTS_TAG: u32 = 1;

/// Whether a message may be decoded as a batch.
pub(super) fn check(message: &[u8]) -> Result<(), Refusal> {
    let requests = count(message);
    if requests <= limits::BATCH_REQUESTS_MAX {
        return Ok(());
    }
    let message = format!("{requests} requests, more than {} in one batch", limits::BATCH_REQUESTS_MAX);
    Err(Refusal::new(Reason::OverLimit, message).field("requests"))
}

/// The requests up to where the message makes no sense any more, which whoever decodes it says.
fn count(mut message: &[u8]) -> usize {
    let mut requests = 0;
    while let Ok((tag, WireType::LengthDelimited)) = decode_key(&mut message) {
        let Ok(length) = decode_varint(&mut message) else { break };
        let Ok(length) = usize::try_from(length) else { break };
        requests += usize::from(tag == REQUESTS_TAG);
        if length > message.len() {
            break;
        }
        message.advance(length);
    }
    requests
}

#[cfg(test)]
mod tests {
    use prost::Message as _;

    use super::*;
    use crate::proto::v1;

    #[test]
    fn requests_are_counted_however_small_they_are() {
        let batch = |requests| v1::ReportBatchRequest { requests: vec![v1::ReportRequest::default(); requests] };
        assert_eq!(count(&batch(0).encode_to_vec()), 0);
        assert!(check(&batch(limits::BATCH_REQUESTS_MAX).encode_to_vec()).is_ok());
        assert!(check(&batch(limits::BATCH_REQUESTS_MAX + 1).encode_to_vec()).is_err());
        let one = v1::ReportRequest { request_seq: 300, ..v1::ReportRequest::default() };
        let mut cut = v1::ReportBatchRequest { requests: vec![one; 3] }.encode_to_vec();
        cut.truncate(cut.len() - 1);
        assert_eq!(count(&cut), 3);
        assert_eq!(count(&[0xff; 40]), 0);
        assert_eq!(count(&[0x0a, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x01]), 1);
    }
}
