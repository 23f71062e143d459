#pragma once

#include <cstdint>
#include <memory>

#include "turbomind/core/function_ref.h"

namespace turbomind {

// A fixed set of workers that run loops of independent items.
//
// Invariants:
//  1. Workers take items dynamically from one atomic counter. A worker that loses its core delays
//     at most the item that it holds.
//  2. The caller also runs items. A waiting thread spins for a bounded time, then sleeps. It does
//     not spin for a thread on its own core, because that thread could not run meanwhile.
//  3. `worker` in the callback is in [0, num_threads) and unique among concurrent calls.
//  4. ParallelFor allocates nothing.
// Only one thread at a time may call ParallelFor. Items must not throw.
class ThreadPool {
 public:
  explicit ThreadPool(int num_threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int num_threads() const;

  // Runs fn(item, worker) for every item in [0, num_items). Returns when all are done.
  void ParallelFor(int64_t num_items, FunctionRef<void(int64_t item, int worker)> fn);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace turbomind
