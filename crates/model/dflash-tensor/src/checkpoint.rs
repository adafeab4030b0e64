//! Safetensors files, read and written in pieces of bounded size.
//!
//! The header depends only on names, types and shapes, so a file is written front to back while the
//! tensors stay on their devices; no tensor is ever copied whole.

use std::collections::{HashMap, VecDeque};
use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use dflash_formats::safetensors::{Dtype, Header, TensorInfo};
use dflash_io::PendingFile;
use dflash_torch_sys::mapped::{CopyError, MappedFile, Stored};
use tch::{Device, Kind, Tensor};

use crate::{Error, Result};

/// Elements per copy: 4 MiB of float32, enough to amortise the system call.
const PIECE: i64 = 1 << 20;

/// Splits `elements` into ranges of bounded size.
pub fn pieces(elements: Range<i64>) -> impl Iterator<Item = Range<i64>> {
    let end = elements.end;
    elements.step_by(PIECE as usize).map(move |start| start..(start + PIECE).min(end))
}

/// An open safetensors file. Only the header is in memory; tensors are read on demand.
#[derive(Debug)]
pub struct TensorFile {
    path: PathBuf,
    file: File,
    /// Created on the first read of a tensor; reading headers alone needs no mapping.
    map: OnceLock<MappedFile>,
    header: Header,
}

impl TensorFile {
    /// Opens `path` and reads its header.
    ///
    /// # Errors
    /// I/O, or a damaged header.
    pub fn open(path: &Path) -> Result<Self> {
        let (file, header) = Header::open(path)?;
        Ok(Self { path: path.into(), file, map: OnceLock::new(), header })
    }

    fn map(&self) -> Result<&MappedFile> {
        if let Some(map) = self.map.get() {
            return Ok(map);
        }
        let map = self.file.try_clone().and_then(MappedFile::new);
        let map = map.map_err(|source| self.unreadable(source))?;
        Ok(self.map.get_or_init(|| map))
    }

    /// Names of all tensors.
    pub fn names(&self) -> Vec<String> {
        self.header.metadata.tensors().into_keys().collect()
    }

    /// CRC-32 of the whole file, read in parts of bounded size.
    ///
    /// # Errors
    /// I/O.
    pub fn crc32(&self) -> Result<u32> {
        let mut hasher = crc32fast::Hasher::new();
        let mut part = vec![0; 1 << 20];
        let mut at = 0;
        loop {
            let read =
                self.file.read_at(&mut part, at).map_err(|source| self.unreadable(source))?;
            if read == 0 {
                return Ok(hasher.finalize());
            }
            hasher.update(&part[..read]);
            at += read as u64;
        }
    }

    /// The header's free-form metadata.
    pub fn notes(&self) -> Option<&HashMap<String, String>> {
        self.header.metadata.metadata().as_ref()
    }

    /// Checks that the tensor `name` exists and has shape `expected`.
    ///
    /// # Errors
    /// A missing tensor, another shape.
    pub fn check_shape(&self, name: &str, expected: &[i64]) -> Result<()> {
        let found = shape_of(self.info(name)?);
        if found == expected {
            return Ok(());
        }
        let (path, name, expected) = (self.path.clone(), name.into(), expected.into());
        Err(Error::Shape { path, name, found, expected })
    }

    /// The shape of the tensor `name`.
    ///
    /// # Errors
    /// A missing tensor.
    pub fn shape(&self, name: &str) -> Result<Vec<i64>> {
        Ok(shape_of(self.info(name)?))
    }

    /// The type of the tensor `name`, or the name of the stored type if it is not supported.
    ///
    /// # Errors
    /// A missing tensor.
    pub fn stored_kind(&self, name: &str) -> Result<std::result::Result<Kind, String>> {
        let dtype = self.info(name)?.dtype;
        Ok(kind_of(dtype).ok_or_else(|| format!("{dtype:?}")))
    }

    /// Reads the whole tensor `name`, in its stored type and shape.
    ///
    /// # Errors
    /// A missing tensor, an unsupported type, I/O.
    pub fn any_tensor(&self, name: &str) -> Result<Tensor> {
        let shape = shape_of(self.info(name)?);
        Ok(self.part(name, 0..shape.iter().product())?.view(shape.as_slice()))
    }

