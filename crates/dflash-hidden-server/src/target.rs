//! The real featurizer: a target on the CPU or a GPU.

use std::path::{Path, PathBuf};

use bytes::Bytes;
use dflash_hidden::Dtype;
use dflash_model::target::{Target, TargetOptions, check_layer_ids, default_layer_ids};
use dflash_torch_sys::{cpu_multiplies_bf16, multiply_in_bf16};
use serde_json::Value;
use tch::{Device, Kind, Tensor, no_grad};

use crate::error::Error;
use crate::featurizer::{Featurizer, ModelFacts, PackedPrompts};

/// Captures when the user names none; the paper's number.
const DEFAULT_CAPTURES: usize = 5;

/// What to load and how to run it.
#[derive(Debug, Clone)]
pub struct TargetFeaturizerOptions {
    /// A Hugging Face model directory.
    pub dir: PathBuf,
    /// Layers to capture, in our ids; `None` for the published choice.
    pub layer_ids: Option<Vec<u32>>,
    /// Where to run; `None` for CUDA where libtorch has it, else the CPU.
    pub device: Option<Device>,
    /// Kind of weights and activations; `None` for bf16 on CUDA and float32 on a CPU, there with
    /// bf16 products where the hardware has them and the checkpoint is bf16.
    pub kind: Option<Kind>,
    /// Element type of the rows that are sent.
    pub wire_dtype: Dtype,
    /// Longest prompt, at most the model's; `None` for the model's.
    pub max_model_len: Option<usize>,
    /// Threads of one operation on the CPU; `None` leaves libtorch's choice.
    pub threads: Option<usize>,
}

/// A [`Target`] that hands out rows.
#[derive(Debug)]
pub struct TargetFeaturizer {
    target: Target,
    facts: ModelFacts,
}

impl TargetFeaturizer {
    /// Loads the target and checks the layer ids against it.
    ///
    /// # Errors
    /// [`Error::Model`] for the directory, a file in it or a layer id; [`Error::TooLongContext`].
    pub fn load(options: &TargetFeaturizerOptions) -> Result<Self, Error> {
        if let Some(threads) = options.threads {
            tch::set_num_threads(i32::try_from(threads).unwrap_or(i32::MAX));
        }
        let device = options.device.unwrap_or_else(Device::cuda_if_available);
        let arithmetic = arithmetic(device, options);
        if arithmetic.bf16_products {
            multiply_in_bf16()?;
        }
        let placement = TargetOptions { device, dtype: arithmetic.kind };
        let target = Target::load(&options.dir, &placement)?;
        let facts = facts_of(&target, options, (&placement, arithmetic))?;
        Ok(Self { target, facts })
    }
}

/// How a target computes.
#[derive(Debug, Clone, Copy)]
struct Arithmetic {
    kind: Kind,
    /// Whether float32 matrices are multiplied in bf16.
    bf16_products: bool,
}

/// The rows travel as bf16, and servers run targets in their checkpoint's type. Where the CPU
/// multiplies bf16 in hardware only the products do so there: that is several times faster than
/// float32, and the rest stays in float32, for which there are kernels. Elsewhere bf16 is emulated.
fn arithmetic(device: Device, options: &TargetFeaturizerOptions) -> Arithmetic {
    let exact = |kind| Arithmetic { kind, bf16_products: false };
    match (options.kind, device) {
        (Some(kind), _) => exact(kind),
        (None, Device::Cpu) => Arithmetic {
            kind: Kind::Float,
            bf16_products: cpu_multiplies_bf16() && checkpoint_is_bf16(&options.dir),
        },
        (None, _) => exact(Kind::BFloat16),
    }
}

/// What config.json says. A file that cannot be read is reported by the loader, not here.
fn checkpoint_is_bf16(dir: &Path) -> bool {
    let text = std::fs::read_to_string(dir.join("config.json")).unwrap_or_default();
    let config: Value = serde_json::from_str(&text).unwrap_or_default();
    // Older checkpoints have the old key.
    let dtype = config.get("dtype").or_else(|| config.get("torch_dtype"));
    dtype.and_then(Value::as_str) == Some("bfloat16")
}

fn facts_of(
    target: &Target,
    options: &TargetFeaturizerOptions,
    (placement, arithmetic): (&TargetOptions, Arithmetic),
) -> Result<ModelFacts, Error> {
    let layers = target.num_layers();
    let mut layer_ids =
        options.layer_ids.clone().unwrap_or_else(|| default_layer_ids(layers, DEFAULT_CAPTURES));
    layer_ids.sort_unstable();
    check_layer_ids(&layer_ids, layers)?;
    let limit = target.config().max_position_embeddings as usize;
    let max_model_len = options.max_model_len.unwrap_or(limit);
    if max_model_len > limit {
        return Err(Error::TooLongContext { asked: max_model_len, limit });
    }
    Ok(ModelFacts {
        name: name_of(&options.dir),
        root: options.dir.display().to_string(),
        hidden_size: target.hidden_size() as usize,
        num_hidden_layers: layers as u32,
        vocab_size: target.vocab_size() as usize,
        max_model_len,
        layer_ids,
        dtype: options.wire_dtype,
        device: placement_name(placement, arithmetic),
    })
}

