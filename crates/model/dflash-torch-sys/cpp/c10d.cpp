// libtorch features beyond tch: version, c10d store, gloo process group. Declared in `src/ffi.rs`.
//
// A fallible function returns null or a malloc'ed message that the caller frees. Each is one call
// inside `guarded` of guarded.h, so no exception escapes. Text is passed as pointer and length,
// without a NUL terminator.
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <ATen/Context.h>
#include <ATen/Version.h>
#include <ATen/core/Tensor.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/util/Logging.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include "guarded.h"

struct DflashText {
  const char* data;
  size_t length;
};

struct DflashStore {
  c10::intrusive_ptr<c10d::Store> store;
};

struct DflashGroup {
  c10::intrusive_ptr<c10d::ProcessGroupGloo> group;
};

struct DflashWork {
  c10::intrusive_ptr<c10d::Work> work;
};

namespace {

std::string owned(DflashText text) {
  return std::string(text.data, text.length);
}

// Starts a collective and returns its work.
template <typename Start>
char* started(DflashWork** work, Start&& start) noexcept {
  return guarded([&] { *work = new DflashWork{start()}; });
}

}  // namespace

extern "C" {

// Stops libtorch from logging to stderr: what c10d logs with a stack trace it also throws.
void dflash_quiet_logs() {
  FLAGS_caffe2_log_level = c10::GLOG_FATAL;
}

// Sets whether float32 matrix products on the CPU round their factors to bfloat16, for the whole
// process; sums stay float32.
char* dflash_multiply_in_bf16(bool rounded) {
  return guarded(
      [&] { at::globalContext().setFloat32MatmulPrecision(rounded ? "medium" : "highest"); });
}

// Peak bytes of tensors on the GPU `index`.
char* dflash_peak_device_bytes(int32_t index, int64_t* bytes) {
  return guarded([&] {
    // The CUDA library registers it when loaded; there is nothing to link.
    auto* allocator = c10::getDeviceAllocator(c10::DeviceType::CUDA);
    const auto stats = allocator->getDeviceStats(static_cast<c10::DeviceIndex>(index));
    const auto aggregate = static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE);
    *bytes = stats.allocated_bytes[aggregate].peak;
  });
}

// The build report of the loaded libtorch, malloc'ed.
char* dflash_show_config(char** report) {
  return guarded([&] { *report = duplicate(at::show_config()); });
}

// With `is_server` the store listens on `*port` (0 for any free one) on all interfaces, or takes
// over `listener`, a socket bound to that port, unless it is negative. `*port` is set to the port
// in use.
char* dflash_store_tcp(DflashText host, uint16_t* port, bool is_server, int32_t listener,
                       int64_t timeout_ms, DflashStore** store) {
  return guarded([&] {
    c10d::TCPStoreOptions options;
    options.port = *port;
    options.isServer = is_server;
    if (listener >= 0) {
      options.masterListenFd = listener;
    }
    // The rendezvous waits for all workers, since it can name missing ones.
    options.waitWorkers = false;
    options.timeout = std::chrono::milliseconds(timeout_ms);
    auto tcp = c10::make_intrusive<c10d::TCPStore>(owned(host), options);
    *port = tcp->getPort();
    *store = new DflashStore{std::move(tcp)};
  });
}

char* dflash_store_prefix(const DflashStore* store, DflashText prefix, DflashStore** prefixed) {
  return guarded([&] {
    *prefixed =
        new DflashStore{c10::make_intrusive<c10d::PrefixStore>(owned(prefix), store->store)};
  });
}

char* dflash_store_set(const DflashStore* store, DflashText key, DflashText value) {
  return guarded([&] {
    store->store->set(owned(key),
                      std::vector<uint8_t>(value.data, value.data + value.length));
  });
}

// Blocks until the key is set or the store's timeout; `*value` is malloc'ed.
char* dflash_store_get(const DflashStore* store, DflashText key, char** value, size_t* length) {
  return guarded([&] {
    const std::vector<uint8_t> found = store->store->get(owned(key));
    // One extra byte, since malloc(0) may return null.
    *value = static_cast<char*>(std::malloc(found.size() + 1));
    std::memcpy(*value, found.data(), found.size());
    *length = found.size();
  });
}

char* dflash_store_contains(const DflashStore* store, DflashText key, bool* present) {
  return guarded([&] { *present = store->store->check({owned(key)}); });
}

char* dflash_store_add(const DflashStore* store, DflashText key, int64_t amount, int64_t* total) {
  return guarded([&] { *total = store->store->add(owned(key), amount); });
}

void dflash_store_free(DflashStore* store) {
  delete store;
}

// `bind` is an interface name if `bind_is_interface`, otherwise a host or address.
char* dflash_group_gloo(const DflashStore* store, int32_t rank, int32_t size, DflashText bind,
                        bool bind_is_interface, int64_t timeout_ms, DflashGroup** group) {
  return guarded([&] {
    auto options =
        c10d::ProcessGroupGloo::Options::create(std::chrono::milliseconds(timeout_ms));
    options->devices.push_back(
        bind_is_interface ? c10d::ProcessGroupGloo::createDeviceForInterface(owned(bind))
                          : c10d::ProcessGroupGloo::createDeviceForHostname(owned(bind)));
    *group = new DflashGroup{c10::make_intrusive<c10d::ProcessGroupGloo>(
        store->store, rank, size, std::move(options))};
  });
}

void dflash_group_free(DflashGroup* group) {
  delete group;
}

// In place; MAX if `maximum`, otherwise SUM.
char* dflash_group_all_reduce(const DflashGroup* group, const at::Tensor* tensor, bool maximum,
                              DflashWork** work) {
  return started(work, [&] {
    std::vector<at::Tensor> tensors{*tensor};
    c10d::AllreduceOptions options;
    options.reduceOp = maximum ? c10d::ReduceOp::MAX : c10d::ReduceOp::SUM;
    return group->group->allreduce(tensors, options);
  });
}

char* dflash_group_broadcast(const DflashGroup* group, const at::Tensor* tensor, int32_t root,
                             DflashWork** work) {
  return started(work, [&] {
    std::vector<at::Tensor> tensors{*tensor};
    c10d::BroadcastOptions options;
    options.rootRank = root;
    return group->group->broadcast(tensors, options);
  });
}

// `output` has size * input.numel() elements, in rank order.
char* dflash_group_all_gather(const DflashGroup* group, at::Tensor* output, at::Tensor* input,
                              DflashWork** work) {
  return started(work, [&] { return group->group->_allgather_base(*output, *input); });
}

// `input` has size * output.numel() elements; rank r gets the sum of part r.
char* dflash_group_reduce_scatter(const DflashGroup* group, at::Tensor* output,
                                  at::Tensor* input, DflashWork** work) {
  return started(work, [&] { return group->group->_reduce_scatter_base(*output, *input); });
}

char* dflash_group_barrier(const DflashGroup* group, DflashWork** work) {
  return started(work, [&] { return group->group->barrier(); });
}

// Sets `*pending` if the wait timed out.
char* dflash_work_wait(const DflashWork* work, int64_t timeout_ms, bool* pending) {
  return guarded([&] {
    try {
      work->work->wait(std::chrono::milliseconds(timeout_ms));
    } catch (...) {
      // c10d throws both when a wait times out and when the work fails.
      *pending = !work->work->isCompleted();
      if (!*pending && !work->work->isSuccess()) {
        throw;
      }
    }
  });
}

void dflash_work_free(DflashWork* work) {
  delete work;
}
}
