//! The user's description of a target: a file given now, or the one recorded by a run.

use std::path::Path;

use dflash_run::RunDir;
use dflash_target::TargetSpec;

/// The description in `file`, else the one recorded by the run to which the directory `of` belongs.
pub(super) fn described(
    file: Option<&Path>,
    of: Option<&Path>,
) -> anyhow::Result<Option<TargetSpec>> {
    if let Some(file) = file {
        return Ok(Some(TargetSpec::load(file)?));
    }
    // A checkpoint's directory lies in its run's.
    let places = of.into_iter().flat_map(|of| std::iter::once(of).chain(of.parent()));
    for place in places.filter(|place| place.is_dir()) {
        let Some(made) = RunDir::at(place).provenance()? else { continue };
        let recorded = &made.config["described_target"];
        if !recorded.is_null() {
            let described = serde_json::from_value(recorded.clone())?;
            tracing::info!("the target is described as in {}", place.join("run.json").display());
            return Ok(Some(described));
        }
    }
    Ok(None)
}
