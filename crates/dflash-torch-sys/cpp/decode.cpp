// A few rows (a token, a block) through a model's layers on a CPU; `src/decode.rs` declares the same
// functions. Compiled once for each instruction set of DFLASH_DECODE_LEVELS, with LEVEL its name.
//
// All threads of a team run the same function and meet at barriers. A matrix is read once whatever
// the rows, 32 outputs at a time. Each output is summed by one thread in the order of the depth, so
// neither the number of threads nor the number of rows changes a bit of any result.
//
// No function of the standard library is called that could be compiled here and linked elsewhere:
// its copy would need this file's instruction set.
#include "decode.h"

#include <cmath>
#include <cstring>

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

#define JOIN_(a, b) a##b
#define JOIN(a, b) JOIN_(a, b)
#define AT_LEVEL(name) JOIN(name, LEVEL)

namespace {

constexpr int64_t kLanes = 16;
constexpr int64_t kPanel = 2 * kLanes;

// Rows whose sums fit into the registers beside a panel's 32 weights.
#if defined(__AVX512F__)
constexpr int kTile = 8;
#elif defined(__AVX2__) || defined(__aarch64__)
constexpr int kTile = 2;
#else
constexpr int kTile = 1;
#endif

typedef float Vec __attribute__((vector_size(64)));
typedef int32_t Ints __attribute__((vector_size(64)));
typedef uint32_t Words __attribute__((vector_size(64)));
typedef uint16_t Halves __attribute__((vector_size(32)));

inline Vec load(const float* p) {
  Vec v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

// bfloat16 is the upper half of a float32.
inline Vec load(const uint16_t* p) {
#if defined(__AVX512F__)
  const __m256i halves = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  // The masked form, because the other one makes GCC warn of its own header.
  return (Vec)((Words)_mm512_maskz_cvtepu16_epi32(0xffff, halves) << 16);
#else
  Halves halves;
  std::memcpy(&halves, p, sizeof halves);
  return (Vec)(__builtin_convertvector(halves, Words) << 16);
#endif
}

inline void store(float* p, Vec v) { std::memcpy(p, &v, sizeof v); }

inline int64_t round_up(int64_t n, int64_t unit) { return (n + unit - 1) / unit * unit; }

// exp to about 1 ulp: 2^n times a polynomial on [-ln2/2, ln2/2] (coefficients: Cephes expf).
inline Vec exponential(Vec x) {
  const Vec low = Vec{} - 87.0f, high = Vec{} + 88.0f;
  x = x < low ? low : x;
  x = x > high ? high : x;
  // Adding 1.5 * 2^23 rounds to the nearest integer.
  const Vec n = (x * 1.44269504f + 12582912.0f) - 12582912.0f;
  const Vec r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  Vec p = Vec{} + 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = (p * r) * r + r + 1.0f;
  return p * (Vec)((__builtin_convertvector(n, Ints) + 127) << 23);
}

struct Share {
  int64_t begin, end;
};

inline Share share(int64_t count, int64_t thread, int64_t threads) {
  return {count * thread / threads, count * (thread + 1) / threads};
}

// Rows of activations.
struct Rows {
  const float* x;
  int64_t stride, count;
};

// Sums over the depth of `tile` rows times 32 columns that lie `stride` apart.
template <int tile, typename Weight>
inline __attribute__((always_inline)) void sums(const Weight* w, int64_t stride, int64_t depth,
                                                const float* x, int64_t x_stride,
                                                Vec (&sum)[tile][2]) {
#pragma GCC unroll 8
  for (int r = 0; r < tile; ++r) sum[r][0] = sum[r][1] = Vec{};
  for (int64_t k = 0; k < depth; ++k) {
    const Vec low = load(w + k * stride), high = load(w + k * stride + kLanes);
#pragma GCC unroll 8
    for (int r = 0; r < tile; ++r) {
      const float factor = x[r * x_stride + k];
      sum[r][0] += factor * low;
      sum[r][1] += factor * high;
    }
  }
}

template <int tile, typename Weight, typename Take>
inline void tile_of(const Weight* w, int64_t stride, int64_t depth, const Rows& rows,
                    int64_t first, const Take& take) {
  Vec sum[tile][2];
  sums<tile>(w, stride, depth, rows.x + first * rows.stride, rows.stride, sum);
  for (int r = 0; r < tile; ++r) take(first + r, sum[r][0], sum[r][1]);
}

// Gives `take` the row and the 32 sums of each row over the depth.
template <typename Weight, typename Take>
inline void product(const Weight* w, int64_t stride, int64_t depth, const Rows& rows,
                    const Take& take) {
  int64_t first = 0;
  for (; first + kTile <= rows.count; first += kTile)
    tile_of<kTile>(w, stride, depth, rows, first, take);
  switch (rows.count - first) {
#define CASE(tile)                                                                  \
  case tile:                                                                        \
    if constexpr (tile < kTile) tile_of<tile>(w, stride, depth, rows, first, take); \
    break;
    CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7)
#undef CASE
    default:
      break;
  }
}

// A thread's share of the panels of a packed matrix.
template <typename Weight, typename Take>
inline void matrix(const void* packed, int64_t depth, Share panels, const Rows& rows,
                   const Take& take) {
  const Weight* w = static_cast<const Weight*>(packed);
  for (int64_t panel = panels.begin; panel < panels.end; ++panel)
    product(w + panel * depth * kPanel, kPanel, depth, rows,
            [&](int64_t row, Vec low, Vec high) { take(panel, row, low, high); });
}

inline float sum_of_squares(const float* x, int64_t dim) {
  float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
  for (int64_t d = 0; d < dim; ++d) sum += x[d] * x[d];
  return sum;
}

inline void norm_row(const float* x, const float* weight, float* y, int64_t dim, float eps) {
  const float scale =
      1.0f / std::sqrt(sum_of_squares(x, dim) / static_cast<float>(dim) + eps);
#pragma omp simd
  for (int64_t d = 0; d < dim; ++d) y[d] = x[d] * scale * weight[d];
}

inline void norm_rows(const float* x, const float* weight, float* y, int64_t rows, int64_t dim,
                      float eps) {
  for (int64_t row = 0; row < rows; ++row)
    norm_row(x + row * dim, weight, y + row * dim, dim, eps);
}

// y = the head normed (where it has a norm) and rotated.
inline void rotate_head(const float* x, const float* norm, const float* cosine, const float* sine,
                        float* y, int64_t dim, float eps) {
  const int64_t half = dim / 2;
  if (norm != nullptr)
    norm_row(x, norm, y, dim, eps);
  else
    std::memcpy(y, x, dim * sizeof(float));
#pragma omp simd
  for (int64_t d = 0; d < half; ++d) {
    const float low = y[d], high = y[d + half];
    y[d] = low * cosine[d] - high * sine[d];
    y[d + half] = high * cosine[d] + low * sine[d];
  }
}

// Adds a panel's sums (and bias) to 32 columns of `y`, of which there may be fewer.
inline void add_panel(float* y, int64_t width, int64_t panel, const float* bias, Vec low,
                      Vec high) {
  const int64_t column = panel * kPanel;
  if (bias != nullptr) {
    low += load(bias + column);
    high += load(bias + column + kLanes);
  }
  if (column + kPanel <= width) {
    store(y + column, load(y + column) + low);
    store(y + column + kLanes, load(y + column + kLanes) + high);
    return;
  }
  float sums[kPanel];
  store(sums, low);
  store(sums + kLanes, high);
  for (int64_t i = 0; column + i < width; ++i) y[column + i] += sums[i];
}

inline void set_panel(float* y, int64_t panel, const float* bias, Vec low, Vec high) {
  const int64_t column = panel * kPanel;
  if (bias != nullptr) {
    low += load(bias + column);
    high += load(bias + column + kLanes);
  }
  store(y + column, low);
  store(y + column + kLanes, high);
}

struct Sizes {
  int64_t query_width, kv_width, qkv, group, inner;
  explicit Sizes(const DflashShape& s)
      : query_width(s.query_heads * s.head_dim),
        kv_width(s.kv_heads * s.head_dim),
        qkv(round_up(query_width + 2 * kv_width, kPanel)),
        group(s.query_heads / s.kv_heads),
        inner(round_up(s.inner, kLanes)) {}
};

// One thread's view of a pass: scratch memory that all share, and its own.
struct Scratch {
  float *qkv, *attended, *activated;
  float *normed = nullptr, *queries = nullptr, *scores = nullptr;
  Scratch(const DflashPass& pass, const Sizes& sizes, int64_t thread) {
    const int64_t rows = pass.rows, dim = pass.shape->head_dim;
    float* next = pass.scratch;
    const auto take = [&](int64_t elements) {
      float* at = next;
      next += round_up(elements, kLanes);
      return at;
    };
    qkv = take(rows * sizes.qkv);
    attended = take(rows * sizes.query_width);
    activated = take(rows * sizes.inner);
    for (int64_t t = 0; t <= thread; ++t) {
      normed = take(rows * pass.shape->hidden);
      queries = take(rows * sizes.group * dim);
      scores = take(kTile * pass.cache->key_stride);
    }
  }
};

// Writes the keys and values of new rows into a layer's cache, for one key/value head.
void write_kv(const DflashShape& shape, const DflashCacheShape& cache, const DflashLayer& layer,
              int64_t head, const float* kv, int64_t kv_stride, int64_t rows, int64_t start,
              const float* cosine, const float* sine, float* key) {
  const int64_t dim = shape.head_dim, half = dim / 2;
  float* keys = layer.keys + head * dim * cache.key_stride;
  float* values = layer.values + head * cache.positions * cache.value_stride;
  for (int64_t row = 0; row < rows; ++row) {
    const float* in = kv + row * kv_stride + head * dim;
    rotate_head(in, layer.key_norm, cosine + row * half, sine + row * half, key, dim, shape.eps);
    for (int64_t d = 0; d < dim; ++d) keys[d * cache.key_stride + start + row] = key[d];
    std::memcpy(values + (start + row) * cache.value_stride, in + shape.kv_heads * dim,
                dim * sizeof(float));
  }
}

// The keys that the query of a row sees.
inline Share visible(const DflashPass& pass, const DflashLayer& layer, int64_t row) {
  const int64_t position = pass.start + row;
  const int64_t first = layer.window > 0 ? position + 1 - layer.window : 0;
  const bool causal = pass.shape->causal != 0 || layer.window > 0;
  return {first > 0 ? first : 0, causal ? position + 1 : pass.start + pass.rows};
}

// scores := softmax(scores) over the keys that are seen, 0 for the others of `all`. `scores` begins at
// all.begin.
inline void softmax(float* scores, Share seen, Share all) {
  float* const first = scores + (seen.begin - all.begin);
  const int64_t count = seen.end - seen.begin;
  float maximum = first[0];
#pragma omp simd reduction(max : maximum)
  for (int64_t i = 0; i < count; ++i) maximum = maximum > first[i] ? maximum : first[i];
  for (int64_t i = 0; i < seen.begin - all.begin; ++i) scores[i] = 0.0f;
  // Whole vectors: what they take of the keys behind is set to 0 afterwards.
  for (int64_t i = 0; i < count; i += kLanes)
    store(first + i, exponential(load(first + i) - maximum));
  for (int64_t i = count; i < round_up(count, kLanes); ++i) first[i] = 0.0f;
  for (int64_t i = seen.end - all.begin; i < all.end - all.begin; ++i) scores[i] = 0.0f;
  Vec sums{};
  for (int64_t i = 0; i < count; i += kLanes) sums += load(first + i);
  float sum = 0.0f;
  for (int64_t lane = 0; lane < kLanes; ++lane) sum += sums[lane];
  const float scale = 1.0f / sum;
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) first[i] *= scale;
}

