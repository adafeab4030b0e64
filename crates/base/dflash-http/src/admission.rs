//! Places in the queue: which requests get one, which wait in line, and which are told to retry and
//! when.
//!
//! A slot is held from before a request's body is read until the last byte of its reply has been
//! sent. So the bound covers uploads, waiting prompts, and finished rows that a client has not read
//! yet.
//!
//! Refusing every request while all slots are taken would be unfair: a client that just got its
//! reply asks again at once and takes the slot that it released, and those that were told to wait
//! find none. So requests wait in line for a while, first come first served, which costs a
//! connection but no memory for prompts or rows.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::timeout;

/// How many requests may wait in line; each costs a connection.
pub const LONGEST_LINE: usize = 256;
/// The shortest and the longest time that a client is told to wait.
const WAITS: (Duration, Duration) = (Duration::from_millis(50), Duration::from_secs(30));
/// The weight of the newest interval between two replies in their mean.
const NEWEST: f64 = 0.125;

/// Why a request does not get a slot.
#[derive(Debug)]
pub enum NoSlot {
    /// All are taken, and the line is full.
    Full {
        /// How many there are.
        slots: usize,
        /// When one is likely to be free.
        after: Duration,
    },
    /// The server is shutting down.
    Closed,
}

/// The slots and the line of waiting requests.
#[derive(Debug)]
pub struct Admission {
    slots: Arc<Semaphore>,
    max_queue: usize,
    line: Semaphore,
    /// How long a request may wait in line.
    patience: Duration,
    pace: Arc<Mutex<Pace>>,
}

impl Admission {
    /// `max_queue` slots; a request may wait in line for `patience`.
    pub fn new(max_queue: usize, patience: Duration) -> Self {
        Self {
            slots: Arc::new(Semaphore::new(max_queue)),
            max_queue,
            line: Semaphore::new(LONGEST_LINE),
            patience,
            pace: Arc::new(Mutex::new(Pace { gap: 0.0, last: Instant::now(), put_off: 0 })),
        }
    }

    /// A slot, at once or after waiting in line.
    ///
    /// # Errors
    /// [`NoSlot`].
    pub async fn enter(&self) -> Result<Slot, NoSlot> {
        let Ok(_place) = self.line.try_acquire() else { return Err(self.full()) };
        // In order, so never ahead of earlier requests.
        match timeout(self.patience, Arc::clone(&self.slots).acquire_owned()).await {
            Ok(permit) => {
                let permit = permit.map_err(|_closed| NoSlot::Closed)?;
                Ok(Slot(Arc::new(Held {
                    kept: Mutex::default(),
                    since: Instant::now(),
                    pace: Arc::clone(&self.pace),
                    _permit: permit,
                })))
            }
            Err(_elapsed) => Err(self.full()),
        }
    }

    /// The refusal for a request without a slot, with the time to wait.
    pub fn full(&self) -> NoSlot {
        let ahead = self.in_use() + self.in_line();
        let after = self.pace().time_for(ahead + 1);
        NoSlot::Full { slots: self.max_queue, after }
    }

    /// Refuses all requests in line.
    pub fn close(&self) {
        self.slots.close();
    }

    /// Slots taken.
    pub fn in_use(&self) -> usize {
        self.max_queue - self.slots.available_permits()
    }

    /// Requests in line, including those about to get a slot.
    pub fn in_line(&self) -> usize {
        LONGEST_LINE - self.line.available_permits()
    }

    /// How many slots there are.
    pub fn max_queue(&self) -> usize {
        self.max_queue
    }

