// Products of many rows (a prompt) with a packed matrix, instead of unpacking it for libtorch.
// Compiled once per level of DFLASH_DECODE_LEVELS, as `decode.cpp` is.
//
// Rows are rearranged in tiles so that each depth step reads them sequentially, and the sums of a
// tile and some columns stay in registers. As many tiles as fit the L2 cache go through all panels,
// one depth block after the other, so that their part of the result stays cached as well.
#include "decode.h"

#include <cstring>

#if defined(__AVX512BF16__)
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#define JOIN_(a, b) a##b
#define JOIN(a, b) JOIN_(a, b)
#define AT_LEVEL(name) JOIN(name, LEVEL)

namespace {

constexpr int64_t kPanel = 32, kHalf = kPanel / 2;
// Floats of row data kept in the L2 cache: 1 MiB.
constexpr int64_t kHeld = 1 << 18;

// Lanes of a vector; rows whose sums (two vectors each) fit in registers together with two weight
// vectors; words per depth block.
#if defined(__AVX512F__)
constexpr int kLanes = 16, kRows = 14;
constexpr int64_t kBlock = 512;
#elif defined(__AVX2__)
constexpr int kLanes = 8, kRows = 6;
constexpr int64_t kBlock = 256;
#elif defined(__aarch64__)
constexpr int kLanes = 4, kRows = 12;
constexpr int64_t kBlock = 256;
#else
constexpr int kLanes = 4, kRows = 4;
constexpr int64_t kBlock = 256;
#endif
constexpr int kWide = 2 * kLanes;

typedef float Vec __attribute__((vector_size(kLanes * sizeof(float))));
typedef uint32_t Words __attribute__((vector_size(kLanes * sizeof(uint32_t))));

inline Words words(const uint32_t* p) {
  Words v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

// Values of a column per word.
struct Float32 {
  static constexpr int kNumbers = 1;
};
struct Bfloat16Weights {
  static constexpr int kNumbers = 2;
};

// The result columns of a vector's lanes.
struct Place {
  int64_t column, count;
};

// The result columns of the lanes of a panel from `lane` on.
inline Place place(const DflashProduct& p, int64_t panel, int64_t lane, int64_t lanes) {
  int64_t column = panel * kPanel + lane, end = p.outputs;
  if (p.gated != 0) {
    const int64_t inner = p.outputs / 2;
    const bool is_up = lane >= kHalf;
    column = panel * kHalf + lane % kHalf + (is_up ? inner : 0);
    end = is_up ? p.outputs : inner;
  }
  const int64_t rest = end - column;
  return {column, rest < 0 ? 0 : least(rest, lanes)};
}

// Adds the products of two vectors with `x`. Written in assembly for x86: compilers delay each
// addition until the next addend is known and then run out of registers.
template <int kUsed>
inline __attribute__((always_inline)) void add(Vec low, Vec high, const float* x,
                                               Vec (&sum)[kUsed][2]) {
#pragma GCC unroll 16
  for (int r = 0; r < kUsed; ++r) {
#if defined(__FMA__)
    Vec factor;
    __asm__("vbroadcastss %1, %0" : "=v"(factor) : "m"(x[r]));
    __asm__("vfmadd231ps %2, %1, %0" : "+v"(sum[r][0]) : "v"(low), "v"(factor));
    __asm__("vfmadd231ps %2, %1, %0" : "+v"(sum[r][1]) : "v"(high), "v"(factor));
#else
    const float factor = x[r];
    sum[r][0] += factor * low;
    sum[r][1] += factor * high;
#endif
  }
}

// Compiler barrier: otherwise two steps are interleaved and need the registers of both.
template <int kUsed>
inline __attribute__((always_inline)) void hold(Vec (&sum)[kUsed][2]) {
#if defined(__x86_64__)
#pragma GCC unroll 16
  for (int r = 0; r < kUsed; ++r) __asm__ volatile("" : "+v"(sum[r][0]), "+v"(sum[r][1]));
#endif
}

// `x` is a tile [depth][kRows].
template <typename Kind, int kUsed>
inline __attribute__((always_inline)) void sums(const uint32_t* w, int64_t depth, const float* x,
                                                Vec (&sum)[kUsed][2]) {
  for (int64_t k = 0; k < depth; ++k) {
    const Words low = words(w + k * kPanel), high = words(w + k * kPanel + kLanes);
    if (Kind::kNumbers == 1) {
      add((Vec)low, (Vec)high, x + k * kRows, sum);
      continue;
    }
    add((Vec)(low << 16), (Vec)(high << 16), x + 2 * k * kRows, sum);
    hold(sum);
    add((Vec)(low & 0xffff0000u), (Vec)(high & 0xffff0000u), x + (2 * k + 1) * kRows, sum);
  }
}

// Adds to up to `kUsed` rows of the result.
template <typename Kind, int kUsed>
void tile(const uint32_t* w, int64_t depth, const float* x, float* out, int64_t stride,
          int64_t rows, const Place (&places)[2]) {
  // Rows of the result are pages apart; prefetch them while the sums are computed.
  for (const Place& to : places)
    for (int64_t r = 0; r < rows; ++r) __builtin_prefetch(out + r * stride + to.column, 1);
  Vec sum[kUsed][2];
#pragma GCC unroll 16
  for (int r = 0; r < kUsed; ++r)
#pragma GCC unroll 2
    for (int v = 0; v < 2; ++v) sum[r][v] = Vec{};
  sums<Kind, kUsed>(w, depth, x, sum);
  // Copied with constant indices, so that the sums have no address and stay in registers.
  alignas(64) float found[kUsed][2][kLanes];
#pragma GCC unroll 16
  for (int r = 0; r < kUsed; ++r)
#pragma GCC unroll 2
    for (int v = 0; v < 2; ++v) std::memcpy(found[r][v], &sum[r][v], sizeof(Vec));
  for (int v = 0; v < 2; ++v)
    for (int64_t r = 0; r < rows; ++r) {
      float* const at = out + r * stride + places[v].column;
      if (places[v].count == kLanes) {
#pragma omp simd
        for (int i = 0; i < kLanes; ++i) at[i] += found[r][v][i];
      } else {
        for (int64_t i = 0; i < places[v].count; ++i) at[i] += found[r][v][i];
      }
    }
}

// `tile` with the fewest sums that cover the rows, in quarters of a tile.
template <typename Kind>
void fitting_tile(const uint32_t* w, int64_t depth, const float* x, float* out, int64_t stride,
                  int64_t rows, const Place (&places)[2]) {
  constexpr int kQuarter = (kRows + 3) / 4, kTwo = (2 * kRows + 3) / 4, kThree = (3 * kRows + 3) / 4;
  if (rows > kThree) return tile<Kind, kRows>(w, depth, x, out, stride, rows, places);
  if (rows > kTwo) return tile<Kind, kThree>(w, depth, x, out, stride, rows, places);
  if (rows > kQuarter) return tile<Kind, kTwo>(w, depth, x, out, stride, rows, places);
  tile<Kind, kQuarter>(w, depth, x, out, stride, rows, places);
}

// Transposes tile `t` of the rows to [depth][kRows], zero-padded.
void lay(const DflashProduct& p, int64_t t, int64_t depth, float* y) {
  const int64_t first = t * kRows, rows = least(kRows, p.rows - first);
  if (rows < kRows || depth > p.depth) std::memset(y, 0, depth * kRows * sizeof(float));
  for (int64_t r = 0; r < rows; ++r) {
    const float* const x = p.x + (first + r) * p.depth;
    for (int64_t k = 0; k < p.depth; ++k) y[k * kRows + r] = x[k];
  }
}

template <typename Kind>
void multiply(const DflashProduct& p, int64_t thread, int64_t threads, DflashBarrier* barrier) {
  const int64_t deep = (p.depth + Kind::kNumbers - 1) / Kind::kNumbers;
  const int64_t depth = deep * Kind::kNumbers, tiles = (p.rows + kRows - 1) / kRows;
  for (int64_t t = thread; t < tiles; t += threads)
    lay(p, t, depth, p.scratch + t * depth * kRows);
  threads = dflash_barrier_wait(barrier);
  if (thread >= threads) return;
  const auto* const w = static_cast<const uint32_t*>(p.matrix);
  const int64_t begin = p.panels * thread / threads, end = p.panels * (thread + 1) / threads;
  const int64_t held = kHeld / (depth * kRows) + 1;
  for (int64_t from = 0; from < tiles; from += held)
    for (int64_t panel = begin; panel < end; ++panel)
      for (int64_t lane = 0; lane < kPanel; lane += kWide) {
        const Place places[2] = {place(p, panel, lane, kLanes),
                                 place(p, panel, lane + kLanes, kLanes)};
        for (int64_t k = 0; k < deep; k += kBlock) {
          const int64_t words = least(kBlock, deep - k), last = least(from + held, tiles);
          const uint32_t* const block = w + (panel * deep + k) * kPanel;
          // The next block follows this one; each tile prefetches a share of it.
          const int64_t share = (words * kPanel + last - from - 1) / (last - from);
          for (int64_t t = from; t < last; ++t) {
            const uint32_t* const next = block + words * kPanel + (t - from) * share;
            for (int64_t i = 0; i < share; i += 64 / sizeof *w) __builtin_prefetch(next + i, 0, 2);
            fitting_tile<Kind>(block + lane, words,
                               p.scratch + (t * depth + k * Kind::kNumbers) * kRows,
                               p.out + t * kRows * p.outputs, p.outputs,
                               least(kRows, p.rows - t * kRows), places);
          }
        }
      }
}

#if defined(__AVX512BF16__)
// AMX tiles: 16 rows of 64 bytes. A panel's words already have the layout of the second factor:
// adjacent pairs of the depth.
constexpr int64_t kTileRows = 16, kTileWords = 16, kTilesBlock = 512;

struct alignas(64) TileShapes {
  uint8_t palette = 1, start = 0, reserved[14] = {};
  uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

// Rows as bfloat16, [rows, padded to 32][depth].
void round_rows(const DflashProduct& p, int64_t thread, int64_t threads, uint16_t* y) {
  const int64_t all = (p.rows + 2 * kTileRows - 1) / (2 * kTileRows) * (2 * kTileRows);
  for (int64_t row = thread; row < all; row += threads) {
    uint16_t* const to = y + row * p.depth;
    if (row >= p.rows) {
      std::memset(to, 0, p.depth * sizeof(uint16_t));
      continue;
    }
    for (int64_t k = 0; k < p.depth; k += 16) {
      const __m256bh halves = _mm512_cvtneps_pbh(_mm512_loadu_ps(p.x + row * p.depth + k));
      std::memcpy(to + k, &halves, sizeof halves);
    }
  }
}

void add_tiles(const DflashProduct& p, int64_t panel, int64_t first, const float (*sums)[kPanel]) {
  for (int64_t lane = 0; lane < kPanel; lane += kHalf) {
    const Place to = place(p, panel, lane, kHalf);
    for (int64_t r = 0; r < least(2 * kTileRows, p.rows - first); ++r) {
      float* const at = p.out + (first + r) * p.outputs + to.column;
      for (int64_t i = 0; i < to.count; ++i) at[i] += sums[r][lane + i];
    }
  }
}

void multiply_tiles(const DflashProduct& p, int64_t thread, int64_t threads,
                    DflashBarrier* barrier) {
  auto* const rows = reinterpret_cast<uint16_t*>(p.scratch);
  round_rows(p, thread, threads, rows);
  threads = dflash_barrier_wait(barrier);
  if (thread >= threads) return;
  const TileShapes shapes;
  __asm__ volatile("ldtilecfg %0" ::"m"(shapes));
  const int64_t deep = p.depth / 2, x_stride = p.depth * 2, w_stride = kPanel * 4;
  const auto* const w = static_cast<const uint32_t*>(p.matrix);
  const int64_t begin = p.panels * thread / threads, end = p.panels * (thread + 1) / threads;
  alignas(64) float sums[2 * kTileRows][kPanel];
  for (int64_t block = 0; block < deep; block += kTilesBlock)
    for (int64_t panel = begin; panel < end; ++panel)
      for (int64_t first = 0; first < p.rows; first += 2 * kTileRows) {
        const uint16_t* const x = rows + first * p.depth;
        const uint32_t* const columns = w + panel * deep * kPanel;
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        for (int64_t k = block; k < least(block + kTilesBlock, deep); k += kTileWords) {
          _tile_loadd(4, x + 2 * k, x_stride);
          _tile_loadd(5, x + kTileRows * p.depth + 2 * k, x_stride);
          _tile_loadd(6, columns + k * kPanel, w_stride);
          _tile_loadd(7, columns + k * kPanel + kHalf, w_stride);
          _tile_dpbf16ps(0, 4, 6);
          _tile_dpbf16ps(1, 4, 7);
          _tile_dpbf16ps(2, 5, 6);
          _tile_dpbf16ps(3, 5, 7);
        }
        _tile_stored(0, sums[0], sizeof sums[0]);
        _tile_stored(1, sums[0] + kHalf, sizeof sums[0]);
        _tile_stored(2, sums[kTileRows], sizeof sums[0]);
        _tile_stored(3, sums[kTileRows] + kHalf, sizeof sums[0]);
        add_tiles(p, panel, first, sums);
      }
  __asm__ volatile("tilerelease");
}

// Whether the processor has AMX and the system lets this process use it.
bool has_tiles() {
  static const bool has = [] {
    uint32_t a = 7, b = 0, c = 0, d = 0;
    __asm__ volatile("cpuid" : "+a"(a), "=b"(b), "+c"(c), "=d"(d));
    constexpr uint32_t kBf16 = 1u << 22, kTile = 1u << 24;
    constexpr int kAskForState = 0x1023, kTileData = 18;
    return (d & kBf16) != 0 && (d & kTile) != 0 &&
           syscall(SYS_arch_prctl, kAskForState, kTileData) == 0;
  }();
  return has;
}
#endif

}  // namespace

extern "C" {

int64_t AT_LEVEL(dflash_product_takes_)(const DflashProduct* p) {
#if defined(__AVX512BF16__)
  // For float32 oneDNN is faster.
  if (p->products == kBfloat16) return p->depth % (2 * kTileWords) == 0 && has_tiles();
#endif
  return p != nullptr;
}

void AT_LEVEL(dflash_decode_product_)(const DflashProduct* p, int64_t thread, int64_t threads,
                                      DflashBarrier* barrier) {
#if defined(__AVX512BF16__)
  if (p->products == kBfloat16) return multiply_tiles(*p, thread, threads, barrier);
#endif
  if (p->products == kFloat32) return multiply<Float32>(*p, thread, threads, barrier);
  multiply<Bfloat16Weights>(*p, thread, threads, barrier);
}
}
