//! Weights that are held packed alone, as the passes for few rows read them.
//!
//! They come from the file some rows at a time, and nothing else of them is kept. Many rows, those of a
//! prompt, are multiplied by the same memory. Where libtorch is faster at that (bfloat16 without AMX), it
//! gets the weight unpacked, a part at a time that stays in the processor's cache until it has been
//! multiplied.

use std::cell::RefCell;
use std::sync::Arc;

use dflash_kernels::decode::{Layout, Matrix, Products, Weight};
use dflash_tensor::weights::EMBEDDING;
use dflash_tensor::{DeviceKind, Result, Weights};
use tch::{Device, Kind, Tensor};

use super::config::TargetConfig;
use super::embedding::Embedding;

/// Rows that the packed passes multiply faster than tiles of many rows do.
pub(super) const FEW: i64 = 32;

/// Elements that are read from a file at a time: few against a model's, many against what a call costs.
const PIECE: i64 = 2 << 20;
/// Elements that are unpacked at a time, so that they are still in a cache when they are multiplied.
const AT_ONCE: i64 = 1 << 20;
/// Columns of a panel.
const GRAIN: i64 = 32;

/// A packed weight [I, O] of a target that runs in `kind`.
#[derive(Debug)]
pub(crate) struct PackedWeight {
    matrix: Arc<Matrix>,
    kind: Kind,
}

/// How a checkpoint's matrices become packed ones.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Packing {
    /// What the products multiply.
    pub(crate) products: Products,
    /// What the target runs in.
    pub(crate) kind: Kind,
}

impl Packing {
    /// How the matrices of a target of `config` are packed as they are read, where its few rows go through
    /// packed layers; `wanted` are the names of its tensors.
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
        // The embedding is multiplied where there is no other output projection.
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
    /// Reads the stored matrices of `rows`, by name and number of outputs, one after the other, each with
    /// `input` columns.
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

    /// The matrix.
    pub(crate) fn into_matrix(self) -> Arc<Matrix> {
        self.matrix
    }

    /// For the packed passes.
    pub(crate) fn weight(&self) -> Weight<'_> {
        Weight::Packed(&self.matrix)
    }

    /// All of it as libtorch multiplies it, [I, O].
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

    /// What `product` makes of `x_ti` and some columns unpacked, which begin at its second argument:
    /// written to its third.
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
    /// What weights are unpacked into, kept for the next.
    static ROOM: RefCell<Option<Tensor>> = const { RefCell::new(None) };
}

/// Lends so many elements of memory that earlier calls may have had.
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
