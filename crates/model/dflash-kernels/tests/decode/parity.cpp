// Compares the few-row passes of every level that this processor supports with the same arithmetic
// in double precision, and with themselves: neither the number of threads nor other sequences may
// change a bit.
//
// Prints a line per level, `skipped: LEVEL ...` for unsupported ones, and all differences; the exit
// status is 1 if there are any. The argument `short` omits most shapes, for an emulator.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "decode.h"

// Replaces the team's barrier: no thread is ever late, and the team is dissolved at the meeting
// whose number `late` holds, if any.
int64_t dflash_barrier_wait(DflashBarrier* barrier) {
  if (barrier->threads == 1) return 1;
  const uint32_t turn = __atomic_load_n(&barrier->turn, __ATOMIC_ACQUIRE);
  if (__atomic_add_fetch(&barrier->arrived, 1, __ATOMIC_ACQ_REL) == barrier->threads) {
    __atomic_store_n(&barrier->arrived, 0, __ATOMIC_RELAXED);
    if (barrier->late == turn + 1) barrier->threads = 1;
    const int64_t threads = barrier->threads;
    __atomic_store_n(&barrier->turn, turn + 1, __ATOMIC_RELEASE);
    return threads;
  }
  while (__atomic_load_n(&barrier->turn, __ATOMIC_ACQUIRE) == turn) std::this_thread::yield();
  return barrier->threads;
}

