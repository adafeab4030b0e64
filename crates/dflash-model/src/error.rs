//! What can go wrong with a model on disk or a model's settings.

use std::path::PathBuf;

/// A result of this crate.
pub type Result<T> = std::result::Result<T, Error>;

/// Errors name the file, key or tensor, what was found and what would do.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A file of a model directory could not be read.
    #[error("cannot read {path}: {source}")]
    Read {
        /// The file.
        path: PathBuf,
        /// The operating system's answer.
        #[source]
        source: std::io::Error,
    },
    /// A model directory lacks a file that every model has.
    #[error("{dir} has no {file}; pass the directory of a model, or of one checkpoint (step-...)")]
    MissingFile {
        /// The directory as the user named it.
        dir: PathBuf,
        /// The file's name.
        file: String,
    },
    /// The index of a sharded checkpoint names a shard that is not there.
    #[error(
        "{dir} lacks the shard {shard} that its model.safetensors.index.json names; download it again"
    )]
    MissingShard {
        /// The directory as the user named it.
        dir: PathBuf,
        /// The shard's file name.
        shard: String,
    },
    /// A JSON file does not parse, or a key is missing or has the wrong type.
    #[error("{path}: {source}")]
    Json {
        /// The file.
        path: PathBuf,
        /// The parser's answer, with the key or the line.
        #[source]
        source: serde_json::Error,
    },
    /// A key of a configuration has a value that we cannot honour.
    #[error("{path}: `{key}` is {found}, but {expected}")]
    Config {
        /// The file.
        path: PathBuf,
        /// The key.
        key: String,
        /// Its value.
        found: String,
        /// What would do.
        expected: String,
    },
    /// The model is of a family that we do not run.
    #[error("{path}: architecture {found} is not supported; supported: {supported}")]
    Architecture {
        /// The configuration file.
        path: PathBuf,
        /// Its architecture.
        found: String,
        /// The architectures we run.
        supported: String,
    },
    /// A safetensors file is damaged.
    #[error("{path} is not a readable safetensors file: {source}")]
    Safetensors {
        /// The file.
        path: PathBuf,
        /// The parser's answer.
        #[source]
        source: safetensors::SafeTensorError,
    },
    /// A safetensors file is shorter than its header says.
    #[error("{path} is cut off: {found} bytes of {expected}; fetch or write it again")]
    Truncated {
        /// The file.
        path: PathBuf,
        /// Its length in bytes.
        found: u64,
        /// The length its header promises.
        expected: u64,
    },
    /// A checkpoint lacks a tensor.
    #[error("{path} has no tensor {name}")]
    MissingTensor {
        /// The file or directory.
        path: PathBuf,
        /// The tensor.
        name: String,
    },
    /// A tensor has another shape than the configuration says.
    #[error("{path}: tensor {name} has shape {found:?}, expected {expected:?}")]
    Shape {
        /// The file or directory.
        path: PathBuf,
        /// The tensor.
        name: String,
        /// Its shape.
        found: Vec<i64>,
        /// The shape the configuration asks for.
        expected: Vec<i64>,
    },
    /// A tensor is stored in a type that we do not read.
    #[error("{path}: tensor {name} has type {found}, expected F32, F16 or BF16")]
    TensorType {
        /// The file or directory.
        path: PathBuf,
        /// The tensor.
        name: String,
        /// Its type.
        found: String,
    },
    /// A layer id does not exist in the target.
    #[error(
        "target layer id {id} is out of range: the target has {layers} layers, so ids run from 0 (embedding output) to {layers} (after the last layer)"
    )]
    LayerId {
        /// The id.
        id: u32,
        /// Layers of the target.
        layers: usize,
    },
    /// The list of layer ids is empty, or not strictly ascending.
    #[error("target layer ids {ids:?} must be ascending and without repeats")]
    LayerIdOrder {
        /// The list.
        ids: Vec<u32>,
    },
    /// The mask token cannot be used.
    #[error("mask token {id} {reason}; pass --mask-token-id with a reserved id below {rows}")]
    MaskToken {
        /// The id.
        id: i64,
        /// Why not.
        reason: String,
        /// Rows of the target's embedding.
        rows: i64,
    },
    /// No id is free to be the mask token.
    #[error(
        "the tokenizer names no mask token and fills all {rows} rows of the embedding; pass --mask-token-id with a reserved id that the training data does not use"
    )]
    NoMaskToken {
        /// Rows of the target's embedding.
        rows: i64,
    },
    /// A file could not be written.
    #[error(transparent)]
    Write(#[from] dflash_files::Error),
    /// libtorch refused an operation on data from outside.
    #[error("libtorch: {0}")]
    Torch(#[from] tch::TchError),
}
