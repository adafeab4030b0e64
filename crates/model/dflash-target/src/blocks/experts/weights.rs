//! Storage of experts in checkpoints: individually, fused, or as MXFP4 blocks with scales.

use std::ops::Range;

use dflash_tensor::{Result, Weights};
use tch::{Kind, Tensor};

use super::{Experts, Gated, Weighed};
use crate::config::INITIALIZER_RANGE;
use crate::parameters::Init;

/// Names and storage of a layer's experts.
#[derive(Debug)]
pub(crate) struct ExpertsSpec<'a> {
    /// Module path.
    pub(crate) module: &'a str,
    /// Names of gate, up and down if experts are stored individually.
    pub(crate) names: [&'a str; 3],
    /// Layout of the fused tensors `gate_up_proj` and `down_proj`.
    pub(crate) stored: Stored,
    pub(crate) experts: i64,
    pub(crate) hidden: i64,
    /// Inner width of an expert.
    pub(crate) inner: i64,
    /// Whether there are `gate_up_proj_bias` and `down_proj_bias`.
    pub(crate) bias: bool,
    pub(crate) gated: Gated,
    pub(crate) weighed: Weighed,
}

/// Layout of fused experts in a checkpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Stored {
    /// [E, 2I, H] and [E, H, I], as in linear layers, gate first.
    OutputsFirst,
    /// [E, H, 2I] and [E, I, H], the gate first.
    InputsFirst,
    /// [E, H, 2I] and [E, I, H], gate and up interleaved; in MXFP4 outputs come first.
    Interleaved,
}

/// Elements per scale in MXFP4; two per byte.
const MXFP4_BLOCK: i64 = 32;

/// E2M1 values by their four bits.
const E2M1: [f32; 16] =
    [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0];

/// Exponent of E8M0's zero.
const E8M0_BIAS: i32 = 127;

impl Experts {
    pub(crate) fn new(init: &Init, spec: &ExpertsSpec) -> Result<Self> {
        let ExpertsSpec { hidden, inner, gated, weighed, .. } = *spec;
        let (experts, shard) = (init.share(spec.experts), init.shard.clone());
        let empty = |shape: &[i64]| Tensor::empty(shape, init.place.options());
        let biases = spec.bias.then(|| (empty(&[experts, 2 * inner]), empty(&[experts, hidden])));
        let gate_up_ehi = empty(&[experts, hidden, 2 * inner]);
        let down_eih = empty(&[experts, inner, hidden]);
        let this = Self { gate_up_ehi, down_eih, biases, gated, weighed, shard };
        match init.weights {
            Some(weights) => this.read(weights, spec)?,
            None => this.draw(),
        }
        Ok(this)
    }

    fn draw(&self) {
        for weight in [&self.gate_up_ehi, &self.down_eih] {
            let _ = weight.shallow_clone().normal_(0.0, INITIALIZER_RANGE);
        }
        for bias in self.biases.iter().flat_map(|(gate_up, down)| [gate_up, down]) {
            let _ = bias.shallow_clone().zero_();
        }
    }

    fn read(&self, weights: &Weights, spec: &ExpertsSpec) -> Result<()> {
        let path = |name: &str| format!("{}.{name}", spec.module);
        match () {
            () if weights.has(&path("gate_up_proj_blocks")) => self.read_mxfp4(weights, spec)?,
            () if weights.has(&path("gate_up_proj")) => self.read_fused(weights, spec)?,
            () => self.read_each(weights, spec)?,
        }
        let Some((gate_up_ei, down_eh)) = &self.biases else { return Ok(()) };
        let (own, inner) = (self.own(), spec.inner);
        let first = own.start;
        let name = path("gate_up_proj_bias");
        match spec.stored {
            Stored::Interleaved => {
                let by_turns = gate_up_ei.view([-1, 2, inner]).transpose(1, 2);
                let stored = gate_up_ei.empty_like();
                weights.read_part_into(&name, 0, first, &stored)?;
                by_turns.shallow_clone().f_copy_(&stored.view([-1, inner, 2]))?;
            }
            _ => weights.read_part_into(&name, 0, first, gate_up_ei)?,
        }
        weights.read_part_into(&path("down_proj_bias"), 0, first, down_eh)
    }

    /// Indices of this rank's experts.
    fn own(&self) -> Range<i64> {
        let own = self.gate_up_ehi.size()[0];
        let first = self.shard.start(own);
        first..first + own
    }

    /// Reads `experts.3.gate_proj.weight` and so on, each a linear layer's.
    fn read_each(&self, weights: &Weights, spec: &ExpertsSpec) -> Result<()> {
        for (place, expert) in (0..).zip(self.own()) {
            let read = |name: &str, view: &Tensor| {
                weights.read_into(&format!("{}.{expert}.{name}.weight", spec.module), view)
            };
            let (gate_up_hi, down_ih) = (self.gate_up_ehi.get(place), self.down_eih.get(place));
            let [gate, up, down] = spec.names;
            read(gate, &gate_up_hi.narrow(1, 0, spec.inner).tr())?;
            read(up, &gate_up_hi.narrow(1, spec.inner, spec.inner).tr())?;
            read(down, &down_ih.tr())?;
        }
        Ok(())
    }

