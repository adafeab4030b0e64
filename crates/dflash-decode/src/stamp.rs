//! What decides the answers of a regeneration.
//!
//! A file that is half made, or is to get more rows, goes on only with the same target, template,
//! tokenizer, data and settings. The number of sequences decoded together and the device are left
//! out: they decide near ties alone, and a run that was stopped for want of memory goes on with
//! fewer.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use dflash_model::target::TargetConfig;
use dflash_settings::RegenerateSettings;
use dflash_text::ChatTokenizer;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use sha2::{Digest, Sha256};
use tch::Kind;

use crate::Error;
use crate::plain::Limits;

/// Items by the words in which a difference is told.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub(crate) struct Stamp(BTreeMap<String, Value>);

impl Stamp {
    /// The stamp of a run.
    ///
    /// # Errors
    /// The model's or the data's files cannot be read.
    pub(crate) fn new(
        settings: &RegenerateSettings,
        target_dir: &Path,
        (config, tokenizer, limits): (&TargetConfig, &ChatTokenizer, &Limits),
        dtype: Kind,
    ) -> Result<Self, Error> {
        let items = [
            ("data", json!(file_digest(&settings.data)?)),
            ("target's config.json", json!(file_digest(&target_dir.join("config.json"))?)),
            ("target's weights", json!(weights_digest(target_dir)?)),
            ("tokenizer", json!(tokenizer_digest(target_dir)?)),
            ("chat template", json!(digest(format!("{:?}", tokenizer.template_sources())))),
            ("context", json!(config.max_position_embeddings)),
            ("end tokens", json!(limits.stop_ids)),
            ("--max-new-tokens", json!(limits.max_new_tokens)),
            ("--dtype", json!(name_of(dtype))),
            ("sampling", json!("greedy")),
        ];
        Ok(Self(items.map(|(name, value)| (name.to_owned(), value)).into()))
    }

    /// `chat template: 1f0a there, 77b2 now; ...`, or nothing.
    pub(crate) fn differences(&self, now: &Self) -> String {
        let names: std::collections::BTreeSet<&String> =
            self.0.keys().chain(now.0.keys()).collect();
        let shown = |value: Option<&Value>| match value {
            None => "nothing".to_owned(),
            Some(Value::String(text)) => text.clone(),
            Some(other) => other.to_string(),
        };
        let difference = |name: &String| {
            let (there, here) = (self.0.get(name), now.0.get(name));
            (there != here).then(|| format!("{name}: {} there, {} now", shown(there), shown(here)))
        };
        names.into_iter().filter_map(difference).collect::<Vec<_>>().join("; ")
    }

    #[cfg(test)]
    pub(crate) fn of(items: &[(&str, i64)]) -> Self {
        Self(items.iter().map(|(name, value)| ((*name).to_owned(), json!(value))).collect())
    }
}

/// As the flag has it.
fn name_of(dtype: Kind) -> String {
    match dtype {
        Kind::Float => "float32".to_owned(),
        other => format!("{other:?}").to_lowercase(),
    }
}

/// The first 64 bits of SHA-256: enough against mistakes, and short enough to be shown.
pub(crate) fn hex(hash: Sha256) -> String {
    hash.finalize().iter().take(8).map(|byte| format!("{byte:02x}")).collect()
}

fn digest(bytes: impl AsRef<[u8]>) -> String {
    hex(Sha256::new_with_prefix(bytes))
}

fn read_error(path: &Path) -> impl FnOnce(io::Error) -> Error {
    let path = path.to_path_buf();
    move |source| dflash_text::Error::Read { path, source }.into()
}

/// Of the file's content.
pub(crate) fn file_digest(path: &Path) -> Result<String, Error> {
    let mut file = File::open(path).map_err(read_error(path))?;
    let (mut hash, mut buffer) = (Sha256::new(), vec![0; 1 << 20]);
    loop {
        match file.read(&mut buffer).map_err(read_error(path))? {
            0 => return Ok(hex(hash)),
            read => hash.update(&buffer[..read]),
        }
    }
}

