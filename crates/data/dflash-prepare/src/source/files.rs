//! Records of JSON, JSON Lines and Parquet files.

use std::fs::{File, Metadata};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use dflash_chat::{is_row_column, raw_rows};
use parquet::errors::ParquetError;
use parquet::file::reader::{FileReader, SerializedFileReader};
use parquet::record::reader::RowIter;
use parquet::record::{Field, Row};
use serde_json::{Map, Value};

use super::{Content, Record, Records};
use crate::error::Error;

/// File name endings that we read.
const ENDINGS: [&str; 4] = ["jsonl", "json", "parquet", "ndjson"];
/// Endings after these of text that is compressed.
const COMPRESSED: [&str; 3] = ["gz", "zst", "zstd"];

/// Files in folders of datasets that describe the data and hold no rows.
const METADATA: [&str; 8] = [
    "config.json",
    "croissant.json",
    "dataset_dict.json",
    "dataset_info.json",
    "dataset_infos.json",
    "metadata.json",
    "schema.json",
    "state.json",
];

/// Whether the file's ending is one that we read, in upper or lower case.
pub(super) fn is_known(path: &Path) -> bool {
    let ending = |path: &Path| Some(path.extension()?.to_str()?.to_lowercase());
    match ending(path).as_deref() {
        Some(last) if COMPRESSED.contains(&last) => ending(&path.with_extension(""))
            .is_some_and(|inner| inner != "parquet" && ENDINGS.contains(&inner.as_str())),
        Some(last) => ENDINGS.contains(&last),
        None => false,
    }
}

/// Whether the file describes data, by its name without an ending of compressed text.
fn is_metadata(path: &Path) -> bool {
    let name = path.file_name().unwrap_or_default().to_string_lossy().to_lowercase();
    let endings = COMPRESSED.map(|ending| format!(".{ending}"));
    let name =
        endings.iter().find_map(|ending| name.strip_suffix(ending.as_str())).unwrap_or(&name);
    METADATA.contains(&name)
}

/// The data files below a directory, in order of their paths. Hidden files, files that describe the
/// data, and links back to a directory that the walk is in are left out.
pub(super) fn of_directory(dir: &Path) -> Result<Vec<PathBuf>, Error> {
    if dir.join("state.json").is_file() && dir.join("dataset_info.json").is_file() {
        return Err(Error::AlreadyPrepared { path: dir.into() });
    }
    let mut files = Vec::new();
    collect(dir, &mut Vec::new(), &mut files)?;
    files.sort();
    match files.is_empty() {
        true => Err(Error::NoFiles { path: dir.into() }),
        false => Ok(files),
    }
}

/// `above` are the directories that the walk is in, without links.
fn collect(dir: &Path, above: &mut Vec<PathBuf>, files: &mut Vec<PathBuf>) -> Result<(), Error> {
    let read = |source| dflash_chat::Error::Read { path: dir.into(), source };
    let real = dir.canonicalize().map_err(read)?;
    if above.contains(&real) {
        return Ok(());
    }
    above.push(real);
    for entry in std::fs::read_dir(dir).map_err(read)? {
        let entry = entry.map_err(read)?;
        let (path, name) = (entry.path(), entry.file_name());
        if name.as_encoded_bytes().starts_with(b".") {
            continue;
        }
        // A link that leads nowhere is told when it is read.
        let metadata = path.metadata().ok();
        if metadata.as_ref().is_some_and(Metadata::is_dir) {
            collect(&path, above, files)?;
        } else if metadata.is_none_or(|it| it.is_file()) && is_known(&path) && !is_metadata(&path) {
            files.push(path);
        }
    }
    above.pop();
    Ok(())
}

/// The records of one file, or the error of opening it.
pub(super) fn records(path: &Path) -> Records<'static> {
    let is_parquet = path.extension().is_some_and(|ending| ending.eq_ignore_ascii_case("parquet"));
    let opened = if is_parquet { parquet_records(path) } else { json_records(path) };
    opened.unwrap_or_else(|error| Box::new(std::iter::once(Err(error))))
}

