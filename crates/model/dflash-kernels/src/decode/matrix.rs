//! Matrices packed in panels of 32 outputs, each stored depth by depth.
//!
//! [`Matrix::put`] packs checkpoint rows a few at a time, so the matrix never exists twice in
//! memory. [`Matrix::unpacked`] and [`Matrix::rows`] convert back, for libtorch matmuls and for
//! embeddings.

use std::cell::RefCell;
use std::ops::Range;
use std::ptr::{null, null_mut};
use std::thread;

use tch::{Device, Kind, Tensor};

use super::head::RmsWeight;
use super::panels::{Columns, Panels};
use super::scratch::Scratch;
use super::{MAX_ROWS, data, floats, raw, threads};
use crate::level;

/// Columns of a panel of a packed matrix.
pub(super) const PANEL: i64 = 32;
/// Gate columns, and up columns, per shared panel.
pub(super) const LANES: i64 = 16;

/// Operand types of a model's matrix products.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(i32)]
pub enum Products {
    /// Weights and rows in float32.
    Float32 = 0,
    /// Weights in bfloat16, rows in float32.
    Bfloat16Weights = 1,
    /// Both in bfloat16 if the processor multiplies it (AVX512-BF16), otherwise as
    /// [`Self::Bfloat16Weights`]; sums are float32.
    Bfloat16 = 2,
}

impl Products {
    /// The products for a model with these weights: bfloat16 if it computes in bfloat16. If it
    /// computes in float32, weights are stored in bfloat16 when they fit without loss, as those of
    /// a bfloat16 checkpoint do.
    pub fn of<'a>(weights: impl IntoIterator<Item = &'a Tensor>) -> Self {
        let mut all = Self::Bfloat16;
        for x in weights {
            if x.kind() != Kind::BFloat16 {
                all = Self::Bfloat16Weights;
                if !fits_bfloat16(x) {
                    return Self::Float32;
                }
            }
        }
        all
    }

    /// Storage type of packed matrices.
    pub fn storage(self) -> Kind {
        match self {
            Self::Float32 => Kind::Float,
            Self::Bfloat16Weights | Self::Bfloat16 => Kind::BFloat16,
        }
    }
}

/// Whether all values of `x` convert to bfloat16 without loss.
pub fn fits_bfloat16(x: &Tensor) -> bool {
    x.kind() == Kind::BFloat16 || x.to_kind(Kind::BFloat16).to_kind(x.kind()).equal(x)
}

/// How outputs are arranged in panels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Layout {
    /// 32 outputs per panel.
    Plain,
    /// Two halves, gate and up: 16 of each per panel.
    Gated,
}

impl Layout {
    fn panels(self, outputs: i64) -> i64 {
        let unit = |count: i64, unit: i64| (count + unit - 1) / unit;
        match self {
            Self::Plain => unit(outputs, PANEL),
            Self::Gated => unit(outputs / 2, LANES),
        }
    }

    /// The outputs from `start` up to `end` that are adjacent in one panel.
    fn run(self, outputs: i64, start: i64, end: i64) -> Columns {
        let (unit, first_lane, start_in_half, end) = match self {
            Self::Plain => (PANEL, 0, start, end),
            Self::Gated if start < outputs / 2 => (LANES, 0, start, end.min(outputs / 2)),
            Self::Gated => (LANES, LANES, start - outputs / 2, end),
        };
        let (panel, lane) = (start_in_half / unit, start_in_half % unit);
        let count = (unit - lane).min(end - start);
        Columns {
            panel: panel as usize,
            lanes: (first_lane + lane) as usize..(first_lane + lane + count) as usize,
        }
    }

    /// The column runs of the outputs `wanted`, in order.
    fn runs(self, outputs: i64, wanted: Range<i64>) -> Vec<Columns> {
        let (mut runs, mut start) = (Vec::new(), wanted.start);
        while start < wanted.end {
            let run = self.run(outputs, start, wanted.end);
            start += run.lanes.len() as i64;
            runs.push(run);
        }
        runs
    }
}

