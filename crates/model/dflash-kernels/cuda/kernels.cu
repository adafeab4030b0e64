// Elementwise kernels of the draft's training pass on a GPU, each one sweep over memory, in float32
// or in bfloat16 with float32 arithmetic. `src/gpu.rs` fills the structs below, field by field.
//
// NVRTC compiles this file on first use, without headers. `cpp/emulation.cpp` compiles it for the
// CPU, thread by thread, so tests run the same code without a GPU.
//
// Sums have a fixed order: a thread adds in order of its columns, threads are added as a tree, and
// row sums use one partial sum per block. There are no atomics.
//
// A kernel's template parameters are the type in memory and the elements a thread moves at once.
#ifdef DFLASH_EMULATION
#include "../cpp/emulation.h"
#else
extern __shared__ float dynamic_shared[];
#endif

typedef long long int64;

// Maximum attention calls to merge: the blocks' own, and one per depth of the halves.
constexpr int kMostParts = 33;

struct RmsNorm {
  const void *x, *weight;
  void* y;
  int64 dim;
  float eps;
};

struct RmsNormBackward {
  // Overwritten with the gradient of x.
  void* dy;
  const void *x, *weight;
  // Added to the gradient; null for none.
  const void* residual;
  // Recomputed norm; null if not wanted.
  void* again;
  // The weight's gradient per block, [blocks][dim].
  float* partial;
  int64 rows, dim;
  float eps;
};

// Adds the columns of partial [blocks][dim] to first [first_dim] and the remaining ones to second.
struct ColumnSums {
  const float* partial;
  float *first, *second;
  int64 blocks, dim, first_dim;
};

// Rows hold query heads, key heads and as many value heads; stride is the distance between rows.
// Weights are null if heads are only rotated. Keys and values are written with any row and head
// stride; if value is null, values stay where they are.
struct Heads {
  const void *x, *query_weight, *key_weight;
  const float *cosine, *sine;
  void *query, *key, *value;
  int64 rows, stride, key_row, key_head, value_row, value_head;
  int query_heads, key_heads, dim;
  float eps;
};

struct HeadsBackward {
  // Overwritten with its gradient, values included.
  void* x;
  const void *query_weight, *key_weight;
  const float *cosine, *sine, *dquery, *dkey, *dvalue;
  // The weights' gradients per block, [blocks][query weight (if any), then key weight].
  float* partial;
  int64 rows, stride;
  int query_heads, key_heads, dim;
  float eps;
};

// gate_up is [rows][2 * dim].
struct Swiglu {
  const void* gate_up;
  void* y;
  int64 dim;
};

// gate_up is overwritten with its gradient, dy with the recomputed value.
struct SwigluBackward {
  void *dy, *gate_up;
  int64 dim;
};

struct CrossEntropy {
  const void* logits;
  const int64* labels;
  // Per row: cross-entropy, 1 where the argmax is the label, log of the sum of exponentials.
  float *ce, *correct, *lse;
  int64 dim;
};

// Overwrites logits with weight * (softmax - one-hot label).
struct CrossEntropyGradient {
  void* logits;
  const int64* labels;
  const float *weight, *lse;
  int64 dim;
};

// Gathers rows. Widths and strides are in units of what a thread copies.
struct Gather {
  // Up to three tensors [slots][slot_width]; the listed rows are copied to consecutive target rows.
  const void* slots[3];
  void* slots_to[3];
  int64 slot_stride[3];
  // [heads][slots], or null; copied to one matrix [heads][its rows] per call.
  const float* lse;
  float* lse_to;
  // Keys and values: listed rows below `context` come from the context, the others from the blocks.
  const void *context_keys[2], *own_keys[2];
  void* keys_to[2];
  int64 context_stride[2], own_stride[2];
  const int *slot_list, *key_list;
  int64 slot_rows, slot_count, context;
  int tensors, slot_width, key_width, heads, calls;
  // First row of each call in the list, then the end of the last.
  int first[kMostParts + 1];
};

// Part 0 covers all slots. Part p > 0 has the slots of block b starting at row places[b * (parts -
// 1) + p - 1], or none if negative.
struct Merge {
  const void* out[kMostParts];
  // [heads][rows of the part]
  const float* lse[kMostParts];
  int rows[kMostParts];
  const int* places;
  void* merged;
  float* merged_lse;
  int64 slots;
  int parts, heads, dim, block;
};

