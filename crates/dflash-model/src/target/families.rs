//! The families that run natively, one file each: its keys of `config.json`, its tensors, its layer.
//!
//! A family file reads from top to bottom as its authors describe the model. It is put together from
//! parts that ask for choices, never for a name.

mod deepseek_v3;
mod dense;
mod gemma3;
mod gemma4;
mod glm4_moe;
mod gpt_oss;
mod llama4;
mod minimax_m2;
mod phi3;
mod qwen3_5;
mod qwen3_moe;
mod qwen3_next;

use std::fmt::Debug;

use tch::{Device, Tensor};

pub use self::deepseek_v3::DeepseekV3Config;
pub use self::dense::{DenseConfig, DenseKind};
pub use self::gemma3::Gemma3Config;
pub use self::gemma4::Gemma4Config;
pub use self::glm4_moe::Glm4MoeConfig;
pub use self::gpt_oss::GptOssConfig;
pub use self::llama4::Llama4Config;
pub use self::minimax_m2::MiniMaxM2Config;
pub use self::phi3::Phi3Config;
pub use self::qwen3_moe::Qwen3MoeConfig;
pub use self::qwen3_next::HybridConfig;
use super::blocks::feed_forward::mlp_elements;
use super::config::{Outer, TargetConfig};
use super::divided::{Divisible, Shard};
use super::layer::{Layer, Reach};
use super::parameters::Init;
use crate::fields::Fields;
use crate::ops::Rotary;
use crate::{Error, Result};

/// What the layers of a target are.
#[derive(Debug, Clone, PartialEq)]
pub enum Family {
    /// Llama 2 and 3, Mistral, Qwen2, Qwen3.
    Dense(DenseConfig),
    /// Qwen3-Next, Qwen3.5 and 3.6.
    Hybrid(HybridConfig),
    /// DeepSeek V3, V3.1, R1, Kimi K2.
    DeepseekV3(DeepseekV3Config),
    /// Gemma 2 and 3.
    Gemma3(Gemma3Config),
    /// Gemma 4, dense and with experts.
    Gemma4(Gemma4Config),
    /// GLM 4.5 to 4.7.
    Glm4Moe(Glm4MoeConfig),
    /// gpt-oss.
    GptOss(GptOssConfig),
    /// Llama 4.
    Llama4(Llama4Config),
    /// MiniMax M2.
    MiniMaxM2(MiniMaxM2Config),
    /// Phi-3 and Phi-4.
    Phi3(Phi3Config),
    /// Qwen3 with experts.
    Qwen3Moe(Qwen3MoeConfig),
}

/// What a family's configuration has to tell.
pub(crate) trait Architecture: Debug {
    /// Layer `number`, counted from 0.
    fn layer(&self, config: &TargetConfig, number: usize, init: &Init) -> Result<Box<dyn Layer>>;

    /// The rotary embeddings that its layers ask for, in the order of `Pass::tables`.
    fn rotaries(&self, device: Device) -> Vec<Rotary>;

    /// What every pass begins with, beside the embedding; `None` where there is no such thing.
    fn prepare(&self, _config: &TargetConfig, _init: &Init) -> Result<Option<Box<dyn Prepare>>> {
        Ok(None)
    }

    /// Elements of the matrices that a token meets in layer `number`.
    fn layer_elements(&self, config: &TargetConfig, number: usize) -> f64;

    /// Elements of the matrices that a rank with `shard` keeps of layer `number`: more than a token
    /// meets, where it meets few experts.
    fn stored_elements(&self, config: &TargetConfig, number: usize, shard: &Shard) -> f64;

