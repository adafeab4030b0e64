//! Rows written in order to a file that grows beside its destination, so that a stopped run resumes.
//!
//! `OUTPUT.partial` opens with one line that says what made it; a later run with the same settings
//! continues after its last whole row, any other starts over. Only the finished file appears under
//! its own name, whole.

use std::collections::BTreeMap;
use std::fs::{File, OpenOptions, remove_file};
use std::io::{self, BufRead, BufReader, BufWriter, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::Error;

/// An output file in the making.
#[derive(Debug)]
pub(crate) struct PartialOutput {
    destination: PathBuf,
    path: PathBuf,
    file: BufWriter<File>,
    /// Rows in the file.
    written: usize,
    /// Finished rows that wait for earlier ones.
    waiting: BTreeMap<usize, String>,
}

impl PartialOutput {
    /// Opens the partial file of `destination`, continuing one that the same `settings` began.
    pub(crate) fn open(destination: &Path, settings: &Value) -> Result<Self, Error> {
        let mut name = destination.file_name().unwrap_or_default().to_os_string();
        name.push(".partial");
        let path = destination.with_file_name(name);
        let io = |source| Error::Partial { action: "extend", path: path.clone(), source };
        let mut file = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .open(&path)
            .map_err(io)?;
        let header = format!("{settings}\n");
        let (written, end) = whole_rows(&file, &header).map_err(io)?;
        file.set_len(end).and_then(|()| file.seek(SeekFrom::End(0))).map_err(io)?;
        let mut file = BufWriter::new(file);
        if end == 0 {
            file.write_all(header.as_bytes()).map_err(io)?;
        }
        Ok(Self { destination: destination.into(), path, file, written, waiting: BTreeMap::new() })
    }

    /// Rows that are done already.
    pub(crate) fn written(&self) -> usize {
        self.written
    }

    /// Adds row `number` (counted from 0); it is written once all before it are.
    pub(crate) fn push(&mut self, number: usize, row: &Value) -> Result<(), Error> {
        self.waiting.insert(number, row.to_string());
        while let Some(row) = self.waiting.remove(&self.written) {
            writeln!(self.file, "{row}").map_err(self.failed("extend"))?;
            self.written += 1;
        }
        // A kill at any moment costs the rows in flight, not those in a buffer.
        self.file.flush().map_err(self.failed("extend"))
    }

    /// Moves the rows to their destination and removes the partial file.
    pub(crate) fn finish(self) -> Result<(), Error> {
        debug_assert!(self.waiting.is_empty(), "rows wait for one that never came");
        let mut rows = BufReader::new(File::open(&self.path).map_err(self.failed("read"))?);
        let mut header = String::new();
        rows.read_line(&mut header).map_err(self.failed("read"))?;
        dflash_files::write_atomic(&self.destination, |out| io::copy(&mut rows, out).map(|_| ()))?;
        remove_file(&self.path).map_err(self.failed("remove"))
    }

    fn failed(&self, action: &'static str) -> impl FnOnce(io::Error) -> Error + use<> {
        let path = self.path.clone();
        move |source| Error::Partial { action, path, source }
    }
}

/// Whole rows after a matching header, and where they end; (0, 0) when the header differs.
fn whole_rows(file: &File, header: &str) -> io::Result<(usize, u64)> {
    let mut reader = BufReader::new(file);
    let mut line = Vec::new();
    reader.read_until(b'\n', &mut line)?;
    if line != header.as_bytes() {
        return Ok((0, 0));
    }
    let (mut rows, mut end) = (0, line.len() as u64);
    loop {
        line.clear();
        reader.read_until(b'\n', &mut line)?;
        if line.last() != Some(&b'\n') {
            return Ok((rows, end));
        }
        rows += 1;
        end += line.len() as u64;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn rows_appear_in_order_and_only_when_finished() {
        let dir = tempfile::tempdir().unwrap();
        let destination = dir.path().join("out.jsonl");
        let mut output = PartialOutput::open(&destination, &json!({"model": "m"})).unwrap();
        for number in [1, 0, 2] {
            output.push(number, &json!({ "row": number })).unwrap();
        }
        assert!(!destination.exists());
        output.finish().unwrap();
        let text = std::fs::read_to_string(&destination).unwrap();
        assert_eq!(text, "{\"row\":0}\n{\"row\":1}\n{\"row\":2}\n");
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1);
    }

    #[test]
    fn the_same_settings_continue_and_others_start_over() {
        let dir = tempfile::tempdir().unwrap();
        let destination = dir.path().join("out.jsonl");
        let settings = json!({ "tokens": 3 });
        let mut output = PartialOutput::open(&destination, &settings).unwrap();
        output.push(0, &json!({ "row": 0 })).unwrap();
        output.push(2, &json!({ "row": 2 })).unwrap();
        drop(output);
        // A row that a kill cut short does not count.
        let partial = dir.path().join("out.jsonl.partial");
        let mut file = OpenOptions::new().append(true).open(&partial).unwrap();
        file.write_all(b"{\"row\":").unwrap();
        let mut output = PartialOutput::open(&destination, &settings).unwrap();
        assert_eq!(output.written(), 1);
        output.push(1, &json!({ "row": 1 })).unwrap();
        drop(output);
        assert_eq!(PartialOutput::open(&destination, &settings).unwrap().written(), 2);
        let other = PartialOutput::open(&destination, &json!({ "tokens": 4 })).unwrap();
        assert_eq!(other.written(), 0);
    }
}
