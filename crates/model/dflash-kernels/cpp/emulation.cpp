// Runs the GPU kernels on a CPU; declared in `src/gpu/launch.rs`. Errors are malloc'ed messages, as
// in guarded.h.
#include <csetjmp>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include <ucontext.h>

#include "../cuda/kernels.cu"

namespace emulation {
namespace {

// Not a power of two, so the stacks' ends map to different cache sets.
constexpr size_t kStack = (16 << 10) + 5 * 64;
constexpr unsigned kWarp = 32;

enum class State { kReady, kAtWarp, kAtBlock, kDone };

// A thread of a block. Fibers are entered once through a ucontext and then switched with
// setjmp/longjmp, which needs no system calls.
struct Fiber {
  std::unique_ptr<char[]> stack{new char[kStack]};
  ucontext_t context;
  jmp_buf inside;
  bool entered = false;
  State state = State::kDone;
  // Values of the last two exchanges: a thread is at most one exchange ahead.
  uint32_t brought[2];
  unsigned exchanges = 0;
};

// The fibers of a host thread.
struct Team {
  std::vector<std::unique_ptr<Fiber>> fibers;
  Place here;
  jmp_buf outside;
  void (*kernel)(const void*);
  const void* arguments;

  Fiber& current() { return *fibers[here.thread.x]; }
};

Team& team() {
  thread_local Team team;
  return team;
}

// Yields; continues here at its next turn.
__attribute__((noinline)) void leave(State state) {
  Fiber& fiber = team().current();
  fiber.state = state;
  if (_setjmp(fiber.inside) == 0) _longjmp(team().outside, 1);
}

// A fiber is reused across blocks and launches.
void run_for_ever() {
  while (true) {
    team().kernel(team().arguments);
    leave(State::kDone);
  }
}

__attribute__((noinline)) void resume(Fiber& fiber) {
  if (_setjmp(team().outside) != 0) return;
  if (fiber.entered) _longjmp(fiber.inside, 1);
  fiber.entered = true;
  getcontext(&fiber.context);
  fiber.context.uc_stack.ss_sp = fiber.stack.get();
  fiber.context.uc_stack.ss_size = kStack;
  fiber.context.uc_link = nullptr;
  makecontext(&fiber.context, run_for_ever, 0);
  setcontext(&fiber.context);
}

// Resumes the threads [begin, end) if all of them wait in `state`.
bool release(State state, unsigned begin, unsigned end) {
  for (unsigned thread = begin; thread < end; ++thread)
    if (team().fibers[thread]->state != state) return false;
  for (unsigned thread = begin; thread < end; ++thread)
    team().fibers[thread]->state = State::kReady;
  return true;
}

bool release_some(unsigned threads) {
  bool released = release(State::kAtBlock, 0, threads);
  for (unsigned warp = 0; warp < threads; warp += kWarp)
    released |= release(State::kAtWarp, warp, warp + kWarp);
  return released;
}

// Runs every ready thread; returns whether all are done.
bool run_ready(unsigned threads) {
  bool done = true;
  for (unsigned thread = 0; thread < threads; ++thread) {
    Fiber& fiber = *team().fibers[thread];
    team().here.thread.x = thread;
    if (fiber.state == State::kReady) resume(fiber);
    done &= fiber.state == State::kDone;
  }
  return done;
}

void run_block(unsigned threads) {
  for (unsigned thread = 0; thread < threads; ++thread) {
    team().fibers[thread]->state = State::kReady;
    team().fibers[thread]->exchanges = 0;
  }
  while (!run_ready(threads))
    if (!release_some(threads)) {
      // They are suspended inside a kernel.
      team().fibers.clear();
      throw std::runtime_error("threads of a block wait for others that never come");
    }
}

void run(void (*kernel)(const void*), unsigned blocks, unsigned threads, size_t shared,
         const void* arguments) {
  if (threads == 0 || threads % kWarp != 0)
    throw std::runtime_error("a block must be of whole warps");
  Team& all = team();
  while (all.fibers.size() < threads) all.fibers.emplace_back(new Fiber);
  // NaN, to expose reads before writes.
  std::vector<float> memory(shared / sizeof(float));
  all.kernel = kernel;
  all.arguments = arguments;
  all.here = {{0}, {0}, {threads}, {blocks}, memory.data()};
  for (unsigned block = 0; block < blocks; ++block) {
    memory.assign(memory.size(), std::nanf(""));
    all.here.block.x = block;
    run_block(threads);
  }
}

struct Kernel {
  const char* name;
  size_t bytes;
  void (*run)(const void*);
};

#define DFLASH_ENTRY(name, Args, body)                                                   \
  {#name, sizeof(Args),                                                                  \
   [](const void* a) { dflash_gpu_##name(*static_cast<const Args*>(a)); }},
const Kernel kKernels[] = {DFLASH_KERNELS(DFLASH_ENTRY)};

void find_and_run(const std::string& name, unsigned blocks, unsigned threads, size_t shared,
                  const void* arguments, size_t bytes) {
  for (const Kernel& kernel : kKernels) {
    if (name != kernel.name) continue;
    if (bytes != kernel.bytes) throw std::runtime_error("its struct is of another size");
    return run(kernel.run, blocks, threads, shared, arguments);
  }
  throw std::runtime_error("there is no such kernel");
}

}  // namespace

Place& place() { return team().here; }

void wait_for_block() { leave(State::kAtBlock); }

uint32_t exchange(uint32_t mine, unsigned partner) {
  Fiber& fiber = team().current();
  const unsigned turn = fiber.exchanges++ % 2;
  fiber.brought[turn] = mine;
  leave(State::kAtWarp);
  return team().fibers[partner]->brought[turn];
}

}  // namespace emulation

extern "C" {

// Runs a kernel as a GPU would. Returns null or an error message.
char* dflash_emulate(const char* name, uint32_t blocks, uint32_t threads, size_t shared,
                      const void* arguments, size_t bytes) {
  try {
    emulation::find_and_run(name, blocks, threads, shared, arguments, bytes);
    return nullptr;
  } catch (const std::exception& caught) {
    return ::strdup(caught.what());
  }
}

// A kernel's name and struct size in bytes; null after the last.
const char* dflash_emulated_kernel(size_t index, size_t* bytes) {
  if (index >= std::size(emulation::kKernels)) return nullptr;
  *bytes = emulation::kKernels[index].bytes;
  return emulation::kKernels[index].name;
}
}
