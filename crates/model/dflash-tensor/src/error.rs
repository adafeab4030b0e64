//! What can go wrong with a model on disk or a model's settings.
//!
//! One type for `dflash-tensor`, `dflash-target` and `dflash-draft`: a load goes through all of them, and
//! whoever loads a target loads a draft beside it and says the same of both.
#![allow(missing_docs, reason = "the messages say it")]

use std::path::PathBuf;

/// A result of this crate and of those of target and draft.
pub type Result<T> = std::result::Result<T, Error>;

/// Errors name the file, key or tensor, what was found and what was expected.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("cannot read {path}: {source}")]
    Read { path: PathBuf, source: std::io::Error },
    /// A file of a format that others have too.
    #[error(transparent)]
    Format(#[from] dflash_formats::Error),
    #[error(
        "{dir} lacks the shard {shard}, which has the tensor {tensor} according to its model.safetensors.index.json; download it again"
    )]
    MissingShard { dir: PathBuf, shard: String, tensor: String },
    /// The model is of a family that we do not run.
    #[error("{path}: architecture {found} is not supported; supported: {supported}")]
    Architecture { path: PathBuf, found: String, supported: String },
    /// The draft's head is of a kind that we do not run.
    #[error("the draft's head is {found}, which this program does not know; it knows {known}")]
    UnknownHead { found: String, known: String },
    /// The draft's head has a value that we cannot honour.
    #[error("the draft's head {kind}: `{key}` is {found}, but {expected}")]
    Head { kind: &'static str, key: &'static str, found: String, expected: &'static str },
    /// The target is of a family whose head is not known, and no description says how it is.
    #[error(
        "{path}: architecture {found} is not known (docs/targets.md lists those that are); describe it in a file and pass --target-spec FILE:\n{example}"
    )]
    UnknownTarget { path: PathBuf, found: String, example: String },
    /// A description of a target does not parse; the source names line and key.
    #[error("{path}, line {line}: {reason}")]
    Spec { path: PathBuf, line: usize, reason: String },
    /// The checkpoint's names do not say which tensor it is.
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
    /// The tensor of a head is stored in few bits.
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
    /// No id is free to be the mask token.
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
        /// What the ranks do not do to the size.
        relation: &'static str,
        key: &'static str,
        size: i64,
        ranks: usize,
        possible: String,
    },
    /// A file could not be written.
    #[error(transparent)]
    Write(#[from] dflash_io::Error),
    /// libtorch does not round products as a target takes them.
    #[error(transparent)]
    Products(dflash_torch_sys::Error),
    /// libtorch refused an operation on data from outside.
    #[error("libtorch: {0}")]
    Torch(#[from] tch::TchError),
}
