//! Which settings decide what a run computes, and which of them a resumed run changes.
//!
//! A setting is compared unless it is named here, so a new one is compared by default. What a run
//! knows only when it computes (its ranks, threads, processor) is recorded under keys of its own.

use std::collections::BTreeMap;
use std::fmt;

use dflash_settings::TrainSettings;
use serde_json::Value;

/// Settings that decide nothing of what is computed: where things are, what is shown, kept and
/// waited for.
const FREE: &[&str] = &[
    "target",      // by its name; the model behind it is compared by what it is
    "target_spec", // by its path; what it says is compared
    "data_path",
    "save_path",
    "hidden_states_path",
    "vllm_endpoint",
    "shared_storage_path",
    "trust_layer_ids",
    "wait_for_server",
    "server_timeout",
    "resume",
    "resume_or_start",
    "resume_from",
    "allow_changed",
    "speculator_type",
    "log_every",
    "peak_tflops",
    "no_progress",
    "log_to",
    "run_name",
    "recompute", // the same gradients, bit for bit
    "nproc",     // counted in ranks and rows_per_step
    "nnodes",
    "node_rank",
    "gradient_accumulation_steps",
    "rdzv_endpoint",
    "backend",
    "max_restarts",
    "join_timeout",
    "collective_timeout",
    "save_every",
    "keep_last",
    "keep_every",
    "no_epoch_checkpoints",
    "sigterm_is_success",
    "grace",
    "max_bad_steps",
    "on_generate",
    "window_mib",
    "max_in_flight",
    "colocate", // the same states, bit for bit on a CPU
    "target_batch_tokens",
    "eval_every",
    "from_pretrained", // what the run began with; train looks at it
    "device",          // auto is not yet one; train records which it is
    "cpu_level",       // without it all that the processor has; train records which it is
    "compute_dtype",
];

/// Settings that no resumed run can change; train compares what they come to, with the checkpoint.
const LASTING: &[&str] = &[
    "seed",
    "total_seq_len",
    "validation_ratio",
    "optimizer",
    "ema_decay",
    "num_layers",
    "block_size",
    "target_layer_ids",
    "sliding_window",
    "mask_token_id",
    "draft_vocab_size",
];

/// What changes only last bits, what is left out and counted, or how the result is measured: a
/// change is said, and not refused.
const SAID: &[&str] = &[
    "device",
    "threads",
    "ranks",
    "processor",
    "cpu_level",
    "dflash",
    "libtorch",
    "loss_chunk_mib",
    "zero",
    "on_missing",
    "target_dtype", // a server has types of its own, which are not compared
    "states_dtype",
    "eval_prompts",
    "validation_data",
    "eval_limit",
    "eval_max_new_tokens",
];

/// A setting that differs from the one that a checkpoint was trained with.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Change {
    /// As a flag is called, without its dashes.
    pub name: String,
    /// What the checkpoint was trained with.
    pub was: String,
    /// What the run is asked for.
    pub now: String,
    /// Whether it must be allowed by its name.
    pub needs_leave: bool,
}

/// The settings that decide what a run computes, as far as the user's settings say.
pub fn recorded(settings: &TrainSettings) -> BTreeMap<String, String> {
    let settings = serde_json::to_value(settings).expect("settings print");
    let Value::Object(settings) = settings else { unreachable!("settings are a table") };
    let decides = |key: &str| !FREE.contains(&key) && !LASTING.contains(&key);
    let decisive = settings.into_iter().filter(|(key, _)| decides(key));
    decisive.map(|(key, value)| (key, text(&value))).collect()
}

/// What differs between the settings that a checkpoint `was` trained with and those that a run has
/// `now`. What an earlier release did not record is not compared.
pub fn changes(was: &BTreeMap<String, String>, now: &BTreeMap<String, String>) -> Vec<Change> {
    let both = was.iter().filter_map(|(key, was)| Some((key, was, now.get(key)?)));
    both.filter(|(_, was, now)| was != now)
        .map(|(key, was, now)| Change {
            name: key.replace('_', "-"),
            was: was.clone(),
            now: now.clone(),
            needs_leave: !SAID.contains(&key.as_str()),
        })
        .collect()
}

impl fmt::Display for Change {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {} -> {}", self.name, self.was, self.now)
    }
}

/// A value as the user would type it.
fn text(value: &Value) -> String {
    match value {
        Value::Null => "default".to_owned(),
        Value::String(text) => text.clone(),
        Value::Array(items) => items.iter().map(text).collect::<Vec<_>>().join(","),
        other => other.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn map(pairs: &[(&str, &str)]) -> BTreeMap<String, String> {
        pairs.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect()
    }

    #[test]
    fn values_are_told_as_they_are_typed() {
        let check = |json: &str, expect| {
            assert_eq!(text(&serde_json::from_str(json).unwrap()), expect);
        };
        check("null", "default");
        check("[\"ce\", \"kl=0.5\"]", "ce,kl=0.5");
        check("0.0006", "0.0006");
        check("true", "true");
        check("\"wsd\"", "wsd");
    }

    #[test]
    fn changes_are_named_and_only_some_need_leave() {
        let was = map(&[("loss", "ce"), ("max_steps", "400"), ("threads", "8"), ("lr", "0.01")]);
        let now = map(&[("loss", "kl"), ("max_steps", "600"), ("threads", "4"), ("lr", "0.01")]);
        let found = changes(&was, &now);
        let said: Vec<String> = found.iter().map(ToString::to_string).collect();
        assert_eq!(said, ["loss ce -> kl", "max-steps 400 -> 600", "threads 8 -> 4"]);
        let needy: Vec<bool> = found.iter().map(|change| change.needs_leave).collect();
        assert_eq!(needy, [true, true, false]);
        assert_eq!(changes(&map(&[]), &now), [], "an earlier release recorded nothing");
    }
}
