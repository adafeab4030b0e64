// Unpacks columns of a packed matrix; called from `src/decode/panels.rs`.
//
// Panels are read in order and a few result rows are written at a time. It runs on libtorch's
// threads, between libtorch's products.
#include <algorithm>
#include <cstdint>
#include <cstring>

extern "C" {

// Adjacent columns of a panel.
struct DflashColumns {
  int64_t panel, lane, count;
};

// Conversion of rows of words to rows of values.
enum DflashUnpack : int32_t { kFloats = 0, kWidened = 1, kHalves = 2 };
}

namespace {

constexpr int64_t kWidth = 32;
// Rows of words per thread and step: 4 KiB of a panel.
constexpr int64_t kTile = 32;

struct Floats {
  typedef float Number;
  static constexpr int64_t rows = 1;
  static void unpack(uint32_t word, float* out, int64_t) { std::memcpy(out, &word, sizeof word); }
};

// A word holds two bfloat16 of consecutive rows, the first in the low half.
struct Widened {
  typedef float Number;
  static constexpr int64_t rows = 2;
  static void unpack(uint32_t word, float* out, int64_t width) {
    const uint32_t first = word << 16, second = word & 0xffff0000u;
    std::memcpy(out, &first, sizeof first);
    std::memcpy(out + width, &second, sizeof second);
  }
};

struct Halves {
  typedef uint16_t Number;
  static constexpr int64_t rows = 2;
  static void unpack(uint32_t word, uint16_t* out, int64_t width) {
    out[0] = static_cast<uint16_t>(word);
    out[width] = static_cast<uint16_t>(word >> 16);
  }
};

template <typename Way>
inline void run(const uint32_t* words, typename Way::Number* out, int64_t count, int64_t width) {
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) Way::unpack(words[i], out + i, width);
}

template <typename Way>
void unpack(const uint32_t* panels, int64_t depth, const DflashColumns* runs, int64_t run_count,
            int64_t width, typename Way::Number* out, int threads) {
  const int64_t tiles = (depth + kTile - 1) / kTile;
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t tile = 0; tile < tiles; ++tile) {
    const int64_t begin = tile * kTile, end = std::min(begin + kTile, depth);
    typename Way::Number* column = out;
    for (int64_t r = 0; r < run_count; ++r) {
      const uint32_t* words = panels + runs[r].panel * depth * kWidth + runs[r].lane;
      for (int64_t k = begin; k < end; ++k) {
        typename Way::Number* const row = column + k * Way::rows * width;
        // The common width as a compile-time constant.
        if (runs[r].count == kWidth)
          run<Way>(words + k * kWidth, row, kWidth, width);
        else
          run<Way>(words + k * kWidth, row, runs[r].count, width);
      }
      column += runs[r].count;
    }
  }
}

}  // namespace

extern "C" void dflash_unpack(const uint32_t* panels, int64_t depth, const DflashColumns* runs,
                              int64_t run_count, int64_t width, DflashUnpack way, void* out,
                              int64_t threads) {
  const int count = static_cast<int>(threads);
  float* const floats = static_cast<float*>(out);
  switch (way) {
    case kFloats:
      return unpack<Floats>(panels, depth, runs, run_count, width, floats, count);
    case kWidened:
      return unpack<Widened>(panels, depth, runs, run_count, width, floats, count);
    case kHalves:
      return unpack<Halves>(panels, depth, runs, run_count, width, static_cast<uint16_t*>(out),
                            count);
  }
}
