//! Weights held only in the packed format of the few-row passes.
//!
//! They are packed while the file is read, a few rows at a time. Prompts with many rows multiply
//! the same memory. Where libtorch is faster (bfloat16 without AMX), the weight is unpacked for it
//! in parts that stay in the CPU cache until they have been multiplied.

use std::cell::RefCell;
use std::sync::Arc;

use dflash_kernels::decode::{Layout, Matrix, Products, Weight};
use dflash_tensor::weights::EMBEDDING;
use dflash_tensor::{DeviceKind, Result, Weights};
use tch::{Device, Kind, Tensor};

use super::config::TargetConfig;
use super::embedding::Embedding;

/// Up to this many rows the few-row passes are faster than tiles of many rows.
pub(super) const FEW: i64 = 32;

/// Elements read from a file at a time: small against a model, large enough to amortise a call.
const PIECE: i64 = 2 << 20;
/// Elements unpacked at a time, so that they are still cached when they are multiplied.
const AT_ONCE: i64 = 1 << 20;
/// Columns per panel.
const GRAIN: i64 = 32;

/// A packed weight [I, O] of a target that runs in `kind`.
#[derive(Debug)]
pub(crate) struct PackedWeight {
    matrix: Arc<Matrix>,
    kind: Kind,
}

/// How a checkpoint's matrices are packed.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Packing {
    /// Operand types of products.
    pub(crate) products: Products,
    /// The type that the target runs in.
    pub(crate) kind: Kind,
}

impl Packing {
    /// How matrices of a target of `config` are packed while they are read; `None` if its few rows
    /// do not use packed layers. `wanted` selects its tensors.
    ///
    /// # Errors
    /// As [`Weights::read_into`].
    pub(crate) fn of(
        config: &TargetConfig,
        weights: &Weights,
        DeviceKind { device, kind }: DeviceKind,
        wanted: impl Fn(&str) -> bool,
    ) -> Result<Option<Self>> {
        let is_taken = device == Device::Cpu && matches!(kind, Kind::Float | Kind::BFloat16);
        if !is_taken || config.family.dense().is_none() {
            return Ok(None);
        }
        // The embedding takes part in products only if it is tied.
        let is_multiplied = |name: &str| config.tie_word_embeddings || !name.ends_with(EMBEDDING);
        let products = match kind {
            Kind::BFloat16 => Products::Bfloat16,
            _ if weights.fit_bfloat16(|name| wanted(name) && is_multiplied(name))? => {
                Products::Bfloat16Weights
            }
            _ => Products::Float32,
        };
        Ok(Some(Self { products, kind }))
    }
}

impl PackedWeight {
    /// Reads and concatenates the stored matrices `rows`, given by name and number of outputs, each
    /// with `input` columns.
    ///
    /// # Errors
    /// As [`Weights::read_into`].
    pub(crate) fn read(
        weights: &Weights,
        rows: &[(String, i64)],
        input: i64,
        Packing { products, kind }: Packing,
        layout: Layout,
    ) -> Result<Self> {
        let outputs = rows.iter().map(|(_, rows)| rows).sum();
        rows.iter().try_for_each(|(name, rows)| weights.check_shape(name, &[*rows, input]))?;
        let mut matrix = Matrix::zeros(input, outputs, products, layout);
        let (at_once, options) = ((PIECE / input).max(1), (products.storage(), Device::Cpu));
        let mut first = 0;
        for (name, rows) in rows {
            for start in (0..*rows).step_by(at_once as usize) {
                let rows_oi = Tensor::empty([at_once.min(rows - start), input], options);
                weights.read_part_into(name, 0, start, &rows_oi)?;
                matrix.put(first + start, &rows_oi);
            }
            first += rows;
        }
        Ok(Self { matrix: matrix.into(), kind })
    }

    pub(crate) fn into_matrix(self) -> Arc<Matrix> {
        self.matrix
    }

