//! `dflash train`: arguments to settings to one library call, or to a launch of ranks.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use anyhow::{Context, bail, ensure};
use dflash::args::{
    CheckpointArgs, ComputeDtype, DeviceArg, DraftArgs, HiddenArgs, MatmulPrecision, ObjectiveArgs,
    OnGenerateArg, OnMissingArg, OptimizerArg, OptimizerArgs, RowArgs, SchedulerType,
    SpeculatorType, TrainArgs, ValidationArgs,
};
use dflash_decode::{Probe, ProbeConfig};
use dflash_dist::{Role, WorkerEnv};
use dflash_hidden::{OnGenerate, OnMissing};
use dflash_hub::{Hub, Part};
use dflash_model::draft::DraftConfig;
use dflash_model::objective::{Confidence, Denominator, ElementLoss, Weighting};
use dflash_model::target::{TargetConfig, TokenizerFacts, default_layer_ids, resolve_mask_token};
use dflash_text::ChatTokenizer;
use dflash_train::config::{
    ComputeKind, DeviceChoice, DraftSettings, HiddenSettings, ObjectiveSettings, TrainConfig,
    ValidationConfig, Zero,
};
use dflash_train::optimizer::{AdamWConfig, Algorithm, MuonConfig, OptimizerConfig, WeightDecay};
use dflash_train::schedule::{Schedule, ScheduleKind, Warmup};
use dflash_train::{Acceptance, ProbeError, Retention, Served, Share};

use super::launch;

/// Shape of a draft where neither flags nor a pretrained draft say otherwise: the paper's.
const DEFAULT_CAPTURES: usize = 5;
const DEFAULT_LAYERS: usize = 5;
const DEFAULT_BLOCK_SIZE: usize = 16;

/// Epochs of the DFlash paper's recipe.
const DEFAULT_EPOCHS: u64 = 6;

/// From SIGTERM to SIGKILL where nobody says otherwise: Slurm's KillWait, Kubernetes' grace period.
const SCHEDULERS_PATIENCE: Duration = Duration::from_secs(30);

/// Runs the command.
pub(crate) fn run(args: TrainArgs, stop: &Arc<AtomicBool>) -> anyhow::Result<()> {
    let launch_args = args.launch.clone();
    let grace = args.checkpoints.grace;
    let acceptance = probe_config(&args.validation, &args.verifier_name_or_path);
    let mut config = resolve(args, stop)?;
    match Role::from_env(launch::wish(&launch_args))? {
        Role::Worker(env) => {
            config.progress &= env.rank == 0;
            train(&config, &env, acceptance, grace)
        }
        Role::Alone => train(&config, &WorkerEnv::alone(), acceptance, grace),
        Role::Launcher { nproc } => {
            let prepared = dflash_train::Prepared::open(&config)?;
            let grace = save_grace(grace, prepared.time_to_save());
            dflash::set_save_grace(grace);
            let ranks = launch::config(launch_args, nproc, grace)?;
            // what is wrong with the prompts is better said once, before ranks start
            acceptance.map(Probe::open).transpose()?;
            launch::start(&ranks, stop)
        }
    }
}

/// Time from SIGTERM to the end: what the user says, or enough to end a step and to save.
fn save_grace(seconds: Option<u64>, saving: Duration) -> Duration {
    seconds.map_or(dflash::SAVE_GRACE + saving, Duration::from_secs)
}

