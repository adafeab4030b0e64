// libtorch's fused AdamW, called through the dispatcher so that CUDA is not linked. Declared in
// `src/optimizer.rs`; errors are those of guarded.h.
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/ops/_fused_adamw.h>

#include "guarded.h"

// Laid out as in src/optimizer.rs.
struct DflashAdamW {
  double rate, beta1, beta2, weight_decay, epsilon;
};

extern "C" {

// Each list has `count` tensors.
char* dflash_fused_adamw(const at::Tensor* const* parameters, const at::Tensor* const* gradients,
                         const at::Tensor* const* means, const at::Tensor* const* variances,
                         size_t count, const at::Tensor* steps, const at::Tensor* divisor,
                         const at::Tensor* skip, const DflashAdamW* step) {
  return guarded([&] {
    auto list = [&](const at::Tensor* const* handles) {
      std::vector<at::Tensor> tensors;
      for (size_t i = 0; i < count; ++i) tensors.push_back(*handles[i]);
      return tensors;
    };
    at::_fused_adamw_(list(parameters), list(gradients), list(means), list(variances),
                      /*max_exp_avg_sqs=*/{}, std::vector<at::Tensor>(count, *steps), step->rate,
                      step->beta1, step->beta2, step->weight_decay, step->epsilon,
                      /*amsgrad=*/false, /*maximize=*/false, *divisor, *skip);
  });
}

}  // extern "C"
