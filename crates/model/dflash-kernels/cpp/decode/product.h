// Products of activation rows with panels of 32 weight columns.
//
// A tile keeps the sums of some rows and columns in registers over the whole depth. Its size
// depends on the level, whose header (`avx2.h` and so on) provides
//
//   Vec, kLanes, kRegisters  vector register type, floats per register, number of registers
//   load, store, broadcast   floats in memory
//   multiply_add             a * b + c
//   first_of_pairs,          the halves of bfloat16 pairs as float32
//   second_of_pairs
//   kMostRows                maximum rows per tile
//   tile_vectors(rows)       width of a tile with that many rows, in vectors
//
// and, if it defines DFLASH_BFLOAT16_PAIRS, dot products of such pairs. Every sum is computed in
// order of the depth, so it does not depend on the tile shape or the number of rows, to the bit.
#pragma once

#include "layout.h"

namespace {

constexpr int64_t kPanel = kPanelColumns;
constexpr int64_t kPanelVectors = kPanel / kLanes;

// Steps of a panel that several tiles read in turn: 32 KB, which stay in the L1 cache.
constexpr int64_t kSteps = 256;
// Rows whose activations stay in the L2 cache while a thread goes through all its panels.
constexpr int64_t kRowBlock = 64;

// Activation rows: floats, or bfloat16 pairs of the same size.
struct Rows {
  const float* x;
  int64_t stride, count;
};

// Weights of some panels in 4-byte words: one float, or a bfloat16 pair from two depth steps. The
// 32 words of a step are contiguous.
struct Panels {
  const float* words;
  // Strides between steps and between panels.
  int64_t step, panel;
};

// Operand types: a row's element type, row words multiplied with each weight word, and how.
struct Float32 {
  typedef float Element;
  static constexpr int kFactors = 1;
  // Words per column, and per row.
  static int64_t steps(int64_t depth) { return depth; }
  static int64_t row_words(int64_t depth) { return depth; }
  template <int>
  static Vec weight(const float* p) {
    return load(p);
  }
  static Vec add(Vec factor, Vec weight, Vec sum) { return multiply_add(factor, weight, sum); }
};

// bfloat16 is the upper half of a float32.
struct Bfloat16Weights {
  typedef float Element;
  static constexpr int kFactors = 2;
  static int64_t steps(int64_t depth) { return (depth + 1) / 2; }
  static int64_t row_words(int64_t depth) { return depth; }
  template <int factor>
  static Vec weight(const float* p) {
    return factor == 0 ? first_of_pairs(p) : second_of_pairs(p);
  }
  static Vec add(Vec factor, Vec weight, Vec sum) { return multiply_add(factor, weight, sum); }
};

#if defined(DFLASH_BFLOAT16_PAIRS)
struct Bfloat16 {
  typedef uint16_t Element;
  static constexpr int kFactors = 1;
  static int64_t steps(int64_t depth) { return (depth + 1) / 2; }
  static int64_t row_words(int64_t depth) { return (depth + 1) / 2; }
  template <int>
  static Vec weight(const float* p) {
    return load(p);
  }
  static Vec add(Vec factor, Vec weight, Vec sum) { return multiply_add_pairs(factor, weight, sum); }
};
#endif

// Operands and destination of a tile.
struct Tile {
  Panels weights;
  int64_t steps;
  const float* x;
  int64_t stride;
  float* out;
  int64_t out_stride;
  // Whether `out` holds the sums of earlier steps to continue from.
  bool continues;
  // Whether the depth ends in the first half of the last word.
  bool odd;
  // Weights to prefetch, and the offset in bytes between the prefetches of two steps.
  const char* ahead;
  int64_t ahead_step;
};

template <typename Kind, int factor>
inline Vec weights_of(const float* const* w, int vector) {
  return Kind::template weight<factor>(w[vector / kPanelVectors] + vector % kPanelVectors * kLanes);
}

// Adds the products of one step, using the `factor`th halves of the words (or whole words).
template <typename Kind, int factor, int rows, int vectors>
inline __attribute__((always_inline)) void add_step(const float* const* w, const float* const* x,
                                                    int64_t at, Vec (&sum)[rows][vectors]) {
  // Whichever of factors and weights are fewer are held in registers.
  if constexpr (rows <= vectors) {
    Vec factors[rows];
#pragma GCC unroll 8
    for (int r = 0; r < rows; ++r) factors[r] = broadcast(x[r] + at + factor);
#pragma GCC unroll 8
    for (int v = 0; v < vectors; ++v) {
      const Vec weights = weights_of<Kind, factor>(w, v);
#pragma GCC unroll 8
      for (int r = 0; r < rows; ++r) sum[r][v] = Kind::add(factors[r], weights, sum[r][v]);
    }
  } else {
    Vec weights[vectors];
#pragma GCC unroll 8
    for (int v = 0; v < vectors; ++v) weights[v] = weights_of<Kind, factor>(w, v);
#pragma GCC unroll 8
    for (int r = 0; r < rows; ++r) {
      const Vec one = broadcast(x[r] + at + factor);
#pragma GCC unroll 8
      for (int v = 0; v < vectors; ++v) sum[r][v] = Kind::add(one, weights[v], sum[r][v]);
    }
  }
}

// One function per shape, so that each gets all registers.
template <typename Kind, int rows, int vectors>
__attribute__((noinline)) void run_tile(const Tile& tile) {
  constexpr int panels = (vectors + kPanelVectors - 1) / kPanelVectors;
  constexpr bool asks_ahead = vectors <= kPanelVectors;
  Vec sum[rows][vectors];
#pragma GCC unroll 8
  for (int r = 0; r < rows; ++r)
#pragma GCC unroll 8
    for (int v = 0; v < vectors; ++v)
      sum[r][v] = tile.continues ? load(tile.out + r * tile.out_stride + v * kLanes) : Vec{};
  const float *w[panels], *x[rows];
#pragma GCC unroll 8
  for (int p = 0; p < panels; ++p) w[p] = tile.weights.words + p * tile.weights.panel;
#pragma GCC unroll 8
  for (int r = 0; r < rows; ++r) x[r] = tile.x + r * tile.stride;
  [[maybe_unused]] const char* ahead = tile.ahead;
  const int64_t end = (tile.steps - tile.odd) * Kind::kFactors, step = tile.weights.step;
  for (int64_t at = 0; at < end; at += Kind::kFactors) {
    add_step<Kind, 0>(w, x, at, sum);
    if constexpr (Kind::kFactors == 2) {
      // If registers cannot hold the words as well, they are loaded twice.
      if constexpr ((rows + 2) * vectors + 2 > kRegisters) asm volatile("" ::: "memory");
      add_step<Kind, 1>(w, x, at, sum);
    }
#pragma GCC unroll 8
    for (int p = 0; p < panels; ++p) w[p] += step;
    if constexpr (asks_ahead) {
      __builtin_prefetch(ahead, 0, 2);
      if constexpr (vectors == kPanelVectors) __builtin_prefetch(ahead + 64, 0, 2);
      ahead += tile.ahead_step;
    }
  }
  if (tile.odd) add_step<Kind, 0>(w, x, end, sum);
#pragma GCC unroll 8
  for (int r = 0; r < rows; ++r)
#pragma GCC unroll 8
    for (int v = 0; v < vectors; ++v) store(tile.out + r * tile.out_stride + v * kLanes, sum[r][v]);
}

typedef void (*TileFunction)(const Tile&);

// The tile function for `rows` rows, at the level's full width or limited to one panel.
template <typename Kind, bool within>
TileFunction tile_function(int64_t rows) {
  switch (rows) {
#define CASE(count)                                                                          \
  case count:                                                                                \
    if constexpr (count <= kMostRows) {                                                      \
      constexpr int wide = tile_vectors(count);                                              \
      constexpr int most = within ? kPanelVectors : wide;                                    \
      return run_tile<Kind, count, (wide < most ? wide : most)>;                             \
    }                                                                                        \
    break;
    CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8)
#undef CASE
    default:
      break;
  }
  return nullptr;
}

