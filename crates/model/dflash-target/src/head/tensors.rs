//! Locates embedding, final norm and output projection in a checkpoint.
//!
//! They are found by name, with any prefix: nested models use `model.language_model.`,
//! `language_model.model.` or others. Only the files that hold them need to exist.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use dflash_formats::safetensors::{SINGLE, weight_map};
use dflash_tensor::checkpoint::TensorFile;
use dflash_tensor::{Error, Result};
use tch::{Device, Kind, Tensor};

use crate::facts::{NamedTensors, TargetFacts};

/// Module names of embeddings: Llama and most others, Nemotron-H, DeepSeek V4, GPT-2 and
/// derivatives.
const EMBEDDINGS: [&str; 6] =
    ["embed_tokens", "embeddings", "embed", "wte", "word_embeddings", "tok_embeddings"];
/// Module names of final norms.
const NORMS: [&str; 5] = ["norm", "norm_f", "final_layernorm", "ln_f", "final_norm"];
/// Module names of output projections.
const HEADS: [&str; 4] = ["lm_head", "head", "output", "embed_out"];
/// Name parts outside the text model: towers, projectors, multi-token prediction layers.
const BESIDE: [&str; 8] =
    ["vis", "audio", "speech", "image", "projector", "mtp", "embed_per_layer", "aligner"];
/// Maximum number of names in a message.
const SHOWN: usize = 12;

/// The tensors of a checkpoint by name; none has been read.
#[derive(Debug)]
pub(crate) struct HeadTensors {
    dir: PathBuf,
    file_of: BTreeMap<String, String>,
}

/// Tensor names of a head.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Located {
    pub(crate) embedding: String,
    pub(crate) norm: String,
    pub(crate) norm_bias: Option<String>,
    /// `None` if the output projection is tied.
    pub(crate) head: Option<String>,
    pub(crate) head_bias: Option<String>,
}

impl HeadTensors {
    /// Lists the tensors of `model.safetensors`, or of its index; shards may be missing.
    ///
    /// # Errors
    /// Neither exists, or one does not parse.
    pub(crate) fn open(dir: &Path) -> Result<Self> {
        let single = dir.join(SINGLE);
        let file_of = if single.is_file() {
            let names = TensorFile::open(&single)?.names().into_iter();
            names.map(|name| (name, SINGLE.to_owned())).collect()
        } else {
            weight_map(dir)?
        };
        Ok(Self { dir: dir.into(), file_of })
    }

    /// Finds the tensors of the head that `facts` describe.
    ///
    /// # Errors
    /// A missing, ambiguous or quantized tensor.
    pub(crate) fn locate(&self, facts: &TargetFacts) -> Result<Located> {
        let named = &facts.tensors;
        let (embedding, prefix) = self.embedding(named, facts)?;
        let norm = match &named.norm {
            Some(norm) => self.named(norm)?,
            None => self.norm_beside(&prefix).ok_or_else(|| self.missing("final norm", "norm"))?,
        };
        let own_bias = norm.strip_suffix(".weight").map(|module| format!("{module}.bias"));
        let norm_bias = match &named.norm_bias {
            Some(bias) => Some(self.named(bias)?),
            None => own_bias.filter(|bias| self.file_of.contains_key(bias)),
        };
        let head = match &named.head {
            Some(head) => Some(self.named(head)?).filter(|head| *head != embedding),
            None if facts.is_tied() => None,
            None => self.head(facts)?,
        };
        let module = head.as_ref().and_then(|head| head.strip_suffix(".weight"));
        let head_bias = module.map(|module| format!("{module}.bias"));
        let head_bias = head_bias.filter(|bias| self.file_of.contains_key(bias));
        Ok(Located { embedding, norm, norm_bias, head, head_bias })
    }

    /// Candidates for a head of these sizes (H, V), for a target of unknown family.
    pub(crate) fn candidates(&self, hidden: Option<i64>, rows: Option<i64>) -> NamedTensors {
        let outer: Vec<&String> = self.outer().collect();
        let fits = |name: &&&String, dims: usize, kinds: &[&str], sizes: &[Option<i64>]| {
            let shape = self.shape(name).unwrap_or_default();
            let right = |(found, expected): (&i64, &Option<i64>)| {
                expected.is_none_or(|expected| *found == expected)
            };
            let sized = shape.len() == dims && shape.iter().zip(sizes).all(right);
            let called = last_part(name).is_some_and(|part| kinds.contains(&part));
            (sized && called) || (sized && dims == 1 && name.ends_with("norm.weight"))
        };
        let find = |dims, kinds: &[&str], sizes: &[Option<i64>]| {
            outer.iter().find(|name| fits(name, dims, kinds, sizes)).map(|name| (*name).clone())
        };
        let by_shape = |except: Option<&String>| {
            let matrix = |name: &&&String| {
                let shape = self.shape(name).unwrap_or_default();
                let fits =
                    |dim: usize, size: Option<i64>| size.is_none_or(|size| shape[dim] == size);
                shape.len() == 2 && fits(0, rows) && fits(1, hidden)
            };
            outer
                .iter()
                .filter(|name| Some(**name) != except)
                .find(matrix)
                .map(|&name| name.clone())
        };
        let embedding = find(2, &EMBEDDINGS, &[rows, hidden]).or_else(|| by_shape(None));
        let norm = find(1, &NORMS, &[hidden]);
        let norm_bias = norm
            .as_ref()
            .and_then(|norm| norm.strip_suffix(".weight"))
            .map(|module| format!("{module}.bias"))
            .filter(|bias| self.file_of.contains_key(bias));
        let head = find(2, &HEADS, &[rows, hidden])
            .filter(|head| Some(head) != embedding.as_ref())
            .or_else(|| embedding.as_ref().and_then(|found| by_shape(Some(found))));
        NamedTensors { embedding, norm, norm_bias, head }
    }

