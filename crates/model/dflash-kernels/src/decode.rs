//! Forward passes of a few rows (a token or a block) on the CPU for decoding; see `cpp/decode.cpp`.
//!
//! Weights are read once per pass, whatever the number of rows. One call runs all layers on threads
//! that synchronise by spinning. Rows are slices of float32; a call creates no tensor and allocates
//! only when it needs more scratch memory than any call before. [`Products`] says what is
//! multiplied; sums are float32. Results do not depend on the number of threads or rows, to the
//! bit. A wrong shape or layout is the caller's bug and panics.

mod embedding;
mod head;
mod matrix;
mod panels;
mod raw;
mod scratch;

use std::cell::RefCell;
use std::ptr::{null, null_mut};
use std::sync::Arc;

use tch::{Device, Kind, Tensor};

use self::matrix::{LANES, PANEL, bias_panels};
use self::scratch::Scratch;
use crate::kernels::Kernels;
use crate::level;

pub use self::embedding::Embedding;
pub use self::head::{Head, RmsWeight};
pub use self::matrix::{Layout, Matrix, Products, fits_bfloat16};

/// Maximum rows per call. Scratch memory grows with it; weights are read once per 64 rows.
pub const MAX_ROWS: i64 = 512;

/// Whether this module can pack weights like `x`.
pub fn takes(kernels: Kernels, x: &Tensor) -> bool {
    kernels == Kernels::Fast
        && x.device() == Device::Cpu
        && matches!(x.kind(), Kind::Float | Kind::BFloat16)
        && !x.requires_grad()
}

/// Number of passes of this process that ran on one thread instead of several, because a thread had
/// recently been descheduled during a pass.
pub fn passes_alone() -> u64 {
    // SAFETY: reads a counter.
    unsafe { raw::dflash_decode_passes_alone() as u64 }
}

/// Dimensions of a stack of layers.
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    /// Width of the residual stream.
    pub hidden: i64,
    /// Width between gate/up and down.
    pub inner: i64,
    /// Query heads.
    pub query_heads: i64,
    /// Key and value heads, which divide the query heads.
    pub kv_heads: i64,
    /// Width of a head, even.
    pub head_dim: i64,
    /// Epsilon of all norms.
    pub eps: f64,
    /// Whether attention within the call is causal.
    pub causal: bool,
}

/// A linear layer.
#[derive(Clone, Copy, Debug)]
pub struct Projection<'a> {
    /// Its matrix.
    pub weight: Weight<'a>,
    /// `[O]`.
    pub bias_o: Option<&'a Tensor>,
}

/// A weight that [`Stack::new`] packs, or an already packed one to share.
#[derive(Clone, Copy, Debug)]
pub enum Weight<'a> {
    /// [I, O], any strides.
    Plain(&'a Tensor),
    /// Packed for the same [`Products`]; gate and up as [`Layout::Gated`].
    Packed(&'a Arc<Matrix>),
}

impl Weight<'_> {
    /// Whether this module supports it: packed, or plain and of a packable type.
    pub fn is_taken(&self) -> bool {
        match self {
            Self::Plain(weight_io) => takes(Kernels::Fast, weight_io),
            Self::Packed(_) => true,
        }
    }

    /// The products for a model with these weights: those of the packed weights, or
    /// [`Products::of`] all.
    pub fn products(weights: &[Self]) -> Products {
        let packed = weights.iter().find_map(|weight| match weight {
            Self::Packed(matrix) => Some(matrix.products()),
            Self::Plain(_) => None,
        });
        let plain = weights.iter().filter_map(|weight| match weight {
            Self::Plain(weight_io) => Some(*weight_io),
            Self::Packed(_) => None,
        });
        packed.unwrap_or_else(|| Products::of(plain))
    }

    fn size(&self) -> [i64; 2] {
        match self {
            Self::Plain(weight_io) => [weight_io.size()[0], weight_io.size()[1]],
            Self::Packed(matrix) => [matrix.depth(), matrix.outputs()],
        }
    }

    /// The packed matrix for `products`.
    ///
    /// # Panics
    /// When it is already packed for other products.
    pub fn packed(&self, products: Products, layout: Layout) -> Arc<Matrix> {
        match (self, layout) {
            (Self::Plain(weight_io), Layout::Plain) => Matrix::pack(weight_io, products).into(),
            (Self::Plain(weight_io), Layout::Gated) => {
                Matrix::pack_gated(weight_io, products).into()
            }
            (Self::Packed(matrix), _) => {
                assert_eq!((matrix.products(), matrix.layout()), (products, layout));
                Arc::clone(matrix)
            }
        }
    }
}

