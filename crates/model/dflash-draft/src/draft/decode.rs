//! The decoding pass: one block at a time over the cached context.

mod blocks;

use dflash_kernels::decode::{
    Cache, LayerWeights, MAX_ROWS, Matrix, Products, Projection, Sequence, Shape, Stack, Weight,
    floats, floats_mut, takes,
};
use dflash_kernels::gpu::KeyRoom;
use dflash_kernels::kernels::Kernels;
use dflash_tensor::attention_span::{AttentionSpan, Masks, causal_mask};
use dflash_tensor::flash::{self, Calls};
use dflash_tensor::fused::{self, HeadOrder};
use dflash_tensor::ops::{RotaryTables, attention, dense};
use dflash_torch_sys::flash::Window;
use tch::{Kind, Tensor};

use super::{Draft, LayerKind, LayerViews, plus, projection};

pub use blocks::ContextPart;

/// Keys and values of the context for every layer, with room for one block after them.
#[derive(Debug)]
pub struct ContextCache {
    /// Per layer keys and values, [kv heads, capacity + B, D].
    layers: Vec<(Tensor, Tensor)>,
    /// Backing memory of `layers` if few rows use the compiled passes.
    packed_cache: Option<Cache>,
    /// Rotary tables of all positions up to the capacity.
    rope: RotaryTables,
    capacity: i64,
    length: i64,
}

impl ContextCache {
    /// Number of cached context positions.
    pub fn len(&self) -> i64 {
        self.length
    }

    /// Whether the context is empty.
    pub fn is_empty(&self) -> bool {
        self.length == 0
    }

    /// Drops all positions from `length` on.
    pub fn truncate(&mut self, length: i64) {
        self.length = self.length.min(length);
    }

    /// The next `rows` positions, for packed passes.
    fn rows(&self, rows: i64) -> Sequence<'_> {
        let cache = self.packed_cache.as_ref().expect("a cache of packed layers");
        Sequence { cache, start: self.length, rows }
    }
}

/// The draft's packed layers for few rows on a CPU. Its methods read and fill slices, so a decoding
/// step creates no tensors.
#[derive(Debug)]
pub struct PackedDecoder {
    stack: Stack,
    fc: Matrix,
    /// Norms `[H]` of the fused context and of the last layer.
    norms: (Vec<f32>, Vec<f32>),
}

impl PackedDecoder {
    /// Maximum rows per call.
    pub const MAX_ROWS: usize = MAX_ROWS as usize;

    fn new(draft: &Draft) -> Option<Self> {
        let (c, views) = (&draft.config, &draft.views);
        if !takes(draft.kernels, &draft.flat) {
            return None;
        }
        let shape = Shape {
            hidden: c.hidden_size,
            inner: c.intermediate_size,
            query_heads: c.num_attention_heads,
            kv_heads: c.num_key_value_heads,
            head_dim: c.head_dim,
            eps: c.rms_norm_eps,
            causal: false,
        };
        let products = Products::of([&draft.flat]);
        let turned = |layer: &LayerViews| {
            [&layer.qkv, &layer.o, &layer.gate_up, &layer.down].map(Tensor::tr)
        };
        let turned: Vec<[Tensor; 4]> = views.layers.iter().map(turned).collect();
        let layers: Vec<LayerWeights> = (0..turned.len())
            .map(|index| layer_weights(&views.layers[index], &turned[index], draft.window(index)))
            .collect();
        let float = |x: &Tensor| floats(&x.to_kind(Kind::Float).contiguous()).to_vec();
        Some(Self {
            stack: Stack::new(shape, &layers, products),
            fc: Matrix::pack(&views.fc.tr(), products),
            norms: (float(&views.hidden_norm), float(&views.norm)),
        })
    }

    fn hidden(&self) -> usize {
        self.norms.1.len()
    }
}

