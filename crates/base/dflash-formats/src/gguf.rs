//! Reads GGUF files: metadata and the list of tensors.
//!
//! Lengths in a file are checked against its size before memory is allocated. The format:
//! <https://github.com/ggml-org/ggml/blob/master/docs/gguf.md>.

mod write;

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufReader, Read as _};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

pub use write::{GgufWriter, NewTensor};

use crate::{Error, Result};

/// Values per q8_0 block.
pub const Q8_BLOCK: usize = 32;
/// Bytes per q8_0 block: a float16 scale, and one signed byte per value.
pub const Q8_BYTES: usize = 2 + Q8_BLOCK;

/// The format's default alignment of tensors.
const ALIGNMENT: u64 = 32;

/// Supported versions of the format, which are equal in everything that we read.
const VERSIONS: std::ops::RangeInclusive<u32> = 2..=3;

/// Types of tensors.
#[allow(missing_docs, reason = "ggml's names")]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TensorType {
    F32,
    F16,
    Bf16,
    Q80,
    I64,
}

impl TensorType {
    const ALL: [Self; 5] = [Self::F32, Self::F16, Self::Bf16, Self::Q80, Self::I64];

    /// ggml's number for the type.
    fn code(self) -> u32 {
        match self {
            Self::F32 => 0,
            Self::F16 => 1,
            Self::Q80 => 8,
            Self::I64 => 27,
            Self::Bf16 => 30,
        }
    }

    /// Values per block.
    pub fn block(self) -> i64 {
        if self == Self::Q80 { Q8_BLOCK as i64 } else { 1 }
    }

    /// Size in bytes of `elements` values, a multiple of the block size.
    pub fn bytes(self, elements: i64) -> u64 {
        let block = match self {
            Self::F16 | Self::Bf16 => 2,
            Self::F32 => 4,
            Self::I64 => 8,
            Self::Q80 => Q8_BYTES as i64,
        };
        (elements / self.block() * block) as u64
    }
}

/// A metadata value; integers of all widths are one type, as are floats.
#[derive(Clone, Debug, PartialEq)]
#[allow(missing_docs, reason = "the names say it")]
pub enum Value {
    Integer(i64),
    Float(f64),
    Flag(bool),
    Text(String),
    Integers(Vec<i64>),
    Flags(Vec<bool>),
    Texts(Vec<String>),
    /// A value of an unused type.
    Other,
}

/// A stored tensor.
#[derive(Debug)]
pub struct Stored {
    /// Rows first.
    pub shape: Vec<i64>,
    /// Storage type.
    pub tensor_type: TensorType,
    /// Offset from the start of the file, in bytes.
    at: u64,
}

/// An open file. Metadata and the list of tensors are in memory.
#[derive(Debug)]
pub struct GgufFile {
    path: PathBuf,
    file: File,
    keys: BTreeMap<String, Value>,
    tensors: BTreeMap<String, Stored>,
}

impl GgufFile {
    /// Opens `path` and reads its metadata.
    ///
    /// # Errors
    /// I/O; a damaged file, or a tensor type that is not in [`TensorType`].
    pub fn open(path: &Path) -> Result<Self> {
        let file = File::open(path).map_err(Error::read(path))?;
        let size = file.metadata().map_err(Error::read(path))?.len();
        let mut header = Header { path, input: BufReader::new(&file), size, at: 0 };
        let (keys, tensors) = header.read()?;
        Ok(Self { path: path.into(), file, keys, tensors })
    }

    /// The value under `key`.
    pub fn value(&self, key: &str) -> Option<&Value> {
        self.keys.get(key)
    }

    /// The required value of `key`, converted by `convert`.
    ///
    /// # Errors
    /// It is absent, or `convert` fails.
    pub fn required<T>(
        &self,
        key: &str,
        expected: &str,
        convert: impl Fn(&Value) -> Option<T>,
    ) -> Result<T> {
        let Some(value) = self.value(key) else {
            return Err(self.refuse(key, "missing", expected));
        };
        convert(value).ok_or_else(|| self.refuse(key, &format!("{value:?}"), expected))
    }

