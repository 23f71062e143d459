#pragma once

#include <algorithm>
#include <cstdint>

#include "turbomind/core/ceil_div.h"
#include "turbomind/core/function_ref.h"
#include "turbomind/core/thread_pool.h"

namespace turbomind {

inline constexpr int64_t kItemsPerThread = 8;  // work items, so that a slow core costs little
// Below this many values, waking a worker costs more than the work itself.
inline constexpr int64_t kMinParallelValues = 16384;

// Calls fn(begin, end) for chunks of rows in parallel, or once for all rows if there is little
// work.
inline void ForRows(ThreadPool& pool, int num_rows, int64_t values_per_row,
                    FunctionRef<void(int begin, int end)> fn) {
  if (num_rows * values_per_row < kMinParallelValues || num_rows < 2) {
    fn(0, num_rows);
    return;
  }
  const int chunk =
      static_cast<int>(std::max<int64_t>(1, num_rows / (pool.num_threads() * kItemsPerThread)));
  pool.ParallelFor(CeilDiv(num_rows, chunk), [&](int64_t item, int) {
    const int begin = static_cast<int>(item) * chunk;
    fn(begin, std::min(num_rows, begin + chunk));
  });
}

}  // namespace turbomind
