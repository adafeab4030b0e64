//! Errors in model files and model settings.
//!
//! One type for `dflash-tensor`, `dflash-target` and `dflash-draft`: loading a model goes through
//! all three, and callers report target and draft errors alike.
#![allow(missing_docs, reason = "the messages say it")]

use std::path::PathBuf;

/// Result type of this crate, `dflash-target` and `dflash-draft`.
pub type Result<T> = std::result::Result<T, Error>;

/// Errors name the file, key or tensor, what was found and what was expected.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("cannot read {path}: {source}")]
    Read { path: PathBuf, source: std::io::Error },
    /// An error in a file format shared with other crates.
    #[error(transparent)]
    Format(#[from] dflash_formats::Error),
    #[error(
        "{dir} lacks the shard {shard}, which has the tensor {tensor} according to its model.safetensors.index.json; download it again"
    )]
    MissingShard { dir: PathBuf, shard: String, tensor: String },
    /// The model's architecture is not supported.
    #[error("{path}: architecture {found} is not supported; supported: {supported}")]
    Architecture { path: PathBuf, found: String, supported: String },
    /// The draft's head type is not supported.
    #[error("the draft's head is {found}, which this program does not know; it knows {known}")]
    UnknownHead { found: String, known: String },
    /// The draft's head has an unsupported value.
    #[error("the draft's head {kind}: `{key}` is {found}, but {expected}")]
    Head { kind: &'static str, key: &'static str, found: String, expected: &'static str },
    /// The target's architecture is not built in, and no target spec was given.
    #[error(
        "{path}: architecture {found} is not known (docs/targets.md lists those that are); describe it in a file and pass --target-spec FILE:\n{example}"
    )]
    UnknownTarget { path: PathBuf, found: String, example: String },
    /// A target spec that does not parse; `source` names line and key.
    #[error("{path}, line {line}: {reason}")]
    Spec { path: PathBuf, line: usize, reason: String },
    /// No tensor name in the checkpoint matches.
    #[error(
        "{dir}: no tensor was found that is the {what}; name it in a file for --target-spec, as `{key} = \"...\"`; its tensors outside numbered layers are {names}"
    )]
    NoHeadTensor { dir: PathBuf, what: &'static str, key: &'static str, names: String },
    #[error(
        "{dir}: both {first} and {second} may be the {what}; say which in a file for --target-spec, as `{key} = \"...\"`"
    )]
    TwoHeadTensors {
        dir: PathBuf,
        what: &'static str,
        key: &'static str,
        first: String,
        second: String,
    },
    /// The tensor that the head needs is quantized.
    #[error(
        "{dir}: tensor {name} is stored as {found} ({method}), but training needs it unquantized; pass the directory or name of a checkpoint of the same model that stores it as F32, F16 or BF16 as --target"
    )]
    QuantizedHead { dir: PathBuf, name: String, found: String, method: String },
    #[error("{path} has no tensor {name}")]
    MissingTensor { path: PathBuf, name: String },
    #[error("{path}: tensor {name} has shape {found:?}, expected {expected:?}")]
    Shape { path: PathBuf, name: String, found: Vec<i64>, expected: Vec<i64> },
    #[error("{path}: tensor {name} has type {found}, expected F32, F16 or BF16")]
    TensorType { path: PathBuf, name: String, found: String },
    #[error(
        "target layer id {id} is out of range: the target has {layers} layers, so ids run from 0 (embedding output) to {layers} (after the last layer)"
    )]
    LayerId { id: u32, layers: usize },
    #[error("target layer ids {ids:?} must be ascending, without repetition")]
    LayerIdOrder { ids: Vec<u32> },
    #[error("mask token {id} {reason}; pass --mask-token-id with a reserved id below {rows}")]
    MaskToken { id: i64, reason: &'static str, rows: i64 },
    /// No token id is free for the mask token.
    #[error(
        "the tokenizer names no mask token and fills all {rows} rows of the embedding; pass --mask-token-id with a reserved id that the training data does not use"
    )]
    NoMaskToken { rows: i64 },
    #[error(
        "--pipeline is {stages}, but the target has {layers} layers, and every stage needs one"
    )]
    MoreStagesThanLayers { stages: usize, layers: usize },
    #[error(
        "--tensor-parallel-size is {ranks}, which {relation} {key}, {size}, of this {architecture}; possible: {possible}. --pipeline splits by layers"
    )]
    Indivisible {
        architecture: String,
        /// How the size fails to match the ranks, e.g. "is not divisible by".
        relation: &'static str,
        key: &'static str,
        size: i64,
        ranks: usize,
        possible: String,
    },
    /// A file could not be written.
    #[error(transparent)]
    Write(#[from] dflash_io::Error),
    /// libtorch cannot be set to the matmul precision that targets need.
    #[error(transparent)]
    Products(dflash_torch_sys::Error),
    /// libtorch rejected an operation on external data.
    #[error("libtorch: {0}")]
    Torch(#[from] tch::TchError),
}
