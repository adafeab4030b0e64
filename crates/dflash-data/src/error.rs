//! What can be wrong with a prepared dataset.

use std::io;
use std::path::PathBuf;

use arrow::error::ArrowError;

/// A fault of a dataset directory, naming the file, column or row.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The path is not the directory of a dataset.
    #[error(
        "{path} is not a prepared dataset ({missing} is missing); make one with `dflash prepare \
         --output {path}`"
    )]
    NotADataset {
        /// The directory as given.
        path: PathBuf,
        /// What should be in it.
        missing: &'static str,
    },
    /// The directory holds several splits.
    #[error("{path} holds several splits; pass one of them, such as {path}/train")]
    SeveralSplits {
        /// The directory as given.
        path: PathBuf,
    },
    /// A JSON file of the directory does not parse.
    #[error("{path} is not valid JSON")]
    Json {
        /// The file.
        path: PathBuf,
        /// The parser's complaint.
        #[source]
        source: serde_json::Error,
    },
    /// `state.json` lists no data files.
    #[error("{path} lists no data files")]
    NoShards {
        /// The file.
        path: PathBuf,
    },
    /// A shard is not an Arrow IPC stream, or is cut short.
    #[error("{path} is not a whole Arrow stream file: {reason}; prepare the dataset again")]
    BrokenShard {
        /// The shard.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// A column is missing.
    #[error("{path} has no column {column}; its columns are [{found}]")]
    NoColumn {
        /// The shard.
        path: PathBuf,
        /// The column.
        column: &'static str,
        /// The columns that it has.
        found: String,
    },
    /// A column has a type that does not fit.
    #[error("{path}: column {column} must be a list of {expected}, found {found}")]
    ColumnType {
        /// The shard.
        path: PathBuf,
        /// The column.
        column: &'static str,
        /// What its items should be.
        expected: &'static str,
        /// The Arrow type found.
        found: String,
    },
    /// A column has null entries.
    #[error("{path}: column {column} has null entries")]
    Nulls {
        /// The shard.
        path: PathBuf,
        /// The column.
        column: &'static str,
    },
    /// The two columns of a row differ in length.
    #[error("{path}: row {row} has {input_ids} input_ids but {loss_mask} loss_mask entries")]
    MaskLength {
        /// The dataset or shard.
        path: PathBuf,
        /// The row, counted over the whole dataset from 0.
        row: usize,
        /// Entries in `input_ids`.
        input_ids: usize,
        /// Entries in `loss_mask`.
        loss_mask: usize,
    },
    /// A row index beyond the end.
    #[error("row {row} asked of a dataset of {rows} rows")]
    RowRange {
        /// The index.
        row: usize,
        /// Rows there are.
        rows: usize,
    },
    /// A token id that no vocabulary has.
    #[error("row {row}: token id {id} is not between 0 and 2147483647")]
    TokenId {
        /// The row, counted from 0.
        row: usize,
        /// The id.
        id: i64,
    },
    /// The directory to replace holds files that are not a dataset's.
    #[error("{path} holds {file}, which is not part of a dataset; not overwriting it")]
    ForeignFile {
        /// The directory.
        path: PathBuf,
        /// The entry that does not belong.
        file: String,
    },
    /// A file could not be read.
    #[error("cannot read {path}")]
    Read {
        /// The file.
        path: PathBuf,
        /// The operating system's answer.
        #[source]
        source: io::Error,
    },
    /// A file could not be written.
    #[error(transparent)]
    Files(#[from] dflash_files::Error),
    /// Arrow refused to encode a batch.
    #[error("cannot encode rows for {path}")]
    Encode {
        /// The shard.
        path: PathBuf,
        /// Arrow's complaint.
        #[source]
        source: ArrowError,
    },
}
