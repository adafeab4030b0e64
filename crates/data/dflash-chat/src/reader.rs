//! Rows of a JSON array or JSON Lines file, streamed.
//!
//! Files may be compressed with gzip or Zstandard, whatever they are called. The first character
//! decides: `[` is one array of rows, anything else is one row per line.
//! Either way only one row is in memory at a time, and every row knows the line that it starts on.
//! Splitting and parsing are separate ([`raw_rows`], [`RawRow::parse`]), so that a pool of workers
//! can parse while one thread reads.

use std::fmt;
use std::fs::File;
use std::io::{self, BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use flate2::bufread::MultiGzDecoder;
use serde_json::Value;

use crate::error::Error;

/// The bytes of one row, not parsed yet.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RawRow {
    /// 1-based line on which the row starts.
    pub line: usize,
    /// The row's text.
    pub bytes: Vec<u8>,
}

impl RawRow {
    /// Parses the row; `path` is for the message.
    ///
    /// # Errors
    /// [`Error::Json`] with the file and line.
    pub fn parse(&self, path: &Path) -> Result<Value, Error> {
        serde_json::from_slice(&self.bytes).map_err(|error| Error::Json {
            path: path.into(),
            line: self.line + error.line().saturating_sub(1),
            reason: without_position(&error),
        })
    }
}

/// serde_json appends "at line 1 column 7": the column is right, but the line is relative to the
/// row, not the file.
fn without_position(error: &serde_json::Error) -> String {
    let text = error.to_string();
    match text.rsplit_once(" at line ") {
        Some((reason, _)) => format!("{reason} at column {}", error.column()),
        _ => text,
    }
}

/// The rows of a JSON array or JSON Lines file, not parsed yet.
///
/// # Errors
/// [`Error::Read`] when the file cannot be opened. The iterator yields [`Error::BrokenArray`] or
/// [`Error::Read`] and then ends.
pub fn raw_rows(path: &Path) -> Result<RawRows, Error> {
    let read = |source| Error::Read { path: path.into(), source };
    let file_bytes = Arc::new(AtomicU64::new(0));
    let file = Counted { file: File::open(path).map_err(read)?, bytes: Arc::clone(&file_bytes) };
    let text = decompressed(BufReader::with_capacity(1 << 16, file)).map_err(read)?;
    // 1 MiB: rows of long conversations reach hundreds of KB.
    let mut reader = BufReader::with_capacity(1 << 20, text);
    let start = reader.fill_buf().map_err(read)?;
    if UTF_16.iter().any(|mark| start.starts_with(mark)) {
        return Err(Error::Utf16 { path: path.into() });
    }
    if start.starts_with(BYTE_ORDER_MARK) {
        reader.consume(BYTE_ORDER_MARK.len());
    }
    let mut rows =
        RawRows { path: path.into(), reader, file_bytes, line: 1, layout: Layout::Lines };
    if rows.peek()? == Some(b'[') {
        rows.reader.consume(1);
        rows.layout = Layout::Array { first: true };
    }
    Ok(rows)
}

/// Some Windows programs begin UTF-8 files with these bytes.
const BYTE_ORDER_MARK: &[u8] = b"\xef\xbb\xbf";
/// What UTF-16 files begin with: their own mark, or an ASCII character that JSON begins with.
const UTF_16: [&[u8]; 6] = [b"\xff\xfe", b"\xfe\xff", b"{\0", b"[\0", b"\0{", b"\0["];
/// What compressed files begin with.
const GZIP: &[u8] = b"\x1f\x8b";
const ZSTANDARD: &[u8] = b"\x28\xb5\x2f\xfd";

/// The text of a file. Concatenated parts, as parallel compressors write them, are all read.
fn decompressed(mut file: BufReader<Counted>) -> io::Result<Box<dyn Read + Send>> {
    let start = file.fill_buf()?;
    if start.starts_with(GZIP) {
        return Ok(Box::new(MultiGzDecoder::new(file)));
    }
    if start.starts_with(ZSTANDARD) || is_skippable_frame(start) {
        return Ok(Box::new(zstd::stream::read::Decoder::with_buffer(file)?));
    }
    Ok(Box::new(file))
}

/// Whether a file begins with a Zstandard frame without data: pzstd writes one before each part.
fn is_skippable_frame(start: &[u8]) -> bool {
    matches!(start, [first, 0x2a, 0x4d, 0x18, ..] if first & 0xf0 == 0x50)
}

/// A file that counts the bytes read from it.
struct Counted {
    file: File,
    bytes: Arc<AtomicU64>,
}

impl Read for Counted {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let read = self.file.read(buffer)?;
        self.bytes.fetch_add(read as u64, Ordering::Relaxed);
        Ok(read)
    }
}

