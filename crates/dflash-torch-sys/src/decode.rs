//! A few rows through a model's layers on the CPU, as decoding has them: a token, or a block; see
//! `cpp/decode.cpp`.
//!
//! Weights are read once whatever the rows, and next to nothing is done beside: one call runs all
//! layers on threads that wait for each other by spinning. Rows are float32, weights float32 or
//! bfloat16, sums float32. Neither the number of threads nor that of rows changes a bit of what comes
//! out. Shapes and layouts are checked: a wrong one is a bug of the caller and panics.

mod head;
mod matrix;
mod raw;

use std::ptr::{null, null_mut};

use tch::{Device, Kind, Tensor};

use self::matrix::{LANES, PANEL, gated};
use crate::kernels::Kernels;

pub use self::head::Head;
pub use self::matrix::{Matrix, storage};

/// Rows of a call at most. More are better served by libtorch's products.
pub const MAX_ROWS: i64 = 32;

/// Elements that layers keep packed at most, beside the weights that libtorch's products take.
/// Larger models wait for their memory in any case, and a copy of them is too much to hold.
pub const MAX_PACKED_ELEMENTS: i64 = 256 << 20;

/// Rows that the kernels sum at a time at most.
const TILE: i64 = 8;

/// Whether weights like `x` can be packed for this module.
pub fn takes(kernels: Kernels, x: &Tensor) -> bool {
    kernels == Kernels::Fast
        && x.device() == Device::Cpu
        && matches!(x.kind(), Kind::Float | Kind::BFloat16)
        && !x.requires_grad()
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
    /// [I, O], any strides.
    pub weight_io: &'a Tensor,
    /// `[O]`.
    pub bias_o: Option<&'a Tensor>,
}

/// The weights of a layer, from which [`Stack::new`] packs its own.
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
    kind: Kind,
}

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
    matrix: Matrix,
    /// As wide as the matrix with what fills its last panel.
    bias: Option<Tensor>,
}

