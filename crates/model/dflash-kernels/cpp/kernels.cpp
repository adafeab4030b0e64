// Elementwise kernels of the draft's training pass for float32 on a CPU, each one sweep over
// memory; declared in `src/kernels.rs`. The last dimension of every row is contiguous; `x_stride`
// is the number of elements between rows.
//
// The row loops are those of `kernel_rows.cpp` at the requested level. Rows are split over OpenMP
// threads in fixed blocks, so the order of sums depends only on the number of threads.
#include <omp.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "kernel_rows.h"
#include "level.h"

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

// Per-thread partial sums of a weight gradient, added in thread order.
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

const DflashKernelRows& rows_at(DflashLevel level) {
#if defined(__x86_64__)
  if (level == DflashLevel::kAvx512 || level == DflashLevel::kAvx512bf16)
    return dflash_kernel_rows_avx512;
  if (level == DflashLevel::kAvx2) return dflash_kernel_rows_avx2;
#endif
  return dflash_kernel_rows_baseline;
}

}  // namespace

// Constants of one step, laid out as in src/kernels.rs.
struct AdamWStep {
  double beta1, beta2, epsilon, step_size, root_correction2;
};

extern "C" {

// y = x / rms(x) * weight
void dflash_rms_norm(DflashLevel level, const float* x, const float* weight, float* y, int64_t rows,
                     int64_t dim, float eps) {
  const DflashKernelRows& at = rows_at(level);
  for_rows(rows, dim, [&](int64_t begin, int64_t end, int64_t) {
    at.norm_rows(x, weight, y, begin, end, dim, eps);
  });
}

// dy := gradient of rms_norm (+ residual if given); y = recomputed norm if wanted, for the next
// weight's gradient; dweight += sum over rows
void dflash_rms_norm_backward(DflashLevel level, float* dy, const float* x, const float* weight,
                              const float* residual, float* y, float* dweight, int64_t rows,
                              int64_t dim, float eps) {
  const DflashKernelRows& at = rows_at(level);
  Partials partials(dim);
  for_rows(rows, dim, [&](int64_t begin, int64_t end, int64_t thread) {
    at.norm_backward_rows(dy, x, weight, residual, y, partials.of(thread), begin, end, dim, eps);
  });
  partials.add_to(dweight);
}

// y[n][g][j] = rotate(x[n][j * group + g] / rms * weight), so that the queries of one key/value
// head j are equally spaced over slots and group. The tables are [rows][dim / 2].
void dflash_head_norm_rope(DflashLevel level, const float* x, int64_t x_stride, const float* weight,
                           const float* cosine, const float* sine, float* y, int64_t rows,
                           int64_t kv_heads, int64_t group, int64_t dim, float eps) {
  const DflashKernelRows& at = rows_at(level);
  const DflashHeads heads{kv_heads, group, dim};
  for_rows(rows, kv_heads * group * dim, [&](int64_t begin, int64_t end, int64_t) {
    at.head_rows(x, x_stride, weight, cosine, sine, y, heads, begin, end, eps);
  });
}

// x := the gradient of the above; dy has y's layout; dweight += sum over rows
void dflash_head_norm_rope_backward(DflashLevel level, const float* dy, float* x, int64_t x_stride,
                                    const float* weight, const float* cosine, const float* sine,
                                    float* dweight, int64_t rows, int64_t kv_heads, int64_t group,
                                    int64_t dim, float eps) {
  const DflashKernelRows& at = rows_at(level);
  const DflashHeads heads{kv_heads, group, dim};
  Partials partials(dim);
  for_rows(rows, kv_heads * group * dim, [&](int64_t begin, int64_t end, int64_t thread) {
    std::vector<float> scratch(dim);
    at.head_backward_rows(dy, x, x_stride, weight, cosine, sine, partials.of(thread), heads,
                          begin, end, eps, scratch.data());
  });
  partials.add_to(dweight);
}

// y = silu(gate) * up, gate_up [rows][2 * dim]
void dflash_swiglu(DflashLevel level, const float* gate_up, float* y, int64_t rows, int64_t dim) {
  const DflashKernelRows& at = rows_at(level);
  for_rows(rows, dim, [&](int64_t begin, int64_t end, int64_t) {
    at.swiglu_rows(gate_up, y, begin, end, dim);
  });
}

// gate_up := gradient of the above; dy := recomputed silu(gate) * up, for the weight's gradient
void dflash_swiglu_backward(DflashLevel level, float* dy, float* gate_up, int64_t rows,
                            int64_t dim) {
  const DflashKernelRows& at = rows_at(level);
  for_rows(rows, dim, [&](int64_t begin, int64_t end, int64_t) {
    at.swiglu_backward_rows(dy, gate_up, begin, end, dim);
  });
}

// logits := exp(logits - max); ce = cross-entropy of the label; total = sum of the exponentials;
// correct = 1 where the argmax is the label
void dflash_softmax_cross_entropy(DflashLevel level, float* logits, const int64_t* labels,
                                  float* ce, float* total, float* correct, int64_t rows,
                                  int64_t dim) {
  const DflashKernelRows& at = rows_at(level);
  for_rows(rows, dim, [&](int64_t begin, int64_t end, int64_t) {
    for (int64_t row = begin; row < end; ++row) {
      float* x = logits + row * dim;
      const float maximum = at.row_maximum(x, dim);
      const float label = x[labels[row]];
      // The first of equal logits is the argmax.
      const bool first =
          label == maximum && std::find(x, x + labels[row], maximum) == x + labels[row];
      // A NaN makes the sum and so the loss NaN, and the step is skipped.
      total[row] = at.exponentiate(x, maximum, dim);
      ce[row] = std::log(total[row]) - (label - maximum);
      correct[row] = first ? 1.0f : 0.0f;
    }
  });
}

// exponentials := exponentials * weight / total - weight at the label
void dflash_cross_entropy_gradient(DflashLevel level, float* exponentials, const int64_t* labels,
                                   const float* weight, const float* total, int64_t rows,
                                   int64_t dim) {
  const DflashKernelRows& at = rows_at(level);
  for_rows(rows, dim, [&](int64_t begin, int64_t end, int64_t) {
    for (int64_t row = begin; row < end; ++row) {
      float* x = exponentials + row * dim;
      at.scale_row(x, weight[row] / total[row], dim);
      x[labels[row]] -= weight[row];
    }
  });
}

// Merges a partial attention into `out` [rows][dim] and `lse` [rows], in place.
void dflash_merge_attention(DflashLevel level, float* out, float* lse, const float* part_out,
                            const float* part_lse, int64_t rows, int64_t dim) {
  const DflashKernelRows& at = rows_at(level);
  for_rows(rows, dim, [&](int64_t begin, int64_t end, int64_t) {
    for (int64_t row = begin; row < end; ++row) {
      const float a = lse[row], b = part_lse[row], top = std::max(a, b);
      const float sum = top + std::log(std::exp(a - top) + std::exp(b - top));
      at.merge_row(out + row * dim, part_out + row * dim, std::exp(a - sum), std::exp(b - sum),
                   dim);
      lse[row] = sum;
    }
  });
}

// One AdamW step, after weight decay.
void dflash_adamw(DflashLevel level, float* parameter, const float* gradient, float* mean,
                  float* variance, int64_t elements, const AdamWStep* step) {
  const DflashKernelRows& at = rows_at(level);
  const float beta1 = step->beta1, beta2 = step->beta2, epsilon = step->epsilon;
  const float step_size = step->step_size, root_correction2 = step->root_correction2;
  for_rows(elements, 1, [&](int64_t begin, int64_t end, int64_t) {
    at.adamw_range(parameter, gradient, mean, variance, begin, end, beta1, beta2, epsilon,
                   step_size, root_correction2);
  });
}
}
