//! Drafters with additional weights or another mask: not implemented, so their vectors are skipped
//! by name, and their configurations must be refused.

use std::path::Path;

use dflash_draft::DraftConfig;
use dflash_golden::Entry;
use libtest_mimic::Trial;
use serde_json::{Value, json};

use super::vectors::Vectors;

/// A trial for a file, which asserts that the code does not read such a drafter as DFlash.
pub(crate) fn refusal(entry: Entry) -> Trial {
    Trial::test(
        format!("heads::{} left out: not implemented, and refused", entry.name),
        move || {
            check(&entry.path);
            Ok(())
        },
    )
}

fn check(path: &Path) {
    let mut layers = Vectors::open(path).json("config");
    layers["max_position_embeddings"] = json!(256);
    let stem = path.file_stem().unwrap().to_string_lossy();
    let kind = stem.split('_').next().unwrap();
    for (layout, config, expect) in layouts(kind, layers) {
        let message = match DraftConfig::parse(path, &config.to_string()) {
            Err(error) => error.to_string(),
            Ok(_) => panic!("{kind} in {layout}'s layout is read as DFlash"),
        };
        assert!(message.contains(expect), "{message}");
    }
}

/// Configurations of such checkpoints, each with the words expected in the refusal.
fn layouts(kind: &str, layers: Value) -> Vec<(&'static str, Value, &'static str)> {
    let ids = json!([1, 2, 3]);
    let zlab = |dflash: Value| {
        let mut config = layers.clone();
        config["dflash_config"] = json!({"mask_token_id": 47, "target_layer_ids": ids});
        config["dflash_config"]
            .as_object_mut()
            .unwrap()
            .extend(dflash.as_object().unwrap().clone());
        config
    };
    let speculators = json!({
        "speculators_model_type": kind, "block_size": layers["block_size"], "mask_token_id": 47,
        "aux_hidden_state_layer_ids": ids, "transformer_layer_config": layers,
    });
    match kind {
        "dflash2" => vec![
            ("z-lab", zlab(json!({"selector_rank": 6})), "dflash_config.selector_rank"),
            ("speculators", speculators, "only dflash drafters"),
        ],
        // its z-lab layout has no `dflash_config`
        "dspark" => vec![
            ("z-lab", layers, "dflash_config"),
            ("speculators", speculators, "only dflash drafters"),
        ],
        "jetspec" => vec![("z-lab", zlab(json!({"causal": true})), "dflash_config.causal")],
        other => panic!("{other} is a kind of drafter that no test knows"),
    }
}
