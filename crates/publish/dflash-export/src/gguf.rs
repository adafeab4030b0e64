//! llama.cpp's layout of a draft: one GGUF file of architecture `dflash`.
//!
//! According to the llama.cpp sources in llama-cpp-python 0.3.36: `src/models/dflash.cpp`,
//! `common/speculative.cpp` and the converter's `DFlashModel`.
//!
//! - `dflash.target_layers` counts as we do: id k is the input of layer k, 0 the embedding.
//! - Embedding and head are the target's. Only a pruned draft includes a head: the target's rows of
//!   `d2t`, which holds target ids (speculators' holds offsets).
//! - The vocabulary must be as long as the target's embedding, and it defines the mask token. Text
//!   is tokenized with the target's vocabulary only, so token names suffice.
//! - Norms are always float32.
//!
//! Files are written with ggus: candle writes no 64-bit integers, which a pruned vocabulary needs,
//! and holds the whole model in memory. They are read with our own code, because ggus trusts the
//! numbers in a file; so an export that reads back equal has passed two implementations.

mod keys;
mod tensors;

use std::path::Path;

use dflash_chat::ChatTokenizer;
use dflash_draft::objective::DraftVocabulary;
use dflash_draft::{Draft, DraftLayout, Parameter, Role};
use dflash_formats::gguf::GgufFile;
pub(crate) use dflash_formats::gguf::TensorType;
use dflash_identity::TargetIdentity;
use dflash_settings::ExportDtype;
use tch::{Device, Kind, Tensor};

use crate::source::Source;
use crate::{Error, Result};
use tensors::{Named, check_shape, matrix_type, read_into};

/// Target ids that a pruned draft can propose.
const D2T: &str = "d2t";
/// A pruned draft's rows of the target's head.
const HEAD: &str = "output.weight";

/// Our and llama.cpp's names of a layer's parts.
const ROLES: [(&str, &str); 11] = [
    ("self_attn.q_proj", "attn_q"),
    ("self_attn.k_proj", "attn_k"),
    ("self_attn.v_proj", "attn_v"),
    ("self_attn.o_proj", "attn_output"),
    ("self_attn.q_norm", "attn_q_norm"),
    ("self_attn.k_norm", "attn_k_norm"),
    ("input_layernorm", "attn_norm"),
    ("post_attention_layernorm", "ffn_norm"),
    ("mlp.gate_proj", "ffn_gate"),
    ("mlp.up_proj", "ffn_up"),
    ("mlp.down_proj", "ffn_down"),
];

/// llama.cpp's name for the parameter `name`.
fn tensor_name(name: &str) -> String {
    let layer = name.strip_prefix("layers.").and_then(|rest| rest.split_once('.'));
    match (layer, name) {
        (Some((index, part)), _) => {
            let role = part.trim_end_matches(".weight");
            let known = ROLES.iter().find(|(ours, _)| *ours == role);
            format!("blk.{index}.{}.weight", known.expect("every part has a name").1)
        }
        (None, "hidden_norm.weight") => "enc.output_norm.weight".to_owned(),
        (None, "norm.weight") => "output_norm.weight".to_owned(),
        (None, other) => other.to_owned(),
    }
}

/// The storage type of `parameter` in a file of `dtype`.
pub(crate) fn tensor_type(parameter: &Parameter, dtype: ExportDtype) -> TensorType {
    if parameter.role == Role::Vector { TensorType::F32 } else { matrix_type(dtype) }
}

/// Writes `source` to the file `path`; for a pruned draft with its rows `head_vh` [Vd, H] of the
/// target's head.
///
/// # Errors
/// I/O, or rows that do not fit q8_0.
pub(crate) fn write(
    path: &Path,
    source: &Source,
    head_vh: Option<&Tensor>,
    dtype: ExportDtype,
    tokenizer: &ChatTokenizer,
    identity: &TargetIdentity,
) -> Result<()> {
    let draft = &source.draft;
    let mut tensors: Vec<Named> = draft
        .layout()
        .parameters()
        .iter()
        .map(|parameter| {
            let (name, view) = (tensor_name(&parameter.name), parameter.view(draft.flat()));
            Named::new(&name, tensor_type(parameter, dtype), view)
        })
        .collect();
    if let (Some(vocabulary), Some(head_vh)) = (&source.vocabulary, head_vh) {
        let ids = Tensor::from_slice(vocabulary.selected());
        tensors.push(Named::new(D2T, TensorType::I64, ids));
        tensors.push(Named::new(HEAD, matrix_type(dtype), head_vh.shallow_clone()));
    }
    if let Some(odd) = tensors.iter().map(|named| &named.stored).find(|stored| !stored.fits()) {
        let width = odd.shape.last().copied().unwrap_or_default();
        return Err(Error::Q8Width { name: odd.name.clone(), width });
    }
    let keys = keys::of(source.config(), dtype, tokenizer, identity)?;
    tensors::write(path, &keys, &tensors)
}

/// A draft read from a GGUF file, in float32 on the CPU.
#[derive(Debug)]
pub(crate) struct Read {
    pub(crate) draft: Draft,
    pub(crate) vocabulary: Option<DraftVocabulary>,
    pub(crate) identity: Option<TargetIdentity>,
    /// A pruned draft's own head [Vd, H].
    pub(crate) head_vh: Option<Tensor>,
}

/// Reads the draft in `path`, exported by us or by llama.cpp's converter.
///
/// # Errors
/// A damaged file; another architecture or type of drafter; an unsupported tensor type.
pub(crate) fn read(path: &Path) -> Result<Read> {
    let file = GgufFile::open(path)?;
    let (config, identity) = keys::parse(&file)?;
    let layout = DraftLayout::new(&config);
    // Checked before memory is allocated according to the metadata.
    for parameter in layout.parameters() {
        check_shape(&file, &tensor_name(&parameter.name), &parameter.shape)?;
    }
    let flat = Tensor::zeros([layout.elements()], (Kind::Float, Device::Cpu));
    for parameter in layout.parameters() {
        read_into(&file, &tensor_name(&parameter.name), &parameter.view(&flat))?;
    }
    let mut vocabulary = None;
    let mut head_vh = None;
    if file.has(D2T) {
        let size = file.tensor(D2T)?.shape.iter().product();
        check_shape(&file, HEAD, &[size, config.hidden_size])?;
        let ids = Tensor::zeros([size], (Kind::Int64, Device::Cpu));
        read_into(&file, D2T, &ids)?;
        vocabulary = Some(selection(&file, Vec::try_from(ids)?, config.vocab_size)?);
        let head = Tensor::zeros([size, config.hidden_size], (Kind::Float, Device::Cpu));
        read_into(&file, HEAD, &head)?;
        head_vh = Some(head);
    }
    Ok(Read { draft: Draft::new(config, flat), vocabulary, identity, head_vh })
}

fn selection(file: &GgufFile, ids: Vec<i64>, rows: i64) -> Result<DraftVocabulary> {
    let ascending = ids.is_sorted_by(|a, b| a < b);
    if ids.is_empty() || !ascending || !ids.iter().all(|id| (0..rows).contains(id)) {
        let expected = format!("ascending ids of the target's {rows} tokens are needed");
        return Err(file.refuse(D2T, "another list", &expected).into());
    }
    Ok(DraftVocabulary::new(ids, rows as usize))
}

#[cfg(test)]
mod tests;
