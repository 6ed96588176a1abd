//! What a cut stream means for who holds it, and how it is opened again.

use std::time::Duration;

use tokio::time::{Instant, sleep_until};
use tonic::transport::Channel;
use tonic::{Code, Status};
use tonic_types::StatusExt as _;

use super::{Failure, client};

/// How long somebody goes on trying while nothing comes of it.
pub const PATIENCE: Duration = Duration::from_secs(60);
/// How long to wait before a cut stream is opened again, if the service does not say.
const RECONNECT_DELAY: Duration = Duration::from_millis(500);

/// Why a stream ended before it was over.
#[derive(Debug)]
pub enum Cut {
    /// It may be opened again after this delay.
    Retry(Duration, Status),
    /// It may not.
    Final(Failure),
}

impl Cut {
    /// By this status, with which `what` has ended.
    #[must_use]
    pub fn by(what: &str, status: Status) -> Self {
        match status.code() {
            Code::Unavailable | Code::Unknown | Code::Cancelled | Code::Internal | Code::Aborted => {
                let told = status.get_details_retry_info().and_then(|info| info.retry_delay);
                Self::Retry(told.unwrap_or(RECONNECT_DELAY), status)
            }
            Code::Ok
            | Code::InvalidArgument
            | Code::DeadlineExceeded
            | Code::NotFound
            | Code::AlreadyExists
            | Code::PermissionDenied
            | Code::ResourceExhausted
            | Code::FailedPrecondition
            | Code::OutOfRange
            | Code::Unimplemented
            | Code::DataLoss
            | Code::Unauthenticated => Self::Final(client::refused(what, &status)),
        }
    }
}

/// A new connection, after this delay; tried again for as long as the last thing that came is not too long ago.
///
/// # Errors
/// If nobody answers for so long.
pub async fn connect(address: &str, delay: Duration, last_came: Instant) -> Result<Channel, Failure> {
    loop {
        sleep_until(Instant::now() + delay).await;
        match client::connect(address).await {
            Ok(channel) => return Ok(channel),
            Err(failure) if last_came.elapsed() > PATIENCE => return Err(failure),
            Err(_) => {}
        }
    }
}
