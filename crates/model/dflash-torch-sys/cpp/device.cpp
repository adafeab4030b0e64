// Further libtorch functions for our GPU kernels and products, called through the dispatcher so
// that CUDA is not linked. Declared in `src/ffi.rs` and in the kernels' `src/gpu/product.rs`;
// errors are those of guarded.h.
#include <ATen/Context.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/addmm.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include "guarded.h"

extern "C" {

// cuDNN attention builds a plan for each new length, i.e. at every decoding step: 0.4 s each.
void dflash_leave_out_cudnn_attention() { at::globalContext().setSDPUseCuDNN(false); }

bool dflash_uses_cudnn_attention() { return at::globalContext().userEnabledCuDNNSDP(); }

// *stream is a CUstream.
char* dflash_current_stream(int32_t index, void** stream) {
  return guarded([&] {
    const c10::impl::VirtualGuardImpl guard(c10::DeviceType::CUDA);
    const c10::Device device(c10::DeviceType::CUDA, static_cast<c10::DeviceIndex>(index));
    *stream = guard.getStreamNativeHandle(guard.getStream(device));
  });
}

// sum += left right, half-precision factors accumulated in float32.
char* dflash_add_product(const at::Tensor* sum, const at::Tensor* left, const at::Tensor* right) {
  return guarded([&] {
    at::Tensor out = *sum;
    at::addmm_out(out, out, *left, *right, at::kFloat);
  });
}
}
