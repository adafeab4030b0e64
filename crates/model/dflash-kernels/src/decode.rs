//! A few rows through a model's layers on the CPU, as decoding has them: a token, or a block; see
//! `cpp/decode.cpp`.
//!
//! Weights are read once whatever the rows, and next to nothing is done beside: one call runs all
//! layers on threads that wait for each other by spinning. Rows come and go as slices of float32, and
//! no call makes a tensor or asks for memory that an earlier one had. What products multiply is
//! [`Products`]; sums are float32. Neither the number of threads nor that of rows changes a bit of what
//! comes out. Shapes and layouts are checked: a wrong one is a bug of the caller and panics.

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

/// Rows of a call at most. Scratch memory grows with them; weights are read once for 64 of them.
pub const MAX_ROWS: i64 = 512;

/// Whether weights like `x` can be packed for this module.
pub fn takes(kernels: Kernels, x: &Tensor) -> bool {
    kernels == Kernels::Fast
        && x.device() == Device::Cpu
        && matches!(x.kind(), Kind::Float | Kind::BFloat16)
        && !x.requires_grad()
}

/// Passes of this process that one thread ran although there were more, because another had been kept from
/// running shortly before.
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
    /// Whether a row sees no later row of its call.
    pub causal: bool,
}

/// A product with its bias.
#[derive(Clone, Copy, Debug)]
pub struct Projection<'a> {
    /// Its matrix.
    pub weight: Weight<'a>,
    /// `[O]`.
    pub bias_o: Option<&'a Tensor>,
}

/// A matrix from which [`Stack::new`] packs its own, or that it shares.
#[derive(Clone, Copy, Debug)]
pub enum Weight<'a> {
    /// [I, O], any strides.
    Plain(&'a Tensor),
    /// Packed already, for the same products; gate and up as [`Layout::Gated`].
    Packed(&'a Arc<Matrix>),
}

impl Weight<'_> {
    /// Whether this module takes it: packed, or a plain one of a kind that it packs.
    pub fn is_taken(&self) -> bool {
        match self {
            Self::Plain(weight_io) => takes(Kernels::Fast, weight_io),
            Self::Packed(_) => true,
        }
    }

    /// What the products of a model with these weights multiply: what they are packed for, or else
    /// [`Products::of`] them.
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

    /// The packed matrix for these products.
    ///
    /// # Panics
    /// When it is packed for others.
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

/// The weights of a layer.
#[derive(Clone, Copy, Debug)]
pub struct LayerWeights<'a> {
    /// Queries, keys and values side by side.
    pub qkv: Projection<'a>,
    /// The attention's output.
    pub output: Projection<'a>,
    /// Gate and up side by side.
    pub gate_up: Projection<'a>,
    /// Down.
    pub down: Projection<'a>,
    /// Norm before the attention.
    pub input_norm: &'a Tensor,
    /// Norm before the MLP.
    pub post_norm: &'a Tensor,
    /// Norms of each query and key head, where there are such.
    pub head_norms: Option<(&'a Tensor, &'a Tensor)>,
    /// Tokens that a row sees, itself included, or all.
    pub window: Option<i64>,
}

/// Layers, packed.
#[derive(Debug)]
pub struct Stack {
    shape: Shape,
    layers: Vec<Layer>,
    /// Where the weights of `layers` are.
    raw: Pointers<raw::Layer>,
    products: Products,
    scratch: RefCell<Scratch>,
    /// The sequences of a call as the kernels take them, kept for the next call's.
    sequences: RefCell<Pointers<raw::Sequence>>,
}

/// Addresses in tensors that are held beside them.
#[derive(Debug)]
struct Pointers<T>(Vec<T>);

// SAFETY: they lead to memory that whoever holds them owns, and that goes where they go.
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
    /// As wide as the matrix with what fills its last panel.
    bias: Option<Tensor>,
}

/// New rows of a sequence in a call.
#[derive(Clone, Copy, Debug)]
pub struct Sequence<'a> {
    /// Where its keys and values are, and go.
    pub cache: &'a Cache,
    /// Position of its first row in the call: what is cached up to there is seen.
    pub start: i64,
    /// Its rows.
    pub rows: i64,
}

