//! FFI declarations of `cpp/decode.h`, field by field.

use std::ffi::c_void;

use super::Products;

#[repr(C)]
#[derive(Clone, Copy, Debug)]
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
}

#[repr(C)]
pub(super) struct Shape {
    pub(super) hidden: i64,
    pub(super) inner: i64,
    pub(super) query_heads: i64,
    pub(super) kv_heads: i64,
    pub(super) head_dim: i64,
    pub(super) eps: f32,
    pub(super) products: Products,
    pub(super) causal: i32,
}

#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(super) struct KeysValues {
    pub(super) keys: *mut f32,
    pub(super) values: *mut f32,
}

#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(super) struct Sequence {
    pub(super) rows: i64,
    pub(super) start: i64,
    pub(super) positions: i64,
    pub(super) key_stride: i64,
    pub(super) value_stride: i64,
    pub(super) held: *const KeysValues,
    pub(super) cosine: *const f32,
    pub(super) sine: *const f32,
}

#[repr(C)]
pub(super) struct Pass {
    pub(super) shape: *const Shape,
    pub(super) layers: *const Layer,
    pub(super) sequences: *const Sequence,
    pub(super) layer_count: i64,
    pub(super) sequence_count: i64,
    pub(super) rows: i64,
    pub(super) unread: i64,
    pub(super) x: *mut f32,
    pub(super) aux_layer_ids: *const u32,
    pub(super) aux_layer_count: i64,
    pub(super) aux_states: *mut f32,
    pub(super) final_norm: *const f32,
    pub(super) scratch: *mut f32,
}

#[repr(C)]
pub(super) struct Context {
    pub(super) shape: *const Shape,
    pub(super) layers: *const Layer,
    pub(super) sequences: *const Sequence,
    pub(super) layer_count: i64,
    pub(super) sequence_count: i64,
    pub(super) rows: i64,
    pub(super) features: i64,
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
    pub(super) products: Products,
    pub(super) logits: *mut f32,
    pub(super) best: *mut i64,
    pub(super) scratch: *mut f32,
}

#[repr(C)]
pub(super) struct Product {
    pub(super) matrix: *const c_void,
    pub(super) depth: i64,
    pub(super) outputs: i64,
    pub(super) panels: i64,
    pub(super) gated: i64,
    pub(super) rows: i64,
    pub(super) x: *const f32,
    pub(super) products: Products,
    pub(super) out: *mut f32,
    pub(super) scratch: *mut f32,
}

/// FFI declarations of `cpp/unpack.cpp`.
#[repr(C)]
pub(super) struct Columns {
    pub(super) panel: i64,
    pub(super) lane: i64,
    pub(super) count: i64,
}

/// How rows of words are unpacked.
#[repr(i32)]
pub(super) enum Unpack {
    Floats = 0,
    Widened = 1,
    Halves = 2,
}

unsafe extern "C" {
    pub(super) fn dflash_unpack(
        panels: *const u32,
        depth: i64,
        runs: *const Columns,
        run_count: i64,
        width: i64,
        way: Unpack,
        out: *mut c_void,
        threads: i64,
    );
    pub(super) fn dflash_decode_passes_alone() -> i64;
    #[cfg(test)]
    pub(super) fn dflash_decode_is_late(waited: i64, before: i64) -> i32;
    pub(super) fn dflash_decode_pass_scratch(pass: *const Pass, threads: i64) -> i64;
    pub(super) fn dflash_decode_context_scratch(context: *const Context, threads: i64) -> i64;
    pub(super) fn dflash_decode_head_scratch(head: *const Head, threads: i64) -> i64;
    pub(super) fn dflash_decode_pass(level: i32, pass: *const Pass, threads: i64);
    pub(super) fn dflash_decode_context(level: i32, context: *const Context, threads: i64);
    pub(super) fn dflash_decode_product(level: i32, product: *const Product, threads: i64) -> i64;
    pub(super) fn dflash_decode_head(level: i32, head: *const Head, threads: i64);
}
