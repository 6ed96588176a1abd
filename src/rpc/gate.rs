//! Nobody is served before the service takes work: until then every request, but those about health and reflection, is answered
//! that it is not ready, with a delay.

use std::sync::Arc;
use std::task::{Context, Poll};

use futures_util::future::{Either, Ready as Answered, ready};
use tonic::body::Body;
use tonic::codegen::http::{Request, Response};
use tower::{Layer, Service};

use crate::error::{Reason, Refusal};
use crate::limits;
use crate::telemetry::{Readiness, Ready};

use super::refused;

/// Puts services behind the gate.
#[derive(Clone)]
pub(super) struct GateLayer {
    readiness: Arc<Readiness>,
}

/// A service behind the gate.
#[derive(Clone)]
pub(super) struct Gate<S> {
    inner: S,
    readiness: Arc<Readiness>,
}

impl GateLayer {
    pub(super) fn new(readiness: Arc<Readiness>) -> Self {
        Self { readiness }
    }
}

impl<S> Layer<S> for GateLayer {
    type Service = Gate<S>;

    fn layer(&self, inner: S) -> Gate<S> {
        Gate { inner, readiness: Arc::clone(&self.readiness) }
    }
}

impl<S> Service<Request<Body>> for Gate<S>
where
    S: Service<Request<Body>, Response = Response<Body>>,
{
    type Response = Response<Body>;
    type Error = S::Error;
    type Future = Either<S::Future, Answered<Result<Response<Body>, S::Error>>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(context)
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        let is_ours = request.uri().path().starts_with("/hedgerow.");
        match self.readiness.now() {
            Ready::NotYet(why) | Ready::Failed(why) if is_ours => {
                let refusal = Refusal::new(Reason::NotReady, format!("the service takes no work yet: {why}"));
                let refusal = refusal.retry_after_ms(limits::NOT_READY_RETRY_AFTER_MS);
                Either::Right(ready(Ok(refused(refusal).into_http())))
            }
            Ready::NotYet(_) | Ready::Failed(_) | Ready::Yes | Ready::Draining => {
                Either::Left(self.inner.call(request))
            }
        }
    }
}
