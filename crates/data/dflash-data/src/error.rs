//! Errors of prepared datasets.

use std::io;
use std::path::PathBuf;

use arrow_schema::ArrowError;

/// An error in a dataset directory, naming the file, column or row. Rows count from 0 over the
/// whole dataset.
#[expect(missing_docs, reason = "the messages say what the variants and their fields are")]
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error(
        "{path} is not a prepared dataset ({missing} is missing); make one with `dflash prepare \
         --output {path}`"
    )]
    NotADataset { path: PathBuf, missing: &'static str },
    #[error("{path} holds several splits; pass one of them, such as {path}/train")]
    SeveralSplits { path: PathBuf },
    #[error("{path} is not valid JSON")]
    Json { path: PathBuf, source: serde_json::Error },
    #[error("{path} lists no data files")]
    NoShards { path: PathBuf },
    #[error("{path} is not a complete Arrow stream file: {reason}; prepare the dataset again")]
    BrokenShard { path: PathBuf, reason: String },
    #[error("{path} has no column {column}; its columns are [{found}]")]
    NoColumn { path: PathBuf, column: &'static str, found: String },
    #[error("{path}: column {column} must be a list of integers or booleans, found {found}")]
    ColumnType { path: PathBuf, column: &'static str, found: String },
    #[error("{path}: column {column} has null entries")]
    Nulls { path: PathBuf, column: &'static str },
    #[error("{path}: row {row} has {input_ids} input_ids but {loss_mask} loss_mask entries")]
    MaskLength { path: PathBuf, row: usize, input_ids: usize, loss_mask: usize },
    #[error("row {row} requested from a dataset of {rows} rows")]
    RowRange { row: usize, rows: usize },
    #[error("row {row}: token id {id} is not between 0 and 2147483647")]
    TokenId { row: usize, id: i64 },
    #[error("{path} holds {file}, which is not part of a dataset; not overwriting it")]
    ForeignFile { path: PathBuf, file: String },
    #[error("cannot read {path}")]
    Read { path: PathBuf, source: io::Error },
    #[error(transparent)]
    Files(#[from] dflash_io::Error),
    #[error("cannot encode rows for {path}")]
    Encode { path: PathBuf, source: ArrowError },
}
