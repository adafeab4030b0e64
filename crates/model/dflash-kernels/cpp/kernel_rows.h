// Shared by `kernels.cpp` and the copies of `kernel_rows.cpp`, one per instruction-set level.
#pragma once

#include <cstdint>

// The compiled levels. AVX512-BF16 adds nothing for float32, and NEON is the aarch64 baseline.
#if defined(__x86_64__)
#define DFLASH_KERNEL_LEVELS(X) X(avx512) X(avx2) X(baseline)
#else
#define DFLASH_KERNEL_LEVELS(X) X(baseline)
#endif

struct DflashHeads {
  int64_t kv_heads, group, dim;
};

// Loops over the rows from `begin` to `end`, or over one row.
struct DflashKernelRows {
  void (*norm_rows)(const float* x, const float* weight, float* y, int64_t begin, int64_t end,
                    int64_t dim, float eps);
  void (*norm_backward_rows)(float* dy, const float* x, const float* weight, const float* residual,
                             float* y, float* dweight, int64_t begin, int64_t end, int64_t dim,
                             float eps);
  void (*head_rows)(const float* x, int64_t x_stride, const float* weight, const float* cosine,
                    const float* sine, float* y, const DflashHeads& heads, int64_t begin,
                    int64_t end, float eps);
  void (*head_backward_rows)(const float* dy, float* x, int64_t x_stride, const float* weight,
                             const float* cosine, const float* sine, float* dweight,
                             const DflashHeads& heads, int64_t begin, int64_t end, float eps,
                             float* scratch);
  void (*swiglu_rows)(const float* gate_up, float* y, int64_t begin, int64_t end, int64_t dim);
  void (*swiglu_backward_rows)(float* dy, float* gate_up, int64_t begin, int64_t end, int64_t dim);
  float (*row_maximum)(const float* x, int64_t dim);
  float (*exponentiate)(float* x, float maximum, int64_t dim);
  void (*scale_row)(float* x, float factor, int64_t dim);
  void (*merge_row)(float* out, const float* part, float old_share, float new_share, int64_t dim);
  void (*adamw_range)(float* parameter, const float* gradient, float* mean, float* variance,
                      int64_t begin, int64_t end, float beta1, float beta2, float epsilon,
                      float step_size, float root_correction2);
};

#define DFLASH_DECLARE(level) extern "C" const DflashKernelRows dflash_kernel_rows_##level;
DFLASH_KERNEL_LEVELS(DFLASH_DECLARE)
#undef DFLASH_DECLARE
