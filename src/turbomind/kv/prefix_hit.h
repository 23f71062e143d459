#pragma once

#include <cstdint>
#include <vector>

#include "turbomind/kv/layer_group.h"

namespace turbomind {

// The part of a trie lookup from which a sequence can start.
struct PrefixHit {
  int64_t num_blocks = 0;  // blocks before the sequence's first query
  // num_blocks if a 16-bit copy and a quantized copy were interchangeable and no checkpoint missing
  int64_t num_found = 0;
};

// Finds the longest usable hit. `path` holds block ids by block and pool, -1 if the pool has none
// (BlockTrie::Find).
//
// Consider a query at position n · block_seq_len. A hit of n blocks needs a 16-bit copy of every
// block that this query reads as 16-bit, and a quantized copy of every block that it reads as
// quantized. If this query is the first to read a block as quantized, the 16-bit copy suffices,
// because the first step quantizes it. With recurrent layers, the query also needs the checkpoint
// of block n - 1, in pool `checkpoint_pool` (-1: there are none).
PrefixHit FindPrefixHit(const std::vector<LayerGroup>& groups,
                        const std::vector<std::vector<int>>& path, int checkpoint_pool = -1);

}  // namespace turbomind
