//! What every rank of a run must have in common with the others: the settings, the data, the target,
//! the program. The ranks compare it before they connect.

use std::fs::File;
use std::io::Read;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use dflash_model::{device_name, kind_name};
use serde_json::{Map, Value};
use tch::{Device, Kind};

use crate::Error;
use crate::config::TrainConfig;
use crate::prepared::Prepared;

/// Keys in which ranks may differ. All others are compared, those of new settings too.
const MAY_DIFFER: [&str; 23] = [
    // Paths, which nodes may have mounted elsewhere. What is behind them is compared.
    "target",
    "target_dir",
    "data_path",
    "save_path",
    "from_pretrained",
    "pretrained_dir",
    "hidden_states_path",
    "eval_prompts",
    // Places in the network: a node may have a server of its own, and a number it must have.
    "vllm_endpoint",
    "shared_storage_path",
    "wait_for_server",
    "server_timeout",
    "node_rank",
    "rdzv_endpoint",
    // What a machine can do. Where and in what precision ranks compute is compared.
    "device",
    "peak_tflops",
    "window_mib",
    "max_in_flight",
    // How the run was started, and what this node shows.
    "command",
    "job",
    "no_progress",
    "log_to",
    "run_name",
];

/// Bytes that are read at each of several places of a large file.
const PROBE: u64 = 4096;
/// Places of a large file that are read, from its first bytes to its last.
const PROBES: u64 = 32;

impl Prepared<'_> {
    /// What this rank, which computes at `place`, must have in common with the others: names and
    /// values. To compare one thing more is one line more.
    pub(crate) fn common(&self, place: (Device, Kind)) -> Result<Vec<(String, String)>, Error> {
        let config = self.config;
        let draft = config.pretrained_dir.as_deref();
        let prompts = config.settings.validation.eval_prompts.as_deref();
        let mut common = settings(config);
        let mut add = |name: &str, value: String| common.push((name.to_owned(), value));
        add("the version of dflash", env!("CARGO_PKG_VERSION").to_owned());
        add("the version of libtorch", dflash_torch_sys::libtorch_version()?);
        add("the fingerprint of the data (--data-path)", self.dataset.fingerprint());
        add("the identity of the target (--target)", self.identity.digests());
        add(
            "the digest of the draft to start from (--from-pretrained)",
            or_none(draft.map(model_digest))?,
        );
        add("the digest of the prompts (--eval-prompts)", or_none(prompts.map(file_digest))?);
        add("the place and type of the computation", computation(place));
        add("the number of CPU threads (OMP_NUM_THREADS)", tch::get_num_threads().to_string());
        Ok(common)
    }
}

/// The settings that must agree, as flags with their values. Of the draft's shape what is resolved
/// counts, not what was left open.
fn settings(config: &TrainConfig) -> Vec<(String, String)> {
    let mut values = keys_of(config);
    if let Some(Value::Object(mut shape)) = values.remove("draft") {
        // --draft-vocab-size, which nothing resolves further
        shape.remove("vocab_size");
        values.extend(shape);
    }
    let compared = values.iter().filter(|(key, _)| !MAY_DIFFER.contains(&key.as_str()));
    compared.map(|(key, value)| (format!("--{}", key.replace('_', "-")), text(value))).collect()
}

fn keys_of(config: &TrainConfig) -> Map<String, Value> {
    match serde_json::to_value(config).expect("settings print") {
        Value::Object(values) => values,
        _ => unreachable!("a struct"),
    }
}

/// A value as it would be typed.
fn text(value: &Value) -> String {
    match value {
        Value::Null => "not given".to_owned(),
        Value::String(text) => text.clone(),
        Value::Array(items) => items.iter().map(text).collect::<Vec<_>>().join(","),
        value => value.to_string(),
    }
}

fn computation((device, kind): (Device, Kind)) -> String {
    // Of its GPUs a rank takes the one of its number.
    let device =
        if matches!(device, Device::Cuda(_)) { "cuda".into() } else { device_name(device) };
    format!("{device}, {}", kind_name(kind))
}

fn or_none(digest: Option<Result<String, Error>>) -> Result<String, Error> {
    digest.unwrap_or_else(|| Ok("none".to_owned()))
}