// Attention of the queries [first, first + count) of a key/value head; a row has `group` of them.
void attend_tile(const DflashPass& pass, const Sizes& sizes, const DflashLayer& layer,
                 const Scratch& scratch, int64_t head, int64_t first, int64_t count) {
  const DflashShape& shape = *pass.shape;
  const DflashCacheShape& cache = *pass.cache;
  const int64_t dim = shape.head_dim, stride = cache.key_stride;
  const Share early = visible(pass, layer, first / sizes.group);
  const Share late = visible(pass, layer, (first + count - 1) / sizes.group);
  const Share all{early.begin, late.end};
  const float* keys = layer.keys + head * dim * stride;
  const Rows queries{scratch.queries + first * dim, dim, count};
  for (int64_t key = all.begin; key < all.end; key += kPanel)
    product(keys + key, stride, dim, queries, [&](int64_t query, Vec low, Vec high) {
      float* out = scratch.scores + query * stride + (key - all.begin);
      store(out, low);
      store(out + kLanes, high);
    });
  for (int64_t query = 0; query < count; ++query)
    softmax(scratch.scores + query * stride, visible(pass, layer, (first + query) / sizes.group),
            all);
  const float* values =
      layer.values + (head * cache.positions + all.begin) * cache.value_stride;
  const Rows shares{scratch.scores, stride, count};
  for (int64_t d = 0; d < dim; d += kPanel)
    product(values + d, cache.value_stride, all.end - all.begin, shares,
            [&](int64_t query, Vec low, Vec high) {
              const int64_t row = (first + query) / sizes.group;
              const int64_t query_head = head * sizes.group + (first + query) % sizes.group;
              float* out = scratch.attended + row * sizes.query_width + query_head * dim + d;
              float sums[kPanel];
              store(sums, low);
              store(sums + kLanes, high);
              const int64_t width = dim - d < kPanel ? dim - d : kPanel;
              std::memcpy(out, sums, width * sizeof(float));
            });
}

