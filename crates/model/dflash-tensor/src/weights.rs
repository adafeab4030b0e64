//! Safetensors of a Hugging Face directory: one file, or shards with an index.
//!
//! Tensors are copied in pieces from the mapped file to their destination, so loading needs little
//! more memory than the model itself, and almost no host memory for a GPU's part. A file that
//! shrinks or fails during reading gives a named error instead of SIGBUS.

mod quantised;

use std::collections::{BTreeSet, HashMap};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

use dflash_formats::safetensors::{SINGLE, weight_map};
use dflash_kernels::decode::fits_bfloat16;
use tch::{Kind, Tensor};

use super::loading::Progress;
use crate::checkpoint::{TensorFile, pieces};
use crate::{DeviceKind, Error, Result};

/// Name of the embedding tensor of native targets, without prefix.
pub const EMBEDDING: &str = "embed_tokens.weight";
/// Tensor name prefix of plain text models.
pub const DEFAULT_PREFIX: &str = "model.";
/// Name of the lm_head in plain text models.
pub const LM_HEAD: &str = "lm_head";

/// Prefixes of the text model in released checkpoints.
const PREFIXES: [&str; 4] =
    [DEFAULT_PREFIX, "model.language_model.", "language_model.model.", "language_model."];

/// Names of the lm_head in released checkpoints.
const LM_HEADS: [&str; 2] = [LM_HEAD, "language_model.lm_head"];

/// The tensors of a model directory, located but not yet read.
#[derive(Debug)]
pub struct Weights {
    dir: PathBuf,
    shards: Vec<Shard>,
    /// Maps a tensor name to the index of its shard.
    shard_of: HashMap<String, usize>,
    /// Progress of the current load.
    progress: Mutex<Option<Progress>>,
    /// Scale block size of fp8 matrices.
    block: OnceLock<quantised::Block>,
}

/// A selection of rows (dimension 0) of a stored tensor.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WeightRows {
    /// Number of rows of the stored tensor.
    pub whole: i64,
    /// The selected rows, in destination order.
    pub own: Vec<Range<i64>>,
}

/// A file of the directory, opened on first use.
#[derive(Debug)]
struct Shard {
    name: String,
    file: OnceLock<TensorFile>,
}

impl Weights {
    /// Opens `model.safetensors`, or reads the index `model.safetensors.index.json`. Shards are
    /// opened on first use, so shards without needed tensors may be absent.
    ///
    /// # Errors
    /// Neither file exists, or the file is damaged or truncated.
    pub fn open(dir: &Path) -> Result<Self> {
        let single = dir.join(SINGLE);
        if single.is_file() {
            let file = TensorFile::open(&single)?;
            let shard_of = file.names().into_iter().map(|name| (name, 0)).collect();
            let shard = Shard { name: SINGLE.into(), file: file.into() };
            return Ok(Self {
                dir: dir.into(),
                shards: vec![shard],
                shard_of,
                progress: None.into(),
                block: OnceLock::new(),
            });
        }
        let weight_map = weight_map(dir)?;
        let names: BTreeSet<String> = weight_map.values().cloned().collect();
        let number_of: HashMap<&String, usize> = names.iter().zip(0..).collect();
        let shard_of = weight_map.iter();
        let shard_of = shard_of.map(|(name, shard)| (name.clone(), number_of[shard])).collect();
        let shards = names.iter().map(|name| Shard { name: name.clone(), file: OnceLock::new() });
        let (shards, progress, block) = (shards.collect(), None.into(), OnceLock::new());
        Ok(Self { dir: dir.into(), shards, shard_of, progress, block })
    }

    /// Copies tensor `name` into `destination`, converting to its type and device.
    ///
    /// # Errors
    /// The tensor is missing, has an unsupported type, or its shape differs from `destination`.
    pub fn read_into(&self, name: &str, destination: &Tensor) -> Result<()> {
        let shard = self.shard(name)?;
        if self.is_fp8(name)? {
            self.read_fp8(name, 0, 0, destination)?;
        } else {
            shard.check_shape(name, &destination.size())?;
            shard.read_into(name, 0, destination)?;
        }
        self.count(name, shard.bytes_of(name)?)
    }

    /// Copies a slice of tensor `name` into `destination`, converting to its type and device. The
    /// slice starts at `start` in dimension `dim`, is as long as the destination there, and spans
    /// all other dimensions.
    ///
    /// # Errors
    /// As [`Self::read_into`].
    pub fn read_part_into(
        &self,
        name: &str,
        dim: usize,
        start: i64,
        destination: &Tensor,
    ) -> Result<()> {
        let shard = self.shard(name)?;
        if self.is_fp8(name)? {
            self.read_fp8(name, dim, start, destination)?;
        } else {
            shard.read_part_into(name, dim, start, destination)?;
        }
        let (whole, elements) = (shard.bytes_of(name)?, shard.elements_of(name)?);
        self.count(name, whole / elements.max(1) * destination.numel() as u64)
    }

