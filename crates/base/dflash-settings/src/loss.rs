//! Loss terms: a name and a coefficient.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// Per-slot loss between the target's distribution p and the draft's q.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ElementLoss {
    /// `-log q[label]`.
    CrossEntropy,
    /// `sum p log(p / q)`.
    Kl,
    /// `sum q log(q / p)`.
    ReverseKl,
    /// Jensen-Shannon divergence.
    Jsd,
    /// Total variation, `1 - sum min(p, q)`.
    Tv,
    /// `-log max(sum min(p, q), 1e-5)`: the negative log of the acceptance rate.
    Nla,
    /// `w KL + (1 - w) TV` with `w = exp(-3 sum min(p, q))` held constant.
    Lk,
}

/// Largest coefficient: the weighted terms are summed in float32.
const MOST_COEFFICIENT: f64 = 1e6;

/// The losses and their names on the command line.
const NAMES: [(&str, ElementLoss); 7] = [
    ("ce", ElementLoss::CrossEntropy),
    ("kl", ElementLoss::Kl),
    ("rkl", ElementLoss::ReverseKl),
    ("jsd", ElementLoss::Jsd),
    ("tv", ElementLoss::Tv),
    ("nla", ElementLoss::Nla),
    ("lk", ElementLoss::Lk),
];

impl ElementLoss {
    /// Whether the loss compares distributions.
    pub fn needs_target_distribution(self) -> bool {
        self != Self::CrossEntropy
    }

    /// Loss in nats of a draft that gives each of `tokens` tokens the same probability: exact for
    /// cross-entropy, an upper bound for the losses that depend on the target. `rkl` is unbounded
    /// and counts as cross-entropy.
    pub fn of_guesses(self, tokens: usize) -> f64 {
        match self {
            Self::Jsd => std::f64::consts::LN_2,
            Self::Tv => 1.0,
            Self::CrossEntropy | Self::Kl | Self::ReverseKl | Self::Nla | Self::Lk => {
                (tokens as f64).ln()
            }
        }
    }
}

/// A term of the objective, written `name` or `name=coefficient`.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct LossTerm {
    /// Loss.
    pub loss: ElementLoss,
    /// Coefficient, above 0.
    pub coefficient: f64,
}

impl FromStr for LossTerm {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (name, coefficient) = text.split_once('=').unwrap_or((text, "1"));
        let (_, loss) = NAMES
            .into_iter()
            .find(|(known, _)| *known == name)
            .ok_or("the terms are ce, kl, rkl, jsd, tv, nla and lk")?;
        let coefficient: Option<f64> = coefficient.parse().ok();
        let coefficient = coefficient
            .filter(|value| *value > 0.0 && *value <= MOST_COEFFICIENT)
            .ok_or("the coefficient must be a positive number, at most 1e6")?;
        Ok(Self { loss, coefficient })
    }
}

impl fmt::Display for LossTerm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (name, _) =
            NAMES.into_iter().find(|(_, loss)| *loss == self.loss).expect("all losses have names");
        match self.coefficient {
            1.0 => write!(f, "{name}"),
            coefficient => write!(f, "{name}={coefficient}"),
        }
    }
}

impl TryFrom<String> for LossTerm {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        text.parse()
    }
}

impl From<LossTerm> for String {
    fn from(term: LossTerm) -> Self {
        term.to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn terms_are_read_as_they_are_written() {
        for text in ["ce", "kl=0.5", "rkl=2", "jsd", "tv", "nla", "lk"] {
            assert_eq!(text.parse::<LossTerm>().unwrap().to_string(), text);
        }
        assert_eq!("ce=1.0".parse::<LossTerm>().unwrap().to_string(), "ce");
    }

    #[test]
    fn what_is_bounded_counts_by_its_bound() {
        let guesses = |text: &str| text.parse::<LossTerm>().unwrap().loss.of_guesses(4096);
        assert_eq!((guesses("tv"), guesses("jsd")), (1.0, std::f64::consts::LN_2));
        for text in ["ce", "kl", "nla", "lk"] {
            assert!((guesses(text) - 8.3178).abs() < 1e-4, "{text}");
        }
    }

    #[test]
    fn other_terms_are_refused() {
        let refusal = |text: &str| text.parse::<LossTerm>().unwrap_err();
        assert!(refusal("mse").contains("the terms are ce, kl"));
        for text in ["ce=0", "ce=-1", "kl=x", "kl=inf", "kl=1e308", "kl=nan", "kl="] {
            assert!(refusal(text).contains("positive number"), "{text}");
        }
    }
}
