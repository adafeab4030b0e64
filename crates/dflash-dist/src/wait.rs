//! Waiting for what other processes do.

use std::time::{Duration, Instant};

/// What `look` finds, asked every `pause`; `None` when `limit` has passed since `start`. It looks
/// at least once.
pub(crate) fn until<T>(
    (start, limit): (Instant, Duration),
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
