//! Checks that a stock vLLM serves the trainer's target, as far as possible.
//!
//! vLLM identifies its model by a name that anyone may choose, and states of any model of the same
//! shape fit. Without running the target one can compute its final norm and lm_head on the last
//! state that vLLM returns, for the tokens that vLLM considers most likely after the prompt:
//! differences between these logits must equal the differences between vLLM's log-probabilities. So
//! the first samples of each server request these too. A model that shares norm and lm_head with
//! the target passes.

use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use dflash_identity::{TargetIdentity, same_name};
use serde::{Deserialize, Serialize};

use crate::error::Error;
use crate::own::Call;
use crate::probe::LogProbability;
use crate::protocol::ModelCard;
use crate::record::{Dtype, HiddenStates, bf16_to_f32};
use crate::retry::Failure;

/// Number of samples of a server that are checked: a wrong model is found by the first one.
const CHECKED_SAMPLES: u32 = 8;
/// Number of log-probabilities to request: as many as every server returns (OpenAI's limit).
const LOG_PROBABILITIES: u32 = 5;
/// vLLM sends less than this for minus infinity, for tokens that sampling excludes.
const IMPOSSIBLE: f32 = -1000.0;
/// Bound on the root mean square of the differences, in units in the last place of the largest
/// logit in bf16. Servers round logits to bf16, which is half a unit at most; with earlier
/// roundings, a bf16 model showed up to 0.45 units, and its own weights with noise of a tenth of
/// their size 1.6 and more (LOG.md).
const UNITS: f32 = 1.5;

/// Computes the target's logits for some tokens from a last state, before the final norm.
#[derive(Clone)]
pub struct TargetLogits(pub Arc<LogitsFunction>);

/// From a state and token ids to their logits, or an error.
pub type LogitsFunction = dyn Fn(&[f32], &[i64]) -> Result<Vec<f32>, Box<dyn std::error::Error + Send + Sync>>
    + Send
    + Sync;

impl fmt::Debug for TargetLogits {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("TargetLogits")
    }
}

/// The progress of the check of a server.
#[derive(Debug, Default)]
pub(crate) struct Progress(AtomicU32);

impl Progress {
    fn is_due(&self) -> bool {
        self.0.load(Ordering::Relaxed) < CHECKED_SAMPLES
    }

    /// Starts again, because the model may have changed.
    pub(crate) fn restart(&self) {
        self.0.store(0, Ordering::Relaxed);
    }

    /// Counts a sample; returns whether it was the last to be checked.
    fn count(&self) -> bool {
        self.0.fetch_add(1, Ordering::Relaxed) + 1 == CHECKED_SAMPLES
    }

    /// Ends the check; returns whether it had not ended before.
    fn end(&self) -> bool {
        self.0.swap(CHECKED_SAMPLES, Ordering::Relaxed) < CHECKED_SAMPLES
    }
}

/// Additional parameters of a request.
#[derive(Debug, Clone, Copy, Serialize)]
pub(crate) struct Extra {
    logprobs: u32,
    /// Of the prompt's own tokens, and this many of the most likely ones at each position.
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt_logprobs: Option<u32>,
    /// Otherwise tokens are returned as text, which may be the same for several.
    return_tokens_as_token_ids: bool,
    /// For servers that report the distribution they sample from; the default is the model's own.
    temperature: f32,
}

impl Extra {
    /// Log-probabilities after the prompt.
    pub(crate) const AFTER: Self = Self {
        logprobs: LOG_PROBABILITIES,
        prompt_logprobs: None,
        return_tokens_as_token_ids: true,
        temperature: 1.0,
    };
    /// Those of the prompt's tokens too.
    pub(crate) const OF_PROMPT: Self = Self { prompt_logprobs: Some(1), ..Self::AFTER };
}

/// All log-probabilities of a reply to a prompt of `tokens` tokens.
pub(crate) fn reported(reply: &[u8], tokens: usize) -> Vec<LogProbability> {
    let Ok(reply) = serde_json::from_slice::<Reply>(reply) else { return Vec::new() };
    let Some(choice) = reply.choices.into_iter().next() else { return Vec::new() };
    let places = choice.prompt_logprobs.unwrap_or_default().into_iter().enumerate().take(tokens);
    let of_prompt = places.flat_map(|(position, place)| {
        place.into_iter().flatten().filter_map(move |(token, of)| {
            let (token, text) = (token.parse().ok()?, of.decoded_token);
            Some(LogProbability { position, token, value: of.logprob, text })
        })
    });
    let top = choice.logprobs.and_then(|after| after.top_logprobs.into_iter().next()).flatten();
    let after = top.into_iter().flatten().filter_map(|(token, value)| {
        let token = token.strip_prefix("token_id:")?.parse().ok()?;
        Some(LogProbability { position: tokens, token, value, text: None })
    });
    let mut all: Vec<LogProbability> =
        of_prompt.chain(after).filter(|of| of.value > IMPOSSIBLE && of.position > 0).collect();
    // Maps have no order of their own.
    all.sort_by_key(|of| (of.position, of.token));
    all
}

