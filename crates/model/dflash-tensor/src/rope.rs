//! Rotary embeddings as read from config.json.
//!
//! A [`Rope`] holds which elements of a head rotate, how they are paired, and how frequencies are
//! scaled. [`Rope::rotary`] computes the frequencies with Transformers' formulas
//! (`modeling_rope_utils.py`), in float32 and in the same order of operations.

use dflash_formats::fields::Fields;
use serde_json::{Value, json};
use tch::{Device, Kind, Tensor};

use crate::ops::{LongContext, Pairs, Rotary};
use crate::{Error, Result};

/// A target's rotary embedding.
#[derive(Debug, Clone, PartialEq)]
pub struct Rope {
    /// Base of the frequencies.
    pub theta: f64,
    /// Width of a head.
    pub head_dim: i64,
    /// Number of leading elements of a head that rotate; even.
    pub rotated: i64,
    /// How elements are paired.
    pub pairs: Pairs,
    /// How the frequencies differ from `theta^(-2i / rotated)`.
    pub scaling: Scaling,
}

/// The RoPE types of config.json.
#[allow(missing_docs, reason = "Hugging Face's names")]
#[derive(Debug, Clone, PartialEq)]
pub enum Scaling {
    None,
    /// All frequencies divided by `factor`.
    Linear {
        factor: f64,
    },
    Llama3(Llama3Scaling),
    /// Low frequencies divided, high ones kept, with a ramp between; rotated queries and keys
    /// scaled.
    Yarn(Yarn),
    /// Each frequency divided by its own factor, from the short or the long list.
    LongRope {
        short_factor: Vec<f64>,
        long_factor: Vec<f64>,
        original_max_position_embeddings: i64,
        attention_factor: f64,
    },
    /// Only the share `turning` of all pairs rotates, the first ones; the rest stay unrotated.
    Proportional {
        turning: f64,
        factor: f64,
    },
}

/// Parameters of the `llama3` RoPE type.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Llama3Scaling {
    /// Divisor of the lowest frequencies.
    pub factor: f64,
    /// Frequencies with fewer turns than this over the original context are divided in full.
    pub low_freq_factor: f64,
    /// Frequencies with more turns than this are kept.
    pub high_freq_factor: f64,
    /// The context length of the original training.
    pub original_max_position_embeddings: i64,
}

/// Parameters of the `yarn` RoPE type.
#[allow(missing_docs, reason = "Hugging Face's names")]
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Yarn {
    pub factor: f64,
    pub beta_fast: f64,
    pub beta_slow: f64,
    pub truncate: bool,
    pub original_max_position_embeddings: i64,
    /// Factor on rotated queries and keys.
    pub attention_factor: f64,
}

/// The configuration keys of a rotary embedding, with defaults for absent ones.
#[derive(Debug)]
pub struct RopeKeys<'a> {
    /// The text model's keys.
    pub text: &'a Fields,
    /// `rope_parameters` or `rope_scaling` for this type of layer.
    pub parameters: Option<Fields>,
    /// Width of a head.
    pub head_dim: i64,
    /// Default base.
    pub theta: f64,
    /// Default rotated share of a head.
    pub partial: f64,
    /// How elements are paired.
    pub pairs: Pairs,
}

/// `rope_parameters` (new configs) or `rope_scaling` (old ones).
pub fn rope_parameters(text: &Fields) -> Result<Option<Fields>> {
    Ok(text.object("rope_parameters")?.or(text.object("rope_scaling")?))
}

impl<'a> RopeKeys<'a> {
    /// The keys of `text`. By default the whole head rotates, in halves, with Llama's base.
    pub fn of(text: &'a Fields, head_dim: i64) -> Result<Self> {
        let parameters = rope_parameters(text)?;
        let (theta, partial, pairs) = (10_000.0, 1.0, Pairs::Halves);
        Ok(Self { text, parameters, head_dim, theta, partial, pairs })
    }
}

impl Rope {
    /// Unscaled, whole head, paired in halves.
    pub fn plain(theta: f64, head_dim: i64) -> Self {
        let (pairs, scaling) = (Pairs::Halves, Scaling::None);
        Self { theta, head_dim, rotated: head_dim, pairs, scaling }
    }

    /// Reads the embedding from config.json.
    ///
    /// # Errors
    /// An unknown RoPE type, a missing or invalid number.
    pub fn read(keys: RopeKeys<'_>) -> Result<Self> {
        let RopeKeys { text, ref parameters, head_dim, theta, partial, pairs } = keys;
        let number = |key: &str| match parameters.as_ref().map(|fields| fields.number(key)) {
            Some(Ok(Some(number))) => Ok(Some(number)),
            Some(Err(error)) => Err(error),
            _ => text.number(key),
        };
        let theta = number("rope_theta")?.unwrap_or(theta);
        let partial = number("partial_rotary_factor")?.unwrap_or(partial);
        if !(0.0..=1.0).contains(&partial) {
            return Err(text.refuse("partial_rotary_factor", "a share of the head is needed"));
        }
        let mut rotated = (head_dim as f64 * partial) as i64;
        let scaling = match parameters {
            Some(parameters) => scaling(text, parameters, rotated, partial)?,
            None => Scaling::None,
        };
        if let Scaling::Proportional { .. } = scaling {
            rotated = head_dim;
        }
        if rotated % 2 != 0 || rotated == 0 {
            return Err(text.refuse("head_dim", "rotary embedding needs an even number"));
        }
        Ok(Self { theta, head_dim, rotated, pairs, scaling })
    }

