//! The natively supported families, one file each: `config.json` keys, tensors, layer.
//!
//! A family file reads top to bottom like its authors' description of the model. It combines
//! building blocks, which are configured by choices and never ask for a family's name.

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
use std::sync::Arc;

use dflash_formats::fields::Fields;
use dflash_tensor::attention_span::AttentionSpan;
use dflash_tensor::ops::Rotary;
use dflash_tensor::{Error, Result};
use tch::{Device, Tensor};

pub use self::dense::{DenseConfig, DenseKind};
use super::config::{Outer, TargetConfig};
use super::facts::{HeadFacts, NamedHead};
use super::layer::Layer;
use super::parallel::{Divisible, Shard};
use super::parameters::Init;

/// All families. A new one needs its file and two lines here, `mod` and this.
const FAMILIES: &[&[Known]] = &[
    dense::KNOWN,
    qwen3_next::KNOWN,
    qwen3_5::KNOWN,
    deepseek_v3::KNOWN,
    gemma3::KNOWN,
    gemma4::KNOWN,
    glm4_moe::KNOWN,
    gpt_oss::KNOWN,
    llama4::KNOWN,
    minimax_m2::KNOWN,
    phi3::KNOWN,
    qwen3_moe::KNOWN,
];

/// A model type that a config.json may name.
struct Known {
    /// Names under `architectures`; the first is used if the file has none.
    architectures: &'static [&'static str],
    /// Names under `model_type`.
    model_types: &'static [&'static str],
    /// Its head, used in draft training.
    head: HeadFacts,
    /// Reads the text model's keys.
    read: fn(&Fields) -> Result<(Family, Outer)>,
}

/// Type and configuration of a target's layers.
#[derive(Debug, Clone)]
pub struct Family(Arc<dyn Architecture>);

/// Interface of a family's configuration.
pub(crate) trait Architecture: Debug + Send + Sync {
    /// Builds layer `number`, counted from 0.
    fn layer(&self, config: &TargetConfig, number: usize, init: &Init) -> Result<Box<dyn Layer>>;

    /// The rotary embeddings of its layers, in the order of `Pass::tables`.
    fn rotaries(&self, device: Device) -> Vec<Rotary>;

    /// Computation at the start of every pass after the embedding, if there is any.
    fn prepare(&self, _config: &TargetConfig, _init: &Init) -> Result<Option<Box<dyn Prepare>>> {
        Ok(None)
    }

    /// Matrix elements of layer `number` that are active for a token.
    fn layer_elements(&self, config: &TargetConfig, number: usize) -> f64 {
        self.stored_elements(config, number, &Shard::WHOLE)
    }

    /// Matrix elements of layer `number` that a rank with `shard` stores. With experts this is more
    /// than a token activates.
    fn stored_elements(&self, config: &TargetConfig, number: usize, shard: &Shard) -> f64;

    /// Names within the text model of the tensors that [`Self::prepare`] reads.
    fn prepared_names(&self) -> &'static [&'static str] {
        &[]
    }

    /// Elements stored for [`Self::prepare`]; not sharded.
    fn prepared_elements(&self, _config: &TargetConfig) -> f64 {
        0.0
    }

    /// Operations of layer `number` per query-key pair.
    fn pair_flops(&self, number: usize) -> f64;

    /// Attention span of layer `number`.
    fn attention_span(&self, number: usize) -> AttentionSpan;

    /// The sizes that tensor parallelism divides.
    fn parallel_sizes(&self) -> Vec<Divisible>;

    /// Peak activation elements per token in a layer.
    fn widest(&self, config: &TargetConfig) -> f64;

    /// The family's default number of embedding rows, for a config.json without one.
    fn vocab_size(&self) -> Option<i64> {
        None
    }

    /// Whether embeddings are tied by default.
    fn is_tied(&self) -> bool {
        false
    }

    /// The configuration of dense (Llama or Qwen) layers, which can also be trained and saved.
    fn dense(&self) -> Option<&DenseConfig> {
        None
    }
}