fn layer_weights<'a>(
    layer: &'a LayerViews,
    turned: &'a [Tensor; 4],
    window: Option<i64>,
) -> LayerWeights<'a> {
    let biases = layer.biases.as_ref();
    let [qkv, output, gate_up, down] = turned
        .each_ref()
        .map(|weight_io| Projection { weight: Weight::Plain(weight_io), bias_o: None });
    let qkv = Projection { bias_o: biases.map(|bias| &bias.qkv), ..qkv };
    let output = Projection { bias_o: biases.map(|bias| &bias.o), ..output };
    LayerWeights {
        qkv,
        output,
        gate_up,
        down,
        input_norm: &layer.input_norm,
        post_norm: &layer.post_norm,
        head_norms: Some((&layer.q_norm, &layer.k_norm)),
        window,
    }
}

fn float_rows(x: &Tensor) -> Tensor {
    x.to_kind(Kind::Float).contiguous()
}

fn float_copy(x: &Tensor) -> Tensor {
    x.to_dtype(Kind::Float, false, true).contiguous()
}

/// Copies of the weights as [in, out]: for a block's few rows the product is faster than with the
/// checkpoint's [out, in].
#[derive(Debug)]
pub(super) struct DecodeWeights {
    layers: Vec<DecodeLayer>,
    /// The fused context projections of all layers, [H, layers * 2 * kv width].
    context_kv: Tensor,
}

#[derive(Debug)]
struct DecodeLayer {
    qkv: Tensor,
    o: Tensor,
    gate_up: Tensor,
    down: Tensor,
}

impl DecodeWeights {
    fn new(layers: &[LayerViews]) -> Self {
        let turned = |weight: &Tensor| weight.tr().contiguous();
        let context: Vec<Tensor> = layers.iter().map(|layer| layer.kv.tr()).collect();
        let layers = layers
            .iter()
            .map(|layer| DecodeLayer {
                qkv: turned(&layer.qkv),
                o: turned(&layer.o),
                gate_up: turned(&layer.gate_up),
                down: turned(&layer.down),
            })
            .collect();
        Self { layers, context_kv: Tensor::cat(&context, 1) }
    }
}

impl Draft {
    /// Created at the first block; the weights must not change afterwards.
    fn decode_weights(&self) -> &DecodeWeights {
        self.decode.get_or_init(|| DecodeWeights::new(&self.views.layers))
    }

    /// The packed layers, if few rows use them: on a CPU, in float32 or bfloat16. Created with the
    /// first cache; the weights must not change afterwards.
    pub fn packed_decoder(&self) -> Option<&PackedDecoder> {
        self.packed_decoder.get_or_init(|| PackedDecoder::new(self)).as_ref()
    }

    /// A layer's window in positions, including the slot itself; `None` for full attention.
    fn window(&self, layer: usize) -> Option<i64> {
        match self.config.layers[layer] {
            LayerKind::Sliding => self.config.sliding_window.map(|window| window as i64),
            _ => None,
        }
    }

    /// A cache for up to `capacity` context positions.
    pub fn new_cache(&self, capacity: i64) -> ContextCache {
        let c = &self.config;
        let rows = capacity + c.block_size as i64;
        let shape = [c.num_key_value_heads, rows, c.head_dim];
        let empty = || Tensor::zeros(shape, (self.flat.kind(), self.flat.device()));
        let positions: Vec<i64> = (0..rows).collect();
        let rope = self.tables(&positions);
        let packed_cache =
            self.packed_decoder().map(|few| few.stack.new_cache(&rope.cos_td, &rope.sin_td));
        let layer = |index: usize| match &packed_cache {
            None => (empty(), empty()),
            Some(held) => (held.keys(index), held.values(index)),
        };
        let layers = (0..c.layers.len()).map(layer).collect();
        ContextCache { layers, packed_cache, rope, capacity, length: 0 }
    }

