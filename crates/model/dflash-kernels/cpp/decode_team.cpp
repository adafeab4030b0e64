// The thread team of `decode.cpp`, and the selection of its copy.
//
// A pass over a small model takes under a millisecond and synchronises forty times, so threads
// spin. libgomp's threads must not spin here, since they share the machine with servers. Spinning
// is bounded: between passes a thread that waits too long sleeps, within a pass it yields. If a
// thread is descheduled, the rest of the pass and the next passes run on the caller's thread alone,
// since every barrier with such a thread costs a time slice. Threads that read a large model's
// weights drift apart by milliseconds, so the threshold for "descheduled" grows with the pass.
// Results do not depend on the number of threads.
#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <system_error>
#include <thread>

#include "decode.h"
#include "level.h"

namespace {

// About 15 ns each, 0.2 ms in total: many times longer than running threads wait for each other, or
// than a wake-up takes.
constexpr int kSpins = 12000;
// Between passes: 300 us, enough for the decoder's work there.
constexpr int kIdleSpins = 20000;
// Passes that the caller runs alone after a delayed one; doubled at each repetition.
constexpr int kFewestAlone = 8, kMostAlone = 1024;

inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("isb" ::: "memory");
#endif
}

}  // namespace

// Whether a thread awaited for `waited` ns was descheduled, in a pass that had run for `before` ns:
// a running thread may have twice the work of another.
extern "C" int32_t dflash_decode_is_late(int64_t waited, int64_t before) { return waited > before; }

