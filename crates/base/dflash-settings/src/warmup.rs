//! Length of the learning-rate warm-up.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize, Serializer};

use crate::check::MOST_STEPS;

/// A share of all steps, written as a fraction below 1, or a number of steps.
#[derive(Debug, Clone, Copy, PartialEq, Deserialize)]
#[serde(try_from = "serde_json::Value")]
pub enum Warmup {
    /// Steps.
    Steps(u64),
    /// Share of all steps.
    Share(f64),
}

impl Warmup {
    /// Warm-up steps of a run of `total` steps.
    pub fn steps(self, total: u64) -> u64 {
        match self {
            Self::Steps(steps) => steps,
            Self::Share(share) => (share * total as f64) as u64,
        }
    }
}

impl FromStr for Warmup {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match (text.parse::<u64>(), text.parse::<f64>()) {
            (Ok(steps @ 0..=MOST_STEPS), _) => Ok(Self::Steps(steps)),
            (Err(_), Ok(share)) if (0.0..1.0).contains(&share) => Ok(Self::Share(share)),
            (Err(_), Ok(1.0)) => Err(
                "1.0 may mean one step or all steps; pass 1 for one step, or a fraction below 1"
                    .to_owned(),
            ),
            _ => Err(format!(
                "pass a fraction of all steps below 1, such as 0.04, or a whole number of steps up \
                 to {MOST_STEPS}"
            )),
        }
    }
}

impl fmt::Display for Warmup {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Steps(steps) => write!(f, "{steps}"),
            Self::Share(share) => write!(f, "{share}"),
        }
    }
}

impl Serialize for Warmup {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Steps(steps) => serializer.serialize_u64(*steps),
            Self::Share(share) => serializer.serialize_f64(*share),
        }
    }
}

impl TryFrom<serde_json::Value> for Warmup {
    type Error = String;

    fn try_from(value: serde_json::Value) -> Result<Self, String> {
        match value.as_str() {
            Some(text) => text.parse(),
            None => value.to_string().parse(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fractions_are_shares_and_whole_numbers_are_steps() {
        let check = |text: &str, warmup: Warmup, steps| {
            assert_eq!(text.parse(), Ok(warmup), "{text}");
            assert_eq!(warmup.steps(1000), steps);
            let value = serde_json::to_value(warmup).unwrap();
            assert_eq!(serde_json::from_value::<Warmup>(value).unwrap(), warmup, "{text}");
        };
        check("0.04", Warmup::Share(0.04), 40);
        check("0", Warmup::Steps(0), 0);
        check("1", Warmup::Steps(1), 1);
        check("250", Warmup::Steps(250), 250);
    }

    #[test]
    fn what_may_mean_two_things_is_refused() {
        let refusal = |text: &str| text.parse::<Warmup>().unwrap_err();
        assert!(refusal("1.0").contains("one step or all steps"));
        for text in ["1.5", "-1", "-0.1", "nan", "x", "99999999999"] {
            assert!(refusal(text).contains("a fraction of all steps below 1"), "{text}");
        }
    }
}
