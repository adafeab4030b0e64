// Implements shim.h over libtorch's c10d. Each function is one call inside `guarded`,
// which turns every exception into a message.
#include "shim.h"

#include <cstdlib>
#include <cstring>
#include <exception>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <ATen/Context.h>
#include <ATen/Version.h>
#include <ATen/core/Tensor.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/util/Exception.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

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

char* duplicate(const std::string& text) {
  return ::strdup(text.c_str());
}

std::string owned(DflashText text) {
  return std::string(text.data, text.length);
}

template <typename Body>
int32_t guarded(char** error, Body&& body) noexcept {
  try {
    return body();
  } catch (const c10::Error& caught) {
    *error = duplicate(caught.what_without_backtrace());
  } catch (const std::exception& caught) {
    *error = duplicate(caught.what());
  } catch (...) {
    *error = duplicate("an exception that is not a std::exception");
  }
  return DFLASH_FAILED;
}

// Starts one collective and hands its work out.
template <typename Start>
int32_t started(DflashWork** work, char** error, Start&& start) noexcept {
  return guarded(error, [&] {
    *work = new DflashWork{start()};
    return DFLASH_OK;
  });
}

} // namespace

int32_t dflash_multiply_in_bf16(char** error) {
  return guarded(error, [&] {
    at::globalContext().setFloat32MatmulPrecision("medium");
    return DFLASH_OK;
  });
}

int32_t dflash_peak_device_bytes(int32_t index, int64_t* bytes, char** error) {
  return guarded(error, [&] {
    // Registered by the CUDA library when it is loaded; there is nothing to link.
    auto* allocator = c10::getDeviceAllocator(c10::DeviceType::CUDA);
    const auto stats = allocator->getDeviceStats(static_cast<c10::DeviceIndex>(index));
    const auto aggregate = static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE);
    *bytes = stats.allocated_bytes[aggregate].peak;
    return DFLASH_OK;
  });
}

int32_t dflash_show_config(char** report, char** error) {
  return guarded(error, [&] {
    *report = duplicate(at::show_config());
    return DFLASH_OK;
  });
}

int32_t dflash_store_tcp(
    DflashText host,
    uint16_t* port,
    bool is_server,
    int32_t listener,
    int64_t timeout_ms,
    DflashStore** store,
    char** error) {
  return guarded(error, [&] {
    c10d::TCPStoreOptions options;
    options.port = *port;
    options.isServer = is_server;
    if (listener >= 0) {
      options.masterListenFd = listener;
    }
    // The number of workers is the rendezvous's business, which can name who is missing.
    options.waitWorkers = false;
    options.timeout = std::chrono::milliseconds(timeout_ms);
    auto tcp = c10::make_intrusive<c10d::TCPStore>(owned(host), options);
    *port = tcp->getPort();
    *store = new DflashStore{std::move(tcp)};
    return DFLASH_OK;
  });
}

int32_t dflash_store_prefix(
    const DflashStore* store,
    DflashText prefix,
    DflashStore** prefixed,
    char** error) {
  return guarded(error, [&] {
    *prefixed = new DflashStore{
        c10::make_intrusive<c10d::PrefixStore>(owned(prefix), store->store)};
    return DFLASH_OK;
  });
}

int32_t dflash_store_set(
    const DflashStore* store,
    DflashText key,
    DflashText value,
    char** error) {
  return guarded(error, [&] {
    store->store->set(
        owned(key),
        std::vector<uint8_t>(value.data, value.data + value.length));
    return DFLASH_OK;
  });
}

int32_t dflash_store_get(
    const DflashStore* store,
    DflashText key,
    char** value,
    size_t* length,
    char** error) {
  return guarded(error, [&] {
    const std::vector<uint8_t> found = store->store->get(owned(key));
    // One byte more than needed: malloc(0) may be null.
    *value = static_cast<char*>(std::malloc(found.size() + 1));
    std::memcpy(*value, found.data(), found.size());
    *length = found.size();
    return DFLASH_OK;
  });
}