    fn pace(&self) -> std::sync::MutexGuard<'_, Pace> {
        self.pace.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A place in the queue, released when the last clone is dropped. A reply carries one along.
#[derive(Debug, Clone)]
pub struct Slot(Arc<Held>);

impl Slot {
    /// Holds `permit` as long as itself.
    pub fn keep(&self, permit: OwnedSemaphorePermit) {
        self.0.kept.lock().unwrap_or_else(PoisonError::into_inner).push(permit);
    }
}

#[derive(Debug)]
struct Held {
    /// Other permits that are released with it.
    kept: Mutex<Vec<OwnedSemaphorePermit>>,
    since: Instant,
    pace: Arc<Mutex<Pace>>,
    _permit: OwnedSemaphorePermit,
}

impl Drop for Held {
    fn drop(&mut self) {
        self.pace.lock().unwrap_or_else(PoisonError::into_inner).count(self.since);
    }
}

/// How fast slots become free.
#[derive(Debug)]
struct Pace {
    /// Mean seconds between two releases while the server was busy.
    gap: f64,
    last: Instant,
    put_off: u32,
}

impl Pace {
    /// Counts the release of a slot taken at `since`. An idle server was not slow: no gap is longer
    /// than the slot was held.
    fn count(&mut self, since: Instant) {
        let gap = self.last.max(since).elapsed().as_secs_f64();
        self.gap += NEWEST * (gap - self.gap);
        self.last = Instant::now();
    }

    /// When `slots` slots are likely to be free, plus up to half of that, so that clients that were
    /// refused together do not return together.
    fn time_for(&mut self, slots: usize) -> Duration {
        self.put_off = self.put_off.wrapping_add(1);
        // Multiples of the golden ratio are evenly spread for any number of refusals.
        let spread = (f64::from(self.put_off) * 0.618_033_988_75).fract();
        let seconds = slots as f64 * self.gap * (1.0 + 0.5 * spread);
        Duration::from_secs_f64(seconds.min(WAITS.1.as_secs_f64())).max(WAITS.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pace(gap: f64) -> Pace {
        Pace { gap, last: Instant::now(), put_off: 0 }
    }

    #[test]
    fn waits_follow_the_pace_within_bounds_and_differ() {
        let check = |gap: f64, slots: usize, least: f64, most: f64| {
            let mut pace = pace(gap);
            let waits: Vec<f64> = (0..8).map(|_| pace.time_for(slots).as_secs_f64()).collect();
            assert!(waits.iter().all(|wait| (least..=most).contains(wait)), "{gap}: {waits:?}");
            waits
        };
        let waits = check(0.1, 9, 0.9, 1.35);
        assert!(waits.iter().all(|wait| waits.iter().filter(|other| *other == wait).count() == 1));
        check(0.0, 300, 0.05, 0.05);
        check(1e9, 300, 30.0, 30.0);
    }

    #[test]
    fn idle_time_is_no_slowness() {
        let ago = |seconds| Instant::now().checked_sub(Duration::from_secs(seconds)).unwrap();
        let mut pace = Pace { gap: 0.0, last: ago(3600), put_off: 0 };
        pace.count(ago(8));
        assert!((0.9..1.2).contains(&pace.gap), "{}", pace.gap);
    }

    #[tokio::test]
    async fn those_in_line_come_first() {
        let admission = Arc::new(Admission::new(1, Duration::from_secs(60)));
        let first = admission.enter().await.unwrap();
        let waiting = Arc::clone(&admission);
        let second = tokio::spawn(async move { waiting.enter().await });
        while admission.in_line() == 0 {
            tokio::task::yield_now().await;
        }
        drop(first);
        // Free, but not for a new request.
        let mut third = std::pin::pin!(admission.enter());
        assert!(futures::poll!(third.as_mut()).is_pending());
        drop(second.await.unwrap().unwrap());
        third.await.unwrap();
        assert_eq!((admission.in_use(), admission.in_line()), (0, 0));
    }

    #[tokio::test]
    async fn a_line_has_an_end_and_a_patience() {
        let admission = Admission::new(1, Duration::ZERO);
        let _slot = admission.enter().await.unwrap();
        let refusal = admission.enter().await.unwrap_err();
        assert!(matches!(refusal, NoSlot::Full { slots: 1, .. }), "{refusal:?}");
        admission.close();
        let refusal = admission.enter().await.unwrap_err();
        assert!(matches!(refusal, NoSlot::Closed), "{refusal:?}");
    }
}
