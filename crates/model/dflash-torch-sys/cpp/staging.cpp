// Host buffers and copies to and from a GPU on a separate stream, through libtorch's generic device
// interface, so that CUDA is not linked. Declared in `src/staging.rs`; errors are those of
// guarded.h.
#include <cstring>
#include <memory>

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include "guarded.h"

namespace {

c10::Stream current_stream(c10::Device device) {
  return c10::impl::VirtualGuardImpl(device.type()).getStream(device);
}

c10::Event* recorded(const c10::Stream& stream) {
  auto event = std::make_unique<c10::Event>(stream.device_type());
  event->record(stream);
  return event.release();
}

}  // namespace

extern "C" {

// `bytes` zero bytes as a tensor, page-locked if `pinned`.
char* dflash_host_buffer(int64_t bytes, bool pinned, at::Tensor** buffer) {
  return guarded([&] {
    auto tensor = at::empty({bytes}, at::TensorOptions().dtype(at::kByte).pinned_memory(pinned));
    std::memset(tensor.mutable_data_ptr(), 0, static_cast<size_t>(bytes));
    *buffer = new at::Tensor(std::move(tensor));
  });
}

// Whether no other tensor shares this memory.
bool dflash_owns_alone(const at::Tensor* tensor) {
  return tensor->use_count() == 1 && tensor->storage().use_count() == 1;
}

char* dflash_copy_stream_new(int32_t index, c10::Stream** stream) {
  return guarded([&] {
    const c10::Device device(c10::kCUDA, static_cast<c10::DeviceIndex>(index));
    const c10::impl::VirtualGuardImpl guard(device.type());
    *stream = new c10::Stream(guard.getStreamFromGlobalPool(device));
  });
}

void dflash_copy_stream_free(c10::Stream* stream) {
  delete stream;
}

// Starts copying `host` to a new tensor *device; *copied is recorded after it.
char* dflash_copy_up(const c10::Stream* stream, const at::Tensor* host, at::Tensor** device,
                     c10::Event** copied) {
  return guarded([&] {
    const c10::StreamGuard guard(*stream);
    auto tensor = at::empty(host->sizes(), at::TensorOptions().dtype(at::kByte).device(stream->device()));
    tensor.copy_(*host, /*non_blocking=*/true);
    *copied = recorded(*stream);
    *device = new at::Tensor(std::move(tensor));
  });
}

// Starts copying `count` contiguous tensors, concatenated, into the bytes of `host`, after the
// current stream's work so far. They must stay alive until *copied has been reached.
char* dflash_copy_down(const c10::Stream* stream, const at::Tensor* const* parts, int64_t count,
                       const at::Tensor* host, c10::Event** copied) {
  return guarded([&] {
    const std::unique_ptr<c10::Event> computed(recorded(current_stream(stream->device())));
    const c10::StreamGuard guard(*stream);
    computed->block(*stream);
    int64_t at = 0;
    for (int64_t index = 0; index < count; ++index) {
      const at::Tensor bytes = parts[index]->reshape({-1}).view(at::kByte);
      host->narrow(0, at, bytes.numel()).copy_(bytes, /*non_blocking=*/true);
      at += bytes.numel();
    }
    *copied = recorded(*stream);
  });
}

// Makes later work on the current stream of the tensor's device wait for the copy, and keeps the
// allocator from reusing the tensor's memory until then.
char* dflash_copy_precede(const c10::Event* copied, const at::Tensor* tensor) {
  return guarded([&] {
    const auto stream = current_stream(tensor->device());
    copied->block(stream);
    tensor->record_stream(stream);
  });
}

char* dflash_copy_wait(const c10::Event* copied) {
  return guarded([&] { copied->synchronize(); });
}

void dflash_copy_free(c10::Event* copied) {
  delete copied;
}
}