impl Stack {
    /// Packs layers as `kind`, float32 or bfloat16.
    pub fn new(shape: Shape, layers: &[LayerWeights<'_>], kind: Kind) -> Self {
        assert!(shape.head_dim % 2 == 0 && shape.query_heads % shape.kv_heads == 0, "{shape:?}");
        let layers = layers.iter().map(|weights| Layer::new(&shape, weights, kind)).collect();
        Self { shape, layers, kind }
    }

    /// An empty cache for `positions` tokens.
    pub fn new_cache(&self, positions: i64) -> Cache {
        let Shape { kv_heads, head_dim, .. } = self.shape;
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
        let threads = threads();
        let scratch = empty([1, 1, self.scratch(key_stride, threads)]);
        Cache {
            layers: self.layers.iter().map(|_| layer()).collect(),
            positions,
            key_stride,
            value_stride,
            scratch,
            threads,
        }
    }

    /// Elements that a call of [`MAX_ROWS`] rows uses.
    fn scratch(&self, key_stride: i64, threads: i64) -> i64 {
        let Shape { hidden, inner, query_heads, kv_heads, head_dim, .. } = self.shape;
        let (query, spare) = (query_heads * head_dim, 2 * PANEL);
        let shared = 2 * query + 2 * kv_heads * head_dim + inner + 3 * spare;
        let own = hidden + query / kv_heads + spare;
        MAX_ROWS * (shared + threads * own) + threads * (TILE * key_stride + spare)
    }

    /// Runs `x` [R, H] (float32, in place) through all layers, its first row at position `start`: what
    /// is cached up to there is seen, and the rows' keys and values are written behind it.
    ///
    /// `rope` are cosines and sines [R, D/2] of the rows' positions. Where `captures` has a tensor
    /// [R, H] for a layer, that layer's output is copied there. `final_norm` is applied to the last
    /// one's.
    pub fn forward(
        &self,
        x: &mut Tensor,
        (cache, start): (&Cache, i64),
        rope: (&Tensor, &Tensor),
        captures: &[Option<Tensor>],
        final_norm: Option<&Tensor>,
    ) {
        let rows = x.size()[0];
        assert_eq!(x.size(), [rows, self.shape.hidden]);
        assert_eq!(captures.len(), self.layers.len());
        let shape = self.raw_shape();
        let (cache_shape, layers) = self.raw_layers(cache, (start, rows));
        let (cosine, sine) = self.raw_tables(rope, rows);
        let captures: Vec<*mut f32> = captures
            .iter()
            .map(|capture| {
                capture.as_ref().map_or(null_mut(), |capture| {
                    assert_eq!(capture.size(), x.size());
                    data(capture)
                })
            })
            .collect();
        let pass = raw::Pass {
            shape: &raw const shape,
            cache: &raw const cache_shape,
            layers: layers.as_ptr(),
            layer_count: layers.len() as i64,
            rows,
            start,
            cosine,
            sine,
            x: data(x),
            captures: captures.as_ptr(),
            final_norm: final_norm.map_or(null(), |norm| vector(norm, self.shape.hidden)),
            scratch: data(&cache.scratch),
        };
        // SAFETY: shapes, kinds and contiguity are checked here and in the helpers; the positions fit
        // the cache, and its scratch memory this many rows and threads.
        unsafe { raw::dflash_decode_pass(&raw const pass, cache.threads.min(threads())) };
    }

    /// Writes keys and values of `features` [R, F] (float32) from position `start` on: through `fc` and
    /// its norm `[H]`, and the key and value columns of every layer.
    pub fn extend(
        &self,
        features: &Tensor,
        (fc, norm): (&Matrix, &Tensor),
        (cache, start): (&Cache, i64),
        rope: (&Tensor, &Tensor),
    ) {
        let rows = features.size()[0];
        assert_eq!(features.size(), [rows, fc.depth]);
        assert!(fc.outputs == self.shape.hidden && fc.packed.kind() == self.kind);
        assert!(self.layers.iter().all(|layer| layer.qkv.bias.is_none()), "context has no bias");
        let shape = self.raw_shape();
        let (cache_shape, layers) = self.raw_layers(cache, (start, rows));
        let (cosine, sine) = self.raw_tables(rope, rows);
        let (scratch, threads) = (self.context_scratch(rows), threads());
        let context = raw::Context {
            shape: &raw const shape,
            cache: &raw const cache_shape,
            layers: layers.as_ptr(),
            layer_count: layers.len() as i64,
            rows,
            start,
            features: fc.depth,
            cosine,
            sine,
            x: data(features),
            fc: fc.packed.data_ptr(),
            norm: vector(norm, self.shape.hidden),
            scratch: data(&scratch),
        };
        // SAFETY: as in `forward`; the scratch memory is made for these rows and threads.
        unsafe { raw::dflash_decode_context(&raw const context, threads) };
    }

    fn context_scratch(&self, rows: i64) -> Tensor {
        let Shape { hidden, kv_heads, head_dim, .. } = self.shape;
        let kv = 2 * kv_heads * head_dim + 2 * PANEL;
        let shared = hidden + PANEL + self.layers.len() as i64 * kv;
        let elements = rows * shared + threads() * (rows * hidden + head_dim + LANES);
        Tensor::empty([elements], (Kind::Float, Device::Cpu))
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
            bf16: i32::from(self.kind == Kind::BFloat16),
            causal: i32::from(causal),
        }
    }

    fn raw_layers(
        &self,
        cache: &Cache,
        (start, rows): (i64, i64),
    ) -> (raw::CacheShape, Vec<raw::Layer>) {
        let &Cache { positions, key_stride, value_stride, .. } = cache;
        assert!((1..=MAX_ROWS).contains(&rows), "{rows} rows in one call");
        assert!(start >= 0 && start + rows <= positions, "{start} + {rows} exceed {positions}");
        assert_eq!(cache.layers.len(), self.layers.len(), "a cache of these layers");
        let Shape { kv_heads, head_dim, .. } = self.shape;
        assert_eq!(cache.layers[0].0.size(), [kv_heads, head_dim, key_stride]);
        let layers = self.layers.iter().zip(&cache.layers).map(|(layer, held)| layer.raw(held));
        (raw::CacheShape { positions, key_stride, value_stride }, layers.collect())
    }