/// What is wanted of a pass besides its rows.
#[derive(Debug, Default)]
pub struct Outputs<'a> {
    /// States: 0 for the rows as they come, k for what layer k makes of them.
    pub aux_layers: &'a [u32],
    /// Where they go [R, aux_layers, H].
    pub states: &'a mut [f32],
    /// Norm `[H]` of the last layer's output.
    pub final_norm: Option<&'a [f32]>,
    /// Rows from the first on whose output nobody reads: it is not computed, only their keys and values.
    pub unread: usize,
}

impl Stack {
    /// Packs layers.
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

    /// An empty cache for as many tokens as `cosine` and `sine` [positions, D/2] have positions.
    pub fn new_cache(&self, cosine: &Tensor, sine: &Tensor) -> Cache {
        let Shape { kv_heads, head_dim, .. } = self.shape;
        let positions = cosine.size()[0];
        let table = |x: &Tensor| {
            assert_eq!(x.size(), [positions, head_dim / 2], "a rotary table");
            x.contiguous()
        };
        // An odd number of cache lines, so that the rows of a panel do not compete for the same ones;
        // and room for a panel behind the last position.
        let key_stride = (positions + PANEL + 2 * LANES - 1) / (2 * LANES) * (2 * LANES) + LANES;
        let value_stride = (head_dim + PANEL - 1) / PANEL * PANEL;
        // The operating system hands out pages as rows are written: spare capacity costs nothing.
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

    /// Runs `x` [R, H] in place through all layers: the rows of each sequence, one after the other.
    /// Their keys and values are written to the caches.
    ///
    /// # Panics
    /// Above [`MAX_ROWS`] rows, and where a cache has no room for its own.
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

    /// Writes keys and values of `features` [R, F], the rows of each sequence one after the other:
    /// through `fc` and its norm `[H]`, and the key and value columns of every layer.
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

    /// Writes sequences as the kernels take them; returns the rows of all.
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

/// Keys and values that a [`Stack`] writes, float32, and the rotary tables of their positions.
#[derive(Debug)]
pub struct Cache {
    /// Keys [heads, D, stride], so that a product with them reads whole vectors of positions, and
    /// values [heads, positions, stride].
    layers: Vec<(Tensor, Tensor)>,
    /// Where these are.
    held: Pointers<raw::KeysValues>,
    /// Kept for `tables`, the addresses of cosines and sines.
    _rope: (Tensor, Tensor),
    tables: Pointers<*const f32>,
    /// Key and value heads, and their width.
    heads: (i64, i64),
    positions: i64,
    key_stride: i64,
    value_stride: i64,
}

impl Cache {
    /// Bytes of all keys and values, with the room between the rows and behind them.
    pub fn bytes(&self) -> usize {
        let of = |x: &Tensor| x.numel() * x.kind().elt_size_in_bytes();
        self.layers.iter().map(|(keys, values)| of(keys) + of(values)).sum()
    }

    /// A layer's keys, as a view [heads, positions, D].
    pub fn keys(&self, layer: usize) -> Tensor {
        self.layers[layer].0.narrow(2, 0, self.positions).transpose(1, 2)
    }

    /// A layer's values, as a view [heads, positions, D].
    pub fn values(&self, layer: usize) -> Tensor {
        let (keys, values) = &self.layers[layer];
        values.narrow(2, 0, keys.size()[1])
    }
}

/// Threads that the user allows.
fn threads() -> i64 {
    i64::from(tch::get_num_threads()).max(1)
}

/// A vector's elements as float32.
fn float(x: &Tensor, size: i64) -> Tensor {
    assert_eq!(x.size(), [size]);
    x.to_kind(Kind::Float).contiguous()
}

/// A contiguous float32 tensor's elements.
fn data(x: &Tensor) -> *mut f32 {
    assert!(
        x.device() == Device::Cpu && x.kind() == Kind::Float && x.is_contiguous(),
        "a kernel needs contiguous float32 on the CPU, got {:?} {:?}",
        x.kind(),
        x.stride()
    );
    x.data_ptr().cast()
}

/// The elements of a contiguous float32 tensor on the CPU.
pub fn floats(x: &Tensor) -> &[f32] {
    // SAFETY: `data` checks kind and layout, and the tensor is borrowed as long as the slice.
    unsafe { std::slice::from_raw_parts(data(x), x.numel()) }
}

/// As [`floats`], to write them.
pub fn floats_mut(x: &mut Tensor) -> &mut [f32] {
    // SAFETY: as in `floats`.
    unsafe { std::slice::from_raw_parts_mut(data(x), x.numel()) }
}
