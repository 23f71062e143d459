#include "turbomind/core/thread_pool.h"

#include <doctest/doctest.h>
#include <sched.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <ctime>
#include <memory>
#include <set>
#include <thread>
#include <vector>

#include "sanitized_sample.h"
#include "turbomind/core/check.h"

namespace turbomind {
namespace {

// Checks that every item runs once and that no two threads share a worker number.
void CheckLoop(ThreadPool& pool, int64_t num_items) {
  std::vector<int> runs(static_cast<size_t>(num_items),
                        0);  // not atomic, so TSan reports a double claim
  std::vector<std::atomic<int>> inside(static_cast<size_t>(pool.num_threads()));
  std::atomic<int> bad = 0;
  pool.ParallelFor(num_items, [&](int64_t item, int worker) {
    if (worker < 0 || worker >= pool.num_threads()) {
      ++bad;
      return;
    }
    bad += inside[static_cast<size_t>(worker)].fetch_add(1) != 0;
    ++runs[static_cast<size_t>(item)];
    inside[static_cast<size_t>(worker)].fetch_sub(1);
  });
  CHECK(bad == 0);
  CHECK(runs == std::vector<int>(static_cast<size_t>(num_items), 1));
}

TEST_CASE("every item runs exactly once, for any number of threads and items") {
  for (const int num_threads : {1, 2, 3, 8}) {
    ThreadPool pool(num_threads);
    CHECK(pool.num_threads() == num_threads);
    for (const int64_t num_items : {0, 1, 2, 7, 64, 1000}) {
      CheckLoop(pool, num_items);
    }
  }
}

TEST_CASE("many short loops run one after the other") {
  ThreadPool pool(3);
  int64_t sum = 0;
  for (int loop = 0; loop < 20000; ++loop) {
    int64_t items[5] = {};
    pool.ParallelFor(5, [&](int64_t item, int) { items[item] = item + loop; });
    for (const int64_t value : items) {
      sum += value;
    }
  }
  CHECK(sum == 20000 * 10 + 5 * (int64_t{19999} * 20000 / 2));
}

TEST_CASE("sleeping workers wake up for the next loop") {
  ThreadPool pool(4);
  for (int loop = 0; loop < 20; ++loop) {
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
    CheckLoop(pool, 50);
  }
}

TEST_CASE("a stalled worker delays only its own item") {
  ThreadPool pool(2);
  std::atomic<bool> held = false;
  std::atomic<int> others = 0;
  pool.ParallelFor(101, [&](int64_t, int) {
    if (!held.exchange(true)) {
      // Returns only after the other thread has run all other items.
      while (others.load() < 100) {
        std::this_thread::yield();
      }
    } else {
      ++others;
    }
  });
  CHECK(others == 100);
}

TEST_CASE("a caller that waits long for a worker sleeps and wakes up") {
  ThreadPool pool(2);
  std::atomic<int> arrived = 0;
  pool.ParallelFor(2, [&](int64_t, int worker) {
    ++arrived;
    while (arrived.load() < 2) {  // one item each
      std::this_thread::yield();
    }
    if (worker != 0) {
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
    }
  });
  CHECK(arrived == 2);
}

TEST_CASE("loops stay correct while busy threads occupy all cores") {
  std::atomic<bool> stop = false;
  std::vector<std::thread> busy;
  for (unsigned i = 0; i < std::thread::hardware_concurrency(); ++i) {
    busy.emplace_back([&] {
      while (!stop.load(std::memory_order_relaxed)) {
      }
    });
  }
  ThreadPool pool(static_cast<int>(std::thread::hardware_concurrency()) + 1);
  for (int loop = 0; loop < 200; ++loop) {
    CheckLoop(pool, 40);
  }
  stop = true;
  for (std::thread& thread : busy) {
    thread.join();
  }
}

// Returns the CPU seconds of this process. Unlike wall time, they do not grow on a busy machine.
double CpuSeconds() {
  timespec now{};
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

// Pins this thread, and the threads that it creates, to the first core that it may use.
class OneCore {
 public:
  OneCore() {
    CHECK(sched_getaffinity(0, sizeof(before_), &before_) == 0);
    int core = 0;
    while (!CPU_ISSET(core, &before_)) {
      ++core;
    }
    CPU_ZERO(&one_);
    CPU_SET(core, &one_);
    CHECK(sched_setaffinity(0, sizeof(one_), &one_) == 0);
  }
  ~OneCore() { sched_setaffinity(0, sizeof(before_), &before_); }
  OneCore(const OneCore&) = delete;
  OneCore& operator=(const OneCore&) = delete;

 private:
  cpu_set_t before_;
  cpu_set_t one_;
};

// A process that loops forever. It inherits the cores of this thread.
class BusyProcess {
 public:
  BusyProcess() {
    char shell[] = "/bin/sh";
    char flag[] = "-c";
    char loop[] = "while :; do :; done";
    char* const arguments[] = {shell, flag, loop, nullptr};
    CHECK(posix_spawn(&id_, shell, nullptr, nullptr, arguments, environ) == 0);
  }
  ~BusyProcess() {
    kill(id_, SIGKILL);
    waitpid(id_, nullptr, 0);
  }
  BusyProcess(const BusyProcess&) = delete;
  BusyProcess& operator=(const BusyProcess&) = delete;

 private:
  pid_t id_ = -1;
};

// Computes for a few microseconds. The compiler cannot remove the work.
void Work() {
  volatile uint32_t value = 1;
  for (int i = 0; i < 3000; ++i) {
    value = value * 1664525u + 1013904223u;
  }
}

constexpr int kItems = 16;
constexpr int kLoops = testing::kSanitized ? 100 : 1000;

// Returns the CPU seconds of many short loops, as an engine step runs them.
double CpuSecondsOfLoops(int num_threads) {
  ThreadPool pool(num_threads);
  const double begin = CpuSeconds();
  std::atomic<int64_t> num_run = 0;
  for (int loop = 0; loop < kLoops; ++loop) {
    pool.ParallelFor(kItems, [&](int64_t, int) {
      Work();
      num_run.fetch_add(1, std::memory_order_relaxed);
    });
  }
  CHECK(num_run == int64_t{kLoops} * kItems);
  return CpuSeconds() - begin;
}

// Returns the minimum of five runs, because other load on the machine can only add time.
double MinCpuSecondsOfLoops(int num_threads) {
  double seconds = CpuSecondsOfLoops(num_threads);
  for (int i = 0; i < 4; ++i) {
    seconds = std::min(seconds, CpuSecondsOfLoops(num_threads));
  }
  return seconds;
}

// Threads that spin for each other's time slices on one core would cost a multiple.
constexpr double kMaxOverhead = 1.4;

TEST_CASE("several threads on one core cost little more CPU than one thread") {
  const OneCore one_core;
  const double alone = MinCpuSecondsOfLoops(1);
  for (const int num_threads : {2, 4}) {
    CAPTURE(num_threads);
    const double shared = MinCpuSecondsOfLoops(num_threads);
    CAPTURE(shared / alone);
    CHECK(shared < kMaxOverhead * alone);
  }
}

TEST_CASE("loops finish at the same CPU cost while a process keeps their core busy") {
  const OneCore one_core;
  const double alone = MinCpuSecondsOfLoops(1);
  const BusyProcess busy;
  const double shared = MinCpuSecondsOfLoops(2);
  CAPTURE(shared / alone);
  CHECK(shared < kMaxOverhead * alone);
}

// The pool's threads may run on any core. The busy process occupies one of them.
TEST_CASE("a process that occupies one core costs the pool no extra CPU") {
  const double alone = MinCpuSecondsOfLoops(1);
  std::unique_ptr<BusyProcess> busy;
  {
    const OneCore one_core;
    busy = std::make_unique<BusyProcess>();
  }
  const double shared = MinCpuSecondsOfLoops(static_cast<int>(std::thread::hardware_concurrency()));
  CAPTURE(shared / alone);
  CHECK(shared < 2 * kMaxOverhead * alone);
}

TEST_CASE("idle workers sleep") {
  ThreadPool pool(4);
  pool.ParallelFor(8, [](int64_t, int) { Work(); });
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  const double begin = CpuSeconds();
  std::this_thread::sleep_for(std::chrono::milliseconds(200));
  CHECK(CpuSeconds() - begin < 0.02);
}

TEST_CASE("the pool rejects invalid numbers of threads") {
  CHECK_THROWS_AS(ThreadPool(0), InvalidArgument);
  CHECK_THROWS_AS(ThreadPool(-3), InvalidArgument);
  CHECK_THROWS_AS(ThreadPool(100000), InvalidArgument);
}

}  // namespace
}  // namespace turbomind
