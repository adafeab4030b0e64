//! What `cpp/decode.h` declares, field by field.

use std::ffi::c_void;

#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct Layer {
    pub(super) qkv: *const c_void,
    pub(super) output: *const c_void,
    pub(super) gate_up: *const c_void,
    pub(super) down: *const c_void,
    pub(super) qkv_bias: *const f32,
    pub(super) output_bias: *const f32,
    pub(super) gate_up_bias: *const f32,
    pub(super) down_bias: *const f32,
    pub(super) input_norm: *const f32,
    pub(super) post_norm: *const f32,
    pub(super) query_norm: *const f32,
    pub(super) key_norm: *const f32,
    pub(super) window: i64,
    pub(super) keys: *mut f32,
    pub(super) values: *mut f32,
}

#[repr(C)]
pub(super) struct Shape {
    pub(super) hidden: i64,
    pub(super) inner: i64,
    pub(super) query_heads: i64,
    pub(super) kv_heads: i64,
    pub(super) head_dim: i64,
    pub(super) eps: f32,
    pub(super) bf16: i32,
    pub(super) causal: i32,
}

#[repr(C)]
pub(super) struct CacheShape {
    pub(super) positions: i64,
    pub(super) key_stride: i64,
    pub(super) value_stride: i64,
}

#[repr(C)]
pub(super) struct Pass {
    pub(super) shape: *const Shape,
    pub(super) cache: *const CacheShape,
    pub(super) layers: *const Layer,
    pub(super) layer_count: i64,
    pub(super) rows: i64,
    pub(super) start: i64,
    pub(super) cosine: *const f32,
    pub(super) sine: *const f32,
    pub(super) x: *mut f32,
    pub(super) captures: *const *mut f32,
    pub(super) final_norm: *const f32,
    pub(super) scratch: *mut f32,
}

#[repr(C)]
pub(super) struct Context {
    pub(super) shape: *const Shape,
    pub(super) cache: *const CacheShape,
    pub(super) layers: *const Layer,
    pub(super) layer_count: i64,
    pub(super) rows: i64,
    pub(super) start: i64,
    pub(super) features: i64,
    pub(super) cosine: *const f32,
    pub(super) sine: *const f32,
    pub(super) x: *const f32,
    pub(super) fc: *const c_void,
    pub(super) norm: *const f32,
    pub(super) scratch: *mut f32,
}

#[repr(C)]
pub(super) struct Head {
    pub(super) matrix: *const c_void,
    pub(super) hidden: i64,
    pub(super) outputs: i64,
    pub(super) rows: i64,
    pub(super) x: *const f32,
    pub(super) norm: *const f32,
    pub(super) eps: f32,
    pub(super) bf16: i32,
    pub(super) logits: *mut f32,
    pub(super) best: *mut i64,
    pub(super) scratch: *mut f32,
}

unsafe extern "C" {
    pub(super) fn dflash_decode_pass(pass: *const Pass, threads: i64);
    pub(super) fn dflash_decode_context(context: *const Context, threads: i64);
    pub(super) fn dflash_decode_head(head: *const Head, threads: i64);
}
