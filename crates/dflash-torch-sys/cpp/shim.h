// The C face of what Rust needs from libtorch beyond tch: the version, the c10d store
// and the gloo process group.
//
// Every function returns a Status. On DFLASH_FAILED `*error` is a message from malloc
// that the caller frees; in all other cases it is left alone. No exception leaves a
// function. Text goes in as pointer and length, so that it need not end in NUL.
#pragma once

#include <cstddef>
#include <cstdint>

namespace at {
class Tensor;
}

struct DflashStore;
struct DflashGroup;
struct DflashWork;

struct DflashText {
  const char* data;
  size_t length;
};

extern "C" {

enum DflashStatus : int32_t {
  DFLASH_OK = 0,
  DFLASH_FAILED = 1,
  // A wait ended before the work did.
  DFLASH_PENDING = 2,
};

// Lets products of float32 matrices on the CPU round their factors to bfloat16, in this process and
// from now on; sums stay float32.
int32_t dflash_multiply_in_bf16(char** error);

// The most bytes that tensors on the GPU of this index have taken at one time.
int32_t dflash_peak_device_bytes(int32_t index, int64_t* bytes, char** error);

// The build report of the libtorch in this process, from malloc.
int32_t dflash_show_config(char** report, char** error);

// With `is_server` the store listens on `*port` (0: any free one) on all interfaces, or takes over
// `listener`, a socket bound to that port, where it is not negative. `*port` is the one in use
// afterwards.
int32_t dflash_store_tcp(
    DflashText host,
    uint16_t* port,
    bool is_server,
    int32_t listener,
    int64_t timeout_ms,
    DflashStore** store,
    char** error);
int32_t dflash_store_prefix(
    const DflashStore* store,
    DflashText prefix,
    DflashStore** prefixed,
    char** error);
int32_t dflash_store_set(
    const DflashStore* store,
    DflashText key,
    DflashText value,
    char** error);
// `*value` is from malloc; blocks until the key is there or the store's timeout.
int32_t dflash_store_get(
    const DflashStore* store,
    DflashText key,
    char** value,
    size_t* length,
    char** error);
int32_t dflash_store_contains(
    const DflashStore* store,
    DflashText key,
    bool* present,
    char** error);
int32_t dflash_store_add(
    const DflashStore* store,
    DflashText key,
    int64_t amount,
    int64_t* total,
    char** error);
void dflash_store_free(DflashStore* store);

// `bind` is an interface's name where `bind_is_interface`, else a host or address.
int32_t dflash_group_gloo(
    const DflashStore* store,
    int32_t rank,
    int32_t size,
    DflashText bind,
    bool bind_is_interface,
    int64_t timeout_ms,
    DflashGroup** group,
    char** error);
void dflash_group_free(DflashGroup* group);

// `maximum` chooses MAX, else SUM. In place.
int32_t dflash_group_all_reduce(
    const DflashGroup* group,
    const at::Tensor* tensor,
    bool maximum,
    DflashWork** work,
    char** error);
int32_t dflash_group_broadcast(
    const DflashGroup* group,
    const at::Tensor* tensor,
    int32_t root,
    DflashWork** work,
    char** error);
// `output` has size * input.numel() elements, in the order of the ranks.
int32_t dflash_group_all_gather(
    const DflashGroup* group,
    const at::Tensor* output,
    const at::Tensor* input,
    DflashWork** work,
    char** error);
// `input` has size * output.numel() elements; rank r gets the sum of part r.
int32_t dflash_group_reduce_scatter(
    const DflashGroup* group,
    const at::Tensor* output,
    const at::Tensor* input,
    DflashWork** work,
    char** error);
int32_t dflash_group_barrier(
    const DflashGroup* group,
    DflashWork** work,
    char** error);

int32_t dflash_work_wait(
    const DflashWork* work,
    int64_t timeout_ms,
    char** error);
bool dflash_work_is_completed(const DflashWork* work);
void dflash_work_free(DflashWork* work);

} // extern "C"
