//! How fast a target decodes, alone and with a drafter.
//!
//! The answers are those of an evaluation, which makes them in turns; here only their speed after the
//! first token is looked at, since the prompt costs both ways the same.

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
    /// The level of the processor's instructions that was in force; `None` on a GPU.
    pub cpu_level: Option<String>,
    /// Answers made, each way.
    pub answers: usize,
    /// Tokens of all speculative answers.
    pub tokens: usize,
    /// Plain greedy decoding, tokens per second.
    pub plain: f64,
    /// Speculative greedy decoding, tokens per second.
    pub speculative: f64,
    /// The same with as many proposals as pay, chosen step by step.
    pub auto: f64,
    /// Tau: tokens per verify step, over all steps.
    pub acceptance_length: f64,
    /// Milliseconds of one plain token.
    pub plain_token_ms: f64,
    /// Milliseconds of one step: a block drafted, verified, and its accepted context kept.
    pub step_ms: f64,
    /// What a step costs, in plain tokens.
    pub step_cost: f64,
    /// `speculative / (tau * plain)`: 1 where a step costs no more than a plain token.
    pub efficiency: f64,
    /// Answers that are the same token for token both ways.
    pub identical: usize,
}

/// Decodes every prompt both ways, in turns, and times it.
///
/// # Errors
/// As [`evaluate`]; [`dflash_eval::Error::NotLossless`] where the ways differ by more than ties.
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
        // Without a token after the first there is no such speed: null in JSON.
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
