//! The drafter at a path, and those of its files that serving needs.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use dflash_formats::draft::{ARCHITECTURE, Layout, Outline};
use dflash_formats::fields::Fields;
use dflash_formats::gguf::{self, GgufFile};
use dflash_formats::safetensors::Header;
use dflash_hub::ModelPart;
use dflash_identity::{TargetIdentity, file_digest};
use dflash_run::{Checkpoint, Evaluation, draft_dir};
use serde_json::Value;

use crate::Error;
use crate::origin::Origin;

const CONFIG: &str = "config.json";
const WEIGHTS: &str = "model.safetensors";
pub(crate) const VOCABULARY: &str = "draft_vocabulary.safetensors";
pub(crate) const GGUF: &str = ".gguf";

#[derive(Debug)]
pub(crate) struct Drafter {
    /// Its location: a directory, or a GGUF file.
    pub(crate) place: PathBuf,
    /// The files to upload, by name in the repository.
    pub(crate) files: BTreeMap<String, PathBuf>,
    pub(crate) shape: Outline,
    /// Number of weights, and their type if it is uniform.
    pub(crate) parameters: Option<u64>,
    pub(crate) dtype: Option<String>,
    /// The target that it was made for, if recorded.
    pub(crate) made_for: Option<TargetIdentity>,
    /// The run that made it.
    pub(crate) origin: Option<Origin>,
    /// The digest by which reports identify it; `None` if its weights are in shards.
    pub(crate) digest: Option<String>,
    /// Reports stored beside it, with their files.
    pub(crate) evaluations: Vec<(PathBuf, Evaluation)>,
}

impl Drafter {
    /// The drafter at `path`, with additional GGUF files.
    ///
    /// # Errors
    /// Something that is not a drafter, files that are damaged or do not belong together, and
    /// contents that must not be published.
    pub(crate) fn find(path: &Path, gguf: &[PathBuf]) -> Result<Self, Error> {
        let place = draft_dir(path)?;
        let mut drafter = match place.is_dir() {
            true if place.join(CONFIG).is_file() => Self::of_directory(place)?,
            true => Self::of_gguf(place)?,
            false if name_of(&place).ends_with(GGUF) && place.is_file() => Self::of_gguf(place)?,
            false => {
                let missing = format!("directory or {GGUF} file of that name");
                return Err(Error::NoDrafter { path: place, missing });
            }
        };
        for file in gguf {
            drafter.add_gguf(file)?;
        }
        Ok(drafter)
    }

    fn of_directory(place: PathBuf) -> Result<Self, Error> {
        let config = json(&place.join(CONFIG))?;
        refuse_paths(&place.join(CONFIG), "", &config)?;
        let missing = |missing| Error::NoDrafter { path: place.clone(), missing };
        let names = ModelPart::Draft.present(&place).map_err(missing)?;
        let (mut parameters, mut dtype) = (None, None);
        for name in
            names.iter().filter(|name| name.ends_with(".safetensors") && **name != VOCABULARY)
        {
            let (count, of_file) = count_parameters(&place.join(name))?;
            parameters = Some(parameters.unwrap_or_default() + count);
            dtype = of_file;
        }
        let modules = modules(&config).into_iter().filter(|name| place.join(name).is_file());
        let names = names.into_iter().chain(modules);
        let files = names.map(|name| (name.clone(), place.join(name))).collect();
        let weights = place.join(WEIGHTS);
        let checkpoint = Checkpoint::of_run(&place)?;
        let evaluations = match &checkpoint {
            Some(checkpoint) => checkpoint.evaluations()?,
            None => Vec::new(),
        };
        let report = place.join(Checkpoint::EVALUATIONS);
        let mut drafter = Self {
            files,
            shape: Outline::of_config(&Fields::of(&place.join(CONFIG), &config)),
            parameters,
            dtype,
            made_for: TargetIdentity::of_draft(&place)?,
            origin: checkpoint.map(|checkpoint| Origin::of(&checkpoint)).transpose()?.flatten(),
            digest: weights.is_file().then(|| file_digest(&weights)).transpose()?,
            evaluations: evaluations.into_iter().map(|it| (report.clone(), it)).collect(),
            place,
        };
        for file in gguf_files(&drafter.place)? {
            drafter.add_gguf(&file)?;
        }
        Ok(drafter)
    }

    /// A GGUF file, or the only ones in a directory.
    fn of_gguf(place: PathBuf) -> Result<Self, Error> {
        let found = if place.is_dir() { gguf_files(&place)? } else { vec![place.clone()] };
        let Some(first) = found.first() else {
            let missing = format!("{CONFIG} and no {GGUF} file");
            return Err(Error::NoDrafter { path: place, missing });
        };
        let mut drafter = Self {
            files: BTreeMap::new(),
            shape: Outline::of_gguf(&open_gguf(first)?),
            parameters: None,
            dtype: None,
            made_for: None,
            origin: None,
            digest: Some(file_digest(first)?),
            evaluations: Vec::new(),
            place,
        };
        for file in &found {
            drafter.add_gguf(file)?;
        }
        Ok(drafter)
    }