    /// The error for a key, or for a list that is stored as a tensor.
    pub fn refuse(&self, key: &str, found: &str, expected: &str) -> Error {
        let found: String = found.chars().take(80).collect();
        Error::config(&self.path, key, found, expected)
    }

    /// Whether the file has the tensor `name`.
    pub fn has(&self, name: &str) -> bool {
        self.tensors.contains_key(name)
    }

    /// The file's path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The tensor `name`.
    ///
    /// # Errors
    /// It does not exist.
    pub fn tensor(&self, name: &str) -> Result<&Stored> {
        let missing = || Error::MissingTensor { path: self.path.clone(), name: name.into() };
        self.tensors.get(name).ok_or_else(missing)
    }

    /// Reads `elements` of `tensor`, whole blocks, in stored form.
    ///
    /// # Errors
    /// I/O.
    pub fn bytes(&self, tensor: &Stored, elements: std::ops::Range<i64>) -> Result<Vec<u8>> {
        let count = tensor.tensor_type.bytes(elements.end - elements.start);
        let mut bytes = vec![0; count as usize];
        let at = tensor.at + tensor.tensor_type.bytes(elements.start);
        self.file.read_exact_at(&mut bytes, at).map_err(Error::read(&self.path))?;
        Ok(bytes)
    }
}

type Keys = BTreeMap<String, Value>;
type Tensors = BTreeMap<String, Stored>;

/// Reads everything before the tensors.
struct Header<'a> {
    path: &'a Path,
    input: BufReader<&'a File>,
    /// Size of the file in bytes.
    size: u64,
    /// Bytes read so far.
    at: u64,
}