    /// Reads `elements` of the tensor `name`, flat and in its stored type. The caller bounds the
    /// range; see [`pieces`].
    ///
    /// # Errors
    /// A missing tensor, an unsupported type, I/O.
    pub fn part(&self, name: &str, elements: Range<i64>) -> Result<Tensor> {
        let info = self.info(name)?;
        let kind = self.kind(name, info)?;
        let width = kind.elt_size_in_bytes();
        let at = info.data_offsets.0 + elements.start as usize * width;
        let count = elements.end - elements.start;
        let mut bytes = vec![0; count as usize * width];
        assert!(at + bytes.len() <= info.data_offsets.1, "{name} has no elements {elements:?}");
        let from = self.header.data_start + at as u64;
        self.file.read_exact_at(&mut bytes, from).map_err(|source| self.unreadable(source))?;
        Ok(Tensor::f_from_data_size(&bytes, &[count], kind)?)
    }

    /// Copies elements of the tensor `name`, starting at `first`, into `destination`. Reads the
    /// mapped file a few rows at a time and converts to the destination's type and device.
    ///
    /// # Errors
    /// As [`Self::part`].
    pub fn read_into(&self, name: &str, first: i64, destination: &Tensor) -> Result<()> {
        let info = self.info(name)?;
        let (kind, shape) = (self.kind(name, info)?, destination.size());
        let start = info.data_offsets.0 + first as usize * kind.elt_size_in_bytes();
        let end = start + destination.numel() * kind.elt_size_in_bytes();
        assert!(end <= info.data_offsets.1, "{name} has no {shape:?} from {first} on");
        let offset = self.header.data_start as usize + start;
        let stored = Stored { offset, kind, shape: &shape };
        self.copied(self.map()?.copy_part(stored, 0, 0, destination, PIECE))
    }

    /// Copies a slice of the tensor `name` into `destination`, as [`Self::read_into`] does. The
    /// slice starts at `start` in dimension `dim`, is as long as the destination there, and spans
    /// all other dimensions.
    ///
    /// # Errors
    /// As [`Self::part`]; a shape mismatch.
    pub fn read_part_into(
        &self,
        name: &str,
        dim: usize,
        start: i64,
        destination: &Tensor,
    ) -> Result<()> {
        let info = self.info(name)?;
        let (kind, shape) = (self.kind(name, info)?, shape_of(info));
        let mut expected = destination.size();
        if shape.get(dim).is_some_and(|&size| start + expected[dim] <= size) {
            expected[dim] = shape[dim];
        }
        self.check_shape(name, &expected)?;
        let offset = self.header.data_start as usize + info.data_offsets.0;
        let stored = Stored { offset, kind, shape: &shape };
        self.copied(self.map()?.copy_part(stored, dim as i64, start, destination, PIECE))
    }

    /// The type of the tensor `name`.
    ///
    /// # Errors
    /// A missing tensor, an unsupported type.
    pub(crate) fn readable_kind(&self, name: &str) -> Result<Kind> {
        self.kind(name, self.info(name)?)
    }

    /// Size of the tensor `name` in bytes.
    ///
    /// # Errors
    /// A missing tensor.
    pub fn bytes_of(&self, name: &str) -> Result<u64> {
        let (start, end) = self.info(name)?.data_offsets;
        Ok((end - start) as u64)
    }

    /// Number of elements of the tensor `name`.
    ///
    /// # Errors
    /// A missing tensor.
    pub fn elements_of(&self, name: &str) -> Result<u64> {
        Ok(self.info(name)?.shape.iter().product::<usize>() as u64)
    }

    fn copied(&self, outcome: std::result::Result<(), CopyError>) -> Result<()> {
        outcome.map_err(|error| match error {
            CopyError::File(source) => self.unreadable(source),
            CopyError::Torch(source) => source.into(),
        })
    }

    fn kind(&self, name: &str, info: &TensorInfo) -> Result<Kind> {
        kind_of(info.dtype).ok_or_else(|| Error::TensorType {
            path: self.path.clone(),
            name: name.into(),
            found: format!("{:?}", info.dtype),
        })
    }

    fn unreadable(&self, source: std::io::Error) -> Error {
        Error::Read { path: self.path.clone(), source }
    }

    fn info(&self, name: &str) -> Result<&TensorInfo> {
        let missing = || Error::MissingTensor { path: self.path.clone(), name: name.into() };
        self.header.metadata.info(name).ok_or_else(missing)
    }
}

fn shape_of(info: &TensorInfo) -> Vec<i64> {
    info.shape.iter().map(|&size| size as i64).collect()
}

const TYPES: [(Dtype, Kind); 8] = [
    (Dtype::F64, Kind::Double),
    (Dtype::F32, Kind::Float),
    (Dtype::F16, Kind::Half),
    (Dtype::BF16, Kind::BFloat16),
    (Dtype::I64, Kind::Int64),
    (Dtype::BOOL, Kind::Bool),
    (Dtype::U8, Kind::Uint8),
    (Dtype::F8_E4M3, Kind::Float8e4m3fn),
];