struct Sum {
  const void *dq[kMostParts], *dk[kMostParts], *dv[kMostParts];
  // Slots as in Merge. Key row r sums the (part, row) pairs from key_first[r] to key_first[r + 1].
  const int *places, *key_first, *key_places;
  float *dq_to, *dk_to, *dv_to;
  int64 slots;
  int parts, query_width, key_width, block;
};

namespace {

struct Bf16 {
  unsigned short bits;
};

__device__ inline float wide(float x) { return x; }
__device__ inline float wide(Bf16 x) {
  return __uint_as_float(static_cast<unsigned>(x.bits) << 16);
}

__device__ inline void narrow(float x, float* to) { *to = x; }
__device__ inline void narrow(float x, Bf16* to) {
  const unsigned bits = __float_as_uint(x);
  const bool is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
  const unsigned even = bits + 0x7fffu + ((bits >> 16) & 1u);
  to->bits = static_cast<unsigned short>(is_nan ? (bits >> 16) | 0x40u : even >> 16);
}

// The unit that a thread moves at once.
template <typename T, int N>
struct alignas(sizeof(T) * N) Pack {
  T x[N];
};

template <typename T, int N>
__device__ inline void load(const T* from, float (&x)[N]) {
  const Pack<T, N> pack = *reinterpret_cast<const Pack<T, N>*>(from);
#pragma unroll
  for (int i = 0; i < N; ++i) x[i] = wide(pack.x[i]);
}

template <typename T, int N>
__device__ inline void store(T* to, const float (&x)[N]) {
  Pack<T, N> pack;
#pragma unroll
  for (int i = 0; i < N; ++i) narrow(x[i], &pack.x[i]);
  *reinterpret_cast<Pack<T, N>*>(to) = pack;
}

__device__ inline int thread() { return static_cast<int>(threadIdx.x); }
__device__ inline int threads() { return static_cast<int>(blockDim.x); }
__device__ inline int64 block() { return static_cast<int64>(blockIdx.x); }
__device__ inline int64 blocks() { return static_cast<int64>(gridDim.x); }

__device__ inline float warp_sum(float x) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2)
    x += __shfl_xor_sync(0xffffffffu, x, distance);
  return x;
}

// Floats of dynamic_shared used by block sums.
constexpr int kScratch = 3 * 32;

// Every thread gets the block's sums.
template <int N>
__device__ inline void block_sums(float (&x)[N]) {
  const int warps = threads() / 32;
#pragma unroll
  for (int i = 0; i < N; ++i) x[i] = warp_sum(x[i]);
  // Wait until the previous sums have been read.
  __syncthreads();
#pragma unroll
  for (int i = 0; i < N; ++i)
    if (thread() % 32 == 0) dynamic_shared[i * 32 + thread() / 32] = x[i];
  __syncthreads();
#pragma unroll
  for (int i = 0; i < N; ++i) {
    x[i] = 0.0f;
    for (int warp = 0; warp < warps; ++warp) x[i] += dynamic_shared[i * 32 + warp];
  }
}

// One block per row.
template <typename T, int N>
__device__ inline void rms_norm(const RmsNorm& a) {
  const T* x = static_cast<const T*>(a.x) + block() * a.dim;
  const T* weight = static_cast<const T*>(a.weight);
  T* y = static_cast<T*>(a.y) + block() * a.dim;
  float square[1] = {0.0f}, in[N], w[N];
  for (int64 d = thread() * N; d < a.dim; d += threads() * N) {
    load(x + d, in);
    for (int i = 0; i < N; ++i) square[0] += in[i] * in[i];
  }
  block_sums(square);
  const float scale = rsqrtf(square[0] / static_cast<float>(a.dim) + a.eps);
  for (int64 d = thread() * N; d < a.dim; d += threads() * N) {
    load(x + d, in);
    load(weight + d, w);
    for (int i = 0; i < N; ++i) in[i] *= scale * w[i];
    store(y + d, in);
  }
}

