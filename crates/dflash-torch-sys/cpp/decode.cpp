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
#include <type_traits>

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

inline Vec load(const float* p) {
  Vec v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

inline Words words(const uint16_t* p) {
  Words v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

inline void store(float* p, Vec v) { std::memcpy(p, &v, sizeof v); }

inline int64_t round_up(int64_t n, int64_t unit) { return (n + unit - 1) / unit * unit; }

inline Vec load_some(const float* p, int64_t count) {
  Vec v{};
  std::memcpy(&v, p, count * sizeof(float));
  return v;
}

inline void store_some(float* p, Vec v, int64_t count) {
  std::memcpy(p, &v, count * sizeof(float));
}

// How a matrix lies in memory, and what of a row it is multiplied with.
struct Float32 {
  typedef float Weight;
  typedef float Element;
  static int64_t depth(int64_t n) { return n; }
};

// bfloat16 is the upper half of a float32. Two of a column lie side by side, the first below.
struct Bfloat16Weights {
  typedef uint16_t Weight;
  typedef float Element;
  static int64_t depth(int64_t n) { return round_up(n, 2); }
};

#if defined(__AVX512BF16__)
struct Bfloat16 {
  typedef uint16_t Weight;
  typedef uint16_t Element;
  static int64_t depth(int64_t n) { return round_up(n, 2); }
};

inline void store(uint16_t* p, Vec v) {
  const __m256bh halves = _mm512_cvtneps_pbh((__m512)v);
  std::memcpy(p, &halves, sizeof halves);
}

inline void store_some(uint16_t* p, Vec v, int64_t count) {
  const __m256bh halves = _mm512_cvtneps_pbh((__m512)v);
  // One more where the number is odd: a product takes them in pairs.
  std::memcpy(p, &halves, round_up(count, 2) * sizeof(uint16_t));
}
#endif

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
template <typename Element>
struct Rows {
  const Element* x;
  int64_t stride, count;
};

template <int tile>
using Sums = Vec[tile][2];

template <int tile>
inline __attribute__((always_inline)) void add(Vec low, Vec high, const float* x, int64_t x_stride,
                                               Sums<tile>& sum) {
#pragma GCC unroll 8
  for (int r = 0; r < tile; ++r) {
    const float factor = x[r * x_stride];
    sum[r][0] += factor * low;
    sum[r][1] += factor * high;
  }
}

// Sums over the depth of `tile` rows times 32 columns that lie `stride` apart.
template <int tile>
inline __attribute__((always_inline)) void sums(Float32, const float* w, int64_t stride,
                                                int64_t depth, const float* x, int64_t x_stride,
                                                Sums<tile>& sum) {
  for (int64_t k = 0; k < depth; ++k)
    add<tile>(load(w + k * stride), load(w + k * stride + kLanes), x + k, x_stride, sum);
}

template <int tile>
inline __attribute__((always_inline)) void sums(Bfloat16Weights, const uint16_t* w, int64_t,
                                                int64_t depth, const float* x, int64_t x_stride,
                                                Sums<tile>& sum) {
  int64_t k = 0;
  for (; k + 2 <= depth; k += 2) {
    const Words low = words(w + k * kPanel), high = words(w + (k + 1) * kPanel);
    add<tile>((Vec)(low << 16), (Vec)(high << 16), x + k, x_stride, sum);
    add<tile>((Vec)(low & 0xffff0000u), (Vec)(high & 0xffff0000u), x + k + 1, x_stride, sum);
  }
  if (k < depth) {
    const Words low = words(w + k * kPanel), high = words(w + (k + 1) * kPanel);
    add<tile>((Vec)(low << 16), (Vec)(high << 16), x + k, x_stride, sum);
  }
}

#if defined(__AVX512BF16__)
template <int tile>
inline __attribute__((always_inline)) void sums(Bfloat16, const uint16_t* w, int64_t, int64_t depth,
                                                const uint16_t* x, int64_t x_stride,
                                                Sums<tile>& sum) {
  for (int64_t k = 0; k < depth; k += 2) {
    const __m512bh low = (__m512bh)words(w + k * kPanel);
    const __m512bh high = (__m512bh)words(w + (k + 1) * kPanel);
#pragma GCC unroll 8
    for (int r = 0; r < tile; ++r) {
      uint32_t pair;
      std::memcpy(&pair, x + r * x_stride + k, sizeof pair);
      const __m512bh factors = (__m512bh)(Words{} + pair);
      sum[r][0] = (Vec)_mm512_dpbf16_ps((__m512)sum[r][0], factors, low);
      sum[r][1] = (Vec)_mm512_dpbf16_ps((__m512)sum[r][1], factors, high);
    }
  }
}
#endif

template <int tile, typename Kind, typename Take>
inline void tile_of(const typename Kind::Weight* w, int64_t stride, int64_t depth,
                    const Rows<typename Kind::Element>& rows, int64_t first, const Take& take) {
  Sums<tile> sum;
#pragma GCC unroll 8
  for (int r = 0; r < tile; ++r) sum[r][0] = sum[r][1] = Vec{};
  sums<tile>(Kind{}, w, stride, depth, rows.x + first * rows.stride, rows.stride, sum);
  for (int r = 0; r < tile; ++r) take(first + r, sum[r][0], sum[r][1]);
}

// Gives `take` the row and the 32 sums of each row over the depth.
template <typename Kind, typename Take>
inline void product(const typename Kind::Weight* w, int64_t stride, int64_t depth,
                    const Rows<typename Kind::Element>& rows, const Take& take) {
  int64_t first = 0;
  for (; first + kTile <= rows.count; first += kTile)
    tile_of<kTile, Kind>(w, stride, depth, rows, first, take);
  switch (rows.count - first) {
#define CASE(tile)                                                                        \
  case tile:                                                                              \
    if constexpr (tile < kTile) tile_of<tile, Kind>(w, stride, depth, rows, first, take); \
    break;
    CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7)
#undef CASE
    default:
      break;
  }
}

// A thread's share of the panels of a packed matrix.
template <typename Kind, typename Take>
inline void matrix(const void* packed, int64_t depth, Share panels,
                   const Rows<typename Kind::Element>& rows, const Take& take) {
  const auto* w = static_cast<const typename Kind::Weight*>(packed);
  for (int64_t panel = panels.begin; panel < panels.end; ++panel)
    product<Kind>(w + panel * Kind::depth(depth) * kPanel, kPanel, depth, rows,
                  [&](int64_t row, Vec low, Vec high) { take(panel, row, low, high); });
}

inline float total(Vec v) {
  float lanes[kLanes];
  store(lanes, v);
  for (int64_t width = kLanes / 2; width > 0; width /= 2)
    for (int64_t lane = 0; lane < width; ++lane) lanes[lane] += lanes[lane + width];
  return lanes[0];
}

inline float sum_of_squares(const float* x, int64_t dim) {
  Vec sums[2] = {};
  int64_t d = 0;
  for (; d + kPanel <= dim; d += kPanel) {
    const Vec low = load(x + d), high = load(x + d + kLanes);
    sums[0] += low * low;
    sums[1] += high * high;
  }
  for (; d < dim; d += kLanes) {
    const Vec rest = load_some(x + d, dim - d < kLanes ? dim - d : kLanes);
    sums[0] += rest * rest;
  }
  return total(sums[0] + sums[1]);
}

// y = x as elements of a product's rows.
template <typename Element>
inline void copy_row(const float* x, Element* y, int64_t dim) {
  int64_t d = 0;
  for (; d + kLanes <= dim; d += kLanes) store(y + d, load(x + d));
  if (d < dim) store_some(y + d, load_some(x + d, dim - d), dim - d);
}

template <typename Element>
inline void norm_row(const float* x, const float* weight, Element* y, int64_t dim, float eps) {
  const float scale =
      1.0f / std::sqrt(sum_of_squares(x, dim) / static_cast<float>(dim) + eps);
  int64_t d = 0;
  for (; d + kLanes <= dim; d += kLanes) store(y + d, load(x + d) * scale * load(weight + d));
  const int64_t rest = dim - d;
  if (rest > 0) store_some(y + d, load_some(x + d, rest) * scale * load_some(weight + d, rest), rest);
}

// Rows of `dim` behind a norm, or as they are where it is null.
template <typename Kind>
inline Rows<typename Kind::Element> prepared(const float* x, const float* norm, float* scratch,
                                             int64_t rows, int64_t dim, float eps) {
  typedef typename Kind::Element Element;
  if (std::is_same<Element, float>::value && norm == nullptr)
    return {reinterpret_cast<const Element*>(x), dim, rows};
  Element* const y = reinterpret_cast<Element*>(scratch);
  const int64_t stride = Kind::depth(dim);
  for (int64_t row = 0; row < rows; ++row) {
    if (norm != nullptr)
      norm_row(x + row * dim, norm, y + row * stride, dim, eps);
    else
      copy_row(x + row * dim, y + row * stride, dim);
  }
  return {y, stride, rows};
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
template <typename Element>
struct Scratch {
  float* qkv;
  Element *attended, *activated;
  float *normed = nullptr, *queries = nullptr, *scores = nullptr;
  Scratch(const DflashPass& pass, const Sizes& sizes, int64_t thread) {
    const int64_t rows = pass.rows, dim = pass.shape->head_dim;
    int64_t most_rows = 0, longest = 0;
    for (int64_t s = 0; s < pass.sequence_count; ++s) {
      const DflashSequence& sequence = pass.sequences[s];
      most_rows = sequence.rows > most_rows ? sequence.rows : most_rows;
      longest = sequence.key_stride > longest ? sequence.key_stride : longest;
    }
    float* next = pass.scratch;
    const auto take = [&](int64_t elements) {
      float* at = next;
      next += round_up(elements, kLanes);
      return at;
    };
    qkv = take(rows * sizes.qkv);
    attended = reinterpret_cast<Element*>(take(rows * sizes.query_width));
    activated = reinterpret_cast<Element*>(take(rows * sizes.inner));
    for (int64_t t = 0; t <= thread; ++t) {
      normed = take(rows * round_up(pass.shape->hidden, 2));
      queries = take(most_rows * sizes.group * dim);
      scores = take(kTile * longest);
    }
  }
};

// Writes the keys and values of new rows into a layer's cache, for one key/value head.
void write_kv(const DflashShape& shape, const DflashSequence& sequence, int64_t layer,
              const float* key_norm, int64_t head, const float* kv, int64_t kv_stride, float* key) {
  const int64_t dim = shape.head_dim, half = dim / 2;
  float* keys = sequence.held[layer].keys + head * dim * sequence.key_stride + sequence.start;
  float* values = sequence.held[layer].values +
                  (head * sequence.positions + sequence.start) * sequence.value_stride;
  for (int64_t row = 0; row < sequence.rows; ++row) {
    const float* in = kv + row * kv_stride + head * dim;
    rotate_head(in, key_norm, sequence.cosine + row * half, sequence.sine + row * half, key, dim,
                shape.eps);
    for (int64_t d = 0; d < dim; ++d) keys[d * sequence.key_stride + row] = key[d];
    std::memcpy(values + row * sequence.value_stride, in + shape.kv_heads * dim,
                dim * sizeof(float));
  }
}

// The keys that the query of a row sees.
inline Share visible(const DflashShape& shape, const DflashSequence& sequence, int64_t window,
                     int64_t row) {
  const int64_t position = sequence.start + row;
  const int64_t first = window > 0 ? position + 1 - window : 0;
  const bool causal = shape.causal != 0 || window > 0;
  return {first > 0 ? first : 0, causal ? position + 1 : sequence.start + sequence.rows};
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
  const float scale = 1.0f / total(sums);
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) first[i] *= scale;
}

// A key/value head of a sequence in a layer. Its rows are numbered from the sequence's first.
struct Head {
  const DflashShape* shape;
  const DflashSequence* sequence;
  int64_t window, number;
  const float *keys, *values;
};

// Attention of the queries [first, first + count) of a head; a row has `group` of them. Writes to the
// sequence's rows of `attended`.
template <typename Element>
void attend_tile(const Head& head, const Sizes& sizes, const Scratch<Element>& scratch,
                 Element* attended, int64_t first, int64_t count) {
  const DflashSequence& sequence = *head.sequence;
  const int64_t dim = head.shape->head_dim, stride = sequence.key_stride;
  const auto seen = [&](int64_t query) {
    return visible(*head.shape, sequence, head.window, query / sizes.group);
  };
  const Share all{seen(first).begin, seen(first + count - 1).end};
  const Rows<float> queries{scratch.queries + first * dim, dim, count};
  for (int64_t key = all.begin; key < all.end; key += kPanel)
    product<Float32>(head.keys + key, stride, dim, queries, [&](int64_t query, Vec low, Vec high) {
      float* out = scratch.scores + query * stride + (key - all.begin);
      store(out, low);
      store(out + kLanes, high);
    });
  for (int64_t query = 0; query < count; ++query)
    softmax(scratch.scores + query * stride, seen(first + query), all);
  const float* values = head.values + all.begin * sequence.value_stride;
  const Rows<float> shares{scratch.scores, stride, count};
  for (int64_t d = 0; d < dim; d += kPanel)
    product<Float32>(values + d, sequence.value_stride, all.end - all.begin, shares,
                     [&](int64_t query, Vec low, Vec high) {
                       const int64_t row = (first + query) / sizes.group;
                       const int64_t query_head =
                           head.number * sizes.group + (first + query) % sizes.group;
                       Element* out = attended + row * sizes.query_width + query_head * dim + d;
                       const int64_t width = dim - d < kPanel ? dim - d : kPanel;
                       store_some(out, low, width < kLanes ? width : kLanes);
                       if (width > kLanes) store_some(out + kLanes, high, width - kLanes);
                     });
}

// Writes a key/value head's new keys and values, and attends with its group of queries, those of the
// first `unread` rows left out. `first` is the sequence's first row in the pass.
template <typename Element>
void attend_head(const DflashPass& pass, const Sizes& sizes, int64_t layer, const Head& head,
                 const Scratch<Element>& scratch, int64_t first, int64_t unread) {
  const DflashShape& shape = *pass.shape;
  const DflashSequence& sequence = *head.sequence;
  const int64_t dim = shape.head_dim, half = dim / 2;
  const float* qkv = scratch.qkv + first * sizes.qkv;
  const DflashLayer& weights = pass.layers[layer];
  write_kv(shape, sequence, layer, weights.key_norm, head.number, qkv + sizes.query_width,
           sizes.qkv, scratch.queries);
  const float scale = 1.0f / std::sqrt(static_cast<float>(dim));
  for (int64_t row = unread; row < sequence.rows; ++row)
    for (int64_t member = 0; member < sizes.group; ++member) {
      const float* in = qkv + row * sizes.qkv + (head.number * sizes.group + member) * dim;
      float* query = scratch.queries + (row * sizes.group + member) * dim;
      rotate_head(in, weights.query_norm, sequence.cosine + row * half, sequence.sine + row * half,
                  query, dim, shape.eps);
#pragma omp simd
      for (int64_t d = 0; d < dim; ++d) query[d] *= scale;
    }
  const int64_t queries = sequence.rows * sizes.group;
  for (int64_t query = unread * sizes.group; query < queries; query += kTile) {
    const int64_t rest = queries - query;
    attend_tile(head, sizes, scratch, scratch.attended + first * sizes.query_width, query,
                rest < kTile ? rest : kTile);
  }
}

// A thread's share of the key/value heads of all sequences.
template <typename Element>
void attend(const DflashPass& pass, const Sizes& sizes, int64_t layer,
            const Scratch<Element>& scratch, Share heads, int64_t unread) {
  const DflashShape& shape = *pass.shape;
  int64_t first = 0;
  for (int64_t s = 0; s < pass.sequence_count; ++s) {
    const DflashSequence& sequence = pass.sequences[s];
    for (int64_t number = 0; number < shape.kv_heads; ++number) {
      const int64_t place = s * shape.kv_heads + number;
      if (place < heads.begin || place >= heads.end) continue;
      const DflashKeysValues& held = sequence.held[layer];
      const Head head{&shape, &sequence, pass.layers[layer].window, number,
                      held.keys + number * shape.head_dim * sequence.key_stride,
                      held.values + number * sequence.positions * sequence.value_stride};
      attend_head(pass, sizes, layer, head, scratch, first, unread);
    }
    first += sequence.rows;
  }
}

// Meets the other threads; whether this one goes on, among how many.
inline bool goes_on(DflashBarrier* barrier, int64_t thread, int64_t& threads) {
  threads = dflash_barrier_wait(barrier);
  return thread < threads;
}

// False for a thread whose team was dissolved. What the first `unread` rows become is not computed.
template <typename Kind>
bool run_layer(const DflashPass& pass, const Sizes& sizes, int64_t number,
               const Scratch<typename Kind::Element>& scratch, int64_t unread, int64_t thread,
               int64_t& threads, DflashBarrier* barrier) {
  typedef Rows<typename Kind::Element> Inputs;
  const DflashShape& shape = *pass.shape;
  const DflashLayer& layer = pass.layers[number];
  const int64_t hidden = shape.hidden, read = pass.rows - unread;
  float* const x = pass.x + unread * hidden;
  // All threads norm all rows: that costs less than to meet once more.
  matrix<Kind>(layer.qkv, hidden, share(sizes.qkv / kPanel, thread, threads),
               prepared<Kind>(pass.x, layer.input_norm, scratch.normed, pass.rows, hidden, shape.eps),
               [&](int64_t panel, int64_t row, Vec low, Vec high) {
                 set_panel(scratch.qkv + row * sizes.qkv, panel, layer.qkv_bias, low, high);
               });
  if (!goes_on(barrier, thread, threads)) return false;
  attend(pass, sizes, number, scratch, share(pass.sequence_count * shape.kv_heads, thread, threads),
         unread);
  if (!goes_on(barrier, thread, threads)) return false;
  const int64_t panels = round_up(hidden, kPanel) / kPanel;
  const Inputs attended{scratch.attended + unread * sizes.query_width, sizes.query_width, read};
  matrix<Kind>(layer.output, sizes.query_width, share(panels, thread, threads), attended,
               [&](int64_t panel, int64_t row, Vec low, Vec high) {
                 add_panel(x + row * hidden, hidden, panel, layer.output_bias, low, high);
               });
  if (!goes_on(barrier, thread, threads)) return false;
  matrix<Kind>(layer.gate_up, hidden, share(sizes.inner / kLanes, thread, threads),
               prepared<Kind>(x, layer.post_norm, scratch.normed, read, hidden, shape.eps),
               [&](int64_t panel, int64_t row, Vec gate, Vec up) {
                 if (layer.gate_up_bias != nullptr) {
                   gate += load(layer.gate_up_bias + panel * kPanel);
                   up += load(layer.gate_up_bias + panel * kPanel + kLanes);
                 }
                 store(scratch.activated + row * sizes.inner + panel * kLanes,
                       gate / (1.0f + exponential(-gate)) * up);
               });
  if (!goes_on(barrier, thread, threads)) return false;
  const Inputs activated{scratch.activated, sizes.inner, read};
  matrix<Kind>(layer.down, shape.inner, share(panels, thread, threads), activated,
               [&](int64_t panel, int64_t row, Vec low, Vec high) {
                 add_panel(x + row * hidden, hidden, panel, layer.down_bias, low, high);
               });
  return goes_on(barrier, thread, threads);
}

// Copies the residual stream to where the states behind `layers` layers are wanted.
void capture(const DflashPass& pass, int64_t layers) {
  const int64_t hidden = pass.shape->hidden, count = pass.capture_count;
  for (int64_t c = 0; c < count; ++c) {
    if (pass.capture_ids[c] != layers) continue;
    for (int64_t row = 0; row < pass.rows; ++row)
      std::memcpy(pass.captures + (row * count + c) * hidden, pass.x + row * hidden,
                  hidden * sizeof(float));
  }
}

template <typename Kind>
void run_pass(const DflashPass& pass, int64_t thread, int64_t threads, DflashBarrier* barrier) {
  const Sizes sizes(*pass.shape);
  const Scratch<typename Kind::Element> scratch(pass, sizes, thread);
  const int64_t hidden = pass.shape->hidden;
  for (int64_t layer = 0; layer < pass.layer_count; ++layer) {
    const int64_t unread = layer + 1 < pass.layer_count ? 0 : pass.unread;
    // Nobody writes to x before two more barriers.
    if (thread == 0) capture(pass, layer);
    if (!run_layer<Kind>(pass, sizes, layer, scratch, unread, thread, threads, barrier)) return;
  }
  if (thread == 0) capture(pass, pass.layer_count);
  if (thread == 0 && pass.final_norm != nullptr)
    for (int64_t row = pass.unread; row < pass.rows; ++row) {
      float* const x = pass.x + row * hidden;
      norm_row(x, pass.final_norm, x, hidden, pass.shape->eps);
    }
}

template <typename Kind>
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
               thread * (rows * round_up(context.features + hidden, 2) +
                         round_up(shape.head_dim, kLanes));
  matrix<Kind>(context.fc, context.features, share(wide / kPanel, thread, threads),
               prepared<Kind>(context.x, nullptr, own, rows, context.features, shape.eps),
               [&](int64_t panel, int64_t row, Vec low, Vec high) {
                 set_panel(joined + row * wide, panel, nullptr, low, high);
               });
  if (!goes_on(barrier, thread, threads)) return;
  typename Kind::Element* const y = reinterpret_cast<typename Kind::Element*>(own);
  const Rows<typename Kind::Element> normed{y, Kind::depth(hidden), rows};
  for (int64_t row = 0; row < rows; ++row)
    norm_row(joined + row * wide, context.norm, y + row * normed.stride, hidden, shape.eps);
  const Share columns = share(context.layer_count * panels, thread, threads);
  for (int64_t i = columns.begin; i < columns.end; ++i) {
    const int64_t layer = i / panels, panel = i % panels;
    float* out = kv + layer * rows * panels * kPanel;
    const Share one{skipped + panel, skipped + panel + 1};
    const float* const all = context.layers[layer].qkv_bias;
    const float* const bias = all == nullptr ? nullptr : all + skipped * kPanel;
    matrix<Kind>(context.layers[layer].qkv, hidden, one, normed,
                 [&](int64_t, int64_t row, Vec low, Vec high) {
                   set_panel(out + row * panels * kPanel, panel, bias, low, high);
                 });
  }
  if (!goes_on(barrier, thread, threads)) return;
  const Share heads = share(context.layer_count * shape.kv_heads, thread, threads);
  for (int64_t i = heads.begin; i < heads.end; ++i) {
    const int64_t layer = i / shape.kv_heads;
    const float* in = kv + layer * rows * panels * kPanel + sizes.query_width % kPanel;
    for (int64_t s = 0; s < context.sequence_count; ++s) {
      const DflashSequence& sequence = context.sequences[s];
      write_kv(shape, sequence, layer, context.layers[layer].key_norm, i % shape.kv_heads, in,
               panels * kPanel, own);
      in += sequence.rows * panels * kPanel;
    }
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

template <typename Kind>
void run_head(const DflashHead& head, int64_t thread, int64_t threads, DflashBarrier* barrier) {
  const int64_t all = threads;
  const int64_t rows = head.rows, hidden = head.hidden, outputs = head.outputs;
  Best* const bests = reinterpret_cast<Best*>(head.scratch);
  Best* const best = bests + thread * rows;
  float* const own =
      reinterpret_cast<float*>(bests + threads * rows) + thread * rows * round_up(hidden, 2);
  const auto inputs = prepared<Kind>(head.x, head.norm, own, rows, hidden, head.eps);
  const float smallest = -__builtin_inff();
  const Ints lanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  for (int64_t row = 0; row < rows; ++row) best[row] = {Vec{} + smallest, Ints{}};
  const Share panels = share(round_up(outputs, kPanel) / kPanel, thread, threads);
  matrix<Kind>(head.matrix, hidden, panels, inputs,
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

// Calls a function for the kind of products that was asked for.
#if defined(__AVX512BF16__)
#define WITH_KIND(products, run, ...)                     \
  switch (products) {                                     \
    case kFloat32: return run<Float32>(__VA_ARGS__);      \
    case kBfloat16: return run<Bfloat16>(__VA_ARGS__);    \
    default: return run<Bfloat16Weights>(__VA_ARGS__);    \
  }
#else
#define WITH_KIND(products, run, ...)                     \
  switch (products) {                                     \
    case kFloat32: return run<Float32>(__VA_ARGS__);      \
    default: return run<Bfloat16Weights>(__VA_ARGS__);    \
  }
#endif

}  // namespace

extern "C" {

void AT_LEVEL(dflash_decode_pass_)(const DflashPass* pass, int64_t thread, int64_t threads,
                                   DflashBarrier* barrier) {
  WITH_KIND(pass->shape->products, run_pass, *pass, thread, threads, barrier)
}

void AT_LEVEL(dflash_decode_context_)(const DflashContext* context, int64_t thread,
                                      int64_t threads, DflashBarrier* barrier) {
  WITH_KIND(context->shape->products, run_context, *context, thread, threads, barrier)
}

void AT_LEVEL(dflash_decode_head_)(const DflashHead* head, int64_t thread, int64_t threads,
                                   DflashBarrier* barrier) {
  WITH_KIND(head->products, run_head, *head, thread, threads, barrier)
}
}
