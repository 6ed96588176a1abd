//! Metrics and health over HTTP: `/metrics`, `/healthz`, `/readyz`, and at `/` a list of these. Only reads, never a body.
//!
//! Each connection carries one request; how many, how long and how large is bounded in `bounds`.

mod bounds;
#[cfg(test)]
mod tests;

use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::extract::State;
use axum::http::{HeaderValue, StatusCode, header};
use axum::middleware::map_response;
use axum::response::{IntoResponse, Response};
use axum::routing::get;

use crate::limits::{HTTP_CONNECTION_SECONDS_MAX, HTTP_CONNECTIONS_MAX, HTTP_REQUEST_BYTES_MAX};
use crate::telemetry::{Readiness, Ready, Telemetry};
use bounds::{BoundedListener, Bounds};

const POINTER: &str = "Hedgerow

/metrics  metrics, in the text format of Prometheus
/healthz  200 while the process works, 503 after it has failed
/readyz   200 when it takes work, else 503 and the reason

The operators' page comes here with a later release.
";

const BOUNDS: Bounds = Bounds {
    connections: HTTP_CONNECTIONS_MAX,
    request_bytes: HTTP_REQUEST_BYTES_MAX,
    connection_life: Duration::from_secs(HTTP_CONNECTION_SECONDS_MAX),
};

/// What the paths read.
#[derive(Clone)]
pub struct HttpState {
    /// The metrics.
    pub telemetry: Arc<Telemetry>,
    /// Whether the service takes work.
    pub readiness: Arc<Readiness>,
}

/// The paths.
pub fn router(state: HttpState) -> Router {
    Router::new()
        .route("/", get(|| async { POINTER }))
        .route("/metrics", get(metrics))
        .route("/healthz", get(healthz))
        .route("/readyz", get(readyz))
        .layer(map_response(close))
        .with_state(state)
}

/// Serves the paths until `shutdown`, and then until the open connections are done, which their life bounds.
pub async fn serve(
    listener: tokio::net::TcpListener,
    state: HttpState,
    shutdown: impl Future<Output = ()> + Send + 'static,
) {
    serve_within(BOUNDS, listener, state, shutdown).await;
}

async fn serve_within(
    bounds: Bounds,
    listener: tokio::net::TcpListener,
    state: HttpState,
    shutdown: impl Future<Output = ()> + Send + 'static,
) {
    let listener = BoundedListener::new(listener, bounds);
    let served = axum::serve(listener, router(state)).with_graceful_shutdown(shutdown).await;
    if let Err(error) = served {
        tracing::error!(%error, "the HTTP server stopped");
    }
}

/// One request for each connection.
async fn close(mut response: Response) -> Response {
    response.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
    response
}

async fn metrics(State(state): State<HttpState>) -> Response {
    let telemetry = state.telemetry;
    // Tens of thousands of lines take a while, and the thread belongs to the service.
    match tokio::task::spawn_blocking(move || telemetry.render()).await {
        Ok(text) => ([(header::CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")], text).into_response(),
        Err(error) => {
            tracing::error!(%error, "the metrics could not be rendered");
            StatusCode::INTERNAL_SERVER_ERROR.into_response()
        }
    }
}

async fn healthz(State(state): State<HttpState>) -> Response {
    match state.readiness.now() {
        Ready::Failed(reason) => (StatusCode::SERVICE_UNAVAILABLE, reason).into_response(),
        Ready::NotYet(_) | Ready::Yes | Ready::Draining => "ok".into_response(),
    }
}

async fn readyz(State(state): State<HttpState>) -> Response {
    let now = state.readiness.now();
    let (status, body) = match now.why_not() {
        None => (StatusCode::OK, serde_json::json!({ "ready": true })),
        Some(reason) => (StatusCode::SERVICE_UNAVAILABLE, serde_json::json!({ "ready": false, "reason": reason })),
    };
    (status, [(header::CONTENT_TYPE, "application/json")], body.to_string()).into_response()
}
