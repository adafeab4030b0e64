//! Sources of settings that were not typed, so that errors can name the run file's line.

use std::collections::BTreeMap;

use anyhow::Result;
use serde::{Deserialize, Serialize};

/// Keys with the places that set them, such as `lr` and `run.toml:3`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Places(BTreeMap<String, String>);

impl Places {
    pub(crate) fn of(&self, key: &str) -> Option<&str> {
        self.0.get(key).map(String::as_str)
    }

    /// Prefixes an error about a setting with the setting's place; `about` finds the key.
    ///
    /// # Errors
    /// That of `outcome`.
    pub fn explain<T>(
        &self,
        outcome: Result<T>,
        about: impl Fn(&anyhow::Error) -> Option<String>,
    ) -> Result<T> {
        outcome.map_err(|error| match about(&error).and_then(|key| self.of(&key)) {
            Some(place) => {
                let message = format!("{place}: {error}");
                error.context(message)
            }
            None => error,
        })
    }
}

impl FromIterator<(String, String)> for Places {
    fn from_iter<I: IntoIterator<Item = (String, String)>>(places: I) -> Self {
        Self(places.into_iter().collect())
    }
}

#[cfg(test)]
mod tests {
    use dflash_settings::Invalid;

    use super::*;

    #[test]
    fn an_error_about_a_setting_names_its_place() {
        let places: Places = [("lr".to_owned(), "run.toml:3".to_owned())].into_iter().collect();
        let explained = |error: anyhow::Error| {
            let explained = places.explain::<()>(Err(error), |error| {
                error.downcast_ref::<Invalid>().map(|invalid| invalid.key.to_owned())
            });
            explained.unwrap_err().to_string()
        };
        let invalid = |key| Invalid::new(key, -1, "it must be positive").into();
        assert_eq!(explained(invalid("lr")), "run.toml:3: --lr is -1, but it must be positive");
        assert_eq!(explained(invalid("gamma")), "--gamma is -1, but it must be positive");
        assert_eq!(explained(anyhow::anyhow!("--lr is text")), "--lr is text");
    }
}
