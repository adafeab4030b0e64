//! What is said of a run before its first step: that it will take days on this CPU, and that engines cannot
//! read what it writes.

use dflash_settings::{DraftSettings, Invalid, PlanDevice, PlanSettings, TrainSettings};
use dflash_target::TargetFacts;
use dflash_train::config::TrainConfig;
use dflash_train::plan::{self, Typed, Way};
use serde_json::{Value, json};

use crate::commands::draft::Draft;

/// Says of a pruned vocabulary that checkpoints have no place for it which engines look at.
pub(super) fn on_vocabulary(config: &TrainConfig) {
    if let Some(size) = config.draft.vocab_size {
        tracing::warn!(
            "--draft-vocab-size {size}: dflash reads it from checkpoints, but vLLM and SGLang would \
             draft from all tokens; serve `dflash export --format speculators` (vLLM) or gguf \
             (llama.cpp), or train without it"
        );
    }
}

/// Names values that finish in hours, if the run would take more than a day on a CPU. A run of which
/// the planner cannot say that is no worse for it.
pub(super) fn on_patience(config: &TrainConfig, draft: &Draft) {
    match advice(config, draft) {
        Ok(Some(notice)) => tracing::warn!("{notice}"),
        Ok(None) => {}
        Err(error) => tracing::debug!("how long the run takes is not known: {error:#}"),
    }
}

fn advice(config: &TrainConfig, draft: &Draft) -> anyhow::Result<Option<String>> {
    let settings = &config.settings;
    if settings.resume.is_some() || !plan::is_on_a_cpu(&device(settings)) {
        return Ok(None);
    }
    let target = TargetFacts::load(&config.target_dir, config.described_target.as_ref())?;
    let shape = |of: &DraftSettings| draft.shape(of, &target);
    let settings = as_plan(settings)?;
    let typed = Typed::default();
    let found = plan::suggest(&settings, (&config.target_dir, &target), &shape, &typed)?;
    Ok(notice(&found.ways))
}

/// The way as asked takes too long, and another does not.
fn notice(ways: &[Way]) -> Option<String> {
    let asked = ways.iter().find(|way| !way.changes_training && way.hours.is_some())?;
    let best = ways.first().filter(|way| way.changes_training && way.reason.is_none())?;
    let values: Vec<&str> = best.flags.iter().map(String::as_str).collect();
    let values = values.split(|flag| *flag == "--nproc").next_back()?.get(1..)?.join(" ");
    Some(format!(
        "this run takes about {} on this CPU; with {values} it takes about {} (the target's passes \
         included; dflash plan --suggest compares)",
        asked.time(),
        best.time()
    ))
}

fn device(settings: &TrainSettings) -> PlanDevice {
    settings.device.to_string().parse().unwrap_or(PlanDevice::Cuda)
}

/// The same run as `dflash plan` takes it.
fn as_plan(settings: &TrainSettings) -> Result<PlanSettings, Invalid> {
    let mut value = serde_json::to_value(settings).expect("settings are numbers and strings");
    let fields = value.as_object_mut().expect("a struct");
    fields.insert("nproc".into(), json!(settings.launch.nproc.unwrap_or(1)));
    fields.insert("device".into(), json!("cpu"));
    for (key, none) in [("json", json!(false)), ("suggest", json!(false)), ("rows", Value::Null)] {
        fields.insert(key.into(), none);
    }
    fields.insert("pipeline".into(), json!(1));
    fields.insert("tensor_parallel_size".into(), json!(1));
    serde_json::from_value(value).map_err(|error| Invalid::new("device", "cpu", error.to_string()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn way(hours: f64, flags: &str, changes_training: bool, reason: Option<&str>) -> Way {
        Way {
            name: String::new(),
            flags: flags.split_whitespace().map(str::to_owned).collect(),
            changes_training,
            trainers: 1,
            servers: 0,
            servers_needed: None,
            bytes_per_second: None,
            hours: Some([hours; 2]),
            trainer_bytes: 1e9,
            server_bytes: None,
            reason: reason.map(str::to_owned),
            commands: Vec::new(),
        }
    }

    #[test]
    fn a_run_of_weeks_is_told_what_finishes_today() {
        let asked = way(800.0, "--colocate --nproc 1", false, Some("takes longer than 24 hours"));
        let less = way(20.0, "--colocate --nproc 1 --num-layers 3 --epochs 1", true, None);
        let said = notice(&[less, asked]).unwrap();
        for part in
            ["about 800.0 h on this CPU", "with --num-layers 3 --epochs 1 it takes about 20.0 h"]
        {
            assert!(said.contains(part), "{said}");
        }
        assert_eq!(notice(&[way(3.0, "--colocate --nproc 1", false, None)]), None);
    }
}
