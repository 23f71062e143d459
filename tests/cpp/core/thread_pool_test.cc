#include "turbomind/core/thread_pool.h"

#include <doctest/doctest.h>

#include <atomic>
#include <chrono>
#include <set>
#include <thread>
#include <vector>

#include "turbomind/core/check.h"

namespace turbomind {
namespace {

// Runs every item once on workers that are alone under their number.
void CheckLoop(ThreadPool& pool, int64_t num_items) {
  std::vector<int> runs(static_cast<size_t>(num_items), 0);  // not atomic: TSan sees a double claim
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

TEST_CASE("many short loops, one after the other") {
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

TEST_CASE("workers that fell asleep wake up") {
  ThreadPool pool(4);
  for (int loop = 0; loop < 20; ++loop) {
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
    CheckLoop(pool, 50);
  }
}

TEST_CASE("a worker that is held up delays only the item it holds") {
  ThreadPool pool(2);
  std::atomic<bool> held = false;
  std::atomic<int> others = 0;
  pool.ParallelFor(101, [&](int64_t, int) {
    if (!held.exchange(true)) {
      // Ends only when the other thread has run all other items meanwhile.
      while (others.load() < 100) {
        std::this_thread::yield();
      }
    } else {
      ++others;
    }
  });
  CHECK(others == 100);
}

TEST_CASE("a caller that waits long for a worker sleeps and is woken") {
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

TEST_CASE("correct beside busy threads that take the cores away") {
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

TEST_CASE("the number of threads is checked") {
  CHECK_THROWS_AS(ThreadPool(0), InvalidArgument);
  CHECK_THROWS_AS(ThreadPool(-3), InvalidArgument);
  CHECK_THROWS_AS(ThreadPool(100000), InvalidArgument);
}

}  // namespace
}  // namespace turbomind