    fn raw_tables(&self, rope: (&Tensor, &Tensor), rows: i64) -> (*const f32, *const f32) {
        let half = self.shape.head_dim / 2;
        assert!(rope.0.size() == [rows, half] && rope.1.size() == [rows, half]);
        (data(rope.0), data(rope.1))
    }
}

impl Layer {
    fn new(shape: &Shape, weights: &LayerWeights<'_>, kind: Kind) -> Self {
        let &Shape { hidden, inner, query_heads, kv_heads, head_dim, .. } = shape;
        let (query, kv) = (query_heads * head_dim, kv_heads * head_dim);
        let sized = |projection: &Projection<'_>, size: [i64; 2]| {
            assert_eq!(projection.weight_io.size(), size, "a projection of this shape");
        };
        sized(&weights.qkv, [hidden, query + 2 * kv]);
        sized(&weights.output, [query, hidden]);
        sized(&weights.gate_up, [hidden, 2 * inner]);
        sized(&weights.down, [inner, hidden]);
        let plain = |projection: &Projection<'_>| {
            let bias = |bias: &Tensor| blocks_of_bias(bias, PANEL);
            let matrix = Matrix::pack(projection.weight_io, kind);
            Product { matrix, bias: projection.bias_o.map(bias) }
        };
        let gate_up = Product {
            matrix: Matrix::pack_gated(weights.gate_up.weight_io, kind),
            bias: weights
                .gate_up
                .bias_o
                .map(|bias| gated(&bias.unsqueeze(0), Kind::Float).flatten(0, -1).contiguous()),
        };
        Self {
            qkv: plain(&weights.qkv),
            output: plain(&weights.output),
            gate_up,
            down: plain(&weights.down),
            input_norm: float(weights.input_norm, hidden),
            post_norm: float(weights.post_norm, hidden),
            head_norms: weights
                .head_norms
                .map(|(query, key)| (float(query, head_dim), float(key, head_dim))),
            window: weights.window,
        }
    }

    fn raw(&self, (keys, values): &(Tensor, Tensor)) -> raw::Layer {
        let bias = |product: &Product| product.bias.as_ref().map_or(null(), |bias| data(bias));
        let norms = self.head_norms.as_ref();
        raw::Layer {
            qkv: self.qkv.matrix.packed.data_ptr(),
            output: self.output.matrix.packed.data_ptr(),
            gate_up: self.gate_up.matrix.packed.data_ptr(),
            down: self.down.matrix.packed.data_ptr(),
            qkv_bias: bias(&self.qkv),
            output_bias: bias(&self.output),
            gate_up_bias: bias(&self.gate_up),
            down_bias: bias(&self.down),
            input_norm: data(&self.input_norm),
            post_norm: data(&self.post_norm),
            query_norm: norms.map_or(null(), |norms| data(&norms.0)),
            key_norm: norms.map_or(null(), |norms| data(&norms.1)),
            window: self.window.unwrap_or(0),
            keys: data(keys),
            values: data(values),
        }
    }
}

/// Keys and values that a [`Stack`] writes, float32, and its scratch memory.
#[derive(Debug)]
pub struct Cache {
    /// Keys [heads, D, stride], so that a product with them reads whole vectors of positions, and
    /// values [heads, positions, stride].
    layers: Vec<(Tensor, Tensor)>,
    positions: i64,
    key_stride: i64,
    value_stride: i64,
    scratch: Tensor,
    /// Threads that the scratch memory is for.
    threads: i64,
}

impl Cache {
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

/// A bias, filled up with zeros to whole panels.
fn blocks_of_bias(bias: &Tensor, unit: i64) -> Tensor {
    let missing = (unit - bias.size()[0] % unit) % unit;
    bias.to_kind(Kind::Float).constant_pad_nd([0, missing]).contiguous()
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

fn vector(x: &Tensor, size: i64) -> *const f32 {
    assert_eq!(x.size(), [size]);
    data(x).cast_const()
}
