// A fake CUDA device: tensors on cuda:0 with shapes, strides and storages, but without data.
//
// Operators that libtorch would dispatch to CUDA kernels arrive here instead. Their shapes are
// computed on the meta device, and what they would read, write and compute is recorded. Waiting for
// a value, or mixing devices, is an error that names the operator. Views share storage, so live
// bytes are those that a GPU would hold.
//
// Small integers copied from the host stay known, because sequence lengths determine the
// arithmetic. `src/fake_cuda.rs` declares the same structs and functions; errors are those of
// guarded.h.
#include <ATen/Context.h>
#include <ATen/EmptyTensor.h>
#include <ATen/ExpandUtils.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/native/TypeProperties.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <algorithm>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "guarded.h"

// One unit of GPU work, laid out as in src/fake_cuda.rs.
struct DflashEvent {
  // Valid until the process exits.
  const char* operation;
  uint32_t part;
  uint32_t form;
  int64_t launches;
  double read, written;
  double flops, tile_flops;
};

// All events, and bytes of tensors.
struct DflashRecord {
  DflashEvent* events;
  uint64_t count;
  int64_t live, peak;
  uint32_t peak_part;
};

namespace {

using c10::DispatchKey;
using c10::IValue;
using torch::jit::Stack;

// Forms of events.
constexpr uint32_t OPERATOR = 0, OWN_KERNEL = 1, UPLOAD = 2, BLOCKING_UPLOAD = 3, WAIT = 4;

const c10::Device GPU{c10::kCUDA, 0};

// CUDA's caching allocator rounds sizes up to this many bytes.
constexpr int64_t GRANULE = 512;
// Storages up to this size keep values copied from the host.
constexpr int64_t MOST_KNOWN = 16 << 20;

// Bytes held by tensors, which may outlive the session and its thread.
struct Ledger {
  std::mutex mutex;
  int64_t live = 0, peak = 0;
  uint32_t peak_part = 0;

  void add(int64_t bytes, uint32_t part) {
    const std::lock_guard<std::mutex> lock(mutex);
    live += bytes;
    if (live > peak) {
      peak = live;
      peak_part = part;
    }
  }
};

struct Session {
  std::shared_ptr<Ledger> ledger = std::make_shared<Ledger>();
  std::vector<DflashEvent> events;
  uint32_t part = 0;
  // Whether values may be read: what the host copied, and zeros for computed values.
  bool readable = false;
};

thread_local std::unique_ptr<Session> session;

Session& running(const std::string& operation) {
  TORCH_CHECK(session, operation, ": CUDA is fake, but not on this thread or not any more");
  return *session;
}

const char* interned(const std::string& name) {
  static std::mutex mutex;
  static std::set<std::string> names;
  const std::lock_guard<std::mutex> lock(mutex);
  return names.insert(name).first->c_str();
}

void note(DflashEvent event) {
  event.part = session->part;
  session->events.push_back(event);
}

// Takes the place of a storage's memory.
struct Block {
  int64_t bytes;
  std::shared_ptr<Ledger> ledger;
  // Known contents, byte by byte; empty if unknown.
  std::vector<char> known, valid;
};

void free_block(void* context) {
  auto* block = static_cast<Block*>(context);
  block->ledger->add(-block->bytes, 0);
  delete block;
}

int64_t granules(int64_t bytes) {
  return (bytes + GRANULE - 1) / GRANULE * GRANULE;
}

Block& block_of(const at::Tensor& x) {
  const auto& data = x.storage().data_ptr();
  TORCH_CHECK(data.get_deleter() == &free_block, "a tensor on cuda:0 that is not fake");
  return *static_cast<Block*>(data.get_context());
}

c10::Storage make_storage(int64_t bytes) {
  const int64_t held = granules(bytes);
  auto* block = new Block{held, session->ledger, {}, {}};
  session->ledger->add(held, session->part);
  return c10::Storage(c10::Storage::use_byte_size_t(), static_cast<size_t>(bytes),
                      c10::DataPtr(nullptr, block, &free_block, GPU), nullptr, false);
}

at::Tensor on_storage(c10::Storage storage, caffe2::TypeMeta dtype, at::IntArrayRef sizes,
                      at::IntArrayRef strides, int64_t offset) {
  auto x = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(DispatchKey::CUDA), dtype);
  x.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides, offset);
  return x;
}

at::Tensor make(at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType dtype) {
  const auto meta = c10::scalarTypeToTypeMeta(dtype);
  const auto bytes = at::detail::computeStorageNbytes(sizes, strides, meta.itemsize());
  return on_storage(make_storage(static_cast<int64_t>(bytes)), meta, sizes, strides, 0);
}

at::Tensor make(at::IntArrayRef sizes, at::ScalarType dtype) {
  std::vector<int64_t> strides(sizes.size(), 1);
  for (size_t dim = sizes.size(); dim > 1; --dim) {
    strides[dim - 2] = strides[dim - 1] * std::max<int64_t>(sizes[dim - 1], 1);
  }
  return make(sizes, strides, dtype);
}

// A result with the layout of `empty_like`: dense inputs keep their strides.
at::Tensor make_like(const at::Tensor& x) {
  return x.is_non_overlapping_and_dense() ? make(x.sizes(), x.strides(), x.scalar_type())
                                          : make(x.sizes(), x.scalar_type());
}

// Bytes of a tensor that an operator touches: each element once, broadcast or not.
double extent(const at::Tensor& x) {
  double elements = 1;
  for (int64_t dim = 0; dim < x.dim(); ++dim) {
    elements *= x.stride(dim) == 0 && x.size(dim) > 0 ? 1.0 : static_cast<double>(x.size(dim));
  }
  return elements * static_cast<double>(x.itemsize());
}

