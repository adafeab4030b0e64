//! Safetensors files: named tensors read one at a time, and written whole.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use safetensors::SafeTensorError;
use safetensors::tensor::{Dtype, Metadata, TensorView};
use tch::{Kind, Tensor};

use crate::{Error, Result};

/// Longest header we accept; the format's own limit.
const MAX_HEADER: u64 = 100_000_000;

/// An open safetensors file. Only the header is in memory; a tensor is read when asked for.
#[derive(Debug)]
pub struct TensorFile {
    path: PathBuf,
    file: File,
    metadata: Metadata,
    data_start: u64,
}

impl TensorFile {
    /// Opens `path` and reads its header.
    ///
    /// # Errors
    /// I/O, or a damaged header.
    pub fn open(path: &Path) -> Result<Self> {
        let read = |source| Error::Read { path: path.into(), source };
        let damaged = |source| Error::Safetensors { path: path.into(), source };
        let file = File::open(path).map_err(read)?;
        let mut length = [0; 8];
        file.read_exact_at(&mut length, 0).map_err(read)?;
        let header_length = u64::from_le_bytes(length);
        if header_length > MAX_HEADER.min(file.metadata().map_err(read)?.len()) {
            return Err(damaged(SafeTensorError::HeaderTooLarge));
        }
        let mut header = vec![0; 8 + header_length as usize];
        file.read_exact_at(&mut header, 0).map_err(read)?;
        let metadata: Metadata = serde_json::from_slice(&header[8..])
            .map_err(|error| damaged(SafeTensorError::InvalidHeaderDeserialization(error)))?;
        let data_start = 8 + header_length;
        let expected = data_start + metadata.data_len() as u64;
        let found = file.metadata().map_err(read)?.len();
        if found < expected {
            return Err(Error::Truncated { path: path.into(), found, expected });
        }
        Ok(Self { path: path.into(), file, metadata, data_start })
    }

    /// Names of all tensors.
    pub fn names(&self) -> Vec<String> {
        self.metadata.tensors().into_keys().collect()
    }

    /// CRC-32 of the whole file. Reads all of it, a part at a time.
    ///
    /// # Errors
    /// I/O.
    pub fn crc32(&self) -> Result<u32> {
        let mut hasher = crc32fast::Hasher::new();
        let mut part = vec![0; 1 << 20];
        let mut at = 0;
        loop {
            let read = self
                .file
                .read_at(&mut part, at)
                .map_err(|source| Error::Read { path: self.path.clone(), source })?;
            if read == 0 {
                return Ok(hasher.finalize());
            }
            hasher.update(&part[..read]);
            at += read as u64;
        }
    }

    /// The free-form entries of the header.
    pub fn notes(&self) -> Option<&std::collections::HashMap<String, String>> {
        self.metadata.metadata().as_ref()
    }

    /// Reads the tensor `name`, in its stored type; it must have shape `expected`.
    ///
    /// # Errors
    /// A missing tensor, another shape, a type that we do not read, I/O.
    pub fn tensor(&self, name: &str, expected: &[i64]) -> Result<Tensor> {
        let tensor = self.any_tensor(name)?;
        if tensor.size() != expected {
            return Err(Error::Shape {
                path: self.path.clone(),
                name: name.into(),
                found: tensor.size(),
                expected: expected.into(),
            });
        }
        Ok(tensor)
    }

    /// As [`Self::tensor`], of whatever shape.
    ///
    /// # Errors
    /// A missing tensor, a type that we do not read, I/O.
    pub fn any_tensor(&self, name: &str) -> Result<Tensor> {
        let info = self
            .metadata
            .info(name)
            .ok_or_else(|| Error::MissingTensor { path: self.path.clone(), name: name.into() })?;
        let kind = kind_of(info.dtype).ok_or_else(|| Error::TensorType {
            path: self.path.clone(),
            name: name.into(),
            found: format!("{:?}", info.dtype),
        })?;
        let (start, end) = info.data_offsets;
        let mut bytes = vec![0; end - start];
        self.file
            .read_exact_at(&mut bytes, self.data_start + start as u64)
            .map_err(|source| Error::Read { path: self.path.clone(), source })?;
        let shape: Vec<i64> = info.shape.iter().map(|&size| size as i64).collect();
        Ok(Tensor::f_from_data_size(&bytes, &shape, kind)?)
    }
}

fn kind_of(dtype: Dtype) -> Option<Kind> {
    match dtype {
        Dtype::F64 => Some(Kind::Double),
        Dtype::F32 => Some(Kind::Float),
        Dtype::F16 => Some(Kind::Half),
        Dtype::BF16 => Some(Kind::BFloat16),
        Dtype::I64 => Some(Kind::Int64),
        Dtype::BOOL => Some(Kind::Bool),
        _ => None,
    }
}

fn dtype_of(kind: Kind) -> Dtype {
    match kind {
        Kind::Double => Dtype::F64,
        Kind::Float => Dtype::F32,
        Kind::Half => Dtype::F16,
        Kind::BFloat16 => Dtype::BF16,
        Kind::Int64 => Dtype::I64,
        Kind::Bool => Dtype::BOOL,
        other => panic!("checkpoints hold no {other:?}"),
    }
}

/// Writes named tensors (contiguous, on the CPU) as `path`, whole or not at all.
///
/// # Errors
/// I/O.
pub fn write_safetensors(path: &Path, tensors: &[(String, Tensor)]) -> Result<()> {
    let buffers: Vec<Vec<u8>> = tensors.iter().map(|(_, tensor)| bytes_of(tensor)).collect();
    let views: Vec<(&str, TensorView<'_>)> = tensors
        .iter()
        .zip(&buffers)
        .map(|((name, tensor), bytes)| {
            let shape = tensor.size().iter().map(|&size| size as usize).collect();
            let view = TensorView::new(dtype_of(tensor.kind()), shape, bytes)
                .expect("a tensor's bytes match its shape");
            (name.as_str(), view)
        })
        .collect();
    let metadata = std::collections::HashMap::from([("format".to_string(), "pt".to_string())]);
    let serialized = safetensors::serialize(views, Some(metadata))
        .map_err(|source| Error::Safetensors { path: path.into(), source })?;
    Ok(dflash_files::write_bytes(path, &serialized)?)
}

fn bytes_of(tensor: &Tensor) -> Vec<u8> {
    let elements = tensor.numel();
    let mut bytes = vec![0; elements * tensor.kind().elt_size_in_bytes()];
    tensor.copy_data_u8(&mut bytes, elements);
    bytes
}
