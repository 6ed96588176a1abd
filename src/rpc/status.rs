//! The one map from refusals to gRPC's status.
//!
//! A status carries `google.rpc.ErrorInfo` with the stable reason and what the refusal names, `BadRequest` where a field is to
//! blame, and `RetryInfo` where waiting helps.

use std::collections::HashMap;
use std::time::Duration;

use tonic_types::{ErrorDetails, StatusExt};

use crate::error::{Code, Refusal};
use crate::ids::RolloutRef;

/// The domain of every reason.
pub const DOMAIN: &str = "hedgerow";

/// The gRPC code of a kind of refusal.
#[must_use]
pub fn code(code: Code) -> tonic::Code {
    match code {
        Code::InvalidArgument => tonic::Code::InvalidArgument,
        Code::FailedPrecondition => tonic::Code::FailedPrecondition,
        Code::Aborted => tonic::Code::Aborted,
        Code::AlreadyExists => tonic::Code::AlreadyExists,
        Code::NotFound => tonic::Code::NotFound,
        Code::ResourceExhausted => tonic::Code::ResourceExhausted,
        Code::Unavailable => tonic::Code::Unavailable,
        Code::Unimplemented => tonic::Code::Unimplemented,
        Code::Internal => tonic::Code::Internal,
    }
}

/// The status that a refusal is.
#[must_use]
pub fn status(refusal: &Refusal, rollout: Option<&RolloutRef>) -> tonic::Status {
    let mut details = ErrorDetails::new();
    details.set_error_info(refusal.reason.as_str(), DOMAIN, metadata(refusal, rollout));
    if let Some(field) = &refusal.field {
        details.add_bad_request_violation(field.clone(), refusal.message.clone());
    }
    if let Some(delay_ms) = refusal.retry_after_ms {
        details.set_retry_info(Some(Duration::from_millis(delay_ms)));
    }
    tonic::Status::with_error_details(code(refusal.reason.code()), refusal.message.clone(), details)
}

/// What a refusal names, under the names of the fields of `hedgerow.v1.Refusal`.
fn metadata(refusal: &Refusal, rollout: Option<&RolloutRef>) -> HashMap<String, String> {
    let entries = [
        ("field", refusal.field.clone()),
        ("index", refusal.index.map(|index| index.to_string())),
        ("agent_id", refusal.agent_id.as_ref().map(ToString::to_string)),
        ("call_id", refusal.call_id.as_ref().map(ToString::to_string)),
        ("run_id", rollout.map(|rollout| rollout.run.to_string())),
        ("group_id", rollout.and_then(|rollout| rollout.group.as_ref()).map(ToString::to_string)),
        ("rollout_id", rollout.map(|rollout| rollout.rollout.to_string())),
    ];
    entries.into_iter().filter_map(|(key, value)| Some((key.to_owned(), value?))).collect()
}

#[cfg(test)]
#[expect(clippy::unwrap_used, reason = "a test fails by panicking")]
mod tests {
    use super::*;
    use crate::error::Reason;
    use crate::ids::{CallId, RolloutId, RunId};

    #[test]
    fn a_status_carries_reason_field_ids_and_delay() {
        let rollout = RolloutRef {
            run: RunId::parse("run").unwrap(),
            group: None,
            rollout: RolloutId::parse("rollout").unwrap(),
            attempt: 0,
        };
        let refusal = Refusal::new(Reason::ServiceFull, "no room")
            .field("call.prompt")
            .index(7)
            .call(&CallId::parse("c").unwrap())
            .retry_after_ms(1500);
        let status = status(&refusal, Some(&rollout));
        assert_eq!((status.code(), status.message()), (tonic::Code::ResourceExhausted, "no room"));
        let details = status.get_error_details();
        let info = details.error_info().unwrap();
        assert_eq!((info.reason.as_str(), info.domain.as_str()), ("service_full", "hedgerow"));
        for (key, value) in [("field", "call.prompt"), ("index", "7"), ("call_id", "c"), ("run_id", "run")] {
            assert_eq!(info.metadata.get(key).map(String::as_str), Some(value));
        }
        assert_eq!(info.metadata.len(), 5);
        assert_eq!(details.bad_request().unwrap().field_violations[0].field, "call.prompt");
        assert_eq!(details.retry_info().unwrap().retry_delay, Some(Duration::from_millis(1500)));
    }

    #[test]
    fn what_is_not_named_is_not_there() {
        let status = status(&Refusal::new(Reason::RunNotFound, "no run"), None);
        let details = status.get_error_details();
        assert!(details.error_info().unwrap().metadata.is_empty());
        assert!(details.bad_request().is_none() && details.retry_info().is_none());
    }
}
