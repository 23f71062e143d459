#include "turbomind/core/thread_pool.h"

#if defined(__linux__)
#include <sched.h>
#endif

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

#include "turbomind/core/check.h"

namespace turbomind {
namespace {

using Clock = std::chrono::steady_clock;
using Job = FunctionRef<void(int64_t item, int worker)>;

// Longer than the serial part between two ops of a step, and about the cost of falling asleep and
// being woken. Much shorter than a time slice.
constexpr std::chrono::microseconds kMaxSpinning{100};
constexpr int kSpinsPerLook = 16;  // between two reads of the clock

void Pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#else
  std::this_thread::yield();
#endif
}

constexpr int kNoCore = -1;

// Returns the core that this thread runs on, or kNoCore if the system does not report it.
int CurrentCore() {
#if defined(__linux__)
  return sched_getcpu();
#else
  return kNoCore;
#endif
}

// Spins until `ready` and returns true. Returns false when time is up or when `is_hopeless(core)`.
// The clock also runs while the thread has lost its core, so spinning ends then, too.
template <class Ready, class IsHopeless>
bool SpinUntil(const Ready& ready, const IsHopeless& is_hopeless) {
  if (ready()) {
    return true;
  }
  const Clock::time_point end = Clock::now() + kMaxSpinning;
  do {
    const int core = CurrentCore();
    if (core != kNoCore && is_hopeless(core)) {
      return false;
    }
    for (int i = 0; i < kSpinsPerLook; ++i) {
      if (ready()) {
        return true;
      }
      Pause();
    }
  } while (Clock::now() < end);
  return false;
}

// The core on which a thread last began to run items; kNoCore while it has no items.
struct alignas(64) Place {
  std::atomic<int> core = kNoCore;
};

}  // namespace

// The protocol uses two counters. A thread decrements `unclaimed` to claim an item. Only a thread
// with a claim reads the job, and the job changes only when `unfinished` is 0. A thread reports all
// items that it has run once, when no item is left. A worker that slept through several jobs can
// therefore never run an item twice or with an old function.
struct ThreadPool::Impl {
  explicit Impl(int num_threads) : places(static_cast<size_t>(num_threads)) {
    try {
      for (int i = 1; i < num_threads; ++i) {
        workers.emplace_back([this, i] { WorkerLoop(i); });
      }
    } catch (const std::system_error& error) {
      const size_t started = workers.size() + 1;
      Stop();
      throw InvalidArgument("The system cannot start " + std::to_string(num_threads) +
                            " threads; it allows " + std::to_string(started) + " (" + error.what() +
                            "). Use fewer (--num-threads).");
    } catch (...) {
      Stop();
      throw;
    }
  }

  ~Impl() { Stop(); }

  void Stop() {
    stop.store(true);
    { const std::lock_guard lock(mutex); }
    work.notify_all();
    for (std::thread& worker : workers) {
      worker.join();
    }
  }

  bool HasWork() const { return unclaimed.load() > 0 || stop.load(); }

  void RunItems(int worker) {
    Place& place = places[static_cast<size_t>(worker)];
    int64_t num_run = 0;
    // The check before the claim keeps idle threads from decrementing the counter far below 0.
    while (unclaimed.load(std::memory_order_relaxed) > 0) {
      const int64_t left = unclaimed.fetch_sub(1, std::memory_order_acquire);
      if (left <= 0) {
        break;
      }
      if (num_run++ == 0) {
        place.core.store(CurrentCore(), std::memory_order_relaxed);
      }
      (*job)(num_items - left, worker);
    }
    if (num_run == 0) {
      return;
    }
    if (worker != 0) {  // the caller's place stays set because idle workers read it
      place.core.store(kNoCore, std::memory_order_relaxed);
    }
    if (unfinished.fetch_sub(num_run) == num_run && caller_sleeps.load()) {
      const std::lock_guard lock(mutex);
      done.notify_one();
    }
  }

  void WorkerLoop(int worker) {
    const auto has_work = [this] { return HasWork(); };
    const auto is_callers = [this](int core) {
      return places[0].core.load(std::memory_order_relaxed) == core;
    };
    while (!stop.load()) {
      if (!SpinUntil(has_work, is_callers)) {
        std::unique_lock lock(mutex);
        sleepers.fetch_add(1);  // before the last check of the counters, see Run
        work.wait(lock, has_work);
        sleepers.fetch_sub(1);
      }
      RunItems(worker);
    }
  }

  void Run(int64_t items, const Job& function) {
    job = &function;
    num_items = items;
    unfinished.store(items, std::memory_order_relaxed);
    unclaimed.store(items);     // publishes the job
    if (sleepers.load() > 0) {  // a worker missed here sees `unclaimed` before it sleeps
      { const std::lock_guard lock(mutex); }
      work.notify_all();
    }
    RunItems(0);
    const auto finished = [this] { return unfinished.load() == 0; };
    const auto is_workers = [this](int core) {
      return std::any_of(places.begin() + 1, places.end(), [core](const Place& place) {
        return place.core.load(std::memory_order_relaxed) == core;
      });
    };
    if (!SpinUntil(finished, is_workers)) {
      std::unique_lock lock(mutex);
      caller_sleeps.store(true);
      done.wait(lock, finished);
      caller_sleeps.store(false);
    }
  }

  const Job* job = nullptr;
  int64_t num_items = 0;
  alignas(64) std::atomic<int64_t> unclaimed = 0;
  alignas(64) std::atomic<int64_t> unfinished = 0;
  alignas(64) std::atomic<int> sleepers = 0;
  std::atomic<bool> caller_sleeps = false;
  std::atomic<bool> stop = false;
  std::mutex mutex;
  std::condition_variable work;
  std::condition_variable done;
  std::vector<Place> places;  // by worker
  std::vector<std::thread> workers;
};

ThreadPool::ThreadPool(int num_threads) {
  if (num_threads < 1 || num_threads > 1024) {
    throw InvalidArgument("num_threads",
                          "is " + std::to_string(num_threads) + ". It must be 1 to 1024.");
  }
  impl_ = std::make_unique<Impl>(num_threads);
}

ThreadPool::~ThreadPool() = default;

int ThreadPool::num_threads() const { return static_cast<int>(impl_->workers.size()) + 1; }

void ThreadPool::ParallelFor(int64_t num_items, FunctionRef<void(int64_t item, int worker)> fn) {
  if (num_items == 1 || impl_->workers.empty()) {
    for (int64_t item = 0; item < num_items; ++item) {
      fn(item, 0);
    }
  } else if (num_items > 1) {
    impl_->Run(num_items, fn);
  }
}

}  // namespace turbomind