impl Header<'_> {
    fn read(&mut self) -> Result<(Keys, Tensors)> {
        if self.bytes(4)? != b"GGUF" {
            return Err(self.damaged("it does not begin with GGUF"));
        }
        let version = self.u32()?;
        if !VERSIONS.contains(&version) {
            return Err(self.damaged(&format!("it is of version {version}; 2 and 3 can be read")));
        }
        let (tensor_count, key_count) = (self.u64()?, self.u64()?);
        let mut keys = Keys::new();
        for _ in 0..key_count {
            let key = self.text()?;
            let kind = self.u32()?;
            let value = self.value(kind)?;
            keys.insert(key, value);
        }
        let mut tensors = Tensors::new();
        for _ in 0..tensor_count {
            let (name, stored) = self.tensor()?;
            tensors.insert(name, stored);
        }
        self.place(&keys, &mut tensors)?;
        Ok((keys, tensors))
    }

    /// Converts data offsets to file offsets, and checks that the file contains all data.
    fn place(&self, keys: &Keys, tensors: &mut Tensors) -> Result<()> {
        let alignment = match keys.get("general.alignment") {
            None => ALIGNMENT,
            Some(&Value::Integer(bytes)) if bytes > 0 && bytes & (bytes - 1) == 0 => bytes as u64,
            Some(_) => return Err(self.damaged("general.alignment is not a power of two")),
        };
        let start = self.at.checked_next_multiple_of(alignment).unwrap_or(u64::MAX);
        for (name, stored) in tensors {
            let bytes = stored.tensor_type.bytes(stored.shape.iter().product());
            let end = start.checked_add(stored.at).and_then(|at| at.checked_add(bytes));
            if end.is_none_or(|end| end > self.size) {
                return Err(self.damaged(&format!("it is cut off: tensor {name} is not whole")));
            }
            stored.at += start;
        }
        Ok(())
    }

    fn tensor(&mut self) -> Result<(String, Stored)> {
        let name = self.text()?;
        let dims = self.u32()?;
        if dims > 4 {
            return Err(self.damaged(&format!("tensor {name} has {dims} dimensions")));
        }
        let mut shape = Vec::new();
        for _ in 0..dims {
            shape.push(self.u64()?);
        }
        shape.reverse();
        let code = self.u32()?;
        let at = self.u64()?;
        let known = TensorType::ALL.into_iter().find(|known| known.code() == code);
        let Some(tensor_type) = known else {
            return Err(Error::TensorType { path: self.path.into(), name, found: code });
        };
        let elements = shape.iter().try_fold(1u64, |all, &size| all.checked_mul(size));
        let width = shape.last().copied().unwrap_or(1);
        let fits = elements.is_some_and(|elements| elements <= self.size * Q8_BLOCK as u64);
        if !fits || width % tensor_type.block() as u64 != 0 {
            return Err(self.damaged(&format!("tensor {name} cannot have shape {shape:?}")));
        }
        let shape = shape.into_iter().map(|size| size as i64).collect();
        Ok((name, Stored { shape, tensor_type, at }))
    }

    /// Reads a value with the format's type number `kind`.
    fn value(&mut self, kind: u32) -> Result<Value> {
        const ARRAY: u32 = 9;
        if kind != ARRAY {
            return self.scalar(kind);
        }
        let (kind, count) = (self.u32()?, self.u64()?);
        if kind == ARRAY {
            return Err(self.damaged("it has lists of lists"));
        }
        if count > self.size {
            return Err(self.damaged("it has a list longer than itself"));
        }
        let mut list = Vec::new();
        for _ in 0..count {
            list.push(self.scalar(kind)?);
        }
        Ok(collected(list))
    }

    fn scalar(&mut self, kind: u32) -> Result<Value> {
        Ok(match kind {
            0 => Value::Integer(self.array::<1>()?[0].into()),
            1 => Value::Integer(i8::from_le_bytes(self.array()?).into()),
            2 => Value::Integer(u16::from_le_bytes(self.array()?).into()),
            3 => Value::Integer(i16::from_le_bytes(self.array()?).into()),
            4 => Value::Integer(self.u32()?.into()),
            5 => Value::Integer(i32::from_le_bytes(self.array()?).into()),
            6 => Value::Float(shortest(f32::from_le_bytes(self.array()?))),
            7 => Value::Flag(self.array::<1>()?[0] != 0),
            8 => Value::Text(self.text()?),
            10 => i64::try_from(self.u64()?).map_or(Value::Other, Value::Integer),
            11 => Value::Integer(i64::from_le_bytes(self.array()?)),
            12 => Value::Float(f64::from_le_bytes(self.array()?)),
            _ => return Err(self.damaged(&format!("it has a value of unknown type {kind}"))),
        })
    }

    fn text(&mut self) -> Result<String> {
        let length = self.u64()?;
        let bytes = self.bytes(length)?;
        // Token names need not be valid UTF-8: some are single bytes.
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    }

    fn u32(&mut self) -> Result<u32> {
        Ok(u32::from_le_bytes(self.array()?))
    }

    fn u64(&mut self) -> Result<u64> {
        Ok(u64::from_le_bytes(self.array()?))
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N]> {
        Ok(self.bytes(N as u64)?.try_into().expect("as many bytes as were asked for"))
    }

    fn bytes(&mut self, count: u64) -> Result<Vec<u8>> {
        if count > self.size - self.at {
            return Err(self.damaged("it is cut off in its header"));
        }
        let mut bytes = vec![0; count as usize];
        let read = self.input.read_exact(&mut bytes);
        read.map_err(Error::read(self.path))?;
        self.at += count;
        Ok(bytes)
    }

    fn damaged(&self, reason: &str) -> Error {
        Error::Damaged { path: self.path.into(), format: "GGUF", reason: reason.into() }
    }
}

/// The list as one typed value, if its elements have the same type.
fn collected(list: Vec<Value>) -> Value {
    fn all<T>(list: &[Value], one: impl Fn(&Value) -> Option<T>) -> Option<Vec<T>> {
        list.iter().map(one).collect()
    }
    let integer = |value: &Value| if let Value::Integer(it) = value { Some(*it) } else { None };
    let flag = |value: &Value| if let Value::Flag(it) = value { Some(*it) } else { None };
    let text = |value: &Value| if let Value::Text(it) = value { Some(it.clone()) } else { None };
    all(&list, integer)
        .map(Value::Integers)
        .or_else(|| all(&list, flag).map(Value::Flags))
        .or_else(|| all(&list, text).map(Value::Texts))
        .unwrap_or(Value::Other)
}

/// The float32 as its shortest decimal: 1e-6 instead of 0.00000099999999747.
fn shortest(value: f32) -> f64 {
    value.to_string().parse().expect("a number prints as one")
}

#[cfg(test)]
mod tests;