fn train(
    config: &TrainConfig,
    env: &WorkerEnv,
    acceptance: Option<ProbeConfig>,
    grace: Option<u64>,
) -> anyhow::Result<()> {
    let mut acceptance = acceptance.map(AcceptanceMeter::open).transpose()?;
    let prepared = dflash_train::Prepared::open(config)?;
    let time = save_grace(grace, prepared.time_to_save());
    dflash::set_save_grace(time);
    if env.rank == 0 && grace.is_none() && time > SCHEDULERS_PATIENCE {
        let seconds = time.as_secs();
        tracing::warn!(
            "saving may take until {seconds} s after SIGTERM; let your scheduler wait as long \
             before it kills, or say with --grace how long it waits"
        );
    }
    let outcome = match &mut acceptance {
        None => prepared.run(env, None)?,
        Some(meter) => {
            let mut probe =
                |served: Served<'_>, share: Share| meter.measure(served, share, &config.stop);
            prepared.run(env, Some(&mut probe))?
        }
    };
    if env.rank > 0 {
        return Ok(());
    }
    if !outcome.completed {
        // An orderly end: what there was is saved. The exit code tells which signal asked for it.
        let (step, checkpoint) = (outcome.step, outcome.checkpoint.display());
        tracing::warn!("stopped at step {step}; --resume continues {checkpoint}");
    }
    println!("{}", outcome.checkpoint.display());
    Ok(())
}

fn resolve(args: TrainArgs, stop: &Arc<AtomicBool>) -> anyhow::Result<TrainConfig> {
    let TrainArgs {
        // both programs put it in place of the flags before this
        run: _,
        verifier_name_or_path: target,
        data_path,
        vllm_endpoint,
        save_path,
        resume,
        launch: ranks,
        checkpoints,
        speculator_type: SpeculatorType::Dflash,
        device,
        compute_dtype,
        recompute,
        zero,
        matmul_precision,
        draft,
        rows,
        objective,
        optimizer,
        hidden,
        validation,
        log_every,
        peak_tflops,
        no_progress,
    } = args;
    let CheckpointArgs { save_every, keep_last, keep_every, grace: _ } = checkpoints;
    let RowArgs {
        total_seq_len,
        anchors_per_sequence,
        max_anchors,
        gradient_accumulation_steps,
        epochs,
        max_steps,
        seed,
    } = rows;
    let (from_pretrained, stored) = stored_draft(&draft, stop)?;
    let draft = draft_settings(draft, &target, stored.as_ref())?;
    let (lr, schedule, optimizer, max_grad_norm, max_bad_steps) = optimizer_settings(optimizer)?;
    Ok(TrainConfig {
        target,
        data: data_path,
        save_path,
        objective: objective_settings(objective, draft.block_size)?,
        draft,
        from_pretrained,
        hidden: hidden_settings(hidden, vllm_endpoint)?,
        lr,
        schedule,
        optimizer,
        max_grad_norm,
        epochs: whole_epochs(epochs, max_steps),
        max_steps,
        accumulation: gradient_accumulation_steps,
        total_seq_len,
        anchors_per_sequence,
        max_anchors,
        seed,
        save_every,
        validation: validation_settings(&validation),
        retention: Retention { keep_last, keep_every },
        log_every,
        max_bad_steps,
        resume,
        join_timeout: Duration::from_secs(ranks.join_timeout),
        collective_timeout: Duration::from_secs(ranks.collective_timeout),
        device: device_choice(device),
        backend: launch::backend(ranks.backend),
        compute_dtype: compute_kind(compute_dtype),
        zero: if zero == 0 { Zero::Off } else { Zero::One },
        recompute,
        bf16_products: matmul_precision == MatmulPrecision::Bfloat16,
        peak_tflops,
        command: std::env::args().collect(),
        stop: Arc::clone(stop),
        progress: !no_progress,
    })
}

/// `None` for the device's usual one.
fn compute_kind(dtype: ComputeDtype) -> Option<ComputeKind> {
    match dtype {
        ComputeDtype::Auto => None,
        ComputeDtype::Float32 => Some(ComputeKind::Float32),
        ComputeDtype::Bfloat16 => Some(ComputeKind::Bfloat16),
    }
}

/// What is validated when; the prompts are the acceptance probe's.
fn validation_settings(args: &ValidationArgs) -> Option<ValidationConfig> {
    let every = args.eval_every?;
    let measures = args.eval_prompts.is_some();
    Some(ValidationConfig { every, ratio: args.validation_ratio, measures })
}