/// A matrix in the kernels' format: [panels, depth, 32] in float32, [panels, depth / 2, 32, 2] in
/// bfloat16; depth and the last panel are zero-padded.
#[derive(Debug)]
pub struct Matrix {
    panels: Panels,
    depth: i64,
    outputs: i64,
    products: Products,
    layout: Layout,
}

impl Matrix {
    /// A zero matrix with `depth` inputs, to be filled by [`Self::put`].
    pub fn zeros(depth: i64, outputs: i64, products: Products, layout: Layout) -> Self {
        let words = depth as usize / products.per_word() + depth as usize % products.per_word();
        let panels = Panels::new(layout.panels(outputs) as usize, words);
        Self { panels, depth, outputs, products, layout }
    }

    /// Packs `weight_io` [I, O], of any strides.
    pub fn pack(weight_io: &Tensor, products: Products) -> Self {
        Self::packed(weight_io, products, Layout::Plain)
    }

    /// Packs `gate_up_io` [I, 2O], gate first, so that each panel holds both.
    pub fn pack_gated(gate_up_io: &Tensor, products: Products) -> Self {
        Self::packed(gate_up_io, products, Layout::Gated)
    }

    fn packed(weight_io: &Tensor, products: Products, layout: Layout) -> Self {
        let (depth, outputs) = (weight_io.size()[0], weight_io.size()[1]);
        let mut matrix = Self::zeros(depth, outputs, products, layout);
        matrix.put(0, &weight_io.tr());
        matrix
    }

    /// Sets the outputs from `first` on to `rows_oi` [R, I], of any type that the storage can hold.
    ///
    /// # Panics
    /// When the row length or the range of outputs does not fit.
    pub fn put(&mut self, first: i64, rows_oi: &Tensor) {
        let (rows, depth) = (rows_oi.size()[0], rows_oi.size()[1]);
        assert_eq!(depth, self.depth, "inputs of a row");
        assert!(first >= 0 && first + rows <= self.outputs, "{rows} outputs from {first} on");
        let mut rows_oi = rows_oi.to_kind(self.products.storage());
        if depth % self.products.per_word() as i64 > 0 {
            rows_oi = rows_oi.constant_pad_nd([0, 1]);
        }
        let rows_oi = rows_oi.contiguous();
        let runs = self.layout.runs(self.outputs, first..first + rows);
        // SAFETY: a contiguous tensor of float32, or of bfloat16 with an even row length.
        let words = unsafe {
            std::slice::from_raw_parts(
                rows_oi.data_ptr().cast::<u32>(),
                self.words() * rows as usize,
            )
        };
        self.panels.put(&runs, words, threads() as usize);
    }

    /// Number of inputs I.
    pub fn depth(&self) -> i64 {
        self.depth
    }

    /// Number of outputs O.
    pub fn outputs(&self) -> i64 {
        self.outputs
    }

    /// Operand types of products with this matrix.
    pub fn products(&self) -> Products {
        self.products
    }

    /// The arrangement of its outputs.
    pub fn layout(&self) -> Layout {
        self.layout
    }

    /// Size in bytes.
    pub fn bytes(&self) -> usize {
        self.panels.bytes()
    }

    /// The columns `outputs` as a contiguous matrix [I, O] of `kind`: float32 or the storage type.
    pub fn unpacked(&self, outputs: Range<i64>, kind: Kind) -> Tensor {
        let room = Tensor::empty([self.unpacked_elements(&outputs)], (kind, Device::Cpu));
        self.unpack_into(outputs, &room)
    }

    /// [`Self::unpacked`] into a reusable buffer of at least [`Self::unpacked_elements`]:
    /// first-touch page faults cost more than the writes.
    pub fn unpack_into(&self, outputs: Range<i64>, room: &Tensor) -> Tensor {
        let width = outputs.end - outputs.start;
        let (elements, kind) = (self.unpacked_elements(&outputs), room.kind());
        assert!(room.is_contiguous() && room.device() == Device::Cpu);
        assert!(room.numel() as i64 >= elements, "room for {elements} numbers");
        let way = match (self.products.storage(), kind) {
            (Kind::Float, Kind::Float) => raw::Unpack::Floats,
            (Kind::BFloat16, Kind::Float) => raw::Unpack::Widened,
            (Kind::BFloat16, Kind::BFloat16) => raw::Unpack::Halves,
            (stored, _) => panic!("{stored:?} is not unpacked as {kind:?}"),
        };
        let runs = self.layout.runs(self.outputs, outputs);
        // SAFETY: the room is checked above.
        unsafe { self.panels.unpack(&runs, way, room.data_ptr(), threads() as usize) };
        room.flatten(0, -1).narrow(0, 0, self.depth * width).view([self.depth, width])
    }