namespace {

typedef std::vector<float> Floats;

struct Level {
  const char* name;
  bool present;
  void (*pass)(const DflashPass*, int64_t, int64_t, DflashBarrier*);
  void (*context)(const DflashContext*, int64_t, int64_t, DflashBarrier*);
  void (*head)(const DflashHead*, int64_t, int64_t, DflashBarrier*);
};

bool has(const std::string& level) {
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (level == "avx2") return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  if (level == "avx512") return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq");
  if (level == "avx512bf16") return __builtin_cpu_supports("avx512bf16");
#endif
  return level == "baseline" || level == "neon";
}

uint64_t state = 1;
float draw() {
  state = state * 6364136223846793005u + 1442695040888963407u;
  return static_cast<float>(static_cast<int64_t>(state >> 40) - (1 << 23)) / (1 << 23);
}
float to_bfloat16(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  bits = (bits + 0x7fff + (bits >> 16 & 1)) & 0xffff0000u;
  std::memcpy(&x, &bits, 4);
  return x;
}
Floats random_floats(int64_t count, float scale, float offset = 0.0f) {
  Floats x(count);
  for (float& one : x) one = offset + scale * draw();
  return x;
}

// A matrix [depth][outputs] of numbers exact in bfloat16, together with its packed form.
struct Matrix {
  int64_t depth, outputs;
  Floats weights;
  std::vector<uint32_t> floats, pairs;
  // If gate and up share panels, 16 columns of each form one.
  Matrix(int64_t depth, int64_t outputs, bool gated = false) : depth(depth), outputs(outputs) {
    weights = random_floats(depth * outputs, 1.5f / std::sqrt(static_cast<float>(depth)));
    for (float& w : weights) w = to_bfloat16(w);
    const int64_t half = outputs / 2, width = gated ? 16 : 32;
    const int64_t panels = ((gated ? half : outputs) + width - 1) / width;
    floats.assign(panels * depth * 32, 0);
    pairs.assign(panels * ((depth + 1) / 2) * 32, 0);
    for (int64_t p = 0; p < panels; ++p)
      for (int64_t k = 0; k < depth; ++k)
        for (int64_t c = 0; c < 32; ++c) {
          int64_t column = p * 32 + c;
          if (gated) column = p * 16 + c % 16 < half ? c / 16 * half + p * 16 + c % 16 : outputs;
          if (column >= outputs) continue;
          uint32_t bits;
          std::memcpy(&bits, &weights[k * outputs + column], 4);
          floats[(p * depth + k) * 32 + c] = bits;
          pairs[(p * ((depth + 1) / 2) + k / 2) * 32 + c] |= k % 2 == 0 ? bits >> 16 : bits;
        }
  }
  const void* packed(DflashProducts products) const {
    return products == kFloat32 ? floats.data() : pairs.data();
  }
};

typedef std::vector<double> Doubles;

// x [depth] times the matrix, plus a bias.
Doubles times(const Doubles& x, const Matrix& m, const Floats& bias) {
  Doubles y(m.outputs);
  for (int64_t o = 0; o < m.outputs; ++o) {
    double sum = bias.empty() ? 0 : bias[o];
    for (int64_t k = 0; k < m.depth; ++k) sum += x[k] * m.weights[k * m.outputs + o];
    y[o] = sum;
  }
  return y;
}

Doubles normed(const Doubles& x, const float* weight, double eps) {
  double squares = 0;
  for (double one : x) squares += one * one;
  const double scale = 1 / std::sqrt(squares / x.size() + eps);
  Doubles y(x.size());
  for (size_t d = 0; d < x.size(); ++d) y[d] = x[d] * scale * weight[d];
  return y;
}

struct Case {
  const char* name;
  int64_t hidden, inner, query_heads, kv_heads, head_dim, layers;
  bool causal, biases, head_norms;
  int64_t window;
};

struct Weights {
  Matrix qkv, output, gate_up, down;
  Floats qkv_bias, output_bias, gate_up_bias, down_bias, input_norm, post_norm, query_norm, key_norm;
};

// Biases are padded to their panels, with 16 columns of gate and up alternating.
Floats padded(const Floats& bias) {
  Floats out(bias);
  out.resize((bias.size() + 31) / 32 * 32);
  return out;
}
Floats gated(const Floats& bias) {
  const int64_t half = bias.size() / 2, panels = (half + 15) / 16;
  Floats out(panels * 32);
  for (int64_t i = 0; i < half; ++i)
    for (int64_t side = 0; side < 2; ++side) out[i / 16 * 32 + side * 16 + i % 16] = bias[side * half + i];
  return out;
}

struct Cache {
  int64_t positions, key_stride, value_stride;
  std::vector<Floats> keys, values;
  std::vector<DflashKeysValues> held;
  Cache(const Case& c, int64_t positions) : positions(positions) {
    key_stride = (positions + 63 + 32) / 32 * 32 + 16;
    value_stride = (c.head_dim + 31) / 32 * 32;
    // Values never written must not be read.
    for (int64_t layer = 0; layer < c.layers; ++layer) {
      keys.emplace_back(c.kv_heads * c.head_dim * key_stride, NAN);
      values.emplace_back(c.kv_heads * positions * value_stride, NAN);
    }
    point();
  }
  Cache(const Cache& other) { *this = other; }
  Cache& operator=(const Cache& other) {
    positions = other.positions, key_stride = other.key_stride, value_stride = other.value_stride;
    keys = other.keys, values = other.values;
    point();
    return *this;
  }
  void point() {
    held.clear();
    for (size_t i = 0; i < keys.size(); ++i) held.push_back({keys[i].data(), values[i].data()});
  }
};

struct Model {
  Case c;
  std::vector<Weights> layers;
  Matrix fc;
  Floats fc_norm, cosine, sine;
  Model(const Case& c, int64_t positions) : c(c), fc(2 * c.hidden + 1, c.hidden) {
    const int64_t query = c.query_heads * c.head_dim, kv = c.kv_heads * c.head_dim;
    const auto bias = [&](int64_t n) { return c.biases ? random_floats(n, 0.3f) : Floats(); };
    const auto head_norm = [&] {
      return c.head_norms ? random_floats(c.head_dim, 0.2f, 1.0f) : Floats();
    };
    for (int64_t i = 0; i < c.layers; ++i)
      layers.push_back({Matrix(c.hidden, query + 2 * kv), Matrix(query, c.hidden),
                        Matrix(c.hidden, 2 * c.inner, true), Matrix(c.inner, c.hidden),
                        bias(query + 2 * kv), bias(c.hidden), bias(2 * c.inner), bias(c.hidden),
                        random_floats(c.hidden, 0.2f, 1.0f), random_floats(c.hidden, 0.2f, 1.0f),
                        head_norm(), head_norm()});
    fc_norm = random_floats(c.hidden, 0.2f, 1.0f);
    for (int64_t p = 0; p < positions; ++p)
      for (int64_t d = 0; d < c.head_dim / 2; ++d) {
        const double angle = p * std::pow(100.0, -2.0 * d / c.head_dim);
        cosine.push_back(std::cos(angle));
        sine.push_back(std::sin(angle));
      }
  }
  // Normalises and rotates a head in place.
  void rotate(double* x, const Floats& norm, int64_t position) const {
    const int64_t half = c.head_dim / 2;
    Doubles y(x, x + c.head_dim);
    if (!norm.empty()) y = normed(y, norm.data(), 1e-6);
    for (int64_t d = 0; d < half; ++d) {
      const double cos = cosine[position * half + d], sin = sine[position * half + d];
      x[d] = y[d] * cos - y[d + half] * sin;
      x[d + half] = y[d + half] * cos + y[d] * sin;
    }
  }
};

// A sequence's cached keys and values in double precision, [layer][position][kv head * dim].
struct History {
  std::vector<std::vector<Doubles>> keys, values;
};

// One pass over new rows of one sequence.
std::vector<Doubles> reference(const Model& m, History& history, const Floats& rows, int64_t count,
                               int64_t start) {
  const Case& c = m.c;
  const int64_t query = c.query_heads * c.head_dim, kv = c.kv_heads * c.head_dim;
  std::vector<Doubles> x;
  for (int64_t r = 0; r < count; ++r)
    x.emplace_back(rows.begin() + r * c.hidden, rows.begin() + (r + 1) * c.hidden);
  for (int64_t layer = 0; layer < c.layers; ++layer) {
    const Weights& w = m.layers[layer];
    auto &keys = history.keys[layer], &values = history.values[layer];
    std::vector<Doubles> queries;
    keys.resize(start);
    values.resize(start);
    for (int64_t r = 0; r < count; ++r) {
      Doubles qkv = times(normed(x[r], w.input_norm.data(), 1e-6), w.qkv, w.qkv_bias);
      for (int64_t h = 0; h < c.query_heads; ++h) m.rotate(&qkv[h * c.head_dim], w.query_norm, start + r);
      for (int64_t h = 0; h < c.kv_heads; ++h)
        m.rotate(&qkv[query + h * c.head_dim], w.key_norm, start + r);
      queries.emplace_back(qkv.begin(), qkv.begin() + query);
      keys.emplace_back(qkv.begin() + query, qkv.begin() + query + kv);
      values.emplace_back(qkv.begin() + query + kv, qkv.begin() + query + 2 * kv);
    }
    for (int64_t r = 0; r < count; ++r) {
      Doubles attended(query);
      const int64_t position = start + r;
      const int64_t end = c.causal || c.window > 0 ? position + 1 : start + count;
      const int64_t begin = c.window > 0 && position + 1 > c.window ? position + 1 - c.window : 0;
      for (int64_t h = 0; h < c.query_heads; ++h) {
        const int64_t at = h / (c.query_heads / c.kv_heads) * c.head_dim;
        Doubles scores;
        double sum = 0;
        for (int64_t key = begin; key < end; ++key) {
          double score = 0;
          for (int64_t d = 0; d < c.head_dim; ++d)
            score += queries[r][h * c.head_dim + d] * keys[key][at + d];
          scores.push_back(std::exp(score / std::sqrt(static_cast<double>(c.head_dim))));
          sum += scores.back();
        }
        for (int64_t key = begin; key < end; ++key)
          for (int64_t d = 0; d < c.head_dim; ++d)
            attended[h * c.head_dim + d] += scores[key - begin] / sum * values[key][at + d];
      }
      const Doubles out = times(attended, w.output, w.output_bias);
      for (int64_t d = 0; d < c.hidden; ++d) x[r][d] += out[d];
      const Doubles gate_up =
          times(normed(x[r], w.post_norm.data(), 1e-6), w.gate_up, w.gate_up_bias);
      Doubles activated(c.inner);
      for (int64_t i = 0; i < c.inner; ++i)
        activated[i] = gate_up[i] / (1 + std::exp(-gate_up[i])) * gate_up[c.inner + i];
      const Doubles down = times(activated, w.down, w.down_bias);
      for (int64_t d = 0; d < c.hidden; ++d) x[r][d] += down[d];
    }
  }
  return x;
}

// Runs a function on this many threads, which meet at barriers; at meeting `dissolved`, if not 0,
// the team is dissolved.
template <typename Work, typename Scratch>
void run(void (*function)(const Work*, int64_t, int64_t, DflashBarrier*), Work work, int64_t threads,
         Scratch size, uint32_t dissolved = 0) {
  // Scratch may contain anything, and may have been sized for a larger team.
  const int64_t floats = size(&work, threads + 1);
  Floats memory(floats + 32, NAN);
  work.scratch = reinterpret_cast<float*>((reinterpret_cast<uintptr_t>(memory.data()) + 63) / 64 * 64);
  const float* const behind = work.scratch + floats;
  const float guard = 42.0f;
  std::memcpy(const_cast<float*>(behind), &guard, 4);
  DflashBarrier barrier{};
  barrier.threads = static_cast<uint32_t>(threads);
  barrier.late = dissolved;
  std::vector<std::thread> others;
  for (int64_t t = 1; t < threads; ++t)
    others.emplace_back([&, t] { function(&work, t, threads, &barrier); });
  function(&work, 0, threads, &barrier);
  for (std::thread& other : others) other.join();
  if (*behind != guard) {
    std::printf("a call wrote behind its scratch memory\n");
    std::exit(1);
  }
}

struct Raw {
  DflashShape shape;
  std::vector<DflashLayer> layers;
  std::vector<Floats> kept;
  Raw(const Model& m, DflashProducts products) {
    const Case& c = m.c;
    shape = {c.hidden, c.inner, c.query_heads, c.kv_heads, c.head_dim, 1e-6f, products, c.causal};
    const auto keep = [&](Floats x) -> const float* {
      if (x.empty()) return nullptr;
      kept.push_back(std::move(x));
      return kept.back().data();
    };
    for (const Weights& w : m.layers)
      layers.push_back({w.qkv.packed(products), w.output.packed(products),
                        w.gate_up.packed(products), w.down.packed(products),
                        keep(padded(w.qkv_bias)), keep(padded(w.output_bias)),
                        keep(w.gate_up_bias.empty() ? Floats() : gated(w.gate_up_bias)),
                        keep(padded(w.down_bias)), w.input_norm.data(), w.post_norm.data(),
                        keep(w.query_norm), keep(w.key_norm), c.window});
  }
};

struct Sequence {
  Cache* cache;
  int64_t start, rows;
};

struct Outcome {
  Floats x, states;
};

Outcome pass(const Level& level, const Model& m, DflashProducts products,
             const std::vector<Sequence>& sequences, Floats x, int64_t unread, int64_t threads,
             uint32_t dissolved = 0) {
  const Raw raw(m, products);
  std::vector<DflashSequence> list;
  int64_t rows = 0;
  for (const Sequence& s : sequences) {
    const int64_t at = s.start * m.c.head_dim / 2;
    list.push_back({s.rows, s.start, s.cache->positions, s.cache->key_stride,
                    s.cache->value_stride, s.cache->held.data(), m.cosine.data() + at,
                    m.sine.data() + at});
    rows += s.rows;
  }
  const uint32_t aux_layer = static_cast<uint32_t>(m.c.layers - 1);
  Outcome out{std::move(x), Floats(rows * m.c.hidden)};
  const DflashPass work{&raw.shape, raw.layers.data(), list.data(), m.c.layers,
                        static_cast<int64_t>(list.size()), rows, unread, out.x.data(), &aux_layer, 1,
                        out.states.data(), nullptr, nullptr};
  run(level.pass, work, threads, dflash_decode_pass_scratch, dissolved);
  return out;
}

int failures = 0;

void close(const char* what, const float* found, const double* expected, int64_t count,
           double tolerance) {
  double worst = 0, largest = 0;
  for (int64_t i = 0; i < count; ++i) {
    const double difference = std::fabs(found[i] - expected[i]);
    worst = difference <= worst ? worst : difference;
    largest = std::fmax(largest, std::fabs(expected[i]));
  }
  if (worst <= tolerance * (1 + largest)) return;
  std::printf("%s: differs by %.2g of %.2g\n", what, worst, largest);
  ++failures;
}

void same(const char* what, const float* found, const float* expected, int64_t count) {
  if (std::memcmp(found, expected, count * sizeof(float)) == 0) return;
  std::printf("%s: other bits\n", what);
  ++failures;
}

double tolerance_of(const Level& level, DflashProducts products) {
  return products == kBfloat16 && std::string(level.name) == "avx512bf16" ? 0.05 : 2e-5;
}

// A sequence that grows by prompts, blocks and tokens, alone and together with others.
void check_pass(const Level& level, const Case& c, DflashProducts products, int64_t prompt) {
  const int64_t positions = prompt + 90;
  state = 7;
  const Model m(c, positions);
  Cache cache(c, positions), other(c, positions);
  History history{std::vector<std::vector<Doubles>>(c.layers), std::vector<std::vector<Doubles>>(c.layers)};
  const auto what = [&](const char* of, int64_t rows, int64_t start) {
    return std::string(level.name) + " " + c.name + ", products " + std::to_string(products) + ", " +
           std::to_string(rows) + " rows behind " + std::to_string(start) + ": " + of;
  };
  int64_t start = 0;
  for (int64_t rows : {prompt, int64_t{1}, int64_t{8}, int64_t{3}, int64_t{37}, int64_t{2}}) {
    if (rows < 1) continue;
    const Floats x = random_floats(rows * c.hidden, 1.0f);
    const Cache before = cache;
    const Outcome found = pass(level, m, products, {{&cache, start, rows}}, x, 0, 1);
    const auto expected = reference(m, history, x, rows, start);
    for (int64_t r = 0; r < rows; ++r)
      close(what("row", rows, start).c_str(), &found.x[r * c.hidden], expected[r].data(), c.hidden,
            tolerance_of(level, products));
    for (int64_t threads : {2, 3, 5}) {
      Cache again = before;
      const Outcome divided = pass(level, m, products, {{&again, start, rows}}, x, 0, threads);
      same(what("threads", rows, start).c_str(), divided.x.data(), found.x.data(), x.size());
      same(what("states", rows, start).c_str(), divided.states.data(), found.states.data(), x.size());
    }
    for (uint32_t dissolved = 1; dissolved < 8; ++dissolved) {
      Cache again = before;
      const Outcome left =
          pass(level, m, products, {{&again, start, rows}}, x, 0, 3, dissolved);
      same(what("dissolved", rows, start).c_str(), left.x.data(), found.x.data(), x.size());
    }
    // One row at a time, if rows do not see each other.
    if (c.causal && rows <= 8) {
      Cache single = before;
      for (int64_t r = 0; r < rows; ++r) {
        const Floats one(x.begin() + r * c.hidden, x.begin() + (r + 1) * c.hidden);
        const Outcome alone = pass(level, m, products, {{&single, start + r, 1}}, one, 0, 1);
        same(what("alone", rows, start).c_str(), alone.x.data(), &found.x[r * c.hidden], c.hidden);
      }
    }
    // Together with another sequence, and with its first rows' results unused.
    for (int64_t threads : {1, 3}) {
      Cache again = before;
      Floats both = random_floats(5 * c.hidden, 1.0f);
      both.insert(both.end(), x.begin(), x.end());
      const Outcome company = pass(level, m, products, {{&other, 0, 5}, {&again, start, rows}}, both, 0, threads);
      same(what("company", rows, start).c_str(), &company.x[5 * c.hidden], found.x.data(), x.size());
      if (rows < 2) continue;
      again = before;
      const Outcome rest = pass(level, m, products, {{&again, start, rows}}, x, rows / 2, threads);
      const int64_t from = rows / 2 * c.hidden;
      same(what("unread", rows, start).c_str(), &rest.x[from], &found.x[from], x.size() - from);
      for (int64_t layer = 0; layer < c.layers; ++layer)
        for (int64_t at = 0; at < c.kv_heads * c.head_dim; ++at)
          same(what("keys", rows, start).c_str(), &again.keys[layer][at * cache.key_stride],
               &cache.keys[layer][at * cache.key_stride], start + rows);
    }
    start += rows;
  }
}

// Context: a pass over the features' rows writes the same as the layers' own matmuls.
void check_context(const Level& level, const Case& c, DflashProducts products) {
  state = 11;
  const int64_t positions = 140;
  const Model m(c, positions);
  for (int64_t rows : {1, 5, 40}) {
    const Floats x = random_floats(rows * m.fc.depth, 1.0f);
    const Raw raw(m, products);
    Floats first;
    // With three threads, all continue, or the team is dissolved at one of their meetings.
    for (uint32_t way = 0; way < 6; ++way) {
      const int64_t threads = way == 0 ? 1 : 3;
      Cache cache(c, positions);
      const int64_t start = 7, at = start * c.head_dim / 2;
      const DflashSequence sequence{rows, start, positions, cache.key_stride, cache.value_stride,
                                    cache.held.data(), m.cosine.data() + at, m.sine.data() + at};
      const DflashContext work{&raw.shape, raw.layers.data(), &sequence, c.layers, 1, rows,
                               m.fc.depth, x.data(), m.fc.packed(products), m.fc_norm.data(), nullptr};
      run(level.context, work, threads, dflash_decode_context_scratch, way == 0 ? 0 : way - 1);
      Floats all;
      const std::string what = std::string(level.name) + " " + c.name + " context";
      for (int64_t r = 0; r < rows; ++r) {
        const Doubles in(x.begin() + r * m.fc.depth, x.begin() + (r + 1) * m.fc.depth);
        const Doubles hidden = normed(times(in, m.fc, {}), m.fc_norm.data(), 1e-6);
        for (int64_t layer = 0; layer < c.layers; ++layer) {
          const Weights& w = m.layers[layer];
          Doubles qkv = times(hidden, w.qkv, w.qkv_bias);
          for (int64_t h = 0; h < c.kv_heads; ++h) {
            double* const key = &qkv[(c.query_heads + h) * c.head_dim];
            m.rotate(key, w.key_norm, start + r);
            Floats found(c.head_dim);
            for (int64_t d = 0; d < c.head_dim; ++d)
              found[d] = cache.keys[layer][(h * c.head_dim + d) * cache.key_stride + start + r];
            const float* const value =
                &cache.values[layer][(h * positions + start + r) * cache.value_stride];
            close((what + " keys").c_str(), found.data(), key, c.head_dim, tolerance_of(level, products));
            close((what + " values").c_str(), value, key + c.kv_heads * c.head_dim, c.head_dim,
                  tolerance_of(level, products));
            all.insert(all.end(), found.begin(), found.end());
            all.insert(all.end(), value, value + c.head_dim);
          }
        }
      }
      if (way == 0) first = all;
      same((what + " threads").c_str(), all.data(), first.data(), all.size());
    }
  }
}

void check_head(const Level& level, DflashProducts products, bool is_short) {
  state = 13;
  for (int64_t depth : {1, 7, 64, 515})
    for (int64_t outputs : {1, 31, 130}) {
      const Matrix matrix(depth, outputs);
      for (int64_t rows : {1, 2, 3, 4, 5, 6, 7, 8, 9, 13, 33, 70}) {
        if (is_short && (rows > 9 || outputs == 31)) continue;
        const Floats x = random_floats(rows * depth, 1.0f), norm = random_floats(depth, 0.2f, 1.0f);
        Floats first;
        std::vector<int64_t> first_best;
        // Three threads: all continue, or the team is dissolved at the first or second meeting.
        for (uint32_t way = 0; way < 4; ++way) {
          const int64_t threads = way == 0 ? 1 : 3;
          Floats logits(rows * outputs);
          std::vector<int64_t> best(rows, -1);
          const DflashHead work{matrix.packed(products), depth, outputs, rows, x.data(),
                                norm.data(), 1e-6f, products, logits.data(), best.data(), nullptr};
          run(level.head, work, threads, dflash_decode_head_scratch, way == 0 ? 0 : way - 1);
          const std::string what = std::string(level.name) + " head " + std::to_string(depth) + " x " +
                                   std::to_string(outputs) + ", " + std::to_string(rows) + " rows";
          for (int64_t r = 0; r < rows; ++r) {
            const Doubles in(x.begin() + r * depth, x.begin() + (r + 1) * depth);
            const Doubles expected = times(normed(in, norm.data(), 1e-6), matrix, {});
            const float* const row = &logits[r * outputs];
            close(what.c_str(), row, expected.data(), outputs, tolerance_of(level, products));
            int64_t largest = 0;
            for (int64_t o = 1; o < outputs; ++o) largest = row[o] > row[largest] ? o : largest;
            if (best[r] != largest) std::printf("%s: the best token\n", what.c_str()), ++failures;
          }
          if (way == 0) first = logits;
          same(what.c_str(), logits.data(), first.data(), logits.size());
        }
      }
    }
}

}  // namespace