fn json_records(path: &Path) -> Result<Records<'static>, Error> {
    let path: Arc<Path> = path.into();
    let (mut rows, mut read) = (raw_rows(&path)?, 0);
    Ok(Box::new(std::iter::from_fn(move || {
        let row = match rows.next()? {
            Ok(row) => row,
            Err(error) => return Some(Err(error.into())),
        };
        let file_bytes = rows.file_bytes() - read;
        read += file_bytes;
        let (path, line, bytes) = (Arc::clone(&path), row.line, row.bytes.len() as u64);
        Some(Ok(Record { path, line, content: Content::Json(row), bytes, file_bytes }))
    })))
}

fn parquet_records(path: &Path) -> Result<Records<'static>, Error> {
    let path: Arc<Path> = path.into();
    let read = |source| dflash_chat::Error::Read { path: path.to_path_buf(), source };
    let file = File::open(&path).map_err(read)?;
    let size = file.metadata().map_err(read)?.len();
    let reader = SerializedFileReader::new(file).map_err(parquet_error(&path))?;
    let count = u64::try_from(reader.metadata().file_metadata().num_rows()).unwrap_or(0);
    let bytes = size / count.max(1);
    let rows = RowIter::from_file_into(Box::new(reader));
    Ok(Box::new((1..).zip(rows).map(move |(line, row)| {
        let row = row.map_err(parquet_error(&path))?;
        let content = columns(row).map_or_else(Content::Refused, Content::Value);
        Ok(Record { path: Arc::clone(&path), line, content, bytes, file_bytes: bytes })
    })))
}

/// The row as JSON. Text may be stored as bytes without an annotation, as old Spark and Impala
/// write it; the library's own JSON would encode it as base64, which looks like text. Bytes that
/// are not UTF-8 are ignored in columns that no layout reads, such as an image. Keys that are null in
/// a nested value are left out: Arrow gives them to all rows when one row has them.
///
/// # Errors
/// The name of a column that is read and holds bytes that are not text.
fn columns(row: Row) -> Result<Value, String> {
    let mut columns = Map::new();
    for (name, field) in row.into_columns() {
        let value = match json(&name, &field) {
            Err(reason) if is_row_column(&name) => return Err(reason),
            value => value.unwrap_or_else(|_| "(bytes)".into()),
        };
        columns.insert(name, value);
    }
    Ok(Value::Object(columns))
}

/// A field's value; `name` is its path.
fn json(name: &str, field: &Field) -> Result<Value, String> {
    match field {
        Field::Bytes(bytes) => match std::str::from_utf8(bytes.data()) {
            Ok(text) => Ok(text.into()),
            Err(_) => Err(format!("column {name} holds bytes that are not UTF-8 text")),
        },
        Field::Group(row) => {
            // A column has the keys of all rows: those that this row lacks are null.
            let members = row.get_column_iter().filter(|(_, field)| !matches!(field, Field::Null));
            let member = |(key, field): (&String, &Field)| {
                Ok((key.clone(), json(&format!("{name}.{key}"), field)?))
            };
            members.map(member).collect()
        }
        Field::ListInternal(list) => {
            let item = format!("{name}[]");
            list.elements().iter().map(|field| json(&item, field)).collect()
        }
        Field::MapInternal(map) => {
            let entry = |(key, field): &(Field, Field)| {
                let key = match json(name, key)? {
                    Value::String(key) => key,
                    key => key.to_string(),
                };
                let value = json(&format!("{name}.{key}"), field)?;
                Ok((key, value))
            };
            map.entries().iter().map(entry).collect()
        }
        plain => Ok(plain.to_json_value()),
    }
}

fn parquet_error(path: &Path) -> impl FnOnce(ParquetError) -> Error {
    move |source| Error::Parquet { path: path.into(), source }
}
