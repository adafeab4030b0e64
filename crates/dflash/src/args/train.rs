//! The flags of `dflash train`.

use std::path::PathBuf;

use clap::{Args, ValueEnum};

use super::ComputeDtype;
use super::eval::at_least_one;
use super::launch::{CheckpointArgs, LaunchArgs};

/// Train a drafter against a running hidden-state server.
///
/// With --nproc N the command starts N ranks on this machine, with --nnodes on several; under
/// torchrun or Slurm it finds their variables and is a rank itself. SIGTERM makes all ranks save and
/// end with code 0; Ctrl-C does so as well if it takes no more than a few seconds, with code 130.
#[derive(Debug, Clone, Args)]
pub struct TrainArgs {
    /// Settings from a file.
    #[command(flatten)]
    pub run: RunFileArgs,
    /// Directory of the target model (config.json, safetensors, tokenizer).
    #[arg(long, visible_alias = "target", value_name = "DIR", env = "DFLASH_MODEL")]
    pub verifier_name_or_path: PathBuf,
    /// Prepared dataset, as `dflash prepare` writes it.
    #[arg(long, value_name = "DIR")]
    pub data_path: PathBuf,
    /// Hidden-state servers: `dflash hidden-server` or a stock vLLM; commas separate several.
    #[arg(
        long,
        visible_alias = "endpoint",
        value_name = "URL",
        value_delimiter = ',',
        default_value = "http://127.0.0.1:8000/v1"
    )]
    pub vllm_endpoint: Vec<String>,
    /// Directory for checkpoints, metrics and TensorBoard events.
    #[arg(long, value_name = "DIR")]
    pub save_path: PathBuf,
    /// Continue the run in --save-path from its last complete checkpoint.
    #[arg(long)]
    pub resume: bool,
    /// Kind of drafter; this program trains dflash.
    #[arg(long, value_enum, default_value_t = SpeculatorType::Dflash)]
    pub speculator_type: SpeculatorType,
    /// Where to compute.
    #[arg(long, value_enum, default_value_t = DeviceArg::Auto)]
    pub device: DeviceArg,
    /// Kind of weights and activations in forward and backward; masters, gradients and the optimizer's
    /// state are float32 in any case. auto: float32 on a CPU, bfloat16 on a GPU.
    #[arg(long, value_enum, default_value_t)]
    pub compute_dtype: ComputeDtype,
    /// Keep only the layers' inputs for the backward pass and run each layer forward again there.
    #[arg(long)]
    pub recompute: bool,
    /// What the ranks share out among themselves (ZeRO stages): 0 nothing, 1 the masters and the
    /// optimizer's state.
    #[arg(long, value_name = "STAGE", default_value_t = 0, value_parser = clap::value_parser!(u8).range(0..=1))]
    pub zero: u8,
    /// How float32 matrices are multiplied on the CPU; bfloat16 is several times faster where the
    /// processor has instructions for it (AMX).
    #[arg(long, value_enum, default_value_t = MatmulPrecision::Float32)]
    pub matmul_precision: MatmulPrecision,
    /// Ranks.
    #[command(flatten, next_help_heading = "Ranks")]
    pub launch: LaunchArgs,
    /// Checkpoints.
    #[command(flatten, next_help_heading = "Checkpoints")]
    pub checkpoints: CheckpointArgs,
    /// Shape of the draft.
    #[command(flatten, next_help_heading = "Draft")]
    pub draft: DraftArgs,
    /// Rows and anchors.
    #[command(flatten, next_help_heading = "Rows")]
    pub rows: RowArgs,
    /// Loss.
    #[command(flatten, next_help_heading = "Objective")]
    pub objective: ObjectiveArgs,
    /// Optimizer and schedule.
    #[command(flatten, next_help_heading = "Optimizer")]
    pub optimizer: OptimizerArgs,
    /// Hidden states.
    #[command(flatten, next_help_heading = "Hidden states")]
    pub hidden: HiddenArgs,
    /// Steps between metric lines.
    #[arg(long, value_name = "N", default_value_t = 10, value_parser = clap::value_parser!(u64).range(1..))]
    pub log_every: u64,
    /// Peak of a rank's device, dense bfloat16 TFLOP/s, to report utilisation against. Default: by
    /// the GPU's name; nothing for a CPU.
    #[arg(long, value_name = "TFLOPS")]
    pub peak_tflops: Option<f64>,
    /// Held-out measurements.
    #[command(flatten, next_help_heading = "Validation")]
    pub validation: ValidationArgs,
    /// Draw no progress bar.
    #[arg(long)]
    pub no_progress: bool,
}