    /// Names within the text model of the tensors that [`Self::prepare`] reads.
    fn prepared_names(&self) -> &'static [&'static str] {
        &[]
    }

    /// Elements of what [`Self::prepare`] keeps, which no ranks divide.
    fn prepared_elements(&self, _config: &TargetConfig) -> f64 {
        0.0
    }

    /// Operations of layer `number` for a token and one that it sees.
    fn pair_flops(&self, number: usize) -> f64;

    /// How far back layer `number` sees.
    fn reach(&self, number: usize) -> Reach;

    /// What ranks divide among themselves.
    fn divided(&self) -> Vec<Divisible>;

    /// Numbers that a token takes at a layer's widest moment.
    fn widest(&self, config: &TargetConfig) -> f64;
}

/// What a family makes of the tokens once for all layers.
pub(crate) trait Prepare: Debug + Send {
    /// Of the tokens `ids_t` `[T]` and their embeddings [T, H], scaled.
    fn of(&self, ids_t: &Tensor, x_th: &Tensor) -> Tensor;
}

/// What reads a family's keys: the file's and those of its text model, which may be the same.
type Reader = fn(&Fields, &Fields) -> Result<(Family, Outer)>;

/// Names under `architectures`, those under `model_type`, and what reads such a file.
const READERS: &[(&[&str], &[&str], Reader)] = &[
    (&["LlamaForCausalLM"], &["llama"], |_, text| dense(text, DenseKind::Llama)),
    (&["MistralForCausalLM"], &["mistral"], |_, text| dense(text, DenseKind::Mistral)),
    (&["Qwen2ForCausalLM"], &["qwen2"], |_, text| dense(text, DenseKind::Qwen2)),
    (&["Qwen3ForCausalLM"], &["qwen3"], |_, text| dense(text, DenseKind::Qwen3)),
    (&["Qwen3NextForCausalLM"], &["qwen3_next"], |_, text| hybrid(HybridConfig::read(text))),
    (
        &["Qwen3_5ForCausalLM", "Qwen3_5ForConditionalGeneration"],
        &["qwen3_5_text", "qwen3_5"],
        |_, text| hybrid(qwen3_5::read(text, false)),
    ),
    (
        &["Qwen3_5MoeForCausalLM", "Qwen3_5MoeForConditionalGeneration"],
        &["qwen3_5_moe_text", "qwen3_5_moe"],
        |_, text| hybrid(qwen3_5::read(text, true)),
    ),
    (
        &["DeepseekV3ForCausalLM", "KimiK25ForConditionalGeneration"],
        &["deepseek_v3", "kimi_k2", "kimi_k25"],
        |_, text| Ok((Family::DeepseekV3(DeepseekV3Config::read(text)?), Outer::PLAIN)),
    ),
    (&["Gemma2ForCausalLM"], &["gemma2"], |_, text| {
        let (config, outer) = Gemma3Config::read_second(text)?;
        Ok((Family::Gemma3(config), outer))
    }),
    (
        &["Gemma3ForCausalLM", "Gemma3ForConditionalGeneration"],
        &["gemma3_text", "gemma3"],
        |_, text| Gemma3Config::read(text).map(|(config, outer)| (Family::Gemma3(config), outer)),
    ),
    (
        &["Gemma4ForCausalLM", "Gemma4ForConditionalGeneration"],
        &["gemma4_text", "gemma4"],
        |_, text| Gemma4Config::read(text).map(|(config, outer)| (Family::Gemma4(config), outer)),
    ),
    (&["Glm4MoeForCausalLM"], &["glm4_moe"], |_, text| {
        Ok((Family::Glm4Moe(Glm4MoeConfig::read(text)?), Outer::PLAIN))
    }),
    (&["GptOssForCausalLM"], &["gpt_oss"], |_, text| {
        Ok((Family::GptOss(GptOssConfig::read(text)?), Outer::PLAIN))
    }),
    (
        &["Llama4ForCausalLM", "Llama4ForConditionalGeneration"],
        &["llama4_text", "llama4"],
        |_, text| Ok((Family::Llama4(Llama4Config::read(text)?), Outer::PLAIN)),
    ),
    (&["MiniMaxM2ForCausalLM"], &["minimax_m2"], |_, text| {
        Ok((Family::MiniMaxM2(MiniMaxM2Config::read(text)?), Outer::PLAIN))
    }),
    (&["Phi3ForCausalLM"], &["phi3"], |_, text| {
        Ok((Family::Phi3(Phi3Config::read(text)?), Outer::PLAIN))
    }),
    (&["Qwen3MoeForCausalLM"], &["qwen3_moe"], |_, text| {
        Ok((Family::Qwen3Moe(Qwen3MoeConfig::read(text)?), Outer::PLAIN))
    }),
];

