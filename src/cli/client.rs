//! Connections to a service, as every client of this command line makes them.
//!
//! Message limits are raised to the service's own, and HTTP/2 windows and frames are large, so that long calls and rows
//! are not slowed down. A refused call to the service becomes one sentence with its code and reason.

use tonic::transport::{Channel, Endpoint};
use tonic_types::StatusExt as _;

use super::Failure;
use crate::limits;
use crate::proto::v1::admin_service_client::AdminServiceClient;
use crate::proto::v1::harness_service_client::HarnessServiceClient;
use crate::proto::v1::inspect_service_client::InspectServiceClient;
use crate::proto::v1::trainer_service_client::TrainerServiceClient;

/// A connection of its own to the service at this address; `http://` may be left out.
///
/// # Errors
/// [`Failure::Usage`] for an address that is none, [`Failure::Failed`] if nobody answers there.
pub async fn connect(address: &str) -> Result<Channel, Failure> {
    let url = if address.contains("://") { address.to_owned() } else { format!("http://{address}") };
    let endpoint = Endpoint::from_shared(url)
        .map_err(|error| Failure::Usage(format!("--address: {address:?} is no address: {error}")))?
        .tcp_nodelay(true)
        .initial_stream_window_size(limits::HTTP2_STREAM_WINDOW_BYTES)
        .initial_connection_window_size(limits::HTTP2_CONNECTION_WINDOW_BYTES)
        .max_frame_size(limits::HTTP2_FRAME_BYTES);
    endpoint.connect().await.map_err(|error| {
        let mut cause: &dyn std::error::Error = &error;
        while let Some(deeper) = cause.source() {
            cause = deeper;
        }
        Failure::Failed(format!("cannot connect to {address}: {cause}; is `hedgerow serve` running there?"))
    })
}

/// The harness's side of a connection.
#[must_use]
pub fn harness(channel: Channel) -> HarnessServiceClient<Channel> {
    HarnessServiceClient::new(channel)
        .max_decoding_message_size(limits::REQUEST_MESSAGE_BYTES_MAX)
        .max_encoding_message_size(limits::REQUEST_MESSAGE_BYTES_MAX)
}

/// The trainer's side of a connection.
#[must_use]
pub fn trainer(channel: Channel) -> TrainerServiceClient<Channel> {
    TrainerServiceClient::new(channel)
        .max_decoding_message_size(limits::REQUEST_MESSAGE_BYTES_MAX)
        .max_encoding_message_size(limits::REQUEST_MESSAGE_BYTES_MAX)
}

/// The looker's side of a connection.
#[must_use]
pub fn inspect(channel: Channel) -> InspectServiceClient<Channel> {
    InspectServiceClient::new(channel).max_decoding_message_size(limits::REQUEST_MESSAGE_BYTES_MAX)
}

/// The operator's side of a connection.
#[must_use]
pub fn admin(channel: Channel) -> AdminServiceClient<Channel> {
    AdminServiceClient::new(channel).max_decoding_message_size(limits::REQUEST_MESSAGE_BYTES_MAX)
}

/// What the service answered instead of what was asked for.
#[must_use]
pub fn refused(what: &str, status: &tonic::Status) -> Failure {
    Failure::Failed(format!("{what}: {}", sentence(status)))
}

/// A status in one sentence: its message, its code, and the stable reason if it has one.
#[must_use]
pub fn sentence(status: &tonic::Status) -> String {
    let reason = status.get_details_error_info().map_or_else(String::new, |info| format!(", {}", info.reason));
    let message = if status.message().is_empty() { "no message" } else { status.message() };
    format!("{message} ({:?}{reason})", status.code())
}
