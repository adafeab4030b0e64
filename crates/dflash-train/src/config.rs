//! The resolved settings of a run. They are written beside its checkpoints.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use dflash_dist::Backend;
use dflash_hidden::{OnGenerate, OnMissing};
use dflash_model::objective::{Denominator, ElementLoss, Weighting};
use dflash_run::Retention;
use serde::Serialize;

use crate::optimizer::OptimizerConfig;
use crate::schedule::Schedule;

/// Everything that decides what a run computes.
#[derive(Clone, Debug, Serialize)]
pub struct TrainConfig {
    /// Directory of the target model.
    pub target: PathBuf,
    /// Prepared dataset.
    pub data: PathBuf,
    /// Where checkpoints, metrics and provenance go.
    pub save_path: PathBuf,
    /// Shape of the draft.
    pub draft: DraftSettings,
    /// Checkpoint whose weights a fresh run starts from.
    pub from_pretrained: Option<PathBuf>,
    /// Where hidden states come from.
    pub hidden: HiddenSettings,
    /// What is minimised.
    pub objective: ObjectiveSettings,
    /// Peak learning rate.
    pub lr: f64,
    /// Its course.
    pub schedule: Schedule,
    /// How parameters move.
    pub optimizer: OptimizerConfig,
    /// Largest global norm of a gradient.
    pub max_grad_norm: f64,
    /// Passes over the dataset.
    pub epochs: u64,
    /// Upper bound on optimizer steps.
    pub max_steps: Option<u64>,
    /// Packed rows per rank and optimizer step.
    pub accumulation: usize,
    /// Tokens of a packed row.
    pub total_seq_len: usize,
    /// Anchors per document.
    pub anchors_per_sequence: usize,
    /// Anchors per packed row.
    pub max_anchors: usize,
    /// Seed of weights, order and anchors.
    pub seed: u64,
    /// Steps between checkpoints; epochs end with one in any case.
    pub save_every: Option<u64>,
    /// Which checkpoints stay.
    pub retention: Retention,
    /// Measuring on held-out rows and prompts while training.
    pub validation: Option<ValidationConfig>,
    /// Steps between metric lines.
    pub log_every: u64,
    /// So many steps in a row whose gradient is not finite end the run.
    pub max_bad_steps: u64,
    /// Continue the run in `save_path`.
    pub resume: bool,
    /// How long ranks wait for each other to come.
    pub join_timeout: Duration,
    /// How long they wait within a collective, which bounds how far one that waits for hidden
    /// states may lag behind, and how long one that hangs goes unnoticed.
    pub collective_timeout: Duration,
    /// `cpu`, `cuda` or `auto`.
    pub device: DeviceChoice,
    /// What carries gradients between GPUs.
    #[serde(serialize_with = "as_debug")]
    pub backend: Backend,
    /// Kind of weights and activations in forward and backward; `None` for the device's usual one.
    pub compute_dtype: Option<ComputeKind>,
    /// Whether the ranks share the masters and the optimizer's state out among themselves.
    pub zero: Zero,
    /// Whether layers keep only their inputs for the backward pass.
    pub recompute: bool,
    /// Whether products of float32 matrices on the CPU round their factors to bfloat16.
    pub bf16_products: bool,
    /// Peak of a rank's device in TFLOP/s, where the user knows better than its name tells.
    pub peak_tflops: Option<f64>,
    /// How the run was started, for its records.
    pub command: Vec<String>,
    /// Set when the run is to end early.
    #[serde(skip)]
    pub stop: Arc<AtomicBool>,
    /// Whether to draw a progress bar.
    #[serde(skip)]
    pub progress: bool,
}

/// When and on what a run is validated.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ValidationConfig {
    /// Steps between validations; the last step has one in any case.
    pub every: u64,
    /// Share of the dataset's samples, from its end, that is held out.
    pub ratio: f64,
    /// Whether acceptance is measured on prompts, by the probe given to the run.
    pub measures: bool,
}

/// Shape of the draft; what is not given here is copied from the target.
#[derive(Clone, Debug, Serialize)]
pub struct DraftSettings {
    /// Layers.
    pub num_layers: usize,
    /// Slots of a block.
    pub block_size: usize,
    /// Captured layers, 0 = embedding output.
    pub target_layer_ids: Vec<u32>,
    /// Token of the slots to be predicted.
    pub mask_token_id: i64,
    /// Window of all layers; `None` for full attention.
    pub sliding_window: Option<usize>,
    /// Size of a pruned vocabulary.
    pub vocab_size: Option<usize>,
}

/// Where hidden states come from.
#[derive(Clone, Debug, Serialize)]
pub struct HiddenSettings {
    /// Servers.
    pub endpoints: Vec<String>,
    /// Directory of stored states.
    pub offline_dir: Option<PathBuf>,
    /// What to do about a sample that is not stored.
    #[serde(serialize_with = "as_debug")]
    pub on_missing: OnMissing,
    /// What to do with a generated sample.
    #[serde(serialize_with = "as_debug")]
    pub on_generate: OnGenerate,
    /// Bytes of hidden states in flight and waiting, per rank.
    pub window_bytes: usize,
    /// Requests in flight, per rank.
    pub max_in_flight: usize,
}

/// What is minimised.
#[derive(Clone, Debug, Serialize)]
pub struct ObjectiveSettings {
    /// Element losses and coefficients.
    #[serde(serialize_with = "as_debug")]
    pub terms: Vec<(ElementLoss, f64)>,
    /// Weights of the slots.
    #[serde(serialize_with = "as_debug")]
    pub weighting: Weighting,
    /// What the weighted sum is divided by.
    #[serde(serialize_with = "as_debug")]
    pub denominator: Denominator,
    /// Labels from the target's argmax instead of the data.
    pub teacher_labels: bool,
    /// Bytes of one chunk of logits.
    pub chunk_bytes: usize,
}

impl ObjectiveSettings {
    /// Whether the target's distribution is needed.
    pub fn needs_teacher(&self) -> bool {
        self.teacher_labels || self.terms.iter().any(|(term, _)| term.needs_teacher())
    }
}

/// Where to compute.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum DeviceChoice {
    /// CUDA where libtorch has it and a device is there.
    Auto,
    /// The CPU, in float32 unless told otherwise.
    Cpu,
    /// The GPU of the local rank, in bfloat16 unless told otherwise.
    Cuda,
}

/// Kind of weights and activations in forward and backward. Masters, gradients and all state of the
/// optimizer are float32 in either case.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum ComputeKind {
    /// As the masters.
    Float32,
    /// Half the memory, 8 bits of precision.
    Bfloat16,
}

/// What of a run's state is split over its ranks (the stages of ZeRO).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Zero {
    /// Nothing: every rank holds all of it.
    #[default]
    Off,
    /// Masters, moments and averaged weights.
    One,
}

fn as_debug<T: std::fmt::Debug, S: serde::Serializer>(
    value: &T,
    out: S,
) -> Result<S::Ok, S::Error> {
    out.collect_str(&format_args!("{value:?}"))
}
