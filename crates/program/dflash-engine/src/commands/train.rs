//! `dflash train`: passes the settings to the library, or launches ranks.

mod notices;

use std::io::Write;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use anyhow::Context;
use dflash::{Ending, Signals};
use dflash_decode::{Probe, ProbeConfig};
use dflash_dist::{Role, WorkerEnv};
use dflash_draft::LoadedDraft;
use dflash_hub::{Hub, ModelPart};
use dflash_run::{Checkpoint, RunDir};
use dflash_settings::{Invalid, TrainSettings, ValidationSettings};
use dflash_target::{TargetConfig, TargetFacts};
use dflash_train::config::TrainConfig;
use dflash_train::{Acceptance, Prepared, ProbeError, Share};

use super::draft::Draft;
use super::{described, launch};

/// Time between schedulers' SIGTERM and SIGKILL: Slurm's KillWait, Kubernetes' grace period.
const SCHEDULERS_PATIENCE: Duration = Duration::from_secs(30);

/// Message for a run that a signal stopped before its first step.
const UNTRAINED: &str = "stopped before the first step; there was nothing to save";

pub(crate) fn run(settings: TrainSettings, signals: &Signals) -> anyhow::Result<Ending> {
    start(settings, signals).or_else(|error| match is_interruption(&error) {
        true => {
            tracing::warn!("{UNTRAINED}");
            Ok(Ending::Stopped)
        }
        false => Err(error),
    })
}

/// Whether a signal, not a fault, stopped the run before its first step. After that, the training
/// loop handles signals.
fn is_interruption(error: &anyhow::Error) -> bool {
    matches!(error.downcast_ref(), Some(dflash_hub::Error::Interrupted))
        || error.downcast_ref().is_some_and(dflash_train::Error::is_interruption)
}

fn start(mut settings: TrainSettings, signals: &Signals) -> anyhow::Result<Ending> {
    let stop = signals.stop();
    let role = launch::role(&settings.launch)?;
    if let Role::Worker(env) = &role
        && env.restart_count > 0
        && (settings.resume.is_some() || !is_of_another_job(&settings.save_path, env)?)
    {
        settings.restart();
    }
    let (mut config, draft) = resolve(settings, signals)?;
    if let Role::Worker(env) = &role {
        config.progress &= env.rank == 0;
        config.job = job(env);
    }
    if config.settings.dry_run {
        return dry_run(&config, &role);
    }
    let settings = &config.settings;
    let launch = match &role {
        // Launch errors are reported before anything is opened.
        Role::Launcher { nproc } => Some(launch::config(&settings.launch, *nproc)?),
        _ => None,
    };
    check_runs_here(settings, &config.target_dir)?;
    let acceptance = probe_config(&settings.validation, &config.target_dir);
    let prepared = Prepared::open(&config)?;
    // Once: by the process that starts the ranks, or the only one.
    if !matches!(&role, Role::Worker(_)) {
        notices::on_vocabulary(&config);
        notices::on_patience(&config, &draft);
    }
    let grace = save_grace(settings.checkpoints.grace, prepared.time_to_save());
    dflash::set_save_grace(grace);
    let leads = !matches!(&role, Role::Worker(env) if env.rank > 0);
    if leads && settings.checkpoints.grace.is_none() && grace > SCHEDULERS_PATIENCE {
        let seconds = grace.as_secs();
        tracing::warn!(
            "saving may take until {seconds} s after SIGTERM; make your scheduler wait that long before it kills, or pass its limit as --grace"
        );
    }
    // Errors in the prompts are reported once, before ranks start.
    let acceptance = acceptance.map(AcceptanceMeter::open).transpose()?;
    match (role, launch) {
        (Role::Worker(env), _) => train(&prepared, &env, acceptance, stop),
        (_, Some(launch)) => launch::start(launch, grace, signals),
        _ => train(&prepared, &WorkerEnv::alone(), acceptance, stop),
    }
}

/// Writes the untrained drafter, once regardless of the number of ranks.
fn dry_run(config: &TrainConfig, role: &Role) -> anyhow::Result<Ending> {
    if !matches!(role, Role::Worker(env) if env.rank > 0) {
        let path = dflash_train::dry_run(config)?;
        writeln!(std::io::stdout(), "{}", path.display())
            .context("cannot write to standard output")?;
    }
    Ok(Ending::Complete)
}

/// The id of a rank's job; torchrun's default id is the same for all jobs and does not count.
fn job(env: &WorkerEnv) -> Option<String> {
    (env.run_id != "none").then(|| env.run_id.clone())
}

/// Whether the run in `save_path` belongs to another job. The first attempt of this job was then
/// refused, and its restarts must be too.
fn is_of_another_job(save_path: &Path, env: &WorkerEnv) -> anyhow::Result<bool> {
    let made = RunDir::at(save_path).provenance()?;
    let other = made.as_ref().and_then(|made| made.config["job"].as_str());
    Ok(other.zip(job(env)).is_some_and(|(other, own)| other != own))
}

/// Time from SIGTERM to the deadline: the user's, or enough to finish a step and save.
fn save_grace(seconds: Option<u64>, saving: Duration) -> Duration {
    seconds.map_or(dflash::SAVE_GRACE + saving, Duration::from_secs)
}

