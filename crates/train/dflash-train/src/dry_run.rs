//! The drafter of a run before its first step, for trying it in an engine.

use std::path::PathBuf;

use dflash_draft::{DraftConfig, DraftLayout};
use dflash_identity::TargetIdentity;
use dflash_io::PendingDir;
use dflash_run::RunDir;
use dflash_target::TargetFacts;
use tch::Device;

use crate::config::TrainConfig;
use crate::warm_start::WarmStart;
use crate::{Error, machine, setup};

/// Writes the drafter that a fresh run of `config` would start from, in the layout of checkpoints,
/// and returns its directory inside the run's. Replaces an earlier dry run.
///
/// # Errors
/// Settings that the run would refuse; I/O.
pub fn dry_run(config: &TrainConfig) -> Result<PathBuf, Error> {
    let target = TargetFacts::load(&config.target_dir, config.described_target.as_ref())?;
    let shape = setup::draft_config(&target, &config.draft)?;
    let bytes = 4.0 * DraftLayout::new(&shape).elements() as f64;
    machine::check_memory(bytes, "num_layers", config.draft.num_layers)?;
    let identity = TargetIdentity::read(&config.target_dir, &config.settings.target)?;
    let rows = target.vocab_size as usize;
    let vocabulary = setup::vocabulary(config, None, None, rows)?;
    tch::no_grad(|| {
        let draft = setup::fresh(shape.clone(), config.settings.rows.seed, Device::Cpu);
        if let Some(dir) = &config.pretrained_dir {
            WarmStart::open(dir, &shape)?.copy_into(&draft)?;
        }
        let path = config.settings.save_path.join(RunDir::DRY_RUN);
        // Anything else in its place is not ours to replace.
        let is_earlier = DraftConfig::load(&path).is_ok();
        let dir = match is_earlier {
            true => PendingDir::create_replacing(&path)?,
            false => PendingDir::create(&path)?,
        };
        draft.save(dir.path())?;
        if let Some(vocabulary) = &vocabulary {
            vocabulary.save(dir.path())?;
        }
        identity.write_into_draft(dir.path())?;
        dir.commit()?;
        Ok(path)
    })
}