// Writes a key/value head's new keys and values, and attends with its group of queries.
void attend_head(const DflashPass& pass, const Sizes& sizes, const DflashLayer& layer,
                 const Scratch& scratch, int64_t head) {
  const DflashShape& shape = *pass.shape;
  const int64_t dim = shape.head_dim, half = dim / 2;
  write_kv(shape, *pass.cache, layer, head, scratch.qkv + sizes.query_width, sizes.qkv, pass.rows,
           pass.start, pass.cosine, pass.sine, scratch.queries);
  const float scale = 1.0f / std::sqrt(static_cast<float>(dim));
  for (int64_t row = 0; row < pass.rows; ++row)
    for (int64_t member = 0; member < sizes.group; ++member) {
      const float* in = scratch.qkv + row * sizes.qkv + (head * sizes.group + member) * dim;
      float* query = scratch.queries + (row * sizes.group + member) * dim;
      rotate_head(in, layer.query_norm, pass.cosine + row * half, pass.sine + row * half, query,
                  dim, shape.eps);
#pragma omp simd
      for (int64_t d = 0; d < dim; ++d) query[d] *= scale;
    }
  const int64_t queries = pass.rows * sizes.group;
  for (int64_t first = 0; first < queries; first += kTile) {
    const int64_t rest = queries - first;
    attend_tile(pass, sizes, layer, scratch, head, first, rest < kTile ? rest : kTile);
  }
}