// Each block takes every blocks()-th row.
template <typename T, int N>
__device__ inline void rms_norm_backward(const RmsNormBackward& a) {
  const T* weight = static_cast<const T*>(a.weight);
  // Each thread owns its columns in all rows.
  float* dweight = dynamic_shared + kScratch;
  for (int64 d = thread() * N; d < a.dim; d += threads() * N)
    for (int i = 0; i < N; ++i) dweight[d + i] = 0.0f;
  for (int64 row = block(); row < a.rows; row += blocks()) {
    T* dy = static_cast<T*>(a.dy) + row * a.dim;
    const T* x = static_cast<const T*>(a.x) + row * a.dim;
    float sums[2] = {0.0f, 0.0f}, slope[N], in[N], w[N];
    for (int64 d = thread() * N; d < a.dim; d += threads() * N) {
      load(dy + d, slope);
      load(x + d, in);
      load(weight + d, w);
      for (int i = 0; i < N; ++i) {
        sums[0] += in[i] * in[i];
        sums[1] += slope[i] * w[i] * in[i];
      }
    }
    block_sums(sums);
    const float scale = rsqrtf(sums[0] / static_cast<float>(a.dim) + a.eps);
    const float pull = scale * scale * sums[1] / static_cast<float>(a.dim);
    for (int64 d = thread() * N; d < a.dim; d += threads() * N) {
      load(dy + d, slope);
      load(x + d, in);
      load(weight + d, w);
      for (int i = 0; i < N; ++i) {
        dweight[d + i] += slope[i] * in[i] * scale;
        slope[i] = scale * (slope[i] * w[i] - in[i] * pull);
      }
      if (a.residual != nullptr) {
        float beside[N];
        load(static_cast<const T*>(a.residual) + row * a.dim + d, beside);
        for (int i = 0; i < N; ++i) slope[i] += beside[i];
      }
      store(dy + d, slope);
      if (a.again != nullptr) {
        for (int i = 0; i < N; ++i) in[i] *= scale * w[i];
        store(static_cast<T*>(a.again) + row * a.dim + d, in);
      }
    }
  }
  for (int64 d = thread() * N; d < a.dim; d += threads() * N)
    for (int i = 0; i < N; ++i) a.partial[block() * a.dim + d + i] = dweight[d + i];
}

// Each block takes 32 columns; its warps split the rows.
__device__ inline void column_sums(const ColumnSums& a) {
  const int lane = thread() % 32, warp = thread() / 32, warps = threads() / 32;
  const int64 d = block() * 32 + lane;
  float sum = 0.0f;
  if (d < a.dim)
    for (int64 row = warp; row < a.blocks; row += warps) sum += a.partial[row * a.dim + d];
  dynamic_shared[thread()] = sum;
  __syncthreads();
  if (warp > 0 || d >= a.dim) return;
  for (int other = 1; other < warps; ++other) sum += dynamic_shared[other * 32 + lane];
  float* total = d < a.first_dim ? a.first + d : a.second + (d - a.first_dim);
  *total += sum;
}

// One warp per head of a row. Lanes take elements of both halves in pairs.
template <typename T, int N>
__device__ inline void heads(const Heads& a) {
  const int copied = a.value != nullptr ? a.key_heads : 0;
  const int heads = a.query_heads + a.key_heads + copied, half = a.dim / 2, lane = thread() % 32;
  const int64 item = block() * (threads() / 32) + thread() / 32;
  if (item >= a.rows * heads) return;
  const int64 row = item / heads;
  const int head = static_cast<int>(item - row * heads);
  const int key = head - a.query_heads, value = key - a.key_heads;
  const T* x = static_cast<const T*>(a.x) + row * a.stride + head * a.dim;
  float low[N], high[N], w[N], c[N], s[N];
  if (value >= 0) {
    T* y = static_cast<T*>(a.value) + row * a.value_row + value * a.value_head;
    for (int d = lane * N; d < a.dim; d += 32 * N) {
      load(x + d, low);
      store(y + d, low);
    }
    return;
  }
  const T* weight = static_cast<const T*>(key < 0 ? a.query_weight : a.key_weight);
  T* y = key < 0 ? static_cast<T*>(a.query) + (row * a.query_heads + head) * a.dim
                 : static_cast<T*>(a.key) + row * a.key_row + key * a.key_head;
  float scale = 1.0f;
  if (weight != nullptr) {
    float square = 0.0f;
    for (int d = lane * N; d < half; d += 32 * N) {
      load(x + d, low);
      load(x + d + half, high);
      for (int i = 0; i < N; ++i) square += low[i] * low[i] + high[i] * high[i];
    }
    scale = rsqrtf(warp_sum(square) / static_cast<float>(a.dim) + a.eps);
  }
  for (int d = lane * N; d < half; d += 32 * N) {
    load(x + d, low);
    load(x + d + half, high);
    if (weight != nullptr) {
      load(weight + d, w);
      for (int i = 0; i < N; ++i) low[i] *= scale * w[i];
      load(weight + d + half, w);
      for (int i = 0; i < N; ++i) high[i] *= scale * w[i];
    }
    load(a.cosine + row * half + d, c);
    load(a.sine + row * half + d, s);
    for (int i = 0; i < N; ++i) {
      const float turned = low[i] * c[i] - high[i] * s[i];
      high[i] = high[i] * c[i] + low[i] * s[i];
      low[i] = turned;
    }
    store(y + d, low);
    store(y + d + half, high);
  }
}

