//! Reads the arguments of `--prompts` as rows, one at a time.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;

use dflash_chat::{NameCounts, raw_rows, unread_prompt_columns};
use dflash_hub::{Hub, Split};
use dflash_settings::did_you_mean;
use parquet::file::reader::SerializedFileReader;
use parquet::record::reader::RowIter;
use serde_json::{Map, Value, json};

use super::catalog::{NamedSet, SETS, SetLocation};
use crate::Error;

/// What works where the Hub does not.
const LOCAL_FILE: &str =
    "a file of your own works too: --prompts FILE (JSON, JSONL or Parquet) or NAME=FILE";

/// Stands for every named set.
const ALL: &str = "all";
/// Fields of rows that are prompts already.
const AS_IT_IS: [&str; 5] = ["turns", "messages", "conversations", "conversation", "input_ids"];

/// A set of prompts, not read yet.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PromptSet {
    /// Its name: the set's, the given one, or the file's path.
    pub name: String,
    /// Its name in tables.
    pub title: String,
    named: Option<&'static NamedSet>,
    file: Option<PathBuf>,
}

/// The rows of a set, and where they came from.
#[derive(Debug)]
pub struct SetRows {
    /// A file, or `OWNER/NAME` with configuration and split.
    pub source: String,
    /// The commit of the repository.
    pub revision: Option<String>,
    /// The rows.
    pub rows: Vec<SetRow>,
}

impl SetRows {
    /// Lists on stderr the columns of set `title` that prompts do not use, before hours are spent
    /// on answers.
    pub fn say_unread_columns(&self, title: &str) {
        let unread = self.unread_columns();
        if !unread.is_empty() {
            dflash_io::say(format!("unread columns of {title}: {}", unread.listed("row")));
        }
    }

    /// Columns that prompts do not use, and the number of rows with a value there.
    pub fn unread_columns(&self) -> NameCounts {
        let mut counts = NameCounts::default();
        self.rows.iter().for_each(|row| counts.add_each(unread_prompt_columns(&row.row)));
        counts
    }
}

/// A row with its location.
#[derive(Debug, Clone, PartialEq)]
pub struct SetRow {
    /// The file.
    pub path: PathBuf,
    /// 1-based line, or 1-based row of a Parquet file.
    pub line: usize,
    /// The row, as a conversation, a benchmark row with `turns`, or token ids.
    pub row: Value,
}

/// Resolves every argument, without fetching anything.
///
/// # Errors
/// [`Error::UnknownSet`], [`Error::SameName`].
pub fn locate(words: &[String]) -> Result<Vec<PromptSet>, Error> {
    let mut sets: Vec<PromptSet> = Vec::new();
    for word in words {
        for set in of_word(word)? {
            if sets.iter().any(|known| known.name == set.name) {
                return Err(Error::SameName { name: set.name });
            }
            sets.push(set);
        }
    }
    Ok(sets)
}

fn of_word(word: &str) -> Result<Vec<PromptSet>, Error> {
    let unknown = || {
        let names = SETS.each_ref().map(|set| set.name);
        let mistyped = word.split(',').find(|name| NamedSet::find(name).is_none()).unwrap_or(word);
        let guess = did_you_mean(mistyped, names);
        Error::UnknownSet { word: word.to_owned(), names: names.join(", "), guess }
    };
    if Path::new(word).is_file() {
        return Ok(vec![PromptSet::of_file(word, word)]);
    }
    if let Some((name, path)) = word.split_once('=') {
        return match !name.is_empty() && Path::new(path).is_file() {
            true => Ok(vec![PromptSet::of_file(name, path)]),
            false => Err(unknown()),
        };
    }
    if word == ALL {
        return Ok(SETS.iter().map(PromptSet::of_name).collect());
    }
    let named = |name: &str| NamedSet::find(name).map(PromptSet::of_name).ok_or_else(unknown);
    word.split(',').map(named).collect()
}

impl PromptSet {
    fn of_name(set: &'static NamedSet) -> Self {
        Self { name: set.name.into(), title: set.title.into(), named: Some(set), file: None }
    }