    /// As a weight of the few-row passes.
    pub(crate) fn weight(&self) -> Weight<'_> {
        Weight::Packed(&self.matrix)
    }

    /// The unpacked matrix [I, O] for libtorch.
    pub(crate) fn unpacked(&self) -> Tensor {
        self.matrix.unpacked(0..self.matrix.outputs(), self.kind)
    }

    /// The columns [I, o] of the outputs `ids_o`.
    pub(crate) fn columns(&self, ids_o: &Tensor) -> Tensor {
        Embedding::shared(Arc::clone(&self.matrix), self.kind).rows(ids_o).tr().contiguous()
    }

    /// `x_ti W + b` [T, O].
    pub(crate) fn apply(&self, x_ti: &Tensor, bias_o: Option<&Tensor>) -> Tensor {
        let biased = |sum: Tensor| bias_o.into_iter().fold(sum, |sum, bias_o| sum + bias_o);
        if is_few(x_ti) {
            return biased(self.matrix.product(x_ti).to_kind(self.kind));
        }
        let size = [x_ti.size()[0], self.matrix.outputs()];
        let out_to = Tensor::zeros(size, (Kind::Float, Device::Cpu));
        if self.matrix.add_many(&float_rows(x_ti), &out_to) {
            return biased(out_to.to_kind(self.kind));
        }
        biased(self.many(x_ti, |weight_io, _, out| drop(x_ti.mm_out(out, weight_io))))
    }

    /// `residual_to + x_ti W` [T, O].
    pub(crate) fn add_to(&self, residual_to: &Tensor, x_ti: &Tensor) -> Tensor {
        if is_few(x_ti) {
            return residual_to + self.apply(x_ti, None);
        }
        let out_to = residual_to.to_dtype(Kind::Float, false, true).contiguous();
        if self.matrix.add_many(&float_rows(x_ti), &out_to) {
            return out_to.to_kind(self.kind);
        }
        self.many(x_ti, |weight_io, start, out| {
            let residual_to = residual_to.narrow(1, start, weight_io.size()[1]);
            drop(residual_to.addmm_out(out, x_ti, weight_io));
        })
    }

    /// Calls `product` with `x_ti`, the index of the first column and the unpacked columns, and
    /// collects the results.
    fn many(&self, x_ti: &Tensor, product: impl Fn(&Tensor, i64, &Tensor)) -> Tensor {
        let matrix = &self.matrix;
        let out_to = Tensor::empty([x_ti.size()[0], matrix.outputs()], (self.kind, Device::Cpu));
        let at_once = (AT_ONCE / matrix.depth() / GRAIN).max(1) * GRAIN;
        for start in (0..matrix.outputs()).step_by(at_once as usize) {
            let columns = start..(start + at_once).min(matrix.outputs());
            let out = out_to.narrow(1, start, columns.end - start);
            with_room(matrix.unpacked_elements(&columns), self.kind, |room| {
                product(&matrix.unpack_into(columns.clone(), room), start, &out);
            });
        }
        out_to
    }
}

thread_local! {
    /// Buffer for unpacked weights, reused across calls.
    static ROOM: RefCell<Option<Tensor>> = const { RefCell::new(None) };
}

/// Lends `work` a buffer of `elements`, reused from earlier calls if it fits.
fn with_room(elements: i64, kind: Kind, work: impl FnOnce(&Tensor)) {
    ROOM.with_borrow_mut(|room| {
        let fits = |room: &&Tensor| room.kind() == kind && room.numel() as i64 >= elements;
        if room.as_ref().filter(fits).is_none() {
            *room = Some(Tensor::empty([elements.max(AT_ONCE)], (kind, Device::Cpu)));
        }
        work(room.as_ref().expect("made above"));
    });
}

fn float_rows(x_ti: &Tensor) -> Tensor {
    x_ti.to_kind(Kind::Float).contiguous()
}

fn is_few(x_ti: &Tensor) -> bool {
    (1..=FEW).contains(&x_ti.size()[0])
}
