//! The header of a GGUF file: enough of it to know a drafter, and to tell one from another.
//!
//! The format: <https://github.com/ggml-org/ggml/blob/master/docs/gguf.md>.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, BufReader, Read};
use std::path::Path;

use crate::Error;

/// The architecture under which llama.cpp knows drafters.
const DRAFTER: &str = "dflash";
/// More than any file has; what claims more is damaged.
const MOST_ENTRIES: u64 = 1 << 16;
const LONGEST_TEXT: u64 = 16 << 20;
const MOST_ITEMS: u64 = 1 << 26;

/// The entries of a drafter's header that are numbers, the architecture's name in front taken off.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct Header(BTreeMap<String, u64>);

impl Header {
    /// Reads the header of the drafter at `path`.
    ///
    /// # Errors
    /// A file that is not GGUF, or of another model.
    pub(crate) fn read(path: &Path) -> Result<Self, Error> {
        let file = File::open(path).map_err(|source| Error::Read { path: path.into(), source })?;
        let entries = entries(&mut BufReader::new(file)).map_err(|error| {
            let reason = format!("its header does not read as GGUF ({error})");
            Error::Damaged { path: path.into(), reason }
        })?;
        let (architecture, numbers) = entries;
        if architecture.as_deref() != Some(DRAFTER) {
            let architecture = architecture.unwrap_or_else(|| "unknown".to_owned());
            return Err(Error::OtherArchitecture { path: path.into(), architecture });
        }
        let own = numbers.into_iter().filter_map(|(key, number)| {
            Some((key.strip_prefix(DRAFTER)?.strip_prefix('.')?.to_owned(), number))
        });
        Ok(Self(own.collect()))
    }

    pub(crate) fn number(&self, key: &str) -> Option<u64> {
        self.0.get(key).copied()
    }
}

/// The architecture, and all entries that are numbers.
fn entries(reader: &mut impl Read) -> io::Result<(Option<String>, BTreeMap<String, u64>)> {
    let mut magic = [0; 4];
    reader.read_exact(&mut magic)?;
    let version = u32::from_le_bytes(array(reader)?);
    if &magic != b"GGUF" || !(2..=3).contains(&version) {
        return Err(io::Error::other("no GGUF of version 2 or 3"));
    }
    let _tensors: [u8; 8] = array(reader)?;
    let count = u64::from_le_bytes(array(reader)?);
    let (mut architecture, mut numbers) = (None, BTreeMap::new());
    for _ in 0..at_most(count, MOST_ENTRIES)? {
        let key = text(reader)?;
        let kind = u32::from_le_bytes(array(reader)?);
        match value(reader, kind)? {
            Entry::Text(text) if key == "general.architecture" => architecture = Some(text),
            Entry::Number(number) => _ = numbers.insert(key, number),
            Entry::Text(_) | Entry::Other => (),
        }
    }
    Ok((architecture, numbers))
}

enum Entry {
    Text(String),
    Number(u64),
    Other,
}

/// A value of the type that the format numbers `kind`.
fn value(reader: &mut impl Read, kind: u32) -> io::Result<Entry> {
    Ok(match kind {
        0 => Entry::Number(array::<1>(reader)?[0].into()),
        2 => Entry::Number(u16::from_le_bytes(array(reader)?).into()),
        4 => Entry::Number(u32::from_le_bytes(array(reader)?).into()),
        10 => Entry::Number(u64::from_le_bytes(array(reader)?)),
        5 => signed(i32::from_le_bytes(array(reader)?).into()),
        11 => signed(i64::from_le_bytes(array(reader)?)),
        8 => Entry::Text(text(reader)?),
        1 | 3 | 6 | 7 | 12 => {
            let size = match kind {
                1 | 7 => 1,
                3 => 2,
                6 => 4,
                _ => 8,
            };
            skip(reader, size)?;
            Entry::Other
        }
        9 => {
            let inner = u32::from_le_bytes(array(reader)?);
            if inner == 9 {
                return Err(io::Error::other("a list of lists"));
            }
            for _ in 0..at_most(u64::from_le_bytes(array(reader)?), MOST_ITEMS)? {
                value(reader, inner)?;
            }
            Entry::Other
        }
        other => return Err(io::Error::other(format!("a value of type {other}"))),
    })
}

fn signed(number: i64) -> Entry {
    u64::try_from(number).map_or(Entry::Other, Entry::Number)
}

fn text(reader: &mut impl Read) -> io::Result<String> {
    let length = at_most(u64::from_le_bytes(array(reader)?), LONGEST_TEXT)?;
    let mut bytes = vec![0; length as usize];
    reader.read_exact(&mut bytes)?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

fn skip(reader: &mut impl Read, bytes: u64) -> io::Result<()> {
    io::copy(&mut reader.take(bytes), &mut io::sink()).map(drop)
}

fn array<const N: usize>(reader: &mut impl Read) -> io::Result<[u8; N]> {
    let mut bytes = [0; N];
    reader.read_exact(&mut bytes).map(|()| bytes)
}

fn at_most(count: u64, most: u64) -> io::Result<u64> {
    if count > most { Err(io::Error::other(format!("{count} items"))) } else { Ok(count) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn string(text: &str) -> Vec<u8> {
        [&(text.len() as u64).to_le_bytes()[..], text.as_bytes()].concat()
    }

    fn file(architecture: &str) -> Vec<u8> {
        let mut bytes = b"GGUF".to_vec();
        bytes.extend(3u32.to_le_bytes());
        bytes.extend(0u64.to_le_bytes());
        bytes.extend(4u64.to_le_bytes());
        let mut entry = |key: &str, kind: u32, value: &[u8]| {
            bytes.extend(string(key));
            bytes.extend(kind.to_le_bytes());
            bytes.extend(value);
        };
        entry("general.architecture", 8, &string(architecture));
        let list = [&8u32.to_le_bytes()[..], &2u64.to_le_bytes(), &string("a"), &string("bc")];
        entry("tokenizer.ggml.tokens", 9, &list.concat());
        entry("dflash.rope.freq_base", 6, &1e4f32.to_le_bytes());
        entry("dflash.block_size", 4, &8u32.to_le_bytes());
        bytes
    }

    fn read(bytes: &[u8]) -> Result<Header, String> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("draft.gguf");
        std::fs::write(&path, bytes).unwrap();
        Header::read(&path).map_err(|error| error.to_string())
    }

    #[test]
    fn a_drafter_is_known_by_its_header() {
        let header = read(&file("dflash")).unwrap();
        assert_eq!((header.number("block_size"), header.number("block_count")), (Some(8), None));
        let refused = read(&file("qwen3")).unwrap_err();
        assert!(refused.contains("architecture qwen3"), "{refused}");
        for broken in [&file("dflash")[..90], b"PK\x03\x04 and more of it", b""] {
            let refused = read(broken).unwrap_err();
            assert!(refused.contains("does not read as GGUF"), "{refused}");
        }
        let mut endless = file("dflash");
        endless[16..24].copy_from_slice(&u64::MAX.to_le_bytes());
        assert!(read(&endless).unwrap_err().contains("items"));
    }
}
