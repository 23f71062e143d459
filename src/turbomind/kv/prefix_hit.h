#pragma once

#include <cstdint>
#include <vector>

#include "turbomind/kv/layer_group.h"

namespace turbomind {

// How much of what the trie has found a sequence can start from.
struct PrefixHit {
  int64_t num_blocks = 0;  // the sequence's first query comes after them
  int64_t num_found = 0;   // the same if a 16-bit copy and a quantized one were worth the same
};

// `path` holds block ids by block and pool, -1 where a pool has none (BlockTrie::Find). A hit of n
// blocks has, of those that a query at position n · block_seq_len sees, the 16-bit ones 16-bit and
// the quantized ones quantized; of a block that this query is the first to see quantized, the
// 16-bit one will do, since it is quantized in the first step. The longest such n is taken.
PrefixHit FindPrefixHit(const std::vector<LayerGroup>& groups,
                        const std::vector<std::vector<int>>& path);

}  // namespace turbomind
