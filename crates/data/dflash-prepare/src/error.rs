//! Errors while turning conversations into a dataset.

use std::path::PathBuf;

/// An error that ends the run. Messages name the object and the remedy; lines (rows of a Parquet
/// file) count from 1.
#[expect(missing_docs, reason = "the messages say what the variants and their fields are")]
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error(transparent)]
    Text(#[from] dflash_chat::Error),
    #[error(
        "--output {path} exists and is not empty; pass --overwrite to replace the dataset there, \
         or name another directory"
    )]
    Occupied { path: PathBuf },
    #[error(transparent)]
    Identity(#[from] dflash_identity::Error),
    #[error(transparent)]
    Data(#[from] dflash_data::Error),
    #[error(
        "{path}:{line}: {reason}; fix or delete the row, or pass --skip-bad-rows to drop such rows"
    )]
    BadRow { path: PathBuf, line: usize, reason: String },
    #[error(
        "--data {spec}: no such file, directory or preset; the presets are {presets}, and \
         hf:OWNER/NAME[:CONFIG[:SPLIT]] names any dataset of the Hub"
    )]
    UnknownData { spec: String, presets: String },
    #[error("--data {path}: not a .jsonl, .json or .parquet file")]
    UnknownFile { path: PathBuf },
    #[error("--data {path}: no .jsonl, .json or .parquet file in this directory")]
    NoFiles { path: PathBuf },
    #[error(
        "--data {path} is an Arrow dataset on disk, not rows of conversations; pass the JSON or \
         Parquet files it was made from"
    )]
    AlreadyPrepared { path: PathBuf },
    #[error("{path} is not a readable Parquet file")]
    Parquet { path: PathBuf, source: parquet::errors::ParquetError },
    #[error(transparent)]
    Hub(#[from] dflash_hub::Error),
    #[error("no rows in {data}; is it the right file?")]
    Empty { data: String },
    #[error("none of the {rows} rows can be trained on: {reasons}")]
    NothingLeft { rows: u64, reasons: String },
    #[error(transparent)]
    Setting(#[from] dflash_settings::Invalid),
    #[error("interrupted; nothing was written")]
    Interrupted,
}
