//! Reads request bodies within memory bounds.

use std::sync::Arc;

use axum::body::BodyDataStream;
use axum::extract::Request;
use axum::http::{HeaderMap, header};
use bytes::Bytes;
use futures::StreamExt;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// Memory of all bodies in flight together, or of one of the largest.
const ALL_BODIES: usize = 64 << 20;

/// The memory of all bodies in flight, bounded together.
#[derive(Debug)]
pub struct Bodies {
    room: Arc<Semaphore>,
    limit: usize,
}

/// A received body, and the memory that it counts for until it is dropped.
#[derive(Debug)]
pub struct Received {
    /// Its contents.
    pub bytes: Bytes,
    _room: OwnedSemaphorePermit,
}

/// Why a body is refused.
#[derive(Debug)]
pub enum BodyFault {
    /// The client broke off.
    Broken(axum::Error),
    /// It is larger than the limit for one body.
    TooLarge,
    /// Other bodies leave no memory.
    NoRoom,
}

impl Bodies {
    /// For bodies of at most `limit` bytes.
    pub fn new(limit: usize) -> Self {
        Self { room: Arc::new(Semaphore::new(limit.max(ALL_BODIES))), limit }
    }

    /// The whole body. It counts memory as it arrives, not as announced, so that clients that
    /// announce much and send little do not keep others out. The rest of a refused body is read and
    /// dropped.
    ///
    /// # Errors
    /// [`BodyFault`].
    pub async fn read(&self, request: Request) -> Result<Received, BodyFault> {
        let mut chunks = request.into_body().into_data_stream();
        let mut whole = Vec::new();
        let mut room = self.take(0).ok_or(BodyFault::NoRoom)?;
        while let Some(chunk) = chunks.next().await {
            let chunk = chunk.map_err(BodyFault::Broken)?;
            let fault = if whole.len() + chunk.len() > self.limit {
                BodyFault::TooLarge
            } else if let Some(more) = self.take(chunk.len()) {
                room.merge(more);
                whole.extend_from_slice(&chunk);
                continue;
            } else {
                BodyFault::NoRoom
            };
            drop((whole, room));
            read_over(chunks).await;
            return Err(fault);
        }
        Ok(Received { bytes: whole.into(), _room: room })
    }

    fn take(&self, bytes: usize) -> Option<OwnedSemaphorePermit> {
        Arc::clone(&self.room).try_acquire_many_owned(u32::try_from(bytes).ok()?).ok()
    }
}

/// The whole body, or `None` if it has more than `limit` bytes; the rest is then read and dropped,
/// as in [`drain`]. It allocates what has arrived, not what is announced.
///
/// # Errors
/// The client broke off.
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

/// Bytes of a refused body that are read and dropped.
const DRAINED: usize = 64 << 20;

/// Reads and drops the body of a refused request: a client that is still sending would find its
/// connection closed instead of a reply. A connection whose body exceeds the maximum is closed,
/// immediately if the header announces it.
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

/// The length of the body according to its headers.
pub fn announced_length(headers: &HeaderMap) -> Option<usize> {
    headers.get(header::CONTENT_LENGTH)?.to_str().ok()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use axum::body::Body;

    use super::*;

    fn request(bytes: usize) -> Request {
        Request::new(Body::from(vec![b'x'; bytes]))
    }

    #[tokio::test]
    async fn bodies_are_bounded_together_and_give_their_room_back() {
        let bodies = Bodies::new(ALL_BODIES);
        let half = bodies.read(request(ALL_BODIES / 2)).await.unwrap();
        let other = bodies.read(request(ALL_BODIES / 2)).await.unwrap();
        assert!(matches!(bodies.read(request(1)).await, Err(BodyFault::NoRoom)));
        drop(half);
        assert_eq!(bodies.read(request(9)).await.unwrap().bytes.len(), 9);
        drop(other);
        let most = bodies.read(request(ALL_BODIES)).await.unwrap();
        assert_eq!(most.bytes.len(), ALL_BODIES);
        drop(most);
        let small = Bodies::new(10);
        assert!(matches!(small.read(request(11)).await, Err(BodyFault::TooLarge)));
        assert_eq!(small.room.available_permits(), ALL_BODIES);
    }
}