/// Weights of a layer.
#[derive(Clone, Copy, Debug)]
pub struct LayerWeights<'a> {
    /// Queries, keys and values, fused.
    pub qkv: Projection<'a>,
    /// Attention output projection.
    pub output: Projection<'a>,
    /// Gate and up, fused.
    pub gate_up: Projection<'a>,
    /// Down projection.
    pub down: Projection<'a>,
    /// Norm before the attention.
    pub input_norm: &'a Tensor,
    /// Norm before the MLP.
    pub post_norm: &'a Tensor,
    /// Query and key head norms, if any.
    pub head_norms: Option<(&'a Tensor, &'a Tensor)>,
    /// Sliding window in tokens, including the token itself; `None` for full attention.
    pub window: Option<i64>,
}

/// Packed layers.
#[derive(Debug)]
pub struct Stack {
    shape: Shape,
    layers: Vec<Layer>,
    raw: Pointers<raw::Layer>,
    products: Products,
    scratch: RefCell<Scratch>,
    /// The sequences of a call in the kernels' format; the allocation is reused.
    sequences: RefCell<Pointers<raw::Sequence>>,
}

/// Pointers into tensors owned by the same struct.
#[derive(Debug)]
struct Pointers<T>(Vec<T>);

// SAFETY: the owner of these pointers owns the memory they point to and moves with it.
unsafe impl<T> Send for Pointers<T> {}

#[derive(Debug)]
struct Layer {
    qkv: Product,
    output: Product,
    gate_up: Product,
    down: Product,
    input_norm: Tensor,
    post_norm: Tensor,
    head_norms: Option<(Tensor, Tensor)>,
    window: Option<i64>,
}

#[derive(Debug)]
struct Product {
    matrix: Arc<Matrix>,
    /// Padded to the width of the matrix's last panel.
    bias: Option<Tensor>,
}

/// New rows of one sequence.
#[derive(Clone, Copy, Debug)]
pub struct Sequence<'a> {
    /// The sequence's cache, read and written.
    pub cache: &'a Cache,
    /// Position of the first new row; earlier cached positions are attended to.
    pub start: i64,
    /// Number of new rows.
    pub rows: i64,
}

/// Additional outputs of a pass.
#[derive(Debug, Default)]
pub struct Outputs<'a> {
    /// Layers whose hidden states are wanted: 0 for the input rows, k for the output of layer k.
    pub aux_layers: &'a [u32],
    /// Destination of the hidden states [R, aux_layers, H].
    pub states: &'a mut [f32],
    /// Weight `[H]` of the norm applied to the last layer's output.
    pub final_norm: Option<&'a [f32]>,
    /// Number of leading rows whose output is not needed; only their keys and values are computed.
    pub unread: usize,
}