/// What acceptance is measured on, where it is.
fn probe_config(args: &ValidationArgs, target: &Path) -> Option<ProbeConfig> {
    let ValidationArgs {
        eval_every,
        validation_ratio: _,
        eval_prompts,
        eval_limit,
        eval_max_new_tokens,
    } = args.clone();
    eval_every?;
    Some(ProbeConfig {
        target: target.into(),
        prompts: eval_prompts?,
        limit: Some(eval_limit),
        max_new_tokens: eval_max_new_tokens,
    })
}

/// Real decoding for the trainer, which knows no decoder.
struct AcceptanceMeter(Probe);

impl AcceptanceMeter {
    fn open(config: ProbeConfig) -> anyhow::Result<Self> {
        Ok(Self(Probe::open(config)?))
    }

    /// This rank's counts; `None` when the run was told to stop.
    fn measure(
        &mut self,
        served: Served<'_>,
        share: Share,
        stop: &AtomicBool,
    ) -> Result<Option<Acceptance>, ProbeError> {
        match self.0.measure(served, (share.rank, share.ranks), stop) {
            Err(dflash_decode::Error::Interrupted) => Ok(None),
            Err(error) => Err(error.into()),
            Ok(acceptance) => Ok(Some(acceptance)),
        }
    }
}

/// The library's name of a device.
pub(super) fn device_choice(device: DeviceArg) -> DeviceChoice {
    match device {
        DeviceArg::Auto => DeviceChoice::Auto,
        DeviceArg::Cpu => DeviceChoice::Cpu,
        DeviceArg::Cuda => DeviceChoice::Cuda,
    }
}

/// Epochs of a run; 0 stands for as many as the bound on steps needs.
pub(super) fn whole_epochs(epochs: Option<u64>, max_steps: Option<u64>) -> u64 {
    epochs.unwrap_or(if max_steps.is_some() { 0 } else { DEFAULT_EPOCHS })
}

/// Where the draft to start from lies, and its shape.
pub(super) fn stored_draft(
    args: &DraftArgs,
    stop: &Arc<AtomicBool>,
) -> anyhow::Result<(Option<PathBuf>, Option<DraftConfig>)> {
    let named = args.from_pretrained.as_deref();
    let dir = named.map(|name| Hub::from_env().model(name, Part::Draft, stop)).transpose()?;
    let config = dir.as_deref().map(DraftConfig::load).transpose()?;
    Ok((dir, config))
}

fn draft_settings(
    args: DraftArgs,
    target: &Path,
    stored: Option<&DraftConfig>,
) -> anyhow::Result<DraftSettings> {
    let explicit_mask = args.mask_token_id;
    let mask_token_id = explicit_mask.or_else(|| stored.map(|draft| draft.mask_token_id));
    let settings = draft_shape(args, target, stored)?;
    let tokenizer = ChatTokenizer::load(target)?;
    if let Some(id) = explicit_mask {
        refuse_text(&tokenizer, id)?;
    }
    let special = tokenizer.special_ids();
    let facts = TokenizerFacts {
        len: tokenizer.len() as i64,
        mask: special.mask,
        pad: special.pad,
        eos: special.eos,
        unk: special.unk,
    };
    let rows = TargetConfig::load(target)?.vocab_size;
    Ok(DraftSettings { mask_token_id: resolve_mask_token(mask_token_id, facts, rows)?, ..settings })
}

/// A mask token must mean nothing: a draft that meets it in answers learns to propose blanks.
fn refuse_text(tokenizer: &ChatTokenizer, id: i64) -> anyhow::Result<()> {
    let text = tokenizer.decode(&[id], true)?;
    ensure!(
        text.is_empty(),
        "--mask-token-id {id} is {text:?}, which occurs in text; take a special token or a row of \
         the embedding that the tokenizer does not use"
    );
    Ok(())
}

