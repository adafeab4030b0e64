//! Settings of validation on held-out data.

use std::path::PathBuf;

use dflash_settings_derive::Classed;
use serde::{Deserialize, Serialize};

use crate::check::{Invalid, MOST_ROWS, MOST_STEPS, MOST_TOKENS, at_odds, within};

/// Held-out samples and prompts.
#[derive(Debug, Clone, Serialize, Deserialize, Classed)]
#[cfg_attr(feature = "clap", derive(clap::Args))]
pub struct ValidationSettings {
    /// Steps between validations, in addition to the one after the last step. Default: one with
    /// each checkpoint.
    #[cfg_attr(feature = "clap", arg(long, value_name = "N"))]
    #[setting(free)]
    pub eval_every: Option<u64>,
    /// Hold out this share of the samples, from the end of each source of the data: loss, accuracy
    /// and expected acceptance length are measured on them, with the same anchors every time.
    /// Default: 0.01 and at most 512 samples; none of fewer than 1000 samples, or with
    /// --validation-data or --eval-prompts.
    #[cfg_attr(feature = "clap", arg(long, value_name = "R"))]
    #[setting(lasting, recipe)]
    pub validation_ratio: Option<f64>,
    /// Measure these on a separate prepared dataset instead of a share of the data.
    #[cfg_attr(feature = "clap", arg(long, value_name = "DIR"))]
    #[setting(told, may_differ)]
    pub validation_data: Option<PathBuf>,
    /// Prompts (JSON or JSONL) to decode with the target and the draft: their measured acceptance
    /// length determines the best checkpoint.
    #[cfg_attr(feature = "clap", arg(long, value_name = "FILE"))]
    #[setting(told, may_differ)]
    pub eval_prompts: Option<PathBuf>,
    /// Use at most N prompts of --eval-prompts.
    #[cfg_attr(feature = "clap", arg(long, hide = true, value_name = "N", default_value_t = 32))]
    #[setting(told)]
    pub eval_limit: usize,
    /// Longest answer to --eval-prompts, in tokens.
    #[cfg_attr(feature = "clap", arg(long, hide = true, value_name = "N", default_value_t = 128))]
    #[setting(told)]
    pub eval_max_new_tokens: usize,
}

/// Share of the samples that is held out by default.
const DEFAULT_SHARE: f64 = 0.01;
/// Maximum number of samples held out by default: enough for two digits of the expected acceptance
/// length, and a forward pass over them takes seconds.
const DEFAULT_SAMPLES: f64 = 512.0;
/// Smaller datasets are used for training only: a hundredth of them is too few to measure on.
const LEAST_TO_SPLIT: usize = 1000;

impl ValidationSettings {
    /// Share of `samples` that is held out.
    pub fn held_out(&self, samples: usize) -> f64 {
        let measures_on_own = self.validation_data.is_some() || self.eval_prompts.is_some();
        match self.validation_ratio {
            Some(ratio) => ratio,
            None if measures_on_own || samples < LEAST_TO_SPLIT => 0.0,
            None => DEFAULT_SHARE.min(DEFAULT_SAMPLES / samples as f64),
        }
    }

    /// # Errors
    /// A number is out of range, or two validation sets are given.
    pub fn check(&self) -> Result<(), Invalid> {
        self.check_ranges()?;
        if self.validation_data.is_some() && self.validation_ratio.unwrap_or_default() > 0.0 {
            let reason =
                "is a set of its own; leave --validation-ratio out, which holds out of the data";
            return Err(at_odds("validation_data", reason));
        }
        Ok(())
    }

    /// # Errors
    /// Validation was requested, but a run that holds out `held_out` samples has nothing to measure
    /// on.
    pub fn check_measures(&self, held_out: usize) -> Result<(), Invalid> {
        match self.eval_every {
            Some(every) if held_out == 0 && self.eval_prompts.is_none() => {
                let expected = "there is nothing to validate on: add --validation-ratio, \
                                --validation-data or --eval-prompts";
                Err(Invalid::new("eval_every", every, expected))
            }
            _ => Ok(()),
        }
    }

    pub(crate) fn check_ranges(&self) -> Result<(), Invalid> {
        within([
            ("eval_every", self.eval_every.unwrap_or(1), 1..=MOST_STEPS),
            ("eval_limit", self.eval_limit as u64, 1..=MOST_ROWS),
            ("eval_max_new_tokens", self.eval_max_new_tokens as u64, 1..=MOST_TOKENS),
        ])?;
        match self.validation_ratio {
            Some(ratio) if !(0.0..1.0).contains(&ratio) => {
                let expected = "the share of samples held out must be at least 0 and below 1";
                Err(Invalid::new("validation_ratio", ratio, expected))
            }
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_hundredth_is_held_out_by_default_and_at_most_512_samples() {
        let settings = |ratio, prompts: bool| ValidationSettings {
            eval_every: None,
            validation_ratio: ratio,
            validation_data: None,
            eval_prompts: prompts.then(|| "prompts.jsonl".into()),
            eval_limit: 1,
            eval_max_new_tokens: 1,
        };
        let held_out = |samples: usize| {
            (settings(None, false).held_out(samples) * samples as f64).round() as usize
        };
        assert_eq!([999, 1000, 20_000, 800_000].map(held_out), [0, 10, 200, 512]);
        assert_eq!(settings(Some(0.25), false).held_out(8), 0.25);
        assert_eq!(settings(Some(0.0), false).held_out(5000), 0.0);
        assert_eq!(settings(None, true).held_out(5000), 0.0, "prompts are what was asked for");
    }
}