    /// Whether the whole head rotates, with the same frequencies at every sequence length.
    pub fn turns_alike(&self) -> bool {
        !matches!(self.scaling, Scaling::LongRope { .. } | Scaling::Proportional { .. })
    }

    /// As `rope_parameters` of config.json.
    ///
    /// # Panics
    /// For types that no target saved by this program has.
    pub fn to_json(&self) -> Value {
        let mut json = match &self.scaling {
            Scaling::None => json!({ "rope_type": "default" }),
            Scaling::Linear { factor } => json!({ "rope_type": "linear", "factor": factor }),
            Scaling::Llama3(scaling) => json!({
                "rope_type": "llama3",
                "factor": scaling.factor,
                "low_freq_factor": scaling.low_freq_factor,
                "high_freq_factor": scaling.high_freq_factor,
                "original_max_position_embeddings": scaling.original_max_position_embeddings,
            }),
            Scaling::Yarn(yarn) => json!({
                "rope_type": "yarn",
                "factor": yarn.factor,
                "beta_fast": yarn.beta_fast,
                "beta_slow": yarn.beta_slow,
                "truncate": yarn.truncate,
                "original_max_position_embeddings": yarn.original_max_position_embeddings,
                "attention_factor": yarn.attention_factor,
            }),
            other => panic!("{other:?} is not written"),
        };
        json["rope_theta"] = json!(self.theta);
        json
    }

    /// The frequencies, on `device`.
    pub fn rotary(&self, device: Device) -> Rotary {
        let powers = powers(self.rotated, self.theta, device);
        let plain = || powers.reciprocal();
        let (frequencies, attention_factor) = match &self.scaling {
            Scaling::None => (plain(), 1.0),
            Scaling::Linear { factor } => (plain() / *factor, 1.0),
            Scaling::Llama3(scaling) => (scale_frequencies(scaling, &plain()), 1.0),
            Scaling::Yarn(yarn) => (yarn.frequencies(&powers, self.theta), yarn.attention_factor),
            Scaling::LongRope { short_factor, attention_factor, .. } => {
                (divided(&powers, short_factor), *attention_factor)
            }
            Scaling::Proportional { turning, factor } => {
                let turning = (turning * self.head_dim as f64 / 2.0) as i64;
                let frequencies = plain() / *factor;
                let still = frequencies.size()[0] - turning;
                let _ = frequencies.narrow(0, turning, still).zero_();
                (frequencies, 1.0)
            }
        };
        let rotary = Rotary::of_frequencies(frequencies, attention_factor, self.pairs);
        match &self.scaling {
            Scaling::LongRope { long_factor, original_max_position_embeddings, .. } => rotary
                .with_long(LongContext {
                    inverse_frequency: divided(&powers, long_factor),
                    beyond: *original_max_position_embeddings,
                }),
            _ => rotary,
        }
    }
}

/// `theta^(2i / rotated)` [rotated / 2].
fn powers(rotated: i64, theta: f64, device: Device) -> Tensor {
    let index = Tensor::arange_start_step(0, rotated, 2, (Kind::Int64, device));
    let exponent = index.to_kind(Kind::Float) / rotated as f64;
    Tensor::from(theta as f32).to_device(device).pow(&exponent)
}

/// `1 / (factor * power)`, elementwise.
fn divided(powers: &Tensor, factors: &[f64]) -> Tensor {
    let factors: Vec<f32> = factors.iter().map(|&factor| factor as f32).collect();
    (Tensor::from_slice(&factors).to_device(powers.device()) * powers).reciprocal()
}

/// Reads the type from `rope_type` (`type` before 2024) and its parameters.
fn scaling(text: &Fields, parameters: &Fields, rotated: i64, partial: f64) -> Result<Scaling> {
    let key = if parameters.has("rope_type") { "rope_type" } else { "type" };
    let required = |key| parameters.required(key, Fields::number);
    match parameters.text(key)?.as_deref() {
        // M-RoPE's sections differ only for images; text tokens have equal positions.
        None | Some("default" | "mrope") => Ok(Scaling::None),
        Some("linear") => Ok(Scaling::Linear { factor: required("factor")? }),
        Some("llama3") => Ok(Scaling::Llama3(Llama3Scaling {
            factor: required("factor")?,
            low_freq_factor: required("low_freq_factor")?,
            high_freq_factor: required("high_freq_factor")?,
            original_max_position_embeddings: original(text, parameters)?,
        })),
        Some("yarn") => Ok(Scaling::Yarn(Yarn::read(text, parameters)?)),
        // "su" is the name of Phi-3's first release.
        Some("longrope" | "su") => longrope(text, parameters, rotated),
        Some("proportional") => Ok(Scaling::Proportional {
            turning: partial,
            factor: parameters.number("factor")?.unwrap_or(1.0),
        }),
        Some(_) => Err(parameters.refuse(
            key,
            "only default, linear, llama3, yarn, longrope and proportional are supported",
        )),
    }
}

