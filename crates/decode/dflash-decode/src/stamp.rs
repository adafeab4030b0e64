//! Everything that determines the answers of a regeneration.
//!
//! A partial file, or one that should get more rows, is only continued with the same target,
//! template, tokenizer, data and settings. The batch size and the device are not included: they
//! only affect near ties, and a run that ran out of memory can continue with a smaller batch.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};

use dflash_identity::{TargetIdentity, file_digest, hex};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use sha2::{Digest, Sha256};
use tch::Kind;

use crate::Error;
use crate::dialogue::Speaker;

/// Entries by the name under which a difference is reported.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub(crate) struct Stamp(BTreeMap<String, Value>);

impl Stamp {
    /// The stamp of a run over the rows of `files`.
    ///
    /// # Errors
    /// The model's or the data's files cannot be read.
    pub(crate) fn new(
        files: &[PathBuf],
        target_dir: &Path,
        speaker: Speaker<'_>,
        dtype: Kind,
    ) -> Result<Self, Error> {
        let Speaker { tokenizer, config, limits } = speaker;
        let digests = files.iter().map(|path| file_digest(path)).collect::<Result<Vec<_>, _>>()?;
        // As earlier releases, which took one file, have it.
        let data = match &digests[..] {
            [digest] => json!(digest),
            digests => json!(digests),
        };
        let items = [
            ("data", data),
            ("target", json!(TargetIdentity::read(target_dir, "")?.digests())),
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

    /// `chat template: 1f0a there, 77b2 now; ...`, or empty.
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

/// The flag's value.
fn name_of(dtype: Kind) -> String {
    match dtype {
        Kind::Float => "float32".to_owned(),
        other => format!("{other:?}").to_lowercase(),
    }
}

/// The first 64 bits of SHA-256: enough to detect mistakes, and short enough to display.
fn short(hash: Sha256) -> String {
    hex(hash)[..16].to_owned()
}

fn digest(bytes: impl AsRef<[u8]>) -> String {
    short(Sha256::new_with_prefix(bytes))
}

fn read_error(path: &Path) -> impl FnOnce(io::Error) -> Error {
    let path = path.to_path_buf();
    move |source| dflash_chat::Error::Read { path, source }.into()
}

/// Digest of the tokenizer's files, without any chat template in them.
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
    Ok(short(hash))
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
    fn a_tokenizer_s_digest_leaves_out_its_template() {
        let dir = tempfile::tempdir().unwrap();
        let write =
            |name: &str, bytes: &[u8]| std::fs::write(dir.path().join(name), bytes).unwrap();
        write("tokenizer.json", b"{}");
        write("tokenizer_config.json", br#"{"eos_token": "e", "chat_template": "a"}"#);
        let before = tokenizer_digest(dir.path()).unwrap();
        write("tokenizer_config.json", br#"{"eos_token": "e", "chat_template": "b"}"#);
        assert_eq!(tokenizer_digest(dir.path()).unwrap(), before);
        write("tokenizer_config.json", br#"{"eos_token": "f", "chat_template": "b"}"#);
        assert_ne!(tokenizer_digest(dir.path()).unwrap(), before);
    }
}