impl Stack {
    /// Packs the layers.
    pub fn new(shape: Shape, layers: &[LayerWeights<'_>], products: Products) -> Self {
        assert!(shape.head_dim % 2 == 0 && shape.query_heads % shape.kv_heads == 0, "{shape:?}");
        let layers: Vec<Layer> =
            layers.iter().map(|weights| Layer::new(&shape, weights, products)).collect();
        let raw = Pointers(layers.iter().map(Layer::raw).collect());
        let sequences = RefCell::new(Pointers(Vec::new()));
        Self { shape, layers, raw, products, scratch: RefCell::default(), sequences }
    }

    /// All matrices.
    pub fn matrices(&self) -> impl Iterator<Item = &Matrix> {
        self.layers.iter().flat_map(Layer::matrices)
    }

    /// An empty cache with one position per row of `cosine` and `sine` [positions, D/2].
    pub fn new_cache(&self, cosine: &Tensor, sine: &Tensor) -> Cache {
        let Shape { kv_heads, head_dim, .. } = self.shape;
        let positions = cosine.size()[0];
        let table = |x: &Tensor| {
            assert_eq!(x.size(), [positions, head_dim / 2], "a rotary table");
            x.contiguous()
        };
        // An odd number of cache lines, so a panel's rows do not map to the same cache sets, plus
        // room for a panel after the last position.
        let key_stride = (positions + PANEL + 2 * LANES - 1) / (2 * LANES) * (2 * LANES) + LANES;
        let value_stride = (head_dim + PANEL - 1) / PANEL * PANEL;
        // The operating system allocates pages on first write, so spare capacity is free.
        let empty = |shape: [i64; 3]| Tensor::empty(shape, (Kind::Float, Device::Cpu));
        let layer = || {
            let keys = empty([kv_heads, head_dim, key_stride]);
            (keys, empty([kv_heads, positions, value_stride]))
        };
        let layers: Vec<(Tensor, Tensor)> = self.layers.iter().map(|_| layer()).collect();
        let held = layers
            .iter()
            .map(|(k, v)| raw::KeysValues { keys: data(k), values: data(v) })
            .collect();
        let rope = (table(cosine), table(sine));
        let tables = Pointers(vec![data(&rope.0).cast_const(), data(&rope.1).cast_const()]);
        let heads = (kv_heads, head_dim);
        let held = Pointers(held);
        Cache { layers, held, _rope: rope, tables, heads, positions, key_stride, value_stride }
    }

    /// Runs `x` [R, H] through all layers in place; the rows of the sequences are concatenated.
    /// Keys and values are written to the caches.
    ///
    /// # Panics
    /// More than [`MAX_ROWS`] rows, or a cache without room for them.
    pub fn forward(&self, x: &mut [f32], sequences: &[Sequence<'_>], outputs: Outputs<'_>) {
        let (shape, hidden) = (self.raw_shape(), self.shape.hidden as usize);
        let mut raw = self.sequences.borrow_mut();
        let rows = self.write_sequences(sequences, &mut raw.0);
        let Outputs { aux_layers, states, final_norm, unread } = outputs;
        assert_eq!(x.len(), rows as usize * hidden, "the rows of all sequences");
        assert_eq!(states.len(), x.len() * aux_layers.len(), "room for the states");
        assert!(aux_layers.iter().all(|&id| id as usize <= self.layers.len()), "{aux_layers:?}");
        assert!(final_norm.is_none_or(|norm| norm.len() == hidden) && unread < rows as usize);
        let (threads, mut scratch) = (threads(), self.scratch.borrow_mut());
        let mut pass = raw::Pass {
            shape: &raw const shape,
            layers: self.raw.0.as_ptr(),
            sequences: raw.0.as_ptr(),
            layer_count: self.layers.len() as i64,
            sequence_count: sequences.len() as i64,
            rows,
            unread: unread as i64,
            x: x.as_mut_ptr(),
            aux_layer_ids: aux_layers.as_ptr(),
            aux_layer_count: aux_layers.len() as i64,
            aux_states: states.as_mut_ptr(),
            final_norm: final_norm.map_or(null(), <[f32]>::as_ptr),
            scratch: null_mut(),
        };
        // SAFETY: sizes are checked here and in the helpers, and the positions fit the caches.
        let floats = unsafe { raw::dflash_decode_pass_scratch(&raw const pass, threads) };
        pass.scratch = scratch.floats(floats);
        // SAFETY: as above; the scratch memory is made for this call.
        unsafe { raw::dflash_decode_pass(level::raw(), &raw const pass, threads) };
    }

    /// Writes the keys and values of `features` [R, F] (sequences concatenated) to the caches:
    /// through `fc`, its norm `[H]`, and the key and value projections of every layer.
    ///
    /// # Panics
    /// As [`Self::forward`].
    pub fn extend(&self, features: &[f32], fc: &Matrix, norm: &[f32], sequences: &[Sequence<'_>]) {
        let shape = self.raw_shape();
        let mut raw = self.sequences.borrow_mut();
        let rows = self.write_sequences(sequences, &mut raw.0);
        assert_eq!(features.len() as i64, rows * fc.depth(), "the rows of all sequences");
        assert!(fc.outputs() == self.shape.hidden && fc.products() == self.products);
        assert_eq!(norm.len() as i64, self.shape.hidden, "a norm's weight");
        let (threads, mut scratch) = (threads(), self.scratch.borrow_mut());
        let mut context = raw::Context {
            shape: &raw const shape,
            layers: self.raw.0.as_ptr(),
            sequences: raw.0.as_ptr(),
            layer_count: self.layers.len() as i64,
            sequence_count: sequences.len() as i64,
            rows,
            features: fc.depth(),
            x: features.as_ptr(),
            fc: fc.pointer(),
            norm: norm.as_ptr(),
            scratch: null_mut(),
        };
        // SAFETY: as in `forward`.
        let floats = unsafe { raw::dflash_decode_context_scratch(&raw const context, threads) };
        context.scratch = scratch.floats(floats);
        // SAFETY: as in `forward`.
        unsafe { raw::dflash_decode_context(level::raw(), &raw const context, threads) };
    }

    fn raw_shape(&self) -> raw::Shape {
        let Shape { hidden, inner, query_heads, kv_heads, head_dim, eps, causal } = self.shape;
        raw::Shape {
            hidden,
            inner,
            query_heads,
            kv_heads,
            head_dim,
            eps: eps as f32,
            products: self.products,
            causal: i32::from(causal),
        }
    }

    /// Converts sequences to the kernels' format; returns the total number of rows.
    fn write_sequences(&self, sequences: &[Sequence<'_>], raw: &mut Vec<raw::Sequence>) -> i64 {
        let Shape { kv_heads, head_dim, .. } = self.shape;
        raw.clear();
        raw.extend(sequences.iter().map(|&Sequence { cache, start, rows }| {
            let &Cache { positions, key_stride, value_stride, ref held, ref tables, .. } = cache;
            assert!(rows >= 1 && start >= 0 && start + rows <= positions, "{start} + {rows} rows");
            assert_eq!((held.0.len(), cache.heads), (self.layers.len(), (kv_heads, head_dim)));
            let table =
                |number: usize| tables.0[number].wrapping_add((start * head_dim / 2) as usize);
            let (held, cosine, sine) = (held.0.as_ptr(), table(0), table(1));
            raw::Sequence { rows, start, positions, key_stride, value_stride, held, cosine, sine }
        }));
        let rows: i64 = sequences.iter().map(|sequence| sequence.rows).sum();
        assert!((1..=MAX_ROWS).contains(&rows), "{rows} rows in one call");
        rows
    }
}

impl Layer {
    fn new(shape: &Shape, weights: &LayerWeights<'_>, products: Products) -> Self {
        let &Shape { hidden, inner, query_heads, kv_heads, head_dim, .. } = shape;
        let (query, kv) = (query_heads * head_dim, kv_heads * head_dim);
        let product = |projection: &Projection<'_>, size: [i64; 2], layout: Layout| {
            assert_eq!(projection.weight.size(), size, "a projection of this shape");
            let matrix = projection.weight.packed(products, layout);
            Product { matrix, bias: projection.bias_o.map(|bias| bias_panels(bias, layout)) }
        };
        let plain = |projection: &Projection<'_>, size| product(projection, size, Layout::Plain);
        Self {
            qkv: plain(&weights.qkv, [hidden, query + 2 * kv]),
            output: plain(&weights.output, [query, hidden]),
            gate_up: product(&weights.gate_up, [hidden, 2 * inner], Layout::Gated),
            down: plain(&weights.down, [inner, hidden]),
            input_norm: float(weights.input_norm, hidden),
            post_norm: float(weights.post_norm, hidden),
            head_norms: weights
                .head_norms
                .map(|(query, key)| (float(query, head_dim), float(key, head_dim))),
            window: weights.window,
        }
    }

    fn matrices(&self) -> [&Matrix; 4] {
        let Self { qkv, output, gate_up, down, .. } = self;
        [qkv, output, gate_up, down].map(|product| &*product.matrix)
    }

    fn raw(&self) -> raw::Layer {
        let bias = |product: &Product| product.bias.as_ref().map_or(null(), |bias| data(bias));
        let norms = self.head_norms.as_ref();
        raw::Layer {
            qkv: self.qkv.matrix.pointer(),
            output: self.output.matrix.pointer(),
            gate_up: self.gate_up.matrix.pointer(),
            down: self.down.matrix.pointer(),
            qkv_bias: bias(&self.qkv),
            output_bias: bias(&self.output),
            gate_up_bias: bias(&self.gate_up),
            down_bias: bias(&self.down),
            input_norm: data(&self.input_norm),
            post_norm: data(&self.post_norm),
            query_norm: norms.map_or(null(), |norms| data(&norms.0)),
            key_norm: norms.map_or(null(), |norms| data(&norms.1)),
            window: self.window.unwrap_or(0),
        }
    }
}

/// Keys and values of a [`Stack`], float32, with the rotary tables of their positions.
#[derive(Debug)]
pub struct Cache {
    /// Per layer: keys [heads, D, stride], so products with them read whole vectors of positions,
    /// and values [heads, positions, stride].
    layers: Vec<(Tensor, Tensor)>,
    held: Pointers<raw::KeysValues>,
    /// Owner of the memory that `tables` points to.
    _rope: (Tensor, Tensor),
    tables: Pointers<*const f32>,
    /// (key/value heads, head width).
    heads: (i64, i64),
    positions: i64,
    key_stride: i64,
    value_stride: i64,
}

impl Cache {
    /// Size of all keys and values in bytes, including padding.
    pub fn bytes(&self) -> usize {
        let of = |x: &Tensor| x.numel() * x.kind().elt_size_in_bytes();
        self.layers.iter().map(|(keys, values)| of(keys) + of(values)).sum()
    }

    /// View of a layer's keys [heads, positions, D].
    pub fn keys(&self, layer: usize) -> Tensor {
        self.layers[layer].0.narrow(2, 0, self.positions).transpose(1, 2)
    }

    /// View of a layer's values [heads, positions, D].
    pub fn values(&self, layer: usize) -> Tensor {
        let (keys, values) = &self.layers[layer];
        values.narrow(2, 0, keys.size()[1])
    }
}

/// The number of threads that the user allows.
fn threads() -> i64 {
    i64::from(tch::get_num_threads()).max(1)
}

/// A vector's elements as contiguous float32.
fn float(x: &Tensor, size: i64) -> Tensor {
    assert_eq!(x.size(), [size]);
    x.to_kind(Kind::Float).contiguous()
}

/// Pointer to a contiguous float32 CPU tensor.
fn data(x: &Tensor) -> *mut f32 {
    assert!(
        x.device() == Device::Cpu && x.kind() == Kind::Float && x.is_contiguous(),
        "a kernel needs contiguous float32 on the CPU, got {:?} {:?}",
        x.kind(),
        x.stride()
    );
    x.data_ptr().cast()
}

/// The elements of a contiguous float32 CPU tensor.
pub fn floats(x: &Tensor) -> &[f32] {
    // SAFETY: `data` checks kind and layout, and the tensor is borrowed as long as the slice.
    unsafe { std::slice::from_raw_parts(data(x), x.numel()) }
}

/// Mutable [`floats`].
pub fn floats_mut(x: &mut Tensor) -> &mut [f32] {
    // SAFETY: as in `floats`.
    unsafe { std::slice::from_raw_parts_mut(data(x), x.numel()) }
}
