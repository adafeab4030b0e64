//! The error for an invalid setting, and ranges that several settings share.

use std::fmt::Display;
use std::ops::RangeInclusive;
use std::path::Path;

/// More tokens than any row, document or answer has.
pub(crate) const MOST_TOKENS: u64 = 1 << 24;
/// More optimizer steps than any run takes.
pub(crate) const MOST_STEPS: u64 = 1_000_000_000;
/// More rows than any dataset has.
pub(crate) const MOST_ROWS: u64 = 1_000_000_000_000;
/// Eleven days. As milliseconds, which is what sockets take, it fits in 31 bits.
pub(crate) const MOST_SECONDS: u64 = 1_000_000;
/// Far more than any draft guesses right; the memory of an anchor is proportional to it.
const MOST_SLOTS: u64 = 1024;
/// More than a rack of GPUs has.
pub(crate) const MOST_TFLOPS: f64 = 1e6;
/// A TiB.
pub(crate) const MOST_MIB: u64 = 1 << 20;
/// More cores than any machine has.
pub(crate) const MOST_THREADS: u64 = 1024;
/// More layers than any model has.
pub(crate) const MOST_LAYERS: u64 = 1024;
/// More rows than any embedding has.
pub(crate) const MOST_VOCABULARY: u64 = 1 << 24;
/// A rate at which every run diverges, still representable in float32.
pub(crate) const MOST_RATE: f64 = 1e12;

/// Each costs a connection, of which a process may have tens of thousands at most.
pub(crate) const MOST_REQUESTS: u64 = 1 << 16;
/// A day, in seconds.
pub(crate) const LONGEST_WAIT: f64 = 86_400.0;
/// Timeouts for clients, in seconds.
pub(crate) const SHORTEST_TIMEOUT: f64 = 0.1;
/// At this temperature all tokens of any vocabulary are practically equally likely.
pub(crate) const MOST_TEMPERATURE: f64 = 1000.0;

/// An invalid setting.
///
/// The programs add where the value was given, if not on the command line.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("--{} {reason}", .key.replace('_', "-"))]
pub struct Invalid {
    /// The setting: its field, and its key in a run file.
    pub key: &'static str,
    /// What is wrong with it, and what is expected.
    pub reason: String,
    /// The required setting that is missing, if that is the error.
    pub missing: Option<&'static str>,
}

impl Invalid {
    /// `key` is `value`, but `expected`.
    pub fn new(key: &'static str, value: impl Display, expected: impl Display) -> Self {
        Self { key, reason: format!("is {value}, but {expected}"), missing: None }
    }
}

/// Whole numbers, each with its range.
pub(crate) fn within<const N: usize>(
    numbers: [(&'static str, u64, RangeInclusive<u64>); N],
) -> Result<(), Invalid> {
    match numbers.into_iter().find(|(_, number, range)| !range.contains(number)) {
        Some((key, number, range)) => {
            let (least, most) = range.into_inner();
            let expected = format!("it must be at least {least} and at most {most}");
            Err(Invalid::new(key, number, expected))
        }
        None => Ok(()),
    }
}

/// Numbers above 0, each with the largest.
pub(crate) fn positive<const N: usize>(
    numbers: [(&'static str, f64, f64); N],
) -> Result<(), Invalid> {
    match numbers.into_iter().find(|&(_, number, most)| !(number > 0.0 && number <= most)) {
        Some((key, number, most)) => {
            Err(Invalid::new(key, number, format!("it must be above 0 and at most {most}")))
        }
        None => Ok(()),
    }
}

/// Numbers from 0, each with the largest.
pub(crate) fn from_zero<const N: usize>(
    numbers: [(&'static str, f64, f64); N],
) -> Result<(), Invalid> {
    match numbers.into_iter().find(|(_, number, most)| !(0.0..=*most).contains(number)) {
        Some((key, number, most)) => {
            Err(Invalid::new(key, number, format!("it must be at least 0 and at most {most}")))
        }
        None => Ok(()),
    }
}

/// Times, each with its range.
pub(crate) fn seconds<const N: usize>(
    times: [(&'static str, f64, RangeInclusive<f64>); N],
) -> Result<(), Invalid> {
    match times.into_iter().find(|(_, time, range)| !range.contains(time)) {
        Some((key, time, range)) => {
            let expected = format!("it must be {} to {} seconds", range.start(), range.end());
            Err(Invalid::new(key, time, expected))
        }
        None => Ok(()),
    }
}

/// Refuses a port file that would replace something that is not a file, or whose directory does not
/// exist.
pub(crate) fn port_file(path: Option<&Path>) -> Result<(), Invalid> {
    let Some(path) = path else { return Ok(()) };
    let invalid = |expected: &str| Err(Invalid::new("port_file", path.display(), expected));
    // Of the path itself, because a link would be replaced as well.
    match path.symlink_metadata() {
        Ok(found) if found.is_symlink() => {
            return invalid("that is a symbolic link; name a regular file or a new one");
        }
        Ok(found) if !found.is_file() => {
            return invalid("that is not a regular file; name one, or a new one");
        }
        _ => {}
    }
    match path.parent() {
        Some(dir) if dir.as_os_str().is_empty() || dir.is_dir() => Ok(()),
        _ => invalid("it must be a file in a directory that exists"),
    }
}

/// The auxiliary layers.
pub(crate) fn layer_ids(ids: Option<&[u32]>) -> Result<(), Invalid> {
    let largest = ids.into_iter().flatten().max().copied().unwrap_or_default();
    within([("target_layer_ids", largest.into(), 0..=MOST_LAYERS)])
}

/// The slots of a block.
pub(crate) fn block_size(key: &'static str, slots: usize) -> Result<(), Invalid> {
    if slots < 2 {
        let expected = format!(
            "a block holds the anchor and at least one token to predict; it must be at least 2 \
             and at most {MOST_SLOTS}"
        );
        return Err(Invalid::new(key, slots, expected));
    }
    within([(key, slots as u64, 2..=MOST_SLOTS)])
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
        check(within([("max_anchors", 1, 1..=9)]), None);
        let range = "it must be at least 1 and at most 9";
        let zero = format!("--max-anchors is 0, but {range}");
        check(within([("epochs", 3, 1..=9), ("max_anchors", 0, 1..=9)]), Some(&zero));
        check(within([("epochs", 10, 1..=9)]), Some(&format!("--epochs is 10, but {range}")));
        check(positive([("lr", 1e-9, 2.0)]), None);
        for wrong in [f64::NAN, 0.0, -1.0, 2.5, f64::INFINITY] {
            let refusal = format!("--lr is {wrong}, but it must be above 0 and at most 2");
            check(positive([("lr", wrong, 2.0)]), Some(&refusal));
        }
        check(from_zero([("temperature", 0.0, 2.0)]), None);
        for wrong in [f64::NAN, -1.0, 2.5] {
            let refusal =
                format!("--temperature is {wrong}, but it must be at least 0 and at most 2");
            check(from_zero([("temperature", wrong, 2.0)]), Some(&refusal));
        }
        check(layer_ids(Some(&[1, 1024])), None);
        assert!(layer_ids(Some(&[1, u32::MAX])).is_err());
        check(shares([("decay_ratio", 1.0)]), None);
        check(
            shares([("decay_ratio", 1.1)]),
            Some("--decay-ratio is 1.1, but a share is between 0 and 1"),
        );
        let lone = needs("keep_every", "keep_last");
        assert_eq!(lone.to_string(), "--keep-every needs --keep-last");
    }
}
