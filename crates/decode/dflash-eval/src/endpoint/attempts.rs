//! Retries requests that fail because of the server or the connection.

use std::time::Duration;

use crate::Error;

/// Number of attempts at a request, and the pause before the second one, which doubles.
const TRIES: u32 = 3;
const FIRST_WAIT: Duration = Duration::from_millis(500);

/// The attempts that are left for one request.
#[derive(Debug)]
pub(crate) struct Attempts {
    left: u32,
    wait: Duration,
}

impl Default for Attempts {
    fn default() -> Self {
        Self { left: TRIES - 1, wait: FIRST_WAIT }
    }
}

impl Attempts {
    /// Whether to make another attempt after `fault`; returns after the pause before it.
    pub(crate) async fn again(&mut self, fault: &Error) -> bool {
        if self.left == 0 || !is_the_servers(fault) {
            return false;
        }
        self.left -= 1;
        tokio::time::sleep(self.wait).await;
        self.wait *= 2;
        true
    }
}

/// Whether a retry may help: the server, or the connection to it, failed.
fn is_the_servers(error: &Error) -> bool {
    match error {
        Error::Refused { status, .. } => *status == 429 || *status >= 500,
        Error::Unreachable { .. } | Error::Strange { .. } | Error::Slow { .. } => true,
        _ => false,
    }
}
