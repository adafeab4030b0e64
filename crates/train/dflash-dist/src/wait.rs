//! Waiting for other processes.

use std::time::{Duration, Instant};

/// Calls `look` every `pause` until it returns a value; `None` if `limit` has passed since `start`.
/// It is called at least once.
pub(crate) fn until<T>(
    start: Instant,
    limit: Duration,
    pause: Duration,
    mut look: impl FnMut() -> Option<T>,
) -> Option<T> {
    loop {
        let found = look();
        if found.is_some() || start.elapsed() >= limit {
            return found;
        }
        std::thread::sleep(pause);
    }
}