/// The draft's settings but for its mask token, which needs the tokenizer: 0 where it is not given.
pub(super) fn draft_shape(
    args: DraftArgs,
    target: &Path,
    stored: Option<&DraftConfig>,
) -> anyhow::Result<DraftSettings> {
    let DraftArgs {
        from_pretrained: _,
        num_layers,
        block_size,
        target_layer_ids,
        mask_token_id,
        sliding_window,
        draft_vocab_size,
    } = args;
    let depth = TargetConfig::load(target)?.num_hidden_layers;
    let layers = stored.map_or(DEFAULT_LAYERS, |draft| draft.layers.len());
    let slots = stored.map_or(DEFAULT_BLOCK_SIZE, |draft| draft.block_size);
    Ok(DraftSettings {
        num_layers: num_layers.unwrap_or(layers),
        block_size: block_size.unwrap_or(slots),
        target_layer_ids: target_layer_ids
            .or_else(|| stored.map(|draft| draft.target_layer_ids.clone()))
            .unwrap_or_else(|| default_layer_ids(depth, DEFAULT_CAPTURES)),
        mask_token_id: mask_token_id.unwrap_or_default(),
        sliding_window: sliding_window.or_else(|| stored.and_then(|draft| draft.sliding_window)),
        vocab_size: draft_vocab_size,
    })
}

pub(super) fn objective_settings(
    args: ObjectiveArgs,
    block_size: usize,
) -> anyhow::Result<ObjectiveSettings> {
    let ObjectiveArgs { loss, teacher_labels, gamma, dpace_alpha, loss_chunk_mib } = args;
    let terms = loss.iter().map(|term| loss_term(term)).collect::<anyhow::Result<Vec<_>>>()?;
    let (weighting, denominator) = match dpace_alpha {
        Some(alpha) => {
            ensure!((0.0..=1.0).contains(&alpha), "--dpace-alpha is {alpha}, but it lies in 0..1");
            (Weighting::Dpace { alpha, confidence: Confidence::CrossEntropy }, Denominator::Blocks)
        }
        None => {
            let gamma = gamma.unwrap_or_else(|| default_gamma(block_size));
            ensure!(gamma > 0.0, "--gamma is {gamma}, but it must be positive");
            (Weighting::Decay { gamma }, Denominator::Weights)
        }
    };
    let chunk_bytes = loss_chunk_mib.max(1) << 20;
    Ok(ObjectiveSettings { terms, weighting, denominator, teacher_labels, chunk_bytes })
}

/// The paper's values for blocks of 16, 10 and 8; between and beyond them the nearest.
fn default_gamma(block_size: usize) -> f64 {
    match block_size {
        0..=8 => 4.0,
        9..=12 => 5.0,
        _ => 7.0,
    }
}

fn loss_term(term: &str) -> anyhow::Result<(ElementLoss, f64)> {
    let (name, coefficient) = term.split_once('=').unwrap_or((term, "1"));
    let loss = match name {
        "ce" => ElementLoss::CrossEntropy,
        "kl" => ElementLoss::Kl,
        "rkl" => ElementLoss::ReverseKl,
        "jsd" => ElementLoss::Jsd,
        "tv" => ElementLoss::Tv,
        "nla" => ElementLoss::Nla,
        "lk" => ElementLoss::Lk,
        _ => bail!("--loss names {name}, but the terms are ce, kl, rkl, jsd, tv, nla and lk"),
    };
    let coefficient: f64 = coefficient
        .parse()
        .ok()
        .filter(|value: &f64| value.is_finite() && *value > 0.0)
        .with_context(|| format!("--loss {term}: the coefficient must be a positive number"))?;
    Ok((loss, coefficient))
}

type OptimizerSettings = (f64, Schedule, OptimizerConfig, f64, u64);

