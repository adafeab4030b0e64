//! Reads the arguments of `--data` as records, one at a time.

mod files;
mod sample;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use dflash_chat::RawRow;
use dflash_hub::{Hub, Split};
use dflash_settings::{DATA_PRESETS, did_you_mean};
use serde::Serialize;
use serde_json::Value;

use crate::error::Error;
use sample::sampled;

/// What works where the Hub does not.
const LOCAL_FILES: &str =
    "local files work too: --data PATH.jsonl (or .json, .parquet, or a directory of them)";

/// One argument of `--data` and its files.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Source {
    pub(crate) data: String,
    pub(crate) files: Vec<PathBuf>,
    /// Samples from this source, if those of a source stay together: not if rows are shuffled.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) rows: Option<u64>,
}

pub(crate) type Records<'a> = Box<dyn Iterator<Item = Result<Record, Error>> + 'a>;

/// One row of the input, parsed or not, with its place.
#[derive(Debug)]
pub(crate) struct Record {
    pub(crate) path: Arc<Path>,
    /// 1-based line, or 1-based row of a Parquet file.
    pub(crate) line: usize,
    pub(crate) content: Content,
    /// What the row takes in memory, about.
    pub(crate) bytes: u64,
    /// Bytes of the file, compressed or not, read since the row before.
    pub(crate) file_bytes: u64,
}

#[derive(Debug)]
pub(crate) enum Content {
    Json(RawRow),
    Value(Value),
    /// A row that is not text, and why.
    Refused(String),
}

impl Record {
    pub(crate) fn place(&self) -> String {
        format!("{}:{}", self.path.display(), self.line)
    }

    /// Takes the row out of the record, because rows can be large.
    ///
    /// # Errors
    /// What is wrong with it, without its place.
    pub(crate) fn take_parsed(&mut self) -> Result<Value, String> {
        match std::mem::replace(&mut self.content, Content::Value(Value::Null)) {
            Content::Json(row) => row.parse(&self.path).map_err(|error| match error {
                dflash_chat::Error::Json { reason, .. } => format!("not valid JSON: {reason}"),
                other => other.to_string(),
            }),
            Content::Value(value) => Ok(value),
            Content::Refused(reason) => Err(reason),
        }
    }
}

/// All records of all files, limited and shuffled as requested.
pub(crate) fn read(
    files: &[PathBuf],
    limit: Option<usize>,
    shuffle_seed: Option<u64>,
) -> Records<'_> {
    let records = files.iter().flat_map(|path| files::records(path));
    match shuffle_seed {
        None => Box::new(records.take(limit.unwrap_or(usize::MAX))),
        Some(seed) => match sampled(records, limit, seed) {
            Ok(kept) => Box::new(kept.into_iter().map(Ok)),
            Err(error) => Box::new(std::iter::once(Err(error))),
        },
    }
}

/// Where a source's files are.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum SourceLocation {
    /// On this machine.
    Local(Vec<PathBuf>),
    /// Still to be fetched.
    Hub(Split),
}

/// Finds out what each argument stands for, without fetching anything.
pub(crate) fn locate(specs: &[String]) -> Result<Vec<(String, SourceLocation)>, Error> {
    specs.iter().map(|spec| Ok((spec.clone(), place(spec)?))).collect()
}

/// Fetches files that are on the Hub.
pub(crate) fn fetch(
    places: Vec<(String, SourceLocation)>,
    stop: &AtomicBool,
) -> Result<Vec<Source>, Error> {
    let fetched = |(data, place)| {
        let files = match place {
            SourceLocation::Local(files) => files,
            SourceLocation::Hub(split) => Hub::from_env().split(&split, LOCAL_FILES, stop)?,
        };
        Ok(Source { data, files, rows: None })
    };
    places.into_iter().map(fetched).collect()
}

/// Rows of conversations from the same arguments as those of `prepare`, for commands that do something else
/// with them.
#[derive(Debug, Clone)]
pub struct Input {
    /// The files, in the order of the arguments.
    pub files: Vec<PathBuf>,
}

/// A row of the input with its place.
#[derive(Debug, Clone, PartialEq)]
pub struct InputRow {
    /// The file.
    pub path: PathBuf,
    /// 1-based line, or 1-based row of a Parquet file.
    pub line: usize,
    /// The row.
    pub row: Value,
}