fn placement_name(placement: &TargetOptions, arithmetic: Arithmetic) -> String {
    let device = match placement.device {
        Device::Cpu => format!("the CPU ({} threads)", tch::get_num_threads()),
        Device::Cuda(index) => format!("cuda:{index}"),
        other => format!("{other:?}"),
    };
    let kind = match placement.dtype {
        Kind::BFloat16 => "bfloat16",
        Kind::Float if arithmetic.bf16_products => "float32 with bfloat16 products",
        Kind::Float => "float32",
        _ => "another type",
    };
    format!("{device} in {kind}")
}

/// The directory's own name, also where the user wrote `.` or a trailing slash.
fn name_of(dir: &Path) -> String {
    let whole = dir.canonicalize().unwrap_or_else(|_| dir.into());
    whole.file_name().unwrap_or(whole.as_os_str()).to_string_lossy().into_owned()
}

impl Featurizer for TargetFeaturizer {
    fn facts(&self) -> &ModelFacts {
        &self.facts
    }

    fn features(
        &mut self,
        prompts: &PackedPrompts,
        layer_ids: &[u32],
    ) -> Result<Vec<Bytes>, Error> {
        let failed = |error: tch::TchError| Error::Batch {
            tokens: prompts.input_ids.len(),
            reason: error.to_string(),
        };
        no_grad(|| {
            let ids_t = Tensor::from_slice(&prompts.input_ids).to_device(self.target.device());
            let states = self.target.forward_packed(&ids_t, &prompts.document_starts, layer_ids);
            let wire = self.facts.dtype;
            states.iter().map(|state| row_bytes(state, wire).map_err(failed)).collect()
        })
    }
}

/// Copies `state_th` [T, H] to the host once, in the wire's element type.
fn row_bytes(state_th: &Tensor, dtype: Dtype) -> Result<Bytes, tch::TchError> {
    let kind = match dtype {
        Dtype::Bf16 => Kind::BFloat16,
        Dtype::F32 => Kind::Float,
    };
    let host = state_th.f_to_kind(kind)?.f_to_device(Device::Cpu)?.f_contiguous()?;
    let elements = host.numel();
    let mut bytes = vec![0; elements * dtype.size()];
    host.f_copy_data_u8(&mut bytes, elements)?;
    Ok(bytes.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_keep_their_order_and_bits() {
        let state = Tensor::from_slice(&[1.0f32, -2.5, 3.25, 0.1, 5.0, 6.0]).reshape([2, 3]);
        // A transposed view has the rows apart in memory.
        let view = state.tr();
        let f32s = row_bytes(&view, Dtype::F32).unwrap();
        let values: Vec<f32> =
            f32s.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect();
        assert_eq!(values, [1.0, 0.1, -2.5, 5.0, 3.25, 6.0]);
        let bf16s = row_bytes(&state, Dtype::Bf16).unwrap();
        // bf16 is float32's upper half: 1.0 = 0x3f80, 0.1 rounds up to 0x3dcd.
        assert_eq!(
            (bf16s.len(), &bf16s[..2], &bf16s[6..8]),
            (12, &[0x80, 0x3f][..], &[0xcd, 0x3d][..])
        );
    }

    fn options(dir: &Path, kind: Option<Kind>) -> TargetFeaturizerOptions {
        TargetFeaturizerOptions {
            dir: dir.into(),
            layer_ids: None,
            device: None,
            kind,
            wire_dtype: Dtype::Bf16,
            max_model_len: None,
            threads: None,
        }
    }

    #[test]
    fn only_bf16_checkpoints_are_multiplied_in_bf16() {
        let dir = tempfile::tempdir().unwrap();
        let check = |config: &str, bf16: bool| {
            std::fs::write(dir.path().join("config.json"), config).unwrap();
            assert_eq!(checkpoint_is_bf16(dir.path()), bf16, "{config}");
            let found = arithmetic(Device::Cpu, &options(dir.path(), None));
            assert_eq!(found.kind, Kind::Float, "{config}");
            assert_eq!(found.bf16_products, bf16 && cpu_multiplies_bf16(), "{config}");
        };
        check(r#"{"dtype": "bfloat16"}"#, true);
        check(r#"{"torch_dtype": "bfloat16"}"#, true);
        check(r#"{"dtype": "float32", "torch_dtype": "bfloat16"}"#, false);
        check("{}", false);
        check("no json", false);
    }

    #[test]
    fn a_kind_that_is_asked_for_is_exact() {
        for device in [Device::Cpu, Device::Cuda(0)] {
            for kind in [Kind::Float, Kind::BFloat16] {
                let found = arithmetic(device, &options(Path::new("absent"), Some(kind)));
                assert_eq!((found.kind, found.bf16_products), (kind, false));
            }
        }
        let found = arithmetic(Device::Cuda(0), &options(Path::new("absent"), None));
        assert_eq!(found.kind, Kind::BFloat16);
    }

    #[test]
    fn a_model_is_named_after_its_directory() {
        let dir = tempfile::tempdir().unwrap();
        let model = dir.path().join("Qwen3-8B");
        std::fs::create_dir(&model).unwrap();
        assert_eq!(name_of(&model.join(".")), "Qwen3-8B");
        assert_eq!(name_of(Path::new("absent/Model/")), "Model");
    }
}