// Meets the other threads; whether this one goes on, among how many.
inline bool goes_on(DflashBarrier* barrier, int64_t thread, int64_t& threads) {
  threads = dflash_barrier_wait(barrier);
  return thread < threads;
}

// False for a thread whose team was dissolved.
template <typename Weight>
bool run_layer(const DflashPass& pass, const Sizes& sizes, const DflashLayer& layer,
               const Scratch& scratch, int64_t thread, int64_t& threads, DflashBarrier* barrier) {
  const DflashShape& shape = *pass.shape;
  const int64_t rows = pass.rows, hidden = shape.hidden;
  const Rows normed{scratch.normed, hidden, rows};
  // All threads norm all rows: that costs less than to meet once more.
  norm_rows(pass.x, layer.input_norm, scratch.normed, rows, hidden, shape.eps);
  matrix<Weight>(layer.qkv, hidden, share(sizes.qkv / kPanel, thread, threads), normed,
                 [&](int64_t panel, int64_t row, Vec low, Vec high) {
                   set_panel(scratch.qkv + row * sizes.qkv, panel, layer.qkv_bias, low, high);
                 });
  if (!goes_on(barrier, thread, threads)) return false;
  const Share heads = share(shape.kv_heads, thread, threads);
  for (int64_t head = heads.begin; head < heads.end; ++head)
    attend_head(pass, sizes, layer, scratch, head);
  if (!goes_on(barrier, thread, threads)) return false;
  const int64_t panels = round_up(hidden, kPanel) / kPanel;
  const Rows attended{scratch.attended, sizes.query_width, rows};
  matrix<Weight>(layer.output, sizes.query_width, share(panels, thread, threads), attended,
                 [&](int64_t panel, int64_t row, Vec low, Vec high) {
                   add_panel(pass.x + row * hidden, hidden, panel, layer.output_bias, low, high);
                 });
  if (!goes_on(barrier, thread, threads)) return false;
  norm_rows(pass.x, layer.post_norm, scratch.normed, rows, hidden, shape.eps);
  matrix<Weight>(layer.gate_up, hidden, share(sizes.inner / kLanes, thread, threads), normed,
                 [&](int64_t panel, int64_t row, Vec gate, Vec up) {
                   if (layer.gate_up_bias != nullptr) {
                     gate += load(layer.gate_up_bias + panel * kPanel);
                     up += load(layer.gate_up_bias + panel * kPanel + kLanes);
                   }
                   store(scratch.activated + row * sizes.inner + panel * kLanes,
                         gate / (1.0f + exponential(-gate)) * up);
                 });
  if (!goes_on(barrier, thread, threads)) return false;
  const Rows activated{scratch.activated, sizes.inner, rows};
  matrix<Weight>(layer.down, shape.inner, share(panels, thread, threads), activated,
                 [&](int64_t panel, int64_t row, Vec low, Vec high) {
                   add_panel(pass.x + row * hidden, hidden, panel, layer.down_bias, low, high);
                 });
  return goes_on(barrier, thread, threads);
}

