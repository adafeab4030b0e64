// Sizes derived from a pass, and the layout of its scratch memory. Independent of the level, since
// the memory is allocated by code that does not know it.
#pragma once

#include <cstdint>

#include "../decode.h"

namespace {

// Columns of a panel of a packed matrix, and floats of a cache line.
constexpr int64_t kPanelColumns = 32, kLine = 16;

// Up to this many rows every thread normalises all of them itself, which is cheaper than a barrier.
constexpr int64_t kFewRows = 32;
// Keys per partial attention. Chunks start at multiples of this position and are merged in order,
// so any thread may compute them.
constexpr int64_t kChunk = 256;
// Rows of a sequence that attend together.
constexpr int64_t kAttentionRows = 16;

inline int64_t round_up(int64_t n, int64_t unit) { return (n + unit - 1) / unit * unit; }

struct Share {
  int64_t begin, end;
};

inline Share share(int64_t count, int64_t thread, int64_t threads) {
  return {count * thread / threads, count * (thread + 1) / threads};
}

struct Sizes {
  int64_t query_width, kv_width, qkv, group, inner;
  explicit Sizes(const DflashShape& s)
      : query_width(s.query_heads * s.head_dim),
        kv_width(s.kv_heads * s.head_dim),
        qkv(round_up(query_width + 2 * kv_width, kPanelColumns)),
        group(s.query_heads / s.kv_heads),
        inner(round_up(s.inner, kPanelColumns / 2)) {}
};

// Hands out memory piece by piece; with a null start it only counts.
struct Pieces {
  float* next;
  int64_t taken = 0;
  float* take(int64_t elements) {
    float* const at = next == nullptr ? nullptr : next + taken;
    taken += round_up(elements, kLine);
    return at;
  }
};

// Size of a query's partial attention: unnormalised values, sum of exponentials, largest score.
inline int64_t part_size(int64_t value_stride) { return value_stride + kLine; }

// Rows of the sequence that attend together in a round.
inline int64_t attention_rows(const DflashSequence& sequence) {
  return sequence.rows < kAttentionRows ? sequence.rows : kAttentionRows;
}

inline int64_t chunks_up_to(int64_t positions) { return (positions + kChunk - 1) / kChunk; }

// Whether the keys of a head are split over threads: if whole heads would leave threads idle and
// there are enough keys to be worth two more barriers.
inline bool divides_heads(const DflashPass& pass, int64_t threads) {
  int64_t chunks = 0, longest = 0;
  for (int64_t s = 0; s < pass.sequence_count; ++s) {
    const DflashSequence& sequence = pass.sequences[s];
    const int64_t own = chunks_up_to(sequence.start + sequence.rows) * attention_rows(sequence);
    chunks += own;
    longest = own > longest ? own : longest;
  }
  const int64_t heads = pass.shape->kv_heads, each = pass.sequence_count * heads;
  // The largest load per thread with whole heads times the threads, and the total load.
  const int64_t most = (each + threads - 1) / threads * longest * threads, all = chunks * heads;
  return threads > 1 && all >= 4 * threads && 8 * most > 9 * all;
}

// Whether `divides_heads` holds for `threads` threads or fewer, since a team may turn out smaller.
inline bool may_divide_heads(const DflashPass& pass, int64_t threads) {
  for (int64_t t = 2; t <= threads; ++t)
    if (divides_heads(pass, t)) return true;
  return false;
}

// A thread's view of a pass's scratch memory.
struct Scratch {
  float *qkv, *attended, *activated;
  // Rows prepared for a product: common to all threads if they are many, otherwise per thread.
  float* normed = nullptr;
  // Partial results of split heads, by sequence.
  float* parts;
  // Per thread: queries, scores, a partial result and the merged one.
  float *queries = nullptr, *scores = nullptr, *part = nullptr, *joined = nullptr;
  int64_t size;
  Scratch(const DflashPass& pass, int64_t thread, bool has_parts) {
    const DflashShape& shape = *pass.shape;
    const Sizes sizes(shape);
    int64_t most_rows = 0, value_stride = 0, parts_size = 0;
    for (int64_t s = 0; s < pass.sequence_count; ++s) {
      const DflashSequence& sequence = pass.sequences[s];
      const int64_t rows = attention_rows(sequence);
      most_rows = rows > most_rows ? rows : most_rows;
      value_stride = sequence.value_stride > value_stride ? sequence.value_stride : value_stride;
      parts_size += parts_of(shape, sequence);
    }
    Pieces pieces{pass.scratch};
    qkv = pieces.take(pass.rows * sizes.qkv);
    attended = pieces.take(pass.rows * sizes.query_width);
    activated = pieces.take(pass.rows * sizes.inner);
    parts = pieces.take(has_parts ? parts_size : 0);
    const int64_t queries_count = most_rows * sizes.group;
    const int64_t normed_size = pass.rows * round_up(shape.hidden, 2);
    if (pass.rows > kFewRows) normed = pieces.take(normed_size);
    for (int64_t t = 0; t <= thread; ++t) {
      if (pass.rows <= kFewRows) normed = pieces.take(normed_size);
      // Also used to rotate keys, before there are queries.
      queries = pieces.take((queries_count + kAttentionRows) * shape.head_dim);
      scores = pieces.take(queries_count * kChunk);
      part = pieces.take(queries_count * part_size(value_stride));
      joined = pieces.take(queries_count * part_size(value_stride));
    }
    size = pieces.taken;
  }
  // Floats of a sequence's partial results in a round.
  static int64_t parts_of(const DflashShape& shape, const DflashSequence& sequence) {
    return attention_rows(sequence) * shape.query_heads *
           chunks_up_to(sequence.start + sequence.rows) * part_size(sequence.value_stride);
  }
};

struct ContextScratch {
  // Columns of `fused`; number of query-only panels, which are skipped, and of the others.
  int64_t wide, skipped, panels;
  // The output of fc, and keys and values, layer by layer.
  float *fused, *kv;
  // As `Scratch::normed`: features prepared for a product, and the normed `fused`.
  float *features = nullptr, *normed = nullptr;
  // Keys during rotation.
  float* turned = nullptr;
  int64_t size;
  ContextScratch(const DflashContext& context, int64_t thread) {
    const DflashShape& shape = *context.shape;
    const Sizes sizes(shape);
    const int64_t rows = context.rows;
    wide = round_up(shape.hidden, kPanelColumns);
    skipped = sizes.query_width / kPanelColumns;
    panels = sizes.qkv / kPanelColumns - skipped;
    Pieces pieces{context.scratch};
    fused = pieces.take(rows * wide);
    kv = pieces.take(context.layer_count * rows * panels * kPanelColumns);
    for (int64_t t = 0; t <= thread; ++t) {
      if (t == 0 || rows <= kFewRows) {
        features = pieces.take(rows * round_up(context.features, 2));
        normed = pieces.take(rows * round_up(shape.hidden, 2));
      }
      turned = pieces.take(kAttentionRows * shape.head_dim);
    }
    size = pieces.taken;
  }
};

struct HeadScratch {
  // The largest logit so far of each row and lane, and its token.
  float* best = nullptr;
  // As `Scratch::normed`.
  float* normed = nullptr;
  int64_t size;
  HeadScratch(const DflashHead& head, int64_t thread) {
    Pieces pieces{head.scratch};
    for (int64_t t = 0; t <= thread; ++t) {
      if (t == 0 || head.rows <= kFewRows)
        normed = pieces.take(head.rows * round_up(head.hidden, 2));
      best = pieces.take(head.rows * 2 * kLine);
    }
    size = pieces.taken;
  }
};

}  // namespace