fn hybrid(config: Result<HybridConfig>) -> Result<(Family, Outer)> {
    Ok((Family::Hybrid(config?), Outer { norm_plus_one: true, ..Outer::PLAIN }))
}

fn dense(text: &Fields, kind: DenseKind) -> Result<(Family, Outer)> {
    Ok((Family::Dense(DenseConfig::read(text, kind)?), Outer::PLAIN))
}

impl Family {
    /// The names under `architectures` in config.json of all that run.
    pub fn architectures() -> impl Iterator<Item = &'static str> {
        READERS.iter().flat_map(|(architectures, ..)| architectures.iter().copied())
    }

    /// What `file` says, of whose text model the keys are in `text`; first the architecture's name.
    pub(crate) fn read(file: &Fields, text: &Fields) -> Result<(String, Self, Outer)> {
        let named = file.texts("architectures")?.unwrap_or_default().into_iter().next();
        let model_type = file.text("model_type")?;
        let is_it = |(architectures, types, _): &&(&[&str], &[&str], Reader)| match &named {
            Some(named) => architectures.contains(&named.as_str()),
            None => model_type.as_ref().is_some_and(|found| types.contains(&found.as_str())),
        };
        match READERS.iter().find(is_it) {
            Some((architectures, _, read)) => {
                let (family, outer) = read(file, text)?;
                Ok((named.unwrap_or_else(|| architectures[0].into()), family, outer))
            }
            None => Err(Error::Architecture {
                path: file.path().into(),
                found: named.or(model_type).unwrap_or("(none)".into()),
                supported: Self::architectures().collect::<Vec<_>>().join(", "),
            }),
        }
    }

    /// Whether lm_head and embedding are one, by `fields`, which have the key if the file does.
    pub(crate) fn is_tied(&self, fields: &Fields) -> Result<bool> {
        // Gemma's released configs leave out what their class fills in.
        let default = matches!(self, Self::Gemma3(_) | Self::Gemma4(_));
        let written = fields.value("tie_word_embeddings").is_some();
        Ok(if written { fields.flag("tie_word_embeddings")? } else { default })
    }

    /// Rows of the embedding where config.json does not say, if the family's class does.
    pub(crate) fn vocab_size(&self) -> Option<i64> {
        match self {
            Self::Gemma3(_) => Some(Gemma3Config::VOCAB_SIZE),
            Self::Gemma4(_) => Some(Gemma4Config::VOCAB_SIZE),
            _ => None,
        }
    }

    /// The configuration of dense layers, if they are.
    pub fn dense(&self) -> Option<&DenseConfig> {
        match self {
            Self::Dense(dense) => Some(dense),
            _ => None,
        }
    }

    /// As [`Self::dense`], to be changed.
    pub fn dense_mut(&mut self) -> Option<&mut DenseConfig> {
        match self {
            Self::Dense(dense) => Some(dense),
            _ => None,
        }
    }

    pub(crate) fn architecture(&self) -> &dyn Architecture {
        match self {
            Self::Dense(dense) => dense,
            Self::Hybrid(hybrid) => hybrid,
            Self::DeepseekV3(deepseek) => deepseek,
            Self::Gemma3(config) => config,
            Self::Gemma4(config) => config,
            Self::Glm4Moe(config) => config,
            Self::GptOss(config) => config,
            Self::Llama4(config) => config,
            Self::MiniMaxM2(config) => config,
            Self::Phi3(config) => config,
            Self::Qwen3Moe(config) => config,
        }
    }
}