#[derive(Debug)]
pub(crate) struct Check {
    url: String,
    model: String,
    target: TargetIdentity,
    logits: TargetLogits,
    last_layer: u32,
    vocab_size: Option<usize>,
}

/// The result of a check.
#[derive(Debug)]
pub(crate) enum Finding {
    /// The root mean square of the differences.
    Agrees(f32),
    Unknown(&'static str),
}

#[derive(Deserialize)]
struct Reply {
    #[serde(default)]
    choices: Vec<Choice>,
}

#[derive(Deserialize)]
struct Choice {
    logprobs: Option<LogProbabilities>,
    #[serde(default)]
    prompt_logprobs: Option<Vec<Option<HashMap<String, OfPrompt>>>>,
}

#[derive(Deserialize)]
struct OfPrompt {
    logprob: f32,
    decoded_token: Option<String>,
}

#[derive(Deserialize)]
struct LogProbabilities {
    #[serde(default)]
    top_logprobs: Vec<Option<HashMap<String, f32>>>,
}

/// Compares the names. Two different repositories of the Hub are refused. Other names may be a path
/// of another machine or an alias, and are only reported.
///
/// # Errors
/// [`Error::OtherTarget`].
pub(crate) fn check_name(
    url: &str,
    card: &ModelCard,
    target: Option<&TargetIdentity>,
) -> Result<(), Error> {
    let Some(target) = target else { return Ok(()) };
    let root = card.root.as_deref().unwrap_or(&card.id);
    if same_name(&target.name, &card.id) || same_name(&target.name, root) {
        return Ok(());
    }
    if is_repository(&target.name) && is_repository(root) {
        let (url, found, expected) = (url.to_owned(), root.to_owned(), target.to_string());
        return Err(Error::OtherTarget { url, found, expected });
    }
    tracing::warn!(
        "{url} serves {root} and the target is {}: whether they are the same shows in the \
         log-probabilities of the first samples",
        target.name
    );
    Ok(())
}

fn is_repository(name: &str) -> bool {
    let parts: Vec<&str> = name.split('/').collect();
    parts.len() == 2 && !parts[0].is_empty() && !parts[0].starts_with(['.', '~'])
}

impl Check {
    /// The check of the next sample, if it is due.
    pub(crate) fn due(call: &Call<'_>, model: &str) -> Option<Self> {
        let config = call.config;
        call.endpoint.check().is_due().then_some(())?;
        Some(Self {
            url: call.endpoint.url(""),
            model: model.to_owned(),
            target: config.target.clone()?,
            logits: config.target_logits.clone()?,
            last_layer: config.num_hidden_layers?,
            vocab_size: config.vocab_size,
        })
    }

    /// Compares the log-probabilities of a `reply` with the target's, computed from `states`.
    ///
    /// # Errors
    /// [`Error::OtherHead`], [`Error::TargetLogits`].
    pub(crate) fn run(&self, reply: &[u8], states: &HiddenStates) -> Result<Finding, Failure> {
        let reported = self.log_probabilities(reply);
        if reported.len() < 2 {
            return Ok(Finding::Unknown("its replies have no log-probabilities by token id"));
        }
        let Some(rows) = states.layer(self.last_layer) else {
            let reason = "its states lack the last layer's output; add the number of layers to \
                          eagle_aux_hidden_state_layer_ids";
            return Ok(Finding::Unknown(reason));
        };
        let row = &rows[rows.len() - states.row_bytes()..];
        let state = match states.dtype {
            Dtype::Bf16 => bf16_to_f32(row),
            Dtype::F32 => {
                row.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect()
            }
        };
        let (ids, reported): (Vec<i64>, Vec<f32>) = reported.into_iter().unzip();
        let logits = (self.logits.0)(&state, &ids)
            .map_err(|source| Failure::Fatal(Error::TargetLogits { source }))?;
        let (difference, bound) = (difference(&logits, &reported), bound(&logits));
        if difference <= bound {
            return Ok(Finding::Agrees(difference));
        }
        // A damaged reply differs once, another model differs again.
        Err(Failure::Doubtful(Error::OtherHead {
            url: self.url.clone(),
            model: self.model.clone(),
            target: self.target.to_string(),
            difference,
            bound,
        }))
    }