fn optimizer_settings(args: OptimizerArgs) -> anyhow::Result<OptimizerSettings> {
    let OptimizerArgs {
        lr,
        scheduler_type,
        warmup_ratio,
        warmup_steps,
        min_lr_ratio,
        decay_ratio,
        optimizer,
        muon_lr,
        weight_decay,
        norm_weight_decay,
        ema_decay,
        max_grad_norm,
        max_bad_steps,
    } = args;
    let shares = [
        ("--warmup-ratio", warmup_ratio),
        ("--min-lr-ratio", min_lr_ratio),
        ("--decay-ratio", decay_ratio),
    ];
    for (flag, value) in shares {
        ensure!((0.0..=1.0).contains(&value), "{flag} is {value}, but a share lies in 0..1");
    }
    ensure!(max_grad_norm > 0.0, "--max-grad-norm is {max_grad_norm}, but it must be positive");
    let kind = match scheduler_type {
        SchedulerType::Cosine => ScheduleKind::Cosine,
        SchedulerType::Linear => ScheduleKind::Linear,
        SchedulerType::Wsd => ScheduleKind::Wsd { decay_ratio },
        SchedulerType::None => ScheduleKind::None,
    };
    let warmup = warmup_steps.map_or(Warmup::Ratio(warmup_ratio), Warmup::Steps);
    let schedule = Schedule { kind, warmup, minimum: min_lr_ratio };
    let optimizer = OptimizerConfig {
        algorithm: algorithm(optimizer, lr, muon_lr)?,
        adamw: AdamWConfig::default(),
        weight_decay: WeightDecay { matrices: weight_decay, norms: norm_weight_decay },
        ema_decay,
    };
    Ok((lr, schedule, optimizer, max_grad_norm, max_bad_steps))
}

fn algorithm(optimizer: OptimizerArg, lr: f64, muon_lr: Option<f64>) -> anyhow::Result<Algorithm> {
    let usual = MuonConfig::default();
    match (optimizer, muon_lr) {
        (OptimizerArg::Adamw, Some(_)) => bail!("--muon-lr needs --optimizer muon"),
        (OptimizerArg::Adamw, None) => Ok(Algorithm::AdamW),
        (OptimizerArg::Muon, None) => Ok(Algorithm::Muon(usual)),
        (OptimizerArg::Muon, Some(rate)) => {
            let positive = rate > 0.0 && rate.is_finite();
            ensure!(positive, "--muon-lr is {rate}, but a learning rate is a positive number");
            Ok(Algorithm::Muon(MuonConfig { rate_ratio: rate / lr, ..usual }))
        }
    }
}

fn hidden_settings(args: HiddenArgs, endpoints: Vec<String>) -> anyhow::Result<HiddenSettings> {
    let HiddenArgs { hidden_states_path, on_missing, on_generate, window_mib, max_in_flight } =
        args;
    ensure!(
        on_generate == OnGenerateArg::Delete || hidden_states_path.is_some(),
        "--on-generate cache needs --hidden-states-path to say where"
    );
    ensure!(
        on_missing == OnMissingArg::Generate || hidden_states_path.is_some(),
        "--on-missing skip, warn and raise use stored hidden states alone; name their folder with \
         --hidden-states-path"
    );
    Ok(HiddenSettings {
        endpoints,
        offline_dir: hidden_states_path,
        on_missing: match on_missing {
            OnMissingArg::Generate => OnMissing::Generate,
            OnMissingArg::Skip => OnMissing::Skip,
            OnMissingArg::Warn => OnMissing::Warn,
            OnMissingArg::Raise => OnMissing::Raise,
        },
        on_generate: match on_generate {
            OnGenerateArg::Delete => OnGenerate::Delete,
            OnGenerateArg::Cache => OnGenerate::Cache,
        },
        window_bytes: window_mib.max(1) << 20,
        max_in_flight,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_time_to_save_grows_with_the_checkpoint_unless_it_is_given() {
        let seconds = Duration::from_secs;
        assert_eq!(save_grace(None, seconds(0)), dflash::SAVE_GRACE);
        assert_eq!(save_grace(None, seconds(300)), dflash::SAVE_GRACE + seconds(300));
        assert_eq!(save_grace(Some(5), seconds(300)), seconds(5));
    }
}
