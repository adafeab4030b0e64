//! Converts tensors between GGUF files and libtorch, in pieces of bounded size.

use std::path::Path;

use dflash_formats::gguf::{
    GgufFile, GgufWriter, NewTensor, Q8_BLOCK, Q8_BYTES, TensorType, Value,
};
use dflash_settings::ExportDtype;
use dflash_tensor::checkpoint::pieces;
use half::f16;
use tch::{Kind, TchError, Tensor};

use crate::{Error, Result};

/// A tensor to be written.
#[derive(Debug)]
pub(super) struct Named {
    pub(super) stored: NewTensor,
    tensor: Tensor,
}

impl Named {
    pub(super) fn new(name: &str, tensor_type: TensorType, tensor: Tensor) -> Self {
        let stored = NewTensor { name: name.into(), tensor_type, shape: tensor.size() };
        Self { stored, tensor }
    }
}

/// The type of matrices in a file of `dtype`.
pub(crate) fn matrix_type(dtype: ExportDtype) -> TensorType {
    match dtype {
        ExportDtype::Bf16 => TensorType::Bf16,
        ExportDtype::F16 => TensorType::F16,
        ExportDtype::F32 => TensorType::F32,
        ExportDtype::Q80 => TensorType::Q80,
    }
}

/// libtorch's type, if it has one.
fn kind_of(tensor_type: TensorType) -> Option<Kind> {
    match tensor_type {
        TensorType::F32 => Some(Kind::Float),
        TensorType::F16 => Some(Kind::Half),
        TensorType::Bf16 => Some(Kind::BFloat16),
        TensorType::I64 => Some(Kind::Int64),
        TensorType::Q80 => None,
    }
}

/// Writes the file `path` atomically.
///
/// # Errors
/// I/O.
pub(super) fn write(path: &Path, keys: &[(String, Value)], tensors: &[Named]) -> Result<()> {
    let stored: Vec<NewTensor> = tensors.iter().map(|named| named.stored.clone()).collect();
    let mut out = GgufWriter::create(path, keys, &stored)?;
    for Named { stored, tensor } in tensors {
        let flat = tensor.reshape([-1]);
        for piece in pieces(0..flat.numel() as i64) {
            let part = flat.narrow(0, piece.start, piece.end - piece.start);
            out.append(&encode(&part, stored.tensor_type)?)?;
        }
    }
    Ok(out.finish()?)
}

/// The bytes of `flat` in `tensor_type`; its length must be a multiple of the block size.
fn encode(flat: &Tensor, tensor_type: TensorType) -> std::result::Result<Vec<u8>, TchError> {
    let count = flat.numel();
    let Some(kind) = kind_of(tensor_type) else {
        let mut values = vec![0f32; count];
        flat.to_kind(Kind::Float).f_copy_data(&mut values, count)?;
        return Ok(values.chunks(Q8_BLOCK).flat_map(q8_block).collect());
    };
    let mut bytes = vec![0; count * kind.elt_size_in_bytes()];
    flat.to_kind(kind).f_copy_data_u8(&mut bytes, count)?;
    Ok(bytes)
}

/// A q8_0 block: a float16 scale, and each value as a signed byte.
fn q8_block(values: &[f32]) -> Vec<u8> {
    let largest = values.iter().fold(0f32, |largest, value| largest.max(value.abs()));
    let scale = largest / f32::from(i8::MAX);
    let inverse = if scale == 0.0 { 0.0 } else { scale.recip() };
    let quants = values.iter().map(|value| (value * inverse).round() as i8 as u8);
    f16::from_f32(scale).to_le_bytes().into_iter().chain(quants).collect()
}

fn q8_values(block: &[u8]) -> impl Iterator<Item = f32> {
    let scale = f16::from_le_bytes([block[0], block[1]]).to_f32();
    block[2..].iter().map(move |&quant| f32::from(quant as i8) * scale)
}

fn decode(bytes: &[u8], tensor_type: TensorType, count: i64) -> Result<Tensor> {
    if let Some(kind) = kind_of(tensor_type) {
        return Ok(Tensor::f_from_data_size(bytes, &[count], kind)?);
    }
    let values: Vec<f32> = bytes.chunks_exact(Q8_BYTES).flat_map(q8_values).collect();
    Ok(Tensor::from_slice(&values))
}

/// Checks that `file` has the tensor `name` with shape `expected`, rows first.
pub(super) fn check_shape(file: &GgufFile, name: &str, expected: &[i64]) -> Result<()> {
    let found = &file.tensor(name)?.shape;
    if found == expected {
        return Ok(());
    }
    let (path, found, expected) = (file.path().into(), found.clone(), expected.to_vec());
    Err(Error::Shape { path, name: name.into(), found, expected })
}

/// Copies the tensor `name` of `file`, dequantized, to `destination`, a contiguous view of its
/// shape.
pub(super) fn read_into(file: &GgufFile, name: &str, destination: &Tensor) -> Result<()> {
    check_shape(file, name, &destination.size())?;
    let stored = file.tensor(name)?;
    let flat = destination.view([-1]);
    for piece in pieces(0..flat.numel() as i64) {
        let count = piece.end - piece.start;
        let bytes = file.bytes(stored, piece.clone())?;
        let values = decode(&bytes, stored.tensor_type, count)?;
        flat.narrow(0, piece.start, count).f_copy_(&values)?;
    }
    Ok(())
}