/// Per-token inputs that a family computes once for all layers.
pub(crate) trait Prepare: Debug + Send {
    /// From the tokens `ids_t` `[T]` and their scaled embeddings [T, H].
    fn of(&self, ids_t: &Tensor, x_th: &Tensor) -> Tensor;
}

/// The heads of all families.
pub(crate) fn heads() -> impl Iterator<Item = NamedHead> {
    known().map(|&Known { architectures, model_types, head, .. }| NamedHead {
        architectures,
        model_types,
        head,
    })
}

fn known() -> impl Iterator<Item = &'static Known> {
    FAMILIES.iter().copied().flatten()
}

impl<A: Architecture + 'static> From<A> for Family {
    fn from(architecture: A) -> Self {
        Self(Arc::new(architecture))
    }
}

/// Compares the debug output, which shows every setting.
impl PartialEq for Family {
    fn eq(&self, other: &Self) -> bool {
        format!("{self:?}") == format!("{other:?}")
    }
}

impl Family {
    /// All supported names under `architectures` in config.json.
    pub fn architectures() -> impl Iterator<Item = &'static str> {
        known().flat_map(|known| known.architectures.iter().copied())
    }

    /// Reads `file`, whose text model's keys are in `text`. Also returns the architecture's name.
    pub(crate) fn read(file: &Fields, text: &Fields) -> Result<(String, Self, Outer)> {
        let named = file.texts("architectures")?.unwrap_or_default().into_iter().next();
        let model_type = file.text("model_type")?;
        let is_it = |known: &&Known| match &named {
            Some(named) => known.architectures.contains(&named.as_str()),
            None => model_type.as_ref().is_some_and(|it| known.model_types.contains(&it.as_str())),
        };
        match known().find(is_it) {
            Some(known) => {
                let (family, outer) = (known.read)(text)?;
                Ok((named.unwrap_or_else(|| known.architectures[0].into()), family, outer))
            }
            None => Err(Error::Architecture {
                path: file.path().into(),
                found: named.or(model_type).unwrap_or("(none)".into()),
                supported: Self::architectures().collect::<Vec<_>>().join(", "),
            }),
        }
    }

    /// The configuration of dense layers, if the family is dense.
    pub fn dense(&self) -> Option<&DenseConfig> {
        self.0.dense()
    }

    pub(crate) fn architecture(&self) -> &dyn Architecture {
        &*self.0
    }
}

/// Reads `layer_types`, translating each entry by `of`; `None` if the key is absent.
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

/// Which layers have experts, from `mlp_only_layers` and `decoder_sparse_step`.
fn sparse_by_step(text: &Fields, layers: usize) -> Result<Vec<bool>> {
    let dense = text.tokens("mlp_only_layers")?;
    let step = text.size("decoder_sparse_step")?.unwrap_or(1) as usize;
    let is_sparse =
        |layer: usize| !dense.contains(&(layer as i64)) && (layer + 1).is_multiple_of(step);
    Ok((0..layers).map(is_sparse).collect())
}

/// The number of experts, from the first of `keys` that is present.
pub(crate) fn experts_count(text: &Fields, keys: &[&str]) -> Result<i64> {
    for key in keys {
        if let Some(count) = text.size(key)? {
            return Ok(count);
        }
    }
    Err(text.refuse(keys[0], "it is needed"))
}

/// The number of experts per token, from the first of `keys` that is present.
pub(crate) fn top_k_count(text: &Fields, keys: &[&str], experts: i64) -> Result<i64> {
    let top_k = experts_count(text, keys)?;
    let key = keys.iter().find(|key| text.value(key).is_some()).expect("one was read");
    let too_many = || text.refuse(key, "it is more than there are experts");
    (top_k <= experts).then_some(top_k).ok_or_else(too_many)
}

#[cfg(test)]
mod spellings;