impl Input {
    /// Finds the files that `specs` stand for, and fetches those on the Hub.
    ///
    /// # Errors
    /// [`Error::UnknownData`], [`Error::UnknownFile`], [`Error::NoFiles`], [`Error::Hub`].
    pub fn open(specs: &[String], stop: &AtomicBool) -> Result<Self, Error> {
        let sources = fetch(locate(specs)?, stop)?;
        Ok(Self { files: sources.into_iter().flat_map(|source| source.files).collect() })
    }

    /// At most `limit` rows, in order.
    ///
    /// # Errors
    /// Of an item: a file that cannot be read, or a row that cannot be parsed.
    pub fn rows(&self, limit: Option<usize>) -> impl Iterator<Item = Result<InputRow, Error>> + '_ {
        read(&self.files, limit, None).map(|record| {
            let mut record = record?;
            let (path, line) = (record.path.to_path_buf(), record.line);
            match record.take_parsed() {
                Ok(row) => Ok(InputRow { path, line, row }),
                Err(reason) => Err(Error::UnreadableRow { path, line, reason }),
            }
        })
    }
}

fn place(spec: &str) -> Result<SourceLocation, Error> {
    let path = Path::new(spec);
    if path.is_dir() {
        return files::of_directory(path).map(SourceLocation::Local);
    }
    if path.is_file() {
        return match files::is_known(path) {
            true => Ok(SourceLocation::Local(vec![path.to_path_buf()])),
            false => Err(Error::UnknownFile { path: path.into() }),
        };
    }
    let unknown = || {
        let names = DATA_PRESETS.map(|(name, _)| name);
        let guess = did_you_mean(spec, names);
        Error::UnknownData { spec: spec.to_owned(), presets: names.join(", "), guess }
    };
    let preset = DATA_PRESETS.iter().find(|(name, _)| *name == spec);
    let name = preset.map_or(spec, |(_, name)| name);
    let parts: Vec<&str> = name.strip_prefix("hf:").ok_or_else(unknown)?.split(':').collect();
    let (repo, config, split) = match parts[..] {
        [repo] => (repo, "default", "train"),
        [repo, split] => (repo, "default", split),
        [repo, config, split] => (repo, config, split),
        _ => return Err(unknown()),
    };
    if !repo.contains('/') {
        return Err(unknown());
    }
    Ok(SourceLocation::Hub(Split { repo: repo.into(), config: config.into(), split: split.into() }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_stand_for_files_presets_or_repositories() {
        let check = |spec: &str, repo: &str, config: &str, split: &str| {
            let [repo, config, split] = [repo, config, split].map(str::to_owned);
            assert_eq!(
                place(spec).unwrap(),
                SourceLocation::Hub(Split { repo, config, split }),
                "{spec}"
            );
        };
        check("sharegpt", "Aeala/ShareGPT_Vicuna_unfiltered", "default", "train");
        check("nemotron", "nvidia/Llama-Nemotron-Post-Training-Dataset", "SFT", "chat");
        check("gsm8k", "openai/gsm8k", "main", "train");
        check("ultrachat", "HuggingFaceH4/ultrachat_200k", "default", "train_sft");
        check("hf:a/b", "a/b", "default", "train");
        check("hf:a/b:test", "a/b", "default", "test");
        check("hf:a/b:en:test", "a/b", "en", "test");
        for spec in ["sharegtp", "hf:a", "hf:a/b:c:d:e", "/nonexistent/file.jsonl"] {
            let error = place(spec).unwrap_err().to_string();
            assert!(error.contains(&format!("--data {spec}: no such file")), "{error}");
            assert!(error.contains("sharegpt, ultrachat, gsm8k"), "{error}");
        }
    }

    #[test]
    fn directories_give_their_data_files_in_order() {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name);
        let check_error = |path: &Path, expect: &str| {
            let error = place(path.to_str().unwrap()).unwrap_err().to_string();
            assert!(error.contains(expect), "{error}");
        };
        check_error(dir.path(), "no .jsonl, .json or .parquet file");
        for name in ["b.jsonl", "a.json", "README.md"] {
            std::fs::write(path(name), "").unwrap();
        }
        let found = place(dir.path().to_str().unwrap()).unwrap();
        assert_eq!(found, SourceLocation::Local(vec![path("a.json"), path("b.jsonl")]));
        check_error(&path("README.md"), "not a .jsonl, .json or .parquet");
        std::fs::write(path("state.json"), "{}").unwrap();
        std::fs::write(path("dataset_info.json"), "{}").unwrap();
        check_error(dir.path(), "is an Arrow dataset on disk");
    }
}
