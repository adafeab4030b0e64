//! When to retry, and which failures are retried.

use std::hash::{BuildHasher, RandomState};
use std::time::{Duration, SystemTime};

use crate::error::Error;

/// How long and how often a sample is requested.
#[derive(Debug, Clone)]
pub struct RetryPolicy {
    /// Timeout of one request, including its body.
    pub request_timeout: Duration,
    /// Timeout of one sample over all its requests: the time that a server may take to come back.
    pub deadline: Duration,
    /// How long a server may take to answer when the stream starts; one that says it is loading
    /// has `deadline` if that is longer.
    pub startup: Duration,
    /// First pause; it doubles with every attempt.
    pub first_pause: Duration,
    /// Longest pause that we choose.
    pub longest_pause: Duration,
    /// Longest pause that a busy server may request.
    pub longest_wait: Duration,
    /// Attempts at a sample whose content was unusable (NaN, zero rows, wrong length).
    pub invalid_attempts: u32,
    /// Number of times that a server must refuse a sample before it is skipped.
    pub refusals: u32,
    /// The same for a bare 400, which says nothing about the sample: it can result from a request
    /// that was damaged in transit.
    pub bare_refusals: u32,
    /// Number of replies that cast doubt on a server before it is considered the wrong one.
    pub doubts: u32,
    /// Number of consecutive samples that may be skipped as refused or unusable before the stream
    /// fails.
    pub failures_in_a_row: u32,
}

impl Default for RetryPolicy {
    /// Long enough for a server that restarts in between, short enough to notice one that is gone.
    fn default() -> Self {
        Self {
            request_timeout: Duration::from_secs(120),
            deadline: Duration::from_secs(300),
            startup: Duration::from_secs(60),
            first_pause: Duration::from_millis(50),
            longest_pause: Duration::from_secs(5),
            longest_wait: Duration::from_secs(30),
            invalid_attempts: 3,
            refusals: 2,
            bare_refusals: 8,
            doubts: 3,
            failures_in_a_row: 8,
        }
    }
}

impl RetryPolicy {
    /// The pause after `failed` attempts: exponential, with a random factor between one half and
    /// one, so that clients that failed together do not return together.
    pub(crate) fn pause(&self, failed: u32) -> Duration {
        let doubled = self.first_pause.saturating_mul(1 << failed.saturating_sub(1).min(16));
        doubled.min(self.longest_pause).mul_f64(0.5 + 0.5 * random_fraction())
    }

    /// The pause for a busy server: what it requests within reason, plus up to a quarter, so that
    /// clients that were refused together do not return together. A request for no pause is
    /// ignored.
    pub(crate) fn busy_pause(&self, failed: u32, asked: Option<Duration>) -> Duration {
        match asked {
            Some(asked) if asked >= self.first_pause => {
                asked.min(self.longest_wait).mul_f64(1.0 + 0.25 * random_fraction())
            }
            _ => self.pause(failed),
        }
    }
}

/// The pause that a `Retry-After` requests: seconds, also fractions, or a date. `None` for anything
/// else.
pub(crate) fn retry_after(text: &str, now: SystemTime) -> Option<Duration> {
    let text = text.trim();
    match text.parse::<f64>() {
        Ok(seconds) if seconds >= 0.0 => {
            Some(Duration::try_from_secs_f64(seconds).unwrap_or(Duration::MAX))
        }
        Ok(_) => None,
        Err(_) => {
            let date = httpdate::parse_http_date(text).ok()?;
            Some(date.duration_since(now).unwrap_or_default())
        }
    }
}

/// Uniform in [0, 1). The standard library's per-map hash keys are random enough for jitter.
fn random_fraction() -> f64 {
    let bits = RandomState::new().hash_one(0u8) >> 11;
    bits as f64 / (1u64 << 53) as f64
}

/// What a failed request means for the next step.
#[derive(Debug)]
pub(crate) enum Failure {
    /// The server is alive and full, or still loading: retry after the pause that it named.
    Busy { after: Option<Duration>, error: Error },
    /// The endpoint has a problem: retry, preferably at another one.
    Transient(Error),
    /// The server refuses this prompt. The sample is skipped once it has been refused again.
    Rejected(Error),
    /// A refusal that is not in the form of our server or vLLM: the request may have been damaged.
    Garbled(Error),
    /// The reply is unusable; another attempt may succeed.
    Invalid(Error),
    /// The request or the reply was damaged in transit: retry.
    Damaged(Error),
    /// The reply casts doubt on the server. If it is repeated, it is the wrong server.
    Doubtful(Error),
    /// No sample can succeed.
    Fatal(Error),
}

impl Failure {
    pub(crate) fn into_error(self) -> Error {
        match self {
            Self::Busy { error, .. }
            | Self::Transient(error)
            | Self::Rejected(error)
            | Self::Garbled(error)
            | Self::Invalid(error)
            | Self::Damaged(error)
            | Self::Doubtful(error)
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

    #[test]
    fn a_busy_server_is_given_the_time_it_asks_for_within_reason() {
        let policy = RetryPolicy::default();
        let at = |text: &str| retry_after(text, SystemTime::UNIX_EPOCH);
        let check = |text: &str, least: f64, most: f64| {
            let pause = policy.busy_pause(8, at(text)).as_secs_f64();
            assert!((least..=most).contains(&pause), "{text}: {pause}");
        };
        check("1", 1.0, 1.25);
        check("0.25", 0.25, 0.3125);
        check("3600", 30.0, 37.5);
        check("18446744073709551615", 30.0, 37.5);
        check("1e400", 30.0, 37.5);
        check("Thu, 01 Jan 1970 00:00:07 GMT", 7.0, 8.75);
        // Not a pause: our own, which grows.
        for text in ["0", "0.0001", "-1", "NaN", "soon", "", "Wed, 31 Dec 1969 23:59:00 GMT"] {
            check(text, 2.5, 5.0);
        }
    }
}
