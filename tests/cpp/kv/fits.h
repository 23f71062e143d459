#pragma once

#include <cstdint>
#include <vector>

#include "turbomind/kv/kv_cache.h"
#include "turbomind/kv/pool_budget.h"

namespace turbomind::testing {

// Returns whether the cache's pools, when empty, hold one sequence of this length that is computed
// `chunk` tokens at a time.
inline bool Fits(const KvCache& cache, int64_t num_tokens, int64_t chunk) {
  std::vector<int64_t> blocks;
  for (int pool = 0; pool < cache.num_pools(); ++pool) {
    blocks.push_back(cache.num_blocks(pool));
  }
  return HoldSequence(cache.groups(), blocks, num_tokens, chunk);
}

}  // namespace turbomind::testing
