//! The header of a safetensors file.
//!
//! Headers are not trusted: no more memory is allocated than the file's size, and the file must be
//! as long as its header says.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Read;
use std::path::Path;

pub use safetensors::tensor::{Dtype, Metadata, TensorInfo};

use crate::fields::read_json;
use crate::{Error, Result};

/// File name of unsharded weights.
pub const SINGLE: &str = "model.safetensors";

/// File name of the index of sharded weights.
pub const INDEX: &str = "model.safetensors.index.json";

/// Maximum header size of the format, bytes.
pub const LONGEST_HEADER: u64 = 100_000_000;

/// Size of the length prefix, bytes.
const PREFIX: u64 = 8;

/// Maps tensor names of the model in `dir` to files, from [`INDEX`].
///
/// # Errors
/// It does not exist or does not parse.
pub fn weight_map(dir: &Path) -> Result<BTreeMap<String, String>> {
    #[derive(serde::Deserialize)]
    struct Index {
        weight_map: BTreeMap<String, String>,
    }
    if !dir.join(INDEX).is_file() {
        return Err(Error::MissingFile { dir: dir.into(), file: SINGLE.into() });
    }
    Ok(read_json::<Index>(dir, INDEX)?.weight_map)
}

/// The header of a file.
#[derive(Debug)]
pub struct Header {
    /// Names, types, shapes and offsets of the tensors, which are contiguous, and free-form
    /// entries.
    pub metadata: Metadata,
    /// Offset of the first tensor, bytes.
    pub data_start: u64,
}

impl Header {
    /// Opens the file `path` and reads its header.
    ///
    /// # Errors
    /// I/O; a damaged or truncated file.
    pub fn open(path: &Path) -> Result<(File, Self)> {
        let file = File::open(path).map_err(Error::read(path))?;
        let size = file.metadata().map_err(Error::read(path))?.len();
        let header = Self::read(path, &file, size, LONGEST_HEADER)?;
        Ok((file, header))
    }

    /// Reads the header of `input`, of `size` bytes, up to `longest` bytes; `path` is for messages.
    ///
    /// # Errors
    /// As [`Self::open`].
    pub fn read(path: &Path, mut input: impl Read, size: u64, longest: u64) -> Result<Self> {
        let damaged = |reason: String| {
            Err(Error::Damaged { path: path.into(), format: "safetensors", reason })
        };
        let Some(room) = size.checked_sub(PREFIX) else {
            return damaged("it is shorter than any header".into());
        };
        let mut length = [0; PREFIX as usize];
        input.read_exact(&mut length).map_err(Error::read(path))?;
        let length = u64::from_le_bytes(length);
        if length > longest.min(room) {
            return damaged("its header is longer than any header, or than the file".into());
        }
        let mut text = vec![0; length as usize];
        input.read_exact(&mut text).map_err(Error::read(path))?;
        let metadata: Metadata = match serde_json::from_slice(&text) {
            Ok(metadata) => metadata,
            Err(error) => return damaged(error.to_string()),
        };
        let data_start = PREFIX + length;
        match data_start.checked_add(metadata.data_len() as u64) {
            Some(expected) if expected == size => Ok(Self { metadata, data_start }),
            expected => {
                let expected = expected.unwrap_or(u64::MAX);
                damaged(format!("it has {size} bytes, and its header says {expected}"))
            }
        }
    }

    /// The header of a file with these `tensors`, as the safetensors library lays it out. Their
    /// offsets must be contiguous.
    pub fn encode(tensors: Vec<(String, TensorInfo)>) -> Vec<u8> {
        let format = [("format".to_owned(), "pt".to_owned())].into();
        let metadata = Metadata::new(Some(format), tensors).expect("offsets follow shapes");
        let mut text = serde_json::to_vec(&metadata).expect("a header prints");
        text.resize(text.len().next_multiple_of(PREFIX as usize), b' ');
        [&(text.len() as u64).to_le_bytes()[..], &text].concat()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample() -> Vec<u8> {
        let info = |shape: &[usize], data_offsets| TensorInfo {
            dtype: Dtype::BF16,
            shape: shape.to_vec(),
            data_offsets,
        };
        let tensors =
            vec![("a".into(), info(&[2, 3], (0, 12))), ("b".into(), info(&[4], (12, 20)))];
        let mut bytes = Header::encode(tensors);
        bytes.resize(bytes.len() + 20, 7);
        bytes
    }

    fn read(bytes: &[u8]) -> Result<Header> {
        let size = bytes.len() as u64;
        Header::read(Path::new("x.safetensors"), bytes, size, LONGEST_HEADER)
    }

    #[test]
    fn what_is_written_reads_back() {
        let header = read(&sample()).unwrap();
        assert_eq!(header.metadata.info("b").unwrap().data_offsets, (12, 20));
        assert_eq!(header.data_start as usize + 20, sample().len());
    }

    #[test]
    fn a_file_that_is_cut_short_or_goes_on_is_damaged() {
        let whole = sample();
        for length in 0..whole.len() {
            let refused = read(&whole[..length]).unwrap_err().to_string();
            assert!(
                refused.starts_with("x.safetensors is not a readable safetensors"),
                "{refused}"
            );
        }
        let longer = [&whole[..], &[0]].concat();
        let refused = read(&longer).unwrap_err().to_string();
        assert!(refused.contains("and its header says"), "{refused}");
    }

    #[test]
    fn no_change_of_a_byte_of_the_header_panics() {
        let whole = sample();
        let mut refused = 0;
        for at in 0..whole.len() - 20 {
            for value in [0, 1, b'9', 0x7f, 0xff] {
                let mut bytes = whole.clone();
                bytes[at] = value;
                refused += usize::from(read(&bytes).is_err());
            }
        }
        assert!(refused > 300, "{refused}");
        let claims = [&u64::MAX.to_le_bytes()[..], b"{}"].concat();
        assert!(read(&claims).unwrap_err().to_string().contains("longer than"));
    }
}
