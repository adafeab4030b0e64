//! The error for a setting that cannot be used, and the ranges that several settings share.

use std::fmt::Display;

/// A setting that cannot be used.
///
/// The programs add where the value was given, if it was not typed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("--{} {reason}", .key.replace('_', "-"))]
pub struct Invalid {
    /// The setting: its field, and its key in a run file.
    pub key: &'static str,
    /// What is wrong with it, and what would be right.
    pub reason: String,
    /// The setting that it needs and that was not given, if that is what is wrong.
    pub missing: Option<&'static str>,
}

impl Invalid {
    /// `key` has a `value` where something else is `expected`.
    pub fn new(key: &'static str, value: impl Display, expected: impl Display) -> Self {
        Self { key, reason: format!("is {value}, but {expected}"), missing: None }
    }
}

/// Counts that must not be 0.
pub(crate) fn at_least_one<const N: usize>(
    counts: [(&'static str, u64); N],
) -> Result<(), Invalid> {
    match counts.into_iter().find(|(_, count)| *count == 0) {
        Some((key, _)) => Err(Invalid::new(key, 0, "it must be at least 1")),
        None => Ok(()),
    }
}

/// Numbers above 0.
pub(crate) fn positive<const N: usize>(numbers: [(&'static str, f64); N]) -> Result<(), Invalid> {
    let bad = |number: f64| !(number > 0.0 && number.is_finite());
    match numbers.into_iter().find(|(_, number)| bad(*number)) {
        Some((key, number)) => Err(Invalid::new(key, number, "it must be a positive number")),
        None => Ok(()),
    }
}

/// Numbers from 0 to 1.
pub(crate) fn shares<const N: usize>(numbers: [(&'static str, f64); N]) -> Result<(), Invalid> {
    match numbers.into_iter().find(|(_, share)| !(0.0..=1.0).contains(share)) {
        Some((key, share)) => Err(Invalid::new(key, share, "a share is between 0 and 1")),
        None => Ok(()),
    }
}

/// Refuses `key` without the setting `missing`.
pub(crate) fn needs(key: &'static str, missing: &'static str) -> Invalid {
    let reason = format!("needs --{}", missing.replace('_', "-"));
    Invalid { key, reason, missing: Some(missing) }
}

/// Refuses `key` with what another setting says: `reason` begins with "needs".
pub(crate) fn at_odds(key: &'static str, reason: &str) -> Invalid {
    Invalid { key, reason: reason.to_owned(), missing: None }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(outcome: Result<(), Invalid>, expect: Option<&str>) {
        assert_eq!(outcome.err().map(|invalid| invalid.to_string()).as_deref(), expect);
    }

    #[test]
    fn ranges_name_the_flag_the_value_and_the_range() {
        check(at_least_one([("max_anchors", 1)]), None);
        let zero = Some("--max-anchors is 0, but it must be at least 1");
        check(at_least_one([("epochs", 3), ("max_anchors", 0)]), zero);
        check(positive([("lr", 1e-9)]), None);
        check(positive([("lr", f64::NAN)]), Some("--lr is NaN, but it must be a positive number"));
        check(positive([("lr", 0.0)]), Some("--lr is 0, but it must be a positive number"));
        check(shares([("decay_ratio", 1.0)]), None);
        check(
            shares([("decay_ratio", 1.1)]),
            Some("--decay-ratio is 1.1, but a share is between 0 and 1"),
        );
        let lone = needs("keep_every", "keep_last");
        assert_eq!(lone.to_string(), "--keep-every needs --keep-last");
    }
}