double whole(const at::Tensor& x) {
  return static_cast<double>(x.numel()) * static_cast<double>(x.itemsize());
}

// --- Known contents ------------------------------------------------------------------------------

void forget(const at::Tensor& x) {
  Block& block = block_of(x);
  block.known.clear();
  block.valid.clear();
}

// Stores `values`, a CPU tensor, as the contents of `x`.
void remember(const at::Tensor& x, const at::Tensor& values) {
  Block& block = block_of(x);
  const auto bytes = static_cast<int64_t>(x.storage().nbytes());
  if (bytes > MOST_KNOWN || !c10::isIntegralType(x.scalar_type(), false) || !x.is_contiguous()) {
    return forget(x);
  }
  block.known.resize(bytes);
  block.valid.resize(bytes);
  const auto source = values.to(x.scalar_type()).expand(x.sizes()).contiguous();
  const auto length = static_cast<int64_t>(x.numel() * x.itemsize());
  const auto begin = static_cast<int64_t>(x.storage_offset() * x.itemsize());
  const auto* data = static_cast<const char*>(source.const_data_ptr());
  std::copy(data, data + length, block.known.begin() + begin);
  std::fill_n(block.valid.begin() + begin, length, 1);
}

// The known contents of `x` in a CPU tensor of its shape; zeros where unknown.
at::Tensor recalled(const at::Tensor& x) {
  const auto values = at::zeros(x.sizes(), x.options().device(at::kCPU));
  const Block& block = block_of(x);
  const auto begin = static_cast<int64_t>(x.storage_offset() * x.itemsize());
  const auto end = begin + static_cast<int64_t>(x.numel() * x.itemsize());
  const bool is_known = x.is_contiguous() && end <= static_cast<int64_t>(block.valid.size()) &&
                        std::all_of(block.valid.begin() + begin, block.valid.begin() + end,
                                    [](char valid) { return valid != 0; });
  if (is_known) {
    std::copy(block.known.begin() + begin, block.known.begin() + end,
              static_cast<char*>(values.mutable_data_ptr()));
  }
  return values;
}

std::vector<int64_t> lengths(const std::string& operation, const at::Tensor& x) {
  const Block& block = block_of(x);
  const auto begin = x.storage_offset() * x.itemsize();
  const auto end = begin + x.numel() * x.itemsize();
  const bool known = x.is_contiguous() && x.scalar_type() == at::kInt &&
                     static_cast<int64_t>(block.valid.size()) >= static_cast<int64_t>(end) &&
                     std::all_of(block.valid.begin() + begin, block.valid.begin() + end,
                                 [](char valid) { return valid != 0; });
  TORCH_CHECK(known, operation,
              ": the lengths of its sequences are not known; they must be int32 and come from the "
              "host");
  const auto* values = reinterpret_cast<const int32_t*>(block.known.data() + begin);
  std::vector<int64_t> differences;
  for (int64_t index = 1; index < x.numel(); ++index) {
    differences.push_back(values[index] - values[index - 1]);
  }
  return differences;
}

// --- Arguments -----------------------------------------------------------------------------------

template <typename Visit>
void for_each_tensor(const IValue& value, const Visit& visit) {
  if (value.isTensor()) {
    if (value.toTensor().defined()) visit(value.toTensor());
  } else if (value.isTensorList()) {
    for (const at::Tensor& x : value.toTensorVector()) visit(x);
  } else if (value.isList()) {
    for (const IValue& element : value.toListRef()) for_each_tensor(element, visit);
  }
}

void refuse_mixture(const std::string& operation, const std::vector<IValue>& arguments) {
  for (const IValue& argument : arguments) {
    for_each_tensor(argument, [&](const at::Tensor& x) {
      TORCH_CHECK(x.is_cuda() || (x.is_cpu() && x.dim() == 0), operation,
                  ": mixes a tensor on ", x.device(), " of shape ", x.sizes(),
                  " with tensors on the GPU");
    });
  }
}

// Counterparts of tensors on the meta device, one per tensor.
class Twins {
 public:
  at::Tensor of(const at::Tensor& x) {
    if (!x.defined() || !x.is_cuda()) return x;
    auto& twin = twins_[x.unsafeGetTensorImpl()];
    if (!twin.defined()) {
      c10::Storage storage(c10::Storage::use_byte_size_t(), x.storage().nbytes(),
                           c10::DataPtr(nullptr, c10::Device(c10::kMeta)),
                           c10::GetAllocator(c10::kMeta), true);
      twin = at::detail::make_tensor<c10::TensorImpl>(
          std::move(storage), c10::DispatchKeySet(DispatchKey::Meta), x.dtype());
      twin.unsafeGetTensorImpl()->set_sizes_and_strides(x.sizes(), x.strides(),
                                                        x.storage_offset());
    }
    return twin;
  }

  IValue of(const IValue& value) {
    if (value.isTensor()) return of(value.toTensor());
    if (value.isDevice()) {
      return value.toDevice().is_cuda() ? IValue(c10::Device(c10::kMeta)) : value;
    }
    if (value.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& x : value.toTensorVector()) list.push_back(of(x));
      return list;
    }
    if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> list;
      for (const std::optional<at::Tensor>& x : value.toOptionalTensorVector()) {
        list.push_back(x.has_value() ? std::optional<at::Tensor>(of(*x)) : std::nullopt);
      }
      return list;
    }
    return value;
  }

 private:
  std::map<c10::TensorImpl*, at::Tensor> twins_;
};

// An operator call, with its arguments and, later, its results.
struct Call {
  const c10::FunctionSchema& schema;
  std::string name;
  std::vector<IValue> arguments;
  std::vector<at::Tensor> results;

  const at::Tensor& tensor(size_t index) const {
    return arguments[index].toTensor();
  }

  bool in_place() const {
    return schema.name().back() == '_';
  }

