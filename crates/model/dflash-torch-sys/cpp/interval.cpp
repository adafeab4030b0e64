// How long a GPU works, by its own clock. All of it goes through what libtorch keeps for any device, so
// nothing of its CUDA half is linked. `src/interval.rs` declares the same functions; failures are those
// of guarded.h.
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
        // The flag of events that keep the time.
        begin(on.type(), c10::EventFlag::BACKEND_DEFAULT),
        end(on.type(), c10::EventFlag::BACKEND_DEFAULT) {}

  void mark(c10::Event& event) {
    event.record(c10::impl::VirtualGuardImpl(device.type()).getStream(device));
  }
};

extern "C" {

// Begins when the GPU of this index comes to it in its current stream.
char* dflash_interval_begin(int32_t index, DflashInterval** interval) {
  return guarded([&] {
    const c10::Device device(c10::kCUDA, static_cast<c10::DeviceIndex>(index));
    auto begun = std::make_unique<DflashInterval>(device);
    begun->mark(begun->begin);
    *interval = begun.release();
  });
}

// Ends when the GPU comes to it.
char* dflash_interval_end(DflashInterval* interval) {
  return guarded([&] { interval->mark(interval->end); });
}

// Waits for the end.
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