    fn add_gguf(&mut self, file: &Path) -> Result<(), Error> {
        let own = Outline::of_gguf(&open_gguf(file)?);
        let facts = [
            ("block size", own.block_size, self.shape.block_size),
            ("number of layers", own.layers, self.shape.layers),
            ("hidden size", own.hidden_size, self.shape.hidden_size),
        ];
        for (what, found, expected) in facts {
            if let (Some(found), Some(expected)) = (found, expected)
                && found != expected
            {
                return Err(Error::OtherDrafter { path: file.into(), what, found, expected });
            }
        }
        let name = name_of(file);
        match self.files.insert(name.clone(), file.into()) {
            Some(first) if first != file => {
                Err(Error::SameName { name, first, second: file.into() })
            }
            _ => Ok(()),
        }
    }

    /// The names of its GGUF files.
    pub(crate) fn gguf(&self) -> impl Iterator<Item = &str> {
        self.files.keys().map(String::as_str).filter(|name| name.ends_with(GGUF))
    }

    pub(crate) fn is_gguf_alone(&self) -> bool {
        self.shape.layout == Layout::Gguf
    }
}

/// Number of weights in the safetensors file at `path`, and their type if it is uniform.
///
/// # Errors
/// A truncated or damaged file.
fn count_parameters(path: &Path) -> Result<(u64, Option<String>), Error> {
    let (_, header) = Header::open(path)?;
    let tensors = header.metadata.tensors();
    let count = tensors.values().map(|tensor| tensor.shape.iter().product::<usize>() as u64).sum();
    let mut types = tensors.values().map(|tensor| tensor.dtype);
    let first = types.next().filter(|first| types.all(|other| other == *first));
    Ok((count, first.map(|dtype| format!("{dtype:?}"))))
}

/// Opens a drafter's GGUF file.
///
/// # Errors
/// A file that is damaged, or of another model.
fn open_gguf(path: &Path) -> Result<GgufFile, Error> {
    let file = GgufFile::open(path)?;
    let architecture = match file.value("general.architecture") {
        Some(gguf::Value::Text(name)) if name == ARCHITECTURE => return Ok(file),
        Some(gguf::Value::Text(name)) => name.clone(),
        _ => "unknown".to_owned(),
    };
    Err(Error::OtherArchitecture { path: path.into(), architecture })
}

/// The Python files that `auto_map` names, which Transformers needs to load such a model.
fn modules(config: &Value) -> Vec<String> {
    let entries = config["auto_map"].as_object().into_iter().flatten();
    let classes = entries.filter_map(|(_, class)| class.as_str());
    let modules = classes.filter_map(|class| class.rsplit_once('.')).map(|(module, _)| module);
    let plain = |module: &&str| {
        !module.is_empty() && module.chars().all(|c| c.is_ascii_alphanumeric() || c == '_')
    };
    modules.filter(plain).map(|module| format!("{module}.py")).collect()
}

fn gguf_files(dir: &Path) -> Result<Vec<PathBuf>, Error> {
    let fault = |source| Error::Read { path: dir.into(), source };
    let mut found = Vec::new();
    for entry in std::fs::read_dir(dir).map_err(fault)? {
        let path = entry.map_err(fault)?.path();
        if path.is_file() && name_of(&path).ends_with(GGUF) && !name_of(&path).starts_with('.') {
            found.push(path);
        }
    }
    found.sort();
    Ok(found)
}

fn name_of(path: &Path) -> String {
    path.file_name().unwrap_or_default().to_string_lossy().into_owned()
}

/// Refuses paths of this machine, as other trainers leave in their configurations.
fn refuse_paths(path: &Path, key: &str, value: &Value) -> Result<(), Error> {
    let below = |name: &str| if key.is_empty() { name.to_owned() } else { format!("{key}.{name}") };
    match value {
        Value::String(text) if is_path(text) => {
            let (key, value) = (key.to_owned(), text.clone());
            Err(Error::LocalPath { path: path.into(), key, value })
        }
        Value::Array(items) => items.iter().try_for_each(|item| refuse_paths(path, key, item)),
        Value::Object(members) => {
            members.iter().try_for_each(|(name, value)| refuse_paths(path, &below(name), value))
        }
        _ => Ok(()),
    }
}

fn is_path(text: &str) -> bool {
    let drive = text.get(1..3).is_some_and(|rest| rest == ":\\");
    text.starts_with('/') || text.starts_with("~/") || text.starts_with("./") || drive
}

fn json(path: &Path) -> Result<Value, Error> {
    let text = std::fs::read(path).map_err(|source| Error::Read { path: path.into(), source })?;
    serde_json::from_slice(&text).map_err(|source| Error::Json { path: path.into(), source })
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_configuration_with_a_path_is_not_published() {
        let check = |config: Value, expect: Option<&str>| {
            let refused = refuse_paths(Path::new("config.json"), "", &config).err();
            let refused = refused.map(|error| error.to_string());
            assert_eq!(refused.is_some(), expect.is_some(), "{refused:?}");
            assert!(refused.unwrap_or_default().contains(expect.unwrap_or_default()));
        };
        check(json!({"name": "Qwen/Qwen3-8B", "dtype": "bfloat16"}), None);
        check(json!({"_name_or_path": "/home/me/x"}), Some("_name_or_path is /home/me/x"));
        check(json!({"a": {"b": [1, "~/x"]}}), Some("a.b is ~/x"));
        check(json!({"a": "C:\\x"}), Some("a is C:\\x"));
    }

    #[test]
    fn modules_are_plain_files() {
        let config = json!({"auto_map": {"AutoModel": "dflash.DFlashDraftModel",
            "AutoConfig": "../evil.Config", "AutoTokenizer": ["x.Y", null]}});
        assert_eq!(modules(&config), ["dflash.py"]);
    }
}