  // Whether the operator writes the argument.
  static bool writes(const c10::Argument& argument) {
    return argument.alias_info() != nullptr && argument.alias_info()->isWrite();
  }
};

// --- Cost: bytes and arithmetic ------------------------------------------------------------------

struct Cost {
  double read = 0, written = 0, flops = 0;
  int64_t launches = 1;
};

// Without the namespace and the in-place suffix.
std::string base_name(const Call& call) {
  auto name = call.schema.name().substr(call.schema.name().find("::") + 2);
  if (call.in_place()) name.pop_back();
  return name;
}

bool one_of(const std::string& name, std::initializer_list<const char*> names) {
  return std::any_of(names.begin(), names.end(),
                     [&](const char* candidate) { return name == candidate; });
}

double product(const at::Tensor& a, const at::Tensor& b) {
  return 2.0 * static_cast<double>(a.numel()) * static_cast<double>(b.size(-1));
}

// Each argument is read once and each result written once; write-only arguments are not read.
Cost plain_cost(const Call& call, const std::string& name) {
  Cost cost;
  const bool overwrites = one_of(name, {"zero", "fill", "normal", "uniform", "random"});
  std::set<c10::TensorImpl*> seen;
  const auto& declared = call.schema.arguments();
  for (size_t index = 0; index < declared.size(); ++index) {
    const bool only_written =
        Call::writes(declared[index]) && (!call.in_place() || (overwrites && index == 0));
    if (only_written) continue;
    for_each_tensor(call.arguments[index], [&](const at::Tensor& x) {
      if (x.is_cuda() && seen.insert(x.unsafeGetTensorImpl()).second) cost.read += extent(x);
    });
  }
  bool empty = !call.results.empty();
  for (const at::Tensor& x : call.results) {
    cost.written += extent(x);
    empty = empty && x.numel() == 0;
  }
  if (empty) cost.launches = 0;
  return cost;
}

// (self, dim, index, source): touches as many elements of self as index or source have.
Cost indexed_cost(const Call& call, const std::string& name) {
  const at::Tensor &self = call.tensor(0), &index = call.tensor(2);
  Cost cost;
  double touched = static_cast<double>(index.numel());
  cost.read = extent(index);
  if (call.arguments[3].isTensor()) {
    const at::Tensor& source = call.tensor(3);
    cost.read += extent(source);
    touched = std::max(touched, static_cast<double>(source.numel()));
  }
  touched *= static_cast<double>(self.itemsize());
  cost.read += name == "index_add" || name == "scatter_add" ? touched : 0;
  cost.written = touched;
  if (!call.in_place()) {
    // self is copied first
    cost.read += extent(self);
    cost.written += whole(self);
    cost.launches = 2;
  }
  return cost;
}

Cost cost_of(const Call& call) {
  const auto name = base_name(call);
  if (one_of(name, {"index_copy", "index_add", "index_fill", "scatter", "scatter_add"})) {
    return indexed_cost(call, name);
  }
  Cost cost = plain_cost(call, name);
  if (name == "gather") {
    cost.read = whole(call.results[0]) + extent(call.tensor(2));
  } else if (one_of(name, {"mm", "bmm"})) {
    cost.flops = product(call.tensor(0), call.tensor(1));
  } else if (one_of(name, {"addmm", "baddbmm"})) {
    cost.flops = product(call.tensor(1), call.tensor(2));
    if (!call.in_place() && call.tensor(0).dim() > 1) {
      // the addend is copied to the result, then the product is added
      cost.read += whole(call.results[0]);
      cost.written += whole(call.results[0]);
      cost.launches = 2;
    }
  }
  return cost;
}

void note_call(const Call& call, const Cost& cost) {
  note({interned(call.name), 0, OPERATOR, cost.launches, cost.read, cost.written, cost.flops,
        cost.flops});
}

// --- Operators with special rules ----------------------------------------------------------------

using Rule = std::vector<IValue> (*)(Call&);

std::vector<IValue> index_select(Call& call) {
  const at::Tensor &self = call.tensor(0), &index = call.tensor(2);
  TORCH_CHECK(index.dim() <= 1, call.name, ": the index has ", index.dim(), " dimensions");
  auto sizes = self.sizes().vec();
  sizes.at(at::maybe_wrap_dim(call.arguments[1].toInt(), self.dim())) = index.numel();
  auto result = make(sizes, self.scalar_type());
  Cost cost;
  cost.read = whole(result) + extent(index);
  cost.written = whole(result);
  note_call(call, cost);
  return {result};
}

std::vector<IValue> like_self(Call& call) {
  auto result = make_like(call.tensor(0));
  Cost cost;
  cost.read = extent(call.tensor(0));
  cost.written = whole(result);
  note_call(call, cost);
  return {result};
}

void follow(const at::Tensor& x, const at::Tensor& twin);

// (self, out)
std::vector<IValue> unary_out(Call& call) {
  const at::Tensor &self = call.tensor(0), &out = call.tensor(1);
  if (out.sizes() != self.sizes()) {
    follow(out, at::detail::empty_meta(self.sizes(), out.scalar_type()));
  }
  Cost cost;
  cost.read = extent(self);
  cost.written = whole(out);
  note_call(call, cost);
  return {out};
}

// logical_not, logical_or and similar, with or without `out`.
std::vector<IValue> logical(Call& call) {
  const bool given = call.schema.overload_name() == "out";
  const size_t operands = call.arguments.size() - (given ? 1 : 0);
  auto sizes = call.tensor(0).sizes().vec();
  Cost cost;
  for (size_t index = 0; index < operands; ++index) {
    sizes = at::infer_size(sizes, call.tensor(index).sizes());
    cost.read += extent(call.tensor(index));
  }
  const auto result = given ? call.tensor(operands) : make(sizes, at::kBool);
  if (result.sizes() != at::IntArrayRef(sizes)) {
    follow(result, at::detail::empty_meta(sizes, result.scalar_type()));
  }
  cost.written = whole(result);
  note_call(call, cost);
  return {result};
}