/// Settings that are not typed.
#[derive(Debug, Clone, Args)]
pub struct RunFileArgs {
    /// Run file: TOML with a table `train` whose keys are the flags below. Flags win over it, and
    /// those that are needed may come from it.
    #[arg(value_name = "RUN_FILE")]
    pub run_file: Option<PathBuf>,
    /// Set one key, such as train.lr=1e-4, over the run file and the environment. Repeatable.
    #[arg(long, value_name = "KEY=VALUE")]
    pub set: Vec<String>,
    /// Print all settings as a run file and do nothing else.
    #[arg(long)]
    pub dump_config: bool,
}

impl RunFileArgs {
    /// Whether settings come from elsewhere than flags, environment and defaults.
    pub fn gives_settings(&self) -> bool {
        self.run_file.is_some() || !self.set.is_empty()
    }
}

/// Shape of the draft; the rest is copied from the target.
#[derive(Debug, Clone, Args)]
pub struct DraftArgs {
    /// Start from the weights of this draft: a checkpoint directory of ours, z-lab's or
    /// speculators', or a repository OWNER/NAME on the Hub. The flags below default to its values.
    #[arg(long, value_name = "DIR|REPO")]
    pub from_pretrained: Option<String>,
    /// Layers of the draft. Default: 5.
    #[arg(long, value_name = "N")]
    pub num_layers: Option<usize>,
    /// Slots of a block: the anchor and the tokens predicted at once. Default: 16.
    #[arg(long, value_name = "B")]
    pub block_size: Option<usize>,
    /// Captured layers: 0 = embedding output, k = after k layers. Default: five spread evenly.
    #[arg(long, value_name = "ID", num_args = 1.., value_delimiter = ',')]
    pub target_layer_ids: Option<Vec<u32>>,
    /// Token of the slots to be predicted. Default: the tokenizer's mask token, else the first
    /// embedding row that the tokenizer does not use.
    #[arg(long, value_name = "ID")]
    pub mask_token_id: Option<i64>,
    /// Make all layers see only the last N tokens (causal in the block, as it is served).
    #[arg(long, value_name = "N")]
    pub sliding_window: Option<usize>,
    /// Predict only the N tokens that the data supervises most often.
    #[arg(long, value_name = "N")]
    pub draft_vocab_size: Option<usize>,
}

/// What a step trains on.
#[derive(Debug, Clone, Args)]
pub struct RowArgs {
    /// Tokens of a packed row.
    #[arg(long, value_name = "T", default_value_t = 3072)]
    pub total_seq_len: usize,
    /// Most anchors per document.
    #[arg(long, value_name = "N", default_value_t = 512)]
    pub anchors_per_sequence: usize,
    /// Most anchors per packed row.
    #[arg(long, value_name = "N", default_value_t = 3072)]
    pub max_anchors: usize,
    /// Packed rows per rank and optimizer step.
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub gradient_accumulation_steps: usize,
    /// Passes over the data. Default: 6, or what --max-steps needs.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    pub epochs: Option<u64>,
    /// Stop after N optimizer steps; the schedule ends there.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    pub max_steps: Option<u64>,
    /// Seed of weights, order and anchors.
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub seed: u64,
}

/// What is minimised.
#[derive(Debug, Clone, Args)]
pub struct ObjectiveArgs {
    /// Loss terms `name` or `name=coefficient`, comma separated: ce, kl, rkl, jsd, tv, nla, lk.
    #[arg(long, value_name = "TERMS", default_value = "ce", value_delimiter = ',')]
    pub loss: Vec<String>,
    /// Take the right token from the target's argmax instead of the data.
    #[arg(long)]
    pub teacher_labels: bool,
    /// Slots after which a slot's weight has fallen to 1/e. Default: 7, 5, 4 for blocks of 16, 10, 8.
    #[arg(long, value_name = "G")]
    pub gamma: Option<f64>,
    /// Weigh slots by D-PACE with this smoothing instead of by their distance.
    #[arg(long, value_name = "ALPHA", conflicts_with = "gamma")]
    pub dpace_alpha: Option<f64>,
    /// Memory of one chunk of logits, MiB.
    #[arg(long, value_name = "MIB", default_value_t = 8)]
    pub loss_chunk_mib: usize,
}

/// What a run measures of itself on data that it does not train on.
#[derive(Debug, Clone, Args)]
pub struct ValidationArgs {
    /// Steps between validations; the last step has one too.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    pub eval_every: Option<u64>,
    /// Hold out this share of the samples, from the dataset's end: loss, accuracy and expected
    /// length are taken on them, with the same anchors every time.
    #[arg(long, value_name = "R", default_value_t = 0.0, requires = "eval_every")]
    pub validation_ratio: f64,
    /// Prompts (JSON or JSONL) to decode with the target and the draft: their real acceptance
    /// names the best checkpoint.
    #[arg(long, value_name = "FILE", requires = "eval_every")]
    pub eval_prompts: Option<PathBuf>,
    /// Prompts of that file at most.
    #[arg(long, value_name = "N", default_value_t = 32, value_parser = at_least_one)]
    pub eval_limit: usize,
    /// Tokens of such an answer at most.
    #[arg(long, value_name = "N", default_value_t = 128, value_parser = at_least_one)]
    pub eval_max_new_tokens: usize,
}