    /// Copies `rows` of tensor `name` into `destination`, converting to its type and device.
    ///
    /// # Errors
    /// As [`Self::read_into`].
    pub fn read_rows_into(
        &self,
        name: &str,
        rows: &WeightRows,
        destination: &Tensor,
    ) -> Result<()> {
        if rows.is_all() {
            return self.read_into(name, destination);
        }
        let (shard, is_fp8) = (self.shard(name)?, self.is_fp8(name)?);
        let mut shape = destination.size();
        shape[0] = rows.whole;
        shard.check_shape(name, &shape)?;
        let mut begin = 0;
        for Range { start, end } in rows.own.iter().cloned() {
            let part = destination.narrow(0, begin, end - start);
            match is_fp8 {
                true => self.read_fp8(name, 0, start, &part)?,
                false => shard.read_part_into(name, 0, start, &part)?,
            }
            begin += end - start;
        }
        let (whole, elements) = (shard.bytes_of(name)?, shard.elements_of(name)?);
        self.count(name, whole / elements.max(1) * destination.numel() as u64)
    }

    /// Starts a load of the tensors that `wanted` selects: checks that their shards exist and their
    /// types are supported, and starts progress reports (see [`super::on_loading`]).
    ///
    /// # Errors
    /// A needed shard is missing or damaged.
    pub fn begin_load(&self, wanted: impl Fn(&str) -> bool) -> Result<()> {
        self.check_quantization()?;
        let names = self.shard_of.keys().filter(|name| wanted(name));
        let total = names.map(|name| self.bytes_of(name)).sum::<Result<u64>>()?;
        *self.progress() = Some(Progress::begin(&self.dir, total));
        Ok(())
    }

    /// Stored bytes of tensor `name`.
    pub fn bytes_of(&self, name: &str) -> Result<u64> {
        self.shard(name)?.bytes_of(name)
    }

    /// Adds `read` bytes of tensor `name` to the progress.
    pub(super) fn count(&self, name: &str, read: u64) -> Result<()> {
        let whole = self.bytes_of(name)?;
        if let Some(progress) = self.progress().as_mut() {
            progress.add(name, whole, read);
        }
        Ok(())
    }

    fn progress(&self) -> MutexGuard<'_, Option<Progress>> {
        self.progress.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether there is a tensor `name`.
    pub fn has(&self, name: &str) -> bool {
        self.shard_of.contains_key(name)
    }

    /// As [`TensorFile::part`].
    pub fn part(&self, name: &str, elements: Range<i64>) -> Result<Tensor> {
        let part = self.shard(name)?.part(name, elements)?;
        self.count(name, (part.numel() * part.kind().elt_size_in_bytes()) as u64)?;
        Ok(part)
    }

    /// Whether tensor `name` is stored in bfloat16.
    ///
    /// # Errors
    /// The tensor is missing or has a non-weight type.
    pub fn is_bfloat16(&self, name: &str) -> Result<bool> {
        Ok(!self.is_fp8(name)? && self.shard(name)?.readable_kind(name)? == Kind::BFloat16)
    }

    /// Whether the matrices that `wanted` selects fit bfloat16 without loss: they are stored in it,
    /// or every value converts exactly.
    ///
    /// # Errors
    /// As [`Self::read_into`].
    pub fn fit_bfloat16(&self, wanted: impl Fn(&str) -> bool) -> Result<bool> {
        for name in self.shard_of.keys().filter(|name| wanted(name)) {
            let shard = self.shard(name)?;
            if shard.shape(name)?.len() != 2 || self.is_bfloat16(name)? {
                continue;
            }
            if self.is_fp8(name)? {
                return Ok(false);
            }
            for piece in pieces(0..shard.elements_of(name)? as i64) {
                if !fits_bfloat16(&shard.part(name, piece)?) {
                    return Ok(false);
                }
            }
        }
        Ok(true)
    }