int main(int count, char** arguments) {
  const bool is_short = count > 1 && std::string(arguments[1]) == "short";
#define LEVEL_OF(level)                                                                        \
  {#level, has(#level), dflash_decode_pass_##level, dflash_decode_context_##level, \
   dflash_decode_head_##level},
  const Level levels[] = {DFLASH_DECODE_LEVELS(LEVEL_OF)};
  const Case cases[] = {
      {"grouped", 96, 80, 4, 2, 32, 2, true, false, true, 0},
      {"windowed", 72, 56, 6, 2, 20, 2, true, true, false, 21},
      {"block", 64, 48, 3, 3, 16, 1, false, false, true, 0},
      {"one head", 32, 32, 5, 1, 128, 1, true, true, true, 0},
  };
  for (const Level& level : levels) {
    if (!level.present) {
      std::printf("skipped: %s, which this processor lacks\n", level.name);
      continue;
    }
    const int before = failures;
    for (DflashProducts products : {kFloat32, kBfloat16Weights, kBfloat16}) {
      if (is_short && products == kBfloat16) continue;
      for (const Case& c : cases) {
        if (!is_short) check_pass(level, c, products, c.causal && products == kFloat32 ? 520 : 0);
        check_pass(level, c, products, is_short ? c.window > 0 && products == kFloat32 ? 260 : 3 : 40);
        check_context(level, c, products);
      }
      check_head(level, products, is_short);
    }
    if (failures == before) std::printf("%s: ok\n", level.name);
  }
  return failures == 0 ? 0 : 1;
}
