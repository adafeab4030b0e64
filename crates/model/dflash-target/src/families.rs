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

/// All that run; a new one is its file and two lines here, `mod` and this.
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

/// A model that a config.json names.
struct Known {
    /// Its names under `architectures`; the first is its own where a file has none.
    architectures: &'static [&'static str],
    /// Those under `model_type`.
    model_types: &'static [&'static str],
    /// Its head, which drafts are trained with.
    head: HeadFacts,
    /// Reads the keys of the text model.
    read: fn(&Fields) -> Result<(Family, Outer)>,
}

/// What the layers of a target are.
#[derive(Debug, Clone)]
pub struct Family(Arc<dyn Architecture>);

/// What a family's configuration has to tell.
pub(crate) trait Architecture: Debug + Send + Sync {
    /// Layer `number`, counted from 0.
    fn layer(&self, config: &TargetConfig, number: usize, init: &Init) -> Result<Box<dyn Layer>>;

    /// The rotary embeddings that its layers ask for, in the order of `Pass::tables`.
    fn rotaries(&self, device: Device) -> Vec<Rotary>;

    /// What every pass begins with, beside the embedding; `None` where there is no such thing.
    fn prepare(&self, _config: &TargetConfig, _init: &Init) -> Result<Option<Box<dyn Prepare>>> {
        Ok(None)
    }

    /// Elements of the matrices that a token meets in layer `number`.
    fn layer_elements(&self, config: &TargetConfig, number: usize) -> f64 {
        self.stored_elements(config, number, &Shard::WHOLE)
    }

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
    fn attention_span(&self, number: usize) -> AttentionSpan;

    /// What ranks divide among themselves.
    fn parallel_sizes(&self) -> Vec<Divisible>;

    /// Numbers that a token takes at a layer's widest moment.
    fn widest(&self, config: &TargetConfig) -> f64;

    /// Rows of the embedding where config.json does not say, if the family's class does.
    fn vocab_size(&self) -> Option<i64> {
        None
    }

    /// Whether lm_head and embedding are one where config.json does not say.
    fn is_tied(&self) -> bool {
        false
    }

    /// The configuration of layers as Llama and Qwen have them, which are trained and saved too.
    fn dense(&self) -> Option<&DenseConfig> {
        None
    }
}

/// What a family makes of the tokens once for all layers.
pub(crate) trait Prepare: Debug + Send {
    /// Of the tokens `ids_t` `[T]` and their embeddings [T, H], scaled.
    fn of(&self, ids_t: &Tensor, x_th: &Tensor) -> Tensor;
}

/// The heads of all that run.
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

/// Two are the same where they print alike: what prints is all that they are.
impl PartialEq for Family {
    fn eq(&self, other: &Self) -> bool {
        format!("{self:?}") == format!("{other:?}")
    }
}

impl Family {
    /// The names under `architectures` in config.json of all that run.
    pub fn architectures() -> impl Iterator<Item = &'static str> {
        known().flat_map(|known| known.architectures.iter().copied())
    }

    /// What `file` says, of whose text model the keys are in `text`; first the architecture's name.
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

    /// The configuration of dense layers, if they are.
    pub fn dense(&self) -> Option<&DenseConfig> {
        self.0.dense()
    }

    pub(crate) fn architecture(&self) -> &dyn Architecture {
        &*self.0
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

/// Layers with experts, by `mlp_only_layers` and `decoder_sparse_step`.
fn sparse_by_step(text: &Fields, layers: usize) -> Result<Vec<bool>> {
    let dense = text.tokens("mlp_only_layers")?;
    let step = text.size("decoder_sparse_step")?.unwrap_or(1) as usize;
    let is_sparse =
        |layer: usize| !dense.contains(&(layer as i64)) && (layer + 1).is_multiple_of(step);
    Ok((0..layers).map(is_sparse).collect())
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
pub(crate) fn top_k_count(text: &Fields, keys: &[&str], experts: i64) -> Result<i64> {
    let top_k = experts_count(text, keys)?;
    let key = keys.iter().find(|key| text.value(key).is_some()).expect("one was read");
    let too_many = || text.refuse(key, "it is more than there are experts");
    (top_k <= experts).then_some(top_k).ok_or_else(too_many)
}

#[cfg(test)]
mod spellings;
