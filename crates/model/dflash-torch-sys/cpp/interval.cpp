// Measures GPU time with device events through libtorch's generic device interface, so that CUDA is
// not linked. Declared in `src/interval.rs`; errors are those of guarded.h.
#include <memory>

#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include "guarded.h"

struct DflashInterval {
  c10::Device device;
  c10::Event begin;
  c10::Event end;

  explicit DflashInterval(c10::Device on)
      : device(on),
        // The flag that enables timing.
        begin(on.type(), c10::EventFlag::BACKEND_DEFAULT),
        end(on.type(), c10::EventFlag::BACKEND_DEFAULT) {}

  void mark(c10::Event& event) {
    event.record(c10::impl::VirtualGuardImpl(device.type()).getStream(device));
  }
};

extern "C" {

// Records the start in the current stream of the GPU `index`.
char* dflash_interval_begin(int32_t index, DflashInterval** interval) {
  return guarded([&] {
    const c10::Device device(c10::kCUDA, static_cast<c10::DeviceIndex>(index));
    auto begun = std::make_unique<DflashInterval>(device);
    begun->mark(begun->begin);
    *interval = begun.release();
  });
}

// Records the end.
char* dflash_interval_end(DflashInterval* interval) {
  return guarded([&] { interval->mark(interval->end); });
}

// Waits for the end event.
char* dflash_interval_seconds(const DflashInterval* interval, double* seconds) {
  return guarded([&] {
    interval->end.synchronize();
    *seconds = interval->begin.elapsedTime(interval->end) / 1e3;
  });
}

void dflash_interval_free(DflashInterval* interval) {
  delete interval;
}

}  // extern "C"