    /// Checks that `name` is not quantized, and returns its type.
    ///
    /// # Errors
    /// It is quantized, or its file is missing.
    pub(crate) fn kind(&self, name: &str, facts: &TargetFacts) -> Result<Kind> {
        match self.file(name)?.stored_kind(name)? {
            Ok(kind @ (Kind::Float | Kind::Half | Kind::BFloat16 | Kind::Double)) => Ok(kind),
            Ok(kind) => Err(self.quantized(name, format!("{kind:?}"), facts)),
            Err(found) => Err(self.quantized(name, found, facts)),
        }
    }

    /// Reads `shape` of the tensor `name`, which may have more rows, to `place`.
    ///
    /// # Errors
    /// Another shape or fewer rows; a missing or damaged file.
    pub(crate) fn read(
        &self,
        name: &str,
        shape: &[i64],
        device: Device,
        kind: Kind,
    ) -> Result<Tensor> {
        let file = self.file(name)?;
        self.check_rows(&file, name, shape)?;
        let tensor = Tensor::empty(shape, (kind, device));
        file.read_into(name, 0, &tensor)?;
        Ok(tensor)
    }

    /// Rows `ids` of the tensor `name`, which has at least as many rows as `shape`, in float32: [I,
    /// ..] for a shape [V, ..].
    ///
    /// # Errors
    /// As [`Self::read`].
    pub(crate) fn rows(&self, name: &str, ids: &[i64], shape: &[i64]) -> Result<Tensor> {
        let file = self.file(name)?;
        self.check_rows(&file, name, shape)?;
        let width: i64 = shape[1..].iter().product();
        let row = |&id: &i64| {
            let row = file.part(name, id * width..(id + 1) * width)?;
            Ok(row.to_kind(Kind::Float).view(&shape[1..]))
        };
        Ok(Tensor::stack(&ids.iter().map(row).collect::<Result<Vec<_>>>()?, 0))
    }

    fn check_rows(&self, file: &TensorFile, name: &str, expected: &[i64]) -> Result<()> {
        let found = file.shape(name)?;
        let fits = found.len() == expected.len()
            && found[0] >= expected[0]
            && found[1..] == expected[1..]
            && (expected.len() > 1 || found[0] == expected[0]);
        if fits {
            return Ok(());
        }
        let (path, name, expected) = (self.dir.clone(), name.into(), expected.into());
        Err(Error::Shape { path, name, found, expected })
    }

    fn embedding(&self, named: &NamedTensors, facts: &TargetFacts) -> Result<(String, String)> {
        if let Some(name) = &named.embedding {
            let name = self.named(name)?;
            let prefix = prefix(&name).unwrap_or_default().to_owned();
            return Ok((name, prefix));
        }
        let fits: Vec<(&String, &str)> = self
            .outer()
            .filter(|name| last_part(name).is_some_and(|part| EMBEDDINGS.contains(&part)))
            .filter_map(|name| Some((name, prefix(name)?)))
            .filter(|(_, prefix)| named.norm.is_some() || self.norm_beside(prefix).is_some())
            .collect();
        match fits.as_slice() {
            [(name, prefix)] => Ok(((*name).clone(), (*prefix).to_owned())),
            [(first, _), (second, _), ..] => Err(Error::TwoHeadTensors {
                dir: self.dir.clone(),
                what: "token embedding",
                key: "embedding",
                first: (*first).clone(),
                second: (*second).clone(),
            }),
            [] => match self.packed(&EMBEDDINGS) {
                Some(name) => Err(self.is_packed(&name, facts)),
                None => Err(self.missing("token embedding", "embedding")),
            },
        }
    }

    fn norm_beside(&self, prefix: &str) -> Option<String> {
        let name = |part: &&str| format!("{prefix}{part}.weight");
        NORMS.iter().map(name).find(|name| self.file_of.contains_key(name))
    }

