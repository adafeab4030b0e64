//! When to ask again, and what kind of failure deserves it.

use std::hash::{BuildHasher, RandomState};
use std::time::Duration;

use crate::error::Error;

/// How long and how often a sample is asked for.
#[derive(Debug, Clone)]
pub struct RetryPolicy {
    /// Longest time for one request, its body included.
    pub request_timeout: Duration,
    /// Longest time for one sample over all its requests.
    pub deadline: Duration,
    /// How long a server may take to start listening when the stream starts.
    pub startup: Duration,
    /// First pause; it doubles with every attempt.
    pub first_pause: Duration,
    /// Longest pause.
    pub longest_pause: Duration,
    /// Attempts at a sample whose content was unusable (NaN, zero rows, wrong length).
    pub invalid_attempts: u32,
    /// Samples in a row that may be left out as refused or unusable before the stream fails.
    pub failures_in_a_row: u32,
}

impl Default for RetryPolicy {
    /// Long enough for a server that restarts in between, short enough to notice one that is gone.
    fn default() -> Self {
        Self {
            request_timeout: Duration::from_secs(120),
            deadline: Duration::from_secs(300),
            startup: Duration::from_secs(2),
            first_pause: Duration::from_millis(50),
            longest_pause: Duration::from_secs(5),
            invalid_attempts: 3,
            failures_in_a_row: 8,
        }
    }
}

impl RetryPolicy {
    /// The pause after `failed` attempts: exponential, between half of it and all of it at
    /// random, so that clients that failed together do not come back together.
    pub(crate) fn pause(&self, failed: u32) -> Duration {
        let doubled = self.first_pause.saturating_mul(1 << failed.saturating_sub(1).min(16));
        doubled.min(self.longest_pause).mul_f64(0.5 + 0.5 * random_fraction())
    }
}

/// Uniform in [0, 1). The standard library's per-map hash keys are random enough for jitter.
fn random_fraction() -> f64 {
    let bits = RandomState::new().hash_one(0u8) >> 11;
    bits as f64 / (1u64 << 53) as f64
}

/// What one request's failure means for what to do next.
#[derive(Debug)]
pub(crate) enum Failure {
    /// The server is alive and full, or still loading: ask again after the pause it named.
    Busy { after: Option<Duration>, error: Error },
    /// The endpoint is in trouble: ask again, preferably another one.
    Transient(Error),
    /// This prompt will never be taken: leave the sample out.
    Rejected(Error),
    /// What came back is unusable; it may be better next time.
    Invalid(Error),
    /// The server is the wrong one; no sample will ever be right.
    Fatal(Error),
}

impl Failure {
    pub(crate) fn into_error(self) -> Error {
        match self {
            Self::Busy { error, .. }
            | Self::Transient(error)
            | Self::Rejected(error)
            | Self::Invalid(error)
            | Self::Fatal(error) => error,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_double_up_to_a_limit_and_vary() {
        let policy = RetryPolicy::default();
        for (failed, ms) in [(1, 50), (2, 100), (5, 800), (8, 5000), (400, 5000)] {
            let pause = policy.pause(failed);
            assert!(pause <= Duration::from_millis(ms), "{failed}: {pause:?}");
            assert!(pause >= Duration::from_millis(ms / 2), "{failed}: {pause:?}");
        }
        assert!((0..20).any(|_| policy.pause(3) != policy.pause(3)));
    }
}