    /// Elements that unpacking writes, including the padding of an odd depth in bfloat16.
    pub fn unpacked_elements(&self, outputs: &Range<i64>) -> i64 {
        let rows = self.words() * self.products.per_word();
        rows as i64 * (outputs.end - outputs.start)
    }

    /// Writes the weights [R, I] of the outputs `ids`, as rows of a tied embedding.
    ///
    /// # Panics
    /// When an output is out of range.
    pub fn rows(&self, ids: &[i64], x: &mut [f32]) {
        assert_eq!(x.len() as i64, ids.len() as i64 * self.depth, "a row for each output");
        for (&id, x) in ids.iter().zip(x.chunks_exact_mut(self.depth as usize)) {
            assert!((0..self.outputs).contains(&id), "output {id} of {}", self.outputs);
            let Columns { panel, lanes } = self.layout.run(self.outputs, id, id + 1);
            match self.products.storage() {
                Kind::Float => self.panels.row(panel, lanes.start, x),
                _ => self.panels.widened_row(panel, lanes.start, x),
            }
        }
    }

    /// The float32 products [T, O] of `x_ti` [T, I]. A row's result does not depend on the other
    /// rows, to the bit.
    pub fn product(&self, x_ti: &Tensor) -> Tensor {
        let x_ti = x_ti.to_kind(Kind::Float).contiguous();
        let rows = x_ti.size()[0];
        assert_eq!(x_ti.size(), [rows, self.depth], "rows of the matrix's inputs");
        let columns = match self.layout {
            Layout::Plain => self.outputs,
            Layout::Gated => self.layout.panels(self.outputs) * PANEL,
        };
        let sums_to = Tensor::empty([rows, columns], (Kind::Float, Device::Cpu));
        let mut scratch = Scratch::default();
        for start in (0..rows).step_by(MAX_ROWS as usize) {
            let count = MAX_ROWS.min(rows - start);
            let out = data(&sums_to.narrow(0, start, count));
            let x = x_ti.narrow(0, start, count);
            let to = Sums { logits: out, best: null_mut(), columns };
            self.run(floats(&x), None, to, &mut scratch);
        }
        match self.layout {
            Layout::Plain => sums_to,
            Layout::Gated => {
                let halves = sums_to.unflatten(1, [columns / PANEL, 2, LANES]).transpose(1, 2);
                let halves = halves.flatten(2, 3).narrow(2, 0, self.outputs / 2);
                halves.flatten(1, 2)
            }
        }
    }

    /// Adds the products [T, O] of many rows `x_ti` [T, I] to `out_to`, both contiguous float32.
    /// Returns false, without any effect, where unpacking and multiplying with libtorch is faster.
    /// Sums are in a different order than for few rows.
    ///
    /// # Panics
    /// On a size mismatch.
    pub fn add_many(&self, x_ti: &Tensor, out_to: &Tensor) -> bool {
        let rows = x_ti.size()[0];
        assert_eq!((x_ti.size()[1], out_to.size()), (self.depth, vec![rows, self.outputs]));
        let product = raw::Product {
            matrix: self.pointer(),
            depth: self.depth,
            outputs: self.outputs,
            panels: self.layout.panels(self.outputs),
            gated: i64::from(self.layout == Layout::Gated),
            rows,
            x: data(x_ti),
            products: self.products,
            out: data(out_to),
            scratch: std::ptr::null_mut(),
        };
        MANY.with_borrow_mut(|scratch| {
            let scratch = scratch.floats((rows + MAX_ROWS) * (self.depth + 1));
            let product = raw::Product { scratch, ..product };
            // SAFETY: sizes, kinds and layouts are checked above and by `data`.
            unsafe { raw::dflash_decode_product(level::raw(), &raw const product, threads()) != 0 }
        })
    }

