// The few-row passes of decoding on a CPU: what `decode.rs` hands over, and what the copies of
// `decode.cpp`, one for each instruction set, share with `decode_team.cpp`.
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

// What products take.
enum DflashProducts : int32_t {
  kFloat32 = 0,
  // Weights in bfloat16, rows in float32.
  kBfloat16Weights = 1,
  // Rows rounded to bfloat16 as well, where the processor multiplies these; else as above.
  kBfloat16 = 2,
};

// Weights of a layer. Matrices are packed in panels of 32 columns: [panels][depth][32] in float32,
// [panels][depth / 2][32][2] in bfloat16, an odd depth filled up with zeros. Gate and up share panels,
// 16 columns each. Norms and biases are float32; null where there is none.
struct DflashLayer {
  const void *qkv, *output, *gate_up, *down;
  const float *qkv_bias, *output_bias, *gate_up_bias, *down_bias;
  const float *input_norm, *post_norm, *query_norm, *key_norm;
  // Tokens that a query sees, itself included; 0 for all.
  int64_t window;
};

struct DflashShape {
  int64_t hidden, inner, query_heads, kv_heads, head_dim;
  float eps;
  DflashProducts products;
  // Whether a query sees no key behind its own position; where not, all of its sequence's.
  int32_t causal;
};

// A layer's cache: keys [kv heads][head dim][key_stride], values [kv heads][positions][value_stride].
struct DflashKeysValues {
  float *keys, *values;
};

// New rows behind the `start` cached positions of a sequence.
struct DflashSequence {
  int64_t rows, start;
  // Positions that its cache holds, and how they lie in memory.
  int64_t positions, key_stride, value_stride;
  // One for each layer.
  const DflashKeysValues* held;
  // Of the rows' positions, [rows][head_dim / 2].
  const float *cosine, *sine;
};

// The rows of some sequences, one after the other, through all layers.
struct DflashPass {
  const DflashShape* shape;
  const DflashLayer* layers;
  const DflashSequence* sequences;
  int64_t layer_count, sequence_count, rows;
  // Rows from the first on whose output nobody reads; their keys and values are written.
  int64_t unread;
  // The residual stream [rows][hidden], in and out.
  float* x;
  // States that are wanted: 0 for the rows as they come, k for the output of layer k; and where they
  // go [rows][aux_layer_count][hidden].
  const uint32_t* aux_layer_ids;
  int64_t aux_layer_count;
  float* aux_states;
  // Norm of the last layer's output, in place; or null.
  const float* final_norm;
  float* scratch;
};

// Keys and values of accepted context, for all layers at once.
struct DflashContext {
  const DflashShape* shape;
  const DflashLayer* layers;
  const DflashSequence* sequences;
  int64_t layer_count, sequence_count, rows, features;
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
  DflashProducts products;
  // [rows][outputs], or null.
  float* logits;
  // [rows], or null.
  int64_t* best;
  float* scratch;
};

// Many rows, and what they are added to.
struct DflashProduct {
  const void* matrix;
  // Inputs, outputs and panels of the matrix, and whether gate and up share the panels.
  int64_t depth, outputs, panels, gated, rows;
  // [rows][depth]
  const float* x;
  DflashProducts products;
  // [rows][outputs], to which the products are added.
  float* out;
  // [rows filled up to 32][depth filled up to 2]
  float* scratch;
};

// Floats of scratch memory that a call takes with so many threads, or fewer.
int64_t dflash_decode_pass_scratch(const DflashPass* pass, int64_t threads);
int64_t dflash_decode_context_scratch(const DflashContext* context, int64_t threads);
int64_t dflash_decode_head_scratch(const DflashHead* head, int64_t threads);

// Where the threads of a team wait for each other. Where one of them was kept from running, the team
// is dissolved there, and the first thread goes on alone.
struct DflashBarrier {
  alignas(64) uint32_t arrived;
  alignas(64) uint32_t turn;
  // Set when a wait took so long that a thread was not running.
  alignas(64) uint32_t late;
  // Threads that go on.
  uint32_t threads;
  // When the pass began, ns.
  int64_t began;
};

// Returns how many threads go on: those beyond have nothing more to do.
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