inline int64_t tile_width(int64_t rows) { return tile_vectors(static_cast<int>(rows)) * kLanes; }

// Panels multiplied together: more than one if a tile of all rows is that wide.
inline int64_t panels_together(int64_t rows) {
  if (rows > kMostRows) return 1;
  const int64_t width = tile_width(rows);
  return width > kPanel ? width / kPanel : 1;
}

// Sets up the prefetch of the weights that are read next. The hardware prefetcher follows a single
// sequential tile, but not several tiles that read the same weights or steps that are far apart.
inline void ask_ahead(Tile& tile, const Panels& next, int64_t number, int64_t part) {
  constexpr int64_t size = sizeof(float), line = 64;
  tile.ahead = reinterpret_cast<const char*>(next.words);
  if (next.step == kPanel) {
    // Each tile prefetches its share of what follows.
    tile.ahead_step = part;
    tile.ahead += number * tile.steps * tile.ahead_step;
  } else {
    // The first two tiles prefetch one cache line each of every step.
    tile.ahead_step = number < 2 ? next.step * size : 0;
    tile.ahead += number % 2 * line;
  }
}

// How rows and panels (1 or `panels_together`) are split into tiles.
template <typename Kind>
struct Plan {
  int64_t columns, tiles, tall, lines;
  // Rows, width and function of the first `tall` tiles, and of the others, which have one row less.
  int64_t heights[2], widths[2];
  TileFunction runs[2];
  Plan(int64_t rows, int64_t panels)
      : columns(panels * kPanel), tiles((rows + kMostRows - 1) / kMostRows), tall(rows % tiles) {
    lines = 0;
    for (int64_t other = 0; other < 2; ++other) {
      const int64_t height = rows / tiles + 1 - other, count = other == 0 ? tall : tiles - tall;
      heights[other] = height;
      if (count == 0) continue;
      const int64_t wide = tile_width(height);
      widths[other] = wide < columns ? wide : columns;
      runs[other] =
          panels > 1 ? tile_function<Kind, false>(height) : tile_function<Kind, true>(height);
      lines += count * (columns / widths[other]);
    }
    ahead_step = kPanel * static_cast<int64_t>(sizeof(float)) / lines;
  }
  // Bytes prefetched per tile and step.
  int64_t ahead_step;
};

