//! Where the Hub's clients keep their things on this machine, by their own rules.

use std::fs;
use std::path::PathBuf;

/// The directory of the login and, if nothing else is said, of the cache.
pub(crate) fn home() -> PathBuf {
    let below = |variable: &str, rest: &str| set(variable).map(|dir| PathBuf::from(dir).join(rest));
    below("HF_HOME", "")
        .or_else(|| below("XDG_CACHE_HOME", "huggingface"))
        .or_else(|| below("HOME", ".cache/huggingface"))
        .unwrap_or_else(|| PathBuf::from("/tmp/.cache/huggingface"))
}

/// The cache that all clients of the Hub share.
pub(crate) fn cache() -> PathBuf {
    let named = set("HF_HUB_CACHE").or_else(|| set("HUGGINGFACE_HUB_CACHE"));
    named.map_or_else(|| home().join("hub"), PathBuf::from)
}

/// The file that a login leaves.
pub(crate) fn login() -> PathBuf {
    home().join("token")
}

/// The token for reading, set or stored; none where the user wants to be nobody.
pub(crate) fn token() -> Option<String> {
    if set("HF_HUB_DISABLE_IMPLICIT_TOKEN").is_some() {
        return None;
    }
    let files = [set("HF_TOKEN_PATH").map(PathBuf::from), Some(login())];
    let stored = files.into_iter().flatten().filter_map(|path| fs::read_to_string(path).ok());
    let found = set("HF_TOKEN").into_iter().chain(stored).map(|text| text.trim().to_owned());
    // What else could not be sent in a header.
    let mut tokens = found.filter(|token| !token.is_empty());
    tokens.find(|token| token.bytes().all(|byte| byte.is_ascii_graphic()))
}

/// An environment variable that says something.
pub(crate) fn set(name: &str) -> Option<String> {
    std::env::var(name).ok().filter(|value| !value.is_empty())
}