// (condition, self, other): either of the last two may be a number; writes to a given result.
std::vector<IValue> where(Call& call) {
  auto sizes = call.tensor(0).sizes().vec();
  auto kind = at::kFloat;
  for (size_t index = 2; index > 0; --index) {
    if (!call.arguments[index].isTensor()) continue;
    sizes = at::infer_size(sizes, call.tensor(index).sizes());
    kind = call.tensor(index).scalar_type();
  }
  const bool given = call.arguments.size() > 3;
  const auto result = given ? call.tensor(3) : make(sizes, kind);
  if (given) forget(result);
  call.results = {result};
  note_call(call, plain_cost(call, "where"));
  return {result};
}

// Maximum of all elements, (self), or along a dimension with its index, (self, dim, keepdim).
std::vector<IValue> largest(Call& call) {
  const at::Tensor& self = call.tensor(0);
  if (call.arguments.size() == 1) {
    call.results = {make({}, self.scalar_type())};
    note_call(call, plain_cost(call, "max"));
    return {call.results[0]};
  }
  TORCH_CHECK(call.arguments.size() == 3, call.name, ": the fake CUDA device gives its results itself");
  auto sizes = self.sizes().vec();
  const auto dim = at::maybe_wrap_dim(call.arguments[1].toInt(), self.dim());
  if (call.arguments[2].toBool()) {
    sizes[dim] = 1;
  } else {
    sizes.erase(sizes.begin() + dim);
  }
  call.results = {make(sizes, self.scalar_type()), make(sizes, at::kLong)};
  note_call(call, plain_cost(call, "max"));
  return {call.results[0], call.results[1]};
}

// (A, B, ...): the solution has the columns of B and the broadcast batch of both.
std::vector<IValue> solve_triangular(Call& call) {
  const at::Tensor &a = call.tensor(0), &b = call.tensor(1);
  auto sizes = at::infer_size(a.sizes().slice(0, a.dim() - 2), b.sizes().slice(0, b.dim() - 2));
  sizes.push_back(b.size(-2));
  sizes.push_back(b.size(-1));
  call.results = {make(sizes, b.scalar_type())};
  Cost cost = plain_cost(call, "linalg_solve_triangular");
  cost.flops = static_cast<double>(call.results[0].numel()) * static_cast<double>(a.size(-1));
  note_call(call, cost);
  return {call.results[0]};
}

// (sorted, self, out_int32, ...): values are unknown, so every answer is the position past the end.
std::vector<IValue> searchsorted(Call& call) {
  const auto kind = call.arguments[2].toBool() ? at::kInt : at::kLong;
  call.results = {make(call.tensor(1).sizes(), kind)};
  const auto end = call.tensor(0).dim() == 0 ? 1 : call.tensor(0).size(-1);
  remember(call.results[0], at::full(call.tensor(1).sizes(), end, at::kLong));
  note_call(call, plain_cost(call, "searchsorted"));
  return {call.results[0]};
}

// (self, index)
std::vector<IValue> take(Call& call) {
  call.results = {make(call.tensor(1).sizes(), call.tensor(0).scalar_type())};
  Cost cost;
  cost.read = whole(call.results[0]) + extent(call.tensor(1));
  cost.written = whole(call.results[0]);
  note_call(call, cost);
  return {call.results[0]};
}

std::vector<IValue> record_stream(Call&) {
  return {};
}

// Query-key pairs of a call: visible ones, and those in the tiles that a kernel computes.
struct Pairs {
  double visible = 0, tiled = 0;
};

struct FlashCall {
  std::vector<int64_t> queries, keys;
  int64_t left, right;

  Pairs pairs(int64_t tile_q, int64_t tile_k) const {
    Pairs sum;
    for (size_t index = 0; index < queries.size(); ++index) {
      add(sum, queries[index], keys[index], tile_q, tile_k);
    }
    return sum;
  }

 private:
  void add(Pairs& sum, int64_t q, int64_t k, int64_t tile_q, int64_t tile_k) const {
    for (int64_t first = 0; first < q; first += tile_q) {
      const int64_t last = std::min(first + tile_q, q) - 1;
      const auto [begin, unused_end] = seen(first, q, k);
      const auto [unused_begin, end] = seen(last, q, k);
      const int64_t tiles = end > begin ? (end + tile_k - 1) / tile_k - begin / tile_k : 0;
      sum.tiled += static_cast<double>(tile_q) * static_cast<double>(tiles * tile_k);
      if (left < 0 && right < 0) {
        sum.visible += static_cast<double>(last + 1 - first) * static_cast<double>(k);
        continue;
      }
      for (int64_t query = first; query <= last; ++query) {
        const auto [from, to] = seen(query, q, k);
        sum.visible += static_cast<double>(to - from);
      }
    }
  }

  // Range of keys that a query sees; queries and keys are aligned at the end.
  std::pair<int64_t, int64_t> seen(int64_t query, int64_t q, int64_t k) const {
    const int64_t position = query + k - q;
    const int64_t from = left < 0 ? 0 : std::clamp<int64_t>(position - left, 0, k);
    const int64_t to = right < 0 ? k : std::clamp<int64_t>(position + right + 1, 0, k);
    return {from, std::max(from, to)};
  }
};

int64_t limit(const IValue& window) {
  return window.isNone() ? -1 : window.toInt();
}