// Writes the sums of all rows and panels of a plan to `out` [rows][out_stride]. The weights read
// next start at `next`.
template <typename Kind>
inline void sums(const Plan<Kind>& plan, const Panels& weights, int64_t depth, const float* x,
                 int64_t stride, float* out, int64_t out_stride, const Panels& next) {
  const int64_t steps = Kind::steps(depth);
  // A single tile reads each weight once, over the whole depth.
  const int64_t each_time = plan.lines == 1 ? steps : kSteps;
  for (int64_t step = 0; step < steps; step += each_time) {
    const int64_t count = steps - step < each_time ? steps - step : each_time;
    const bool odd = Kind::kFactors == 2 && depth % 2 == 1 && step + count == steps;
    const Panels ahead{next.words + step * next.step, next.step, 0};
    Tile tile{{weights.words + step * weights.step, weights.step, weights.panel},
              count,
              x + step * Kind::kFactors,
              stride,
              out,
              out_stride,
              step > 0,
              odd,
              nullptr,
              0};
    int64_t number = 0;
    for (int64_t t = 0; t < plan.tiles; ++t) {
      const int64_t other = t < plan.tall ? 0 : 1, width = plan.widths[other];
      for (int64_t column = 0; column < plan.columns; column += width) {
        ask_ahead(tile, ahead, number++, plan.ahead_step);
        plan.runs[other](tile);
        tile.weights.words += width;
        tile.out += width;
      }
      tile.weights.words -= plan.columns;
      tile.out += plan.heights[other] * out_stride - plan.columns;
      tile.x += plan.heights[other] * stride;
    }
  }
}

// Calls `take` with panel, row and its 32 sums, for a thread's share of a packed matrix's panels.
template <typename Kind, typename Take>
inline void matrix(const void* packed, int64_t depth, Share panels, const Rows& rows,
                   const Take& take) {
  const int64_t size = Kind::steps(depth) * kPanel;
  const float* const words = static_cast<const float*>(packed);
  const int64_t ahead = size < kSteps * kPanel ? size : kSteps * kPanel;
  alignas(64) float out[kRowBlock * kPanel];
  for (int64_t first = 0; first < rows.count; first += kRowBlock) {
    const int64_t rest = rows.count - first, count = rest < kRowBlock ? rest : kRowBlock;
    const int64_t most = panels_together(count);
    const Plan<Kind> wide(count, most), narrow(count, 1);
    int64_t together = most;
    for (int64_t panel = panels.begin; panel < panels.end; panel += together) {
      together = panels.end - panel < most ? 1 : most;
      const int64_t stride = together * kPanel;
      const float* const at = words + panel * size;
      sums<Kind>(together == most ? wide : narrow, {at, kPanel, size}, depth,
                 rows.x + first * rows.stride, rows.stride, out, stride,
                 {at + ahead, kPanel, size});
      for (int64_t p = 0; p < together; ++p)
        for (int64_t row = 0; row < count; ++row)
          take(panel + p, first + row, out + row * stride + p * kPanel);
    }
  }
}

}  // namespace