#[derive(Debug)]
enum Layout {
    Lines,
    Array {
        first: bool,
    },
    /// After the last row or the first error.
    Ended,
}

/// Iterator of [`raw_rows`].
pub struct RawRows {
    path: PathBuf,
    reader: BufReader<Box<dyn Read + Send>>,
    file_bytes: Arc<AtomicU64>,
    line: usize,
    layout: Layout,
}

impl Iterator for RawRows {
    type Item = Result<RawRow, Error>;

    fn next(&mut self) -> Option<Self::Item> {
        let row = match self.layout {
            Layout::Lines => self.next_line(),
            Layout::Array { first } => {
                self.layout = Layout::Array { first: false };
                self.next_element(first)
            }
            Layout::Ended => return None,
        };
        if !matches!(row, Ok(Some(_))) {
            self.layout = Layout::Ended;
        }
        row.transpose()
    }
}

impl fmt::Debug for RawRows {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RawRows").field("path", &self.path).field("line", &self.line).finish()
    }
}

impl RawRows {
    /// Bytes read from the file so far, compressed if it is.
    pub fn file_bytes(&self) -> u64 {
        self.file_bytes.load(Ordering::Relaxed)
    }

    fn next_line(&mut self) -> Result<Option<RawRow>, Error> {
        loop {
            let mut bytes = Vec::new();
            let read = self.reader.read_until(b'\n', &mut bytes);
            if read.map_err(|error| read_error(&self.path, error))? == 0 {
                return Ok(None);
            }
            let line = self.line;
            self.line += 1;
            if !bytes.trim_ascii().is_empty() {
                // Without the line break, a row cut short is an error of this line, not of the
                // next.
                bytes.truncate(bytes.trim_ascii_end().len());
                return Ok(Some(RawRow { line, bytes }));
            }
        }
    }

    /// The next element of the array; the opening bracket or the previous element is consumed.
    fn next_element(&mut self, first: bool) -> Result<Option<RawRow>, Error> {
        match self.peek()? {
            Some(b']') => {
                self.reader.consume(1);
                return match self.peek()? {
                    None => Ok(None),
                    Some(_) => Err(self.broken("text after the closing bracket")),
                };
            }
            Some(b',') if !first => self.reader.consume(1),
            Some(_) if !first => return Err(self.broken("no comma between two rows")),
            Some(_) | None => {}
        }
        self.peek()?;
        let line = self.line;
        let mut scanner = Scanner::default();
        let mut bytes = Vec::new();
        while !scanner.done {
            let chunk = self.reader.fill_buf().map_err(|error| read_error(&self.path, error))?;
            if chunk.is_empty() {
                return Err(self.broken("the end of the file"));
            }
            let taken = scanner.scan(chunk);
            bytes.extend_from_slice(&chunk[..taken]);
            self.reader.consume(taken);
        }
        self.line += count_lines(&bytes);
        Ok(Some(RawRow { line, bytes }))
    }

    /// Consumes JSON whitespace, counting lines, and returns the next byte without consuming it.
    fn peek(&mut self) -> Result<Option<u8>, Error> {
        loop {
            let chunk = self.reader.fill_buf().map_err(|error| read_error(&self.path, error))?;
            let blank = chunk.iter().take_while(|byte| byte.is_ascii_whitespace()).count();
            let (is_end, next) = (chunk.is_empty(), chunk.get(blank).copied());
            self.line += count_lines(&chunk[..blank]);
            self.reader.consume(blank);
            if is_end || next.is_some() {
                return Ok(next);
            }
        }
    }

    fn broken(&self, found: &'static str) -> Error {
        Error::BrokenArray { path: self.path.clone(), line: self.line, found }
    }
}

fn read_error(path: &Path, source: io::Error) -> Error {
    Error::Read { path: path.into(), source }
}

fn count_lines(bytes: &[u8]) -> usize {
    bytes.iter().filter(|&&byte| byte == b'\n').count()
}

/// Finds where one array element ends, without understanding it: the comma or bracket at depth 0
/// outside strings.
#[derive(Debug, Default)]
struct Scanner {
    depth: usize,
    in_string: bool,
    escaped: bool,
    done: bool,
}

impl Scanner {
    /// How many bytes of `chunk` belong to the element; sets `done` when it ends inside.
    fn scan(&mut self, chunk: &[u8]) -> usize {
        for (index, &byte) in chunk.iter().enumerate() {
            if self.in_string {
                self.step_in_string(byte);
                continue;
            }
            match byte {
                b'"' => self.in_string = true,
                b'{' | b'[' => self.depth += 1,
                b',' | b']' if self.depth == 0 => {
                    self.done = true;
                    return index;
                }
                b'}' | b']' => self.depth = self.depth.saturating_sub(1),
                _ => {}
            }
        }
        chunk.len()
    }