    /// The name of the lm_head, without `.weight`.
    pub fn lm_head(&self) -> &'static str {
        let own = |name: &&&str| self.has(&format!("{name}.weight"));
        LM_HEADS.iter().find(own).copied().unwrap_or(LM_HEAD)
    }

    /// The text model's tensor name prefix.
    pub fn prefix(&self) -> &'static str {
        let has = |prefix: &&&str| self.shard_of.contains_key(&format!("{prefix}{EMBEDDING}"));
        PREFIXES.iter().find(has).copied().unwrap_or(DEFAULT_PREFIX)
    }

    /// As [`TensorFile::check_shape`].
    pub fn check_shape(&self, name: &str, expected: &[i64]) -> Result<()> {
        self.shard(name)?.check_shape(name, expected)
    }

    fn shard(&self, name: &str) -> Result<&TensorFile> {
        let missing = || Error::MissingTensor { path: self.dir.clone(), name: name.into() };
        let shard = &self.shards[*self.shard_of.get(name).ok_or_else(missing)?];
        if let Some(file) = shard.file.get() {
            return Ok(file);
        }
        let path = self.dir.join(&shard.name);
        if !path.is_file() {
            let (dir, shard) = (self.dir.clone(), shard.name.clone());
            return Err(Error::MissingShard { dir, shard, tensor: name.into() });
        }
        let file = TensorFile::open(&path)?;
        // Another thread may have opened it meanwhile; either result is fine.
        Ok(shard.file.get_or_init(|| file))
    }

    /// Reads tensor `name` of the given shape, as [`Self::read_into`] does.
    pub fn read(&self, name: &str, shape: &[i64], place: DeviceKind) -> Result<Tensor> {
        let tensor = Tensor::empty(shape, place.options());
        self.read_into(name, &tensor)?;
        Ok(tensor)
    }
}

impl WeightRows {
    /// Whether these are all rows in their stored order.
    fn is_all(&self) -> bool {
        let mut end = 0;
        let follows = |own: &Range<i64>| own.start == std::mem::replace(&mut end, own.end);
        self.own.iter().all(follows) && end == self.whole
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::checkpoint::{write_safetensors, write_safetensors_as};

    fn sample() -> Vec<(String, Tensor)> {
        vec![
            ("b".into(), Tensor::arange(6, DeviceKind::CPU_F32.options()).view([2, 3])),
            ("a".into(), Tensor::from_slice(&[0.5f32, -2.0])),
        ]
    }

    /// A directory with the sample in one file.
    fn saved(kind: Kind) -> (tempfile::TempDir, PathBuf) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("model.safetensors");
        write_safetensors_as(&path, &sample(), Some(kind)).unwrap();
        (dir, path)
    }

    #[test]
    fn what_was_written_is_read_back_in_either_kind() {
        for kind in [Kind::Float, Kind::BFloat16] {
            let (dir, _) = saved(kind);
            let weights = Weights::open(dir.path()).unwrap();
            for (name, tensor) in sample() {
                let read = weights.read(&name, &tensor.size(), DeviceKind::CPU_F32).unwrap();
                assert_eq!(read, tensor, "{name} in {kind:?}");
            }
        }
    }

    #[test]
    fn a_tensor_that_is_missing_or_of_another_shape_is_named() {
        let (dir, _) = saved(Kind::Float);
        let weights = Weights::open(dir.path()).unwrap();
        let missing = weights.read("c", &[1], DeviceKind::CPU_F32).unwrap_err().to_string();
        assert!(missing.contains("has no tensor c"), "{missing}");
        let shape = weights.read("b", &[3, 2], DeviceKind::CPU_F32).unwrap_err().to_string();
        assert!(shape.contains("tensor b has shape [2, 3], expected [3, 2]"), "{shape}");
    }

    #[test]
    fn shards_are_found_through_the_index_and_a_missing_one_is_named_when_it_is_needed() {
        let dir = tempfile::tempdir().unwrap();
        for (number, tensor) in sample().into_iter().enumerate() {
            let path = dir.path().join(format!("model-{number}.safetensors"));
            write_safetensors(&path, &[tensor]).unwrap();
        }
        let index = r#"{"weight_map": {"b": "model-0.safetensors", "a": "model-1.safetensors"}}"#;
        fs::write(dir.path().join("model.safetensors.index.json"), index).unwrap();
        fs::remove_file(dir.path().join("model-0.safetensors")).unwrap();
        let weights = Weights::open(dir.path()).unwrap();
        assert_eq!(weights.read("a", &[2], DeviceKind::CPU_F32).unwrap(), sample()[1].1);
        let error = weights.read("b", &[2, 3], DeviceKind::CPU_F32).unwrap_err().to_string();
        let expected = "lacks the shard model-0.safetensors, which has the tensor b according to its model.safetensors.index.json; download it again";
        assert!(error.ends_with(expected), "{error}");
        let error = weights.read("c", &[1], DeviceKind::CPU_F32).unwrap_err().to_string();
        assert!(error.contains("has no tensor c"), "{error}");
    }

    #[test]
    fn a_cut_file_and_a_file_of_something_else_are_refused() {
        let (dir, path) = saved(Kind::Float);
        let whole = fs::read(&path).unwrap();
        fs::write(&path, &whole[..whole.len() - 1]).unwrap();
        let message = || Weights::open(dir.path()).map(drop).unwrap_err().to_string();
        assert!(message().contains("and its header says"), "{}", message());
        fs::write(&path, "version https://git-lfs.github.com/spec/v1").unwrap();
        assert!(message().contains("is not a readable safetensors file"), "{}", message());
        fs::write(&path, "").unwrap();
        assert!(message().contains("shorter than any header"), "{}", message());
    }
}