fn kind_of(dtype: Dtype) -> Option<Kind> {
    TYPES.iter().find(|(known, _)| *known == dtype).map(|(_, kind)| *kind)
}

fn dtype_of(kind: Kind) -> Dtype {
    let known = TYPES.iter().find(|(_, known)| *known == kind);
    known.unwrap_or_else(|| panic!("checkpoints hold no {kind:?}")).0
}

/// Header entry of one tensor.
#[allow(missing_docs, reason = "the names say it")]
#[derive(Clone, Debug, PartialEq)]
pub struct Entry {
    pub name: String,
    pub kind: Kind,
    pub shape: Vec<i64>,
}

/// A safetensors file being written front to back; it appears under its name only when finished.
/// Methods fail only on I/O errors.
#[derive(Debug)]
pub struct TensorWriter {
    file: PendingFile,
    checksum: crc32fast::Hasher,
    /// Type and number of the elements still to be written, per tensor.
    missing: VecDeque<(Kind, i64)>,
    stage: Vec<u8>,
}

impl TensorWriter {
    /// Starts the file `path` with the given tensors, in this order, and writes its header.
    pub fn create(path: &Path, entries: &[Entry]) -> Result<Self> {
        let elements = |entry: &Entry| (entry.kind, entry.shape.iter().product());
        let mut writer = Self {
            file: PendingFile::create(path)?,
            checksum: crc32fast::Hasher::new(),
            missing: entries.iter().map(elements).filter(|(_, count)| *count > 0).collect(),
            stage: header(entries),
        };
        writer.write_stage()?;
        Ok(writer)
    }

    /// Appends elements of the current tensor, from any device and in any type.
    pub fn append(&mut self, values: &Tensor) -> Result<()> {
        let flat = values.detach().reshape([-1]);
        for piece in pieces(0..flat.numel() as i64) {
            let count = piece.end - piece.start;
            let (kind, missing) = self.missing.front_mut().expect("the header has more to come");
            let part = flat.narrow(0, piece.start, count).to_kind(*kind).to_device(Device::Cpu);
            self.stage.resize(count as usize * kind.elt_size_in_bytes(), 0);
            part.f_copy_data_u8(&mut self.stage, count as usize)?;
            *missing -= count;
            assert!(*missing >= 0, "more elements than the header says");
            if *missing == 0 {
                self.missing.pop_front();
            }
            self.write_stage()?;
        }
        Ok(())
    }

    fn write_stage(&mut self) -> Result<()> {
        self.checksum.update(&self.stage);
        Ok(self.file.write(&self.stage)?)
    }

    /// Renames the file to its final name. Returns the CRC-32 of its whole content.
    pub fn finish(self) -> Result<u32> {
        assert!(self.missing.is_empty(), "fewer elements than the header says");
        self.file.commit()?;
        Ok(self.checksum.finalize())
    }
}

/// The header's length and text, laid out as the safetensors library does.
fn header(entries: &[Entry]) -> Vec<u8> {
    let mut end = 0;
    let infos = entries.iter().map(|entry| {
        let shape: Vec<usize> = entry.shape.iter().map(|&size| size as usize).collect();
        let start = end;
        end += shape.iter().product::<usize>() * entry.kind.elt_size_in_bytes();
        let dtype = dtype_of(entry.kind);
        (entry.name.clone(), TensorInfo { dtype, shape, data_offsets: (start, end) })
    });
    Header::encode(infos.collect())
}

/// Atomically writes named tensors to `path`, in `kind` or, if `None`, each in its own type.
///
/// Tensors are ordered as the safetensors library orders them: widest types first, then by name.
///
/// # Errors
/// I/O.
pub fn write_safetensors_as(
    path: &Path,
    tensors: &[(String, Tensor)],
    kind: Option<Kind>,
) -> Result<()> {
    let entry = |(name, tensor): &(String, Tensor)| {
        let kind = kind.unwrap_or(tensor.kind());
        Entry { name: name.clone(), kind, shape: tensor.size() }
    };
    let mut sorted: Vec<(Entry, &Tensor)> = tensors.iter().map(|t| (entry(t), &t.1)).collect();
    sorted.sort_by(|(a, _), (b, _)| {
        dtype_of(b.kind).cmp(&dtype_of(a.kind)).then_with(|| a.name.cmp(&b.name))
    });
    let (entries, tensors): (Vec<Entry>, Vec<&Tensor>) = sorted.into_iter().unzip();
    let mut writer = TensorWriter::create(path, &entries)?;
    tensors.into_iter().try_for_each(|tensor| writer.append(tensor))?;
    writer.finish().map(|_| ())
}