/// The context length of the original training.
fn original(text: &Fields, parameters: &Fields) -> Result<i64> {
    const KEY: &str = "original_max_position_embeddings";
    let found = text.size(KEY)?.or(parameters.size(KEY)?).or(text.size("max_position_embeddings")?);
    found.ok_or_else(|| parameters.refuse(KEY, "it is needed"))
}

/// `factor`, or the ratio of the context length to the original one.
fn stretch(text: &Fields, parameters: &Fields, original: i64) -> Result<f64> {
    if let Some(factor) = parameters.number("factor")? {
        return Ok(factor);
    }
    let most = text.required("max_position_embeddings", Fields::size)?;
    Ok(most as f64 / original as f64)
}

fn longrope(text: &Fields, parameters: &Fields, rotated: i64) -> Result<Scaling> {
    let original = original(text, parameters)?;
    let factors = |key: &str| {
        let list = |value: &serde_json::Value| {
            let list = value.as_array()?.iter().map(serde_json::Value::as_f64);
            list.collect::<Option<Vec<f64>>>().filter(|list| list.len() as i64 == rotated / 2)
        };
        let expected = format!("a list of {} numbers is needed", rotated / 2);
        let found = parameters.typed(key, &expected, list)?;
        found.ok_or_else(|| parameters.refuse::<Error>(key, &expected))
    };
    let factor = stretch(text, parameters, original)?;
    let paper = match factor {
        factor if factor <= 1.0 => 1.0,
        factor => (1.0 + factor.ln() / (original as f64).ln()).sqrt(),
    };
    Ok(Scaling::LongRope {
        short_factor: factors("short_factor")?,
        long_factor: factors("long_factor")?,
        original_max_position_embeddings: original,
        attention_factor: parameters.number("attention_factor")?.unwrap_or(paper),
    })
}

/// YaRN's attention scaling for a context `factor` times as long.
pub fn yarn_mscale(factor: f64, mscale: f64) -> f64 {
    if factor <= 1.0 { 1.0 } else { 0.1 * mscale * factor.ln() + 1.0 }
}

impl Yarn {
    pub(crate) fn read(text: &Fields, parameters: &Fields) -> Result<Self> {
        let original = original(text, parameters)?;
        let factor = stretch(text, parameters, original)?;
        let positive = |key| parameters.number(key).map(|it| it.filter(|&number| number != 0.0));
        let paper = match (positive("mscale")?, positive("mscale_all_dim")?) {
            (Some(mscale), Some(all)) => yarn_mscale(factor, mscale) / yarn_mscale(factor, all),
            _ => yarn_mscale(factor, 1.0),
        };
        Ok(Self {
            factor,
            beta_fast: positive("beta_fast")?.unwrap_or(32.0),
            beta_slow: positive("beta_slow")?.unwrap_or(1.0),
            truncate: !parameters.has("truncate") || parameters.flag("truncate")?,
            original_max_position_embeddings: original,
            attention_factor: parameters.number("attention_factor")?.unwrap_or(paper),
        })
    }

    /// Frequencies for `powers` [rotated / 2] of the base `theta`.
    fn frequencies(&self, powers: &Tensor, theta: f64) -> Tensor {
        let rotated = 2.0 * powers.size()[0] as f64;
        let original = self.original_max_position_embeddings as f64;
        // The index of the pair that makes `turns` turns over the original context.
        let pair = |turns: f64| {
            rotated * (original / (turns * std::f64::consts::TAU)).ln() / (2.0 * theta.ln())
        };
        let (mut low, mut high) = (pair(self.beta_fast), pair(self.beta_slow));
        if self.truncate {
            (low, high) = (low.floor(), high.ceil());
        }
        let (low, mut high) = (low.max(0.0), high.min(rotated - 1.0));
        if low == high {
            high += 0.001;
        }
        let index = Tensor::arange(powers.size()[0], (Kind::Float, powers.device()));
        let kept = 1.0 - ((index - low) / (high - low)).clamp(0.0, 1.0);
        let stretched = (powers * self.factor).reciprocal() * (1.0 - &kept);
        stretched + powers.reciprocal() * kept
    }
}

/// Llama 3's scaling: low frequencies divided by the factor, high ones kept, a ramp between.
fn scale_frequencies(scaling: &Llama3Scaling, inverse_frequency: &Tensor) -> Tensor {
    let Llama3Scaling { factor, low_freq_factor, high_freq_factor, .. } = *scaling;
    let context = scaling.original_max_position_embeddings as f64;
    let turns = inverse_frequency * (context / std::f64::consts::TAU);
    let kept = ((turns - low_freq_factor) / (high_freq_factor - low_freq_factor)).clamp(0.0, 1.0);
    inverse_frequency * (&kept + (1.0 - &kept) / factor)
}

#[cfg(test)]
mod tests;
