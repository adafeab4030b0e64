//! The token with write access, which is never shown.

use std::fmt;
use std::path::{Path, PathBuf};

use crate::error::Error;

/// Printed in place of the token.
const HIDDEN: &str = "***";

/// A token of the Hub, and where it comes from. It prints as stars.
#[derive(Clone)]
pub struct Token {
    secret: String,
    origin: String,
}

impl Token {
    /// The token in the file `path`.
    ///
    /// # Errors
    /// [`Error::TokenFile`] or [`Error::TokenShape`].
    pub fn from_file(path: &Path) -> Result<Self, Error> {
        let fault = |source| Error::TokenFile { path: path.into(), source };
        let text = std::fs::read_to_string(path).map_err(fault)?;
        Self::new(&text, path.display().to_string())
    }

    /// The token, from where the Hub's own clients look for it: `HF_TOKEN`, the file that
    /// `HF_TOKEN_PATH` names, the file that a login stores.
    ///
    /// # Errors
    /// [`Error::NoToken`], or as [`Self::from_file`].
    pub fn find() -> Result<Self, Error> {
        let variable = |name| std::env::var(name).ok().filter(|value: &String| !value.is_empty());
        if let Some(token) = variable("HF_TOKEN") {
            return Self::new(&token, "HF_TOKEN".to_owned());
        }
        let login = || hf_hub::hf_home().join("token");
        let file = variable("HF_TOKEN_PATH").map_or_else(login, PathBuf::from);
        if file.is_file() { Self::from_file(&file) } else { Err(Error::NoToken { file }) }
    }

    fn new(text: &str, origin: String) -> Result<Self, Error> {
        let secret = text.trim().to_owned();
        // Other values could not be sent in a header; a file of several lines is not a token.
        let is_token = !secret.is_empty() && secret.bytes().all(|byte| byte.is_ascii_graphic());
        if is_token { Ok(Self { secret, origin }) } else { Err(Error::TokenShape { origin }) }
    }

    pub(crate) fn secret(&self) -> &str {
        &self.secret
    }

    /// Where it comes from, for messages.
    pub(crate) fn origin(&self) -> &str {
        &self.origin
    }

    /// `text` from another program, which may contain the token, with the token hidden.
    pub(crate) fn hidden_in(&self, text: &str) -> String {
        text.replace(&self.secret, HIDDEN)
    }
}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Token({HIDDEN}, from {})", self.origin)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_is_one_word_and_never_shown() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("token");
        let read = |text: &str| {
            std::fs::write(&path, text).unwrap();
            Token::from_file(&path)
        };
        let token = read("hf_secret\n").unwrap();
        assert_eq!(token.secret(), "hf_secret");
        assert!(!format!("{token:?}").contains("secret"));
        assert_eq!(token.hidden_in("no hf_secret here"), "no *** here");
        for wrong in ["", " \n", "two words", "a\nb", "g\u{e9}heim"] {
            let refused = read(wrong).unwrap_err().to_string();
            assert!(refused.contains("has no valid Hub token"), "{refused}");
            assert!(wrong.trim().is_empty() || !refused.contains(wrong), "{refused}");
        }
        let gone = Token::from_file(&dir.path().join("gone")).unwrap_err().to_string();
        assert!(gone.contains("gone"), "{gone}");
    }
}
