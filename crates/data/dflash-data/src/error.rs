//! Errors of prepared datasets.

use std::io;
use std::path::{Path, PathBuf};

use arrow_schema::ArrowError;

/// An error in a dataset directory, naming the file, column or row. Rows count from 0 over the
/// whole dataset.
#[expect(missing_docs, reason = "the messages say what the variants and their fields are")]
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error(
        "{path} is not a prepared dataset ({missing} is missing); {}", how_to_prepare(.path)
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

/// How to come from what is at `path` to a dataset: never by writing over it.
fn how_to_prepare(path: &Path) -> String {
    let shown = path.display();
    if path.is_file() || holds_conversations(path) {
        return format!(
            "prepare it first: `dflash prepare --data {shown} --output DIR`, and pass DIR here"
        );
    }
    match path.exists() {
        true => "name the directory that `dflash prepare` wrote (its --output)".to_owned(),
        false => format!("make one with `dflash prepare --data FILE --output {shown}`"),
    }
}

/// Whether a directory has files of the endings that `dflash prepare` reads.
fn holds_conversations(dir: &Path) -> bool {
    let is_data = |path: &Path| {
        let ending = path.extension().and_then(|ending| ending.to_str());
        ending.is_some_and(|ending| ["jsonl", "json", "ndjson", "parquet"].contains(&ending))
    };
    let entries = std::fs::read_dir(dir).into_iter().flatten().flatten();
    entries.map(|entry| entry.path()).any(|path| is_data(&path))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_a_dataset_is_never_to_be_written_over() {
        let dir = tempfile::tempdir().unwrap();
        let said = |path: &Path| {
            Error::NotADataset { path: path.into(), missing: "directory" }.to_string()
        };
        let raw = dir.path().join("raw.jsonl");
        let absent = said(&raw);
        assert!(absent.contains(&format!("--data FILE --output {}", raw.display())), "{absent}");
        let empty = said(dir.path());
        assert!(empty.contains("the directory that `dflash prepare` wrote"), "{empty}");
        std::fs::write(&raw, "{}").unwrap();
        for path in [&raw, dir.path()] {
            let told = said(path);
            let expected = format!("`dflash prepare --data {} --output DIR`", path.display());
            assert!(told.contains(&expected), "{told}");
        }
    }
}
