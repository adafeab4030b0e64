//! Compares an export, loaded again, with its source.

use dflash_draft::{Draft, DraftConfig, Parameter};
use dflash_settings::ExportDtype;
use half::f16;
use tch::{Kind, Tensor};

use crate::{Error, Result};

/// Context positions of the forward pass: more than a block, few enough for any CPU.
const CONTEXT: i64 = 48;

/// Maximum change of the forward pass through rounding (relative root mean square). Types with 8
/// significant bits change one of eight layers by at most 0.01.
const MOST_CHANGE: f64 = 0.1;

/// How close the export is to its source.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Deviation {
    /// Number of tensors compared, i.e. all.
    pub tensors: usize,
    /// Number of elements compared.
    pub elements: i64,
    /// Largest difference of an element relative to the largest element of its tensor.
    pub largest: f64,
    /// Relative root mean square difference of the forward passes' results.
    pub forward: f64,
}

/// Compares the `exported` draft with the one `loaded` from the export. `dtype_of` returns a
/// parameter's storage type.
///
/// # Errors
/// A different configuration, or a difference of an element or of the forward pass beyond rounding.
pub(crate) fn compare(
    exported: &Draft,
    loaded: &Draft,
    dtype_of: impl Fn(&Parameter) -> ExportDtype,
) -> Result<Deviation> {
    same_config(exported.config(), loaded.config())?;
    let parameters = exported.layout().parameters();
    let mut largest = 0f64;
    for parameter in parameters {
        let (own, theirs) = (parameter.view(exported.flat()), parameter.view(loaded.flat()));
        largest = largest.max(tensor(&parameter.name, &own, &theirs, dtype_of(parameter))?);
    }
    let forward = forward_difference(exported, loaded);
    if forward.is_nan() || forward > MOST_CHANGE {
        let detail = format!("by {forward:.3e} of its size, and {MOST_CHANGE} is the most");
        return Err(Error::Differs { what: "the forward pass".into(), detail });
    }
    let elements = exported.layout().trained();
    Ok(Deviation { tensors: parameters.len(), elements, largest, forward })
}

/// Compares a tensor with its copy; returns the largest difference over the largest element.
///
/// # Errors
/// A difference beyond the type's rounding.
pub(crate) fn tensor(name: &str, own: &Tensor, theirs: &Tensor, dtype: ExportDtype) -> Result<f64> {
    let rounded = |kind| own.to_kind(kind).to_kind(Kind::Float).equal(theirs);
    let is_near = match dtype {
        ExportDtype::F32 => own.equal(theirs),
        ExportDtype::F16 => rounded(Kind::Half),
        ExportDtype::Bf16 => rounded(Kind::BFloat16),
        ExportDtype::Q80 => within_q8(own, theirs),
    };
    let difference = (own - theirs).abs().max().double_value(&[]);
    let share = difference / own.abs().max().double_value(&[]).max(f64::MIN_POSITIVE);
    if is_near && share.is_finite() {
        return Ok(share);
    }
    let detail = format!("an element by {share:.3e} of the largest, more than {dtype:?} rounds");
    Err(Error::Differs { what: format!("tensor {name}"), detail })
}

/// Whether each element is within the rounding of its block of 32: half a step, plus 127 times the
/// float16 error of a step.
fn within_q8(own: &Tensor, theirs: &Tensor) -> bool {
    let blocks = own.reshape([-1, 32]);
    let (largest, _) = blocks.abs().max_dim(1, true);
    let step = largest / 127.0;
    let step_error = &step * (0.5 * f16::EPSILON.to_f64()) + 0.5 * 2f64.powi(-24);
    let allowed = step * 0.5001 + step_error * 127.0;
    let difference = (blocks - theirs.reshape([-1, 32])).abs();
    difference.le_tensor(&allowed).all().int64_value(&[]) == 1
}

/// Fields that some layouts may omit are not compared.
fn same_config(exported: &DraftConfig, loaded: &DraftConfig) -> Result<()> {
    let said = DraftConfig {
        num_target_layers: loaded.num_target_layers.or(exported.num_target_layers),
        initializer_range: exported.initializer_range,
        eos_token_id: exported.eos_token_id.clone(),
        ..loaded.clone()
    };
    if said == *exported {
        return Ok(());
    }
    let detail = format!("{loaded:?} instead of {exported:?}");
    Err(Error::Differs { what: "the configuration".into(), detail })
}

/// Relative difference of `loaded`'s result for a block of the same input.
fn forward_difference(exported: &Draft, loaded: &Draft) -> f64 {
    let (own, theirs) = (block(exported), block(loaded));
    let size = |tensor: &Tensor| tensor.square().mean(Kind::Double).sqrt().double_value(&[]);
    size(&(&own - theirs)) / size(&own).max(f64::MIN_POSITIVE)
}

/// The draft's output for a block, [B, H], after synthetic context.
fn block(draft: &Draft) -> Tensor {
    let config = draft.config();
    let wave = |rows: i64, width: i64, pitch: f64| {
        let options = (Kind::Double, draft.flat().device());
        let positions = Tensor::arange(rows * width, options) * pitch;
        (positions.square() * 1e-3).sin().view([rows, width]).to_kind(Kind::Float)
    };
    let features = wave(CONTEXT, config.aux_layers() * config.hidden_size, 0.37);
    let slots = wave(config.block_size as i64, config.hidden_size, 0.61);
    let mut cache = draft.new_cache(CONTEXT);
    draft.extend_context(&mut cache, &features, 0);
    draft.forward_block(&cache, &slots, CONTEXT)
}

#[cfg(test)]
mod tests {
    use super::*;
    use tch::Device;

    fn values() -> Tensor {
        let positions = Tensor::arange(128, (Kind::Float, Device::Cpu));
        ((positions * 1.7).sin() * 0.3).view([4, 32])
    }

    /// Whether a change of one element is distinguished from rounding.
    fn notices(dtype: ExportDtype, read: &Tensor, change: f64) -> bool {
        let changed = read.copy();
        let _ = changed.view([-1]).narrow(0, 77, 1).g_add_scalar_(change);
        tensor("x", &values(), read, dtype).unwrap();
        tensor("x", &values(), &changed, dtype).is_err()
    }

    #[test]
    fn only_the_types_own_rounding_is_allowed() {
        assert!(notices(ExportDtype::F32, &values(), 1e-6));
        let read = |kind| values().to_kind(kind).to_kind(Kind::Float);
        assert!(notices(ExportDtype::F16, &read(Kind::Half), 3e-4));
        assert!(notices(ExportDtype::Bf16, &read(Kind::BFloat16), 2e-3));
        assert!(tensor("x", &values(), &read(Kind::Half), ExportDtype::F32).is_err());
        let (largest, _) = values().abs().max_dim(1, true);
        let step = largest / 127.0;
        let read = (values() / &step).round() * &step;
        assert!(notices(ExportDtype::Q80, &read, 0.3 / 100.0));
        assert!(!notices(ExportDtype::Q80, &read, 0.0));
        let nan = values() * f64::NAN;
        assert!(tensor("x", &nan, &nan, ExportDtype::Q80).is_err());
    }
}
