//! Errors while turning conversations into a dataset.

use std::path::{Path, PathBuf};

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
    #[error("{path}:{line}: {reason}; fix or delete the row")]
    UnreadableRow { path: PathBuf, line: usize, reason: String },
    #[error(
        "--data {spec}: no such file, directory or preset; the presets are {presets}, and \
         hf:OWNER/NAME[:CONFIG[:SPLIT]] names any dataset of the Hub{guess}"
    )]
    UnknownData { spec: String, presets: String, guess: String },
    #[error("--data {path}: not a .jsonl, .json or .parquet file{}", way_out(.path))]
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

/// How a file in another format becomes one that is read.
fn way_out(path: &Path) -> String {
    let ending = path.extension().and_then(|ending| ending.to_str()).unwrap_or_default();
    let shown = path.display();
    match ending.to_lowercase().as_str() {
        "csv" | "tsv" => {
            let tabs = if ending.eq_ignore_ascii_case("tsv") { ", sep='\\t'" } else { "" };
            format!(
                "; convert it: python3 -c \"import pandas; pandas.read_csv('{shown}'{tabs})\
                 .to_json('{}', orient='records', lines=True)\", with columns such as question and answer",
                path.with_extension("jsonl").display()
            )
        }
        "gz" | "zst" | "xz" | "bz2" | "zip" | "tar" => "; unpack it first".to_owned(),
        "arrow" => "; pass the JSON or Parquet files that it was made from".to_owned(),
        "txt" | "md" => "; conversations are needed, one JSON object a line, such as \
                         {\"question\": \"...\", \"answer\": \"...\"}"
            .to_owned(),
        _ => String::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn another_format_is_refused_with_the_way_to_one_that_is_read() {
        let said = |path: &str| Error::UnknownFile { path: path.into() }.to_string();
        let csv = said("chats.csv");
        assert!(csv.contains("read_csv('chats.csv').to_json('chats.jsonl'"), "{csv}");
        assert!(said("chats.tsv").contains("sep='\\t'"));
        assert!(said("chats.jsonl.gz").ends_with("; unpack it first"));
        assert!(said("README").ends_with("not a .jsonl, .json or .parquet file"));
    }
}