/// How parameters move.
#[derive(Debug, Clone, Args)]
pub struct OptimizerArgs {
    /// Peak learning rate.
    #[arg(long, value_name = "LR", default_value_t = 6e-4)]
    pub lr: f64,
    /// Its course after the warm-up.
    #[arg(long, value_enum, default_value_t = SchedulerType::Cosine)]
    pub scheduler_type: SchedulerType,
    /// Share of all steps that warm up.
    #[arg(long, value_name = "R", default_value_t = 0.04)]
    pub warmup_ratio: f64,
    /// Steps that warm up, instead of a share.
    #[arg(long, value_name = "N", conflicts_with = "warmup_ratio")]
    pub warmup_steps: Option<u64>,
    /// Learning rate behind the last step, as a share of the peak.
    #[arg(long, value_name = "R", default_value_t = 0.0)]
    pub min_lr_ratio: f64,
    /// Share of all steps that decay, for wsd.
    #[arg(long, value_name = "R", default_value_t = 0.2)]
    pub decay_ratio: f64,
    /// What moves the matrices; norms are AdamW's in either case.
    #[arg(long, value_enum, default_value_t = OptimizerArg::Adamw)]
    pub optimizer: OptimizerArg,
    /// Muon's peak learning rate, for the matrices. Default: ten times --lr.
    #[arg(long, value_name = "LR")]
    pub muon_lr: Option<f64>,
    /// Decoupled weight decay of matrices.
    #[arg(long, value_name = "W", default_value_t = 0.0)]
    pub weight_decay: f64,
    /// Decoupled weight decay of norms.
    #[arg(long, value_name = "W", default_value_t = 0.0)]
    pub norm_weight_decay: f64,
    /// Keep a moving average of the weights, which keeps the share D of itself at each step; it is
    /// what checkpoints serve.
    #[arg(long, value_name = "D")]
    pub ema_decay: Option<f64>,
    /// Largest global gradient norm; above it the gradient is scaled down.
    #[arg(long, value_name = "N", default_value_t = 1.0)]
    pub max_grad_norm: f64,
    /// End the run, saved, after N steps in a row with a non-finite gradient (skipped, counted).
    #[arg(long, value_name = "N", default_value_t = 10, value_parser = clap::value_parser!(u64).range(1..))]
    pub max_bad_steps: u64,
}

/// Where hidden states come from.
#[derive(Debug, Clone, Args)]
pub struct HiddenArgs {
    /// Directory of stored hidden states (hs_ROW.safetensors), looked at first.
    #[arg(long, value_name = "DIR")]
    pub hidden_states_path: Option<PathBuf>,
    /// What to do about a sample that is not stored.
    #[arg(long, value_enum, default_value_t = OnMissingArg::Generate)]
    pub on_missing: OnMissingArg,
    /// What to do with a generated sample once it is trained on.
    #[arg(long, value_enum, default_value_t = OnGenerateArg::Delete)]
    pub on_generate: OnGenerateArg,
    /// Hidden states in flight or waiting, MiB per rank.
    #[arg(long, value_name = "MIB", default_value_t = 256)]
    pub window_mib: usize,
    /// Requests in flight per rank.
    #[arg(long, value_name = "N", default_value_t = 16)]
    pub max_in_flight: usize,
}

/// Kinds of drafters.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum SpeculatorType {
    /// Block diffusion conditioned on the target's hidden states.
    Dflash,
}

/// Where to compute.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum DeviceArg {
    /// CUDA where libtorch has it, else the CPU.
    Auto,
    /// The CPU.
    Cpu,
    /// The GPU of the local rank.
    Cuda,
}

/// Rounding of the factors of a matrix product on the CPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum MatmulPrecision {
    /// None: exact to float32's own rounding.
    Float32,
    /// To bfloat16, as GPUs train; sums stay float32.
    Bfloat16,
}

/// Optimizers of the matrices.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum OptimizerArg {
    /// AdamW.
    Adamw,
    /// Muon: orthogonalised momentum.
    Muon,
}

/// Learning-rate schedules.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum SchedulerType {
    /// Half a cosine.
    Cosine,
    /// A straight line.
    Linear,
    /// Warm-up, stable, decay.
    Wsd,
    /// No decay.
    None,
}

/// What to do about a sample whose hidden states are not stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum OnMissingArg {
    /// Ask the server.
    Generate,
    /// Leave it out.
    Skip,
    /// Leave it out and say so.
    Warn,
    /// Fail.
    Raise,
}

/// What to do with generated hidden states.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum OnGenerateArg {
    /// Keep nothing.
    Delete,
    /// Store them in --hidden-states-path for later epochs and runs.
    Cache,
}