/// Of a model's directory: its configuration, and samples of its weights.
fn model_digest(dir: &Path) -> Result<String, Error> {
    let entries = std::fs::read_dir(dir).and_then(Iterator::collect::<Result<Vec<_>, _>>);
    let entries = entries.map_err(dflash_files::Error::io("read", dir))?;
    let is_weights = |path: &PathBuf| path.extension().is_some_and(|end| end == "safetensors");
    let mut paths: Vec<PathBuf> = entries.iter().map(|entry| entry.path()).collect();
    paths.retain(is_weights);
    paths.push(dir.join("config.json"));
    paths.sort();
    let mut digest = Digest::default();
    for path in paths {
        digest.add(path.file_name().unwrap_or_default().as_encoded_bytes());
        digest.sample(&path).map_err(dflash_files::Error::io("read", path))?;
    }
    Ok(digest.hex())
}

fn file_digest(path: &Path) -> Result<String, Error> {
    let mut digest = Digest::default();
    let text = std::fs::read(path).map_err(dflash_files::Error::io("read", path))?;
    digest.add(&text);
    Ok(digest.hex())
}

/// FNV-1a, 64 bits.
struct Digest(u64);

impl Default for Digest {
    fn default() -> Self {
        Self(0xcbf2_9ce4_8422_2325)
    }
}

impl Digest {
    fn add(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            self.0 = (self.0 ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
        }
    }

    /// The size of a file and its bytes, of a large one those at some places.
    fn sample(&mut self, path: &Path) -> std::io::Result<()> {
        let file = File::open(path)?;
        let size = file.metadata()?.len();
        self.add(&size.to_le_bytes());
        if size <= PROBE * PROBES {
            let mut all = Vec::new();
            file.take(PROBE * PROBES).read_to_end(&mut all)?;
            self.add(&all);
            return Ok(());
        }
        let mut bytes = [0; PROBE as usize];
        for probe in 0..PROBES {
            file.read_exact_at(&mut bytes, (size - PROBE) * probe / (PROBES - 1))?;
            self.add(&bytes);
        }
        Ok(())
    }

    fn hex(&self) -> String {
        format!("{:016x}", self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::world::World;

    #[test]
    fn all_settings_but_those_listed_are_compared() {
        let config = World::new().config("out");
        let compared = settings(&config);
        let known = keys_of(&config);
        for key in MAY_DIFFER {
            assert!(known.contains_key(key), "{key} is not a setting any more");
        }
        for key in known.keys().filter(|key| *key != "draft") {
            let flag = format!("--{}", key.replace('_', "-"));
            let listed = MAY_DIFFER.contains(&key.as_str());
            assert_eq!(compared.iter().any(|(name, _)| *name == flag), !listed, "{flag}");
        }
        for key in ["lr", "seed", "loss", "optimizer", "max-grad-norm", "max-steps", "zero"] {
            assert!(compared.iter().any(|(name, _)| *name == format!("--{key}")), "{key}");
        }
    }

    #[test]
    fn of_the_draft_s_shape_what_is_resolved_counts() {
        let open = World::new().config("out");
        let mut given = open.clone();
        given.settings.draft.num_layers = Some(open.draft.num_layers);
        given.settings.draft.target_layer_ids = Some(open.draft.target_layer_ids.clone());
        assert_eq!(settings(&given), settings(&open));
        given.draft.num_layers += 1;
        assert_ne!(settings(&given), settings(&open));
    }

    #[test]
    fn a_model_s_digest_follows_configuration_and_weights() {
        let dir = tempfile::tempdir().unwrap();
        let weights = dir.path().join("model.safetensors");
        let mut bytes = vec![7; (PROBE * PROBES * 3) as usize];
        std::fs::write(dir.path().join("config.json"), "{}").unwrap();
        let mut digest_with = |change: &dyn Fn(&mut Vec<u8>)| {
            change(&mut bytes);
            std::fs::write(&weights, &bytes).unwrap();
            model_digest(dir.path()).unwrap()
        };
        let first = digest_with(&|_| ());
        assert_eq!(digest_with(&|_| ()), first);
        let last = digest_with(&|bytes| *bytes.last_mut().unwrap() = 8);
        let longer = digest_with(&|bytes| bytes.push(8));
        let small = digest_with(&|bytes| bytes.truncate(10));
        std::fs::write(dir.path().join("config.json"), "{ }").unwrap();
        let all = [first, last, longer, small, model_digest(dir.path()).unwrap()];
        for (at, one) in all.iter().enumerate() {
            assert!(!all[..at].contains(one), "{all:?}");
        }
    }
}
