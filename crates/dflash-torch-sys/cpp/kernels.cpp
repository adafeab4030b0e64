// Elementwise work of the draft's training pass on a CPU in float32, each in one sweep over
// memory; `src/kernels.rs` declares the same functions. All rows are contiguous in their last
// dimension; `x_stride` are elements between rows.
//
// Plain loops that the compiler vectorises for each instruction set. Rows are shared out over
// OpenMP threads in fixed blocks, so that sums have one order for a given number of threads.
#include <omp.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

// On x86-64 the instruction set is chosen when the program runs. Elsewhere it is the compiler's
// baseline, which on aarch64 has vectors.
#if defined(__x86_64__)
#define VECTORISED __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define VECTORISED
#endif

namespace {

// Below this many elements a parallel region costs more than it saves.
constexpr int64_t kSerialElements = 1 << 14;

template <typename Body>
void for_rows(int64_t rows, int64_t row_elements, const Body& body) {
  const bool parallel = rows * row_elements > kSerialElements && !omp_in_parallel();
#pragma omp parallel if (parallel)
  {
    const int64_t threads = omp_get_num_threads(), thread = omp_get_thread_num();
    body(rows * thread / threads, rows * (thread + 1) / threads, thread);
  }
}

// Sums each thread's part of a weight gradient in the order of the threads.
class Partials {
 public:
  explicit Partials(int64_t dim) : dim_(dim), sums_(omp_get_max_threads() * dim, 0.0f) {}
  float* of(int64_t thread) { return sums_.data() + thread * dim_; }
  void add_to(float* total) const {
    for (size_t start = 0; start < sums_.size(); start += dim_)
      for (int64_t d = 0; d < dim_; ++d) total[d] += sums_[start + d];
  }

