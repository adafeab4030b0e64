//! Where a run resumes from.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// `--resume`, `--resume=auto` or `--resume=STEP`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum ResumeMode {
    /// The last good checkpoint; an error if there is none.
    Latest,
    /// The last good checkpoint, or a new run if there is none.
    Auto,
    /// The checkpoint of this step.
    Step(u64),
}

impl ResumeMode {
    /// Value assumed for `--resume` without a value.
    pub const LATEST: &str = "latest";
    /// Value in `--resume=auto`.
    pub const AUTO: &str = "auto";
}

impl FromStr for ResumeMode {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match (text, text.parse()) {
            (Self::LATEST, _) => Ok(Self::Latest),
            (Self::AUTO, _) => Ok(Self::Auto),
            (_, Ok(step)) => Ok(Self::Step(step)),
            _ => Err("pass --resume, --resume=auto, or the step of a checkpoint".to_owned()),
        }
    }
}

impl fmt::Display for ResumeMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Latest => f.write_str(Self::LATEST),
            Self::Auto => f.write_str(Self::AUTO),
            Self::Step(step) => write!(f, "{step}"),
        }
    }
}

impl TryFrom<String> for ResumeMode {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        text.parse()
    }
}

impl From<ResumeMode> for String {
    fn from(mode: ResumeMode) -> Self {
        mode.to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn modes_are_read_as_they_are_written() {
        let check = |text: &str, mode: ResumeMode| {
            assert_eq!(text.parse(), Ok(mode));
            assert_eq!(mode.to_string(), text);
        };
        check("latest", ResumeMode::Latest);
        check("auto", ResumeMode::Auto);
        check("120", ResumeMode::Step(120));
        for wrong in ["", "-1", "yes", "1.5"] {
            assert!(wrong.parse::<ResumeMode>().unwrap_err().contains("--resume=auto"), "{wrong}");
        }
    }
}
