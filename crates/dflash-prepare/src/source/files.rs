//! Records of JSON, JSON Lines and Parquet files.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use dflash_text::{RawRows, raw_rows};
use parquet::file::reader::{FileReader, SerializedFileReader};
use parquet::record::reader::RowIter;

use super::{Content, Record};
use crate::error::Error;

/// File name endings that we read.
const ENDINGS: [&str; 4] = ["jsonl", "json", "parquet", "ndjson"];

/// Whether the file's ending is one that we read.
pub(super) fn is_known(path: &Path) -> bool {
    path.extension().is_some_and(|ending| ENDINGS.iter().any(|known| ending == *known))
}

/// The data files below a directory, in order of their paths.
pub(super) fn of_directory(dir: &Path) -> Result<Vec<PathBuf>, Error> {
    if dir.join("state.json").is_file() && dir.join("dataset_info.json").is_file() {
        return Err(Error::AlreadyPrepared { path: dir.into() });
    }
    let mut files = Vec::new();
    collect(dir, &mut files)?;
    files.sort();
    match files.is_empty() {
        true => Err(Error::NoFiles { path: dir.into() }),
        false => Ok(files),
    }
}

fn collect(dir: &Path, files: &mut Vec<PathBuf>) -> Result<(), Error> {
    let read = |source| dflash_text::Error::Read { path: dir.into(), source };
    for entry in std::fs::read_dir(dir).map_err(read)? {
        let path = entry.map_err(read)?.path();
        if path.is_dir() {
            collect(&path, files)?;
        } else if is_known(&path) {
            files.push(path);
        }
    }
    Ok(())
}

/// Iterator over the records of one file.
pub(crate) struct FileRecords {
    path: Arc<Path>,
    rows: Rows,
    row: usize,
}

enum Rows {
    Json(Box<RawRows>),
    Parquet { rows: Box<RowIter<'static>>, bytes_per_row: u64 },
}

impl FileRecords {
    pub(crate) fn open(path: &Path) -> Result<Self, Error> {
        let rows = match path.extension().is_some_and(|ending| ending == "parquet") {
            true => open_parquet(path)?,
            false => Rows::Json(Box::new(raw_rows(path)?)),
        };
        Ok(Self { path: path.into(), rows, row: 0 })
    }
}

impl Iterator for FileRecords {
    type Item = Result<Record, Error>;

    fn next(&mut self) -> Option<Self::Item> {
        self.row += 1;
        let (line, content, bytes) = match &mut self.rows {
            Rows::Json(rows) => match rows.next()? {
                Ok(row) => {
                    let bytes = row.bytes.len() as u64 + 1;
                    (row.line, Content::Json(row.bytes), bytes)
                }
                Err(error) => return Some(Err(error.into())),
            },
            Rows::Parquet { rows, bytes_per_row } => match rows.next()? {
                Ok(row) => (self.row, Content::Value(row.to_json_value()), *bytes_per_row),
                Err(error) => return Some(Err(parquet_error(&self.path)(error))),
            },
        };
        Some(Ok(Record { path: Arc::clone(&self.path), line, content, bytes }))
    }
}

fn open_parquet(path: &Path) -> Result<Rows, Error> {
    let read = |source| dflash_text::Error::Read { path: path.into(), source };
    let file = File::open(path).map_err(read)?;
    let size = file.metadata().map_err(read)?.len();
    let reader = SerializedFileReader::new(file).map_err(parquet_error(path))?;
    let count = u64::try_from(reader.metadata().file_metadata().num_rows()).unwrap_or(0);
    let rows = RowIter::from_file_into(Box::new(reader));
    Ok(Rows::Parquet { rows: Box::new(rows), bytes_per_row: size / count.max(1) })
}

fn parquet_error(path: &Path) -> impl FnOnce(parquet::errors::ParquetError) -> Error {
    let path = path.to_path_buf();
    move |source| Error::Parquet { path, source }
}
