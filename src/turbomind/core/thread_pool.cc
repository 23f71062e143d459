#include "turbomind/core/thread_pool.h"

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "turbomind/core/check.h"

namespace turbomind {
namespace {

// About 0.1 ms: longer than the serial part between two ops of a step, much shorter than a time
// slice.
constexpr int kSpins = 8000;

void Pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#else
  std::this_thread::yield();
#endif
}

// True as soon as `ready` is; false after the spins.
template <class Ready>
bool SpinUntil(const Ready& ready) {
  for (int i = 0; i < kSpins; ++i) {
    if (ready()) {
      return true;
    }
    Pause();
  }
  return false;
}

}  // namespace

// The whole protocol is two counters. `unclaimed_` is taken down by one to claim an item; only a
// thread that holds a claim reads the job, and the job changes only when `unfinished_` is 0. So a
// worker that slept through several jobs can never run an item twice or with an old function.
struct ThreadPool::Impl {
  explicit Impl(int num_threads) {
    for (int i = 1; i < num_threads; ++i) {
      workers.emplace_back([this, i] { WorkerLoop(i); });
    }
  }

  ~Impl() {
    stop.store(true);
    { const std::lock_guard lock(mutex); }
    work.notify_all();
    for (std::thread& worker : workers) {
      worker.join();
    }
  }

  bool HasWork() const { return unclaimed.load() > 0 || stop.load(); }

  void RunItems(int worker) {
    int64_t left = unclaimed.load();
    while (left > 0) {
      if (!unclaimed.compare_exchange_weak(left, left - 1)) {
        continue;
      }
      (*fn)(num_items - left, worker);
      if (unfinished.fetch_sub(1) == 1 && caller_sleeps.load()) {
        const std::lock_guard lock(mutex);
        done.notify_one();
      }
      left = unclaimed.load();
    }
  }

  void WorkerLoop(int worker) {
    while (!stop.load()) {
      if (!SpinUntil([this] { return HasWork(); })) {
        std::unique_lock lock(mutex);
        sleepers.fetch_add(1);  // before the last look at the counters, see Run
        work.wait(lock, [this] { return HasWork(); });
        sleepers.fetch_sub(1);
      }
      RunItems(worker);
    }
  }

  void Run(int64_t items, const std::function<void(int64_t, int)>& function) {
    fn = &function;
    num_items = items;
    unfinished.store(items);
    unclaimed.store(items);     // publishes the job
    if (sleepers.load() > 0) {  // a worker that we miss here sees `unclaimed` before it sleeps
      { const std::lock_guard lock(mutex); }
      work.notify_all();
    }
    RunItems(0);
    const auto finished = [this] { return unfinished.load() == 0; };
    if (!SpinUntil(finished)) {
      std::unique_lock lock(mutex);
      caller_sleeps.store(true);
      done.wait(lock, finished);
      caller_sleeps.store(false);
    }
  }

  const std::function<void(int64_t, int)>* fn = nullptr;
  int64_t num_items = 0;
  alignas(64) std::atomic<int64_t> unclaimed = 0;
  alignas(64) std::atomic<int64_t> unfinished = 0;
  alignas(64) std::atomic<int> sleepers = 0;
  std::atomic<bool> caller_sleeps = false;
  std::atomic<bool> stop = false;
  std::mutex mutex;
  std::condition_variable work;
  std::condition_variable done;
  std::vector<std::thread> workers;
};

ThreadPool::ThreadPool(int num_threads) {
  if (num_threads < 1 || num_threads > 1024) {
    throw InvalidArgument("number of threads: got " + std::to_string(num_threads) +
                          ", wanted 1 to 1024");
  }
  impl_ = std::make_unique<Impl>(num_threads);
}

ThreadPool::~ThreadPool() = default;

int ThreadPool::num_threads() const { return static_cast<int>(impl_->workers.size()) + 1; }

void ThreadPool::ParallelFor(int64_t num_items,
                             const std::function<void(int64_t item, int worker)>& fn) {
  if (num_items == 1 || impl_->workers.empty()) {
    for (int64_t item = 0; item < num_items; ++item) {
      fn(item, 0);
    }
  } else if (num_items > 1) {
    impl_->Run(num_items, fn);
  }
}

}  // namespace turbomind