fn train(
    prepared: &Prepared<'_>,
    env: &WorkerEnv,
    mut acceptance: Option<AcceptanceMeter>,
    stop: &AtomicBool,
) -> anyhow::Result<Ending> {
    let outcome = match &mut acceptance {
        None => prepared.run(env, None)?,
        Some(meter) => {
            let mut probe = |served: &LoadedDraft, share: Share| meter.measure(served, share, stop);
            prepared.run(env, Some(&mut probe))?
        }
    };
    let ending = if outcome.completed { Ending::Complete } else { Ending::Stopped };
    if env.rank > 0 {
        return Ok(ending);
    }
    let Some(checkpoint) = outcome.checkpoint else {
        tracing::warn!("{UNTRAINED}");
        return Ok(ending);
    };
    let checkpoint = checkpoint.display();
    if !outcome.completed {
        // An orderly stop: progress is saved. The exit code tells which signal requested it.
        tracing::warn!("stopped at step {}; --resume continues {checkpoint}", outcome.step);
    }
    let written = writeln!(std::io::stdout(), "{checkpoint}");
    match (written, ending) {
        // The terminal hung up, or the reader was stopped too.
        (Err(error), Ending::Stopped) => {
            tracing::warn!("the checkpoint's path did not reach standard output: {error}");
        }
        (written, _) => written.context("cannot write to standard output")?,
    }
    Ok(ending)
}

/// Resolves the settings for this target and draft.
fn resolve(mut settings: TrainSettings, signals: &Signals) -> anyhow::Result<(TrainConfig, Draft)> {
    let stop = signals.stop();
    let resumed = goes_on_from(&settings)?;
    let record =
        resumed.as_ref().map(|_| RunDir::at(&settings.save_path).provenance()).transpose()?;
    settings.settle(record.flatten().map(|record| record.config).as_ref());
    let part = if needs_layers(&settings) { ModelPart::Target } else { ModelPart::Head };
    let target_dir = Hub::from_env().model(&settings.target, part, stop)?;
    let run = settings.resume.is_some().then_some(settings.save_path.as_path());
    let described_target = described::described(settings.target_spec.as_deref(), run)?;
    let target = TargetFacts::load(&target_dir, described_target.as_ref())?;
    let mut draft = Draft::locate(&settings.draft, stop)?;
    if let Some(checkpoint) = resumed {
        draft = draft.resuming(&checkpoint.dir);
    }
    let config = TrainConfig {
        draft: draft.shape_with_mask(&settings.draft, &target_dir, &target)?,
        described_target,
        pretrained_dir: draft.dir.clone(),
        command: std::env::args().collect(),
        job: None,
        stop: Arc::clone(stop),
        save: Arc::clone(signals.save()),
        progress: !settings.no_progress,
        target_dir,
        settings,
    };
    Ok((config, draft))
}

/// The checkpoint to resume from, if any.
fn goes_on_from(settings: &TrainSettings) -> anyhow::Result<Option<Checkpoint>> {
    if settings.dry_run || settings.resume.is_none() {
        return Ok(None);
    }
    Ok(RunDir::at(&settings.save_path).start(settings.resume)?)
}

/// Whether this process runs the target's layers, not only its head.
fn needs_layers(settings: &TrainSettings) -> bool {
    settings.hidden_states.colocate || settings.validation.eval_prompts.is_some()
}

/// Refuses to run the target in this process if its family is not supported.
fn check_runs_here(settings: &TrainSettings, target_dir: &Path) -> anyhow::Result<()> {
    if !needs_layers(settings) {
        return Ok(());
    }
    let Err(error @ dflash_tensor::Error::Architecture { .. }) = TargetConfig::load(target_dir)
    else {
        return Ok(());
    };
    let (key, instead) = match settings.hidden_states.colocate {
        true => ("colocate", "let a vLLM serve the hidden states and pass it as --vllm-endpoint"),
        false => (
            "eval_prompts",
            "do not pass --eval-prompts, and measure checkpoints in the engine that \
             serves the target: dflash eval --endpoint",
        ),
    };
    let reason = format!(
        "runs the target in this process, but dflash supports only the head of its family ({error}); {instead}"
    );
    Err(Invalid { key, reason, missing: None }.into())
}

/// Configuration for measuring acceptance, if prompts are given.
fn probe_config(settings: &ValidationSettings, target_dir: &Path) -> Option<ProbeConfig> {
    Some(ProbeConfig {
        target: target_dir.into(),
        prompts: settings.eval_prompts.clone()?,
        limit: Some(settings.eval_limit),
        max_new_tokens: settings.eval_max_new_tokens,
    })
}

/// Measures acceptance by real decoding, for the trainer, which does not depend on the decoder.
struct AcceptanceMeter(Probe);

impl AcceptanceMeter {
    fn open(config: ProbeConfig) -> anyhow::Result<Self> {
        Ok(Self(Probe::open(config)?))
    }

    /// This rank's counts; `None` if the run was told to stop.
    fn measure(
        &mut self,
        served: &LoadedDraft,
        share: Share,
        stop: &AtomicBool,
    ) -> Result<Option<Acceptance>, ProbeError> {
        match self.0.measure(served, share.rank, share.ranks, share.show, stop) {
            Err(dflash_decode::Error::Interrupted) => Ok(None),
            Err(error) => Err(error.into()),
            Ok(acceptance) => Ok(Some(acceptance)),
        }
    }
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