    /// Appends the features of accepted tokens: `features_tk` [T, K*H] of the positions that follow
    /// the cached ones. The first call starts at position 0 of the prompt.
    ///
    /// # Panics
    /// If the cache is full or `first_position` is not the cache's length: bugs of the caller.
    pub fn extend_context(
        &self,
        cache: &mut ContextCache,
        features_tk: &Tensor,
        first_position: i64,
    ) {
        let rows = features_tk.size()[0];
        assert_eq!(first_position, cache.length, "context positions must be contiguous");
        assert!(cache.length + rows <= cache.capacity, "the context cache is full");
        if let Some(few) = self.few_for(cache, rows) {
            let rows = rows as usize;
            return few
                .extend(&mut [ContextPart { cache, rows }], floats(&float_rows(features_tk)));
        }
        let rope = cache.rope.narrow(first_position, rows);
        let context = self.context(&features_tk.to_kind(self.flat.kind()));
        let width = 2 * self.config.kv_width();
        // Many rows on a packed draft use the original weights: transposed copies would gain
        // nothing.
        let kv_all =
            cache.packed_cache.is_none().then(|| context.matmul(&self.decode_weights().context_kv));
        for (index, (layer, (k, v))) in self.views.layers.iter().zip(&cache.layers).enumerate() {
            let bias = layer.biases.as_ref().map(|bias| &bias.kv);
            let kv = match &kv_all {
                Some(kv_all) => plus(kv_all.narrow(1, index as i64 * width, width), bias),
                None => projection(&context, &layer.kv, bias),
            };
            self.keep_context(layer, &kv, &rope, [k, v].map(|x| x.narrow(1, cache.length, rows)));
        }
        cache.length += rows;
    }

    /// Writes the keys and values [kv heads, T, D] of `kv` [T, 2*kv_width] to `room`.
    fn keep_context(
        &self,
        layer: &LayerViews,
        kv: &Tensor,
        rope: &RotaryTables,
        room: [Tensor; 2],
    ) {
        if let Some(projected) = self.projected(kv, None, &layer.k_norm, rope) {
            let [key, value] = room.each_ref().map(|x_jtd| x_jtd.transpose(0, 1));
            projected.to(kv, KeyRoom { key: &key, value: Some(&value) });
            return;
        }
        let own = self.project_context(layer, kv, rope);
        let [mut key, mut value] = room;
        key.copy_(&own.k_jtd);
        value.copy_(&own.v_jtd);
    }

    /// The packed weights, if the cache is packed and `rows` are few.
    fn few_for(&self, cache: &ContextCache, rows: i64) -> Option<&PackedDecoder> {
        let few = cache.packed_cache.is_some() && (1..=MAX_ROWS).contains(&rows);
        if few { self.packed_decoder() } else { None }
    }

    /// Runs one block: `block_bh` [B', H] has the embeddings of [bonus token, MASK, ...], the first
    /// at `anchor_position`; at most the block size. Returns `norm(x)` [B', H].
    ///
    /// The cache is not modified; its spare rows serve as scratch space.
    pub fn forward_block(
        &self,
        cache: &ContextCache,
        block_bh: &Tensor,
        anchor_position: i64,
    ) -> Tensor {
        let slots = block_bh.size()[0];
        if let Some(few) = self.few_for(cache, slots) {
            assert_eq!(anchor_position, cache.length, "a block follows its context");
            let mut x = float_copy(block_bh);
            few.forward_blocks(&[cache], floats_mut(&mut x), 0);
            return x.to_kind(self.flat.kind());
        }
        let rope = cache.rope.narrow(anchor_position, slots);
        let mut x = block_bh.shallow_clone();
        let mut shared = Shared::default();
        for (index, layer) in self.views.layers.iter().enumerate() {
            x = self.decode_layer(layer, cache, index, &x, &rope, &mut shared);
        }
        self.norm(&self.views.norm).of(&x)
    }

    fn decode_layer(
        &self,
        layer: &LayerViews,
        cache: &ContextCache,
        index: usize,
        x: &Tensor,
        rope: &RotaryTables,
        shared: &mut Shared,
    ) -> Tensor {
        let slots = x.size()[0];
        let weights = &self.decode_weights().layers[index];
        let qkv = self.decode_qkv(layer, weights, x);
        let q_jngd = match self.projected(&qkv, Some(&layer.q_norm), &layer.k_norm, rope) {
            Some(projected) => {
                let (k, v) = &cache.layers[index];
                let [key, value] = [k, v].map(|x| x.narrow(1, cache.length, slots).transpose(0, 1));
                let queries = projected.to(&qkv, KeyRoom { key: &key, value: Some(&value) });
                let kv_heads = self.config.num_key_value_heads;
                let q_njgd = queries.expect("slots have queries").unflatten(1, [kv_heads, -1]);
                HeadOrder::ByKeyHead.seen(&q_njgd)
            }
            None => {
                let (q_jngd, own) = self.project_slots(layer, &qkv, rope);
                cache.write(index, &own, 0, slots);
                q_jngd
            }
        };
        let out = self.attend_cached(cache, index, &q_jngd, shared);
        self.decode_output(layer, weights, x, &out)
    }

