// libtorch's variable-length CUDA flash attention, forward and backward, called through the
// dispatcher so that CUDA is not linked. Declared in `src/flash.rs`; errors are those of guarded.h.
#include <ATen/core/Tensor.h>
#include <ATen/ops/_flash_attention_backward.h>
#include <ATen/ops/_flash_attention_forward.h>
#include <ATen/ops/empty.h>

#include "guarded.h"

// Parameters common to all sequences of a call, laid out as in src/flash.rs.
struct DflashFlashCall {
  int64_t max_q, max_k;
  double scale;
  // Negative for no limit.
  int64_t window_left, window_right;
};

namespace {

std::optional<int64_t> limit(int64_t window) {
  return window < 0 ? std::nullopt : std::make_optional(window);
}

// Without dropout the backward pass takes the RNG state but does not read it.
at::Tensor unread_state(const at::Tensor& like) {
  return at::empty({2}, like.options().dtype(at::kUInt64));
}

}  // namespace

extern "C" {

// *out and *lse are new handles that the caller owns.
char* dflash_flash_forward(const at::Tensor* q, const at::Tensor* k, const at::Tensor* v,
                           const at::Tensor* cu_q, const at::Tensor* cu_k,
                           const DflashFlashCall* call, at::Tensor** out, at::Tensor** lse) {
  return guarded([&] {
    auto results = at::_flash_attention_forward(
        *q, *k, *v, *cu_q, *cu_k, call->max_q, call->max_k, /*dropout_p=*/0.0,
        /*is_causal=*/false, /*return_debug_mask=*/false, call->scale, limit(call->window_left),
        limit(call->window_right));
    *out = new at::Tensor(std::get<0>(results));
    *lse = new at::Tensor(std::get<1>(results));
  });
}

// As above, for *dq, *dk and *dv.
char* dflash_flash_backward(const at::Tensor* dout, const at::Tensor* q, const at::Tensor* k,
                            const at::Tensor* v, const at::Tensor* out, const at::Tensor* lse,
                            const at::Tensor* cu_q, const at::Tensor* cu_k,
                            const DflashFlashCall* call, at::Tensor** dq, at::Tensor** dk,
                            at::Tensor** dv) {
  return guarded([&] {
    const at::Tensor state = unread_state(*q);
    auto results = at::_flash_attention_backward(
        *dout, *q, *k, *v, *out, *lse, *cu_q, *cu_k, call->max_q, call->max_k,
        /*dropout_p=*/0.0, /*is_causal=*/false, state, state, call->scale,
        limit(call->window_left), limit(call->window_right));
    *dq = new at::Tensor(std::get<0>(results));
    *dk = new at::Tensor(std::get<1>(results));
    *dv = new at::Tensor(std::get<2>(results));
  });
}
}
