//! Rotary embedding of drafts, with optional scaling.

use dflash_formats::RopeScaling;
use dflash_formats::draft::DraftConfig;
use dflash_tensor::ops::{Pairs, Rotary};
use dflash_tensor::rope::{Llama3Scaling, Rope, Scaling, Yarn};
use tch::Device;

pub(crate) fn of_draft(config: &DraftConfig, device: Device) -> Rotary {
    match &config.rope_scaling {
        Some(scaling) => scaled(scaling, config.head_dim, config.rope_theta, device),
        None => Rotary::new(config.head_dim, config.rope_theta, device),
    }
}

/// Scaled rotary embedding of heads of size `head_dim` with base `theta`.
fn scaled(scaling: &RopeScaling, head_dim: i64, theta: f64, device: Device) -> Rotary {
    let original_max_position_embeddings = scaling.original_context();
    let frequencies = match *scaling {
        RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, .. } => {
            Scaling::Llama3(Llama3Scaling {
                factor,
                low_freq_factor,
                high_freq_factor,
                original_max_position_embeddings,
            })
        }
        RopeScaling::Yarn { factor, beta_fast, beta_slow, truncate, .. } => Scaling::Yarn(Yarn {
            factor,
            beta_fast,
            beta_slow,
            truncate,
            original_max_position_embeddings,
            attention_factor: scaling.amplitude(),
        }),
    };
    Rope { theta, head_dim, rotated: head_dim, pairs: Pairs::Halves, scaling: frequencies }
        .rotary(device)
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use dflash_formats::Wanted;
    use dflash_formats::fields::Fields;
    use serde_json::{Value, json};
    use tch::Tensor;

    use super::*;

    fn scaling(value: &Value) -> RopeScaling {
        let fields = Fields::parse(Path::new("config.json"), &value.to_string()).unwrap();
        match RopeScaling::wanted(&fields).unwrap() {
            Wanted::Scaled(scaling) => scaling,
            other => panic!("{other:?}"),
        }
    }

    fn check(value: &Value, (head_dim, theta): (i64, f64), expected: &[f32], amplitude: f64) {
        let scaling = scaling(value);
        let zero = Tensor::from_slice(&[0i64, 1]);
        let tables = scaled(&scaling, head_dim, theta, Device::Cpu).tables(&zero);
        let cosine = tables.cos_td.get(0);
        assert!(cosine.allclose(&(cosine.ones_like() * amplitude), 1e-6, 0.0, false));
        let expected = Tensor::from_slice(expected);
        let sine = expected.sin() * amplitude;
        assert!(tables.sin_td.get(1).allclose(&sine, 1e-5, 1e-7, false), "{:?}", tables.sin_td);
    }

    /// Values of Transformers 5.17's `ROPE_INIT_FUNCTIONS` for a Qwen3Config with these parameters.
    #[test]
    fn frequencies_are_transformers() {
        let yarn = json!({"rope_type": "yarn", "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0,
                          "original_max_position_embeddings": 64, "truncate": false});
        let expected = [
            1.0,
            0.116_900_14,
            0.012_703_318,
            0.002_863_556_6,
            6.454_972_3e-4,
            1.455_067e-4,
            3.279_982_8e-5,
            7.393_672e-6,
        ];
        check(&yarn, (16, 150_000.0), &expected, 1.138_629_4);
        let truncated = json!({"type": "yarn", "factor": 4.0, "mscale": 1.0, "mscale_all_dim": 1.0,
                               "original_max_position_embeddings": 64});
        let expected = [
            1.0,
            0.140_886_25,
            0.012_703_318,
            0.002_863_556_6,
            6.454_972_3e-4,
            1.455_067e-4,
            3.279_982_8e-5,
            7.393_672e-6,
        ];
        check(&truncated, (16, 150_000.0), &expected, 1.138_629_4);
        let llama3 = json!({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
                            "high_freq_factor": 4.0, "original_max_position_embeddings": 64});
        check(&llama3, (8, 10_000.0), &[1.0, 0.013_042_256, 0.001_25, 1.25e-4], 1.0);
    }
}