 private:
  int64_t dim_;
  std::vector<float> sums_;
};

// exp to about 1 ulp: 2^n times a polynomial on [-ln2/2, ln2/2] (coefficients: Cephes expf).
inline float fast_exp(float x) {
  x = std::min(std::max(x, -87.0f), 88.0f);
  const float n = std::nearbyintf(x * 1.44269504f);
  const float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = (p * r) * r + r + 1.0f;
  const int32_t bits = (static_cast<int32_t>(n) + 127) << 23;
  float scale;
  std::memcpy(&scale, &bits, sizeof scale);
  return p * scale;
}

inline float reciprocal_rms(const float* x, int64_t dim, float eps) {
  float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
  for (int64_t d = 0; d < dim; ++d) sum += x[d] * x[d];
  return 1.0f / std::sqrt(sum / static_cast<float>(dim) + eps);
}

VECTORISED void norm_rows(const float* x, const float* weight, float* y, int64_t begin,
                          int64_t end, int64_t dim, float eps) {
  for (int64_t row = begin; row < end; ++row) {
    const float* in = x + row * dim;
    float* out = y + row * dim;
    const float scale = reciprocal_rms(in, dim, eps);
#pragma omp simd
    for (int64_t d = 0; d < dim; ++d) out[d] = in[d] * scale * weight[d];
  }
}

// What a row of a norm's input gets: scale * (dy * weight - x * scale^2 * mean(dy * weight * x)).
struct NormRow {
  float scale, pull;
};

inline NormRow norm_row(const float* dy, const float* x, const float* weight, int64_t dim,
                        float eps) {
  float square = 0.0f, dot = 0.0f;
#pragma omp simd reduction(+ : square, dot)
  for (int64_t d = 0; d < dim; ++d) {
    square += x[d] * x[d];
    dot += dy[d] * weight[d] * x[d];
  }
  const float scale = 1.0f / std::sqrt(square / static_cast<float>(dim) + eps);
  return {scale, scale * scale * dot / static_cast<float>(dim)};
}

VECTORISED void norm_backward_rows(float* dy, const float* x, const float* weight,
                                   const float* residual, float* y, float* dweight, int64_t begin,
                                   int64_t end, int64_t dim, float eps) {
  for (int64_t row = begin; row < end; ++row) {
    float* slope = dy + row * dim;
    const float* in = x + row * dim;
    const NormRow norm = norm_row(slope, in, weight, dim, eps);
    if (y != nullptr) {
      float* out = y + row * dim;
#pragma omp simd
      for (int64_t d = 0; d < dim; ++d) out[d] = in[d] * norm.scale * weight[d];
    }
#pragma omp simd
    for (int64_t d = 0; d < dim; ++d) {
      dweight[d] += slope[d] * in[d] * norm.scale;
      slope[d] = norm.scale * (slope[d] * weight[d] - in[d] * norm.pull);
    }
    if (residual != nullptr) {
      const float* beside = residual + row * dim;
#pragma omp simd
      for (int64_t d = 0; d < dim; ++d) slope[d] += beside[d];
    }
  }
}

struct Heads {
  int64_t kv_heads, group, dim;
  // First element of a head in the regrouped layout [rows][group][kv_heads][dim].
  int64_t regrouped(int64_t row, int64_t head) const {
    return ((row * group + head % group) * kv_heads + head / group) * dim;
  }
};

VECTORISED void head_rows(const float* x, int64_t x_stride, const float* weight,
                          const float* cosine, const float* sine, float* y, const Heads& heads,
                          int64_t begin, int64_t end, float eps) {
  const int64_t dim = heads.dim, half = dim / 2;
  for (int64_t row = begin; row < end; ++row) {
    const float *c = cosine + row * half, *s = sine + row * half;
    for (int64_t head = 0; head < heads.kv_heads * heads.group; ++head) {
      const float* in = x + row * x_stride + head * dim;
      float* out = y + heads.regrouped(row, head);
      const float scale = reciprocal_rms(in, dim, eps);
#pragma omp simd
      for (int64_t d = 0; d < half; ++d) {
        const float low = in[d] * scale * weight[d];
        const float high = in[d + half] * scale * weight[d + half];
        out[d] = low * c[d] - high * s[d];
        out[d + half] = high * c[d] + low * s[d];
      }
    }
  }
}

VECTORISED void head_backward_rows(const float* dy, float* x, int64_t x_stride,
                                   const float* weight, const float* cosine, const float* sine,
                                   float* dweight, const Heads& heads, int64_t begin, int64_t end,
                                   float eps, float* scratch) {
  const int64_t dim = heads.dim, half = dim / 2;
  for (int64_t row = begin; row < end; ++row) {
    const float *c = cosine + row * half, *s = sine + row * half;
    for (int64_t head = 0; head < heads.kv_heads * heads.group; ++head) {
      const float* in = dy + heads.regrouped(row, head);
#pragma omp simd
      for (int64_t d = 0; d < half; ++d) {
        scratch[d] = in[d] * c[d] + in[d + half] * s[d];
        scratch[d + half] = in[d + half] * c[d] - in[d] * s[d];
      }
      float* raw = x + row * x_stride + head * dim;
      const NormRow norm = norm_row(scratch, raw, weight, dim, eps);
#pragma omp simd
      for (int64_t d = 0; d < dim; ++d) {
        dweight[d] += scratch[d] * raw[d] * norm.scale;
        raw[d] = norm.scale * (scratch[d] * weight[d] - raw[d] * norm.pull);
      }
    }
  }
}

VECTORISED void swiglu_rows(const float* gate_up, float* y, int64_t begin, int64_t end,
                            int64_t dim) {
  for (int64_t row = begin; row < end; ++row) {
    const float *gate = gate_up + row * 2 * dim, *up = gate + dim;
    float* out = y + row * dim;
#pragma omp simd
    for (int64_t d = 0; d < dim; ++d) out[d] = gate[d] / (1.0f + fast_exp(-gate[d])) * up[d];
  }
}

VECTORISED void swiglu_backward_rows(float* dy, float* gate_up, int64_t begin, int64_t end,
                                     int64_t dim) {
  for (int64_t row = begin; row < end; ++row) {
    float *gate = gate_up + row * 2 * dim, *up = gate + dim, *slope = dy + row * dim;
#pragma omp simd
    for (int64_t d = 0; d < dim; ++d) {
      const float g = gate[d], u = up[d], upstream = slope[d];
      const float sigmoid = 1.0f / (1.0f + fast_exp(-g));
      const float silu = g * sigmoid;
      slope[d] = silu * u;
      up[d] = upstream * silu;
      gate[d] = upstream * u * (sigmoid + silu * (1.0f - sigmoid));
    }
  }
}

VECTORISED float row_maximum(const float* x, int64_t dim) {
  float maximum = x[0];
#pragma omp simd reduction(max : maximum)
  for (int64_t d = 0; d < dim; ++d) maximum = std::max(maximum, x[d]);
  return maximum;
}

VECTORISED float exponentiate(float* x, float maximum, int64_t dim) {
  float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
  for (int64_t d = 0; d < dim; ++d) {
    x[d] = fast_exp(x[d] - maximum);
    sum += x[d];
  }
  return sum;
}

VECTORISED void scale_row(float* x, float factor, int64_t dim) {
#pragma omp simd
  for (int64_t d = 0; d < dim; ++d) x[d] *= factor;
}

VECTORISED void merge_row(float* out, const float* part, float old_share, float new_share,
                          int64_t dim) {
#pragma omp simd
  for (int64_t d = 0; d < dim; ++d) out[d] = out[d] * old_share + part[d] * new_share;
}

VECTORISED void adamw_range(float* parameter, const float* gradient, float* mean, float* variance,
                            int64_t begin, int64_t end, float beta1, float beta2,
                            float epsilon, float step_size, float root_correction2) {
#pragma omp simd
  for (int64_t i = begin; i < end; ++i) {
    const float g = gradient[i];
    mean[i] += (g - mean[i]) * (1.0f - beta1);
    variance[i] = variance[i] * beta2 + (1.0f - beta2) * g * g;
    const float divisor = std::sqrt(variance[i]) / root_correction2 + epsilon;
    parameter[i] -= step_size * mean[i] / divisor;
  }
}

}  // namespace