template <typename Weight>
void run_pass(const DflashPass& pass, int64_t thread, int64_t threads, DflashBarrier* barrier) {
  const Sizes sizes(*pass.shape);
  const Scratch scratch(pass, sizes, thread);
  const int64_t hidden = pass.shape->hidden;
  for (int64_t layer = 0; layer < pass.layer_count; ++layer) {
    if (!run_layer<Weight>(pass, sizes, pass.layers[layer], scratch, thread, threads, barrier))
      return;
    // Nobody writes to x before two more barriers.
    if (thread == 0 && pass.captures[layer] != nullptr)
      std::memcpy(pass.captures[layer], pass.x, pass.rows * hidden * sizeof(float));
  }
  if (thread == 0 && pass.final_norm != nullptr)
    norm_rows(pass.x, pass.final_norm, pass.x, pass.rows, hidden, pass.shape->eps);
}

template <typename Weight>
void run_context(const DflashContext& context, int64_t thread, int64_t threads,
                 DflashBarrier* barrier) {
  const DflashShape& shape = *context.shape;
  const Sizes sizes(shape);
  const int64_t rows = context.rows, hidden = shape.hidden;
  const int64_t wide = round_up(hidden, kPanel);
  // The panels of qkv from the first that holds keys.
  const int64_t skipped = sizes.query_width / kPanel, panels = sizes.qkv / kPanel - skipped;
  float* joined = context.scratch;
  float* kv = joined + rows * wide;
  float* own = kv + context.layer_count * rows * panels * kPanel +
               thread * (rows * hidden + round_up(shape.head_dim, kLanes));
  const Rows features{context.x, context.features, rows};
  matrix<Weight>(context.fc, context.features, share(wide / kPanel, thread, threads), features,
                 [&](int64_t panel, int64_t row, Vec low, Vec high) {
                   set_panel(joined + row * wide, panel, nullptr, low, high);
                 });
  if (!goes_on(barrier, thread, threads)) return;
  for (int64_t row = 0; row < rows; ++row)
    norm_row(joined + row * wide, context.norm, own + row * hidden, hidden, shape.eps);
  const Rows normed{own, hidden, rows};
  const Share columns = share(context.layer_count * panels, thread, threads);
  for (int64_t i = columns.begin; i < columns.end; ++i) {
    const int64_t layer = i / panels, panel = i % panels;
    float* out = kv + layer * rows * panels * kPanel;
    const Share one{skipped + panel, skipped + panel + 1};
    matrix<Weight>(context.layers[layer].qkv, hidden, one, normed,
                   [&](int64_t, int64_t row, Vec low, Vec high) {
                     set_panel(out + row * panels * kPanel, panel, nullptr, low, high);
                   });
  }
  if (!goes_on(barrier, thread, threads)) return;
  const Share heads = share(context.layer_count * shape.kv_heads, thread, threads);
  for (int64_t i = heads.begin; i < heads.end; ++i) {
    const int64_t layer = i / shape.kv_heads;
    const float* in = kv + layer * rows * panels * kPanel + sizes.query_width % kPanel;
    write_kv(shape, *context.cache, context.layers[layer], i % shape.kv_heads, in,
             panels * kPanel, rows, context.start, context.cosine, context.sine,
             own + rows * hidden);
  }
}