// Gradient of a normed and rotated head, in place of x; the weight's part is added to dweight.
template <typename T, int N>
__device__ inline void head_backward(const HeadsBackward& a, T* x, const T* weight,
                                     const float* dy, int64 row, float* dweight) {
  const int half = a.dim / 2, lane = thread() % 32;
  const float *cosine = a.cosine + row * half, *sine = a.sine + row * half;
  float square = 0.0f, dot = 0.0f;
  float low[N], high[N], w[2][N], c[N], s[N], dlow[N], dhigh[N];
  auto turn_back = [&](int d) {
    load(x + d, low);
    load(x + d + half, high);
    load(weight + d, w[0]);
    load(weight + d + half, w[1]);
    load(cosine + d, c);
    load(sine + d, s);
    load(dy + d, dlow);
    load(dy + d + half, dhigh);
    for (int i = 0; i < N; ++i) {
      const float back = dlow[i] * c[i] + dhigh[i] * s[i];
      dhigh[i] = dhigh[i] * c[i] - dlow[i] * s[i];
      dlow[i] = back;
    }
  };
  for (int d = lane * N; d < half; d += 32 * N) {
    turn_back(d);
    for (int i = 0; i < N; ++i) {
      square += low[i] * low[i] + high[i] * high[i];
      dot += dlow[i] * w[0][i] * low[i] + dhigh[i] * w[1][i] * high[i];
    }
  }
  const float scale = rsqrtf(warp_sum(square) / static_cast<float>(a.dim) + a.eps);
  const float pull = scale * scale * warp_sum(dot) / static_cast<float>(a.dim);
  for (int d = lane * N; d < half; d += 32 * N) {
    turn_back(d);
    for (int i = 0; i < N; ++i) {
      dweight[d + i] += dlow[i] * low[i] * scale;
      dweight[d + half + i] += dhigh[i] * high[i] * scale;
      low[i] = scale * (dlow[i] * w[0][i] - low[i] * pull);
      high[i] = scale * (dhigh[i] * w[1][i] - high[i] * pull);
    }
    store(x + d, low);
    store(x + d + half, high);
  }
}

// Warps take the heads of all rows in turn.
template <typename T, int N>
__device__ inline void heads_backward(const HeadsBackward& a) {
  const int heads = a.query_heads + 2 * a.key_heads, warps = threads() / 32;
  const int lane = thread() % 32, warp = thread() / 32;
  const int keys = a.query_heads > 0 ? a.dim : 0, width = keys + a.dim;
  float* dweight = dynamic_shared + warp * width;
  for (int d = lane; d < width; d += 32) dweight[d] = 0.0f;
  // Other lanes have cleared what this lane adds to.
  __syncthreads();
  for (int64 item = block() * warps + warp; item < a.rows * heads; item += blocks() * warps) {
    const int64 row = item / heads;
    const int head = static_cast<int>(item - row * heads);
    T* x = static_cast<T*>(a.x) + row * a.stride + head * a.dim;
    const int key = head - a.query_heads, value = key - a.key_heads;
    if (key < 0) {
      const float* dy = a.dquery + (row * a.query_heads + head) * a.dim;
      head_backward<T, N>(a, x, static_cast<const T*>(a.query_weight), dy, row, dweight);
    } else if (value < 0) {
      const float* dy = a.dkey + (row * a.key_heads + key) * a.dim;
      head_backward<T, N>(a, x, static_cast<const T*>(a.key_weight), dy, row, dweight + keys);
    } else {
      const float* dy = a.dvalue + (row * a.key_heads + value) * a.dim;
      for (int d = lane * N; d < a.dim; d += 32 * N) {
        float slope[N];
        load(dy + d, slope);
        store(x + d, slope);
      }
    }
  }
  __syncthreads();
  for (int d = thread(); d < width; d += threads()) {
    float sum = 0.0f;
    for (int other = 0; other < warps; ++other) sum += dynamic_shared[other * width + d];
    a.partial[block() * width + d] = sum;
  }
}