    fn step_in_string(&mut self, byte: u8) {
        match byte {
            _ if self.escaped => self.escaped = false,
            b'\\' => self.escaped = true,
            b'"' => self.in_string = false,
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn written(text: &str) -> tempfile::NamedTempFile {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), text).unwrap();
        file
    }

    /// Every row with its line, up to the first error.
    fn parsed(path: &Path) -> impl Iterator<Item = Result<(usize, Value), Error>> {
        let parse = |row: RawRow| Ok((row.line, row.parse(path)?));
        raw_rows(path).unwrap().map(move |row| row.and_then(parse))
    }

    /// The rows of `text` as `line:json`, and the error that ended them.
    fn rows_of(text: &str) -> Vec<String> {
        let file = written(text);
        let name = file.path().display().to_string();
        let shown = |row: Result<(usize, Value), Error>| match row {
            Ok((line, value)) => format!("{line}:{value}"),
            Err(error) => error.to_string().replace(&name, "F"),
        };
        parsed(file.path()).map(shown).collect()
    }

    fn check(text: &str, expect: &[&str]) {
        assert_eq!(rows_of(text), expect, "{text:?}");
    }

    #[test]
    fn lines_and_arrays_yield_the_same_rows() {
        check("{\"a\":1}\n\n{\"a\":2}\r\n", &["1:{\"a\":1}", "3:{\"a\":2}"]);
        check("\u{feff}{\"a\":1}", &["1:{\"a\":1}"]);
        check("[{\"a\":\n1},\n\n{\"a\":2}]\n", &["1:{\"a\":1}", "4:{\"a\":2}"]);
        check("\n[ {\"a\":\"]},\\\"{\"} ]", &["2:{\"a\":\"]},\\\"{\"}"]);
        check("[]", &[]);
        check("", &[]);
    }

    #[test]
    fn a_broken_row_names_file_and_line() {
        let cut = "the end of the file in a JSON array of rows; is the file cut short?";
        let after =
            "text after the closing bracket in a JSON array of rows; is the file cut short?";
        let eof = "EOF while parsing a value";
        let fix = "fix or delete the line";
        for (text, rows, fault) in [
            ("{\"a\":1}\n{\"a\":\n", 1, format!("2: not valid JSON: {eof} at column 5; {fix}")),
            ("[{},\n{\"a\" 2}]", 1, format!("2: not valid JSON: expected `:` at column 6; {fix}")),
            ("[{},\n{}", 1, format!("2: {cut}")),
            ("[1]\n2", 1, format!("2: {after}")),
            ("[1 2]", 0, format!("1: not valid JSON: trailing characters at column 3; {fix}")),
            ("[{},]", 1, format!("1: not valid JSON: {eof} at column 0; {fix}")),
            ("[", 0, format!("1: {cut}")),
        ] {
            let found = rows_of(text);
            assert_eq!(found.len(), rows + 1, "{text:?}");
            assert_eq!(found[rows], format!("F:{fault}"), "{text:?}");
        }
    }

    /// Rows longer than the read buffer, with structure inside strings.
    #[test]
    fn long_rows_cross_the_buffer() {
        let text = "]},{[\\\"\n".repeat(300_000);
        let row = serde_json::json!({"a": [[text], {"b": {}}]});
        for layout in [format!("[{row},\n{row}]"), format!("{row}\n{row}\n")] {
            let file = written(&layout);
            let rows: Vec<(usize, Value)> = parsed(file.path()).map(Result::unwrap).collect();
            assert_eq!(rows, [(1, row.clone()), (2, row.clone())]);
        }
    }

    #[test]
    fn a_fault_ends_the_rows() {
        let mut rows = raw_rows(written("[{}, {}").path()).unwrap();
        assert_eq!(rows.next().unwrap().unwrap().bytes, b"{}");
        assert!(matches!(rows.next(), Some(Err(Error::BrokenArray { line: 1, .. }))));
        assert!(rows.next().is_none());
    }

    #[test]
    fn a_limit_stops_before_a_later_fault() {
        let file = written("{}\n{}\nbroken\n");
        let rows: Vec<_> = parsed(file.path()).take(2).collect();
        assert!(rows.len() == 2 && rows.iter().all(Result::is_ok));
    }

    #[test]
    fn a_missing_file_is_an_error_at_once() {
        let error = raw_rows(Path::new("/nonexistent/rows.jsonl")).unwrap_err();
        assert_eq!(error.to_string(), "cannot read /nonexistent/rows.jsonl");
    }
}
