//! Counts requests and streams that end with a refusal, by its reason, and sees to it that there is one.
//!
//! Every such end passes here as a status, whichever service it comes from. What the transport refuses for itself (a message that
//! means nothing, a method that is not there) has no reason, and gets it here. An answer that says "refused" is no such end:
//! those are counted where answers are made.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use http_body::{Frame, SizeHint};
use tokio::sync::OwnedSemaphorePermit;
use tonic::body::Body;
use tonic::codegen::http::{HeaderMap, Request, Response};
use tonic::{Code, Status};
use tonic_types::StatusExt;
use tower::{Layer, Service};

use crate::error::{Reason, Refusal};
use crate::telemetry::Telemetry;

use super::encoded::Encoded;
use super::refused;
use super::requests::OpenRequest;
use super::status::DOMAIN;

/// Has what a service answers looked at.
#[derive(Clone)]
pub(super) struct RefusalsLayer(Arc<Telemetry>);

/// A service whose refusals are counted.
#[derive(Clone)]
pub(super) struct Refusals<S> {
    inner: S,
    telemetry: Arc<Telemetry>,
}

/// The body of an answer, at whose end a refusal may stand.
struct Counted {
    body: Body,
    telemetry: Arc<Telemetry>,
    _held: (Option<UntilSent>, Option<OpenRequest>),
}

/// Room that an answer takes until it has been sent, as an extension of the answer.
#[derive(Clone)]
pub(super) struct UntilSent(
    #[expect(dead_code, reason = "it gives the room back when it is dropped")] Arc<OwnedSemaphorePermit>,
);

impl UntilSent {
    pub(super) fn new(room: OwnedSemaphorePermit) -> Self {
        Self(Arc::new(room))
    }
}

impl RefusalsLayer {
    pub(super) fn new(telemetry: Arc<Telemetry>) -> Self {
        Self(telemetry)
    }
}

impl<S> Layer<S> for RefusalsLayer {
    type Service = Refusals<S>;

    fn layer(&self, inner: S) -> Refusals<S> {
        Refusals { inner, telemetry: Arc::clone(&self.0) }
    }
}

impl<S, B> Service<Request<B>> for Refusals<S>
where
    S: Service<Request<B>, Response = Response<Body>>,
    S::Future: Send + 'static,
{
    type Response = Response<Body>;
    type Error = S::Error;
    type Future = Pin<Box<dyn Future<Output = Result<Response<Body>, S::Error>> + Send>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(context)
    }

    fn call(&mut self, request: Request<B>) -> Self::Future {
        let (response, telemetry) = (self.inner.call(request), Arc::clone(&self.telemetry));
        Box::pin(async move {
            let mut response = response.await?;
            let held = (response.extensions_mut().remove(), response.extensions_mut().remove());
            let encoded = response.extensions_mut().remove::<Encoded>();
            // Without a message, the status stands before the body.
            pass(&telemetry, response.headers_mut(), Stands::BeforeTheBody);
            let body = |body| encoded.map_or(body, Encoded::into_body);
            Ok(response.map(|empty| Body::new(Counted { body: body(empty), telemetry, _held: held })))
        })
    }
}

impl http_body::Body for Counted {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        let mut frame = ready!(Pin::new(&mut self.body).poll_frame(context));
        if let Some(Ok(frame)) = &mut frame
            && let Some(trailers) = frame.trailers_mut()
        {
            pass(&self.telemetry, trailers, Stands::AfterIt);
        }
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

/// Where a status stands.
#[derive(Clone, Copy)]
enum Stands {
    /// The request was answered with nothing else.
    BeforeTheBody,
    AfterIt,
}

/// Counts the refusal that these headers say, if they say one, and gives it a reason if it has none.
fn pass(telemetry: &Telemetry, headers: &mut HeaderMap, stands: Stands) {
    let Some(status) = Status::from_header_map(headers).filter(|status| status.code() != Code::Ok) else { return };
    let reason = match status.get_details_error_info().filter(|info| info.domain == DOMAIN) {
        Some(info) => Reason::named(&info.reason),
        None => of_the_transport(&status, stands).map(|refusal| {
            let reason = refusal.reason;
            // A refusal's texts are such that they stand in headers, encoded.
            let _ = refused(refusal).add_header(headers);
            reason
        }),
    };
    if let Some(reason) = reason {
        telemetry.refused(reason);
    }
}

/// What the transport refused for itself; none: that the client gave up, or what other services say in their own words.
fn of_the_transport(status: &Status, stands: Stands) -> Option<Refusal> {
    let said = status.message();
    match (status.code(), stands) {
        (Code::Unimplemented, _) if said.is_empty() => {
            Some(Refusal::new(Reason::NotInThisRelease, "this release does not have this method"))
        }
        (Code::Unimplemented, _) => Some(Refusal::new(Reason::NotInThisRelease, said)),
        (Code::Internal, Stands::BeforeTheBody) => {
            let message = format!("what came is no message of this contract: {said}");
            Some(Refusal::new(Reason::InvalidValue, message).field("request"))
        }
        (Code::Internal, Stands::AfterIt) => Some(Refusal::new(Reason::Internal, said)),
        (_, _) => None,
    }
}
