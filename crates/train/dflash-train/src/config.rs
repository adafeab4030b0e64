//! A resolved run: the user's settings, and what follows from them for this target and draft.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use dflash_draft::{DraftConfig, HeadFields};
use dflash_settings::{TrainSettings, shown_settings};
use dflash_target::TargetSpec;
use serde::Serialize;
use serde_json::{Value, json};

/// Everything that determines what a run computes. It is recorded with the run as `shown` returns
/// it and is not `Serialize` itself, because endpoints may contain passwords.
#[derive(Clone, Debug)]
pub struct TrainConfig {
    /// The user's settings.
    pub settings: TrainSettings,
    /// Directory of the target model.
    pub target_dir: PathBuf,
    /// The user's description of the target, where its own files are missing or wrong.
    pub described_target: Option<TargetSpec>,
    /// Shape of the draft.
    pub draft: DraftShape,
    /// Directory of the checkpoint whose weights a fresh run starts from.
    pub pretrained_dir: Option<PathBuf>,
    /// How the run was started, for its records.
    pub command: Vec<String>,
    /// The launcher's unique job name, if any: restarted ranks resume only their own job's run.
    pub job: Option<String>,
    /// Set to end the run early.
    pub stop: Arc<AtomicBool>,
    /// Set to make the run save and continue; cleared after saving.
    pub save: Arc<AtomicBool>,
    /// Whether to show progress: rank 0 does unless disabled.
    pub progress: bool,
}

impl TrainConfig {
    /// The settings and what follows from them, by the settings' keys, as recorded in run.json and
    /// by trackers and compared between ranks; without the passwords of endpoints.
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

/// Shape of the draft, fully resolved; the remaining dimensions come from the target.
#[derive(Clone, Debug, Serialize)]
pub struct DraftShape {
    /// Layers.
    pub num_layers: usize,
    /// Slots per block.
    pub block_size: usize,
    /// Auxiliary layers; 0 is the embedding's output.
    pub target_layer_ids: Vec<u32>,
    /// Token of the slots to predict.
    pub mask_token_id: i64,
    /// Window of all layers; `None` for full attention.
    pub sliding_window: Option<usize>,
    /// Size of a reduced vocabulary.
    pub vocab_size: Option<usize>,
    /// Head on top of the layers, with its settings.
    #[serde(skip)]
    pub head: HeadFields,
    /// The starting draft, which supplies heads, MLP size, rotary embedding and layer kinds.
    #[serde(skip)]
    pub stored: Option<Box<DraftConfig>>,
}