__device__ inline float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

// One block per row.
template <typename T, int N>
__device__ inline void swiglu(const Swiglu& a) {
  const T *gate = static_cast<const T*>(a.gate_up) + block() * 2 * a.dim, *up = gate + a.dim;
  T* y = static_cast<T*>(a.y) + block() * a.dim;
  float g[N], u[N];
  for (int64 d = thread() * N; d < a.dim; d += threads() * N) {
    load(gate + d, g);
    load(up + d, u);
    for (int i = 0; i < N; ++i) u[i] *= g[i] * sigmoid(g[i]);
    store(y + d, u);
  }
}

// One block per row.
template <typename T, int N>
__device__ inline void swiglu_backward(const SwigluBackward& a) {
  T *gate = static_cast<T*>(a.gate_up) + block() * 2 * a.dim, *up = gate + a.dim;
  T* dy = static_cast<T*>(a.dy) + block() * a.dim;
  float g[N], u[N], slope[N];
  for (int64 d = thread() * N; d < a.dim; d += threads() * N) {
    load(gate + d, g);
    load(up + d, u);
    load(dy + d, slope);
    for (int i = 0; i < N; ++i) {
      const float share = sigmoid(g[i]), silu = g[i] * share, upstream = slope[i];
      slope[i] = silu * u[i];
      g[i] = upstream * u[i] * (share + silu * (1.0f - share));
      u[i] = upstream * silu;
    }
    store(dy + d, slope);
    store(up + d, u);
    store(gate + d, g);
  }
}

// Running softmax: sum of exp(x - top), and the first column `at` that has the maximum `top`.
struct Exponentials {
  float top, sum;
  int at;
};

__device__ inline Exponentials joined(const Exponentials& a, const Exponentials& b) {
  const bool b_leads = b.top > a.top || (b.top == a.top && b.at < a.at);
  const float top = b_leads ? b.top : a.top;
  return {top, a.sum * expf(a.top - top) + b.sum * expf(b.top - top), b_leads ? b.at : a.at};
}

// One block per row.
template <typename T, int N>
__device__ inline void cross_entropy(const CrossEntropy& a) {
  const T* logits = static_cast<const T*>(a.logits) + block() * a.dim;
  // The most negative finite number, so that logits of minus infinity add 0 and not NaN.
  Exponentials all = {-3.402823466e38f, 0.0f, 0x7fffffff};
  float x[N];
  for (int64 d = thread() * N; d < a.dim; d += threads() * N) {
    load(logits + d, x);
    float top = all.top;
    for (int i = 0; i < N; ++i)
      if (x[i] > top) {
        top = x[i];
        all.at = static_cast<int>(d) + i;
      }
    // A NaN is never the maximum, but makes the sum and so the loss NaN.
    all.sum *= expf(all.top - top);
    for (int i = 0; i < N; ++i) all.sum += expf(x[i] - top);
    all.top = top;
  }
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2)
    all = joined(all, {__shfl_xor_sync(0xffffffffu, all.top, distance),
                       __shfl_xor_sync(0xffffffffu, all.sum, distance),
                       __shfl_xor_sync(0xffffffffu, all.at, distance)});
  const int warp = thread() / 32, warps = threads() / 32;
  if (thread() % 32 == 0) {
    dynamic_shared[warp] = all.top;
    dynamic_shared[32 + warp] = all.sum;
    dynamic_shared[64 + warp] = __int_as_float(all.at);
  }
  __syncthreads();
  if (thread() > 0) return;
  for (int other = 1; other < warps; ++other)
    all = joined(all, {dynamic_shared[other], dynamic_shared[32 + other],
                       __float_as_int(dynamic_shared[64 + other])});
  const int64 label = a.labels[block()];
  const float lse = all.top + logf(all.sum);
  // For a label outside the vocabulary nothing is read and the loss is NaN.
  const bool known = label >= 0 && label < a.dim;
  a.ce[block()] = known ? lse - wide(logits[label]) : __int_as_float(0x7fffffff);
  a.correct[block()] = label == all.at ? 1.0f : 0.0f;
  a.lse[block()] = lse;
}