    /// Attention of a block's queries [kv heads, B', group, D] over the context and the block,
    /// whose keys and values follow it in the cache: [B', heads * D].
    fn attend_cached(
        &self,
        cache: &ContextCache,
        index: usize,
        q_jngd: &Tensor,
        shared: &mut Shared,
    ) -> Tensor {
        let slots = q_jngd.size()[1];
        let total = cache.length + slots;
        let (k, v) = &cache.layers[index];
        let [k_sjd, v_sjd] = [k, v].map(|x| x.narrow(1, 0, total).transpose(0, 1));
        if self.kernels == Kernels::Fast && flash::takes(q_jngd, &k_sjd, &v_sjd) {
            let window = match self.window(index) {
                None => Window::ALL,
                Some(window) => Window { left: Some(window - 1), right: Some(0) },
            };
            let make = || flash::one(slots, total, window, q_jngd.device());
            let q_nhd = q_jngd.transpose(0, 1).flatten(1, 2);
            let sequence = shared.calls.of(window, make);
            return flash::attend(&q_nhd, &k_sjd, &v_sjd, sequence, None).flatten(1, 2);
        }
        let mask = self.window(index).map(|window| {
            let make = || self.decode_mask(window, cache.length, slots);
            shared.masks.of(AttentionSpan::Window(window), make)
        });
        let folded = q_jngd.flatten(1, 2).unsqueeze(0);
        let seen = |x: &Tensor| dense(&x.narrow(1, 0, total).unsqueeze(0), q_jngd.kind());
        let out = attention(&folded, &seen(k), &seen(v), mask.as_ref(), false, self.kernels);
        self.ungroup_queries(&out.squeeze_dim(0).view(q_jngd.size().as_slice()))
    }

    /// Queries, keys and values of a layer's input `x` [N, H].
    fn decode_qkv(&self, layer: &LayerViews, weights: &DecodeLayer, x: &Tensor) -> Tensor {
        let normed = self.norm(&layer.input_norm).of(x);
        plus(normed.matmul(&weights.qkv), layer.biases.as_ref().map(|bias| &bias.qkv))
    }

    /// A layer's output from its input `x` [N, H] and its attention output `out` [N, heads * D].
    fn decode_output(
        &self,
        layer: &LayerViews,
        weights: &DecodeLayer,
        x: &Tensor,
        out: &Tensor,
    ) -> Tensor {
        let bias = layer.biases.as_ref().map(|bias| &bias.o);
        let mut middle = plus(x.addmm(out, &weights.o), bias);
        let gate_up = self.norm(&layer.post_norm).of(&middle).matmul(&weights.gate_up);
        let activated = fused::swiglu(&gate_up, self.kernels);
        // In place, which saves a copy.
        middle.addmm_(&activated, &weights.down)
    }

    /// Additive mask of sliding layers [slots * queries per kv head, length + slots], built on the
    /// device; full layers need none.
    fn decode_mask(&self, window: i64, length: i64, slots: i64) -> Tensor {
        let (options, group) = ((Kind::Int64, self.device()), self.config.queries_per_kv());
        let slot = Tensor::arange(slots * group, options).divide_scalar_mode(group, "floor");
        let key = Tensor::arange(length + slots, options);
        causal_mask(&(slot + length), &key, AttentionSpan::Window(window), self.flat.kind())
    }
}

/// Shared by the layers of a pass over one block.
#[derive(Debug, Default)]
struct Shared {
    /// The block's sequence lengths, per window.
    calls: Calls,
    /// Masks, if needed.
    masks: Masks,
}
