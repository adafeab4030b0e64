// Passes of a few rows (a token, a block, a short prompt) through a model's layers on a CPU;
// declared in `src/decode.rs`. Compiled once per level of DFLASH_DECODE_LEVELS with LEVEL set to
// its name; level-specific code is in the file of that name in `decode/`.
//
// All threads of a team run the same function and synchronise at barriers. A matrix is read once
// for up to `kRowBlock` rows, 32 outputs at a time. Each output is summed by one thread in order of
// the depth, so results do not depend on the number of threads or rows, to the bit.
//
// No standard library function is called that could be compiled here and linked elsewhere: its copy
// would require this file's instruction set.
#include "decode.h"

#include <cmath>
#include <cstring>
#include <type_traits>

#define JOIN_(a, b) a##b
#define JOIN(a, b) JOIN_(a, b)
#define AT_LEVEL(name) JOIN(name, LEVEL)
#define QUOTE_(a) #a
#define QUOTE(a) QUOTE_(a)

#include QUOTE(decode/LEVEL.h)

#include "decode/attention.h"
#include "decode/product.h"
#include "decode/rows.h"

namespace {

// Waits for the other threads. Returns whether this one continues, and updates the thread count.
inline bool goes_on(DflashBarrier* barrier, int64_t thread, int64_t& threads) {
  threads = dflash_barrier_wait(barrier);
  return thread < threads;
}

// Normalises rows of `dim` floats (copies them if `norm` is null) into a product's element type.
template <typename Kind>
inline void prepare(const float* x, const float* norm, float* out, Share rows, int64_t dim,
                    float eps) {
  typedef typename Kind::Element Element;
  const int64_t words = Kind::row_words(dim);
  for (int64_t row = rows.begin; row < rows.end; ++row) {
    Element* const y = reinterpret_cast<Element*>(out + row * words);
    if (norm != nullptr)
      norm_row(x + row * dim, norm, y, dim, eps);
    else
      copy_row(x + row * dim, y, dim);
  }
}

// One thread of a call.
struct Member {
  int64_t thread, threads;
  DflashBarrier* barrier;
  bool meets() { return goes_on(barrier, thread, threads); }
  Share share_of(int64_t count) const { return share(count, thread, threads); }
};

// `prepare` for all rows; false if this thread's team was dissolved. With `few`, each thread
// prepares all rows in its own `out`; otherwise threads split the rows of a common `out`.
template <typename Kind>
inline bool prepare_all(const float* x, const float* norm, float* out, int64_t rows, int64_t dim,
                        float eps, bool few, Member& member) {
  prepare<Kind>(x, norm, out, few ? Share{0, rows} : member.share_of(rows), dim, eps);
  return few || member.meets();
}

// Number of leading rows of a sequence whose output is not needed.
inline int64_t unread_of(const DflashSequence& sequence, int64_t first_row, int64_t unread) {
  const int64_t own = unread - first_row;
  return own <= 0 ? 0 : own < sequence.rows ? own : sequence.rows;
}

// A thread's share of the key/value heads of all sequences.
template <typename Element>
void attend_heads(const DflashPass& pass, const Sizes& sizes, int64_t layer, const Scratch& scratch,
                  int64_t unread, const Member& member) {
  Element* const attended = reinterpret_cast<Element*>(scratch.attended);
  const Share mine = member.share_of(pass.sequence_count * pass.shape->kv_heads);
  int64_t first = 0, place = 0;
  for (int64_t s = 0; s < pass.sequence_count; ++s) {
    const DflashSequence& sequence = pass.sequences[s];
    for (int64_t number = 0; number < pass.shape->kv_heads; ++number, ++place)
      if (place >= mine.begin && place < mine.end)
        attend_head(head_of(pass, sizes, scratch.qkv, layer, s, first, number), sizes,
                    unread_of(sequence, first, unread), scratch,
                    attended + first * sizes.query_width);
    first += sequence.rows;
  }
}

// Calls `each` with every head of the pass, its sequence's round and memory for partial results,
// and the sequence's first row.
template <typename Each>
inline void heads_of_round(const DflashPass& pass, const Sizes& sizes, int64_t layer,
                           const Scratch& scratch, int64_t unread, int64_t round, const Each& each) {
  int64_t first = 0;
  float* parts = scratch.parts;
  for (int64_t s = 0; s < pass.sequence_count; ++s) {
    const DflashSequence& sequence = pass.sequences[s];
    const int64_t own = unread_of(sequence, first, unread);
    const int64_t size = Scratch::parts_of(*pass.shape, sequence);
    for (int64_t number = 0; number < pass.shape->kv_heads; ++number) {
      const Head head = head_of(pass, sizes, scratch.qkv, layer, s, first, number);
      each(head, round_of(head, own, round), parts + size / pass.shape->kv_heads * number, first);
    }
    parts += size;
    first += sequence.rows;
  }
}

inline float* parts_of_chunk(const Head& head, float* parts, int64_t chunk) {
  return parts + chunk * attention_rows(*head.sequence) * head.group *
                     part_size(head.sequence->value_stride);
}

// A thread's share of the chunks of all heads.
inline void attend_chunks(const DflashPass& pass, const Sizes& sizes, int64_t layer,
                          const Scratch& scratch, int64_t unread, int64_t round,
                          const Member& member) {
  const auto heads = [&](const auto& each) {
    heads_of_round(pass, sizes, layer, scratch, unread, round, each);
  };
  int64_t all = 0, place = 0;
  heads([&](const Head&, const Round& part, float*, int64_t) {
    all += (part.chunks.end - part.chunks.begin) * part.weight();
  });
  const Share mine = member.share_of(all);
  heads([&](const Head& head, const Round& part, float* parts, int64_t) {
    bool turned = false;
    for (int64_t chunk = part.chunks.begin; chunk < part.chunks.end; ++chunk) {
      const int64_t at = place;
      place += part.weight();
      if (at < mine.begin || at >= mine.end) continue;
      float* const keys =
          scratch.queries + attention_rows(*head.sequence) * head.group * head.shape->head_dim;
      if (chunk >= part.unwritten)
        write_positions(head, {chunk * kChunk, (chunk + 1) * kChunk}, keys);
      if (part.rows.begin == part.rows.end) continue;
      if (!turned) turn_queries(head, part.rows, scratch.queries);
      turned = true;
      attend_chunk(head, part.rows, chunk, scratch, parts_of_chunk(head, parts, chunk));
    }
  });
}

// A thread's share of merging the partial results.
template <typename Element>
void join_chunks(const DflashPass& pass, const Sizes& sizes, int64_t layer, const Scratch& scratch,
                 int64_t unread, int64_t round, const Member& member) {
  Element* const attended = reinterpret_cast<Element*>(scratch.attended);
  int64_t place = 0;
  heads_of_round(pass, sizes, layer, scratch, unread, round,
                 [&](const Head& head, const Round& part, float* parts, int64_t first) {
    const int64_t dim = head.shape->head_dim, stride = head.sequence->value_stride;
    const int64_t queries = (part.rows.end - part.rows.begin) * head.group;
    const Part joined(scratch.joined, stride);
    for (int64_t query = 0; query < queries; ++query) {
      if (place++ % member.threads != member.thread) continue;
      *joined.sum = 0.0f;
      for (int64_t chunk = part.chunks.begin; chunk < part.chunks.end; ++chunk)
        join(joined, Part(parts_of_chunk(head, parts, chunk) + query * part_size(stride), stride),
             stride);
      const int64_t row = first + part.rows.begin + query / head.group;
      finish(joined,
             attended + row * sizes.query_width +
                 (head.number * head.group + query % head.group) * dim,
             dim);
    }
  });
}

// Returns false if this thread's team was dissolved.
template <typename Element>
bool attend(const DflashPass& pass, const Sizes& sizes, int64_t layer, const Scratch& scratch,
            int64_t unread, Member& member) {
  if (!divides_heads(pass, member.threads)) {
    attend_heads<Element>(pass, sizes, layer, scratch, unread, member);
    return member.meets();
  }
  int64_t most = 0;
  for (int64_t s = 0; s < pass.sequence_count; ++s)
    most = pass.sequences[s].rows > most ? pass.sequences[s].rows : most;
  for (int64_t round = 0; round == 0 || round * kAttentionRows < most; ++round) {
    attend_chunks(pass, sizes, layer, scratch, unread, round, member);
    if (!member.meets()) return false;
    join_chunks<Element>(pass, sizes, layer, scratch, unread, round, member);
    if (!member.meets()) return false;
  }
  return true;
}

// Returns false if this thread's team was dissolved. The first `unread` rows are not updated.
template <typename Kind>
bool run_layer(const DflashPass& pass, const Sizes& sizes, int64_t number, const Scratch& scratch,
               int64_t unread, Member& member) {
  typedef typename Kind::Element Element;
  const DflashShape& shape = *pass.shape;
  const DflashLayer& layer = pass.layers[number];
  const int64_t hidden = shape.hidden, read = pass.rows - unread;
  const bool few = pass.rows <= kFewRows;
  float* const x = pass.x + unread * hidden;
  if (!prepare_all<Kind>(pass.x, layer.input_norm, scratch.normed, pass.rows, hidden, shape.eps, few,
                         member))
    return false;
  matrix<Kind>(layer.qkv, hidden, member.share_of(sizes.qkv / kPanel),
               {scratch.normed, Kind::row_words(hidden), pass.rows},
               [&](int64_t panel, int64_t row, const float* sums) {
                 set_panel(scratch.qkv + row * sizes.qkv, panel, layer.qkv_bias, sums);
               });
  if (!member.meets()) return false;
  if (!attend<Element>(pass, sizes, number, scratch, unread, member)) return false;
  const int64_t panels = round_up(hidden, kPanel) / kPanel;
  const int64_t query_words = Kind::row_words(sizes.query_width);
  matrix<Kind>(layer.output, sizes.query_width, member.share_of(panels),
               {scratch.attended + unread * query_words, query_words, read},
               [&](int64_t panel, int64_t row, const float* sums) {
                 add_panel(x + row * hidden, hidden, panel, layer.output_bias, sums);
               });
  if (!member.meets()) return false;
  if (!prepare_all<Kind>(x, layer.post_norm, scratch.normed, read, hidden, shape.eps, few, member))
    return false;
  matrix<Kind>(layer.gate_up, hidden, member.share_of(sizes.inner / kHalfPanel),
               {scratch.normed, Kind::row_words(hidden), read},
               [&](int64_t panel, int64_t row, const float* sums) {
                 set_gated(reinterpret_cast<Element*>(scratch.activated) + row * sizes.inner, panel,
                           layer.gate_up_bias, sums);
               });
  if (!member.meets()) return false;
  matrix<Kind>(layer.down, shape.inner, member.share_of(panels),
               {scratch.activated, Kind::row_words(sizes.inner), read},
               [&](int64_t panel, int64_t row, const float* sums) {
                 add_panel(x + row * hidden, hidden, panel, layer.down_bias, sums);
               });
  return member.meets();
}

// Copies the residual stream to the outputs for the hidden states after `layers` layers.
void copy_aux_states(const DflashPass& pass, int64_t layers) {
  const int64_t hidden = pass.shape->hidden, count = pass.aux_layer_count;
  for (int64_t c = 0; c < count; ++c) {
    if (pass.aux_layer_ids[c] != layers) continue;
    for (int64_t row = 0; row < pass.rows; ++row)
      std::memcpy(pass.aux_states + (row * count + c) * hidden, pass.x + row * hidden,
                  hidden * sizeof(float));
  }
}

template <typename Kind>
void run_pass(const DflashPass& pass, Member member) {
  const Sizes sizes(*pass.shape);
  const Scratch scratch(pass, member.thread, divides_heads(pass, member.threads));
  const int64_t hidden = pass.shape->hidden;
  for (int64_t layer = 0; layer < pass.layer_count; ++layer) {
    const int64_t unread = layer + 1 < pass.layer_count ? 0 : pass.unread;
    // x is not written before two more barriers.
    if (member.thread == 0) copy_aux_states(pass, layer);
    if (!run_layer<Kind>(pass, sizes, layer, scratch, unread, member)) return;
  }
  if (member.thread == 0) copy_aux_states(pass, pass.layer_count);
  if (member.thread == 0 && pass.final_norm != nullptr)
    for (int64_t row = pass.unread; row < pass.rows; ++row) {
      float* const x = pass.x + row * hidden;
      norm_row(x, pass.final_norm, x, hidden, pass.shape->eps);
    }
}

template <typename Kind>
void run_context(const DflashContext& context, Member member) {
  const DflashShape& shape = *context.shape;
  const Sizes sizes(shape);
  const int64_t rows = context.rows, hidden = shape.hidden;
  const ContextScratch scratch(context, member.thread);
  const int64_t wide = scratch.wide, panels = scratch.panels, skipped = scratch.skipped;
  const bool few = rows <= kFewRows;
  if (!prepare_all<Kind>(context.x, nullptr, scratch.features, rows, context.features, shape.eps,
                         few, member))
    return;
  matrix<Kind>(context.fc, context.features, member.share_of(wide / kPanel),
               {scratch.features, Kind::row_words(context.features), rows},
               [&](int64_t panel, int64_t row, const float* sums) {
                 set_panel(scratch.fused + row * wide, panel, nullptr, sums);
               });
  if (!member.meets()) return;
  typedef typename Kind::Element Element;
  const Rows normed{scratch.normed, Kind::row_words(hidden), rows};
  const Share own = few ? Share{0, rows} : member.share_of(rows);
  for (int64_t row = own.begin; row < own.end; ++row)
    norm_row(scratch.fused + row * wide, context.norm,
             reinterpret_cast<Element*>(scratch.normed + row * normed.stride), hidden, shape.eps);
  if (!few && !member.meets()) return;
  const Share columns = member.share_of(context.layer_count * panels);
  for (int64_t i = columns.begin; i < columns.end; ++i) {
    const int64_t layer = i / panels, panel = i % panels;
    float* out = scratch.kv + layer * rows * panels * kPanel;
    const Share one{skipped + panel, skipped + panel + 1};
    const float* const all = context.layers[layer].qkv_bias;
    const float* const bias = all == nullptr ? nullptr : all + skipped * kPanel;
    matrix<Kind>(context.layers[layer].qkv, hidden, one, normed,
                 [&](int64_t, int64_t row, const float* sums) {
                   set_panel(out + row * panels * kPanel, panel, bias, sums);
                 });
  }
  if (!member.meets()) return;
  const Share heads = member.share_of(context.layer_count * shape.kv_heads);
  for (int64_t i = heads.begin; i < heads.end; ++i) {
    const int64_t layer = i / shape.kv_heads, number = i % shape.kv_heads;
    const float* in = scratch.kv + layer * rows * panels * kPanel + sizes.query_width % kPanel;
    for (int64_t s = 0; s < context.sequence_count; ++s) {
      const DflashSequence& sequence = context.sequences[s];
      const DflashKeysValues& held = sequence.held[layer];
      const Head head{&shape,
                      &sequence,
                      &context.layers[layer],
                      number,
                      sizes.group,
                      held.keys + number * shape.head_dim * sequence.key_stride,
                      held.values + number * sequence.positions * sequence.value_stride,
                      nullptr,
                      panels * kPanel};
      write_rows(head, {0, sequence.rows}, in + number * shape.head_dim, sizes.kv_width,
                 scratch.turned);
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

// The first of equal logits wins.
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
void run_head(const DflashHead& head, Member member) {
  const int64_t rows = head.rows, hidden = head.hidden, outputs = head.outputs;
  const HeadScratch scratch(head, member.thread);
  Best* const best = reinterpret_cast<Best*>(scratch.best);
  if (!prepare_all<Kind>(head.x, head.norm, scratch.normed, rows, hidden, head.eps, rows <= kFewRows,
                         member))
    return;
  // All threads that multiply, including those that stop at the next barrier.
  const int64_t all = member.threads;
  const float smallest = -__builtin_inff();
  Ints lanes;
  for (int32_t lane = 0; lane < kLanes; ++lane) lanes[lane] = lane;
  for (int64_t row = 0; row < rows; ++row) best[row] = {Vec{} + smallest, Ints{}};
  matrix<Kind>(head.matrix, hidden, member.share_of(round_up(outputs, kPanel) / kPanel),
               {scratch.normed, Kind::row_words(hidden), rows},
               [&](int64_t panel, int64_t row, const float* sums) {
                 const int64_t column = panel * kPanel, rest = outputs - column;
                 if (head.logits != nullptr)
                   std::memcpy(head.logits + row * outputs + column, sums,
                               (rest < kPanel ? rest : kPanel) * sizeof(float));
                 if (head.best == nullptr) return;
                 const Ints end = Ints{} + static_cast<int32_t>(outputs);
                 for (int64_t i = 0; i < kPanel; i += kLanes) {
                   const Ints token = lanes + static_cast<int32_t>(column + i);
                   best[row].see(token < end ? load(sums + i) : Vec{} + smallest, token);
                 }
               });
  if (head.best == nullptr || !member.meets()) return;
  const Share mine = member.share_of(rows);
  for (int64_t row = mine.begin; row < mine.end; ++row) {
    float value = smallest;
    int64_t token = 0;
    for (int64_t t = 0; t < all; ++t)
      reduce(reinterpret_cast<const Best*>(HeadScratch(head, t).best)[row], value, token);
    head.best[row] = token;
  }
}

// Calls a function instantiated for the requested products.
#if defined(DFLASH_BFLOAT16_PAIRS)
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
  WITH_KIND(pass->shape->products, run_pass, *pass, Member{thread, threads, barrier})
}

void AT_LEVEL(dflash_decode_context_)(const DflashContext* context, int64_t thread,
                                      int64_t threads, DflashBarrier* barrier) {
  WITH_KIND(context->shape->products, run_context, *context, Member{thread, threads, barrier})
}

void AT_LEVEL(dflash_decode_head_)(const DflashHead* head, int64_t thread, int64_t threads,
                                   DflashBarrier* barrier) {
  WITH_KIND(head->products, run_head, *head, Member{thread, threads, barrier})
}
}