    /// A file named after a set uses that set's wording.
    fn of_file(name: &str, path: &str) -> Self {
        match NamedSet::find(name) {
            Some(set) => Self { file: Some(path.into()), ..Self::of_name(set) },
            None => {
                let file = Some(path.into());
                Self { name: name.into(), title: name.into(), named: None, file }
            }
        }
    }

    /// Reads at most `limit` rows; without a limit, of a named set on the Hub its default number.
    ///
    /// # Errors
    /// Rows that cannot be fetched or read; a row without the set's field.
    pub fn rows(
        &self,
        hub: &Hub,
        limit: Option<usize>,
        stop: &AtomicBool,
    ) -> Result<SetRows, Error> {
        let Some(path) = &self.file else {
            let set = self.named.expect("a set without a file has a name");
            return self.fetched(set, hub, limit.or(set.limit).unwrap_or(usize::MAX), stop);
        };
        let mut rows = Vec::new();
        self.read(path, limit.unwrap_or(usize::MAX), &mut rows)?;
        Ok(SetRows { source: path.display().to_string(), revision: None, rows })
    }

    fn fetched(
        &self,
        set: &NamedSet,
        hub: &Hub,
        limit: usize,
        stop: &AtomicBool,
    ) -> Result<SetRows, Error> {
        let mut rows = Vec::new();
        let mut revision = None;
        let source = match set.place {
            SetLocation::Split(config, split) => {
                let wanted =
                    Split { repo: set.repo.into(), config: config.into(), split: split.into() };
                for path in hub.split(&wanted, LOCAL_FILE, stop)? {
                    revision = revision.or_else(|| commit_of(&path));
                    self.read(&path, limit, &mut rows)?;
                }
                format!("{} ({config}/{split})", set.repo)
            }
            SetLocation::Files(files) => {
                for file in files {
                    if rows.len() < limit {
                        let path = hub.dataset_file(set.repo, file, stop)?;
                        revision = revision.or_else(|| commit_of(&path));
                        self.read(&path, limit, &mut rows)?;
                    }
                }
                set.repo.to_owned()
            }
        };
        Ok(SetRows { source, revision, rows })
    }

    /// Reads a file until there are `limit` rows.
    fn read(&self, path: &Path, limit: usize, rows: &mut Vec<SetRow>) -> Result<(), Error> {
        if path.extension().is_some_and(|ending| ending == "parquet") {
            let open = |source| Error::Open { path: path.into(), source };
            let fault = |source| Error::Parquet { path: path.into(), source };
            let file = File::open(path).map_err(open)?;
            let reader = SerializedFileReader::new(file).map_err(fault)?;
            for (line, row) in (1..).zip(RowIter::from_file_into(Box::new(reader))) {
                if rows.len() >= limit {
                    break;
                }
                rows.push(self.row(path, line, row.map_err(fault)?.to_json_value())?);
            }
            return Ok(());
        }
        for raw in raw_rows(path)? {
            if rows.len() >= limit {
                break;
            }
            let raw = raw?;
            rows.push(self.row(path, raw.line, raw.parse(path)?)?);
        }
        Ok(())
    }

    /// The row as a prompt.
    fn row(&self, path: &Path, line: usize, row: Value) -> Result<SetRow, Error> {
        let is_prompt =
            |row: &Map<String, Value>| AS_IT_IS.iter().any(|key| row.contains_key(*key));
        let row = match (self.named, row) {
            (Some(set), Value::Object(row)) if !is_prompt(&row) => {
                let turns = set.turns(&row).map_err(|field| Error::NoField {
                    path: path.into(),
                    line,
                    set: set.name.into(),
                    field,
                    found: row.keys().map(String::as_str).collect::<Vec<_>>().join(", "),
                })?;
                json!({ "turns": turns })
            }
            (_, row) => row,
        };
        Ok(SetRow { path: path.into(), line, row })
    }
}