// `lengths_at`, `causal_at` and `window_at` are argument positions.
FlashCall flash_call(const Call& call, size_t lengths_at, size_t causal_at, size_t window_at) {
  FlashCall flash{lengths(call.name, call.tensor(lengths_at)),
                  lengths(call.name, call.tensor(lengths_at + 1)), limit(call.arguments[window_at]),
                  limit(call.arguments[window_at + 1])};
  if (call.arguments[causal_at].toBool()) flash.right = 0;
  return flash;
}

void check_flash(const Call& call, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v) {
  const auto dtype = q.scalar_type();
  TORCH_CHECK(dtype == at::kHalf || dtype == at::kBFloat16, call.name,
              ": takes float16 and bfloat16, not ", dtype);
  for (const at::Tensor* x : {&q, &k, &v}) {
    TORCH_CHECK(x->dim() == 3 && x->scalar_type() == dtype && x->stride(-1) == 1, call.name,
                ": takes [rows, heads, D] of one type with the last dimension contiguous");
    TORCH_CHECK(x->size(2) == q.size(2) && x->size(2) % 8 == 0 && x->size(2) <= 256, call.name,
                ": heads are ", x->size(2), " wide");
  }
  TORCH_CHECK(k.sizes() == v.sizes() && q.size(1) % k.size(1) == 0, call.name, ": keys of shape ",
              k.sizes(), " and values of ", v.sizes(), " for queries of ", q.sizes());
}

void note_attention(const Call& call, const at::Tensor& q, const Pairs& pairs, double per_pair,
                    double read, double written) {
  const double each = per_pair * static_cast<double>(q.size(1)) * static_cast<double>(q.size(2));
  note({interned(call.name), 0, OPERATOR, 1, read, written, each * pairs.visible,
        each * pairs.tiled});
}

void note_step(const std::string& name, double read, double written) {
  note({interned(name), 0, OPERATOR, 1, read, written, 0, 0});
}

// FlashAttention-2 tile sizes for head size 128 from compute capability 8.0 on; others are similar.
constexpr int64_t FORWARD_Q = 128, FORWARD_K = 64, BACKWARD_Q = 64, BACKWARD_K = 128;

std::vector<IValue> flash_forward(Call& call) {
  const at::Tensor &q = call.tensor(0), &k = call.tensor(1), &v = call.tensor(2);
  check_flash(call, q, k, v);
  const auto flash = flash_call(call, 3, 8, 11);
  auto out = make_like(q);
  auto lse = make({q.size(1), q.size(0)}, at::kFloat);
  note_attention(call, q, flash.pairs(FORWARD_Q, FORWARD_K), 4.0,
                 whole(q) + whole(k) + whole(v), whole(out) + whole(lse));
  return {out, lse, make({2}, at::kUInt64), make({}, at::kUInt64), make({0}, q.scalar_type())};
}

// Includes auxiliary kernels and buffers: row products of gradient and output, the float32 sum of
// the queries' gradient, and, with grouped heads, key gradients per query head.
std::vector<IValue> flash_backward(Call& call) {
  const at::Tensor &dout = call.tensor(0), &q = call.tensor(1), &k = call.tensor(2),
                   &v = call.tensor(3), &out = call.tensor(4), &lse = call.tensor(5);
  check_flash(call, q, k, v);
  TORCH_CHECK(dout.sizes() == q.sizes() && out.sizes() == q.sizes(), call.name,
              ": results of shape ", out.sizes(), " and ", dout.sizes(), " for queries of ",
              q.sizes());
  TORCH_CHECK(lse.scalar_type() == at::kFloat && lse.size(0) == q.size(1) &&
                  lse.size(1) == q.size(0),
              call.name, ": a log-sum-exp of shape ", lse.sizes(), " for queries of ", q.sizes());
  const auto flash = flash_call(call, 6, 11, 15);
  for (const at::Tensor* x : {&dout, &out}) {
    if (!x->is_contiguous()) note_step("aten::copy_", extent(*x), whole(*x));
  }
  auto dq = make_like(q), dk = make_like(k), dv = make_like(v);
  const auto padded = q.size(0) + 128 * static_cast<int64_t>(flash.queries.size());
  const auto dot = make({q.size(1), padded}, at::kFloat);
  const auto dq_sum = make({padded, q.size(1), q.size(2)}, at::kFloat);
  note_step(call.name + " rows", whole(out) + whole(dout), whole(dot) + whole(dq_sum));
  const bool grouped = q.size(1) != k.size(1);
  const std::vector<int64_t> by_head{k.size(0), q.size(1), k.size(2)};
  const auto dk_wide = grouped ? make(by_head, k.scalar_type()) : dk;
  const auto dv_wide = grouped ? make(by_head, k.scalar_type()) : dv;
  note_attention(call, q, flash.pairs(BACKWARD_Q, BACKWARD_K), 10.0,
                 whole(q) + whole(k) + whole(v) + whole(dout) + whole(lse) + whole(dot),
                 whole(dq_sum) + whole(dk_wide) + whole(dv_wide));
  note_step(call.name + " queries", whole(dq_sum), whole(dq));
  if (grouped) {
    note_step(call.name + " keys", whole(dk_wide), whole(dk));
    note_step(call.name + " keys", whole(dv_wide), whole(dv));
  }
  return {dq, dk, dv};
}

// (self, grads, means, variances, maxima, steps, ...): 320 chunks of 65,536 elements per launch.
std::vector<IValue> fused_adamw(Call& call) {
  Cost cost;
  int64_t chunks = 0;
  for (size_t list = 0; list < 4; ++list) {
    for (const at::Tensor& x : call.arguments[list].toTensorVector()) {
      cost.read += whole(x);
      cost.written += list == 1 ? 0 : whole(x);
      chunks += list == 0 ? (x.numel() + 65535) / 65536 : 0;
    }
  }
  const auto& declared = call.schema.arguments();
  for (size_t index = 0; index < declared.size(); ++index) {
    if (declared[index].name() == "grad_scale" && !call.arguments[index].isNone()) {
      // the scaled gradient is written back
      for (const at::Tensor& x : call.arguments[1].toTensorVector()) cost.written += whole(x);
    }
  }
  cost.launches = (chunks + 319) / 320;
  note_call(call, cost);
  return {};
}

