//! Measures decoding speed of a target, alone and with a drafter.
//!
//! Uses the answers of an evaluation, which alternates between the two; only the speed after the
//! first token counts, since the prompt costs both the same.

mod target;

use std::path::Path;
use std::sync::atomic::AtomicBool;

use dflash_settings::{BenchDecodeSettings, EvalSettings};
use serde::Serialize;

pub use self::target::{TargetReport, bench_target};
use crate::{DraftSource, Error, EvalReport, evaluate};

/// Speeds are medians over answers, after each answer's first token.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct DecodeReport {
    /// Device and precision, and CPU threads.
    pub device: String,
    /// The CPU instruction-set level in use; `None` on a GPU.
    pub cpu_level: Option<String>,
    /// Number of answers per mode.
    pub answers: usize,
    /// Tokens of all speculative answers.
    pub tokens: usize,
    /// Plain greedy decoding, tokens per second.
    pub plain: f64,
    /// Speculative greedy decoding, tokens per second.
    pub speculative: f64,
    /// Speculative greedy decoding with the number of proposals chosen per step, tokens per second.
    pub auto: f64,
    /// Tau: tokens per verify step, over all steps.
    pub acceptance_length: f64,
    /// Milliseconds per plain token.
    pub plain_token_ms: f64,
    /// Milliseconds per step: drafting a block, verifying it, and extending the context.
    pub step_ms: f64,
    /// Cost of a step in plain tokens.
    pub step_cost: f64,
    /// `speculative / (tau * plain)`: 1 if a step costs no more than a plain token.
    pub efficiency: f64,
    /// Number of answers that are identical in both modes.
    pub identical: usize,
}

/// Decodes every prompt in both modes, alternating, and measures the time.
///
/// # Errors
/// As [`evaluate`]; [`dflash_eval::Error::NotLossless`] if texts differ by more than ties.
pub fn bench_decode(
    settings: &BenchDecodeSettings,
    target_dir: &Path,
    draft_dir: &Path,
    stop: &AtomicBool,
) -> Result<DecodeReport, Error> {
    let draft = DraftSource::Trained { name: settings.draft.clone(), dir: draft_dir.into() };
    let report = evaluate(&as_evaluation(settings), target_dir, &[draft], stop)?;
    report.check()?;
    Ok(DecodeReport::of(&report))
}

fn as_evaluation(settings: &BenchDecodeSettings) -> EvalSettings {
    let settings = settings.clone();
    EvalSettings {
        target: Some(settings.target),
        draft: vec![settings.draft],
        prompts: vec![settings.prompts.display().to_string()],
        max_new_tokens: settings.max_new_tokens,
        limit: Some(settings.limit),
        allow_other_target: settings.allow_other_target,
        device: settings.device,
        dtype: settings.dtype,
        ..EvalSettings::default()
    }
}

impl DecodeReport {
    fn of(report: &EvalReport) -> Self {
        let speed = &report.decode_tokens_per_second;
        // Without a token after the first there is no speed: null in JSON.
        let [plain, speculative] =
            [speed.median_plain, speed.median_speculative].map(|speed| speed.unwrap_or(f64::NAN));
        let acceptance_length = report.acceptance.acceptance_length;
        let auto = report.results.iter().find(|one| one.is_auto());
        let auto = auto.and_then(|one| one.median_decode_rate());
        let step_cost = acceptance_length * plain / speculative;
        Self {
            device: report.device.clone(),
            cpu_level: report.cpu_level.clone(),
            answers: report.responses,
            tokens: report.tokens,
            plain,
            speculative,
            auto: auto.unwrap_or(f64::NAN),
            acceptance_length,
            plain_token_ms: 1e3 / plain,
            step_ms: 1e3 * acceptance_length / speculative,
            step_cost,
            efficiency: 1.0 / step_cost,
            identical: report.lossless.as_ref().map_or(0, |lossless| lossless.identical),
        }
    }
}
