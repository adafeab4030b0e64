//! The login on the Hub.

use std::fs;
use std::path::PathBuf;

use crate::client::Session;
use crate::error::Reason;
use crate::hub::Hub;

/// The Hub's own address, the default.
const HUGGING_FACE: &str = "https://huggingface.co";

/// The result of checking the login.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Login {
    /// A user or an organisation, by name.
    As(String),
    /// There is no token; public repositories can be read.
    NoToken,
    /// There is a token, but the Hub does not accept it.
    Refused,
}

impl Hub {
    /// Asks the Hub for our user name. The token itself is never shown.
    ///
    /// # Errors
    /// [`Reason::Unreachable`] and other failures of the request, after at most 10 s.
    pub fn login(&self) -> Result<Login, Reason> {
        let runtime =
            tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build();
        let runtime = runtime.map_err(|error| Reason::Client(error.to_string()))?;
        let answer = runtime.block_on(async {
            Session::open(self.endpoint.as_deref(), None, false)?.whoami().await
        });
        // A host name lookup cannot be interrupted.
        runtime.shutdown_background();
        match answer {
            Ok(name) => Ok(Login::As(name)),
            Err(Reason::Refused) if has_token() => Ok(Login::Refused),
            Err(Reason::Refused) => Ok(Login::NoToken),
            Err(reason) => Err(reason),
        }
    }

    /// The address of the Hub in use.
    pub fn address(&self) -> &str {
        self.endpoint.as_deref().unwrap_or(HUGGING_FACE)
    }
}

/// Whether a token is set or stored, by the client's own rules.
fn has_token() -> bool {
    let set = |name: &str| std::env::var(name).ok().filter(|value| !value.is_empty());
    if set("HF_HUB_DISABLE_IMPLICIT_TOKEN").is_some() {
        return false;
    }
    let files = [set("HF_TOKEN_PATH").map(PathBuf::from), Some(hf_hub::hf_home().join("token"))];
    let stored = |path| fs::read_to_string(path).is_ok_and(|text| !text.trim().is_empty());
    set("HF_TOKEN").is_some() || files.into_iter().flatten().any(stored)
}
