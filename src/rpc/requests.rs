//! Requests that are open, a stream being one: how many there may be over all connections.
//!
//! Each takes some kilobytes in the transport and in its task, however little it says, until its answer has been sent. Every
//! connection has a few for itself ([`limits::REQUESTS_CONNECTION_OWN`]), so that a worker is served whatever others do; beyond
//! these there is room for so many over all of them, a part of the memory budget.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tonic::body::Body;
use tonic::codegen::http::{Request, Response};
use tower::{Layer, Service};

use crate::error::{Reason, Refusal};
use crate::limits;

use super::connection::ConnectionShare;
use super::refused;

/// Requests that a connection has for itself.
pub(super) struct OwnRequests(Arc<Semaphore>);

impl Default for OwnRequests {
    fn default() -> Self {
        Self(Arc::new(Semaphore::new(limits::REQUESTS_CONNECTION_OWN)))
    }
}

/// A request that is counted until this is dropped; an extension of its answer.
#[derive(Clone)]
pub(super) struct OpenRequest(
    #[expect(dead_code, reason = "it gives the place back when it is dropped")] Arc<OwnedSemaphorePermit>,
);

/// Counts open requests.
#[derive(Clone)]
pub(super) struct RequestsLayer {
    all: Arc<Semaphore>,
}

/// A service whose open requests are counted.
#[derive(Clone)]
pub(super) struct Requests<S> {
    inner: S,
    layer: RequestsLayer,
}

impl RequestsLayer {
    /// With places for so many over all connections, besides what each has for itself.
    pub(super) fn new(places: usize) -> Self {
        Self { all: Arc::new(Semaphore::new(places)) }
    }

    fn enter(&self, share: Option<&ConnectionShare>) -> Result<OpenRequest, Refusal> {
        let own = share.and_then(|share| Arc::clone(&share.requests.0).try_acquire_owned().ok());
        let place = own.or_else(|| Arc::clone(&self.all).try_acquire_owned().ok());
        place.map(|place| OpenRequest(Arc::new(place))).ok_or_else(|| {
            let message = format!(
                "as many requests are open as there is room for; each connection has {} in any case",
                limits::REQUESTS_CONNECTION_OWN
            );
            Refusal::new(Reason::ServiceFull, message).retry_after_ms(limits::REQUESTS_RETRY_AFTER_MS)
        })
    }
}

impl<S> Layer<S> for RequestsLayer {
    type Service = Requests<S>;

    fn layer(&self, inner: S) -> Requests<S> {
        Requests { inner, layer: self.clone() }
    }
}

impl<S> Service<Request<Body>> for Requests<S>
where
    S: Service<Request<Body>, Response = Response<Body>>,
    S::Future: Send + 'static,
{
    type Response = Response<Body>;
    type Error = S::Error;
    type Future = Pin<Box<dyn Future<Output = Result<Response<Body>, S::Error>> + Send>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(context)
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        let entered = self.layer.enter(request.extensions().get());
        let open = match entered {
            Ok(open) => open,
            Err(refusal) => return Box::pin(async move { Ok(refused(refusal).into_http()) }),
        };
        let response = self.inner.call(request);
        Box::pin(async move {
            let mut response = response.await?;
            response.extensions_mut().insert(open);
            Ok(response)
        })
    }
}