/// The commit in the path of a file in the Hub's cache: `.../snapshots/COMMIT/...`.
fn commit_of(path: &Path) -> Option<String> {
    let mut parts = path.components().map(|part| part.as_os_str());
    parts.find(|part| *part == "snapshots")?;
    parts.next().map(|commit| commit.to_string_lossy().into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(words: &[&str]) -> Result<Vec<String>, String> {
        let words: Vec<String> = words.iter().map(ToString::to_string).collect();
        let sets = locate(&words).map_err(|error| error.to_string())?;
        Ok(sets.into_iter().map(|set| set.name).collect())
    }

    #[test]
    fn words_are_names_lists_of_names_or_files() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("own,file.jsonl");
        std::fs::write(&file, "").unwrap();
        let file = file.to_str().unwrap();
        assert_eq!(names(&["gsm8k", "mt-bench"]).unwrap(), ["gsm8k", "mt_bench"]);
        assert_eq!(names(&["gsm8k,swe_bench"]).unwrap(), ["gsm8k", "swe-bench"]);
        assert_eq!(names(&["all"]).unwrap().len(), 10);
        assert_eq!(names(&[file]).unwrap(), [file]);
        let renamed = format!("mine={file}");
        assert_eq!(names(&[&renamed, "aime24"]).unwrap(), ["mine", "aime24"]);
        let unknown = names(&["gsm9k"]).unwrap_err();
        assert!(unknown.contains("--prompts gsm9k: no such file"), "{unknown}");
        assert!(unknown.contains("gsm8k, math500, aime24"), "{unknown}");
        assert!(names(&["mine=/nowhere/x"]).unwrap_err().contains("mine=/nowhere/x"));
        assert!(names(&["gsm8k", "gsm8k"]).unwrap_err().contains("two sets are called gsm8k"));
    }

    #[test]
    fn rows_of_a_named_file_are_asked_as_the_set_is() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("rows.jsonl");
        let text = "{\"question\": \"1+1?\", \"answer\": \"2\"}\n{\"turns\": [\"as it is\"]}\n";
        std::fs::write(&file, text).unwrap();
        let rows = |name: &str, limit| {
            let words = [format!("{name}={}", file.display())];
            let set = locate(&words).unwrap().remove(0);
            set.rows(&Hub::default(), limit, &AtomicBool::new(false))
        };
        // A named set uses only some columns; a file's rows are used as they are.
        assert!(rows("gsm8k", None).unwrap().unread_columns().is_empty());
        let asked = rows("gsm8k", None).unwrap().rows;
        let question = asked[0].row["turns"][0].as_str().unwrap();
        assert!(question.starts_with("1+1?\nPlease reason step by step"), "{question}");
        assert_eq!(asked[1].row, json!({"turns": ["as it is"]}));
        let own = rows("mine", Some(1)).unwrap().rows;
        assert_eq!((own.len(), own[0].line), (1, 1));
        assert_eq!(own[0].row, json!({"question": "1+1?", "answer": "2"}));
        let wrong = rows("math500", None).unwrap_err().to_string();
        assert!(
            wrong.contains(":1: a row of math500 has problem; this one has only question, answer")
        );
    }

    #[test]
    fn columns_that_no_prompt_has_are_counted() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("rows.jsonl");
        let text = "{\"question\": \"q\", \"context\": \"c\"}\n\
                    {\"turns\": [\"q\"], \"id\": 1, \"context\": \"c\"}\n";
        std::fs::write(&file, text).unwrap();
        let set = locate(&[file.display().to_string()]).unwrap().remove(0);
        let rows = set.rows(&Hub::default(), None, &AtomicBool::new(false)).unwrap();
        assert_eq!(rows.unread_columns().listed("row"), "context (2 rows), id (1 row)");
    }

    #[test]
    fn a_commit_is_read_from_the_cache_path() {
        let path = Path::new("/c/datasets--a--b/snapshots/abc123/main/test/0000.parquet");
        assert_eq!(commit_of(path).as_deref(), Some("abc123"));
        assert_eq!(commit_of(Path::new("/data/x.jsonl")), None);
    }
}