// (input, normalized_shape, weight, eps) -> (output, reciprocal root mean square)
std::vector<IValue> rms_norm(Call& call) {
  const at::Tensor& x = call.tensor(0);
  auto sizes = x.sizes().vec();
  const auto normed = call.arguments[1].toDimVector().size();
  std::fill(sizes.end() - static_cast<int64_t>(normed), sizes.end(), 1);
  const auto kind = x.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  auto y = make(x.sizes(), x.scalar_type()), scale = make(sizes, kind);
  call.results = {y, scale};
  note_call(call, plain_cost(call, "_fused_rms_norm"));
  return {y, scale};
}

// (grad_out, input, normalized_shape, rstd, weight, output_mask) -> (dinput, dweight): one kernel
// for the input, two for the weight, the second of which reduces the first's per-block sums.
std::vector<IValue> rms_norm_backward(Call& call) {
  const at::Tensor &dy = call.tensor(0), &x = call.tensor(1);
  const auto mask = call.arguments[5].toBoolList();
  IValue dx = at::Tensor(), dweight = at::Tensor();
  Cost cost = plain_cost(call, "_fused_rms_norm_backward");
  cost.launches = 0;
  if (mask.get(0)) {
    dx = make(x.sizes(), x.scalar_type());
    cost.written += whole(dx.toTensor());
    cost.launches += 1;
  }
  if (mask.get(1) && call.arguments[4].isTensor()) {
    dweight = make_like(call.tensor(4));
    cost.read += cost.launches > 0 ? whole(dy) + whole(x) : 0;
    cost.written += whole(dweight.toTensor());
    cost.launches += 2;
  }
  note_call(call, cost);
  return {dx, dweight};
}

const std::map<std::string, Rule>& rules() {
  static const std::map<std::string, Rule> rules{
      {"aten::index_select", index_select},
      {"aten::flip", like_self},
      {"aten::roll", like_self},
      {"aten::where", where},
      {"aten::max", largest},
      {"aten::linalg_solve_triangular", solve_triangular},
      {"aten::searchsorted", searchsorted},
      {"aten::take", take},
      {"aten::abs", unary_out},
      {"aten::logical_not", logical},
      {"aten::logical_or", logical},
      {"aten::record_stream", record_stream},
      {"aten::_flash_attention_forward", flash_forward},
      {"aten::_flash_attention_backward", flash_backward},
      {"aten::_fused_adamw_", fused_adamw},
      {"aten::_fused_rms_norm", rms_norm},
      {"aten::_fused_rms_norm_backward", rms_norm_backward},
  };
  return rules;
}

// Operators whose results or shapes depend on values.
bool reads_a_value(const std::string& name) {
  return one_of(name, {"aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select",
                       "aten::equal", "aten::_unique2", "aten::unique_dim",
                       "aten::unique_consecutive", "aten::bincount"});
}

// --- Dispatcher interface ------------------------------------------------------------------------

// Gives a written argument the shape that the operator gave it.
void follow(const at::Tensor& x, const at::Tensor& twin) {
  forget(x);
  if (x.sizes() == twin.sizes() && x.strides() == twin.strides()) return;
  const auto bytes = at::detail::computeStorageNbytes(
      twin.sizes(), twin.strides(), x.itemsize(), static_cast<size_t>(twin.storage_offset()));
  auto* storage = x.storage().unsafeGetStorageImpl();
  if (bytes > storage->nbytes()) {
    Block& block = block_of(x);
    const int64_t held = granules(static_cast<int64_t>(bytes));
    block.ledger->add(held - block.bytes, session->part);
    block.bytes = held;
    storage->set_nbytes(bytes);
  }
  x.unsafeGetTensorImpl()->set_sizes_and_strides(twin.sizes(), twin.strides(),
                                                 twin.storage_offset());
}

// The argument that a result is or views.
const IValue& aliased(const Call& call, const c10::AliasInfo& of) {
  const auto& declared = call.schema.arguments();
  for (size_t index = 0; index < declared.size(); ++index) {
    const auto* info = declared[index].alias_info();
    if (info == nullptr) continue;
    for (const auto& set : of.beforeSets()) {
      if (info->beforeSets().count(set) > 0) return call.arguments[index];
    }
  }
  TORCH_CHECK(false, call.name, ": its schema names no argument for a result");
}

at::Tensor view_of(const at::Tensor& x, const at::Tensor& twin) {
  return on_storage(x.storage(), twin.dtype(), twin.sizes(), twin.strides(),
                    twin.storage_offset());
}

IValue fresh(Call& call, const IValue& result) {
  if (result.isTensor() && result.toTensor().defined()) {
    const at::Tensor& twin = result.toTensor();
    auto x = make(twin.sizes(), twin.strides(), twin.scalar_type());
    call.results.push_back(x);
    return x;
  }
  if (result.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& twin : result.toTensorVector()) {
      list.push_back(make(twin.sizes(), twin.strides(), twin.scalar_type()));
      call.results.push_back(list.get(list.size() - 1));
    }
    return list;
  }
  return result;
}

// Converts a meta result to one on the GPU; counts whether anything was computed.
IValue carried_over(Call& call, const c10::Argument& declared, const IValue& result, bool& computed) {
  const auto* info = declared.alias_info();
  if (info == nullptr) {
    computed = true;
    return fresh(call, result);
  }
  const IValue& source = aliased(call, *info);
  if (info->isWrite()) {
    computed = true;
    if (source.isTensor()) call.results.push_back(source.toTensor());
    return source;
  }
  if (result.isTensor()) return view_of(source.toTensor(), result.toTensor());
  c10::List<at::Tensor> list;
  for (const at::Tensor& twin : result.toTensorVector()) {
    list.push_back(view_of(source.toTensor(), twin));
  }
  return list;
}