    fn read_fused(&self, weights: &Weights, spec: &ExpertsSpec) -> Result<()> {
        let first = self.own().start;
        let [gate_up, down] =
            ["gate_up_proj", "down_proj"].map(|name| format!("{}.{name}", spec.module));
        match spec.stored {
            Stored::OutputsFirst => {
                weights.read_part_into(&gate_up, 0, first, &self.gate_up_ehi.transpose(1, 2))?;
                return weights.read_part_into(&down, 0, first, &self.down_eih.transpose(1, 2));
            }
            Stored::InputsFirst => weights.read_part_into(&gate_up, 0, first, &self.gate_up_ehi)?,
            Stored::Interleaved => {
                // One expert at a time, to limit memory beyond the model.
                let by_turns = self.by_turns(spec).permute([0, 1, 3, 2]);
                let stored = self.gate_up_ehi.narrow(0, 0, 1).empty_like();
                for (place, expert) in (0..).zip(self.own()) {
                    weights.read_part_into(&gate_up, 0, expert, &stored)?;
                    let mut to = by_turns.get(place);
                    to.f_copy_(&stored.view(to.size().as_slice()))?;
                }
            }
        }
        weights.read_part_into(&down, 0, first, &self.down_eih)
    }

    /// View with gate and up interleaved: [E, H, 2, I].
    fn by_turns(&self, spec: &ExpertsSpec) -> Tensor {
        self.gate_up_ehi.view([-1, spec.hidden, 2, spec.inner])
    }

    /// Reads gpt-oss's released format, one expert at a time to limit extra memory.
    fn read_mxfp4(&self, weights: &Weights, spec: &ExpertsSpec) -> Result<()> {
        let by_turns = self.by_turns(spec);
        for (place, expert) in (0..).zip(self.own()) {
            // Rows of the stored matrix: gate and up of the first inner element, of the second, ...
            let rows = by_turns.get(place).permute([2, 1, 0]);
            read_mxfp4(weights, spec, "gate_up_proj", 2 * spec.inner, spec.hidden, expert, &rows)?;
            let rows = self.down_eih.get(place).tr();
            read_mxfp4(weights, spec, "down_proj", spec.hidden, spec.inner, expert, &rows)?;
        }
        Ok(())
    }
}

/// Reads one expert's MXFP4 matrix [outputs, inputs] of `name` into `rows`, which has the same
/// number of elements in that order.
fn read_mxfp4(
    weights: &Weights,
    spec: &ExpertsSpec,
    name: &str,
    outputs: i64,
    inputs: i64,
    expert: i64,
    rows: &Tensor,
) -> Result<()> {
    let (blocks, scales) =
        (format!("{}.{name}_blocks", spec.module), format!("{}.{name}_scales", spec.module));
    let groups = inputs / MXFP4_BLOCK;
    weights.check_shape(&blocks, &[spec.experts, outputs, groups, MXFP4_BLOCK / 2])?;
    weights.check_shape(&scales, &[spec.experts, outputs, groups])?;
    let of_expert = |name: &str, size: i64| weights.part(name, expert * size..(expert + 1) * size);
    let values = mxfp4(
        &of_expert(&blocks, outputs * inputs / 2)?.view([-1, MXFP4_BLOCK / 2]),
        &of_expert(&scales, outputs * groups)?,
    );
    rows.shallow_clone().f_copy_(&values.view(rows.size().as_slice()))?;
    Ok(())
}

/// float32 values [G, 32] of blocks [G, 16] (two per byte, low four bits first) and exponents
/// `[G]`, all as bytes. Exact: an E2M1 value times a power of two.
fn mxfp4(blocks_gb: &Tensor, exponents_g: &Tensor) -> Tensor {
    let bytes = blocks_gb.to_kind(Kind::Int64);
    let low = bytes.bitwise_and(15);
    let high = bytes.divide_scalar_mode(16, "floor");
    let codes = Tensor::stack(&[low, high], -1).flatten(1, 2);
    let values = Tensor::from_slice(&E2M1).to_device(blocks_gb.device()).take(&codes);
    let exponents = exponents_g.to_kind(Kind::Int) - i64::from(E8M0_BIAS);
    values.ldexp(&exponents.unsqueeze(1))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mxfp4_values_are_the_formats_own() {
        // 0x72: low 2 = 1.0, high 7 = 6.0; 0x9f: low 15 = -6.0, high 9 = -0.5.
        let mut bytes = [0u8; 32];
        (bytes[0], bytes[1], bytes[16]) = (0x72, 0x9f, 0x35);
        let blocks = Tensor::from_slice(&bytes).view([2, 16]);
        let exponents = Tensor::from_slice(&[130u8, 100]);
        let values = Vec::<Vec<f32>>::try_from(mxfp4(&blocks, &exponents)).unwrap();
        assert_eq!(values[0][..5], [8.0, 48.0, -48.0, -4.0, 0.0]);
        // 0x35: low 5 = 3.0, high 3 = 1.5, times 2^-27.
        assert_eq!(values[1][..3], [3.0 * 2f32.powi(-27), 1.5 * 2f32.powi(-27), 0.0]);
    }
}