/// Of the tokenizer's files, but for the chat template that may stand among them.
fn tokenizer_digest(dir: &Path) -> Result<String, Error> {
    let mut hash = Sha256::new();
    for name in ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"] {
        let path = dir.join(name);
        if !path.is_file() {
            continue;
        }
        let bytes = std::fs::read(&path).map_err(read_error(&path))?;
        hash.update(name);
        match serde_json::from_slice::<Map<String, Value>>(&bytes) {
            Ok(mut object) if name == "tokenizer_config.json" => {
                object.remove("chat_template");
                hash.update(Value::Object(object).to_string());
            }
            _ => hash.update(bytes),
        }
    }
    Ok(hex(hash))
}

/// Parts of a weight file that are read, and bytes of each.
const PARTS: u64 = 256;
const PART_BYTES: u64 = 4096;

/// Of the names, sizes and headers of the weights, and of parts spread evenly over each file: other
/// weights of the same shape differ everywhere, and reading all takes minutes for a large target.
fn weights_digest(dir: &Path) -> Result<String, Error> {
    let entries = std::fs::read_dir(dir).map_err(read_error(dir))?;
    let mut paths = Vec::<PathBuf>::new();
    for entry in entries {
        paths.push(entry.map_err(read_error(dir))?.path());
    }
    paths.retain(|path| path.extension().is_some_and(|ending| ending == "safetensors"));
    paths.sort();
    let mut hash = Sha256::new();
    for path in paths {
        let mut sample = || -> io::Result<()> {
            let file = File::open(&path)?;
            let size = file.metadata()?.len();
            hash.update(path.file_name().unwrap_or_default().as_encoded_bytes());
            hash.update(size.to_le_bytes());
            let mut header = [0; 8];
            file.read_exact_at(&mut header, 0)?;
            // A header that is no header was refused when the target was loaded.
            let header = u64::from_le_bytes(header).min(size).min(1 << 27);
            hash_part(&mut hash, &file, 0, header + 8)?;
            for part in 0..PARTS {
                hash_part(&mut hash, &file, size / PARTS * part, PART_BYTES)?;
            }
            hash_part(&mut hash, &file, size.saturating_sub(PART_BYTES), PART_BYTES)
        };
        sample().map_err(read_error(&path))?;
    }
    Ok(hex(hash))
}

fn hash_part(hash: &mut Sha256, file: &File, start: u64, length: u64) -> io::Result<()> {
    let mut part = vec![0; length as usize];
    let mut filled = 0;
    while filled < part.len() {
        match file.read_at(&mut part[filled..], start + filled as u64)? {
            0 => break,
            read => filled += read,
        }
    }
    hash.update(&part[..filled]);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn differences_are_named_with_both_values() {
        let there = Stamp::of(&[("a", 1), ("b", 2), ("c", 3)]);
        assert_eq!(there.differences(&there), "");
        let now = Stamp::of(&[("a", 1), ("b", 5), ("d", 4)]);
        let expect = "b: 2 there, 5 now; c: 3 there, nothing now; d: nothing there, 4 now";
        assert_eq!(there.differences(&now), expect);
    }

    #[test]
    fn a_digest_knows_what_counts() {
        let dir = tempfile::tempdir().unwrap();
        let write =
            |name: &str, bytes: &[u8]| std::fs::write(dir.path().join(name), bytes).unwrap();
        let mut weights = vec![7u8; 1 << 21];
        weights[..8].copy_from_slice(&100u64.to_le_bytes());
        write("model.safetensors", &weights);
        let before = weights_digest(dir.path()).unwrap();
        assert_eq!(weights_digest(dir.path()).unwrap(), before);
        weights[1 << 20] ^= 1;
        write("model.safetensors", &weights);
        assert_ne!(weights_digest(dir.path()).unwrap(), before);

        write("tokenizer.json", b"{}");
        write("tokenizer_config.json", br#"{"eos_token": "e", "chat_template": "a"}"#);
        let before = tokenizer_digest(dir.path()).unwrap();
        write("tokenizer_config.json", br#"{"eos_token": "e", "chat_template": "b"}"#);
        assert_eq!(tokenizer_digest(dir.path()).unwrap(), before);
        write("tokenizer_config.json", br#"{"eos_token": "f", "chat_template": "b"}"#);
        assert_ne!(tokenizer_digest(dir.path()).unwrap(), before);
    }
}
