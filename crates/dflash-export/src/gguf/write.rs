//! A GGUF file, front to back, a bounded piece at a time.

use std::io::{self, Write};
use std::path::Path;

use dflash_files::PendingFile;
use dflash_model::checkpoint::pieces;
use ggus::ggml_quants::{Q8_0, Quantize};
use ggus::{GGmlType, GGufFileHeader, GGufMetaDataValueType as Type, GGufWriter};
use tch::{Kind, Tensor};

use super::file::{TensorType, Value};
use crate::Result;

/// The release of the format that llama.cpp writes.
const VERSION: u32 = 3;
/// The format's default; tensors begin at its multiples.
pub(super) const ALIGNMENT: u64 = 32;

/// A tensor of the file to be.
#[derive(Debug)]
pub(super) struct Named {
    pub(super) name: String,
    pub(super) tensor_type: TensorType,
    pub(super) tensor: Tensor,
}

impl Named {
    /// Whether rows are whole blocks of the type.
    pub(super) fn fits(&self) -> bool {
        let width = self.tensor.size().last().copied().unwrap_or(1);
        width % self.tensor_type.block() == 0
    }

    fn bytes(&self) -> u64 {
        self.tensor_type.bytes(self.tensor.numel() as i64)
    }
}

/// Writes the file `path`, whole or not at all.
///
/// # Errors
/// I/O.
pub(super) fn file(path: &Path, keys: &[(String, Value)], tensors: &[Named]) -> Result<()> {
    let mut sink = Sink { file: PendingFile::create(path)?, written: 0, failure: None };
    let mut out = GGufWriter::new(&mut sink);
    let outcome = content(&mut out, keys, tensors);
    let expected = out.written_bytes() as u64;
    // The writer passes on what it has buffered, and keeps errors to itself; the sink does not.
    drop(out);
    let failed = |source| dflash_files::Error::io("write", path)(source);
    match (sink.failure, outcome) {
        (Some(error), _) => Err(error.into()),
        (None, Err(Failure::Io(source))) => Err(failed(source).into()),
        (None, Err(Failure::Torch(error))) => Err(error.into()),
        (None, Ok(())) if sink.written != expected => {
            Err(failed(io::ErrorKind::WriteZero.into()).into())
        }
        (None, Ok(())) => Ok(sink.file.commit()?),
    }
}

/// What can end the writing of a file's content.
enum Failure {
    Io(io::Error),
    Torch(tch::TchError),
}

impl From<io::Error> for Failure {
    fn from(error: io::Error) -> Self {
        Self::Io(error)
    }
}

impl From<tch::TchError> for Failure {
    fn from(error: tch::TchError) -> Self {
        Self::Torch(error)
    }
}

fn content<W: Write>(
    out: &mut GGufWriter<W>,
    keys: &[(String, Value)],
    tensors: &[Named],
) -> std::result::Result<(), Failure> {
    out.write_header(GGufFileHeader::new(VERSION, tensors.len() as u64, keys.len() as u64))?;
    for (key, value) in keys {
        let (kind, bytes) = encode(value);
        out.write_meta_kv(key, kind, &bytes)?;
    }
    let mut offset = 0;
    for named in tensors {
        // ggml's first dimension is the one that is contiguous.
        let dims: Vec<u64> = named.tensor.size().iter().rev().map(|&size| size as u64).collect();
        out.write_tensor_info(&named.name, &dims, ggml_type(named.tensor_type), offset)?;
        offset = (offset + named.bytes()).next_multiple_of(ALIGNMENT);
    }
    out.write_padding(ALIGNMENT as usize)?;
    for named in tensors {
        let flat = named.tensor.reshape([-1]);
        for piece in pieces(0..flat.numel() as i64) {
            let part = flat.narrow(0, piece.start, piece.end - piece.start);
            out.write_data(&data(&part, named.tensor_type)?)?;
        }
        out.write_padding(ALIGNMENT as usize)?;
    }
    Ok(())
}

/// The bytes of `flat` in `tensor_type`; whole blocks.
fn data(flat: &Tensor, tensor_type: TensorType) -> std::result::Result<Vec<u8>, tch::TchError> {
    let count = flat.numel();
    let Some(kind) = tensor_type.kind() else {
        let mut values = vec![0f32; count];
        flat.to_kind(Kind::Float).f_copy_data(&mut values, count)?;
        return Ok(q8_0(&values));
    };
    let mut bytes = vec![0; count * kind.elt_size_in_bytes()];
    flat.to_kind(kind).f_copy_data_u8(&mut bytes, count)?;
    Ok(bytes)
}

/// Blocks of 32 values, each a float16 scale and 32 signed bytes.
fn q8_0(values: &[f32]) -> Vec<u8> {
    let (blocks, rest) = values.as_chunks();
    assert!(rest.is_empty(), "q8_0 takes whole blocks");
    let bytes = |block| {
        let Q8_0 { delta, quants } = Q8_0::quantize(block);
        delta.to_le_bytes().into_iter().chain(quants.map(|quant| quant as u8))
    };
    blocks.iter().flat_map(bytes).collect()
}

fn ggml_type(tensor_type: TensorType) -> GGmlType {
    match tensor_type {
        TensorType::F32 => GGmlType::F32,
        TensorType::F16 => GGmlType::F16,
        TensorType::Bf16 => GGmlType::BF16,
        TensorType::Q80 => GGmlType::Q8_0,
        TensorType::I64 => GGmlType::I64,
    }
}

/// Type and bytes of a value, as llama.cpp's converter chooses them.
fn encode(value: &Value) -> (Type, Vec<u8>) {
    match value {
        Value::Integer(number) => (Type::U32, (*number as u32).to_le_bytes().to_vec()),
        Value::Float(number) => (Type::F32, (*number as f32).to_le_bytes().to_vec()),
        Value::Flag(flag) => (Type::Bool, vec![u8::from(*flag)]),
        Value::Text(text) => (Type::String, text_bytes(text)),
        Value::Integers(list) => {
            array(Type::I32, list.iter().map(|&number| (number as i32).to_le_bytes().to_vec()))
        }
        Value::Flags(list) => array(Type::Bool, list.iter().map(|&flag| vec![u8::from(flag)])),
        Value::Texts(list) => array(Type::String, list.iter().map(|text| text_bytes(text))),
        Value::Other => unreachable!("what is not understood is not written"),
    }
}

fn array(kind: Type, elements: impl ExactSizeIterator<Item = Vec<u8>>) -> (Type, Vec<u8>) {
    let mut bytes = (kind as u32).to_le_bytes().to_vec();
    bytes.extend((elements.len() as u64).to_le_bytes());
    elements.for_each(|element| bytes.extend(element));
    (Type::Array, bytes)
}

fn text_bytes(text: &str) -> Vec<u8> {
    [&(text.len() as u64).to_le_bytes()[..], text.as_bytes()].concat()
}

/// The file, which counts what it takes and remembers the first error.
struct Sink {
    file: PendingFile,
    written: u64,
    failure: Option<dflash_files::Error>,
}

impl Write for Sink {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.failure.is_none() {
            match self.file.write(bytes) {
                Ok(()) => {
                    self.written += bytes.len() as u64;
                    return Ok(bytes.len());
                }
                Err(error) => self.failure = Some(error),
            }
        }
        Err(io::ErrorKind::Other.into())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
