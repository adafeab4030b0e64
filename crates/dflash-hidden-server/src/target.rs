//! The real featurizer: a target on the CPU or a GPU.

use std::path::Path;

use bytes::Bytes;
use dflash_hidden::Metadata;
use dflash_identity::TargetIdentity;
use dflash_model::target::{Target, TargetOptions, check_layer_ids, default_layer_ids};
use dflash_model::{is_want_of_memory, place};
use dflash_settings::{DEFAULT_CAPTURES, Dtype, HiddenServerSettings, WireDtype};
use dflash_torch_sys::{cpu_multiplies_bf16, multiply_in_bf16};
use serde_json::Value;
use tch::{Device, Kind, Tensor, no_grad};

use crate::error::Error;
use crate::featurizer::{Featurizer, ModelFacts, PackedPrompts};

/// Where oneDNN makes code for every number of tokens, batches are filled up to a multiple of this with
/// a prompt that nobody asked for. So there are a few dozen shapes instead of one for each batch.
const GRAIN: usize = 32;

/// A [`Target`] that hands out rows.
#[derive(Debug)]
pub struct TargetFeaturizer {
    target: Target,
    facts: ModelFacts,
    /// Batches have a multiple of so many tokens.
    grain: usize,
}

impl TargetFeaturizer {
    /// Loads the target and checks the layer ids against it.
    ///
    /// # Errors
    /// [`Error::Setting`]; [`Error::Model`] for the directory, a file in it or a layer id;
    /// [`Error::TooLongContext`].
    pub fn load(dir: &Path, settings: &HiddenServerSettings) -> Result<Self, Error> {
        if let Some(threads) = settings.threads {
            tch::set_num_threads(i32::try_from(threads).unwrap_or(i32::MAX));
        }
        let (device, dtype) = place(settings.device, settings.dtype, 0)?;
        let in_bf16 = multiplies_in_bf16(device, settings.dtype, dir);
        if in_bf16 {
            multiply_in_bf16()?;
        }
        let target = Target::load(dir, &TargetOptions { device, dtype })?;
        let identity = TargetIdentity::read(dir, &settings.target)?;
        let device = device_name(device, dtype, in_bf16);
        let facts = facts_of(&target, (dir, identity), settings, device)?;
        Ok(Self { target, facts, grain: if in_bf16 { GRAIN } else { 1 } })
    }
}

/// Whether float32 matrices are multiplied in bf16.
///
/// The rows travel as bf16, and servers run targets in their checkpoint's type. If the CPU
/// multiplies bf16 in hardware, only the products do so there: that is several times faster than
/// float32, and the rest stays in float32, for which there are kernels. Elsewhere bf16 is emulated.
fn multiplies_in_bf16(device: Device, asked: Dtype, dir: &Path) -> bool {
    let by_checkpoint = asked == Dtype::Auto && device == Device::Cpu;
    by_checkpoint && cpu_multiplies_bf16() && checkpoint_is_bf16(dir)
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
    (dir, identity): (&Path, TargetIdentity),
    settings: &HiddenServerSettings,
    device: String,
) -> Result<ModelFacts, Error> {
    let layers = target.num_layers();
    let mut layer_ids = settings
        .target_layer_ids
        .clone()
        .unwrap_or_else(|| default_layer_ids(layers, DEFAULT_CAPTURES));
    layer_ids.sort_unstable();
    check_layer_ids(&layer_ids, layers)?;
    let limit = target.config().max_position_embeddings as usize;
    let max_model_len = settings.max_model_len.unwrap_or(limit);
    if max_model_len > limit {
        return Err(Error::TooLongContext { asked: max_model_len, limit });
    }
    Ok(ModelFacts {
        name: identity.name.clone(),
        root: dir.display().to_string(),
        max_model_len,
        device,
        metadata: Metadata {
            hidden_size: target.hidden_size() as usize,
            num_hidden_layers: layers as u32,
            vocab_size: target.vocab_size() as usize,
            layer_ids,
            dtype: settings.wire_dtype,
            target: Some(identity),
        },
    })
}

fn device_name(device: Device, dtype: Kind, in_bf16: bool) -> String {
    let device = match device {
        Device::Cpu => format!("the CPU ({} threads)", tch::get_num_threads()),
        Device::Cuda(index) => format!("cuda:{index}"),
        other => format!("{other:?}"),
    };
    let kind = match dtype {
        Kind::BFloat16 => "bfloat16",
        Kind::Float if in_bf16 => "float32 with bfloat16 products",
        Kind::Float => "float32",
        _ => "another type",
    };
    format!("{device} in {kind}")
}

impl Featurizer for TargetFeaturizer {
    fn facts(&self) -> &ModelFacts {
        &self.facts
    }