    /// The output projection; `None` if there is none, so that it is tied.
    fn head(&self, facts: &TargetFacts) -> Result<Option<String>> {
        let fits: Vec<&String> = self
            .outer()
            .filter(|name| last_part(name).is_some_and(|part| HEADS.contains(&part)))
            .collect();
        match fits.as_slice() {
            [name] => Ok(Some((*name).clone())),
            [first, second, ..] => Err(Error::TwoHeadTensors {
                dir: self.dir.clone(),
                what: "output projection",
                key: "head",
                first: (*first).clone(),
                second: (*second).clone(),
            }),
            [] => match self.packed(&HEADS) {
                Some(name) => Err(self.is_packed(&name, facts)),
                None => Ok(None),
            },
        }
    }

    /// A tensor of a module with one of these names that has no plain weight.
    fn packed(&self, modules: &[&str]) -> Option<String> {
        let is_packed = |name: &&String| {
            let mut parts = name.rsplit('.');
            let (leaf, module) = (parts.next(), parts.next());
            leaf.is_some_and(|leaf| leaf.contains("weight") || leaf == "scales" || leaf == "qzeros")
                && module.is_some_and(|module| modules.contains(&module))
        };
        self.outer().find(is_packed).cloned()
    }

    fn is_packed(&self, name: &str, facts: &TargetFacts) -> Error {
        let kind = self.file(name).and_then(|file| file.stored_kind(name));
        let found = match kind {
            Ok(Ok(kind)) => format!("{kind:?}"),
            Ok(Err(found)) => found,
            Err(error) => return error,
        };
        self.quantized(name, found, facts)
    }

    fn quantized(&self, name: &str, found: String, facts: &TargetFacts) -> Error {
        let method = match &facts.quantization {
            Some(method) => format!("quantization_config's quant_method is {method}"),
            None => "config.json has no quantization_config".to_owned(),
        };
        Error::QuantizedHead { dir: self.dir.clone(), name: name.into(), found, method }
    }

    fn missing(&self, what: &'static str, key: &'static str) -> Error {
        let mut names: Vec<&str> = self.outer().map(String::as_str).collect();
        let rest = names.len().saturating_sub(SHOWN);
        names.truncate(SHOWN);
        let mut names = names.join(", ");
        if rest > 0 {
            names += &format!(" and {rest} more");
        }
        Error::NoHeadTensor { dir: self.dir.clone(), what, key, names }
    }

    fn named(&self, name: &str) -> Result<String> {
        let missing = || Error::MissingTensor { path: self.dir.clone(), name: name.into() };
        self.file_of.contains_key(name).then(|| name.to_owned()).ok_or_else(missing)
    }

    /// Names of the text model's tensors outside numbered layers.
    fn outer(&self) -> impl Iterator<Item = &String> {
        self.file_of.keys().filter(|name| is_outer(name))
    }

    fn shape(&self, name: &str) -> Option<Vec<i64>> {
        self.file(name).ok()?.shape(name).ok()
    }

    fn file(&self, name: &str) -> Result<TensorFile> {
        let missing = || Error::MissingTensor { path: self.dir.clone(), name: name.into() };
        let file = self.file_of.get(name).ok_or_else(missing)?;
        let path = self.dir.join(file);
        if !path.is_file() {
            return Err(Error::MissingShard {
                dir: self.dir.clone(),
                shard: file.clone(),
                tensor: name.into(),
            });
        }
        TensorFile::open(&path)
    }
}

fn is_outer(name: &str) -> bool {
    let mut parts = name.split('.');
    parts.all(|part| {
        part.parse::<u64>().is_err() && !BESIDE.iter().any(|other| part.contains(other))
    })
}

/// The module's own name, e.g. `embed_tokens` for `model.embed_tokens.weight`.
fn last_part(name: &str) -> Option<&str> {
    name.strip_suffix(".weight")?.rsplit('.').next()
}

/// The prefix of the module's own name, e.g. `model.` for `model.embed_tokens.weight`.
fn prefix(name: &str) -> Option<&str> {
    let part = last_part(name)?;
    name.strip_suffix(".weight")?.strip_suffix(part)
}

#[cfg(test)]
mod tests {
    use super::*;
    use dflash_tensor::checkpoint::write_safetensors;

    #[test]
    fn a_matrix_of_another_width_is_no_candidate() {
        let dir = tempfile::tempdir().unwrap();
        let zeros = |name: &str, shape: &[i64]| {
            (name.to_owned(), Tensor::zeros(shape, (Kind::Float, Device::Cpu)))
        };
        let stored = [
            zeros("model.embed_tokens.weight", &[10, 4]),
            zeros("model.embed_tokens_per_layer.weight", &[10, 6]),
            zeros("model.norm.weight", &[4]),
        ];
        write_safetensors(&dir.path().join("model.safetensors"), &stored).unwrap();
        let tensors = HeadTensors::open(dir.path()).unwrap();
        let found = tensors.candidates(Some(4), Some(10));
        assert_eq!(found.embedding.as_deref(), Some("model.embed_tokens.weight"));
        assert_eq!(found.norm.as_deref(), Some("model.norm.weight"));
        assert_eq!(found.head, None, "the embedding is the output projection");
    }
}
