//! `run.json`: what made the run in a save path, and what went on with it.

use std::path::Path;

use serde_json::{Value, json};

use crate::Error;
use crate::checkpoint::Position;
use crate::config::TrainConfig;

/// File of the settings and versions in the save path.
pub(crate) const PROVENANCE: &str = "run.json";

/// Writes how the run at `position` was started. Earlier starts of the same run stay in a list.
pub(crate) fn write(
    config: &TrainConfig,
    position: &Position,
    world_size: usize,
) -> Result<(), Error> {
    let path = config.save_path.join(PROVENANCE);
    let earlier = if position.step > 0 { earlier_starts(&path) } else { Vec::new() };
    let provenance = json!({
        "dflash": env!("CARGO_PKG_VERSION"),
        "libtorch": dflash_torch_sys::libtorch_version().ok(),
        "world_size": world_size,
        "resumed_at_step": position.step,
        "earlier_starts": earlier,
        "dataset": position.dataset,
        "config": config,
    });
    let text = serde_json::to_vec_pretty(&provenance).expect("settings print");
    Ok(dflash_files::write_bytes(&path, &text)?)
}

/// What the starts before this one said, oldest first. A file that is gone or broken says nothing:
/// the run must not fail for its own records.
fn earlier_starts(path: &Path) -> Vec<Value> {
    let last: Option<Value> =
        std::fs::read(path).ok().and_then(|text| serde_json::from_slice(&text).ok());
    let Some(last) = last else { return Vec::new() };
    let mut starts = last["earlier_starts"].as_array().cloned().unwrap_or_default();
    starts.push(json!({
        "dflash": last["dflash"],
        "world_size": last["world_size"],
        "resumed_at_step": last["resumed_at_step"],
        "command": last["config"]["command"],
    }));
    starts
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn starts_are_kept_in_order() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(PROVENANCE);
        assert!(earlier_starts(&path).is_empty());
        let write = |start: &Value| std::fs::write(&path, start.to_string()).unwrap();
        write(&json!({"world_size": 1, "resumed_at_step": 0, "config": {"command": ["a"]}}));
        let one = earlier_starts(&path);
        assert_eq!((one.len(), &one[0]["command"]), (1, &json!(["a"])));
        write(&json!({"world_size": 2, "resumed_at_step": 7, "earlier_starts": one}));
        let steps: Vec<Value> =
            earlier_starts(&path).iter().map(|start| start["resumed_at_step"].clone()).collect();
        assert_eq!(steps, [0, 7]);
        std::fs::write(&path, "{broken").unwrap();
        assert!(earlier_starts(&path).is_empty());
    }
}
