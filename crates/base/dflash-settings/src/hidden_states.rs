//! Sources of a training run's hidden states.

use std::path::PathBuf;

use dflash_settings_derive::Classed;
use serde::{Deserialize, Serialize};

use crate::check::{Invalid, MOST_MIB, MOST_SECONDS, MOST_TOKENS, at_odds, needs, within};
use crate::choices::{Dtype, OnGenerate, OnMissing, WireDtype};

/// Connections that a rank may hold: servers answer a few requests at a time.
const MOST_REQUESTS: u64 = 4096;

/// Minimum default window, MiB.
const WINDOW_MIB: usize = 256;
/// Minimum rows in the default window: one being made into a batch, and two in flight.
const WINDOW_ROWS: usize = 3;
/// Tokens of one forward pass of the target, as in the hidden-state server.
pub(crate) const TARGET_BATCH_TOKENS: usize = 2048;

/// Servers, stored states, and the memory for states.
#[derive(Debug, Clone, Serialize, Deserialize, Classed)]
#[cfg_attr(feature = "clap", derive(clap::Args))]
pub struct HiddenStatesSettings {
    /// Hidden-state servers: `dflash hidden-server` or a stock vLLM, over http or https; commas
    /// separate several.
    #[cfg_attr(feature = "clap", arg(long, visible_alias = "endpoint", value_name = "URL", action = clap::ArgAction::Set, value_delimiter = ',', default_value = "http://127.0.0.1:8000/v1"))]
    #[setting(free, may_differ)]
    pub vllm_endpoint: Vec<String>,
    /// Directory in which a stock vLLM writes hidden states (its shared_storage_path). The files
    /// that it names are read and removed only there.
    #[cfg_attr(feature = "clap", arg(long, value_name = "DIR"))]
    #[setting(free, may_differ)]
    pub shared_storage_path: Option<PathBuf>,
    /// Trust that the source's layers are --target-layer-ids, in this order. A stock vLLM and other
    /// software's files do not say which layers they hold. Needed once for the layers that no check
    /// verifies; run.json records it, and a resumed run does not need it again.
    #[serde(default)]
    #[cfg_attr(feature = "clap", arg(long))]
    #[setting(free)]
    pub trust_layer_ids: bool,
    /// Seconds to wait for a server at the start; a server that reports that it is loading gets
    /// --server-timeout if that is longer, and so does any server of a resumed run.
    #[cfg_attr(
        feature = "clap",
        arg(long, hide = true, value_name = "SECONDS", default_value_t = 60)
    )]
    #[setting(free, may_differ)]
    pub wait_for_server: u64,
    /// How long a server may be unreachable or busy during a run, seconds.
    #[cfg_attr(feature = "clap", arg(long, value_name = "SECONDS", default_value_t = 300))]
    #[setting(free, may_differ)]
    pub server_timeout: u64,
    /// Directory of stored hidden states (hs_ROW.safetensors), checked first.
    #[cfg_attr(feature = "clap", arg(long, value_name = "DIR"))]
    #[setting(free, may_differ)]
    pub hidden_states_path: Option<PathBuf>,
    /// What to do when a sample is not stored.
    #[cfg_attr(feature = "clap", arg(long, value_enum, default_value_t = OnMissing::Generate))]
    #[setting(told)]
    pub on_missing: OnMissing,
    /// What to do with a generated sample after training on it.
    #[cfg_attr(feature = "clap", arg(long, value_enum, default_value_t = OnGenerate::Delete))]
    #[setting(free)]
    pub on_generate: OnGenerate,
    /// Hidden states in flight or waiting, MiB per rank. Default: 256, or three rows of
    /// --total-seq-len if that is more.
    #[cfg_attr(feature = "clap", arg(long, hide = true, value_name = "MIB"))]
    #[setting(free, may_differ)]
    pub window_mib: Option<usize>,
    /// Requests in flight per rank.
    #[cfg_attr(feature = "clap", arg(long, hide = true, value_name = "N", default_value_t = 16))]
    #[setting(free, may_differ)]
    pub max_in_flight: usize,
    /// Run the target in the trainer's own process, on its device and alternating with training,
    /// instead of using a server. Each rank holds the target.
    #[serde(default)]
    #[cfg_attr(feature = "clap", arg(long, conflicts_with_all = ["vllm_endpoint", "shared_storage_path", "hidden_states_path"]))]
    // States are bitwise equal on a CPU.
    #[setting(free)]
    pub colocate: bool,
    /// With --colocate: type of the target's weights and activations, as --dtype of hidden-server.
    #[serde(default)]
    #[cfg_attr(feature = "clap", arg(long, value_enum, default_value_t = Dtype::Auto))]
    // A server has its own types, which are not compared.
    #[setting(told)]
    pub target_dtype: Dtype,
    /// With --colocate: type that the target's states are rounded to, as --wire-dtype of hidden-server.
    #[serde(default)]
    #[cfg_attr(feature = "clap", arg(long, hide = true, value_enum, default_value_t = WireDtype::Bf16))]
    #[setting(told)]
    pub states_dtype: WireDtype,
    /// With --colocate: maximum number of tokens in one forward pass of the target.
    #[serde(default = "target_batch_tokens")]
    #[cfg_attr(feature = "clap", arg(long, hide = true, value_name = "N", default_value_t = TARGET_BATCH_TOKENS))]
    #[setting(free)]
    pub target_batch_tokens: usize,
}