/// What `layer_types` says of each of so many layers, by what `of` makes of its words; `None` where it is
/// not written.
pub(crate) fn layer_types<T>(
    text: &Fields,
    layers: usize,
    of: impl Fn(&str) -> Option<T>,
) -> Result<Option<Vec<T>>> {
    let Some(types) = text.texts("layer_types")? else { return Ok(None) };
    if types.len() != layers {
        return Err(text.refuse("layer_types", "one entry per layer is needed"));
    }
    let kinds = types.iter().map(|kind| of(kind)).collect::<Option<Vec<T>>>();
    let unknown = || text.refuse("layer_types", "it has a kind of layer that the family has not");
    kinds.map(Some).ok_or_else(unknown)
}

/// A number of experts, under the first of `keys` that is written.
pub(crate) fn experts_count(text: &Fields, keys: &[&str]) -> Result<i64> {
    for key in keys {
        if let Some(count) = text.size(key)? {
            return Ok(count);
        }
    }
    Err(text.refuse(keys[0], "it is needed"))
}

/// The number of experts of a token, under the first of `keys` that is written.
pub(crate) fn chosen_count(text: &Fields, keys: &[&str], experts: i64) -> Result<i64> {
    let chosen = experts_count(text, keys)?;
    let key = keys.iter().find(|key| text.value(key).is_some()).expect("one was read");
    let too_many = || text.refuse(key, "it is more than there are experts");
    (chosen <= experts).then_some(chosen).ok_or_else(too_many)
}

/// Numbers and widths of a family's experts and MLPs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct MixtureSizes {
    /// Experts of a layer.
    pub(crate) experts: i64,
    /// Those of a token.
    pub(crate) chosen: i64,
    /// Width of an expert.
    pub(crate) inner: i64,
    /// Width of the shared expert; 0 where there is none.
    pub(crate) shared: i64,
    /// Width of the MLP of layers without experts.
    pub(crate) dense: i64,
}

impl MixtureSizes {
    /// Elements of the matrices that a token of `hidden` numbers meets.
    pub(crate) fn met(self, hidden: i64, is_sparse: bool) -> f64 {
        self.elements(hidden, is_sparse, (self.chosen, &Shard::WHOLE))
    }

    /// Elements of the matrices that a rank with `shard` keeps: of the router all.
    pub(crate) fn stored(self, hidden: i64, is_sparse: bool, shard: &Shard) -> f64 {
        self.elements(hidden, is_sparse, (shard.share(self.experts), shard))
    }

    fn elements(self, hidden: i64, is_sparse: bool, (experts, shard): (i64, &Shard)) -> f64 {
        if !is_sparse {
            return mlp_elements(hidden, shard.share(self.dense));
        }
        let router = (hidden * self.experts) as f64;
        router
            + mlp_elements(hidden, shard.share(self.shared))
            + experts as f64 * mlp_elements(hidden, self.inner)
    }

    /// What ranks divide among themselves: experts, and the widths of MLPs.
    pub(crate) fn divided(self) -> Vec<Divisible> {
        let sizes = [
            Divisible::new("the number of experts", self.experts),
            Divisible::new("the shared expert's width", self.shared),
            Divisible::new("intermediate_size", self.dense),
        ];
        sizes.into_iter().filter(|divisible| divisible.size > 0).collect()
    }

    /// Numbers that a token takes at the widest moment: inputs, inner numbers and outputs of its experts.
    pub(crate) fn widest(self, hidden: i64) -> f64 {
        let sparse = 4 * hidden + self.chosen * (2 * hidden + 3 * self.inner) + 3 * self.shared;
        sparse.max(4 * hidden + 3 * self.dense) as f64
    }
}

#[cfg(test)]
mod spellings;