namespace {

inline int64_t nanoseconds() {
  return std::chrono::nanoseconds(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// Spins until `is_over`. After `kSpins` it checks for a descheduled thread, and if so marks the
// pass as late.
template <typename Over>
inline void await(DflashBarrier* barrier, const Over& is_over) {
  for (int spins = 0; spins < kSpins; ++spins) {
    if (is_over()) return;
    pause();
  }
  const int64_t since = nanoseconds();
  while (!is_over()) {
    if (dflash_decode_is_late(nanoseconds() - since, since - barrier->began) != 0)
      __atomic_store_n(&barrier->late, 1, __ATOMIC_RELAXED);
    std::this_thread::yield();
  }
}

using Body = void (*)(const void*, int64_t, int64_t, DflashBarrier*);

// Passes that one thread ran instead of several because of an earlier late thread.
std::atomic<int64_t> passes_alone{0};

class Team {
 public:
  void run(Body body, const void* work, int64_t threads) {
    std::unique_lock<std::mutex> only(busy_, std::try_to_lock);
    if (threads <= 1 || !only.owns_lock() || alone_ > 0) {
      if (only.owns_lock() && alone_ > 0) {
        --alone_;
        passes_alone.fetch_add(1, std::memory_order_relaxed);
      }
      DflashBarrier none{};
      none.threads = 1;
      body(work, 0, 1, &none);
      return;
    }
    hire(threads - 1);
    body_ = body;
    work_ = work;
    threads_ = std::min<int64_t>(threads, hired_ + 1);
    barrier_.threads = static_cast<uint32_t>(threads_);
    barrier_.late = 0;
    barrier_.began = nanoseconds();
    finished_.store(0, std::memory_order_relaxed);
    turn_.fetch_add(1);
    const bool slept = asleep_.load() > 0;
    if (slept) {
      std::lock_guard<std::mutex> lock(sleep_);
      wake_.notify_all();
    }
    body(work, 0, threads_, &barrier_);
    await_workers();
    // A late thread that had to be woken says nothing about the machine's load.
    if (!slept) back_off(__atomic_load_n(&barrier_.late, __ATOMIC_RELAXED) != 0);
  }

 private:
  // Workers live until the process exits. If no more can be started, fewer do the work.
  void hire(int64_t workers) {
    for (; hired_ < workers; ++hired_) {
      try {
        std::thread([this, number = hired_ + 1, seen = turn_.load()] { serve(number, seen); })
            .detach();
      } catch (const std::system_error&) {
        return;
      }
    }
  }

  void serve(int64_t number, uint32_t seen) {
    for (;;) {
      await_turn(seen);
      ++seen;
      if (number < threads_) body_(work_, number, threads_, &barrier_);
      finished_.fetch_add(1, std::memory_order_release);
    }
  }

  void await_turn(uint32_t seen) {
    for (int spins = 0; spins < kIdleSpins; ++spins) {
      if (turn_.load(std::memory_order_acquire) != seen) return;
      pause();
    }
    std::unique_lock<std::mutex> lock(sleep_);
    asleep_.fetch_add(1);
    while (turn_.load() == seen) wait(lock);
    asleep_.fetch_sub(1);
  }

  // As `wake_.wait(lock)`, which GCC 12 and newer compile to a symbol that the libstdc++ of GCC 11 (RHEL 9,
  // Amazon Linux 2023) lacks.
  void wait(std::unique_lock<std::mutex>& lock) {
    pthread_cond_wait(wake_.native_handle(), lock.mutex()->native_handle());
  }

  void await_workers() {
    await(&barrier_, [this] { return finished_.load(std::memory_order_acquire) == hired_; });
  }

  void back_off(bool late) {
    penalty_ = late ? std::clamp(2 * penalty_, kFewestAlone, kMostAlone) : penalty_ / 2;
    if (late) alone_ = penalty_;
  }

  std::mutex busy_, sleep_;
  std::condition_variable wake_;
  alignas(64) std::atomic<uint32_t> turn_{0};
  alignas(64) std::atomic<int64_t> finished_{0};
  alignas(64) std::atomic<int> asleep_{0};
  Body body_ = nullptr;
  const void* work_ = nullptr;
  int64_t threads_ = 1, hired_ = 0;
  int alone_ = 0, penalty_ = 0;
  DflashBarrier barrier_{};
};

// Never destroyed: workers may still wait in it at process exit.
Team& team() {
  static Team* const team = new Team;
  return *team;
}

template <typename Work>
using Function = void (*)(const Work*, int64_t, int64_t, DflashBarrier*);

template <typename Work, Function<Work> function>
void erased(const void* work, int64_t thread, int64_t threads, DflashBarrier* barrier) {
  function(static_cast<const Work*>(work), thread, threads, barrier);
}

}  // namespace

extern "C" {

int64_t dflash_decode_passes_alone() { return passes_alone.load(std::memory_order_relaxed); }

int64_t dflash_barrier_wait(DflashBarrier* barrier) {
  if (barrier->threads == 1) return 1;
  const uint32_t turn = __atomic_load_n(&barrier->turn, __ATOMIC_ACQUIRE);
  if (__atomic_add_fetch(&barrier->arrived, 1, __ATOMIC_ACQ_REL) == barrier->threads) {
    __atomic_store_n(&barrier->arrived, 0, __ATOMIC_RELAXED);
    // The others wait, so only this thread accesses it now.
    if (__atomic_load_n(&barrier->late, __ATOMIC_RELAXED) != 0) barrier->threads = 1;
    const int64_t threads = barrier->threads;
    __atomic_store_n(&barrier->turn, turn + 1, __ATOMIC_RELEASE);
    return threads;
  }
  await(barrier, [=] { return __atomic_load_n(&barrier->turn, __ATOMIC_ACQUIRE) != turn; });
  return barrier->threads;
}

#if defined(__x86_64__)
#define DFLASH_CHOOSE(level, work, name)                                                    \
  level == DflashLevel::kAvx512bf16 ? erased<work, dflash_decode_##name##_avx512bf16>       \
  : level == DflashLevel::kAvx512   ? erased<work, dflash_decode_##name##_avx512>           \
  : level == DflashLevel::kAvx2     ? erased<work, dflash_decode_##name##_avx2>             \
                                    : erased<work, dflash_decode_##name##_baseline>
#elif defined(__aarch64__)
#define DFLASH_CHOOSE(level, work, name)                                                    \
  level == DflashLevel::kNeon ? erased<work, dflash_decode_##name##_neon>                   \
                              : erased<work, dflash_decode_##name##_baseline>
#else
#define DFLASH_CHOOSE(level, work, name) erased<work, dflash_decode_##name##_baseline>
#endif

#if defined(__x86_64__)
#define DFLASH_CALL(level, name)                         \
  (level == DflashLevel::kAvx512bf16 ? name##_avx512bf16 \
   : level == DflashLevel::kAvx512   ? name##_avx512     \
   : level == DflashLevel::kAvx2     ? name##_avx2       \
                                     : name##_baseline)
#elif defined(__aarch64__)
#define DFLASH_CALL(level, name) (level == DflashLevel::kNeon ? name##_neon : name##_baseline)
#else
#define DFLASH_CALL(level, name) name##_baseline
#endif

void dflash_decode_pass(DflashLevel level, const DflashPass* pass, int64_t threads) {
  team().run(DFLASH_CHOOSE(level, DflashPass, pass), pass, threads);
}

void dflash_decode_context(DflashLevel level, const DflashContext* context, int64_t threads) {
  team().run(DFLASH_CHOOSE(level, DflashContext, context), context, threads);
}

void dflash_decode_head(DflashLevel level, const DflashHead* head, int64_t threads) {
  team().run(DFLASH_CHOOSE(level, DflashHead, head), head, threads);
}

// Returns 0 without doing anything if libtorch is faster.
int64_t dflash_decode_product(DflashLevel level, const DflashProduct* product, int64_t threads) {
  if (DFLASH_CALL(level, dflash_product_takes)(product) == 0) return 0;
  team().run(DFLASH_CHOOSE(level, DflashProduct, product), product, threads);
  return 1;
}
}