    /// Multiplies at most [`MAX_ROWS`] rows `x` [R, I], after an optional norm. The destinations in
    /// `to` are large enough.
    pub(super) fn run(
        &self,
        x: &[f32],
        norm: Option<RmsWeight<'_>>,
        Sums { logits, best, columns }: Sums,
        scratch: &mut Scratch,
    ) {
        let depth = self.depth;
        let (rows, threads) = ((x.len() / depth as usize) as i64, threads());
        assert!(norm.is_none_or(|norm| norm.weight.len() == depth as usize), "a norm's weight");
        assert!(rows <= MAX_ROWS, "{rows} rows in one call");
        let mut head = raw::Head {
            matrix: self.pointer(),
            hidden: depth,
            outputs: columns,
            rows,
            x: x.as_ptr(),
            norm: norm.map_or(null(), |norm| norm.weight.as_ptr()),
            eps: norm.map_or(0.0, |norm| norm.eps as f32),
            products: self.products,
            logits,
            best,
            scratch: null_mut(),
        };
        // SAFETY: sizes are checked here and by the callers.
        let floats = unsafe { raw::dflash_decode_head_scratch(&raw const head, threads) };
        head.scratch = scratch.floats(floats);
        // SAFETY: as above; the scratch memory is made for this call.
        unsafe { raw::dflash_decode_head(level::raw(), &raw const head, threads) };
    }

    /// Reads every weight once, split evenly over the threads, as the bandwidth limit of a pass.
    /// Returns the sum of the words so that the reads are not optimised away.
    pub fn read_all(matrices: &[&Self]) -> u64 {
        let threads = threads() as usize;
        let read = |thread: usize| {
            let share = |matrix: &&Self| {
                let words = matrix.bytes() / 4;
                matrix.panels.sum(words * thread / threads..words * (thread + 1) / threads)
            };
            matrices.iter().map(share).sum::<u64>()
        };
        thread::scope(|scope| {
            let read = &read;
            let others: Vec<_> =
                (1..threads).map(|thread| scope.spawn(move || read(thread))).collect();
            let own = read(0);
            others.into_iter().map(|other| other.join().expect("it adds")).sum::<u64>() + own
        })
    }

    /// Pointer for the kernels.
    pub(super) fn pointer(&self) -> *const std::ffi::c_void {
        self.panels.pointer()
    }

    fn words(&self) -> usize {
        (self.depth as usize).div_ceil(self.products.per_word())
    }
}

thread_local! {
    /// Scratch for prompt products, reused across calls.
    static MANY: RefCell<Scratch> = RefCell::default();
}

/// Destinations of a product: all sums [R, columns], the argmax column `[R]`, or both.
pub(super) struct Sums {
    pub(super) logits: *mut f32,
    pub(super) best: *mut i64,
    pub(super) columns: i64,
}

impl Products {
    /// Values of a column per 4-byte word.
    fn per_word(self) -> usize {
        4 / self.storage().elt_size_in_bytes()
    }
}

/// A bias in the panel layout of its matrix, zero-padded.
pub(super) fn bias_panels(bias_o: &Tensor, layout: Layout) -> Tensor {
    let outputs = bias_o.size()[0];
    let mut panels = Matrix::zeros(1, outputs, Products::Float32, layout);
    panels.put(0, &bias_o.unsqueeze(1));
    Tensor::from_slice(panels.panels.floats_of_all())
}

#[cfg(test)]
mod tests {
    use super::*;

    const F32: (Kind, Device) = (Kind::Float, Device::Cpu);
    const PRODUCTS: [Products; 3] =
        [Products::Float32, Products::Bfloat16Weights, Products::Bfloat16];

    /// Small integers [I, O], exact in bfloat16 as are their sums.
    fn whole(shape: [i64; 2]) -> Tensor {
        Tensor::randint(9, shape, F32) - 4
    }