// One block per row.
template <typename T, int N>
__device__ inline void cross_entropy_gradient(const CrossEntropyGradient& a) {
  T* logits = static_cast<T*>(a.logits) + block() * a.dim;
  const float weight = a.weight[block()], lse = a.lse[block()];
  const int64 label = a.labels[block()];
  float x[N];
  for (int64 d = thread() * N; d < a.dim; d += threads() * N) {
    load(logits + d, x);
    for (int i = 0; i < N; ++i)
      x[i] = weight * (expf(x[i] - lse) - (d + i == label ? 1.0f : 0.0f));
    store(logits + d, x);
  }
}

template <typename Unit>
__device__ inline void copy_row(const void* from, void* to, int width) {
  for (int i = thread(); i < width; i += threads())
    static_cast<Unit*>(to)[i] = static_cast<const Unit*>(from)[i];
}

template <typename Unit>
__device__ inline const void* row_of(const void* x, int64 row, int64 stride) {
  return static_cast<const Unit*>(x) + row * stride;
}

template <typename Unit>
__device__ inline void gather_slot(const Gather& a, int64 to) {
  const int64 slot = a.slot_list[to];
  for (int i = 0; i < a.tensors; ++i)
    copy_row<Unit>(row_of<Unit>(a.slots[i], slot, a.slot_stride[i]),
                   static_cast<Unit*>(a.slots_to[i]) + to * a.slot_width, a.slot_width);
  if (a.lse == nullptr) return;
  int call = 0;
  while (to >= a.first[call + 1]) ++call;
  const int64 first = a.first[call], rows = a.first[call + 1] - first;
  for (int head = thread(); head < a.heads; head += threads())
    a.lse_to[first * a.heads + head * rows + to - first] = a.lse[head * a.slot_count + slot];
}

// One block per row: first the slots, then keys and values.
template <typename Unit>
__device__ inline void gather(const Gather& a) {
  if (block() < a.slot_rows) return gather_slot<Unit>(a, block());
  const int64 to = block() - a.slot_rows, row = a.key_list[to];
  const bool own = row >= a.context;
  for (int i = 0; i < 2; ++i) {
    const void* from = own ? row_of<Unit>(a.own_keys[i], row - a.context, a.own_stride[i])
                           : row_of<Unit>(a.context_keys[i], row, a.context_stride[i]);
    copy_row<Unit>(from, static_cast<Unit*>(a.keys_to[i]) + to * a.key_width, a.key_width);
  }
}

// A slot's row in a part; negative if the part does not have it.
__device__ inline int64 place_in(const int* places, int64 slot, int part, int parts, int size) {
  if (part == 0) return slot;
  const int place = places[slot / size * (parts - 1) + part - 1];
  return place < 0 ? -1 : place + slot % size;
}

// One block per slot. dynamic_shared holds the weights, [heads][parts].
template <typename T, int N>
__device__ inline void merge(const Merge& a) {
  const int64 slot = block();
  for (int head = thread(); head < a.heads; head += threads()) {
    float* shares = dynamic_shared + head * a.parts;
    float top = -3.402823466e38f, sum = 0.0f;
    for (int part = 0; part < a.parts; ++part) {
      const int64 place = place_in(a.places, slot, part, a.parts, a.block);
      if (place < 0) continue;
      shares[part] = a.lse[part][static_cast<int64>(head) * a.rows[part] + place];
      top = fmaxf(top, shares[part]);
    }
    for (int part = 0; part < a.parts; ++part)
      if (place_in(a.places, slot, part, a.parts, a.block) >= 0) sum += expf(shares[part] - top);
    const float total = top + logf(sum);
    for (int part = 0; part < a.parts; ++part) shares[part] = expf(shares[part] - total);
    a.merged_lse[head * a.slots + slot] = total;
  }
  __syncthreads();
  const int width = a.heads * a.dim;
  T* merged = static_cast<T*>(a.merged) + slot * width;
  for (int d = thread() * N; d < width; d += threads() * N) {
    const float* shares = dynamic_shared + d / a.dim * a.parts;
    float all[N] = {}, x[N];
    for (int part = 0; part < a.parts; ++part) {
      const int64 place = place_in(a.places, slot, part, a.parts, a.block);
      if (place < 0) continue;
      load(static_cast<const T*>(a.out[part]) + place * width + d, x);
      for (int i = 0; i < N; ++i) all[i] += x[i] * shares[part];
    }
    store(merged + d, all);
  }
}

