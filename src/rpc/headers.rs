//! Headers of requests: only what the transport still reads goes on with a request.
//!
//! A request may have [`limits::HTTP2_HEADER_LIST_BYTES_MAX`] of headers, and whoever waits for its body, or serves it, would hold
//! them as long as it lasts. Nobody reads them here, so they go before anything waits.

use std::task::{Context, Poll};

use tonic::codegen::http::header::{CONTENT_TYPE, HeaderMap, HeaderName, HeaderValue, TE};
use tonic::codegen::http::uri::PathAndQuery;
use tonic::codegen::http::{Request, Uri};
use tower::{Layer, Service};

use crate::limits;

/// What the transport reads.
const READ: [HeaderName; 5] = [
    CONTENT_TYPE,
    TE,
    HeaderName::from_static("grpc-encoding"),
    HeaderName::from_static("grpc-accept-encoding"),
    HeaderName::from_static("grpc-timeout"),
];

/// Has requests go on with few headers.
#[derive(Clone)]
pub(super) struct HeadersLayer;

/// A service to which requests come with few headers.
#[derive(Clone)]
pub(super) struct Headers<S> {
    inner: S,
}

impl<S> Layer<S> for HeadersLayer {
    type Service = Headers<S>;

    fn layer(&self, inner: S) -> Headers<S> {
        Headers { inner }
    }
}

impl<S: Service<Request<B>>, B> Service<Request<B>> for Headers<S> {
    type Response = S::Response;
    type Error = S::Error;
    type Future = S::Future;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(context)
    }

    fn call(&mut self, mut request: Request<B>) -> S::Future {
        *request.headers_mut() = read(request.headers());
        *request.uri_mut() = path(request.uri());
        self.inner.call(request)
    }
}

/// The headers that are read, as copies: pieces of what came would hold all of it.
fn read(headers: &HeaderMap) -> HeaderMap {
    let mut few = HeaderMap::with_capacity(READ.len());
    for name in READ {
        let Some(value) = headers.get(&name) else { continue };
        let value = value.as_bytes();
        // What is longer than any that is known is not known, cut off either.
        let value = &value[..value.len().min(limits::HEADER_VALUE_BYTES_MAX)];
        few.extend(HeaderValue::from_bytes(value).map(|value| (name, value)));
    }
    few
}

/// The path alone, which names the method; none that is there is longer than this.
fn path(uri: &Uri) -> Uri {
    let known = Some(uri.path()).filter(|path| path.len() <= limits::METHOD_PATH_BYTES_MAX);
    known.and_then(|path| PathAndQuery::try_from(path).ok()).map(Uri::from).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_is_read_goes_on() {
        let mut headers = HeaderMap::new();
        for (name, value) in [("content-type", "application/grpc"), ("grpc-encoding", "gzip"), ("x-mine", "x")] {
            headers.append(name, HeaderValue::from_static(value));
        }
        headers.extend(HeaderValue::from_bytes(&[b'9'; 1000]).map(|value| (READ[4].clone(), value)));
        let few = read(&headers);
        assert_eq!((few.len(), few.get("grpc-encoding")), (3, headers.get("grpc-encoding")));
        assert_eq!(few.get("grpc-timeout").map(HeaderValue::len), Some(limits::HEADER_VALUE_BYTES_MAX));
        let long = format!("http://host/a.B/C?{}", "x".repeat(9000));
        assert_eq!(long.parse().map(|uri: Uri| path(&uri).to_string()).ok().as_deref(), Some("/a.B/C"));
        let long = format!("http://host/{}", "x".repeat(9000));
        assert_eq!(long.parse().map(|uri: Uri| path(&uri).to_string()).ok().as_deref(), Some("/"));
    }
}
