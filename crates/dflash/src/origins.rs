//! Where settings come from, so that a library's error about a flag names the run file's line.
//!
//! Libraries know flags, not files. What they refuse begins with the flag; the programs know which
//! flags a run file or `--set` gave, and the front tells the engine and its ranks by a variable.

use anyhow::Result;

/// A line for each setting: flag, tab, place.
const VARIABLE: &str = "DFLASH_SETTING_ORIGINS";

/// Flags and the places that gave them, such as `--lr` and `run.toml:3`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Origins(Vec<(String, String)>);

impl Origins {
    pub(crate) fn new(settings: Vec<(String, String)>) -> Self {
        Self(settings)
    }

    /// These; where there are none, what the program that started this one knew.
    pub fn or_inherited(self) -> Self {
        if self.0.is_empty() {
            return std::env::var(VARIABLE).map_or(self, |text| Self::parse(&text));
        }
        self
    }

    fn parse(text: &str) -> Self {
        let settings = text.lines().filter_map(|line| line.split_once('\t'));
        Self(settings.map(|(flag, place)| (flag.to_owned(), place.to_owned())).collect())
    }

    /// Name and value of the variable for programs that are started; `None` when there is nothing
    /// to tell.
    pub(crate) fn variable(&self) -> Option<(&'static str, String)> {
        let line = |(flag, place): &(String, String)| format!("{flag}\t{place}\n");
        (!self.0.is_empty()).then(|| (VARIABLE, self.0.iter().map(line).collect()))
    }

    /// An error that begins with a flag gets the flag's place in front.
    ///
    /// # Errors
    /// Whatever `outcome` is.
    pub fn explain<T>(&self, outcome: Result<T>) -> Result<T> {
        outcome.map_err(|error| {
            let message = error.to_string();
            let flag = message.split([' ', ':']).next().unwrap_or_default();
            match self.0.iter().find(|(given, _)| given == flag) {
                Some((_, place)) => error.context(format!("{place}: {message}")),
                None => error,
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_about_a_flag_names_its_place() {
        let place = |place: &str| place.to_owned();
        let origins = Origins::new(vec![
            ("--lr".into(), place("run.toml:3")),
            ("--loss".into(), place("--set")),
        ]);
        let (_, text) = origins.variable().unwrap();
        assert_eq!(Origins::parse(&text), origins);
        let explained = |message: &'static str| {
            origins.explain::<()>(Err(anyhow::anyhow!(message))).unwrap_err().to_string()
        };
        assert_eq!(explained("--lr is -1, but"), "run.toml:3: --lr is -1, but");
        assert_eq!(explained("--loss names foo"), "--set: --loss names foo");
        assert_eq!(explained("--lr-x is 1"), "--lr-x is 1");
        assert_eq!(explained("no server; lower --lr"), "no server; lower --lr");
        assert_eq!(Origins::default().variable(), None);
    }
}
