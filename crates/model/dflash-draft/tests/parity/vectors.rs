//! Reads reference vectors.

use std::path::Path;

use dflash_tensor::checkpoint::TensorFile;
use dflash_test_place::place;
use serde_json::Value;
use tch::{Kind, Tensor};

/// A safetensors file of vectors with settings in its header.
pub(crate) struct Vectors {
    file: TensorFile,
}

impl Vectors {
    pub(crate) fn open(path: &Path) -> Self {
        Self { file: TensorFile::open(path).unwrap() }
    }

    /// The tensor at the tests' place: inputs in its type, results in the stored type.
    pub(crate) fn tensor(&self, name: &str) -> Tensor {
        let is_result = ["out.", "grad."].iter().any(|prefix| name.starts_with(prefix));
        if is_result { self.stored(name) } else { place().put(&self.stored(name)) }
    }

    /// On the place's device, in the file's type.
    pub(crate) fn stored(&self, name: &str) -> Tensor {
        self.file.any_tensor(name).unwrap().to_device(place().device)
    }

    /// Without the leading batch dimension of one.
    pub(crate) fn row(&self, name: &str) -> Tensor {
        self.tensor(name).squeeze_dim(0)
    }

    pub(crate) fn integers(&self, name: &str) -> Vec<i64> {
        let tensor = self.file.any_tensor(name).unwrap();
        Vec::try_from(tensor.view([-1]).to_kind(Kind::Int64)).unwrap()
    }

    pub(crate) fn names(&self) -> Vec<String> {
        self.file.names()
    }

    pub(crate) fn note(&self, name: &str) -> &str {
        &self.file.notes().unwrap()[name]
    }

    pub(crate) fn json(&self, name: &str) -> Value {
        serde_json::from_str(self.note(name)).unwrap()
    }
}

/// A JSON array (of arrays) of numbers.
pub(crate) fn matrix(value: &Value) -> Tensor {
    let rows = value.as_array().unwrap();
    if rows.first().is_some_and(Value::is_array) {
        return Tensor::stack(&rows.iter().map(matrix).collect::<Vec<_>>(), 0);
    }
    Tensor::from_slice(&numbers(value)).to_kind(Kind::Float).to_device(place().device)
}

pub(crate) fn numbers(value: &Value) -> Vec<f64> {
    value.as_array().unwrap().iter().map(|x| x.as_f64().unwrap()).collect()
}

pub(crate) fn indices(value: &Value) -> Vec<usize> {
    value.as_array().unwrap().iter().map(|x| x.as_u64().unwrap() as usize).collect()
}
