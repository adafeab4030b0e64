//! Bodies of replies, read no further than they should go.

use std::time::Duration;

use bytes::{Bytes, BytesMut};
use reqwest::Response;
use tokio::time::timeout;

/// Between two pieces of a body; whoever sends one has all of it.
const STALL: Duration = Duration::from_secs(20);
/// What is read of an error's reason.
const LONGEST_REASON: usize = 64 << 10;
/// How long a reason may take.
const REASON_TIME: Duration = Duration::from_secs(5);

/// Why a body is not there.
#[derive(Debug)]
pub(crate) enum BodyFault {
    /// It is longer than any right one.
    TooLong,
    /// Nothing came for this long.
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

/// The start of an error's body, as far as it comes soon.
pub(crate) async fn read_reason(mut reply: Response) -> Vec<u8> {
    let mut body = Vec::new();
    let reading = async {
        while body.len() < LONGEST_REASON
            && let Ok(Some(chunk)) = reply.chunk().await
        {
            body.extend_from_slice(&chunk[..chunk.len().min(LONGEST_REASON - body.len())]);
        }
    };
    // What has come by then is reason enough.
    let _ = timeout(REASON_TIME, reading).await;
    body
}
