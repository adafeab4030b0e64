//! What can go wrong between conversations and a dataset.

use std::path::PathBuf;

/// A fault that ends the run. Messages name the object and the remedy.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A file, template or tokenizer cannot be used.
    #[error(transparent)]
    Text(#[from] dflash_text::Error),
    /// The output holds something already.
    #[error(
        "--output {path} exists and is not empty; pass --overwrite to replace the dataset there, \
         or name another directory"
    )]
    Occupied {
        /// The output.
        path: PathBuf,
    },
    /// The dataset cannot be written.
    #[error(transparent)]
    Data(#[from] dflash_data::Error),
    /// A row has no layout that we know, or its columns are wrong.
    #[error(
        "{path}:{line}: {reason}; fix or delete the row, or pass --skip-bad-rows to drop such rows"
    )]
    BadRow {
        /// The data file.
        path: PathBuf,
        /// 1-based line, or 1-based row of a Parquet file.
        line: usize,
        /// What is wrong with it.
        reason: String,
    },
    /// A word that is neither a path nor a preset.
    #[error(
        "--data {spec}: no such file, directory or preset; the presets are {presets}, and \
         hf:OWNER/NAME[:CONFIG[:SPLIT]] names any dataset of the Hub"
    )]
    UnknownData {
        /// The word.
        spec: String,
        /// Names of all presets.
        presets: String,
    },
    /// A file whose kind we do not read.
    #[error("--data {path}: not a .jsonl, .json or .parquet file")]
    UnknownFile {
        /// The file.
        path: PathBuf,
    },
    /// A directory without data files.
    #[error("--data {path}: no .jsonl, .json or .parquet file in this directory")]
    NoFiles {
        /// The directory.
        path: PathBuf,
    },
    /// A directory that is a prepared dataset already.
    #[error(
        "--data {path} is an Arrow dataset on disk, not rows of conversations; pass the JSON or \
         Parquet files it was made from"
    )]
    AlreadyPrepared {
        /// The directory.
        path: PathBuf,
    },
    /// A Parquet file cannot be read.
    #[error("{path} is not a readable Parquet file")]
    Parquet {
        /// The file.
        path: PathBuf,
        /// The reader's complaint.
        #[source]
        source: parquet::errors::ParquetError,
    },
    /// The tokenizer or a dataset cannot be fetched.
    #[error(transparent)]
    Hub(#[from] dflash_hub::Error),
    /// The sources hold no rows at all.
    #[error("no rows in {data}; is it the right file?")]
    Empty {
        /// The sources.
        data: String,
    },
    /// Every row was dropped.
    #[error("none of the {rows} rows can be trained on: {reasons}")]
    NothingLeft {
        /// Rows read.
        rows: u64,
        /// How many were dropped for which reason.
        reasons: String,
    },
    /// A setting that makes no sense.
    #[error(transparent)]
    Setting(#[from] dflash_settings::Invalid),
    /// The run was asked to stop.
    #[error("interrupted; nothing was written")]
    Interrupted,
}
