//! Matrices packed in panels of 32 outputs, each panel in the order of the depth.

use tch::{Kind, Tensor};

/// Columns of a panel of a packed matrix.
pub(super) const PANEL: i64 = 32;
/// Columns of gate and of up in a panel that they share.
pub(super) const LANES: i64 = 16;

/// What the products of a model multiply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(i32)]
pub enum Products {
    /// Weights and rows in float32.
    Float32 = 0,
    /// Weights in bfloat16, rows in float32.
    Bfloat16Weights = 1,
    /// Both in bfloat16 where the processor multiplies these (AVX512-BF16), else as
    /// [`Self::Bfloat16Weights`]; sums are float32.
    Bfloat16 = 2,
}

impl Products {
    /// Of a model with such weights: bfloat16 where it computes in that; where it computes in float32,
    /// weights in the smaller type that holds them without a loss, which is bfloat16 for those of a
    /// checkpoint in bfloat16.
    pub fn of<'a>(weights: impl IntoIterator<Item = &'a Tensor>) -> Self {
        let exact = |x: &Tensor| x.to_kind(Kind::BFloat16).to_kind(x.kind()).equal(x);
        let mut all = Self::Bfloat16;
        for x in weights {
            if x.kind() != Kind::BFloat16 {
                all = Self::Bfloat16Weights;
                if !exact(x) {
                    return Self::Float32;
                }
            }
        }
        all
    }

    fn storage(self) -> Kind {
        match self {
            Self::Float32 => Kind::Float,
            Self::Bfloat16Weights | Self::Bfloat16 => Kind::BFloat16,
        }
    }
}

/// A matrix as the kernels read it.
#[derive(Debug)]
pub struct Matrix {
    /// [panels, depth, 32] in float32, [panels, depth / 2, 32, 2] in bfloat16; depth and the last
    /// panel filled up with zeros.
    pub(super) packed: Tensor,
    pub(super) depth: i64,
    pub(super) outputs: i64,
    pub(super) products: Products,
}

impl Matrix {
    /// Packs `weight_io` [I, O] of any strides.
    pub fn pack(weight_io: &Tensor, products: Products) -> Self {
        let outputs = weight_io.size()[1];
        let panels = outputs.div_euclid(PANEL) + i64::from(outputs % PANEL > 0);
        let kind = products.storage();
        let panels_pio = blocks(weight_io, (panels, PANEL), kind).permute([1, 0, 2]);
        Self::of_panels(&panels_pio, weight_io, products)
    }

    /// Packs `gate_up_io` [I, 2O], whose first half is the gate, so that a panel holds both.
    pub fn pack_gated(gate_up_io: &Tensor, products: Products) -> Self {
        Self::of_panels(&gated(gate_up_io, products.storage()), gate_up_io, products)
    }

    /// Rows I of the matrix: elements of an input.
    pub fn depth(&self) -> i64 {
        self.depth
    }

    fn of_panels(panels_pio: &Tensor, weight_io: &Tensor, products: Products) -> Self {
        let (depth, outputs) = (weight_io.size()[0], weight_io.size()[1]);
        let packed = match products.storage() {
            Kind::BFloat16 => panels_pio
                .constant_pad_nd([0, 0, 0, depth % 2])
                .unflatten(1, [(depth + 1) / 2, 2])
                .transpose(2, 3)
                .contiguous(),
            _ => panels_pio.contiguous(),
        };
        Self { packed, depth, outputs, products }
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
