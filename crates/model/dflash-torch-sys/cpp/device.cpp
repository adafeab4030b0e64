// What our own kernels and products on a GPU need of libtorch beside tensors, dispatched by name, so
// that nothing of its CUDA half is linked. `src/ffi.rs` and the kernels' `src/gpu/product.rs` declare the
// same functions; failures are those of guarded.h.
#include <ATen/Context.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/addmm.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include "guarded.h"

extern "C" {

// cuDNN's attention builds a plan for each new length, which decoding has at every step: 0.4 s each.
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

// sum += left right, of half precision into float32, which the product adds up in.
char* dflash_add_product(const at::Tensor* sum, const at::Tensor* left, const at::Tensor* right) {
  return guarded([&] {
    at::Tensor out = *sum;
    at::addmm_out(out, out, *left, *right, at::kFloat);
  });
}
}
