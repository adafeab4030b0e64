//! Safetensors of a Hugging Face directory: one file or shards behind an index.
//!
//! Tensors are read in pieces, straight from their place in the file into their destination, so
//! loading needs little more than the memory of the model. Plain positioned reads rather than a
//! memory map: a file that shrinks or fails while it is read is an error with a name, not a SIGBUS.

use std::collections::{BTreeSet, HashMap};
use std::path::{Path, PathBuf};

use tch::{Device, Kind, Tensor};

use crate::checkpoint::TensorFile;
use crate::fields::read_json;
use crate::{Error, Result};

const INDEX: &str = "model.safetensors.index.json";

/// The tensors of a model directory, located but not yet read.
#[derive(Debug)]
pub struct Weights {
    dir: PathBuf,
    shards: Vec<TensorFile>,
    /// Tensor name to the shard that holds it.
    shard_of: HashMap<String, usize>,
}

impl Weights {
    /// Opens `model.safetensors`, or every shard that `model.safetensors.index.json` names.
    ///
    /// # Errors
    /// A missing file or shard (named), a damaged header, a file shorter than its header says.
    pub fn open(dir: &Path) -> Result<Self> {
        let mut weights = Self { dir: dir.into(), shards: Vec::new(), shard_of: HashMap::new() };
        for path in shard_paths(dir)? {
            let shard = TensorFile::open(&path)?;
            let number = weights.shards.len();
            weights.shard_of.extend(shard.names().into_iter().map(|name| (name, number)));
            weights.shards.push(shard);
        }
        Ok(weights)
    }

    /// Copies tensor `name` into `destination`, converting to its kind and device.
    ///
    /// # Errors
    /// The tensor is missing, is of a type we do not read, or has another shape than
    /// `destination`.
    pub fn read_into(&self, name: &str, destination: &Tensor) -> Result<()> {
        let shard = self.shard(name)?;
        shard.check_shape(name, &destination.size())?;
        shard.read_into(name, 0, destination)
    }

    /// As [`TensorFile::check_shape`].
    pub(crate) fn check_shape(&self, name: &str, expected: &[i64]) -> Result<()> {
        self.shard(name)?.check_shape(name, expected)
    }

    /// Row `number` of the matrix `name`, which has it, in its stored type.
    pub(crate) fn row(&self, name: &str, number: i64, width: i64) -> Result<Tensor> {
        self.shard(name)?.part(name, number * width..(number + 1) * width)
    }

    fn shard(&self, name: &str) -> Result<&TensorFile> {
        let missing = || Error::MissingTensor { path: self.dir.clone(), name: name.into() };
        Ok(&self.shards[*self.shard_of.get(name).ok_or_else(missing)?])
    }

    /// Tensor `name` of the given shape, as [`Self::read_into`] reads it.
    pub(crate) fn read(
        &self,
        name: &str,
        shape: &[i64],
        options: (Kind, Device),
    ) -> Result<Tensor> {
        let tensor = Tensor::empty(shape, options);
        self.read_into(name, &tensor)?;
        Ok(tensor)
    }
}

/// The files that hold the weights of `dir`, all of them present.
fn shard_paths(dir: &Path) -> Result<Vec<PathBuf>> {
    let single = dir.join("model.safetensors");
    if single.is_file() {
        return Ok(vec![single]);
    }
    if !dir.join(INDEX).is_file() {
        return Err(Error::MissingFile { dir: dir.into(), file: "model.safetensors".into() });
    }
    let index: Index = read_json(dir, INDEX)?;
    let shards: BTreeSet<String> = index.weight_map.into_values().collect();
    let present = |shard: String| match dir.join(&shard) {
        path if path.is_file() => Ok(path),
        _ => Err(Error::MissingShard { dir: dir.into(), shard }),
    };
    shards.into_iter().map(present).collect()
}

#[derive(serde::Deserialize)]
struct Index {
    weight_map: HashMap<String, String>,
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::checkpoint::{write_safetensors, write_safetensors_as};

    const CPU_F32: (Kind, Device) = (Kind::Float, Device::Cpu);

    fn sample() -> Vec<(String, Tensor)> {
        vec![
            ("b".into(), Tensor::arange(6, CPU_F32).view([2, 3])),
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
                let read = weights.read(&name, &tensor.size(), CPU_F32).unwrap();
                assert_eq!(read, tensor, "{name} in {kind:?}");
            }
        }
    }

    #[test]
    fn a_tensor_that_is_missing_or_of_another_shape_is_named() {
        let (dir, _) = saved(Kind::Float);
        let weights = Weights::open(dir.path()).unwrap();
        let missing = weights.read("c", &[1], CPU_F32).unwrap_err().to_string();
        assert!(missing.contains("has no tensor c"), "{missing}");
        let shape = weights.read("b", &[3, 2], CPU_F32).unwrap_err().to_string();
        assert!(shape.contains("tensor b has shape [2, 3], expected [3, 2]"), "{shape}");
    }

    #[test]
    fn shards_are_found_through_the_index_and_a_missing_one_is_named() {
        let dir = tempfile::tempdir().unwrap();
        for (number, tensor) in sample().into_iter().enumerate() {
            let path = dir.path().join(format!("model-{number}.safetensors"));
            write_safetensors(&path, &[tensor]).unwrap();
        }
        let index = r#"{"weight_map": {"b": "model-0.safetensors", "a": "model-1.safetensors"}}"#;
        fs::write(dir.path().join("model.safetensors.index.json"), index).unwrap();
        let weights = Weights::open(dir.path()).unwrap();
        assert_eq!(weights.read("a", &[2], CPU_F32).unwrap(), sample()[1].1);
        fs::remove_file(dir.path().join("model-1.safetensors")).unwrap();
        let error = Weights::open(dir.path()).unwrap_err().to_string();
        assert!(error.contains("model-1.safetensors"), "{error}");
    }

    #[test]
    fn a_cut_file_and_a_file_of_something_else_are_refused() {
        let (dir, path) = saved(Kind::Float);
        let whole = fs::read(&path).unwrap();
        fs::write(&path, &whole[..whole.len() - 1]).unwrap();
        assert!(matches!(Weights::open(dir.path()), Err(Error::Truncated { .. })));
        fs::write(&path, "version https://git-lfs.github.com/spec/v1").unwrap();
        assert!(matches!(Weights::open(dir.path()), Err(Error::Safetensors { .. })));
        fs::write(&path, "").unwrap();
        assert!(matches!(Weights::open(dir.path()), Err(Error::Read { .. })));
    }
}