// The largest logit of each lane so far, and its token.
struct Best {
  Vec value;
  Ints token;
  void see(Vec logits, Ints tokens) {
    const Ints larger = logits > value;
    value = larger ? logits : value;
    token = larger ? tokens : token;
  }
};

// Of equal logits the first is the largest.
inline void reduce(const Best& best, float& value, int64_t& token) {
  for (int64_t lane = 0; lane < kLanes; ++lane) {
    const bool larger = best.value[lane] > value;
    if (larger || (best.value[lane] == value && best.token[lane] < token)) {
      value = best.value[lane];
      token = best.token[lane];
    }
  }
}

template <typename Weight>
void run_head(const DflashHead& head, int64_t thread, int64_t threads, DflashBarrier* barrier) {
  const int64_t all = threads;
  const int64_t rows = head.rows, hidden = head.hidden, outputs = head.outputs;
  Best* const bests = reinterpret_cast<Best*>(head.scratch);
  Best* const best = bests + thread * rows;
  float* const own =
      reinterpret_cast<float*>(bests + threads * rows) + thread * rows * hidden;
  const float* x = head.x;
  if (head.norm != nullptr) {
    norm_rows(x, head.norm, own, rows, hidden, head.eps);
    x = own;
  }
  const float smallest = -__builtin_inff();
  const Ints lanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  for (int64_t row = 0; row < rows; ++row) best[row] = {Vec{} + smallest, Ints{}};
  const Share panels = share(round_up(outputs, kPanel) / kPanel, thread, threads);
  matrix<Weight>(head.matrix, hidden, panels, Rows{x, hidden, rows},
                 [&](int64_t panel, int64_t row, Vec low, Vec high) {
                   const int64_t column = panel * kPanel;
                   if (head.logits != nullptr) {
                     float sums[kPanel];
                     store(sums, low);
                     store(sums + kLanes, high);
                     const int64_t rest = outputs - column;
                     std::memcpy(head.logits + row * outputs + column, sums,
                                 (rest < kPanel ? rest : kPanel) * sizeof(float));
                   }
                   if (head.best == nullptr) return;
                   const Ints token = lanes + static_cast<int32_t>(column);
                   const Ints end = Ints{} + static_cast<int32_t>(outputs);
                   const Vec none = Vec{} + smallest;
                   best[row].see(token < end ? low : none, token);
                   const Ints next = token + static_cast<int32_t>(kLanes);
                   best[row].see(next < end ? high : none, next);
                 });
  if (head.best == nullptr) return;
  if (!goes_on(barrier, thread, threads)) return;
  const Share mine = share(rows, thread, threads);
  for (int64_t row = mine.begin; row < mine.end; ++row) {
    float value = smallest;
    int64_t token = 0;
    for (int64_t t = 0; t < all; ++t) reduce(bests[t * rows + row], value, token);
    head.best[row] = token;
  }
}

}  // namespace

extern "C" {

void AT_LEVEL(dflash_decode_pass_)(const DflashPass* pass, int64_t thread, int64_t threads,
                                   DflashBarrier* barrier) {
  if (pass->shape->bf16 != 0)
    run_pass<uint16_t>(*pass, thread, threads, barrier);
  else
    run_pass<float>(*pass, thread, threads, barrier);
}

void AT_LEVEL(dflash_decode_context_)(const DflashContext* context, int64_t thread,
                                      int64_t threads, DflashBarrier* barrier) {
  if (context->shape->bf16 != 0)
    run_context<uint16_t>(*context, thread, threads, barrier);
  else
    run_context<float>(*context, thread, threads, barrier);
}

void AT_LEVEL(dflash_decode_head_)(const DflashHead* head, int64_t thread, int64_t threads,
                                   DflashBarrier* barrier) {
  if (head->bf16 != 0)
    run_head<uint16_t>(*head, thread, threads, barrier);
  else
    run_head<float>(*head, thread, threads, barrier);
}
}
