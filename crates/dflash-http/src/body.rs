//! Reading a request's body within bounds.

use axum::body::BodyDataStream;
use axum::extract::Request;
use axum::http::{HeaderMap, header};
use bytes::Bytes;
use futures::StreamExt;

/// The whole body, or `None` where it has more than `limit` bytes; the rest is then read over, as
/// [`drain`] does. It takes the memory of what has come, not of what is announced.
///
/// # Errors
/// The client breaks off.
pub async fn read_body(request: Request, limit: usize) -> Result<Option<Bytes>, axum::Error> {
    let mut chunks = request.into_body().into_data_stream();
    let mut whole = Vec::new();
    while let Some(chunk) = chunks.next().await {
        let chunk = chunk?;
        if whole.len() + chunk.len() > limit {
            drop(whole);
            read_over(chunks).await;
            return Ok(None);
        }
        whole.extend_from_slice(&chunk);
    }
    Ok(Some(whole.into()))
}

/// Bytes of a refused body that are read over.
const DRAINED: usize = 64 << 20;

/// Reads over the body of a request that is refused or put off: a client that is still sending would
/// find its connection closed instead of a reply. What is larger than anything meant is cut, at once
/// where it says so.
pub async fn drain(request: Request) {
    if announced_length(request.headers()).is_none_or(|length| length <= DRAINED) {
        read_over(request.into_body().into_data_stream()).await;
    }
}

async fn read_over(mut chunks: BodyDataStream) {
    let mut read = 0;
    while let Some(Ok(chunk)) = chunks.next().await {
        read += chunk.len();
        if read > DRAINED {
            return;
        }
    }
}

/// The length of the body by its headers.
pub fn announced_length(headers: &HeaderMap) -> Option<usize> {
    headers.get(header::CONTENT_LENGTH)?.to_str().ok()?.parse().ok()
}