void follow_written(const Call& call, Twins& twins) {
  const auto& declared = call.schema.arguments();
  for (size_t index = 0; index < declared.size(); ++index) {
    if (!Call::writes(declared[index])) continue;
    for_each_tensor(call.arguments[index], [&](const at::Tensor& x) {
      if (x.is_cuda()) follow(x, twins.of(x));
    });
  }
}

// Whether libtorch's C++ computes the shapes; Python's additional meta kernels are not available.
bool meta_knows(const c10::OperatorHandle& op) {
  return op.hasKernelForDispatchKey(DispatchKey::Meta) ||
         op.hasKernelForDispatchKey(DispatchKey::CompositeExplicitAutograd) ||
         op.hasKernelForDispatchKey(DispatchKey::CompositeExplicitAutogradNonFunctional) ||
         op.hasKernelForDispatchKey(DispatchKey::CompositeImplicitAutograd);
}

std::vector<IValue> by_meta(const c10::OperatorHandle& op, Call& call) {
  Twins twins;
  Stack stack;
  for (const IValue& argument : call.arguments) stack.push_back(twins.of(argument));
  if (meta_knows(op)) {
    const at::AutoDispatchBelowADInplaceOrView below;
    op.redispatchBoxed(c10::DispatchKeySet(DispatchKey::Meta), &stack);
  } else {
    // such a product gets a preallocated result
    TORCH_CHECK(call.in_place() || call.schema.overload_name() == "dtype_out", call.name,
                ": the fake CUDA device does not know the shape of its result");
    stack.clear();
    for (const auto& declared : call.schema.returns()) {
      stack.push_back(twins.of(aliased(call, *declared.alias_info())));
    }
  }
  follow_written(call, twins);
  std::vector<IValue> results;
  bool computed = call.schema.returns().empty();
  for (size_t index = 0; index < stack.size(); ++index) {
    results.push_back(carried_over(call, call.schema.returns()[index], stack[index], computed));
  }
  const bool moves_nothing = one_of(base_name(call), {"resize", "set"});
  if (computed && !moves_nothing) note_call(call, cost_of(call));
  return results;
}

void on_gpu(const c10::OperatorHandle& op, Stack* stack) {
  const auto& schema = op.schema();
  Call call{schema, schema.name(), {}, {}};
  running(call.name);
  const auto begin = stack->end() - static_cast<int64_t>(schema.arguments().size());
  call.arguments.assign(begin, stack->end());
  if (session->readable && call.name == "aten::_local_scalar_dense") {
    note({interned("a value that is read"), 0, WAIT, 0, 0, 0, 0, 0});
    const auto value = recalled(call.tensor(0)).item();
    stack->erase(begin, stack->end());
    stack->push_back(value);
    return;
  }
  TORCH_CHECK(!reads_a_value(call.name), call.name,
              " reads a value of the GPU, which makes the host wait for it");
  refuse_mixture(call.name, call.arguments);
  const auto rule = rules().find(call.name);
  auto results = rule == rules().end() ? by_meta(op, call) : rule->second(call);
  stack->erase(begin, stack->end());
  for (IValue& result : results) stack->push_back(std::move(result));
}

using Dtype = std::optional<at::ScalarType>;

at::Tensor empty(at::IntArrayRef sizes, Dtype dtype, std::optional<at::Layout>,
                 std::optional<at::Device>, std::optional<bool>, std::optional<at::MemoryFormat>) {
  running("aten::empty");
  return make(sizes, at::dtype_or_default(dtype));
}

at::Tensor empty_strided(at::IntArrayRef sizes, at::IntArrayRef strides, Dtype dtype,
                         std::optional<at::Layout>, std::optional<at::Device>,
                         std::optional<bool>) {
  running("aten::empty_strided");
  return make(sizes, strides, at::dtype_or_default(dtype));
}

void upload(const at::Tensor& self, const at::Tensor& source, bool non_blocking) {
  const auto form = non_blocking ? UPLOAD : BLOCKING_UPLOAD;
  note({interned("copy from the host"), 0, form, 0, whole(source), whole(self), 0, 0});
  remember(self, source);
}

at::Tensor& copy_(at::Tensor& self, const at::Tensor& source, bool non_blocking) {
  running("aten::copy_");
  TORCH_CHECK(self.is_cuda() || session->readable,
              "aten::copy_ reads values of the GPU, of shape ", source.sizes(),
              ", which makes the host wait for them");
  if (!self.is_cuda()) {
    note({interned("a value that is read"), 0, WAIT, 0, 0, 0, 0, 0});
    return self.copy_(recalled(source));
  }
  TORCH_CHECK(at::is_expandable_to(source.sizes(), self.sizes()), "aten::copy_: shape ",
              source.sizes(), " does not fit into ", self.sizes());
  if (self.numel() == 0 || self.is_same(source)) return self;
  if (source.is_cpu()) {
    upload(self, source, non_blocking);
  } else {
    note_step("aten::copy_", extent(source), whole(self));
    forget(self);
  }
  return self;
}

