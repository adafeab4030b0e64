//! Matrices packed in panels of 32 outputs, each panel in the order of the depth.

use tch::{Kind, Tensor};

/// Columns of a panel of a packed matrix.
pub(super) const PANEL: i64 = 32;
/// Columns of gate and of up in a panel that they share.
pub(super) const LANES: i64 = 16;

/// A matrix as the kernels read it.
#[derive(Debug)]
pub struct Matrix {
    /// [panels, depth, 32], the last panel filled up with zeros.
    pub(super) packed: Tensor,
    pub(super) depth: i64,
    pub(super) outputs: i64,
}

impl Matrix {
    /// Packs `weight_io` [I, O] of any strides as `kind`, float32 or bfloat16.
    pub fn pack(weight_io: &Tensor, kind: Kind) -> Self {
        let (depth, outputs) = (weight_io.size()[0], weight_io.size()[1]);
        let panels = outputs.div_euclid(PANEL) + i64::from(outputs % PANEL > 0);
        let packed = blocks(weight_io, (panels, PANEL), kind).permute([1, 0, 2]).contiguous();
        Self { packed, depth, outputs }
    }

    /// Packs `gate_up_io` [I, 2O], whose first half is the gate, so that a panel holds both.
    pub fn pack_gated(gate_up_io: &Tensor, kind: Kind) -> Self {
        let (depth, outputs) = (gate_up_io.size()[0], gate_up_io.size()[1]);
        Self { packed: gated(gate_up_io, kind).contiguous(), depth, outputs }
    }

    pub(super) fn is_bf16(&self) -> bool {
        self.packed.kind() == Kind::BFloat16
    }
}

/// [I, O] with O filled up by zeros, as [I, count, width].
pub(super) fn blocks(weight_io: &Tensor, (count, width): (i64, i64), kind: Kind) -> Tensor {
    let missing = count * width - weight_io.size()[1];
    weight_io.to_kind(kind).constant_pad_nd([0, missing]).unflatten(1, [count, width])
}

/// [I, 2O] as [blocks, I, 32], 16 columns of each half side by side.
pub(super) fn gated(gate_up_io: &Tensor, kind: Kind) -> Tensor {
    let count = (gate_up_io.size()[1] / 2 + LANES - 1) / LANES;
    let halves = gate_up_io.chunk(2, 1);
    let halves = [&halves[0], &halves[1]].map(|half| blocks(half, (count, LANES), kind));
    Tensor::cat(&halves, 2).permute([1, 0, 2])
}

/// The smaller type that holds `weights` without a loss: bfloat16 where all of them are its numbers,
/// as those of a checkpoint in bfloat16 are whatever they are computed in.
pub fn storage<'a>(weights: impl IntoIterator<Item = &'a Tensor>) -> Kind {
    let exact = |x: &Tensor| {
        x.kind() == Kind::BFloat16 || x.to_kind(Kind::BFloat16).to_kind(x.kind()).equal(x)
    };
    if weights.into_iter().all(exact) { Kind::BFloat16 } else { Kind::Float }
}
