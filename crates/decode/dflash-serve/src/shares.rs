//! Memory for the log-probabilities of all requests in flight.
//!
//! Requests wait for it in order, and a large one may wait as long as others run. Small requests
//! have separate memory, so that they do not wait behind it.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::timeout;

/// Log-probabilities of all requests: twice the maximum of one.
const ALL: usize = 2 << 20;
/// Maximum log-probabilities of a small request, which may also use [`ALL_SMALL`]: one alternative
/// for 65,536 tokens.
const SMALL: usize = 1 << 17;
const ALL_SMALL: usize = 1 << 20;

/// Why a request gets no memory.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum NoShares {
    /// Others kept it for longer than a request waits.
    Taken,
    /// The server is shutting down.
    Closed,
}

/// The memory, counted in log-probabilities.
#[derive(Debug)]
pub(crate) struct Shares {
    all: Arc<Semaphore>,
    small: Arc<Semaphore>,
    /// How long a request waits.
    patience: Duration,
}

impl Shares {
    pub(crate) fn new(patience: Duration) -> Self {
        let semaphore = |permits| Arc::new(Semaphore::new(permits));
        Self { all: semaphore(ALL), small: semaphore(ALL_SMALL), patience }
    }

    /// Memory for `shares` log-probabilities, of which a request may have half of all.
    ///
    /// # Errors
    /// [`NoShares`].
    pub(crate) async fn acquire(&self, shares: usize) -> Result<OwnedSemaphorePermit, NoShares> {
        let permits = shares as u32;
        if shares <= SMALL
            && let Ok(permit) = Arc::clone(&self.small).try_acquire_many_owned(permits)
        {
            return Ok(permit);
        }
        let waited =
            timeout(self.patience, Arc::clone(&self.all).acquire_many_owned(permits)).await;
        waited.map_err(|_elapsed| NoShares::Taken)?.map_err(|_closed| NoShares::Closed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn small_requests_do_not_wait_behind_large_ones() {
        let shares = Arc::new(Shares::new(Duration::from_secs(30)));
        let large = ALL / 2;
        let (first, _second) =
            (shares.acquire(large).await.unwrap(), shares.acquire(large).await.unwrap());
        let mut third = std::pin::pin!(shares.acquire(large));
        assert!(futures::poll!(third.as_mut()).is_pending());
        let mut small = std::pin::pin!(shares.acquire(10));
        assert!(futures::poll!(small.as_mut()).is_ready());
        drop(first);
        drop(third.await.unwrap());
    }

    #[tokio::test]
    async fn a_request_waits_no_longer_than_the_patience() {
        let shares = Shares::new(Duration::from_millis(20));
        let _all = shares.acquire(ALL).await.unwrap();
        assert_eq!(shares.acquire(SMALL + 1).await.unwrap_err(), NoShares::Taken);
        let _small: Vec<_> = futures::future::join_all((0..8).map(|_| shares.acquire(SMALL))).await;
        assert_eq!(shares.acquire(1).await.unwrap_err(), NoShares::Taken);
    }
}
