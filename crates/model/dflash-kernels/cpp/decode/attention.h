// Attention of new rows over the cache and themselves.
//
// Keys are processed in chunks of `kChunk` positions. Each query's partial result over a chunk has
// its own maximum and sum, and partial results are merged in order. So the result depends neither
// on which thread computes a chunk nor on neighbouring rows, to the bit.
#pragma once

#include "layout.h"
#include "rows.h"

namespace {

// A key/value head of a sequence in a layer. Rows are numbered within the sequence.
struct Head {
  const DflashShape* shape;
  const DflashSequence* sequence;
  const DflashLayer* layer;
  int64_t number, group;
  float *keys, *values;
  // Queries, keys and values of the sequence's rows, and the row stride.
  const float* qkv;
  int64_t qkv_stride;
};

inline Head head_of(const DflashPass& pass, const Sizes& sizes, const float* qkv, int64_t layer,
                    int64_t s, int64_t first_row, int64_t number) {
  const DflashSequence& sequence = pass.sequences[s];
  const DflashKeysValues& held = sequence.held[layer];
  return {pass.shape,
          &sequence,
          &pass.layers[layer],
          number,
          sizes.group,
          held.keys + number * pass.shape->head_dim * sequence.key_stride,
          held.values + number * sequence.positions * sequence.value_stride,
          qkv + first_row * sizes.qkv,
          sizes.qkv};
}

// Writes the keys and values of a head's new rows to its cache. `kv` is the head's key in the first
// row; the value is `value_offset` after it.
inline void write_rows(const Head& head, Share rows, const float* kv, int64_t value_offset,
                       float* turned) {
  const DflashSequence& sequence = *head.sequence;
  const int64_t dim = head.shape->head_dim, half = dim / 2;
  for (int64_t first = rows.begin; first < rows.end; first += kAttentionRows) {
    const int64_t rest = rows.end - first, count = rest < kAttentionRows ? rest : kAttentionRows;
    for (int64_t i = 0; i < count; ++i) {
      const int64_t row = first + i;
      const float* const in = kv + row * head.qkv_stride;
      rotate_head(in, head.layer->key_norm, sequence.cosine + row * half,
                  sequence.sine + row * half, turned + i * dim, dim, head.shape->eps, 1.0f);
      std::memcpy(head.values + (sequence.start + row) * sequence.value_stride, in + value_offset,
                  dim * sizeof(float));
    }
    // Keys are stored with the dimension first.
    float* const keys = head.keys + sequence.start + first;
    for (int64_t d = 0; d < dim; ++d)
      for (int64_t i = 0; i < count; ++i) keys[d * sequence.key_stride + i] = turned[i * dim + d];
  }
}

// Writes the new rows of a pass's layer that are at some positions.
inline void write_positions(const Head& head, Share positions, float* turned) {
  const DflashSequence& sequence = *head.sequence;
  const int64_t dim = head.shape->head_dim, heads = head.shape->kv_heads;
  const int64_t begin = positions.begin - sequence.start, end = positions.end - sequence.start;
  const Share rows{begin > 0 ? begin : 0, end < sequence.rows ? end : sequence.rows};
  const float* const kv = head.qkv + (head.shape->query_heads + head.number) * dim;
  if (rows.begin < rows.end) write_rows(head, rows, kv, heads * dim, turned);
}

// The keys that a row's query attends to.
inline Share visible(const Head& head, int64_t row) {
  const DflashSequence& sequence = *head.sequence;
  const int64_t position = sequence.start + row, window = head.layer->window;
  const int64_t first = window > 0 ? position + 1 - window : 0;
  const bool causal = head.shape->causal != 0 || window > 0;
  return {first > 0 ? first : 0, causal ? position + 1 : sequence.start + sequence.rows};
}

// The chunks that some rows attend to.
inline Share visible_chunks(const Head& head, Share rows) {
  return {visible(head, rows.begin).begin / kChunk, chunks_up_to(visible(head, rows.end - 1).end)};
}

// Rotated queries of rows: [rows][group][dim].
inline void turn_queries(const Head& head, Share rows, float* queries) {
  const DflashSequence& sequence = *head.sequence;
  const int64_t dim = head.shape->head_dim, half = dim / 2;
  const float scale = 1.0f / std::sqrt(static_cast<float>(dim));
  for (int64_t row = rows.begin; row < rows.end; ++row)
    for (int64_t member = 0; member < head.group; ++member, queries += dim)
      rotate_head(head.qkv + row * head.qkv_stride + (head.number * head.group + member) * dim,
                  head.layer->query_norm, sequence.cosine + row * half, sequence.sine + row * half,
                  queries, dim, head.shape->eps, scale);
}

// A query's partial attention: unnormalised values, then the largest score and the sum of
// exponentials. Without any key the sum is 0.
struct Part {
  float *values, *maximum, *sum;
  Part(float* at, int64_t value_stride)
      : values(at), maximum(at + value_stride), sum(maximum + 1) {}
};

// scores := exp(scores - maximum) in `seen`, 0 in the rest of `count`. Writes maximum and sum.
inline void exponentials(float* scores, Share seen, int64_t count, const Part& part) {
  const int64_t whole = round_up(count, 2 * kLanes);
  for (int64_t i = 0; i < seen.begin; ++i) scores[i] = -__builtin_inff();
  for (int64_t i = seen.end; i < whole; ++i) scores[i] = -__builtin_inff();
  Vec largest[2] = {load(scores), load(scores + kLanes)};
  for (int64_t i = 2 * kLanes; i < whole; i += 2 * kLanes)
    for (int64_t j = 0; j < 2; ++j)
      largest[j] = larger(largest[j], load(scores + i + j * kLanes));
  *part.maximum = largest_lane(larger(largest[0], largest[1]));
  *part.sum = 0.0f;
  if (seen.begin >= seen.end) {
    std::memset(scores, 0, whole * sizeof(float));
    return;
  }
  Vec sums[2] = {};
  for (int64_t i = 0; i < whole; i += 2 * kLanes)
    for (int64_t j = 0; j < 2; ++j) {
      float* const at = scores + i + j * kLanes;
      const Vec one = exponential(load(at) - *part.maximum);
      sums[j] += one;
      store(at, one);
    }
  *part.sum = total(sums[0] + sums[1]);
}

// Computes the partial results [rows][group] over a chunk.
inline void attend_chunk(const Head& head, Share rows, int64_t chunk, const Scratch& scratch,
                         float* parts) {
  const DflashSequence& sequence = *head.sequence;
  const int64_t dim = head.shape->head_dim, count = (rows.end - rows.begin) * head.group;
  const int64_t size = part_size(sequence.value_stride);
  const auto in_chunk = [&](Share seen) {
    const int64_t begin = seen.begin - chunk * kChunk, end = seen.end - chunk * kChunk;
    const Share clipped{begin > 0 ? begin : 0, end < kChunk ? end : kChunk};
    return clipped.begin < clipped.end ? clipped : Share{0, 0};
  };
  // From the first to the last key that any row sees. The first row sees furthest back.
  const Share all = in_chunk({visible(head, rows.begin).begin, visible(head, rows.end - 1).end});
  if (all.begin == all.end) {
    for (int64_t query = 0; query < count; ++query)
      *Part(parts + query * size, sequence.value_stride).sum = 0.0f;
    return;
  }
  const Plan<Float32> plan(count, 1);
  const float* const keys = head.keys + chunk * kChunk;
  for (int64_t at = all.begin / kPanel * kPanel; at < all.end; at += kPanel)
    sums(plan, {keys + at, sequence.key_stride, 0}, dim, scratch.queries, dim, scratch.scores + at,
         kChunk, {keys + at + kChunk, sequence.key_stride, 0});
  for (int64_t query = 0; query < count; ++query)
    exponentials(scratch.scores + query * kChunk,
                 in_chunk(visible(head, rows.begin + query / head.group)), all.end,
                 Part(parts + query * size, sequence.value_stride));
  const int64_t stride = sequence.value_stride;
  const float* const shares = scratch.scores + all.begin;
  const float* const values = head.values + (chunk * kChunk + all.begin) * stride;
  for (int64_t d = 0; d < stride; d += kPanel)
    sums(plan, {values + d, stride, 0}, all.end - all.begin, shares, kChunk, parts + d, size,
         {values + d + kChunk * stride, stride, 0});
}

// Merges the partial result of a later chunk.
inline void join(const Part& joined, const Part& part, int64_t width) {
  if (*part.sum == 0.0f) return;
  if (*joined.sum == 0.0f) {
    std::memcpy(joined.values, part.values, width * sizeof(float));
    *joined.maximum = *part.maximum;
    *joined.sum = *part.sum;
    return;
  }
  const float maximum = *joined.maximum > *part.maximum ? *joined.maximum : *part.maximum;
  const float before = exponential(*joined.maximum - maximum);
  const float now = exponential(*part.maximum - maximum);
  for (int64_t d = 0; d < width; d += kLanes)
    store(joined.values + d, load(joined.values + d) * before + load(part.values + d) * now);
  *joined.maximum = maximum;
  *joined.sum = *joined.sum * before + *part.sum * now;
}

// Normalises and writes a head's attention output.
template <typename Element>
inline void finish(const Part& joined, Element* out, int64_t dim) {
  const float scale = 1.0f / *joined.sum;
  int64_t d = 0;
  for (; d + kLanes <= dim; d += kLanes) store(out + d, load(joined.values + d) * scale);
  if (d < dim) store_some(out + d, load_some(joined.values + d, dim - d) * scale, dim - d);
}

// A head's rows from `unread` on, over all chunks. `attended` is the sequence's first row.
template <typename Element>
void attend_head(const Head& head, const Sizes& sizes, int64_t unread, const Scratch& scratch,
                 Element* attended) {
  const DflashSequence& sequence = *head.sequence;
  const int64_t dim = head.shape->head_dim, stride = sequence.value_stride;
  const int64_t size = part_size(stride);
  write_positions(head, {sequence.start, sequence.start + sequence.rows}, scratch.queries);
  for (int64_t row = unread; row < sequence.rows; row += kAttentionRows) {
    const int64_t rest = sequence.rows - row;
    const Share rows{row, row + (rest < kAttentionRows ? rest : kAttentionRows)};
    const int64_t queries = (rows.end - rows.begin) * head.group;
    turn_queries(head, rows, scratch.queries);
    for (int64_t query = 0; query < queries; ++query)
      *Part(scratch.joined + query * size, stride).sum = 0.0f;
    const Share chunks = visible_chunks(head, rows);
    for (int64_t chunk = chunks.begin; chunk < chunks.end; ++chunk) {
      attend_chunk(head, rows, chunk, scratch, scratch.part);
      for (int64_t query = 0; query < queries; ++query)
        join(Part(scratch.joined + query * size, stride), Part(scratch.part + query * size, stride),
             stride);
    }
    for (int64_t query = 0; query < queries; ++query)
      finish(Part(scratch.joined + query * size, stride),
             attended + (row + query / head.group) * sizes.query_width +
                 (head.number * head.group + query % head.group) * dim,
             dim);
  }
}

// One round of a sequence when heads are split over threads: a group of rows and the chunks that
// they attend to or whose new keys are not written yet, i.e. those from `unwritten` on.
struct Round {
  Share rows, chunks;
  int64_t unwritten;
  int64_t weight() const { return rows.end > rows.begin ? rows.end - rows.begin : 1; }
};

inline Round round_of(const Head& head, int64_t unread, int64_t number) {
  const DflashSequence& sequence = *head.sequence;
  const auto rows_of = [&](int64_t round) {
    const int64_t begin = unread + round * kAttentionRows, end = begin + kAttentionRows;
    return Share{begin, end < sequence.rows ? end : sequence.rows};
  };
  const Share rows = rows_of(number);
  const int64_t first = sequence.start / kChunk;
  // If no output is needed, the first round writes the keys.
  if (rows.begin >= rows.end)
    return {{0, 0},
            {first, number == 0 ? chunks_up_to(sequence.start + sequence.rows) : first},
            first};
  const int64_t unwritten = number == 0 ? first : visible_chunks(head, rows_of(number - 1)).end;
  const Share seen = visible_chunks(head, rows);
  return {rows, {seen.begin < unwritten ? seen.begin : unwritten, seen.end}, unwritten};
}

}  // namespace