template <typename T, int N>
__device__ inline void sum_keys(const Sum& a, const void* const* parts, int64 row, float* to) {
  for (int d = thread() * N; d < a.key_width; d += threads() * N) {
    float all[N] = {}, x[N];
    for (int i = a.key_first[row]; i < a.key_first[row + 1]; ++i) {
      const int64 place = a.key_places[2 * i + 1];
      load(static_cast<const T*>(parts[a.key_places[2 * i]]) + place * a.key_width + d, x);
      for (int j = 0; j < N; ++j) all[j] += x[j];
    }
    store(to + row * a.key_width + d, all);
  }
}

// One block per row: first the slots, then keys and values.
template <typename T, int N>
__device__ inline void sum(const Sum& a) {
  if (block() >= a.slots) {
    sum_keys<T, N>(a, a.dk, block() - a.slots, a.dk_to);
    sum_keys<T, N>(a, a.dv, block() - a.slots, a.dv_to);
    return;
  }
  for (int d = thread() * N; d < a.query_width; d += threads() * N) {
    float all[N] = {}, x[N];
    for (int part = 0; part < a.parts; ++part) {
      const int64 place = place_in(a.places, block(), part, a.parts, a.block);
      if (place < 0) continue;
      load(static_cast<const T*>(a.dq[part]) + place * a.query_width + d, x);
      for (int i = 0; i < N; ++i) all[i] += x[i];
    }
    store(a.dq_to + block() * a.query_width + d, all);
  }
}

struct alignas(16) Sixteen {
  unsigned x[4];
};

}  // namespace

// Each kernel's name, struct and body, for units of sixteen bytes and of one element.
#define DFLASH_KINDS(X, name, Args)                  \
  X(name##_bf16x8, Args, (name<Bf16, 8>))            \
  X(name##_bf16x1, Args, (name<Bf16, 1>))            \
  X(name##_f32x4, Args, (name<float, 4>))            \
  X(name##_f32x1, Args, (name<float, 1>))
#define DFLASH_PAIRS(X, name, Args)                  \
  X(name##_bf16x2, Args, (name<Bf16, 2>))            \
  X(name##_bf16x1, Args, (name<Bf16, 1>))            \
  X(name##_f32x2, Args, (name<float, 2>))            \
  X(name##_f32x1, Args, (name<float, 1>))
#define DFLASH_KERNELS(X)                                    \
  DFLASH_KINDS(X, rms_norm, RmsNorm)                         \
  DFLASH_KINDS(X, rms_norm_backward, RmsNormBackward)        \
  DFLASH_PAIRS(X, heads, Heads)                              \
  DFLASH_PAIRS(X, heads_backward, HeadsBackward)             \
  DFLASH_KINDS(X, swiglu, Swiglu)                            \
  DFLASH_KINDS(X, swiglu_backward, SwigluBackward)           \
  DFLASH_KINDS(X, cross_entropy, CrossEntropy)               \
  DFLASH_KINDS(X, cross_entropy_gradient, CrossEntropyGradient) \
  DFLASH_KINDS(X, merge, Merge)                              \
  DFLASH_KINDS(X, sum, Sum)                                  \
  X(column_sums, ColumnSums, (column_sums))                  \
  X(gather_16, Gather, (gather<Sixteen>))                    \
  X(gather_4, Gather, (gather<unsigned>))                    \
  X(gather_2, Gather, (gather<unsigned short>))

// At most 512 threads per block. The struct stays in constant memory so that its arrays can be
// indexed there.
#define DFLASH_DEFINE(name, Args, body)                                            \
  extern "C" __global__ void __launch_bounds__(512)                                \
      dflash_gpu_##name(const __grid_constant__ Args a) {                          \
    body(a);                                                                       \
  }
DFLASH_KERNELS(DFLASH_DEFINE)
