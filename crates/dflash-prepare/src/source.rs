//! From the words after `--data` to records, read one at a time.

mod files;
mod sample;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use dflash_hub::{Hub, Split};
use dflash_text::RawRow;
use serde_json::Value;

use crate::error::Error;
use crate::preset::{self, PRESETS};

pub(crate) use files::FileRecords;
pub(crate) use sample::sampled;

/// One word after `--data` and the files that it stands for.
#[derive(Debug, Clone)]
pub(crate) struct Source {
    pub(crate) spec: String,
    pub(crate) files: Vec<PathBuf>,
}

/// One row of the input, parsed or not, with its place.
#[derive(Debug)]
pub(crate) struct Record {
    pub(crate) path: Arc<Path>,
    /// 1-based line, or 1-based row of a Parquet file.
    pub(crate) line: usize,
    pub(crate) content: Content,
    /// Share of the file's bytes, for progress.
    pub(crate) bytes: u64,
}

#[derive(Debug)]
pub(crate) enum Content {
    Json(Vec<u8>),
    Value(Value),
}

impl Record {
    pub(crate) fn place(&self) -> String {
        format!("{}:{}", self.path.display(), self.line)
    }

    /// The row as JSON.
    pub(crate) fn parse(&mut self) -> Result<Value, dflash_text::Error> {
        match std::mem::replace(&mut self.content, Content::Value(Value::Null)) {
            Content::Json(bytes) => RawRow { line: self.line, bytes }.parse(&self.path),
            Content::Value(value) => Ok(value),
        }
    }
}

/// Where a source's files are.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Place {
    /// On this machine.
    Local(Vec<PathBuf>),
    /// Still to be fetched.
    Hub(Split),
}

/// Finds out what every word stands for, without fetching anything.
pub(crate) fn locate(specs: &[String]) -> Result<Vec<(String, Place)>, Error> {
    specs.iter().map(|spec| Ok((spec.clone(), place(spec)?))).collect()
}

/// Fetches what is on the Hub.
pub(crate) fn fetch(places: Vec<(String, Place)>, stop: &AtomicBool) -> Result<Vec<Source>, Error> {
    let mut sources = Vec::with_capacity(places.len());
    for (spec, place) in places {
        let files = match place {
            Place::Local(files) => files,
            Place::Hub(split) => Hub::from_env().split(&split, stop)?,
        };
        sources.push(Source { spec, files });
    }
    Ok(sources)
}

fn place(spec: &str) -> Result<Place, Error> {
    let path = Path::new(spec);
    if path.is_dir() {
        return files::of_directory(path).map(Place::Local);
    }
    if path.is_file() {
        return match files::is_known(path) {
            true => Ok(Place::Local(vec![path.to_path_buf()])),
            false => Err(Error::UnknownFile { path: path.into() }),
        };
    }
    if let Some(known) = PRESETS.iter().find(|preset| preset.name == spec) {
        let (repo, config, split) = (known.repo, known.config, known.split);
        return Ok(hub(repo, config, split));
    }
    let unknown = || Error::UnknownData { spec: spec.to_owned(), presets: preset::names() };
    let parts: Vec<&str> = spec.strip_prefix("hf:").ok_or_else(unknown)?.split(':').collect();
    match parts[..] {
        [repo] if repo.contains('/') => Ok(hub(repo, "default", "train")),
        [repo, split] if repo.contains('/') => Ok(hub(repo, "default", split)),
        [repo, config, split] if repo.contains('/') => Ok(hub(repo, config, split)),
        _ => Err(unknown()),
    }
}

fn hub(repo: &str, config: &str, split: &str) -> Place {
    Place::Hub(Split { repo: repo.into(), config: config.into(), split: split.into() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_stand_for_files_presets_or_repositories() {
        let check = |spec: &str, repo: &str, config: &str, split: &str| {
            assert_eq!(place(spec).unwrap(), hub(repo, config, split), "{spec}");
        };
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
        let error = place(dir.path().to_str().unwrap()).unwrap_err().to_string();
        assert!(error.contains("no .jsonl, .json or .parquet file"), "{error}");
        for name in ["b.jsonl", "a.json", "README.md"] {
            std::fs::write(dir.path().join(name), "").unwrap();
        }
        let found = place(dir.path().to_str().unwrap()).unwrap();
        let expect = vec![dir.path().join("a.json"), dir.path().join("b.jsonl")];
        assert_eq!(found, Place::Local(expect));
        let readme = dir.path().join("README.md");
        let error = place(readme.to_str().unwrap()).unwrap_err().to_string();
        assert!(error.contains("not a .jsonl, .json or .parquet"), "{error}");
        std::fs::write(dir.path().join("state.json"), "{}").unwrap();
        std::fs::write(dir.path().join("dataset_info.json"), "{}").unwrap();
        let error = place(dir.path().to_str().unwrap()).unwrap_err().to_string();
        assert!(error.contains("is an Arrow dataset on disk"), "{error}");
    }
}
