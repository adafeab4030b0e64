// The few-row passes of decoding on a CPU: what `decode.rs` hands over, and what the copies of
// `decode.cpp`, one for each instruction set, share with `decode_team.cpp`.
#pragma once

#include <cstdint>

#if defined(__x86_64__)
#define DFLASH_DECODE_LEVELS(X) X(v4) X(v3) X(baseline)
#else
#define DFLASH_DECODE_LEVELS(X) X(baseline)
#endif

extern "C" {

// Weights of a layer. Matrices are packed [panels][depth][32] in float32 or bfloat16; gate and up
// share panels, 16 columns each. Norms and biases are float32; null where there is none.
struct DflashLayer {
  const void *qkv, *output, *gate_up, *down;
  const float *qkv_bias, *output_bias, *gate_up_bias, *down_bias;
  const float *input_norm, *post_norm, *query_norm, *key_norm;
  // Tokens that a query sees, itself included; 0 for all.
  int64_t window;
  // Keys [kv heads][head dim][key_stride], values [kv heads][positions][value_stride].
  float *keys, *values;
};

struct DflashShape {
  int64_t hidden, inner, query_heads, kv_heads, head_dim;
  float eps;
  // Whether matrices are bfloat16.
  int32_t bf16;
  // Whether a query sees no key behind its own position; where not, all of the call's.
  int32_t causal;
};

// Positions that a cache holds, and how they lie in memory.
struct DflashCacheShape {
  int64_t positions, key_stride, value_stride;
};

// New rows behind `start` cached positions, through all layers.
struct DflashPass {
  const DflashShape* shape;
  const DflashCacheShape* cache;
  const DflashLayer* layers;
  int64_t layer_count, rows, start;
  // [rows][head_dim / 2]
  const float *cosine, *sine;
  // The residual stream [rows][hidden], in and out.
  float* x;
  // For each layer where its output goes [rows][hidden], or null.
  float* const* captures;
  // Norm of the last layer's output, in place; or null.
  const float* final_norm;
  float* scratch;
};

// Keys and values of accepted context, for all layers at once.
struct DflashContext {
  const DflashShape* shape;
  const DflashCacheShape* cache;
  const DflashLayer* layers;
  int64_t layer_count, rows, start, features;
  const float *cosine, *sine;
  // [rows][features] through fc (packed, [features] to [hidden]) and its norm.
  const float* x;
  const void* fc;
  const float* norm;
  float* scratch;
};

// Logits of rows, their largest, or both.
struct DflashHead {
  const void* matrix;
  int64_t hidden, outputs, rows;
  // [rows][hidden]
  const float* x;
  // Weight of the norm before the matrix, or null.
  const float* norm;
  float eps;
  int32_t bf16;
  // [rows][outputs], or null.
  float* logits;
  // [rows], or null.
  int64_t* best;
  float* scratch;
};

// Where the threads of a team wait for each other. Where one of them was kept from running, the team
// is dissolved there, and the first thread goes on alone.
struct DflashBarrier {
  alignas(64) uint32_t arrived;
  alignas(64) uint32_t turn;
  // Set when a wait took so long that a thread was not running.
  alignas(64) uint32_t late;
  // Threads that go on.
  uint32_t threads;
};

// Returns how many threads go on: those beyond have nothing more to do.
int64_t dflash_barrier_wait(DflashBarrier* barrier);

#define DFLASH_DECLARE(level)                                                                    \
  void dflash_decode_pass_##level(const DflashPass*, int64_t, int64_t, DflashBarrier*);          \
  void dflash_decode_context_##level(const DflashContext*, int64_t, int64_t, DflashBarrier*);    \
  void dflash_decode_head_##level(const DflashHead*, int64_t, int64_t, DflashBarrier*);
DFLASH_DECODE_LEVELS(DFLASH_DECLARE)
#undef DFLASH_DECLARE
}