int32_t dflash_store_contains(
    const DflashStore* store,
    DflashText key,
    bool* present,
    char** error) {
  return guarded(error, [&] {
    *present = store->store->check({owned(key)});
    return DFLASH_OK;
  });
}

int32_t dflash_store_add(
    const DflashStore* store,
    DflashText key,
    int64_t amount,
    int64_t* total,
    char** error) {
  return guarded(error, [&] {
    *total = store->store->add(owned(key), amount);
    return DFLASH_OK;
  });
}

void dflash_store_free(DflashStore* store) {
  delete store;
}

int32_t dflash_group_gloo(
    const DflashStore* store,
    int32_t rank,
    int32_t size,
    DflashText bind,
    bool bind_is_interface,
    int64_t timeout_ms,
    DflashGroup** group,
    char** error) {
  return guarded(error, [&] {
    auto options = c10d::ProcessGroupGloo::Options::create(
        std::chrono::milliseconds(timeout_ms));
    options->devices.push_back(
        bind_is_interface
            ? c10d::ProcessGroupGloo::createDeviceForInterface(owned(bind))
            : c10d::ProcessGroupGloo::createDeviceForHostname(owned(bind)));
    *group = new DflashGroup{c10::make_intrusive<c10d::ProcessGroupGloo>(
        store->store, rank, size, std::move(options))};
    return DFLASH_OK;
  });
}

void dflash_group_free(DflashGroup* group) {
  delete group;
}

int32_t dflash_group_all_reduce(
    const DflashGroup* group,
    const at::Tensor* tensor,
    bool maximum,
    DflashWork** work,
    char** error) {
  return started(work, error, [&] {
    std::vector<at::Tensor> tensors{*tensor};
    c10d::AllreduceOptions options;
    options.reduceOp = maximum ? c10d::ReduceOp::MAX : c10d::ReduceOp::SUM;
    return group->group->allreduce(tensors, options);
  });
}

int32_t dflash_group_broadcast(
    const DflashGroup* group,
    const at::Tensor* tensor,
    int32_t root,
    DflashWork** work,
    char** error) {
  return started(work, error, [&] {
    std::vector<at::Tensor> tensors{*tensor};
    c10d::BroadcastOptions options;
    options.rootRank = root;
    return group->group->broadcast(tensors, options);
  });
}

int32_t dflash_group_all_gather(
    const DflashGroup* group,
    const at::Tensor* output,
    const at::Tensor* input,
    DflashWork** work,
    char** error) {
  return started(work, error, [&] {
    at::Tensor gathered = *output;
    at::Tensor own = *input;
    return group->group->_allgather_base(gathered, own);
  });
}

int32_t dflash_group_reduce_scatter(
    const DflashGroup* group,
    const at::Tensor* output,
    const at::Tensor* input,
    DflashWork** work,
    char** error) {
  return started(work, error, [&] {
    at::Tensor part = *output;
    at::Tensor whole = *input;
    return group->group->_reduce_scatter_base(part, whole);
  });
}

int32_t dflash_group_barrier(
    const DflashGroup* group,
    DflashWork** work,
    char** error) {
  return started(work, error, [&] { return group->group->barrier(); });
}

int32_t dflash_work_wait(
    const DflashWork* work,
    int64_t timeout_ms,
    char** error) {
  return guarded(error, [&]() -> int32_t {
    try {
      work->work->wait(std::chrono::milliseconds(timeout_ms));
    } catch (...) {
      // c10d reports a wait that ran out and a work that failed alike, by throwing.
      if (!work->work->isCompleted()) {
        return DFLASH_PENDING;
      }
      if (!work->work->isSuccess()) {
        throw;
      }
    }
    return DFLASH_OK;
  });
}

bool dflash_work_is_completed(const DflashWork* work) {
  return work->work->isCompleted();
}

void dflash_work_free(DflashWork* work) {
  delete work;
}