// Streams and events without effect, since nothing runs.
class FakeCudaGuard final : public c10::impl::DeviceGuardImplInterface {
 public:
  c10::DeviceType type() const override {
    return c10::kCUDA;
  }
  c10::Device exchangeDevice(c10::Device) const override {
    return GPU;
  }
  c10::Device getDevice() const override {
    return GPU;
  }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Stream getStream(c10::Device) const override {
    return stream(current());
  }
  c10::Stream getDefaultStream(c10::Device) const override {
    return stream(0);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device, bool) const override {
    return stream(next());
  }
  c10::Stream getNewStream(c10::Device, int) const override {
    return stream(next());
  }
  c10::Stream exchangeStream(c10::Stream to) const override {
    const auto before = current();
    current() = to.id();
    return stream(before);
  }
  void record(void** event, const c10::Stream&, const c10::DeviceIndex,
              const c10::EventFlag) const override {
    *event = const_cast<FakeCudaGuard*>(this);
  }
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override {
    return true;
  }
  bool queryStream(const c10::Stream&) const override {
    return true;
  }
  void synchronizeStream(const c10::Stream&) const override {
    wait();
  }
  void synchronizeEvent(void*) const override {}
  void synchronizeDevice(const c10::DeviceIndex) const override {
    wait();
  }
  c10::DeviceIndex deviceCount() const noexcept override {
    return 1;
  }

 private:
  static c10::Stream stream(c10::StreamId id) {
    return c10::Stream(c10::Stream::UNSAFE, GPU, id);
  }
  static c10::StreamId& current() {
    static thread_local c10::StreamId id = 0;
    return id;
  }
  static c10::StreamId next() {
    static std::atomic<c10::StreamId> last{0};
    return ++last;
  }
  static void wait() {
    running("synchronize");
    note({interned("wait for the device"), 0, WAIT, 0, 0, 0, 0, 0});
  }
};

bool real_cuda() {
  const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("aten::empty", "memory_format");
  return at::hasCUDA() || op.hasKernelForDispatchKey(DispatchKey::CUDA);
}

// Every aten operator with a CPU kernel has one for CUDA; libtorch decomposes the others before
// they arrive here.
void register_operators(torch::Library& aten) {
  const std::set<std::string> own{"empty.memory_format", "empty_strided", "copy_"};
  // A product with a different result type, which exists only on GPUs.
  const std::string of_gpus = "addmm.dtype_out";
  for (const auto& name : c10::Dispatcher::singleton().getAllOpNames()) {
    if (name.name.rfind("aten::", 0) != 0) continue;
    const auto op = c10::Dispatcher::singleton().findOp(name);
    const auto bare = name.name.substr(6) +
                      (name.overload_name.empty() ? std::string() : "." + name.overload_name);
    // libtorch derives the `out` variant of `abs`
    const bool has_kernel = op.has_value() && bare != "abs" &&
                            (op->hasKernelForDispatchKey(DispatchKey::CPU) ||
                             bare == of_gpus || rules().count(name.name) > 0);
    if (has_kernel && own.count(bare) == 0) {
      aten.impl(bare.c_str(), torch::CppFunction::makeFromBoxedFunction<&on_gpu>());
    }
  }
  aten.impl("empty.memory_format", TORCH_FN(empty));
  aten.impl("empty_strided", TORCH_FN(empty_strided));
  aten.impl("copy_", TORCH_FN(copy_));
}

// Once per process, permanently, since tensors may live that long.
void register_once() {
  static const bool registered = [] {
    TORCH_CHECK(!real_cuda(), "libtorch's CUDA library is loaded, so CUDA cannot be faked");
    new c10::impl::DeviceGuardImplRegistrar(c10::kCUDA, new FakeCudaGuard());
    auto* aten = new torch::Library(torch::Library::IMPL, "aten", DispatchKey::CUDA, __FILE__,
                                    __LINE__);
    register_operators(*aten);
    return true;
  }();
  (void)registered;
}

double sum_of(const at::Tensor* const* tensors, uint64_t count) {
  double bytes = 0;
  for (uint64_t index = 0; index < count; ++index) bytes += extent(*tensors[index]);
  return bytes;
}

}  // namespace

extern "C" {

// Starts the fake CUDA device on this thread.
char* dflash_fake_cuda_begin() {
  return guarded([] {
    TORCH_CHECK(!session, "CUDA is fake on this thread already");
    register_once();
    session = std::make_unique<Session>();
  });
}

// Allows reading values on this thread; most are zeros.
void dflash_fake_cuda_readable() {
  if (session) session->readable = true;
}

// Sets the part that later events belong to.
void dflash_fake_cuda_part(uint32_t part) {
  if (session) session->part = part;
}

// Discards the events; the peak restarts at the live bytes.
void dflash_fake_cuda_start_over() {
  if (!session) return;
  session->events.clear();
  const std::lock_guard<std::mutex> lock(session->ledger->mutex);
  session->ledger->peak = session->ledger->live;
  session->ledger->peak_part = session->part;
}

// Records a launch of a kernel that is not libtorch's.
char* dflash_fake_cuda_own_kernel(const char* name, int64_t launches,
                                const at::Tensor* const* reads, uint64_t read,
                                const at::Tensor* const* writes, uint64_t written) {
  return guarded([&] {
    running(name);
    for (uint64_t index = 0; index < written; ++index) forget(*writes[index]);
    note({interned(name), 0, OWN_KERNEL, launches, sum_of(reads, read), sum_of(writes, written),
          0, 0});
  });
}

// Ends the session; `events` must be freed with dflash_fake_cuda_free.
void dflash_fake_cuda_end(DflashRecord* record) {
  const std::unique_ptr<Session> ended = std::move(session);
  *record = {};
  if (!ended) return;
  const std::lock_guard<std::mutex> lock(ended->ledger->mutex);
  record->count = ended->events.size();
  record->events = new DflashEvent[ended->events.size()];
  std::copy(ended->events.begin(), ended->events.end(), record->events);
  record->live = ended->ledger->live;
  record->peak = ended->ledger->peak;
  record->peak_part = ended->ledger->peak_part;
}

void dflash_fake_cuda_free(DflashEvent* events) {
  delete[] events;
}
}
