//! A resolved run: the user's settings, and what they mean for this target and draft.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use dflash_draft::{DraftConfig, HeadFields};
use dflash_settings::{TrainSettings, shown_settings};
use dflash_target::TargetSpec;
use serde::Serialize;
use serde_json::{Value, json};

/// Everything that decides what a run computes. It is written beside the run's checkpoints, as
/// `shown` has it: it does not print in any other way, because endpoints may hold passwords.
#[derive(Clone, Debug)]
pub struct TrainConfig {
    /// What the user asks for.
    pub settings: TrainSettings,
    /// Directory of the target model.
    pub target_dir: PathBuf,
    /// What the user says of the target, where its own files do not or not rightly.
    pub described_target: Option<TargetSpec>,
    /// Shape of the draft.
    pub draft: DraftShape,
    /// Directory of the checkpoint whose weights a fresh run starts from.
    pub pretrained_dir: Option<PathBuf>,
    /// How the run was started, for its records.
    pub command: Vec<String>,
    /// The job that the run's ranks belong to, where its launcher gave it a name of its own: after a
    /// restart ranks go on with what their own job saved.
    pub job: Option<String>,
    /// Set when the run is to end early.
    pub stop: Arc<AtomicBool>,
    /// Set when the run is to save and go on; lowered when it does.
    pub save: Arc<AtomicBool>,
    /// Whether to show progress: rank 0 does, unless it is told not to.
    pub progress: bool,
}

impl TrainConfig {
    /// The settings and what they mean as run.json, trackers and ranks take them, by the settings' keys:
    /// without the passwords of endpoints.
    pub(crate) fn shown(&self) -> Value {
        let mut all = serde_json::to_value(&self.settings).expect("settings print");
        all["target_dir"] = json!(self.target_dir);
        all["described_target"] = json!(self.described_target);
        all["draft"] = json!(self.draft);
        all["pretrained_dir"] = json!(self.pretrained_dir);
        all["command"] = json!(self.command);
        all["job"] = json!(self.job);
        shown_settings(&all)
    }
}

/// Shape of the draft with nothing left to choose; the rest is copied from the target.
#[derive(Clone, Debug, Serialize)]
pub struct DraftShape {
    /// Layers.
    pub num_layers: usize,
    /// Slots of a block.
    pub block_size: usize,
    /// Auxiliary layers, 0 = embedding output.
    pub target_layer_ids: Vec<u32>,
    /// Token of the slots to be predicted.
    pub mask_token_id: i64,
    /// Window of all layers; `None` for full attention.
    pub sliding_window: Option<usize>,
    /// Size of a pruned vocabulary.
    pub vocab_size: Option<usize>,
    /// What stands on the layers; the settings that ask for it are written beside.
    #[serde(skip)]
    pub head: HeadFields,
    /// The draft that training starts from: heads, MLP, rotary embedding and kinds of layers are its own.
    #[serde(skip)]
    pub stored: Option<Box<DraftConfig>>,
}