    /// Those after the prompt, by token id.
    fn log_probabilities(&self, reply: &[u8]) -> Vec<(i64, f32)> {
        let Ok(reply) = serde_json::from_slice::<Reply>(reply) else { return Vec::new() };
        let first = reply.choices.into_iter().next().and_then(|choice| choice.logprobs);
        let top = first.and_then(|first| first.top_logprobs.into_iter().next()).flatten();
        let known = |id: &i64| {
            usize::try_from(*id).is_ok_and(|id| self.vocab_size.is_none_or(|size| id < size))
        };
        let pair = |(token, value): (String, f32)| {
            let id = token.strip_prefix("token_id:")?.parse().ok().filter(known)?;
            (value > IMPOSSIBLE).then_some((id, value))
        };
        top.into_iter().flatten().filter_map(pair).collect()
    }

    /// Logs the result once.
    pub(crate) fn note(&self, progress: &Progress, finding: &Finding) {
        let Self { url, model, target, .. } = self;
        match finding {
            Finding::Agrees(difference) => {
                if progress.count() {
                    tracing::info!(
                        "{url}: {model} is taken for {}: its log-probabilities are the target's \
                         of its last states, within {difference:.3} nats",
                        target.name
                    );
                }
            }
            Finding::Unknown(reason) => {
                if progress.end() {
                    tracing::warn!("{url}: cannot tell whether {model} is {target}: {reason}");
                }
            }
        }
    }
}

/// Root mean square of the differences after both means are subtracted: logits and
/// log-probabilities differ by a constant.
fn difference(logits: &[f32], reported: &[f32]) -> f32 {
    let gaps: Vec<f32> = logits.iter().zip(reported).map(|(a, b)| a - b).collect();
    let mean = gaps.iter().sum::<f32>() / gaps.len() as f32;
    let squares: f32 = gaps.iter().map(|gap| (gap - mean).powi(2)).sum();
    (squares / gaps.len() as f32).sqrt()
}

fn bound(logits: &[f32]) -> f32 {
    let largest = logits.iter().fold(1.0, |largest: f32, logit| largest.max(logit.abs()));
    // bf16 has seven bits after the leading one.
    UNITS * (largest.log2().floor() - 7.0).exp2()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn card(id: &str, root: Option<&str>) -> ModelCard {
        let text = serde_json::json!({"id": id, "owned_by": "vllm", "root": root});
        serde_json::from_value(text).unwrap()
    }

    #[test]
    fn names_are_refused_only_where_both_are_repositories() {
        let check = |ours: &str, id: &str, root: Option<&str>, fine: bool| {
            let target = TargetIdentity { name: ours.into(), config: "c".into(), weights: None };
            let result = check_name("http://a:1", &card(id, root), Some(&target));
            assert_eq!(result.is_ok(), fine, "{ours} {id} {root:?}");
            if let Err(error) = result {
                let text = error.to_string();
                assert!(text.contains(ours) && text.contains(root.unwrap_or(id)), "{text}");
            }
        };
        check("Qwen/Qwen3-8B", "Qwen/Qwen3-8B", None, true);
        check("Qwen/Qwen3-8B", "Qwen/Qwen3-4B", Some("Qwen/Qwen3-4B"), false);
        check("Qwen/Qwen3-8B", "Qwen/Qwen3-4B", None, false);
        check("Qwen/Qwen3-8B", "unsloth/Qwen3-8B", Some("unsloth/Qwen3-8B"), true);
        check("Qwen/Qwen3-8B", "target", Some("/models/x"), true);
        check("Qwen/Qwen3-8B", "Qwen/Qwen3-8B", Some("/models/x"), true);
        check("tiny", "Qwen/Qwen3-4B", Some("Qwen/Qwen3-4B"), true);
    }

    #[test]
    fn a_constant_between_logits_and_log_probabilities_does_not_count() {
        assert!(difference(&[8.0, 7.0, 3.0], &[-0.5, -1.5, -5.5]) < 1e-6);
        assert!((difference(&[8.0, 7.0], &[-0.5, -0.5]) - 0.5).abs() < 1e-6);
        assert_eq!(bound(&[-7.9, 3.0]), 1.5 / 32.0);
        assert_eq!(bound(&[8.0]), 1.5 / 16.0);
        assert_eq!(bound(&[0.1]), 1.5 / 128.0);
    }
}