    fn features(
        &mut self,
        prompts: &PackedPrompts,
        layer_ids: &[u32],
    ) -> Result<Vec<Vec<Bytes>>, Error> {
        let starts = &prompts.document_starts;
        let mut rows = vec![Vec::with_capacity(layer_ids.len()); starts.len() - 1];
        let PackedPrompts { input_ids, document_starts } = filled_up(prompts, self.grain);
        no_grad(|| {
            let ids_t = Tensor::from_slice(&input_ids).to_device(self.target.device());
            let states = self.target.forward_packed(&ids_t, &document_starts, layer_ids);
            for state_th in &states {
                let host_th = on_host(state_th, self.facts.metadata.dtype)?;
                for (rows, bounds) in rows.iter_mut().zip(starts.windows(2)) {
                    rows.push(row_bytes(&host_th.f_narrow(
                        0,
                        bounds[0],
                        bounds[1] - bounds[0],
                    )?)?);
                }
            }
            Ok(rows)
        })
        .map_err(|error: Unfit| error.of_batch(prompts.input_ids.len()))
    }
}

/// `prompts` with one more behind them where their tokens are not a multiple of `grain`.
fn filled_up(prompts: &PackedPrompts, grain: usize) -> PackedPrompts {
    let mut filled = prompts.clone();
    let tokens = filled.input_ids.len().next_multiple_of(grain);
    if tokens > filled.input_ids.len() {
        filled.input_ids.resize(tokens, 0);
        filled.document_starts.push(tokens as i64);
    }
    filled
}

/// Why there are no rows: libtorch's reason, or the allocator's.
#[derive(Debug, thiserror::Error)]
enum Unfit {
    #[error(transparent)]
    Torch(#[from] tch::TchError),
    #[error("no memory for the rows: {0}")]
    Rows(#[from] std::collections::TryReserveError),
}

impl Unfit {
    fn of_batch(self, tokens: usize) -> Error {
        let reason = self.to_string();
        match self {
            Self::Torch(_) if !is_want_of_memory(&reason) => Error::Batch { tokens, reason },
            Self::Torch(_) | Self::Rows(_) => Error::OutOfMemory { tokens, reason },
        }
    }
}

/// `state_th` [T, H] on the host in the wire's element type, in one piece.
fn on_host(state_th: &Tensor, dtype: WireDtype) -> Result<Tensor, tch::TchError> {
    let kind = match dtype {
        WireDtype::Bf16 => Kind::BFloat16,
        WireDtype::F32 => Kind::Float,
    };
    state_th.f_to_kind(kind)?.f_to_device(Device::Cpu)?.f_contiguous()
}

/// A copy of `host_th` [T, H].
fn row_bytes(host_th: &Tensor) -> Result<Bytes, Unfit> {
    let elements = host_th.numel();
    let length = elements * host_th.kind().elt_size_in_bytes();
    let mut bytes = Vec::new();
    // An allocation that cannot fail would end the process where there is no memory.
    bytes.try_reserve_exact(length)?;
    bytes.resize(length, 0);
    host_th.f_copy_data_u8(&mut bytes, elements)?;
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
        let bytes = |state: &Tensor, dtype| row_bytes(&on_host(state, dtype).unwrap()).unwrap();
        let f32s = bytes(&view, WireDtype::F32);
        let values: Vec<f32> =
            f32s.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect();
        assert_eq!(values, [1.0, 0.1, -2.5, 5.0, 3.25, 6.0]);
        let bf16s = bytes(&state, WireDtype::Bf16);
        // bf16 is float32's upper half: 1.0 = 0x3f80, 0.1 rounds up to 0x3dcd.
        assert_eq!(
            (bf16s.len(), &bf16s[..2], &bf16s[6..8]),
            (12, &[0x80, 0x3f][..], &[0xcd, 0x3d][..])
        );
    }

    #[test]
    fn batches_are_filled_up_to_a_multiple() {
        let check = |tokens: usize, grain: usize, starts: &[i64]| {
            let ids: Vec<i64> = (1..=tokens as i64).collect();
            let filled = filled_up(&PackedPrompts::new([ids.as_slice()].into_iter()), grain);
            assert_eq!(filled.document_starts, starts, "{tokens} by {grain}");
            assert_eq!(filled.input_ids[..tokens], ids);
            assert_eq!(filled.input_ids.len() as i64, *starts.last().unwrap());
        };
        check(5, 1, &[0, 5]);
        check(31, 32, &[0, 31, 32]);
        check(32, 32, &[0, 32]);
        check(33, 32, &[0, 33, 64]);
    }

    #[test]
    fn only_bf16_checkpoints_are_multiplied_in_bf16_unless_a_type_is_asked_for() {
        let dir = tempfile::tempdir().unwrap();
        let check = |config: &str, bf16: bool| {
            std::fs::write(dir.path().join("config.json"), config).unwrap();
            assert_eq!(checkpoint_is_bf16(dir.path()), bf16, "{config}");
            let found = multiplies_in_bf16(Device::Cpu, Dtype::Auto, dir.path());
            assert_eq!(found, bf16 && cpu_multiplies_bf16(), "{config}");
            for device in [Device::Cpu, Device::Cuda(0)] {
                for asked in [Dtype::Float32, Dtype::Bfloat16] {
                    assert!(!multiplies_in_bf16(device, asked, dir.path()), "{asked:?}");
                }
            }
        };
        check(r#"{"dtype": "bfloat16"}"#, true);
        check(r#"{"torch_dtype": "bfloat16"}"#, true);
        check(r#"{"dtype": "float32", "torch_dtype": "bfloat16"}"#, false);
        check("{}", false);
        check("no json", false);
    }
}
