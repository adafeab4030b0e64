//! What a run measures of itself on data that it does not train on.

use std::path::PathBuf;

use dflash_settings_derive::Classed;
use serde::{Deserialize, Serialize};

use crate::check::{Invalid, MOST_ROWS, MOST_STEPS, MOST_TOKENS, at_odds, needs, within};

/// Held-out samples and prompts.
#[derive(Debug, Clone, Serialize, Deserialize, Classed)]
#[cfg_attr(feature = "clap", derive(clap::Args))]
pub struct ValidationSettings {
    /// Steps between validations; the last step has one too.
    #[cfg_attr(feature = "clap", arg(long, value_name = "N"))]
    #[setting(free)]
    pub eval_every: Option<u64>,
    /// Hold out this share of the samples, from the end of each source that the data were prepared from:
    /// loss, accuracy and expected acceptance length are measured on them, with the same anchors every
    /// time.
    #[cfg_attr(feature = "clap", arg(long, value_name = "R", default_value_t = 0.0))]
    #[setting(lasting, recipe)]
    pub validation_ratio: f64,
    /// Measure the same on this prepared dataset, of which nothing is trained on, instead of a share.
    #[cfg_attr(feature = "clap", arg(long, value_name = "DIR"))]
    #[setting(told, may_differ)]
    pub validation_data: Option<PathBuf>,
    /// Prompts (JSON or JSONL) to decode with the target and the draft: their measured acceptance
    /// length names the best checkpoint.
    #[cfg_attr(feature = "clap", arg(long, value_name = "FILE"))]
    #[setting(told, may_differ)]
    pub eval_prompts: Option<PathBuf>,
    /// Use at most N of these prompts.
    #[cfg_attr(feature = "clap", arg(long, value_name = "N", default_value_t = 32))]
    #[setting(told)]
    pub eval_limit: usize,
    /// Longest answer to them, in tokens.
    #[cfg_attr(feature = "clap", arg(long, value_name = "N", default_value_t = 128))]
    #[setting(told)]
    pub eval_max_new_tokens: usize,
}

impl ValidationSettings {
    /// Share of the samples that is held out: none without --eval-every.
    pub fn held_out(&self) -> f64 {
        if self.eval_every.is_some() { self.validation_ratio } else { 0.0 }
    }

    /// # Errors
    /// A number out of its range, something to validate on that is never used, or nothing.
    pub fn check(&self) -> Result<(), Invalid> {
        self.check_ranges()?;
        if self.validation_data.is_some() && self.validation_ratio > 0.0 {
            let reason =
                "is a set of its own; leave --validation-ratio out, which holds out of the data";
            return Err(at_odds("validation_data", reason));
        }
        let has_set = self.validation_data.is_some();
        match (self.eval_every, &self.eval_prompts) {
            (None, Some(_)) => Err(needs("eval_prompts", "eval_every")),
            (None, None) if has_set => Err(needs("validation_data", "eval_every")),
            (None, None) if self.validation_ratio > 0.0 => {
                Err(needs("validation_ratio", "eval_every"))
            }
            (Some(every), None) if self.validation_ratio == 0.0 && !has_set => {
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
        if (0.0..1.0).contains(&self.validation_ratio) {
            return Ok(());
        }
        let expected = "the share of samples held out must be at least 0 and below 1";
        Err(Invalid::new("validation_ratio", self.validation_ratio, expected))
    }
}
