//! Where a training run takes the hidden states from.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::check::{Invalid, MOST_MIB, at_odds, within};
use crate::choices::{OnGenerate, OnMissing};

/// Connections that a rank may hold: servers answer a few requests at a time.
const MOST_REQUESTS: u64 = 4096;

/// Servers, stored states, and how much of them is held.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[cfg_attr(feature = "clap", derive(clap::Args))]
pub struct HiddenStatesSettings {
    /// Hidden-state servers: `dflash hidden-server` or a stock vLLM; commas separate several.
    #[cfg_attr(feature = "clap", arg(long, visible_alias = "endpoint", value_name = "URL", action = clap::ArgAction::Set, value_delimiter = ',', default_value = "http://127.0.0.1:8000/v1"))]
    pub vllm_endpoint: Vec<String>,
    /// Directory of stored hidden states (hs_ROW.safetensors), looked at first.
    #[cfg_attr(feature = "clap", arg(long, value_name = "DIR"))]
    pub hidden_states_path: Option<PathBuf>,
    /// What to do when a sample is not stored.
    #[cfg_attr(feature = "clap", arg(long, value_enum, default_value_t = OnMissing::Generate))]
    pub on_missing: OnMissing,
    /// What to do with a generated sample once it is trained on.
    #[cfg_attr(feature = "clap", arg(long, value_enum, default_value_t = OnGenerate::Delete))]
    pub on_generate: OnGenerate,
    /// Hidden states in flight or waiting, MiB per rank.
    #[cfg_attr(feature = "clap", arg(long, value_name = "MIB", default_value_t = 256))]
    pub window_mib: usize,
    /// Requests in flight per rank.
    #[cfg_attr(feature = "clap", arg(long, value_name = "N", default_value_t = 16))]
    pub max_in_flight: usize,
}

impl HiddenStatesSettings {
    /// Bytes of hidden states in flight or waiting.
    pub fn window_bytes(&self) -> usize {
        self.window_mib << 20
    }

    /// # Errors
    /// A number out of its range, or a use of stored states without a folder of them.
    pub fn check(&self) -> Result<(), Invalid> {
        self.check_window()?;
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

    pub(crate) fn check_window(&self) -> Result<(), Invalid> {
        within([
            ("window_mib", self.window_mib as u64, 1..=MOST_MIB),
            ("max_in_flight", self.max_in_flight as u64, 1..=MOST_REQUESTS),
        ])
    }
}
