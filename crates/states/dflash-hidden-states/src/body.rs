//! Reads bodies of replies with limits on size and time.

use std::time::Duration;

use bytes::{Bytes, BytesMut};
use reqwest::Response;
use tokio::time::timeout;

/// Longest pause between two pieces of a body; the sender has all of it ready.
const STALL: Duration = Duration::from_secs(20);
/// Bytes that are read of an error's body.
const LONGEST_REASON: usize = 64 << 10;
/// Time for reading an error's body.
const REASON_TIME: Duration = Duration::from_secs(5);

/// Why a body could not be read.
#[derive(Debug)]
pub(crate) enum BodyFault {
    /// It is longer than any valid one.
    TooLong,
    /// Nothing arrived for this long.
    Stalled(Duration),
    Transport(reqwest::Error),
}

/// The whole body in one buffer, allocated once if the server announces its length.
pub(crate) async fn read(mut reply: Response, limit: usize) -> Result<Bytes, BodyFault> {
    let announced = usize::try_from(reply.content_length().unwrap_or(0)).unwrap_or(usize::MAX);
    if announced > limit {
        return Err(BodyFault::TooLong);
    }
    let mut body = BytesMut::with_capacity(announced);
    loop {
        let chunk = timeout(STALL, reply.chunk()).await.map_err(|_| BodyFault::Stalled(STALL))?;
        let Some(chunk) = chunk.map_err(BodyFault::Transport)? else { return Ok(body.freeze()) };
        if body.len() + chunk.len() > limit {
            return Err(BodyFault::TooLong);
        }
        body.extend_from_slice(&chunk);
    }
}

/// The start of an error's body, as far as it arrives in time.
pub(crate) async fn read_reason(mut reply: Response) -> Vec<u8> {
    let mut body = Vec::new();
    let reading = async {
        while body.len() < LONGEST_REASON
            && let Ok(Some(chunk)) = reply.chunk().await
        {
            body.extend_from_slice(&chunk[..chunk.len().min(LONGEST_REASON - body.len())]);
        }
    };
    // The part that has arrived by then is enough.
    let _ = timeout(REASON_TIME, reading).await;
    body
}