/// [`write_safetensors_as`] with each tensor in its own type.
pub fn write_safetensors(path: &Path, tensors: &[(String, Tensor)]) -> Result<()> {
    write_safetensors_as(path, tensors, None)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Deterministic values of a given length.
    fn wave(elements: i64, kind: Kind) -> Tensor {
        let positions = Tensor::arange(elements, (Kind::Float, Device::Cpu));
        ((positions * 1.7).sin() * 100.0).to_kind(kind)
    }

    fn sample() -> Vec<(String, Tensor)> {
        let long = PIECE + PIECE / 2 + 3;
        [
            ("b.long", wave(long, Kind::Float)),
            ("a.half", wave(6, Kind::BFloat16).view([2, 3])),
            ("c.ids", wave(5, Kind::Int64)),
            ("d.mask", wave(3, Kind::Float).gt(0.0)),
            ("e.none", wave(0, Kind::Float)),
            ("f.scalar", wave(1, Kind::Double).squeeze()),
            ("g.turned", wave(20, Kind::Float).view([4, 5]).tr()),
        ]
        .map(|(name, tensor)| (name.to_string(), tensor))
        .into()
    }

    fn bytes_of(tensor: &Tensor) -> Vec<u8> {
        let mut bytes = vec![0; tensor.numel() * tensor.kind().elt_size_in_bytes()];
        tensor.contiguous().copy_data_u8(&mut bytes, tensor.numel());
        bytes
    }

    #[test]
    fn a_file_is_the_one_that_the_safetensors_library_writes() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file.safetensors");
        write_safetensors(&path, &sample()).unwrap();
        let buffers: Vec<Vec<u8>> = sample().iter().map(|(_, x)| bytes_of(x)).collect();
        let views = sample().into_iter().zip(&buffers).map(|((name, x), bytes)| {
            let shape = x.size().iter().map(|&size| size as usize).collect();
            let view = safetensors::tensor::TensorView::new(dtype_of(x.kind()), shape, bytes);
            (name, view.unwrap())
        });
        let format = HashMap::from([("format".to_string(), "pt".to_string())]);
        let expected = safetensors::serialize(views, Some(format)).unwrap();
        assert!(std::fs::read(&path).unwrap() == expected, "bytes differ");
        let names: Vec<_> = std::fs::read_dir(dir.path()).unwrap().collect();
        assert_eq!(names.len(), 1);
    }

    #[test]
    fn pieces_join_to_the_whole_and_its_checksum() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file.safetensors");
        let long = wave(2 * PIECE + 7, Kind::Float);
        let entry = |name: &str, kind, shape: &[i64]| Entry {
            name: name.into(),
            kind,
            shape: shape.to_vec(),
        };
        let entries =
            [entry("z", Kind::BFloat16, &[PIECE + 7]), entry("a", Kind::Float, &[2, PIECE / 2])];
        let mut writer = TensorWriter::create(&path, &entries).unwrap();
        for range in [0..3, 3..PIECE + 7, PIECE + 7..2 * PIECE + 7] {
            writer.append(&long.narrow(0, range.start, range.end - range.start)).unwrap();
        }
        assert!(!path.exists(), "unfinished");
        let checksum = writer.finish().unwrap();
        assert_eq!(checksum, crc32fast::hash(&std::fs::read(&path).unwrap()));
        let file = TensorFile::open(&path).unwrap();
        assert_eq!(file.crc32().unwrap(), checksum);
        let expected = long.narrow(0, 0, PIECE + 7).to_kind(Kind::BFloat16);
        assert!(file.any_tensor("z").unwrap().equal(&expected));
        let tail = long.narrow(0, PIECE + 7, PIECE).view([2, -1]);
        assert!(file.any_tensor("a").unwrap().equal(&tail));
        assert!(file.part("a", 5..9).unwrap().equal(&tail.view([-1]).narrow(0, 5, 4)));
        // into a strided view, in another type
        let turned = Tensor::zeros([PIECE / 2, 2], (Kind::Double, Device::Cpu));
        file.read_into("a", 0, &turned.tr()).unwrap();
        assert!(turned.tr().to_kind(Kind::Float).equal(&tail));
        let inner = Tensor::zeros([PIECE + 3], (Kind::Float, Device::Cpu));
        file.read_into("z", 4, &inner).unwrap();
        assert!(inner.equal(&expected.narrow(0, 4, PIECE + 3).to_kind(Kind::Float)));
    }

    #[test]
    fn an_unfinished_file_leaves_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let entry = Entry { name: "a".into(), kind: Kind::Float, shape: vec![4] };
        let path = dir.path().join("file.safetensors");
        let mut writer = TensorWriter::create(&path, &[entry]).unwrap();
        writer.append(&wave(2, Kind::Float)).unwrap();
        drop(writer);
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
    }
}
