//! Collects what all ranks of a run must have in common: settings, data, target, program. The ranks
//! compare it before they connect.

use dflash_identity::file_digest;
use dflash_settings::{Classed, Setting, TrainSettings};
use dflash_tensor::{DeviceKind, device_name, kind_name};
use serde_json::{Map, Value};
use tch::Device;

use crate::Error;
use crate::config::TrainConfig;
use crate::prepared::Prepared;

/// Entries that may differ between ranks: paths on the rank's machine, and how it was started.
const OF_THE_RANK: [&str; 4] = ["target_dir", "pretrained_dir", "command", "job"];

impl Prepared<'_> {
    /// Names and values that this rank, computing at `place`, must have in common with the others.
    pub(crate) fn common(&self, place: DeviceKind) -> Result<Vec<(String, String)>, Error> {
        let config = self.config;
        let prompts = config.settings.validation.eval_prompts.as_deref();
        let mut common = settings(config);
        let mut add = |name: &str, value: String| common.push((name.to_owned(), value));
        add("the version of dflash", env!("CARGO_PKG_VERSION").to_owned());
        add("the version of libtorch", dflash_torch_sys::libtorch_version()?);
        add("the fingerprint of the data (--data-path)", self.dataset.fingerprint());
        add("the digest of the data's tokens (--data-path)", self.dataset.content()?.to_owned());
        let set = self.validation_data.as_deref();
        let set = set.map(|set| set.content().map(str::to_owned)).transpose()?;
        add(
            "the digest of the validation set's tokens (--validation-data)",
            set.unwrap_or_else(none),
        );
        add("the identity of the target (--target)", self.identity.digests());
        add(
            "the digest of the draft to start from (--from-pretrained)",
            self.origin_digests()?.unwrap_or_else(none),
        );
        let prompts = prompts.map(file_digest).transpose()?;
        add("the digest of the prompts (--eval-prompts)", prompts.unwrap_or_else(none));
        add("the device and type of the computation", computation(place));
        add("the number of CPU threads (OMP_NUM_THREADS)", tch::get_num_threads().to_string());
        Ok(common)
    }
}

/// The settings that must agree, as flags with their values. The draft's shape is compared as
/// resolved, not as given.
fn settings(config: &TrainConfig) -> Vec<(String, String)> {
    let mut values = keys_of(config);
    if let Some(Value::Object(mut shape)) = values.remove("draft") {
        // --draft-vocab-size is the only one that is not resolved further.
        shape.remove("vocab_size");
        values.extend(shape);
    }
    let mut own: Vec<&str> = may_differ().map(|setting| setting.key).collect();
    own.extend(OF_THE_RANK);
    let compared = values.iter().filter(|(key, _)| !own.contains(&key.as_str()));
    compared.map(|(key, value)| (format!("--{}", key.replace('_', "-")), text(value))).collect()
}

/// The settings in which ranks may differ: paths, which nodes may mount elsewhere; network
/// addresses; capabilities of the machine; output. The contents behind the paths are compared.
fn may_differ() -> impl Iterator<Item = Setting> {
    TrainSettings::settings().into_iter().filter(|setting| setting.may_differ)
}

fn keys_of(config: &TrainConfig) -> Map<String, Value> {
    match config.shown() {
        Value::Object(values) => values,
        _ => unreachable!("a struct"),
    }
}

/// A value as the user would type it.
fn text(value: &Value) -> String {
    match value {
        Value::Null => "not given".to_owned(),
        Value::String(text) => text.clone(),
        Value::Array(items) => items.iter().map(text).collect::<Vec<_>>().join(","),
        value => value.to_string(),
    }
}

fn computation(DeviceKind { device, kind }: DeviceKind) -> String {
    // Each rank uses the GPU with its local number.
    let device =
        if matches!(device, Device::Cuda(_)) { "cuda".into() } else { device_name(device) };
    format!("{device}, {}", kind_name(kind))
}

fn none() -> String {
    "none".to_owned()
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
        for key in OF_THE_RANK {
            assert!(known.contains_key(key), "{key} is not known any more");
        }
        for key in known.keys().filter(|key| *key != "draft") {
            let flag = format!("--{}", key.replace('_', "-"));
            let listed = may_differ().any(|setting| setting.key == key)
                || OF_THE_RANK.contains(&key.as_str());
            assert_eq!(compared.iter().any(|(name, _)| *name == flag), !listed, "{flag}");
        }
        for key in ["save_path", "vllm_endpoint", "window_mib", "run_name", "job"] {
            let flag = format!("--{}", key.replace('_', "-"));
            assert!(!compared.iter().any(|(name, _)| *name == flag), "{key}");
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
}
