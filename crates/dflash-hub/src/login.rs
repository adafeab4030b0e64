//! Who we are to the Hub.

use crate::client::Session;
use crate::error::Reason;
use crate::home;
use crate::hub::Hub;

/// The Hub itself, where no other is named.
pub(crate) const HUGGING_FACE: &str = "https://huggingface.co";

/// Who is logged in.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Login {
    /// A user or an organisation, by name.
    As(String),
    /// There is no token; public repositories can be read.
    NoToken,
    /// There is a token, and the Hub does not know it.
    Refused,
}

impl Hub {
    /// Asks the Hub who we are. The token itself is never shown.
    ///
    /// # Errors
    /// [`Reason::Unreachable`] and other failures to ask, after at most 10 s.
    pub fn login(&self) -> Result<Login, Reason> {
        let runtime =
            tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build();
        let runtime = runtime.map_err(|error| Reason::Client(error.to_string()))?;
        let answer = runtime.block_on(async {
            Session::open(self.endpoint.as_deref(), None, false)?.whoami().await
        });
        // Looking up a host name cannot be cut short.
        runtime.shutdown_background();
        match answer {
            Ok(name) => Ok(Login::As(name)),
            Err(Reason::NoLogin | Reason::Refused) => {
                Ok(home::token().map_or(Login::NoToken, |_| Login::Refused))
            }
            Err(reason) => Err(reason),
        }
    }

    /// The address of the Hub in use.
    pub fn address(&self) -> &str {
        self.endpoint.as_deref().unwrap_or(HUGGING_FACE)
    }
}