    fn cases() -> impl Iterator<Item = ((i64, i64), Products, Layout)> {
        let sizes = [(1, 2), (7, 34), (16, 32), (33, 100), (64, 1044)];
        let layouts = [Layout::Plain, Layout::Gated];
        let of_size = move |size| {
            PRODUCTS.into_iter().flat_map(move |products| {
                layouts.into_iter().map(move |layout| (size, products, layout))
            })
        };
        sizes.into_iter().flat_map(of_size)
    }

    #[test]
    fn what_is_put_in_parts_is_what_is_packed_whole_and_comes_back() {
        for ((depth, outputs), products, layout) in cases() {
            let weight_io = whole([depth, outputs]);
            let what = format!("{depth} x {outputs}, {products:?}, {layout:?}");
            let one = Matrix::packed(&weight_io, products, layout);
            for part in [1, 5, 17, 33, outputs] {
                let mut parts = Matrix::zeros(depth, outputs, products, layout);
                for start in (0..outputs).step_by(part as usize) {
                    let rows_oi = weight_io.narrow(1, start, part.min(outputs - start)).tr();
                    parts.put(start, &rows_oi.contiguous());
                }
                assert_eq!(parts.panels.floats_of_all(), one.panels.floats_of_all(), "{what}");
            }
            let kinds = match products {
                Products::Float32 => vec![Kind::Float],
                _ => vec![Kind::Float, Kind::BFloat16],
            };
            for kind in kinds {
                for range in [0..outputs, 1..outputs, outputs / 2 - 1..outputs / 2 + 1] {
                    let expected = weight_io.narrow(1, range.start, range.end - range.start);
                    let found = one.unpacked(range.clone(), kind);
                    assert!(found.is_contiguous() && found.kind() == kind, "{what}");
                    assert_eq!(found, expected.to_kind(kind), "{what}, {range:?}");
                }
            }
            let ids = [outputs - 1, 0, outputs / 2];
            let mut rows = vec![0.0; 3 * depth as usize];
            one.rows(&ids, &mut rows);
            let expected = weight_io.index_select(1, &Tensor::from_slice(&ids)).tr();
            assert_eq!(Tensor::from_slice(&rows).view([3, depth]), expected, "{what}");
        }
    }

    #[test]
    fn every_word_is_read_once_by_any_number_of_threads() {
        let whole = |products| Matrix::pack(&whole([33, 100]), products);
        let matrices = [whole(Products::Float32), whole(Products::Bfloat16)];
        let words = |matrix: &Matrix| -> u64 {
            let floats = matrix.panels.floats_of_all();
            floats.iter().map(|float| u64::from(float.to_bits())).sum()
        };
        let expected = matrices.iter().map(words).sum::<u64>();
        for threads in [1, 2, 5] {
            // Applies to this thread only.
            tch::set_num_threads(threads);
            assert_eq!(Matrix::read_all(&[&matrices[0], &matrices[1]]), expected, "{threads}");
        }
    }

    #[test]
    fn products_of_any_number_of_rows_are_those_of_the_matrix() {
        for ((depth, outputs), products, layout) in cases() {
            let weight_io = whole([depth, outputs]);
            let matrix = Matrix::packed(&weight_io, products, layout);
            for rows in [1, 32, 40] {
                let x_ti = whole([rows, depth]);
                let what = format!("{depth} x {outputs}, {rows} rows, {products:?}, {layout:?}");
                assert_eq!(matrix.product(&x_ti), x_ti.mm(&weight_io), "{what}");
            }
            for rows in [1, 13, 33, 70] {
                let (x_ti, sum_to) = (whole([rows, depth]), whole([rows, outputs]));
                let what = format!("{depth} x {outputs}, {rows} rows, {products:?}, {layout:?}");
                let out_to = sum_to.copy();
                let taken = matrix.add_many(&x_ti, &out_to);
                let expected = if taken { sum_to + x_ti.mm(&weight_io) } else { sum_to };
                assert_eq!(out_to, expected, "{what}");
                assert!(taken || products == Products::Bfloat16, "{what}");
            }
        }
    }
}