fn target_batch_tokens() -> usize {
    TARGET_BATCH_TOKENS
}

impl HiddenStatesSettings {
    /// Bytes of hidden states in flight or waiting; more if [`Self::window_tokens`] need more.
    pub fn window_bytes(&self) -> usize {
        self.window_mib.unwrap_or(WINDOW_MIB) << 20
    }

    /// Minimum number of tokens whose hidden states may be in flight or waiting, for rows of
    /// `total_seq_len`.
    pub fn window_tokens(&self, total_seq_len: usize) -> usize {
        if self.window_mib.is_some() { 0 } else { WINDOW_ROWS.saturating_mul(total_seq_len) }
    }

    /// # Errors
    /// A number out of its range, or a setting for stored states without their folder.
    pub fn check(&self) -> Result<(), Invalid> {
        self.check_window()?;
        self.check_colocation()?;
        if self.hidden_states_path.is_some() {
            return Ok(());
        }
        if self.on_generate != OnGenerate::Delete {
            return Err(at_odds("on_generate", "cache needs --hidden-states-path to say where"));
        }
        if self.on_missing != OnMissing::Generate {
            let reason = "skip, warn and raise use stored hidden states alone; name their folder \
                          with --hidden-states-path";
            return Err(at_odds("on_missing", reason));
        }
        Ok(())
    }

    /// # Errors
    /// A second source of states in addition to the local target, or a setting of the local target
    /// without --colocate.
    pub(crate) fn check_colocation(&self) -> Result<(), Invalid> {
        within([("target_batch_tokens", self.target_batch_tokens as u64, 1..=MOST_TOKENS)])?;
        if !self.colocate {
            let is_default = [
                ("target_dtype", self.target_dtype == Dtype::default()),
                ("states_dtype", self.states_dtype == WireDtype::default()),
                ("target_batch_tokens", self.target_batch_tokens == TARGET_BATCH_TOKENS),
            ];
            let other = is_default.into_iter().find(|(_, is_default)| !is_default);
            return other.map_or(Ok(()), |(key, _)| Err(needs(key, "colocate")));
        }
        let beside = [
            ("--hidden-states-path", self.hidden_states_path.is_some()),
            ("--shared-storage-path", self.shared_storage_path.is_some()),
        ];
        match beside.into_iter().find(|(_, given)| *given) {
            Some((flag, _)) => {
                let reason = format!(
                    "computes the hidden states itself, and {flag} takes them from elsewhere; leave one out"
                );
                Err(at_odds("colocate", &reason))
            }
            None => Ok(()),
        }
    }

    pub(crate) fn check_window(&self) -> Result<(), Invalid> {
        within([
            ("window_mib", self.window_mib.unwrap_or(WINDOW_MIB) as u64, 1..=MOST_MIB),
            ("max_in_flight", self.max_in_flight as u64, 1..=MOST_REQUESTS),
            ("wait_for_server", self.wait_for_server, 0..=MOST_SECONDS),
            ("server_timeout", self.server_timeout, 1..=MOST_SECONDS),
        ])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(change: impl FnOnce(&mut HiddenStatesSettings), expect: &str) {
        let mut settings: HiddenStatesSettings = serde_json::from_str(
            r#"{"vllm_endpoint": [], "wait_for_server": 60, "server_timeout": 300,
                "on_missing": "generate", "on_generate": "delete", "window_mib": 256,
                "max_in_flight": 16}"#,
        )
        .unwrap();
        change(&mut settings);
        let message = settings.check().err().map(|invalid| invalid.to_string());
        assert_eq!(message.as_deref().unwrap_or_default(), expect);
    }

    #[test]
    fn a_target_that_is_here_is_the_one_place_that_states_come_from() {
        check(|_| {}, "");
        check(|settings| settings.colocate = true, "");
        let beside = |flag: &str| {
            format!(
                "--colocate computes the hidden states itself, and {flag} takes them from elsewhere; \
                 leave one out"
            )
        };
        check(
            |settings| {
                settings.colocate = true;
                settings.hidden_states_path = Some("states".into());
            },
            &beside("--hidden-states-path"),
        );
        check(
            |settings| {
                settings.colocate = true;
                settings.shared_storage_path = Some("states".into());
            },
            &beside("--shared-storage-path"),
        );
    }

    #[test]
    fn settings_of_the_target_need_the_target() {
        let needs = |flag: &str| format!("{flag} needs --colocate");
        check(|settings| settings.target_dtype = Dtype::Bfloat16, &needs("--target-dtype"));
        check(|settings| settings.states_dtype = WireDtype::F32, &needs("--states-dtype"));
        check(|settings| settings.target_batch_tokens = 9, &needs("--target-batch-tokens"));
        check(
            |settings| settings.target_batch_tokens = 0,
            "--target-batch-tokens is 0, but it must be at least 1 and at most 16777216",
        );
    }
}
