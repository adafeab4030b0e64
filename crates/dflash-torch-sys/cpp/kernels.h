// Elementwise work of the draft's training pass on a CPU in float32, each in one sweep over
// memory. All rows are contiguous in their last dimension; `*_stride` are elements between rows.
#pragma once
#include <cstdint>

extern "C" {

// y = x / rms(x) * weight
void dflash_rms_norm(const float* x, const float* weight, float* y, int64_t rows, int64_t dim,
                     float eps);

// dy := gradient of rms_norm (+ residual where given); y = the norm again where wanted, for the
// next weight's gradient; dweight += sum over rows
void dflash_rms_norm_backward(float* dy, const float* x, const float* weight,
                              const float* residual, float* y, float* dweight, int64_t rows,
                              int64_t dim, float eps);

// y[n][g][j] = rotate(x[n][j * group + g] / rms * weight): the queries of one key/value head j lie
// at one distance, over slots and group alike.
// The tables are [rows][dim / 2].
void dflash_head_norm_rope(const float* x, int64_t x_stride, const float* weight,
                           const float* cosine, const float* sine, float* y, int64_t rows,
                           int64_t kv_heads, int64_t group, int64_t dim, float eps);

// x := the gradient of the above; dy has y's layout; dweight += sum.
void dflash_head_norm_rope_backward(const float* dy, float* x, int64_t x_stride,
                                    const float* weight, const float* cosine, const float* sine,
                                    float* dweight, int64_t rows, int64_t kv_heads, int64_t group,
                                    int64_t dim, float eps);

// y = silu(gate) * up, gate_up [rows][2 * dim]
void dflash_swiglu(const float* gate_up, float* y, int64_t rows, int64_t dim);

// gate_up := gradient of the above; dy := silu(gate) * up again, for the weight's gradient
void dflash_swiglu_backward(float* dy, float* gate_up, int64_t rows, int64_t dim);

// logits := exp(logits - max) in place; ce = cross-entropy of label; total = sum of the
// exponentials; correct = 1 where the argmax is the label
void dflash_softmax_cross_entropy(float* logits, const int64_t* labels, float* ce, float* total,
                                  float* correct, int64_t rows, int64_t dim);

// exponentials := exponentials * weight / total - weight at the label
void dflash_cross_entropy_gradient(float* exponentials, const int64_t* labels, const float* weight,
                                   const float* total, int64_t rows, int64_t dim);

// Folds a part into a merged attention in place: out, lse over `rows` of `dim`.
void dflash_merge_attention(float* out, float* lse, const float* part_out, const float* part_lse,
                            int64_t rows, int64_t dim);

// One AdamW step, after weight decay.
void dflash_adamw(float* parameter, const float* gradient, float* mean, float* variance,
                  int64_t elements, float beta1, float beta2, float epsilon,
                  float step_size, float root_correction2);
}
