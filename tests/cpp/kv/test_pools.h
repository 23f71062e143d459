#pragma once

// Pools in plain memory and their SequenceManager, for tests that compute nothing.

#include <doctest/doctest.h>

#include <algorithm>
#include <cstring>
#include <numeric>
#include <vector>

#include "kv/memory_device.h"
#include "turbomind/kv/sequence_manager.h"

namespace turbomind::testing {

inline constexpr int kLength = 16;

inline std::vector<int32_t> Tokens(int n, int first = 0) {
  std::vector<int32_t> tokens(static_cast<size_t>(n));
  std::iota(tokens.begin(), tokens.end(), first);
  return tokens;
}

inline KvCacheConfig PoolConfig(const std::vector<int>& windows, int block_seq_len = kLength,
                                PrecisionWindowTokens window16 = {}) {
  KvCacheConfig config =
      MakeKvCacheConfig(windows, KvCacheMode::kFp4Nv, 1, 16, block_seq_len, DataType::kBFloat16);
  config.window16 = window16;
  return config;
}

struct Pools {
  explicit Pools(std::vector<int> windows, std::vector<int64_t> num_blocks, bool prefix = true)
      : Pools(PoolConfig(windows), num_blocks, prefix) {}
  Pools(const KvCacheConfig& config, std::vector<int64_t> num_blocks, bool prefix = true)
      : cache(device, config, num_blocks), manager(cache, prefix) {
    for (int group = 0; group < cache.num_groups(); ++group) {
      std::memset(cache.GetScaleBlockPtr(group, 0), 1,
                  static_cast<size_t>(cache.scale_bytes(group)));
    }
  }

  // Writes the remaining tokens of a sequence in chunks. Returns false if the blocks run out.
  bool Compute(uint64_t id, const std::vector<int32_t>& tokens, int64_t chunk = 1000) {
    const auto total = static_cast<int64_t>(tokens.size());
    while (manager.num_written(id) < total) {
      const int64_t next = std::min(total, manager.num_written(id) + chunk);
      if (!manager.AllocateDataAndScaleBlocks(id, next)) {
        return false;
      }
      manager.Commit(id, std::span(tokens).first(static_cast<size_t>(next)));
      manager.CheckIntegrity();
    }
    return true;
  }

  void RunAndFree(uint64_t id, const std::vector<int32_t>& tokens, int64_t chunk = 1000) {
    manager.Create(id, tokens);
    REQUIRE(Compute(id, tokens, chunk));
    manager.FreeDataAndScaleBlocks(id);
    manager.CheckIntegrity();
  }

  MemoryDevice device;
  KvCache cache;
  SequenceManager manager;
};

}  // namespace turbomind::testing
