// Few-row decoding passes on a CPU: the arguments from `decode.rs`, and what the per-level copies
// of `decode.cpp` share with `decode_team.cpp`.
#pragma once

#include <cstdint>

#if defined(__x86_64__)
#define DFLASH_DECODE_LEVELS(X) X(avx512bf16) X(avx512) X(avx2) X(baseline)
#elif defined(__aarch64__)
#define DFLASH_DECODE_LEVELS(X) X(neon) X(baseline)
#else
#define DFLASH_DECODE_LEVELS(X) X(baseline)
#endif

extern "C" {

// Operand types of products.
enum DflashProducts : int32_t {
  kFloat32 = 0,
  // Weights in bfloat16, rows in float32.
  kBfloat16Weights = 1,
  // Rows are rounded to bfloat16 too if the processor multiplies it; otherwise as above.
  kBfloat16 = 2,
};

// Weights of a layer. Matrices are packed in panels of 32 columns: [panels][depth][32] in float32,
// [panels][depth / 2][32][2] in bfloat16, with an odd depth zero-padded. Gate and up share panels,
// 16 columns each. Norms and biases are float32, or null if absent.
struct DflashLayer {
  const void *qkv, *output, *gate_up, *down;
  const float *qkv_bias, *output_bias, *gate_up_bias, *down_bias;
  const float *input_norm, *post_norm, *query_norm, *key_norm;
  // Sliding window in tokens, including the query's own; 0 for full attention.
  int64_t window;
};

struct DflashShape {
  int64_t hidden, inner, query_heads, kv_heads, head_dim;
  float eps;
  DflashProducts products;
  // Whether attention is causal; otherwise a query sees all keys of its sequence.
  int32_t causal;
};

// A layer's cache: keys [kv heads][head dim][key_stride], values [kv heads][positions][value_stride].
struct DflashKeysValues {
  float *keys, *values;
};

// New rows of a sequence with `start` cached positions.
struct DflashSequence {
  int64_t rows, start;
  // Capacity of the cache in positions, and its strides.
  int64_t positions, key_stride, value_stride;
  // One per layer.
  const DflashKeysValues* held;
  // Rotary tables for the rows' positions, [rows][head_dim / 2].
  const float *cosine, *sine;
};

// A pass of the rows of several sequences, concatenated, through all layers.
struct DflashPass {
  const DflashShape* shape;
  const DflashLayer* layers;
  const DflashSequence* sequences;
  int64_t layer_count, sequence_count, rows;
  // Number of leading rows whose output is not needed; only their keys and values are written.
  int64_t unread;
  // The residual stream [rows][hidden], in and out.
  float* x;
  // Wanted hidden states (0 for the input rows, k for the output of layer k) and their destination
  // [rows][aux_layer_count][hidden].
  const uint32_t* aux_layer_ids;
  int64_t aux_layer_count;
  float* aux_states;
  // Weight of the norm applied in place to the last layer's output, or null.
  const float* final_norm;
  float* scratch;
};

// Computes keys and values of accepted context for all layers.
struct DflashContext {
  const DflashShape* shape;
  const DflashLayer* layers;
  const DflashSequence* sequences;
  int64_t layer_count, sequence_count, rows, features;
  // [rows][features], followed by fc (packed, [features] to [hidden]) and its norm.
  const float* x;
  const void* fc;
  const float* norm;
  float* scratch;
};

// Logits of rows, their argmax, or both.
struct DflashHead {
  const void* matrix;
  int64_t hidden, outputs, rows;
  // [rows][hidden]
  const float* x;
  // Weight of the norm before the matrix, or null.
  const float* norm;
  float eps;
  DflashProducts products;
  // [rows][outputs], or null.
  float* logits;
  // [rows], or null.
  int64_t* best;
  float* scratch;
};

// Adds the products of many rows to `out`.
struct DflashProduct {
  const void* matrix;
  // Size of the matrix, and whether gate and up share its panels.
  int64_t depth, outputs, panels, gated, rows;
  // [rows][depth]
  const float* x;
  DflashProducts products;
  // [rows][outputs], added to.
  float* out;
  // [rows, padded to 32][depth, padded to 2]
  float* scratch;
};

// Scratch memory, in floats, for a call with up to `threads` threads.
int64_t dflash_decode_pass_scratch(const DflashPass* pass, int64_t threads);
int64_t dflash_decode_context_scratch(const DflashContext* context, int64_t threads);
int64_t dflash_decode_head_scratch(const DflashHead* head, int64_t threads);

// Barrier of a team's threads. If a thread was descheduled, the team is dissolved at the next
// barrier and the first thread continues alone.
struct DflashBarrier {
  alignas(64) uint32_t arrived;
  alignas(64) uint32_t turn;
  // Set when a wait was so long that a thread must have been descheduled.
  alignas(64) uint32_t late;
  // Threads that continue.
  uint32_t threads;
  // Start of the pass, ns.
  int64_t began;
};

// Returns how many threads continue; those with higher numbers return.
int64_t dflash_barrier_wait(DflashBarrier* barrier);

#define DFLASH_DECLARE(level)                                                                    \
  void dflash_decode_pass_##level(const DflashPass*, int64_t, int64_t, DflashBarrier*);          \
  void dflash_decode_context_##level(const DflashContext*, int64_t, int64_t, DflashBarrier*);    \
  void dflash_decode_head_##level(const DflashHead*, int64_t, int64_t, DflashBarrier*);          \
  int64_t dflash_product_takes_##level(const DflashProduct*);                                    \
  void dflash_decode_product_##level(const DflashProduct*, int64_t, int64_t, DflashBarrier*);
DFLASH_DECODE_LEVELS(DFLASH_DECLARE)
#undef DFLASH_DECLARE
}
