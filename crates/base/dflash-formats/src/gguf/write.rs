//! Writes GGUF files front to back, so that no tensor is held in memory whole.

use std::collections::VecDeque;
use std::path::Path;

use dflash_io::PendingFile;

use super::{ALIGNMENT, TensorType, Value};
use crate::Result;

/// The format version that llama.cpp writes.
const VERSION: u32 = 3;

/// The format's type numbers of values, as far as we write them.
const U32: u32 = 4;
const I32: u32 = 5;
const F32: u32 = 6;
const BOOL: u32 = 7;
const STRING: u32 = 8;
const ARRAY: u32 = 9;

/// A tensor to be written.
#[allow(missing_docs, reason = "the names say it")]
#[derive(Clone, Debug)]
pub struct NewTensor {
    pub name: String,
    pub tensor_type: TensorType,
    /// Rows first.
    pub shape: Vec<i64>,
}

impl NewTensor {
    /// Whether rows are multiples of the type's block size.
    pub fn fits(&self) -> bool {
        self.shape.last().copied().unwrap_or(1) % self.tensor_type.block() == 0
    }

    fn bytes(&self) -> u64 {
        self.tensor_type.bytes(self.shape.iter().product())
    }
}

/// A file being written, renamed into place when finished. Methods fail only on I/O errors.
#[derive(Debug)]
pub struct GgufWriter {
    file: PendingFile,
    /// Number of bytes still to be written, per tensor.
    missing: VecDeque<u64>,
    written: u64,
}

impl GgufWriter {
    /// Starts the file `path` with these keys and tensorsand writes everything before the tensor
    /// data.
    pub fn create(path: &Path, keys: &[(String, Value)], tensors: &[NewTensor]) -> Result<Self> {
        let missing = tensors.iter().map(NewTensor::bytes).filter(|&bytes| bytes > 0).collect();
        let mut writer = Self { file: PendingFile::create(path)?, missing, written: 0 };
        writer.write(&header(keys, tensors))?;
        writer.pad()?;
        Ok(writer)
    }

    /// Appends the next bytes, all or part of the current tensor.
    pub fn append(&mut self, bytes: &[u8]) -> Result<()> {
        let missing = self.missing.front_mut().expect("the header has more tensors to come");
        *missing = missing.checked_sub(bytes.len() as u64).expect("no more than the tensor has");
        let whole = *missing == 0;
        self.write(bytes)?;
        if whole {
            self.missing.pop_front();
            self.pad()?;
        }
        Ok(())
    }

    /// Renames the file to its final name.
    pub fn finish(self) -> Result<()> {
        assert!(self.missing.is_empty(), "fewer bytes than the header says");
        Ok(self.file.commit()?)
    }

    fn write(&mut self, bytes: &[u8]) -> Result<()> {
        self.written += bytes.len() as u64;
        Ok(self.file.write(bytes)?)
    }

    fn pad(&mut self) -> Result<()> {
        let padding = self.written.next_multiple_of(ALIGNMENT) - self.written;
        self.write(&vec![0; padding as usize])
    }
}

fn header(keys: &[(String, Value)], tensors: &[NewTensor]) -> Vec<u8> {
    let mut out = b"GGUF".to_vec();
    out.extend(VERSION.to_le_bytes());
    out.extend((tensors.len() as u64).to_le_bytes());
    out.extend((keys.len() as u64).to_le_bytes());
    for (key, value) in keys {
        let (kind, bytes) = encode(value);
        out.extend(text_bytes(key));
        out.extend(kind.to_le_bytes());
        out.extend(bytes);
    }
    let mut offset = 0u64;
    for tensor in tensors {
        out.extend(text_bytes(&tensor.name));
        out.extend((tensor.shape.len() as u32).to_le_bytes());
        // ggml's first dimension is the contiguous one.
        out.extend(tensor.shape.iter().rev().flat_map(|&size| (size as u64).to_le_bytes()));
        out.extend(tensor.tensor_type.code().to_le_bytes());
        out.extend(offset.to_le_bytes());
        offset = (offset + tensor.bytes()).next_multiple_of(ALIGNMENT);
    }
    out
}

/// Type number and bytes of a value, with the types that llama.cpp's converter uses.
fn encode(value: &Value) -> (u32, Vec<u8>) {
    match value {
        Value::Integer(number) => (U32, (*number as u32).to_le_bytes().to_vec()),
        Value::Float(number) => (F32, (*number as f32).to_le_bytes().to_vec()),
        Value::Flag(flag) => (BOOL, vec![u8::from(*flag)]),
        Value::Text(text) => (STRING, text_bytes(text)),
        Value::Integers(list) => {
            array(I32, list.iter().map(|&number| (number as i32).to_le_bytes().to_vec()))
        }
        Value::Flags(list) => array(BOOL, list.iter().map(|&flag| vec![u8::from(flag)])),
        Value::Texts(list) => array(STRING, list.iter().map(|text| text_bytes(text))),
        Value::Other => unreachable!("what is not understood is not written"),
    }
}

fn array(kind: u32, elements: impl ExactSizeIterator<Item = Vec<u8>>) -> (u32, Vec<u8>) {
    let mut bytes = kind.to_le_bytes().to_vec();
    bytes.extend((elements.len() as u64).to_le_bytes());
    bytes.extend(elements.flatten());
    (ARRAY, bytes)
}

fn text_bytes(text: &str) -> Vec<u8> {
    [&(text.len() as u64).to_le_bytes()[..], text.as_bytes()].concat()
}
