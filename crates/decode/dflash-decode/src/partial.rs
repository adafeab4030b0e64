//! Resumable output: rows are written in order to a file next to the destination.
//!
//! `OUTPUT.partial` starts with a line that records how it was made; a later run with the same
//! stamp continues after its last complete row. Only the finished file gets the destination name,
//! with `OUTPUT.stamp` next to it, so that more rows can be added later. Files with another stamp,
//! or without one, are rejected unless the user wants to replace them.

use std::collections::BTreeMap;
use std::fs::{File, OpenOptions, TryLockError, remove_file};
use std::io::{self, BufRead, BufReader, BufWriter, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use dflash_identity::{file_digest, hex};
use dflash_io::PendingFile;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use sha2::{Digest, Sha256};

use crate::Error;
use crate::stamp::Stamp;

/// The first line of a partial file.
#[derive(Debug, Serialize, Deserialize)]
struct Header {
    stamp: Stamp,
    /// Number of prompts whose rows were copied from the finished file, and their number of lines.
    /// Each later line has the rows of one prompt.
    prompts: usize,
    lines: usize,
    /// Digest of the finished file that this one will replace.
    replaces: Option<String>,
}

/// The stamp file of a finished file.
#[derive(Debug, Serialize, Deserialize)]
struct Made {
    stamp: Stamp,
    /// Answered prompts, and lines of the file.
    prompts: usize,
    lines: usize,
    /// Digest of the file.
    digest: String,
}

/// The existing state of an output.
#[derive(Debug)]
pub(crate) enum Found {
    /// Nothing usable; has the digest of a file that the user wants to replace.
    Nothing(Option<String>),
    /// A partial file with the answers to this many prompts.
    Partial(usize),
    /// The finished file, with the answers to this many prompts.
    Finished(usize, FinishedFile),
}

/// A finished file that can be extended.
#[derive(Debug)]
pub(crate) struct FinishedFile {
    lines: usize,
    digest: String,
}

impl Found {
    /// Number of answered prompts.
    pub(crate) fn prompts(&self) -> usize {
        match self {
            Self::Nothing(_) => 0,
            Self::Partial(prompts) | Self::Finished(prompts, _) => *prompts,
        }
    }
}

/// Looks for an earlier run's files of `destination` with at most `wanted` prompts. A file with
/// another stamp is an error, or is ignored with `overwrite`.
///
/// # Errors
/// [`Error::OtherSettings`], [`Error::Unknown`], [`Error::TooMany`], or the files cannot be read.
pub(crate) fn find(
    destination: &Path,
    stamp: &Stamp,
    wanted: usize,
    overwrite: bool,
) -> Result<Found, Error> {
    refuse_if_in_use(&beside(destination, "partial"))?;
    let existing = match destination.metadata() {
        Ok(facts) if facts.is_file() => Some(file_digest(destination)?),
        Ok(_) => return Err(Error::NotAFile { path: destination.into() }),
        Err(_) => None,
    };
    let found =
        known(destination, stamp, existing.as_deref()).and_then(|found| match found.prompts() {
            prompts if prompts > wanted => {
                Err(Error::TooMany { path: destination.into(), prompts, wanted })
            }
            _ => Ok(found),
        });
    match found {
        Err(error) if overwrite && error.is_other_output() => Ok(Found::Nothing(existing)),
        found => found,
    }
}

fn known(destination: &Path, stamp: &Stamp, existing: Option<&str>) -> Result<Found, Error> {
    let path = beside(destination, "partial");
    let of_another = |path: &Path, there: &Stamp| Error::OtherSettings {
        path: path.into(),
        differences: there.differences(stamp),
    };
    let made = existing.and_then(|digest| {
        let bytes = std::fs::read(beside(destination, "stamp")).ok()?;
        let made: Made = serde_json::from_slice(&bytes).ok()?;
        (made.digest == digest).then_some(made)
    });
    if path.exists() {
        let (header, lines) = read_partial(&path)?;
        if header.stamp != *stamp {
            return Err(of_another(&path, &header.stamp));
        }
        // A run killed at the very end leaves both the finished and the partial file.
        let just_made = made.is_some_and(|made| made.stamp == *stamp);
        if existing != header.replaces.as_deref() && existing.is_some() && !just_made {
            return Err(Error::Unknown { path: destination.into() });
        }
        return Ok(Found::Partial(header.prompts + lines - header.lines));
    }
    match made {
        None if existing.is_none() => Ok(Found::Nothing(None)),
        None => Err(Error::Unknown { path: destination.into() }),
        Some(made) if made.stamp != *stamp => Err(of_another(destination, &made.stamp)),
        Some(Made { prompts, lines, digest, .. }) => {
            Ok(Found::Finished(prompts, FinishedFile { lines, digest }))
        }
    }
}

fn refuse_if_in_use(path: &Path) -> Result<(), Error> {
    let file = path.is_file().then(|| File::open(path).ok()).flatten();
    match file.map(|file| file.try_lock()) {
        Some(Err(TryLockError::WouldBlock)) => Err(Error::InUse { path: path.into() }),
        _ => Ok(()),
    }
}

fn beside(destination: &Path, ending: &str) -> PathBuf {
    let mut name = destination.file_name().unwrap_or_default().to_os_string();
    name.push(".");
    name.push(ending);
    destination.with_file_name(name)
}

/// An output file in progress.
#[derive(Debug)]
pub(crate) struct PartialOutput {
    destination: PathBuf,
    path: PathBuf,
    file: BufWriter<File>,
    header: Header,
    /// Number of prompts whose rows are in the file.
    written: usize,
    /// Rows of prompts that wait for earlier ones.
    waiting: BTreeMap<usize, String>,
}

impl PartialOutput {
    /// Continues what was found, or starts a new file.
    ///
    /// # Errors
    /// I/O, or another run has the file open.
    pub(crate) fn open(destination: &Path, stamp: &Stamp, found: Found) -> Result<Self, Error> {
        let path = beside(destination, "partial");
        if !matches!(found, Found::Partial(_)) {
            begin(&path, destination, stamp, found)?;
        }
        let io = |source| Error::Partial { action: "extend", path: path.clone(), source };
        let mut file = OpenOptions::new().read(true).write(true).open(&path).map_err(io)?;
        if let Err(TryLockError::WouldBlock) = file.try_lock() {
            return Err(Error::InUse { path });
        }
        let (header, lines) = read_partial(&path)?;
        let end = whole_lines(&file).map_err(io)?.1;
        file.set_len(end).and_then(|()| file.seek(SeekFrom::End(0))).map_err(io)?;
        let written = header.prompts + lines - header.lines;
        let file = BufWriter::new(file);
        let destination = destination.into();
        Ok(Self { destination, path, file, header, written, waiting: BTreeMap::new() })
    }

    /// Number of prompts already done.
    pub(crate) fn written(&self) -> usize {
        self.written
    }

    /// Adds the rows of prompt `number` (counted from 0), to be written after all earlier ones.
    pub(crate) fn push(&mut self, number: usize, rows: &[Value]) -> Result<(), Error> {
        self.waiting.insert(number, Value::from(rows).to_string());
        while let Some(rows) = self.waiting.remove(&self.written) {
            writeln!(self.file, "{rows}").map_err(self.failed("extend"))?;
            self.written += 1;
        }
        // A kill then loses only rows in flight, not buffered ones.
        self.file.flush().map_err(self.failed("extend"))
    }

    /// Moves the rows to their destination, removes the partial file, and returns the row count.
    ///
    /// # Errors
    /// I/O.
    pub(crate) fn finish(self) -> Result<usize, Error> {
        debug_assert!(self.waiting.is_empty(), "rows wait for one that never came");
        let mut pending = PendingFile::create(&self.destination)?;
        let (mut lines, mut hash) = (0, Sha256::new());
        self.each_row(|row| {
            lines += 1;
            hash.update(row);
            pending.write(row.as_bytes())
        })?;
        let digest = hex(hash);
        let (stamp, prompts) = (self.header.stamp.clone(), self.written);
        let made = serde_json::to_vec(&Made { stamp, prompts, lines, digest });
        // The stamp first, since without it the file could not be extended.
        let made = made.expect("a stamp holds numbers and strings");
        dflash_io::write_bytes(&beside(&self.destination, "stamp"), &made)?;
        pending.commit()?;
        remove_file(&self.path).map_err(self.failed("remove"))?;
        Ok(lines)
    }

    /// Passes every row as a line to `sink`.
    fn each_row(
        &self,
        mut sink: impl FnMut(&str) -> Result<(), dflash_io::Error>,
    ) -> Result<(), Error> {
        let file = File::open(&self.path).map_err(self.failed("read"))?;
        for (number, line) in BufReader::new(file).lines().enumerate().skip(1) {
            let line = line.map_err(self.failed("read"))?;
            if number <= self.header.lines {
                sink(&format!("{line}\n"))?;
                continue;
            }
            let rows: Vec<Value> =
                serde_json::from_str(&line).map_err(|_| damaged(&self.path, number + 1))?;
            for row in rows {
                sink(&format!("{row}\n"))?;
            }
        }
        Ok(())
    }

    fn failed(&self, action: &'static str) -> impl Fn(io::Error) -> Error + use<> {
        let path = self.path.clone();
        move |source| Error::Partial { action, path: path.clone(), source }
    }
}

/// Starts a partial file, with the rows of a finished file if there is one.
fn begin(path: &Path, destination: &Path, stamp: &Stamp, found: Found) -> Result<(), Error> {
    let stamp = stamp.clone();
    let (header, is_continued) = match found {
        Found::Finished(prompts, FinishedFile { lines, digest }) => {
            (Header { stamp, prompts, lines, replaces: Some(digest) }, true)
        }
        Found::Nothing(replaces) => (Header { stamp, prompts: 0, lines: 0, replaces }, false),
        Found::Partial(_) => return Ok(()),
    };
    let header = serde_json::to_string(&header).expect("a stamp holds numbers and strings");
    dflash_io::write_atomic(path, |out| {
        writeln!(out, "{header}")?;
        if is_continued {
            io::copy(&mut File::open(destination)?, out)?;
        }
        Ok(())
    })?;
    Ok(())
}

/// The header of a partial file and the number of complete lines after it.
fn read_partial(path: &Path) -> Result<(Header, usize), Error> {
    let io = |source| Error::Partial { action: "read", path: path.into(), source };
    if !path.is_file() {
        return Err(Error::NotAFile { path: path.into() });
    }
    let file = File::open(path).map_err(io)?;
    let mut first = String::new();
    let unknown = || Error::Unknown { path: path.into() };
    BufReader::new(&file).read_line(&mut first).map_err(|_| unknown())?;
    let header: Header = serde_json::from_str(&first).map_err(|_| unknown())?;
    let mut file = file;
    file.rewind().map_err(io)?;
    let lines = whole_lines(&file).map_err(io)?.0;
    if lines < header.lines {
        return Err(damaged(path, lines + 1));
    }
    Ok((header, lines))
}

fn damaged(path: &Path, line: usize) -> Error {
    Error::Damaged { path: path.into(), line }
}

/// The number of complete lines after the first one, and where they end.
fn whole_lines(file: &File) -> io::Result<(usize, u64)> {
    let mut reader = BufReader::new(file);
    let mut line = Vec::new();
    let (mut lines, mut end) = (0usize, 0);
    loop {
        line.clear();
        reader.read_until(b'\n', &mut line)?;
        if line.last() != Some(&b'\n') {
            return Ok((lines.saturating_sub(1), end));
        }
        lines += 1;
        end += line.len() as u64;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    struct OutputDir(tempfile::TempDir);

    impl OutputDir {
        fn new() -> Self {
            Self(tempfile::tempdir().unwrap())
        }

        fn output(&self) -> PathBuf {
            self.0.path().join("out.jsonl")
        }

        fn find(&self, stamp: &Stamp, wanted: usize, overwrite: bool) -> Result<Found, Error> {
            find(&self.output(), stamp, wanted, overwrite)
        }

        /// Opens the output for up to 9 prompts.
        fn open(&self, stamp: &Stamp) -> PartialOutput {
            let found = self.find(stamp, 9, false).unwrap();
            PartialOutput::open(&self.output(), stamp, found).unwrap()
        }

        fn refusal(&self, stamp: &Stamp, wanted: usize) -> String {
            let error = self.find(stamp, wanted, false).unwrap_err();
            assert!(error.to_string().contains("--overwrite"), "{error}");
            assert!(matches!(self.find(stamp, wanted, true), Ok(Found::Nothing(_))));
            error.to_string()
        }

        fn text(&self) -> String {
            std::fs::read_to_string(self.output()).unwrap()
        }
    }

    fn row(number: usize) -> Value {
        json!({ "row": number })
    }

    #[test]
    fn rows_appear_in_order_and_only_when_finished() {
        let (place, stamp) = (OutputDir::new(), Stamp::of(&[("tokens", 3)]));
        let mut output = place.open(&stamp);
        for number in [1, 0, 2] {
            output.push(number, &[row(number)]).unwrap();
        }
        assert!(!place.output().exists());
        assert_eq!(output.finish().unwrap(), 3);
        assert_eq!(place.text(), "{\"row\":0}\n{\"row\":1}\n{\"row\":2}\n");
        let left = std::fs::read_dir(place.0.path()).unwrap();
        assert_eq!(left.count(), 2, "the rows and their stamp");
    }

    #[test]
    fn the_same_stamp_goes_on_and_another_is_refused() {
        let (place, stamp) = (OutputDir::new(), Stamp::of(&[("tokens", 3)]));
        let mut output = place.open(&stamp);
        output.push(0, &[row(0), row(10)]).unwrap();
        output.push(2, &[row(2)]).unwrap();
        assert!(matches!(place.find(&stamp, 9, true), Err(Error::InUse { .. })));
        drop(output);
        // A row truncated by a kill does not count.
        let partial = place.0.path().join("out.jsonl.partial");
        let mut file = OpenOptions::new().append(true).open(&partial).unwrap();
        file.write_all(b"[{\"row\":").unwrap();
        let mut output = place.open(&stamp);
        assert_eq!(output.written(), 1);
        output.push(1, &[]).unwrap();
        drop(output);
        assert_eq!(place.open(&stamp).written(), 2);
        let other = place.refusal(&Stamp::of(&[("tokens", 4)]), 9);
        assert!(other.contains("out.jsonl.partial") && other.contains("tokens: 3 there, 4 now"));
        assert!(place.refusal(&stamp, 1).contains("2 prompts"));
        assert_eq!(place.open(&stamp).finish().unwrap(), 2);
        assert_eq!(place.text(), "{\"row\":0}\n{\"row\":10}\n");
    }

    #[test]
    fn a_finished_file_gets_more_rows_or_is_left_alone() {
        let (place, stamp) = (OutputDir::new(), Stamp::of(&[("tokens", 3)]));
        let mut output = place.open(&stamp);
        output.push(0, &[row(0), row(10)]).unwrap();
        output.finish().unwrap();
        let other = place.refusal(&Stamp::of(&[("tokens", 4)]), 9);
        assert!(other.contains("tokens: 3 there, 4 now"), "{other}");
        assert!(place.refusal(&stamp, 0).contains("1 prompts"));
        assert!(matches!(place.find(&stamp, 1, false), Ok(Found::Finished(1, _))));

        let mut output = place.open(&stamp);
        assert_eq!(output.written(), 1);
        output.push(1, &[row(1)]).unwrap();
        drop(output);
        // Stopped midway, and killed between writing the new rows and removing the partial file.
        let partial = place.0.path().join("out.jsonl.partial");
        let before = std::fs::read(&partial).unwrap();
        let output = place.open(&stamp);
        assert_eq!(output.written(), 2);
        output.finish().unwrap();
        std::fs::write(&partial, before).unwrap();
        assert_eq!(place.open(&stamp).finish().unwrap(), 3);
        assert_eq!(place.text(), "{\"row\":0}\n{\"row\":10}\n{\"row\":1}\n");
        assert!(!partial.exists());
    }

    #[test]
    fn files_of_unknown_making_are_refused() {
        let (place, stamp) = (OutputDir::new(), Stamp::of(&[("tokens", 3)]));
        std::fs::write(place.output(), "mine\n").unwrap();
        assert!(place.refusal(&stamp, 9).contains("out.jsonl"));
        std::fs::remove_file(place.output()).unwrap();
        place.open(&stamp).finish().unwrap();
        std::fs::write(place.output(), "edited\n").unwrap();
        place.refusal(&stamp, 9);
        std::fs::remove_file(place.output()).unwrap();
        std::fs::write(place.0.path().join("out.jsonl.partial"), "{\"a\": 1}\n").unwrap();
        assert!(place.refusal(&stamp, 9).contains("out.jsonl.partial"));
        std::fs::remove_file(place.0.path().join("out.jsonl.partial")).unwrap();
        // A file that appeared while the partial one existed must not be replaced.
        drop(place.open(&stamp));
        std::fs::write(place.output(), "mine\n").unwrap();
        place.refusal(&stamp, 9);
        std::fs::remove_file(place.output()).unwrap();
        std::fs::create_dir(place.output()).unwrap();
        let error = place.find(&stamp, 9, true).unwrap_err().to_string();
        assert!(error.contains("not a regular file"), "{error}");
    }
}
