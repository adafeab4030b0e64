//! Reading a request's body within bounds.

use axum::extract::Request;
use axum::http::{HeaderMap, header};
use bytes::Bytes;
use futures::StreamExt;

/// The whole body, or `None` where it has more than `limit` bytes. It takes the memory of what has
/// come, not of what is announced.
///
/// # Errors
/// The client breaks off.
pub async fn read_body(request: Request, limit: usize) -> Result<Option<Bytes>, axum::Error> {
    let mut chunks = request.into_body().into_data_stream();
    let mut whole = Vec::new();
    while let Some(chunk) = chunks.next().await {
        let chunk = chunk?;
        if whole.len() + chunk.len() > limit {
            return Ok(None);
        }
        whole.extend_from_slice(&chunk);
    }
    Ok(Some(whole.into()))
}

/// Reads over the body of a request that is put off: a client that is still sending would find its
/// connection closed instead of a reply.
pub async fn drain(request: Request) {
    let mut chunks = request.into_body().into_data_stream();
    while let Some(Ok(_)) = chunks.next().await {}
}

/// The length of the body by its headers.
pub fn announced_length(headers: &HeaderMap) -> Option<usize> {
    headers.get(header::CONTENT_LENGTH)?.to_str().ok()?.parse().ok()
}