// The numbers of one step, as src/kernels.rs lays them out.
struct AdamWStep {
  double beta1, beta2, epsilon, step_size, root_correction2;
};

extern "C" {

// y = x / rms(x) * weight
void dflash_rms_norm(const float* x, const float* weight, float* y, int64_t rows, int64_t dim,
                     float eps) {
  for_rows(rows, dim, [&](int64_t begin, int64_t end, int64_t) {
    norm_rows(x, weight, y, begin, end, dim, eps);
  });
}

// dy := gradient of rms_norm (+ residual where given); y = the norm again where wanted, for the
// next weight's gradient; dweight += sum over rows
void dflash_rms_norm_backward(float* dy, const float* x, const float* weight,
                              const float* residual, float* y, float* dweight, int64_t rows,
                              int64_t dim, float eps) {
  Partials partials(dim);
  for_rows(rows, dim, [&](int64_t begin, int64_t end, int64_t thread) {
    norm_backward_rows(dy, x, weight, residual, y, partials.of(thread), begin, end, dim, eps);
  });
  partials.add_to(dweight);
}

// y[n][g][j] = rotate(x[n][j * group + g] / rms * weight): the queries of one key/value head j lie
// at one distance, over slots and group alike. The tables are [rows][dim / 2].
void dflash_head_norm_rope(const float* x, int64_t x_stride, const float* weight,
                           const float* cosine, const float* sine, float* y, int64_t rows,
                           int64_t kv_heads, int64_t group, int64_t dim, float eps) {
  const Heads heads{kv_heads, group, dim};
  for_rows(rows, kv_heads * group * dim, [&](int64_t begin, int64_t end, int64_t) {
    head_rows(x, x_stride, weight, cosine, sine, y, heads, begin, end, eps);
  });
}

// x := the gradient of the above; dy has y's layout; dweight += sum over rows
void dflash_head_norm_rope_backward(const float* dy, float* x, int64_t x_stride,
                                    const float* weight, const float* cosine, const float* sine,
                                    float* dweight, int64_t rows, int64_t kv_heads, int64_t group,
                                    int64_t dim, float eps) {
  const Heads heads{kv_heads, group, dim};
  Partials partials(dim);
  for_rows(rows, kv_heads * group * dim, [&](int64_t begin, int64_t end, int64_t thread) {
    std::vector<float> scratch(dim);
    head_backward_rows(dy, x, x_stride, weight, cosine, sine, partials.of(thread), heads, begin,
                       end, eps, scratch.data());
  });
  partials.add_to(dweight);
}

// y = silu(gate) * up, gate_up [rows][2 * dim]
void dflash_swiglu(const float* gate_up, float* y, int64_t rows, int64_t dim) {
  for_rows(rows, dim, [&](int64_t begin, int64_t end, int64_t) {
    swiglu_rows(gate_up, y, begin, end, dim);
  });
}

// gate_up := gradient of the above; dy := silu(gate) * up again, for the weight's gradient
void dflash_swiglu_backward(float* dy, float* gate_up, int64_t rows, int64_t dim) {
  for_rows(rows, dim, [&](int64_t begin, int64_t end, int64_t) {
    swiglu_backward_rows(dy, gate_up, begin, end, dim);
  });
}

// logits := exp(logits - max); ce = cross-entropy of the label; total = sum of the exponentials;
// correct = 1 where the argmax is the label
void dflash_softmax_cross_entropy(float* logits, const int64_t* labels, float* ce, float* total,
                                  float* correct, int64_t rows, int64_t dim) {
  for_rows(rows, dim, [&](int64_t begin, int64_t end, int64_t) {
    for (int64_t row = begin; row < end; ++row) {
      float* x = logits + row * dim;
      const float maximum = row_maximum(x, dim);
      const float label = x[labels[row]];
      // Of equal logits the first is the argmax.
      const bool first =
          label == maximum && std::find(x, x + labels[row], maximum) == x + labels[row];
      // A NaN anywhere makes the sum NaN and so the loss, and the step is skipped.
      total[row] = exponentiate(x, maximum, dim);
      ce[row] = std::log(total[row]) - (label - maximum);
      correct[row] = first ? 1.0f : 0.0f;
    }
  });
}

// exponentials := exponentials * weight / total - weight at the label
void dflash_cross_entropy_gradient(float* exponentials, const int64_t* labels, const float* weight,
                                   const float* total, int64_t rows, int64_t dim) {
  for_rows(rows, dim, [&](int64_t begin, int64_t end, int64_t) {
    for (int64_t row = begin; row < end; ++row) {
      float* x = exponentials + row * dim;
      scale_row(x, weight[row] / total[row], dim);
      x[labels[row]] -= weight[row];
    }
  });
}

// Folds a part into a merged attention in place: out [rows][dim], lse [rows].
void dflash_merge_attention(float* out, float* lse, const float* part_out, const float* part_lse,
                            int64_t rows, int64_t dim) {
  for_rows(rows, dim, [&](int64_t begin, int64_t end, int64_t) {
    for (int64_t row = begin; row < end; ++row) {
      const float a = lse[row], b = part_lse[row], top = std::max(a, b);
      const float sum = top + std::log(std::exp(a - top) + std::exp(b - top));
      merge_row(out + row * dim, part_out + row * dim, std::exp(a - sum), std::exp(b - sum), dim);
      lse[row] = sum;
    }
  });
}

// One AdamW step, after weight decay.
void dflash_adamw(float* parameter, const float* gradient, float* mean, float* variance,
                  int64_t elements, const AdamWStep* step) {
  const float beta1 = step->beta1, beta2 = step->beta2, epsilon = step->epsilon;
  const float step_size = step->step_size, root_correction2 = step->root_correction2;
  for_rows(elements, 1, [&](int64_t begin, int64_t end, int64_t) {
    adamw_range(parameter, gradient, mean, variance, begin, end, beta1, beta2, epsilon,
                step_size, root_correction2);
  });
}
}
