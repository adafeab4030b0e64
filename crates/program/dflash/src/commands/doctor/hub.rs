//! Checks whether the Hub answers and which account it recognises.

use dflash_hub::{Hub, Login};
use dflash_settings::shown_endpoint;

use super::finding::Finding;

const WHAT: &str = "Hub";
const LOGIN: &str = "`hf auth login`, or set HF_TOKEN: for private models and to push";

/// Queries the Hub unless `offline`.
pub(super) fn look(offline: bool) -> Finding {
    let hub = Hub::from_env();
    if offline || hub.offline {
        let why = if offline { "--offline" } else { "HF_HUB_OFFLINE" };
        return Finding::ok(WHAT, format!("not asked ({why})"));
    }
    // The address may contain a password.
    let address = shown_endpoint(hub.address());
    match hub.login() {
        Ok(Login::As(name)) => Finding::ok(WHAT, format!("{address} answers; logged in as {name}")),
        Ok(Login::NoToken) => Finding::warning(WHAT, format!("{address} answers; no login"), LOGIN),
        Ok(Login::Refused) => {
            Finding::warning(WHAT, format!("{address} does not accept the token"), LOGIN)
        }
        Err(reason) => Finding::warning(
            WHAT,
            format!("{address}: {reason}"),
            "local directories work without it; HF_ENDPOINT names a mirror",
        ),
    }
}
